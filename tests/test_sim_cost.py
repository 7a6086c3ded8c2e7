"""What ops cost, by hand on a machine of round numbers; one term at a time; measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from strategies import MODEL, WORKLOAD, round_profile

from schedules import policies, presets
from schedules.errors import InputError
from schedules.flops import attention_flops, forward_flops, op_flops
from schedules.hazards import minimal_waits
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.traffic import product_bytes
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import (
    CORES,
    D2H,
    DRAM,
    DUPLEX,
    GPU,
    H2D,
    HBM,
    NVME_BOTH,
    NVME_READ,
    NVME_WRITE,
    Demand,
    MissingCost,
    Terms,
    demands,
    issue_kind,
)
from sim.engine import simulate
from sim.hardware import override
from sim.machine import NUMBERS, TIMED, HardwareProfile, Measured, Table
from sim.signature import is_timed, signature, timed

MB = 10**6
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**9)


def schedule_of(*ops: Op, workload: Workload = WORKLOAD) -> Schedule:
    """A schedule whose buffers are named after their tier."""
    return Schedule(
        ops=ops,
        buffers=tuple(Buffer(name=tier, tier=tier, nbytes=1) for tier in Tier),
        waits=minimal_waits(ops),
        model=MODEL,
        workload=workload,
        policy="bare",
    )


def demand(op: Op, profile: HardwareProfile, terms: Terms = Terms(), workload: Workload = WORKLOAD) -> Demand:
    return demands(schedule_of(op, workload=workload), profile, terms)[0]


def copy(source: Tier, target: Tier, nbytes: int, stream: Stream = Stream.H2D) -> Op:
    return Op(
        name="P",
        kind=Kind.PREFETCH,
        phase=Phase.COPY,
        stream=stream,
        reads=(Access(source, "w.0"),),
        writes=(Access(target, "w.0"),),
        nbytes=nbytes,
    )


def compute(
    phase: Phase = Phase.LOSS, *, layer: int = MODEL.head, writes: str = "", reads: str = "", **amounts: int
) -> Op:
    return Op(
        name="F",
        kind=Kind.COMPUTE,
        phase=phase,
        stream=Stream.COMPUTE,
        layer=layer,
        reads=(Access(Tier.DEVICE, reads),) if reads else (),
        writes=(Access(Tier.DEVICE, writes),) if writes else (),
        **amounts,
    )


def update(stream: Stream, phase: Phase = Phase.ADAM, **amounts: int) -> Op:
    return Op(name="U", kind=Kind.UPDATE, phase=phase, stream=stream, layer=0, **amounts)


def test_a_copy_to_the_device() -> None:
    found = demand(copy(Tier.HOST, Tier.DEVICE, 9 * MB), round_profile())
    assert found.duration_ns == 202_000  # 2 us and 10 MB (half a megabyte's worth of start included) at 50 GB/s
    assert found.issue_ns == 10_000
    assert found.usage == {
        H2D: 1.0,
        DUPLEX: pytest.approx(112.5 / 202),  # 9 MB at 80 GB/s
        DRAM: pytest.approx(45 / 202),  # 9 MB at 200 GB/s
    }


def test_the_tiers_of_its_buffers_decide_a_copys_way_not_its_stream() -> None:
    found = demand(copy(Tier.DEVICE, Tier.HOST, 7 * MB, stream=Stream.H2D), round_profile())
    assert found.duration_ns == 202_000  # 8 MB at 40 GB/s
    assert found.usage.keys() == {D2H, DUPLEX, DRAM}


def test_without_its_term_a_copy_goes_at_full_bandwidth() -> None:
    plain = Terms(size_dependent_bandwidth=False)
    assert demand(copy(Tier.HOST, Tier.DEVICE, 9 * MB), round_profile(), plain).duration_ns == 180_000


def test_copies_from_and_to_nvme() -> None:
    found = demand(copy(Tier.NVME, Tier.HOST, 4 * MB), round_profile())
    assert found.duration_ns == 1_100_000
    assert found.usage == {NVME_READ: 1.0, NVME_BOTH: pytest.approx(500 / 1100), DRAM: pytest.approx(20 / 1100)}
    found = demand(copy(Tier.HOST, Tier.NVME, 4 * MB), round_profile())
    assert found.duration_ns == 2_100_000
    assert found.usage == {NVME_WRITE: 1.0, NVME_BOTH: pytest.approx(1000 / 2100), DRAM: pytest.approx(20 / 2100)}


def test_a_copy_from_a_drive_to_the_device_has_the_latency_of_both() -> None:
    found = demand(copy(Tier.NVME, Tier.DEVICE, 4 * MB), round_profile())
    assert found.duration_ns == 1_352_000  # 100 us, 2 us, and 5 MB (the link's half size included) at 4 GB/s


@pytest.mark.parametrize(("both", "until_ns"), [("1", 2_000_000), ("1.6", 1_250_000), ("2", 1_000_000)])
def test_a_drive_that_reads_and_writes_at_once_is_slower_at_both(both: str, until_ns: int) -> None:
    """A millisecond of each: by turns that is two, and one where neither slows the other."""
    read = copy(Tier.NVME, Tier.HOST, 4 * MB, Stream.NVME_READ)
    write = replace(copy(Tier.HOST, Tier.NVME, 2 * MB, Stream.NVME_WRITE), name="O", kind=Kind.OFFLOAD)
    schedule = replace(schedule_of(read, write), waits=())
    profile = round_profile(f"nvme.both={both}fraction", "nvme.latency=0us", "issue.copy=0us")
    trace = simulate(schedule, profile, steps=1)
    assert trace.end_ns.tolist() == [until_ns, until_ns]


def test_a_schedule_for_nvme_needs_a_machine_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"keeps tensors on NVMe, and \w+ has none$"):
        demand(copy(Tier.NVME, Tier.HOST, MB), replace(round_profile(), nvme=None))


def test_a_copy_within_the_device_reads_and_writes_its_memory() -> None:
    found = demand(copy(Tier.DEVICE, Tier.DEVICE, 3 * MB), round_profile())
    assert (found.duration_ns, found.usage) == (3_000, {HBM: 1.0})  # 6 MB at 2 TB/s


def test_a_copy_that_host_memory_holds_up_occupies_that_instead_of_the_link() -> None:
    # without a GPU both ends are host memory: 40 GB/s of payload, less than the link's 50
    profile = round_profile("host.memory_bandwidth=80GB/s", "host.copy_threads=1cores")
    found = demand(copy(Tier.HOST, Tier.DEVICE, 9 * MB), profile)
    assert found.duration_ns == 252_000
    assert found.usage[DRAM] == 1.0
    assert found.usage[H2D] == pytest.approx(180 / 252)


def test_without_a_gpu_copies_and_compute_take_the_hosts_cores_and_memory() -> None:
    profile = round_profile("host.cores=8cores", "host.copy_threads=2cores", "host.compute_threads=6cores")
    found = demand(copy(Tier.HOST, Tier.DEVICE, 9 * MB), profile)
    assert found.usage[CORES] == 0.25
    assert found.usage[DRAM] == pytest.approx(90 / 202)  # read and written there
    found = demand(compute(nbytes=2 * MB), profile)
    assert found.duration_ns == 1_000
    assert found.usage == {GPU: 1.0, CORES: 0.75, DRAM: 1.0}  # 2 TB/s are more than the host's memory has
    assert demand(update(Stream.COMPUTE, nbytes=2 * MB), profile).usage == found.usage


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD])
def test_the_roofline_of_a_compute_op(phase: Phase) -> None:
    """What products move hides behind their FLOPs, or these behind that; what is pointwise takes its own time."""
    products = product_bytes(MODEL, 0, phase, WORKLOAD, output=False)
    op = compute(phase, layer=0, nbytes=products + 8 * 10**9)
    profile = round_profile("gpu.attention_efficiency=0.5fraction")  # as products, so that FLOPs are all alike
    assert demand(op, profile).duration_ns == pytest.approx(products / 2000 + 4 * 10**6, abs=1)
    found = demand(replace(op, flops=10**12), profile)
    assert found.duration_ns == pytest.approx(2 * 10**6 + 4 * 10**6, abs=1)
    assert (found.usage, found.issue_ns) == ({GPU: 1.0}, 100_000)


@pytest.mark.parametrize(("phase", "times"), [(Phase.FORWARD, 1), (Phase.RECOMPUTE, 1), (Phase.BACKWARD, 2)])
def test_attention_has_its_own_efficiency(phase: Phase, times: int) -> None:
    """Two products of it forward and four backward, which is twice the forward in all."""
    workload = Workload(micro_batch_size=2, seq_len=100)
    flops = times * forward_flops(MODEL, 0, workload)
    attention = times * 4 * 2 * (100 * 101 // 2) * MODEL.num_attention_heads * MODEL.head_dim
    op = compute(phase, layer=0, writes="x.0.0", flops=1000 * flops)
    expected = 1000 * ((flops - attention) / 500e12 + attention / 250e12) * 1e9
    assert demand(op, round_profile(), workload=workload).duration_ns == pytest.approx(expected, abs=1)


def test_attention_takes_as_long_where_a_recompute_has_no_output() -> None:
    workload = Workload(micro_batch_size=2, seq_len=100)
    attention = attention_flops(MODEL, 0, workload)
    flops = op_flops(MODEL, 0, Phase.RECOMPUTE, workload, output=False)
    op = compute(Phase.RECOMPUTE, layer=0, writes="s.0.0", flops=1000 * flops)
    expected = 1000 * ((flops - attention) / 500e12 + attention / 250e12) * 1e9
    assert demand(op, round_profile(), workload=workload).duration_ns == pytest.approx(expected, abs=1)


def test_attention_to_narrow_values_takes_as_long_as_to_wide_ones() -> None:
    """DeepSeek's are 128 wide beside keys of 192, and multiplied with zeros behind."""
    workload, model = Workload(micro_batch_size=2, seq_len=100), presets.load("deepseek-v2-lite")
    flops, keys, values = forward_flops(model, 0, workload), 16 * (128 + 64), 16 * 128
    pairs = 2 * 100 * 101 // 2
    op = compute(Phase.FORWARD, layer=0, writes="x.0.0", flops=flops)
    schedule = replace(schedule_of(op, workload=workload), model=model)
    products = flops - 2 * pairs * (keys + values)
    expected = (products / 500e12 + 2 * pairs * 2 * keys / 250e12) * 1e9
    (found,) = demands(schedule, round_profile())
    assert found.duration_ns == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("precision", "times", "peak"), [("bf16", 2, 500e12), ("fp32", 1, 50e12)])
def test_linear_attention_multiplies_in_tf32_at_half_the_rate(precision: str, times: int, peak: float) -> None:
    workload, model = Workload(micro_batch_size=2, seq_len=100, precision=precision), presets.load("qwen3.5-0.8b")
    flops, of_rule = forward_flops(model, 0, workload), attention_flops(model, 0, workload)
    op = compute(Phase.FORWARD, layer=0, writes="x.0.0", flops=flops)
    (found,) = demands(replace(schedule_of(op, workload=workload), model=model), round_profile())
    expected = ((flops - of_rule) / peak + times * of_rule / (peak / 2)) * 1e9
    assert found.duration_ns == pytest.approx(expected, abs=1)


def test_fp32_runs_at_its_own_peak() -> None:
    op, wide = compute(flops=10**12), replace(WORKLOAD, precision="fp32")
    assert demand(op, round_profile(), workload=wide).duration_ns == 20 * 10**6  # 50 TFLOP/s
    assert demand(op, round_profile()).duration_ns == 2 * 10**6


def test_an_update_on_the_host_is_memory_traffic() -> None:
    op = update(Stream.CPU, nbytes=10**9, params=5 * 10**7)
    found = demand(op, round_profile())
    assert (found.duration_ns, found.issue_ns) == (10**7, 20_000)  # 1 GB at half of 200 GB/s
    assert found.usage == {DRAM: 0.5}
    found = demand(op, round_profile("host.adam_params_per_s=10Gparams/s", "host.adam_threads=14cores"))
    assert found.duration_ns == 5 * 10**6
    assert found.usage == {DRAM: 1.0, CORES: 0.25}


def test_the_measured_optimizer_rate_is_for_the_optimizer_alone() -> None:
    op = update(Stream.CPU, Phase.ACCUMULATE, nbytes=10**9, params=5 * 10**7)
    assert demand(op, round_profile("host.adam_params_per_s=10Gparams/s")).duration_ns == 10**7


def test_the_optimizer_moves_no_more_than_memory_can() -> None:
    op = update(Stream.CPU, nbytes=22 * 10**9, params=10**9)
    slow, fast = (demand(op, round_profile(f"host.adam_params_per_s={rate}Gparams/s")) for rate in (1, 1000))
    assert slow.duration_ns == 10**9 and slow.usage[DRAM] == pytest.approx(0.11)
    assert fast.duration_ns == 110_000_000 and fast.usage[DRAM] == 1.0  # 22 GB at 200 GB/s


def test_memory_just_allocated_is_written_at_one_threads_pace() -> None:
    """250 MB of 1 GB of traffic into fresh pages at 2.5 GB/s: 100 ms, in which the DRAM is hardly used."""
    op = replace(update(Stream.CPU, Phase.ACCUMULATE, nbytes=10**9), fresh=25 * 10**7)
    slow = demand(op, round_profile("host.fresh_pages=2.5GB/s"))
    assert (slow.duration_ns, slow.usage) == (10**8, {DRAM: 0.05})
    unknown = replace(round_profile(), host=replace(round_profile().host, fresh_pages=None))
    assert demand(op, unknown).duration_ns == 10**7, "as any memory, where the pace is not known"
    assert demand(replace(op, fresh=0), round_profile("host.fresh_pages=2.5GB/s")).duration_ns == 10**7


def test_a_pass_that_was_timed_lasts_so_long_whatever_its_memory_is() -> None:
    schedule = policies.build("megatrain_released", MODEL, WORKLOAD, ROOM)
    op = next(op for op in schedule.ops if op.fresh and op.stream == Stream.CPU)
    times = Table(values=dict.fromkeys(timed(schedule).values(), 5e6), unit="ns", source="measured here")
    profile = replace(round_profile("host.fresh_pages=2.5GB/s"), mode="measured", measured=Measured(op_times=times))
    assert demands(schedule, profile)[schedule.index[op.name]].duration_ns == 5 * 10**6


def test_an_update_on_the_device_is_a_kernel() -> None:
    found = demand(update(Stream.COMPUTE, nbytes=2 * 10**9), round_profile())
    assert (found.duration_ns, found.usage, found.issue_ns) == (10**6, {GPU: 1.0}, 100_000)


def test_a_gpus_update_of_8_bit_moments_takes_instructions() -> None:
    op, coded = update(Stream.COMPUTE, nbytes=2 * 10**9, params=10**9), replace(WORKLOAD, precision="bf16_8bit")
    assert demand(op, round_profile(), workload=coded).duration_ns == 4_780_000  # 478 FLOP each at 100 TFLOP/s
    few = replace(op, params=10**7)
    assert demand(few, round_profile(), workload=coded).duration_ns == 10**6, "then memory is what it waits for"
    other = replace(op, phase=Phase.ACCUMULATE)
    assert demand(other, round_profile(), workload=coded).duration_ns == 10**6
    h200 = hardware.load("h200")
    assert op.params / demand(op, h200, workload=coded).duration_ns == pytest.approx(140, rel=0.002)  # Gparam/s


def test_the_hosts_optimizer_rate_is_not_the_devices() -> None:
    op = update(Stream.COMPUTE, nbytes=2 * 10**9, params=10**9)
    assert demand(op, round_profile("host.adam_params_per_s=1Gparams/s")).duration_ns == 10**6


def test_a_part_of_a_nanosecond_counts_as_a_whole_one() -> None:
    assert demand(update(Stream.CPU, nbytes=110), round_profile()).duration_ns == 2  # 110 B at half of 200 GB/s


def test_issuing_costs_what_the_profile_says_of_its_kind() -> None:
    profile = round_profile("issue.compute=3us", "issue.copy=5us", "issue.update=7us")
    for policy, kinds in (("resident", {"compute"}), ("streamed", {"compute", "copy", "update"})):
        schedule = policies.build(policy, MODEL, WORKLOAD, ROOM)
        assert {issue_kind(op) for op in schedule.ops} == kinds
        for op, demand in zip(schedule.ops, demands(schedule, profile, Terms()), strict=True):
            assert demand.issue_ns == {"compute": 3000, "copy": 5000, "update": 7000}[issue_kind(op)]


def test_the_host_wakes_up_after_it_has_waited() -> None:
    sync = Op(name="H", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.HOST, reads=(Access("device", "w.0"),))
    work = update(Stream.HOST, nbytes=100)
    blocking = replace(copy(Tier.HOST, Tier.DEVICE, MB), blocking=True)
    # program order: blocking copy, host waits, host works on its own, kernel
    found = demands(
        schedule_of(blocking, replace(sync, reads=(Access("nvme", "w.0"),)), work, compute()), round_profile()
    )
    assert [cost.issue_ns for cost in found] == [10_000, 30_000, 0, 100_000]
    loaded = replace(copy(Tier.HOST, Tier.DEVICE, MB), name="Q")
    found = demands(schedule_of(loaded, sync, compute()), round_profile())
    assert [cost.issue_ns for cost in found] == [10_000, 0, 130_000]
    assert [cost.wake_ns for cost in found] == [0, 0, 0]
    found = demands(schedule_of(loaded, sync, compute()), round_profile("issue.wake=50us"))
    assert [cost.wake_ns for cost in found] == [50_000, 0, 50_000]  # the host's own is in the issue of what follows
    assert (found[1].duration_ns, found[1].usage) == (0, {})
    found = demands(schedule_of(loaded, sync, compute()), round_profile(), Terms(issue=False))
    assert [cost.issue_ns for cost in found] == [0, 0, 0]


def test_a_signature_tells_apart_what_takes_different_time() -> None:
    ops = [
        compute(layer=0),
        compute(layer=0, writes="s.0.0"),
        compute(Phase.RECOMPUTE, layer=0),
        compute(Phase.BACKWARD, layer=0, writes="g.0"),
        compute(Phase.BACKWARD, layer=0, writes="g.0", reads="g.0"),
        compute(Phase.LOSS),
        update(Stream.CPU),
        update(Stream.COMPUTE),
    ]
    workloads = [
        WORKLOAD,
        replace(WORKLOAD, micro_batch_size=2),
        replace(WORKLOAD, precision="fp32"),
        replace(WORKLOAD, recompute="mlp"),
        replace(WORKLOAD, lora_rank=4),
        replace(WORKLOAD, lora_rank=8),
    ]
    computed = {signature(op, MODEL, workload) for op in ops[:6] for workload in workloads}
    assert len(computed) == 36
    assert len({signature(op, MODEL, WORKLOAD) for op in ops}) == 8


def passing(phase: Phase, reads: Sequence[str], writes: str, stream: Stream = Stream.CPU, fresh: int = 0) -> Op:
    """A pass over 1 kB of memory. What it reads is in a buffer of its own where the name begins with a dash."""
    home = str(Tier.DEVICE if stream == Stream.COMPUTE else Tier.HOST)
    accesses = tuple(Access("landing" if name[0] == "-" else home, name.removeprefix("-")) for name in reads)
    target = (Access(home, writes),)
    return replace(update(stream), phase=phase, reads=accesses, writes=target, nbytes=1000, fresh=fresh)


@pytest.mark.parametrize(
    ("op", "told"),
    [
        (passing(Phase.ACCUMULATE, ["-g.0"], "g32.0"), "accumulate g to g32/host"),
        (passing(Phase.ACCUMULATE, ["-g.0"], "g.0", fresh=9), "accumulate g to g+fresh/host"),
        (passing(Phase.ACCUMULATE, ["-g.0", "g.0"], "g.0"), "accumulate g+g to g/host"),
        (passing(Phase.ZERO, [], "g.0", Stream.HOST), "zero nothing to g/issuer"),
        (passing(Phase.SCALE, ["g32.0"], "g32.0"), "scale g32 in place/host"),
        (passing(Phase.SCALE, ["g32.0", "-norm"], "g32.0"), "scale g32+norm to g32/host"),
        (passing(Phase.CAST, ["w.0"], "w.0", Stream.COMPUTE), "cast w in place/device"),
        (passing(Phase.CAST, ["-w.0"], "w.0"), "cast w to w/host"),
        (passing(Phase.CAST, ["-w.0"], "w.0", Stream.HOST), "cast w to w/issuer"),
        (replace(passing(Phase.NORM, ["g.0"], "norm"), layer=None), "norm g/host"),
        (replace(passing(Phase.NORM, ["g32.3", "-norm"], "norm", Stream.COMPUTE), layer=None), "norm g32/device"),
    ],
)
def test_passes_over_memory_differ_by_what_they_pass_over(op: Op, told: str) -> None:
    assert signature(op, MODEL, WORKLOAD) == f"tiny/block/{told}/bf16"
    assert demand(op, measured(**{signature(op, MODEL, WORKLOAD): 4321})).duration_ns == 4321
    assert demand(op, measured()) == demand(op, round_profile())  # by its traffic


def test_norms_are_told_apart_by_whose_gradient_they_are_of_and_several_at_once_are_not_timed() -> None:
    norms = [
        replace(passing(Phase.NORM, reads, "norm"), layer=None)
        for reads in (["g.0"], ["g.2"], ["g.embed"], ["g.head"], ["g.0.0of4"], ["g.0.3of4"], ["g.0", "g.1"])
    ]
    told = [signature(op, MODEL, WORKLOAD).removeprefix("tiny/") for op in norms[:6]]
    kinds = ["block", "block", "embed", "head", "block", "block"]
    assert told == [f"{kind}/norm g/host/bf16{'/1 of 4' * (n > 3)}" for n, kind in enumerate(kinds)]
    assert [is_timed(op, schedule_of(op)) for op in norms] == [True] * 6 + [False]
    profile = measured(**{signature(norms[0], MODEL, WORKLOAD): 4321})
    assert demand(norms[1], profile).duration_ns == 4321
    assert demand(norms[6], profile) == demand(norms[6], round_profile())  # by its traffic


def test_the_optimizers_step_by_the_issuing_thread_is_another() -> None:
    """Which has other cores than the workers."""
    told = [signature(update(stream), MODEL, WORKLOAD) for stream in (Stream.CPU, Stream.HOST, Stream.COMPUTE)]
    assert told == [f"tiny/block/adam/{whose}/bf16" for whose in ("host", "issuer", "device")]


def test_a_copy_within_a_tier_is_timed_as_a_pass_over_its_memory() -> None:
    schedule = policies.build("megatrain_released", MODEL, WORKLOAD, ROOM)
    places = [place for place, key in timed(schedule).items() if "/copy w to w/device/" in key]
    profile = measured(**dict.fromkeys(timed(schedule).values(), 1_000_000))
    assert places and all(schedule.ops[place].phase == Phase.COPY for place in places)
    for place in places:
        cost, by_bandwidth = (demands(schedule, machine)[place] for machine in (profile, round_profile()))
        assert cost.duration_ns == 1_000_000 != by_bandwidth.duration_ns
        assert cost.usage[HBM] == pytest.approx(by_bandwidth.duration_ns / 1_000_000, abs=1e-6)  # whole ns
        assert by_bandwidth.usage[HBM] == 1.0


@pytest.mark.parametrize(
    ("op", "changes", "told"),
    [
        (compute(Phase.FORWARD, layer=0, writes="x.0.0"), {}, "block/forward/1x16/bf16"),
        (compute(Phase.FORWARD, layer=0, writes="s.0.0"), {"micro_batch_size": 3}, "block/forward+keep/3x16/bf16"),
        (compute(Phase.RECOMPUTE, layer=0, writes="s.0.0"), {"seq_len": 9}, "block/recompute+keep/1x9/bf16"),
        (compute(Phase.RECOMPUTE, layer=0, writes="x.0.0"), {}, "block/recompute+output/1x16/bf16"),
        (
            compute(Phase.BACKWARD, layer=0, writes="g.0", reads="g.0"),
            {"precision": "fp32", "lora_rank": 4},
            "block/backward+add/1x16/fp32/lora4",
        ),
        (compute(), {"task": "evaluate", "recompute": "mlp"}, "head/loss/1x16/bf16/evaluate/mlp again"),
        (update(Stream.CPU), {}, "block/adam/host/bf16"),
        (update(Stream.COMPUTE), {"precision": "bf16_split", "lora_rank": 4}, "block/adam/device/bf16_split/lora4"),
    ],
)
def test_a_signature_is_a_word_for_tables_and_files(op: Op, changes: dict[str, Any], told: str) -> None:
    assert signature(op, MODEL, replace(WORKLOAD, **changes)) == f"tiny/{told}"


def part_of_update(stream: Stream, part: str, **amounts: int) -> Op:
    state = (Access(Tier.DEVICE if stream == Stream.COMPUTE else Tier.HOST, f"o.0.{part}"),)
    return replace(update(stream, **amounts), reads=state, writes=state)


@pytest.mark.parametrize("stream", [Stream.CPU, Stream.COMPUTE])
def test_a_part_of_a_layer_takes_its_part_of_the_layers_time(stream: Stream) -> None:
    part, whole = part_of_update(stream, "1of4"), signature(update(stream), MODEL, WORKLOAD)
    own = signature(part, MODEL, WORKLOAD)
    assert own != whole and own == signature(part_of_update(stream, "3of4"), MODEL, WORKLOAD)
    assert demand(part, measured(**{whole: 8_000})).duration_ns == 2_000
    assert demand(part, measured(**{whole: 8_000, own: 2_345})).duration_ns == 2_345  # where it was measured itself
    with pytest.raises(MissingCost) as missing:
        demand(part, measured())
    assert missing.value.what.signature == own


def test_layers_of_one_kind_and_all_micro_batches_share_a_signature() -> None:
    first, last = compute(layer=0), replace(compute(layer=MODEL.head - 1), microbatch=3)
    assert signature(first, MODEL, WORKLOAD) == signature(last, MODEL, replace(WORKLOAD, accumulation=4))


def measured(**times: int) -> HardwareProfile:
    table = Table(values=times, unit="ns", source="test")
    return replace(round_profile(), mode="measured", measured=Measured(op_times=table))


def test_a_measured_profile_is_used_as_it_is() -> None:
    op = compute(flops=10**12)
    assert demand(op, measured(**{signature(op, MODEL, WORKLOAD): 12_345})).duration_ns == 12_345


def test_a_measured_profile_is_asked_for_what_computes_and_for_the_optimizers_steps() -> None:
    workload = replace(WORKLOAD, accumulation=2, grad_clip=1.0)
    schedule = policies.build("megatrain", MODEL, workload, ROOM)
    times = dict.fromkeys(timed(schedule, "needed").values(), 1)
    assert len(demands(schedule, measured(**times))) == len(schedule.ops)
    passes = set(timed(schedule).values()) - times.keys()
    assert {key.split("/")[2].split()[0] for key in passes} == {"accumulate", "norm"}
    assert {key for key in times if "/adam" not in key} == set(timed(schedule, "computed").values())
    for key in times:
        with pytest.raises(MissingCost) as missing:
            demands(schedule, measured(**{other: ns for other, ns in times.items() if other != key}))
        assert missing.value.what.signature == key


@pytest.mark.parametrize("path", TIMED)
def test_no_measured_time_is_made_of_what_is_told_to_change_none(path: str) -> None:
    for name in ("megatrain_released", "zero3_offload", "streamed"):
        schedule = policies.build(name, MODEL, WORKLOAD, ROOM)
        profile = measured(**dict.fromkeys(timed(schedule).values(), 1000))
        changed = override(profile, [f"{path}=1{NUMBERS[path].unit}"])
        assert demands(schedule, changed) == demands(schedule, profile)


@pytest.mark.parametrize("op", [compute(flops=1), update(Stream.COMPUTE, nbytes=1), update(Stream.CPU, nbytes=1)])
def test_a_measured_profile_without_an_ops_time_says_how_to_measure_it(op: Op) -> None:
    with pytest.raises(MissingCost, match="megatrain profile") as missing:
        demand(op, measured())
    assert missing.value.what.signature == signature(op, MODEL, WORKLOAD)


@pytest.mark.parametrize(
    ("op", "setting"),
    [
        (copy(Tier.HOST, Tier.DEVICE, MB), "links.h2d.bandwidth=1B/s"),
        (copy(Tier.HOST, Tier.DEVICE, MB), "links.h2d.bandwidth=1e-300B/s"),
        (compute(flops=10**15), "gpu.matmul_flops=1FLOP/s"),
        (compute(flops=1), "issue.compute=1e14us"),
        (compute(flops=1), "issue.wake=1e14us"),
    ],
)
def test_a_machine_on_which_an_op_takes_for_ever_is_told(op: Op, setting: str) -> None:
    """The nanoseconds of many steps must fit 64 bits."""
    with pytest.raises(
        InputError,
        match=r"would take ([\d,.]+ hours|longer than can be counted) on .*, and no op may take more than 2\.8 hours",
    ):
        demand(op, round_profile(setting))


def test_a_measured_optimizer_rate_serves_a_measured_profile() -> None:
    op = update(Stream.CPU, nbytes=1, params=2 * 10**9)
    found = demand(op, replace(round_profile("host.adam_params_per_s=1Gparams/s"), mode="measured"))
    assert found.duration_ns == 2 * 10**9

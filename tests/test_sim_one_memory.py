"""Machines whose device and host are parts of one memory: what fits, what ops share, what is searched and bounded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command import megatrain
from hypothesis import given
from hypothesis import strategies as st
from strategies import MODEL, WORKLOAD, round_profile

from schedules import policies, presets
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware, whatif
from sim.adapter_plan import plan_adapters
from sim.cost import D2H, DRAM, DUPLEX, GPU, Terms, demands
from sim.engine import simulate
from sim.one_memory import SHARES, partition_of_least, partitions
from sim.placement_bound import NoPlacement, placement_bound
from sim.plan import plan
from sim.prediction import DoesNotFit, memory_of, peak_bytes, predict, require_fit
from sim.search import NothingFits

GIB, MB = 1 << 30, 10**6
APART = round_profile("gpu.memory_bandwidth=400GB/s", "gpu.copy_slowdown=0fraction")  # its kernels attain 200
SHARED = hardware.override(APART, ["unified_memory=100GiB"])
NO_ISSUE = Terms(issue=False)


def of_both(*ops: Op) -> Schedule:
    buffers = tuple(Buffer(name=tier, tier=tier, nbytes=1) for tier in Tier)
    return Schedule(ops=ops, buffers=buffers, waits=(), model=MODEL, workload=WORKLOAD, policy="bare")


def kernel(nbytes: int) -> Op:
    return Op(name="F", kind=Kind.COMPUTE, phase=Phase.LOSS, stream=Stream.COMPUTE, layer=MODEL.head, nbytes=nbytes)


def cpu_update(nbytes: int) -> Op:
    return Op(name="U", kind=Kind.UPDATE, phase=Phase.ADAM, stream=Stream.CPU, layer=0, nbytes=nbytes)


def copied(source: Tier, target: Tier, nbytes: int) -> Op:
    reads, writes = (Access(source, "w.0"),), (Access(target, "w.0"),)
    return Op(
        name="P", kind=Kind.OFFLOAD, phase=Phase.COPY, stream=Stream.D2H, reads=reads, writes=writes, nbytes=nbytes
    )


# ---- what ops share


def test_the_gpus_kernels_use_the_hosts_memory_where_it_is_one() -> None:
    (apart,), (shared,) = (demands(of_both(kernel(2 * MB)), machine) for machine in (APART, SHARED))
    assert (apart.duration_ns, apart.usage) == (10_000, {GPU: 1.0})
    assert (shared.duration_ns, shared.usage) == (10_000, {GPU: 1.0, DRAM: 1.0})  # 2 MB of 200 GB/s in 10 us


def test_a_copy_reads_and_writes_the_one_memory() -> None:
    """Half of its 200 GB/s would be more than the link's 40; of 60 it is less."""
    copy = of_both(copied(Tier.DEVICE, Tier.HOST, 9 * MB))
    (apart,), (shared,) = (demands(copy, machine) for machine in (APART, SHARED))
    assert apart.duration_ns == shared.duration_ns == 252_000
    assert shared.usage[DRAM] == pytest.approx(2 * apart.usage[DRAM]) and shared.usage[D2H] == 1.0
    slow = hardware.override(
        SHARED, ["host.memory_bandwidth=60GB/s", "links.h2d.bandwidth=40GB/s", "links.duplex=50GB/s"]
    )
    (held_up,) = demands(copy, slow)
    assert held_up.duration_ns == 2_000 + 10 * MB * 1000 // 30_000 + 1 and held_up.usage[DRAM] == 1.0
    assert held_up.usage[DUPLEX] < 1.0


def test_an_update_beside_a_kernel_slows_both_down_where_memory_is_one() -> None:
    """By hand: 2 MB of the kernel and 1 MB of the update take 15 us at 200 GB/s; with memories of their own 10."""
    step = of_both(kernel(2 * MB), cpu_update(1 * MB))
    assert simulate(step, APART, steps=1, terms=NO_ISSUE).end_ns.max() == 10_000
    assert simulate(step, SHARED, steps=1, terms=NO_ISSUE).end_ns.max() == 15_000


# ---- what fits


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    workload = Workload(micro_batch_size=2, accumulation=2, seq_len=64)
    return policies.build("streamed", presets.load("demo"), workload, memory_of(APART))


def test_what_both_take_together_fits_exactly_and_a_byte_less_does_not(schedule: Schedule) -> None:
    peaks = peak_bytes(schedule, SHARED)
    both = peaks[Tier.DEVICE] + peaks[Tier.HOST]
    enough = MemoryBudget(device_bytes=both, host_bytes=both, unified_bytes=both)
    require_fit(schedule, SHARED, enough)
    with pytest.raises(DoesNotFit) as raised:
        require_fit(schedule, SHARED, replace(enough, unified_bytes=both - 1))
    assert [(lack.tier, lack.over) for lack in raised.value.lacks] == [(Tier.DEVICE, 1)]
    with pytest.raises(DoesNotFit) as raised:  # not even the host's buffers
        require_fit(schedule, SHARED, MemoryBudget(device_bytes=both, host_bytes=7, unified_bytes=7))
    assert sum(lack.over for lack in raised.value.lacks) == both - 7
    assert predict(schedule, SHARED).fits


def test_no_tier_has_more_than_the_memory_that_is_one() -> None:
    small = memory_of(hardware.override(SHARED, ["unified_memory=1GiB"]))
    assert (small.device_bytes, small.host_bytes, small.unified_bytes) == (GIB, GIB, GIB)
    assert small.device_and_host_bytes == GIB and memory_of(APART).unified_bytes is None
    assert memory_of(APART).device_and_host_bytes == memory_of(APART).device_bytes + memory_of(APART).host_bytes


@given(unified=st.integers(0, 1 << 40), device=st.integers(0, 1 << 40), host=st.integers(0, 1 << 40))
def test_partitions_are_of_that_memory(unified: int, device: int, host: int) -> None:
    budget = MemoryBudget(device_bytes=device, host_bytes=host, nvme_bytes=5, unified_bytes=unified)
    found = partitions(budget)
    assert 1 <= len(found) <= len(SHARES)
    for part in found:
        assert part.device_bytes + part.host_bytes <= unified
        assert part.device_bytes <= device and part.host_bytes <= host
        assert (part.unified_bytes, part.nvme_bytes) == (unified, 5)
        assert part.device_bytes in (device, unified - part.host_bytes)
    assert partitions(replace(budget, unified_bytes=None)) == (replace(budget, unified_bytes=None),)


def test_a_schedule_to_begin_with_has_a_partition_of_its_own(schedule: Schedule) -> None:
    budget = memory_of(SHARED)
    (of_it, *others) = partitions(budget, [schedule])
    assert of_it.host_bytes == schedule.allocated_bytes(Tier.HOST) and tuple(others) == partitions(budget)


# ---- plans and bounds

MODEL_OF_PLANS, STEP = presets.load("demo"), Workload(micro_batch_size=4, seq_len=128)


def machine_with(mb: float) -> hardware.HardwareProfile:
    return hardware.override(SHARED, [f"unified_memory={mb}MB", "issue.compute=0us", "issue.copy=0us"])


def test_a_plan_of_one_memory_fits_it_and_is_no_faster_than_its_bound() -> None:
    needed = 10 * MODEL_OF_PLANS.total_params / MB  # what weights and states take
    found = plan(MODEL_OF_PLANS, machine_with(1.3 * needed), seq_len=128, tokens_per_step=512, effort=12)
    verify(found.schedule)
    peaks = found.prediction.peak_bytes
    assert found.prediction.fits and peaks[Tier.DEVICE] + peaks[Tier.HOST] <= 1.3 * needed * MB
    assert found.lower_bound_ns <= found.prediction.period_ns and found.gap < 1.0
    assert found.chosen in found.tried
    roomy = plan(MODEL_OF_PLANS, machine_with(8 * needed), seq_len=128, tokens_per_step=512, effort=12)
    assert roomy.prediction.period_ns <= found.prediction.period_ns * 1.01


def test_what_fits_in_no_usual_partition_is_planned_in_one_of_its_own() -> None:
    machine = replace(SHARED, nvme=None)
    least = whatif.smallest_memory(MODEL_OF_PLANS, machine, STEP).unified_bytes
    assert least is not None
    tight = hardware.override(machine, [f"unified_memory={least * 1.01 / MB}MB"])
    for part in partitions(memory_of(tight)):
        with pytest.raises(NothingFits):
            plan(
                MODEL_OF_PLANS, tight, seq_len=128, micro_batch_size=4, effort=6,
                memory=replace(part, unified_bytes=None),
            )  # fmt: skip
    found = plan(MODEL_OF_PLANS, tight, seq_len=128, micro_batch_size=4, effort=6)
    assert found.prediction.fits
    none = replace(memory_of(tight), unified_bytes=least // 2, device_bytes=least // 2, host_bytes=least // 2)
    assert partition_of_least(MODEL_OF_PLANS, tight, [STEP], none).device_and_host_bytes <= least // 2


def test_progress_of_a_plan_only_grows_over_all_partitions() -> None:
    told: list[float] = []
    plan(
        MODEL_OF_PLANS, SHARED, seq_len=128, tokens_per_step=512, effort=6,
        progress=lambda best, share, note: told.append(share),
    )  # fmt: skip
    assert told == sorted(told) and told[0] >= 0.0 and 0.9 < told[-1] <= 1.0


def test_what_nothing_fits_is_told() -> None:
    with pytest.raises(NothingFits, match="no schedule of demo that is searched fits h200"):
        plan(MODEL_OF_PLANS, replace(machine_with(10), nvme=None), seq_len=128, tokens_per_step=512, effort=6)


@pytest.mark.parametrize("times", [1.2, 1.6, 4.0])
def test_the_bound_of_one_memory_is_no_more_than_that_of_any_partition(times: float) -> None:
    budget = memory_of(machine_with(times * 10 * MODEL_OF_PLANS.total_params / MB))
    whole = placement_bound(MODEL_OF_PLANS, STEP, SHARED, budget).period_ns
    apart = replace(budget, unified_bytes=None)
    assert placement_bound(MODEL_OF_PLANS, STEP, SHARED, apart).period_ns <= whole * (1 + 1e-6)
    for part in partitions(budget):
        try:
            of_part = placement_bound(MODEL_OF_PLANS, STEP, SHARED, part).period_ns
        except NoPlacement:
            continue
        assert whole <= of_part * (1 + 1e-6)


def test_the_bound_knows_that_the_memory_is_one() -> None:
    """Twice as much in two memories has room for states that one memory has not."""
    state = int(0.8 * 10 * MODEL_OF_PLANS.total_params)
    profile = replace(SHARED, nvme=None)
    each = MemoryBudget(device_bytes=state, host_bytes=state)
    placement_bound(MODEL_OF_PLANS, STEP, profile, each)
    with pytest.raises(NoPlacement):
        placement_bound(MODEL_OF_PLANS, STEP, profile, replace(each, unified_bytes=state))


def test_adapters_are_planned_beside_weights_that_stay_on_the_device() -> None:
    found = plan_adapters(MODEL_OF_PLANS, SHARED, rank=8, seq_len=128, tokens_per_step=512)
    peaks = found.prediction.peak_bytes
    assert found.prediction.fits and peaks[Tier.DEVICE] + peaks[Tier.HOST] <= 100 * GIB
    assert found.schedule.knobs["resident"] == len(MODEL_OF_PLANS.layers)
    assert found.lower_bound_ns <= found.prediction.period_ns and found.chosen in found.tried


# ---- what if


def test_more_of_one_memory_is_more_of_it_for_both() -> None:
    names = whatif.faster(SHARED)
    assert "memory bandwidth, +25%" in names
    assert not {"GPU, memory bandwidth, +25%", "host memory bandwidth, +25%"} & set(names)
    more = names["memory bandwidth, +25%"]
    assert more.gpu.memory_bandwidth.value == 500e9 and more.host.memory_bandwidth.value == 250e9
    assert {"GPU, memory bandwidth, +25%", "host memory bandwidth, +25%"} <= set(whatif.faster(APART))


def test_the_least_of_one_memory_is_enough_and_what_trains_in_it_has_room() -> None:
    machine = replace(SHARED, nvme=None)
    least = whatif.smallest_memory(MODEL_OF_PLANS, machine, STEP).unified_bytes
    assert least is not None and least > 10 * MODEL_OF_PLANS.total_params
    enough = hardware.override(machine, [f"unified_memory={least * 1.4 / MB}MB"])
    assert whatif.longest_sequence(MODEL_OF_PLANS, enough, STEP) > 0
    assert plan(MODEL_OF_PLANS, enough, seq_len=128, tokens_per_step=512, effort=6).prediction.fits
    assert (
        whatif.longest_sequence(
            MODEL_OF_PLANS, hardware.override(machine, [f"unified_memory={least / 2 / MB}MB"]), STEP
        )
        == 0
    )


# ---- machines and commands


@pytest.mark.parametrize("name", ["dgx-spark", "strix-halo"])
def test_machines_of_one_memory_say_so(name: str) -> None:
    profile = hardware.load(name)
    assert profile.one_memory and profile.unified_memory is not None
    assert profile.gpu.memory.value == profile.host.memory.value == profile.unified_memory.value
    assert hardware.from_json(hardware.to_json(profile), name) == profile


def test_commands_tell_what_both_take_together() -> None:
    step = ("demo", "-H", "dgx-spark", "-b", "2", "-s", "64")
    assert "device and host" in megatrain("simulate", *step).stdout
    found = json.loads(megatrain("simulate", *step, "--json").stdout)
    peak, has = found["peak_bytes"], found["available_bytes"]
    assert peak["device_and_host"] == peak["device"] + peak["host"] and has["device_and_host"] == has["device"]
    assert "device and host; it fits" in megatrain("build", *step).stdout
    assert "the same" in megatrain("hardware").stdout


@pytest.mark.parametrize("name", ["streamed", "llmq", "gemini", "paged_optimizer", "zero_offload_pp"])
def test_policies_that_fill_the_device_fill_what_the_host_leaves(name: str) -> None:
    """As little as they take without filling it is enough, and so is more that they would fill."""
    workload, endless = Workload(micro_batch_size=8, seq_len=256, accumulation=2), 1 << 50
    plenty = MemoryBudget(device_bytes=endless, host_bytes=endless)
    most = policies.build(name, MODEL_OF_PLANS, workload, plenty)
    least = policies.build(name, MODEL_OF_PLANS, workload, replace(plenty, device_bytes=0))
    sums = []
    for schedule in (least, most):
        peaks = peak_bytes(schedule, SHARED)
        sums.append(peaks[Tier.DEVICE] + peaks[Tier.HOST])
    for both in (sums[0], (sums[0] + sums[1]) // 2):
        budget = MemoryBudget(device_bytes=both, host_bytes=both, unified_bytes=both)
        require_fit(policies.build(name, MODEL_OF_PLANS, workload, budget), SHARED, budget)

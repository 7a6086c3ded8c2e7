"""What-if: a machine of which the limits are known by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from timed_profile import timed

from schedules import policies, presets
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.workload import RECOMPUTED, Workload
from sim import hardware, whatif
from sim.plan import Plan, plan
from sim.prediction import Prediction, memory_of, peak_bytes, predict
from sim.search import NothingFits


def shallow(blocks: int) -> ModelSpec:
    return replace(presets.load("qwen2.5-7b"), num_hidden_layers=blocks, vocab_size=8192)


def predicted(batch: int, *changes: str, **knobs: int) -> Prediction:
    """`streamed`, 8 blocks, on an H200 with changes."""
    profile = hardware.override(hardware.load("h200"), list(changes))
    workload = Workload(micro_batch_size=batch, seq_len=1024)
    return predict(policies.build("streamed", shallow(8), workload, memory_of(profile), **knobs), profile)


def test_more_of_the_bottleneck_helps_and_more_of_the_rest_does_not() -> None:
    links = whatif.marginal_gains(predicted(1, "links.h2d.bandwidth=5GB/s"))
    assert max(links, key=lambda name: links[name]) == "link, host to device, +25%"
    assert links["link, host to device, +25%"] > 0.1 > abs(links["GPU, matrix products, +25%"])
    compute = whatif.marginal_gains(predicted(64, resident=10))
    assert max(compute, key=lambda name: compute[name]) == "GPU, matrix products, +25%"
    assert abs(compute["NVMe, read and write, +25%"]) < 1e-9


def test_what_is_more_of_a_link_says_how_much_more_there_can_be() -> None:
    """No faster than the host's memory; what both directions share grows with each."""
    for name, words in (("gh200", "+5%"), ("rtx5090", "+8%"), ("h200", "+25%")):
        machine = hardware.load(name)
        faster = whatif.faster(machine)[f"link, host to device, {words}"]
        most = min(1.25 * machine.links.h2d.bandwidth.value, machine.host.memory_bandwidth.value)
        assert faster.links.h2d.bandwidth.value == pytest.approx(most)


def test_bandwidth_is_found_however_large_a_copy_is() -> None:
    profile = hardware.load("rtx5090")
    workload = Workload(micro_batch_size=1, seq_len=131_072)
    built = policies.build("streamed", shallow(8), workload, memory_of(profile), keep=0, offload=4, inputs=4)
    assert max(op.nbytes for op in built.ops if op.stream == Stream.H2D) > 1e9
    needed = whatif.required_bandwidth(predict(built, profile))
    assert all(bandwidth is not None and bandwidth > 1e6 for bandwidth in needed.values())


def test_ops_of_the_only_busy_stream_hold_all_of_the_step_up() -> None:
    shares = whatif.criticality(predicted(64, resident=10))
    compute = sum(share for name, share in shares.items() if name.startswith("compute"))
    assert compute == pytest.approx(1.0, abs=0.02)
    assert all(abs(share) < 1e-6 for name, share in shares.items() if not name.startswith("compute"))


def test_bandwidth_that_is_required_is_enough_and_a_tenth_less_is_not() -> None:
    prediction = predicted(8)
    needed = whatif.required_bandwidth(prediction)["H2D"]
    assert needed is not None

    def period(bandwidth: float) -> float:
        return predicted(8, f"links.h2d.bandwidth={bandwidth}B/s", f"links.duplex={2 * bandwidth + 2e11}B/s").period_ns

    assert period(needed * 1.01) < period(needed * 0.5)
    assert whatif.required_bandwidth(predicted(8, resident=10)) == {"H2D": None, "D2H": None}


def test_no_stall_is_no_slower_than_the_present_link() -> None:
    """Here the fastest one is: its copies take the bandwidth of the host's memory from the optimizer."""
    machine = hardware.load("rtx4090")
    workload = Workload(micro_batch_size=4, seq_len=2048)
    built = policies.build("streamed", shallow(8), workload, memory_of(machine), defer=4)

    def period(bandwidth: float) -> float:
        links = [f"links.h2d.bandwidth={bandwidth}B/s", f"links.duplex={bandwidth + 5e10}B/s"]
        return predict(built, hardware.override(machine, links)).period_ns

    present = predict(built, machine)
    assert period(machine.host.memory_bandwidth.value) > 1.002 * present.period_ns
    needed = whatif.required_bandwidth(present)["H2D"]
    assert needed is not None and needed < machine.links.h2d.bandwidth.value
    narrow = hardware.override(machine, [f"links.h2d.bandwidth={needed}B/s"])
    assert predict(built, narrow).period_ns <= whatif.NO_STALL * present.period_ns


def test_a_link_is_told_by_where_a_copy_begins_and_ends_not_by_its_stream() -> None:
    """These copy in both directions on other streams than h2d and d2h, or on one of these against its name."""
    model, workload = shallow(2), Workload(micro_batch_size=8, seq_len=512)
    profile = hardware.load("h200")
    for name in ("zero_offload", "superoffload", "torchao_offload", "fsdp_offload"):
        built = policies.build(name, model, workload, memory_of(profile))
        needed = whatif.required_bandwidth(predict(built, profile))
        assert all(bandwidth is not None and bandwidth > 1e6 for bandwidth in needed.values()), name


def test_more_host_memory_bandwidth_makes_a_timed_optimizer_of_the_cpu_faster() -> None:
    """By as much as where it follows from a rate."""
    model, workload = shallow(4), Workload(micro_batch_size=1, seq_len=512)
    profile = timed(model, [workload])
    schedule = policies.build("streamed", model, workload, memory_of(profile))
    prediction = predict(schedule, profile)
    assert whatif.marginal_gains(prediction)["host memory bandwidth, +25%"] > 0.1


def test_more_device_memory_bandwidth_makes_timed_passes_over_it_faster() -> None:
    model, workload = shallow(4), Workload(micro_batch_size=1, seq_len=512)
    profile = timed(model, [workload], names=["resident", "streamed"])
    machine = whatif.faster(profile)["GPU, memory bandwidth, +25%"]
    assert profile.measured is not None and profile.measured.op_times is not None
    assert machine.measured is not None and machine.measured.op_times is not None
    for key, ns in profile.measured.op_times.values.items():
        assert machine.measured.op_times.values[key] == (round(ns / 1.25) if "/adam/device/" in key else ns)


def test_what_ops_hold_up_counts_the_time_until_streams_notice() -> None:
    """Where noticing takes a second each time, no op matters."""
    prediction = predicted(4, "issue.wake=1s")
    assert prediction.period_ns > 5e9 and max(whatif.criticality(prediction).values()) < 0.2
    assert max(whatif.criticality(predicted(4)).values()) > 0.5


def test_spread_grows_with_noise_and_vanishes_without() -> None:
    prediction = predicted(4)
    still, some, more = (whatif.spread(prediction, noise) for noise in (0.0, 0.02, 0.2))
    assert still.p5 == still.p95 == pytest.approx(prediction.tokens_per_s, rel=1e-6)
    assert still.p95 - still.p5 < some.p95 - some.p5 < more.p95 - more.p5
    assert whatif.spread(prediction, 0.02) == some  # seeded


def test_spread_is_about_what_is_predicted() -> None:
    prediction = predicted(4)
    slower = replace(prediction, period_ns=2 * prediction.period_ns)
    assert whatif.spread(slower, 0.0).p50 == pytest.approx(whatif.spread(prediction, 0.0).p50 / 2)


def test_no_more_device_memory_is_needed_than_a_schedule_takes_that_is_known_to_fit() -> None:
    model, workload, profile = shallow(8), Workload(micro_batch_size=2, seq_len=1024), hardware.load("a100-pcie")
    least = whatif.smallest_memory(model, profile, workload, known=dict.fromkeys(Tier, 1))
    assert least.device_bytes == 1


def test_least_memory_is_enough_and_less_is_not() -> None:
    model, workload, profile = shallow(8), Workload(micro_batch_size=2, seq_len=1024), hardware.load("a100-pcie")
    profile = replace(profile, nvme=None)
    least = whatif.smallest_memory(model, profile, workload)
    assert least.device_bytes is not None and least.host_bytes is not None

    def trains(device: int) -> bool:
        smaller = hardware.override(profile, [f"gpu.memory={device}bytes"])
        return whatif.largest_micro_batch(model, smaller, workload) >= workload.micro_batch_size

    assert trains(least.device_bytes) and not trains(least.device_bytes - 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("grad_clip", "drive"), [(None, 0), (1.0, 0), (None, 4)])
def test_no_more_layers_live_on_the_device_than_the_host_has_no_room_for(grad_clip: float | None, drive: int) -> None:
    """A host for two thirds of the blocks, a drive for the state of two or none: against every number of layers."""
    model, workload = shallow(12), Workload(micro_batch_size=1, seq_len=1024, grad_clip=grad_clip)
    profile = hardware.override(hardware.load("gh200"), ["host.memory=22GB", "nvme.capacity=4GB"])
    profile = profile if drive else replace(profile, nvme=None)
    budget, enough = memory_of(profile), []
    knobs = {"slots": 1, "grad_slots": 1, "keep": 0, "slabs": 1, "inputs": 12, "nvme": drive // 2, "nvme_slots": 1}
    for resident, mode in itertools.product(range(len(model.layers) + 1), model.recompute_modes):
        way = replace(workload, recompute=mode)
        built = policies.build_without_waits("streamed", model, way, budget, **knobs, resident=resident)
        peaks = peak_bytes(built, profile)
        if all(peaks[tier] <= budget.of(tier) for tier in (Tier.HOST, Tier.NVME)):
            enough.append(peaks[Tier.DEVICE])
    told = whatif.smallest_memory(model, profile, workload).device_bytes
    assert told is not None and told <= min(enough) < max(enough) / 1.5


@pytest.mark.slow
def test_a_drive_for_some_states_only_leaves_less_on_the_host() -> None:
    """Of twelve blocks the drive has room for the state of two, and the device for none."""
    model, workload = shallow(12), Workload(micro_batch_size=1, seq_len=1024)
    profile = hardware.override(hardware.load("gh200"), ["gpu.memory=4GB", "nvme.capacity=4GB"])
    least = whatif.smallest_memory(model, profile, workload).host_bytes
    without = whatif.smallest_memory(model, replace(profile, nvme=None), workload).host_bytes
    assert least is not None and without is not None and 3e9 < without - least <= 4e9


def test_what_a_drive_cannot_hold_may_live_on_the_device() -> None:
    """The embedding's state is more than what all else takes on the host."""
    model, workload = replace(shallow(3), vocab_size=100_000), Workload(micro_batch_size=1, seq_len=1024)
    profile = hardware.override(hardware.load("rtx4090"), ["gpu.memory=12GB"])
    least = whatif.smallest_memory(model, profile, workload).host_bytes
    assert least is not None

    def planned(host: float) -> Plan:
        machine = hardware.override(profile, [f"host.memory={host}bytes"])
        return plan(model, machine, seq_len=1024, micro_batch_size=1, effort=1)

    knobs = planned(least).schedule.knobs
    assert knobs["resident"] and knobs["nvme"]
    with pytest.raises(NothingFits):
        planned(least * 0.9)


def test_limits_are_told_where_only_what_is_copied_nowhere_has_room() -> None:
    """A model that streams takes more in all: its weights are in both memories, and gradients wait in the host's."""
    model = replace(presets.load("llama-3.2-1b"), num_hidden_layers=4, vocab_size=8192)
    workload = Workload(micro_batch_size=1, seq_len=1024)
    base = replace(hardware.load("rtx4090"), nvme=None)
    resident = policies.build("streamed", model, workload, memory_of(base), resident=6, keep=0)
    needs = peak_bytes(resident, base)[Tier.DEVICE]
    profile = hardware.override(base, [f"gpu.memory={int(1.001 * needs)}bytes", "host.memory=20MB"])
    assert predict(resident, profile).fits
    assert whatif.largest_micro_batch(model, profile, workload) >= 1
    assert whatif.longest_sequence(model, profile, workload) >= 1024


@pytest.mark.slow
def test_the_longest_sequence_is_that_of_the_thriftiest_mode() -> None:
    profile = hardware.override(hardware.load("rtx4090"), ["gpu.memory=16GB"])
    found = {
        mode: whatif.longest_sequence(shallow(3), profile, Workload(micro_batch_size=1, seq_len=1024, recompute=mode))
        for mode in RECOMPUTED
    }
    assert len(set(found.values())) == 1


@pytest.mark.slow
def test_the_longest_sequence_is_a_step_by_itself() -> None:
    model, profile = presets.load("qwen2.5-0.5b"), hardware.load("rtx4090")
    one, many = (Workload(micro_batch_size=1, accumulation=n, seq_len=512) for n in (1, 64))
    assert whatif.longest_sequence(model, profile, one) == whatif.longest_sequence(model, profile, many)


def test_what_can_be_planned_can_be_trained_with_what_is_left_on_a_drive() -> None:
    """Weights too, in parts: nothing else has room in so little memory."""
    model, workload = shallow(4), Workload(micro_batch_size=2, seq_len=1024)
    profile = hardware.override(hardware.load("rtx4090"), ["gpu.memory=4GB", "host.memory=2GB"])
    found = plan(model, profile, seq_len=workload.seq_len, micro_batch_size=workload.micro_batch_size, effort=1)
    assert found.schedule.knobs["nvme_weights"]
    least = whatif.smallest_memory(model, profile, found.schedule.workload)
    assert least.device_bytes is not None and least.device_bytes <= found.prediction.peak_bytes[Tier.DEVICE]
    assert least.host_bytes is not None and least.host_bytes <= 2e9
    peaks = found.prediction.peak_bytes
    known = whatif.smallest_memory(model, profile, found.schedule.workload, known=peaks)
    assert known.host_bytes == min(least.host_bytes, peaks[Tier.HOST])
    assert whatif.largest_micro_batch(model, profile, found.schedule.workload) >= workload.micro_batch_size


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 1 << 20])
def test_the_largest_that_fits_is_found_without_trying_all(most: int) -> None:
    tried: list[int] = []
    assert whatif._largest(lambda n: tried.append(n) or n <= most) == most  # type: ignore[func-returns-value]
    assert len(tried) <= 2 + 2 * most.bit_length() and min(tried) == 1


def test_longest_sequence_fits_and_one_much_longer_does_not() -> None:
    model = shallow(4)
    profile = hardware.override(hardware.load("rtx4090"), ["gpu.memory=12GB"])
    longest = whatif.longest_sequence(model, profile, Workload(micro_batch_size=3, seq_len=1024, accumulation=2))
    assert longest >= 1024

    def device_bytes(tokens: int) -> int:
        workload = Workload(micro_batch_size=1, seq_len=tokens, recompute="mlp")
        knobs = {"keep": 0, "inputs": 4, "slabs": 1, "slots": 1, "grad_slots": 1}
        schedule = policies.build("streamed", model, workload, memory_of(profile), **knobs)
        return predict(schedule, profile).peak_bytes[Tier.DEVICE]

    assert device_bytes(longest) <= 12e9 < device_bytes(int(1.1 * longest))

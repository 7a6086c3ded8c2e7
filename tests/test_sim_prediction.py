"""Predictions: the period of a run that settles, memory that does or does not fit, and rates."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from strategies import MODEL, bare, round_profile, schedule_of

from schedules import policies, presets
from schedules.amounts import Amounts
from schedules.flops import forward_flops
from schedules.op import Buffer, Kind, Phase, Stream, Tier, Wait
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from schedules.workspace import workspace_bytes
from sim import hardware
from sim.cost import DRAM, Demand, peak_flops
from sim.engine import play
from sim.prediction import DoesNotFit, memory_of, peak_bytes, predict, repeats, require_fit

PROFILE = round_profile()
PLENTY = memory_of(PROFILE)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    workload = Workload(micro_batch_size=2, accumulation=2, seq_len=64)
    return policies.build("streamed", presets.load("demo"), workload, PLENTY)


def test_rates_follow_from_the_period(schedule: Schedule) -> None:
    found = predict(schedule, PROFILE)
    seconds = found.period_ns / 1e9
    flops = 3 * 2 * sum(forward_flops(schedule.model, i, schedule.workload) for i in schedule.model.layers)
    assert found.tokens_per_s == pytest.approx(2 * 2 * 64 / seconds)
    assert found.mfu == pytest.approx(flops / seconds / 1000e12)
    executed = sum(op.flops for op in schedule.ops if op.kind == Kind.COMPUTE)
    assert found.hfu / found.mfu == pytest.approx(executed / flops)
    assert found.bound_ns <= found.period_ns
    assert found.period_ns == found.bound_ns * (1 + found.gap)


def test_busy_and_idle_time_of_a_stream_fill_the_window(schedule: Schedule) -> None:
    found = predict(schedule, PROFILE)
    span = found.window[1] - found.window[0]
    assert found.utilisation.keys() == found.idle_causes_ns.keys() == {str(s) for s in schedule.streams}
    for stream, busy in found.utilisation.items():
        assert busy * span + sum(found.idle_causes_ns[stream].values()) == pytest.approx(span)


def test_a_run_repeats_itself_when_every_op_comes_as_much_later() -> None:
    # A, B and D are done at 15, 25, 35, ...; C at 11, 22, 33, ... is the later one from the sixth step on
    ops = [bare("C", Stream.CPU), bare("A", Stream.H2D), bare("B", Stream.COMPUTE), bare("D", Stream.D2H)]
    waits = [Wait(op="B", on="A"), Wait(op="A", on="B", distance=1), Wait(op="D", on="B")]
    costs = [Demand(duration_ns=ns) for ns in (11, 3, 7, 5)]
    trace = play(schedule_of(ops, waits), costs, steps=6)
    assert trace.step_end_ns.tolist() == [15, 25, 35, 45, 55, 66]
    assert not any(repeats(play(schedule_of(ops, waits), costs, steps=steps)) for steps in range(2, 7))
    settled = play(schedule_of(ops[1:], waits), costs[1:], steps=3)
    assert repeats(settled) == (1, 1)
    behind = settled.issue_ns.copy()
    behind[5] += 11  # the host comes to the second D later by more than a period, and may soon be the slowest
    assert repeats(replace(settled, issue_ns=behind)) is None


def test_the_last_step_does_not_count_because_nothing_follows_it() -> None:
    # both take all of the memory's bandwidth: U shares it with A of the next step, but not in the last step
    ops = [bare("A", Stream.COMPUTE, writes="a"), bare("U", Stream.CPU, reads="a", writes="b")]
    waits = [Wait(op="U", on="A")]
    trace = play(schedule_of(ops, waits), [Demand(duration_ns=10, usage={DRAM: 1.0})] * 2, steps=8)
    assert trace.step_end_ns.tolist() == [30, 50, 70, 90, 110, 130, 150, 160]
    assert repeats(trace) == (6, 1)


def test_the_last_steps_of_a_stream_that_is_behind_do_not_count_either() -> None:
    # A is two steps ahead of D, with which it shares the memory: D takes 10, and 5 more beside A, but not at the end
    streams = (Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.CPU)
    ops = [bare(name, stream) for name, stream in zip("ABCD", streams, strict=True)]
    waits = [Wait(op=after, on=before, distance=0) for before, after in pairwise("ABCD")]
    waits += [Wait(op=before, on=after, distance=1) for before, after in pairwise("ABCD")]
    costs = [Demand(duration_ns=ns, usage={DRAM: share}) for ns, share in ((5, 1.0), (1, 0.0), (1, 0.0), (10, 1.0))]
    trace = play(schedule_of(ops, waits), costs, steps=8)
    assert trace.step_end_ns.tolist() == [26, 42, 58, 74, 90, 106, 117, 128]
    assert repeats(trace) == (5, 1)


def test_a_pattern_of_two_steps_repeats_after_two() -> None:
    ops = [bare("A", Stream.H2D), bare("B", Stream.COMPUTE), bare("C", Stream.D2H)]
    waits = [Wait(op="B", on="A"), Wait(op="C", on="B", distance=1), Wait(op="A", on="C", distance=1)]
    trace = play(schedule_of(ops, waits), [Demand(duration_ns=ns) for ns in (4, 5, 6)], steps=8)
    assert repeats(trace) == (6, 2)
    assert trace.step_end_ns[-1] - trace.step_end_ns[-3] == 15


@pytest.mark.parametrize("policy", policies.names())
def test_no_policy_is_predicted_below_its_bound(policy: str) -> None:
    workload = Workload(micro_batch_size=1, accumulation=2, seq_len=32, grad_clip=1.0)
    found = predict(policies.build(policy, presets.load("demo"), workload, PLENTY), PROFILE)
    assert found.period_ns >= found.bound_ns > 0
    assert found.binding
    assert 0 < found.mfu <= found.hfu


def test_the_peak_is_all_buffers_and_the_largest_workspace(schedule: Schedule) -> None:
    peaks = peak_bytes(schedule, PROFILE)
    by_tier = {tier: sum(b.nbytes for b in schedule.buffers if b.tier == tier) for tier in Tier}
    phases = [(op.layer, op.phase) for op in schedule.ops if op.kind == Kind.COMPUTE]
    workspace = max(workspace_bytes(schedule.model, layer, phase, schedule.workload) for layer, phase in phases)
    assert workspace > 0
    assert peaks == {**by_tier, Tier.DEVICE: by_tier[Tier.DEVICE] + workspace}


@pytest.mark.parametrize("first", [False, True])
def test_the_workspace_of_a_recompute_is_that_of_what_it_makes(first: bool, schedule: Schedule) -> None:
    """Asked for with and without the block's output, in either order: what was found first is remembered."""
    model, workload = schedule.model, replace(schedule.workload, recompute="mlp")
    amounts = Amounts(model, workload)
    for output in (first, not first):
        right = workspace_bytes(model, 0, Phase.RECOMPUTE, workload, output=output)
        assert amounts.workspace(0, Phase.RECOMPUTE, output=output) == right
    assert right != workspace_bytes(model, 0, Phase.RECOMPUTE, workload, output=first)


def test_a_machines_budget_is_all_the_memory_it_has() -> None:
    machine = round_profile("gpu.memory=10GB", "host.memory=20GB", "nvme.capacity=30GB")
    found = memory_of(machine)
    assert found == MemoryBudget(device_bytes=10 * 10**9, host_bytes=20 * 10**9, nvme_bytes=30 * 10**9)
    assert memory_of(replace(machine, nvme=None)) == replace(found, nvme_bytes=0)


def test_exactly_enough_memory_fits_and_a_byte_less_does_not(schedule: Schedule) -> None:
    peaks = peak_bytes(schedule, PROFILE)
    enough = MemoryBudget(device_bytes=peaks[Tier.DEVICE], host_bytes=peaks[Tier.HOST])
    require_fit(schedule, PROFILE, enough)
    assert predict(schedule, PROFILE, enough).fits
    for tier, scarce in (
        (Tier.DEVICE, replace(enough, device_bytes=enough.device_bytes - 1)),
        (Tier.HOST, replace(enough, host_bytes=enough.host_bytes - 1)),
    ):
        with pytest.raises(DoesNotFit) as raised:
            require_fit(schedule, PROFILE, scarce)
        assert [(lack.tier, lack.over) for lack in raised.value.lacks] == [(tier, 1)]
        found = predict(schedule, PROFILE, scarce)
        assert not found.fits
        assert found.period_ns > 0  # a row in a table, with its reason


def test_what_does_not_fit_says_when_and_what_holds_the_bytes(schedule: Schedule) -> None:
    peaks = peak_bytes(schedule, PROFILE)
    with pytest.raises(DoesNotFit, match=r"while .* runs") as raised:
        require_fit(schedule, PROFILE, replace(PLENTY, device_bytes=peaks[Tier.DEVICE] - 1))
    assert raised.value.lacks[0].op is not None
    with pytest.raises(DoesNotFit, match="buffers are allocated") as raised:
        require_fit(schedule, PROFILE, replace(PLENTY, host_bytes=0))
    sizes = [size for _, size in raised.value.lacks[0].holders]
    assert sizes == sorted(sizes, reverse=True)
    assert dict(raised.value.lacks[0].holders)["optimizer state"] == 8 * schedule.model.total_params


def test_every_tier_that_is_short_is_told(schedule: Schedule) -> None:
    peaks = peak_bytes(schedule, PROFILE)
    scarce = MemoryBudget(device_bytes=peaks[Tier.DEVICE] - 3_600, host_bytes=peaks[Tier.HOST] - 12)
    with pytest.raises(DoesNotFit, match=r"^device memory is 3.6 kB short .*; and host memory is 12 B short") as raised:
        require_fit(schedule, PROFILE, scarce)
    assert raised.value.short == "device +3.6 kB, host +12 B"


def test_nvme_buffers_need_nvme() -> None:
    stored = replace(schedule_of([]), buffers=(Buffer(name="n", tier=Tier.NVME, nbytes=5),))
    with pytest.raises(DoesNotFit, match="nvme") as raised:
        require_fit(stored, PROFILE, replace(PLENTY, nvme_bytes=0))
    assert raised.value.lacks[0].holders == (("n", 5),)  # no op touches it, so that only its name tells what it is


def test_the_peak_rate_is_that_of_the_element_type() -> None:
    workload = Workload(micro_batch_size=1, seq_len=MODEL.max_position_embeddings)
    assert peak_flops(PROFILE, workload) == 1000e12
    assert peak_flops(PROFILE, replace(workload, precision="fp32")) == 100e12


def test_what_a_drive_is_written_in_a_day_is_state_times_steps() -> None:
    model = presets.load("tiny")
    profile = hardware.load("h200")
    workload = Workload(micro_batch_size=1, seq_len=16)
    found = predict(policies.build("streamed", model, workload, memory_of(profile), nvme=2), profile)
    state = sum(8 * model.params(i) for i in model.blocks[:2])  # two moments of fp32 each; all blocks are alike
    assert found.nvme_bytes_per_day == pytest.approx(state * 86_400 / (found.period_ns / 1e9))
    without = predict(policies.build("streamed", model, workload, memory_of(profile)), profile)
    assert without.nvme_bytes_per_day == 0 and without.drive_days is None


def test_a_drive_lasts_its_promise_over_a_days_writes() -> None:
    model, workload = presets.load("tiny"), Workload(micro_batch_size=1, seq_len=16)
    profile = hardware.override(hardware.load("h200"), ["nvme.endurance=600TB"])
    found = predict(policies.build("streamed", model, workload, memory_of(profile), nvme=2), profile)
    assert found.drive_days == pytest.approx(600e12 / found.nvme_bytes_per_day)
    unknown = predict(found.schedule, replace(profile, nvme=replace(profile.nvme, endurance=None)))  # type: ignore[type-var]
    assert unknown.drive_days is None

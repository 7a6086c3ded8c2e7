"""The SimPy engine: three layers by hand, sharing by hand, and what holds for every schedule."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import bare, loaded, round_profile, schedule_of, work_done

from schedules import policies, presets
from schedules.op import Stream, Wait
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Trace
from schedules.workload import MemoryBudget, Workload
from sim.cost import D2H, DRAM, DUPLEX, GPU, H2D, Demand, Terms
from sim.engine import Stuck, play, simulate
from sim.sharing import speeds

STEPS = 3


def ends(schedule: Schedule, trace: Trace) -> dict[str, list[int]]:
    """Op name -> when it ended in each step."""
    columns = trace.end_ns.reshape(trace.steps, -1).T.tolist()
    return {op.name: column for op, column in zip(schedule.ops, columns, strict=True)}


def double_buffer() -> tuple[Schedule, list[Demand]]:
    """Three layers stream through two slots. A copy takes 10, a forward 30, issuing anything 1."""
    ops = [
        bare("P0", Stream.H2D, writes="slot0"),
        bare("F0", Stream.COMPUTE, reads="slot0"),
        bare("P1", Stream.H2D, writes="slot1"),
        bare("F1", Stream.COMPUTE, reads="slot1"),
        bare("P2", Stream.H2D, writes="slot0"),
        bare("F2", Stream.COMPUTE, reads="slot0"),
    ]
    copy = Demand(duration_ns=10, usage={H2D: 1.0}, issue_ns=1)
    forward = Demand(duration_ns=30, usage={GPU: 1.0}, issue_ns=1)
    return schedule_of(ops), [copy, forward] * 3


def test_three_layers_through_two_slots() -> None:
    schedule, costs = double_buffer()
    trace = play(schedule, costs, steps=2)
    # P0 is issued at 1 and takes 10. F0 runs 11-41, F1 41-71 and F2 71-101, one after another. P1 follows P0
    # at once (11-21); P2 has to wait until F0 has left slot 0 (41-51). In the next step P0 waits for F2
    # (101-111), and from there on everything comes 100 later, but for P1: it stands behind P0 (111-121).
    assert ends(schedule, trace) == {
        "P0": [11, 111],
        "F0": [41, 141],
        "P1": [21, 121],
        "F1": [71, 171],
        "P2": [51, 151],
        "F2": [101, 201],
    }
    assert trace.issue_ns.tolist() == list(range(1, 13))
    rows = {(op.name, step): i for step in range(2) for i, op in enumerate(schedule.ops, step * 6)}
    assert trace.waited_on[rows["P0", 0]] == ISSUE
    assert trace.waited_on[rows["F0", 0]] == rows["P0", 0]
    assert trace.waited_on[rows["P2", 0]] == rows["F0", 0]
    assert trace.waited_on[rows["F2", 0]] == rows["F1", 0]
    assert trace.waited_on[rows["P0", 1]] == rows["F2", 0]


def test_a_blocking_op_stops_the_host() -> None:
    ops = [bare("A", Stream.COMPUTE, blocking=True), bare("B", Stream.H2D)]
    trace = play(schedule_of(ops), [Demand(duration_ns=50, issue_ns=2), Demand(duration_ns=5, issue_ns=3)], steps=1)
    assert trace.issue_ns.tolist() == [2, 55]
    assert trace.end_ns.tolist() == [52, 60]


def test_a_host_op_waits_and_keeps_the_host_busy() -> None:
    ops = [bare("P", Stream.H2D, writes="a"), bare("U", Stream.HOST, reads="a"), bare("B", Stream.COMPUTE)]
    costs = [Demand(duration_ns=40, issue_ns=1), Demand(duration_ns=7), Demand(duration_ns=5, issue_ns=1)]
    trace = play(schedule_of(ops), costs, steps=1)
    assert trace.issue_ns.tolist() == [1, 1, 49]  # the host came to U at 1, and was free at 48
    assert trace.start_ns.tolist() == [1, 41, 49]
    assert trace.waited_on.tolist() == [ISSUE, 0, ISSUE]


def test_of_two_that_end_together_the_one_issued_last_released_it() -> None:
    ops = [bare("P", Stream.H2D, writes="a"), bare("Q", Stream.D2H, writes="b"), bare("F", Stream.COMPUTE, "a b")]
    trace = play(schedule_of(ops), [Demand(duration_ns=20)] * 3, steps=1)
    assert trace.waited_on.tolist() == [ISSUE, ISSUE, 1]


def test_what_is_issued_just_as_the_op_that_it_waits_for_ends_was_held_up_by_its_issue() -> None:
    ops = [bare("P", Stream.H2D, writes="a"), bare("F", Stream.COMPUTE, reads="a")]
    trace = play(schedule_of(ops), [Demand(duration_ns=10), Demand(duration_ns=5, issue_ns=10, wake_ns=3)], steps=1)
    assert trace.start_ns.tolist() == [0, 13]
    assert trace.waited_on.tolist() == [ISSUE, ISSUE]


def test_copies_in_both_directions_share_the_duplex_limit() -> None:
    ops = [bare("P", Stream.H2D), bare("O", Stream.D2H)]
    costs = [
        Demand(duration_ns=100, usage={H2D: 1.0, DUPLEX: 0.8, DRAM: 0.0}),
        Demand(duration_ns=50, usage={D2H: 1.0, DUPLEX: 0.8, DRAM: 0.0}),
    ]
    trace = play(schedule_of(ops), costs, steps=1)
    # Each gets 1 / 1.6 = 0.625 of its speed: O's 50 take 80. P has done 50 by then, and the rest at full speed.
    assert trace.end_ns.tolist() == [130, 80]


def test_compute_is_slower_while_a_copy_runs() -> None:
    ops = [bare("P", Stream.H2D), bare("F", Stream.COMPUTE)]
    costs = [Demand(duration_ns=40, usage={H2D: 1.0}), Demand(duration_ns=100, usage={GPU: 1.0})]
    # at 1 / 1.25 of its speed F has done 32 when P ends at 40; 68 are left
    assert play(schedule_of(ops), costs, steps=1, slowdown=0.25).end_ns.tolist() == [40, 108]
    assert play(schedule_of(ops), costs, steps=1, slowdown=0.25, sharing=False).end_ns.tolist() == [40, 108]
    assert play(schedule_of(ops), costs, steps=1).end_ns.tolist() == [40, 100]


def test_a_third_of_the_speed_takes_exactly_three_times_as_long() -> None:
    ops = [bare("A", Stream.COMPUTE), bare("B", Stream.CPU), bare("C", Stream.D2H)]
    costs = [Demand(duration_ns=10, usage={DRAM: 1.0})] * 3
    assert play(schedule_of(ops), costs, steps=1).end_ns.tolist() == [30, 30, 30]


def test_ops_that_wait_for_each_other_are_told_apart_by_name() -> None:
    schedule = schedule_of(
        [bare("A", Stream.H2D), bare("B", Stream.COMPUTE)],
        waits=[Wait(op="A", on="B"), Wait(op="B", on="A")],
    )
    with pytest.raises(Stuck) as stuck:
        play(schedule, [Demand(duration_ns=1)] * 2, steps=2)
    assert "A (step 0) waits for B (step 0)\n  B (step 0) waits for A (step 0)" in str(stuck.value)


def test_the_chain_of_waits_leads_through_streams_and_past_what_has_ended() -> None:
    ops = [bare("D", Stream.CPU), bare("A", Stream.H2D), bare("C", Stream.H2D), bare("B", Stream.COMPUTE)]
    waits = [Wait(op="A", on="D"), Wait(op="A", on="B"), Wait(op="B", on="C")]
    with pytest.raises(Stuck) as stuck:
        play(schedule_of(ops, waits), [Demand(duration_ns=1)] * 4, steps=1)
    assert str(stuck.value).splitlines()[1:] == [
        "  A (step 0) waits for B (step 0)",
        "  B (step 0) waits for C (step 0)",
        "  C (step 0) stands on h2d behind A (step 0)",
    ]


def test_a_host_that_waits_for_what_it_has_not_issued_is_stuck() -> None:
    schedule = schedule_of(
        [bare("A", Stream.H2D, blocking=True), bare("C", Stream.H2D), bare("B", Stream.COMPUTE)],
        waits=[Wait(op="A", on="B")],
    )
    with pytest.raises(Stuck, match=r"A \(step 0\) waits for B \(step 0\)\n  B \(step 0\) is not issued while the "
                                    r"host waits for A \(step 0\)"):  # fmt: skip
        play(schedule, [Demand(duration_ns=1)] * 3, steps=1)


def test_a_wait_of_the_step_before_does_not_hold_the_first_step() -> None:
    schedule = schedule_of([bare("A", Stream.H2D), bare("B", Stream.COMPUTE)], [Wait(op="A", on="B", distance=1)])
    trace = play(schedule, [Demand(duration_ns=3), Demand(duration_ns=20)], steps=2)
    assert trace.start_ns.tolist() == [0, 0, 20, 20]


# ---- what holds for every schedule


@given(loaded())
def test_a_stream_runs_one_op_at_a_time_in_order(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS, slowdown=0.25)
    for stream in schedule.streams:
        rows = trace.rows_of(schedule, stream)
        assert (trace.start_ns[rows[1:]] >= trace.end_ns[rows[:-1]]).all()


@given(loaded())
def test_nothing_starts_before_what_it_waits_for(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS, slowdown=0.25)
    start, end = (column.reshape(STEPS, -1) for column in (trace.start_ns, trace.end_ns))
    assert (trace.start_ns >= trace.issue_ns).all()
    for wait in schedule.waits:
        op, on = schedule.index[wait.op], schedule.index[wait.on]
        assert (start[wait.distance :, op] >= end[: STEPS - wait.distance, on]).all()


@given(loaded())
def test_an_op_starts_the_moment_it_can(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS, slowdown=0.25)
    for row in range(len(trace)):
        on = int(trace.waited_on[row])
        assert trace.start_ns[row] == (trace.issue_ns[row] if on == ISSUE else trace.end_ns[on])


@given(loaded())
def test_the_host_issues_in_order_and_takes_its_time(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS)
    free = 0
    for row in range(len(trace)):
        op, cost = schedule.ops[trace.op[row]], costs[trace.op[row]]
        assert trace.issue_ns[row] == free + cost.issue_ns
        waits = op.blocking or op.stream == Stream.HOST
        free = int(trace.end_ns[row] if waits else trace.issue_ns[row])


@given(loaded())
@settings(max_examples=50)
def test_every_op_gets_exactly_the_work_it_needs(case: tuple[Schedule, list[Demand]]) -> None:
    """Speeds re-derived from who runs when: the work (bytes, FLOPs) of an op is done at its end, not before."""
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS)
    moments = sorted({*trace.start_ns.tolist(), *trace.end_ns.tolist()})
    spans: dict[int, list[tuple[int, int, float]]] = {row: [] for row in range(len(trace))}
    for since, to in pairwise(moments):
        rows = np.flatnonzero((trace.start_ns <= since) & (trace.end_ns >= to)).tolist()
        found = speeds([costs[trace.op[row]].usage for row in rows])
        for row, speed in zip(rows, found, strict=True):
            spans[row].append((since, to, speed))
    for row, span in spans.items():
        duration, start, end = costs[trace.op[row]].duration_ns, int(trace.start_ns[row]), int(trace.end_ns[row])
        # the engine rounds a speed up by a part in 2**50; work is compared to a part in 2**40
        assert work_done(start, end, span) * (2**40 + 1) >= duration * 2**40
        assert duration == 0 or work_done(start, end - 1, span) < duration


@given(loaded())
def test_what_is_not_shared_ends_its_duration_after_it_starts(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS, sharing=False)
    durations = np.array([cost.duration_ns for cost in costs])[trace.op]
    assert (trace.end_ns - trace.start_ns == durations).all()


@given(loaded())
def test_sharing_and_slowdown_never_make_anything_earlier(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    alone = play(schedule, costs, steps=STEPS, sharing=False)
    shared = play(schedule, costs, steps=STEPS)
    slowed = play(schedule, costs, steps=STEPS, sharing=False, slowdown=0.25)
    assert (shared.end_ns >= alone.end_ns).all()
    assert (slowed.end_ns >= alone.end_ns).all()


@given(loaded())
def test_time_scales_when_all_rates_do(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    slower = [replace(c, duration_ns=3 * c.duration_ns, issue_ns=3 * c.issue_ns) for c in costs]
    trace, scaled = (play(schedule, found, steps=STEPS, sharing=False) for found in (costs, slower))
    assert (scaled.start_ns == 3 * trace.start_ns).all()
    assert (scaled.waited_on == trace.waited_on).all()


# ---- on a machine


def test_the_same_seed_gives_the_same_noise() -> None:
    schedule, profile = double_buffer()[0], round_profile()
    schedule = replace(schedule, ops=tuple(replace(op, flops=10**12) for op in schedule.ops))
    noisy = Terms(noise=0.1)
    once, again, other = (simulate(schedule, profile, terms=noisy, seed=seed) for seed in (1, 1, 2))
    assert (once.end_ns == again.end_ns).all()
    assert (once.end_ns != other.end_ns).any()
    assert (simulate(schedule, profile, seed=1).end_ns == simulate(schedule, profile, seed=2).end_ns).all()


@pytest.mark.parametrize("term", ["issue", "size_dependent_bandwidth", "sharing", "compute_slowdown"])
def test_every_term_counts_unless_it_is_switched_off(term: str) -> None:
    profile = round_profile("links.duplex=50GB/s", "gpu.copy_slowdown=1fraction")
    workload = Workload(micro_batch_size=2, seq_len=2048)
    memory = MemoryBudget(device_bytes=10**11, host_bytes=10**11)
    schedule = policies.build("zero3_offload", presets.load("demo"), workload, memory)
    without = simulate(schedule, profile, terms=Terms(**{term: False}))  # type: ignore[arg-type]
    assert without.end_ns.max() < simulate(schedule, profile).end_ns.max()


def test_planning_never_imports_torch() -> None:
    code = "import sys, sim.prediction, sim.longest_path; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_schedule_without_ops_has_an_empty_trace() -> None:
    step, room = Workload(micro_batch_size=1, seq_len=16), MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
    schedule = policies.build("streamed", presets.load("tiny"), step, room)
    assert len(play(replace(schedule, ops=(), waits=(), buffers=()), [], steps=2)) == 0

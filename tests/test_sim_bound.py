"""Bounds: nothing beats them, the cycle ratio is met where nothing is shared, and what binds is named."""

from __future__ import annotations

from fractions import Fraction

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import bare, loaded, round_profile, schedule_of

from schedules import policies, presets
from schedules.op import Stream, Wait
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim.bound import bound, bound_of, largest_cycle_ratio
from sim.cost import DRAM, GPU, H2D, Demand, Terms, demands
from sim.engine import play, simulate
from sim.longest_path import arcs, evaluate


def weights(costs: list[Demand]) -> list[int]:
    return [ns for cost in costs for ns in (cost.issue_ns, cost.duration_ns)]


def test_three_layers_through_two_slots() -> None:
    """The step of the engine's test: 90 of compute, and a copy of 10 that cannot be hidden."""
    names = [("P0", "F0", "slot0"), ("P1", "F1", "slot1"), ("P2", "F2", "slot0")]
    ops = [op for p, f, slot in names for op in (bare(p, Stream.H2D, "", slot), bare(f, Stream.COMPUTE, slot))]
    costs = [
        Demand(duration_ns=10, usage={H2D: 1.0}, issue_ns=1),
        Demand(duration_ns=30, usage={GPU: 1.0}, issue_ns=1),
    ] * 3
    found = bound_of(schedule_of(ops), costs)
    assert found.area_ns == {H2D: 30, GPU: 90}
    assert found.cycle_ns == 100
    assert sorted(found.cycle) == ["F0", "F1", "F2", "P0"]
    assert found.binding == "compute + h2d"
    assert found.period_ns == 100.0


def test_what_binds_is_what_takes_a_real_part_of_the_circle_the_longest_first() -> None:
    """A hand-over of a thousandth does not make a stream one of those that bind."""
    ops = [bare("A", Stream.H2D), bare("B", Stream.CPU), bare("C", Stream.COMPUTE)]
    waits = [Wait(op="B", on="A"), Wait(op="C", on="B"), Wait(op="A", on="C", distance=1)]
    found = bound_of(schedule_of(ops, waits), [Demand(duration_ns=ns) for ns in (300, 1, 699)])
    assert found.streams_ns == {"compute": 699, "h2d": 300, "cpu": 1}
    assert found.binding == "compute + h2d"


def test_a_stream_on_its_own_can_be_what_binds() -> None:
    # each waits for the other of the step before: 30 + 35 in two steps, less than B behind itself
    waits = [Wait(op="A", on="B", distance=1), Wait(op="B", on="A", distance=1)]
    schedule = schedule_of([bare("A", Stream.H2D), bare("B", Stream.COMPUTE)], waits)
    found = bound_of(schedule, [Demand(duration_ns=30), Demand(duration_ns=35)])
    assert (found.cycle_ns, found.cycle, found.binding) == (35, ("B",), "compute")


def test_a_circle_over_two_steps_has_half_its_length_per_step() -> None:
    # A, then B; C a step later; A again a step after that: 4 + 5 + 6 in two steps
    ops = [bare("A", Stream.H2D), bare("B", Stream.COMPUTE), bare("C", Stream.D2H)]
    waits = [Wait(op="B", on="A"), Wait(op="C", on="B", distance=1), Wait(op="A", on="C", distance=1)]
    found = bound_of(schedule_of(ops, waits), [Demand(duration_ns=ns) for ns in (4, 5, 6)])
    assert found.cycle_ns == Fraction(15, 2)
    assert sorted(found.cycle) == ["A", "B", "C"]
    assert sorted(found.streams_ns) == ["compute", "d2h", "h2d"]


def test_of_several_circles_the_longest_binds() -> None:
    # A and B take 20 in turn, C and D 25; each alone takes at most 15
    ops = [bare("A", Stream.H2D), bare("B", Stream.COMPUTE), bare("C", Stream.D2H), bare("D", Stream.CPU)]
    pairs = [("A", "B"), ("C", "D")]
    waits = [w for a, b in pairs for w in (Wait(op=b, on=a), Wait(op=a, on=b, distance=1))]
    found = bound_of(schedule_of(ops, waits), [Demand(duration_ns=ns) for ns in (10, 10, 10, 15)])
    assert (found.cycle_ns, sorted(found.cycle)) == (25, ["C", "D"])


def test_the_issuing_host_can_be_what_binds() -> None:
    schedule = schedule_of([bare("A", Stream.H2D), bare("B", Stream.COMPUTE)])
    found = bound_of(schedule, [Demand(duration_ns=3, issue_ns=10), Demand(duration_ns=4, issue_ns=12)])
    assert (found.cycle_ns, found.binding, found.cycle) == (22, "host", ())


def test_a_shared_resource_can_be_what_binds() -> None:
    schedule = schedule_of([bare("A", Stream.H2D), bare("B", Stream.CPU)])
    costs = [Demand(duration_ns=100, usage={DRAM: 0.75})] * 2
    found = bound_of(schedule, costs)
    assert (found.binding, found.period_ns) == (DRAM, 150.0)
    assert bound_of(schedule, costs, sharing=False).period_ns == 100.0
    # of several that are over-full the fullest binds; one that is just full does not, for its streams are as busy
    several = bound_of(schedule, [Demand(duration_ns=100, usage={H2D: 0.6, DRAM: 0.8, GPU: 0.75})] * 2)
    assert (several.binding, several.period_ns) == (DRAM, 160.0)
    full = [Demand(duration_ns=100, usage={DRAM: 0.5})] * 2
    assert bound_of(schedule, full).binding in ("h2d", "cpu")


def test_what_takes_no_time_is_not_told_of_a_circle() -> None:
    ops = [bare("A", Stream.H2D), bare("B", Stream.CPU), bare("C", Stream.COMPUTE)]
    waits = [Wait(op="B", on="A"), Wait(op="C", on="B"), Wait(op="A", on="C", distance=1)]
    found = bound_of(schedule_of(ops, waits), [Demand(duration_ns=ns) for ns in (3, 0, 7)])
    assert (found.cycle_ns, sorted(found.cycle), found.streams_ns) == (10, ["A", "C"], {"compute": 7, "h2d": 3})


@given(loaded())
def test_no_run_is_shorter_than_the_area_of_its_steps(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=5)
    for area in bound_of(schedule, costs).area_ns.values():
        assert trace.end_ns.max() >= 5 * area


@given(loaded())
def test_no_op_on_the_critical_circle_comes_back_sooner(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    ratio, nodes = largest_cycle_ratio(schedule, weights(costs))
    trace = play(schedule, costs, steps=8, slowdown=0.25)
    moments = np.stack([trace.issue_ns, trace.end_ns], axis=1).reshape(8, -1)  # of every node, step by step
    length = sum(weights(costs)[node] for node in nodes)
    spanned = length / ratio if ratio else 1
    assert spanned == int(spanned)
    later = moments[int(spanned) :, nodes] - moments[: 8 - int(spanned), nodes]
    assert (later >= length).all()


@given(loaded(max_ops=5, longest=20))
@settings(max_examples=40)
def test_the_largest_ratio_of_all_circles_one_by_one(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    lasts, graph = weights(costs), networkx.DiGraph()
    for arc in arcs(schedule):
        spanned = graph.get_edge_data(arc.start, arc.to, {"distance": arc.distance})["distance"]
        graph.add_edge(arc.start, arc.to, distance=min(spanned, arc.distance))
    found = Fraction(0)
    for circle in networkx.simple_cycles(graph):
        spanned = sum(graph.edges[a, b]["distance"] for a, b in zip(circle, circle[1:] + circle[:1], strict=True))
        found = max(found, Fraction(sum(lasts[node] for node in circle), spanned))
    assert largest_cycle_ratio(schedule, lasts)[0] == found


@given(loaded(max_ops=8, longest=20))
@settings(max_examples=40)
def test_without_sharing_the_cycle_ratio_is_the_pace(case: tuple[Schedule, list[Demand]]) -> None:
    """n steps take n times the ratio, give or take what is in flight at the ends: pinned from both sides."""
    schedule, costs = case
    ratio, _ = largest_cycle_ratio(schedule, weights(costs))
    steps = 100
    durations, issue = ([[getattr(c, name) for c in costs]] for name in ("duration_ns", "issue_ns"))
    _, end = evaluate(schedule, np.array(durations), np.array(issue), steps)
    most = steps * ratio + sum(weights(costs))  # a path is circles, none above the ratio, and a rest
    spanned = sum(arc.distance for arc in arcs(schedule))
    assert (steps - spanned) * ratio <= int(end.max()) <= most


@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_settles_at_its_cycle_ratio_and_no_sharing_beats_it(policy: str) -> None:
    workload = Workload(micro_batch_size=2, accumulation=2, seq_len=64)
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
    schedule = policies.build(policy, presets.load("demo"), workload, memory)
    profile, alone = round_profile(), Terms(sharing=False, compute_slowdown=False)
    ratio, nodes = largest_cycle_ratio(schedule, weights(list(demands(schedule, profile, alone))))
    trace = simulate(schedule, profile, steps=24, terms=alone)
    moments = np.stack([trace.issue_ns, trace.end_ns], axis=1).reshape(24, -1)[:, nodes[0]]
    assert any(moments[-1] - moments[-1 - c] == c * ratio for c in range(1, 12))
    # the last step of a run has the machine to itself at its end: it does not count
    step_end = simulate(schedule, profile, steps=10).step_end_ns
    limit = bound(schedule, profile)
    assert (step_end[-2] - step_end[-6]) / 4 >= limit.period_ns
    assert limit.cycle_ns == ratio

"""The longest-path engine agrees with the SimPy one to the nanosecond wherever nothing is shared."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import bare, loaded, round_profile, schedule_of

from schedules import policies, presets
from schedules.op import Stream, Wait
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim.cost import Demand, Terms, demands
from sim.engine import Stuck, play, simulate
from sim.longest_path import evaluate, periods

STEPS = 4


def columns(costs: list[Demand] | tuple[Demand, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Durations and issue times of a batch of one."""
    return np.array([[c.duration_ns for c in costs]]), np.array([[c.issue_ns for c in costs]])


@given(loaded(max_ops=14))
def test_both_engines_agree_on_random_schedules(case: tuple[Schedule, list[Demand]]) -> None:
    schedule, costs = case
    trace = play(schedule, costs, steps=STEPS, sharing=False)
    start, end = evaluate(schedule, *columns(costs), STEPS)
    assert start[0].ravel().tolist() == trace.start_ns.tolist()
    assert end[0].ravel().tolist() == trace.end_ns.tolist()


@given(loaded(max_ops=14), st.integers(1, 60))
def test_both_engines_agree_where_streams_notice_late(case: tuple[Schedule, list[Demand]], wake_ns: int) -> None:
    schedule, costs = case
    late = [replace(cost, wake_ns=wake_ns) for cost in costs]
    trace = play(schedule, late, steps=STEPS, sharing=False)
    wake = np.full((1, len(costs)), wake_ns)
    start, end = evaluate(schedule, *columns(costs), STEPS, wake)
    assert start[0].ravel().tolist() == trace.start_ns.tolist()
    assert end[0].ravel().tolist() == trace.end_ns.tolist()
    assert (trace.end_ns >= play(schedule, costs, steps=STEPS, sharing=False).end_ns).all()


def test_a_stream_that_is_busy_notices_meanwhile() -> None:
    ops = [bare("A", Stream.H2D, writes="a"), bare("B", Stream.COMPUTE), bare("C", Stream.COMPUTE, "a")]
    costs = [Demand(duration_ns=ns, wake_ns=10) for ns in (5, 30, 7)]
    trace = play(schedule_of(ops), costs, steps=1)
    assert trace.start_ns.tolist() == [10, 10, 40]  # C was released at 15, while B ran until 40
    alone = play(schedule_of([ops[0], ops[2]]), [costs[0], costs[2]], steps=1)
    assert alone.start_ns.tolist() == [10, 25]
    assert alone.waited_on.tolist() == [-1, 0]


def test_a_stream_need_not_notice_what_it_did_itself() -> None:
    """A wait for an op of the same stream, as files by hand may have, changes nothing."""
    ops = [bare("A", Stream.COMPUTE), bare("B", Stream.COMPUTE)]
    costs = [Demand(duration_ns=ns, wake_ns=10) for ns in (30, 7)]
    waits = [Wait(op="B", on="A"), Wait(op="A", on="B", distance=1)]
    for schedule in (schedule_of(ops), schedule_of(ops, waits)):
        start, _ = evaluate(schedule, *columns(costs), 2, np.full((1, 2), 10))
        assert start[0].ravel().tolist() == [10, 40, 47, 77]
        trace = play(schedule, costs, steps=2)
        assert trace.start_ns.tolist() == [10, 40, 47, 77]
        assert trace.waited_on.tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("policy", policies.names())
def test_both_engines_agree_on_every_policy(policy: str, accumulation: int) -> None:
    workload = Workload(micro_batch_size=2, accumulation=accumulation, seq_len=64, grad_clip=1.0)
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
    schedule = policies.build(policy, presets.load("demo"), workload, memory)
    terms = Terms(sharing=False, compute_slowdown=False)
    trace = simulate(schedule, round_profile(), steps=STEPS, terms=terms)
    start, end = evaluate(schedule, *columns(demands(schedule, round_profile(), terms)), STEPS)
    assert start[0].ravel().tolist() == trace.start_ns.tolist()
    assert end[0].ravel().tolist() == trace.end_ns.tolist()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", list(itertools.product((1, 2, 7, 16), (1, 4))), ids=str)
@pytest.mark.parametrize("policy", [name for name in policies.names() if "activations" in policies.knobs(name)])
def test_nothing_is_unsafe_and_both_engines_agree_whatever_blocks_keep(policy: str, shape: tuple[int, int]) -> None:
    blocks, accumulation = shape
    wheres = get_args(policies.knobs(policy)["activations"].annotation)
    assert len(wheres) > 1
    choices: list[dict[str, Knob]] = [{"activations": where} for where in wheres]
    if "every" in policies.knobs(policy):
        choices.append({"activations": "recompute", "every": 3})
    model = replace(presets.load("tiny"), num_hidden_layers=blocks)
    workload = Workload(micro_batch_size=1, accumulation=accumulation, seq_len=16)
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**10, nvme_bytes=10**10)
    terms = Terms(sharing=False, compute_slowdown=False)
    for knobs in choices:
        schedule = policies.build(policy, model, workload, memory, **knobs)
        verify(schedule)
        trace = simulate(schedule, round_profile(), steps=2, terms=terms)
        start, end = evaluate(schedule, *columns(demands(schedule, round_profile(), terms)), 2)
        assert start[0].ravel().tolist() == trace.start_ns.tolist(), knobs
        assert end[0].ravel().tolist() == trace.end_ns.tolist(), knobs


def test_a_batch_is_its_samples_one_by_one_also_where_steps_differ() -> None:
    ops = [bare("P", Stream.H2D, writes="a"), bare("F", Stream.COMPUTE, "a", "b"), bare("U", Stream.HOST, "b", "a")]
    schedule = schedule_of(ops)
    random = np.random.default_rng(0)
    durations, issue = random.integers(0, 100, (5, STEPS, 3)), random.integers(0, 9, (5, 3))
    start, end = evaluate(schedule, durations, issue, STEPS)
    assert start.shape == end.shape == (5, STEPS, 3)
    for sample in range(5):
        costs = [Demand(duration_ns=0, issue_ns=int(ns)) for ns in issue[sample]]
        trace = play(schedule, costs, steps=STEPS, durations=durations[sample])
        assert end[sample].ravel().tolist() == trace.end_ns.tolist()
        assert start[sample].ravel().tolist() == trace.start_ns.tolist()


def test_a_wait_on_an_op_further_down_is_followed() -> None:
    schedule = schedule_of([bare("A", Stream.H2D), bare("B", Stream.COMPUTE)], [Wait(op="A", on="B")])
    start, _ = evaluate(schedule, np.array([[5, 40]]), np.array([[1, 1]]), 1)
    assert start.ravel().tolist() == [42, 2]


def test_periods_of_a_batch() -> None:
    # F reads what P brought and P overwrites it: a step takes the two together
    schedule = schedule_of([bare("P", Stream.H2D, writes="a"), bare("F", Stream.COMPUTE, reads="a")])
    found = periods(schedule, np.array([[10, 30], [5, 70]]), np.zeros((2, 2), dtype=np.int64))
    assert found.tolist() == [40.0, 75.0]


def test_a_period_is_the_mean_of_the_last_three_of_six_steps() -> None:
    ops = [bare("P", Stream.H2D), bare("F", Stream.COMPUTE), bare("O", Stream.D2H), bare("U", Stream.CPU)]
    schedule = schedule_of(ops, [Wait(op="F", on="P"), Wait(op="O", on="F")])
    found = periods(schedule, np.array([[50, 50, 50, 70]]), np.zeros((1, 4), dtype=np.int64))
    # O ends at 150, 200 and so on to 400, U at 70, 140 and so on to 420: the third step at 250, the sixth at 420
    assert found.tolist() == [(420 - 250) / 3]


def test_ops_that_wait_for_each_other_are_named() -> None:
    waits = [Wait(op="A", on="B"), Wait(op="B", on="A")]
    schedule = schedule_of([bare("C", Stream.CPU), bare("A", Stream.H2D), bare("B", Stream.COMPUTE)], waits)
    with pytest.raises(Stuck, match=r": A, B$"):
        evaluate(schedule, np.ones((1, 3), dtype=np.int64), np.ones((1, 3), dtype=np.int64), 1)

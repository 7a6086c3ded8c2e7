"""Proofs of order: below every order that can be written down, exact by hand, and refused where they take too long."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from strategies import bare, loaded, schedule_of

from schedules import policies, presets
from schedules.errors import InputError
from schedules.op import Op, Stream
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware, order_proof
from sim.bound import largest_cycle_ratio
from sim.cost import Demand
from sim.order_proof import OrderProof, Question
from sim.prediction import memory_of

H200 = hardware.load("h200")


def schedule(policy: str, blocks: int = 2, **knobs: int) -> Schedule:
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=blocks, vocab_size=4096)
    return policies.build(policy, model, Workload(micro_batch_size=1, seq_len=512), memory_of(H200), **knobs)


def proof_of(ops: Sequence[Op], durations: Sequence[int]) -> OrderProof:
    pytest.importorskip("ortools")
    costs = [Demand(duration_ns=ns, usage={}, issue_ns=0) for ns in durations]
    return order_proof.prove_order(schedule_of(ops), costs, seconds=10)


def loads(first: str, second: str) -> list[Op]:
    """Two loads, each into a buffer, and the two pieces of work on what was loaded."""
    return [
        bare("load 1", Stream.H2D, "", first),
        bare("work 1", Stream.COMPUTE, first, ""),
        bare("load 2", Stream.H2D, "", second),
        bare("work 2", Stream.COMPUTE, second, ""),
    ]


def test_one_buffer_holds_one_value_at_a_time() -> None:
    found = proof_of(loads("a", "a"), [3000, 1000, 1000, 3000])
    assert found.period_ns == 8000
    assert 7990 <= found.bound_ns <= 8000 and found.finished


def test_with_two_buffers_a_busy_stream_is_the_limit() -> None:
    found = proof_of(loads("a", "b"), [3000, 1000, 1000, 3000])
    assert found.bound_ns == 4000


def test_values_may_take_any_buffer_of_their_size() -> None:
    """Three values of 4,000 ns each share two buffers: 6,000 ns, though one buffer holds two of them here."""
    ops = [
        bare(f"{i}", stream, "", b) for i, (stream, b) in enumerate(zip((Stream.H2D, Stream.D2H), "ab", strict=True))
    ]
    found = proof_of([*ops, bare("2", Stream.COMPUTE, "", "a")], [4000] * 3)
    assert found.period_ns == 8000
    assert 5900 <= found.bound_ns <= 6000 and found.finished


def test_a_value_that_is_changed_in_place_is_read_before_and_after_as_written() -> None:
    ops = [bare("load", Stream.H2D, "home", "slot"), bare("work", Stream.COMPUTE, "slot", "grad")]
    ops += [bare("update", Stream.CPU, "home grad", "home")]
    found = proof_of(ops, [1000, 2000, 3000])
    assert found.period_ns == 6000
    assert 5980 <= found.bound_ns <= 6000  # but for what rounding to units takes away
    assert (2, 0, 1) in Question.of(schedule_of(ops), [Demand(duration_ns=1, usage={}, issue_ns=0)] * 3).after


def test_the_host_stands_still_while_it_waits() -> None:
    ops = [bare("a", Stream.H2D, "", "", blocking=True), bare("b", Stream.COMPUTE, "", "", blocking=True)]
    assert proof_of(ops, [1000, 2000]).bound_ns == 3000


@settings(max_examples=15)
@given(case=loaded(max_ops=5))
def test_no_order_of_the_same_work_is_faster(case: tuple[Schedule, list[Demand]]) -> None:
    pytest.importorskip("ortools")
    given_order, costs = case
    found = order_proof.prove_order(given_order, costs, seconds=2)
    cost = dict(zip(given_order.index, costs, strict=True))
    fastest = found.period_ns
    for ops in itertools.permutations(given_order.ops):
        other = schedule_of(ops)
        demands = [cost[op.name] for op in ops]
        if work(other, demands) == work(given_order, costs):
            ratio, _ = largest_cycle_ratio(other, [ns for d in demands for ns in (d.issue_ns, d.duration_ns)])
            fastest = min(fastest, Fraction(ratio))
    assert found.bound_ns <= fastest


def work(of: Schedule, costs: list[Demand]) -> tuple[set[object], set[object]]:
    """What is done to which value, whatever the order."""
    name = [op.name for op in of.ops]
    question = Question.of(of, costs)
    after = {(name[first], name[then], steps) for first, then, steps in question.after}
    uses = {
        (name[use.first], frozenset((name[op], steps) for op, steps in use.until))
        for uses in question.uses.values()
        for use in uses
    }
    return after, uses


def test_one_stream_has_nothing_to_gain() -> None:
    pytest.importorskip("ortools")
    found = order_proof.prove(schedule("resident"), H200)
    assert found.finished and found.bound_ns == found.period_ns and found.gain == 0.0


def test_a_serial_schedule_has_more_to_gain_than_ours() -> None:
    pytest.importorskip("ortools")
    ours, released = (order_proof.prove(schedule(name), H200, seconds=2) for name in ("streamed", "megatrain_released"))
    assert 0 < ours.bound_ns <= ours.period_ns
    assert 0 < released.bound_ns <= released.period_ns
    assert ours.gain < released.gain


def test_a_large_schedule_and_a_missing_solver_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="an order is proven up to 400: take fewer layers"):
        order_proof.prove(schedule("streamed", blocks=80), H200)

    small = schedule("streamed")
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(InputError, match=r"pip install 'megatrain\[prove\]'"):
        order_proof.prove(small, H200)

"""Proofs of order: exact where nothing can be gained, below every schedule, and refused where they take too long."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from schedules import policies, presets
from schedules.errors import InputError
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware, order_proof
from sim.prediction import memory_of

H200 = hardware.load("h200")


def schedule(policy: str, blocks: int = 2, **knobs: int) -> Schedule:
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=blocks, vocab_size=4096)
    return policies.build(policy, model, Workload(micro_batch_size=1, seq_len=512), memory_of(H200), **knobs)


def test_what_is_written_is_read_later_in_any_order() -> None:
    of = schedule("streamed")
    index = of.index
    pairs = set(order_proof.needed(of))
    assert (index["P.w.0"], index["F.0.0"]) in pairs
    assert (index["B.0.0"], index["O.g.0"]) in pairs
    # the slot must be free: a matter of how many there are, which the proof sets aside
    assert (index["F.0.0"], index["P.w.1"]) not in pairs


def test_one_stream_has_nothing_to_gain() -> None:
    pytest.importorskip("ortools")
    found = order_proof.prove(schedule("resident"), H200)
    assert found.optimal and found.bound_ns == found.step_ns and found.gain == 0.0


def test_no_schedule_of_these_ops_is_shorter_and_a_serial_one_has_much_to_gain() -> None:
    pytest.importorskip("ortools")
    ours, released = (order_proof.prove(schedule(name), H200, seconds=5) for name in ("streamed", "megatrain_released"))
    assert 0 < ours.bound_ns <= ours.step_ns
    assert 0 < released.bound_ns <= released.step_ns
    assert ours.gain < 0.5


def test_a_large_schedule_and_a_missing_solver_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="an order is proven up to 400: take fewer layers"):
        order_proof.prove(schedule("streamed", blocks=80), H200)

    small = schedule("streamed")
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(InputError, match=r"pip install 'megatrain\[prove\]'"):
        order_proof.prove(small, H200)

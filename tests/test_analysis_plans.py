"""The table of plans: beside every named policy, with what does not fit as a row."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from analysis import plans
from analysis.compare import OUR_STATE
from megatrain.this_machine import machine_name, today
from schedules import policies, presets
from schedules.workload import Workload
from sim import hardware
from sim.prediction import memory_of, predict

MODEL = replace(presets.load("qwen2.5-7b"), num_hidden_layers=3, vocab_size=8192)
SMALL = hardware.override(hardware.load("rtx4090"), ["gpu.memory=6GB"])
STEP = {"seq_len": 512, "tokens_per_step": 4 * 512}


@functools.cache
def small() -> tuple[plans.Row, dict[str, float]]:
    """A row and what named policies do, which takes seconds."""
    return plans.row(MODEL, SMALL, **STEP, machine="small")


def test_a_row_has_the_plan_and_the_best_that_every_policy_does() -> None:
    row, named = small()
    assert row.machine == "small" and row.reason == ""
    assert row.planned_on == today() and row.planned_by == f"1 process on {machine_name()}"
    assert row.best_named_tokens_per_s == max(rate for rate in named.values() if not math.isnan(rate))
    assert row.tokens_per_s >= row.best_named_tokens_per_s == named[row.best_named]
    assert row.gap == pytest.approx(row.step_s / row.bound_s - 1.0)


def test_policies_that_are_known_are_not_predicted_again() -> None:
    row, named = small()
    known = {name: 1.0 for name in named if name != "lohan"} | {"gemini": 1e9}
    again, rates = plans.beside(row, MODEL, SMALL, known)
    assert rates == {**known, "lohan": named["lohan"]} and list(rates) == list(named)
    assert again == replace(row, best_named="gemini", best_named_tokens_per_s=1e9, zero3_offload_tokens_per_s=1.0)


def test_a_bound_is_computed_again_and_the_parts_of_the_gap_with_it() -> None:
    row, _ = small()
    low = replace(row, bound_s=row.bound_s / 2, gap=2 * row.gap + 1, more_work=2 * row.more_work + 1)
    again = plans.bounded(low, MODEL, SMALL)
    for found, right in ((again.bound_s, row.bound_s), (again.gap, row.gap), (again.more_work, row.more_work)):
        assert found == pytest.approx(right, abs=1e-9)
    assert replace(again, bound_s=row.bound_s, gap=row.gap, more_work=row.more_work) == row


def test_a_named_policy_has_what_suits_it() -> None:
    """More micro-batches where fewer do not fit, and what is pointwise computed again where that is faster."""
    named = plans.named_rates(MODEL, SMALL, Workload(micro_batch_size=4, seq_len=512), ["streamed"])
    budget, found = memory_of(SMALL), []
    for (size, count), mode in [(split, mode) for split in ((4, 1), (2, 2)) for mode in ("none", "pointwise")]:
        workload = Workload(micro_batch_size=size, accumulation=count, seq_len=512, recompute=mode)
        prediction = predict(policies.build("streamed", MODEL, workload, budget), SMALL)
        assert prediction.fits
        found.append(prediction.tokens_per_s)
    assert named["streamed"] == max(found)


def test_zero_infinity_has_the_knobs_that_suit_it() -> None:
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=12)  # several sub-groups, which can overlap
    profile = hardware.override(hardware.load("rtx4090"), ["nvme.write=7GB/s", "nvme.both=2fraction"])
    whole = Workload(micro_batch_size=4, seq_len=512)
    named = plans.named_rates(model, profile, whole, ["zero_infinity", "roundpipe"])
    rates: dict[bool, list[float]] = {True: [], False: []}  # with parameters on the drive, or not
    for knobs in plans.tried_with("zero_infinity", model):
        for mode in ("none", "pointwise"):
            found = plans.fitting_rates("zero_infinity", model, profile, whole, mode, knobs)
            rates["params_on_nvme" in knobs].extend(found or [])
    assert named["zero_infinity"] == max(rates[True]) > max(rates[False])
    assert "roundpipe" not in named  # stale


def test_streamed_has_no_more_on_a_drive_than_the_host_has_no_room_for() -> None:
    short, whole = hardware.override(SMALL, ["host.memory=8GB"]), Workload(micro_batch_size=4, seq_len=512)
    named = plans.named_rates(MODEL, short, whole, ["streamed"])
    tried = [plans.fitting_rates("streamed", MODEL, short, whole, "none", {"nvme": n}) or [0.0] for n in range(4)]
    least = next(n for n in range(4) if max(tried[n]))
    assert least and named["streamed"] >= max(tried[least]) == max(map(max, tried))


def test_a_named_policy_keeps_its_activations_where_that_is_faster() -> None:
    machine, whole = hardware.load("h200"), Workload(micro_batch_size=8, seq_len=2048)
    as_it_comes = plans.fitting_rates("zero3_offload", MODEL, machine, whole, "none", OUR_STATE)
    assert as_it_comes
    assert plans.named_rates(MODEL, machine, whole, ["zero3_offload"])["zero3_offload"] > 1.05 * max(as_it_comes)


@pytest.mark.parametrize(
    ("rates", "tried"),
    [([10.0, 9.0, 20.0], [10.0, 9.0]), ([10.0, 12.0, 13.0, 13.0, 20.0], [10.0, 12.0, 13.0, 13.0]), ([10.0], [10.0])],
)
def test_smaller_micro_batches_are_tried_as_long_as_they_are_faster(
    rates: list[float], tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = iter(rates)
    monkeypatch.setattr(plans, "predict", lambda schedule, profile: SimpleNamespace(tokens_per_s=next(coming)))
    step = Workload(micro_batch_size=2 ** (len(rates) - 1), seq_len=16)
    assert plans.fitting_rates("streamed", MODEL, hardware.load("h200"), step, "none", {}) == tried


def test_policies_that_can_use_a_drive_do_so_where_the_host_is_short() -> None:
    short, whole = hardware.override(SMALL, ["host.memory=8GB"]), Workload(micro_batch_size=4, seq_len=512)
    named = plans.named_rates(MODEL, short, whole, ["greedysnake", "lohan"])
    for name in ("greedysnake", "lohan"):
        assert named[name] > 0 and not plans.fitting_rates(name, MODEL, short, whole, "none", {})


def test_what_does_not_fit_is_a_row_with_its_reason() -> None:
    nowhere = replace(hardware.override(SMALL, ["gpu.memory=1GB", "host.memory=1GB"]), nvme=None)
    row, named = plans.row(MODEL, nowhere, **STEP)
    assert math.isnan(row.tokens_per_s) and not named and "qwen2.5-7b that is searched fits" in row.reason
    table = plans.frame([small(), (row, named)])
    lines = plans.markdown(table).splitlines()
    assert len(lines) == 4 and "nothing fits" in lines[-1]

"""Published points: their arithmetic, and that nothing far off is left unexplained."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from analysis import published
from analysis.published import FAR, MI355X_PHASES, POINTS, Point
from schedules import policies, presets
from schedules.workload import Workload
from sim import hardware
from sim.prediction import memory_of, predict


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return published.reproduce()


def test_the_formula_gives_the_papers_own_number_from_its_step_time() -> None:
    """7B on a GH200: 158 sequences of 1024 in 27.05 s are 273 TFLOP/s by the formula, of 284 published."""
    model, step = presets.load("qwen2.5-7b"), Workload(micro_batch_size=158, seq_len=1024)
    assert published.flops_by_formula(model, step) / 27.05 / 1e12 == pytest.approx(273.3, abs=0.1)


def test_the_formula_counts_less_than_the_model_computes() -> None:
    """The formula leaves out attention and counts the embedding, a lookup, as a product: at 1024 tokens they
    nearly cancel."""
    model, step = presets.load("qwen2.5-7b"), Workload(micro_batch_size=1, seq_len=1024)
    assert published.flops_by_formula(model, step) / model.model_flops_per_step(step) == pytest.approx(1.06, abs=0.02)


def test_the_logged_parts_of_the_mi355x_step_add_up() -> None:
    (point,) = (p for p in POINTS if p.machine == "mi355x")
    assert sum(MI355X_PHASES.values()) == pytest.approx(point.value, abs=0.2)


def test_predicted_parts_add_up_to_the_predicted_step() -> None:
    (point,) = (p for p in POINTS if p.machine == "mi355x")
    prediction = published.prediction_of(point)
    parts = published.step_parts(prediction)
    assert sum(parts.values()) == pytest.approx(prediction.period_ns / 1e9)
    assert min(parts.values()) >= 0
    assert published.phases()["predicted_s"].tolist() == list(parts.values())


def test_every_point_has_a_row_and_its_error_is_signed(table: pd.DataFrame) -> None:
    assert len(table) == len(POINTS)
    known = table[table["policy"] != ""]
    assert ((known["predicted"] > known["published"]) == (known["error"] > 0)).all()
    assert (known["error"] == known["predicted"] / known["published"] - 1).all()


def test_what_is_far_off_or_missing_is_explained(table: pd.DataFrame) -> None:
    far = table[(table["error"].abs() > FAR) | table["predicted"].isna()]
    assert len(far)
    assert (far["why"] != "").all()
    near = table[table["error"].abs() <= FAR]
    assert (near["why"] == "").all(), "explanations of errors that are no more"


def test_points_name_models_machines_and_policies_that_exist() -> None:
    for point in POINTS:
        assert point.model in presets.names()
        assert point.machine in hardware.names()
        assert point.policy is None or point.policy in policies.names()
        assert hardware.load(point.machine).mode == "datasheet"


def test_an_unknown_batch_is_the_largest_that_fits() -> None:
    point = Point(
        system="x", policy="resident", model="qwen2.5-0.5b", machine="rtx3090", value=1, unit="tokens/s", source="none"
    )
    step = published.workload_of(point)
    profile = hardware.load("rtx3090")

    def fits(step: Workload) -> bool:
        schedule = policies.build("resident", presets.load(point.model), step, memory_of(profile))
        return predict(schedule, profile).fits

    assert fits(step)
    assert not fits(replace(step, micro_batch_size=step.micro_batch_size + 1))

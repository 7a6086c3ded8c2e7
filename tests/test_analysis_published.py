"""Published points: their arithmetic, and that nothing far off is left unexplained."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from command import ROOT

from analysis import published, published_report, tables
from analysis.published_point import RECOMPUTED, Point
from analysis.published_points import MI355X_PHASES, POINTS
from schedules import policies, presets
from schedules.flops import model_flops_per_step
from schedules.workload import Workload
from sim import hardware
from sim.prediction import memory_of, predict

REPORT = ROOT / "analysis" / "results" / "published" / "README.md"
# steps of more micro-batches take most of the time, to be predicted by the same policies as others are
SHORT = [point for point in POINTS if (point.accumulation or 1) <= 16]


@pytest.fixture(scope="module", params=[SHORT, pytest.param(POINTS, marks=pytest.mark.slow)], ids=["short", "all"])
def points(request: pytest.FixtureRequest) -> list[Point]:
    return list(request.param)


@pytest.fixture(scope="module")
def table(points: list[Point]) -> pd.DataFrame:
    return published.reproduce(points)


def test_the_formula_gives_the_papers_own_number_from_its_step_time() -> None:
    """7B on a GH200: 158 sequences of 1024 in 27.05 s are 273 TFLOP/s by the formula, of 284 published."""
    model, step = presets.load("qwen2.5-7b"), Workload(micro_batch_size=158, seq_len=1024)
    assert published.flops_by_formula(model, step) / 27.05 / 1e12 == pytest.approx(273.3, abs=0.1)


def test_the_formula_counts_less_than_the_model_computes() -> None:
    """The formula leaves out attention and counts the embedding, a lookup, as a product: at 1024 tokens they
    nearly cancel."""
    model, step = presets.load("qwen2.5-7b"), Workload(micro_batch_size=1, seq_len=1024)
    assert published.flops_by_formula(model, step) / model_flops_per_step(model, step) == pytest.approx(1.06, abs=0.02)


def test_a_formula_that_counts_recompute_and_attention_gives_what_superoffload_logs() -> None:
    """Its examples log, per sequence, 2 x 4 x parameters x tokens + 2 x 2 x 4 x layers x hidden x tokens squared."""
    model, step = presets.load("qwen3-14b"), Workload(micro_batch_size=4, seq_len=4096)
    logged = 4 * (8 * model.total_params * 4096 + 16 * 40 * 5120 * 4096**2)
    assert published.flops_by_formula(model, step, RECOMPUTED) == logged
    (point,) = (p for p in POINTS if p.system == "SuperOffload (released)")
    row = published.reproduce([point]).iloc[0]
    prediction = published.prediction_of(point)
    assert row["predicted"] == pytest.approx(logged / prediction.period_ns / 1e3)


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


def test_every_point_has_a_row_and_its_error_is_signed(points: list[Point], table: pd.DataFrame) -> None:
    assert len(table) == len(points) > 40
    known = table[table["standing"] != "not predicted"]
    assert ((known["speed"] > 1) == (known["error"] > 0)).all()
    shorter = (known["unit"] == "s") & (known["predicted"] < known["published"])
    more = (known["unit"] != "s") & (known["predicted"] > known["published"])
    assert shorter.any() and more.any()
    assert ((shorter | more) == (known["error"] > 0)).all(), "a shorter time is a higher speed"


def test_a_point_stands_apart_unless_its_whole_run_is_known(points: list[Point], table: pd.DataFrame) -> None:
    for point, standing in zip(points, table["standing"], strict=True):
        assert (standing == "not predicted") == bool(point.lacking) == (point.policy is None)
        if standing == "compared":
            assert point.micro_batch_size is not None and not point.assumed and not point.changes
        assert point.source and point.value > 0


def test_the_summary_is_of_the_compared_points_alone() -> None:
    rows = [("compared", 1.3), ("compared", 0.9), ("compared", 1.1), ("assumed", 9.0), ("not predicted", float("nan"))]
    frame = pd.DataFrame(rows, columns=["standing", "speed"])
    frame = frame.assign(system="a", model="m", machine="x", fits=True, same_run_as="")
    frame["error"] = frame["speed"] - 1
    told = published.summary(frame)
    assert (
        "3 runs that are known (3 points)" in told
        and "median error +10%" in told
        and "of its size 10%" in told
        and "worst +30%" in told
    )
    assert "1 whose batch" in told and "1 that are not predicted" in told and "fit" not in told
    frame.loc[1, "fits"] = False
    told = published.summary(frame)
    assert "1 of them would not fit" in told and "of the others: median error +20%" in told and "worst +30%" in told
    frame.loc[0, "same_run_as"] = "the third point's"
    told = published.summary(frame)
    assert "2 runs that are known (3 points)" in told and "median error +0%" in told and "worst +10%" in told


def test_no_run_is_counted_twice(table: pd.DataFrame) -> None:
    compared = table[table["standing"] == "compared"]
    assert not compared[compared["same_run_as"] == ""].duplicated(["machine", "digest"]).any()
    again = compared[compared["same_run_as"] != ""]
    assert set(again["digest"]) <= set(compared[compared["same_run_as"] == ""]["digest"]), "one counts"


def test_published_numbers_are_not_powers_of_ten(table: pd.DataFrame) -> None:
    for standing in published_report.TITLES:
        rows = table[table["standing"] == standing]
        text = tables.markdown(rows, published_report.columns(standing))
        assert "e+" not in text
    assert "| 25,000 | TFLOP/s |" in text


def test_what_does_not_fit_is_marked_in_tables_and_picture(table: pd.DataFrame) -> None:
    compared = table[table["standing"] == "compared"]
    assert "| fits |" in tables.markdown(compared, published_report.columns("compared"))
    (place,) = (i for i, column in enumerate(published_report.columns("compared")) if column.heading == "fits")
    cells = [published_report.columns("compared")[place].cell(row) for row in tables.records(compared)]
    assert cells == ["yes" if fits else "no" for fits in compared["fits"]]
    texts = [text.get_text() for text in published_report.plot(table).texts]
    known = table[table["speed"].notna()]
    assert sum("does not fit" in text for text in texts) == (~known["fits"].astype(bool)).sum() > 0
    assert published_report.columns("not predicted") == tables.PUBLISHED_ONLY


def test_no_error_is_written_across_the_line_at_one(table: pd.DataFrame) -> None:
    for text in published_report.plot(table).texts:
        assert text.get_ha() == ("right" if text.get_text().startswith("-") else "left")


FAR = 0.15


def test_what_is_far_off_is_explained(table: pd.DataFrame) -> None:
    far = table[((table["speed"] - 1).abs() > FAR) & (table["standing"] == "compared")]
    assert (far["why"] != "").all()
    near = table[((table["speed"] - 1).abs() <= FAR) & (table["standing"] == "compared")]
    assert (near["why"] == "").all(), "explanations of errors that are no more"


def test_points_name_models_machines_and_policies_that_exist() -> None:
    for point in POINTS:
        if not point.lacking:
            assert point.model in presets.names()
            assert point.machine in hardware.names()
            assert point.policy in policies.names()
            assert hardware.load(point.machine).mode == "datasheet"


def test_the_report_on_disk_is_of_these_points(table: pd.DataFrame) -> None:
    told = set(REPORT.read_text().splitlines())
    for standing in published_report.TITLES:
        rows = table[table["standing"] == standing]
        lines = tables.markdown(rows, [*published_report.columns(standing), tables.SOURCE]).splitlines()
        assert told.issuperset(lines), f"old; run: {published_report.COMMAND}"


@pytest.mark.slow
@pytest.mark.parametrize("points", [POINTS], indirect=True, scope="module")
def test_the_report_on_disk_has_all_points_and_their_summary(table: pd.DataFrame) -> None:
    text = REPORT.read_text()
    assert published.summary(table) in text, f"old; run: {published_report.COMMAND}"
    for standing in published_report.TITLES:
        rows = table[table["standing"] == standing]
        columns = published_report.columns(standing)
        assert tables.markdown(rows, [*columns, tables.SOURCE]) in text, f"old; run: {published_report.COMMAND}"


def test_the_picture_has_a_mark_per_prediction(table: pd.DataFrame) -> None:
    ax = published_report.plot(table)
    known = table[table["speed"].notna()]
    assert len(ax.get_yticks()) == len(known)
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == (known["standing"] == "assumed").sum()


def test_errors_in_the_picture_are_those_of_the_tables(table: pd.DataFrame) -> None:
    """In whole per cent -0.2 would be -0."""
    known = table[table["speed"].notna()]
    (column,) = (column for column in tables.PUBLISHED if column.heading == "error")
    shown = [text.get_text().split(",")[0] for text in published_report.plot(table).texts]
    assert sorted(shown) == sorted(column.cell(row).replace(" %", "%") for row in tables.records(known))
    assert not {"-0%", "-0.0%"} & set(shown)


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

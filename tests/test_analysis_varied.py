"""Policies over what is varied: the rows of `compare --vary`, in order, those of `simulate`; and their picture."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Text
from typer.testing import CliRunner

from analysis import compare, lines, tables, varied
from analysis.axes import axes_of
from megatrain import cli
from schedules import presets
from schedules.errors import InputError, Refused
from schedules.workload import Workload
from sim.hardware import HardwareError, load

TINY = presets.load("tiny")
STEP = Workload(micro_batch_size=2, seq_len=64)
NAMES = ["streamed slots=3", "zenflow", compare.SAME_STATE]
VARY = ["batch=4,1", "precision=bf16,fp32", "gpu.memory=1.5MB,1GB"]


def called(*arguments: str) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.stdout, result.exception


def some(vary: list[str], names: list[str] = NAMES, **more: Any) -> list[varied.Point]:
    values = {"models": [TINY], "machine": load("h200"), "changes": [], "workload": STEP, **more}
    return varied.points(names=names, axes=axes_of(vary), **values)


def run(points: list[varied.Point], workers: int = 1) -> pd.DataFrame:
    return varied.run(points, workers=workers, progress=lambda point: None)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return run(some(VARY))


# ---- what is asked


def test_an_axis_has_its_values_as_written_in_their_order_and_each_once() -> None:
    assert axes_of(["batch = 4, 1,4", "host.memory=96GB"]) == {"batch": ["4", "1"], "host.memory": ["96GB"]}
    assert list(axes_of(["seq=1", "batch=1"])) == ["seq", "batch"]


@pytest.mark.parametrize(
    ("vary", "told"),
    [
        ("sqe=1,2", "nothing that can be varied is called 'sqe'; did you mean seq?"),
        ("host.memry=1GB", "'host.memry'; did you mean host.memory or "),
        (
            "policy=x",
            "known: batch, accumulation, seq, precision, optimizer, recompute, matmul, clip, hardware, knobs of ",
        ),
        ("slot=1", "'slot'; did you mean slots or grad_slots or nvme_slots?"),
        ("slots=2,x", "knob slots must be a whole number, not 'x'"),
        ("hardware=h201", "did you mean h200 "),
        ("batch=1,x", "--vary batch=x: give a whole number"),
        ("batch=1,,2", "--vary batch=: give a whole number"),
        ("seq=0", "--vary seq=0: seq_len must be a whole number of at least 1"),
        ("precision=bf17", "--vary precision=bf17: precision 'bf17' is unknown; known are bf16, "),
        ("recompute=mpl", "recompute 'mpl' is unknown; known are none, pointwise, mlp"),
        ("clip=much", "--vary clip=much: give a number, or none"),
        ("clip=nan", "--vary clip=nan: grad_clip must be a positive finite number"),
        ("host.memory=3G", "host.memory=3G: unit must be one of "),
        ("batch", "'batch' varies nothing; write NAME=VALUE,VALUE"),
    ],
)
def test_what_cannot_be_varied_is_told_in_a_line_before_anything_is_simulated(vary: str, told: str) -> None:
    out, error = called("compare", "tiny", "-p", "streamed", "--vary", vary)
    assert isinstance(error, InputError) and told in str(error) and not out
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-b", "2", "--vary", "batch=1,2"], "--batch gives a value to what is varied"),
        (["--set", "host.memory=1GB", "--vary", "host.memory=1GB,2GB"], "--set host.memory gives a value"),
        (["-H", "h100", "--vary", "hardware=h100,h200"], "--hardware gives a value to what is varied"),
        (["--vary", "batch=1", "--vary", "batch=2"], "batch is varied twice"),
        (
            ["-p", "streamed keep=0,streamed keep=1", "--vary", "alpha=0"],
            "nothing that can be varied is called 'alpha'",
        ),
    ],
)
def test_what_is_said_twice_is_told(words: list[str], told: str) -> None:
    _, error = called("compare", "tiny", "-p", "streamed", *words)
    assert isinstance(error, InputError) and told in str(error)


def test_points_are_every_combination_and_the_last_axis_turns_first() -> None:
    points = some(["batch=4,1", "clip=none,0.5", "host.memory=1GB"], changes=["gpu.memory=2GB"])
    assert [(point.workload.micro_batch_size, point.workload.grad_clip) for point in points] == [
        (4, None), (4, 0.5), (1, None), (1, 0.5)
    ]  # fmt: skip
    assert {point.profile.name for point in points} == {"h200 with gpu.memory=2GB, host.memory=1GB"}
    assert points[1].told == "tiny batch=4 clip=0.5 host.memory=1GB"
    machines = some(["hardware=h100,rtx4090", "gpu.memory=1GB,2GB"])
    names = [f"{name} with gpu.memory={memory}" for name in ("h100", "rtx4090") for memory in ("1GB", "2GB")]
    assert [point.profile.name for point in machines] == names
    assert (
        varied.setting(STEP, "h200", machines[0].values) == "predicted; batch=2, accumulation=1, seq=64, precision=bf16"
    )
    with pytest.raises(HardwareError):
        some(["host.memory=0GB"])


def test_a_knob_is_varied_of_the_policies_that_have_it_and_are_not_given_it() -> None:
    points = some(["slots=3,1", "batch=1,2"], ["streamed", "megatrain", "streamed keep=0 slots=2"])
    knobs = [(("slots=3",), (), ()), (("slots=1",), (), ())]
    assert [point.knobs for point in points] == [knobs[0], knobs[0], knobs[1], knobs[1]]
    with pytest.raises(InputError, match="slots has a value wherever it is a knob of these policies"):
        some(["slots=3,1"], ["streamed slots=2", "megatrain"])


# ---- rows


def test_a_varied_knob_is_an_axis_and_not_part_of_a_policys_name() -> None:
    table = run(some(["slots=3,1"], ["streamed", "megatrain", "streamed keep=0"]))
    assert table["vary.slots"].tolist() == ["3", "3", "3", "1", "1", "1"]
    assert table["knobs"].tolist() == ["", "", "keep=0"] * 2
    assert table["label"].tolist() == ["streamed", "megatrain", "streamed keep=0"] * 2
    for at, slots in ((0, 3), (3, 1)):
        row = next(compare.rows(TINY, [f"streamed slots={slots}"], load("h200"), STEP))
        assert table["digest"][at] == row.digest and table["step_s"][at] == row.step_s
    assert table["digest"][1] == table["digest"][4]


def test_policies_that_a_knob_is_not_varied_of_are_told() -> None:
    result = CliRunner().invoke(cli.app, ["compare", "tiny", "-p", "streamed,megatrain", "--vary", "slots=2,3"])
    assert "note: slots is not varied of megatrain: the same at all its values\n" in result.stderr


def test_there_is_a_row_for_every_policy_and_point_in_order(table: pd.DataFrame) -> None:
    asked = [varied.column(axis) for axis in axes_of(VARY)]
    assert list(table.columns) == [*asked, *compare.COLUMNS]
    points = itertools.product(["4", "1"], ["bf16", "fp32"], ["1.5MB", "1GB"])
    assert table[[*asked, "policy", "knobs"]].to_numpy().tolist() == [
        [*point, *policy]
        for point in points
        for policy in (["streamed", "slots=3"], ["zenflow", ""], ["zero3_offload", "master=weights"])
    ]


def test_rows_are_the_same_from_several_processes(table: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(run(some(VARY), workers=2), table)


def test_what_does_not_fit_is_a_row_with_the_reason_and_no_rate(table: pd.DataFrame) -> None:
    lacking = table[table["fits"].eq(False)]
    assert 0 < len(lacking) < len(table) and set(lacking["vary.gpu.memory"]) == {"1.5MB"}
    assert lacking["tokens_per_s"].isna().all() and lacking["device_peak_gb"].gt(0.0015).all()
    assert lacking["shortage"].str.startswith("does not fit: device +").all()


def test_a_policy_that_refuses_a_step_is_a_row_that_says_so(table: pd.DataFrame) -> None:
    refused = table[table["fits"].isna()]
    assert set(refused["policy"]) == {"zero3_offload"} and set(refused["vary.precision"]) == {"fp32"}
    assert set(refused["label"]) == {compare.SAME_STATE} and refused["digest"].eq("").all()
    assert refused["shortage"].str.startswith("not built: zero3_offload: master=weights is for bf16 weights").all()
    (cell,) = {line.split("|")[9].strip() for line in tables.markdown(refused, tables.COMPARISON).splitlines()[2:]}
    assert cell == "-", "nothing is known of its memory"


def test_a_machine_without_a_rate_of_products_in_fp8_is_a_row_of_its_own() -> None:
    found = run(some(["hardware=rtx3090,h200", "matmul=none,fp8"], ["streamed"]))
    assert found["tokens_per_s"].notna().tolist() == [True, False, True, True]
    assert found["shortage"][1].startswith("not built: rtx3090 states no rate of fp8 products")


def test_it_is_an_error_where_no_policy_takes_any_step() -> None:
    step = Workload(micro_batch_size=1, seq_len=64, precision="fp32")
    assert run(some(["batch=1,2"], workload=step))["fits"].isna().sum() == 2
    with pytest.raises(InputError, match="master=weights is for bf16 weights"):
        run(some(["batch=1,2"], [compare.SAME_STATE], workload=step))


def test_ratios_are_to_the_baseline_at_the_same_point() -> None:
    found = run(some(["clip=none,1"], ["streamed", compare.SAME_STATE]))
    rates = found["tokens_per_s"].tolist()
    assert found["ratio_to_zero3_offload"].tolist() == [rates[0] / rates[1], 1.0, rates[2] / rates[3], 1.0]
    assert rates[1] != rates[3]


def test_every_row_is_what_simulate_says_of_its_point() -> None:
    """Of the command line, on both sides: what is varied and what is not."""
    axes = ["--vary", "batch=1,2", "--vary", "recompute=none,pointwise", "--vary", "host.memory=1GB,600kB"]
    fixed = ["-H", "rtx4090", "-s", "32", "-a", "2", "--clip", "1", "--set", "gpu.memory=1GB"]
    out, _ = called("compare", "tiny", "-p", "streamed slots=3", "-p", "megatrain", *axes, *fixed, "--json")
    rows = json.loads(out)
    assert len(rows) == 16 and {row["fits"] for row in rows} == {True, False}
    for row in rows:
        step = ["-b", row["vary.batch"], "--recompute", row["vary.recompute"]]
        machine = ["--set", f"host.memory={row['vary.host.memory']}"]
        policy = f"{row['policy']} {row['knobs']}"
        told = json.loads(called("simulate", "tiny", "-p", policy, *step, *fixed, *machine, "--json")[0])
        assert row["fits"] == told["fits"] and row["machine"] == told["machine"] and row["digest"] == told["digest"]
        assert row["host_peak_gb"] == told["peak_bytes"]["host"] / 1e9
        if row["fits"]:
            assert [row[name] for name in ("tokens_per_s", "step_s", "mfu")] == [
                told[name] for name in ("tokens_per_s", "step_s", "mfu")
            ]


# ---- the table and the files


def test_the_command_writes_the_rows_and_the_picture(tmp_path: Path) -> None:
    words = ["compare", "tiny", "-p", "streamed", "-p", "megatrain", "--vary", "batch=1,2", "--vary", "seq=16,32"]
    out, error = called(*words, "-H", "rtx4090", "--out", str(tmp_path))
    assert error is None
    assert "predicted on rtx4090; accumulation=1, precision=bf16" in out
    found = pd.read_csv(tmp_path / "throughput.csv")
    assert len(found) == 8 and found.columns[:3].tolist() == ["vary.batch", "vary.seq", "model"]
    assert {"tokens_per_s", "step_s", "device_peak_gb", "host_peak_gb", "machine", "source"} <= set(found.columns)
    assert found["vary.seq"].tolist() == found["seq_len"].tolist() and set(found["source"]) == {"predicted"}
    assert (tmp_path / "throughput.png").stat().st_size > 5_000 and (tmp_path / "throughput.svg").is_file()


def test_where_nothing_fits_the_answer_is_no() -> None:
    out, error = called("compare", "tiny", "-p", "streamed", "--vary", "host.memory=4kB,8kB")
    assert "none of these fits h200" in str(error) and out.count("does not fit: host +") == 2


def test_what_is_not_predicted_is_no_yes_beside_what_does_not_fit() -> None:
    refusing = ["-p", compare.SAME_STATE, "--precision", "fp32"]
    out, error = called("compare", "tiny", "-p", "streamed", *refusing, "--vary", "host.memory=4kB,8kB")
    told = "none of these is predicted to fit h200; the first not predicted: zero3_offload: master=weights is for"
    assert isinstance(error, Refused) and str(error).startswith(told)
    assert out.count("does not fit: host +") == 2 and out.count("not built: zero3_offload") == 2


def test_where_every_policy_refuses_the_step_the_input_is_wrong_as_it_is_for_one() -> None:
    out, error = called("compare", "tiny-moe", "--matmul", "fp8")
    assert isinstance(error, InputError) and not isinstance(error, Refused)
    assert str(error) == "none of these is predicted: tiny-moe: experts' products are not made in fp8"
    assert out.count("not built") > 10


# ---- the picture


def test_a_line_per_policy_over_the_first_axis_and_a_panel_per_value_of_the_others(table: pd.DataFrame) -> None:
    figure = lines.throughput(table, axes_of(VARY), varied.setting(STEP, "h200", axes_of(VARY)))
    assert [ax.get_title(loc="left").replace("\n", " ") for ax in figure.axes] == [
        f"precision={precision}, gpu.memory={memory}" for precision in ("bf16", "fp32") for memory in ("1.5MB", "1GB")
    ]
    for ax in figure.axes:
        precision, memory = (part.partition("=")[2] for part in ax.get_title(loc="left").replace("\n", " ").split(", "))
        rows = table[(table["vary.precision"] == precision) & (table["vary.gpu.memory"] == memory)]
        drawn = {str(line.get_label()): line for line in ax.get_lines()}
        for policy, of_policy in rows.groupby("policy"):
            (line,) = (line for label, line in drawn.items() if label.startswith(str(policy)))
            pd.testing.assert_series_equal(
                pd.Series(line.get_ydata()), of_policy["tokens_per_s"], check_names=False, check_index=False
            )
        marks = [line for line in ax.get_lines() if len(line.get_xdata()) == 1]  # type: ignore[arg-type]
        assert len(marks) == (~rows["fits"].eq(True)).sum()
        bottom, top = ax.get_ylim()
        assert all(line.get_ydata()[0] * (top - bottom) + bottom < 0 for line in marks)  # type: ignore[index]
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()] == ["4", "1"]


def test_the_picture_says_that_it_is_predicted_and_of_which_machine_and_nothing_overlaps(table: pd.DataFrame) -> None:
    figure = lines.throughput(table, axes_of(VARY), varied.setting(STEP, "h200", axes_of(VARY)))
    assert figure.get_suptitle() == "tiny, predicted on h200; accumulation=1, seq=64"
    assert {ax.get_ylabel() for ax in figure.axes} == {"tokens/s, predicted", ""}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "streamed slots=3", "zenflow (stale by 1)", compare.SAME_STATE, "hollow: does not fit", "not predicted"
    ]  # fmt: skip
    figure.draw_without_rendering()
    titles = [
        text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()
    ]
    boxes = [text.get_window_extent() for text in titles]
    overlaps = [
        (one.get_text(), other.get_text())
        for (one, a), (other, b) in itertools.combinations(zip(titles, boxes, strict=True), 2)
        if a.overlaps(b)
    ]
    assert not overlaps
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_several_models_have_panels_of_their_own() -> None:
    points = some(["batch=1,2"], ["streamed", "resident"], models=[TINY, presets.load("demo")])
    figure = lines.throughput(run(points), axes_of(["batch=1,2"]), "predicted on h200")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["tiny", "demo"]
    assert figure.get_suptitle() == "predicted on h200"


def test_where_nothing_fits_there_is_no_scale_but_zero() -> None:
    vary = ["host.memory=4kB,8kB"]
    figure = lines.throughput(run(some(vary, ["streamed"])), axes_of(vary), "predicted on h200")
    (ax,) = figure.axes
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0"] and ax.get_ylim()[1] > 0

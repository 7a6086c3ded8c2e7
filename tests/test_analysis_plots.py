"""The data behind pictures, and that everything in the data is drawn. Not what pixels look like."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from analysis import figure, palette, plans, plots, policy_pages, trace_diff
from analysis.compare import compare
from analysis.gantt import _joined, _lane, gantt, gantt_data, steady_step, strips
from analysis.text_gantt import legend
from schedules import policies, presets
from schedules.errors import InputError
from schedules.op import Phase, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.workload import MemoryBudget, Workload
from sim.engine import simulate
from sim.hardware import load
from sim.prediction import memory_of

STEP = Workload(micro_batch_size=2, accumulation=2, seq_len=64)


@pytest.fixture(scope="module")
def run() -> tuple[Schedule, Trace]:
    profile = load("h200")
    schedule = policies.build("zero3_offload", presets.load("tiny"), STEP, memory_of(profile))
    return schedule, simulate(schedule, profile, steps=5)


@pytest.fixture(scope="module")
def comparison() -> pd.DataFrame:
    """Two models on a machine with little memory: some policies fit, some do not."""
    budget = MemoryBudget(device_bytes=60 * 10**6, host_bytes=10**9)
    return compare(
        [presets.load("demo"), presets.load("tiny")], ["resident", "streamed", "zero3_offload"], load("h200"), [STEP],
        budget,
    )  # fmt: skip


# ---- throughput


def panels(first: Axes) -> list[Axes]:
    return figure.figure_of(first).axes


def test_every_row_of_a_comparison_has_a_bar_or_says_what_is_missing(comparison: pd.DataFrame) -> None:
    drawn = panels(plots.throughput(comparison))
    lacking = comparison[~comparison["fits"]]
    assert 0 < len(lacking) < len(comparison)
    assert sum(len(ax.patches) for ax in drawn) == len(comparison) - len(lacking)
    written = [text.get_text() for ax in drawn for text in ax.texts]
    assert len(written) == len(comparison)
    assert sorted(text for text in written if text.startswith("does not fit: ")) == sorted(lacking["shortage"])


def test_bars_are_as_long_as_the_data_beside_their_policies_and_models_stand_by_size(comparison: pd.DataFrame) -> None:
    drawn = panels(plots.throughput(comparison))
    assert [ax.get_title(loc="left") for ax in drawn] == ["tiny", "demo"]
    names = [label.get_text() for label in drawn[0].get_yticklabels()]
    assert names == list(dict.fromkeys(comparison["label"]))
    for ax in drawn:
        rows = comparison[comparison["model"] == ax.get_title(loc="left")]
        bars = {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in ax.patches}
        fitting = rows[rows["fits"]]
        assert bars == pytest.approx(dict(zip(fitting["label"], fitting["model_tflops_per_s"], strict=True)))
        assert ax.get_xlabel() == "model TFLOP/s"


def test_small_rates_have_a_smaller_unit(comparison: pd.DataFrame) -> None:
    tiny = comparison[comparison["model"] == "tiny"]
    ax = plots.throughput(tiny)
    assert ax.get_xlabel() == "model GFLOP/s"
    assert max(patch.get_width() for patch in ax.patches) == pytest.approx(tiny["model_tflops_per_s"].max() * 1e3)


def test_a_comparison_in_which_nothing_fits_can_be_drawn() -> None:
    nothing = MemoryBudget(device_bytes=1, host_bytes=1)
    ax = plots.throughput(compare([presets.load("tiny")], ["streamed"], load("h200"), [STEP], nothing))
    assert len(ax.patches) == 0 and len(ax.texts) == 1


def test_models_stand_two_in_a_row_at_one_scale(comparison: pd.DataFrame) -> None:
    tiny = comparison[comparison["model"] == "tiny"]
    seven = pd.concat([tiny.assign(model=f"model-{number}", params_b=number) for number in range(7)])
    drawn = panels(plots.throughput(seven))
    assert [ax.get_title(loc="left") for ax in drawn] == [f"model-{number}" for number in range(7)]
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in drawn}) == 1
    assert [bool(ax.get_xlabel()) for ax in drawn] == [False] * 5 + [True] * 2


def test_writing_stays_in_its_panel(comparison: pd.DataFrame) -> None:
    """The longest bar's as well, and that of what lacks much in two tiers, beside a policy of many knobs."""
    long = comparison.assign(label=comparison["label"] + " activations=recompute every=4 slots=3")
    long.loc[~long["fits"], "shortage"] = "does not fit: device +162.4 GB, host +731.1 GB"
    drawn = panels(plots.throughput(long))
    figure.figure_of(drawn[0]).draw_without_rendering()
    for ax in drawn:
        box = ax.get_window_extent()
        assert all(Text.get_window_extent(text).x1 <= box.x1 for text in ax.texts)
        names = [label.get_window_extent() for label in ax.get_yticklabels() if label.get_visible()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(names, 2))


def test_rows_that_would_cover_one_another_are_refused(comparison: pd.DataFrame) -> None:
    with pytest.raises(InputError, match="more than one row for demo and resident"):
        plots.throughput(pd.concat([comparison, comparison]))


# ---- the step, stream by stream


def test_the_gantt_holds_the_ops_of_one_step_and_no_time_outside_it(run: tuple[Schedule, Trace]) -> None:
    schedule, trace = run
    data = gantt_data([run])
    since, until = steady_step(trace)
    assert until - since == trace.step_end_ns[3] - trace.step_end_ns[2]
    assert data["start_ms"].min() >= 0
    assert data["end_ms"].max() == pytest.approx((until - since) / 1e6)
    for stream in schedule.streams:
        of_stream = data[data["stream"] == stream]
        busy = trace.busy_ns(schedule, stream, (since, until))
        assert (of_stream["end_ms"] - of_stream["start_ms"]).sum() == pytest.approx(busy / 1e6)


def test_the_step_drawn_is_the_typical_one(run: tuple[Schedule, Trace]) -> None:
    """The last but one took twice as long: it is not drawn, and `diff` says the same length."""
    schedule, trace = run
    late = np.where(trace.step >= 3, int(trace.step_end_ns[3] - trace.step_end_ns[2]), 0)
    uneven = replace(trace, start_ns=trace.start_ns + late, end_ns=trace.end_ns + late, source="measured")
    since, until = steady_step(uneven)
    assert (since, until) == (trace.step_end_ns[1], trace.step_end_ns[2])
    assert trace_diff.diff(schedule, uneven, uneven, load("h200")).steps_ns[0] == until - since
    median = np.median(uneven.step_ns()) / 1e6
    told = f"a step of {(until - since) / 1e6:.4g} ms, the median is {median:.4g} ms"
    assert gantt([(schedule, uneven)]).texts[0].get_text().endswith(told)
    assert "median" not in gantt([run]).texts[0].get_text()


def test_what_takes_little_is_drawn_over_what_takes_much() -> None:
    """Ops thinner than a pixel, each between two long ones, would be hidden by their edges."""
    ax = figure.new_axes(width=4, height=1)
    boxes = [("recompute", "", 0.0, 0.1), ("backward", "", 0.1, 0.9), ("recompute", "", 1.0, 0.1)]
    _lane(ax, 0.0, boxes, 2.0, 1.0, 10.0)
    colours = [tuple(c.get_facecolor()[0][:3]) for c in ax.collections if isinstance(c, PolyCollection)]
    assert colours[1:] == [to_rgb(palette.OP_COLOURS[name]) for name in ("backward", "recompute")]


def test_every_op_of_the_data_is_a_box(run: tuple[Schedule, Trace]) -> None:
    ax = gantt([run, (run[0], replace(run[1], source="measured"))])
    boxes = sum(len(c.get_paths()) for c in ax.collections if isinstance(c, PolyCollection))
    lanes = 2 * len(run[0].streams)
    assert boxes == len(gantt_data([run, run])) + lanes  # each lane has one more: idle
    assert len(ax.get_yticks()) == lanes
    assert sum("busy" in text.get_text() for text in ax.texts) == lanes


def test_a_wait_that_takes_no_time_is_drawn_in_the_step_that_it_ends() -> None:
    """LoHan's host does nothing else: its lane would be empty."""
    profile = load("h200")
    schedule = policies.build("lohan", presets.load("tiny"), STEP, memory_of(profile))
    data = gantt_data([(schedule, simulate(schedule, profile, steps=4))])
    waits = data[data["class"] == "synchronise"]
    assert len(waits) == sum(palette.op_class(op) == "synchronise" for op in schedule.ops) == 1
    assert waits["start_ms"].item() == waits["end_ms"].item() == data["end_ms"].max()


def test_a_wait_is_black_in_the_picture_of_all_policies_and_not_grey_as_other_updates(
    run: tuple[Schedule, Trace],
) -> None:
    """It is a line, and one of less than a pixel is paler than its colour."""
    ax = strips([run], 1.0)
    black = [c for c in ax.collections if len(c.get_facecolor()) and np.allclose(c.get_facecolor()[0], (0, 0, 0, 1))]
    assert black
    assert all(c.get_linewidth()[0] * policy_pages._DPI / 72 > 0.9 for c in black)


def test_two_runs_of_one_name_are_kept_apart(run: tuple[Schedule, Trace]) -> None:
    data = gantt_data([run, run])
    assert data.groupby("run").size().tolist() == [len(data) // 2] * 2


def test_boxes_are_labelled_where_there_is_room(run: tuple[Schedule, Trace]) -> None:
    wide = gantt([run], ax=Figure(figsize=(200, 4)).add_subplot())
    assert len(wide.texts) > len(gantt([run]).texts)


def test_labels_of_layers_are_regular_and_never_on_one_another() -> None:
    """Forty layers, and twice as many boxes: a label for each would not do."""
    step = Workload(micro_batch_size=1, accumulation=2, seq_len=64)
    model = replace(presets.load("tiny"), num_hidden_layers=40)
    schedule = policies.build("streamed", model, step, memory_of(load("h200")))
    ax = gantt([(schedule, simulate(schedule, load("h200"), steps=3))])
    figure.figure_of(ax).draw_without_rendering()
    for place in ax.get_yticks():
        texts = [text for text in ax.texts if text.get_position()[1] == place]
        boxes = [Text.get_window_extent(text) for text in texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    layers = {int(text.get_text()) for text in ax.texts if text.get_text().isdecimal()}
    assert max(layers) >= 10 and all(layer % 2 == 0 or layer % 5 == 0 for layer in layers)


def test_the_legend_speaks_of_labels_only_where_there_are_some(run: tuple[Schedule, Trace]) -> None:
    schedule, trace = run
    bare = replace(schedule, ops=tuple(replace(op, layer=None) for op in schedule.ops))
    for of, told in ((schedule, "labels in boxes are layers"), (bare, "")):
        (legend,) = figure.figure_of(gantt([(of, trace)])).legends
        assert legend.get_title().get_text() == told


def test_a_label_for_several_boxes_stands_in_their_middle() -> None:
    """Of micro-batches that took unlike times as well: 2 and 8 are 10, from 1 to 11."""
    boxes = [("forward", "3", 1.0, 2.0), ("forward", "3", 3.0, 8.0), ("forward", "4", 11.5, 1.0)]
    joined = _joined(boxes)
    assert [(label, start + width / 2) for _, label, start, width in joined] == [("3", 6.0), ("4", 12.0)]


def test_no_label_stands_where_a_stream_is_idle_for_long() -> None:
    """A layer's gradient comes at one time and its weights at another: one label in the middle would be of neither."""
    model = replace(presets.load("llama-2-7b"), num_hidden_layers=6)
    schedule = policies.build(
        "superoffload", model, Workload(micro_batch_size=16, seq_len=1024), memory_of(load("h200"))
    )
    runs = [(schedule, simulate(schedule, load("h200"), steps=3))]
    ax, data = gantt(runs), gantt_data(runs)
    for place, name in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True):
        boxes = data[data["stream"] == name.get_text()]
        for text in (text for text in ax.texts if text.get_text().isdecimal() and text.get_position()[1] == place):
            x, own = text.get_position()[0], boxes[boxes["label"] == text.get_text()]
            width = own["end_ms"] - own["start_ms"]
            assert ((own["start_ms"] - width <= x) & (x <= own["end_ms"] + width)).any(), (name, text)


# ---- memory


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_live_memory_stays_under_what_is_allocated(run: tuple[Schedule, Trace], tier: Tier) -> None:
    schedule, trace = run
    data = plots.memory_data(schedule, trace, tier)
    assert data["time_ms"].is_monotonic_increasing
    assert 0 < data["live_gb"].max() <= schedule.allocated_bytes(tier) / 1e9
    moments, live = trace.live_bytes(schedule, tier)
    shown = float(trace.step_end_ns[3] - trace.step_end_ns[0]) / 1e6
    assert data["time_ms"].iloc[0] == 0
    assert data["time_ms"].iloc[-1] <= shown
    at = moments <= trace.step_end_ns[0]
    assert data["live_gb"].iloc[0] == pytest.approx(live[at][-1] / 1e9)


def test_a_capacity_far_above_the_data_is_written_instead_of_drawn(run: tuple[Schedule, Trace]) -> None:
    schedule, trace = run
    used = schedule.allocated_bytes(Tier.HOST)
    near = plots.memory(schedule, trace, Tier.HOST, capacity_bytes=2 * used)
    far = plots.memory(schedule, trace, Tier.HOST, capacity_bytes=2000 * used)
    assert near.get_ylim()[1] > 2 * used / 1e6
    assert far.get_ylim()[1] < 2 * used / 1e6
    assert "capacity" in far.get_title(loc="left")


# ---- predicted and measured, loss


def test_every_run_has_its_policy_and_signed_error() -> None:
    runs = pd.DataFrame(
        [("streamed", "tiny", 1.1, 1.0), ("megatrain", "tiny", 1.8, 2.0)],
        columns=["policy", "model", "predicted_s", "measured_s"],
    )
    ax = plots.predicted_against_measured(runs)
    assert sorted(t.get_text() for t in ax.texts if isinstance(t, Annotation)) == [
        "megatrain -10.0%", "streamed +10.0%"
    ]  # fmt: skip
    points = np.concatenate([c.get_offsets() for c in ax.collections if isinstance(c, PathCollection)])
    assert sorted(map(tuple, points)) == [(1.0, 1.1), (2.0, 1.8)]
    hollow = [c.get_facecolor() for c in ax.collections if isinstance(c, PathCollection)]
    assert not any(len(colour) for colour in hollow), "a mark would hide the one under it"


DEMO_NAMES = ("streamed", "resident", "megatrain", "zero3_offload", "megatrain_released")


@pytest.mark.parametrize(
    ("names", "measured", "predicted"),
    [
        ("abcdef", [0.2302, 0.2306, 0.2995, 0.303, 0.3084, 0.4037], [0.2327, 0.2303, 0.3043, 0.306, 0.3148, 0.4008]),
        (DEMO_NAMES, [0.2787, 0.2787, 0.3753, 0.3954, 0.5051], [0.2766, 0.2772, 0.3724, 0.3866, 0.4942]),
        (DEMO_NAMES, [0.2787, 0.2787, 0.3753, 0.3754, 0.5051], [0.2796, 0.2792, 0.3784, 0.3796, 0.5142]),
    ],
)
def test_no_label_is_crossed_by_another_labels_leader(
    names: Sequence[str], measured: list[float], predicted: list[float]
) -> None:
    """Points near one another on either side of the line, as in the demo's picture."""
    runs = pd.DataFrame({"policy": list(names), "model": "m", "predicted_s": predicted, "measured_s": measured})
    ax = plots.predicted_against_measured(runs)
    whole = figure.figure_of(ax)
    whole.draw_without_rendering()
    notes = [text for text in ax.texts if isinstance(text, Annotation)]
    boxes = [Text.get_window_extent(note) for note in notes]
    for note in notes:
        assert note.arrow_patch is not None
        leader = note.arrow_patch.get_path().transformed(note.arrow_patch.get_transform())
        crossed = [other for other, box in zip(notes, boxes, strict=True) if leader.intersects_bbox(box)]
        assert [other for other in crossed if other is not note] == []
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("times", [[0.26, 0.46], [0.16, 0.98], [0.2, 20.0]])
def test_axes_have_numbers_enough_and_not_too_many(times: list[float]) -> None:
    """Steps of like length as in the demo's picture, and such as differ by two decades."""
    runs = pd.DataFrame({"policy": ["a", "b"], "model": "m", "predicted_s": times, "measured_s": times})
    ax = plots.predicted_against_measured(runs)
    figure.figure_of(ax).draw_without_rendering()
    for axis in (ax.xaxis, ax.yaxis):
        low, high = axis.get_view_interval()
        assert 4 <= sum(low <= tick <= high for tick in axis.get_majorticklocs()) <= 8


def test_an_error_bar_lies_within_the_picture() -> None:
    runs = pd.DataFrame(
        {"policy": ["a"], "predicted_s": [1.1], "measured_s": [1.0], "predict_error": [0.1], "noise": [0.2]}
    )
    _, below = figure.figure_of(plots.validated(runs)).axes
    assert below.get_ylim()[1] > 20


def test_the_loss_plot_says_how_far_policies_are_apart() -> None:
    losses = pd.DataFrame(
        [("a", 0, 2.0), ("a", 1, 1.0), ("b", 0, 2.0), ("b", 1, 1.25)], columns=["policy", "step", "loss"]
    )
    ax = plots.loss(losses)
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2.0, 1.0], [2.0, 1.25]]
    assert "0.25 nats" in ax.get_title(loc="left")


def test_a_named_policy_as_fast_as_the_plan_is_seen_around_it() -> None:
    row = {"model": "m", "machine": "h", "reason": "", "tokens_per_step": 100, "bound_s": 1.0, "tokens_per_s": 90.0}
    row |= {"best_named_tokens_per_s": 90.0, "zero3_offload_tokens_per_s": np.nan}
    ax = plans.against_bound(pd.DataFrame([row]))
    marks = [c for c in ax.collections if isinstance(c, PathCollection) and len(c.get_offsets())]
    sizes = {tuple(mark.get_facecolor()[0][:3]): float(mark.get_sizes()[0]) for mark in marks}
    assert sizes[1.0, 1.0, 1.0] > 2 * sizes[to_rgb(palette.BLUE)]
    assert "without a mark: does not fit" in ax.get_xlabel()


# ---- looks that mean something


def test_policies_and_ops_are_told_apart(run: tuple[Schedule, Trace]) -> None:
    styles = [(s.colour, s.marker) for s in map(palette.policy_style, policies.names())]
    assert len(set(styles)) == len(styles)
    assert len(set(palette.OP_COLOURS.values())) == len(palette.OP_COLOURS)
    assert {palette.op_class(op) for op in run[0].ops} <= set(palette.OP_COLOURS)


def test_no_text_is_smaller_than_nine_points(comparison: pd.DataFrame, run: tuple[Schedule, Trace]) -> None:
    for ax in (
        plots.throughput(comparison), gantt([run]), strips([run], 1.0), plots.memory(*run, Tier.DEVICE),
    ):  # fmt: skip
        sizes = [t.get_fontsize() for t in figure.figure_of(ax).findobj(lambda a: hasattr(a, "get_fontsize"))]
        assert min(sizes) >= figure.FONT_PT
        assert ax.get_xlabel()
    assert palette.ink(palette.BLUE) == "white"
    assert palette.ink(palette.YELLOW) == "black"


# ---- files


def test_a_picture_comes_with_its_data(comparison: pd.DataFrame, tmp_path: Path) -> None:
    stem = tmp_path / "new" / "model-7.5b"
    paths = figure.save(figure.figure_of(plots.throughput(comparison)), stem, comparison)
    assert [path.name for path in paths] == ["model-7.5b.png", "model-7.5b.svg", "model-7.5b.csv"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()
    back = pd.read_csv(paths[2])
    assert back["tokens_per_s"].tolist() == pytest.approx(comparison["tokens_per_s"].tolist(), nan_ok=True)
    assert sorted(stem.parent.iterdir()) == sorted(paths)  # nothing half-written is left


def test_a_folder_that_cannot_be_written_is_told(comparison: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        figure.save(Figure(), tmp_path / "taken" / "plot", comparison)


def test_plots_leave_pyplot_alone() -> None:
    code = "import sys, analysis.plots, analysis.gantt; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_muon_is_no_adam_in_pictures() -> None:
    workload = Workload(micro_batch_size=1, seq_len=16, optimizer="muon")
    built = policies.build(
        "resident", presets.load("tiny"), workload, MemoryBudget(device_bytes=10**9, host_bytes=10**9)
    )
    drawn = {op.layer: palette.op_class(op) for op in built.ops if op.phase == Phase.ADAM}
    assert drawn == {-1: "Adam", **dict.fromkeys(range(4), "Muon"), 4: "Adam"}
    assert ", A Adam, M Muon, U" in legend(built)

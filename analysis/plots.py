"""Pictures of comparisons and runs, each on axes of its own.

Numbers come in DataFrames with the columns named here, in the units named here; nothing is computed that the
caller could not write to a CSV file beside the picture.
"""

from __future__ import annotations

import itertools
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from analysis.compare import several_baselines
from analysis.figure import FONT_PT, figure_of, new_axes, panel_axes, plain_ticks, stacked_axes
from analysis.labels import Labels, drawn_at
from analysis.palette import BLACK, BLUE, GREY, SKY, VERMILLION, policy_style
from schedules.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from schedules.op import Tier
    from schedules.schedule import Schedule
    from schedules.trace import Trace

BAND = 0.10  # of the identity line in `predicted_against_measured`
_STEPS_SHOWN = 3  # in pictures of memory
_WIDTH_INCHES = 9.0  # of a page, so that writing is as large there as here
_PANELS_IN_A_ROW = 2
_LINE_INCHES, _PANEL_INCHES = 0.2, 0.55  # of a policy's bar; of a panel's name and axis
_BAR_SHARE = 0.68  # of a panel's width; right of the longest bar there is room for what is written behind it
_WRITTEN_LETTERS, _NAME_LETTERS, _TITLE_LETTERS = 52, 30, 100  # in a panel's line, beside it, in the picture's width
_MISSING = "#666666"
_LEGEND_LETTERS = 36  # in a line, where the legend stands beside points
_FAR = (16, 30, 44, 58, 72)  # from a mark to its label, in points of 1/72 inch; the first place that is free is taken
_WAYS = ((-1.0, 0.6), (-0.6, 1.0), (-1.0, 0.2), (-0.2, 1.0))  # above the line; below it the opposite
_TALL = 3.0  # a line higher than this many times the data is written, not drawn


# ---- throughput


def throughput(comparison: pd.DataFrame) -> Axes:
    """Bars of the model's FLOP/s, a panel for each model and a line for each policy; behind each its ratio to ZeRO-3.

    Panels stand by size, two in a row, at one scale; policies stand in the order of the comparison. Returns the first.

    Args:
        comparison: as `compare.compare` returns it, of one workload on one machine. A row that does not fit
            has no bar, and says in its place how much is missing.

    Raises:
        InputError: rows that would stand on top of one another: of several workloads or machines, or of two models or
            policies of one name.
    """
    for _, row in comparison[comparison.duplicated(["model", "label"])].head(1).iterrows():
        raise InputError(
            f"more than one row for {row['model']} and {row['label']}: plot one workload and machine at a time, and "
            "models and policies that have names of their own"
        )
    rows = comparison.sort_values("params_b", kind="stable")
    models, policies = list(dict.fromkeys(rows["model"])), list(dict.fromkeys(rows["label"]))
    columns = min(len(models), _PANELS_IN_A_ROW)
    names = [textwrap.fill(policy, _NAME_LETTERS) for policy in policies]
    lines = len(policies) * max(name.count("\n") + 1 for name in names)
    panels = panel_axes(len(models), columns, _WIDTH_INCHES, _LINE_INCHES * lines + _PANEL_INCHES)
    fastest = float(np.nanmax([0.0, *rows["model_tflops_per_s"].astype(float)]))
    unit, scale = ("GFLOP/s", 1e3) if 0 < fastest < 1 else ("TFLOP/s", 1.0)
    top = fastest * scale or 1.0
    for row in rows.to_dict("records"):
        ax, place = panels[models.index(row["model"])], policies.index(row["label"])
        length, written, colour = 0.0, row["shortage"], _MISSING
        if row["fits"]:
            length, ratio = row["model_tflops_per_s"] * scale, row["ratio_to_zero3_offload"]
            star = "" if row["same_state"] else "*"
            written = f"{length:.3g}" + (f" ({ratio:.2f}x{star})" if np.isfinite(ratio) else "")
            colour = BLACK
            ax.barh(place, length, 0.75, color=policy_style(f"{row['policy']} {row['knobs']}".strip()).colour)
        ax.annotate(
            textwrap.shorten(written, _WRITTEN_LETTERS, placeholder=" ..."), (length, place), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=FONT_PT, color=colour,
        )  # fmt: skip
    for number, (model, ax) in enumerate(zip(models, panels, strict=True)):
        ax.set_xlim(0, top / _BAR_SHARE)
        ax.set_ylim(len(policies) - 0.5, -0.5)
        ax.set_yticks(range(len(policies)), names)
        ax.tick_params(axis="y", length=0, labelleft=number % columns == 0)
        ax.set_title(model, loc="left", fontsize=FONT_PT + 1)
        if number >= len(models) - columns:  # those that have none below them
            ax.set_xlabel(f"model {unit}")
        _open(ax)
    whole = figure_of(panels[0])
    whole.suptitle(textwrap.fill(_setting(comparison), _TITLE_LETTERS), x=0.01, ha="left", fontsize=FONT_PT + 1)
    if told := _what_is_written(rows):
        whole.supxlabel(told, x=0.01, ha="left", fontsize=FONT_PT)
    return panels[0]


def _what_is_written(rows: pd.DataFrame) -> str:
    """What the writing behind bars means, of what there is."""
    compared = rows[rows["fits"].eq(True) & rows["ratio_to_zero3_offload"].notna()]
    told = ""
    if len(compared):
        told = "(x): the ratio to zero3_offload" + (" of the same state" if several_baselines(compared) else "")
    if compared["same_state"].eq(False).any():
        told += "; *: to one that keeps other state"
    return told


def _setting(comparison: pd.DataFrame) -> str:
    """What all rows have in common: machine and workload."""
    first = comparison.iloc[0]
    count = first["accumulation"]
    return (
        f"{first['machine']}, {first['source']}; per step {count} micro-batch{'es' if count > 1 else ''}"
        f" of {first['micro_batch_size']} sequences of {first['seq_len']} tokens"
    )


# ---- memory


def memory_data(schedule: Schedule, trace: Trace, tier: Tier) -> pd.DataFrame:
    """Live bytes of a tier over the last steps of a trace but the very last, after which nothing is read.

    One row per change: `time_ms` from the start of the first of these steps, and `live_gb` from then on, in
    GB (10^9 bytes).
    """
    import pandas as pd

    moments, live = trace.live_bytes(schedule, tier)
    ends = _shown_ends(trace)
    # what is live at the left edge was written before it
    first = max(int(np.searchsorted(moments, ends[0], side="right")) - 1, 0)
    inside = slice(first, int(np.searchsorted(moments, ends[-1], side="right")))
    time_ms = (np.maximum(moments[inside], ends[0]) - ends[0]) / 1e6
    return pd.DataFrame({"tier": str(tier), "time_ms": time_ms, "live_gb": live[inside] / 1e9})


def _shown_ends(trace: Trace) -> list[int]:
    """Start of the first step shown and the end of each, ns."""
    ends = [0, *trace.step_end_ns.tolist()]
    return ends[-_STEPS_SHOWN - 2 : -1] if trace.steps > 1 else ends


def memory(
    schedule: Schedule,
    trace: Trace,
    tier: Tier,
    *,
    capacity_bytes: int | None = None,
    peak_bytes: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Live bytes of one tier over time, under what is allocated and under what the tier holds.

    Args:
        capacity_bytes: the tier's size; written instead of drawn where it is far above the data.
        peak_bytes: allocated bytes and the largest workspace together, where there is one.
    """
    data = memory_data(schedule, trace, tier)
    ax = ax or new_axes(width=10, height=3.2)
    ends_ms = [(end - _shown_ends(trace)[0]) / 1e6 for end in _shown_ends(trace)]
    unit, scale = ("s", 1e-3) if ends_ms[-1] >= 1000 else ("ms", 1.0)
    time = [*(data["time_ms"] * scale), ends_ms[-1] * scale]
    live = [*data["live_gb"], data["live_gb"].iloc[-1]]  # up to the right edge
    size, gb = ("MB", 1e3) if schedule.allocated_bytes(tier) < 1e9 else ("GB", 1.0)
    ax.fill_between(time, np.multiply(live, gb), step="post", color=SKY, linewidth=0, label="live: will be read")
    allocated = schedule.allocated_bytes(tier) / 1e9 * gb
    lines = [("allocated", allocated, BLUE, "-")]
    if peak_bytes is not None and peak_bytes / 1e9 * gb > allocated:
        lines.append(("allocated and workspace", peak_bytes / 1e9 * gb, BLACK, ":"))
    highest = lines[-1][1]
    if capacity_bytes is not None:
        lines.append(("capacity", capacity_bytes / 1e9 * gb, VERMILLION, "--"))
    notes = []
    for name, value, colour, dash in lines:
        if value <= _TALL * highest:
            ax.axhline(value, color=colour, linestyle=dash, linewidth=1.5, label=f"{name}: {value:,.1f} {size}")
            highest = max(highest, value)
        else:
            notes.append(f"{name} {value:,.1f} {size}, above the picture")
    for number, end in enumerate(ends_ms[1:-1]):
        ax.axvline(end * scale, color=GREY, linewidth=0.8, label="end of a step" if number == 0 else None)
    ax.set_xlim(0, ends_ms[-1] * scale)
    ax.set_ylim(0, 1.08 * highest)
    ax.set_xlabel(f"time ({unit})")
    ax.set_ylabel(f"{tier} memory ({size}, 10$^{{{9 if size == 'GB' else 6}}}$ bytes)")
    ax.label_outer()
    ax.set_title("; ".join([f"{schedule.label}, {schedule.model.name}", *notes]), loc="left", fontsize=FONT_PT + 1)
    _open(ax)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=FONT_PT)
    return ax


# ---- predicted against measured


def predicted_against_measured(runs: pd.DataFrame) -> Axes:
    """Step times, predicted over measured, with the line on which they agree and a band of 10 %.

    Args:
        runs: columns `policy`, `model`, `predicted_s`, `measured_s`. At each point stand its policy and the signed
            error: predicted over measured, minus one.
    """
    ax, scale = _agreement(runs, new_axes(width=7.6, height=5.2))
    line_and_band = ax.get_legend_handles_labels()[0][:2]  # policies are named at their points
    ax.legend(handles=line_and_band, loc="upper left", frameon=False, fontsize=FONT_PT)
    _annotate_errors(ax, runs, scale)
    return ax


def validated(runs: pd.DataFrame) -> Axes:
    """The same for many points: no errors written, and beneath them the error of each over its measured time.

    Args:
        runs: columns `policy`, `predicted_s`, `measured_s`, `predict_error`, `noise`.
    """
    above, below = stacked_axes(2, 7.6, 4.2)
    _, scale = _agreement(runs, above)
    above.set_xlabel("")
    above.legend(loc="upper left", frameon=False, fontsize=FONT_PT)
    below.axhspan(-BAND * 100, BAND * 100, color="#DDDDDD", linewidth=0)
    below.axhline(0.0, color=BLACK, linewidth=1)
    for policy, of_policy in runs.groupby("policy", sort=False):
        style = policy_style(str(policy))
        below.errorbar(
            of_policy["measured_s"] * scale, of_policy["predict_error"] * 100, yerr=of_policy["noise"] * 50,
            fmt=style.marker, color=style.colour, markerfacecolor="none", markersize=6, linewidth=0.8,
        )  # fmt: skip
    ends = runs["predict_error"].abs() + runs["noise"].fillna(0) / 2  # of the error bars
    most = max(1.3 * BAND * 100, 1.1 * float(ends.max()) * 100)
    below.set_ylim(-most, most)
    below.set_ylabel("error (%), and noise of the runs")
    below.set_xlabel(f"measured step ({'s' if scale == 1.0 else 'ms'})")
    _open(below)
    return above


def _agreement(runs: pd.DataFrame, ax: Axes) -> tuple[Axes, float]:
    """Points, the line and the band; also what seconds were multiplied with."""
    times = runs[["predicted_s", "measured_s"]].to_numpy(dtype=float)
    unit, scale = ("s", 1.0) if times.max() >= 1 else ("ms", 1e3)
    low, high = times.min() * scale / 1.6, times.max() * scale * 1.6
    line = np.array([low, high])
    ax.fill_between(line, line * (1 - BAND), line * (1 + BAND), color="#DDDDDD", linewidth=0, label=f"±{BAND:.0%}")
    ax.plot(line, line, color=BLACK, linewidth=1, label="predicted = measured")
    for policy, of_policy in runs.groupby("policy", sort=False):
        style = policy_style(str(policy))
        measured, predicted = of_policy["measured_s"] * scale, of_policy["predicted_s"] * scale
        label = textwrap.fill(str(policy), _LEGEND_LETTERS)
        ax.scatter(  # hollow, since points lie on one another
            measured, predicted, s=46, facecolor="none", edgecolor=style.colour, linewidth=1.5, marker=style.marker,
            label=label, zorder=3,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    for axis in (ax.xaxis, ax.yaxis):
        plain_ticks(axis)
    ax.set_xlabel(f"measured step ({unit})")
    ax.set_ylabel(f"predicted step ({unit})")
    _open(ax)
    return ax, scale


def _annotate_errors(ax: Axes, runs: pd.DataFrame, scale: float) -> None:
    """Too slow a prediction is written on the upper side of the line, too fast a one on the lower."""
    rows = runs.sort_values("measured_s").to_dict("records")
    places = [(row["measured_s"] * scale, row["predicted_s"] * scale) for row in rows]
    marks = drawn_at(ax, places)
    room = Labels(marks)
    for row, place, mark in zip(rows, places, marks, strict=True):
        error = row["predicted_s"] / row["measured_s"] - 1
        text, side = f"{row['policy']} {error:+.1%}", 1 if error >= 0 else -1
        ways = (side * far * np.array(way) for far, way in itertools.product(_FAR, _WAYS))
        ax.annotate(
            text,
            place,
            xytext=tuple(room.place(mark, text, ways, anchor=float(side > 0))),
            textcoords="offset points",
            ha="right" if side > 0 else "left",
            va="center",
            fontsize=FONT_PT,
            arrowprops={
                "arrowstyle": "-", "color": GREY, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3,
                "relpos": (float(side > 0), 0.5),
            },
        )  # fmt: skip


# ---- loss


def loss(losses: pd.DataFrame) -> Axes:
    """Loss per step, a line per policy; lines that lie on one another stay visible by width and markers.

    Args:
        losses: columns `policy`, `step`, `loss` (nats per token).
    """
    ax = new_axes(width=8, height=4)
    policies = list(dict.fromkeys(losses["policy"]))
    for number, policy in enumerate(policies):
        rows = losses[losses["policy"] == policy].sort_values("step")
        style = policy_style(policy)
        every = max(1, len(rows) // 8)
        ax.plot(
            rows["step"], rows["loss"], color=style.colour, marker=style.marker, markersize=5, label=policy,
            linewidth=1.5 + 1.5 * (len(policies) - 1 - number),  # the first drawn is the widest
            markevery=(number * every // max(1, len(policies)), every),
        )  # fmt: skip
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("loss (nats per token)")
    ax.set_title(_spread(losses), loc="left", fontsize=FONT_PT + 1)
    _open(ax)
    ax.legend(frameon=False, fontsize=FONT_PT)
    return ax


def _spread(losses: pd.DataFrame) -> str:
    """How far apart the policies ever are: what lines on one another cannot show."""
    if losses["policy"].nunique() < 2:
        return ""
    by_step = losses.groupby("step")["loss"]
    return f"largest difference between policies at any step: {(by_step.max() - by_step.min()).max():.2g} nats"


def _open(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)

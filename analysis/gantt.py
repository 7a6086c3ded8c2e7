"""What every stream does in one typical step: a lane per stream, predicted above measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patheffects import withStroke

from analysis.figure import FONT_PT, figure_of, new_axes
from analysis.palette import OP_COLOURS, ink, op_class
from analysis.trace_diff import step_bounds, typical_step
from schedules.op import Op
from schedules.schedule import Schedule
from schedules.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Run = tuple[Schedule, Trace]
Box = tuple[str, str, float, float]  # class, label, start, width

IDLE = "#EEEEEE"
_BOX = 0.8  # height of an op, of a lane of 1
_EDGE_INCHES = 0.03  # wider boxes get a white edge; narrower ones would be nothing but edge
_LETTER_INCHES = 0.64 * FONT_PT / 72  # width of a digit
_EVERY = (1, 2, 5, 10, 20, 50)  # layers from one with a label to the next
_STRIP_LINE = 0.7  # width in points, a pixel of 100 dpi: a wait is no more than a line, and a thinner one is grey
_BESIDE_INCHES = 0.05  # from a lane to what stands at its right
_MARGIN = 1.09  # of the step's time; what stands at the right of the lanes needs the rest
_COLUMNS = ("run", "source", "stream", "op", "class", "label", "step", "start_ms", "end_ms", "whole_ms")


def steady_step(trace: Trace) -> tuple[int, int]:
    """Begin and end, ns, of the step that is drawn: the one that `megatrain diff` looks at.

    Where steps overlap, a step's window also holds ops of the step after. The trace has none after its last
    step, so of three steps or more it is never that one.
    """
    return step_bounds(trace, typical_step(trace))


def gantt_data(runs: Sequence[Run]) -> pd.DataFrame:
    """The ops that run within each run's steady step, one row each, times in ms from its start.

    `start_ms` and `end_ms` are clipped to the step; `whole_ms` is the op's whole duration. An op that takes no time
    at a step's end, as the host's wait for it does, is of that step.
    """
    import pandas as pd

    rows = []
    for number, (schedule, trace) in enumerate(runs):
        since, until = steady_step(trace)
        inside = (trace.end_ns > since) & ((trace.start_ns < until) | (trace.end_ns == until))
        for row in np.flatnonzero(inside).tolist():
            op = schedule.ops[int(trace.op[row])]
            start, end = int(trace.start_ns[row]), int(trace.end_ns[row])
            rows.append(
                {
                    "run": number,
                    "source": trace.title,
                    "stream": str(op.stream),
                    "op": op.name,
                    "class": op_class(op),
                    "label": _label(schedule, op),
                    "step": int(trace.step[row]),
                    "start_ms": (max(start, since) - since) / 1e6,
                    "end_ms": (min(end, until) - since) / 1e6,
                    "whole_ms": (end - start) / 1e6,
                }
            )
    return pd.DataFrame(rows, columns=_COLUMNS)


def _label(schedule: Schedule, op: Op) -> str:
    return "" if op.layer is None else schedule.model.layer_name(op.layer)


def gantt(runs: Sequence[Run], ax: Axes | None = None) -> Axes:
    """Draw the typical step of each run: all of one schedule, or of several to be compared.

    Light grey is idle time; the share of the step that is busy stands at the right of every lane.
    """
    data = gantt_data(runs)
    count = sum(len(schedule.streams) for schedule, _ in runs)
    ax = ax or new_axes(width=12, height=1.4 + 0.42 * count + 0.3 * len(runs))
    spans_ms = [(until - since) / 1e6 for since, until in (steady_step(trace) for _, trace in runs)]
    unit, scale = ("s", 1e-3) if max(spans_ms) >= 1000 else ("ms", 1.0)
    longest = max(spans_ms) * scale
    per_inch = longest * _MARGIN / (figure_of(ax).get_figwidth() * 0.92)  # axes span most of the figure
    y, ticks, names = 0.0, [], []
    for number, (schedule, trace) in enumerate(runs):
        y += 1.0 if number == 0 else 1.2
        span = spans_ms[number] * scale
        heading = f"{schedule.label}, {schedule.model.name}, {trace.title}: {_length(trace, scale, unit)}"
        ax.text(0, y - 0.62, heading, va="bottom", weight="bold", fontsize=FONT_PT)
        for stream in schedule.streams:
            rows = data[(data["run"] == number) & (data["stream"] == stream)]
            boxes = [
                (str(name), label, start * scale, (end - start) * scale)
                for name, label, start, end in zip(
                    rows["class"], rows["label"], rows["start_ms"], rows["end_ms"], strict=True
                )
            ]
            busy = trace.busy_ns(schedule, stream, steady_step(trace)) / 1e6 * scale / span if span else 0.0
            _lane(ax, y, boxes, span, busy, per_inch)
            ticks.append(y)
            names.append(str(stream))
            y += 1.0
    ax.set_yticks(ticks, names)
    ax.set_ylim(y - 0.4, 0.0)
    ax.set_xlim(0, longest * _MARGIN)
    ax.set_xlabel(f"time within the step ({unit})")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    title = "labels in boxes are layers" if data["label"].any() else ""  # a recording knows of none
    _legend(ax, [name for name in OP_COLOURS if name in set(data["class"])], title)
    return ax


def _length(trace: Trace, scale: float, unit: str) -> str:
    """How long the step drawn is; measured steps differ, so also the median of all but the first, as `run` tells it."""
    since, until = steady_step(trace)
    told = f"step of {(until - since) / 1e6 * scale:.4g} {unit}"
    if trace.source != "measured" or trace.steps < 3:
        return told
    return f"a {told}, the median is {float(np.median(trace.step_ns())) / 1e6 * scale:.4g} {unit}"


def strips(runs: Sequence[Run], limit_ms: float) -> Axes:
    """Many runs at one scale: thin lanes without labels; what takes longer than `limit_ms` is cut there and told."""
    data = gantt_data(runs)
    count = sum(len(schedule.streams) for schedule, _ in runs)
    ax = new_axes(width=12, height=1.2 + 0.15 * count + 0.3 * len(runs))
    y, heading_room = 0.0, 2.0
    for number, (schedule, trace) in enumerate(runs):
        since, until = steady_step(trace)
        span = (until - since) / 1e6
        cut = f", cut at {limit_ms:,.0f} ms" if span > limit_ms else ""
        heading = f"{schedule.label}: step of {span:,.0f} ms{cut}"
        ax.text(0, y + heading_room - 0.7, heading, va="bottom", weight="bold", fontsize=FONT_PT)
        y += heading_room
        for stream in schedule.streams:
            ax.broken_barh([(0, min(span, limit_ms))], (y - 0.5, 0.9), facecolors=IDLE, zorder=1)
            rows = data[(data["run"] == number) & (data["stream"] == stream) & (data["start_ms"] < limit_ms)]
            for name, of_class in rows.groupby("class", sort=False):
                ends = of_class["end_ms"].clip(upper=limit_ms)
                boxes = list(zip(of_class["start_ms"], ends - of_class["start_ms"], strict=True))
                colour = OP_COLOURS[str(name)]
                ax.broken_barh(
                    boxes, (y - 0.5, 0.9), facecolors=colour, edgecolors=colour, linewidth=_STRIP_LINE, zorder=2
                )
            ax.text(-0.004 * limit_ms, y, str(stream), ha="right", va="center", fontsize=FONT_PT)
            y += 1.0
    ax.set_yticks([])
    ax.set_ylim(y, 0.3)
    ax.set_xlim(0, limit_ms)
    ax.set_xlabel("time within the step (ms)")
    ax.spines[["top", "right", "left"]].set_visible(False)
    _legend(ax, [name for name in OP_COLOURS if name in set(data["class"])], title="")
    return ax


def _lane(ax: Axes, y: float, boxes: Sequence[Box], span: float, busy: float, per_inch: float) -> None:
    """One stream: grey where idle, boxes by class of op, and as many labels as there is room for.

    `per_inch` is how much time an inch is. What takes little is drawn over what takes much, whose edges would hide it.
    """
    ax.broken_barh([(0, span)], (y - _BOX / 2, _BOX), facecolors=IDLE, zorder=1)
    total = _total(boxes)
    for name in sorted(total, key=lambda name: -total[name]):
        colour = OP_COLOURS[name]
        of_class = [(start, width) for cls, _, start, width in boxes if cls == name]
        for edge, wide in (("white", True), (colour, False)):
            drawn = [box for box in of_class if (box[1] > per_inch * _EDGE_INCHES) == wide]
            if drawn:
                ax.broken_barh(drawn, (y - _BOX / 2, _BOX), facecolors=colour, edgecolors=edge, linewidth=0.5, zorder=2)
    for name, label, start, width in _labelled(boxes, per_inch * _LETTER_INCHES):
        half = per_inch * _LETTER_INCHES * len(label) / 2
        if not half <= start + width / 2 <= span - half:
            continue  # it would stand over the stream's name, or over how busy it is
        colour = OP_COLOURS[name]
        halo = [] if width > 2 * half else [withStroke(linewidth=2, foreground=colour)]
        ax.text(
            start + width / 2, y, label, ha="center", va="center", color=ink(colour), fontsize=FONT_PT,
            path_effects=halo,
        )  # fmt: skip
    ax.text(span + _BESIDE_INCHES * per_inch, y, f"{busy:.0%} busy", ha="left", va="center", fontsize=FONT_PT)


def _labelled(boxes: Sequence[Box], letter: float) -> list[Box]:
    """The boxes of a lane that get their labels, `letter` being the width of one.

    Of each class all layers, or else every second, fifth and so on, so that no label is on another: the classes that
    take most time first, and names that are no numbers where their own box has room. Where a layer's micro-batches
    follow each other they have one label if there is no room for more.
    """
    found = [box for box in boxes if not box[1].isdecimal() and box[1] and box[3] > letter * (len(box[1]) + 0.3)]
    total = _total(boxes)
    for name in sorted(total, key=lambda name: -total[name]):
        numbered = [box for box in boxes if box[0] == name and box[1].isdecimal()]
        for some, every in [(numbered, 1), *((_joined(numbered), every) for every in _EVERY)]:
            labelled = sorted([*found, *(box for box in some if int(box[1]) % every == 0)], key=_middle)
            if all(_apart(one, other, letter) for one, other in itertools.pairwise(labelled)):
                found = labelled
                break
    return found


def _total(boxes: Sequence[Box]) -> dict[str, float]:
    """By class, what its boxes take together."""
    total: dict[str, float] = {}
    for name, _, _, width in boxes:
        total[name] = total.get(name, 0.0) + width
    return total


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Boxes of a class, in the order of time, with those of one label in turn, and close, as one in their middle."""
    runs: list[list[Box]] = []
    for box in boxes:
        last = runs[-1][-1] if runs else None
        if last is not None and last[1] == box[1] and box[2] - (last[2] + last[3]) <= max(last[3], box[3]):
            runs[-1].append(box)
        else:
            runs.append([box])
    middles = [(run[0][2] + run[-1][2] + run[-1][3]) / 2 for run in runs]
    return [
        (cls, label, middle - width / 2, width)
        for ((cls, label, _, width), *_), middle in zip(runs, middles, strict=True)
    ]


def _middle(box: Box) -> float:
    return box[2] + box[3] / 2


def _apart(one: Box, other: Box, letter: float) -> bool:
    """Whether two labels have room beside each other."""
    return _middle(other) - _middle(one) > letter * (len(one[1] + other[1]) / 2 + 0.5)


def _legend(ax: Axes, names: Sequence[str], title: str) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=OP_COLOURS[name], label=name) for name in names]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    figure_of(ax).legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=FONT_PT,
        columnspacing=1.2,
        handlelength=1.4,
        title=title,
        title_fontsize=FONT_PT,
    )

"""A picture of tokens/s over what is varied: a line per policy over the first axis, a panel per value of the others."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.figure import FONT_PT, figure_of, grid_of_axes
from analysis.palette import BLACK, GREY, Style, policy_style
from analysis.varied import column

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES, _WIDEST_INCHES = 3.8, 12.5  # the latter fits a page and a screen, and its writing stays legible there
_LEGEND_INCHES = 2.4  # a policy's name and its line
_TITLE_LETTERS = 10  # in an inch
_ROOM, _MOST_ROOM = 0.08, 0.4  # for the marks of a policy beneath the lines, and of all, of the height of a panel
_DASHES = ("-", "--", "-.", ":")
_MARKS: dict[bool | None, tuple[dict[str, Any], str]] = {  # by what `fits` says
    False: ({"fillstyle": "none"}, "hollow: does not fit"),
    None: ({"marker": "$?$"}, "not predicted"),
}
_MEANING = {
    "batch": "batch: sequences per micro-batch",
    "accumulation": "accumulation: micro-batches per step",
    "seq": "seq: tokens per sequence",
    "clip": "clip: largest norm of the gradients",
}


@dataclass(frozen=True, kw_only=True)
class _Line:
    """How a policy is drawn: `wider` from 1 for the first to nearly 0 for the last. `marks` is how high its marks
    stand, of the height of a panel; None where it has none.
    """

    label: str
    style: Style
    dash: str
    wider: float
    marks: float | None


def throughput(table: pd.DataFrame, axes: Mapping[str, Sequence[str]], setting: str) -> Figure:
    """Lines of tokens/s over the first axis, whose values stand in their order at equal distances.

    A line has a gap where its policy does not fit or is not predicted, and a mark beneath. The panels of a row have one
    scale; the values of the last axis stand beside one another.

    Args:
        table: as `varied.run` returns it.
        setting: what all points have in common, for the title.
    """
    first, *others = axes
    models = list(table["model"].unique())
    panels = list(table.groupby(["model", *map(column, others)], sort=False))
    columns = len(axes[others[-1]]) if others else 1
    inches = min(max(7.0, _PANEL_INCHES * columns), _WIDEST_INCHES)
    grid = grid_of_axes(len(panels) // columns, columns, inches, 3.1)
    lines, room = _lines(table)
    for ax, ((model, *values), rows) in zip((ax for row in grid for ax in row), panels, strict=True):
        told = [f"{name}={value}" for name, value in zip(others, values, strict=True)]
        title = ", ".join([*([model] if len(models) > 1 else []), *told])
        ax.set_title(_wrapped(title, inches / columns), loc="left", fontsize=FONT_PT + 1)
        for key, line in lines.items():
            _draw(ax, _of(rows, key), line)
        ax.set_xticks(range(len(axes[first])), axes[first])
        ax.set_xlim(-0.3, len(axes[first]) - 0.7)
        ax.axhline(0.0, color=GREY, linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    for row in grid:
        _scale(row[0], room)
        row[0].set_ylabel("tokens/s, predicted")
    for ax in grid[-1]:
        ax.set_xlabel(_MEANING.get(first, first))
    figure = figure_of(grid[0][0])
    title = ", ".join([*(models if len(models) == 1 else []), setting])
    figure.suptitle(_wrapped(title, inches), x=0.01, ha="left", fontsize=FONT_PT + 1)
    _legend(figure, grid[0][0], table)
    return figure


def _wrapped(title: str, inches: float) -> str:
    return textwrap.fill(title, int(_TITLE_LETTERS * inches), break_on_hyphens=False)


def _of(rows: pd.DataFrame, key: tuple[str, str]) -> pd.DataFrame:
    return rows[(rows["policy"] == key[0]) & (rows["knobs"] == key[1])]


def _lines(table: pd.DataFrame) -> tuple[dict[tuple[str, str], _Line], float]:
    """By policy and knobs, in the order of the rows; and the room that all marks take, of the height of a panel."""
    rows = {key: _of(table, key) for key in dict.fromkeys(zip(table["policy"], table["knobs"], strict=True))}
    lacking = [key for key, of in rows.items() if not of["fits"].eq(True).all()]
    room = min(_ROOM * len(lacking), _MOST_ROOM)
    found: dict[tuple[str, str], _Line] = {}
    for key, of in rows.items():
        style = policy_style(" ".join(key).strip())
        marks = room * (1 - (lacking.index(key) + 0.5) / len(lacking)) if key in lacking else None
        label = max(of["label"], key=len)  # what is not built is not known to be stale
        dash, wider = _DASHES[len(found) % len(_DASHES)], 1 - len(found) / len(rows)  # no line hides one beneath it
        found[key] = _Line(label=label, style=style, dash=dash, wider=wider, marks=marks)
    return found, room


def _draw(ax: Axes, rows: pd.DataFrame, line: _Line) -> None:
    look: Any = {"color": line.style.colour, "marker": line.style.marker, "markersize": 4 + 3 * line.wider}
    rates = rows["tokens_per_s"].to_numpy(dtype=float)
    ax.plot(range(len(rates)), rates, line.dash, linewidth=1.2 + 1.5 * line.wider, label=line.label, **look)
    for x, fits in enumerate(rows["fits"]):
        if line.marks is not None and not fits:
            ax.plot(x, line.marks, transform=ax.get_xaxis_transform(), **{**look, **_MARKS[fits][0]})


def _scale(ax: Axes, room: float) -> None:
    """From zero up, and beneath it room for marks; with no number but zero where no panel of the row has a rate."""
    top = ax.get_ylim()[1]
    fastest = max(panel.dataLim.y1 for panel in ax.get_shared_y_axes().get_siblings(ax))
    ticks = [tick for tick in ax.get_yticks() if 0 <= tick <= top * (fastest > 0)]
    ax.set_yticks(ticks, [f"{tick:,.12g}" for tick in ticks])
    ax.set_ylim(-top * room / (1 - room), top)


def _legend(figure: Figure, ax: Axes, table: pd.DataFrame) -> None:
    """Beneath all panels: each policy, as it is drawn in one of them, and each mark that there is."""
    from matplotlib.lines import Line2D

    handles = list(ax.get_legend_handles_labels()[0])
    for fits, (mark, told) in _MARKS.items():
        if any(found is fits for found in table["fits"].astype(object)):
            handles.append(Line2D([], [], color=BLACK, linestyle="", label=told, **{"marker": "o", **mark}))
    columns = max(1, int(figure.get_figwidth() / _LEGEND_INCHES))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=min(len(handles), columns), frameon=False, handlelength=3.2
    )

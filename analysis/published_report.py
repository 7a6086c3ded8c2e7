"""The report on published numbers: tables, and a picture with a band of 10 %. Errors are of speeds throughout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import figure, tables
from analysis.figure import FONT_PT, new_axes
from analysis.palette import BLACK, policy_style
from analysis.plots import BAND
from analysis.published import summary
from megatrain.terminal import Column
from schedules.files import write_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

TITLES = {
    "compared": "points whose run is known",
    "assumed": "points of which the batch or other facts had to be assumed: no reproduction",
    "not predicted": "points that are not predicted, and why",
}
PHASES_TITLE = "one step of MegaTrain 14B on MI355X, part by part"
COMMAND = "megatrain published --out analysis/results/published"


def columns(standing: str) -> Sequence[Column]:
    """Those of the table of points of one standing."""
    return tables.PUBLISHED_ONLY if standing == "not predicted" else tables.PUBLISHED


def plot(frame: pd.DataFrame) -> Axes:
    """Predicted speed over published speed of every point that is predicted, with a band of 10 % about one.

    Full where the run is known, hollow where part of it had to be assumed. The error stands on the side of the point
    that is away from one.
    """
    rows = frame[frame["speed"].notna()]
    order = [rows[rows["standing"] == standing] for standing in TITLES]
    ax = new_axes(width=10, height=1.4 + 0.2 * (len(rows) + 1))
    ax.axvspan(1 - BAND, 1 + BAND, color="#DDDDDD", zorder=0)
    ax.axvline(1, color=BLACK, linewidth=0.8, zorder=1)
    y, ticks, names = 0, [], []
    for of_standing in order:
        for row in of_standing.to_dict("records"):
            style, known = policy_style(row["policy"]), row["standing"] == "compared"
            face = style.colour if known else "white"
            ax.plot(row["speed"], y, style.marker, color=style.colour, markerfacecolor=face, markersize=6, zorder=3)
            faster = row["error"] >= 0
            ax.annotate(
                f"{row['error']:+.1%}{'' if row['fits'] else ', does not fit'}", (row["speed"], y),
                xytext=(8 if faster else -8, 0), textcoords="offset points", ha="left" if faster else "right",
                va="center", fontsize=FONT_PT,
            )  # fmt: skip
            ticks.append(y)
            names.append(f"{row['system']}, {row['model']}, {row['machine']} ({row['unit']})")
            y += 1
        y += 1 if len(of_standing) else 0
    ax.set_yticks(ticks, names)
    ax.set_ylim(y - 1.2, -0.8)
    ax.set_xscale("log")
    marks = [0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5]
    ax.set_xticks(marks, [f"{mark:g}" for mark in marks])
    ax.minorticks_off()
    ax.set_xlim(min(0.4, 0.7 * rows["speed"].min()), max(2.2, 1.5 * rows["speed"].max()))
    ax.set_xlabel("predicted speed / published speed\ngrey: within 10 %; hollow: batch or other facts assumed")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def write(folder: Path, frame: pd.DataFrame, phases: pd.DataFrame) -> None:
    """Write README.md, the points and phases as CSV, and the picture.

    Raises:
        InputError: the folder cannot be written.
    """
    figure.save(figure.figure_of(plot(frame)), folder / "published", frame)
    write_text(folder / "phases.csv", phases.to_csv(index=False))
    lines = ["# Published numbers, predicted", "", f"`{COMMAND}`. {tables.PUBLISHED_NOTE}", ""]
    lines += [summary(frame), ""]
    lines += ["![predicted over published speed](published.png)", "", "[SVG](published.svg), [data](published.csv)", ""]
    for standing, title in TITLES.items():
        rows = frame[frame["standing"] == standing]
        heading = title[0].upper() + title[1:]
        lines += [f"## {heading}", "", tables.markdown(rows, [*columns(standing), tables.SOURCE])]
    lines += [f"## {PHASES_TITLE[0].upper()}{PHASES_TITLE[1:]}", "", tables.markdown(phases, tables.PHASES)]
    write_text(folder / "README.md", "\n".join(lines))

"""Pictures and the numbers behind them. Figures are made without pyplot: nothing global, no display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from schedules.files import whole, write_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

FONT_PT = 9  # the smallest text in a picture at the size it is saved
DPI = 150
_FEW = 30  # decades are few where an axis ends below so many times its beginning

_SETTINGS: Any = {
    "font.size": FONT_PT,
    "axes.titlesize": FONT_PT + 2,
    "axes.labelsize": FONT_PT + 1,
    "xtick.labelsize": FONT_PT,
    "ytick.labelsize": FONT_PT,
    "legend.fontsize": FONT_PT,
    "svg.hashsalt": "megatrain",  # the same data gives the same file
}


def new_axes(width: float, height: float) -> Axes:
    """Those of a new figure of that size in inches."""
    with matplotlib.rc_context(_SETTINGS):
        return Figure(figsize=(width, height), layout="constrained").add_subplot()


def stacked_axes(count: int, width: float, height_each: float) -> list[Axes]:
    """`count` axes in one new figure, one under the other, with a common x axis."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height_each * count), layout="constrained")
        return list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def panel_axes(count: int, columns: int, width: float, height_each: float) -> list[Axes]:
    """`count` axes in one new figure, row by row; the figure is of that width."""
    rows = -(-count // columns)
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height_each * rows + 0.6), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for spare in axes[count:]:
            spare.remove()
        return axes[:count]


def grid_of_axes(rows: int, columns: int, width: float, height_each: float) -> list[list[Axes]]:
    """Rows of axes in one new figure with one x axis, and in each row one y axis."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height_each * rows), layout="constrained")
        return [list(row) for row in figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)]


def plain_ticks(axis: Axis) -> None:
    """Numbers, not powers of ten, on a logarithmic axis whose limits are set: at 1, 2 and 5 of every decade.

    On an axis of few decades at 3 and 7 as well.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 3, 5, 7) if high < _FEW * low else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def figure_of(ax: Axes) -> Figure:
    """The whole figure that axes belong to."""
    found = ax.get_figure(root=True)
    assert isinstance(found, Figure)
    return found


def save(figure: Figure, path_stem: Path, data: pd.DataFrame) -> list[Path]:
    """Write a picture as PNG and SVG and the data behind it as CSV; returns the three paths.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    paths = [path_stem.with_name(path_stem.name + suffix) for suffix in (".png", ".svg", ".csv")]
    save_png(figure, paths[0])
    with matplotlib.rc_context(_SETTINGS), whole(paths[1]) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
    write_text(paths[2], data.to_csv(index=False))
    return paths


def save_png(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write the picture alone. Raises InputError as `save` does."""
    with matplotlib.rc_context(_SETTINGS), whole(path) as partial:
        figure.savefig(partial, format="png", dpi=dpi, metadata={"Software": None})

"""Where the labels of points go: beside them, over no point, no other label and no line to another label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.path import Path
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from analysis.figure import FONT_PT, figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Place = NDArray[np.float64]  # x and y, in points of 1/72 inch, as all lengths here
LETTER, LINE = 0.65 * FONT_PT, 1.2 * FONT_PT  # width of a letter, height of a line
_MARK = 8.0  # width of a mark


def drawn_at(ax: Axes, places: Sequence[tuple[float, float]]) -> Place:
    """Where points of the data stand in the picture, once its layout is known."""
    figure = figure_of(ax)
    figure.draw_without_rendering()
    found: Place = ax.transData.transform(places) * 72 / figure.dpi
    return found


class Labels:
    """Finds room beside marks, in which labels are placed one by one: the first have the best places."""

    def __init__(self, marks: Place, within: Bbox | None = None) -> None:
        self._marks = [Bbox.from_bounds(x - _MARK / 2, y - _MARK / 2, _MARK, _MARK) for x, y in marks]
        self._within = within
        self._labels: list[Bbox] = []
        self._lines: list[Path] = []

    def place(self, mark: Place, text: str, ways: Iterable[Place], anchor: float = 0.5) -> Place:
        """The first of `ways` from the mark on which a text is over nothing else, and no line crosses anything.

        Where lines would cross on all ways the first on which the text is over nothing; else the last.

        Args:
            anchor: which part of the text stands there: 0 its left edge, 1 its right one.
        """
        width = LETTER * (len(text) + 0.5)
        crossed = list[tuple[Place, Bbox, Path]]()
        for way in ways:
            x, y = mark + way
            label = Bbox.from_bounds(x - anchor * width, y - LINE / 2, width, LINE)
            tried = (way, label, Path(np.array((mark, (x, y)))))
            if self._free(label):
                crossed.append(tried)
                if not self._crosses(mark, *tried[1:]):
                    break
        else:
            tried = next(iter(crossed), tried)
        self._labels.append(tried[1])
        self._lines.append(tried[2])
        return tried[0]

    def _free(self, label: Bbox) -> bool:
        inside = self._within is None or all(self._within.contains(x, y) for x, y in label.corners())
        return inside and not any(label.overlaps(other) for other in [*self._labels, *self._marks])

    def _crosses(self, mark: Place, label: Bbox, line: Path) -> bool:
        x, y = mark
        others = [*self._labels, *(other for other in self._marks if not other.contains(x, y))]
        return any(line.intersects_bbox(other) for other in others) or any(
            other.intersects_bbox(label) for other in self._lines
        )

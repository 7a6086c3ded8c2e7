"""A linear program over what may be done to a model's layers: each column is a fraction of one choice, with the areas
of the resources that it keeps busy, and the bytes that it takes of memories at moments of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sim.areas import Areas

# before a resource: what is busy in that window of a step; the middle one is from the first turn to the last
FORWARD, BACKWARD, MIDDLE = WINDOWS = "forward ", "backward ", "between the turns "
VARIABLES = 1 + len(WINDOWS)  # after the columns: the period and its windows

# a memory and a moment; of both memories together, what is not there is taken off:
DEVICE = "device"  # at a turn, on average
DEVICE_FIRST, DEVICE_LAST = "device at the first turn", "device at the last turn"
DEVICE_AMID = "device between two turns"  # on average
DEVICE_BETWEEN = "device between two steps"
DEVICE_END = "device as the last backward of a step ends"
DRIVE_END = "drive as the last backward of a step ends"
BOTH_FIRST, BOTH_LAST = "device and host at the first turn", "device and host at the last turn"
BOTH_BETWEEN = "device and host between two steps"
HOST, NVME = "host", "nvme"  # at a turn, on average


@dataclass
class PlacementProgram:
    """Columns are fractions in [0, 1]; rows limit sums of them."""

    areas: list[Areas] = field(default_factory=list)
    labels: list[tuple[str, float]] = field(default_factory=list)  # what a column places, and its bytes
    at_most: list[tuple[dict[int, float], float]] = field(default_factory=list)
    exactly: list[tuple[dict[int, float], float]] = field(default_factory=list)
    _bytes: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def column(
        self,
        areas: Areas | None = None,
        in_memory: Mapping[str, float] | None = None,
        *,
        label: str = "",
        nbytes: float = 0.0,
    ) -> int:
        """One more column, its number. `in_memory`: bytes by memory and moment."""
        self.areas.append(areas or {})
        self.labels.append((label, nbytes))
        number = len(self.areas) - 1
        for memory, taken in (in_memory or {}).items():
            self._bytes[memory][number] = taken
        return number

    def all_of(self, columns: Iterable[int], of: int) -> None:
        """These fractions add up to that one."""
        self.exactly.append(({**dict.fromkeys(columns, 1.0), of: -1.0}, 0.0))

    def no_more(self, columns: Iterable[int], than: Iterable[int]) -> None:
        """These fractions add up to no more than those."""
        self.at_most.append(({**dict.fromkeys(columns, 1.0), **dict.fromkeys(than, -1.0)}, 0.0))

    def bytes_in(self, memory: str) -> np.ndarray:
        """What each column takes of a memory at a moment."""
        found = np.zeros(len(self.areas))
        for number, taken in self._bytes[memory].items():
            found[number] = taken
        return found

    def row(self, terms: Mapping[int, float]) -> np.ndarray:
        """A row of factors by column, and of none for the VARIABLES."""
        row = np.zeros(len(self.areas) + VARIABLES)
        for column, factor in terms.items():
            row[column] += factor
        return row


def only_in(areas: Areas, window: str) -> Areas:
    """What is busy in a window alone."""
    return {window + name: ns for name, ns in areas.items()}


def in_window(areas: Areas, window: str) -> Areas:
    """What is busy in a window is busy in the step."""
    return {**areas, **only_in(areas, window)}

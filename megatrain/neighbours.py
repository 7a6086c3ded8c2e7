"""Other processes on this machine, or others on the machine that it is a part of: they slow down what is measured."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.control_groups import PROC

LONG_S = 5.0  # less says little: Linux counts in ticks, and a moment's work of others is nothing
QUIET = 0.1  # of the machine's cores: what others may have before it is told; daemons have less
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7  # columns of the first line of /proc/stat


class Neighbours:
    """What others have of the machine's cores from now on, for `long_s` or longer. Nothing is known without Linux."""

    def __init__(self, proc: Path = PROC, long_s: float | None = None) -> None:
        self._proc, self._long_s, self._begun = proc, LONG_S if long_s is None else long_s, time.monotonic()
        self._before_s, self._own_s = _busy_s(proc), _own_s()

    def told(self) -> str | None:
        """What they had, if it was more than QUIET of all cores, and it is known."""
        after_s, elapsed_s = _busy_s(self._proc), time.monotonic() - self._begun
        if self._before_s is None or after_s is None or elapsed_s < self._long_s:
            return None
        all_cores = os.cpu_count() or 1
        cores = min((after_s - self._before_s - (_own_s() - self._own_s)) / elapsed_s, all_cores)
        if cores <= QUIET * all_cores:
            return None
        return f"others had {cores:.1f} of {all_cores} cores while this was measured"


@contextmanager
def told_of_neighbours(proc: Path = PROC) -> Iterator[None]:
    """Warns if others had much of the machine while this was open."""
    neighbours = Neighbours(proc)
    yield
    if told := neighbours.told():
        slower = "so that the machine may be faster than it is now taken to be: measure it again when it is quiet"
        warnings.warn(f"{told}, {slower}", stacklevel=3)


def _busy_s(proc: Path) -> float | None:
    """Seconds that all cores together have worked since the machine began, or others had them where it is virtual."""
    try:
        ticks = [int(word) for word in (proc / "stat").read_text().splitlines()[0].split()[1:]]
        return sum(ticks[i] for i in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _own_s() -> float:
    """Seconds of cores that this process has had, with those it began and has seen end."""
    return sum(os.times()[:4])

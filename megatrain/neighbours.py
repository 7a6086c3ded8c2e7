"""Other processes on this machine, or others on the machine that it is a part of: they slow down what is measured."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.control_groups import PROC

LONG_S = 1.0  # less says nothing: Linux counts in ticks
QUIET = 0.1  # of the machine's cores: what others may have before it is told; daemons have less
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7  # columns of the first line of /proc/stat


@contextmanager
def told_of_neighbours(proc: Path = PROC) -> Iterator[None]:
    """Warns if others had more than QUIET of the machine's cores while this was open. Silent where Linux is not."""
    before, own, begun = _busy_s(proc), _own_s(), time.monotonic()
    yield
    after, elapsed = _busy_s(proc), time.monotonic() - begun
    if before is None or after is None or elapsed < LONG_S:
        return
    all_cores = os.cpu_count() or 1
    cores = min((after - before - (_own_s() - own)) / elapsed, all_cores)
    if cores > QUIET * all_cores:
        warnings.warn(
            f"others had {cores:.1f} of {all_cores} cores while this was measured, so that the machine may be "
            "faster than it is now taken to be: measure it again when it is quiet",
            stacklevel=3,
        )


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

"""Cores of the host that this process may use: those that it may run on, or fewer in a container, which gets less time.

With more threads than its quota of time is for, Linux stops all of them, those that issue too, for most of every 0.1 s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatrain.control_groups import GROUPS, PROC, folders


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """How many, one at least; of a quota the whole cores."""
    return max(1, min([_allowed(), *_quotas(proc, groups)]))


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows, on which a process may run on every core


def _quotas(proc: Path, groups: Path) -> Iterator[int]:
    for folder, version in folders("cpu", proc, groups):
        with suppress(OSError, ValueError):  # no limit: no file, or the word "max"
            if version == 1:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:  # version 1 has -1 for none
                yield quota // period

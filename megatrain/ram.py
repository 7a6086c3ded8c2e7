"""Memory of the host that this process may have: the machine's, or less in a container, which Linux holds to a limit.

The limit is that of a control group. A process that takes more is ended, however much memory the machine has left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.control_groups import GROUPS, PROC, folders


@dataclass(frozen=True)
class _Names:
    """Files of a control group, and what of its memory Linux gives back before it ends anyone: that of files."""

    limit: str
    used: str
    of_files: tuple[str, str]


_NAMES = {
    1: _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: _Names("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def total_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes of RAM, had by whomever."""
    return min([_all(), *(limit for limit, _ in _limits(proc, groups))])


def available_memory(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes of RAM that can be had without swapping."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = _all()
    return min([free, *(left for _, left in _limits(proc, groups))])


def _all() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(bytes, bytes left) of the limits that are less than the machine's memory."""
    for folder, version in folders("memory", proc, groups):
        names = _NAMES[version]
        with suppress(OSError, ValueError):  # no limit: no file, or the word "max"
            limit = int((folder / names.limit).read_text())
            if limit < _all():
                used = int((folder / names.used).read_text())
                numbers = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield limit, max(0, limit - used + sum(int(numbers.get(name, 0)) for name in names.of_files))

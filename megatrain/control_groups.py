"""The control groups that this process is in, as a container is one: where Linux says how much it may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def folders(controller: str, proc: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version 1 or 2 of its files) of the groups with that controller that this process is in.

    Each is in the one after it, as far as they can be seen from here.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        root, version = (groups / controller, 1) if kinds else (groups, 2)
        inmost = root / path.lstrip("/")  # in a container perhaps as it is called outside, which is not there
        for folder in (inmost, *inmost.parents):
            if folder.is_relative_to(root):
                yield folder, version

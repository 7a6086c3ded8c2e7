"""What has been measured so far of something that takes long, and where: it goes on from there on no other machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.this_machine import Here, machine_name, versions
from megatrain.way import Way
from schedules.errors import Refused
from schedules.files import write_text

FORMAT = 2  # of what parts hold and mean: those of another are measured again


def claim(folder: Path, at: Here, way: Way, of: Mapping[str, str] | None = None) -> None:
    """Note in a folder for results where and how they are measured, and `of` what, by name.

    Raises Refused where it says otherwise already.
    """
    now = {
        "host": machine_name(),
        "device": f"{at.device} as {'a GPU' if at.on_gpu else 'a CPU'}",
        # a folder may have a name in another encoding
        "drive": os.fsencode(at.drive or "none").decode(errors="backslashreplace"),
        "ops": str(way),
        "software": versions(),
        **(of or {}),
    }
    lines = [f"{name}: {value}" for name, value in now.items()]
    owner = folder / "machine.txt"
    was = owner.read_text(encoding="utf-8").splitlines() if owner.is_file() else []
    if differ := [line for line in was if line not in lines]:
        asked = any(line.split(":")[0] in (of or {}) for line in differ)
        how = "of something else" if asked else "on another machine or in another way"
        told = f"{folder} holds what was measured {how} ({'; '.join(differ)})"
        raise Refused(f"{told}: remove it, or write elsewhere")
    write_text(owner, "\n".join(lines))


def kept_in(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds; None where there is none, or one that a loss of power left without its contents."""
    with suppress(FileNotFoundError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None


class Parts:
    """What has been measured so far, a JSON file each, so that a measurement goes on where it was stopped.

    Raises InputError if ops cannot be computed in this way here, Refused if the folder holds what was measured on
    another machine or in another way.
    """

    def __init__(self, folder: Path | None, at: Here, way: Way) -> None:
        way.require(on_gpu=at.on_gpu)
        self._folder = folder
        if folder is not None:
            claim(folder, at, way)

    def of(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `work` after a round trip through JSON; computed only once."""
        path = None if self._folder is None else self._folder / f"{name}.{FORMAT}.json"
        if path is not None and (known := kept_in(path)) is not None:
            return known
        text = json.dumps(work())
        if path is not None:
            write_text(path, text)
        return dict(json.loads(text))

    def remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)

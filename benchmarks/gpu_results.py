"""The rows of `gpu.py`, in a file, whatever ends the process that measures them.

Before a row is begun the file says that it was cut off; what it finds replaces that. If it ended its process, the next
one says so, and no row can end two of them; if the whole benchmark was ended, the next call measures the row.
Each row tells the number of its run: which machine measured it, when, by which command and versions.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_rivals
import torch
from gpu_machine import Row
from gpu_profile import EARLIER, MACHINE
from gpu_table import table

from megatrain.backend import OpFailed
from megatrain.cores import usable_cores
from megatrain.this_machine import machine_name
from schedules.errors import Refused
from schedules.files import write_text

SMOKE = "smoke"  # the part without which nothing is worth measuring
AGAIN = 3  # exit status: measured what could be, the rest wants a new process
STOP = 2  # exit status: another process would come no further
HANGS_AFTER_S = 150.0  # a row of which nothing is expected; else three times what is
OVER_S = 100.0  # a row may take so much longer than the time there is for all
DID_NOT_END = "did not end: it ended the process, or was stopped since it took too long"
CUT_OFF = "cut off: what ended the benchmark came before its end"
CHECKS = (SMOKE, "checks", "block")  # parts that tell whether what computes is right
PACKAGES = ("megatrain", "schedules", "sim")  # of which that consists
LEASE = datetime.timedelta(hours=1)  # rows of runs that began longer ago are another lease's


class Results:
    """Rows by part and name, from `folder`/gpu.json on; none is begun that is expected to end after `budget_s`.

    A smoke test that failed is forgotten; with `again`, so is every other check that did, and what ended in an error.
    Rows that contain a text of `anew`, as in "steps: ...", stand until they are measured again, if another lease's; so
    do the smoke test, and checks of other code.
    With `went_on`, in a process that follows another of the same call, a row that was cut off has ended that one.
    Raises Refused where the rows that are there are another GPU's.
    """

    def __init__(
        self, folder: Path, budget_s: float, *, again: bool, went_on: bool = False, anew: Sequence[str] = ()
    ) -> None:
        self.folder, self._end, self._anew = folder, time.monotonic() + budget_s, anew
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "gpu.json"
        empty: dict[str, Any] = {"runs": [], "rows": {}}
        self.body = json.loads(self._file.read_text()) if self._file.exists() else empty
        self._run = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
            "gpu": torch.cuda.get_device_name(),
            "host": f"{machine_name()}, {usable_cores()} cores",
            "sources": _sources(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            },
        }
        others = {run["gpu"] for run in self.body["runs"]} - {self._run["gpu"]}
        if others:
            raise Refused(f"{folder} holds rows of {', '.join(others)}, this is {self._run['gpu']}: give another --out")
        ended = [row for rows in self.body["rows"].values() for row in rows.values() if row.get("error") == CUT_OFF]
        if went_on and ended:
            for row in ended:
                row["error"] = DID_NOT_END
            self.save()  # there may be no time for another row
        for part, rows in self.body["rows"].items():
            forgotten = [key for key, row in rows.items() if _wanted_again(part, row, again)]
            for key in forgotten:
                del rows[key]

    def forget_refused(self) -> None:
        """What was not measured for want of room or a package is to be tried again."""
        for rows in self.body["rows"].values():
            for key in [key for key, row in rows.items() if row.get("refused")]:
                del rows[key]

    def rows(self, part: str) -> list[Row]:
        """The rows of a part that hold figures."""
        return [row for row in self.body["rows"].get(part, {}).values() if "error" not in row]

    def failed(self, part: str) -> list[Row]:
        """The rows of a part that tell of a check that failed."""
        return [row for row in self.rows(part) if not row.get("passed", True)]

    def unexpected(self) -> list[str]:
        """The rows that tell of a check that failed, or of an error but no room, no package and no rival's."""
        parts = ((part, known) for part, known in self.body["rows"].items() if part != "rivals")
        rows = ((f"{part}: {name}", row) for part, known in parts for name, row in known.items())
        bad = ((name, row) for name, row in rows if "error" in row or not row.get("passed", True))
        return [name for name, row in bad if not row.get("refused")]

    def wrong(self, part: str, key: str) -> bool:
        """Whether a check is there that failed, or ended in an error."""
        found = [row for name, row in self.body["rows"].get(part, {}).items() if _of(name, key)]
        return any("error" in row or not row["passed"] for row in found)

    def there(self, part: str, key: str) -> bool:
        """Whether its rows were measured, or failed, and are not to be measured anew, as checks are of other code."""
        rows = [row for name, row in self.body["rows"].get(part, {}).items() if _of(name, key)]
        wanted = part == SMOKE or any(text in f"{part}: {key}" for text in self._anew)
        return any(not self._of_other_code(part, row) and not (wanted and self._of_another_lease(row)) for row in rows)

    def _of_other_code(self, part: str, row: Row) -> bool:
        """Whether it tells that what computed then was right, which is not what computes now."""
        return part in CHECKS and self.body["runs"][row["run"]].get("sources") != self._run["sources"]

    def _of_another_lease(self, row: Row) -> bool:
        begun = datetime.datetime.fromisoformat(self.body["runs"][row["run"]]["date"])
        return datetime.datetime.now(datetime.UTC) - begun > LEASE

    def begins(self, part: str, key: str, *, takes_s: float) -> bool:
        """Whether rows are still to be measured, and there is the time."""
        return not self.there(part, key) and time.monotonic() + takes_s <= self._end

    def measure(self, part: str, key: str, work: Callable[[], Row | list[Row]], *, takes_s: float = 0.0) -> bool:
        """Add the rows of `work` if it `begins`: whether it did.

        Its error becomes the row. After one that nobody expected, other than too little memory, what CUDA and torch are
        left with is unknown: the process ends, with status AGAIN.
        """
        if not self.begins(part, key, takes_s=takes_s):
            return False
        known = self.body["rows"].setdefault(part, {})
        print(f"{part}: {key}, about {takes_s:.0f} s ...", file=sys.stderr, flush=True)
        if self._run not in self.body["runs"]:
            self.body["runs"].append(self._run)
        begun, sound = time.monotonic(), True
        told: Row = {"run": len(self.body["runs"]) - 1}
        for name in [name for name in known if _of(name, key)]:
            old = known.pop(name)
            if part in MACHINE and "error" not in old:
                self.body.setdefault(EARLIER, {}).setdefault(part, {}).setdefault(str(old["run"]), {})[name] = old
        known[key] = {"case": key, "error": CUT_OFF, **told}
        self.save()
        hangs_after_s = min(max(HANGS_AFTER_S, 3 * takes_s), self._end - begun + OVER_S)
        faulthandler.dump_traceback_later(hangs_after_s, exit=True)
        try:
            found = work()
        except Exception as error:  # out of memory, or a fault of ours: the other rows are still wanted
            sound = _sound(error)
            if not sound:
                traceback.print_exc()
            refusals = (Refused, gpu_rivals.LeftOut)
            said = str(error) if isinstance(error, refusals) else f"{type(error).__name__}: {error}"
            found = {"case": key, "error": said[:2000]}
            if isinstance(_cause(error), refusals) or out_of_memory(error):
                found["refused"] = True
        faulthandler.cancel_dump_traceback_later()
        told["took_s"] = round(time.monotonic() - begun, 1)
        del known[key]
        if isinstance(found, list):
            known.update({f"{key}: {row['case']}": {**told, **row} for row in found})
        else:
            known[key] = {**told, **found}
        self.save()
        if not sound:
            sys.stderr.flush()
            os._exit(AGAIN)
        return True

    def save(self) -> None:
        """Write the file, whole or not at all, and the table of what is in it."""
        write_text(self._file, json.dumps(self.body, indent=1, default=str))
        write_text(self._file.with_suffix(".md"), table(self.body))


def _sources() -> str:
    """What tells one state of the code from another."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.[pc]*")):
        if file.suffix in (".py", ".cpp"):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _of(name: str, key: str) -> bool:
    """Whether a row is what was measured under a key, or one of several."""
    return name == key or name.startswith(f"{key}: ")


def _wanted_again(part: str, row: Row, again: bool) -> bool:
    if "error" in row:
        return again or bool(row["error"] == CUT_OFF)
    return (again or part == SMOKE) and not row.get("passed", True)


def out_of_memory(error: Exception) -> bool:
    """Whether it, or what made an op fail or a buffer be refused, is that torch found no memory on the GPU."""
    return isinstance(_cause(error), torch.cuda.OutOfMemoryError)


def _sound(error: Exception) -> bool:
    """Whether CUDA and torch are as they were before it."""
    return out_of_memory(error) or isinstance(_cause(error), (Refused, gpu_rivals.LeftOut))


def _cause(error: Exception) -> BaseException | None:
    """Why an op failed, or a buffer was refused for want of room."""
    wants_room = isinstance(error.__cause__, torch.cuda.OutOfMemoryError)
    return error.__cause__ if isinstance(error, OpFailed) or wants_room else error

"""The rows of `gpu.py`, in a file, whatever ends the process that measures them.

Before a row is begun the file says that it did not end; what it finds replaces that. So no row can end two processes.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_rivals
import torch

from megatrain.session import machine_name
from schedules.errors import Refused

Row = dict[str, Any]

AGAIN = 3  # exit status: measured what could be, the rest wants a new process
HANGS_AFTER_S = 150.0  # a row of which nothing is expected; else three times what is
DID_NOT_END = "did not end: it ended the process, or was stopped since it took too long"


class Results:
    """Rows by part and name, from `folder`/gpu.json on; none is begun that is expected to end after `budget_s`."""

    def __init__(self, folder: Path, budget_s: float, *, again: bool) -> None:
        self.folder, self._end = folder, time.monotonic() + budget_s
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "gpu.json"
        empty: dict[str, Any] = {"runs": [], "rows": {}, "op_times_ns": {}}
        self.body = json.loads(self._file.read_text()) if self._file.exists() else empty
        if again:
            for part, rows in self.body["rows"].items():
                self.body["rows"][part] = {key: row for key, row in rows.items() if "error" not in row}
        self.body["runs"].append(
            {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": " ".join(["python", *sys.argv]),
                "gpu": torch.cuda.get_device_name(),
                "host": f"{machine_name()}, {len(os.sched_getaffinity(0))} cores",
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                    "cudnn": torch.backends.cudnn.version(),
                },
            }
        )

    def rows(self, part: str) -> list[Row]:
        """The rows of a part that hold figures."""
        return [row for row in self.body["rows"].get(part, {}).values() if "error" not in row]

    def measure(self, part: str, key: str, work: Callable[[], Row | list[Row]], *, takes_s: float = 0.0) -> None:
        """Add the rows of `work` unless they are there, or too little time is left. Its error becomes the row.

        After an error that nobody expected, other than too little memory, what CUDA and torch are left with is unknown:
        the process ends, with status AGAIN.
        """
        known = self.body["rows"].setdefault(part, {})
        if any(name == key or name.startswith(f"{key}: ") for name in known):
            return
        if time.monotonic() + takes_s > self._end:
            return
        print(f"{part}: {key} ...", file=sys.stderr, flush=True)
        begun, sound = time.monotonic(), True
        known[key] = {"case": key, "error": DID_NOT_END}
        self.save()
        faulthandler.dump_traceback_later(max(HANGS_AFTER_S, 3 * takes_s), exit=True)
        try:
            found = work()
        except (Refused, gpu_rivals.LeftOut) as error:
            found = {"case": key, "error": str(error)}
        except Exception as error:  # out of memory, or a fault of ours: the other rows are still wanted
            traceback.print_exc()
            found = {"case": key, "error": f"{type(error).__name__}: {error}"[:2000]}
            sound = isinstance(error, torch.cuda.OutOfMemoryError)
        faulthandler.cancel_dump_traceback_later()
        took = {"took_s": round(time.monotonic() - begun, 1)}
        del known[key]
        if isinstance(found, list):
            known.update({f"{key}: {row['case']}": {**row, **took} for row in found})
        else:
            known[key] = {**found, **took}
        self.save()
        if not sound:
            sys.stderr.flush()
            os._exit(AGAIN)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.body, indent=1, default=str))
        partial.replace(self._file)


def table(results: Results, others: tuple[str, ...]) -> str:
    """What a reader wants to see, as Markdown: steps, then the rows of the parts `others` as they are."""
    peak = max((row["TFLOP_s"]["median"] for row in results.rows("gemm") if "TFLOP_s" in row), default=None)
    lines = [
        "| case | step (s) | spread | tokens/s | MFU | HFU | predicted | above bound | GPU peak (GB) | host (GB) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for part in ("ways", "steps", "rivals"):
        for row in results.body["rows"].get(part, {}).values():
            if "error" in row:
                lines.append(f"| {row['case']} | {row['error'][:120].splitlines()[0]} | | | | | | | | |")
                continue
            step = row["step_s"]

            def share(name: str, row: Row = row) -> str:
                return f"{row[name] / peak:.1%}" if peak and name in row else ""

            def signed(name: str, row: Row = row) -> str:
                return f"{row[name]:+.1%}" if name in row else ""

            lines.append(
                f"| {row['case']} | {step['median']:.4f} | {step['least']:.4f}-{step['most']:.4f} "
                f"| {row['tokens_per_s']:,.0f} | {share('model_TFLOP_s')} | {share('executed_TFLOP_s')} "
                f"| {signed('prediction_error')} | {signed('above_bound')} "
                f"| {row['gpu_peak_GB']:.1f} | {row.get('host_buffers_GB', 0):.1f} |"
            )
    told = [
        f"{part}: {json.dumps({k: v for k, v in row.items() if k not in ('said', 'settings')}, default=str)}"
        for part in others
        for row in results.body["rows"].get(part, {}).values()
    ]
    note = f"MFU and HFU are of {peak:,.0f} TFLOP/s, the fastest product measured here." if peak else ""
    return "\n".join([*lines, "", note, "", *told, ""])

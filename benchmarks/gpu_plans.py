"""The plans of steps that `gpu.py` is to measure, made beforehand where time costs less than on the GPU.

    python benchmarks/gpu_plans.py results/gpu [--only TEXT ...]

The folder holds gpu.json, as `gpu.py --out` wrote it on such a machine. Each plan is made for the memory, the links
and the other figures that were measured there, and written to `plans/` in the folder, where `gpu.py` takes it from; a
plan that is there is kept. Without `--only` those of the aims' steps that have no row yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_rows
from gpu_case import PLANNED, Case, plan_file, schedule_of
from gpu_profile import machine_of, of_run
from rich.progress import track

from schedules import codec


def wanted(body: dict[str, Any], only: Sequence[str]) -> Iterator[Case]:
    """The planned cases whose keys contain a text of `only`, or, without, those of the aims that were not measured."""
    there = {row["case"] for row in body["rows"].get("steps", {}).values()}
    for case in gpu_rows.cases(gpu_rows.MODELS):
        missing = case.key in gpu_rows.AIMS and case.key not in there
        if case.policy == PLANNED and (any(text in case.key for text in only) if only else missing):
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of gpu.json")
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[], help="steps whose names contain it")
    options = parser.parse_args()
    body = json.loads((options.folder / "gpu.json").read_text())
    device_bytes, host_bytes = body["device_bytes"], body["host_bytes"]
    machine = machine_of(of_run(body, len(body["runs"])), body["runs"][-1]["gpu"])
    for case in track(list(wanted(body, options.only)), description="planning"):
        file = plan_file(options.folder / "plans", case, device_bytes, host_bytes)
        if not file.exists():
            codec.save(schedule_of(case, machine, device_bytes=device_bytes, host_bytes=host_bytes), file)


if __name__ == "__main__":
    main()

"""What the steps of `gpu.py` are expected to take on a GPU, from datasheets, before any of them was measured.

    python benchmarks/gpu_expected.py --gpu h200 [--models llama-3.2-1b ...] [--host-gib 115] [--out DIR]

Also shows, without a GPU, that every row's schedule can be built, is safe and fits; what does not fit is a row, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gpu_rows
from gpu_case import Case, schedule_of
from rich.progress import track

from megatrain.this_machine import today
from schedules.errors import Refused
from schedules.files import write_text
from schedules.op import Tier
from schedules.verify import verify
from schedules.workload import MemoryBudget
from sim import hardware
from sim.machine import HardwareProfile
from sim.prediction import predict

CORES = 16  # of the hosts that such a GPU comes with, when it is rented alone


def rented(gpu: str, host_gib: float) -> HardwareProfile:
    """A GPU's datasheet with so much memory beside it."""
    return hardware.override(hardware.load(gpu), [f"host.memory={host_gib}GiB", f"host.cores={CORES}cores"])


def expected(case: Case, profile: HardwareProfile) -> dict[str, Any]:
    """One row, predicted. Raises Refused for what does not fit."""
    device, host = int(profile.gpu.memory.value), int(profile.host.memory.value)
    schedule = schedule_of(case, profile, device_bytes=device, host_bytes=host)
    verify(schedule)
    limit = int(case.device_gib * 2**30) if case.device_gib else device
    prediction = predict(schedule, profile, MemoryBudget(device_bytes=limit, host_bytes=host))
    if not prediction.fits:
        raise Refused("does not fit beside what ops need for a while")
    return {
        "step": f"{prediction.period_ns / 1e9:.5g}",
        "rate": f"{schedule.workload.tokens_per_step / prediction.period_ns * 1e9:,.0f}",
        "above": f"{prediction.period_ns / prediction.bound_ns - 1:+.1%}",
        "gpu": f"{prediction.peak_bytes[Tier.DEVICE] / 1e9:.1f}",
        "host": f"{prediction.peak_bytes[Tier.HOST] / 1e9:.1f}",
    }


def page(rows: dict[str, dict[str, Any] | str], profile: HardwareProfile, command: str) -> str:
    """The table, as Markdown."""
    lines = [
        f"# What the steps of gpu.py are expected to take: {profile.name}",
        "",
        f"`{command}`, {today()}, **predicted** from datasheets: `{profile.name}` with "
        f"{profile.host.memory} of host memory and {profile.host.cores}. Nothing here was measured; "
        "`benchmarks/gpu.py` measures the same rows. Kernels are taken to be fused.",
        "",
        "| case | step (s) | tokens/s | above its own bound | GPU peak (GB) | host peak (GB) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for key, row in rows.items():
        lines.append(
            f"| {key} | {row} | | | | |" if isinstance(row, str) else f"| {key} | {' | '.join(row.values())} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, choices=hardware.names(), help="whose datasheet")
    parser.add_argument("--out", type=Path, default=gpu_rows.EXPECTED, help="the folder of the page and its numbers")
    parser.add_argument("--models", nargs="+", default=list(gpu_rows.MODELS))
    parser.add_argument("--host-gib", type=float, default=115.0, help="host memory to plan with")
    options = parser.parse_args()
    profile = rented(options.gpu, options.host_gib)
    rows: dict[str, dict[str, Any] | str] = {}
    cases = gpu_rows.cases(tuple(options.models))
    ours = [dataclasses.replace(case, fused=True) for case in cases if not gpu_rows.is_rival(case)]
    for case in track(ours, description="predicting"):
        try:
            rows[case.key] = expected(case, profile)
        except Refused as error:
            rows[case.key] = str(error).splitlines()[0]
    text = page(rows, profile, f"python {' '.join(sys.argv)}")
    write_text(options.out / f"{options.gpu}.md", text)
    numbers = {
        key: {"step_s": float(row["step"]), "host_GB": float(row["host"])}
        for key, row in rows.items()
        if not isinstance(row, str)
    }
    write_text(options.out / f"{options.gpu}.json", json.dumps(numbers, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()

"""What the host takes to issue the steps of gpu.py, and what torch's allocator takes, without a GPU.

    python benchmarks/issue.py --out analysis/results/issue [--gpu h100] [--models llama-3.2-1b ...] [--plans FOLDER]


All is done as on the GPU, but by one that the host plays (played_gpu.cpp): kernels, copies and the optimizer take no
time, so a step lasts as long as the host takes to issue it. A real driver takes some 2 us more for each launch. Beside
it stands the step as predicted for the GPU: where issuing takes longer, the GPU would wait for it. Plans are made for
the GPU's datasheet, but for those that the folder has, as gpu_plans.py makes them for a machine that was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import gpu  # sets what torch's allocator is to do, as torch reads that once
import gpu_case
import gpu_expected
import gpu_rows
import gpu_steps
import played_gpu
import torch
from rich.progress import track

from megatrain import pinned
from megatrain.backend import Work
from megatrain.cores import usable_cores
from megatrain.cuda import CudaBackend
from megatrain.store import Store
from megatrain.this_machine import machine_name, today
from schedules.errors import Refused
from schedules.files import write_text
from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget
from sim.prediction import predict

WARM_UP, RUNS, STEPS = 3, 5, 4  # the median run is told
LAUNCHES = ("kernels", "graphs")
PLAYED = "PLAYED_GPU_GIB"  # set where this is the process that has the GPU


def device_alone(schedule: Schedule, works: Sequence[Work]) -> list[Work]:
    """What the host computes takes no time."""
    return [work if op.on_device else (lambda step: None) for op, work in zip(schedule.ops, works, strict=True)]


def issued(case: gpu_case.Case, schedule: Schedule) -> dict[str, str]:
    """Columns of one row: launches and milliseconds of a step, memory."""

    def prepare(schedule: Schedule, works: Sequence[Work]) -> Sequence[Work]:
        return case.way.prepare(schedule, device_alone(schedule, works))

    _, trainer = gpu_steps.trainer_of(case, verify(schedule), lambda schedule: CudaBackend(), prepare)
    with trainer:
        trainer.run(WARM_UP)
        before, times = gpu_steps.retries(), []
        for what in LAUNCHES:
            played_gpu.count(what)
        for _ in range(RUNS):
            begun = time.perf_counter()
            trainer.run(STEPS)
            times.append((time.perf_counter() - begun) / STEPS)
        kernels, graphs = (played_gpu.count(what) / (RUNS * STEPS) for what in LAUNCHES)
        return {
            "kernels": f"{kernels:,.0f}",
            "graphs": f"{graphs:,.0f}",
            "issue": f"{statistics.median(times) * 1e3:.1f}",
            "peak": f"{torch.cuda.max_memory_allocated() / 1e9:.1f}",
            "reserved": f"{torch.cuda.max_memory_reserved() / 1e9:.1f}",
            "retries": str(gpu_steps.retries() - before),
        }


def ways(case: gpu_case.Case) -> Iterator[gpu_case.Case]:
    """As gpu.py computes it, with compiled kernels; without graphs first where it has any."""
    yield dataclasses.replace(case, fused=True)
    with_graphs = gpu.in_way(case, {"fused": True, "graphs": True})
    if with_graphs.graphs:
        yield with_graphs


def rows(name: str, host_gib: float, models: tuple[str, ...], plans: Path | None) -> list[str]:
    """The table's lines."""
    profile, lines = gpu_expected.rented(name, host_gib), []
    device, host = int(profile.gpu.memory.value), int(profile.host.memory.value)
    ours = [case for case in gpu_rows.cases(models) if case.key in gpu_rows.AIMS and not gpu_rows.is_rival(case)]
    for case in track(ours, description="issuing"):
        try:
            schedule = gpu_case.schedule_of(case, profile, device_bytes=device, host_bytes=host, plans=plans)
        except Refused as error:
            lines.append(f"| {case.key} | {str(error).splitlines()[0]} |" + " |" * (len(COLUMNS) - 2))
            continue
        limit = int(case.device_gib * 2**30) if case.device_gib else device
        found = predict(schedule, profile, MemoryBudget(device_bytes=limit, host_bytes=host))
        for way in ways(case):
            row = issued(way, schedule)
            share = float(row["issue"]) / found.period_ns * 1e6
            told = [
                case.key, "graphs" if way.graphs else "", row["kernels"], row["graphs"], row["issue"],
                f"{found.period_ns / 1e6:,.1f}", f"{share:.0%}", f"{found.peak_bytes[Tier.DEVICE] / 1e9:.1f}",
                row["peak"], row["reserved"], row["retries"],
            ]  # fmt: skip
            lines.append(f"| {' | '.join(told)} |")
    return lines


COLUMNS = (
    "case", "blocks as", "kernels a step", "graphs a step", "issuing a step (ms)", "step, predicted (ms)", "share",
    "GPU peak, predicted (GB)", "allocated (GB)", "reserved (GB)", "retries",
)  # fmt: skip


def page(lines: list[str], name: str, command: str) -> str:
    machine = f"{machine_name()}, {usable_cores()} cores, torch {torch.__version__}"
    told = (
        f"`{command}`, {today()}. Launches, issuing and torch's memory are **measured**: {machine}, on a "
        f"GPU that the host plays and that takes no time. Step and peak are **predicted** for `{name}` from its "
        "datasheet. Kernels between products are compiled; attention is torch's flash attention. A real driver takes "
        "about 2 us more for each launch."
    )
    head = [f"| {' | '.join(COLUMNS)} |", "|---|---" + "|---:" * (len(COLUMNS) - 2) + "|"]
    return "\n".join([f"# What it takes to issue the steps of gpu.py: {name}", "", told, "", *head, *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=played_gpu.GPUS, default="h100", help="which GPU is played")
    parser.add_argument("--models", nargs="+", default=list(gpu_rows.MODELS))
    parser.add_argument("--host-gib", type=float, default=115.0, help="host memory to plan with")
    parser.add_argument("--plans", type=Path, default=None, help="a folder of plans to be taken as they are")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the page")
    options = parser.parse_args()
    if PLAYED not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            try:
                environment = played_gpu.environment(played_gpu.build(Path(folder)), options.gpu, still=True)
            except played_gpu.NotHere as error:
                sys.exit(f"no GPU can be played here: {error}")
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    gpu_case.PLANNER.submit(os.getpid).result()  # a process begun later would have locks, and not the threads in them
    played_gpu.begin()
    # host memory that nobody writes takes no room, as large as it may be
    pinned._touch = lambda *arguments: None
    Store.fill = lambda *arguments: None  # type: ignore[method-assign]
    lines = rows(options.gpu, options.host_gib, tuple(options.models), options.plans)
    text = page(lines, options.gpu, f"python {' '.join(sys.argv)}")
    write_text(options.out / f"{options.gpu}.md", text)
    print(text, flush=True)


if __name__ == "__main__":
    main()

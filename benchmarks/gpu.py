"""Everything there is to measure on one GPU, in one command, part by part.

    python benchmarks/gpu.py --out results/gpu [--parts links gemm ...] [--models llama-3.2-1b ...] [--budget-s 500]
    python benchmarks/gpu.py --rehearse --out results/rehearsal

Each row is written to gpu.json in the folder as soon as it is there; a row that is there is not measured again, so
the same command goes on where it was stopped, here or in a later run. The rows that tell most come first; none is begun
that is expected to end after the budget. What did not fit or is not installed is a row too, and says why. The table is
printed, and written to gpu.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# before torch: segments that grow leave no holes between allocations of different sizes
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import gpu_machine
import gpu_rivals
import gpu_rows
import gpu_steps
import rehearsal
import torch
from gpu_steps import PLANNED, Case, Row

from megatrain.session import machine_name
from schedules.errors import Refused

ROOT = Path(__file__).parent.parent
PARTS = ("links", "gemm", "dram", "adam", "correctness", "ways", "steps", "rivals")
WAYS = ((False, False), (True, False), (False, True), (True, True))  # fused, graphs
WAYS_OF = Case(model="llama-3.2-1b", policy="streamed", seq_len=1024, micro_batch_size=2)
GRAPHS_UP_TO = 8192  # tokens of a micro-batch; above it launches hide behind the kernels
BACKEND = "cuda"  # of the smaller trainings
CHECK_TIMEOUT_S = 150
HOST_SHARE = 0.9  # of the host's memory, where nothing is said


def ways(options: tuple[bool, bool] | None, case: Case) -> Case:
    """The case, computed in the way (fused, graphs), or as it comes where none was measured."""
    fused, graphs = options or (False, False)
    return dataclasses.replace(
        case,
        fused=fused,
        graphs=graphs and case.micro_batch_size * case.seq_len <= GRAPHS_UP_TO and not case.device_gib,
    )


def fastest_way(results: Results) -> tuple[bool, bool] | None:
    """Of the measured ones."""
    rows = results.rows("ways")
    best = min(rows, key=lambda row: row["step_s"]["median"], default=None)
    return None if best is None else (best["fused"], best["graphs"])


def rival(case: Case, host_bytes: int) -> Row:
    gpu_steps.PooledBackend.trim([])
    if case.policy == gpu_rows.ZERO3:
        return gpu_rivals.zero3(case, host_bytes)
    gpu_rivals.Zero3.end()
    return gpu_rivals.plain(case)


def ours(case: Case, step: Callable[[Case], Row]) -> Row:
    gpu_rivals.Zero3.end()
    return step(case)


# ---- correctness


def correctness() -> list[Row]:
    """The tests on this GPU, and a small training under CUDA's stream sanitizer."""
    sanitized = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    smoke = [sys.executable, "-m", "megatrain.cli", "run", "demo", "--backend", BACKEND, "--precision", "bf16"]
    return [
        _checked(
            "tests", [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_megatrain_cuda.py"], None
        ),
        *(
            _checked(f"stream sanitizer, {policy}", [*smoke, "--policy", policy, "--steps", "3", *more], sanitized)
            for policy, more in (("streamed", []), ("streamed", ["-k", "offload=2", "-k", "keep=1"]), ("megatrain", []))
        ),
        _checked("poisoned and delayed", [*smoke, "--policy", "streamed", "--steps", "5", "--debug"], None),
    ]


def _checked(case: str, command: list[str], environment: dict[str, str] | None) -> Row:
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"case": case, "passed": False, "said": [f"stopped after {CHECK_TIMEOUT_S} s"]}
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {
        "case": f"{case}: {' '.join(command[1:])}",
        "passed": done.returncode == 0,
        "check_s": time.monotonic() - begun,
        "said": lines[-15:],
    }


# ---- results


class Results:
    """The rows so far, in a file."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self.folder, self._end = folder, time.monotonic() + budget_s
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "gpu.json"
        empty: dict[str, Any] = {"runs": [], "rows": {}, "op_times_ns": {}}
        self.body = json.loads(self._file.read_text()) if self._file.exists() else empty
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
                },
            }
        )

    def rows(self, part: str) -> list[Row]:
        """The rows of a part that hold figures."""
        return [row for row in self.body["rows"].get(part, {}).values() if "error" not in row]

    def measure(self, part: str, key: str, work: Callable[[], Row | list[Row]], *, takes_s: float = 0.0) -> None:
        """Add the rows of `work` unless they are there, or too little time is left. Its error becomes the row."""
        known = self.body["rows"].setdefault(part, {})
        if any(name == key or name.startswith(f"{key}: ") for name in known):
            return
        if time.monotonic() + takes_s > self._end:
            return
        print(f"{part}: {key} ...", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            found = work()
        except (Refused, gpu_rivals.LeftOut) as error:
            found = {"case": key, "error": str(error)}
        except Exception as error:  # out of memory, or a fault of ours: the other rows are still wanted
            traceback.print_exc()
            found = {"case": key, "error": f"{type(error).__name__}: {error}"[:2000]}
        took = {"took_s": round(time.monotonic() - begun, 1)}
        if isinstance(found, list):
            known.update({f"{key}: {row['case']}": {**row, **took} for row in found})
        else:
            known[key] = {**found, **took}
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.body, indent=1, default=str))
        partial.replace(self._file)


def table(results: Results) -> str:
    """What a reader wants to see, as Markdown."""
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
    others = [
        f"{part}: {json.dumps({k: v for k, v in row.items() if k not in ('said', 'settings')}, default=_short)}"
        for part in ("links", "gemm", "dram", "adam", "correctness")
        for row in results.body["rows"].get(part, {}).values()
    ]
    note = f"MFU and HFU are of {peak:,.0f} TFLOP/s, the fastest product measured here." if peak else ""
    return "\n".join([*lines, "", note, "", *others, ""])


def _short(value: object) -> str:
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="the folder of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--models", nargs="+", default=list(gpu_rows.MODELS), help="for steps and rivals")
    parser.add_argument("--policies", nargs="+", default=[*gpu_rows.POLICIES, PLANNED], help="for steps")
    parser.add_argument("--traces", action="store_true", help="write a trace of each step row, too")
    parser.add_argument("--budget-s", type=float, default=520.0, help="seconds in which to end")
    parser.add_argument("--host-gib", type=float, default=None, help="host memory to plan with; most of it if left out")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="go through it all on the CPU with small sizes; the figures mean nothing",
    )
    options = parser.parse_args()
    gpu_steps.PLANNER.submit(os.getpid).result()
    if options.rehearse:
        rehearsal.install(sys.modules[__name__])
        options.models = list(gpu_rows.MODELS)
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here: nothing was measured")
    results = Results(options.out, options.budget_s)
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, max(1, cores // 4), max(1, cores // 2), max(1, cores - 2), cores})
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host_bytes = int(options.host_gib * 2**30 if options.host_gib else memory * HOST_SHARE)
    models = tuple(options.models)
    traces = results.folder / "traces" if options.traces else None
    if traces is not None:
        traces.mkdir(exist_ok=True)

    whole = {
        "links": gpu_machine.links,
        "gemm": gpu_machine.gemm,
        "dram": lambda: gpu_machine.dram(threads),
        "adam": lambda: gpu_machine.optimizer(threads),
        "correctness": correctness,
    }
    for part in options.parts:
        if part in whole:
            results.measure(part, part, whole[part])
    machine = {part: results.rows(part) for part in ("links", "gemm", "dram")}

    def step(case: Case) -> Row:
        known = results.body["op_times_ns"].setdefault(f"fused={case.fused}, graphs={case.graphs}", {})
        return gpu_steps.measure(case, host_bytes, machine, known, traces, gpu_rows.spun(case))

    if "ways" in options.parts:
        for fused, graphs in WAYS:
            way = dataclasses.replace(WAYS_OF, fused=fused, graphs=graphs)
            results.measure("ways", way.key, lambda way=way: {**step(way), "fused": way.fused, "graphs": way.graphs})
    fastest = fastest_way(results)
    for case in gpu_rows.cases(models):
        if gpu_rows.is_rival(case) and "rivals" in options.parts:
            takes_s = gpu_rows.seconds(case)
            results.measure("rivals", case.key, lambda case=case: rival(case, host_bytes), takes_s=takes_s)
        elif not gpu_rows.is_rival(case) and "steps" in options.parts and case.policy in options.policies:
            case, takes_s = ways(fastest, case), gpu_rows.seconds(case)
            results.measure("steps", case.key, lambda case=case: ours(case, step), takes_s=takes_s)
    gpu_rivals.Zero3.end()
    text = table(results)
    (results.folder / "gpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

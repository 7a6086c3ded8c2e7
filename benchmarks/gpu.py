"""Everything there is to measure on one GPU, in one command, part by part.

    python benchmarks/gpu.py --out results/gpu [--parts links gemm ...] [--models llama-3.2-1b ...] [--budget-s 480]
    python benchmarks/gpu.py --rehearse --out results/rehearsal

Each row is written to gpu.json in the folder as soon as it is there; a row that is there is not measured again, so
the same command goes on where it was stopped, here or in a later run (`--again` takes those up that ended in an error).
The rows that tell most come first; none is begun that is expected to end after the budget. What did not fit or is not
installed is a row too, and says why. All is measured in a process of its own, and in a new one after an error that may
have left the GPU unusable, a row that hangs, or one for which the system ended the process. The table is printed, and
written to gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # on a machine where nothing of ours is installed

# before torch: segments that grow leave no holes between allocations of different sizes
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import gpu_checks
import gpu_machine
import gpu_rivals
import gpu_rows
import gpu_steps
import rehearsal
import torch
from gpu_results import Results, Row, table
from gpu_steps import PLANNED, ArenaBackend, Case

MACHINE = ("smoke", "links", "gemm", "dram", "adam", "attention", "checks")
PARTS = (*MACHINE, "ways", "steps", "rivals")
WAYS = ((False, False), (True, False), (False, True), (True, True))  # fused, graphs
WAYS_OF = Case(model="llama-3.2-1b", policy="streamed", seq_len=1024, micro_batch_size=2)
GRAPHS_UP_TO = 8192  # tokens of a micro-batch; above it launches hide behind the kernels
HOST_SHARE = 0.9  # of the host's memory, where nothing is said


# ---- one process after another


def supervise(arguments: list[str], results: Path, budget_s: float) -> int:
    """Run this file as `--once` until it has measured all that fits into the budget; its last exit status."""
    end, status = time.monotonic() + budget_s, 0
    while (left := end - time.monotonic()) > 0:
        known = _content(results)
        command = [sys.executable, __file__, *arguments, "--once", "--budget-s", f"{left:.0f}"]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # and whatever it has left behind, planners for one
                os.killpg(process.pid, signal.SIGKILL)
        if status in (0, 2) or _content(results) == known:  # nothing was begun: it would be so again
            break
        print(f"the process ended with status {status}: another goes on", file=sys.stderr, flush=True)
        arguments = [argument for argument in arguments if argument != "--again"]
    return status


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


# ---- what is measured


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
    if case.policy != gpu_rows.ZERO3:
        gpu_rivals.Zero3.end()
        return gpu_rivals.plain(case)
    ArenaBackend.release()
    return gpu_rivals.zero3(case, host_bytes)


def ours(case: Case, step: Callable[[Case], Row]) -> Row:
    gpu_rivals.Zero3.end()
    return step(case)


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows to measure: part, name, what measures them, about how long it takes in seconds."""

    part: str
    name: str
    work: Callable[[], Row | list[Row]]
    takes_s: float


def parts(options: argparse.Namespace, results: Results) -> Iterator[Part]:
    """All there is, what tells most first; what comes later depends on what was measured before."""
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, max(1, cores // 4), max(1, cores // 2), max(1, cores - 2), cores})
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host_bytes = int(options.host_gib * 2**30 if options.host_gib else memory * HOST_SHARE)
    traces = results.folder / "traces" if options.traces else None
    if traces is not None:
        traces.mkdir(exist_ok=True)

    yield Part("smoke", "smoke", lambda: gpu_checks.checked(gpu_checks.smoke()), 30.0)
    yield Part("links", "links", gpu_machine.links, 25.0)
    yield Part("gemm", "gemm", gpu_machine.gemm, 40.0)
    yield Part("dram", "dram", lambda: gpu_machine.dram(threads), 15.0)
    machine = {part: results.rows(part) for part in ("links", "gemm", "dram")}

    def step(case: Case) -> Row:
        known = results.body["op_times_ns"].setdefault(f"fused={case.fused}, graphs={case.graphs}", {})
        return gpu_steps.measure(case, host_bytes, machine, known, traces, gpu_rows.spun(case))

    def in_way(case: Case) -> Row:
        return {**step(case), "fused": case.fused, "graphs": case.graphs}

    for fused, graphs in WAYS:
        way = dataclasses.replace(WAYS_OF, fused=fused, graphs=graphs)
        yield Part("ways", way.key, functools.partial(in_way, way), 30.0)
    fastest, gpu = fastest_way(results), gpu_machine.datasheet()

    def measured(case: Case) -> Part:
        takes_s = gpu_rows.seconds(case, gpu)
        if gpu_rows.is_rival(case):
            return Part("rivals", case.key, lambda: rival(case, host_bytes), takes_s)
        case = ways(fastest, case)
        return Part("steps", case.key, lambda: ours(case, step), takes_s)

    cases = [
        case
        for case in gpu_rows.cases(tuple(options.models))
        if gpu_rows.is_rival(case) or case.policy in options.policies
    ]
    first = [case for case in cases if case.key in gpu_rows.FIRST]
    yield from (measured(case) for case in first)
    yield Part("attention", "attention", gpu_machine.attention, 25.0)
    yield Part("adam", "adam", lambda: gpu_machine.optimizer(threads), 60.0)
    for check in gpu_checks.checks():
        yield Part("checks", check.name, functools.partial(gpu_checks.checked, check), check.takes_s)
    yield from (measured(case) for case in cases if case not in first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="the folder of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--models", nargs="+", default=list(gpu_rows.MODELS), help="for steps and rivals")
    parser.add_argument("--policies", nargs="+", default=[*gpu_rows.POLICIES, PLANNED], help="for steps")
    parser.add_argument("--traces", action="store_true", help="write a trace of each step row, too")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds in which to end")
    parser.add_argument("--host-gib", type=float, default=None, help="host memory to plan with; most of it if left out")
    parser.add_argument("--again", action="store_true", help="measure again what ended in an error")
    parser.add_argument("--once", action="store_true", help="in this process, and in no other after it")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="go through it all on the CPU with small sizes; the figures mean nothing",
    )
    options = parser.parse_args()
    if not options.once:
        sys.exit(supervise(sys.argv[1:], options.out / "gpu.json", options.budget_s))
    gpu_steps.PLANNER.submit(os.getpid).result()
    if options.rehearse:
        rehearsal.install(sys.modules[__name__])
        options.models = list(gpu_rows.MODELS)
    if not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was measured", file=sys.stderr)
        sys.exit(2)
    results = Results(options.out, options.budget_s, again=options.again)
    for part in parts(options, results):
        if part.part in options.parts:
            results.measure(part.part, part.name, part.work, takes_s=part.takes_s)
    gpu_rivals.Zero3.end()
    text = table(results, MACHINE)
    (results.folder / "gpu.md").write_text(text)
    print(text, flush=True)
    os._exit(0)  # a planner at work, or a library's thread, would hold the end


if __name__ == "__main__":
    main()

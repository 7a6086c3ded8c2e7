"""Everything there is to measure on one GPU, in one command, part by part.

    python benchmarks/gpu.py --out results/gpu [--parts links gemm ...] [--models llama-3.2-1b ...] [--budget-s 480]
    python benchmarks/gpu.py --rehearse --out results/rehearsal

Each row is written to gpu.json in the folder as soon as it is there, and a table of all to gpu.md; a row that is there
is not measured again, so the same command goes on where it was stopped, with the row that was cut off, here or in a
later run on a GPU of that name (`--again` takes those up that ended in an error, and checks that failed, `--anew TEXT`
those that contain a text, of runs more than an hour ago). The rows that tell most come first; none is begun that is
expected to end after the budget. What did not fit or is not installed is a row too, and says why. All is measured in a
process of its own, and in a new one after an error that may have left the GPU unusable, a row that hangs, or one for
which the system ended the process. Nothing more is measured where the smoke test fails, nor, with `--careful`, once a
check has failed or a row has ended in an error that nobody expected.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__begun__ = time.monotonic()  # importing torch takes a while, and counts
sys.path.insert(0, str(Path(__file__).parent.parent))  # on a machine where nothing of ours is installed

import gpu_block
import gpu_case
import gpu_checks
import gpu_machine
import gpu_optimizer
import gpu_rivals
import gpu_rows
import gpu_steps
import rehearsal
import torch
from gpu_arena import ArenaBackend
from gpu_case import PLANNED, Case
from gpu_profile import of_run
from gpu_results import AGAIN, DID_NOT_END, SMOKE, STOP, Results, Row, out_of_memory
from gpu_table import table
from torch.utils import cpp_extension

from megatrain.cores import usable_cores
from megatrain.cuda import prepare_process
from megatrain.ram import total_memory
from megatrain.way import PLAINLY, Way
from schedules.errors import Refused

PARTS = (SMOKE, "block", "links", "gemm", "dram", "ways", "steps", "rivals", "attention", "adam", "checks", "kernels")
# Each way is judged where the GPU waits for nothing else: kernels where a step is long, launches where it is short.
WAYS_OF = {
    "fused": Case(model="llama-3.2-1b", policy="resident", seq_len=1024, micro_batch_size=8, precision="bf16_16bit"),
    "graphs": Case(model="llama-3.2-1b", policy="resident", seq_len=1024, micro_batch_size=2, precision="bf16_16bit"),
}
KERNELS_OF = Case(
    model="llama-3.1-8b", policy=PLANNED, seq_len=4096, micro_batch_size=4, accumulation=4, precision="bf16_16bit"
)
GRAPHS_UP_TO = 8192  # tokens of a micro-batch, or of a step within a limit; above it launches hide behind the kernels
WENT_ON = "--went-on"
HOST_SHARE = 0.92  # of the host's memory, where nothing is said
SPARE = 2 << 30  # bytes of the GPU's memory that a step is planned without once it had none left


# ---- one process after another


def supervise(arguments: list[str], results: Path, budget_s: float) -> int:
    """Run this file as `--once` until it has measured all that fits into the budget; its last exit status, 0 for AGAIN.

    Whoever ends this process ends that one with it (`gpu_case.end_with_parent`), and what that has begun.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    end, status = __begun__ + budget_s, 0
    while (left := end - time.monotonic()) > 0:
        known, begun = _content(results), time.time()
        command = [sys.executable, __file__, *arguments, "--once", "--budget-s", f"{left:.0f}"]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # and whatever it has left behind, planners for one
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _unlock(begun)
        if status in (0, STOP) or _content(results) == known:  # nothing was begun: it would be so again
            break
        print(f"the process ended with status {status}: another goes on", file=sys.stderr, flush=True)
        arguments = [*(argument for argument in arguments if argument not in ("--again", WENT_ON)), WENT_ON]
    else:
        print("the time is over: the same command goes on", file=sys.stderr, flush=True)
    return 0 if status == AGAIN else status


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _unlock(since: float) -> None:
    """Remove what a process leaves that is ended while torch compiles a kernel of DeepSpeed's: the next would wait."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    for lock in Path(root).glob("**/lock"):
        if lock.stat().st_mtime >= since:
            lock.unlink()


# ---- what is measured


def in_way(case: Case, way: dict[str, bool]) -> Case:
    """The case, computed in the way that was chosen; graphs only where launches may be what the GPU waits for.

    Within a limit, that is in a short step, where the host's optimizer has its cores all the while.
    """
    workload = case.workload
    tokens = workload.tokens_per_step if case.device_gib else workload.tokens_per_microbatch
    launches = tokens <= GRAPHS_UP_TO
    return dataclasses.replace(case, fused=way.get("fused", False), graphs=way.get("graphs", False) and launches)


def chosen(results: Results, case: Case, name: str) -> bool:
    """Whether to compute in the way `name`: unless it failed, or all steps without it were shorter than any with it."""
    known = results.body["rows"].get("ways", {})
    plain, other = (known.get(dataclasses.replace(case, **{name: on}).key_in_way, {}) for on in (False, True))
    if "step_s" not in other:
        return False
    return "step_s" not in plain or bool(plain["step_s"]["most"] >= other["step_s"]["least"])


def alone(work: Callable[[], Row | list[Row]]) -> Row | list[Row]:
    """What it finds on a machine where nothing of the rows before is left."""
    ArenaBackend.release()
    gpu_machine.clear()
    return work()


def device_bytes(results: Results) -> int:
    """Of the GPU's memory, what steps are planned for: read once, so that each process plans the same."""
    if "device_bytes" not in results.body:
        results.body["device_bytes"] = gpu_machine.free_bytes()
    return int(results.body["device_bytes"])


def host_bytes_of(options: argparse.Namespace, results: Results) -> int:
    """Of the host's memory, what steps are planned for: asked for, else as before, else most of it.

    Where that has changed, what had no room is tried again.
    """
    known = results.body.get("host_bytes")
    found = int(options.host_gib * 2**30) if options.host_gib else known or int(total_memory() * HOST_SHARE)
    if known not in (None, found):
        results.forget_refused()
    results.body["host_bytes"] = found
    return found


def rival(case: Case, host_bytes: int, known: Mapping[str, Row]) -> Row:
    """`known` are the rivals' rows by key: an engine that did not begin, or ended its process, would do so again."""
    if case.policy != gpu_rows.ZERO3:
        return gpu_rivals.plain(case)
    for batch in gpu_rows.BATCHES:
        error = known.get(gpu_rows.of_batch(case, batch).key, {}).get("error", "")
        if error == DID_NOT_END or error.startswith(gpu_rivals.NotBegun.__name__):
            raise gpu_rivals.LeftOut(f"left out: with another batch, {error}")
    ArenaBackend.release()
    return gpu_rivals.zero3(case, host_bytes)


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows to measure: part, name, what measures them, about how long it takes in seconds, of which engine, if any."""

    part: str
    name: str
    work: Callable[[], Row | list[Row]]
    takes_s: float
    engine: tuple[str, str] | None = None


def parts(options: argparse.Namespace, results: Results) -> Iterator[Part]:
    """All there is, what tells most first; what comes later depends on what was measured before.

    Each is told when the one before has ended: how long it takes depends on what that has left.
    """
    cores = usable_cores()
    threads = sorted({1, max(1, cores // 4), max(1, cores // 2), max(1, cores - 2), cores})
    host_bytes = host_bytes_of(options, results)
    plans, traces = results.folder / "plans", results.folder / "traces" if options.traces else None

    def by_itself(part: str, name: str, work: Callable[[], Row | list[Row]], takes_s: float) -> Part:
        return Part(part, name, functools.partial(alone, work), takes_s)

    smoke = gpu_checks.smoke()
    yield by_itself(SMOKE, SMOKE, lambda: gpu_checks.checked(smoke), smoke.takes_s)
    beside = gpu_checks.Beside(one for one in gpu_checks.checks() if not results.there("checks", one.name))

    def right(check: gpu_checks.Check) -> Part:
        return Part("checks", check.name, lambda: beside.row(check), beside.takes_s)

    yield from map(right, beside.checks[:1])  # begins them all, and blocks are computed beside the others
    block = functools.partial(gpu_block.checks, gpu_block.DENSE, [PLAINLY])
    yield by_itself("block", gpu_block.AS_TORCH_CHOOSES, block, 25.0)
    if results.wrong("block", gpu_block.AS_TORCH_CHOOSES):
        torch.backends.cuda.enable_cudnn_sdp(False)  # of this process: in each row that follows
        yield by_itself("block", gpu_block.WITHOUT_CUDNN, block, 25.0)
        # what is wrong without it, too, is not its fault
        torch.backends.cuda.enable_cudnn_sdp(results.wrong("block", gpu_block.WITHOUT_CUDNN))
    for name in WAYS_OF:
        block = functools.partial(gpu_block.checks, gpu_block.DENSE, [Way(**{name: True})])
        yield by_itself("block", name, block, 35.0)
    yield by_itself("block", "fp8", lambda: gpu_block.fp8_checks(gpu_block.DENSE, gpu_block.WAYS), 60.0)
    for model in gpu_block.UNTIMED:  # of which no row is timed: what is wrong with them chooses no way
        block = functools.partial(gpu_block.checks, [model], gpu_block.ways_of(model))
        yield by_itself("block", model.name, block, 25.0)
    yield from map(right, beside.checks[1:])
    clocks = gpu_checks.clocks()
    yield by_itself("checks", clocks.name, lambda: gpu_checks.checked(clocks), clocks.takes_s)
    yield by_itself("links", "links", gpu_machine.links, 20.0)
    yield by_itself("gemm", "gemm", gpu_machine.gemm, 35.0)
    yield by_itself("dram", "dram", lambda: [*gpu_machine.dram(threads), *gpu_optimizer.beside_copies()], 25.0)
    machine = of_run(results.body, len(results.body["runs"]))

    def step(case: Case) -> Row:
        whole = case.device_bytes(device_bytes(results))

        def planned_for(device: int) -> Row:
            row = gpu_steps.measure(case, device, host_bytes, machine, plans, traces, gpu_rows.spun(case))
            return {**row, "planned_for_GB": device / 1e9}

        try:
            return planned_for(whole)
        except Exception as error:
            if not out_of_memory(error):
                raise
        print(f"{case.key}: no memory left on the GPU; once more with less", file=sys.stderr, flush=True)
        gpu_machine.clear()  # the error is gone by now, and what its frames held
        return planned_for(whole - SPARE)

    def kernels() -> Row:
        return gpu_steps.kernels(in_way(KERNELS_OF, way), device_bytes(results), host_bytes, machine, plans)

    way: dict[str, bool] = {}
    for name, of in WAYS_OF.items():
        if results.wrong("block", name):
            way[name] = False
            continue
        both = [dataclasses.replace(of, **way, **{name: on}) for on in (False, True)]
        for case in both:
            yield Part("ways", case.key_in_way, functools.partial(step, case), 30.0)
        known = results.body["rows"].get("ways", {})
        if "ways" in options.parts and any(case.key_in_way not in known for case in both):
            return  # there was no time: what came now would stay in a way that nobody chose
        way[name] = chosen(results, dataclasses.replace(of, **way), name)
    gpu = gpu_machine.datasheet()

    def measured(case: Case) -> Part:
        takes_s = gpu_rows.seconds(case, gpu, pinned_GB=ArenaBackend.pinned() / 1e9, engine=gpu_rivals.Zero3.kept())
        if gpu_rows.is_rival(case):
            known = results.body["rows"].get("rivals", {})
            engine = gpu_rows.engine(case)
            return Part("rivals", case.key, lambda: rival(case, host_bytes, known), takes_s, engine)
        case = in_way(case, way)
        known = results.body["rows"].get("ways", {}).get(case.key_in_way, {})
        if "step_s" in known:
            return Part("steps", case.key, lambda: known, 0.0)
        return Part("steps", case.key, lambda: step(case), takes_s)

    cases = [
        case
        for case in gpu_rows.cases(tuple(options.models))
        if gpu_rows.is_rival(case) or case.policy in options.policies
    ]

    yield from (measured(case) for case in cases if case.key in gpu_rows.FIRST)
    yield by_itself("adam", "adam", lambda: gpu_optimizer.updates(threads), 85.0)
    yield from (measured(case) for case in cases if case.key in gpu_rows.NEXT)
    yield by_itself("attention", "attention", gpu_machine.attention, 25.0)
    if KERNELS_OF.model in options.models:
        yield by_itself("kernels", KERNELS_OF.key, kernels, gpu_rows.seconds(KERNELS_OF, gpu))
    yield from (measured(case) for case in cases if case.key not in gpu_rows.AIMS)


def main() -> None:
    prepare_process()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="the folder of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument(
        "--models", nargs="+", choices=gpu_rows.MODELS, default=list(gpu_rows.MODELS), help="for steps and rivals"
    )
    names = [*gpu_rows.POLICIES, PLANNED]
    parser.add_argument("--policies", nargs="+", choices=names, default=names, help="for steps")
    parser.add_argument("--traces", action="store_true", help="write each step row's trace and schedule, too")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds in which to end")
    parser.add_argument("--host-gib", type=float, default=None, help="host memory to plan with; most of it if left out")
    parser.add_argument("--again", action="store_true", help="measure again what ended in an error or failed")
    parser.add_argument(
        "--anew", nargs="+", metavar="TEXT", default=[], help="measure again rows of earlier leases that contain it"
    )
    parser.add_argument("--careful", action="store_true", help="time nothing once anything was wrong")
    parser.add_argument("--once", action="store_true", help="in this process, and in no other after it")
    parser.add_argument(WENT_ON, action="store_true", help="the process before was ended by the row that was cut off")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="go through it all on the CPU with small sizes; the figures mean nothing",
    )
    options = parser.parse_args()
    if not options.once:
        sys.exit(supervise(sys.argv[1:], options.out / "gpu.json", options.budget_s))
    gpu_case.end_with_parent()
    gpu_case.PLANNER.submit(os.getpid).result()
    if options.rehearse:
        rehearsal.install(sys.modules[__name__])
        options.models = list(gpu_rows.MODELS)
    if not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was measured", file=sys.stderr)
        sys.exit(STOP)
    try:
        left_s = options.budget_s - (time.monotonic() - __begun__)
        results = Results(options.out, left_s, again=options.again, went_on=options.went_on, anew=options.anew)
        gpu_machine.datasheet()  # of a GPU that nobody knows nothing is expected
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(STOP)
    left, used = 0, False
    for part in parts(options, results):
        if part.part not in options.parts or results.there(part.part, part.name):
            continue
        if not results.begins(part.part, part.name, takes_s=part.takes_s):
            left += 1
            continue
        if options.careful and part.part not in (SMOKE, "block", "checks") and (wrong := results.unexpected()):
            print(f"nothing more is measured, since something went wrong: {', '.join(wrong)}", file=sys.stderr)
            sys.exit(STOP)
        # what DeepSpeed leaves goes with the process, and so does what others have left, which takes its room
        if not gpu_rivals.Zero3.leaves_alone(part.engine) or (used and part.engine is not None):
            leave(AGAIN)
        used = used or part.engine is None
        results.measure(part.part, part.name, part.work, takes_s=part.takes_s)
        if results.failed(SMOKE):
            print("the smoke test failed: nothing else is measured, its row says why", file=sys.stderr)
            sys.exit(STOP)
        if part.part == "kernels":  # a profiler stays in the way of what is launched after it
            leave(AGAIN)
    print(table(results.body), flush=True)
    if left:
        print(f"no time for {left} rows or more: the same command goes on", file=sys.stderr, flush=True)
    leave(0)


def leave(status: int) -> None:
    """End this process and the planner's, at work or not; a library's thread may not hold the end."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


if __name__ == "__main__":
    main()

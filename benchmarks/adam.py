"""The optimizer on the CPU: our kernel, torch in several passes, and DeepSpeed's where it is installed.

    python benchmarks/adam.py [--params 50e6] [--threads 1 2 ...] [--out FILE.md]

Tells parameters and bytes per second beside the bandwidth of plain copies with as many threads, all out of
cache and on random numbers. A copy counts what it reads and what it writes; the update counts every byte that it
must read or write once, whatever passes it makes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatrain import adam, adam_state
from megatrain.cores import usable_cores
from megatrain.native import adam as native
from megatrain.this_machine import machine_name, today
from schedules.files import write_text
from schedules.workload import PRECISIONS

REPEATS = 7  # the median is told, with the fastest and the slowest; one more comes first and is not counted
DEEPSPEED = ("bf16", "bf16_16bit", "fp32")  # precisions that DeepSpeedCPUAdam can do too
RANDOM = 1 << 20  # numbers that are drawn; more of them are these again: one thread draws 0.2 billion a second
Place = Callable[[torch.Tensor], torch.Tensor]  # a copy of a tensor in other memory, or itself
HYPER = adam.Adam(lr=1e-4, weight_decay=0.1)


def by_turns(works: Mapping[str, Callable[[], object]]) -> dict[str, tuple[float, float, float]]:
    """Median, least and most seconds of a call of each, by turns: the machine's pace may change."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(REPEATS + 1):
        for name, work in works.items():
            work()  # by when its threads are awake, and those of the one before look no longer for more work
            begun = time.perf_counter()
            work()
            if turn:
                found[name].append(time.perf_counter() - begun)
    return {name: (statistics.median(times), min(times), max(times)) for name, times in found.items()}


def seconds(work: Callable[[], object]) -> tuple[float, float, float]:
    """Median, least and most seconds of a call."""
    return by_turns({"": work})[""]


def bytes_per_param(precision: str) -> int:
    """What an update must read and write of each parameter: gradient in, weight and state in and out."""
    p = PRECISIONS[precision]
    weights_read = 0 if precision == "bf16_fp32" else p.weight  # there the master is read in their place
    return p.grad + 2 * p.state + p.weight + weights_read


def anywhere(tensor: torch.Tensor) -> torch.Tensor:
    """Where torch's allocator has put it."""
    return tensor


def copy_rate(nbytes: int, place: Place = anywhere) -> float:
    """Bytes per second, read and written, of the faster of two copies on torch's number of threads.

    Torch's own, and the C library's: for large blocks it writes past the caches, where torch's first reads the
    target too, half as much again.
    """
    source, target = (place(torch.randn(RANDOM).repeat(-(-nbytes // 4 // RANDOM))[: nbytes // 4]) for _ in range(2))
    threads = torch.get_num_threads()
    part = -(-nbytes // threads)

    def move(start: int) -> None:
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, min(part, nbytes - start))

    with ThreadPoolExecutor(threads) as pool:
        moved = seconds(lambda: list(pool.map(move, range(0, nbytes, part))))
    return 2 * nbytes / min(moved[0], seconds(lambda: target.copy_(source))[0])


def slabs(n: int, precision: str, place: Place = anywhere) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = torch.empty(n, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    state = torch.empty(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
    adam_state.initialise(weights, state, precision, torch.randn(n) * 0.02)
    return place(weights), place(torch.randn(n).to(weights.dtype)), place(state)


def ours(n: int, precision: str, place: Place = anywhere) -> Callable[[], object]:
    weights, grad, state = slabs(n, precision, place)
    return lambda: adam.step(weights, grad, state, HYPER, 10, precision=precision)


def in_torch(n: int, precision: str) -> Callable[[], object]:
    step, compiled = ours(n, precision), native.kernel

    def without_kernel() -> None:
        native.kernel = lambda: None
        try:
            step()
        finally:
            native.kernel = compiled

    return without_kernel


def load_deepspeed_kernel() -> None:
    """Make DeepSpeed's CPU optimizer ready where there is a GPU but no CUDA toolkit.

    It wants the toolkit's compiler there, though it compiles nothing with it; a process that sees no GPU does without.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if shutil.which("nvcc") or "CUDA_HOME" in os.environ or "cpu_adam" in CPUAdamBuilder._loaded_ops:
        return
    script = "from deepspeed.ops.op_builder import CPUAdamBuilder; print(CPUAdamBuilder().load().__file__)"
    blind = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=blind, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    spec = importlib.util.spec_from_file_location("cpu_adam", done.stdout.strip().splitlines()[-1])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    CPUAdamBuilder._loaded_ops["cpu_adam"] = module


def deepspeed(n: int, precision: str, place: Place = anywhere) -> Callable[[], object] | str:
    """DeepSpeedCPUAdam on gradients and weights of one type, as ZeRO-3 calls it. Or why not.

    Its weights in bf16 are as the precision "bf16": their own master, with fp32 moments.
    """
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        load_deepspeed_kernel()
        weights, grad, _ = slabs(n, precision, place)
        parameter = torch.nn.Parameter(weights)
        parameter.grad = grad
        optimizer = DeepSpeedCPUAdam(
            [parameter], lr=HYPER.lr, weight_decay=HYPER.weight_decay, betas=HYPER.betas,
            fp32_optimizer_states=precision != "bf16_16bit",
        )  # fmt: skip
    except Exception as error:  # a missing package, or a build that failed: both are told
        return f"DeepSpeedCPUAdam left out: {str(error).splitlines()[0] if str(error) else repr(error)}"
    step: Callable[[], object] = optimizer.step
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=50e6, help="parameters of the slab")
    parser.add_argument("--threads", type=int, nargs="+", default=None, help="numbers of threads to try")
    parser.add_argument("--out", type=Path, default=None, help="a Markdown file to write as well")
    options = parser.parse_args()
    n, cores = int(options.params), usable_cores()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say("# AdamW on the host\n")
    say(
        f"`python {' '.join(sys.argv)}`, {today()}, measured: {machine_name()}, {cores} cores, "
        f"torch {torch.__version__}; {n:,} parameters out of cache. Our kernel: {native.why_not() or 'compiled'}.\n"
    )
    say("| threads | precision | by | Gparam/s | slowest-fastest | GB/s | of a copy |")
    say("|---:|---|---|---:|---:|---:|---:|")
    left_out: list[str] = []
    for threads in options.threads or sorted({1, max(1, cores // 2), cores}):
        torch.set_num_threads(threads)
        rate = copy_rate(4 * n)
        say(f"| {threads} | | copy | | | {rate / 1e9:.1f} | 100 % |")
        for precision in PRECISIONS:
            works = {"ours": ours(n, precision), "torch": in_torch(n, precision)}
            if precision in DEEPSPEED:
                rival = deepspeed(n, precision)
                if isinstance(rival, str):
                    left_out = [rival]
                else:
                    works["DeepSpeed"] = rival
            for by, found in by_turns(works).items():
                say(row(threads, precision, by, n, found, rate))
    for line in ("", *left_out):
        say(line)
    if options.out is not None:
        write_text(options.out, "\n".join(lines).rstrip() + "\n")


def row(threads: int, precision: str, by: str, n: int, found: tuple[float, float, float], copy: float) -> str:
    median, least, most = found
    rate, spread = n / median / 1e9, f"{n / most / 1e9:.2f}-{n / least / 1e9:.2f}"
    moved = rate * 1e9 * bytes_per_param(precision)
    return f"| {threads} | {precision} | {by} | {rate:.2f} | {spread} | {moved / 1e9:.1f} | {moved / copy:.0%} |"


if __name__ == "__main__":
    main()

"""The optimizer on the CPU: our kernel, torch in several passes, and DeepSpeed's where it is installed.

    python benchmarks/adam.py [--params 50e6] [--threads 1 2 ...]

Prints parameters and bytes per second beside the bandwidth of plain copies with as many threads, all out of
cache and on random numbers. A copy counts what it reads and what it writes; the update counts every byte that it
must read or write once, whatever passes it makes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from megatrain import adam
from megatrain.native import adam as native
from schedules.workload import PRECISIONS

REPEATS = 7  # the median is told, with the fastest and the slowest; one more comes first and is not counted
HYPER = adam.Adam(lr=1e-4, weight_decay=0.1)


def seconds(work: Callable[[], object]) -> tuple[float, float, float]:
    """Median, least and most seconds of a call."""
    work()
    found = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return statistics.median(found), min(found), max(found)


def bytes_per_param(precision: str) -> int:
    """What an update must read and write of each parameter: gradient in, weight and state in and out."""
    p = PRECISIONS[precision]
    weights_read = 0 if precision == "bf16_fp32" else p.weight  # there the master is read in their place
    return p.grad + 2 * p.state + p.weight + weights_read


def copy_rate(nbytes: int) -> float:
    """Bytes per second, read and written, of the faster of two copies on torch's number of threads.

    Torch's own, and the C library's: for large blocks it writes past the caches, where torch's first reads the
    target too, half as much again.
    """
    source, target = torch.randn(nbytes // 4), torch.randn(nbytes // 4)
    threads = torch.get_num_threads()
    part = -(-nbytes // threads)

    def move(start: int) -> None:
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, min(part, nbytes - start))

    with ThreadPoolExecutor(threads) as pool:
        moved = seconds(lambda: list(pool.map(move, range(0, nbytes, part))))
    return 2 * nbytes / min(moved[0], seconds(lambda: target.copy_(source))[0])


def slabs(n: int, precision: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = torch.empty(n, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    state = torch.empty(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
    adam.initialise(weights, state, precision, torch.randn(n) * 0.02)
    return weights, torch.randn(n).to(weights.dtype), state


def ours(n: int, precision: str) -> tuple[float, float, float]:
    weights, grad, state = slabs(n, precision)
    return seconds(lambda: adam.step(weights, grad, state, HYPER, 10, precision=precision))


def in_torch(n: int, precision: str) -> tuple[float, float, float]:
    kernel, native.kernel = native.kernel, lambda: None
    try:
        return ours(n, precision)
    finally:
        native.kernel = kernel


def deepspeed(n: int) -> tuple[float, float, float] | str:
    """DeepSpeedCPUAdam with an fp32 master: gradient and weight in fp32, as ZeRO-3 calls it. Or why not."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(torch.randn(n) * 0.02)
        parameter.grad = torch.randn(n)
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.1, betas=HYPER.betas)
    except Exception as error:  # a missing package, or a build that failed: both are told
        return f"DeepSpeedCPUAdam left out: {str(error).splitlines()[0] if str(error) else repr(error)}"
    return seconds(optimizer.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=50e6, help="parameters of the slab")
    parser.add_argument("--threads", type=int, nargs="+", default=None, help="numbers of threads to try")
    options = parser.parse_args()
    n, cores = int(options.params), len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, torch {torch.__version__}; {n:,} parameters")
    print(f"our kernel: {native.why_not() or 'compiled'}")
    print(f"{'threads':>7} {'precision':<11} {'by':<9} {'Gparam/s':>9} {'spread':>13} {'GB/s':>7} {'of copy':>8}")
    for threads in options.threads or sorted({1, max(1, cores // 2), cores}):
        torch.set_num_threads(threads)
        rate = copy_rate(4 * n)
        print(f"{threads:>7} {'':<11} {'copy':<9} {'':>9} {'':>13} {rate / 1e9:7.1f} {1:8.0%}")
        for precision in PRECISIONS:
            for by, measure in (("ours", ours), ("torch", in_torch)):
                row(threads, precision, by, n, measure(n, precision), bytes_per_param(precision), rate)
        found = deepspeed(n)
        if isinstance(found, str):
            print(f"{threads:>7} {found}")
        else:
            row(threads, "fp32", "DeepSpeed", n, found, bytes_per_param("fp32"), rate)


def row(
    threads: int, precision: str, by: str, n: int, found: tuple[float, float, float], each: int, copy: float
) -> None:
    median, least, most = found
    rate, spread = n / median / 1e9, f"{n / most / 1e9:.2f}-{n / least / 1e9:.2f}"
    moved = rate * 1e9 * each
    print(f"{threads:>7} {precision:<11} {by:<9} {rate:9.2f} {spread:>13} {moved / 1e9:7.1f} {moved / copy:8.0%}")


if __name__ == "__main__":
    main()

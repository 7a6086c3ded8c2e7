"""How fast a GPU machine updates parameters, on the GPU and on the CPU, alone and beside copies over the link."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import adam as adam_benchmark
import gpu_machine
import torch
from gpu_machine import Row
from torch import Tensor

from megatrain import adam, muon, readings
from megatrain.cuda import CudaBackend
from megatrain.native import adam as native
from megatrain.rates import rates
from schedules import optimizer, presets
from schedules.op import Stream
from schedules.workload import PRECISIONS, Workload

PARAMS = 100_000_000  # of the slabs
MUON = ("llama-3.1-8b", "qwen3-30b-a3b")  # of blocks of these: seven matrices, and 128 experts'


def updates(threads: list[int]) -> list[Row]:
    """Gparam/s of Adam and Muon on the GPU, of the CPU's Adam by threads and precision, and of DeepSpeed's beside ours.

    On the CPU all slabs lie in pinned memory, as in training.
    """
    return [*_on_gpu(), *_muon_on_gpu(), *_on_cpu(threads), *_beside_deepspeed(max(threads))]


def beside_copies() -> list[Row]:
    """GB/s of host memory, read and written, of Adam and of copies one way at once, with the threads of training."""
    gpu_machine.clear()
    each, threads, rows = adam_benchmark.bytes_per_param("bf16"), torch.get_num_threads(), []
    backend = CudaBackend()
    try:
        arenas, update = readings.Arenas(backend), readings.adam_load(backend, PARAMS, "bf16", threads)
        for stream in (Stream.H2D, Stream.D2H):
            found = rates(backend, [update, arenas.copy(stream, readings.SIZES[-1])])
            updated, copied = found[0].median * each / 1e9, found[1].median / 1e9
            told = {"beside": str(stream), "updated_GB_s": updated, "copied_GB_s": copied, "GB_s": updated + copied}
            rows.append({"case": f"{threads} threads updating, and copies {stream}", "threads": threads} | told)
    finally:
        backend.close()
    return rows


def _on_cpu(threads: list[int]) -> list[Row]:
    """Alone and beside copies both ways; most precisions with the last number of threads only."""
    rows: list[Row] = []
    copying = _Copying()
    torch.set_num_threads(max(threads))
    copy = {}
    for count in threads:
        torch.set_num_threads(count)
        copy[count] = adam_benchmark.copy_rate(gpu_machine.COPY, gpu_machine.as_trained)
    for precision in PRECISIONS:
        weights, grad, state = adam_benchmark.slabs(PARAMS, precision, gpu_machine.as_trained)

        def step(
            weights: Tensor = weights, grad: Tensor = grad, state: Tensor = state, precision: str = precision
        ) -> None:
            adam.step(weights, grad, state, adam_benchmark.HYPER, 10, precision=precision)

        for count in threads if precision == "bf16" else threads[-1:]:
            torch.set_num_threads(count)
            alone = adam_benchmark.seconds(step)
            with copying:
                beside = adam_benchmark.seconds(step)
            each = adam_benchmark.bytes_per_param(precision)
            rows.append(
                {
                    "case": f"{precision}, {count} threads",
                    "precision": precision,
                    "threads": count,
                    "kernel": native.why_not() or "ours",
                    "Gparam_s": {"median": PARAMS / alone[0] / 1e9, "least": PARAMS / alone[2] / 1e9},
                    "GB_s": PARAMS * each / alone[0] / 1e9,
                    "of_copy": PARAMS * each / alone[0] / copy[count],
                    "beside_copies_Gparam_s": PARAMS / beside[0] / 1e9,
                }
            )
    return rows


def _beside_deepspeed(threads: int) -> list[Row]:
    """By turns; or why not."""
    rows: list[Row] = []
    torch.set_num_threads(threads)
    place = gpu_machine.as_trained
    for precision in adam_benchmark.DEEPSPEED:
        case, rival = f"DeepSpeedCPUAdam, {precision}", adam_benchmark.deepspeed(PARAMS, precision, place)
        if isinstance(rival, str):
            rows.append({"case": case, "left_out": rival})
            continue
        found = adam_benchmark.by_turns({"ours": adam_benchmark.ours(PARAMS, precision, place), "rival": rival})
        rows.append(
            {
                "case": case,
                "threads": threads,
                "Gparam_s": PARAMS / found["rival"][0] / 1e9,
                "ours_Gparam_s": PARAMS / found["ours"][0] / 1e9,
            }
        )
    return rows


def _on_gpu() -> list[Row]:
    """Gparam/s by precision, and torch's fused kernel on slabs of bf16 and of fp32, moments of the same type."""
    rows: list[Row] = []
    for precision in PRECISIONS:
        weights, grad, state = (slab.to(gpu_machine.DEVICE) for slab in adam_benchmark.slabs(PARAMS, precision))
        step = functools.partial(adam.step, weights, grad, state, adam_benchmark.HYPER, 10, precision=precision)
        kernel = "torch's, in passes" if adam.kernels_on(weights.device) is None else "ours"
        each = adam_benchmark.bytes_per_param(precision)
        rows.append({"case": f"on the GPU, {precision}", "kernel": kernel} | _update_rate(step, each))
    for dtype in (torch.bfloat16, torch.float32):
        parameter = torch.nn.Parameter(torch.randn(PARAMS, device=gpu_machine.DEVICE).to(dtype))
        parameter.grad = torch.randn_like(parameter)
        theirs = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        case = f"on the GPU, torch's fused, {str(dtype).removeprefix('torch.')}"
        rows.append({"case": case} | _update_rate(theirs.step, 7 * dtype.itemsize))
    return rows


def _muon_on_gpu() -> list[Row]:
    """Gparam/s of Muon's step on a block, in bf16, and TFLOP/s of its products."""
    rows: list[Row] = []
    for name in MUON:
        model, workload = presets.load(name), Workload(micro_batch_size=1, seq_len=1, optimizer="muon")
        n, of = model.params(0), optimizer.matrices(model, workload, 0)
        weights, grad = (torch.randn(n, device=gpu_machine.DEVICE).to(torch.bfloat16) for _ in range(2))
        state = torch.zeros(optimizer.state_bytes(model, workload, 0, n), dtype=torch.uint8, device=gpu_machine.DEVICE)
        step = functools.partial(
            muon.step, weights, grad, state, adam_benchmark.HYPER, 10, matrices=of, precision=workload.precision
        )
        (rate,) = gpu_machine.rates([(torch.cuda.Stream(), step, n / 1e9)], gpu_machine.WINDOW_S["product"])
        flops = optimizer.step_flops(model, workload, 0) / n
        rows.append({"case": f"Muon on the GPU, {name}", "Gparam_s": rate, "TFLOP_s": rate["median"] * flops / 1e3})
    return rows


def _update_rate(step: Callable[[], object], each: int) -> Row:
    """Gparam/s of an update of PARAMS, and GB/s where each takes so many bytes."""
    (rate,) = gpu_machine.rates([(torch.cuda.Stream(), step, PARAMS / 1e9)], gpu_machine.WINDOW_S["product"])
    return {"Gparam_s": rate, "GB_s": rate["median"] * each}


class _Copying:
    """Copies both ways over the link, from the beginning of the block to its end."""

    def __init__(self) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._host = [gpu_machine.host_slab(gpu_machine.BESIDE) for _ in range(2)]
        self._device = [gpu_machine.device_slab(gpu_machine.BESIDE) for _ in range(2)]

    def __enter__(self) -> _Copying:
        self._begun, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stop.is_set():
            with torch.cuda.stream(self._streams[0]):
                self._device[0].copy_(self._host[0], non_blocking=True)
            with torch.cuda.stream(self._streams[1]):
                self._host[1].copy_(self._device[1], non_blocking=True)
            torch.cuda.synchronize()
            self._begun.set()

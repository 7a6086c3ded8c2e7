"""What is read off a machine besides the times of ops: links, host memory, optimizer, products, drive.

Operands are random and lie in arenas larger than any cache, loads last as long as training's: measuring zeros, warm
caches or idle machines has misled others by up to a fifth.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain import adam, adam_state
from megatrain.adam import Adam
from megatrain.backend import Backend
from megatrain.cores import usable_cores
from megatrain.float_types import float_type
from megatrain.initial import random_parameters
from megatrain.nvme import DEPTH, PIECE, Drive
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.rates import Load, Rate, rates, together
from megatrain.template import templates, views
from schedules.model import ModelSpec
from schedules.op import Buffer, Stream, Tier
from schedules.workload import PRECISIONS, Workload

SIZES = tuple(1 << n for n in range(16, 27, 2))  # of copies, bytes: 64 KiB to 64 MiB
ARENA = 1 << 28  # bytes that copies walk through
PARAMS = 10_000_000  # of the optimizer's slabs
MATRIX = 1024  # side of a matrix on a CPU; eight times that on a GPU
FRESH = 1 << 26  # bytes, more than any allocator keeps for later
DRIVE_FILE = 1 << 28  # bytes
PIECES, DEPTHS = (1 << 16, 1 << 20, 1 << 22, 1 << 24), (1, 4, 16)
DRIVE_TURNS = 3

Found = dict[str, Rate]


class Arenas:
    """Random bytes of both tiers, and copies that walk through them."""

    def __init__(self, backend: Backend[Any]) -> None:
        self._memory = {
            (tier, stream): backend.allocate(Buffer(name=f"{tier} for {stream}", tier=tier, nbytes=ARENA))
            for tier in (Tier.HOST, Tier.DEVICE)
            for stream in (Stream.H2D, Stream.D2H)
        }
        for slab in self._memory.values():
            slab.view(torch.int32).random_()
        if backend.device.type == "cuda":
            torch.cuda.synchronize()

    def copy(self, stream: Stream, nbytes: int) -> Load:
        """Copies of that size on one of the two copying streams; the amount is bytes of payload."""
        host, device = self._memory[Tier.HOST, stream], self._memory[Tier.DEVICE, stream]
        source, target = (host, device) if stream == Stream.H2D else (device, host)
        return Load(stream=stream, work=_walk(source, target, nbytes), amount=nbytes)


def _walk(source: Tensor, target: Tensor, nbytes: int) -> Callable[[], object]:
    """Copies of one part after another, each elsewhere than the last."""
    places, turn = max(1, source.numel() // nbytes), 0

    def work() -> None:
        nonlocal turn
        turn = (turn + 1) % places
        part = slice(turn * nbytes, (turn + 1) * nbytes)
        target[part].copy_(source[part], non_blocking=True)

    return work


def links(backend: Backend[Any], arenas: Arenas, compute: Load) -> Found:
    """Bytes per second by "direction/bytes/beside": alone, both directions at once, and while the GPU computes."""
    found = Found()
    both = (Stream.H2D, Stream.D2H)
    for nbytes in SIZES:
        for stream in both:
            found[f"{stream}/{nbytes}/alone"] = rates(backend, [arenas.copy(stream, nbytes)])[0]
        together_now = rates(backend, [arenas.copy(stream, nbytes) for stream in both])
        for stream, rate in zip(both, together_now, strict=True):
            found[f"{stream}/{nbytes}/both"] = rate
    for stream in both:
        found[f"{stream}/{SIZES[-1]}/computing"] = rates(backend, [arenas.copy(stream, SIZES[-1]), compute])[0]
    return found


def dram(backend: Backend[Any], arenas: Arenas, threads: list[int]) -> Found:
    """Bytes of host memory read and written per second by "what/threads/beside", on the optimizer's stream.

    "all" is what updates in place and copies one way move together: copies alone do not find all that memory can do,
    and both ways at once, which is rare in a step, they slow updates by less than they move.
    """
    values, target = (_host_memory(backend, name, ARENA).view(torch.float32).normal_() for name in ("values", "target"))
    works = {
        "read": (lambda: values.sum(), values.nbytes),
        "write": (lambda: target.fill_(1.0), target.nbytes),
        "copy": (lambda: target.copy_(values), 2 * values.nbytes),
        "update": (lambda: values.neg_(), 2 * values.nbytes),
        "fresh": (lambda: torch.empty(FRESH // 4).fill_(1.0), FRESH),
    }
    found = Found()
    passes = 1 if backend.device.type == "cuda" else 2  # of a copy over host memory
    for count in threads:
        for what, (work, amount) in works.items():
            load = Load(stream=Stream.CPU, work=_with_threads(work, count), amount=amount)
            found[f"{what}/{count}/alone"] = rates(backend, [load])[0]
            copies = {stream: arenas.copy(stream, SIZES[-1]) for stream in (Stream.H2D, Stream.D2H)}
            if what == "copy":
                found[f"copy/{count}/copies"] = rates(backend, [load, *copies.values()])[0]
            if what == "update":
                for stream, copy in copies.items():
                    updated, copied = rates(backend, [load, copy])
                    found[f"update/{count}/{stream}"] = updated
                    both = [u + passes * c for u, c in zip(updated, copied, strict=True)]
                    found[f"all/{count}/{stream}"] = Rate(*both)
    return found


def optimizer(backend: Backend[Any], arenas: Arenas, threads: list[int]) -> Found:
    """Parameters per second of the host's Adam by "precision/threads/beside"."""
    found = Found()
    for precision in PRECISIONS:
        for count in threads if precision in ("bf16", "fp32") else threads[-1:]:
            load = adam_load(backend, PARAMS, precision, count)
            found[f"{precision}/{count}/alone"] = rates(backend, [load])[0]
            beside = [arenas.copy(stream, SIZES[-1]) for stream in (Stream.H2D, Stream.D2H)]
            found[f"{precision}/{count}/copies"] = rates(backend, [load, *beside])[0]
    return found


def products(backend: Backend[Any]) -> Found:
    """FLOP/s of square products by element type; bytes per second read and written by a copy on the device."""
    side = MATRIX * (8 if backend.device.type == "cuda" else 1)
    found = Found()
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(side, side, device=backend.device).to(dtype) for _ in range(2))

        def work(a: Tensor = a, b: Tensor = b) -> None:
            a @ b

        found[name] = rates(backend, [Load(stream=Stream.COMPUTE, work=work, amount=2 * side**3)])[0]
    source = torch.randn(ARENA // 4, device=backend.device)
    target = torch.empty_like(source)
    moved = Load(stream=Stream.COMPUTE, work=lambda: target.copy_(source), amount=2 * source.nbytes)
    return {**found, "copy": rates(backend, [moved])[0]}


def shares(backend: Backend[Any], arenas: Arenas, compute: Load, update: Load) -> dict[str, tuple[float, float]]:
    """How fast the forward pass goes beside the optimizer and beside copies, and these beside it; alone is 1."""
    return {
        "optimizer": together(backend, compute, update),
        "copies": together(backend, compute, arenas.copy(Stream.H2D, SIZES[-1])),
    }


def drive(backend: Backend[Any], folder: Path) -> Found:
    """Bytes per second of a drive by "read or write/bytes of a piece/pieces under way". Raises DriveError."""
    found = Found()
    memory = _random_bytes(backend, "drive")
    for piece in PIECES:
        for depth in DEPTHS:
            with Drive(folder, piece=piece, depth=depth) as opened:
                slab = opened.allocate(Buffer(name="reading", tier=Tier.NVME, nbytes=memory.nbytes))
                for verb, work in (("write", slab.write), ("read", slab.read)):
                    times = [_seconds(functools.partial(work, memory)) for _ in range(DRIVE_TURNS)]
                    speeds = [memory.nbytes / s for s in times]
                    found[f"{verb}/{piece}/{depth}"] = Rate(min(speeds), statistics.median(speeds), max(speeds))
    return found


def drive_both(backend: Backend[Any], folder: Path) -> tuple[float, float]:
    """How fast a drive is read while it is written, and written while it is read; alone is 1. Raises DriveError."""
    with Drive(folder) as opened:

        def load(stream: Stream, verb: str) -> Load:
            slab = opened.allocate(Buffer(name=verb, tier=Tier.NVME, nbytes=DRIVE_FILE))
            memory = _random_bytes(backend, verb)
            slab.write(memory)
            return Load(stream=stream, work=functools.partial(getattr(slab, verb), memory))

        return together(backend, load(Stream.NVME_READ, "read"), load(Stream.NVME_WRITE, "write"))


def _host_memory(backend: Backend[Any], name: str, nbytes: int) -> Tensor:
    """Memory as training has it, which may be faster than other: huge pages, pinned, and read by a drive directly."""
    return backend.allocate(Buffer(name=name, tier=Tier.HOST, nbytes=nbytes))


def _random_bytes(backend: Backend[Any], name: str) -> Tensor:
    """What a drive's file holds."""
    memory = _host_memory(backend, name, DRIVE_FILE)
    memory.view(torch.int32).random_()
    return memory


def as_used(verb: str) -> str:
    """The key in `drive` of how training reads or writes."""
    return f"{verb}/{PIECE}/{DEPTH}"


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# ---- what layers and the optimizer do


def block_load(model: ModelSpec, workload: Workload, device: torch.device, pointwise: Pointwise = PLAIN) -> Load:
    """One block's forward pass, nothing kept."""
    dtype = float_type(workload.bytes.activation)
    layers = templates(model, seq_len=workload.seq_len, device=device, dtype=dtype, pointwise=pointwise)
    layer = layers.blocks[model.layer_kind(0)]
    params = views(random_parameters(model, 0)(0).to(device, dtype), model.parameter_shapes(0))
    x = torch.randn(workload.micro_batch_size, workload.seq_len, model.hidden_size, dtype=dtype, device=device)

    def work() -> None:
        with torch.no_grad():
            layer.forward(params, x)

    return Load(stream=Stream.COMPUTE, work=work)


def adam_load(backend: Backend[Any], n: int, precision: str, threads: int | None = None) -> Load:
    """The optimizer's step on n parameters in host memory, by so many threads or the stream's own number."""
    spec = PRECISIONS[precision]
    dtype = float_type(spec.weight)
    weights, grad = (_host_memory(backend, name, n * dtype.itemsize).view(dtype) for name in ("weights", "grad"))
    state = _host_memory(backend, "state", spec.state_bytes(n))
    adam_state.initialise(weights, state, precision, torch.randn(n).mul_(0.02))
    grad.normal_()

    def work() -> None:
        adam.step(weights, grad, state, Adam(lr=1e-4), 1, precision=precision)

    return Load(stream=Stream.CPU, work=work if threads is None else _with_threads(work, threads), amount=n)


def _with_threads(work: Callable[[], object], count: int) -> Callable[[], object]:
    """The number is of the thread that calls; torch passes the last one on to threads that start later."""

    def counted() -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        work()

    return counted


def thread_counts() -> list[int]:
    """1, 2, 4 and so on up to the cores that this process may use."""
    cores = usable_cores()
    return sorted({*(1 << n for n in range(cores.bit_length()) if 1 << n <= cores), cores})

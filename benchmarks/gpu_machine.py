"""What a GPU machine can do by itself: links, matrix products, attention, host memory.

All operands are random: zeros are moved and multiplied faster than numbers. All loads last about a second, so
that clocks have settled where they stay in training.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import adam as adam_benchmark
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain import fp8
from megatrain.cores import usable_cores
from megatrain.cuda import RESERVED_CORES, pci_address
from megatrain.pinned import cpus_beside, pinned
from megatrain.pointwise import PLAIN
from schedules import presets
from schedules.errors import InputError, Refused
from schedules.flops import attention_flops
from schedules.model import ModelSpec
from schedules.workload import Workload
from sim import hardware

Row = dict[str, Any]

WINDOWS = 7  # readings of which the median is told
# Windows before them, and one after them in which what runs beside the others may have ended.
WARM_UP, LAST = 2, 1
WINDOW_S = {"link": 0.05, "product": 0.1}
SIZES = [1 << n for n in range(16, 31, 2)]  # of copies: 64 KiB to 1 GiB
PRODUCTS = {"8192x8192x8192": (8192, 8192, 8192)}
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")  # models whose gate projection and attention are measured, too
TOKENS = (2048, 8192, 32768)
SEQUENCES = (1024, 4096)  # of attention, with the last of those numbers of tokens
BESIDE = 1 << 28  # bytes of the copies beside something else
COPY = 1 << 30  # bytes of a copy in host memory
TOGETHER = 16  # launches on one stream before the next gets its own: no queue may fill up while another is empty
DEVICE = torch.device("cuda")
# CUDA's names for the GPUs of datasheets, whole: others are called alike, "NVIDIA H100 NVL", and are slower.
SHEETS = {
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-sxm",
    "NVIDIA B200": "b200",
    "NVIDIA GB10": "dgx-spark",
    "NVIDIA GB300": "gb300",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L40S": "l40s",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi355x",
    "AMD Radeon 8060S": "strix-halo",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5060 Ti": "rtx5060ti",
    "NVIDIA GeForce RTX 5080": "rtx5080",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX A6000": "rtxa6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000",
}


def pinned_memory(nbytes: int) -> Tensor:
    """As CudaBackend allocates it: on the GPU's side of the machine."""
    return pinned(nbytes, torch.cuda.cudart(), cpus=cpus_beside(pci_address(0)))


def as_trained(tensor: Tensor) -> Tensor:
    """A copy in memory as training has it, of huge pages where the kernel gives them: there it is moved much faster."""
    return pinned_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def host_slab(nbytes: int) -> Tensor:
    """Pinned memory with random bytes."""
    return pinned_memory(nbytes).copy_(device_slab(nbytes))


def clear() -> None:
    """As every row begins: torch may use the whole GPU, and all cores but those that issue.

    Gives back what a case has left: cycles of objects, torch's cache, and cuBLAS's workspaces, 32 MiB a stream.
    """
    torch.set_num_threads(max(1, usable_cores() - RESERVED_CORES))
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def free_bytes() -> int:
    """Of the GPU's memory, what torch may have: not CUDA's context, loaded kernels, or what others hold."""
    clear()
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def datasheet(gpu: str | None = None) -> str:
    """The profile of a GPU, this one if None, by CUDA's name for it ("NVIDIA H100 80GB HBM3"); of one that is called
    alike if there is none, see `has_datasheet`. Raises Refused where there is none of that either."""
    gpu = gpu or torch.cuda.get_device_name()
    chips = {name: name.split("-")[0] for name in hardware.names()}
    alike = [name for name, chip in chips.items() if chip in gpu.lower().replace(" ", "")]
    if gpu in SHEETS or alike:
        return SHEETS.get(gpu) or max(alike, key=lambda name: (len(chips[name]), -len(name)))  # not "h200", of a GH200
    raise Refused(f"there is no datasheet of {gpu} among those of {', '.join(SHEETS)}")


def has_datasheet(gpu: str) -> bool:
    """Whether there is a profile of this very GPU."""
    return gpu in SHEETS


def device_slab(nbytes: int) -> Tensor:
    """Random bytes on the device."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)


def rates(
    works: list[tuple[torch.cuda.Stream, Callable[[], object], float]], window_s: float
) -> list[dict[str, float]]:
    """Amount per second of each work while all run, each on its stream: median, least, most.

    A work is (stream, what queues it once, its amount).
    """
    counts = []
    for stream, work, _ in works:  # how many fill a window, alone
        with torch.cuda.stream(stream):
            work()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(5):
                work()
            torch.cuda.synchronize()
        counts.append(max(1, round(window_s / ((time.perf_counter() - begun) / 5))))
    ends_of: list[list[torch.cuda.Event]] = [[] for _ in works]
    turns = -(-max(counts) // TOGETHER)
    for (stream, _, _), ends in zip(works, ends_of, strict=True):
        with torch.cuda.stream(stream):
            ends.append(mark())
    for turn in range((WARM_UP + WINDOWS + LAST) * turns):
        part = turn % turns
        for (stream, work, _), count, ends in zip(works, counts, ends_of, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(count * (part + 1) // turns - count * part // turns):
                    work()
                if part == turns - 1:
                    ends.append(mark())
    torch.cuda.synchronize()
    found = []
    for (_, _, amount), count, ends in zip(works, counts, ends_of, strict=True):
        each = [amount * count / (a.elapsed_time(b) / 1e3) for a, b in itertools.pairwise(ends[WARM_UP:-LAST])]
        found.append({"median": statistics.median(each), "least": min(each), "most": max(each)})
    return found


def mark() -> torch.cuda.Event:
    """A moment of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def links() -> list[Row]:
    """GB/s of copies by size: each direction alone, then both together."""
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    rows = []
    for size in SIZES:
        hosts, devices = [host_slab(size) for _ in range(2)], [device_slab(size) for _ in range(2)]

        def h2d(host: Tensor = hosts[0], device: Tensor = devices[0]) -> None:
            device.copy_(host, non_blocking=True)

        def d2h(host: Tensor = hosts[1], device: Tensor = devices[1]) -> None:
            host.copy_(device, non_blocking=True)

        window_s = WINDOW_S["link"]
        (alone_up,) = rates([(up, h2d, size / 1e9)], window_s)
        (alone_down,) = rates([(down, d2h, size / 1e9)], window_s)
        both = rates([(up, h2d, size / 1e9), (down, d2h, size / 1e9)], window_s)
        rows.append(
            {
                "case": f"copy of {size >> 10} KiB",
                "nbytes": size,
                "h2d_GB_s": alone_up,
                "d2h_GB_s": alone_down,
                "both_GB_s": [both[0], both[1]],
                "us_h2d": size / alone_up["median"] / 1e3,
                "us_d2h": size / alone_down["median"] / 1e3,
            }
        )
    return rows


def gemm() -> list[Row]:
    """TFLOP/s of bf16 products of N(0, 1), alone and beside copies both ways; of a device copy, GB/s.

    And of products in fp8, of operands that are in fp8 already, alone.
    """
    shapes = dict(PRODUCTS)
    for name in SHAPES:
        model = presets.load(name)
        for tokens in TOKENS:
            shapes[f"{name} gate, {tokens} tokens"] = (tokens, model.hidden_size, model.intermediate_size)
    stream, up, down = (torch.cuda.Stream() for _ in range(3))
    size = BESIDE
    host, device = [host_slab(size) for _ in range(2)], [device_slab(size) for _ in range(2)]
    copies = [
        (up, lambda: device[0].copy_(host[0], non_blocking=True), size / 1e9),
        (down, lambda: host[1].copy_(device[1], non_blocking=True), size / 1e9),
    ]
    rows = []
    for case, (m, k, n) in shapes.items():
        a = torch.randn(m, k, device=DEVICE).bfloat16()
        b = torch.randn(n, k, device=DEVICE).bfloat16()  # as a weight lies in memory
        c = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)

        def product(a: Tensor = a, b: Tensor = b, c: Tensor = c) -> None:
            torch.mm(a, b.t(), out=c)

        work = (stream, product, 2 * m * n * k / 1e12)
        window_s = WINDOW_S["product"]
        (alone,), beside = rates([work], window_s), rates([work, *copies], window_s)
        rows.append(
            {
                "case": case,
                "TFLOP_s": alone,
                "beside_copies_TFLOP_s": beside[0],
                "slowdown": alone["median"] / beside[0]["median"] - 1,
            }
        )
    (moved,) = rates([(stream, lambda: device[0].copy_(device[1]), 2 * size / 1e9)], WINDOW_S["product"])
    rows += _in_fp8(shapes, stream)
    return [*rows, {"case": "copy on the device, read and written", "GB_s": moved}]


def _in_fp8(shapes: dict[str, tuple[int, int, int]], stream: torch.cuda.Stream) -> list[Row]:
    try:
        fp8.require(DEVICE)
    except InputError as error:
        return [{"case": "fp8", "not measured": str(error)}]
    rows = []
    for case, (m, k, n) in shapes.items():
        a, b = (fp8.rows(torch.randn(length, k, device=DEVICE).bfloat16(), fp8.E4M3, PLAIN) for length in (m, n))

        def product(a: fp8.Operand = a, b: fp8.Operand = b) -> None:
            fp8.product(a, b, torch.bfloat16, fast=True)

        (rate,) = rates([(stream, product, 2 * m * n * k / 1e12)], WINDOW_S["product"])
        rows.append({"case": f"{case}, fp8", "fp8_TFLOP_s": rate})
    return rows


def attention() -> list[Row]:
    """TFLOP/s of causal attention by size of heads and length, forward and backward: by what torch takes, and by flash.

    FLOPs as the simulator counts them, two products forward and four backward.
    """
    return [row for name in SHAPES for seq in SEQUENCES for row in _attention(presets.load(name), seq)]


def attention_kernel(model: ModelSpec, seq: int) -> SDPBackend:
    """Which of torch's kernels computes the attention of the first block in bf16."""
    padded = model.latent is not None and model.latent.padded
    if model.attention_sinks or (model.window(0) or seq) < seq or padded:
        return SDPBackend.FLASH_ATTENTION  # asked for by megatrain.attention
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    q, k, v = (
        torch.empty(1, seq, count, model.head_dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=heads != kv_heads))


def _attention(model: ModelSpec, seq: int) -> Iterator[Row]:
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    batch = max(1, TOKENS[-1] // seq)
    flops = attention_flops(model, model.blocks[0], Workload(micro_batch_size=batch, seq_len=seq))
    inputs = [
        torch.randn(batch, seq, count, dim, device=DEVICE).bfloat16().transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    taken = attention_kernel(model, seq)
    for kernel in dict.fromkeys((taken, SDPBackend.FLASH_ATTENTION)):
        case = f"heads of {dim}, {batch} sequences of {seq}, {kernel.name.lower()}"
        yield {"case": case, "taken": kernel == taken} | _attention_rates(inputs, kernel, flops / 1e12)


def _attention_rates(inputs: list[Tensor], kernel: SDPBackend, amount: float) -> Row:
    stream = torch.cuda.Stream()
    gqa = inputs[0].shape[1] != inputs[1].shape[1]

    def forward() -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=gqa)

    with torch.cuda.stream(stream):
        out = forward()  # where a forward ran its backward runs
        grad = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, inputs, grad, retain_graph=True)

    (down,) = rates([(stream, forward, amount)], WINDOW_S["product"])
    (up,) = rates([(stream, backward, 2 * amount)], WINDOW_S["product"])
    both = 3 / (1 / down["median"] + 2 / up["median"])
    return {"forward_TFLOP_s": down, "backward_TFLOP_s": up, "both_TFLOP_s": both}


def dram(threads: list[int]) -> list[Row]:
    """GB/s of plain copies of fp32 numbers in pinned host memory, read and written, by threads."""
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        rate = adam_benchmark.copy_rate(COPY, as_trained)
        rows.append({"case": f"{count} threads", "threads": count, "GB_s": rate / 1e9})
    return rows

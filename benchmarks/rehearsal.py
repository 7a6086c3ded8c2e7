"""A GPU that is not there: `gpu.py --rehearse` runs all of the benchmark's own code on a CPU, with small sizes.

A GPU's time is dear, and an error in what prepares, measures or prints costs as much of it as a measurement. The
figures of a rehearsal mean nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gpu_block
import gpu_case
import gpu_checks
import gpu_machine
import gpu_optimizer
import gpu_rivals
import gpu_rows
import gpu_steps
import torch

from megatrain import busy_work, cuda, rates, readings, this_machine, way
from megatrain.pointwise import PLAIN
from schedules import presets
from schedules.delta import DeltaNet
from schedules.model import ModelSpec

MEMORY = 16 << 30
REHEARSED = "no GPU but a rehearsal of an H200"  # the GPU's name
NOTHING = (
    "synchronize",
    "set_device",
    "empty_cache",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)


class Event:
    """A moment on the host."""

    def __init__(self, **options: object) -> None:
        self._s = 0.0

    def record(self, stream: object = None) -> None:
        self._s = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return max(1e-6, (other._s - self._s) * 1e3)


class Stream:
    """Runs what it is given at once."""

    def __init__(self, index: int = 0) -> None: ...

    def wait_event(self, event: Event) -> None: ...


class Graph:
    """Takes its capture for the run, and does nothing when it is replayed."""

    def capture_begin(self, **options: object) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Runtime:
    """Pins nothing."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    yield


def _always(value: object) -> Callable[..., object]:
    """A function of its own each time: torch's compiler takes one function under two names for an error."""
    return lambda *a, **k: value


def small(model: ModelSpec) -> ModelSpec:
    """As the model in all that decides what is computed."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    if model.latent is not None:
        sizes |= {
            "q_lora_rank": min(model.q_lora_rank, 32),
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        }
        sizes |= {"num_key_value_heads": 8}
    if model.moe_latent_size:
        sizes["moe_latent_size"] = 32
    if isinstance(model.recurrence(0), DeltaNet):
        apart = model.linear_channel_decay  # of as many key heads as value heads, and as wide
        sizes |= {"linear_num_key_heads": 4 if apart else 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16 if apart else 8}
    elif model.recurrence(0) is not None:
        sizes |= {"intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
        sizes["mamba_n_groups"] = min(model.mamba_n_groups, 2)
    return dataclasses.replace(model, **sizes, head_dim=16, sliding_window=model.window(0) and 4)


def install(gpu: Any) -> None:
    """Replace torch.cuda's functions and the sizes of the benchmark, the module `gpu`, for the rest of the process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    properties = SimpleNamespace(total_memory=MEMORY)
    replacements: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph_pool_handle": _always(0),
        "stream": _stream,
        "cudart": Runtime,
        "_sleep": lambda cycles: time.sleep(cycles * 1e-11),
        "is_available": lambda: True,
        "is_current_stream_capturing": _always(False),
        "get_device_name": lambda index=0: REHEARSED,
        "get_device_capability": _always((9, 0)),
        "get_device_properties": lambda index: properties,
        "mem_get_info": _always((MEMORY, MEMORY)),
        "memory_reserved": _always(0),
        "max_memory_allocated": _always(0),
        "max_memory_reserved": _always(0),
        "memory_stats": lambda: {"num_alloc_retries": 0},
        **{name: _always(None) for name in NOTHING},
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.accelerator.current_accelerator = _always(None)  # else torch 2.14's optimizers ask a driver for its stream
    torch.backends.cudnn.version = _always(0)
    for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
        setattr(torch._C, name, _always(None))
    cpu = torch.device("cpu")
    busy_work.PRODUCT = 8
    cuda.CudaBackend.device = property(lambda backend: cpu)  # type: ignore[assignment, method-assign]
    gpu_machine.DEVICE = cpu
    gpu_machine.SHEETS[REHEARSED] = "h200"
    gpu_machine.SIZES = [1 << 14, 1 << 16]
    gpu_machine.WINDOW_S = {"link": 0.002, "product": 0.002}
    gpu_machine.PRODUCTS = {"64x64x64": (64, 64, 64)}
    gpu_machine.SHAPES, gpu_machine.TOKENS, gpu_machine.SEQUENCES = ("tiny",), (32,), (16,)
    gpu_block.DENSE, gpu_block.SEQUENCES, gpu_block.LENGTH = (presets.load("tiny"),), 1, 64
    gpu_block.UNTIMED = tuple(map(small, gpu_block.UNTIMED))
    gpu_machine.BESIDE, gpu_machine.COPY, gpu_optimizer.PARAMS = 1 << 16, 1 << 20, 10_000
    gpu_optimizer.MUON = ("tiny", "tiny-moe")
    readings.ARENA, readings.SIZES, rates.SECONDS, rates.SLICE_S = 1 << 20, (1 << 16,), 0.01, 0.001
    this_machine.DEVICE_RESERVE, this_machine.FRAGMENTS, gpu_case.HOST_RESERVE = 0, 0.0, 0
    way.compiled = lambda: PLAIN  # what is replaced above would confuse the compiler
    torch.nn.Module.compile = _always(None)  # type: ignore[method-assign]
    for module in (gpu_steps, gpu_rivals, gpu_rows):
        module.LASTS_S = 0.0  # type: ignore[attr-defined]
    gpu_steps.LOADED_S = 0.0
    gpu_steps.PROFILED = torch.profiler.ProfilerActivity.CPU
    gpu_rows.MODELS, gpu_rows.BATCHES = ("tiny",), ((16, 2, 1), (16, 1, 2))
    tiny = gpu_case.Case(model="tiny", policy="resident", seq_len=16, micro_batch_size=2, precision="bf16_16bit")
    gpu.WAYS_OF = {"fused": dataclasses.replace(tiny, micro_batch_size=4), "graphs": tiny}
    gpu.KERNELS_OF = tiny
    gpu_checks.BACKEND = "cpu"

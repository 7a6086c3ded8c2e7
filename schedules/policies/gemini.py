"""Colossal-AI Gemini with parameters, gradients and states offloaded; a layer stands for its chunks.

What it does. Before a layer runs, the chunks that are in the way leave the device and its own are fetched; the host
waits for both, and they queue on the compute stream: nothing overlaps. With max_prefetch (0 there, unless set) the
next ones come beside it, on a stream of their own. static (the default there) moves every chunk down before it
fetches one. auto keeps as many as fit and moves the one down whose next use is furthest; over forward and backward
that is the least recently used one. After an optimizer step the host's bf16 chunk is stale: the first fetch brings
the fp32 master, 4 bytes per parameter, and casts it on the device; the bf16 chunk then goes down, 2 bytes, when it is
first moved out, and later fetches bring 2. A gradient goes down on a stream of its own. Under accumulation the sum
comes up for each later micro-batch and goes down again, and after a layer's backward its bf16 chunk goes down too.
After the whole backward the host runs Adam alone, with loss scale and clipping folded into it; the norm is
taken on the device as gradients become complete.

Where states live, in bytes per parameter, all on the host (16): bf16 chunk 2, gradients 2, fp32 master 4, moments
8. Master and moments are always fp32: all precisions but fp32 are built as bf16_fp32; with fp32 there is one
chunk, and no cast. On the device: the chunks, and one fp32 chunk on its way through the cast.

Exact in its training. Approximated: the language has no master apart from the optimizer state, so that its fetch is
shown as two copies of the 2-byte weights and a cast of one; the gradient has memory of its own where Gemini reuses
the chunk's unless it accumulates (14 bytes per parameter then, not 16); Adam is counted with the bf16 weights, 30
bytes of host traffic per parameter for Gemini's 26; a layer is fetched and moved out as a whole, once for recompute
and backward together; max_prefetch counts layers and not chunks; embedding and head have device buffers of their own.
Not here: parts of parameters or optimizer on the device (offload_param_frac, offload_optim_frac,
gpu_margin_mem_ratio), 8-bit copies, and training without a master (master_weights=False).
Source: hpcaitech/ColossalAI 4f9953b, colossalai/zero/gemini (gemini_mgr.py, gemini_hook.py, placement_policy.py,
gemini_ddp.py, gemini_optimizer.py, chunk/chunk.py).
"""

from __future__ import annotations

from typing import Literal

from schedules.chunks import Chunks
from schedules.deepspeed import with_master
from schedules.end_layers import end_buffers
from schedules.kept_activations import Activations, Kept, kept_as
from schedules.model import ModelSpec
from schedules.op import Kind, Stream
from schedules.program import Program
from schedules.sweep import sweep
from schedules.workload import MemoryBudget, Workload

STEADY_DEVICE_RATIO = 0.9  # of device memory that auto fills (steady_cuda_cap_ratio)


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    placement: Literal["static", "auto"] = "static",
    max_prefetch: int = 0,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        placement: static keeps no chunk that is not in use, auto keeps as many as fit the device.
        max_prefetch: layers fetched ahead, on a stream of their own, for which the host does not wait.
    """
    workload = with_master(workload)
    kept = kept_as(model, activations, every=every)
    if placement == "static":
        return _step(model, workload, kept, chunks=1 + max_prefetch, static=True, ahead=max_prefetch)
    least = _step(model, workload, kept, chunks=1 + max_prefetch, static=False, ahead=max_prefetch)
    taken = least.device_bytes()
    room = int((taken + least.device_room(memory)) * STEADY_DEVICE_RATIO) - taken
    more = max(room // least.nbytes(least.weight(0)), 0)
    chunks = max(min(1 + max_prefetch + more, model.num_hidden_layers), 1 + max_prefetch)
    return _step(model, workload, kept, chunks=chunks, static=False, ahead=max_prefetch)


def _step(model: ModelSpec, workload: Workload, kept: Kept, *, chunks: int, static: bool, ahead: int) -> Program:
    p = Program(model, workload)
    device = Chunks(p, chunks, kept, static=static, ahead=ahead)
    grads = p.slots("grad", 2)
    end_grads = end_buffers(p, "grad")
    homes = {i: p.at_home(p.grad(i)) for i in model.layers}

    def grad(i: int) -> str:
        buffer = end_grads[i] if i in end_grads else grads.next()
        if m > 0:
            p.prefetch(p.grad(i), into=buffer, stream=Stream.COMPUTE, blocking=True)
        return buffer

    def done(i: int, buffer: str) -> None:
        if m == workload.microbatches[-1] and workload.grad_clip is not None:
            p.norm([(buffer, p.grad(i))], stream=Stream.COMPUTE, name=f"N.{model.layer_name(i)}")
        device.give_up(i)
        p.offload(p.grad(i), out_of=buffer)
        p.discard(buffer)

    for m in workload.microbatches:
        sweep(p, [m], weights=device.fetch, grad=grad, done=done, kept=kept)
    p.synchronize(*homes.values(), kind=Kind.OFFLOAD, name="H.backward")
    for i in model.layers:
        p.update(i, stream=Stream.HOST)
    return p

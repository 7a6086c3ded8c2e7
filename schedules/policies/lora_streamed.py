"""LoRA on a model larger than the device: the frozen weights stream, the adapters stay and are trained there.

What it does. The model's own weights only pass through: each block's come up through a ring of device slots, once
for the forward and once for the backward, while other blocks compute, and nothing goes down, for they never change.
A block runs all micro-batches while it is there. Its adapters, their gradient and their optimizer state live on the
device, where they are updated right after the block's backward. The last `keep` blocks keep their activations, the
others their input and run forward again. The first `resident` layers, the embedding and the head coming first, have
their frozen weights on the device too; `nvme` of the others, evenly spread, have theirs on a drive, which is only read.
With quantised=nf4 the blocks' matrices are kept in 4.5 bits a weight, wherever they are, and made whole on the device
each time that their block is computed, or with whole=matrices by each op that multiplies with them, as it does.

Where states live, in bytes per parameter at bf16. Frozen, host or NVMe: weights 2, blocks' 0.56 with quantised=nf4; no
gradient, no moments. Adapters (a few thousandths of the model), device: weights 2, gradient 2, optimizer state 8.

Exact in its training of adapters of rank `rank` beside every projection of every block (LoRA, arXiv 2106.09685; experts
have none), scaled by 2 (alpha twice the rank), without dropout. Systems that work so: layer streaming for LoRA in
MakazhanAlpamys/Soup (docs/performance-and-quantization.md), which reads each layer twice a step through two device
buffers. With quantised=nf4 the computation is QLoRA's (arXiv:2305.14314, without its double quantisation), whose
weights all stay on the GPU, as here with every layer in `resident`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from schedules.errors import ProgramError
from schedules.frozen import Frozen, Whole
from schedules.kept_activations import Activations, at_least_1, at_most, kept_as, most_that_fit
from schedules.model import ModelSpec
from schedules.op import Stream
from schedules.program import Program
from schedules.sweep import spread, sweep, visits
from schedules.workload import MemoryBudget, Workload

TRAINS = "adapters"


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    rank: int = 16,
    slots: int = 2,
    keep: int | None = None,
    activations: Activations = "recompute",
    every: int = 1,
    resident: int = 2,
    nvme: int = 0,
    quantised: Literal["nf4"] | None = None,
    whole: Whole = "blocks",
) -> Program:
    """Build the step.

    Args:
        rank: of the adapters, at least 1.
        slots: device buffers for streamed weights.
        resident: how many layers' frozen weights live on the device: the embedding, the head, then blocks.
        nvme: how many of the other blocks, evenly spread, live on NVMe.
        quantised: how the blocks' matrices are kept, in NF4 or as they are computed with.
        whole: whether what is quantised is made whole a block at a time, in a buffer for it, or a matrix at a time
            within each op, of experts some at a time: that takes less of the device, and time for each micro-batch.
    """
    if workload.multiplies_to_update:
        raise ProgramError(f"adapters are not trained by {workload.optimizer}: leave out the optimizer")
    if workload.matmul is not None:
        raise ProgramError(f"adapters are not trained beside {workload.matmul} products: leave out matmul")
    at_least_1("of the adapters", rank=rank)
    at_most(len(model.layers), "layers", resident=resident)
    at_most(len(model.blocks), "blocks", nvme=nvme)
    quantised_as = workload.quantised or quantised
    workload = replace(workload, lora_rank=workload.lora_rank or rank, quantised=quantised_as)

    def build(keep: int) -> Program:
        p, kept = Program(model, workload), kept_as(model, activations, keep=keep, every=every)
        p.keep_on_device(*(t for i in model.blocks for t in (p.adapter(i), p.grad(i), p.state(i))))
        staying = [model.embed, model.head, *model.blocks][:resident]
        on_drive = spread([i for i in model.blocks if i not in staying], nvme)
        frozen = Frozen(p, visits(kept, model.blocks), staying=staying, on_drive=on_drive, slots=slots, whole=whole)

        def done(i: int, grad: str) -> None:
            if workload.grad_clip is None:
                p.update(i, stream=Stream.COMPUTE)
            else:
                p.norm([(grad, p.grad(i))], stream=Stream.COMPUTE, name=f"N.{model.layer_name(i)}")

        sweep(p, list(workload.microbatches), weights=frozen.weights, grad=lambda i: None, done=done, kept=kept)
        if workload.grad_clip is not None:
            for i in model.blocks:
                p.update(i, stream=Stream.COMPUTE)
        return p

    if keep is not None:
        return build(keep)
    return most_that_fit(build, model, workload, memory, copies=[workload.accumulation] * len(model.blocks))

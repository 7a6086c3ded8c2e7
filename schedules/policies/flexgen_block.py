"""FlexGen's block schedule, for evaluation: one loaded layer serves a block of several batches; no backward.

What it does. A block is a number of micro-batches. Layer after layer comes to the device, and before the next one
does, all micro-batches of the block pass through it, so that the weights cross the link once per block. Meanwhile the
next layer's weights are on their way, and, with activations=host, so are the input of the next micro-batch and the
output of the one before. What comes out at the end is the loss of every micro-batch, and nothing is trained.

Where states live, in bytes per parameter at bf16. The first `resident` layers, the embedding first: device, weights 2.
The last `nvme` blocks: NVMe, through host memory on their way. All others: host, weights 2. With quantised=nf4 blocks
have 0.56 there, and on the links, and are made whole on the device to be computed with. There are no gradients and no
moments. Activations between layers of a whole block lie on the device or the host.

Exact in the loss. Approximated: FlexGen generates text, and its cache of keys and values, which an evaluation has
not, is left out; it places percentages of every layer on each tier (--percent), here whole layers are on one; its 4
bits are whole numbers between the least and largest of 64 weights (--compress-weight), here they are NF4's; it ends
every inner step with one synchronisation, here each op waits for what it needs.
Source: FlexGen (arXiv 2303.06865), section 4; FMInference/FlexLLMGen 004ffef, README.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from schedules.errors import ProgramError
from schedules.frozen import Frozen, Whole
from schedules.kept_activations import at_least_1, at_most
from schedules.model import ModelSpec
from schedules.program import Program
from schedules.sweep import Place
from schedules.workload import MemoryBudget, Workload

TRAINS = "nothing"


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    block: int | None = None,
    slots: int = 2,
    resident: int = 0,
    nvme: int = 0,
    activations: Literal["device", "host"] = "device",
    quantised: Literal["nf4"] | None = None,
    whole: Whole = "blocks",
    rank: int | None = None,
) -> Program:
    """Build the step.

    Args:
        block: micro-batches that share a load of the weights; all of them if left out.
        slots: device buffers for weights on their way.
        resident: how many of the first layers, the embedding being one, live on the device.
        nvme: how many of the last blocks live on NVMe.
        activations: where the hidden states of a block's micro-batches wait for the next layer.
        quantised: how the blocks' matrices are kept, in NF4 or as they are computed with.
        whole: whether what is quantised is made whole a block at a time, in a buffer for it, or a matrix at a time
            within each op, of experts some at a time: that takes less of the device, and time for each micro-batch.
        rank: of adapters, those of a checkpoint, that are evaluated beside the weights; none if left out.
    """
    if block == 0:
        raise ProgramError("a block has at least one micro-batch")
    if rank is not None:
        at_least_1("of the adapters", rank=rank)
    if workload.matmul is not None and (rank is not None or quantised is not None):
        raise ProgramError(f"{workload.matmul} products are of matrices in bf16, without adapters: leave out matmul")
    at_most(len(model.layers), "layers", resident=resident)
    at_most(len(model.blocks), "blocks", nvme=nvme)
    evaluated = replace(workload, task="evaluate", grad_clip=None)
    evaluated = replace(evaluated, quantised=workload.quantised or quantised, lora_rank=workload.lora_rank or rank)
    p = Program(model, evaluated)
    if evaluated.lora_rank is not None:
        p.keep_on_device(*(p.adapter(i) for i in model.blocks))
    batches = list(workload.microbatches)
    size = block or len(batches)
    groups = [batches[at : at + size] for at in range(0, len(batches), size)]
    staying = model.layers[:resident]
    on_drive = [i for i in model.blocks if i not in staying][::-1][:nvme]
    visits = [*model.blocks] * len(groups)
    frozen = Frozen(p, visits, staying=staying, on_drive=on_drive, slots=slots, whole=whole)
    for group in groups:
        _evaluate(p, group, frozen.weights, away=activations == "host" and len(group) > 1)
    return p


def _evaluate(p: Program, group: Sequence[int], weights: Place, *, away: bool) -> None:
    """The loss of a block of micro-batches. `away`: hidden states wait on the host, and come one ahead."""
    model = p.model
    steps = [(i, m) for i in (*model.blocks, model.head) for m in group]
    inputs = iter([p.output(i - 1, m) for i, m in steps] if away else [])

    def come() -> None:
        if (tensor := next(inputs, None)) is not None:
            p.restore(tensor)

    def leave(i: int, m: int) -> None:
        if away:
            p.evict(p.output(i, m))

    table = weights(model.embed)
    for m in group:
        p.forward(model.embed, m, weights=table)
        leave(model.embed, m)
    come()
    slot: str | None = None
    for i, m in steps:
        if m == group[0]:
            slot = weights(i)
        come()
        if i == model.head:
            tied = weights(model.embed) if model.tie_word_embeddings else None
            p.loss(m, weights=slot, embed_weights=tied)
        else:
            p.forward(i, m, weights=slot, keep="nothing")
            leave(i, m)

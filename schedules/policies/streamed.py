"""Stream each layer once for all micro-batches; update on the CPU as gradients land. Ours.

What it does. Weights arrive through a ring of device slots while other layers compute. A layer runs all micro-batches
before the next one comes, so that weights and gradients cross the link once per step and not once per micro-batch (the
vertical order of GreedySnake, arXiv 2512.17570); order=microbatches is the usual one; between the two, the last
`singly` blocks take micro-batches one by one, so that only one's activations are there, and the others all together. A
gradient leaves as soon as it is whole, and its update runs on the CPU beside the rest of the backward. The last `keep`
blocks keep their activations, but for `offload` blocks, evenly spread, which send theirs to the host and get them
back, `slack` visits ahead; what is left keeps its input and runs forward again just before its backward. Nothing waits
for a whole step to end: the next forward starts as soon as its first layers are updated.

Where states live, in bytes per parameter at bf16. Host: weights 2, optimizer state 8, and a gradient, 2, for the layers
whose update must wait; slabs serve the others. Device: the slots, and of embedding and head a copy of the weights, 2,
and the gradients. With resident=n the first n layers, counted from the embedding, live on the device with their state,
10, and are updated there once their gradient is whole: the next forward runs on them while the CPU still updates.
Gradients that add up meanwhile, or wait to be clipped, stay there too, 2. With hold=n the weights of n other blocks
stay there, 2, or 4 with a gradient that adds up, and only state and update are the host's: they come up once a step,
however many micro-batches run one after another. With through=n that many blocks, held ones first, are updated on the
device as well, and only their state, 8, passes through it, coming while the blocks before run backward: this pays where
the CPU or its memory is slow and a step is long. Weights that are held then never move. With stay=n the state of others
does not leave either. With nvme=n the state of n blocks lives on a drive, with nvme_weights=n the weights of n of these
too: they come through the host for the forward, and again for the backward, after which they are updated there and go
back. With parts=n gradients leave the device, and states come to their updates, in n parts a block, each updated by
itself: no buffer on the host has room for a whole one, and a block's state may live in several places. What passes then
does so beside the next block, or two, where that spares memory, and with grad_slots=1 before that runs.

Order of updates. Gradients land last layer first; the next forward needs the first layer first. Updated as they land,
all must be done before the next forward begins. `defer` picks that many blocks, evenly spread, and updates them after
all others, first block first, beside the next forward. With gradient clipping no update may start before the global
norm is known: all layers are updated in that order, but for what through=n and stay=n update on the device, just before
its next forward, with the gradient that the step before has left.

Exact; nothing is approximated. Of knobs for other blocks, more than are left means all; small blocks are chosen last.
"""

from __future__ import annotations

from typing import Literal

from schedules.kept_activations import Kept, at_most, most_that_fit
from schedules.model import ModelSpec
from schedules.placement import Places
from schedules.program import Program
from schedules.streaming import StreamedStep
from schedules.sweep import spread
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    slots: int = 2,
    grad_slots: int = 2,
    slabs: int = 4,
    keep: int | None = None,
    offload: int = 0,
    inputs: int = 0,
    slack: int = 1,
    every: int = 1,
    nested: bool = False,
    defer: int = 0,
    resident: int = 0,
    hold: int = 0,
    through: int = 0,
    stay: int = 0,
    nvme: int = 0,
    nvme_weights: int = 0,
    nvme_slots: int = 2,
    nvme_inputs: int = 0,
    nvme_offload: int = 0,
    parts: int = 1,
    order: Literal["layers", "microbatches"] = "layers",
    singly: int = 0,
) -> Program:
    """Build the step.

    Args:
        slots: device buffers for streamed weights.
        grad_slots: device buffers for gradients on their way out; one is not shared with the next block.
        slabs: host buffers in which gradients, or parts of them, wait for the optimizer.
        offload: how many of the other blocks' activations go to the host and come back for the backward.
        inputs: how many blocks' inputs go to the host and come back, whatever else is kept: many do not fit the device.
        slack: visits of blocks by which activations come back before they are needed, and leave after they are made.
        every: blocks that run forward again from one input. Of blocks whose inputs go to the host each has its own.
        nested: whether these then make only their inputs again, and each runs once more just before its backward.
        defer: how many blocks are updated beside the next forward. Has no meaning with gradient clipping.
        resident: how many of the first layers, the embedding being one, live on the device.
        hold: how many of the other blocks, evenly spread, with `through` from the first on, have their weights on the
            device, and with order=microbatches their gradient, until it is whole; the host has and updates their state.
        through: how many of the other blocks, held ones first, are updated on the device while their weights and whole
            gradient are there, their state coming and going; all with Muon. With clipping before the next forward.
        stay: how many parts of streamed blocks' states live on the device, where these are updated. As `through`.
        nvme: how many parts of the other streamed blocks' states live on NVMe.
        nvme_weights: how many of these blocks have their weights there too; gradients of theirs that must wait also do.
        nvme_slots: host buffers for state on its way from and to NVMe.
        nvme_inputs: how many of the `inputs` blocks send theirs on to NVMe.
        nvme_offload: how many of the `offload` blocks send theirs on to NVMe.
        parts: in how many parts a block's gradient and state are; those of embedding and head are then no larger.
        order: all micro-batches of a layer, or all layers of a micro-batch.
        singly: how many of the last blocks run one micro-batch after another, there and back, between the forward and
            the backward of all micro-batches by the others. Has no meaning with order=microbatches.
    """
    blocks = len(model.blocks)
    at_most(blocks, "blocks", keep=keep, offload=offload, inputs=inputs, defer=defer, through=through, singly=singly)
    at_most(blocks, "blocks", hold=hold, nvme_weights=nvme_weights, nvme_inputs=nvme_inputs, nvme_offload=nvme_offload)
    at_most(len(model.layers), "layers", resident=resident)
    at_most(blocks * parts, "parts of blocks' states", stay=stay, nvme=nvme)
    groups = [list(workload.microbatches)] if order == "layers" else [[m] for m in workload.microbatches]
    alone = singly if len(groups[0]) > 1 else 0
    away, leaving = spread(model.blocks, offload), spread(model.blocks, inputs)
    on_nvme = spread(sorted(away), nvme_offload)
    others = [i for i in model.blocks if i not in away]
    places = Places(
        model,
        workload,
        groups=len(groups),
        singly=alone,
        defer=defer,
        resident=resident,
        hold=hold,
        through=through,
        stay=stay,
        parts=parts,
        nvme=nvme,
        nvme_weights=nvme_weights,
        one_gradient=grad_slots == 1,
    )

    def build(keep: int) -> Program:
        kept = Kept(
            on_device=others[max(len(others) - keep, 0) :],
            on_host=away - on_nvme,
            on_nvme=on_nvme,
            inputs=leaving,
            inputs_on_nvme=spread(sorted(leaving), nvme_inputs),
            slack=slack,
            every=every,
            nested=nested,
        )
        step = StreamedStep(
            model, workload, places, kept, slots=slots, grad_slots=grad_slots, slabs=slabs, nvme_slots=nvme_slots
        )
        return step.whole(groups)

    if keep is not None:
        return build(keep)
    copies = [1 if i >= len(model.blocks) - alone else len(groups[0]) for i in reversed(others)]
    return most_that_fit(build, model, workload, memory, copies=copies, grows=every == 1)

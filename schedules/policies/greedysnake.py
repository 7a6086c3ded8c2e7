"""GreedySnake: all micro-batches of a layer before the next layer, part of the optimizer beside the next forward.

What it does. The vertical order: a layer's weights come once for the forward and once for the backward of all
micro-batches, and its gradient, added up on the device, leaves once. What moves in exchange are checkpoints: the
blocks' inputs go to the host after forward and come back for the backward, which runs every block forward again
(activations=inputs; other choices are for comparison). The CPU updates layers as their gradients land, but for a
fraction `alpha` of the blocks, which are updated beside the forward of the next step, first block first.
GreedySnake finds alpha by a linear program over bandwidths; here it is a knob.

Why this is exact: a deferred update stands late in the step's program, and nothing but the fetch of that very
block in the next step waits for it.

Where states live, in bytes per parameter at bf16: weights 2 and optimizer state 8 on the host, or with ssd on a
drive, from which they come through host buffers; 2 more on the host for gradients of deferred blocks, embedding and
head. On the device: two blocks' weights and gradients, embedding and head, 4, and the hidden states and their gradients
of all micro-batches between two layers.

Exact in its training. Approximated: alpha counts blocks where GreedySnake defers a part of every layer; between two
layers the hidden states stay on the device where GreedySnake moves all but the last micro-batch's; checkpoints
go to host memory only; embedding and head stay on the device for the step. With gradient clipping no update
can precede the last gradient: all wait on the host, 2 bytes per parameter, and are updated in the order in which
the next forward needs them.
Source: GreedySnake, arXiv 2512.17570, from a digest; its code (npz7yyk/GreedySnake) was not read, nor is it known
here whether it keeps an fp32 master, as the system that it is compared with does (precision bf16_fp32).
"""

from __future__ import annotations

from schedules.kept_activations import Activations, from_0_to_1, kept_as
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.program import Program
from schedules.shelf import Shelf
from schedules.sweep import Streamed, land, spread, sweep
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    alpha: float = 0.25,
    ssd: bool = False,
    activations: Activations = "inputs",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        alpha: the fraction of the blocks, from 0 to 1, that are updated beside the next forward.
        ssd: weights and optimizer state live on a drive.
    """
    from_0_to_1("a fraction of the blocks", alpha=alpha)
    kept = kept_as(model, activations, every=every)
    p = Program(model, workload)
    shelf = Shelf(p, nvme=ssd)
    device = Streamed(p, fetch=shelf.fetch, kept=kept)
    slabs = p.slots("slab", 2, Tier.HOST)
    clip = workload.grad_clip is not None
    late = set(model.layers) if clip else spread(model.blocks, round(alpha * len(model.blocks)))

    def done(i: int, buffer: str) -> None:
        (landed,) = land(p, i, buffer, slabs, held=i in late or i in device.ends)
        if i not in late:
            shelf.update(i, landed)

    sweep(p, list(workload.microbatches), weights=device.weights, grad=device.grad, done=done, kept=kept)
    for i in model.layers:
        if i in late:
            shelf.update(i, p.at_home(p.grad(i)))
    return p

"""MegaTrain as its paper describes it: two weight slots, block-wise recompute, gradient slabs, CPU Adam.

What it does. Forward streams each layer's weights through two device slots and keeps a checkpoint of the
hidden state every `checkpoint` layers. Backward takes these groups of layers last first: it runs a group
forward again, keeping its activations, then loads each layer once more for its backward. A gradient goes
through one of two device buffers into a pool of pinned slabs; a CPU worker adds it to the layer's gradient on
the host and gives the slab back, and when none is free the copies wait. Adam runs on the CPU, layer by layer
as gradients become complete; with gradient clipping, after the global norm.

Where states live, in bytes per parameter at bf16: weights 2, gradients 2 and moments 8 on the host, one
tile per layer. On the device: two weight slots, two gradient buffers, and embedding, final norm and head with
their gradients, refreshed by a copy after their update.

Exact in its training. Approximated: Adam follows each gradient as it lands, where the digest of the paper lists it
as a phase after the backward and leaves open whether it waits for all; packing into staging buffers is not shown, the
host tile is pinned; a
layer that still stands in a slot is not copied again, where the paper says that each is; checkpoints stay on
the device; the order of micro-batches under accumulation is the usual one (the paper does not say).
Source: the paper, "MegaTrain" (arXiv 2604.05091, April 2026), sections on the execution engine, from a digest.
"""

from __future__ import annotations

from schedules.end_layers import end_buffers
from schedules.kept_activations import at_least_1
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    checkpoint: int = 4,
    slabs: int = 12,
) -> Program:
    """Build the step.

    Args:
        checkpoint: layers between two hidden states kept by the forward.
        slabs: pinned host buffers between the gradient copies and the CPU worker.
    """
    at_least_1("layers between two checkpoints", checkpoint=checkpoint)
    p = Program(model, workload)
    embed, head = model.embed, model.head
    ring, grads, pool = p.slots("weight", 2), p.slots("grad", 2), p.slots("slab", slabs, Tier.HOST)
    weights, own = end_buffers(p, "weight"), end_buffers(p, "grad")
    staging = end_buffers(p, "slab", Tier.HOST)
    clip = workload.grad_clip is not None

    def collect(i: int, m: int, buffer: str) -> None:
        """Device buffer to slab, slab to the layer's tile, and Adam when the last micro-batch is in."""
        slab = p.offload(p.grad(i), out_of=buffer, into=staging[i] if i in staging else pool.next())
        p.discard(buffer)
        p.accumulate(i, out_of=slab)
        if m == workload.microbatches[-1]:
            if clip:
                p.norm([p.at_home(p.grad(i))], name=f"N.{model.layer_name(i)}")
            else:
                p.update(i)

    for m in workload.microbatches:
        p.forward(embed, m, weights=weights[embed])
        for i in model.blocks:
            p.forward(i, m, weights=p.load(p.weight(i), ring), keep="nothing" if i % checkpoint else "input")
        p.loss(m, weights=weights[head], grad=own[head], embed_weights=weights[embed], embed_grad=own[embed])
        collect(head, m, own[head])
        for start in reversed(model.blocks[::checkpoint]):
            group = model.blocks[start : start + checkpoint]
            for i in group:
                p.recompute(i, m, weights=p.load(p.weight(i), ring), output=i != group[-1])
            for i in reversed(group):
                slot = p.load(p.weight(i), ring)
                p.backward(i, m, weights=slot, grad=grads.next())
                collect(i, m, grads.current)
        p.backward(embed, m, grad=own[embed])
        collect(embed, m, own[embed])
    for i in (head, *reversed(model.blocks), embed):
        if clip:
            p.update(i)
        if i in weights:
            p.prefetch(p.weight(i), into=weights[i])
    return p

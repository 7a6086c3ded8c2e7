"""LoHan (Ratel, after Fuyou): gradients consumed by CPU Adam as they land, activations swapped or recomputed.

What it does. Blocks' weights come through a window of device slots ahead of their use. A gradient leaves as soon
as it is whole and the CPU optimizer takes it from where it lands, beside the rest of the backward (active
gradient offloading): the host never holds more than a few. Of `swap` blocks, evenly spread, the activations go
to the host after forward and come back for the backward, those of `spill` more go on to a drive; the others keep
their input, in LoHan on the host (inputs=host), and run forward again, to their end. LoHan chooses these numbers by the
traffic it can hide; here they are knobs, to be searched by simulation. The step ends when all updates are done.

Where states live, in bytes per parameter at bf16: weights 2 and optimizer state 8 on the host, or with ssd on a
drive, from which they come through host buffers (weights for forward and backward; both for Adam, which writes
both back); 2 more on the host for gradients of embedding and head. On the device: the window, two gradients, and
embedding and head, 4. LoHan keeps an fp32 master: that is precision bf16_fp32, 12 bytes of state, which takes a
drive a third longer; precision bf16 compares it with systems that keep none.

Exact in its training. Approximated: all is decided by layer, where LoHan chooses single activations and a block is
two parts with an input each; gradients go down in bf16, in LoHan in fp32; Adam reads the weights that it replaces;
embedding and head stay on the device for the step. Under accumulation, which LoHan does without, blocks' gradients
add up on the host, 2 bytes per parameter, and the last micro-batch's backward is the one that hides updates. Gradient
clipping is at odds with the idea, as no update may begin before the last gradient: then all wait on the host, 2 bytes
per parameter, and all updates follow the backward.
Source: LoHan, arXiv 2403.06504 (ICDE 2025), and its first version, Fuyou; RC4ML/LoHan feb88fe, gpt_model.py
(checkpoint of torch 2.0.0, reentrant unless told otherwise), ratel_optimizer.py.
"""

from __future__ import annotations

from typing import Literal

from schedules.kept_activations import Kept, at_most
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
    swap: int = 0,
    spill: int = 0,
    window: int = 2,
    ssd: bool = False,
    inputs: Literal["device", "host"] = "device",
) -> Program:
    """Build the step.

    Args:
        swap: how many blocks' activations go to the host instead of being computed again.
        spill: how many of the other blocks' activations go on to a drive instead.
        window: device slots for blocks' weights.
        ssd: weights and optimizer state live on a drive.
        inputs: where the inputs wait from which blocks run forward again.
    """
    at_most(len(model.blocks), "blocks", swap=swap)
    at_most(len(model.blocks) - swap, "blocks that are not swapped", spill=spill)
    away = spread(model.blocks, swap)
    deep = spread([i for i in model.blocks if i not in away], spill)
    again = [i for i in model.blocks[:-1] if i not in away | deep]  # the last block's is needed again at once
    kept = Kept(on_host=away, on_nvme=deep, inputs=again if inputs == "host" else (), whole=True)
    p = Program(model, workload)
    shelf = Shelf(p, nvme=ssd)
    device = Streamed(p, fetch=shelf.fetch, groups=workload.accumulation, slots=window)
    slabs = p.slots("slab", 2, Tier.HOST)
    clip = workload.grad_clip is not None

    def done(i: int, buffer: str) -> None:
        end, last = i in device.ends, m == workload.microbatches[-1]
        if end and not last:
            return  # the sum stays on the device
        (landed,) = land(p, i, buffer, slabs, first=end or m == 0, last=last, held=end or clip)
        if last and not clip:
            shelf.update(i, landed)

    for m in workload.microbatches:
        sweep(p, [m], weights=device.weights, grad=device.grad, done=done, kept=kept)
    if clip:
        for i in model.layers:
            shelf.update(i, p.at_home(p.grad(i)))
    p.synchronize(*(p.at_home(p.weight(i)) for i in model.layers), name="H.step")
    return p

"""bitsandbytes' paged AdamW: weights and gradients on the device, 32-bit moments in unified memory.

What it does. Ordinary training; after the backward the GPU updates the layers in their order. The states lie in
unified memory: before a layer's update they are asked onto the device, on the compute stream, and the host waits
for the device after each. Pages leave for the host only when room is needed. So nothing moves where everything
fits, and what does not fit moves up and down once per step.

Where states live, in bytes per parameter at bf16: on the device weights 2 and gradients 2; optimizer state 8 in
unified memory, its home being the device where it fits and the host where it is paged.

Exact in its training. Approximated: pages stand for whole layers, two of which are on the device at once, and
leave beside the next one's arrival; which layers' states stay is settled once, the last ones first, where the
driver evicts what was used longest ago, which in a cycle is what is needed next (pressure=1 shows that: all
states move every step); a fault costs what a copy costs. With gradient clipping the norm is taken on the device
before the first update. 8-bit block-wise states, 2 bytes per parameter, are the precision bf16_8bit.
Source: bitsandbytes 95f9af3, optim/optimizer.py and functional.py (get_paged, prefetch_tensor).
"""

from __future__ import annotations

from collections.abc import Collection

from schedules.kept_activations import Activations, Kept, from_0_to_1, kept_as, most_that_fit
from schedules.model import ModelSpec
from schedules.op import Stream
from schedules.program import Program
from schedules.sweep import sweep
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    pressure: float | None = None,
    keep: int | None = None,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        pressure: the fraction of the layers whose states are paged, from 0 to 1; as few as the device has no
            room for if left out.
    """
    from_0_to_1("a fraction of the layers", pressure=pressure)

    def kept(keep: int) -> Kept:
        return kept_as(model, activations, keep=keep, every=every)

    if pressure is None:
        paged = _without_room(model, workload, memory, kept(keep or 0))
    else:
        paged = model.layers[: round(pressure * len(model.layers))]

    def build(keep: int) -> Program:
        return _step(model, workload, paged, kept(keep))

    return (
        build(keep)
        if keep is not None
        else most_that_fit(build, model, workload, memory, copies=[1] * len(model.blocks))
    )


def _without_room(model: ModelSpec, workload: Workload, memory: MemoryBudget, kept: Kept) -> range:
    """The first layers, so many that the states of the others fit the device."""
    if _step(model, workload, (), kept).device_room(memory) >= 0:
        return range(0)
    paging = _step(model, workload, model.layers, kept)
    room, first = paging.device_room(memory), len(model.layers)
    while first and room >= (size := paging.nbytes(paging.state(model.layers[first - 1]))):
        room, first = room - size, first - 1
    return model.layers[:first]


def _step(model: ModelSpec, workload: Workload, paged: Collection[int], kept: Kept) -> Program:
    p = Program(model, workload)
    for i in model.layers:
        p.keep_on_device(p.weight(i), p.grad(i), *([] if i in paged else [p.state(i)]))
    pages = p.slots("page", 2)
    for m in workload.microbatches:
        sweep(p, [m], weights=lambda i: None, grad=lambda i: None, done=lambda i, buffer: None, kept=kept)
    if workload.grad_clip is not None:
        p.norm([p.at_home(p.grad(i)) for i in model.layers], stream=Stream.COMPUTE)
    for i in model.layers:
        state = p.prefetch(p.state(i), into=pages.next(), stream=Stream.COMPUTE) if i in paged else None
        p.update(i, state=state, stream=Stream.COMPUTE)
        if state is not None:
            p.offload(p.state(i), out_of=state)
        p.synchronize(p.at_home(p.weight(i)), name=f"H.{model.layer_name(i)}")
    return p

"""Everything on the device: ordinary training, where the whole model fits. The reference for the others.

What it does. All layers of a micro-batch, then the next micro-batch; gradients add up in place. Each layer
is updated on the device as soon as its gradient is complete; with gradient clipping, once the global norm is
known. The last `keep` blocks keep their activations, the others their input alone and run forward again.

Where states live, in bytes per parameter at bf16: all on the device, weights 2, gradients 2, optimizer
state 8. Nothing crosses the link.

Exact in its training. Approximated: the optimizer is one kernel per layer.
"""

from __future__ import annotations

from schedules.kept_activations import Activations, kept_as, most_that_fit
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
    keep: int | None = None,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step."""
    if keep is None:

        def build(keep: int) -> Program:
            return policy(model, workload, memory, keep=keep, activations=activations, every=every)

        return most_that_fit(build, model, workload, memory, copies=[1] * len(model.blocks))
    p = Program(model, workload)
    for i in model.layers:
        p.keep_on_device(p.weight(i), p.grad(i), p.state(i))
    kept = kept_as(model, activations, keep=keep, every=every)
    clip = workload.grad_clip is not None

    def done(i: int, buffer: str) -> None:
        if m == workload.microbatches[-1] and not clip:
            p.update(i, stream=Stream.COMPUTE)

    for m in workload.microbatches:
        sweep(p, [m], weights=lambda i: None, grad=lambda i: None, done=done, kept=kept)
    if clip:
        p.norm([p.at_home(p.grad(i)) for i in model.layers], stream=Stream.COMPUTE)
        for i in model.layers:
            p.update(i, stream=Stream.COMPUTE)
    return p

"""torchao's CPUOffloadOptimizer: weights on the device, states and Adam on the host after the backward.

What it does. Ordinary training, except that each gradient is copied to the host when it is there, on one side
stream, after every micro-batch anew: it adds up on the device, and the last copy is the one that counts. After
the backward the host takes the layers in the order in which their gradients landed: it waits for the copy,
runs Adam (torch's fused CPU kernel) and queues the new weights on the side stream, so that they go up while
the next layer is updated. It ends by waiting for that stream. The last `keep` blocks keep their activations,
the others their input and run forward again.

How much of Adam runs beside the backward depends on how far the host is ahead of the device. Here the host is at
the device's pace when the backward ends; run_ahead is the other extreme, a host that has issued the whole backward
when the first gradient lands, which CUDA's launch queue (about a thousand kernels) allows for small models only.

Where states live, in bytes per parameter at bf16. Device: weights 2, gradients 2 (with offload_gradients only
until they are copied). Host: weights 2, gradients 2, optimizer state 8.

Exact in its training. Its moments are of the parameters' type: with bf16 parameters that is precision bf16_16bit, 4
bytes of state. Approximated: a layer goes as a whole where torchao goes by tensor; tensors below 4096 elements are
not updated on the device. torchao cannot clip by a global norm: what this policy does instead is to measure
the norm on the device, where gradients are complete, and to leave the scaling to Adam.
Source: pytorch/ao 36027d8, torchao/optim/cpu_offload.py.
"""

from __future__ import annotations

from schedules.errors import ProgramError
from schedules.kept_activations import Activations, kept_as, most_that_fit
from schedules.model import ModelSpec
from schedules.op import Kind, Stream
from schedules.program import Program
from schedules.sweep import sweep
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    offload_gradients: bool = False,
    run_ahead: bool = False,
    keep: int | None = None,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        offload_gradients: free a gradient on the device once it is copied. Not with accumulation.
        run_ahead: Adam starts with the first gradient that has landed, while the device is still at the backward.
    """
    if offload_gradients and workload.accumulation > 1:
        raise ProgramError("offload_gradients: torchao frees a gradient after each backward, it cannot accumulate")
    if keep is None:

        def build(keep: int) -> Program:
            return policy(
                model,
                workload,
                memory,
                offload_gradients=offload_gradients,
                run_ahead=run_ahead,
                keep=keep,
                activations=activations,
                every=every,
            )

        return most_that_fit(build, model, workload, memory, copies=[1] * len(model.blocks))
    p = Program(model, workload)
    weights = {i: p.buffer(f"device.{p.weight(i)}") for i in model.layers}
    ends = (model.embed, model.head) if offload_gradients else model.layers
    staying = {i: p.buffer(f"device.{p.grad(i)}") for i in ends}
    leaving = p.slots("grad", 2) if offload_gradients else None
    landed: list[int] = []

    def done(i: int, buffer: str) -> None:
        p.offload(p.grad(i), out_of=buffer)
        landed.append(i)
        if workload.grad_clip is not None and m == workload.microbatches[-1]:
            p.norm([(buffer, p.grad(i))], stream=Stream.COMPUTE, name=f"N.{model.layer_name(i)}")

    for m in workload.microbatches:
        landed.clear()
        sweep(
            p,
            [m],
            weights=weights.get,
            grad=lambda i: leaving.next() if leaving and i not in staying else staying[i],
            done=done,
            kept=kept_as(model, activations, keep=keep, every=every),
        )
    if not run_ahead:
        p.synchronize((staying[model.embed], p.grad(model.embed)), kind=Kind.OFFLOAD, name="H.backward")
    for i in landed:
        p.update(i, stream=Stream.HOST)
        p.prefetch(p.weight(i), into=weights[i], stream=Stream.D2H)
    p.synchronize((weights[landed[-1]], p.weight(landed[-1])), kind=Kind.PREFETCH, name="H.stream")
    return p

"""RoundPipe on one GPU: stages stream through it, and the optimizer runs a whole step behind. Stale by one.

What it does. A stage runs all micro-batches before the next stage comes; weights are uploaded ahead of it, its inputs
stay in host memory for the backward, which runs it forward again, to its end. Gradients go down after each backward
stage. When a step ends, the optimizer's thread copies the parameters that the step before made into those that are
uploaded, takes the gradients over, and updates its own parameters beside the next step. So the next forward misses one
update: losses are those of a training whose gradient is applied one step late. With is_async=false the host waits for
the update and copies it before the next step: exact, and slower.

Where states live, in bytes per parameter at bf16, all on the host (18): uploaded weights 2, the optimizer's
weights 2, gradients 2, the optimizer's gradients 4, optimizer state 8. On the device: two blocks' weights and
gradients, embedding and head, 4, and the hidden states and their gradients between two stages.

Exact in its training to that staleness; the schedule declares it, and the verifier checks it. Approximated: a stage
is a layer (which layers share one matters for several GPUs, and here for the weights that are on the device at once);
hidden states between two stages stay on the device; the parameters of a layer are copied as soon as that layer's
upload is done, not after all uploads; the optimizer's gradients are always fp32, its parameters of the workload's
precision (fp32 in its examples and benchmark: bf16_fp32); embedding and head stay on the device for the step.
Source: RoundPipe, arXiv 2604.27085; ITcarrot/RoundPipe e813c67, roundpipe/roundpipe.py, run.py (run_backward),
optim_stream.py and attribute.py.
"""

from __future__ import annotations

from schedules.kept_activations import Activations, kept_as
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.sweep import Streamed, sweep
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    is_async: bool = True,
    activations: Activations = "inputs",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        is_async: the optimizer runs beside the next step, whose weights miss its update.
    """
    kept = kept_as(model, activations, every=every, whole=True)
    p = Program(model, workload, staleness=1 if is_async else 0)
    uploaded = {i: p.buffer(f"host.uploaded.{p.weight(i)}", Tier.HOST) for i in model.layers}
    device = Streamed(p, fetch=lambda i, buffer: p.prefetch(p.weight(i), into=buffer, out_of=uploaded[i]), kept=kept)

    def copy_parameters(stream: Stream) -> None:
        for i in model.layers:
            p.cast(p.at_home(p.weight(i)), (uploaded[i], p.weight(i)), stream=stream)

    def done(i: int, buffer: str) -> None:
        p.offload(p.grad(i), out_of=buffer)

    sweep(p, list(workload.microbatches), weights=device.weights, grad=device.grad, done=done, kept=kept)
    if is_async:
        copy_parameters(Stream.CPU)
    own = {i: p.at_home(p.grad(i, wide=True)) for i in model.layers}
    for i in reversed(model.layers):
        p.cast(p.at_home(p.grad(i)), own[i], stream=Stream.CPU)
    if workload.grad_clip is not None:
        p.norm(own.values())
        for i in model.layers:
            p.scale(i, grad=own[i])
    for i in model.layers:
        p.update(i, grad=own[i], scaled=True)
    if not is_async:
        copy_parameters(Stream.HOST)
    return p

"""PyTorch FSDP2 (`fully_shard`) with CPUOffloadPolicy on one GPU, each block wrapped, the rest the root.

What it does. Parameters live in pinned host memory. The root (embedding, final norm, head) is fetched when a
micro-batch begins and stays on the device for it. A block is fetched for forward and again for backward, and freed
after either. Since torch's pull request 160135 of August 2025 a group of one GPU has no gather that could run ahead,
and a block's weights come on the compute stream when it is about to run, whatever a user sets. Before that, and on
several GPUs, they come while the block before computes (prefetch=true). With checkpointing (the usual way to run it)
a block keeps its input and runs forward again. After a block's backward its gradient goes to the host, the root's
after the last backward; the host waits for all of them. From the second micro-batch on each gradient copy makes the
host wait, and the host adds it up; or gradients add up on the device until the last micro-batch
(gradient_sync=false). Then the user's optimizer runs on the host, alone, layer by layer (torch's fused CPU Adam),
with clipping after two passes over the gradients: norm and scale.

Where states live, in bytes per parameter at bf16, all on the host: weights 2, gradients 2, optimizer state 8.
On the device: a block's weights, two with prefetch=true, two blocks' gradients, and the root's of both; with
gradient_sync=false all gradients, 2.

Exact in its training. FSDP2 keeps moments in the parameters' type: with bf16 parameters that is precision
bf16_16bit, 4 bytes of state; precision bf16 compares it with systems whose moments are fp32. Approximated: with
fp32 parameters computed in bf16 it moves 4 bytes per parameter over the link, which is not shown (precision fp32
moves them, and computes in fp32). The copies inside the device of a gather and a scatter over one rank are not
shown, nor their second buffer. With prefetch=true a block's fetch for the first backward begins during the last
forward, not with the loss.
Source: torch 2.13.0, torch/distributed/fsdp/_fully_shard (_fsdp_collectives.py, _fsdp_param_group.py).
"""

from __future__ import annotations

from schedules.end_layers import end_buffers
from schedules.kept_activations import Activations, kept_as
from schedules.model import ModelSpec
from schedules.op import Kind, Stream, Tier
from schedules.program import Program
from schedules.sweep import Window, sweep, visits
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    prefetch: bool = False,
    gradient_sync: bool = True,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        prefetch: weights come beside the block before, as they did on one GPU until torch's pull request 160135.
        gradient_sync: gradients leave after every micro-batch; false is set_requires_gradient_sync(False) but for the
            last, until when they add up on the device.
    """
    kept = kept_as(model, activations, every=every)
    p = Program(model, workload)
    sums = {} if gradient_sync else {i: p.buffer(f"device.{p.grad(i)}") for i in model.blocks}
    coming, ahead = (Stream.H2D, 2) if prefetch else (Stream.COMPUTE, 1)
    ring, grads, landing = p.slots("weight", ahead), p.slots("grad", 2), p.buffer("landing", Tier.HOST)
    first = 0 if gradient_sync else workload.microbatches[-1]  # whose gradients leave
    root, root_grads = end_buffers(p, "weight"), end_buffers(p, "grad")
    homes = {i: p.at_home(p.grad(i)) for i in model.layers}

    def fetch(i: int) -> str:
        return p.prefetch(p.weight(i), into=ring.next(), stream=coming)  # freed after use: nothing is found in a slot

    def reduce(i: int, buffer: str, m: int) -> None:
        """Layer i's gradient to the host, which waits for it and adds it where it has one already."""
        if m == first:
            p.offload(p.grad(i), out_of=buffer)
        else:
            p.accumulate(i, out_of=p.offload(p.grad(i), out_of=buffer, into=landing, blocking=True), stream=Stream.HOST)
        p.discard(buffer)

    def run(m: int) -> None:
        """One micro-batch; the host waits for its gradients."""
        window = Window(visits(kept, model.blocks), ahead=ahead)

        def done(i: int, buffer: str) -> None:
            if m < first:
                return  # adds up on the device
            if i not in root:
                reduce(i, buffer, m)
            elif i == model.embed:
                for end in root:
                    reduce(end, root_grads[end], m)

        for i in root:
            p.prefetch(p.weight(i), into=root[i], stream=coming)
        sweep(
            p,
            [m],
            weights=lambda i: root[i] if i in root else window.weights(i, fetch),
            grad=lambda i: root_grads[i] if i in root else sums.get(i) or grads.next(),
            done=done,
            kept=kept,
        )
        if m >= first:
            p.synchronize(*homes.values(), kind=Kind.OFFLOAD, name="H.backward")

    for m in workload.microbatches:
        run(m)
    if workload.grad_clip is not None:
        p.norm(homes.values(), stream=Stream.HOST)
        for i in model.layers:
            p.scale(i, grad=homes[i], stream=Stream.HOST)
    for i in model.layers:
        p.update(i, scaled=True, stream=Stream.HOST)
    return p

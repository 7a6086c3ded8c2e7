"""SuperOffload as released in DeepSpeed: CPU Adam in a process of its own, beside the backward.

What it does. ZeRO-3 with only the optimizer offloaded: weights stay on the device. Sub-groups are small, and so is
the bucket in which gradients gather; the first (1 - ratio) of them, whose gradients come last, keep master,
moments and fp32 gradients on the device. When a full bucket completes a sub-group, the host waits for all
gradients under way and hands the sub-group to the worker, which copies its gradient once more and runs Adam at
once: before it is known that all gradients are finite (speculation; a step that was wrong would be rolled back,
which a fixed schedule has no need of). At the end of the backward the host joins the worker, and then goes
through the sub-groups in order: those of the GPU are stepped there; those of the CPU are scaled, too late to
matter, cast, and copied up, the host waiting. With gradient clipping nothing overlaps: sub-groups are scaled,
stepped by the worker with the host waiting, cast and copied up one by one.

Where states live, in bytes per parameter. All: weights 2 on the device, gradient sum 2 on the host. GPU
sub-groups: fp32 gradients 4, master 4, moments 8 on the device. CPU sub-groups: the same on the host, and one
sub-group's gradient again. Master and moments are always fp32: all precisions but fp32 are built as
bf16_fp32. On the device also one gradient bucket and the next, one gradient on its way back and one widened.

Exact in its training. Approximated: a layer goes as a whole where DeepSpeed goes by tensor; embedding and head have
gradient buffers beside the buckets; the CPU's sub-groups hold 2 more bytes per parameter on the host, the cast weights,
which DeepSpeed makes for a moment; that memory is pageable there, and the copy slower than here; Adam writes the
compute-type weights itself and the cast reads and writes them in place; the norm is computed only with gradient
clipping; the host's copy of what the worker returns is not shown; its gradients go to a buffer for the first layer of a
sub-group, one for the second and so on, where DeepSpeed has one for the largest sub-group; the worker has the host's
cores as if alone; its 1 ms polling and, without overlap_comm, the host's wait before each module are not shown. The
paper's weight-flow mode and its clipping by rollback and replay are not in the released code, and not here.
Source: SuperOffload, arXiv 2509.21271; DeepSpeed edaa722 (0.19.6 development), runtime/superoffload; defaults after
DeepSpeedExamples 45b4b71, training/DeepSpeed-SuperOffload.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.deepspeed import (
    Bucket,
    Reduction,
    cast,
    micro_batches,
    optimizer_step,
    step_on_device,
    sub_groups,
    upload,
    with_master,
)
from schedules.kept_activations import Activations, from_0_to_1, kept_as
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    ratio: float = 0.9,
    sub_group_size: int = 400_000_000,
    overlap_comm: bool = False,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        ratio: the part of the sub-groups, from 0 to 1, that the CPU steps.
        sub_group_size: parameters of a sub-group, rounded up to whole layers, and of the gradient bucket.
        overlap_comm: gradients have a stream of their own (false in DeepSpeed's examples of SuperOffload).
    """
    from_0_to_1("a part of the sub-groups", ratio=ratio)
    groups = sub_groups(model, sub_group_size)
    split = int((1 - ratio) * len(groups))  # DeepSpeed's rounding
    on_gpu, on_cpu = groups[:split], groups[split:]
    p = Program(model, with_master(workload))
    stepped = [i for group in on_gpu for i in group]
    step_on_device(p, stepped)
    weights = {i: p.buffer(f"device.{p.weight(i)}") for i in model.layers}
    clip, last = workload.grad_clip is not None, workload.microbatches[-1]
    landed: set[int] = set()

    def worker(group: Sequence[int]) -> None:
        """The worker copies a sub-group's gradient and steps it."""
        held = {}
        for place, i in enumerate(group):
            wide = p.grad(i, wide=True)
            held[i] = (p.buffer(f"worker{place}", Tier.HOST), wide)
            p.cast(p.at_home(wide), held[i], stream=Stream.CPU)
        for i in group:
            p.update(i, grad=held[i], scaled=True)

    def leave(grads: Sequence[tuple[int, str]], m: int) -> None:
        """A bucket's gradients leave; the sub-groups that this completes are handed to the worker."""
        reduction.reduce(grads, m)
        if m != last:
            return
        before = set(landed)
        landed.update(i for i, _ in grads)
        complete = [group for group in groups if landed.issuperset(group) and not before.issuperset(group)]
        if complete:
            reduction.wait("H.sub_group")
        for group in complete:
            if group in on_cpu and not clip:
                worker(group)

    def end(m: int) -> None:
        bucket.flush(m)
        reduction.finish()

    reduction = Reduction(p, stream=Stream.D2H if overlap_comm else Stream.COMPUTE, on_device=stepped)
    bucket = Bucket(p, size=sub_group_size, count=2, leave=leave)
    kept = kept_as(model, activations, every=every)
    micro_batches(p, weights=weights.get, grad=bucket.grad, done=bucket.add, end=end, kept=kept)
    joined = [p.at_home(p.weight(i)) for group in on_cpu for i in group]
    if joined and not clip:
        p.synchronize(*joined, name="H.join")
    for group in on_gpu:
        optimizer_step(p, group, stream=Stream.COMPUTE)
    for group in on_cpu:
        for i in group:
            wide = p.grad(i, wide=True)
            p.scale(i, grad=p.at_home(wide), stream=Stream.HOST)
        if clip:
            worker(group)
            p.synchronize(*(p.at_home(p.weight(i)) for i in group), name="H.worker")
        for i in group:
            cast(p, p.at_home(p.weight(i)))
        upload(p, group, weights)
    return p

"""ZeRO-Offload++ (Twin-Flow): part of the optimizer lives and steps on the GPU, the rest on the CPU.

What it does. ZeRO-3 with only the optimizer offloaded: weights stay on the device. Of n sub-groups the first
(1 - ratio) * n keep master, moments and fp32 gradients there. A gradient goes down, comes up again and is
widened; it goes down in fp32 only if its sub-group is the CPU's. After the backward the host takes the
sub-groups in order: those of the GPU, which come first, are launched and run (scale, Adam, cast) while the host
works on the first of the CPU's (the same three passes), whose new weights it then copies up, waiting.

Where states live, in bytes per parameter. All: weights 2 on the device, gradient sum 2 on the host. GPU
sub-groups: fp32 gradients 4, master 4, moments 8 on the device. CPU sub-groups: the same on the host. Master and
moments are always fp32: all precisions but fp32 are built as bf16_fp32. On the device also one gradient
bucket and the next, one gradient on its way back and one widened.

Exact in its training. Approximated: a layer goes as a whole where DeepSpeed goes by tensor; embedding and head have
gradient buffers beside the buckets; the CPU's sub-groups hold 2 more bytes per parameter on the host, the cast
weights, which DeepSpeed makes for a moment; that memory is pageable there, and the copy slower than here; Adam
writes the compute-type weights itself and the cast reads and writes them in place; the norm is computed only
with gradient clipping; the check that weights are there, before each module, is not shown.
Source: DeepSpeed edaa722 (0.19.6 development), runtime/zero/stage3.py (subgroup_to_device), blogs/deepspeed-offloadpp.
"""

from __future__ import annotations

from bisect import bisect_right

from schedules.deepspeed import (
    Bucket,
    Reduction,
    micro_batches,
    optimizer_step,
    step_on_device,
    sub_groups,
    upload,
    with_master,
)
from schedules.kept_activations import Activations, from_0_to_1, kept_as
from schedules.model import ModelSpec
from schedules.op import Stream
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    ratio: float | None = None,
    sub_group_size: int = 1_000_000_000,
    reduce_bucket_size: int = 500_000_000,
    overlap_comm: bool = True,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step.

    Args:
        ratio: the part of the sub-groups, from 0 to 1, that the CPU steps; as few as the device's memory allows if
            left out (DeepSpeed's default is 1, and its documentation's example 0.3).
        sub_group_size: parameters of a sub-group, rounded up to whole layers.
        reduce_bucket_size: parameters whose gradients gather on the device before they leave.
        overlap_comm: gradients have a stream of their own (DeepSpeed's default for stage 3).
    """
    workload, groups = with_master(workload), sub_groups(model, sub_group_size)
    stream = Stream.D2H if overlap_comm else Stream.COMPUTE

    def build(on_gpu: int) -> Program:
        """The step with that many sub-groups on the GPU."""
        p = Program(model, workload)
        stepped = [i for group in groups[:on_gpu] for i in group]
        step_on_device(p, stepped)
        weights = {i: p.buffer(f"device.{p.weight(i)}") for i in model.layers}
        reduction = Reduction(p, stream=stream, on_device=stepped)
        bucket = Bucket(p, size=reduce_bucket_size, count=2, leave=reduction.reduce)
        kept = kept_as(model, activations, every=every)

        def end(m: int) -> None:
            bucket.flush(m)
            reduction.finish()

        micro_batches(p, weights=weights.get, grad=bucket.grad, done=bucket.add, end=end, kept=kept)
        for group in groups[:on_gpu]:
            optimizer_step(p, group, stream=Stream.COMPUTE)
        for group in groups[on_gpu:]:
            optimizer_step(p, group)
            upload(p, group, weights)
        return p

    if ratio is not None:
        from_0_to_1("a part of the sub-groups", ratio=ratio)
        return build(int((1 - ratio) * len(groups)))  # DeepSpeed's rounding
    fitting = bisect_right(range(len(groups) + 1), 0, key=lambda n: -build(n).device_room(memory))
    return build(max(fitting - 1, 0))

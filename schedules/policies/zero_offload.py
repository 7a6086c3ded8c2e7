"""DeepSpeed ZeRO-2 with the optimizer offloaded to the CPU (ZeRO-Offload): weights stay on the GPU.

What it does. Gradients gather in a bucket during the backward. When it is full they leave one after another: the
host waits for the check that each is finite, it is cast to fp32 on the device and copied down, 4 bytes per
parameter. With overlap_comm=false (the default for stage 2) that queues on the compute stream, so that nothing
overlaps. After the backward the host alone makes three passes over the whole model: scale, Adam, cast to a
2-byte copy; then all weights go up, queued before the next forward. Under accumulation every micro-batch takes
its gradients down as they are; from the second on the sum comes up first and is added to on the device.

Where states live, in bytes per parameter. Host (18): fp32 master 4, fp32 gradients 4, moments 8, the 2-byte copy of the
weights 2; under accumulation 2 more for the sum. All precisions but fp32 are built as bf16_fp32, unless master=weights,
which is DeepSpeed's bf16_master_weights_and_grads: then master and gradients are bf16, gradients add up where the
optimizer takes them, nothing is widened, and moments stay fp32 (14), or at precision bf16_16bit are bf16 as well (10).
With fp32 weights the master is another copy (20). Device: weights 2, one bucket (two with overlap_comm), the gradient
that backward is writing, one sum and one fp32 gradient in transit.

Exact in its training. Approximated: a layer goes as a whole where DeepSpeed goes by tensor; embedding and head have
gradient buffers beside the bucket; Adam writes the compute-type weights itself and the cast reads and writes them in
place, 36 bytes per parameter together where DeepSpeed has 34; the norm, which DeepSpeed always takes, and the check
that gradients are finite are no work here, but for the norm with gradient clipping. That check waits, there, for the
copies queued before it as well: with overlap_comm less overlaps than here. The paper's delayed update (one step stale)
is not in the released code, and not here.
Source: ZeRO-Offload, arXiv 2101.06840; DeepSpeed edaa722 (0.19.6 development), runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.deepspeed import Bucket, Master, begin, flat_grad, micro_batches, optimizer_step
from schedules.kept_activations import Activations, kept_as
from schedules.model import ModelSpec
from schedules.op import Kind, Stream
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    overlap_comm: bool = False,
    reduce_bucket_size: int = 500_000_000,
    master: Master = "fp32",
    activations: Activations = "recompute",
    every: int = 1,
    reentrant: bool = False,
) -> Program:
    """Build the step.

    Args:
        overlap_comm: gradients have a stream of their own.
        reduce_bucket_size: parameters whose gradients gather on the device before they leave.
        master: the optimizer's own weights and gradients are fp32, or of the weights' type.
        reentrant: torch's reentrant checkpoints, which run a block again to its end (LLaMA-Factory's default).
    """
    kept = kept_as(model, activations, every=every, whole=reentrant)
    p, wide = begin(model, workload, master), master == "fp32"
    stream = Stream.D2H if overlap_comm else Stream.COMPUTE
    weights = {i: p.buffer(f"device.{p.weight(i)}") for i in model.layers}
    widened, total = p.buffer("wide") if wide else None, p.buffer("sum")
    last = workload.microbatches[-1]

    def sums(i: int) -> str:
        """Where layer i's gradients add up on the host."""
        return p.home(p.grad(i)) if wide else flat_grad(p, i)[0]

    def leave(grads: Sequence[tuple[int, str]], m: int) -> None:
        for i, buffer in grads:
            grad = p.grad(i)
            if m > 0:
                p.prefetch(grad, into=total, out_of=sums(i), stream=stream)
                p.accumulate(i, out_of=total, into=buffer, stream=stream)
            if workload.accumulation > 1:
                p.offload(grad, out_of=buffer, into=sums(i), stream=stream)
            if m == last:
                hand_over(i, buffer)

    def hand_over(i: int, buffer: str) -> None:
        """The whole gradient of layer i goes down, to the optimizer."""
        grad, wide_grad = p.grad(i), p.grad(i, wide=True)
        if workload.grad_clip is not None:
            p.norm([(buffer, grad)], stream=stream, name=f"N.{model.layer_name(i)}")
        p.synchronize((buffer, grad), kind=Kind.OFFLOAD, name=f"H.{model.layer_name(i)}")
        if widened is None:
            p.offload(grad, out_of=buffer, into=sums(i), stream=stream)
        else:
            p.cast((buffer, grad), (widened, wide_grad), stream=stream)
            p.offload(wide_grad, out_of=widened, stream=stream)

    bucket = Bucket(p, size=reduce_bucket_size, count=2 if overlap_comm else 1, leave=leave)

    def end(m: int) -> None:
        bucket.flush(m)
        if overlap_comm or m == last:
            landed = p.grad(model.embed, wide=wide and m == last)
            at = p.home(landed) if wide else sums(model.embed)
            p.synchronize((at, landed), kind=Kind.OFFLOAD, name="H.backward")

    micro_batches(p, weights=weights.get, grad=bucket.grad, done=bucket.add, end=end, kept=kept)
    optimizer_step(p, model.layers, wide=wide)
    for i in model.layers:
        p.prefetch(p.weight(i), into=weights[i], stream=Stream.COMPUTE)
    return p

"""DeepSpeed ZeRO-Infinity on one GPU: ZeRO-3 with the optimizer state, and on request the weights, on NVMe.

What it does. Forward and backward are ZeRO-3's with CPU offload (zero3_offload), but the fp32 gradients go on to
the drive: the host waits for each copy into a host buffer and queues the write. After the backward the host
waits for all writes. Then, sub-group by sub-group: read master, moments and fp32 gradients; scale, Adam, cast,
each a pass of the host; write master and moments. As released all this is serial. pipeline_read reads the next
sub-group while the present one is stepped; pipeline_write leaves its write under way until the next one's.
With params_on_nvme weights are read into a pool of host buffers for each use, those of the two layers after
the one that is fetched ahead of time, and written after each sub-group, the host waiting.

Where states live, in bytes per parameter. NVMe: fp32 master 4, moments 8, fp32 gradients 4. Host: weights 2 (with
params_on_nvme on NVMe, and the pool on the host), gradient sum 2, and 16 for each sub-group in flight. Master and
moments are always fp32: all precisions but fp32 are built as bf16_fp32. With fp32 weights the master is another copy.
On the device what zero3_offload has.

Exact in its training. Approximated, beside what zero3_offload says: sub-groups are whole layers, so that 16 bytes are
for the largest of them; gradients gather for the drive in a quarter of those (one layer, one write) where DeepSpeed
fills all of them; with params_on_nvme Adam reads the weights that it replaces, 2 bytes per parameter that DeepSpeed
does not read; the master beside fp32 weights stays on the drive, 4 bytes less each way; the drive gives its full rate,
which DeepSpeed's default I/O settings do not.
Source: ZeRO-Infinity, arXiv 2104.07857; DeepSpeed edaa722 (0.19.6 development), runtime/swap_tensor.
"""

from __future__ import annotations

from schedules.deepspeed import Fetch, Reduction, micro_batches, reserve_master, sub_groups, with_master
from schedules.kept_activations import Activations, kept_as
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.swap import Swap
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    params_on_nvme: bool = False,
    pipeline_read: bool = False,
    pipeline_write: bool = False,
    sub_group_size: int = 1_000_000_000,
    overlap_comm: bool = True,
    activations: Activations = "recompute",
    every: int = 1,
    max_live: int = 1_000_000_000,
) -> Program:
    """Build the step.

    Args:
        params_on_nvme: the weights live on the drive too.
        pipeline_read: read the next sub-group beside the step of the present one.
        pipeline_write: wait for a sub-group's write only before the next one's.
        sub_group_size: parameters of a sub-group, rounded up to whole layers.
        overlap_comm: fetches and gradients have streams of their own (DeepSpeed's default for stage 3).
        max_live: stage3_max_live_parameters, how many parameters may be on the device at once.
    """
    kept = kept_as(model, activations, every=every)
    p = Program(model, with_master(workload))
    reserve_master(p, model.layers, Tier.NVME)
    swap = Swap(p, sub_groups(model, sub_group_size), params_on_nvme, sets=1 + pipeline_read + pipeline_write)
    reducing = Stream.D2H if overlap_comm else Stream.COMPUTE
    fetch = Fetch(
        p,
        kept=kept,
        stream=Stream.H2D if overlap_comm else Stream.COMPUTE,
        max_live=max_live,
        stage=swap.stage if params_on_nvme else None,
    )
    buckets = p.slots("bucket", 2)
    tied = p.buffer("embed.grad") if model.tie_word_embeddings else None
    reduction = Reduction(p, stream=reducing, land=lambda i, buffer: swap.land(i, buffer, reducing))

    micro_batches(
        p,
        weights=fetch.weights,
        grad=lambda i: tied if tied and i == model.embed else buckets.next(),
        done=lambda i, bucket, m: reduction.reduce([(i, bucket)], m),
        end=lambda _: reduction.finish(),
        kept=kept,
    )
    swap.step(pipeline_read, pipeline_write)
    return p

"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the CPU, on one GPU.

What it does. The weights of the next layer are fetched while the present one computes, and the host waits
for each layer's before it launches that layer. With checkpointing (the usual way to run it) a block keeps its
input and runs forward again before its backward, so that weights cross the link twice per micro-batch. A
gradient crosses it three times: down, the same values up again, and down widened to fp32; at most two are
under way, the host waits for the older before a third. After the last backward the host waits for all of
them and then, alone, makes three passes over host memory per layer: scale, Adam, cast to the compute type.
With overlap_comm=false fetches and gradients queue on the compute stream, and nothing overlaps.
Under accumulation later micro-batches bring the sum up, add on the device and take it down again; fp32
gradients are made by the last one only.

Where states live, in bytes per parameter, all on the host (20): weights 2, gradient sum 2, fp32 gradients 4, fp32
master 4, moments 8. All precisions but fp32 are built as bf16_fp32, unless master=weights, which is DeepSpeed's
bf16_master_weights_and_grads: then master and gradients are bf16, nothing is widened, and moments stay fp32 (16), or at
precision bf16_16bit are bf16 as well, its bf16_optimizer_states (12). With fp32 weights the master is another copy
(24). On the device: slots for max_live parameters, two gradient buckets, one gradient on its way back and one widened.

Exact in its training. Approximated: a layer is fetched and its gradient handed over as a whole, where DeepSpeed goes
by module and by bucket, and waits before a fourth (0.3 % faster at most); tensors below its persistence
threshold are not resident; embedding and head have device buffers of their own, and the embedding is not fetched
again for its backward; Adam writes the compute-type weights itself and the cast reads and writes them in place, 36
bytes per parameter together where DeepSpeed has 34; the norm is computed only with gradient clipping. Without pinned
memory the host waits for every copy, but copies are as fast as pinned ones, which they are not: expect
pin_memory=false to be predicted too fast.
Source: DeepSpeed edaa722 (0.19.6 development), stage3.py, partitioned_param_coordinator.py; for older versions
its pull request 8207; master=weights came with its pull request 7700 (December 2025).
"""

from __future__ import annotations

from typing import Literal

from schedules.deepspeed import Fetch, Master, Reduction, begin, micro_batches, optimizer_step, sub_groups
from schedules.kept_activations import Activations, kept_as
from schedules.model import ModelSpec
from schedules.op import Stream
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    overlap_comm: bool = True,
    activations: Activations = "recompute",
    every: int = 1,
    reentrant: bool = False,
    max_live: int = 1_000_000_000,
    prefetch: int = 1,
    sub_group_size: int = 1,
    pin_memory: bool = True,
    version: Literal["0.19.5", "0.19.4"] = "0.19.5",
    master: Master = "fp32",
) -> Program:
    """Build the step.

    Args:
        overlap_comm: fetches and gradients have streams of their own (DeepSpeed's default for stage 3).
        reentrant: torch's reentrant checkpoints, which run a block again to its end (LLaMA-Factory's default).
        max_live: stage3_max_live_parameters, how many parameters may be on the device at once.
        prefetch: layers fetched ahead: stage3_prefetch_bucket_size, 5e7 parameters unless set, in whole layers.
        sub_group_size: parameters that each pass of the optimizer takes at once, rounded up to whole layers.
        pin_memory: host memory is pinned (the default since 0.19.5); otherwise the host waits for every copy.
        version: up to 0.19.4 the host waits for each gradient's fp32 copy.
        master: the optimizer's own weights and gradients are fp32, or of the weights' type.
    """
    kept = kept_as(model, activations, every=every, whole=reentrant)
    p, wide = begin(model, workload, master), master == "fp32"
    fetching = Stream.H2D if overlap_comm else Stream.COMPUTE
    reducing = Stream.D2H if overlap_comm else Stream.COMPUTE
    fetch = Fetch(p, kept=kept, stream=fetching, max_live=max_live, ahead=prefetch, blocking=not pin_memory)
    buckets = p.slots("bucket", 2)
    reduction = Reduction(p, stream=reducing, blocking=not pin_memory, blocking_wide=version == "0.19.4", wide=wide)
    tied = p.buffer("embed.grad") if model.tie_word_embeddings else None

    micro_batches(
        p,
        weights=fetch.weights,
        grad=lambda i: tied if tied and i == model.embed else buckets.next(),
        done=lambda i, bucket, m: reduction.reduce([(i, bucket)], m),
        end=lambda _: reduction.finish(),
        kept=kept,
    )
    for group in sub_groups(model, sub_group_size):
        optimizer_step(p, group, wide=wide)
    return p

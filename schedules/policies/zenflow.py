"""ZenFlow: the important part is updated on the device, the rest on the CPU beside the whole next window. Stale.

What it does. Weights live on the device. A step is a window, of as many micro-batches as ZenFlow has steps between two
updates on the CPU (update_interval). After each backward the gradients of the less important part go to the host and
are added up there; those of the important part stay on the device, add up there, and are applied there at the end of
the window. A CPU optimizer in a process of its own applies the sums of the window before while this window runs. At the
end of a window the host waits for that update, and its new weights go up; then it scales the gradients of this window,
clipped or not, for the next. So the less important weights miss the update of one window: they are stale by one, the
important ones are not.

Where states live, in bytes per parameter at bf16. Device: weights 2 and, of the important part, gradient 2, fp32 master
4 and moments 8. Host, of the rest: the window's sum of gradients 2, fp32 gradients 4, fp32 master 4, moments 8, weights
2, and a copy of them that goes up, 2. All precisions but fp32 are built as bf16_fp32.

Stale, not exact, and declared so. After the paper, with overlap_step on (off in DeepSpeed unless set: then the host
waits for each update). Approximated: importance is by column, chosen again every few steps by the norm of its gradient;
here it is by block, evenly spread and fixed, embedding and head being less important. The important part is updated
once a window, where ZenFlow updates it in every step of it: an optimizer on the device takes little time. A window's
sum is cast to fp32 when it ends, where ZenFlow's two buffers take turns. The norm, which ZenFlow always takes, of each
gradient on the device before it leaves, is taken on the CPU, and only with clipping. Warm-up rounds of ordinary offload
are left out.
The released code does more. All gradients leave, the important ones too, on the compute stream unless overlap_comm is
set; from the second micro-batch of a window on the sum comes up, is added to on the device and goes down again, and
at the end it goes down once more in fp32. For every parameter the host holds 34 bytes (36 with a sum): master 4 and
the copy that goes up 4, two fp32 gradients 8, two sets of moments 16, which take turns, and the weights 2. The
important part has no master on the device, and moments of the weights' type, 4.
Source: ZenFlow, arXiv 2505.12242; DeepSpeed edaa722 (0.19.6 development), runtime/zenflow
(zenflow_stage_1_and_2.py, zenflow_utils.py), csrc/adam/cpu_adam_impl.cpp.
"""

from __future__ import annotations

from schedules.deepspeed import with_master
from schedules.end_layers import end_buffers
from schedules.kept_activations import Activations, from_0_to_1, kept_as
from schedules.model import ModelSpec
from schedules.op import Kind, Stream, Tier
from schedules.program import Program
from schedules.sweep import spread, sweep
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    topk_ratio: float = 0.1,
    activations: Activations = "recompute",
    every: int = 1,
) -> Program:
    """Build the step, which is a window.

    Args:
        topk_ratio: the fraction of the blocks, from 0 to 1, that are important.
    """
    from_0_to_1("a fraction of the blocks", topk_ratio=topk_ratio)
    workload = with_master(workload)
    kept = kept_as(model, activations, every=every)
    p = Program(model, workload, staleness=1)
    important = spread(model.blocks, round(topk_ratio * len(model.blocks)))
    rest = [i for i in model.layers if i not in important]
    used = {i: p.buffer(f"device.used.{i}") for i in rest}  # what a window computes with
    p.keep_on_device(*(t for i in important for t in (p.weight(i), p.grad(i), p.state(i))))
    uploaded = {i: p.buffer(f"host.uploaded.{p.weight(i)}", Tier.HOST) for i in rest}
    sums = {i: p.buffer(f"host.sum.{p.grad(i)}", Tier.HOST) for i in rest}  # grow in this window
    bucket, slab = p.slots("bucket", 2), p.slots("slab", 2, Tier.HOST)
    ends = end_buffers(p, "grad")
    due = {i: p.at_home(p.grad(i, wide=True)) for i in rest}

    def grad(i: int) -> str | None:
        return (ends.get(i) or bucket.next()) if i in used else None

    def done(i: int, buffer: str) -> None:
        if i in used:
            landed = p.offload(p.grad(i), out_of=buffer, into=slab.next())
            p.discard(buffer)  # the sum grows on the host
            p.accumulate(i, out_of=landed, into=sums[i])

    for m in workload.microbatches:
        sweep(p, [m], weights=used.get, grad=grad, done=done, kept=kept)
    p.synchronize(*((sums[i], p.grad(i)) for i in rest), kind=Kind.OFFLOAD, name="H.window")
    if workload.grad_clip is not None:
        p.norm([(sums[i], p.grad(i)) for i in rest])
        for i in sorted(important):
            p.norm([p.at_home(p.grad(i))], stream=Stream.COMPUTE, name=f"N.{i}")
    for i in sorted(important):
        p.update(i, stream=Stream.COMPUTE)
    for i in rest:  # what the update beside this window has made of the window before
        p.cast(p.at_home(p.weight(i)), (uploaded[i], p.weight(i)), stream=Stream.CPU)
        p.prefetch(p.weight(i), into=used[i], out_of=uploaded[i])
    for i in rest:
        p.cast((sums[i], p.grad(i)), due[i], stream=Stream.CPU)
        p.discard(sums[i])
        p.scale(i, grad=due[i], stream=Stream.HOST)
    for i in rest:
        p.update(i, grad=due[i], scaled=True)
    return p

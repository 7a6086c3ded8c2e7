"""MegaTrain as released (commit 919520f, single GPU): what its code does in a step, the waits included.

What it does. Layer i goes into flat device buffer i % 2 and from there, by a copy on the compute stream, into
template i % 2, where it computes. Every micro-batch begins cold: the first load is waited for. Forward keeps
a hidden state every `checkpoint` layers; backward runs each group forward again for its hidden states only
(the group's last output is never read), then loads each layer a third time, runs it forward with autograd
and backward: 5 forwards' worth of compute and 3 loads per layer. Gradients go to `slabs` pinned slabs, and a
single CPU thread adds them to the host's. A micro-batch ends with a device-wide wait and the drain of that
thread. Then, with the GPU idle and all on the issuing thread: clip (norm, scale), Adam, copy of all weights
into their pinned flats, embedding and head to the device from pageable memory, gradients zeroed.

Where states live, in bytes per parameter at bf16, all on the host: weights 2, their pinned flats 2,
gradients 2, moments 8. On the device: two flats, two templates, two gradients, embedding, norm and head, and
the logits of a micro-batch, all kept for one backward; a block's activations follow in their place.

Layers are Hugging Face's, run op by op: norms, rotary embedding and gate move more through device memory than
fused kernels would (fused=true).

With unpadding_sync (the released configuration) every layer's forward makes the host wait, because the
attention mask is unpadded inside it.

Exact in its training. Approximated: that wait is for the whole layer, not its front part; one copy per layer
for one per tensor; the copies' wait for an older gradient is a wait for the device buffer of that gradient;
the loss makes the host wait once, not per 128 tokens. The CPU thread stores each gradient into newly allocated
memory (zero_grad drops the old one): these bytes are marked fresh, which decides small steps on hosts with pages
of 4 KiB. Passes of the host over all gradients and weights are counted at DRAM bandwidth, where a user's log (14B
on an MI355X) has clipping seven times as slow.
Source: DLYuanGod/MegaTrain 919520f, infinity/model/cpu_master.py and examples/sft/train.py.
"""

from __future__ import annotations

from schedules.kept_activations import at_least_1
from schedules.model import ModelSpec
from schedules.program import Program
from schedules.released_step import ReleasedStep
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    checkpoint: int = 4,
    slabs: int = 12,
    unpadding_sync: bool = True,
    fused: bool = False,
) -> Program:
    """Build the step.

    Args:
        checkpoint: layers between two hidden states kept by the forward.
        slabs: pinned host buffers between the gradient copies and the CPU thread.
        unpadding_sync: the host waits inside every layer's forward.
        fused: norms, rotary embedding and gated MLP in fused kernels; the released code runs Hugging Face's layers
            op by op.
    """
    at_least_1("layers between two checkpoints", checkpoint=checkpoint)
    step = ReleasedStep(model, workload, slabs, unpadding_sync, fused)
    for m in workload.microbatches:
        step.forward(m, checkpoint)
        step.backward(m, checkpoint)
    step.finish()
    return step.program

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
gradients 2, moments 8. On the device: two flats, two templates, two gradients, embedding, norm and head, and the
logits of a micro-batch, which all chunks of the loss keep for one backward.

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
Source: infinity/model/cpu_master.py and examples/sft/train.py.
"""

from __future__ import annotations

from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.op import Kind, Stream, Tier
from schedules.program import Program
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
    if checkpoint < 1:
        raise ProgramError(f"checkpoint: layers between two checkpoints must be at least 1, not {checkpoint}")
    step = _Step(model, workload, slabs, unpadding_sync, fused)
    for m in workload.microbatches:
        step.forward(m, checkpoint)
        step.backward(m, checkpoint)
    step.finish()
    return step.program


class _Step:
    """The step under construction: its fixed buffers, named as they are used by layers i % 2."""

    def __init__(self, model: ModelSpec, workload: Workload, slabs: int, unpadding_sync: bool, fused: bool) -> None:
        self.program = p = Program(model, workload, fused=fused)
        self.wait = unpadding_sync
        self.flats = [p.buffer(f"flat{b}") for b in range(2)]
        self.templates = [p.buffer(f"template{b}") for b in range(2)]
        self.pinned = {i: p.buffer(f"pinned.{p.weight(i)}", Tier.HOST) for i in model.blocks}
        self.grads, self.slabs = p.slots("grad", 2), p.slots("slab", slabs, Tier.HOST)
        ends = (model.embed, model.head)
        self.weights = {i: p.buffer(f"{model.layer_name(i)}.weight") for i in ends}
        self.own = {i: p.buffer(f"{model.layer_name(i)}.grad") for i in ends}
        self.staging = {i: p.buffer(f"{model.layer_name(i)}.slab", Tier.HOST) for i in ends}
        logits = workload.tokens_per_microbatch * model.vocab_size * workload.bytes.activation
        p.reserve("logits", logits)
        self.pending: dict[str, int] = {}  # slab -> the layer whose gradient the CPU thread takes from it

    def load(self, i: int) -> None:
        """LOAD: the host waits for the flat's previous copy, then queues this one."""
        p, flat = self.program, self.flats[i % 2]
        if (held := p.holds(flat)) is not None:
            p.synchronize((flat, held), kind=Kind.PREFETCH, name=f"H.{flat}")
        p.prefetch(p.weight(i), into=flat, out_of=self.pinned[i])

    def unflatten(self, i: int) -> str:
        """UNFLAT: flat to template on the compute stream, which frees the flat before the layer computes."""
        p = self.program
        flat, template = self.flats[i % 2], self.templates[i % 2]
        return p.prefetch(p.weight(i), into=template, out_of=flat, stream=Stream.COMPUTE)

    def collect(self, i: int, buffer: str) -> None:
        """COLLECT: take a slab, waiting for the CPU thread if there is none; copy; queue the addition."""
        p = self.program
        slab = self.staging[i] if i in self.staging else self.slabs.next()
        if (before := self.pending.pop(slab, None)) is not None:
            p.synchronize((p.home(p.grad(before)), p.grad(before)), name=f"H.{slab}")
        p.offload(p.grad(i), out_of=buffer, into=slab)
        p.discard(buffer)
        p.accumulate(i, out_of=slab, fresh=True)
        self.pending[slab] = i

    def forward(self, m: int, checkpoint: int) -> None:
        """S1: embedding and blocks, the next load queued before each block."""
        p, blocks = self.program, self.program.model.blocks
        p.forward(p.model.embed, m, weights=self.weights[p.model.embed])
        self.load(0)
        p.synchronize((self.flats[0], p.weight(0)), kind=Kind.PREFETCH, name="H.cold")
        self.unflatten(0)
        for i in blocks:
            if i + 1 in blocks:
                self.load(i + 1)
            template = self.unflatten(i)
            p.forward(i, m, weights=template, keep="nothing" if i % checkpoint else "input", blocking=self.wait)

    def backward(self, m: int, checkpoint: int) -> None:
        """S2 to S6: loss, blocks group by group, embedding, and the wait for everything."""
        p, embed, head = self.program, self.program.model.embed, self.program.model.head
        weights, own = self.weights, self.own
        p.loss(
            m,
            weights=weights[head],
            grad=own[head],
            embed_weights=weights[embed],
            embed_grad=own[embed],
            blocking=True,
        )
        self.collect(head, own[head])
        for start in reversed(p.model.blocks[::checkpoint]):
            group = p.model.blocks[start : start + checkpoint]
            for i in group:
                self.load(i)
                template = self.unflatten(i)
                p.recompute(i, m, weights=template, keep="input", output=True, blocking=self.wait)
            p.free(p.output(group[-1], m))
            for i in reversed(group):
                self.load(i)
                template = self.unflatten(i)
                p.recompute(i, m, weights=template, blocking=self.wait)
                p.backward(i, m, weights=template, grad=self.grads.next())
                self.collect(i, self.grads.current)
        p.backward(embed, m, grad=own[embed])
        self.collect(embed, own[embed])
        p.synchronize((self.staging[embed], p.grad(embed)), kind=Kind.OFFLOAD, name="H.device")
        p.synchronize((p.home(p.grad(embed)), p.grad(embed)), name="H.drain")
        self.pending.clear()

    def finish(self) -> None:
        """S7: the host alone works."""
        p, layers = self.program, self.program.model.layers
        grads = {i: (p.home(p.grad(i)), p.grad(i)) for i in layers}
        if p.workload.grad_clip is not None:
            p.norm(grads.values(), stream=Stream.HOST)
            for i in layers:
                p.scale(i, grad=grads[i], stream=Stream.HOST)
        for i in layers:
            p.update(i, scaled=True, stream=Stream.HOST)
        for i in p.model.blocks:
            p.cast((p.home(p.weight(i)), p.weight(i)), (self.pinned[i], p.weight(i)), stream=Stream.HOST)
        for i, buffer in self.weights.items():
            p.prefetch(p.weight(i), into=buffer, blocking=True)
        for i in layers:
            p.zero(i, grad=grads[i], stream=Stream.HOST)

"""The parts of the released MegaTrain's step, named as in its code: LOAD, UNFLAT, COLLECT, and the stages S1 to S7."""

from __future__ import annotations

from schedules.end_layers import end_buffers
from schedules.model import ModelSpec
from schedules.op import Kind, Phase, Stream, Tier
from schedules.program import Program
from schedules.workload import Workload
from schedules.workspace import workspace_bytes


class ReleasedStep:
    """The step under construction: its fixed buffers, named as they are used by layers i % 2."""

    def __init__(self, model: ModelSpec, workload: Workload, slabs: int, unpadding_sync: bool, fused: bool) -> None:
        self.program = p = Program(model, workload, fused=fused)
        self.wait = unpadding_sync
        self.flats = [p.buffer(f"flat{b}") for b in range(2)]
        self.templates = [p.buffer(f"template{b}") for b in range(2)]
        self.pinned = {i: p.buffer(f"pinned.{p.weight(i)}", Tier.HOST) for i in model.blocks}
        self.grads, self.slabs = p.slots("grad", 2), p.slots("slab", slabs, Tier.HOST)
        self.weights, self.own = end_buffers(p, "weight"), end_buffers(p, "grad")
        self.staging = end_buffers(p, "slab", Tier.HOST)
        p.reserve("logits", _logits_beyond_a_block(p))
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
            p.synchronize(p.at_home(p.grad(before)), name=f"H.{slab}")
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
                p.recompute(i, m, weights=template, output=True, blocking=self.wait)
                p.free(p.output(i, m))
                p.backward(i, m, weights=template, grad=self.grads.next())
                self.collect(i, self.grads.current)
        p.backward(embed, m, grad=own[embed])
        self.collect(embed, own[embed])
        p.synchronize((self.staging[embed], p.grad(embed)), kind=Kind.OFFLOAD, name="H.device")
        p.synchronize(p.at_home(p.grad(embed)), name="H.drain")
        self.pending.clear()

    def finish(self) -> None:
        """S7: the host alone works."""
        p, layers = self.program, self.program.model.layers
        grads = {i: p.at_home(p.grad(i)) for i in layers}
        if p.workload.grad_clip is not None:
            p.norm(grads.values(), stream=Stream.HOST)
            for i in layers:
                p.scale(i, grad=grads[i], stream=Stream.HOST)
        for i in layers:
            p.update(i, scaled=True, stream=Stream.HOST)
        for i in p.model.blocks:
            p.cast(p.at_home(p.weight(i)), (self.pinned[i], p.weight(i)), stream=Stream.HOST)
        for i, buffer in self.weights.items():
            p.prefetch(p.weight(i), into=buffer, blocking=True)
        for i in layers:
            p.zero(i, grad=grads[i], stream=Stream.HOST)


def _logits_beyond_a_block(p: Program) -> int:
    """Bytes by which the loss, which keeps a micro-batch's logits for its backward, exceeds what a block's backward
    takes later: torch gives it the same memory. The larger workspace of the two is counted apart from buffers.
    """
    model, workload, block = p.model, p.workload, p.model.blocks[-1]
    logits = workload.tokens_per_microbatch * model.vocab_size * workload.bytes.activation
    of_loss = workspace_bytes(model, model.head, Phase.LOSS, workload)
    of_block = workspace_bytes(model, block, Phase.BACKWARD, workload)
    return max(0, logits + of_loss - p.nbytes(p.saved(block, 0)) - max(of_loss, of_block))

"""Stream each layer once for all micro-batches; update on the CPU as gradients land. Ours.

What it does. Weights arrive through a ring of device slots while other layers compute. A layer runs all
micro-batches before the next one comes, so that weights and gradients cross the link once per step and not
once per micro-batch (the vertical order of GreedySnake, arXiv 2512.17570); order=microbatches is the usual
order, for comparison. A gradient leaves as soon as it is whole, and its update runs on the CPU beside the
rest of the backward. The last `keep` blocks keep their activations; the others keep their input and run
forward again just before their backward. Nothing waits for a whole step to end: the next forward starts as
soon as its first layers are updated.

Where states live, in bytes per parameter at bf16. Host: weights 2, optimizer state 8, and a gradient, 2, for
the layers whose update must wait; slabs serve the others. Device: the slots, and of embedding and head a copy
of the weights, 2, and the gradients. With resident=n the first n layers, counted from the embedding, live on
the device with gradient and state, 12, and are updated there: the next forward runs on them while the CPU
still updates.

Order of updates. Gradients land last layer first; the next forward needs the first layer first. Updated as
they land, all must be done before the next forward begins. `defer` picks that many blocks, evenly spread,
and updates them after all others, first block first, beside the next forward. With gradient clipping no
update may start before the global norm is known, and all layers are updated in that order.

Exact in its training; nothing is approximated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    slots: int = 2,
    grad_slots: int = 2,
    slabs: int = 4,
    keep: int | None = None,
    defer: int = 0,
    resident: int = 0,
    order: Literal["layers", "microbatches"] = "layers",
) -> Program:
    """Build the step.

    Args:
        slots: device buffers for streamed weights.
        grad_slots: device buffers for gradients on their way out.
        slabs: host buffers in which gradients wait for the optimizer.
        keep: how many of the last blocks keep their activations; as many as fit the device if left out.
        defer: how many blocks are updated beside the next forward. Has no meaning with gradient clipping.
        resident: how many of the first layers, the embedding being one, live on the device.
        order: all micro-batches of a layer, or all layers of a micro-batch.
    """
    groups = [list(workload.microbatches)] if order == "layers" else [[m] for m in workload.microbatches]

    def build(keep: int) -> Program:
        step = _Step(model, workload, slots, grad_slots, slabs, defer, resident, visits=len(groups))
        step.load_first()
        for group in groups:
            step.run(group, keep, first=group is groups[0], last=group is groups[-1])
        for i in step.order:
            if i in step.late:
                step.update(i)
        return step.program

    return build(build(0).blocks_that_fit(memory, copies=len(groups[0])) if keep is None else keep)


class _Step:
    """The step under construction: its rings, and where each layer's weights and gradient are."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        slots: int,
        grad_slots: int,
        slabs: int,
        defer: int,
        resident: int,
        visits: int,
    ) -> None:
        self.program = p = Program(model, workload)
        self.clip = workload.grad_clip is not None
        self.resident = model.layers[:resident]
        p.keep_on_device(*(t for i in self.resident for t in (p.weight(i), p.grad(i), p.state(i))))
        self.ring = p.slots("weight", slots)
        self.grads = p.slots("grad", grad_slots)
        self.slabs = p.slots("slab", slabs, Tier.HOST)
        # embedding and head have buffers of their own: a slot of the ring need not be as large as they are
        ends = [i for i in (model.embed, model.head) if i not in self.resident]
        self.copy = {i: p.buffer(f"{model.layer_name(i)}.weight") for i in ends}
        # the head's gradient has long left when the embedding's comes, unless one of them is still adding up
        shared = visits == 1 and not model.tie_word_embeddings
        self.own = {i: p.buffer("ends.grad" if shared else f"{model.layer_name(i)}.grad") for i in ends}

        self.streamed = [i for i in model.blocks if i not in self.resident]
        self.ahead = self.streamed[:slots]
        self.visits = deque([*self.streamed, *reversed(self.streamed)] * visits)
        self.loaded: deque[str] = deque()
        # updated after everything has landed, first layer first (its gradient lands before the embedding's)
        self.late = set(model.layers) if self.clip else _spread(self.streamed, defer)
        landing = [model.head, *reversed(model.blocks), model.embed]
        first = self.streamed[:1]
        self.order = [i for i in landing if i not in self.late]
        self.order += sorted(self.late, key=lambda i: (i not in first, i))

    def load_first(self) -> None:
        """Load what the forward begins with in the order in which the step before updates it.

        A queue is first in, first out: so nothing stands in it behind weights that are not ready.
        """
        p = self.program
        for i in self.order:
            if i in self.ahead:
                p.load(p.weight(i), self.ring)
            elif i in self.copy and (i not in self.late or i == p.model.embed):
                p.prefetch(p.weight(i), into=self.copy[i])

    def slot(self, i: int) -> str | None:
        """The slot with block i's weights, those of the following visits being on their way."""
        if i in self.resident:
            return None
        p = self.program
        while self.visits and len(self.loaded) < len(self.ahead):
            self.loaded.append(p.load(p.weight(self.visits.popleft()), self.ring))
        return self.loaded.popleft()

    def run(self, group: Sequence[int], keep: int, *, first: bool, last: bool) -> None:
        """Forward and backward of a group of micro-batches."""
        p, embed, head = self.program, self.program.model.embed, self.program.model.head
        kept = range(max(head - keep, 0), head)
        for m in group:
            p.forward(embed, m, weights=self.copy.get(embed))
        for i in p.model.blocks:
            slot = self.slot(i)
            for m in group:
                p.forward(i, m, weights=slot, keep="all" if i in kept else "input")
        if first and head in self.copy and head in self.late:
            p.prefetch(p.weight(head), into=self.copy[head])
        for m in group:
            table, sums = self.copy.get(embed), self.own.get(embed)
            p.loss(m, weights=self.copy.get(head), grad=self.own.get(head), embed_weights=table, embed_grad=sums)
        if last:
            self.land(head, self.own.get(head))
        for i in reversed(p.model.blocks):
            slot = self.slot(i)
            grad = None if i in self.resident else self.grads.next()
            for m in group:
                if i not in kept:
                    p.recompute(i, m, weights=slot)
                p.backward(i, m, weights=slot, grad=grad)
            if i not in self.resident:
                self.land(i, grad, first=first, last=last)
            elif last:
                self.land(i, grad)
        for m in group:
            p.backward(embed, m, grad=self.own.get(embed))
        if last:
            self.land(embed, self.own.get(embed))

    def land(self, i: int, buffer: str | None, *, first: bool = True, last: bool = True) -> None:
        """Take layer i's gradient home and, once it is complete, put it to use.

        `buffer` holds the sum over one group of micro-batches, the `first` or `last` of the step or both.
        """
        p, grad = self.program, self.program.grad(i)
        home = buffer = buffer or p.home(grad)
        if i not in self.resident:
            straight = first and last and i in self.streamed and i not in self.late
            home = p.offload(grad, out_of=buffer, into=None if first and not straight else self.slabs.next())
            if not first:
                p.accumulate(i, out_of=home)
                home = p.home(grad)
        if last and self.clip:
            # measured on the device where it is complete there: the CPU has enough to do
            on_device = first
            stream = Stream.COMPUTE if on_device else Stream.CPU
            p.norm([(buffer if on_device else home, grad)], stream=stream, name=f"N.{p.model.layer_name(i)}")
        if last and i not in self.late:
            self.update(i, home)

    def update(self, i: int, buffer: str | None = None) -> None:
        """The optimizer's step on layer i, where its state lives."""
        p = self.program
        where = (buffer or p.home(p.grad(i)), p.grad(i))
        p.update(i, grad=where, stream=Stream.COMPUTE if i in self.resident else Stream.CPU)


def _spread(blocks: Sequence[int], count: int) -> set[int]:
    """`count` of these blocks, evenly spread."""
    n = len(blocks)
    count = min(count, n)
    offset = (n - count) // 2
    return {blocks[n - 1 - j] for j in range(n) if (j * count + offset) % n + count >= n} if n else set()

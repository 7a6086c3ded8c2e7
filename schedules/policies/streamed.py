"""Stream each layer once for all micro-batches; update on the CPU as gradients land. Ours.

What it does. Weights arrive through a ring of device slots while other layers compute. A layer runs all
micro-batches before the next one comes, so that weights and gradients cross the link once per step and not
once per micro-batch (the vertical order of GreedySnake, arXiv 2512.17570); order=microbatches is the usual
order, for comparison. A gradient leaves as soon as it is whole, and its update runs on the CPU beside the
rest of the backward. The last `keep` blocks keep their activations; of the others, `offload`, evenly spread, send
theirs to the host and get them back; what is left keeps its input and runs forward again just before its
backward. Nothing waits for a whole step to end: the next forward starts as
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

from collections.abc import Sequence
from typing import Literal

from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.sweep import Kept, Window, land, spread, sweep
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
    offload: int = 0,
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
        offload: how many of the other blocks' activations go to the host and come back for the backward.
        defer: how many blocks are updated beside the next forward. Has no meaning with gradient clipping.
        resident: how many of the first layers, the embedding being one, live on the device.
        order: all micro-batches of a layer, or all layers of a micro-batch.
    """
    groups = [list(workload.microbatches)] if order == "layers" else [[m] for m in workload.microbatches]

    def build(keep: int) -> Program:
        turn = max(model.head - keep, 0)
        kept = Kept(on_device=model.blocks[turn:], on_host=spread(model.blocks[:turn], offload))
        step = _Step(model, workload, slots, grad_slots, slabs, defer, resident, visits=len(groups))
        step.load_first()
        for group in groups:
            step.run(group, kept, first=group is groups[0], last=group is groups[-1])
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
        self.window = Window(
            [*self.streamed, *reversed(self.streamed)] * visits,
            ahead=len(self.ahead),
            fetch=lambda i: p.load(p.weight(i), self.ring),
        )
        # updated after everything has landed, first layer first (its gradient lands before the embedding's)
        self.late = set(model.layers) if self.clip else spread(self.streamed, defer)
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

    def run(self, group: Sequence[int], kept: Kept, *, first: bool, last: bool) -> None:
        """Forward and backward of a group of micro-batches, the `first` or `last` of the step or both."""
        p, head = self.program, self.program.model.head

        def weights(i: int) -> str | None:
            if i in self.resident:
                return None
            if i == head and first and head in self.late:
                p.prefetch(p.weight(head), into=self.copy[head])
            return self.copy[i] if i in self.copy else self.window.weights(i)

        def grad(i: int) -> str | None:
            if i in self.resident:
                return None
            return self.own[i] if i in self.own else self.grads.next()

        def done(i: int, buffer: str) -> None:
            streamed = i in self.streamed
            if not streamed and not last:
                return  # the sum stays on the device
            where = (buffer, p.grad(i))
            if i not in self.resident:
                held = i in self.late or not streamed
                where = land(p, i, buffer, self.slabs, first=first or not streamed, last=last, held=held)
            elif self.clip:
                p.norm([where], stream=Stream.COMPUTE, name=f"N.{p.model.layer_name(i)}")
            if last and i not in self.late:
                self.update(i, where)

        sweep(p, group, weights=weights, grad=grad, done=done, kept=kept)

    def update(self, i: int, grad: tuple[str, str] | None = None) -> None:
        """The optimizer's step on layer i, where its state lives; its gradient is at home if not named."""
        self.program.update(i, grad=grad, stream=Stream.COMPUTE if i in self.resident else Stream.CPU)

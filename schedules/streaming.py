"""The step in which layers stream through the device: its rings, and where each layer's weights and gradient are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from schedules import tensor as tensors
from schedules.drive import Drive
from schedules.kept import Kept
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.passing import Passing
from schedules.program import Program
from schedules.sweep import Window, land, spread, sweep, visits
from schedules.workload import Workload


class StreamedStep:
    """The step under construction. `kept` is what blocks keep, other arguments are knobs of `streamed`."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        kept: Kept,
        *,
        slots: int,
        grad_slots: int,
        slabs: int,
        defer: int,
        resident: int,
        hold: int,
        through: int,
        stay: int,
        nvme: int,
        nvme_weights: int,
        nvme_slots: int,
        parts: int,
        singly: int,
        groups: int,
    ) -> None:
        self.program = p = Program(model, workload)
        # how often a layer's gradient comes: once for all micro-batches of a group, or once for each
        self.singly, above = singly, {model.head, *model.blocks[len(model.blocks) - singly :]} if singly else set()
        self.passes = {i: workload.accumulation if i in above else groups for i in model.layers}
        self.landed = Counter[int]()
        self.clip = workload.grad_clip is not None
        self.resident = model.layers[:resident]
        p.keep_on_device(*(t for i in self.resident for t in (p.weight(i), p.grad(i), p.state(i))))
        self.ring = p.slots("weight", slots)
        self.grads = p.slots("grad", grad_slots)
        self.slabs = p.slots("slab", slabs, Tier.HOST)
        # embedding and head have buffers of their own: a slot of the ring need not be as large as they are
        ends = [i for i in (model.embed, model.head) if i not in self.resident]
        others = [i for i in model.blocks if i not in self.resident]
        oftener = [i for i in others if self.passes[i] > groups]  # loaded again for every micro-batch
        held = spread(oftener, hold)
        held |= spread([i for i in others if i not in held], hold - len(held))
        self.copy = {i: p.buffer(f"{model.layer_name(i)}.weight") for i in (*ends, *sorted(held))}
        # the head's gradient has long left when the embedding's comes, unless one of them is still adding up
        shared = groups == 1 and not model.tie_word_embeddings
        self.own = {i: p.buffer("ends.grad" if shared else f"{model.layer_name(i)}.grad") for i in ends}
        # or the sum of a held block would leave and come back; what is whole at once goes through slots
        self.own |= {i: p.buffer(f"{model.layer_name(i)}.grad") for i in sorted(held) if self.passes[i] > 1}

        self.ends = ends
        self.streamed = [i for i in others if i not in held]
        self.ahead = self.streamed[:slots]
        order = visits(kept, model.blocks, turns=workload.accumulation, singly=singly)
        self.window = Window(
            [i for i in order if i in self.streamed] * groups,
            ahead=len(self.ahead),
            fetch=self.fetch,
        )
        # blocks updated on the device while their weights and gradient are still there, the state passing through
        whole = [] if self.clip else [i for i in self.streamed if self.passes[i] == 1]
        self.parts = tensors.parts(parts)
        updated_here = spread(whole, -(-stay // parts))
        staying = [(i, part) for i in sorted(updated_here) for part in self.parts][:stay]
        p.keep_on_device(*(p.state(*state) for state in staying))
        passing = spread([i for i in whole if i not in updated_here], through)
        self.through, self.staying = passing | updated_here, set(staying)
        self.kept = kept
        self.slot = ""  # of the block that ran last
        # updated after everything has landed, first layer first (its gradient lands before the embedding's)
        others = [i for i in self.streamed if i not in self.through]
        self.late = set(model.layers) if self.clip else spread(others, defer)
        landing = [model.head, *reversed(model.blocks), model.embed]
        first = self.streamed[:1]
        self.order = [i for i in landing if i not in self.late]
        self.order += sorted(self.late, key=lambda i: (i not in first, i))
        # what of blocks' states comes from a drive and goes back there, and some of these blocks' weights too
        elsewhere = [(i, part) for i in self.streamed for part in self.parts if (i, part) not in self.staying]
        states = spread(elsewhere, nvme)
        read = spread(sorted({i for i, _ in states}), nvme_weights)
        self.parted = {*self.through, *(i for i, _ in states)}
        waiting = [i for i in read if i in self.late and self.passes[i] == 1]
        self.drive = Drive(p, states=states, weights=read, waiting=waiting, slots=nvme_slots, ahead=len(self.ahead))
        come = {i: [part for part in self.parts if (i, part) not in self.staying] for i in self.through}
        streamed = [i for i in order if i in self.streamed] * groups
        self.passing = Passing(p, self.drive, streamed, come, slots=parts + 1 if passing else 2)

    def fetch(self, i: int) -> str:
        """The slot with block i's weights, which are loaded unless they still stand in one."""
        p, weight = self.program, self.program.weight(i)
        if i not in self.drive.weights:
            return p.load(weight, self.ring)
        return self.ring.holding(weight) or p.prefetch(weight, out_of=self.drive.weight(i), into=self.ring.next())

    def whole(self, groups: Sequence[Sequence[int]]) -> Program:
        """The program of the step, one of these groups of micro-batches after another."""
        self._load_first()
        for group in groups:
            self._run(group)
        for i in self.order:
            if i in self.late:
                self.update(i)
        return self.program

    def _load_first(self) -> None:
        """Load what the forward begins with in the order in which the step before updates it.

        A queue is first in, first out: so nothing stands in it behind weights that are not ready.
        """
        p = self.program
        for i in self.order:
            if i in self.ahead:
                self.fetch(i)
            elif i in self.copy and (i not in self.late or i == p.model.embed):
                p.prefetch(p.weight(i), into=self.copy[i])

    def _run(self, group: Sequence[int]) -> None:
        """Forward and backward of a group of micro-batches."""
        p = self.program

        def weights(i: int) -> str | None:
            if i in self.resident:
                return None
            if i in self.copy:
                return p.load(p.weight(i), self.copy[i])
            self.slot = self.window.weights(i)
            self.passing.visit()
            return self.slot

        def grad(i: int) -> str | None:
            if i in self.resident:
                return None
            return self.own[i] if i in self.own else self.grads.next()

        def done(i: int, buffer: str) -> None:
            self.landed[i] += 1
            first, last = self.landed[i] == 1, self.landed[i] == self.passes[i]
            streamed = i in self.streamed
            if not streamed and not last:
                return  # the sum stays on the device
            where = (buffer, p.grad(i))
            if i in self.through:
                self.pass_through(i, where)
                return
            if i not in self.resident:
                waits = i in self.drive.waiting
                held = (i in self.late or i in self.ends) and not waits
                where = land(p, i, buffer, self.slabs, first=first or not streamed, last=last, held=held)
                if waits:
                    self.drive.wait(i, where[0])
            elif self.clip:
                p.norm([where], stream=Stream.COMPUTE, name=f"N.{p.model.layer_name(i)}")
            if last and i not in self.late:
                self.update(i, where)

        sweep(p, group, weights=weights, grad=grad, done=done, kept=self.kept, singly=self.singly)

    def update(self, i: int, grad: tuple[str, str] | None = None) -> None:
        """The optimizer's step on layer i, where its state lives; its gradient is at home if not named."""
        p, drive = self.program, self.drive
        if grad is None and i in drive.waiting:
            grad = drive.read_grad(i, self.slabs)
        weights = drive.weight(i) if i in drive.weights else None
        parts = self.parts if i in self.parted else (None,)
        for part in parts:
            state = drive.read_state(i, part) if (i, part) in drive.states else None
            stream = Stream.COMPUTE if i in self.resident else Stream.CPU
            p.update(i, grad=grad, weights=weights, state=state, stream=stream, part=part)
            if weights is not None and part == parts[-1]:
                drive.write(p.weight(i), weights)
            if state is not None:
                drive.write(p.state(i, part), state)

    def pass_through(self, i: int, grad: tuple[str, str]) -> None:
        """The optimizer's step on block i on the device, right after its backward: its state comes and goes."""
        p, drive = self.program, self.drive
        weights, target = self.slot, drive.weight(i) if i in drive.weights else None
        assert p.holds(weights) == p.weight(i), "the backward has just read the weights"
        for part in self.parts:
            passes, last = (i, part) not in self.staying, part == self.parts[-1]
            state = self.passing.take(i, part) if passes else None
            p.update(i, grad=grad, weights=weights, state=state, stream=Stream.COMPUTE, part=part)
            if last:
                p.offload(p.weight(i), out_of=weights, into=target)
            if last and target is not None:
                drive.write(p.weight(i), target)
            if passes:
                self.passing.leave(i, part)

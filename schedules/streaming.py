"""The step in which layers stream through the device: its rings, and where each layer's weights and gradient are."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schedules.buffers import Held
from schedules.forward_fusion import ForwardFusion
from schedules.kept_activations import Kept
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.placement import Places
from schedules.program import Program
from schedules.staging import Staging
from schedules.state_passing import Passing
from schedules.sweep import Window, land, sweep, visits
from schedules.tensor import Part
from schedules.workload import Workload


@dataclass(frozen=True)
class Due:
    """An update on the device of a part of a block: the buffers of its gradient and weights there.

    `weights` is None where they do not leave, and `target` where they leave for their home.
    """

    block: int
    part: Part | None
    grad: Held
    weights: str | None
    target: str | None


class StreamedStep:
    """The step under construction, of layers that are in these `places`. What is counted are buffers of a ring."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        places: Places,
        kept: Kept,
        *,
        slots: int,
        grad_slots: int,
        slabs: int,
        nvme_slots: int,
    ) -> None:
        self.program = p = Program(model, workload)
        self.places, self.kept = places, kept
        self.clip = workload.grad_clip is not None
        self.landed = Counter[int]()
        self.slot = ""  # of the block that ran last
        p.keep_on_device(*(t for i in places.resident for t in (p.weight(i), p.state(i))))
        p.keep_on_device(*map(p.weight, places.settled))
        p.keep_on_device(*map(p.grad, places.adding_up))
        # weights and gradient of a block that is updated gradually are there while the next one runs
        self.ring = p.slots("weight", slots + places.more_slots)
        gradients = max(grad_slots, 2) if places.gradually else grad_slots
        self.grads = p.slots("grad", gradients)
        self.slabs = p.slots("slab", slabs, Tier.HOST)
        # embedding and head have buffers of their own: a slot of the ring need not be as large as they are
        come = [*places.ends, *(i for i in places.held if i not in places.settled)]
        self.copy = {i: p.buffer(f"{model.layer_name(i)}.weight") for i in come}
        # the head's gradient has long left when the embedding's comes, unless one of them is still adding up
        shared = places.groups == 1 and not model.tie_word_embeddings
        ends = [i for i in (model.embed, model.head) if i not in places.adding_up]
        self.own = {i: p.buffer("ends.grad" if shared else f"{model.layer_name(i)}.grad") for i in ends}
        # or the sum of a held block would leave and come back; what is whole at once goes through slots
        self.own |= {i: p.buffer(f"{model.layer_name(i)}.grad") for i in places.held if places.landings[i] > 1}
        order = visits(kept, model.blocks, turns=workload.accumulation, singly=places.singly) * places.groups
        streamed = [i for i in order if i in places.streamed]
        self.ahead = places.streamed[:slots]
        self.window = Window(streamed, ahead=len(self.ahead))
        p.keep_on_device(*(p.state(*state) for state in sorted(places.staying)))
        self.staging = Staging(p, places, slots=nvme_slots, ahead=len(self.ahead))
        self.passing = Passing(p, places, self.staging, [i for i in order for _ in range(places.turns(i))])
        self.fusion = ForwardFusion(p, places, self.passing, self.grads, gradients, self.own)
        self.due = deque[Due]()

    def _fetch(self, i: int) -> str:
        """The slot with block i's weights, which are loaded unless they still stand in one."""
        weight = self.program.weight(i)
        if (slot := self.ring.holding(weight)) is not None:
            return slot
        source = self.staging.weight(i) if i in self.places.nvme_weights else None
        in_use = {*self.window.slots, *(due.weights for due in self.due)}
        return self.program.prefetch(weight, out_of=source, into=self.ring.next(keep=in_use))

    def whole(self, groups: Sequence[Sequence[int]]) -> Program:
        """The program of the step, one of these groups of micro-batches after another."""
        self._load_first()
        for group in groups:
            sweep(
                self.program,
                group,
                weights=self._weights,
                grad=self._grad,
                done=self._done,
                kept=self.kept,
                singly=self.places.singly,
                turn=self._turn,
            )
        assert not self.due, "what is due has been updated before the last turn, or with the last block"
        for i in self.places.updates:
            for part in self.places.parts_of(i) if i in self.places.late else ():
                self._update(i, part)
        return self.program

    def _load_first(self) -> None:
        """Load what the forward begins with in the order in which the step before updates it.

        A queue is first in, first out: so nothing stands in it behind weights that are not ready.
        """
        p = self.program
        for i in self.places.updates:
            if i in self.ahead:
                self._fetch(i)
            elif i in self.copy and (i not in self.places.late or i == p.model.embed):
                p.prefetch(p.weight(i), into=self.copy[i])

    def _weights(self, i: int) -> str | None:
        """The buffer with layer i's weights, as `sweep` asks for it."""
        if i in self.places.resident:
            return None
        if i in self.copy:
            return self.program.load(self.program.weight(i), self.copy[i])
        if i in self.places.streamed:
            self.slot = self.window.weights(i, self._fetch)
        self._update_before_forward(self.fusion.rest_of(i))
        return None if i in self.places.settled else self.slot

    def _turn(self) -> None:
        """A block is about to run a micro-batch: see that states come, and update what is due."""
        self.passing.turn()
        self._update_due(self.passing.now)
        settled = self.places.settled
        self._update_before_forward(self.fusion.due(lambda i: i in settled or self.window.loaded(i) is not None))
        self.fusion.bring()

    def _grad(self, i: int) -> str | None:
        """The buffer for layer i's gradient, as `sweep` asks for it."""
        if i in self.places.adding_up:
            return None
        return self.own[i] if i in self.own else self.grads.next(keep={due.grad[0] for due in self.due})

    def _done(self, i: int, buffer: str) -> None:
        """Layer i's gradient is in `buffer`: it leaves, unless its sum goes on there, and is applied if it can be."""
        p, places = self.program, self.places
        self.landed[i] += 1
        first, last = self.landed[i] == 1, self.landed[i] == places.landings[i]
        streamed = i in places.streamed
        if not streamed and not last:
            return
        where = (buffer, p.grad(i))
        if i in places.carried:
            self._carry(i, where)
        elif i in places.on_device:
            self._update_on_device(i, where)
            if i not in places.gradually or self.passing.is_last:
                self._update_due(math.inf)
        elif i in places.resident:
            if self.clip:
                p.norm([where], stream=Stream.COMPUTE, name=f"N.{p.model.layer_name(i)}")
            if i not in places.late:
                self._update(i, None, where)
        else:
            self._land(i, buffer, first=first or not streamed, last=last)

    def _land(self, i: int, buffer: str, *, first: bool, last: bool) -> None:
        """Layer i's gradient goes to the host, part by part, and each is applied as soon as it can be."""
        places, parts = self.places, self.places.parts_of(i)
        waits, late = i in places.nvme_grads, i in places.late
        # a slab has room for a block, or for a part of one
        held = (late or (i in places.ends and len(places.parts) == 1)) and not waits
        landing = land(self.program, i, buffer, self.slabs, first=first, last=last, held=held, parts=parts)
        for part, grad in zip(parts, landing, strict=True):
            if waits:
                self.staging.write(grad[1], grad[0])
            if last and not late:
                self._update(i, part, grad)

    def _update(self, i: int, part: Part | None, grad: Held | None = None) -> None:
        """The optimizer's step on a part of layer i, where its state lives; its gradient is at home if not named."""
        p, places, staging = self.program, self.places, self.staging
        if grad is None and i in places.nvme_grads:
            grad = staging.read_grad(i, part, self.slabs)
        elif grad is None:
            of = p.grad(i, part=part)
            grad = p.home(of), of
        weights = staging.weight(i) if i in places.nvme_weights else None
        state = staging.read_state(i, part) if (i, part) in places.nvme_states else None
        stream = Stream.COMPUTE if i in places.resident else Stream.CPU
        p.update(i, grad=grad, weights=weights, state=state, stream=stream, part=part)
        if weights is not None and part == places.parts_of(i)[-1]:
            staging.write(p.weight(i), weights)
        if state is not None:
            staging.write(p.state(i, part), state)

    def _carry(self, i: int, grad: Held) -> None:
        """Block i's gradient waits for the next step: at home, or where its sum is."""
        if i in self.own:
            self.program.norm([grad], stream=Stream.COMPUTE, name=f"N.{self.program.model.layer_name(i)}")
        else:
            deque(land(self.program, i, grad[0], self.slabs, held=True), maxlen=0)

    def _update_before_forward(self, updates: Iterable[tuple[int, Part | None, Held]]) -> None:
        """These parts of blocks are updated on the device, by gradients of the step before."""
        some = list[Due]()
        for i, part, grad in updates:
            weights = None if i in self.places.settled else self.window.loaded(i) or self.slot
            target = self.staging.weight(i) if i in self.places.nvme_weights else None
            some.append(Due(i, part, grad, weights, target))
            if len(some) == self.places.at_once:
                self._update_now(some)
                some.clear()
        self._update_now(some)

    def _update_on_device(self, i: int, grad: Held) -> None:
        """The optimizer's step on block i on the device is due, part by part."""
        weights = None if i in self.places.settled else self.slot
        if weights is not None:
            assert self.program.holds(weights) == self.program.weight(i), "the backward has just read the weights"
        target = self.staging.weight(i) if i in self.places.nvme_weights else None
        self.due += [Due(i, part, grad, weights, target) for part in self.places.parts]

    def _update_due(self, turn: float) -> None:
        """Make the updates on the device that follow a turn before this one, a few at a time."""
        place, at_once = {part: n for n, part in enumerate(self.places.parts)}, self.places.at_once
        ready = [due for due in self.due if self.passing.turn_of(due.block, place[due.part]) < turn]
        for begin in range(0, len(ready), at_once):
            some = [self.due.popleft() for _ in ready[begin : begin + at_once]]
            self._update_now(some)

    def _update_now(self, some: Sequence[Due]) -> None:
        """Make these updates; what has been updated leaves."""
        passing = [(due.block, due.part) for due in some if (due.block, due.part) not in self.places.staying]
        for due in some:
            state = self.passing.take(due.block, due.part) if (due.block, due.part) in passing else None
            self.program.update(
                due.block,
                grad=due.grad,
                weights=due.weights,
                state=state,
                stream=Stream.COMPUTE,
                part=due.part,
                carried=due.block in self.places.carried,
            )
        # weights leave first: others will come into their slot before the next state is needed
        for due in some:
            if due.weights is not None and due.part == self.places.parts[-1]:
                self._weights_leave(due.block, due.weights, due.target)
        for i, part in passing:
            self.passing.leave(i, part)

    def _weights_leave(self, i: int, weights: str, target: str | None) -> None:
        """Weights that were updated on the device go home, or to the drive by way of a host buffer."""
        self.program.offload(self.program.weight(i), out_of=weights, into=target)
        if target is not None:
            self.staging.write(self.program.weight(i), target)

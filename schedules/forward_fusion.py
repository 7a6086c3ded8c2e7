"""Blocks that are updated on the device just before their next forward, with the gradient that the last step left.

So they can be where gradients are clipped: the norm of all is known by then (forward fusion, arXiv:2104.00237).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from schedules.buffers import Held
from schedules.placement import Places
from schedules.program import Program
from schedules.ring import Ring
from schedules.state_passing import AHEAD, Passing
from schedules.tensor import Part


class ForwardFusion:
    """When the blocks in `places.carried` are updated, and how their gradients come back to the device.

    A gradient has been sent home, and comes through a ring of buffers, which are idle until the backward, AHEAD visits
    before it is used; those in `stay` have stayed where they are. What is to be updated next is told as block, part,
    and where its gradient is.
    """

    def __init__(
        self, p: Program, places: Places, passing: Passing, ring: Ring, slots: int, stay: Mapping[int, str]
    ) -> None:
        self._program, self._passing, self._ring, self._slots = p, passing, ring, slots
        blocks = sorted(places.carried, key=passing.updated.__getitem__)
        self._left = deque((i, n, part) for i in blocks for n, part in enumerate(places.parts))
        self._last = places.parts[-1]
        self._returning = deque(i for i in blocks if i not in stay)
        self._there = dict[int, Held]()
        self._staying = {i: (stay[i], p.grad(i)) for i in blocks if i in stay}

    def due(self, there: Callable[[int], bool]) -> Iterator[tuple[int, Part | None, Held]]:
        """A block is about to run a micro-batch: what is due of the next one, if its weights are `there`."""
        while self._left and self._passing.turn_of(*self._left[0][:2]) <= self._passing.now and there(self._left[0][0]):
            yield self._next()

    def rest_of(self, i: int) -> Iterator[tuple[int, Part | None, Held]]:
        """Block i is about to run forward: what is left of it."""
        while self._left and self._left[0][0] == i:
            yield self._next()

    def _next(self) -> tuple[int, Part | None, Held]:
        i, _, part = self._left.popleft()
        while i not in self._staying and i not in self._there:
            self._bring()
        grad = self._staying.get(i) or self._there[i]
        if part == self._last:
            self._there.pop(i, None)
        return i, part, grad

    def bring(self) -> None:
        """Bring the gradients that are used within the next visits, as far as there are buffers."""
        soon = self._passing.now + AHEAD * self._passing.each
        while self._returning and len(self._there) < self._slots and self._passing.updated[self._returning[0]] <= soon:
            self._bring()

    def _bring(self) -> None:
        i = self._returning.popleft()
        grad = self._program.grad(i)
        self._there[i] = self._program.prefetch(grad, into=self._ring.next()), grad

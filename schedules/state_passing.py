"""Optimizer state that passes through the device, where its block is updated: it comes before it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from schedules.placement import Places
from schedules.program import Program
from schedules.staging import Staging
from schedules.tensor import Part

AHEAD = 2  # visits before a block's own in which the last part of its state begins to come
State = tuple[int, Part | None]  # a block, and which part of its state; None is all of it


class Passing:
    """The parts of blocks' states that come to the device for an update there and go back.

    `visits` are the blocks in the order in which they run. A block's last visit is its backward, after which its state
    is needed. It comes during the visits before, few parts at each one: the weights of other blocks come by the same
    link, and would be late behind a whole state.
    """

    def __init__(self, p: Program, places: Places, staging: Staging, visits: Sequence[int]) -> None:
        self._program, self._places, self._staging = p, places, staging
        self._slots = len(places.parts) + 1 if places.through else 2
        self._ring = p.slots("state", self._slots)
        self._visit, self._there = -1, dict[State, str]()
        last = {i: at for at, i in enumerate(visits)}
        blocks = sorted(places.on_device, key=last.__getitem__)
        coming = [(i, part) for i in blocks for part in places.parts if (i, part) not in places.staying]
        self._coming = deque(coming)
        self._begin = deque(_spaced([last[i] - AHEAD for i, _ in coming], len(last)))

    def visit(self) -> None:
        """A block is about to run: bring what should come while it does, as far as there are buffers."""
        self._visit += 1
        while self._begin and self._begin[0] <= self._visit and len(self._there) < self._slots:
            self._bring()

    def _bring(self) -> None:
        self._begin.popleft()
        i, part = state = self._coming.popleft()
        source = self._staging.read_state(i, part) if state in self._places.nvme_states else None
        tensor = self._program.state(i, part)
        self._there[state] = self._program.prefetch(tensor, into=self._ring.next(), out_of=source)

    def take(self, i: int, part: Part | None) -> str:
        """The device buffer with a part of block i's state, which is to be updated now."""
        while (i, part) not in self._there:
            self._bring()
        return self._there[i, part]

    def leave(self, i: int, part: Part | None) -> None:
        """A part that has been updated goes back where it came from."""
        p, tensor, buffer = self._program, self._program.state(i, part), self._there.pop((i, part))
        if (i, part) in self._places.nvme_states:
            self._staging.write(tensor, p.offload(tensor, out_of=buffer, into=self._staging.buffer()))
        else:
            p.offload(tensor, out_of=buffer)


def _spaced(due: Sequence[int], blocks: int) -> list[int]:
    """The visits at which what is `due` at these or later should come: as late as can be, never more than needs be."""
    most = -(-len(due) // max(blocks, 1))
    found: list[int] = []
    for at in reversed(due):
        found.append(min(at, found[-most] - 1) if len(found) >= most else at)
    return found[::-1]

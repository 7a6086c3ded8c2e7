"""Optimizer state that passes through the device, where its block is updated: it comes before it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from schedules.placement import Places
from schedules.program import Program
from schedules.staging import Staging
from schedules.tensor import Part

AHEAD = 2  # visits, or where blocks are updated gradually turns, before its block's by which a state begins to come
VISITS = 2  # in so many an update may be made, if the next one is so far away
State = tuple[int, Part | None]  # a block, and which part of its state; None is all of it


class Passing:
    """The parts of blocks' states that come to the device for an update there and go back.

    `turns` are the blocks in the order in which they run, each as often as it runs micro-batches. The last of a block's
    is in its backward, after which its state is needed, or before the first, in its forward; `places.at_once` parts at
    a time. It comes during the turns before, few parts at each: the weights of other blocks come by the same link, and
    would be late behind it.
    """

    def __init__(self, p: Program, places: Places, staging: Staging, turns: Sequence[int]) -> None:
        self._program, self._places, self._staging = p, places, staging
        self._slots = places.state_slots
        self._ring = p.slots("state", self._slots)
        self.now, self._turns, self._there = -1, len(turns), dict[State, str]()
        last, first = ({i: at for at, i in some} for some in (enumerate(turns), reversed([*enumerate(turns)])))
        self.updated = {i: first[i] if i in places.carried else last[i] for i in places.on_device}  # block -> turn
        blocks = sorted(places.on_device, key=self.updated.__getitem__)
        # turns of a visit: the same for all of these, and for those around them
        self.each = max(map(places.turns, blocks), default=0)
        self._span = self._spans([i for i in blocks if i not in places.carried])
        coming = [(i, n) for i in blocks for n, part in enumerate(places.parts) if (i, part) not in places.staying]
        self._coming = deque((i, places.parts[n]) for i, n in coming)
        ahead = {i: AHEAD if i in places.gradually else AHEAD * self.each for i in blocks}
        self._begin = deque(_spaced([self.turn_of(i, n) - ahead[i] for i, n in coming], len(last) * self.each))

    def turn(self) -> None:
        """A block is about to run a micro-batch: bring what should come beside it, if there are buffers."""
        self.now += 1
        while self._begin and self._begin[0] <= self.now and len(self._there) < self._slots:
            self._bring()

    @property
    def is_last(self) -> bool:
        """Whether no block runs another micro-batch."""
        return self.now + 1 == self._turns

    def turn_of(self, i: int, n: int) -> int:
        """The turn before which the n-th part of block i's state is updated; after which, where its backward was."""
        places = self._places
        if i not in places.gradually:
            return self.updated[i]
        if i in places.carried:
            left = -(-len(places.parts) // places.at_once) - 1  # turns from the first part on
            return self.updated[i] - left + n // places.at_once
        return self.updated[i] + max(n * self._span[i] // len(places.parts), n // places.at_once)

    def _spans(self, blocks: Sequence[int]) -> dict[int, int]:
        """The turns in which each of these is updated after its backward: until the next one's, or the last turn, and
        VISITS' at most."""
        ends = [*(self.updated[i] for i in blocks[1:]), self._turns - 1]
        return {i: min(end - self.updated[i], VISITS * self.each) for i, end in zip(blocks, ends, strict=False)}

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


def _spaced(due: Sequence[int], turns: int) -> list[int]:
    """The turns at which what is `due` at these, one after another, should come: as late as can be, and never more at
    one than in the mean over so many."""
    most = -(-len(due) // max(turns, 1))
    found: list[int] = []
    for latest in reversed(due):
        at = min([latest, *found[-1:]])  # no later than what comes after it
        found.append(min(at, found[-most] - 1) if len(found) >= most else at)
    return found[::-1]

"""Gemini's chunks: the weights that stand on the device, that come, and that the host has only as fp32."""

from __future__ import annotations

from collections import deque
from itertools import islice

from schedules.end_layers import end_buffers
from schedules.kept_activations import Kept
from schedules.op import Stream
from schedules.program import Program
from schedules.sweep import layer_visits


class Chunks:
    """A ring of so many chunks, one a layer; embedding and head have buffers of their own.

    `static` keeps no chunk that is not in use; `ahead` layers are asked for before they are needed.
    """

    def __init__(self, p: Program, chunks: int, kept: Kept, *, static: bool, ahead: int) -> None:
        self._program, self._kept, self._static, self._ahead = p, kept, static, ahead
        self._ring = p.slots("chunk", chunks)
        self.ends = end_buffers(p, "chunk")
        self._wide = p.slots("wide", 2 * max(ahead, 1))
        self._visits: deque[int] = deque()
        self._standing: dict[str, int] = {}  # buffer -> layer
        self._coming: set[int] = set()  # of these the layers that were asked for ahead
        self._widened: dict[int, str] = {}  # layers that have come as fp32 -> where
        self._stale = set() if p.workload.precision == "fp32" else set(p.model.layers)  # the host's 2-byte chunks
        self._newer: set[int] = set()  # layers whose 2-byte chunk is up to date on the device only

    def fetch(self, i: int) -> str:
        """The buffer with layer i's weights; the host has waited for those that were not asked for ahead."""
        p = self._program
        if not self._visits:
            self._begin()
        due = self._visits.popleft()
        assert due == i, "layers run in the order of the visits"
        buffer = next((b for b, layer in self._standing.items() if layer == i), None)
        if buffer is None or i in self._coming:
            self._coming.discard(i)
            if self._static:
                self._evict_others(i)
            buffer = buffer or self._bring(i)
            if (wide := self._widened.pop(i, None)) is not None:
                p.cast((wide, p.weight(i)), (buffer, p.weight(i)), stream=Stream.COMPUTE)
                self._stale.remove(i)
                self._newer.add(i)
        buffer = self._ring.holding(p.weight(i)) or buffer
        for following in islice(self._visits, self._ahead):
            if following not in self._standing.values():
                self._bring(following, ahead=True)
                self._coming.add(following)
        return buffer

    def give_up(self, i: int) -> None:
        """Layer i's backward has run: its chunk becomes its gradient, or moves down if that has its own."""
        p = self._program
        for buffer in [b for b, layer in self._standing.items() if layer == i]:
            del self._standing[buffer]
            self._newer.discard(i)
            if p.workload.accumulation > 1:
                p.offload(p.weight(i), out_of=buffer)
            p.discard(buffer)

    def _begin(self) -> None:
        """A micro-batch starts."""
        self._visits = deque(layer_visits(self._program.model, self._kept))

    def _bring(self, i: int, *, ahead: bool = False) -> str:
        """Layer i's chunk, or the fp32 one that it is made from, on its way to the buffer that is returned."""
        p = self._program
        stream = Stream.H2D if ahead else Stream.COMPUTE
        for slot, layer in self._standing.items():  # one that comes as fp32 has nothing in its slot yet
            if layer in self._coming and slot not in self.ends.values():
                self._ring.use(slot)
        buffer = self.ends[i] if i in self.ends else self._ring.next()
        self._evict(buffer)
        if i in self._stale:
            first, second = self._wide.next(), self._wide.next()  # the halves of the master
            for half in (first, second):
                p.prefetch(p.weight(i), into=half, stream=stream, blocking=not ahead)
            self._widened[i] = first
        else:
            p.prefetch(p.weight(i), into=buffer, stream=stream, blocking=not ahead)
        self._standing[buffer] = i
        return buffer

    def _evict_others(self, i: int) -> None:
        for buffer, layer in list(self._standing.items()):
            both_ends = i in self.ends and layer in self.ends  # the loss needs both at once
            if layer != i and layer not in self._coming and not both_ends:
                self._evict(buffer)

    def _evict(self, buffer: str) -> None:
        """Move a chunk down; where the host has the same, there is nothing to copy."""
        p, layer = self._program, self._standing.pop(buffer, None)
        if layer in self._newer:
            self._newer.remove(layer)
            p.offload(p.weight(layer), out_of=buffer, stream=Stream.COMPUTE, blocking=True)
        p.discard(buffer)

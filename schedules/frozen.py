"""Frozen weights on their way to where they are computed with: as they are, or quantised until just before that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from schedules.end_layers import end_buffers
from schedules.errors import ProgramError
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.quantised import is_quantised
from schedules.sweep import Window

Whole = Literal["blocks", "matrices"]  # what quantised weights become whole weights by
PASSING = 2  # blocks on their way from a drive through the host


class Frozen:
    """The weights of a step in which they never change, as the workload keeps them.

    Layers that are `staying` live on the device, blocks that are `on_drive` on NVMe, all others on the host. Blocks
    come through a ring of `slots`, in the order of `visits`, of which those that stay are none; the embedding and the
    head have buffers of their own. What is quantised is made whole on the compute stream, which takes a fraction of the
    time that copies of whole weights would: all of a block in one buffer for all blocks, just before it computes, or by
    `matrices`, within each of its ops.
    """

    def __init__(
        self,
        p: Program,
        visits: Sequence[int],
        *,
        staying: Collection[int],
        on_drive: Collection[int],
        slots: int,
        whole: Whole = "blocks",
    ) -> None:
        if whole == "matrices" and p.workload.quantised is None:
            raise ProgramError("whole=matrices is of quantised weights, and here none are: add quantised=nf4")
        self._program, self._staying, self._on_drive = p, staying, on_drive
        p.keep_on_device(*map(self.kept, staying))
        p.keep_on_nvme(*map(self.kept, on_drive))
        self._passing = p.slots("passing", PASSING, Tier.HOST) if on_drive else None
        self._ring = p.slots("weight", slots)
        self._ends = end_buffers(p, "weight")
        at_once = p.workload.quantised is not None and whole == "blocks"
        self._whole = p.buffer("whole") if at_once else None
        self._window = Window([i for i in visits if i not in staying], ahead=slots)

    def kept(self, i: int) -> str:
        """The tensor that layer i's weights are, between steps and on links."""
        p = self._program
        return p.quantised(i) if is_quantised(p.model, i, p.workload) else p.weight(i)

    def weights(self, i: int) -> str | None:
        """Where layer i is computed with: a buffer of the device, or at home, None."""
        p = self._program
        if i in self._ends:
            return None if i in self._staying else p.load(p.weight(i), self._ends[i])
        buffer = None if i in self._staying else self._window.weights(i, self._fetch)
        if not is_quantised(p.model, i, p.workload):
            return buffer
        if self._whole is None:
            return buffer or p.home(p.quantised(i))
        if p.holds(self._whole) == p.weight(i):
            return self._whole
        return p.dequantise(i, out_of=buffer, into=self._whole)

    def _fetch(self, i: int) -> str:
        p, kept = self._program, self.kept(i)
        if (slot := self._ring.holding(kept)) is not None:
            return slot
        if self._passing is None or i not in self._on_drive:
            return p.load(kept, self._ring)
        source = p.prefetch(kept, into=self._passing.next(), stream=Stream.NVME_READ)
        return p.prefetch(kept, into=self._ring.next(), out_of=source)

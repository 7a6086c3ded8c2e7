"""Frozen weights on their way to where they are computed with: as they are, or quantised until just before that."""

from __future__ import annotations

from schedules.program import Program
from schedules.quantised import is_quantised


class Frozen:
    """The layers of a step whose weights never change, as the workload keeps them.

    What is quantised is made whole on the compute stream, in one buffer for all blocks, just before a block computes:
    that takes a fraction of the time that copies of whole weights would.
    """

    def __init__(self, p: Program) -> None:
        self._program = p
        self._whole = p.buffer("whole") if p.workload.quantised is not None else ""

    def kept(self, i: int) -> str:
        """The tensor that layer i's weights are, between steps and on links."""
        p = self._program
        return p.quantised(i) if is_quantised(p.model, i, p.workload) else p.weight(i)

    def whole(self, i: int, buffer: str | None) -> str | None:
        """Where layer i is computed with, if what is kept of it is in this buffer, or at home: None."""
        p = self._program
        if p.holds(self._whole) == p.weight(i):
            return self._whole
        if not is_quantised(p.model, i, p.workload):
            return buffer
        return p.dequantise(i, out_of=buffer, into=self._whole)

"""A CUDA backend that keeps its pinned host memory from one schedule to the next."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from megatrain.cuda import CudaBackend
from schedules.op import Buffer, Tier
from schedules.schedule import Schedule

PAGE = 4096  # bytes: where buffers begin


class ArenaBackend(CudaBackend):
    """Its host buffers are parts of one pinned slab, kept for the next case: pinning 100 GB takes longer than one."""

    arena: ClassVar[Tensor | None] = None

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._used = 0
        sizes = [_whole_pages(buffer.nbytes) for buffer in schedule.buffers if buffer.tier == Tier.HOST]
        if self.arena is None or self.arena.nbytes < sum(sizes):
            self.release()
            whole = Buffer(name="arena", tier=Tier.HOST, nbytes=sum(sizes))
            type(self).arena = super().allocate(whole)

    def allocate(self, buffer: Buffer) -> Tensor:
        if buffer.tier != Tier.HOST:
            return super().allocate(buffer)
        assert self.arena is not None
        begin, self._used = self._used, self._used + _whole_pages(buffer.nbytes)
        return self.arena[begin : begin + buffer.nbytes]

    @property
    def unused(self) -> int:
        """Bytes of the arena that are there for other cases only."""
        return 0 if self.arena is None else self.arena.nbytes - self._used

    @classmethod
    def pinned(cls) -> int:
        """Bytes that are pinned already."""
        return 0 if cls.arena is None else cls.arena.nbytes

    @classmethod
    def release(cls) -> None:
        """Unpin it."""
        cls.arena = None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE

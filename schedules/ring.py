"""Rings of buffers: the double buffer, and all there is to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedules.program import Program


class Ring:
    """Slots of one kind, handed out least recently used first."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self._program = program
        self._names = list(names)  # least recently used first

    @property
    def current(self) -> str:
        """The slot used last."""
        return self._names[-1]

    def next(self) -> str:
        """The slot used longest ago, emptied for new contents."""
        slot = self._names.pop(0)
        self._names.append(slot)
        self._program.discard(slot)
        return slot

    def clear(self) -> None:
        """Empty all slots."""
        for slot in self._names:
            self._program.discard(slot)

    def __contains__(self, tensor: str) -> bool:
        return any(self._program.holds(slot) == tensor for slot in self._names)

    def holding(self, tensor: str) -> str | None:
        """The slot in which `tensor` still stands, now the one used last; None if it is in none."""
        for slot in self._names:
            if self._program.holds(slot) == tensor:
                self._names.remove(slot)
                self._names.append(slot)
                return slot
        return None

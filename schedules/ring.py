"""Rings of buffers: the double buffer, and all there is to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from schedules.errors import ProgramError

if TYPE_CHECKING:
    from schedules.buffers import Buffers


class Ring:
    """Slots of one kind, handed out least recently used first."""

    def __init__(self, buffers: Buffers, names: Sequence[str]) -> None:
        self._buffers = buffers
        self._names = list(names)  # least recently used first

    def __repr__(self) -> str:
        return f"a ring of {len(self._names)} slots such as {self.current}"

    @property
    def current(self) -> str:
        """The slot used last."""
        return self._names[-1]

    def next(self, *, keep: Collection[str | None] = ()) -> str:
        """The slot used longest ago that is not one to `keep`, emptied for new contents.

        Raises ProgramError if all are to be kept.
        """
        slot = next((name for name in self._names if name not in keep), None)
        if slot is None:
            raise ProgramError(f"next(): all slots of the ring are to be kept, {', '.join(sorted(self._names))}")
        self.use(slot)
        self._buffers.discard(slot)
        return slot

    def use(self, slot: str) -> None:
        """Hand this slot out after all others. Raises ProgramError if it is none of the ring's."""
        if slot not in self._names:
            raise ProgramError(f"use({slot!r}): the ring has {', '.join(sorted(self._names))}")
        self._names.remove(slot)
        self._names.append(slot)

    def clear(self) -> None:
        """Empty all slots."""
        for slot in self._names:
            self._buffers.discard(slot)

    def __contains__(self, tensor: str) -> bool:
        return any(self._buffers.holds(slot) == tensor for slot in self._names)

    def holding(self, tensor: str) -> str | None:
        """The slot in which `tensor` still stands, now the one used last; None if it is in none."""
        for slot in self._names:
            if self._buffers.holds(slot) == tensor:
                self.use(slot)
                return slot
        return None

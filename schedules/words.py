"""The words that a policy chooses among, such as tiers and streams: checked, and listed in messages."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from schedules.errors import ProgramError

E = TypeVar("E", bound=StrEnum)


def one_of(words: type[E], value: E, where: str) -> E:
    """The value, which a policy may also have given as a string."""
    try:
        return words(value)
    except ValueError:
        raise ProgramError(f"{where}: a {words.__name__.lower()} is {listed(words)}, not {value!r}") from None


def listed(words: Iterable[str]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}"

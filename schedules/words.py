"""Words: those that a policy chooses among, such as tiers and streams, and names that stand in files of others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from schedules.errors import ProgramError

E = TypeVar("E", bound=StrEnum)
_UNSHOWABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def one_of(words: type[E], value: E, where: str) -> E:
    """The value, which a policy may also have given as a string."""
    if isinstance(value, words):
        return value
    try:
        return words(value)
    except ValueError:
        raise ProgramError(f"{where}: a {words.__name__.lower()} is {listed(words)}, not {value!r}") from None


def listed(words: Iterable[str]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}"


def plain(text: str) -> str:
    """A name without control characters, which a terminal would obey, and halves of characters, which no file takes."""
    return _UNSHOWABLE.sub("?", text)

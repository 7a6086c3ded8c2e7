"""Words: those that a policy chooses among, such as tiers and streams, and names that stand in files of others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
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


def own_name(name: str, of: str) -> str:
    """The name that a policy gave to something, as a file of the schedule can have it. Raises ProgramError."""
    if not isinstance(name, str) or not name or plain(name) != name:
        raise ProgramError(f"the name of {of} must be text that can be shown, not {name!r}")
    return name


def listed(words: Iterable[str]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}"


def nearest(word: str, known: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """The known names, five at most, that a mistyped one may mean, in whatever case: first those that begin with it,
    then those it is a part of, but not of a number, then those spelt alike, which `cutoff` decides as in difflib."""
    typed, folded = word.casefold(), {name: name.casefold() for name in known}
    part = re.compile((r"(?<![\d.])" if typed[:1].isdigit() else "") + re.escape(typed))  # no 8b of a 48b
    holding = [name for name in known if typed and part.search(folded[name])]
    holding.sort(key=lambda name: not folded[name].startswith(typed))
    alike = difflib.get_close_matches(typed, folded.values(), n=3, cutoff=cutoff)
    spelt = [name for near in alike for name in known if folded[name] == near]
    return list(dict.fromkeys([*holding, *spelt]))[:5]


def plain(text: str) -> str:
    """A name without control characters, which a terminal would obey, and halves of characters, which no file takes."""
    return _UNSHOWABLE.sub("?", text)

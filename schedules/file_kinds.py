"""What a file holds, by words that no other kind has: for whoever gives one in another's place."""

from __future__ import annotations

import re
from json import JSONDecodeError
from pathlib import Path

SCHEDULE, TRACE, PROFILE, MODEL = "a schedule", "a trace", "a hardware profile", "a model's config.json"
_SIGNS = {
    '"megatrain-schedule/': SCHEDULE,
    '"megatrain-trace/': TRACE,
    r'"mode"\s*:\s*"(datasheet|measured)"': PROFILE,
    '"architectures"': MODEL,
}
_START = 1000  # characters
ENCODING = "utf-8-sig"  # of what people may have edited: some editors mark UTF-8 by three bytes at the start


def kind_of(text: str) -> str | None:
    """What a file holds by its text, whatever the order of its fields and its version; None if nothing shows it."""
    return next((kind for sign, kind in _SIGNS.items() if re.search(sign, text)), None)


def kind_of_file(path: Path) -> str | None:
    """What a file holds; of one that is no JSON object, weights for one, no more than the beginning is read."""
    with path.open(encoding=ENCODING, errors="replace") as file:
        start = file.read(_START)
        return kind_of(start + file.read()) if start.lstrip().startswith("{") else None


def wrong_kind(text: str, wanted: str) -> str:
    """Where a file's text shows that it is of another kind than `wanted`: so in words, to follow its name."""
    if not text.strip():
        return f"is empty, not {wanted}"
    found = kind_of(text) or wanted
    return "" if found == wanted else f"is {found}, not {wanted}"


def not_json(error: JSONDecodeError) -> str:
    """Where a file's text ends to be JSON, in words."""
    return f"not JSON at line {error.lineno}, column {error.colno}: {error.msg} (is the file cut off?)"

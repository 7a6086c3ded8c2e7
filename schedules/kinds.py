"""What a file holds, by its first words: for whoever gives one in another's place."""

from __future__ import annotations

from json import JSONDecodeError

SCHEDULE, TRACE, PROFILE, MODEL = "a schedule", "a trace", "a hardware profile", "a model's config.json"
_SIGNS = {
    '"megatrain-schedule/': SCHEDULE,
    '"megatrain-trace/': TRACE,
    '"mode": "datasheet"': PROFILE,
    '"mode": "measured"': PROFILE,
    '"architectures"': MODEL,
}
_START = 1000  # characters that show it


def wrong_kind(text: str, wanted: str) -> str:
    """Where a file's text shows that it is of another kind than `wanted`: so in words, to follow its name."""
    if not text.strip():
        return f"is empty, not {wanted}"
    found = next((kind for sign, kind in _SIGNS.items() if sign in text[:_START]), wanted)
    return "" if found == wanted else f"is {found}, not {wanted}"


def not_json(error: JSONDecodeError) -> str:
    """Where a file's text ends to be JSON, in words."""
    return f"not JSON at line {error.lineno}, column {error.colno}: {error.msg} (is the file cut off?)"

"""Whole numbers, as files and callers give them: no True, no 1.0, and nothing that 64 bits do not hold."""

from __future__ import annotations

BEYOND = 2**63  # no byte, token, operation or step is counted so far


def fault(value: object, *, least: int = 0, bounded: bool = True) -> str | None:
    """What is wrong with a value that should be a whole number of at least `least`, as "must be ..."; None if nothing.

    `bounded`: it has to be below BEYOND, too.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return f"must be a whole number of at least {least}, not {value!r}"
    if bounded and value >= BEYOND:
        return f"must be a number of 64 bits, not one of {len(str(value))} digits"
    return None

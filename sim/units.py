"""Units of the numbers in hardware profiles: each dimension is named by its base unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal

_PREFIXES = " kMGT"  # of powers of 1000

# dimension -> unit -> how many base units it is
UNITS: Mapping[str, Mapping[str, int]] = {
    "bytes": {
        "bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
        "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    },
    "B/s": {"B/s": 1, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12},
    "FLOP/s": {"FLOP/s": 1, "GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15},
    "ns": {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9},
    "params/s": {"params/s": 1, "Mparams/s": 10**6, "Gparams/s": 10**9},
    "fraction": {"fraction": 1},
    "cores": {"cores": 1},
}  # fmt: skip


def to_base(number: float, unit: str, dimension: str) -> float:
    """The number in the base unit, as the decimal it was written as: 4.8 TB/s is 4800000000000.0 B/s."""
    return float(Decimal(repr(number)) * UNITS[dimension][unit])


def readable(value: float, dimension: str) -> tuple[float, str]:
    """A base-unit value in the unit that writes it shortest, among those that read back exactly."""
    number, unit = value, dimension
    for candidate, factor in UNITS[dimension].items():
        scaled = float(Decimal(repr(value)) / factor)
        exact = to_base(scaled, candidate, dimension) == value
        if exact and scaled >= 1 and len(f"{scaled:.15g}") <= len(f"{number:.15g}"):
            number, unit = scaled, candidate
    return number, unit


def rounded(value: float, dimension: str) -> str:
    """A base-unit value for people: as `readable` where that is short, else to four digits in the largest unit."""
    number, unit = readable(value, dimension)
    if number >= 1000 or float(f"{number:.4g}") != number:
        number, unit = in_largest_unit(value, dimension)
    return f"{number:.4g} {unit}"


def in_largest_unit(value: float, dimension: str) -> tuple[float, str]:
    """A base-unit value in the largest decimal unit that it is at least one of; in the base unit if there is none."""
    units = {unit: factor for unit, factor in UNITS[dimension].items() if factor <= value and "i" not in unit}
    unit = max(units, key=lambda unit: units[unit], default=dimension)
    return value / UNITS[dimension][unit], unit


def at_least(value: float, unit: str, digits: int = 1) -> str:
    """As `scaled`, and never less than it is: what has to be there."""
    power = min(_PREFIXES.index(unit[0]), (len(str(math.ceil(value))) - 1) // 3)
    last = 1000.0**power / 10**digits if power else 1.0  # what the last digit stands for
    return scaled(math.ceil(value / last) * last, unit, digits)


def scaled(value: float, unit: str, digits: int = 1) -> str:
    """Bytes, FLOP/s and the like in `unit`, "GB" or "TFLOP/s", or in a smaller one where that would be below 1."""
    largest, base = _PREFIXES.index(unit[0]), unit[1:]
    for power in range(largest, 0, -1):
        if value >= 1000.0**power:
            return f"{value / 1000.0**power:,.{digits}f} {_PREFIXES[power]}{base}"
    return f"{value:,.0f} {base}"


def seconds(value: float | None) -> str:
    """A time with its unit, s from one second on, else ms: four digits, or all before the point."""
    if value is None or not math.isfinite(value):
        return "-"
    number, unit = (value, "s") if value >= 1 else (value * 1e3, "ms")
    return f"{number:,.{max(0, 4 - len(str(int(number))))}f} {unit}"


def rate(value: float | None) -> str:
    """Tokens/s without their unit: whole, but three digits of what is below 10."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"

"""The profiler in little time, for tests that need a measured profile and not its figures."""

from __future__ import annotations

import pytest

from megatrain import rates, readings


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Readings of small things for a short time; their figures mean nothing."""
    patch.setattr(rates, "SECONDS", 0.002)
    patch.setattr(rates, "SLICE_S", 0.0002)
    patch.setattr(readings, "ARENA", 1 << 18)
    patch.setattr(readings, "SIZES", (1 << 12, 1 << 16))
    patch.setattr(readings, "PARAMS", 5_000)
    patch.setattr(readings, "MATRIX", 32)
    patch.setattr(readings, "FRESH", 1 << 14)
    patch.setattr(readings, "DRIVE_FILE", 1 << 18)
    patch.setattr(readings, "PIECES", (1 << 14, readings.PIECE))
    patch.setattr(readings, "DEPTHS", (1, readings.DEPTH))

"""Tests that ask for torch's own bits: off x86 these depend on which products and sums torch's compiler fused."""

from __future__ import annotations

import platform

import pytest

of_torch = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="torch's kernel has other bits on this processor"
)

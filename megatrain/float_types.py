"""The types of torch in which a precision's elements lie: the one place that tells bytes from types."""

from __future__ import annotations

import torch


def float_type(nbytes: int) -> torch.dtype:
    """The floating type of a precision's element of that many bytes."""
    return {2: torch.bfloat16, 4: torch.float32}[nbytes]

"""Products chunk by chunk, and how exact they are: of what takes the place of attention by a state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def enough_for(given: Tensor) -> str:
    """TF32 on a GPU for what was given in 16 bits; else as it is."""
    return "high" if given.is_cuda and given.itemsize < 4 else torch.get_float32_matmul_precision()


@contextmanager
def precision(wanted: str) -> Iterator[None]:
    """Of products of fp32 numbers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Chunk by chunk and head by head."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:3], b.shape[-1])


def add(to: Tensor, a: Tensor, b: Tensor) -> None:
    to.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))

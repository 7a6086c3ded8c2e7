"""What takes the place of attention by a state: its products, how exact they are, and the norm at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


class Gated(torch.autograd.Function):
    """What was returned, o, with its norm and gate z, by functions of `megatrain.pointwise`: forward and backward.

    Saves both, and a factor of each row that the norm is over.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float,
        there: Callable[..., tuple[Tensor, Tensor]],
        back: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        y, rstd = there(o.detach(), z.detach(), weight.detach(), eps)
        ctx.save_for_backward(o, z, weight, rstd)
        ctx.back = back
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        o, z, weight, rstd = ctx.saved_tensors
        do, dz, dweight = ctx.back(grads[0], o, z, weight, rstd)
        # torch's compiler (2.11) drops a dimension of one, where rows are many
        return do, dz, dweight.view_as(weight).to(weight.dtype), None, None, None

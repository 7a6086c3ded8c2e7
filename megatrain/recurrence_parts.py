"""What the gated delta rule and a state space compute alike between their products, as plain functions of tensors.

Tokens are [batch, seq, heads, dim]. In chunks they are [chunks, batch x heads, CHUNK, dim], and what is beyond the last
token is zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from schedules.recurrence import CHUNK


def chunked(x: Tensor) -> Tensor:
    """Tokens [batch, seq, heads, ...] in chunks, a new tensor."""
    x = torch.unflatten(F.pad(x, [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % CHUNK]), 1, (-1, CHUNK))
    return x.transpose(0, 1).movedim(3, 2).contiguous().flatten(1, 2)


def tokens(x: Tensor, batch: int, seq: int) -> Tensor:
    """The inverse of `chunked`: [batch, seq, heads, ...]."""
    return torch.unflatten(x, 1, (batch, -1)).movedim(2, 3).transpose(0, 1).flatten(1, 2)[:, :seq]


def chunked_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens in chunks, in that type."""
    return chunked(x.to(dtype))


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolved(x: Tensor, taps: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums of each token and those before it times `taps` [heads, dim, kernel], and a bias; and x with zeros before."""
    kernel, seq = taps.shape[-1], x.shape[1]
    before, taps = F.pad(widened(x), (0, 0, 0, 0, kernel - 1, 0)), widened(taps)
    found = before[:, :seq] * taps[..., 0]
    for j in range(1, kernel):
        found = found.addcmul(before[:, j : j + seq], taps[..., j])
    return found if bias is None else found + widened(bias), before


def convolved_backward(d: Tensor, before: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and of taps, of that of the sums; `before` is the tokens with zeros before."""
    kernel, seq = taps.shape[-1], d.shape[1]
    after, taps = F.pad(d, (0, 0, 0, 0, 0, kernel - 1)), widened(taps)
    dx = after[:, kernel - 1 : kernel - 1 + seq] * taps[..., 0]
    for j in range(1, kernel):
        dx = dx.addcmul(after[:, kernel - 1 - j : kernel - 1 - j + seq], taps[..., j])
    return dx, torch.stack([(d * before[:, j : j + seq]).sum((0, 1)) for j in range(kernel)], dim=-1)


def pair_decays(sums: Tensor) -> Tensor:
    """exp(c_i - c_j) on and below the diagonal, zeros above."""
    apart = sums[..., :, None] - sums[..., None, :]
    return apart.tril().exp().tril()


def summed_after(d: Tensor, dim: int = -1) -> Tensor:
    """The gradient of what was summed since a chunk began, of that of the sums: of each that of it and those after."""
    return d + d.sum(dim, keepdim=True) - d.cumsum(dim)

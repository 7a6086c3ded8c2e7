"""What a state space's scan computes between its products, as plain functions of tensors; `megatrain.mamba` has it.

Tokens are [batch, seq, heads or groups, dim]. In chunks, wide, they are by head, [chunks, batch x heads, CHUNK,
head_dim], or side by side, a group's heads in one row: [chunks, batch x groups, CHUNK, heads of a group x head_dim].
What is beyond the last token is zero. `sums` and `step` are [chunks, batch x heads, CHUNK].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.recurrence_parts import (
    chunked,
    convolved,
    convolved_backward,
    pair_decays,
    summed_after,
    tokens,
    widened,
)


def beside(x: Tensor, groups: int) -> Tensor:
    """By head to side by side, where there are so many groups in all: a new tensor, unless a group has one head."""
    return torch.unflatten(x, 1, (groups, -1)).transpose(2, 3).flatten(3)


def by_head(x: Tensor, dim: int) -> Tensor:
    """The inverse of `beside`, for heads of that many values."""
    return torch.unflatten(x, 3, (-1, dim)).transpose(2, 3).flatten(1, 2)


# ---- steps and decays


def steps(dt: Tensor, rate: Tensor, bias: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Steps, and decays summed since their chunk began; of dt [batch, seq, heads], rate and bias [heads].

    A step is softplus(dt + bias), `least` where that is less, a decay -exp(rate) times that.
    """
    step = F.softplus(widened(dt) + widened(bias)).clamp(min=least)
    return chunked(step), chunked(step * -widened(rate).exp()).cumsum(-1)


def steps_backward(
    d_step: Tensor, d_sums: Tensor, dt: Tensor, rate: Tensor, bias: Tensor, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of dt in its type, of rate and bias in d_sums'."""
    batch, seq = dt.shape[:2]
    d_decay, slope = tokens(summed_after(d_sums), batch, seq), -widened(rate).exp()
    shifted = widened(dt) + widened(bias)
    free = F.softplus(shifted)
    d_rate = (d_decay * slope * free.clamp(min=least)).sum((0, 1))
    d_dt = (tokens(d_step, batch, seq) + d_decay * slope) * shifted.sigmoid() * (free >= least)
    return d_dt.to(dt.dtype), d_rate, d_dt.sum((0, 1))


# ---- the convolution


def keys(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """silu of the convolution of x, in chunks; taps [groups, dim, kernel], bias [groups, dim]."""
    y, before = convolved(x, taps, bias)
    del before
    return chunked(F.silu(y, inplace=True))


def values(x: Tensor, taps: Tensor, bias: Tensor, step: Tensor, sums: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """silu of the convolution by head; and times what of it is left in the state at the chunk's end, side by side."""
    made = keys(x, taps, bias)
    left = step * (sums[..., -1:] - sums).exp()
    return made, beside(made * left[..., None], groups)


def keys_backward(d: Tensor, x: Tensor, taps: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x in its type, and of taps and bias in d's; d is in chunks."""
    y, before = convolved(x, taps, bias)
    d = torch.ops.aten.silu_backward(tokens(d, *x.shape[:2]), y)
    dx, d_taps = convolved_backward(d, before, taps)
    return dx.to(x.dtype), d_taps, d.sum((0, 1))


# ---- pairs of a chunk's tokens


def decayed(scores: Tensor, sums: Tensor, step: Tensor) -> Tensor:
    """What each head weighs values by, of its group's products [chunks, batch x groups, CHUNK, CHUNK]."""
    of_heads = pair_decays(sums) * step[..., None, :]
    return (torch.unflatten(of_heads, 1, (scores.shape[1], -1)) * scores[:, :, None]).flatten(1, 2)


def decayed_backward(d: Tensor, scores: Tensor, sums: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the products, summed over a group's heads, of sums and of steps."""
    of_heads, groups = d * pair_decays(sums), scores.shape[1]
    d_scores = torch.unflatten(of_heads * step[..., None, :], 1, (groups, -1)).sum(2)
    of_steps = (torch.unflatten(of_heads, 1, (groups, -1)) * scores[:, :, None]).flatten(1, 2)
    of_sums = of_steps * step[..., None, :]
    return d_scores, of_sums.sum(-1) - of_sums.sum(-2), of_steps.sum(-2)


# ---- what leaves


def output(to: Tensor, within: Tensor, carried: Tensor, x: Tensor, sums: Tensor, skip: Tensor) -> None:
    """Writes tokens [batch, seq, heads, head_dim]: of values by head, and of what the state returned, side by side.

    `skip` [heads] is what values are added times.
    """
    batch, seq = to.shape[:2]
    found = (by_head(carried, x.shape[-1]) * sums.exp()[..., None]).add_(within)
    to.copy_(tokens(found.addcmul_(x, widened(skip).repeat(batch)[:, None, None]), batch, seq))


def arriving(dy: Tensor, sums: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The gradient of tokens by head; and that of what the state returns, side by side."""
    d = chunked(dy.to(sums.dtype))
    return d, beside(d * sums.exp()[..., None], groups)


def through(d_after: Tensor, states: Tensor, heads: int) -> Tensor:
    """The gradient of exp(c_end) where it multiplies the state: [chunks, batch x heads], so many heads in a group."""
    both = torch.unflatten(d_after * states, -1, (heads, -1))
    return both.sum((2, 4)).flatten(1)


def values_backward(
    d_x: Tensor,
    d: Tensor,
    left: Tensor,
    carried: Tensor,
    d_through: Tensor,
    x: Tensor,
    step: Tensor,
    sums: Tensor,
    skip: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of values, by head, of steps, of sums, and of skip.

    `d_x` is values' from the pairs, `d` that of tokens; side by side, `left` is that of what is left of values in the
    state, and `carried` what the state returned.
    """
    batch, dim = sums.shape[1] // len(skip), x.shape[-1]
    rest = (sums[..., -1:] - sums).exp()
    left = by_head(left, dim)
    of_left = (left * x).sum(-1) * rest
    d_step, of_rest = of_left, of_left * step
    d_end = of_rest.sum(-1) + sums[..., -1].exp() * d_through
    d_sums = (d * by_head(carried, dim)).sum(-1) * sums.exp() - of_rest
    d_sums = d_sums + F.pad(d_end[..., None], (sums.shape[-1] - 1, 0))
    d_skip = (d * x).sum((0, 2, 3)).view(batch, -1).sum(0)
    found = d_x + d * widened(skip).repeat(batch)[:, None, None] + left * (step * rest)[..., None]
    return found, d_step, d_sums, d_skip


# ---- the norm and gate of what is returned, as tokens


def norm_of_gated_forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of o times silu(z) over the last dimension, in o's type; and its factors. `weight` has the last two."""
    wide = torch.promote_types(o.dtype, torch.float32)
    gated = F.silu(z.to(wide)).mul_(o)
    rstd = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return gated.mul_(rstd).mul_(weight.to(wide)).to(o.dtype), rstd


def norm_of_gated_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o and z, in their type, and of weight, in rstd's, summed over all but its own dimensions."""
    wide = rstd.dtype
    gate = F.silu(z.to(wide))
    normed = (gate * o).mul_(rstd)
    d_weight = (normed * dy).flatten(0, -3).sum(0)
    d = dy * weight.to(wide)
    mean = (d * normed).mean(-1, keepdim=True)
    d = d.sub_(normed.mul_(mean)).mul_(rstd)
    dz = torch.ops.aten.silu_backward(d * o, z.to(wide)).to(z.dtype)
    return d.mul_(gate).to(o.dtype), dz, d_weight

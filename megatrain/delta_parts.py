"""What the gated delta rule computes between its products, as plain functions of tensors; `megatrain.delta` has it.

Tokens are [batch, seq, heads, dim]. In chunks they are [chunks, batch x value heads, CHUNK, dim], in at least fp32, and
what is beyond the last token is zero. `sums` and `beta` are [chunks, batch x value heads, CHUNK].
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
from schedules.recurrence import CHUNK

EPS = 1e-6  # under the root of a query's and a key's length (transformers, modeling_qwen3_5.py; flash-linear-attention)


# ---- decays and betas


def gates(b: Tensor, a: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decays, summed since their chunk began, and betas; of b and a [batch, seq, heads], and rate and bias [heads].

    A decay is -exp(rate) softplus(a + bias), a beta sigmoid(b).
    """
    decay = -widened(rate).exp() * F.softplus(widened(a) + widened(bias))
    return chunked(decay).cumsum(-1), chunked(widened(b).sigmoid())


def gates_backward(
    d_sums: Tensor, d_beta: Tensor, b: Tensor, a: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of b and a in their type, of rate and bias in d_sums'."""
    batch, seq = b.shape[:2]
    d_decay = tokens(summed_after(d_sums), batch, seq)
    beta, slope = widened(b).sigmoid(), -widened(rate).exp()
    shifted = widened(a) + widened(bias)
    d_a = d_decay * slope * shifted.sigmoid()
    d_rate = (d_decay * slope * F.softplus(shifted)).sum((0, 1))
    d_b = tokens(d_beta, batch, seq) * beta * (1 - beta)
    return d_b.to(b.dtype), d_a.to(a.dtype), d_rate, d_a.sum((0, 1))


# ---- the convolution, and lengths of queries and keys


def inputs(
    q: Tensor, k: Tensor, v: Tensor, q_taps: Tensor, k_taps: Tensor, v_taps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in chunks: silu of the convolution; queries and keys of length one, for each value head.

    Queries are divided by the root of their dimension, too.
    """
    found = []
    for x, taps, length in ((q, q_taps, q.shape[-1] ** -0.5), (k, k_taps, 1.0), (v, v_taps, None)):
        y = F.silu(convolved(x, taps)[0])
        if length is not None:
            y = y * (length * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS))
            y = y.repeat_interleave(v.shape[2] // y.shape[2], dim=2)
        found.append(chunked(y))
    return found[0], found[1], found[2]


def input_backward(d: Tensor, x: Tensor, taps: Tensor, length: float | None) -> tuple[Tensor, Tensor]:
    """Gradients of queries, keys or values in x's type, and of their taps in d's; `length` as in `inputs`, or None."""
    batch, seq, heads, _ = x.shape
    y, before = convolved(x, taps)
    d = torch.unflatten(tokens(d, batch, seq), 2, (heads, -1)).sum(3)
    if length is not None:
        made = F.silu(y)
        inverse = torch.rsqrt(made.square().sum(-1, keepdim=True) + EPS)
        unit = made * inverse
        d = (d - unit * (d * unit).sum(-1, keepdim=True)) * (length * inverse)
    d = torch.ops.aten.silu_backward(d, y)
    dx, d_taps = convolved_backward(d, before, taps)
    return dx.to(x.dtype), d_taps


# ---- pairs of a chunk's tokens


def decayed(gram: Tensor, scores: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """A and P of the products of keys with keys, and of queries with keys."""
    decays = pair_decays(sums)
    return (gram * decays * beta[..., None]).tril(-1), (scores * decays).tril()


def decayed_backward(
    d_system: Tensor, d_p: Tensor, gram: Tensor, p: Tensor, sums: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the products of keys, of queries with keys, of sums and of beta. A's own is minus `d_system`.

    That of the products of keys is added to its transpose, since both factors are the keys.
    """
    decays = pair_decays(sums)
    d_a, d_p = -d_system.tril(-1) * decays, d_p.tril()
    of_decays = d_a * gram * beta[..., None] + d_p * p
    d_gram = d_a * beta[..., None]
    return d_gram + d_gram.mT, d_p * decays, of_decays.sum(-1) - of_decays.sum(-2), (d_a * gram).sum(-1)


# ---- what a chunk is given by the state, and gives to it


def right(k: Tensor, v: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The triangular system's right side, [beta v, beta exp(c) k], and exp(c_end - c) k."""
    grown, rest = sums.exp(), (sums[..., -1:] - sums).exp()
    return torch.cat((v * beta[..., None], k * (beta * grown)[..., None]), dim=-1), k * rest[..., None]


def carried(d_after: Tensor, states: Tensor) -> Tensor:
    """The gradient of exp(c_end) where it multiplies the state: [chunks, batch x value heads]."""
    return (d_after * states).sum((-1, -2))


def right_backward(
    d_right: Tensor,
    read: Tensor,
    left: Tensor,
    carried: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, sums and beta.

    `read` and `left` are those of exp(c) q and exp(c_end - c) k; for `carried` see there.
    """
    grown, rest, last = sums.exp(), (sums[..., -1:] - sums).exp(), sums[..., -1].exp()
    du, dw = torch.split(d_right, [v.shape[-1], k.shape[-1]], dim=-1)
    along, of_left = grown * (dw * k).sum(-1), rest * (left * k).sum(-1)
    d_sums = beta * along + grown * (read * q).sum(-1) - of_left
    d_end = of_left.sum(-1) + last * carried
    d_sums = d_sums + F.pad(d_end[..., None], (CHUNK - 1, 0))
    d_k = dw * (beta * grown)[..., None] + left * rest[..., None]
    return read * grown[..., None], d_k, du * beta[..., None], d_sums, (du * v).sum(-1) + along


# ---- the norm and gate of what is returned, as tokens


def gated_norm_forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of o over its last dimension, times silu(z), in o's type; and 1 / sqrt(mean(o^2) + eps)."""
    wide = torch.promote_types(o.dtype, torch.float32)
    rstd = torch.rsqrt(o.to(wide).square().mean(-1, keepdim=True) + eps)
    return (o * rstd).mul_(weight.to(wide)).mul_(F.silu(z.to(wide))).to(o.dtype), rstd


def gated_norm_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o and z, in their type, and of weight, in rstd's, summed over all but its own dimension."""
    wide = rstd.dtype
    gate, normed = F.silu(z.to(wide)), o * rstd
    d_gate = (dy * normed).mul_(weight.to(wide))
    dz = torch.ops.aten.silu_backward(d_gate, z.to(wide)).to(z.dtype)
    del d_gate
    d_scaled = gate.mul_(dy)
    d_weight = (d_scaled * normed).flatten(0, -2).sum(0)
    d_normed = d_scaled.mul_(weight.to(wide))
    mean = (d_normed * normed).mean(-1, keepdim=True)
    return d_normed.sub_(normed.mul_(mean)).mul_(rstd).to(o.dtype), dz, d_weight

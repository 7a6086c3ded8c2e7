"""What the gated delta rule computes between its products, as plain functions of tensors; `megatrain.delta` has it.

Tokens are [batch, seq, heads, dim]. In chunks they are [chunks, batch x value heads, CHUNK, dim], in at least fp32, and
what is beyond the last token is zero. `beta` is [chunks, batch x value heads, CHUNK], and `sums` has one dimension
more: of the channels of a key, or of one where all decay alike.
"""

from __future__ import annotations

from collections.abc import Callable

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

Gate = Callable[[Tensor], Tensor]

EPS = 1e-6  # under the root of a query's and a key's length (transformers, modeling_qwen3_5.py; flash-linear-attention)


# ---- decays and betas


def gates(b: Tensor, a: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decays, summed since their chunk began, and betas; of b [batch, seq, heads], a [batch, seq, heads, channels],
    rate [heads] and bias [heads, channels].

    A decay is -exp(rate) softplus(a + bias), a beta sigmoid(b).
    """
    decay = -widened(rate).exp()[:, None] * F.softplus(widened(a) + widened(bias))
    return chunked(decay).cumsum(2), chunked(widened(b).sigmoid())


def gates_backward(
    d_sums: Tensor, d_beta: Tensor, b: Tensor, a: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of b and a in their type, of rate and bias in d_sums'."""
    batch, seq = b.shape[:2]
    d_decay = tokens(summed_after(d_sums, 2), batch, seq)
    beta, slope = widened(b).sigmoid(), -widened(rate).exp()[:, None]
    shifted = widened(a) + widened(bias)
    d_a = d_decay * slope * shifted.sigmoid()
    d_rate = (d_decay * slope * F.softplus(shifted)).sum((0, 1, 3))
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
    decays = pair_decays(sums[..., 0])
    return (gram * decays * beta[..., None]).tril(-1), (scores * decays).tril()


def decayed_backward(
    d_system: Tensor, d_p: Tensor, gram: Tensor, p: Tensor, sums: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the products of keys, of queries with keys, of sums and of beta. A's own is minus `d_system`.

    That of the products of keys is added to its transpose, since both factors are the keys.
    """
    decays = pair_decays(sums[..., 0])
    d_a, d_p = -d_system.tril(-1) * decays, d_p.tril()
    of_decays = d_a * gram * beta[..., None] + d_p * p
    d_gram = d_a * beta[..., None]
    d_sums = of_decays.sum(-1) - of_decays.sum(-2)
    return d_gram + d_gram.mT, d_p * decays, d_sums[..., None], (d_a * gram).sum(-1)


# ---- the same where each channel decays by itself; `megatrain.channel_pairs` has the products between


def halves(q: Tensor, k: Tensor, sums: Tensor, beta: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Of each `2 half` tokens in a row the second half's beta k and q, times exp(c - e), and the first's k, times
    exp(e - c), for e of the first half's last: [chunks, heads, blocks, 2 half, dim] and [..., half, dim].
    """
    earlier, later = torch.unflatten(sums, 2, (-1, 2, half)).unbind(3)
    edge = earlier[..., -1:, :]
    (_, q_later), (k_earlier, k_later) = (torch.unflatten(x, 2, (-1, 2, half)).unbind(3) for x in (q, k))
    weight = torch.unflatten(beta, 2, (-1, 2, half))[:, :, :, 1, :, None]
    rest = (later - edge).exp()
    return torch.cat((k_later * (weight * rest), q_later * rest), dim=3), k_earlier * (edge - earlier).exp()


def halves_backward(
    d_later: Tensor, d_earlier: Tensor, sums: Tensor, of_q: Tensor, of_k: Tensor, of_earlier: Tensor
) -> None:
    """Add the gradients of q, of beta k and of k to those of the second halves, and of the first: [chunks, heads,
    blocks, half, dim]. A compiler adds to all of a tensor in place, and copies one of which a part is added to.
    """
    half = d_earlier.shape[3]
    earlier, later = torch.unflatten(sums, 2, (-1, 2, half)).unbind(3)
    edge = earlier[..., -1:, :]
    rest = (later - edge).exp()
    d_k, d_q = torch.split(d_later, half, dim=3)
    of_q.add_(d_q * rest)
    of_k.add_(d_k * rest)
    of_earlier.add_(d_earlier * (edge - earlier).exp())


def paired_backward(
    of_q: Tensor, of_k: Tensor, of_earlier: Tensor, on_diagonal: Tensor, q: Tensor, k: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, sums and beta, of those that pairs of two tokens have, and P's diagonal's.

    What depends on c_i and c_j as exp(c_i - c_j) does has gradients that are what it is times its own.
    """
    d_beta, of_k, itself = (of_k * k).sum(-1), of_k * beta[..., None], on_diagonal[..., None]
    d_sums = of_q * q + (of_k - of_earlier) * k
    return of_q + itself * k, of_k + of_earlier + itself * q, d_sums, d_beta


# ---- what a chunk is given by the state, and gives to it


def right(k: Tensor, v: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The triangular system's right side, [beta v, beta exp(c) k], and exp(c_end - c) k."""
    beta = beta[..., None]
    return torch.cat((v * beta, k * (beta * sums.exp())), dim=-1), k * (sums[..., -1:, :] - sums).exp()


def carried(d_after: Tensor, states: Tensor, channels: int) -> Tensor:
    """The gradient of exp(c_end) where it multiplies the state: [chunks, batch x value heads, channels]."""
    product = d_after * states
    return product.sum(-1) if channels > 1 else product.sum((-1, -2))[..., None]


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
    grown, rest, last = sums.exp(), (sums[..., -1:, :] - sums).exp(), sums[..., -1, :].exp()
    du, dw = torch.split(d_right, [v.shape[-1], k.shape[-1]], dim=-1)
    along, of_left, of_read = (product.sum_to_size(sums.shape) for product in (dw * k, left * k, read * q))
    along, of_left, beta = grown * along, rest * of_left, beta[..., None]
    d_sums = beta * along + grown * of_read - of_left
    d_end = of_left.sum(-2) + last * carried
    d_sums = d_sums + F.pad(d_end[..., None, :], (0, 0, CHUNK - 1, 0))
    d_k = dw * (beta * grown) + left * rest
    return read * grown, d_k, du * beta, d_sums, (du * v).sum(-1) + along.sum(-1)


# ---- the norm and gate of what is returned, as tokens


def gated_norm_forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of o over its last dimension, times silu(z), in o's type; and 1 / sqrt(mean(o^2) + eps)."""
    return _gated_norm(o, z, weight, eps, F.silu)


def opened_norm_forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same, times sigmoid(z)."""
    return _gated_norm(o, z, weight, eps, torch.sigmoid)


def _gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: Gate) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(o.dtype, torch.float32)
    rstd = torch.rsqrt(o.to(wide).square().mean(-1, keepdim=True) + eps)
    return (o * rstd).mul_(weight.to(wide)).mul_(gate(z.to(wide))).to(o.dtype), rstd


def gated_norm_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of o and z, in their type, and of weight, in rstd's, summed over all but its own dimension."""
    return _gated_norm_backward(dy, o, z, weight, rstd, F.silu, torch.ops.aten.silu_backward)


def opened_norm_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where sigmoid(z) was the gate."""

    def back(d: Tensor, z: Tensor) -> Tensor:
        opened = torch.sigmoid(z)
        return d * opened * (1 - opened)

    return _gated_norm_backward(dy, o, z, weight, rstd, torch.sigmoid, back)


def _gated_norm_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, rstd: Tensor, gate_of: Gate, back: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    wide = rstd.dtype
    gate, normed = gate_of(z.to(wide)), o * rstd
    d_gate = (dy * normed).mul_(weight.to(wide))
    dz = back(d_gate, z.to(wide)).to(z.dtype)
    del d_gate
    d_scaled = gate.mul_(dy)
    d_weight = (d_scaled * normed).flatten(0, -2).sum(0)
    d_normed = d_scaled.mul_(weight.to(wide))
    mean = (d_normed * normed).mean(-1, keepdim=True)
    return d_normed.sub_(normed.mul_(mean)).mul_(rstd).to(o.dtype), dz, d_weight

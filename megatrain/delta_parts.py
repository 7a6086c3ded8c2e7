"""What the gated delta rule computes between its products, as plain functions of tensors; `megatrain.delta` has it.

Tokens are [batch, seq, heads, dim]. In chunks they are [chunks, batch x value heads, CHUNK, dim], in at least fp32, and
what is beyond the last token is zero. `sums` and `beta` are [chunks, batch x value heads, CHUNK].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from schedules.delta import CHUNK

EPS = 1e-6  # under the root of a query's and a key's length (transformers, modeling_qwen3_5.py; flash-linear-attention)


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


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- decays and betas


def gates(b: Tensor, a: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decays, summed since their chunk began, and betas; of b and a [batch, seq, heads], and rate and bias [heads].

    A decay is -exp(rate) softplus(a + bias), a beta sigmoid(b).
    """
    decay = -_wide(rate).exp() * F.softplus(_wide(a) + _wide(bias))
    return chunked(decay).cumsum(-1), chunked(_wide(b).sigmoid())


def gates_backward(
    d_sums: Tensor, d_beta: Tensor, b: Tensor, a: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of b and a in their type, of rate and bias in d_sums'."""
    batch, seq = b.shape[:2]
    d_decay = tokens(d_sums + d_sums.sum(-1, keepdim=True) - d_sums.cumsum(-1), batch, seq)
    beta, slope = _wide(b).sigmoid(), -_wide(rate).exp()
    shifted = _wide(a) + _wide(bias)
    d_a = d_decay * slope * shifted.sigmoid()
    d_rate = (d_decay * slope * F.softplus(shifted)).sum((0, 1))
    d_b = tokens(d_beta, batch, seq) * beta * (1 - beta)
    return d_b.to(b.dtype), d_a.to(a.dtype), d_rate, d_a.sum((0, 1))


# ---- the convolution, and lengths of queries and keys


def _convolved(x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of each token and those before it times `taps` [heads, dim, kernel]; and x with zeros before."""
    kernel, seq = taps.shape[-1], x.shape[1]
    before, taps = F.pad(_wide(x), (0, 0, 0, 0, kernel - 1, 0)), _wide(taps)
    found = before[:, :seq] * taps[..., 0]
    for j in range(1, kernel):
        found = found.addcmul(before[:, j : j + seq], taps[..., j])
    return found, before


def inputs(
    q: Tensor, k: Tensor, v: Tensor, q_taps: Tensor, k_taps: Tensor, v_taps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in chunks: silu of the convolution; queries and keys of length one, for each value head.

    Queries are divided by the root of their dimension, too.
    """
    found = []
    for x, taps, length in ((q, q_taps, q.shape[-1] ** -0.5), (k, k_taps, 1.0), (v, v_taps, None)):
        y = F.silu(_convolved(x, taps)[0])
        if length is not None:
            y = y * (length * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS))
            y = y.repeat_interleave(v.shape[2] // y.shape[2], dim=2)
        found.append(chunked(y))
    return found[0], found[1], found[2]


def input_backward(d: Tensor, x: Tensor, taps: Tensor, length: float | None) -> tuple[Tensor, Tensor]:
    """Gradients of queries, keys or values in x's type, and of their taps in d's; `length` as in `inputs`, or None."""
    batch, seq, heads, _ = x.shape
    kernel = taps.shape[-1]
    y, before = _convolved(x, taps)
    d = torch.unflatten(tokens(d, batch, seq), 2, (heads, -1)).sum(3)
    if length is not None:
        made = F.silu(y)
        inverse = torch.rsqrt(made.square().sum(-1, keepdim=True) + EPS)
        unit = made * inverse
        d = (d - unit * (d * unit).sum(-1, keepdim=True)) * (length * inverse)
    d = torch.ops.aten.silu_backward(d, y)
    after, wide = F.pad(d, (0, 0, 0, 0, 0, kernel - 1)), _wide(taps)
    dx = after[:, kernel - 1 : kernel - 1 + seq] * wide[..., 0]
    for j in range(1, kernel):
        dx = dx.addcmul(after[:, kernel - 1 - j : kernel - 1 - j + seq], wide[..., j])
    d_taps = torch.stack([(d * before[:, j : j + seq]).sum((0, 1)) for j in range(kernel)], dim=-1)
    return dx.to(x.dtype), d_taps


# ---- pairs of a chunk's tokens


def _decays(sums: Tensor) -> Tensor:
    """exp(c_i - c_j) on and below the diagonal, zeros above."""
    apart = sums[..., :, None] - sums[..., None, :]
    return apart.tril().exp().tril()


def decayed(gram: Tensor, scores: Tensor, sums: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """A and P of the products of keys with keys, and of queries with keys."""
    decays = _decays(sums)
    return (gram * decays * beta[..., None]).tril(-1), (scores * decays).tril()


def decayed_backward(
    d_system: Tensor, d_p: Tensor, gram: Tensor, p: Tensor, sums: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the products of keys, of queries with keys, of sums and of beta. A's own is minus `d_system`.

    That of the products of keys is added to its transpose, since both factors are the keys.
    """
    decays = _decays(sums)
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

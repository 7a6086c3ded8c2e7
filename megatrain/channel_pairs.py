"""What pairs of a chunk's tokens share where each channel of a key decays by itself, as in Kimi Delta Attention.

Of a token i and one before it, j, the gated delta rule wants sums over channels of x_i k_j exp(c_i - c_j), x being beta
times the key, for A, or the query, for P; see `megatrain.delta`. Decays differ by channel, so that they are no factor
of the product; and exp(c_i) and exp(-c_j) apart would overflow. But between the two lies an edge e, at which no channel
has decayed less than at j, or more than at i: exp(c_i - e) and exp(e - c_j) are at most one. So halves of the chunk are
multiplied with each other, then halves of each half, and so on: no pair is multiplied twice, none above the diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.pointwise import Pointwise
from schedules.recurrence import CHUNK

HALVES = tuple(CHUNK >> n for n in range(1, CHUNK.bit_length()))  # tokens of a half, the largest first


def pairs(q: Tensor, k: Tensor, sums: Tensor, beta: Tensor, pointwise: Pointwise) -> tuple[Tensor, Tensor]:
    """A, below the diagonal, and P, on and below it: [chunks, heads, CHUNK, CHUNK], zeros elsewhere.

    q, k and sums are [chunks, heads, CHUNK, dim], beta [chunks, heads, CHUNK].
    """
    system = q.new_zeros(*q.shape[:-1], CHUNK)
    p = torch.diag_embed((q * k).sum(-1))

    def multiply(half: int) -> None:  # what it makes is gone when the next halves are
        later, earlier = pointwise.delta_halves(q, k, sums, beta, half)
        found = _times(later, earlier.mT)
        _between(system, half).copy_(found[..., :half, :])
        _between(p, half).copy_(found[..., half:, :])

    for half in HALVES:
        multiply(half)
    return system, p


def pairs_backward(
    d_system: Tensor, d_p: Tensor, q: Tensor, k: Tensor, sums: Tensor, beta: Tensor, pointwise: Pointwise
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, sums and beta. A's own is minus `d_system`; above the diagonal neither is read."""
    # of what is later and multiplied by its query, or by beta times its key; and of keys of what is earlier
    of_q, of_k, of_earlier = (torch.zeros_like(k) for _ in range(3))

    def multiply(half: int) -> None:
        later, earlier = pointwise.delta_halves(q, k, sums, beta, half)
        d = torch.cat((_between(d_system, half).neg(), _between(d_p, half)), dim=-2)
        d_later, d_earlier = _times(d, earlier), _times(d.mT, later)
        del later, earlier, d
        into = (torch.unflatten(x, 2, (-1, 2, half)).select(3, n) for x, n in ((of_q, 1), (of_k, 1), (of_earlier, 0)))
        pointwise.delta_halves_backward(d_later, d_earlier, sums, *into)

    for half in HALVES:
        multiply(half)
    on_diagonal = torch.diagonal(d_p, dim1=-2, dim2=-1)
    return pointwise.delta_paired_backward(of_q, of_k, of_earlier, on_diagonal, q, k, beta)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Block by block: [chunks, heads, blocks, m, n]."""
    return torch.bmm(a.flatten(0, 2), b.flatten(0, 2)).view(*a.shape[:4], b.shape[4])


def _between(of_pairs: Tensor, half: int) -> Tensor:
    """A view of the pairs of second halves with first ones: [chunks, heads, blocks, half, half]."""
    blocks = torch.unflatten(torch.unflatten(of_pairs, 3, (-1, 2 * half)), 2, (-1, 2 * half))
    return torch.diagonal(blocks, dim1=2, dim2=4).movedim(-1, 2)[..., half:, :half]

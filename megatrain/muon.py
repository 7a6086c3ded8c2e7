"""Muon on a block's slabs (Jordan et al., kellerjordan.github.io/posts/muon, 2024), and AdamW on what is no matrix.

A matrix's momentum, by Nesterov, is orthogonalised: its singular values all come near one. The update is scaled to be
as large as AdamW's would be, 0.2 at the root mean square (Liu et al., arXiv:2502.16982), so that one learning rate and
one weight decay serve both. It is what `torch.optim.Muon(nesterov=True, adjust_lr_fn="match_rms_adamw")` does.

The state slab of a block is flat bytes, for m parameters in matrices and k others:
  momentum [m], fp32, or bf16 in bf16_16bit
  AdamW's slab of the others, see `megatrain.adam_state`
  bf16_split  int16 [m], bf16_fp32  fp32 [m]: what is kept of the matrices' master
These are the bytes of `schedules.optimizer.state_bytes`. Weights and momenta in bf16 are rounded as AdamW's are; what
is drawn for the others is by their place among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain import adam, adam_state
from megatrain.adam import Adam
from megatrain.stochastic_rounding import Draws, round_to
from schedules.optimizer import COPIES, ITERATIONS, PASS, Matrices
from schedules.workload import PRECISIONS

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's iteration: X becomes aX + (bA + cA^2)X with A = XX^T
RMS = 0.2  # of an update of AdamW, by Liu et al.
EPS = 1e-7  # no norm is divided by less


@dataclass(frozen=True, slots=True)
class State:
    """The parts of a block's state slab, as views."""

    momentum: Tensor
    others: Tensor  # uint8, AdamW's
    low: Tensor | None
    master: Tensor | None


def split_state(state: Tensor, n: int, matrices: Sequence[Matrices], precision: str) -> State:
    """Views of the state slab, uint8, of a block of n parameters. Raises ValueError when its size is another."""
    kept, in_matrices = PRECISIONS[precision], sum(of.size for of in matrices)
    moments = in_matrices * kept.moment
    rest = moments + kept.state_bytes(n - in_matrices)
    expected = rest + in_matrices * (kept.state - 2 * kept.moment)
    adam_state.require_bytes(state, expected, n, precision)
    return State(
        momentum=state[:moments].view(adam_state.MOMENTS.get(precision, torch.float32)),
        others=state[moments:rest],
        low=state[rest:].view(torch.int16) if precision == "bf16_split" else None,
        master=state[rest:].view(torch.float32) if precision == "bf16_fp32" else None,
    )


def initialise(weights: Tensor, state: Tensor, matrices: Sequence[Matrices], precision: str, source: Tensor) -> None:
    """Set the state before the first step, and the weights from `source` (fp32 [n])."""
    parts, others = split_state(state, weights.numel(), matrices, precision), _between(matrices, weights.numel())
    parts.momentum.zero_()
    own = _gathered(weights, others)
    adam_state.initialise(own, parts.others, precision, _gathered(source, others))
    _scatter(own, weights, others)
    for at, of in _within(matrices):
        if precision not in adam_state.MASTERS:
            weights[of.start : of.stop].copy_(source[of.start : of.stop])
            continue
        size = adam_state.CHUNK[weights.device.type]  # all at once would take gigabytes
        for start in range(0, of.size, size):
            piece = slice(start, min(start + size, of.size))
            here, there = _moved(piece, at), _moved(piece, of.start)
            low, kept = (None if part is None else part[here] for part in (parts.low, parts.master))
            adam_state.store_master(source[there].clone(), weights[there], low, kept)


def master_weights(weights: Tensor, state: Tensor, matrices: Sequence[Matrices], precision: str) -> Tensor:
    """The weights at their most exact: a new fp32 [n]."""
    parts, others = split_state(state, weights.numel(), matrices, precision), _between(matrices, weights.numel())
    found = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    _scatter(adam_state.master_weights(_gathered(weights, others), parts.others, precision), found, others)
    for at, of in _within(matrices):
        low, kept = (None if part is None else part[at : at + of.size] for part in (parts.low, parts.master))
        adam_state.load_master(found[of.start : of.stop], weights[of.start : of.stop], low, kept)
    return found


@torch.no_grad()
def step(
    weights: Tensor,
    grad: Tensor,
    state: Tensor,
    hyper: Adam,
    step_number: int,
    *,
    matrices: Sequence[Matrices],
    precision: str,
    grad_scale: Tensor | None = None,
    layer: int = 0,
) -> None:
    """Update `weights` (bf16 or fp32 [n]) and `state` (uint8) in place from `grad` (any floating type [n]).

    Matrices, which lie in the slab as `matrices` say, by Muon, the others by AdamW; weight decay is for matrices. For
    the rest see `adam.step`. Raises ValueError when sizes or types do not agree with `precision`.
    """
    parts, others = split_state(state, weights.numel(), matrices, precision), _between(matrices, weights.numel())
    own = _gathered(weights, others)
    adam.step(
        own, _gathered(grad, others), parts.others, hyper, step_number,
        precision=precision, grad_scale=grad_scale, decay=[], layer=layer,
    )  # fmt: skip
    _scatter(own, weights, others)
    draws = Draws.of(layer, step_number)
    most = max(of.together * of.rows * of.columns for of in matrices)
    turns = torch.empty(2, most, dtype=torch.bfloat16, device=weights.device)
    size = min(PASS if weights.device.type == "cuda" else adam_state.CHUNK["cpu"], most)
    scratch = torch.empty(COPIES, size, dtype=torch.float32, device=weights.device)
    for first, of in _within(matrices):
        rate = hyper.lr * RMS * math.sqrt(max(of.rows, of.columns))
        for at, shape in _groups(of):
            length = math.prod(shape)
            wanted, other = turns[0, :length], turns[1, :length]
            pieces = [slice(a, min(a + size, length)) for a in range(0, length, size)]
            for piece in pieces:
                here, there = _moved(piece, first + at), _moved(piece, of.start + at)
                _follow(grad[there], parts.momentum[here], wanted[piece], scratch, grad_scale, draws.after(there.start))
            update = orthogonalised(wanted.view(shape), other.view(shape)).view(-1)
            for piece in pieces:
                here, there = _moved(piece, first + at), _moved(piece, of.start + at)
                low, kept = (None if part is None else part[here] for part in (parts.low, parts.master))
                p = scratch[0, : there.stop - there.start]
                adam_state.load_master(p, weights[there], low, kept)
                p.mul_(1.0 - hyper.lr * hyper.weight_decay).add_(update[piece], alpha=-rate)
                if low is not None or kept is not None or weights.dtype == torch.float32:
                    adam_state.store_master(p, weights[there], low, kept)
                else:
                    round_to(weights[there], p, draws.after(there.start).bits(len(p), p.device)[0])


def _follow(
    grad: Tensor, momentum: Tensor, wanted: Tensor, scratch: Tensor, grad_scale: Tensor | None, draws: Draws
) -> None:
    """Move `momentum` towards the gradient, and write where it would be after as much again into `wanted`."""
    g = scratch[0, : len(grad)].copy_(grad)
    if grad_scale is not None:
        g.mul_(grad_scale)
    m = momentum if momentum.dtype == torch.float32 else scratch[1, : len(grad)].copy_(momentum)
    m.lerp_(g, 1.0 - MOMENTUM)
    wanted.copy_(g.lerp_(m, MOMENTUM))
    if m is not momentum:
        round_to(momentum, m, draws.bits(len(m), m.device)[1])


def orthogonalised(x: Tensor, other: Tensor) -> Tensor:
    """Of matrices x, bf16 [n, rows, columns], the nearest ones with singular values about 1 (0.7 to 1.2), in memory of
    x or of `other`, as large, both of which are overwritten.
    """
    n, rows, columns = x.shape
    tall = rows > columns
    if tall:
        x, other = other.view(n, columns, rows).copy_(x.mT), x.view(n, columns, rows)
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=EPS))
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x, other = torch.baddbmm(x, polynomial, x, beta=a, out=other), x
    return other.view(n, rows, columns).copy_(x.mT) if tall else x


def _within(matrices: Sequence[Matrices]) -> Iterator[tuple[int, Matrices]]:
    """Each with its place among what only matrices have."""
    at = 0
    for of in matrices:
        yield at, of
        at += of.size


def _groups(of: Matrices) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Where those begin that are orthogonalised together, from the first on, and their shape."""
    for first in range(0, of.count, of.together):
        yield first * of.rows * of.columns, (min(of.together, of.count - first), of.rows, of.columns)


def _moved(piece: slice, by: int) -> slice:
    return slice(piece.start + by, piece.stop + by)


def _between(matrices: Sequence[Matrices], n: int) -> list[slice]:
    """What of a slab of n parameters is in no matrix."""
    stops, starts = [0, *(of.stop for of in matrices)], [*(of.start for of in matrices), n]
    return [slice(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]


def _gathered(slab: Tensor, ranges: Sequence[slice]) -> Tensor:
    return torch.cat([slab[:0], *(slab[of] for of in ranges)])


def _scatter(values: Tensor, slab: Tensor, ranges: Sequence[slice]) -> None:
    at = 0
    for of in ranges:
        slab[of].copy_(values[at : at + of.stop - of.start])
        at += of.stop - of.start

"""State spaces (Mamba-2, arXiv:2405.21060) in the place of attention; `schedules.mamba` has the widths.

Per head a state S [state_dim, head_dim] begins at zero. Of a token's values x, B and C, which its group of heads
shares, and its step d, with the head's rate a < 0 and skip D:
  S <- exp(a d) S + d B x^T;  y = S^T C + D x
CHUNK tokens are computed together, by products, and chunks follow each other by the state. With c the sum of a d since
a chunk began, c_end at its end, and P_ij = C_i.B_j exp(c_i - c_j) d_j on and below the diagonal:
  y = P x + exp(c) C S + D x
  S <- exp(c_end) S + B^T (exp(c_end - c) d x)
A group's products with the state are one, its heads' values side by side. What is kept is what the scan is given;
backward computes the chunks again. All this is in at least fp32, on a GPU multiplied in TF32 where what is given has
16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.experts import Derived
from megatrain.linear import linear, linears
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.recurrence import Gated, add, enough_for, precision, times
from schedules.mamba import Mamba2

PROJECTIONS = "mamba.in_proj_z", "mamba.in_proj_xbc", "mamba.in_proj_dt"
OWN = "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias"  # the scan's parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class StateSpace:
    """From a block's normalised input to what is added to its residual."""

    widths: Mamba2
    eps: float
    pointwise: Pointwise = PLAIN

    def forward(self, params: Mapping[str, Tensor], x: Tensor, derived: Derived, *, output: bool = True) -> Tensor:
        """x [batch, seq, hidden] -> the same shape. What can be made again is told to `derived`.

        Without `output` the last product is not made.
        """
        z, mixed, dt = linears(params, PROJECTIONS, x, fused="mamba.in_proj", in_fp8=None)
        own = (params[f"mamba.{name}"] for name in OWN)
        o = _Scan.apply(mixed, dt, self.widths, self.pointwise, *own)  # type: ignore[no-untyped-call]
        del mixed, dt  # a forward that saves nothing can free them here
        groups = self.widths.groups, -1
        o, z = (torch.unflatten(t, -1, groups) for t in (o, z))
        weight = params["mamba.norm.weight"].view(groups)
        norm = self.pointwise.norm_of_gated_forward, self.pointwise.norm_of_gated_backward
        y = Gated.apply(o, z, weight, self.eps, *norm)  # type: ignore[no-untyped-call]

        def make(o: Tensor, z: Tensor, weight: Tensor) -> Tensor:
            return norm[0](o, z, weight, self.eps)[0]

        with derived(y, make, o, z, weight):
            del o, z
            return linear(params, "mamba.out_proj", y.flatten(2), output=output)


class _Scan(torch.autograd.Function):
    """The convolution and the scan; saves what it is given, and computes some sequences, groups or heads at a time.

    mixed [batch, seq, mixed], dt [batch, seq, heads], and the parameters OWN -> [batch, seq, value_width].
    """

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, dt: Tensor, widths: Mamba2, pointwise: Pointwise, *own: Tensor) -> Tensor:
        ctx.save_for_backward(mixed, dt, *own)
        ctx.widths, ctx.pointwise = widths, pointwise
        o = mixed.new_empty(*mixed.shape[:-1], widths.value_width)
        with precision(enough_for(mixed)):
            for part in _parts(widths, *(t.detach() for t in (mixed, dt, *own))):
                pairs = _Pairs(part, pointwise)
                for heads in part.heads:
                    _Chunks(heads, pairs, pointwise).output(heads.of_output(o))
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, dt, *own = ctx.saved_tensors
        found = [torch.empty_like(t) for t in (mixed, dt)]
        wide = torch.promote_types(mixed.dtype, torch.float32)
        sums = [torch.zeros_like(t, dtype=wide) for t in own]
        with precision(enough_for(mixed)):
            parts = _parts(ctx.widths, mixed, dt, *own)
            for part, into in zip(parts, _parts(ctx.widths, *found, *sums), strict=True):
                pairs = _Pairs(part, ctx.pointwise, backward=True)
                for heads, of_heads in zip(part.heads, into.heads, strict=True):
                    _Chunks(heads, pairs, ctx.pointwise).backward(heads.of_output(grads[0]), of_heads)
                pairs.backward(into)
        return *found, None, None, *(s.to(t.dtype) for s, t in zip(sums, own, strict=True))


@dataclass(frozen=True, slots=True)
class _Convolved:
    """Tokens [batch, seq, heads or groups, dim], and what they are convolved with; or room for gradients."""

    x: Tensor
    taps: Tensor  # [heads or groups, dim, kernel]
    bias: Tensor  # [heads or groups, dim]

    def some(self, rows: slice, heads: slice) -> _Convolved:
        return _Convolved(self.x[rows, :, heads], self.taps[heads], self.bias[heads])


@dataclass(frozen=True, slots=True)
class _Heads:
    """Some heads of some sequences, as many of each of some groups."""

    x: _Convolved
    dt: Tensor  # [batch, seq, heads]
    rate: Tensor  # A_log [heads]
    skip: Tensor  # D
    bias: Tensor  # dt_bias
    least: float  # of a step
    rows: slice
    place: slice  # among all heads

    def of_output(self, o: Tensor) -> Tensor:
        """This part of [batch, seq, value_width], by head."""
        return torch.unflatten(o, -1, (-1, self.x.x.shape[-1]))[self.rows, :, self.place]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some groups of some sequences, as views of what the scan is given, or of room for its gradients."""

    b: _Convolved
    c: _Convolved
    heads: tuple[_Heads, ...]


def _parts(
    widths: Mamba2, mixed: Tensor, dt: Tensor, taps: Tensor, conv_bias: Tensor, rate: Tensor, skip: Tensor, bias: Tensor
) -> Iterator[_Part]:
    batch, seq = mixed.shape[:2]
    sequences, groups_at_once, heads_at_once = widths.together(batch, seq)
    cuts = [widths.value_width, widths.key_width, widths.key_width]
    dims = widths.head_dim, widths.state_dim, widths.state_dim
    x, b, c = (
        _Convolved(torch.unflatten(t, -1, (-1, dim)), torch.unflatten(w[:, 0], 0, (-1, dim)), more.view(-1, dim))
        for t, w, more, dim in zip(
            torch.split(mixed, cuts, dim=-1), torch.split(taps, cuts), torch.split(conv_bias, cuts), dims, strict=True
        )
    )
    of_group = widths.heads // widths.groups
    for row in range(0, batch, sequences):
        rows = slice(row, row + sequences)
        for group in range(0, widths.groups, groups_at_once):
            groups = slice(group, min(group + groups_at_once, widths.groups))
            last = groups.stop * of_group
            at_once = last - groups.start * of_group if heads_at_once == of_group else heads_at_once
            places = [slice(i, min(i + at_once, last)) for i in range(groups.start * of_group, last, at_once)]
            yield _Part(
                b=b.some(rows, groups),
                c=c.some(rows, groups),
                heads=tuple(
                    _Heads(
                        x=x.some(rows, place),
                        dt=dt[rows, :, place],
                        rate=rate[place],
                        skip=skip[place],
                        bias=bias[place],
                        least=widths.least_step,
                        rows=rows,
                        place=place,
                    )
                    for place in places
                ),
            )


class _Pairs:
    """What a group's heads share of each chunk, [chunks, sequences x groups, CHUNK, ...]; and sums of gradients."""

    def __init__(self, part: _Part, pointwise: Pointwise, *, backward: bool = False) -> None:
        self.part, self.pointwise = part, pointwise
        self.b, self.c = (pointwise.mamba_keys(of.x, of.taps, of.bias) for of in (part.b, part.c))
        self.scores = times(self.c, self.b.mT)
        if backward:
            self.d_b, self.d_c = torch.zeros_like(self.b), torch.zeros_like(self.c)

    @property
    def groups(self) -> int:
        """Of all sequences together."""
        return self.b.shape[1]

    def add_products(self, d_scores: Tensor, grown: Tensor, states: Tensor, entering: Tensor, d_after: Tensor) -> None:
        """The gradients of b and c by some heads: of the products, of what is read, and of what enters."""
        add(self.d_c, d_scores, self.b)
        add(self.d_b, d_scores.mT, self.c)
        add(self.d_c, grown, states.mT)
        add(self.d_b, entering, d_after.mT)

    def backward(self, into: _Part) -> None:
        """Write the gradients of what b and c are made of, once all heads have added theirs."""
        for d, of, to in ((self.d_b, self.part.b, into.b), (self.d_c, self.part.c, into.c)):
            _write(self.pointwise, d, of, to)


def _write(pointwise: Pointwise, d: Tensor, of: _Convolved, to: _Convolved) -> None:
    dx, d_taps, d_bias = pointwise.mamba_keys_backward(d, of.x, of.taps, of.bias)
    to.x.copy_(dx)
    to.taps.add_(d_taps)
    to.bias.add_(d_bias)


class _Chunks:
    """Some heads in chunks, computed up to the state before each, wide; `megatrain.mamba_parts` says how they lie."""

    def __init__(self, heads: _Heads, pairs: _Pairs, pointwise: Pointwise) -> None:
        self.heads, self.pairs, self.pointwise = heads, pairs, pointwise
        self.step, self.sums = pointwise.mamba_steps(heads.dt, heads.rate, heads.bias, heads.least)
        of, groups = heads.x, pairs.groups
        self.x, self.entering = pointwise.mamba_values(of.x, of.taps, of.bias, self.step, self.sums, groups)
        self.p = pointwise.mamba_decayed(pairs.scores, self.sums, self.step)
        count, _, _, width = self.entering.shape
        self.states = self.entering.new_empty(count, groups, pairs.b.shape[-1], width)
        self.states[0] = 0
        self.through = _of_heads(self.sums[..., -1].exp(), groups)
        _products(pairs.b[:-1].mT, self.entering[:-1], self.states[1:])
        by_head = torch.unflatten(self.states, -1, (-1, self.x.shape[-1]))
        for n in range(1, count):
            by_head[n].addcmul_(by_head[n - 1], self.through[n - 1])

    def output(self, to: Tensor) -> None:
        """Write what the scan returns, [batch, seq, heads, head_dim]."""
        del self.entering
        within = times(self.p, self.x)
        del self.p
        carried = times(self.pairs.c, self.states)
        del self.states
        self.pointwise.mamba_output(to, within, carried, self.x, self.sums, self.heads.skip)

    def backward(self, dy: Tensor, into: _Heads) -> None:
        """Write the gradients of what the scan was given, and add those of its parameters and of b and c."""
        heads, pairs, pointwise = self.heads, self.pairs, self.pointwise
        count, groups, dim, width = self.states.shape
        d, grown = pointwise.mamba_arriving(dy, self.sums, groups)
        # of the state before each chunk, and after the last
        d_states = self.states.new_empty(count + 1, groups, dim, width)
        d_states[count] = 0
        _products(pairs.c.mT, grown, d_states[:count])
        by_head = torch.unflatten(d_states, -1, (-1, self.x.shape[-1]))
        for n in reversed(range(count)):
            by_head[n].addcmul_(by_head[n + 1], self.through[n])
        d_x = times(self.p.mT, d)
        d_p = times(d, self.x.mT)
        d_scores, d_sums, d_step = pointwise.mamba_decayed_backward(d_p, pairs.scores, self.sums, self.step)
        del d_p, self.p
        d_after = d_states[1:]
        pairs.add_products(d_scores, grown, self.states, self.entering, d_after)
        del d_scores, grown, self.entering
        left, carried = times(pairs.b, d_after), times(pairs.c, self.states)
        d_through = pointwise.mamba_through(d_after, self.states, width // self.x.shape[-1])
        del d_states, d_after, by_head, self.states
        d_x, more_step, more_sums, d_skip = pointwise.mamba_values_backward(
            d_x, d, left, carried, d_through, self.x, self.step, self.sums, heads.skip
        )
        del d, left, carried
        _write(pointwise, d_x, heads.x, into.x)
        gates = heads.dt, heads.rate, heads.bias, heads.least
        d_dt, d_rate, d_bias = pointwise.mamba_steps_backward(d_step + more_step, d_sums + more_sums, *gates)
        into.dt.copy_(d_dt)
        into.rate.add_(d_rate)
        into.bias.add_(d_bias)
        into.skip.add_(d_skip)


def _of_heads(x: Tensor, groups: int) -> Tensor:
    """[chunks, batch x heads] as what a group's states are multiplied by: [chunks, batch x groups, 1, heads, 1]."""
    return torch.unflatten(x, 1, (groups, -1))[:, :, None, :, None]


def _products(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))

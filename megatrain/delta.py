"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464); `schedules.delta` has its widths.

Per value head a state S [key_dim, value_dim] begins at zero. A token multiplies it by its decay exp(g), moves what the
state returns for its key by beta toward its value, and reads the state with its query:
  S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q
CHUNK tokens are computed together, by products and one triangular system, and chunks follow each other by the state
(Yang et al., arXiv:2406.06484). With c the sum of decays since a chunk began, c_end at its end, D_ij = exp(c_i - c_j):
  [U W] = (I + A)^-1 [beta v, beta exp(c) k]  A: beta_i k_i.k_j D_ij below the diagonal
  V' = U - W S;  o = exp(c) q S + P V'        P: q_i.k_j D_ij on and below the diagonal
  S <- exp(c_end) S + (exp(c_end - c) k)^T V'
What is kept is what the rule is given; backward computes the chunks again. All this is in at least fp32. Where what is
given has 16 bits a GPU multiplies in TF32, with more bits than that, but for the inverse, by which errors would grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.channel_pairs import pairs, pairs_backward
from megatrain.experts import Derived
from megatrain.linear import linear, linears
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.recurrence import Gated, add, enough_for, precision, times
from megatrain.recurrence_parts import tokens
from schedules.delta import DeltaNet
from schedules.recurrence import CHUNK

ROWS = 16  # of a block whose inverse is found row by row


class _Given(NamedTuple):
    """What the rule is given of a block's input, and what gates its output."""

    mixed: list[Tensor]  # [batch, seq, mixed], or queries, keys and values apart
    b: Tensor  # [batch, seq, value_heads]
    a: Tensor  # [batch, seq, value_heads x channels that decay apart]
    z: Tensor  # [batch, seq, value_width]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearAttention:
    """From a block's normalised input to what is added to its residual.

    Of its parameters `place` is where rates and biases of decays lie, `taps` are the convolution's, `norm` is that of
    what the rule returns, and `out` the last product's.
    """

    widths: DeltaNet
    eps: float
    pointwise: Pointwise = PLAIN
    place: str = "linear_attn"
    taps: tuple[str, ...] = ("linear_attn.conv1d.weight",)
    norm: str = "linear_attn.norm.weight"
    out: str = "linear_attn.out_proj"

    def forward(self, params: Mapping[str, Tensor], x: Tensor, derived: Derived, *, output: bool = True) -> Tensor:
        """x [batch, seq, hidden] -> the same shape. What can be made again is told to `derived`.

        Without `output` the last product is not made.
        """
        mixed, b, a, z = self._given(params, x)
        own = (params[f"{self.place}.A_log"], params[f"{self.place}.dt_bias"], *(params[name] for name in self.taps))
        o = _Rule.apply(self.widths, self.pointwise, b, a, *own, *mixed)  # type: ignore[no-untyped-call]
        del mixed, b, a  # a forward that saves nothing can free them here
        o, z = (torch.unflatten(t, -1, (-1, self.widths.value_dim)) for t in (o, z))
        weight, norm = params[self.norm], self._norm
        y = Gated.apply(o, z, weight, self.eps, *norm)  # type: ignore[no-untyped-call]

        def make(o: Tensor, z: Tensor, weight: Tensor) -> Tensor:
            return norm[0](o, z, weight, self.eps)[0]

        with derived(y, make, o, z, weight):
            del o, z
            return linear(params, self.out, y.flatten(2), output=output)

    def _given(self, params: Mapping[str, Tensor], x: Tensor) -> _Given:
        projections = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
        mixed, z, b, a = linears(params, projections, x, in_fp8=None)
        return _Given([mixed], b, a, z)

    @property
    def _norm(self) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]:
        return self.pointwise.gated_norm_forward, self.pointwise.gated_norm_backward


@dataclass(frozen=True, kw_only=True, eq=False)
class KimiAttention(LinearAttention):
    """The same where each channel decays by itself; see `schedules.kimi_delta`."""

    place: str = "self_attn.forget_gate"
    taps: tuple[str, ...] = tuple(f"self_attn.{x}_conv1d.weight" for x in "qkv")
    norm: str = "self_attn.o_norm.weight"
    out: str = "self_attn.o_proj"

    def _given(self, params: Mapping[str, Tensor], x: Tensor) -> _Given:
        names = *(f"self_attn.{of}_proj" for of in "qkvb"), f"{self.place}.f_a_proj", "self_attn.g_a_proj"
        *mixed, b, of_a, of_z = linears(params, names, x, in_fp8=None)
        a = linear(params, f"{self.place}.f_b_proj", of_a)
        return _Given(mixed, b, a, linear(params, "self_attn.g_b_proj", of_z))

    @property
    def _norm(self) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]:
        return self.pointwise.opened_norm_forward, self.pointwise.opened_norm_backward


class _Rule(torch.autograd.Function):
    """The convolution and the rule; saves what it is given, and computes some sequences, or heads of one, at a time.

    b and a as in _Given, A_log [value_heads] and dt_bias as long as a token's a, taps [mixed, 1, kernel] and what they
    mix, [batch, seq, mixed], or those of queries, keys and values apart, all taps first -> [batch, seq, value_width].
    """

    @staticmethod
    def forward(ctx: Any, widths: DeltaNet, pointwise: Pointwise, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        ctx.widths, ctx.pointwise = widths, pointwise
        b = given[0]
        o = b.new_empty(*b.shape[:2], widths.value_width)
        with precision(enough_for(b)):
            for part in _parts(widths, *(t.detach() for t in given)):
                to = part.of_output(o)
                to.copy_(tokens(_Chunks(part, pointwise).output(), *to.shape[:2]))
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        b, count = given[0], (len(given) - 4) // 2  # of taps
        wide = torch.promote_types(b.dtype, torch.float32)
        summed = range(2, 4 + count)  # over tokens: the gradients of parameters
        found = [torch.zeros_like(t, dtype=wide) if i in summed else torch.empty_like(t) for i, t in enumerate(given)]
        with precision(enough_for(b)):
            parts = _parts(ctx.widths, *given)
            for part, into in zip(parts, _parts(ctx.widths, *found), strict=True):
                dy = ctx.pointwise.delta_chunked(part.of_output(grads[0]), wide)
                _Chunks(part, ctx.pointwise, backward=True).backward(dy, into)
        return None, None, *(d.to(t.dtype) for d, t in zip(found, given, strict=True))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some heads of some sequences, as views of what the rule is given, or of room for its gradients."""

    q: Tensor  # [batch, seq, key heads, key_dim]
    k: Tensor
    v: Tensor  # [batch, seq, value heads, value_dim]
    b: Tensor  # [batch, seq, value heads]
    a: Tensor  # [batch, seq, value heads, channels that decay apart]
    taps: tuple[Tensor, Tensor, Tensor]  # of q, k and v [heads, dim, kernel]
    rate: Tensor  # A_log [value heads]
    bias: Tensor  # dt_bias [value heads, channels]
    rows: slice
    heads: slice  # of values

    def of_output(self, o: Tensor) -> Tensor:
        """This part of [batch, seq, value_width]."""
        return torch.unflatten(o, -1, (-1, self.v.shape[-1]))[self.rows, :, self.heads]


def _parts(widths: DeltaNet, b: Tensor, a: Tensor, rate: Tensor, bias: Tensor, *mixed: Tensor) -> Iterator[_Part]:
    batch, seq = b.shape[:2]
    sequences, heads_at_once = widths.together(batch, seq)
    dims = (widths.key_dim, widths.key_dim, widths.value_dim)
    taps, of_tokens = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    q, k, v = (torch.unflatten(t, -1, (-1, d)) for t, d in zip(_apart(widths, of_tokens, -1), dims, strict=True))
    of_q, of_k, of_v = (
        torch.unflatten(t[:, 0], 0, (-1, d)) for t, d in zip(_apart(widths, taps, 0), dims, strict=True)
    )
    a, bias = (torch.unflatten(t, -1, (widths.value_heads, -1)) for t in (a, bias))
    rate, shared = rate.view(-1), widths.value_heads // widths.key_heads
    for row in range(0, batch, sequences):
        for head in range(0, widths.key_heads, heads_at_once):
            rows, keys = slice(row, row + sequences), slice(head, head + heads_at_once)
            heads = slice(head * shared, (head + heads_at_once) * shared)
            yield _Part(
                q=q[rows, :, keys],
                k=k[rows, :, keys],
                v=v[rows, :, heads],
                b=b[rows, :, heads],
                a=a[rows, :, heads],
                taps=(of_q[keys], of_k[keys], of_v[heads]),
                rate=rate[heads],
                bias=bias[heads],
                rows=rows,
                heads=heads,
            )


def _apart(widths: DeltaNet, of: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """What is of queries, keys and values, which may be one tensor."""
    return torch.split(of[0], [widths.key_width, widths.key_width, widths.value_width], dim) if len(of) == 1 else of


class _Chunks:
    """A part in chunks, computed up to the state before each; what only backward reads is dropped unless `backward`.

    Tensors are wide, [chunks, sequences x value heads, CHUNK, dim]; tokens beyond the last are zeros, which change no
    state.
    """

    def __init__(self, part: _Part, pointwise: Pointwise, *, backward: bool = False) -> None:
        self.part, self.pointwise = part, pointwise
        self.sums, self.beta = pointwise.delta_gates(part.b, part.a, part.rate, part.bias)
        q, k, v = pointwise.delta_inputs(part.q, part.k, part.v, *part.taps)
        if self.by_channel:
            system, self.p = pairs(q, k, self.sums, self.beta, pointwise)
        else:
            gram, scores = times(k, k.mT), times(q, k.mT)
            system, self.p = pointwise.delta_decayed(gram, scores, self.sums, self.beta)
            del gram, scores
        right, leaving = pointwise.delta_right(k, v, self.sums, self.beta)
        count, heads, _, dim, width = *k.shape, v.shape[-1]
        self.q, self.k, self.v = q, k if backward else None, v if backward else None
        del q, k, v
        inverse = _inverse(system)
        del system
        solved = times(inverse, right)
        self.inverse = inverse if backward else None
        del right, inverse
        u, w = torch.split(solved, [width, dim], dim=-1)
        self.through = self.sums[..., -1, :, None].exp()
        self.new = u.contiguous() if backward else u
        self.states = solved.new_empty(count, heads, dim, width)
        self.states[0] = 0
        for n in range(count):
            self.new[n].baddbmm_(w[n], self.states[n], alpha=-1)
            if n + 1 < count:
                after = torch.mul(self.states[n], self.through[n], out=self.states[n + 1])
                after.baddbmm_(leaving[n].mT, self.new[n])
        self.solved, self.leaving = solved if backward else None, leaving if backward else None

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a key decays by itself."""
        return self.sums.shape[-1] > 1

    def output(self) -> Tensor:
        """What the rule returns. Changes the queries."""
        o = times(self.q.mul_(self.sums.exp()), self.states)
        add(o, self.p, self.new)
        return o

    def backward(self, dy: Tensor, into: _Part) -> None:
        """Write the gradients of what the rule was given, and add those of its parameters; `dy` is in chunks."""
        part, pointwise = self.part, self.pointwise
        assert self.k is not None and self.v is not None and self.inverse is not None
        assert self.solved is not None and self.leaving is not None
        count, heads, dim, width = self.states.shape
        # of the state before each chunk, and after the last
        d_states = dy.new_empty(count + 1, heads, dim, width)
        d_states[count] = 0
        grown = self.q * self.sums.exp()
        torch.bmm(grown.flatten(0, 1).mT, dy.flatten(0, 1), out=d_states[:count].view(-1, dim, width))
        del grown
        d_right = torch.empty_like(self.solved)
        d_new, d_w = torch.split(d_right, [width, dim], dim=-1)
        w = self.solved[..., width:]
        torch.bmm(self.p.flatten(0, 1).mT, dy.flatten(0, 1), out=d_new.flatten(0, 1))
        for n in reversed(range(count)):
            d_new[n].baddbmm_(self.leaving[n], d_states[n + 1])
            d_states[n].addcmul_(d_states[n + 1], self.through[n]).baddbmm_(w[n].mT, d_new[n], alpha=-1)
        self.leaving = None
        d_w.flatten(0, 1).baddbmm_(d_new.flatten(0, 1), self.states.flatten(0, 1).mT, beta=0, alpha=-1)
        del d_new, d_w, w
        d_right = times(self.inverse.mT, d_right)
        self.inverse = None
        d_system, d_p = times(d_right, self.solved.mT), times(dy, self.new.mT)
        self.solved = None
        if self.by_channel:
            of_q, of_k, d_sums, d_beta = pairs_backward(d_system, d_p, self.q, self.k, self.sums, self.beta, pointwise)
        else:
            d_gram, d_scores, d_sums, d_beta = pointwise.delta_decayed_backward(
                d_system, d_p, times(self.k, self.k.mT), self.p, self.sums, self.beta
            )
        del d_system, d_p
        read, left = times(dy, self.states.mT), times(self.new, d_states[1:].mT)
        carried = pointwise.delta_carried(d_states[1:], self.states, self.sums.shape[-1])
        del dy, d_states, self.states, self.new
        d_q, d_k, d_v, more_sums, more_beta = pointwise.delta_right_backward(
            d_right, read, left, carried, self.q, self.k, self.v, self.sums, self.beta
        )
        del d_right, read, left
        if self.by_channel:
            d_q.add_(of_q)
            d_k.add_(of_k)
            del of_q, of_k
        else:
            add(d_q, d_scores, self.k)
            add(d_k, d_scores.mT, self.q)
            add(d_k, d_gram, self.k)
            del d_gram, d_scores
        gates = (part.b, part.a, part.rate, part.bias)
        d_b, d_a, d_rate, d_bias = pointwise.delta_gates_backward(d_sums + more_sums, d_beta + more_beta, *gates)
        into.b.copy_(d_b)
        into.a.copy_(d_a)
        into.rate.add_(d_rate)
        into.bias.add_(d_bias)
        given, to, lengths = (part.q, part.k, part.v), (into.q, into.k, into.v), (dim**-0.5, 1.0, None)
        for i, d in enumerate((d_q, d_k, d_v)):
            dx, d_taps = pointwise.delta_input_backward(d, given[i], part.taps[i], lengths[i])
            to[i].copy_(dx)
            into.taps[i].add_(d_taps)


def _inverse(system: Tensor) -> Tensor:
    """(I + A)^-1 for A [chunks, heads, CHUNK, CHUNK], zeros on and above its diagonal; of the same shape.

    By forward substitution, a row at a time in blocks on the diagonal and a block at a time beyond them.
    """
    a = system.flatten(0, 1)
    found = torch.zeros_like(a)
    starts = range(0, CHUNK, ROWS)
    blocks = torch.stack([a[:, i : i + ROWS, i : i + ROWS] for i in starts]).flatten(0, 1).neg_()
    with precision("highest"):
        for i in range(1, ROWS):
            row = blocks[:, i : i + 1, :i]
            row.copy_(torch.baddbmm(row, row, blocks[:, :i, :i]))
        blocks.diagonal(dim1=-2, dim2=-1).fill_(1)
        for i, block in zip(starts, blocks.view(-1, len(a), ROWS, ROWS), strict=True):
            found[:, i : i + ROWS, i : i + ROWS] = block
        size = ROWS
        while size < CHUNK:
            for i in range(0, CHUNK, 2 * size):
                first, second = slice(i, i + size), slice(i + size, i + 2 * size)
                beside = torch.bmm(a[:, second, first], found[:, first, first])
                found[:, second, first] = torch.bmm(found[:, second, second], beside.neg_())
            size *= 2
    return found.view_as(system)

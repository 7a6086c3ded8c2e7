"""Parts of a layer as functions of autograd that save less for their backward than their composition would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.autograd import backward, forward, sink_of
from megatrain.linear import unread
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.sink import Sink

Mlp = Callable[[Mapping[str, Tensor], Tensor, bool], Tensor]  # parameters, input, whether its output is read
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]  # of an input, by cos and sin


class _RMSNorm(torch.autograd.Function):
    """Saves its input, its weight and one factor per row; torch's composition saves copies of its input.

    The input is an output, too: the gradient that it has from there is added by the kernel that makes the other.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, pointwise: Pointwise
    ) -> tuple[Tensor, Tensor]:
        # detached: a compiler makes another kernel for inputs that want gradients
        y, rstd = pointwise.rms_forward(x.detach(), weight.detach(), eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.pointwise = offset, pointwise
        return x, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        beside, dy = grads
        if dy is None:
            return beside, None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = ctx.pointwise.rms_backward(dy, x, rstd, weight, beside, ctx.offset)
        return dx, dweight.to(weight.dtype), None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, pointwise: Pointwise = PLAIN, *, offset: float = 0.0) -> Tensor:
    """RMSNorm over the last dimension, computed in at least fp32 and rounded once; it multiplies by weight + offset."""
    return norm_beside(x, weight, eps, pointwise, offset=offset)[1]


def norm_beside(x: Tensor, weight: Tensor, eps: float, pointwise: Pointwise, *, offset: float) -> tuple[Tensor, Tensor]:
    """x and its `rms_norm`, to be read in its place where both are read: backward need not sum their gradients then."""
    return _RMSNorm.apply(x, weight, eps, offset, pointwise)  # type: ignore[no-any-return, no-untyped-call]


class _Gate(torch.autograd.Function):
    """The activation of gate, times up; saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, hidden_act: str, pointwise: Pointwise) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backward = pointwise.gate_backward(hidden_act)
        return pointwise.gate_forward(hidden_act)(gate.detach(), up.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *ctx.backward(grads[0], gate, up), None, None


def gated(gate: Tensor, up: Tensor, hidden_act: str, pointwise: Pointwise = PLAIN) -> Tensor:
    """hidden_act(gate) * up, element by element."""
    return _Gate.apply(gate, up, hidden_act, pointwise)  # type: ignore[no-any-return, no-untyped-call]


class _Squared(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, pointwise: Pointwise) -> Tensor:
        ctx.save_for_backward(up)
        ctx.pointwise = pointwise
        return pointwise.squared_forward(up.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.pointwise.squared_backward(grads[0], *ctx.saved_tensors), None


def squared(up: Tensor, pointwise: Pointwise = PLAIN) -> Tensor:
    """The square of what is positive, element by element."""
    return _Squared.apply(up, pointwise)  # type: ignore[no-any-return, no-untyped-call]


class _Opened(torch.autograd.Function):
    """y times the sigmoid of a gate; saves both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor, pointwise: Pointwise) -> Tensor:
        ctx.save_for_backward(y, gate)
        ctx.pointwise = pointwise
        return pointwise.opened_forward(y.detach(), gate.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.pointwise.opened_backward(grads[0], *ctx.saved_tensors), None


def opened(y: Tensor, gate: Tensor, pointwise: Pointwise = PLAIN) -> Tensor:
    """y * sigmoid(gate), element by element."""
    return _Opened.apply(y, gate, pointwise)  # type: ignore[no-any-return, no-untyped-call]


class _Weighed(torch.autograd.Function):
    """y times the sigmoid of one number per row; saves both."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, share: Tensor, pointwise: Pointwise, output: bool) -> Tensor:
        ctx.save_for_backward(y, share)
        ctx.pointwise = pointwise
        return pointwise.weighed_forward(y.detach(), share.detach()) if output else unread(y.shape, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.pointwise.weighed_backward(grads[0], *ctx.saved_tensors), None, None


def weighed(y: Tensor, share: Tensor, pointwise: Pointwise = PLAIN, *, output: bool = True) -> Tensor:
    """y [..., hidden] * sigmoid(share [..., 1]); without `output` its shape and graph alone."""
    return _Weighed.apply(y, share, pointwise, output)  # type: ignore[no-any-return, no-untyped-call]


class _Times(torch.autograd.Function):
    """x times one number, in place; the number's gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, output: bool) -> Tensor:
        ctx.save_for_backward(number)
        if not output:
            return unread(x.shape, x)
        ctx.mark_dirty(x)
        return x.mul_(number)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (number,) = ctx.saved_tensors
        return grads[0] * number, torch.zeros_like(number) if ctx.needs_input_grad[1] else None, None


def times(x: Tensor, number: Tensor, *, output: bool = True) -> Tensor:
    """x, overwritten by x times number [1], a constant; without `output` its shape and graph alone."""
    return _Times.apply(x, number, output)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Mlp:
    """As a layer of its own."""

    function: Mlp
    constants: tuple[Tensor, ...] = ()

    def forward(self, params: Mapping[str, Tensor], x: Tensor, *, output: bool = True) -> Tensor:
        return self.function(params, x, output)


class _MlpAgain(torch.autograd.Function):
    """Saves the MLP's input, and computes the MLP again in backward; `chunk` rows of tokens at a time, both ways."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mlp: Mlp, chunk: int, output: bool, names: tuple[str, ...], *params: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *params)
        ctx.mlp, ctx.chunk, ctx.names = mlp, chunk, names
        ctx.sinks = [sink_of(p) for p in params]
        if not output:
            return unread(x.shape, x)
        rows, y = x.flatten(0, -2), torch.empty_like(x)
        with torch.no_grad():
            for part in _parts(len(rows), chunk):
                y.view_as(rows)[part] = mlp(dict(zip(names, params, strict=True)), rows[part], True)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        params, trained = dict(zip(ctx.names, tensors, strict=True)), ctx.needs_input_grad[5:]
        rows, d_rows, dx = x.flatten(0, -2), grads[0].flatten(0, -2), torch.empty_like(x)
        parts = _parts(len(rows), ctx.chunk)
        sinks = {
            name: Sink(_sum(p, len(parts)), False) for (name, p), t in zip(params.items(), trained, strict=True) if t
        }
        for part in parts:
            _, saved = forward(_Mlp(ctx.mlp), params, rows[part], trained=sinks, output=False)
            dx.view_as(rows)[part] = backward(saved, params, rows[part], d_rows[part], sinks)
            sinks = {name: sink.adding() for name, sink in sinks.items()}
        found: list[Tensor | None] = [None] * len(tensors)
        for i, (name, outer) in enumerate(zip(ctx.names, ctx.sinks, strict=True)):
            if (own := sinks.pop(name, None)) is None:
                continue
            if outer is None:
                found[i] = own.view.to(tensors[i].dtype)
            elif (sink := outer()) is not None:
                sink.put(own.view)
        return dx, None, None, None, None, *found


def _sum(parameter: Tensor, terms: int) -> Tensor:
    """Room for the sum of so many gradients: of many in bf16 the small ones would be lost."""
    dtype = parameter.dtype if terms == 1 else torch.promote_types(parameter.dtype, torch.float32)
    return torch.empty_like(parameter, dtype=dtype)


def mlp_again(x: Tensor, params: Mapping[str, Tensor], mlp: Mlp, *, chunk: int, output: bool) -> Tensor:
    """`mlp(params, x)` that keeps its input alone, and computes `chunk` rows of tokens at a time, in backward again.

    Without `output` it computes nothing before backward.
    """
    return _MlpAgain.apply(x, mlp, chunk, output, tuple(params), *params.values())  # type: ignore[no-any-return, no-untyped-call]


def _parts(rows: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, rows, chunk)]


class _Rotate(torch.autograd.Function):
    """Saves the tables only: the gradient of a turn is the turn back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        return turn(x.detach(), cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.turn(grads[0], cos, -sin), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pointwise: Pointwise = PLAIN, *, neighbours: bool = False) -> Tensor:
    """Rotary embedding of x [batch, seq, heads, head_dim]; dimension j is paired with j + rotary_dim / 2.

    With `neighbours` even ones are paired with the next. cos and sin are [seq, 1, rotary_dim / 2]; what of a head comes
    after is left as it is. Only they are needed for backward.
    """
    turn = pointwise.neighbours_turned if neighbours else pointwise.rotation
    return _Rotate.apply(x, cos, sin, turn)  # type: ignore[no-any-return, no-untyped-call]


def rotate_last(
    x: Tensor, cos: Tensor, sin: Tensor, pointwise: Pointwise = PLAIN, *, others_times: Tensor | None = None
) -> Tensor:
    """As `rotate` the last rotary_dim dimensions of each head, of which neighbours are pairs.

    The others are multiplied by `others_times` [seq, 1, 1], a constant, if it is given.
    """
    turn = pointwise.last_turned

    def turned_and_multiplied(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cos, sin, others_times)

    of = turn if others_times is None else turned_and_multiplied
    return _Rotate.apply(x, cos, sin, of)  # type: ignore[no-any-return, no-untyped-call]

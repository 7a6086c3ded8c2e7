"""Products with a layer's matrices, whose gradients go where they belong without a detour, and outputs nobody reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.autograd import sink_of

LORA_SCALE = 2.0  # alpha over rank, the usual choice of LoRA's users


def linear(params: Mapping[str, Tensor], name: str, x: Tensor, *, output: bool = True) -> Tensor:
    """x [..., in] times `name`.weight [out, in], its bias and LoRA's adapters added where there are any: [..., out].

    Without `output` nothing is multiplied that backward does not read: the result has a shape and a graph, no values.
    """
    y = _product(x, params[f"{name}.weight"], params.get(f"{name}.bias"), output)
    if (down := params.get(f"{name}.lora_A.weight")) is None:
        return y
    return added(y, LORA_SCALE * _product(_product(x, down), params[f"{name}.lora_B.weight"], None, output), output)


def added(a: Tensor, b: Tensor, output: bool) -> Tensor:
    """a + b; without `output` its shape and graph alone."""
    return a + b if output else _Added.apply(a, b)  # type: ignore[no-untyped-call]


def unread(shape: torch.Size, like: Tensor) -> Tensor:
    """A tensor of this shape, in `like`'s type and place, without memory of its own."""
    return like.new_empty(()).expand(shape)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, output: bool = True) -> Tensor:
    return _Product.apply(x, weight, bias, output)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """F.linear, but the weight's gradient is summed by the product that makes it, in the layer's gradient slab."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, output: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink_of(weight) if ctx.needs_input_grad[1] else None
        return F.linear(x, weight, bias) if output else unread(x.shape[:-1] + weight.shape[:1], x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, dx, d_weight, d_bias = grads[0].flatten(0, -2), None, None, None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight).view_as(x)
        if ctx.needs_input_grad[1]:
            rows = x.flatten(0, -2)
            if ctx.sink is None:
                d_weight = dy.t() @ rows
            elif (sink := ctx.sink()) is not None:
                sink.put_product(dy.t(), rows)
        if ctx.needs_input_grad[2]:
            d_bias = dy.sum(0)
        return dx, d_weight, d_bias, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return unread(a.shape, a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], grads[0]

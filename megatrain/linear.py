"""Products with a layer's matrices, whose gradients go where they belong without a detour, and outputs nobody reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    (y,) = linears(params, (name,), x, output=output)
    return y


def linears(
    params: Mapping[str, Tensor], names: Sequence[str], x: Tensor, *, fused: str = "", output: bool = True
) -> list[Tensor]:
    """As `linear`, several of one input, whose gradients are summed by the products that make them.

    Adapters stand beside each, or beside all as one projection, which is called `fused`.
    """
    products = _products(
        x, [params[f"{name}.weight"] for name in names], [params.get(f"{n}.bias") for n in names], output
    )
    beside: Sequence[Tensor | None] = [_adapters(params, name, x, output) for name in names]
    if (of_all := _adapters(params, fused, x, output)) is not None:
        beside = torch.split(of_all, [y.shape[-1] for y in products], dim=-1)
    return [y if more is None else added(y, more, output) for y, more in zip(products, beside, strict=True)]


def _adapters(params: Mapping[str, Tensor], name: str, x: Tensor, output: bool) -> Tensor | None:
    """What they add to a projection's output; None where it has none."""
    if (down := params.get(f"{name}.lora_A.weight")) is None:
        return None
    (inner,) = _products(x, [down], [None], True)
    # scaled here, where it is narrow: by a power of two, all products have the same bits as if they were scaled later
    (outer,) = _products(LORA_SCALE * inner, [params[f"{name}.lora_B.weight"]], [None], output)
    return outer


def added(a: Tensor, b: Tensor, output: bool) -> Tensor:
    """a + b; without `output` its shape and graph alone."""
    return a + b if output else _Added.apply(a, b)  # type: ignore[no-untyped-call]


def unread(shape: torch.Size, like: Tensor) -> Tensor:
    """A tensor of this shape, in `like`'s type and place, without memory of its own."""
    return like.new_empty(()).expand(shape)


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], output: bool
) -> tuple[Tensor, ...]:
    return _Products.apply(x, output, *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


class _Products(torch.autograd.Function):
    """F.linear by each of the weights, but gradients are summed where they belong: a weight's in the layer's gradient
    slab, the input's in one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: bool, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.save_for_backward(x, *weights)
        wanted = ctx.needs_input_grad[2:]
        ctx.sinks = [sink_of(w) if needed else None for w, needed in zip(weights, wanted, strict=False)]
        if not output:
            return tuple(unread(x.shape[:-1] + weight.shape[:1], x) for weight in weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        count, rows = len(weights), x.flatten(0, -2)
        of_x, _, *of_tensors = ctx.needs_input_grad
        dx: Tensor | None = None
        found: list[Tensor | None] = [None] * (2 * count)
        for i, (grad, weight, sink_now) in enumerate(zip(grads, weights, ctx.sinks, strict=True)):
            dy = grad.flatten(0, -2)
            if of_x:
                dx = dy @ weight if dx is None else torch.addmm(dx, dy, weight, out=dx)
            if of_tensors[i]:
                if sink_now is None:
                    found[i] = dy.t() @ rows
                elif (sink := sink_now()) is not None:
                    sink.put_product(dy.t(), rows)
            if of_tensors[count + i]:
                found[count + i] = dy.sum(0)
        return None if dx is None else dx.view_as(x), None, *found


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return unread(a.shape, a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], grads[0]

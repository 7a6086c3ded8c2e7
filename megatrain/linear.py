"""Products with a layer's matrices, whose gradients go where they belong without a detour, and outputs nobody reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain import fp8, nf4
from megatrain.autograd import again, sink_of
from megatrain.pointwise import Pointwise

LORA_SCALE = 2.0  # alpha over rank, the usual choice of LoRA's users


def linear(
    params: Mapping[str, Tensor], name: str, x: Tensor, *, output: bool = True, in_fp8: Pointwise | None = None
) -> Tensor:
    """x [..., in] times `name`.weight [out, in], its bias and LoRA's adapters added where there are any: [..., out].

    Without `output` nothing is multiplied that backward does not read: the result has a shape and a graph, no values.
    With `in_fp8` it is multiplied in 8 bits, `megatrain.fp8`, by operands that these functions make; adapters are not.
    """
    (y,) = linears(params, (name,), x, output=output, in_fp8=in_fp8)
    return y


def linears(
    params: Mapping[str, Tensor],
    names: Sequence[str],
    x: Tensor,
    *,
    fused: str = "",
    output: bool = True,
    in_fp8: Pointwise | None,
) -> list[Tensor]:
    """As `linear`, several of one input, whose gradients are summed by the products that make them.

    Adapters stand beside each, or beside all as one projection, which is called `fused`.
    """
    biases = [params.get(f"{name}.bias") for name in names]
    with ExitStack() as kept:
        weights = [kept.enter_context(matrix(params, f"{name}.weight", x.dtype)) for name in names]
        if in_fp8 is None:
            products = _products(x, weights, biases, output)
        else:
            products = _Fp8Products.apply(x, output, in_fp8, *weights, *biases)  # type: ignore[no-untyped-call]
        del weights  # what was made for these products is not needed for the adapters'
    found = list(products)
    del products  # or each would be there until all have their sums
    beside: Sequence[Tensor] = ()
    if (of_all := _adapters(params, fused, x, output)) is not None:
        beside = torch.split(of_all, [y.shape[-1] for y in found], dim=-1)
    for k, name in enumerate(names):
        more = beside[k] if beside else _adapters(params, name, x, output)
        if more is not None:
            found[k] = added(found[k], more, output)
    return found


@contextmanager
def matrix(params: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """A matrix of a layer. One in 4 bits is made whole, and within this autograd keeps the bits, to make it again."""
    if not nf4.is_packed(stored := params[name]):
        yield stored
        return
    make = functools.partial(nf4.whole, dtype=dtype)
    made = make(stored, largest := params[nf4.largest_of(name)])
    with again(made, make, stored, largest):
        yield made


def _adapters(params: Mapping[str, Tensor], name: str, x: Tensor, output: bool) -> Tensor | None:
    """What they add to a projection's output; None where it has none."""
    if (down := params.get(f"{name}.lora_A.weight")) is None:
        return None
    (inner,) = _products(x, [down], [None], True)
    # scaled here, where it is narrow: by a power of two, all products have the same bits as if they were scaled later
    (outer,) = _products(LORA_SCALE * inner, [params[f"{name}.lora_B.weight"]], [None], output)
    return outer


def added(a: Tensor, b: Tensor, output: bool, *, times: float = 1.0) -> Tensor:
    """a + times b; without `output` its shape and graph alone."""
    return torch.add(a, b, alpha=times) if output else _Added.apply(a, b, times)  # type: ignore[no-untyped-call]


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
        weights, biases = _kept(ctx, x, tensors)
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


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] in at least fp32: [T, out], of which no more than a sum's rounding is lost.

    Gradients are multiplied in x's type.
    """
    return _WideProduct.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink_of(weight) if ctx.needs_input_grad[1] else None
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.is_cuda and wide != x.dtype:
            return torch.mm(x, weight.t(), out_dtype=wide)  # without a copy of x as wide
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].to(x.dtype)
        found = None
        if ctx.needs_input_grad[1]:
            if ctx.sink is None:
                found = dy.t() @ x
            elif (sink := ctx.sink()) is not None:
                sink.put_product(dy.t(), x)
        return dy @ weight if ctx.needs_input_grad[0] else None, found


class _Fp8Products(torch.autograd.Function):
    """As `_Products` in 8 bits. What is kept is the same: operands are made again in backward, transposed.

    The input's is shared by all products, and a weight's made for one at a time. No product adds to what is there: the
    input's gradient is a sum of terms in its own type, each rounded once more than one of `_Products`, by 2^-8 at most
    where operands were by 2^-4. A bias is added to the rounded product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: bool, pointwise: Pointwise, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases = _kept(ctx, x, tensors)
        ctx.pointwise = pointwise
        if not output:
            return tuple(unread(x.shape[:-1] + weight.shape[:1], x) for weight in weights)
        of_x, found = fp8.rows(x.detach().flatten(0, -2), fp8.E4M3, pointwise), list[Tensor]()
        for weight, bias in zip(weights, biases, strict=True):
            of_weight = fp8.rows(weight.detach(), fp8.E4M3, pointwise)
            y = fp8.product(of_x, of_weight, x.dtype, fast=True).view(x.shape[:-1] + weight.shape[:1])
            del of_weight  # or it would be held while the next is made
            found.append(y if bias is None else y.add_(bias))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        count, pointwise = len(weights), ctx.pointwise
        of_input, _, _, *of_tensors = ctx.needs_input_grad
        dx: Tensor | None = None
        of_x: fp8.Operand | None = None
        found: list[Tensor | None] = [None] * (2 * count)
        for i, (grad, weight, sink_now) in enumerate(zip(grads, weights, ctx.sinks, strict=True)):
            dy = grad.flatten(0, -2)
            along, across = fp8.both(dy, fp8.E5M2, pointwise)
            if of_input:
                term = fp8.product(along, fp8.columns(weight, fp8.E4M3, pointwise), x.dtype)
                dx = term if dx is None else dx.add_(term)
                del term
            del along
            sink = None if sink_now is None else sink_now()
            if of_tensors[i] and (sink_now is None or sink is not None):
                of_x = of_x or fp8.columns(x.flatten(0, -2), fp8.E4M3, pointwise)
                if sink is None:
                    found[i] = fp8.product(across, of_x, weight.dtype)
                else:
                    sink.put(fp8.product(across, of_x, sink.view.dtype))
            del across
            if of_tensors[count + i]:
                found[count + i] = dy.sum(0)
        return None if dx is None else dx.view_as(x), None, None, *found


def _kept(ctx: Any, x: Tensor, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The weights and biases that are an op's last inputs; it keeps its input and weights, and where gradients go."""
    weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    ctx.save_for_backward(x, *weights)
    wanted = ctx.needs_input_grad[-len(tensors) :]
    ctx.sinks = [sink_of(w) if needed else None for w, needed in zip(weights, wanted, strict=False)]
    return weights, biases


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, times: float) -> Tensor:
        ctx.times = times
        return unread(a.shape, a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0] if ctx.times == 1 else grads[0] * ctx.times, None

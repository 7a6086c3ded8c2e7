"""A mixture of experts: a router, and one product per matrix for the tokens of all experts together.

Tokens are copied once per choice and sorted by expert, so that every expert's rows lie side by side. Shapes do not
depend on what the router chooses, and nothing here waits to know it; nor do torch's grouped products of bf16 numbers on
Hopper and Blackwell, while on other GPUs and of fp32 numbers they read how many tokens each expert has, a wait in every
product, and no CUDA graph. Of T tokens each chooses k of n experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain import nf4
from megatrain.autograd import sink_of
from megatrain.linear import linear, unread, wide_product
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.routing import route
from schedules.parameters import OF_LATENT, TO_LATENT
from schedules.quantised import BLOCK, PER_BYTE
from schedules.workspace import EXPERTS_CHUNK

# Says of a tensor how to make it again from others; see `megatrain.autograd.again`.
Derived = Callable[..., AbstractContextManager[None]]

HOPPER = (9, 0)  # the compute capability
WITHOUT_WAIT = (9, 10)  # those, whatever their minor number, on which grouped products of bf16 wait for nothing
ALIGNED = 64  # columns: grouped products want rows that begin at multiples of 16 bytes


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The MLP of a block with experts.

    `chosen` experts per token, of the best `chosen_groups` of so many `groups`, weighted as in `route`, which takes
    `sigmoid`; `correction` names the parameter that it takes, None where there is none. The router is `wide` where it
    multiplies in fp32. Matrices are stored (out, in), or `in_out`, gate before up, with SwiGLU between, or what
    `hidden_act` has for it; in gpt-oss' layout (`interleaved`) their columns take turns, and both are clamped; not
    `gated`, with the square of what is positive between. Experts of a `latent` vector are given it, and return one, in
    place of a hidden state. `router`, `modules` and, of these, `first` are what parameters are called; `each` is what
    the router weights each expert by, if it does. With `weights_inputs` what an expert is given is weighted, not what
    it returns.
    """

    chosen: int
    normalised: bool
    interleaved: bool = False
    in_out: bool = False
    weights_inputs: bool = False
    correction: str | None = None
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    wide: bool = False
    hidden_act: str = "silu"
    gated: bool = True
    latent: bool = False
    router: str = "mlp.gate"
    modules: str = "mlp.experts"
    first: str = "gate_up_proj"
    each: str | None = None
    pointwise: Pointwise = PLAIN

    def forward(self, params: Mapping[str, Tensor], x: Tensor, derived: Derived, *, output: bool = True) -> Tensor:
        """x [..., hidden] -> the same shape; params as in `ModelSpec.parameter_shapes`.

        What multiplies no matrix is told to `derived`, which may have backward make it again. Without `output` the
        experts' outputs are not added up.
        """
        scores = self.scores(params, x)
        if not self.latent:
            return self.of_scores(params, x, scores, derived, output=output)
        given = linear(params, TO_LATENT, x)
        found = self.of_scores(params, given, scores, derived)
        del given  # a forward that saves nothing can free it here
        return linear(params, OF_LATENT, found, output=output)

    def scores(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """What the router makes of x [..., hidden]: [T, n]."""
        rows = x.flatten(0, -2)
        if self.wide:
            return wide_product(rows, params[f"{self.router}.weight"])
        return F.linear(rows, params[f"{self.router}.weight"], params.get(f"{self.router}.bias"))

    def of_scores(
        self, params: Mapping[str, Tensor], x: Tensor, scores: Tensor, derived: Derived, *, output: bool = True
    ) -> Tensor:
        """As `forward`, where the router has made these scores, maybe of another input."""
        rows = x.flatten(0, -2)
        correction = None if self.correction is None else params[self.correction]
        weights, expert, order = route(
            scores,
            self.chosen,
            correction,
            sigmoid=self.sigmoid,
            normalised=self.normalised,
            scale=self.scale,
            groups=self.groups,
            chosen_groups=self.chosen_groups,
            of_each=None if self.each is None else params[self.each],
        )
        if self.weights_inputs:
            copies = _WeightedCopies.apply(rows, order, weights, self.pointwise)  # type: ignore[no-untyped-call]
            again = derived(copies, self.pointwise.summed_backward, rows, order, weights)
        else:
            copies = _Copies.apply(rows, order, self.chosen)  # type: ignore[no-untyped-call]
            again = derived(copies, lambda rows, order: rows[order // self.chosen], rows, order)
        with again:
            both = self._product(params, self.first, copies, expert, order)
        forward, backward = self._between()
        product = _Gated.apply(both, forward, backward)  # type: ignore[no-untyped-call]
        again = derived(product, forward, both)
        del copies, both  # of which a forward that saves nothing has no more use
        with again:
            outputs = self._product(params, "down_proj", product, expert, order)
        summed, of = (_Sum, self.chosen) if self.weights_inputs else (_WeightedSum, weights)
        y: Tensor = summed.apply(outputs, order, of, output, self.pointwise)  # type: ignore[no-untyped-call]
        return y.view_as(x)

    def _between(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
        """What is done between an expert's two matrices, and its gradient."""
        p = self.pointwise
        if not self.gated:
            return p.squared_forward, p.squared_backward
        if self.interleaved:
            return p.clamped_forward, p.clamped_backward
        if self.hidden_act == "silu":
            return p.halves_forward, p.halves_backward
        return p.geglu_halves_forward, p.geglu_halves_backward

    def _product(self, params: Mapping[str, Tensor], name: str, rows: Tensor, expert: Tensor, order: Tensor) -> Tensor:
        stored = params[f"{self.modules}.{name}"]
        bias = params.get(f"{self.modules}.{name}_bias")
        how: tuple[Any, ...] = (bias, expert, order, self.in_out)
        if nf4.is_packed(stored):
            largest = params[nf4.largest_of(f"{self.modules}.{name}")]
            return _ByPackedExpert.apply(rows, stored, largest, *how)  # type: ignore[no-any-return, no-untyped-call]
        return _ByExpert.apply(rows, stored, *how)  # type: ignore[no-any-return, no-untyped-call]


class _Copies(torch.autograd.Function):
    """A row per choice, sorted by expert. The gradient adds up in a fixed order: it reads, and never scatters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.chosen = chosen
        return rows[order // chosen]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0][_places(order).view(-1, ctx.chosen)].sum(1), None, None


class _WeightedCopies(torch.autograd.Function):
    """A row per choice, sorted by expert, times its weight [T, k]: as a sum weighted by these, the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor, pointwise: Pointwise) -> Tensor:
        ctx.save_for_backward(rows, order, weights)
        ctx.pointwise = pointwise
        return pointwise.summed_backward(rows.detach(), order, weights.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, order, weights = ctx.saved_tensors
        places = _places(order).view_as(weights)
        d_rows = ctx.pointwise.weighted_sum(grads[0], places, weights)
        return d_rows, None, ctx.pointwise.weights_backward(grads[0], places, rows), None


class _Gated(torch.autograd.Function):
    """What lies between an expert's two matrices; saves the output of the first."""

    @staticmethod
    def forward(
        ctx: Any,
        both: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(both)
        ctx.backward = backward
        return forward(both.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward(grads[0], *ctx.saved_tensors), None, None


class _WeightedSum(torch.autograd.Function):
    """The outputs of a token's experts, weighted by the router and added up."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, order: Tensor, weights: Tensor, output: bool, pointwise: Pointwise
    ) -> Tensor:
        ctx.save_for_backward(outputs, order, weights)
        ctx.pointwise = pointwise
        if not output:
            return unread(weights.shape[:1] + outputs.shape[1:], outputs)
        return pointwise.weighted_sum(outputs.detach(), _places(order).view_as(weights), weights.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outputs, order, weights = ctx.saved_tensors
        places = _places(order).view_as(weights)
        d_outputs = ctx.pointwise.summed_backward(grads[0], order, weights)
        return d_outputs, None, ctx.pointwise.weights_backward(outputs, places, grads[0]), None, None


class _Sum(torch.autograd.Function):
    """The outputs of a token's experts, added up."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: Tensor, chosen: int, output: bool, pointwise: Pointwise) -> Tensor:
        ctx.save_for_backward(order)
        ctx.chosen = chosen
        if not output:
            return unread(torch.Size((len(outputs) // chosen, outputs.shape[1])), outputs)
        places = _places(order).view(-1, chosen)
        return pointwise.weighted_sum(outputs.detach(), places, torch.ones_like(places, dtype=torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0][order // ctx.chosen], None, None, None, None


class _ByExpert(torch.autograd.Function):
    """rows [T k, in], sorted by expert, times each expert's own matrix, and its bias [n, out] added.

    The gradient of the matrices goes to the layer's gradient slab some columns at a time. Rows are kept for it alone.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, stored: Tensor, bias: Tensor | None, expert: Tensor, order: Tensor, in_out: bool
    ) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, stored, expert, order)
        ctx.in_out = in_out
        ctx.sink = sink_of(stored) if ctx.needs_input_grad[1] else None
        whose = expert.flatten()[order]
        y = _products(rows, stored if in_out else stored.transpose(1, 2), _ends(whose, len(stored)))
        return y if bias is None else y.add_(bias[whose])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, stored, expert, order = ctx.saved_tensors
        dy, whose = grads[0], expert.flatten()[order]
        ends = _ends(whose, len(stored))
        d_rows = _products(dy, stored.transpose(1, 2) if ctx.in_out else stored, ends)
        d_stored, d_bias = None, None
        if ctx.needs_input_grad[1]:
            a, b = (rows, dy) if ctx.in_out else (dy, rows)
            if ctx.sink is None:
                d_stored = _outer_products(a, b, ends)
            elif (sink := ctx.sink()) is not None:
                for columns in _some_columns(stored):
                    sink.part((..., columns)).put(_outer_products(a, b[:, columns], ends))
        if ctx.needs_input_grad[2]:  # a product, since adding rows up by index has no fixed order on a GPU
            mine = whose == torch.arange(len(stored), device=whose.device)[:, None]
            d_bias = mine.to(dy.dtype) @ dy
        return d_rows, d_stored, d_bias, None, None, None


class _ByPackedExpert(torch.autograd.Function):
    """As `_ByExpert`, of frozen matrices in 4 bits, some of which are whole at a time, in backward again.

    It waits to learn how many rows each expert has: rows of some experts cannot be told from the others' else.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        codes: Tensor,
        largest: Tensor,
        bias: Tensor | None,
        expert: Tensor,
        order: Tensor,
        in_out: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes, largest, expert, order)
        ctx.in_out = in_out
        whose = expert.flatten()[order]
        y = _packed_products(rows, codes, largest, _ends(whose, len(codes)), transposed=not in_out)
        return y if bias is None else y.add_(bias[whose])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        codes, largest, expert, order = ctx.saved_tensors
        ends = _ends(expert.flatten()[order], len(codes))
        d_rows = _packed_products(grads[0], codes, largest, ends, transposed=ctx.in_out)
        return d_rows, None, None, None, None, None, None


def waits_for_gpu(dtype: torch.dtype) -> bool:
    """Whether torch's grouped products read how many rows each expert has, from the GPU that torch has chosen."""
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] not in WITHOUT_WAIT


def _places(order: Tensor) -> Tensor:
    """Where each choice came to lie: the inverse of the permutation `order`, int64."""
    numbers = torch.arange(len(order), device=order.device)
    return torch.empty_like(numbers).scatter_(0, order.long(), numbers)


def _ends(whose: Tensor, experts: int) -> Tensor:
    """Where each expert's rows end, int32 [n], of the sorted experts `whose` [T k]."""
    numbers = torch.arange(experts, dtype=whose.dtype, device=whose.device)
    return torch.searchsorted(whose, numbers, right=True, out_int32=True)


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows [R, in] times matrices [n, in, out], each row by its own: [R, out]."""
    if rows.is_cuda:
        return F.grouped_mm(rows, matrices, offs=ends)
    y = rows.new_empty(len(rows), matrices.shape[2])
    for part, matrix in zip(_parts(ends), matrices, strict=True):
        torch.mm(rows[part], matrix, out=y[part])
    return y


def _packed_products(rows: Tensor, codes: Tensor, largest: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """As `_products` by matrices in 4 bits, or by these transposed."""
    bounds, of_one = _bounds(ends), codes[0].numel() * PER_BYTE
    blocks, some = of_one // BLOCK, max(EXPERTS_CHUNK // of_one, 1)
    y = rows.new_empty(len(rows), codes.shape[1] if transposed else codes.shape[2] * PER_BYTE)
    for first in range(0, len(codes), some):
        last = min(first + some, len(codes))
        start, stop = bounds[first], bounds[last]
        if start == stop:  # no token has chosen these
            continue
        matrices = nf4.whole(codes[first:last], largest[first * blocks : last * blocks], rows.dtype)
        matrices = matrices.transpose(1, 2) if transposed else matrices
        y[start:stop] = _products(rows[start:stop], matrices, ends[first:last] - start)
    return y


def _outer_products(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The product of each expert's own rows of a [R, p], transposed, and of b [R, q]: [n, p, q]."""
    if a.is_cuda:
        found = F.grouped_mm(a.t(), b, offs=ends)
        return found if torch.cuda.get_device_capability(a.device) == HOPPER else _zero_without_rows(found, ends)
    return torch.stack([a[part].t() @ b[part] for part in _parts(ends)])


def _zero_without_rows(products: Tensor, ends: Tensor) -> Tensor:
    """Zeros for experts that have no rows, in place: on Blackwell torch leaves what was there (pytorch#172439)."""
    rows = torch.diff(ends, prepend=ends.new_zeros(1))
    return products.masked_fill_((rows == 0)[:, None, None], 0.0)


def _some_columns(stored: Tensor) -> list[slice]:
    """All columns of matrices [n, p, q], those together whose gradient has EXPERTS_CHUNK elements at most."""
    n, p, q = stored.shape
    width = max(EXPERTS_CHUNK // (n * p * ALIGNED) * ALIGNED, ALIGNED)
    return [slice(start, min(start + width, q)) for start in range(0, q, width)]


def _parts(ends: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(_bounds(ends))]


def _bounds(ends: Tensor) -> list[int]:
    """Where rows of experts begin, and the last one's end."""
    return [0, *ends.tolist()]

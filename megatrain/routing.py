"""Which experts each token chooses of a mixture, and how it weights them: of T tokens each k of n experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def route(
    logits: Tensor,
    chosen: int,
    correction: Tensor | None = None,
    *,
    sigmoid: bool = False,
    normalised: bool,
    scale: float = 1.0,
    groups: int = 1,
    chosen_groups: int = 1,
    of_each: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which experts each row of logits [T, n] chooses: `weights` [T, k], `expert` [T, k] and `order` [T k].

    Weights are probabilities, or each logit's `sigmoid`, in at least fp32, of which the k chosen add up to one if
    `normalised`; with a `correction` [n] they are chosen by their sum with that. It has no gradient: one of zeros. Then
    they are multiplied by `scale`, and by the expert's own number `of_each` [n]. Of several `groups` of n / groups
    experts, side by side, only the best `chosen_groups` are chosen from: by their best expert, with `sigmoid` by their
    two best together. The expert of choice j of token t is expert[t, j]; choices, numbered t k + j, are sorted by
    expert in `order`. Both are int32.
    """
    return _Route.apply(  # type: ignore[no-any-return, no-untyped-call]
        logits, chosen, correction, sigmoid, normalised, scale, groups, chosen_groups, of_each
    )


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        chosen: int,
        correction: Tensor | None,
        sigmoid: bool,
        normalised: bool,
        scale: float,
        groups: int,
        chosen_groups: int,
        of_each: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probabilities = wide.sigmoid() if sigmoid else wide.softmax(-1)
        scores = probabilities if correction is None else probabilities + correction
        if chosen_groups < groups:
            scores = _of_best_groups(scores, groups, chosen_groups, by=2 if sigmoid else 1)
        index = scores.topk(chosen, dim=-1).indices
        weights = probabilities.gather(-1, index)
        if normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if scale != 1:
            weights = weights * scale
        if of_each is not None:
            weights = weights * of_each[index]
        order = index.flatten().argsort(stable=True).to(torch.int32)
        expert = index.to(torch.int32)
        ctx.save_for_backward(probabilities, expert, of_each)
        ctx.sigmoid, ctx.normalised, ctx.scale, ctx.dtype = sigmoid, normalised, scale, logits.dtype
        ctx.corrected = None if correction is None else correction.dtype
        ctx.mark_non_differentiable(expert, order)
        return weights, expert, order

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, expert, of_each = ctx.saved_tensors
        index, d_weights = expert.long(), grads[0] if ctx.scale == 1 else grads[0] * ctx.scale
        values, d_of_each = probabilities.gather(-1, index), None
        if of_each is not None:
            if ctx.needs_input_grad[8]:
                weights = values / values.sum(-1, keepdim=True) if ctx.normalised else values
                d_of_each = _by_expert(d_weights * weights, expert, len(of_each)).to(of_each.dtype)
            d_weights = d_weights * of_each[index]
        if ctx.normalised:
            total = values.sum(-1, keepdim=True)
            d_weights = (d_weights - (d_weights * values / total).sum(-1, keepdim=True)) / total
        d_logits = torch.zeros_like(probabilities).scatter_(-1, index, d_weights)
        d_correction = None
        if ctx.sigmoid:
            d_logits *= 1 - probabilities
        else:
            d_logits -= (d_logits * probabilities).sum(-1, keepdim=True)
        if ctx.needs_input_grad[2]:
            d_correction = probabilities.new_zeros(probabilities.shape[-1], dtype=ctx.corrected)
        return d_logits.mul_(probabilities).to(ctx.dtype), None, d_correction, *[None] * 5, d_of_each


def _by_expert(numbers: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The sum [n] of those of numbers [T, k] that are an expert's; a product, since adding up by index has no fixed
    order on a GPU.
    """
    mine = expert.flatten() == torch.arange(experts, device=expert.device)[:, None]
    return mine.to(numbers.dtype) @ numbers.flatten()


def _of_best_groups(scores: Tensor, groups: int, chosen: int, *, by: int) -> Tensor:
    """Scores [T, n], -inf outside of each row's best groups: those whose `by` best add up to the most."""
    grouped = scores.view(len(scores), groups, -1)
    best = grouped.topk(by, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).view_as(scores)

"""Latent attention: queries, keys and values expanded from few numbers per token; see `schedules.latent`.

What multiplies no matrix, between the projections and attention, saves nothing but rotary embedding's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.experts import Derived
from megatrain.layer_parts import rms_norm, rotate_last
from megatrain.linear import linear, linears
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.rotary import Turns
from schedules.latent import Latent

# Of the latent vectors' norms, whatever the model's is (transformers, modeling_deepseek_v3.py; DeepSeek's own code).
EPS = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Expansion:
    """From a block's input to what attention reads."""

    widths: Latent
    pointwise: Pointwise = PLAIN

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, turns: Turns | None, derived: Derived
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, seq, hidden] -> queries and keys [batch, seq, heads, nope + rope], and values [..., heads, value].

        Tables of `turns` are [seq, 1, rope / 2]; without, nothing is turned. What can be made again of a latent vector
        is told to `derived`.
        """
        first = "self_attn.q_a_proj" if self.widths.q_rank else "self_attn.q_proj"
        q, compressed = linears(params, (first, "self_attn.kv_a_proj_with_mqa"), x, in_fp8=None)
        if self.widths.q_rank:
            q = self._expand(params, "q", q, derived)
        heads = (*x.shape[:-1], self.widths.heads, -1)
        q = q.view(heads)
        if turns is not None:
            q = rotate_last(q, *turns.of_queries, self.pointwise, others_times=turns.late)
        vector, key = torch.split(compressed, [self.widths.kv_rank, self.widths.rope], dim=-1)
        both = self._expand(params, "kv", vector, derived).view(heads)
        of_keys = (None, None) if turns is None else turns.of_keys
        k, v = _KeysValues.apply(both, key.unsqueeze(-2), *of_keys, self.widths, self.pointwise)  # type: ignore[no-untyped-call]
        return q, k, v

    def _expand(self, params: Mapping[str, Tensor], of: str, vector: Tensor, derived: Derived) -> Tensor:
        weight = params[f"self_attn.{of}_a_layernorm.weight"]
        normed = rms_norm(vector, weight, EPS, self.pointwise)

        def make(vector: Tensor, weight: Tensor) -> Tensor:
            return self.pointwise.rms_forward(vector, weight, EPS)[0]

        with derived(normed, make, vector, weight):
            return linear(params, f"self_attn.{of}_b_proj", normed)


class _KeysValues(torch.autograd.Function):
    """Keys of what was expanded and of the one for all heads, and values without what lay between them."""

    @staticmethod
    def forward(
        ctx: Any,
        both: Tensor,
        key: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        widths: Latent,
        pointwise: Pointwise,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.nope, ctx.pointwise = widths.nope, pointwise
        return pointwise.keys_values(both.detach(), key.detach(), cos, sin, widths.nope)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = None if sin is None else -sin
        return *ctx.pointwise.keys_values_backward(*grads, cos, back, ctx.nope), None, None, None, None

"""Causal attention within a window, beside sinks, and to values narrower than keys, that keeps what attention keeps.

Shapes as the projections have them: queries [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads,
head_dim]. Plain causal attention is torch's own, but for fp32 on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """A token attends to itself and the tokens before it, `window` in all if not None.

    `mask` [seq, seq] has zeros where a query (row) may attend to a key and -inf elsewhere: on the CPU, where a window
    or sinks need it. Products of queries and keys are multiplied by `scale`, 1 / sqrt(head_dim) where it is None.
    """

    window: int | None = None
    mask: Tensor | None = None
    scale: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention's output [batch, seq, heads, width of v]; `sinks` [heads] are logits of a key that has no value."""
        narrow = v.shape[-1] < q.shape[-1] and not (q.is_cuda and q.dtype == torch.float32)
        if self.window is not None or sinks is not None or narrow:
            return _Flash.apply(  # type: ignore[no-any-return, no-untyped-call]
                q, k, v, sinks, self.window, self.mask, self.scale
            )
        # torch wants [batch, heads, seq, head_dim]; the memory stays in the projections' order, so that neither
        # attention's inputs nor its output are copied
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if q.is_cuda and q.dtype == torch.float32:
            return attention_again(q, k, v, self.scale).transpose(1, 2)
        shared = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared, scale=self.scale)
        return y.transpose(1, 2)


def band(seq_len: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The `mask` of Attention."""
    mask = torch.full((seq_len, seq_len), -torch.inf, device=device, dtype=dtype).triu_(1)
    if window is not None:
        mask += torch.full_like(mask, -torch.inf).tril_(-window)
    return mask


class _Flash(torch.autograd.Function):
    """Saves queries, keys, values, the output, and one number per query and head, as attention does.

    Flash attention has values as wide as keys: narrower ones get zeros behind, and the output loses what comes of them.

    A sink adds to the softmax's denominator only. So it scales the output and shifts the logsumexp, and with the
    two of them attention's own backward has the right probabilities and the right row sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        y, total, *ctx.random = _attend(q, k, v, window, mask, scale)
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.to(total.dtype).view(-1, 1))
            y.mul_(torch.exp(total - with_sink).transpose(1, 2).unsqueeze(-1))
            total = with_sink
        ctx.save_for_backward(q, k, v, sinks, y, total)
        ctx.window, ctx.mask, ctx.scale = window, mask, scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, total = ctx.saved_tensors
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            rows = (grads[0].to(total.dtype) * y).sum(-1).transpose(1, 2)
            share = torch.exp(sinks.to(total.dtype).view(-1, 1) - total)
            d_sinks = -(share * rows).sum((0, 2)).to(sinks.dtype)
        inputs = _attend_backward(grads[0], q, k, v, y, total, ctx.random, ctx.window, ctx.mask, ctx.scale)
        return *inputs, d_sinks, None, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, mask: Tensor | None, scale: float | None = None
) -> list[Tensor]:
    """The output, each row's logsumexp [batch, heads, seq], and on a GPU the state of random numbers not drawn."""
    seq, width = q.shape[1], v.shape[-1]
    v = _padded(v, q)
    if q.is_cuda:
        found = aten._flash_attention_forward(
            q, k, v, None, None, seq, seq, 0.0, True, False, scale=scale, **_sides(window)
        )
        return [_narrowed(found[0], width), *found[1:4]]
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    y, total = aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, is_causal=mask is None, attn_mask=None if mask is None else mask[:seq, :seq], scale=scale
    )
    return [_narrowed(y.transpose(1, 2), width), total]


def _attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    total: Tensor,
    random: list[Tensor],
    window: int | None,
    mask: Tensor | None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    seq, width = q.shape[1], v.shape[-1]
    dy, v, y = _padded(dy.contiguous(), q), _padded(v, q), _padded(y, q)
    if q.is_cuda:
        dq, dk, dv = aten._flash_attention_backward(
            dy, q, k, v, y, total, None, None, seq, seq, 0.0, True, *random, scale=scale, **_sides(window)
        )
        return dq, dk, _narrowed(dv, width)
    heads_first = (t.transpose(1, 2) for t in (dy, q, k, v, y))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first, total, 0.0, mask is None, attn_mask=None if mask is None else mask[:seq, :seq], scale=scale
    )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, _narrowed(dv, width)


def _padded(t: Tensor, like: Tensor) -> Tensor:
    """t with zeros behind, as wide as `like`."""
    missing = like.shape[-1] - t.shape[-1]
    return F.pad(t, (0, missing)) if missing else t


def _narrowed(t: Tensor, width: int) -> Tensor:
    """The first elements of each row, without the memory of the others."""
    return t if t.shape[-1] == width else t[..., :width].contiguous()


def _sides(window: int | None) -> dict[str, int]:
    """Flash attention counts the keys on either side of a query's own; -1 is all."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


class _AttentionAgain(torch.autograd.Function):
    """Saves queries, keys and values, and computes attention again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return _expanded_attention(q, k, v, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            q, k, v = leaves
            y = _expanded_attention(q, k, v, ctx.scale)
        return *torch.autograd.grad(y, leaves, grads[0]), None


def _expanded_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def attention_again(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention that keeps no more than its inputs: for fp32 on a GPU, a type for checks, not for speed.

    No fp32 kernel there shares keys among heads, so they are repeated, and it keeps one number per head and
    position padded to 32 positions: both would be more than `schedules.saved` counts. Shapes as
    scaled_dot_product_attention has them.
    """
    return _AttentionAgain.apply(q, k, v, scale)  # type: ignore[no-any-return, no-untyped-call]

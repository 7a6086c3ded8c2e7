"""Causal attention within a window, beside sinks, of wide heads, and to values narrower than keys, that keeps what
attention keeps.

Shapes as the projections have them: queries [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads,
head_dim]. Plain causal attention is torch's own, but for fp32 on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.documents import Documents
from schedules.heads import FLASH_DIM

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """A token attends to itself and the tokens before it, `window` in all if not None, those of its document alone.

    `mask` [seq, seq] has zeros where a query (row) may attend to a key and -inf elsewhere: on the CPU, where a window
    or sinks need it. Products of queries and keys are multiplied by `scale`, 1 / sqrt(head_dim) where it is None.
    Without `documents` each sequence is one.
    """

    window: int | None = None
    mask: Tensor | None = None
    scale: float | None = None
    documents: Documents | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention's output [batch, seq, heads, width of v]; `sinks` [heads] are logits of a key that has no value."""
        without_flash = q.is_cuda and q.dtype == torch.float32
        own = v.shape[-1] < q.shape[-1] or _wide(q)
        if self.window is not None or sinks is not None or self.documents is not None or (own and not without_flash):
            return _Flash.apply(q, k, v, sinks, self)  # type: ignore[no-any-return, no-untyped-call]
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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: Attention) -> Tensor:
        y, total, *ctx.random = _attend(q, k, v, how)
        if sinks is not None:
            with_sink = torch.logaddexp(total, sinks.to(total.dtype).view(-1, 1))
            y.mul_(_by_token(torch.exp(total - with_sink), y).unsqueeze(-1))
            total = with_sink
        ctx.save_for_backward(q, k, v, sinks, y, total)
        ctx.how = how
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, total = ctx.saved_tensors
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            rows = (grads[0].to(total.dtype) * y).sum(-1)
            share = torch.exp(sinks.to(total.dtype).view(-1, 1) - total)
            d_sinks = -(_by_token(share, y) * rows).sum((0, 1)).to(sinks.dtype)
        inputs = _attend_backward(grads[0], q, k, v, y, total, ctx.random, ctx.how)
        return *inputs, d_sinks, None


def _by_token(of_rows: Tensor, like: Tensor) -> Tensor:
    """A number for each query and head, as `_attend` returns them, [batch, seq, heads] as attention's output has."""
    return of_rows.transpose(-1, -2).reshape(like.shape[:-1])


def _attend(q: Tensor, k: Tensor, v: Tensor, how: Attention) -> list[Tensor]:
    """The output, each row's logsumexp, and on a GPU the state of random numbers not drawn.

    The second is [batch, heads, seq], and with documents [heads, batch * seq].
    """
    if _wide(q):
        return _attend_widely(q, k, v, how)
    width = v.shape[-1]
    v = _padded(v, q)
    if q.is_cuda:
        y, *found = aten._flash_attention_forward(
            *_joined(how, q, k, v), *_extents(how, q.shape[1]), 0.0, True, False, scale=how.scale, **_sides(how.window)
        )
        return [_narrowed(y.view_as(q), width), *found[:3]]
    outputs, totals = [], []
    for some in _alike(how, q, k, v):
        y, total = aten._scaled_dot_product_flash_attention_for_cpu(
            *(t.transpose(1, 2) for t in some),
            is_causal=how.mask is None,
            attn_mask=_mask(how, some[0]),
            scale=how.scale,
        )
        outputs.append(y.transpose(1, 2))
        totals.append(total)
    if how.documents is None:
        return [_narrowed(outputs[0], width), totals[0]]
    y = torch.cat([y.flatten(0, 1) for y in outputs]).view_as(q)
    return [_narrowed(y, width), torch.cat([total.transpose(0, 1).flatten(1) for total in totals], dim=1)]


def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor, random: list[Tensor], how: Attention
) -> tuple[Tensor, ...]:
    if _wide(q):
        return _attend_widely_backward(dy, q, k, v, y, total, random, how)
    width = v.shape[-1]
    dy, v, y = _padded(dy.contiguous(), q), _padded(v, q), _padded(y, q)
    if q.is_cuda:
        dq, dk, dv = aten._flash_attention_backward(
            *_joined(how, dy, q, k, v, y), total, *_extents(how, q.shape[1]), 0.0, True, *random, scale=how.scale,
            **_sides(how.window),
        )  # fmt: skip
        return dq.view_as(q), dk.view_as(k), _narrowed(dv.view_as(v), width)
    grads = []
    for *some, of_rows in _alike(how, dy, q, k, v, y, total=total):
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(t.transpose(1, 2) for t in some), of_rows, 0.0, how.mask is None, attn_mask=_mask(how, some[0]),
            scale=how.scale,
        )  # fmt: skip
        grads.append([grad.transpose(1, 2) for grad in found])
    if how.documents is None:
        (dq, dk, dv), *_ = grads
    else:
        dq, dk, dv = (torch.cat([t.flatten(0, 1) for t in some]) for some in zip(*grads, strict=True))
    return dq.view_as(q), dk.view_as(k), _narrowed(dv.view_as(v), width)


def _wide(q: Tensor) -> bool:
    """Whether heads are too wide for flash attention on a GPU."""
    return q.is_cuda and q.shape[-1] > FLASH_DIM


ROWS_TOGETHER = 32  # to a multiple of which the kernel for wide heads fills up the rows' logsumexps (kAlignLSE)


def _attend_widely(q: Tensor, k: Tensor, v: Tensor, how: Attention) -> list[Tensor]:
    """As `_attend`, by the kernel for heads of any width, which shares no keys among heads."""
    times = q.shape[2] // k.shape[2]
    given = (t.transpose(1, 2) for t in (q, _repeated(k, times), _repeated(v, times)))
    y, total, *random = aten._scaled_dot_product_efficient_attention(*given, None, True, 0.0, True, scale=how.scale)
    return [y.transpose(1, 2), total[..., : q.shape[1]].contiguous(), *random]


def _attend_widely_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor, random: list[Tensor], how: Attention
) -> tuple[Tensor, ...]:
    times = q.shape[2] // k.shape[2]
    given = [t.transpose(1, 2) for t in (dy.contiguous(), q, _repeated(k, times), _repeated(v, times))]
    total = F.pad(total, (0, -total.shape[-1] % ROWS_TOGETHER), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *given, None, y.transpose(1, 2), total, *random, 0.0, [True, True, True, False], True, scale=how.scale
    )
    return dq.transpose(1, 2), *(t.transpose(1, 2).unflatten(2, (-1, times)).sum(3) for t in (dk, dv))


def _repeated(t: Tensor, times: int) -> Tensor:
    """[batch, seq, heads, width] with each head so many times in a row."""
    return t if times == 1 else t.repeat_interleave(times, dim=2)


def _alike(how: Attention, *tensors: Tensor, total: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Of tensors [batch, seq, ...], and of each row's logsumexp, the parts with documents of one length, a row each."""
    if how.documents is None:
        yield [*tensors, *([] if total is None else [total])]
        return
    start = 0
    for count, length in how.documents.alike:
        end = start + count * length
        some = [t.flatten(0, 1)[start:end].view(count, length, *t.shape[2:]) for t in tensors]
        if total is not None:
            some.append(total[:, start:end].view(-1, count, length).transpose(0, 1))
        yield some
        start = end


def _joined(how: Attention, *tensors: Tensor) -> list[Tensor]:
    """As flash attention takes them: with documents the sequences of all one after another."""
    return [t if how.documents is None else t.flatten(0, 1) for t in tensors]


def _extents(how: Attention, seq: int) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where queries and keys of each document begin, and how many the longest has."""
    if (documents := how.documents) is None:
        return None, None, seq, seq
    longest = max(documents.lengths)
    return documents.starts, documents.starts, longest, longest


def _mask(how: Attention, like: Tensor) -> Tensor | None:
    seq = like.shape[1]
    return None if how.mask is None else how.mask[:seq, :seq]


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

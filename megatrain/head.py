"""The last layer of a decoder: norm, output projection and loss, a part of the tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.pointwise import PLAIN, Pointwise
from megatrain.sink import Sink
from schedules.workspace import LOSS_CHUNK_TOKENS, terms_together


class _Products:
    """A sum of `terms` matrix products, put into a sink; many terms in 16 bits are added up as a sum of sums."""

    def __init__(self, sink: Sink, terms: int) -> None:
        self._sink, self._left = sink, terms
        self._together = terms_together(terms, sink.view.element_size())
        self._some = sink if self._together == terms else Sink(torch.empty_like(sink.view), False)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b, one of the terms."""
        self._some.put_product(a, b)
        self._left -= 1
        self._some = self._some.adding()
        if self._some.view is not self._sink.view and self._left % self._together == 0:
            self._sink.put(self._some.view)
            self._sink, self._some = self._sink.adding(), Sink(self._some.view, False)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Final norm, output projection and cross-entropy, forward and backward in one pass over the tokens.

    Logits are divided by `logits_scaling`: the norm's weight is, so that no tensor as wide is passed over once more.
    Then they are bent towards `softcap`, if there is one.
    """

    eps: float
    norm_offset: float = 0.0
    logits_scaling: float = 1.0
    softcap: float | None = None
    pointwise: Pointwise = PLAIN

    @torch.no_grad()
    def loss_and_grads(
        self,
        norm: Tensor,
        table: Tensor,
        hidden: Tensor,
        targets: Tensor,
        shares: Tensor,
        *,
        d_hidden: Tensor,
        norm_sink: Sink | None,
        table_sink: Sink | None,
        chunk: int = LOSS_CHUNK_TOKENS,
    ) -> Tensor:
        """The losses of these tokens, each times its share, added up: fp32 [] on the device (nothing waits for it).

        norm [hidden], table [vocab, hidden] (the head's own matrix or the tied embedding), hidden [batch, seq, hidden],
        targets int64 and shares fp32 [batch, seq]. Overwrites `d_hidden`, contiguous and of hidden's shape. A gradient
        without a sink, of frozen weights, is not computed.

        Logits exist for `chunk` tokens at a time, so a bf16 gradient of the table is rounded once per chunk. That of
        many chunks is a sum of sums, or the last chunks would be lost.
        """
        rows, d_rows = hidden.flatten(0, -2), d_hidden.view(-1, hidden.shape[-1])
        labels, each = targets.view(-1, 1), shares.view(-1, 1)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        norm = self._scaled(norm, wide)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        d_norm = torch.zeros(norm.shape, dtype=wide, device=hidden.device)
        table_sum = None if table_sink is None else _Products(table_sink, -(-len(rows) // chunk))
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            normed, rstd = self.pointwise.rms_forward(rows[part], norm, self.eps, self.norm_offset)
            part_loss, d_logits = self.pointwise.cross_entropy(
                normed @ table.t(), labels[part], each[part], self.softcap
            )
            loss += part_loss
            if table_sum is not None:
                table_sum.add(d_logits.t(), normed)
            d_rows[part], d_weight = self.pointwise.rms_backward(
                d_logits @ table, rows[part], rstd, norm, None, self.norm_offset
            )
            d_norm += d_weight
            del d_logits  # or it would be held while the next chunk's are made
        if norm_sink is not None:
            norm_sink.put(d_norm if self.logits_scaling == 1 else d_norm.div_(self.logits_scaling))
        return loss

    @torch.no_grad()
    def loss(
        self,
        norm: Tensor,
        table: Tensor,
        hidden: Tensor,
        targets: Tensor,
        shares: Tensor,
        *,
        chunk: int = LOSS_CHUNK_TOKENS,
    ) -> Tensor:
        """As `loss_and_grads`, the loss alone."""
        rows, labels, each = hidden.flatten(0, -2), targets.flatten(), shares.flatten()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        norm = self._scaled(norm, wide)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            normed, _ = self.pointwise.rms_forward(rows[part], norm, self.eps, self.norm_offset)
            logits = (normed @ table.t()).to(wide)
            if self.softcap is not None:
                logits.div_(self.softcap).tanh_().mul_(self.softcap)
            of_each = F.cross_entropy(logits, labels[part], reduction="none")
            loss += (of_each * each[part]).sum()
        return loss

    def _scaled(self, norm: Tensor, wide: torch.dtype) -> Tensor:
        return norm if self.logits_scaling == 1 else norm.to(wide) / self.logits_scaling

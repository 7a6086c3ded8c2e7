"""The first layer of a decoder: the embedding of tokens, and its gradient in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.sink import Sink
from schedules.workspace import EMBED_CHUNK


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Token embedding: a row of the table per token, times `scale` where it is not None."""

    scale: float | None = None

    def forward(self, table: Tensor, tokens: Tensor) -> Tensor:
        """tokens int64 [batch, seq], table [vocab, hidden] -> [batch, seq, hidden]."""
        rows = F.embedding(tokens, table)
        return rows if self.scale is None else rows.mul_(self.scale)

    def backward(self, tokens: Tensor, dy: Tensor, sink: Sink) -> None:
        """Write or add the table's dense gradient [vocab, hidden]; in a fixed order, on a GPU and by one thread.

        A token's terms are summed in at least fp32: of thousands of terms in bf16 the later ones would be lost. Each
        token that occurs has a row for its sum. There are as many rows as tokens in the batch, so some are left over:
        they are zeros, and are added to one token each, since a GPU adds the rows of one token one after another.
        All this for EMBED_CHUNK elements at a time.
        """
        table, flat, rows = sink.view, tokens.flatten(), dy.flatten(0, -2)
        sink.put_zero()
        wide = torch.promote_types(table.dtype, torch.float32)
        if wide == table.dtype:
            terms = rows.to(wide) if self.scale is None else rows.to(wide) * self.scale
            table.index_put_((flat,), terms, accumulate=True)
            return
        ordered, order = flat.sort(stable=True)
        place = torch.zeros_like(flat)
        place[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        owner = torch.arange(len(flat), device=flat.device).remainder_(len(table)).scatter_(0, place, ordered)
        columns = max(1, EMBED_CHUNK // len(flat))
        for start in range(0, table.shape[1], columns):
            part = slice(start, start + columns)
            terms = rows[:, part].to(wide)[order]
            if self.scale is not None:
                terms.mul_(self.scale)
            sums = torch.zeros_like(terms).index_put_((place,), terms, accumulate=True)
            # of several rows for one token all but one are zeros: their order changes nothing; and index_put_ would
            # copy the columns there and back
            table[:, part].index_add_(0, owner, sums.to(table.dtype))
            del terms, sums  # or they would be held while the next columns' are made

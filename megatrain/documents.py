"""Documents that follow each other in a sequence: where each ends, and which tokens none of them predicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Of a micro-batch, whose sequences are taken one after another.

    lengths: tokens of each document.
    starts: int32 [documents + 1] on the device: where each begins, and at last where all end.
    """

    lengths: tuple[int, ...]
    starts: Tensor

    @property
    def alike(self) -> Iterator[tuple[int, int]]:
        """How many documents of one length follow each other, and that length."""
        return ((len([*some]), length) for length, some in itertools.groupby(self.lengths))


def documents_of(tokens: Tensor, end: int, device: torch.device) -> Documents:
    """Of a micro-batch [batch, seq] on the host: each ends with the token `end`, or with its sequence."""
    ends = tokens == end
    ends[:, -1] = True
    starts = torch.nn.functional.pad(ends.flatten().nonzero().flatten() + 1, (1, 0))
    return Documents(lengths=tuple(starts.diff().tolist()), starts=starts.to(device, torch.int32))


def goes_on(tokens: Tensor, end: int) -> Tensor:
    """Which of these tokens [..., seq] are of the document that the token before is of, bool; a sequence's first is."""
    found = torch.ones_like(tokens, dtype=torch.bool)
    found[..., 1:] = tokens[..., :-1] != end
    return found

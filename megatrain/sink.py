"""Where a gradient goes: into a place that lies ready for it, stored or added, with no copy of its own in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a gradient goes: `view` is overwritten, whatever it held, or added to."""

    view: Tensor
    accumulate: bool

    def put(self, grad: Tensor) -> None:
        """Store or add `grad`, of the view's shape and any floating type."""
        if self.accumulate:
            self.view.add_(grad)
        else:
            self.view.copy_(grad)

    def put_product(self, a: Tensor, b: Tensor) -> None:
        """Store or add the matrix product a @ b, without a temporary if the types agree."""
        if a.dtype == self.view.dtype:
            # with beta=0 what the view held is ignored, NaN included
            torch.addmm(self.view, a, b, beta=int(self.accumulate), out=self.view)
        else:
            self.put(a @ b)

    def put_zero(self) -> None:
        """The gradient is zero."""
        if not self.accumulate:
            self.view.zero_()

    def part(self, index: tuple[Any, ...]) -> Sink:
        """Part of the place, for as much of the gradient."""
        return Sink(self.view[index], self.accumulate)

    def adding(self) -> Sink:
        """The same place, for the second and later terms of a sum."""
        return Sink(self.view, True)

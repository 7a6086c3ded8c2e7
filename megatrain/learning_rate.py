"""The learning rate from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from megatrain.adam import Adam


def by_step(hyper: Adam, *, warmup: int = 0, until: int | None = None, least: float = 0.0) -> Callable[[int], Adam]:
    """The optimizer's settings at each step, counted from 0 over all runs that go on from each other.

    The learning rate rises in equal parts to that of `hyper`, which step `warmup` - 1 has as the first. Where `until`
    is given it then falls along half a cosine (Loshchilov and Hutter, arXiv:1608.03983, without restarts), to `least`
    from step `until` on. Raises ValueError where that is not after the warm-up, or no less than the rate of `hyper`.
    """
    if not 0 <= least <= hyper.lr:
        raise ValueError(f"the learning rate decays from {hyper.lr:g}, and cannot end at {least:g}")
    if warmup < 0 or (until is not None and until <= warmup):
        raise ValueError(f"decay must end after warm-up: warm-up {warmup} steps, decay ends at {until}")

    def at(step: int) -> Adam:
        if step < warmup:
            return replace(hyper, lr=hyper.lr * (step + 1) / warmup)
        if until is None:
            return hyper
        gone = min((step - warmup) / (until - warmup), 1.0)
        return replace(hyper, lr=least + (hyper.lr - least) * (1.0 + math.cos(math.pi * gone)) / 2.0)

    return at

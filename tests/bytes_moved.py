"""What functions between products, products and copies read and write, as schedules count it; seen on a CPU."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.pointwise import FUSED, Pointwise
from schedules.model import FP32, Recurrence

MOVING = ("bmm", "baddbmm", "baddbmm_", "addcmul_", "mul", "mul_", "copy_", "zeros_like", "stack", "neg_")


class Traffic(TorchDispatchMode):
    """Bytes that functions between products, products and copies read and write; and the most there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.live = self.most = 0
        self.inside, self.seen = False, set[int]()
        self.pointwise = Pointwise(
            **{field.name: self.counting(getattr(FUSED, field.name)) for field in dataclasses.fields(FUSED)}
        )

    def add(self, read: tuple[Any, ...], written: tuple[Any, ...], *, counted: bool = True) -> None:
        if counted:
            self.moved += sum(t.nbytes for t in (*read, *written) if isinstance(t, Tensor))
        for t in written:
            if not isinstance(t, Tensor):
                continue
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.live += size
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.inside = True
            found = function(*args)
            self.inside = False
            self.add(args, found if isinstance(found, tuple) else (found,))
            return found

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not self.inside and isinstance(found, Tensor) and not func.is_view:
            counted = func.overloadpacket.__name__ in MOVING
            unread = func.overloadpacket is torch.ops.aten.copy_ or kwargs.get("beta") == 0
            self.add(args[unread:] if counted else (), (found,), counted=counted)
        return found


class Seen(NamedTuple):
    """Shares of what is counted."""

    moved: float
    taken: float


def seen(apply: Callable[[Pointwise], Tensor], of: list[Tensor], widths: Recurrence) -> tuple[Seen, Seen]:
    """What a recurrence, applied to tensors of which the first has all tokens, moves and takes, there and back."""
    size, tokens = of[0].itemsize, math.prod(of[0].shape[:2])

    def shares(traffic: Traffic, returned: int, *, backward: bool) -> Seen:
        elements, words = widths.moved(backward=backward)
        taken = (traffic.most - returned) / (tokens * FP32 * widths.workspace_words(backward=backward))
        return Seen(traffic.moved / (tokens * (elements * size + words * FP32)), taken)

    traffic = Traffic()
    with traffic:
        y = apply(traffic.pointwise)
    there = shares(traffic, y.nbytes, backward=False)
    traffic, dy, node = Traffic(), torch.zeros_like(y), y.grad_fn
    assert node is not None
    node.pointwise = traffic.pointwise  # type: ignore[attr-defined]
    with traffic:
        y.backward(dy)
    return there, shares(traffic, sum(t.nbytes for t in of), backward=True)

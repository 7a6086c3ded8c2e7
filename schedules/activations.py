"""Buffers for activations, taken and given back as a program goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schedules import tensor as tensors
from schedules import trained
from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.op import Op, Tier
from schedules.tensor import describe, parse
from schedules.workload import Workload

_TOLD = 3  # activations never freed, of what may be hundreds


class ActivationBuffers:
    """Which activation is in which buffer. A buffer given back serves the next of its kind and size.

    `nbytes` tells a tensor's size.
    """

    def __init__(self, nbytes: Callable[[str], int]) -> None:
        self._nbytes = nbytes
        self._free: dict[tuple[str, int], list[str]] = {}  # by kind and size, given back longest ago first
        self._made: dict[str, int] = {}  # kind -> how many buffers
        self._live: dict[str, tuple[str, tuple[str, int]]] = {}  # in which buffer, of which kind and size
        self._held: dict[str, tuple[str, int]] = {}  # empty buffers that are not free yet, each of which kind and size
        self._gone: set[str] = set()  # made and given back

    @property
    def live(self) -> list[str]:
        """The activations that have been made and not freed, sorted."""
        return sorted(self._live)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._live

    def where(self, tensor: str) -> str:
        """The buffer that holds `tensor`. Raises ProgramError if none does."""
        if tensor not in self._live:
            raise ProgramError(_missing(tensor, gone=tensor in self._gone))
        return self._live[tensor][0]

    def take(self, tensor: str, tier: Tier, declare: Callable[[str, Tier], str], *, hold: bool = False) -> str:
        """A buffer for `tensor`, from now on its place; where it was before is given back, or on `hold` until released.

        `declare` makes one, where none is free.
        """
        # inputs and their gradients have one size and share their buffers
        cls = "saved" if parse(tensor).cls == tensors.SAVED else "hidden"
        kind = cls if tier == Tier.DEVICE else f"{tier}.{cls}", self._nbytes(tensor)
        if free := self._free.get(kind):
            buffer = free.pop(0)
        else:
            number = self._made.get(kind[0], 0)
            self._made[kind[0]] = number + 1
            buffer = declare(f"{kind[0]}{number}", tier)
        if hold:
            before, of = self._live[tensor]
            self._held[before] = of
        elif tensor in self._live:
            self.give_back(tensor)
        self._live[tensor] = buffer, kind
        return buffer

    def release(self, buffer: str) -> None:
        """A buffer on hold is free. Raises ProgramError if it is none."""
        if buffer not in self._held:
            raise ProgramError(f"release({buffer!r}): it is not on hold")
        self._free.setdefault(self._held.pop(buffer), []).append(buffer)

    def give_back(self, tensor: str) -> str:
        """Forget `tensor`; returns the buffer that is free now. Raises ProgramError if it is in none."""
        buffer = self.where(tensor)
        _, kind = self._live.pop(tensor)
        self._free.setdefault(kind, []).append(buffer)
        self._gone.add(tensor)
        return buffer


def _missing(tensor: str, *, gone: bool) -> str:
    """That an activation is in no buffer, and which call makes or keeps it."""
    name = parse(tensor)
    what, at = describe(tensor), f"({name.layer}, {name.microbatch})"
    if name.cls not in tensors.MICROBATCH_CLASSES:
        return f"only activations are evicted, restored and freed: load(), prefetch() and offload() copy {what}"
    if name.cls == tensors.OUTPUT_GRAD and gone:
        return f"{what}, is used up: backward{at} has run, once for every micro-batch is enough"
    if name.cls == tensors.OUTPUT_GRAD:
        return f"{what}, is made by loss() or the backward of the layer after: call that first"
    if name.cls == tensors.SAVED and gone:
        return f"{what}, are used up: backward{at} has run, or free them later"
    if name.cls == tensors.SAVED:
        return f'{what}, are not there: keep them by forward{at} with keep="all", or call recompute{at} first'
    if gone:
        return (
            f'{what}, is no longer kept: let the layer after keep it (keep="input" or "all"), '
            f"or make it again by recompute{at} with output=True"
        )
    return f"{what}, is not made yet: call forward{at} first"


def never_freed(live: Sequence[str], ops: Sequence[Op], model: ModelSpec, workload: Workload) -> str:
    """That activations are live when all ops have run, which op made each, and which call is missing."""
    told = []
    for tensor in live[:_TOLD]:
        maker = next(op.name for op in reversed(ops) if any(access.tensor == tensor for access in op.writes))
        told.append(f"{describe(tensor)}, made by {maker}: {_frees(tensor, model, workload)} is missing")
    rest = len(live) - len(told)
    return "never freed: " + "; ".join(told) + (f"; and {rest} more" if rest else "")


def _frees(tensor: str, model: ModelSpec, workload: Workload) -> str:
    """The call that would have freed an activation."""
    name = parse(tensor)
    i = model.layer_index(name.layer)
    if name.cls == tensors.OUTPUT:
        i += 1  # the layer that reads it
    if i not in trained.layers(model, workload) and i != model.head:
        return f"free({tensor!r})"
    return f"loss({name.microbatch})" if i == model.head else f"backward({model.layer_name(i)}, {name.microbatch})"

"""The buffers of a step and the tensors in them: what they are called, where they live, what stands where."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

from schedules import tensor as tensors
from schedules.amounts import amounts_of
from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.op import Access, Buffer, Tier
from schedules.ring import Ring
from schedules.tensor import Part, describe, named, parse
from schedules.whole_numbers import fault
from schedules.words import one_of, own_name
from schedules.workload import Workload

Held = tuple[str, str]  # a buffer and the tensor in it
MOST_SLOTS = 10_000  # of a ring: no step has use for more, and each is an object
MOST_BUFFERS = 400_000  # of a step: twice as many as it may have ops, few of which need one of their own


def index(number: SupportsIndex, call: str) -> int:
    """The number of a layer or micro-batch that `call` was given; numpy's integers count as such.

    Raises ProgramError for anything else: True, 1.0, "1".
    """
    if type(number) is int:  # as nearly all are
        return number
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise ProgramError(f"{call}() takes layers and micro-batches by their numbers, not {number!r}") from None


def held(pair: object, call: str) -> Held:
    """What `call` was given for a (buffer, tensor) pair. Raises ProgramError where it is none."""
    if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) for name in pair):
        return pair
    raise ProgramError(f"{call} takes a (buffer, tensor) pair, as at_home() gives, not {pair!r}")


class Buffers:
    """The buffers that a program names, each as large as the largest tensor that is ever put into it.

    Tensors have a home: the buffer in which they live between steps, on the host unless `keep_on_device` or
    `keep_on_nvme` says otherwise.
    """

    def __init__(self, model: ModelSpec, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self._amounts = amounts_of(model, workload)
        self._accesses: dict[Held, Access] = {}
        self._tiers: dict[str, Tier] = {}
        self._sizes: dict[str, int] = {}  # of those in use
        self._homes: dict[str, str] = {}
        self._holds: dict[str, str] = {}  # buffer -> tensor, in program order

    # ---- the names of tensors

    def weight(self, i: int) -> str:
        """The weights of layer i."""
        return self._named("weight", tensors.WEIGHT, i)

    def quantised(self, i: int) -> str:
        """The weights of block i in few bits, as the workload keeps them where they are frozen."""
        return self._named("quantised", tensors.QUANTISED, i)

    def adapter(self, i: int) -> str:
        """The adapters of block i, which are trained in place of its weights where the workload says so."""
        return self._named("adapter", tensors.ADAPTER, i)

    def grad(self, i: int, *, wide: bool = False, part: Part | None = None) -> str:
        """The gradient of what is trained of layer i, or a part of it, in fp32 if `wide`."""
        return self._named("grad", tensors.GRAD32 if wide else tensors.GRAD, i, part)

    def state(self, i: int, part: Part | None = None) -> str:
        """The optimizer state of layer i, or a part of it."""
        return self._named("state", tensors.STATE, i, part)

    def output(self, i: int, m: int) -> str:
        """The output of layer i for micro-batch m."""
        return self._named("output", tensors.OUTPUT, i, index(m, "output"))

    def saved(self, i: int, m: int) -> str:
        """What layer i keeps inside for its backward of micro-batch m."""
        return self._named("saved", tensors.SAVED, i, index(m, "saved"))

    def output_grad(self, i: int, m: int) -> str:
        """The gradient of layer i's output for micro-batch m."""
        return self._named("output_grad", tensors.OUTPUT_GRAD, i, index(m, "output_grad"))

    def _named(self, call: str, cls: str, i: int, of: int | Part | None = None) -> str:
        if type(i) is not int:
            i = index(i, call)
        return named(cls, self.model.layer_name(i), of)

    def nbytes(self, tensor: str) -> int:
        """Bytes of a tensor at this workload's precision."""
        return self._amounts.tensor(tensor)

    # ---- buffers

    def buffer(self, name: str, tier: Tier = Tier.DEVICE) -> str:
        """Declare a buffer; its size follows from what is put into it."""
        if name not in self._tiers:
            own_name(name, "a buffer")
        tier = one_of(Tier, tier, f"buffer {name}")
        if self._tiers.setdefault(name, tier) != tier:
            raise ProgramError(f"buffer {name} is on tier {self._tiers[name]}, not {tier}")
        if len(self._tiers) > MOST_BUFFERS:
            raise ProgramError(f"the policy makes more than {MOST_BUFFERS:,} buffers: see that its loops end")
        return name

    def reserve(self, name: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Memory that a system holds beside the tensors of the language, such as logits kept for a backward.

        A buffer that is larger already, for what was reserved or put into it before, stays so.
        """
        if wrong := fault(nbytes):
            raise ProgramError(f"reserve({name!r}): bytes {wrong}")
        self._sizes[self.buffer(name, tier)] = max(self._sizes.get(name, 0), nbytes)

    def slots(self, name: str, count: int, tier: Tier = Tier.DEVICE) -> Ring:
        """A ring of `count` buffers of one tier."""
        if wrong := fault(count, least=1):
            raise ProgramError(f"{name}: the length of a ring {wrong}")
        if count > MOST_SLOTS:
            raise ProgramError(f"{name}: a ring has up to {MOST_SLOTS:,} slots, not {count:,}")
        names = [f"{name}{i}" for i in range(count)]
        if taken := next((slot for slot in names if slot in self._tiers), None):
            raise ProgramError(
                f"slots({name!r}, {count}): there is a buffer {taken} already; give the ring another name"
            )
        return Ring(self, [self.buffer(slot, tier) for slot in names])

    def _of_activations(self, name: str, tier: Tier) -> str:
        """A buffer for activations, which a program takes by itself: the policy never names it."""
        if name in self._tiers:
            raise ProgramError(f"activations need a buffer {name}, and there is one already; give yours another name")
        return self.buffer(name, tier)

    def keep_on_device(self, *kept: str) -> None:
        """Make the device the home of these tensors."""
        self._settle(kept, Tier.DEVICE)

    def keep_on_nvme(self, *kept: str) -> None:
        """Make NVMe the home of these tensors."""
        self._settle(kept, Tier.NVME)

    def _settle(self, kept: Iterable[str], tier: Tier) -> None:
        for tensor in kept:
            if parse(tensor).cls not in tensors.LAYER_CLASSES:
                raise ProgramError(f"{describe(tensor)} has no home: it lives in buffers that come and go")
            self.nbytes(tensor)  # raises where the model has no such tensor
            self._homes[tensor] = self.buffer(f"{tier}.{tensor}", tier)

    def home(self, tensor: str) -> str:
        """The buffer in which `tensor` lives between steps."""
        if tensor not in self._homes:
            self._homes[tensor] = self.buffer(f"host.{tensor}", Tier.HOST)
        return self._homes[tensor]

    def at_home(self, tensor: str) -> Held:
        """(home, tensor): the pair by which ops name a tensor in its home."""
        return self.home(tensor), tensor

    def holds(self, buffer: str) -> str | None:
        """The tensor that `buffer` holds at this point of the program; None if its contents are void."""
        return self._holds.get(buffer)

    def discard(self, buffer: str) -> None:
        """Declare the contents of `buffer` void: what is written there next does not add to them."""
        self._holds.pop(buffer, None)

    def _holding(self, tensor: str) -> set[str]:
        return {buffer for buffer, held in self._holds.items() if held == tensor}

    def _access(self, op: str, buffer: str, tensor: str) -> Access:
        """The access of an op to a tensor in a buffer, which is made large enough for it."""
        known = self._accesses.get((buffer, tensor))
        if known is None:
            if not isinstance(buffer, str):
                due = f"a buffer for {tensor}, as .next() or load() of a ring gives"
                raise ProgramError(f"{op} takes {due}, not {buffer!r}")
            if buffer not in self._tiers:
                raise ProgramError(f"{op}: there is no buffer {buffer}; declare it with buffer() or slots()")
            self._sizes[buffer] = max(self._sizes.get(buffer, 0), self.nbytes(tensor))
            known = self._accesses[buffer, tensor] = Access(buffer, tensor)
        return known

    def _used(self) -> tuple[Buffer, ...]:
        """The buffers in use, in the order in which they were declared."""
        return tuple(
            Buffer(name=name, tier=tier, nbytes=self._sizes[name])
            for name, tier in self._tiers.items()
            if name in self._sizes
        )

"""The names of tensors: a class letter, a layer, and for activations a micro-batch (`w.3`, `x.embed.0`).

A layer's optimizer state and its gradient may be in parts that live and move by themselves, each a tensor of its own:
`o.3.0of4` is the first quarter of `o.3`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from schedules.errors import InputError

WEIGHT = "w"  # weights in the type they are computed with
QUANTISED = "q"  # frozen weights in few bits, as they are kept; what is computed with is made of them
ADAPTER = "a"  # LoRA's adapters of a block, which are trained in place of its weights
GRAD = "g"  # gradient in the type backward produces
GRAD32 = "g32"  # gradient widened to fp32
STATE = "o"  # optimizer state: moments, and the master copy where the precision keeps one
OUTPUT = "x"  # output of a layer, the input of the next
SAVED = "s"  # activations kept inside a layer for its backward
OUTPUT_GRAD = "d"  # gradient of a layer's output
NORM = "norm"  # the global gradient norm

LAYER_CLASSES = frozenset({WEIGHT, QUANTISED, ADAPTER, GRAD, GRAD32, STATE})
MICROBATCH_CLASSES = frozenset({OUTPUT, SAVED, OUTPUT_GRAD})
PARAMETERS = frozenset({WEIGHT, QUANTISED, ADAPTER})
PERSISTENT = PARAMETERS | {STATE}  # carried from one step to the next
GRADIENTS = frozenset({GRAD, GRAD32})
DIVISIBLE = GRADIENTS | {STATE}  # may be in parts


_NUMBER = re.compile(r"0|[1-9][0-9]*")  # as str() writes it, so that no tensor has two names
_PART = re.compile(rf"({_NUMBER.pattern})of([1-9][0-9]*)")


class TensorError(InputError):
    """A tensor name that is not of the language."""


class Part(NamedTuple):
    """One of several parts of a layer, about as large as each other; see `schedules.trained.span`."""

    number: int  # from 0
    of: int  # at least 2

    def __str__(self) -> str:
        return f"{self.number}of{self.of}"


def parts(of: int) -> tuple[Part | None, ...]:
    """All parts of a layer that is in so many; None stands for a layer that is in one piece. Raises TensorError."""
    if of < 1:
        raise TensorError(f"a layer is in one part or more, not in {of}")
    return tuple(Part(number, of) for number in range(of)) if of > 1 else (None,)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parsed tensor name; `layer` is "embed", "head" or a decimal block number, "" for the norm."""

    cls: str
    layer: str = ""
    microbatch: int | None = None
    part: Part | None = None

    def __str__(self) -> str:
        return named(self.cls, self.layer, self.microbatch if self.part is None else self.part)


@functools.lru_cache(maxsize=None, typed=True)  # 0.0 is no micro-batch, and must not name that of 0
def named(cls: str, layer: str, of: int | Part | None = None) -> str:
    """The name that `parse` reads, of a micro-batch or part; schedules ask for the same ones all the time."""
    words = [cls, layer] if layer else [cls]
    return ".".join(words if of is None else [*words, str(of)])


@functools.cache
def parse(name: str) -> Tensor:
    """Parse a tensor name.

    Raises:
        TensorError: the name has an unknown class, or the wrong number of parts.
    """
    if not isinstance(name, str):
        raise TensorError(f"a tensor is due, by its name as weight() makes it, not {name!r}")
    cls, *rest = name.split(".")
    if cls == NORM and not rest:
        return Tensor(NORM)
    if cls in LAYER_CLASSES and len(rest) == 1 and _is_layer(rest[0]):
        return Tensor(cls, rest[0])
    if cls in MICROBATCH_CLASSES and len(rest) == 2 and _is_layer(rest[0]) and _NUMBER.fullmatch(rest[1]):
        return Tensor(cls, rest[0], int(rest[1]))
    if cls in DIVISIBLE and len(rest) == 2 and _is_layer(rest[0]) and (found := _PART.fullmatch(rest[1])):
        part = Part(*map(int, found.groups()))
        if part.number < part.of > 1:
            return Tensor(cls, rest[0], part=part)
    raise TensorError(
        f"unknown tensor {name!r}: expected w|q|a|g|g32|o.LAYER, x|s|d.LAYER.MICROBATCH, g|g32|o.LAYER.PARTofPARTS or "
        "norm, with LAYER a block number, embed or head"
    )


def whole(name: str) -> str:
    """The tensor that this one is a part of; itself if it is none."""
    of = parse(name)
    return name if of.part is None else named(of.cls, of.layer)


def part_of(names: Iterable[str]) -> Part | None:
    """The part that tensors are of, of which some may be whole; None if all are."""
    return next((part for name in names if (part := parse(name).part) is not None), None)


def _is_layer(text: str) -> bool:
    return text in ("embed", "head") or _NUMBER.fullmatch(text) is not None


_WORDS = {
    WEIGHT: "the weights of layer {}",
    QUANTISED: "the quantised weights of layer {}",
    ADAPTER: "the adapters of layer {}",
    GRAD: "the gradient of layer {}",
    GRAD32: "the fp32 gradient of layer {}",
    STATE: "the optimizer state of layer {}",
    OUTPUT: "the output of layer {}",
    SAVED: "the saved activations of layer {}",
    OUTPUT_GRAD: "the gradient of layer {}'s output",
    NORM: "the global gradient norm",
}


@functools.cache  # the verifier has the words ready for every read
def describe(tensor: str) -> str:
    """A tensor's name in words: 'the output of layer 3, micro-batch 0'."""
    name = parse(tensor)
    text = _WORDS[name.cls].format(name.layer)
    if name.part is not None:
        return f"part {name.part} of {text}"
    return text if name.microbatch is None else f"{text}, micro-batch {name.microbatch}"

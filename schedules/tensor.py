"""The names of tensors: a class letter, a layer, and for activations a micro-batch (`w.3`, `x.embed.0`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from schedules.errors import InputError

WEIGHT = "w"  # weights in the type they are computed with
ADAPTER = "a"  # LoRA's adapters of a block, which are trained in place of its weights
GRAD = "g"  # gradient in the type backward produces
GRAD32 = "g32"  # gradient widened to fp32
STATE = "o"  # optimizer state: moments, and the master copy where the precision keeps one
OUTPUT = "x"  # output of a layer, the input of the next
SAVED = "s"  # activations kept inside a layer for its backward
OUTPUT_GRAD = "d"  # gradient of a layer's output
NORM = "norm"  # the global gradient norm

LAYER_CLASSES = frozenset({WEIGHT, ADAPTER, GRAD, GRAD32, STATE})
MICROBATCH_CLASSES = frozenset({OUTPUT, SAVED, OUTPUT_GRAD})
PARAMETERS = frozenset({WEIGHT, ADAPTER})
PERSISTENT = PARAMETERS | {STATE}  # carried from one step to the next
GRADIENTS = frozenset({GRAD, GRAD32})


class TensorError(InputError):
    """A tensor name that is not of the language."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parsed tensor name; `layer` is "embed", "head" or a decimal block number, "" for the norm."""

    cls: str
    layer: str = ""
    microbatch: int | None = None

    def __str__(self) -> str:
        return named(self.cls, self.layer, self.microbatch)


@functools.cache
def named(cls: str, layer: str = "", microbatch: int | None = None) -> str:
    """The name that `parse` reads; schedules ask for the same ones all the time."""
    parts = [cls, layer] if layer else [cls]
    return ".".join(parts if microbatch is None else [*parts, str(microbatch)])


@functools.cache
def parse(name: str) -> Tensor:
    """Parse a tensor name.

    Raises:
        TensorError: the name has an unknown class, or the wrong number of parts.
    """
    cls, *rest = name.split(".")
    if cls == NORM and not rest:
        return Tensor(NORM)
    if cls in LAYER_CLASSES and len(rest) == 1 and _is_layer(rest[0]):
        return Tensor(cls, rest[0])
    if cls in MICROBATCH_CLASSES and len(rest) == 2 and _is_layer(rest[0]) and rest[1].isdecimal():
        return Tensor(cls, rest[0], int(rest[1]))
    raise TensorError(
        f"unknown tensor {name!r}: expected w|a|g|g32|o.LAYER, x|s|d.LAYER.MICROBATCH or norm, "
        "with LAYER a block number, embed or head"
    )


def _is_layer(text: str) -> bool:
    return text in ("embed", "head") or text.isdecimal()

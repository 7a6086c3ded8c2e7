"""Rounding fp32 to bf16 up or down at random, the nearer of the two the more often: in the mean nothing is lost.

Without a master that keeps the rest of a weight, rounding to nearest loses each update below half the weight's last
bit; here such an update moves the weight now and then (Gupta et al., arXiv:1502.02551; of bf16 weights, Zamirai et al.,
arXiv:2010.06192). The random bits are a hash of the layer, the step and the place in the layer's slab, and of nothing
else: all schedules, numbers of threads and parts of a slab draw the same, and so does a run that is resumed.
`native/adam.cpp` and `native/adam_gpu.py` draw the same again.

The hash is Wellons's "lowbias32" (nullprogram.com, 2018), of 32 bits, with a second key within. Its lower half is for
the weight, its upper half for both moments.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

FACTORS = (0x7FEB352D, 0x846CA68B)  # of the hash


@dataclass(frozen=True, slots=True)
class Draws:
    """The random bits of a slab's update: two keys, each of 32 bits, signed as kernels take them.

    `start` is added to the place of an element, so that a part of a slab draws what the whole does.
    """

    start: int
    key: int

    @classmethod
    def of(cls, layer: int, step_number: int) -> Draws:
        """Of a layer's update in a step."""
        digest = hashlib.blake2b(struct.pack("<qq", layer, step_number), digest_size=8).digest()
        return cls(*struct.unpack("<ii", digest))

    def after(self, elements: int) -> Draws:
        """Of a part of the slab that begins so many elements later."""
        return Draws(start=_signed(self.start + elements), key=self.key)

    def bits(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For weights, and for moments: int32 [n], of which the lower 16 bits are drawn and the others zero."""
        x = torch.arange(n, dtype=torch.int32, device=device).add_(self.start)
        _fold(x, 16).mul_(_signed(FACTORS[0]))
        _fold(x, 15).bitwise_xor_(self.key).mul_(_signed(FACTORS[1]))
        _fold(x, 16)
        return x & 0xFFFF, _upper(x, 16)


def round_to(target: Tensor, values: Tensor, bits: Tensor) -> None:
    """Store values (fp32 [n], left with one pattern for every NaN) in target, bf16 [n], rounded by `bits`, int32 [n].

    A number of bf16 stays what it is. One beyond the largest of bf16 may become infinite.
    """
    # bits added to those of a NaN of all ones would wrap it around to a number
    patterns = values.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    target.view(torch.int16).copy_((patterns + bits).bitwise_right_shift_(16))


def _fold(x: Tensor, by: int) -> Tensor:
    return x.bitwise_xor_(_upper(x, by))


def _upper(x: Tensor, by: int) -> Tensor:
    """The upper bits, without their sign's copies."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(x: int) -> int:
    """The same 32 bits as a number that int32 holds."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)

"""A number that a tensor's bits are known by."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

PAGE = 512  # words of 8 bytes
CHUNK = 1 << 26  # bytes
# by place in a page, powers of an odd number, that of Knuth's MMIX generator, modulo 2**64
WEIGHTS = torch.full((PAGE,), 0x5851F42D4C957F2D, dtype=torch.int64).cumprod(0)


def checksum(values: Tensor) -> int:
    """32 bits that depend on each bit of a tensor of any type, flat, on the CPU, and on their order.

    Of each page a sum weighted by place, and of these the CRC-32: at the pace of memory, where that of everything takes
    several times as long. Damage at random goes unseen once in 2**32 times; two flips among the ten highest bits of
    words of one page may cancel.
    """
    found = 0
    for part in torch.split(values.view(torch.uint8), CHUNK):
        whole = len(part) // (8 * PAGE) * 8 * PAGE
        words = part[:whole]
        if words.storage_offset() % 8:
            words = words.clone()
        pages = torch.mv(words.view(torch.int64).view(-1, PAGE), WEIGHTS)
        for bits in (pages, part[whole:]):
            found = zlib.crc32(bits.numpy().data, found)
    return found

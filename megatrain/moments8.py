"""Adam's moments in eight bits: block-wise quantisation with a dynamic map (Dettmers et al., arXiv:2110.02861).

A slab of n moments is codes, uint8 [n], and the largest magnitude of every block of 256, fp32 [blocks]. A code stands
for a number in [-1, 1] (first moment) or [0, 1] (second), which is a share of its block's largest. Codes lie denser
towards zero: with every power of ten less they are half as many, from 64 or 128 in the topmost down to one or two.

The second moment is never rounded down to zero. A step is divided by it, and would be endlessly long.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatrain.native.adam import Map
from schedules.workload import STATE_BLOCK

DECADES = 7


@functools.cache
def codes(signed: bool, device: torch.device) -> Tensor:
    """What the 256 codes stand for, fp32, ascending; zero and one are among them."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (DECADES - 1 - decade) * (1 if signed else 2)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        found += ((edges[:-1] + edges[1:]) / 2 * 10.0**-decade).tolist()
    if signed:
        found += [-value for value in found if 0 < value < 1]  # 257 would be one too many
    values = torch.tensor(sorted(found), dtype=torch.float32, device=device)
    assert len(values) <= 256, "a code is one byte"
    return values


@functools.cache
def limits(signed: bool, device: torch.device) -> Tensor:
    """The largest share, fp32 [codes - 1], that each code but the last is stored for."""
    table = codes(signed, device)
    found = (table[:-1] + table[1:]) / 2
    if not signed:
        found[0] = 0.0
    return found


@functools.cache
def native_map(signed: bool, device: torch.device) -> Map:
    """The same for our own kernels."""
    cpu = torch.device("cpu")
    table, edges = codes(signed, cpu), limits(signed, cpu)
    pad = 256 - len(table)
    halves = torch.arange(1 << 16)
    found = torch.bucketize(_in_order(halves << 16).nan_to_num(nan=torch.inf), edges)
    nearest = torch.cat([_order(edges), torch.tensor([0xFFFFFFFF])])[found]  # the limit of each, if it begins so too
    steps = (found << 16) + torch.where(nearest >> 16 == halves, nearest & 0xFFFF, 0xFFFF)
    return Map(
        values=torch.nn.functional.pad(table, (0, pad)).to(device),
        steps=steps.to(device, torch.int32),
    )


def _order(values: Tensor) -> Tensor:
    """fp32 as int64, of their bits, in the order of the numbers; as in `native/adam.cpp`."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return bits ^ torch.where(bits < 1 << 31, 1 << 31, 0xFFFFFFFF)


def _in_order(order: Tensor) -> Tensor:
    """The inverse."""
    bits = order ^ torch.where(order < 1 << 31, 0xFFFFFFFF, 1 << 31)
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def blocks(n: int) -> int:
    """How many blocks n moments take."""
    return -(-n // STATE_BLOCK)


def quantise(values: Tensor, stored: Tensor, largest: Tensor, *, signed: bool) -> None:
    """Store fp32 [n] as codes [n] and largest magnitudes [blocks(n)], both overwritten.

    To the nearest code; if not `signed`, what is above zero stays above it. A NaN is stored as its block's largest,
    which it is not itself.
    """
    n = len(values)
    padded = torch.nn.functional.pad(values, (0, blocks(n) * STATE_BLOCK - n)).view(-1, STATE_BLOCK)
    torch.amax(padded.abs().nan_to_num_(0.0, posinf=torch.inf), dim=1, out=largest)
    shares = padded / torch.where(largest > 0, largest, 1.0)[:, None]
    stored.copy_(torch.bucketize(shares, limits(signed, values.device)).view(-1)[:n])


def dequantise(stored: Tensor, largest: Tensor, values: Tensor, *, signed: bool) -> None:
    """The inverse of `quantise`, to the nearest that a code can say; `values`, fp32 [n], is overwritten."""
    torch.index_select(codes(signed, values.device), 0, stored.int(), out=values)
    values.mul_(largest.repeat_interleave(STATE_BLOCK)[: len(values)])

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
    # of floats with the same upper half the least is the one with the lower half zero; of negative ones, all ones
    halves = torch.arange(1 << 16, dtype=torch.int64)
    bits = torch.where(halves < 1 << 15, halves << 16, (halves << 16) + 0xFFFF - (1 << 32))
    least = bits.to(torch.int32).view(torch.float32).nan_to_num(nan=torch.inf)
    return Map(
        values=torch.nn.functional.pad(table, (0, pad)).to(device),
        limits=torch.nn.functional.pad(edges, (0, pad + 1), value=torch.inf).to(device),
        below=torch.bucketize(least, edges).to(device, torch.int32),
    )


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

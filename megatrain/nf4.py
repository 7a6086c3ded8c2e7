"""Frozen weights in 4 bits, NF4 (QLoRA, arXiv:2305.14314): made once before training, and whole again to compute with,
a block at once or each matrix by the op that multiplies with it.

A block's slab, `schedules.quantised`: the largest magnitudes of all its matrices, fp32; its norms, biases and router,
as they are computed with; and codes, two of a matrix's neighbours a byte, the first in the upper half.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from megatrain.native.build import NotBuilt
from schedules.quantised import BLOCK, PER_BYTE, blocks, code_bytes, in_few_bits

# The paper's appendix E. Of two neighbours the nearer is taken, of two as near the lower.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BETWEEN = [(lower + upper) / 2 for lower, upper in pairwise(LEVELS)]  # the largest share of each code but the last
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # weights worked on at a time, whole blocks


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The part of a slab that is a matrix: codes, uint8 [bytes], and largest magnitudes, fp32 [blocks]."""

    codes: Tensor
    largest: Tensor


def parts(slab: Tensor, shapes: Mapping[str, tuple[int, ...]], weight: torch.dtype) -> dict[str, Matrix | Tensor]:
    """The parameters of a block as views into its slab, uint8 [bytes]; what is whole is of type `weight`."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    packed = [name for name, shape in shapes.items() if in_few_bits(name, shape)]
    plain = [name for name in shapes if name not in packed]
    lengths = [4 * blocks(sizes[name]) for name in packed]
    lengths += [weight.itemsize * sizes[name] for name in plain]
    lengths += [code_bytes(sizes[name]) for name in packed]
    pieces = torch.split(slab, lengths)
    largest, others, codes = pieces[: len(packed)], pieces[len(packed) : len(shapes)], pieces[len(shapes) :]
    found: dict[str, Matrix | Tensor] = {name: part.view(weight) for name, part in zip(plain, others, strict=True)}
    for name, of_codes, of_blocks in zip(packed, codes, largest, strict=True):
        found[name] = Matrix(codes=of_codes, largest=of_blocks.view(torch.float32))
    return {name: found[name] for name in shapes}


def quantise(values: Tensor, slab: Tensor, shapes: Mapping[str, tuple[int, ...]], weight: torch.dtype) -> None:
    """Fill a block's slab by its parameters, fp32, flat, on the CPU."""
    pieces = torch.split(values, [math.prod(shape) for shape in shapes.values()])
    for part, of in zip(parts(slab, shapes, weight).values(), pieces, strict=True):
        if isinstance(part, Tensor):
            part.copy_(of)
            continue
        for start in range(0, len(of), CHUNK["cpu"]):
            _quantise(of[start : start + CHUNK["cpu"]], _chunk(part, start, CHUNK["cpu"]))


def dequantising(slab: Tensor, weights: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[], None]:
    """What makes the parameters of a block, in the type and flat memory of `weights`, of its slab on the same device.

    Nothing waits when it is called: what it needs beside them is there.
    """
    pieces = torch.split(weights, [math.prod(shape) for shape in shapes.values()])
    found = parts(slab, shapes, weights.dtype).values()
    prepare(weights.device)

    def run() -> None:
        for part, into in zip(found, pieces, strict=True):
            if isinstance(part, Tensor):
                into.copy_(part)
            else:
                _make_whole(part, into)

    return run


def prepare(device: torch.device) -> None:
    """Have there what `whole` needs beside its arguments, so that nothing waits when it is called."""
    _kernels_on(device), levels(device), _pairs(device)


def packed(slab: Tensor, shapes: Mapping[str, tuple[int, ...]], weight: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a block for ops that make matrices whole themselves, as views into its slab.

    A matrix is its codes, uint8 [..., in / 2], and its largest magnitudes, fp32, which are called as `largest_of` says.
    """
    found = {}
    for name, part in parts(slab, shapes, weight).items():
        *rows, columns = shapes[name]
        if isinstance(part, Tensor):
            found[name] = part.view(shapes[name])
        else:
            found[name] = part.codes.view(*rows, columns // PER_BYTE)
            found[largest_of(name)] = part.largest
    return found


def largest_of(name: str) -> str:
    """What a packed matrix's largest magnitudes are called."""
    return f"{name}.largest"


def is_packed(parameter: Tensor) -> bool:
    """Whether a parameter is codes, which have to be made whole."""
    return parameter.dtype == torch.uint8


def whole(codes: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix, or matrices, [..., in] of codes [..., in / 2] and as many largest magnitudes as it has blocks."""
    made = torch.empty(*codes.shape[:-1], codes.shape[-1] * PER_BYTE, dtype=dtype, device=codes.device)
    _make_whole(Matrix(codes=codes.flatten(), largest=largest), made.view(-1))
    return made


def _make_whole(part: Matrix, into: Tensor) -> None:
    if (kernels := _kernels_on(into.device)) is not None:
        kernels.dequantise(part.codes, part.largest, levels(into.device), into)
        return
    chunk, pairs = CHUNK[into.device.type], _pairs(into.device)
    for start in range(0, len(into), chunk):
        _dequantise(_chunk(part, start, chunk), into[start : start + chunk], pairs)


def _chunk(part: Matrix, start: int, size: int) -> Matrix:
    codes, largest = (slice(start // of, -(-(start + size) // of)) for of in (PER_BYTE, BLOCK))
    return Matrix(codes=part.codes[codes], largest=part.largest[largest])


def _quantise(values: Tensor, into: Matrix) -> None:
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    into.largest.copy_(padded.abs().amax(1))
    shares = padded / torch.where(into.largest > 0, into.largest, 1.0)[:, None]
    codes = torch.zeros(shares.shape, dtype=torch.uint8)
    for limit in BETWEEN:  # twice as fast as torch.bucketize
        codes += shares > limit
    pairs = codes.view(-1, PER_BYTE)[: len(into.codes)]
    into.codes.copy_(pairs[:, 0] << 4 | pairs[:, 1])


def _dequantise(part: Matrix, into: Tensor, pairs: Tensor) -> None:
    shares = torch.nn.functional.embedding(part.codes.int(), pairs).view(-1)
    padded = torch.nn.functional.pad(shares[: len(into)], (0, -len(into) % BLOCK))
    into.copy_((padded.view(-1, BLOCK) * part.largest[:, None]).view(-1)[: len(into)])


@functools.cache
def levels(device: torch.device) -> Tensor:
    """What the 16 codes stand for, fp32, as shares of their block's largest magnitude."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """What the two codes of every byte stand for, fp32 [256, 2]."""
    found = torch.tensor(LEVELS, dtype=torch.float32)
    return torch.stack((found.repeat_interleave(len(LEVELS)), found.repeat(len(LEVELS))), dim=1).to(device)


@functools.cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    """Our kernel for a GPU, `native.nf4_gpu`; None elsewhere, and where Triton cannot compile it."""
    if device.type != "cuda":
        return None
    try:
        from megatrain.native import nf4_gpu

        nf4_gpu.try_out(device)
    except (ImportError, NotBuilt) as error:
        warnings.warn(f"quantised weights are made whole in several passes over memory: {error}", stacklevel=2)
        return None
    return nf4_gpu

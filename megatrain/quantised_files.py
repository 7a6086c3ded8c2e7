"""Weights that lie in files in fewer bits than a model is trained in: fp8, MXFP4, packed integers.

A tensor x lies there as it is, or as two tensors, its values and what they are multiplied with:

| in files | of types | is | published so |
|---|---|---|---|
| x, x_scale_inv or x_scale | F8_E4M3, floats | fp8, a scale for all, a row, a tile or a matrix | DeepSeek-V3 |
| x_blocks, x_scales | U8, U8 | MXFP4: 32 numbers of 4 bits with a power of 2, of x's columns, not its rows | gpt-oss |
| x_packed, x_scale | I32, floats | integers of 4 or 8 bits, with a scale for so many of a row | Kimi-K2-Thinking |

What lies beside them for activations that are quantised, too, is not needed where these are whole. Sources: OCP
Microscaling Formats (MX) 1.0, 5.3.3 and 5.4.1; transformers 5.24, integrations/mxfp4.py and finegrained_fp8.py;
compressed-tensors (vllm-project), compressors/pack_quantized.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = ("F32", "F16", "BF16")  # what safetensors calls the types that need nothing beside them to be read
TOLD = "bf16, fp16 or fp32 weights, or with such in fp8, MXFP4 or packed integers of 4 or 8 bits"
METHODS = ("fp8", "mxfp4", "compressed-tensors")  # what a config.json calls what is read here
LIES_AS = (("", "_scale_inv"), ("", "_scale"), ("_blocks", "_scales"), ("_packed", "_scale"))
NOT_NEEDED = ("activation_scale", "input_scale", ".k_scale", ".v_scale", ".weight_shape")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the code; with the fourth bit set the same, below 0
Tile = tuple[int, int]  # rows and columns that have one scale


class InFile(NamedTuple):
    """A tensor as safetensors tells of it before it is read."""

    shape: tuple[int, ...]
    type: str


def tile(config: Mapping[str, Any]) -> Tile | None:
    """What of a matrix in fp8 has one scale, where a config.json tells. Raises ValueError for what is not read here."""
    within = config.get("text_config")
    found = config.get("quantization_config") or (isinstance(within, dict) and within.get("quantization_config"))
    if not found:
        return None
    method = found.get("quant_method", "a way that it does not name") if isinstance(found, dict) else found
    if not isinstance(found, dict) or method not in METHODS:
        raise ValueError(f"are quantised, with {method}")
    told = _tiles(found)
    for sizes in told:
        if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
            raise ValueError(f"are quantised with tiles of {sizes}, not of rows and columns")
        if sizes != told[0]:
            raise ValueError(f"are quantised with tiles of {told[0]} and of {sizes}")
    return (told[0][0], told[0][1]) if told else None


def _tiles(found: Mapping[str, Any]) -> list[Any]:
    """What a quantization_config says of tiles; compressed-tensors for each of its groups, of which one is a row's."""
    told = [found.get("weight_block_size")]
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            size = weights.get("group_size")
            told += [weights.get("block_structure"), None if size in (None, -1) else [1, size]]
    return [sizes for sizes in told if sizes is not None]


def lies_as(name: str, files: Container[str]) -> tuple[str, ...]:
    """What files call the tensor `name`, or its values and what these are multiplied with; empty if it is not there."""
    for pair in (tuple(f"{name}{end}" for end in ends) for ends in LIES_AS):
        if all(part in files for part in pair):
            return pair
    return (name,) if name in files else ()


def whole_name(name: str) -> str:
    """What a tensor is called of which files call a part `name`."""
    for end in {end for pair in LIES_AS for end in pair if end}:
        name = name.removesuffix(end)
    return name


def shape(parts: Sequence[InFile], tile: Tile | None, columns: int) -> tuple[int, ...]:
    """The shape of a tensor that lies in files as `parts`, of a matrix with so many `columns` if these are packed.

    Raises ValueError where they are nothing that `widened` makes a tensor of.
    """
    if not parts:
        raise ValueError("lacks its values, or what they are multiplied with")
    values, *scales = parts
    types = [part.type for part in parts]
    if values.type in PLAIN and not scales:
        return values.shape
    if not scales:
        raise ValueError(f"is of type {values.type}, without a scale beside it")
    (scale,) = scales
    if types == ["U8", "U8"] and len(scale.shape) == 3 and values.shape == (*scale.shape, 16):
        experts, rows, blocks = scale.shape
        return experts, 32 * blocks, rows
    if scale.type not in PLAIN or values.type not in ("F8_E4M3", "I32"):
        raise ValueError(f"is of type {values.type}, with a scale of type {scale.type} beside it")
    packed = values.type == "I32"
    found = (*values.shape[:-1], columns) if packed else values.shape
    if packed and 32 * values.shape[-1] not in (4 * columns, 8 * columns):
        raise ValueError(f"has {values.shape[-1]} words a row, not those of {columns} integers of 4 or 8 bits")
    _repeats(found, scale.shape, tile)
    return found


def widened(parts: Sequence[Tensor], tile: Tile | None, columns: int) -> Tensor:
    """The tensor, fp32, that lies in files as `parts`: such as `shape` has found right."""
    values, *scales = parts
    if not scales:
        return values.to(torch.float32)
    (scale,) = scales
    if values.dtype == torch.uint8:
        return _of_mxfp4(values, scale)
    whole = _unpacked(values, columns) if values.dtype == torch.int32 else values.to(torch.float32)
    factors = scale.to(torch.float32).view(scale.shape if scale.numel() > 1 else ())
    for dim, repeats in _repeats(whole.shape, scale.shape, tile).items():
        factors = factors.repeat_interleave(repeats, dim).narrow(dim, 0, whole.shape[dim])
    whole *= factors
    return whole


def _repeats(whole: Sequence[int], scale: Sequence[int], tile: Tile | None) -> dict[int, int]:
    """Dimension -> how many numbers along it have one scale, where scales must be repeated to be as many as numbers.

    Raises ValueError where scales are for a tensor of another shape.
    """
    if prod(scale) == 1:
        return {}
    if len(scale) == len(whole):
        told = (1,) * (len(whole) - 2) + tile if tile else ()
        along = told or [max(size // scales, 1) for size, scales in zip(whole, scale, strict=True)]
        found = list(zip(whole, scale, along, strict=True))
        if all(scales in (1, size, ceil(size / each)) for size, scales, each in found):
            return {dim: each for dim, (size, scales, each) in enumerate(found) if scales not in (1, size)}
    raise ValueError(f"has the shape {list(whole)}, and scales of the shape {list(scale)}")


def _of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of 4 bits, the lower half of a byte first, times powers of 2 whose exponents are given, less 127."""
    codes = torch.arange(256)
    levels = torch.tensor([*E2M1, *(-level for level in E2M1)])
    pairs = torch.complex(levels[codes & 15], levels[codes >> 4])  # by the byte; what moves fastest as one
    experts, rows, of_row = scales.shape
    found = torch.empty(experts, 32 * of_row, rows)
    powers = scales.view(torch.float8_e8m0fnu)
    for matrix, block, power in zip(found, blocks, powers, strict=True):  # indices are four times as large as bytes
        numbers = torch.view_as_real(pairs.index_select(0, block.flatten().int())).view(rows, of_row, 32)
        matrix.copy_((numbers * power.to(torch.float32).unsqueeze(-1)).flatten(-2).mT)
    return found


def _unpacked(words: Tensor, columns: int) -> Tensor:
    """Integers of a word, the lowest bits first, as fp32; stored with half their range added."""
    bits = 32 * words.shape[-1] // columns
    each: Tensor = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)
    each = (each & (2**bits - 1)) - 2 ** (bits - 1)
    return each.flatten(-2).to(torch.float32)

"""Frozen weights of blocks in few bits: what is kept so, and how many bytes it takes.

Matrices of blocks are; norms, biases and routers, which are few, the embedding and the head stay as they are computed
with. In NF4 (QLoRA, Dettmers et al., arXiv:2305.14314, section 3) a weight is one of 16 levels, the quantiles of a
normal distribution, times the largest magnitude among BLOCK neighbours of its matrix, which is kept in fp32: 4.5 bits.

A block is computed with after an op has made all of it whole, in a buffer of its own, or by ops that make each matrix
whole just before they multiply with it, some experts at a time: that takes less memory, and as long each time.
"""

from __future__ import annotations

import math

from schedules import tensor as tensors
from schedules.model import FP32, ModelError, ModelSpec
from schedules.op import Op, Phase
from schedules.parameters import ROUTERS, is_matrix
from schedules.tensor import parse
from schedules.workload import Workload
from schedules.workspace import EXPERTS_CHUNK

BLOCK = 64  # weights that share a largest magnitude
PER_BYTE = 2  # codes
_ALONE = ("o_proj", "out_proj", "down_proj", "q_b_proj", "kv_b_proj")  # what has an input of its own in its module


def is_quantised(model: ModelSpec, i: int, workload: Workload) -> bool:
    """Whether layer i is kept in few bits. Raises ModelError when there is no layer i."""
    return model.is_block(i) and workload.quantised is not None


def in_few_bits(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of a quantised block is: a router that is off sends tokens to other experts."""
    return is_matrix(name, shape) and name not in ROUTERS


def makes_whole(op: Op) -> bool:
    """Whether an op makes a block's weights of its quantised ones."""
    return op.phase == Phase.CAST and any(parse(access.tensor).cls == tensors.QUANTISED for access in op.reads)


def blocks(params: int) -> int:
    """How many largest magnitudes a matrix of so many weights has."""
    return -(-params // BLOCK)


def code_bytes(params: int) -> int:
    """Bytes of the codes of a matrix of so many weights."""
    return -(-params // PER_BYTE)


def made_whole_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """What an op on block i moves to make its matrices whole: codes and magnitudes read, weights written.

    Raises ModelError where its matrices cannot be made whole one by one.
    """
    total = 0
    for name, shape in model.parameter_shapes(i).items():
        if not in_few_bits(name, shape):
            continue
        if shape[-1] % PER_BYTE or (len(shape) > 2 and math.prod(shape[1:]) % BLOCK):
            what = f"rows of {shape[-1]} weights" if shape[-1] % PER_BYTE else f"experts of {math.prod(shape[1:])}"
            raise ModelError(f"{model.name}: {name} has {what}, whose 4 bits are not apart: make blocks whole instead")
        params = math.prod(shape)
        total += FP32 * blocks(params) + code_bytes(params) + workload.bytes.weight * params
    return total


def whole_at_once_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """The most of block i's matrices that are whole at a time where ops make them so: those that have one input."""
    together: dict[str, int] = {}
    for name, shape in model.parameter_shapes(i).items():
        if not in_few_bits(name, shape):
            continue
        params = math.prod(shape)
        if len(shape) > 2:  # experts'
            together[name] = min(params, max(EXPERTS_CHUNK, math.prod(shape[1:])))
            continue
        module, _, last = name.removesuffix(".weight").rpartition(".")
        key = name if last in _ALONE else module
        together[key] = together.get(key, 0) + params
    return workload.bytes.weight * max(together.values(), default=0)


def quantised_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """Bytes of layer i as it is kept in few bits."""
    total = 0
    for name, shape in model.parameter_shapes(i).items():
        params = math.prod(shape)
        if in_few_bits(name, shape):
            total += FP32 * blocks(params) + code_bytes(params)
        else:
            total += workload.bytes.weight * params
    return total

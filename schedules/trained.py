"""What of a model is trained: all of its weights, adapters in their place, or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedules import tensor as tensors
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.op import Op
from schedules.optimizer import matrices
from schedules.tensor import Part
from schedules.workload import STATE_BLOCK, Workload


def layers(model: ModelSpec, workload: Workload) -> Sequence[int]:
    """The layers whose parameters are updated: all, with adapters the blocks, none where nothing is trained."""
    if workload.task == "evaluate":
        return ()
    return model.layers if workload.lora_rank is None else model.blocks


def cls(workload: Workload) -> str:
    """The class of the tensors that are updated."""
    return tensors.WEIGHT if workload.lora_rank is None else tensors.ADAPTER


def shapes(model: ModelSpec, workload: Workload, i: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what is trained of layer i, in the order in which it lies in slabs."""
    return model.parameter_shapes(i) if workload.lora_rank is None else model.adapter_shapes(i, workload.lora_rank)


def params(model: ModelSpec, workload: Workload, i: int) -> int:
    """Trained parameters of layer i."""
    if workload.lora_rank is None:
        return model.params(i)
    return sum(math.prod(shape) for shape in shapes(model, workload, i).values())


def part(op: Op) -> Part | None:
    """The part of its layer that an update is of, or a pass over gradients; None for all of it."""
    return tensors.part_of(access.tensor for access in op.writes)


def span(model: ModelSpec, workload: Workload, i: int, part: Part | None) -> slice:
    """The trained parameters of layer i that a part of its state or gradient is of; all of them for None.

    Parts begin at whole blocks of STATE_BLOCK parameters, which share a scale where moments are quantised.
    Raises InputError where a part would be empty, or one of a layer whose matrices are updated as wholes.
    """
    n = params(model, workload, i)
    if part is None:
        return slice(0, n)
    if matrices(model, workload, i):
        raise InputError(f"layer {model.layer_name(i)} has no parts: {workload.optimizer} updates whole matrices")
    blocks = -(-n // STATE_BLOCK)
    if blocks < part.of:
        layer, least = model.layer_name(i), f"{part.of} parts of {STATE_BLOCK} or more"
        raise InputError(f"layer {layer} has {n} trained parameters, too few for {least}")
    start, stop = (blocks * number // part.of * STATE_BLOCK for number in (part.number, part.number + 1))
    return slice(start, min(stop, n))

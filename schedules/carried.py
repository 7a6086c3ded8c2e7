"""Gradients that a step leaves to the next one, which begins with their updates.

A layer whose update is issued before the step makes a gradient of it is updated with the gradient of the step before,
and runs forward after that: "forward fusion" (arXiv:2104.00237). Training stays exact. With gradient clipping this is
how a layer can be updated while its weights pass through the device: the norm of all gradients is known by then. The
first step has no such gradient, and makes no such update; the last one leaves one behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules import tensor as tensors
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase
from schedules.tensor import parse


def carried(model: ModelSpec, ops: Sequence[Op]) -> dict[str, int]:
    """The layers that are updated with the gradient of the step before, by name, and at which place in program order
    each has a new one: whatever reads a gradient of the layer before that place reads the old one."""
    made: dict[str, int] = {}
    for place, op in enumerate(ops):
        if op.kind == Kind.COMPUTE:
            for access in op.writes:
                if (name := parse(access.tensor)).cls in tensors.GRADIENTS:
                    made.setdefault(name.layer, place)
    found: dict[str, int] = {}
    for place, op in enumerate(ops):
        if op.phase == Phase.ADAM and op.layer is not None and op.layer in model.layers:
            layer = model.layer_name(op.layer)
            if place < made.get(layer, -1):
                found[layer] = made[layer]
    return found

"""Gradients that a step leaves to the next one's updates, and what becomes of the last step's.

See `schedules.carried`. Between steps, what is trained lacks the last gradient of these layers: whoever looks at it has
that applied first, on the CPU. The next step then does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatrain.adam import Adam
from megatrain.store import Store
from megatrain.update import clipping, update
from schedules import tensor as tensors
from schedules import trained
from schedules.carried import carried
from schedules.op import Access, Op, Phase
from schedules.tensor import Part, parse, parts
from schedules.verify import Verified


class Carried:
    """What of a schedule is carried from one step to the next, and up to which step all gradients are applied.

    `applied` is how many steps' gradients have been, all of them, outside of the steps; `on_gradient` as in Trainer.
    """

    def __init__(
        self,
        verified: Verified,
        store: Store,
        hyper: Callable[[int], Adam],
        on_gradient: Callable[[int, int, slice, Tensor], None] | None,
    ) -> None:
        self._verified, self._store, self._hyper, self._on_gradient = verified, store, hyper, on_gradient
        schedule = verified.schedule
        self._next = carried(schedule.model, schedule.ops)  # layer -> the place of the op that makes its next gradient
        self.applied = 0

    def __contains__(self, op: Op) -> bool:
        """Whether an update is one by the gradient of the step before."""
        schedule = self._verified.schedule
        if op.layer is None:
            return False
        return schedule.index[op.name] < self._next.get(schedule.model.layer_name(op.layer), -1)

    def apply(self, steps: int) -> None:
        """So many steps have been made: apply what the last one left behind. Only between steps."""
        if steps > self.applied:
            for i in trained.layers(self._verified.schedule.model, self._verified.schedule.workload):
                if self._verified.schedule.model.layer_name(i) in self._next:
                    self._apply(i, steps - 1)
        self.applied = steps

    def _apply(self, i: int, step: int) -> None:
        schedule = self._verified.schedule
        all_of = trained.span(schedule.model, schedule.workload, i, None)
        weights, state = (contents.cpu() for contents in self._store.kept(self._verified, i))
        grad, factor = self._gradient(i), self._clipping(i)
        if self._on_gradient is not None:
            self._on_gradient(step, i, all_of, grad.clone() if factor is None else grad * factor)
        update(schedule, i, all_of)(weights, grad, state, self._hyper(step), step, factor)
        self._store.put(self._verified, i, weights, state)

    def _gradient(self, i: int) -> Tensor:
        """Layer i's gradient as the last step left it, whole or in parts, on the CPU."""
        found: dict[Part | None, Access] = {}
        for buffer, tensor in self._verified.carried.items():
            name = parse(tensor)
            if name.cls in tensors.GRADIENTS and name.layer == self._verified.schedule.model.layer_name(i):
                found[name.part] = Access(buffer, tensor)
        if None in found:
            return self._store.on_cpu(found[None])
        return torch.cat([self._store.on_cpu(found[part]) for part in parts(len(found))])

    def _clipping(self, i: int) -> Tensor | None:
        """What multiplies that gradient; None where it is not to be clipped, or has been."""
        schedule = self._verified.schedule
        clips = any(
            access.tensor == tensors.NORM
            for op in schedule.ops
            if op.layer == i and op.phase in (Phase.ADAM, Phase.SCALE) and op in self
            for access in op.reads
        )
        limit = schedule.workload.grad_clip
        if not clips or limit is None:
            return None
        buffer = next(buffer for buffer, tensor in self._verified.carried.items() if tensor == tensors.NORM)
        return clipping(self._store.tensor(Access(buffer, tensors.NORM)).cpu(), limit)

"""Blocks whose optimizer state lives on a drive, or parts of it, their weights too on request, and host buffers."""

from __future__ import annotations

from collections.abc import Collection

from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.ring import Ring
from schedules.tensor import Part

BESIDE = 2  # host buffers for weights beyond those on their way to the device: being updated, being written


class Drive:
    """The drive as the home of parts of blocks' `states`, and of the weights of some of these blocks.

    States pass through `slots` host buffers. Weights pass through others on their way to the device, `ahead` at once,
    and are updated there. Gradients in `waiting`, which are whole long before their update, wait on the drive as well.
    """

    def __init__(
        self,
        p: Program,
        *,
        states: Collection[tuple[int, Part | None]],
        weights: Collection[int],
        waiting: Collection[int],
        slots: int,
        ahead: int,
    ) -> None:
        self._program = p
        self.states, self.weights, self.waiting = set(states), set(weights), set(waiting)
        p.keep_on_nvme(*(p.state(*state) for state in sorted(self.states)))
        p.keep_on_nvme(*(p.weight(i) for i in sorted(self.weights)), *(p.grad(i) for i in sorted(self.waiting)))
        self._passing = p.slots("update.state", slots, Tier.HOST) if self.states else None
        self._staged = p.slots("stage", ahead + BESIDE, Tier.HOST) if self.weights else None

    def weight(self, i: int) -> str:
        """The host buffer with block i's weights, which are read unless they stand there."""
        assert self._staged is not None, "blocks' weights are there"
        p, weight = self._program, self._program.weight(i)
        return p.load(weight, self._staged, stream=Stream.NVME_READ)

    def buffer(self) -> str:
        """A host buffer for a part of a state on its way."""
        assert self._passing is not None, "blocks' states are there"
        return self._passing.next()

    def read_state(self, i: int, part: Part | None) -> str:
        """Bring a part of block i's state; returns its host buffer."""
        return self._program.prefetch(self._program.state(i, part), into=self.buffer(), stream=Stream.NVME_READ)

    def wait(self, i: int, slab: str) -> None:
        """Block i's gradient in `slab` goes to the drive until it is read."""
        self._program.offload(self._program.grad(i), out_of=slab, stream=Stream.NVME_WRITE)

    def read_grad(self, i: int, slabs: Ring) -> tuple[str, str]:
        """Bring block i's gradient into a slab; returns (buffer, gradient)."""
        p, grad = self._program, self._program.grad(i)
        return p.prefetch(grad, into=slabs.next(), stream=Stream.NVME_READ), grad

    def write(self, tensor: str, buffer: str) -> None:
        """What has been updated in a host buffer goes back."""
        self._program.offload(tensor, out_of=buffer, stream=Stream.NVME_WRITE)

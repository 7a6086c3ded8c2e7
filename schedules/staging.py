"""Host buffers between a drive and what it is the home of: parts of blocks' states, weights, waiting gradients."""

from __future__ import annotations

from schedules.buffers import Held
from schedules.op import Stream, Tier
from schedules.placement import Places
from schedules.program import Program
from schedules.ring import Ring
from schedules.tensor import Part

BESIDE = 2  # host buffers for weights beyond those on their way to the device: being updated, being written


class Staging:
    """What `places` puts on the drive, on its way from there and back.

    States pass through `slots` host buffers. Weights pass through others on their way to the device, `ahead` at once,
    and are updated there. Gradients that are whole long before their update wait on the drive as well.
    """

    def __init__(self, p: Program, places: Places, *, slots: int, ahead: int) -> None:
        self._program = p
        p.keep_on_nvme(*(p.state(*state) for state in sorted(places.nvme_states)))
        p.keep_on_nvme(*map(p.weight, sorted(places.nvme_weights)))
        p.keep_on_nvme(*(p.grad(i, part=part) for i in sorted(places.nvme_grads) for part in places.parts))
        self._states = p.slots("update.state", slots, Tier.HOST) if places.nvme_states else None
        self._weights = p.slots("stage", ahead + BESIDE, Tier.HOST) if places.nvme_weights else None

    def weight(self, i: int) -> str:
        """The host buffer with block i's weights, which are read unless they stand there."""
        assert self._weights is not None, "blocks' weights are there"
        return self._program.load(self._program.weight(i), self._weights, stream=Stream.NVME_READ)

    def buffer(self) -> str:
        """A host buffer for a part of a state on its way."""
        assert self._states is not None, "blocks' states are there"
        return self._states.next()

    def read_state(self, i: int, part: Part | None) -> str:
        """Bring a part of block i's state; returns its host buffer."""
        return self._program.prefetch(self._program.state(i, part), into=self.buffer(), stream=Stream.NVME_READ)

    def read_grad(self, i: int, part: Part | None, slabs: Ring) -> Held:
        """Bring a part of block i's gradient into a slab; returns (buffer, gradient)."""
        p, grad = self._program, self._program.grad(i, part=part)
        return p.prefetch(grad, into=slabs.next(), stream=Stream.NVME_READ), grad

    def write(self, tensor: str, buffer: str) -> None:
        """What is in a host buffer goes to the drive."""
        self._program.offload(tensor, out_of=buffer, stream=Stream.NVME_WRITE)

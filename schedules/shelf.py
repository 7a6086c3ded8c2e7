"""Weights and optimizer state between uses: in host memory, or on NVMe behind host buffers."""

from __future__ import annotations

from schedules.buffers import Held
from schedules.op import Stream, Tier
from schedules.program import Program


class Shelf:
    """The home of all weights and states: the host, or with `nvme` a drive.

    From a drive weights come through host buffers of their own on their way to the device. An update reads
    weights and state into others and writes both back; reading, updating and writing overlap between layers.
    """

    def __init__(self, p: Program, *, nvme: bool) -> None:
        self._program, self._nvme = p, nvme
        if nvme:
            p.keep_on_nvme(*(t for i in p.model.layers for t in (p.weight(i), p.state(i))))
            self._passing = p.slots("passing", 2, Tier.HOST)
            self._weights = p.slots("update.weight", 2, Tier.HOST)
            self._states = p.slots("update.state", 2, Tier.HOST)

    def fetch(self, i: int, into: str) -> str:
        """Load layer i's weights into a device buffer; returns it."""
        p, weight, source = self._program, self._program.weight(i), None
        if self._nvme:
            source = p.prefetch(weight, into=self._passing.next(), stream=Stream.NVME_READ)
        return p.prefetch(weight, into=into, out_of=source)

    def update(self, i: int, grad: Held) -> None:
        """The optimizer's step on layer i, on the CPU."""
        p = self._program
        if not self._nvme:
            p.update(i, grad=grad)
            return
        weights = p.prefetch(p.weight(i), into=self._weights.next(), stream=Stream.NVME_READ)
        state = p.prefetch(p.state(i), into=self._states.next(), stream=Stream.NVME_READ)
        p.update(i, grad=grad, weights=weights, state=state)
        p.offload(p.weight(i), out_of=weights, stream=Stream.NVME_WRITE)
        p.offload(p.state(i), out_of=state, stream=Stream.NVME_WRITE)

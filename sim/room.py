"""What has room on a machine: how much of a model must leave the device, or the host, before a search can begin."""

from __future__ import annotations

from collections.abc import Callable

from schedules import policies
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Knob, Schedule
from schedules.workload import MemoryBudget, Workload
from sim.candidate import OURS, Candidate
from sim.machine import HardwareProfile
from sim.prediction import peak_bytes

ONE_BLOCK: dict[str, Knob] = {"slots": 1, "grad_slots": 1}  # on the device at a time
THRIFT: tuple[dict[str, Knob], ...] = ({}, {"slabs": 1}, {"slabs": 1, "nvme_slots": 1})  # with host buffers
_ENDLESS = MemoryBudget(device_bytes=1 << 60, host_bytes=1 << 60, nvme_bytes=1 << 60)


class Room:
    """Which candidates of our own policy fit which tier. Answers are kept: each takes a whole schedule."""

    def __init__(self, model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget) -> None:
        self._model, self._profile, self._budget = model, profile, budget
        self._found: dict[Candidate, dict[Tier, bool]] = {}

    def on(self, tier: Tier, candidate: Candidate) -> bool:
        """Whether a candidate has room in a tier; False too of one that cannot be built."""
        if candidate not in self._found:
            limits = zip(Tier, vars(self._budget).values(), strict=True)
            try:
                peaks = peak_bytes(self._built(candidate), self._profile)
                self._found[candidate] = {tier: peaks[tier] <= limit for tier, limit in limits}
            except policies.PolicyError:
                self._found[candidate] = dict.fromkeys(Tier, False)
        return self._found[candidate][tier]

    def residents(self, start: Candidate) -> tuple[int, int]:
        """The fewest layers that must live on the device, for the host has no room, and the most that may."""
        counts = range(self._model.num_hidden_layers + 3)
        return _first(counts, lambda n: self._with_resident(n, start, Tier.HOST)), self._most(start)

    def _most(self, start: Candidate) -> int:
        counts = range(self._model.num_hidden_layers + 3)
        return _first(counts, lambda n: not self._with_resident(n, start, Tier.DEVICE)) - 1

    def _with_resident(self, count: int, start: Candidate, tier: Tier) -> bool:
        return self.on(tier, start.with_knobs({"resident": count, "keep": 0}))

    def holds(self, start: Candidate) -> list[int]:
        """How many blocks may have their weights on the device: beside all activations, and beside none."""
        blocks, workload = self._model.num_hidden_layers, start.workload
        adding_up = start.value("order") == "microbatches"
        one = self._model.params(0) * (workload.bytes.weight + (workload.bytes.grad if adding_up else 0))
        kept = self._model.saved_bytes(0, workload) * (1 if adding_up else workload.accumulation)
        taken = peak_bytes(self._built(start.with_knobs({"keep": 0})), self._profile)[Tier.DEVICE]
        found = (int((self._budget.device_bytes - taken - kept * count) // one) for count in (blocks, 0))
        return sorted({min(hold, blocks) for hold in found if hold > 0})

    def begin(self, start: Candidate, *, one_block: bool) -> Candidate:
        """With no more on the device and the host than have room there, as far as that can be.

        `one_block`: weights and gradients may come to the device one block at a time.
        """
        return self._off_the_host(self._off_the_device(start, one_block=one_block))

    def _off_the_device(self, start: Candidate, *, one_block: bool) -> Candidate:
        """The blocks' inputs go to the host between forward and backward, and what else may."""
        if self.on(Tier.DEVICE, start.with_knobs({"keep": 0})):
            return start
        start = start.with_knobs({"inputs": self._model.num_hidden_layers})
        if not one_block or self.on(Tier.DEVICE, start.with_knobs({"keep": 0})):
            return start
        return start.with_knobs(ONE_BLOCK)

    def _off_the_host(self, start: Candidate) -> Candidate:
        """With as much on NVMe as host and device together cannot hold, unless that is not what is lacking."""
        most = self._most(start)  # whatever is on the drive

        def held(candidate: Candidate) -> bool:
            return self._with_resident(most, candidate, Tier.HOST)

        if self._profile.nvme is None or most < 0 or held(start) or not held(start.with_knobs(self._away(start))):
            return start
        inputs: dict[str, Knob] = {"nvme_inputs": start.value("inputs")}
        for there in (start, start.with_knobs(inputs)):
            for thrift in THRIFT:
                if found := self._on_the_drive(there.with_knobs(thrift), held):
                    return found
        return start

    def _away(self, start: Candidate) -> dict[str, Knob]:
        """All that can be on the drive, through as few buffers as can be."""
        blocks = self._model.num_hidden_layers
        return {**THRIFT[-1], "nvme": blocks, "nvme_weights": blocks, "nvme_inputs": start.value("inputs")}

    def less_on_the_drive(self, candidate: Candidate) -> Candidate:
        """The same with no more on NVMe than the host has no room for."""
        return self._on_the_drive(candidate, lambda other: self.on(Tier.HOST, other)) or candidate

    def _on_the_drive(self, start: Candidate, enough: Callable[[Candidate], bool]) -> Candidate | None:
        """With no more on NVMe than is enough; None if all of it is not.

        State goes first, which is read and written once a step: weights are needed in both directions.
        """
        blocks = self._model.num_hidden_layers
        for others, name in (({"nvme_weights": 0}, "nvme"), ({"nvme": blocks}, "nvme_weights")):
            there = [start.with_knobs({**others, name: count}) for count in range(blocks + 1)]
            least = _first(range(blocks + 1), lambda n: enough(there[n]))  # noqa: B023
            if least <= blocks:
                return there[least]
        return None

    def least(self, workload: Workload) -> dict[Tier, int]:
        """Bytes that the thriftiest schedule takes."""
        least = Candidate(policy=OURS, workload=workload)
        least = least.with_knobs({"keep": 0, "inputs": self._model.num_hidden_layers, **ONE_BLOCK, **THRIFT[1]})
        if self._profile.nvme is not None:
            least = least.with_knobs(self._away(least))
        return peak_bytes(policies.build(OURS, self._model, workload, _ENDLESS, **dict(least.knobs)), self._profile)

    def _built(self, candidate: Candidate) -> Schedule:
        knobs = dict(candidate.knobs)
        return policies.build(candidate.policy, self._model, candidate.workload, self._budget, **knobs)


def _first(values: range, holds: Callable[[int], bool]) -> int:
    """The first of the values for which `holds`, as it then does for all after it; the one past the end if none."""
    low, high = values.start, values.stop
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

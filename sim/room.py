"""What has room on a machine: how much of a model must leave the device, or the host, before a search can begin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from schedules import policies
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.saved import saved_bytes
from schedules.schedule import Knob, Schedule
from schedules.sizes import tensor_bytes
from schedules.tensor import STATE, named
from schedules.workload import MemoryBudget, Workload
from sim.candidate import OURS, Candidate
from sim.machine import HardwareProfile
from sim.prediction import peak_bytes
from sim.units import scaled

ONE_BLOCK: dict[str, Knob] = {"slots": 1, "grad_slots": 1}  # on the device at a time
THRIFT: tuple[dict[str, Knob], ...] = (  # with host buffers; of slots those have one each whose weights are on a drive
    {},
    {"slabs": 1},
    {"slabs": 1, "nvme_slots": 1},
    {"slabs": 1, "nvme_slots": 1, "slots": 1},
)
FEWEST_ON_THE_DRIVE = THRIFT[2]  # a part more in a buffer of the host is a part more there
PARTS = (1, 2, 4, 8, 16)  # that a layer's state may pass through memory in
LEAST_PART = 1 << 26  # bytes: smaller ones gain nothing
MANY_PARTS = 640  # of all blocks together: more take longer to judge than they gain
SMALL = 200  # parts that the host would have room for: small enough to begin with


def orders(workload: Workload) -> tuple[str, ...]:
    """The orders in which the step's micro-batches may pass through the layers."""
    several = workload.accumulation > 1 and not workload.multiplies_to_update  # or gradients would come in turns
    return ("layers", "microbatches") if several else ("layers",)


def ways_to_part(model: ModelSpec, workload: Workload) -> tuple[int, ...]:
    """In how many parts a block's state may pass through memory."""
    if workload.multiplies_to_update:  # whole matrices
        return (1,)
    most = min(MANY_PARTS // model.num_hidden_layers, state_of_block(model, workload) // LEAST_PART)
    return tuple(parts for parts in PARTS if parts == 1 or parts <= most)


def state_of_block(model: ModelSpec, workload: Workload) -> int:
    """Bytes of the optimizer state of a block, the largest where they differ."""
    return tensor_bytes(named(STATE, model.layer_name(model.largest_block)), model, workload)


class Room:
    """Which candidates of our own policy fit which tier. Answers are kept: each takes a whole schedule."""

    def __init__(self, model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget) -> None:
        self._model, self._profile, self._budget = model, profile, budget
        self.limits = {tier: budget.of(tier) for tier in Tier}
        self._peaks: dict[Candidate, dict[Tier, int] | None] = {}

    def on(self, tier: Tier, candidate: Candidate) -> bool:
        """Whether a candidate has room in a tier; False too of one that cannot be built."""
        over = self._over(tier, candidate)
        return over is not None and over <= 0

    def _over(self, tier: Tier, candidate: Candidate) -> int | None:
        """How many bytes a candidate lacks in a tier, negative if it has some left; None if it cannot be built."""
        peaks = self.peaks(candidate)
        return None if peaks is None else peaks[tier] - self.limits[tier]

    def residents(self, start: Candidate) -> tuple[int, int]:
        """The fewest layers that must live on the device, for the host has no room, and the most that may."""
        counts = range(len(self._model.layers) + 1)
        least = bisect_left(counts, True, key=lambda n: self.on(Tier.HOST, _with_resident(start, n)))
        return least, self.most_residents(start)

    def most_residents(self, start: Candidate) -> int:
        """The most layers that may live on the device; -1 if even the fewest are too many."""
        counts = range(len(self._model.layers) + 1)
        return bisect_left(counts, True, key=lambda n: not self.on(Tier.DEVICE, _with_resident(start, n))) - 1

    def holds(self, start: Candidate) -> list[int]:
        """How many blocks may have their weights on the device: beside all activations, and beside none.

        None where it cannot be built, of too many ops.
        """
        peaks = self.peaks(start.with_knobs({"keep": 0}))
        if peaks is None:
            return []
        blocks, workload = self._model.num_hidden_layers, start.workload
        adding_up = start.value("order") == "microbatches"
        block = self._model.largest_block
        one = self._model.params(block) * (workload.bytes.weight + (workload.bytes.grad if adding_up else 0))
        kept = saved_bytes(self._model, block, workload) * (1 if adding_up else workload.accumulation)
        spare = self._budget.device_bytes - peaks[Tier.DEVICE]
        found = (int((spare - kept * count) // one) for count in (blocks, 0))
        return sorted({min(hold, blocks) for hold in found if hold > 0})

    def stays(self, start: Candidate) -> int:
        """How many parts of blocks' states may stay on the device, beside no activations."""
        every = self._model.num_hidden_layers * start.count("parts")
        all_there = start.with_knobs({"keep": 0, "stay": every})
        # none of them then needs the buffers through which those pass that do not stay
        if start.workload.multiplies_to_update and self.on(Tier.DEVICE, all_there):
            return every
        over = self._over(Tier.DEVICE, start.with_knobs({"keep": 0, "stay": 0}))
        parts, state = start.count("parts"), state_of_block(self._model, start.workload)
        room = 0 if over is None else max(-over, 0) * parts // state
        if room % parts:  # what is left of a block passes through two buffers
            room = max(room - 2, room // parts * parts)
        return min(room, every)

    def begin(self, start: Candidate, *, one_block: bool) -> Candidate:
        """With no more on the device and the host than have room there, as far as that can be.

        `one_block`: weights and gradients may come to the device one block at a time.
        """
        return self._off_the_host(self._off_the_device(start, one_block=one_block))

    def _off_the_device(self, start: Candidate, *, one_block: bool) -> Candidate:
        """The blocks' inputs go to the host between forward and backward, where there is no room, and what else may."""
        if not one_block and self.on(Tier.DEVICE, start.with_knobs({"keep": 0})):
            return start
        start = start.with_knobs({"inputs": self._model.num_hidden_layers})
        return start.with_knobs(ONE_BLOCK) if one_block else start

    def _off_the_host(self, start: Candidate) -> Candidate:
        """With as much on NVMe as host and device together cannot hold, unless that is not what is lacking."""
        most = self.most_residents(start)  # whatever is on the drive

        def weighed(candidate: Candidate) -> Candidate:
            return _with_resident(candidate, most)

        if self._profile.nvme is None or most < 0 or self.on(Tier.HOST, weighed(start)):
            return start
        if not self.on(Tier.HOST, weighed(start.with_knobs(self._away(start)))):
            return start
        parts = self._parts(start.workload)
        start = start.with_knobs({"parts": parts, "nvme_slots": 2 * parts})  # two blocks' worth
        inputs: dict[str, Knob] = {"nvme_inputs": start.value("inputs")}
        for there in (start, start.with_knobs(inputs)):
            for thrift in THRIFT:
                if found := self._on_the_drive(there.with_knobs(thrift), weighed):
                    return found
        return start

    def _away(self, start: Candidate) -> dict[str, Knob]:
        """All that can be on the drive, through as few buffers as can be."""
        blocks = self._model.num_hidden_layers
        parts = ways_to_part(self._model, start.workload)[-1]
        away: dict[str, Knob] = {"nvme": blocks * parts, "nvme_weights": blocks, "nvme_inputs": start.value("inputs")}
        return {**THRIFT[-1], **away, "parts": parts}

    def _parts(self, workload: Workload) -> int:
        """The fewest that are small against the host's memory."""
        ways, state = ways_to_part(self._model, workload), state_of_block(self._model, workload)
        return next((parts for parts in ways if state * SMALL <= parts * self._budget.host_bytes), ways[-1])

    def rebalanced(self, candidate: Candidate) -> Candidate:
        """The same with no more on NVMe than the host has no room for; as it is if there is nothing, or no room.

        Where state is on the host, it is activations that go on.
        """
        if candidate.value("nvme"):
            # what is kept is on the device
            return self._on_the_drive(candidate, lambda there: there.with_knobs({"keep": 0})) or candidate
        return self._sending_on(candidate) if self._profile.nvme is not None else candidate

    def within_the_drive(self, candidate: Candidate) -> Candidate:
        """With no more states and weights on NVMe than that has room for."""
        if self.on(Tier.NVME, candidate):
            return candidate
        amounts = range(1, self._all_on_the_drive(candidate) + 1)
        most = bisect_left(amounts, True, key=lambda n: not self.on(Tier.NVME, self._with_on_the_drive(candidate, n)))
        return self._with_on_the_drive(candidate, most)

    def _sending_on(self, candidate: Candidate) -> Candidate:
        """With as many blocks' activations on NVMe as the host has no room for, of those that are sent away."""
        candidate, most = candidate.with_knobs({"nvme_offload": 0}), candidate.count("offload")
        one, deep = saved_bytes(self._model, 0, candidate.workload), 0
        while deep < most:
            over = self._over(Tier.HOST, candidate.with_knobs({"keep": 0}))
            if over is None or over <= 0:
                break
            deep = min(deep - (-over // one), most)
            candidate = candidate.with_knobs({"nvme_offload": deep})
        return candidate

    def _on_the_drive(self, start: Candidate, weighed: Callable[[Candidate], Candidate]) -> Candidate | None:
        """With no more on NVMe than the host has no room for; None if all that can be is too little, or not built.

        A candidate takes as much of the host as the one that is `weighed` in its place. What one part more takes off
        the host is known, so that few schedules need be written: where it takes less, what is left is halved.
        """
        model, workload, states = self._model, start.workload, self._model.num_hidden_layers * start.count("parts")
        of_state = state_of_block(model, workload) // start.count("parts")
        of_weights = tensor_bytes(named("w", "0"), model, workload)
        most, before = self._all_on_the_drive(start), None
        at = min(start.count("nvme") + start.count("nvme_weights"), most)  # of fewer parts there are not so many
        lacks, enough = -1, most + 1  # the most that is known to be too little; the least that is known not to be
        while True:
            there = self._with_on_the_drive(start, at)
            over = self._over(Tier.HOST, weighed(there))
            if over is None:
                return None
            lacks, enough = (at, enough) if over > 0 else (lacks, at)
            last = at if over > 0 else at - 1  # the next to go there, or the first to come back
            one = of_state if last < states else of_weights
            if enough - lacks <= 1 or -one < over <= 0:
                return self._with_on_the_drive(start, enough) if enough <= most else None
            expected = min(max(at - over // -one, 0), most)
            at = expected if over != before and lacks < expected < enough else (lacks + enough) // 2
            before = over

    def _with_on_the_drive(self, start: Candidate, amount: int) -> Candidate:
        """With so many parts of states on NVMe, and if that are more than there are, of so many blocks the weights.

        State goes first, which is read and written once a step: weights are needed in both directions.
        """
        states = self._model.num_hidden_layers * start.count("parts")
        return start.with_knobs({"nvme": min(amount, states), "nvme_weights": max(amount - states, 0)})

    def _all_on_the_drive(self, start: Candidate) -> int:
        return self._model.num_hidden_layers * (start.count("parts") + 1)

    def on_the_drive(self, candidate: Candidate) -> int:
        """Bytes on NVMe, if no more is there than the host has no room for. What is kept is on the device."""
        return self._taken(self.rebalanced(candidate).with_knobs({"keep": 0}))[Tier.NVME]

    def least(self, workload: Workload) -> dict[Tier, int]:
        """Bytes that the thriftiest schedule takes, with as much on the device and the drive as these have room for."""
        filled = [full for least in self.thriftiest(workload) for full in self.filled(least)]
        least = min(filled, key=lambda full: self._lacking(self._taken(full)))
        return min(map(self._taken, (least, self.within_the_drive(least))), key=self._lacking)

    def filled(self, least: Candidate) -> list[Candidate]:
        """With as much on the device as that has room for: whole layers, then parts of states, then blocks' inputs; and
        with all of these inputs first."""
        found = []
        for start in (least, least.with_knobs({"inputs": 0})):
            full = start.with_knobs({"resident": max(self.most_residents(start), start.count("resident"))})
            full = full.with_knobs({"stay": self.stays(full)})
            found.append(self._inputs_stay(full))
        return found

    def _inputs_stay(self, candidate: Candidate) -> Candidate:
        """With no more blocks' inputs away from the device than it has no room for."""
        away = range(candidate.count("inputs"))
        fewest = bisect_left(away, True, key=lambda n: self.on(Tier.DEVICE, candidate.with_knobs({"inputs": n})))
        return candidate.with_knobs({"inputs": fewest})

    def _lacking(self, peaks: Mapping[Tier, int]) -> int:
        return sum(max(peak - self.limits[tier], 0) for tier, peak in peaks.items())

    def _taken(self, candidate: Candidate) -> dict[Tier, int]:
        peaks = self.peaks(candidate)
        assert peaks is not None, "what is thrifty can be built"
        return peaks

    def thriftiest(self, workload: Workload) -> list[Candidate]:
        """One block at a time on the device, its input on the host; on a drive, where there is one, all that can be.

        In each order: micro-batches one by one take less of the device, and may take more of the host. And with states
        and gradients whole, and in as many parts as can be, of which the host's buffers are smaller.
        """
        least = Candidate(policy=OURS, workload=workload)
        least = least.with_knobs({"keep": 0, "inputs": self._model.num_hidden_layers, **ONE_BLOCK, **THRIFT[1]})
        if self._profile.nvme is not None:
            least = least.with_knobs(self._away(least))
        parts = dict.fromkeys((least.count("parts"), ways_to_part(self._model, workload)[-1]))
        return [least.with_knobs({"order": order, "parts": count}) for count in parts for order in orders(workload)]

    def peaks(self, candidate: Candidate) -> dict[Tier, int] | None:
        """Bytes that a candidate takes; None if it cannot be built."""
        if candidate not in self._peaks:
            try:
                self._peaks[candidate] = peak_bytes(self._built(candidate), self._profile)
            except policies.PolicyError:
                self._peaks[candidate] = None
        return self._peaks[candidate]

    def nothing_fits(self, workloads: Iterable[Workload], closest: tuple[int, Tier] | None) -> str:
        """Why nothing that is searched runs on the machine in any of these ways: what is lacking for the thriftiest
        schedule, or for the closest one tried.

        `closest` is how many bytes that lacked, and where.
        """
        model, workload = self._model, min(workloads, key=lambda way: self._lacking(self.least(way)))
        # gradients come and go, a layer at a time
        state = model.total_params * (workload.bytes.per_param - workload.bytes.grad)
        have = sum(self.limits.values())
        told = [f"no schedule of {model.name} that is searched fits {self._profile.name}"]
        if state > have:
            told.append(
                f"weights and optimizer state take {scaled(state, 'GB')}, all its memory together is "
                f"{scaled(have, 'GB')}"
            )
        least = self.least(workload)
        over = {tier: peak - self.limits[tier] for tier, peak in least.items() if peak > self.limits[tier]}
        if state <= have and not over and closest is not None:
            lacking, where = closest
            told.append(f"the closest one tried lacks {_amount(where, lacking)}")
        takes = [_amount(tier, peak) for tier, peak in least.items() if peak]
        told.append(f"the thriftiest one takes {_listed(takes)}")
        if over:
            told[-1] += f", and lacks {_listed([_amount(tier, nbytes) for tier, nbytes in over.items()])}"
        return "; ".join(told)

    def might_hold(self, workload: Workload) -> bool:
        """Whether there is as much as the thriftiest schedule takes, on the device and in all tiers together, or as
        `least` tells, since what is copied nowhere may take less in all."""
        limits = self.limits
        for least in map(self._taken, self.thriftiest(workload)):
            if least[Tier.DEVICE] <= limits[Tier.DEVICE] and sum(least.values()) <= sum(limits.values()):
                return True
        return not self._lacking(self.least(workload))

    def _built(self, candidate: Candidate) -> Schedule:
        knobs = dict(candidate.knobs)
        return policies.build_without_waits(candidate.policy, self._model, candidate.workload, self._budget, **knobs)


def _with_resident(start: Candidate, count: int) -> Candidate:
    return start.with_knobs({"resident": count, "keep": 0})


def _amount(tier: Tier, nbytes: int) -> str:
    return f"{scaled(nbytes, 'GB')} of {'NVMe' if tier == Tier.NVME else f'{tier} memory'}"


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]

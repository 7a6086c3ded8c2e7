"""The schedules of a step that take least memory of one tier or another: what they take tells what trains at all."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace

from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Knob
from schedules.workload import MemoryBudget, Workload
from sim.candidate import Candidate
from sim.machine import HardwareProfile
from sim.room import Room

HUGE = 1 << 50  # bytes: more than any machine has


def frugal(
    model: ModelSpec, profile: HardwareProfile, workload: Workload, budget: MemoryBudget
) -> Iterator[dict[Tier, int]]:
    """Peak bytes of the schedules that take least of one tier or another, those that fit, of any mode of recompute."""
    for mode in reversed(model.recompute_modes):
        yield from _in_mode(model, profile, replace(workload, recompute=mode), budget)


def _in_mode(
    model: ModelSpec, profile: HardwareProfile, workload: Workload, budget: MemoryBudget
) -> Iterator[dict[Tier, int]]:
    room, blocks = Room(model, profile, budget), model.num_hidden_layers
    if not room.might_hold(workload):
        return
    nothing_away: dict[str, Knob] = dict.fromkeys(("inputs", "nvme", "nvme_weights", "nvme_inputs"), 0)
    in_host: dict[str, Knob] = {**nothing_away, "inputs": blocks}
    ways = itertools.product(room.thriftiest(workload), ({}, in_host, nothing_away))
    for start in dict.fromkeys(least.with_knobs(knobs) for least, knobs in ways):
        for held in _held(room, start):
            for balance in (room.rebalanced, room.within_the_drive):  # less on the drive, less in the host
                peaks = room.peaks(balance(held))
                if peaks is None or any(peaks[tier] > budget.of(tier) for tier in Tier):
                    break
                yield peaks


def _held(room: Room, start: Candidate) -> Iterator[Candidate]:
    """With as much on the device as that has room for, and with no more layers there than must be, for the host and the
    drive have no room.
    """
    most = room.most_residents(start)

    def holding(count: int) -> Candidate:
        return start.with_knobs({"resident": count})

    def enough(count: int) -> bool:
        rest = room.rebalanced(holding(count))
        return room.on(Tier.HOST, rest) and room.on(Tier.NVME, rest)

    if most >= 0:
        yield holding(most)
    yield from room.filled(start)
    if most >= 0 and enough(most):
        yield holding(0 if enough(0) else bisect_left(range(most), True, key=enough))


def least_together(
    model: ModelSpec, profile: HardwareProfile, workload: Workload, budget: MemoryBudget
) -> Mapping[Tier, int] | None:
    """Peak bytes of the schedule that takes least of device and host together, whatever these have.

    The drive has what the budget says. None where there is none.
    """
    endless = replace(budget, device_bytes=HUGE, host_bytes=HUGE, unified_bytes=None)
    found = frugal(model, profile, workload, endless)
    return min(found, key=lambda peaks: peaks[Tier.DEVICE] + peaks[Tier.HOST], default=None)

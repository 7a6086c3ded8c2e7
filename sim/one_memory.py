"""A memory that device and host share: how much of it a search takes to be which one's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim.frugal import least_together
from sim.machine import HardwareProfile

# The host's share. What is resident needs little of it, states that the CPU updates while the GPU computes need much.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)


def partitions(budget: MemoryBudget, first: Iterable[Schedule] = ()) -> tuple[MemoryBudget, ...]:
    """The same memory with a size for each tier, which add up to it; as it is where the tiers have their own.

    The host has what each schedule of `first` takes of it, or a share of SHARES.
    """
    both = budget.unified_bytes
    if both is None:
        return (budget,)
    wanted = [schedule.allocated_bytes(Tier.HOST) for schedule in first] + [int(both * share) for share in SHARES]
    hosts = dict.fromkeys(min(host, both, budget.host_bytes) for host in wanted)
    return tuple(replace(budget, host_bytes=host, device_bytes=min(both - host, budget.device_bytes)) for host in hosts)


def partition_of_least(
    model: ModelSpec, profile: HardwareProfile, steps: Sequence[Workload], budget: MemoryBudget
) -> MemoryBudget:
    """The partition of one memory in which the thriftiest way to run a step has room; as it is if there is no way."""
    both = budget.device_and_host_bytes
    found = [peaks for step in steps if (peaks := least_together(model, profile, step, budget))]
    if not found:
        return budget
    host = min(min(found, key=lambda peaks: peaks[Tier.DEVICE] + peaks[Tier.HOST])[Tier.HOST], both, budget.host_bytes)
    return replace(budget, host_bytes=host, device_bytes=min(both - host, budget.device_bytes))

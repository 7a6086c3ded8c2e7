"""A memory that device and host share: how much of it a search takes to be which one's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget

# The host's share. What is resident needs little of it, states that the CPU updates while the GPU computes need much.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)


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

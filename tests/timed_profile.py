"""A measured profile without a measurement, for tests of what is done where one lacks times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schedules import policies
from schedules.model import ModelSpec
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import Terms, demands
from sim.machine import HardwareProfile, Measured, Table
from sim.signature import timed as timed_ops


def timed(
    model: ModelSpec, workloads: Sequence[Workload], machine: str = "h200", names: Sequence[str] = ()
) -> HardwareProfile:
    """As if the ops that policies (all if left out) have in these steps had been timed on a machine of a datasheet."""
    datasheet = hardware.load(machine)
    room = MemoryBudget(device_bytes=1 << 50, host_bytes=1 << 50)
    times: dict[str, int] = {}
    for workload in workloads:
        for name in names or policies.comparable():
            schedule = policies.build(name, model, workload, room)
            costs = demands(schedule, datasheet, Terms(issue=False))
            times |= {key: costs[place].duration_ns for place, key in timed_ops(schedule).items()}
    table = Table(values=times, unit="ns", source="made up")
    return replace(datasheet, name="made up", mode="measured", measured=Measured(op_times=table))

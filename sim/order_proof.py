"""A proof of how much another order of the same ops could gain: constraint programming, for small schedules.

The schedule's buffers and its order within each stream are set aside. What stays is what every order must keep: an op
of a stream at a time, a read after the write it reads, and each op's duration alone. The shortest step under these is
a lower bound of every schedule with these ops, whatever its order and however many slots it has; CP-SAT finds it, or
how near it came. Weights that an op reads and that are updated in the same step are those of the step before.

CP-SAT proves well and constructs badly: it is given the schedule's own times to begin with.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schedules.errors import InputError
from schedules.op import Stream
from schedules.schedule import Schedule
from sim.cost import Terms, demands
from sim.engine import play
from sim.hardware import HardwareProfile

ALONE = Terms(issue=False, sharing=False, compute_slowdown=False)
MOST_OPS = 400  # beyond this nothing is proven in reasonable time


@dataclass(frozen=True, kw_only=True)
class OrderProof:
    """One step of the schedule, from its first start to its last end, and the least that any order needs; ns.

    Both with every op as fast as alone. `optimal` says that `bound_ns` is attained by some order; else the search
    ended before it knew.
    """

    step_ns: int
    bound_ns: int
    optimal: bool

    @property
    def gain(self) -> float:
        """By what fraction of its length the step could be shorter at most."""
        return 1.0 - self.bound_ns / self.step_ns if self.step_ns else 0.0


def prove(schedule: Schedule, profile: HardwareProfile, *, seconds: float = 10.0) -> OrderProof:
    """Search for the shortest step of these ops in any order, for so many seconds.

    Raises:
        InputError: OR-tools is not installed, or the schedule has too many ops.
        MissingCost: a measured profile lacks a time.
    """
    if len(schedule.ops) > MOST_OPS:
        raise InputError(
            f"{schedule.label} has {len(schedule.ops)} ops; an order is proven up to {MOST_OPS}: take fewer layers"
        )
    try:
        cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise InputError("a proof of order takes OR-tools: pip install 'megatrain[prove]'") from None
    costs = demands(schedule, profile, ALONE)
    trace = play(schedule, costs, steps=1, sharing=False)
    horizon = int(trace.end_ns.max())
    model = cp_model.CpModel()
    starts, intervals = [], []
    for op, cost, at in zip(schedule.ops, costs, trace.start_ns, strict=True):
        start = model.new_int_var(0, horizon, op.name)
        model.add_hint(start, int(at))
        starts.append(start)
        intervals.append(model.new_fixed_size_interval_var(start, cost.duration_ns, op.name))
    for stream in schedule.streams:
        model.add_no_overlap([intervals[i] for i, op in enumerate(schedule.ops) if op.stream == stream])
    for before, after in needed(schedule):
        model.add(starts[after] >= starts[before] + costs[before].duration_ns)
    length = model.new_int_var(0, horizon, "step")
    for start, cost in zip(starts, costs, strict=True):
        model.add(length >= start + cost.duration_ns)
    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    return OrderProof(
        step_ns=horizon,
        bound_ns=min(int(solver.best_objective_bound), horizon),
        optimal=status == cp_model.OPTIMAL,
    )


def needed(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """(op, a later op that reads what it wrote): what no order may turn around."""
    written: dict[tuple[str, str], int] = {}  # (buffer, tensor) -> the op that wrote it last
    for index, op in enumerate(schedule.ops):
        before = {written[key] for access in op.reads if (key := (access.buffer, access.tensor)) in written}
        # the host stands still while it works or waits: what it issues later comes later
        if index and (last := schedule.ops[index - 1]) and (last.blocking or last.stream == Stream.HOST):
            before.add(index - 1)
        yield from ((other, index) for other in sorted(before))
        for access in op.writes:
            written[access.buffer, access.tensor] = index

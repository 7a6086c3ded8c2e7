"""A proof of the order of ops: no other order of the same ops settles faster, or by how much one might.

The question is a periodic scheduling problem, put to CP-SAT at one period after another: op i starts at
stage * period + offset, streams run one op at a time, and so does the issuing host. Kept are the ops, what each
does to which value, and how many buffers there are of each size. Free are the order on every stream, the order
of issuing, how far ahead of its step an op runs, and which buffer of a size a value gets. What is left out only
helps: ops that slow each other down, and streams running their ops in the order in which they were issued.

A larger period is never harder: fixed orders are circles that take some time and span some steps, those of
buffers too (the n-th taking follows the (n - count)-th giving back). So what is impossible at one period is
impossible at all shorter ones. Time is counted in coarse units first and in finer ones as far as time allows;
durations are rounded down to them, so that a bound found with any unit is one.
"""

from __future__ import annotations

import importlib
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from schedules.errors import InputError
from schedules.hazards import Accesses, unrolled
from schedules.op import Stream, Tier
from schedules.schedule import Schedule
from sim.bound import largest_cycle_ratio
from sim.cost import Demand, demands
from sim.longest_path import evaluate
from sim.machine import HardwareProfile

UNITS = 128, 1024  # per period of the schedule's own order
MOST_OPS = 400  # beyond this nothing is proven in reasonable time
PATIENCE = 4  # one question gets this part of the time that is left


@dataclass(frozen=True, kw_only=True)
class OrderProof:
    """What is known about the order of a schedule's ops, sharing left out.

    `period_ns` is where the schedule's own order settles; no order settles at less than `bound_ns`. `finished`
    says that the search, in its finest unit of time, left no question open for lack of time.
    """

    period_ns: Fraction
    bound_ns: Fraction
    finished: bool

    @property
    def gain(self) -> float:
        """By what fraction of its length the step could be shorter at most."""
        return 1.0 - float(self.bound_ns / self.period_ns) if self.period_ns else 0.0


def prove(schedule: Schedule, profile: HardwareProfile, *, seconds: float = 10.0) -> OrderProof:
    """Bound the period of every order of these ops on a machine, for about so many seconds.

    Raises:
        InputError: OR-tools is not installed, or the schedule has too many ops.
        MissingCost: a measured profile lacks a time.
        Stuck: the schedule waits for itself.
    """
    if len(schedule.ops) > MOST_OPS:
        raise InputError(
            f"{schedule.label} has {len(schedule.ops)} ops; an order is proven up to {MOST_OPS}: take fewer layers"
        )
    return prove_order(schedule, demands(schedule, profile), seconds=seconds)


def prove_order(schedule: Schedule, costs: Sequence[Demand], *, seconds: float) -> OrderProof:
    """As `prove`, of ops that have the given demands, one per op in program order."""
    known = solver()
    until = time.monotonic() + seconds
    own, _ = largest_cycle_ratio(schedule, [ns for cost in costs for ns in (cost.issue_ns, cost.duration_ns)])
    bound = min(Fraction(Question.of(schedule, costs).busiest), own)
    finished = True
    for unit in dict.fromkeys(max(math.ceil(own / units), 1) for units in UNITS):
        question = Question.of(schedule, costs, unit)
        # periods in units: all below `low` are impossible, `high` is not known to be
        low, high = math.ceil(bound / unit), math.ceil(own / unit)
        finished = True
        while low < high and (left := until - time.monotonic()) > 0:
            period = (low + high) // 2
            possible = _possible(known, question, period, left / PATIENCE)
            finished = finished and possible is not None
            low, high = (period + 1, high) if possible is False else (low, period)
        finished = finished and low == high
        # an order's ratio may lie between whole periods: it exceeds the last one that is impossible
        bound = max(bound, Fraction((low - 1) * unit))
    return OrderProof(period_ns=own, bound_ns=bound, finished=finished)


def solver() -> Any:
    """The module of the constraint solver.

    Raises:
        InputError: OR-tools is not installed.
    """
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise InputError("a proof of order takes OR-tools: pip install 'megatrain[prove]'") from None


@dataclass(frozen=True, kw_only=True)
class Use:
    """A value's time in a buffer: from the start of op `first` to the end of all (op, steps later)."""

    first: int
    until: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What every order keeps, in units of time.

    `after` are (op, then op, steps between): the second starts when the first, so many steps before, has ended.
    `uses` are by tier and bytes of the buffer, `buffers` how many of these there are.
    """

    durations: tuple[int, ...]
    issue: tuple[int, ...]
    streams: tuple[tuple[int, ...], ...]  # the host's left out
    held: frozenset[int]  # ops during which the host issues nothing
    after: tuple[tuple[int, int, int], ...]
    uses: dict[tuple[Tier, int], list[Use]]
    buffers: dict[tuple[Tier, int], int]
    starts: tuple[int, ...]  # of the schedule's own order, once it has settled

    @classmethod
    def of(cls, schedule: Schedule, costs: Sequence[Demand], unit: int = 1) -> Question:
        """Durations are rounded down to whole units of so many ns."""
        durations = tuple(cost.duration_ns // unit for cost in costs)
        issue = tuple(cost.issue_ns // unit for cost in costs)
        uses = _uses(schedule)
        pools: dict[tuple[Tier, int], list[Use]] = defaultdict(list)
        buffers: dict[tuple[Tier, int], int] = defaultdict(int)
        for name, of_buffer in uses.items():
            kind = (schedule.buffer[name].tier, schedule.buffer[name].nbytes)
            pools[kind] += of_buffer
            buffers[kind] += 1
        start, _ = evaluate(schedule, np.array([durations]), np.array([issue]), 6)
        return cls(
            durations=durations,
            issue=issue,
            streams=tuple(
                tuple(schedule.index[op.name] for op in ops)
                for stream, ops in schedule.streams.items()
                if stream != Stream.HOST
            ),
            held=frozenset(i for i, op in enumerate(schedule.ops) if op.blocking or op.stream == Stream.HOST),
            after=_after(schedule),
            uses=dict(pools),
            buffers=dict(buffers),
            starts=tuple(int(ns) for ns in start[0, -1] - start[0, -1].min()),
        )

    @property
    def busiest(self) -> int:
        """What the busiest stream, or the host, takes for one step."""
        host = sum(self.issue) + sum(self.durations[i] for i in self.held)
        return max([host, *(sum(self.durations[i] for i in stream) for stream in self.streams)])


def _after(schedule: Schedule) -> tuple[tuple[int, int, int], ...]:
    """Which ops read or change the value that another wrote or read: true whatever buffer it is in."""
    accesses = Accesses()
    found: set[tuple[int, int, int]] = set()
    for instance, op in unrolled(schedule.ops, 2):
        for hazard in accesses.hazards(op):
            if instance.step == 1 and op.reads_from(hazard.buffer):
                found.add((hazard.first.place, instance.place, 1 - hazard.first.step))
        accesses.record(op, instance)
    return tuple(sorted(found))


def _uses(schedule: Schedule) -> dict[str, list[Use]]:
    """The values that a buffer takes in during one step, for buffers that are ever filled anew."""
    found: dict[str, list[Use]] = defaultdict(list)
    now: dict[str, tuple[int, list[tuple[int, int]]]] = {}  # buffer -> the op that filled it in step 1, its users
    for instance, op in unrolled(schedule.ops, 3):
        for buffer in {access.buffer for access in op.accesses}:
            if not op.reads_from(buffer):
                if buffer in now:
                    first, until = now.pop(buffer)
                    found[buffer].append(Use(first=first, until=tuple(until)))
                if instance.step == 1:
                    now[buffer] = (instance.place, [])
            if buffer in now:
                now[buffer][1].append((instance.place, instance.step - 1))
    return found


def _possible(cp: Any, question: Question, period: int, seconds: float) -> bool | None:
    """Whether some order has this period; None if that was not found out in time."""
    if period < max(question.busiest, 1):
        return False
    model = cp.CpModel()
    ops = range(len(question.durations))
    stages = 4 * len(ops)  # each op and its issue follow another by two periods at most, or need not wait

    def moment(name: str, at: int) -> tuple[Any, Any]:
        """An offset in the period, and the moment with its stage; `at` is where to look first."""
        offset = model.new_int_var(0, period - 1, f"{name} offset")
        stage = model.new_int_var(0, stages, f"{name} stage")
        model.add_hint(offset, at % period)
        model.add_hint(stage, min(at // period, stages))
        return offset, offset + period * stage

    def twice(offset: Any, size: Any, name: str) -> list[Any]:
        """What lasts beyond the period's end meets what starts in the next one."""
        end = model.new_int_var(0, 2 * period, f"{name} end")
        model.add(end == offset + size)
        return [model.new_interval_var(offset + shift, size, end + shift, name) for shift in (0, period)]

    started = [moment(f"op {i}", question.starts[i]) for i in ops]
    longest = max(ops, key=lambda i: question.durations[i])
    model.add(started[longest][0] == 0)  # where a period begins is free to choose
    for first, then, steps in question.after:
        model.add(started[then][1] + steps * period >= started[first][1] + question.durations[first])
    for stream in question.streams:
        model.add_no_overlap([t for i in stream for t in twice(started[i][0], question.durations[i], f"op {i}")])
    busy = []
    for i in ops:
        if not question.issue[i] and i not in question.held:
            continue
        offset, issued = moment(f"issue {i}", question.starts[i] - question.issue[i])
        size: Any = question.issue[i]
        if i in question.held:
            size = model.new_int_var(0, period, f"host {i}")
            model.add(issued + size == started[i][1] + question.durations[i])
        model.add(started[i][1] >= issued + question.issue[i])
        busy += twice(offset, size, f"host {i}")
    model.add_no_overlap(busy)
    for kind, uses in question.uses.items():
        _share(model, question, kind, uses, started, period, twice)
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    assert not (told := model.validate()), told
    return {cp.OPTIMAL: True, cp.FEASIBLE: True, cp.INFEASIBLE: False}.get(solver.solve(model))


def _share(
    model: Any,
    question: Question,
    kind: tuple[Tier, int],
    uses: list[Use],
    started: list[tuple[Any, Any]],
    period: int,
    twice: Any,
) -> None:
    """No more values at once than buffers of their size: each takes some for whole periods, and one for the rest."""
    count = question.buffers[kind]
    intervals, whole = [], []
    for number, use in enumerate(uses):
        name = f"use {number} of {kind}"
        rest = model.new_int_var(0, period, f"{name} rest")
        periods = model.new_int_var(0, count, f"{name} periods")
        offset, start = started[use.first]
        for op, steps in use.until:
            end = started[op][1] + steps * period + question.durations[op]
            model.add(end - start <= periods * period + rest)
        intervals += twice(offset, rest, name)
        whole.append(periods)
    room = model.new_int_var(0, count, f"{kind} for the rest")
    model.add(room + sum(whole) == count)
    model.add_cumulative(intervals, [1] * len(intervals), room)

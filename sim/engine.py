"""Plays a schedule in time: the issuing host, one process per stream, and what ops share while they run.

Time is integer nanoseconds. An op that nothing slows down ends exactly its duration after its start; one that is slowed
down ends at the first whole nanosecond at which its work is done.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import simpy

from schedules.errors import Refused
from schedules.op import Stream
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Ints, Trace
from sim.cost import D2H, GPU, H2D, Demand, Terms, demands
from sim.machine import HardwareProfile
from sim.sharing import speeds

_Steps = Generator[simpy.Event, Any, None]

FULL = 1 << 50  # full speed: units of work that an op which runs as if alone does in a nanosecond


class Stuck(Refused):
    """The schedule waits for itself; the message is the chain of waits, op by op."""


def simulate(
    schedule: Schedule,
    profile: HardwareProfile,
    *,
    steps: int = 4,
    terms: Terms = Terms(),
    seed: int | None = None,
) -> Trace:
    """The predicted trace of `steps` consecutive steps on a machine.

    `seed` makes noise repeatable; without noise it has no effect.

    Raises:
        MissingCost: the profile is a measured one and lacks an op's time.
        Stuck: some op would never run.
    """
    costs = demands(schedule, profile, terms)
    durations = np.tile(np.array([cost.duration_ns for cost in costs], dtype=np.int64), (steps, 1))
    if terms.noise:
        factors = np.random.default_rng(seed).lognormal(0.0, terms.noise, durations.shape)
        durations = np.rint(durations * factors).astype(np.int64)
    return play(
        schedule,
        costs,
        steps=steps,
        durations=durations,
        sharing=terms.sharing,
        slowdown=profile.gpu.copy_slowdown.value if terms.compute_slowdown else 0.0,
        machine=profile.name,
    )


def play(
    schedule: Schedule,
    costs: Sequence[Demand],
    *,
    steps: int,
    durations: Ints | None = None,
    sharing: bool = True,
    slowdown: float = 0.0,
    machine: str = "none",
) -> Trace:
    """The trace of a schedule whose ops have the given demands.

    Args:
        costs: one per op, in program order.
        durations: ns running alone, shape (steps, ops); the demands' own, every step, if left out.
        sharing: whether ops that run together share resources.
        slowdown: the share by which GPU work takes longer while a copy over the link runs.

    Raises:
        Stuck: some op would never run.
    """
    if durations is None:
        durations = np.tile(np.array([cost.duration_ns for cost in costs], dtype=np.int64), (steps, 1))
    usages = [cost.usage if sharing else _only_kind(cost.usage) for cost in costs]
    run = _Run(schedule, costs, durations.ravel().tolist(), steps, usages, slowdown)
    issue, start, end = run.finish()
    count = len(schedule.ops)
    rows = np.arange(steps * count, dtype=np.int64)
    return Trace(
        digest=schedule.digest,
        machine=machine,
        source="predicted",
        op=rows % count,
        step=rows // count,
        issue_ns=np.array(issue, dtype=np.int64),
        start_ns=np.array(start, dtype=np.int64),
        end_ns=np.array(end, dtype=np.int64),
        waited_on=np.array(run.released_by(), dtype=np.int64),
    )


def _only_kind(usage: Mapping[str, float]) -> Mapping[str, float]:
    """Where nothing is shared, only which ops are GPU work and which are link copies: the slowdown needs to know."""
    return {resource: 0.0 for resource in usage if resource in (GPU, H2D, D2H)}


@dataclass(slots=True, eq=False)
class _Task:
    """An op at work: `left` of its work at moment `since`, going at `speed` (both in units of FULL)."""

    usage: int  # the number of its kind of usage
    left: int
    since: int
    done: simpy.Event
    speed: int = 0
    timer: simpy.Event | None = None


class _Machine:
    """The ops at work, each as fast as the others let it be.

    When an op starts or finishes, all speeds are found anew, after whatever else happens at that instant. Work is
    counted in integers, so that a change of speed neither loses nor gains a nanosecond.
    """

    def __init__(self, env: simpy.Environment, usages: Sequence[Mapping[str, float]], slowdown: float) -> None:
        self._env = env
        kinds = [tuple(sorted(usage.items())) for usage in usages]
        self._kinds = list(dict.fromkeys(kinds))  # few, since ops of one sort use the same shares
        number = {kind: i for i, kind in enumerate(self._kinds)}
        self._kind_of = [number[kind] for kind in kinds]
        self._slowdown = slowdown
        self._alone = slowdown == 0.0 and not any(any(usage.values()) for usage in usages)
        self._tasks: list[_Task] = []
        self._speeds: dict[tuple[int, ...], list[int]] = {}
        self._changed = False

    def run(self, op: int, duration: int) -> simpy.Event:
        """Put op number `op` to work; the event is its end."""
        if self._alone or duration == 0:
            return self._env.timeout(duration)
        task = _Task(self._kind_of[op], duration * FULL, int(self._env.now), self._env.event())
        self._tasks.append(task)
        self._change()
        return task.done

    def _change(self) -> None:
        if not self._changed:
            self._changed = True
            self._env.timeout(0).callbacks.append(self._set_speeds)

    def _set_speeds(self, _: simpy.Event) -> None:
        self._changed = False
        now = int(self._env.now)
        self._tasks.sort(key=lambda task: task.usage)
        for task, speed in zip(self._tasks, self._speeds_of_tasks(), strict=True):
            if speed == task.speed:
                continue
            task.left -= (now - task.since) * task.speed
            task.since, task.speed = now, speed
            task.timer = self._env.timeout(max(0, -(-task.left // speed)))
            task.timer.callbacks.append(partial(self._end, task))

    def _end(self, task: _Task, timer: simpy.Event) -> None:
        if task.timer is timer:  # not one set before a change of speed
            self._tasks.remove(task)
            task.done.succeed()
            self._change()

    def _speeds_of_tasks(self) -> list[int]:
        key = tuple(task.usage for task in self._tasks)
        if key not in self._speeds:
            usages = [dict(self._kinds[kind]) for kind in key]
            shared = speeds(usages)
            if any(H2D in usage or D2H in usage for usage in usages):
                factor = 1.0 + self._slowdown
                shared = [
                    speed / factor if GPU in usage else speed for speed, usage in zip(shared, usages, strict=True)
                ]
            # A speed such as 1/3 has no exact binary form. Rounded up by one part in 2^50, work that ends on
            # a whole nanosecond is still found to end there.
            self._speeds[key] = [FULL if speed == 1.0 else int(speed * FULL) + 1 for speed in shared]
        return self._speeds[key]


class _Run:
    """One run: rows are op instances in issue order, row = step * ops + position in program order."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[Demand],
        durations: list[int],
        steps: int,
        usages: Sequence[Mapping[str, float]],
        slowdown: float,
    ) -> None:
        self._ops = schedule.ops
        self._issue_cost = [cost.issue_ns for cost in costs]
        self._wake = [
            0 if op.stream == Stream.HOST else cost.wake_ns for op, cost in zip(schedule.ops, costs, strict=True)
        ]
        self._durations = durations
        self._env = simpy.Environment(initial_time=0)
        self._machine = _Machine(self._env, usages, slowdown)
        self._waits = schedule.waits_at
        count = len(schedule.ops)
        rows = steps * count
        self._issued = [self._env.event() for _ in range(rows)]
        self._done = [self._env.event() for _ in range(rows)]
        self.issue_ns, self.start_ns, self.end_ns = [0] * rows, [0] * rows, [0] * rows
        self._at = 0  # the row at which the host stands
        self._before_on_stream: list[int | None] = [None] * rows
        self._env.process(self._host())
        for stream, ops in schedule.streams.items():
            positions = [schedule.index[op.name] for op in ops]
            of_stream = [step * count + i for step in range(steps) for i in positions]
            for first, second in pairwise(of_stream):
                self._before_on_stream[second] = first
            if stream != Stream.HOST:
                self._env.process(self._stream(of_stream))

    def finish(self) -> tuple[list[int], list[int], list[int]]:
        """Run to the end; (issue, start, end) of every row. Raises Stuck if some row never ran."""
        self._env.run()
        if not all(done.triggered for done in self._done):
            raise Stuck(self._chain())
        return self.issue_ns, self.start_ns, self.end_ns

    def _host(self) -> _Steps:
        """Issue everything in program order; wait where an op is blocking, work where it is the host's."""
        for row in range(len(self._done)):
            self._at = row
            op = self._ops[row % len(self._ops)]
            if cost := self._issue_cost[row % len(self._ops)]:
                yield self._env.timeout(cost)
            self.issue_ns[row] = int(self._env.now)
            self._issued[row].succeed()
            if op.stream == Stream.HOST:
                yield from self._execute(row)
            elif op.blocking:
                yield self._done[row]

    def _stream(self, rows: Sequence[int]) -> _Steps:
        for row in rows:
            yield self._issued[row]
            yield from self._execute(row)

    def _execute(self, row: int) -> _Steps:
        released = self.issue_ns[row]
        for before in self._waits_of(row):
            yield self._done[before]
            if self._elsewhere(before, row):
                released = max(released, self.end_ns[before])
        noticed = released + self._wake[row % len(self._ops)]
        if noticed > self._env.now:
            yield self._env.timeout(noticed - self._env.now)
        self.start_ns[row] = int(self._env.now)
        yield self._machine.run(row % len(self._ops), self._durations[row])
        self.end_ns[row] = int(self._env.now)
        self._done[row].succeed()

    def _waits_of(self, row: int) -> list[int]:
        """The rows that `row` waits for; none of a step before step 0."""
        step, op = divmod(row, len(self._ops))
        return [(step - distance) * len(self._ops) + on for on, distance in self._waits[op] if distance <= step]

    def _elsewhere(self, before: int, row: int) -> bool:
        """Whether `row` runs on another stream than `before`, and so has to notice its end."""
        return self._ops[before % len(self._ops)].stream != self._ops[row % len(self._ops)].stream

    def released_by(self) -> list[int]:
        """Per row, the row whose end let it start (of several, the one issued last), or ISSUE."""
        found = [ISSUE] * len(self._done)
        for row, start in enumerate(self.start_ns):
            wake = self._wake[row % len(self._ops)]
            if start > self.issue_ns[row] + wake:
                found[row] = max(b for b, lag in self._before(row, wake) if self.end_ns[b] + lag == start)
        return found

    def _before(self, row: int, wake: int) -> list[tuple[int, int]]:
        """The rows that `row` must follow, each with how long after its end `row`'s stream notices that."""
        stream = self._before_on_stream[row]
        others = [(b, wake) for b in self._waits_of(row) if self._elsewhere(b, row)]
        return others + ([] if stream is None else [(stream, 0)])

    # ---- when nothing moves any more

    def _chain(self) -> str:
        """From the first op that never ran, what it waits for, what that waits for, until it repeats."""
        row = next(row for row, done in enumerate(self._done) if not done.triggered)
        seen: list[int] = []
        links: list[str] = []
        while row not in seen:
            seen.append(row)
            why, row = self._obstacle(row)
            links.append(f"{self._name(seen[-1])} {why} {self._name(row)}")
        return "nothing can move any more:\n  " + "\n  ".join(links)

    def _obstacle(self, row: int) -> tuple[str, int]:
        if not self._issued[row].triggered:
            return "is not issued while the host waits for", self._at
        stream = self._before_on_stream[row]
        if stream is not None and not self._done[stream].triggered:
            return f"stands on {self._ops[row % len(self._ops)].stream} behind", stream
        return "waits for", next(b for b in self._waits_of(row) if not self._done[b].triggered)

    def _name(self, row: int) -> str:
        step, op = divmod(row, len(self._ops))
        return f"{self._ops[op].name} (step {step})"

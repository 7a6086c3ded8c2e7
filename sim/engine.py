"""Plays a schedule in time: the issuing host, one process per stream, and what ops share while they run.

Time is integer nanoseconds. An op that nothing slows down ends exactly its duration after its start; one that is slowed
down ends at the first whole nanosecond at which its work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    costs: Sequence[Demand] | None = None,
) -> Trace:
    """The predicted trace of `steps` consecutive steps on a machine.

    `seed` makes noise repeatable; without noise it has no effect. `costs` are the schedule's `demands`, where they are
    known already.

    Raises:
        MissingCost: the profile is a measured one and lacks an op's time.
        Stuck: some op would never run.
    """
    costs = demands(schedule, profile, terms) if costs is None else costs
    durations = None
    if terms.noise:
        factors = np.random.default_rng(seed).lognormal(0.0, terms.noise, (steps, len(costs)))
        durations = np.rint(factors * [cost.duration_ns for cost in costs]).astype(np.int64)
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
        waited_on=run.released_by(),
    )


def _only_kind(usage: Mapping[str, float]) -> Mapping[str, float]:
    """Where nothing is shared, only which ops are GPU work and which are link copies: the slowdown needs to know."""
    return {resource: 0.0 for resource in usage if resource in (GPU, H2D, D2H)}


@dataclass(slots=True, eq=False)
class _Task:
    """An op at work: `left` of its work at moment `since`, going at `speed` (both in units of FULL)."""

    row: int
    usage: int  # the number of its kind of usage
    left: int
    since: int
    speed: int = 0
    timer: simpy.Event | None = None


class _Machine:
    """The ops at work, each as fast as the others let it be.

    When an op starts or finishes, all speeds are found anew, after whatever else happens at that instant. Work is
    counted in integers, so that a change of speed neither loses nor gains a nanosecond. `ended(row)` is called when
    what a row put to work is done.
    """

    def __init__(
        self,
        env: simpy.Environment,
        usages: Sequence[Mapping[str, float]],
        slowdown: float,
        ended: Callable[[int], None],
    ) -> None:
        self._env, self._ended = env, ended
        kinds = [tuple(sorted(usage.items())) for usage in usages]
        self._kinds = list(dict.fromkeys(kinds))  # few, since ops of one sort use the same shares
        number = {kind: i for i, kind in enumerate(self._kinds)}
        self._kind_of = [number[kind] for kind in kinds]
        self._slowdown = slowdown
        self._alone = slowdown == 0.0 and not any(any(usage.values()) for usage in usages)
        self._tasks: list[_Task] = []
        self._speeds: dict[tuple[int, ...], list[int]] = {}
        self._changed = False

    def run(self, row: int, op: int, duration: int) -> None:
        """Put op number `op` to work for `row`."""
        if self._alone or duration == 0:
            self._env.timeout(duration).callbacks.append(lambda _: self._ended(row))
            return
        self._tasks.append(_Task(row, self._kind_of[op], duration * FULL, int(self._env.now)))
        self._change()

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
            task.timer = self._env.timeout(-(-task.left // speed))
            task.timer.callbacks.append(partial(self._end, task))

    def _end(self, task: _Task, timer: simpy.Event) -> None:
        if task.timer is timer:  # not one set before a change of speed
            self._tasks.remove(task)
            self._ended(task.row)
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
        self._ops = ops = schedule.ops
        self._steps, self._count, self._rows = steps, len(ops), steps * len(ops)
        self._issue_cost = [cost.issue_ns for cost in costs]
        self._wake = [0 if op.stream == Stream.HOST else cost.wake_ns for op, cost in zip(ops, costs, strict=True)]
        self._durations = durations
        self._env = simpy.Environment(initial_time=0)
        self._machine = _Machine(self._env, usages, slowdown, self._end)
        # per op, how far before it the rows are that it waits for, and whether they run on another stream than it does,
        # so that it has to notice their end
        self._waits = [
            [(i - on + distance * self._count, ops[on].stream != op.stream) for on, distance in waits]
            for i, (op, waits) in enumerate(zip(ops, schedule.waits_at, strict=True))
        ]
        self._before_on_stream = [0] * self._count  # per op, how far before it the row is that its stream runs before
        self._issued = 0  # how many rows are
        self._expected: dict[int, simpy.Event] = {}  # rows that their streams are ready for before they are issued
        self._done = [self._env.event() for _ in range(self._rows)]
        self.issue_ns, self.start_ns, self.end_ns = [0] * self._rows, [0] * self._rows, [0] * self._rows
        self._at = 0  # the row at which the host stands
        self._env.process(self._host())
        for stream, of_stream in schedule.streams.items():
            positions = [schedule.index[op.name] for op in of_stream]
            for before, i in zip([positions[-1] - self._count, *positions], positions, strict=False):
                self._before_on_stream[i] = i - before
            if stream != Stream.HOST:
                self._env.process(self._stream([step * self._count + i for step in range(steps) for i in positions]))

    def finish(self) -> tuple[list[int], list[int], list[int]]:
        """Run to the end; (issue, start, end) of every row. Raises Stuck if some row never ran."""
        self._env.run()
        if not all(done.triggered for done in self._done):
            raise Stuck(self._chain())
        return self.issue_ns, self.start_ns, self.end_ns

    def _host(self) -> _Steps:
        """Issue everything in program order; wait where an op is blocking, work where it is the host's."""
        for row in range(self._rows):
            self._at = row
            op = self._ops[row % self._count]
            if cost := self._issue_cost[row % self._count]:
                yield self._env.timeout(cost)
            self.issue_ns[row] = int(self._env.now)
            self._issued = row + 1
            if (expected := self._expected.pop(row, None)) is not None:
                expected.succeed()
            if op.stream == Stream.HOST:
                yield from self._execute(row)
            elif op.blocking:
                yield self._done[row]

    def _stream(self, rows: Sequence[int]) -> _Steps:
        for row in rows:
            if row >= self._issued:
                self._expected[row] = self._env.event()
                yield self._expected[row]
            yield from self._execute(row)

    def _execute(self, row: int) -> _Steps:
        op = row % self._count
        released = self.issue_ns[row]
        for ago, elsewhere in self._waits[op]:
            if ago <= row:
                yield self._done[row - ago]
                if elsewhere:
                    released = max(released, self.end_ns[row - ago])
        noticed = released + self._wake[op]
        if noticed > self._env.now:
            yield self._env.timeout(noticed - self._env.now)
        self.start_ns[row] = int(self._env.now)
        self._machine.run(row, op, self._durations[row])
        yield self._done[row]

    def _end(self, row: int) -> None:
        self.end_ns[row] = int(self._env.now)
        self._done[row].succeed()

    def released_by(self) -> Ints:
        """Per row, the row whose end let it start (of several, the one issued last), or ISSUE."""
        others = [
            (i, ago, self._wake[i]) for i, waits in enumerate(self._waits) for ago, elsewhere in waits if elsewhere
        ]
        same = [(i, ago, 0) for i, ago in enumerate(self._before_on_stream)]
        op, ago, lag = np.array([*others, *same], dtype=np.int64).reshape(-1, 3).T
        issue, start, end = (np.array(times, dtype=np.int64) for times in (self.issue_ns, self.start_ns, self.end_ns))
        row = np.repeat(np.arange(self._steps) * self._count, len(op)) + np.tile(op, self._steps)
        before = row - np.tile(ago, self._steps)
        waited = start[row] > issue[row] + np.array(self._wake, dtype=np.int64)[row % self._count]
        let_go = waited & (before >= 0) & (end[before] + np.tile(lag, self._steps) == start[row])
        found = np.full(self._rows, ISSUE, dtype=np.int64)
        np.maximum.at(found, row[let_go], before[let_go])
        return found

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
        if row >= self._issued:
            return "is not issued while the host waits for", self._at
        op, before = row % self._count, row - self._before_on_stream[row % self._count]
        if before >= 0 and not self._done[before].triggered:
            return f"stands on {self._ops[op].stream} behind", before
        waits = [row - ago for ago, _ in self._waits[op] if ago <= row]
        return "waits for", next(b for b in waits if not self._done[b].triggered)

    def _name(self, row: int) -> str:
        step, op = divmod(row, self._count)
        return f"{self._ops[op].name} (step {step})"

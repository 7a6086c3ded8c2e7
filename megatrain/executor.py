"""Walks a schedule's ops in program order and hands them to a backend: the same loop for every backend.

It knows order, streams and waits. What the ops do is a list of functions made elsewhere (`actions`), and how
a machine runs them is the backend's. Which policy wrote the schedule makes no difference here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

import numpy as np

from megatrain.backend import Backend, E, Task, Work
from schedules.op import Stream, Wait
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Ints, Trace
from schedules.verify import Verified

TRACED = 200  # steps; a training of thousands must not fill memory with its past


class NotVerified(TypeError):
    """A schedule that was not verified, or that has changed since it was."""


class Executor(Generic[E]):
    """Runs steps of one verified schedule on one backend.

    Args:
        works: what each op does, in program order. If left out, ops do nothing, for a backend that only keeps time.
        delay_s: gives an artificial delay to each op as it is issued, which a correct schedule does not notice.
        record: keep every op's times of the last TRACED steps for `trace`.

    Whoever owns the backend closes it. After an error the executor is of no further use.

    Raises:
        NotVerified: `verified` is not what `verify` returned for this very schedule.
    """

    def __init__(
        self,
        verified: Verified,
        backend: Backend[E],
        works: Sequence[Work] | None = None,
        *,
        delay_s: Callable[[], float] | None = None,
        record: bool = False,
    ) -> None:
        self._schedule = _proven(verified)
        self._backend = backend
        self._works = works if works is not None else [_nothing] * len(self._schedule.ops)
        self._delay_s = delay_s
        self._record = record
        # (step, moment of issue, event) of ops that may not have finished
        self._rows: list[tuple[int, int, E]] = []
        # (step, moments in ns, int64 [op, (issue, start, end)]) of steps that have
        self._times: deque[tuple[int, Ints]] = deque(maxlen=TRACED)
        self._waits = self._schedule.waits_at
        self._last_of_stream = [self._schedule.index[ops[-1].name] for ops in self._schedule.streams.values()]
        self._steps: dict[int, list[E]] = {}  # events of steps not yet known to have finished, and of the last

    def issue(self, step: int) -> None:
        """Issue all ops of a step; they may still run when this returns. Steps are issued one after another.

        Raises:
            OpFailed: an op, of this step or an earlier one, has failed.
        """
        events: list[E] = []
        for index in range(len(self._works)):
            events.append(self._issue(index, step, events))
        self._steps[step] = events
        del self._rows[: -TRACED * len(self._works)]  # they would pile up where nobody waits for steps

    def _issue(self, index: int, step: int, events: Sequence[E]) -> E:
        op = self._schedule.ops[index]
        delay_s = self._delay_s() if self._delay_s is not None else 0.0
        task = Task(op, index, step, self._works[index], delay_s)
        before = self._steps.get(step - 1, ())  # before the first step there is nothing to wait for
        waits = [
            before[on] if distance else events[on] for on, distance in self._waits[index] if before or not distance
        ]
        issued_ns = self._backend.issue(task)
        if op.stream == Stream.HOST:
            for event in waits:
                self._backend.host_wait(event)
            done = self._backend.run_on_host(task)
        else:
            done = self._backend.submit(task, waits)
            if op.blocking:
                self._backend.host_wait(done)
        if self._record:
            self._rows.append((step, issued_ns, done))
        return done

    def wait(self, step: int) -> None:
        """Return when all ops of a step have finished; at once if that is known.

        Raises:
            OpFailed: an op has failed.
        """
        events = self._steps.get(step)
        if events is None:
            return
        for last in self._last_of_stream:
            self._backend.host_wait(events[last])
        self._read_times(step)
        # a step's events are needed by the next step's waits of distance 1, and by nobody later
        for known in [known for known in self._steps if known <= step and known + 1 in self._steps]:
            del self._steps[known]

    def run(self, steps: int) -> Trace:
        """Issue `steps` steps from step 0 as fast as the host can, wait for them, and tell their times."""
        self._record = True
        for step in range(steps):
            self.issue(step)
            self._steps.pop(step - 1, None)  # all that waits for its ops has been issued
        self.wait(steps - 1)
        return self.trace()

    def _read_times(self, step: int) -> None:
        """Replace the events of all ops up to a step that has finished by their times."""
        count = len(self._works)
        while self._rows and self._rows[0][0] <= step:
            rows = [(issued, *event.span()) for _, issued, event in self._rows[:count]]
            self._times.append((self._rows[0][0], np.array(rows, dtype=np.int64)))
            del self._rows[:count]

    def trace(self) -> Trace:
        """Times, in ns, of the ops recorded since the last call; all must have finished.

        The first step among them is step 0 of the trace, and its first issue is time 0; a backend that predicts has a
        zero of its own.
        """
        steps, times = [step for step, _ in self._times], [moments for _, moments in self._times]
        self._times.clear()
        count = len(self._works)
        issue_ns, start_ns, end_ns = np.concatenate([*times, np.empty((0, 3), dtype=np.int64)]).T
        origin = int(issue_ns[0]) if steps and self._backend.source == "measured" else 0
        op = np.tile(np.arange(count), len(steps))
        step = np.repeat(np.array(steps, dtype=np.int64) - min(steps, default=0), count)
        return Trace(
            digest=self._schedule.digest,
            machine=self._backend.machine,
            source=self._backend.source,
            op=op,
            step=step,
            issue_ns=issue_ns - origin,
            start_ns=start_ns - origin,
            end_ns=end_ns - origin,
            waited_on=self._released_by(op, step, issue_ns, end_ns),
        )

    def _released_by(self, op: Ints, step: Ints, issue_ns: Ints, end_ns: Ints) -> Ints:
        """Per row, which of the rows that it had to follow ended last (of several, the one issued last).

        ISSUE if they had all ended before the row was issued.
        """
        count = len(self._schedule.ops)
        found = np.full(len(op), ISSUE, dtype=np.int64)
        last_on: dict[Stream, int] = {}
        for row in range(len(op)):
            index = int(op[row])
            stream = self._schedule.ops[index].stream
            before = [
                row - index - distance * count + on for on, distance in self._waits[index] if distance <= step[row]
            ]
            before += [last_on[stream]] if stream in last_on else []
            last_on[stream] = row
            if before:
                latest = max(before, key=lambda other: (end_ns[other], other))
                if end_ns[latest] > issue_ns[row]:
                    found[row] = latest
        return found


def serial(schedule: Schedule) -> Schedule:
    """The same schedule with the host waiting for every op, so that none runs beside another."""
    return replace(schedule, ops=tuple(replace(op, blocking=True) for op in schedule.ops))


def in_turn(schedule: Schedule) -> Schedule:
    """The same schedule with each op waiting for the one before it, on whatever stream that is.

    So none runs beside another, and yet the host does not wait: an op of the GPU is queued there while the op before it
    runs. The GPU's compute stream is idle only during a copy or an op of the host, and `megatrain.cuda.kept_at_work`
    has it compute something else meanwhile.
    """
    follows = []
    for place, op in enumerate(schedule.ops):
        before = schedule.ops[place - 1]  # of the first op: the last op of the step before
        if before.stream not in (op.stream, Stream.HOST):  # those are in order anyway
            follows.append(Wait(op=op.name, on=before.name, distance=0 if place else 1))
    return replace(schedule, waits=tuple(dict.fromkeys((*schedule.waits, *follows))))


def _proven(verified: Verified) -> Schedule:
    if not isinstance(verified, Verified):
        raise NotVerified(f"a {type(verified).__name__} is not a proof: pass what schedules.verify.verify returns")
    if (now := verified.schedule.fingerprint) != verified.fingerprint:
        raise NotVerified(
            f"the proof is of a schedule with fingerprint {verified.fingerprint[:8]}, this has {now[:8]}: "
            "verify it again"
        )
    return verified.schedule


def _nothing(step: int) -> None:
    """What an op does where only its time counts."""

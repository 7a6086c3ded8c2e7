"""From accesses to waits: the hazards of a program, and the order that streams and waits already give.

A hazard is a pair of ops in program order that touch one buffer, at least one of them writing: read after
write, write after read, write after write. The same two classes serve the builder, which adds the waits
that are missing, and the verifier, which demands that none is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedules.op import Op, Stream, Wait
from schedules.schedule import Schedule

_STREAMS = {stream: i for i, stream in enumerate(Stream)}
_HOST = _STREAMS[Stream.HOST]

Clock = list[int]  # per stream: how many of its ops are known to have finished


class Instance(NamedTuple):
    """Op number `place` of step `step`."""

    step: int
    place: int


class Hazard(NamedTuple):
    """`first` must finish before the op at hand, because of `buffer`; `rule` is RAW, WAR or WAW."""

    rule: str
    buffer: str
    first: Instance


class Accesses:
    """Who last wrote each buffer and who has read it since, over ops seen in program order."""

    def __init__(self) -> None:
        self._writer: dict[str, Instance] = {}
        self._readers: dict[str, list[Instance]] = {}

    def hazards(self, op: Op) -> Iterator[Hazard]:
        """The hazards of `op` against everything recorded before it."""
        read = dict.fromkeys([access.buffer for access in op.reads])
        for buffer in read:
            if (writer := self._writer.get(buffer)) is not None:
                yield Hazard("RAW", buffer, writer)
        for buffer in dict.fromkeys([access.buffer for access in op.writes]):
            for reader in self._readers.get(buffer, ()):
                yield Hazard("WAR", buffer, reader)
            if buffer not in read and (writer := self._writer.get(buffer)) is not None:
                yield Hazard("WAW", buffer, writer)

    def before(self, op: Op) -> set[Instance]:
        """What must have finished before `op` starts: the first ops of its hazards."""
        found = {writer for access in op.accesses if (writer := self._writer.get(access.buffer))}
        for access in op.writes:
            found.update(self._readers.get(access.buffer, ()))
        return found

    def record(self, op: Op, instance: Instance) -> None:
        """Take note of `op`'s accesses."""
        written = {access.buffer for access in op.writes}
        for buffer in written:
            self._writer[buffer] = instance
            self._readers[buffer] = []
        for buffer in {access.buffer for access in op.reads} - written:
            self._readers.setdefault(buffer, []).append(instance)


@dataclass(slots=True)
class _Finished:
    stream: int
    number: int  # position among its stream's ops, from 1, over all steps
    clock: Clock  # what is known to have finished once this op has


class HappensBefore:
    """What must have finished before an op can start, by vector clocks, one entry per stream.

    Order comes from three sources: a stream runs its ops one after another; a wait; and the host, which
    issues nothing after a blocking op or a host op until that op is done.
    """

    def __init__(self) -> None:
        self._streams: list[Clock] = [[0] * len(_STREAMS) for _ in _STREAMS]
        self._host: Clock = self._streams[_HOST]
        self._met = [self._host for _ in _STREAMS]  # of each stream, the host's clock that its own takes in already
        self._finished: dict[Instance, _Finished] = {}

    def start(self, op: Op) -> Clock:
        """What has finished when `op` starts, by its place in its stream and in the issue order."""
        stream = _STREAMS[op.stream]
        clock = self._streams[stream]
        return clock if self._met[stream] is self._host else _join(clock, self._host)

    def after(self, clock: Clock, first: Instance) -> Clock:
        """`clock`, with `first` and all before it known to have finished."""
        return _join(clock, self._finished[first].clock)

    def implies(self, clock: Clock, first: Instance) -> bool:
        """Whether an op that starts at `clock` starts after `first` has finished."""
        done = self._finished[first]
        return clock[done.stream] >= done.number

    def knows(self, first: Instance) -> bool:
        """Whether `first` has been issued."""
        return first in self._finished

    def finish(self, op: Op, instance: Instance, clock: Clock) -> None:
        """Record that `op`, started at `clock`, is the last of its stream so far."""
        stream = _STREAMS[op.stream]
        done = list(clock)
        done[stream] = self._streams[stream][stream] + 1
        self._streams[stream], self._met[stream] = done, self._host
        self._finished[instance] = _Finished(stream, done[stream], done)
        if op.blocking or stream == _HOST:
            self._host = _join(self._host, done)


def _join(a: Clock, b: Clock) -> Clock:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


def unrolled(ops: Sequence[Op], steps: int) -> Iterator[tuple[Instance, Op]]:
    """The ops of `steps` consecutive steps in program order."""
    for step in range(steps):
        for index, op in enumerate(ops):
            yield Instance(step, index), op


def in_order(schedule: Schedule, order: HappensBefore) -> Iterator[tuple[Instance, Op, Clock]]:
    """The ops of two steps, each with what is known to have finished when it starts; records them in `order`.

    What an op of the second step follows in its own step and in the one before, it follows in every later one.
    """
    for instance, op in unrolled(schedule.ops, 2):
        clock = order.start(op)
        for on, distance in schedule.waits_at[instance.place]:
            first = Instance(instance.step - distance, on)
            if order.knows(first):
                clock = order.after(clock, first)
        yield instance, op, clock
        order.finish(op, instance, clock)


def minimal_waits(ops: Sequence[Op]) -> tuple[Wait, ...]:
    """The fewest waits that keep every hazard of the repeating program in order.

    Two steps are unrolled; the second one's waits are those of the steady state. An op's predecessors are looked at
    from the latest to the earliest, and one that is already known to have finished by then needs no wait. This is the
    transitive reduction, since only a predecessor that is later in program order can imply an earlier one. What implies
    a hazard inside a step lies inside that step too, so the waits of distance 0 also protect the first step.
    """
    accesses, order = Accesses(), HappensBefore()
    waits: list[Wait] = []
    for instance, op in unrolled(ops, 2):
        clock = order.start(op)
        for first in sorted(accesses.before(op), reverse=True):
            if order.implies(clock, first):
                continue
            clock = order.after(clock, first)
            if instance.step == 1:
                waits.append(Wait(op=op.name, on=ops[first.place].name, distance=1 - first.step))
        order.finish(op, instance, clock)
        accesses.record(op, instance)
    return tuple(waits)

"""A static schedule as a longest path: max-plus evaluation, batched over samples or hardware points.

Where nothing is shared, the moment at which an op starts is the largest of the ends it waits for. That is the
same meaning as the engine's, in plain arrays; the two must agree to the nanosecond.

Each op of a step has two nodes. Its issue follows the op before it in program order: that op's end where the
host waited for it, else its issue. Its end follows its issue, the op before it on its stream and its waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedules.op import Stream
from schedules.schedule import Schedule
from schedules.trace import Ints
from sim.engine import Stuck

STEPS = 6  # that a period is the mean of the later half of


class Arc(NamedTuple):
    """Node `to` comes after node `start` of the same step (distance 0) or of the one before (1).

    Node 2 * i is the issue of op i, node 2 * i + 1 its end.
    """

    start: int
    to: int
    distance: int
    woken: bool = False  # `to` is an op on another stream than the host's or that of `start`, which notices later


def arcs(schedule: Schedule) -> list[Arc]:
    """What comes after what in the repeating step: at most two arcs per op, and one per wait."""
    ops, index = schedule.ops, schedule.index
    found = []
    for i, before in enumerate((ops[-1], *ops[:-1]) if ops else ()):
        host_waits = before.blocking or before.stream == Stream.HOST
        found.append(Arc(2 * index[before.name] + host_waits, 2 * i, int(i == 0)))
        found.append(Arc(2 * i, 2 * i + 1, 0, woken=ops[i].stream != Stream.HOST))
    for of_stream in schedule.streams.values():
        for j, op in enumerate(of_stream):
            found.append(Arc(2 * index[of_stream[j - 1].name] + 1, 2 * index[op.name] + 1, int(j == 0)))
    for wait in schedule.waits:
        woken = ops[index[wait.op]].stream not in (Stream.HOST, ops[index[wait.on]].stream)
        found.append(Arc(2 * index[wait.on] + 1, 2 * index[wait.op] + 1, wait.distance, woken))
    return found


def topological(schedule: Schedule, edges: Sequence[Arc]) -> list[int]:
    """The nodes of one step, each after those that it follows at distance 0.

    Raises:
        Stuck: they follow each other in a circle.
    """
    count = 2 * len(schedule.ops)
    followers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for arc in edges:
        if arc.distance == 0:
            followers[arc.start].append(arc.to)
            missing[arc.to] += 1
    order = [node for node in range(count) if not missing[node]]
    for node in order:  # grows while it is walked
        for after in followers[node]:
            missing[after] -= 1
            if not missing[after]:
                order.append(after)
    if len(order) < count:
        left = [schedule.ops[node // 2].name for node in range(1, count, 2) if missing[node]]
        raise Stuck(f"these ops wait for each other, or for ops that do: {', '.join(left)}")
    return order


def evaluate(
    schedule: Schedule, durations: Ints, issue: Ints, steps: int, wake: Ints | None = None
) -> tuple[Ints, Ints]:
    """When every op starts and ends.

    Args:
        durations: ns, shape (batch, ops) or, where steps differ, (batch, steps, ops).
        issue: the host's ns per op, shape (batch, ops).
        wake: ns until an op's stream notices what released it, shape (batch, ops); none if left out.

    Returns:
        start and end in ns, each of shape (batch, steps, ops).

    Raises:
        Stuck: the schedule waits for itself.
    """
    ops, batch = len(schedule.ops), len(durations)
    per_step = durations if durations.ndim == 3 else durations[:, None, :]
    work = np.broadcast_to(per_step, (batch, steps, ops))
    # the batch lies innermost, so that every operation below runs over neighbouring numbers
    work, issue = np.ascontiguousarray(work.transpose(1, 2, 0)), np.ascontiguousarray(issue.T)
    lag = np.zeros((ops, batch), dtype=np.int64) if wake is None else np.ascontiguousarray(wake.T)
    edges = arcs(schedule)
    order = topological(schedule, edges)
    before: list[list[tuple[int, int, bool]]] = [[] for _ in range(2 * ops)]
    for arc in edges:
        before[arc.to].append((arc.start, arc.distance, arc.woken and wake is not None))
    moments = np.zeros((steps, 2 * ops, batch), dtype=np.int64)  # of every node
    for step in range(steps):
        for node in order:
            at = moments[step, node]
            for other, distance, woken in before[node]:
                if distance <= step:
                    moment = moments[step - distance, other]
                    np.maximum(at, moment + lag[node // 2] if woken else moment, out=at)
            at += work[step, node // 2] if node % 2 else issue[node // 2]
    end = moments[:, 1::2]
    return (end - work).transpose(2, 0, 1), end.transpose(2, 0, 1)


def periods(schedule: Schedule, durations: Ints, issue: Ints, wake: Ints | None = None) -> NDArray[np.float64]:
    """Mean time from step to step over the later half of STEPS steps, in ns, shape (batch,); see `evaluate`."""
    _, end = evaluate(schedule, durations, issue, STEPS, wake)
    step_end = np.maximum.accumulate(end.max(axis=2), axis=1)
    first = STEPS // 2 - 1
    return (step_end[:, -1] - step_end[:, first]) / (STEPS - 1 - first)

"""How fast a machine does something over and over: alone, and while other streams do something else.

Everything goes through a backend, as in a run: a thread per stream on the CPU, CUDA streams on a GPU. A stream gets
slices of work of some milliseconds, queued ahead, and what counts is the time in which all streams had work.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatrain.backend import Backend, Event, Task
from schedules.op import Kind, Op, Phase, Stream

SECONDS = 0.5  # how long one reading lasts
SLICE_S = 0.005  # the least work in one task, so that handing it over does not count
WINDOWS = 5  # of which the median, the least and the most are told


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a stream does over and over: `work`, which is so much (bytes, FLOPs, parameters, calls)."""

    stream: Stream
    work: Callable[[], object]
    amount: float = 1.0


class Rate(NamedTuple):
    """Amount per second: of some windows of one reading, the least, the median, the most."""

    least: float
    median: float
    most: float


def rates(backend: Backend[Any], loads: Sequence[Load]) -> list[Rate]:
    """How fast each load goes while all of them run, each on a stream of its own.

    Raises:
        OpFailed: some work raised an error.
        ValueError: two loads have the same stream.
    """
    if len({load.stream for load in loads}) < len(loads):
        raise ValueError("loads that run at once need a stream each")
    pace = [_seconds(backend, load) for load in loads]
    turns = [max(1, math.ceil(SLICE_S / s)) for s in pace]  # calls in a task
    counts = [max(2 * WINDOWS, math.ceil(SECONDS / (s * n))) for s, n in zip(pace, turns, strict=True)]
    # in the order in which they are due, so that no queue runs dry while another is filled
    due = sorted((k * s * n, i) for i, (s, n) in enumerate(zip(pace, turns, strict=True)) for k in range(counts[i]))
    events: list[list[Event]] = [[] for _ in loads]
    for _, i in due:
        events[i].append(_submit(backend, loads[i], turns[i]))
    for of_load in events:
        backend.host_wait(of_load[-1])
    spans = [[event.span() for event in of_load] for of_load in events]
    begin = max(of_load[0][1] for of_load in spans)  # the first task of each is warm-up
    end = min(of_load[-1][1] for of_load in spans)
    return [
        _rate([s for s in of_load if begin <= s[0] and s[1] <= end] or of_load[1:], load.amount * n)
        for of_load, load, n in zip(spans, loads, turns, strict=True)
    ]


def together(backend: Backend[Any], first: Load, second: Load) -> tuple[float, float]:
    """How fast each of two loads goes while the other runs, relative to running alone."""
    alone = [rates(backend, [load])[0].median for load in (first, second)]
    both = rates(backend, [first, second])
    return both[0].median / alone[0], both[1].median / alone[1]


def _rate(spans: Sequence[tuple[int, int]], amount: float) -> Rate:
    """Of tasks one after another, each so much: by windows of neighbouring tasks."""
    windows = min(WINDOWS, len(spans))
    edges = [round(k * len(spans) / windows) for k in range(windows + 1)]
    found = []
    for first, last in itertools.pairwise(edges):
        part = spans[first:last]
        found.append(len(part) * amount / (max(1, part[-1][1] - part[0][0]) / 1e9))
    return Rate(min(found), statistics.median(found), max(found))


def _seconds(backend: Backend[Any], load: Load) -> float:
    """About how long a call takes, warm."""
    calls = 1
    while True:
        _wait(backend, _submit(backend, load, 1))
        begun, ended = _wait(backend, _submit(backend, load, calls))
        if ended - begun >= SLICE_S * 1e9 / 4 or calls >= 1 << 16:
            return max(1, ended - begun) / calls / 1e9
        calls *= 4


def _wait(backend: Backend[Any], event: Event) -> tuple[int, int]:
    backend.host_wait(event)
    return event.span()


def _submit(backend: Backend[Any], load: Load, calls: int) -> Event:
    def work(step: int) -> None:
        for _ in range(calls):
            load.work()

    op = Op(name=f"load of {load.stream}", kind=Kind.COMPUTE, phase=Phase.SYNC, stream=load.stream)
    event: Event = backend.submit(Task(op, 0, 0, work), [])
    return event

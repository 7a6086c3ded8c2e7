"""Timelines for ui.perfetto.dev and chrome://tracing: runs of a schedule one under the other.

The file is JSON in Chrome's trace event format. Times in it are microseconds; a nanosecond is 0.001.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedules.files import write_text
from schedules.op import Access, Op, Phase, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace

Event = dict[str, Any]


def write(path: Path, traces: Sequence[tuple[Schedule, Trace]]) -> None:
    """Write one timeline that holds every run given, each as a process of its own.

    Raises:
        TraceError: a trace is not of the schedule it is given with.
        InputError: the file cannot be written.
    """
    events: list[Event] = []
    flow = 0
    for pid, (schedule, trace) in enumerate(traces, start=1):
        trace.check(schedule)
        trace = trace.from_zero()  # viewers leave out what is earlier
        tids, tracks = _tracks(schedule, trace)
        events += _names(schedule, trace, pid, tracks)
        events += _slices(schedule, trace, pid, tids)
        events += _counters(schedule, trace, pid)
        arrows = list(_arrows(schedule, trace, pid, tids, flow))
        flow += len(arrows) // 2
        events += arrows
    about = {f"run {pid}": _about(schedule, trace) for pid, (schedule, trace) in enumerate(traces, start=1)}
    body = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    write_text(path, json.dumps(body, separators=(",", ":")))


def _about(schedule: Schedule, trace: Trace) -> str:
    return f"{trace.title}: {schedule.label}, {schedule.model.name}, schedule {schedule.digest}"


def _tracks(schedule: Schedule, trace: Trace) -> tuple[list[int], list[str]]:
    """(the tid of each row, the names of the tracks from tid 1 on): one a stream, and more where its ops overlapped.

    An op stands on the first of its stream's tracks that is free: slices of one track must not overlap.
    """
    tids, names = [0] * len(trace), list[str]()
    for stream in schedule.streams:
        rows = trace.rows_of(schedule, stream)
        ends: list[int] = []  # of the last op on each track
        for row in rows[np.argsort(trace.start_ns[rows], kind="stable")].tolist():
            track = next((i for i, end in enumerate(ends) if end <= trace.start_ns[row]), len(ends))
            ends[track : track + 1] = [int(trace.end_ns[row])]
            tids[row] = len(names) + 1 + track
        names += [str(stream), *(f"{stream} {number}" for number in range(2, len(ends) + 1))]
    return tids, names


def _names(schedule: Schedule, trace: Trace, pid: int, tracks: Sequence[str]) -> Iterator[Event]:
    """Names and order of the process and its tracks."""
    process = f"{trace.title} ({schedule.label}, {schedule.model.name})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, name in enumerate(tracks, start=1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slices(schedule: Schedule, trace: Trace, pid: int, tids: Sequence[int]) -> Iterator[Event]:
    for row in range(len(trace)):
        op = schedule.ops[int(trace.op[row])]
        start, end = int(trace.start_ns[row]), int(trace.end_ns[row])
        yield {
            "ph": "X",
            "name": op.name,
            "cat": str(op.phase),
            "pid": pid,
            "tid": tids[row],
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "args": {"step": int(trace.step[row]), "issued at (us)": int(trace.issue_ns[row]) / 1000}
            | _details(schedule, op, end - start),
        }


def _details(schedule: Schedule, op: Op, duration_ns: int) -> dict[str, Any]:
    """What is shown of a slice that is clicked on: demands, rates and buffers, where there are any."""
    shown: dict[str, Any] = {"kind": str(op.kind), "phase": str(op.phase)}
    if op.layer is not None:
        shown["layer"] = schedule.model.layer_name(op.layer)
    if op.microbatch is not None:
        shown["micro-batch"] = op.microbatch
    if op.nbytes:
        shown["bytes"] = op.nbytes
        if duration_ns and op.phase == Phase.COPY:
            shown["GB/s"] = round(op.nbytes / duration_ns, 3)
    if op.flops:
        shown["FLOPs"] = op.flops
        if duration_ns:
            shown["TFLOP/s"] = round(op.flops / duration_ns / 1e3, 3)
    if op.params:
        shown["parameters"] = op.params
    for word, accesses in (("reads", op.reads), ("writes", op.writes)):
        if accesses:
            shown[word] = ", ".join(_holding(access) for access in accesses)
    return shown


def _holding(access: Access) -> str:
    return f"{access.tensor} in {access.buffer}"


def _counters(schedule: Schedule, trace: Trace, pid: int) -> Iterator[Event]:
    """Bytes per tier that will still be read."""
    for tier in Tier:
        if not schedule.allocated_bytes(tier):
            continue
        moments, live = trace.live_bytes(schedule, tier)
        for moment, nbytes in zip(moments.tolist(), live.tolist(), strict=True):
            name = f"{tier} live bytes"
            yield {"ph": "C", "name": name, "pid": pid, "ts": moment / 1000, "args": {"bytes": nbytes}}


def _arrows(schedule: Schedule, trace: Trace, pid: int, tids: Sequence[int], first_id: int) -> Iterator[Event]:
    """An arrow per wait, from the op waited for to the op that waits; "released by" where it was the last.

    An arrow leaves within the last nanosecond of its slice: at the very end, viewers would take it to be of
    the slice that follows.
    """
    rows = {(int(step), int(op)): row for row, (step, op) in enumerate(zip(trace.step, trace.op, strict=True))}
    found = first_id
    for row in range(len(trace)):
        op, step = schedule.ops[int(trace.op[row])], int(trace.step[row])
        for wait in schedule.waits_of[op.name]:
            on = rows.get((step - wait.distance, schedule.index[wait.on]))
            if on is None:  # before the first step
                continue
            found += 1
            name = "released by" if int(trace.waited_on[row]) == on else "waits for"
            common = {"name": name, "cat": "wait", "id": found, "pid": pid}
            leaves = max(int(trace.start_ns[on]), int(trace.end_ns[on]) - 1)
            yield common | {"ph": "s", "tid": tids[on], "ts": leaves / 1000}
            arrives = int(trace.start_ns[row])
            yield common | {"ph": "f", "bp": "e", "tid": tids[row], "ts": arrives / 1000}

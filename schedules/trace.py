"""What happened, or is predicted to happen, when a schedule ran: one row per op and step.

The simulator and the executor both yield a Trace, with the same columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from schedules.errors import InputError
from schedules.file_kinds import ENCODING, TRACE, not_json, wrong_kind
from schedules.files import write_text
from schedules.op import Stream, Tier
from schedules.schedule import Schedule
from schedules.words import plain

FORMAT = "megatrain-trace/1"
ISSUE = -1  # in `waited_on`: the op started as soon as the host had issued it
AHEAD = 2  # steps that a trainer has under way at once; enough for any stream to find its next step queued
COLUMNS = ("op", "step", "issue_ns", "start_ns", "end_ns", "waited_on")

Ints = NDArray[np.int64]


class TraceError(InputError):
    """A trace file that cannot be read, or a trace that is not of the schedule at hand."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Columns of equal length, int64, rows in issue order (step by step, in program order).

    `op` is the position in the schedule's program order, `issue_ns` the moment the host had issued the op,
    `start_ns` and `end_ns` its run, `waited_on` the row whose end released it (its last dependency or its
    predecessor on the stream) or ISSUE where it ran as soon as it was issued.
    `digest` names the schedule; `source` says whether the times are predicted or measured.
    """

    digest: str
    machine: str
    source: Literal["predicted", "measured"]
    op: Ints
    step: Ints
    issue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    waited_on: Ints

    def __len__(self) -> int:
        return len(self.op)

    @property
    def title(self) -> str:
        """What a run is called wherever it is shown: "predicted on gh200"."""
        return f"{self.source} on {self.machine}"

    @property
    def steps(self) -> int:
        """How many steps were run."""
        return int(self.step.max()) + 1 if len(self) else 0

    @cached_property
    def step_end_ns(self) -> Ints:
        """When every op of a step and of those before it had finished, shape (steps,).

        A stream may have finished the next step's ops before another has finished this one's.
        """
        ends = np.zeros(self.steps, dtype=np.int64)
        np.maximum.at(ends, self.step, self.end_ns)
        return np.maximum.accumulate(ends)

    def from_zero(self) -> Trace:
        """With all times later by as much as an op started before zero, as those of a recording may; else as it is."""
        early = int(self.start_ns.min(initial=0))
        moved = {name: getattr(self, name) - early for name in ("issue_ns", "start_ns", "end_ns")}
        return replace(self, **moved)

    def step_ns(self, warmup: int = 1) -> Ints:
        """Times from the end of one step to the end of the next, after `warmup` steps, shape (steps - warmup - 1,).

        Raises:
            TraceError: fewer than two steps are left.
        """
        ends = self.step_end_ns[warmup:]
        if len(ends) < 2:
            raise TraceError(f"{self.steps} steps are too few for a period after {warmup} of warm-up")
        return np.diff(ends)

    def window(self, warmup: int) -> tuple[int, int]:
        """From the end of the warm-up to the end of the last step: the span of all that `step_ns` tells."""
        return int(self.step_end_ns[warmup]), int(self.step_end_ns[-1])

    def rows_of(self, schedule: Schedule, stream: Stream) -> Ints:
        """Rows of one stream, in the order they ran."""
        of_stream = np.array([op.stream == stream for op in schedule.ops])
        return np.flatnonzero(of_stream[self.op])

    def busy_ns(self, schedule: Schedule, stream: Stream, window: tuple[int, int]) -> int:
        """Time within `window` during which the stream ran an op; a recorded stream may have run several at once."""
        rows = self.rows_of(schedule, stream)
        rows = rows[np.argsort(self.start_ns[rows], kind="stable")]
        start = np.clip(self.start_ns[rows], *window)
        end = np.maximum.accumulate(np.clip(self.end_ns[rows], *window))
        free = np.concatenate(([window[0]], end[:-1]))
        return int(np.clip(end - np.maximum(start, free), 0, None).sum())

    def idle_causes_ns(self, schedule: Schedule, stream: Stream, window: tuple[int, int]) -> dict[str, int]:
        """Idle time of a stream within `window`, by what its next op was waiting for.

        Keys: the stream of the op waited on ("h2d", ...), "issue" where the host was late, and "end" for
        what is left after the stream's last op.
        """
        causes: dict[str, int] = {}
        free = window[0]
        for row in self.rows_of(schedule, stream):
            gap = min(int(self.start_ns[row]), window[1]) - free
            if gap > 0:
                on = int(self.waited_on[row])
                cause = "issue" if on == ISSUE else str(schedule.ops[int(self.op[on])].stream)
                causes[cause] = causes.get(cause, 0) + gap
            free = max(free, int(self.end_ns[row]))
        if free < window[1]:
            causes["end"] = window[1] - free
        return causes

    def live_bytes(self, schedule: Schedule, tier: Tier) -> tuple[Ints, Ints]:
        """Bytes of a tier whose contents will still be read, over time: (moments in ns, bytes from then on).

        A buffer is live from the start of the op that writes it to the end of the last op that reads that
        content; one that is only ever read, from the beginning to its last read. Never above the bytes allocated.
        """
        sizes = {b.name: b.nbytes for b in schedule.buffers if b.tier == tier}
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
        alive = dict.fromkeys(sizes, (0, 0))  # from the write to the last read so far
        for row in range(len(self)):
            op, start, end = schedule.ops[int(self.op[row])], int(self.start_ns[row]), int(self.end_ns[row])
            for access in op.reads:
                if access.buffer in sizes:
                    since, until = alive[access.buffer]
                    alive[access.buffer] = (since, max(until, end))
            for access in op.writes:
                if access.buffer in sizes and not op.reads_from(access.buffer):
                    spans[access.buffer].append(alive[access.buffer])
                    alive[access.buffer] = (start, end)
        changes: dict[int, int] = {0: 0}
        for name, size in sizes.items():
            for since, until in [*spans[name], alive[name]]:
                changes[since] = changes.get(since, 0) + size
                changes[until] = changes.get(until, 0) - size
        moments = np.array(sorted(changes), dtype=np.int64)
        return moments, np.cumsum([changes[int(t)] for t in moments], dtype=np.int64)

    # ---- files

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "digest": self.digest,
            "machine": self.machine,
            "source": self.source,
            "columns": {name: getattr(self, name).tolist() for name in COLUMNS},
        }
        write_text(path, json.dumps(body))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            TraceError: the file is not a whole trace.
        """
        try:
            text = path.read_text(encoding=ENCODING)
        except UnicodeDecodeError as error:
            raise TraceError(f"{path} is not text: {error}") from None
        if wrong := wrong_kind(text, TRACE):
            raise TraceError(f"{path} {wrong}")
        try:
            return cls._from_json(json.loads(text))
        except json.JSONDecodeError as error:
            what = not_json(error)
        except KeyError as error:
            what = f"the field {error} is missing"
        except TypeError:
            what = "its fields are not what is written there"
        except (ValueError, OverflowError, RecursionError) as error:
            what = str(error)
        raise TraceError(f"{path} is not a trace of format {FORMAT}: {what}")

    @classmethod
    def _from_json(cls, body: Mapping[str, Any]) -> Trace:
        if body["format"] != FORMAT:
            raise TraceError(f"format {body['format']!r}")
        if body["source"] not in ("predicted", "measured"):
            raise TraceError(f"source {body['source']!r}")
        found = {name: np.array(body["columns"][name]) for name in COLUMNS}
        if any(column.ndim != 1 or (len(column) and column.dtype != np.int64) for column in found.values()):
            raise TraceError("a column is a list of whole numbers")
        columns = {name: column.astype(np.int64) for name, column in found.items()}
        if len({len(column) for column in columns.values()}) != 1:
            raise TraceError("columns of different lengths")
        count = len(columns["op"])
        for name, least in (("op", 0), ("step", 0), ("waited_on", ISSUE)):
            column = columns[name]
            # a step has a row at least; whether there is such an op, `check` tells
            if (column < least).any() or (name != "op" and (column >= count).any()):
                raise TraceError(f"column {name} holds what is no {'row' if name == 'waited_on' else name}")
        if (columns["end_ns"] < columns["start_ns"]).any():
            raise TraceError("an op ends before it starts")
        for name in ("digest", "machine"):
            if not isinstance(body[name], str) or plain(body[name]) != body[name]:
                raise TraceError(f"{name} {body[name]!r}")
        return cls(digest=body["digest"], machine=body["machine"], source=body["source"], **columns)

    def check(self, schedule: Schedule) -> None:
        """Raises TraceError unless the trace is of this schedule."""
        if self.digest != schedule.digest:
            raise TraceError(f"the trace is of schedule {self.digest[:8]}, not {schedule.short_digest}")
        if len(self) and (last := int(self.op.max())) >= len(schedule.ops):
            raise TraceError(f"the trace has op {last}, and its schedule {len(schedule.ops)}: it was changed since")

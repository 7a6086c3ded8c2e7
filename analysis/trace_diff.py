"""Where two runs of one schedule part: op by op, stream by stream, and which of it moves the step.

Two steady steps are laid side by side, the typical one of each run. A stream's step is made of its ops and of the
idle time before each, so a stream's difference is the sum of the differences listed here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from analysis.palette import op_class
from schedules.op import Op, Stream
from schedules.schedule import Schedule
from schedules.trace import AHEAD, ISSUE, Ints, Trace, TraceError
from sim.cost import D2H, DRAM, DUPLEX, GPU, H2D, MissingCost, demands
from sim.longest_path import periods
from sim.machine import HardwareProfile

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One op in the step looked at: ns from the step's beginning, which is the end of the step before.

    `idle_ns` is how long its stream had nothing to do before it; `released_by` is the op whose end let it start, None
    where no such op is known: `by_issue` where the host had only then issued it.
    """

    start_ns: int
    end_ns: int
    idle_ns: int
    released_by: Op | None
    by_issue: bool

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, kw_only=True)
class Parting:
    """One op in both runs. `beside` ran beside it in the second run, on a resource that both use, for `beside_ns`
    longer than in the first; None where nothing did."""

    op: Op
    first: Occurrence
    second: Occurrence
    beside: Op | None
    beside_ns: int

    @property
    def duration_ns(self) -> int:
        """How much longer the op ran in the second run."""
        return self.second.duration_ns - self.first.duration_ns

    @property
    def idle_ns(self) -> int:
        """How much longer its stream had stood idle before it."""
        return self.second.idle_ns - self.first.idle_ns

    @property
    def delay_ns(self) -> int:
        """How much later in the step it started, whatever made it late."""
        return self.second.start_ns - self.first.start_ns


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Two runs side by side. `steps_ns` are the lengths of the two steps looked at."""

    schedule: Schedule
    names: tuple[str, str]
    first_called: str  # in sentences
    steps_ns: tuple[int, int]
    partings: tuple[Parting, ...]  # in program order


def diff(schedule: Schedule, first: Trace, second: Trace, profile: HardwareProfile) -> Diff:
    """Lay two runs of a schedule side by side. `profile` only says which ops use a resource in common.

    Raises:
        TraceError: a trace is of another schedule, or does not hold whole steps.
    """
    for trace in (first, second):
        trace.check(schedule)
        rows = trace.step * len(schedule.ops) + trace.op
        if not len(rows) or not np.array_equal(rows, np.arange(trace.steps * len(schedule.ops))):
            raise TraceError("a trace to be compared must hold whole steps, each of all ops in program order")
    steps = (typical_step(first), typical_step(second))
    runs = [_occurrences(schedule, trace, step) for trace, step in zip((first, second), steps, strict=True)]
    using = _resources(schedule, profile)
    partings = [
        Parting(op=op, first=runs[0][i], second=runs[1][i], beside=beside, beside_ns=beside_ns)
        for i, (op, (beside, beside_ns)) in enumerate(zip(schedule.ops, _besides(schedule, runs, using), strict=True))
    ]
    lengths = [step_bounds(trace, step) for trace, step in zip((first, second), steps, strict=True)]
    return Diff(
        schedule=schedule,
        names=(first.title, second.title),
        first_called="the prediction" if first.source != second.source == "measured" else "the first run",
        steps_ns=(lengths[0][1] - lengths[0][0], lengths[1][1] - lengths[1][0]),
        partings=tuple(partings),
    )


def typical_step(trace: Trace) -> int:
    """The step whose length is nearest the median of all but the first, which is what `megatrain run` tells.

    Of three steps or more neither the first nor the last, where nothing repeats; of equals the later one.
    """
    if trace.steps < 3:
        return trace.steps - 1
    lengths = np.diff(trace.step_end_ns, prepend=0)
    away = np.abs(lengths - np.median(lengths[1:]))
    return min(range(1, trace.steps - 1), key=lambda step: (away[step], -step))


def step_bounds(trace: Trace, step: int) -> tuple[int, int]:
    """From the end of the step before to the end of this one, ns."""
    ends = [0, *trace.step_end_ns.tolist()]
    return ends[step], ends[step + 1]


def _occurrences(schedule: Schedule, trace: Trace, step: int) -> list[Occurrence]:
    """Of each op, in program order, what it did in that step."""
    count, begin = len(schedule.ops), step_bounds(trace, step)[0]
    free = dict.fromkeys(Stream, 0)
    found = []
    for row in range(max(step - 1, 0) * count, (step + 1) * count):
        op, on = schedule.ops[row % count], int(trace.waited_on[row])
        start, end = int(trace.start_ns[row]), int(trace.end_ns[row])
        if row >= step * count:
            idle = max(start - free[op.stream], 0)  # a recorded stream may have run several ops at once
            # a recording does not know all that an op waited for: issued early in the idle time, it was not the host
            late = not schedule.is_recording or 2 * (start - int(trace.issue_ns[row])) <= idle
            found.append(
                Occurrence(
                    start_ns=start - begin,
                    end_ns=end - begin,
                    idle_ns=idle,
                    released_by=None if on == ISSUE else schedule.ops[int(trace.op[on])],
                    by_issue=on == ISSUE and late,
                )
            )
        free[op.stream] = max(free[op.stream], end)
    return found


# ---- what ran beside an op

_RECORDED_ON = {  # what the ops of a recording use, which do not say what they touched
    Stream.COMPUTE: frozenset({GPU}),
    Stream.H2D: frozenset({H2D, DUPLEX, DRAM}),
    Stream.D2H: frozenset({D2H, DUPLEX, DRAM}),
    Stream.CPU: frozenset({DRAM}),
}


def _resources(schedule: Schedule, profile: HardwareProfile) -> list[frozenset[str]]:
    """Per op, what it competes for. GPU work is also slowed by whatever crosses the link."""
    if schedule.is_recording:
        used = [_RECORDED_ON.get(op.stream, frozenset()) for op in schedule.ops]
    else:
        try:
            found = demands(schedule, profile)
        except MissingCost:  # what ops share does not depend on how long they take
            found = demands(schedule, replace(profile, mode="datasheet"))
        used = [frozenset(demand.usage) for demand in found]
    return [names | {H2D, D2H} if GPU in names else names for names in used]


def _besides(
    schedule: Schedule, runs: Sequence[Sequence[Occurrence]], using: Sequence[frozenset[str]]
) -> list[tuple[Op | None, int]]:
    """Per op, the one that ran beside it for the longest more in the second run than in the first: (op, ns more)."""
    spans = [(np.array([o.start_ns for o in run]), np.array([o.end_ns for o in run])) for run in runs]
    rivals: dict[tuple[Stream, frozenset[str]], NDArray[np.bool_]] = {}
    found: list[tuple[Op | None, int]] = []
    for i, (op, near) in enumerate(zip(schedule.ops, _near(schedule, *spans[1]), strict=True)):
        key = op.stream, using[i]
        if key not in rivals:
            rivals[key] = np.array([_slows(other, using[j], *key) for j, other in enumerate(schedule.ops)])
        near = near[rivals[key][near]]
        together = [
            np.clip(np.minimum(end[near], end[i]) - np.maximum(start[near], start[i]), 0, None) for start, end in spans
        ]
        more = together[1] - together[0]
        most = int(more.max(initial=0))
        found.append((schedule.ops[near[more.argmax()]] if most else None, most))
    return found


def _near(schedule: Schedule, start: Ints, end: Ints) -> Iterator[Ints]:
    """Per op, the places in program order of those that ran beside it, and of others begun before where some lasted."""
    lanes = []
    for ops in schedule.streams.values():
        places = np.array([schedule.index[op.name] for op in ops])
        places = places[np.argsort(start[places], kind="stable")]
        reach = np.maximum.accumulate(end[places])
        lanes.append((places, np.searchsorted(reach, start, side="right"), np.searchsorted(start[places], end)))
    for i in range(len(start)):
        yield np.sort(np.concatenate([places[first[i] : last[i]] for places, first, last in lanes]))


def _slows(other: Op, used: frozenset[str], stream: Stream, using: frozenset[str]) -> bool:
    """Whether an op that uses `used` takes something from one of `stream` that uses `using`."""
    if other.stream == stream or (GPU in used and GPU not in using):  # the GPU's work does not slow copies
        return False
    return bool(used & using)


# ---- what it comes to


def totals(found: Diff) -> pd.DataFrame:
    """Per stream and class of op: how often, ns in each run, the difference; idle time as a class of its own."""
    import pandas as pd

    sums: dict[tuple[str, str], list[int]] = {}
    for parting in found.partings:
        stream = str(parting.op.stream)
        for cls, first, second in (
            (op_class(parting.op), parting.first.duration_ns, parting.second.duration_ns),
            ("idle", parting.first.idle_ns, parting.second.idle_ns),
        ):
            row = sums.setdefault((stream, cls), [0, 0, 0])
            row[0] += 1
            row[1] += first
            row[2] += second
    order = [str(stream) for stream in Stream]
    rows = [
        {
            "stream": stream,
            "class": cls,
            "ops": count,
            "first_s": first / 1e9,
            "second_s": second / 1e9,
            "difference_s": (second - first) / 1e9,
        }
        for (stream, cls), (count, first, second) in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), item[0][1] == "idle")
        )
    ]
    return pd.DataFrame(rows)


def overlapping(schedule: Schedule, *traces: Trace) -> list[Stream]:
    """The streams of a recording on which ops ran beside each other; `moves` replays a stream's ops one by one."""
    if not schedule.is_recording:
        return []
    return [stream for stream in schedule.streams if any(_overlaps(schedule, trace, stream) for trace in traces)]


def _overlaps(schedule: Schedule, trace: Trace, stream: Stream) -> bool:
    rows = trace.rows_of(schedule, stream)
    whole = int(trace.start_ns.min()), int(trace.end_ns.max())
    return bool((trace.end_ns - trace.start_ns)[rows].sum() > trace.busy_ns(schedule, stream, whole))


def moves(schedule: Schedule, first: Trace, second: Trace) -> pd.DataFrame:
    """Which differences move the step: the first run replayed with one class of op lasting as in the second.

    Replayed are the schedule's waits and streams, and the durations and issue costs seen in the typical step of
    each run, through `sim.longest_path`. The first row is what all others are measured against, the first run
    replayed as it was, which need not last as long as its recorded step. Then, largest move first, every (stream,
    class) whose durations differ and the host's issue; last all of it at once, which also counts what moves the step
    only together. It says nothing of streams that are `overlapping`.
    """
    import pandas as pd

    ops = schedule.ops
    work = [_durations(schedule, trace) for trace in (first, second)]
    issue = [_issue_costs(schedule, trace) for trace in (first, second)]
    classes = [(str(op.stream), op_class(op)) for op in ops]
    changed = [c for c in dict.fromkeys(classes) if any(work[0][i] != work[1][i] for i in _of(classes, c))]
    labels = [("", "none of it"), *changed, ("host", "issue"), ("", "all of it")]
    durations = np.tile(work[0], (len(labels), 1))
    issues = np.tile(issue[0], (len(labels), 1))
    for row, cls in enumerate(changed, start=1):
        places = _of(classes, cls)
        durations[row, places] = work[1][places]
    durations[-1], issues[-1], issues[-2] = work[1], issue[1], issue[1]
    found = periods(schedule, durations, issues)
    rows = [
        {"stream": stream, "class": cls, "step_s": found[row] / 1e9, "moves_s": (found[row] - found[0]) / 1e9}
        for row, (stream, cls) in enumerate(labels)
    ]
    middle = sorted(rows[1:-1], key=lambda row: -abs(row["moves_s"]))
    return pd.DataFrame([rows[0], *middle, rows[-1]])


def _of(classes: Sequence[tuple[str, str]], wanted: tuple[str, str]) -> list[int]:
    return [i for i, cls in enumerate(classes) if cls == wanted]


def _durations(schedule: Schedule, trace: Trace) -> Ints:
    return np.array([o.duration_ns for o in _occurrences(schedule, trace, typical_step(trace))], dtype=np.int64)


def _issue_costs(schedule: Schedule, trace: Trace) -> Ints:
    """Ns that the host took to issue each op of the typical step, from when it was free to.

    The first op's is the median over steps: a step is issued while another runs, so that what held the host up once,
    as collecting garbage does, need not have made any step longer.
    """
    step, count = typical_step(trace), len(schedule.ops)
    ends = trace.step_end_ns
    costs = [_issue_cost(schedule, trace, row, ends) for row in range(step * count, (step + 1) * count)]
    firsts = [_issue_cost(schedule, trace, each * count, ends) for each in range(min(1, step), trace.steps)]
    return np.array([round(statistics.median(firsts)), *costs[1:]], dtype=np.int64)


def _issue_cost(schedule: Schedule, trace: Trace, row: int, ends: Ints) -> int:
    """From when the last op was issued, or waited for, ns.

    Before a step's first op a trainer has waited for the last step but one (AHEAD), which is no cost of issuing. For
    the last one it does not wait, however late it is with its data; where it does, as to save a checkpoint, that
    counts as issuing. A predicted host waits for no step.
    """
    step, i = divmod(row, len(schedule.ops))
    free = 0
    if row:
        before = schedule.ops[i - 1]
        waited = before.blocking or before.stream == Stream.HOST
        free = int(trace.end_ns[row - 1] if waited else trace.issue_ns[row - 1])
    if i == 0 and trace.source == "measured":
        ended = ends[: max(step + 1 - AHEAD, 0)]  # one after another
        free = max([free, *ended[: np.searchsorted(ended, trace.issue_ns[row], side="right")][-1:].tolist()])
    return max(0, int(trace.issue_ns[row]) - free)


def frame(found: Diff) -> pd.DataFrame:
    """A row per op, for programs; times in ns, the largest difference first."""
    import pandas as pd

    rows = [
        {
            "op": p.op.name,
            "stream": str(p.op.stream),
            "class": op_class(p.op),
            "first_ns": p.first.duration_ns,
            "second_ns": p.second.duration_ns,
            "difference_ns": p.duration_ns,
            "delay_ns": p.delay_ns,
            "idle_before_ns": p.idle_ns,
            "released_by": _released(p.second),
            "released_by_in_first": _released(p.first),
            "beside": p.beside.name if p.beside else "",
            "beside_ns": p.beside_ns,
        }
        for p in found.partings
    ]
    table = pd.DataFrame(rows)
    size = np.maximum(table["difference_ns"].abs(), table["idle_before_ns"].abs())
    return table.loc[size.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)


def _released(found: Occurrence) -> str:
    if found.released_by is None:
        return "issue" if found.by_issue else "unknown"
    return found.released_by.name

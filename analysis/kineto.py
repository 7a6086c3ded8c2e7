"""A training run of one's own, recorded by the PyTorch profiler, as a Trace: its copies, kernels and gaps.

Read is the JSON that `torch.profiler` exports (Kineto's, in Chrome's trace event format, times in microseconds),
plain or gzipped. Of several recorded steps the one of median length is taken, the first aside.

The recording says what ran and when, not what it touched: its schedule has ops without buffers and waits. It can be
drawn, tabled and laid beside a simulated one; it can be neither proven nor run.
"""

from __future__ import annotations

import gzip
import json
import warnings
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase, Stream
from schedules.schedule import RECORDED, Schedule
from schedules.trace import ISSUE, Trace
from schedules.words import plain
from schedules.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

Event = Mapping[str, Any]
What = tuple[Kind, Phase, Stream]

_BACKWARD = "autograd::engine::evaluate_function"  # encloses whatever the backward pass calls
_STEP, _OPTIMIZER, _ZERO = "ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#"
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_LENGTH = 80
_FOREVER = 2**62  # ns, which a difference of two times must fit 64 bits with


class RecordingError(InputError):
    """A file that is no recording of a training run."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded step. `queues` names, per op, the CUDA stream or thread that it ran on.

    `step_ns` is from the end of the step before to its own, when the last op that the CPU called for within the
    profiler's mark of it ended: the GPU may lag behind the marks. Of a lone step the mark tells the beginning, or,
    where its ops ended after the mark did, the first of them. Without marks it is the whole recording up to the end of
    its last op, of as many `steps` as an optimizer's were recorded.
    """

    schedule: Schedule
    trace: Trace
    queues: tuple[str, ...]
    step_ns: int
    step: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class _Span:
    """An event with integer times, in ns."""

    name: str
    category: str
    thread: str
    start: int
    end: int
    nbytes: int
    correlation: str | None  # of a launch and of what it launched
    args: Mapping[str, Any]


class _Step(NamedTuple):
    """A marked step on the CPU, in ns."""

    name: str
    begin: int
    end: int


class _Row(NamedTuple):
    """An op: its event, when the CPU called for it and had issued it, in ns, what it is and its queue."""

    span: _Span
    called: int
    issued: int
    what: What
    queue: str


def read(path: Path, model: ModelSpec, workload: Workload) -> Recording:
    """Read a recorded step of training `model`; `workload` is what one step was.

    Kernels and device-to-device copies stand on the compute stream, copies to and from the host on theirs, and
    the CPU's optimizer on `cpu`: ops that launch nothing, of an optimizer's step whose kernels lasted no longer. Where
    nothing ran on a GPU, the CPU's outermost ops stand for the kernels. What the optimizer's step launched is an
    update, what autograd's engine launched backward, the rest forward.

    Raises:
        RecordingError: the file is no such recording, nothing was recorded in it, or work of several GPUs.
        OSError: the file cannot be read.
    """
    body = _document(path)
    spans = _spans(body, path)
    steps, count = _steps(spans, path)
    begin, end = steps[0].begin, steps[-1].end
    launched = [s for s in spans if s.category in _LAUNCHES]
    launches: dict[str | None, _Span] = {s.correlation: s for s in launched if s.correlation is not None}
    contexts, launching = _Contexts(spans), _by_thread(launched)
    on_gpu = [s for s in spans if s.category in _ON_GPU]
    devices = sorted({plain(str(s.args["device"])) for s in on_gpu if "device" in s.args})
    if len(devices) > 1:
        raise RecordingError(f"{path} records work of GPUs {', '.join(devices)}: only what one GPU did can be read")
    rows = list[_Row]()
    kernels_ns = Counter[int | None]()  # by optimizer's step
    for span in on_gpu:
        launch = launches.get(span.correlation)
        called = (launch or span).start
        if not begin <= called < end:
            continue
        issued = min(launch.end, span.start) if launch else span.start
        rows.append(_Row(span, called, issued, _on_gpu(span, contexts.of(launch or span)), _queue(span)))
        if launch and span.category == "kernel":
            kernels_ns[contexts.begin(_OPTIMIZER, launch)] += span.end - span.start
    on_cpu = list(_outermost([s for s in spans if s.category == "cpu_op"], begin, end))
    if on_gpu:
        updates = [s for s in on_cpu if contexts.of(s)[1] == Phase.ADAM and not _launches_any(s, launching)]
        updates_ns = Counter[int | None]()
        for span in updates:
            updates_ns[contexts.begin(_OPTIMIZER, span)] += span.end - span.start
        on_cpu = [s for s in updates if kernels_ns[at := contexts.begin(_OPTIMIZER, s)] <= updates_ns[at]]
    for span in on_cpu:
        kind, phase = contexts.of(span)
        where = Stream.CPU if kind == Kind.UPDATE else Stream.COMPUTE
        rows.append(_Row(span, span.start, span.start, (kind, phase, where), f"thread {span.thread}"))
    if not rows:
        raise RecordingError(f"{path} records no work: neither kernels and copies nor CPU ops")
    name, begin, end, rows = _typical_step(steps, rows)
    rows.sort(key=lambda row: (row.issued, row.span.start))
    in_turn = not on_gpu and all(row.span.end <= after.span.start for row, after in pairwise(rows))
    schedule = _schedule(rows, model, workload, in_turn=in_turn)
    return Recording(
        schedule=schedule,
        trace=_trace(rows, schedule, begin, _machine(body, spans), in_turn=in_turn),
        queues=tuple(row.queue for row in rows),
        step_ns=end - begin,
        step=name,
        steps=count,
    )


def queues(recording: Recording) -> pd.DataFrame:
    """A row per CUDA stream or thread and kind of work on it: ops, time busy and idle, bytes and their rate."""
    import pandas as pd

    found: dict[tuple[str, str], list[int]] = {}
    for row, queue in enumerate(recording.queues):
        found.setdefault((queue, str(recording.schedule.ops[row].stream)), []).append(row)
    records = []
    for (queue, stream), rows in found.items():
        start, end = recording.trace.start_ns[rows], recording.trace.end_ns[rows]
        order = np.argsort(start, kind="stable")
        # one after another, since they share a queue; kernels of a CUDA graph may run beside each other in it
        reach = np.maximum.accumulate(end[order])
        gaps = np.clip(start[order][1:] - reach[:-1], 0, None)
        moved = sum(recording.schedule.ops[row].nbytes for row in rows)
        busy = int(reach[-1] - start[order][0] - gaps.sum())
        records.append(
            {
                "queue": queue,
                "stream": stream,
                "ops": len(rows),
                "busy_s": busy / 1e9,
                "idle_s": float(gaps.sum()) / 1e9,
                "longest_gap_s": float(gaps.max(initial=0)) / 1e9,
                "gb": moved / 1e9,
                "gb_per_s": moved / busy if moved and busy else float("nan"),
            }
        )
    return pd.DataFrame(records)


# ---- events


def _document(path: Path) -> Mapping[str, Any]:
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        body = json.loads(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:  # gzip's own errors are OSErrors
        raise RecordingError(f"{path} is not JSON, plain or gzipped: {error}") from None
    if isinstance(body, list):
        body = {"traceEvents": body}
    if not isinstance(body, dict) or not isinstance(body.get("traceEvents"), list):
        raise RecordingError(f"{path} has no traceEvents: it is not what torch.profiler's export_chrome_trace writes")
    return body


def _spans(body: Mapping[str, Any], path: Path) -> list[_Span]:
    """Complete events ("X"), by start; those that enclose others first."""
    found = []
    for event in body["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        try:
            span = _span(event)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RecordingError(f"{path}: an event has no name or time of its own: {error!r}: {event}") from None
        found.append(span)
    return sorted(found, key=lambda span: (span.start, -span.end))


def _span(event: Event) -> _Span:
    start = round(float(event["ts"]) * 1000)
    end = start + max(round(float(event.get("dur", 0)) * 1000), 0)
    if not -_FOREVER < start <= end < _FOREVER:
        raise ValueError("a time beyond all clocks")
    args = event.get("args") or {}
    if not isinstance(args, dict):
        raise ValueError(f"args must be an object, not {args!r}")
    return _Span(
        name=plain(str(event["name"])),
        category=str(event.get("cat", "")).lower(),
        thread=plain(str(event.get("tid"))),
        start=start,
        end=end,
        nbytes=max(int(args.get("bytes", 0)), 0),
        correlation=str(args["correlation"]) if "correlation" in args else None,
        args=args,
    )


def _machine(body: Mapping[str, Any], spans: Sequence[_Span]) -> str:
    devices = body.get("deviceProperties")
    if not isinstance(devices, list) or not devices:
        return "a GPU" if any(span.category in _ON_GPU for span in spans) else "a CPU"
    return plain(str(devices[0].get("name", "a GPU"))) if isinstance(devices[0], dict) else "a GPU"


def _steps(spans: Sequence[_Span], path: Path) -> tuple[list[_Step], int]:
    """(the marked steps, 1); without marks all of it as one, with the number of steps in it."""
    # a mark's copy on the GPU's side says nothing new
    marks = [s for s in spans if s.name.startswith(_STEP) and s.category == "user_annotation"]
    if marks:
        ends = [s.start for s in marks[1:]] + [marks[-1].end]
        return [_Step(mark.name, mark.start, end) for mark, end in zip(marks, ends, strict=True)], 1
    work = [s for s in spans if s.category in (*_ON_GPU, *_LAUNCHES, "cpu_op", "user_annotation")]
    if not work:
        raise RecordingError(f"{path} records no work: neither kernels and copies nor CPU ops")
    if (updates := sum(s.name.startswith(_OPTIMIZER) for s in spans)) > 1:
        warnings.warn(
            f"{path} has {updates} steps of an optimizer and no marks of steps: what is told is of all of them "
            "together; record with torch.profiler.schedule, which marks each",
            stacklevel=2,
        )
    begin, end = min(s.start for s in work), max(s.end for s in work) + 1
    return [_Step("the whole recording", begin, end)], max(updates, 1)


def _typical_step(steps: Sequence[_Step], rows: Sequence[_Row]) -> tuple[str, int, int, list[_Row]]:
    """(its name, when it began and ended, its ops) of the step of median length; see Recording.step_ns."""
    found = []
    for step in steps:
        if own := [row for row in rows if step.begin <= row.called < step.end]:
            found.append((step, max(row.span.end for row in own), own))
    (first, ended, own), *later = found
    lasted = []
    before = ended
    for step, end, ops in later:
        if end > before:
            lasted.append((step.name, before, end, ops))
            before = end
    if lasted:
        return sorted(lasted, key=lambda step: step[2] - step[1])[(len(lasted) - 1) // 2]
    begin = first.begin if ended <= first.end else min(row.span.start for row in own)
    return first.name, begin, max(ended, begin + 1), own  # in no time at all there would be no rate


class _Contexts:
    """On whose behalf something was launched: the optimizer's, the backward pass's, or else the forward's."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._found: dict[tuple[Any, str], tuple[list[int], list[int]]] = {}
        for span in spans:
            for word in (_OPTIMIZER, _ZERO, _BACKWARD):
                if span.name.startswith(word) and span.category in ("cpu_op", "user_annotation"):
                    starts, ends = self._found.setdefault((span.thread, word), ([], []))
                    starts.append(span.start)
                    ends.append(max([span.end, *ends[-1:]]))

    def of(self, span: _Span) -> tuple[Kind, Phase]:
        for word, what in (
            (_OPTIMIZER, (Kind.UPDATE, Phase.ADAM)),
            (_ZERO, (Kind.UPDATE, Phase.ZERO)),
            (_BACKWARD, (Kind.COMPUTE, Phase.BACKWARD)),
        ):
            if self.begin(word, span) is not None:
                return what
        return Kind.COMPUTE, Phase.FORWARD

    def begin(self, word: str, span: _Span) -> int | None:
        """When the last range of that name began within which the span begins, ns; None where there is none."""
        starts, ends = self._found.get((span.thread, word), ([], []))
        at = bisect_right(starts, span.start) - 1
        return starts[at] if at >= 0 and span.start < max(ends[at], starts[at] + 1) else None


def _on_gpu(span: _Span, context: tuple[Kind, Phase]) -> What:
    if span.category == "gpu_memcpy":
        if "HtoD" in span.name or "HostToDevice" in span.name:
            return Kind.PREFETCH, Phase.COPY, Stream.H2D
        if "DtoH" in span.name or "DeviceToHost" in span.name:
            return Kind.OFFLOAD, Phase.COPY, Stream.D2H
        return Kind.PREFETCH, Phase.COPY, Stream.COMPUTE
    if span.category == "gpu_memset":
        return Kind.UPDATE, Phase.ZERO, Stream.COMPUTE
    return *context, Stream.COMPUTE


def _queue(span: _Span) -> str:
    return plain(f"stream {span.args.get('stream', span.thread)}")


def _outermost(spans: Sequence[_Span], begin: int, end: int) -> Iterable[_Span]:
    """Of each thread's ops within a step, those that no other op encloses."""
    reach: dict[Any, int] = {}
    for span in spans:
        if begin <= span.start < end and span.start >= reach.get(span.thread, begin):
            reach[span.thread] = span.end
            yield span


def _by_thread(spans: Sequence[_Span]) -> dict[Any, list[int]]:
    """Starts, sorted, per thread."""
    found: dict[Any, list[int]] = {}
    for span in spans:
        found.setdefault(span.thread, []).append(span.start)
    return found


def _launches_any(span: _Span, launching: Mapping[Any, list[int]]) -> bool:
    """Whether something was launched, or the GPU waited for, within an op of the CPU."""
    starts = launching.get(span.thread, [])
    at = bisect_left(starts, span.start)
    return at < len(starts) and starts[at] < span.end


# ---- schedule and trace


def _schedule(rows: Sequence[_Row], model: ModelSpec, workload: Workload, *, in_turn: bool) -> Schedule:
    """`in_turn`: the CPU ran one op after another, so that nothing was issued while it worked."""
    ops = tuple(
        Op(
            name=f"{number} {span.name[:_NAME_LENGTH]}",
            kind=kind,
            phase=phase,
            stream=stream,
            nbytes=span.nbytes if phase == Phase.COPY else 0,
            blocking=in_turn,
        )
        for number, (span, _, _, (kind, phase, stream), _) in enumerate(rows)
    )
    return Schedule(ops=ops, buffers=(), waits=(), model=model, workload=workload, policy=RECORDED)


def _trace(rows: Sequence[_Row], schedule: Schedule, begin: int, machine: str, *, in_turn: bool) -> Trace:
    """What released an op is not recorded: it is taken to be the op in front of it on its CUDA stream, where that
    one ended after the op was issued; or of a CPU's ops `in_turn` the one before."""
    before: dict[str, int] = {}
    waited = []
    for number, row in enumerate(rows):
        front = before.get(row.queue)
        late = front is not None and rows[front].span.end > row.issued
        waited.append(number - 1 if in_turn and number else front if front is not None and late else ISSUE)
        before[row.queue] = number
    count = len(rows)
    return Trace(
        digest=schedule.digest,
        machine=machine,
        source="measured",
        op=np.arange(count, dtype=np.int64),
        step=np.zeros(count, dtype=np.int64),
        issue_ns=np.array([row.issued - begin for row in rows], dtype=np.int64),
        start_ns=np.array([row.span.start - begin for row in rows], dtype=np.int64),
        end_ns=np.array([row.span.end - begin for row in rows], dtype=np.int64),
        waited_on=np.array(waited, dtype=np.int64),
    )

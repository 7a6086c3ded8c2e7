"""Traces: periods, idle causes and live bytes, by hand; files that round-trip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedules import codec
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.trace import COLUMNS, ISSUE, Trace, TraceError
from schedules.workload import Workload


def op(name: str, stream: Stream, reads: str = "", writes: str = "") -> Op:
    return Op(
        name=name,
        kind=Kind.PREFETCH,
        phase=Phase.COPY,
        stream=stream,
        reads=tuple(Access(b, "w.0") for b in reads),
        writes=tuple(Access(b, "w.0") for b in writes),
    )


@pytest.fixture
def schedule() -> Schedule:
    """A copy into slot a, and a computation that reads it and writes b."""
    return Schedule(
        ops=(op("P", Stream.H2D, writes="a"), op("F", Stream.COMPUTE, reads="a", writes="b")),
        buffers=(Buffer(name="a", tier=Tier.DEVICE, nbytes=10), Buffer(name="b", tier=Tier.DEVICE, nbytes=5)),
        waits=(),
        model=load("tiny"),
        workload=Workload(micro_batch_size=1, seq_len=8),
        policy="two",
    )


@pytest.fixture
def trace(schedule: Schedule) -> Trace:
    """Copies take 10 and computations 30; the second copy waits for the first computation."""

    def column(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return Trace(
        digest=schedule.digest,
        machine="by hand",
        source="predicted",
        op=column(0, 1, 0, 1, 0, 1),
        step=column(0, 0, 1, 1, 2, 2),
        issue_ns=column(1, 2, 3, 4, 5, 6),
        start_ns=column(1, 11, 41, 51, 81, 91),
        end_ns=column(11, 41, 51, 81, 91, 121),
        waited_on=column(ISSUE, 0, 1, 2, 3, 4),
    )


def test_step_ends_and_period(trace: Trace) -> None:
    assert trace.steps == 3
    assert trace.step_end_ns.tolist() == [41, 81, 121]
    assert trace.step_ns(warmup=0).tolist() == [40, 40]
    with pytest.raises(TraceError, match="too few"):
        trace.step_ns(warmup=2)


def test_busy_and_idle_add_up_and_idle_has_a_cause(schedule: Schedule, trace: Trace) -> None:
    window = (0, 121)
    assert trace.busy_ns(schedule, Stream.H2D, window) == 30
    assert trace.busy_ns(schedule, Stream.COMPUTE, window) == 90
    assert trace.idle_causes_ns(schedule, Stream.H2D, window) == {"issue": 1, "compute": 60, "end": 30}
    assert trace.idle_causes_ns(schedule, Stream.COMPUTE, window) == {"h2d": 31}
    assert trace.busy_ns(schedule, Stream.COMPUTE, (20, 60)) == 30
    assert trace.idle_causes_ns(schedule, Stream.COMPUTE, (20, 60)) == {"h2d": 10}


def test_live_bytes_by_hand(schedule: Schedule, trace: Trace) -> None:
    moments, nbytes = trace.live_bytes(schedule, Tier.DEVICE)
    at = dict(zip(moments.tolist(), nbytes.tolist(), strict=True))
    assert at[1] == 10  # a is being filled
    assert at[11] == 15  # a is read, b is being written
    assert at[41] == 10  # nobody reads b; a is filled anew
    assert at[121] == 0
    assert max(at.values()) <= schedule.allocated_bytes(Tier.DEVICE)
    assert trace.live_bytes(schedule, Tier.HOST)[1].tolist() == [0]


def test_a_trace_file_round_trips(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "t.json")
    again = Trace.read(tmp_path / "t.json")
    assert again.digest == trace.digest and again.machine == "by hand" and again.source == "predicted"
    assert again.end_ns.tolist() == trace.end_ns.tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format": "megatrain-trace/9"}', "[1]", '{"format": "megatrain-trace/1"}']
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"t\.json is (not|empty, not) a trace"):
        Trace.read(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"format": "megatrain-trace/1", "dig', r"not JSON at line 1, column 33: .* \(is the file cut off\?\)"),
        ('{"format": "megatrain-trace/1"}', "the field 'source' is missing"),
        ('{"format": "megatrain-trace/1", "source": "measured", "columns": 3}', "its fields are not what is written"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told_in_words(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=f"is not a trace of format megatrain-trace/1: {told}"):
        Trace.read(tmp_path / "t.json")


def test_a_trace_of_a_later_format_is_refused_though_all_else_is_there(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace.save(path)
    path.write_text(path.read_text().replace("megatrain-trace/1", "megatrain-trace/9"))
    with pytest.raises(TraceError, match=r"is not a trace of format megatrain-trace/1: .*megatrain-trace/9"):
        Trace.read(path)


def test_a_schedule_in_place_of_a_trace_is_told_as_what_it_is(schedule: Schedule, tmp_path: Path) -> None:
    codec.save(schedule, tmp_path / "step.json")
    with pytest.raises(TraceError, match=r"step\.json is a schedule, not a trace"):
        Trace.read(tmp_path / "step.json")


def test_a_file_that_is_not_text_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"t\.json is not text"):
        Trace.read(path)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("digest", 3, "digest 3"),
        ("source", "guessed", "source 'guessed'"),
        ("machine", None, "machine None"),
        ("machine", "\x1b[31mred", "machine .*x1b"),
        ("op", [-1, 1, 0, 1, 0, 1], "column op holds what is no op"),
        (
            "step",
            [0, 0, 1, 1, 2, 10**18],
            "column step holds what is no step",
        ),  # a table of all steps takes 8 bytes each
        ("waited_on", [6, -1, -1, -1, -1, -1], "column waited_on holds what is no row"),
        ("waited_on", [-2, -1, -1, -1, -1, -1], "column waited_on holds what is no row"),
        ("end_ns", [0] * 6, "an op ends before it starts"),
        ("op", [[0], [1], [0], [1], [0], [1]], "a column is a list"),
        ("op", [0.5, 1, 0, 1, 0, 1], "a column is a list of whole numbers"),
        ("end_ns", [10.0**9] * 6, "a column is a list of whole numbers"),
        ("op", [False, True, False, True, False, True], "a column is a list of whole numbers"),
        ("end_ns", [2**63] * 6, "a column is a list of whole numbers"),
    ],
)
def test_a_file_that_was_changed_is_refused(field: str, value: object, told: str, trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace.save(path)
    body = json.loads(path.read_text())
    (body["columns"] if field in COLUMNS else body)[field] = value
    path.write_text(json.dumps(body))
    with pytest.raises(TraceError, match=told):
        Trace.read(path)


def test_an_op_that_the_schedule_lacks_is_refused(schedule: Schedule, trace: Trace) -> None:
    with pytest.raises(TraceError, match="the trace has op 2, and its schedule 2: it was changed since"):
        replace(trace, op=trace.op + 1).check(schedule)


def test_a_trace_of_another_schedule_is_refused(schedule: Schedule, trace: Trace) -> None:
    trace.check(schedule)
    other = Schedule(
        ops=schedule.ops[:1],
        buffers=schedule.buffers,
        waits=(),
        model=schedule.model,
        workload=schedule.workload,
        policy="one",
    )
    with pytest.raises(TraceError, match="the trace is of schedule"):
        trace.check(other)

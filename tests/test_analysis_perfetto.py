"""Timelines: the file holds the traces, its arrows are pairs that point forward, its counters make sense."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import perfetto
from schedules import policies, presets
from schedules.errors import InputError
from schedules.op import Kind, Op, Phase, Stream, Tier, Wait
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Trace, TraceError
from schedules.workload import Workload
from sim.cost import Terms
from sim.engine import simulate
from sim.hardware import load
from sim.prediction import memory_of


@pytest.fixture(scope="module")
def runs() -> list[tuple[Schedule, Trace]]:
    """One schedule, predicted, and as if it had been measured on another day."""
    profile = load("h200")
    workload = Workload(micro_batch_size=2, accumulation=2, seq_len=64)
    schedule = policies.build("zero3_offload", presets.load("tiny"), workload, memory_of(profile))
    predicted = simulate(schedule, profile, steps=3)
    noisy = simulate(schedule, profile, steps=3, terms=Terms(noise=0.2), seed=7)
    return [(schedule, predicted), (schedule, replace(noisy, source="measured", machine="here"))]


@pytest.fixture(scope="module")
def events(runs: list[tuple[Schedule, Trace]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("perfetto") / "timeline.json"
    perfetto.write(path, runs)
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def ns(event: dict[str, Any], key: str = "ts") -> int:
    return round(event[key] * 1000)


def test_slices_are_the_rows_of_the_traces(runs: list[tuple[Schedule, Trace]], events: list[dict[str, Any]]) -> None:
    for pid, (schedule, trace) in enumerate(runs, start=1):
        tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        assert [(e["name"], tracks[e["tid"]], e["args"]["step"], ns(e), ns(e) + ns(e, "dur")) for e in slices] == [
            (
                schedule.ops[op].name,
                str(schedule.ops[op].stream),
                int(trace.step[row]),
                int(trace.start_ns[row]),
                int(trace.end_ns[row]),
            )
            for row, op in enumerate(trace.op.tolist())
        ]


def test_runs_are_named_by_source_and_machine(events: list[dict[str, Any]]) -> None:
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["predicted on h200", "measured on here"]


def test_arrows_are_pairs_that_start_in_one_op_and_end_at_the_start_of_another(events: list[dict[str, Any]]) -> None:
    pairs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            pairs[event["id"]].append(event)
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((ns(event), ns(event) + ns(event, "dur")))
    assert pairs
    for pair in pairs.values():
        leave, arrive = pair
        assert (leave["ph"], arrive["ph"]) == ("s", "f")
        assert leave["pid"] == arrive["pid"]
        assert ns(leave) <= ns(arrive)
        inside = spans[leave["pid"], leave["tid"]]
        assert any(start <= ns(leave) < end or start == end == ns(leave) for start, end in inside)
        assert any(start == ns(arrive) for start, _ in spans[arrive["pid"], arrive["tid"]])


def test_there_is_an_arrow_for_every_wait_that_applies(
    runs: list[tuple[Schedule, Trace]], events: list[dict[str, Any]]
) -> None:
    expected = sum((trace.steps - wait.distance) for schedule, trace in runs for wait in schedule.waits)
    assert sum(e["ph"] == "s" for e in events) == expected


def test_counters_stay_between_zero_and_what_is_allocated(
    runs: list[tuple[Schedule, Trace]], events: list[dict[str, Any]]
) -> None:
    schedule = runs[0][0]
    for tier in (Tier.DEVICE, Tier.HOST):
        values = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == f"{tier} live bytes"]
        assert 0 <= min(values) < max(values) <= schedule.allocated_bytes(tier)


def test_copies_show_their_rate(runs: list[tuple[Schedule, Trace]], events: list[dict[str, Any]]) -> None:
    schedule, trace = runs[0]
    row = next(
        r for r, op in enumerate(trace.op.tolist()) if schedule.ops[op].nbytes and schedule.ops[op].phase == "copy"
    )
    shown = [e for e in events if e["ph"] == "X" and e["pid"] == 1][row]["args"]
    nbytes = schedule.ops[int(trace.op[row])].nbytes
    assert shown["bytes"] == nbytes
    assert shown["GB/s"] == pytest.approx(nbytes / int(trace.end_ns[row] - trace.start_ns[row]), abs=1e-3)


def test_no_slice_is_earlier_than_zero(runs: list[tuple[Schedule, Trace]], tmp_path: Path) -> None:
    """Where an op began 5 us before its step, all of that run is drawn as much later."""
    schedule, trace = runs[0]
    late = 5000 + int(trace.start_ns.min())
    early = replace(trace, **{name: getattr(trace, name) - late for name in ("issue_ns", "start_ns", "end_ns")})
    perfetto.write(tmp_path / "t.json", [(schedule, early)])
    slices = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [ns(e) for e in slices] == (trace.start_ns - trace.start_ns.min()).tolist()


def test_slices_that_overlap_stand_on_tracks_of_their_own(runs: list[tuple[Schedule, Trace]], tmp_path: Path) -> None:
    """As ops of a recording may, and here the first two of a stream; the third is on the first track again."""
    op = Op(name="a", kind=Kind.COMPUTE, phase=Phase.FORWARD, stream=Stream.COMPUTE)
    ops = (op, replace(op, name="b"), replace(op, name="copy", stream=Stream.D2H), replace(op, name="c"))
    schedule = replace(runs[0][0], ops=ops, buffers=(), waits=tuple(Wait(op=op, on="b") for op in ("copy", "c")))
    zero, start = np.zeros(4, dtype=np.int64), np.array([0, 5, 20, 15])
    columns = {"op": np.arange(4), "step": zero, "issue_ns": zero, "waited_on": zero + ISSUE}
    trace = Trace(
        digest=schedule.digest, machine="x", source="measured", **columns, start_ns=start, end_ns=start + 10
    )  # fmt: skip
    perfetto.write(tmp_path / "t.json", [(schedule, trace)])
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "compute 2", "d2h"]
    drawn = {e["name"]: tracks[e["tid"]] for e in found if e["ph"] == "X"}
    assert drawn == {"a": "compute", "b": "compute 2", "copy": "d2h", "c": "compute"}
    arrows = [tracks[e["tid"]] for e in found if e["ph"] in "sf"]
    assert arrows == ["compute 2", "d2h", "compute 2", "compute"]


def test_a_trace_of_another_schedule_is_refused(runs: list[tuple[Schedule, Trace]], tmp_path: Path) -> None:
    schedule, trace = runs[0]
    with pytest.raises(TraceError, match="is of schedule"):
        perfetto.write(tmp_path / "t.json", [(schedule, replace(trace, digest="0" * 64))])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file_is_told(runs: list[tuple[Schedule, Trace]], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*timeline\.json"):
        perfetto.write(tmp_path / "taken" / "timeline.json", runs)

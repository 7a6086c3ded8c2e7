"""Chakra execution traces: the bytes of the schema, what a node says, and that files read back as they were."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import networkx
import numpy as np
import pytest
from command import megatrain

from analysis import chakra, chakra_wire
from analysis.chakra import ChakraError
from analysis.chakra_wire import COMP_NODE, MEM_LOAD_NODE, MEM_STORE_NODE, Node
from schedules import codec, policies, presets
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import RECORDED, Schedule
from schedules.trace import ISSUE, Trace, TraceError
from schedules.workload import Workload
from sim.engine import simulate
from sim.hardware import load
from sim.prediction import memory_of


@pytest.fixture(scope="module", params=["streamed", "megatrain_released", "zero3_offload"])
def schedule(request: pytest.FixtureRequest) -> Schedule:
    workload = Workload(micro_batch_size=2, accumulation=2, seq_len=64)
    return policies.build(request.param, presets.load("tiny"), workload, memory_of(load("h200")))


def test_bytes_of_a_node_by_hand() -> None:
    """Keys are field number * 8 + wire type; 300 is AC 02 as a varint; -1 is ten bytes."""
    node = Node(
        id=300, name="P", type=MEM_LOAD_NODE, ctrl_deps=(1, 300), data_deps=(2,), duration_micros=5,
        attributes=(("layer", -1), ("is_cpu_op", False)),
    )  # fmt: skip
    layer = "0a 05 6c 61 79 65 72" + "48 ff ff ff ff ff ff ff ff ff 01"
    is_cpu = "0a 09 69 73 5f 63 70 75 5f 6f 70" + "d8 01 00"
    expected = f"08 ac02  12 01 50  18 02  22 03 01 ac02  2a 01 02  38 05  52 12 {layer}  52 0e {is_cpu}"
    assert chakra_wire.node_bytes(node) == bytes.fromhex(expected)
    assert chakra_wire.node_of_bytes(chakra_wire.node_bytes(node)) == node


@pytest.mark.parametrize("name", ["step.et", "step.json"])
def test_a_file_reads_back_as_it_was(schedule: Schedule, tmp_path: Path, name: str) -> None:
    trace = simulate(schedule, load("h200"), steps=2)
    for run in (None, trace):
        expected = chakra.nodes(schedule, run)
        assert chakra.write(tmp_path / name, schedule, run) == len(expected)
        assert chakra.read(tmp_path / name) == expected


def test_json_is_protobufs_own(schedule: Schedule, tmp_path: Path) -> None:
    chakra.write(tmp_path / "step.json", schedule)
    head, first, *rest = [json.loads(line) for line in (tmp_path / "step.json").read_text().splitlines()]
    assert set(head) == {"version", "attr"}
    assert {"name": "digest", "stringVal": schedule.digest} in head["attr"]
    assert "id" not in first  # zero is left out
    assert [row["id"] for row in rest] == [str(n) for n in range(1, len(schedule.ops))]
    assert all(isinstance(n, str) for row in rest for n in row.get("ctrlDeps", []))
    sizes = [a for row in rest for a in row["attr"] if a["name"] == "tensor_size"]
    assert all(a["uint64Val"].isdigit() for a in sizes)


def test_types_and_amounts(schedule: Schedule) -> None:
    for op, node in zip(schedule.ops, chakra.nodes(schedule), strict=True):
        attributes = dict(node.attributes)
        assert (attributes["num_ops"], attributes["tensor_size"]) == (op.flops, op.nbytes)
        of_op = {
            "stream": op.stream,
            "kind": op.kind,
            "phase": op.phase,
            "layer": op.layer,
            "micro_batch": op.microbatch,
        }
        assert {k: attributes.get(k) for k in of_op} == of_op
        assert attributes["is_cpu_op"] == (op.stream in (Stream.CPU, Stream.HOST))
        if op.phase == Phase.COPY and op.stream in (Stream.H2D, Stream.D2H):
            assert node.type == (MEM_LOAD_NODE if op.kind == Kind.PREFETCH else MEM_STORE_NODE)
        if op.kind in (Kind.COMPUTE, Kind.UPDATE):
            assert node.type == COMP_NODE


@pytest.mark.parametrize("name", ["zero_offload", "gemini", "megatrain_released"])
def test_a_copy_is_one_whatever_it_is_queued_on_and_within_the_device_a_kernel(name: str) -> None:
    """These queue copies over the link on the compute stream, or copy there within the device."""
    step = Workload(micro_batch_size=1, seq_len=16)
    made = policies.build(name, presets.load("tiny"), step, memory_of(load("h200")))
    types = {(Tier.HOST, Tier.DEVICE): MEM_LOAD_NODE, (Tier.DEVICE, Tier.HOST): MEM_STORE_NODE}
    found = [(op, node.type) for op, node in zip(made.ops, chakra.nodes(made), strict=True) if op.phase == Phase.COPY]
    assert any(op.stream == Stream.COMPUTE for op, _ in found)
    assert all(kind == types.get(made.route(op), COMP_NODE) for op, kind in found)


def test_dependencies_imply_every_wait_and_point_back(schedule: Schedule) -> None:
    """Over two steps; reading what another wrote is data, and only that."""
    trace = simulate(schedule, load("h200"), steps=2)
    found = chakra.nodes(schedule, trace)
    graph = networkx.DiGraph((on, node.id) for node in found for on in (*node.ctrl_deps, *node.data_deps))
    assert networkx.is_directed_acyclic_graph(graph)
    count = len(schedule.ops)
    for wait in schedule.waits:
        op, on = schedule.index[wait.op], schedule.index[wait.on]
        node = found[count + op]
        assert (1 - wait.distance) * count + on in (*node.ctrl_deps, *node.data_deps)
    for node in found:
        op = schedule.ops[node.id % count]
        for on in node.data_deps:
            written = {access.tensor for access in schedule.ops[on % count].writes}
            assert written & {access.tensor for access in op.reads}
    for ops in schedule.streams.values():
        for before, after in pairwise(ops):
            assert networkx.has_path(graph, schedule.index[before.name], schedule.index[after.name])


def test_what_the_host_waited_for_comes_before_what_it_issues_next(schedule: Schedule) -> None:
    found = chakra.nodes(schedule)
    for place, (before, op) in enumerate(pairwise(schedule.ops)):
        if before.blocking or before.stream == Stream.HOST:
            node = found[place + 1]
            assert place in (*node.ctrl_deps, *node.data_deps), (before.name, op.name)


def test_times_are_those_of_the_run(schedule: Schedule) -> None:
    trace = simulate(schedule, load("h200"), steps=2)
    for row, node in enumerate(chakra.nodes(schedule, trace)):
        attributes = dict(node.attributes)
        assert attributes["start_ns"] == trace.start_ns[row]
        assert attributes["duration_ns"] == trace.end_ns[row] - trace.start_ns[row]
        assert node.start_time_micros == trace.start_ns[row] // 1000


def test_what_is_no_such_file_is_told(schedule: Schedule, tmp_path: Path) -> None:
    chakra.write(tmp_path / "step.et", schedule)
    (tmp_path / "cut.et").write_bytes((tmp_path / "step.et").read_bytes()[:-3])
    (tmp_path / "bad.json").write_text('{}\n{"name": 1}\n')
    for name in ("cut.et", "bad.json"):
        with pytest.raises(ChakraError, match=name):
            chakra.read(tmp_path / name)


def test_the_command_exports_a_step_and_a_run(schedule: Schedule, tmp_path: Path) -> None:
    step, run = tmp_path / "step.json", tmp_path / "run.json"
    codec.save(schedule, step)
    trace = simulate(schedule, load("h200"), steps=3)
    trace.save(run)
    done = megatrain("export", str(step), "--chakra", str(tmp_path / "a.et"))
    assert done.returncode == 0, done.stderr
    assert len(chakra.read(tmp_path / "a.et")) == len(schedule.ops)
    assert megatrain("export", str(step), "--chakra", str(tmp_path / "b.json"), "--trace", str(run)).returncode == 0
    assert len(chakra.read(tmp_path / "b.json")) == 3 * len(schedule.ops)


def test_a_run_of_another_schedule_is_refused(schedule: Schedule) -> None:
    other = policies.build("resident", presets.load("tiny"), schedule.workload, memory_of(load("h200")))
    with pytest.raises(TraceError):
        chakra.nodes(schedule, simulate(other, load("h200"), steps=1))


def recorded(starts: list[int], lasts: int) -> tuple[Schedule, Trace]:
    """Kernels of so many ns each."""
    ops = tuple(
        Op(name=str(number), kind=Kind.COMPUTE, phase=Phase.FORWARD, stream=Stream.COMPUTE)
        for number in range(len(starts))
    )
    model, workload = presets.load("tiny"), Workload(micro_batch_size=1, seq_len=8)
    schedule = Schedule(ops=ops, buffers=(), waits=(), model=model, workload=workload, policy=RECORDED)
    zero, start = np.zeros(len(ops), dtype=np.int64), np.array(starts)
    columns = {"op": np.arange(len(ops)), "step": zero, "issue_ns": zero, "waited_on": zero + ISSUE}
    spans = {"start_ns": start, "end_ns": start + lasts}
    return schedule, Trace(digest=schedule.digest, machine="x", source="measured", **columns, **spans)


def test_ops_of_a_recording_that_overlapped_do_not_depend_on_each_other() -> None:
    """Of two CUDA streams, in turns: the third and the fourth follow the one that had ended."""
    schedule, trace = recorded([0, 5, 10, 16], lasts=10)
    assert [node.ctrl_deps for node in chakra.nodes(schedule, trace)] == [(), (), (0,), (1,)]
    assert [node.ctrl_deps for node in chakra.nodes(schedule)] == [(), (0,), (1,), (2,)]


@pytest.mark.parametrize("name", ["run.et", "run.json"])
def test_an_op_that_began_before_its_step_begins_the_file(tmp_path: Path, name: str) -> None:
    """5 us before the step, as copies beside the end of the step before do: the file's times have no sign."""
    chakra.write(tmp_path / name, *recorded([-5000, 35_000], lasts=40_000))
    found = chakra.read(tmp_path / name)
    assert [(node.start_time_micros, dict(node.attributes)["start_ns"]) for node in found] == [(0, 0), (40, 40_000)]

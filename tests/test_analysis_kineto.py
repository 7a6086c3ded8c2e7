"""Recordings of the PyTorch profiler: events by hand in Kineto's form, and a real one of the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import megatrain

from analysis import kineto, tables, trace_diff
from analysis.kineto import Recording, RecordingError
from schedules import codec, presets
from schedules.errors import Refused
from schedules.op import Kind, Phase, Stream
from schedules.trace import ISSUE, Trace
from schedules.verify import verify
from schedules.workload import Workload

TINY, STEP = presets.load("tiny"), Workload(micro_batch_size=2, seq_len=16)
MAIN, AUTOGRAD = 100, 101  # threads


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(
    correlation: int, at: float, cat: str, name: str, ts: float, dur: float, stream: int, tid: int = MAIN, **args: Any
) -> list[dict[str, Any]]:
    """A launch by the CPU of 2 us, and what it launched."""
    call = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
    args = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return [
        event("cuda_runtime", call, at, 2, tid, correlation=correlation, cbid=211),
        {**event(cat, name, ts, dur, stream, **args), "pid": 0},
    ]


def gpu_step(begin: float, number: int, late: float = 0.0) -> list[dict[str, Any]]:
    """A step of 200 us: weights up on stream 13, two kernels on 7, gradients down on 17, Adam on the CPU."""
    c = 10 * number
    adam = begin + 150
    return [
        event("user_annotation", f"ProfilerStep#{number}", begin, 200),
        *launched(c, begin, "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin + 5, 40, 13, bytes=2_000_000),
        *launched(c + 1, begin + 4, "kernel", "ampere_bf16_s16816gemm", begin + 46, 20 + late, 7),
        *launched(c + 2, begin + 8, "kernel", "flash_fwd_kernel", begin + 66 + late, 10, 7),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 10, 20, AUTOGRAD),
        event("cpu_op", "MmBackward0", begin + 11, 18, AUTOGRAD),
        *launched(c + 3, begin + 12, "kernel", "ampere_bf16_dgrad", begin + 90, 30, 7, AUTOGRAD),
        *launched(
            c + 4,
            begin + 15,
            "gpu_memcpy",
            "Memcpy DtoH (Device -> Pinned)",
            begin + 120,
            20,
            17,
            AUTOGRAD,
            bytes=10**6,
        ),
        *launched(c + 5, begin + 31, "gpu_memset", "Memset (Device)", begin + 125, 1, 7),
        event("user_annotation", "Optimizer.step#AdamW.step", adam, 40),
        event("cpu_op", "aten::_fused_adamw_", adam + 2, 30),
        event("cpu_op", "aten::empty", adam + 3, 1),
        event("cpu_op", "aten::to", adam + 33, 4),
        *launched(c + 6, adam + 34, "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", adam + 36, 5, 7, bytes=1000),
    ]


def write(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    noise = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 1, "tid": MAIN, "ts": 1},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "tid": "PyTorch Profiler", "ts": 0, "dur": 9999},
    ]
    body = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], **more}
    path.write_text(json.dumps({**body, "traceEvents": noise + events}))
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return kineto.read(write(tmp_path / "gpu.json", gpu_step(1000, 0)), TINY, STEP)


def rows(recording: Recording) -> list[tuple[str, str, str, int, int, int]]:
    trace, ops = recording.trace, recording.schedule.ops
    return [
        (str(op.stream), str(op.kind), str(op.phase), int(trace.start_ns[i]), int(trace.end_ns[i]), op.nbytes)
        for i, op in enumerate(ops)
    ]


def test_names_are_such_that_the_schedule_can_be_read_again(tmp_path: Path) -> None:
    """Ranges of a user's own may have any name."""
    odd = {**event("cpu_op", "my\nrange \x1b[31m \ud800", 1, 2), "tid": "\x07thread"}
    found = kineto.read(write(tmp_path / "cpu.json", [odd], deviceProperties=[{"name": "a \x1b GPU"}]), TINY, STEP)
    assert found.schedule.ops[0].name == "0 my?range ?[31m ?"
    assert (found.trace.machine, found.queues) == ("a ? GPU", ("thread ?thread",))
    codec.save(found.schedule, tmp_path / "schedule.json")
    found.trace.save(tmp_path / "trace.json")
    assert codec.read(tmp_path / "schedule.json") == found.schedule
    assert Trace.read(tmp_path / "trace.json").machine == found.trace.machine


def test_times_before_zero_are_times_like_others(recording: Recording, tmp_path: Path) -> None:
    early = kineto.read(write(tmp_path / "early.json", gpu_step(-5000, 0)), TINY, STEP)
    assert rows(early) == rows(recording)


def test_kernels_beside_each_other_on_a_stream_leave_no_gap(tmp_path: Path) -> None:
    """Those of a CUDA graph."""
    spans = ((0, 100), (10, 10), (120, 5))
    kernels = [
        one for c, (ts, dur) in enumerate(spans) for one in launched(c, 1000, "kernel", "k", 1010 + ts, dur, stream=7)
    ]
    found = kineto.read(write(tmp_path / "graph.json", kernels), TINY, STEP)
    (row,) = kineto.queues(found).to_dict("records")
    assert (row["busy_s"], row["idle_s"], row["longest_gap_s"]) == (105e-6, 20e-6, 20e-6)


def test_copies_kernels_and_the_cpus_adam_stand_on_their_streams(recording: Recording) -> None:
    assert rows(recording) == [
        ("h2d", "prefetch", "copy", 5_000, 45_000, 2_000_000),
        ("compute", "compute", "forward", 46_000, 66_000, 0),
        ("compute", "compute", "forward", 66_000, 76_000, 0),
        ("compute", "compute", "backward", 90_000, 120_000, 0),
        ("d2h", "offload", "copy", 120_000, 140_000, 1_000_000),
        ("compute", "update", "zero", 125_000, 126_000, 0),
        ("cpu", "update", "adam", 152_000, 182_000, 0),
        ("h2d", "prefetch", "copy", 186_000, 191_000, 1_000),
    ]
    assert recording.trace.machine == "NVIDIA H200" and recording.trace.source == "measured"
    assert recording.trace.issue_ns.tolist()[:3] == [2_000, 6_000, 10_000]


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("Memcpy HtoD (Pinned -> Device)", Stream.H2D),
        ("CopyHostToDevice", Stream.H2D),
        ("Memcpy DtoH (Device -> Pinned)", Stream.D2H),
        ("CopyDeviceToHost", Stream.D2H),
        ("Memcpy DtoD (Device -> Device)", Stream.COMPUTE),
    ],
)
def test_copies_are_known_by_cudas_names_and_by_hips(name: str, stream: Stream, tmp_path: Path) -> None:
    found = kineto.read(write(tmp_path / "one.json", launched(1, 10, "gpu_memcpy", name, 15, 5, 7)), TINY, STEP)
    (op,) = found.schedule.ops
    assert (op.phase, op.stream) == (Phase.COPY, stream)


def test_an_update_of_the_cpu_may_begin_with_its_step(tmp_path: Path) -> None:
    mark, *_ = gpu_step(1000, 0)
    events = [mark, event("user_annotation", "Optimizer.step#AdamW.step", 1000, 40), event("cpu_op", "adamw", 1000, 30)]
    found = kineto.read(write(tmp_path / "first.json", events), TINY, STEP)
    assert rows(found) == [("cpu", "update", "adam", 0, 30_000, 0)]


def test_an_update_of_no_length_is_of_the_optimizers_step_that_it_begins_with(tmp_path: Path) -> None:
    events = [event("user_annotation", "Optimizer.step#A", 1000, 0), event("cpu_op", "adamw", 1000, 0)]
    found = kineto.read(write(tmp_path / "short.json", events), TINY, STEP)
    assert rows(found) == [("cpu", "update", "adam", 0, 0, 0)]


def test_what_clears_gradients_within_the_optimizers_step_is_of_the_step(tmp_path: Path) -> None:
    marks = [
        event("user_annotation", "Optimizer.step#A", 1000, 100),
        event("user_annotation", "Optimizer.zero_grad#A", 1010, 50),
    ]
    kernel = launched(1, 1020, "kernel", "k", 1030, 10, 7)
    (op,) = kineto.read(write(tmp_path / "zero.json", marks + kernel), TINY, STEP).schedule.ops
    assert op.phase == Phase.ADAM


@pytest.mark.parametrize(("lasts", "shown"), [(500, []), (20, ["1 aten::_foreach_add_", "2 aten::detach"])])
def test_an_optimizer_is_the_cpus_where_its_kernels_lasted_no_longer(
    lasts: float, shown: list[str], tmp_path: Path
) -> None:
    """Beside 50 us of ops that launch nothing: AdamW that runs on the GPU, and a kernel beside the CPU's own."""
    events = [
        event("user_annotation", "Optimizer.step#AdamW.step", 1000, 100),
        event("cpu_op", "aten::_fused_adamw_", 1005, 10),
        *launched(1, 1006, "kernel", "multi_tensor_apply_kernel", 1020, lasts, 7),
        event("cpu_op", "aten::_foreach_add_", 1020, 30),
        event("cpu_op", "aten::detach", 1060, 20),
    ]
    found = kineto.read(write(tmp_path / "adam.json", events), TINY, STEP)
    assert [op.name for op in found.schedule.ops] == ["0 multi_tensor_apply_kernel", *shown]


def test_a_backward_goes_on_when_one_within_it_has_ended(tmp_path: Path) -> None:
    """As where a checkpoint's backward runs that of its block."""
    engine = "autograd::engine::evaluate_function: "
    marks = [
        event("cpu_op", f"{engine}CheckpointBackward", 1000, 100),
        event("cpu_op", f"{engine}MmBackward0", 1010, 10),
    ]
    kernel = launched(1, 1050, "kernel", "k", 1060, 10, 7)
    (op,) = kineto.read(write(tmp_path / "nested.json", marks + kernel), TINY, STEP).schedule.ops
    assert op.phase == Phase.BACKWARD


def test_of_two_ops_that_begin_at_once_the_longer_encloses_the_other(tmp_path: Path) -> None:
    events = [event("cpu_op", "inner", 1000, 5), event("cpu_op", "outer", 1000, 50)]
    (op,) = kineto.read(write(tmp_path / "cpu.json", events), TINY, STEP).schedule.ops
    assert op.name == "0 outer"


def test_categories_in_capitals_are_the_same(tmp_path: Path) -> None:
    found = kineto.read(write(tmp_path / "old.json", launched(1, 1000, "Kernel", "k", 1010, 10, 7)), TINY, STEP)
    assert found.queues == ("stream 7",)


def test_ops_stand_in_the_order_in_which_they_were_issued(tmp_path: Path) -> None:
    late, early = launched(1, 1000, "kernel", "late", 1100, 10, 7), launched(2, 1010, "kernel", "early", 1020, 10, 8)
    found = kineto.read(write(tmp_path / "two.json", late + early), TINY, STEP)
    assert [op.name for op in found.schedule.ops] == ["0 late", "1 early"]


def test_a_kernel_that_begins_before_its_launch_returns_was_issued_when_it_began(tmp_path: Path) -> None:
    found = kineto.read(write(tmp_path / "fast.json", launched(1, 1000, "kernel", "k", 1001, 10, 7)), TINY, STEP)
    assert found.trace.issue_ns[0] == found.trace.start_ns[0] == 1000


def test_an_op_issued_as_the_one_in_front_of_it_ends_is_released_by_its_issue(tmp_path: Path) -> None:
    first, second = launched(1, 1000, "kernel", "a", 1005, 5, 7), launched(2, 1008, "kernel", "b", 1010, 5, 7)
    found = kineto.read(write(tmp_path / "behind.json", first + second), TINY, STEP)
    assert found.trace.issue_ns[1] == found.trace.end_ns[0] and found.trace.waited_on[1] == ISSUE


def test_what_released_an_op_is_the_one_in_front_of_it_or_its_issue(recording: Recording) -> None:
    """The second kernel stood behind the first; the first had an idle GPU before it."""
    assert recording.trace.waited_on.tolist() == [ISSUE, ISSUE, 1, 2, ISSUE, 3, ISSUE, ISSUE]


def test_gaps_and_rates_per_cuda_stream(recording: Recording) -> None:
    table = kineto.queues(recording).set_index(["queue", "stream"])
    assert table["gb_per_s"]["stream 13", "h2d"] == pytest.approx(50.0)  # 2 MB in 40 us
    assert table["gb_per_s"]["stream 17", "d2h"] == pytest.approx(50.0)
    kernels = table.loc[("stream 7", "compute")]
    assert kernels["ops"] == 4
    assert kernels["busy_s"] == pytest.approx(61e-6)
    assert kernels["longest_gap_s"] == pytest.approx(14e-6)
    assert kernels["idle_s"] == pytest.approx(19e-6)
    assert ("thread 100", "cpu") in table.index


@pytest.mark.parametrize(
    ("gb", "told"),
    [(4e-9, "0.000000004"), (1.23456e-5, "0.00001235"), (1.6, "1.6"), (123456.7, "123,457"), (0.0, "0"), (None, "-")],
)
def test_bytes_are_told_without_powers_of_ten(gb: float | None, told: str) -> None:
    (cell,) = (column.cell for column in tables.QUEUES if column.heading == "GB")
    assert cell({"gb": gb}) == told


def test_of_several_steps_the_median_is_taken(tmp_path: Path) -> None:
    """The first aside, three steps: 273, 187 and 230 us from end to end; kernels count with the step that launched
    them."""
    events = gpu_step(1000, 0) + gpu_step(1200, 1, late=7) + gpu_step(1460, 2) + gpu_step(1690, 3, late=3)
    events += launched(99, 1450, "kernel", "late_kernel", 1463, 1, 7)  # of the second
    events.append(event("gpu_user_annotation", "ProfilerStep#0", 1000, 500, 7))
    found = kineto.read(write(tmp_path / "steps.json", events), TINY, STEP)
    assert found.step == "ProfilerStep#3" and found.step_ns == 230_000 and found.steps == 1
    assert len(found.trace) == 8 and found.trace.end_ns[1] - found.trace.start_ns[1] == 23_000
    assert found.trace.step_end_ns.tolist() == [230_000]


def behind(steps: int, apart: float, early: float = 0.0) -> list[dict[str, Any]]:
    """Steps marked so far `apart`, each of a copy and two kernels of 50 us; the GPU is always busy and begins 60 us
    after the CPU, or the copies `early`."""
    events = []
    for number in range(steps):
        begin, on_gpu = 1000 + apart * number, 1060 + 100 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, apart))
        copy = launched(3 * number, begin, "gpu_memcpy", "Memcpy HtoD", on_gpu - early, 30, 13, bytes=3)
        kernels = [launched(3 * number + k, begin + k, "kernel", "k", on_gpu + 50 * (k - 1), 50, 7) for k in (1, 2)]
        events += [*copy, *kernels[0], *kernels[1]]
    return events


@pytest.mark.parametrize(
    ("steps", "apart", "early"),
    [
        (3, 100, 0),  # the GPU lags by as much all the time
        (3, 40, 0),  # the CPU runs ahead
        (1, 100, 0),  # nothing tells when the step before ended
        (3, 100, 20),  # copies of a step run beside the end of the one before
    ],
)
def test_a_step_of_a_gpu_that_lags_behind_the_marks_begins_where_the_one_before_ended(
    steps: int, apart: float, early: float, tmp_path: Path
) -> None:
    found = kineto.read(write(tmp_path / "lag.json", behind(steps, apart, early)), TINY, STEP)
    assert found.step_ns == 100_000 and found.trace.step_end_ns.tolist() == [100_000]
    begins = -1000 * round(early)
    assert [row[:1] + row[3:5] for row in rows(found)] == [
        ("h2d", begins, begins + 30_000), ("compute", 0, 50_000), ("compute", 50_000, 100_000),
    ]  # fmt: skip


def test_a_launch_at_the_end_of_a_step_is_of_the_next(tmp_path: Path) -> None:
    begins = (1000, 1100, 1200)
    events = [event("user_annotation", f"ProfilerStep#{i}", begin, 100) for i, begin in enumerate(begins)]
    for i, begin in enumerate(begins):
        events += launched(i, begin, "kernel", f"k{i}", begin + 10, 10, 7)
    assert len(kineto.read(write(tmp_path / "edge.json", events), TINY, STEP).schedule.ops) == 1


def test_of_several_steps_without_marks_it_is_told_that_they_are_taken_as_one(tmp_path: Path) -> None:
    events = [e for i in range(3) for e in gpu_step(1000.0 * i, i) if not e["name"].startswith("ProfilerStep#")]
    with pytest.warns(UserWarning, match=r"has 3 steps of an optimizer and no marks of steps: .* of all of them"):
        found = kineto.read(write(tmp_path / "three.json", events, deviceProperties=[]), TINY, STEP)
    assert found.step == "the whole recording" and found.steps == 3 and found.trace.machine == "a GPU"


@pytest.mark.parametrize("mark", ["Optimizer.step#A", "ProfilerStep#0"])
def test_a_lone_step_ends_with_its_last_op_as_its_trace_does(mark: str, tmp_path: Path) -> None:
    """A range may end later, and so may the mark of a step."""
    events = [event("user_annotation", mark, 1000, 100), event("cpu_op", "aten::mm", 1010, 30)]
    found = kineto.read(write(tmp_path / "lone.json", events), TINY, STEP)
    assert found.step_ns == 40_000 and found.trace.step_end_ns.tolist() == [40_000]


def test_kernels_that_overlap_are_not_counted_twice(tmp_path: Path) -> None:
    events = gpu_step(1000, 0)
    events += launched(90, 1009, "kernel", "reduce_kernel", 1050, 10, 23)  # beside the first kernel
    found = kineto.read(write(tmp_path / "two.json", events), TINY, STEP)
    busy = found.trace.busy_ns(found.schedule, Stream.COMPUTE, (0, int(found.trace.end_ns.max())))
    assert busy == 61_000
    assert found.trace.busy_ns(found.schedule, Stream.COMPUTE, (50_000, 70_000)) == 20_000


def test_gzip_and_a_bare_list_are_read_alike(tmp_path: Path, recording: Recording) -> None:
    packed = tmp_path / "gpu.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "gpu.json").read_bytes()))
    assert rows(kineto.read(packed, TINY, STEP)) == rows(recording)
    bare = tmp_path / "list.json"
    bare.write_text(json.dumps(gpu_step(1000, 0)))
    assert rows(kineto.read(bare, TINY, STEP)) == rows(recording)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ("{}", "export_chrome_trace"),
        ('{"traceEvents": []}', "no work"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]}', "no name or time"),
        ('{"traceEvents": [{"ph": "X", "name": "k", "ts": Infinity}]}', "no name or time"),
        ('{"traceEvents": [{"ph": "X", "name": "k", "ts": 1e18}]}', "beyond all clocks"),
        ('{"traceEvents": [{"ph": "X", "name": "k", "ts": 1, "args": [1]}]}', "args must be an object"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_recording_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=told):
        kineto.read(path, TINY, STEP)
    path.write_bytes(gzip.compress(b"{}")[:-9])
    with pytest.raises(RecordingError, match="not JSON"):
        kineto.read(path, TINY, STEP)


def test_a_recording_of_two_gpus_is_refused(tmp_path: Path) -> None:
    """Their streams have the same numbers: copies that ran at once would be taken for one queue of twice the rate."""
    copies = [launched(c, 1000, "gpu_memcpy", "Memcpy HtoD", 1010, 20, 9, bytes=100, device=c) for c in (0, 1)]
    with pytest.raises(RecordingError, match=r"two\.json records work of GPUs 0, 1: only what one GPU did"):
        kineto.read(write(tmp_path / "two.json", [*copies[0], *copies[1]]), TINY, STEP)


def test_a_recording_by_another_version_is_read(tmp_path: Path, recording: Recording) -> None:
    """What is not needed may be of any form: devices, threads, correlations, sizes below zero, ops without an end."""
    events = gpu_step(1000, 0)
    for each in events:
        each["tid"] = [each["tid"]]
        each["args"] |= {"correlation": [c]} if (c := each["args"].get("correlation")) is not None else {}
    more = [event("gpu_memcpy", "Memcpy HtoD", 1100, -1, 99, bytes=-1), event("cpu_op", "aten::add", 1101, 0)]
    for devices in ([], {}, [None], "GPU"):
        found = kineto.read(write(tmp_path / "other.json", [*events, *more], deviceProperties=devices), TINY, STEP)
        assert len(found.schedule.ops) == len(recording.schedule.ops) + 1
        assert (found.trace.end_ns >= found.trace.start_ns).all()
        assert codec.loads(codec.dumps(found.schedule)) == found.schedule


def test_a_recording_cannot_be_proven(recording: Recording) -> None:
    with pytest.raises(Refused):
        verify(recording.schedule)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a small network on the CPU, as torch.profiler exports them."""
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                optimizer.zero_grad()
                layers(torch.randn(16, 32)).square().mean().backward()
                optimizer.step()
    path = tmp_path_factory.mktemp("recording") / "cpu.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_real_recording_of_the_cpu(on_cpu: Path) -> None:
    found = kineto.read(on_cpu, TINY, STEP)
    ops = found.schedule.ops
    assert {op.stream for op in ops} == {Stream.COMPUTE, Stream.CPU}
    forward = [i for i, op in enumerate(ops) if op.phase == Phase.FORWARD and "aten::linear" in op.name]
    backward = [i for i, op in enumerate(ops) if op.phase == Phase.BACKWARD and "AddmmBackward0" in op.name]
    adam = [i for i, op in enumerate(ops) if op.phase == Phase.ADAM and "fused_adamw" in op.name]
    assert len(forward) == len(backward) == 2 and len(adam) == 1  # outermost ops only, of one step
    assert all(ops[i].kind == Kind.UPDATE for i in adam)
    start, end = found.trace.start_ns, found.trace.end_ns
    assert end[forward].max() <= start[backward].min() and end[backward].max() <= start[adam].min()
    assert start.min() >= 0 and end.max() <= found.step_ns


def test_commands_read_it_and_draw_it_beside_a_simulated_step(on_cpu: Path, tmp_path: Path) -> None:
    out = tmp_path / "recorded"
    done = megatrain("import", str(on_cpu), "-m", "tiny", "-b", "2", "-s", "16", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout and "ProfilerStep" in done.stdout
    again = megatrain("import", str(on_cpu), "-m", "tiny", "-b", "2", "-s", "16", "-o", str(out), "--json")
    told = json.loads(again.stdout)
    assert told["tokens_per_s"] * told["step_s"] == pytest.approx(2 * 16) and told["queues"][0]["ops"] > 0
    Trace.read(out / "trace.json").check(codec.read(out / "schedule.json"))
    step, trace = str(tmp_path / "s.json"), str(tmp_path / "t.json")
    assert megatrain("build", "tiny", "-b", "2", "-s", "16", "-o", step).returncode == 0
    assert megatrain("simulate", step, "--trace", trace).returncode == 0
    files = [str(out / "trace.json"), step, trace, str(out / "schedule.json")]
    done = megatrain("timeline", *files, "-o", str(tmp_path / "drawn"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drawn" / "gantt.png").stat().st_size > 10_000
    names = (tmp_path / "drawn" / "timeline.json").read_text()
    assert "measured on a CPU" in names and "predicted on h200" in names
    lacking = megatrain("timeline", trace, "-o", str(tmp_path / "drawn"))
    assert lacking.returncode == 2 and "whose file was not given" in lacking.stderr
    other = megatrain("timeline", str(on_cpu), "-o", str(tmp_path / "drawn"))
    assert other.returncode == 2 and "megatrain import" in other.stderr


def test_of_a_cpu_that_does_one_thing_after_another_what_lasted_longer_moves_the_step(tmp_path: Path) -> None:
    """Nothing is issued while it works, whichever of its threads does."""
    engine = "autograd::engine::evaluate_function: "

    def recorded(backward: float) -> Recording:
        events = [
            event("cpu_op", "aten::mm", 1000, 50),
            event("cpu_op", f"{engine}MmBackward0", 1060, backward, AUTOGRAD),
            event("user_annotation", "Optimizer.step#AdamW.step", 1070 + backward, 30),
            event("cpu_op", "aten::add_", 1070 + backward, 20),
        ]
        return kineto.read(write(tmp_path / "cpu.json", events), TINY, STEP)

    slow, quick = recorded(400), recorded(100)
    assert all(op.blocking for op in slow.schedule.ops) and slow.trace.waited_on.tolist() == [ISSUE, 0, 1]
    found = trace_diff.moves(slow.schedule, slow.trace, quick.trace).set_index(["stream", "class"])["moves_s"] * 1e6
    assert found["compute", "backward"] == found["", "all of it"] == pytest.approx(-300)
    assert found["host", "issue"] == 0


def test_ops_of_a_cpu_that_overlap_hold_nothing_up(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 1000, 50), event("cpu_op", "aten::mm", 1020, 50, AUTOGRAD)]
    found = kineto.read(write(tmp_path / "cpu.json", events), TINY, STEP)
    assert not any(op.blocking for op in found.schedule.ops)

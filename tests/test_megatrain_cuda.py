"""The CUDA backend, against a recording fake of torch.cuda, and on a real GPU where there is one."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import os
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fake_cuda import (
    CARRIED,
    FAST,
    MODEL,
    POLICIES,
    STEPS,
    WORKLOAD,
    FakeBackend,
    FakeGpu,
    FakeRuntime,
    Some,
    built,
    installed,
    result,
    trainer,
)
from hand_written import WRITERS, small
from quick_readings import hurry
from torch import Tensor

from megatrain import adam, adam_state, attention, cuda, device_clock, experts, nf4, profile, readings
from megatrain import pinned as pinning
from megatrain.attention import Attention, band
from megatrain.backend import OpFailed, Task
from megatrain.busy_work import SPIN_CYCLES, Products, Spin, spinning
from megatrain.cpu import CpuBackend
from megatrain.cuda import DEVICE_STREAMS, IN_FLIGHT, SWITCH_S, CudaBackend
from megatrain.documents import documents_of
from megatrain.executor import Executor, in_turn, serial
from megatrain.graphs import PHASES, NotCaptured, Pool, replayed
from megatrain.lifetime import released
from megatrain.pinned import HUGE_PAGE, PinError, cpus_beside, kept_pinned, pinned
from megatrain.pointwise import compiled
from megatrain.sanitizer import MODULE, TOLD_OF_SYNCHRONISING, sanitized
from megatrain.this_machine import backend_of
from megatrain.train import Debug
from megatrain.way import PLAINLY
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.heads import FLASH_DIM
from schedules.op import Buffer, Kind, Op, Phase, Stream, Tier
from schedules.verify import verify
from schedules.workload import PRECISIONS, MemoryBudget
from sim.cost import issue_kind


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return installed(monkeypatch)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("stream ")] == []


# ---- the backend and the fake


@pytest.mark.parametrize("writer", WRITERS)
def test_streams_events_and_waits_are_the_schedules_and_no_others(gpu: FakeGpu, writer: str) -> None:
    schedule = WRITERS[writer](MODEL, WORKLOAD)
    backend = FakeBackend(gpu)
    executor = Executor(verify(schedule), backend)
    executor.run(STEPS)
    backend.close()
    on_device = {op.name: op.stream for op in schedule.ops if op.stream in DEVICE_STREAMS}
    expected: dict[str, list[tuple[str, ...]]] = {stream: [] for stream in DEVICE_STREAMS}
    for step in range(STEPS):
        for op in schedule.ops:
            if op.name not in on_device:
                continue
            for wait in schedule.waits_of[op.name]:
                if wait.on in on_device and wait.distance <= step:
                    expected[op.stream].append(("wait", op.stream, f"{wait.on}@{step - wait.distance}"))
            expected[op.stream] += [("record", op.stream, f"{op.name}@{step}")] * 2
    for stream in DEVICE_STREAMS:
        asked = [line for line in gpu.log if line[0] in ("wait", "record") and line[1] == stream]
        assert asked == expected[stream], stream


def test_threads_of_the_host_wait_for_the_gpu_and_the_gpu_never_for_them(gpu: FakeGpu) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    on_host = {op.name for op in schedule.ops if op.stream not in DEVICE_STREAMS}
    backend = FakeBackend(gpu)
    Executor(verify(schedule), backend).run(2)
    backend.close()
    waited = {line[1] for line in gpu.log if line[0] == "host waits"}
    needed = {
        f"{wait.on}@{step}"
        for step in range(2)
        for wait in schedule.waits
        if wait.op in on_host and wait.on not in on_host and step + wait.distance < 2
    }
    assert needed and needed <= waited
    assert not [line for line in gpu.log if line[0] == "wait" and line[2].split("@")[0] in on_host]


def test_memory_filled_before_the_first_op_is_whole_when_that_runs(gpu: FakeGpu) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    backend = FakeBackend(gpu)
    Executor(verify(schedule), backend).run(2)
    log = [line for line in gpu.log if line[0] == "host waits for all" or (line[0] == "record" and "@" in line[2])]
    assert [place for place, line in enumerate(log) if line[0] == "host waits for all"] == [0]  # and never again
    backend.close()


def test_no_stream_runs_further_ahead_than_allowed(gpu: FakeGpu) -> None:
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE)
    backend = FakeBackend(gpu)
    tasks = [Task(op, 0, step, lambda step: None) for step in range(3 * IN_FLIGHT)]
    backend.host_wait([backend.submit(task, ()) for task in tasks][-1])
    backend.close()
    done, handed = set(), 0
    for line in gpu.log:
        if line[0] == "host waits" and line[1].startswith("op@"):
            done.add(line[1])
        elif line[:2] == ("record", Stream.COMPUTE):
            handed += 1  # two of an op
            assert (handed + 1) // 2 - len(done) <= IN_FLIGHT
    assert handed == 2 * len(tasks)


@pytest.mark.parametrize("writer", WRITERS)
def test_training_through_the_backend_is_training(gpu: FakeGpu, writer: str) -> None:
    schedule = WRITERS[writer](MODEL, WORKLOAD)
    losses, parameters = result(schedule, FakeBackend(gpu), debug=Debug(poison=True, delay_s=1e-3))
    right = result(schedule, CpuBackend())
    assert losses == right[0]
    assert all(torch.equal(*pair) for pair in zip(parameters, right[1], strict=True))
    assert {stream for stream, _ in gpu.spun} >= {Stream.COMPUTE}  # delays are kernels there


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_unchanged(gpu: FakeGpu, policy: str, tmp_path: Path) -> None:
    schedule = built(policy, MODEL, WORKLOAD if policy in CARRIED else dataclasses.replace(WORKLOAD, grad_clip=None))
    assert bool(verify(schedule).carried) == (policy in CARRIED)
    right = result(schedule, CpuBackend(), nvme=tmp_path)[0]
    for debug in (Debug(poison=False), Debug(poison=True)):
        assert result(schedule, FakeBackend(gpu), nvme=tmp_path, debug=debug)[0] == right


def test_no_thread_of_the_host_poisons_the_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream writes there next does not wait for it: the host's wait is the last to read a buffer."""
    schedule = built("megatrain_released", MODEL, dataclasses.replace(WORKLOAD, grad_clip=1.0))
    ended = zip(schedule.ops, released(schedule), strict=True)
    by_host = {buffer for op, buffers in ended if not op.on_device for buffer in buffers}
    assert any(schedule.buffer[buffer].tier == Tier.DEVICE for buffer in by_host)
    backend, names = FakeBackend(gpu), dict[int, str]()
    allocate, fill = backend.allocate, Tensor.fill_

    def allocated(buffer: Buffer) -> Tensor:
        slab = allocate(buffer)
        if buffer.tier == Tier.DEVICE:
            names[slab.data_ptr()] = buffer.name
        return slab

    def filled(slab: Tensor, value: Any) -> Tensor:
        if backend._begun and slab.data_ptr() in names:
            poisoned.append((names[slab.data_ptr()], getattr(gpu._here, "stream", "default")))
        return fill(slab, value)

    poisoned: list[tuple[str, str]] = []
    monkeypatch.setattr(backend, "allocate", allocated)
    monkeypatch.setattr(Tensor, "fill_", filled)
    result(schedule, backend, debug=Debug(poison=True))
    assert poisoned and not [name for name, stream in poisoned if stream == "default"]


def test_times_of_the_gpu_and_of_the_host_are_on_one_clock(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the run: a tick is a millisecond of the host, and the GPU's clock is a hundredth too fast."""
    for module in (cuda, device_clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: gpu.tick() * 10**6))
    backend = FakeBackend(gpu)
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE)
    spans, ticks = [], []
    for step in range(200):
        event = backend.submit(Task(op, 0, step, lambda step: None), ())
        backend.host_wait(event)
        spans += event.span()
        ticks += [event._start.tick, event._end.tick]
    backend.close()
    assert spans == sorted(spans) and gpu.tick() > 1000
    assert [round(ns / 10**6) for ns in spans] == ticks
    assert event.host_ns == 3 * 10**6  # two events are recorded in it


def test_a_reading_in_which_the_host_was_held_up_does_not_count(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    held_up, calls = {2, 4, 8, 10}, []  # after four of five events, each time for 50 ticks

    def now_ns() -> int:
        calls.append(0)
        if len(calls) in held_up:
            gpu._ticks += 50
        return gpu.tick() * 10**6

    monkeypatch.setattr(device_clock, "time", SimpleNamespace(perf_counter_ns=now_ns))
    backend = FakeBackend(gpu)
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE)
    event = backend.submit(Task(op, 0, 0, lambda step: None), ())
    backend.host_wait(event)
    held_up.clear()
    assert len(calls) >= 10 and [round(ns / 10**6) for ns in event.span()] == [event._start.tick, event._end.tick]
    backend.close()


def test_the_clock_is_read_anew_in_later_steps_alone(gpu: FakeGpu) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    with trainer(schedule, FakeBackend(gpu), record=True) as run:
        read = gpu.log.count(("record", "clock", "calibration"))
        run.run(STEPS)
        trace = run.trace()
    trace.check(schedule)
    assert (np.diff(trace.start_ns[trace.rows_of(schedule, Stream.COMPUTE)]) > 0).all()
    assert gpu.log.count(("record", "clock", "calibration")) - read <= STEPS * device_clock.SYNCHRONISATIONS


def test_host_memory_is_pinned_and_device_memory_is_the_devices(gpu: FakeGpu) -> None:
    backend = FakeBackend(gpu)
    host = backend.allocate(Buffer(name="b", tier=Tier.HOST, nbytes=1000))
    assert host.shape == (1000,) and host.data_ptr() % HUGE_PAGE == 0 and not host.any()
    device = backend.allocate(Buffer(name="b", tier=Tier.DEVICE, nbytes=1000))
    assert device.shape == (1000,) and device.device == backend.device and not device.any()
    backend.close()


def test_an_artificial_delay_lasts_as_long_on_the_gpu(gpu: FakeGpu) -> None:
    backend = FakeBackend(gpu)
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.H2D)
    backend.host_wait(backend.submit(Task(op, 0, 0, lambda step: None, delay_s=3e-3), ()))
    backend.spin(3_000_000)
    backend.close()
    cycles = round(3 * SPIN_CYCLES / FAST)  # a calibrating kernel lasts from one tick to the next
    assert gpu.spun[-2:] == [(Stream.H2D, cycles), ("default", cycles)]


def test_an_op_is_timed_alone_without_its_launches(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has other work until all of it is there, and the reading begins then; a host's ops begin at once."""
    monkeypatch.setattr("megatrain.cpu.time.sleep", lambda s: pytest.fail("an op of the host waited"))
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    on_device = [op for op in schedule.ops if op.stream in DEVICE_STREAMS]
    monkeypatch.setattr(profile, "LOADED_S", 0.0)
    monkeypatch.setattr(profile, "ENOUGH_S", 1e3)  # however long a step takes here, that is not enough
    found = profile.alone(schedule, lambda: FakeBackend(gpu))
    assert len(found["durations_ns"]) == profile.ALONE_STEPS
    for stream in DEVICE_STREAMS:
        lines = [line[0] for line in gpu.log if line[0] in ("spin", "product", "record") and line[1] == stream]
        steps, ops = profile.ALONE_STEPS + 1, sum(op.stream == stream for op in on_device)
        gaps = ["record", "record"] * (2 * ops)  # of these times nothing is taken
        before = "product" if stream == Stream.COMPUTE else "spin"
        assert [line for line, _ in itertools.groupby(lines[len(gaps) :])] == [before, "record"] * (steps * ops)
        assert lines[: len(gaps)] == gaps and lines.count("record") == len(gaps) + 2 * steps * ops
    cycles = round(cuda.AHEAD_S * 1e9 / 1e6 * SPIN_CYCLES / FAST)
    copies = {op.stream for op in on_device} - {Stream.COMPUTE}
    assert {line for line in gpu.spun if line[0] != "default"} == {(stream, cycles) for stream in copies}
    enough = round(profile.ENOUGH_S * 1e9)
    for step_ns, steps in ((2 * enough // 5, 3), (2 * enough, 1)):  # long ones hold enough of each op
        times = profile._under_load(schedule, lambda: FakeBackend(gpu), None, PLAINLY, step_ns)
        assert times.shape == (steps, len(schedule.ops))
    gpu.spun.clear()
    monkeypatch.setattr(cuda, "AHEAD_UP_TO", WORKLOAD.tokens_per_microbatch - 1)
    profile.alone(schedule, lambda: FakeBackend(gpu))  # ops are long
    profile.alone(schedule, CpuBackend)
    assert not gpu.spun


def test_a_gpu_that_is_timed_computes_until_what_it_waits_for_has_ended(gpu: FakeGpu) -> None:
    """Only its compute stream, and only then: here the host's op ends once it sees three products."""
    schedule, backend = WRITERS["two_slots"](MODEL, WORKLOAD), FakeBackend(gpu)
    enough = threading.Event()

    def products() -> list[str]:
        return [line[1] for line in gpu.log if line[0] == "product" and line[1] != "default"]

    def of_host(step: int) -> None:
        assert enough.wait(10), "the GPU rests"

    def op(name: str, stream: Stream) -> Op:
        return Op(name=name, kind=Kind.UPDATE, phase=Phase.SYNC, stream=stream)

    gpu.on_product = lambda: enough.set() if len(products()) >= 3 else None
    with cuda.kept_at_work(backend, schedule, graphs=False):
        update = backend.submit(Task(op("update", Stream.CPU), 0, 0, of_host), ())
        copy = backend.submit(Task(op("copy", Stream.H2D), 1, 0, lambda step: None), (update,))
        backend.host_wait(backend.submit(Task(op("compute", Stream.COMPUTE), 2, 0, lambda step: None), (update, copy)))
        assert len(products()) >= 3 and set(products()) == {Stream.COMPUTE}
        done = len(products())
        backend.host_wait(backend.submit(Task(op("next", Stream.COMPUTE), 3, 0, lambda step: None), (copy,)))
        assert len(products()) == done
    assert backend.products is None
    backend.close()


def test_what_is_timed_as_a_graph_is_launched_while_the_op_before_it_runs(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has other work in time: ops are queued, and as graphs none waits for its launches."""
    monkeypatch.setattr(profile, "LOADED_S", 0.0)
    schedule, backend = WRITERS["two_slots"](MODEL, WORKLOAD), FakeBackend(gpu)
    before = (schedule.ops[-1], *schedule.ops[:-1])
    pairs = list(zip(schedule.ops, before, strict=True))
    after_the_host = {op.name for op, last in pairs if not last.on_device}
    after_a_copy = {
        op.name for op, last in pairs if op.stream == Stream.COMPUTE and last.stream in (Stream.H2D, Stream.D2H)
    }
    assert after_the_host and after_a_copy
    with cuda.kept_at_work(backend, schedule, graphs=True):
        assert backend.ahead_of == after_the_host | after_a_copy and len(backend.ahead_of) < len(schedule.ops)
    assert not backend.ahead_of
    backend.close()
    waited, host_wait = list[int](), FakeBackend.host_wait
    monkeypatch.setattr(FakeBackend, "host_wait", lambda self, event: (waited.append(1), host_wait(self, event))[1])
    profile._run(serial(schedule), 3, FakeBackend(gpu), None, PLAINLY)
    of_serial = len(waited)
    profile._run(in_turn(schedule), 3, FakeBackend(gpu), None, PLAINLY)
    assert len(waited) - of_serial < of_serial / 2


def test_in_a_run_launches_are_timed_and_nothing_spins(gpu: FakeGpu) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    kinds = [issue_kind(op) for op in schedule.ops if op.stream in DEVICE_STREAMS]
    handed = profile.in_a_run(schedule, lambda: FakeBackend(gpu))["handed"]
    steps = profile.WOKEN_STEPS - 1
    assert {kind: len(times) for kind, times in handed.items()} == {k: steps * kinds.count(k) for k in set(kinds)}
    assert all(ns > 0 for times in handed.values() for ns in times) and not gpu.spun
    backend = FakeBackend(gpu)
    with cuda.kept_at_work(backend, schedule, graphs=False):
        assert backend.ahead_of == {op.name for op in schedule.ops}
    assert not backend.ahead_of
    backend.close()


# ---- what goes wrong


def test_error_while_handing_over_has_the_ops_name(gpu: FakeGpu) -> None:
    def broken(step: int) -> None:
        raise ArithmeticError("out of numbers")

    backend = FakeBackend(gpu)
    bad = Op(name="bad", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE)
    after = Op(name="after", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.CPU)
    ran: list[int] = []
    failing = backend.submit(Task(bad, 0, 7, broken), ())
    with pytest.raises(OpFailed, match=r"bad of step 7 failed on stream compute: .*out of numbers"):
        backend.host_wait(backend.submit(Task(after, 1, 7, ran.append), (failing,)))
    backend.close()
    assert not ran


def test_error_on_the_gpu_reaches_the_issuing_thread_and_no_thread_hangs(gpu: FakeGpu) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    landed = next(op.name for op in schedule.ops if op.stream == Stream.D2H)
    gpu.broken = {f"{landed}@1"}
    with trainer(schedule, FakeBackend(gpu)) as run, pytest.raises(OpFailed, match="illegal memory access"):
        run.run(10)


def test_a_backend_is_closed_when_the_gpu_has_finished_or_broken(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeBackend(gpu).close()
    assert gpu.log[-1] == ("host waits for all",)

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    FakeBackend(gpu).close()  # who met the error was told


def test_backend_is_chosen_by_name() -> None:
    assert type(backend_of("cpu")) is CpuBackend
    with pytest.raises(InputError, match="'cdua' is unknown"):
        backend_of("cdua")
    if torch.cuda.is_available():
        return
    assert type(backend_of(None)) is CpuBackend
    with pytest.raises(InputError, match="no GPU here"):
        backend_of("cuda")


def test_what_cuda_reads_is_set_before_torch_looks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # to have it as it was afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append(dict(os.environ)) is not None)
    assert type(backend_of(None)) is CpuBackend
    assert seen[0]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_the_optimizer_runs_beside_the_memory_it_works_on(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = min(os.sched_getaffinity(0))
    monkeypatch.setattr(cuda, "cpus_beside", lambda address: (beside,))
    backend, seen = FakeBackend(gpu), []
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.CPU)
    work = lambda step: seen.append((os.sched_getaffinity(0), torch.get_num_threads()))  # noqa: E731
    backend.host_wait(backend.submit(Task(op, 0, 0, work), ()))
    backend.close()
    assert seen == [({beside}, 1)]


def test_the_optimizers_threads_are_its_own_beside_those_that_hand_over(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that hands over sets torch to one, for itself: on the first GPU the optimizer had one, too."""
    monkeypatch.setattr(cuda, "cpus_beside", lambda address: tuple(range(8)))
    monkeypatch.setattr(cuda, "usable_cores", lambda: 8)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None)
    backend, seen = FakeBackend(gpu), list[int]()
    for stream in (Stream.CPU, Stream.COMPUTE, Stream.CPU):  # it begins first, and asks torch last
        op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=stream)
        asks = len(backend._running) == 2
        work = lambda step, asks=asks: seen.append(torch.get_num_threads()) if asks else None  # noqa: E731
        backend.host_wait(backend.submit(Task(op, 0, 0, work), ()))
    backend.close()
    assert seen == [6]


def test_the_optimizer_has_no_more_threads_than_a_container_has_cores(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "cpus_beside", lambda address: tuple(sorted(os.sched_getaffinity(0))) * 96)
    monkeypatch.setattr(cuda, "usable_cores", lambda: 16)
    backend, seen = FakeBackend(gpu), list[int]()
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.CPU)
    backend.host_wait(backend.submit(Task(op, 0, 0, lambda step: seen.append(torch.get_num_threads())), ()))
    backend.close()
    assert seen == [14]


def test_every_thread_that_hands_over_speaks_to_its_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    told = set[tuple[str, int]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: told.add((threading.current_thread().name, index)))
    backend = CudaBackend(index=3, machine="fake")
    for stream in DEVICE_STREAMS:
        op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=stream)
        backend.host_wait(backend.submit(Task(op, 0, 0, lambda step: None), ()))
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("stream ")}
    backend.close()
    assert len(names) == len(DEVICE_STREAMS) and told == {(name, 3) for name in {*names, "MainThread"}}


def test_no_room_on_the_gpu_is_a_no_with_a_reason(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*sizes: int, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend = FakeBackend(gpu)
    monkeypatch.setattr(torch, "zeros", none_left)
    with pytest.raises(Refused, match="the GPU has no room for weight0"):
        CudaBackend.allocate(backend, Buffer(name="weight0", tier=Tier.DEVICE, nbytes=8))
    backend.close()


def test_what_cuda_says_of_a_refusal_to_pin_is_not_told_again(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, launched = FakeBackend(gpu), []

    def told_again(*sizes: int, **options: Any) -> Tensor:
        launched.append(options["device"])
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(status=2))
    monkeypatch.setattr(torch, "zeros", told_again)
    with pytest.raises(PinError, match="CUDA error 2"):
        backend.allocate(Buffer(name="b", tier=Tier.HOST, nbytes=4096))
    assert launched == [backend.device]
    backend.close()


# ---- spin


def test_spinning_keeps_copies_and_replaces_all_else(gpu: FakeGpu) -> None:
    schedule = WRITERS["moved_out"](MODEL, WORKLOAD)
    spin, copied = Spin(), []
    gpu.spun.clear()
    works = [lambda step, op=op: copied.append(op.name) for op in schedule.ops]
    replaced = spinning(schedule, works, [1000 * (n + 1) for n in range(len(schedule.ops))], spin)
    for work in replaced:
        work(0)
    activations = {op.name for op in schedule.ops if any(a.tensor.startswith("s.") for a in op.accesses)}
    assert copied == [op.name for op in schedule.ops if op.phase == Phase.COPY and op.name not in activations]
    device = [op for op in schedule.ops if op.stream in DEVICE_STREAMS]
    assert len(gpu.spun) == len(device) - len(copied)
    cycles = [cycles for _, cycles in gpu.spun]
    assert cycles == sorted(cycles) and cycles[-1] > cycles[0]


# ---- pinned memory


@pytest.mark.parametrize("nbytes", [1, 4097, HUGE_PAGE, 5 * HUGE_PAGE + 12345])
def test_slab_is_exact_zeroed_aligned_and_pinned_while_any_view_lives(nbytes: int) -> None:
    runtime = FakeRuntime()
    slab = pinned(nbytes, runtime, cpus=cpus_beside(""))
    assert slab.shape == (nbytes,) and slab.dtype == torch.uint8 and not slab.any()
    assert runtime.pinned == {slab.data_ptr(): nbytes}
    assert slab.data_ptr() % HUGE_PAGE == 0
    view = slab[nbytes - 1 :]
    del slab
    gc.collect()
    assert runtime.pinned
    view.fill_(7)
    del view
    gc.collect()
    assert not runtime.pinned


def test_cores_that_were_taken_away_are_done_without() -> None:
    slab = pinned(4 * HUGE_PAGE, FakeRuntime(), cpus=(1 << 14, 1 << 15))  # of no machine
    assert not slab.any()


def test_of_no_bytes_none_are_pinned() -> None:
    runtime = FakeRuntime()
    assert len(pinned(0, runtime)) == 0 and not runtime.pinned


@pytest.mark.parametrize("cpus", [(), (0,), (0, 1, 2)])
def test_all_of_a_slab_is_touched_on_the_cores_named_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...]
) -> None:
    touched: list[tuple[int, int]] = []
    bound: list[tuple[str, tuple[int, ...]]] = []
    memset, whole = ctypes.memset, 5 * HUGE_PAGE + 12345

    def touching(address: int, value: int, nbytes: int) -> None:
        touched.append((address, nbytes))
        memset(address, value, nbytes)

    class Runtime(FakeRuntime):
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            assert sum(nbytes for _, nbytes in touched) == nbytes
            return super().cudaHostRegister(address, nbytes, flags)

    monkeypatch.setattr(ctypes, "memset", touching)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: bound.append((threading.current_thread().name, tuple(cores)))
    )
    slab = pinned(whole, Runtime(), cpus=cpus)
    parts = sorted(touched)
    ends = [address + nbytes for address, nbytes in parts]
    assert [address for address, _ in parts] == [slab.data_ptr(), *ends[:-1]] and ends[-1] == slab.data_ptr() + whole
    assert all(nbytes % HUGE_PAGE == 0 for _, nbytes in parts[:-1])  # no page is of two threads
    if cpus:
        assert len(parts) == len(cpus) == len(bound)
    assert {cores for _, cores in bound} == ({cpus} if cpus else set())
    assert threading.current_thread().name not in {name for name, _ in bound}


@pytest.mark.parametrize("by", ["an interrupt", "want of threads"])
def test_no_thread_touches_memory_that_is_gone(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """What ends the thread that pins ends none of those that touch: they hold the memory, and stop soon."""
    memset, begun, goes_on = ctypes.memset, threading.Semaphore(0), threading.Event()
    places: list[tuple[int, int]] = []

    def touching(address: int, value: int, nbytes: int) -> None:
        begun.release()
        assert goes_on.wait(10)
        memset(address, value, nbytes)
        places.append((address, nbytes))

    def ends(thread: threading.Thread, *_: object) -> None:
        for _ in started:  # each is in its first piece
            assert begun.acquire(timeout=10)
        raise KeyboardInterrupt if by == "an interrupt" else RuntimeError("can't start new thread")

    monkeypatch.setattr(ctypes, "memset", touching)
    monkeypatch.setattr(pinning, "PIECE", HUGE_PAGE)
    start, started = threading.Thread.start, list[threading.Thread]()

    def starting(thread: threading.Thread) -> None:
        if by == "want of threads" and started:
            ends(thread)
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", starting)
        if by == "an interrupt":
            patch.setattr(threading.Thread, "join", ends)
        with pytest.raises(KeyboardInterrupt if by == "an interrupt" else RuntimeError):
            pinned(64 * HUGE_PAGE, FakeRuntime(), cpus=tuple(sorted(os.sched_getaffinity(0)))[:1] * 2)
    gc.collect()
    goes_on.set()
    for thread in started:
        thread.join(10)
    assert len(places) == len(started)  # a piece each, where each had many


class FakeMemory:
    """What is left of a machine's memory, which grows by so much each time somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, left: int, grows: int) -> None:
        self.left, self.grows, self.slept_s, self._lock = left, grows, 0.0, threading.Lock()
        self.least = left
        memset = ctypes.memset

        def touching(address: int, value: int, nbytes: int) -> None:
            with self._lock:
                self.left -= nbytes
                self.least = min(self.least, self.left)
            memset(address, value, nbytes)

        monkeypatch.setattr(ctypes, "memset", touching)
        monkeypatch.setattr(pinning, "time", SimpleNamespace(sleep=self.sleep))
        monkeypatch.setattr(pinning, "available_memory", lambda: self.left)
        monkeypatch.setattr(pinning, "PIECE", HUGE_PAGE)
        monkeypatch.setattr(pinning, "LITTLE", 8 * HUGE_PAGE)
        monkeypatch.setattr(pinning, "_MEMORY", pinning._Growing())

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.left += self.grows
            self.slept_s += seconds


def test_memory_that_grows_as_it_is_used_is_not_used_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch, left=16 * HUGE_PAGE, grows=HUGE_PAGE // 2)
    cpus = tuple(sorted(os.sched_getaffinity(0)))[:2] * 2
    slab = pinned(60 * HUGE_PAGE + 12345, FakeRuntime(), cpus=cpus)
    assert not slab.any() and memory.least > 0 and memory.slept_s > pinning.PATIENCE_S / 4


def test_memory_that_does_not_grow_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch, left=16 * HUGE_PAGE, grows=0)
    pinned(15 * HUGE_PAGE, FakeRuntime())
    assert memory.slept_s == pytest.approx(pinning.PATIENCE_S, abs=2 * pinning.LOOK_S)
    pinned(HUGE_PAGE, FakeRuntime())
    assert memory.slept_s == pytest.approx(pinning.PATIENCE_S, abs=2 * pinning.LOOK_S)
    memory.left = 16 * HUGE_PAGE
    pinned(15 * HUGE_PAGE, FakeRuntime())
    assert memory.slept_s == pytest.approx(2 * pinning.PATIENCE_S, abs=4 * pinning.LOOK_S)


def flags_of(slab: Tensor) -> list[tuple[int, str]]:
    """The kernel's flags of each part of a slab's memory, and how many of the slab's bytes are in it."""
    found: list[tuple[int, str]] = []
    begin, inside = slab.data_ptr(), 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(address, 16) for address in place.groups())
            inside = min(last, begin + slab.numel()) - max(first, begin)
        elif inside > 0 and line.startswith("VmFlags:"):
            found.append((inside, f"{line} "))
    return found


def test_a_process_that_is_forked_does_not_get_the_slab() -> None:
    slab = pinned(3 * HUGE_PAGE, FakeRuntime())
    flags = flags_of(slab)
    assert flags and all(" dc " in told for _, told in flags)  # "do not copy", the kernel's name for it


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_huge_pages_are_asked_for_where_whole_ones_fit() -> None:
    slab = pinned(3 * HUGE_PAGE + 12345, FakeRuntime())
    assert sum(nbytes for nbytes, told in flags_of(slab) if " hg " in told) == 3 * HUGE_PAGE
    slab = pinned(HUGE_PAGE - 1, FakeRuntime())
    assert not [told for _, told in flags_of(slab) if " hg " in told]


def test_refusal_to_pin_is_told() -> None:
    with pytest.raises(PinError, match=r"0\.00 GB of host memory could not be pinned: CUDA error 2"):
        pinned(4096, FakeRuntime(status=2))
    with pytest.raises(PinError, match=r"of host memory could not be had: .*Cannot allocate memory"):
        pinned(1 << 60, FakeRuntime())


@pytest.fixture
def none_in_use() -> None:
    """Nothing that other tests pinned comes back later."""
    gc.collect()


@pytest.mark.usefixtures("none_in_use")
def test_a_slab_that_is_kept_serves_the_next_of_its_size_and_no_other() -> None:
    runtime = FakeRuntime()
    with kept_pinned(3 * HUGE_PAGE):
        slab = pinned(HUGE_PAGE, runtime)
        place = slab.data_ptr()
        del slab
        assert runtime.pinned == {place: HUGE_PAGE}
        other = pinned(HUGE_PAGE + 1, runtime)
        assert other.data_ptr() != place and len(runtime.pinned) == 2
        again = pinned(HUGE_PAGE, runtime)
        assert again.data_ptr() == place and again.numel() == HUGE_PAGE and len(runtime.pinned) == 2
        assert pinned(HUGE_PAGE, runtime).data_ptr() != place  # that is in use
        del again
    assert runtime.pinned == {other.data_ptr(): HUGE_PAGE + 1}
    del other
    assert not runtime.pinned


@pytest.mark.usefixtures("none_in_use")
def test_what_is_kept_and_what_is_in_use_stay_within_the_limit_together() -> None:
    runtime = FakeRuntime()
    with kept_pinned(10 * 4096):
        slabs = [pinned(size * 4096, runtime) for size in (3, 4, 2)]
        del slabs[0]
        del slabs[0]
        assert sum(runtime.pinned.values()) == 9 * 4096
        slabs.append(pinned(2 * 4096, runtime))  # its size is in use: the oldest makes room for another
        assert sorted(runtime.pinned.values()) == [2 * 4096, 2 * 4096, 4 * 4096]
        slabs.append(pinned(7 * 4096, runtime))  # more than the limit, if it must be
        assert sum(runtime.pinned.values()) == 11 * 4096 and len(runtime.pinned) == 3
        with pytest.raises(PinError):
            pinned(4096, FakeRuntime(status=2))
        slabs.clear()
        assert sum(runtime.pinned.values()) <= 10 * 4096
        with kept_pinned(4096):  # what holds further out holds here
            assert runtime.pinned
        assert runtime.pinned
    assert not runtime.pinned


@pytest.mark.usefixtures("none_in_use")
def test_slabs_that_several_threads_take_and_give_back_are_all_unpinned_in_the_end() -> None:
    runtime = FakeRuntime()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held = list[Tensor]()
        for _ in range(200):
            held.append(pinned(4096 * chance.randint(1, 4), runtime))
            held[-1].fill_(seed)
            if len(held) == 4:
                assert all((slab == seed).all() for slab in held)
                held.pop(chance.randrange(4))

    with kept_pinned(24 * 4096):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0 < sum(runtime.pinned.values()) <= 24 * 4096
    assert not runtime.pinned


@pytest.mark.usefixtures("none_in_use")
def test_a_profile_pins_each_slab_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, pins = FakeRuntime(), list[int]()
    register = runtime.cudaHostRegister

    def noted(address: int, nbytes: int, flags: int) -> int:
        pins.append(nbytes)
        return register(address, nbytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", noted)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(profile, "LOADED_S", 0.0)
    hurry(monkeypatch)
    schedule = built("streamed", MODEL, WORKLOAD)
    profile.time_ops([schedule], 0, progress=lambda done, note: None, machine=lambda: FakeBackend(gpu))
    slabs = [buffer.nbytes for buffer in schedule.buffers if buffer.tier == Tier.HOST]
    assert sorted(pins) == sorted([*slabs, readings.ARENA, readings.ARENA])


@pytest.mark.skipif(Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="Linux reserves it all")
def test_more_than_the_memory_that_linux_sees_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a virtual machine whose memory grows as it is used."""
    monkeypatch.setattr("megatrain.pinned._touch", lambda memory, cpus: None)
    nbytes = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert len(pinned(nbytes, FakeRuntime())) == nbytes


def test_cores_beside_a_gpu_are_those_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    device, node = tmp_path / "bus/pci/devices/0000:1b:00.0", tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("2-4,7,12-15\n")
    assert cpus_beside("0000:1B:00.0", tmp_path) == (2, 3, 4, 7)
    shutil.copytree(node, node.with_name("node0"))
    (device / "numa_node").write_text("0\n")
    assert cpus_beside("0000:1b:00.0", tmp_path) == (2, 3, 4, 7)
    (device / "numa_node").write_text("-1\n")  # as on a machine with one node, or a virtual one
    assert cpus_beside("0000:1b:00.0", tmp_path) == tuple(range(8))
    assert cpus_beside("0000:ff:00.0", tmp_path) == tuple(range(8))


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ({"pci_domain_id": 1, "pci_bus_id": 27, "pci_device_id": 0}, "0001:1b:00.0"),
        ({"pci_bus_id": 0, "pci_device_id": 12}, "0000:00:0c.0"),
        ({"pci_domain_id": 0, "pci_bus_id": 27}, ""),
        ({"pci_domain_id": 0, "pci_device_id": 0}, ""),
    ],
)
def test_a_gpus_place_is_told_as_linux_writes_it(gpu: FakeGpu, told: dict[str, int], address: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**told))
        assert cuda.pci_address(0) == address


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_from_the_environment_are_the_users(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "backend:native")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    before = dict(os.environ)
    cuda.prepare_process()
    assert dict(os.environ) == before
    monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    cuda.prepare_process()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    assert os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "32"


# ---- graphs


class FakeGraph:
    """Captures by running the work, and so replays by doing nothing; a second replay of a capture runs it again."""

    capturing: ClassVar[list[FakeGraph]] = []

    def __init__(self) -> None:
        self.replays, self.begun = 0, {}

    def capture_begin(self, **options: object) -> None:
        assert not self.capturing
        self.capturing.append(self)
        self.begun = options

    def capture_end(self) -> None:
        assert self.capturing.pop() is self

    def replay(self) -> None:
        assert not self.capturing
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    made: list[FakeGraph] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(FakeGraph()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return made


def test_blocks_are_captured_once_and_replayed_in_every_later_step(graphs: list[FakeGraph]) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    ran: list[str] = []
    works = replayed(schedule, [lambda step, op=op: ran.append(f"{op.name}@{step}") for op in schedule.ops])
    for step in range(4):
        for work in works:
            work(step)
    blocks = [op for op in schedule.ops if op.phase in PHASES and op.layer in schedule.model.blocks]
    assert len(graphs) == len(blocks) and {graph.replays for graph in graphs} == {3}
    assert {str(graph.begun) for graph in graphs} == {str({"pool": (0, 1), "capture_error_mode": "thread_local"})}
    for op in schedule.ops:
        steps = [0, 1] if op in blocks else [0, 1, 2, 3]
        assert [name for name in ran if name.startswith(f"{op.name}@")] == [f"{op.name}@{step}" for step in steps]


def test_ops_with_new_tensors_in_each_step_are_never_captured(graphs: list[FakeGraph]) -> None:
    schedule = WRITERS["moved_out"](MODEL, WORKLOAD)
    ran: list[tuple[str, int]] = []
    works = replayed(schedule, [lambda step, op=op: ran.append((op.name, step)) for op in schedule.ops])
    for step in range(3):
        for work in works:
            work(step)
    again = {name for name, step in ran if step == 2}
    moved = {op.name for op in schedule.ops if any(access.tensor.startswith("s.") for access in op.accesses)}
    assert moved and moved <= again
    assert {op.name for op in schedule.ops if op.phase in (Phase.EMBED, Phase.LOSS, Phase.ADAM)} <= again


def test_no_graph_takes_turns_on_a_buffer_with_ops_that_are_none(graphs: list[FakeGraph]) -> None:
    """It would have memory of both: a graph's in the pool, and theirs."""
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
    schedule = policies.build("streamed", small(blocks=4), WORKLOAD, memory, keep=1, offload=1)
    buffers: dict[str, set[bool]] = {}
    works = replayed(schedule, [lambda step: None for _ in schedule.ops])
    for op, work in zip(schedule.ops, works, strict=True):
        for access in op.writes:
            if access.tensor.startswith("s.") and op.phase in PHASES:
                buffers.setdefault(access.buffer, set()).add(hasattr(work, "_graph"))
    copies = [op for op in schedule.ops if op.phase == Phase.COPY]
    copied = {a.buffer for op in copies for a in op.accesses if a.tensor.startswith("s.")}
    assert copied & {b for b, kinds in buffers.items() if kinds == {False}}
    assert all(len(kinds) == 1 for kinds in buffers.values())


def test_experts_whose_products_wait_for_the_gpu_are_not_replayed(
    graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = WRITERS["two_slots"](presets.load("tiny-moe"), WORKLOAD)
    works = [lambda step: None for _ in schedule.ops]
    for capability, precision, refused in (
        ((9, 0), "bf16", False), ((10, 3), "bf16", False), ((8, 0), "bf16", True), ((12, 0), "bf16", True),
        ((9, 0), "fp32", True),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device, found=capability: found)
        of = dataclasses.replace(schedule, workload=dataclasses.replace(WORKLOAD, precision=precision))
        if refused:
            with pytest.raises(InputError, match="experts cannot be replayed as CUDA graphs here"):
                replayed(of, works)
        else:
            assert len(replayed(of, works)) == len(works)


def test_failing_capture_is_ended(graphs: list[FakeGraph]) -> None:
    def broken(step: int) -> None:
        raise ArithmeticError("no such number")

    with pytest.raises(NotCaptured, match="not captured as a CUDA graph: no such number"):
        Pool().capture(broken, 1)
    assert not FakeGraph.capturing


def test_why_a_capture_broke_is_told_and_not_that_it_cannot_be_ended(
    graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(step: int) -> None:
        raise ArithmeticError("no such number")

    def invalid(graph: FakeGraph) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(FakeGraph, "capture_end", invalid)
    with pytest.raises(NotCaptured, match="no such number"):
        Pool().capture(broken, 1)
    FakeGraph.capturing.clear()


def test_threads_wait_shortly_for_pythons_lock_while_a_backend_lives(gpu: FakeGpu) -> None:
    before = sys.getswitchinterval()
    backend = FakeBackend(gpu)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    backend.close()
    assert sys.getswitchinterval() == pytest.approx(before)


class FakeHandler:
    """Numbers launches as torch's does: what it says of a launch is wrong if another comes in between."""

    def __init__(self) -> None:
        self.number = 0
        self.numbers: list[tuple[int, int]] = []
        self.syncs = SimpleNamespace(**dict.fromkeys(TOLD_OF_SYNCHRONISING, self._handle_kernel_launch))

    def _handle_kernel_launch(self) -> None:
        self.number += 1
        number = self.number
        time.sleep(1e-3)
        self.numbers.append((number, self.number))


class FakeSanitizer:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, enabled: bool = True) -> None:
        self.enabled, self.dispatch = enabled, self
        self.event_handler = FakeHandler()
        self.seen: list[str] = []
        monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(cuda_sanitizer=self))

    def __enter__(self) -> None:
        self.seen.append(threading.current_thread().name)

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("enabled", [True, False])
def test_sanitizer_sees_the_threads_that_launch_where_it_is_on(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    sanitizer = FakeSanitizer(monkeypatch, enabled=enabled)
    _one_task(gpu)
    assert sanitizer.seen == (["stream compute"] if enabled else [])


def test_sanitizer_is_told_of_one_launch_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = FakeSanitizer(monkeypatch).event_handler

    def launch() -> None:
        with sanitized():
            for told in (handler._handle_kernel_launch, handler.syncs.record_state):
                for _ in range(20):
                    told()

    threads = [threading.Thread(target=launch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handler.numbers) == 120 and all(first == last for first, last in handler.numbers)


def test_sanitizer_is_not_imported_by_us(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)  # to import it is to turn its tracing on
    _one_task(gpu)
    assert MODULE not in sys.modules


def _one_task(gpu: FakeGpu) -> None:
    backend = FakeBackend(gpu)
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE)
    backend.host_wait(backend.submit(Task(op, 0, 0, lambda step: None), ()))
    backend.close()


# ---- a real GPU

# of whole 16-row tiles, so that what attention keeps is not padded
REAL = dataclasses.replace(WORKLOAD, seq_len=32)
RACE = 1e-2  # trainings that are further apart have met one
torch.set_float32_matmul_precision("highest")  # whatever the environment says: TF32's rounding looks like a race


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The distance of a layer's parameters over their length, the largest of all layers; 0 where none are updated.

    Of all elements together: Adam makes whole steps of single gradients near zero, whichever sign rounding gives them.
    """
    return max((float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)), default=0.0)


@pytest.mark.parametrize("name", ["two_slots", "lora_streamed"])
def test_another_order_of_sums_is_no_race_and_a_stale_part_of_one_gradient_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(blocks=4)
    schedule = WRITERS[name](model, REAL) if name in WRITERS else built(name, model, REAL)
    right, step = result(schedule, CpuBackend())[1], adam.step

    def with_gradients(change: Callable[[Tensor], Tensor]) -> float:
        monkeypatch.setattr(adam, "step", lambda w, grad, *rest, **more: step(w, change(grad), *rest, **more))
        return apart(result(schedule, CpuBackend())[1], right)

    rounding = torch.Generator().manual_seed(0)

    def rounded(grad: Tensor) -> Tensor:
        return grad + 2e-6 * grad.abs().max() * torch.randn(grad.shape, generator=rounding) * (grad != 0)

    updates: list[Tensor] = []

    def stale(grad: Tensor) -> Tensor:
        updates.append(grad)
        part = len(grad) // 20
        return grad if len(updates) != 8 else torch.cat((updates[-2][:part], grad[part:]))

    assert with_gradients(rounded) < RACE / 2 and with_gradients(stale) > RACE


real = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@real
@pytest.mark.parametrize("name", [*WRITERS, *POLICIES])
def test_gpu_trains_as_the_cpu_does(name: str, tmp_path: Path) -> None:
    model = small(blocks=4)
    schedule = WRITERS[name](model, REAL) if name in WRITERS else built(name, model, REAL)
    losses, parameters = result(schedule, CudaBackend(), nvme=tmp_path)
    right = result(schedule, CpuBackend(), nvme=tmp_path)
    assert losses == pytest.approx(right[0], rel=1e-4)
    assert apart(parameters, right[1]) < RACE


@real
@pytest.mark.parametrize("name", ["streamed", "zero_infinity", "lora_streamed quantised=nf4", *CARRIED])
def test_gpu_evaluates_between_steps_as_the_cpu_does(name: str, tmp_path: Path) -> None:
    schedule = built(name, small(blocks=4), REAL)
    found = []
    for backend in (CudaBackend(), CpuBackend()):
        with trainer(schedule, backend, nvme=tmp_path) as run:
            run.run(2)
            found.append(run.evaluate(Some(vocab_size=256, workload=REAL)))
            run.run(1)
    assert found[0] == (pytest.approx(found[1][0], rel=1e-4), found[1][1])


@real
@pytest.mark.parametrize("writer", WRITERS)
def test_gpu_does_not_notice_delays_and_poison(writer: str) -> None:
    schedule = WRITERS[writer](MODEL, dataclasses.replace(REAL, precision="bf16_split"))
    right = result(schedule, CudaBackend())
    for seed in range(3):
        found = result(schedule, CudaBackend(), debug=Debug(poison=True, delay_s=1e-3, seed=seed))
        assert found[0] == right[0]
        assert all(torch.equal(*pair) for pair in zip(found[1], right[1], strict=True))


@real
@pytest.mark.parametrize(("writer", "by"), [*((writer, "graphs") for writer in WRITERS), ("two_slots", "compiled")])
def test_gpu_trains_the_same_by_graphs_and_compiled(writer: str, by: str) -> None:
    options: dict[str, Any] = {"prepare": replayed} if by == "graphs" else {"pointwise": compiled()}
    schedule = WRITERS[writer](MODEL, REAL)
    with trainer(schedule, CudaBackend(), **options) as run:
        losses = run.run(6)
    with trainer(schedule, CudaBackend()) as run:
        assert losses == pytest.approx(run.run(6), rel=1e-4)


@real
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gpu_updates_as_the_cpu_does(precision: str) -> None:
    assert adam.kernels_on(torch.device("cuda")) is not None
    n, hyper, found = 1_000_003, adam.Adam(lr=1e-2, weight_decay=0.1), []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        weights = torch.empty(n, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
        state = torch.empty(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
        adam_state.initialise(weights, state, precision, torch.randn(n, generator=generator))
        weights, state = weights.to(device), state.to(device)
        for number in (1, 2):
            grad = torch.randn(n, generator=generator).to(weights)
            scale = torch.tensor(0.3, device=device)
            adam.step(weights, grad, state, hyper, number, precision=precision, grad_scale=scale, decay=[(16, 700_000)])
        found.append(adam_state.master_weights(weights, state, precision).cpu())
    tolerance = 1e-5 if precision in (*adam_state.MASTERS, "fp32") else 2**-7
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=real)])
@pytest.mark.parametrize("width", [64, 48])  # of values
@pytest.mark.parametrize("window", [None, 50])
def test_gpu_attends_within_documents(window: int | None, width: int, device: str) -> None:
    """In bf16, as the CPU does in fp32."""
    tokens = torch.randint(60, (2, 256), generator=torch.Generator().manual_seed(0))
    found = []
    for where, dtype in (("cpu", torch.float32), (device, torch.bfloat16)):
        on, generator = torch.device(where), torch.Generator().manual_seed(1)
        shapes = [(2, 256, heads, n) for heads, n in ((8, 64), (2, 64), (2, width), (8, width))]
        *leaves, dy = (torch.randn(shape, generator=generator).to(on, dtype) for shape in shapes)
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        mask = None if window is None or where == "cuda" else band(256, window, on, dtype)
        how = Attention(window=window, mask=mask, documents=documents_of(tokens, 0, on))
        y = how.forward(q, k, v, None)
        found.append([t.detach().float().cpu() for t in (y, *torch.autograd.grad(y, (q, k, v), dy))])
    assert len(documents_of(tokens, 0, torch.device("cpu")).lengths) > 8
    for exact, rounded in zip(*found, strict=True):
        assert (rounded - exact).norm() < 2e-2 * exact.norm()


class EfficientAttention:
    """Computes what the GPU's kernel for wide heads does, of as many keys as queries, on the CPU."""

    @staticmethod
    def _logits(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        assert q.shape == k.shape
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(later, -torch.inf)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *_: object, scale: float | None
    ) -> tuple[Tensor, ...]:
        logits = self._logits(q, k, scale)
        total = torch.nn.functional.pad(logits.logsumexp(-1), (0, -q.shape[2] % 32), value=torch.inf)
        y = logits.softmax(-1) @ v
        return y.transpose(1, 2).contiguous().transpose(1, 2), total, torch.tensor(0), torch.tensor(0)

    def _scaled_dot_product_efficient_attention_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, _: None, y: Tensor, total: Tensor, *rest: object,
        scale: float | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        seq = q.shape[2]
        assert total.shape[-1] % 32 == 0 and total[..., seq:].isinf().all()
        share = (self._logits(q, k, scale) - total[..., :seq, None]).exp()
        d_logits = share * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
        d_logits = d_logits * (q.shape[-1] ** -0.5 if scale is None else scale)
        return d_logits @ k, d_logits.mT @ q, share.mT @ dy, None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=real)])
@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize(("seq", "heads"), [(64, 2), (75, 2), (75, 8)])
def test_gpu_attends_with_heads_too_wide_for_flash_attention(
    seq: int, heads: int, scale: float | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, as the CPU does in fp32; keeping no more than its inputs, its output and a number per row."""
    found: list[list[Tensor]] = []
    for where, dtype in (("cpu", torch.float32), (device, torch.bfloat16 if device == "cuda" else torch.float64)):
        if found and device == "cpu":
            monkeypatch.setattr(attention, "_wide", lambda q: q.shape[-1] > FLASH_DIM)
            monkeypatch.setattr(attention, "aten", EfficientAttention())
        generator = torch.Generator().manual_seed(1)
        shapes = [(2, seq, count, FLASH_DIM + 64) for count in (8, heads, heads, 8)]
        *leaves, dy = (torch.randn(shape, generator=generator).to(where, dtype) for shape in shapes)
        q, k, v = (leaf.requires_grad_() for leaf in leaves)
        y = Attention(scale=scale).forward(q, k, v, None)
        if found:
            kept = [t for t in y.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
            assert sum(t.numel() for t in kept) == 2 * seq * (16 * q.shape[-1] + 2 * heads * q.shape[-1] + 8)
        found.append([t.detach().double().cpu() for t in (y, *torch.autograd.grad(y, (q, k, v), dy))])
    for exact, rounded in zip(*found, strict=True):
        assert (rounded - exact).norm() < (2e-2 if device == "cuda" else 1e-5) * exact.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=real)])
@pytest.mark.parametrize("in_out", [False, True])
def test_gpu_multiplies_with_experts_in_4_bits_as_with_whole_ones(
    in_out: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight two at a time, one without a row; forward, and the gradient of the rows."""
    count, (wide, narrow) = 8, (128, 64)
    monkeypatch.setattr(experts, "EXPERTS_CHUNK", 2 * wide * narrow)
    torch.manual_seed(3)
    whole = torch.randn(count, narrow, wide)
    slab = torch.empty(4 * whole.numel() // 64 + whole.numel() // 2, dtype=torch.uint8)
    nf4.quantise(whole.flatten(), slab, {"p": tuple(whole.shape)}, torch.bfloat16)
    codes, largest = nf4.packed(slab.to(device), {"p": tuple(whole.shape)}, torch.bfloat16).values()
    chosen = torch.tensor([e for e in range(count) if e != 3]).repeat(12)[:, None].to(device, torch.int32)
    order = chosen.flatten().argsort(stable=True).to(torch.int32)
    made = nf4.whole(codes, largest, torch.bfloat16)
    rows = torch.randn(len(chosen), narrow if in_out else wide).to(device, torch.bfloat16)
    found = []
    for stored in ((codes, largest), (made,)):
        x = rows.clone().requires_grad_()
        of = experts._ByExpert if stored[0] is made else experts._ByPackedExpert
        y = of.apply(x, *stored, None, chosen, order, in_out)  # type: ignore[no-untyped-call]
        found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    for by_some, at_once in zip(*found, strict=True):
        assert (by_some - at_once).norm() <= (1e-2 if device == "cuda" else 0.0) * at_once.norm()


@real
def test_trace_of_a_gpu_keeps_the_order_of_each_stream_and_wait() -> None:
    schedule = WRITERS["two_slots"](MODEL, REAL)
    with trainer(schedule, CudaBackend(), record=True) as run:
        run.run(STEPS)
        trace = run.trace()
    count, slack_ns = len(schedule.ops), 100_000  # two clocks
    for stream in schedule.streams:
        rows = trace.rows_of(schedule, stream)
        assert (trace.end_ns[rows][:-1] <= trace.start_ns[rows][1:]).all()
    for row in range(len(trace)):
        for wait in schedule.waits_of[schedule.ops[row % count].name]:
            before = row - row % count - wait.distance * count + schedule.index[wait.on]
            assert before < 0 or trace.end_ns[before] <= trace.start_ns[row] + slack_ns
    assert np.all(trace.start_ns <= trace.end_ns)


@real
def test_spin_lasts_as_long_as_asked() -> None:
    for lasting, within in ((Spin(), 0.1), (Products(torch.device("cuda")), 0.5)):  # whose clock is not always one
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        lasting(20_000_000)
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) == pytest.approx(20, rel=within)

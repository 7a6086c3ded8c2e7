"""The executor's loop, the store's memory, the CPU's threads and traces, and the ends of buffers' contents."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_written import WRITERS, small
from torch import Tensor

from megatrain import executor, initial
from megatrain import store as store_module
from megatrain.adam import Adam
from megatrain.adam_state import initialise
from megatrain.autograd import Saved
from megatrain.backend import OpFailed, Task
from megatrain.cpu import CpuBackend, CpuEvent
from megatrain.data import RandomTokens
from megatrain.executor import Executor, NotVerified, in_turn, serial
from megatrain.lifetime import released
from megatrain.store import Store, StoreError
from megatrain.train import Debug, Trainer
from schedules import policies
from schedules.errors import Refused
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier, Wait
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.verify import Verified, verify
from schedules.workload import MemoryBudget, Workload

WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=8, precision="fp32", grad_clip=0.1)
MODEL = small()


def trainer(schedule: Schedule, **options: object) -> Trainer[CpuEvent]:
    data = RandomTokens(vocab_size=256, workload=schedule.workload, seed=1)
    start = initial.random_parameters(schedule.model, 0)
    return Trainer(verify(schedule), CpuBackend(), data, Adam(lr=1e-2), initial=start, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*WRITERS, "zero3_offload"])
def test_the_order_in_which_an_op_names_what_it_touches_means_nothing(name: str) -> None:
    if name in WRITERS:
        schedule = WRITERS[name](MODEL, WORKLOAD)
    else:
        schedule = policies.build(name, MODEL, WORKLOAD, MemoryBudget(device_bytes=10**9, host_bytes=10**9))
    turned = [dataclasses.replace(op, reads=op.reads[::-1], writes=op.writes[::-1]) for op in schedule.ops]
    losses = []
    for ops in (schedule.ops, turned):
        with trainer(dataclasses.replace(schedule, ops=tuple(ops))) as run:
            losses.append(run.run(3))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


# ---- the loop


def sync(name: str, stream: Stream, **options: object) -> Op:
    return Op(name=name, kind=Kind.UPDATE, phase=Phase.SYNC, stream=stream, **options)  # type: ignore[arg-type]


def bare(ops: list[Op], waits: list[Wait]) -> Verified:
    """A proof that nobody gave, of ops that touch nothing."""
    schedule = Schedule(ops=tuple(ops), buffers=(), waits=tuple(waits), model=MODEL, workload=WORKLOAD, policy="bare")
    return Verified(
        schedule=schedule, fingerprint=schedule.fingerprint, initial={}, newest=frozenset(), carried={}, behind={}
    )


class Recorder:
    """A backend that writes down what it is asked for; events are names, finished at once."""

    machine, source = "none", "predicted"

    def __init__(self) -> None:
        self.log: list[str] = []

    def issue(self, task: Task) -> int:
        return 0

    def submit(self, task: Task, waits: list[str]) -> str:
        self.log.append(f"{task.op.name}{task.step} on {task.op.stream} after {' '.join(waits) or 'nothing'}")
        return f"{task.op.name}{task.step}"

    def run_on_host(self, task: Task) -> str:
        self.log.append(f"{task.op.name}{task.step} here")
        return f"{task.op.name}{task.step}"

    def host_wait(self, event: str) -> None:
        self.log.append(f"until {event}")

    def close(self) -> None:
        self.log.append("closed")


def test_loop_issues_in_program_order_with_the_waits_of_each_step() -> None:
    ops = [
        sync("a", Stream.H2D),
        sync("b", Stream.COMPUTE, blocking=True),
        sync("c", Stream.HOST),
        sync("d", Stream.CPU),
    ]
    waits = [Wait(op="b", on="a"), Wait(op="a", on="d", distance=1), Wait(op="c", on="a"), Wait(op="d", on="b")]
    backend = Recorder()
    executor = Executor(bare(ops, waits), backend)  # type: ignore[arg-type]
    executor.issue(0)
    executor.issue(1)
    per_step = [
        "b{0} on compute after a{0}", "until b{0}", "until a{0}", "c{0} here", "d{0} on cpu after b{0}",
    ]  # fmt: skip
    assert backend.log == [
        "a0 on h2d after nothing",
        *(line.format(0) for line in per_step),
        "a1 on h2d after d0",
        *(line.format(1) for line in per_step),
    ]
    backend.log.clear()
    executor.wait(1)
    assert sorted(backend.log) == ["until a1", "until b1", "until c1", "until d1"]


class Event:
    """One that can be seen to be forgotten."""

    def __init__(self, step: int) -> None:
        self.step = step

    def span(self) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize("alone", [True, False], ids=["run", "issue and wait"])
def test_events_are_held_for_as_long_as_a_wait_can_need_them(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of thousands of steps holds those of two."""
    monkeypatch.setattr(executor, "TRACED", 1)
    held: weakref.WeakSet[Event] = weakref.WeakSet()
    steps_held: list[list[int]] = []

    class Forgetful(Recorder):
        def submit(self, task: Task, waits: list[Event]) -> Event:  # type: ignore[override]
            event = Event(task.step)
            held.add(event)
            steps_held.append(sorted({event.step for event in held}))
            return event

        def host_wait(self, event: Event) -> None:  # type: ignore[override]
            self.log.append(f"until {event.step}")

    backend = Forgetful()
    loop = Executor(bare([sync("a", Stream.H2D)], [Wait(op="a", on="a", distance=1)]), backend)  # type: ignore[arg-type]
    if alone:
        loop.run(5)
    else:
        for step in range(5):
            loop.issue(step)
            loop.wait(step - 1)
    assert steps_held == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert backend.log == [f"until {step}" for step in ([4] if alone else range(4))]
    backend.log.clear()
    loop.wait(0)  # it is known to have finished
    loop.wait(4)
    assert backend.log == ["until 4"]


def test_waiting_for_a_step_leaves_later_ones_to_be_waited_for() -> None:
    verified, released = bare([sync("a", Stream.COMPUTE)], []), threading.Event()
    with closing(CpuBackend()) as backend:
        steps = Executor(verified, backend, [lambda step: step < 1 or released.wait(10)], record=True)
        for step in range(3):
            steps.issue(step)
        steps.wait(0)
        released.set()
        steps.wait(1)
        assert steps.trace().steps == 2


def test_only_what_was_verified_runs() -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    with pytest.raises(NotVerified, match="Schedule is not a proof"):
        Executor(schedule, Recorder())  # type: ignore[arg-type]
    longer = dataclasses.replace(WORKLOAD, accumulation=WORKLOAD.accumulation + 1)
    clipped = dataclasses.replace(WORKLOAD, grad_clip=0.5)
    turned = dataclasses.replace(MODEL, rope_theta=2 * MODEL.rope_theta)
    others = (
        {"waits": schedule.waits[1:]}, {"workload": longer}, {"workload": clipped}, {"model": turned}, {"staleness": 1},
    )  # fmt: skip
    for changed in others:
        other = dataclasses.replace(schedule, **changed)  # type: ignore[arg-type]
        with pytest.raises(NotVerified, match=f"with fingerprint {schedule.fingerprint[:8]}, this has "):
            Executor(dataclasses.replace(verify(schedule), schedule=other), Recorder())  # type: ignore[arg-type]
    renamed = dataclasses.replace(schedule, policy="mine", model=dataclasses.replace(MODEL, name="mine"))
    Executor(dataclasses.replace(verify(schedule), schedule=renamed), Recorder())  # type: ignore[arg-type]


# ---- the trace of a real run


@pytest.mark.parametrize("writer", WRITERS)
def test_trace_of_a_run_keeps_every_order_that_the_schedule_asks_for(writer: str) -> None:
    schedule = WRITERS[writer](MODEL, WORKLOAD)
    with trainer(schedule, record=True, debug=Debug(delay_s=0.0005)) as run:
        run.run(3)
        trace = run.trace()
    count = len(schedule.ops)
    assert trace.source == "measured"
    trace.check(schedule)
    np.testing.assert_array_equal(trace.op, np.tile(np.arange(count), 3))
    np.testing.assert_array_equal(trace.step, np.repeat(np.arange(3), count))
    assert trace.issue_ns[0] == 0
    assert (np.diff(trace.issue_ns) >= 0).all()
    assert (trace.start_ns <= trace.end_ns).all()
    for row in range(len(trace)):
        step, op = divmod(row, count)
        for wait in schedule.waits_of[schedule.ops[op].name]:
            if wait.distance <= step:
                before = (step - wait.distance) * count + schedule.index[wait.on]
                assert trace.end_ns[before] <= trace.start_ns[row]
        if trace.waited_on[row] >= 0:
            assert trace.issue_ns[row] < trace.end_ns[trace.waited_on[row]] <= trace.start_ns[row]
        if schedule.ops[op].blocking and row + 1 < len(trace):
            assert trace.issue_ns[row + 1] >= trace.end_ns[row]
    for stream in schedule.streams:
        rows = trace.rows_of(schedule, stream)
        assert (trace.end_ns[rows][:-1] <= trace.start_ns[rows][1:]).all()


def test_second_run_goes_on_where_the_first_ended() -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    told: list[tuple[int, float]] = []
    with trainer(schedule, record=True) as once, trainer(schedule, record=True) as twice:
        whole = once.run(5)
        parts = twice.run(2, on_step=lambda step, loss, norm: told.append((step, loss)))
        twice.trace()
        parts += twice.run(3, on_step=lambda step, loss, norm: told.append((step, loss)))
        assert parts == whole
        assert told == list(enumerate(whole))
        assert twice.trace().steps == 3
        for i in MODEL.layers:
            assert torch.equal(once.parameters(i), twice.parameters(i))


@pytest.mark.parametrize("one_by_one", [serial, in_turn])
def test_a_training_goes_on_however_its_ops_are_issued(one_by_one: Callable[[Schedule], Schedule]) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    with trainer(schedule) as usual, trainer(schedule, record=True) as other:
        whole = usual.run(5)
        parts = other.run(2)
        let_go = weakref.ref(other._executor)
        other.issue_by(Executor(verify(one_by_one(schedule)), other._backend, other.works(), record=True))
        assert let_go() is None  # its graphs would hold memory
        parts += other.run(3)
        assert parts == whole
        trace = other.trace()
        assert trace.steps == 3 and (trace.start_ns[1:] >= trace.end_ns[:-1]).all()  # one op after another
        for i in MODEL.layers:
            assert torch.equal(usual.parameters(i), other.parameters(i))


def test_only_the_last_steps_of_a_long_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "TRACED", 3)
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    with trainer(schedule, record=True) as run:
        run.run(5)
        assert not run._executor._rows  # an event of a GPU takes memory
        trace = run.trace()
    assert trace.steps == 3 and (np.diff(trace.step_end_ns) > 0).all()
    assert trace.op.tolist() == list(range(len(schedule.ops))) * 3


def test_data_with_more_tokens_than_the_model_is_refused() -> None:
    verified = verify(WRITERS["on_device"](MODEL, WORKLOAD))
    data = RandomTokens(vocab_size=257, workload=WORKLOAD)
    with pytest.raises(ValueError, match="257 different tokens, small 256"):
        Trainer(verified, CpuBackend(), data, Adam(lr=1.0), initial=initial.random_parameters(MODEL, 0))


# ---- the CPU as a machine


def test_streams_run_beside_each_other_and_in_order() -> None:
    backend, order, meeting = CpuBackend(), [], threading.Barrier(2, timeout=30)
    one = sync("one", Stream.H2D)
    two = sync("two", Stream.COMPUTE)
    backend.submit(Task(one, 0, 0, lambda step: meeting.wait() and None), ())
    met = backend.submit(Task(two, 1, 0, lambda step: meeting.wait() and None), ())
    for number in range(20):
        last = backend.submit(Task(one, 0, number, order.append), ())
    backend.host_wait(met)  # each was at work while the other was
    backend.host_wait(last)
    backend.close()
    assert order == list(range(20))


def test_a_streams_number_of_threads_is_its_own_whatever_other_threads_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a thread that asks for the first time what another has set last, whatever itself has set."""
    backend, found, real = CpuBackend(threads={Stream.CPU: 3}), list[int](), torch.set_num_threads

    def then_another_thread_sets(count: int) -> None:
        real(count)
        another = threading.Thread(target=real, args=(1,))
        another.start()
        another.join()

    monkeypatch.setattr(torch, "set_num_threads", then_another_thread_sets)
    task = Task(sync("op", Stream.CPU), 0, 0, lambda step: found.append(torch.get_num_threads()))
    backend.host_wait(backend.submit(task, []))
    backend.close()
    assert found == [3]


def test_threads_of_torch_are_set_per_stream() -> None:
    backend, found = CpuBackend(threads={Stream.CPU: 2}), {}
    for stream in (Stream.COMPUTE, Stream.CPU):
        task = Task(sync("op", stream), 0, 0, lambda step, s=stream: found.update({s: torch.get_num_threads()}))
        backend.host_wait(backend.submit(task, ()))
    backend.close()
    assert found == {Stream.COMPUTE: 1, Stream.CPU: 2}


def test_closed_backend_takes_no_more() -> None:
    backend = CpuBackend()
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.submit(Task(sync("op", Stream.CPU), 0, 0, lambda step: None), ())


def test_a_failure_is_told_whenever_it_comes() -> None:
    """An op fails while the issuing thread looks whether one has."""
    coming = [Task(sync("late", Stream.CPU), 0, 0, lambda step: None)]

    class Failing(CpuBackend):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "_failure" and coming:
                self._fail(coming.pop(), ValueError("why"))
            return found

    with closing(Failing()) as backend, pytest.raises(OpFailed, match=r"late of step 0 .*why"):
        backend.host_wait(backend.submit(Task(sync("op", Stream.CPU), 0, 0, lambda step: None), ()))


def test_a_thread_that_cannot_begin_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(count: int) -> None:
        raise OSError("no such cores")

    monkeypatch.setattr("megatrain.cpu.use_threads", failing)
    backend = CpuBackend()
    with closing(backend), pytest.raises(OpFailed, match="no such cores"):
        first = backend.submit(Task(sync("a", Stream.CPU), 0, 0, lambda step: None), ())
        backend.host_wait(backend.submit(Task(sync("b", Stream.H2D), 0, 1, lambda step: None), (first,)))


def test_where_no_more_threads_are_allowed_that_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a limit; to close the backend is no second error, which would hide the first."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with closing(CpuBackend()) as backend, pytest.raises(RuntimeError, match="can't start new thread"):
        backend.submit(Task(sync("op", Stream.CPU), 0, 0, lambda step: None), ())


def test_memory_is_exact_aligned_and_touched() -> None:
    memory = CpuBackend().allocate(Buffer(name="b", tier=Tier.HOST, nbytes=1000))
    assert memory.shape == (1000,) and memory.dtype == torch.uint8
    assert memory.data_ptr() % 64 == 0 and not memory.any()
    with pytest.raises(Refused, match=r"no memory could be had for b, 1.15e\+09 GB: .*allocate"):
        CpuBackend().allocate(Buffer(name="b", tier=Tier.HOST, nbytes=1 << 60))


def test_a_trainer_that_cannot_be_prepared_leaves_no_file_open(tmp_path: Path) -> None:
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**9, nvme_bytes=10**9)
    schedule = policies.build("zero_infinity", MODEL, WORKLOAD, memory)

    def refuse(*_: object) -> None:
        raise ValueError("cannot be prepared")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="cannot be prepared"):
        trainer(schedule, nvme=tmp_path, prepare=refuse)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the store


def cpu_store(schedule: Schedule, *, poison: bool = False) -> Store:
    return Store(schedule, CpuBackend().allocate, poison=poison)


def test_views_have_the_types_and_shapes_of_their_tensors() -> None:
    workload = dataclasses.replace(WORKLOAD, precision="bf16_split")
    schedule = WRITERS["stop_and_go"](MODEL, workload)
    store = cpu_store(schedule)
    n = MODEL.params(0)
    expected = {
        "w.0": (torch.bfloat16, (n,)),
        "g.0": (torch.bfloat16, (n,)),
        "g32.0": (torch.float32, (n,)),
        "o.0": (torch.uint8, (10 * n,)),
        "x.0.1": (torch.bfloat16, (2, 8, 16)),
        "d.0.1": (torch.bfloat16, (2, 8, 16)),
        "norm": (torch.float64, ()),
    }
    for name, (dtype, shape) in expected.items():
        access = next(access for op in schedule.ops for access in op.accesses if access.tensor == name)
        tensor = store.tensor(access)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        assert tensor.data_ptr() == store.tensor(access).data_ptr()


def test_fill_puts_weights_and_state_where_the_first_step_expects_them() -> None:
    workload = dataclasses.replace(WORKLOAD, precision="bf16_split")
    schedule = WRITERS["two_slots"](MODEL, workload)
    verified, store, source = verify(schedule), cpu_store(schedule), initial.random_parameters(MODEL, 3)
    store.fill(verified, source)
    for i in MODEL.layers:
        torch.testing.assert_close(store.master(verified, i), source(i), rtol=0, atol=0)
        name, n = MODEL.layer_name(i), MODEL.params(i)
        weights, state = torch.empty(n, dtype=torch.bfloat16), torch.empty(10 * n, dtype=torch.uint8)
        initialise(weights, state, "bf16_split", source(i))
        assert torch.equal(store.tensor(Access(f"host.w.{name}", f"w.{name}")), weights)
        assert torch.equal(store.tensor(Access(f"host.o.{name}", f"o.{name}")), state)


def test_nvme_is_refused() -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    buffers = tuple(dataclasses.replace(b, tier=Tier.NVME) if b.name == "host.w.0" else b for b in schedule.buffers)
    with pytest.raises(StoreError, match=r"host\.w\.0 is on NVMe"):
        cpu_store(dataclasses.replace(schedule, buffers=buffers))


def test_saved_activations_larger_than_their_buffer_are_refused() -> None:
    schedule = WRITERS["on_device"](MODEL, WORKLOAD)
    store, access = cpu_store(schedule), Access("saved0", "s.0.0")
    limit = schedule.buffer["saved0"].nbytes

    class Kept:
        nbytes = limit + 1

    with pytest.raises(StoreError, match=f"{limit + 1} bytes of saved activations, its buffer saved0 has {limit}"):
        store.put_saved(access, Kept())  # type: ignore[arg-type]


def test_saved_activations_that_are_not_there_are_told() -> None:
    store = cpu_store(WRITERS["on_device"](MODEL, WORKLOAD))
    with pytest.raises(StoreError, match=r"saved0 holds nothing where s\.0\.0 is to be read"):
        store.saved(Access("saved0", "s.0.0"))


def test_release_poisons_only_in_debugging() -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    access = Access("weight0", "w.0")
    for poison in (False, True):
        store = cpu_store(schedule, poison=poison)
        assert bool(store.tensor(access).isnan().all()) is poison
        store.tensor(access).fill_(1.0)
        store.release("weight0")  # by a thread of the host, for which no stream of a GPU would wait
        assert bool((store.tensor(access) == 1.0).all())
        store.release("weight0", queued=True)
        assert bool(store.tensor(access).isnan().all()) is poison


def test_saved_activations_take_no_memory_of_the_store_and_are_gone_after_each_step() -> None:
    schedule = WRITERS["on_device"](MODEL, WORKLOAD)
    allocated: list[str] = []

    def allocate(buffer: Buffer) -> Tensor:
        allocated.append(buffer.name)
        return torch.empty(buffer.nbytes, dtype=torch.uint8)

    Store(schedule, allocate)
    assert allocated and not [name for name in allocated if name.startswith("saved")]
    with trainer(schedule) as run:
        run.run(1)
        assert not run._store._saved
        assert not run._store._memory  # nor is any held for copies, of which there are none


def test_copied_activations_stay_in_their_buffers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back to torch it could be another op's before the copy has read it: copies run on other streams."""
    schedule = WRITERS["moved_out"](MODEL, WORKLOAD)
    copies = [op for op in schedule.ops if op.phase == Phase.COPY and any(a.tensor[0] == "s" for a in op.accesses)]
    devices = {a.buffer for op in copies for a in op.accesses if schedule.buffer[a.buffer].tier == Tier.DEVICE}
    assert devices

    def bind(saved: Saved, buffer: Tensor) -> None:
        pytest.fail("new memory for activations that had some")

    monkeypatch.setattr(Saved, "bind", bind)
    with trainer(schedule) as run:
        run.run(2)
        assert set(run._store._memory) == devices
        for buffer in devices:
            run._store.vacate(Access(buffer, "s.0.0"))
        assert not run._store._memory


def test_memory_that_another_stream_allocated_is_given_away_after_the_work_at_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[object] = []
    part = SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=recorded.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    with trainer(WRITERS["moved_out"](MODEL, WORKLOAD)) as run:
        run._store._memory["saved0"] = (part,)  # type: ignore[assignment]
        run._store.vacate(Access("saved0", "s.0.0"))
    assert recorded == ["current of cuda:0"]


def test_evicted_activations_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device: list[tuple[Tensor, ...]] = []
    restore = Saved.restore

    def come(saved: Saved, buffer: Tensor, memory: Sequence[Tensor]) -> bool:
        on_device.append(saved.tensors)
        return restore(saved, buffer, memory)

    monkeypatch.setattr(Saved, "restore", come)
    with trainer(WRITERS["moved_out"](MODEL, WORKLOAD)) as run:
        run.run(1)
    assert on_device == [()] * len(MODEL.blocks) * WORKLOAD.accumulation


# ---- where contents end


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_released_contents_are_never_read_again_and_all_others_are(writer: str, tied: bool) -> None:
    schedule = WRITERS[writer](small(tied=tied), WORKLOAD)
    ends = released(schedule)
    dead: set[str] = set()
    live: set[str] = set()
    for _ in range(3):
        for op, buffers in zip(schedule.ops, ends, strict=True):
            assert not dead & {access.buffer for access in op.reads}, op.name
            for access in op.writes:
                # nobody reads one content from two streams here, so each must have been released
                assert access.buffer not in live or op.reads_from(access.buffer), (op.name, access.buffer)
                live.add(access.buffer)
                dead.discard(access.buffer)
            live -= set(buffers)
            dead |= set(buffers)
    assert dead


def test_content_with_two_readers_at_once_is_not_released_by_either() -> None:
    p = Program(MODEL, WORKLOAD)
    slab = p.buffer("slab", Tier.HOST)
    p.zero(0, grad=(slab, "g.0"), stream=Stream.CPU)
    p.cast((slab, "g.0"), (p.buffer("a", Tier.HOST), "g32.0"), stream=Stream.CPU)
    p.cast((slab, "g.0"), (p.buffer("b", Tier.HOST), "g32.0"), stream=Stream.D2H)
    schedule = p.build(policy="two readers")
    assert released(schedule) == [(), ("a",), ("b",)]
    ordered = dataclasses.replace(
        schedule, waits=(*schedule.waits, Wait(op=schedule.ops[2].name, on=schedule.ops[1].name))
    )
    assert released(ordered) == [(), ("a",), ("slab", "b")]


def test_error_of_an_op_on_the_host_thread_has_its_name() -> None:
    schedule = WRITERS["stop_and_go"](MODEL, WORKLOAD)

    def broken(step: int, layer: int, of: slice, grad: Tensor) -> None:
        raise ArithmeticError("out of numbers")

    with trainer(schedule, on_gradient=broken) as run, pytest.raises(OpFailed, match=r"U\.embed of step 0 .* host"):
        run.run(1)


def test_after_a_failure_nothing_runs_on_the_host_thread_either() -> None:
    def broken(step: int) -> None:
        raise ArithmeticError("out of numbers")

    ran: list[int] = []
    with closing(CpuBackend()) as backend:
        backend.submit(Task(sync("bad", Stream.COMPUTE), 0, 0, broken), ()).wait()
        with pytest.raises(OpFailed, match="out of numbers"):
            backend.run_on_host(Task(sync("here", Stream.HOST), 1, 0, ran.append))
    assert not ran


@pytest.mark.parametrize(("precision", "in_place"), [("bf16", True), ("bf16_split", False)])
def test_a_master_is_made_on_the_host_and_what_needs_no_room_where_it_stays(
    precision: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is full has no room to make one."""
    schedule = WRITERS["on_device"](MODEL, dataclasses.replace(WORKLOAD, precision=precision))
    verified, slabs, made = verify(schedule), set[int](), []

    def allocate(buffer: Buffer) -> Tensor:
        memory = torch.zeros(buffer.nbytes, dtype=torch.uint8)
        slabs.add(memory.untyped_storage().data_ptr())
        return memory

    def seen(weights: Tensor, state: Tensor, *rest: Any) -> None:
        made.extend(part.untyped_storage().data_ptr() in slabs for part in (weights, state))
        initialise(weights, state, *rest)

    store = Store(schedule, allocate)
    monkeypatch.setattr(store_module.adam_state, "initialise", seen)
    store.fill(verified, initial.random_parameters(MODEL, 0))
    assert set(made) == {in_place}

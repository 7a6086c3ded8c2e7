"""A recording fake of torch.cuda, a backend that asks it, and trainings by that backend.

The fake runs a task's work when it is handed over, on the CPU: whole trainings pass through it, with the right
numbers, and it writes down each event that was recorded, and each wait for one. What is queued on a stream that
copies waits until the work has handed all over, as copies do that a GPU has not begun: what the host does meanwhile
comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hand_written import small
from torch import Tensor

from megatrain import busy_work, cuda, initial
from megatrain.adam import Adam
from megatrain.backend import Task
from megatrain.cpu import CpuBackend
from megatrain.cuda import CudaBackend
from megatrain.data import RandomTokens
from megatrain.train import Trainer
from schedules import policies, trained
from schedules.model import ModelSpec
from schedules.op import DEVICE_STREAMS, Buffer, Stream, Tier
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

MODEL = small()
WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=8, precision="fp32", grad_clip=0.1)
STEPS = 3
FAST = 1.01  # ms of the GPU in one of the host
COPYING = (Stream.H2D, Stream.D2H)
STREAMS = (*DEVICE_STREAMS, "clock")  # in the order in which a backend makes them


class FakeEvent:
    """Remembers who recorded it, and the tick; the GPU's clock is a fast one."""

    def __init__(self, gpu: FakeGpu, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.gpu, self.name, self.tick, self.stream = gpu, "", -1, ""
        self.timed, self.sleeps = enable_timing, blocking

    def record(self, stream: FakeStream | None = None) -> None:
        self.name, self.tick, self.stream = self.gpu.running(), self.gpu.tick(), stream.name if stream else "default"
        self.gpu.write(("record", self.stream, self.name))

    def synchronize(self) -> None:
        assert self.sleeps, "a thread that waits awake takes a core from the optimizer"
        if self.name in self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.gpu.see(self)
        self.gpu.write(("host waits", self.name))

    def query(self) -> bool:
        self.gpu.see(self)
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.tick >= 0 and other.tick >= 0, "CUDA tells no time of an event that was never recorded"
        assert self.timed and other.timed, "CUDA tells no time of an event that was not made for it"
        for event in (self, other):
            assert event.tick <= self.gpu.reached.get(event.stream, -1), "nobody has seen that it was reached"
        return FAST * (other.tick - self.tick)


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.name = gpu, STREAMS[gpu.streams % len(STREAMS)]
        gpu.streams += 1

    def wait_event(self, event: FakeEvent) -> None:
        assert event.name, "a wait for an event that was never recorded is no wait"
        self.gpu.write(("wait", self.name, event.name))


class FakeGpu:
    """What the backend asks of torch.cuda, written down in the order it was asked."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.spun: list[tuple[str, int]] = []
        self.broken: set[str] = set()
        self.reached: dict[str, int] = {}  # by stream, the tick of the last event that the host has waited for
        self.streams = 0
        self.on_product: Callable[[], None] = lambda: None
        self.pinned: set[int] = set()  # addresses of the host's memory that is; all else is the device's
        self._lock, self._ticks, self._here = threading.Lock(), 0, threading.local()

    def running(self) -> str:
        return getattr(self._here, "name", "calibration")

    def run(self, name: str) -> None:
        self._here.name = name

    def queues(self) -> bool:
        return getattr(self._here, "stream", "default") in COPYING

    def queue(self, call: Callable[[], Any]) -> None:
        self._here.queued.append(call)

    def tick(self) -> int:
        with self._lock:
            self._ticks += 1
            return self._ticks

    def see(self, event: FakeEvent) -> None:
        with self._lock:
            self.reached[event.stream] = max(event.tick, self.reached.get(event.stream, -1))

    def write(self, line: tuple[str, ...]) -> None:
        with self._lock:
            self.log.append(line)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._here.stream, self._here.queued = stream.name, []
        yield
        self._here.stream = "default"
        for call in self._here.queued:
            call()

    def compute(self, count: int) -> None:
        for _ in range(count):
            self.write(("product", getattr(self._here, "stream", "default")))
            self.on_product()

    def sleep(self, cycles: int) -> None:
        stream = getattr(self._here, "stream", "default")
        self.spun.append((stream, cycles))
        self.write(("spin", stream))


class FakeBackend(CudaBackend):
    """The device's memory is the host's."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(machine="fake")
        self.gpu = gpu

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def allocate(self, buffer: Buffer) -> Tensor:
        memory = super().allocate(buffer)
        if buffer.tier == Tier.HOST:
            self.gpu.pinned.add(memory.untyped_storage().data_ptr())
        return memory


class FakeRuntime:
    def __init__(self, status: int = 0) -> None:
        self.status, self.pinned = status, {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def installed(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The fake in the place of torch.cuda, for one test."""
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(fake, **options))
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: FakeStream(fake))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep)
    monkeypatch.setattr(busy_work, "PRODUCT", 8)
    monkeypatch.setattr(busy_work.Products, "_queue", lambda products, count: fake.compute(count))
    monkeypatch.setattr(torch.cuda, "cudart", FakeRuntime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.write(("host waits for all",)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    run = cuda.DeviceEvent.run

    def named(event: cuda.DeviceEvent, task: Task) -> None:
        fake.run(f"{task.op.name}@{task.step}")
        run(event, task)

    monkeypatch.setattr(cuda.DeviceEvent, "run", named)
    copy, fill = Tensor.copy_, Tensor.fill_

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not (non_blocking and fake.queues()):
            return copy(target, source, non_blocking)
        fake.queue(lambda: copy(target, source, non_blocking))
        return target

    def filled(target: Tensor, value: Any) -> Tensor:
        if target.untyped_storage().data_ptr() in fake.pinned or not fake.queues():
            return fill(target, value)
        fake.queue(lambda: fill(target, value))
        return target

    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "fill_", filled)
    return fake


# ---- trainings


def trainer(schedule: Schedule, backend: CpuBackend, **options: Any) -> Trainer[Any]:
    data = RandomTokens(vocab_size=256, workload=schedule.workload, seed=1)
    start = initial.random_parameters(schedule.model, 0)
    return Trainer(verify(schedule), backend, data, Adam(lr=1e-2), initial=start, **options)


def result(schedule: Schedule, backend: CpuBackend, **options: Any) -> tuple[list[float], list[Tensor]]:
    with trainer(schedule, backend, **options) as run:
        losses = run.run(STEPS)
        return losses, [run.parameters(i).cpu() for i in trained.layers(schedule.model, schedule.workload)]


class Some(RandomTokens):
    """So many sequences."""

    sequences = 10


QUANTISED = ("lora_streamed quantised=nf4", "lora_streamed quantised=nf4 whole=matrices", "flexgen_block quantised=nf4")
CARRIED = ("streamed through=2 parts=2", "streamed through=1 hold=2 order=microbatches")  # where gradients are clipped
POLICIES = [*policies.names(), *QUANTISED, *CARRIED]


def built(policy: str, model: ModelSpec, workload: Workload) -> Schedule:
    """The schedule of a policy, which may be followed by knobs, with memory for everything."""
    name, knobs = policies.with_knobs(policy)
    return policies.build(name, model, workload, MemoryBudget(device_bytes=10**9, host_bytes=10**9), **knobs)

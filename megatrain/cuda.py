"""A GPU as a machine: its queues are CUDA streams, its memories the GPU's own and pinned slabs of the host.

Each device stream has a thread of the host that hands the stream's ops over to CUDA, in order. To wait for an op of
another device stream, it has the GPU wait for that op's event; for an op on the host, such as the optimizer's, it waits
itself. So the issuing thread waits for nothing that it was not told to wait for, the GPU always has the next ops
queued, and when an op on the host fails, nothing is left waiting on the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.backend import Backend, Task
from megatrain.busy_work import Products, Spin
from megatrain.cores import usable_cores
from megatrain.cpu import CpuBackend, CpuEvent, Queue, use_threads
from megatrain.device_clock import Clock, timed_event
from megatrain.pinned import PinError, cpus_beside, pinned
from megatrain.sanitizer import sanitized
from schedules.errors import Refused
from schedules.op import DEVICE_STREAMS, Buffer, Op, Stream, Tier
from schedules.schedule import Schedule
from sim.cost import issue_kind
from sim.units import scaled

IN_FLIGHT = 8  # ops handed over to a stream and not finished: enough to never starve it
RESERVED_CORES = 2  # for the issuing thread and the one that launches kernels; the optimizer takes the others
AHEAD_S, AHEAD_UP_TO = 2e-3, 8192  # see `kept_at_work`; tokens of a micro-batch
LOADED_S = 1.0  # of work, after which a GPU's clock has settled
QUEUES = 32  # the most that CUDA makes
SWITCH_S = 2e-4  # a thread gives up Python's lock after that to one that has an op to hand over; Python's own is 5 ms


class DeviceEvent(CpuEvent):
    """The end of a task on a CUDA stream. As a CpuEvent it is reached once the task is handed over to CUDA.

    `failed` is told of an error on the GPU, which shows only when somebody waits; `delay` queues something before the
    task.
    """

    __slots__ = ("_clock", "_delay", "_end", "_failed", "_start", "_stream", "host_ns")

    def __init__(
        self,
        stream: torch.cuda.Stream,
        clock: Clock,
        failed: Callable[[BaseException], None],
        delay: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._stream, self._clock, self._failed, self._delay = stream, clock, failed, delay
        self._start, self._end = timed_event(), timed_event()
        self.host_ns = 0  # how long handing over took

    def span(self) -> tuple[int, int]:
        """See Event."""
        return self._clock.ns(self._start), self._clock.ns(self._end)

    def reached(self) -> bool:
        """Whether the task has ended on the GPU."""
        return super().reached() and bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the task's end on the GPU."""
        super().wait()
        try:
            self._end.synchronize()
        except Exception as error:  # a kernel went wrong; CUDA tells whoever comes first
            self._failed(error)

    def follow(self, before: CpuEvent) -> None:
        """What is handed over next runs after `before`."""
        if isinstance(before, DeviceEvent):
            CpuEvent.wait(before)  # until it is handed over: an event can be waited for once it is recorded
            self._stream.wait_event(before._end)
        else:
            before.wait()

    def compute_until(self, before: CpuEvent, products: Products) -> None:
        """Keep the stream at work until `before` has been reached."""
        with torch.cuda.stream(self._stream):
            products.until(before.reached)

    def run(self, task: Task) -> None:
        """Hand the task over, between two events of its stream."""
        begun = time.perf_counter_ns()
        with torch.cuda.stream(self._stream):
            if self._delay is not None:
                self._delay()
            self._start.record(self._stream)
            task.work(task.step)
            self._end.record(self._stream)
        self.host_ns = time.perf_counter_ns() - begun


class CudaBackend(CpuBackend):
    """See Backend. Ops of h2d, compute and d2h run on CUDA streams, all others as on the CPU.

    The optimizer's stream has all but RESERVED_CORES of the cores beside the GPU, since the memory that it works on is
    there. At most IN_FLIGHT ops of a stream are ahead of the GPU, so that memory which torch frees in stream order
    comes back.
    """

    def __init__(self, *, index: int = 0, machine: str | None = None) -> None:
        prepare_process()
        self._index = index
        torch.cuda.set_device(index)
        self._cpus = cpus_beside(pci_address(index))
        super().__init__(
            threads={Stream.CPU: max(1, min(len(self._cpus), usable_cores()) - RESERVED_CORES)},
            machine=machine or torch.cuda.get_device_name(index),
        )
        self._streams = {
            stream: torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            for stream in DEVICE_STREAMS
        }
        self._clock = Clock(torch.cuda.Stream(index))  # type: ignore[no-untyped-call]
        self._begun = False
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self.events: list[tuple[Op, DeviceEvent]] | None = None  # a list, to be told of every op handed over
        self.products: Products | None = None  # see `kept_at_work`
        self.ahead_of = frozenset[str]()  # ops before which the GPU is given AHEAD_S of other work

    @property
    def device(self) -> torch.device:
        """See Backend."""
        return torch.device("cuda", self._index)

    @property
    def clock_ns(self) -> int:
        """How far apart the two clocks were read, at worst: a span is as exact as that."""
        return self._clock.within_ns

    @functools.cached_property
    def spin(self) -> Spin:
        """Kernels that merely last."""
        return Spin()

    def allocate(self, buffer: Buffer) -> Tensor:
        """See Backend. Host memory is pinned. Raises PinError, and Refused where the GPU has no room."""
        if buffer.tier == Tier.DEVICE:
            try:
                return torch.zeros(buffer.nbytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError as error:
                told = f"the GPU has no room for {buffer.name}, {scaled(buffer.nbytes, 'GB')}"
                raise Refused(f"{told}: leave it more, or take a smaller batch") from error
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        try:
            return pinned(buffer.nbytes, runtime, cpus=self._cpus)
        except PinError:
            with contextlib.suppress(RuntimeError):  # CUDA tells its last error again at whatever is launched next
                torch.zeros(1, device=self.device)
            raise

    def submit(self, task: Task, waits: Sequence[CpuEvent]) -> CpuEvent:
        """See Backend."""
        if not task.op.on_device:
            return super().submit(task, waits)
        self._check()
        if not self._begun:
            self._begun = True
            torch.cuda.synchronize()  # memory was filled on another stream than those that use it
        event = DeviceEvent(
            self._streams[task.op.stream], self._clock, lambda error: self._fail(task, error), self._delay(task)
        )
        if self.events is not None:
            self.events.append((task.op, event))
        self._queue(task.op.stream).put((task, waits, event))
        return event

    def close(self) -> None:
        """See Backend. The GPU has finished when this returns."""
        super().close()
        sys.setswitchinterval(self._switch_s)
        with contextlib.suppress(RuntimeError):  # an error on the GPU was told when it was first seen
            torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # or 32 MiB of each stream and thread would stay

    def _delay(self, task: Task) -> Callable[[], None] | None:
        """What is queued before the task, if anything is."""
        if task.delay_s:
            return functools.partial(self.spin, round(task.delay_s * 1e9))
        if task.op.name not in self.ahead_of:
            return None
        lasting = self.spin if self.products is None or task.op.stream != Stream.COMPUTE else self.products
        return functools.partial(lasting, round(AHEAD_S * 1e9))

    def _serve(self, stream: Stream, queue: Queue) -> None:
        if stream not in DEVICE_STREAMS:
            if stream == Stream.CPU:
                with contextlib.suppress(OSError):  # a container may have been given other cores meanwhile
                    os.sched_setaffinity(0, self._cpus)  # of this thread, and of those that it begins
            super()._serve(stream, queue)
            return
        use_threads(1)
        torch.cuda.set_device(self._index)
        with sanitized():
            self._hand_over(queue)

    def _hand_over(self, queue: Queue) -> None:
        ahead = deque[CpuEvent]()
        while (item := queue.get()) is not None:
            task, waits, event = item
            assert isinstance(event, DeviceEvent)
            if len(ahead) == IN_FLIGHT:
                ahead.popleft().wait()
            try:
                for before in waits:
                    if self.products is not None and task.op.stream == Stream.COMPUTE:
                        event.compute_until(before, self.products)
                    event.follow(before)
                if not self._stopped:
                    event.run(task)
            except BaseException as error:  # whatever it is, it must reach the issuing thread
                self._fail(task, error)
            event.finish()
            ahead.append(event)
            del item, task, waits, event  # or they would live until the next task comes


@contextlib.contextmanager
def kept_at_work(backend: Backend[Any], schedule: Schedule, *, graphs: bool) -> Iterator[None]:
    """Within, a GPU computes something else wherever its compute stream would wait for a copy or for the host.

    A GPU that rests between two ops runs the next one at a higher clock than it can keep in a step that computes all
    the time: on an H200 at its limit of 700 W, ops took a seventh less time (analysis/results/gpu/h200).

    An op's time must not contain its launches either: in a step they happen while the op before it runs, and handing
    over is measured by itself. So for AHEAD_S before an op the GPU gets other work, during which the host launches all
    of the op. With `graphs` that is needed only after an op of the host, or before a compute op that follows one of
    another stream: any other is launched, as a graph, while the op before it runs. Ops of more than AHEAD_UP_TO tokens
    take longer than their launches anyway.
    """
    if not isinstance(backend, CudaBackend):
        yield
        return
    backend.products = Products(backend.device)
    if schedule.workload.tokens_per_microbatch <= AHEAD_UP_TO:
        before = (schedule.ops[-1], *schedule.ops)
        backend.ahead_of = frozenset(
            op.name
            for op, last in zip(schedule.ops, before, strict=False)
            if not graphs or not last.on_device or op.stream == Stream.COMPUTE != last.stream
        )
    try:
        yield
    finally:
        backend.products, backend.ahead_of = None, frozenset()


def handed_over(events: Iterable[tuple[Op, DeviceEvent]]) -> dict[str, list[int]]:
    """How long the host took to hand ops over, ns, by their kind in a profile's `issue`."""
    found: dict[str, list[int]] = defaultdict(list)
    for op, event in events:
        found[issue_kind(op)].append(event.host_ns)
    return dict(found)


def prepare_process() -> None:
    """Set what torch and CUDA read from the environment as they begin; nothing that is set there already.

    torch's allocator shall leave no holes between allocations of different sizes. Every stream shall have a queue of
    its own on the GPU, since two on one queue would wait for each other: CUDA makes 8 unless told to make more. And a
    warning of torch about a thread of its own is not shown.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(QUEUES))
    # autograd's own thread has none until its first kernel, and torch sets it then
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def pci_address(index: int) -> str:
    """A GPU's place, as in "0000:1b:00.0"; empty where torch does not know it."""
    properties = torch.cuda.get_device_properties(index)
    domain, bus, device = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return "" if bus is None or device is None else f"{domain or 0:04x}:{bus:02x}:{device:02x}.0"

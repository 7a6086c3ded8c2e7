"""The CPU as a machine: a thread per stream, host and device memory both in RAM, copies that really copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from megatrain.backend import OpFailed, Task
from schedules.errors import Refused
from schedules.op import Buffer, Stream


def use_threads(count: int) -> None:
    """Have torch use so many threads within an op of the calling thread, whatever other threads set later.

    The first time that a thread asks for its number, torch gives it the last one that any thread has set, even where
    it has set its own before (ATen/Parallel.h, `lazy_init_num_threads`). So it asks here, and sets its own then.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


class CpuEvent:
    """Set when its task has finished, or when it never will because another one failed."""

    __slots__ = ("_end_ns", "_finished", "_start_ns")

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._start_ns = self._end_ns = 0

    def span(self) -> tuple[int, int]:
        """See Event."""
        return self._start_ns, self._end_ns

    def reached(self) -> bool:
        """Whether the task has ended."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Wait for the task's end."""
        self._finished.wait()

    def run(self, task: Task) -> None:
        """Run the task between the two times."""
        if task.delay_s:
            time.sleep(task.delay_s)
        self._start_ns = time.perf_counter_ns()
        task.work(task.step)
        self._end_ns = time.perf_counter_ns()

    def finish(self) -> None:
        """Release whoever waits."""
        self._finished.set()


Queue: TypeAlias = SimpleQueue[tuple[Task, Sequence[CpuEvent], CpuEvent] | None]  # of a stream; None ends its thread


class CpuBackend:
    """See Backend. Streams get their thread with their first task.

    `threads` is how many threads torch uses inside one op of a stream, one where nothing is said; torch takes
    the last number set as the default of threads that start later, elsewhere in the process too. The host
    stream runs on the caller's thread, with the caller's number.

    No wait can hang: a task waits only for tasks submitted before it, so the earliest unfinished one is never
    held up, and after a failure every queue is emptied, its events set, without running anything.
    """

    source: Literal["measured"] = "measured"

    def __init__(self, *, threads: Mapping[Stream, int] | None = None, machine: str = "cpu") -> None:
        self.machine = machine
        self._threads = dict(threads or {})
        self._queues: dict[Stream, Queue] = {}
        self._running: list[threading.Thread] = []
        self._failing = threading.Lock()
        self._failure: OpFailed | None = None
        self._stopped = False

    @property
    def device(self) -> torch.device:
        """See Backend."""
        return torch.device("cpu")

    def allocate(self, buffer: Buffer) -> Tensor:
        """See Backend; torch's CPU allocator aligns to 64 bytes. Raises Refused where there is no memory."""
        try:
            return torch.empty(buffer.nbytes, dtype=torch.uint8).zero_()
        except RuntimeError as error:  # a limit of the shell's, say, which tells no free memory
            raise Refused(f"no memory could be had for {buffer.name}, {buffer.nbytes / 1e9:.3g} GB: {error}") from None

    def issue(self, task: Task) -> int:
        """See Backend."""
        return time.perf_counter_ns()

    def submit(self, task: Task, waits: Sequence[CpuEvent]) -> CpuEvent:
        """See Backend."""
        self._check()
        event = CpuEvent()
        self._queue(task.op.stream).put((task, waits, event))
        return event

    def run_on_host(self, task: Task) -> CpuEvent:
        """See Backend."""
        self._check()
        event = CpuEvent()
        try:
            event.run(task)
        except Exception as error:
            self._fail(task, error)
        event.finish()
        self._check()
        return event

    def host_wait(self, event: CpuEvent) -> None:
        """See Backend."""
        event.wait()
        self._check()

    def close(self) -> None:
        """See Backend."""
        self._stopped = True
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._running:
            with suppress(RuntimeError):  # it could not be started
                thread.join()
        self._running, self._queues = [], {}

    def _check(self) -> None:
        stopped = self._stopped  # read first: a thread that fails sets it last
        if self._failure is not None:
            raise self._failure
        if stopped:
            raise RuntimeError("this backend was closed")

    def _fail(self, task: Task, error: BaseException) -> None:
        with self._failing:
            if self._failure is None:
                self._failure = task.failed(error)
            self._stopped = True

    def _queue(self, stream: Stream) -> Queue:
        if stream not in self._queues:
            queue = self._queues[stream] = SimpleQueue()
            # a daemon, so that an interpreter that ends without close() does not wait for it
            thread = threading.Thread(target=self._live, args=(stream, queue), name=f"stream {stream}", daemon=True)
            self._running.append(thread)  # first: whoever interrupts the start has it joined all the same
            thread.start()  # a container may allow no more of them
        return self._queues[stream]

    def _live(self, stream: Stream, queue: Queue) -> None:
        """A stream's thread. One that cannot even begin still lets go of whoever waits for its tasks."""
        try:
            self._serve(stream, queue)
        except BaseException as error:
            while (item := queue.get()) is not None:
                task, _, event = item
                self._fail(task, error)
                event.finish()

    def _serve(self, stream: Stream, queue: Queue) -> None:
        use_threads(self._threads.get(stream, 1))
        while (item := queue.get()) is not None:
            task, waits, event = item
            for before in waits:
                before.wait()
            if not self._stopped:
                try:
                    event.run(task)
                except BaseException as error:  # whatever it is, it must reach the issuing thread
                    self._fail(task, error)
            event.finish()
            del item, task, waits, event  # or they would live until the next task comes

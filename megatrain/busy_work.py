"""Work that keeps a GPU busy for a time and has no other purpose: kernels that merely last."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from megatrain.backend import Work
from megatrain.device_clock import timed_event
from schedules.op import Kind, Op, Phase
from schedules.schedule import Schedule
from schedules.tensor import SAVED, parse

PRODUCT = 4096  # rows and columns: 0.2 ms of an H100, 100 MB
SPIN_CYCLES = 20_000_000  # of a calibrating kernel, about 10 ms
CALIBRATIONS = 5  # kernels that are timed to know how long one lasts


class Products:
    """Keeps the current stream at work: bf16 products of numbers from N(0, 1), which draw as much power as training."""

    def __init__(self, device: torch.device) -> None:
        shape = (PRODUCT, PRODUCT)
        self._a, self._b = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        self._result = torch.empty(shape, device=device, dtype=torch.bfloat16)
        start, end = timed_event(), timed_event()
        self._queue(1)  # cuBLAS begins
        start.record()
        self._queue(CALIBRATIONS)
        end.record()
        end.synchronize()
        self._lasts_ns = start.elapsed_time(end) * 1e6 / CALIBRATIONS

    def __call__(self, duration_ns: int) -> None:
        """As many as take about so long, queued on the current stream."""
        self._queue(max(1, round(duration_ns / self._lasts_ns)))

    def until(self, reached: Callable[[], bool]) -> None:
        """One after another, two of them queued ahead of the GPU."""
        ahead = deque[torch.cuda.Event]()
        while not reached():
            self._queue(1)
            ahead.append(timed_event())
            ahead[-1].record()
            if len(ahead) > 2:
                ahead.popleft().synchronize()

    def _queue(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._result)


class Spin:
    """Keeps the current stream busy for a time, without touching memory."""

    def __init__(self) -> None:
        rates = []
        for _ in range(CALIBRATIONS):
            start, end = timed_event(), timed_event()
            start.record()
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
            rates.append(SPIN_CYCLES / (start.elapsed_time(end) * 1e6))
        self._cycles_per_ns = statistics.median(rates)

    def __call__(self, duration_ns: int) -> None:
        """A kernel of that length, queued on the current stream."""
        torch.cuda._sleep(max(1, round(duration_ns * self._cycles_per_ns)))  # type: ignore[no-untyped-call]


def spinning(schedule: Schedule, works: Sequence[Work], durations_ns: Sequence[int], spin: Spin) -> list[Work]:
    """The works of a run in which all but copies merely lasts: kernels on the GPU, sleep on the host.

    What is then slower than predicted is due to copies and to issuing, not to kernels. Copies of activations
    saved in layers last too: there are none to copy.
    """

    def lasting(op: Op, duration_ns: int) -> Work:
        if op.on_device:
            return lambda step: spin(duration_ns)
        return lambda step: time.sleep(duration_ns / 1e9)

    return [
        work if op.phase == Phase.COPY and not _of_saved(op) else lasting(op, duration_ns)
        for op, work, duration_ns in zip(schedule.ops, works, durations_ns, strict=True)
    ]


def _of_saved(op: Op) -> bool:
    return op.kind != Kind.COMPUTE and any(parse(access.tensor).cls == SAVED for access in op.reads)

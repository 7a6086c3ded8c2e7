"""What the executor asks of a machine: to take ops in issue order, and to say when each of them ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from schedules.errors import Refused
from schedules.op import Buffer, Op

Work = Callable[[int], None]  # what one op does in the step of that number
POISON = 0xFF  # a byte of memory that holds nothing, while faults are sought: a NaN in every floating type


class OpFailed(Refused):
    """An op raised an error while it ran; the error is the cause of this one."""


@dataclass(frozen=True, slots=True)
class Task:
    """One op of one step. `index` is the op's position in program order, `delay_s` an artificial start-up."""

    op: Op
    index: int
    step: int
    work: Work
    delay_s: float = 0.0

    def failed(self, error: BaseException) -> OpFailed:
        """The error to raise in the issuing thread."""
        failure = OpFailed(f"{self.op.name} of step {self.step} failed on stream {self.op.stream}: {error!r}")
        failure.__cause__ = error
        return failure


class Event(Protocol):
    """The end of one task."""

    def span(self) -> tuple[int, int]:
        """(start, end) in ns on the backend's clock, once the task has finished and the host knows it."""
        ...


E = TypeVar("E", bound=Event)


class Backend(Protocol, Generic[E]):
    """Streams, events and memory of one machine, driven by one issuing thread.

    For each op the executor calls `issue`, then `submit`, or `run_on_host` after waiting for the op's waits.
    A stream runs what it is given one after another, each after its waits. Nothing here knows a schedule.
    Every call that waits or submits raises OpFailed as soon as a task is known to have failed; from then on
    no further task runs, and only `close` may be called.
    """

    @property
    def machine(self) -> str:
        """The machine's name, for traces."""
        ...

    @property
    def source(self) -> Literal["predicted", "measured"]:
        """Whether its times are those of a clock, or of a prediction."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the device tier's tensors are for torch."""
        ...

    def allocate(self, buffer: Buffer) -> Tensor:
        """Memory of exactly `buffer.nbytes` bytes on its tier, uint8, touched, aligned to 64 bytes."""
        ...

    def issue(self, task: Task) -> int:
        """The host takes up the next op; the moment, in ns, when it has handed the op over."""
        ...

    def submit(self, task: Task, waits: Sequence[E]) -> E:
        """Queue `task` on its op's stream, to run after all before it there and after `waits`."""
        ...

    def run_on_host(self, task: Task) -> E:
        """Run `task` here and now, on the issuing thread."""
        ...

    def host_wait(self, event: E) -> None:
        """The issuing thread waits for `event`."""
        ...

    def close(self) -> None:
        """Run nothing more, stop all threads and wait for them. May be called twice."""
        ...

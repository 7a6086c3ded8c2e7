"""A machine that is only a clock: ops last as long as they are predicted to, and touch no data.

Driven by the executor's own loop it must reproduce the simulator's trace exactly, which proves that what is
simulated is what is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatrain.backend import Task
from schedules.op import Buffer, Stream
from schedules.trace import Ints


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    """A task's predicted span, in ns."""

    start_ns: int
    end_ns: int

    def span(self) -> tuple[int, int]:
        """See Event."""
        return self.start_ns, self.end_ns


class VirtualBackend:
    """See Backend. `durations_ns` and `issue_ns` are int64 [steps, ops]: how long each op of each step runs,
    and how long the host takes to issue it.
    """

    source: Literal["predicted"] = "predicted"

    def __init__(self, durations_ns: Ints, issue_ns: Ints, *, machine: str) -> None:
        if durations_ns.shape != issue_ns.shape:
            raise ValueError(f"durations of shape {durations_ns.shape}, issue costs of {issue_ns.shape}")
        self.machine = machine
        self._durations_ns, self._issue_ns = durations_ns, issue_ns
        self._host_ns = 0
        self._free_ns: dict[Stream, int] = {}

    @property
    def device(self) -> torch.device:
        """A device for tensors without memory."""
        return torch.device("meta")

    def allocate(self, buffer: Buffer) -> Tensor:
        """See Backend; there is no memory."""
        return torch.empty(buffer.nbytes, dtype=torch.uint8, device="meta")

    def issue(self, task: Task) -> int:
        """See Backend."""
        self._host_ns += int(self._issue_ns[task.step, task.index])
        return self._host_ns

    def submit(self, task: Task, waits: Sequence[VirtualEvent]) -> VirtualEvent:
        """See Backend."""
        free = self._free_ns.get(task.op.stream, 0)
        return self._run(task, max([self._host_ns, free, *(event.end_ns for event in waits)]))

    def run_on_host(self, task: Task) -> VirtualEvent:
        """See Backend."""
        event = self._run(task, self._host_ns)
        self.host_wait(event)
        return event

    def host_wait(self, event: VirtualEvent) -> None:
        """See Backend."""
        self._host_ns = max(self._host_ns, event.end_ns)

    def close(self) -> None:
        """See Backend."""

    def _run(self, task: Task, start_ns: int) -> VirtualEvent:
        event = VirtualEvent(start_ns, start_ns + int(self._durations_ns[task.step, task.index]))
        self._free_ns[task.op.stream] = event.end_ns
        return event

"""How much memory an op takes for a while: the peak of what torch allocates in it beyond what it finds."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Bytes, less what is still held afterwards.

    On a CPU what this thread allocates; on a GPU what the process does, so let nothing run beside it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - max(before, torch.cuda.memory_allocated(device))
    memory = profile(use_cpu=True, profile_memory=True)
    with _silence(), memory:
        work()
    assert memory.kineto_results is not None, "the profiler has stopped"
    events: list[Any] = [event for event in memory.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak - max(0, now)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Torch's profiler writes to the error stream, past Python, when it starts, stops and sees older memory freed."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

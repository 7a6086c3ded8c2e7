"""When something happens on a GPU, by the host's clock."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

SYNCHRONISATIONS = 5  # times that the two clocks are read side by side; the closest pair counts
READINGS = 4  # of the clocks that are remembered: those that the steps in flight lie between


class Clock:
    """Maps moments on the GPU to `time.perf_counter_ns`.

    The two clocks are read side by side whenever a moment is asked for that lies after the last reading, and between
    two readings the map is a straight line. So moments stay in order, and a drift of the clocks does not add up.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream  # with nothing else on it: its events are reached at once
        self.within_ns = 0  # how far apart the two clocks were read, in the worst reading so far
        self._readings = deque[tuple[torch.cuda.Event, int]](maxlen=READINGS)
        self._since_ms: list[float] = []  # of the readings, from the oldest on
        self._read()

    def ns(self, event: torch.cuda.Event) -> int:
        """When an event was reached; the host must know that it has been."""
        if self._readings[0][0].elapsed_time(event) > self._since_ms[-1]:
            self._read()
        oldest, oldest_ns = self._readings[0]
        since_ns = [ns - oldest_ns for _, ns in self._readings]
        return oldest_ns + round(float(np.interp(oldest.elapsed_time(event), self._since_ms, since_ns)))

    def _read(self) -> None:
        pairs = []
        for _ in range(SYNCHRONISATIONS):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            before = time.perf_counter_ns()
            event.record(self._stream)
            while not event.query():  # type: ignore[no-untyped-call]  # to sleep would add the time of waking up
                pass
            after = time.perf_counter_ns()
            pairs.append((after - before, (before + after) // 2, event))
        within, ns, event = min(pairs, key=lambda pair: pair[:2])
        self.within_ns = max(self.within_ns, within)
        self._readings.append((event, ns))
        self._since_ms = [self._readings[0][0].elapsed_time(event) for event, _ in self._readings]


def timed_event() -> torch.cuda.Event:
    """An event with a time; a host thread that waits for it sleeps."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

"""A steady step as text: a line per stream, a letter per span of time."""

from __future__ import annotations

import numpy as np

from analysis.gantt import steady_step
from analysis.palette import op_class
from schedules.schedule import Schedule
from schedules.trace import Trace

LETTERS = {
    "prefetch": "P",
    "forward": "F",
    "recompute": "R",
    "loss": "L",
    "backward": "B",
    "offload": "O",
    "Adam": "A",
    "Muon": "M",
    "other updates": "U",
    "synchronise": "S",
}
ALWAYS = [name for name in LETTERS if name != "Muon"]  # what a legend names, whether or not a step has it
SMALL = "small letters: for less than half of the span"
SPANS = 88


def legend(schedule: Schedule) -> str:
    """What the letters of a schedule's step stand for."""
    there = {*ALWAYS, *map(op_class, schedule.ops)}
    return ", ".join(f"{letter} {name}" for name, letter in LETTERS.items() if name in there) + ", . idle"


def text_gantt(schedule: Schedule, trace: Trace, columns: int | None) -> list[str]:
    """One line per stream; a letter is what ran for most of its span, a dot where nothing took a tenth of it.

    Small letters stand for what ran for less than half of the span: it would be lost otherwise. A line has 88 letters,
    or fewer where only so many `columns` are there, the stream's name included.
    """
    since, until = steady_step(trace)
    pad = max(len(str(stream)) for stream in schedule.streams)
    width = SPANS if columns is None else max(1, min(SPANS, columns - pad - 2))
    edges = np.linspace(since, until, width + 1)
    lines = []
    for stream in schedule.streams:
        busy = {name: np.zeros(width) for name in LETTERS}
        for row in trace.rows_of(schedule, stream):
            start, end = int(trace.start_ns[row]), int(trace.end_ns[row])
            shared = np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1])
            busy[op_class(schedule.ops[int(trace.op[row])])] += np.clip(shared, 0, None)
        names, shares = list(busy), np.array(list(busy.values())) / (until - since) * width
        most = shares.argmax(axis=0)
        text = ""
        for span, name in enumerate(most):
            share = shares[name, span]
            letter = LETTERS[names[name]]
            text += letter if share >= 0.5 else letter.lower() if share >= 0.1 else "."
        lines.append(f"{stream!s:<{pad}}  {text}")
    return lines

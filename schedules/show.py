"""A schedule as a grid for people: one row per op in program order, one column per stream."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.op import Op, Phase, Stream
from schedules.schedule import Schedule

_MARK = "  <-- here"


def cell(op: Op) -> str:
    """An op and the buffer that matters about it: where a copy goes, where the weights are."""
    if op.phase in (Phase.COPY, Phase.CAST) and op.writes:
        return f"{op.name} -> {op.writes[0].buffer}"
    weights = [a.buffer for a in op.reads if a.tensor.startswith("w.")]
    return f"{op.name} ({weights[0]})" if weights else op.name


def grid(schedule: Schedule) -> str:
    """The whole step."""
    return _rows(schedule, range(len(schedule.ops)), mark=None)


def excerpt(schedule: Schedule, op: str, on: str) -> str:
    """The neighbourhood of `op`, marked, and of `on`, the other op of a violation, "" where there is none."""
    at = schedule.index[op]
    rows = set(range(at - 1, at + 2))
    if on in schedule.index:
        rows.add(schedule.index[on])
    return _rows(schedule, sorted(i for i in rows if 0 <= i < len(schedule.ops)), mark=at)


def _rows(schedule: Schedule, rows: Sequence[int], mark: int | None) -> str:
    shown = [schedule.ops[i] for i in rows]
    streams = [s for s in Stream if any(op.stream == s for op in shown)]
    width = {s: max([len(s), *(len(cell(op)) for op in shown if op.stream == s)]) for s in streams}
    number = len(str(max(rows, default=0)))
    lines = [" " * number + "   " + "   ".join(s.ljust(width[s]) for s in streams).rstrip()]
    for previous, i in zip([None, *rows], rows, strict=False):
        if previous is not None and i != previous + 1:
            lines.append(" " * number + "   ...")
        op = schedule.ops[i]
        cells = "   ".join((cell(op) if op.stream == s else "").ljust(width[s]) for s in streams)
        lines.append(f"{i:>{number}}   {cells.rstrip()}{_MARK if i == mark else ''}")
    return "\n".join(lines)

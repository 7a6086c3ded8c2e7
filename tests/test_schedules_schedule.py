"""A schedule as a graph and as a grid."""

from __future__ import annotations

import networkx as nx
import pytest

from schedules import policies
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.show import excerpt, grid
from schedules.workload import MemoryBudget, Workload

ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)
SHAPE = Workload(micro_batch_size=1, seq_len=16, accumulation=2, precision="fp32")


@pytest.fixture(params=policies.names())
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return policies.build(request.param, load("tiny"), SHAPE, ROOM)


def test_the_graph_has_every_op_stream_and_wait_and_no_cycle_within_a_step(schedule: Schedule) -> None:
    graph = schedule.to_networkx()
    assert list(graph) == [op.name for op in schedule.ops]
    waits = [(a, b, d["distance"]) for a, b, d in graph.edges(data=True) if d["why"] == "wait"]
    assert sorted(waits) == sorted((w.on, w.op, w.distance) for w in schedule.waits)
    within = nx.DiGraph((a, b) for a, b, d in graph.edges(data=True) if d["distance"] == 0)
    assert nx.is_directed_acyclic_graph(within)
    order = {op.name: i for i, op in enumerate(schedule.ops)}
    assert all(order[a] < order[b] for a, b in within.edges)


def test_the_grid_has_a_row_per_op_under_its_stream(schedule: Schedule) -> None:
    head, *rows = grid(schedule).splitlines()
    assert len(rows) == len(schedule.ops)
    for op, row in zip(schedule.ops, rows, strict=True):
        assert row.index(op.name) == head.index(op.stream)


def test_an_excerpt_marks_one_op_and_shows_the_other() -> None:
    schedule = policies.build("streamed", load("tiny"), SHAPE, ROOM)
    first, last = schedule.ops[2].name, schedule.ops[-3].name
    shown = excerpt(schedule, last, first)
    marked = [line for line in shown.splitlines() if line.endswith("<-- here")]
    assert len(marked) == 1 and last in marked[0]
    assert first in shown and "..." in shown

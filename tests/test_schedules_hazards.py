"""Hazards and waits against networkx, the slow oracle."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import schedule_of

from schedules.hazards import minimal_waits
from schedules.op import Access, Kind, Op, Phase, Stream, Wait
from schedules.verify import _races

STEPS = 4  # unrolled by the oracle


def copy(name: str, stream: Stream, reads: list[str], writes: list[str], blocking: bool = False) -> Op:
    """An op that touches buffers; what they hold does not matter to hazards."""
    return Op(
        name=name,
        kind=Kind.PREFETCH,
        phase=Phase.COPY,
        stream=stream,
        reads=tuple(Access(b, "w.0") for b in reads),
        writes=tuple(Access(b, "w.0") for b in writes),
        blocking=blocking,
    )


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    buffers = st.lists(st.sampled_from("abcd"), max_size=2, unique=True)
    streams = st.sampled_from([Stream.H2D, Stream.COMPUTE, Stream.D2H, Stream.CPU, Stream.HOST])
    size = draw(st.integers(1, 12))
    return [
        copy(f"op{i}", draw(streams), draw(buffers), draw(buffers), draw(st.integers(0, 9)) == 0) for i in range(size)
    ]


def order_without_waits(ops: list[Op]) -> nx.DiGraph:
    """Streams are FIFO; the host issues nothing after a blocking or host op until it is done."""
    graph = nx.DiGraph()
    last: dict[Stream, tuple[int, int]] = {}
    host: list[tuple[int, int]] = []
    for step in range(STEPS):
        for i, op in enumerate(ops):
            node = (step, i)
            graph.add_node(node)
            if op.stream in last:
                graph.add_edge(last[op.stream], node)
            for before in host:
                graph.add_edge(before, node)
            last[op.stream] = node
            if op.blocking or op.stream == Stream.HOST:
                host.append(node)
    return graph


def hazard_pairs(ops: list[Op]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """Every conflicting pair in program order, by definition."""
    touched = [((s, i), op) for s in range(STEPS) for i, op in enumerate(ops)]
    pairs = set()
    for later in range(len(touched)):
        for earlier in range(later):
            (a, first), (b, second) = touched[earlier], touched[later]
            conflict = any(x.buffer == y.buffer for x in first.writes for y in second.accesses) or any(
                x.buffer == y.buffer for x in first.reads for y in second.writes
            )
            if conflict:
                pairs.add((a, b))
    return pairs


def with_waits(ops: list[Op], waits: list[Wait]) -> nx.DiGraph:
    graph = order_without_waits(ops)
    index = {op.name: i for i, op in enumerate(ops)}
    for wait in waits:
        for step in range(wait.distance, STEPS):
            graph.add_edge((step - wait.distance, index[wait.on]), (step, index[wait.op]))
    return graph


def unordered(ops: list[Op], waits: list[Wait]) -> set[object]:
    closure = nx.transitive_closure_dag(with_waits(ops, waits))
    return {(a, b) for a, b in hazard_pairs(ops) if not closure.has_edge(a, b)}


@settings(max_examples=60)
@given(programs())
def test_waits_order_every_hazard_and_none_is_redundant(ops: list[Op]) -> None:
    waits = list(minimal_waits(ops))
    assert not unordered(ops, waits)
    for i in range(len(waits)):
        assert unordered(ops, waits[:i] + waits[i + 1 :]), f"{waits[i]} is redundant"


@settings(max_examples=60)
@given(programs())
def test_waits_point_backward_and_cross_streams(ops: list[Op]) -> None:
    index = {op.name: i for i, op in enumerate(ops)}
    for wait in minimal_waits(ops):
        assert wait.distance in (0, 1)
        assert wait.distance == 1 or index[wait.on] < index[wait.op]
        assert ops[index[wait.on]].stream != ops[index[wait.op]].stream


@settings(max_examples=60)
@given(programs(), st.data())
def test_the_verifier_finds_a_race_where_the_oracle_does(ops: list[Op], data: st.DataObject) -> None:
    """Whatever the waits: some of those needed, and some that nobody needs."""
    needed = minimal_waits(ops)
    kept = data.draw(st.lists(st.sampled_from(needed), unique=True)) if needed else []
    places = st.integers(0, len(ops) - 1)
    for at, on, distance in data.draw(st.lists(st.tuples(places, places, st.integers(0, 1)), max_size=2)):
        if distance or on < at:
            kept.append(Wait(op=ops[at].name, on=ops[on].name, distance=distance))
    assert bool(list(_races(schedule_of(ops, kept)))) == bool(unordered(ops, kept))


def test_double_buffer_by_hand() -> None:
    """Two slots, three layers: the third copy must wait until the first layer has left slot a."""
    ops = [
        copy("P0", Stream.H2D, [], ["a"]),
        copy("F0", Stream.COMPUTE, ["a"], []),
        copy("P1", Stream.H2D, [], ["b"]),
        copy("F1", Stream.COMPUTE, ["b"], []),
        copy("P2", Stream.H2D, [], ["a"]),
        copy("F2", Stream.COMPUTE, ["a"], []),
    ]
    assert {(w.op, w.on, w.distance) for w in minimal_waits(ops)} == {
        ("F0", "P0", 0),
        ("F1", "P1", 0),
        ("P2", "F0", 0),
        ("F2", "P2", 0),
        ("P0", "F2", 1),  # which also keeps P1 behind the F1 of the step before
    }


def test_a_blocking_copy_needs_no_wait() -> None:
    ops = [copy("P", Stream.H2D, [], ["a"], blocking=True), copy("F", Stream.COMPUTE, ["a"], [])]
    assert [(w.op, w.on, w.distance) for w in minimal_waits(ops)] == [("P", "F", 1)]

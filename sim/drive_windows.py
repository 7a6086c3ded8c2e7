"""When a drive is read and written for what is not in memory, and what is there because of that: rows of the program of
`sim.placement_bound`, which says why they hold for every schedule."""

from __future__ import annotations

from schedules.op import Kind
from schedules.tensor import GRAD, STATE, WEIGHT
from sim.areas import LayerAreas, together
from sim.placement_program import (
    BACKWARD,
    BOTH_BETWEEN,
    BOTH_FIRST,
    BOTH_LAST,
    FORWARD,
    PlacementProgram,
    in_window,
    only_in,
)


def of_states(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, on_drive: int) -> None:
    """States of `n` layers like layer i are read, updated and written after the last turn of a step, or, but for the
    embedding's, after its last backward, before the next first turn: else they are in memory at a moment between."""
    state, grad = (n * costs.nbytes(cls, i) for cls in (STATE, GRAD))
    read, written = (costs.drive(STATE, i, n, kind) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    before, after = lp.column(), lp.column()
    lp.all_of([before, after], of=on_drive)
    if i == costs.model.embed:
        lp.no_more([after], than=[])
    for updates, window, early, late in (
        (before, BACKWARD, BOTH_LAST, BOTH_BETWEEN),
        (after, FORWARD, BOTH_BETWEEN, BOTH_FIRST),
    ):
        for areas, moment in ((read, early), (written, late)):
            lp.all_of([lp.column(only_in(areas, window)), lp.column(None, {moment: state})], of=updates)
    # gradients wait for what is updated after the last backward
    waits, leaves = (costs.drive(GRAD, i, n, kind) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    there_too = together(in_window(leaves, BACKWARD), in_window(waits, FORWARD))
    lp.all_of([lp.column(None, {BOTH_BETWEEN: grad}), lp.column(there_too)], of=after)


def of_weights(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, on_drive: int) -> None:
    """Weights are read for the backward after the last turn, for the forward before the first, and written between:
    else they are in memory at a moment between. They are read once at least."""
    weight = n * costs.nbytes(WEIGHT, i)
    read, written = (costs.drive(WEIGHT, i, n, kind) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    at_last, between = lp.column(None, {BOTH_LAST: weight}), lp.column(None, {BOTH_BETWEEN: weight})
    for_backward, for_forward = lp.column(in_window(read, BACKWARD)), lp.column(in_window(read, FORWARD))
    lp.all_of([at_last, for_backward], of=on_drive)
    lp.all_of([between, for_forward], of=on_drive)
    if i == costs.model.embed:
        lp.no_more([for_forward], than=[])
    lp.no_more([on_drive], than=[for_backward, for_forward, lp.column(read)])
    soon, late, later = (
        lp.column(in_window(written, BACKWARD)),
        lp.column(in_window(written, FORWARD)),
        lp.column(written, {BOTH_FIRST: weight}),
    )
    lp.all_of([soon, late, later], of=on_drive)
    lp.no_more([late, later], than=[between])

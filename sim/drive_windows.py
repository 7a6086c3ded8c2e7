"""When a drive is read and written for what is not in memory, and what is there because of that: rows of the program of
`sim.placement_bound`, which says why they hold for every schedule."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.op import Kind
from schedules.tensor import GRAD, STATE, WEIGHT
from sim.areas import Areas, LayerAreas, together
from sim.placement_program import (
    BACKWARD,
    BOTH_BETWEEN,
    BOTH_FIRST,
    BOTH_LAST,
    FORWARD,
    MIDDLE,
    PlacementProgram,
    in_window,
)

MOMENTS = (BOTH_LAST, BOTH_BETWEEN, BOTH_FIRST)


def use(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, turn: int, *, weights: int, states: int) -> None:
    """What a drive does for weights and states of `n` layers like layer i, of which these columns are on it at turns.

    Whatever is on it alone at any moment is read and written once a step. At a MOMENT what is not is in memory.
    """
    if i == costs.model.head and turn != i:  # its update may begin before the last block's backward, in any window
        for cls, there in ((WEIGHT, weights), (STATE, states)):
            trips = lp.column(costs.drive(cls, i, n))
            for gone in (there, *_gone(lp, n * costs.nbytes(cls, i)).values()):
                lp.no_more([gone], than=[trips])
        return
    waiting = list[int]()  # gradients that an update waits with until the step's last backward is done
    if i != costs.model.embed:  # whose update that of the next step waits for
        grad = n * costs.nbytes(GRAD, i)
        leaves, comes = (costs.drive(GRAD, i, n, kind) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
        away = together(in_window(leaves, BACKWARD), in_window(comes, FORWARD))
        waiting = [lp.column(None, {BOTH_BETWEEN: grad}), lp.column(away)]
    _of_states(lp, costs, i, n, states, waiting)
    if i == turn:  # its weights are there then
        lp.no_more([weights], than=[lp.column(costs.drive(WEIGHT, i, n))])
    else:
        _of_weights(lp, costs, i, n, weights, waiting)


def _gone(lp: PlacementProgram, nbytes: float) -> dict[str, int]:
    """Columns of what is on the drive alone, by moment."""
    return {moment: lp.column(None, {moment: -nbytes}) for moment in MOMENTS}


def _in_windows(lp: PlacementProgram, areas: Areas, of: int | None = None) -> dict[str, int]:
    """Columns of when something is read or written, by window; together they are `of`, if given."""
    found = {window: lp.column(in_window(areas, window)) for window in (BACKWARD, FORWARD, MIDDLE)}
    if of is not None:
        lp.all_of(found.values(), of=of)
    return found


def _of_states(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, on_drive: int, waiting: Sequence[int]) -> None:
    """Updated after the last turn, before or after the last backward: read before that and written after it."""
    early, late = lp.column(), lp.column()
    lp.no_more([late], than=waiting)
    read, written = (costs.drive(STATE, i, n, kind) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    read_early, read_late = (_in_windows(lp, read, of) for of in (early, late))
    written_early, written_late = (_in_windows(lp, written, of) for of in (early, late))
    gone = _gone(lp, n * costs.nbytes(STATE, i))
    for there in (on_drive, *gone.values()):
        lp.no_more([there], than=[early, late])
    lp.no_more([gone[BOTH_LAST]], than=[read_early[BACKWARD], read_late[BACKWARD], read_late[FORWARD]])
    lp.no_more([gone[BOTH_BETWEEN]], than=[written_early[BACKWARD], read_late[FORWARD]])
    lp.no_more([gone[BOTH_FIRST]], than=[written_early[BACKWARD], written_early[FORWARD], written_late[FORWARD]])
    lp.no_more([gone[BOTH_FIRST]], than=[read_early[BACKWARD], read_early[MIDDLE], written_late[FORWARD]])


def _of_weights(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, on_drive: int, waiting: Sequence[int]) -> None:
    """Read for a backward after its turn and for the next forward, if they are gone then, and written once updated."""
    read, written = (_in_windows(lp, costs.drive(WEIGHT, i, n, kind)) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    gone, updated_late = _gone(lp, n * costs.nbytes(WEIGHT, i)), lp.column()
    lp.no_more([gone[BOTH_LAST]], than=[read[BACKWARD]])
    lp.no_more([gone[BOTH_BETWEEN]], than=[] if i == costs.model.embed else [read[FORWARD]])
    for there in (on_drive, gone[BOTH_FIRST]):
        lp.no_more([there], than=[read[BACKWARD], read[MIDDLE]])
    for there in (on_drive, *gone.values()):
        lp.no_more([there], than=written.values())
    # what is written after the last backward is there then, or updated after it
    lp.no_more([updated_late], than=waiting)
    lp.at_most.append(({written[FORWARD]: 1, written[MIDDLE]: 1, gone[BOTH_BETWEEN]: 1, updated_late: -1}, 1.0))
    lp.at_most.append(({written[MIDDLE]: 1, gone[BOTH_FIRST]: 1}, 1.0))

"""What the micro-batches of a step need at their turns from forward to backward, and between these: rows of the program
of `sim.placement_bound`, which says why they hold for every schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from schedules.op import Kind, Phase
from schedules.tensor import GRAD, SAVED, WEIGHT
from sim.areas import LayerAreas
from sim.cost import GPU
from sim.placement_program import (
    BACKWARD,
    BOTH_FIRST,
    BOTH_LAST,
    DEVICE,
    DEVICE_AMID,
    DEVICE_FIRST,
    DEVICE_LAST,
    FORWARD,
    HOST,
    MIDDLE,
    NVME,
    PlacementProgram,
    in_window,
)


@dataclass(frozen=True)
class Activations:
    """Columns: the micro-batches whose activations of some blocks stay on the device, leave it, go on to a drive, or
    are made again."""

    kept: int
    away: int
    on_drive: int | None
    again: int

    @property
    def sent(self) -> list[int]:
        return [self.away] if self.on_drive is None else [self.away, self.on_drive]

    @property
    def stored(self) -> list[int]:
        return [self.kept, *self.sent]


def at_turns(
    lp: PlacementProgram, costs: LayerAreas, i: int, n: int, of: Activations, *, retained: int, returned: int
) -> None:
    """What several micro-batches need of `n` blocks like block i at their turns: all in fractions of micro-batches,
    loads and sends too. `retained` are weights that are there at the turns, `returned` loads after a turn without."""
    a = costs.workload.accumulation
    saved, summed = n * costs.nbytes(SAVED, i), n * costs.nbytes(GRAD, i)
    flying = lp.column(None, {DEVICE: saved * a})  # f / a
    elsewhere = [lp.column(None, {memory: saved * a}) for memory in (DEVICE, HOST)]
    if of.on_drive is not None:
        elsewhere.append(lp.column(None, {NVME: saved * a}))
        lp.no_more(elsewhere[-1:], than=[of.on_drive])
    sum_there = lp.column(None, {DEVICE: summed})
    sent = lp.column(costs.copy(GRAD, i, Kind.OFFLOAD, n * a))
    everything = [flying, *elsewhere]
    for some, in_flight in (([of.kept], [flying]), (of.stored, everything)):
        held, before, sum_away = lp.column(), lp.column(), lp.column()
        lp.no_more([held], than=some)
        lp.no_more([held], than=[retained])
        one, less = dict.fromkeys(some, 1.0), dict.fromkeys(in_flight, -float(a))
        lp.at_most += [({**one, **less}, 0.0), ({**one, before: -1, sum_there: -1, sum_away: -1}, 0.0)]
        for t in _powers_up_to(a):
            loads = {held: 1 - 2 * t, returned: -(t**2)}  # (k - held)^2 / L + held
            lp.at_most.append(({**dict.fromkeys(some, 2 * t), **loads, **less}, 0.0))
            lp.at_most.append(({**one, before: t - 0.5, **less}, t**2 / (2 * a)))
            lp.at_most.append(({sum_away: t + 0.5, sent: -(t**2) / 2, **less}, 0.0))
    _amid(lp, costs, i, n, of, everything)


def _amid(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, of: Activations, in_flight: Sequence[int]) -> None:
    """Between two turns weights are there, or come once more, unless one of the two micro-batches is in flight at the
    other's turn."""
    a, clips = costs.workload.accumulation, costs.workload.grad_clip is not None
    loads = costs.copy(WEIGHT, i, Kind.PREFETCH, n * (a - 1))
    there = lp.column(None, {DEVICE_AMID: n * costs.nbytes(WEIGHT, i)})
    more, both = lp.column(in_window(loads, BACKWARD) if clips else loads), lp.column()
    lp.at_most.append(({there: -1, more: -1, both: -1}, -1.0))
    others = {**dict.fromkeys(of.stored, 1.0), **dict.fromkeys(in_flight, -float(a)), of.again: -2.0}
    lp.at_most.append(({both: (a - 1) / a, **others}, 0.0))


def first_and_last(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, of: Activations) -> None:
    """What the GPU does of these blocks before the first turn, between it and the last, and after that.

    In flight at the first turn are micro-batches whose forward ran before it, at the last those whose backward runs
    after it.
    """
    a, saved = costs.workload.accumulation, n * costs.nbytes(SAVED, i)
    free = [of.again] if of.on_drive is None else [of.again, of.on_drive]
    for phase, window, device, both in (
        (Phase.FORWARD, FORWARD, DEVICE_FIRST, BOTH_FIRST),
        (Phase.BACKWARD, BACKWARD, DEVICE_LAST, BOTH_LAST),
    ):
        ns = costs.compute(i, phase, n * a).get(GPU, 0.0)
        # with clipping the window BACKWARD begins with the first turn
        outside = lp.column({} if costs.workload.grad_clip is not None else {window + GPU: ns})
        lp.exactly.append(({outside: 1, lp.column({MIDDLE + GPU: ns}): 1}, 1.0))
        kept, away = lp.column(None, {device: saved * a, both: saved * a}), lp.column(None, {both: saved * a})
        lp.no_more([kept], than=[of.kept])
        lp.no_more([away], than=[of.away])
        lp.no_more([outside], than=[kept, away, *free])
        # the turn's own micro-batch is one of them
        lp.at_most.append(({of.kept: 1, kept: -1}, (a - 1) / a))
        lp.at_most.append(({of.kept: 1, of.away: 1, kept: -1, away: -1}, (a - 1) / a))


def _powers_up_to(limit: int) -> list[float]:
    """From 1 to the limit, each the last one's double or less."""
    return [*(2.0**k for k in range(math.ceil(math.log2(limit)))), float(limit)]

"""Where a step has few placements, all of them: of small models, for which that takes no longer than a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from schedules.model import ModelSpec
from schedules.schedule import Knob
from schedules.workload import Workload
from sim.candidate import OURS, Candidate
from sim.findings import Findings
from sim.knob_space import knob_space
from sim.room import FEWEST_ON_THE_DRIVE, ONE_BLOCK, Room, orders

PLACEMENT = ("resident", "offload", "defer", "through")  # the knobs that say where things are, and when


def placements(model: ModelSpec, workload: Workload, *, begun: Candidate) -> dict[str, list[Knob]]:
    """The knobs of PLACEMENT that are searched, each with all its values; `begun` as for `knob_space`."""
    space = knob_space(model, workload, begun=begun)
    return {name: values for name, values in space.items() if name in PLACEMENT}


def try_all(found: Findings, workload: Workload, *, begun: Candidate, one_block: bool) -> None:
    """Try all placements of one split of a step, none of which counts as effort.

    Once something fits, micro-batches one after another only at the ends of each knob. So too with fewer buffers where
    that leaves room for more, but with all numbers of resident layers. `one_block` as for `Room.begin`.
    """
    every, effort = placements(found.model, workload, begun=begun), found.effort
    start = Candidate(policy=OURS, workload=workload)
    begin = found.room.begin(start, one_block=one_block)
    for order in orders(workload):
        for usual in dict.fromkeys((start, begin)):
            some = every if order == "layers" or found.at is None else _ends(every, found.at)
            found.evaluate(*_each(usual.with_knobs({"order": order}), some))
    for thrifty in _thriftier(found.room, start, begin):
        some = {**_ends(every, found.at or start), "resident": every["resident"]}
        found.evaluate(*_each(thrifty, some))
    found.effort = effort


def _each(begin: Candidate, values: Mapping[str, Iterable[Knob]]) -> list[Candidate]:
    ways = itertools.product(*values.values())
    return [begin.with_knobs(dict(zip(values, way, strict=True))) for way in ways]


def _ends(every: Mapping[str, list[Knob]], best: Candidate) -> dict[str, list[Knob]]:
    """Of each knob the first value, the last, and that of the best candidate."""
    return {name: list(dict.fromkeys((values[0], best.value(name), values[-1]))) for name, values in every.items()}


def _thriftier(room: Room, start: Candidate, begin: Candidate) -> list[Candidate]:
    """With fewer buffers, where these leave room for more layers on the device, or more off the drive."""
    most = room.most_residents(start)
    few = (start.with_knobs({"grad_slots": 1}), start.with_knobs(ONE_BLOCK))
    found = [thrifty for thrifty in few if room.most_residents(thrifty) > most]
    return [*found, begin.with_knobs(FEWEST_ON_THE_DRIVE)] if begin.value("nvme") else found

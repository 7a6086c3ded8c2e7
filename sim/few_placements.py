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
from sim.room import FEWEST_ON_THE_DRIVE, ONE_BLOCK, orders, ways_to_part

SLOTS = (2, 4)  # for weights where states stay: more of them keep some weights from forward to backward
PLACEMENT = ("resident", "offload", "defer", "through")  # the knobs that say where things are, and when


def placements(model: ModelSpec, workload: Workload, *, begun: Candidate) -> dict[str, list[Knob]]:
    """The knobs of PLACEMENT that are searched, each with all its values; `begun` as for `knob_space`."""
    space = knob_space(model, workload, begun=begun)
    return {name: values for name, values in space.items() if name in PLACEMENT}


def try_all(found: Findings, workload: Workload, *, begun: Candidate, one_block: bool) -> None:
    """Try all placements of one split of a step; none of them counts as effort.

    Once something fits, fewer are tried where micro-batches run one after another: every number of resident layers, but
    of each other knob only its ends and its best value so far; and the same with the weights of all blocks held, which
    then need no buffers. These placements are also tried with fewer buffers where that leaves room for more, and with
    as many blocks' states, or their weights, on the device as have room beside the resident layers. `one_block` is as
    for `Room.begin`.
    """
    every, effort = placements(found.model, workload, begun=begun), found.effort
    start, blocks = Candidate(policy=OURS, workload=workload), found.model.num_hidden_layers
    begin = found.room.begin(start, one_block=one_block)
    for order in orders(workload):
        for usual in dict.fromkeys((start, begin)):
            some = every if order == "layers" or found.at is None else _ends(every, found.at)
            found.evaluate(*_each(usual, order, blocks, some))
    for thrifty in _thriftier(found, start, begin):
        for order in orders(workload):
            found.evaluate(*_each(thrifty, order, blocks, _ends(every, found.at or start)))
    for there, slots, resident in itertools.product(dict.fromkeys((start, begin)), SLOTS, every["resident"]):
        some = there.with_knobs({"resident": resident, "slots": slots})
        stays = {found.room.stays(some)} - {0} if workload.grad_clip is None else ()
        for more in ({"stay": stay} for stay in stays), ({"hold": hold} for hold in found.room.holds(some)):
            ends = {**_ends(every, found.at or start), "resident": [resident]}
            found.evaluate(*(each for knobs in more for each in _each(some.with_knobs(knobs), "layers", blocks, ends)))
    found.effort = effort


def _each(begin: Candidate, order: str, blocks: int, values: Mapping[str, Iterable[Knob]]) -> list[Candidate]:
    begins = [begin.with_knobs({"order": order})]
    if order != "layers":
        begins.append(begins[0].with_knobs({"hold": blocks}))
    ways = itertools.product(begins, itertools.product(*values.values()))
    return [begin.with_knobs(dict(zip(values, way, strict=True))) for begin, way in ways]


def _ends(every: Mapping[str, list[Knob]], best: Candidate) -> dict[str, list[Knob]]:
    """Of each knob but `resident` the first value, the last, and that of the best candidate."""
    ends = {name: list(dict.fromkeys((values[0], best.value(name), values[-1]))) for name, values in every.items()}
    return {**ends, "resident": every["resident"]}


def _thriftier(found: Findings, start: Candidate, begin: Candidate) -> list[Candidate]:
    """Candidates with fewer or smaller buffers, where that leaves room for more layers, or for more off the drive."""
    most, parts = found.room.most_residents(start), ways_to_part(found.model, start.workload)[-1]
    fewer: tuple[dict[str, Knob], ...] = ({}, {"grad_slots": 1}, ONE_BLOCK)
    ways = (start.with_knobs({**few, "parts": n}) for few in fewer for n in sorted({1, parts}))
    thriftier = [thrifty for thrifty in ways if found.room.most_residents(thrifty) > most]
    return [*thriftier, begin.with_knobs(FEWEST_ON_THE_DRIVE)] if begin.value("nvme") else thriftier

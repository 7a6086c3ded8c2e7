"""Where a step has few placements, all of them: of small models, for which that takes no longer than a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from schedules.model import ModelSpec
from schedules.op import Tier
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
    start = Candidate(policy=OURS, workload=workload)
    begin = found.room.begin(start, one_block=one_block)
    for order in orders(workload):
        for usual in dict.fromkeys((start, begin)):
            some = every if order == "layers" or found.at is None else _ends(every, found.at)
            _try_each(found, usual, order, some)
    for thrifty in _thriftier(found, start, begin):
        for order in orders(workload):
            _try_each(found, thrifty, order, _ends(every, found.at or start))
    for there, slots, resident in itertools.product(dict.fromkeys((start, begin)), SLOTS, every["resident"]):
        some = there.with_knobs({"resident": resident, "slots": slots})
        stays = {found.room.stays(some)} - {0}
        for more in ({"stay": stay} for stay in stays), ({"hold": hold} for hold in found.room.holds(some)):
            ends = {**_ends(every, found.at or start), "resident": [resident]}
            found.evaluate(*(each for knobs in more for each in _each([some.with_knobs(knobs)], ends)))
    found.effort = effort


def _try_each(found: Findings, begin: Candidate, order: str, values: Mapping[str, list[Knob]]) -> None:
    """Try all placements of these values, those of the fewest resident layers first.

    Where a device has no room for so many, it has none for more: these are left out, but for the last few, beside which
    there is hardly a block left to need buffers.
    """
    blocks, full = found.model.num_hidden_layers, set[Candidate]()
    begins = [begin.with_knobs({"order": order})]
    if order != "layers":
        begins.append(begins[0].with_knobs({"hold": blocks}))
    for resident in values["resident"]:
        some = [
            each
            for each in _each(begins, {**values, "resident": [resident]})
            if each.count("resident") >= blocks or each.with_knobs({"resident": 0}) not in full
        ]
        for each, tried in zip(some, found.evaluate(*some), strict=True):
            if tried.lacking == Tier.DEVICE:
                full.add(each.with_knobs({"resident": 0}))


def _each(begins: Iterable[Candidate], values: Mapping[str, Iterable[Knob]]) -> list[Candidate]:
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

"""The last part of a search: from the best candidate on, one knob at a time, or several, while that makes it faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from schedules.schedule import Knob
from schedules.workload import Workload
from sim.candidate import ROUND, Candidate, Tried
from sim.findings import Findings
from sim.knob_space import SLACKS, knob_space
from sim.room import Room

FREES = (
    "resident",
    "every",
    "nested",
    "slots",
    "grad_slots",
    "inputs",
)  # knobs that leave more room on the device, or less
WORTH_A_STEP = 5e-4  # by what fraction a step must be faster to be taken
WORTH_MORE_PARTS = 2e-3  # the same where parts become twice as many: whatever is tried from there on takes longer
TOGETHER = (1, 2, 2, 3)  # how many knobs are changed together
FAR = (1, 1, 2, 3, 5, 8)  # by how many values, where there are more than MANY_VALUES; else by one
MANY_VALUES = 16
IDLE = 25  # rounds without a gain after which no more are tried
SAME = 2e-3  # by what fraction of the best a step may be slower for fewer micro-batches


def refine(
    found: Findings, *, begun: Candidate, hold: bool, stride: int | None = None, at: Candidate | None = None
) -> None:
    """Change one knob of a candidate at a time, while that makes it faster; by large steps, then small ones.

    The candidate is `at`, which has been tried, the best so far if left out. The large steps are of `stride` values, a
    sixth of the blocks if left out. How many blocks are held is one of these knobs if `hold`: early on it leads away
    from better places. `begun` is where the search began, see `knob_space`.
    """
    at = at or found.at
    if at is None:
        return
    cost = found.tried[at].cost_ns
    space = knob_space(found.model, at.workload, begun=begun)
    if not hold:
        space.pop("hold", None)
    stride = stride or max(found.model.num_hidden_layers // 6, 1)
    too_far = set[tuple[str, int]]()  # by how much a knob was changed when there was no room
    while stride and found.effort > 0:
        before = at
        for name, values in space.items():
            if not _matters(name, at):
                continue
            here, values = _place(at, name, values)
            step = min(stride, max(len(values) // 3, 1))
            ways = [way for way in (step, -step) if 0 <= here + way < len(values) and (name, way) not in too_far]
            if found.effort <= 0:
                break
            there = [_changed(found.room, at, name, values[here + way]) for way in ways]
            for way, asked, tried in zip(ways, there, found.evaluate(*there), strict=True):
                candidate = found.placed(asked)
                if tried.over:
                    candidate, tried = _thriftier(found, candidate)
                if tried.over:
                    too_far.add((name, way))
                worth = WORTH_MORE_PARTS if name == "parts" and way > 0 else WORTH_A_STEP
                if tried.cost_ns < cost * (1.0 - worth):
                    at, cost = candidate, tried.cost_ns
                    too_far.clear()
        if at == before:
            stride //= 2


def shake(found: Findings, *, begun: Candidate) -> None:
    """Change a few knobs of the best candidate together, drawn by chance, while there is effort and that gains.

    One knob at a time ends where each alone makes it slower: as many more blocks held as are resident less, say. The
    chance is the same in every search.
    """
    chance, idle = Random(0), 0
    while found.at is not None and found.effort > 0 and idle < IDLE:
        at = found.at
        space = knob_space(found.model, at.workload, begun=begun)
        found.evaluate(*(_shaken(found.room, at, space, chance) for _ in range(ROUND)))
        idle = idle + 1 if found.at == at else 0


def send_away(found: Findings) -> None:
    """Change for how many blocks activations leave, and how long they take to, together, while that gains.

    More of them need more time, and a longer time pays with more of them: each alone may be slower.
    """
    blocks = found.model.num_hidden_layers
    stride = max(blocks // 6, 1)
    while stride and found.at is not None and found.effort > 0:
        at = found.at
        counts = (at.count("offload") + stride, at.count("offload") - stride)
        found.evaluate(
            *(
                at.with_knobs({"offload": offload, "slack": slack})
                for offload in counts
                for slack in SLACKS
                if 0 <= offload <= blocks
            )
        )
        if found.at == at:
            stride //= 2


def fewer_micro_batches(found: Findings, steps: Sequence[Workload], *, most_ns: float = math.inf) -> None:
    """Take the best candidate with fewer, larger micro-batches, of `steps`, where it is slower by less than SAME.

    And it must cost less than `most_ns`. Smaller products take longer for what they do, which a measured profile knows
    and a datasheet does not: twice 4,096 tokens took 5 % longer than 8,192, backward of an 8B's block on an H200
    (analysis/results/gpu/h200).
    """
    at = found.at
    if at is None or found.tried[at] is not found.chosen or found.profile.mode == "measured":
        return
    most_ns = min(found.cost_ns * (1.0 + SAME), most_ns)
    slack, now = at.count("slack"), at.workload
    fewer = [step for step in steps if step.recompute == now.recompute and step.accumulation < now.accumulation]
    for workload in sorted(fewer, key=lambda step: -step.accumulation):
        slacks = sorted({slack, -(-slack // 2), 1})  # fewer have room of activations that are larger
        some = [replace(at, workload=workload).with_knobs({"slack": visits}) for visits in slacks]
        if not found.prefer(some, most_ns):
            return


def _shaken(room: Room, at: Candidate, space: dict[str, list[Knob]], chance: Random) -> Candidate:
    names = [name for name in space if _matters(name, at)]
    for name in chance.sample(names, chance.choice(TOGETHER)):
        here, values = _place(at, name, space[name])
        far = chance.choice(FAR) if len(values) > MANY_VALUES else 1
        to = min(max(here + chance.choice((far, -far)), 0), len(values) - 1)
        at = _changed(room, at, name, values[to])
    if at.value("stay") and chance.random() < 0.5:
        at = at.with_knobs({"stay": room.stays(at)})
    return at


def _matters(name: str, at: Candidate) -> bool:
    """Whether a knob changes anything."""
    return name != "nested" or at.value("every") != 1


def _place(at: Candidate, name: str, values: list[Knob]) -> tuple[int, list[Knob]]:
    """Where a candidate's knob is among the values, which include what the search began with."""
    if at.value(name) not in values:
        values = [at.value(name), *values]
    return values.index(at.value(name)), values


def _changed(room: Room, at: Candidate, name: str, value: Knob) -> Candidate:
    """With one knob changed, and what follows from it.

    As many bytes in buffers as before if that is the parts. Where a drive is the limit, or weights are held while
    states pass, as much more state on the device as gets room there, or less; and if these are the same blocks, they
    stay so.
    """
    changed = at.with_knobs({name: value})
    if name == "through" and at.value("hold") and at.value("hold") == at.value("through"):
        changed = changed.with_knobs({"hold": value})
    passing = changed.value("through") or changed.workload.multiplies_to_update
    if name in ("hold", "through") and passing and (changed.value("hold") or at.value("hold")):
        more = room.stays(changed) - room.stays(at)
        changed = changed.with_knobs({"stay": max(at.count("stay") + more, 0)})
    elif name == "parts":
        now, before = changed.count(name), at.count(name)
        changed = changed.with_knobs({"stay": at.count("stay") * now // before})
        for buffers in ("slabs", *(("nvme_slots",) if at.value("nvme") else ())):
            changed = changed.with_knobs({buffers: max(at.count(buffers) * now // before, 1)})
    elif at.value("nvme") and at.value("stay") and name in FREES:
        more = room.stays(changed) - room.stays(at)
        changed = changed.with_knobs({"stay": max(at.count("stay") + more, 0)})
    return changed


def _thriftier(found: Findings, candidate: Candidate) -> tuple[Candidate, Tried]:
    """The same where less else takes up room: weights and activations on their way, or inputs."""
    thrifty = candidate.with_knobs({"slack": 1, "slots": min(candidate.count("slots"), 2)})
    (tried,) = found.evaluate(thrifty)
    inputs = candidate.count("inputs")
    if tried.over and inputs:
        thrifty = thrifty.with_knobs({"inputs": inputs * 5 // 6})
        (tried,) = found.evaluate(thrifty)
    return thrifty, tried

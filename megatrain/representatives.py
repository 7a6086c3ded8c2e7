"""Which schedules to time, so that a profile has all ops of a model's steps: few, of few blocks, that fit here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.fitting import LeftOut, that_fit
from megatrain.this_machine import Here
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from sim.signature import Which, timed

# Of a longer model so many blocks are timed, or fewer where these do not fit. Each is as cold in its turn as in the
# whole model, for the others are larger than any cache; and a model that does not fit can be measured all the same.
LENGTHS = (8, 4, 2)


def representatives(
    model: ModelSpec, build: Callable[[ModelSpec], Sequence[Schedule]], at: Here, which: Which = "all"
) -> tuple[list[Schedule], list[LeftOut]]:
    """Schedules with room that have, together, all ops of `build(model)` that any has; and those without, with others.

    They are what `build` makes of a shortened model, and of the model itself for ops that only its own steps have, if
    nothing is predicted without. `which` ops, see `sim.signature.timed`.
    """
    whole = build(model)
    least: Which = "needed" if which == "all" else which
    wanted, needed = (timed_in(*whole, which=ops) for ops in (which, least))
    found, left = list[Schedule](), list[LeftOut]()
    for some in dict.fromkeys([*(shortened(model, blocks) for blocks in LENGTHS), model]):
        lacking = (needed if some == model else wanted) - timed_in(*found)
        if not lacking:
            continue
        fitting, too_large = that_fit([schedule for schedule in build(some) if timed_in(schedule) & lacking], at)
        found, left = covering([*found, *fitting], which), [*left, *too_large]
    lacking = needed - timed_in(*found)
    return found, [(schedule, lack) for schedule, lack in left if timed_in(schedule) & lacking]


def shortened(model: ModelSpec, blocks: int) -> ModelSpec:
    """The model with only its first blocks, so many or as many as have each kind; itself if it has no more."""
    kinds = [model.layer_kind(i) for i in model.blocks]
    count = max(blocks, *(kinds.index(kind) + 1 for kind in kinds))
    if count >= len(kinds):
        return model
    return model.of_blocks(range(count))


def covering(schedules: Sequence[Schedule], which: Which = "all") -> list[Schedule]:
    """Those of the schedules, in order, that have an op which none before them has: fewer runs, the same profile."""
    seen: set[str] = set()
    found = []
    for schedule in schedules:
        if new := timed_in(schedule, which=which) - seen:
            seen |= new
            found.append(schedule)
    return found


def timed_in(*schedules: Schedule, which: Which = "all") -> set[str]:
    """The signatures of the ops that a profile of these schedules has times of."""
    return {op for schedule in schedules for op in timed(schedule, which).values()}


def shapes_up_to(batch: int, seq: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The largest shape and four smaller ones, from which those between can be told: (micro-batch, sequence).

    Of the smaller ones those of a `multiple` of tokens.
    """
    short, middle = max(1, seq // 4), max(1, seq // 2)
    smaller = [(1, seq), (max(1, batch // 2), middle), (batch, short), (1, short)]
    return list(dict.fromkeys([(batch, seq), *((b, s) for b, s in smaller if b * s % multiple == 0)]))


def shapes_between(shapes: Sequence[tuple[int, int]], count: int = 4, multiple: int = 1) -> list[tuple[int, int]]:
    """So many sequences whose tokens lie evenly, in ratio, between the least and the most of some shapes.

    Each is rounded to a `multiple` of tokens; those that are there already are left out.
    """
    tokens = sorted(batch * seq for batch, seq in shapes)
    ratio = (tokens[-1] / tokens[0]) ** (1 / (count + 1))
    found = {multiple * round(tokens[0] * ratio**k / multiple) for k in range(1, count + 1)} - {0, *tokens}
    return [(1, seq) for seq in sorted(found)]

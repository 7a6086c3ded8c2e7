"""What the planner's search may change: the knobs of `streamed`, each with the values that are tried, in order."""

from __future__ import annotations

from schedules.model import ModelSpec
from schedules.schedule import Knob
from schedules.workload import Workload
from sim.candidate import Candidate
from sim.room import ONE_BLOCK, ways_to_part

SLACKS = (1, 2, 3, 4)


def knob_space(model: ModelSpec, workload: Workload, *, begun: Candidate) -> dict[str, list[Knob]]:
    """The knobs of `streamed` that are searched, each with its values in order.

    Knobs that matter only when memory is short are included if `begun`, the search's starting point, sets them.
    """
    blocks = model.num_hidden_layers
    counts: list[Knob] = list(range(blocks + 1))
    space: dict[str, list[Knob]] = {
        "resident": list(range(len(model.layers) + 1)),
        "offload": counts,
        "slack": [*SLACKS],
        "slots": [2, 3, 4],
        "grad_slots": [1, 2],
        "slabs": [2, 4, 8, 16, 32],
    }
    parts = ways_to_part(model, workload)
    by_choice = not workload.multiplies_to_update  # of blocks, not all on the device
    if by_choice and workload.grad_clip is None:  # or all updates wait for the norm of all gradients
        space["defer"] = counts
    if by_choice:
        space["through"] = counts
    space["parts"] = [*parts]
    space["stay"] = [*range(blocks * parts[-1] + 1)]
    known = dict(begun.knobs)
    space |= {name: counts for name in ("inputs", "nvme_inputs") if name in known}
    if "nvme" in known:
        space |= {
            "nvme_slots": [1, 2, 3, 4, 6, 8, 12, 16],
            "slabs": [1, 2, 4, 8, 16, 32],
            "slots": [1, 2, 3, 4],
            "every": [1, 2, 4, 8],
            "nested": [False, True],
        }
    if not ONE_BLOCK.keys().isdisjoint(known):
        space["slots"] = [1, 2, 3, 4]
    if "slabs" in known:
        space["slabs"] = [1, 2, 4, 8, 16, 32]
    if workload.accumulation > 1 and by_choice:
        space |= {"order": ["layers", "microbatches"], "singly": counts}
    return {**space, "hold": counts}

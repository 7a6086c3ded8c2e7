"""How fast ops run when they share capacities: max-min fairness by progressive filling.

Every running op is described by the fraction of each resource that it would use if it ran alone. The
speeds of all ops rise together until a resource is full or the ops run at full speed; the ops on a full resource
are settled and the others go on (Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def speeds(usages: Sequence[Mapping[str, float]]) -> list[float]:
    """The speed of each op, in (0, 1], relative to running alone; capacities are 1.

    `usages[i]` maps a resource to the fraction of it that op i uses at full speed, in [0, 1]. An op that touches
    no over-subscribed resource gets exactly 1.0, and an over-subscribed resource carries at most its capacity up
    to rounding of the last bits.

    Raises ValueError for a usage outside [0, 1].
    """
    _check(usages)
    alone = [1.0] * len(usages)
    demand = _demand(usages, alone, range(len(usages)))
    contended = [resource for resource, total in demand.items() if total > 1.0]
    speed = alone.copy()
    filling = [i for i, usage in enumerate(usages) if any(usage.get(r, 0.0) > 0.0 for r in contended)]
    settled = [i for i in range(len(usages)) if i not in filling]
    level = 0.0  # the common speed of the ops that still go up
    while filling:
        used = _demand(usages, speed, settled)
        rising = _demand(usages, alone, filling)
        fills = {r: (1.0 - used.get(r, 0.0)) / rising[r] for r in contended if rising.get(r, 0.0) > 0.0}
        # Rounding must not take the level back down: an op would get less than one that settled before it.
        level = max(level, min([*fills.values(), 1.0]))
        full = [r for r, fill in fills.items() if fill <= level]
        done = [i for i in filling if level == 1.0 or any(usages[i].get(r, 0.0) > 0.0 for r in full)]
        for i in done:
            speed[i] = level
        settled += done
        filling = [i for i in filling if i not in done]
    return speed


def _check(usages: Sequence[Mapping[str, float]]) -> None:
    for i, usage in enumerate(usages):
        for resource, fraction in usage.items():
            if not 0.0 <= fraction <= 1.0:
                raise ValueError(f"op {i}: use of {resource} must be from 0 to 1, got {fraction!r}")


def _demand(usages: Sequence[Mapping[str, float]], scale: Sequence[float], ops: Sequence[int]) -> dict[str, float]:
    """Use of each resource by `ops` at the given speeds, correctly rounded: ten times 0.1 is 1.0."""
    parts: dict[str, list[float]] = {}
    for i in ops:
        for resource, fraction in usages[i].items():
            parts.setdefault(resource, []).append(scale[i] * fraction)
    return {resource: math.fsum(shares) for resource, shares in parts.items()}

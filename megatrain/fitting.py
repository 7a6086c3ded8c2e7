"""Which schedules this machine has room for, to be asked before any of them is run, and what the others lack."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.this_machine import Here
from schedules.op import Tier
from schedules.schedule import Schedule
from sim import hardware
from sim.prediction import DoesNotFit, Lack, shortage
from sim.units import scaled

LeftOut = tuple[Schedule, DoesNotFit]

ESTIMATING = "h200"  # a datasheet, as good as any other: workspace that was not measured is estimated from shapes


def that_fit(schedules: Sequence[Schedule], at: Here) -> tuple[list[Schedule], list[LeftOut]]:
    """Those of the schedules that have room in every tier, workspace included as it is estimated; and the others."""
    found, left = list[Schedule](), list[LeftOut]()
    estimates = hardware.load(ESTIMATING)
    for schedule in schedules:
        lacking = shortage(schedule, estimates, at.room_for(schedule))
        if lacking is None:
            found.append(schedule)
        else:
            left.append((schedule, lacking))
    return found, left


def told_left_out(found: Sequence[Schedule], left: Sequence[LeftOut]) -> list[str]:
    """A line for each policy of which some was left out: at which shapes, and what the least of them lacks."""
    fitting = {schedule.policy for schedule in found}
    of_policy: dict[str, list[LeftOut]] = {}
    for one in left:
        of_policy.setdefault(one[0].policy, []).append(one)
    lines = []
    for policy, some in of_policy.items():
        at = f" at {', '.join(dict.fromkeys(_shape(schedule) for schedule, _ in some))}" if policy in fitting else ""
        lacks = min((lacking.lacks for _, lacking in some), key=lambda lacks: sum(lack.over for lack in lacks))
        least = "at least " if len(some) > 1 else ""
        lines.append(f"{policy} is not measured{at}: it lacks {least}{' and '.join(map(_lacking, lacks))}")
    return lines


def _shape(schedule: Schedule) -> str:
    workload = schedule.workload
    again = "" if workload.recompute == "none" else f" with recompute {workload.recompute}"
    return f"{workload.micro_batch_size}x{workload.seq_len}{again}"


def _lacking(lack: Lack) -> str:
    if lack.tier == Tier.NVME:
        return f"{scaled(lack.over, 'GB')} on a drive{'' if lack.available else ' (--nvme FOLDER)'}"
    return f"{scaled(lack.over, 'GB')} of {lack.tier} memory"

"""What `megatrain plan-adapters` tells: the schedule and its numbers, their bounds, and what else was tried."""

from __future__ import annotations

import math
from typing import Any

from megatrain.plan_tables import searched
from megatrain.tables import drive_rows, prediction_record, print_memory, setting
from megatrain.terminal import print_table
from schedules import policies
from sim.adapter_plan import AdapterPlan
from sim.candidate import Tried
from sim.units import rate, seconds


def record(found: AdapterPlan) -> dict[str, Any]:
    """All of it for programs; every key says its unit."""
    return {
        **prediction_record(found.prediction),
        "bound_of_any_schedule_s": found.lower_bound_ns / 1e9 or None,
        "gap_to_any_schedule": found.gap if math.isfinite(found.gap) else None,
        "what_binds_any_schedule": found.binding,
        "candidates": len(found.tried),
        "candidates_simulated": sum(tried.period_ns is not None for tried in found.tried),
        "best_of_each_kind": [
            {
                "activations": activations,
                "whole": whole,
                "step_s": None if tried.period_ns is None else tried.period_ns / 1e9,
                "reason": tried.reason,
            }
            for (activations, whole), tried in _kinds(found).items()
        ],
        "candidates_not_measured": _not_measured(found),
        "measure_with": found.measure_with,
        "planning_s": found.seconds,
        "finished": found.finished,
    }


def show(found: AdapterPlan) -> None:
    """The plan for people."""
    prediction, schedule = found.prediction, found.schedule
    changed = policies.changed(schedule)
    kept = "" if schedule.workload.quantised is None else f" beside {schedule.workload.quantised}"
    print(f"{setting(prediction)}; adapters of rank {schedule.workload.lora_rank}{kept}")
    print(f"{schedule.label}{' with ' if changed else ''}{', '.join(changed)}; digest {schedule.short_digest}")
    print(searched(found.tried, found.seconds, finished=found.finished))
    rows = [
        ["throughput", f"{rate(prediction.tokens_per_s)} tokens/s"],
        ["step", seconds(prediction.period_ns / 1e9)],
        ["MFU, HFU", f"{prediction.mfu:.1%}, {prediction.hfu:.1%}"],
        ["above the bound of this schedule", f"{prediction.gap:.1%}, {seconds(prediction.bound_ns / 1e9)}"],
        ["  which is set by", prediction.binding],
    ]
    if found.lower_bound_ns:
        rows += [
            ["above the bound of any schedule", f"{found.gap:.1%}, {seconds(found.lower_bound_ns / 1e9)}"],
            ["  which is set by", found.binding],
        ]
    print_table("one step", ["", ""], rows + drive_rows(prediction))
    print_memory(prediction)
    of_each = [
        [activations, *([whole] if schedule.workload.quantised else []), *_told(tried)]
        for (activations, whole), tried in _kinds(found).items()
    ]
    whole = ["made whole by"] if schedule.workload.quantised else []
    print_table("the best of each kind that was tried", ["activations", *whole, "step", "why not"], of_each)
    if found.measure_with is not None:
        why = f"{_not_measured(found)} of the candidates tried were left out, for the profile has no times for them"
        print(f"{why}; to measure the first: {found.measure_with}")


def _not_measured(found: AdapterPlan) -> int:
    return sum(not tried.measured for tried in found.tried)


def _told(tried: Tried) -> list[str]:
    return ["-", tried.reason] if tried.period_ns is None else [seconds(tried.period_ns / 1e9), ""]


def _kinds(found: AdapterPlan) -> dict[tuple[str, str], Tried]:
    """By the place of activations, and what quantised weights are made whole by: the fastest, or what was closest."""
    kinds: dict[tuple[str, str], Tried] = {}
    for tried in sorted(found.tried, key=lambda tried: (tried.cost_ns, tried.over)):
        kind = str(tried.knobs.get("activations", "recompute")), str(tried.knobs.get("whole", "blocks"))
        kinds.setdefault(kind, tried)
    return kinds

"""Whether a policy's schedule is of the step that was asked for: else its numbers would stand for another."""

from __future__ import annotations

from dataclasses import fields

from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.workload import Workload

# of a workload a policy may choose what it trains, and in which types: its results are labelled by them
_CHOSEN = {"precision", "task", "lora_rank", "quantised"}


def another_step(schedule: Schedule, model: ModelSpec, workload: Workload) -> str | None:
    """In what a schedule is of another step than these, as "its workload has seq_len 8, asked for was 16"; or None."""
    for what, own, asked in (("model", schedule.model, model), ("workload", schedule.workload, workload)):
        for name in (field.name for field in fields(asked)):
            has, was = getattr(own, name), getattr(asked, name)
            if has != was and not (what == "workload" and _may_choose(schedule.workload, name, asked=was)):
                return f"its {what} has {name} {has}, asked for was {was}"
    return None


def _may_choose(workload: Workload, name: str, *, asked: object) -> bool:
    """Some systems always clip; and where nothing is trained there is nothing to clip."""
    if name == "grad_clip":
        return asked is None or workload.task == "evaluate"
    return name in _CHOSEN

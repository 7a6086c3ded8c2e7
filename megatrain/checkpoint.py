"""A training between two steps, as files: any exact schedule of the same model, precision and adapters goes on from it.

A folder holds a checkpoint in a folder of its own for each step that was saved, `step-00000120`: a safetensors file per
trained layer, with its weights (or adapters) and its optimizer state as bytes, and `training.json`, written last.
Without that file a checkpoint is not one, so a crash or a full disk costs no older one: those are removed only after
the new one is complete. What is frozen is not saved.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from schedules import trained
from schedules.errors import InputError, Refused
from schedules.model import ModelSpec
from schedules.schedule import Schedule

FORMAT = 1
LAST = "training.json"
STEPS = "step-[0-9]*"

Kept = Callable[[int], tuple[Tensor, Tensor]]  # layer -> what is trained of it, flat, and its optimizer state, uint8


class CheckpointError(InputError):
    """There is no checkpoint, or it is of another training; the message says what differs."""


class NotSaved(Refused):
    """A checkpoint that could not be written; the one before it is as it was."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved after `step` steps."""

    folder: Path
    model: ModelSpec
    step: int

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """See Kept. Raises CheckpointError for a file that is damaged or gone."""
        path = _file(self.folder, self.model, i)
        try:
            found = load_file(path)
            return found["weights"], found["state"]
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def save(folder: Path, schedule: Schedule, step: int, kept: Kept) -> Path:
    """Write the state after `step` steps, then remove older checkpoints in `folder`; the new one's own folder.

    Raises NotSaved.
    """
    target = folder / f"step-{step:08d}"
    if target in _complete(folder):
        raise NotSaved(f"{target} is there already")
    try:
        shutil.rmtree(target, ignore_errors=True)  # of a save that was interrupted
        target.mkdir(parents=True)
        for i in trained.layers(schedule.model, schedule.workload):
            weights, state = kept(i)
            save_file({"weights": weights, "state": state}, _file(target, schedule.model, i))
        (target / LAST).write_text(json.dumps({**_of(schedule), "step": step}, indent=1) + "\n")
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise NotSaved(f"the checkpoint of step {step} could not be written to {folder}: {error}") from None
    os.sync()  # what comes after a loss of power must not be a name without its contents
    for other in folder.glob(STEPS):  # complete or not
        if other != target:
            shutil.rmtree(other)
    return target


def require_room(folder: Path, schedule: Schedule, resumed: Checkpoint | None) -> None:
    """Before a training: raises NotSaved unless `folder` can be written and has room for one checkpoint more.

    Raises CheckpointError where it has checkpoints that this training does not go on from: they would be removed.
    """
    for found in _complete(folder):
        if resumed is None or found.resolve() != resumed.folder.resolve():
            raise CheckpointError(
                f"{found} is a checkpoint that this training does not go on from, and would be removed: "
                "resume from it, or save to another folder"
            )
    workload = schedule.workload
    needed = sum(
        params * workload.bytes.weight + workload.bytes.state_bytes(params)
        for i in trained.layers(schedule.model, workload)
        for params in [trained.params(schedule.model, workload, i)]
    )
    if not needed:
        raise CheckpointError(f"{schedule.label} trains nothing that could be saved")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise NotSaved(f"no checkpoint can be written to {folder}: {error.strerror}") from None
    if needed > free:
        raise NotSaved(f"a checkpoint takes {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free in {folder}")


def read(folder: Path, schedule: Schedule) -> Checkpoint:
    """The checkpoint that `folder` is, or the newest complete one in it.

    Raises CheckpointError if there is none for this schedule.
    """
    complete = [folder] if (folder / LAST).is_file() else _complete(folder)
    if not complete:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    try:
        found = json.loads((complete[-1] / LAST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{complete[-1] / LAST} cannot be read: {error}") from None
    for key, value in _of(schedule).items():
        if found.get(key) != value:
            was, now = (_short(key, body) for body in (found.get(key), value))
            raise CheckpointError(f"{complete[-1]} is of another training: its {key} is {was}, the schedule's {now}")
    return Checkpoint(folder=complete[-1], model=schedule.model, step=found["step"])


def _of(schedule: Schedule) -> dict[str, Any]:
    """What a schedule must have in common with another to go on from its checkpoint."""
    workload = schedule.workload
    return {
        "format": FORMAT,
        "model": {key: value for key, value in schedule.model.to_dict().items() if key != "name"},
        "precision": workload.precision,
        "lora_rank": workload.lora_rank,
    }


def _short(key: str, value: object) -> str:
    if key == "model" and isinstance(value, dict):
        return f"one of {value.get('num_hidden_layers')} blocks {value.get('hidden_size')} wide"
    return repr(value)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest last."""
    return sorted(path.parent for path in folder.glob(f"{STEPS}/{LAST}"))


def _file(folder: Path, model: ModelSpec, i: int) -> Path:
    return folder / f"{model.layer_name(i)}.safetensors"

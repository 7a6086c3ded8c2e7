"""A training between two steps, as files: any exact schedule of the same model, precision and adapters goes on from it.

A folder holds a checkpoint in a folder of its own for each step that was saved, `step-00000120`: a safetensors file per
trained layer, with its weights (or adapters) and its optimizer state as bytes, and `training.json` with the checksums
of both, so that a file which a drive has changed is found before anything is trained from it.

`training.json` is written last, and a folder without it is no checkpoint: so a crash or a full disk costs none of the
older ones. The two newest are kept, because whether the newest has diverged is known only once a step has been trained
from it; with a stale schedule only some steps later, so more are kept where one saves that often. Frozen weights are
not saved, only what they are known by (`megatrain.checksum`): adapters are of no use beside other weights.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatrain.checksum import checksum
from megatrain.tensor_file import save_file
from schedules import trained
from schedules.errors import InputError, Refused
from schedules.files import sync
from schedules.model import ModelSpec
from schedules.optimizer import state_bytes
from schedules.schedule import Schedule
from schedules.workload import ADAMW, Workload

FORMAT = 3
LAST = "training.json"
STEP = re.compile(r"step-\d{8,}")
# the files that a save writes, and safetensors on the way to one
OF_A_SAVE = re.compile(rf"(embed|head|\d+)\.safetensors|{re.escape(LAST)}(\.partial)?|\.tmp\w*")

Kept = Callable[[int], tuple[Tensor, Tensor]]  # layer -> what is trained of it, flat, and its optimizer state, uint8


class CheckpointError(InputError):
    """There is no checkpoint, or it is of another training; the message says what differs."""


class NotSaved(Refused):
    """A checkpoint that could not be written; the one before it is as it was."""


class Diverged(Refused):
    """A training whose loss or weights are no longer finite; nothing of it is saved."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved after `step` steps."""

    folder: Path
    model: ModelSpec
    workload: Workload
    step: int
    checksums: Mapping[str, Mapping[str, int]]  # layer -> of its weights and its state
    frozen: Mapping[str, int] = field(default_factory=dict)  # layer -> what its frozen weights are known by
    began: Path | None = None  # the folder of the weights that the training began with
    settings: Mapping[str, object] = field(default_factory=dict)  # what its last step was trained with, in words
    skipped: Sequence[Path] = field(default=(), compare=False)  # newer ones, of saves that were interrupted
    older: Path | None = field(default=None, compare=False)  # the checkpoint before it

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """See Kept. Raises CheckpointError for a file that is damaged or gone."""
        path = _file(self.folder, self.model, i)
        with _readable(path, self.older):
            found = load_file(path)
            weights, state = found["weights"], found["state"]
        params = trained.params(self.model, self.workload, i)
        state_size = state_bytes(self.model, self.workload, i, params)
        due = {"weights": (params, self.workload.bytes.weight), "state": (state_size, 1)}
        for name, part in (("weights", weights), ("state", state)):
            if (*part.shape, part.itemsize) != due[name] or part.is_floating_point() != (name == "weights"):
                told = f"its {name} are {part.dtype} {list(part.shape)}"
                raise CheckpointError(f"{path} is damaged: {told}{_hint(self.older)}")
            if checksum(part) != self.checksums[self.model.layer_name(i)][name]:
                raise CheckpointError(f"{path} is damaged: what was saved differs from its {name}{_hint(self.older)}")
        return weights, state


def save(
    folder: Path,
    schedule: Schedule,
    step: int,
    kept: Kept,
    frozen: Mapping[str, int] | None = None,
    began: Path | None = None,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write the state after `step` steps into `folder`; the new checkpoint's own folder.

    First all checkpoints are removed that are older than the newest from which a step has been trained, to make room.
    Raises NotSaved, and Diverged where weights are not finite.
    """
    target, complete = folder / f"step-{step:08d}", _complete(folder)
    if target in complete:
        raise NotSaved(f"{target} is there already")
    tried = [path for path in complete if _step(path) < step - schedule.staleness]
    kept_too = complete[max(0, len(tried) - 1) :]
    try:
        for other in _steps(folder):
            if other not in kept_too:  # older, or of a save that was interrupted
                _remove(other)
        target.mkdir(parents=True)
        checksums = {}
        for i in trained.layers(schedule.model, schedule.workload):
            weights, state = kept(i)
            name = schedule.model.layer_name(i)
            if not all_finite(weights):
                raise Diverged(f"the weights of layer {name} are not finite after step {step}")
            parts = {"weights": weights, "state": state}
            save_file(parts, _file(target, schedule.model, i))
            sync(_file(target, schedule.model, i))
            checksums[name] = {part: checksum(bits) for part, bits in parts.items()}
        where = None if began is None else str(began.resolve())
        about = {**_of(schedule), "step": step, "frozen": dict(frozen or {}), "began": where}
        about |= {"settings": dict(settings or {}), "checksums": checksums}
        about["own_checksum"] = _checksum_of(about)
        partial = target / f"{LAST}.partial"
        partial.write_text(json.dumps(about, indent=1) + "\n")
        sync(partial)
        sync(target)  # what comes after a loss of power must not be a name without its contents
        partial.replace(target / LAST)
        sync(target)
        sync(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise NotSaved(f"the checkpoint of step {step} could not be written to {folder}: {error}") from None
    except Diverged:
        shutil.rmtree(target)
        raise
    return target


def all_finite(weights: Tensor) -> bool:
    """Whether these weights, flat, are finite numbers."""
    least, most = torch.aminmax(weights)  # NaN where any is; a mask would take memory, and ten times as long
    return bool(least.isfinite() and most.isfinite())


def require_folder(folder: Path, schedule: Schedule, resumed: Checkpoint | None, saves: int, *, apart: int = 1) -> int:
    """Make `folder` before a training that saves so many times, at least `apart` steps apart.

    Returns how many bytes more it will take than it does now.

    Raises:
        CheckpointError: nothing is trained, the folder is a checkpoint or in one, or there are checkpoints that this
            training does not go on from, and that would be removed.
        NotSaved: the folder cannot be made.
    """
    require_apart(folder)
    complete = _complete(folder)
    others = [path for path in _named_so(folder) if not _is_ours(path)]
    if others:
        raise CheckpointError(f"{others[0]} is no checkpoint of ours, though it is called so: save to another folder")
    if complete and (resumed is None or complete[-1].resolve() != resumed.folder.resolve()):
        raise CheckpointError(
            f"{complete[-1]} is a checkpoint that this training does not go on from, and would be removed: "
            "resume from it, remove it if it is damaged, or save to another folder"
        )
    workload = schedule.workload
    needed = sum(
        params * workload.bytes.weight + state_bytes(schedule.model, workload, i, params)
        for i in trained.layers(schedule.model, workload)
        for params in [trained.params(schedule.model, workload, i)]
    )
    if not needed:
        raise CheckpointError(f"{schedule.label} trains nothing that could be saved")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotSaved(f"no checkpoint can be written to {folder}: {error.strerror}") from None
    untried = schedule.staleness if apart <= schedule.staleness else 0
    at_once = min(len(complete) + saves, 2 + untried)
    return needed * max(at_once - len(complete), 0)


def require_apart(folder: Path, saves: Path | None = None) -> None:
    """Raises CheckpointError for a folder that is a checkpoint or in one: whatever is written there does not last.

    So are those in `saves` that have a checkpoint's name: it may come there.
    """
    place, to_come = folder.resolve(), None if saves is None else saves.resolve()
    within = [
        path
        for path in (place, *place.parents)
        if STEP.fullmatch(path.name) and ((path / LAST).is_file() or path.parent == to_come)
    ]
    if within:
        raise CheckpointError(
            f"{folder} is {'' if within[0] == place else 'in '}a checkpoint, which a later save removes with all that "
            f"is in it: take {within[-1].parent}, or another folder"
        )


def drop(folder: Path, step: int) -> Path:
    """Remove the checkpoint of `step`, if there is one: a loss of its weights was not finite. Its folder."""
    target = folder / f"step-{step:08d}"
    with suppress(OSError):
        _remove(target)
    return target


def _remove(path: Path) -> None:
    """Remove a checkpoint, or the link to one; first what makes it one: half removed it is none. Raises OSError."""
    if path.is_symlink():
        path.unlink()
        return
    (path / LAST).unlink(missing_ok=True)
    shutil.rmtree(path)


def is_there(folder: Path) -> bool:
    """Whether `folder` is a checkpoint, or has a complete one in it."""
    return (folder / LAST).is_file() or bool(_complete(folder))


def told(folder: Path | None) -> str:
    """Which checkpoint in `folder` is kept, as a phrase."""
    complete = [] if folder is None else _complete(folder)
    return f"{complete[-1]} is kept" if complete else "no checkpoint was saved"


def read(folder: Path, schedule: Schedule) -> Checkpoint:
    """The checkpoint that `folder` is, or the newest complete one in it.

    Raises CheckpointError if there is none for this schedule, or a file of it is gone or cut off.
    """
    complete = [folder] if (folder / LAST).is_file() else _complete(folder)
    incomplete = [path for path in _steps(folder) if not (path / LAST).is_file()]
    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}")
    if not complete:
        but = f" but {incomplete[-1].name}, which is incomplete: its save was interrupted" if incomplete else ""
        raise CheckpointError(f"there is no checkpoint in {folder}{but}")
    last, older = complete[-1] / LAST, complete[-2] if complete[1:] else None

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{last} is damaged: {what}{_hint(older)}")

    with _readable(last, older):
        found = json.loads(last.read_text())
    if not isinstance(found, dict):
        raise damaged("it holds no JSON object")
    for key, now in _of(schedule).items():
        if (was := found.get(key)) != now:
            raise CheckpointError(f"{complete[-1]} {_differs(key, was, now, schedule)}")
    step, frozen, began = found.get("step"), found.get("frozen") or {}, found.get("began")
    if not (type(step) is int and step >= 0 and isinstance(frozen, dict)):
        raise damaged(f"its step is {step!r}, what is frozen {frozen!r}")
    if STEP.fullmatch(complete[-1].name) and _step(complete[-1]) != step:
        raise damaged(f"its step is {step}, and its folder's another")
    if not isinstance(began, str | None):
        raise damaged(f"it began with {began!r}")
    checksums = found.get("checksums")
    # an evaluation, which trains nothing, takes what a training saved
    layers = trained.layers(schedule.model, replace(schedule.workload, task="train", quantised=None))
    names = [schedule.model.layer_name(i) for i in layers]
    if not (isinstance(checksums, dict) and all(_are_checksums(checksums.get(name)) for name in names)):
        raise damaged("it lacks checksums")
    own = found.pop("own_checksum", None)
    if own is not None and own != _checksum_of(found):  # older files have none
        raise damaged("it is not as it was saved")
    for i in layers:
        path = _file(complete[-1], schedule.model, i)
        with _readable(path, older), safetensors.safe_open(path, framework="pt"):
            pass  # its header, and that it is as long as that says
    settings = found.get("settings")
    return Checkpoint(
        folder=complete[-1],
        model=schedule.model,
        workload=schedule.workload,
        step=step,
        checksums=checksums,
        frozen=frozen,
        began=None if began is None else Path(began),
        settings=settings if isinstance(settings, dict) else {},
        skipped=[path for path in incomplete if path > complete[-1]],
        older=older,
    )


@contextmanager
def _readable(path: Path, older: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}{_hint(older)}") from None


def _hint(older: Path | None) -> str:
    return "" if older is None else f"; {older} is older, and may be whole: resume from it"


def _checksum_of(about: Mapping[str, object]) -> int:
    """The CRC-32 of what LAST says, as JSON with sorted keys."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _are_checksums(found: object) -> bool:
    return isinstance(found, dict) and all(type(found.get(part)) is int for part in ("weights", "state"))


def other_settings(resumed: Checkpoint, now: Mapping[str, object]) -> str:
    """What the checkpoint was trained with and this run is not, in words; empty if nothing."""
    was = {name: resumed.settings.get(name, value) for name, value in now.items()}
    differing = [name for name, value in now.items() if was[name] != value]
    before, after = (
        ", ".join(f"no {name}" if of[name] is None else f"{name} {of[name]}" for name in differing) for of in (was, now)
    )
    return f"{resumed.folder} was trained with {before}; this run goes on with {after}" if differing else ""


def require_frozen(resumed: Checkpoint, frozen: Mapping[str, int]) -> None:
    """Raises CheckpointError unless the frozen weights are those that the checkpoint's adapters were trained beside."""
    other = [layer for layer, known_by in frozen.items() if resumed.frozen.get(layer) != known_by]
    if other:
        raise CheckpointError(
            f"{resumed.folder} has adapters that were trained beside other weights: those of layer {other[0]}"
            f"{f' and {len(other) - 1} more' if other[1:] else ''} differ; give the --weights, or where there were "
            "none the --seed, that the training began with"
        )


def _of(schedule: Schedule) -> dict[str, Any]:
    """What a schedule must have in common with another to go on from its checkpoint."""
    workload = schedule.workload
    return {
        "format": FORMAT,
        "model": {key: value for key, value in schedule.model.to_dict().items() if key != "name"},
        "precision": workload.precision,
        "optimizer": None if workload.optimizer == ADAMW else workload.optimizer,  # as files before there were others
        "lora_rank": workload.lora_rank,
        "quantised": workload.quantised if workload.lora_rank is not None else None,
    }


def _differs(key: str, was: Any, now: Any, schedule: Schedule) -> str:
    """Why a checkpoint is of no use to a schedule, as what is said of it: `was` is its value of a key of `_of`."""
    if key == "format":
        return f"has the format {was!r}; this version reads {now}"
    if key == "lora_rank":
        does = "evaluates" if schedule.workload.task == "evaluate" else "trains"
        how = "; --export its adapters with a policy that trains them, and add these with --adapters"
        said = f"is of another training: it has {_trained(was)}, the schedule {does} {_trained(now)}"
        return said + (how if now is None else "")
    if key == "quantised":
        kept = [f"quantised={of}" if of else "whole" for of in (was, now)]
        return f"has adapters that were trained beside weights that were {kept[0]}, the schedule's are {kept[1]}"
    if key == "optimizer":
        of = was or ADAMW
        return (
            f"has the state of {of}, the schedule's optimizer is {schedule.workload.optimizer}: give --optimizer {of}"
        )
    said = f"is of another training: its {key} is {_short(key, was, now)}, the schedule's {_short(key, now, was)}"
    return said + (_remedy(was, schedule) if key == "precision" else "")


def _remedy(precision: object, schedule: Schedule) -> str:
    """What makes a schedule of the checkpoint's precision; policies may keep more state than they are asked for."""
    if schedule.workload.precision != "bf16_fp32":
        return f"; give --precision {precision}"
    if schedule.knobs.get("master") == "fp32":
        return f"; {schedule.policy} adds an fp32 master by itself: give --precision {precision} --knob master=weights"
    return f"; give --precision {precision}, and a policy that does not add an fp32 master by itself"


def _trained(lora_rank: object) -> str:
    return "all weights" if lora_rank is None else f"adapters of rank {lora_rank}"


def _short(key: str, value: object, other: object) -> str:
    """A value of a key of `_of` in few words: what tells it from the other."""
    if key != "model" or not isinstance(value, dict):
        return repr(value)
    size = ("num_hidden_layers", "hidden_size")
    if not isinstance(other, dict) or any(value.get(name) != other.get(name) for name in size):
        return f"one of {value.get('num_hidden_layers')} blocks {value.get('hidden_size')} wide"
    differing = sorted(name for name in value.keys() | other.keys() if value.get(name) != other.get(name))
    return f"one with {', '.join(f'{name} {value.get(name)}' for name in differing)}"


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest last."""
    return [path for path in _steps(folder) if (path / LAST).is_file()]


def _steps(folder: Path) -> list[Path]:
    """Checkpoints, complete or not, the newest last. What else lies beside them is not ours to remove."""
    return sorted(filter(_is_ours, _named_so(folder)), key=_step)


def _named_so(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if STEP.fullmatch(path.name) and path.is_dir()]


def _is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint, or holds nothing but files of an interrupted save.

    Other trainers name their folders in the same way.
    """
    return (path / LAST).is_file() or all(OF_A_SAVE.fullmatch(file.name) for file in path.iterdir())


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _file(folder: Path, model: ModelSpec, i: int) -> Path:
    return folder / f"{model.layer_name(i)}.safetensors"

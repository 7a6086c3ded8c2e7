"""The options that commands share, and what they mean."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedules.errors import InputError
from schedules.file_kinds import SCHEDULE, kind_of_file
from schedules.workload import ADAMW, PRECISIONS, RECOMPUTED

if TYPE_CHECKING:
    from schedules.model import ModelSpec
    from schedules.schedule import Schedule
    from schedules.trace import Trace
    from schedules.workload import MemoryBudget, Workload
    from sim.machine import HardwareProfile

Target = Annotated[str, typer.Argument(help="A model's name, its config.json, or a schedule file.", show_default=False)]
Model = Annotated[str, typer.Argument(help="A model's name, or its config.json.", show_default=False)]
Policy = Annotated[
    str, typer.Option("--policy", "-p", help='A policy\'s name, with any knobs: "streamed slots=3"; or your own file.')
]
Hardware = Annotated[str, typer.Option("--hardware", "-H", "--profile", help="A machine's name, or a profile file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a number: host.memory=256GiB. Repeatable.")]
Knob = Annotated[list[str] | None, typer.Option("--knob", "-k", help="Set a policy's knob: slots=3. Repeatable.")]
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences per micro-batch.")]
Accumulation = Annotated[int, typer.Option("--accumulation", "-a", min=1, help="Micro-batches per step.")]
Seq = Annotated[int, typer.Option("--seq", "-s", min=1, help="Tokens per sequence.")]
Tokens = Annotated[int, typer.Option("--tokens", "-t", min=1, help="Tokens per step.")]
Precision = Annotated[str, typer.Option("--precision", help=", ".join(PRECISIONS))]
Optimizer = Annotated[
    str, typer.Option("--optimizer", help="adamw; or muon for blocks' matrices, which is computed on the GPU.")
]
Clip = Annotated[float | None, typer.Option("--clip", help="Clip gradients to this global norm.")]
Recompute = Annotated[
    str,
    typer.Option("--recompute", help=f"What blocks recompute in backward, keeping the rest: {', '.join(RECOMPUTED)}."),
]
BestBatch = Annotated[
    int | None, typer.Option("--batch", "-b", min=1, help="Sequences per micro-batch; the best if left out.")
]
BestAccumulation = Annotated[
    int | None, typer.Option("--accumulation", "-a", min=1, help="Micro-batches per step; the best if left out.")
]
Matmul = Annotated[
    str | None, typer.Option("--matmul", help="fp8: blocks multiply in 8 bits, which needs a GPU that does.")
]
Models = Annotated[
    list[str] | None, typer.Argument(help="Models by name or config.json; several: a,b.", show_default=False)
]
ModelsToo = Annotated[
    list[str] | None, typer.Option("--models", "--model", "-m", help="The same as an option. Repeatable.")
]
Backend = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
ScheduleOut = Annotated[Path | None, typer.Option("--out", "-o", help="Write the schedule file here.")]
ScheduleFile = Annotated[Path, typer.Argument(help="A schedule file.", show_default=False)]
ResumedOut = Annotated[Path, typer.Option("--out", "-o", help="Folder for results; rerun the same command to resume.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

# what makes a schedule
STEP = ("policy", "batch", "accumulation", "seq", "precision", "optimizer", "clip", "recompute", "matmul", "knob")


def workload_of(
    batch: int,
    accumulation: int,
    seq: int,
    precision: str,
    clip: float | None,
    recompute: str = "none",
    optimizer: str = ADAMW,
    matmul: str | None = None,
) -> Workload:
    from schedules.workload import Workload

    if clip is not None and not 0 < clip < math.inf:
        raise InputError(f"--clip {clip}: give a number above 0 that is not infinite")
    try:
        return Workload(
            micro_batch_size=batch,
            accumulation=accumulation,
            seq_len=seq,
            precision=precision,
            optimizer=optimizer,
            grad_clip=clip,
            recompute=recompute,
            matmul=matmul,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def machine_of(hardware: str, changes: list[str] | None) -> HardwareProfile:
    """A machine with numbers changed, which its name tells wherever it is told: "rtx3090 with host.memory=100GiB".

    Says so on stderr where ops were measured whose times a number does not change.
    """
    from sim.hardware import changed, load

    machine = load(hardware)
    other = changed(machine, changes or [])
    note_idle(machine.name, other, [change.partition("=")[0].strip() for change in changes or []])
    return other


def note_idle(name: str, machine: HardwareProfile, paths: Sequence[str]) -> None:
    """Say so where numbers at these paths were changed and are not what times of this machine come from."""
    from sim.machine import THREADS, TIMED, lookup

    if machine.measured is not None and (idle := [path for path in TIMED if path in paths]):
        told = f"note: the ops of {name} were measured, and take as long whatever {' and '.join(idle)} may be"
        print(told, file=sys.stderr)
    if "host.cores" in paths and not any(lookup(machine, path) for path in THREADS):
        told = f"note: nothing says how many cores an op of {name} occupies, so host.cores changes no time"
        print(f"{told}; give {', '.join(THREADS)}", file=sys.stderr)


def is_schedule(target: str) -> bool:
    path = Path(target)
    return path.is_file() and kind_of_file(path) == SCHEDULE


def require_left_to_file(target: str, context: typer.Context, fixed: Sequence[str] = STEP) -> None:
    """Raises InputError where the target is a file, and options say what a file itself says: those in `fixed`."""
    if is_schedule(target) and (too := given(context, fixed)):
        raise InputError(f"the file {target} is a whole step: leave out {', '.join(too)}, or name a model")


def schedule_of(
    target: str,
    policy: str,
    knobs: list[str] | None,
    workload: Workload,
    budget: MemoryBudget,
    context: typer.Context,
    fixed: Sequence[str] = STEP,
) -> Schedule:
    """A schedule from its file, or built by a policy for a model; raises as `require_left_to_file` does."""
    from schedules import policies, presets

    require_left_to_file(target, context, fixed)
    if is_schedule(target):
        schedule = schedule_to_prove(Path(target))
    else:
        name, chosen = policies.with_knobs(policy, knobs or [])
        schedule = policies.build(name, presets.load(target), workload, budget, **chosen)
    note_length(schedule.model, schedule.workload.seq_len)
    return schedule


def usual_length(target: str, most: int) -> int:
    """Tokens of a sequence where none are asked for: `most`, or what the model is trained with where that is less."""
    from schedules import presets

    if is_schedule(target):
        return most
    model = presets.load(target)
    return min(most, model.max_position_embeddings, model.longest_sequence or most)


def note_length(model: ModelSpec, seq_len: int) -> None:
    """Say so where sequences are longer than the model was made for; nothing stops them."""
    if seq_len > model.max_position_embeddings:
        print(
            f"note: sequences of {seq_len:,} tokens, and {model.name} was made for {model.max_position_embeddings:,}",
            file=sys.stderr,
        )


def note_peak(machine: HardwareProfile, workload: Workload, utilisation: float) -> None:
    """Say so where MFU or HFU, the higher of which is `utilisation`, is above one: the peak they are of is too low.

    Not of a step whose blocks multiply in fewer bits, faster than the peak that these refer to.
    """
    from sim.cost import peak_flops
    from sim.units import scaled

    if utilisation > 1 and workload.matmul is None:
        peak = scaled(peak_flops(machine, workload), "TFLOP/s")
        print(
            f"note: MFU or HFU is above 100 %: the peak of {machine.name}, {peak}, is less than its own ops attain; "
            "if it was read while others used the machine, measure it again",
            file=sys.stderr,
        )


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Of these parameters, as users write them, those that the command line has."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name != "DEFAULT":
            found.append(parameter.opts[0])
    return found


def schedule_to_prove(file: Path) -> Schedule:
    """A schedule from its file. Raises InputError for one that is missing, damaged, or a recording of a run."""
    from schedules import codec

    require_input(file)
    schedule = codec.read(file)
    if schedule.is_recording:
        raise InputError(f"{file} is the recording of a run: it can be drawn and compared, not proven or run")
    return schedule


def schedule_to_show(file: Path) -> Schedule:
    """A schedule, or the recording of a run, from its file: to be drawn, compared or exported. Raises as `verify`."""
    from schedules import codec
    from schedules.verify import verify

    schedule = codec.read(file)
    if not schedule.is_recording:
        verify(schedule)
    elif schedule.waits:
        raise InputError(f"{file} is the recording of a run, and those have no waits")
    return schedule


def trace_of(schedule: Schedule, file: Path) -> Trace:
    """A run of a schedule, from its file. Raises InputError for one that is damaged, or of another schedule."""
    from schedules.trace import Trace, TraceError

    trace = Trace.read(file)
    try:
        trace.check(schedule)
    except TraceError as error:
        raise InputError(f"{file}: {error}") from None
    return trace


def require_input(*files: Path) -> None:
    """Raises InputError unless these can be files; a pipe will do."""
    for file in files:
        if file.is_dir() or not file.exists():
            raise InputError(f"cannot read {file}: {'it is a folder' if file.is_dir() else 'there is no such file'}")


def require_unix() -> None:
    """Raises InputError on Windows, which has other locks, limits and signals: to be asked before they are imported."""
    if sys.platform == "win32":
        raise InputError(
            "training and measuring need Linux or macOS; on Windows run them in WSL 2. All that predicts runs here"
        )


def require_outputs(
    *, files: Sequence[Path | None] = (), folders: Sequence[Path | None] = (), read: Sequence[Path | None] = ()
) -> None:
    """Raises InputError unless all that is given can be written: to be asked before the work, not after it.

    A file that the command line names once more is read as well, or written twice: nothing of it would be left. Nor
    would be of one that is there already in a folder that is `read`.
    """
    from schedules.files import require_file, require_folder

    for file in files:
        if file is not None:
            if _named(file) > 1 and (file.is_file() or not file.exists()):  # no terminal, and no /dev/null
                raise InputError(f"{file} is named twice, and would be written over: give another file to write to")
            if file.exists() and any(of is not None and file.resolve().parent == of.resolve() for of in read):
                raise InputError(f"{file} is of a folder that is read, and would be written over: give another file")
            with _exactly(file, file.parent):
                require_file(file)
    for folder in folders:
        if folder is not None:
            with _exactly(folder, next(there for there in (folder, *folder.absolute().parents) if there.exists())):
                require_folder(folder)


def _named(file: Path) -> int:
    """How many words of the command line are this file, as it is, after `--option=`, among others or before knobs."""
    words = (word.partition("=")[2] if word.startswith("--") and "=" in word else word for word in sys.argv[1:])
    return sum(file.resolve() in {Path(part).resolve() for part in (word, *re.split(r"[\s,]", word))} for word in words)


@contextmanager
def _exactly(path: Path, folder: Path) -> Iterator[None]:
    """Tells "no such folder" from a folder that is there and takes no files, such as those of /proc."""
    try:
        yield
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError) and folder.is_dir():
            raise InputError(f"cannot write {path}: the folder {folder} takes no files") from error
        raise


def listed(names: Sequence[str]) -> list[str]:
    """Names that may come several in a word: "a,b". Raises InputError where words are given and hold none."""
    found = [name.strip() for word in names for name in word.split(",") if name.strip()]
    if names and not found:
        raise InputError(f"no name in {' '.join(map(repr, names))}: leave the option out, or name something")
    return found


def models_of(models: list[str] | None, too: list[str] | None) -> list[ModelSpec]:
    """The models of both spellings, each once. Raises InputError where there are none, or two of one name."""
    from schedules import presets

    asked = listed([*(models or []), *(too or [])])
    if not asked:
        raise InputError("name at least one model; megatrain models lists them")
    found: dict[str, ModelSpec] = {}
    for text in asked:
        spec = presets.load(text)
        if found.setdefault(spec.name, spec) != spec:
            raise InputError(f"two models are called {spec.name}, and could not be told apart: rename a file")
    return list(found.values())


def command_line() -> str:
    """What this process was called with, for a page of results, in UTF-8 whatever the names of files are in."""
    return os.fsencode(shlex.join(["megatrain", *sys.argv[1:]])).decode(errors="backslashreplace")


def print_json(value: Any) -> None:
    """Print JSON as its standard has it, which knows no NaN and no infinity: null stands for them."""
    print(json.dumps(_valid(value), indent=1, default=str))


def _valid(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _valid(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_valid(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shape_of(text: str) -> tuple[int, int]:
    """(micro-batch, sequence) of "2x128". Raises InputError."""
    if not (found := re.fullmatch(r"0*([1-9]\d{0,17})x0*([1-9]\d{0,17})", text)):
        raise InputError(f"{text!r} is no shape; write micro-batch x sequence, as in 2x128")
    return int(found[1]), int(found[2])

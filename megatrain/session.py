"""A whole run on this machine in one call: train by a verified schedule, from nothing to losses and a trace."""

from __future__ import annotations

import functools
import gc
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from megatrain import checkpoint, export, hf
from megatrain.adam import Adam
from megatrain.adapters import folded
from megatrain.checkpoint import Diverged, NotSaved
from megatrain.cpu import CpuEvent
from megatrain.data import ByteText, DataError, TokenSource, read_bytes, shares, standard_library, whole_steps
from megatrain.folder_lock import alone_in
from megatrain.initial import random_adapters, random_parameters
from megatrain.preflight import require_drive, require_memory, require_room
from megatrain.this_machine import backend_of, machine_name
from megatrain.token_file import from_file
from megatrain.train import Debug, OnStep, Trainer, never, unheard
from megatrain.way import PLAINLY, Way
from schedules.errors import InputError, Refused
from schedules.evaluation import evaluation
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import Verified
from schedules.workload import Workload

FileEvent = Literal["skipped", "resumed", "saved", "removed", "exported"]

OWN_SOURCES = "Python's own sources"
TEXT_BYTES = 8_000_000  # of source text; a demonstration sees a fraction of it
DEBUG_DELAY_S = 0.002  # the longest random delay of an op in debug mode


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The loss of every step, of how many tokens that is the mean, and when every op of the last of them ran.

    paused: after how many steps of this run something else was done, a checkpoint saved or a text evaluated.
    held_out: after how many steps in all -> the mean loss of the text that is held out, and of how many tokens.
    """

    losses: list[float]
    learned: list[int]
    trace: Trace
    paused: Collection[int] = ()
    held_out: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def step_ns(self) -> list[int]:
        """From the end of one step to the end of the next, where nothing else was done in between."""
        first = len(self.losses) - self.trace.steps + 2  # `Trace.step_ns` leaves out two: one of warm-up
        periods = enumerate(self.trace.step_ns().tolist(), first)
        return [ns for step, ns in periods if step not in self.paused]


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a training begins with and leaves behind.

    weights: a folder of Hugging Face's with the parameters to begin with; random ones if left out. Not with `resume`,
        unless adapters are trained.
    adapters: a folder of peft's, whose adapters are folded into those parameters. Not with `resume`, and not where
        adapters are trained: these would belong to weights that nobody has.
    tokens: see `megatrain.token_file.from_file`; the standard library's source text, a token per byte, if left out.
    loss_mask: a file beside that of tokens, see `megatrain.token_file.TokenFile`; all are learned if left out.
    held_out: a file as that of tokens, whose loss is told before the first step, after the last and, if given, after
        every `held_out_every`; held_out_mask: its mask.
    resume: a folder of checkpoints, from the newest of which to go on.
    save: a folder for a checkpoint at the end, and `every` so many steps.
    export: a folder for weights, or adapters, as Hugging Face has them, at the end.
    """

    weights: Path | None = None
    adapters: Path | None = None
    tokens: Path | None = None
    loss_mask: Path | None = None
    held_out: Path | None = None
    held_out_mask: Path | None = None
    held_out_every: int | None = None
    resume: Path | None = None
    save: Path | None = None
    every: int | None = None
    export: Path | None = None


def _require_room_for(files: Files, schedule: Schedule, resumed: checkpoint.Checkpoint | None, steps: int) -> None:
    """Raises what `train` does of what it is to write."""
    if files.every is not None and files.save is None:
        raise InputError("--every saves checkpoints on the way: say where to, with --save FOLDER")
    wanted = []
    if files.save is not None and steps:
        every = files.every or steps
        saves, apart = -(-steps // every), min(every, steps % every or every)
        needed = checkpoint.require_folder(files.save, schedule, resumed, saves, apart=apart)
        wanted.append(("to save", files.save, needed))
    if files.export is not None:
        export.require_writable(files.export, schedule.model, schedule.workload)
        wanted.append(("to export", files.export, export.written_bytes(schedule.model, schedule.workload)))
    require_room(wanted)


def train(
    verified: Verified,
    *,
    steps: int,
    hyper: Adam | Callable[[int], Adam],
    seed: int = 0,
    debug: bool = False,
    backend: str | None = "cpu",
    nvme: Path | None = None,
    way: Way = PLAINLY,
    files: Files = Files(),
    on_stage: Callable[[str], None] = unheard,
    on_step: OnStep = unheard,
    on_files: Callable[[FileEvent, Path], None] = unheard,
    on_held_out: Callable[[int, float, int], None] = unheard,
    stop: Callable[[], bool] = never,
) -> Trained:
    """Train so many steps, more of them where `files` say to resume; none where a checkpoint is only to be exported.

    `backend` is as in `backend_of`, `hyper` and `nvme` as in Trainer, and ops are computed in this `way`. `on_stage` is
    told what begins before the first step, the first time when all has been checked, and how far an evaluation is;
    `on_step` is as in Trainer.run; `on_files` is told what happens to a folder, and `on_held_out` the loss of what is
    held out after so many steps, and of how many tokens. Once `stop` says so, the steps under way are finished, a
    checkpoint is saved where `files` say where, and nothing is exported. Where no steps are to be trained, a checkpoint
    is exported as it is: nothing is allocated for that, and no weights or text are read.

    Raises:
        CheckpointError, DataError, WeightsError: a file is missing, or is not of this training; or another training
            is saving to the same folder.
        Diverged: a loss, or what was to be saved, is not finite.
        NotSaved, NotExported: there is no room, or at the end no longer.
        OpFailed: an op failed.
        InputError: what is asked for does not go together, or is not on this machine.
        Refused, TemplateError: this schedule or model cannot be run here, or has no finite loss to begin with.
    """
    adapted = verified.schedule.workload.lora_rank is not None  # adapters are trained beside weights from elsewhere
    if adapted and files.adapters is not None:
        raise InputError(
            "--adapters become part of the weights: take a policy that trains or evaluates all of these; what was "
            "trained beside them goes on with --resume"
        )
    if verified.schedule.workload.quantised is not None and files.adapters is not None:
        raise InputError("--adapters become part of the weights, and would be rounded with them: leave out quantised")
    for option, beginning in (("--weights", files.weights), ("--adapters", files.adapters)):
        if files.resume is not None and beginning is not None and not adapted:
            raise InputError(
                f"--resume goes on with the checkpoint's weights: leave out {option}, or begin anew without it"
            )
    if not steps:
        return _export_as_it_is(verified.schedule, files, on_files)
    with ExitStack() as opened:
        machine = opened.enter_context(closing(backend_of(backend)))
        way.require(on_gpu=machine.device.type == "cuda")
        require_memory(
            verified,
            machine.device,
            begins=files.resume is None or adapted,
            saves=files.save is not None,
            exports=files.export is not None,
        )
        require_drive(verified, nvme)
        schedule = verified.schedule
        model, workload = schedule.model, schedule.workload
        data = _tokens(files, model, workload, seed, steps)
        held_out = _held_out(files, verified)
        initial = random_parameters(model, seed)
        if files.weights is not None:
            initial = _finite(hf.parameters(files.weights, model), model, f"{files.weights} has weights")
        if files.adapters is not None:
            initial = _finite(folded(initial, files.adapters, model), model, f"{files.adapters} makes weights")
        there = files.save is not None and files.save.is_dir()
        if files.save is not None and there:  # before it is looked at: another may be saving to it
            opened.enter_context(alone_in(files.save))
        resumed = checkpoint.read(files.resume, schedule) if files.resume is not None else None
        began = _began(files, resumed)
        _require_room_for(files, schedule, resumed, steps)
        if files.save is not None and not there:
            opened.enter_context(alone_in(files.save))
        of_data = f"{files.tokens.resolve() if files.tokens else OWN_SOURCES} ({data.known_by})"
        settings = functools.partial(_settings, schedule.workload, hyper, seed, of_data)
        if resumed is not None:
            for folder in resumed.skipped:
                on_files("skipped", folder)
            on_files("resumed", resumed.folder)
            if workload.task == "train" and (told := checkpoint.other_settings(resumed, settings(resumed.step - 1))):
                warnings.warn(told, stacklevel=2)
            if schedule.staleness:
                warnings.warn(
                    "the first step computes with weights that are up to date, where a run that was not stopped has "
                    f"them stale by {schedule.staleness}",
                    stacklevel=2,
                )
        trainer = opened.enter_context(
            Trainer(
                verified,
                machine,
                data,
                hyper,
                initial=initial,
                adapters=random_adapters(model, rank, seed) if (rank := workload.lora_rank) is not None else None,
                resume=resumed,
                debug=Debug(poison=debug, delay_s=DEBUG_DELAY_S if debug else 0.0, seed=seed),
                record=True,
                began=began,
                settings=settings,
                nvme=nvme,
                pointwise=way.pointwise,
                prepare=way.prepare,
                on_stage=on_stage,
            )
        )
        on_stage("first step" if way == PLAINLY else "compiling, first step")
        evaluated = None if held_out is None else functools.partial(trainer.evaluate, held_out, on_stage, stop)
        return _train_and_save(trainer, schedule, steps, files, began, evaluated, on_held_out, on_step, on_files, stop)


def _export_as_it_is(schedule: Schedule, files: Files, on_files: Callable[[FileEvent, Path], None]) -> Trained:
    """Export a checkpoint without training. Raises what `train` does of these."""
    if files.resume is None or files.export is None:
        raise InputError("no steps are to be trained: that is for a checkpoint to --resume and --export")
    with ExitStack() as opened:
        if files.save is not None and files.save.is_dir():  # another training may be removing checkpoints there
            opened.enter_context(alone_in(files.save))
        resumed = checkpoint.read(files.resume, schedule)
        for folder in resumed.skipped:
            on_files("skipped", folder)
        on_files("resumed", resumed.folder)
        _require_room_for(files, schedule, resumed, 0)
        began = _began(files, resumed)
        export.write(files.export, schedule.model, schedule.workload, lambda i: resumed.layer(i)[0], began)
        on_files("exported", files.export)
    none = np.empty(0, dtype=np.int64)
    trace = Trace(
        digest=schedule.digest, machine=machine_name(), source="measured", op=none, step=none, issue_ns=none,
        start_ns=none, end_ns=none, waited_on=none,
    )  # fmt: skip
    return Trained(losses=[], learned=[], trace=trace)


def _tokens(files: Files, model: ModelSpec, workload: Workload, seed: int, steps: int) -> TokenSource:
    """What is read in so many steps. Raises DataError."""
    found: TokenSource
    if files.loss_mask is not None and files.tokens is None:
        raise DataError("a loss mask says which tokens of a file are learned: give the file, with --data")
    if files.tokens is not None:
        found = from_file(files.tokens, model.vocab_size, workload, seed, loss_mask=files.loss_mask)
    elif model.vocab_size < ByteText.vocab_size:
        raise DataError(
            f"{model.name} knows {model.vocab_size} tokens, fewer than there are bytes: give a .npy file of its "
            "tokens, with --data"
        )
    elif files.weights is not None and model.vocab_size != ByteText.vocab_size:
        raise DataError(
            f"{files.weights} was trained on tokens, not on bytes of {OWN_SOURCES}: give a .npy file made by its "
            "tokenizer, with --data, as docs/training.md shows"
        )
    else:
        found = ByteText(text=read_bytes(standard_library(), TEXT_BYTES), workload=workload, seed=seed)
    of_a_step = workload.accumulation * workload.micro_batch_size
    if workload.task == "evaluate" and found.sequences is not None and steps * of_a_step > found.sequences:
        raise DataError(
            f"there are {found.sequences:,} sequences of {workload.seq_len:,} tokens, and {steps:,} steps would read "
            f"some again: evaluate up to {found.sequences // of_a_step:,} steps of {of_a_step:,}"
        )
    return found


def _held_out(files: Files, verified: Verified) -> TokenSource | None:
    """The text that is evaluated between steps. Raises DataError, InputError, and Refused as `evaluation` does."""
    if files.held_out is None:
        if files.held_out_mask is not None or files.held_out_every is not None:
            raise InputError("what is held out is a file of tokens: give it, with --held-out")
        return None
    model, workload = verified.schedule.model, verified.schedule.workload
    if workload.task == "evaluate":
        raise InputError("--held-out is evaluated while something is trained: give the text as --data")
    of = evaluation(verified).schedule.workload
    found = from_file(files.held_out, model.vocab_size, of, loss_mask=files.held_out_mask)
    try:
        steps = whole_steps(found, of)
    except DataError as error:
        raise DataError(f"{files.held_out}: {error}") from None
    if not any(shares(found, step, of).any() for step in range(steps)):
        raise DataError(f"{files.held_out_mask} has no token to learn in the {steps:,} whole steps that are evaluated")
    return found


def _finite(source: Callable[[int], Tensor], model: ModelSpec, has: str) -> Callable[[int], Tensor]:
    """`source`, which raises WeightsError where a layer's numbers are not finite: better known now than at a save."""

    def parameters(i: int) -> Tensor:
        found = source(i)
        if not checkpoint.all_finite(found):
            raise hf.WeightsError(
                f"{has} that are not finite numbers, in layer {model.layer_name(i)}: take a copy that is whole"
            )
        return found

    return parameters


def _settings(
    workload: Workload, hyper: Adam | Callable[[int], Adam], seed: int, of_data: str, step: int
) -> dict[str, object]:
    """What a step is trained with, and no schedule or weights tell; in words."""
    adam = hyper if isinstance(hyper, Adam) else hyper(step)
    return {
        "seed": seed,
        "data": of_data,
        "steps of": f"{workload.micro_batch_size * workload.accumulation} x {workload.seq_len} tokens",
        "learning rate": adam.lr,
        "weight decay": adam.weight_decay,
        "betas": list(adam.betas),
        "eps": adam.eps,
        "clipping": workload.grad_clip,
        "products in": workload.matmul or "the activations' format",
    }


def _began(files: Files, resumed: checkpoint.Checkpoint | None) -> Path | None:
    """The folder of the weights that the training began with; warns where an export will lack what lies there."""
    if files.weights is not None or resumed is None or resumed.began is None:
        return files.weights
    if files.export is not None and not resumed.began.is_dir():
        warnings.warn(
            f"{resumed.began}, which the training began with, is gone: the export has no tokenizer", stacklevel=2
        )
    return resumed.began


@contextmanager
def _seldom_collecting_garbage() -> Iterator[Callable[[], None]]:
    """To be told when all that lives on is there: what there is then is not looked through again.

    A full collection of it would hold every thread up for some tenths of a second, once in twenty steps or a hundred.
    """

    def settled() -> None:
        gc.collect()
        gc.freeze()

    try:
        yield settled
    finally:
        gc.unfreeze()


def _train_and_save(
    trainer: Trainer[CpuEvent],
    schedule: Schedule,
    steps: int,
    files: Files,
    began: Path | None,
    evaluated: Callable[[], tuple[float, int] | None] | None,
    on_held_out: Callable[[int, float, int], None],
    on_step: OnStep,
    on_files: Callable[[FileEvent, Path], None],
    stop: Callable[[], bool],
) -> Trained:
    """Train so many steps, and evaluate, save and export on the way. Raises what `train` does of these.

    `evaluated` gives the loss of what is held out, if anything is, or None where it was stopped. A checkpoint on the
    way that cannot be written is told, and the training goes on: its state is sound.
    """
    losses: list[float] = []
    saved: list[int] = []  # the steps after which this run has saved
    paused: set[int] = set()
    found: dict[int, tuple[float, int]] = {}  # the loss of what is held out
    first = trainer.step

    def evaluate() -> None:
        if evaluated is None:
            return
        paused.add(len(losses))
        if (now := evaluated()) is None:
            return
        found[trainer.step] = now
        on_held_out(trainer.step, *now)
        if not math.isfinite(now[0]) and trainer.step > first:
            raise Diverged(f"the loss of what is held out is {now[0]} after step {trainer.step}")

    def told(step: int, loss: float, norm: float | None) -> None:
        if step == first:
            settled()
        on_step(step, loss, norm)
        if math.isfinite(loss):
            return
        if files.save is not None:
            for bad in (after for after in saved if after >= step - schedule.staleness):
                on_files("removed", checkpoint.drop(files.save, bad))
        if schedule.workload.task == "evaluate" or step - first <= schedule.staleness:
            raise Refused(
                f"the loss of step {step + 1} is {loss}, and no step of this run had changed the weights before: "
                "a lower learning rate is of no help; begin with other weights, or an older checkpoint"
            )
        raise Diverged(f"the loss of step {step + 1} is {loss}")

    try:
        with _seldom_collecting_garbage() as settled:
            evaluate()
            while len(losses) < steps and not stop():
                done = len(losses)
                due = [every - done % every for every in (files.every, files.held_out_every) if every]
                losses += trainer.run(min([steps - done, *due]), on_step=told, stop=stop)
                if _is_due(len(losses), files.held_out_every, steps) and not stop():
                    evaluate()
                if (
                    files.save is not None
                    and len(losses) > done
                    and (_is_due(len(losses), files.every, steps) or stop())
                ):
                    paused.add(len(losses))
                    try:
                        on_files("saved", trainer.save(files.save))
                        saved.append(trainer.step)
                    except NotSaved as error:
                        if len(losses) >= steps or stop():
                            raise
                        warnings.warn(f"{error}; the training goes on", stacklevel=2)
        if files.export is not None and not stop():
            export.write(files.export, schedule.model, schedule.workload, trainer.weights, began)
            on_files("exported", files.export)
    except Diverged as error:
        kept = checkpoint.told(files.save)
        raise Diverged(f"{error}: the training has diverged and stops; {kept}; try a lower learning rate") from None
    learned = [trainer.learned[step] for step in range(first, first + len(losses))]
    return Trained(losses=losses, learned=learned, trace=trainer.trace(), paused=paused, held_out=found)


def _is_due(done: int, every: int | None, steps: int) -> bool:
    """Whether what is done `every` so many steps, and at the end, is to be done now."""
    return done == steps or (every is not None and done % every == 0)

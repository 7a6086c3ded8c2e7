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

from megatrain import checkpoint, export
from megatrain.adam import Adam
from megatrain.checkpoint import Diverged, NotSaved
from megatrain.cpu import CpuEvent
from megatrain.float_types import float_type
from megatrain.folder_lock import alone_in
from megatrain.initial import random_adapters
from megatrain.preflight import require_drive, require_memory
from megatrain.this_machine import backend_of, machine_name
from megatrain.train import Debug, OnStep, Trainer, never, unheard
from megatrain.training_files import Files
from megatrain.way import PLAINLY, Way
from schedules.errors import InputError, Refused
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import Verified
from schedules.workload import Workload

FileEvent = Literal["skipped", "resumed", "saved", "removed", "exported"]

DEBUG_DELAY_S = 0.002  # the longest random delay of an op in debug mode


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training has come to.

    losses: of every step.
    learned: over how many tokens each of these is the mean.
    trace: when every op of the last steps ran.
    paused: after how many steps of this run something else was done: a checkpoint saved or a text evaluated.
    held_out: after how many steps in all -> the mean loss of the held-out text, and over how many tokens.
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
    """Train so many steps, on top of those of the checkpoint that `files` may name; with no steps, only export.

    For that, of a checkpoint or of weights and what is folded into them, nothing is allocated and no text read.

    Args:
        hyper, nvme: as in Trainer.
        backend: as in `backend_of`.
        way: how ops are computed.
        on_stage: told what begins before the first step, for the first time once all has been checked, and how far an
            evaluation is.
        on_step: as in Trainer.run.
        on_files: told what happened to a folder.
        on_held_out: told after how many steps a held-out text was evaluated, its loss, and over how many tokens.
        stop: asked before each step. Once it says so, the steps under way are finished, a checkpoint is saved where
            `files` have a folder for it, and nothing is exported.

    Raises:
        CheckpointError, DataError, WeightsError: a file is missing, or is not of this training; or another training
            is saving to the same folder.
        Diverged: a loss, or what was to be saved, is not finite.
        NotSaved, NotExported: there is no room, or at the end no longer.
        OpFailed: an op failed.
        InputError: what is asked for does not go together, or is not on this machine.
        Refused, TemplateError: this schedule or model cannot be run here, or has no finite loss to begin with.
    """
    schedule = verified.schedule
    model, workload = schedule.model, schedule.workload
    files.require_beginning(workload)
    if not steps:
        return _export_as_it_is(schedule, files, on_stage, on_files)
    with ExitStack() as opened:
        machine = opened.enter_context(closing(backend_of(backend)))
        way.require(on_gpu=machine.device.type == "cuda")
        if way.graphs and files.document_end is not None:
            raise InputError("CUDA graphs would go on with the documents of the step that was captured; leave them out")
        require_memory(
            verified,
            machine.device,
            begins=files.resume is None or workload.lora_rank is not None,
            saves=files.save is not None,
            exports=files.export is not None,
        )
        require_drive(verified, nvme)
        data = files.text(model, workload, seed, steps)
        held_out = files.held_out_text(verified)
        initial = files.parameters(model, seed)
        there = files.save is not None and files.save.is_dir()
        if files.save is not None and there:  # before it is looked at: another may be saving to it
            opened.enter_context(alone_in(files.save))
        resumed = checkpoint.read(files.resume, schedule) if files.resume is not None else None
        began = files.began(resumed)
        files.require_room(schedule, resumed, steps)
        if files.save is not None and not there:
            opened.enter_context(alone_in(files.save))
        settings = functools.partial(_settings, workload, hyper, seed, files.told_of(data))
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


def _export_as_it_is(
    schedule: Schedule, files: Files, on_stage: Callable[[str], None], on_files: Callable[[FileEvent, Path], None]
) -> Trained:
    """Export a checkpoint, or weights with adapters folded in, without training. Raises as `train` does."""
    model, workload = schedule.model, schedule.workload
    begins = files.weights is not None and workload.lora_rank is None
    if files.export is None or (files.resume is None and not begins):
        raise InputError(
            "no steps are to be trained: that is to --export a checkpoint, with --resume, or --weights with --adapters "
            "folded in"
        )
    with ExitStack() as opened:
        if files.save is not None and files.save.is_dir():  # another training may be removing checkpoints there
            opened.enter_context(alone_in(files.save))
        source: Callable[[int], Tensor]
        if files.resume is None:
            source, began = files.parameters(model, seed=0), files.weights
        else:
            resumed = checkpoint.read(files.resume, schedule)
            for folder in resumed.skipped:
                on_files("skipped", folder)
            on_files("resumed", resumed.folder)
            source, began = lambda i: resumed.layer(i)[0], files.began(resumed)
        files.require_room(schedule, None, 0)

        def weights(i: int) -> Tensor:
            on_stage(f"exporting layer {model.layers.index(i) + 1} of {len(model.layers)}")
            return source(i).to(float_type(workload.bytes.weight))

        export.write(files.export, model, workload, weights, began)
        on_files("exported", files.export)
    none = np.empty(0, dtype=np.int64)
    trace = Trace(
        digest=schedule.digest, machine=machine_name(), source="measured", op=none, step=none, issue_ns=none,
        start_ns=none, end_ns=none, waited_on=none,
    )  # fmt: skip
    return Trained(losses=[], learned=[], trace=trace)


def _settings(
    workload: Workload, hyper: Adam | Callable[[int], Adam], seed: int, of_data: str, step: int
) -> dict[str, object]:
    """What a step is trained with, in words, as far as neither the schedule nor the weights tell."""
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


@contextmanager
def _seldom_collecting_garbage() -> Iterator[Callable[[], None]]:
    """Gives a function to call once all objects that outlive the steps exist: no collection looks at them from then on.

    Otherwise a full collection would go through them, and hold up every thread for some tenths of a second, every
    twenty to a hundred steps.
    """
    if gc.get_freeze_count():  # the caller's, who would find them let go with ours, and sees to it alone
        yield lambda: None
        return

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
    """Train so many steps, and evaluate, save and export on the way. Raises as `train` does.

    `evaluated`, if a text is held out, gives its loss, or None where that was stopped. A checkpoint on the way that
    cannot be written is told, and the training goes on, since its state is sound.
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
    """Whether what is done `every` so many steps, and at the end, is due now."""
    return done == steps or (every is not None and done % every == 0)

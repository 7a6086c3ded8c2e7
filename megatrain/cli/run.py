"""`megatrain run`."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatrain.cli.bars import progress_bar
from megatrain.cli.options import (
    Accumulation,
    Backend,
    Batch,
    Clip,
    Json,
    Knob,
    Matmul,
    Optimizer,
    Policy,
    Precision,
    Recompute,
    Target,
    machine_of,
    print_json,
    require_left_to_file,
    require_outputs,
    require_unix,
    schedule_of,
    usual_length,
    workload_of,
)
from megatrain.cli.training_progress import TrainingProgress
from schedules.errors import InputError, Refused

if TYPE_CHECKING:
    from megatrain.adam import Adam
    from megatrain.session import FileEvent, Trained
    from megatrain.training_files import Files
    from megatrain.way import Way
    from schedules.schedule import Schedule
    from schedules.workload import Workload
    from sim.prediction import Prediction

USUAL_STEPS = 20
LARGE = 700.0  # of a loss, whose exponential is no number any more
SHORT = 8192  # tokens of a micro-batch, up to which a GPU waits for launches (docs/gpu.md)
HAPPENED = {"resumed": "resumed from", "skipped": "skipped, since its save was interrupted:"}  # where the word is short


def run(
    context: typer.Context,
    target: Target,
    policy: Policy = "streamed",
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            "-H",
            "--profile",
            help="A machine to predict the run for, and whose memory to fill: a profile of this one, or a name. "
            "Without it this machine's memory is filled, and nothing predicted.",
        ),
    ] = None,
    batch: Batch = 4,
    accumulation: Accumulation = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq",
            "-s",
            min=1,
            help="Tokens per sequence; if left out 256, or what the model was made for where that is less.",
        ),
    ] = None,
    precision: Precision = "fp32",
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
    clip: Clip = None,
    recompute: Recompute = "none",
    knob: Knob = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps to train, 20 if left out; with --resume, this many more: 0 to --export a checkpoint as it is, "
            "or --weights with --adapters folded in.",
        ),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="In place of --steps: train until so many are done, the resumed included.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up to --lr.")] = 0,
    decay_until: Annotated[
        int | None, typer.Option(help="Cosine decay of the learning rate, which ends after so many steps at --min-lr.")
    ] = None,
    min_lr: Annotated[float, typer.Option(help="Where the decay ends.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay, for matrices only.")] = 0.0,
    beta1: Annotated[float, typer.Option(help="AdamW's decay of the first moment.")] = 0.9,
    beta2: Annotated[float, typer.Option(help="AdamW's decay of the second moment.")] = 0.95,
    eps: Annotated[float, typer.Option(help="What AdamW adds to the root of the second moment.")] = 1e-8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed of initial weights and data order.")] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="Start from the weights in this Hugging Face folder; random if left out.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Add the adapters in this folder of peft's to the weights that it starts from.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A .npy file of token ids: running text, or a sequence a row. Or a .txt if the model reads bytes; "
            "Python's own sources if left out."
        ),
    ] = None,
    loss_mask: Annotated[
        Path | None,
        typer.Option(help="A .npy file as --data's, of ones where a token is to be learned and zeros where it is not."),
    ] = None,
    document_end: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The token id that ends a document: no token attends to another document's, or is predicted from it.",
        ),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="A file as --data's that is not trained on: its loss is told before, between and after."),
    ] = None,
    held_out_mask: Annotated[Path | None, typer.Option(help="Its mask, as --loss-mask.")] = None,
    held_out_every: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate it every N steps, too, not only before the first and after the last."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue from this checkpoint, or the newest in a folder. With the same folder to --save to, begin "
            "there if it has none."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write a checkpoint to this folder at the end.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Also save every N steps.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="At the end, write the weights or adapters in Hugging Face format.")
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(help="Refuse a schedule whose fingerprint, as `verify` tells it, does not start with this."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Poison free buffers and delay streams at random.")] = False,
    backend: Backend = None,
    nvme: Annotated[Path | None, typer.Option(help="A folder on the drive, for what the schedule keeps there.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Compile norms, rotations, gates and the loss.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Replay blocks as CUDA graphs.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the measured trace here.")] = None,
    log: Annotated[Path | None, typer.Option(help="Append a JSON line per step: loss, lr, norm, seconds.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a schedule and train with it on this machine."""
    require_unix()
    from megatrain.cli.interrupt import Interrupt
    from megatrain.this_machine import backend_of, has_gpu, machine_here
    from schedules.verify import verify
    from sim.cost import MissingCost
    from sim.prediction import memory_of, predict

    require_outputs(files=[trace, log], folders=[save, export], read=[weights, adapters])
    profile = machine_of(hardware, None) if hardware else None
    budget = memory_of(profile) if profile else machine_here(partial(backend_of, backend), nvme).budget
    require_left_to_file(target, context)  # before a step is made of them, with defaults that are not the file's
    length = usual_length(target, 256) if seq is None else seq
    workload = workload_of(batch, accumulation, length, precision, clip, recompute, optimizer, matmul)
    schedule = schedule_of(target, policy, knob, workload, budget, context)
    if expect is not None and not re.fullmatch(r"[0-9a-f]{8,64}", expect):
        raise InputError(f"--expect takes the first 8 or more of a fingerprint's hexadecimal digits, not {expect!r}")
    if expect is not None and not (found := schedule.fingerprint).startswith(expect):
        raise Refused(
            f"the schedule's fingerprint is {found[:8]}, not {expect}: its ops, model, workload or staleness are not "
            "those of the one you verified"
        )
    verified = verify(schedule)
    try:  # a profile may lack this schedule's ops, which is better told before the training than after it
        predicted = {} if profile is None else _predicted(predict(schedule, profile, budget))
    except MissingCost as error:
        raise InputError(f"{error}; to train without a prediction leave out --hardware") from None

    from megatrain import checkpoint
    from megatrain.neighbours import Neighbours
    from megatrain.session import train
    from megatrain.training_files import Files
    from megatrain.way import Way, measured_in

    if min_lr and decay_until is None:
        raise InputError("--min-lr is where a decay ends: say when, with --decay-until")
    hyper = _hyper(lr, weight_decay, (beta1, beta2), eps, warmup, decay_until, min_lr)
    asked = Files(
        weights=weights,
        adapters=adapters,
        tokens=data,
        loss_mask=loss_mask,
        document_end=document_end,
        held_out=held_out,
        held_out_mask=held_out_mask,
        held_out_every=held_out_every,
        resume=resume,
        save=save,
        every=every,
        export=export,
    )
    files = _files(asked, schedule)
    steps = _steps(steps, until, files, schedule)
    if until is not None and not steps and (export is None or _is_exported(export, files, schedule)):
        there = "" if export is None else f", and {export} its weights"
        print(f"{files.resume} has {until} steps or more{there}: nothing is left to train", file=sys.stderr)
        if as_json:
            print_json({**schedule.describe(), "losses": []})
        return
    way, timed = Way(fused=fused, graphs=graphs), measured_in(profile) if profile else None
    if timed not in (str(way), None):
        print(f"note: {hardware} has times of {timed} ops, and this run computes {way} ones", file=sys.stderr)
    if not steps and files.held_out is not None:
        print("note: nothing is trained, and what is held out is not evaluated", file=sys.stderr)
    if steps:
        on_gpu = backend != "cpu" and has_gpu()
        noted = _notes(schedule.workload, way, on_gpu=on_gpu, documents=document_end is not None)
        for note in (*noted, *_unread(target, schedule, files)):
            print(f"note: {note}", file=sys.stderr)
    happened: dict[str, str] = {}
    evaluates = schedule.workload.task == "evaluate"
    trained, neighbours = False, None
    with ExitStack() as hearing:
        try:
            with progress_bar(left=False) as bar:
                progress = TrainingProgress(bar, steps, schedule.workload.tokens_per_step, log)

                def on_files(event: FileEvent, folder: Path) -> None:
                    happened[event] = str(folder)
                    progress.say(f"{HAPPENED.get(event, event)} {folder}")

                def on_step(step: int, loss: float, norm: float | None) -> None:
                    nonlocal neighbours  # not before: processes of its own may have compiled for the first step
                    neighbours = neighbours or Neighbours()
                    first = not progress.losses
                    if (
                        decay_until is not None
                        and not min_lr
                        and (step == decay_until or (first and step > decay_until))
                    ):
                        progress.say(f"note: the learning rate is 0 since step {decay_until}, see --decay-until")
                    progress.trained(step, loss, None if evaluates else hyper(step).lr, norm)

                def interrupted() -> typer.Exit:
                    progress.say(f"megatrain: interrupted {progress.reached()}; {checkpoint.told(save)}")
                    return typer.Exit(130)

                interrupt = hearing.enter_context(
                    Interrupt(useful=lambda: save is not None and bool(progress.losses) and not trained)
                )
                with _left_by(interrupted):
                    result = train(
                        verified,
                        steps=steps,
                        hyper=hyper,
                        seed=seed,
                        debug=debug,
                        backend=backend,
                        nvme=nvme,
                        way=way,
                        files=files,
                        on_stage=progress.stage,
                        on_step=on_step,
                        on_files=on_files,
                        on_held_out=progress.held_out,
                        stop=lambda: interrupt.asked,
                    )
                    trained = True
            if neighbours is not None and not interrupt.asked and (told := neighbours.told()):
                print(f"note: {told}: it may be faster when the machine is quiet", file=sys.stderr)
            with _left_by(interrupted):
                # only now: a bar on a terminal takes what is printed meanwhile to stderr
                _answer(schedule, result, happened | predicted, trace, as_json=as_json)
        except Refused as error:  # it diverges, or there is no room
            if as_json:
                evaluated = {"held_out": progress.evaluated} if progress.evaluated else {}
                print_json(
                    {**schedule.describe(), "losses": progress.losses, **evaluated, **happened, "reason": str(error)}
                )
            raise
        if interrupt.asked:
            raise interrupted()


def _notes(workload: Workload, way: Way, *, on_gpu: bool, documents: bool) -> Iterator[str]:
    """What a user may not expect of these options."""
    short = workload.tokens_per_microbatch <= SHORT and not documents  # which graphs do not go with
    if on_gpu and short and not (way.fused and way.graphs):
        yield (
            f"micro-batches of {workload.tokens_per_microbatch:,} tokens may wait for launches: --fused --graphs make "
            "fewer of them"
        )
    elif on_gpu and not way.fused:
        yield "--fused compiles what lies between matrix products, for up to a quarter less time a step (docs/gpu.md)"


def _unread(target: str, schedule: Schedule, files: Files) -> Iterator[str]:
    """That what stands to be read is not: weights beside the model, text that is the model's."""
    from megatrain.data import ByteText

    workload, model = schedule.workload, schedule.model
    folder = Path(target).parent if Path(target).name == "config.json" else Path(target)
    if files.weights is None and files.resume is None:
        if any(folder.glob("*.safetensors")):
            yield f"the weights in {folder} are not read: give --weights {folder} to begin with them"
        elif workload.task == "evaluate":
            yield "these are random weights that are evaluated: give --weights, or --resume with a checkpoint"
        elif workload.lora_rank is not None:
            yield "adapters are trained beside random weights: give those of a model with --weights"
        elif files.adapters is not None:
            yield "adapters are added to random weights: give those that they belong to with --weights"
    if workload.trains == "nothing" and workload.lora_rank is not None and files.resume is None:
        yield "no checkpoint's adapters are evaluated, but some that change nothing: give it with --resume"
    if files.tokens is None and model.vocab_size != ByteText.vocab_size:
        yield (
            f"without --data Python's own sources are read, byte by byte, whatever the {model.vocab_size:,} tokens of "
            f"{model.name} mean: enough to see how fast it trains"
        )


def _files(files: Files, schedule: Schedule) -> Files:
    """The same, where a training that is to go on in the folder that it saves to has yet to begin, or has begun."""
    from megatrain import checkpoint

    if files.resume is None or files.save is None or files.resume.resolve() != files.save.resolve():
        return files
    if not checkpoint.is_there(files.resume):
        print(f"note: there is no checkpoint in {files.resume} yet: the training begins", file=sys.stderr)
        return replace(files, resume=None)
    return files if schedule.workload.lora_rank is not None else replace(files, weights=None, adapters=None)


def _is_exported(folder: Path, files: Files, schedule: Schedule) -> bool:
    """Whether the weights in a folder are those of the checkpoint to resume from."""
    from megatrain import checkpoint, export

    assert files.resume is not None  # or steps were left to train
    return export.is_of(folder, schedule.model, schedule.workload, checkpoint.read(files.resume, schedule).checksums)


def _steps(steps: int | None, until: int | None, files: Files, schedule: Schedule) -> int:
    """How many are to be trained now. Raises InputError, CheckpointError."""
    from megatrain import checkpoint

    if until is None:
        return USUAL_STEPS if steps is None else steps
    if steps is not None:
        raise InputError("--steps says how many more, --until how many in all: give one of them")
    if schedule.workload.task == "evaluate":
        raise InputError("--until counts a checkpoint's steps, an evaluation begins anew: say how many with --steps")
    done = checkpoint.read(files.resume, schedule).step if files.resume is not None else 0
    return max(until - done, 0)


@contextmanager
def _left_by(interrupted: Callable[[], typer.Exit]) -> Iterator[None]:
    """Whoever interrupts what is done within is told how far it came."""
    try:
        yield
    except KeyboardInterrupt:
        raise interrupted() from None


def _hyper(
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    warmup: int,
    until: int | None,
    least: float,
) -> Callable[[int], Adam]:
    from megatrain.adam import Adam
    from megatrain.learning_rate import by_step

    for name, value in (("--lr", lr), ("--min-lr", least), ("--weight-decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} {value}: give a number from 0 up that is not infinite")
    if not 0 < eps < math.inf:  # what has no gradient has no moments: 0 / 0
        raise InputError(f"--eps {eps}: give a number above 0 that is not infinite")
    for name, value in zip(("--beta1", "--beta2"), betas, strict=True):
        if not 0 <= value < 1:
            raise InputError(f"{name} {value}: give a number from 0 up and below 1")
    try:
        adam = Adam(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        return by_step(adam, warmup=warmup, until=until, least=least)
    except ValueError as error:
        raise InputError(str(error)) from None


def _answer(schedule: Schedule, result: Trained, more: dict[str, Any], trace: Path | None, *, as_json: bool) -> None:
    """Keep the trace, and print what the run found, with `more`, whether or not the trace could be kept."""
    record = _record(schedule, result) | more
    try:
        if trace is not None:
            result.trace.save(trace)
    finally:
        if as_json:
            print_json(record)
        else:
            for line in _told(schedule, record):
                print(line)


def _record(schedule: Schedule, result: Trained) -> dict[str, Any]:
    """What a run found, for programs."""
    record: dict[str, Any] = {**schedule.describe(), "losses": result.losses, "machine": result.trace.machine}
    if len(result.losses) > 2 and result.step_ns:
        record["measured_step_s"] = statistics.median(result.step_ns) / 1e9
        record["measured_tokens_per_s"] = schedule.workload.tokens_per_step / record["measured_step_s"]
    if schedule.workload.task == "evaluate" and result.losses:
        record["mean_loss"] = statistics.fmean(result.losses, result.learned) if any(result.learned) else None
        record["tokens"] = sum(result.learned)
    elif sum(result.learned) < (read := schedule.workload.tokens_per_step * len(result.losses)):
        record["learned_of_tokens"] = sum(result.learned) / read
    if result.held_out:
        record["held_out"] = [
            {"after_step": step, "loss": loss, "tokens": tokens} for step, (loss, tokens) in result.held_out.items()
        ]
    return record


def _predicted(prediction: Prediction) -> dict[str, Any]:
    """What was to be expected, and of which machine: the run may be on another."""
    profile = prediction.profile
    return {
        "predicted_step_s": prediction.period_ns / 1e9,
        "predicted_machine": profile.name,
        "predicted_profile": profile.mode,
    }


def _told(schedule: Schedule, record: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    label = f"{schedule.label}, digest {schedule.short_digest}"
    if "mean_loss" in record and not record["tokens"]:
        yield f"{label}: no loss, since none of the tokens that were read is to be learned"
    elif "mean_loss" in record:
        loss, tokens = record["mean_loss"], record["tokens"]
        perplexity = math.exp(loss) if loss < LARGE else math.inf
        yield f"{label}: loss {loss:.4f}, perplexity {perplexity:,.2f}, over {tokens:,} tokens"
    elif record["losses"]:
        yield f"{label}: loss {record['losses'][0]:.3f} -> {record['losses'][-1]:.3f}"
    if held_out := record.get("held_out"):
        told = " -> ".join(f"{each['loss']:.4f}" for each in (held_out[0], held_out[-1]))
        yield f"held out: loss {told}, over {held_out[0]['tokens']:,} tokens"
    if "measured_step_s" in record:
        rate = record["measured_tokens_per_s"]
        learned = f", {record['learned_of_tokens']:.1%} of them learned" if "learned_of_tokens" in record else ""
        yield f"measured {record['measured_step_s'] * 1e3:,.1f} ms a step, {rate:,.0f} tokens/s{learned}"
    if "predicted_step_s" in record:
        machine = f"{record['predicted_machine']} ({record['predicted_profile']} profile)"
        yield f"predicted {record['predicted_step_s'] * 1e3:,.1f} ms a step on {machine}"

"""`megatrain run`."""

from __future__ import annotations

import math
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatrain.cli.options import (
    Accumulation,
    Batch,
    Clip,
    Json,
    Knob,
    Policy,
    Precision,
    Recompute,
    Seq,
    Target,
    machine_of,
    print_json,
    progress_bar,
    require_outputs,
    schedule_of,
    workload_of,
)
from schedules.errors import InputError, Refused

if TYPE_CHECKING:
    from megatrain.session import Trained
    from schedules.schedule import Schedule
    from sim.prediction import Prediction

PACED = 5  # losses from which a pace is told: the first ones come together, since steps are issued ahead


def run(
    context: typer.Context,
    target: Target,
    policy: Policy = "streamed",
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", "-H", "--profile", help="A machine to predict the run for: a profile of this one, or a name."
        ),
    ] = None,
    batch: Batch = 4,
    accumulation: Accumulation = 1,
    seq: Seq = 256,
    precision: Precision = "fp32",
    clip: Clip = None,
    recompute: Recompute = "none",
    knob: Knob = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train; with --resume, this many more.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up to --lr.")] = 0,
    decay_until: Annotated[
        int | None, typer.Option(help="Cosine decay; the learning rate reaches zero at this step.")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="AdamW weight decay, for matrices only.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed of initial weights and data order.")] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="Start from the weights in this Hugging Face folder; random if left out.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A .npy file of token ids; Python's own source files if left out.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue from this checkpoint, or the newest in a folder.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write a checkpoint to this folder at the end.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Also save every N steps.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="At the end, write the weights or adapters in Hugging Face format.")
    ] = None,
    expect: Annotated[str | None, typer.Option(help="Refuse a schedule whose digest does not start with this.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Poison free buffers and delay streams at random.")] = False,
    backend: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    nvme: Annotated[Path | None, typer.Option(help="A folder on the drive, for what the schedule keeps there.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Compile norms, rotations, gates and the loss.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Replay blocks as CUDA graphs.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the measured trace here.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a schedule and train with it on this machine."""
    from schedules.verify import verify
    from schedules.workload import MemoryBudget
    from sim.prediction import memory_of, predict

    require_outputs(files=[trace], folders=[save, export])
    profile = machine_of(hardware, None) if hardware else None
    budget = (
        memory_of(profile) if profile else MemoryBudget(device_bytes=1 << 34, host_bytes=1 << 34, nvme_bytes=1 << 40)
    )
    workload = workload_of(batch, accumulation, seq, precision, clip, recompute)
    schedule = schedule_of(target, policy, knob, workload, budget, context)
    if expect is not None and not schedule.digest.startswith(expect):
        raise Refused(f"the schedule's digest is {schedule.short_digest}, not {expect}: it is not the one you verified")
    verified = verify(schedule)
    # a profile may lack this schedule's ops, which is better told before the training than after it
    predicted = {} if profile is None else _predicted(predict(schedule, profile, budget))

    from megatrain import checkpoint
    from megatrain.adam import Adam
    from megatrain.learning_rate import by_step
    from megatrain.session import Files, train
    from megatrain.way import Way, measured_in

    for name, value in (("--lr", lr), ("--weight-decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} {value}: give a number from 0 up that is not infinite")
    try:
        hyper = by_step(Adam(lr=lr, weight_decay=weight_decay), warmup=warmup, until=decay_until)
    except ValueError as error:
        raise InputError(str(error)) from None
    way, timed = str(Way(fused=fused, graphs=graphs)), measured_in(profile) if profile else None
    if timed not in (way, None):
        print(f"note: {hardware} has times of {timed} ops, and this run computes {way} ones", file=sys.stderr)
    progress = _Progress(steps, schedule.workload.tokens_per_step)
    try:
        with progress_bar(left=False) as bar, _terminated_as_interrupted():
            task = bar.add_task("training", total=steps, note="")

            def on_loss(step: int, loss: float) -> None:
                progress.add(step, loss)
                bar.update(task, advance=1, note=progress.note())

            result = train(
                verified,
                steps=steps,
                hyper=hyper,
                seed=seed,
                debug=debug,
                backend=backend,
                nvme=nvme,
                fused=fused,
                graphs=graphs,
                files=Files(weights=weights, tokens=data, resume=resume, save=save, every=every, export=export),
                on_start=bar.start,
                on_loss=on_loss,
            )
    except checkpoint.Diverged as error:
        if as_json:
            print_json({**schedule.describe(), "losses": progress.losses, "reason": str(error)})
        raise
    except KeyboardInterrupt:
        print(f"megatrain: interrupted {progress.reached()}; {checkpoint.told(save)}", file=sys.stderr)
        raise typer.Exit(130) from None
    record = _record(schedule, result) | predicted
    try:
        if trace is not None:
            result.trace.save(trace)
    finally:  # whether or not it could be kept
        if as_json:
            print_json(record)
        else:
            print("\n".join(_told(schedule, record)))


class _Progress:
    """How far a training of so many steps is, each of so many tokens."""

    def __init__(self, steps: int, tokens: int) -> None:
        self.losses: list[float] = []
        self._steps, self._tokens = steps, tokens
        self._step, self._began, self._now = 0, 0.0, 0.0

    def add(self, step: int, loss: float) -> None:
        """A step, counted from 0 over all runs that go on from each other, is done."""
        self._step, self._now = step + 1, time.perf_counter()
        if not self.losses:
            self._began = self._now
        self.losses.append(loss)

    def note(self) -> str:
        """Beside the bar."""
        done = len(self.losses)
        said = f"{done}/{self._steps}, loss {self.losses[-1]:.3f}"
        if done < PACED or self._now <= self._began:
            return said
        pace = (self._now - self._began) / (done - 1)  # the first step's start is not known
        left = timedelta(seconds=round(pace * (self._steps - done)))
        return f"{said}, {self._tokens / pace:,.0f} tokens/s, {left} left"

    def reached(self) -> str:
        """How far it got, for the message after an interrupt."""
        return f"after step {self._step}" if self.losses else "before the first step was done"


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a training as Ctrl-C does: nothing is left on a drive, and what is kept is told."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record(schedule: Schedule, result: Trained) -> dict[str, Any]:
    """What a run found, for programs."""
    record: dict[str, Any] = {**schedule.describe(), "losses": result.losses, "machine": result.trace.machine}
    if len(result.losses) > 2 and result.step_ns:
        record["measured_step_s"] = statistics.median(result.step_ns) / 1e9
        record["measured_tokens_per_s"] = schedule.workload.tokens_per_step / record["measured_step_s"]
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
    first, last = record["losses"][0], record["losses"][-1]
    yield f"{schedule.label}, digest {schedule.short_digest}: loss {first:.3f} -> {last:.3f}"
    if "measured_step_s" in record:
        rate = record["measured_tokens_per_s"]
        yield f"measured {record['measured_step_s'] * 1e3:,.1f} ms a step, {rate:,.0f} tokens/s"
    if "predicted_step_s" in record:
        machine = f"{record['predicted_machine']} ({record['predicted_profile']} profile)"
        yield f"predicted {record['predicted_step_s'] * 1e3:,.1f} ms a step on {machine}"

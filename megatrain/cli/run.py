"""`megatrain run`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
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


def run(
    context: typer.Context,
    target: Target,
    policy: Policy = "streamed",
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", "-H", "--profile", help="A profile of this machine, to predict the run too."),
    ] = None,
    batch: Batch = 4,
    accumulation: Accumulation = 1,
    seq: Seq = 256,
    precision: Precision = "fp32",
    clip: Clip = None,
    recompute: Recompute = "none",
    knob: Knob = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train, after --resume so many more.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises to that.")] = 0,
    decay_until: Annotated[
        int | None, typer.Option(help="Let it fall to zero, which this step would have, along half a cosine.")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="AdamW's, of matrices alone.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="Begin with the weights in this folder of Hugging Face's; random if left out.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A .npy file of token numbers; Python's own source files if left out.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from this checkpoint, or the newest in a folder.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write a checkpoint to this folder at the end.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Write one after every so many steps, too.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the weights, or adapters, as Hugging Face has them, at the end.")
    ] = None,
    expect: Annotated[str | None, typer.Option(help="Refuse any schedule whose digest does not begin so.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Poison free buffers and delay streams at random.")] = False,
    backend: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    nvme: Annotated[Path | None, typer.Option(help="A folder on the drive for what the schedule keeps there.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Compile norms, rotations, gates and the loss.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Replay blocks as CUDA graphs.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the measured trace here.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a schedule and train by it, on this machine."""
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

    from megatrain.adam import Adam
    from megatrain.learning_rate import by_step
    from megatrain.session import Files, train

    try:
        hyper = by_step(Adam(lr=lr, weight_decay=weight_decay), warmup=warmup, until=decay_until)
    except ValueError as error:
        raise InputError(str(error)) from None
    with progress_bar() as progress:
        task = progress.add_task(f"training {schedule.policy}", total=steps, note="")
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
            on_loss=lambda step, loss: progress.update(task, advance=1, note=f"loss {loss:.3f}"),
        )
    record = _record(schedule, result)
    if profile is not None:
        record["predicted_step_s"] = predict(schedule, profile, budget).period_ns / 1e9
    if as_json:
        print_json(record)
    else:
        print("\n".join(_told(schedule, record)))
    if trace is not None:
        from analysis.files import writing

        with writing(trace):
            result.trace.save(trace)


def _record(schedule: Schedule, result: Trained) -> dict[str, Any]:
    """What a run found, for programs."""
    record: dict[str, Any] = {**schedule.describe(), "losses": result.losses, "machine": result.trace.machine}
    if len(result.losses) > 2:
        record["measured_step_s"] = statistics.median(result.trace.step_ns()) / 1e9
        record["measured_tokens_per_s"] = schedule.workload.tokens_per_step / record["measured_step_s"]
    return record


def _told(schedule: Schedule, record: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    first, last = record["losses"][0], record["losses"][-1]
    yield f"{schedule.label}, digest {schedule.short_digest}: loss {first:.3f} -> {last:.3f}"
    if "measured_step_s" in record:
        rate = record["measured_tokens_per_s"]
        yield f"measured {record['measured_step_s'] * 1e3:,.1f} ms a step, {rate:,.0f} tokens/s"
    if "predicted_step_s" in record:
        yield f"predicted {record['predicted_step_s'] * 1e3:,.1f} ms a step"

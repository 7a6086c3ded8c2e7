"""Commands that need no data: simulate, build, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import (
    Accumulation,
    Batch,
    Clip,
    Hardware,
    Json,
    Knob,
    Policy,
    Precision,
    Recompute,
    Seq,
    Set,
    Target,
    machine_of,
    print_json,
    schedule_of,
    workload_of,
)


def simulate(
    target: Target,
    policy: Policy = "streamed",
    hardware: Hardware = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    clip: Clip = None,
    recompute: Recompute = "none",
    knob: Knob = None,
    change: Set = None,
    trace: Annotated[Path | None, typer.Option(help="Write the predicted trace here.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev here.")] = None,
    as_json: Json = False,
) -> None:
    """Predict how fast a schedule runs on a machine, what limits it and whether it fits."""
    from megatrain.tables import prediction_record, print_prediction
    from schedules.verify import verify
    from sim.prediction import memory_of, predict

    profile = machine_of(hardware, change)
    budget = memory_of(profile)
    schedule = schedule_of(
        target, policy, knob, workload_of(batch, accumulation, seq, precision, clip, recompute), budget
    )
    verify(schedule)
    prediction = predict(schedule, profile, budget)
    if trace is not None:
        prediction.trace.save(trace)
    if perfetto is not None:
        from analysis import perfetto as timeline

        timeline.write(perfetto, [(schedule, prediction.trace)])
    if as_json:
        print_json(prediction_record(prediction))
    else:
        print_prediction(prediction)
    if prediction.does_not_fit is not None:
        raise prediction.does_not_fit


def build(
    target: Annotated[str, typer.Argument(help="A model's name, or its config.json.", show_default=False)],
    policy: Policy = "streamed",
    hardware: Annotated[str, typer.Option("--hardware", "-H", help="The machine whose memory to fit.")] = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    clip: Clip = None,
    recompute: Recompute = "none",
    knob: Knob = None,
    change: Set = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the schedule file here.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the grid: one column per stream.")] = False,
) -> None:
    """Build a policy's schedule for a model, verify it and write it to a file."""
    from megatrain.tables import print_summary
    from schedules import codec
    from schedules.show import grid
    from schedules.verify import verify
    from sim.prediction import memory_of

    budget = memory_of(machine_of(hardware, change))
    schedule = schedule_of(
        target, policy, knob, workload_of(batch, accumulation, seq, precision, clip, recompute), budget
    )
    verify(schedule)
    if show:
        print(grid(schedule))
    if out is not None:
        codec.save(schedule, out)
    print_summary(schedule, f"written to {out}" if out else "not written: give --out FILE")


def verify(file: Annotated[Path, typer.Argument(help="A schedule file.", show_default=False)]) -> None:
    """Prove a schedule file safe, or tell everything that is wrong with it."""
    from megatrain.tables import print_summary
    from schedules import codec
    from schedules.verify import verify as prove

    schedule = codec.read(file)
    prove(schedule)
    print_summary(schedule, "safe: no race, no stale read, no deadlock; every gradient applied once")

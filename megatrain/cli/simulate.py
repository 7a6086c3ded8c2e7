"""Commands that need no data: simulate, build, verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatrain.cli.bars import stages
from megatrain.cli.options import (
    STEP,
    Accumulation,
    Batch,
    Clip,
    Hardware,
    Json,
    Knob,
    Matmul,
    Model,
    Optimizer,
    Policy,
    Precision,
    Recompute,
    ScheduleFile,
    ScheduleOut,
    Seq,
    Set,
    Target,
    machine_of,
    note_peak,
    print_json,
    require_outputs,
    schedule_of,
    schedule_to_prove,
    workload_of,
)
from schedules.errors import InputError

if TYPE_CHECKING:
    from schedules.schedule import Schedule


def simulate(
    context: typer.Context,
    target: Target,
    policy: Policy = "streamed",
    hardware: Hardware = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
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
    from sim.plan import bound_of_these_micro_batches
    from sim.prediction import memory_of, predict

    require_outputs(files=(trace, perfetto))
    profile = machine_of(hardware, change)
    budget = memory_of(profile)
    workload = workload_of(batch, accumulation, seq, precision, clip, recompute, optimizer, matmul)
    with stages() as begin:
        begin("building")
        schedule = schedule_of(target, policy, knob, workload, budget, context)
        begin("proving")
        verify(schedule)
        begin("simulating")
        prediction = predict(schedule, profile, budget)
        # what holds for the memory there is says nothing of a step that has more
        any_bound_ns = bound_of_these_micro_batches(schedule, profile) if prediction.fits else 0.0
    note_peak(profile, schedule.workload, max(prediction.mfu, prediction.hfu))
    lacking = prediction.does_not_fit
    try:  # first to the files, see `plan`
        if trace is not None:
            prediction.trace.save(trace)
        if perfetto is not None:
            from analysis import perfetto as timeline

            timeline.write(perfetto, [(schedule, prediction.trace)])
    finally:
        if as_json:
            print_json({**prediction_record(prediction), "bound_of_any_schedule_s": any_bound_ns / 1e9 or None})
        else:
            if lacking is not None:
                print(f"DOES NOT FIT: {lacking.short}; all below is as if it did")
            print_prediction(prediction, any_bound_ns)
    if lacking is not None:
        raise lacking


def build(
    context: typer.Context,
    target: Model,
    policy: Policy = "streamed",
    hardware: Annotated[
        str, typer.Option("--hardware", "-H", "--profile", help="The machine whose memory the schedule should fit.")
    ] = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
    clip: Clip = None,
    recompute: Recompute = "none",
    knob: Knob = None,
    change: Set = None,
    out: ScheduleOut = None,
    show: Annotated[bool, typer.Option("--show", help="Print the schedule as a grid: one column per stream.")] = False,
    as_json: Json = False,
) -> None:
    """Build a policy's schedule for a model, verify it and write it to a file, whether or not it fits the machine."""
    from megatrain.tables import age_of_weights, memory_record, print_fit, print_summary
    from schedules import codec
    from schedules.show import grid
    from schedules.verify import verify
    from sim.prediction import memory_of, peak_bytes, shortage

    if show and as_json:
        raise InputError("--show prints a picture and --json numbers: leave out one")
    require_outputs(files=[out])
    profile = machine_of(hardware, change)
    budget = memory_of(profile)
    workload = workload_of(batch, accumulation, seq, precision, clip, recompute, optimizer, matmul)
    with stages() as begin:
        begin("building")
        schedule = schedule_of(target, policy, knob, workload, budget, context, fixed=(*STEP, "hardware", "change"))
        begin("proving")
        verified = verify(schedule)
    if out is not None:  # before anything is printed, see `plan`
        codec.save(schedule, out)
    lacking = shortage(schedule, profile, budget)
    if as_json:
        fit = {"machine": profile.name, "fits": lacking is None, "reason": str(lacking or "")}
        memory = memory_record(peak_bytes(schedule, profile), profile)
        print_json({**_record(schedule), "safe": True, "behind": verified.behind, **fit, **memory, "file": out})
        return
    if show:
        print(grid(schedule))
    print_summary(schedule, f"written to {out}" if out else "not written: give --out FILE")
    if schedule.staleness:
        print(age_of_weights(verified))
    print_fit(schedule, profile, lacking)


def verify(file: ScheduleFile, as_json: Json = False) -> None:
    """Prove a schedule file safe, or report everything wrong with it."""
    from megatrain.tables import age_of_weights, print_summary
    from schedules.verify import ScheduleError
    from schedules.verify import verify as prove

    if file.suffix == ".py":
        raise InputError(f"verify takes a schedule file: megatrain build MODEL -p {file} --out FILE")
    try:
        with stages() as begin:
            begin("reading")
            schedule = schedule_to_prove(file)
            begin("proving")
            verified = prove(schedule)
    except ScheduleError as error:
        if as_json:
            print_json({**_record(schedule), "safe": False, "problems": [str(found) for found in error.violations]})
        raise
    if as_json:
        print_json({**_record(schedule), "safe": True, "problems": [], "behind": verified.behind})
    else:
        age = f"{age_of_weights(verified)}\n" if schedule.staleness else ""
        print_summary(
            schedule,
            f"safe: no race, no stale read, no deadlock; every gradient applied once\n{age}"
            f"run this and no other with --expect {schedule.fingerprint[:12]}",
        )


def _record(schedule: Schedule) -> dict[str, Any]:
    """What a schedule is, for programs; every key of a size says its unit."""
    from schedules.op import Tier

    return {
        **schedule.describe(),
        "ops": len(schedule.ops),
        "waits": len(schedule.waits),
        "buffers": len(schedule.buffers),
        "allocated_bytes": {str(tier): schedule.allocated_bytes(tier) for tier in Tier},
    }

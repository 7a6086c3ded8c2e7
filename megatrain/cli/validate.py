"""`megatrain validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import Json, Precision, print_json, progress_bar

Shapes = list[str] | None


def validate(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for results; an interrupted run goes on.")
    ] = Path("results/validation"),
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Repeatable; three small ones if left out.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="Repeatable; five if left out.")] = None,
    calibrate: Annotated[Shapes, typer.Option(help="A profiled shape, micro-batch x sequence: 2x128.")] = None,
    hold_out: Annotated[Shapes, typer.Option(help="A shape that is run, and not profiled.")] = None,
    precision: Precision = "fp32",
    rounds: Annotated[int, typer.Option(min=1, help="How often each point is run.")] = 2,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps of each run.")] = 10,
    as_json: Json = False,
) -> None:
    """Profile this machine, run what was not profiled, and tell how far predictions are from runs.

    On the CPU. The shapes that are profiled must surround those that are run.
    """
    from analysis import tables, validation, validation_report
    from megatrain import validate as grids
    from schedules import presets

    grid = grids.Grid(
        models=tuple(presets.load(name) for name in model) if model else tuple(grids.models()),
        policies=tuple(policy or grids.POLICIES),
        calibrated=tuple(map(_shape, calibrate)) if calibrate else grids.CALIBRATED,
        held_out=tuple(map(_shape, hold_out)) if hold_out else grids.HELD_OUT,
        precision=precision,
        rounds=rounds,
        steps=steps,
    )
    with progress_bar() as bar:
        tasks = {name: bar.add_task(name, total=1.0, note="") for name in ("profiling", "running", "reporting")}
        profile = grids.calibrate(
            grid, out, lambda done, note: bar.update(tasks["profiling"], completed=done, note=note)
        )
        bar.update(tasks["profiling"], completed=1.0)
        points = grids.run(grid, out, lambda done, note: bar.update(tasks["running"], completed=done, note=note))
        table = validation_report.write(
            out,
            grid,
            points,
            profile,
            "megatrain validate",
            lambda done, note: bar.update(tasks["reporting"], completed=done, note=note),
        )
    if as_json:
        print_json(tables.records(table))
        return
    tables.show(validation_report.headline(table), tables.summaries("level", "level"))
    tables.show(validation.by(table, "policy", "predict_error"), tables.summaries("policy", "policy, predicted"))
    print(f"every point, the ladder and the picture: {out / 'README.md'}")


def _shape(text: str) -> tuple[int, int]:
    from schedules.errors import InputError

    batch, times, seq = text.partition("x")
    if not (times and batch.isdecimal() and seq.isdecimal() and int(batch) and int(seq)):
        raise InputError(f"{text!r} is no shape; write micro-batch x sequence, as in 2x128")
    return int(batch), int(seq)

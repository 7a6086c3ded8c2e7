"""`megatrain validate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import goes_on, part_of, progress_bar
from megatrain.cli.options import (
    Backend,
    Json,
    ResumedOut,
    command_line,
    listed,
    print_json,
    require_outputs,
    require_unix,
    shape_of,
)

Shapes = list[str] | None


def validate(
    out: ResumedOut = Path("results/validation"),
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "--models", "-m", help="A model, or several: a,b. Repeatable; three small ones if left out."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help='A policy, with any knobs: "streamed nvme=4"; or several: a,b. Repeatable; five if left out.',
        ),
    ] = None,
    calibrate: Annotated[
        Shapes, typer.Option(help="A shape to profile, micro-batch x sequence: 2x128. Repeatable.")
    ] = None,
    hold_out: Annotated[Shapes, typer.Option(help="A shape to run but not profile. Repeatable.")] = None,
    precision: Annotated[str | None, typer.Option(help="Default: fp32 on a CPU, bf16 on a GPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each point.")] = 2,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps per run.")] = 10,
    nvme: Annotated[Path | None, typer.Option(help="A folder on a drive, for policies that use one.")] = None,
    backend: Backend = None,
    fused: Annotated[bool, typer.Option("--fused", help="Profile and run as run --fused does.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Profile and run as run --graphs does.")] = False,
    as_json: Json = False,
) -> None:
    """Profile this machine, run shapes that were not profiled, and report how far predictions are from runs.

    The profiled shapes, three or more, must surround those that are run. The first steps of a run do not count.
    """
    require_unix()
    from analysis import tables, validation, validation_report
    from megatrain import validate as grids
    from megatrain.terminal import print_words
    from megatrain.way import Way
    from schedules import presets

    require_outputs(folders=[out])
    usual = grids.usual(backend)
    grid = replace(
        usual,
        models=tuple(presets.load(name) for name in listed(model or [])) or usual.models,
        policies=tuple(listed(policy or [])) or usual.policies,
        calibrated=tuple(map(shape_of, listed(calibrate or []))) or usual.calibrated,
        held_out=tuple(map(shape_of, listed(hold_out or []))) or usual.held_out,
        precision=precision or usual.precision,
        rounds=rounds,
        steps=steps,
        nvme=nvme,
        way=Way(fused=fused, graphs=graphs),
    )
    with goes_on(), progress_bar() as bar:
        profiling, running, reporting = (part_of(bar, name) for name in ("profiling", "running", "reporting"))
        profile, points = grids.profile_and_run(grid, out, profiling, running)
        table = validation_report.write(out, grid, points, profile, command_line(), reporting)
    if as_json:
        print_json(tables.records(table))
        return
    tables.show(validation_report.headline(table), tables.summaries("level", "level"))
    print_words(validation_report.machine_noise(table))
    tables.show(validation.by(table, "policy"), tables.summaries("policy", "policy, predicted"))
    print(f"every point, the ladder and the picture: {out / 'README.md'}")

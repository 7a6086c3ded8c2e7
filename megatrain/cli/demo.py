"""`megatrain demo`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import part_of, progress_bar
from megatrain.cli.options import (
    Backend,
    command_line,
    require_outputs,
    require_unix,
)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("results/demo"),
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps to train with each policy.")] = 40,
    backend: Backend = None,
) -> None:
    """Measure this machine, simulate five policies, train with each, and compare the two.

    A policy that has no room here is left out, and named.
    """
    require_unix()
    from analysis import demo_report, tables
    from megatrain import demo as demonstration
    from megatrain.fitting import told_left_out

    require_outputs(folders=[out])
    schedules, left = demonstration.schedules_here(backend)
    for line in told_left_out(schedules, left):
        print(f"note: {line}", file=sys.stderr)
    with progress_bar() as progress:
        stage = partial(part_of, progress)
        profile = demonstration.measure_machine(out, schedules, stage("measuring this machine"), backend)
        results = demonstration.run_all(out, schedules, profile, steps, stage("training with every policy"), backend)
        finish = stage("writing results")
        index = demo_report.write(out, results, command_line(), finish)
        finish(1.0, "")
    times = demo_report.step_times(results)
    tables.show(times, tables.PREDICTED_MEASURED, note=tables.PREDICTED_MEASURED_NOTE)
    for run in results.runs[:1]:
        print(f"loss {run.trained.losses[0]:.2f} -> {run.trained.losses[-1]:.2f} in {steps} steps")
    print(f"tables, pictures and timelines: {index}")

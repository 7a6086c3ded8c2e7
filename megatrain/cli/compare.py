"""`megatrain compare`."""

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
    Precision,
    Recompute,
    Seq,
    Set,
    machine_of,
    print_json,
    progress_bar,
    workload_of,
)


def compare(
    models: Annotated[list[str], typer.Argument(help="Models to compare policies on.", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="Repeatable; all if left out.")] = None,
    hardware: Hardware = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    clip: Clip = None,
    recompute: Recompute = "none",
    change: Set = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a plot and its data to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Predict every policy on every model of a list, beside ZeRO-3 offload."""
    from analysis import compare as comparison
    from analysis import figure, plots, tables
    from schedules import policies, presets

    profile = machine_of(hardware, change)
    workload = workload_of(batch, accumulation, seq, precision, clip, recompute)
    chosen = policy or policies.comparable()
    found = []
    with progress_bar() as progress:
        task = progress.add_task("simulating", total=len(models) * len(chosen), note="")
        for spec in [presets.load(model) for model in models]:
            for row in comparison.rows(spec, chosen, profile, workload):
                found.append(row)
                progress.update(task, advance=1, note=f"{row.model} {row.policy}")
    frame = comparison.frame(found)
    if out is not None:
        figure.save(figure.figure_of(plots.throughput(frame)), out / "throughput", frame)
    if as_json:
        print_json(tables.records(frame))
    else:
        tables.show_comparison(frame)

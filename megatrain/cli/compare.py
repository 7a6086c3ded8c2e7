"""`megatrain compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import progress_bar
from megatrain.cli.options import (
    Accumulation,
    Batch,
    Clip,
    Hardware,
    Json,
    Models,
    ModelsToo,
    Precision,
    Recompute,
    Seq,
    Set,
    listed,
    machine_of,
    models_of,
    note_length,
    print_json,
    require_outputs,
    workload_of,
)
from schedules.errors import Refused


def compare(
    models: Models = None,
    models_too: ModelsToo = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help='A policy, with any knobs: "streamed slots=3"; or several: a,b. Repeatable; all that train every '
            "weight if left out.",
        ),
    ] = None,
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
    from megatrain.terminal import print_words
    from schedules import policies

    require_outputs(folders=[out])
    profile = machine_of(hardware, change)
    workload = workload_of(batch, accumulation, seq, precision, clip, recompute)
    same_state = [comparison.SAME_STATE] if precision in comparison.OUR_PRECISIONS else []
    chosen = listed(policy or []) or [*policies.comparable(), *same_state]
    for name in chosen:
        policies.with_knobs(name)  # tells which is not there before any is simulated
    chosen = list(dict.fromkeys(chosen))
    specs = models_of(models, models_too)
    for spec in specs:
        note_length(spec, seq)
    found = []
    with progress_bar() as progress:
        task = progress.add_task("simulating", total=len(specs) * len(chosen), note="")
        for spec in specs:
            for row in comparison.rows(spec, chosen, profile, workload):
                found.append(row)
                progress.update(task, advance=1, note=f"{row.model} {row.policy}")
    frame = comparison.frame(found)
    try:  # first to the file, see `plan`
        if out is not None:
            figure.save(figure.figure_of(plots.throughput(frame)), out / "throughput", frame)
    finally:
        if as_json:
            print_json(tables.records(frame))
        else:
            tables.show_comparison(frame)
            for lacking in frame["reason"][frame["fits"].isna()].head(1):
                print_words(f"The first that is not predicted: {lacking}")
            if policy is None:
                others = [name for name in policies.names() if name not in chosen]
                told = f"{', '.join(others)}. See them with --policy."
                print_words(f"Left out, since they do not train every weight: {told}")
    if out is not None and not as_json:
        print(f"written to {out}: throughput.png, throughput.svg, throughput.csv")
    if frame["fits"].eq(False).all():
        raise Refused(f"none of these fits {profile.name}")

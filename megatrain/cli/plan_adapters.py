"""`megatrain plan-adapters`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from megatrain.cli.bars import planning, progress_bar
from megatrain.cli.options import (
    BestAccumulation,
    BestBatch,
    Clip,
    Hardware,
    Json,
    Model,
    Precision,
    ScheduleOut,
    Seq,
    Set,
    Tokens,
    machine_of,
    note_length,
    note_peak,
    print_json,
    require_outputs,
)


def plan_adapters(
    model: Model,
    hardware: Hardware = "h200",
    tokens: Tokens = 65536,
    seq: Seq = 2048,
    batch: BestBatch = None,
    accumulation: BestAccumulation = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters.")] = 16,
    quantised: Annotated[str | None, typer.Option(help="nf4: the frozen weights are kept in 4 bits.")] = None,
    precision: Precision = "bf16",
    clip: Clip = None,
    change: Set = None,
    out: ScheduleOut = None,
    as_json: Json = False,
) -> None:
    """Find the best schedule for LoRA's adapters beside frozen weights, in 4 bits or whole.

    What is searched are the knobs of `lora_streamed`, and how the step is split. With --batch and --accumulation the
    step is their product; --tokens is then ignored.
    """
    from megatrain import adapter_plan_tables as tables
    from megatrain.cores import usable_cores
    from megatrain.plan_tables import nothing_record
    from schedules import codec, presets
    from sim.adapter_plan import plan_adapters as search
    from sim.search import NothingFits

    require_outputs(files=[out])
    profile, spec = machine_of(hardware, change), presets.load(model)
    note_length(spec, seq)
    fixed = batch is not None and accumulation is not None
    try:
        with progress_bar() as bar:
            progress = planning(bar)
            found = search(
                spec,
                profile,
                rank=rank,
                quantised=quantised,
                seq_len=seq,
                tokens_per_step=None if fixed else tokens,
                micro_batch_size=batch,
                accumulation=accumulation,
                precision=precision,
                grad_clip=clip,
                progress=progress,
                workers=usable_cores(),
            )
            progress(found.prediction, 1.0, f"{len(found.tried)} tried")
            if out is not None:
                codec.save(found.schedule, out)
    except NothingFits as error:
        if as_json:  # not before the bar has ended, which takes what is printed to stderr
            print_json(nothing_record(spec, profile, str(error)))
        raise
    note_peak(profile, found.schedule.workload, max(found.prediction.mfu, found.prediction.hfu))
    if as_json:
        print_json(tables.record(found))
    else:
        tables.show(found)
        print(f"written to {out}; run it with: megatrain run {out}" if out else "not written: give --out FILE")
    if not found.finished:
        print(f"megatrain: interrupted; this is the best of {len(found.tried)} candidates", file=sys.stderr)
        raise typer.Exit(130)

"""`megatrain plan`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain.cli.bars import planning, progress_bar
from megatrain.cli.options import (
    BestAccumulation,
    BestBatch,
    Clip,
    Hardware,
    Json,
    Matmul,
    Model,
    Optimizer,
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
    schedule_to_prove,
)

if TYPE_CHECKING:
    from sim.order_proof import OrderProof


def plan(
    model: Model,
    hardware: Hardware = "h200",
    tokens: Tokens = 65536,
    seq: Seq = 4096,
    batch: BestBatch = None,
    accumulation: BestAccumulation = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
    clip: Clip = None,
    change: Set = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Spread of op times for the interval; the profile's own or 0.02 if left out."
        ),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Report what more of each resource would gain; some minutes more.")
    ] = False,
    prove: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds for proving what another order could gain; for few layers.")
    ] = None,
    start: Annotated[
        list[Path] | None,
        typer.Option("--start", help="Start from this schedule file: if it fits, the plan is no slower. Repeatable."),
    ] = None,
    out: ScheduleOut = None,
    as_json: Json = False,
) -> None:
    """Find the best schedule for a model on a machine, and how much better any could be.

    With --batch and --accumulation the step is their product; --tokens is then ignored. On a measured profile the
    plan is the best of what the profile has times for; it says what that leaves out and how to measure it.
    """
    from megatrain import plan_tables as tables
    from megatrain.cores import usable_cores
    from schedules import codec, presets
    from schedules.errors import InputError
    from sim import order_proof, whatif
    from sim.plan import plan as search
    from sim.search import NothingFits

    # what is lacking for the answer is told before the search, which may take long
    require_outputs(files=[out])
    if prove is not None:
        order_proof.solver()
    profile, spec = machine_of(hardware, change), presets.load(model)
    begun_with = [schedule_to_prove(path) for path in start or ()]
    note_length(spec, seq)
    fixed = batch is not None and accumulation is not None
    try:
        with progress_bar() as bar:
            progress = planning(bar)
            found = search(
                spec,
                profile,
                seq_len=seq,
                tokens_per_step=None if fixed else tokens,
                micro_batch_size=batch,
                accumulation=accumulation,
                precision=precision,
                optimizer=optimizer,
                matmul=matmul,
                grad_clip=clip,
                progress=progress,
                first=begun_with,
                workers=usable_cores(),
            )
            progress(found.prediction, 1.0, f"{len(found.tried)} tried")
            not_kept: InputError | None = None
            if out is not None:  # first: whoever waits for more, or reads what is printed (`head`), may end before it
                try:
                    codec.save(found.schedule, out)
                except InputError as error:  # which is no reason to lose the plan
                    not_kept = error
            if noise is None:
                noise = whatif.op_noise(profile)
            if noise is None:
                noise = whatif.USUAL_NOISE
            spread = whatif.spread(found.prediction, noise)
            proof: OrderProof | None = None
            not_proven: InputError | None = None
            answers = None
            left_out = [name for name, asked in (("the proof", prove is not None), ("what if", what_if)) if asked]
            with suppress(KeyboardInterrupt):
                if prove is not None and found.finished:
                    bar.add_task("proving the order", total=None, note=f"{prove:g} s at most")
                    try:
                        proof = order_proof.prove(found.schedule, profile, seconds=prove)
                    except InputError as error:  # it has too many ops
                        not_proven = error
                    left_out.remove("the proof")
                if what_if and found.finished:
                    asking = bar.add_task("asking what if", total=None, note="")
                    answers = tables.what_if(found, lambda note: bar.update(asking, note=note))
                    left_out.remove("what if")
    except NothingFits as error:
        if as_json:  # not before the bar has ended, which takes what is printed to stderr
            print_json(tables.nothing_record(spec, profile, str(error)))
        raise
    note_peak(profile, found.schedule.workload, max(found.prediction.mfu, found.prediction.hfu))
    if as_json:
        print_json(tables.record(found, spread, answers, proof))
    else:
        tables.show(found, spread, answers, proof)
        if not_kept is None:
            print(f"written to {out}; run it with: megatrain run {out}" if out else "not written: give --out FILE")
    if failed := not_kept or not_proven:
        raise failed
    if left_out or not found.finished:
        searched = [] if found.finished else [f"this is the best of {len(found.tried)} candidates"]
        told = "; ".join(["interrupted", *searched, *([f"left out: {', '.join(left_out)}"] if left_out else [])])
        print(f"megatrain: {told}", file=sys.stderr)
        raise typer.Exit(130)

"""`megatrain diff`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import stages
from megatrain.cli.options import (
    Json,
    machine_of,
    print_json,
    require_input,
    require_outputs,
    schedule_to_show,
    trace_of,
)

SOME_GPU = "h200"  # what ops share is the same on every GPU that is known by a name and has memory of its own


def diff(
    first: Annotated[Path, typer.Argument(help="The trace to compare against.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another trace of the same schedule.", show_default=False)],
    schedule: Annotated[Path, typer.Option("--schedule", help="The schedule file of both.")],
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", "-H", "--profile", help="A machine's name, or a profile; the traces' own, or any GPU."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many differences to show.")] = 12,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a row per op to this CSV file.")] = None,
    as_json: Json = False,
) -> None:
    """Show where two runs of a schedule differ, largest first, and which differences change the step time.

    The hardware only says which ops share a resource. GPUs with memory of their own are alike in that; others are not.
    """
    from analysis import tables, trace_diff, trace_words
    from schedules.files import write_text
    from sim import hardware as machines
    from sim.units import seconds

    require_input(first, second, schedule)
    require_outputs(files=[out])
    given = None if hardware is None else machine_of(hardware, None)
    with stages() as begin:
        begin("reading")
        step = schedule_to_show(schedule)
        traces = trace_of(step, first), trace_of(step, second)
        begin("comparing")
        unknown = [trace.machine for trace in traces if trace.machine not in machines.names()]
        found = trace_diff.diff(step, *traces, given or machines.load(SOME_GPU if unknown else traces[0].machine))
        totals = trace_diff.totals(found)
        not_replayed = trace_words.not_replayed(trace_diff.overlapping(step, *traces))
        moves = None if not_replayed else trace_diff.moves(step, *traces)
    if given is None and unknown and not step.is_recording:  # a recording's ops share what its streams do
        told_of = f"ops are taken to share what they share on a GPU; if {unknown[0]} is a CPU"
        print(f"note: {told_of}, give its profile with --hardware", file=sys.stderr)
    told = {"ops": trace_words.sentences(found, top), "idle streams": trace_words.idle_sentences(found, top)}
    try:  # first to the file, see `plan`
        if out is not None:
            write_text(out, trace_diff.frame(found).to_csv(index=False))
    finally:
        if as_json:
            rows = {"totals": tables.records(totals), "moves": [] if moves is None else tables.records(moves)}
            listed = {what: [{"difference_ns": ns, "text": text} for ns, text in lines] for what, lines in told.items()}
            print_json(
                {
                    "runs": found.names,
                    "steps_ns": found.steps_ns,
                    "differences": listed,
                    **rows,
                    "not_replayed": not_replayed,
                }
            )
        else:
            names, lengths = found.names, [seconds(ns / 1e9) for ns in found.steps_ns]
            print(f"first: {first} ({names[0]}), a step of {lengths[0]}")
            print(f"second: {second} ({names[1]}), a step of {lengths[1]}\n")
            for what, lines in told.items():
                print(f"{what}, largest difference first")
                print("\n".join(f"{ns / 1e6:+10.4g} ms  {text}" for ns, text in lines) or "none", end="\n\n")
            tables.show(totals, tables.TRACE_TOTALS, title="by stream and class of op")
            if moves is None:
                print(not_replayed)
            else:
                tables.show(moves, tables.TRACE_MOVES, title="what moves the step", note=tables.TRACE_MOVES_NOTE)

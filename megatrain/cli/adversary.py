"""`megatrain adversary`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import progress_bar
from megatrain.cli.options import (
    Clip,
    Hardware,
    Json,
    Matmul,
    Optimizer,
    Precision,
    Recompute,
    Set,
    machine_of,
    print_json,
    require_outputs,
    workload_of,
)
from schedules.errors import InputError, Refused


def adversary(
    first: Annotated[
        str, typer.Argument(help='The policy that should lose, with any knobs: "streamed slots=3".', show_default=False)
    ],
    second: Annotated[str, typer.Argument(help="The policy that should win, likewise.", show_default=False)],
    hardware: Hardware = "h200",
    change: Set = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    clip: Clip = None,
    recompute: Recompute = "none",
    matmul: Matmul = None,
    points: Annotated[int, typer.Option(min=1, help="Points to try.")] = 300,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a row per point to this CSV file.")] = None,
    as_json: Json = False,
) -> None:
    """Find machines and shapes where one policy loses most to another: when not to use it."""
    from analysis import adversary as adversaries
    from analysis import tables
    from megatrain.terminal import print_words
    from schedules.files import write_text

    require_outputs(files=[out])
    if first == second:
        raise InputError(f"{first} against itself: name two policies")
    like = workload_of(1, 1, 1, precision, clip, recompute, optimizer, matmul)  # but for its shape
    machine = machine_of(hardware, change)
    with progress_bar() as bar:
        task = bar.add_task("searching", total=points, note="")
        found = adversaries.search(
            first,
            second,
            machine,
            points=points,
            seed=seed,
            like=like,
            progress=lambda done, worst: bar.update(task, completed=done, note=_worst(worst)),
        )
    table = adversaries.frame(found)
    wins = sum(loss.ratio < 1 for loss in found)
    try:  # first to the file, see `plan`
        if out is not None:
            write_text(out, table.to_csv(index=False))
    finally:
        if as_json:
            losses = tables.records(table.head(top))
            print_json({"shapes": len(found), "first_is_faster": wins, "losses": losses})
        elif found:
            for loss in found[:top]:
                print_words(loss.words())
                print()
            better = f"at {wins} of them {found[0].first} is faster wherever it was tried"
            print_words(
                f"predicted, on machines around {machine.name}: {len(found)} shapes at which both fit; {better}. "
                f"{adversaries.unlike(found)}".rstrip()
            )
    if not found:
        raise Refused(f"at none of {points} points do both fit: nothing can be said")


def _worst(ratio: float) -> str:
    return f"worst so far {ratio:.2f}x" if ratio else "both fit nowhere yet"

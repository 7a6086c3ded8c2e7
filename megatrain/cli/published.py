"""`megatrain published`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import part_of, progress_bar
from megatrain.cli.options import Json, print_json, require_outputs


def published(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the tables and a plot to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Predict every published point from datasheets, untuned, beside the published number."""
    from analysis import published as points
    from analysis import published_report, tables

    require_outputs(folders=[out])
    with progress_bar() as progress:
        frame = points.reproduce(progress=part_of(progress, "simulating"))
        phases = points.phases()
    try:  # first to the files, see `plan`
        if out is not None:
            published_report.write(out, frame, phases)
    finally:
        if as_json:
            print_json({"points": tables.records(frame), "phases": tables.records(phases)})
        else:
            for standing, title in published_report.TITLES.items():
                rows = frame[frame["standing"] == standing]
                tables.show(rows, published_report.columns(standing), title=title)
            tables.show(phases, tables.PHASES, title=published_report.PHASES_TITLE)
            print(f"{points.summary(frame)}\n{tables.PUBLISHED_NOTE}")
    if out is not None and not as_json:
        print(f"tables and a plot written to {out}")

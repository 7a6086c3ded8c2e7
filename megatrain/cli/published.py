"""`megatrain published`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import Json, print_json, progress_bar


def published(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the tables and a plot to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Predict every published point from datasheets, nothing tuned, beside the published number."""
    from analysis import published as points
    from analysis import published_report, tables

    with progress_bar() as progress:
        progress.add_task("simulating", total=None, note="")
        frame, phases = points.reproduce(), points.phases()
    if out is not None:
        published_report.write(out, frame, phases)
    if as_json:
        print_json({"points": tables.records(frame), "phases": tables.records(phases)})
        return
    for standing, title in published_report.TITLES.items():
        rows = frame[frame["standing"] == standing]
        columns = tables.PUBLISHED_ONLY if standing == "not predicted" else tables.PUBLISHED
        tables.show(rows, columns, title=title)
    tables.show(phases, tables.PHASES, title=published_report.PHASES_TITLE)
    print(f"{points.summary(frame)}\n{tables.PUBLISHED_NOTE}")

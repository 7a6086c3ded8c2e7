"""`megatrain export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import ScheduleFile, require_input, require_outputs, schedule_to_show, trace_of


def export(
    schedule: ScheduleFile,
    chakra: Annotated[Path, typer.Option(help="Write a Chakra execution trace: protobuf if .et, else JSON.")],
    trace: Annotated[Path | None, typer.Option(help="Export this run of the schedule, with its times.")] = None,
) -> None:
    """Write a schedule for other tools: as an MLCommons Chakra execution trace."""
    from analysis import chakra as chakra_traces

    require_input(schedule, *([] if trace is None else [trace]))
    require_outputs(files=[chakra])
    step = schedule_to_show(schedule)
    count = chakra_traces.write(chakra, step, None if trace is None else trace_of(step, trace))
    print(f"{count:,} nodes written to {chakra}")

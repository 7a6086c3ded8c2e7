"""Commands on runs that are over: import, timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain.cli.bars import stages
from megatrain.cli.options import (
    Accumulation,
    Json,
    Precision,
    Seq,
    print_json,
    require_input,
    require_outputs,
    schedule_to_show,
    workload_of,
)
from schedules.errors import InputError

if TYPE_CHECKING:
    from schedules.schedule import Schedule
    from schedules.trace import Trace

IMPORTED = ("queues.csv", "schedule.json", "trace.json")


def import_trace(
    file: Annotated[Path, typer.Argument(help="What torch.profiler exported: .json or .json.gz.", show_default=False)],
    model: Annotated[str, typer.Option("--model", "-m", help="The model that was trained: a name or config.json.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write schedule.json and trace.json to this folder.")],
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences per micro-batch in that run.")],
    seq: Seq,
    accumulation: Accumulation = 1,
    precision: Precision = "bf16",
    as_json: Json = False,
) -> None:
    """Read a step of your own training run from a PyTorch profiler's trace."""
    from analysis import kineto, tables
    from schedules import codec, presets
    from schedules.files import write_text
    from sim.units import rate, seconds

    require_input(file)
    require_outputs(folders=[out])
    if file.resolve() in {(out / name).resolve() for name in IMPORTED}:
        raise InputError(f"{file} would be written over: give another folder than {out}")
    workload = workload_of(batch, accumulation, seq, precision, None)
    recording = kineto.read(file, presets.load(model), workload)
    queues = kineto.queues(recording)
    try:  # first to the files, see `plan`
        write_text(out / "queues.csv", queues.to_csv(index=False))
        codec.save(recording.schedule, out / "schedule.json")
        recording.trace.save(out / "trace.json")
    finally:
        lasted = recording.step_ns / 1e9
        tokens = workload.tokens_per_step * recording.steps / lasted
        if as_json:
            found = {"recorded": recording.step, "machine": recording.trace.machine, "steps": recording.steps}
            found |= {"step_s": lasted / recording.steps, "tokens_per_s": tokens}
            print_json({**found, "queues": tables.records(queues)})
        else:
            title = f"{recording.step} on {recording.trace.machine}"
            tables.show(queues, tables.QUEUES, title=title, note=tables.QUEUES_NOTE)
            what = "step" if recording.steps == 1 else f"{recording.steps} steps"
            print(f"{what} of {seconds(lasted)}: {rate(tokens)} tokens/s")
    if not as_json:
        print(f"written to {out}: {', '.join(IMPORTED)}")


def timeline(
    files: Annotated[list[Path], typer.Argument(help="Trace files and their schedule files, in any order.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write gantt.png, .svg, .csv and timeline.json here.")],
) -> None:
    """Draw runs below each other: a picture of one steady step each, and a timeline for ui.perfetto.dev."""
    from analysis import figure, gantt, perfetto

    require_input(*files)
    require_outputs(folders=[out])
    with stages() as begin:
        begin("reading")
        runs = _runs(files)
        begin("drawing")
        perfetto.write(out / "timeline.json", runs)
        figure.save(figure.figure_of(gantt.gantt(runs)), out / "gantt", gantt.gantt_data(runs))
    print(f"written to {out}: gantt.png, gantt.svg, gantt.csv, timeline.json")


def _runs(files: list[Path]) -> list[tuple[Schedule, Trace]]:
    """Each trace with its schedule, found by digest, in the order of the traces."""
    from schedules.file_kinds import SCHEDULE, TRACE, kind_of_file
    from schedules.trace import Trace

    schedules, traces = {}, []
    for path in files:
        kind = kind_of_file(path)
        if kind == TRACE:
            traces.append((path, Trace.read(path)))
        elif kind == SCHEDULE:
            schedule = schedule_to_show(path)
            schedules[schedule.digest] = schedule
        else:
            raise InputError(f"{path} is neither a trace nor a schedule of ours; a profiler's: megatrain import {path}")
    if not traces:
        raise InputError("none of the files is a trace; write one with: megatrain simulate ... --trace FILE")
    for path, trace in traces:
        if trace.digest not in schedules:
            raise InputError(f"{path} is of schedule {trace.digest[:8]}, whose file was not given")
        trace.check(schedules[trace.digest])
        if not trace.steps:
            raise InputError(f"{path} holds no op of any step: there is nothing to draw")
    return [(schedules[trace.digest], trace) for _, trace in traces]

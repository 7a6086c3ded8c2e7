"""`megatrain compare`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain.cli.bars import progress_bar
from megatrain.cli.options import (
    Accumulation,
    Batch,
    Clip,
    Hardware,
    Json,
    Matmul,
    Models,
    ModelsToo,
    Optimizer,
    Precision,
    Recompute,
    Seq,
    Set,
    given,
    listed,
    machine_of,
    models_of,
    note_idle,
    note_length,
    note_peak,
    print_json,
    require_outputs,
    workload_of,
)
from schedules.errors import InputError, Refused

if TYPE_CHECKING:
    import pandas as pd

    from analysis.varied import Point
    from schedules.model import ModelSpec
    from schedules.workload import Workload
    from sim.machine import HardwareProfile


def compare(
    context: typer.Context,
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
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
    clip: Clip = None,
    recompute: Recompute = "none",
    change: Set = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="An option of the step, a knob of the policies, a number of the machine, or hardware, and the values "
            "to try: batch=1,2,4 or slots=2,3 or host.memory=96GB,192GB or hardware=h100,h200. Repeatable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a plot and its data to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Predict every policy on every model of a list, beside ZeRO-3 offload; with --vary, at each of many points."""
    from analysis import compare as comparison
    from analysis import figure, lines, plots, tables, varied
    from analysis.axes import axes_of
    from megatrain.terminal import print_words
    from schedules import policies
    from sim.cost import fp8_rate
    from sim.hardware import load

    require_outputs(folders=[out])
    profile = machine_of(hardware, change)
    workload = workload_of(batch, accumulation, seq, precision, clip, recompute, optimizer, matmul)
    axes = axes_of(vary or [])
    _require_said_once(context, change or [], axes)
    precisions = axes.get("precision", [precision])
    same_state = [comparison.SAME_STATE] if set(precisions) & set(comparison.OUR_PRECISIONS) else []
    chosen = listed(policy or []) or [*policies.comparable(), *same_state]
    for name in chosen:
        policies.with_knobs(name)  # tells which is not there before any is simulated
    policies.require_apart(chosen)
    chosen = list(dict.fromkeys(chosen))
    specs = models_of(models, models_too)
    points = varied.points(specs, chosen, load(hardware), change or [], workload, axes)
    _note_unvaried(chosen, axes)
    for spec in specs:
        note_length(spec, max(point.workload.seq_len for point in points))
    for name in axes.get(varied.MACHINE, [hardware]):
        at_one = next(point.profile for point in points if point.values.get(varied.MACHINE, hardware) == name)
        note_idle(load(name).name, at_one, list(axes))
    if not axes and matmul is not None and profile.mode == "datasheet":
        fp8_rate(profile, workload)  # or every row would say that there is none
    frame = _at_points(points) if axes else _at_one_step(specs, chosen, profile, workload, refused_too=policy is None)
    setting = varied.setting(workload, profile.name, axes)
    shares = frame[["mfu", "hfu"]].max(axis=1).where(frame["matmul"].eq("none")).fillna(0.0)
    highest = points[int(shares.argmax()) // len(chosen)]  # rows by point, and of each a row for every policy
    note_peak(highest.profile, highest.workload, shares.max())
    try:  # first to the file, see `plan`
        if out is not None:
            drawn = lines.throughput(frame, axes, setting) if axes else figure.figure_of(plots.throughput(frame))
            figure.save(drawn, out / "throughput", frame)
    finally:
        if as_json:
            print_json(tables.records(frame))
        else:
            if axes:
                tables.show_varied(frame, list(axes), setting)
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
    if not frame["fits"].eq(True).any():  # a row that is not predicted is no yes, beside others or alone
        where = ", ".join(axes.get(varied.MACHINE, [profile.name]))
        unknown = frame["reason"][frame["fits"].isna()]
        if unknown.empty:
            raise Refused(f"none of these fits {where}")
        if len(unknown) < len(frame):
            raise Refused(f"none of these is predicted to fit {where}; the first not predicted: {unknown.iloc[0]}")
        raise InputError(f"none of these is predicted: {unknown.iloc[0]}")


def _note_unvaried(names: Sequence[str], axes: Mapping[str, list[str]]) -> None:
    """Say which policies take no value of an axis that is a knob of others."""
    from analysis.varied import varied_knobs

    taken = {name: varied_knobs(name, axes) for name in names}
    for axis in dict.fromkeys(knob for knobs in taken.values() for knob in knobs):
        if others := [name for name, knobs in taken.items() if axis not in knobs]:
            told = f"note: {axis} is not varied of {', '.join(others)}: the same at all its values"
            print(told, file=sys.stderr)


def _at_one_step(
    specs: Sequence[ModelSpec],
    names: Sequence[str],
    profile: HardwareProfile,
    workload: Workload,
    *,
    refused_too: bool,
) -> pd.DataFrame:
    from analysis import compare as comparison

    found = []
    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(specs) * len(names), note="")
        for spec in specs:
            for row in comparison.rows(spec, names, profile, workload, refused_too=refused_too):
                found.append(row)
                bar.update(task, advance=1, note=f"{row.model} {row.policy}")
    return comparison.frame(found)


def _at_points(points: Sequence[Point]) -> pd.DataFrame:
    from analysis import varied

    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(points), note="")
        return varied.run(points, progress=lambda point: bar.update(task, advance=1, note=point.told))


def _require_said_once(context: typer.Context, changes: list[str], axes: Mapping[str, list[str]]) -> None:
    """Raises InputError where something is varied and has a value as well: one of the two would be hidden."""
    from analysis.varied import MACHINE, STEP

    numbers = {change.partition("=")[0].strip() for change in changes}
    said = [
        *given(context, [axis for axis in axes if axis in (*STEP, MACHINE)]),
        *(f"--set {path}" for path in axes if path in numbers),
    ]
    if said:
        raise InputError(f"{said[0]} gives a value to what is varied: leave out one of them")

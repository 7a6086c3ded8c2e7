"""`megatrain sweep`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import goes_on, progress_bar
from megatrain.cli.options import (
    Clip,
    Json,
    Matmul,
    Models,
    ModelsToo,
    Optimizer,
    Precision,
    ResumedOut,
    Seq,
    Tokens,
    command_line,
    listed,
    models_of,
    note_length,
    print_json,
    require_outputs,
)
from schedules.errors import InputError, Refused


def sweep(
    prices: Annotated[
        Path, typer.Option("--prices", help="Your prices, in the form of docs/prices.yaml.", show_default=False)
    ],
    models: Models = None,
    models_too: ModelsToo = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            "--hardware",
            "-H",
            "--profile",
            help="A machine, or several: a,b. Repeatable; all that have a price if left out.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", help="A number and the values to try: host.memory=128GiB,256GiB. Repeatable."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help='A policy, with any knobs: "streamed nvme=4"; or several: a,b. Repeatable; the best plan if left out. '
            'plan-adapters, or "plan-adapters quantised=nf4 rank=8", is the best plan for LoRA.',
        ),
    ] = None,
    tokens: Tokens = 65536,
    seq: Seq = 4096,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
    clip: Clip = None,
    train_tokens: Annotated[
        float, typer.Option(min=1.0, max=1e18, help="Tokens to train on, for time and cost.")
    ] = 1e9,
    out: ResumedOut = Path("results/sweep"),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core if left out.")] = None,
    dask: Annotated[str | None, typer.Option(help="Run on this Dask cluster: tcp://host:port.")] = None,
    as_json: Json = False,
) -> None:
    """Plan models on many machines, real and imagined, with what each costs: before buying one."""
    from analysis import buying, costs, tables
    from analysis import prices as price_files
    from analysis import sweep as sweeps

    require_outputs(folders=[out])
    paid = price_files.read(prices)
    chosen = listed(policy or []) or [sweeps.PLAN]
    sweeps.require_training(chosen)
    specs = models_of(models, models_too)
    for spec in specs:
        note_length(spec, seq)
    if not hardware:
        _require_known(prices, paid.machines)
    points = sweeps.points(
        specs,
        listed(hardware) if hardware else list(paid.machines),
        vary or [],
        chosen,
        seq_len=seq,
        tokens_per_step=tokens,
        precision=precision,
        grad_clip=clip,
        optimizer=optimizer,
        matmul=matmul,
    )
    for point in points:  # tells what is missing before anything is computed
        memory = point.profile.host.memory.value
        paid.of(point.machine, more_host_bytes=costs.more_host_bytes(point.machine, memory))
    for machine in dict.fromkeys(point.machine for point in points):
        if (name := paid.stands_under(machine)) not in (machine, Path(machine).name.removesuffix(".json")):
            print(f"note: {machine} has the price of {name}, which its profile is called", file=sys.stderr)
    with goes_on(), progress_bar() as bar:
        task = bar.add_task("sweeping", total=len(points), note="")
        rows = sweeps.run(
            points,
            out / "rows.jsonl",
            workers=workers,
            dask=dask,
            progress=lambda done, total, note: bar.update(task, completed=done, note=f"{done} of {total} {note}"),
        )
    table = costs.priced(rows, paid, train_tokens)
    page: Path | None = None
    try:  # first to the files, see `plan`
        page = buying.write(out, table, paid, train_tokens, command_line())
    finally:
        told = buying.with_never(table, paid)
        if as_json:
            print_json(tables.records(told))
        else:
            note = f"{buying.step(table, train_tokens)} {buying.note(table)} Predicted; prices are those of your file."
            columns = buying.columns(paid, table)
            for model, of_model in told.groupby("model", sort=False):
                tables.show(of_model.sort_values("cost", na_position="last"), columns, title=str(model), note=note)
            if page is not None:
                print(f"pictures and all numbers: {page}")
    if not table["fits"].any():
        raise Refused(f"at none of these points does anything fit; of the first: {table['reason'].iloc[0]}")


def _require_known(prices: Path, machines: Iterable[str]) -> None:
    """Raises InputError where a price has no machine: those of files are named with --hardware."""
    from sim.hardware import load

    for machine in machines:
        try:
            load(machine)
        except InputError as error:
            raise InputError(
                f"{prices} has a price for {machine}, a machine that is not known by that name: say which are to be "
                f"compared with --hardware, {machine} by its file ({error})"
            ) from None

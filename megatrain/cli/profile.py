"""`megatrain profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import (
    Accumulation,
    Batch,
    Clip,
    Precision,
    Seq,
    goes_on,
    progress_bar,
    require_outputs,
    shape_of,
    workload_of,
)
from schedules.workload import RECOMPUTED


def profile(
    model: Annotated[str, typer.Argument(help="The model whose layers are timed.")] = "demo",
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the profile here.")] = Path("profile.json"),
    batch: Batch = 4,
    accumulation: Accumulation = 2,
    seq: Seq = 256,
    precision: Precision = "fp32",
    clip: Clip = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            "--recompute",
            help=f"What blocks recompute in backward: {', '.join(RECOMPUTED)}. Repeatable; none if left out.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape to time, micro-batch x sequence: 2x128. Repeatable; five up to BATCH x SEQ if left out."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="A policy whose ops are timed. Repeatable; all if left out."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    nvme: Annotated[Path | None, typer.Option(help="A folder on a drive, to measure that too.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Time ops as run --fused computes them.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Time ops as run --graphs launches them.")] = False,
) -> None:
    """Measure this machine: copies, layers, memory, optimizer, drive, issue cost. Every --hardware takes the file.

    Shapes between the timed ones are predicted from them, and so is any number of micro-batches from two. A plan
    considers what was timed: give --recompute once for each way it should consider. An interrupted
    measurement resumes when run again.
    """
    from functools import partial

    from megatrain.profile import covering, measure, shapes_between, shapes_up_to
    from megatrain.session import backend_of
    from megatrain.way import Way
    from schedules import policies as known
    from schedules import presets
    from schedules.schedule import Schedule
    from schedules.workload import MemoryBudget
    from sim.hardware import save

    require_outputs(files=[out])
    spec = presets.load(model)
    everything = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40, nvme_bytes=1 << 40 if nvme else 0)
    shapes = [shape_of(text) for text in shape] if shape else shapes_up_to(batch, seq)

    def built(shapes: list[tuple[int, int]]) -> list[Schedule]:
        modes = dict.fromkeys(recompute or ["none"])
        workloads = [workload_of(b, accumulation, s, precision, clip, mode) for mode in modes for b, s in shapes]
        return [known.build(name, spec, w, everything) for w in workloads for name in policy or known.comparable()]

    with goes_on(), progress_bar() as progress:
        task = progress.add_task("measuring", total=1.0, note="")
        measured = measure(
            spec,
            covering(built(shapes)),
            progress=lambda done, note: progress.update(task, completed=done, note=note),
            machine=partial(backend_of, backend),
            nvme=nvme,
            way=Way(fused=fused, graphs=graphs),
            memory=covering(built(shapes_between(shapes))) if len(shapes) > 1 else (),
            parts=out.with_name(out.name + ".parts"),
        )
    save(measured, out)
    print(f"written to {out}; use it with --hardware {out}")

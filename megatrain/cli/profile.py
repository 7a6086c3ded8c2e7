"""`megatrain profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.bars import goes_on, part_of, progress_bar, stages
from megatrain.cli.options import (
    Accumulation,
    Backend,
    Batch,
    Clip,
    Matmul,
    Optimizer,
    Precision,
    Seq,
    listed,
    require_outputs,
    require_unix,
    shape_of,
    workload_of,
)
from schedules.errors import Refused
from schedules.workload import RECOMPUTED


def profile(
    model: Annotated[str, typer.Argument(help="The model whose layers are timed.")] = "demo",
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the profile here.")] = Path("profile.json"),
    batch: Batch = 4,
    accumulation: Accumulation = 2,
    seq: Seq = 256,
    precision: Precision = "fp32",
    optimizer: Optimizer = "adamw",
    matmul: Matmul = None,
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
        typer.Option(
            "--policy",
            "-p",
            help='A policy whose ops are timed, with any knobs: "streamed slots=3"; or several: a,b. Repeatable; '
            "all if left out.",
        ),
    ] = None,
    backend: Backend = None,
    nvme: Annotated[Path | None, typer.Option(help="A folder on a drive, to measure that too.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Time ops as run --fused computes them.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Time ops as run --graphs launches them.")] = False,
) -> None:
    """Measure this machine: copies, layers, memory, optimizer, drive, issue cost. Every --hardware takes the file.

    Shapes between the timed ones are predicted from them, and so is any number of micro-batches from two. A plan
    considers what was timed: give --recompute once for each way it should consider. Of a long model a few blocks are
    timed, so that one with no room here can be measured all the same. What needs more memory even so is left out, and
    its policy named. An interrupted measurement resumes when run again.
    """
    require_unix()
    import itertools
    from functools import partial

    from megatrain.fitting import told_left_out
    from megatrain.profile import measure
    from megatrain.representatives import representatives, shapes_between, shapes_up_to
    from megatrain.this_machine import backend_of, machine_here
    from megatrain.way import Way
    from schedules import policies as known
    from schedules import presets
    from schedules.fp8 import ALIGNED
    from schedules.model import ModelSpec
    from schedules.schedule import Schedule

    require_outputs(files=[out])
    spec = presets.load(model)
    way, machine = Way(fused=fused, graphs=graphs), partial(backend_of, backend)
    here = machine_here(machine, nvme)
    way.require(on_gpu=here.on_gpu)
    multiple = 1 if matmul is None else ALIGNED
    shapes = [shape_of(text) for text in listed(shape or [])] or shapes_up_to(batch, seq, multiple)
    chosen = [known.with_knobs(text) for text in listed(policy or []) or known.comparable()]

    refused = dict[str, None]()

    def built(shapes: list[tuple[int, int]], of: ModelSpec) -> list[Schedule]:
        modes = dict.fromkeys(listed(recompute or []) or ["none"])
        workloads = [
            workload_of(b, accumulation, s, precision, clip, mode, optimizer, matmul)
            for mode in modes
            for b, s in shapes
        ]
        found = []
        for (name, knobs), of_step in itertools.product(chosen, workloads):
            try:
                found.append(known.build(name, of, of_step, here.budget, **knobs))
            except known.PolicyError:  # of all policies some may refuse this step
                if policy:
                    raise
                refused[name] = None
        return found

    with stages() as begin:
        begin("choosing what to measure")
        timed, left = representatives(spec, partial(built, shapes), here)
        others = shapes_between(shapes, multiple=multiple) if len(shapes) > 1 else []
        between, too = representatives(spec, partial(built, others), here, "computed")
    if refused:
        print(f"note: not timed, since they refuse such a step: {', '.join(refused)}", file=sys.stderr)
    for line in told_left_out([*timed, *between], [*left, *too]):
        print(f"note: {line}", file=sys.stderr)
    if not timed:
        raise Refused(f"nothing to measure: no step of {spec.name} fits this machine")
    with goes_on(), progress_bar() as progress:
        measure(
            timed,
            progress=part_of(progress, "measuring"),
            machine=machine,
            nvme=nvme,
            way=way,
            memory=between,
            parts=out.with_name(out.name + ".parts"),
            out=out,
        )
    print(f"written to {out}; use it with --hardware {out}")

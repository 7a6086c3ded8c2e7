"""`megatrain profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatrain.cli.options import Accumulation, Batch, Clip, Precision, Seq, progress_bar, workload_of


def profile(
    model: Annotated[str, typer.Argument(help="The model whose layers are timed.")] = "demo",
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the profile here.")] = Path("profile.json"),
    batch: Batch = 4,
    accumulation: Accumulation = 1,
    seq: Seq = 256,
    precision: Precision = "fp32",
    clip: Clip = None,
) -> None:
    """Measure this machine: copies, layers, optimizer, issue cost. The file serves --hardware anywhere."""
    from megatrain.profile import measure
    from schedules import policies as known
    from schedules import presets
    from schedules.workload import MemoryBudget
    from sim.hardware import save

    workload = workload_of(batch, accumulation, seq, precision, clip)
    spec = presets.load(model)
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=1.0, note="")
        everything = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
        measured = measure(
            spec,
            [known.build(policy, spec, workload, everything) for policy in known.names()],
            progress=lambda done, note: progress.update(task, completed=done, note=note),
        )
    save(measured, out)
    print(f"written to {out}; use it with --hardware {out}")

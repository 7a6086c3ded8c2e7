"""What each precision keeps of small updates: python benchmarks/precision.py [--steps 1000] [--out FILE.md]

Trains a small model on a CPU from the same weights and text in every precision, at small learning rates, and compares
the weights with those of fp32. Precisions without a master round stochastically; beside them are the same with rounding
to nearest, as torch's optimizers have it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from megatrain import adam, adam_state
from megatrain.cpu import CpuBackend
from megatrain.data import ByteText, read_bytes, standard_library
from megatrain.initial import random_parameters
from megatrain.native import adam as native
from megatrain.this_machine import machine_name, today
from megatrain.train import Trainer
from schedules import policies, presets
from schedules.files import write_text
from schedules.verify import verify
from schedules.workload import PRECISIONS, MemoryBudget, Workload

MODEL, BATCH, SEQ_LEN, TEXT = "tiny", 4, 64, 1 << 20
RATES = (1e-5, 1e-4)
REFERENCE = "fp32"
NEAREST = tuple(name for name, p in PRECISIONS.items() if p.weight == 2 and name not in adam_state.MASTERS)
ROOM = MemoryBudget(device_bytes=1 << 32, host_bytes=1 << 32)
LARGE = 0.01  # weights below are few units of bf16 from zero, and change at any rate
AVERAGED = 20  # steps of a loss


@dataclass(frozen=True)
class Trained:
    """One training: its losses, and all weights before and after it, fp32, those of norms apart."""

    losses: Sequence[float]
    before: Tensor
    after: Tensor
    norms: Tensor  # bool, which of them are


@contextmanager
def to_nearest() -> Iterator[None]:
    """Where weights and moments are rounded stochastically, they are not."""
    compiled, rounded = native.kernel, adam.round_to
    native.kernel = lambda: None
    adam.round_to = lambda target, values, bits: target.copy_(values)
    try:
        yield
    finally:
        native.kernel, adam.round_to = compiled, rounded


def train(precision: str, lr: float, steps: int) -> Trained:
    model = presets.load(MODEL)
    workload = Workload(micro_batch_size=BATCH, seq_len=SEQ_LEN, precision=precision)
    data = ByteText(text=read_bytes(standard_library(), TEXT), workload=workload, seed=0)
    schedule = policies.build("resident", model, workload, ROOM)
    initial = random_parameters(model, 0)
    norms = [len(shape) == 1 for i in model.layers for shape in model.parameter_shapes(i).values()]
    sizes = [torch.Size(shape).numel() for i in model.layers for shape in model.parameter_shapes(i).values()]

    def weights() -> Tensor:
        return torch.cat([trainer.parameters(i) for i in model.layers])

    with Trainer(verify(schedule), CpuBackend(), data, adam.Adam(lr=lr), initial=initial) as trainer:
        before = weights()
        losses = trainer.run(steps)
        return Trained(losses, before, weights(), torch.tensor(norms).repeat_interleave(torch.tensor(sizes)))


def row(precision: str, lr: float, found: Trained, right: Trained) -> str:
    still = found.after == found.before
    large = found.before.abs() > LARGE
    went = (right.after - right.before).norm()
    # both from the weights they began with, which bf16 has rounded
    apart = ((found.after - found.before) - (right.after - right.before)).norm() / went
    first, last = (statistics.fmean(part) for part in (found.losses[:AVERAGED], found.losses[-AVERAGED:]))
    shares = [f"{still[of].float().mean().item():.0%}" for of in (large & ~found.norms, found.norms)]
    return f"| {precision} | {lr:.0e} | {shares[0]} | {shares[1]} | {apart.item():.0%} | {first:.3f} to {last:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=None, help="a Markdown file to write as well")
    options = parser.parse_args()
    points = [(lr, name, nearest) for lr in RATES for name in PRECISIONS for nearest in (False, True)]
    points = [point for point in points if not point[2] or point[1] in NEAREST]
    reference = {lr: train(REFERENCE, lr, options.steps) for lr in RATES}
    rows = []
    for lr, precision, nearest in track(points, "training", transient=True):
        if precision == REFERENCE:
            rows.append(row(precision, lr, reference[lr], reference[lr]))
        elif nearest:
            with to_nearest():
                rows.append(row(f"{precision}, to nearest", lr, train(precision, lr, options.steps), reference[lr]))
        else:
            rows.append(row(precision, lr, train(precision, lr, options.steps), reference[lr]))
    lines = [
        "# What precisions keep of small updates",
        "",
        f"`python {' '.join(sys.argv)}`, {today()}, measured: {machine_name()}, torch {torch.__version__}. `{MODEL}`, "
        f"{options.steps} steps of {BATCH} sequences of {SEQ_LEN} bytes of Python's source files, from the same random "
        f"weights. Apart: how far weights end from where {REFERENCE} leads, as a share of the way it "
        f"leads. Losses are means of the first and of the last {AVERAGED} steps. What never changed in {REFERENCE} "
        "either are embeddings of bytes that the text has not.",
        "",
        f"| precision | learning rate | weights above {LARGE} that never changed | norms that never changed | apart | "
        "loss |",
        "|---|---:|---:|---:|---:|---|",
        *rows,
    ]
    print("\n".join(lines))
    if options.out is not None:
        write_text(options.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

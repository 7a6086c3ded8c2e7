"""What `megatrain validate` leaves behind: one page with its tables, a scatter plot, and the CSV behind both."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from analysis import figure, plots, tables, validation
from analysis.files import whole, write_text
from megatrain.validate import WARMUP, Grid, Point
from sim.machine import HardwareProfile

PACKAGES = ("torch", "simpy", "numpy", "scipy", "pandas")


def write(
    folder: Path,
    grid: Grid,
    points: Sequence[Point],
    profile: HardwareProfile,
    command: str,
    progress: Callable[[float, str], None],
) -> pd.DataFrame:
    """Write everything; returns the rows of all points. Raises InputError when the folder cannot be written."""
    progress(0.0, "replaying and predicting")
    table = validation.rows(points, profile)
    progress(0.5, "the ladder")
    steps = validation.ladder(points, profile)
    classes = validation.by_class(points, profile)
    streams = validation.by_class(points, profile, lambda op: str(op.stream))
    progress(0.9, "drawing")
    picture = figure.figure_of(plots.validated(table))
    figure.save(picture, folder / "predicted_measured", table)
    for name, part in (("ladder", steps), ("op_classes", classes), ("streams", streams)):
        with whole(folder / f"{name}.csv") as partial:
            part.to_csv(partial, index=False)
    write_text(folder / "README.md", _page(grid, points, profile, table, steps, classes, streams, command))
    progress(1.0, "")
    return table


def headline(table: pd.DataFrame) -> pd.DataFrame:
    """Both levels in one table of two lines."""
    levels = (("replay: the run's own op times", "replay_error"), ("predict: the profile alone", "predict_error"))
    return pd.DataFrame([{"level": name, **vars(validation.summary(table[error]))} for name, error in levels])


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) > 1 else ''}"


def _page(
    grid: Grid,
    points: Sequence[Point],
    profile: HardwareProfile,
    table: pd.DataFrame,
    steps: pd.DataFrame,
    classes: pd.DataFrame,
    streams: pd.DataFrame,
    command: str,
) -> str:
    tau, regret = validation.ranking(table)
    machine = points[0].rounds[0].machine
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    seen = ", ".join(f"{b} x {s}" for b, s in grid.calibrated)
    held = ", ".join(f"{b} x {s}" for b, s in grid.held_out)
    columns = tables.summaries
    parts = [
        "# Predictions against runs",
        f"{machine}, {datetime.datetime.now(datetime.UTC).date().isoformat()}, Python {platform.python_version()}, "
        f"{versions}. Made by `{command}`.",
        f"{len(table)} points: {_count(grid.models, 'model')} x {_count(grid.policies, 'schedule')} x "
        f"{_count(grid.held_out, 'shape')}, {grid.precision}. The profile ({profile.date}) saw the shapes {seen} "
        "(micro-batch x sequence), one op at a time, and what ops share with "
        f"`{grid.models[0].name}` only; the runs have the shapes {held}. "
        "No run is of a shape that was profiled, and nothing is fitted to a run. Each point was run in "
        f"{grid.rounds} rounds of {grid.steps} steps, the first {WARMUP} left out; rounds go over the whole grid, and "
        "each model's ops are timed anew before its runs, so that both see the machine at the same pace.",
        tables.markdown(headline(table), columns("level", "level")),
        f"Machine noise, the difference between rounds of one point: median {table['noise'].median():.1%}, largest "
        f"{table['noise'].max():.1%}. Choosing a policy by prediction: Kendall's tau {tau:.2f}, regret {regret:.2%}. "
        "Peak bytes: buffers are exact, since a run allocates each once at its declared size and refuses activations "
        f"that are larger than theirs; workspace is predicted to {table['workspace_error'].abs().max():.1%} at worst, "
        f"to {table['workspace_error'].abs().median():.1%} at the median.",
        "![predicted against measured](predicted_measured.png)",
        "## By policy",
        "A simulator that flatters one schedule invents a speed-up: errors should not depend on the policy.",
        tables.markdown(validation.by(table, "policy", "predict_error"), columns("policy", "policy")),
        "## By model",
        tables.markdown(validation.by(table, "model", "predict_error"), columns("model", "model")),
        "## The ladder: what each cost term buys",
        tables.markdown(steps, columns("terms", "cost terms")),
        "## By class of op",
        "Time of all ops of a class in one step, summed over the points, sharing included. w: weights, g: gradients, "
        "s: saved activations, o: optimizer state.",
        tables.markdown(classes, tables.classes("ops")),
        "## By stream",
        "How long streams work in a step, summed over the points.",
        tables.markdown(streams, tables.classes("stream")),
        "## Every point",
        tables.markdown(table, tables.VALIDATED),
        tables.VALIDATED_NOTE,
        *(["## On a GPU", "Not measured."] if grid.backend == "cpu" else []),
    ]
    return "\n\n".join(parts) + "\n"

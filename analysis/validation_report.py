"""What `megatrain validate` leaves behind: one page with its tables, a scatter plot, and the CSV behind both.

`python -m analysis.validation_report FOLDER` makes page and picture anew from the CSV files, without the traces.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from analysis import figure, plots, tables, validation
from megatrain.this_machine import today
from megatrain.validate import WARMUP, Grid, Point
from schedules.errors import InputError
from schedules.files import write_text
from sim.machine import HardwareProfile
from sim.prediction import CLASS_NAMES

PACKAGES = ("torch", "simpy", "numpy", "scipy", "pandas")
NOT_MEASURED = "## On a GPU\n\nNot measured."
_PARTS = ("ladder", "op_classes", "streams")  # CSV files beside that of all points
_HEAD = 3  # paragraphs of the page, its title first, that say what was run; all else is made from the CSV files


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
    for name, part in zip(_PARTS, (steps, classes, streams), strict=True):
        write_text(folder / f"{name}.csv", part.to_csv(index=False))
    ending = [NOT_MEASURED] if grid.backend == "cpu" else []
    _draw(folder, _head(grid, points, profile, command), table, [steps, classes, streams], ending)
    progress(1.0, "")
    return table


def rebuild(folder: Path) -> None:
    """Make page and picture anew from the CSV files in the folder; what the page says was run stays as it is.

    Raises:
        InputError: the page or a CSV file is not there, or the folder cannot be written.
    """
    try:
        old = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")
        table = pd.read_csv(folder / "predicted_measured.csv")
        parts = [pd.read_csv(folder / f"{name}.csv") for name in _PARTS]
    except OSError as error:
        raise InputError(f"{folder} holds no validation: {error}") from None
    ending = [NOT_MEASURED] if "\n\n".join(old).rstrip().endswith(NOT_MEASURED) else []
    _draw(folder, old[:_HEAD], table, parts, ending)


def _draw(
    folder: Path, head: Sequence[str], table: pd.DataFrame, parts: Sequence[pd.DataFrame], ending: Sequence[str]
) -> None:
    figure.save(figure.figure_of(plots.validated(table)), folder / "predicted_measured", table)
    write_text(folder / "README.md", "\n\n".join([*head, *_body(table, *parts), *ending]) + "\n")


def headline(table: pd.DataFrame) -> pd.DataFrame:
    """Both levels in one table of two lines."""
    levels = (("replay: the run's own op times", "replay_error"), ("predict: the profile alone", "predict_error"))
    return pd.DataFrame([{"level": name, **vars(validation.summary(table[error]))} for name, error in levels])


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _head(grid: Grid, points: Sequence[Point], profile: HardwareProfile, command: str) -> list[str]:
    """What was run, where and when."""
    machine = points[0].rounds[0].machine
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    seen = ", ".join(f"{b} x {s}" for b, s in grid.calibrated)
    held = ", ".join(f"{b} x {s}" for b, s in grid.held_out)
    found = [
        "# Predictions against runs",
        f"{machine}, {today()}, Python {platform.python_version()}, {versions}. Made by `{command}`.",
        f"{_count(len(points), 'point')}: {_count(len(grid.models), 'model')} x "
        f"{_count(len(grid.policies), 'schedule')} x {_count(len(grid.held_out), 'shape')}, {grid.precision}. "
        f"The profile ({profile.date}) saw the shapes {seen} (micro-batch x sequence), one op at a time, and what "
        f"ops share with a block of each model; the runs have the shapes {held}. "
        "No run is of a shape that was profiled, and nothing is fitted to a run. Each point was run in "
        f"{_count(grid.rounds, 'round')} of {grid.steps} steps, the first {WARMUP} left out; rounds go over "
        "the whole grid, and each model's ops are timed anew before its runs, so that both see the machine at the "
        "same pace.",
    ]
    assert len(found) == _HEAD
    return found


def machine_noise(table: pd.DataFrame) -> str:
    """By how much rounds of one point differ, in a sentence: the yardstick of the errors."""
    noise = table["noise"].dropna()
    if noise.empty:
        return "One round says nothing of the machine's noise."
    told = f"median {noise.median():.1%}, largest {noise.max():.1%}"
    return f"Machine noise, the difference between rounds of one point: {told}."


def _choice(table: pd.DataFrame) -> str:
    if table["policy"].nunique() < 2:
        return "Of one policy there is none to choose."
    tau, regret = validation.ranking(table)
    return f"Choosing a policy by prediction: Kendall's tau {tau:.2f}, regret {regret:.2%}."


def _body(table: pd.DataFrame, steps: pd.DataFrame, classes: pd.DataFrame, streams: pd.DataFrame) -> list[str]:
    """All that the tables say."""
    columns = tables.summaries
    return [
        tables.markdown(headline(table), columns("level", "level")),
        f"{machine_noise(table)} {_choice(table)} "
        "Peak bytes: buffers are exact, since a run allocates each once at its declared size and refuses activations "
        f"that are larger than theirs; workspace is predicted to {table['workspace_error'].abs().max():.1%} at worst, "
        f"to {table['workspace_error'].abs().median():.1%} at the median.",
        "![predicted against measured](predicted_measured.png)",
        "## By policy",
        "A simulator that flatters one schedule invents a speed-up: errors should not depend on the policy.",
        tables.markdown(validation.by(table, "policy"), columns("policy", "policy")),
        "## By model",
        tables.markdown(validation.by(table, "model"), columns("model", "model")),
        "## The ladder: what each cost term buys",
        tables.markdown(steps, columns("terms", "cost terms")),
        "## By class of op",
        "Time of all ops of a class in one step, summed over the points, sharing included. Of copies the last word is "
        f"what they carry, {_legend(classes)}.",
        tables.markdown(classes, tables.classes("ops")),
        "## By stream",
        "How long streams work in a step, summed over the points.",
        tables.markdown(streams, tables.classes("stream")),
        "## Every point",
        tables.markdown(table, tables.VALIDATED),
        tables.VALIDATED_NOTE,
    ]


def _legend(classes: pd.DataFrame) -> str:
    """What the letters of the copies' classes stand for."""
    letters = {str(ops).split()[-1] for ops in classes["ops"]}
    return ", ".join(f"{letter}: {name}" for letter, name in CLASS_NAMES.items() if letter in letters)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rebuild(Path(name))

"""Policies side by side over axes: options of the step, such as the micro-batch, knobs, machines and their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from analysis import compare
from analysis.pool import computed
from schedules import policies
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.words import nearest
from schedules.workload import ADAMW, Workload
from sim.hardware import changed, load
from sim.machine import NUMBERS, HardwareProfile

if TYPE_CHECKING:
    import pandas as pd

STEP = {  # options of the command line, and the fields of a workload that they are
    "batch": "micro_batch_size",
    "accumulation": "accumulation",
    "seq": "seq_len",
    "precision": "precision",
    "optimizer": "optimizer",
    "recompute": "recompute",
    "matmul": "matmul",
    "clip": "grad_clip",
}
MACHINE = "hardware"  # an axis, too: machines by their names, or files
NONE = "none"  # in place of a norm to clip to, or of a format to multiply in
_WORDS = ("precision", "optimizer", "recompute")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model, a step and a machine, and the policies that are compared there, each with those of these knobs that are
    varied of it. `values` are by axis, as written.
    """

    model: ModelSpec
    names: tuple[str, ...]
    knobs: tuple[tuple[str, ...], ...]  # of each of the names: "slots=3"
    profile: HardwareProfile
    workload: Workload
    values: Mapping[str, str]

    @property
    def told(self) -> str:
        """For people: "qwen2.5-7b batch=4 seq=1024"."""
        return " ".join([self.model.name, *(f"{name}={value}" for name, value in self.values.items())])


def column(axis: str) -> str:
    """Of a table of points, the column of an axis, which says what was asked: "vary.batch"."""
    return f"vary.{axis}"


def points(
    models: Sequence[ModelSpec],
    names: Sequence[str],
    machine: HardwareProfile,
    changes: Sequence[str],
    workload: Workload,
    axes: Mapping[str, Sequence[str]],
) -> list[Point]:
    """Every combination of models and values, in this order: the values of the last axis follow one another.

    Args:
        changes: of the machine, at all points.
        machine: where the axes have no other.
        axes: as `axes.axes_of` returns them; those that are neither an option of the step nor machines are numbers of
            the machine, or knobs, of those policies that have them and are not given them by their names.

    Raises:
        InputError: nothing is called as an axis is, or a value means nothing.
    """
    knobs = {name: varied_knobs(name, axes) for name in names}
    _require_known(axes, {knob for of in knobs.values() for knob in of}, names)
    found = []
    for model, values in itertools.product(models, itertools.product(*axes.values())):
        at = dict(zip(axes, values, strict=True))
        numbers = [f"{path}={value}" for path, value in at.items() if path in NUMBERS]
        found.append(
            Point(
                model=model,
                names=tuple(names),
                knobs=tuple(tuple(f"{knob}={at[knob]}" for knob in knobs[name]) for name in names),
                profile=changed(load(at[MACHINE]) if MACHINE in at else machine, [*changes, *numbers]),
                workload=_step(workload, at),
                values=at,
            )
        )
    return found


def varied_knobs(name: str, axes: Mapping[str, Sequence[str]]) -> list[str]:
    """Those of the axes that are knobs of a policy, and are not given it by its name.

    Raises PolicyError where it does not take one of the values.
    """
    policy, given = policies.with_knobs(name)
    found = [axis for axis in axes if axis in policies.knobs(policy) and axis not in (*STEP, MACHINE, *given)]
    for axis in found:
        for value in axes[axis]:
            policies.parse_knobs(policy, [f"{axis}={value}"])
    return found


def _require_known(axes: Iterable[str], knobs: Collection[str], names: Sequence[str]) -> None:
    for name in axes:
        if name not in (*STEP, MACHINE, *NUMBERS, *knobs):
            there = dict.fromkeys(knob for each in names for knob in policies.knobs(policies.with_knobs(each)[0]))
            if name in there:
                raise InputError(
                    f"{name} has a value wherever it is a knob of these policies: leave that out to vary it"
                )
            close = nearest(name, [*STEP, MACHINE, *NUMBERS, *there])
            known = (
                f"known: {', '.join(STEP)}, {MACHINE}, knobs of the policies, and numbers of the machine, as in "
                "host.memory=96GB,192GB"
            )
            told = f"did you mean {' or '.join(close)}?" if close else known
            raise InputError(f"nothing that can be varied is called {name!r}; {told}")


def _step(workload: Workload, at: Mapping[str, str]) -> Workload:
    for name, text in at.items():
        if name in STEP:
            try:
                workload = replace(workload, **{STEP[name]: _value(name, text)})
            except ValueError as error:
                raise InputError(f"--vary {name}={text}: {error}") from None
    return workload


def _value(name: str, text: str) -> Any:
    if name in _WORDS:
        return text
    if name in ("clip", "matmul") and text == NONE:
        return None
    if name == "matmul":
        return text
    if name == "clip":
        return _number(float, text, f"a number, or {NONE}")
    return _number(int, text, "a whole number")


def _number(kind: type[int] | type[float], text: str, what: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"give {what}") from None


def run(points: Sequence[Point], *, workers: int | None = None, progress: Callable[[Point], None]) -> pd.DataFrame:
    """A row for every policy at every point, in this order: a column per axis, as `column` names it, and those of
    `compare.Row`. Ratios are to the baseline at the same point.

    Args:
        workers: processes; one for every core that this process may use if left out.
        progress: told of every point when it is done.

    Raises:
        InputError: no policy takes the step of any point.
        Refused: a process was ended from outside.
    """
    import pandas as pd

    found: dict[int, pd.DataFrame] = {}
    for number, rows in computed(_evaluated, list(enumerate(points)), workers, "fewer cores need less memory"):
        found[number] = rows
        progress(points[number])
    table = pd.concat([found[number] for number in range(len(points))], ignore_index=True)
    if table["shortage"].str.startswith(compare.NOT_BUILT).all():
        raise InputError(table["reason"].iloc[0])
    return table


def _evaluated(numbered: tuple[int, Point]) -> tuple[int, pd.DataFrame]:
    import pandas as pd

    number, point = numbered
    named = dict(zip(point.names, point.knobs, strict=True))
    rows = compare.rows(point.model, point.names, point.profile, point.workload, more=named, refused_too=True)
    table = compare.frame(list(rows))
    asked = pd.DataFrame({column(axis): value for axis, value in point.values.items()}, index=table.index)
    return number, pd.concat([asked, table], axis="columns")


def setting(workload: Workload, machine: str, axes: Mapping[str, Sequence[str]]) -> str:
    """What all points have in common: "predicted on h100; accumulation=1, seq=1024, precision=bf16"."""
    fixed = {name: getattr(workload, field) for name, field in STEP.items() if name not in axes}
    told = ", ".join(f"{name}={value}" for name, value in fixed.items() if value not in (None, "none", ADAMW))
    return f"predicted{'' if MACHINE in axes else f' on {machine}'}; {told}"

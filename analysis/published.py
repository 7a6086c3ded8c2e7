"""What others have published, beside what we predict for it in datasheet mode. Nothing is tuned per point.

Published TFLOP/s of these systems are 6 x parameters (embeddings included) x tokens / step time, unless a point names
another formula: padding counts and attention does not. Predictions are put in the same formula, so that step times
are compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from analysis.published_point import RECOMPUTED, Point, Unit
from analysis.published_points import MI355X_PHASES, POINTS
from schedules import policies, presets
from schedules.model import ModelSpec
from schedules.op import Op, Phase, Stream
from schedules.schedule import Knob
from schedules.workload import Workload
from sim import hardware
from sim.prediction import Prediction, memory_of, predict, shortage

if TYPE_CHECKING:
    import pandas as pd

_LARGEST_BATCH = 4096


def flops_by_formula(model: ModelSpec, workload: Workload, formula: str = "") -> int:
    """FLOPs of a step as these publications count them: 6 x parameters, embeddings included, x tokens.

    By the formula RECOMPUTED the forward counts twice, and every token as attending to the whole sequence.
    """
    if formula == RECOMPUTED:
        attention = 16 * model.num_hidden_layers * model.hidden_size * workload.seq_len
        return (8 * model.total_params + attention) * workload.tokens_per_step
    return 6 * model.total_params * workload.tokens_per_step


def reproduce(
    points: Sequence[Point] = POINTS, *, progress: Callable[[float, str], None] = lambda done, note: None
) -> pd.DataFrame:
    """A row per point: published and predicted in the point's unit, and the signed error of the speed.

    `standing` is "compared", "assumed" where part of the run is unpublished, or "not predicted"; `speed` is the
    predicted speed over the published one, of times published over predicted, and `error` is that minus one. `fits`
    says whether the run fits that machine by prediction; of one that does not the speed is predicted all the same.
    `progress` is told the share that is done and the point that comes.
    """
    import pandas as pd

    found = []
    for number, point in enumerate(points):
        progress(number / len(points), f"{point.system}, {point.model}")
        found.append(_row(point))
    progress(1.0, "")
    return pd.DataFrame(found).astype({"micro_batch_size": "Int64"})  # of some points it is unpublished


def phases() -> pd.DataFrame:
    """The parts of the MI355X step: `phase`, `published_s`, `predicted_s`."""
    import pandas as pd

    point = next(point for point in POINTS if point.machine == "mi355x")
    predicted = step_parts(prediction_of(point))
    return pd.DataFrame(
        [{"phase": name, "published_s": value, "predicted_s": predicted[name]} for name, value in MI355X_PHASES.items()]
    )


def prediction_of(point: Point) -> Prediction:
    """The prediction for a point that has a policy."""
    assert point.policy is not None
    return _predict(
        point.policy, tuple(point.knobs.items()), point.model, point.machine, point.changes, workload_of(point)
    )


def workload_of(point: Point) -> Workload:
    """The step of a point that has a policy; with an unpublished batch, the largest that fits."""
    batch = point.micro_batch_size or _largest_batch(point)
    return _workload(point, batch)


def _workload(point: Point, batch: int) -> Workload:
    return Workload(
        micro_batch_size=batch,
        accumulation=point.accumulation,
        seq_len=point.seq_len,
        precision=point.precision,
        recompute=point.recompute,
        matmul=point.matmul,
        grad_clip=point.grad_clip,
    )


@cache
def _predict(
    policy: str,
    knobs: tuple[tuple[str, Knob], ...],
    model: str,
    machine: str,
    changes: tuple[str, ...],
    workload: Workload,
) -> Prediction:
    profile = hardware.override(hardware.load(machine), changes)
    schedule = policies.build(policy, presets.load(model), workload, memory_of(profile), **dict(knobs))
    return predict(schedule, profile)


def _largest_batch(point: Point) -> int:
    """The largest micro-batch that fits; 1 where not even that does."""

    def too_large(batch: int) -> bool:
        assert point.policy is not None
        profile = hardware.override(hardware.load(point.machine), point.changes)
        budget = memory_of(profile)
        schedule = policies.build(
            point.policy, presets.load(point.model), _workload(point, batch), budget, **point.knobs
        )
        return shortage(schedule, profile, budget) is not None

    return 1 + bisect_left(range(2, _LARGEST_BATCH + 1), True, key=too_large)


def _row(point: Point) -> dict[str, object]:
    row: dict[str, object] = {
        "system": point.system,
        "policy": point.policy or "",
        "model": point.model,
        "machine": point.machine,
        "micro_batch_size": point.micro_batch_size,
        "accumulation": point.accumulation,
        "seq_len": point.seq_len,
        "unit": point.unit,
        "formula": point.formula,
        "published": point.value,
        "predicted": float("nan"),
        "error": float("nan"),
        "speed": float("nan"),
        "standing": standing(point),
        "fits": None,
        "shortage": "",
        "binding": "",
        "lacking": point.lacking,
        "assumed": point.assumed,
        "same_run_as": point.same_run_as,
        "why": point.why,
        "note": point.note,
        "source": point.source,
        "digest": "",
    }
    if point.lacking:
        return row
    prediction = prediction_of(point)
    predicted = in_unit(prediction, point.unit, point.formula)
    speed = point.value / predicted if point.unit == "s" else predicted / point.value
    return row | {
        "micro_batch_size": prediction.schedule.workload.micro_batch_size,
        "predicted": predicted,
        "error": speed - 1,
        "speed": speed,
        "fits": prediction.fits,
        "shortage": str(prediction.does_not_fit or ""),
        "binding": prediction.binding,
        "digest": prediction.schedule.digest,
    }


def standing(point: Point) -> str:
    """Whether a point is "compared" (its run is known), "assumed" (in part) or "not predicted"."""
    if point.lacking:
        return "not predicted"
    return "assumed" if point.assumed else "compared"


def summary(frame: pd.DataFrame) -> str:
    """Median and worst error of the runs that are compared, in sentences, and how many of them fit."""
    points = frame[frame["standing"] == "compared"]
    compared = points[points["same_run_as"] == ""]
    worst = compared.loc[compared["error"].abs().idxmax()]
    counts = frame["standing"].value_counts()
    return (
        f"{len(compared)} runs that are known ({len(points)} points), predicted speed over published: "
        f"{_medians(compared['error'])}, "
        f"worst {worst['error']:+.0%} ({worst['system']}, {worst['model']} on {worst['machine']}). "
        f"{_of_fit(compared)}Apart from these, {counts.get('assumed', 0)} whose batch or other facts had to be "
        f"assumed, and {counts.get('not predicted', 0)} that are not predicted."
    )


def _medians(error: pd.Series) -> str:
    return f"median error {error.median():+.0%}, median of its size {error.abs().median():.0%}"


def _of_fit(compared: pd.DataFrame) -> str:
    """How many do not fit the machine that they ran on, and the others' error; nothing where all fit."""
    fits = compared["fits"].astype(bool)
    if fits.all():
        return ""
    others = f"; of the others: {_medians(compared['error'][fits])}" if fits.any() else ""
    count = int((~fits).sum())
    return f"By prediction {count} of them would not fit the machine that they ran on and count all the same{others}. "


def in_unit(prediction: Prediction, unit: Unit, formula: str) -> float:
    """What a prediction says in the unit of a point; TFLOP/s by its formula."""
    seconds = prediction.period_ns / 1e9
    if unit == "s":
        return seconds
    if unit == "tokens/s":
        return prediction.tokens_per_s
    schedule = prediction.schedule
    return flops_by_formula(schedule.model, schedule.workload, formula) / seconds / 1e12


def step_parts(prediction: Prediction) -> dict[str, float]:
    """A step of the released code in the parts its log tells apart, s; they add up to the period.

    Forward lasts to the end of the last forward op, backward to the end of the last backward, the gradient
    wait to the first pass of the host over gradients; clip and Adam are the host's time in these ops; sync is
    the weights' copies after it, rest what is left.
    """
    schedule, trace = prediction.schedule, prediction.trace
    last = trace.steps - 1
    begin = int(trace.step_end_ns[last - 1])
    of_step = [(schedule.ops[int(trace.op[r])], r) for r in range(len(trace)) if trace.step[r] == last]

    def last_end(phase: Phase) -> int:
        return max(int(trace.end_ns[r]) for op, r in of_step if op.phase == phase)

    def by_host(op: Op, phases: Sequence[Phase]) -> bool:
        return op.stream == Stream.HOST and op.phase in phases

    def spent(*found: Phase) -> int:
        return sum(int(trace.end_ns[r] - trace.start_ns[r]) for op, r in of_step if by_host(op, found))

    tail = min(int(trace.start_ns[r]) for op, r in of_step if by_host(op, (Phase.NORM, Phase.SCALE, Phase.ADAM)))
    forward, backward = last_end(Phase.FORWARD), last_end(Phase.BACKWARD)
    parts = {
        "forward": forward - begin,
        "backward": backward - forward,
        "gradient wait": tail - backward,
        "clip": spent(Phase.NORM, Phase.SCALE),
        "Adam": spent(Phase.ADAM),
        "sync": sum(
            int(trace.end_ns[r] - trace.start_ns[r])
            for op, r in of_step
            if op.phase == Phase.COPY and op.stream == Stream.H2D and trace.start_ns[r] >= tail
        ),
    }
    parts["rest"] = int(trace.step_end_ns[last]) - begin - sum(parts.values())
    return {name: ns / 1e9 for name, ns in parts.items()}

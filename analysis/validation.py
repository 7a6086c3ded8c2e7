"""How far predictions are from runs: by point, policy, op class and stream, and what each cost term buys.

Two levels. Replay gives the simulator the op times of the very run: what is left is an error of the schedule's
meaning (order, waits, issue). Predict gives it nothing but the profile, for shapes that the profile never saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain.validate import WARMUP, Point, name_of, policy_of
from schedules.op import Op, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from sim.cost import Demand, Terms, demands
from sim.engine import play, simulate
from sim.machine import HardwareProfile
from sim.prediction import peak_bytes, predict
from sim.whatif import op_noise, stream_class

if TYPE_CHECKING:
    import pandas as pd

LADDER = (
    ("op times alone", Terms(issue=False, size_dependent_bandwidth=False, sharing=False, compute_slowdown=False)),
    ("and issue", Terms(size_dependent_bandwidth=False, sharing=False, compute_slowdown=False)),
    ("and latency of copies", Terms(sharing=False, compute_slowdown=False)),
    ("and sharing of cores, memory and links", Terms(compute_slowdown=False)),
    ("and slowdown beside copies", Terms()),
)
REPLAYED_STEPS = 6
NOISY_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of signed errors, predicted over measured minus one; `within` are shares of the points."""

    points: int
    bias: float
    median: float  # of the absolute error
    p95: float
    worst: float
    within_4: float


def summary(errors: Sequence[float]) -> Summary:
    """Of at least one error."""
    values = np.asarray(errors, dtype=float)
    size = np.abs(values)
    return Summary(
        points=len(values),
        bias=float(values.mean()),
        median=float(np.median(size)),
        p95=float(np.percentile(size, 95)),
        worst=float(values[size.argmax()]),
        within_4=float((size <= 0.04).mean()),
    )


# ---- one point


def measured_s(point: Point) -> float:
    """The median step of all rounds, in seconds."""
    return float(np.median(np.concatenate([trace.step_ns(WARMUP) for trace in point.rounds]))) / 1e9


def noise(point: Point) -> float:
    """By what the rounds' median steps differ, as a share of their mean: no prediction can be nearer for sure."""
    medians = [float(np.median(trace.step_ns(WARMUP))) for trace in point.rounds]
    return (max(medians) - min(medians)) / float(np.mean(medians)) if len(medians) > 1 else float("nan")


def _op_times_ns(schedule: Schedule, trace: Trace) -> np.ndarray:
    """What each op took in each step but the first ones, ns, [steps, ops]."""
    return (trace.end_ns - trace.start_ns).reshape(trace.steps, len(schedule.ops))[WARMUP:]


def replay_s(point: Point, profile: HardwareProfile) -> float:
    """The median step that the simulator makes of each step's own op times, in seconds.

    Issue and waking cost what the profile says.
    """
    schedule, steps = point.schedule, list[float]()
    usual = demands(schedule, profile)
    for took in np.concatenate([_op_times_ns(schedule, trace) for trace in point.rounds]):
        costs = [
            Demand(duration_ns=int(ns), issue_ns=cost.issue_ns, wake_ns=cost.wake_ns)
            for ns, cost in zip(took, usual, strict=True)
        ]
        steps.append(float(np.median(play(schedule, costs, steps=REPLAYED_STEPS).step_ns(2))))
    return float(np.median(steps)) / 1e9


def overlap(schedule: Schedule, trace: Trace, warmup: int) -> float:
    """How many streams are at work on average."""
    window = trace.window(warmup)
    span = window[1] - window[0]
    return sum(trace.busy_ns(schedule, stream, window) for stream in schedule.streams) / span


# ---- all points


def rows(points: Sequence[Point], profile: HardwareProfile) -> pd.DataFrame:
    """A row per point: measured, replayed and predicted seconds and their signed errors, and streams at work."""
    import pandas as pd

    found = []
    for point in points:
        schedule, step = point.schedule, measured_s(point)
        predicted = predict(schedule, profile)
        replayed = replay_s(point, profile)
        busy = float(np.mean([overlap(schedule, trace, WARMUP) for trace in point.rounds]))
        found.append(
            {
                "point": name_of(schedule),
                "model": schedule.model.name,
                "policy": policy_of(schedule),
                "micro_batch_size": schedule.workload.micro_batch_size,
                "seq_len": schedule.workload.seq_len,
                "measured_s": step,
                "noise": noise(point),
                "replay_s": replayed,
                "replay_error": replayed / step - 1,
                "predicted_s": predicted.period_ns / 1e9,
                "predict_error": predicted.period_ns / 1e9 / step - 1,
                "streams_at_work": busy,
                "overlap_error": overlap(schedule, predicted.trace, 1) / busy - 1,
                "buffers_bytes": schedule.allocated_bytes(Tier.DEVICE),
                "workspace_bytes": point.workspace,
                "workspace_error": (peak_bytes(schedule, profile)[Tier.DEVICE] - schedule.allocated_bytes(Tier.DEVICE))
                / point.workspace
                - 1,
                "digest": schedule.short_digest,
            }
        )
    return pd.DataFrame(found)


def by(table: pd.DataFrame, key: str) -> pd.DataFrame:
    """A summary of the predictions' errors for every value of a column."""
    import pandas as pd

    return pd.DataFrame(
        [{key: value, **vars(summary(group["predict_error"]))} for value, group in table.groupby(key, sort=False)]
    )


def by_class(
    points: Sequence[Point], profile: HardwareProfile, class_of: Callable[[Op], str] = stream_class
) -> pd.DataFrame:
    """Mean time per step and class of op, measured and predicted, summed over all points; largest first."""
    import pandas as pd

    measured: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for point in points:
        trace = predict(point.schedule, profile).trace
        simulated = (trace.end_ns - trace.start_ns).reshape(trace.steps, -1)[-2]
        took = np.concatenate([_op_times_ns(point.schedule, trace) for trace in point.rounds]).mean(axis=0)
        for op, real, thought in zip(point.schedule.ops, took, simulated, strict=True):
            name = class_of(op)
            measured[name] = measured.get(name, 0.0) + float(real) / 1e9
            predicted[name] = predicted.get(name, 0.0) + float(thought) / 1e9
    table = pd.DataFrame(
        [
            {"ops": name, "measured_s": total, "predicted_s": predicted[name], "error": predicted[name] / total - 1}
            for name, total in measured.items()
            if total > 0
        ]
    )
    return table.sort_values("measured_s", ascending=False, ignore_index=True)


def ladder(points: Sequence[Point], profile: HardwareProfile) -> pd.DataFrame:
    """The summary of predictions as cost terms are switched on one by one."""
    import pandas as pd

    found = []
    noise = op_noise(profile)
    rungs = [*LADDER] if noise is None else [*LADDER, (f"and noise of {noise:.1%} in every op", Terms(noise=noise))]
    for name, terms in rungs:
        errors = []
        for point in points:
            steps = NOISY_STEPS if terms.noise else 8
            step_ns = float(np.median(simulate(point.schedule, profile, steps=steps, terms=terms, seed=0).step_ns(3)))
            errors.append(step_ns / 1e9 / measured_s(point) - 1)
        found.append({"terms": name, **vars(summary(errors))})
    return pd.DataFrame(found)


def ranking(table: pd.DataFrame) -> tuple[float, float]:
    """(Kendall's tau, regret) of choosing a policy by prediction, the mean over models and shapes.

    Tau counts pairs of policies in the right order, from -1 to 1. Regret is by what fraction the policy predicted
    to be the fastest is slower than the one that is.
    """
    taus, regrets = [], []
    for _, group in table.groupby(["model", "micro_batch_size", "seq_len"], sort=False):
        pairs = list(itertools.combinations(zip(group["predicted_s"], group["measured_s"], strict=True), 2))
        taus.append(np.mean([np.sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in pairs]))
        chosen = group.loc[group["predicted_s"].idxmin(), "measured_s"]
        regrets.append(chosen / group["measured_s"].min() - 1)
    return float(np.mean(taus)), float(np.mean(regrets))

"""What others have published, beside what we predict for it in datasheet mode. Nothing is tuned per point.

Published TFLOP/s of these systems are 6 x parameters (embeddings included) x tokens / step time: padding
counts and attention does not. Predictions are put in the same formula, so that step times are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from schedules import policies, presets
from schedules.model import ModelSpec
from schedules.op import Op, Phase, Stream
from schedules.schedule import Knob
from schedules.workload import Workload
from sim import hardware
from sim.prediction import DoesNotFit, Prediction, memory_of, predict, require_fit

if TYPE_CHECKING:
    import pandas as pd

FAR = 0.15  # a prediction that is further off than this is explained
_LARGEST_BATCH = 4096

_PAPER = "MegaTrain paper (April 2026), from a digest; not re-read"
_LLMQ = "IST-DASLab/llmq, benchmarks/4090x1.md and its configurations"
_UNKNOWN_BATCH = "batch unpublished: the largest that fits is assumed"

_FAST_GPU = (
    "compute is busy for over 90 % of the step. Two things can be missing, which the published numbers cannot tell "
    "apart: kernels slower than the profile's efficiencies (unfused norms and rotary; a loss in 128-token chunks "
    "with two host waits each), and seconds of host passes, as in the log of the MI355X"
)
_ZERO3 = (
    "the assumed batch is probably too large: the policy computes the loss in chunks, the usual baseline holds all "
    "logits; DeepSpeed before 0.19.4 also copied gradients blocking and unpinned"
)
_SMALL_STEP = (
    "forward agrees and Adam is 20 % short; backward, gradient wait and clip are not what the policy counts, which "
    "is passes at DRAM bandwidth: the log's reader found one thread adding gradients into pages faulted in anew "
    "every step, and clipping goes tensor by tensor; 16 sequences are too few to hide that"
)

Unit = Literal["TFLOP/s", "s", "tokens/s"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published number and the run that it is of.

    `policy` is None where no policy models the system. `micro_batch_size` is None where it is unpublished;
    then the largest that fits the machine is taken. `why` explains an error above FAR, from the trace.
    """

    system: str
    policy: str | None
    model: str
    machine: str
    value: float
    unit: Unit
    source: str
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    micro_batch_size: int | None = None
    accumulation: int = 1
    seq_len: int = 1024
    grad_clip: float | None = None
    note: str = ""
    why: str = ""


POINTS: tuple[Point, ...] = (
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="gh200",
        micro_batch_size=158, grad_clip=1.0, value=284, unit="TFLOP/s", source=_PAPER, why=_FAST_GPU,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="gh200",
        micro_batch_size=158, grad_clip=1.0, value=27.05, unit="s", source=_PAPER,
        note="by the formula this is 273 TFLOP/s: the two published numbers differ by 4 %", why=_FAST_GPU,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-14b", machine="gh200",
        micro_batch_size=96, grad_clip=1.0, value=266, unit="TFLOP/s", source=_PAPER, why=_FAST_GPU,
    ),
    Point(
        system="MegaTrain without double buffering", policy=None, model="qwen2.5-14b", machine="gh200",
        micro_batch_size=96, grad_clip=1.0, value=183, unit="TFLOP/s", source=_PAPER,
        why="no policy models this system: the released code has no switch for it",
    ),
    Point(
        system="ZeRO-3 offload", policy="zero3_offload", model="qwen2.5-14b", machine="gh200",
        value=143, unit="TFLOP/s", source=_PAPER,
        note=_UNKNOWN_BATCH + "; DeepSpeed's configuration is unpublished too",
        why="the prediction passes it near 6 sequences; " + _ZERO3,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="a100-pcie",
        grad_clip=1.0, value=128, unit="TFLOP/s", source=_PAPER, note=_UNKNOWN_BATCH,
    ),
    Point(
        system="Gemini", policy="gemini", model="qwen2.5-7b", machine="a100-pcie",
        value=53, unit="TFLOP/s", source=_PAPER, note=_UNKNOWN_BATCH,
        why="the prediction passes it near 8 sequences; the usual baseline holds all logits, which the policy does not",
    ),
    Point(
        system="ZeRO-3 offload", policy="zero3_offload", model="qwen2.5-7b", machine="a100-pcie",
        value=36, unit="TFLOP/s", source=_PAPER,
        note=_UNKNOWN_BATCH + "; DeepSpeed's configuration is unpublished too",
        why="the prediction passes it near 5 sequences; " + _ZERO3,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="h100",
        grad_clip=1.0, value=272, unit="TFLOP/s", source=_PAPER, note=_UNKNOWN_BATCH,
        why="the assumed batch may be too large: the prediction passes the published value between 32 and 64 sequences",
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-14b", machine="mi355x",
        micro_batch_size=16, grad_clip=1.0, value=13.3, unit="s",
        source="a user's log of the released code, before the pinned flat copies", why=_SMALL_STEP,
    ),
    Point(
        system="ZeRO-3 offload (LLaMA-Factory)", policy="zero3_offload", model="qwen2.5-7b", machine="rtx4090",
        micro_batch_size=32, accumulation=16, value=2523, unit="tokens/s", source=_LLMQ,
        note="bf16 master and gradients in DeepSpeed; the policy keeps fp32 ones",
    ),
    Point(
        system="ZeRO-3 offload (LLaMA-Factory)", policy="zero3_offload", model="qwen2.5-14b", machine="rtx4090",
        micro_batch_size=20, accumulation=26, value=1130, unit="tokens/s", source=_LLMQ,
        note="bf16 master and gradients in DeepSpeed; the policy keeps fp32 ones",
    ),
)  # fmt: skip

# The step of the MI355X point, in the parts that its log tells apart, s.
MI355X_PHASES: Mapping[str, float] = {
    "forward": 0.57,
    "backward": 6.6,
    "gradient wait": 1.55,
    "clip": 1.9,
    "Adam": 1.2,
    "sync": 0.11,
    "rest": 1.2,
}


def flops_by_formula(model: ModelSpec, workload: Workload) -> int:
    """FLOPs of a step as these publications count them: 6 x parameters, embeddings included, x tokens."""
    return 6 * model.total_params * workload.tokens_per_step


def reproduce(points: Sequence[Point] = POINTS) -> pd.DataFrame:
    """A row per point: published, predicted, and the signed error, predicted over published minus one."""
    import pandas as pd

    return pd.DataFrame([_row(point) for point in points])


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
    return _predict(point.policy, tuple(point.knobs.items()), point.model, point.machine, workload_of(point))


def workload_of(point: Point) -> Workload:
    """The step of a point that has a policy; with an unpublished batch, the largest that fits."""
    batch = point.micro_batch_size or _largest_batch(point)
    return _workload(point, batch)


def _workload(point: Point, batch: int) -> Workload:
    return Workload(
        micro_batch_size=batch, accumulation=point.accumulation, seq_len=point.seq_len, grad_clip=point.grad_clip
    )


@cache
def _predict(
    policy: str, knobs: tuple[tuple[str, Knob], ...], model: str, machine: str, workload: Workload
) -> Prediction:
    profile = hardware.load(machine)
    schedule = policies.build(policy, presets.load(model), workload, memory_of(profile), **dict(knobs))
    return predict(schedule, profile)


def _largest_batch(point: Point) -> int:
    """The largest micro-batch that fits, found by halving; 1 where not even that does."""

    def fits(batch: int) -> bool:
        assert point.policy is not None
        profile = hardware.load(point.machine)
        budget = memory_of(profile)
        schedule = policies.build(
            point.policy, presets.load(point.model), _workload(point, batch), budget, **point.knobs
        )
        try:
            require_fit(schedule, profile, budget)
        except DoesNotFit:
            return False
        return True

    low, high = 1, _LARGEST_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


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
        "published": point.value,
        "predicted": float("nan"),
        "error": float("nan"),
        "fits": None,
        "shortage": "",
        "binding": "",
        "why": point.why,
        "note": point.note,
        "source": point.source,
    }
    if point.policy is None:
        return row | {"why": point.why or "no policy models this system"}
    prediction = prediction_of(point)
    predicted = in_unit(prediction, point.unit)
    return row | {
        "micro_batch_size": prediction.schedule.workload.micro_batch_size,
        "predicted": predicted,
        "error": predicted / point.value - 1,
        "fits": prediction.fits,
        "shortage": str(prediction.does_not_fit or ""),
        "binding": prediction.binding,
    }


def in_unit(prediction: Prediction, unit: Unit) -> float:
    """What a prediction says in the unit of a point; TFLOP/s by the formula above."""
    seconds = prediction.period_ns / 1e9
    if unit == "s":
        return seconds
    if unit == "tokens/s":
        return prediction.tokens_per_s
    schedule = prediction.schedule
    return flops_by_formula(schedule.model, schedule.workload) / seconds / 1e12


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

    def spent(*found: Phase) -> int:
        return sum(int(trace.end_ns[r] - trace.start_ns[r]) for op, r in of_step if _on_host(op, found))

    tail = min(int(trace.start_ns[r]) for op, r in of_step if _on_host(op, (Phase.NORM, Phase.SCALE, Phase.ADAM)))
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


def _on_host(op: Op, phases: Sequence[Phase]) -> bool:
    return op.stream == Stream.HOST and op.phase in phases

"""Policies side by side: what each would do with the same models and steps on the same machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from schedules import policies
from schedules.errors import InputError, Refused
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim.cost import MissingCost, TooLong, to_measure
from sim.machine import HardwareProfile
from sim.plan import bound_of_these_micro_batches, is_bounded
from sim.prediction import DoesNotFit, Prediction, memory_of, peak_bytes, predict, shortage
from sim.profile_coverage import command
from sim.units import scaled

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "zero3_offload"
OUR_STATE: dict[str, Knob] = {"master": "weights"}  # the baseline's knobs with which it keeps the state that ours keep
SAME_STATE = " ".join([BASELINE, *(f"{name}={value}" for name, value in OUR_STATE.items())])
# the precisions that take these knobs: of others it keeps the same state, or always an fp32 master
OUR_PRECISIONS = ("bf16", "bf16_16bit")
NOT_BUILT = "not built"  # how the shortage of a policy begins that refuses the step, or is not safe


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy on one model and workload. GB is 10^9 bytes.

    Of what does not fit, rates and times are NaN, `shortage` is short ("does not fit: host +41.0 GB") and
    `reason` whole; both are empty where it fits. So too where a measured profile lacks the time of an op ("not
    measured: ..."), an op takes too long ("not predicted: ...") or a policy refuses the step ("not built: ...", with
    neither peaks nor digest): `fits` is None there. `gap` is by what fraction the step exceeds its bound; both are told
    of any exact schedule of these micro-batches too, NaN where none is known. The ratio is to the baseline of the same
    `precision`, or, where there is none, to another (`same_state` is False then); NaN where that trains something else.
    `baseline` is the label of the row it is to.
    """

    model: str
    params_b: float  # 10^9 parameters, embeddings included
    policy: str
    knobs: str  # those given: "master=weights"
    label: str  # the policy with its knobs, marked where its training is not exact
    machine: str
    source: str  # "predicted" or "measured"
    micro_batch_size: int
    accumulation: int
    seq_len: int
    precision: str  # as built: a policy may insist on its own
    optimizer: str
    recompute: str
    matmul: str
    grad_clip: float  # the largest norm; NaN where gradients are not clipped
    trains: str  # "weights", "adapters" or "nothing"
    fits: bool | None = True
    shortage: str = ""
    reason: str = ""
    tokens_per_s: float = math.nan
    model_tflops_per_s: float = math.nan
    mfu: float = math.nan
    hfu: float = math.nan
    step_s: float = math.nan
    bound_s: float = math.nan
    gap: float = math.nan
    bound_of_any_schedule_s: float = math.nan
    gap_to_any_schedule: float = math.nan
    binding: str = ""
    device_peak_gb: float = math.nan
    host_peak_gb: float = math.nan
    nvme_peak_gb: float = math.nan
    ratio_to_zero3_offload: float = math.nan
    baseline: str = ""
    same_state: bool = False
    digest: str = ""


COLUMNS = tuple(field.name for field in fields(Row))


def compare(
    models: Sequence[ModelSpec],
    names: Sequence[str],
    profile: HardwareProfile,
    workloads: Sequence[Workload],
    budget: MemoryBudget | None = None,
) -> pd.DataFrame:
    """A row for every model, workload and policy, in this order; the columns are those of Row.

    Args:
        names: policies, by name or path, with any knobs: "streamed slots=3".
        budget: the machine's own memory if left out.

    Raises:
        PolicyError: a policy or knob is unknown, or the policy fails.
        ScheduleError: a policy's schedule is not safe.
    """
    return frame(
        row
        for model, workload in itertools.product(models, workloads)
        for row in rows(model, names, profile, workload, budget)
    )


def rows(
    model: ModelSpec,
    names: Sequence[str],
    profile: HardwareProfile,
    workload: Workload,
    budget: MemoryBudget | None = None,
    *,
    more: Mapping[str, Sequence[str]] = {},
    refused_too: bool = False,
) -> Iterator[Row]:
    """The rows of one model and workload, one by one as they are found.

    `more` is further knobs of some of the names, "slots=3", which no row tells.

    Raises as `compare` does; with `refused_too` a policy that refuses this step, or is not safe, is a row that says so.
    """
    budget = budget or memory_of(profile)
    bounds_ns: dict[Workload, float] = {}
    for text in names:
        name, knobs = policies.with_knobs(text)
        try:
            further = policies.parse_knobs(name, more.get(text, ()))
            schedule = policies.build(name, model, workload, budget, **knobs, **further)
            verify(schedule)
            row = _row_of(schedule, profile, budget)
        except (InputError, Refused) as error:
            if not refused_too:
                raise
            row = _not_built(name, model, workload, profile, error)
        else:
            if row.fits and is_bounded(schedule):
                if (step := schedule.workload) not in bounds_ns:
                    bounds_ns[step] = bound_of_these_micro_batches(schedule, profile, budget)
                row = _bounded(row, bounds_ns[step] / 1e9)
        given = " ".join(f"{knob}={value}" for knob, value in knobs.items())
        yield replace(row, knobs=given, label=f"{row.label} {given}".strip())


def _bounded(row: Row, bound_s: float) -> Row:
    """With the bound of any schedule, if that is not zero."""
    if not bound_s:
        return row
    return replace(row, bound_of_any_schedule_s=bound_s, gap_to_any_schedule=row.step_s / bound_s - 1.0)


def _row_of(schedule: Schedule, profile: HardwareProfile, budget: MemoryBudget) -> Row:
    if schedule.allocated_bytes(Tier.NVME) and profile.nvme is None:
        return _without_nvme(schedule, profile, budget)
    try:
        return row_of(predict(schedule, profile, budget))
    except MissingCost as error:
        # of all policies, for others may lack more
        everything = command(schedule.model.name, [schedule.workload], to_measure(schedule), profile)
        short, reason = f"not measured: {error.what.signature}", str(MissingCost(error.what, everything))
    except TooLong as error:
        if lacking := shortage(schedule, profile, budget):
            return _lacking(schedule, profile, lacking, str(lacking))
        short, reason = "not predicted: an op takes hours", str(error)
    return _row(schedule, profile, peak_bytes(schedule, profile), fits=None, shortage=short, reason=reason)


def frame(found: Iterator[Row] | Sequence[Row]) -> pd.DataFrame:
    """Rows as a table, with each one's ratio of tokens/s to the baseline's of the same step, and state if it can be."""
    import pandas as pd

    table = pd.DataFrame([asdict(row) for row in found], columns=COLUMNS)
    step = ["model", "machine", "source", "micro_batch_size", "accumulation", "seq_len"]
    step += ["optimizer", "recompute", "matmul", "grad_clip", "trains"]
    known = table["policy"].eq(BASELINE) & table["tokens_per_s"].notna()
    of_baseline = table.index.to_series().where(known)

    def first_of_all_with(same: list[str]) -> pd.Series[Any]:
        return of_baseline.groupby([table[name] for name in same], dropna=False).transform("first")

    any_state, same_state = first_of_all_with(step), first_of_all_with([*step, "precision"])
    baseline = same_state.fillna(any_state)
    table["ratio_to_zero3_offload"] = table["tokens_per_s"] / baseline.map(table["tokens_per_s"])
    table["baseline"] = baseline.map(table["label"]).where(table["ratio_to_zero3_offload"].notna(), "")
    table["same_state"] = same_state.notna()
    return table


def several_baselines(found: pd.DataFrame) -> bool:
    """Whether ratios are to rows of the baseline that keep different state."""
    return len(set(found.loc[found["ratio_to_zero3_offload"].notna(), "baseline"])) > 1


def row_of(prediction: Prediction) -> Row:
    """What a prediction says, as a row; the ratio to the baseline is left open."""
    lacking = prediction.does_not_fit
    if lacking is not None:
        return _lacking(prediction.schedule, prediction.profile, lacking, str(lacking))
    return _row(
        prediction.schedule,
        prediction.profile,
        prediction.peak_bytes,
        tokens_per_s=prediction.tokens_per_s,
        model_tflops_per_s=prediction.model_flops_per_s / 1e12,
        mfu=prediction.mfu,
        hfu=prediction.hfu,
        step_s=prediction.period_ns / 1e9,
        bound_s=prediction.bound_ns / 1e9,
        gap=prediction.gap,
        binding=prediction.binding,
    )


def measured_row(row: Row, step_s: float, machine: str) -> Row:
    """A predicted row with the measured time of a step in its place: rates follow, bounds stay."""
    factor = row.step_s / step_s
    changes = {name: getattr(row, name) * factor for name in ("tokens_per_s", "model_tflops_per_s", "mfu", "hfu")}
    changes |= {"step_s": step_s, "gap": step_s / row.bound_s - 1.0}
    changes |= {"gap_to_any_schedule": step_s / row.bound_of_any_schedule_s - 1.0}
    return Row(**asdict(row) | changes | {"source": "measured", "machine": machine})


def ranked(times: pd.DataFrame) -> pd.DataFrame:
    """Times by `predicted_s` and `measured_s`, fastest measured first, with the rank of each: 1 is the fastest."""
    table = times.sort_values("measured_s", ignore_index=True)
    return table.assign(
        predicted_rank=table["predicted_s"].rank(method="min"), measured_rank=table["measured_s"].rank(method="min")
    )


def _without_nvme(schedule: Schedule, profile: HardwareProfile, budget: MemoryBudget) -> Row:
    lacking = shortage(schedule, profile, budget)
    assert lacking is not None, "there is no room on what is not there"
    needed = scaled(schedule.allocated_bytes(Tier.NVME), "GB")
    reason = f"the schedule keeps {needed} on NVMe, and {profile.name} has none"
    return _lacking(schedule, profile, lacking, reason)


def _lacking(schedule: Schedule, profile: HardwareProfile, lacking: DoesNotFit, reason: str) -> Row:
    short, peaks = f"does not fit: {lacking.short}", peak_bytes(schedule, profile)
    return _row(schedule, profile, peaks, fits=False, shortage=short, reason=reason)


def _row(schedule: Schedule, profile: HardwareProfile, peaks: Mapping[Tier, int], **found: Any) -> Row:
    return Row(
        policy=schedule.policy,
        label=schedule.label,
        device_peak_gb=peaks[Tier.DEVICE] / 1e9,
        host_peak_gb=peaks[Tier.HOST] / 1e9,
        nvme_peak_gb=peaks[Tier.NVME] / 1e9,
        digest=schedule.digest,
        **_of_step(schedule.model, schedule.workload, profile),
        **found,
    )


def _not_built(name: str, model: ModelSpec, workload: Workload, profile: HardwareProfile, why: Exception) -> Row:
    policy, reason = policies.short(name), str(why)
    short = f"{NOT_BUILT}: {reason.splitlines()[0]}"
    step = _of_step(model, workload, profile)
    return Row(policy=policy, label=policy, fits=None, shortage=short, reason=reason, **step)


def _of_step(model: ModelSpec, workload: Workload, profile: HardwareProfile) -> dict[str, Any]:
    """What a row says of the model, the step and the machine."""
    return {
        "model": model.name,
        "params_b": model.total_params / 1e9,
        "knobs": "",
        "machine": profile.name,
        "source": "predicted",
        "micro_batch_size": workload.micro_batch_size,
        "accumulation": workload.accumulation,
        "seq_len": workload.seq_len,
        "precision": workload.precision,
        "optimizer": workload.optimizer,
        "recompute": workload.recompute,
        "matmul": workload.matmul or "none",
        "grad_clip": math.nan if workload.grad_clip is None else workload.grad_clip,
        "trains": workload.trains,
    }

"""Plans beside every named policy and the bound over all schedules: rows, a table and a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.compare import BASELINE, OUR_STATE
from analysis.figure import figure_of, new_axes
from analysis.palette import BLUE, GREY, VERMILLION
from megatrain.this_machine import machine_name, today
from schedules import policies
from schedules.errors import Refused
from schedules.hazards import minimal_waits
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Knob
from schedules.workload import Workload
from sim.machine import HardwareProfile
from sim.plan import bound_of_any_split, plan
from sim.prediction import memory_of, predict, shortage
from sim.splits import splits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ALPHAS = (0.1, 0.25, 0.4, 0.55)  # of greedysnake: parts of the blocks
RATIOS = (0.9, 0.7, 0.5, 0.3)  # of superoffload: parts of the sub-groups
DRIVE_STEPS = 16  # of streamed: sixteenths of the blocks' states on a drive
LOHAN: tuple[dict[str, Knob], ...] = ({}, {"inputs": "host"}, {"ssd": True, "inputs": "host"})
FITTING = 2  # splits of the step that a named policy is tried with at least: the largest micro-batches that fit
MOST = 16  # micro-batches


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan of one model, machine and step; all predicted. Rates are NaN where nothing fits, and `reason` says why.

    `gap` is by what fraction the step exceeds the bound over all exact schedules, `own_gap` its own schedule's
    bound. `best_named` is the fastest exact policy, with the knobs and the micro-batches that suit it.
    """

    model: str
    machine: str
    tokens_per_step: int
    seq_len: int
    micro_batch_size: int
    accumulation: int
    tokens_per_s: float
    step_s: float
    bound_s: float
    gap: float
    own_gap: float
    more_work: float  # the three of `Plan.gap_parts`
    circle: float
    sharing: float
    mfu: float
    binding: str  # of the bound over all schedules
    policy: str
    knobs: str
    device_gb: float
    host_gb: float
    nvme_gb: float
    best_named: str
    best_named_tokens_per_s: float
    zero3_offload_tokens_per_s: float
    planning_s: float
    candidates: int
    digest: str
    planned_on: str  # date
    planned_by: str  # processes and the machine that they ran on
    reason: str


COLUMNS = tuple(field.name for field in fields(Row))


def row(
    model: ModelSpec,
    profile: HardwareProfile,
    *,
    seq_len: int,
    tokens_per_step: int,
    machine: str | None = None,
    workers: int = 1,
) -> tuple[Row, dict[str, float]]:
    """The plan's row, and tokens/s by named policy, NaN for those that do not fit; `machine` renames the profile.

    `workers` processes plan.

    Raises:
        InputError: the step is no whole number of sequences.
    """
    name = machine or profile.name
    try:
        found = plan(model, profile, seq_len=seq_len, tokens_per_step=tokens_per_step, workers=workers)
    except Refused as error:
        return _nothing(model, name, seq_len, tokens_per_step, str(error), workers), {}
    prediction, workload = found.prediction, found.schedule.workload
    changed = policies.changed(found.schedule)
    alone = Row(
        model=model.name,
        machine=name,
        tokens_per_step=tokens_per_step,
        seq_len=seq_len,
        micro_batch_size=workload.micro_batch_size,
        accumulation=workload.accumulation,
        tokens_per_s=prediction.tokens_per_s,
        step_s=prediction.period_ns / 1e9,
        bound_s=found.lower_bound_ns / 1e9,
        gap=found.gap,
        own_gap=prediction.gap,
        **dict(zip(("more_work", "circle", "sharing"), found.gap_parts.values(), strict=True)),
        mfu=prediction.mfu,
        binding=found.bound.binding,
        policy=found.schedule.policy,
        knobs=" ".join(changed),
        device_gb=prediction.peak_bytes[Tier.DEVICE] / 1e9,
        host_gb=prediction.peak_bytes[Tier.HOST] / 1e9,
        nvme_gb=prediction.peak_bytes[Tier.NVME] / 1e9,
        best_named="",
        best_named_tokens_per_s=math.nan,
        zero3_offload_tokens_per_s=math.nan,
        planning_s=found.seconds,
        candidates=len(found.tried),
        digest=found.schedule.short_digest,
        planned_on=today(),
        planned_by=_planned_by(workers),
        reason="",
    )
    return beside(alone, model, profile)


def tried_with(name: str, model: ModelSpec) -> list[dict[str, Knob]]:
    """What a named policy is tried with, of which the fastest counts: what its system would choose, or its user.

    Whether blocks keep their activations or run forward again, how much waits for the next forward or stays on the
    device, and what lives on a drive, with its traffic as much beside each other as the system can.
    """
    blocks = model.num_hidden_layers
    on_a_drive: list[dict[str, Knob]] = [{"nvme": -(-blocks * n // DRIVE_STEPS)} for n in range(DRIVE_STEPS + 1)]
    chosen: dict[str, list[dict[str, Knob]]] = {
        BASELINE: [OUR_STATE],
        "gemini": [{}, {"placement": "auto"}],
        "greedysnake": [{"alpha": alpha, "ssd": ssd} for alpha in ALPHAS for ssd in (False, True)],
        # less is offloaded where micro-batches are smaller
        "llmq": [{}, {"offload": "moment"}, {"offload": "nothing"}],
        "lohan": [{"swap": swap, **there} for swap in (0, blocks // 4, blocks // 2) for there in LOHAN],
        "megatrain": [{}, {"checkpoint": 1}],
        "megatrain_released": [{}, {"checkpoint": 1}],
        "streamed": [
            *on_a_drive,
            {"nvme": blocks, "nvme_weights": blocks // 2, "inputs": blocks},
            {"nvme": blocks, "nvme_weights": blocks, "inputs": blocks},
        ],
        "superoffload": [{"ratio": ratio} for ratio in RATIOS],
        "zero_offload": [OUR_STATE, {**OUR_STATE, "overlap_comm": True}],
        "zero_infinity": [
            {},
            {"params_on_nvme": True, "pipeline_read": True, "pipeline_write": True, "activations": "inputs"},
        ],
    }
    found, knobs = chosen.get(name, [{}]), policies.knobs(name)
    if "activations" in knobs and "keep" not in knobs:
        found = [*found, *({**tried, "activations": "keep"} for tried in found if "activations" not in tried)]
    return found


def named_rates(model: ModelSpec, profile: HardwareProfile, whole: Workload, names: Iterable[str]) -> dict[str, float]:
    """Tokens/s of these policies, those that are exact, in steps as large as `whole`; NaN where one does not fit.

    As `tried_with`, with micro-batches that suit it, and with or without what is pointwise computed again, whichever
    is faster: that is a matter of a block's kernels, not of a policy.
    """
    rates: dict[str, list[float]] = {}
    for name, mode in itertools.product(names, ("none", "pointwise")):
        for knobs in tried_with(name, model):
            tried = fitting_rates(name, model, profile, whole, mode, knobs)
            if tried is not None:
                rates.setdefault(name, []).extend(tried)
    return {name: max(tried, default=math.nan) for name, tried in rates.items()}


def bounded(row: Row, model: ModelSpec, profile: HardwareProfile) -> Row:
    """A plan's row with the bound over all exact schedules as it is now."""
    limit = bound_of_any_split(model, profile, seq_len=row.seq_len, tokens_per_step=row.tokens_per_step) / 1e9
    more_work = (1.0 + row.more_work) * row.bound_s / limit - 1.0
    return replace(row, bound_s=limit, gap=row.step_s / limit - 1.0, more_work=more_work)


def beside(
    row: Row, model: ModelSpec, profile: HardwareProfile, known: Mapping[str, float] = {}
) -> tuple[Row, dict[str, float]]:
    """A plan's row with what named policies do at its point, and the tokens/s of each, as `row` has them.

    Those that are `known` are not predicted again.
    """
    step = Workload(micro_batch_size=row.micro_batch_size, accumulation=row.accumulation, seq_len=row.seq_len)
    found = {**known, **named_rates(model, profile, step, [n for n in policies.comparable() if n not in known])}
    named = {name: found[name] for name in policies.comparable() if name in found}
    best = max(named, key=lambda policy: -1.0 if math.isnan(named[policy]) else named[policy])
    return (
        replace(
            row,
            best_named="" if math.isnan(named[best]) else best,
            best_named_tokens_per_s=named[best],
            zero3_offload_tokens_per_s=named[BASELINE],
        ),
        named,
    )


def fitting_rates(
    name: str, model: ModelSpec, profile: HardwareProfile, whole: Workload, mode: str, knobs: Mapping[str, Knob]
) -> list[float] | None:
    """Tokens/s of a policy with the FITTING largest micro-batches that fit, in steps as large as `whole`, and with
    smaller ones as long as they are faster.

    None of one that is stale.
    """
    rates: list[float] = []
    for step in splits(whole.seq_len, whole.tokens_per_step, None, None, whole.precision, whole.grad_clip):
        workload = replace(step, recompute=mode)
        built = policies.build_without_waits(name, model, workload, memory_of(profile), **knobs)
        if built.staleness:
            return None
        if built.allocated_bytes(Tier.NVME) and profile.nvme is None:
            break
        if shortage(built, profile, memory_of(profile)) is None:
            rates.append(predict(replace(built, waits=minimal_waits(built.ops)), profile).tokens_per_s)
        if (len(rates) >= FITTING and rates[-1] <= rates[-2]) or step.accumulation > MOST:
            break
    return rates


def _planned_by(workers: int) -> str:
    return f"{workers} {'process' if workers == 1 else 'processes'} on {machine_name()}"


def _nothing(model: ModelSpec, machine: str, seq_len: int, tokens_per_step: int, reason: str, workers: int) -> Row:
    values = {field.name: math.nan if field.type == "float" else "" for field in fields(Row)}
    values |= {"model": model.name, "machine": machine, "seq_len": seq_len, "tokens_per_step": tokens_per_step}
    values |= {"planned_on": today(), "planned_by": _planned_by(workers)}
    return Row(**{**values, "micro_batch_size": 0, "accumulation": 0, "candidates": 0, "reason": reason})  # type: ignore[arg-type]


def frame(found: Sequence[tuple[Row, dict[str, float]]]) -> pd.DataFrame:
    """Rows with one more column per named policy, its tokens/s."""
    import pandas as pd

    names = list(dict.fromkeys(name for _, named in found for name in named))
    return pd.DataFrame(
        [{**asdict(row), **{name: named.get(name, math.nan) for name in names}} for row, named in found],
        columns=[*COLUMNS, *names],
    )


def markdown(table: pd.DataFrame) -> str:
    """The table for a README: a line per point, what does not fit included."""
    lines = [
        "| model | machine | plan, tokens/s | of the bound | more work | circle | sharing | best named policy "
        "| plan against it | against ZeRO-3 | device / host / drive, GB | planning |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for point in table.to_dict("records"):
        if point["reason"]:
            lines.append(f"| {point['model']} | {point['machine']} | nothing fits | | | | | | | | | |")
            continue
        rate = point["best_named_tokens_per_s"]
        best = f"`{point['best_named']}` {rate:,.0f}" if point["best_named"] else "none fits"
        lines.append(
            f"| {point['model']} | {point['machine']} | {point['tokens_per_s']:,.0f} | {1 / (1 + point['gap']):.1%} "
            f"| {point['more_work']:+.1%} | {point['circle']:+.1%} | {point['sharing']:+.1%} "
            f"| {best} | {_times(point['tokens_per_s'], rate)} "
            f"| {_times(point['tokens_per_s'], point['zero3_offload_tokens_per_s'])} "
            f"| {' / '.join(f'{point[tier]:,.0f}' for tier in ('device_gb', 'host_gb', 'nvme_gb'))} "
            f"| {point['planning_s']:.1f} s |"
        )
    return "\n".join(lines)


def _times(rate: float, other: float) -> str:
    return "-" if math.isnan(other) else f"{rate / other:.2f}x"


def against_bound(table: pd.DataFrame) -> Axes:
    """A line per point: plan, best named policy and ZeRO-3 as shares of the bound over all schedules.

    What does not fit has no mark. A named policy that is as fast as the plan is a ring around it.
    """
    rows = table.to_dict("records")
    ax = new_axes(width=9.0, height=1.2 + 0.24 * len(rows))
    styles: dict[str, dict[str, Any]] = {  # the last drawn is above the others
        f"{BASELINE}_tokens_per_s": {"color": VERMILLION, "marker": "s", "s": 36},
        "best_named_tokens_per_s": {"color": "white", "marker": "o", "s": 60, "edgecolor": BLUE},
        "tokens_per_s": {"color": BLUE, "marker": "o", "s": 24},
    }
    places = np.arange(len(rows))[::-1]
    for place, point in zip(places, rows, strict=True):
        if point["reason"]:
            ax.text(0.01, place, "nothing fits", va="center", color=GREY)
            continue
        limit = point["tokens_per_step"] / point["bound_s"]
        shares = {key: point[key] / limit for key in styles}
        known = [share for share in shares.values() if not math.isnan(share)]
        ax.plot([min(known), 1.0], [place, place], color=GREY, linewidth=0.8, zorder=1)
        for key, style in styles.items():
            ax.scatter(shares[key], place, **style)
    for key, label in (
        ("tokens_per_s", "plan"), ("best_named_tokens_per_s", "best named policy"),
        (f"{BASELINE}_tokens_per_s", "ZeRO-3 offload"),
    ):  # fmt: skip
        ax.scatter([], [], label=label, **styles[key])
    ax.axvline(1.0, color=GREY, linewidth=1.2)
    ax.set_xlim(0.0, 1.03)
    ax.set_ylim(-0.8, len(rows) - 0.2)
    ax.set_yticks(places, [f"{point['model']}, {point['machine']}" for point in rows])
    ax.set_xlabel(
        "predicted throughput, as a share of the bound over all exact schedules\nwithout a mark: does not fit"
    )
    ax.spines[["top", "right"]].set_visible(False)
    figure_of(ax).legend(loc="outside upper center", ncols=3, frameon=False)
    return ax

"""What commands tell people and programs of a schedule and of a prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from megatrain.terminal import print_table
from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.verify import Verified
from schedules.workload import ADAMW
from sim.machine import HardwareProfile
from sim.prediction import DoesNotFit, Prediction, memory_of, peak_bytes
from sim.units import rate, scaled, seconds

DEVICE_AND_HOST = "device and host"  # together, where they are one memory


def print_summary(schedule: Schedule, verdict: str) -> None:
    """One line of facts and a verdict."""
    facts = [f"{schedule.label} for {schedule.model.name}, digest {schedule.short_digest}"]
    facts.append(f"{len(schedule.ops)} ops, {len(schedule.waits)} waits, {len(schedule.buffers)} buffers")
    facts += [
        f"{scaled(schedule.allocated_bytes(tier), 'GB', 2)} {tier}" for tier in Tier if schedule.allocated_bytes(tier)
    ]
    print("; ".join(facts))
    print(verdict)


def age_of_weights(verified: Verified) -> str:
    """A line for a stale schedule: "weights 1 step behind in embed and blocks 0 to 7, up to date in head"."""
    model, by_age = verified.schedule.model, dict[int, list[int]]()
    for name, behind in verified.behind.items():
        by_age.setdefault(behind, []).append(model.layer_index(name))
    told = []
    for behind, found in sorted(by_age.items(), reverse=True):
        where = ["embed"] if model.embed in found else []
        blocks = sorted(i for i in found if model.is_block(i))
        where += [f"block{'s' if len(blocks) > 1 else ''} {', '.join(_spans(blocks))}"] if blocks else []
        where += ["head"] if model.head in found else []
        age = "up to date" if not behind else f"{behind} step{'s' if behind > 1 else ''} behind"
        told.append(f"{age} in {' and '.join(where)}")
    return f"weights {', '.join(told)}"


def _spans(numbers: Sequence[int]) -> Iterator[str]:
    """What follows one another as one: "0 to 7"."""
    for _, alike in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        span = [number for _, number in alike]
        yield f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0])


def print_fit(schedule: Schedule, profile: HardwareProfile, lacking: DoesNotFit | None) -> None:
    """One line of the memory that a schedule takes of a machine, with ops' workspace, and whether it fits."""
    peaks, has = peak_bytes(schedule, profile), memory_of(profile)
    told = [f"{scaled(peaks[tier], 'GB', 2)} of {scaled(has.of(tier), 'GB', 2)} {tier}" for tier in Tier if peaks[tier]]
    if has.unified_bytes is not None:
        both = scaled(_device_and_host(peaks), "GB", 2)
        told.append(f"{both} of {scaled(has.unified_bytes, 'GB', 2)} {DEVICE_AND_HOST}")
    verdict = "it fits" if lacking is None else f"DOES NOT FIT: {lacking.short}"
    print(f"{profile.name}, with ops' workspace: {'; '.join(told)}; {verdict}")


def print_prediction(prediction: Prediction, any_bound_ns: float) -> None:
    """Step, memory and streams of one prediction; with the bound of any schedule of its step, 0 if none is known."""
    schedule = prediction.schedule
    print(f"{schedule.label} for {setting(prediction)}")
    print(
        f"digest {schedule.short_digest}, {len(schedule.ops)} ops, {len(schedule.waits)} waits; all times predicted\n"
    )
    rows = [
        ["step", seconds(prediction.period_ns / 1e9)],
        ["throughput", f"{rate(prediction.tokens_per_s)} tokens/s"],
        ["model FLOP/s", scaled(prediction.model_flops_per_s, "TFLOP/s")],
        [f"MFU{of_bf16(prediction.schedule)}", f"{prediction.mfu:.1%}"],
        [f"HFU{of_bf16(prediction.schedule)}", f"{prediction.hfu:.1%}"],
    ]
    if prediction.bound_ns > any_bound_ns:  # or it says less than that of any schedule
        rows.append(["bound of this schedule", seconds(prediction.bound_ns / 1e9)])
        rows.append(["above the bound", f"{prediction.gap:.1%}"])
        rows.append(["  which is set by", prediction.binding])
    if any_bound_ns:
        rows.append(["bound of any schedule, so split", seconds(any_bound_ns / 1e9)])
        rows.append(["above that bound", f"{prediction.period_ns / any_bound_ns - 1:.1%}"])
    print_table("one step", ["", ""], rows + drive_rows(prediction))
    print_memory(prediction)
    streams = []
    for stream, share in prediction.utilisation.items():
        causes = prediction.idle_causes_ns[stream]
        span = prediction.window[1] - prediction.window[0]
        told = ", ".join(f"{cause} {ns / span:.0%}" for cause, ns in sorted(causes.items(), key=lambda c: -c[1])[:3])
        streams.append([stream, told, f"{share:.1%}"])
    print_table("streams", ["stream", "idle, waiting for", "busy"], streams, left=2)


def of_bf16(schedule: Schedule) -> str:
    """What shares of the peak refer to, where it is not the format of all products."""
    return "" if schedule.workload.matmul is None else " of the bf16 peak"


def setting(prediction: Prediction) -> str:
    """The model, the machine and the step of a prediction, in a line."""
    workload, profile = prediction.schedule.workload, prediction.profile
    recompute = "" if workload.recompute == "none" else f", recompute {workload.recompute}"
    multiplied = "" if workload.matmul is None else f", {workload.matmul} products"
    muon = "" if workload.optimizer == ADAMW else f", {workload.optimizer}"
    clip = "" if workload.grad_clip is None else f", clipped to {workload.grad_clip:g}"
    return (
        f"{prediction.schedule.model.name} on {profile.name} ({profile.mode} profile), {workload.accumulation} x "
        f"{workload.micro_batch_size} x {workload.seq_len} tokens, {workload.precision}{multiplied}{muon}{recompute}"
        f"{clip}"
    )


def print_memory(prediction: Prediction) -> None:
    """What a prediction needs of every tier that it uses, and what there is."""
    rows, has = [], memory_of(prediction.profile)
    for tier in Tier:
        if peak := prediction.peak_bytes[tier]:
            limit = has.of(tier)
            used = f"{peak / limit:.0%}" if limit else "-"
            rows.append([tier, scaled(peak, "GB", 2), scaled(limit, "GB", 2), used])
    if (unified := has.unified_bytes) is not None:
        both = _device_and_host(prediction.peak_bytes)
        rows.append([DEVICE_AND_HOST, scaled(both, "GB", 2), scaled(unified, "GB", 2), f"{both / unified:.0%}"])
    print_table("memory", ["tier", "peak", "available", "used"], rows)


def _device_and_host(peaks: Mapping[Tier, int]) -> int:
    return peaks[Tier.DEVICE] + peaks[Tier.HOST]


def drive_rows(prediction: Prediction) -> list[list[str]]:
    """What is written to the drive, and how long it bears that; nothing where nothing is."""
    if not (written := prediction.nvme_bytes_per_day):
        return []
    days = prediction.drive_days
    worn = "" if days is None else f", all that its maker promises in {days:,.0f} days"
    return [["written to NVMe", f"{scaled(written, 'TB')} a day{worn}"]]


def memory_record(peaks: Mapping[Tier, int], profile: HardwareProfile) -> dict[str, dict[str, int]]:
    """What is needed of every tier, and what there is, for programs."""
    has = memory_of(profile)
    peak = {str(tier): nbytes for tier, nbytes in peaks.items()}
    available = {str(tier): has.of(tier) for tier in Tier}
    if has.unified_bytes is not None:
        name = DEVICE_AND_HOST.replace(" ", "_")
        peak[name], available[name] = _device_and_host(peaks), has.unified_bytes
    return {"peak_bytes": peak, "available_bytes": available}


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """The same for programs; every key says its unit."""
    return {
        **prediction.schedule.describe(),
        "machine": prediction.profile.name,
        "profile": prediction.profile.mode,
        "source": "predicted",
        "fits": prediction.fits,
        "reason": str(prediction.does_not_fit or ""),
        "step_s": prediction.period_ns / 1e9,
        "bound_s": prediction.bound_ns / 1e9,
        "gap": prediction.gap,
        "binding": prediction.binding,
        "tokens_per_s": prediction.tokens_per_s,
        "model_flops_per_s": prediction.model_flops_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "nvme_bytes_per_day": prediction.nvme_bytes_per_day,
        "drive_days": prediction.drive_days,
        **memory_record(prediction.peak_bytes, prediction.profile),
        "utilisation": prediction.utilisation,
        "idle_causes_ns": prediction.idle_causes_ns,
    }

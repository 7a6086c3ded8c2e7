"""What `megatrain plan` tells: the placement in words, the numbers beside their bounds, and what if."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from megatrain.cores import usable_cores
from megatrain.tables import drive_rows, of_bf16, prediction_record, print_memory, setting
from megatrain.terminal import Column, Record, print_table, print_words, show_records
from schedules import policies, trained
from schedules import tensor as tensors
from schedules.model import ModelSpec
from schedules.op import Phase, Tier
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget
from sim import whatif
from sim.candidate import Tried
from sim.machine import HardwareProfile
from sim.order_proof import OrderProof
from sim.plan import Plan, plan
from sim.prediction import CLASS_NAMES, memory_of
from sim.units import at_least, rate, seconds

MORE_DEVICE, MORE_HOST = 16 * 2**30, 64 * 10**9  # bytes of the question "what if there were more"
SOME = 10  # candidates of a search that begins with a good schedule
TOLD = 0.0005  # smaller parts of the gap, and smaller losses, are not worth a line
LESS = (
    "Below zero: this schedule as it is would be slower, since what goes faster meets other work on the same memory "
    "or link."
)


def _step(record: Record) -> str:
    return "-" if record["step_s"] is None else seconds(record["step_s"])


AS_THEY_COME = (
    Column(heading="policy", cell=itemgetter("policy"), number=False),
    Column(heading="step", cell=_step),
    Column(heading="why it was not simulated", cell=itemgetter("reason"), number=False, folds=True),
)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Answers of `sim.whatif`, and what more of each resource would bring.

    Both gains are fractions of tokens/s; `gains` is of the schedule as it is, `planned_gains` of a plan made anew.
    `least_memory` is in bytes, by what it is memory of; None where no amount is enough.
    """

    criticality: dict[str, float]
    gains: dict[str, float]
    planned_gains: dict[str, float]
    required_bandwidth: dict[str, float | None]
    least_memory: Mapping[str, int | None]
    longest_sequence: int
    largest_micro_batch: int


def _more_memory(budget: MemoryBudget) -> dict[str, MemoryBudget]:
    """What is more of one memory -> what there is then."""
    device, host = budget.device_bytes + MORE_DEVICE, budget.host_bytes + MORE_HOST
    on_device, on_host = f"+{MORE_DEVICE / 2**30:.0f} GiB", f"+{MORE_HOST / 1e9:.0f} GB"
    if (both := budget.unified_bytes) is None:
        return {
            f"device memory, {on_device}": replace(budget, device_bytes=device),
            f"host memory, {on_host}": replace(budget, host_bytes=host),
        }
    more = replace(budget, device_bytes=device, host_bytes=budget.host_bytes + MORE_DEVICE)
    return {f"memory, {on_device}": replace(more, unified_bytes=both + MORE_DEVICE)}


def what_if(found: Plan, note: Callable[[str], None]) -> WhatIf:
    """Ask everything of a plan; some minutes for a large model."""
    prediction, workload = found.prediction, found.schedule.workload
    model, profile = found.schedule.model, prediction.profile
    gains = whatif.marginal_gains(prediction)
    budget = memory_of(profile)
    machines = {name: (machine, budget) for name, machine in whatif.faster(profile).items()}
    machines |= {name: (profile, more) for name, more in _more_memory(budget).items()}
    planned_gains = {}
    for name, (machine, memory) in machines.items():
        note(name)
        again = plan(
            model,
            machine,
            seq_len=workload.seq_len,
            tokens_per_step=workload.tokens_per_step,
            micro_batch_size=None if len(found.asked) > 1 else workload.micro_batch_size,
            precision=workload.precision,
            grad_clip=workload.grad_clip,
            optimizer=workload.optimizer,
            matmul=workload.matmul,
            memory=memory,
            first=[found.schedule],
            effort=SOME,
            workers=usable_cores(),
        )
        if not again.finished:  # half an answer would look like a whole one
            raise KeyboardInterrupt
        planned_gains[name] = max(prediction.period_ns / again.prediction.period_ns - 1.0, 0.0)
    note("the least memory")
    smallest = found.asked[-1]  # micro-batches, which take least
    least = whatif.smallest_memory(model, profile, smallest, known=prediction.peak_bytes)
    note("the bandwidth it takes")
    needed = whatif.required_bandwidth(prediction)
    note("the longest sequence and largest batch")
    return WhatIf(
        criticality=whatif.criticality(prediction),
        gains=gains,
        planned_gains=planned_gains,
        required_bandwidth=needed,
        least_memory={"device": least.device_bytes, "host": least.host_bytes}
        if budget.unified_bytes is None
        else {"device and host": least.unified_bytes},
        longest_sequence=whatif.longest_sequence(model, profile, workload),
        largest_micro_batch=whatif.largest_micro_batch(model, profile, workload),
    )


def placement(schedule: Schedule) -> list[tuple[str, str]]:
    """Where the model's state is and what becomes of activations, counted from the ops of any schedule.

    A part of a layer counts as the share of its parameters.
    """
    model, workload = schedule.model, schedule.workload
    tiers: dict[tensors.Tensor, set[Tier]] = {}
    copied: list[tuple[str, str, tuple[Tier, Tier]]] = []  # by copy: class and name of what it reads, and its tiers
    for op in schedule.ops:
        for access in op.accesses:
            tiers.setdefault(tensors.parse(access.tensor), set()).add(schedule.buffer[access.buffer].tier)
        if op.phase == Phase.COPY:
            name = op.reads[0].tensor
            copied.append((tensors.parse(name).cls, name, schedule.route(op)))

    def share(i: int, part: tensors.Part | None) -> float:
        if part is None:
            return 1.0
        of = trained.span(model, workload, i, part)
        return float(of.stop - of.start) / trained.params(model, workload, i)

    def count(cls: str, tier: Tier, *, only: bool) -> str:
        there = [t for t, on in tiers.items() if t.cls == cls and tier in on and (not only or len(on) == 1)]
        return f"{sum(share(model.layer_index(t.layer), t.part) for t in there):.3g} of {len(model.layers)}"

    adam = [op for op in schedule.ops if op.phase == Phase.ADAM]
    on_device = on_cpu = 0.0
    for op in adam:
        assert op.layer is not None
        part = share(op.layer, trained.part(op))
        on_device, on_cpu = (on_device + part, on_cpu) if op.on_device else (on_device, on_cpu + part)
    # of a layer that is computed again more than once, with others and then by itself, one run is not kept
    again = {(op.layer, op.microbatch) for op in schedule.ops if op.phase == Phase.RECOMPUTE}
    away = {name for cls, name, route in copied if cls == tensors.SAVED and route == (Tier.DEVICE, Tier.HOST)}
    deep = sum(cls == tensors.SAVED and route == (Tier.HOST, Tier.NVME) for cls, _, route in copied)
    loads = sum(cls == tensors.WEIGHT and route == (Tier.HOST, Tier.DEVICE) for cls, _, route in copied)
    runs = model.num_hidden_layers * workload.accumulation
    becomes = f"{runs - len(again) - len(away)}, {len(away)}, {len(again)} of {runs}"
    return [
        ("layers whose weights never leave the device", count(tensors.WEIGHT, Tier.DEVICE, only=True)),
        ("layers whose optimizer state does not", count(tensors.STATE, Tier.DEVICE, only=True)),
        ("optimizer state on NVMe", f"{count(tensors.STATE, Tier.NVME, only=False)} layers"),
        ("weights on NVMe", f"{count(tensors.WEIGHT, Tier.NVME, only=False)} layers"),
        ("layers updated on the device, on the CPU", f"{on_device:.3g}, {on_cpu:.3g}"),
        ("loads of weights in a step", f"{loads}"),
        ("activations kept, to the host, recomputed", becomes),
        *([("of those on the host, on to NVMe", f"{deep}")] if deep else []),
    ]


def record(found: Plan, spread: whatif.Spread, answers: WhatIf | None, proof: OrderProof | None) -> dict[str, Any]:
    """All of it for programs; every key says its unit."""
    return {
        **prediction_record(found.prediction),
        "bound_of_any_schedule_s": found.lower_bound_ns / 1e9,
        "gap_to_any_schedule": found.gap,
        "gap_parts": found.gap_parts,
        "gain_spared_for_the_drive": found.spared,
        "what_binds_any_schedule": found.bound.binding,
        "tokens_per_s_interval": asdict(spread),
        "placement": dict(placement(found.schedule)),
        "candidates": len(found.tried),
        "candidates_simulated": sum(tried.period_ns is not None for tried in found.tried),
        "policies_without_knobs": _as_they_come(found),
        "planning_s": found.seconds,
        "finished": found.finished,
        "left_out": [
            {**what.workload.to_dict(), "recompute": what.workload.recompute, "lacks": what.signature}
            for what in found.left_out
        ],
        "candidates_not_measured": sum(not tried.measured for tried in found.tried),
        "measure_with": found.measure_with,
        "what_if": None if answers is None else asdict(answers),
        "order_proof": None if proof is None else _order_record(proof),
    }


def nothing_record(model: ModelSpec, profile: HardwareProfile, reason: str) -> dict[str, Any]:
    """For programs, where no schedule fits: as `record`, with why."""
    return {"model": model.name, "machine": profile.name, "profile": profile.mode, "fits": False, "reason": reason}


def _order_record(proof: OrderProof) -> dict[str, Any]:
    return {
        "period_s": float(proof.period_ns) / 1e9,
        "lower_bound_s": float(proof.bound_ns) / 1e9,
        "gain": proof.gain,
        "finished": proof.finished,
    }


def searched(tried: Sequence[Tried], took_s: float, *, finished: bool) -> str:
    """How far a search went, in a line."""
    simulated = sum(one.period_ns is not None for one in tried)
    cut = "" if finished else ", interrupted"
    return f"{len(tried)} candidates, {simulated} of them simulated, in {took_s:.1f} s{cut}; all times predicted\n"


def show(found: Plan, spread: whatif.Spread, answers: WhatIf | None, proof: OrderProof | None) -> None:
    """The plan for people."""
    prediction, schedule = found.prediction, found.schedule
    changed = policies.changed(schedule)
    print(setting(prediction))
    print(f"{schedule.label}{' with ' if changed else ''}{', '.join(changed)}; digest {schedule.short_digest}")
    print(searched(found.tried, found.seconds, finished=found.finished))
    rows = [
        ["throughput", f"{rate(prediction.tokens_per_s)} tokens/s"],
        [f"  5 % to 95 % at {spread.noise:.0%} noise an op", f"{rate(spread.p5)} to {rate(spread.p95)} tokens/s"],
        *([["  with a drive too, not worth its wear", f"{found.spared:+.1%}"]] if found.spared else []),
        ["step", seconds(prediction.period_ns / 1e9)],
        [f"MFU, HFU{of_bf16(prediction.schedule)}", f"{prediction.mfu:.1%}, {prediction.hfu:.1%}"],
        *_bound_rows(found),
    ]
    print_table("one step", ["", ""], rows + drive_rows(prediction))
    print_table("placement", ["", ""], [list(row) for row in placement(schedule)])
    print_memory(prediction)
    for line in _not_measured(found):
        print(line)
    show_records(_as_they_come(found), AS_THEY_COME, title="policies without knobs, in the best step that was tried")
    if proof is not None:
        known = "searched to the end" if proof.finished else "as far as the time went"
        print(
            f"order: with every op as fast as alone a step takes {seconds(float(proof.period_ns) / 1e9)}; in any "
            f"order, with as many buffers, at least {seconds(float(proof.bound_ns) / 1e9)} ({known}): at most "
            f"{proof.gain:.1%} to gain\n"
        )
    if answers is not None:
        _show_what_if(answers)


def _as_they_come(found: Plan) -> list[Record]:
    """The step of every policy without knobs, in the split and mode of recompute that suit it best of those tried."""
    others: dict[str, Tried] = {}
    for tried in sorted(found.tried, key=lambda tried: tried.period_ns or math.inf):
        if not tried.knobs:
            others.setdefault(tried.policy, tried)
    return [
        {
            "policy": name,
            "step_s": None if tried.period_ns is None else tried.period_ns / 1e9,
            "reason": tried.reason,
        }
        for name, tried in others.items()
    ]


def _bound_rows(found: Plan) -> list[list[str]]:
    """How far it is from its own bound, where that is the higher one, and from the bound of any schedule."""
    prediction, rows = found.prediction, []
    if prediction.bound_ns > found.lower_bound_ns:
        rows = [
            ["above the bound of this schedule", f"{prediction.gap:.1%}, {seconds(prediction.bound_ns / 1e9)}"],
            ["  which is set by", prediction.binding],
        ]
    factors = [(part, share) for part, share in found.gap_parts.items() if abs(share) >= TOLD]
    return [
        *rows,
        ["above the bound of any schedule", f"{found.gap:.1%}, {seconds(found.lower_bound_ns / 1e9)}"],
        ["  which is set by", found.bound.binding],
        *([f"  {part}", f"x {1 + share:.3f}"] for part, share in factors),
    ]


def _not_measured(found: Plan) -> list[str]:
    """What a measured profile kept the search from, and how to measure it; nothing where it had all times."""
    if found.measure_with is None:
        return []
    modes: dict[str, list[str]] = {}
    for what in found.left_out:
        workload = what.workload
        modes.setdefault(workload.recompute, []).append(f"{workload.accumulation} x {workload.micro_batch_size}")
    alike: dict[str, list[str]] = {}
    for mode, splits in modes.items():
        alike.setdefault(", ".join(splits), []).append(mode)
    lines = [f"  {splits} sequences with recompute {', '.join(of)}" for splits, of in alike.items()]
    if few := sum(not tried.measured for tried in found.tried):
        kinds = dict.fromkeys(tried.lacks for tried in found.tried if tried.lacks)
        lines.append(f"  {few} of the candidates tried{', for want of ' if kinds else ''}{', '.join(kinds)}")
    return ["left out, for the profile has no times for it:", *lines, f"to measure it: {found.measure_with}\n"]


def _in_words(stream_class: str) -> str:
    """A class of ops as `whatif.stream_class` names it, for people: "d2h, saved activations"."""
    stream, _, what = stream_class.partition(" ")
    return f"{stream}, {CLASS_NAMES.get(what, what)}"


def _show_what_if(answers: WhatIf) -> None:
    gains = sorted(answers.planned_gains.items(), key=lambda item: -item[1])
    as_it_is = {name: f"{round(gain, 3) + 0.0:+.1%}" for name, gain in answers.gains.items()}  # no -0.0%
    rows = [[name, as_it_is.get(name, ""), f"{gain:+.1%}"] for name, gain in gains]
    print_table("what more would bring, in tokens/s", ["", "this schedule", "planned anew"], rows)
    if any(gain < -TOLD for gain in answers.gains.values()):
        print_words(LESS)
        print()
    critical = [[_in_words(name), f"{share:.2f} %"] for name, share in answers.criticality.items() if share >= 0.005]
    if critical:
        print_table("what holds the step up", ["ops", "1 % less of it shortens the step by"], critical)
    else:
        print_words(
            "What holds the step up: no class of ops alone, but issuing them, or ops of several classes by turns."
        )
        print()
    limits = [
        [f"{link} bandwidth for no stall", "any" if rate is None else at_least(rate, "GB/s")]
        for link, rate in answers.required_bandwidth.items()
    ]
    for what, nbytes in answers.least_memory.items():
        limits.append([f"least {what} memory", "no amount is enough" if nbytes is None else at_least(nbytes, "GB", 2)])
    for what, most, of in (
        ("longest sequence, one at a time", answers.longest_sequence, "tokens"),
        ("largest micro-batch", answers.largest_micro_batch, "sequences"),
    ):
        limits.append([what, f"at least {most:,} {of}" if most else "none was found"])
    print_table("limits", ["", ""], limits)

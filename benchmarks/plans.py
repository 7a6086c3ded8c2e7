"""Plans over many models and machines, beside every named policy and the bound: python benchmarks/plans.py

    python benchmarks/plans.py [--out analysis/results/plans] [--again TEXT ...] [--named [POLICY ...]] [--bounds]
        [--brute-force 1000] [--more-memory]

All predicted, from datasheet profiles. Writes plans.csv, the picture, the table and the point of a rival's planner.
Each point is in plans.csv as soon as it is planned, with its date. With `--again` only points whose model or machine
contains a TEXT are planned, the others are those of plans.csv. With `--named` all plans are those of plans.csv, and
named policies alone are predicted again, all of them or these; with `--bounds` the bound over all schedules is.
`--brute-force N` plans N random small instances and compares each with the best of all its placements instead;
`--more-memory` plans steps on machines that differ in their memory alone, and tells where more of it was slower.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
from rich.progress import track

from analysis import figure, plans
from megatrain.cores import usable_cores
from megatrain.this_machine import machine_name, today
from schedules import policies, presets
from schedules.files import write_text
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware
from sim.plan import plan
from sim.prediction import memory_of, predict, shortage
from sim.search import NothingFits

MODELS = ("qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b", "gpt-oss-120b")
MACHINES = ("a100-pcie", "h100", "gh200", "h200", "b200", "rtx4090", "rtx5090")
LATER = ("rtxpro6000", "dgx-spark", "strix-halo")  # than the small instances, which are drawn from the machines above
SEQ, TOKENS = 2048, 16384
# (model, machine, changes, name, sequence, tokens per step)
SPECIAL = (
    ("qwen2.5-14b", "h200", ("host.memory=128GiB",), "h200, 128 GiB host, 64k tokens", 4096, 65536),
    ("llama-3.1-8b", "h200", (), "h200, 64k tokens", 4096, 65536),
    ("qwen2.5-7b", "gh200", (), "gh200, one sequence of 128k", 131072, 131072),
    ("qwen2.5-7b", "gh200", (), "gh200, one sequence of 512k", 524288, 524288),
    ("llama-3.1-70b", "rtx4090", (), "rtx4090, 128k tokens", 2048, 131072),
    ("llama-3.1-70b", "rtx5090", (), "rtx5090, 128k tokens", 2048, 131072),
)
# als244/dataflow c56b6ab, src/dataflow_sim/workloads/common/hardware.py, "H100"; its attention attains 0.6 forward and
# 0.5 backward of five products where four are counted here: of these together 6 / (2 / 0.6 + 5 / 0.5) = 0.45
RIVAL = (
    "gpu.memory=12GiB", "gpu.matmul_flops=989TFLOP/s", "gpu.matmul_efficiency=0.65fraction",
    "gpu.attention_efficiency=0.45fraction", "gpu.memory_bandwidth=3TB/s", "gpu.memory_efficiency=0.9fraction",
    "links.h2d.bandwidth=50GB/s", "links.d2h.bandwidth=50GB/s", "links.duplex=100GB/s",
)  # fmt: skip
ALONE = ("gpu.copy_slowdown=0fraction",)  # in its model copies do not slow kernels
# what its planner (PressureFit, with recompute) predicts of the same step, run by us on a 2-core Intel Xeon
ITS_OWN = "| the rival's own planner, as it counts | bf16 | 9,763 | 12,033 | 81.1% | 42 s |"
# (model, machine, sequence, tokens per step), on each of these shares of its own memory
LADDERS = (
    ("qwen2.5-7b", "h100", 2048, 16384),
    ("qwen2.5-7b", "rtx4090", 2048, 16384),
    ("llama-3.1-8b", "rtx5090", 4096, 32768),
    ("llama-3.1-8b", "h100", 4096, 65536),
    ("qwen2.5-14b", "a100-pcie", 2048, 16384),
    ("qwen2.5-14b", "rtx5090", 2048, 16384),
    ("qwen2.5-32b", "h100", 2048, 16384),
    ("llama-3.2-3b", "rtx4090", 4096, 65536),
)
SHARES = (0.15, 0.3, 0.6, 0.8, 1.0, 1.25, 1.5)
CORES = usable_cores()
Point = tuple[str, str, tuple[str, ...], str, int, int]


def planned(point: Point) -> tuple[plans.Row, dict[str, float]]:
    """One row, planned on all cores."""
    model, machine, changes, name, seq_len, tokens = point
    profile = hardware.override(hardware.load(machine), list(changes))
    return plans.row(presets.load(model), profile, seq_len=seq_len, tokens_per_step=tokens, machine=name, workers=CORES)


def named(point: Point, row: plans.Row, known: dict[str, float]) -> tuple[plans.Row, dict[str, float]]:
    """A row that was planned before, with named policies predicted again but for those that are known."""
    model, machine, changes, *_ = point
    return plans.beside(row, presets.load(model), hardware.override(hardware.load(machine), list(changes)), known)


def bounded(point: Point, row: plans.Row) -> plans.Row:
    """A row that was planned before, with its bound computed again."""
    model, machine, changes, *_ = point
    return plans.bounded(row, presets.load(model), hardware.override(hardware.load(machine), list(changes)))


def kept(folder: Path) -> dict[tuple[str, str], tuple[plans.Row, dict[str, float]]]:
    """The rows of an earlier run, by model and machine."""
    if not (folder / "plans.csv").exists():
        return {}
    words = {field.name: str for field in fields(plans.Row) if field.type == "str"}
    table = pd.read_csv(folder / "plans.csv", dtype=words).fillna(dict.fromkeys(words, ""))
    found = {}
    for record in table.to_dict("records"):
        row = plans.Row(**{name: record.pop(name) for name in plans.COLUMNS})
        found[row.model, row.machine] = row, record
    return found


def rival() -> str:
    """Its point with our machine model and with its own, with fp32 moments and with its own bf16 ones, as text."""
    lines = [
        "| kernels | moments | tokens/s | computing alone | share | planning |",
        "|---|---|---:|---:|---:|---:|",
    ]
    models = (("slower beside copies", RIVAL), ("not slower beside copies, as the rival counts", RIVAL + ALONE))
    for (told, changes), (moments, precision) in itertools.product(models, (("fp32", "bf16"), ("bf16", "bf16_16bit"))):
        profile = hardware.override(hardware.load("h100"), list(changes))
        found = plan(
            presets.load("llama-3-8b"), profile, seq_len=4096, micro_batch_size=4, accumulation=4,
            precision=precision, workers=CORES,
        )  # fmt: skip
        alone = found.schedule.workload.tokens_per_step / (found.bound.areas_ns["gpu"] / 1e9)
        rate = found.prediction.tokens_per_s
        lines.append(
            f"| {told} | {moments} | {rate:,.0f} | {alone:,.0f} | {rate / alone:.1%} | {found.seconds:.1f} s |"
        )
    return "\n".join([*lines, ITS_OWN])


def brute_force(instance: int) -> float | None:
    """By what fraction the plan of a random small instance exceeds the best of all placements; None: nothing fits."""
    chance = random.Random(instance)
    blocks = chance.choice((1, 1, 2, 2, 2, 3, 3, 4))
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=blocks, vocab_size=8192)
    workload = Workload(micro_batch_size=chance.choice([1, 2, 8, 32]), seq_len=512, accumulation=chance.choice([1, 2]))
    held = 12 * model.total_params / 1e9
    profile = hardware.override(
        hardware.load(chance.choice(MACHINES)),
        [
            f"gpu.memory={chance.uniform(0.4, 2.5) * held + 1.0:.3f}GB",
            f"host.memory={chance.uniform(1.0, 3.0) * held:.3f}GB",
        ],
    )
    budget, best, counts = memory_of(profile), math.inf, range(blocks + 1)
    for resident, offload, defer, through in itertools.product(range(blocks + 3), counts, counts, counts):
        knobs = {"resident": resident, "offload": offload, "defer": defer, "through": through}
        schedule = policies.build("streamed", model, workload, budget, **knobs)
        if shortage(schedule, profile, budget) is None:
            best = min(best, predict(schedule, profile, budget).period_ns)
    try:
        found = plan(
            model, profile, seq_len=512, micro_batch_size=workload.micro_batch_size, accumulation=workload.accumulation
        )
    except NothingFits:
        return None if math.isinf(best) else math.inf
    return found.prediction.period_ns / best - 1.0


def against_brute_force(instances: int, out: Path) -> None:
    """Write down how many plans of random small instances are slower than the best of all placements, and faster."""
    with ProcessPoolExecutor(CORES) as pool:
        work = pool.map(brute_force, range(instances), chunksize=4)
        gaps = [gap for gap in track(work, "planning small instances", total=instances) if gap is not None]
    worse = [gap for gap in gaps if gap > 0]
    slower = f"{len(worse)}, at most by {max(worse):.2%}" if worse else "none"
    told = (
        f"{len(gaps)} of {instances} small instances (one to four blocks, memory drawn at random) have room for "
        f"something. The plan is slower than the best of all placements in {slower}, and faster, by what a placement "
        f"does not say, in {sum(gap < 0 for gap in gaps)}."
    )
    command = f"`python benchmarks/plans.py --brute-force {instances}`"
    write_text(out / "brute_force.md", f"# Plans against brute force\n\n{told} Predicted, by {command}, {today()}.\n")
    print(told)


def ladder(case: tuple[str, str, int, int, str]) -> tuple[list[float], list[float]]:
    """Periods, ns, with more and more of one memory: each planned alone, and each begun with the one before."""
    name, machine, seq_len, tokens, tier = case
    model, profile = presets.load(name), hardware.load(machine)
    own = memory_of(profile)
    alone: list[float] = []
    handed: list[float] = []
    before: list[Schedule] = []
    for share in SHARES:
        budget = replace(own, **{tier: int(getattr(own, tier) * share)})
        step = {"seq_len": seq_len, "tokens_per_step": tokens, "memory": budget}
        try:
            found = plan(model, profile, **step)  # type: ignore[arg-type]
        except NothingFits:
            continue
        alone.append(found.prediction.period_ns)
        if handed and found.prediction.period_ns > handed[-1]:
            found = plan(model, profile, **step, first=before)  # type: ignore[arg-type]
        handed.append(found.prediction.period_ns)
        before = [found.schedule]
    return alone, handed


def with_more_memory(out: Path) -> None:
    """Write down how often a plan with more memory is slower than one with less."""
    cases = [(*point, tier) for point in LADDERS for tier in ("device_bytes", "host_bytes")]
    with ProcessPoolExecutor(CORES) as pool:
        found = list(track(pool.map(ladder, cases), "planning with more memory", total=len(cases)))
    alone = [pair for periods, _ in found for pair in itertools.combinations(periods, 2)]
    handed = [pair for _, periods in found for pair in itertools.combinations(periods, 2)]
    slower = [more / less - 1.0 for less, more in alone if more > less]
    never = sum(more > less for less, more in handed)
    shares = ", ".join(f"{share:g}" for share in SHARES)
    told = (
        f"{len(LADDERS)} steps on machines with {shares} times their device or host memory: {len(alone)} pairs of a "
        f"plan with less and one with more. Planned alone, as a search that begins anew each time, more memory is "
        f"slower in {len(slower)} of them, at most by {max(slower, default=0.0):.1%}. Each begun with the plan before "
        f"(`megatrain plan --start FILE`, and what `sweep` and `--what-if` do of themselves), in {never}."
    )
    made = f"Predicted from datasheets, by `python benchmarks/plans.py --more-memory`, {today()}."
    write_text(out / "more_memory.md", f"# More memory\n\n{told} {made}\n")
    print(told)


def _table(rows: dict[tuple[str, str], tuple[plans.Row, dict[str, float]]], points: Sequence[Point]) -> pd.DataFrame:
    return plans.frame([rows[p[0], p[3]] for p in points if (p[0], p[3]) in rows])


def _others(rates: dict[str, float], named: Sequence[str]) -> dict[str, float]:
    """The rates of policies that are not to be predicted again: none where none are named."""
    return {name: rate for name, rate in rates.items() if named and name not in named}


def _reasons(table: pd.DataFrame) -> list[str]:
    """Why points do not fit, as a section, if there are any."""
    points = table[table["reason"] != ""].to_dict("records")
    rows = [f"- {point['model']} on {point['machine']}: {point['reason']}" for point in points]
    return ["## What does not fit", "", *rows, ""] if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("analysis/results/plans"))
    parser.add_argument("--again", nargs="+", metavar="TEXT", default=[])
    parser.add_argument("--named", nargs="*", metavar="POLICY")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--brute-force", type=int, metavar="N")
    parser.add_argument("--more-memory", action="store_true")
    chosen = parser.parse_args()
    if chosen.more_memory:
        with_more_memory(chosen.out)
        return
    if chosen.brute_force:
        against_brute_force(chosen.brute_force, chosen.out)
        return
    machines = (*MACHINES, *LATER)
    grid: list[Point] = [(model, machine, (), machine, SEQ, TOKENS) for model in MODELS for machine in machines]
    points = [*grid, *SPECIAL]
    rows = kept(chosen.out)
    anew = [p for p in points if any(text in name for text in chosen.again or [""] for name in (p[0], p[3]))]
    if not anew:
        parser.error(f"no model or machine contains {' or '.join(chosen.again)}")
    if chosen.named is not None or chosen.bounds:
        if not rows:
            which = "--bounds" if chosen.bounds else "--named"
            parser.error(f"{which} goes on from plans, and there are none in {chosen.out}: leave it out first")
        known = [(p, *rows[p[0], p[3]]) for p in anew if (p[0], p[3]) in rows]
    if chosen.bounds:
        for point, row, rates in track(known, "bounding"):
            rows[row.model, row.machine] = row if row.reason else bounded(point, row), rates
    elif chosen.named is not None:
        fit = [(point, row, _others(rates, chosen.named)) for point, row, rates in known if not row.reason]
        with ProcessPoolExecutor(CORES) as pool:
            found: Iterable[tuple[plans.Row, dict[str, float]]] = pool.map(named, *zip(*fit, strict=True))
            for row, rates in track(found, "predicting named policies", total=len(fit)):
                rows[row.model, row.machine] = row, rates
    else:
        for point in track(anew, "planning"):
            rows[point[0], point[3]] = planned(point)
            write_text(chosen.out / "plans.csv", _table(rows, points).to_csv(index=False))
    table = _table(rows, points)
    write_text(chosen.out / "plans.csv", table.to_csv(index=False))
    figure.save(figure.figure_of(plans.against_bound(table)), chosen.out / "plans", table)
    fits = table[table["reason"] == ""]
    text = [
        "# Plans, named policies and the bound",
        "",
        f"Predicted from datasheet profiles; nothing here was measured. One step is {TOKENS:,} tokens in sequences of "
        f"{SEQ:,} unless the machine's name says otherwise, bf16 weights and gradients, fp32 moments. Named policies "
        "keep what they keep by themselves, `zero3_offload` and `zero_offload` the same state as the plan "
        "(`master=weights`). Each is "
        "tried with what its system or its user would choose (`tried_with` in analysis/plans.py), and the fastest "
        "counts: activations recomputed or kept, what of the state waits, stays or lives on a drive, and of "
        "micro-batches the two largest that fit, and smaller ones as long as they are faster. "
        f"Made by `python benchmarks/plans.py`; planning took what is shown with "
        f"{' or '.join(sorted(set(table['planned_by'])))}, "
        f"{' to '.join(sorted({table['planned_on'].min(), table['planned_on'].max()}))}, each point as plans.csv says.",
        "",
        f"Of {len(table)} points {len(fits)} fit. The plan is within 3 % of the bound over all exact schedules on "
        f"{(fits['gap'] <= 0.03).sum()}, the median gap is {fits['gap'].median():.1%}, the largest "
        f"{fits['gap'].max():.1%}; a bound that leaves out order is not always attainable. What the gap is made of, "
        "each to be multiplied with the others: *more work* for the fullest resource than a placement in fractions "
        "would leave for any (negative where slow-downs that the bound counts stand under *sharing*); a *circle* of "
        "ops over several streams, each waiting for the last, that lasts longer than any resource; and what ops take "
        "longer because they *share* a resource.",
        "",
        plans.markdown(table),
        "",
        "![shares of the bound](plans.png)",
        "",
        "[Against brute force](brute_force.md): small instances, all placements tried.",
        "[With more memory](more_memory.md): whether a plan is ever slower.",
        "",
        *_reasons(table),
        "## A rival's planner",
        "",
        "Llama-3 8B on an H100 as als244/dataflow (c56b6ab) takes it: 989 TFLOP/s x 0.65, attention less, memory at 3 "
        "TB/s x 0.9, links of 50 GB/s each way; 12 GiB of device memory, 4 x 4 sequences of 4,096 tokens. It updates "
        "on the GPU, with bf16 weights, gradients and moments on the host: 8 bytes per parameter (our `bf16_16bit`) "
        "where fp32 moments make 12. Its planner was run by hand, on an Intel Xeon with two cores, for one step that "
        f"begins with nothing on the GPU (of two it predicts 9,625); ours on {machine_name()} with {CORES} processes, "
        f"{today()}.",
        "",
        rival(),
        "",
    ]
    write_text(chosen.out / "README.md", "\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())

"""The figures that the README and docs/ tell, against the stored results that they come from; and their Python runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import validation
from megatrain.token_file import TokenFile
from schedules import policies, presets
from schedules.op import Tier
from schedules.optimizer import step_flops
from schedules.schedule import Knob
from schedules.workload import OPTIMIZERS, Workload
from sim import hardware
from sim.prediction import Prediction, memory_of, predict
from sim.units import scaled, seconds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "analysis" / "results"
MODELS = {"1B": "llama-3.2-1b", "3B": "llama-3.2-3b", "7B": "qwen2.5-7b", "8B": "llama-3.1-8b", "14B": "qwen2.5-14b"}
SPLITS = {"2k": "1x2x1024", "8k": "1x8x1024", "64k": "4x4x4096"}  # of a step on the GPU
IN_12_GIB = {"8k": "2x1x4096", "64k": "16x1x4096"}
CARDS = {
    "H100": "h100",
    "RTX PRO 6000": "rtxpro6000",
    "RTX 4090": "rtx4090",
    "RTX 5060 Ti": "rtx5060ti",
    "RTX 5090": "rtx5090",
    "L40S": "l40s",
    "GH200": "gh200",
    "MI355X": "mi355x",
}


@cache
def document(name: str) -> str:
    return (ROOT / name).read_text()


def says(name: str, text: str) -> None:
    """That a document has these words, wherever its lines break; of a percentage, with the space that ours have."""
    text = re.sub(r"(?<=\d)%", " %", text)
    assert text in " ".join(document(name).split()), f"{name} does not say: {text}"


def table(name: str, *header: str) -> Iterator[list[str]]:
    """The rows of the one table of a document whose header begins so."""
    begins = "| " + " | ".join(header)
    (found,) = (part for part in document(name).split("\n\n") if part.startswith(begins))
    for line in found.strip().splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def row(frame: pd.DataFrame, **values: object) -> pd.Series[Any]:
    """The one row that has these values."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1, values
    return frame.iloc[0]


def per_cent(share: float, form: str = "+.1%") -> str:
    """With the space that ours have."""
    return f"{share:{form}}".replace("%", " %")


# ---- plans


@pytest.fixture
def plans() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "plans" / "plans.csv")


def times(ratio: float) -> str:
    return "-" if pd.isna(ratio) else f"{ratio:.2f}x"


def test_plans_in_the_table_are_those_stored(plans: pd.DataFrame) -> None:
    shown = list(table("README.md", "model", "machine", "plan, tokens/s"))
    assert len(shown) > 10
    for model, machine, *figures in shown:
        of = row(plans, model=model, machine=machine)
        named = of.best_named_tokens_per_s
        assert figures == [
            f"{of.tokens_per_s:,.0f}",
            f"{1 / (1 + of.gap):.1%}",
            "none fits" if pd.isna(named) else f"`{of.best_named}` {named:,.0f}",
            times(of.tokens_per_s / named),
            times(of.tokens_per_s / of.zero3_offload_tokens_per_s),
        ], (model, machine)


def test_what_is_said_of_plans(plans: pd.DataFrame) -> None:
    against = (plans.tokens_per_s / plans.best_named_tokens_per_s).dropna()
    assert against.min() >= 1.0
    says("README.md", f"any of the {len(plans)} points; the plan is {against.median():.2f} times as fast")
    says("README.md", f"On {sum(plans.gap <= 0.03)} points it is within 3 %; the median is {plans.gap.median():.1%}")
    shared = plans.machine.isin([name for name in hardware.names() if hardware.load(name).unified_memory])
    says("README.md", f"up to {plans[shared].planning_s.max():.0f} s where CPU and GPU share one memory")
    quick, slow = (plans[~shared & (plans.model == name)] for name in ("qwen2.5-7b", "llama-3.1-70b"))
    seconds, usual, long = quick.planning_s, slow[slow.tokens_per_step == 16384].planning_s, slow.planning_s.max()
    says("README.md", f"up to {long:.0f} s in steps of 128k tokens")
    says(
        "README.md",
        f"{seconds.min():.0f} to {seconds.max():.0f} s for a 7B model; {usual.min():.0f} to {usual.max():.0f} s",
    )
    desktop = row(plans, model="llama-3.1-70b", machine="rtx4090")
    larger = row(plans, model="llama-3.1-70b", machine="rtx4090, 128k tokens")
    says("README.md", f"{desktop.tokens_per_s:.0f} tokens/s for 70B, and {larger.tokens_per_s:.0f} in steps of 128k")
    says("README.md", f"(MFU {larger.mfu:.0%})")
    says("README.md", f"{1 / (1 + larger.gap):.1%} of the bound is a gap of {larger.gap:.0%}")
    assert 0.35 < plans.gap.max() < 0.4
    says("README.md", "the gaps are up to 40 %")


def test_how_far_the_search_was_tried() -> None:
    small, more = ((RESULTS / "plans" / f"{page}.md").read_text() for page in ("brute_force", "more_memory"))
    found = re.search(r"(\d+) of [\d,]+ small instances .* all placements in none", small)
    assert found, "some were planned slower: say so"
    says("README.md", f"Of {found[1]} small instances in which any placement fits, none was planned slower")
    found = re.search(r"(\d+) pairs .* slower in (\d+) of them, at most by ([\d.]+%)", more)
    assert found
    says(
        "README.md",
        f"in [{found[2]} of {found[1]} pairs](analysis/results/plans/more_memory.md), by {found[3]} at most",
    )


# ---- what others measured


@pytest.fixture
def published() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "published" / "published.csv", keep_default_na=False, na_values={"error": [""]})


@pytest.fixture
def compared(published: pd.DataFrame) -> pd.DataFrame:
    """The runs that are known, each once."""
    return published[(published.standing == "compared") & (published.same_run_as == "")]


def test_what_is_said_of_published_numbers(published: pd.DataFrame, compared: pd.DataFrame) -> None:
    standing = published.standing.value_counts()
    says(
        "README.md",
        f"{len(published)} published points as data, {standing['compared'] + standing['assumed']} of them predicted",
    )
    says("README.md", f"The runs behind {standing['compared']} of them ({len(compared)} runs, on eight kinds of GPU)")
    assert compared.machine.nunique() == 8
    error, size = compared.error, compared.error.abs()
    says(
        "README.md",
        f"median error {error.median():+.0%}, median absolute error {size.median():.0%}, worst {error.max():+.0%}",
    )
    assert error.max() == size.max()
    fit = compared[(compared.fits == "True") & (compared.machine != "mi355x")]
    says("README.md", f"within {fit.error.abs().median():.1%} at the median, where the run fits")
    says("README.md", "Published measurements on seven kinds of GPU are predicted")
    assert fit.machine.nunique() == 7
    says("README.md", f"of the other {(compared.fits == 'True').sum()}, leaving out")
    in_fp8 = compared[compared.system == "LLM.Q, fp8"].error
    said = f"{in_fp8.median():.0%} at the median, {in_fp8.min():.0%} to {in_fp8.max():+.0%}".replace("% to", " to")
    says("README.md", f"LLM.Q with products in fp8, {len(in_fp8)} runs: {said}")
    says("README.md", f"{standing['assumed']} more points need an assumption")
    says("README.md", f"{standing['not predicted']} are listed with the reason")


def test_llmq_in_the_table_is_as_stored(compared: pd.DataFrame) -> None:
    llmq = compared[compared.system == "LLM.Q"]
    shown = list(table("README.md", "LLM.Q, bf16"))
    assert len(shown) == 9
    for where, _, *figures in shown:
        size, card, *remark = where.replace(" (", ", (").split(", ", 2)
        of = row(llmq, model=f"qwen2.5-{size.lower()}", machine=CARDS[card])
        assert figures == [f"{float(of.published):,.0f}", f"{float(of.predicted):,.0f}", per_cent(of.error)], where
        assert (of.fits == "True") == (not remark), where
    left = llmq[[f"{of.model} {of.machine}" not in _shown(shown) for of in llmq.itertuples()]]
    says("README.md", f"the others are {left.error.min():.0%} to {left.error.max():+.0%} off".replace("% to", " to", 1))


def _shown(rows: list[list[str]]) -> set[str]:
    pairs = (where.replace(" (", ", (").split(", ")[:2] for where, *_ in rows)
    return {f"qwen2.5-{size.lower()} {CARDS[card]}" for size, card in pairs}


def test_errors_by_gpu_are_those_stored(compared: pd.DataFrame) -> None:
    for card, runs, errors in table("docs/accuracy.md", "GPU", "runs"):
        name, _, products = card.partition(", ")
        of = compared[compared.machine.eq(CARDS[name]) & compared.system.str.endswith(", fp8").eq(products == "fp8")]
        assert len(of) == int(runs), card
        told = re.findall(r"[+-]?\d+", re.sub(r"\(.*?\)", "", errors))
        stored = [round(100 * error) for error in of.error]
        assert sorted(told) == sorted(f"{error:+}" if error else "0" for error in stored), card


def test_what_is_said_of_the_nearest_rival() -> None:
    cells = pd.read_csv(RESULTS / "rival" / "rival.csv")
    says("README.md", f"measured {len(cells)} step configurations of Llama-3 8B on an H100 twice")
    first, second = (cells.predicted_tokens_per_s / cells[of] for of in ("first_tokens_per_s", "tokens_per_s"))
    least, middle, most = (f"{share:.2f}" for share in (first.min(), first.median(), first.max()))
    says("README.md", f"at {least} to {most} of the tokens/s of its first campaign, [median {middle}]")
    says("README.md", f"{second.min():.2f} to {second.max():.2f} of its second, median {second.median():.2f}")
    step = cells[(cells.seq_len == 4096) & (cells.tokens_per_step == 65536) & (cells.device_GiB == 12)].iloc[0]
    says("README.md", f"it measured {step.first_tokens_per_s:,.0f} and {step.tokens_per_s:,.0f}")
    ours, (theirs,) = {}, [*table("analysis/results/plans/README.md", "kernels", "moments")][-1:]
    for kernels, moments, rate, alone, *_ in table("analysis/results/plans/README.md", "kernels", "moments"):
        ours[kernels.split(",")[0], moments] = rate, alone
    plain, slowed = ours["not slower beside copies", "bf16"], ours["slower beside copies", "bf16"]
    says("README.md", f"predicts {theirs[2]} tokens/s after {theirs[5]}")
    says("README.md", f"predicts {plain[0]}, or {slowed[0]} if copies slow kernels down")
    says("README.md", f"For computation alone it counts {theirs[3]}, and we {plain[1]}")


# ---- runs on CPUs


def test_the_demonstration_is_that_stored() -> None:
    runs = pd.read_csv(RESULTS / "cpu-demo" / "predicted_measured.csv")
    shown = list(table("README.md", "policy", "predicted step", "measured step (median)"))
    assert len(shown) == len(runs)
    for policy, *figures in shown:
        of = row(runs, policy=policy.strip("`"))
        assert figures == [
            f"{of.predicted_s * 1e3:.1f} ms",
            f"{of.measured_s * 1e3:.1f} ms",
            per_cent(of.predicted_s / of.measured_s - 1),
            f"{of.predicted_rank:.0f} / {of.measured_rank:.0f}",
        ], policy


@pytest.fixture
def validated() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "validation-cpu" / "predicted_measured.csv")


def _summary(errors: pd.Series[float]) -> list[str]:
    of = validation.summary(list(errors))
    sizes = [per_cent(size, ".1%") for size in (of.median, of.p95)]
    return [per_cent(of.bias), *sizes, per_cent(of.worst), per_cent(of.within_4, ".0%")]


def test_the_validation_is_that_stored(validated: pd.DataFrame) -> None:
    replay, predict, rounds = table("README.md", "level", "points", "bias of predicted time")
    assert replay[1:] == [str(len(validated)), *_summary(validated.replay_error)]
    assert predict[1:] == [str(len(validated)), *_summary(validated.predict_error)]
    middle, most = (per_cent(share, ".1%") for share in (validated.noise.median(), validated.noise.max()))
    assert rounds[1:] == [str(len(validated)), "", middle, "", most, ""]
    tau, regret = validation.ranking(validated)
    says("README.md", f"Kendall's tau {tau:.2f}; the one chosen is {regret:.1%} slower than the fastest")


@pytest.mark.parametrize(
    ("folder", "name"), [("validation-cpu", "timed (stored)"), ("validation-xeon", "2026-11-26, stored)")]
)
def test_stored_validations_stand_among_all(folder: str, name: str) -> None:
    of = pd.read_csv(RESULTS / folder / "predicted_measured.csv")
    (shown,) = (figures for what, *figures in table("docs/accuracy.md", "passes over memory") if what.endswith(name))
    assert shown[1:] == [per_cent(of.noise.median(), ".1%"), *_summary(of.predict_error)]


# ---- a GPU of our own


@pytest.fixture
def gpu() -> dict[str, dict[str, Any]]:
    return json.loads((RESULTS / "gpu" / "h200" / "gpu.json").read_text())["rows"]


def test_rows_of_the_gpu_are_those_stored(gpu: dict[str, dict[str, Any]]) -> None:
    def rate(rows: dict[str, Any], name: str) -> str:
        return f"{rows[name]['tokens_per_s']:,.0f}"

    shown = list(table("README.md", "model, tokens a step", "policy"))
    assert len(shown) > 10
    for where, how, *figures in shown:
        size, tokens, *_ = where.split(", ")
        splits, suffix = (IN_12_GIB, " in 12 GiB") if "12 GiB" in where else (SPLITS, "")
        name, split = MODELS[size], splits[tokens]
        policy, precision = how.split(",")[0], "bf16_16bit" if "bf16 moments" in how else "bf16"
        knobs = " master=weights" if policy == "zero3_offload" else ""  # the state that the others have
        step = gpu["steps"][f"{name} {policy}{knobs} {split} {precision}{suffix}"]
        speed, error, torch, deepspeed, paper = (figure.split(" (")[0].strip() for figure in figures)
        assert speed == f"{step['tokens_per_s']:,.0f}", where
        assert abs(float(error.split()[0]) - 100 * step["prediction_error"]) < 0.051, where
        moments = "bf16_16bit" if size == "3B" else precision  # as the text says above the table
        rivals = {
            torch: (gpu["rivals"], f"{name} plain torch {split} {moments}"),
            deepspeed: (gpu["rivals"], f"{name} deepspeed zero3 {split} {precision}"),
            paper: (gpu["steps"], f"{name} megatrain_released {split} {precision}"),
        }
        for told, (rows, case) in rivals.items():
            assert not told or told == rate(rows, case), (where, case)


def test_rates_among_the_aims_are_those_stored(gpu: dict[str, dict[str, Any]]) -> None:
    """Of each aim of docs/gpu.md, what was measured."""
    steps, rivals = gpu["steps"], gpu["rivals"]

    def rate(rows: dict[str, Any], name: str) -> float:
        return rows[name]["tokens_per_s"]

    whole, small = steps["llama-3.1-8b planned 4x4x4096 bf16_16bit"], "llama-3.1-8b planned {} bf16_16bit in 12 GiB"
    peak = max(product["TFLOP_s"]["median"] for product in gpu["gemm"].values() if "TFLOP_s" in product)
    share = whole["model_TFLOP_s"] / peak
    says(
        "docs/gpu.md",
        f"{whole['tokens_per_s']:,.0f}; {share:.0%} of the fastest matrix product there, {peak:.0f} TFLOP/s",
    )
    says(
        "docs/gpu.md",
        f"the same in 12 GiB: 10,100 | {rate(steps, small.format(IN_12_GIB['64k'])):,.0f}, ",
    )
    short = steps[small.format(IN_12_GIB["8k"])]
    says("docs/gpu.md", f"missed: {short['tokens_per_s']:,.0f} tokens/s, {short['above_bound']:.0%} above")
    large = steps["qwen2.5-14b planned 4x4x4096 bf16"]
    of_peak = large["model_TFLOP_s"] / peak
    says("docs/gpu.md", f"{large['tokens_per_s']:,.0f} tokens/s, {of_peak:.0%} of the fastest product")

    def over(rows: dict[str, Any], size: str, rival: str, tokens: str, policy: str = "planned") -> float:
        split = SPLITS[tokens]
        ours = rate(steps, f"{MODELS[size]} {policy} {split} bf16")
        return ours / rate(rows, f"{MODELS[size]} {rival} {split} bf16")

    zero3 = {
        (size, n): f"{over(rivals, size, 'deepspeed zero3', n):.1f}" for size in ("3B", "7B") for n in ("2k", "8k")
    }
    says("docs/gpu.md", f"3B: {zero3['3B', '2k']} times at 2k tokens a step, {zero3['3B', '8k']} at 8k")
    says("docs/gpu.md", f"7B: {zero3['7B', '2k']} and {zero3['7B', '8k']}, against DeepSpeed")
    streamed = [f"{over(rivals, '3B', 'deepspeed zero3', tokens, 'streamed'):.2f}" for tokens in ("2k", "8k")]
    says("docs/gpu.md", f"`streamed`, whose state is all on the host: {' and '.join(streamed)}, 3B.")
    ours = ("planned", "streamed", "megatrain")
    paper = [over(steps, "3B", "megatrain_released", "8k", policy) for policy in ours]
    says("docs/gpu.md", f"{paper[0]:.1f} (`streamed` {paper[1]:.2f}; ")
    says("docs/gpu.md", f"`megatrain`, {paper[2]:.2f}), 3B at 8k tokens")
    measured = [row for row in steps.values() if "step_s" in row]
    near = sum(abs(row["prediction_error"]) <= 0.05 for row in measured)
    says("docs/gpu.md", f"| {near} of {len(measured)}, as each was predicted then")
    says(
        "README.md", f"{len(measured)} of them with our executor, of which {near} took within 5 % of the predicted time"
    )
    all_of_them = len(measured) + sum("step_s" in row for row in rivals.values())
    says("README.md", f"We measured [{all_of_them} step configurations](#a-gpu-of-our-own) on H200s")
    says("docs/gpu.md", f"In an hour on H200s, {all_of_them} step configurations were measured")


def test_policies_are_as_fast_in_the_order_in_which_they_were_predicted(gpu: dict[str, dict[str, Any]]) -> None:
    says("README.md", "the five schedules that our executor ran rank as predicted")
    expected = json.loads((RESULTS / "gpu-expected" / "h200.json").read_text())
    policies = ("planned", "streamed", "megatrain", "zero3_offload master=weights", "megatrain_released")
    keys = [f"llama-3.2-3b {policy} {SPLITS['8k']} bf16" for policy in policies]
    steps = gpu["steps"]
    for times in (
        [steps[key]["step_s"]["median"] for key in keys],
        [steps[key]["predicted_step_s"] for key in keys],
        [expected[key]["step_s"] for key in keys],
    ):
        assert times == sorted(times)


def test_compiled_rivals_are_those_stored(gpu: dict[str, dict[str, Any]]) -> None:
    compiled = {
        tokens: gpu["rivals"][f"llama-3.2-3b plain torch compiled=blocks {SPLITS[tokens]} bf16_16bit"]["tokens_per_s"]
        for tokens in ("2k", "8k")
    }
    says("README.md", f"on the 3B {compiled['2k']:,.0f} at 2k and {compiled['8k']:,.0f} at 8k")
    small = gpu["rivals"][f"llama-3.2-1b plain torch compiled=blocks {SPLITS['8k']} bf16_16bit"]["tokens_per_s"]
    says("README.md", f"PyTorch reaches {small:,.0f} tokens/s on the 1B at 8k")


def test_the_optimizer_beside_others_is_as_stored(gpu: dict[str, dict[str, Any]]) -> None:
    beside = [row["ours_Gparam_s"] / row["Gparam_s"] for row in gpu["adam"].values() if "ours_Gparam_s" in row]
    says("docs/gpu.md", f"{min(beside):.1f} to {max(beside):.1f} times as fast, in three precisions")
    moved = {row["case"]: row["of_copy"] for row in gpu["adam"].values() if "of_copy" in row}
    coded, others = moved.pop("bf16_8bit, 16 threads"), moved.values()
    says("docs/gpu.md", f"{min(others):.2f} to {max(others):.1f} times what a copy moves")
    says("docs/gpu.md", f"but with 8-bit moments {coded:.2f}")


# ---- docs/buying.md and docs/training.md


def test_the_worked_example_is_the_sweep_stored() -> None:
    sweep = pd.read_csv(RESULTS / "buying" / "sweep.csv")
    shown = list(table("docs/buying.md", "machine", "host memory"))
    assert len(shown) > 10
    for machine, memory, link, *figures in shown:
        size, unit = memory.split()
        nbytes = float(size) * {"GB": 1e9, "TB": 1e12}[unit]
        of = row(sweep, machine=machine, host_memory=nbytes, h2d_bandwidth=float(link.split()[0]) * 1e9)
        drives = f"{of.drives:.1f}" if round(of.drives, 1) else "0"
        assert figures == [f"{of.tokens_per_s:,.0f}", f"{of.days:.1f}", drives, f"{of.cost:,.0f}"], (
            machine,
            memory,
            link,
        )


def test_a_faster_link_may_make_a_schedule_slower_as_is_told() -> None:
    def step_s(duplex: str, *more: str) -> float:
        machine = hardware.override(hardware.load("h200"), [f"links.duplex={duplex}GB/s", *more])
        step = Workload(micro_batch_size=8, seq_len=1024)
        schedule = policies.build("megatrain", presets.load("qwen2.5-7b"), step, memory_of(machine))
        return predict(schedule, machine).period_ns / 1e9

    fast, slow = step_s("100"), step_s("57")
    says("docs/buying.md", f"takes {fast:.3f} s on an H200")
    says("docs/buying.md", f"and {slow:.3f} s, {1 - slow / fast:.1%} less")
    memory = ("host.memory_bandwidth=400GB/s", f"host.adam_efficiency={0.75 * 235 / 400}")
    says("docs/buying.md", f"{step_s('100', *memory):.3f} s against {step_s('57', *memory):.3f}")


def test_what_is_said_of_weights_in_4_bits_is_predicted_so() -> None:
    def adapters(
        model: str,
        machine: str,
        batch: int,
        room: tuple[str, ...] = (),
        seq_len: int = 1024,
        accumulation: int = 1,
        **knobs: Knob,
    ) -> Prediction:
        profile = hardware.override(hardware.load(machine), room)
        step = Workload(micro_batch_size=batch, accumulation=accumulation, seq_len=seq_len)
        found = policies.build("lora_streamed", presets.load(model), step, memory_of(profile), **knobs)
        return predict(found, profile)

    def told(found: Prediction) -> str:
        return f"{found.tokens_per_s:,.0f} tokens/s"

    whole, *packed = (
        adapters("llama-3.1-70b", "rtx4090", batch, ("host.memory=1TB",), keep=0, quantised=of)
        for of, batch in ((None, 4), ("nf4", 4), ("nf4", 8))
    )
    first, second = table("docs/training.md", "LoRA on Llama-3.1-70B, an RTX 4090 (datasheet, predicted)")
    assert first[1].startswith(f"{whole.peak_bytes[Tier.HOST] / 1e9:.1f} GB: more than that machine's 128")
    assert first[2] == f"{told(whole)} with more" and first[3] == "does not fit the GPU"
    assert second[1:] == [f"{packed[0].peak_bytes[Tier.HOST] / 1e9:.1f} GB", *map(told, packed)]
    assert adapters("llama-3.1-70b", "rtx4090", 8, ("host.memory=1TB",), keep=0).does_not_fit
    short, long = (adapters("llama-3.1-70b", "h200", 4, keep=0, quantised=of).period_ns / 1e9 for of in ("nf4", None))
    says("docs/training.md", f"predicted to take 4 sequences in {short:.2f} s instead of {long:.2f}")
    largest = adapters("llama-3.1-405b", "rtx5090", 4, quantised="nf4", nvme=76, activations="inputs", resident=0)
    assert not largest.does_not_fit
    says("docs/training.md", f"predicted to learn at {told(largest)}")
    by_matrices = {"quantised": "nf4", "activations": "inputs", "whole": "matrices"}
    rows = table(
        "docs/training.md", "LoRA beside NF4, `whole=matrices`, an RTX 5090 (datasheet, predicted), 16 sequences"
    )
    for name, row in zip(("deepseek-v3.2", "glm-5", "kimi-k2"), rows, strict=True):
        params, batch = presets.load(name).total_params, int(row[1])
        found = adapters(name, "rtx5090", batch, ("host.memory=1TB",), 2048, 16 // batch, **by_matrices)
        assert not found.does_not_fit and f"{params / 1e9:,.0f} billion" in row[0]
        sizes = [f"{found.peak_bytes[tier] / 1e9:.1f} GB" for tier in (Tier.DEVICE, Tier.HOST)]
        assert row[2:] == [*sizes, told(found)]
        if name == "glm-5":
            says(
                "README.md",
                f"at [{told(found)}](docs/training.md#frozen-weights-in-4-bits), in {sizes[1][:3]} GB of host",
            )
        assert adapters(name, "rtx5090", 1, ("host.memory=1TB",), 2048, quantised="nf4", resident=0).does_not_fit
    at_once, apart = (
        adapters("deepseek-v3.2", "h200", 4, (), 2048, 4, **{**by_matrices, "whole": whole})
        for whole in ("blocks", "matrices")
    )
    says("docs/training.md", f"makes {told(at_once)} of DeepSeek-V3.2 in these steps, and {apart.tokens_per_s:,.0f}")
    says(
        "docs/training.md", f"a block of a GLM-5 is {presets.load('glm-5').params(5) * 2 / 1e9:.1f} GB when it is whole"
    )
    on_desktop = adapters(
        "nemotron-3-super-120b-a12b", "rtx5090", 3, ("host.memory=128GB",), seq_len=4096, quantised="nf4"
    )
    half_a_trillion = adapters("nemotron-3-ultra-550b-a55b", "h200", 6, seq_len=4096, quantised="nf4")
    assert not on_desktop.does_not_fit and not half_a_trillion.does_not_fit
    says("docs/training.md", f"predicted to learn there at {told(on_desktop)} with 128 GB of host memory")
    host = half_a_trillion.peak_bytes[Tier.HOST] / 1e9
    says("docs/training.md", f"at {told(half_a_trillion)} on an H200, in {host:.0f} GB of the host's")


def test_losses_by_precision_are_those_stored() -> None:
    stored = {
        (precision, float(rate)): loss
        for precision, rate, *_, loss in table("analysis/results/precision/README.md", "precision", "learning rate")
    }
    for rate, exact, stochastic, nearest in table("docs/training.md", "learning rate"):
        at = float(rate)
        told = [stored["fp32", at], stored["bf16_16bit", at], stored["bf16_16bit, to nearest", at]]
        assert [exact, stochastic, nearest] == told, rate
        for precision in ("bf16_split", "bf16_fp32"):
            assert abs(float(stored[precision, at].split()[-1]) - float(exact.split()[-1])) < 0.00101, precision


# ---- docs/python.md


def test_the_page_on_python_is_a_program_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = re.findall(r"```python\n(.*?)```", document("docs/python.md"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(pieces), names)
    assert names["best"] in (1, 2, 4, 8) and len(names["sweep"]) == 4
    assert len(names["trained"].losses) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"best.json", "measured.json"}


# ---- docs/training.md


class ByteTokenizer:
    """Stands for transformers': it begins what is asked to with a token of its own."""

    eos_token_id, pad_token_id = 257, 258

    @classmethod
    def from_pretrained(cls, name: str) -> ByteTokenizer:
        return cls()

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [256] * add_special_tokens + [*text.encode()]}


def test_the_page_on_training_makes_files_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = re.findall(r"```python\n(.*?)```", document("docs/training.md"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=ByteTokenizer))
    (tmp_path / "book.txt").write_text("words " * 400)
    exec("\n".join(pieces), {})
    step = Workload(micro_batch_size=1, seq_len=1024)
    text = TokenFile(path=tmp_path / "tokens.npy", vocab_size=258, workload=step)
    assert text.sequences == 2 and np.load("tokens.npy")[-1] == ByteTokenizer.eos_token_id
    rows = TokenFile(
        path=tmp_path / "rows.npy", vocab_size=259, workload=step, loss_mask=tmp_path / "mask.npy",
        document_end=ByteTokenizer.pad_token_id,
    )  # fmt: skip
    learned = rows.learned(0)
    assert learned is not None
    ended = [b"A reusable buffer on the GPU.", b"What orders two ops."]
    assert rows.batch(0)[learned].tolist() == [token for answer in ended for token in [*answer, 257]]


def test_what_is_said_of_muon() -> None:
    """Predicted as its command predicts it."""
    model, h200 = presets.load("llama-3.1-8b"), hardware.load("h200")
    about = "Llama-3.1-8B on an H200 (datasheet, predicted), `streamed`, sequences of 2,048 tokens"
    shown = {option: figures for option, *figures in table("docs/training.md", about, "host memory")}
    for optimizer in OPTIMIZERS:
        found = []
        for batch in (4, 32):
            step = Workload(micro_batch_size=batch, seq_len=2048, optimizer=optimizer)
            found.append(predict(policies.build("streamed", model, step, memory_of(h200)), h200))
        host = scaled(found[0].peak_bytes[Tier.HOST], "GB")
        assert shown[f"`--optimizer {optimizer}`"] == [host, *(seconds(one.period_ns / 1e9) for one in found)]
    of_blocks = sum(step_flops(model, step, i) for i in model.layers)
    says("docs/why.md", f"{of_blocks / 1e12:.0f} TFLOP a step for an 8B")

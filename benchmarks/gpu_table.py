"""The rows of `gpu.py` as Markdown: who measured, steps, what the aims speak of, then all other parts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

import gpu_machine
import gpu_rows
from gpu_machine import Row

from schedules.errors import Refused

STEPS = ("ways", "steps", "rivals")  # parts whose rows are steps
RIVALS = {  # in a column's words -> (policy, knobs) of a step of the same tokens and the same state
    "ZeRO-3": (gpu_rows.ZERO3, {}),
    "MegaTrain's code": ("megatrain_released", {}),
    "plain PyTorch": (gpu_rows.TORCH, {}),
    "compiled PyTorch": (gpu_rows.TORCH, {"compiled": "blocks"}),
}
SAME_STATE = {
    "ZeRO-3": "bf16",
    "plain PyTorch": "bf16_16bit",
    "compiled PyTorch": "bf16_16bit",
}  # the only precision in which that keeps what ours does
TRIED = " (tried)"  # which kernels, and whether graphs, is decided by rows of their own
UNTOLD = ("run", "said", "settings", "took_s")  # of a row that is no step's, by columns of their names
WITHIN = (0.04, 0.10)


def table(body: dict[str, Any]) -> str:
    """What a reader wants to see of gpu.json."""
    rows: dict[str, dict[str, Row]] = body["rows"]
    products = [row["TFLOP_s"]["median"] for row in rows.get("gemm", {}).values() if "TFLOP_s" in row]
    peak = max(products, default=None)
    lines = ["# One GPU, measured", ""]
    for number, run in enumerate(body["runs"]):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines.append(f"- run {number}: {run['gpu']}; {run['host']}; {run['date']}; {versions}; `{run['command']}`")
    lines += [
        "",
        "| case | step (s) | spread | tokens/s | MFU | HFU | predicted | above bound "
        "| GPU peak (GB) | host (GB) | run |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    taken = list(rows.get("steps", {}).values())
    for part in STEPS:
        tried = TRIED if part == "ways" else ""
        lines += [_step(row, peak, tried) for row in rows.get(part, {}).values() if not tried or row not in taken]
    told = [line for part, found in rows.items() if part not in STEPS for line in _as_they_are(part, found.values())]
    note = f"MFU and HFU are of {peak:,.0f} TFLOP/s, the fastest product measured here. " if peak else ""
    note += (
        "Predicted: how much longer the predicted step is than the measured one, from what links, memory and each op "
        "take alone here. The bound is that schedule's, from the same figures: a step below it had ops that took less "
        "than they had alone."
    )
    return "\n".join([*lines, "", note, "", *_errors(rows), *_beside(body), *told, ""])


def _as_they_are(part: str, rows: Iterable[Row]) -> list[str]:
    """A table for neighbours that tell the same: a column for each thing, the run last."""
    lines = [f"**{part}**", ""]
    for names, alike in itertools.groupby(rows, lambda row: [name for name in row if name not in UNTOLD]):
        columns = [*names, "run"]
        head = [re.sub("(GB|TFLOP|Gparam)_s", r"\1/s", name).replace("_", " ") for name in columns]
        cells = [[_value(row.get(name)) for name in columns] for row in alike]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(of)} |" for of in cells), ""]
    return lines


def _value(value: Any) -> str:
    """A number in four digits, the median of several with the least and the most, all else in words."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int():
            return f"{value:,}"
        case {"median": median, **others}:
            around = ", ".join(f"{name} {_value(other)}" for name, other in others.items())
            return f"{_value(median)} ({around})" if around else _value(median)
        case list() if value and all(isinstance(one, dict) and "median" in one for one in value):
            return " and ".join(map(_value, value))
        case str():
            return _cell(value)
    return _cell(json.dumps(value, default=str))


def _step(row: Row, peak: float | None, tried: str) -> str:
    if "error" in row:
        return f"| {row['case']}{tried} | {_cell(row['error'])} | | | | | | | | | {row['run']} |"
    step, way = row["step_s"], "".join(f", {name}" for name in ("fused", "graphs") if row.get(name)) + tried
    if not all(map(math.isfinite, row.get("losses", []))):
        way += ", **losses not finite**"
    way += "".join(
        f", **{told}**"
        for told, so in (
            ("Adam in several passes", not (row.get("adam_gpu", True) and row.get("adam_host", True))),
            ("torch waited for memory", row.get("alloc_retries", 0) > 0),
            (row.get("disturbed"), bool(row.get("disturbed"))),
        )
        if so
    )

    def share(name: str) -> str:
        return f"{row[name] / peak:.1%}" if peak and name in row else ""

    def signed(name: str) -> str:
        return f"{row[name]:+.1%}" if name in row else ""

    host = f"{row['host_buffers_GB']:.1f}" if "host_buffers_GB" in row else ""
    return (
        f"| {row['case']}{way} | {step['median']:.4f} | {step['least']:.4f}-{step['most']:.4f} "
        f"| {row['tokens_per_s']:,.0f} | {share('model_TFLOP_s')} | {share('executed_TFLOP_s')} "
        f"| {signed('prediction_error')} | {signed('above_bound')} "
        f"| {row['gpu_peak_GB']:.1f} | {host} | {row['run']} |"
    )


def _cell(error: str) -> str:
    """The beginning of what it says, where a bar would begin another column."""
    said = " ".join(error.split())[:120]
    return said.replace("|", "\\|")


def _errors(rows: dict[str, dict[str, Row]]) -> list[str]:
    """How well steps were predicted, all of them that were measured."""
    measured = _measured(rows, "steps").values()
    found = {row["case"]: row["prediction_error"] for row in measured if "prediction_error" in row}
    if not found:
        return []
    sizes = [abs(error) for error in found.values()]
    within = ", ".join(f"{sum(size <= most for size in sizes)} within {most:.0%}" for most in WITHIN)
    worst = max(found, key=lambda case: abs(found[case]))
    return [
        f"Of {len(found)} steps predicted, {within}; median error {statistics.median(found.values()):+.1%}, "
        f"median size {statistics.median(sizes):.1%}, worst {found[worst]:+.1%} ({worst}).",
        "",
    ]


def _beside(body: dict[str, Any]) -> list[str]:
    """Our steps beside the rivals' of the same tokens and state, and beside what was expected of them."""
    steps, rivals = (_measured(body["rows"], part) for part in ("steps", "rivals"))
    expected = _expected(body)
    lines = []
    for case in gpu_rows.cases(gpu_rows.MODELS):
        row = steps.get(case.key)
        if row is None or gpu_rows.is_rival(case):
            continue
        columns = []
        for rival, (policy, knobs) in RIVALS.items():
            other = (steps | rivals).get(dataclasses.replace(case, policy=policy, knobs=knobs, recompute="none").key)
            same = case.device_gib is None and SAME_STATE.get(rival, case.precision) == case.precision
            faster = other["step_s"]["median"] / row["step_s"]["median"] if other and same and other != row else None
            columns.append(f"{faster:.2f}x" if faster else "")
        before = expected.get(case.key)
        columns.append(f"{before['step_s'] / row['step_s']['median']:.2f}x" if before else "")
        lines.append(f"| {case.key} | {row['tokens_per_s']:,.0f} | {' | '.join(columns)} |")
    if not lines:
        return []
    names = [*(f"against {rival}" for rival in RIVALS), "against datasheets"]
    return [
        f"| case | tokens/s | {' | '.join(names)} |",
        "|---|---:" + "|---:" * len(names) + "|",
        *lines,
        "",
        "Times as fast as a rival's step of as many tokens that keeps the same state, where both were measured; "
        "MegaTrain's public code is its schedule, run by ours. Against datasheets: as fast as was expected before "
        "anything was measured (analysis/results/gpu-expected)." + (_stands_in(body) if expected else ""),
        "",
    ]


def _stands_in(body: dict[str, Any]) -> str:
    gpu = body["runs"][0]["gpu"] if body["runs"] else ""
    if not gpu or gpu_machine.has_datasheet(gpu):
        return ""
    return f" There is none of {gpu}: that of `{gpu_machine.datasheet(gpu)}` stands in for it."


def _measured(rows: dict[str, dict[str, Row]], part: str) -> dict[str, Row]:
    return {key: row for key, row in rows.get(part, {}).items() if "step_s" in row}


def _expected(body: dict[str, Any]) -> dict[str, dict[str, float]]:
    try:
        return gpu_rows.expected(gpu_machine.datasheet(body["runs"][0]["gpu"])) if body["runs"] else {}
    except Refused:  # of that GPU nothing is known
        return {}

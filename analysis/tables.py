"""Results as tables: for people (rich, Markdown) and for programs (JSON records). The one place that formats.

GB is 10^9 bytes; it is said under every table that shows memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from analysis import varied
from analysis.compare import OUR_PRECISIONS, SAME_STATE, several_baselines
from megatrain.terminal import Column, Record, show_records
from schedules.workload import ADAMW
from sim.units import rate, seconds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


def number(key: str, digits: str, factor: float = 1.0, unit: str = "") -> Callable[[Record], str]:
    """Formats a number; one that is missing is a dash."""

    def cell(record: Record) -> str:
        value = record[key]
        return "-" if value is None or not math.isfinite(value) else f"{value * factor:{digits}}{unit}"

    return cell


def _four_digits(key: str, factor: float = 1.0, unit: str = "", sign: str = "") -> Callable[[Record], str]:
    """As `number`, with four digits, or all before the point: never a power of ten."""

    def cell(record: Record) -> str:
        value = record[key]
        if value is None or not math.isfinite(value) or abs(value * factor) >= 1000:
            return number(key, f"{sign},.0f", factor, unit)(record)
        return f"{Decimal(f'{value * factor:.4g}'):{sign}f}{unit}"

    return cell


def _text(key: str) -> Callable[[Record], str]:
    return lambda record: str(record[key] or "")


def _memory(key: str) -> Callable[[Record], str]:
    """GB with its unit, or MB below one."""

    def cell(record: Record) -> str:
        gb = record[key]
        return "-" if gb is None else "0" if not gb else f"{gb:,.1f} GB" if gb >= 1 else f"{gb * 1e3:.1f} MB"

    return cell


def _seconds(key: str) -> Callable[[Record], str]:
    return lambda record: seconds(record[key])


def rates(key: str) -> Callable[[Record], str]:
    """Formats tokens/s."""
    return lambda record: rate(record[key])


def _binding(record: Record) -> str:
    return str(record["binding"] if record["fits"] else record["shortage"])


def _ratio(record: Record) -> str:
    told = number("ratio_to_zero3_offload", ".2f")(record)
    return told if told == "-" or record["same_state"] else f"{told}*"


TO_ZERO3 = "x\nzero3"
COMPARISON = (
    Column(heading="policy", cell=_text("label"), number=False, folds=True),
    Column(heading="tokens/s", cell=rates("tokens_per_s")),
    Column(heading="TFLOP/s", cell=number("model_tflops_per_s", ".4g"), spare=True),
    Column(heading="MFU", cell=number("mfu", ".1f", 100, " %"), spare=True),
    Column(heading=TO_ZERO3, cell=_ratio),
    Column(heading="step", cell=_seconds("step_s")),
    Column(heading="bound", cell=_seconds("bound_s"), spare=True),
    Column(heading="gap", cell=number("gap", ".1f", 100, " %"), spare=True),
    Column(heading="device", cell=_memory("device_peak_gb")),
    Column(heading="host", cell=_memory("host_peak_gb")),
    Column(heading="bound by", cell=_binding, number=False, folds=True),
    Column(heading="schedule", cell=lambda record: record["digest"][:8], number=False, spare=True),
)
STATE = Column(heading="state", cell=_text("precision"), number=False, spare=True)
GAP_TO_ANY = Column(heading="gap to\nany", cell=number("gap_to_any_schedule", ".1f", 100, " %"), spare=True)
NVME = Column(heading="NVMe", cell=_memory("nvme_peak_gb"), spare=True)
COMPARISON_NOTE = (
    "TFLOP/s and MFU count the model's FLOPs once, recompute not. "
    "bound: no run of that schedule settles at a shorter step; gap: by what the step exceeds it. "
    "device, host: memory at the peak, workspace included; GB is 10^9 bytes, MB 10^6; 1 GiB = 1.074 GB."
)
FP8_NOTE = "MFU is of the bf16 peak where products are in fp8, too."
TO_ANY_NOTE = "gap to any: to the bound of any exact schedule of these micro-batches that keeps this state."
EACH_STATE_NOTE = "x zero3: to the row of ZeRO-3 that keeps the same state."
OTHER_STATE_NOTE = "* to {}, which keeps other state than this row."
SAME_STATE_NOTE = f"To compare with the same state too: --policy '{SAME_STATE}', and others."


def comparison_columns(rows: pd.DataFrame) -> tuple[Column, ...]:
    """Of a table of a comparison: with the state that is kept where rows differ, the gap to the bound of any schedule
    where one is known, and NVMe where any uses it; without the ratio to ZeRO-3 where there is none.
    """
    compared = rows["ratio_to_zero3_offload"].notna().any()
    columns = [column for column in COMPARISON if compared or column.heading != TO_ZERO3]

    def after(heading: str) -> int:
        return [column.heading for column in columns].index(heading) + 1

    if rows["precision"].nunique() > 1:
        columns.insert(1, STATE)
    if rows["gap_to_any_schedule"].notna().any():
        columns.insert(after("gap"), GAP_TO_ANY)
    if rows["nvme_peak_gb"].any():
        columns.insert(after("host"), NVME)
    return tuple(columns)


def comparison_note(frame: pd.DataFrame) -> str:
    """What the columns of a comparison mean."""
    starred = frame[frame["ratio_to_zero3_offload"].notna() & ~frame["same_state"].astype(bool)]
    told = (
        (True, COMPARISON_NOTE),
        (frame["matmul"].ne("none").any(), FP8_NOTE),
        (frame["gap_to_any_schedule"].notna().any(), TO_ANY_NOTE),
        (several_baselines(frame), EACH_STATE_NOTE),
        (len(starred), OTHER_STATE_NOTE.format(" or ".join(starred["baseline"].unique()))),
        (SAME_STATE not in set(frame["label"]) and starred["precision"].isin(OUR_PRECISIONS).any(), SAME_STATE_NOTE),
    )
    return " ".join(note for shown, note in told if shown)


PREDICTED_MEASURED = (
    Column(heading="model", cell=_text("model"), number=False),
    Column(heading="policy", cell=_text("policy"), number=False),
    Column(heading="predicted", cell=_seconds("predicted_s")),
    Column(heading="measured", cell=_seconds("measured_s")),
    Column(heading="spread", cell=number("spread", ".1f", 100, " %")),
    Column(heading="error", cell=lambda record: f"{record['predicted_s'] / record['measured_s'] - 1:+.1%}"),
    Column(heading="rank\npredicted", cell=number("predicted_rank", ".0f")),
    Column(heading="rank\nmeasured", cell=number("measured_rank", ".0f")),
)
PREDICTED_MEASURED_NOTE = (
    "measured: the median step; spread: the middle half of all steps, over the median. "
    "error: predicted over measured, minus one. rank: 1 is the fastest."
)


def _remarks(record: Record) -> str:
    again = record["same_run_as"] and f"the run of {record['same_run_as']}, counted once"
    texts = (record["why"], record["assumed"], again, record["note"], record["shortage"])
    return "; ".join(text for text in texts if text)


def _batch(record: Record) -> str:
    size = record["micro_batch_size"]
    return "" if size is None else f"{record['accumulation']} x {size:.0f}"


PUBLISHED = (
    Column(heading="system", cell=_text("system"), number=False, folds=True),
    Column(heading="model", cell=_text("model"), number=False),
    Column(heading="machine", cell=_text("machine"), number=False, spare=True),
    Column(heading="sequences", cell=_batch, spare=True),
    Column(heading="published", cell=_four_digits("published")),
    Column(heading="predicted", cell=_four_digits("predicted")),
    Column(heading="unit", cell=_text("unit"), number=False),
    Column(heading="error", cell=number("error", "+.1f", 100, " %")),
    Column(heading="fits", cell=lambda record: "yes" if record["fits"] else "no", number=False),
    Column(heading="bound by", cell=_text("binding"), number=False, spare=True, folds=True),
    Column(heading="why, and what was assumed", cell=_remarks, number=False, spare=True, folds=True),
)
PUBLISHED_NOTE = (
    "Datasheet mode, nothing tuned per point. TFLOP/s here are 6 x parameters (embeddings included) x tokens / step "
    "time, as published, or by the formula that the publication names. error: predicted over published speed, minus "
    "one; of a time, published over predicted. fits: into that machine, by prediction."
)

PUBLISHED_ONLY = (
    Column(heading="system", cell=_text("system"), number=False, folds=True),
    Column(heading="model", cell=_text("model"), number=False, folds=True),
    Column(heading="machine", cell=_text("machine"), number=False, spare=True, folds=True),
    Column(heading="published", cell=_four_digits("published")),
    Column(heading="unit", cell=_text("unit"), number=False),
    Column(heading="why it is not predicted", cell=_text("lacking"), number=False, folds=True),
)
SOURCE = Column(heading="source", cell=_text("source"), number=False)

PHASES = (
    Column(heading="part of the step", cell=_text("phase"), number=False),
    Column(heading="published", cell=_seconds("published_s")),
    Column(heading="predicted", cell=_seconds("predicted_s")),
)

TRACE_TOTALS = (
    Column(heading="stream", cell=_text("stream"), number=False),
    Column(heading="class of op", cell=_text("class"), number=False),
    Column(heading="ops", cell=number("ops", ",.0f")),
    Column(heading="first", cell=_seconds("first_s")),
    Column(heading="second", cell=_seconds("second_s")),
    Column(heading="difference", cell=_four_digits("difference_s", 1e3, " ms", sign="+")),
)
TRACE_MOVES = (
    Column(heading="stream", cell=_text("stream"), number=False),
    Column(heading="class of op", cell=_text("class"), number=False),
    Column(heading="step becomes", cell=_seconds("step_s")),
    Column(heading="moves the step by", cell=_four_digits("moves_s", 1e3, " ms", sign="+")),
)
TRACE_MOVES_NOTE = (
    "none of it: the first run replayed as it was, against which moves are measured; then with the times of one class "
    "of op as in the second. What lasted longer and moves nothing was hidden; what only moves the step together with "
    "another stands under all of it."
)

QUEUES = (
    Column(heading="queue", cell=_text("queue"), number=False),
    Column(heading="stands on", cell=_text("stream"), number=False),
    Column(heading="ops", cell=number("ops", ",.0f")),
    Column(heading="busy", cell=_seconds("busy_s")),
    Column(heading="idle between", cell=_seconds("idle_s")),
    Column(heading="longest gap", cell=_seconds("longest_gap_s")),
    Column(heading="GB", cell=_four_digits("gb")),
    Column(heading="GB/s", cell=_four_digits("gb_per_s")),
)
QUEUES_NOTE = "queue: a CUDA stream, or a thread of the CPU. GB/s: bytes copied over the time the copies took."

VALIDATED = (
    Column(heading="point", cell=_text("point"), number=False),
    Column(heading="measured", cell=_seconds("measured_s")),
    Column(heading="noise", cell=number("noise", ".1f", 100, " %")),
    Column(heading="replayed", cell=number("replay_error", "+.1f", 100, " %")),
    Column(heading="predicted", cell=number("predict_error", "+.1f", 100, " %")),
    Column(heading="streams at work", cell=number("streams_at_work", ".2f")),
    Column(heading="overlap", cell=number("overlap_error", "+.1f", 100, " %")),
    Column(heading="buffers, MB", cell=number("buffers_bytes", ".1f", 1e-6)),
    Column(heading="workspace, MB", cell=number("workspace_bytes", ".2f", 1e-6)),
    Column(heading="workspace", cell=number("workspace_error", "+.1f", 100, " %")),
)
VALIDATED_NOTE = (
    "Errors are simulated over measured, minus one. noise: by what the medians of the rounds differ. replayed: with "
    "the run's own op times; predicted: from the profile alone. overlap: of the streams at work. Device memory is "
    "buffers and workspace, what the op that takes most allocates beside them; in workspace, too, an error."
)


def summaries(key: str, heading: str) -> tuple[Column, ...]:
    """Columns of a table of error summaries, one per value of `key`."""
    return (
        Column(heading=heading, cell=_text(key), number=False),
        Column(heading="points", cell=number("points", ".0f")),
        Column(heading="bias", cell=number("bias", "+.1f", 100, " %")),
        Column(heading="median", cell=number("median", ".1f", 100, " %")),
        Column(heading="95 % within", cell=number("p95", ".1f", 100, " %")),
        Column(heading="worst", cell=number("worst", "+.1f", 100, " %")),
        Column(heading="within 4 %", cell=number("within_4", ".0f", 100, " %")),
    )


def classes(heading: str) -> tuple[Column, ...]:
    """Columns of time by class of op, or by stream."""
    return (
        Column(heading=heading, cell=_text("ops"), number=False),
        Column(heading="measured", cell=_seconds("measured_s")),
        Column(heading="predicted", cell=_seconds("predicted_s")),
        Column(heading="error", cell=number("error", "+.1f", 100, " %")),
    )


def records(frame: pd.DataFrame) -> list[Record]:
    """Rows for programs: plain Python values, None for what is not a number."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(key): _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(
    frame: pd.DataFrame, columns: Sequence[Column], *, title: str = "", note: str = "", console: Console | None = None
) -> None:
    """Print a table for people, as `show_records` does."""
    show_records(records(frame), columns, title=title, note=note, console=console)


def show_comparison(frame: pd.DataFrame, console: Console | None = None) -> None:
    """Print what `compare.compare` found: a table per machine, model and step."""
    groups = list(comparison_groups(frame))
    for number, (title, rows) in enumerate(groups, start=1):
        note = comparison_note(frame) if number == len(groups) else ""
        show(rows, comparison_columns(rows), title=title, note=note, console=console)


def show_varied(frame: pd.DataFrame, axes: Sequence[str], setting: str) -> None:
    """Print what `varied.run` found: a table per model, a row per policy and point, in the order of the points."""
    for number, (model, rows) in enumerate(frame.groupby("model", sort=False), start=1):
        asked = [Column(heading=axis, cell=_text(varied.column(axis)), folds=True) for axis in axes]
        title = f"{model} ({parameters(rows['params_b'].iloc[0])}), {setting}"
        note = comparison_note(frame) if number == frame["model"].nunique() else ""
        show(rows, [*asked, *comparison_columns(rows)], title=title, note=note)


def comparison_groups(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(title, rows) per machine, source, model and step, in the order in which they come; the fastest row first."""
    step = ["machine", "source", "model", "micro_batch_size", "accumulation", "seq_len"]
    for _, rows in frame.groupby(step, sort=False):
        first = rows.iloc[0]
        kept = f", {first['precision']}" if rows["precision"].nunique() == 1 else ""
        kept += "".join(f", {name}" for name in rows["optimizer"].unique() if name != ADAMW)
        alike = rows["grad_clip"].nunique(dropna=False) == 1 and not math.isnan(first["grad_clip"])
        clipped = f", clipped to {first['grad_clip']:g}" if alike else ""
        again = "".join(f", recompute {mode}" for mode in rows["recompute"].unique() if mode != "none")
        multiplied = "".join(f", {name} products" for name in rows["matmul"].unique() if name != "none")
        yield (
            f"{first['model']} ({parameters(first['params_b'])}), {first['source']} on {first['machine']}; step: "
            f"{first['accumulation']} x {first['micro_batch_size']} sequences of {first['seq_len']} tokens"
            f"{kept}{multiplied}{again}{clipped}",
            rows.sort_values("tokens_per_s", ascending=False, na_position="last", kind="stable"),
        )


def parameters(billions: float) -> str:
    """A model's size in words: "7.62 B parameters", "12.8 M parameters" of one whose billions would say little."""
    size = f"{billions:.2f} B" if billions >= 0.1 else f"{billions * 1e3:.3g} M"
    return f"{size} parameters"


def markdown(frame: pd.DataFrame, columns: Sequence[Column], *, note: str = "") -> str:
    """The same table in Markdown."""
    lines = [
        markdown_line([column.heading.replace("\n", " ") for column in columns]),
        markdown_line(["---:" if column.number else "---" for column in columns]),
    ]
    lines += [markdown_line([column.cell(record) for column in columns]) for record in records(frame)]
    return "\n".join(lines) + (f"\n\n{note}" if note else "") + "\n"


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

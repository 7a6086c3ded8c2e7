"""What the nearest rival measured on an H100, beside our plan for the same step: python benchmarks/rival.py

    python benchmarks/rival.py [--out analysis/results/rival] [--every 1] [--page]

`rival_h100.csv` holds the 69 cells that als244/dataflow c56b6ab measured in both of its campaigns
(reproducibility/throughput_fidelity/FA3_CORRECTED_VS_FA3.md): Llama 3 8B with AdamW, moments in bf16, on one H100 of
80 GB, its schedule planned for a limit of device memory. The second campaign, `tokens_per_s`, planned with kernels
timed under sustained load: it predicted itself better, and was 2 % slower at the median than the first. Each is planned
here for the same limit, sequence and tokens a step, from the datasheet of an H100 with 1 TB of host memory; how much of
its host's memory it might use is unpublished. Theirs is measured, ours predicted. With `--every N` only each N-th is
planned, with `--page` none: the page is made of the plans that are there. Half an hour.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
from rich.progress import track

from analysis import figure
from analysis.palette import BLACK, BLUE, VERMILLION
from megatrain.cores import usable_cores
from megatrain.this_machine import machine_name, today
from schedules import presets
from schedules.files import write_text
from schedules.op import Tier
from sim import hardware
from sim.plan import plan

MEASURED = Path(__file__).with_name("rival_h100.csv")
MODEL, MACHINE, PRECISION = "llama-3-8b", "h100", "bf16_16bit"


def planned(cell: pd.Series) -> dict[str, object]:
    """Our plan for a cell's step and memory: predicted tokens/s and those of the bound over all schedules."""
    profile = hardware.override(hardware.load(MACHINE), [f"gpu.memory={cell['device_GiB']:g}GiB"])
    tokens = int(cell["tokens_per_step"])
    found = plan(
        presets.load(MODEL), profile, seq_len=int(cell["seq_len"]), tokens_per_step=tokens, precision=PRECISION,
        workers=usable_cores(),
    )  # fmt: skip
    workload = found.schedule.workload
    return {
        "micro_batches": f"{workload.accumulation} x {workload.micro_batch_size}",
        "predicted_tokens_per_s": found.prediction.tokens_per_s,
        "bound_tokens_per_s": tokens / (found.lower_bound_ns / 1e9),
        "host_GB": found.schedule.allocated_bytes(Tier.HOST) / 1e9,
        "digest": found.schedule.digest,
        "planned_on": today(),
        "planned_by": machine_name(),
    }


def plot(table: pd.DataFrame) -> figure.Figure:
    """Tokens/s over device memory, a picture for each sequence length: theirs measured, ours predicted, the bound."""
    lengths = sorted(table["seq_len"].unique())
    stack = figure.stacked_axes(len(lengths), 9, 2.4)
    # Points, not bars: an axis from zero would hide what is to be compared.
    lowest, highest = 0.95 * table["tokens_per_s"].min(), 1.03 * table["bound_tokens_per_s"].max()
    for ax, length in zip(stack, lengths, strict=True):
        rows = table[table["seq_len"] == length]
        for column, colour, marker, told in (
            ("bound_tokens_per_s", BLACK, "_", "no exact schedule is predicted to be faster"),
            ("predicted_tokens_per_s", BLUE, "o", "our plan, predicted"),
            ("first_tokens_per_s", VERMILLION, "+", "als244/dataflow, measured, first campaign"),
            ("tokens_per_s", VERMILLION, "x", "second campaign"),
        ):
            ax.plot(rows["device_GiB"], rows[column], marker, color=colour, label=told, markersize=7)
        ax.set_title(f"sequences of {length:,} tokens, 64k to 256k a step", loc="left")
        ax.set_ylabel("tokens/s")
        ax.set_ylim(lowest, highest)
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.spines[["top", "right"]].set_visible(False)
    stack[0].legend(
        loc="lower left", bbox_to_anchor=(0, 1.15), ncols=2, columnspacing=1, handletextpad=0, frameon=False
    )
    stack[-1].set_xlabel("device memory that a schedule may use (GiB)")
    return figure.figure_of(stack[0])


def page(table: pd.DataFrame) -> str:
    """The page, as Markdown."""
    planned_by = f"{table['planned_on'].max()}, on {table['planned_by'].iloc[0]}"
    ratio, first = table["ratio"], table["predicted_tokens_per_s"] / table["first_tokens_per_s"]
    lines = [
        "# A rival's measurements, and our plans for the same steps",
        "",
        f"Llama 3 8B, AdamW, bf16 with bf16 moments. als244/dataflow measured these {len(table)} cells on an H100 of "
        "80 GB (c56b6ab, reproducibility/throughput_fidelity/FA3_CORRECTED_VS_FA3.md), each under a limit of device "
        f"memory. Ours are **predicted** from the datasheet of an `{MACHINE}` with 1 TB of host memory, by `python "
        f"benchmarks/rival.py`, {planned_by}. Nothing of ours was measured; how much host memory the rival might use "
        "is unpublished.",
        "",
        f"Predicted over measured: median {ratio.median():.2f}, {ratio.min():.2f} to {ratio.max():.2f} of its second "
        "campaign, which planned with kernels timed under sustained load and predicted itself better, and median "
        f"{first.median():.2f}, {first.min():.2f} to {first.max():.2f} of its first, which was faster. It is not an "
        "error of the simulator, since the schedules are not the same. What the simulator predicts for runs of known "
        "schedules on this GPU, and what these reached, stands among the [published points](../published/README.md).",
        "",
        "![tokens/s over device memory](rival.png)",
        "",
        "[SVG](rival.svg), [data](rival.csv)",
        "",
        "| sequence | tokens a step | GiB | theirs, first | second | its micro-batch | ours, predicted | micro-batches "
        "| ratio | of the bound |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table.to_dict("records"):
        share = row["predicted_tokens_per_s"] / row["bound_tokens_per_s"]
        lines.append(
            f"| {row['seq_len']:,} | {row['tokens_per_step'] // 1024}k | {row['device_GiB']:g} | "
            f"{row['first_tokens_per_s']:,} | {row['tokens_per_s']:,} | {row['tokens_per_round'] // 1024}k | "
            f"{row['predicted_tokens_per_s']:,.0f} | "
            f"{row['micro_batches']} | {row['ratio']:.2f} | {share:.1%} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("analysis/results/rival"))
    parser.add_argument("--every", type=int, default=1, metavar="N", help="plan each N-th cell only")
    parser.add_argument("--page", action="store_true", help="plan nothing, make the page of what was planned")
    chosen = parser.parse_args()
    cells = pd.read_csv(MEASURED).iloc[:: chosen.every].reset_index(drop=True)
    if chosen.page:
        ours = pd.read_csv(chosen.out / "rival.csv").drop(columns=[*cells.columns, "ratio"], errors="ignore")
    else:
        ours = pd.DataFrame([planned(cell) for _, cell in track(list(cells.iterrows()), "planning")])
    table = pd.concat([cells, ours], axis=1)
    table["ratio"] = table["predicted_tokens_per_s"] / table["tokens_per_s"]
    figure.save(plot(table), chosen.out / "rival", table)
    write_text(chosen.out / "README.md", page(table))
    print(page(table))


if __name__ == "__main__":
    sys.exit(main())

"""What `gpu.py` has measured, as a page with a picture: python benchmarks/gpu_page.py results/gpu [--out DIR]

Needs no GPU. The page is gpu.md made anew, below a picture and a table of what the simulator as it is now predicts from
the same figures (with `--set`, also on a machine that differs so). gpu.json goes beside it; what notes.md says there,
by hand, comes first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import gpu_anew
import gpu_policies
import pandas as pd
from gpu_anew import Anew, OpTimes
from gpu_table import table

from analysis import plots
from analysis.figure import figure_of, save
from megatrain.this_machine import today
from schedules.files import write_text

PICTURE, POLICIES, NOTES = "predicted_measured", "policies", "notes.md"


def drawn(body: dict[str, Any], now: Mapping[str, Anew]) -> pd.DataFrame:
    """A line for each step, with what is predicted `now`, in seconds by case; noise is the spread of its periods."""
    return pd.DataFrame(
        {
            "case": row["case"],
            "policy": row["case"].split()[1],
            "predicted_s": anew.step_s,
            "measured_s": row["step_s"]["median"],
            "predict_error": anew.step_s / row["step_s"]["median"] - 1,
            "noise": (row["step_s"]["most"] - row["step_s"]["least"]) / row["step_s"]["median"],
        }
        for key, anew in now.items()
        for row in [body["rows"]["steps"][key]]
    )


def compared(body: dict[str, Any], now: Mapping[str, Anew], assumed: Sequence[str]) -> str:
    """A table of the predictions that were made then, that are made now, and that would be on an assumed machine."""
    steps = body["rows"]["steps"]
    took_s = {key: steps[key]["step_s"]["median"] for key in now}
    error = {key: anew.step_s / took_s[key] - 1 for key, anew in now.items()}
    size = statistics.median(map(abs, error.values()))
    told, columns = "", ["then", "now", "above bound, now", "slower", "now, if slower"]
    if assumed:
        columns.append("tokens/s, if")
        told = f" If: predicted for a machine with {', '.join(assumed)}, and all else as measured."
        otherwise = gpu_anew.predicted(body, assumed)

    def line(key: str) -> str:
        cells = [
            key,
            f"{steps[key]['prediction_error']:+.1%}",
            f"{error[key]:+.1%}",
            f"{took_s[key] / now[key].bound_s - 1:+.1%}",
            f"{now[key].slower:.2f}x",
            f"{now[key].slower_step_s / took_s[key] - 1:+.1%}",
        ]
        if assumed:
            cells.append(f"{steps[key]['tokens_per_step'] / otherwise[key].step_s:,.0f}")
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [
            "Error of predicted step times, by the simulator as it was when that was measured, and as it is now: from "
            f"the same stored figures. Now the median size is {size:.1%}. Slower: how many times as long the ops that "
            "compute on the GPU took in that step as they do alone. A prediction must take them to be as fast, but for "
            "copies beside them; the last error is what remains if they are as slow in the simulator: that of all "
            f"else.{told} "
            f"(`python {' '.join(sys.argv)}`, {today()})",
            "",
            f"| case | {' | '.join(columns)} |",
            "|---" + "|---:" * len(columns) + "|",
            *map(line, now),
            "",
        ]
    )


def ops(found: Sequence[OpTimes]) -> str:
    """A table of single ops."""

    def line(one: OpTimes) -> str:
        times = (one.in_step_ms, one.alone_ms, one.datasheet_ms)
        off = (one.alone_ms / one.in_step_ms - 1, one.datasheet_ms / one.in_step_ms - 1)
        cells = [one.case, one.op, f"{one.count}", *(f"{ms:.4g}" for ms in times), *(f"{error:+.1%}" for error in off)]
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [
            "Ops on the GPU that take more than a hundredth of a step: how many of a kind there are in it, and the "
            "median of what they took there, in ms, beside what they take alone and by the datasheet.",
            "",
            "| case | op | in a step | there | alone | datasheet | alone, off by | datasheet, off by |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
            *map(line, found),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder that gpu.py wrote")
    parser.add_argument("--out", type=Path, default=Path("analysis/results/gpu"), help="the folder of the page")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of a machine that is assumed"
    )
    options = parser.parse_args()
    file = options.results / "gpu.json"
    if not file.is_file():
        sys.exit(f"there is no {file}: give the folder that gpu.py wrote")
    text = file.read_text()
    body = json.loads(text)
    title, _, rest = table(body).partition("\n")
    if now := gpu_anew.predicted(body):
        steps = drawn(body, now)
        save(figure_of(plots.validated(steps)), options.out / PICTURE, steps)
        caption = "each step's time, predicted by the simulator as it is now, over the measured one"
        rest = f"\n![{caption}]({PICTURE}.png)\n\n{compared(body, now, options.set)}{rest}"
    if len(many := gpu_policies.measured(body)):
        save(figure_of(gpu_policies.drawn(many)), options.out / POLICIES, many)
        rest = f"\n![steps that many ran, measured and as predicted then]({POLICIES}.png)\n{rest}"
    if found := gpu_anew.op_times(body):
        rest = f"{rest.rstrip()}\n\n{ops(found)}"
    if (notes := options.out / NOTES).is_file():
        rest = f"\n{notes.read_text().strip()}\n{rest}"
    write_text(options.out / "README.md", f"{title}\n{rest}")
    write_text(options.out / "gpu.json", text)
    print(options.out / "README.md")


if __name__ == "__main__":
    main()

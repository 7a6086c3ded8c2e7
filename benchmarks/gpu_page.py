"""What `gpu.py` has measured, as a page with a picture: python benchmarks/gpu_page.py results/gpu [--out DIR]

Needs no GPU. The page is gpu.md made anew, with the picture of all steps that were predicted, and what the simulator
as it is now predicts from the same figures (with `--set`, also on a machine that differs so). gpu.json goes beside it;
what notes.md says there, by hand, comes first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import gpu_anew
import pandas as pd
from gpu_table import table

from analysis import plots
from analysis.figure import figure_of, save
from megatrain.this_machine import today
from schedules.files import write_text

PICTURE, NOTES = "predicted_measured", "notes.md"


def predicted(body: dict[str, Any]) -> pd.DataFrame:
    """A line for each step that was predicted; its noise is the spread of its periods."""
    return pd.DataFrame(
        {
            "case": row["case"],
            "policy": row["case"].split()[1],
            "predicted_s": row["predicted_step_s"],
            "measured_s": row["step_s"]["median"],
            "predict_error": row["prediction_error"],
            "noise": (row["step_s"]["most"] - row["step_s"]["least"]) / row["step_s"]["median"],
        }
        for row in body["rows"].get("steps", {}).values()
        if "predicted_step_s" in row
    )


def anew(body: dict[str, Any], assumed: Sequence[str]) -> str:
    """A table of the predictions that were made then, that are made now, and that would be on an assumed machine."""
    steps = body["rows"].get("steps", {})
    if not (now := gpu_anew.predicted(body)):
        return ""
    error = {key: predicted_s / steps[key]["step_s"]["median"] - 1 for key, predicted_s in now.items()}
    size = statistics.median(map(abs, error.values()))
    told, columns = "", ["then", "now"]
    if assumed:
        columns.append("tokens/s, if")
        told = f" If: predicted for a machine with {', '.join(assumed)}, and all else as measured."
        otherwise = gpu_anew.predicted(body, assumed)

    def line(key: str) -> str:
        cells = [key, f"{steps[key]['prediction_error']:+.1%}", f"{error[key]:+.1%}"]
        if assumed:
            cells.append(f"{steps[key]['tokens_per_step'] / otherwise[key]:,.0f}")
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [
            "How much longer each step was predicted to take than it took, by the simulator as it was when that was "
            f"measured, and as it is now: from the same stored figures. Now the median size is {size:.1%}.{told} "
            f"(`python {' '.join(sys.argv)}`, {today()})",
            "",
            f"| case | {' | '.join(columns)} |",
            "|---" + "|---:" * len(columns) + "|",
            *map(line, now),
            "",
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
    found = predicted(body)
    if len(found):
        save(figure_of(plots.validated(found)), options.out / PICTURE, found)
        rest = f"\n![steps, predicted over measured]({PICTURE}.png)\n{rest}\n{anew(body, options.set)}"
    if (notes := options.out / NOTES).is_file():
        rest = f"\n{notes.read_text().strip()}\n{rest}"
    write_text(options.out / "README.md", f"{title}\n{rest}")
    write_text(options.out / "gpu.json", text)
    print(options.out / "README.md")


if __name__ == "__main__":
    main()

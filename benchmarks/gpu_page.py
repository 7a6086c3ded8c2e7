"""What `gpu.py` has measured, as a page with a picture: python benchmarks/gpu_page.py results/gpu [--out DIR]

Needs no GPU. The page is gpu.md made anew, with the picture of all steps that were predicted; gpu.json goes beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pandas as pd
from gpu_table import table

from analysis import plots
from analysis.figure import figure_of, save
from schedules.files import write_text

PICTURE = "predicted_measured"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder that gpu.py wrote")
    parser.add_argument("--out", type=Path, default=Path("analysis/results/gpu"), help="the folder of the page")
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
        rest = f"\n![steps, predicted over measured]({PICTURE}.png)\n{rest}"
    write_text(options.out / "README.md", f"{title}\n{rest}")
    write_text(options.out / "gpu.json", text)
    print(options.out / "README.md")


if __name__ == "__main__":
    main()

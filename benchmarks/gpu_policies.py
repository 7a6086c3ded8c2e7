"""Steps that many ran on one GPU, ours by policy and the rivals': what was measured, and what had been predicted."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from analysis.figure import FONT_PT, figure_of, panel_axes
from analysis.palette import BLACK, policy_style

AT_LEAST = 5  # policies and rivals that ran the same step: fewer are told by a table
NAMES = {
    "megatrain_released": "the paper's code",
    "deepspeed zero3": "DeepSpeed ZeRO-3",
    "plain torch": "PyTorch",
    "plain torch checkpointing=True": "PyTorch, checkpointing",
    "plain torch compiled=blocks": "PyTorch, compiled",
}
USUAL = "bf16"  # the state that most rows keep: fp32 moments
OTHER = "#D8D8D8"  # of what is no schedule of ours
WIDTH, LINE, PANEL = 10.0, 0.27, 0.7  # inches
FULL = 0.62  # of a panel's width is the longest bar: behind it is written


def measured(body: dict[str, Any]) -> pd.DataFrame:
    """A line for each row of a step that AT_LEAST rows are of, the fastest first in each.

    Columns: model, batch (accumulation x micro-batch x sequence), tokens of a step, name, policy ("" of a rival),
    tokens per second at the median, and `least` and `most` of them, `predicted` (NaN of a rival) and `predict_error`
    of the time. A name ends in * where the state is not in the precision USUAL.
    """
    lines = []
    for part in ("steps", "rivals"):
        for row in body["rows"].get(part, {}).values():
            of = re.fullmatch(r"(\S+) (.+) (\d+x\d+x\d+) (\S+)", row["case"])
            if of is None or "step_s" not in row:  # within a limit, with more computed again, or not measured
                continue
            model, policy, batch, precision = of.groups()
            took, tokens = row["step_s"], row["tokens_per_step"]
            lines.append(
                {
                    "model": model,
                    "batch": batch,
                    "tokens": tokens,
                    "name": NAMES.get(policy, policy.split()[0]) + ("" if precision == USUAL else "*"),
                    "policy": "" if part == "rivals" else policy,
                    "tokens_per_s": tokens / took["median"],
                    "least": tokens / took["most"],
                    "most": tokens / took["least"],
                    "predicted": tokens / row["predicted_step_s"] if part == "steps" else float("nan"),
                    "predict_error": row.get("prediction_error", float("nan")),
                }
            )
    table = pd.DataFrame(lines)
    if table.empty:
        return table
    many = table.groupby(["model", "batch"])["name"].transform("size") >= AT_LEAST
    order = ["tokens", "model", "batch", "tokens_per_s"]
    return table[many].sort_values(order, ascending=[True, True, True, False]).reset_index(drop=True)


def drawn(table: pd.DataFrame) -> Axes:
    """Bars of tokens per second as measured, a panel for each step; over them what was predicted. Returns the first."""
    steps = [of_step for _, of_step in table.groupby(["tokens", "model", "batch"])]
    lines = max(len(of_step) for of_step in steps)
    panels = panel_axes(len(steps), min(2, len(steps)), WIDTH, LINE * lines + PANEL)
    for ax, of_step in zip(panels, steps, strict=True):
        for place, row in enumerate(of_step.to_dict("records")):
            speed = row["tokens_per_s"]
            ax.barh(place, speed, 0.75, color=policy_style(row["policy"]).colour if row["policy"] else OTHER)
            ax.plot([row["least"], row["most"]], [place, place], color=BLACK, linewidth=0.8)
            told = f"{speed:,.0f}"
            if row["policy"]:
                ax.plot([row["predicted"]] * 2, [place - 0.42, place + 0.42], color=BLACK, linewidth=2.0)
                told += f" ({100 * row['predict_error']:+.1f} %)"
            farthest = max(speed, row["most"], row["predicted"] if row["policy"] else 0.0)
            ax.annotate(
                told, (farthest, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=FONT_PT
            )
        first = of_step.iloc[0]
        ax.set_title(
            f"{first['model']}, {first['tokens'] / 1024:,.0f}k tokens a step", loc="left", fontsize=FONT_PT + 1
        )
        ax.set_xlim(0, of_step["most"].max() / FULL)
        ax.set_ylim(lines - 0.5, -0.5)
        ax.set_yticks(range(len(of_step)), of_step["name"])
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("tokens/s")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.spines[["top", "right"]].set_visible(False)
    figure_of(panels[0]).supxlabel(
        "bars: measured, with their spread; thick strokes: predicted; in brackets: the predicted time's error\n"
        "*: bf16 moments, where all others are in fp32",
        x=0.01, ha="left", fontsize=FONT_PT,
    )  # fmt: skip
    return panels[0]

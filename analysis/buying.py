"""What a sweep found, for somebody who is about to buy: tables, pictures and a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis import figure, tables
from analysis.costs import months_column
from analysis.figure import FONT_PT, axes_for
from analysis.files import whole, write_text
from analysis.palette import BLUE, GREY
from megatrain.terminal import Column, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from analysis.prices import Prices

NAMED = 12  # points; of more, only those of the front have their names written
HEAT = ("host_memory", "h2d_bandwidth")  # what the heat map is over, if both vary


def price_against_throughput(table: pd.DataFrame, currency: str, ax: Axes | None = None) -> Axes:
    """Of one model: cost of an hour, in `currency`, against tokens/s, and the front that no other point beats."""
    ax = axes_for(ax, width=9.6, height=4.4)
    fits = table[table["fits"].astype(bool)]
    beaten = fits[~fits["pareto"].astype(bool)]
    front = fits[fits["pareto"]].sort_values("cost_per_hour")
    ax.step(front["cost_per_hour"], front["tokens_per_s"], where="post", color=BLUE, linewidth=1.2)
    ax.scatter(front["cost_per_hour"], front["tokens_per_s"], color=BLUE, s=40, zorder=3, label="no other beats it")
    if len(beaten):
        told = "beaten: another is as fast for less, or faster for as little"
        ax.scatter(beaten["cost_per_hour"], beaten["tokens_per_s"], color=GREY, s=26, label=told)
    named = fits if len(fits) <= NAMED else front
    for number, point in enumerate(named.sort_values("cost_per_hour").to_dict("records"), start=1):
        place = (point["cost_per_hour"], point["tokens_per_s"])
        ax.annotate(str(number), place, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=FONT_PT)
        told = " ".join(text for text in (point["machine"], point["changes"]) if text)
        ax.plot([], [], " ", label=f"{number}  {told}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, handlelength=0.8, fontsize=FONT_PT)
    ax.set_xlim(left=0, right=1.1 * float(fits["cost_per_hour"].max()))
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"cost of an hour of training ({currency})")
    ax.set_ylabel("predicted tokens/s")
    ax.set_title(str(table["model"].iloc[0]), loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def heat_map(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Of one model and machine: tokens/s over host memory and link; what does not fit stays white and says so."""
    ax = axes_for(ax, width=7.6, height=4.4)
    grid = table.pivot_table(index=HEAT[0], columns=HEAT[1], values="tokens_per_s", aggfunc="max", dropna=False)
    values = np.ma.masked_invalid(grid.to_numpy(dtype=float))
    image = ax.imshow(values, origin="lower", aspect="auto", cmap="Blues", vmin=0)
    ax.set_xticks(range(len(grid.columns)), [f"{rate / 1e9:.0f}" for rate in grid.columns])
    ax.set_yticks(range(len(grid.index)), [f"{size / 1e9:.0f}" for size in grid.index])
    highest = float(values.max()) if values.count() else 1.0
    for (i, j), value in np.ndenumerate(grid.to_numpy(dtype=float)):
        told = f"{value:,.0f}" if np.isfinite(value) else "does not fit"
        dark = np.isfinite(value) and value > 0.6 * highest
        ax.text(j, i, told, ha="center", va="center", fontsize=FONT_PT, color="white" if dark else "black")
    ax.set_xlabel("link, host to device (GB/s)")
    ax.set_ylabel("host memory (GB)")
    ax.set_title(f"{table['model'].iloc[0]} on {table['machine'].iloc[0]}, predicted tokens/s", loc="left")
    ax.figure.colorbar(image, ax=ax)
    return ax


def write(folder: Path, table: pd.DataFrame, prices: Prices, train_tokens: float, command: str) -> Path:
    """The page with its pictures and CSV; returns its path. Raises InputError when the folder cannot be written."""
    with whole(folder / "sweep.csv") as partial:
        table.to_csv(partial, index=False)
    parts = [
        "# What to buy",
        f"Predicted; nothing here was measured. Made by `{command}`. Prices are those of the price file, dated "
        f"{prices.date}, in {prices.currency}: an hour of training is the cheaper of renting and of owning (written "
        f"off over {prices.lifetime_months:g} months at {prices.utilisation:.0%} use, energy at "
        f"{prices.electricity_per_kwh:g} a kWh). Training is {train_tokens / 1e9:,.4g} billion tokens.",
    ]
    for model, of_model in table.groupby("model", sort=False):
        parts.append(f"## {model}")
        if of_model["fits"].any():
            picture = folder / f"{model}-price"
            figure.save(figure.figure_of(price_against_throughput(of_model, prices.currency)), picture, of_model)
            parts.append(f"![cost of an hour against throughput]({picture.name}.png)")
        ordered = of_model.sort_values("cost", na_position="last")
        parts.append(tables.markdown(ordered, columns(prices)))
        for machine, of_machine in of_model.groupby("machine", sort=False):
            if all(of_machine[axis].nunique() > 1 for axis in HEAT):
                picture = folder / f"{model}-{machine}-heat"
                figure.save(figure.figure_of(heat_map(of_machine)), picture, of_machine)
                parts.append(f"![tokens/s over host memory and link]({picture.name}.png)")
    for rental in prices.rentals:
        parts.append(
            f"{rental.name}: {rental.gpus} x {rental.machine} at {rental.mfu:.0%} model FLOP/s utilisation, an "
            f"assumption of the price file, for {rental.rent_per_hour:g} {prices.currency} an hour ({rental.source})."
        )
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")
    return folder / "README.md"


def columns(prices: Prices) -> tuple[Column, ...]:
    """Of the table of a sweep: * marks the front of price against throughput."""

    def money(key: str) -> Column:
        return Column(heading=f"{key.replace('_', ' ')} ({prices.currency})", cell=tables.number(key, ",.2f"))

    return (
        Column(heading="machine", cell=lambda row: row["machine"] + (" *" if row["pareto"] else ""), number=False),
        Column(heading="changed", cell=lambda row: row["changes"] or "", number=False, folds=True),
        Column(heading="schedule", cell=lambda row: row["policy"], number=False, spare=True),
        Column(heading="tokens/s", cell=tables.number("tokens_per_s", ",.0f")),
        Column(heading="MFU", cell=tables.number("mfu", ".1f", 100, " %"), spare=True),
        Column(heading="above any bound", cell=tables.number("gap", ".0f", 100, " %"), spare=True),
        money("cost_per_hour"),
        Column(heading="days", cell=tables.number("days", ",.1f")),
        Column(heading="drives worn out", cell=tables.number("drives", ",.1f"), spare=True),
        money("cost"),
        Column(heading="MWh", cell=tables.number("energy_kwh", ",.2f", 1e-3), spare=True),
        *(
            Column(
                heading=months_column(rental.name), cell=tables.number(months_column(rental.name), ",.1f"), spare=True
            )
            for rental in prices.rentals
        ),
        Column(heading="why not", cell=lambda row: row["reason"] or "", number=False, folds=True),
    )


def _machine(row: Record) -> str:
    return f"{row['machine']} *" if row["pareto"] else str(row["machine"])

"""What a sweep found, for somebody who is about to buy: tables, pictures and a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.transforms import Bbox

from analysis import figure, tables
from analysis.costs import months_column
from analysis.figure import FONT_PT, new_axes
from analysis.labels import Labels, drawn_at
from analysis.palette import BLUE, GREY
from analysis.sweep import PLAN
from megatrain.terminal import Column, Record
from schedules.files import write_text
from schedules.workload import ADAMW
from sim.units import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from analysis.prices import Prices

FRONT = "* no other machine is done as soon for as little."
FOR_NOTHING = (
    "A rented machine's hour costs the same here with any host memory: give rent_host_memory_per_gb_hour in the price "
    "file."
)
NEVER = "never"  # in place of months: energy and worn drives alone cost more than that rental
DRIVES_FOR_NOTHING = "A drive that is worn out is bought again for nothing here: give drive in the prices of: {}."
NAMED = 30  # points; of more, only those of the front have their names written
HEAT = ("host_memory", "h2d_bandwidth")  # what the heat map is over, if both vary
_LINE = 0.19  # inches that a line of the legend takes
_SAME = 4.0  # points of 1/72 inch between marks that have one label
_WIDE = 3.0  # an axis is logarithmic if its largest value is so many times its smallest
_BEYOND = 0.85  # by what factor an axis goes beyond its values
_FAR = (11.0, 16.0, 22.0, 30.0, 40.0, 52.0)  # from a mark to its label
_TURNS = {True: 225, False: 45}  # degrees: nothing is below and left of the front
_TURN = 15


def cost_against_days(table: pd.DataFrame, currency: str, train_tokens: float) -> Axes:
    """Of one model: what it costs to train that many tokens, in `currency`, against days, and the front.

    Points have numbers, the cheapest first, those of the front in bold, and the legend their names; those that lie on
    one another have one label, if all or none of them are of the front.
    """
    fits = table[table["fits"].astype(bool)].sort_values(["cost", "days"])
    front, beaten = fits[fits["pareto"].astype(bool)], fits[~fits["pareto"].astype(bool)]
    named = fits if len(fits) <= NAMED else front
    ax = new_axes(width=11.0, height=max(4.4, 0.8 + _LINE * (len(named) + 2)))
    ax.step(front["cost"], front["days"], where="post", color=BLUE, linewidth=1.2)
    ax.scatter(front["cost"], front["days"], color=BLUE, s=40, zorder=4, label="no other beats it")
    if len(beaten):
        told = "beaten: another is done as soon for less, or sooner for as little"
        ax.scatter(beaten["cost"], beaten["days"], color=GREY, s=26, zorder=3, label=told)
    for number, point in enumerate(named.to_dict("records"), start=1):
        what = (point["machine"], "" if _planned(table) else _schedule(point), point["changes"])
        ax.plot([], [], " ", label=" ".join([f"{number} ", *filter(None, what)]))
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, handlelength=0.8, fontsize=FONT_PT)
    for key, axis, scale, limit in (
        ("cost", ax.xaxis, ax.set_xscale, ax.set_xlim),
        ("days", ax.yaxis, ax.set_yscale, ax.set_ylim),
    ):
        least, most = float(fits[key].min()), float(fits[key].max())
        if most:  # else all costs nothing, and an axis from 0 to 0 is none
            limit(least * _BEYOND, most / _BEYOND)
        if most > _WIDE * least > 0:
            scale("log")
            figure.plain_ticks(axis)
    ax.set_xlabel(f"cost of training {train_tokens:,.0f} tokens ({currency})")
    ax.set_ylabel("days, predicted")
    ax.set_title(str(table["model"].iloc[0]), loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    _write_numbers(ax, named)
    return ax


def _write_numbers(ax: Axes, named: pd.DataFrame) -> None:
    """Beside the points, those of the front first: they have the best places."""
    places = named[["cost", "days"]].to_numpy(dtype=float)
    marks = drawn_at(ax, [(x, y) for x, y in places])
    best = named["pareto"].astype(bool).tolist()
    labels = list[list[int]]()  # each stands at the first of its points
    for point in sorted(range(len(places)), key=lambda point: not best[point]):
        alike = (label for label in labels if best[label[0]] == best[point])
        near = [label for label in alike if np.hypot(*(marks[label[0]] - marks[point])) < _SAME]
        if near:
            near[0].append(point)
        else:
            labels.append([point])
    box = ax.get_window_extent()
    dpi = figure.figure_of(ax).dpi / 72
    room = Labels(marks, Bbox.from_extents(*(np.array(box.extents) / dpi)))
    for label in labels:
        text = ", ".join(str(point + 1) for point in sorted(label))
        turns = np.radians([_TURNS[best[label[0]]] + _TURN * turn for turn in sorted(range(-11, 13), key=abs)])
        ways = (far * np.array((np.cos(turn), np.sin(turn))) for far in _FAR for turn in turns)
        ax.annotate(
            text, places[label[0]], xytext=tuple(room.place(marks[label[0]], text, ways)), ha="center", va="center",
            textcoords="offset points", fontsize=FONT_PT, zorder=5, weight="bold" if best[label[0]] else "normal",
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip


def heat_map(table: pd.DataFrame) -> Axes:
    """Of one model, machine and policy: tokens/s over host memory and link; what does not fit stays white and says so.

    Where more varies than these two, the best of it.
    """
    ax = new_axes(width=7.6, height=4.4)
    grid = table.pivot_table(index=HEAT[0], columns=HEAT[1], values="tokens_per_s", aggfunc="max", dropna=False)
    values = np.ma.masked_invalid(grid.to_numpy(dtype=float))
    image = ax.imshow(values, origin="lower", aspect="auto", cmap="Blues", vmin=0)
    ax.set_xticks(range(len(grid.columns)), [f"{link / 1e9:g}" for link in grid.columns])
    ax.set_yticks(range(len(grid.index)), [f"{size / 1e9:g}" for size in grid.index])
    highest = float(values.max()) if values.count() else 1.0
    for (i, j), value in np.ndenumerate(grid.to_numpy(dtype=float)):
        told = rate(value) if np.isfinite(value) else "does not fit"
        dark = np.isfinite(value) and value > 0.6 * highest
        ax.text(j, i, told, ha="center", va="center", fontsize=FONT_PT, color="white" if dark else "black")
    ax.set_xlabel("link, host to device (GB/s)")
    ax.set_ylabel("host memory (GB)")
    first, more = table.iloc[0], table.duplicated(list(HEAT)).any()
    marked = max(map(_schedule, tables.records(table)), key=len)  # what does not fit is not marked
    by = "the best plan" if _planned(table) else marked
    title = f"{first['model']} on {first['machine']}, predicted tokens/s of {by}"
    ax.set_title(title + ("; of several the best" if more else ""), loc="left")
    ax.figure.colorbar(image, ax=ax)
    return ax


def _planned(table: pd.DataFrame) -> bool:
    return set(table["policy"]) == {PLAN}


def _schedule(row: Record) -> str:
    """The policy that was asked for, marked where its training is not exact."""
    stale = row.get("stale") or 0  # None where nothing fits
    return f"{row['policy']} (stale by {stale:.0f})" if stale > 0 else str(row["policy"])


def write(folder: Path, table: pd.DataFrame, prices: Prices, train_tokens: float, command: str) -> Path:
    """The page with its pictures and CSV; returns its path. Raises InputError when the folder cannot be written."""
    write_text(folder / "sweep.csv", table.to_csv(index=False))
    parts = [
        "# What to buy",
        f"Predicted; nothing here was measured. Made by `{command}`. Prices are those of the price file, dated "
        f"{prices.date}, in {prices.currency}: an hour of training is the cheaper of renting and of owning (written "
        f"off over {prices.lifetime_months:g} months at {prices.utilisation:.0%} use, energy at "
        f"{prices.electricity_per_kwh:g} a kWh). {step(table, train_tokens)} {note(table)}",
    ]
    for model, of_model in table.groupby("model", sort=False):
        parts.append(f"## {model}")
        if of_model["fits"].any():
            picture = folder / f"{_as_file(str(model))}-price"
            ax = cost_against_days(of_model, prices.currency, train_tokens)
            figure.save(figure.figure_of(ax), picture, of_model)
            parts.append(f"![cost against days]({picture.name}.png)")
        ordered = of_model.sort_values("cost", na_position="last")
        parts.append(tables.markdown(with_never(ordered, prices), columns(prices, table)))
        for (machine, policy), alike in of_model.groupby(["machine", "policy"], sort=False):
            if all(alike[axis].nunique() > 1 for axis in HEAT):
                by = "" if of_model["policy"].nunique() == 1 else f"-{policy}"
                picture = folder / f"{_as_file(f'{model}-{machine}{by}')}-heat"
                figure.save(figure.figure_of(heat_map(alike)), picture, alike)
                parts.append(f"![tokens/s over host memory and link]({picture.name}.png)")
    for rental in prices.rentals:
        parts.append(
            f"{rental.name}: {rental.gpus} x {rental.machine} at {rental.mfu:.0%} model FLOP/s utilisation, an "
            f"assumption of the price file, for {rental.rent_per_hour:g} {prices.currency} an hour ({rental.source})."
        )
    write_text(folder / "README.md", "\n\n".join(parts) + "\n")
    return folder / "README.md"


def _as_file(name: str) -> str:
    """A name without what files and links cannot have: that of a policy with knobs, or of a machine by its path."""
    return re.sub(r"[^\w.-]+", "-", name.replace(".json", "").replace(".py", ""))


def step(table: pd.DataFrame, train_tokens: float) -> str:
    """What every point trains, in a sentence."""
    of = table.iloc[0]
    how = [of["precision"], *([] if pd.isna(of["matmul"]) else [f"{of['matmul']} products"])]
    how += [] if of["optimizer"] == ADAMW else [of["optimizer"]]
    how += [] if pd.isna(of["grad_clip"]) else [f"clipped to {of['grad_clip']:g}"]
    return (
        f"Steps of {of['tokens_per_step']:,} tokens in sequences of {of['seq_len']:,}, {', '.join(how)}; "
        f"{train_tokens:,.0f} tokens are trained."
    )


def note(table: pd.DataFrame) -> str:
    """What the columns of a sweep's table mean, and what its prices leave out."""
    told = [FRONT, *([FOR_NOTHING] if table["memory_for_nothing"].any() else [])]
    told += [tables.FP8_NOTE] if table["matmul"].notna().any() else []
    if worn := list(table["machine"][table["drives_for_nothing"]].unique()):
        told.append(DRIVES_FOR_NOTHING.format(", ".join(worn)))
    return " ".join(told)


def with_never(table: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """With a word in place of infinite months: tables and JSON would tell them as those of what cannot be bought."""
    months = [months_column(rental.name) for rental in prices.rentals]
    return table.assign(**{name: table[name].astype(object).mask(table[name].eq(np.inf), NEVER) for name in months})


def columns(prices: Prices, table: pd.DataFrame) -> tuple[Column, ...]:
    """Of the table of a sweep, as `with_never` returns it: * marks the front of cost against days."""

    def money(key: str) -> Column:
        return Column(heading=f"{key.replace('_', ' ')} ({prices.currency})", cell=tables.number(key, ",.2f"))

    def months(key: str) -> Column:
        number = tables.number(key, ",.1f")
        return Column(heading=key, cell=lambda row: NEVER if row[key] == NEVER else number(row), spare=True)

    return (
        Column(heading="machine", cell=lambda row: row["machine"] + (" *" if row["pareto"] else ""), number=False),
        Column(heading="changed", cell=lambda row: row["changes"] or "", number=False, folds=True),
        Column(heading="schedule", cell=_schedule, number=False, spare=_planned(table)),
        Column(heading="tokens/s", cell=tables.rates("tokens_per_s")),
        Column(heading="MFU", cell=tables.number("mfu", ".1f", 100, " %"), spare=True),
        Column(heading="above any bound", cell=tables.number("gap_to_any_schedule", ".0f", 100, " %"), spare=True),
        money("cost_per_hour"),
        Column(heading="hour is", cell=lambda row: row["hour"], number=False, spare=True),
        Column(heading=f"to buy ({prices.currency})", cell=tables.number("buy", ",.0f"), spare=True),
        Column(heading="days", cell=tables.number("days", ",.1f")),
        Column(heading="drives worn out", cell=tables.number("drives", ",.1f"), spare=True),
        money("cost"),
        Column(heading="MWh", cell=tables.number("energy_kwh", ",.2f", 1e-3), spare=True),
        *(months(months_column(rental.name)) for rental in prices.rentals),
        Column(heading="why not", cell=lambda row: row["reason"] or "", number=False, folds=True),
    )

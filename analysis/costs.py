"""What training costs on each machine of a sweep: to buy, to rent, by the hour, by the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from analysis.sweep import Row
from schedules.workload import Workload
from sim import hardware
from sim.cost import peak_flops

if TYPE_CHECKING:
    import pandas as pd

    from analysis.prices import Prices

WHOLE = ("stale", "micro_batch_size", "accumulation")  # numbers that a row lacks where nothing fits


def priced(rows: Sequence[Row], prices: Prices, train_tokens: float) -> pd.DataFrame:
    """Rows with price, time, cost and energy of training that many tokens, and months to break even.

    Columns added: buy, cost_per_hour, hour ("owned" or "rented", whichever is cheaper), memory_for_nothing (a rented
    machine's, which was changed), drives_for_nothing (an owned machine's, which wear out and have no price), days,
    drives (worn out meanwhile), cost, energy_kwh, pareto (no point of the model is done sooner for as little), and a
    column of months for every rental. Whole numbers stay whole where some are missing. Raises PriceError.
    """
    import pandas as pd

    found = [{**row, **_cost(row, prices, train_tokens)} for row in rows]
    table = pd.DataFrame(found).astype(dict.fromkeys(WHOLE, "Int64"))  # by itself 8 would be 8.0 beside a missing one
    table["pareto"] = False
    for _, group in table[table["fits"]].groupby("model"):
        table.loc[_pareto(group), "pareto"] = True
    return table


def more_host_bytes(machine: str, host_bytes: float) -> float:
    """What a machine with that much host memory has beyond its profile, by name or path; below zero where less."""
    return host_bytes - hardware.load(machine).host.memory.value


def _cost(row: Row, prices: Prices, train_tokens: float) -> Row:
    more_bytes = more_host_bytes(row["machine"], row["host_memory"])
    price = prices.of(row["machine"], more_host_bytes=more_bytes)
    worn = 1.0 / row["drive_days"] / 24 if row.get("drive_days") else 0.0  # drives an hour
    wear = worn * price.drive
    hourly, hour = prices.cheapest_per_hour(price, wear)
    nothing: Row = dict.fromkeys(("days", "drives", "cost", "energy_kwh"))
    nothing |= {"buy": price.buy, "cost_per_hour": hourly, "hour": hour}
    nothing["memory_for_nothing"] = hour == "rented" and more_bytes != 0 and prices.rent_host_memory_per_gb_hour is None
    nothing["drives_for_nothing"] = hour == "owned" and worn > 0 and not price.drive
    months: Row = {months_column(rental.name): None for rental in prices.rentals}
    if not row["fits"]:
        return nothing | months
    hours = train_tokens / row["tokens_per_s"] / 3600
    step = Workload(micro_batch_size=row["micro_batch_size"], seq_len=row["seq_len"], precision=row["precision"])
    for rental in prices.rentals:
        peak = peak_flops(hardware.load(rental.machine), step)
        rented = rental.gpus * rental.mfu * peak / row["flops_per_token"]  # tokens/s
        months[months_column(rental.name)] = prices.break_even_months(
            price, row["tokens_per_s"], rental.rent_per_hour / 3600 / rented, wear
        )
    return {
        **nothing,
        "days": hours / 24,
        "drives": hours * worn,
        "cost": hours * hourly,
        "energy_kwh": hours * price.watts / 1e3,
    } | months


def months_column(rental: str) -> str:
    """The column of months after which a machine has cost less than that rental; infinite where it never has."""
    return f"months until cheaper than {rental}"


def _pareto(group: pd.DataFrame) -> list[Any]:
    """The index of rows that no other row beats in both cost and throughput."""
    best, chosen = -math.inf, list[Any]()
    ordered = group.sort_values(["cost", "tokens_per_s"], ascending=[True, False])
    for index, rate in zip(ordered.index, ordered["tokens_per_s"], strict=True):
        if rate > best:
            best, chosen = rate, [*chosen, index]
    return chosen

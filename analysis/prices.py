"""What machines cost, as their user says it in a YAML file; and what training then costs."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from schedules.errors import InputError

HOURS_A_MONTH = 730.5  # a year of 8,766 hours over 12
DIVISORS = ("gpus", "mfu", "lifetime_months", "utilisation")  # no zeros


class PriceError(InputError):
    """The price file is not there, says something that means nothing, or lacks something; the message names it."""


@dataclass(frozen=True, kw_only=True)
class MachinePrice:
    """One machine. `buy` in the file's currency, `rent_per_hour` likewise, `watts` at the wall while it trains.

    `drive` is the price of another drive, once its own is worn out.
    """

    source: str
    watts: float
    buy: float | None = None
    rent_per_hour: float | None = None
    drive: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rental:
    """Several GPUs rented together, which reach `mfu` of their peak: no schedule here is of more than one GPU."""

    name: str
    machine: str
    gpus: int
    mfu: float
    rent_per_hour: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A price file; see docs/prices.yaml."""

    currency: str
    date: str
    electricity_per_kwh: float
    machines: Mapping[str, MachinePrice]
    lifetime_months: float = 36.0
    utilisation: float = 1.0
    host_memory_per_gb: float | None = None
    rentals: tuple[Rental, ...] = ()

    def of(self, machine: str, *, more_host_bytes: float = 0.0) -> MachinePrice:
        """The price of a machine with that much more host memory than its profile. Raises PriceError."""
        if machine not in self.machines:
            raise PriceError(
                f"no price for machine {machine}; add it under machines: in the price file, with watts, source, and "
                "buy or rent_per_hour"
            )
        price = self.machines[machine]
        if not more_host_bytes or price.buy is None:
            return price
        if self.host_memory_per_gb is None:
            raise PriceError("the host memory of a machine is changed; add host_memory_per_gb to the price file")
        buy = max(price.buy + more_host_bytes / 1e9 * self.host_memory_per_gb, 0.0)
        return replace(price, buy=buy)

    def energy_per_hour(self, price: MachinePrice) -> float:
        """Of a machine that trains."""
        return price.watts / 1e3 * self.electricity_per_kwh

    def owned_per_hour(self, price: MachinePrice, wear: float = 0.0) -> float:
        """An hour of training on a machine that was bought, with energy and `wear`; NaN if it cannot be bought."""
        if price.buy is None:
            return math.nan
        hours = self.lifetime_months * HOURS_A_MONTH * self.utilisation
        return price.buy / hours + self.energy_per_hour(price) + wear

    def cheapest_per_hour(self, price: MachinePrice, wear: float = 0.0) -> float:
        """An hour of training, bought or rented, whichever is less; what wears out is the owner's."""
        rent = math.inf if price.rent_per_hour is None else price.rent_per_hour
        owned = self.owned_per_hour(price, wear)
        return min(rent, math.inf if math.isnan(owned) else owned)

    def break_even_months(
        self, price: MachinePrice, tokens_per_s: float, rent_per_token: float, wear: float = 0.0
    ) -> float:
        """After how many months a bought machine has cost less than renting what trains as many tokens.

        NaN if it cannot be bought, infinite if its energy and `wear` by the hour alone cost more.
        """
        if price.buy is None:
            return math.nan
        saved_per_hour = rent_per_token * tokens_per_s * 3600 - self.energy_per_hour(price) - wear
        if saved_per_hour <= 0:
            return math.inf
        return price.buy / (saved_per_hour * self.utilisation * HOURS_A_MONTH)


def read(path: Path) -> Prices:
    """The prices in a YAML file. Raises PriceError."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PriceError(f"cannot read the prices in {path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise PriceError(f"{path} is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise PriceError(f"{path} holds no prices; docs/prices.yaml shows the form")
    machines = document.pop("machines", None)
    if not isinstance(machines, dict) or not machines:
        raise PriceError(f"{path}: machines: is missing; it gives each machine's price")
    rentals = document.pop("rentals", None) or []
    if isinstance(document.get("date"), datetime.date):
        document["date"] = document["date"].isoformat()
    found: Prices = _checked(
        Prices,
        {
            **document,
            "machines": {name: _checked(MachinePrice, entry, f"{path}: {name}") for name, entry in machines.items()},
            "rentals": tuple(_checked(Rental, entry, f"{path}: a rental") for entry in rentals),
        },
        str(path),
    )
    return found


def _checked(cls: type[Any], entry: object, where: str) -> Any:
    known = {field.name: field for field in fields(cls)}
    if not isinstance(entry, Mapping):
        raise PriceError(f"{where}: {entry!r} must be a mapping of prices")
    for name, value in entry.items():
        if name not in known:
            raise PriceError(f"{where}: {name!r} is unknown; known are {', '.join(known)}")
        kind = str(known[name].type)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind.startswith(("float", "int")) and not (number and math.isfinite(value) and value >= 0):
            raise PriceError(f"{where}: {name} must be a number of at least zero, not {value!r}")
        if name in DIVISORS and not value:
            raise PriceError(f"{where}: {name} must be more than zero")
        if kind == "str" and not (isinstance(value, str) and value):
            raise PriceError(f"{where}: {name} must be some text, not {value!r}")
    try:
        found = cls(**entry)
    except TypeError as error:  # what dataclasses raise for a field left out
        raise PriceError(f"{where}: {str(error).partition('() ')[2] or error}") from None
    if cls is MachinePrice and found.buy is None and found.rent_per_hour is None:
        raise PriceError(f"{where}: give buy or rent_per_hour")
    if cls is Prices and not 0 < found.utilisation <= 1:
        raise PriceError(f"{where}: utilisation must lie above 0 and up to 1, not {found.utilisation}")
    return found

"""What machines cost, as their user says it in a YAML file; and what training then costs."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from schedules.errors import InputError
from sim import hardware

HOURS_A_MONTH = 730.5  # a year of 8,766 hours over 12
DIVISORS = ("gpus", "mfu", "lifetime_months", "utilisation")  # no zeros
SHARES = ("mfu", "utilisation")  # of one, not of a hundred
_HEAD = "currency: USD, date: 2026-11-20, electricity_per_kwh: 0.20, each on a line of its own"
_RENTAL = '- {name: "8 x H100", machine: h100, gpus: 8, mfu: 0.40, rent_per_hour: 22.0, source: "offer of 2026-11-01"}'


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
    rent_host_memory_per_gb_hour: float | None = None
    rentals: tuple[Rental, ...] = ()

    def of(self, machine: str, *, more_host_bytes: float = 0.0) -> MachinePrice:
        """The price of a machine with that much more host memory than its profile.

        A machine is known by its name or path, by its file's name and by its profile's. A rented one has more memory
        for nothing where the file does not say what it costs. Raises PriceError.
        """
        price = self.machines[self.stands_under(machine)]
        if not (more := more_host_bytes / 1e9):
            return price
        if price.buy is not None and self.host_memory_per_gb is None:
            raise PriceError("the host memory of a machine is changed; add host_memory_per_gb to the price file")
        return replace(
            price,
            buy=self._added(machine, "buy", price.buy, more, "host_memory_per_gb"),
            rent_per_hour=self._added(
                machine, "rent_per_hour", price.rent_per_hour, more, "rent_host_memory_per_gb_hour"
            ),
        )

    def _added(self, machine: str, name: str, price: float | None, more: float, each_name: str) -> float | None:
        """A price with so many GB more, where the file says what each costs."""
        each: float | None = getattr(self, each_name)
        if price is None or each is None:
            return price
        if price + more * each <= 0:
            raise PriceError(
                f"{machine} with {-more:,.0f} GB of host memory less would cost nothing: {name} is {price:,g}, and "
                f"{each_name} {each:g}; say what that memory does cost where the machine comes from"
            )
        return price + more * each

    def stands_under(self, machine: str) -> str:
        """What the machine's price is called. Raises PriceError where it has none."""
        if (found := next((name for name in _names(machine) if name in self.machines), None)) is None:
            line = _line(list(_names(machine))[1])
            raise PriceError(f"no price for machine {machine}; add it under machines: in the price file, as in  {line}")
        return found

    def energy_per_hour(self, price: MachinePrice) -> float:
        """Of a machine that trains."""
        return price.watts / 1e3 * self.electricity_per_kwh

    def owned_per_hour(self, price: MachinePrice, wear: float = 0.0) -> float:
        """An hour of training on a machine that was bought, with energy and `wear`; NaN if it cannot be bought."""
        if price.buy is None:
            return math.nan
        hours = self.lifetime_months * HOURS_A_MONTH * self.utilisation
        return price.buy / hours + self.energy_per_hour(price) + wear

    def cheapest_per_hour(self, price: MachinePrice, wear: float = 0.0) -> tuple[float, str]:
        """An hour of training, "owned" or "rented", whichever is less; what wears out is the owner's."""
        owned = self.owned_per_hour(price, wear)
        if price.rent_per_hour is None or owned <= price.rent_per_hour:
            return owned, "owned"
        return price.rent_per_hour, "rented"

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


def _names(machine: str) -> Iterator[str]:
    """What the price of a machine, given by name or by path, may stand under."""
    yield machine
    yield Path(machine).name.removesuffix(".json")
    yield hardware.load(machine).name


def _line(name: str) -> str:
    return f'{name}: {{buy: 45000, watts: 1400, source: "quotation of 2026-11-01"}}'


def read(path: Path) -> Prices:
    """The prices in a YAML file. Raises PriceError."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses what yaml does not: of two entries of one name the later would hide the other."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [name for at, name in enumerate(names) if name in names[:at]]:
                raise PriceError(f"{path}: {twice[0]} is given twice, line {node.start_mark.line + 1} and below")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise PriceError(f"cannot read the prices in {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a date such as 2026-13-45
        raise PriceError(f"{path} is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise PriceError(f"{path} holds no prices; docs/prices.yaml shows the form")
    machines = document.pop("machines", None)
    if not isinstance(machines, dict) or not machines:
        raise PriceError(f"{path}: machines: is missing; it gives each machine's price")
    rentals = document.pop("rentals", None) or []
    if not isinstance(rentals, list):
        raise PriceError(f"{path}: rentals: is a list, each entry as in  {_RENTAL}")
    if isinstance(document.get("date"), datetime.date):
        document["date"] = document["date"].isoformat()
    found: Prices = _checked(
        Prices,
        {
            **document,
            "machines": {
                name: _checked(MachinePrice, entry, f"{path}: {name}", _line(name)) for name, entry in machines.items()
            },
            "rentals": tuple(_checked(Rental, entry, f"{path}: a rental", _RENTAL) for entry in rentals),
        },
        str(path),
        _HEAD,
    )
    rented = [rental.name for rental in found.rentals]
    if twice := [name for at, name in enumerate(rented) if name in rented[:at]]:
        raise PriceError(f"{path}: two rentals are called {twice[0]!r}: name them apart")
    for rental in found.rentals:
        try:
            hardware.load(rental.machine)
        except InputError as error:
            raise PriceError(f"{path}: a rental: {error}") from None
    return found


def _checked(cls: type[Any], entry: object, where: str, example: str) -> Any:
    known = {field.name: field for field in fields(cls)}
    if not isinstance(entry, Mapping):
        raise PriceError(f"{where}: {entry!r} must be a mapping of prices")
    for name, value in entry.items():
        if name not in known:
            raise PriceError(f"{where}: {name!r} is unknown; known are {', '.join(known)}")
        kind = str(known[name].type)
        number = isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
        if kind.startswith(("float", "int")) and not (number and 0 <= value <= sys.float_info.max):
            whole = "whole " if kind == "int" else ""
            raise PriceError(f"{where}: {name} must be a {whole}number of at least zero, not {value!r}")
        if name in DIVISORS and not value:
            raise PriceError(f"{where}: {name} must be more than zero")
        if kind == "str" and not (isinstance(value, str) and value):
            raise PriceError(f"{where}: {name} must be some text, not {value!r}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in entry]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise PriceError(f"{where}: {' and '.join(missing)} {verb} missing; as in  {example}")
    found = cls(**entry)
    if cls is MachinePrice and found.buy is None and found.rent_per_hour is None:
        raise PriceError(f"{where}: give buy or rent_per_hour; as in  {example}")
    for name in SHARES:
        if not 0 < getattr(found, name, 1) <= 1:
            raise PriceError(f"{where}: {name} must lie above 0 and up to 1, not {getattr(found, name)}")
    return found

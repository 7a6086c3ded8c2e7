"""Models times machines, real and imagined: what each point trains at, and what it costs.

Points are independent, and each is known by a hash of all that decides it: a sweep that was interrupted goes on
where it stopped, and one that is widened computes only what is new. What does not fit stays, with the reason.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.verify import verify
from sim import hardware
from sim.hardware import HardwareProfile
from sim.placement_bound import NoPlacement, placement_bound
from sim.plan import plan, splits
from sim.prediction import Prediction, memory_of, predict

if TYPE_CHECKING:
    import pandas as pd

    from analysis.prices import Prices

PLAN = "plan"  # in place of a policy's name: the best schedule that is found
Row = dict[str, Any]
Progress = Callable[[int, int, str], None]  # done, of how many, the last one


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model, a machine and how it is to be trained. `changes` are of the machine, as on the command line."""

    model: ModelSpec
    machine: str
    changes: tuple[str, ...]
    profile: HardwareProfile
    policy: str
    seq_len: int
    tokens_per_step: int
    precision: str = "bf16"

    @property
    def key(self) -> str:
        """A hash of all that decides the point's row: this package's version included."""
        what = {
            "model": self.model.to_dict(),
            "profile": hardware.to_json(self.profile),
            "step": [self.policy, self.seq_len, self.tokens_per_step, self.precision],
            "version": version("megatrain") if _installed() else "source",
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _installed() -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        version("megatrain")
    except PackageNotFoundError:
        return False
    return True


def points(
    models: Sequence[ModelSpec],
    machines: Sequence[str],
    vary: Sequence[str],
    names: Sequence[str],
    *,
    seq_len: int,
    tokens_per_step: int,
    precision: str = "bf16",
) -> list[Point]:
    """Every combination. `vary` is like ["host.memory=128GiB,256GiB", "links.h2d.bandwidth=25GB/s,50GB/s"].

    Raises:
        HardwareError: no such machine or number, or a value that no machine can have.
        InputError: nothing is varied, or the step is no whole number of sequences.
    """
    list(splits(seq_len, tokens_per_step, None, None, precision, None))  # tells what is wrong with the step
    axes = []
    for setting in vary:
        path, equals, values = setting.partition("=")
        if not equals or not values.strip():
            raise InputError(f"{setting!r} varies nothing; write number=VALUE,VALUE, as in host.memory=128GiB,256GiB")
        axes.append([f"{path.strip()}={value.strip()}" for value in values.split(",")])
    found = []
    for model, machine, changes, name in itertools.product(models, machines, itertools.product(*axes), names):
        profile = hardware.override(hardware.load(machine), list(changes))
        found.append(
            Point(
                model=model,
                machine=machine,
                changes=tuple(changes),
                profile=profile,
                policy=name,
                seq_len=seq_len,
                tokens_per_step=tokens_per_step,
                precision=precision,
            )
        )
    return found


def evaluate(point: Point) -> Row:
    """The row of one point, plain values only; runs in any process."""
    row: Row = {
        "key": point.key,
        "model": point.model.name,
        "machine": point.machine,
        "changes": " ".join(point.changes),
        "policy": point.policy,
        "seq_len": point.seq_len,
        "tokens_per_step": point.tokens_per_step,
        "precision": point.precision,
        "host_memory": point.profile.host.memory.value,
        "h2d_bandwidth": point.profile.links.h2d.bandwidth.value,
        "fits": False,
        "reason": "",
    }
    try:
        prediction, bound_ns = _planned(point) if point.policy == PLAN else _named(point)
    except (Refused, InputError) as error:
        return {**row, "reason": str(error).partition("\n")[0]}
    workload = prediction.schedule.workload
    return {
        **row,
        "fits": True,
        "stale": prediction.schedule.staleness,
        "micro_batch_size": workload.micro_batch_size,
        "accumulation": workload.accumulation,
        "tokens_per_s": prediction.tokens_per_s,
        "step_s": prediction.period_ns / 1e9,
        "mfu": prediction.mfu,
        "gap": prediction.period_ns / bound_ns - 1.0 if bound_ns else None,
        "binding": prediction.binding,
        **{f"{tier}_gb": prediction.peak_bytes[tier] / 1e9 for tier in Tier},
        "digest": prediction.schedule.short_digest,
    }


def _planned(point: Point) -> tuple[Prediction, float]:
    found = plan(
        point.model,
        point.profile,
        seq_len=point.seq_len,
        tokens_per_step=point.tokens_per_step,
        precision=point.precision,
    )
    return found.prediction, found.lower_bound_ns


def _named(point: Point) -> tuple[Prediction, float]:
    """A policy as it comes, with the fewest micro-batches that fit."""
    steps = list(splits(point.seq_len, point.tokens_per_step, None, None, point.precision, None))
    refused: Refused | None = None
    for workload in steps:
        schedule = policies.build(point.policy, point.model, workload, memory_of(point.profile))
        verify(schedule)
        prediction = predict(schedule, point.profile)
        if prediction.does_not_fit is None:
            try:
                return prediction, placement_bound(point.model, schedule.workload, point.profile).period_ns
            except NoPlacement:
                return prediction, 0.0
        refused = prediction.does_not_fit
    assert refused is not None, "a step has at least one micro-batch"
    raise refused


# ---- all points


def run(
    wanted: Sequence[Point], file: Path, *, workers: int | None = None, dask: str | None = None, progress: Progress
) -> list[Row]:
    """The rows of all points in their order; those in `file` are not computed again, new ones are appended to it.

    Args:
        file: a JSON line per row; a last line that was cut off is ignored.
        workers: processes; one for every core if left out.
        dask: the address of a running Dask cluster, "tcp://host:port", to run on instead.

    Raises:
        InputError: the file cannot be written, or there is no such cluster.
    """
    known = _finished(file)
    left = {point.key: point for point in wanted if point.key not in known}
    progress(len(wanted) - len(left), len(wanted), "")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _cut_half_a_line(file)
        with file.open("a", encoding="utf-8") as out:
            for row in _computed(list(left.values()), workers, dask):
                known[row["key"]] = row
                out.write(json.dumps(row) + "\n")
                out.flush()
                left.pop(row["key"], None)
                progress(len(wanted) - len(left), len(wanted), f"{row['model']} on {row['machine']}")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror or error}") from error
    return [known[point.key] for point in wanted]


def _computed(left: Sequence[Point], workers: int | None, dask: str | None) -> Iterator[Row]:
    if not left:
        return
    if dask is not None:
        yield from _on_dask(left, dask)
    elif workers == 1:
        yield from map(evaluate, left)
    else:
        with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
            pending = [pool.submit(evaluate, point) for point in left]
            try:
                for future in as_completed(pending):
                    yield future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _on_dask(left: Sequence[Point], address: str) -> Iterator[Row]:
    try:
        distributed: Any = importlib.import_module("distributed")  # an extra, without types
    except ImportError:
        raise InputError("running on a cluster takes Dask: pip install 'megatrain[dask]'") from None
    try:
        client = distributed.Client(address, timeout="5s")
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask cluster answers at {address}: {error}") from None
    with client:
        for _, row in distributed.as_completed(client.map(evaluate, list(left), pure=False), with_results=True):
            yield row


def _finished(file: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off when the sweep was
            rows[row["key"]] = row
    return rows


def _cut_half_a_line(file: Path) -> None:
    """Let the next row begin on a line of its own."""
    if file.is_file() and (text := file.read_bytes()) and not text.endswith(b"\n"):
        file.write_bytes(text[: text.rfind(b"\n") + 1])


# ---- what it costs


def priced(rows: Sequence[Row], prices: Prices, train_tokens: float) -> pd.DataFrame:
    """Rows with price, time, cost and energy of training that many tokens, and months to break even.

    Columns added: buy, cost_per_hour, days, cost, energy_kwh, pareto (no point of the model trains faster for as
    little an hour), and a column of months for every rental. Raises PriceError.
    """
    import pandas as pd

    found = [{**row, **_cost(row, prices, train_tokens)} for row in rows]
    table = pd.DataFrame(found)
    table["pareto"] = False
    for _, group in table[table["fits"]].groupby("model"):
        table.loc[_pareto(group), "pareto"] = True
    return table


def _cost(row: Row, prices: Prices, train_tokens: float) -> Row:
    machine = hardware.load(row["machine"])
    price = prices.of(row["machine"], more_host_bytes=row["host_memory"] - machine.host.memory.value)
    hourly = prices.cheapest_per_hour(price)
    nothing = {"buy": price.buy, "cost_per_hour": hourly, "days": None, "cost": None, "energy_kwh": None}
    months: Row = {months_column(rental.name): None for rental in prices.rentals}
    if not row["fits"]:
        return nothing | months
    hours = train_tokens / row["tokens_per_s"] / 3600
    for rental in prices.rentals:
        peak = hardware.load(rental.machine).gpu.matmul_flops.value
        flops = _flops_per_token(presets.load(row["model"]), row)
        rented = rental.gpus * rental.mfu * peak / flops  # tokens/s
        months[months_column(rental.name)] = prices.break_even_months(
            price, row["tokens_per_s"], rental.rent_per_hour / 3600 / rented
        )
    return {
        **nothing,
        "days": hours / 24,
        "cost": hours * hourly,
        "energy_kwh": hours * price.watts / 1e3,
    } | months


def months_column(rental: str) -> str:
    """The column of months after which a machine has cost less than that rental."""
    return f"months until cheaper than {rental}"


def _flops_per_token(model: ModelSpec, row: Row) -> float:
    from schedules.workload import Workload

    workload = Workload(micro_batch_size=1, seq_len=row["seq_len"])
    return model.model_flops_per_step(workload) / workload.tokens_per_step


def _pareto(group: pd.DataFrame) -> list[Any]:
    """The index of rows that no other row beats in both cost per hour and throughput."""
    best, chosen = -math.inf, list[Any]()
    ordered = group.sort_values(["cost_per_hour", "tokens_per_s"], ascending=[True, False])
    for index, rate in zip(ordered.index, ordered["tokens_per_s"], strict=True):
        if rate > best:
            best, chosen = rate, [*chosen, index]
    return chosen

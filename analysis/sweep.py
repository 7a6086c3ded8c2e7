"""Models times machines, real and imagined: what each point trains at, and what it costs.

Each point is known by a hash of all that decides it: a sweep that was interrupted goes on where it stopped, and one
that is widened computes only what is new. What does not fit stays, with the reason. A plan is a search and may miss
what the search for the machine beside it found: schedules are handed on between neighbours until none is better off.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from analysis.axes import axes_of
from analysis.pool import computed
from schedules import policies
from schedules.errors import InputError, Refused
from schedules.files import writing
from schedules.flops import model_flops_per_step
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import ADAMW, Workload
from sim import hardware
from sim.adapter_plan import POLICY, plan_adapters
from sim.candidate import cost
from sim.cost import MissingCost, TooLong
from sim.machine import HardwareProfile
from sim.plan import bound_of_any_split, is_bounded, plan
from sim.prediction import Prediction, memory_of, predict
from sim.splits import splits, that_can_be_written

PLAN = "plan"  # in place of a policy's name: the best schedule that is found
PLAN_ADAPTERS = "plan-adapters"  # likewise, of those that train adapters; a rank and a format may follow, as knobs do
GOES_ON = "the same command goes on from here"
Row = dict[str, Any]
T = TypeVar("T", bound="Point | Handed")
Progress = Callable[[int, int, str], None]  # done, of how many, the last one


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model, a machine and how it is to be trained. `changes` are of the machine, as on the command line.

    The policy may be followed by knobs: "streamed nvme=4". `source` is its text, where it is a file of the user's.
    """

    model: ModelSpec
    machine: str
    changes: tuple[str, ...]
    profile: HardwareProfile
    policy: str
    seq_len: int
    tokens_per_step: int
    precision: str = "bf16"
    grad_clip: float | None = None
    optimizer: str = ADAMW
    matmul: str | None = None
    source: str = ""

    @property
    def key(self) -> str:
        """A hash of all that decides the point's row: this package's version and what rows tell included."""
        what = {
            "model": self.model.to_dict(),
            "machine": self.machine,  # two of the same numbers may have two prices
            "profile": hardware.to_json(self.profile),
            "step": [self.policy, self.seq_len, self.tokens_per_step, self.precision],
            "told": FOUND,
            "version": _version(),
            **({"grad_clip": self.grad_clip} if self.grad_clip is not None else {}),
            **({"optimizer": self.optimizer} if self.optimizer != ADAMW else {}),
            **({"matmul": self.matmul} if self.matmul is not None else {}),
            **({"source": self.source} if self.source else {}),
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _version() -> str:
    try:
        return version("megatrain")
    except PackageNotFoundError:
        return "source"


def _source(policy: str) -> str:
    """The text of a policy's file, which may be another by the next sweep; nothing of our own and of plans."""
    if _of_adapters(policy) is not None:
        return ""
    name = policy if policy == PLAN else policies.with_knobs(policy)[0]
    return "" if name in (PLAN, *policies.names()) else Path(name).read_text(encoding="utf-8", errors="replace")


def require_training(names: Sequence[str]) -> None:
    """Raises InputError unless all of these policies, or plans, train the same; else the cheapest may train least."""
    trained = {name: _trains(name) for name in names}
    policies.require_alike(trained)
    if "nothing" in trained.values():
        raise InputError(f"{names[0]} trains nothing: a sweep is of what training costs")


def _trains(name: str) -> str:
    if _of_adapters(name) is not None:
        return "adapters"
    return "weights" if name == PLAN else policies.trains(policies.with_knobs(name)[0])


def _of_adapters(policy: str) -> dict[str, Any] | None:
    """The rank and the format of frozen weights that a plan for adapters is asked for; None of anything else."""
    name, *settings = policy.split() or [policy]
    if name != PLAN_ADAPTERS:
        return None
    asked = policies.parse_knobs(POLICY, settings)
    if chosen := [knob for knob in asked if knob not in ("rank", "quantised")]:
        raise InputError(f"{PLAN_ADAPTERS} chooses {chosen[0]} itself: give it a rank, or quantised=nf4, or neither")
    return {"rank": policies.knobs(POLICY)["rank"].default, **asked}


def points(
    models: Sequence[ModelSpec],
    machines: Sequence[str],
    vary: Sequence[str],
    names: Sequence[str],
    *,
    seq_len: int,
    tokens_per_step: int,
    precision: str = "bf16",
    grad_clip: float | None = None,
    optimizer: str = ADAMW,
    matmul: str | None = None,
) -> list[Point]:
    """Every combination, once. `vary` is like ["host.memory=128GiB,256GiB", "links.h2d.bandwidth=25GB/s,50GB/s"].

    Raises:
        HardwareError: no such machine or number, or a value that no machine can have.
        InputError: nothing is varied, or a number twice, or the step is no whole number of sequences or means nothing
            otherwise, or there is no such policy.
    """
    # tells what is wrong with the step
    list(splits(seq_len, tokens_per_step, None, None, precision, grad_clip, optimizer, matmul))
    axes = [[f"{path}={value}" for value in values] for path, values in axes_of(vary).items()]
    sources = {name: _source(name) for name in names}
    found: dict[str, Point] = {}
    for model, machine, changes, name in itertools.product(models, machines, itertools.product(*axes), names):
        point = Point(
            model=model,
            machine=machine,
            changes=tuple(changes),
            profile=hardware.override(hardware.load(machine), list(changes)),
            policy=name,
            seq_len=seq_len,
            tokens_per_step=tokens_per_step,
            precision=precision,
            grad_clip=grad_clip,
            optimizer=optimizer,
            matmul=matmul,
            source=sources[name],
        )
        found.setdefault(point.key, point)  # a value may have been given twice, in one spelling or another
    return list(found.values())


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
        "grad_clip": point.grad_clip,
        "optimizer": point.optimizer,
        "matmul": point.matmul,
        "host_memory": point.profile.host.memory.value,
        "h2d_bandwidth": point.profile.links.h2d.bandwidth.value,
        "fits": False,
        "reason": "",
    }
    try:
        prediction, knobs, bound_ns = _found(point)
    except (Refused, InputError) as error:
        return {**row, "reason": str(error).partition("\n")[0]}
    return {**row, "fits": True, "bound_of_any_schedule_s": bound_ns / 1e9 or None, **_of(prediction, knobs, bound_ns)}


# what the row of a point that fits says beside the others
FOUND = (
    "bound_of_any_schedule_s",
    "stale",
    "schedule",
    "knobs",
    "recompute",
    "micro_batch_size",
    "accumulation",
    "flops_per_token",
    "tokens_per_s",
    "step_s",
    "mfu",
    "gap_to_any_schedule",
    "binding",
    "drive_days",
    *(f"{tier}_gb" for tier in Tier),
    "digest",
)


def _of(prediction: Prediction, knobs: Mapping[str, Knob], bound_ns: float) -> Row:
    """What a row says of the schedule that was found; policy, knobs and split say how to build it."""
    schedule, workload = prediction.schedule, prediction.schedule.workload
    return {
        "stale": schedule.staleness,
        "schedule": schedule.policy,
        "knobs": " ".join(f"{name}={value}" for name, value in knobs.items()),
        "recompute": workload.recompute,
        "micro_batch_size": workload.micro_batch_size,
        "accumulation": workload.accumulation,
        "flops_per_token": model_flops_per_step(schedule.model, workload) / workload.tokens_per_step,
        "tokens_per_s": prediction.tokens_per_s,
        "step_s": prediction.period_ns / 1e9,
        "mfu": prediction.mfu,
        "gap_to_any_schedule": prediction.period_ns / bound_ns - 1.0 if bound_ns else None,
        "binding": prediction.binding,
        "drive_days": prediction.drive_days,
        **{f"{tier}_gb": prediction.peak_bytes[tier] / 1e9 for tier in Tier},
        "digest": schedule.short_digest,
    }


Found = tuple[Prediction, Mapping[str, Knob], float]  # with which knobs, and the bound of any schedule in ns


def _found(point: Point) -> Found:
    if point.policy == PLAN:
        return _planned(point)
    asked = _of_adapters(point.policy)
    return _named(point) if asked is None else _planned_for_adapters(point, asked)


def _planned_for_adapters(point: Point, asked: dict[str, Any]) -> Found:
    if point.optimizer != ADAMW or point.matmul is not None:
        raise InputError(f"adapters are trained by {ADAMW}, with products in bf16: leave out the optimizer and matmul")
    found = plan_adapters(
        point.model,
        point.profile,
        seq_len=point.seq_len,
        tokens_per_step=point.tokens_per_step,
        precision=point.precision,
        grad_clip=point.grad_clip,
        **asked,
    )
    return found.prediction, {**asked, **found.chosen.knobs}, found.lower_bound_ns


def _planned(point: Point) -> Found:
    found = plan(
        point.model,
        point.profile,
        seq_len=point.seq_len,
        tokens_per_step=point.tokens_per_step,
        precision=point.precision,
        grad_clip=point.grad_clip,
        optimizer=point.optimizer,
        matmul=point.matmul,
    )
    return found.prediction, found.chosen.knobs, found.lower_bound_ns


def _named(point: Point) -> Found:
    """A policy with the knobs it was given, the fewest micro-batches that fit, and the recompute that suits them."""
    name, knobs = policies.with_knobs(point.policy)
    asked = (point.precision, point.grad_clip, point.optimizer, point.matmul)
    steps = that_can_be_written(point.model, list(splits(point.seq_len, point.tokens_per_step, None, None, *asked)))
    refused: Refused | MissingCost | TooLong | None = None
    for workload in steps:
        fitting: list[Prediction] = []
        for mode in point.model.recompute_modes:
            step = replace(workload, recompute=mode)
            schedule = policies.build(name, point.model, step, memory_of(point.profile), **knobs)
            verify(schedule)
            try:
                prediction = predict(schedule, point.profile)
            except (MissingCost, TooLong) as error:  # another way is measured, smaller micro-batches have shorter ops
                refused = refused or error
                continue
            if prediction.does_not_fit is None:
                fitting.append(prediction)
            else:
                refused = prediction.does_not_fit
        if fitting:
            best = min(fitting, key=lambda prediction: prediction.period_ns)
            return best, knobs, _bound_ns(best.schedule, point)
    assert refused is not None, "a step has at least one micro-batch"
    raise refused


def _bound_ns(schedule: Schedule, point: Point) -> float:
    """Of any exact schedule that trains all of the model; 0 where this one is none, or the bound knows of none."""
    if not is_bounded(schedule):
        return 0.0
    key = replace(point, policy=PLAN, source="").key  # all policies share it
    if key not in _bounds:
        _bounds[key] = bound_of_any_split(
            point.model,
            point.profile,
            seq_len=point.seq_len,
            tokens_per_step=point.tokens_per_step,
            precision=point.precision,
            grad_clip=point.grad_clip,
            optimizer=point.optimizer,
            matmul=point.matmul,
        )
    return _bounds[key]


_bounds: dict[str, float] = {}  # by point, in ns


# ---- what neighbours found


@dataclass(frozen=True)
class Handed:
    """A planned point, its row, and the rows of points whose schedules are to be tried there."""

    point: Point
    row: Row
    others: tuple[Row, ...]


def neighbours(points: Sequence[Point]) -> dict[str, list[str]]:
    """By the key of each planned point, the keys of those beside it: one number changed, to its next value."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        if point.policy == PLAN:
            step = (point.seq_len, point.tokens_per_step, point.precision, point.grad_clip)
            how = (point.optimizer, point.matmul, len(point.changes))
            groups.setdefault((point.model, point.machine, *step, *how), []).append(point)
    found: dict[str, list[str]] = {}
    for group in groups.values():
        axes = [list(dict.fromkeys(values)) for values in zip(*(point.changes for point in group), strict=True)]
        place = {tuple(axis.index(value) for axis, value in zip(axes, p.changes, strict=True)): p.key for p in group}
        for at, key in place.items():
            beside = ((*at[:axis], at[axis] + step, *at[axis + 1 :]) for axis in range(len(axes)) for step in (-1, 1))
            found[key] = [place[there] for there in beside if there in place]
    return found


def hand_on(handed: Handed) -> Row:
    """The point's row, with the fastest of its own schedule and the others'; runs in any process."""
    point, row = handed.point, handed.row
    for other in handed.others:
        workload = Workload(
            micro_batch_size=other["micro_batch_size"],
            accumulation=other["accumulation"],
            seq_len=point.seq_len,
            precision=point.precision,
            optimizer=point.optimizer,
            grad_clip=point.grad_clip,
            recompute=other["recompute"],
            matmul=point.matmul,
        )
        knobs = policies.parse_knobs(other["schedule"], other["knobs"].split())
        schedule = policies.build(other["schedule"], point.model, workload, memory_of(point.profile), **knobs)
        try:
            prediction = predict(schedule, point.profile)
        except TooLong:  # its ops are short enough only on the machine that it is from
            continue
        handed_on = {**row, **_of(prediction, knobs, (row["bound_of_any_schedule_s"] or 0.0) * 1e9)}
        if prediction.fits and _cost(handed_on) < _cost(row):
            verify(schedule)
            row = handed_on
    tried = {*row.get("tried", ()), *(other["digest"] for other in handed.others)}
    return {**row, "tried": sorted(tried)}


def _cost(row: Row) -> float:
    return cost(row["step_s"], row["nvme_gb"] > 0)


def _to_hand_on(points: Sequence[Point], rows: Mapping[str, Row]) -> list[Handed]:
    """What neighbours have that a point has not tried yet."""
    found, by_key = list[Handed](), {point.key: point for point in points}
    for key, beside in neighbours(points).items():
        row = rows[key]
        known = {row.get("digest"), *row.get("tried", ())}
        others = {rows[k]["digest"]: rows[k] for k in beside if rows[k]["fits"] and rows[k]["digest"] not in known}
        if row["fits"] and others:
            found.append(Handed(by_key[key], row, tuple(others.values())))
    return found


# ---- all points


def run(
    wanted: Sequence[Point], file: Path, *, workers: int | None = None, dask: str | None = None, progress: Progress
) -> list[Row]:
    """The rows of all points in their order; those in `file` are not computed again, new ones are appended to it.

    Args:
        file: a JSON line per row; a last line that was cut off is ignored.
        workers: processes; one for every core that this process may use if left out.
        dask: the address of a running Dask cluster, "tcp://host:port", to run on instead.

    Raises:
        InputError: the file cannot be written, or there is no such cluster.
        Refused: a process was ended from outside, or the cluster was.
    """
    known = _finished(file)
    left = [point for point in wanted if point.key not in known]

    def keep(rows: Iterator[Row], done: int, of: int, note: str) -> None:
        """Write each row down as soon as it is known; of several with one key the last counts."""
        progress(done, of, "")
        for number, row in enumerate(rows, done + 1):
            known[row["key"]] = row
            with writing(file), file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            progress(number, of, f"{row['model']} on {row['machine']}{note}")

    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        _cut_half_a_line(file)
        file.open("a").close()  # better known now than after the first point
    keep(_computed(evaluate, left, workers, dask), len(wanted) - len(left), len(wanted), "")
    while handed := _to_hand_on(wanted, known):
        keep(_computed(hand_on, handed, workers, dask), 0, len(handed), ", with its neighbours' schedules")
    return [{**known[point.key], **_lacking(known[point.key])} for point in wanted]


def _lacking(row: Row) -> Row:
    """What other rows tell and this one does not: it fits nowhere, or was stored before steps had these options."""
    usual: Row = {"grad_clip": None, "optimizer": ADAMW, "matmul": None}
    return {key: usual.get(key) for key in (*usual, *FOUND) if key not in row}


def _computed(do: Callable[[T], Row], left: Sequence[T], workers: int | None, dask: str | None) -> Iterator[Row]:
    if not left:
        return
    if dask is not None:
        yield from _on_dask(do, left, dask)
    else:
        yield from computed(do, left, workers, f"{GOES_ON}, and fewer --workers need less memory")


def _on_dask(do: Callable[[T], Row], left: Sequence[T], address: str) -> Iterator[Row]:
    try:
        distributed: Any = importlib.import_module("distributed")  # an extra, without types
    except ImportError:
        raise InputError("running on a cluster takes Dask: pip install 'megatrain[dask]'") from None
    try:
        client = distributed.Client(address, timeout="5s")
    except (OSError, ValueError) as error:
        raise InputError(f"no Dask cluster answers at {address}: {error}") from None
    with client:
        try:
            for future in distributed.as_completed(client.map(do, list(left), pure=False)):
                yield future.result()
        except distributed.KilledWorker:
            told = f"a worker of the Dask cluster at {address} was ended, as Linux does where memory runs out"
            raise Refused(f"{told}; {GOES_ON}") from None
        except CancelledError:
            raise Refused(f"the Dask cluster at {address} has ended; {GOES_ON}") from None


def _finished(file: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # cut off when the sweep was
            if _is_row(row):
                rows[row["key"]] = row
    return rows


def _is_row(row: object) -> bool:
    """Whether it tells all that a row does: what else is in the file is computed again."""
    if not isinstance(row, dict) or not isinstance(row.get("key"), str) or not isinstance(row.get("fits"), bool):
        return False
    return not row["fits"] or all(name in row for name in FOUND)


def _cut_half_a_line(file: Path) -> None:
    """Let the next row begin on a line of its own."""
    if file.is_file() and (text := file.read_bytes()) and not text.endswith(b"\n"):
        file.write_bytes(text[: text.rfind(b"\n") + 1])

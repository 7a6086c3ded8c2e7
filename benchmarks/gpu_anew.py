"""The steps in a gpu.json, predicted anew by the simulator as it is now: from what was measured then, without a GPU."""

from __future__ import annotations

import dataclasses
import gzip
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_machine
from gpu_case import budget_of, limit_gib
from gpu_machine import Row
from gpu_profile import machine_of, of_run, profile_of

from schedules import codec, policies, presets
from schedules.op import Stream
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware
from sim.cost import demands
from sim.machine import HardwareProfile
from sim.prediction import predict
from sim.signature import timed

# schedules that were run and that their policies no longer make
STORED = Path(__file__).parent.parent / "analysis" / "results" / "gpu" / "schedules"
HOST_ADAM = "host.adam_params_per_s"


@dataclasses.dataclass(frozen=True)
class Anew:
    """A step as predicted, and its schedule's bound.

    `slower` is how many times as long the ops that compute on the GPU took in the measured step as they do alone, and
    `slower_step_s` what the step would be predicted to take if they did: its error is that of all else.
    """

    step_s: float
    bound_s: float
    slower: float
    slower_step_s: float


def predicted(body: dict[str, Any], assumed: Sequence[str] = ()) -> dict[str, Anew]:
    """What is predicted of each step by its case's key, as far as the step was measured.

    `assumed` of the machine, as for `hardware.override`; with the optimizer's pace on the host it was not timed. Raises
    ValueError where a policy no longer makes the schedule that was run and none is stored, InputError.
    """
    rows, found = body["rows"], dict[str, Anew]()
    gpu = body["runs"][0]["gpu"]
    for key, row in rows.get("steps", {}).items():
        if "step_s" not in row:
            continue
        schedule, known = _rebuilt(key, row, body["host_bytes"]), row["alone_ns"]
        handing_ns = {name: us * 1e3 for name, us in row["handing_over_us"].items()}
        profile = profile_of(schedule, machine_of(of_run(body, row["run"]), gpu), known, handing_ns)
        if assumed:
            profile = hardware.override(profile, assumed)
        if any(one.startswith(HOST_ADAM) for one in assumed):
            profile = _without(profile, "/adam/host/")
        prediction, keys = predict(schedule, profile), timed(schedule)
        computed = [keys[place] for place, op in enumerate(schedule.ops) if op.stream == Stream.COMPUTE]
        slower = row["busy"]["compute"] * row["step_s"]["median"] * 1e9 / sum(known[name] for name in computed)
        otherwise = predict(schedule, _with(profile, {name: round(known[name] * slower) for name in computed}))
        found[key] = Anew(prediction.period_ns / 1e9, prediction.bound_ns / 1e9, slower, otherwise.period_ns / 1e9)
    return found


@dataclasses.dataclass(frozen=True)
class OpTimes:
    """What one kind of op on the GPU takes, in ms: so many in a step, by its datasheet, alone, and in the step."""

    case: str
    op: str
    count: int
    datasheet_ms: float
    alone_ms: float
    in_step_ms: float


def op_times(body: dict[str, Any], share: float = 0.01) -> list[OpTimes]:
    """The ops that compute on the GPU, of each measured step those that take more than a share of it; longest first."""
    datasheet, found = hardware.load(gpu_machine.datasheet(body["runs"][0]["gpu"])), list[OpTimes]()
    for key, row in body["rows"].get("steps", {}).items():
        if "op_ns" not in row:
            continue
        schedule, known = _rebuilt(key, row, body["host_bytes"]), row["alone_ns"]
        keys, wanted = timed(schedule), dict[str, list[int]]()
        for place, op in enumerate(schedule.ops):
            if op.stream == Stream.COMPUTE:
                wanted.setdefault(keys[place], []).append(place)
        asked = demands(schedule, datasheet)
        for name, places in sorted(wanted.items(), key=lambda one: -len(one[1]) * row["op_ns"][one[0]]):
            in_step_ns = row["op_ns"][name]
            if len(places) * in_step_ns > share * row["step_s"]["median"] * 1e9:
                by_datasheet = statistics.median(asked[place].duration_ns for place in places)
                times = (by_datasheet / 1e6, known[name] / 1e6, in_step_ns / 1e6)
                found.append(OpTimes(key, name.removeprefix(f"{schedule.model.name}/"), len(places), *times))
    return found


def _with(profile: HardwareProfile, times_ns: Mapping[str, float]) -> HardwareProfile:
    """The profile with other times of these ops."""
    return _timed(profile, lambda known: {**known, **times_ns})


def _without(profile: HardwareProfile, what: str) -> HardwareProfile:
    """The profile without the times of ops that are called so."""
    return _timed(profile, lambda known: {key: ns for key, ns in known.items() if what not in key})


def _timed(profile: HardwareProfile, change: Callable[[Mapping[str, float]], Mapping[str, float]]) -> HardwareProfile:
    assert profile.measured is not None and profile.measured.op_times is not None
    times = dataclasses.replace(profile.measured.op_times, values=change(profile.measured.op_times.values))
    return dataclasses.replace(profile, measured=dataclasses.replace(profile.measured, op_times=times))


def _rebuilt(key: str, row: Row, host_bytes: int) -> Schedule:
    """The schedule of a row: from the policy, the batch and the knobs that it names, or from STORED if it is there."""
    if (file := STORED / f"{row['digest'][:8]}.json.gz").is_file():
        schedule = codec.loads(gzip.decompress(file.read_bytes()).decode())
        assert schedule.digest == row["digest"], file
        return schedule
    fields = {field.name for field in dataclasses.fields(Workload)} & row.keys()
    gib = limit_gib(key)
    planned_for = round(row["planned_for_GB"] * 1e9)
    limit = planned_for if gib is None else min(planned_for, int(gib * 2**30))
    schedule = policies.build(
        row["policy"],
        presets.load(row["model"]),
        Workload(**{name: row[name] for name in fields}),
        budget_of(limit, host_bytes),
        **row["knobs"],
    )
    if schedule.digest != row["digest"]:
        was = f"the schedule {row['digest'][:8]} that was run"
        raise ValueError(f"{key}: {row['policy']} no longer makes {was}; store it in {STORED}")
    return schedule

"""The steps in a gpu.json, predicted anew by the simulator as it is now: from what was measured then, without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gpu_case import HOST_RESERVE, limit_gib
from gpu_machine import Row
from gpu_profile import machine_of, profile_of

from megatrain.this_machine import usable_bytes
from schedules import policies, presets
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.machine import HardwareProfile
from sim.prediction import predict

HOST_ADAM = "host.adam_params_per_s"


def predicted(body: dict[str, Any], assumed: Sequence[str] = ()) -> dict[str, float]:
    """Each step's predicted seconds by its case's key, as far as the step was measured.

    `assumed` of the machine, as for `hardware.override`; with the optimizer's pace on the host it was not timed. Raises
    ValueError where a policy no longer makes the schedule that was run, InputError.
    """
    rows = body["rows"]
    machine = {part: _whole(rows.get(part, {})) for part in ("links", "gemm", "dram")}
    gpu, found = body["runs"][0]["gpu"], {}
    for key, row in rows.get("steps", {}).items():
        if "step_s" not in row:
            continue
        schedule = _rebuilt(key, row, body["host_bytes"])
        known = body["op_times_ns"][f"fused={row['fused']}, graphs={row['graphs']}"]
        handing_ns = {name: us * 1e3 for name, us in row["handing_over_us"].items()}
        profile = profile_of(schedule, machine_of(machine, gpu), known, handing_ns)
        if assumed:
            profile = hardware.override(profile, assumed)
        if any(one.startswith(HOST_ADAM) for one in assumed):
            profile = _without(profile, "/adam/host/")
        found[key] = predict(schedule, profile).period_ns / 1e9
    return found


def _without(profile: HardwareProfile, what: str) -> HardwareProfile:
    """The profile without the times of ops that are called so."""
    assert profile.measured is not None and profile.measured.op_times is not None
    values = {key: ns for key, ns in profile.measured.op_times.values.items() if what not in key}
    times = dataclasses.replace(profile.measured.op_times, values=values)
    return dataclasses.replace(profile, measured=dataclasses.replace(profile.measured, op_times=times))


def _whole(rows: dict[str, Row]) -> list[Row]:
    return [row for row in rows.values() if "error" not in row]


def _rebuilt(key: str, row: Row, host_bytes: int) -> Schedule:
    """The schedule of a row, from the policy, the batch and the knobs that it names."""
    fields = {field.name for field in dataclasses.fields(Workload)} & row.keys()
    gib = limit_gib(key)
    limit = round(row["planned_for_GB"] * 1e9) if gib is None else int(gib * 2**30)
    schedule = policies.build(
        row["policy"],
        presets.load(row["model"]),
        Workload(**{name: row[name] for name in fields}),
        MemoryBudget(device_bytes=usable_bytes(limit), host_bytes=max(0, host_bytes - HOST_RESERVE)),
        **row["knobs"],
    )
    if schedule.digest != row["digest"]:
        raise ValueError(f"{key}: {row['policy']} no longer makes the schedule {row['digest'][:8]} that was run")
    return schedule

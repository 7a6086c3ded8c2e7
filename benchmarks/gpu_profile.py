"""The GPU's machine as a hardware profile: what was measured of its links and memory, and what ops take alone."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import gpu_machine
from gpu_machine import Row

from megatrain.profile_numbers import most_moved
from schedules.op import Phase
from schedules.schedule import Schedule
from sim import hardware
from sim.machine import HardwareProfile, Measured, Table, Value
from sim.signature import timed

SOURCE = "measured by benchmarks/gpu.py"
MACHINE = ("links", "gemm", "dram")  # the parts of gpu.json that tell of the machine
EARLIER = "earlier"  # where it keeps what they told in runs before: by part and run


def _value(number: float, unit: str) -> Value:
    return Value(value=float(number), unit=unit, source=SOURCE)


def machine_of(machine: dict[str, list[Row]], gpu: str | None = None) -> HardwareProfile:
    """The machine for the planner: its GPU's datasheet, with the bandwidths and the slowdown that were measured.

    `gpu` is CUDA's name for it, this machine's if None.
    """
    base = hardware.load(gpu_machine.datasheet(gpu))
    links, host, gpu = base.links, base.host, base.gpu
    if rows := machine.get("links"):
        largest = rows[-1]
        links = dataclasses.replace(
            links,
            h2d=dataclasses.replace(links.h2d, bandwidth=_value(largest["h2d_GB_s"]["median"] * 1e9, "B/s")),
            d2h=dataclasses.replace(links.d2h, bandwidth=_value(largest["d2h_GB_s"]["median"] * 1e9, "B/s")),
            duplex=_value(sum(one["median"] for one in largest["both_GB_s"]) * 1e9, "B/s"),
        )
    if rows := machine.get("dram"):
        together = [row["GB_s"] for row in rows if "beside" in row]  # of an update and copies one way
        most = max([*(row["GB_s"] for row in rows if "beside" not in row), statistics.mean(together or [0.0])])
        host = dataclasses.replace(host, memory_bandwidth=_value(most * 1e9, "B/s"))
    if rows := machine.get("gemm"):
        slowdown = statistics.median(max(0.0, row["slowdown"]) for row in rows if "slowdown" in row)
        gpu = dataclasses.replace(gpu, copy_slowdown=_value(slowdown, "fraction"))
    return dataclasses.replace(base, gpu=gpu, links=links, host=host)


def of_run(body: Mapping[str, Any], run: int) -> dict[str, list[Row]]:
    """What a gpu.json tells of the machine as a run had it: it may have been another one's, of the same kind."""
    found = {}
    for part in MACHINE:
        rows = [row for row in body["rows"].get(part, {}).values() if "error" not in row]
        for earlier in body.get(EARLIER, {}).get(part, {}).values():
            rows += earlier.values()
        runs = sorted({row["run"] for row in rows})
        last = max((one for one in runs if one <= run), default=runs[0] if runs else None)
        found[part] = [row for row in rows if row["run"] == last]
    return found


def op_times(schedule: Schedule, durations_ns: list[int]) -> dict[str, float]:
    """Signature -> median ns, from what each op of the schedule took."""
    times: dict[str, list[int]] = defaultdict(list)
    for place, key in timed(schedule).items():
        times[key].append(durations_ns[place])
    return {key: round(statistics.median(found)) for key, found in times.items()}


def profile_of(
    schedule: Schedule, base: HardwareProfile, known_ns: dict[str, float], handing_ns: dict[str, float]
) -> HardwareProfile:
    """The machine for the simulator: `base`, as for the planner, with what this schedule's ops take alone."""
    keys = timed(schedule)
    of_host = [
        (op, known_ns[keys[place]])
        for place, op in enumerate(schedule.ops)
        if place in keys and not op.on_device and known_ns[keys[place]]
    ]
    host, issue = base.host, base.issue
    if (moved := most_moved(of_host)) > host.memory_bandwidth.value:
        host = dataclasses.replace(host, memory_bandwidth=_value(moved, "B/s"))
    if rates := [op.params / ns * 1e9 for op, ns in of_host if op.phase == Phase.ADAM]:
        host = dataclasses.replace(host, adam_params_per_s=_value(statistics.median(rates), "params/s"))
    issue = dataclasses.replace(
        issue,
        compute=_value(handing_ns.get("compute", issue.compute.value), "ns"),
        copy=_value(handing_ns.get("copy", issue.copy.value), "ns"),
    )
    op_times = {key: known_ns[key] for key in keys.values()}
    measured = Measured(op_times=Table(values=op_times, unit="ns", source=f"{SOURCE}, each op alone, in place"))
    return dataclasses.replace(base, mode="measured", host=host, issue=issue, measured=measured)

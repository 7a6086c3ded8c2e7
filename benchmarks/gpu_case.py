"""A step to measure on a GPU: a model, a policy and a batch, and the schedule by which it is trained."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from megatrain.cores import usable_cores
from megatrain.this_machine import usable_bytes
from megatrain.way import Way
from schedules import codec, policies, presets
from schedules.errors import Refused
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim.machine import HardwareProfile
from sim.plan import plan

PLANNED = "planned"
HOST_RESERVE = 6 << 30  # for Python, CUDA, compilers and one layer's weights as they are made
PR_SET_PDEATHSIG = 1  # of Linux' prctl


def end_with_parent() -> None:
    """Have the kernel end this process when the one that began it ends, however that was ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# Asked before CUDA starts, the process is there from then on: one forked later has locks, and not the threads in them.
PLANNER = ProcessPoolExecutor(1, initializer=end_with_parent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a model, a policy and a batch. `device_gib` limits the GPU's memory, all of it if None.

    The policy PLANNED is the planner's schedule, for this machine, of a step of as many tokens, however split.
    `recompute` as in Workload. `fused` compiles what multiplies no matrices, `graphs` replays blocks as CUDA graphs:
    in which way a case is computed, of which its key says nothing.
    """

    model: str
    policy: str
    seq_len: int
    micro_batch_size: int
    accumulation: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    device_gib: float | None = None
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    fused: bool = False
    graphs: bool = False

    @property
    def key(self) -> str:
        knobs = "".join(f" {name}={value}" for name, value in self.knobs.items())
        limit = f" in {self.device_gib:g} GiB" if self.device_gib else ""
        again = "" if self.recompute == "none" else f" {self.recompute} again"
        return (
            f"{self.model} {self.policy}{knobs} {self.accumulation}x{self.micro_batch_size}x{self.seq_len} "
            f"{self.precision}{limit}{again}"
        )

    @property
    def key_in_way(self) -> str:
        """The key, and the way."""
        return self.key + "".join(f" {name}" for name in ("fused", "graphs") if getattr(self, name))

    def device_bytes(self, free: int) -> int:
        """Of so many bytes of the GPU's memory those that it is planned for."""
        return min(free, int(self.device_gib * 2**30)) if self.device_gib else free

    @property
    def way(self) -> Way:
        """In which it is computed."""
        return Way(fused=self.fused, graphs=self.graphs)

    @property
    def workload(self) -> Workload:
        return Workload(
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            seq_len=self.seq_len,
            precision=self.precision,
            recompute=self.recompute,
        )


def limit_gib(key: str) -> float | None:
    """The `device_gib` of the case that has such a key."""
    found = re.search(r" in ([0-9.]+) GiB", key)
    return float(found[1]) if found else None


def budget_of(device_bytes: int, host_bytes: int) -> MemoryBudget:
    """What a schedule may use of so much memory of the GPU, and of the host."""
    return MemoryBudget(device_bytes=usable_bytes(device_bytes), host_bytes=max(0, host_bytes - HOST_RESERVE))


def plan_file(folder: Path, case: Case, device_bytes: int, host_bytes: int) -> Path:
    """Where a plan of the case for so much memory is kept, if it was made beforehand (`gpu_plans.py`)."""
    name = re.sub("[^A-Za-z0-9._-]+", "_", case.key)
    return folder / f"{name}.device_{case.device_bytes(device_bytes)}.host_{host_bytes}.json"


def schedule_of(
    case: Case,
    profile: HardwareProfile,
    *,
    device_bytes: int,
    host_bytes: int,
    planning_s: float | None = None,
    plans: Path | None = None,
) -> Schedule:
    """The case's schedule. With resident="fit", the least number of resident layers that the host has room for.

    `profile` is what the planner plans for, in at most `planning_s` if given, unless the folder `plans` has one. Raises
    Refused for what does not fit, TimeoutError.
    """
    model = presets.load(case.model)
    limit = case.device_bytes(device_bytes)
    budget = budget_of(limit, host_bytes)
    if case.policy == PLANNED:
        if plans is not None and (made := plan_file(plans, case, device_bytes, host_bytes)).exists():
            return codec.read(made)
        return _planned(case, model, profile, budget, planning_s)

    # our kernels compute every schedule's layers, and a schedule says what they move
    kernels = {"fused": case.fused} if "fused" in policies.knobs(case.policy) else {}

    def build(knobs: dict[str, Any]) -> Schedule:
        return policies.build(case.policy, model, case.workload, budget, **kernels, **knobs)

    schedule = build({**case.knobs, "resident": 0}) if case.knobs.get("resident") == "fit" else build(case.knobs)
    if case.knobs.get("resident") == "fit":
        for count in range(1, len(model.layers) + 1):
            if schedule.allocated_bytes(Tier.HOST) <= budget.host_bytes:
                break
            schedule = build({**case.knobs, "resident": count})
    for tier, available in ((Tier.HOST, host_bytes), (Tier.DEVICE, limit)):
        if schedule.allocated_bytes(tier) > available:
            needed = schedule.allocated_bytes(tier) / 2**30
            raise Refused(f"does not fit: {needed:.1f} GiB of {tier} memory, {available / 2**30:.1f} GiB available")
    return schedule


def _planned(
    case: Case, model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget, planning_s: float | None
) -> Schedule:
    found = PLANNER.submit(
        plan,
        model,
        profile,
        seq_len=case.seq_len,
        tokens_per_step=case.workload.tokens_per_step,
        precision=case.precision,
        memory=budget,
        workers=usable_cores(),
    )
    return found.result(planning_s).schedule

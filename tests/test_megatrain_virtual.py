"""The executor's own loop, on a clock, yields the simulator's trace to the nanosecond."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hand_written import WRITERS, small

from megatrain.executor import Executor
from megatrain.virtual import VirtualBackend
from schedules import policies, presets
from schedules.schedule import Schedule
from schedules.trace import COLUMNS, Trace
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import Demand, demands
from sim.engine import play, simulate

STEPS = 3
WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=8, precision="bf16_split", grad_clip=1.0)


def assert_same(schedule: Schedule, predicted: Trace, issue_ns: list[int]) -> None:
    shape = (predicted.steps, len(schedule.ops))
    durations = (predicted.end_ns - predicted.start_ns).reshape(shape)
    issue = np.broadcast_to(np.array(issue_ns, dtype=np.int64), shape)
    backend = VirtualBackend(durations, issue, machine=predicted.machine)
    executed = Executor(verify(schedule), backend).run(predicted.steps)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(executed, column), getattr(predicted, column), err_msg=column)
    assert (executed.digest, executed.machine, executed.source) == (schedule.digest, predicted.machine, "predicted")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("machine", ["h200", "rtx4090"])
@pytest.mark.parametrize("policy", policies.names())
def test_virtual_run_is_the_simulation_with_all_its_terms(policy: str, machine: str) -> None:
    model, profile = presets.load("qwen2.5-7b"), hardware.load(machine)
    memory = MemoryBudget(device_bytes=24 * 10**9, host_bytes=10**12)
    schedule = policies.build(policy, model, replace(WORKLOAD, seq_len=1024), memory)
    issue_ns = [cost.issue_ns for cost in demands(schedule, profile)]
    assert_same(schedule, simulate(schedule, profile, steps=STEPS), issue_ns)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("writer", WRITERS)
def test_virtual_run_is_the_simulation_of_random_costs_with_ties_and_zeros(writer: str, seed: int) -> None:
    schedule, rng = WRITERS[writer](small(tied=bool(seed % 2)), WORKLOAD), random.Random(seed)
    costs = [
        Demand(duration_ns=rng.choice([0, 1, 10, 10, 40]), issue_ns=rng.choice([0, 0, 1, 10])) for _ in schedule.ops
    ]
    assert_same(schedule, play(schedule, costs, steps=STEPS), [cost.issue_ns for cost in costs])


def test_every_step_has_costs_of_its_own() -> None:
    schedule = WRITERS["two_slots"](small(), WORKLOAD)
    durations = np.random.default_rng(0).integers(0, 100, size=(STEPS, len(schedule.ops)))
    costs = [Demand(duration_ns=0, issue_ns=3)] * len(schedule.ops)
    assert_same(schedule, play(schedule, costs, steps=STEPS, durations=durations), [3] * len(schedule.ops))


def test_costs_of_different_shapes_are_refused() -> None:
    zeros = np.zeros((2, 3), dtype=np.int64)
    with pytest.raises(ValueError, match="shape"):
        VirtualBackend(zeros, zeros[:1], machine="none")

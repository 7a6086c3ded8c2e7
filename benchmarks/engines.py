"""How fast the two engines are: python benchmarks/engines.py

One step of gpt-oss-120b with four micro-batches under the streamed policy, simulated for four steps in turn by
SimPy with everything shared, by SimPy with nothing shared, and by the longest path for one and for 1,000
hardware points. Each time is the best of five runs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import numpy as np

from megatrain.cores import usable_cores
from megatrain.this_machine import machine_name, today
from schedules import policies, presets
from schedules.workload import Workload
from sim import hardware
from sim.bound import bound
from sim.cost import Terms, demands
from sim.engine import simulate
from sim.longest_path import evaluate
from sim.prediction import memory_of, predict

MODEL, PROFILE, STEPS, POINTS, RUNS = "gpt-oss-120b", "h200", 4, 1000, 5


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    profile = hardware.load(PROFILE)
    workload = Workload(micro_batch_size=4, accumulation=4, seq_len=4096)
    schedule = policies.build("streamed", presets.load(MODEL), workload, memory_of(profile))
    alone = Terms(sharing=False, compute_slowdown=False)
    costs = demands(schedule, profile)
    durations, issue = (np.array([[getattr(cost, name) for cost in costs]]) for name in ("duration_ns", "issue_ns"))
    # hardware points: every op faster or slower by its own factor
    factors = np.random.default_rng(0).uniform(0.5, 2.0, (POINTS, len(costs)))
    many = np.rint(durations * factors).astype(np.int64)
    many_issue = np.repeat(issue, POINTS, axis=0)

    print(f"{machine_name()}, {usable_cores()} cores; Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{today()}; {MODEL}, {schedule.policy}, {len(schedule.ops)} ops a step, {STEPS} steps")
    for name, work, points in (
        ("SimPy, shared", lambda: simulate(schedule, profile, steps=STEPS), 1),
        ("SimPy, nothing shared", lambda: simulate(schedule, profile, steps=STEPS, terms=alone), 1),
        ("longest path", lambda: evaluate(schedule, durations, issue, STEPS), 1),
        ("longest path, batch", lambda: evaluate(schedule, many, many_issue, STEPS), POINTS),
    ):
        seconds = best_s(work)
        rate = points * STEPS * len(schedule.ops) / seconds
        print(f"{name:24}{points:6} points {seconds * 1e3:9.1f} ms {rate:14,.0f} ops/s")
    print(f"{'costs of one step':37} {best_s(lambda: demands(schedule, profile)) * 1e3:9.1f} ms")
    print(f"{'bounds':37} {best_s(lambda: bound(schedule, profile)) * 1e3:9.1f} ms")
    print(f"{'prediction':37} {best_s(lambda: predict(schedule, profile)) * 1e3:9.1f} ms")


if __name__ == "__main__":
    main()

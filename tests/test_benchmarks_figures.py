"""The figures that the GPU's benchmark tells, against sums done by hand: a rehearsal's own mean nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_written import WRITERS, small
from torch import Tensor, nn

from schedules import policies, presets
from schedules.errors import Refused
from schedules.flops import model_flops_per_step
from schedules.op import Buffer, Kind, Op, Phase, Stream, Tier
from schedules.optimizer import step_flops
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Trace
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.signature import timed

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=8, precision="fp32")

Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """A module of the benchmark by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


class Clock:
    """Of the host and of a GPU that does one thing after another: whatever lasts moves it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *timed: ModuleType) -> None:
        self.s, self.seen = 0.0, -1.0
        for one in timed:
            monkeypatch.setattr(one, "time", SimpleNamespace(perf_counter=self.host_s))
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: Moment(self, **options))
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def synchronize(self) -> None:
        self.seen = self.s

    def host_s(self) -> float:
        assert self.seen == self.s, "the GPU may not be as far as the host"
        return self.s

    def lasts(self, seconds: float) -> None:
        self.s += seconds


class Moment:
    def __init__(self, clock: Clock, *, enable_timing: bool = False) -> None:
        assert enable_timing, "CUDA tells no time of other events"
        self.clock = clock

    def record(self) -> None:
        self.s = self.clock.s

    def elapsed_time(self, other: Moment) -> float:
        assert other.s <= self.clock.seen, "nobody has seen that it was reached"
        return (other.s - self.s) * 1e3


# ---- the machine


def test_a_rate_is_of_windows_in_the_middle(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = module("gpu_machine")
    clock, calls = Clock(monkeypatch, machine), itertools.count()
    first, window = 6, 25  # calls that find how many fill a window of 50 ms, and those
    quick = range(first + machine.WARM_UP * window, first + (machine.WARM_UP + machine.WINDOWS) * window)

    def work() -> None:
        number = next(calls)
        clock.lasts(0.002 if number < first or number in quick else 0.02)

    (found,) = machine.rates([(None, work, 3.0)], 0.05)
    assert found == pytest.approx({"median": 1500.0, "least": 1500.0, "most": 1500.0})
    assert next(calls) == quick.stop + machine.LAST * window


def test_rates_of_two_at_once_are_each_ones_own(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = module("gpu_machine")
    clock, order = Clock(monkeypatch, machine), []

    def work(name: str, seconds: float) -> Callable[[], None]:
        return lambda: (order.append(name), clock.lasts(seconds))

    both = machine.rates([(None, work("a", 0.002), 3.0), (None, work("b", 0.004), 8.0)], 0.048)
    assert [one["median"] for one in both] == pytest.approx([24 * 3.0 / 0.096, 12 * 8.0 / 0.096])
    in_turn = [len(list(of_one)) for _, of_one in itertools.groupby(order)]
    assert max(in_turn) <= machine.TOGETHER


def test_copies_go_where_their_names_say(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = module("gpu_machine")
    Clock(monkeypatch, machine)
    slabs: dict[str, list[Tensor]] = {"host": [], "device": []}

    def slab(where: str) -> Callable[[int], Tensor]:
        def made(nbytes: int) -> Tensor:
            slabs[where].append(torch.full((4,), len(slabs["host"]) * 10 + len(slabs["device"])))
            return slabs[where][-1]

        return made

    def rates(works: list[tuple[object, Callable[[], object], float]], window_s: float) -> list[dict[str, float]]:
        found = []
        for _, work, amount in works:
            before = {where: [int(one[0]) for one in of] for where, of in slabs.items()}
            work()
            moved = [where for where, of in slabs.items() if before[where] != [int(one[0]) for one in of]]
            median = {"device": 20.0, "host": 10.0}[moved[0]] if moved else (100.0 if len(works) == 1 else 80.0)
            found.append({"median": median, "amount": amount})
            for where, values in before.items():
                for one, value in zip(slabs[where], values, strict=True):
                    one.fill_(value)
        return found

    copy, waits = Tensor.copy_, list[bool]()

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        waits.append(not non_blocking)
        return copy(target, source)

    monkeypatch.setattr(Tensor, "copy_", copied)
    for where in slabs:
        monkeypatch.setattr(machine, f"{where}_slab", slab(where))
    monkeypatch.setattr(machine, "rates", rates)
    monkeypatch.setattr(machine, "SIZES", [1 << 20])
    (row,) = machine.links()
    assert (row["h2d_GB_s"]["median"], row["d2h_GB_s"]["median"]) == (20.0, 10.0)
    assert [one["median"] for one in row["both_GB_s"]] == [20.0, 10.0]
    assert {one["amount"] for one in (row["h2d_GB_s"], row["d2h_GB_s"], *row["both_GB_s"])} == {(1 << 20) / 1e9}
    assert row["us_h2d"] == pytest.approx((1 << 20) / 20e9 * 1e6) and row["us_d2h"] == pytest.approx(104.8576)
    slabs["host"].clear()
    slabs["device"].clear()
    monkeypatch.setattr(machine, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(machine, "PRODUCTS", {"a": (4, 5, 6)})
    monkeypatch.setattr(machine, "SHAPES", ())
    product, in_fp8, copied = machine.gemm()
    assert product["TFLOP_s"] == {"median": 100.0, "amount": 2 * 4 * 5 * 6 / 1e12}
    assert product["slowdown"] == pytest.approx(0.25) and product["beside_copies_TFLOP_s"]["median"] == 80.0
    assert in_fp8["fp8_TFLOP_s"]["amount"] == product["TFLOP_s"]["amount"]
    assert waits[-1] and not any(waits[:-1])  # the last one crosses no link
    assert copied["GB_s"]["amount"] == 2 * machine.BESIDE / 1e9


def test_attention_counts_two_products_forward_and_four_backward(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, amounts = module("gpu_machine"), list[float]()
    Clock(monkeypatch, machine)

    def rates(works: list[tuple[object, Callable[[], object], float]], window_s: float) -> list[dict[str, float]]:
        ((_, work, amount),) = works
        work()
        work()  # as often as they like
        amounts.append(amount * 1e12)
        return [{"median": [100.0, 50.0][len(amounts) % 2 - 1]}]

    monkeypatch.setattr(machine, "rates", rates)
    monkeypatch.setattr(machine, "DEVICE", torch.device("cpu"))
    for name, value in (("SHAPES", ("tiny",)), ("TOKENS", (8, 64)), ("SEQUENCES", (16,))):
        monkeypatch.setattr(machine, name, value)
    model = presets.load("tiny")
    rows = machine.attention()
    pairs = 4 * 16 * 17 // 2  # of a query and a key, in four sequences
    flops = 2 * 2 * pairs * model.num_attention_heads * model.head_dim
    assert amounts == pytest.approx([flops, 2 * flops] * len(rows))
    assert all(row["both_TFLOP_s"] == pytest.approx(3 / (1 / 100 + 2 / 50)) for row in rows)
    assert sum(row["taken"] for row in rows) == 1
    assert rows[0]["case"].startswith(f"heads of {model.head_dim}, 4 sequences of 16, ")


@pytest.mark.parametrize(
    ("told", "known"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA GeForce RTX 4090", "rtx4090")],
)
def test_a_gpus_datasheet_is_found_by_cudas_name_for_it(module: Module, told: str, known: str) -> None:
    machine = module("gpu_machine")
    assert machine.datasheet(told) == known
    assert set(machine.SHEETS.values()) == set(hardware.names())


@pytest.mark.parametrize(
    ("told", "alike"),
    [("NVIDIA H100 NVL", "h100"), ("NVIDIA GB200", "b200"), ("NVIDIA A100-SXM4-40GB", "a100-sxm")],
)
def test_where_a_datasheet_of_another_gpu_stands_in_it_is_told(module: Module, told: str, alike: str) -> None:
    machine, table = module("gpu_machine"), module("gpu_table")
    assert machine.datasheet(told) == alike and not machine.has_datasheet(told)
    sentence = f" There is none of {told}: that of `{alike}` stands in for it."
    assert table._stands_in({"runs": [{"gpu": told}]}) == sentence
    assert table._stands_in({"runs": [{"gpu": "NVIDIA H200"}]}) == table._stands_in({"runs": []}) == ""
    with pytest.raises(Refused, match="no datasheet of NVIDIA T4 among those of NVIDIA A100 80GB PCIe, "):
        machine.datasheet("NVIDIA T4")


# ---- checks


@pytest.mark.parametrize(
    ("check", "missing"), [("smoke", "pytest"), ("smoke", "hypothesis"), ("run", "typer"), ("run", "rich")]
)
def test_a_check_that_lacks_a_package_is_left_out(
    module: Module, monkeypatch: pytest.MonkeyPatch, check: str, missing: str
) -> None:
    checks = module("gpu_checks")
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None if name == missing else name)
    one = checks.smoke() if check == "smoke" else next(one for one in checks.checks() if "run" in one.arguments)
    with pytest.raises(Refused, match=f"left out: not installed: {missing}"):
        checks.checked(one)


@pytest.mark.parametrize(
    ("status", "told"),
    [(2, "could not be collected"), (3, "inside pytest"), (4, "could not begin"), (5, "no tests"), (1, None)],
)
def test_tests_that_tested_nothing_have_not_failed(
    module: Module, monkeypatch: pytest.MonkeyPatch, status: int, told: str | None
) -> None:
    checks = module("gpu_checks")
    ended = subprocess.CompletedProcess([], status, "some\n", "no module named so")
    monkeypatch.setattr(checks.subprocess, "run", lambda command, **options: ended)
    if told is None:
        row = checks.checked(checks.smoke())
        assert row["passed"] is False and row["said"] == ["some", "no module named so"]
        return
    with pytest.raises(Refused, match=f"left out: .*{told}.*\nsome\nno module named so"):
        checks.checked(checks.smoke())


# ---- the profile


def test_the_machines_profile_has_what_was_measured(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, base = module("gpu_profile"), hardware.load("h100")
    monkeypatch.setattr(module("gpu_machine"), "datasheet", lambda gpu: "h100")
    assert profile.machine_of({}) == base

    def link(up: float, down: float, *both: float) -> dict[str, Any]:
        rates = {"h2d_GB_s": {"median": up}, "d2h_GB_s": {"median": down}}
        return {**rates, "both_GB_s": [{"median": one} for one in both]}

    found = profile.machine_of(
        {
            "links": [link(5.0, 4.0, 3.0, 2.0), link(50.0, 40.0, 45.0, 30.0)],  # the largest copies come last
            "dram": [{"GB_s": 200.0}, {"beside": "h2d", "GB_s": 190.0}, {"beside": "d2h", "GB_s": 220.0}],
            "gemm": [{"slowdown": 0.3}, {"slowdown": -0.2}, {"slowdown": 0.1}, {"GB_s": {"median": 1.0}}],
        }
    )
    links, host = found.links, found.host
    told = [links.h2d.bandwidth, links.d2h.bandwidth, links.duplex, host.memory_bandwidth, found.gpu.copy_slowdown]
    assert [(one.value, one.unit) for one in told] == [
        (50e9, "B/s"), (40e9, "B/s"), (75e9, "B/s"), (205e9, "B/s"), (0.1, "fraction"),
    ]  # fmt: skip
    assert links.h2d.latency == base.links.h2d.latency and found.gpu.memory == base.gpu.memory
    copied = profile.machine_of({"dram": [{"GB_s": 210.0}, {"beside": "h2d", "GB_s": 190.0}]})
    assert copied.host.memory_bandwidth.value == 210e9


def test_a_step_is_predicted_from_what_its_own_run_had_for_a_machine(module: Module) -> None:
    of_run = module("gpu_profile").of_run
    failed = {"run": 7, "error": "failed"}
    rows = {"links": {"a": {"run": 7, "n": 3}}, "dram": {"a": {"run": 7, "n": 4}, "b": {"run": 7, "n": 5}, "c": failed}}
    earlier = {"links": {"2": {"a": {"run": 2, "n": 1}}, "4": {"a": {"run": 4, "n": 2}}}}
    body = {"rows": rows, "earlier": earlier}
    found = {run: [row["n"] for row in of_run(body, run)["links"]] for run in (0, 2, 3, 4, 6, 7, 9)}
    assert found == {0: [1], 2: [1], 3: [1], 4: [2], 6: [2], 7: [3], 9: [3]}
    assert [row["n"] for row in of_run(body, 1)["dram"]] == [4, 5] and of_run(body, 1)["gemm"] == []


def test_a_schedules_profile_has_what_its_ops_take_alone(module: Module) -> None:
    profile, schedule = module("gpu_profile"), WRITERS["two_slots"](small(), WORKLOAD)
    base = hardware.load("h100")
    durations_ns = [1000 + place * place for place in range(len(schedule.ops))]
    keys, of_key = timed(schedule), dict[str, list[int]]()
    for place, key in keys.items():
        of_key.setdefault(key, []).append(durations_ns[place])
    known_ns = profile.op_times(schedule, durations_ns)
    assert known_ns == {key: round(statistics.median(times)) for key, times in of_key.items()}
    found = profile.profile_of(schedule, base, {**known_ns, "of another schedule": 1.0}, {"compute": 7.0, "copy": 3.0})
    updates = [place for place, op in enumerate(schedule.ops) if op.phase == Phase.ADAM]
    rates = [schedule.ops[place].params / (known_ns[keys[place]] / 1e9) for place in updates]
    assert found.host.adam_params_per_s.value == pytest.approx(statistics.median(rates))
    assert (found.issue.compute.value, found.issue.copy.value, found.mode) == (7.0, 3.0, "measured")
    assert found.measured is not None and found.measured.op_times.values == known_ns
    assert found.host.memory_bandwidth == base.host.memory_bandwidth  # what small ops move may be in caches
    large = dataclasses.replace(schedule, ops=tuple(dataclasses.replace(op, nbytes=10**10) for op in schedule.ops))
    fast = profile.profile_of(large, base, dict.fromkeys(known_ns, 5e6), {})
    assert fast.host.memory_bandwidth.value == pytest.approx(2e12)


# ---- steps


def test_handing_over_is_told_of_steps_after_the_warm_up(module: Module) -> None:
    steps = module("gpu_steps")
    ops = [
        Op(name="F", kind=Kind.COMPUTE, phase=Phase.FORWARD, stream=Stream.COMPUTE),
        Op(name="P", kind=Kind.PREFETCH, phase=Phase.COPY, stream=Stream.H2D),
    ]
    took = {"F": [900] * steps.WARM_UP + [5, 1, 3, 2, 4], "P": [900] * steps.WARM_UP + [50, 10, 30, 20, 40]}
    events = [
        (op, SimpleNamespace(host_ns=took[op.name][step])) for step in range(steps.WARM_UP + steps.STEPS) for op in ops
    ]
    backend = SimpleNamespace(events=events)
    assert steps._handing_over(backend, steps.WARM_UP + steps.STEPS) == {"compute": 3, "copy": 30}
    assert backend.events is None  # what comes now is not of the step


def test_what_ops_take_in_a_step_is_of_those_that_are_timed_alone_and_of_steps_that_count(module: Module) -> None:
    steps, schedule = module("gpu_steps"), WRITERS["two_slots"](small(), WORKLOAD)
    count, total, keys = len(schedule.ops), steps.WARM_UP + steps.STEPS, timed(schedule)
    op, step = np.tile(np.arange(count), total), np.repeat(np.arange(total), count)
    took = np.where(step < steps.WARM_UP, 900, 10 * op + step % 2)
    columns = {"op": op, "step": step, "issue_ns": op, "start_ns": op, "end_ns": op + took, "waited_on": op}
    trace = Trace(digest=schedule.digest, machine="a GPU", source="measured", **columns)
    found = steps.in_step_ns(schedule, trace)
    of_key = dict[str, list[int]]()
    for place, key in keys.items():
        of_key.setdefault(key, []).extend(10 * place + n % 2 for n in range(steps.WARM_UP, total))
    assert found == {key: statistics.median(times) for key, times in of_key.items()} and len(keys) < count


def test_a_row_is_of_the_periods_after_the_warm_up(module: Module) -> None:
    steps, case = module("gpu_steps"), module("gpu_case").Case(
        model="tiny", policy="streamed", seq_len=8, micro_batch_size=2, accumulation=2, precision="fp32"
    )  # fmt: skip
    schedule = WRITERS["two_slots"](small(), WORKLOAD)
    count, total = len(schedule.ops), steps.WARM_UP + steps.STEPS
    ends_ms = np.cumsum([500, 400, 10, 30, 20, 50, 40])  # of steps: the first two are the warm-up
    step = np.repeat(np.arange(total), count)
    end_ns = ends_ms[step] * 10**6 - (count - 1 - np.tile(np.arange(count), total))
    trace = Trace(
        digest=schedule.digest, machine="", source="measured", op=np.tile(np.arange(count), total), step=step,
        issue_ns=end_ns - 1, start_ns=end_ns - 1, end_ns=end_ns, waited_on=np.full(len(step), ISSUE),
    )  # fmt: skip
    row = steps._row(case, schedule, trace, [1.0] * total)
    assert row["step_s"] == pytest.approx({"median": 0.03, "least": 0.01, "most": 0.05})
    assert row["tokens_per_s"] == pytest.approx(2 * 2 * 8 / 0.03)
    flops = sum(op.flops for op in schedule.ops if op.kind == Kind.COMPUTE)
    assert row["executed_TFLOP_s"] == pytest.approx(flops / 0.03 / 1e12)
    on_compute = sum(op.stream == Stream.COMPUTE for op in schedule.ops)
    assert row["busy"]["compute"] == pytest.approx(steps.STEPS * on_compute * 1e-9 / 0.15, rel=0.2)


def test_short_steps_go_on_until_clocks_have_settled_and_the_later_half_counts(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = module("gpu_steps")
    assert [steps.first_counted(n) for n in (7, 12, 14, 62)] == [2, 7, 8, 32]
    now = 0.0
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(steps, "retries", lambda: 5)
    for lasts_s, due in ((0.1, 32), (1.0, 7), (9.0, 7)):
        pace, now, done = steps.Pace(), 0.0, 0
        begun = pace.neighbours
        while not pace.enough():
            now += lasts_s
            pace.on_step(done, 1.0, None)
            done += 1
        assert (done, pace.retried) == (due, 5) and pace.neighbours is not begun


def test_high_water_is_this_processs_in_bytes(module: Module) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 0.8 * pages < module("gpu_steps")._high_water() < 64 * pages


def test_buffers_of_an_arena_lie_side_by_side_on_whole_pages(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = module("gpu_arena")
    monkeypatch.setattr(arena.CudaBackend, "__init__", lambda backend: None)
    monkeypatch.setattr(arena.CudaBackend, "allocate", lambda backend, buffer: torch.zeros(buffer.nbytes))
    buffers = [Buffer(name=str(n), tier=Tier.HOST, nbytes=n) for n in (1, arena.PAGE, arena.PAGE + 1)]
    on_device = Buffer(name="d", tier=Tier.DEVICE, nbytes=7)
    try:
        backend = arena.ArenaBackend(SimpleNamespace(buffers=[on_device, *buffers]))
        assert len(backend.allocate(on_device)) == 7
        whole = arena.ArenaBackend.arena
        places = [(backend.allocate(buffer).data_ptr() - whole.data_ptr()) // whole.itemsize for buffer in buffers]
        assert (
            places == [0, arena.PAGE, 2 * arena.PAGE]
            and len(whole) == 4 * arena.PAGE
            and backend.unused == (whole.nbytes - 4 * arena.PAGE)
        )
    finally:
        arena.ArenaBackend.release()


# ---- cases


def test_as_few_layers_as_the_host_needs_are_resident(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    case_of = module("gpu_case")
    monkeypatch.setattr(case_of, "HOST_RESERVE", 0)
    monkeypatch.setattr(case_of, "usable_bytes", lambda nbytes: nbytes)

    def built(host_bytes: int, resident: object, device_bytes: int = 10**9) -> Any:
        case = case_of.Case(
            model="tiny", policy="streamed", seq_len=16, micro_batch_size=1, knobs={"resident": resident}
        )
        return case_of.schedule_of(case, None, device_bytes=device_bytes, host_bytes=host_bytes)

    host = [built(10**9, count).allocated_bytes(Tier.HOST) for count in range(4)]
    assert host == sorted(host, reverse=True) and len(set(host)) == 4
    for count in range(3):
        assert built(host[count], "fit").digest == built(10**9, count).digest
        assert built(host[count] - 1, "fit").digest == built(10**9, count + 1).digest
    with pytest.raises(Refused, match=r"does not fit: .* of host memory"):
        built(host[0] - 1, 0)
    with pytest.raises(Refused, match=r"does not fit: .* of device memory"):
        built(10**9, "fit", 1000)


def test_a_plan_made_beforehand_is_taken_where_the_memory_is_what_it_was_made_for(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case_of, plans_of = module("gpu_case"), module("gpu_plans")
    memory = {"device_bytes": 2**37, "host_bytes": 2**36}
    tiny, budget = presets.load("tiny"), MemoryBudget(**memory)
    made, now = (policies.build(name, tiny, WORKLOAD, budget) for name in ("streamed", "resident"))
    monkeypatch.setattr(case_of, "_planned", lambda *_: now)
    rows = {part: {"a row": {"error": "failed"}} for part in ("links", "gemm", "dram")}
    there = {"llama-3.2-3b planned 4x4x4096 bf16 fused": {"case": "llama-3.2-3b planned 4x4x4096 bf16"}}
    body = {**memory, "runs": [{"gpu": "NVIDIA H200"}], "rows": {**rows, "steps": there}}
    (tmp_path / "gpu.json").write_text(json.dumps(body))
    monkeypatch.setattr(plans_of, "schedule_of", lambda case, machine, **memory: made)
    monkeypatch.setattr(sys, "argv", ["gpu_plans.py", str(tmp_path)])
    plans_of.main()
    case = case_of.Case(model="qwen2.5-7b", policy=case_of.PLANNED, seq_len=4096, micro_batch_size=4, accumulation=4)
    wanted = list(plans_of.wanted(body, []))
    assert case in wanted and not any("3b planned 4x4" in one.key for one in wanted)
    assert [one.key for one in plans_of.wanted(body, ["3b planned 4x4"])] == ["llama-3.2-3b planned 4x4x4096 bf16"]

    def taken(case: Any, device_bytes: int = 2**37, host_bytes: int = 2**36) -> Schedule:
        found: Schedule = case_of.schedule_of(
            case, None, device_bytes=device_bytes, host_bytes=host_bytes, plans=tmp_path / "plans"
        )
        return found

    assert taken(case) == made
    assert all(taken(one) == made for one in wanted)
    assert taken(case, device_bytes=2**37 - 1) == taken(case, host_bytes=2**35) == now
    assert taken(dataclasses.replace(case, precision="bf16_16bit", accumulation=2)) == now


# ---- checks


def test_a_check_passes_fails_or_takes_too_long(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = module("gpu_checks")
    done: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> Any:
        done.update(options, command=command)
        if "slow" in command:
            raise subprocess.TimeoutExpired(command, options["timeout"], output=b"so far")
        return SimpleNamespace(returncode=int("wrong" in command), stdout="out\n" * 200, stderr="the end\n")

    monkeypatch.setattr(subprocess, "run", run)
    for name, passed in (("right", True), ("wrong", False), ("slow", False)):
        check = checks.Check(name=name, arguments=(name,), takes_s=4.0, environment={"A_VARIABLE": "1"})
        row = checks.checked(check)
        assert row["passed"] is passed and row["case"] == f"{name}: -m {name}"
        assert done["command"] == [sys.executable, "-m", name] and done["timeout"] == 4.0 * checks.PATIENCE
        assert done["env"]["A_VARIABLE"] == "1" and done["env"]["PATH"] == os.environ["PATH"]
        assert row["said"] == (
            ["so far", "stopped after 10 s"] if name == "slow" else ["out"] * (checks.TOLD[passed] - 1) + ["the end"]
        )


# ---- steps that many ran


def test_steps_that_many_ran_stand_together_the_fastest_first(module: Module) -> None:
    policies = module("gpu_policies")

    def row(case: str, seconds: float, **more: float) -> dict[str, Any]:
        took = {"median": seconds, "least": seconds / 2, "most": seconds * 2}
        return {"case": case, "tokens_per_step": 2048, "step_s": took, **more}

    ours = {"predicted_step_s": 0.5, "prediction_error": -0.5}
    rows = [
        row("llama-3.2-3b planned 1x2x1024 bf16", 1.0, **ours),
        row("llama-3.2-3b zero3_offload master=weights 1x2x1024 bf16", 4.0, **ours),
        row("llama-3.2-3b megatrain_released 1x2x1024 bf16", 8.0, **ours),
        row("llama-3.2-3b planned 1x2x1024 bf16 in 12 GiB", 9.0, **ours),
        row("llama-3.2-3b streamed 1x8x1024 bf16", 9.0, **ours),
        {"case": "llama-3.2-3b resident 1x2x1024 bf16", "error": "does not fit"},
    ]
    rivals = [
        row("llama-3.2-3b deepspeed zero3 1x2x1024 bf16", 2.0),
        row("llama-3.2-3b plain torch compiled=blocks 1x2x1024 bf16_16bit", 1.6),
    ]
    body = {
        "rows": {
            part: {str(n): of for n, of in enumerate(all_)} for part, all_ in (("steps", rows), ("rivals", rivals))
        }
    }
    table = policies.measured(body)
    assert list(table["name"]) == [
        "planned",
        "PyTorch, compiled*",
        "DeepSpeed ZeRO-3",
        "zero3_offload",
        "the paper's code",
    ]
    assert list(table["tokens_per_s"]) == [2048, 1280, 1024, 512, 256]
    first = table.iloc[0]
    assert (first["least"], first["most"], first["predicted"], first["policy"]) == (1024, 4096, 4096, "planned")
    assert table["predicted"].isna().tolist() == [False, True, True, False, False]
    written = [text.get_text() for text in policies.drawn(table).texts]
    assert written == ["2,048 (-50.0 %)", "1,280", "1,024", "512 (-50.0 %)", "256 (-50.0 %)"]
    del body["rows"]["rivals"]["0"]
    assert policies.measured(body).empty and policies.measured({"rows": {}}).empty


# ---- the optimizer


def test_an_updates_bytes_are_those_of_its_precision(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, machine, by_hand = module("gpu_optimizer"), module("gpu_machine"), module("adam")
    monkeypatch.setattr(optimizer, "PARAMS", 1000)
    monkeypatch.setattr(optimizer, "_Copying", contextlib.nullcontext)
    monkeypatch.setattr(by_hand, "seconds", lambda work: (work(), (2e-6, 1e-6, 4e-6))[1])  # median, least, most
    monkeypatch.setattr(by_hand, "copy_rate", lambda nbytes, place: 20e9)
    monkeypatch.setattr(machine, "as_trained", lambda slab: slab)
    before = torch.get_num_threads()
    try:
        rows = {(row["precision"], row["threads"]): row for row in optimizer._on_cpu([1, 2])}
    finally:
        torch.set_num_threads(before)
    row = rows["bf16", 1]
    assert row["Gparam_s"] == pytest.approx({"median": 0.5, "least": 0.25}) and ("fp32", 1) not in rows
    assert row["GB_s"] == pytest.approx(0.5 * 22) and row["of_copy"] == pytest.approx(11 / 20)  # 2 + 2 * 10 B
    assert rows["fp32", 2]["GB_s"] == pytest.approx(0.5 * 28)  # 4 + 2 * 12
    monkeypatch.setattr(machine, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", object)

    def rates(works: list[tuple[object, Callable[[], object], float]], window_s: float) -> list[dict[str, float]]:
        ((_, work, amount),) = works
        work()
        return [{"median": amount / 2e-6}]

    monkeypatch.setattr(machine, "rates", rates)
    found = {row["case"]: row["GB_s"] for row in optimizer._on_gpu()}
    assert found["on the GPU, bf16"] == pytest.approx(0.5 * 22)
    assert found["on the GPU, torch's fused, bfloat16"] == pytest.approx(0.5 * 14)  # of 2 B: 4 read, 3 written
    assert found["on the GPU, torch's fused, float32"] == pytest.approx(0.5 * 28)
    monkeypatch.setattr(optimizer, "MUON", ("tiny",))
    tiny = presets.load("tiny")
    (row,) = optimizer._muon_on_gpu()
    n = tiny.params(0)
    assert row["Gparam_s"]["median"] == pytest.approx(n / 2e-6 / 1e9)
    flops = step_flops(tiny, Workload(micro_batch_size=1, seq_len=1, optimizer="muon"), 0)
    assert row["TFLOP_s"] == pytest.approx(flops / 2e-6 / 1e12)


# ---- rivals


class Model(nn.Module):
    """As those of transformers: what a rival asks of one, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointing = True

    def forward(self, *, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        assert torch.equal(input_ids, labels) and input_ids.shape == (2, 16)
        return SimpleNamespace(loss=(self.weight * torch.tensor([1.0, 2.0, 3.0])).sum())


class Engine:
    def __init__(self, model: Model, config: dict[str, Any], clock: Clock) -> None:
        self.model, self.config, self.clock = model, config, clock
        self.done: list[str] = []
        self.batch: list[int] = []

    def lasted(self, what: str, seconds: float) -> None:
        self.done.append(what)
        self.clock.lasts(seconds)

    def __call__(self, *, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        self.lasted("forward", 0.1)
        return self.model(input_ids=input_ids, labels=labels)

    def backward(self, loss: Tensor) -> None:
        self.lasted("backward", 0.2)

    def step(self) -> None:
        self.lasted("step", 0.05)

    def set_train_micro_batch_size(self, size: int) -> None:
        self.batch.append(size)

    def set_train_batch_size(self, size: int) -> None:
        self.batch.append(size)


@pytest.fixture
def rivals(module: Module, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    rivals, machine = module("gpu_rivals"), module("gpu_machine")
    monkeypatch.setattr(machine, "clear", lambda: None)
    monkeypatch.setattr(machine, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(rivals, "builder", lambda spec: Model)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    for name in ("_begun", "_kept"):
        monkeypatch.setattr(rivals.Zero3, name, None)
    monkeypatch.setattr(rivals, "LASTS_S", 0.0)
    return rivals


def test_a_rivals_steps_count_after_the_warm_up(
    rivals: ModuleType, module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lasting = Clock(monkeypatch, rivals), iter([900.0] * rivals.WARM + [1.0, 3.0, 2.0, 5.0, 4.0])
    short = [0.25] * rivals.WARM + [9.0] * 4 + [0.2, 0.3, 0.1, 0.5, 0.4]  # the later half of more than 2 s
    case = module("gpu_case").Case(model="tiny", policy="plain torch", seq_len=16, micro_batch_size=2)
    row = rivals.steps(case, lambda: clock.lasts(next(lasting)))
    assert row["step_s"] == {"median": 3.0, "least": 1.0, "most": 5.0} and not [*lasting]
    settling = iter(short)
    monkeypatch.setattr(rivals, "LASTS_S", 2.25)
    again = rivals.steps(case, lambda: clock.lasts(next(settling)))
    assert again["step_s"] == pytest.approx({"median": 0.3, "least": 0.1, "most": 0.5}) and not [*settling]
    flops = model_flops_per_step(presets.load("tiny"), case.workload)
    assert row["tokens_per_s"] == 32 / 3 and row["model_TFLOP_s"] == flops / 3e12


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "qwen2.5-7b"])
def test_a_rival_trains_the_same_model(module: Module, name: str) -> None:
    pytest.importorskip("transformers")
    spec, build = presets.load(name), module("gpu_rivals").builder(presets.load(name))
    with torch.device("meta"):
        model = build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(spec.total_params, rel=1e-4)  # a bias more
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    told = model.config
    assert (told.num_attention_heads, told.rms_norm_eps) == (spec.num_attention_heads, spec.rms_norm_eps)
    assert told.max_position_embeddings >= 4096 and not told.use_cache and told._attn_implementation == "sdpa"


def test_zero3_is_measured_undisturbed_and_then_by_phases(
    rivals: ModuleType, module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, engines, accelerator = Clock(monkeypatch, rivals), [], SimpleNamespace()
    deepspeed, accelerators = ModuleType("deepspeed"), ModuleType("deepspeed.accelerator")

    def initialize(*, model: Model, model_parameters: object, config: dict[str, Any]) -> tuple[Engine, ...]:
        assert [*model_parameters] == [*model.parameters()] and model.checkpointing
        engines.append(Engine(model, config, clock))
        return engines[-1], None, None

    deepspeed.__version__, deepspeed.initialize = "0.0", initialize
    deepspeed.zero = SimpleNamespace(Init=lambda *, config_dict_or_path: contextlib.nullcontext())
    accelerators.get_accelerator = lambda: accelerator
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerators)
    monkeypatch.setattr(module("adam"), "load_deepspeed_kernel", lambda: None)
    monkeypatch.setattr(rivals.gpu_machine, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(rivals, "tokens", lambda case, vocab: torch.zeros(2, 16))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    case = module("gpu_case").Case(
        model="tiny", policy="deepspeed zero3", seq_len=16, micro_batch_size=2, accumulation=3
    )
    needed = 16 * presets.load("tiny").total_params  # B: weight, sum, gradient and master of 2, two moments of 4
    with pytest.raises(rivals.LeftOut, match="does not fit"):
        rivals.zero3(case, needed - 1)
    row = rivals.zero3(case, needed)
    (engine,) = engines
    counted, phased = rivals.WARM + rivals.STEPS, rivals.PHASED_STEPS
    assert engine.done == ["forward", "backward", "step"] * 3 * (counted + phased) and engine.batch == [2, 6]
    assert row["step_s"] == pytest.approx({"median": 1.05, "least": 1.05, "most": 1.05})
    assert row["tokens_per_s"] == pytest.approx(2 * 3 * 16 / 1.05) and row["gpu_peak_GB"] == 3.0
    assert row["phases_s"] == pytest.approx({"forward": 0.3, "backward": 0.6, "step": 0.15})
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("0", "0", "1")
    assert accelerator.pin_memory is rivals.exactly_pinned
    told = engine.config["zero_optimization"]
    assert row["settings"] == engine.config and told["stage"] == 3
    assert told["offload_param"] == told["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert engine.config["bf16"]["bf16_master_weights_and_grads"] and engine.config["gradient_accumulation_steps"] == 3
    assert rivals.zero3(case, needed)["step_s"] and len(engines) == 1  # the next batch has the same engine


@pytest.mark.parametrize(
    ("compiled", "calls"),
    [(None, []), ("blocks", ["block", "block"]), ("graphs", ["model, mode=reduce-overhead"])],
)
def test_plain_torch_is_compiled_block_by_block_or_as_a_whole(
    rivals: ModuleType, module: Module, monkeypatch: pytest.MonkeyPatch, compiled: str | None, calls: list[str]
) -> None:
    asked: list[str] = []

    class Compiled(Model):
        def __init__(self) -> None:
            super().__init__()
            blocks = [SimpleNamespace(compile=lambda: asked.append("block")) for _ in range(2)]
            self.__dict__["model"] = SimpleNamespace(layers=blocks)

        def compile(self, **options: object) -> None:
            asked.append(f"model, mode={options['mode']}")

    monkeypatch.setattr(rivals, "builder", lambda spec: Compiled)
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: torch.optim.SGD(parameters, lr=0.0))
    monkeypatch.setattr(rivals, "steps", lambda case, step: {"case": case.key})
    case = module("gpu_case").Case(
        model="tiny", policy="plain torch", seq_len=16, micro_batch_size=2,
        knobs={} if compiled is None else {"compiled": compiled},
    )  # fmt: skip
    rivals.plain(case)
    assert asked == calls


@pytest.mark.parametrize("checkpointing", [True, False])
def test_plain_torch_steps_by_the_mean_of_its_micro_batches(
    rivals: ModuleType, module: Module, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    grads, models = [], []

    class AdamW:
        def __init__(self, parameters: Any, **options: object) -> None:
            assert options["fused"]
            (self.weight,) = parameters

        def step(self) -> None:
            grads.append(self.weight.grad.tolist())

        def zero_grad(self) -> None:
            self.weight.grad = None

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    monkeypatch.setattr(rivals, "builder", lambda spec: lambda: models.append(Model()) or models[-1])
    Clock(monkeypatch, rivals)
    monkeypatch.setattr(rivals, "statistics", SimpleNamespace(median=lambda times: 1.0))
    case = module("gpu_case").Case(
        model="tiny", policy="plain torch", seq_len=16, micro_batch_size=2, accumulation=4,
        knobs={"checkpointing": True} if checkpointing else {},
    )  # fmt: skip
    rivals.plain(case)
    assert grads == [[1.0, 2.0, 3.0]] * (rivals.WARM + rivals.STEPS)
    assert [(model.checkpointing, model.training) for model in models] == [(checkpointing, True)]

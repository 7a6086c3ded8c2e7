"""The profiler's figures against sums by hand: readings of known loads, a profile of known readings."""

from __future__ import annotations

import mmap
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_written import WRITERS, small
from quick_readings import hurry

from megatrain import profile, profile_numbers, rates, readings
from megatrain.backend import Task
from megatrain.cpu import CpuBackend
from megatrain.nvme import Drive
from megatrain.profile_numbers import IN_CACHES, most_moved, profile_of
from megatrain.rates import Load, Rate
from megatrain.this_machine import Here
from megatrain.way import PLAINLY
from schedules.op import Buffer, Kind, Op, Phase, Stream, Tier, Wait
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Trace
from schedules.workload import PRECISIONS, Workload
from sim.machine import HardwareProfile
from sim.prediction import memory_of
from sim.signature import timed

MODEL = small()
WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=8, precision="fp32")


# ---- rates


class Played:
    """A backend whose streams have clocks that only what they do moves on."""

    def __init__(self) -> None:
        self.clocks: dict[Stream, int] = {}
        self.calls: list[Stream] = []

    def load(self, stream: Stream, ns: int, amount: float) -> Load:
        def work() -> None:
            self.calls.append(stream)
            self.clocks[stream] += ns

        return Load(stream=stream, work=work, amount=amount)

    def submit(self, task: Task, waits: Sequence[Any]) -> Any:
        begin = self.clocks.setdefault(task.op.stream, 0)
        task.work(task.step)
        end = self.clocks[task.op.stream]
        return SimpleNamespace(span=lambda: (begin, end))

    def host_wait(self, event: object) -> None: ...


def test_a_rate_is_amount_per_second_for_half_a_second() -> None:
    backend = Played()
    found = rates.rates(backend, [backend.load(Stream.H2D, 2_000, 7.0)])
    assert found == [pytest.approx(Rate(3.5e6, 3.5e6, 3.5e6))]
    assert rates.SECONDS <= len(backend.calls) * 2e-6 <= 1.1 * rates.SECONDS


def test_streams_of_different_pace_are_read_at_once_each_at_its_own() -> None:
    backend = Played()
    loads = [backend.load(Stream.H2D, 2_000_000, 7.0), backend.load(Stream.CPU, 30_000_000, 1.0)]
    assert [rate.median for rate in rates.rates(backend, loads)] == pytest.approx([3500.0, 1000 / 30])


def test_beside_another_is_told_in_shares_of_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Load(stream=stream, work=int) for stream in (Stream.H2D, Stream.CPU))
    alone, both = {first.stream: 10.0, second.stream: 20.0}, {first.stream: 4.0, second.stream: 15.0}

    def found(backend: object, loads: Sequence[Load]) -> list[Rate]:
        of = alone if len(loads) == 1 else both
        return [Rate(0.0, of[load.stream], 99.0) for load in loads]

    monkeypatch.setattr(rates, "rates", found)
    assert rates.together(None, first, second) == (0.4, 0.75)


# ---- readings


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend for arenas; every load is done once, and its rate is its amount and, as the most, how many ran."""
    hurry(monkeypatch)

    def amounts(backend: object, loads: Sequence[Load]) -> list[Rate]:
        assert len({load.stream for load in loads}) == len(loads)
        for load in loads:
            load.work()
        return [Rate(0.0, load.amount, float(len(loads))) for load in loads]

    monkeypatch.setattr(readings, "rates", amounts)
    backend, threads = CpuBackend(), torch.get_num_threads()
    yield backend
    backend.close()
    torch.set_num_threads(threads)


def test_copies_walk_from_their_source_to_their_target(backend: CpuBackend) -> None:
    arenas, nbytes = readings.Arenas(backend), readings.ARENA // 4
    for stream, tiers in ((Stream.H2D, (Tier.HOST, Tier.DEVICE)), (Stream.D2H, (Tier.DEVICE, Tier.HOST))):
        source, target = (arenas._memory[tier, stream] for tier in tiers)
        before, load = source.clone(), arenas.copy(stream, nbytes)
        for copied in range(1, 5):
            load.work()
            same = [torch.equal(a, b) for a, b in zip(source.split(nbytes), target.split(nbytes), strict=True)]
            assert sum(same) == copied  # each elsewhere than the last
        assert torch.equal(source, before) and load.amount == nbytes


def test_readings_count_what_was_moved_updated_and_multiplied(backend: CpuBackend) -> None:
    arenas, threads = readings.Arenas(backend), [1, 2]
    block = readings.block_load(MODEL, WORKLOAD, backend.device)
    links = readings.links(backend, arenas, block)
    small_, large = readings.SIZES
    assert links["h2d/4096/alone"] == (0, small_, 1) and links["d2h/65536/both"] == (0, large, 2)
    assert links["d2h/65536/computing"] == (0, large, 2) and len(links) == 2 * 2 * 2 + 2
    dram = readings.dram(backend, arenas, threads)
    assert [dram[f"{what}/2/alone"][1] for what in ("read", "write", "copy", "update", "fresh")] == [
        readings.ARENA, readings.ARENA, 2 * readings.ARENA, 2 * readings.ARENA, readings.FRESH,
    ]  # fmt: skip
    assert dram["copy/1/copies"] == (0, 2 * readings.ARENA, 3)
    for way in ("h2d", "d2h"):
        assert dram[f"update/1/{way}"] == (0, 2 * readings.ARENA, 2)
        twice = 2 * readings.SIZES[-1]  # without a GPU a copy reads and writes host memory
        assert dram[f"all/1/{way}"] == (0, 2 * readings.ARENA + twice, 6)
    adam = readings.optimizer(backend, arenas, threads)
    assert adam["bf16/1/alone"] == (0, readings.PARAMS, 1) and adam["bf16/2/copies"] == (0, readings.PARAMS, 3)
    assert {key.split("/")[0] for key in adam} == set(PRECISIONS) and "bf16_split/1/alone" not in adam
    products = readings.products(backend)
    assert products["bf16"][1] == products["fp32"][1] == 2 * readings.MATRIX**3
    assert products["copy"][1] == 2 * readings.ARENA


def test_a_drives_rate_is_bytes_per_second_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    seconds = iter([0.5, 0.25, 1.0] * 100)
    monkeypatch.setattr(readings, "_seconds", lambda work: (work(), next(seconds))[1])
    found = readings.drive(CpuBackend(), tmp_path)
    nbytes = readings.DRIVE_FILE
    assert set(found.values()) == {(nbytes, 2 * nbytes, 4 * nbytes)} and readings.as_used("read") in found
    assert {key.rpartition("/")[2] for key in found} == {str(depth) for depth in readings.DEPTHS}


def test_a_drive_is_measured_with_memory_as_training_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that begins with a page, as pinned memory does, nothing is copied on the way."""

    class Aligned(CpuBackend):
        def allocate(self, buffer: Buffer) -> torch.Tensor:
            return torch.frombuffer(mmap.mmap(-1, buffer.nbytes), dtype=torch.uint8)

    hurry(monkeypatch)
    monkeypatch.setattr(Drive, "bounce", lambda drive: pytest.fail("aligned memory is copied for nothing"))
    backend = Aligned()
    try:
        assert all(min(rates) > 0 for rates in readings.drive(backend, tmp_path).values())
        assert min(readings.drive_both(backend, tmp_path)) > 0
    finally:
        backend.close()


def test_threads_are_counted_in_powers_of_two_up_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, counts in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert readings.thread_counts() == counts


# ---- ops


def trace_of(ops: int, moments_ns: list[tuple[int, int, int]], steps: int) -> Trace:
    """Of steps a millisecond apart; (issue, start, end) of each op."""
    rows = np.array([[step * 10**6 + ns for ns in moments] for step in range(steps) for moments in moments_ns])
    issue_ns, start_ns, end_ns = rows.T
    count = len(rows)
    return Trace(
        digest="", machine="", source="measured", op=np.tile(np.arange(ops), steps),
        step=np.repeat(np.arange(steps), ops), issue_ns=issue_ns, start_ns=start_ns, end_ns=end_ns,
        waited_on=np.full(count, ISSUE),
    )  # fmt: skip


def test_streams_are_told_to_wake_only_where_they_stood_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def op(name: str, stream: Stream, *, blocking: bool = False) -> Op:
        return Op(name=name, kind=Kind.COMPUTE, phase=Phase.SYNC, stream=stream, blocking=blocking)

    ops = (
        op("P", Stream.H2D), op("F", Stream.COMPUTE), op("queued", Stream.COMPUTE, blocking=True),
        op("D", Stream.D2H), op("H", Stream.HOST), op("U", Stream.CPU), op("last", Stream.CPU),
    )  # fmt: skip
    waits = (Wait(op="F", on="P", distance=0), Wait(op="P", on="last", distance=1))
    schedule = Schedule(ops=ops, buffers=(), waits=waits, model=MODEL, workload=WORKLOAD, policy="bare")
    moments_ns = [
        (0, 5, 105),  # P: released by its issue, noticed after 5
        (10, 125, 225),  # F: released by P's end, noticed after 20; issued 10 after P
        (30, 226, 260),  # queued behind F
        (300, 307, 400),  # D: the host had waited: its issue costs nothing that is known; noticed after 7
        (310, 310, 320),  # H: on the host
        (330, 333, 340),  # U: after a host op; noticed after 3
        (334, 340, 350),  # queued; issued 4 after U
    ]
    found = trace_of(len(ops), moments_ns, 3)
    monkeypatch.setattr(profile, "_run", lambda *run: (found, {}))
    told = profile.in_a_run(schedule)
    assert told["woken"] == [5, 20, 7, 3] * 2  # of the steps after the warm-up
    assert sorted(told["issued"]) == ["compute", "update"]
    assert told["issued"] == {"compute": [10, 20] * 2, "update": [4] * 2} and told["handed"] == {}


def test_ops_alone_are_told_by_duration_and_by_the_gap_to_the_next_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = WRITERS["two_slots"](MODEL, WORKLOAD)
    count, steps = len(schedule.ops), profile.ALONE_STEPS + PLAINLY.warm_up
    moments_ns = [(100 * n, 100 * n + 10, 100 * n + 20 + n) for n in range(count)]
    found = trace_of(count, moments_ns, steps)
    found.end_ns[:count] += 5  # of the warm-up
    monkeypatch.setattr(profile, "_run", lambda *run: (found, {"a": 3}))
    told = profile.alone(schedule)
    assert told["durations_ns"] == [[10 + n for n in range(count)]] * profile.ALONE_STEPS
    assert told["gaps_ns"] == [[80 - n for n in range(count - 1)]] * profile.ALONE_STEPS
    assert told["workspace"] == {"a": 3}


# ---- the profile

SCHEDULE = WRITERS["two_slots"](MODEL, WORKLOAD)
SAMPLES = 40  # of which two are left out at either end


def duration_ns(place: int, op: Op) -> float:
    """A link of 10 GB/s down, 5 GB/s up, 3 us each; an optimizer of half a billion parameters a second."""
    if op.phase == Phase.COPY:
        return 3000 + op.nbytes * {Stream.H2D: 0.1, Stream.D2H: 0.2}[op.stream]
    return 2.0 * op.params if op.phase == Phase.ADAM else 1000.0 + place


SHARES = [
    {"optimizer": (0.8, 0.9), "copies": (0.9, 0.5)},
    {"optimizer": (0.8, 0.9), "copies": (0.7, 0.5)},
]


def whole() -> dict[str, dict[str, Any]]:
    def rate(median: float) -> Rate:
        return Rate(median / 2, median, median * 2)

    plain, piece = readings.SIZES[-1], readings.PIECES[0]
    return {
        "links": {
            **{f"{direction}/{plain}/both": rate(gb * 1e9) for direction, gb in (("h2d", 9.0), ("d2h", 4.0))},
            **{f"{direction}/{plain}/alone": rate(gb * 1e9) for direction, gb in (("h2d", 16.0), ("d2h", 8.0))},
        },
        "products": {"bf16": rate(4e12), "fp32": rate(1e12), "copy": rate(30e9)},
        "dram": {
            "copy/1/alone": rate(11e9), "copy/2/copies": rate(12e9), "read/2/alone": rate(99e9),
            "update/2/alone": rate(12.5e9), "all/1/h2d": rate(15e9), "all/1/d2h": rate(10e9),
            "all/2/h2d": rate(14e9), "all/2/d2h": rate(12e9),
        },
        "adam": {"bf16/1/alone": rate(1e8)},
        "nvme": {
            readings.as_used("read"): rate(3e9), readings.as_used("write"): rate(2e9),
            f"read/{piece}/1": rate(1e9), f"write/{piece}/1": rate(1e8),
        },
        "nvme_both": {"shares": (0.7, 0.6)},
    }  # fmt: skip


def test_memory_moves_at_least_what_a_large_update_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place it moves more than a copy, whose target is read first; what moves little may be in caches."""

    def update(nbytes: int) -> Op:
        return Op(name="u", kind=Kind.UPDATE, phase=Phase.ADAM, stream=Stream.CPU, params=1, nbytes=nbytes)

    small, large = update(IN_CACHES), update(10 * IN_CACHES)
    assert most_moved([(small, 1.0)]) == most_moved([]) == 0
    assert most_moved([(large, 5e9), (large, 4e9), (large, 0.0), (small, 1.0)]) == 2.5 * IN_CACHES
    usual = built(on_gpu=True).host.memory_bandwidth.value
    monkeypatch.setattr("megatrain.profile_numbers.IN_CACHES", 0)
    updates = [op.nbytes / duration_ns(place, op) * 1e9 for place, op in enumerate(SCHEDULE.ops) if op.phase == "adam"]
    assert built(on_gpu=True).host.memory_bandwidth.value == pytest.approx(max(updates)) and max(updates) > usual


def built(
    *,
    on_gpu: bool,
    integrated: bool = False,
    change: Callable[[dict[str, Any]], None] = lambda known: None,
    handed: dict[str, list[int]] | None = None,
) -> HardwareProfile:
    row = [duration_ns(place, op) for place, op in enumerate(SCHEDULE.ops)]
    late = [ns * 1000 for ns in row]  # twice the machine was stopped
    part = {
        "durations_ns": [row] * (SAMPLES - 2) + [late] * 2,
        "gaps_ns": [[5000.0] * (len(row) - 1)] * SAMPLES,
        "workspace": {"op": 7, "other": 5},
    }
    streams = [
        {"woken": [100, 300], "issued": {"compute": [10, 20, 30]}, "handed": handed or {}},
        {"woken": [200], "issued": {"copy": [40]}, "handed": {}},
    ]
    here = Here(
        device="a machine", on_gpu=on_gpu, device_bytes=1 << 36, host_bytes=1 << 37, free_bytes=1, drive_bytes=123,
        integrated=integrated,
    )  # fmt: skip
    known = whole()
    change(known)
    return profile_of([(SCHEDULE, part)], streams, [{"op": 6, "other": 9}], SHARES, known, here, PLAINLY)


def test_the_memory_of_a_gpu_that_has_none_of_its_own_is_the_hosts() -> None:
    found, usual = built(on_gpu=True, integrated=True), built(on_gpu=True)
    assert usual.unified_memory is None and not usual.one_memory
    assert found.unified_memory is not None and found.unified_memory.value == 1 << 36 and found.one_memory
    assert found.host.memory_bandwidth.value == pytest.approx(2 * 10e9)  # a copy reads and writes it
    assert memory_of(found).unified_bytes == memory_of(found).device_bytes == memory_of(found).host_bytes == 1 << 36


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_profile_has_the_lines_means_and_medians_of_what_was_read(on_gpu: bool) -> None:
    found = built(on_gpu=on_gpu)
    links, host, gpu, issue, nvme, told = found.links, found.host, found.gpu, found.issue, found.nvme, found.measured
    for link, rate in ((links.h2d, 10e9), (links.d2h, 5e9)):
        assert link.bandwidth.value == pytest.approx(rate) and link.latency.value == pytest.approx(3000, rel=1e-3)
    dram = 13e9 if on_gpu else 2 * 10e9  # where both memories are the host's, a copy reads and writes it
    assert host.memory_bandwidth.value == pytest.approx(dram)
    assert gpu.memory_bandwidth.value == pytest.approx(30e9 if on_gpu else dram)
    assert links.duplex.value == pytest.approx(13e9 if on_gpu else 15e9)
    assert gpu.copy_slowdown.value == pytest.approx(0.25 if on_gpu else 0.0)
    assert (gpu.matmul_flops.value, gpu.fp32_flops.value, gpu.memory.value) == (4e12, 1e12, 1 << 36)
    cores = len(os.sched_getaffinity(0)) if on_gpu else min(1.5, float(os.cpu_count() or 1))  # of 1.7 and 1.3
    assert host.cores.value == pytest.approx(cores) and host.memory.value == 1 << 37
    assert host.adam_params_per_s is not None and host.adam_params_per_s.value == pytest.approx(0.5e9)
    updates = [op for op in SCHEDULE.ops if op.phase == Phase.ADAM]
    traffic = statistics.median(op.nbytes / (2 * op.params) for op in updates) * 1e9
    assert host.adam_efficiency.value == pytest.approx(min(1.0, traffic / dram))
    assert [one.value for one in (issue.compute, issue.copy, issue.update, issue.sync)] == [20, 40, 25, 4975]
    launched = built(on_gpu=on_gpu, handed={"compute": [700, 100, 500]})  # the issuing thread waits for none of it
    costs = launched.issue
    assert [one.value for one in (costs.compute, costs.copy, costs.update, costs.sync)] == [500, 40, 25, 4975]
    assert launched.measured is not None and launched.measured.host is not None
    assert launched.measured.host.values["handing over/compute"][1] == 500
    assert issue.wake is not None and issue.wake.value == 200
    assert nvme is not None and (nvme.read.value, nvme.write.value, nvme.capacity.value) == (3e9, 2e9, 123)
    assert nvme.both.value == pytest.approx(1.3)
    piece = readings.PIECES[0]
    assert nvme.latency.value == pytest.approx((piece / 1e9 - piece / 3e9) * 1e9)
    assert told is not None and told.op_times is not None and told.op_noise is not None and told.workspace is not None
    of_key: dict[str, list[float]] = {}
    for place, key in timed(SCHEDULE).items():
        of_key.setdefault(key, []).append(duration_ns(place, SCHEDULE.ops[place]))
    for key, times in of_key.items():
        assert told.op_times.values[key] == pytest.approx(statistics.mean(times), rel=0.01, abs=1)
    alone = next(key for key, times in of_key.items() if len(times) == 1)
    assert told.op_noise.values[alone] == 0
    assert told.workspace.values == {"op": 7, "other": 9}
    model = SCHEDULE.model
    assert told.layers is not None
    assert told.layers.values == {f"{model.name}/{model.layer_kind(i)}": model.params(i) for i in model.layers}
    assert told.host is not None and told.host.values["woken"] == (110, 200, 290)
    assert told.links is not None and told.links.values[f"d2h/{readings.SIZES[-1]}/both"] == (
        2 * 10**9,
        4 * 10**9,
        8 * 10**9,
    )
    assert told.products is not None and set(told.products.values) == {"bf16", "fp32"}


def test_a_drive_is_no_faster_than_memory_and_its_directions_share_at_least_one() -> None:
    def fast(known: dict[str, Any]) -> None:
        known["nvme"][readings.as_used("read")] = Rate(1.0, 1e12, 1e12)
        known["nvme_both"] = {"shares": (0.3, 0.4)}

    found = built(on_gpu=True, change=fast)
    assert found.nvme is not None and (found.nvme.read.value, found.nvme.both.value) == (13e9, 1.0)


def test_a_direction_in_which_nothing_is_copied_has_the_rate_of_plain_copies() -> None:
    resident = WRITERS["on_device"](MODEL, WORKLOAD)
    count = len(resident.ops)
    part = {"durations_ns": [[1000.0] * count] * 4, "gaps_ns": [[50.0] * (count - 1)] * 4, "workspace": {}}
    here = Here(device="a", on_gpu=True, device_bytes=1, host_bytes=1, free_bytes=1)
    known = {name: of for name, of in whole().items() if not name.startswith("nvme")}
    found = profile_of([(resident, part)], [], [], SHARES, known, here, PLAINLY)
    told = (found.links.h2d.bandwidth.value, found.links.d2h.bandwidth.value, found.links.duplex.value)
    assert told == pytest.approx((16e9, 8e9, 16e9)) and found.links.h2d.latency.value == 0
    assert found.host.adam_params_per_s is None and found.host.adam_efficiency.value == 1.0 and found.nvme is None
    assert found.issue.wake is None and [found.issue.copy.value, found.issue.sync.value] == [25, 25]


def test_a_line_below_zero_is_none() -> None:
    def value(number: float, unit: str, note: str = "") -> SimpleNamespace:
        return SimpleNamespace(value=number)

    link = profile_numbers._link([(1000, 100.0), (2000, 300.0)], value)  # it would begin below zero
    assert link.latency.value == 0 and link.bandwidth.value == pytest.approx(3000 / 400 * 1e9)
    link = profile_numbers._link([(1000, 300.0), (2000, 100.0)], value)  # larger copies were faster
    assert link.latency.value == 0 and link.bandwidth.value == pytest.approx(3000 / 400 * 1e9)


def test_noise_is_half_of_what_two_thirds_of_samples_span() -> None:
    assert profile_numbers._noise([float(n) for n in range(101)]) == pytest.approx((84 - 16) / 2)
    assert profile_numbers._typical([1.0, *[10.0] * 37, 12.0, 1000.0]) == 10.0  # two are left out at either end


def test_precisions_that_differ_have_no_rate_in_common() -> None:
    op = next(op for op in SCHEDULE.ops if op.phase == Phase.ADAM)
    found = profile_numbers._adam_rate([("bf16", op, 1e3), ("bf16", op, 3e3)])
    assert found == pytest.approx((op.params / 1e-6 + op.params / 3e-6) / 2)
    assert profile_numbers._adam_rate([("bf16", op, 1e3), ("fp32", op, 3e3)]) is None

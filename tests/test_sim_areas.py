"""What each resource is busy with for a layer, by hand on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import MODEL, WORKLOAD, round_profile
from timed_profile import timed

from schedules import policies
from schedules.op import Kind, Phase, Tier
from schedules.phases import COMPUTE
from schedules.workload import MemoryBudget
from sim.areas import OPTIMIZER, LayerAreas
from sim.cost import D2H, DRAM, GPU, H2D, NVME_READ, NVME_WRITE, Terms, demands
from sim.machine import Measured, Table


@pytest.fixture(scope="module")
def areas() -> LayerAreas:
    return LayerAreas(MODEL, replace(WORKLOAD, accumulation=2), round_profile())


def test_a_layer_keeps_the_gpu_busy_for_as_long_as_its_ops_take(areas: LayerAreas) -> None:
    room = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
    schedule = policies.build("streamed", MODEL, areas.workload, room, keep=0)  # all blocks run again
    costs = demands(schedule, round_profile(), Terms(issue=False))
    takes = {
        (op.layer, op.phase): cost.duration_ns
        for op, cost in zip(schedule.ops, costs, strict=True)
        if op.kind == Kind.COMPUTE and op.layer is not None
    }
    assert {phase for _, phase in takes} == {*COMPUTE} and len(takes) == 3 * len(MODEL.blocks) + 3
    assert {at: areas.compute(*at).get(GPU) for at in takes} == takes
    assert areas.compute(MODEL.head, Phase.FORWARD) == {}


def test_activations_that_are_sent_away_keep_the_link_busy_both_ways(areas: LayerAreas) -> None:
    nbytes = areas.nbytes("s", 0)
    for way, link, rate in ((Kind.OFFLOAD, D2H, 40), (Kind.PREFETCH, H2D, 50)):  # GB/s
        assert nbytes / rate - 1 <= areas.copy("s", 0, way)[link] <= nbytes / rate


def test_an_op_takes_no_longer_than_the_quickest_of_its_kind() -> None:
    """A forward that keeps activations is timed apart from one that keeps none, and a schedule may have either."""
    known = timed(MODEL, [WORKLOAD])
    assert known.measured is not None and known.measured.op_times is not None
    times = dict(known.measured.op_times.values)
    keeps, keeps_none = (
        next(key for key in times if key.startswith(f"{MODEL.name}/block/{phase}/"))
        for phase in ("forward+keep", "forward")
    )

    def forward_ns(keeping: int, not_keeping: int) -> float:
        table = Table(values={**times, keeps: keeping, keeps_none: not_keeping}, unit="ns", source="made up")
        profile = replace(known, measured=Measured(op_times=table))
        return LayerAreas(MODEL, WORKLOAD, profile).compute(0, Phase.FORWARD)[GPU]

    assert (forward_ns(900, 300), forward_ns(300, 900)) == (300, 300)


@pytest.mark.parametrize("layer", [0, MODEL.head])
@pytest.mark.parametrize("cls", ["w", "o"])
def test_a_drive_is_busy_by_the_bytes_that_live_there(areas: LayerAreas, cls: str, layer: int) -> None:
    found, nbytes = areas.drive(cls, layer, 1), areas.nbytes(cls, layer)
    rounded = 1.001 * nbytes / areas.nbytes("o", 0)  # up, by less than a nanosecond, the copy it is told from
    assert nbytes / 4 - rounded <= found[NVME_READ] <= nbytes / 4  # 4 GB/s
    assert nbytes / 2 - rounded <= found[NVME_WRITE] <= nbytes / 2


@pytest.mark.parametrize("way", [Kind.PREFETCH, Kind.OFFLOAD])
@pytest.mark.parametrize("whole_ns", [3.2, 3.9, 4.0])
def test_a_state_is_not_taken_to_be_on_its_way_for_longer_than_it_is(way: Kind, whole_ns: float) -> None:
    """It is told from a copy of weights or gradients, which is rounded up to whole nanoseconds, and has more bytes."""
    nbytes, link = MODEL.params(0) * WORKLOAD.bytes.weight, "h2d" if way == Kind.PREFETCH else "d2h"
    quick = [f"links.{link}.bandwidth={nbytes / whole_ns}GB/s", f"links.{link}.latency=0us", "links.duplex=20TB/s"]
    quick.append("host.memory_bandwidth=100TB/s")
    found = LayerAreas(MODEL, WORKLOAD, round_profile(*quick))
    times = found.nbytes("o", 0) / found.nbytes("w", 0)
    assert times * (whole_ns - 1) <= found.copy("o", 0, way)[f"link.{link}"] <= times * whole_ns


def test_an_update_takes_no_longer_than_the_quicker_of_the_workers_and_the_issuing_thread() -> None:
    known = timed(MODEL, [WORKLOAD])
    assert known.measured is not None and known.measured.op_times is not None
    times = dict(known.measured.op_times.values)
    workers = f"{MODEL.name}/block/adam/host/{WORKLOAD.precision}"
    issuer = workers.replace("/host/", "/issuer/")
    assert {workers, issuer} <= times.keys()

    def optimizer_ns(of_workers: int, of_issuer: int) -> float:
        table = Table(values={**times, workers: of_workers, issuer: of_issuer}, unit="ns", source="made up")
        profile = replace(known, measured=Measured(op_times=table))
        return LayerAreas(MODEL, WORKLOAD, profile).update(0, Tier.HOST, 1)[OPTIMIZER]

    assert (optimizer_ns(900, 300), optimizer_ns(300, 900)) == (300, 300)


def test_an_update_on_the_cpu_and_the_landing_of_its_gradient_take_memory_traffic(areas: LayerAreas) -> None:
    update, landing = areas.update(0, Tier.HOST, 1), areas.copy("g", 0, Kind.OFFLOAD, 1)
    assert update[DRAM] > 0 and landing[DRAM] > 0


def test_a_gradient_that_comes_back_takes_as_long_as_weights_of_its_size(areas: LayerAreas) -> None:
    assert areas.nbytes("g", 0) == areas.nbytes("w", 0)
    assert areas.copy("g", 0, Kind.PREFETCH) == areas.copy("w", 0, Kind.PREFETCH)

"""What each resource is busy with for a layer, by hand on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import MODEL, WORKLOAD, round_profile
from timed_profile import timed

from schedules.op import Kind, Tier
from sim.areas import OPTIMIZER, LayerAreas
from sim.cost import DRAM, NVME_READ, NVME_WRITE
from sim.machine import Measured, Table


@pytest.fixture(scope="module")
def areas() -> LayerAreas:
    return LayerAreas(MODEL, replace(WORKLOAD, accumulation=2), round_profile())


@pytest.mark.parametrize("layer", [0, MODEL.head])
@pytest.mark.parametrize("cls", ["w", "o"])
def test_a_drive_is_busy_by_the_bytes_that_live_there(areas: LayerAreas, cls: str, layer: int) -> None:
    found, nbytes = areas.drive(cls, layer, 1), areas.nbytes(cls, layer)
    assert found[NVME_READ] == pytest.approx(nbytes / 4)  # 4 GB/s
    assert found[NVME_WRITE] == pytest.approx(nbytes / 2)


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


def test_an_update_on_the_cpu_takes_its_own_memory_traffic_and_the_gradients(areas: LayerAreas) -> None:
    update, landing = areas.update(0, Tier.HOST, 1), areas.copy("g", 0, Kind.OFFLOAD, 1)
    assert update[DRAM] > 0 and landing[DRAM] > 0
    assert areas.on_cpu(0, 1)[DRAM] == pytest.approx(update[DRAM] + landing[DRAM])

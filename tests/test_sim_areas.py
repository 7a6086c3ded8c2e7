"""What each resource is busy with for a layer, by hand on a machine of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import MODEL, WORKLOAD, round_profile

from schedules.op import Kind, Tier
from sim.areas import LayerAreas
from sim.cost import DRAM, NVME_READ, NVME_WRITE


@pytest.fixture(scope="module")
def areas() -> LayerAreas:
    return LayerAreas(MODEL, replace(WORKLOAD, accumulation=2), round_profile())


@pytest.mark.parametrize("layer", [0, MODEL.head])
@pytest.mark.parametrize("cls", ["w", "o"])
def test_a_drive_is_busy_by_the_bytes_that_live_there(areas: LayerAreas, cls: str, layer: int) -> None:
    found, nbytes = areas.drive(cls, layer, 1), areas.nbytes(cls, layer)
    assert found[NVME_READ] == pytest.approx(nbytes / 4)  # 4 GB/s
    assert found[NVME_WRITE] == pytest.approx(nbytes / 2)


def test_an_update_on_the_cpu_takes_its_own_memory_traffic_and_the_gradients(areas: LayerAreas) -> None:
    update, landing = areas.update(0, Tier.HOST, 1), areas.copy("g", 0, Kind.OFFLOAD, 1)
    assert update[DRAM] > 0 and landing[DRAM] > 0
    assert areas.on_cpu(0, 1)[DRAM] == pytest.approx(update[DRAM] + landing[DRAM])

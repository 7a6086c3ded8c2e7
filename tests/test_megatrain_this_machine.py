"""What a machine is, and how much of its memory schedules may use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatrain import this_machine
from megatrain.cpu import CpuBackend
from megatrain.profile import this_cpu
from megatrain.this_machine import machine_here, usable_bytes
from schedules.errors import InputError
from schedules.op import Stream

GIB = 1 << 30


class Gpu(CpuBackend):
    """A GPU as far as is asked of it before it runs anything."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def test_of_a_gpu_something_is_left_for_what_no_schedule_counts() -> None:
    assert usable_bytes(24 * GIB) == 22 * GIB and usable_bytes(100 * GIB) == 97 * GIB and usable_bytes(GIB) == 0


@pytest.mark.parametrize(("free", "own", "usable"), [(79, 2, 80), (60, 0, 60), (60, 5, 65)])
def test_a_gpu_is_found_with_the_memory_that_others_leave_and_the_optimizers_threads(
    free: int, own: int, usable: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * GIB)
    integrated = usable == 65
    properties = SimpleNamespace(total_memory=80 * GIB, is_integrated=int(integrated))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(this_machine, "available_memory", lambda: 100 * GIB)
    threads = torch.get_num_threads()
    try:
        found = machine_here(lambda: Gpu(machine="H100", threads={Stream.CPU: 3}), tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert (found.device, found.on_gpu, found.device_bytes) == ("H100", True, usable_bytes(usable * GIB))
    assert found.host_bytes == found.free_bytes == 100 * GIB and found.optimizer_threads == 3
    assert found.integrated == integrated and found.budget.unified_bytes == (100 * GIB if integrated else None)
    assert found.drive == tmp_path.resolve() and found.budget.nvme_bytes == found.drive_bytes > 0


def test_a_cpu_is_found_with_half_of_the_ram_for_each_tier() -> None:
    found = machine_here(this_cpu, None)
    assert not found.on_gpu and found.device_bytes == found.host_bytes > 0 and found.optimizer_threads == 1
    assert found.drive is None and found.budget.nvme_bytes == 0


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files, even from root")
def test_a_folder_for_the_drive_that_takes_no_files_is_told_before_anything_is_measured() -> None:
    with pytest.raises(InputError, match="cannot write /proc"):
        machine_here(CpuBackend, Path("/proc"))

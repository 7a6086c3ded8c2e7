"""Room for a training, asked for before it begins."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatrain import room
from megatrain.checkpoint import NotSaved
from schedules import policies, presets
from schedules.errors import Refused
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload


def test_memory_of_both_tiers_is_ram_on_a_cpu_and_each_ones_own_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(micro_batch_size=1, accumulation=1, seq_len=16, precision="fp32")
    budget = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)
    step = verify(policies.build("streamed", presets.load("tiny"), workload, budget))
    on_device, on_host = step.allocated_bytes()["device"], step.allocated_bytes()["host"]
    for device, gpu, ram, lacking in (
        ("cpu", 0, on_device + on_host, ""),
        ("cpu", 0, on_device + on_host - 1, "of memory are available on this machine"),
        ("cuda", on_device, on_host, ""),
        ("cuda", on_device - 1, on_host, r"\(device .*\), and .* of the GPU's memory are free"),
        ("cuda", on_device, on_host - 1, r"\(host .*\), and .* of memory are available on this machine"),
    ):
        monkeypatch.setattr(room, "available_memory", lambda ram=ram: ram)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gpu=gpu: (gpu, 10**12))
        with pytest.raises(Refused, match=lacking) if lacking else nullcontext():
            room.require_memory(step, torch.device(device))


def test_room_is_asked_for_together_where_folders_share_a_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil._ntuple_diskusage(9_000_000, 0, 3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    wanted = [("to save", tmp_path, 2_000_000), ("to export", tmp_path, 1_000_000)]
    room.require_room(wanted)
    with pytest.raises(
        NotSaved, match=r"to save in .* takes 2\.0 MB and to export in .* 1\.5 MB, and 3\.0 MB are free"
    ):
        room.require_room([wanted[0], ("to export", tmp_path, 1_500_000)])

"""Whether this machine has room for a training, asked before it begins: in memory, on a drive, for what it writes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain.checkpoint import NotSaved
from megatrain.ram import available_memory
from schedules.errors import InputError, Refused
from schedules.op import Tier
from schedules.verify import Verified
from sim.units import scaled


def require_memory(verified: Verified, device: torch.device) -> None:
    """Raises Refused unless there is room for the buffers: on the CPU, for both tiers' in the RAM."""
    needed, label = verified.allocated_bytes(), f"{verified.schedule.label} for {verified.schedule.model.name}"
    places: list[tuple[tuple[Tier, ...], int, str]]
    if device.type == "cpu":
        places = [((Tier.DEVICE, Tier.HOST), available_memory(), "of memory are available on this machine")]
    else:
        free, _ = torch.cuda.mem_get_info(device)
        places = [
            ((Tier.DEVICE,), free, "of the GPU's memory are free"),
            ((Tier.HOST,), available_memory(), "of memory are available on this machine"),
        ]
    for tiers, room, of in places:
        if sum(needed[tier] for tier in tiers) > room:
            parts = ", ".join(f"{tier} {scaled(needed[tier], 'GB')}" for tier in tiers if needed[tier])
            raise Refused(
                f"{label} needs {scaled(sum(needed[tier] for tier in tiers), 'GB')} ({parts}), and "
                f"{scaled(room, 'GB')} {of}; simulate it instead, or shrink it"
            )


def require_drive(verified: Verified, folder: Path | None) -> None:
    """Raises InputError unless there is a folder for the buffers on NVMe, if any, Refused unless it has room."""
    needed = verified.allocated_bytes()[Tier.NVME]
    if not needed:
        return
    what = f"{verified.schedule.label} for {verified.schedule.model.name} keeps {scaled(needed, 'GB')} on NVMe"
    if folder is None:
        raise InputError(f"{what}: give a folder on a drive, with --nvme FOLDER")
    if not folder.is_dir():
        raise InputError(f"{what}: there is no folder {folder}")
    if needed > (free := shutil.disk_usage(folder).free):
        raise Refused(
            f"{what}, and {scaled(free, 'GB')} are free in {folder}: make room there or choose another folder"
        )


def require_room(wanted: Sequence[tuple[str, Path, int]]) -> None:
    """Raises NotSaved unless there is room for each (what, folder, bytes), together where they share a drive."""
    drives: dict[int, list[tuple[str, Path, int]]] = {}
    for part in wanted:
        drives.setdefault(part[1].stat().st_dev, []).append(part)
    for parts in drives.values():
        free = shutil.disk_usage(parts[0][1]).free
        if sum(nbytes for _, _, nbytes in parts) > free:
            told = " and ".join(f"{what} in {folder} takes {scaled(nbytes, 'GB')}" for what, folder, nbytes in parts)
            raise NotSaved(f"{told}, and {scaled(free, 'GB')} are free there: make room or choose another folder")

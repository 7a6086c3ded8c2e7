"""Whether this machine has room for a training, asked before it begins: in memory, on a drive, for what it writes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain.checkpoint import NotSaved
from megatrain.ram import available_memory
from megatrain.store import applying_bytes, bytes_within_steps, filling_bytes, keeping_bytes
from megatrain.this_machine import MAKING
from schedules.errors import InputError, Refused
from schedules.files import require_folder
from schedules.op import Tier
from schedules.verify import Verified
from sim.prediction import estimated_workspace
from sim.units import scaled


def require_memory(
    verified: Verified, device: torch.device, *, begins: bool = True, saves: bool = False, exports: bool = False
) -> None:
    """Raises Refused unless there is room for the buffers: on the CPU, for both tiers' in the RAM; on a GPU, with the
    largest workspace of an op, as it is estimated.

    And in the RAM for what a layer takes beside them between steps: to be made, where the training `begins` with
    weights that no checkpoint has, to be gathered, where it `saves` or `exports`, and to have a gradient applied that
    a step leaves to the next.
    """
    needed, label = verified.allocated_bytes(), f"{verified.schedule.label} for {verified.schedule.model.name}"
    on_gpu = device.type == "cuda"
    beside = {
        "begin": filling_bytes(verified, MAKING) if begins else 0,
        "save": keeping_bytes(verified, on_gpu) if saves else 0,
        "apply gradients between steps": applying_bytes(verified, on_gpu),
        "export": keeping_bytes(verified, on_gpu, state=False) if exports else 0,
    }
    then = max(beside, key=lambda doing: beside[doing])
    more_ram = beside[then] if on_gpu else max(0, beside[then] - bytes_within_steps(verified.schedule))
    places: list[tuple[tuple[Tier, ...], int, str, int, str]] = []
    if on_gpu:
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's cache, for us to use
        free = torch.cuda.mem_get_info(device)[0] + kept
        workspace = estimated_workspace(verified.schedule)
        places.append(((Tier.DEVICE,), workspace, "within an op", free, "of the GPU's memory are free"))
    in_ram = (Tier.HOST,) if on_gpu else (Tier.DEVICE, Tier.HOST)
    places.append((in_ram, more_ram, f"to {then}", available_memory(), "of memory are available on this machine"))
    for tiers, more, when, room, of in places:
        total = sum(needed[tier] for tier in tiers) + more
        if total > room:
            parts = [f"{tier} {scaled(needed[tier], 'GB')}" for tier in tiers if needed[tier]]
            parts += [f"{scaled(more, 'GB')} more {when}"] if more else []
            raise Refused(
                f"{label} needs {scaled(total, 'GB')} ({', '.join(parts)}), and {scaled(room, 'GB')} {of}; simulate it "
                "instead, or shrink it"
            )


def require_drive(verified: Verified, folder: Path | None) -> None:
    """Raises InputError unless buffers on NVMe, if any, have a folder that takes files, Refused unless it has room."""
    needed = verified.allocated_bytes()[Tier.NVME]
    if not needed:
        return
    what = f"{verified.schedule.label} for {verified.schedule.model.name} keeps {scaled(needed, 'GB')} on NVMe"
    if folder is None:
        raise InputError(f"{what}: give a folder on a drive, with --nvme FOLDER")
    if not folder.is_dir():
        raise InputError(f"{what}: there is no folder {folder}")
    require_folder(folder)
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

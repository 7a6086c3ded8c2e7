"""The machine at hand, before anything is measured: what it is, its backend, how much memory schedules may use."""

from __future__ import annotations

import datetime
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatrain.backend import Backend, Task
from megatrain.cpu import CpuBackend
from megatrain.ram import available_memory, total_memory
from schedules.errors import InputError
from schedules.files import require_folder
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget

# Of a GPU, for what no schedule counts: libraries' workspaces, the rotary table, and fragments, more of them in more.
DEVICE_RESERVE, FRAGMENTS = 2 << 30, 0.03
MAKING = 8  # bytes of RAM a parameter, of one layer at a time, while random weights are made in fp32

PACKAGES = ("torch", "numpy")


def today() -> str:
    """The date, as results have it: that of UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine_name() -> str:
    """This machine's processor, for results."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def backend_of(name: str | None) -> CpuBackend:
    """The machine to run on: "cpu", "cuda", or the GPU where there is one. Raises InputError for one that is not."""
    if name not in (None, "cpu", "cuda"):
        raise InputError(f"backend {name!r} is unknown; known are cpu, cuda")
    if name == "cpu" or (name is None and not has_gpu()):
        return CpuBackend(machine=machine_name())
    if not has_gpu():
        raise InputError("torch finds no GPU here; run on the CPU, with the backend cpu")
    from megatrain.cuda import CudaBackend

    return CudaBackend()


def has_gpu() -> bool:
    """Whether torch finds a GPU. That may begin CUDA, so what CUDA reads of the environment is set before."""
    from megatrain.cuda import prepare_process

    prepare_process()
    return torch.cuda.is_available()


def usable_bytes(total: int) -> int:
    """The bytes of a GPU's memory that schedules may use, of so many in all; none of a GPU smaller than the reserve."""
    return max(0, total - int(max(DEVICE_RESERVE, FRAGMENTS * total)))


@dataclass(frozen=True, kw_only=True)
class Here:
    """A machine's device, the bytes that schedules may use in each tier, and the threads of an optimizer's op.

    `free_bytes` are of RAM, `drive` is the folder on the drive whose free space is `drive_bytes`, if any. `integrated`:
    the GPU's memory is that RAM.
    """

    device: str
    on_gpu: bool
    device_bytes: int
    host_bytes: int
    free_bytes: int
    integrated: bool = False
    drive: Path | None = None
    drive_bytes: int = 0
    optimizer_threads: int = 1

    @property
    def budget(self) -> MemoryBudget:
        """All of it, for policies."""
        return MemoryBudget(
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            nvme_bytes=self.drive_bytes,
            unified_bytes=self.free_bytes if self.integrated else None,
        )

    def room_for(self, schedule: Schedule) -> MemoryBudget:
        """What the schedule may use now; on a CPU its device tier has what its host tier leaves of the free RAM."""
        model = schedule.model
        host = max(0, self.free_bytes - MAKING * max(model.params(i) for i in model.layers))
        device = self.device_bytes if self.on_gpu else max(0, host - schedule.allocated_bytes(Tier.HOST))
        return replace(
            self.budget, device_bytes=device, host_bytes=host, unified_bytes=host if self.integrated else None
        )


def machine_here(machine: Callable[[], Backend[Any]], nvme: Path | None) -> Here:
    """This machine as a backend has it, which is opened for that and closed.

    On a CPU policies may plan with half of the RAM for each tier; a GPU's host has what is free. Raises InputError
    where `nvme` is no folder, or takes no files: a measurement would come to it after minutes.
    """
    if nvme is not None:
        if not nvme.is_dir():
            raise InputError(f"there is no folder {nvme} for what schedules keep on NVMe")
        require_folder(nvme)
    backend = machine()
    try:
        on_gpu, free = backend.device.type == "cuda", available_memory()
        half = total_memory() // 2
        return Here(
            device=backend.machine,
            on_gpu=on_gpu,
            device_bytes=usable_bytes(_free_on(backend.device)) if on_gpu else half,
            host_bytes=free if on_gpu else half,
            free_bytes=free,
            integrated=on_gpu and bool(torch.cuda.get_device_properties(backend.device).is_integrated),
            drive=nvme.resolve() if nvme is not None else None,
            drive_bytes=shutil.disk_usage(nvme).free if nvme is not None else 0,
            optimizer_threads=_threads(backend, Stream.CPU),
        )
    finally:
        backend.close()


def _free_on(gpu: torch.device) -> int:
    """Bytes of a GPU's memory that others do not hold; what this process has of it is no one else's."""
    total = torch.cuda.get_device_properties(gpu).total_memory
    return min(total, torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu))


def _threads(backend: Backend[Any], stream: Stream) -> int:
    """How many threads torch uses inside an op of a stream."""
    found: list[int] = []
    op = Op(name=f"threads of {stream}", kind=Kind.UPDATE, phase=Phase.SYNC, stream=stream)
    backend.host_wait(backend.submit(Task(op, 0, 0, lambda step: found.append(torch.get_num_threads())), []))
    return found[0]


def versions() -> str:
    """The software that times depend on."""
    found = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"Python {platform.python_version()}, {found}, {platform.system()}"

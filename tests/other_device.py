"""Trainings on a device whose memory is not the host's (other_device.cpp), its streams and events those of the fake.

Not a test module by name, since it registers the device with torch for all of its process:
test_megatrain_other_device.py compiles the device and runs this.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_cuda import POLICIES, WORKLOAD, FakeBackend, FakeGpu, built, installed, result
from hand_written import WRITERS, small
from torch import Tensor

from megatrain import actions, adam_state, moments8, nf4
from megatrain.backend import Task
from megatrain.cpu import CpuBackend
from schedules.op import Kind, Op, Phase, Stream
from schedules.workload import PRECISIONS, RECOMPUTED, Workload

LIBRARY = os.environ["OTHER_DEVICE"]
NAME = "other"
LONG = dataclasses.replace(WORKLOAD, seq_len=32)


def registered() -> ctypes.CDLL:
    """The device, known to torch by name; the library counts how often a thread would have waited for it."""
    torch.ops.load_library(LIBRARY)
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    for name, told in {"is_available": True, "device_count": 1, "current_device": 0, "_is_in_bad_fork": False}.items():
        setattr(module, name, lambda told=told: told)
    torch._register_device_module(NAME, module)
    for chunks in (actions.NORM_CHUNK, adam_state.CHUNK, nf4.CHUNK):
        chunks[NAME] = chunks["cuda"]
    for signed in (False, True):
        moments8.limits(signed, torch.device(NAME, 0))  # the codes' table is made once for a process, with a wait
    return ctypes.CDLL(LIBRARY)


DEVICE = registered()


class OtherBackend(FakeBackend):
    """The device's memory is the device's."""

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    DEVICE.waits_since_last_asked()
    return installed(monkeypatch)


def check(gpu: FakeGpu, name: str, workload: Workload, folder: Path) -> None:
    model = small(blocks=4)
    schedule = WRITERS[name](model, workload) if name in WRITERS else built(name, model, workload)
    losses, parameters = result(schedule, OtherBackend(gpu), nvme=folder)
    assert DEVICE.waits_since_last_asked() == 0, "a thread would have waited for a GPU inside a step"
    right = result(schedule, CpuBackend(), nvme=folder)
    assert losses == pytest.approx(right[0], rel=1e-5 if workload.precision == "fp32" else 1e-2)
    if workload.precision == "fp32":
        for found, expected in zip(parameters, right[1], strict=True):
            # of all together: Adam moves an element whose gradient is nearly zero as far as others, and which way is
            # chance, the order of sums being another
            assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("name", [*WRITERS, *POLICIES])
def test_every_schedule_trains_as_on_the_cpu_and_nothing_waits(gpu: FakeGpu, name: str, tmp_path: Path) -> None:
    check(gpu, name, LONG, tmp_path)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("recompute", "precision"),
    [
        *itertools.product(RECOMPUTED, ("fp32", "bf16")),  # what layers compute with
        *((RECOMPUTED[0], precision) for precision in PRECISIONS if precision not in ("fp32", "bf16")),
    ],
)
@pytest.mark.parametrize("name", ["on_device", "moved_out", "streamed"])
def test_so_it_does_in_every_precision(gpu: FakeGpu, name: str, recompute: str, precision: str, tmp_path: Path) -> None:
    check(gpu, name, dataclasses.replace(LONG, precision=precision, recompute=recompute), tmp_path)


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device=NAME) + torch.ones(3)


@pytest.mark.parametrize(
    ("work", "waits"),
    [
        (lambda t: t.sum().item(), 1),
        (lambda t: t.cpu(), 1),
        (lambda t: torch.empty(4).copy_(t, non_blocking=True), 0),
        (lambda t: torch.empty(4, dtype=torch.float64).copy_(t, non_blocking=True), 1),
        (lambda t: t.copy_(torch.ones(4)), 1),
        (lambda t: t.mul_(2.0).add_(t), 0),
    ],
)
def test_what_would_wait_is_counted(gpu: FakeGpu, work: object, waits: int) -> None:
    tensor: Tensor = torch.ones(4, device=NAME)
    op = Op(name="op", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE)
    backend = OtherBackend(gpu)
    backend.host_wait(backend.submit(Task(op, 0, 0, lambda step: work(tensor)), ()))
    backend.close()
    assert DEVICE.waits_since_last_asked() == waits

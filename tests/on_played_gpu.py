"""Trainings on a GPU that the host plays (benchmarks/played_gpu.cpp): torch's whole CUDA side, without a number.

Not a test module by name: test_megatrain_played_gpu.py runs this in processes that have that GPU.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import played_gpu
import pytest
import torch
from fake_cuda import WORKLOAD, built, trainer
from hand_written import WRITERS, small

from megatrain import cuda
from megatrain.backend import OpFailed
from megatrain.cpu import CpuEvent
from megatrain.cuda import CudaBackend
from megatrain.graphs import replayed
from megatrain.native import adam_gpu
from megatrain.pointwise import PLAIN, compiled
from schedules import policies
from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.workload import PRECISIONS, RECOMPUTED, MemoryBudget, Workload
from sim import hardware
from sim.prediction import predict

MODEL, MEMORY = small(blocks=4), MemoryBudget(device_bytes=10**10, host_bytes=10**10)
LONG = dataclasses.replace(WORKLOAD, seq_len=32)
NAMES = [*WRITERS, *policies.names()]
WORKSPACES = 3 * 32 << 20  # of cuBLAS on an H100: one for each stream and thread that multiplies
SANITIZED = "TORCH_CUDA_SANITIZER" in os.environ

played_gpu.begin()
unsanitized = pytest.mark.skipif(SANITIZED, reason="the sanitizer takes long, and says nothing else of it")
sanitized = pytest.mark.skipif(not SANITIZED, reason="needs torch's stream sanitizer")


def schedule_of(name: str, workload: Workload = LONG) -> Schedule:
    return WRITERS[name](MODEL, workload) if name in WRITERS else built(name, MODEL, workload)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_and_no_op_waits(name: str, tmp_path: Path) -> None:
    with trainer(schedule_of(name), CudaBackend(), nvme=tmp_path) as run:
        run.run(1)  # libraries set themselves up
        played_gpu.count("waits elsewhere")
        run.run(2)
        assert played_gpu.count("waits elsewhere") == 0
    assert played_gpu.count("kernels") > 100


@unsanitized
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("name", ["on_device", "moved_out", "streamed"])
def test_so_it_does_in_every_precision(name: str, recompute: str, precision: str, tmp_path: Path) -> None:
    workload = dataclasses.replace(LONG, precision=precision, recompute=recompute)
    with trainer(schedule_of(name, workload), CudaBackend(), nvme=tmp_path) as run:
        run.run(3)


@unsanitized
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_captured(name: str, tmp_path: Path) -> None:
    with trainer(schedule_of(name), CudaBackend(), prepare=replayed, nvme=tmp_path) as run:
        run.run(2)
        played_gpu.count("graphs")
        run.run(2)
    assert played_gpu.count("graphs") > 0 or name == "moved_out"  # whose activations are copied, those of every block


@unsanitized
def test_what_a_capture_must_not_do_is_refused() -> None:
    graph, stream, event = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Event()
    numbers = torch.ones(8, device="cuda")
    event.record()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for forbidden in (lambda: numbers.sum().item(), lambda: stream.wait_event(event), stream.synchronize):
            with pytest.raises(RuntimeError, match="the GPU that the host plays"):
                forbidden()
        graph.capture_end()


@unsanitized
def test_kernels_are_compiled_and_launched() -> None:
    adam_gpu.try_out(torch.device("cuda"))
    launched = []
    for pointwise in (PLAIN, compiled()):
        with trainer(schedule_of("two_slots"), CudaBackend(), pointwise=pointwise) as run:
            run.run(1)
            played_gpu.count("kernels")
            run.run(2)
        launched.append(played_gpu.count("kernels"))
    assert 0 < launched[1] < launched[0] / 2


@unsanitized
@pytest.mark.parametrize("name", ["resident", "streamed", "megatrain_released"])
def test_torchs_allocator_takes_what_is_predicted_and_gives_it_back(name: str) -> None:
    model = dataclasses.replace(small(blocks=4), hidden_size=512, intermediate_size=2048, head_dim=128)
    workload = dataclasses.replace(LONG, seq_len=4096, precision="bf16")
    schedule = policies.build(name, model, workload, MEMORY)
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with trainer(schedule, CudaBackend()) as run:
        run.run(3)
    predicted = predict(schedule, hardware.load("h100")).peak_bytes[Tier.DEVICE]
    taken = torch.cuda.max_memory_allocated() - held
    assert predicted < taken < 1.02 * predicted + WORKSPACES
    del run
    assert torch.cuda.memory_allocated() - held < 1 << 20


@sanitized
def test_sanitizer_sees_that_a_stream_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.DeviceEvent, "follow", lambda event, before: CpuEvent.wait(before))
    with trainer(schedule_of("streamed"), CudaBackend()) as run, pytest.raises(OpFailed, match="UnsynchronizedAccess"):
        run.run(3)

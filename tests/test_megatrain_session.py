"""A whole run in one call: what it refuses before it begins, and what it leaves behind when it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain import initial, session
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from schedules import policies, presets
from schedules.errors import Refused
from schedules.model import ModelSpec
from schedules.trace import Trace
from schedules.verify import Verified, verify
from schedules.workload import MemoryBudget, Workload

MEMORY = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)


def verified(policy: str = "streamed") -> Verified:
    workload = Workload(micro_batch_size=1, accumulation=1, seq_len=16, precision="fp32")
    return verify(policies.build(policy, presets.load("tiny"), workload, MEMORY))


def test_memory_of_both_tiers_is_ram_on_a_cpu_and_each_ones_own_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    step = verified()
    on_device, on_host = step.allocated_bytes()["device"], step.allocated_bytes()["host"]
    for device, gpu, ram, lacking in (
        ("cpu", 0, on_device + on_host, ""),
        ("cpu", 0, on_device + on_host - 1, "of memory are available on this machine"),
        ("cuda", on_device, on_host, ""),
        ("cuda", on_device - 1, on_host, r"\(device .*\), and .* of the GPU's memory are free"),
        ("cuda", on_device, on_host - 1, r"\(host .*\), and .* of memory are available on this machine"),
    ):
        monkeypatch.setattr(session, "available_memory", lambda ram=ram: ram)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gpu=gpu: (gpu, 10**12))
        with pytest.raises(Refused, match=lacking) if lacking else nullcontext():
            session.require_memory(step, torch.device(device))


def test_a_training_that_is_refused_closes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CpuBackend] = []

    class Watched(CpuBackend):
        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(session, "backend_of", lambda name: Watched())
    monkeypatch.setattr(session, "available_memory", lambda: 0)
    with pytest.raises(Refused):
        session.train(verified(), steps=1, hyper=Adam(lr=1e-3))
    assert len(closed) == 1


@pytest.mark.parametrize("forgotten", [0, 3])
def test_a_step_is_not_as_long_as_the_checkpoint_before_it(forgotten: int) -> None:
    ends = [10, 20, 30 + 500, 40 + 500, 50 + 1000, 60 + 1000, 70 + 1500][forgotten:]  # 500 ns for each save
    steps = np.arange(len(ends))
    ends_ns = np.array(ends)
    trace = Trace(
        digest="", machine="", source="measured", op=0 * steps, step=steps, issue_ns=ends_ns - 10,
        start_ns=ends_ns - 10, end_ns=ends_ns, waited_on=steps - 1,
    )  # fmt: skip
    found = {every: session.Trained(losses=[0.0] * 7, trace=trace, every=every).step_ns for every in (1, 2, None)}
    assert not found[1] and set(found[2]) == {10} and max(found[None]) == 510


def test_adapters_begin_with_the_runs_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def adapters(model: ModelSpec, rank: int, seed: int) -> Callable[[int], Tensor]:
        seeds.append(seed)
        return initial.random_adapters(model, rank, seed)

    monkeypatch.setattr(session, "random_adapters", adapters)
    session.train(verified("lora_streamed"), steps=1, hyper=Adam(lr=1e-3), seed=7)
    assert seeds == [7]


def test_adapters_are_not_the_weights_that_they_stand_beside() -> None:
    model = presets.load("tiny")
    adapters, weights = initial.random_adapters(model, 4, 0)(0), initial.random_parameters(model, 0)(0)
    first = adapters[: 4 * model.hidden_size]  # of q_proj, whose weights come after the norm's
    beside = weights[model.hidden_size :][: len(first)]
    assert abs(float(torch.corrcoef(torch.stack([first, beside]))[0, 1])) < 0.5

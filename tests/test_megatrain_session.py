"""A whole run in one call: what it refuses before it begins, and what it leaves behind when it does."""

from __future__ import annotations

import pytest
import torch

from megatrain import session
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from schedules import policies, presets
from schedules.errors import Refused
from schedules.verify import Verified, verify
from schedules.workload import MemoryBudget, Workload

MEMORY = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)


def verified(policy: str = "streamed") -> Verified:
    workload = Workload(micro_batch_size=1, accumulation=1, seq_len=16, precision="fp32")
    return verify(policies.build(policy, presets.load("tiny"), workload, MEMORY))


def test_memory_of_both_tiers_is_ram_on_a_cpu_and_the_hosts_alone_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    step = verified()
    host, both = step.allocated_bytes()["host"], step.allocated_bytes()["host"] + step.allocated_bytes()["device"]
    for device, needed in (("cpu", both), ("cuda", host)):
        monkeypatch.setattr(session, "available_memory", lambda needed=needed: needed)
        session.require_memory(step, torch.device(device))
        monkeypatch.setattr(session, "available_memory", lambda needed=needed: needed - 1)
        with pytest.raises(Refused, match="of memory are available on this machine"):
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

"""What a step computes when blocks are replayed: CUDA graphs played on the CPU, with the addresses of their capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hand_written import WRITERS, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain import graphs, initial
from megatrain.adam import Adam
from megatrain.backend import Work
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.graphs import replayed
from megatrain.train import Trainer
from schedules import policies
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

STEPS = 4
MODEL = small(blocks=6)
Kernel = tuple[Any, tuple[Any, ...], dict[str, Any], Any]  # what was called, with what, and what came of it


class PlayedGraph(TorchDispatchMode):
    """Writes down what is dispatched, and dispatches it again on the same tensors, wherever others are by then."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.run = False  # by the capture, which on the CPU runs what it writes down

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        if not self.run:
            self.run = True
            return
        with torch.no_grad():
            for func, args, kwargs, result in self.kernels:
                if any(value.alias_info is not None for value in func._schema.returns) and not func._schema.is_mutable:
                    continue  # a view launches nothing
                again = func(*args, **kwargs)
                if not func._schema.is_mutable:
                    for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                        if isinstance(place, Tensor):
                            place.copy_(value)


class PlayedPool:
    def capture(self, work: Work, step: int) -> PlayedGraph:
        graph = PlayedGraph()
        with graph:
            work(step)
        return graph


def gradients(
    schedule: Schedule, prepare: Callable[[Schedule, Sequence[Work]], Sequence[Work]]
) -> dict[tuple[int, int], Tensor]:
    """By step and layer."""
    found: dict[tuple[int, int], Tensor] = {}
    workload = schedule.workload
    with Trainer(
        verify(schedule),
        CpuBackend(),
        RandomTokens(vocab_size=schedule.model.vocab_size, workload=workload),
        Adam(lr=1e-2),
        initial=initial.random_parameters(schedule.model, 0),
        on_gradient=lambda step, layer, of, grad: found.__setitem__((step, layer), grad.clone()),
        prepare=prepare,
    ) as trainer:
        trainer.run(STEPS)
    return found


STREAMED: Mapping[str, tuple[int, dict[str, Knob]]] = {
    "all kept": (1, {}),
    "one kept": (2, {"keep": 1}),
    "none kept": (1, {"keep": 0}),
    "one kept, one moved": (1, {"keep": 1, "offload": 1}),
    "restored to where another is kept": (2, {"keep": 2, "offload": 1}),
    "most of them moved": (4, {"keep": 1, "offload": 3}),
    "by micro-batches": (2, {"keep": 3, "offload": 2, "order": "microbatches"}),
    "one resident": (2, {"keep": 2, "offload": 2, "resident": 1}),
    "inputs moved": (2, {"keep": 0, "inputs": 6, "offload": 1, "slack": 2}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*STREAMED, *WRITERS])
def test_replayed_blocks_compute_what_launched_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of activations that copies bring back, a graph would read those of the step in which it was captured."""
    monkeypatch.setattr(graphs, "Pool", PlayedPool)
    accumulation, knobs = STREAMED.get(name, (2, {}))
    workload = Workload(micro_batch_size=1, accumulation=accumulation, seq_len=16, precision="fp32")
    if name in WRITERS:
        schedule = WRITERS[name](MODEL, workload)
    else:
        memory = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
        schedule = policies.build("streamed", MODEL, workload, memory, **knobs)
    launched = gradients(schedule, lambda schedule, works: works)
    again = gradients(schedule, replayed)
    assert launched.keys() == again.keys() and len(launched) == STEPS * len(MODEL.layers)
    assert {place for place, grad in launched.items() if not torch.equal(grad, again[place])} == set()

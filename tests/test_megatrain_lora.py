"""Adapters beside frozen weights: the arithmetic, what stays as it is, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import initial
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.linear import LORA_SCALE, linear
from megatrain.template import templates, views
from megatrain.train import Trainer
from schedules import policies, presets, trained
from schedules.flops import attention_flops, backward_flops, forward_flops, loss_flops, model_flops_per_step
from schedules.model import ModelSpec
from schedules.op import Kind, Tier
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.prediction import predict

MODEL = replace(presets.load("tiny"), num_hidden_layers=2)
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
CPU = torch.device("cpu")


def workload(**options: object) -> Workload:
    return Workload(**{"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", **options})  # type: ignore[arg-type]


def schedule(model: ModelSpec = MODEL, **knobs: int) -> Schedule:
    return policies.build("lora_streamed", model, workload(), ROOM, **{"rank": 4, **knobs})


@pytest.mark.parametrize("fused", [False, True])
def test_adapters_do_what_weights_with_their_product_added_would_do(fused: bool) -> None:
    model = replace(MODEL, fused_projections=fused)
    block = templates(model, seq_len=16, device=CPU, dtype=torch.float32).blocks[model.layer_kind(0)]
    flat = initial.random_parameters(model, 0)(0)
    adapters = views(0.1 * torch.randn(trained.params(model, workload(lora_rank=4), 0)), model.adapter_shapes(0, 4))
    merged = flat.clone()
    for name, weight in views(merged, model.stored_shapes(0)).items():
        if (down := adapters.get(f"{name.removesuffix('weight')}lora_A.weight")) is not None:
            up = adapters[f"{name.removesuffix('weight')}lora_B.weight"]
            weight += LORA_SCALE * up @ down
    assert len(adapters) == 2 * (4 if fused else 7)
    params, together = (views(values, model.parameter_shapes(0)) for values in (flat, merged))
    x = torch.randn(2, 16, model.hidden_size)
    found, right = block.forward({**params, **adapters}, x), block.forward(together, x)
    assert not torch.allclose(right, block.forward(params, x), atol=1e-2)
    assert torch.allclose(found, right, rtol=1e-4, atol=1e-4)


class Made(TorchDispatchMode):
    """Elements of what operations other than matrix products write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.add):
            self.elements.append(found.numel())
        return found


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_between_the_adapters_is_scaled_and_not_what_they_make(dtype: torch.dtype, output: bool) -> None:
    """The same bits, since the scale is a power of two, and nothing of an output that nobody reads."""
    rows, wide, rank = 24, 40, 4
    shapes = {"p.weight": (wide, 16), "p.lora_A.weight": (rank, 16), "p.lora_B.weight": (wide, rank)}
    params = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
    x, dy = torch.randn(rows, 16).to(dtype).requires_grad_(), torch.randn(rows, wide).to(dtype)
    weight, down, up = params.values()
    right = x @ weight.t() + LORA_SCALE * ((x @ down.t()) @ up.t())
    with Made() as made:
        found = linear(params, "p", x, output=output)
    assert made.elements == [rows * rank] + [rows * wide] * output
    assert torch.equal(found, right) or not output
    for one, other in zip(*(torch.autograd.grad(y, [down, up], dy) for y in (found, right)), strict=True):
        assert torch.equal(one, other)


def test_only_adapters_change_and_training_begins_with_the_model_as_it_is() -> None:
    verified = verify(schedule(resident=0))
    data = RandomTokens(vocab_size=MODEL.vocab_size, workload=verified.schedule.workload)
    start = initial.random_parameters(MODEL, 0)
    evaluation = policies.build("flexgen_block", MODEL, workload(), ROOM)
    with Trainer(verify(evaluation), CpuBackend(), data, Adam(lr=0.0), initial=start) as evaluator:
        (untrained,) = evaluator.run(1)
    with Trainer(verified, CpuBackend(), data, Adam(lr=1e-2), initial=start) as trainer:
        before = {i: trainer.parameters(i) for i in MODEL.blocks}
        frozen = {name: slab.clone() for name, slab in trainer._store._slabs.items() if name.startswith("host.w.")}
        losses = trainer.run(3)
        assert losses[0] == pytest.approx(untrained, rel=1e-6)
        assert len(frozen) == len(MODEL.layers)
        assert all(torch.equal(trainer._store._slabs[name], slab) for name, slab in frozen.items())
        assert all(not torch.equal(trainer.parameters(i), before[i]) for i in MODEL.blocks)


def test_what_is_counted_is_what_is_computed() -> None:
    """Frozen matrices have one product in backward, trained ones two, attention twice its forward."""
    plain, adapted = workload(), workload(lora_rank=4)
    tokens, small = plain.tokens_per_microbatch, trained.params(MODEL, adapted, 0)
    assert small == sum(4 * (sum(s)) for n, s in MODEL.parameter_shapes(0).items() if n.endswith("_proj.weight"))
    assert forward_flops(MODEL, 0, adapted) == forward_flops(MODEL, 0, plain) + 2 * tokens * small
    attention = attention_flops(MODEL, 0, plain)
    matrices = forward_flops(MODEL, 0, plain) - attention
    assert backward_flops(MODEL, 0, adapted) == matrices + 2 * attention + 2 * (2 * tokens * small)
    assert loss_flops(MODEL, adapted) == 2 * forward_flops(MODEL, MODEL.head, plain)
    evaluated = workload(task="evaluate")
    assert model_flops_per_step(MODEL, evaluated) == sum(forward_flops(MODEL, i, plain) for i in MODEL.layers)
    for build in (schedule(), policies.build("flexgen_block", MODEL, workload(), ROOM)):
        executed = sum(op.flops for op in build.ops if op.kind == Kind.COMPUTE)
        assert executed == model_flops_per_step(MODEL, build.workload), build.policy


def test_training_adapters_needs_a_sixth_of_the_memory_and_less_time() -> None:
    model, machine = presets.load("llama-3.1-8b"), hardware.load("rtx4090")
    room = MemoryBudget(device_bytes=20 << 30, host_bytes=256 << 30)
    work = Workload(micro_batch_size=2, accumulation=4, seq_len=1024)
    adapters, whole = (policies.build(name, model, work, room) for name in ("lora_streamed", "streamed"))
    assert adapters.allocated_bytes(Tier.HOST) < whole.allocated_bytes(Tier.HOST) / 5
    assert predict(adapters, machine).period_ns < 0.8 * predict(whole, machine).period_ns


def test_a_workload_says_nothing_new_where_nothing_new_is_asked() -> None:
    assert set(workload().to_dict()) == {
        "micro_batch_size", "accumulation", "seq_len", "precision", "optimizer", "grad_clip",
    }  # fmt: skip
    for asked in (workload(lora_rank=4), workload(task="evaluate"), workload(task="evaluate", lora_rank=4)):
        assert Workload.from_dict(asked.to_dict()) == asked
    with pytest.raises(ValueError, match="task 'sleep' is unknown"):
        workload(task="sleep")

"""What blocks do not keep and compute again in backward: the same training in less memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
from families import MODELS as FAMILIES
from hand_written import small
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatrain import autograd, initial, train
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from megatrain.data import ByteText, read_bytes, standard_library
from megatrain.float_types import float_type
from megatrain.sink import Sink
from megatrain.template import sinks, templates, views
from megatrain.train import Debug, Trainer
from schedules import policies, presets, trained
from schedules.flops import attention_flops, model_flops_per_step, op_flops
from schedules.model import ModelError
from schedules.op import Kind, Phase, Tier
from schedules.saved import saved_bytes
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from sim import hardware
from sim.prediction import peak_bytes

CPU = torch.device("cpu")
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
MODEL = small()
OF_ALL_KINDS = FAMILIES["nemotron-3, latent, of groups, with all kinds"]
VARIANTS = {"plain": MODEL, "fused projections": replace(MODEL, fused_projections=True)} | {
    "norms after": replace(MODEL, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_all_heads=True),
    "gemma3": replace(
        MODEL,
        post_norm=True,
        qk_norm=True,
        zero_centered_norms=True,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=11,
    ),
    "gemma4": FAMILIES["gemma4"],
    "experts beside an MLP": FAMILIES["gemma4, with experts"],
    "experts": replace(FAMILIES["minimax-m2"], num_hidden_layers=2),
    "experts, some shared": replace(FAMILIES["glm-4.5"], first_k_dense_replace=0),
    "experts, some shared, with a gate": FAMILIES["qwen2-moe"],
    "gated attention": FAMILIES["qwen3.5"].of_blocks([1]),
    "an MLP without a gate": FAMILIES["nemotron-h"].of_blocks([2]),
    "attention alone": OF_ALL_KINDS.of_blocks([3]),
    "experts of a latent vector alone": OF_ALL_KINDS.of_blocks([0]),
    "latent": replace(FAMILIES["deepseek-v3"], first_k_dense_replace=0),
    "latent, values as wide as keys": replace(FAMILIES["glm-4.7-flash"], first_k_dense_replace=0, q_lora_rank=0),
}
MODES = [(name, mode) for name, model in VARIANTS.items() for mode in model.recompute_modes]
HYPER = Adam(lr=1e-3, eps=1e-4, weight_decay=0.1)
POLICIES: dict[str, dict[str, Any]] = {
    "resident": {"keep": 2},
    "streamed": {"keep": 1, "offload": 1},
    "megatrain": {},
    "zero3_offload": {"activations": "keep"},
    "roundpipe": {"is_async": False},
    "lora_streamed": {"keep": 2, "rank": 4},
}


def workload(**options: Any) -> Workload:
    return Workload(**{"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", "recompute": "mlp", **options})


def one_block(
    dtype: torch.dtype, *, bias: bool = False, pointwise_again: bool = False, mlp_chunk: int | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor], int]:
    """Output, input's gradient, parameters' gradients, and bytes kept, of a block on the same numbers each time."""
    model = replace(MODEL, mlp_bias=bias)
    shapes = model.parameter_shapes(0)
    layers = templates(model, seq_len=16, device=CPU, dtype=dtype, pointwise_again=pointwise_again, mlp_chunk=mlp_chunk)
    block = layers.blocks[model.layer_kind(0)]
    generator = torch.Generator().manual_seed(0)
    flat = (0.2 * torch.randn(model.params(0), generator=generator)).to(dtype)
    x, dy = (torch.randn(2, 16, model.hidden_size, generator=generator).to(dtype) for _ in range(2))
    params = views(flat, shapes)
    y, saved = autograd.forward(block, params, x)
    kept = saved.nbytes
    elsewhere = views(flat.clone(), shapes)  # the weights come back into another buffer
    flat.fill_(float("nan"))
    grads = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    dx = autograd.backward(saved, elsewhere, x, dy, {name: Sink(view, False) for name, view in grads.items()})
    return y, dx, grads, kept


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 32, 1000])
def test_a_block_computes_the_same_and_keeps_less(chunk: int, bias: bool) -> None:
    plain = one_block(torch.float32, bias=bias)
    again = one_block(torch.float32, bias=bias, pointwise_again=True, mlp_chunk=chunk)
    assert torch.allclose(again[0], plain[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(again[1], plain[1], rtol=1e-5, atol=1e-6)
    for name, grad in plain[2].items():
        assert torch.allclose(again[2][name], grad, rtol=1e-4, atol=1e-5), name
    work = workload()
    assert again[3] == saved_bytes(MODEL, 0, work)
    assert plain[3] == saved_bytes(MODEL, 0, replace(work, recompute="none"))
    assert plain[3] - again[3] == work.tokens_per_microbatch * (3 * MODEL.mlp_width(0) + 2 * MODEL.hidden_size) * 4


@pytest.mark.parametrize("mlp_chunk", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_differs_where_only_pointwise_functions_are_computed_again(
    dtype: torch.dtype, mlp_chunk: int | None
) -> None:
    plain, again = (one_block(dtype, pointwise_again=on, mlp_chunk=mlp_chunk) for on in (False, True))
    assert torch.equal(again[0], plain[0])
    assert torch.equal(again[1], plain[1])
    for name, grad in plain[2].items():
        assert torch.equal(again[2][name], grad), name
    precision, mode = ("fp32" if dtype == torch.float32 else "bf16"), "pointwise" if mlp_chunk is None else "mlp"
    assert again[3] == saved_bytes(MODEL, 0, workload(precision=precision, recompute=mode))


def test_what_is_made_again_is_made_once_and_only_where_it_is_read() -> None:
    made: list[str] = []

    @dataclass
    class Layer:
        constants: tuple[Tensor, ...] = ()

        def forward(self, params: Mapping[str, Tensor], x: Tensor, *, output: bool = True) -> Tensor:
            def double(name: str, t: Tensor) -> Tensor:
                made.append(name)
                return t * 2.0

            read, unread = x.exp() * 2.0, x.cos() * 2.0
            with autograd.again(read, lambda t: double("read", t), read.detach() / 2.0):
                y = read * params["a"] + read * params["b"]
            with autograd.again(unread, lambda t: double("unread", t), unread.detach() / 2.0):
                return y + unread

    x, params = torch.randn(5), {"a": torch.randn(5), "b": torch.randn(5)}
    _, saved = autograd.forward(Layer(), params, x)
    assert saved.nbytes == 2 * x.nbytes  # what exp made, and what the recipe needs; cos has the input of the layer
    grads = {name: torch.empty(5) for name in params}
    autograd.backward(saved, params, x, torch.ones(5), {name: Sink(view, False) for name, view in grads.items()})
    assert made == ["read"]
    assert torch.allclose(grads["a"], 2.0 * x.exp()) and torch.equal(grads["a"], grads["b"])


def test_outside_of_a_forward_of_ours_nothing_is_made_again() -> None:
    x = torch.randn(5, requires_grad=True)
    product = x * 2.0
    with autograd.again(product, lambda: pytest.fail("autograd has kept it")):
        y = product.square()
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 8.0 * x)


def test_gradients_of_many_chunks_in_bf16_are_summed_in_fp32() -> None:
    whole, parts = (one_block(torch.bfloat16, mlp_chunk=chunk)[2] for chunk in (1000, 1))
    exact = one_block(torch.float32)[2]
    for name in whole:
        if name.startswith("mlp."):
            scale = exact[name].abs().max()
            assert (parts[name] - whole[name]).abs().max() < 0.02 * scale, name


def trained_by(schedule: Schedule, steps: int = 6, debug: Debug | None = None) -> reference.Reference:
    gradients: list[dict[int, Tensor]] = [{} for _ in range(steps)]
    with Trainer(
        verify(schedule),
        CpuBackend(),
        text(schedule.workload),
        HYPER,
        initial=initial.random_parameters(schedule.model, 0),
        on_gradient=lambda step, layer, of, grad: gradients[step].update({layer: grad.clone()}),
        debug=debug or Debug(poison=False),
    ) as trainer:
        losses = trainer.run(steps)
        chosen = trained.layers(schedule.model, schedule.workload)
        parameters = {i: trainer.parameters(i) for i in chosen}
    return reference.Reference(losses=losses, gradients=gradients, norms=[], parameters=parameters)


def text(work: Workload) -> ByteText:
    return ByteText(text=read_bytes(standard_library(), 1 << 14), workload=work, seed=5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", RECOMPUTED[1:])
@pytest.mark.parametrize("name", POLICIES)
def test_training_by_schedule_is_plain_training(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "MLP_CHUNK_TOKENS", 12)  # three chunks
    schedule = policies.build(name, MODEL, workload(accumulation=2, recompute=mode), ROOM, **POLICIES[name])
    assert schedule.workload.recompute == mode
    found = trained_by(schedule)
    rank = schedule.workload.lora_rank
    right = reference.train(
        MODEL,
        schedule.workload,
        text(schedule.workload),
        HYPER,
        initial=initial.random_parameters(MODEL, 0),
        adapters=None if rank is None else initial.random_adapters(MODEL, rank, 0),
        steps=6,
    )
    assert found.losses == pytest.approx(right.losses, rel=1e-6)
    for step in range(6):
        for i, grad in right.gradients[step].items():
            difference = (found.gradients[step][i] - grad).abs().max() / grad.abs().max()
            assert difference < (1e-6 if step == 0 else 1e-5), (step, i)
    poisoned = trained_by(schedule, debug=Debug(poison=True, delay_s=2e-4))
    assert poisoned.losses == found.losses


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        "smollm3 with a window",
        "phi4-mini, in long sequences",
        "olmo3",
        "gemma3",
        "minimax-m2",
        "glm-4.5",
        "deepseek-v2",
        "granite",
        "glm-4",
    ],
)
@pytest.mark.parametrize("rank", [None, 4])
def test_families_train_by_schedule_as_they_do_in_plain_pytorch(rank: int | None, name: str) -> None:
    model, policy = FAMILIES[name], "streamed" if rank is None else "lora_streamed"
    schedule = policies.build(policy, model, workload(accumulation=2, recompute="pointwise", lora_rank=rank), ROOM)
    found = trained_by(schedule)
    right = reference.train(
        model,
        schedule.workload,
        text(schedule.workload),
        HYPER,
        initial=initial.random_parameters(model, 0),
        adapters=None if rank is None else initial.random_adapters(model, rank, 0),
        steps=6,
    )
    assert found.losses == pytest.approx(right.losses, rel=1e-6)
    for i, grad in right.gradients[0].items():
        assert (found.gradients[0][i] - grad).abs().max() < 1e-5 * grad.abs().max(), i


def test_what_is_computed_again_is_executed_and_not_counted() -> None:
    plain, cheap, again = (
        policies.build("resident", MODEL, workload(recompute=mode), ROOM, keep=2) for mode in RECOMPUTED
    )
    assert [op.flops for op in cheap.ops] == [op.flops for op in plain.ops]
    assert sum(op.nbytes for op in cheap.ops) > sum(op.nbytes for op in plain.ops)
    assert model_flops_per_step(MODEL, plain.workload) == model_flops_per_step(MODEL, again.workload)
    extra = {op.name: op.flops for op in again.ops}
    for op in plain.ops:
        gate_and_up = 2 * 2 * plain.workload.tokens_per_microbatch * MODEL.hidden_size * MODEL.mlp_width(0)
        inside = op.kind == Kind.COMPUTE and op.phase == Phase.BACKWARD and op.layer in MODEL.blocks
        assert extra[op.name] - op.flops == (gate_and_up if inside else 0), op.name


@pytest.mark.parametrize("mode", RECOMPUTED[1:])
def test_every_policy_is_safe_with_it(mode: str) -> None:
    for name in policies.names():
        schedule = policies.build(name, MODEL, workload(accumulation=2, grad_clip=1.0, recompute=mode), ROOM)
        assert verify(schedule).schedule is schedule  # it raises what is not safe
        assert schedule.workload.recompute == mode


def test_a_long_sequence_fits_a_device_that_it_did_not_fit() -> None:
    model, machine = presets.load("qwen2.5-7b"), hardware.load("gh200")
    peaks = {}
    for mode in RECOMPUTED:
        work = Workload(micro_batch_size=1, seq_len=1 << 19, recompute=mode)
        room = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 42)
        schedule = policies.build("streamed", model, work, room, keep=0, inputs=model.num_hidden_layers)
        peaks[mode] = peak_bytes(schedule, machine)[Tier.DEVICE]
    assert peaks["mlp"] < machine.gpu.memory.value < peaks["pointwise"] < peaks["none"]


def test_experts_are_not_computed_again_but_what_is_pointwise_of_them_is() -> None:
    model, room = presets.load("qwen3-30b-a3b"), MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
    with pytest.raises(ModelError, match="experts are not computed again"):
        policies.build("streamed", model, workload(precision="bf16"), room)
    plain, cheap = (workload(precision="bf16", recompute=mode) for mode in ("none", "pointwise"))
    # two norms' outputs, the second once more for each expert chosen, and the gates' products
    less = 2 * model.hidden_size + model.num_experts_per_tok * model.hidden_size + model.mlp_width(0)
    assert saved_bytes(model, 0, plain) - saved_bytes(model, 0, cheap) == 2 * plain.tokens_per_microbatch * less
    verify(policies.build("streamed", model, cheap, room))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize(
    ("name", "mode", "rank", "matmul"),
    [
        (name, mode, rank, matmul)
        for name, mode in MODES
        for rank, matmul in [(None, None), (4, None), (None, "fp8")]
        if matmul is None or not (VARIANTS[name].num_experts or VARIANTS[name].mlp_layer_types)
    ],
)
def test_what_is_counted_is_what_is_multiplied(
    name: str, mode: str, rank: int | None, matmul: str | None, output: bool
) -> None:
    model = VARIANTS[name]
    work = workload(recompute=mode, lora_rank=rank, matmul=matmul, precision="fp32" if matmul is None else "bf16")
    dtype = float_type(work.bytes.activation)
    shapes = model.parameter_shapes(0) | ({} if rank is None else model.adapter_shapes(0, rank))
    names = shapes.keys() - (model.parameter_shapes(0).keys() if rank else set())
    layers = templates(
        model, seq_len=16, device=CPU, dtype=dtype, pointwise_again=mode != "none",
        mlp_chunk=8 if mode == "mlp" else None, matmul=matmul,
    )  # fmt: skip
    params = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    x = torch.randn(2, 16, model.hidden_size, dtype=dtype)
    with FlopCounterMode(display=False) as ran:
        _, saved = autograd.forward(layers.blocks[model.layer_kind(0)], params, x, trained=names, output=output)
    attention = attention_flops(model, 0, work)  # which the counter does not know on the CPU
    assert ran.get_total_flops() == op_flops(model, 0, Phase.RECOMPUTE, work, output=output) - attention
    assert saved.nbytes == saved_bytes(model, 0, work)
    grads = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
    with FlopCounterMode(display=False) as ran:
        autograd.backward(saved, params, x, x, {name: Sink(grad, False) for name, grad in grads.items()})
    assert ran.get_total_flops() == op_flops(model, 0, Phase.BACKWARD, work) - 2 * attention


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_block_run_for_its_activations_alone_has_the_gradients_of_one_run_for_all(name: str, mode: str) -> None:
    model = VARIANTS[name]
    layers = templates(
        model, seq_len=16, device=CPU, dtype=torch.bfloat16, pointwise_again=mode != "none",
        mlp_chunk=8 if mode == "mlp" else None,
    )  # fmt: skip
    shapes = model.parameter_shapes(0)
    flat = torch.randn(model.params(0)).mul(0.2).bfloat16()
    x, dy = (torch.randn(2, 16, model.hidden_size).bfloat16() for _ in range(2))
    found = []
    for output in (True, False):
        y, saved = autograd.forward(layers.blocks[model.layer_kind(0)], views(flat, shapes), x, output=output)
        assert y.shape == x.shape and y.untyped_storage().nbytes() == (x.nbytes if output else x.itemsize)
        grad = torch.empty_like(flat)
        dx = autograd.backward(saved, views(flat, shapes), x, dy, sinks(grad, shapes, accumulate=False))
        found.append((dx, grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

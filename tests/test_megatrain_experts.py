"""A mixture of experts: the router's choice and its gradient, experts that nobody chooses, and training by schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from families import MODELS as FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import autograd, experts, initial
from megatrain.adam import Adam
from megatrain.attention import Attention, _attend, _attend_backward, band
from megatrain.cpu import CpuBackend
from megatrain.data import ByteText, read_bytes, standard_library
from megatrain.experts import Mixture, _outer_products, _products, _some_columns
from megatrain.linear import wide_product
from megatrain.pointwise import PLAIN, clamped_backward, clamped_forward, compiled
from megatrain.routing import route
from megatrain.template import sinks, templates, views
from megatrain.train import Debug, Trainer
from schedules import policies, presets, trained
from schedules.model import ModelSpec
from schedules.saved import saved_bytes
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

CPU = torch.device("cpu")
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
HYPER = Adam(lr=1e-3, eps=1e-4, weight_decay=0.1)
QWEN = replace(presets.load("tiny-moe"), num_hidden_layers=2)
GPT_OSS = replace(
    QWEN, architecture="GptOssForCausalLM", qk_norm=False, attention_sinks=True, attention_bias=True,
    attention_out_bias=True, router_bias=True, expert_bias=True, sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
)  # fmt: skip
MODELS = {"qwen3-moe": QWEN, "gpt-oss": GPT_OSS}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- the router


@given(tokens=st.integers(1, 40), experts=st.integers(1, 9), seed=st.integers(0, 99), data=st.data())
def test_every_token_has_its_likeliest_experts_and_choices_are_sorted(
    tokens: int, experts: int, seed: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(1, experts))
    logits = randn(tokens, experts, seed=seed)
    weights, expert, order = route(logits, chosen, normalised=True)
    assert torch.equal(expert.long(), logits.topk(chosen).indices)
    assert torch.allclose(weights, logits.topk(chosen).values.softmax(-1))
    plain, *_ = route(logits, chosen, normalised=False)
    assert torch.allclose(plain, logits.softmax(-1).gather(-1, expert.long()))
    assert sorted(order.tolist()) == list(range(tokens * chosen))
    whose = expert.flatten()[order].tolist()
    assert whose == sorted(whose)
    same = [a < b for a, b, x, y in zip(order, order[1:], whose, whose[1:], strict=False) if x == y]
    assert all(same)  # tokens of an expert keep their order


@pytest.mark.parametrize("normalised", [False, True])
def test_the_routers_gradient_is_that_of_the_weights(normalised: bool) -> None:
    logits = randn(6, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: route(t, 3, normalised=normalised)[0], logits)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_with_a_correction_experts_are_chosen_by_it_and_weighted_without(normalised: bool, sigmoid: bool) -> None:
    """As DeepSeek-V3 has it of sigmoids, and ERNIE 4.5 of probabilities."""
    logits, correction = randn(40, 6).requires_grad_(), randn(6, seed=1).requires_grad_()
    options: dict[str, Any] = {"sigmoid": sigmoid, "normalised": normalised, "scale": 2.5}
    weights, expert, _ = route(logits, 3, correction, **options)
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    assert torch.equal(expert.long(), (scores + correction).topk(3).indices)
    assert not torch.equal(expert.long(), scores.topk(3).indices)
    chosen = scores.gather(-1, expert.long())
    torch.testing.assert_close(weights, 2.5 * (chosen / chosen.sum(-1, keepdim=True) if normalised else chosen))
    few = randn(6, 5).requires_grad_()
    bias = 3 * torch.arange(5.0, dtype=torch.float64)  # what is chosen stays chosen
    assert torch.autograd.gradcheck(lambda t: route(t, 3, bias, **options)[0], few)
    (grad,) = torch.autograd.grad(weights.sum(), correction)
    assert torch.equal(grad, torch.zeros(6, dtype=torch.float64))


def test_a_wide_router_tells_experts_apart_that_are_alike_in_bf16() -> None:
    """As transformers has DeepSeek's and GLM's: logits are made in fp32, of numbers that are not."""
    x, weight = torch.ones(3, 64).bfloat16().requires_grad_(), torch.ones(2, 64).bfloat16()
    weight[1, 0] += 2**-7
    weight.requires_grad_()
    found = wide_product(x, weight)
    assert found.dtype == torch.float32 and found.tolist() == [[64, 64 + 2**-7]] * 3
    assert torch.equal(*F.linear(x, weight)[0]), "or this would show nothing"
    dy = torch.tensor([[1.0, 0.5]] * 3)
    dx, dw = torch.autograd.grad(found, [x, weight], dy)
    assert torch.equal(dx, dy.bfloat16() @ weight) and torch.equal(dw, dy.bfloat16().t() @ x)


# families whose routers transformers gives fp32, by the models of tests/families.py
WIDE_ROUTERS = (
    "deepseek",
    "dots.llm1",
    "ernie-4.5",
    "glm-",
    "hy3",
    "k-exaone",
    "kimi-linear",
    "nemotron-3",
    "solar-open",
)


@pytest.mark.parametrize("name", [name for name, model in FAMILIES.items() if model.num_experts])
def test_routers_are_as_wide_as_their_family_has_them(name: str) -> None:
    blocks = templates(FAMILIES[name], seq_len=4, device=CPU, dtype=torch.bfloat16).blocks
    mixtures = [block.mixture for block in blocks.values() if block.mixture is not None]
    assert {mixture.wide for mixture in mixtures} == {name.startswith(WIDE_ROUTERS)}


@given(
    size=st.integers(2, 4), groups=st.integers(1, 5), corrected=st.booleans(), seed=st.integers(0, 99), data=st.data()
)
def test_experts_are_chosen_from_the_best_groups_alone(
    size: int, groups: int, corrected: bool, seed: int, data: st.DataObject
) -> None:
    """DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 by the sum of their two best."""
    best = data.draw(st.integers(1, groups))
    chosen = data.draw(st.integers(1, best * size))
    logits = randn(7, groups * size, seed=seed)
    correction = randn(groups * size, seed=seed + 1) if corrected else None
    weights, expert, _ = route(
        logits, chosen, correction, sigmoid=corrected, normalised=False, scale=3.0, groups=groups, chosen_groups=best
    )
    probabilities = logits.sigmoid() if corrected else logits.softmax(-1)
    scores = probabilities + correction if correction is not None else probabilities
    for row, token in enumerate(scores.tolist()):
        parts = [sorted(token[g * size : g * size + size], reverse=True) for g in range(groups)]
        ranked = sorted(range(groups), key=lambda g: -sum(parts[g][: 2 if corrected else 1]))
        open_to = [e for e in range(groups * size) if e // size in ranked[:best]]
        right = sorted(open_to, key=lambda e: -token[e])[:chosen]
        assert expert[row].tolist() == right
    torch.testing.assert_close(weights, 3 * probabilities.gather(-1, expert.long()))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_8bit"])
def test_training_leaves_the_correction_as_it_was(precision: str) -> None:
    model = FAMILIES["glm-4.5-air"]
    began = initial.random_parameters(model, 0)

    def corrected(i: int) -> Tensor:
        flat = began(i).clone()
        if model.has_experts(i):
            views(flat, model.parameter_shapes(i))["mlp.gate.e_score_correction_bias"].copy_(0.25 * torch.arange(8))
        return flat

    schedule = policies.build("streamed", model, workload(accumulation=2, precision=precision, grad_clip=1.0), ROOM)
    with Trainer(
        verify(schedule), CpuBackend(), text(schedule.workload), HYPER, initial=corrected, debug=Debug(poison=True)
    ) as trainer:
        trainer.run(3)
        for i in model.blocks:
            found, right = (views(flat, model.parameter_shapes(i)) for flat in (trainer.parameters(i), corrected(i)))
            assert not torch.equal(found["self_attn.q_proj.weight"], right["self_attn.q_proj.weight"])
            if model.has_experts(i):
                name = "mlp.gate.e_score_correction_bias"
                assert torch.equal(found[name], right[name])


def test_with_normalised_weights_one_expert_each_gives_the_router_no_gradient() -> None:
    logits = randn(6, 5).requires_grad_()
    weights, *_ = route(logits, 1, normalised=True)
    (grad,) = torch.autograd.grad(weights, logits, randn(6, 1, seed=1))
    assert torch.equal(weights, torch.ones_like(weights)) and grad.abs().max() < 1e-12


def test_an_expert_that_nobody_chooses_has_gradient_zero() -> None:
    shapes = QWEN.parameter_shapes(0)
    flat = 0.2 * randn(QWEN.params(0), dtype=torch.float32)
    params = views(flat, shapes)
    params["mlp.gate.weight"].zero_()  # a tie: the same two for every token
    block = templates(QWEN, seq_len=9, device=CPU, dtype=torch.float32).blocks[QWEN.layer_kind(0)]
    x = randn(1, 9, QWEN.hidden_size, dtype=torch.float32)
    _, saved = autograd.forward(block, params, x)
    grad = torch.full_like(flat, float("nan"))
    autograd.backward(saved, params, x, torch.ones_like(x), sinks(grad, shapes, accumulate=False))
    per_expert = views(grad, shapes)["mlp.experts.down_proj"].abs().amax((1, 2))
    assert (per_expert > 0).sum() == 2 and (per_expert == 0).sum() == 6


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_comes_to_its_slab_some_columns_at_a_time(
    name: str, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]
    shapes, flat = model.parameter_shapes(0), 0.2 * randn(model.params(0), dtype=torch.float32)
    block = templates(model, seq_len=9, device=CPU, dtype=torch.float32).blocks[model.layer_kind(0)]
    x, dy = (randn(1, 9, model.hidden_size, seed=seed, dtype=torch.float32) for seed in (1, 2))
    largest, made = 0, experts._outer_products

    def told(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        nonlocal largest
        found = made(a, b, ends)
        largest = max(largest, found.numel())
        return found

    def gradient() -> Tensor:
        grad = torch.ones_like(flat)
        _, saved = autograd.forward(block, views(flat, shapes), x)
        autograd.backward(saved, views(flat, shapes), x, dy, sinks(grad, shapes, accumulate=accumulate))
        return grad

    whole = gradient()
    monkeypatch.setattr(experts, "_outer_products", told)
    monkeypatch.setattr(experts, "ALIGNED", 4)
    monkeypatch.setattr(experts, "EXPERTS_CHUNK", 3 * 4 * model.num_experts * model.hidden_size)
    torch.testing.assert_close(gradient(), whole)
    assert 0 < largest <= experts.EXPERTS_CHUNK < model.num_experts * model.hidden_size * model.moe_intermediate_size


# ---- what lies between


def test_the_clamped_activation_has_the_gradient_of_its_definition() -> None:
    both = torch.tensor([[-9.0, 0.5, 9.0, -8.0, 1.5, 9.0, 0.1, -0.3]], dtype=torch.float64, requires_grad=True)

    def definition(t: Tensor) -> Tensor:
        gate, up = t[..., ::2].clamp(max=7), t[..., 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    dy = randn(1, 4)
    torch.testing.assert_close(clamped_forward(both), definition(both))
    (right,) = torch.autograd.grad(definition(both), both, dy)
    found = clamped_backward(dy, both)
    torch.testing.assert_close(found, right)
    assert [bool(g == 0) for g in found[0]] == [False, False, True, True, False, True, False, False]


@pytest.mark.parametrize("name", MODELS)
def test_compiled_experts_compute_as_plain_ones(name: str) -> None:
    model = MODELS[name]
    shapes, x = model.parameter_shapes(0), randn(12, model.hidden_size, dtype=torch.float32)
    params = views(0.3 * randn(model.params(0), dtype=torch.float32), shapes)
    results = []
    for pointwise in (PLAIN, compiled("aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, *params.values())]
        mixture = Mixture(
            chosen=2,
            normalised=True,
            interleaved=name == "gpt-oss",
            in_out=name == "gpt-oss",
            router=model.experts.router,
            pointwise=pointwise,
        )
        y = mixture.forward(dict(zip(params, leaves[1:], strict=True)), leaves[0], autograd.again)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
        results.append([y, *(g for g in grads if g is not None)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_differs_where_copies_and_gates_are_made_again(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    shapes, x = model.parameter_shapes(0), randn(2, 16, model.hidden_size, dtype=torch.float32).to(dtype)
    flat = (0.2 * randn(model.params(0), dtype=torch.float32)).to(dtype)
    results = []
    for again in (False, True):
        layers = templates(model, seq_len=16, device=CPU, dtype=dtype, pointwise_again=again)
        y, saved = autograd.forward(layers.blocks[model.layer_kind(0)], views(flat, shapes), x)
        work = Workload(
            micro_batch_size=2, seq_len=16, precision="fp32" if dtype == torch.float32 else "bf16",
            recompute="pointwise" if again else "none",
        )  # fmt: skip
        assert saved.nbytes == saved_bytes(model, 0, work)
        grad = torch.full_like(flat, float("nan"))
        dx = autograd.backward(saved, views(flat, shapes), x, x, sinks(grad, shapes, accumulate=False))
        results.append((y, dx, grad))
    assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))


# ---- training by schedule


def workload(**options: Any) -> Workload:
    return Workload(**{"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", **options})


def text(work: Workload) -> ByteText:
    return ByteText(text=read_bytes(standard_library(), 1 << 14), workload=work, seed=5)


def trained_by(schedule: Schedule, debug: Debug) -> tuple[list[float], dict[int, Tensor]]:
    with Trainer(
        verify(schedule), CpuBackend(), text(schedule.workload), HYPER,
        initial=initial.random_parameters(schedule.model, 0), debug=debug,
    ) as trainer:  # fmt: skip
        losses = trainer.run(6)
        return losses, {i: trainer.parameters(i) for i in trained.layers(schedule.model, schedule.workload)}


POLICIES: dict[str, dict[str, Any]] = {
    "resident": {"keep": 2},
    "streamed": {"keep": 1, "offload": 1},
    "megatrain": {},
    "zero3_offload": {"activations": "recompute"},
    "lora_streamed": {"keep": 2, "rank": 4},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recompute", ["none", "pointwise"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_training_by_schedule_is_plain_training(kind: str, name: str, recompute: str) -> None:
    model: ModelSpec = MODELS[kind]
    schedule = policies.build(name, model, workload(accumulation=2, recompute=recompute), ROOM, **POLICIES[name])
    losses, parameters = trained_by(schedule, Debug(poison=False))
    rank = schedule.workload.lora_rank
    right = reference.train(
        model, schedule.workload, text(schedule.workload), HYPER, initial=initial.random_parameters(model, 0),
        adapters=None if rank is None else initial.random_adapters(model, rank, 0), steps=6,
    )  # fmt: skip
    assert losses == pytest.approx(right.losses, rel=1e-6)
    assert rank is not None or losses[-1] < losses[0]  # adapters learn little in six steps
    for i, found in parameters.items():
        assert (found - right.parameters[i]).abs().max() < 5e-6 * right.parameters[i].abs().max(), i
    poisoned, _ = trained_by(schedule, Debug(poison=True, delay_s=2e-4))
    assert poisoned == losses


# ---- on a GPU, as far as shapes and types tell


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b"])
def test_a_gpus_products_take_these_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: experts.HOPPER)
    model = presets.load(name)
    with torch.no_grad(), FakeTensorMode():
        ends = torch.empty(model.num_experts, device="cuda", dtype=torch.int32)
        for matrix in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            stored = torch.empty(model.parameter_shapes(0)[matrix], device="cuda", dtype=torch.bfloat16)
            a, b = (torch.empty(1001, n, device="cuda", dtype=torch.bfloat16) for n in stored.shape[1:])
            assert _products(a, stored, ends).shape == b.shape
            assert _products(b, stored.transpose(1, 2), ends).shape == a.shape
            assert _outer_products(a, b, ends).shape == stored.shape
            for columns in _some_columns(stored):
                some = b.narrow(1, columns.start, columns.stop - columns.start)
                assert _outer_products(a, some, ends).shape == (*stored.shape[:2], some.shape[1])


class ToldWindows(TorchDispatchMode):
    """The keys before a query's own, and after it, that every call of flash attention is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_flash_attention" in func.name():
            self.sides.append((kwargs["window_size_left"], kwargs["window_size_right"]))
        return func(*args, **kwargs or {})


def test_a_gpus_attention_takes_windows() -> None:
    with torch.no_grad(), FakeTensorMode(), ToldWindows() as told:
        q, k, v = (torch.empty(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
        for window in (None, 128):
            how = Attention(window=window)
            y, total, *random = _attend(q, k, v, how)
            assert y.shape == q.shape and total.shape == (2, 8, 256) and total.dtype == torch.float32
            grads = _attend_backward(y, q, k, v, y, total, random, how)
            assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert told.sides == [(-1, 0), (-1, 0), (127, 0), (127, 0)]  # a window of 128 has the query's own


def test_a_band_is_what_a_window_sees() -> None:
    mask = band(5, 2, CPU, torch.float32)
    assert [[int(v == 0) for v in row] for row in mask.tolist()] == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert torch.equal(band(5, None, CPU, torch.float32) == 0, torch.ones(5, 5).tril().bool())


def test_a_sink_that_outweighs_all_keys_leaves_nothing() -> None:
    q, k, v = (randn(1, 4, heads, 8, seed=heads) for heads in (4, 2, 2))
    none, all_of_it = torch.full((4,), -1e4).double(), torch.full((4,), 1e4).double()
    attention = Attention(mask=band(4, None, CPU, torch.float64))
    plain = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attention.forward(q, k, v, none), plain)
    assert attention.forward(q, k, v, all_of_it).abs().max() == 0


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    products = torch.ones(4, 2, 3)
    products[0] = products[2] = torch.nan
    found = experts._zero_without_rows(products, torch.tensor([0, 5, 5, 6], dtype=torch.int32))
    assert found.isfinite().all() and found.sum((1, 2)).tolist() == [0.0, 6.0, 0.0, 6.0]

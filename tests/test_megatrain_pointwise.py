"""Compiled or not, a layer trains the same and keeps the same."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import pointwise as parts
from megatrain.autograd import backward, forward
from megatrain.pointwise import FUSED, PLAIN, Pointwise, _compiled, compiled, rotation
from megatrain.template import sinks, templates, views
from schedules import recurrence
from schedules.model import ModelSpec
from schedules.op import Phase
from schedules.saved import saved_bytes
from schedules.traffic import pointwise_bytes
from schedules.workload import Workload

MODEL = ModelSpec(
    name="tiny",
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    qk_norm=True,
)
WORKLOAD = Workload(micro_batch_size=2, seq_len=8, precision="fp32")


def results(pointwise: Pointwise, model: ModelSpec) -> list[torch.Tensor]:
    """Of a block and the head: outputs, loss, and all gradients."""
    generator = torch.Generator().manual_seed(1)
    layers = templates(model, seq_len=8, device=torch.device("cpu"), dtype=torch.float32, pointwise=pointwise)
    shapes, block = model.parameter_shapes(0), layers.blocks[model.layer_kind(0)]
    flat, x, dy = (torch.randn(n, generator=generator) for n in (model.params(0), 2 * 8 * 24, 2 * 8 * 24))
    x, dy, grad = x.view(2, 8, 24), dy.view(2, 8, 24), torch.empty_like(flat)
    y, saved = forward(block, views(flat, shapes), x)
    assert saved.nbytes == saved_bytes(model, 0, WORKLOAD)
    dx = backward(saved, views(flat, shapes), x, dy, sinks(grad, shapes, accumulate=False))
    head = model.parameter_shapes(model.head)
    flat = torch.randn(model.params(model.head), generator=generator)
    weights, head_grad, d_hidden = views(flat, head), torch.empty_like(flat), torch.empty_like(x)
    into = sinks(head_grad, head, accumulate=False)
    loss = layers.head.loss_and_grads(
        weights["norm.weight"],
        weights["lm_head.weight"],
        x,
        torch.arange(16).view(2, 8),
        torch.full((2, 8), 1 / 16),
        d_hidden=d_hidden,
        norm_sink=into["norm.weight"],
        table_sink=into["lm_head.weight"],
        chunk=5,
    )
    return [y, dx, grad, loss, head_grad, d_hidden]


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        dataclasses.replace(MODEL, partial_rotary_factor=0.7),
        dataclasses.replace(MODEL, post_norm=True, zero_centered_norms=True, hidden_act="gelu_pytorch_tanh"),
    ],
    ids=["plain", "part of a head turned", "gemma3"],
)
def test_compiled_layers_train_as_plain_ones(model: ModelSpec) -> None:
    for found, right in zip(results(compiled("aot_eager"), model), results(PLAIN, model), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
@pytest.mark.parametrize(
    ("name", "anywhere", "of_rows"),
    [
        ("halves_backward", [], [(3,), (6,)]),
        ("clamped_forward", [], [(6,)]),
        ("clamped_backward", [], [(3,), (6,)]),
        ("weighted_sum", [(22, 3)], [(2,), (2,)]),
        ("weights_backward", [(22, 3)], [(2,), (3,)]),
    ],
)
def test_some_rows_at_a_time_give_what_all_do(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    name: str,
    anywhere: list[tuple[int, ...]],
    of_rows: list[tuple[int, ...]],
) -> None:
    args = [torch.randn(shape) for shape in (*anywhere, *((rows, *shape) for shape in of_rows))]
    if anywhere:
        args[1] = torch.randint(22, (rows, 2))
    monkeypatch.setattr(parts, "ROWS", 4)
    assert getattr(PLAIN, name) is not getattr(FUSED, name)
    torch.testing.assert_close(getattr(PLAIN, name)(*args), getattr(FUSED, name)(*args))


@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
@pytest.mark.parametrize(("name", "weight"), [("gated_norm_backward", (6,)), ("norm_of_gated_backward", (2, 6))])
def test_some_tokens_of_a_gated_norm_at_a_time_give_what_all_do(
    monkeypatch: pytest.MonkeyPatch, name: str, weight: tuple[int, ...], tokens: int
) -> None:
    shapes = *((3, tokens, 2, 6) for _ in range(3)), weight, (3, tokens, 2, 1)
    args = [torch.randn(shape) for shape in shapes]
    right = getattr(FUSED, name)(*args)
    monkeypatch.setattr(recurrence, "AT_ONCE", 4 * 2 * 6)
    assert getattr(PLAIN, name) is not getattr(FUSED, name)
    for ours, theirs in zip(getattr(PLAIN, name)(*args), right, strict=True):
        torch.testing.assert_close(ours, theirs)


class Traffic(TorchDispatchMode):
    """Bytes of large tensors that functions between products, and sums outside of them, read and write."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.nbytes, self.inside = smallest, 0, False
        self.pointwise = Pointwise(**{f.name: self.counting(getattr(FUSED, f.name)) for f in dataclasses.fields(FUSED)})

    def add(self, *tensors: Any) -> None:
        self.nbytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.numel() >= self.smallest)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.inside = True
            found = function(*args)
            self.inside = False
            self.add(*args, *(found if isinstance(found, tuple) else [found]))
            return found

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if not self.inside and func.overloadpacket in (aten.add, aten.add_, aten.mul, aten.mul_, aten.copy_):
            self.add(*(args[1:] if func.overloadpacket == aten.copy_ else args), found)
        if not self.inside and func.overloadpacket == aten.stack and len(args[0]) == 2:  # queries' gradient, its gate's
            self.add(*args[0], found)
        return found

    def of(self, work: Callable[[], Any]) -> tuple[Any, int]:
        self.nbytes = 0
        with self:
            found = work()
        return found, self.nbytes


EXPERTS = dataclasses.replace(
    MODEL, qk_norm=False, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
)


APART = dataclasses.replace(MODEL, mlp_layer_types=("dense",), gated_mlp=False, hidden_act="relu2")
BESIDE_MLP = dataclasses.replace(
    EXPERTS, architecture="Gemma4ForCausalLM", n_shared_experts=2, intermediate_size=80, post_norm=True
)

WEIGHTED = dataclasses.replace(
    EXPERTS, architecture="Llama4ForCausalLM", n_shared_experts=1, sigmoid_router=True, norm_topk_prob=False
)


@pytest.mark.parametrize("recompute", ["none", "pointwise"])
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        dataclasses.replace(MODEL, qk_norm=False),
        dataclasses.replace(MODEL, qk_norm_all_heads=True),
        dataclasses.replace(MODEL, no_rope_layers=(0,)),
        dataclasses.replace(MODEL, pre_norm=False, post_norm=True),
        dataclasses.replace(MODEL, post_norm=True),
        EXPERTS,
        dataclasses.replace(EXPERTS, n_shared_experts=1),
        dataclasses.replace(EXPERTS, n_shared_experts=2, shared_expert_gate=True),
        dataclasses.replace(MODEL, attn_output_gate=True),
        dataclasses.replace(MODEL, attn_gate_proj=True),
        dataclasses.replace(MODEL, qk_norm=False, unit_qk_norm=True),
        WEIGHTED,
        dataclasses.replace(MODEL, value_norm=True),
        dataclasses.replace(MODEL, layer_scalar=True),
        BESIDE_MLP,
        APART,
        dataclasses.replace(APART, mlp_layer_types=("none",)),
        dataclasses.replace(APART, layer_types=("none",)),
        dataclasses.replace(
            EXPERTS,
            n_shared_experts=1,
            moe_latent_size=32,
            mlp_layer_types=("sparse",),
            gated_mlp=False,
            hidden_act="relu2",
        ),
    ],
    ids=[
        "qk_norm",
        "plain",
        "qk_norm of all heads",
        "no rope",
        "norms after",
        "norms before and after",
        "experts",
        "shared experts",
        "shared experts with a gate",
        "gated attention",
        "gated by a projection of its own",
        "norms of heads without weights",
        "experts whose inputs are weighted",
        "values normalised",
        "multiplied",
        "experts beside an MLP",
        "an MLP without a gate",
        "attention alone",
        "an MLP alone",
        "latent experts without gates",
    ],
)
def test_what_is_counted_between_products_is_what_is_read_and_written(model: ModelSpec, recompute: str) -> None:
    workload = dataclasses.replace(WORKLOAD, recompute=recompute)
    tokens, h = workload.tokens_per_microbatch, model.hidden_size
    traffic = Traffic(smallest=tokens * MODEL.heads(0).k_width)
    layers = templates(
        model,
        seq_len=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
        pointwise=traffic.pointwise,
        pointwise_again=recompute == "pointwise",
    )
    shapes, block = model.parameter_shapes(0), layers.blocks[model.layer_kind(0)]
    params, grads = views(torch.randn(model.params(0)), shapes), torch.empty(model.params(0))
    x, dy = torch.randn(2, 8, h), torch.randn(2, 8, h)
    summed = (
        4 * tokens * (1 + model.num_experts_per_tok) * model.expert_input if model.num_experts else 0
    )  # by indexing, as are copies, where their weights do not multiply them
    copied = 0 if model.experts.weights_inputs else summed
    again = copied if recompute == "pointwise" else 0
    (_, saved), there = traffic.of(lambda: forward(block, params, x))
    assert there + copied == pointwise_bytes(model, 0, Phase.FORWARD, workload)
    _, back = traffic.of(lambda: backward(saved, params, x, dy, sinks(grads, shapes, accumulate=False)))
    assert back + summed + again == pointwise_bytes(model, 0, Phase.BACKWARD, workload)


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("pointwise", [FUSED, PLAIN], ids=["fused", "plain"])
def test_loss_and_gradient_of_logits_are_autograds(pointwise: Pointwise, cap: float | None) -> None:
    logits, label = (50 * torch.randn(6, 9)).requires_grad_(), torch.arange(6)[:, None]
    share = torch.tensor([1 / 8, 0, 1 / 8, 1 / 2, 0, 1])
    bent = logits if cap is None else cap * torch.tanh(logits / cap)
    loss = torch.nn.functional.cross_entropy(bent, label[:, 0], reduction="none") @ share
    (right,) = torch.autograd.grad(loss, logits)
    found, gradient = pointwise.cross_entropy(logits.detach().clone(), label, share[:, None], cap)
    torch.testing.assert_close((found, gradient), (loss.detach(), right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_turn_is_the_turn_back_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_()
    cos, sin, dy = (torch.randn(shape).to(dtype) for shape in ((5, 1, 4), (5, 1, 4), (2, 5, 3, 8)))
    (by_autograd,) = torch.autograd.grad(rotation(x, cos, sin), x, dy)
    assert torch.equal(by_autograd, rotation(dy, cos, -sin))


def test_a_stream_of_its_own_thread_compiles_for_every_shape() -> None:
    made: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        made.append(len(inputs))
        return graph.forward

    function = _compiled(lambda x: x * 2, counting)
    thread = threading.Thread(target=lambda: [function(torch.ones(n)) for n in range(2, 22)])
    thread.start()
    thread.join()
    assert len(made) == 20

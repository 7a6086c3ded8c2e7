"""Compiled or not, a layer trains the same and keeps the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.autograd import backward, forward
from megatrain.pointwise import PLAIN, Pointwise, _compiled, compiled, rotation
from megatrain.template import sinks, templates, views
from schedules.model import ModelSpec
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


def results(pointwise: Pointwise) -> list[torch.Tensor]:
    """Of a block and the head: outputs, loss, and all gradients."""
    generator = torch.Generator().manual_seed(1)
    layers = templates(MODEL, seq_len=8, device=torch.device("cpu"), dtype=torch.float32, pointwise=pointwise)
    shapes, block = MODEL.parameter_shapes(0), layers.blocks[MODEL.layer_kind(0)]
    flat, x, dy = (torch.randn(n, generator=generator) for n in (MODEL.params(0), 2 * 8 * 24, 2 * 8 * 24))
    x, dy, grad = x.view(2, 8, 24), dy.view(2, 8, 24), torch.empty_like(flat)
    y, saved = forward(block, views(flat, shapes), x)
    assert saved.nbytes == MODEL.saved_bytes(0, WORKLOAD)
    dx = backward(saved, views(flat, shapes), x, dy, sinks(grad, shapes, accumulate=False))
    head = MODEL.parameter_shapes(MODEL.head)
    flat = torch.randn(MODEL.params(MODEL.head), generator=generator)
    weights, head_grad, d_hidden = views(flat, head), torch.empty_like(flat), torch.empty_like(x)
    into = sinks(head_grad, head, accumulate=False)
    loss = layers.head.loss_and_grads(
        weights["norm.weight"],
        weights["lm_head.weight"],
        x,
        torch.arange(16).view(2, 8),
        total_tokens=16,
        d_hidden=d_hidden,
        norm_sink=into["norm.weight"],
        table_sink=into["lm_head.weight"],
        chunk=5,
    )
    return [y, dx, grad, loss, head_grad, d_hidden]


def test_compiled_layers_train_as_plain_ones() -> None:
    for found, right in zip(results(compiled("aot_eager")), results(PLAIN), strict=True):
        torch.testing.assert_close(found, right)


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

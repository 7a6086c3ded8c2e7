"""Late-bound weights: the bits of plain autograd, whatever became of the buffers since forward."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from megatrain.autograd import SavedError, backward, forward
from megatrain.sink import Sink
from megatrain.template import sinks, templates, views
from schedules.model import ModelSpec
from schedules.saved import saved_bytes
from schedules.workload import Workload

TINY = ModelSpec(
    name="tiny",
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
CPU = torch.device("cpu")
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "llama": TINY,
    "qwen2": dataclasses.replace(TINY, attention_bias=True),
    "qwen3": dataclasses.replace(TINY, qk_norm=True),
    "biases": dataclasses.replace(TINY, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "multi-head": dataclasses.replace(TINY, num_key_value_heads=4),
    "mixtral": dataclasses.replace(TINY, **EXPERTS),
    "gpt-oss": dataclasses.replace(
        TINY, **EXPERTS, architecture="GptOssForCausalLM", router_bias=True, expert_bias=True, attention_sinks=True
    ),
    "a window": dataclasses.replace(TINY, sliding_window=3),
}
MODEL_AND_DTYPE = [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]


def case(model, dtype=torch.float32, batch=2, seq=5):
    """A block, its slab, an input, an output gradient, and what plain autograd says of them."""
    generator = torch.Generator().manual_seed(0)
    block = templates(model, seq_len=seq, device=CPU, dtype=dtype).blocks[model.layer_kind(0)]
    flat = (torch.randn(model.params(0), generator=generator) * 0.3).to(dtype)
    x = torch.randn(batch, seq, model.hidden_size, generator=generator).to(dtype)
    dy = torch.randn(batch, seq, model.hidden_size, generator=generator).to(dtype)
    leaves = {n: p.detach().requires_grad_() for n, p in views(flat, model.parameter_shapes(0)).items()}
    leaf = x.clone().requires_grad_()
    y = block.forward(leaves, leaf)
    dx, *grads = torch.autograd.grad(y, [leaf, *leaves.values()], dy)
    return block, flat, x, dy, y.detach(), dx, torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize(("name", "dtype"), MODEL_AND_DTYPE)
def test_weights_and_input_may_move_and_their_old_buffers_be_poisoned(name, dtype):
    model = MODELS[name]
    shapes = model.parameter_shapes(0)
    block, flat, x, dy, y, dx, grads = case(model, dtype)
    # as slots are aligned: a product of matrices may round otherwise where it is not
    slot, elsewhere = flat.clone(), torch.full((flat.numel() + 32,), math.nan, dtype=dtype)
    x_buffer, x_elsewhere = x.clone(), torch.full_like(x, math.nan)
    out, saved = forward(block, views(slot, shapes), x_buffer)
    assert torch.equal(out, y) and not out.requires_grad

    elsewhere[32:] = slot
    x_elsewhere.copy_(x_buffer)
    slot.fill_(math.nan)
    x_buffer.fill_(math.nan)
    out.fill_(math.nan)
    slab = torch.full_like(flat, math.nan)
    params = views(elsewhere[32:], shapes)
    got = backward(saved, params, x_elsewhere, dy, sinks(slab, shapes, accumulate=False))
    assert torch.equal(got, dx)
    assert torch.equal(slab, grads)


def test_one_arena_for_all_buffers_is_told_apart_by_address():
    shapes = TINY.parameter_shapes(0)
    block, flat, x, dy, y, dx, grads = case(TINY)
    arena = torch.full((2 * flat.numel() + 2 * x.numel(),), math.nan)
    first, second, a, b = arena.split([flat.numel(), flat.numel(), x.numel(), x.numel()])
    first.copy_(flat)
    a.copy_(x.flatten())
    out, saved = forward(block, views(first, shapes), a.view_as(x))
    second.copy_(first)
    b.copy_(a)
    first.fill_(math.nan)
    a.fill_(math.nan)
    slab = torch.ones_like(flat)
    assert torch.equal(out, y)
    got = backward(saved, views(second, shapes), b.view_as(x), dy, sinks(slab, shapes, accumulate=True))
    assert torch.equal(got, dx)
    assert torch.equal(slab, grads + 1)
    assert saved.nbytes < arena.nbytes


@pytest.mark.parametrize(("name", "dtype"), MODEL_AND_DTYPE)
@pytest.mark.parametrize("seq", [5, 16])
def test_saved_bytes_are_the_models_formula(name, dtype, seq):
    model = MODELS[name]
    block, flat, x, *_ = case(model, dtype, seq=seq)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    workload = Workload(micro_batch_size=2, seq_len=seq, precision=precision)
    _, saved = forward(block, views(flat, model.parameter_shapes(0)), x)
    assert saved.nbytes == saved_bytes(model, 0, workload)
    assert saved.nbytes == sum(t.nbytes for t in saved.tensors)


@pytest.mark.parametrize(("name", "dtype"), MODEL_AND_DTYPE)
def test_activations_survive_a_trip_to_the_host(name, dtype):
    model = MODELS[name]
    shapes = model.parameter_shapes(0)
    block, flat, x, dy, _, dx, grads = case(model, dtype, batch=1, seq=5)
    _, saved = forward(block, views(flat, shapes), x)
    host = torch.empty(saved.nbytes, dtype=torch.uint8)
    saved.copy_to(host)
    saved.poison()
    saved.drop()
    assert saved.tensors == ()
    slot = torch.cat([host, torch.zeros(64, dtype=torch.uint8)])  # a slot may be larger
    host.fill_(0xFF)
    saved.bind(slot)
    slab = torch.empty_like(flat)
    assert torch.equal(backward(saved, views(flat, shapes), x, dy, sinks(slab, shapes, accumulate=False)), dx)
    assert torch.equal(slab, grads)


class Uneven:
    """Keeps 21 bytes (which inputs are not negative) and, smaller but of a wider type, three numbers."""

    constants = ()

    def forward(self, params, x, *, output=True):
        return torch.where(x < 0, -x, x) + x[:, :, :1].exp()


def test_parts_of_any_size_lie_where_their_types_can():
    x, dy = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0)), torch.ones(1, 3, 7)
    _, saved = forward(Uneven(), {}, x)
    assert sorted(t.nbytes for t in saved.tensors) == [12, 21]
    host = torch.empty(saved.nbytes, dtype=torch.uint8)
    saved.copy_to(host)
    saved.drop()
    saved.bind(host)
    leaf = x.clone().requires_grad_()
    Uneven().forward({}, leaf).backward(dy)
    assert torch.equal(backward(saved, {}, x, dy, {}), leaf.grad)


def test_poison_is_seen():
    block, flat, x, dy, *_ = case(TINY, torch.bfloat16)
    params = views(flat, TINY.parameter_shapes(0))
    _, saved = forward(block, params, x)
    saved.poison()
    assert all(t.view(torch.bfloat16).isnan().all() for t in saved.tensors)
    assert backward(saved, params, x, dy, {}).isnan().any()


def test_activations_are_used_once_and_only_where_they_are():
    block, flat, x, dy, *_ = case(TINY)
    params = views(flat, TINY.parameter_shapes(0))
    _, saved = forward(block, params, x)
    with pytest.raises(SavedError, match="cannot hold"):
        saved.copy_to(torch.empty(saved.nbytes - 1, dtype=torch.uint8))
    with pytest.raises(SavedError, match="flat byte buffers"):
        saved.copy_to(torch.empty(saved.nbytes))
    host = torch.empty(saved.nbytes, dtype=torch.uint8)
    saved.copy_to(host)
    saved.drop()
    with pytest.raises(SavedError, match="not on the device"):
        saved.copy_to(host)
    with pytest.raises(SavedError, match="not on the device"):
        backward(saved, params, x, dy, {})
    _, saved = forward(block, params, x)
    backward(saved, params, x, dy, {})
    with pytest.raises(SavedError, match="used by a backward before"):
        backward(saved, params, x, dy, {})


def test_a_copy_under_way_has_all_it_began_with(monkeypatch):
    """Another stream's backward lets go of activations while they are copied: the copy is whole, or is refused."""
    block, flat, x, *_ = case(TINY)
    _, saved = forward(block, views(flat, TINY.parameter_shapes(0)), x)
    whole, host = (torch.empty(saved.nbytes, dtype=torch.uint8) for _ in range(2))
    saved.copy_to(whole)
    parts = saved._parts
    monkeypatch.setattr(saved, "_parts", lambda buffer: saved.drop() or parts(buffer))
    saved.copy_to(host)
    assert torch.equal(host, whole)
    with pytest.raises(SavedError, match="not on the device"):
        saved.copy_to(host)


def test_what_cannot_be_found_again_is_refused():
    block, flat, *_ = case(TINY)
    params = views(flat, TINY.parameter_shapes(0))
    with pytest.raises(SavedError, match="<input> is not contiguous"):
        forward(block, params, torch.randn(5, 2, 24).transpose(0, 1))


def test_activations_are_freed_with_their_owner():
    block, flat, x, dy, *_ = case(TINY)
    params = views(flat, TINY.parameter_shapes(0))
    gc.disable()  # reference counts alone must do it
    try:
        _, saved = forward(block, params, x)
        watched = [weakref.ref(t) for t in saved.tensors]
        assert watched
        del saved
        assert not any(ref() is not None for ref in watched)
        _, saved = forward(block, params, x)
        watched = [weakref.ref(t) for t in saved.tensors]
        backward(saved, params, x, dy, {})
        assert not any(ref() is not None for ref in watched)
    finally:
        gc.enable()


class Functional:
    """An ordinary module in the place of a template, its parameters given at each call."""

    constants = ()

    def __init__(self, module):
        self.module = module

    def forward(self, params, x, *, output=True):
        return torch.func.functional_call(self.module, dict(params), (x,))


def test_an_unmodified_module_fits_the_same_socket():
    with torch.device("meta"):
        meta = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True, norm_first=True)
    shapes = {name: tuple(p.shape) for name, p in meta.named_parameters()}
    count = sum(p.numel() for p in meta.parameters())
    flat = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.3
    x, dy = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    leaves = {n: p.detach().requires_grad_() for n, p in views(flat, shapes).items()}
    leaf = x.clone().requires_grad_()
    dx, *grads = torch.autograd.grad(Functional(meta).forward(leaves, leaf), [leaf, *leaves.values()], dy)

    slot = flat.clone()
    _, saved = forward(Functional(meta), views(slot, shapes), x)
    slot.fill_(math.nan)
    slab = torch.full_like(flat, math.nan)
    got = backward(saved, views(flat, shapes), x, dy, sinks(slab, shapes, accumulate=False))
    assert torch.equal(got, dx)
    assert torch.equal(slab, torch.cat([g.flatten() for g in grads]))


def test_a_parameter_that_the_output_ignores_has_gradient_zero():
    class Half:
        constants = ()

        def forward(self, params, x, *, output=True):
            return x * params["used"]

    params = {"used": torch.full((3,), 2.0), "unused": torch.ones(3)}
    x = torch.arange(6.0).view(2, 3)
    for accumulate, expected in ((False, 0.0), (True, 7.0)):
        slabs = {name: torch.full((3,), 7.0) for name in params}
        _, saved = forward(Half(), params, x)
        assert saved.nbytes == 0
        places = {name: Sink(slab, accumulate) for name, slab in slabs.items()}
        assert torch.equal(backward(saved, params, x, torch.ones(2, 3), places), torch.full((2, 3), 2.0))
        assert slabs["unused"].tolist() == [expected] * 3
        assert slabs["used"].tolist() == [3.0 + expected, 5.0 + expected, 7.0 + expected]


def test_gradients_go_to_wider_buffers():
    shapes = TINY.parameter_shapes(0)
    block, flat, x, dy, _, _, grads = case(TINY, torch.bfloat16)
    _, saved = forward(block, views(flat, shapes), x)
    slab = torch.zeros(flat.shape, dtype=torch.float32)
    backward(saved, views(flat, shapes), x, dy, sinks(slab, shapes, accumulate=True))
    assert torch.equal(slab, grads.float())


def test_activations_come_back_into_the_memory_they_left() -> None:
    """What a stream may still read or write is not given to the allocator in between."""
    model = TINY
    shapes, flat = model.parameter_shapes(0), torch.randn(model.params(0))
    block = templates(model, seq_len=8, device=torch.device("cpu"), dtype=torch.float32).blocks[model.layer_kind(0)]
    x = torch.randn(1, 8, model.hidden_size)
    _, saved = forward(block, views(flat, shapes), x)
    memory, host = saved.tensors, torch.empty(saved.nbytes, dtype=torch.uint8)
    before = [part.clone() for part in memory]
    saved.copy_to(host)
    saved.poison()
    saved.drop()
    assert not saved.restore(host, memory[:-1])
    assert saved.restore(host, memory)
    assert [part.data_ptr() for part in saved.tensors] == [part.data_ptr() for part in memory]
    assert all(torch.equal(*pair) for pair in zip(saved.tensors, before, strict=True))

"""Linear attention by the gated delta rule, token by token; what a block of it keeps and moves; gated attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bytes_moved import seen
from families import KIMI_LINEAR, MODELS, QWEN3_5
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.delta import _inverse, _Rule
from megatrain.initial import random_parameters, repeated_parameters
from megatrain.layer_parts import opened, weighed
from megatrain.pointwise import PLAIN, Pointwise, compiled
from megatrain.recurrence import Gated, precision
from megatrain.recurrence_parts import chunked, tokens
from megatrain.template import templates, views
from schedules import fp8, presets, recurrence
from schedules.delta import DeltaNet
from schedules.flops import attention_flops, forward_flops
from schedules.kimi_delta import KimiDelta
from schedules.model import ModelError, ModelSpec
from schedules.op import Phase
from schedules.optimizer import matrices
from schedules.parameters import is_matrix
from schedules.recurrence import CHUNK
from schedules.saved import saved_bytes
from schedules.traffic import pointwise_bytes, product_bytes
from schedules.workload import Workload
from schedules.workspace import workspace_bytes

CPU = torch.device("cpu")
WIDTHS = DeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=5, kernel=4)
BY_CHANNEL = KimiDelta(key_heads=2, value_heads=2, key_dim=6, value_dim=6, kernel=4)
OF_BOTH = pytest.mark.parametrize("widths", [WIDTHS, BY_CHANNEL], ids=["by head", "by channel"])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def given_to(widths: DeltaNet, batch: int, seq: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """mixed, b, a, taps, rates and biases."""
    heads, decays = widths.value_heads, channels(widths) * widths.value_heads
    taps = (widths.mixed, 1, widths.kernel)
    shapes = ((batch, seq, widths.mixed), (batch, seq, heads), (batch, seq, decays), taps, (heads,), (decays,))
    return [randn(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def channels(widths: DeltaNet) -> int:
    """Of a head, those that decay apart."""
    return widths.key_dim if isinstance(widths, KimiDelta) else 1


def rule(widths: DeltaNet, of: list[Tensor], pointwise: Pointwise = PLAIN) -> Tensor:
    mixed, b, a, taps, *own = of
    found: Tensor = _Rule.apply(widths, pointwise, b, a, *own, taps, mixed)
    return found


def token_by_token(widths: DeltaNet, of: list[Tensor]) -> Tensor:
    """As the module's docstring has it, with torch's own convolution."""
    mixed, b, a, taps, rate, bias = of
    seq = mixed.shape[1]
    convolved = F.conv1d(mixed.mT, taps, padding=widths.kernel - 1, groups=widths.mixed)[..., :seq]
    parts = F.silu(convolved).mT.split([widths.key_width, widths.key_width, widths.value_width], dim=-1)
    dims = (widths.key_dim, widths.key_dim, widths.value_dim)
    q, k, v = (torch.unflatten(t, -1, (-1, dim)) for t, dim in zip(parts, dims, strict=True))
    q, k = (
        (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(v.shape[2] // t.shape[2], dim=2)
        for t in (q, k)
    )
    softened = torch.unflatten(F.softplus(a + bias), -1, (widths.value_heads, -1))
    decay, beta = (-rate.exp()[:, None] * softened).exp(), b.sigmoid()
    state, found = mixed.new_zeros(len(mixed), widths.value_heads, widths.key_dim, widths.value_dim), []
    for t in range(seq):
        state = state * decay[:, t, :, :, None]
        returned = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - returned))
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / widths.key_dim**0.5)
    return torch.stack(found, 1).flatten(2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pointwise", [PLAIN, compiled("aot_eager")], ids=["plain", "compiled"])
@pytest.mark.parametrize("seq", [1, 3, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
@OF_BOTH
def test_chunks_are_the_rule_token_by_token_and_so_are_gradients(
    widths: DeltaNet, seq: int, pointwise: Pointwise
) -> None:
    of = given_to(widths, 2, seq)
    found, right = rule(widths, of, pointwise), token_by_token(widths, of)
    torch.testing.assert_close(found, right)
    dy = randn(*right.shape, seed=9)
    for ours, theirs in zip(*(torch.autograd.grad(y, of, dy) for y in (found, right)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_channels_of_one_head_may_forget_at_once_or_never() -> None:
    """By e^-500 a token, which no exponent of a sum of decays would survive, beside 1 - e^-40."""
    of = given_to(BY_CHANNEL, 1, 2 * CHUNK)
    of[2] = torch.where(randn(*of[2].shape, seed=7) > 0, 100.0, -40.0).requires_grad_()
    found, right = rule(BY_CHANNEL, of), token_by_token(BY_CHANNEL, of)
    torch.testing.assert_close(found, right)
    dy = randn(*right.shape, seed=9)
    for ours, theirs in zip(*(torch.autograd.grad(y, of, dy) for y in (found, right)), strict=True):
        torch.testing.assert_close(ours, theirs)


@given(
    widths=st.sampled_from([WIDTHS, BY_CHANNEL]),
    seq=st.integers(2, 200),
    at=st.integers(0, 198),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_no_token_sees_a_later_one(widths: DeltaNet, seq: int, at: int, seed: int) -> None:
    at = min(at, seq - 1)
    before = given_to(widths, 1, seq)
    after = [t.detach().clone() for t in before]
    for t in after[:3]:
        t[:, at:] = randn(*t[:, at:].shape, seed=seed)
    first, second = (rule(widths, of)[:, :at] for of in (before, after))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("at_once", "together"), [(1 << 25, (3, 2)), (2, (2, 2)), (0, (1, 1))])
@OF_BOTH
def test_some_sequences_or_heads_at_a_time_are_all_at_once(
    widths: DeltaNet, at_once: int, together: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = given_to(widths, 3, 70)
    right = rule(widths, of)
    expected = torch.autograd.grad(right, of, torch.ones_like(right))
    monkeypatch.setattr(recurrence, "AT_ONCE", at_once * 70 * widths.value_width if at_once < 3 else at_once)
    assert widths.together(3, 70) == together
    found = rule(widths, of)
    torch.testing.assert_close(found, right)
    for ours, theirs in zip(torch.autograd.grad(found, of, torch.ones_like(found)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@given(seed=st.integers(0, 99), alike=st.booleans())
@settings(max_examples=20)
def test_the_inverse_is_one_even_where_all_keys_are_alike(seed: int, alike: bool) -> None:
    system = randn(2, 3, CHUNK, CHUNK, seed=seed, dtype=torch.float32) / 8
    if alike:  # with betas of one and no decay; its powers grow to 10^17
        system = torch.ones_like(system)
    system = system.tril(-1)
    product = (system.double() + torch.eye(CHUNK)) @ _inverse(system).double()
    torch.testing.assert_close(product, torch.eye(CHUNK).double().expand_as(product), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4])
@OF_BOTH
def test_no_size_of_what_is_given_ends_in_no_number(widths: DeltaNet, size: float) -> None:
    of = [(t.detach().float() * size).requires_grad_() for t in given_to(widths, 1, 130)]
    of[4:] = [t.detach().clamp(max=5.0).requires_grad_() for t in of[4:]]  # a rate is an exponent
    found = rule(widths, of)
    grads = torch.autograd.grad(found.sum(), of)
    assert all(t.isfinite().all() for t in (found, *grads))


@OF_BOTH
def test_in_bf16_all_but_what_is_given_and_returned_is_wide(widths: DeltaNet) -> None:
    of = [t.detach().bfloat16().requires_grad_() for t in given_to(widths, 2, 200)]
    exact = [t.detach().double().requires_grad_() for t in of]
    found, right = rule(widths, of), rule(widths, exact)
    dy = randn(*right.shape, seed=9).bfloat16()
    ours_all = found, *torch.autograd.grad(found, of, dy)
    for ours, theirs in zip(ours_all, (right, *torch.autograd.grad(right, exact, dy.double())), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 0.003 * theirs.norm()


@given(seq=st.integers(1, 150), batch=st.integers(1, 3), heads=st.integers(1, 3))
@settings(max_examples=20)
def test_tokens_go_into_chunks_and_back(seq: int, batch: int, heads: int) -> None:
    x = randn(batch, seq, heads, 2)
    found = chunked(x)
    assert found.shape == (math.ceil(seq / CHUNK), batch * heads, CHUNK, 2) and found.is_contiguous()
    assert torch.equal(tokens(found, batch, seq), x)
    assert found.count_nonzero() == x.count_nonzero()


@pytest.mark.parametrize("pointwise", [PLAIN, compiled("aot_eager")], ids=["plain", "compiled"])
def test_gradients_of_gates_are_those_of_what_was_computed(pointwise: Pointwise) -> None:
    o, z, weight = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(2, 3, 2, 4)] * 2 + [(4,)]))
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6) * weight
    for norm, gate in (
        ((pointwise.gated_norm_forward, pointwise.gated_norm_backward), F.silu),
        ((pointwise.opened_norm_forward, pointwise.opened_norm_backward), torch.sigmoid),
    ):
        assert torch.autograd.gradcheck(lambda *of, norm=norm: Gated.apply(*of, 1e-6, *norm), (o, z, weight))
        torch.testing.assert_close(Gated.apply(o, z, weight, 1e-6, *norm), normed * gate(z))
    assert torch.autograd.gradcheck(lambda y, gate: opened(y, gate, pointwise), (o, z))
    torch.testing.assert_close(opened(o, z, pointwise), o * z.sigmoid())
    share = randn(2, 3, 2, 1, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda y, share: weighed(y, share, pointwise), (o, share))
    torch.testing.assert_close(weighed(o, share, pointwise), o * share.sigmoid())


# ---- what is counted, of a Qwen3.5-0.8B

H, F_MLP, KEYS, VALUES, HEADS = 1024, 3584, 2048, 2048, 16
MIXED, STATE, PAIRS = 2 * KEYS + VALUES, 16 * 128 * 128 // 64, 16 * 64
Q = 8 * 256
K = 2 * 256


def test_a_block_with_linear_attention_is_counted_by_hand() -> None:
    model, work = presets.load("qwen3.5-0.8b"), Workload(micro_batch_size=3, seq_len=100)
    matrices = H * (MIXED + VALUES + 2 * HEADS) + VALUES * H + 3 * H * F_MLP
    assert model.layer_kind(0) == "block.linear"
    assert model.params(0) == matrices + 4 * MIXED + 2 * HEADS + 128 + 2 * H
    multiplied = 0
    for t in range(100):  # the rule's, of a value head
        before = t % CHUNK
        multiplied += before * (3 * 128) + (before + 1) * (2 * 128) + 3 * 128 * 128
    assert attention_flops(model, 0, work) == 3 * 2 * HEADS * multiplied
    assert forward_flops(model, 0, work) == 2 * 300 * matrices + attention_flops(model, 0, work)
    kept = 3 * H + MIXED + 2 * HEADS + 3 * VALUES + 3 * F_MLP
    assert saved_bytes(model, 0, work) == 300 * (2 * kept + 4 * (2 + HEADS))
    again = dataclasses.replace(work, recompute="pointwise")
    assert saved_bytes(model, 0, work) - saved_bytes(model, 0, again) == 300 * 2 * (VALUES + 2 * H + F_MLP)
    read_and_written = 4 * H + MIXED + 2 * VALUES + 2 * HEADS + H + 3 * H + 3 * F_MLP
    assert product_bytes(model, 0, Phase.FORWARD, work) == 2 * (300 * read_and_written + model.params(0))
    words = 17 * VALUES + 4 * KEYS + 13 * VALUES + 17 * PAIRS + 6 * STATE
    between = 10 * H + MIXED + VALUES + 3 * VALUES + 3 * F_MLP
    assert pointwise_bytes(model, 0, Phase.FORWARD, work) == 300 * (2 * between + 4 * words)
    words = 46 * VALUES + 12 * KEYS + 35 * VALUES + 32 * PAIRS + 17 * STATE
    between = 8 * H + 5 * MIXED + VALUES + 5 * VALUES + 5 * F_MLP
    assert pointwise_bytes(model, 0, Phase.BACKWARD, work) == 300 * (2 * between + 4 * words)


def test_a_block_whose_channels_decay_apart_is_counted_by_hand() -> None:
    model, work = presets.load("kimi-linear-48b-a3b"), Workload(micro_batch_size=3, seq_len=100)
    h, width, f, rank, heads = 2304, 4096, 9216, 128, 32
    attends = 4 * h * width + 2 * (h * rank + rank * width) + h * heads
    assert [model.layer_kind(i) for i in (0, 1, 3)] == ["block.linear.dense", "block.linear", "block.no_rope"]
    assert model.params(0) == attends + 3 * h * f + 3 * 4 * width + heads + width + rank + 2 * h
    assert forward_flops(model, 0, work) == 2 * 300 * (attends + 3 * h * f) + attention_flops(model, 0, work)
    by_head = DeltaNet(key_heads=heads, value_heads=heads, key_dim=128, value_dim=128, kernel=4)
    assert attention_flops(model, 0, work) == 3 * by_head.flops(100), "no pair is multiplied twice"
    kept = 3 * h + 3 * width + width + heads + 2 * rank + 3 * width + 3 * f
    assert saved_bytes(model, 0, work) == 300 * (2 * kept + 4 * (2 + heads))
    pairs, state = heads * 64, heads * 128 * 128 // 64
    words = (25 + 45 + 13) * width + 14 * pairs + 6 * state
    between = 10 * h + 5 * width + 3 * width + 3 * f
    assert pointwise_bytes(model, 0, Phase.FORWARD, work) == 300 * (2 * between + 4 * words)
    unfused = pointwise_bytes(model, 0, Phase.FORWARD, work, fused=False)
    assert unfused > pointwise_bytes(model, 0, Phase.FORWARD, work) + 300 * 4 * (8 + 5 * 6) * width
    words = (80 + 22 * 6 + 35) * width + 20 * pairs + 17 * state
    between = 8 * h + (15 + 4) * width + 5 * width + 5 * f
    assert pointwise_bytes(model, 0, Phase.BACKWARD, work) == 300 * (2 * between + 4 * words)


def test_latent_attention_that_nothing_turns_moves_no_queries() -> None:
    model, work = presets.load("kimi-linear-48b-a3b"), Workload(micro_batch_size=1, seq_len=8)
    turned = dataclasses.replace(model, no_rope_layers=(1,) * 27, linear_channel_decay=False, layer_types=())
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        moved = pointwise_bytes(turned, 3, phase, work) - pointwise_bytes(model, 3, phase, work)
        assert moved == 8 * 2 * 2 * 32 * 192


def test_a_block_with_gated_attention_is_counted_by_hand() -> None:
    model, work = presets.load("qwen3.5-0.8b"), Workload(micro_batch_size=1, seq_len=8)
    matrices = H * (2 * Q + 2 * K) + Q * H + 3 * H * F_MLP
    assert model.layer_kind(3) == "block"
    assert model.params(3) == matrices + 2 * 256 + 2 * H
    assert forward_flops(model, 3, work) == 2 * 8 * matrices + 4 * 36 * Q
    # queries and keys before and after their norm, values, what attention returns, its gate, what that lets through
    kept = 3 * H + 2 * (Q + K) + K + Q + 2 * Q + 3 * F_MLP
    assert saved_bytes(model, 3, work) == 8 * (2 * kept + 4 * (2 + 8 + 8 + 2))
    between = 10 * H + 2 * (Q + K) + 2 * (Q + K) + 3 * Q + 3 * F_MLP
    assert pointwise_bytes(model, 3, Phase.FORWARD, work) == 8 * 2 * between
    back = 8 * H + 2 * (Q + K) + 3 * (Q + K) + 5 * Q + 4 * Q + 5 * F_MLP
    assert pointwise_bytes(model, 3, Phase.BACKWARD, work) == 8 * 2 * back


def test_work_grows_with_tokens_and_not_with_sequences() -> None:
    model = presets.load("qwen3.5-9b")
    short, long = (Workload(micro_batch_size=n, seq_len=65536 // n) for n in (64, 1))
    assert attention_flops(model, 0, short) == attention_flops(model, 0, long)
    assert attention_flops(model, 3, short) < attention_flops(model, 3, long) / 50


def test_what_the_rule_moves_and_takes_is_counted() -> None:
    """By arguments and results of functions: what a compiler writes in between is in the counts, and seen on no CPU."""
    by_head = DeltaNet(key_heads=1, value_heads=2, key_dim=128, value_dim=128, kernel=4)
    by_channel = KimiDelta(key_heads=1, value_heads=1, key_dim=128, value_dim=128, kernel=4)
    for widths, dtype in itertools.product((by_head, by_channel), (torch.float32, torch.bfloat16)):
        of = [t.detach().to(dtype).requires_grad_() for t in given_to(widths, 2, 40 * CHUNK)]
        there, back = seen(lambda pointwise, of=of, by=widths: rule(by, of, pointwise), of, widths)
        of_compiler = 0.12 if isinstance(widths, KimiDelta) else 0  # more kernels of what is as wide as keys
        assert 0.9 - of_compiler < there.moved < 1 and 0.8 < there.taken < 1.01
        assert 0.88 - of_compiler < back.moved < 1 and 0.8 < back.taken < 1


def test_long_sequences_take_no_more_than_some_heads_of_them() -> None:
    model = presets.load("qwen3.5-27b")
    widths, seq = model.recurrence(0), 524_288
    assert widths is not None
    assert [widths.share_at_once(1, of) * widths.key_heads for of in (4096, 16_384, seq)] == [16, 5, 1]
    work = Workload(micro_batch_size=1, seq_len=seq, recompute="mlp")
    given = 2 * (2 * widths.value_width + widths.mixed + 2 * widths.value_heads + 2 * model.hidden_size)
    largest = 2 * model.intermediate_size * model.hidden_size
    rule = 4 * widths.workspace_words(backward=True) // 16
    assert workspace_bytes(model, 0, Phase.BACKWARD, work) == largest + seq * (given + rule)


# ---- what is refused, and what training begins with


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"linear_num_key_heads": 3}, "4 value heads of linear attention cannot share 3 key heads evenly"),
        ({"linear_conv_kernel_dim": 0}, "linear attention needs linear_conv_kernel_dim"),
        ({"sliding_window": 4}, "linear attention in a model with sliding_window is not supported"),
        ({"no_rope_layers": (1, 1, 0)}, "linear attention in a model with no_rope_layers is not supported"),
        ({"pre_norm": False, "post_norm": True}, "linear attention in a model with post_norm is not supported"),
        ({"layer_types": ("linear_attention",) * 2}, "layer_types names 2 blocks, num_hidden_layers is 3"),
        ({"layer_types": ("linear",) * 3}, "layer_types holds 'linear', not 'full_attention', 'sliding_attention' or"),
    ],
)
def test_a_hybrid_without_meaning_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        dataclasses.replace(QWEN3_5, **changes)


def test_products_in_fp8_are_refused() -> None:
    for model in (QWEN3_5, QWEN3_5.of_blocks([1]), dataclasses.replace(presets.load("tiny"), attn_gate_proj=True)):
        work = Workload(micro_batch_size=1, seq_len=16, matmul="fp8")
        assert fp8.unmet(model, work) == f"{model.name}: products of gated or linear attention are not made in fp8"


def test_taps_are_no_matrices() -> None:
    """No weight decay is for them, Muon does not orthogonalise them, and few bits do not hold them."""
    shapes = QWEN3_5.parameter_shapes(0)
    work = Workload(micro_batch_size=1, seq_len=8, optimizer="muon", grad_clip=None)
    sizes = [of.size for of in matrices(QWEN3_5, work, 0)]
    assert sizes == [math.prod(s) for name, s in shapes.items() if len(s) == 2] and len(sizes) == 8
    assert not is_matrix("linear_attn.conv1d.weight", shapes["linear_attn.conv1d.weight"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"linear_num_value_heads": 8}, "linear_channel_decay needs as many key heads as value heads, and as wide"),
        ({"linear_value_head_dim": 8}, "linear_channel_decay needs as many key heads as value heads, and as wide"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"fused_gate_up": True}, "linear attention in a model with fused_gate_up is not supported"),
    ],
)
def test_a_hybrid_whose_channels_decay_apart_without_meaning_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        dataclasses.replace(KIMI_LINEAR, **changes)


@pytest.mark.parametrize("source", [random_parameters, repeated_parameters])
def test_training_begins_with_decays_and_gates_that_learn(source: Callable[[ModelSpec, int], Any]) -> None:
    params = views(source(QWEN3_5, 0)(0), QWEN3_5.parameter_shapes(0))
    assert params["linear_attn.dt_bias"].eq(1).all() and params["linear_attn.norm.weight"].eq(1).all()
    assert params["input_layernorm.weight"].eq(0).all()  # which are centred on zero
    assert params["linear_attn.conv1d.weight"].std() > 0.01
    rates = params["linear_attn.A_log"].exp()
    assert (rates >= 0.01).all() and (rates < 16).all()
    params = views(source(KIMI_LINEAR, 0)(0), shapes := KIMI_LINEAR.parameter_shapes(0))
    name = "self_attn.forget_gate.A_log"
    assert not is_matrix(name, shapes[name]), "no weight decay is for rates"
    assert (params[name].exp() >= 0.01).all() and (params[name].exp() < 16).all()
    assert params["self_attn.o_norm.weight"].eq(1).all() and params["self_attn.k_conv1d.weight"].std() > 0.01


def test_blocks_of_one_kind_share_a_template_and_a_model_of_few_blocks_has_either() -> None:
    found = templates(QWEN3_5, seq_len=8, device=CPU, dtype=torch.float32).blocks
    assert set(found) == {"block", "block.linear"}
    assert found["block"].linear is None and found["block.linear"].linear is not None
    assert [QWEN3_5.of_blocks([i]).layer_kind(0) for i in (0, 1, 2)] == ["block.linear", "block", "block.linear"]
    mixed = dataclasses.replace(MODELS["qwen3.5-moe"], first_k_dense_replace=1)
    assert [mixed.layer_kind(i) for i in mixed.blocks] == ["block.linear.dense", "block", "block.linear"]


def test_only_products_that_can_be_are_made_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    rule(WIDTHS, given_to(WIDTHS, 1, 5))
    assert set(seen) == {"highest"}, "on a CPU, and while the inverse is found"
    with precision("high"):
        assert seen[-1] == "high"
    assert seen[-1] == "highest"

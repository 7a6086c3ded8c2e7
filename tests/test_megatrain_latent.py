"""Latent attention: its functions against plain ones in double precision, and what a block of it keeps and moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import MODELS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain.attention import Attention
from megatrain.latent import _KeysValues
from megatrain.layer_parts import rotate_last
from megatrain.pointwise import PLAIN, Pointwise, compiled, keys_values, last_turned
from megatrain.rotary import rotary_tables, sharper_products
from megatrain.template import templates
from schedules import presets
from schedules.flops import attention_flops, attention_padding, forward_flops
from schedules.latent import Latent
from schedules.op import Phase
from schedules.saved import saved_bytes
from schedules.traffic import pointwise_bytes, product_bytes
from schedules.workload import Workload
from schedules.workspace import workspace_bytes

CPU = torch.device("cpu")
WIDTHS = Latent(heads=3, q_rank=0, kv_rank=7, nope=4, rope=6, value=5)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def turns(seq: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(seq, dtype=dtype), 0.7 ** torch.arange(3, dtype=dtype))[:, None, :]
    return angles.cos(), angles.sin()


@given(first=st.integers(0, 9), apart=st.integers(0, 9), shift=st.integers(0, 9), seed=st.integers(0, 99))
def test_products_depend_on_how_far_tokens_are_apart_and_not_on_where(
    first: int, apart: int, shift: int, seed: int
) -> None:
    """Rotary embedding's purpose; and what is not turned is as it was."""
    cos, sin = turns(30)
    q, k = (randn(1, 1, 1, 10, seed=seed + i) for i in range(2))

    def product(of_q: int, of_k: int) -> Tensor:
        a, b = (last_turned(t, cos[i : i + 1], sin[i : i + 1]) for t, i in ((q, of_q), (k, of_k)))
        assert torch.equal(a[..., :4], q[..., :4])
        return (a * b).sum()

    torch.testing.assert_close(product(first, first + apart), product(first + shift, first + shift + apart))


def test_a_key_is_what_was_expanded_and_the_one_for_all_heads() -> None:
    both, key, (cos, sin) = randn(2, 5, 3, 9), randn(2, 5, 1, 6, seed=1), turns(5)
    k, v = keys_values(both, key, cos, sin, 4)
    assert k.shape == (2, 5, 3, 10) and torch.equal(k[..., :4], both[..., :4])
    assert all(torch.equal(k[:, :, head, 4:], last_turned(key, cos, sin)[:, :, 0]) for head in range(3))
    assert torch.equal(v, both[..., 4:]) and v.is_contiguous()
    assert v.untyped_storage().data_ptr() != both.untyped_storage().data_ptr(), "or all of `both` would be kept"


@pytest.mark.parametrize("pointwise", [PLAIN, compiled("aot_eager")], ids=["plain", "compiled"])
def test_gradients_are_those_of_what_was_computed(pointwise: Pointwise) -> None:
    q, both, key = randn(2, 5, 3, 10), randn(2, 5, 3, 9), randn(2, 5, 1, 6, seed=1)
    cos, sin = turns(5)
    inputs = [t.requires_grad_() for t in (q, both, key)]
    assert torch.autograd.gradcheck(lambda q: rotate_last(q, cos, sin, pointwise), inputs[0])
    times = torch.linspace(1, 2, 5, dtype=torch.float64)[:, None, None]
    multiplied = rotate_last(q, cos * times, sin * times, pointwise, others_times=times)
    torch.testing.assert_close(multiplied, times * rotate_last(q, cos, sin))
    assert torch.autograd.gradcheck(lambda q: rotate_last(q, cos, sin, pointwise, others_times=times), inputs[0])
    assert torch.autograd.gradcheck(
        lambda both, key: _KeysValues.apply(both, key, cos, sin, WIDTHS, pointwise), inputs[1:]
    )


@pytest.mark.parametrize("value", [1, 5, 16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_to_narrow_values_is_attention(value: int, scale: float | None) -> None:
    q, k, v, dy = (randn(2, 11, 3, w, seed=i) for i, w in enumerate((16, 16, value, value)))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    found = Attention(scale=scale).forward(q, k, v, None)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (16**-0.5 if scale is None else scale)
    scores = scores.masked_fill(torch.ones(11, 11, dtype=torch.bool).triu(1), -torch.inf)
    right = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    torch.testing.assert_close(found, right)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, dy) for y in (found, right)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_attention_keeps_is_not_padded() -> None:
    q, k, v = (randn(1, 8, 2, w, dtype=torch.float32).requires_grad_() for w in (16, 16, 4))
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        Attention().forward(q, k, v, None)
    assert sum(kept.values()) == 4 * 8 * 2 * (16 + 16 + 4 + 4 + 1)


def test_products_are_sharper_as_the_reach_grows_by_hand() -> None:
    """DeepSeek-V3's factor of 40: tables as they are, and products by (0.1 ln 40 + 1) squared."""
    model = presets.load("deepseek-v3")
    assert sharper_products(model) == pytest.approx(1.3688879454**2)
    cos, sin = rotary_tables(model, 4, CPU, torch.float64)
    assert torch.allclose(cos.square() + sin.square(), torch.ones(4, 1, 32, dtype=torch.float64))
    (block, *_) = templates(model.of_blocks([0]), seq_len=4, device=CPU, dtype=torch.float32).blocks.values()
    assert block.attention.scale == pytest.approx(1.3688879454**2 / 192**0.5)
    assert sharper_products(replace(model, rope_scaling=())) == 1


H, HEADS, NOPE, ROPE, V, KV, F_DENSE = 2048, 16, 128, 64, 128, 512, 10_944  # DeepSeek-V2-Lite's, of a dense block
Q, K = HEADS * (NOPE + ROPE), HEADS * (NOPE + ROPE)
EXPANDED, A = HEADS * (NOPE + V), HEADS * V


@pytest.mark.parametrize("rank", [0, 768])
def test_a_block_is_counted_by_hand(rank: int) -> None:
    model = replace(presets.load("deepseek-v2-lite"), q_lora_rank=rank)
    work = Workload(micro_batch_size=1, seq_len=8)
    of_q = H * rank + rank * Q if rank else H * Q
    matrices = of_q + H * (KV + ROPE) + KV * EXPANDED + A * H + 3 * H * F_DENSE
    pairs = 8 * 9 // 2
    assert attention_flops(model, 0, work) == 2 * pairs * HEADS * (NOPE + ROPE + V)
    assert forward_flops(model, 0, work) == 2 * 8 * matrices + 2 * pairs * HEADS * (NOPE + ROPE + V)
    assert attention_padding(model, 0) == 2 * 192 / (192 + 128)
    assert model.params(0) == matrices + KV + rank + 2 * H
    compressed, normed = rank + KV + ROPE, rank + KV
    kept = H + compressed + normed + Q + K + A + A + H + H + 3 * F_DENSE  # the second A is of values
    assert saved_bytes(model, 0, work) == 8 * (2 * kept + 4 * (2 + HEADS + (2 if rank else 1)))
    again = replace(work, recompute="pointwise")
    assert saved_bytes(model, 0, work) - saved_bytes(model, 0, again) == 8 * 2 * (normed + 2 * H + F_DENSE)
    read_and_written = (H + rank + rank + Q if rank else H + Q) + H + KV + ROPE + KV + EXPANDED + A + H
    of_mlp = 3 * H + 3 * F_DENSE
    moved = 8 * (read_and_written + Q + K + A + A + of_mlp) + model.params(0)
    assert product_bytes(model, 0, Phase.FORWARD, work) == 2 * moved
    turned = 2 * Q + EXPANDED + ROPE + K + A
    between = 4 * H + 6 * H + turned + 2 * (Q + A) + 2 * normed + 3 * F_DENSE
    assert pointwise_bytes(model, 0, Phase.FORWARD, work) == 8 * 2 * between
    back = 8 * H + turned + 4 * (Q + A) + 3 * normed + 5 * F_DENSE
    assert pointwise_bytes(model, 0, Phase.BACKWARD, work) == 8 * 2 * back


def test_workspaces_by_hand() -> None:
    model = replace(presets.load("deepseek-v2-lite"), intermediate_size=64)
    work = Workload(micro_batch_size=1, seq_len=8)
    assert workspace_bytes(model, 0, Phase.FORWARD, work) == 8 * 2 * (H + Q + K + A + A + 2 * Q)
    assert workspace_bytes(model, 0, Phase.RECOMPUTE, work) == 8 * 2 * (2 * Q + 2 * H)
    assert workspace_bytes(model, 0, Phase.BACKWARD, work) == 2 * H * Q + 8 * (2 * (6 * Q + 2 * A + 2 * H) + 4 * Q)
    wide = replace(model, v_head_dim=192)  # nothing is padded
    assert workspace_bytes(wide, 0, Phase.FORWARD, work) == 8 * 2 * (H + 4 * Q + HEADS * (NOPE + 192))


def test_rotary_tables_are_of_what_is_turned_alone() -> None:
    model = MODELS["deepseek-v3"]
    cos, _ = rotary_tables(model, 16, CPU, torch.float32)
    assert cos.shape == (16, 1, 4) and model.rotary_dim == 8

"""FLOPs, traffic, activations and workspace of a layer, against hand counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import WORKLOAD, experts, spec

from schedules import presets
from schedules.flops import (
    attended_pairs,
    backward_flops,
    forward_flops,
    model_flops_per_step,
    op_flops,
    recomputed_flops,
)
from schedules.model import ModelError, ModelSpec
from schedules.op import Phase
from schedules.saved import hidden_bytes, saved_bytes
from schedules.traffic import op_bytes, pointwise_bytes, product_bytes
from schedules.workload import RECOMPUTED, Workload
from schedules.workspace import FEW_TERMS, LOSS_CHUNK_TOKENS, workspace_bytes


def test_forward_flops_by_hand() -> None:
    tokens = 3 * 8
    q = o = 32 * 32
    k = v = 32 * 16
    mlp = 3 * 32 * 48
    pairs = 3 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)
    block = 2 * tokens * (q + k + v + o + mlp) + 2 * (2 * pairs * 32)
    head = 2 * tokens * 32 * 100
    model = spec()
    assert [forward_flops(model, i, WORKLOAD) for i in model.layers] == [0, block, block, head]
    assert backward_flops(model, 0, WORKLOAD) == 2 * block
    assert model_flops_per_step(model, WORKLOAD) == 3 * 2 * (2 * block + head)


def test_an_evaluation_is_forward_alone() -> None:
    model, workload = spec(), dataclasses.replace(WORKLOAD, task="evaluate")
    assert model_flops_per_step(model, workload) == 2 * (2 * forward_flops(model, 0, workload) + 2 * 24 * 32 * 100)


def test_adapters_that_only_the_output_needs_are_left_out_with_it() -> None:
    """The second matrix of the one beside down; all of the MLP where backward computes it again."""
    model, workload = spec(), dataclasses.replace(WORKLOAD, lora_rank=4)
    forward = op_flops(model, 0, Phase.FORWARD, workload)
    assert op_flops(model, 0, Phase.FORWARD, workload, output=False) == forward
    assert op_flops(model, 0, Phase.RECOMPUTE, workload, output=False) == forward - 2 * 24 * (32 * 48 + 4 * 32)
    again = dataclasses.replace(workload, recompute="mlp")
    mlp = 2 * 24 * 3 * (32 * 48 + 4 * (32 + 48))
    assert op_flops(model, 0, Phase.RECOMPUTE, again, output=False) == forward - mlp


def test_of_an_mlp_with_adapters_gate_and_up_are_multiplied_again_and_what_goes_into_down() -> None:
    workload = dataclasses.replace(WORKLOAD, lora_rank=4, recompute="mlp")
    assert recomputed_flops(spec(), 0, workload) == 2 * 24 * (2 * 32 * 48 + 4 * (2 * (32 + 48) + 48))
    assert recomputed_flops(spec(), 0, dataclasses.replace(workload, recompute="pointwise")) == 0


def test_expert_flops_count_the_router_and_the_chosen_experts() -> None:
    dense, mixture = spec(), experts()
    extra = forward_flops(mixture, 0, WORKLOAD) - forward_flops(dense, 0, WORKLOAD)
    assert extra == 2 * 24 * (3 * 32 * 48 + 32 * 8)  # one more expert than the dense MLP, and the router


def test_experts_have_no_output_that_nobody_reads() -> None:
    """What each makes is kept, so running them again for their activations takes the whole forward."""
    mixture, dense = experts(), spec()
    again = [op_flops(model, 0, Phase.RECOMPUTE, WORKLOAD, output=False) for model in (mixture, dense)]
    last_product = 2 * 24 * 32 * 48
    assert again == [forward_flops(mixture, 0, WORKLOAD), forward_flops(dense, 0, WORKLOAD) - last_product]


@given(seq_len=st.integers(1, 40), window=st.integers(1, 50))
def test_sliding_window_counts_the_pairs_of_the_mask(seq_len: int, window: int) -> None:
    model = spec(architectures=["MistralForCausalLM"], sliding_window=window)
    mask = sum(query - window < key <= query for query in range(seq_len) for key in range(seq_len))
    assert attended_pairs(model, 0, seq_len) == mask


def test_saved_bytes_by_hand() -> None:
    h, q, kv, f, heads = 32, 32, 16, 48, 4
    elements = h + (q + 2 * kv) + q + 2 * h + 3 * f
    assert saved_bytes(spec(), 0, WORKLOAD) == 24 * (2 * elements + 4 * (2 + heads))
    assert saved_bytes(spec(), -1, WORKLOAD) == saved_bytes(spec(), 2, WORKLOAD) == 0
    assert hidden_bytes(spec(), WORKLOAD) == 24 * 32 * 2


def test_saved_bytes_with_norms_after_by_hand() -> None:
    """What a projection reads is a block's input or its residual sum then; queries and keys have a norm each."""
    h, q, kv, f, heads = 32, 32, 16, 48, 4
    olmo, both = spec(architectures=["Olmo2ForCausalLM"]), dataclasses.replace(spec(), post_norm=True)
    elements = (q + kv) + (q + 2 * kv) + q + h + h + 3 * f + h
    assert saved_bytes(olmo, 0, WORKLOAD) == 24 * (2 * elements + 4 * (2 + 2 + heads))
    assert saved_bytes(both, 0, WORKLOAD) == saved_bytes(spec(), 0, WORKLOAD) + 24 * (2 * 2 * h + 4 * 2)
    again = dataclasses.replace(WORKLOAD, recompute="pointwise")
    assert saved_bytes(olmo, 0, WORKLOAD) - saved_bytes(olmo, 0, again) == 24 * 2 * f


def test_an_output_that_is_normalised_is_not_left_out() -> None:
    olmo, plain = spec(architectures=["Olmo2ForCausalLM"]), spec()
    for mode in RECOMPUTED:
        work = dataclasses.replace(WORKLOAD, recompute=mode)
        whole, alone = (op_flops(olmo, 0, Phase.RECOMPUTE, work, output=yes) for yes in (True, False))
        assert whole == alone == forward_flops(plain, 0, work)
        whole, alone = (product_bytes(olmo, 0, Phase.RECOMPUTE, work, output=yes) for yes in (True, False))
        assert whole == alone
        whole, alone = (pointwise_bytes(olmo, 0, Phase.RECOMPUTE, work, output=yes) for yes in (True, False))
        assert whole - alone == 24 * 2 * 3 * 32


def test_saved_bytes_of_a_known_block() -> None:
    # Llama-3.1-8B, 1 token: 3*4096 + 2*4096 + 2*1024 + 3*14336 = 65536 elements, and 34 fp32 words
    workload = Workload(micro_batch_size=1, seq_len=1)
    assert saved_bytes(presets.load("llama-3.1-8b"), 0, workload) == 2 * 65_536 + 4 * 34


@pytest.mark.parametrize("model", [spec(), experts(), presets.load("gpt-oss-20b"), presets.load("qwen3-8b")])
def test_bytes_grow_with_the_batch_and_hold_what_they_must(model: ModelSpec) -> None:
    small, large = Workload(micro_batch_size=1, seq_len=64), Workload(micro_batch_size=2, seq_len=64)
    assert saved_bytes(model, 0, large) == 2 * saved_bytes(model, 0, small)
    assert saved_bytes(model, 0, small) > 2 * hidden_bytes(model, small)
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        assert op_bytes(model, 0, phase, small) > model.params(0) * 2
        assert op_bytes(model, 0, phase, large) > op_bytes(model, 0, phase, small)
        assert workspace_bytes(model, 0, phase, large) > workspace_bytes(model, 0, phase, small) > 0


def test_loss_workspace_is_bounded_by_its_chunk() -> None:
    model = spec()
    sizes = [
        workspace_bytes(model, model.head, Phase.LOSS, Workload(micro_batch_size=1, seq_len=n))
        for n in (LOSS_CHUNK_TOKENS // 2, LOSS_CHUNK_TOKENS, 8 * LOSS_CHUNK_TOKENS)
    ]
    assert sizes[0] * 2 == sizes[1] == sizes[2]
    assert sizes[1] >= 2 * LOSS_CHUNK_TOKENS * 100 * 4


@pytest.mark.parametrize(("changes", "summed"), [({}, 1), ({"precision": "fp32"}, 0), ({"lora_rank": 4}, 0)])
def test_loss_workspace_has_room_for_a_sum_of_some_of_many_chunks(changes: dict[str, Any], summed: int) -> None:
    model = spec()
    few, many = (
        workspace_bytes(model, model.head, Phase.LOSS, Workload(micro_batch_size=1, seq_len=n, **changes))
        for n in (FEW_TERMS * LOSS_CHUNK_TOKENS, FEW_TERMS * LOSS_CHUNK_TOKENS + 1)
    )
    assert many - few == summed * model.vocab_size * model.hidden_size * 2


T, H, Q, KV, F = 16_384, 4096, 4096, 1024, 14_336  # 16k tokens of Llama-3.1-8B


@pytest.mark.parametrize(
    ("phase", "recompute", "output", "nbytes"),
    [
        (Phase.FORWARD, "none", True, 2 * T * (2 * H + 3 * F)),  # an MLP takes more than attention
        (Phase.RECOMPUTE, "none", True, 2 * T * (Q + KV + 2 * H)),
        (Phase.RECOMPUTE, "none", False, 2 * T * (Q + KV + H)),
        (Phase.BACKWARD, "none", True, 2 * H * F + 2 * T * (3 * F + 2 * H)),
        # 8,192 tokens of an MLP at once, and three gradients of matrices in fp32
        (Phase.FORWARD, "mlp", True, 2 * (T * 3 * H + T // 2 * 3 * F)),
        (Phase.RECOMPUTE, "mlp", True, 2 * (T * (Q + KV + 2 * H) + T // 2 * 3 * F)),
        (Phase.RECOMPUTE, "mlp", False, 2 * T * (Q + KV + H)),
        (Phase.BACKWARD, "mlp", True, 2 * H * F + 2 * (T * 2 * H + T // 2 * (5 * F + H)) + 4 * 3 * H * F),
    ],
)
def test_a_blocks_workspace_by_hand(phase: Phase, recompute: str, output: bool, nbytes: int) -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T, recompute=recompute)
    assert workspace_bytes(model, 0, phase, workload, output=output) == nbytes


def test_workspaces_of_blocks_with_other_norms_or_no_rotary_embedding_by_hand() -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T)
    after, both = (dataclasses.replace(model, pre_norm=pre, post_norm=True) for pre in (False, True))
    assert workspace_bytes(after, 0, Phase.FORWARD, workload) == 2 * T * (H + 3 * F)  # an MLP's input is its residual
    assert workspace_bytes(both, 0, Phase.FORWARD, workload) == 2 * T * (2 * H + 3 * F)
    again = dataclasses.replace(workload, recompute="mlp")
    for variant, hidden in ((after, 2), (both, 3)):
        mlp = T * hidden * H + T // 2 * (5 * F + H)
        assert workspace_bytes(variant, 0, Phase.BACKWARD, again) == 2 * H * F + 2 * mlp + 4 * 3 * H * F
    narrow = dataclasses.replace(after, intermediate_size=1024)
    assert workspace_bytes(narrow, 0, Phase.FORWARD, workload) == 2 * T * (3 * Q + 3 * KV)
    assert workspace_bytes(narrow, 0, Phase.FORWARD, again) == 2 * T * 6 * H
    plain = dataclasses.replace(model, intermediate_size=1024, no_rope_layers=(0,) * model.num_hidden_layers)
    assert workspace_bytes(plain, 0, Phase.FORWARD, workload) == 2 * T * (H + 2 * Q + 2 * KV)
    assert workspace_bytes(plain, 0, Phase.RECOMPUTE, workload) == 2 * T * 2 * H
    assert workspace_bytes(plain, 0, Phase.RECOMPUTE, again) == 2 * (T * 2 * H + T // 2 * 3 * 1024)


def test_workspaces_where_attention_is_wider_and_of_the_ends_by_hand() -> None:
    model = dataclasses.replace(presets.load("llama-3.1-8b"), intermediate_size=1024)
    workload = Workload(micro_batch_size=1, seq_len=T)
    attention = 2 * (4 * Q + 2 * KV + 2 * H) + 4 * Q
    assert workspace_bytes(model, 0, Phase.BACKWARD, workload) == 2 * H * Q + T * attention
    assert workspace_bytes(model, 0, Phase.FORWARD, workload) == 2 * T * (H + 3 * Q + 3 * KV)
    again = dataclasses.replace(workload, recompute="mlp")
    assert workspace_bytes(model, 0, Phase.BACKWARD, again) == 2 * H * Q + T * attention
    assert workspace_bytes(model, 0, Phase.FORWARD, again) == 2 * T * 5 * H  # a norm in fp32
    ungrouped = dataclasses.replace(model, num_key_value_heads=32)
    assert workspace_bytes(ungrouped, 0, Phase.FORWARD, again) == 2 * T * (H + 6 * Q)
    assert workspace_bytes(model, model.head, Phase.LOSS, workload) == 4 * 1024 * (2 * 128_256 + 5 * H)
    few = dataclasses.replace(workload, seq_len=16)
    assert workspace_bytes(model, model.head, Phase.LOSS, few) == 4 * 16 * (2 * 128_256 + 5 * H)
    assert workspace_bytes(model, model.embed, Phase.BACKWARD, few) == 12 * 16 * H
    for tokens in (T, 2 * T):
        many = dataclasses.replace(workload, seq_len=tokens)
        assert workspace_bytes(model, model.embed, Phase.BACKWARD, many) == 12 << 26
    assert workspace_bytes(model, model.embed, Phase.BACKWARD, dataclasses.replace(workload, precision="fp32")) == 0
    assert workspace_bytes(model, model.embed, Phase.EMBED, workload) == 0


def test_a_workspace_of_experts_by_hand() -> None:
    """Two copies of the hidden state for each of two choices, and of the matrices' gradient a chunk."""
    model, workload = presets.load("mixtral-8x7b"), Workload(micro_batch_size=1, seq_len=16)
    assert workspace_bytes(model, 0, Phase.FORWARD, workload) == 2 * 16 * (2 * H + 3 * 2 * F + 4 * H)
    assert workspace_bytes(model, 0, Phase.BACKWARD, workload) == 2 * (1 << 29) + 2 * 16 * (3 * 2 * F + 2 * H + 4 * H)


def test_what_the_ends_move_by_hand() -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T)
    table, logits, hidden = 128_256 * H, T * 128_256, T * H
    loss, evaluate = model.head, dataclasses.replace(workload, task="evaluate")
    frozen = dataclasses.replace(workload, lora_rank=4)
    # 16 chunks, each with the table twice and its gradient there and back; logits written, and read twice
    assert product_bytes(model, loss, Phase.LOSS, workload) == 16 * table * (2 * 2 + 2 * 2) + 3 * 2 * logits
    assert product_bytes(model, loss, Phase.LOSS, frozen) == 16 * table * 4 + 6 * logits
    assert product_bytes(model, loss, Phase.LOSS, evaluate) == 16 * table * 2 + 2 * logits
    assert pointwise_bytes(model, loss, Phase.LOSS, workload) == 2 * 2 * logits + 8 * 2 * hidden
    assert pointwise_bytes(model, loss, Phase.LOSS, workload, fused=False) == 2 * 4 * logits + 8 * 2 * hidden
    assert pointwise_bytes(model, loss, Phase.LOSS, evaluate) == 4 * logits + 2 * 2 * hidden
    assert pointwise_bytes(model, model.embed, Phase.EMBED, workload) == (2 + 2) * hidden
    assert pointwise_bytes(model, model.embed, Phase.BACKWARD, workload) == (2 + 2 * 2 + 8 * 4) * hidden
    wide = dataclasses.replace(workload, precision="fp32")
    assert pointwise_bytes(model, model.embed, Phase.BACKWARD, wide) == (4 + 2 * 4) * hidden


def test_what_an_mlp_computed_again_moves_by_hand() -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T, recompute="mlp")
    forward, layer = 7 * H + 4 * Q + 4 * KV + 3 * F, model.params(0)
    assert product_bytes(model, 0, Phase.FORWARD, workload) == 2 * (T * forward + layer)
    # gate and up once more, with their weights
    again = T * (2 * H + 2 * F) + 2 * H * F
    assert product_bytes(model, 0, Phase.BACKWARD, workload) == 2 * (2 * T * forward + 2 * layer + again)
    unread = T * (F + H) + H * F + again
    assert product_bytes(model, 0, Phase.RECOMPUTE, workload, output=False) == 2 * (T * forward + layer - unread)
    between = 10 * H + 2 * (Q + KV) + 3 * F
    assert pointwise_bytes(model, 0, Phase.RECOMPUTE, workload) == 2 * T * between
    assert pointwise_bytes(model, 0, Phase.RECOMPUTE, workload, output=False) == 2 * T * (between - 3 * H - 3 * F)
    back = 8 * H + 2 * (Q + KV) + 5 * F + 4 * H + 3 * F
    assert pointwise_bytes(model, 0, Phase.BACKWARD, workload) == 2 * T * back


def test_what_products_move_by_hand() -> None:
    h, q, kv, f, layer = 32, 32, 16, 48, spec().params(0)
    qkv, attention, o, gate_up, down = 3 * h + q + 2 * kv, 2 * q + 2 * kv, q + h, 2 * h + 2 * f, f + h
    forward = qkv + attention + o + gate_up + down
    assert product_bytes(spec(), 0, Phase.FORWARD, WORKLOAD) == 2 * (24 * forward + layer)
    assert product_bytes(spec(), 0, Phase.BACKWARD, WORKLOAD) == 2 * (2 * 24 * forward + 2 * layer)
    unread = 24 * down + f * h
    assert product_bytes(spec(), 0, Phase.RECOMPUTE, WORKLOAD, output=False) == 2 * (24 * forward + layer - unread)
    assert pointwise_bytes(spec(), 0, Phase.FORWARD, WORKLOAD) == 2 * 24 * (4 * h + 2 * (q + kv) + 3 * f + 6 * h)
    assert pointwise_bytes(spec(), 0, Phase.BACKWARD, WORKLOAD) == 2 * 24 * (8 * h + 2 * (q + kv) + 5 * f)
    assert product_bytes(spec(), spec().embed, Phase.EMBED, WORKLOAD) == 0


def test_what_experts_move_by_hand() -> None:
    """One more input and output per token than the dense MLP has, both as wide as it, and a router."""
    h, q, kv, f, model = 32, 32, 16, 2 * 48, experts()
    forward = 7 * h + 4 * q + 4 * kv + 3 * f + (h + 8) + 3 * h
    products = 2 * (24 * forward + model.params(0))
    assert product_bytes(model, 0, Phase.FORWARD, WORKLOAD) == products
    assert product_bytes(model, 0, Phase.RECOMPUTE, WORKLOAD, output=False) == products
    whole, without = (pointwise_bytes(model, 0, Phase.RECOMPUTE, WORKLOAD, output=yes) for yes in (True, False))
    assert whole - without == 2 * 24 * (3 * h + 3 * h)  # the last residual sum, and that of two choices


def test_what_adapters_move_by_hand() -> None:
    h, q, kv, f, rank, layer = 32, 32, 16, 48, 4, spec().params(0)
    workload = dataclasses.replace(WORKLOAD, lora_rank=rank)
    beside = (h + q) + 2 * (h + kv) + (q + h) + 2 * (h + f) + (f + h)  # their inputs and outputs
    adapters = rank * beside
    forward = 7 * h + 4 * q + 4 * kv + 3 * f + beside + 2 * 7 * rank
    assert product_bytes(spec(), 0, Phase.FORWARD, workload) == 2 * (24 * forward + layer + adapters)
    assert product_bytes(spec(), 0, Phase.BACKWARD, workload) == 2 * (2 * 24 * forward + layer + 2 * adapters)


@pytest.mark.parametrize("how", [{"scale_embeddings": True}, {"embedding_multiplier": 12.0}])
def test_scaled_embeddings_are_read_and_written_once_more_each_way(how: dict[str, Any]) -> None:
    model, workload = spec(), Workload(micro_batch_size=1, seq_len=10)
    scaled, hidden = dataclasses.replace(model, **how), 10 * 32
    wide = dataclasses.replace(workload, precision="fp32")
    for phase, work, nbytes in ((Phase.EMBED, workload, 4), (Phase.BACKWARD, workload, 8), (Phase.BACKWARD, wide, 8)):
        plain, more = (pointwise_bytes(m, m.embed, phase, work) for m in (model, scaled))
        assert more - plain == nbytes * hidden
    assert workspace_bytes(scaled, scaled.embed, Phase.BACKWARD, wide) == 4 * hidden
    assert workspace_bytes(model, model.embed, Phase.BACKWARD, wide) == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_multiplied_branches_have_gradients_of_their_own(recompute: str, fused: bool) -> None:
    """Forward their sum with the residual multiplies; of both, backward reads one and writes another."""
    model, workload = spec(), Workload(micro_batch_size=1, seq_len=10, recompute=recompute)
    multiplied, hidden = dataclasses.replace(model, residual_multiplier=0.5), 10 * 32 * 2
    for phase, passes, held in ((Phase.FORWARD, 0, 0), (Phase.RECOMPUTE, 0, 0), (Phase.BACKWARD, 4, 1)):
        plain, more = (pointwise_bytes(m, 0, phase, workload, fused=fused) for m in (model, multiplied))
        assert more - plain == passes * hidden
        assert (
            workspace_bytes(multiplied, 0, phase, workload) - workspace_bytes(model, 0, phase, workload)
            == held * hidden
        )


def test_a_layer_has_no_traffic_for_a_phase_it_lacks() -> None:
    with pytest.raises(ModelError, match="layer head has no compute op of phase forward"):
        op_bytes(spec(), 2, Phase.FORWARD, WORKLOAD)


def test_unfused_layers_move_more_by_hand() -> None:
    """Per token at bf16, beyond fused kernels: two norms of 28 bytes an element, 8 elements of q and k for rotary
    and two of the MLP's width."""
    model = spec()
    workload = Workload(micro_batch_size=1, seq_len=10)
    heads = model.heads(0)
    fused, unfused = (op_bytes(model, 0, Phase.FORWARD, workload, fused=fused) for fused in (True, False))
    per_token = 2 * model.hidden_size * 28 + 2 * (8 * (heads.q_width + heads.k_width) + 2 * model.mlp_width(0))
    assert unfused - fused == 10 * per_token
    there, back = (pointwise_bytes(model, 0, p, workload, fused=False) for p in (Phase.FORWARD, Phase.BACKWARD))
    assert back == 2 * there
    wide = dataclasses.replace(workload, precision="fp32")
    more = op_bytes(model, 0, Phase.FORWARD, wide, fused=False)
    assert more - op_bytes(model, 0, Phase.FORWARD, wide) < 20 * per_token, "nothing is cast in fp32"
    loss = [op_bytes(model, model.head, Phase.LOSS, workload, fused=fused) for fused in (True, False)]
    assert loss[1] - loss[0] == 10 * 2 * 2 * model.vocab_size, "logits, read and written, are twice as wide"

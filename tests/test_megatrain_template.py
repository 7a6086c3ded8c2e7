"""Templates: right gradients, views without copies, and a loss that never holds its logits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from families import MODELS as FAMILIES

from megatrain import embed
from megatrain.attention import _sides, attention_again, band
from megatrain.embed import Embed
from megatrain.head import Head
from megatrain.layer_parts import gated, rms_norm, rotate
from megatrain.rotary import late_queries, rotary_frequencies, rotary_tables, turns, unrotated_queries
from megatrain.sink import Sink
from megatrain.template import TemplateError, sinks, templates, views
from schedules.families import ACTIVATIONS
from schedules.model import ModelError, ModelSpec

TINY = ModelSpec(
    name="tiny",
    vocab_size=37,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def spec(**changes):
    return dataclasses.replace(TINY, **changes)


def scaled(scaling, **changes):
    return spec(rope_scaling=tuple(sorted(scaling.items())), **changes)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameters(model, i, dtype=torch.float64, seed=0):
    shapes = model.parameter_shapes(i)
    flat = randn(model.params(i), seed=seed, dtype=dtype) * 0.3
    return flat, views(flat, shapes)


# ---- views


def test_parameters_are_views_into_the_slab_in_order():
    flat, params = parameters(spec(attention_bias=True), 0)
    assert list(params) == list(spec(attention_bias=True).parameter_shapes(0))
    assert params["input_layernorm.weight"].data_ptr() == flat.data_ptr()
    assert torch.equal(torch.cat([p.flatten() for p in params.values()]), flat)
    flat.zero_()
    assert not any(p.any() for p in params.values())


def test_a_slab_of_another_size_is_refused():
    with pytest.raises(TemplateError, match="does not hold"):
        views(torch.zeros(TINY.params(0) - 1), TINY.parameter_shapes(0))
    with pytest.raises(TemplateError, match="does not hold"):
        views(torch.zeros(TINY.params(0), 1), TINY.parameter_shapes(0))


# ---- functions


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_has_the_gradients_of_its_definition(offset):
    x, w = (t.requires_grad_() for t in (randn(3, 5, 8), randn(8, seed=1)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, offset=offset), (x, w))
    torch.testing.assert_close(rms_norm(x, w, 1e-3, offset=offset), F.rms_norm(x, (8,), offset + w, 1e-3))


@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_a_gate_has_the_gradients_of_its_definition(hidden_act):
    x, up = (t.requires_grad_() for t in (randn(3, 5, 8), randn(3, 5, 8, seed=2)))
    assert torch.autograd.gradcheck(lambda x, up: gated(x, up, hidden_act), (x, up))
    torch.testing.assert_close(gated(x, up, hidden_act), activation(hidden_act, x) * up)


def activation(hidden_act, x):
    return F.silu(x) if hidden_act == "silu" else F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_of_bf16_is_rounded_once(offset):
    x, w = randn(64, 96, dtype=torch.float32).bfloat16(), randn(96, seed=1, dtype=torch.float32).bfloat16()
    exact = F.rms_norm(x.double(), (96,), offset + w.double(), 1e-6)
    y = rms_norm(x, w, 1e-6, offset=offset)
    assert y.dtype == torch.bfloat16
    # half a unit in the last place of bf16's 8 bits, and fp32's own error on a near tie
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 * 1.0001).all()


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    angles = torch.outer(torch.arange(9.0), rotary_frequencies(spec(head_dim=8), 9))[:, None, :].double()
    cos, sin = angles.cos(), angles.sin()
    q, k = (randn(8, seed=s).expand(1, 9, 1, 8) for s in (0, 1))
    rq, rk = rotate(q, cos, sin)[0, :, 0], rotate(k, cos, sin)[0, :, 0]
    torch.testing.assert_close(rq.norm(dim=-1), q[0, :, 0].norm(dim=-1))
    scores = rq @ rk.T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert torch.equal(rq[0], q[0, 0, 0])  # position 0 is not turned


def test_llama3_slows_long_wavelengths_keeps_short_ones_and_blends_between():
    plain = rotary_frequencies(spec(head_dim=128, rope_theta=500000.0), 9)
    slowed = rotary_frequencies(scaled(LLAMA3, head_dim=128, rope_theta=500000.0), 9)
    for before, after in zip(plain.tolist(), slowed.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192 / 1:
            expected = before / 8
        else:
            keep = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - keep) * before / 8 + keep * before
        assert after == pytest.approx(expected, rel=1e-5)
    assert plain[0] == slowed[0] == 1.0 and slowed[-1] == pytest.approx(float(plain[-1]) / 8)
    linear = rotary_frequencies(scaled({"rope_type": "linear", "factor": 2.0}, head_dim=128), 9)
    assert torch.equal(linear * 2, rotary_frequencies(spec(head_dim=128), 9))


# ---- block


def reference_block(model, p, x):
    """A decoder block written out: explicit softmax, explicit mask, heads repeated, complex rotation."""
    batch, seq, _ = x.shape
    heads, kv, d = model.num_attention_heads, model.num_key_value_heads, model.head_dim

    def norm(x, w):
        return x / (x.square().mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * (w + model.zero_centered_norms)

    def linear(name, x):
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def rope(x):
        turn, turned = torch.complex(*rotary_tables(model, seq, CPU, x.dtype)), model.rotary_dim
        z = torch.complex(*x[..., :turned].chunk(2, -1)) * turn
        return torch.cat((z.real, z.imag, x[..., turned:]), -1) if model.has_rope(0) else x

    def normed(place, x):
        return norm(x, p[f"{place}.weight"]) if place else x

    y = normed(model.norms(0).before_attention, x)
    q, k = linear("self_attn.q_proj", y), linear("self_attn.k_proj", y)
    if model.qk_norm_all_heads:
        q, k = norm(q, p["self_attn.q_norm.weight"]), norm(k, p["self_attn.k_norm.weight"])
    q, k = q.view(batch, seq, heads, d), k.view(batch, seq, kv, d)
    v = linear("self_attn.v_proj", y).view(batch, seq, kv, d)
    if model.qk_norm and not model.qk_norm_all_heads:
        q, k = norm(q, p["self_attn.q_norm.weight"]), norm(k, p["self_attn.k_norm.weight"])
    q, k = rope(q), rope(k)
    k, v = (t.repeat_interleave(heads // kv, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(model.query_pre_attn_scalar or d)
    reach = model.window(0) or seq
    visible = torch.ones(seq, seq).tril().triu(1 - reach).bool()
    scores = scores.masked_fill(~visible, -math.inf)
    if model.attention_sinks:  # one more key, without a value
        sink = p["self_attn.sinks"][None, :, None, None].expand(batch, -1, seq, 1)
        scores = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    y = linear("self_attn.o_proj", torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))
    x = x + normed(model.norms(0).after_attention, y)
    y = normed(model.norms(0).before_mlp, x)
    if model.num_experts:
        return x + normed(model.norms(0).after_mlp, reference_experts(model, p, y))
    gate = activation(model.hidden_act, linear("mlp.gate_proj", y))
    y = linear("mlp.down_proj", gate * linear("mlp.up_proj", y))
    return x + normed(model.norms(0).after_mlp, y)


def reference_experts(model, p, x):
    """Every expert computes every token; what the router did not choose has weight zero."""
    gpt_oss = model.architecture == "GptOssForCausalLM"
    router = "mlp.router" if gpt_oss else "mlp.gate"
    logits = x @ p[f"{router}.weight"].T + p.get(f"{router}.bias", 0)
    chosen = logits >= logits.topk(model.num_experts_per_tok).values[..., -1:]
    weights = logits.softmax(-1) * chosen
    if model.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    y = 0
    for e in range(model.num_experts):
        if gpt_oss:
            both = x @ p["mlp.experts.gate_up_proj"][e] + p["mlp.experts.gate_up_proj_bias"][e]
            gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
            product = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            out = product @ p["mlp.experts.down_proj"][e] + p["mlp.experts.down_proj_bias"][e]
        else:
            gate, up = (x @ p["mlp.experts.gate_up_proj"][e].T).chunk(2, -1)
            out = (F.silu(gate) * up) @ p["mlp.experts.down_proj"][e].T
        y = y + weights[..., e, None] * out
    return y


GEMMA = {
    "post_norm": True, "qk_norm": True, "zero_centered_norms": True, "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 3,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


MODELS = {
    "llama": spec(),
    "llama3": scaled(LLAMA3 | {"original_max_position_embeddings": 4}),
    "qwen2": spec(attention_bias=True),
    "qwen3": spec(qk_norm=True),
    "biases": spec(attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "multi-head": spec(num_key_value_heads=4),
    "multi-query": spec(num_key_value_heads=1),
    "mistral": spec(sliding_window=7),
    "a window": spec(sliding_window=3),
    "a window of one": spec(sliding_window=1, num_key_value_heads=4),
    "sinks": spec(attention_sinks=True),
    "sinks and a window": spec(attention_sinks=True, sliding_window=3),
    "yarn": scaled(YARN | {"original_max_position_embeddings": 4, "truncate": False}),
    "smollm3": spec(no_rope_layers=(0, 1)),
    "phi3": spec(partial_rotary_factor=0.7, fused_projections=True),
    "olmo2": spec(pre_norm=False, post_norm=True, qk_norm=True, qk_norm_all_heads=True),
    "norms before and after": spec(post_norm=True),
    "experts with norms before and after": spec(**EXPERTS, post_norm=True),
    "gemma3": spec(**GEMMA),
    "gemma3 with a window": spec(**GEMMA, sliding_window=3),
    "gemma3's scale with sinks": spec(query_pre_attn_scalar=3, attention_sinks=True),
    "mixtral": spec(**EXPERTS),
    "qwen3-moe": spec(**EXPERTS, qk_norm=True, norm_topk_prob=False),
    "one expert each": spec(**EXPERTS | {"num_experts_per_tok": 1}, norm_topk_prob=False),
    "all experts": spec(**EXPERTS | {"num_experts_per_tok": 5}),
    "gpt-oss experts": spec(
        **EXPERTS,
        architecture="GptOssForCausalLM",
        router_bias=True,
        expert_bias=True,
        attention_bias=True,
        attention_out_bias=True,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_its_definition_in_value_and_gradient(name):
    model = MODELS[name]
    block = templates(model, seq_len=7, device=CPU, dtype=torch.float64).blocks[model.layer_kind(0)]
    _, params = parameters(model, 0)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    x, dy = randn(2, 7, 12, seed=1).requires_grad_(), randn(2, 7, 12, seed=2)
    y, expected = block.forward(params, x), reference_block(model, params, x)
    # the rotary tables are computed in fp32
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(y, [x, *params.values()], dy)
    theirs = torch.autograd.grad(expected, [x, *params.values()], dy)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_a_block_passes_gradcheck():
    model = spec(qk_norm=True, attention_bias=True)
    block = templates(model, seq_len=3, device=CPU, dtype=torch.float64).blocks["block"]
    flat, _ = parameters(model, 0)
    x = randn(1, 3, 12, seed=1).requires_grad_()
    shapes = model.parameter_shapes(0)
    assert torch.autograd.gradcheck(
        lambda flat, x: block.forward(views(flat, shapes), x), (flat.requires_grad_(), x), fast_mode=True
    )


def test_shorter_sequences_fit_and_longer_ones_are_refused():
    block = templates(TINY, seq_len=7, device=CPU, dtype=torch.float64).blocks["block"]
    _, params = parameters(TINY, 0)
    x = randn(1, 7, 12)
    torch.testing.assert_close(block.forward(params, x[:, :4]), block.forward(params, x)[:, :4])
    with pytest.raises(TemplateError, match="longer than the 7"):
        block.forward(params, randn(1, 8, 12))


@pytest.mark.parametrize(
    ("rope_scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, "'dynamic'"),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "mscale"),
    ],
)
def test_a_model_without_a_template_is_none(rope_scaling, message):
    with pytest.raises(ModelError, match=message):
        scaled(rope_scaling)


@pytest.mark.parametrize("window", [1, 3, 8, None])
def test_a_window_is_as_wide_on_a_gpu_as_on_the_cpu(window):
    """There flash attention is told of keys on either side of a query's own, here it has a mask."""
    seen = band(8, window, torch.device("cpu"), torch.float32) == 0
    left, right = _sides(window)["window_size_left"], _sides(window)["window_size_right"]
    for query in range(8):
        first = 0 if left < 0 else max(0, query - left)
        assert seen[query].nonzero().flatten().tolist() == list(range(first, query + right + 1))


# ---- embedding and head


@pytest.mark.parametrize("scale", [None, 3.5])
@pytest.mark.parametrize("accumulate", [False, True])
def test_embedding_gradient_is_dense_and_sums_repeated_tokens(accumulate, scale):
    table, tokens, dy = randn(37, 12), torch.tensor([[1, 5, 1], [36, 5, 1]]), randn(2, 3, 12, seed=1)
    leaf = table.clone().requires_grad_()
    torch.autograd.backward(F.embedding(tokens, leaf) * (scale or 1), dy)
    assert torch.equal(Embed(scale=scale).forward(table, tokens), table[tokens] * (scale or 1))
    grad = torch.ones(37, 12).double() if accumulate else torch.full((37, 12), math.nan).double()
    Embed(scale=scale).backward(tokens, dy, Sink(grad, accumulate))
    torch.testing.assert_close(grad, leaf.grad + (1 if accumulate else 0))
    narrow = torch.full((37, 12), math.nan, dtype=torch.bfloat16)
    Embed(scale=scale).backward(tokens, dy.bfloat16(), Sink(narrow, False))
    torch.testing.assert_close(narrow.double(), leaf.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, math.sqrt(5376)), (torch.bfloat16, 73.5)])
def test_embeddings_are_scaled_by_a_root_of_the_weights_type(dtype, scale):
    """As Gemma's were in its training: 73.5 is the bf16 number next to the root of 5,376, 73.32."""
    model = spec(hidden_size=5376, scale_embeddings=True)
    found = templates(model, seq_len=4, device=CPU, dtype=dtype).embed.scale
    assert found == pytest.approx(scale, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("chunk", "scaling"), [(1, 1.0), (4, 1.0), (14, 1.0), (100, 1.0), (4, 3.0)])
def test_loss_and_gradients_are_those_of_whole_logits(chunk, scaling, accumulate, dtype):
    norm, table = randn(12).to(dtype), (randn(37, 12, seed=1) * 0.5).to(dtype)
    hidden = randn(2, 7, 12, seed=2).to(dtype)
    targets = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(3))
    learned = torch.rand(2, 7, generator=torch.Generator().manual_seed(4)) < 0.7
    shares = learned.to(torch.promote_types(dtype, torch.float32)) / 28  # as with two micro-batches
    leaves = [t.double().clone().requires_grad_() for t in (norm, table, hidden)]
    logits = F.linear(F.rms_norm(leaves[2], (12,), leaves[0], 1e-6), leaves[1]) / scaling
    expected = F.cross_entropy(logits[learned], targets[learned], reduction="sum") / 28
    references = torch.autograd.grad(expected, leaves)

    start = 1.0 if accumulate else math.nan
    d_norm, d_table = torch.full_like(norm, start), torch.full_like(table, start)
    d_hidden = torch.full_like(hidden, math.nan)
    head = Head(eps=1e-6, logits_scaling=scaling)
    loss = head.loss_and_grads(
        norm, table, hidden, targets, shares, d_hidden=d_hidden,
        norm_sink=Sink(d_norm, accumulate), table_sink=Sink(d_table, accumulate), chunk=chunk,
    )  # fmt: skip
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    evaluated = head.loss(norm, table, hidden, targets, shares, chunk=chunk)
    torch.testing.assert_close(evaluated, loss, rtol=min(close, 1e-4), atol=0)
    assert loss.shape == () and loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=close, atol=close)
    base = 1.0 if accumulate else 0.0
    for mine, reference in zip((d_norm - base, d_table - base, d_hidden), references, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=close, atol=close)


def test_a_wider_gradient_buffer_takes_the_same_products():
    norm, table, hidden = (t.bfloat16() for t in (torch.ones(12), randn(37, 12), randn(1, 8, 12, seed=1)))
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        d_table = torch.full((37, 12), math.nan, dtype=dtype)
        Head(eps=1e-6).loss_and_grads(
            norm, table, hidden, torch.arange(8)[None], torch.full((1, 8), 1 / 8),
            d_hidden=torch.empty_like(hidden), norm_sink=Sink(torch.empty(12), False),
            table_sink=Sink(d_table, False), chunk=8,
        )  # fmt: skip
        grads[dtype] = d_table
    assert torch.equal(grads[torch.float32], grads[torch.bfloat16].float())


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_gradient_of_the_output_matrix_loses_nothing_in_a_sum_of_many_chunks(accumulate):
    norm, table, hidden = torch.ones(12), randn(37, 12, seed=1), randn(1, 2048, 12, seed=2)
    targets = torch.randint(37, (1, 2048), generator=torch.Generator().manual_seed(3))
    shares, grads = torch.full((1, 2048), 1 / 2048), {}
    for dtype in (torch.bfloat16, torch.float64):
        grads[dtype] = torch.full((37, 12), 0.0 if accumulate else math.nan, dtype=dtype)
        rows = hidden.to(dtype)
        Head(eps=1e-6).loss_and_grads(
            norm.to(dtype), table.to(dtype), rows, targets, shares.to(torch.promote_types(dtype, torch.float32)),
            d_hidden=torch.empty_like(rows), norm_sink=None, table_sink=Sink(grads[dtype], accumulate), chunk=4,
        )  # fmt: skip
    error = (grads[torch.bfloat16] - grads[torch.float64]).norm() / grads[torch.float64].norm()
    assert error < 0.01  # 0.03 if one chunk after another were added in bf16


def test_no_tensor_is_as_large_as_all_logits():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    self.elements = max(self.elements, t.numel())
            return out

    hidden = randn(1, 64, 12)
    table = randn(500, 12)
    with Largest() as seen:
        Head(eps=1e-6).loss_and_grads(
            randn(12), table, hidden, torch.zeros(1, 64, dtype=torch.long), torch.full((1, 64), 1 / 64).double(),
            d_hidden=torch.empty_like(hidden), norm_sink=Sink(torch.empty(12).double(), False),
            table_sink=Sink(torch.empty_like(table), False), chunk=16,
        )  # fmt: skip
    assert seen.elements == 16 * 500


def test_sinks_are_views_of_the_gradient_slab():
    flat = torch.ones(TINY.params(0))
    places = sinks(flat, TINY.parameter_shapes(0), accumulate=True)
    places["input_layernorm.weight"].put(torch.full((12,), 2.0))
    assert flat[:12].tolist() == [3.0] * 12 and flat[12:].eq(1).all()


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_computed_again_has_the_gradients_of_attention(groups: int, scale: float | None) -> None:
    torch.manual_seed(1)
    q = torch.randn(2, 6, 9, 8, requires_grad=True)
    k, v = (torch.randn(2, 6 // groups, 9, 8, requires_grad=True) for _ in range(2))
    dy = torch.randn(2, 6, 9, 8)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = attention_again(q, k, v, scale)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in (q, k, v))
    found = torch.autograd.grad(y, (q, k, v), dy)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(found, torch.autograd.grad(right, (q, k, v), dy))


def test_a_frequent_token_has_all_its_terms_in_bf16(monkeypatch):
    monkeypatch.setattr(embed, "EMBED_CHUNK", 37 * 5)  # three parts of the columns
    tokens = torch.zeros(1, 4000, dtype=torch.long)
    dy = (1 + 0.1 * randn(1, 4000, 12, dtype=torch.float32)).bfloat16()
    exact = dy.double().sum(1)[0]
    for accumulate in (False, True):
        grad = torch.full((37, 12), 1.0 if accumulate else math.nan, dtype=torch.bfloat16)
        Embed().backward(tokens, dy, Sink(grad, accumulate))
        torch.testing.assert_close(grad[0].double(), exact + accumulate, rtol=2**-8, atol=0)
        assert (grad[1:] == (1.0 if accumulate else 0.0)).all()


def test_queries_without_rotary_embedding_grow_with_their_position() -> None:
    """As a Llama 4's: from the position on whose number, counted from one, is the floor."""
    model = dataclasses.replace(FAMILIES["llama-4"], floor_scale=4, attn_scale=0.5)
    assert unrotated_queries(model, 3, CPU, torch.float32) is None
    assert unrotated_queries(dataclasses.replace(model, floor_scale=0), 99, CPU, torch.float32) is None
    found = unrotated_queries(model, 8, CPU, torch.float32)
    assert found is not None and found.shape == (8, 1, 1)
    right = [1.0] * 3 + [1 + 0.5 * math.log(2)] * 4 + [1 + 0.5 * math.log(3)]
    torch.testing.assert_close(found.flatten(), torch.tensor(right))
    last = unrotated_queries(model, 4, CPU, torch.float32)
    assert last is not None and last[-1] > 1


def test_late_queries_are_multiplied_by_the_logarithm_of_how_late_they_are() -> None:
    model = FAMILIES["ministral3"]  # of an original length of 64
    cos, _ = rotary_tables(model, 64, CPU, torch.float32)
    assert cos[0].max() == 1.0  # queries and keys get no longer, as they do by "yarn" elsewhere
    assert late_queries(model, 64) is None
    found = late_queries(model, 200)
    assert found is not None and found.shape == (200, 1, 1)
    assert found[[0, 63, 64, 127, 128, 199], 0, 0].tolist() == pytest.approx(
        [1, 1, *[1 + 0.1 * math.log(2)] * 2, *[1 + 0.1 * math.log(n) for n in (3, 4)]]
    )
    both = turns(model, 200, CPU, torch.float32)
    for of_queries, of_keys in zip(both.of_queries, both.of_keys, strict=True):
        torch.testing.assert_close(of_queries, of_keys * found)
    assert late_queries(dataclasses.replace(model, architecture="MistralForCausalLM"), 200) is None  # not read there

"""Weights of Hugging Face's: what is written is read again bit by bit, transformers agrees, and faults are named."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import MODELS, TINY
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain import autograd, export, hf, initial
from megatrain.checkpoint import CheckpointError, Diverged
from megatrain.checksum import checksum
from megatrain.export import NotExported
from megatrain.hf import WeightsError
from megatrain.routing import route
from megatrain.template import sinks, templates, views
from schedules import presets, trained
from schedules.families import FAMILIES
from schedules.hf_config import write_config
from schedules.model import ModelError, ModelSpec
from schedules.saved import saved_bytes
from schedules.workload import Workload

WORKLOAD = Workload(micro_batch_size=1, seq_len=16)


def parameters(model: ModelSpec) -> Callable[[int], Tensor]:
    """Random, biases and norms too; the bias by which experts are chosen has its median at 0, as it is read."""

    def of_layer(i: int) -> Tensor:
        torch.manual_seed(i + 7)
        shapes = model.parameter_shapes(i)
        found = {
            name: 0.1 * torch.randn(shape) + float("norm" in name or "scal" in name) for name, shape in shapes.items()
        }
        if (name := model.score_correction) in found:
            found[name] -= found[name].median()
        return torch.cat([t.flatten() for t in found.values()])

    return of_layer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_again(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, source = MODELS[name], parameters(MODELS[name])
    export.write(tmp_path, model, WORKLOAD, lambda i: source(i).to(dtype))
    found = hf.parameters(tmp_path, model)
    for i in model.layers:
        assert found(i).dtype == torch.float32 and torch.equal(found(i), source(i).to(dtype).float())
    assert replace(presets.load(tmp_path), name=model.name) == model
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    index = json.loads((tmp_path / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == model.total_params * dtype.itemsize
    written = {name: file.name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == written


def loss_and_gradients(
    model: ModelSpec, source: Callable[[int], Tensor], tokens: Tensor, targets: Tensor, recompute: str
) -> tuple[Tensor, dict[int, Tensor]]:
    """The mean loss, and the gradient of every layer, flat, as a schedule's ops make them in fp32."""
    batch, seq = tokens.shape
    workload = Workload(micro_batch_size=batch, seq_len=seq, precision="fp32", recompute=recompute)
    layers = templates(
        model,
        seq_len=seq,
        device=torch.device("cpu"),
        dtype=torch.float32,
        pointwise_again=recompute != "none",
        mlp_chunk=12 if recompute == "mlp" else None,
    )
    shapes = {i: model.parameter_shapes(i) for i in model.layers}
    params = {i: views(source(i), shapes[i]) for i in model.layers}
    grads = {i: torch.full((model.params(i),), torch.nan) for i in model.layers}
    into = {i: sinks(grads[i], shapes[i], accumulate=False) for i in model.layers}
    inputs, kept = {}, {}
    x = layers.embed.forward(params[model.embed]["embed_tokens.weight"], tokens)
    for i in model.blocks:
        inputs[i] = x
        block = layers.blocks[model.layer_kind(i)]
        x, kept[i] = autograd.forward(block, params[i], x)
        if recompute != "none":  # what is run again for its activations alone has no output
            _, kept[i] = autograd.forward(block, params[i], inputs[i], output=False)
        assert kept[i].nbytes == saved_bytes(model, i, workload)
    owner, table = (model.embed, "embed_tokens.weight") if model.tie_word_embeddings else (model.head, "lm_head.weight")
    d = torch.empty_like(x)
    loss = layers.head.loss_and_grads(
        params[model.head]["norm.weight"],
        params[owner][table],
        x,
        targets,
        torch.full(targets.shape, 1 / targets.numel()),
        d_hidden=d,
        norm_sink=into[model.head]["norm.weight"],
        table_sink=into[owner][table],
    )
    for i in reversed(model.blocks):
        d = autograd.backward(kept[i], params[i], inputs[i], d, into[i])
    sink = into[model.embed]["embed_tokens.weight"]
    layers.embed.backward(tokens, d, sink.adding() if model.tie_word_embeddings else sink)
    return loss, grads


def named(model: ModelSpec, i: int, slab: Tensor) -> dict[str, Tensor]:
    """Layer i's tensors as modules of transformers hold them: as in files, but for experts, which they have stacked."""
    held = {hf.global_name(model, i, name): part for name, part in views(slab, model.stored_shapes(i)).items()}
    if model.family.interleaved:
        held = {name: part for name, part in held.items() if "in_proj" not in name}
        held |= {name: part for name, part in hf.tensors_of(model, i, slab).items() if "in_proj" in name}
    if taps := [name for name in held if name.endswith("_conv1d.weight")]:  # which modules have in one
        held[taps[0].replace("q_conv1d", "conv1d")] = torch.cat([held.pop(name) for name in taps])
    return held


def opener(architecture: str) -> Callable[..., Any]:
    """What opens a folder in transformers; skips the test where it is not installed."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    # which its AutoModelForCausalLM does not know
    named = transformers.Mistral4ForCausalLM if architecture == "Mistral4ForCausalLM" else None
    found: Callable[..., Any] = (named or transformers.AutoModelForCausalLM).from_pretrained
    return found


@pytest.mark.parametrize("name", MODELS)
def test_transformers_has_the_same_loss_and_gradients_with_what_is_written(name: str, tmp_path: Path) -> None:
    """However much is computed again, and with what is counted kept, to the byte."""
    model, source = MODELS[name], parameters(MODELS[name])
    export.write(tmp_path, model, WORKLOAD, source)
    theirs = opener(model.architecture)(tmp_path, attn_implementation="eager").train()
    tokens, targets = torch.randint(0, model.vocab_size, (2, 2, 16))
    right = F.cross_entropy(theirs(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    right.backward()
    # the delta rule's gradients are rounded more: 1e-5 to 2e-5 off those in fp64, theirs as ours, by the processor
    limit = 1e-4 if any(model.recurrence(i) for i in model.blocks) else 1e-5
    for recompute in model.recompute_modes:
        loss, grads = loss_and_gradients(model, source, tokens, targets, recompute)
        torch.testing.assert_close(loss, right.detach(), rtol=1e-5, atol=0)
        for i in model.layers:
            for parameter, grad in named(model, i, grads[i]).items():
                held = theirs.get_parameter_or_buffer(parameter)
                expected = torch.zeros_like(held) if held.grad is None else held.grad  # of a buffer, or a bias
                assert (grad.view_as(held) - expected).abs().max() < limit * expected.abs().max() + 1e-8, (i, parameter)


def test_files_of_a_qwen3_next_have_one_key_heads_rows_after_anothers(tmp_path: Path) -> None:
    model = MODELS["qwen3-next"]  # two key heads of 12, each with two value heads of 8
    slab = torch.arange(model.params(0), dtype=torch.float32)
    params, found = views(slab, model.stored_shapes(0)), hf.tensors_of(model, 0, slab)
    mixed, z, b, a = (params[f"linear_attn.in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a"))
    q, k, v = mixed.split([24, 24, 32])
    of_heads = [
        part for i in (0, 1) for part in (q[12 * i :][:12], k[12 * i :][:12], v[16 * i :][:16], z[16 * i :][:16])
    ]
    assert torch.equal(found["model.layers.0.linear_attn.in_proj_qkvz.weight"], torch.cat(of_heads))
    of_heads = [b[:2], a[:2], b[2:], a[2:]]
    assert torch.equal(found["model.layers.0.linear_attn.in_proj_ba.weight"], torch.cat(of_heads))
    assert torch.equal(hf.slab_of(model, 0, found), slab)
    assert torch.equal(slab, torch.arange(model.params(0), dtype=torch.float32)), "what is trained stays as it is"
    export.write(tmp_path, model, WORKLOAD, source := parameters(model))
    checksums = {model.layer_name(i): {"weights": checksum(source(i))} for i in model.layers}
    assert export.is_of(tmp_path, model, WORKLOAD, checksums)


def test_projections_that_files_interleave_have_no_adapters() -> None:
    """Whose first matrix would be one for all of them."""
    found, apart = (MODELS[name].adapter_shapes(0, 2) for name in ("qwen3-next", "qwen3.5-moe"))
    assert found.items() < apart.items() and any("linear_attn.out_proj" in name for name in found)
    assert all("linear_attn.in_proj" in name for name in apart.keys() - found.keys())


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_is_read(name: str, tmp_path: Path) -> None:
    model, source = MODELS[name], parameters(MODELS[name])
    export.write(tmp_path / "ours", model, WORKLOAD, source)
    opener(model.architecture)(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert replace(presets.load(tmp_path / "theirs"), name=model.name) == model
    found = hf.parameters(tmp_path / "theirs", model)
    assert all(torch.equal(found(i), source(i)) for i in model.layers)


@pytest.mark.parametrize("name", ["minimax-m2", "glm-4.5", "deepseek-v3", "ernie-4.5-moe"])
def test_a_narrow_band_of_large_corrections_chooses_in_bf16_as_in_fp32(name: str, tmp_path: Path) -> None:
    """GLM-5.1's lie within 0.14 around 34.5, where bf16 has steps of 0.25."""
    model, (i, source) = MODELS[name], (MODELS[name].num_hidden_layers - 1, parameters(MODELS[name]))
    logits, where = torch.randn(500, model.num_experts), model.score_correction
    assert where is not None
    raw = 34.5 + 0.14 * torch.randn(model.num_experts)

    def offset(layer: int) -> Tensor:
        flat = source(layer).clone()
        if where in (shapes := model.parameter_shapes(layer)):
            views(flat, shapes)[where].copy_(raw)
        return flat

    def chosen(correction: Tensor) -> Tensor:
        groups = {"groups": model.n_group, "chosen_groups": model.topk_group}
        how: dict[str, Any] = {"sigmoid": model.sigmoid_router, "normalised": True, **groups}
        return route(logits, model.num_experts_per_tok, correction, **how)[1].sort(-1).values

    export.write(tmp_path, model, WORKLOAD, offset)
    read = views(hf.parameters(tmp_path, model)(i), model.parameter_shapes(i))[where]
    right = chosen(raw.double())
    same = (chosen(read.bfloat16()) == right).all(-1).float().mean()
    unmoved = (chosen(raw.bfloat16()) == right).all(-1).float().mean()
    assert torch.equal(chosen(read), right) and same > 0.97 and unmoved < 0.8


def test_experts_lie_in_files_one_by_one(tmp_path: Path) -> None:
    model = MODELS["mixtral"]
    export.write(tmp_path, model, WORKLOAD, parameters(model))
    tensors = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    stacked = views(parameters(model)(1), model.parameter_shapes(1))
    place = "model.layers.1.block_sparse_moe"
    assert torch.equal(tensors[f"{place}.gate.weight"], stacked["mlp.gate.weight"])
    for e in range(model.num_experts):
        gate, up = stacked["mlp.experts.gate_up_proj"][e].chunk(2)
        assert torch.equal(tensors[f"{place}.experts.{e}.w1.weight"], gate)
        assert torch.equal(tensors[f"{place}.experts.{e}.w3.weight"], up)
        assert torch.equal(tensors[f"{place}.experts.{e}.w2.weight"], stacked["mlp.experts.down_proj"][e])


def test_the_bias_by_which_experts_are_chosen_is_called_as_it_is_published(tmp_path: Path) -> None:
    export.write(tmp_path, MODELS["k-exaone"], WORKLOAD, parameters(MODELS["k-exaone"]))
    names = json.loads((tmp_path / hf.INDEX).read_text())["weight_map"]
    assert "model.layers.1.mlp.e_score_correction_bias" in names and "model.layers.1.mlp.gate.weight" in names


def test_a_block_for_the_token_after_the_next_is_left_out(tmp_path: Path) -> None:
    for name in ("glm-4.5-air", "k-exaone", "minimax-m2"):
        model, folder = MODELS[name], tmp_path / name
        export.write(folder, model, WORKLOAD, parameters(model))
        further = f"model.layers.{model.num_hidden_layers}.eh_proj.weight"
        if name == "k-exaone":
            further = "mtp.fc.weight"
        save_file({further: torch.zeros(2, 2)}, folder / "further.safetensors")
        index = json.loads((folder / hf.INDEX).read_text())
        index["weight_map"][further] = "further.safetensors"
        (folder / hf.INDEX).write_text(json.dumps(index))
    for name in ("glm-4.5-air", "k-exaone"):
        assert torch.equal(hf.parameters(tmp_path / name, MODELS[name])(0), parameters(MODELS[name])(0))
    with pytest.raises(hf.WeightsError, match="eh_proj"):
        hf.parameters(folder, model)


def test_quantised_weights_are_told_as_such(tmp_path: Path) -> None:
    model = MODELS["gpt-oss"]
    export.write(tmp_path, model, WORKLOAD, parameters(model))
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        packed = {name + "_blocks" if name.endswith("_proj") else name: t for name, t in tensors.items()}
        save_file(packed, file)
    index = json.loads((tmp_path / hf.INDEX).read_text())
    names = {name + "_blocks" if name.endswith("_proj") else name: f for name, f in index["weight_map"].items()}
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(WeightsError, match=r"lack .*gate_up_proj: the weights are quantised; training begins with"):
        hf.parameters(tmp_path, model)


def in_fp8(part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    values = part.to(torch.float8_e4m3fn)
    return 0.5 * values.float(), {"": values, "_scale_inv": torch.full((1, 1), 0.5)}


def in_4_bits(part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    rows, columns = part.shape
    values = torch.randint(-8, 8, (rows, columns))
    words = ((values + 8).view(rows, -1, 8) << torch.arange(0, 32, 4)).sum(dim=-1).to(torch.int32)
    beside = {"_scale": torch.full((rows, 1), 0.5), "_shape": torch.tensor([rows, columns])}
    return 0.5 * values, {"_packed": words, **beside}


@pytest.mark.parametrize("quantised", [None, in_fp8, in_4_bits])
def test_an_export_has_what_no_training_here_changes(
    quantised: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]] | None, tmp_path: Path
) -> None:
    """A GLM-5's indexers, which are needed for long sequences alone."""
    model, base, out = MODELS["glm-5"], tmp_path / "base", tmp_path / "out"
    export.write(base, model, WORKLOAD, parameters(model))
    blocks = model.num_hidden_layers  # the last without an indexer, as in a GLM-5.2
    its_own = {"index_n_heads": 3, "index_head_dim": 16, "indexer_types": ["full"] * (blocks - 1) + ["shared"]}
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | its_own))
    theirs = opener(model.architecture)(base)  # which has made the indexers that are not there
    theirs.save_pretrained(base, max_shard_size="100KB")
    expected = {name: part for name, part in theirs.state_dict().items() if ".indexer." in name}
    assert len(expected) == 5 * (blocks - 1)
    if quantised is not None:
        for file in base.glob("*.safetensors"):
            tensors = load_file(file)
            for name in [name for name in tensors if name in expected and tensors[name].ndim == 2]:
                expected[name], parts = quantised(tensors.pop(name))
                tensors |= {f"{name}{end}": part for end, part in parts.items()}
                tensors[name.replace(".weight", ".input_scale")] = torch.ones(())  # of no use where these are whole
            save_file(tensors, file)
        names = {name: file.name for file in base.glob("*.safetensors") for name in load_file(file)}
        (base / hf.INDEX).write_text(json.dumps({"weight_map": names}))
    source = hf.parameters(base, model)
    export.write(out, model, WORKLOAD, source, base)
    found = opener(model.architecture)(out).state_dict()
    assert found.keys() == theirs.state_dict().keys()
    for name, part in expected.items():
        assert torch.equal(found[name], part)
    files = {name: file for file in out.glob("*.safetensors") for name in load_file(file)}
    assert len(set(files.values())) == len(model.layers) and all(files[name] for name in expected)
    export.write(tmp_path / "bf16", model, WORKLOAD, lambda i: source(i).bfloat16(), base)
    written = {name: t for file in (tmp_path / "bf16").glob("*.safetensors") for name, t in load_file(file).items()}
    for name, part in expected.items():
        whole = quantised is None or part.ndim < 2
        assert torch.equal(written[name], part if whole else part.bfloat16())


def test_what_is_not_trained_and_is_there_in_part_is_named(tmp_path: Path) -> None:
    model = MODELS["glm-5"]
    one = {"model.layers.0.self_attn.indexer.wk.weight_scale_inv": torch.ones(1, 1)}
    save_file(one, tmp_path / hf.WHOLE)
    with pytest.raises(WeightsError, match=r"indexer\.wk\.weight in .* lacks its values, or what they are multiplied"):
        hf.untrained(tmp_path, model)


def test_an_export_goes_on_where_what_is_not_trained_cannot_be_read(tmp_path: Path) -> None:
    model, base, out = MODELS["glm-5"], tmp_path / "base", tmp_path / "out"
    export.write(base, model, WORKLOAD, parameters(model))
    (base / hf.INDEX).write_text("{}")
    with pytest.warns(UserWarning, match="the export lacks what was not trained: the weights in .* cannot be read"):
        export.write(out, model, WORKLOAD, parameters(model), base)
    hf.parameters(out, model)


def test_an_export_has_the_tokenizer_and_the_special_tokens_of_where_it_began(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    export.write(base, TINY, WORKLOAD, parameters(TINY))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9], "of_the_base": 1}))
    (base / "tokenizer.json").write_text("{}")
    (base / "notes.md").write_text("of the base alone")
    export.write(out, TINY, WORKLOAD, parameters(TINY), base)
    assert (out / "tokenizer.json").read_text() == "{}" and not (out / "notes.md").exists()
    assert json.loads((out / "config.json").read_text()) == {**config, "eos_token_id": [7, 9]}
    (base / "config.json").unlink()
    export.write(tmp_path / "again", TINY, WORKLOAD, parameters(TINY), base)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


def test_a_tokenizer_that_cannot_be_read_does_not_cost_the_weights(tmp_path: Path) -> None:
    """The folder may lie on another machine, which is gone when the training ends."""
    base, out = tmp_path / "base", tmp_path / "out"
    export.write(base, TINY, WORKLOAD, parameters(TINY))
    (base / "tokenizer.json").symlink_to("/proc/self/mem")  # which nobody reads from its beginning
    (base / "vocab.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"the export lacks .*tokenizer\.json, which cannot be copied: Input/output"):
        export.write(out, TINY, WORKLOAD, parameters(TINY), base)
    assert not (out / "tokenizer.json").exists() and (out / "vocab.json").exists()
    assert torch.equal(hf.parameters(out, TINY)(0), hf.parameters(base, TINY)(0))


def test_an_export_to_where_the_training_began_leaves_its_tokenizer(tmp_path: Path) -> None:
    """Its weights are gone: removed, say, to have room for those that were trained."""
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export.write(tmp_path, TINY, WORKLOAD, parameters(TINY), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 5
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("its own")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")
    with pytest.warns(UserWarning, match=r"the export lacks .*tokenizer\.json"):
        export.write(other, TINY, WORKLOAD, parameters(TINY), tmp_path)
    assert (other / "tokenizer.json").read_text() == "its own"


def test_one_file_without_an_index_is_read_too(tmp_path: Path) -> None:
    source = parameters(TINY)
    whole = {
        hf.global_name(TINY, i, name): part.clone()
        for i in TINY.layers
        for name, part in views(source(i), TINY.parameter_shapes(i)).items()
    }
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"} < whole.keys()
    save_file(whole, tmp_path / hf.WHOLE)
    for _ in range(2):
        found = hf.parameters(tmp_path, TINY)
        assert all(torch.equal(found(i), source(i)) for i in TINY.layers)
        (tmp_path / hf.INDEX).write_text("{}")  # of files that the one has taken the place of


def test_adapters_are_named_as_peft_names_them(tmp_path: Path) -> None:
    adapters = initial.random_adapters(TINY, 4, 0)
    export.write(tmp_path, TINY, replace(WORKLOAD, lora_rank=4), adapters)
    found = load_file(tmp_path / "adapter_model.safetensors")
    first = found["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    assert first.shape == (4, TINY.hidden_size) and len(found) == 2 * 2 * 7
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 2 and "down_proj" in config["target_modules"]
    assert not (tmp_path / "config.json").exists()


def test_adapters_say_which_weights_they_belong_to(tmp_path: Path) -> None:
    adapters = initial.random_adapters(TINY, 4, 0)
    export.write(tmp_path / "a", TINY, replace(WORKLOAD, lora_rank=4), adapters, tmp_path / "base")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.parametrize("name", presets.names())
def test_a_written_config_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = presets.load(name)
    (tmp_path / "config.json").write_text(json.dumps(write_config(model.to_dict())))
    assert replace(presets.load(tmp_path), name=name) == model


@pytest.mark.parametrize(
    "odd",
    [
        replace(TINY, attention_bias=True),  # Hugging Face's Llama has biases in all four projections or in none
        replace(TINY, no_rope_layers=(1, 0)),
        replace(MODELS["gemma3"], query_pre_attn_scalar=None),
        replace(MODELS["gemma3"], zero_centered_norms=False),
        replace(MODELS["olmo3"], rope_local_base_freq=None),
        replace(MODELS["phi3"], fused_projections=False),
    ],
)
def test_a_model_that_a_config_would_describe_as_another_is_told(odd: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"no config\.json of a {odd.architecture} describes it"):
        export.write(tmp_path / "out", odd, WORKLOAD, parameters(odd))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers is"),
        ("smollm3", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is gelu_pytorch_tanh, not silu"),
        ("deepseek-v3", {"n_group": 4, "topk_group": 2}, "n_group is 4, not 2; topk_group is 2, not 1"),
        ("granite-4", {"mamba_n_groups": 4, "mamba_d_state": 5}, "mamba_n_groups is 4, not 2; mamba_d_state is 5, not"),
        ("deepseek-v3", {"qk_nope_head_dim": 10, "qk_rope_head_dim": 10}, "qk_nope_head_dim is 10, not 12; qk_rope"),
    ],
)
def test_weights_that_other_blocks_were_trained_with_are_refused(
    name: str, changes: dict[str, object], told: str, tmp_path: Path
) -> None:
    model = MODELS[name]
    export.write(tmp_path, model, WORKLOAD, parameters(model))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(WeightsError, match=f"of another model than {model.name}: {told}"):
        hf.parameters(tmp_path, model)


# ---- faults


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.layers.1.self_attn.q_proj.extra_scale", "no parameter for: the weights are quantised; training"),
        ("model.layers.1.self_attn.q_proj.bias", "which tiny has no parameter for; remove it if it is not needed"),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_what_the_model_knows_nothing_of_is_named(name: str, told: str | None, tmp_path: Path) -> None:
    model = MODELS["llama, tied"]
    export.write(tmp_path, model, WORKLOAD, parameters(model))
    index = json.loads((tmp_path / hf.INDEX).read_text())
    index["weight_map"][name] = "more.safetensors"
    (tmp_path / hf.INDEX).write_text(json.dumps(index))
    save_file({name: torch.ones(4)}, tmp_path / "more.safetensors")
    if told is None:
        hf.parameters(tmp_path, model)
        return
    with pytest.raises(WeightsError, match=told):
        hf.parameters(tmp_path, model)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_may_not_have_another_head(same: bool, tmp_path: Path) -> None:
    """transformers computes with a head that differs, whatever config.json says of ties."""
    model = MODELS["llama, tied"]
    export.write(tmp_path, model, WORKLOAD, parameters(model))
    index = json.loads((tmp_path / hf.INDEX).read_text())
    table = "model.embed_tokens.weight"
    head = load_file(tmp_path / index["weight_map"][table])[table].clone()
    if not same:
        head[-1, -1] += 1
    index["weight_map"]["lm_head.weight"] = "more.safetensors"
    (tmp_path / hf.INDEX).write_text(json.dumps(index))
    save_file({"lm_head.weight": head}, tmp_path / "more.safetensors")
    if same:
        hf.parameters(tmp_path, model)
        return
    with pytest.raises(WeightsError, match=r"has a head, lm_head\.weight, that is not its embedding"):
        hf.parameters(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_types_that_mean_nothing_without_a_scale_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    file = tmp_path / "model-00002-of-00004.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, file)
    with pytest.raises(
        WeightsError, match=r"up_proj\.weight in .* is of type (F8_E4M3|I8), without a scale beside it: training"
    ):
        hf.parameters(tmp_path, TINY)


def test_other_weights_are_not_written_over(tmp_path: Path) -> None:
    export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        WeightsError, match=r"has weights already, model-00001-of-00004\.safetensors: export to another"
    ):
        export.require_writable(tmp_path, TINY, WORKLOAD)
    with pytest.raises(WeightsError, match="has weights already"):
        export.write(tmp_path, replace(TINY, num_hidden_layers=1), WORKLOAD, parameters(TINY))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_export_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(9))

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if next(calls) == 2:
            path.write_bytes(b"half")
            (tmp_path / "notes.md").touch()  # another's, meanwhile
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata=metadata)

    (tmp_path / "README.md").touch()
    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(NotExported, match=r"could not be exported to .*No space left on device"):
        export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "notes.md"]


def test_what_does_not_reach_the_drive_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(export, "sync", lost)
    with pytest.raises(NotExported, match=r"could not be exported to .*Input/output error"):
        export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    def diverged(i: int) -> Tensor:
        found = parameters(TINY)(i)
        found[3] = torch.nan if i == 1 else 0.0
        return found

    with pytest.raises(Diverged, match="the weights of layer 1 are not finite"):
        export.write(tmp_path, TINY, WORKLOAD, diverged)
    assert not list(tmp_path.iterdir())


def test_an_export_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(i: int) -> Tensor:
        if i == 2:
            raise KeyboardInterrupt
        return parameters(TINY)(i)

    with pytest.raises(KeyboardInterrupt):
        export.write(tmp_path, TINY, WORKLOAD, interrupted)
    assert not list(tmp_path.iterdir())


class Ended(BaseException):
    """Ends an export at once, as a signal does: nothing is cleared up."""


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("how", ["killed", "interrupted", "no room"])
def test_an_export_that_is_ended_while_files_take_their_places_is_made_anew(
    rank: int | None, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of its files; what else is in the folder stays."""
    workload = replace(WORKLOAD, lora_rank=rank)
    source = parameters(TINY) if rank is None else initial.random_adapters(TINY, rank, 0)
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    (base / "tokenizer.json").write_text("{}")
    export.write(tmp_path / "whole", TINY, workload, source, base)
    right = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    sums = {TINY.layer_name(i): {"weights": checksum(source(i))} for i in trained.layers(TINY, workload)}
    error: BaseException = {"killed": Ended(), "interrupted": KeyboardInterrupt(), "no room": OSError("no room")}[how]
    move, clear = Path.replace, export._clear
    for moved in range(len(right)):
        out.mkdir()
        (out / "README.md").write_text("mine")
        calls = iter(range(99))

        def replacing(path: Path, target: Path, moved: int = moved, calls: Iterator[int] = calls) -> Path:
            if next(calls) == moved:
                raise error
            return move(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", replacing)
            if how == "killed":
                patched.setattr(export, "_clear", lambda folder: None)
            with pytest.raises(NotExported if how == "no room" else type(error)):
                export.write(out, TINY, workload, source, base)
        assert not export.is_of(out, TINY, workload, sums)
        assert how == "killed" or not list(out.glob("*.safetensors"))
        export.write(out, TINY, workload, source, base)
        assert export._clear is clear and export.is_of(out, TINY, workload, sums)
        found = {path.name: path.read_bytes() for path in out.iterdir()}
        assert found == {**right, "README.md": b"mine"}
        shutil.rmtree(out)


@pytest.mark.parametrize("name", ["mixtral", "llama, tied"])
def test_weights_are_known_to_be_a_checkpoints_by_their_bits(name: str, tmp_path: Path) -> None:
    model, source = MODELS[name], parameters(MODELS[name])
    sums = {model.layer_name(i): {"weights": checksum(source(i))} for i in model.layers}
    assert not export.is_of(tmp_path, model, WORKLOAD, sums)
    export.write(tmp_path, model, WORKLOAD, source)
    assert export.is_of(tmp_path, model, WORKLOAD, sums)
    assert not export.is_of(tmp_path, model, WORKLOAD, {**sums, "head": {"weights": 3}})
    assert not export.is_of(tmp_path, model, replace(WORKLOAD, lora_rank=4), sums)
    assert not export.is_of(tmp_path, model, replace(WORKLOAD, task="evaluate"), sums)
    (tmp_path / export.PARTIAL).mkdir()  # which an export removes at its very end
    assert export.is_of(tmp_path, model, WORKLOAD, sums)
    (tmp_path / export.PARTIAL / export.LEAVING).touch()
    assert not export.is_of(tmp_path, model, WORKLOAD, sums)
    with pytest.raises(WeightsError, match="has weights already"):
        export.write(tmp_path, model, WORKLOAD, source)  # nor has anything been removed


def test_nothing_is_exported_into_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003" / "hf"
    folder.parent.mkdir()
    (folder.parent / "training.json").touch()
    with pytest.raises(CheckpointError, match="is in a checkpoint, which a later save removes"):
        export.write(folder, TINY, WORKLOAD, parameters(TINY))
    assert not folder.exists()
    (tmp_path / "training.json").touch()  # another's: its folder is not called as a checkpoint is
    export.require_writable(tmp_path / "other", TINY, WORKLOAD)


def test_an_export_takes_what_it_says(tmp_path: Path) -> None:
    for name, workload, source in (
        ("whole", WORKLOAD, parameters(TINY)),
        ("adapters", replace(WORKLOAD, lora_rank=4), initial.random_adapters(TINY, 4, 0)),
    ):
        export.write(tmp_path / name, TINY, workload, lambda i, source=source: source(i).bfloat16())  # type: ignore[misc]
        taken = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        said = export.written_bytes(TINY, workload)
        assert said <= taken <= said + 20_000


def test_weights_that_may_not_be_read_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"any": torch.zeros(1)}, tmp_path / "model.safetensors")

    def denied(*_: object, **__: object) -> None:
        raise FileNotFoundError("No such file or directory")  # as safetensors has it, for whoever is not root

    monkeypatch.setattr(hf.safetensors, "safe_open", denied)
    with pytest.raises(WeightsError, match=r"model\.safetensors may not be read: check its permissions"):
        hf.parameters(tmp_path, TINY)


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        hf.parameters(tmp_path, TINY)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r", but pytorch_model\.bin: transformers' save_pretrained makes such files"):
        hf.parameters(tmp_path, TINY)


@pytest.mark.parametrize("before", ["", "model.language_model."])
def test_weights_by_other_names_are_told_by_them(before: str, tmp_path: Path) -> None:
    source = parameters(TINY)
    names = {
        f"{before}{hf.global_name(TINY, i, name).removeprefix('model.')}": part.clone()
        for i in TINY.layers
        for name, part in views(source(i), TINY.parameter_shapes(i)).items()
    }
    save_file(names, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=rf"lack model\.embed_tokens\.weight: they have {before}embed_tokens\.weight;"
    ):
        hf.parameters(tmp_path, TINY)


SMALL_TEXT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 7,
}  # fmt: skip
PATCHES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
PIXTRAL = PATCHES | {"model_type": "pixtral", "head_dim": 8}
OF_QWEN = {"hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
IMAGE: dict[str, Any] = {"image_token_index": 250}
IMAGE_ID: dict[str, Any] = {"image_token_id": 250}
IDS = IMAGE_ID | {"video_token_id": 251}
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 5e5}}
OLDER = {"rope_parameters": {"rope_type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 5e5}, "head_dim": 8}
OF_GLM = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 5e5}
OF_GEMMA4 = {
    "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 24,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
}  # fmt: skip
# By class: what is said of its language model, of what sees, and beside them.
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        PATCHES,
        {"mm_tokens_per_image": 1, **IMAGE},
    ),
    "Gemma4": (
        OF_GEMMA4,
        {**PATCHES, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
        IMAGE_ID,
    ),
    "Gemma4Unified": (OF_GEMMA4, {"mm_embed_dim": 32, "mm_posemb_size": 8}, IMAGE_ID),
    "Llama4": (
        {"num_local_experts": 4, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "head_dim": 8},
        {
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        {},
    ),
    "Mistral3": ({"sliding_window": None}, PIXTRAL, IMAGE),
    "Qwen3_5": (LINEAR, OF_QWEN, IDS),
    "Qwen3_5Moe": ({**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 48}, OF_QWEN, IDS),
    "Qwen2VL": (OLDER, {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2}, IDS),
    "Qwen2_5_VL": (OLDER, {**OF_QWEN, "fullatt_block_indexes": [0]}, IDS),
    "Qwen3VL": (SECTIONS, {**OF_QWEN, "deepstack_visual_indexes": [0]}, IDS),
    "Qwen3VLMoe": ({**SECTIONS, **EXPERTS}, {**OF_QWEN, "deepstack_visual_indexes": [0]}, IDS),
    "Glm4vMoe": ({**SHARED, "rope_parameters": OF_GLM}, OF_QWEN, IDS),
    "Glm4v": ({"head_dim": 8, "rope_parameters": OF_GLM}, OF_QWEN, IDS),
    "Glm46V": (
        {"head_dim": 8, "rope_parameters": {**OF_GLM, "mrope_section": [1, 1], "partial_rotary_factor": 0.5}},
        {"model_type": "glm4v_vision", **OF_QWEN},
        IDS,
    ),
    "InternVL": ({}, PATCHES, IMAGE_ID),
    "Exaone4_5_": (
        {"model_type": "exaone4", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        {**OF_QWEN, "fullatt_block_indexes": [0], "num_key_value_heads": 2},
        IDS,
    ),
    "Kimi_K25": (
        {
            **SHARED, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 20,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        },
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"projection_hidden_size": 16, **IDS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "alone"),
    [
        ("Gemma3", "Gemma3ForCausalLM"),
        ("Gemma4", "Gemma4ForCausalLM"),
        ("Gemma4Unified", "Gemma4UnifiedForCausalLM"),
        ("Llama4", "Llama4ForCausalLM"),
        ("Mistral3", "MistralForCausalLM"),
        ("Mistral3", "Ministral3ForCausalLM"),
        ("Mistral3", "Mistral4ForCausalLM"),
        ("Qwen3_5", "Qwen3_5ForCausalLM"),
        ("Qwen3_5Moe", "Qwen3_5MoeForCausalLM"),
        ("Qwen2VL", "Qwen2ForCausalLM"),
        ("Qwen2_5_VL", "Qwen2ForCausalLM"),
        ("Qwen3VL", "Qwen3ForCausalLM"),
        ("Qwen3VLMoe", "Qwen3MoeForCausalLM"),
        ("Glm4vMoe", "Glm4MoeForCausalLM"),
        ("Glm4v", "Glm4ForCausalLM"),
        ("InternVL", "Qwen3ForCausalLM"),
        ("InternVL", "LlamaForCausalLM"),
        ("Glm46V", "Glm4ForCausalLM"),
        ("Glm46V", "Glm4MoeForCausalLM"),
        ("Exaone4_5_", "Exaone4ForCausalLM"),
        ("Kimi_K25", "DeepseekV3ForCausalLM"),
    ],
)
def test_of_a_model_that_sees_images_the_language_model_is_read(
    family: str, alone: str, tied: bool, within: bool, tmp_path: Path
) -> None:
    """By both kinds of names that its files have; what is written of it is a language model."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    of_text, vision, more = SEEING[family]
    text = copy.deepcopy(SMALL_TEXT | of_text)  # into which transformers writes
    if family == "Llama4":  # whose language model counts alone
        text["tie_word_embeddings"] = tied
    if family in ("Mistral3", "InternVL"):
        text["model_type"] = FAMILIES[alone].model_type
    if family == "Glm46V":
        text["model_type"] = "glm4v_text"
    if (family, alone) == ("Glm46V", "Glm4MoeForCausalLM"):
        text |= SHARED | {"model_type": "glm4v_moe_text"}
    if alone == "Mistral4ForCausalLM":
        text |= SEEING["Kimi_K25"][0]
        del text["head_dim"]  # which is of both parts of a head
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, **more
    )
    torch.manual_seed(3)
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    theirs.save_pretrained(tmp_path / "theirs")
    if family == "Kimi_K25":  # as it is published; transformers 5.24 writes the language model's layers as blocks, too
        written = load_file(tmp_path / "theirs" / hf.WHOLE)
        renamed = {
            name.replace("language_model.model.blocks", "language_model.model.layers"): written[name]
            for name in written
        }
        save_file(renamed, tmp_path / "theirs" / hf.WHOLE)
    if within:
        values = {name: value for name, value in theirs.state_dict().items() if not (tied and name.endswith(hf.HEAD))}
        if family == "Qwen3VLMoe":  # as it is published
            values |= {name: part.mT.contiguous() for name, part in values.items() if ".mlp.experts." in name}
        if family.startswith("Qwen3_5"):  # a further block's
            values["mtp.fc.weight"] = torch.ones(2, 2)
        save_file(values, tmp_path / "theirs" / hf.WHOLE)
    model = presets.load(tmp_path / "theirs")
    assert model.architecture == alone and model.tie_word_embeddings == tied
    asked = theirs.language_model if family == "Llama4" else theirs  # without images transformers 5.24 fails
    source = hf.parameters(tmp_path / "theirs", model)
    tokens, targets = torch.randint(0, 250, (2, 2, 16))
    loss, _ = loss_and_gradients(model, source, tokens, targets, "none")
    right = F.cross_entropy(asked(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, right.detach(), rtol=1e-5, atol=0)
    export.write(tmp_path / "ours", model, WORKLOAD, source, tmp_path / "theirs")
    written = opener(alone)(tmp_path / "ours")
    assert type(written).__name__ == alone and written.config.eos_token_id == 7
    torch.testing.assert_close(written(input_ids=tokens).logits, asked(input_ids=tokens).logits)
    assert hf.sees_images(tmp_path / "theirs") and not hf.sees_images(tmp_path / "ours")
    modules = {f"base_model.model.{name}" for name, _ in theirs.named_modules()}
    for name in model.adapter_shapes(0, 2):
        adapter = hf.adapter_name(model, 0, name, seeing=True)
        assert adapter.rpartition(".lora_")[0] in modules and hf.are_seeing([adapter])


def test_a_tensor_that_is_missing_or_has_another_shape_is_named(tmp_path: Path) -> None:
    export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    (tmp_path / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"lack model\.layers\.2\.input_layernorm\.weight"):
        hf.parameters(tmp_path, replace(TINY, num_hidden_layers=3))
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.gate_proj\.weight .* has the shape \[\d+, \d+\], the"):
        hf.parameters(tmp_path, replace(TINY, intermediate_size=2 * TINY.intermediate_size))


def test_weights_of_another_model_are_told_by_its_numbers(tmp_path: Path) -> None:
    export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    other = replace(TINY, num_hidden_layers=3, intermediate_size=100, rope_theta=5.0)
    with pytest.raises(
        WeightsError, match=r"than tiny: intermediate_size is 64, not 100; num_hidden_layers is 2, not 3$"
    ):
        hf.parameters(tmp_path, other)
    heads = replace(TINY, num_attention_heads=2 * TINY.num_attention_heads, head_dim=TINY.head_dim // 2)
    heads = replace(heads, num_key_value_heads=2 * TINY.num_key_value_heads)
    assert heads.parameter_shapes(0) == TINY.parameter_shapes(0)
    with pytest.raises(WeightsError, match=r"than tiny: num_attention_heads is 4, not 8; num_key_value_heads is 2, "):
        hf.parameters(tmp_path, heads)
    hf.parameters(tmp_path, replace(TINY, max_position_embeddings=4096))  # of which no tensor knows
    config = json.loads((tmp_path / "config.json").read_text())
    for change, told in (
        ({"architectures": ["ApertusForCausalLM"]}, "ApertusForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(WeightsError, match=rf"another model than tiny, by its config\.json: .*{told}"):
            hf.parameters(tmp_path, TINY)
    glm = MODELS["glm-4"]
    export.write(tmp_path / "glm", glm, WORKLOAD, parameters(glm))
    with pytest.raises(WeightsError, match=r"rope_interleave is True, not False"):
        hf.parameters(tmp_path / "glm", replace(glm, rope_interleave=False))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GraniteForCausalLM"]}))
    with pytest.raises(WeightsError, match=r"another model than tiny: attention_multiplier is 1\.0, not None"):
        hf.parameters(tmp_path, TINY)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match=r"config\.json holds no JSON object"):
        hf.parameters(tmp_path, TINY)


def test_weights_trained_with_another_rotation_are_told_and_taken(tmp_path: Path) -> None:
    export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    with pytest.warns(UserWarning, match=rf"trained as: rope_theta is {TINY.rope_theta}, not 5\.0$"):
        hf.parameters(tmp_path, replace(TINY, rope_theta=5.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.parameters(tmp_path, TINY)


def test_files_of_weights_may_be_read_by_whom_other_files_may(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    export.write(tmp_path, TINY, WORKLOAD, parameters(TINY))
    file = tmp_path / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(WeightsError, match=r"model-00002-of-00004\.safetensors cannot be read"):
        hf.parameters(tmp_path, TINY)
    file.unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00004\.safetensors cannot be read"):
        hf.parameters(tmp_path, TINY)
    for text in ("{}", "[]", "3", '{"weight_map": 3}', '{"weight_map": {"model.norm.weight": 3}}'):
        (tmp_path / hf.INDEX).write_text(text)
        with pytest.raises(WeightsError, match=r"the weights in .* cannot be read: the weight_map of .* does not name"):
            hf.parameters(tmp_path, TINY)

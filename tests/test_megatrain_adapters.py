"""Adapters in files, folded into weights: what is then computed, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import export, hf, initial, session
from megatrain.adam import Adam
from megatrain.adapters import folded
from megatrain.checksum import checksum
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.linear import LORA_SCALE
from megatrain.template import views
from megatrain.train import Trainer
from schedules import policies, presets
from schedules.errors import InputError
from schedules.verify import Verified, verify
from schedules.workload import MemoryBudget, Workload

TINY = replace(presets.load("tiny"), num_hidden_layers=2)
STEP = Workload(micro_batch_size=1, seq_len=16, precision="fp32")
START = initial.random_parameters(TINY, 0)
RANK = 4


def step(policy: str, **knobs: int) -> Verified:
    room = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)
    return verify(policies.build(policy, TINY, STEP, room, **knobs))


def written(folder: Path, *, scaled: float = 1.0, **settings: Any) -> Path:
    """Adapters that do something, in files; `settings` of their config.json in place of those written."""
    adapters = initial.random_adapters(TINY, RANK, 0)
    export.write(folder, TINY, replace(STEP, lora_rank=RANK), lambda i: scaled * torch.randn_like(adapters(i)))
    config = json.loads((folder / hf.ADAPTER_CONFIG).read_text())
    (folder / hf.ADAPTER_CONFIG).write_text(json.dumps({**config, **settings}))
    return folder


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Other tensors in the file; none where there is None."""
    found = load_file(folder / hf.ADAPTER_WEIGHTS) | tensors
    save_file({name: t for name, t in found.items() if t is not None}, folder / hf.ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, LORA_SCALE),
        ({"lora_alpha": 1}, 1 / RANK),
        ({"lora_alpha": 16, "use_rslora": True, "init_lora_weights": True, "use_dora": False}, 8.0),
    ],
)
def test_the_product_of_each_pair_is_added_to_its_matrix(
    settings: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    folder = written(tmp_path, **settings)
    first = "base_model.model.model.layers.1.mlp.up_proj"
    changed(folder, **{f"{first}.lora_A.weight": None, f"{first}.lora_B.weight": None})
    found, of = folded(START, folder, TINY), load_file(folder / hf.ADAPTER_WEIGHTS)
    for i in TINY.layers:
        before, after = (views(source(i), TINY.parameter_shapes(i)) for source in (START, found))
        for name, weight in before.items():
            place = f"base_model.model.model.layers.{i}.{name.removesuffix('.weight')}"
            if f"{place}.lora_A.weight" not in of:
                assert torch.equal(after[name], weight)
                continue
            right = weight + scale * of[f"{place}.lora_B.weight"] @ of[f"{place}.lora_A.weight"]
            torch.testing.assert_close(after[name], right)


def test_adapters_beside_fused_projections_are_folded_as_one(tmp_path: Path) -> None:
    model = replace(TINY, architecture="Phi3ForCausalLM", fused_projections=True)
    begun = initial.random_adapters(model, RANK, 0)
    export.write(tmp_path, model, replace(STEP, lora_rank=RANK), lambda i: torch.randn_like(begun(i)))
    assert json.loads((tmp_path / hf.ADAPTER_CONFIG).read_text())["target_modules"] == [
        "down_proj", "gate_up_proj", "o_proj", "qkv_proj",
    ]  # fmt: skip
    of = load_file(tmp_path / hf.ADAPTER_WEIGHTS)
    place = "base_model.model.model.layers.1.self_attn.qkv_proj"
    product = LORA_SCALE * of[f"{place}.lora_B.weight"] @ of[f"{place}.lora_A.weight"]
    before, after = (views(source(1), model.parameter_shapes(1)) for source in (START, folded(START, tmp_path, model)))
    parts = product.split([before[f"self_attn.{letter}_proj.weight"].shape[0] for letter in "qkv"])
    for letter, part in zip("qkv", parts, strict=True):
        name = f"self_attn.{letter}_proj.weight"
        torch.testing.assert_close(after[name], before[name] + part)


def test_folded_adapters_compute_what_they_do_beside_the_weights(tmp_path: Path) -> None:
    folder = written(tmp_path, scaled=0.3)
    of = load_file(folder / hf.ADAPTER_WEIGHTS)

    def adapters(i: int) -> torch.Tensor:
        return torch.cat([of[hf.adapter_name(TINY, i, name)].flatten() for name in TINY.adapter_shapes(i, RANK)])

    losses = []
    for policy, source in (("lora_streamed", START), ("flexgen_block", folded(START, folder, TINY))):
        verified = step(policy, **({"rank": RANK} if policy == "lora_streamed" else {}))
        data = RandomTokens(vocab_size=TINY.vocab_size, workload=STEP)
        with Trainer(verified, CpuBackend(), data, Adam(lr=0.0), initial=source, adapters=adapters) as trainer:
            losses.append(trainer.run(2))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[0][0] - losses[0][1]) > 1e-3


def test_what_was_trained_as_adapters_can_be_evaluated(tmp_path: Path) -> None:
    text = tmp_path / "text.npy"
    np.save(text, np.arange(400) % 7)
    with_text = session.Files(tokens=text)
    made = replace(with_text, export=tmp_path / "a")
    trained = session.train(step("lora_streamed", rank=RANK), steps=40, hyper=Adam(lr=1e-2), files=made)
    losses = [
        session.train(step("flexgen_block"), steps=4, hyper=Adam(lr=0.0), files=files).losses
        for files in (with_text, replace(with_text, adapters=tmp_path / "a"))
    ]
    assert max(losses[1]) < min(losses[0]) - 0.4 and losses[1][0] == pytest.approx(trained.losses[-1], rel=0.05)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_with_adapters_folded_in_are_exported_without_a_training(
    precision: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As peft's merge_and_unload, a layer at a time, in the precision asked for."""
    adapters, base, merged = written(tmp_path / "adapters", scaled=0.3), tmp_path / "base", tmp_path / "merged"
    export.write(base, TINY, STEP, START)
    (base / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(session, "backend_of", None)  # nothing is allocated
    stages: list[str] = []
    files = session.Files(weights=base, adapters=adapters, export=merged)
    room = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)
    schedule = policies.build("streamed", TINY, replace(STEP, precision=precision), room)
    session.train(verify(schedule), steps=0, hyper=Adam(lr=0.0), files=files, on_stage=stages.append)
    assert stages == [f"exporting layer {n} of 4" for n in (1, 2, 3, 4)]
    assert (merged / "tokenizer.json").exists()
    found, right = hf.parameters(merged, TINY), folded(START, adapters, TINY)
    for i in TINY.layers:
        assert torch.equal(found(i), right(i).to(dtype).float())
    assert json.loads((merged / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert not torch.equal(found(0), START(0).to(dtype).float())


def test_adapters_that_nothing_has_trained_are_not_exported(tmp_path: Path) -> None:
    export.write(tmp_path / "base", TINY, STEP, START)
    files = session.Files(weights=tmp_path / "base", export=tmp_path / "adapters")
    with pytest.raises(InputError, match="no steps are to be trained"):
        session.train(step("lora_streamed", rank=RANK), steps=0, hyper=Adam(lr=0.0), files=files)
    assert not (tmp_path / "adapters").exists()


def test_adapters_beside_a_model_that_sees_images_have_the_names_that_they_need_there(tmp_path: Path) -> None:
    seeing, adapters = tmp_path / "seeing", initial.random_adapters(TINY, RANK, 0)
    seeing.mkdir()
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}
    (seeing / "config.json").write_text(json.dumps(config))
    workload, stored = replace(STEP, lora_rank=RANK), list[dict[str, torch.Tensor]]()
    made = {i: torch.randn_like(adapters(i)) for i in TINY.blocks}
    sums = {TINY.layer_name(i): {"weights": checksum(made[i])} for i in TINY.blocks}
    for base in (None, seeing):
        folder = tmp_path / str(base is None)
        export.write(folder, TINY, workload, made.__getitem__, base)
        stored.append(load_file(folder / hf.ADAPTER_WEIGHTS))
        assert export.is_of(folder, TINY, workload, sums)
        assert not export.is_of(folder, TINY, workload, {**sums, "0": {"weights": 0}})
    before, within = ("base_model.model.model.layers.", "base_model.model.model.language_model.layers.")
    assert {name.replace(within, before): part.sum() for name, part in stored[1].items()} == {
        name: part.sum() for name, part in stored[0].items()
    }
    assert all(name.startswith(within) for name in stored[1])
    alone, beside = (folded(START, tmp_path / name, TINY) for name in ("True", "False"))
    assert all(torch.equal(alone(i), beside(i)) for i in TINY.layers)
    assert not torch.equal(alone(0), START(0))


def test_adapters_do_not_go_with_a_checkpoint_or_with_other_adapters(tmp_path: Path) -> None:
    folder, hyper = written(tmp_path / "a"), Adam(lr=1e-3)
    with pytest.raises(InputError, match="--adapters become part of the weights: take a policy that"):
        session.train(step("lora_streamed"), steps=1, hyper=hyper, files=session.Files(adapters=folder))
    session.train(step("streamed"), steps=1, hyper=hyper, files=session.Files(adapters=folder, save=tmp_path / "run"))
    with pytest.raises(InputError, match="goes on with the checkpoint's weights: leave out --adapters"):
        session.train(
            step("streamed"), steps=1, hyper=hyper, files=session.Files(adapters=folder, resume=tmp_path / "run")
        )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"peft_type": "IA3"}, "is not of LoRA, by its peft_type"),
        ({"use_dora": True}, "has use_dora True: only adapters that add the product of two matrices can be folded"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern {'q_proj': 8}: "),
        ({"bias": "all"}, "has bias 'all': "),
        ({"init_lora_weights": "pissa_niter_16"}, "has init_lora_weights 'pissa_niter_16': "),
        ({"of_tomorrow": 3}, "has of_tomorrow 3: "),
        ({"r": "four"}, "has r 'four' and lora_alpha 8.0: numbers are needed"),
        ({"r": 0}, "has r 0 and"),
        ({"r": True}, "has r True and"),
        ({"lora_alpha": None}, "lora_alpha None: numbers"),
        ({"r": 8}, r"has the shape \[4, 64\], for tiny \[8, 64\]"),
    ],
)
def test_settings_that_mean_another_thing_are_told(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(hf.WeightsError, match=told):
        folded(START, written(tmp_path, **settings), TINY)


def test_what_is_no_folder_of_adapters_is_told(tmp_path: Path) -> None:
    def told(text: str, folder: Path = tmp_path / "a") -> None:
        with pytest.raises(hf.WeightsError, match=text):
            folded(START, folder, TINY)

    told("there is no folder", tmp_path / "nowhere")
    folder = written(tmp_path / "a")
    other = "base_model.model.lm_head.lora_A.weight"
    changed(folder, **{other: torch.zeros(4, 32)})
    told("contains base_model.model.lm_head.lora_A.weight, which belongs to no projection of tiny")
    place = "base_model.model.model.layers.0.self_attn.v_proj"
    changed(folder, **{other: None, f"{place}.lora_B.weight": None})
    told(r"lacks .*0\.self_attn\.v_proj\.lora_B\.weight, which .*lora_A\.weight is multiplied with")
    changed(folder, **{f"{place}.lora_A.weight": torch.zeros(4, 32, dtype=torch.int8)})
    told("is of type I8: bf16, fp16 or fp32 are read")
    save_file({}, folder / hf.ADAPTER_WEIGHTS)
    told("has no adapters")
    (folder / hf.ADAPTER_WEIGHTS).write_bytes(b"not safe")
    told(r"adapter_model\.safetensors cannot be read")
    (folder / hf.ADAPTER_CONFIG).write_text("{")
    told(r"adapter_config\.json cannot be read")
    (folder / hf.ADAPTER_CONFIG).unlink()
    told(r"has no adapter_config\.json: give adapters in peft's files, as --export writes them")

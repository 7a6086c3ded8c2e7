"""Documents in a row: each is trained as if it were alone, and what does not go with them is refused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from families import MODELS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain import autograd, initial
from megatrain.adam import Adam
from megatrain.attention import Attention, _attend, _attend_backward, band
from megatrain.cpu import CpuBackend
from megatrain.data import DataError
from megatrain.documents import documents_of, goes_on
from megatrain.session import train
from megatrain.template import TemplateError, templates, views
from megatrain.token_file import TokenFile, from_file
from megatrain.train import Debug, Trainer
from megatrain.training_files import Files
from megatrain.way import Way
from schedules import policies, presets
from schedules.errors import InputError
from schedules.saved import saved_bytes
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

CPU = torch.device("cpu")
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
END = 7
WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=16, precision="fp32")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- where they are


def test_a_document_ends_with_its_last_token_or_with_the_sequence() -> None:
    tokens = torch.tensor([[1, 2, END, END, 5, 6], [END, 1, 2, 3, 4, END]])
    found = documents_of(tokens, END, CPU)
    assert found.lengths == (3, 1, 2, 1, 5)
    assert found.starts.tolist() == [0, 3, 4, 6, 7, 12] and found.starts.dtype == torch.int32
    assert [*found.alike] == [(1, 3), (1, 1), (1, 2), (1, 1), (1, 5)]
    assert [*documents_of(torch.full((2, 3), END), END, CPU).alike] == [(6, 1)]
    assert documents_of(torch.zeros(2, 3), END, CPU).lengths == (3, 3)


def test_a_first_token_is_not_predicted_from_another_document() -> None:
    tokens = torch.tensor([[END, 1, END, END, 5, 6]])
    assert goes_on(tokens, END).int().tolist() == [[1, 0, 1, 0, 0, 1]]


# ---- attention


@given(
    data=st.data(), batch=st.integers(1, 3), seq=st.integers(1, 9), kind=st.sampled_from(["plain", "window", "sinks"])
)
def test_attention_in_a_document_is_attention_of_it_alone(kind: str, data: st.DataObject, batch: int, seq: int) -> None:
    ends = data.draw(st.lists(st.booleans(), min_size=batch * seq, max_size=batch * seq))
    window = data.draw(st.integers(1, seq)) if kind == "window" else None
    documents = documents_of(torch.tensor(ends).view(batch, seq).long() * END, END, CPU)
    width = data.draw(st.sampled_from([4, 8]))  # of values
    inputs = [randn(batch, seq, 4, 8), randn(batch, seq, 2, 8, seed=1), randn(batch, seq, 2, width, seed=2)]
    sinks = [randn(4, seed=3)] if kind == "sinks" else []
    mask = None if kind == "plain" else band(seq, window, CPU, torch.float64)
    one = Attention(window=window, mask=mask)
    dy = randn(batch, seq, 4, width, seed=4)

    def run(how: Attention, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v, *sinks)]
        y = how.forward(*leaves[:3], *(leaves[3:] or [None]))
        return y.detach(), torch.autograd.grad(y, leaves, dy)

    y, grads = run(replace(one, documents=documents), *inputs, dy)
    alone = []
    for begin, end in itertools.pairwise(documents.starts.tolist()):
        row, first = divmod(begin, seq)
        part = slice(first, first + end - begin)
        alone.append(run(one, *(t[row : row + 1, part] for t in (*inputs, dy))))
    torch.testing.assert_close(y, torch.cat([y for y, _ in alone], 1).view_as(y))
    for number, grad in enumerate(grads[:3]):
        torch.testing.assert_close(grad, torch.cat([of[number] for _, of in alone], 1).view_as(grad))
    for grad in grads[3:]:
        torch.testing.assert_close(grad, torch.stack([of[3] for _, of in alone]).sum(0))


class ToldExtents(TorchDispatchMode):
    """Where the documents of queries and keys begin, and the longest of each, as flash attention is told."""

    def __init__(self) -> None:
        super().__init__()
        self.extents: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_flash_attention" in func.name():
            first = 6 if "backward" in func.name() else 3
            self.extents.append(args[first : first + 4])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("window", [None, 3])
def test_a_gpus_attention_takes_documents(window: int | None) -> None:
    documents = documents_of(tokens_with_ends((2, 256)), END, CPU)
    with torch.no_grad(), FakeTensorMode(), ToldExtents() as told:
        q, k, v = (torch.empty(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
        starts = torch.empty(len(documents.lengths) + 1, device="cuda", dtype=torch.int32)
        how = Attention(window=window, documents=replace(documents, starts=starts))
        y, total, *random = _attend(q, k, v, how)
        assert y.shape == q.shape and total.shape == (8, 512) and total.dtype == torch.float32
        grads = _attend_backward(y, q, k, v, y, total, random, how)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    longest = max(documents.lengths)
    for of_queries, of_keys, *most in told.extents:
        assert of_queries is starts and of_keys is starts and most == [longest, longest]
    assert len(told.extents) == 2


def tokens_with_ends(shape: tuple[int, ...]) -> Tensor:
    chance = np.random.default_rng(0)
    return torch.from_numpy(np.where(chance.random(shape) < 0.05, END, 1))


# ---- training


def packed(folder: Path, workload: Workload, vocabulary: int, **changed: object) -> TokenFile:
    """Text of which a token in eight ends a document."""
    chance = np.random.default_rng(1)
    tokens = np.where(chance.random(600) < 1 / 8, END, chance.integers(8, vocabulary, size=600))
    np.save(folder / "tokens.npy", tokens)
    return TokenFile(path=folder / "tokens.npy", vocab_size=vocabulary, workload=workload, document_end=END, **changed)


POLICIES = {
    "streamed": {},
    "megatrain": {},
    "zero3_offload": {},
    "lohan": {"swap": 1},
}
KINDS = [
    "llama", "mistral with a window", "gpt-oss", "gemma3", "deepseek-v3", "exaone4", "qwen3-moe", "phi3", "olmo3",
    "granite", "k-exaone",
]  # fmt: skip


def trained_by(schedule: Schedule, data: TokenFile, **options: object) -> tuple[list[float], dict[int, Tensor]]:
    start = initial.random_parameters(schedule.model, 0)
    with Trainer(verify(schedule), CpuBackend(), data, Adam(lr=1e-3, eps=1e-4), initial=start, **options) as run:
        return run.run(4), {i: run.parameters(i) for i in schedule.model.layers}


@pytest.mark.parametrize(("kind", "name"), [*((kind, "streamed") for kind in KINDS), *(("llama", p) for p in POLICIES)])
def test_documents_in_a_row_are_trained_as_each_alone(kind: str, name: str, tmp_path: Path) -> None:
    model = MODELS[kind]
    schedule = policies.build(name, model, WORKLOAD, ROOM, **POLICIES[name])
    data = packed(tmp_path, schedule.workload, model.vocab_size)
    losses, parameters = trained_by(schedule, data)
    right = reference.train(
        model, schedule.workload, data, Adam(lr=1e-3, eps=1e-4), initial=initial.random_parameters(model, 0), steps=4
    )
    assert losses == pytest.approx(right.losses, rel=2e-6)
    for i, found in parameters.items():
        assert (found - right.parameters[i]).abs().max() < 5e-6 * right.parameters[i].abs().max(), i
    poisoned, _ = trained_by(schedule, data, debug=Debug(poison=True, delay_s=2e-4))
    assert poisoned == losses
    _, together = trained_by(schedule, replace(data, document_end=None))
    assert any((found - together[i]).abs().max() > 1e-3 * found.abs().max() for i, found in parameters.items())


def test_a_document_is_trained_the_same_wherever_it_lies(tmp_path: Path) -> None:
    """The loss of a step is the same whichever neighbours its documents have."""
    model, workload = presets.load("tiny"), replace(WORKLOAD, accumulation=1)
    chance = np.random.default_rng(3)
    documents = [np.append(chance.integers(8, 256, size=length), END) for length in (4, 9, 2, 1, 10, 3)]
    losses = []
    for order in ((0, 1, 2, 3, 4, 5), (4, 5, 2, 1, 0, 3)):
        row = np.concatenate([documents[i] for i in order[:3]]), np.concatenate([documents[i] for i in order[3:]])
        assert [len(part) for part in row] in ([18, 17], [18, 17])
        np.save(tmp_path / "rows.npy", np.stack([part[:17] for part in row]))
        data = TokenFile(path=tmp_path / "rows.npy", vocab_size=256, workload=workload, document_end=END)
        schedule = policies.build("streamed", model, workload, ROOM)
        losses.append(trained_by(schedule, data)[0][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_what_a_block_keeps_does_not_depend_on_documents() -> None:
    model, workload = MODELS["llama"], Workload(micro_batch_size=2, seq_len=16, precision="bf16")
    documents = documents_of(tokens_with_ends((2, 16)), END, CPU)
    assert len(documents.lengths) > 2
    own = templates(model, seq_len=16, device=CPU, dtype=torch.bfloat16)
    shapes = model.parameter_shapes(0)
    params = views(initial.random_parameters(model, 0)(0).bfloat16(), shapes)
    x = randn(2, 16, model.hidden_size).bfloat16()
    _, saved = autograd.forward(own.blocks["block"].within(documents), params, x)
    assert saved.nbytes == saved_bytes(model, 0, workload)


# ---- files and refusals


def test_a_mask_and_documents_both_tell_what_is_learned(tmp_path: Path) -> None:
    data = packed(tmp_path, WORKLOAD, 256)
    learned, tokens = data.learned(0), data.batch(0)
    assert learned is not None and torch.equal(learned, goes_on(tokens, END))
    np.save(tmp_path / "mask.npy", np.arange(600) % 2)
    both = replace(data, loss_mask=tmp_path / "mask.npy")
    mask = replace(both, document_end=None).learned(0)
    assert mask is not None and torch.equal(both.learned(0), mask & learned) and not torch.equal(mask, mask & learned)
    others = replace(data, document_end=None), replace(data, document_end=END + 1)
    assert len({data.known_by, both.known_by, *(other.known_by for other in others)}) == 4


def test_what_ends_no_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document ends with token 256: the model's vocabulary is 0 to 255"):
        replace(packed(tmp_path, WORKLOAD, 256), document_end=256)
    (tmp_path / "book.txt").write_text("words " * 20)
    with pytest.raises(DataError, match=r"book\.txt is text, of one document"):
        from_file(tmp_path / "book.txt", 256, WORKLOAD, document_end=10)
    with pytest.raises(DataError, match="--document-end is a token of a file"):
        Files(document_end=10).text(presets.load("tiny"), WORKLOAD, 0, 1)


def test_what_goes_on_from_one_document_to_the_next_is_refused(tmp_path: Path) -> None:
    model = MODELS["qwen3.5"]
    schedule = policies.build("streamed", model, WORKLOAD, ROOM)
    with pytest.raises(TemplateError, match="the linear attention of 2 of its blocks goes on from one document"):
        trained_by(schedule, packed(tmp_path, WORKLOAD, model.vocab_size))


@pytest.mark.parametrize(
    "kind", ["ministral3, of late queries", "phi4-mini, in long sequences", "llama-4, of late queries"]
)
def test_documents_would_count_as_long_as_their_sequence(kind: str) -> None:
    for seq_len, refused in ((4, False), (16, True)):
        with (
            pytest.raises(TemplateError, match="would count as long as theirs, 16 tokens") if refused else nullcontext()
        ):
            templates(MODELS[kind], seq_len=seq_len, device=CPU, dtype=torch.float32, documents=True)


def test_a_gpu_has_no_documents_in_fp32() -> None:
    with pytest.raises(TemplateError, match="attention within documents has no fp32 kernel on a GPU"):
        templates(MODELS["llama"], seq_len=4, device=torch.device("cuda"), dtype=torch.float32, documents=True)


def test_a_gpu_has_no_documents_for_wide_heads() -> None:
    model = replace(
        presets.load("gemma-4-12b"), num_hidden_layers=6, layer_types=(*["sliding_attention"] * 5, "full_attention")
    )
    with pytest.raises(TemplateError, match="documents has no kernel on a GPU for heads of 512, only up to 256"):
        templates(model, seq_len=4, device=torch.device("cuda"), dtype=torch.bfloat16, documents=True)


def test_graphs_would_repeat_one_steps_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "require", lambda way, on_gpu: None)  # as where there is a GPU
    packed(tmp_path, WORKLOAD, 256)
    verified = verify(policies.build("streamed", presets.load("tiny"), WORKLOAD, ROOM))
    files = Files(tokens=tmp_path / "tokens.npy", document_end=END)
    with pytest.raises(InputError, match="would go on with the documents of the step that was captured"):
        train(verified, steps=1, hyper=Adam(lr=1e-3), files=files, way=Way(graphs=True))


def test_what_is_held_out_has_documents_too(tmp_path: Path) -> None:
    packed(tmp_path, WORKLOAD, 256)
    verified = verify(policies.build("streamed", presets.load("tiny"), WORKLOAD, ROOM))
    file = tmp_path / "tokens.npy"
    told: list[tuple[float, int]] = []
    for end in (END, None):
        files = Files(tokens=file, document_end=end, held_out=file)
        train(
            verified, steps=1, hyper=Adam(lr=0.0), files=files,
            on_held_out=lambda step, loss, learned: told.append((loss, learned)),
        )  # fmt: skip
    (first, learned), _, (other, all_of_it), _ = told
    assert learned < all_of_it and first != other

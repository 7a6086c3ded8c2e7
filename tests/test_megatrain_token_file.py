"""Files of tokens: running text, an example a row, what of them is learned, and what is refused."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatrain import initial
from megatrain import token_file as files
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from megatrain.data import ByteText, DataError, inputs_and_targets, shares
from megatrain.token_file import TokenFile, from_file
from megatrain.train import Trainer
from schedules import policies, presets
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from tests import reference

WORKLOAD = Workload(micro_batch_size=3, accumulation=2, seq_len=16)
TEXT = torch.arange(200, dtype=torch.uint8)


def token_file(path, tokens):
    np.save(path / "tokens.npy", tokens)
    return TokenFile(path=path / "tokens.npy", vocab_size=1000, workload=WORKLOAD)


def test_a_file_is_known_by_what_is_in_it(tmp_path):
    right = ByteText(text=TEXT, workload=WORKLOAD).known_by
    assert token_file(tmp_path, TEXT.numpy()).known_by == right
    assert token_file(tmp_path, TEXT.numpy()[1:]).known_by != right


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_a_file_of_tokens_gives_consecutive_ones_by_seed_and_step(dtype, tmp_path):
    source = token_file(tmp_path, np.arange(200, dtype=dtype))
    batch = source.batch(5)
    assert batch.shape == (2, 3, 17) and batch.dtype == torch.int64
    assert (batch.diff(dim=-1) == 1).all()
    assert torch.equal(batch, ByteText(text=TEXT, workload=WORKLOAD).batch(5))  # the same places
    assert torch.equal(dataclasses.replace(source).batch(5), batch)
    assert not torch.equal(dataclasses.replace(source, seed=1).batch(5), batch)


def test_a_file_of_tokens_is_mapped_and_not_read(tmp_path):
    source = token_file(tmp_path, np.arange(200))
    assert isinstance(source._tokens, np.memmap)


def masked(folder):
    """Tokens and a mask in files that were last written in 1970."""
    np.save(folder / "mask.npy", np.ones(200, dtype=bool))
    token_file(folder, np.arange(200))
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    return TokenFile(path=folder / "tokens.npy", vocab_size=1000, workload=WORKLOAD, loss_mask=folder / "mask.npy")


@pytest.mark.parametrize("which", ["tokens.npy", "mask.npy"])
@pytest.mark.parametrize("length", [200, 20])
def test_a_file_that_is_written_into_is_told_instead_of_other_numbers_or_a_bus_error(length, which, tmp_path):
    """Linux ends a process that reads a mapped file beyond what was left of it."""
    source = masked(tmp_path)
    source.batch(3)
    np.save(tmp_path / which, np.ones(length, dtype=np.int64 if which == "tokens.npy" else bool))
    with pytest.raises(DataError, match=f"{which} was written into after it was first read: write a new file, and"):
        source.batch(3)


def test_a_file_whose_name_another_takes_is_read_on(tmp_path):
    source = masked(tmp_path)
    right = source.batch(3), source.learned(3)
    np.save(tmp_path / "new.npy", np.zeros(20, dtype=np.int64))
    (tmp_path / "new.npy").rename(tmp_path / "tokens.npy")
    (tmp_path / "mask.npy").unlink()
    assert torch.equal(source.batch(3), right[0]) and torch.equal(source.learned(3), right[1])


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (np.arange(16), "has 16 tokens, too few for a sequence of 16"),
        (
            np.zeros((2, 3, 17), dtype=np.int64),
            r"holds int64 \[2, 3, 17\], not integers in one dimension, or in two with",
        ),
        (np.zeros(40), r"holds float64 \[40\], not integers"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(tokens, told, tmp_path):
    with pytest.raises(DataError, match=told):
        token_file(tmp_path, tokens)


def test_a_token_beyond_the_vocabulary_or_a_file_that_is_not_there_is_told(tmp_path):
    tokens = np.arange(5000) % 1000
    token_file(tmp_path, tokens)
    tokens[4321] = 1000  # it would hardly ever be drawn
    with pytest.raises(DataError, match="holds token 1000 at place 4,321, and the model's vocabulary is 0 to 999"):
        token_file(tmp_path, tokens)
    with pytest.raises(DataError, match="holds token -3 at place 2,"):
        token_file(tmp_path, np.array([1, 2, -3, *range(14)]))
    with pytest.raises(DataError, match=r"nowhere\.npy cannot be read: No such file"):
        TokenFile(path=tmp_path / "nowhere.npy", vocab_size=9, workload=WORKLOAD)


def test_all_of_a_file_is_looked_at_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHECKED", 100)
    tokens = np.arange(1000)
    token_file(tmp_path, tokens)
    tokens[999] = 2**40
    with pytest.raises(DataError, match="at place 999,"):
        token_file(tmp_path, tokens)


def test_text_is_read_by_a_model_of_bytes_alone(tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(TEXT.tolist()))
    source = from_file(book, 256, WORKLOAD, seed=3)
    assert torch.equal(source.batch(5), ByteText(text=TEXT, workload=WORKLOAD, seed=3).batch(5))
    with pytest.raises(DataError, match=r"book\.txt is text, and the model's vocabulary is 1000 tokens, not 256 bytes"):
        from_file(book, 1000, WORKLOAD)
    with pytest.raises(DataError, match=r"nowhere\.txt cannot be read: No such file"):
        from_file(tmp_path / "nowhere.txt", 256, WORKLOAD)
    np.save(tmp_path / "tokens.npy", np.arange(200))
    source = from_file(tmp_path / "tokens.npy", 256, WORKLOAD, seed=3)
    right = TokenFile(path=tmp_path / "tokens.npy", vocab_size=256, workload=WORKLOAD, seed=3)
    assert torch.equal(source.batch(5), right.batch(5))


def test_what_is_no_npy_file_is_told_with_what_would_be(tmp_path):
    def read(name):
        TokenFile(path=tmp_path / name, vocab_size=9, workload=WORKLOAD)

    np.savez(tmp_path / "z.npz", np.arange(200))
    with pytest.raises(
        DataError, match=r"z\.npz is an archive of arrays: give one array of token numbers, saved with "
    ):
        read("z.npz")
    (tmp_path / "text.txt").write_text("words, many of them " * 30)
    with pytest.raises(DataError, match=r"text\.txt is no whole \.npy file: give one array .* saved with numpy\.save$"):
        read("text.txt")
    headers = [  # read as Python's literals
        b"((((((",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (9,), 1: 2}",
        b"{'descr': ('<u2',), 'fortran_order': False, 'shape': (9,)}",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,)}" % 10**30,
    ]
    written = [b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header for header in headers]
    for damaged in (b"", b"PK\x03\x04 no archive", *written):
        (tmp_path / "damaged.npy").write_bytes(damaged)
        with pytest.raises(DataError, match=r"damaged\.npy is no whole \.npy file"):
            read("damaged.npy")


# ---- an example a row


def rows(path, tokens, mask=None, **changed):
    np.save(path / "rows.npy", tokens)
    if mask is not None:
        np.save(path / "mask.npy", mask)
        changed["loss_mask"] = path / "mask.npy"
    return TokenFile(path=path / "rows.npy", **{"vocab_size": 1000, "workload": WORKLOAD, **changed})


def numbered(count):
    """Rows of 17 tokens, the first of each its own number."""
    return np.arange(count)[:, None] * np.eye(1, 17, dtype=int)


def test_a_pass_takes_every_row_once_and_whole(tmp_path):
    tokens = np.random.default_rng(0).integers(1000, size=(7, 17))
    source = rows(tmp_path, tokens, seed=2)
    assert source.sequences == 7 and source.learned(0) is None
    read = torch.cat([source.batch(step).view(6, 17) for step in range(7)]).numpy()
    for number in range(6):
        of_pass = read[7 * number : 7 * number + 7]
        assert sorted(map(tuple, of_pass)) == sorted(map(tuple, tokens))
    assert not np.array_equal(read[:7], read[7:14])
    assert source.batch(3).dtype == torch.int64 and source.batch(3).shape == (2, 3, 17)


def test_an_evaluation_takes_rows_as_they_come(tmp_path):
    source = rows(tmp_path, numbered(9), workload=dataclasses.replace(WORKLOAD, task="evaluate"))
    assert [int(row[0]) for step in range(2) for row in source.batch(step).view(6, 17)] == [*range(9), 0, 1, 2]


def test_a_mask_goes_where_its_tokens_go(tmp_path):
    chance = np.random.default_rng(1)
    for tokens in (chance.integers(1000, size=(11, 17)), chance.integers(1000, size=400)):
        source = rows(tmp_path, tokens, mask=tokens % 3 == 0)
        for step in range(4):
            assert torch.equal(source.learned(step), source.batch(step) % 3 == 0)
        assert source.known_by != rows(tmp_path, tokens, mask=(tokens % 3 == 1).astype(np.int8)).known_by


def test_what_counts_is_the_mean_over_all_tokens_of_the_step_that_are_learned(tmp_path):
    """Over both micro-batches, as torch's loss has it where labels are -100, not over each."""
    tokens = np.random.default_rng(2).integers(1000, size=(6, 17))
    mask = np.arange(17) > np.array([[2], [14], [0], [9], [16], [5]])
    source = rows(tmp_path, tokens, mask)
    found, (_, targets) = shares(source, 0, WORKLOAD), inputs_and_targets(source.batch(0))
    assert found.shape == targets.shape and float(found.sum()) == pytest.approx(1)
    logits = torch.randn(*targets.shape, 1000, generator=torch.Generator().manual_seed(0)).double()
    labels = targets.masked_fill(~source.learned(0)[..., 1:], -100)
    right = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    torch.testing.assert_close(each @ found.flatten(), right)


def test_a_step_without_anything_to_learn_has_no_loss_and_no_gradient(tmp_path):
    mask = np.zeros((12, 17), dtype=bool)
    mask[3, 4] = True
    source = rows(tmp_path, numbered(12), mask)
    assert sorted(float(shares(source, step, WORKLOAD).sum()) for step in range(2)) == [0, 1]


@pytest.mark.parametrize(("policy", "clip"), [("streamed", None), ("streamed", 0.5), ("zero3_offload", None)])
def test_training_by_examples_is_plain_training(policy, clip, tmp_path):
    model = presets.load("tiny")
    workload = Workload(micro_batch_size=2, accumulation=3, seq_len=16, precision="fp32", grad_clip=clip)
    chance = np.random.default_rng(3)
    mask = np.arange(17) >= chance.integers(3, 17, size=(20, 1))
    source = rows(tmp_path, chance.integers(256, size=(20, 17)), mask, vocab_size=256, workload=workload)
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
    start, hyper = initial.random_parameters(model, 0), Adam(lr=1e-3, eps=1e-4)
    schedule = policies.build(policy, model, workload, memory)
    with Trainer(verify(schedule), CpuBackend(), source, hyper, initial=start) as trainer:
        losses, parameters = trainer.run(8), {i: trainer.parameters(i) for i in model.layers}
    right = reference.train(model, schedule.workload, source, hyper, initial=start, steps=8)
    assert losses == pytest.approx(right.losses, rel=1e-6)
    assert trainer.learned == {step: int(source.learned(step)[..., 1:].sum()) for step in range(8)}
    for i in model.layers:
        torch.testing.assert_close(parameters[i], right.parameters[i], rtol=0, atol=2e-6)


def test_what_is_masked_changes_no_gradient(tmp_path):
    """Another target where nothing is learned: the same losses, to the bit."""
    workload = Workload(micro_batch_size=2, seq_len=16, precision="fp32")
    tokens = np.random.default_rng(4).integers(256, size=(4, 17))
    mask = np.arange(17) % 4 == 1 + np.zeros((4, 1), dtype=int)
    mask[:, -1] = False
    memory = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
    step = verify(policies.build("streamed", presets.load("tiny"), workload, memory))
    losses = []
    for last in (0, 200):
        tokens[:, -1] = last  # predicted, and never read
        source = rows(tmp_path, tokens, mask, vocab_size=256, workload=workload)
        start = initial.random_parameters(step.schedule.model, 0)
        with Trainer(step, CpuBackend(), source, Adam(lr=1e-2), initial=start) as trainer:
            losses.append(trainer.run(4))
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]


@pytest.mark.parametrize(
    ("tokens", "mask", "told"),
    [
        (np.zeros((5, 16), int), None, "has 5 rows of 16 .*: take sequences of 15, or pad rows"),
        (np.zeros((5, 1), int), None, "rows of 1 tokens; a row must have 17, one more than .* predicted$"),
        (np.zeros((5, 20), int), None, "has 5 rows of 20 .*: take sequences of 19, or cut rows"),
        (np.zeros((0, 17), int), None, r"rows\.npy has no rows"),
        (1000 * np.eye(20, 17, dtype=int), None, "holds token 1000 at place 0 of row 0, and"),
        (np.eye(20, 17, -3, dtype=int) * -7, None, "holds token -7 at place 0 of row 3, and"),
        (numbered(9), np.ones((8, 17)), r"mask\.npy holds float64 \[8, 17\]: a mask of .* is bool \[9, 17\]"),
        (numbered(9), np.ones((9, 17)), r"mask\.npy holds float64 \[9, 17\]: a mask of .* is bool"),
        (numbered(9), np.full((9, 17), 2), r"mask\.npy holds 2 to 2: a mask holds zeros and ones"),
        (numbered(9), np.eye(1, 17, dtype=bool) & np.ones((9, 1), bool), "has no token to learn"),
        (np.arange(40), np.zeros(40, int), "has no token to learn"),
        (np.arange(40), np.eye(1, 40, dtype=int)[0], "has no token to learn"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_examples_or_no_mask_of_it_is_refused(tokens, mask, told, tmp_path):
    with pytest.raises(DataError, match=told):
        rows(tmp_path, tokens, mask)


def test_rows_and_masks_are_looked_at_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHECKED", 40)  # two rows
    tokens, mask = numbered(9), np.ones((9, 17), dtype=int)
    rows(tmp_path, tokens, mask)
    mask[8, 16] = 3
    with pytest.raises(DataError, match="holds 1 to 3"):
        rows(tmp_path, tokens, mask)
    tokens[7, 5] = 1000
    with pytest.raises(DataError, match="holds token 1000 at place 5 of row 7"):
        rows(tmp_path, tokens)


def test_a_mask_is_of_a_file_of_tokens(tmp_path):
    (tmp_path / "book.txt").write_text("words " * 20)
    with pytest.raises(DataError, match=r"book\.txt is text, of which all is learned"):
        from_file(tmp_path / "book.txt", 256, WORKLOAD, loss_mask=tmp_path / "mask.npy")
    np.save(tmp_path / "tokens.npy", np.arange(40))
    with pytest.raises(DataError, match=r"mask\.npy cannot be read: No such file"):
        from_file(tmp_path / "tokens.npy", 256, WORKLOAD, loss_mask=tmp_path / "mask.npy")

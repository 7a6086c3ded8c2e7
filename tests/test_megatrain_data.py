"""Batches: their shapes, where they come from, and that a number is all it takes to get one again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatrain import data
from megatrain.data import (
    ByteText,
    DataError,
    RandomTokens,
    TokenFile,
    inputs_and_targets,
    read_bytes,
    standard_library,
)
from schedules.workload import Workload

WORKLOAD = Workload(micro_batch_size=3, accumulation=2, seq_len=16)
TEXT = torch.arange(200, dtype=torch.uint8)


@pytest.mark.parametrize(
    "source", [ByteText(text=TEXT, workload=WORKLOAD), RandomTokens(vocab_size=1000, workload=WORKLOAD)]
)
def test_a_batch_is_a_function_of_seed_and_step(source):
    batch = source.batch(5)
    assert batch.shape == (2, 3, 17) and batch.dtype == torch.int64
    assert batch.min() >= 0 and batch.max() < source.vocab_size
    source.batch(7)
    assert torch.equal(source.batch(5), batch)
    assert torch.equal(dataclasses.replace(source).batch(5), batch)
    assert not torch.equal(source.batch(6), batch)
    assert not torch.equal(dataclasses.replace(source, seed=1).batch(5), batch)


def test_sequences_are_consecutive_bytes_of_the_text():
    batch = ByteText(text=TEXT, workload=WORKLOAD).batch(0)
    assert (batch.diff(dim=-1) == 1).all()
    inputs, targets = inputs_and_targets(batch[0])
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs + 1, targets) and inputs.is_contiguous() and targets.is_contiguous()


def starts_of(source, steps):
    return [int(first) for step in steps for first in source.batch(step)[..., 0].flatten()]


def test_every_place_can_be_drawn_even_the_last():
    text = torch.arange(18, dtype=torch.uint8)
    source = ByteText(text=text, workload=WORKLOAD)
    assert set(starts_of(source, range(20))) == {0, 1}


def test_a_pass_takes_every_sequence_once_and_the_next_cuts_anew():
    """200 tokens are twelve sequences of 16 and one to predict, with places 0 to 7 to begin at: two steps of six."""
    source = ByteText(text=TEXT, workload=WORKLOAD, seed=2)
    assert source.sequences == 12
    begun = set()
    for first in range(0, 40, 2):
        starts = starts_of(source, range(first, first + 2))
        assert sorted(starts) == list(range(min(starts), min(starts) + 192, 16))
        assert starts != sorted(starts)
        begun.add(min(starts))
    assert len(begun) > 4 and begun <= set(range(8))


def test_a_step_may_end_a_pass_and_begin_another():
    """Five sequences of 16 in 90 tokens, six to a step: five steps are six passes."""
    source = ByteText(text=TEXT[:90], workload=WORKLOAD)
    starts = starts_of(source, range(5))
    for number in range(6):
        of_pass = sorted(starts[5 * number : 5 * number + 5])
        assert of_pass == list(range(of_pass[0], of_pass[0] + 80, 16))


def test_an_evaluation_reads_from_the_beginning():
    source = ByteText(text=TEXT, workload=dataclasses.replace(WORKLOAD, task="evaluate"), seed=2)
    assert starts_of(source, range(3)) == [*range(0, 192, 16), *range(0, 96, 16)]


def test_another_text_is_known_by_other_words(tmp_path):
    right = ByteText(text=TEXT, workload=WORKLOAD).known_by
    assert right.startswith("200 tokens, ")
    assert ByteText(text=TEXT.flip(0), workload=WORKLOAD).known_by != right
    assert token_file(tmp_path, TEXT.numpy()).known_by == right
    assert token_file(tmp_path, TEXT.numpy()[1:]).known_by != right


def test_a_text_shorter_than_one_sequence_is_refused(tmp_path):
    ByteText(text=TEXT[:17], workload=WORKLOAD)
    with pytest.raises(DataError, match="16 bytes is too short for a sequence of 16 tokens"):
        ByteText(text=TEXT[:16], workload=WORKLOAD)
    (tmp_path / "few.txt").write_text("few words")
    with pytest.raises(DataError, match=r"few\.txt: a text of 9 bytes is too short"):
        data.from_file(tmp_path / "few.txt", 256, WORKLOAD)
    with pytest.raises(DataError, match="step -1"):
        ByteText(text=TEXT, workload=WORKLOAD).batch(-1)


def test_a_seed_below_zero_is_refused():
    with pytest.raises(DataError, match="not step 0, seed -1"):
        RandomTokens(vocab_size=4, workload=WORKLOAD, seed=-1).batch(0)


def test_bytes_are_read_in_order_of_name_up_to_the_limit(tmp_path):
    (tmp_path / "b.py").write_bytes(b"beta")
    (tmp_path / "a.py").write_bytes(b"alpha")
    (tmp_path / "c.txt").write_bytes(b"not python")
    assert bytes(read_bytes(tmp_path, 100).tolist()) == b"alphabeta"
    assert bytes(read_bytes(tmp_path, 7).tolist()) == b"alphabe"
    assert len(read_bytes(tmp_path / "nowhere", 7)) == 0


def test_the_standard_library_is_text_enough_to_train_on():
    text = read_bytes(standard_library(), 1_000_000)
    assert len(text) == 1_000_000
    assert torch.equal(text, read_bytes(standard_library(), 1_000_000))
    assert len(text.unique()) > 90  # letters, digits, punctuation


# ---- files of tokens


def token_file(path, tokens):
    np.save(path / "tokens.npy", tokens)
    return TokenFile(path=path / "tokens.npy", vocab_size=1000, workload=WORKLOAD)


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


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (np.arange(16), "has 16 tokens, too few for a sequence of 16"),
        (np.zeros((4, 40), dtype=np.int64), r"holds int64 \[4, 40\], not integers in one dimension"),
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
    monkeypatch.setattr(data, "CHECKED", 100)
    tokens = np.arange(1000)
    token_file(tmp_path, tokens)
    tokens[999] = 2**40
    with pytest.raises(DataError, match="at place 999,"):
        token_file(tmp_path, tokens)


def test_text_is_read_by_a_model_of_bytes_alone(tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes(bytes(TEXT.tolist()))
    source = data.from_file(book, 256, WORKLOAD, seed=3)
    assert torch.equal(source.batch(5), ByteText(text=TEXT, workload=WORKLOAD, seed=3).batch(5))
    with pytest.raises(DataError, match=r"book\.txt is text, and the model's vocabulary is 1000 tokens, not 256 bytes"):
        data.from_file(book, 1000, WORKLOAD)
    with pytest.raises(DataError, match=r"nowhere\.txt cannot be read: No such file"):
        data.from_file(tmp_path / "nowhere.txt", 256, WORKLOAD)
    np.save(tmp_path / "tokens.npy", np.arange(200))
    source = data.from_file(tmp_path / "tokens.npy", 256, WORKLOAD, seed=3)
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

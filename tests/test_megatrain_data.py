"""Batches: their shapes, where they come from, and that a number is all it takes to get one again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatrain.data import (
    ByteText,
    DataError,
    RandomTokens,
    inputs_and_targets,
    read_bytes,
    shares,
    standard_library,
)
from megatrain.token_file import from_file
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


def test_another_text_is_known_by_other_words():
    right = ByteText(text=TEXT, workload=WORKLOAD).known_by
    assert right.startswith("200 tokens, ")
    assert ByteText(text=TEXT.flip(0), workload=WORKLOAD).known_by != right


def test_a_text_shorter_than_one_sequence_is_refused(tmp_path):
    ByteText(text=TEXT[:17], workload=WORKLOAD)
    with pytest.raises(DataError, match="16 bytes is too short for a sequence of 16 tokens"):
        ByteText(text=TEXT[:16], workload=WORKLOAD)
    (tmp_path / "few.txt").write_text("few words")
    with pytest.raises(DataError, match=r"few\.txt: a text of 9 bytes is too short"):
        from_file(tmp_path / "few.txt", 256, WORKLOAD)
    with pytest.raises(DataError, match="step -1"):
        ByteText(text=TEXT, workload=WORKLOAD).batch(-1)


def test_a_seed_below_zero_is_refused():
    with pytest.raises(DataError, match="not step 0, seed -1"):
        RandomTokens(vocab_size=4, workload=WORKLOAD, seed=-1).batch(0)


def test_where_all_tokens_are_learned_each_counts_as_much_as_any_other():
    found = shares(ByteText(text=TEXT, workload=WORKLOAD), 0, WORKLOAD)
    assert torch.equal(found, torch.full((2, 3, 16), 1 / 96, dtype=torch.double))


def test_bytes_are_read_in_order_of_name_up_to_the_limit(tmp_path):
    for letter in "fdbeca":  # a folder lists its files in any order
        (tmp_path / f"{letter}.py").write_bytes(letter.encode() * 2)
    (tmp_path / "c.txt").write_bytes(b"not python")
    assert bytes(read_bytes(tmp_path, 100).tolist()) == b"aabbccddeeff"
    assert bytes(read_bytes(tmp_path, 7).tolist()) == b"aabbccd"
    assert len(read_bytes(tmp_path / "nowhere", 7)) == 0


def test_the_standard_library_is_text_enough_to_train_on():
    text = read_bytes(standard_library(), 1_000_000)
    assert len(text) == 1_000_000
    assert torch.equal(text, read_bytes(standard_library(), 1_000_000))
    assert len(text.unique()) > 90  # letters, digits, punctuation

"""A checksum tells each changed bit, and the order of what it is of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain import checksum as module
from megatrain.checksum import CHUNK, PAGE, checksum

WORD = 8


@given(
    length=st.one_of(st.integers(1, 3 * PAGE * WORD), st.sampled_from([PAGE * WORD, 2 * PAGE * WORD])),
    data=st.data(),
)
def test_one_changed_bit_is_told(length: int, data: st.DataObject) -> None:
    values = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    before, where = checksum(values), data.draw(st.integers(0, length - 1))
    assert checksum(values.clone()) == before
    values[where] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(values) != before


def test_pages_that_changed_places_are_told() -> None:
    pages = torch.arange(4 * PAGE, dtype=torch.int64).view(4, PAGE)
    assert checksum(pages.flatten()) != checksum(pages.flip(0).flatten())


@given(first=st.integers(0, 2 * PAGE - 1), second=st.integers(0, 2 * PAGE - 1), bit=st.integers(0, 53))
def test_words_that_changed_places_are_told(first: int, second: int, bit: int) -> None:
    """Within a page, too; and two flips of one bit, one of them up and one down."""
    words = torch.randint(1 << 62, (2 * PAGE,), generator=torch.Generator().manual_seed(0))
    before, places = checksum(words), torch.tensor([first, second])
    swapped = words.clone()
    swapped[places] = words[places.flip(0)]
    assert (checksum(swapped) == before) == (first == second)
    low, high = torch.zeros(2 * PAGE, dtype=torch.int64), torch.zeros(2 * PAGE, dtype=torch.int64)
    low[first], high[second] = 1 << bit, 1 << bit
    assert (checksum(low) == checksum(high)) == (first == second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_of_the_bits_wherever_they_lie(dtype: torch.dtype) -> None:
    bits = torch.randint(256, (3 * PAGE * WORD + 24,), dtype=torch.uint8)
    unaligned = bits[12:-12].view(dtype)
    assert unaligned.storage_offset() * unaligned.itemsize % WORD
    assert checksum(unaligned) == checksum(unaligned.clone()) == checksum(unaligned.view(torch.uint8))


def test_it_does_not_depend_on_the_size_of_what_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, chunk = torch.randint(256, (5 * PAGE * WORD + 3,), dtype=torch.uint8), 2 * PAGE * WORD
    assert CHUNK % chunk == 0
    whole = checksum(bits)
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert checksum(bits) == whole

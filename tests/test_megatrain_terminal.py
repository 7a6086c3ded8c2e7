"""Tables on terminals of any width: what is printed is whole, and what is left out is named."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from megatrain.terminal import Column, Record, show_records
from sim.units import at_least, rate, scaled, seconds

ROWS: list[Record] = [
    {"name": "llama-3.1-8b", "count": "8,030,261,248", "rate": "55.4 GB/s", "words": "one two three " * 9},
    {"name": "mixtral-8x7b", "count": "46,702,792,704", "rate": "2.25 TB/s", "words": "host.memory=128GiB of words"},
]
COLUMNS = (
    Column(heading="model", cell=lambda row: row["name"], number=False),
    Column(heading="parameters of all blocks", cell=lambda row: row["count"]),
    Column(heading="rate", cell=lambda row: row["rate"], spare=True),
    Column(heading="what it is", cell=lambda row: row["words"], number=False, folds=True, spare=True),
)


def printed(width: int) -> list[str]:
    out = io.StringIO()
    show_records(ROWS, COLUMNS, title="models", console=Console(file=out, width=width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", range(16, 131, 6))
def test_numbers_and_names_are_never_cut_off(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for row in ROWS:
        assert row["name"] in text and row["count"] in text
        assert row["rate"] in text or "rate, what it is." in text


def test_names_of_wide_letters_are_not_cut_off_either() -> None:
    out = io.StringIO()
    row = {"name": "\u5343\u95ee-7b", "count": "7,615,616,512"}  # two letters of two columns each
    show_records([row], COLUMNS[:2], console=Console(file=out, width=80))
    assert row["name"] in out.getvalue()


def test_headings_fold_before_a_column_is_left_out_and_the_last_is_left_out_first() -> None:
    assert any("parameters of all blocks" in line for line in printed(130))
    folded = "\n".join(printed(70))
    assert "parameters of all blocks" not in folded and "one two three" in folded
    assert "without: what it is." in "\n".join(printed(50))
    assert "55.4 GB/s" in "\n".join(printed(50))
    assert " ".join(printed(35)).count("without: rate, what it is.") == 1


def test_text_folds_to_its_words_before_there_is_no_table() -> None:
    words = Column(heading="what it is", cell=lambda row: "one two three four", number=False, folds=True)
    out = io.StringIO()
    show_records(ROWS, [COLUMNS[0], words], console=Console(file=out, width=31))
    assert "model: " not in out.getvalue() and " llama-3.1-8b  one two three" in out.getvalue()


def test_too_narrow_for_any_table_a_row_is_some_lines() -> None:
    lines = printed(25)
    assert lines[:5] == ["models", "", "model: llama-3.1-8b", "parameters of all blocks:", "8,030,261,248"]


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (1.5e12, "GB", "1,500.0 GB"),
        (2e9, "GB", "2.0 GB"),
        (12.8e6, "GB", "12.8 MB"),
        (3.2e9, "TFLOP/s", "3.2 GFLOP/s"),
        (640.0, "GB", "640 B"),
        (0.0, "GB", "0 B"),
    ],
)
def test_what_is_small_has_a_smaller_unit(value: float, unit: str, told: str) -> None:
    assert scaled(value, unit) == told == at_least(value, unit)


@pytest.mark.parametrize(
    ("value", "told"),
    [(729_884_200, "729.89 MB"), (1.5e12 + 1, "1,500.01 GB"), (999_999_999, "1.00 GB"), (3.1, "4 B"), (0, "0 B")],
)
def test_what_has_to_be_there_is_not_told_as_less(value: float, told: str) -> None:
    assert at_least(value, "GB", 2) == told


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234 s"), (1.5, "1.500 s"), (0.25, "250.0 ms"), (0.0123456, "12.35 ms"), (math.nan, "-"), (None, "-")],
)
def test_times_have_units(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (10.2, "10"), (9.876, "9.88"), (0.0123, "0.0123")])
def test_a_rate_is_never_told_as_zero(value: float, text: str) -> None:
    assert rate(value) == text

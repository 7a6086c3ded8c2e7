"""The index of a results folder: one Markdown file with the tables, the pictures and how they came about."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import tables
from schedules.files import write_text

if TYPE_CHECKING:
    import pandas as pd

NAME = "README.md"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where results come from: without it they cannot be had again."""

    machine: str
    date: str  # ISO 8601
    command: str
    versions: Mapping[str, str]  # package -> version


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, what is to be seen, and of it: tables in Markdown, pictures, other files."""

    title: str
    text: str = ""
    tables: Sequence[str] = ()
    pictures: Sequence[Path] = ()  # PNG, with an SVG and a CSV of the same stem beside them
    files: Sequence[Path] = ()


def write_report(
    folder: Path,
    title: str,
    origin: Origin,
    *,
    comparison: pd.DataFrame,
    predicted_measured: pd.DataFrame,
    sections: Sequence[Section] = (),
) -> Path:
    """Write the index and both tables as CSV; returns the index's path.

    Args:
        comparison: the columns of `compare.Row`.
        predicted_measured: columns `model`, `policy`, `predicted_s`, `measured_s`, their ranks (`compare.ranked`)
            and `digest`; may be empty.
        sections: further ones, in order; their paths may lie anywhere, links are made relative.

    Raises:
        InputError: the folder cannot be written.
    """
    lines = [f"# {title}", "", *_origin(origin), ""]
    if len(predicted_measured):
        worst = (predicted_measured["predicted_s"] / predicted_measured["measured_s"] - 1).abs().max()
        lines += ["## Predicted and measured", "", f"Largest error: {worst:.1%}.", ""]
        lines += [tables.markdown(predicted_measured, tables.PREDICTED_MEASURED, note=tables.PREDICTED_MEASURED_NOTE)]
    groups = list(tables.comparison_groups(comparison))
    lines += ["## Policies compared", ""]
    for heading, rows in groups:
        lines += [f"### {heading}", "", tables.markdown(rows, tables.comparison_columns(rows))]
    lines += [tables.comparison_note(comparison), ""]
    lines += _reasons(comparison)
    for section in sections:
        lines += _section(folder, section)
    lines += ["## Files", "", "- [comparison.csv](comparison.csv)"]
    write_text(folder / "comparison.csv", comparison.to_csv(index=False))
    if len(predicted_measured):
        lines += ["- [predicted_measured.csv](predicted_measured.csv)"]
        write_text(folder / "predicted_measured.csv", predicted_measured.to_csv(index=False))
    lines += ["", "Digests of the schedules:", "", *_digests(comparison, predicted_measured)]
    write_text(folder / NAME, "\n".join(lines) + "\n")
    return folder / NAME


def _origin(origin: Origin) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    return [
        f"- machine: {origin.machine}",
        f"- date: {origin.date}",
        f"- command: `{origin.command}`",
        f"- versions: {versions}",
    ]


def _reasons(comparison: pd.DataFrame) -> list[str]:
    """Why rows do not fit, or have no prediction, in full."""
    lines: list[str] = []
    unknown = comparison["fits"].isna()
    for heading, rows in (
        ("What does not fit, and why:", comparison[~unknown & ~comparison["fits"].astype(bool)]),
        ("What is not predicted, and why:", comparison[unknown]),
    ):
        told = [f"- {row['label']}, {row['model']}: {row['reason']}" for row in tables.records(rows)]
        lines += [heading, "", *told, ""] if told else []
    return lines


def _section(folder: Path, section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    if section.text:
        lines += [section.text, ""]
    lines += section.tables
    for picture in section.pictures:
        png, svg, csv = (_link(folder, picture.with_suffix(suffix)) for suffix in (".png", ".svg", ".csv"))
        lines += [f"![{picture.stem}]({png})", "", f"[SVG]({svg}), [data]({csv})", ""]
    lines += [f"- [{path.name}]({_link(folder, path)})" for path in section.files]
    return [*lines, ""] if section.files else lines


def _link(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _digests(*found: pd.DataFrame) -> list[str]:
    """One line per schedule that any row is of."""
    rows = [row for frame in found for row in tables.records(frame)]
    lines = [f"- `{row['digest']}` {row['policy']}, {row['model']}" for row in rows]
    return list(dict.fromkeys(lines))

"""Files that people edit are read as other programs leave them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_model import CONFIG

from schedules import codec, policies, presets
from schedules.file_kinds import MODEL, PROFILE, SCHEDULE, TRACE, kind_of_file
from schedules.trace import Trace
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.engine import simulate


def write(kind: str, path: Path) -> None:
    schedule = policies.build(
        "resident",
        presets.load("tiny"),
        Workload(micro_batch_size=1, seq_len=8),
        MemoryBudget(device_bytes=10**9, host_bytes=10**9),
    )
    if kind == SCHEDULE:
        codec.save(schedule, path)
    elif kind == TRACE:
        simulate(schedule, hardware.load("h200")).save(path)
    elif kind == PROFILE:
        hardware.save(hardware.load("h200"), path)
    else:
        path.write_text(json.dumps(CONFIG), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "read"),
    [(SCHEDULE, codec.read), (TRACE, Trace.read), (PROFILE, hardware.load), (MODEL, presets.load)],
    ids=["schedule", "trace", "profile", "model"],
)
def test_a_file_that_an_editor_has_marked_as_utf_8_is_read_as_without(
    kind: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    write(kind, path)
    found = repr(read(path))
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert repr(read(path)) == found
    assert kind_of_file(path) == kind

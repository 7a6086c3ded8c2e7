"""Schedule files: round trip, digest, and what a broken file is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.codec import CodecError, dumps, loads, read, save
from schedules.op import Op, Wait
from schedules.presets import load
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.workload import Workload


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    p = Program(load("tiny"), Workload(micro_batch_size=1, seq_len=8, precision="fp32", grad_clip=1.5))
    ring = p.slots("weight", 2)
    p.forward(p.model.embed, weights=p.load("w.embed", ring), blocking=True)
    p.forward(0, weights=p.load("w.0", ring))
    p.free("x.0.0", "x.embed.0", "s.0.0")
    return p.build(policy="part", knobs={"slots": 2, "order": "layers", "share": 0.5, "none": None})


def test_round_trip_is_byte_for_byte(schedule: Schedule, tmp_path: Path) -> None:
    text = dumps(schedule)
    assert dumps(loads(text)) == text
    assert loads(text) == schedule
    save(schedule, tmp_path / "s.json")
    assert read(tmp_path / "s.json") == schedule
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_a_schedule_has_one_text(schedule: Schedule) -> None:
    turned = replace(schedule, knobs=dict(reversed(schedule.knobs.items())))
    assert dumps(turned) == dumps(schedule)
    assert ' "waits": []\n}\n' in dumps(replace(schedule, waits=()))


def test_digest_covers_what_is_executed_and_nothing_else(schedule: Schedule) -> None:
    assert replace(schedule, policy="other", knobs={}).digest == schedule.digest
    first, *rest = schedule.ops
    assert replace(schedule, ops=(replace(first, blocking=not first.blocking), *rest)).digest != schedule.digest
    assert replace(schedule, waits=schedule.waits[1:]).digest != schedule.digest
    assert replace(schedule, buffers=schedule.buffers[::-1]).digest != schedule.digest


def test_the_digest_of_a_schedule_stays_what_it_was() -> None:
    """Traces and results name it: by another one they would belong to no schedule any more."""
    p = Program(load("tiny"), Workload(micro_batch_size=1, seq_len=8))
    slot = p.load("w.0", p.slots("weight", 1), blocking=True)
    p.synchronize((slot, "w.0"))
    assert p.build(policy="part").digest == "4a8de20780406af563bb003c48fb0d0df7adc8dbc0d1ba898d3cb7f3ae5b31d8"


@settings(max_examples=60)
@given(cut=st.integers(0, 10**6))
def test_a_truncated_file_is_refused(schedule: Schedule, cut: int) -> None:
    text = dumps(schedule)
    with pytest.raises(CodecError):
        loads(text[: cut % (len(text) - 2)])


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("format",), "megatrain-schedule/9", "format 'megatrain-schedule/9'"),
        (("ops", 0, "kind"), "prefech", "ops[0].kind is 'prefech'; it must be one of prefetch"),
        (("ops", 1, "stream"), "gpu", "ops[1].stream is 'gpu'"),
        (("ops", 0, "nbytes"), -4, "ops[0].nbytes must be a whole number of at least 0, not -4"),
        (("buffers", 0, "nbytes"), 10**400, "buffers[0].nbytes must be a number of 64 bits, not one of 401 digits"),
        (("ops", 0, "nbytes"), 2**63, "ops[0].nbytes must be a number of 64 bits"),
        (("ops", 0, "name"), 5, "ops[0].name must be a non-empty string, not 5"),
        (("ops", 0, "nbytes"), 1.5, "ops[0].nbytes must be a whole number"),
        (("ops", 0, "reads"), ["ab"], "ops[0].reads[0] must be a pair [buffer, tensor], not 'ab'"),
        (("ops", 0, "reads"), [["a"]], "ops[0].reads[0] must be a pair [buffer, tensor]"),
        (("ops", 0, "reads"), [["a", "w.0"], ["a", 1]], "ops[0].reads[1] must be a pair [buffer, tensor]"),
        (("ops", 0, "reads"), {"a": "w.0"}, "ops[0].reads must be a list of [buffer, tensor] pairs"),
        (("ops", 0, "blocking"), 1, "ops[0].blocking must be true or false, not 1"),
        (("ops", 0, "colour"), 1, "ops[0]: unknown field 'colour'"),
        (("buffers", 0, "tier"), "disk", "buffers[0].tier is 'disk'"),
        (("waits", 0, "distance"), True, "waits[0].distance must be a whole number"),
        (("workload", "seq_len"), 0, "workload: seq_len must be a whole number of at least 1"),
        (("model", "vocab_size"), None, "model: "),
        (("model", "rope_scaling"), None, "model: rope_scaling must be a dictionary, not None"),
        (("workload", "task"), ["train"], "workload: task ['train'] is unknown"),
        (("knobs",), [], "knobs must be an object"),
        (("knobs", "slots"), [2], "knobs.slots must be true, false, a number, a word or null, not [2]"),
        (("knobs", "slots"), 1e999, "not a number"),
        (("ops",), {}, "ops must be a list"),
        (("policy",), "", "policy must be a non-empty string"),
    ],
)
def test_a_broken_field_is_named(schedule: Schedule, path: tuple[str | int, ...], value: object, told: str) -> None:
    data = json.loads(dumps(schedule))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(CodecError) as error:
        loads(json.dumps(data))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("part", "optional"),
    [
        ("", set()),
        ("buffers", set()),
        ("ops", {"layer", "microbatch", "reads", "writes", "nbytes", "flops", "params", "fresh", "blocking"}),
        ("waits", {"distance"}),
    ],
)
def test_a_missing_field_is_named(schedule: Schedule, part: str, optional: set[str]) -> None:
    data = json.loads(dumps(schedule))
    row, where = (data[part][0], f"{part}[0]: ") if part else (data, "")
    for key in row.keys() - optional:
        value = row.pop(key)
        told = 'no "format"' if key == "format" else f"{where}the field {key!r} is missing"
        with pytest.raises(CodecError) as error:
            loads(json.dumps(data))
        assert str(error.value).startswith(told)
        row[key] = value
    for key in row.keys() & optional:
        del row[key]
    again = loads(json.dumps(data))
    if part == "ops":
        op = schedule.ops[0]
        assert again.ops[0] == Op(name=op.name, kind=op.kind, phase=op.phase, stream=op.stream)
    if part == "waits":
        assert again.waits[0] == Wait(op=schedule.waits[0].op, on=schedule.waits[0].on)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": NaN}', "\x00", "[" * 10**5, '{"format": ' + "9" * 5000 + "}"]
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(CodecError):
        loads(text)


@pytest.mark.parametrize(
    ("once", "twice", "told"),
    [
        ('"staleness": 0', '"staleness": 1, "staleness": 0', "the field 'staleness' stands twice in one object"),
        (
            '"stream": "h2d"',
            '"stream": "d2h", "stream": "h2d"',
            r"'stream' stands twice in one object, {\"name\": \"P\.w\.embed\"",
        ),
    ],
)
def test_a_field_that_stands_twice_is_told(schedule: Schedule, once: str, twice: str, told: str) -> None:
    """JSON takes the last of them, whatever was meant."""
    with pytest.raises(CodecError, match=told):
        loads(dumps(schedule).replace(once, twice, 1))


def test_a_knob_beyond_all_numbers_is_refused(schedule: Schedule) -> None:
    text = dumps(schedule).replace('"slots": 2', '"slots": 1e999')
    with pytest.raises(CodecError, match=r"knobs\.slots must be finite, not inf"):
        loads(text)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=r"cannot read .*gone\.json"):
        read(tmp_path / "gone.json")


def test_a_file_of_another_kind_is_told_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"format": "megatrain-trace/1"}')
    with pytest.raises(CodecError, match=r"trace\.json is a trace, not a schedule$"):
        read(tmp_path / "trace.json")


@pytest.mark.parametrize("name", ["\x1b[31mred", "half \ud800", "a\nb", "\x9b1m"])
def test_names_that_a_terminal_would_obey_or_no_file_takes_are_refused(name: str, schedule: Schedule) -> None:
    def changed(change: Callable[[dict[str, Any]], object]) -> str:
        data = json.loads(dumps(schedule))
        change(data)
        return json.dumps(data)

    for place, text in {
        r"ops\[0\].name": changed(lambda data: data["ops"][0].update(name=name)),
        r"ops\[0\].reads\[0\]": changed(lambda data: data["ops"][0]["reads"][0].__setitem__(0, name)),
        r"buffers\[0\].name": changed(lambda data: data["buffers"][0].update(name=name)),
        "policy": changed(lambda data: data.update(policy=name)),
        "knobs.order": changed(lambda data: data["knobs"].update(order=name)),
        "a knob": changed(lambda data: data["knobs"].update({name: 1})),
        "model: name": changed(lambda data: data["model"].update(name=name)),
    }.items():
        with pytest.raises(CodecError, match=place) as told:
            loads(text)
        assert name not in str(told.value)


def test_a_file_is_in_utf_8_wherever_it_is_read(schedule: Schedule, tmp_path: Path) -> None:
    text = dumps(schedule).replace("weight0", "gewicht ä")
    (tmp_path / "s.json").write_text(text, encoding="utf-8")
    code = "import sys, pathlib; from schedules import codec; print(ascii(codec.read(pathlib.Path(sys.argv[1]))))"
    latin = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "s.json")]
    done = subprocess.run(command, env=latin, capture_output=True, text=True, check=True)
    assert ascii("gewicht ä") in done.stdout

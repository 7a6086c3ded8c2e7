"""Schedules as files: canonical JSON that round-trips byte for byte and can be written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from schedules.errors import InputError
from schedules.file_kinds import ENCODING, SCHEDULE, not_json, wrong_kind
from schedules.files import write_text
from schedules.model import ModelSpec
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier, Wait
from schedules.schedule import FORMAT, Knob, Schedule
from schedules.whole_numbers import fault
from schedules.words import plain
from schedules.workload import Workload

_SHOWN = 60  # characters of an object that says something twice


class CodecError(InputError):
    """A file that is not a schedule; the message says where in the file and what is wrong."""


# ---- encoding


def encode_body(schedule: Schedule) -> bytes:
    """What the digest covers: ops, buffers and waits."""
    return json.dumps(_body(schedule), separators=(",", ":"), sort_keys=True).encode()


def dumps(schedule: Schedule) -> str:
    """Canonical text: one line per op, buffer and wait, so that a difference of two files reads well."""
    head = {
        "format": schedule.format,
        "policy": schedule.policy,
        "knobs": dict(sorted(schedule.knobs.items())),
        "staleness": schedule.staleness,
        "model": schedule.model.to_dict(),
        "workload": schedule.workload.to_dict(),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, rows in _body(schedule).items():
        inner = ",\n".join("  " + json.dumps(row) for row in rows)
        lines.append(f" {json.dumps(key)}: [\n{inner}\n ]" if rows else f" {json.dumps(key)}: []")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(schedule: Schedule, path: Path) -> None:
    """Write the file, whole or not at all."""
    write_text(path, dumps(schedule))


def _body(schedule: Schedule) -> dict[str, list[dict[str, Any]]]:
    return {
        "buffers": [{"name": b.name, "tier": b.tier, "nbytes": b.nbytes} for b in schedule.buffers],
        "ops": [_op(op) for op in schedule.ops],
        "waits": [{"op": w.op, "on": w.on, "distance": w.distance} for w in schedule.waits],
    }


def _op(op: Op) -> dict[str, Any]:
    row: dict[str, Any] = {"name": op.name, "kind": op.kind, "phase": op.phase, "stream": op.stream}
    if op.layer is not None:
        row["layer"] = op.layer
    if op.microbatch is not None:
        row["microbatch"] = op.microbatch
    row["reads"] = [[a.buffer, a.tensor] for a in op.reads]
    row["writes"] = [[a.buffer, a.tensor] for a in op.writes]
    for amount in ("nbytes", "flops", "params", "fresh"):
        if getattr(op, amount):
            row[amount] = getattr(op, amount)
    if op.blocking:
        row["blocking"] = True
    return row


# ---- decoding


def read(path: Path) -> Schedule:
    """Read a schedule file.

    Raises:
        CodecError: the file is missing, is cut off, or holds something else than a schedule.
    """
    try:
        text = path.read_text(encoding=ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        raise CodecError(f"cannot read {path}: {error}") from None
    if wrong := wrong_kind(text, SCHEDULE):
        raise CodecError(f"{path} {wrong}")
    try:
        return loads(text)
    except CodecError as error:
        raise CodecError(f"{path}: {error}") from None


def loads(text: str) -> Schedule:
    """Parse the text of a schedule file. Raises CodecError with the place of the first fault."""
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise CodecError(not_json(error)) from None
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists within lists
        raise CodecError(f"not to be read as JSON: {error}") from None
    if not isinstance(data, dict) or "format" not in data:
        raise CodecError('no "format": this is not a schedule file')
    if data["format"] != FORMAT:
        raise CodecError(f"format {data['format']!r} is not {FORMAT!r}, the one this version reads")
    fields = ("format", "policy", "knobs", "staleness", "model", "workload", "buffers", "ops", "waits")
    _only(data, fields, "", required=fields)
    return Schedule(
        ops=tuple(_read_op(row, f"ops[{i}]") for i, row in enumerate(_rows(data, "ops"))),
        buffers=tuple(_read_buffer(row, f"buffers[{i}]") for i, row in enumerate(_rows(data, "buffers"))),
        waits=tuple(_read_wait(row, f"waits[{i}]") for i, row in enumerate(_rows(data, "waits"))),
        model=_part(ModelSpec.from_dict, data["model"], "model"),
        workload=_part(Workload.from_dict, data["workload"], "workload"),
        policy=_string(data, "policy", ""),
        knobs={
            _shown(name, "a knob"): _knob(value, f"knobs.{name}")
            for name, value in _mapping(data["knobs"], "knobs").items()
        },
        staleness=_count(data, "staleness", ""),
    )


def _no_constant(text: str) -> float:
    raise CodecError(f"{text} is not a number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # the last would count, whatever was meant
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CodecError(f"the field {twice!r} stands twice in one object, {json.dumps(found)[:_SHOWN]}")
    return found


def _knob(value: Any, where: str) -> Knob:
    if isinstance(value, float) and not math.isfinite(value):
        raise CodecError(f"{where} must be finite, not {value}")
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise CodecError(f"{where} must be true, false, a number, a word or null, not {value!r}")
    return _shown(value, where) if isinstance(value, str) else value


def _shown(text: str, where: str) -> str:
    if plain(text) != text:
        raise CodecError(f"{where} has characters that cannot be shown: {text!r}")
    return text


def _read_buffer(row: Any, where: str) -> Buffer:
    fields = ("name", "tier", "nbytes")
    row = _only(_mapping(row, where), fields, where, required=fields)
    return Buffer(
        name=_string(row, "name", where), tier=_word(row, "tier", where, Tier), nbytes=_count(row, "nbytes", where)
    )


def _read_wait(row: Any, where: str) -> Wait:
    row = _only(_mapping(row, where), ("op", "on", "distance"), where, required=("op", "on"))
    return Wait(op=_string(row, "op", where), on=_string(row, "on", where), distance=_count(row, "distance", where, 0))


def _read_op(row: Any, where: str) -> Op:
    required = ("name", "kind", "phase", "stream")
    optional = ("layer", "microbatch", "reads", "writes", "nbytes", "flops", "params", "fresh", "blocking")
    row = _only(_mapping(row, where), (*required, *optional), where, required=required)
    blocking = row.get("blocking", False)
    if not isinstance(blocking, bool):
        raise CodecError(f"{where}.blocking must be true or false, not {blocking!r}")
    return Op(
        name=_string(row, "name", where),
        kind=_word(row, "kind", where, Kind),
        phase=_word(row, "phase", where, Phase),
        stream=_word(row, "stream", where, Stream),
        layer=_count(row, "layer", where, least=-1) if "layer" in row else None,
        microbatch=_count(row, "microbatch", where) if "microbatch" in row else None,
        reads=_accesses(row.get("reads", []), f"{where}.reads"),
        writes=_accesses(row.get("writes", []), f"{where}.writes"),
        nbytes=_count(row, "nbytes", where, 0),
        flops=_count(row, "flops", where, 0),
        params=_count(row, "params", where, 0),
        fresh=_count(row, "fresh", where, 0),
        blocking=blocking,
    )


def _accesses(rows: Any, where: str) -> tuple[Access, ...]:
    if not isinstance(rows, list):
        raise CodecError(f"{where} must be a list of [buffer, tensor] pairs")
    for i, row in enumerate(rows):
        if not (isinstance(row, list) and len(row) == 2 and all(isinstance(x, str) for x in row)):
            raise CodecError(f"{where}[{i}] must be a pair [buffer, tensor], not {row!r}")
    return tuple(Access(*(_shown(name, f"{where}[{i}]") for name in row)) for i, row in enumerate(rows))


T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def _part(parse: Any, data: Any, where: str) -> Any:
    try:
        return parse(_mapping(data, where))
    except CodecError:
        raise
    except (TypeError, ValueError) as error:
        raise CodecError(f"{where}: {error}") from None


def _rows(data: Mapping[str, Any], key: str) -> list[Any]:
    rows = data[key]
    if not isinstance(rows, list):
        raise CodecError(f"{key} must be a list")
    return rows


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CodecError(f"{where} must be an object, not {value!r}")
    return value


def _only(row: dict[str, Any], known: tuple[str, ...], where: str, required: tuple[str, ...]) -> dict[str, Any]:
    prefix = f"{where}: " if where else ""
    for key in row:
        if key not in known:
            raise CodecError(f"{prefix}unknown field {key!r}; the fields are {', '.join(known)}")
    for key in required:
        if key not in row:
            raise CodecError(f"{prefix}the field {key!r} is missing")
    return row


def _string(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value:
        raise CodecError(f"{where}{'.' if where else ''}{key} must be a non-empty string, not {value!r}")
    return _shown(value, f"{where}{'.' if where else ''}{key}")


def _word(row: Mapping[str, Any], key: str, where: str, words: type[E]) -> E:
    try:
        return words(row[key])
    except ValueError:
        raise CodecError(f"{where}.{key} is {row[key]!r}; it must be one of {', '.join(words)}") from None


def _count(row: Mapping[str, Any], key: str, where: str, default: int | None = None, least: int = 0) -> int:
    value = row[key] if default is None else row.get(key, default)
    if wrong := fault(value, least=least):
        raise CodecError(f"{where}{'.' if where else ''}{key} {wrong}")
    count: int = value
    return count

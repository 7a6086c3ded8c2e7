"""Schedules as MLCommons Chakra execution traces, for simulators and tools that read those.

Schema: schema/protobuf/et_def.proto of mlcommons/chakra (package ChakraProtoMsg), the fields below and no others.
A file is one GlobalMetadata, then a Node per op. As protobuf (.et), each message follows its length, a varint; as
JSON, each is protobuf's own JSON of it (camelCase, 64-bit integers as strings), one a line, as Chakra's jsonizer
writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.files import whole
from schedules.errors import InputError
from schedules.op import Kind, Op, Phase, Stream
from schedules.schedule import Schedule
from schedules.trace import Trace

VERSION = "0.0.4"
COMP_NODE, MEM_LOAD_NODE, MEM_STORE_NODE = 4, 2, 3
_TYPES = {MEM_LOAD_NODE: "MEM_LOAD_NODE", MEM_STORE_NODE: "MEM_STORE_NODE", COMP_NODE: "COMP_NODE"}
_ON_CPU = (Stream.CPU, Stream.HOST, Stream.NVME_READ, Stream.NVME_WRITE)

Attribute = bool | int | str


class ChakraError(InputError):
    """A file that is not a Chakra execution trace as written here."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A Chakra node. `attributes` hold Chakra's own names (is_cpu_op, num_ops in FLOPs, tensor_size in bytes) and
    ours; a whole number is an int64 in a node, tensor_size a uint64."""

    id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    start_time_micros: int = 0
    duration_micros: int = 0
    attributes: tuple[tuple[str, Attribute], ...] = ()


def nodes(schedule: Schedule, trace: Trace | None = None) -> list[Node]:
    """A node per op of one step, or, with a trace, of each of its steps and with its times.

    A dependency is data where the op reads what the other writes; control are the other waits, the op in front on
    the same stream, and the last op that the issuing host waited for.

    Raises:
        TraceError: the trace is not of the schedule.
    """
    if trace is not None:
        trace.check(schedule)
    count, steps = len(schedule.ops), 1 if trace is None else trace.steps
    times = {} if trace is None else _times(trace)
    behind: dict[Stream, int] = {}
    host: int | None = None
    found = []
    for step in range(steps):
        for place, op in enumerate(schedule.ops):
            number = step * count + place
            data, control = _waits(schedule, op, step)
            if op.stream in behind:
                control.append(behind[op.stream])
            if host is not None:
                control.append(host)
            start, end = times.get((step, place), (0, 0))
            found.append(
                Node(
                    id=number,
                    name=op.name if steps == 1 else f"{op.name} (step {step})",
                    type=_type(op),
                    ctrl_deps=tuple(sorted(set(control) - set(data))),
                    data_deps=tuple(sorted(set(data))),
                    start_time_micros=start // 1000,
                    duration_micros=round((end - start) / 1000),
                    attributes=(
                        *_attributes(op),
                        *((("start_ns", start), ("duration_ns", end - start)) if times else ()),
                    ),
                )
            )
            behind[op.stream] = number
            if op.blocking or op.stream == Stream.HOST:
                host = number
    return found


def _times(trace: Trace) -> dict[tuple[int, int], tuple[int, int]]:
    columns = (trace.step, trace.op, trace.start_ns, trace.end_ns)
    return {(step, op): (start, end) for step, op, start, end in zip(*(c.tolist() for c in columns), strict=True)}


def _waits(schedule: Schedule, op: Op, step: int) -> tuple[list[int], list[int]]:
    """(data, control) dependencies by number; those on a step that is not there are dropped."""
    data: list[int] = []
    control: list[int] = []
    read = {access.tensor for access in op.reads}
    for wait in schedule.waits_of[op.name]:
        if wait.distance > step:
            continue
        place = schedule.index[wait.on]
        number = (step - wait.distance) * len(schedule.ops) + place
        written = {access.tensor for access in schedule.ops[place].writes}
        (data if read & written else control).append(number)
    return data, control


def _type(op: Op) -> int:
    if op.phase != Phase.COPY or op.stream == Stream.COMPUTE:
        return COMP_NODE
    return MEM_LOAD_NODE if op.kind == Kind.PREFETCH else MEM_STORE_NODE


def _attributes(op: Op) -> Iterator[tuple[str, Attribute]]:
    yield "is_cpu_op", op.stream in _ON_CPU
    yield "num_ops", op.flops
    yield "tensor_size", op.nbytes
    yield "stream", str(op.stream)
    yield "kind", str(op.kind)
    yield "phase", str(op.phase)
    if op.layer is not None:
        yield "layer", op.layer
    if op.microbatch is not None:
        yield "micro_batch", op.microbatch


def write(path: Path, schedule: Schedule, trace: Trace | None = None) -> int:
    """Write a schedule, or a run of it; protobuf where the name ends in .et, else JSON. Returns how many nodes.

    Raises:
        TraceError: the trace is not of the schedule.
        InputError: the file cannot be written.
    """
    about: list[tuple[str, Attribute]] = [
        ("schema", f"Chakra {VERSION}"),
        ("policy", schedule.policy),
        ("model", schedule.model.name),
        ("digest", schedule.digest),
    ]
    found = nodes(schedule, trace)
    with whole(path) as partial:
        if path.suffix == ".et":
            messages = [_metadata_bytes(about), *(_node_bytes(node) for node in found)]
            partial.write_bytes(b"".join(_varint(len(message)) + message for message in messages))
        else:
            lines = [_metadata_json(about), *(_node_json(node) for node in found)]
            partial.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return len(found)


def read(path: Path) -> list[Node]:
    """Read what `write` wrote.

    Raises:
        ChakraError: it is something else.
    """
    try:
        if path.suffix == ".et":
            return [_node_of_bytes(message) for message in _messages(path.read_bytes())[1:]]
        return [_node_of_json(json.loads(line)) for line in path.read_text().splitlines()[1:]]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ChakraError(f"{path} is not a Chakra execution trace: {error!r}") from None


# ---- JSON


def _value_name(name: str, value: Attribute) -> str:
    if isinstance(value, bool):
        return "boolVal"
    if isinstance(value, str):
        return "stringVal"
    return "uint64Val" if name == "tensor_size" else "int64Val"


def _attributes_json(attributes: Sequence[tuple[str, Attribute]]) -> list[dict[str, Any]]:
    return [
        {"name": name, _value_name(name, value): value if isinstance(value, bool | str) else str(value)}
        for name, value in attributes
    ]


def _metadata_json(about: Sequence[tuple[str, Attribute]]) -> dict[str, Any]:
    return {"version": VERSION, "attr": _attributes_json(about)}


def _node_json(node: Node) -> dict[str, Any]:
    """Fields of value zero are left out, as protobuf does."""
    fields = {
        "id": str(node.id) if node.id else None,
        "name": node.name,
        "type": _TYPES[node.type],
        "ctrlDeps": [str(n) for n in node.ctrl_deps],
        "dataDeps": [str(n) for n in node.data_deps],
        "startTimeMicros": str(node.start_time_micros) if node.start_time_micros else None,
        "durationMicros": str(node.duration_micros) if node.duration_micros else None,
        "attr": _attributes_json(node.attributes),
    }
    return {key: value for key, value in fields.items() if value}


def _node_of_json(row: dict[str, Any]) -> Node:
    attributes: list[tuple[str, Attribute]] = []
    for attribute in row.get("attr", []):
        ((key, value),) = ((key, value) for key, value in attribute.items() if key != "name")
        attributes.append((attribute["name"], int(value) if "int" in key else value))
    return Node(
        id=int(row.get("id", 0)),
        name=row["name"],
        type=next(number for number, name in _TYPES.items() if name == row["type"]),
        ctrl_deps=tuple(int(n) for n in row.get("ctrlDeps", [])),
        data_deps=tuple(int(n) for n in row.get("dataDeps", [])),
        start_time_micros=int(row.get("startTimeMicros", 0)),
        duration_micros=int(row.get("durationMicros", 0)),
        attributes=tuple(attributes),
    )


# ---- protobuf: field numbers of et_def.proto; wire types 0 (varint) and 2 (length, then bytes)

_ID, _NAME, _TYPE, _CTRL, _DATA, _START, _DURATION, _ATTR = 1, 2, 3, 4, 5, 6, 7, 10
_INT64, _UINT64, _BOOL, _STRING = 9, 13, 27, 29  # of AttributeProto; its name is field 1


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers as two's complement of 64 bits
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _piece(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _attribute_bytes(name: str, value: Attribute) -> bytes:
    head = _piece(1, name.encode())
    if isinstance(value, str):
        return head + _piece(_STRING, value.encode())
    field = _BOOL if isinstance(value, bool) else _UINT64 if name == "tensor_size" else _INT64
    return head + _varint(field << 3) + _varint(int(value))  # of a oneof: written even where it is zero


def _metadata_bytes(about: Sequence[tuple[str, Attribute]]) -> bytes:
    return _piece(1, VERSION.encode()) + b"".join(_piece(2, _attribute_bytes(*item)) for item in about)


def _node_bytes(node: Node) -> bytes:
    parts = [_number(_ID, node.id), _piece(_NAME, node.name.encode()), _number(_TYPE, node.type)]
    for field, numbers in ((_CTRL, node.ctrl_deps), (_DATA, node.data_deps)):
        if numbers:
            parts.append(_piece(field, b"".join(_varint(n) for n in numbers)))
    parts += [_number(_START, node.start_time_micros), _number(_DURATION, node.duration_micros)]
    parts += [_piece(_ATTR, _attribute_bytes(*item)) for item in node.attributes]
    return b"".join(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _read_piece(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = _read_varint(data, at)
    if at + length > len(data):
        raise ValueError("it ends within a message")
    return data[at : at + length], at + length


def _messages(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        message, at = _read_piece(data, at)
        found.append(message)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _read_varint(data, at)
        elif key & 7 == 2:
            value, at = _read_piece(data, at)
        else:
            raise ValueError(f"field {key >> 3} has wire type {key & 7}")
        yield key >> 3, value


def _node_of_bytes(data: bytes) -> Node:
    found: dict[int, Any] = {}
    attributes: list[tuple[str, Attribute]] = []
    for field, value in _fields(data):
        if field == _ATTR and isinstance(value, bytes):
            attributes.append(_attribute_of_bytes(value))
        else:
            found[field] = value
    return Node(
        id=found.get(_ID, 0),
        name=found[_NAME].decode(),
        type=found[_TYPE],
        ctrl_deps=_numbers(found.get(_CTRL, b"")),
        data_deps=_numbers(found.get(_DATA, b"")),
        start_time_micros=found.get(_START, 0),
        duration_micros=found.get(_DURATION, 0),
        attributes=tuple(attributes),
    )


def _numbers(packed: bytes) -> tuple[int, ...]:
    found, at = [], 0
    while at < len(packed):
        number, at = _read_varint(packed, at)
        found.append(number)
    return tuple(found)


def _attribute_of_bytes(data: bytes) -> tuple[str, Attribute]:
    name, value = "", None
    for field, content in _fields(data):
        if field == 1 and isinstance(content, bytes):
            name = content.decode()
        elif isinstance(content, bytes):
            value = content.decode()
        elif field == _BOOL:
            return name, bool(content)
        else:
            return name, content - (1 << 64) if field == _INT64 and content >> 63 else content
    assert value is not None
    return name, value

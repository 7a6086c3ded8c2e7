"""Chakra's messages on disk: protobuf's wire format and protobuf's JSON, of the fields that we use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

VERSION = "0.0.4"
COMP_NODE, MEM_LOAD_NODE, MEM_STORE_NODE = 4, 2, 3
_TYPES = {MEM_LOAD_NODE: "MEM_LOAD_NODE", MEM_STORE_NODE: "MEM_STORE_NODE", COMP_NODE: "COMP_NODE"}
Attribute = bool | int | str


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


def metadata_json(about: Sequence[tuple[str, Attribute]]) -> dict[str, Any]:
    """GlobalMetadata as JSON."""
    return {"version": VERSION, "attr": _attributes_json(about)}


def node_json(node: Node) -> dict[str, Any]:
    """A node as JSON; fields of value zero are left out, as protobuf does."""
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


def node_of_json(row: dict[str, Any]) -> Node:
    """The node of its JSON. Raises KeyError, ValueError or TypeError for something else."""
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


def metadata_bytes(about: Sequence[tuple[str, Attribute]]) -> bytes:
    """GlobalMetadata as protobuf."""
    return _piece(1, VERSION.encode()) + b"".join(_piece(2, _attribute_bytes(*item)) for item in about)


def node_bytes(node: Node) -> bytes:
    """A node as protobuf."""
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


def joined(pieces: Sequence[bytes]) -> bytes:
    """Messages one after another, each behind its length."""
    return b"".join(_varint(len(piece)) + piece for piece in pieces)


def messages(data: bytes) -> list[bytes]:
    """What `joined` made of messages, taken apart. Raises ValueError or IndexError where the data ends too early."""
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


def node_of_bytes(data: bytes) -> Node:
    """The node of its protobuf. Raises KeyError, ValueError or IndexError for something else."""
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

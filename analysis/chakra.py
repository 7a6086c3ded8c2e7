"""Schedules as MLCommons Chakra execution traces, for simulators and tools that read those.

Schema: schema/protobuf/et_def.proto of mlcommons/chakra (package ChakraProtoMsg), of which `chakra_wire` has the
fields. A file is one GlobalMetadata, then a Node per op. As protobuf (.et), each message follows its length, a
varint; as JSON, each is protobuf's own JSON of it (camelCase, 64-bit integers as strings), one a line, as Chakra's
jsonizer writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from analysis import chakra_wire as wire
from analysis.chakra_wire import COMP_NODE, MEM_LOAD_NODE, MEM_STORE_NODE, VERSION, Attribute, Node
from schedules.errors import InputError
from schedules.files import whole
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace


class ChakraError(InputError):
    """A file that is not a Chakra execution trace as written here."""


def nodes(schedule: Schedule, trace: Trace | None = None) -> list[Node]:
    """A node per op of one step, or, with a trace, of each of its steps and with its times.

    A dependency is data where the op reads what the other writes; control are the other waits, the op in front on
    the same stream, and the last op that the issuing host waited for. In front of an op of a recording, with its
    trace, is the last one issued that had ended: what runs on one stream here may be of several CUDA streams.

    Raises:
        TraceError: the trace is not of the schedule.
    """
    if trace is not None:
        trace.check(schedule)
        trace = trace.from_zero()  # the schema's times have no sign
    count, steps = len(schedule.ops), 1 if trace is None else trace.steps
    times = {} if trace is None else _times(trace)
    at_once = trace is not None and schedule.is_recording
    on_stream: dict[Stream, list[int]] = {stream: [] for stream in schedule.streams}
    ends: list[int] = []
    host: int | None = None
    found = []
    for step in range(steps):
        for place, op in enumerate(schedule.ops):
            number = step * count + place
            data, control = _waits(schedule, op, step)
            start, end = times.get((step, place), (0, 0))
            before = reversed(on_stream[op.stream])
            front = next((on for on in before if not at_once or ends[on] <= start), None)
            control += [on for on in (front, host) if on is not None]
            found.append(
                Node(
                    id=number,
                    name=op.name if steps == 1 else f"{op.name} (step {step})",
                    type=_type(schedule, op),
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
            on_stream[op.stream].append(number)
            ends.append(end)
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


def _type(schedule: Schedule, op: Op) -> int:
    """Of a copy by where it leads, whatever it is queued on; one within the device is what kernels are."""
    if op.phase != Phase.COPY:
        return COMP_NODE
    # a recording says no more than that, and has no others on this stream
    within = op.stream == Stream.COMPUTE if schedule.is_recording else set(schedule.route(op)) == {Tier.DEVICE}
    if within:
        return COMP_NODE
    return MEM_LOAD_NODE if op.kind == Kind.PREFETCH else MEM_STORE_NODE


def _attributes(op: Op) -> Iterator[tuple[str, Attribute]]:
    yield "is_cpu_op", not op.on_device
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
            messages = [wire.metadata_bytes(about), *(wire.node_bytes(node) for node in found)]
            partial.write_bytes(wire.joined(messages))
        else:
            lines = [wire.metadata_json(about), *(wire.node_json(node) for node in found)]
            partial.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return len(found)


def read(path: Path) -> list[Node]:
    """Read what `write` wrote.

    Raises:
        ChakraError: it is something else.
    """
    try:
        if path.suffix == ".et":
            return [wire.node_of_bytes(message) for message in wire.messages(path.read_bytes())[1:]]
        return [wire.node_of_json(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ChakraError(f"{path} is not a Chakra execution trace: {error!r}") from None

"""A machine in numbers: what it can do, every number with its unit and where it came from.

The dataclasses below are the one table of fields. Each field states its unit, its range and its meaning;
reading a profile, checking it, overriding a number on the command line and listing a profile are all
derived from them (`sim.hardware`). Here every number is in the base unit of its dimension (bytes, B/s, FLOP/s, ns,
fraction, cores, params/s).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

from sim.units import UNITS, rounded


@dataclass(frozen=True, kw_only=True)
class Value:
    """One number in the base unit of its dimension, and where it came from."""

    value: float
    unit: str
    source: str

    def __post_init__(self) -> None:
        assert self.unit in UNITS, f"{self.unit} is not a base unit"

    def __str__(self) -> str:
        return rounded(self.value, self.unit)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measured integers that share a unit and a source, by op signature."""

    values: dict[str, int]
    unit: str
    source: str

    @cached_property
    def shapes(self) -> dict[str, dict[tuple[int, int], float]]:
        """The same by signature without its shape, then by (micro-batch, sequence); see `sim.signature`."""
        found: dict[str, dict[tuple[int, int], float]] = {}
        for key, value in self.values.items():
            if match := SHAPE.search(key):
                of_op = found.setdefault(SHAPE.sub("/", key), {})
                of_op[int(match["batch"]), int(match["seq"])] = float(value)
        return found


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What was read several times: the least, the median and the most of each, in one unit."""

    values: dict[str, tuple[int, int, int]]
    unit: str
    source: str


WAYS = ("plain", "graphs", "fused", "fused graphs")  # the options of `megatrain profile`, plain being none of them
SHAPE = re.compile(r"/(?P<batch>\d+)x(?P<seq>\d+)/")  # in a signature


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a field of a profile may hold; stands in the annotation of the dataclass field."""

    meaning: str
    holds: Literal["number", "text", "section", "table", "readings"]
    unit: str = ""
    zero: bool = False
    at_least: float = 0.0
    at_most: float = math.inf
    choices: tuple[str, ...] = ()
    section: type | None = None


def _number(unit: str, meaning: str, *, zero: bool = False, at_least: float = 0.0, at_most: float = math.inf) -> Rule:
    return Rule(holds="number", meaning=meaning, unit=unit, zero=zero, at_least=at_least, at_most=at_most)


def _fraction(meaning: str, *, zero: bool = False) -> Rule:
    return _number("fraction", meaning, zero=zero, at_most=1.0)


def _text(meaning: str, *choices: str) -> Rule:
    return Rule(holds="text", meaning=meaning, choices=choices)


def _table(unit: str, meaning: str) -> Rule:
    return Rule(holds="table", meaning=meaning, unit=unit)


def _readings(unit: str, meaning: str) -> Rule:
    return Rule(holds="readings", meaning=meaning, unit=unit)


def _section(section: type, meaning: str) -> Rule:
    return Rule(holds="section", meaning=meaning, section=section)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: Annotated[str, _text("the accelerator, or the processor on a machine without one")]
    memory: Annotated[Value, _number("bytes", "device memory that one process can allocate")]
    memory_bandwidth: Annotated[Value, _number("B/s", "peak bandwidth of device memory, reads and writes together")]
    matmul_flops: Annotated[Value, _number("FLOP/s", "peak dense bf16 matrix rate, fp32 accumulation, no sparsity")]
    matmul_efficiency: Annotated[Value, _fraction("share of the peak that large GEMMs sustain during training")]
    attention_efficiency: Annotated[
        Value, _fraction("share of the matrix peak that attention sustains, mean of forward and backward")
    ]
    memory_efficiency: Annotated[Value, _fraction("share of the memory bandwidth that elementwise kernels sustain")]
    fp32_flops: Annotated[Value, _number("FLOP/s", "peak matrix rate for fp32 tensors")]
    copy_slowdown: Annotated[Value, _fraction("compute takes longer by this share while a copy is active", zero=True)]
    fp8_flops: Annotated[
        Value | None, _number("FLOP/s", "peak dense fp8 matrix rate, fp32 accumulation, no sparsity; absent: none")
    ] = None
    fp8_efficiency: Annotated[
        Value | None, _fraction("share of the fp8 peak that large GEMMs sustain during training")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Host:
    name: Annotated[str, _text("processor and memory")]
    memory: Annotated[Value, _number("bytes", "host memory the training process may use")]
    memory_bandwidth: Annotated[Value, _number("B/s", "attainable host DRAM bandwidth, reads and writes together")]
    cores: Annotated[Value, _number("cores", "physical cores the training process may use")]
    adam_efficiency: Annotated[
        Value, _fraction("share of the host DRAM bandwidth that the optimizer attains when it runs alone")
    ]
    adam_params_per_s: Annotated[
        Value | None, _number("params/s", "measured optimizer rate; used in place of adam_efficiency")
    ] = None
    fresh_pages: Annotated[
        Value | None, _number("B/s", "one thread writing into memory just allocated; absent: as into any memory")
    ] = None
    adam_threads: Annotated[
        Value | None, _number("cores", "cores an optimizer op occupies; absent: it competes for DRAM only")
    ] = None
    copy_threads: Annotated[
        Value | None, _number("cores", "cores a copy occupies; absent: a copy engine does the work")
    ] = None
    compute_threads: Annotated[
        Value | None, _number("cores", "cores a compute op occupies; absent: the GPU does the work")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """A transfer of n bytes takes latency + (n + half_size) / bandwidth when nothing else runs."""

    bandwidth: Annotated[Value, _number("B/s", "large pinned copies, this direction alone")]
    latency: Annotated[Value, _number("ns", "from the start of a copy to its first byte", zero=True)]
    half_size: Annotated[Value, _number("bytes", "transfer size that reaches half of the bandwidth", zero=True)]


@dataclass(frozen=True, kw_only=True)
class Links:
    h2d: Annotated[Link, _section(Link, "host to device")]
    d2h: Annotated[Link, _section(Link, "device to host")]
    duplex: Annotated[Value, _number("B/s", "both directions together when both are busy")]


@dataclass(frozen=True, kw_only=True)
class Nvme:
    read: Annotated[Value, _number("B/s", "large sequential reads")]
    write: Annotated[Value, _number("B/s", "large sequential writes, sustained")]
    both: Annotated[
        Value,
        _number("fraction", "reading and writing at once, as shares of either alone, added", at_least=1.0, at_most=2.0),
    ]
    capacity: Annotated[Value, _number("bytes", "space the training process may use")]
    latency: Annotated[Value, _number("ns", "from submission to first byte", zero=True)]
    endurance: Annotated[Value | None, _number("bytes", "writes in its life that the maker promises")] = None


@dataclass(frozen=True, kw_only=True)
class Issue:
    """What the issuing host thread spends on an op before it can issue the next."""

    compute: Annotated[Value, _number("ns", "launching the kernels of one layer", zero=True)]
    copy: Annotated[Value, _number("ns", "issuing one copy with its event", zero=True)]
    update: Annotated[Value, _number("ns", "handing one layer to the optimizer workers", zero=True)]
    sync: Annotated[Value, _number("ns", "waking up after a blocking wait", zero=True)]
    wake: Annotated[
        Value | None,
        _number("ns", "from what released an op, its issue or another stream's op, to its start", zero=True),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    op_times: Annotated[Table | None, _table("ns", "duration of an op running alone, by signature")] = None
    op_noise: Annotated[
        Table | None, _table("ns", "half of what the middle two thirds of an op's durations span, by signature")
    ] = None
    workspace: Annotated[Table | None, _table("bytes", "transient device memory of a compute op, by signature")] = None
    layers: Annotated[
        Table | None, _table("params", "parameters of the layers whose ops were timed, by model and kind of layer")
    ] = None
    links: Annotated[Readings | None, _readings("B/s", "copies by direction/bytes/what runs beside")] = None
    dram: Annotated[
        Readings | None, _readings("B/s", "host memory, read and written, by what/threads/what runs beside")
    ] = None
    adam: Annotated[
        Readings | None, _readings("params/s", "the host's optimizer by precision/threads/what runs beside")
    ] = None
    products: Annotated[
        Readings | None, _readings("FLOP/s", "square matrix products on the device, by element type")
    ] = None
    nvme: Annotated[Readings | None, _readings("B/s", "the drive by direction/bytes of a piece/pieces under way")] = (
        None
    )
    host: Annotated[Readings | None, _readings("ns", "the issuing thread and idle streams, by what they do")] = None


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    name: Annotated[str, _text("what to call this machine on the command line")]
    description: Annotated[str, _text("what the numbers describe")]
    date: Annotated[str, _text("when the numbers were collected")]
    mode: Annotated[Literal["datasheet", "measured"], _text("how op times are found", "datasheet", "measured")]
    gpu: Annotated[Gpu, _section(Gpu, "the accelerator")]
    host: Annotated[Host, _section(Host, "the host")]
    links: Annotated[Links, _section(Links, "host to device and back")]
    issue: Annotated[Issue, _section(Issue, "the issuing thread")]
    nvme: Annotated[Nvme | None, _section(Nvme, "local solid-state storage")] = None
    unified_memory: Annotated[
        Value | None,
        _number("bytes", "what device and host memory are parts of, on one bandwidth; absent: each has its own"),
    ] = None
    measured: Annotated[Measured | None, _section(Measured, "times measured on this machine")] = None
    versions: Annotated[str | None, _text("the software that it was measured with")] = None
    way: Annotated[str | None, _text("how the ops measured were computed", *WAYS)] = None

    @property
    def one_memory(self) -> bool:
        """Whether what the device reads and writes goes through the host's memory: without a GPU it does too."""
        of_cores = self.host.copy_threads is not None or self.host.compute_threads is not None
        return self.unified_memory is not None or of_cores


# ---- the table, walked


def rules(section: type) -> tuple[tuple[str, Rule, bool], ...]:
    """(field, rule, required) of one section."""
    if section not in _rules:
        hints = get_type_hints(section, include_extras=True)  # slow: every profile that is read asks for all sections
        _rules[section] = tuple(
            (item.name, get_args(hints[item.name])[1], item.default is MISSING) for item in fields(section)
        )
    return _rules[section]


_rules: dict[type, tuple[tuple[str, Rule, bool], ...]] = {}


def _numbers(section: type, prefix: str = "") -> Iterator[tuple[str, Rule]]:
    for key, rule, _ in rules(section):
        if rule.holds == "number":
            yield prefix + key, rule
        elif rule.section is not None:
            yield from _numbers(rule.section, f"{prefix}{key}.")


NUMBERS: Mapping[str, Rule] = dict(_numbers(HardwareProfile))
"""Dotted path -> rule of every number a profile can hold; the keys that `override` accepts."""


TIMED = (
    "gpu.matmul_flops",
    "gpu.fp32_flops",
    "gpu.fp8_flops",
    "host.adam_params_per_s",
)
"""Paths of what no op's time depends on where compute and Adam were timed; only a datasheet makes their times of it."""


THREADS = ("host.adam_threads", "host.copy_threads", "host.compute_threads")
"""Paths of how many of the host's cores an op occupies; without any of them the number of cores slows nothing down."""


CEILINGS = (
    ("links.h2d.bandwidth", "links.duplex"),
    ("links.d2h.bandwidth", "links.duplex"),
    ("links.h2d.bandwidth", "host.memory_bandwidth"),
    ("links.d2h.bandwidth", "host.memory_bandwidth"),
    ("nvme.read", "host.memory_bandwidth"),
    ("nvme.write", "host.memory_bandwidth"),
    *((path, "host.cores") for path in THREADS),
)
"""(path, path it cannot exceed): no op, running alone, uses more of a shared capacity than there is."""


def lookup(profile: HardwareProfile, path: str) -> Value | None:
    """The number at a path of NUMBERS; None where the profile does not state it."""
    item: Any = profile
    for key in path.split("."):
        item = None if item is None else getattr(item, key)
    return cast("Value | None", item)


def listing(profile: HardwareProfile) -> list[tuple[str, str, str, str]]:
    """(path, value with unit, meaning, source) of every number the profile holds, in the order of NUMBERS."""
    found = ((path, rule, lookup(profile, path)) for path, rule in NUMBERS.items())
    return [(path, str(item), rule.meaning, item.source) for path, rule, item in found if item is not None]


def readings(profile: HardwareProfile) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """(meaning, rows of name, least, median and most) of everything that was read several times."""
    if profile.measured is None:
        return []
    found = []
    for key, rule, _ in rules(Measured):
        item = getattr(profile.measured, key)
        if rule.holds == "readings" and item is not None:
            rows = [(name, *(rounded(n, item.unit) for n in three)) for name, three in item.values.items()]
            found.append((rule.meaning, rows))
    return found

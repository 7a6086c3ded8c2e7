"""Hardware profiles: what a machine can do, every number with its unit and where it came from.

The dataclasses below are the one table of fields. Each field states its unit, its range and its meaning;
reading a profile, checking it, overriding a number on the command line and listing a profile are all
derived from them. In memory every number is in the base unit of its dimension (bytes, B/s, FLOP/s, ns,
fraction, cores, params/s); files and the command line may use any unit of the same dimension.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

from schedules.errors import InputError
from sim.units import UNITS, readable, rounded, to_base

PROFILES = Path(__file__).parent / "profiles"
DIGEST = "sha256"  # the field of a measured profile's file that tells whether it was edited


class HardwareError(InputError):
    """A profile or an override is wrong; the message names the file and the field."""


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
        """The same by signature without its shape, then by (micro-batch, sequence); see `sim.cost.signature`."""
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


SHAPE = re.compile(r"/(?P<batch>\d+)x(?P<seq>\d+)/")  # in a signature


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a field of a profile may hold; stands in the annotation of the dataclass field."""

    meaning: str
    holds: Literal["number", "text", "section", "table", "readings"]
    unit: str = ""
    zero: bool = False
    at_most: float = math.inf
    choices: tuple[str, ...] = ()
    section: type | None = None


def _number(unit: str, meaning: str, *, zero: bool = False, at_most: float = math.inf) -> Rule:
    return Rule(holds="number", meaning=meaning, unit=unit, zero=zero, at_most=at_most)


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
        Value, _fraction("share of the bf16 peak that attention sustains, mean of forward and backward")
    ]
    memory_efficiency: Annotated[Value, _fraction("share of the memory bandwidth that elementwise kernels sustain")]
    fp32_flops: Annotated[Value, _number("FLOP/s", "peak matrix rate for fp32 tensors")]
    copy_slowdown: Annotated[Value, _fraction("compute takes longer by this share while a copy is active", zero=True)]


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
    pageable: Annotated[Value | None, _number("B/s", "copies from or to memory that is not pinned")] = None


@dataclass(frozen=True, kw_only=True)
class Nvme:
    read: Annotated[Value, _number("B/s", "large sequential reads")]
    write: Annotated[Value, _number("B/s", "large sequential writes, sustained")]
    capacity: Annotated[Value, _number("bytes", "space the training process may use")]
    latency: Annotated[Value, _number("ns", "from submission to first byte", zero=True)]


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
    op_times: Annotated[Table | None, _table("ns", "duration of a compute op running alone, by signature")] = None
    op_noise: Annotated[
        Table | None, _table("ns", "half of what the middle two thirds of an op's durations span, by signature")
    ] = None
    workspace: Annotated[Table | None, _table("bytes", "transient device memory of a compute op, by signature")] = None
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
    measured: Annotated[Measured | None, _section(Measured, "times measured on this machine")] = None
    versions: Annotated[str | None, _text("the software that it was measured with")] = None


# ---------------------------------------------------------------------------------------- the table, walked


def _rules(section: type) -> tuple[tuple[str, Rule, bool], ...]:
    """(field, rule, required) of one section."""
    hints = get_type_hints(section, include_extras=True)
    return tuple((item.name, get_args(hints[item.name])[1], item.default is MISSING) for item in fields(section))


def _numbers(section: type, prefix: str = "") -> Iterator[tuple[str, Rule]]:
    for key, rule, _ in _rules(section):
        if rule.holds == "number":
            yield prefix + key, rule
        elif rule.section is not None:
            yield from _numbers(rule.section, f"{prefix}{key}.")


NUMBERS: Mapping[str, Rule] = dict(_numbers(HardwareProfile))
"""Dotted path -> rule of every number a profile can hold; the keys that `override` accepts."""


CEILINGS = (
    ("links.h2d.bandwidth", "links.duplex"),
    ("links.d2h.bandwidth", "links.duplex"),
    ("links.h2d.bandwidth", "host.memory_bandwidth"),
    ("links.d2h.bandwidth", "host.memory_bandwidth"),
    ("nvme.read", "host.memory_bandwidth"),
    ("nvme.write", "host.memory_bandwidth"),
    ("host.adam_threads", "host.cores"),
    ("host.copy_threads", "host.cores"),
    ("host.compute_threads", "host.cores"),
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


# ------------------------------------------------------------------------------------------------ checking


def readings(profile: HardwareProfile) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """(meaning, rows of name, least, median and most) of everything that was read several times."""
    if profile.measured is None:
        return []
    found = []
    for key, rule, _ in _rules(Measured):
        item = getattr(profile.measured, key)
        if rule.holds == "readings" and item is not None:
            rows = [(name, *(rounded(n, item.unit) for n in three)) for name, three in item.values.items()]
            found.append((rule.meaning, rows))
    return found


def _checked(number: object, unit: object, rule: Rule, where: str) -> float:
    """The number in base units. Raises HardwareError on a wrong type, unit or range."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise HardwareError(f"{where}: value must be a number, got {number!r}")
    if not math.isfinite(number):
        raise HardwareError(f"{where}: value must be finite, got {number!r}")
    known = UNITS[rule.unit]
    if not isinstance(unit, str) or unit not in known:
        shown = repr(unit) if unit else "none"
        raise HardwareError(f"{where}: unit must be one of {', '.join(known)}; got {shown}")
    if number < 0 or (number == 0 and not rule.zero):
        least = "zero or more" if rule.zero else "above zero"
        raise HardwareError(f"{where}: must be {least}, got {number!r}")
    value = to_base(number, unit, rule.unit)
    if value > rule.at_most:
        raise HardwareError(f"{where}: must be at most {rule.at_most:g}, got {number!r}")
    return value


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(known)}"


# ------------------------------------------------------------------------------------------------ reading


def from_json(document: object, file: str) -> HardwareProfile:
    """Build a profile from parsed JSON. `file` is what error messages call it. Raises HardwareError."""
    profile = cast(HardwareProfile, _parse_section(HardwareProfile, document, file, ""))
    for path, ceiling in CEILINGS:
        low, high = lookup(profile, path), lookup(profile, ceiling)
        if low is not None and high is not None and low.value > high.value:
            raise HardwareError(f"{file}: {path}: {low} is more than {ceiling}, {high}")
    return profile


def _parse_section(section: type, document: object, file: str, prefix: str) -> object:
    known = [key for key, _, _ in _rules(section)]
    data = _mapping(document, f"{file}: {prefix.rstrip('.') or 'profile'}", known)
    parsed: dict[str, object] = {}
    for key, rule, required in _rules(section):
        where = f"{file}: {prefix}{key}"
        if key not in data:
            if required:
                raise HardwareError(f"{where}: missing ({rule.meaning})")
        elif rule.section is not None:
            parsed[key] = _parse_section(rule.section, data[key], file, f"{prefix}{key}.")
        elif rule.holds == "number":
            parsed[key] = _parse_value(data[key], rule, where)
        elif rule.holds == "table":
            parsed[key] = _parse_table(data[key], rule, where)
        elif rule.holds == "readings":
            parsed[key] = _parse_readings(data[key], rule, where)
        else:
            parsed[key] = _parse_text(data[key], rule, where)
    return section(**parsed)


def _mapping(document: object, where: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(document, dict):
        raise HardwareError(f"{where}: must be an object with {', '.join(known)}; got {document!r}")
    for key in document:
        if key not in known:
            raise HardwareError(f"{where}: unknown field {key!r}{_nearest(key, known)}")
    return document


def _parse_value(document: object, rule: Rule, where: str) -> Value:
    data = _mapping(document, where, ("value", "unit", "source"))
    if "value" not in data:
        raise HardwareError(f"{where}: value is missing")
    value = _checked(data["value"], data.get("unit"), rule, where)
    return Value(value=value, unit=rule.unit, source=_parse_source(data, where))


def _parse_table(document: object, rule: Rule, where: str) -> Table:
    data = _mapping(document, where, ("values", "unit", "source"))
    if data.get("unit") != rule.unit:
        raise HardwareError(f"{where}: unit must be {rule.unit}; got {data.get('unit')!r}")
    values = data.get("values")
    if not isinstance(values, dict):
        raise HardwareError(f"{where}: values must be an object of signature to {rule.unit}; got {values!r}")
    for signature, number in values.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise HardwareError(f"{where}: {signature!r} must be a whole number of {rule.unit}; got {number!r}")
    return Table(values=dict(values), unit=rule.unit, source=_parse_source(data, where))


def _parse_readings(document: object, rule: Rule, where: str) -> Readings:
    data = _mapping(document, where, ("values", "unit", "source"))
    if data.get("unit") != rule.unit:
        raise HardwareError(f"{where}: unit must be {rule.unit}; got {data.get('unit')!r}")
    values = data.get("values")
    if not isinstance(values, dict):
        raise HardwareError(f"{where}: values must be an object of name to three numbers; got {values!r}")
    for name, three in values.items():
        if not (isinstance(three, list) and len(three) == 3 and all(type(n) is int and n >= 0 for n in three)):
            raise HardwareError(f"{where}: {name!r} must be least, median and most in {rule.unit}; got {three!r}")
        if sorted(three) != three:
            raise HardwareError(f"{where}: {name!r}: least, median and most are not in order: {three}")
    found = {name: (three[0], three[1], three[2]) for name, three in values.items()}
    return Readings(values=found, unit=rule.unit, source=_parse_source(data, where))


def _parse_source(data: Mapping[str, object], where: str) -> str:
    source = data.get("source")
    if not isinstance(source, str) or not source.strip():
        raise HardwareError(f"{where}: source is missing (a measurement, a datasheet, or why this estimate)")
    return source


def _parse_text(text: object, rule: Rule, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise HardwareError(f"{where}: must be text ({rule.meaning}); got {text!r}")
    if rule.choices and text not in rule.choices:
        raise HardwareError(f"{where}: must be one of {', '.join(rule.choices)}; got {text!r}")
    return text


def names() -> list[str]:
    """The profiles that ship with the package, sorted."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load(name_or_path: str | Path) -> HardwareProfile:
    """A shipped profile by name, or any profile by path. Raises HardwareError."""
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text
    if not is_path and text not in names():
        raise HardwareError(f"no hardware profile is called {text!r}{_nearest(text, names())}")
    path = Path(text) if is_path else PROFILES / f"{text}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(f"{path.name}: {error}") from error
    if isinstance(document, dict):
        _require_untouched(document, path.name)
    return from_json(document, path.name)


def _require_untouched(document: dict[str, object], file: str) -> None:
    """A measured profile says what was measured: raises HardwareError if it was edited since. Takes the digest off."""
    written = document.pop(DIGEST, None)
    if written is None and document.get("mode") != "measured":
        return
    if written != digest_of(document):
        raise HardwareError(
            f"{file}: {'has no digest' if written is None else 'was changed after it was measured'}; measure again, "
            'change numbers where they are used (--set links.h2d.bandwidth=40GB/s), or make it a "datasheet" profile'
        )


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """json would silently keep the last of two numbers for one field."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"field {key!r} appears twice in one object")
        found[key] = value
    return found


# ------------------------------------------------------------------------------------------------ writing


def to_json(profile: HardwareProfile) -> dict[str, Any]:
    """The document that `from_json` reads back as an equal profile."""
    return _write_section(profile)


def _write_section(section: object) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, rule, _ in _rules(type(section)):
        item: Any = getattr(section, key)
        if item is None:
            continue
        if rule.section is not None:
            document[key] = _write_section(item)
        elif rule.holds == "number":
            number, unit = readable(item.value, item.unit)
            whole = int(number) if number.is_integer() else number
            document[key] = {"value": whole, "unit": unit, "source": item.source}
        elif rule.holds == "table":
            document[key] = {"values": dict(item.values), "unit": item.unit, "source": item.source}
        elif rule.holds == "readings":
            values = {name: list(three) for name, three in item.values.items()}
            document[key] = {"values": values, "unit": item.unit, "source": item.source}
        else:
            document[key] = item
    return document


def digest_of(document: Mapping[str, object]) -> str:
    """SHA-256 of a profile's content, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def save(profile: HardwareProfile, path: Path) -> None:
    """Write the file, whole or not at all; a measured one carries the digest of what was measured."""
    document = to_json(profile)
    if profile.mode == "measured":
        document[DIGEST] = digest_of(document)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


# ------------------------------------------------------------------------------------------------ overriding

_ASSIGNMENT = re.compile(r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>.*)")


def override(profile: HardwareProfile, assignments: Sequence[str]) -> HardwareProfile:
    """A profile with numbers replaced, e.g. ["host.memory=256GiB", "links.h2d.bandwidth=40GB/s"].

    Raises HardwareError on an unknown key (with the nearest ones), a missing or wrong unit, a number out of
    range, or a section that stays incomplete (all of nvme is needed where the profile has none).
    """
    document = to_json(profile)
    for assignment in assignments:
        path, equals, text = (part.strip() for part in assignment.partition("="))
        if path not in NUMBERS:
            raise HardwareError(f"{assignment}: no number is called {path!r}{_nearest(path, list(NUMBERS))}")
        match = _ASSIGNMENT.fullmatch(text)
        if not equals or match is None:
            expected = list(UNITS[NUMBERS[path].unit])[-1]
            raise HardwareError(f"{assignment}: write {path}=NUMBER UNIT, e.g. {path}=1{expected}")
        number = float(match["number"])
        _checked(number, match["unit"], NUMBERS[path], assignment)
        *sections, key = path.split(".")
        target = document
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = {"value": number, "unit": match["unit"], "source": "set on the command line"}
    return from_json(document, profile.name)

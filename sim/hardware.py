"""Hardware profiles: machines by name, from files and back, with numbers overridden.

Files and the command line may use any unit of a number's dimension; what a profile holds is `sim.machine`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from schedules.errors import InputError
from schedules.file_kinds import ENCODING, PROFILE, not_json, wrong_kind
from schedules.files import write_text
from schedules.whole_numbers import fault
from schedules.words import nearest, plain
from sim.machine import CEILINGS, NUMBERS, HardwareProfile, Readings, Rule, Table, Value, lookup, rules
from sim.units import UNITS, readable, to_base

PROFILES = Path(__file__).parent / "profiles"
DIGEST = "sha256"  # the field of a measured profile's file that tells whether it was edited


class HardwareError(InputError):
    """A profile or an override is wrong; the message names the file and the field."""


# ---- checking


def _checked(number: object, unit: object, rule: Rule, where: str) -> float:
    """The number in base units. Raises HardwareError on a wrong type, unit or range."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise HardwareError(f"{where}: value must be a number, got {number!r}")
    if not abs(number) <= sys.float_info.max:  # NaN too; a whole number may be larger
        raise HardwareError(f"{where}: value must be finite, got {number!r}")
    known = UNITS[rule.unit]
    if not isinstance(unit, str) or unit not in known:
        shown = repr(unit) if unit else "none"
        raise HardwareError(f"{where}: unit must be one of {', '.join(known)}; got {shown}")
    if number < 0 or (number == 0 and not rule.zero):
        least = "zero or more" if rule.zero else "above zero"
        raise HardwareError(f"{where}: must be {least}, got {number!r}")
    value = to_base(number, unit, rule.unit)
    if not math.isfinite(value):
        raise HardwareError(f"{where}: {number!r} {unit} are too many")
    if value < rule.at_least:
        raise HardwareError(f"{where}: must be at least {rule.at_least:g}, got {number!r}")
    if value > rule.at_most:
        raise HardwareError(f"{where}: must be at most {rule.at_most:g}, got {number!r}")
    return value


def _nearest(word: str, known: Sequence[str]) -> str:
    close = nearest(word, known, cutoff=0.4)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(known)}"


# ---- reading


def from_json(document: object, file: str) -> HardwareProfile:
    """Build a profile from parsed JSON. `file` is what error messages call it. Raises HardwareError."""
    profile = cast(HardwareProfile, _parse_section(HardwareProfile, document, file, ""))
    for path, ceiling in CEILINGS:
        low, high = lookup(profile, path), lookup(profile, ceiling)
        if low is not None and high is not None and low.value > high.value:
            raise HardwareError(f"{file}: {path}: {low} is more than {ceiling}, {high}")
    return profile


def _parse_section(section: type, document: object, file: str, prefix: str) -> object:
    known = [key for key, _, _ in rules(section)]
    data = _mapping(document, f"{file}: {prefix.rstrip('.') or 'profile'}", known)
    parsed: dict[str, object] = {}
    for key, rule, required in rules(section):
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
        if wrong := fault(number):
            raise HardwareError(f"{where}: {signature!r}, in {rule.unit}, {wrong}")
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
    name = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or name.endswith(".json") or "/" in name
    if not is_path and name not in names():
        raise HardwareError(f"no hardware profile is called {name!r}{_nearest(name, names())}")
    path = Path(name) if is_path else PROFILES / f"{name}.json"
    try:
        text = path.read_text(encoding=ENCODING)
        if wrong := wrong_kind(text, PROFILE):
            raise HardwareError(f"{path} {wrong}")
        document = json.loads(text, object_pairs_hook=_plain_object)
    except HardwareError:
        raise
    except FileNotFoundError as error:
        raise HardwareError(f"cannot read {path}: there is no such file") from error
    except OSError as error:
        raise HardwareError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise HardwareError(f"{path.name}: {not_json(error)}") from error
    except (ValueError, RecursionError) as error:
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


def _plain_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """json would silently keep the last of two numbers for one field, and a terminal would obey control characters."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"field {key!r} appears twice in one object")
        for text in (key, value):
            if isinstance(text, str) and plain(text) != text:
                raise ValueError(f"field {key!r} has characters that cannot be shown: {text!r}")
        found[key] = value
    return found


# ---- writing


def to_json(profile: HardwareProfile) -> dict[str, Any]:
    """The document that `from_json` reads back as an equal profile."""
    return _write_section(profile)


def _write_section(section: object) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, rule, _ in rules(type(section)):
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
    write_text(path, json.dumps(document, indent=2) + "\n")


# ---- overriding

COUNTS = ("fraction", "cores")  # their unit goes without saying
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
        number, unit = float(match["number"]), match["unit"]
        if NUMBERS[path].unit == "fraction" and unit == "%":
            number, unit = number / 100, "fraction"
        elif NUMBERS[path].unit in COUNTS:
            unit = unit or NUMBERS[path].unit
        _checked(number, unit, NUMBERS[path], assignment)
        *sections, key = path.split(".")
        target = document
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = {"value": number, "unit": unit, "source": "set on the command line"}
    return from_json(document, profile.name)


def changed(profile: HardwareProfile, assignments: Sequence[str]) -> HardwareProfile:
    """As `override`, and the name tells: "rtx3090 with host.memory=100GiB". Of several for one number the last counts.

    Raises HardwareError as `override` does.
    """
    last = {assignment.partition("=")[0].strip(): assignment for assignment in assignments}
    machine = override(profile, assignments)
    return replace(machine, name=f"{machine.name} with {', '.join(last.values())}") if last else machine

"""Hardware profiles: every number is sourced and in range, and every mistake is named with its place."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.hardware import PROFILES, HardwareError, from_json, load, names, override, save, to_json
from sim.machine import CEILINGS, NUMBERS, Table, Value, listing, lookup, readings
from sim.units import UNITS, readable, rounded, to_base

NUMERIC = [path for path, rule in NUMBERS.items() if lookup(load("h200"), path) is not None]


def document() -> dict[str, Any]:
    return copy.deepcopy(to_json(load("h200")))


def at(data: dict[str, Any], path: str) -> dict[str, Any]:
    for key in path.split("."):
        data = data[key]
    return data


@pytest.mark.parametrize("name", names())
def test_every_shipped_profile_loads_under_its_own_name_with_a_source_for_every_number(name: str) -> None:
    profile = load(name)
    assert profile.name == name
    for path, shown, meaning, source in listing(profile):
        assert shown, path
        assert meaning, path
        kind = source.replace(":", ",").split(",")[0]
        assert kind.startswith(("datasheet", "estimate", "measured", "reported", "nvbandwidth", "dataflow")), (
            f"{path}: {source!r} does not say what kind of source it is"
        )


@pytest.mark.parametrize("name", names())
def test_a_profile_survives_being_saved_and_loaded(name: str, tmp_path: Path) -> None:
    profile = load(name)
    save(profile, tmp_path / "copy.json")
    assert load(tmp_path / "copy.json") == profile


def test_numbers_arrive_in_base_units() -> None:
    h200 = load("h200")
    assert (h200.gpu.memory.value, h200.gpu.memory.unit) == (139 * 2**30, "bytes")
    assert h200.gpu.memory_bandwidth.value == 4.8e12
    assert h200.gpu.matmul_flops.value == 989e12
    assert h200.links.h2d.bandwidth.value == 55.4e9
    assert h200.issue.compute.value == 150_000
    assert str(h200.links.duplex) == "100.8 GB/s"


def test_a_base_unit_is_the_only_unit_a_value_can_have() -> None:
    with pytest.raises(AssertionError, match="not a base unit"):
        Value(value=4.8, unit="TB/s", source="datasheet")


@given(st.sampled_from(sorted(UNITS)), st.floats(min_value=0, max_value=1e17))
def test_the_readable_form_of_a_number_reads_back_exactly(dimension: str, value: float) -> None:
    number, unit = readable(value, dimension)
    assert to_base(number, unit, dimension) == value


def test_the_listing_covers_every_number_a_full_profile_holds() -> None:
    assert [row[0] for row in listing(load("h200"))] == NUMERIC
    assert set(NUMBERS) - set(NUMERIC) == {
        "host.adam_params_per_s",
        "host.adam_threads",
        "host.copy_threads",
        "host.compute_threads",
        "issue.wake",
        "unified_memory",
    }


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("path", NUMERIC)
def test_a_bad_number_is_refused_with_file_and_path(path: str) -> None:
    zero_is_bad = [] if NUMBERS[path].zero else [0]
    for bad in [-1, float("nan"), float("inf"), 10**400, "12", True, None, *zero_is_bad]:
        data = document()
        at(data, path)["value"] = bad
        with pytest.raises(HardwareError) as caught:
            from_json(data, "h200.json")
        assert str(caught.value).startswith(f"h200.json: {path}: "), (bad, caught.value)


@pytest.mark.parametrize("path", NUMERIC)
def test_a_missing_number_value_unit_or_source_is_refused_with_file_and_path(path: str) -> None:
    optional = {"host.fresh_pages", "nvme.endurance", "gpu.fp8_flops", "gpu.fp8_efficiency"}
    for part in ("value", "unit", "source"):
        data = document()
        del at(data, path)[part]
        with pytest.raises(HardwareError, match=rf"^h200\.json: {path}: {part}"):
            from_json(data, "h200.json")
    data = document()
    section, _, key = path.rpartition(".")
    del at(data, section)[key]
    if path in optional:
        assert lookup(from_json(data, "h200.json"), path) is None
    else:
        with pytest.raises(HardwareError, match=rf"^h200\.json: {path}: missing"):
            from_json(data, "h200.json")


@pytest.mark.parametrize("unit", ["GB", "gb/s", "Gb/s", "", None, 3, "bytes"])
def test_units_are_read_strictly(unit: object) -> None:
    data = document()
    at(data, "links.h2d.bandwidth")["unit"] = unit
    with pytest.raises(HardwareError, match=r"links\.h2d\.bandwidth: unit must be one of B/s, MB/s, GB/s, TB/s"):
        from_json(data, "h200.json")


@pytest.mark.parametrize("section", ["", "gpu", "links", "links.h2d", "host.memory"])
def test_an_unknown_field_is_refused_with_the_nearest_names(section: str) -> None:
    data = document()
    target = at(data, section) if section else data
    known = next(key for key in reversed(target))
    target[known + "s"] = target[known]
    with pytest.raises(HardwareError, match=f"unknown field '{known}s'; did you mean .*{known}"):
        from_json(data, "h200.json")


def test_a_fraction_above_one_a_wrong_mode_and_a_blank_text_are_refused() -> None:
    for path, key, bad in [
        ("gpu.matmul_efficiency", "value", 1.01),
        ("gpu.matmul_efficiency", "source", "  "),
        ("gpu", "name", ""),
    ]:
        data = document()
        at(data, path)[key] = bad
        with pytest.raises(HardwareError, match=rf"h200\.json: {path}"):
            from_json(data, "h200.json")
    data = document()
    data["mode"] = "guessed"
    with pytest.raises(HardwareError, match="mode: must be one of datasheet, measured"):
        from_json(data, "h200.json")


@pytest.mark.parametrize(("path", "ceiling"), CEILINGS)
def test_one_op_cannot_be_said_to_exceed_a_shared_capacity(path: str, ceiling: str) -> None:
    base = NUMBERS[path].unit
    others = [other for other, _ in CEILINGS if NUMBERS[other].unit == base]
    lowest = [f"{other}=1{base}" for other in others]
    profile = override(load("h200"), [*lowest, f"{ceiling}=30{base}", f"{path}=30{base}"])
    with pytest.raises(HardwareError, match=rf"{path}: 31 {base} is more than {ceiling}, 30 {base}"):
        override(profile, [f"{path}=31{base}"])


def test_files_that_are_not_profiles_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text in ["", "[]", "null", '{"name": "a", "name": "b"}', "[" * 100_000]:
        path.write_text(text)
        with pytest.raises(HardwareError, match=r"mine\.json"):
            load(path)
    path.write_text(json.dumps({**document(), "description": "\x1b[31mred"}))
    with pytest.raises(HardwareError, match=r"mine\.json: field 'description' has characters that cannot be shown"):
        load(path)
    with pytest.raises(HardwareError, match=r"cannot read .*absent\.json: there is no such file"):
        load(tmp_path / "absent.json")


def test_an_unknown_name_gets_the_nearest_names() -> None:
    with pytest.raises(HardwareError, match="'rtx409'; did you mean rtx4090"):
        load("rtx409")
    with pytest.raises(HardwareError, match="'A100'; did you mean a100-pcie or a100-sxm"):
        load("A100")
    with pytest.raises(HardwareError, match="'H200'; did you mean h200 or "):
        load("H200")
    with pytest.raises(HardwareError, match="'rtx'; did you mean rtx3090 or rtx4090 or rtx5060ti or rtx5080"):
        load("rtx")
    with pytest.raises(HardwareError, match=r"known: .*h200"):
        load("zzzzzz")


# ------------------------------------------------------------------------------------------------ overriding


def test_an_override_replaces_one_number_and_says_so() -> None:
    h200 = load("h200")
    changed = override(h200, ["host.memory=256GiB", "links.h2d.bandwidth = 40 GB/s"])
    assert changed.host.memory == Value(value=256 * 2**30, unit="bytes", source="set on the command line")
    assert changed.links.h2d.bandwidth.value == 40e9
    rest = [path for path in NUMBERS if path not in ("host.memory", "links.h2d.bandwidth")]
    assert [lookup(changed, path) for path in rest] == [lookup(h200, path) for path in rest]
    assert override(h200, []) == h200


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("host.memry=1GiB", "did you mean host.memory"),
        ("host=1GiB", "no number is called 'host'"),
        ("host.memory=1", "unit must be one of bytes, kB"),
        ("host.memory=1GB/s", "unit must be one of bytes, kB.*; got 'GB/s'"),
        ("host.memory", "write host.memory=NUMBER UNIT"),
        ("host.memory=big", "write host.memory=NUMBER UNIT"),
        ("host.cores=80%", "unit must be one of cores; got '%'"),
        ("host.memory=0GiB", "must be above zero"),
        ("gpu.matmul_efficiency=68fraction", "must be at most 1"),
        ("nvme.both=0.5fraction", "must be at least 1"),
        ("links.h2d.bandwidth=1e999GB/s", "must be finite"),
        ("gpu.memory=1e308TB", r"1e\+308 TB are too many"),
    ],
)
def test_a_wrong_override_is_refused_with_what_was_expected(assignment: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        override(load("h200"), [assignment])


def test_what_has_no_dimension_needs_no_unit() -> None:
    for text in ("0.7", "70%", "70 %", "0.7fraction"):
        changed = override(load("h200"), [f"gpu.matmul_efficiency={text}", "host.cores=8"])
        assert (changed.gpu.matmul_efficiency.value, changed.host.cores.value) == (0.7, 8)


def test_nvme_can_be_added_on_the_command_line_but_only_whole() -> None:
    data = document()
    del data["nvme"]
    bare = from_json(data, "bare.json")
    assert bare.nvme is None
    with pytest.raises(HardwareError, match=r"nvme\.write: missing"):
        override(bare, ["nvme.read=7GB/s"])
    whole = ["nvme.read=7GB/s", "nvme.write=4GB/s", "nvme.both=1.5fraction", "nvme.capacity=2TB", "nvme.latency=100us"]
    drive = override(bare, whole).nvme
    assert drive is not None
    assert drive.latency.value == 100_000


# ------------------------------------------------------------------------------------------- measured tables


def test_measured_tables_are_read_and_kept(tmp_path: Path) -> None:
    data = document()
    times = {"block|forward|1|1024": 1234, "block|backward|1|1024": 2500}
    data["measured"] = {"op_times": {"values": times, "unit": "ns", "source": "measured on this machine"}}
    profile = from_json(data, "mine.json")
    assert profile.measured is not None
    assert profile.measured.op_times == Table(values=times, unit="ns", source="measured on this machine")
    assert profile.measured.workspace is None
    save(profile, tmp_path / "mine.json")
    assert load(tmp_path / "mine.json") == profile
    assert override(profile, ["host.memory=1GiB"]).measured == profile.measured


@pytest.mark.parametrize("bad", [1.5, -1, "3", None, True])
def test_a_measured_time_is_a_whole_number_of_nanoseconds(bad: object) -> None:
    data = document()
    data["measured"] = {"op_times": {"values": {"block": bad}, "unit": "ns", "source": "measured"}}
    with pytest.raises(HardwareError, match=r"measured\.op_times: 'block', in ns, must be a whole number of at"):
        from_json(data, "mine.json")


@pytest.mark.parametrize("name", names())
def test_shipped_files_write_each_field_once(name: str, tmp_path: Path) -> None:
    text = (PROFILES / f"{name}.json").read_text()
    assert text.endswith("}\n")
    assert load(name).name == name  # which refuses a field that is written twice:
    (tmp_path / "twice.json").write_text(text.replace('"unit": ', '"unit": "GB/s", "unit": ', 1))
    with pytest.raises(HardwareError, match=r"twice\.json: field 'unit' appears twice in one object"):
        load(tmp_path / "twice.json")


def test_numbers_for_people_have_four_digits_in_a_unit_of_their_size() -> None:
    times = [rounded(ns, "ns") for ns in (11829.0, 4646.0, 3820.0, 464.0)]
    assert times == ["11.83 us", "4.646 us", "3.82 us", "464 ns"]
    shown = [rounded(*pair) for pair in [(4.8e12, "B/s"), (20072512345.6, "B/s"), (0.68, "fraction")]]
    assert shown == ["4.8 TB/s", "20.07 GB/s", "0.68 fraction"]
    assert rounded(139 * 2**30, "bytes") == "139 GiB"
    assert rounded(0.0, "ns") == "0 ns"


def test_a_measured_profile_that_was_edited_is_refused(tmp_path: Path) -> None:
    profile = replace(load("h200"), mode="measured", versions="torch 2.11")
    hardware_file = tmp_path / "here.json"
    save(profile, hardware_file)
    assert load(str(hardware_file)) == profile
    hardware_file.write_text(hardware_file.read_text().replace("55.4", "65.4"))
    with pytest.raises(HardwareError, match=r"was changed after it was measured.*--set"):
        load(str(hardware_file))
    document = json.loads(hardware_file.read_text())
    del document["sha256"]
    hardware_file.write_text(json.dumps(document))
    with pytest.raises(HardwareError, match="has no digest"):
        load(str(hardware_file))


def test_readings_are_kept_and_told_in_words(tmp_path: Path) -> None:
    data = document()
    three = {"h2d/1048576/alone": [20_000_000_000, 21_500_000_000, 22_000_000_000]}
    data["measured"] = {"links": {"values": three, "unit": "B/s", "source": "test"}}
    profile = from_json(data, "mine.json")
    save(profile, tmp_path / "mine.json")
    assert load(tmp_path / "mine.json") == profile
    ((meaning, rows),) = readings(profile)
    assert meaning.startswith("copies by direction")
    assert rows == [("h2d/1048576/alone", "20 GB/s", "21.5 GB/s", "22 GB/s")]
    assert readings(load("h200")) == []


@pytest.mark.parametrize(
    ("three", "told"),
    [
        ([1, 2], "'h2d/1/alone' must be least, median and most in B/s"),
        ([3, 2, 1], "'h2d/1/alone': least, median and most are not in order"),
        ([1, 2.5, 3], "must be least, median and most in B/s"),
        ([True, 2, 3], "must be least, median and most in B/s"),
        ("123", "must be least, median and most in B/s"),
        ([-1, 2, 3], "must be least, median and most in B/s"),
    ],
)
def test_readings_that_are_no_three_numbers_in_order_are_refused(three: object, told: str) -> None:
    data = document()
    data["measured"] = {"links": {"values": {"h2d/1/alone": three}, "unit": "B/s", "source": "test"}}
    with pytest.raises(HardwareError, match=rf"h200\.json: measured\.links: .*{told}"):
        from_json(data, "h200.json")


def test_readings_in_another_unit_are_refused() -> None:
    data = document()
    data["measured"] = {"links": {"values": {"h2d/1/alone": [1, 2, 3]}, "unit": "GB/s", "source": "test"}}
    with pytest.raises(HardwareError, match="unit must be B/s; got 'GB/s'"):
        from_json(data, "h200.json")

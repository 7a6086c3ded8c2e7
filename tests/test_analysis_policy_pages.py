"""Pages of policies: up to date, their numbers those of the schedule, their pictures those of the trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import ROOT, megatrain
from hand_written import small

from analysis import policy_pages
from analysis.policy_pages import COMMAND, OVERVIEW
from analysis.text_gantt import text_gantt
from schedules import policies
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.policies import PolicyError
from schedules.schedule import Schedule
from schedules.trace import ISSUE, Trace
from schedules.verify import ScheduleError
from schedules.workload import Workload
from sim.prediction import contents

FOLDER = ROOT / "docs" / "policies"


def test_the_pages_are_up_to_date() -> None:
    """Every page and the index say what they would say if they were made now. Pictures are only counted."""
    for name, text in policy_pages.texts(policies.names()).items():
        path = FOLDER / name
        assert path.is_file() and path.read_text(encoding="utf-8") == text, f"{path} is old; run: {COMMAND}"
    expected = {OVERVIEW, *(f"{name}.png" for name in policies.names())}
    assert {path.name for path in FOLDER.glob("*.png")} == expected, f"run: {COMMAND}"


def column(rows: list[list[str]], what: str, tier: Tier) -> float:
    (row,) = [row for row in rows if row[0] == what]
    return float(row[1 + list(Tier).index(tier)] or 0)


def test_bytes_per_parameter_are_those_that_the_systems_are_known_for() -> None:
    """Everything resident: weights 2, gradients 2, moments 8. MegaTrain: the same on the host. ZeRO-3: 20."""
    resident = policy_pages.states(policy_pages.page("resident").numbers)
    assert column(resident, "all states", Tier.DEVICE) == pytest.approx(12.0, abs=0.01)
    assert column(resident, "all states", Tier.HOST) == 0
    megatrain_states = policy_pages.states(policy_pages.page("megatrain").numbers)
    assert column(megatrain_states, "optimizer state", Tier.HOST) == pytest.approx(8.0, abs=0.01)
    assert column(megatrain_states, "weights", Tier.HOST) == pytest.approx(2.0, abs=0.01)
    zero3 = policy_pages.states(policy_pages.page("zero3_offload").numbers)
    assert column(zero3, "all states", Tier.HOST) == pytest.approx(20.0, abs=0.01)


@pytest.mark.parametrize("name", policies.names())
def test_states_and_activations_are_all_that_is_allocated(name: str) -> None:
    numbers = policy_pages.page(name).numbers
    rows, params = policy_pages.states(numbers), numbers.schedule.model.total_params
    for tier in Tier:
        told = column(rows, "all states", tier) * params + column(rows, "activations and logits, GB", tier) * 1e9
        assert told == pytest.approx(numbers.schedule.allocated_bytes(tier), abs=0.005 * params + 0.005e9)


def test_what_a_system_reserves_is_no_state() -> None:
    """The released code holds room for all logits, which no op of its schedule touches."""
    numbers = policy_pages.page("megatrain_released").numbers
    (logits,) = [nbytes for what, nbytes in contents(numbers.schedule, Tier.DEVICE) if what == "logits"]
    rest = column(policy_pages.states(numbers), "activations and logits, GB", Tier.DEVICE)
    assert 0 < logits / 1e9 < rest


def test_words_stand_on_the_left_and_numbers_on_the_right() -> None:
    lines = policy_pages.markdown("resident").splitlines()
    for heading, sides in (
        (policy_pages.STATES_HEADING, ["---", "---:", "---:", "---:"]),
        (policy_pages.SPEED_HEADING, ["---", "---:", "---:", "---:", "---:", "---"]),
    ):
        place = lines.index("| " + " | ".join(heading) + " |")
        assert lines[place + 1] == "| " + " | ".join(sides) + " |"


def test_a_page_of_ones_own_policy() -> None:
    page = policy_pages.page(str(ROOT / "docs" / "my_policy.py"))
    assert page.numbers.fits and page.picture.period_ns > 0
    with pytest.raises(PolicyError):
        policy_pages.page("no_such_policy")


def test_a_page_with_knobs(tmp_path: Path) -> None:
    """Those that have no default, too; what counts parameters is scaled with the blocks that are drawn."""
    mine, given = tmp_path / "mine.py", (ROOT / "docs" / "my_policy.py").read_text()
    mine.write_text(given.replace("slots: int = 2", "slots: int"))
    with pytest.raises(PolicyError, match="slots has no default"):
        policy_pages.page(str(mine))
    three = policy_pages.page(f"{mine} slots=3")
    assert three.numbers.schedule.knobs["slots"] == three.picture.schedule.knobs["slots"] == 3
    assert [row[0] for row in policy_pages.speed(f"{mine} slots=3")] == ["mine slots=3", "streamed"]
    assert policy_pages.record(f"{mine} slots=3")["speed"][0]["label"] == "mine slots=3"
    policy_pages.write(tmp_path / "pages", [f"{mine} slots=3"])
    assert "[mine slots=3](mine.md)" in (tmp_path / "pages" / "README.md").read_text()
    assert (tmp_path / "pages" / "mine.md").is_file() and (tmp_path / "pages" / "mine.png").is_file()
    drawn = policy_pages.page("zero_infinity sub_group_size=100000000").picture.schedule
    assert drawn.knobs["sub_group_size"] == 100_000_000 * policy_pages.PICTURE_BLOCKS // 32


def test_a_drawing_in_letters_by_hand() -> None:
    """Ten spans of 10 ns: a load for three, then compute for seven; if it starts late, its first span is small."""
    schedule = Schedule(
        ops=(
            Op(name="load", kind=Kind.PREFETCH, phase=Phase.COPY, stream=Stream.H2D),
            Op(name="forward", kind=Kind.COMPUTE, phase=Phase.FORWARD, stream=Stream.COMPUTE),
        ),
        buffers=(),
        waits=(),
        model=small(),
        workload=Workload(micro_batch_size=1, seq_len=8),
        policy="by hand",
    )
    start, end = np.array([0, 30]), np.array([30, 100])
    zeros = np.zeros(2, dtype=np.int64)
    trace = Trace(
        digest=schedule.digest, machine="none", source="predicted", op=np.array([0, 1]), step=zeros, issue_ns=zeros,
        start_ns=start, end_ns=end, waited_on=np.array([ISSUE, 0]),
    )  # fmt: skip
    assert text_gantt(schedule, trace, columns=19) == [
        "h2d      PPP.......",
        "compute  ...FFFFFFF",
    ]
    late = replace(trace, start_ns=np.array([0, 38]))
    assert text_gantt(schedule, late, columns=19)[1] == "compute  ...fFFFFFF"


def test_the_command_lists_explains_and_writes(tmp_path: Path) -> None:
    listed = megatrain("policies")
    assert all(name in listed.stdout for name in policies.names())
    told = megatrain("policies", "zero3_offload")
    assert told.returncode == 0, told.stderr
    for word in ("overlap_comm = true", "PPP", "tokens/s", "streamed", "all states", "20.00"):
        assert word in told.stdout, word
    assert megatrain("policies", "megatrain", "--out", str(tmp_path)).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", OVERVIEW, "megatrain.md", "megatrain.png"]


def test_the_pages_of_ones_own_policy_stand_in_the_folder_that_is_asked_for(tmp_path: Path) -> None:
    text, knobs = (ROOT / "docs" / "my_policy.py").read_text(), "slots: int = 2"
    (tmp_path / "mine.py").write_text(text.replace(knobs, f"{knobs}, sub_group_size: int | None = None"))
    out = tmp_path / "pages"
    policy_pages.write(out, [str(tmp_path / "mine.py")])
    assert sorted(path.name for path in out.iterdir()) == ["README.md", OVERVIEW, "mine.md", "mine.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "pages"]
    assert "[mine](mine.md)" in (out / "README.md").read_text()
    assert "# `mine`" in (out / "mine.md").read_text() and "(mine.png)" in (out / "mine.md").read_text()


def test_a_policy_of_ones_own_is_proven_before_it_is_described(tmp_path: Path) -> None:
    lines = ["from schedules.program import Program", "", "def policy(model, workload, memory):"]
    (tmp_path / "mine.py").write_text("\n".join([*lines, "    return Program(model, workload)", ""]))
    with pytest.raises(ScheduleError, match="the schedule has no ops"):
        policy_pages.page(str(tmp_path / "mine.py"))

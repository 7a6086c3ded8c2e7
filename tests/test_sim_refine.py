"""The steps of a search, on made-up costs: what one knob at a time finds, and what only several together do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest

from schedules import presets
from schedules.op import Tier
from schedules.schedule import Knob
from schedules.workload import Workload
from sim import hardware
from sim.candidate import OURS, Candidate, Judge, Tried, Verdict
from sim.findings import Findings
from sim.prediction import Prediction, memory_of
from sim.refine import IDLE, fewer_micro_batches, refine, send_away, shake
from sim.search import ELSEWHERE, Search

MODEL = replace(presets.load("qwen2.5-7b"), num_hidden_layers=24, vocab_size=8192)
START = Candidate(policy=OURS, workload=Workload(micro_batch_size=1, seq_len=512))
FAR_AWAY = 10_000  # effort, a unit for each candidate

Cost = Callable[[Candidate], int | None]  # ns, or None where there is no room


def unjudged(candidate: Candidate) -> Tried:
    return Tried(policy=OURS, workload=candidate.workload, knobs=dict(candidate.knobs), period_ns=None, reason="")


def judging(cost: Cost) -> Judge:
    """Judges candidates by these costs."""

    def judge(candidates: list[Candidate], best_ns: float) -> Iterator[Verdict]:
        for candidate in candidates:
            ns = cost(candidate)
            tried = replace(unjudged(candidate), period_ns=ns, over=int(ns is None))
            better = ns is not None and ns < best_ns
            yield Verdict(tried, cast("Prediction", object()) if better else None, 1, None if ns else Tier.DEVICE)

    return judge


def findings(cost: Cost, *, effort: int = FAR_AWAY, knobs: dict[str, int] | None = None) -> Findings:
    """A search that stands at START with these knobs."""
    profile = hardware.load("h200")
    found = Findings(MODEL, profile, memory_of(profile), judging(cost), effort)
    found.evaluate(START.with_knobs(dict(knobs or {})))
    return found


def at(found: Findings, *names: str) -> list[object]:
    assert found.at is not None
    return [found.at.value(name) for name in names]


def ridge(candidate: Candidate) -> int:
    """Less the more layers are resident and blocks are held, but more where these are not about as many."""
    resident, hold = candidate.count("resident"), candidate.count("hold")
    return 10**9 - 10**7 * (resident + hold) + 15 * 10**6 * abs(resident - hold)


def test_several_knobs_together_pass_where_one_alone_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, list[Knob]] = {"resident": [*range(25)], "hold": [*range(25)], "slots": [2, 3, 4]}
    monkeypatch.setattr("sim.refine.knob_space", lambda *of, begun: dict(space))
    found = findings(ridge, knobs={"resident": 8, "hold": 8})
    refine(found, begun=START, hold=True, stride=4)
    assert at(found, "resident", "hold") == [8, 8]
    shake(found, begun=START)
    assert at(found, "resident", "hold") == [24, 24]


def test_chance_is_the_same_in_every_search() -> None:
    one, other = findings(ridge), findings(ridge)
    for found in (one, other):
        shake(found, begun=START)
    assert list(one.tried) == list(other.tried) and len(one.tried) > 2 * IDLE


def test_it_ends_with_the_effort_or_where_nothing_gains() -> None:
    found = findings(ridge, effort=40)
    shake(found, begun=START)
    assert -4 < found.effort <= 0
    found = findings(lambda candidate: 10**9)
    shake(found, begun=START)
    assert 0 < len(found.tried) - 1 <= 4 * IDLE and found.effort > 0


def slower_alone(candidate: Candidate) -> int:
    """Less the more activations leave, but more where they do not as much earlier: a visit for four blocks more."""
    away, slack = candidate.count("offload"), candidate.count("slack")
    return 10**9 - 10**6 * away + 10**6 * abs(away - 4 - 4 * slack) * 3


def test_more_activations_leave_and_come_back_earlier() -> None:
    found = findings(slower_alone, knobs={"offload": 8, "slack": 1})
    refine(found, begun=START, hold=True, stride=4)
    assert at(found, "offload", "slack") == [8, 1], "one alone is slower"
    send_away(found)
    assert at(found, "offload", "slack") == [20, 4]
    found = findings(slower_alone, effort=0, knobs={"offload": 8, "slack": 1})
    send_away(found)
    assert at(found, "offload", "slack") == [8, 1]


def test_as_many_activations_leave_as_have_room() -> None:
    found = findings(lambda c: slower_alone(c) if c.count("offload") <= 18 else None, knobs={"offload": 8, "slack": 1})
    send_away(found)
    assert at(found, "offload", "slack") == [16, 3]
    assert all(0 <= c.count("offload") <= 24 for c in found.tried)


def test_a_step_that_had_no_room_is_tried_again_after_another_knob_has_changed() -> None:
    """Resident layers gain and have no room until fewer blocks are held."""

    def cost(candidate: Candidate) -> int | None:
        resident, hold = candidate.count("resident"), candidate.count("hold")
        return None if resident + hold > 4 else 10**9 - 10**8 * resident + 10**7 * hold

    found = findings(cost, knobs={"hold": 4})
    refine(found, begun=START, hold=True, stride=1)
    assert at(found, "resident", "hold") == [4, 0]


@pytest.mark.parametrize("name", ["through", "hold"])
def test_where_states_pass_of_held_blocks_what_stays_makes_room(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And blocks are held for that: of as many as were, more states pass only of more held ones."""

    def room(candidate: Candidate) -> int:
        return 40 - 4 * candidate.count("hold")

    def cost(candidate: Candidate) -> int | None:
        hold, through, stay = (candidate.count(knob) for knob in ("hold", "through", "stay"))
        apart = abs(hold - through) if name == "through" else 0
        return None if stay > room(candidate) else 10**9 - 10**8 * hold - 10**6 * stay + 10**9 * apart

    monkeypatch.setattr("sim.refine.knob_space", lambda *of, begun: {name: [*range(9)]})
    found = findings(cost, knobs={"hold": 2, "through": 2, "stay": 30})
    monkeypatch.setattr(found.room, "stays", room)
    refine(found, begun=START, hold=True, stride=4)
    assert at(found, "hold", "through", "stay") == [8, 8 if name == "through" else 2, 6]


def test_where_none_is_held_more_states_pass_without_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.refine.knob_space", lambda *of, begun: {"through": [*range(9)]})
    found = findings(lambda candidate: 10**9 - 10**8 * candidate.count("through"))
    refine(found, begun=START, hold=True, stride=4)
    assert at(found, "hold", "through") == [0, 8]


@pytest.mark.parametrize(("room", "tried"), [(3, [(0, 4), (3, 3)]), (2, [(0, 4), (3, 3), (3, 2)])])
def test_where_held_weights_leave_no_room_there_are_fewer_slots(room: int, tried: list[tuple[int, int]]) -> None:
    def judge(candidates: list[Candidate], best_ns: float) -> Iterator[Verdict]:
        for candidate in candidates:
            full = candidate.count("slots") > room
            yield Verdict(replace(unjudged(candidate), over=int(full)), None, 1)

    profile = hardware.load("h200")
    search = Search(replace(MODEL, num_hidden_layers=6), profile, memory_of(profile), judge)
    search._stay_and_pass(START, 3)
    assert [(one.count("hold"), one.count("slots")) for one in search.found.tried if one.count("through") == 3] == tried


@pytest.mark.parametrize("slots, gradients", [(1, 2), (2, 1), (1, 1)])
def test_where_few_blocks_have_room_states_pass_beside_these(slots: int, gradients: int) -> None:
    def judge(candidates: list[Candidate], best_ns: float) -> Iterator[Verdict]:
        for candidate in candidates:
            full = candidate.count("slots") > slots or candidate.count("grad_slots") > gradients
            over = int(full or candidate.count("inputs") < 6)
            yield Verdict(replace(unjudged(candidate), over=over), None, 1)

    def fit(*knobs: str) -> list[tuple[int, ...]]:
        return [tuple(map(one.count, knobs)) for one, tried in search.found.tried.items() if not tried.over]

    profile = hardware.load("h200")
    search = Search(replace(MODEL, num_hidden_layers=6), profile, memory_of(profile), judge)
    search._stay_and_pass(START, 3)
    assert fit("slots", "grad_slots", "parts") == [(slots, gradients, 16)] * 3, "the first way that has room"
    assert fit("through", "defer") == [(3, 1), (2, 1), (1, 1)]
    search.least_resident = 2
    search._stay_and_pass(START, 2)
    assert fit("resident") == [(0,), (0,), (0,), (1,), (1,)], "those that were tried before are not tried again"


def split(count: int, recompute: str = "none") -> Workload:
    return replace(START.workload, micro_batch_size=16 // count, accumulation=count, recompute=recompute)


def searching(cost: Cost, **knobs: Knob) -> Search:
    """A search that stands at eight micro-batches with these knobs."""
    profile = hardware.load("h200")
    search = Search(MODEL, profile, memory_of(profile), judging(cost))
    search.found.evaluate(replace(START, workload=split(8)).with_knobs(knobs))
    return search


def better_elsewhere(candidate: Candidate) -> int:
    """Other numbers of micro-batches take longer by 5 % for each, but gain by resident layers."""
    apart = abs(candidate.workload.accumulation.bit_length() - 4)
    return 10**9 + 5 * 10**7 * apart - 10**7 * candidate.count("resident") * (1 if apart else 0)


STEPS = [split(count) for count in (1, 2, 4, 8, 16)]


def test_other_splits_are_improved_as_well() -> None:
    search = searching(better_elsewhere)
    search.elsewhere(STEPS)
    assert search.found.at is not None
    assert search.found.at.workload.accumulation in (4, 16)
    assert search.found.at.count("resident") == len(MODEL.layers)


def test_only_the_best_of_other_splits_are() -> None:
    """One micro-batch is as far away as can be, and the mode of recompute is the same."""
    search = searching(better_elsewhere)
    search.elsewhere(STEPS)
    improved = {c.workload.accumulation for c in search.found.tried if c.count("resident")}
    assert len(improved) == ELSEWHERE and not improved & {1, 8}


def test_nothing_else_is_tried_where_a_drive_is_the_limit() -> None:
    search = searching(better_elsewhere)
    assert search.found.at is not None
    search.found.at = search.found.at.with_knobs({"nvme": 3})
    search.elsewhere(STEPS)
    assert {c.workload.accumulation for c in search.found.tried} == {8}


def test_what_has_no_room_elsewhere_is_tried_with_fewer_buffers() -> None:
    def cost(candidate: Candidate) -> int | None:
        four = candidate.workload.accumulation == 4
        tight = four and candidate.count("slack") + candidate.count("slots") + candidate.count("offload") > 3
        return None if tight else 10**9 - 10**8 * four

    search = searching(cost, slack=4, slots=4, offload=2)
    search.elsewhere(STEPS)
    assert search.found.at is not None and search.found.at.workload == split(4)


@pytest.mark.parametrize(
    ("longer", "taken"),  # thousandths that a step takes longer than one of eight, by its number of micro-batches
    [({4: 1, 2: 1.9, 1: 2.1}, 2), ({4: 2.1, 2: 0, 1: 0}, 8), ({4: -1, 2: 0.9, 1: 1.1}, 1)],
)
def test_fewer_micro_batches_are_taken_that_are_next_to_no_slower(longer: dict[int, float], taken: int) -> None:
    def cost(candidate: Candidate) -> int:
        return 10**9 + round(10**6 * longer.get(candidate.workload.accumulation, 0))

    found = findings(cost)
    found.evaluate(replace(START, workload=split(8)))
    found.at = replace(START, workload=split(8))
    found.chosen = found.tried[found.at]
    fewer_micro_batches(found, [split(count, mode) for mode in ("none", "mlp") for count in (1, 2, 4, 8)])
    assert found.at.workload == split(taken) and found.chosen is found.tried[found.at]


def test_fewer_micro_batches_are_not_taken_for_more_than_a_plan_that_was_there() -> None:
    found = findings(lambda candidate: 10**9 + 10**6 * (candidate.workload.accumulation == 4))
    found.at = replace(START, workload=split(8))
    found.evaluate(found.at)
    found.chosen = found.tried[found.at]
    fewer_micro_batches(found, [split(4)], most_ns=10**9 + 10**6)
    assert found.at.workload == split(8)
    fewer_micro_batches(found, [split(4)], most_ns=10**9 + 10**6 + 1)
    assert found.at.workload == split(4)


def test_larger_micro_batches_leave_room_for_fewer_in_flight() -> None:
    def cost(candidate: Candidate) -> int | None:
        return None if candidate.count("slack") * candidate.workload.micro_batch_size > 4 else 10**9

    found = findings(cost, knobs={"slack": 4})
    fewer_micro_batches(found, [])
    assert at(found, "slack") == [4]
    begun = replace(START, workload=split(16)).with_knobs({"slack": 4})
    found = findings(cost)
    found.evaluate(begun)
    found.at, found.chosen = begun, found.tried[begun]
    fewer_micro_batches(found, [split(8), split(4), split(2)])
    assert found.at.workload == split(4) and at(found, "slack") == [1]


def test_a_measured_profile_knows_what_small_micro_batches_take() -> None:
    found = findings(lambda candidate: 10**9)
    found.evaluate(replace(START, workload=split(8)))
    found.at = replace(START, workload=split(8))
    found.chosen = found.tried[found.at]
    found.profile = replace(found.profile, mode="measured")
    fewer_micro_batches(found, [split(4)])
    assert found.at.workload == split(8)

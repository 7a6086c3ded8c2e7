"""Two runs of one schedule side by side: the differences add up, causes are named, replay moves the step."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from command import megatrain

from analysis import trace_diff, trace_words
from schedules import codec, policies, presets
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import RECORDED, Schedule
from schedules.trace import COLUMNS, ISSUE, Trace, TraceError
from schedules.workload import MemoryBudget, Workload
from sim.cost import DRAM, Terms, demands
from sim.engine import simulate
from sim.hardware import load, names, override
from sim.machine import HardwareProfile
from sim.prediction import memory_of, predict

ALONE = Terms(sharing=False, compute_slowdown=False)


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    return load("h200")


@pytest.fixture(scope="module")
def schedule(profile: HardwareProfile) -> Schedule:
    workload = Workload(micro_batch_size=4, accumulation=2, seq_len=512)
    return policies.build("streamed", presets.load("qwen2.5-0.5b"), workload, memory_of(profile))


def run(schedule: Schedule, profile: HardwareProfile, *changes: str, terms: Terms = ALONE) -> Trace:
    return simulate(schedule, override(profile, changes), steps=8, terms=terms)


def test_a_run_does_not_differ_from_itself(schedule: Schedule, profile: HardwareProfile) -> None:
    trace = run(schedule, profile)
    found = trace_diff.diff(schedule, trace, trace, profile)
    assert not trace_words.sentences(found) and not trace_words.idle_sentences(found)
    assert not trace_diff.totals(found)["difference_s"].any()
    moves = trace_diff.moves(schedule, trace, trace)
    assert list(moves["class"]) == ["none of it", "issue", "all of it"] and not moves["moves_s"].any()


def test_a_prediction_is_called_so_beside_a_measured_run(schedule: Schedule, profile: HardwareProfile) -> None:
    predicted = run(schedule, profile)
    measured = replace(predicted, source="measured")
    assert trace_diff.diff(schedule, predicted, measured, profile).first_called == "the prediction"
    assert trace_diff.diff(schedule, measured, measured, profile).first_called == "the first run"


def test_ops_start_from_the_end_of_the_step_before(schedule: Schedule, profile: HardwareProfile) -> None:
    trace = run(schedule, profile)
    step = trace_diff.typical_step(trace)
    first = trace_diff.diff(schedule, trace, trace, profile).partings[0].first
    assert step > 0 and first.start_ns == trace.start_ns[step * len(schedule.ops)] - trace.step_end_ns[step - 1]


def test_work_and_idle_time_of_every_stream_add_up_to_the_step(schedule: Schedule, profile: HardwareProfile) -> None:
    """In a steady state a stream's ops and the idle time before each fill exactly one period."""
    first, second = run(schedule, profile), run(schedule, profile, "links.d2h.bandwidth=3GB/s")
    found = trace_diff.diff(schedule, first, second, profile)
    sums = trace_diff.totals(found).groupby("stream")[["first_s", "second_s"]].sum()
    assert set(sums.index) == {str(stream) for stream in schedule.streams}
    assert sums["first_s"].to_numpy() * 1e9 == pytest.approx(found.steps_ns[0])
    assert sums["second_s"].to_numpy() * 1e9 == pytest.approx(found.steps_ns[1])


def test_replay_finds_the_class_that_moves_the_step(schedule: Schedule, profile: HardwareProfile) -> None:
    """Ten times slower D2H is all that changed: it alone, put into the first run, makes the second's step."""
    first, second = run(schedule, profile), run(schedule, profile, "links.d2h.bandwidth=3GB/s")
    moves = trace_diff.moves(schedule, first, second)
    assert (moves["stream"].iloc[1], moves["class"].iloc[1]) == ("d2h", "offload")
    assert moves["step_s"].iloc[1] * 1e9 == pytest.approx(second.step_ns(warmup=4).mean())
    assert moves["step_s"].iloc[-1] == moves["step_s"].iloc[1]
    slower_issue = run(schedule, profile, "issue.compute=20ms")
    moves = trace_diff.moves(schedule, first, slower_issue)
    assert (moves["stream"].iloc[1], moves["class"].iloc[1]) == ("host", "issue")
    assert moves["moves_s"].iloc[1] > 0
    assert moves["step_s"].iloc[1] * 1e9 == pytest.approx(slower_issue.step_ns(warmup=4).mean())
    assert moves["moves_s"].iloc[-1] == moves["moves_s"].iloc[1]


def test_the_largest_move_stands_first_whichever_way_it_goes(schedule: Schedule, profile: HardwareProfile) -> None:
    first, second = (run(schedule, profile, f"links.{link}.bandwidth=3GB/s") for link in ("h2d", "d2h"))
    moved = trace_diff.moves(schedule, first, second)["moves_s"].to_list()[1:-1]
    assert moved == sorted(moved, key=abs, reverse=True)
    assert min(moved) == moved[0] < 0 < max(moved)


def test_moves_stand_beneath_the_replayed_step_that_they_are_measured_against(
    schedule: Schedule, profile: HardwareProfile
) -> None:
    """Ops that stand aside for a millisecond, as for another process: the recorded step is longer than its replay."""
    first, second = run(schedule, profile), run(schedule, profile, "links.d2h.bandwidth=3GB/s")
    aside = 10**6 * first.step
    first = replace(first, start_ns=first.start_ns + aside, end_ns=first.end_ns + aside, source="measured")
    moves = trace_diff.moves(schedule, first, second)
    assert (moves["class"].iloc[0], moves["moves_s"].iloc[0]) == ("none of it", 0.0)
    recorded = trace_diff.diff(schedule, first, second, profile).steps_ns[0]
    assert moves["step_s"].iloc[0] * 1e9 == pytest.approx(recorded - 10**6)
    assert (moves["step_s"] - moves["moves_s"]).to_numpy() == pytest.approx(moves["step_s"].iloc[0])


def test_the_typical_step_is_in_the_middle_and_nearest_to_what_run_tells(
    schedule: Schedule, profile: HardwareProfile
) -> None:
    trace = run(schedule, profile)
    count = len(schedule.ops)
    first = {name: getattr(trace, name)[: 5 * count].copy() for name in COLUMNS}
    ends = np.cumsum([5, 1, 9, 3, 7]) * 10**9
    first["end_ns"] = np.repeat(ends, count)
    assert trace_diff.typical_step(replace(trace, **first)) == 3  # of 1, 9 and 3; the median of all but the first is 5
    first["end_ns"] = np.repeat(np.cumsum([5, 3, 4, 8, 9]) * 10**9, count)
    assert trace_diff.typical_step(replace(trace, **first)) == 3  # 8 is as near to 6 as 4, and later
    for steps in (1, 2):
        few = {name: column[: steps * count] for name, column in first.items()}
        assert trace_diff.typical_step(replace(trace, **few)) == steps - 1


def test_a_host_held_back_by_the_executor_costs_nothing(schedule: Schedule, profile: HardwareProfile) -> None:
    """It may issue a step only when the step before the last has ended. Steps 0 and 1 are issued at once, but all
    begins a second late: what step 2 waited for is no cost of issuing."""
    whole, count = run(schedule, profile), len(schedule.ops)
    trace = replace(whole, **{name: getattr(whole, name)[: 4 * count] for name in COLUMNS})
    late = 10**9 + (trace.step > 0)  # by one nanosecond, step 1 is not the typical one
    held = replace(trace, start_ns=trace.start_ns + late, end_ns=trace.end_ns + late, source="measured")
    issue = trace.issue_ns.copy()
    for step in (2, 3):
        issue[step * count : (step + 1) * count] += max(0, int(held.step_end_ns[step - 2] - issue[step * count]))
    held = replace(held, issue_ns=issue)
    assert trace_diff.typical_step(held) == 2
    moves = trace_diff.moves(schedule, whole, held)
    assert moves["step_s"].iloc[-1] * 1e9 == pytest.approx(whole.step_ns(warmup=4).mean(), rel=1e-3)


def one_op(schedule: Schedule, source: Literal["predicted", "measured"], lasts: int, **moments: list[int]) -> Trace:
    """Steps of one op of `lasts` ns, by when each was issued and ended."""
    issue, end, zero = np.array(moments["issue"]), np.array(moments["end"]), np.zeros(6, dtype=np.int64)
    spans = {"issue_ns": issue, "start_ns": end - lasts, "end_ns": end}
    columns = {"op": zero, "step": zero + np.arange(6), "waited_on": zero + ISSUE}
    return Trace(digest=schedule.digest, machine="x", source=source, **columns, **spans)


@pytest.fixture(scope="module")
def alone(schedule: Schedule) -> Schedule:
    op = Op(name="F", kind=Kind.COMPUTE, phase=Phase.FORWARD, stream=Stream.COMPUTE)
    return replace(schedule, ops=(op,), buffers=(), waits=())


def test_a_host_that_is_late_with_the_data_of_a_step_moves_it(alone: Schedule) -> None:
    """The host takes 10 ns to issue a step and is held back by the last but one; then 150 ns, as it reads data."""
    first = one_op(alone, "measured", 100, issue=[10, 20, 120, 220, 320, 420], end=[110, 210, 310, 410, 510, 610])
    second = one_op(alone, "measured", 100, issue=[150, 300, 450, 600, 750, 900], end=[250, 400, 550, 700, 850, 1000])
    moves = trace_diff.moves(alone, first, second)
    assert list(moves["class"]) == ["none of it", "issue", "all of it"]
    assert (moves["step_s"] * 1e9).to_list() == pytest.approx([100, 150, 150])


def test_what_holds_the_host_up_once_is_no_cost_of_every_step(alone: Schedule) -> None:
    """Beside a step that lasts long for its own reasons it is late with the next, which takes no longer for it."""
    first = one_op(alone, "measured", 100, issue=[10, 20, 120, 220, 320, 420], end=[110, 210, 310, 410, 510, 610])
    second = one_op(alone, "measured", 100, issue=[10, 20, 120, 220, 600, 620], end=[110, 210, 310, 610, 710, 810])
    assert trace_diff.typical_step(second) == 4
    moves = trace_diff.moves(alone, first, second)
    assert (moves["step_s"] * 1e9).to_list() == pytest.approx([100, 100, 100])


def test_a_predicted_host_waits_for_no_step(alone: Schedule) -> None:
    """It takes 150 ns to issue a step; beside ops of 200 ns some step ends meanwhile, which makes that no shorter."""
    issue = [150, 300, 450, 600, 750, 900]
    first = one_op(alone, "predicted", 200, issue=issue, end=[350, 550, 750, 950, 1150, 1350])
    second = one_op(alone, "predicted", 20, issue=issue, end=[170, 320, 470, 620, 770, 920])
    moves = trace_diff.moves(alone, first, second)
    assert list(moves["class"]) == ["none of it", "forward", "issue", "all of it"]
    assert (moves["step_s"] * 1e9).to_list() == pytest.approx([200, 150, 200, 150])


def test_a_host_that_waits_for_an_op_issues_the_next_from_its_end_on(profile: HardwareProfile) -> None:
    """The time that it waited is no cost of issuing: replayed, a run in which it waits lasts as long as it did."""
    workload = Workload(micro_batch_size=1, seq_len=512)
    blocking = policies.build("megatrain_released", presets.load("qwen2.5-0.5b"), workload, memory_of(profile))
    assert any(op.blocking or op.stream == Stream.HOST for op in blocking.ops)
    trace = run(blocking, profile, "issue.compute=1ms")
    replayed = trace_diff.moves(blocking, trace, trace)["step_s"].iloc[0]
    assert replayed * 1e9 == pytest.approx(trace.step_ns(warmup=4).mean(), rel=1e-6)


def test_what_slows_the_gpus_work_is_a_copy(schedule: Schedule, profile: HardwareProfile) -> None:
    """Slow copies lie beside more of the backward; the GPU's work is never blamed for them."""
    first, second = run(schedule, profile), run(schedule, profile, "links.d2h.bandwidth=3GB/s")
    found = trace_diff.diff(schedule, first, second, profile)
    beside = [(p.op.phase, p.beside) for p in found.partings if p.beside is not None]
    assert any(phase == Phase.BACKWARD for phase, _ in beside)
    assert all(other.phase == Phase.COPY for phase, other in beside if phase == Phase.BACKWARD)
    assert all(other.stream != Stream.COMPUTE for phase, other in beside if phase == Phase.COPY)


def test_what_ops_share_is_alike_on_all_gpus_of_a_name_that_have_memory_of_their_own() -> None:
    """So that `diff` may take any where none is named."""
    step, room = Workload(micro_batch_size=4, seq_len=64), MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
    built = policies.build("streamed", presets.load("tiny"), step, room, keep=0)
    apart, one = dict[str, list[frozenset[str]]](), dict[str, list[frozenset[str]]]()
    for machine in map(load, names()):
        used = [frozenset(demand.usage) for demand in demands(built, machine)]
        (one if machine.one_memory else apart)[machine.name] = used
    (usual,), (shared,) = (set(map(tuple, found.values())) for found in (apart, one))
    assert all(b - a <= {DRAM} and DRAM in b for a, b in zip(usual, shared, strict=True) if b) and usual != shared


def test_runs_on_one_memory_are_compared_as_its_own(tmp_path: Path) -> None:
    """There the GPU's ops share it with the CPU's, which a row of their file tells."""
    room = memory_of(load("dgx-spark"))
    step = policies.build("streamed", presets.load("demo"), Workload(micro_batch_size=8, seq_len=128), room, keep=0)
    codec.save(step, tmp_path / "step")
    for trace, efficiency in (("first", "1"), ("second", "0.1")):
        machine = override(load("dgx-spark"), [f"host.adam_efficiency={efficiency}fraction"])
        predict(step, machine).trace.save(tmp_path / trace)

    def rows(*given: str) -> str:
        done = megatrain("diff", "first", "second", "--schedule", "step", "-o", "rows.csv", *given, cwd=tmp_path)
        assert not done.returncode and "note:" not in done.stderr, done.stderr
        return (tmp_path / "rows.csv").read_text()

    assert rows() == rows("-H", "dgx-spark") != rows("-H", "h200")


def test_a_profile_that_lacks_the_schedules_ops_says_all_the_same_what_ops_share(
    schedule: Schedule, profile: HardwareProfile
) -> None:
    first, second = run(schedule, profile), run(schedule, profile, "links.d2h.bandwidth=3GB/s")
    of_nothing = replace(profile, mode="measured", measured=None)
    assert trace_diff.diff(schedule, first, second, of_nothing) == trace_diff.diff(schedule, first, second, profile)


def test_traces_of_what_may_be_a_cpu_are_told_to_be_compared_as_a_gpus(
    schedule: Schedule, profile: HardwareProfile, tmp_path: Path
) -> None:
    named = run(schedule, profile)
    named.save(tmp_path / "named")
    replace(named, machine="some CPU").save(tmp_path / "cpu")
    codec.save(schedule, tmp_path / "step")

    def said(*arguments: str) -> str:
        return megatrain("diff", *arguments, "--schedule", "step", cwd=tmp_path).stderr

    told = "note: ops are taken to share what they share on a GPU; if some CPU is a CPU, give its profile"
    assert said("named", "cpu").startswith(told) and said("cpu", "cpu").startswith(told)
    assert not said("named", "named") and not said("cpu", "cpu", "--hardware", "rtx4090")


def test_a_hidden_difference_moves_little(schedule: Schedule, profile: HardwareProfile) -> None:
    """Loads that take 20 ms longer, partly beside other work."""
    first, second = run(schedule, profile), run(schedule, profile, "links.h2d.bandwidth=30GB/s")
    totals = trace_diff.totals(trace_diff.diff(schedule, first, second, profile)).set_index(["stream", "class"])
    longer = totals["difference_s"]["h2d", "prefetch"]
    moved = trace_diff.moves(schedule, first, second)["moves_s"].iloc[1]
    assert longer > 0.02
    assert 0 <= moved < 0.6 * longer


def test_a_slow_copy_is_told_with_both_rates_and_what_ran_beside_it(
    schedule: Schedule, profile: HardwareProfile
) -> None:
    """One copy of 24 is stretched by hand, to lie beside an update that it did not meet before."""
    first = run(schedule, profile)
    step = trace_diff.typical_step(first)
    place = next(i for i, op in enumerate(schedule.ops) if op.phase == Phase.COPY and op.name.startswith("O.g.12"))
    rows = np.arange(step * len(schedule.ops), (step + 1) * len(schedule.ops))
    row = int(rows[place])
    end = first.end_ns.copy()
    took = int(end[row] - first.start_ns[row])
    end[row] += took  # half the rate
    second = replace(first, end_ns=end, source="measured")
    ((ns, text),) = trace_words.sentences(trace_diff.diff(schedule, first, second, profile))
    assert ns == took
    nbytes = schedule.ops[place].nbytes
    assert f"D2H of layer 12 ran at {nbytes / (2 * took):.3g} GB/s, the prediction says {nbytes / took:.3g}" in text
    assert "; update of layer " in text and "was running" in text


@pytest.mark.parametrize("name", ["torchao_offload", "zero_offload", "megatrain_released"])
def test_a_copy_is_called_by_where_it_leads_whatever_it_is_queued_on(name: str, profile: HardwareProfile) -> None:
    """torchao's uploads are queued behind downloads, ZeRO-Offload's beside kernels."""
    step = Workload(micro_batch_size=1, seq_len=16)
    made = policies.build(name, presets.load("tiny"), step, memory_of(profile))
    copies = [op for op in made.ops if op.phase == Phase.COPY]
    words = {(Tier.HOST, Tier.DEVICE): "H2D of ", (Tier.DEVICE, Tier.HOST): "D2H of "}
    assert any(op.stream != (Stream.H2D if made.route(op)[1] == Tier.DEVICE else Stream.D2H) for op in copies)
    for op in copies:
        told = trace_words.name_of(made, op)
        assert told.startswith(words.get(made.route(op), "copy within the device of ")), told


def test_the_table_for_programs_begins_with_the_largest_differences(
    schedule: Schedule, profile: HardwareProfile
) -> None:
    """One copy takes twice as long, and another starts 7 ns late; the next on their stream then find less idle time."""
    first = run(schedule, profile)
    on_d2h = [i for i, op in enumerate(schedule.ops) if op.stream == Stream.D2H]
    long, after_long, late, after_late = on_d2h[10], on_d2h[11], on_d2h[14], on_d2h[15]
    begin = trace_diff.typical_step(first) * len(schedule.ops)
    took = int(first.end_ns[begin + long] - first.start_ns[begin + long])
    start, end, waited_on = first.start_ns.copy(), first.end_ns.copy(), first.waited_on.copy()
    end[begin + long] += took
    start[begin + late] += 7
    end[begin + late] += 7
    waited_on[begin + late] = ISSUE
    second = replace(first, start_ns=start, end_ns=end, waited_on=waited_on)
    found = trace_diff.diff(schedule, first, second, profile)
    table = trace_diff.frame(found)
    largest = [long, after_long, late, after_late]
    rest = [i for i in range(len(schedule.ops)) if i not in largest]
    assert list(table["op"]) == [schedule.ops[i].name for i in (*largest, *rest)]  # of equals the first in the step
    columns = ["stream", "class", "first_ns", "second_ns", "difference_ns", "delay_ns", "idle_before_ns"]
    assert table[columns].iloc[0].to_list() == ["d2h", "offload", took, 2 * took, took, 0, 0]
    assert table[["difference_ns", "delay_ns", "idle_before_ns"]].iloc[2].to_list() == [0, 7, 7]
    assert table["idle_before_ns"].iloc[[1, 3]].to_list() == [-took, -7]
    released_by = schedule.ops[int(first.waited_on[begin + late]) % len(schedule.ops)].name
    assert (table["released_by_in_first"][2], table["released_by"][2]) == (released_by, "issue")
    assert set(table["beside"][table["beside_ns"] == 0]) == {""}
    assert found.first_called == "the first run"


def test_idle_time_names_what_was_waited_for(schedule: Schedule, profile: HardwareProfile) -> None:
    first, second = run(schedule, profile), run(schedule, profile, "host.adam_efficiency=0.02fraction")
    told = [text for _, text in trace_words.idle_sentences(trace_diff.diff(schedule, first, second, profile), 40)]
    assert any("it waited for update of layer" in text and "longer" in text for text in told)
    late = run(schedule, profile, "issue.compute=20ms")
    told = [text for _, text in trace_words.idle_sentences(trace_diff.diff(schedule, first, late, profile), 40)]
    assert any("the host had not issued it" in text for text in told)


def test_traces_of_another_schedule_or_cut_short_are_refused(schedule: Schedule, profile: HardwareProfile) -> None:
    trace = run(schedule, profile)
    with pytest.raises(TraceError, match="not " + schedule.short_digest):
        trace_diff.diff(schedule, trace, replace(trace, digest="0" * 64), profile)
    cut = replace(trace, **{name: getattr(trace, name)[:-1] for name in COLUMNS})
    twice = replace(trace, op=np.where(trace.op == 1, 0, trace.op))
    turned = replace(trace, **{name: getattr(trace, name)[::-1] for name in ("op", "issue_ns", "start_ns", "end_ns")})
    for other in (cut, twice, turned):
        with pytest.raises(TraceError, match="whole steps"):
            trace_diff.diff(schedule, trace, other, profile)


def test_the_command_tells_it(schedule: Schedule, profile: HardwareProfile, tmp_path: Path) -> None:
    codec.save(schedule, tmp_path / "step.json")
    run(schedule, profile).save(tmp_path / "a.json")
    run(schedule, profile, "links.d2h.bandwidth=3GB/s").save(tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    step = str(tmp_path / "step.json")
    done = megatrain("diff", *files, "--schedule", step, "--out", str(tmp_path / "ops.csv"))
    assert done.returncode == 0, done.stderr
    assert "ran at 3" in done.stdout and "what moves the step" in done.stdout
    assert len((tmp_path / "ops.csv").read_text().splitlines()) == 1 + len(schedule.ops)
    told = json.loads(megatrain("diff", *files, "--schedule", step, "--json", "--top", "3").stdout)
    assert len(told["differences"]["ops"]) == 3 and told["moves"][1]["stream"] == "d2h"


def recorded(lanes: str, seed: int) -> tuple[Schedule, Trace]:
    """A recording, of which each letter is an op of one queue: k and n are two that stand on the compute stream."""
    chance = random.Random(seed)
    streams = {"k": Stream.COMPUTE, "n": Stream.COMPUTE, "h": Stream.H2D, "d": Stream.D2H, "c": Stream.CPU}
    kinds = {Stream.H2D: Kind.PREFETCH, Stream.D2H: Kind.OFFLOAD, Stream.CPU: Kind.UPDATE}
    ops = []
    for number, lane in enumerate(lanes):
        stream = streams[lane]
        phase = {"k": Phase.FORWARD, "n": Phase.FORWARD, "c": Phase.ADAM}.get(lane, Phase.COPY)
        ops.append(Op(name=f"{number} {lane}", kind=kinds.get(stream, Kind.COMPUTE), phase=phase, stream=stream))
    workload = Workload(micro_batch_size=1, seq_len=8)
    schedule = Schedule(
        ops=tuple(ops), buffers=(), waits=(), model=presets.load("tiny"), workload=workload, policy=RECORDED
    )
    free, start, end = dict.fromkeys(streams, 0), [], []
    for lane in lanes:
        start.append(free[lane] + chance.randrange(0, 30))
        end.append(start[-1] + chance.choice((0, 1, 20, 40, 900)))
        free[lane] = end[-1]
    zero = np.zeros(len(lanes), dtype=np.int64)
    columns = {"op": zero + np.arange(len(lanes)), "step": zero, "issue_ns": zero, "waited_on": zero + ISSUE}
    spans = {"start_ns": np.array(start), "end_ns": np.array(end)}
    return schedule, Trace(digest=schedule.digest, machine="x", source="measured", **columns, **spans)


@pytest.mark.parametrize("seed", range(4))
def test_what_ran_beside_an_op_is_found_among_all(seed: int, profile: HardwareProfile) -> None:
    lanes = "".join(random.Random(seed).choices("kknhdc", k=300))
    (schedule, first), (_, second) = recorded(lanes, seed), recorded(lanes, seed + 100)
    found = trace_diff.diff(schedule, first, second, profile)
    slowed = {"k": "hd", "n": "hd", "h": "dc", "d": "hc", "c": "hd"}  # the GPU's work slows no copies

    def together(one: trace_diff.Occurrence, other: trace_diff.Occurrence) -> int:
        return max(min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns), 0)

    for parting in found.partings:
        more = {
            other.op.name: together(parting.second, other.second) - together(parting.first, other.first)
            for other in found.partings
            if other.op.name[-1] in slowed[parting.op.name[-1]]
        }
        assert parting.beside_ns == max(0, *more.values())
        assert parting.beside is None or more[parting.beside.name] == parting.beside_ns


def test_recordings_are_compared(profile: HardwareProfile) -> None:
    """They say neither what copies touched, nor that a stream ran one op at a time: it is not idle for less than 0."""
    (schedule, first), (_, second) = recorded("knhknhdd", 1), recorded("knhknhdd", 2)
    found = trace_diff.diff(schedule, first, second, profile)
    assert all(min(parting.first.idle_ns, parting.second.idle_ns) >= 0 for parting in found.partings)
    assert any(trace.start_ns[1] < trace.end_ns[0] for trace in (first, second))
    assert trace_words.sentences(found)


def test_recordings_whose_streams_overlap_are_not_replayed(tmp_path: Path) -> None:
    """In the second run, two kernels beside each other; in the first, one behind the other."""
    kernels, both = recorded("knh", 0)
    start = np.array([0, 10, 5])
    apart, overlap = (replace(both, start_ns=start, end_ns=start + np.array([lasts, 10, 10])) for lasts in (10, 12))
    assert trace_diff.overlapping(kernels, apart, overlap) == [Stream.COMPUTE]
    assert trace_diff.overlapping(kernels, apart, apart) == []
    codec.save(kernels, tmp_path / "schedule.json")
    apart.save(tmp_path / "a.json")
    overlap.save(tmp_path / "b.json")
    command = ["diff", *(str(tmp_path / name) for name in ("a.json", "b.json", "a.json"))]
    with_schedule = ["--schedule", str(tmp_path / "schedule.json")]
    told = megatrain(*command[:3], *with_schedule).stdout
    assert "not told: on compute recorded ops ran beside each other" in told and "all of it" not in told
    told = json.loads(megatrain(*command[:3], *with_schedule, "--json").stdout)
    assert told["moves"] == [] and told["not_replayed"].startswith("What moves the step is not told: on compute")
    told = json.loads(megatrain("diff", command[1], command[3], *with_schedule, "--json").stdout)
    assert told["not_replayed"] == "" and told["moves"][0]["step_s"] == pytest.approx(20e-9)


def test_of_what_a_recorded_op_waited_for_nothing_is_said_that_is_not_known(profile: HardwareProfile) -> None:
    """A kernel 100 ns after the one in front of it: issued 90 ns after that one had ended, or 20."""
    schedule, both = recorded("kk", 0)
    first, late, waiting = (
        replace(both, issue_ns=np.array([0, issue]), start_ns=np.array([0, 10 + idle]), end_ns=np.array([10, 200]))
        for issue, idle in ((10, 0), (100, 100), (30, 100))
    )
    for second, told in ((late, "the host had not issued it"), (waiting, "what it waited for was not recorded")):
        found = trace_diff.diff(schedule, first, second, profile)
        ((ns, text),) = trace_words.idle_sentences(found)
        assert ns == 100 and text.endswith(told)
    assert trace_diff.frame(found).set_index("op")["released_by"].to_dict() == {"0 k": "issue", "1 k": "unknown"}

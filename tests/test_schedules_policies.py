"""Every policy, on every shape of step: safe, complete, minimal, and moving the bytes its system moves.

The golden files are rewritten by  python tests/test_schedules_policies.py  (read the difference before you
commit it: a refactor must not change them).
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import codec, policies, presets, trained
from schedules.hazards import Accesses, unrolled
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.policies import PolicyError
from schedules.schedule import Knob, Schedule
from schedules.verify import ScheduleError, verify
from schedules.workload import PRECISIONS, RECOMPUTED, MemoryBudget, Workload
from schedules.workspace import workspace_bytes
from sim import hardware
from sim.prediction import estimated_workspace, peak_bytes

TINY = presets.load("tiny")
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = Path(__file__).parents[1] / "docs" / "my_policy.py"

# knobs with which a schedule of four blocks shows what the policy does to forty
SMALL: dict[str, dict[str, Knob]] = {
    "flexgen_block": {"activations": "host"},
    "greedysnake": {"alpha": 0.5},
    "llmq": {"offload": "gradients"},
    "lohan": {"swap": 2},
    "lora_streamed": {"rank": 4, "keep": 2},
    "megatrain": {"checkpoint": 2, "slabs": 2},
    "megatrain_released": {"checkpoint": 2, "slabs": 2},
    "paged_optimizer": {"pressure": 0.5, "keep": 2},
    "resident": {"keep": 2},
    "streamed": {"keep": 2, "slabs": 2, "defer": 1},
    "superoffload": {"ratio": 0.5, "sub_group_size": 18_000},
    "torchao_offload": {"keep": 2},
    "zero3_offload": {"max_live": 20_000},
    "zero_infinity": {
        "params_on_nvme": True,
        "pipeline_read": True,
        "pipeline_write": True,
        "sub_group_size": 18_000,
        "max_live": 20_000,
    },
    "zenflow": {"topk_ratio": 0.5},
    "zero_offload": {"reduce_bucket_size": 20_000},
    "zero_offload_pp": {"ratio": 0.5, "sub_group_size": 18_000, "reduce_bucket_size": 20_000},
}


# golden files of more than one way in which a policy does its work: file -> policy and knobs
WAYS: dict[str, tuple[str, dict[str, Knob]]] = {name: (name, SMALL.get(name, {})) for name in policies.names()} | {
    "greedysnake_ssd": ("greedysnake", {"alpha": 0.5, "ssd": True}),
    "lohan_ssd": ("lohan", {"swap": 2, "ssd": True}),
    "streamed_on_device": ("streamed", {"keep": 1, "resident": 2, "hold": 1, "stay": 1, "through": 2, "parts": 2}),
    "streamed_on_nvme": (
        "streamed",
        {
            "keep": 0, "offload": 2, "nvme_offload": 1, "inputs": 2, "nvme_inputs": 1, "defer": 1, "parts": 2,
            "nvme": 5, "nvme_weights": 2, "singly": 1,
        },
    ),
}  # fmt: skip


def workload(
    *, accumulation: int = 2, clip: float | None = None, precision: str = "bf16", seq_len: int = 16
) -> Workload:
    return Workload(micro_batch_size=1, accumulation=accumulation, seq_len=seq_len, precision=precision, grad_clip=clip)


def blocks(count: int, *, tied: bool = False) -> ModelSpec:
    return replace(TINY, num_hidden_layers=count, tie_word_embeddings=tied)


def small(name: str, **options: object) -> Schedule:
    policy, knobs = WAYS[name]
    return policies.build(policy, TINY, workload(**options), ROOM, **knobs)  # type: ignore[arg-type]


def home_bytes_per_param(schedule: Schedule, tier: Tier) -> float:
    """Bytes per parameter of the homes of weights, gradients and optimizer states."""
    homes = [b for b in schedule.buffers if b.name.startswith(("host.", "device.")) and b.tier == tier]
    return sum(b.nbytes for b in homes) / sum(schedule.model.params(i) for i in schedule.model.layers)


def moved(schedule: Schedule, source: Tier, target: Tier, *letters: str) -> Counter[str]:
    """Tensor -> how often it is copied between two tiers."""
    tier = {buffer.name: buffer.tier for buffer in schedule.buffers}
    return Counter(
        op.reads[0].tensor
        for op in schedule.ops
        if op.phase == Phase.COPY
        and op.reads[0].tensor.partition(".")[0] in letters
        and (tier[op.reads[0].buffer], tier[op.writes[0].buffer]) == (source, target)
    )


def phases(schedule: Schedule) -> Counter[Phase]:
    return Counter(op.phase for op in schedule.ops)


def place(schedule: Schedule, name: str) -> int:
    return schedule.index[name]


# ---- all policies


@pytest.mark.one_in(4)
@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("layers", [1, 2, 7, 32])
@pytest.mark.parametrize("name", policies.names())
def test_a_policy_is_safe_on_every_shape_of_step(
    name: str, layers: int, accumulation: int, tied: bool, clip: float | None
) -> None:
    model = blocks(layers, tied=tied)
    schedule = policies.build(name, model, workload(accumulation=accumulation, clip=clip), ROOM)
    started = verify(schedule).initial
    assert set(started.values()) <= {f"{c}.{model.layer_name(i)}" for c in "wao" for i in model.layers}
    updated = Counter(op.layer for op in schedule.ops if op.phase == Phase.ADAM)
    assert updated == Counter(trained.layers(model, schedule.workload))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", policies.names())
def test_a_policy_is_safe_at_every_precision(name: str, precision: str) -> None:
    assert verify(policies.build(name, TINY, workload(precision=precision, clip=1.0), ROOM))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", policies.names())
def test_no_wait_of_a_policy_can_be_left_out(name: str, clip: float | None) -> None:
    schedule = small(name, clip=clip)
    verify(schedule)
    for wait in schedule.waits:
        rest = tuple(w for w in schedule.waits if w != wait)
        with pytest.raises(ScheduleError) as raised:
            verify(replace(schedule, waits=rest))
        assert {v.rule for v in raised.value.violations} == {"race"}, wait


@pytest.mark.parametrize("name", policies.names())
def test_what_comes_before_an_op_is_what_it_has_hazards_with(name: str) -> None:
    accesses = Accesses()
    for instance, op in unrolled(small(name, clip=1.0).ops, 2):
        assert accesses.before(op) == {hazard.first for hazard in accesses.hazards(op)}
        accesses.record(op, instance)


@pytest.mark.parametrize("name", policies.names())
def test_no_two_ops_of_which_one_waits_for_the_other_can_change_places(name: str) -> None:
    schedule = small(name, clip=1.0)
    for wait in schedule.waits:
        if wait.distance == 0:
            with pytest.raises(ScheduleError):
                verify(_swapped(schedule, schedule.index[wait.op], schedule.index[wait.on]))


def _swapped(schedule: Schedule, first: int, second: int) -> Schedule:
    ops = list(schedule.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return replace(schedule, ops=tuple(ops))


def test_a_policys_file_can_be_read_at_once() -> None:
    folder = Path(policies.__file__).parent
    assert max(len((folder / f"{name}.py").read_text().splitlines()) for name in policies.names()) <= 150


@pytest.mark.parametrize("name", policies.names())
def test_no_backward_and_no_update_of_a_policy_can_be_left_out(name: str) -> None:
    schedule = small(name)
    for op in schedule.ops:
        if op.phase not in (Phase.BACKWARD, Phase.LOSS, Phase.ADAM):
            continue
        with pytest.raises(ScheduleError) as raised:
            verify(_without(schedule, op))
        lacking = {v.rule for v in raised.value.violations}
        assert ("loss coverage" in lacking) == (op.phase == Phase.LOSS), op.name
        if op.phase == Phase.LOSS and policies.trains(name) == "nothing":
            continue
        if op.phase == Phase.LOSS and policies.trains(name) == "adapters":
            assert "stale read" in lacking, op.name  # of what its backward would begin with
        elif op.phase != Phase.BACKWARD or op.layer == TINY.embed:  # the layers below lack more than a gradient
            assert "gradient coverage" in lacking, op.name


def _without(schedule: Schedule, op: Op) -> Schedule:
    return replace(
        schedule,
        ops=tuple(other for other in schedule.ops if other is not op),
        waits=tuple(wait for wait in schedule.waits if op.name not in (wait.op, wait.on)),
    )


@pytest.mark.parametrize("name", WAYS)
def test_a_policy_makes_the_schedule_it_made_before(name: str) -> None:
    stored = GOLDEN / f"{name}.json"
    assert codec.dumps(small(name)) == stored.read_text()
    assert codec.read(stored).digest == small(name).digest


# ---- what each system moves and holds


def test_resident_moves_nothing_and_holds_everything_on_the_device() -> None:
    schedule = policies.build("resident", TINY, workload(), ROOM)
    assert {op.stream for op in schedule.ops} == {Stream.COMPUTE}
    assert home_bytes_per_param(schedule, Tier.DEVICE) == 12
    assert schedule.waits == ()


def test_resident_updates_a_layer_as_soon_as_its_gradient_is_complete() -> None:
    schedule = policies.build("resident", TINY, workload(accumulation=2), ROOM)
    assert place(schedule, "B.3.1") < place(schedule, "U.3") < place(schedule, "B.2.1")


@pytest.mark.parametrize("accumulation", [1, 4])
def test_streamed_moves_weights_and_gradients_once_however_many_micro_batches(accumulation: int) -> None:
    schedule = policies.build("streamed", TINY, workload(accumulation=accumulation), ROOM)
    # both slots still hold the last blocks when the backward begins
    assert moved(schedule, Tier.HOST, Tier.DEVICE, "w") == Counter(
        {"w.embed": 1, "w.head": 1, "w.0": 2, "w.1": 2, "w.2": 1, "w.3": 1}
    )
    assert set(moved(schedule, Tier.DEVICE, Tier.HOST, "g").values()) == {1}


def test_streamed_by_micro_batches_moves_them_once_for_each() -> None:
    schedule = policies.build("streamed", TINY, workload(accumulation=4), ROOM, order="microbatches")
    assert moved(schedule, Tier.DEVICE, Tier.HOST, "g")["g.2"] == 4
    # every turn, of a micro-batch or between two, finds two blocks in the slots
    assert moved(schedule, Tier.HOST, Tier.DEVICE, "w")["w.0"] == 1 + 4
    assert moved(schedule, Tier.HOST, Tier.DEVICE, "w")["w.3"] == 4


@pytest.mark.parametrize("hold", [0, 2])
def test_streamed_by_micro_batches_is_safe_with_blocks_held_and_without(hold: int) -> None:
    """Gradients of embedding and head, and of held blocks, add up over three micro-batches."""
    verify(policies.build("streamed", TINY, workload(accumulation=3), ROOM, order="microbatches", hold=hold))


ANY_KNOBS = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 4),
        "grad_slots": st.integers(1, 3),
        "slabs": st.integers(1, 3),
        "keep": st.none() | st.integers(0, 7),
        "offload": st.integers(0, 7),
        "defer": st.integers(0, 7),
        "resident": st.integers(0, 9),
        "inputs": st.integers(0, 7),
        "slack": st.integers(1, 4),
        "through": st.integers(0, 7),
        "stay": st.integers(0, 20),
        "nvme": st.integers(0, 20),
        "parts": st.integers(1, 6),
        "nvme_weights": st.integers(0, 7),
        "nvme_slots": st.integers(1, 3),
        "nvme_inputs": st.integers(0, 7),
        "nvme_offload": st.integers(0, 7),
        "every": st.integers(1, 4),
        "nested": st.booleans(),
        "hold": st.integers(0, 7),
        "order": st.sampled_from(["layers", "microbatches"]),
        "singly": st.integers(0, 7),
    }
)


@given(
    layers=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    tied=st.booleans(),
    clip=st.sampled_from([None, 1.0]),
    knobs=ANY_KNOBS,
)
@settings(max_examples=100)
def test_streamed_is_safe_with_any_knobs(
    layers: int, accumulation: int, tied: bool, clip: float | None, knobs: dict[str, Knob]
) -> None:
    model, step = blocks(layers, tied=tied), workload(accumulation=accumulation, clip=clip)
    knobs = {name: _at_most(name, value, layers, knobs["parts"]) for name, value in knobs.items()}
    schedule = policies.build("streamed", model, step, ROOM, **knobs)
    verify(schedule)
    assert schedule.knobs == knobs


@given(layers=st.integers(1, 6), accumulation=st.integers(1, 4), mode=st.sampled_from(RECOMPUTED), knobs=ANY_KNOBS)
@settings(max_examples=40)
def test_a_block_more_that_keeps_its_activations_takes_no_less_where_each_runs_again_by_itself(
    layers: int, accumulation: int, mode: str, knobs: dict[str, Knob]
) -> None:
    """So that where none may, no more may: `most_that_fit` counts on that."""
    model, step = blocks(layers), replace(workload(accumulation=accumulation), recompute=mode)
    knobs = {name: _at_most(name, value, layers, knobs["parts"]) for name, value in knobs.items()} | {"every": 1}
    taken = []
    for keep in range(layers + 1):
        built = policies.build_without_waits("streamed", model, step, ROOM, **{**knobs, "keep": keep})
        taken.append(built.allocated_bytes(Tier.DEVICE) + estimated_workspace(built))
    assert taken == sorted(taken)


def _at_most(name: str, value: Knob, layers: int, parts: Knob) -> Knob:
    """A knob of `streamed` that counts no more than there are."""
    most = {"resident": layers + 2, "stay": layers * parts, "nvme": layers * parts}
    most |= dict.fromkeys(("keep", "offload", "inputs", "defer", "hold", "through", "singly"), layers)
    most |= dict.fromkeys(("nvme_weights", "nvme_inputs", "nvme_offload"), layers)
    return min(value, most[name]) if value is not None and name in most else value


def test_streamed_reads_weights_twice_from_the_drive_and_writes_them_once() -> None:
    model, drive = blocks(8), {"nvme": 8, "nvme_weights": 8}
    schedule = policies.build("streamed", model, workload(accumulation=2), ROOM, **drive)
    states, weights = ({f"{letter}.{i}": 1 for i in range(8)} for letter in "ow")
    assert moved(schedule, Tier.HOST, Tier.NVME, "o", "w", "g") == {**states, **weights}
    # four host buffers: the last four blocks' weights still stand there at the turn
    assert moved(schedule, Tier.NVME, Tier.HOST, "o", "w", "g") == {
        **states,
        **weights,
        **{f"w.{i}": 2 for i in range(4)},
    }
    clipped = policies.build("streamed", model, workload(clip=1.0), ROOM, **drive)
    verify(clipped)
    gradients = {f"g.{i}": 1 for i in range(8)}
    assert moved(clipped, Tier.HOST, Tier.NVME, "g") == gradients == moved(clipped, Tier.NVME, Tier.HOST, "g")
    homes = {b.name for b in clipped.buffers if b.tier == Tier.HOST and b.name.startswith("host.")}
    assert homes == {f"host.{letter}.{end}" for letter in "owg" for end in ("embed", "head")}


def test_streamed_sends_inputs_on_to_the_drive() -> None:
    model, step = blocks(6), workload(accumulation=2)
    schedule = policies.build("streamed", model, step, ROOM, keep=0, inputs=6, nvme_inputs=6)
    inputs = {f"x.{model.layer_name(i - 1)}.{m}": 1 for i in model.blocks for m in step.microbatches}
    assert moved(schedule, Tier.HOST, Tier.NVME, "x") == inputs == moved(schedule, Tier.NVME, Tier.HOST, "x")
    on_host = [b for b in schedule.buffers if b.tier == Tier.HOST and b.name.startswith("host.hidden")]
    assert 0 < len(on_host) <= 4  # on their way, and not twelve


def test_streamed_updates_on_the_device_what_passes_through() -> None:
    schedule = policies.build("streamed", TINY, workload(accumulation=2), ROOM, through=2)
    updates = {op.layer: op.stream for op in schedule.ops if op.phase == Phase.ADAM}
    through = {layer for layer, stream in updates.items() if stream == Stream.COMPUTE}
    assert len(through) == 2
    moved_down = moved(schedule, Tier.DEVICE, Tier.HOST, "o", "w", "g")
    for layer in through:  # state and weights go back, the gradient never leaves
        assert moved_down[f"o.{layer}"] == moved_down[f"w.{layer}"] == 1
        assert f"g.{layer}" not in moved_down


def test_streamed_brings_activations_back_with_the_slack_asked_for() -> None:
    def lead(slack: int) -> int:
        schedule = policies.build("streamed", blocks(8), workload(), ROOM, keep=0, offload=8, slack=slack)
        backwards = [op.name for op in schedule.ops if op.phase == Phase.BACKWARD and op.layer in range(8)]
        back = place(schedule, "P.s.2.0")
        return sum(back < place(schedule, name) < place(schedule, "B.2.0") for name in backwards)

    assert [lead(slack) for slack in (1, 2, 3)] == [1, 2, 3]


def test_streamed_sends_activations_away_at_once_and_leaves_them_the_time_that_was_asked_for() -> None:
    def time(slack: int) -> int:
        """Forwards until one writes where the activations of block 2 have been."""
        schedule = policies.build("streamed", blocks(8), workload(), ROOM, keep=0, offload=8, slack=slack)
        assert place(schedule, "F.2.0") < place(schedule, "O.s.2.0") < place(schedule, "F.3.0")
        gone = schedule.index["O.s.2.0"]
        (left,) = (access.buffer for access in schedule.ops[gone].reads)
        forwards = [op for op in schedule.ops[gone:] if op.phase == Phase.FORWARD]
        return next(n for n, op in enumerate(forwards) if left in {access.buffer for access in op.writes})

    assert [time(slack) for slack in (1, 2, 3)] == [1, 2, 3]


def test_streamed_loads_first_what_the_step_before_updates_first() -> None:
    schedule = policies.build("streamed", blocks(8), workload(), ROOM)
    loads = [op.layer for op in schedule.streams[Stream.H2D][:4]]
    updates = [op.layer for op in schedule.streams[Stream.CPU] if op.layer in loads]
    assert loads == updates == [8, 1, 0, -1]


def test_streamed_with_clipping_loads_the_embedding_second_though_its_update_is_late() -> None:
    schedule = policies.build("streamed", TINY, workload(clip=1.0), ROOM)
    assert [op.name for op in schedule.streams[Stream.H2D][:2]] == ["P.w.0", "P.w.embed"]


def test_streamed_defers_evenly_and_updates_the_deferred_in_the_order_of_the_forward() -> None:
    schedule = policies.build("streamed", blocks(8), workload(), ROOM, defer=4)
    last_backward = place(schedule, "B.embed.1")
    early = [op.layer for op in schedule.streams[Stream.CPU] if place(schedule, op.name) < last_backward]
    late = [op.layer for op in schedule.streams[Stream.CPU] if place(schedule, op.name) > last_backward]
    assert len(early) == 1 + 4 and len(late) == 1 + 4
    assert late[0] == -1 and late[1:] == sorted(late[1:])
    assert all(b - a <= 2 for a, b in pairwise(late[1:]))


def test_streamed_with_clipping_measures_on_the_device_and_updates_after_the_last_norm() -> None:
    schedule = policies.build("streamed", TINY, workload(clip=1.0), ROOM)
    norms = [op for op in schedule.ops if op.phase == Phase.NORM]
    assert len(norms) == len(TINY.layers) and {op.stream for op in norms} == {Stream.COMPUTE}
    updates = [op.layer for op in schedule.ops if op.phase == Phase.ADAM]
    assert updates == [0, -1, 1, 2, 3, 4]
    assert place(schedule, norms[-1].name) < place(schedule, "U.0")


def test_streamed_resident_layers_do_not_cross_the_link() -> None:
    schedule = policies.build("streamed", TINY, workload(), ROOM, resident=2)  # the embedding and block 0
    assert not {"w.embed", "w.0"} & set(moved(schedule, Tier.HOST, Tier.DEVICE, "w"))
    assert not {"g.embed", "g.0"} & set(moved(schedule, Tier.DEVICE, Tier.HOST, "g"))
    on_gpu = {op.layer for op in schedule.ops if op.phase == Phase.ADAM and op.stream == Stream.COMPUTE}
    assert on_gpu == {-1, 0}


def device_peak(schedule: Schedule) -> int:
    workspace = max(
        workspace_bytes(schedule.model, op.layer, op.phase, schedule.workload)
        for op in schedule.ops
        if op.kind == Kind.COMPUTE and op.layer is not None
    )
    return schedule.allocated_bytes(Tier.DEVICE) + workspace


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("resident", {}),
        ("streamed", {}),
        ("streamed", {"order": "microbatches"}),
        ("streamed", {"resident": 2, "slots": 3}),
        ("torchao_offload", {}),
        ("lora_streamed", {}),
        ("paged_optimizer", {"pressure": 0.5}),
        *((name, {"activations": "inputs"}) for name in ("resident", "lora_streamed", "torchao_offload")),
        ("paged_optimizer", {"pressure": 0.5, "activations": "inputs"}),
        ("streamed", {"inputs": 6}),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_as_many_blocks_keep_their_activations_as_fit(name: str, knobs: dict[str, Knob], accumulation: int) -> None:
    model, step = blocks(6), workload(accumulation=accumulation, seq_len=32)

    def peak(keep: int) -> int:
        return device_peak(policies.build(name, model, step, ROOM, keep=keep, **knobs))

    for keep in range(1, 6):
        budget = peak(keep)
        for device_bytes, expected in ((budget, keep), (budget - 1, keep - 1)):
            memory = MemoryBudget(device_bytes=device_bytes, host_bytes=10**10)
            schedule = policies.build(name, model, step, memory, **knobs)
            recomputed = {op.layer for op in schedule.ops if op.phase == Phase.RECOMPUTE}
            assert recomputed == set(range(6 - expected))
    assert peak(0) > 1  # far too little memory is told by the planner, not by the policy
    policies.build(name, model, step, MemoryBudget(device_bytes=1, host_bytes=1), **knobs)


@pytest.mark.parametrize(
    "knobs",
    [{"activations": "recompute", "every": 3}, {"activations": "host"}, {"activations": "nvme"}],
    ids=["every", "host", "nvme"],
)
@pytest.mark.parametrize("name", ["resident", "lora_streamed", "torchao_offload", "paged_optimizer", "streamed"])
def test_no_more_blocks_keep_theirs_than_fit_whatever_the_others_do(name: str, knobs: dict[str, Knob]) -> None:
    model, step = blocks(9), workload(accumulation=2, seq_len=32)
    if name == "streamed":
        knobs = {"offload": 2, "inputs": 4} if knobs["activations"] != "recompute" else {"every": 3}
    elif name == "paged_optimizer":
        knobs = {"pressure": 0.5, **knobs}
    peaks = [device_peak(policies.build(name, model, step, ROOM, keep=keep, **knobs)) for keep in range(10)]
    for budget in sorted({peak + more for peak in peaks for more in (-1, 0, 1000)}):
        memory = MemoryBudget(device_bytes=budget, host_bytes=10**10)
        taken = device_peak(policies.build(name, model, step, memory, **knobs))
        # one block more or less may take as much
        assert taken == max((peak for peak in peaks if peak <= budget), default=peaks[0])


def test_nested_blocks_run_forward_once_more_and_hold_the_activations_of_one_at_a_time() -> None:
    together, nested = (
        policies.build("streamed", blocks(9), workload(accumulation=2), ROOM, keep=0, every=3, nested=nested)
        for nested in (False, True)
    )
    again = Counter(op.layer for op in nested.ops if op.phase == Phase.RECOMPUTE)
    assert again == {i: 2 if i % 3 == 2 else 4 for i in range(9)}  # two micro-batches; the last of three need not
    assert phases(together)[Phase.RECOMPUTE] == 18
    held = [sum(b.name.startswith("saved") for b in schedule.buffers) for schedule in (together, nested)]
    assert held == [5, 1]  # of two blocks' two micro-batches, and one more


def test_the_drive_has_the_states_of_late_blocks_first() -> None:
    """Whose traffic falls into the forward, when no others are updated."""

    def on_drive(nvme: int) -> set[str]:
        schedule = policies.build("streamed", blocks(8), workload(accumulation=1), ROOM, defer=2, nvme=nvme, parts=2)
        homes = {access.tensor for op in schedule.ops if op.stream == Stream.NVME_READ for access in op.writes}
        return {tensor for tensor in homes if tensor.startswith("o.")}

    late = on_drive(4)
    assert len(late) == 4 and len({tensor.split(".")[1][0] for tensor in late}) == 2
    assert len(on_drive(6)) == 6 and on_drive(6) > late > on_drive(3)


def test_megatrain_loads_each_layer_up_to_three_times_and_computes_four_forwards() -> None:
    model = blocks(8)
    schedule = policies.build("megatrain", model, workload(accumulation=1), ROOM)
    loads = moved(schedule, Tier.HOST, Tier.DEVICE, "w")
    # of a group of four, the two that still stand in the slots are not loaded again
    assert [loads[f"w.{i}"] for i in range(8)] == [3, 3, 2, 2, 3, 3, 2, 2]
    counted = phases(schedule)
    assert counted[Phase.FORWARD] == counted[Phase.RECOMPUTE] == counted[Phase.BACKWARD] - 1 == 8
    assert home_bytes_per_param(schedule, Tier.HOST) == 12


def test_megatrain_released_does_what_its_code_does() -> None:
    model = blocks(8)
    schedule = policies.build("megatrain_released", model, workload(accumulation=1, clip=1.0), ROOM)
    loads = moved(schedule, Tier.HOST, Tier.DEVICE, "w")
    assert {loads[f"w.{i}"] for i in range(8)} == {3}
    counted = phases(schedule)
    assert counted[Phase.FORWARD] == 8 and counted[Phase.RECOMPUTE] == 16 and counted[Phase.BACKWARD] == 9
    assert sum(op.blocking for op in schedule.ops if op.kind == Kind.COMPUTE) == 3 * 8 + 1
    assert home_bytes_per_param(schedule, Tier.HOST) == 12
    flats = sum(b.nbytes for b in schedule.buffers if b.name.startswith("pinned."))
    assert flats == 2 * sum(model.params(i) for i in model.blocks)
    tail = [op.phase for op in schedule.streams[Stream.HOST] if op.kind == Kind.UPDATE and op.phase != Phase.SYNC]
    assert tail == ([Phase.NORM] + [Phase.SCALE] * 10 + [Phase.ADAM] * 10 + [Phase.CAST] * 8 + [Phase.ZERO] * 10)


def test_megatrain_released_takes_as_much_for_a_sequence_as_its_code_was_seen_to() -> None:
    """14B at 1024 tokens: 0.50 GB, of which logits 0.31 (facts of its code, 5.5); bf16, op by op."""
    model = presets.load("qwen2.5-14b")

    def peak(batch: int) -> int:
        step = Workload(micro_batch_size=batch, seq_len=1024)
        schedule = policies.build("megatrain_released", model, step, ROOM)
        return peak_bytes(schedule, hardware.load("gh200"))[Tier.DEVICE]

    assert (peak(96) - peak(64)) / 32e9 == pytest.approx(0.50, rel=0.03)


def test_megatrain_released_stores_first_gradients_into_fresh_memory() -> None:
    """Of two micro-batches the first is stored, into what zero_grad made the allocator give anew; the second adds."""
    model = blocks(4)
    schedule = policies.build("megatrain_released", model, workload(accumulation=2), ROOM)
    added = [op for op in schedule.ops if op.phase == Phase.ACCUMULATE]
    layers = len(model.layers)
    assert len(added) == 2 * layers
    for op in added:
        grad_bytes = schedule.buffer[op.writes[0].buffer].nbytes
        assert op.fresh == (0 if op.reads_from(op.writes[0].buffer) else grad_bytes)
    assert sum(op.fresh > 0 for op in added) == layers
    assert codec.loads(codec.dumps(schedule)) == schedule


def test_megatrain_released_waits_for_a_slab_only_when_they_run_out() -> None:
    def waits(slabs: int) -> int:
        schedule = policies.build("megatrain_released", blocks(8), workload(accumulation=1), ROOM, slabs=slabs)
        return sum(op.name.startswith("H.slab") for op in schedule.ops)

    assert waits(8) == 0
    assert waits(6) == 2


def test_zero3_moves_each_gradient_three_times_and_weights_twice() -> None:
    schedule = policies.build("zero3_offload", blocks(8), workload(accumulation=1), ROOM, max_live=1)
    weights = moved(schedule, Tier.HOST, Tier.DEVICE, "w")
    assert [weights[f"w.{i}"] for i in range(8)] == [2] * 6 + [1] * 2  # two slots, found full at the turn
    for i in range(8):
        assert moved(schedule, Tier.DEVICE, Tier.HOST, "g")[f"g.{i}"] == 1
        assert moved(schedule, Tier.HOST, Tier.DEVICE, "g")[f"g.{i}"] == 1
        assert moved(schedule, Tier.DEVICE, Tier.HOST, "g32")[f"g32.{i}"] == 1


def test_zero3_holds_twenty_bytes_per_parameter_on_the_host() -> None:
    schedule = policies.build("zero3_offload", TINY, workload(), ROOM)
    assert schedule.workload.precision == "bf16_fp32"
    assert home_bytes_per_param(schedule, Tier.HOST) == 20


def test_zero3_updates_on_the_issuing_host_after_the_whole_backward() -> None:
    schedule = policies.build("zero3_offload", TINY, workload(clip=1.0), ROOM)
    for op in schedule.ops:
        if op.phase in (Phase.SCALE, Phase.ADAM) or op.name.startswith("C.w"):
            assert op.stream == Stream.HOST and place(schedule, op.name) > place(schedule, "H.epilogue#2")
    assert {op.stream for op in schedule.ops if op.phase == Phase.NORM} == {Stream.D2H}


def test_zero3_without_overlap_queues_every_copy_on_the_compute_stream() -> None:
    schedule = policies.build("zero3_offload", TINY, workload(), ROOM, overlap_comm=False)
    assert set(schedule.streams) == {Stream.COMPUTE, Stream.HOST}
    verify(schedule)


def test_zero3_without_checkpointing_recomputes_nothing() -> None:
    schedule = policies.build("zero3_offload", TINY, workload(), ROOM, activations="keep")
    assert phases(schedule)[Phase.RECOMPUTE] == 0
    verify(schedule)


# ---- the registry


def test_every_policy_has_a_summary_and_explains_its_knobs() -> None:
    assert set(SMALL) <= set(policies.names())
    for name in policies.names():
        assert policies.summary(name).endswith(".")
        for knob in policies.knobs(name):
            assert re.search(rf"\n  {knob} = .+\n      \w", policies.explain(name)), "what it is, and what it does"


def test_what_is_changed_of_a_policy_file_of_ones_own_is_all_its_knobs() -> None:
    schedule = policies.build(EXAMPLE, TINY, workload(), ROOM, slots=2)
    assert policies.changed(schedule) == ["slots=2"]
    assert policies.changed(policies.build("streamed", TINY, workload(), ROOM, slots=3)) == ["slots=3"]


def test_a_policy_file_of_ones_own_is_built_from_its_path() -> None:
    schedule = policies.build(EXAMPLE, TINY, workload(), ROOM, slots=3)
    verify(schedule)
    assert schedule.policy == "my_policy"
    assert schedule.knobs == {"slots": 3}
    assert policies.knobs(str(EXAMPLE))["slots"].annotation is int


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_example_is_safe_but_does_not_clip(accumulation: int, tied: bool) -> None:
    model = blocks(5, tied=tied)
    verify(policies.build(EXAMPLE, model, workload(accumulation=accumulation), ROOM))
    clipped = policies.build(EXAMPLE, model, workload(accumulation=accumulation, clip=1.0), ROOM)
    with pytest.raises(ScheduleError, match=r"1 problem in my_policy[\s\S]*no op computes that norm"):
        verify(clipped)


def test_knobs_are_parsed_by_their_types() -> None:
    parsed = policies.parse_knobs("streamed", ["slots=3", "keep=none", "order=microbatches"])
    assert parsed == {"slots": 3, "keep": None, "order": "microbatches"}
    assert policies.parse_knobs("zero3_offload", ["overlap-comm=False"]) == {"overlap_comm": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["slot=3"], "streamed has no knob 'slot'; nearest: slots, grad_slots, nvme_slots"),
        (["slots"], "'slots' is not of the form knob=value"),
        (["slots=two"], "knob slots must be a whole number, not 'two'"),
        (["slots=2.5"], "knob slots must be a whole number, not '2.5'"),
        (["slots=none"], "knob slots must be a whole number, not 'none'"),
        (["keep=-1"], "knob keep must be at least 0, not -1"),
        (["order=layer"], "knob order must be 'layers' or 'microbatches', not 'layer'"),
        (["slots=2", "slots=3"], "knob slots is set twice"),
    ],
)
def test_a_bad_setting_says_what_is_wrong(settings: list[str], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        policies.parse_knobs("streamed", settings)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("streamd", "no policy is called 'streamd'; nearest: streamed, lora_streamed, or give the path of a .py file"),
        ("lora", "no policy is called 'lora'; nearest: lora_streamed, lohan, or give the path of a .py file"),
        ("zero3", "no policy is called 'zero3'; nearest: zero3_offload, or give the path of a .py file"),
        ("FSDP", "no policy is called 'FSDP'; nearest: fsdp_offload, or give the path of a .py file"),
        ("nowhere/mine.py", "there is no file nowhere/mine.py"),
        (str(Path(__file__).parent), f"{Path(__file__).parent} is a folder"),
        ("", f"no policy is called ''; there are: {', '.join(policies.names())}, or give the path of a .py file"),
    ],
)
def test_an_unknown_policy_says_what_there_is(name: str, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        policies.load(name)
    assert str(raised.value) == message


BLOCKS = TINY.num_hidden_layers


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"slots": True}, "knob slots must be a whole number, not True"),
        ({"slots": 2.0}, "knob slots must be a whole number, not 2.0"),
        ({"slot": 2}, "streamed has no knob 'slot'; nearest: slots, grad_slots, nvme_slots"),
        ({"slots": 0}, "streamed: slots=0: weight: the length of a ring must be a whole number of at least 1, not 0"),
        ({"every": 0}, "streamed: every: blocks that share an input, at least 1, not 0"),
        *(
            ({name: BLOCKS + 1}, f"streamed: {name}={BLOCKS + 1}: there are {BLOCKS} blocks")
            for name in (
                "keep",
                "offload",
                "inputs",
                "defer",
                "hold",
                "through",
                "singly",
                "nvme_weights",
                "nvme_inputs",
            )
        ),
        ({"resident": BLOCKS + 3}, f"streamed: resident={BLOCKS + 3}: there are {BLOCKS + 2} layers"),
        ({"nvme": BLOCKS + 1}, f"streamed: nvme={BLOCKS + 1}: there are {BLOCKS} parts of blocks' states"),
        ({"stay": 2 * BLOCKS + 1, "parts": 2}, f"there are {2 * BLOCKS} parts of blocks' states"),
    ],
)
def test_a_bad_knob_is_refused_when_building(knobs: dict[str, Knob], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        policies.build("streamed", TINY, workload(), ROOM, **knobs)
    assert str(raised.value).endswith(message)


def test_adapters_have_a_rank() -> None:
    with pytest.raises(PolicyError, match="lora_streamed: rank: of the adapters, at least 1, not 0"):
        policies.build("lora_streamed", TINY, workload(), ROOM, rank=0)
    for name in ("lora_streamed", "flexgen_block"):
        with pytest.raises(PolicyError, match=f"{name}: whole=matrices is of quantised weights.* add quantised=nf4"):
            policies.build(name, TINY, workload(), ROOM, whole="matrices")


@pytest.mark.parametrize(
    ("name", "knob", "most"),
    [
        ("resident", "keep", BLOCKS),
        ("paged_optimizer", "keep", BLOCKS),
        ("lora_streamed", "keep", BLOCKS),
        ("lora_streamed", "resident", BLOCKS + 2),
        ("lohan", "swap", BLOCKS),
        ("lohan", "spill", BLOCKS),
        ("flexgen_block", "nvme", BLOCKS),
        ("flexgen_block", "resident", BLOCKS + 2),
    ],
)
def test_no_knob_counts_more_than_there_are(name: str, knob: str, most: int) -> None:
    assert policies.build(name, TINY, workload(), ROOM, **{knob: most})
    with pytest.raises(PolicyError, match=f"{knob}={most + 1}: there are {most} (blocks|layers)"):
        policies.build(name, TINY, workload(), ROOM, **{knob: most + 1})


def test_what_a_system_has_not_is_said_to_be_ours() -> None:
    _, meaning = policies.knob_help("zero3_offload")["activations"]
    assert meaning.endswith("What sends activations away is ours, for comparison, unless it is the default.")


def test_blocks_that_are_swapped_are_not_spilled() -> None:
    assert policies.build("lohan", TINY, workload(), ROOM, swap=3, spill=1)
    with pytest.raises(PolicyError, match="spill=2: there are 1 blocks that are not swapped"):
        policies.build("lohan", TINY, workload(), ROOM, swap=3, spill=2)


HEAD = "from schedules.program import Program\n\n\ndef policy(model, workload, memory, *, slots: int = 2):\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "    return 1 / 0\n", "{path}:5: ZeroDivisionError: division by zero"),
        (HEAD + "    raise RuntimeError\n", "{path}:5: RuntimeError"),
        (HEAD + "    raise SystemExit(3)\n", "{path}:5: SystemExit: 3"),
        (HEAD + "    return None\n", "{path}: TypeError: policy() returned NoneType, not a Program"),
        (
            HEAD + "    p = Program(model, workload)\n    p.forward(0)\n    return p\n",
            "{path}:6: ProgramError: the output of layer embed, micro-batch 0, is not made yet: "
            "call forward(embed, 0) first",
        ),
        (
            HEAD + "    p = Program(model, workload)\n    p.forward(-1)\n    return p\n",
            "{path}: ProgramError: never freed: the output of layer embed, micro-batch 0, made by F.embed.0: "
            "backward(0, 0) is missing",
        ),
        ("import nothing_of_the_kind\n", "{path}:1: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("def policy(:\n", "{path}:1: SyntaxError: invalid syntax"),
        ("slots = 2\n", "{path} defines no function policy(model, workload, memory, *, knobs...)"),
        (
            "def policy(model, slots=2):\n    pass\n",
            "{path}: policy() takes 2 positional parameters; it must take model, workload, memory, and its "
            "knobs after a *",
        ),
        (
            "def policy(model, workload, memory, *, sizes: list[int] = ()):\n    pass\n",
            "mine: knob sizes is annotated list[int]; a knob is of bool, int, float, str, None, or a Literal "
            "of strings",
        ),
        ("def policy(model, workload, memory, *, n):\n    pass\n", "mine: knob n has no default; give it a value"),
    ],
)
def test_a_fault_in_a_policy_file_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(PolicyError) as raised:
        policies.build(path, TINY, workload(), ROOM)
    assert str(raised.value).startswith(message.format(path=path))


def test_a_file_may_have_spaces_in_its_path_and_knobs_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "my dir" / "my policy.py"
    path.parent.mkdir()
    path.write_text("def policy(model, workload, memory, *, slots: int = 2, keep: int | None = None): ...\n")
    assert policies.with_knobs(str(path)) == (str(path), {})
    assert policies.with_knobs(f"{path} slots=3  keep=none") == (str(path), {"slots": 3, "keep": None})
    with pytest.raises(PolicyError, match="my policy has no knob"):
        policies.with_knobs(f"{path} slot=3")
    with pytest.raises(PolicyError, match="there is no file"):
        policies.with_knobs(str(path.with_name("other one.py")))


def test_a_file_that_is_called_as_a_policy_of_ours_is_refused(tmp_path: Path) -> None:
    """Tables, pictures and files would have two of one name."""
    source = Path(policies.__file__).with_name("streamed.py")
    copied = tmp_path / "streamed.py"
    copied.write_bytes(source.read_bytes())
    with pytest.raises(PolicyError, match=r"streamed\.py is called as a policy of ours is, .*: rename it"):
        policies.load(copied)
    assert policies.knobs(source).keys() == policies.knobs("streamed").keys()
    copied.rename(tmp_path / "mine.py")
    policies.load(tmp_path / "mine.py")
    (tmp_path / "streamed.json").touch()
    with pytest.raises(PolicyError, match=r"streamed\.json is not a Python file"):
        policies.load(tmp_path / "streamed.json")


def test_two_files_that_are_called_alike_are_not_compared(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "mine.py" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("def policy(model, workload, memory, *, slots: int = 2): ...\n")
    policies.require_apart([f"{paths[0]} slots=3", str(paths[0]), str(tmp_path / "two" / ".." / "one" / "mine.py")])
    with pytest.raises(ValueError, match=r"one/mine\.py and .*two/mine\.py are called alike"):
        policies.require_apart(["streamed", f"{paths[0]} slots=3", str(paths[1])])


DIGESTS = """
from schedules import policies, presets
from schedules.workload import MemoryBudget, Workload

room = MemoryBudget(device_bytes=10**9, host_bytes=10**10, nvme_bytes=10**10)
step = Workload(micro_batch_size=2, seq_len=16)
for name in policies.names():
    print(name, policies.build(name, presets.load("tiny"), step, room).digest)
"""


def test_python_that_leaves_assertions_out_builds_the_same() -> None:
    """What `python -O` does, or PYTHONOPTIMIZE in a container's environment."""
    root = Path(__file__).parents[1]
    with_them, without = (
        subprocess.run([sys.executable, *how, "-c", DIGESTS], cwd=root, check=True, capture_output=True, text=True)
        for how in ([], ["-O"])
    )
    assert without.stdout == with_them.stdout and len(with_them.stdout.splitlines()) == len(policies.names())


def test_what_a_planner_drops_is_gone_and_not_garbage() -> None:
    """It builds hundreds of steps: to look for their ops in circles of references took a tenth of its time."""
    step = Workload(micro_batch_size=2, seq_len=16, accumulation=2)
    policies.build_without_waits("streamed", TINY, step, ROOM)  # what is made once and kept
    gc.collect()
    built = policies.build_without_waits("streamed", TINY, step, ROOM)
    assert gc.collect() < len(built.ops)
    assert not built.waits  # which take as long as all else


if __name__ == "__main__":
    for way in WAYS:
        codec.save(small(way), GOLDEN / f"{way}.json")
        print(GOLDEN / f"{way}.json")

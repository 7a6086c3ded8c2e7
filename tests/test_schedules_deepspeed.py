"""What the policies of the DeepSpeed family move, hold and wait for: each as its own code does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules_policies import (
    ROOM,
    TINY,
    blocks,
    device_peak,
    home_bytes_per_param,
    moved,
    phases,
    place,
    workload,
)

from schedules import policies
from schedules.deepspeed import sub_groups
from schedules.model import ModelSpec
from schedules.op import Op, Phase, Stream, Tier
from schedules.policies import PolicyError
from schedules.presets import load
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget

HOST, DEVICE, NVME = Tier.HOST, Tier.DEVICE, Tier.NVME
ALL = set(TINY.layers)


def build(name: str, *, layers: int = 4, accumulation: int = 1, clip: float | None = None, **knobs: Knob) -> Schedule:
    return policies.build(name, blocks(layers), workload(accumulation=accumulation, clip=clip), ROOM, **knobs)


def copies(schedule: Schedule, letter: str) -> list[Op]:
    """The copies of a class of tensors, in program order."""
    return [op for op in schedule.ops if op.phase == Phase.COPY and op.reads[0].tensor.startswith(f"{letter}.")]


def layers_on(schedule: Schedule, phase: Phase, stream: Stream) -> set[int | None]:
    return {op.layer for op in schedule.ops if op.phase == phase and op.stream == stream}


def tail(schedule: Schedule, after: str) -> list[str]:
    """The names of the ops after one."""
    return [op.name for op in schedule.ops[place(schedule, after) + 1 :]]


def drive_bytes_per_param(schedule: Schedule) -> float:
    return schedule.allocated_bytes(NVME) / schedule.model.total_params


def once(schedule: Schedule, source: Tier, target: Tier, letter: str) -> set[int]:
    """How often the tensors of a class are copied between two tiers; every layer's is."""
    counts = moved(schedule, source, target, letter)
    assert not counts or len(counts) == len(schedule.model.layers)
    return set(counts.values())


# ---- precisions

FAMILY = ("zero3_offload", "zero_offload", "zero_offload_pp", "superoffload", "zero_infinity")


@pytest.mark.parametrize("precision", ["bf16", "bf16_split", "bf16_16bit", "bf16_8bit"])
@pytest.mark.parametrize("name", [*FAMILY, "zenflow", "gemini"])
def test_an_fp32_master_comes_with_fp32_moments(name: str, precision: str) -> None:
    """DeepSpeed's configuration takes smaller moments only without such a master, Gemini's optimizer none."""
    found, whole = (policies.build(name, TINY, workload(precision=p), ROOM) for p in (precision, "bf16_fp32"))
    assert found.workload == whole.workload and found.digest == whole.digest


@pytest.mark.parametrize(("name", "host"), [("zero3_offload", 12), ("zero_offload", 10)])
def test_moments_of_16_bits_come_with_weights_for_a_master(name: str, host: int) -> None:
    step = workload(precision="bf16_16bit")
    own = policies.build(name, TINY, step, ROOM, master="weights")
    assert own.workload == step and own.allocated_bytes(HOST) == host * TINY.total_params
    assert not [op for op in own.ops if any(access.tensor.startswith("g32.") for access in op.accesses)]


@pytest.mark.parametrize(
    ("name", "knobs", "tier", "held"),
    [  # bytes per parameter: weights, sum of gradients, fp32 gradients, master, moments
        ("zero3_offload", {}, HOST, 4 + 4 + 4 + 4 + 8),
        ("zero_offload", {}, HOST, 4 + 4 + 4 + 8),  # one micro-batch has no sum
        ("zero_infinity", {}, NVME, 4 + 4 + 8),
        ("zero_offload_pp", {"ratio": 1.0}, HOST, 4 + 4 + 4 + 4 + 8),
        ("superoffload", {"ratio": 1.0}, HOST, 4 + 4 + 4 + 4 + 8),
        ("zero_offload_pp", {"ratio": 0.0}, HOST, 4),
        ("superoffload", {"ratio": 0.0}, HOST, 4),
    ],
)
def test_fp32_weights_have_a_master_beside_them(name: str, knobs: dict[str, Knob], tier: Tier, held: int) -> None:
    schedule = policies.build(name, TINY, workload(accumulation=1, precision="fp32"), ROOM, **knobs)
    copies = sum(b.nbytes for b in schedule.buffers if b.name.startswith("worker"))  # superoffload's
    assert schedule.allocated_bytes(tier) - copies == held * TINY.total_params
    on_gpu = knobs.get("ratio") == 0.0
    masters = {(b.tier, b.nbytes) for b in schedule.buffers if b.name.startswith("master")}
    assert masters == {(DEVICE if on_gpu else tier, 4 * TINY.total_params)}


@pytest.mark.parametrize("precision", ["bf16_split", "bf16_fp32", "bf16_8bit", "fp32"])
@pytest.mark.parametrize("name", ["zero3_offload", "zero_offload"])
def test_weights_are_a_master_of_bf16_alone(name: str, precision: str) -> None:
    with pytest.raises(PolicyError, match=f"precisions bf16 and bf16_16bit, not {precision}$"):
        policies.build(name, TINY, workload(precision=precision), ROOM, master="weights")


# ---- sub-groups


@given(layers=st.integers(1, 9), size=st.integers(0, 60_000))
def test_a_sub_group_closes_when_it_has_enough_parameters(layers: int, size: int) -> None:
    model = blocks(layers)
    groups = sub_groups(model, size)
    assert [i for group in groups for i in group] == list(model.layers)
    for group in groups:
        counts = [model.params(i) for i in group]
        assert sum(counts) >= size or group is groups[-1]
        assert sum(counts[:-1]) < size or len(group) == 1


@pytest.mark.parametrize("name", ["zero_offload_pp", "superoffload"])
def test_the_cpus_part_is_between_zero_and_one(name: str) -> None:
    with pytest.raises(PolicyError, match="from 0 to 1"):
        build(name, ratio=1.5)


# ---- zero3_offload


def test_zero3_asks_for_as_many_layers_ahead_as_told() -> None:
    for ahead in (0, 1, 3):
        schedule = build("zero3_offload", layers=8, prefetch=ahead, max_live=1)
        for i in range(1, 4):
            before = [op.layer for op in schedule.ops[: place(schedule, f"F.{i}.0")] if op.name.startswith("P.w")]
            assert max(layer for layer in before if layer is not None) == i + ahead
        assert sum(b.name.startswith("weight") for b in schedule.buffers) == 1 + ahead


def test_zero3_waits_for_everything_that_is_being_fetched() -> None:
    schedule = build("zero3_offload", layers=8, prefetch=2)
    waited = next(op for op in schedule.ops if op.name == "H.3")
    assert {a.tensor for a in waited.reads} == {"w.3", "w.4"}


def test_zero3_before_0_19_5_waits_for_each_fp32_gradient() -> None:
    old, new = (build("zero3_offload", version=version) for version in ("0.19.4", "0.19.5"))
    assert {op.blocking for op in copies(old, "g32")} == {True}
    assert not any(op.blocking for op in [*new.ops, *copies(old, "g"), *copies(old, "w")])


def test_zero3_with_weights_for_a_master_widens_nothing() -> None:
    usual, own = (build("zero3_offload", accumulation=2, master=master) for master in ("fp32", "weights"))
    assert (usual.workload.precision, own.workload.precision) == ("bf16_fp32", "bf16")
    params = TINY.total_params
    assert usual.allocated_bytes(HOST) == 20 * params
    assert own.allocated_bytes(HOST) == 16 * params  # weights, their master, gradient sum and gradients in bf16
    assert once(own, DEVICE, HOST, "g") == {3}  # of each micro-batch the sum, and last of all the whole once more
    assert not [op for op in own.ops if any(access.tensor.startswith("g32.") for access in op.accesses)]
    assert phases(own)[Phase.CAST] == len(TINY.layers)  # the master to the weights, as always


def test_zero3_without_pinned_memory_waits_for_every_copy() -> None:
    schedule = build("zero3_offload", pin_memory=False, accumulation=2)
    assert all(op.blocking for op in schedule.ops if op.phase == Phase.COPY)


def test_zero3_takes_each_pass_over_a_whole_sub_group() -> None:
    names = tail(build("zero3_offload", sub_group_size=10**9), "H.epilogue")
    assert [name[0] for name in names] == ["S"] * 6 + ["U"] * 6 + ["C"] * 6


# ---- zero_offload


def test_zero_offload_moves_four_bytes_down_and_two_up() -> None:
    schedule = build("zero_offload")
    assert once(schedule, DEVICE, HOST, "g32") == once(schedule, HOST, DEVICE, "w") == {1}
    assert not copies(schedule, "g")
    assert home_bytes_per_param(schedule, HOST) == 18
    assert home_bytes_per_param(schedule, DEVICE) == 2
    assert home_bytes_per_param(build("zero_offload", accumulation=2), HOST) == 20


def test_zero_offload_takes_the_sum_down_with_every_micro_batch() -> None:
    schedule = build("zero_offload", accumulation=3)
    assert once(schedule, DEVICE, HOST, "g") == {3}
    assert once(schedule, HOST, DEVICE, "g") == {2}
    assert once(schedule, DEVICE, HOST, "g32") == {1}
    assert layers_on(schedule, Phase.ACCUMULATE, Stream.COMPUTE) == ALL


def test_zero_offload_with_weights_for_a_master_adds_up_where_the_optimizer_takes_the_sum() -> None:
    usual, own = (build("zero_offload", accumulation=2, master=master) for master in ("fp32", "weights"))
    assert (usual.workload.precision, own.workload.precision) == ("bf16_fp32", "bf16")
    params = TINY.total_params
    assert usual.allocated_bytes(HOST) == 20 * params
    assert own.allocated_bytes(HOST) == 14 * params  # weights, their master, gradients in bf16 and moments
    assert once(own, DEVICE, HOST, "g") == {3} and once(own, HOST, DEVICE, "g") == {1}
    assert not [op for op in own.ops if any(access.tensor.startswith("g32.") for access in op.accesses)]
    assert tail(own, "H.backward")[:2] == ["S.g.embed", "S.g.0"]


def test_zero_offload_ends_with_three_passes_over_the_model_and_then_the_upload() -> None:
    schedule = build("zero_offload", clip=1.0)
    names = tail(schedule, "H.backward")
    assert [name[0] for name in names] == ["S"] * 6 + ["U"] * 6 + ["C"] * 6 + ["P"] * 6
    assert layers_on(schedule, Phase.ADAM, Stream.HOST) == ALL
    assert {op.stream for op in copies(schedule, "w")} == {Stream.COMPUTE}
    assert layers_on(schedule, Phase.NORM, Stream.COMPUTE) == {None}


@pytest.mark.parametrize("overlap_comm", [False, True])
def test_zero_offload_lets_gradients_leave_when_the_bucket_is_full(overlap_comm: bool) -> None:
    knobs: dict[str, Knob] = {"reduce_bucket_size": 2 * TINY.params(0), "overlap_comm": overlap_comm}
    schedule = build("zero_offload", layers=5, **knobs)
    # the head's and block 4's; when block 2's comes, those of 4 and 3 are full
    assert place(schedule, "B.3.0") < place(schedule, "O.g32.head") < place(schedule, "O.g32.4")
    assert place(schedule, "O.g32.4") < place(schedule, "B.2.0")
    assert place(schedule, "B.1.0") < place(schedule, "O.g32.3") < place(schedule, "B.0.0")
    assert {op.stream for op in copies(schedule, "g32")} == {Stream.D2H if overlap_comm else Stream.COMPUTE}
    assert sum(b.name.startswith("bucket") for b in schedule.buffers) == (5 if overlap_comm else 3)


def test_zero_offload_waits_for_the_check_of_each_gradient() -> None:
    schedule = build("zero_offload")
    for i in map(TINY.layer_name, TINY.layers):
        assert place(schedule, f"C.g32.{i}") == place(schedule, f"H.{i}") + 1


# ---- zero_offload_pp


def test_twin_flow_steps_the_first_sub_groups_on_the_gpu_before_the_cpu_starts() -> None:
    schedule = build("zero_offload_pp", ratio=0.5, sub_group_size=1)
    assert layers_on(schedule, Phase.ADAM, Stream.COMPUTE) == {-1, 0, 1}
    assert layers_on(schedule, Phase.ADAM, Stream.HOST) == {2, 3, 4}
    assert tail(schedule, "H.epilogue") == [
        f"{op}.{layer}" if op == "U" else f"{op}{layer}"
        for layer in ("embed", "0", "1", "2", "3", "head")
        for op in (("S.g32.", "U", "C.w.") if layer in ("embed", "0", "1") else ("S.g32.", "U", "C.w.", "P.w."))
    ]
    assert {op.blocking for op in copies(schedule, "w")} == {True}
    # the GPU's sub-groups come first, so that the host's first pass does not wait for any of their steps
    assert not any(w.on.startswith("U") for w in schedule.waits_of["S.g32.2"])


def test_twin_flow_takes_down_in_fp32_only_what_the_cpu_steps() -> None:
    schedule = build("zero_offload_pp", ratio=0.5, sub_group_size=1)
    assert {op.layer for op in copies(schedule, "g32")} == {2, 3, 4}
    assert once(schedule, DEVICE, HOST, "g") == once(schedule, HOST, DEVICE, "g") == {1}


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_twin_flow_at_its_ends_holds_all_states_on_one_side(ratio: float) -> None:
    schedule = build("zero_offload_pp", ratio=ratio)
    assert home_bytes_per_param(schedule, HOST) == (20 if ratio else 2)
    assert home_bytes_per_param(schedule, DEVICE) == (2 if ratio else 18)


def test_twin_flow_fills_the_device_if_not_told_how_far() -> None:
    model, step = blocks(6), workload()
    for split in range(1, 9):
        schedule = policies.build("zero_offload_pp", model, step, ROOM, ratio=1 - split / 8, sub_group_size=1)
        for device_bytes, expected in ((device_peak(schedule), split), (device_peak(schedule) - 1, split - 1)):
            memory = MemoryBudget(device_bytes=device_bytes, host_bytes=10**10)
            found = policies.build("zero_offload_pp", model, step, memory, sub_group_size=1)
            assert len(layers_on(found, Phase.ADAM, Stream.COMPUTE)) == expected


# ---- superoffload


def test_superoffload_steps_on_the_cpu_beside_the_backward_and_joins_at_its_end() -> None:
    schedule = build("superoffload", ratio=0.75, sub_group_size=1, layers=6)
    gpu, cpu = {-1, 0}, set(range(1, 7))
    assert layers_on(schedule, Phase.ADAM, Stream.COMPUTE) == gpu
    assert layers_on(schedule, Phase.ADAM, Stream.CPU) == cpu
    for upper, lower in pairwise(["head", *"54321"]):
        # handed over when the next gradient pushes it out of the bucket
        assert place(schedule, f"B.{lower}.0") < place(schedule, f"U.{upper}") < place(schedule, f"O.g32.{lower}")
    joined = schedule.ops[place(schedule, "H.join")]
    assert {a.tensor for a in joined.reads} == {f"w.{schedule.model.layer_name(i)}" for i in cpu}
    after = tail(schedule, "H.join")
    assert after[:6] == ["S.g32.embed", "U.embed", "C.w.embed", "S.g32.0", "U.0", "C.w.0"]
    assert after[6:9] == ["S.g32.1", "C.w.1", "P.w.1"]


def test_superoffload_waits_for_each_sub_group_that_is_complete() -> None:
    schedule = build("superoffload", ratio=1.0, sub_group_size=2 * TINY.params(0))
    groups = sub_groups(TINY, 2 * TINY.params(0))
    waits = [op for op in schedule.ops if op.name.startswith("H.sub_group")]
    assert len(waits) == len(groups) == 3
    copied = [op for op in schedule.ops if op.name.startswith("C.g32") and op.stream == Stream.CPU]
    assert {op.layer for op in copied} == ALL  # the worker's own copy, 8 bytes of traffic per parameter
    assert sum(op.nbytes for op in copied) == 8 * TINY.total_params


def test_superoffloads_worker_has_a_buffer_for_each_place_in_a_sub_group() -> None:
    model, size = replace(TINY, vocab_size=4096), 2 * TINY.params(0)
    assert sub_groups(model, size) == [[-1], [0, 1], [2, 3], [4]]  # embedding and head are the largest layers
    schedule = policies.build("superoffload", model, workload(), ROOM, ratio=1.0, sub_group_size=size)
    sizes = {b.name: b.nbytes for b in schedule.buffers if b.name.startswith("worker")}
    assert sizes == {"worker0": 4 * model.params(model.head), "worker1": 4 * model.params(0)}


def test_superoffload_with_clipping_overlaps_nothing() -> None:
    schedule = build("superoffload", ratio=0.5, sub_group_size=1, clip=1.0)
    backward = place(schedule, "H.epilogue")
    assert all(place(schedule, op.name) > backward for op in schedule.ops if op.phase == Phase.ADAM)
    names = tail(schedule, "H.epilogue")
    first = names.index("S.g32.2")
    assert names[first : first + 6] == ["S.g32.2", "C.g32.2#2", "U.2", "H.worker", "C.w.2", "P.w.2"]
    assert "H.join" not in names


def test_superoffload_hands_over_nothing_before_the_last_micro_batch() -> None:
    schedule = build("superoffload", ratio=1.0, sub_group_size=1, accumulation=2)
    assert min(place(schedule, op.name) for op in schedule.ops if op.stream == Stream.CPU) > place(schedule, "L.head.1")


# ---- zero_infinity


@pytest.mark.parametrize("params_on_nvme", [False, True])
def test_zero_infinity_keeps_states_on_the_drive(params_on_nvme: bool) -> None:
    schedule = build("zero_infinity", params_on_nvme=params_on_nvme)
    assert drive_bytes_per_param(schedule) == (18 if params_on_nvme else 16)
    assert home_bytes_per_param(schedule, HOST) == (2 if params_on_nvme else 4)


def test_zero_infinity_reads_and_writes_sixteen_bytes_per_parameter() -> None:
    schedule = build("zero_infinity", layers=8, accumulation=2)
    for letter in ("o", "g32"):
        assert once(schedule, NVME, HOST, letter) == once(schedule, HOST, NVME, letter) == {1}
    assert not moved(schedule, NVME, HOST, "w")
    read, written = (
        sum(op.nbytes for op in schedule.ops if op.stream == stream) for stream in (Stream.NVME_READ, Stream.NVME_WRITE)
    )
    assert read == written == 16 * schedule.model.total_params


def test_zero_infinity_with_weights_on_the_drive_reads_them_for_each_use() -> None:
    schedule = build("zero_infinity", layers=8, params_on_nvme=True, max_live=1)
    # forward, backward and Adam; two are still on the device at the turn
    loads = moved(schedule, NVME, HOST, "w")
    assert [loads[f"w.{i}"] for i in range(8)] == [3] * 6 + [2] * 2
    assert once(schedule, HOST, NVME, "w") == {1}
    # the layer that is fetched while block 1 runs is block 2; the drive is two further
    assert place(schedule, "P.w.4") < place(schedule, "F.1.0") < place(schedule, "P.w.5")


@pytest.mark.parametrize(
    ("model", "slots"),
    [
        (load("qwen2.5-1.5b"), 10),  # of 46.8 million parameters a block
        (load("llama-3.1-70b"), 3),  # of 856 million
        (blocks(5), 5),
        (blocks(2), 3),
    ],
)
def test_zero_infinitys_pool_holds_half_a_billion_parameters_or_three_layers(model: ModelSpec, slots: int) -> None:
    schedule = policies.build_without_waits("zero_infinity", model, workload(), ROOM, params_on_nvme=True)
    assert [b.name for b in schedule.buffers if b.name.startswith("pool") and b.name[4:].isdigit()] == [
        f"pool{n}" for n in range(slots)
    ]


def test_zero_infinity_waits_for_gradients_to_land_but_not_for_their_writes() -> None:
    schedule = build("zero_infinity")
    down = [op for op in copies(schedule, "g32") if op.stream == Stream.D2H]
    writes = [op for op in copies(schedule, "g32") if op.stream == Stream.NVME_WRITE]
    assert len(down) == len(writes) == 6
    assert all(op.blocking for op in down) and not any(op.blocking for op in writes)
    assert place(schedule, "H.epilogue") < place(schedule, "H.flush") < place(schedule, "P.o.embed")


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_zero_infinity_overlaps_the_drive_with_the_step_only_on_request(read: bool, write: bool) -> None:
    schedule = build("zero_infinity", sub_group_size=1, pipeline_read=read, pipeline_write=write)
    layers = ["embed", "0", "1", "2", "3", "head"]
    for number, (before, after) in enumerate(pairwise(layers), start=1):
        waited = "H.write" if number == 1 else f"H.write#{number}"
        assert (place(schedule, f"P.o.{after}") < place(schedule, f"U.{before}")) == read
        assert place(schedule, f"U.{before}") < place(schedule, f"O.o.{before}") < place(schedule, f"O.o.{after}")
        assert (place(schedule, waited) > place(schedule, f"U.{after}")) == write
    count = Counter(b.name.rstrip("0123456789") for b in schedule.buffers)
    assert count["swap.state"] == 1 + read + write
    assert schedule.ops[-1].name.startswith("H.write")


# ---- zenflow


@pytest.mark.parametrize("clip", [None, 1.0])
def test_zenflow_scales_on_the_host_what_its_optimizer_takes_over_whether_it_clips_or_not(clip: float | None) -> None:
    schedule = build("zenflow", topk_ratio=0.5, clip=clip)
    stepped = layers_on(schedule, Phase.ADAM, Stream.CPU)
    assert len(stepped) == 4 and layers_on(schedule, Phase.SCALE, Stream.HOST) == stepped
    scaled = [op for op in schedule.ops if op.phase == Phase.SCALE]
    # fp32 gradients, read and written; with clipping the norm as well, 8 bytes
    assert [op.nbytes for op in scaled] == [8 * TINY.params(op.layer or 0) + (8 if clip else 0) for op in scaled]
    for op in scaled:  # once its new weights have gone up
        layer = TINY.layer_name(op.layer or 0)
        assert place(schedule, f"P.w.{layer}") < place(schedule, op.name) < place(schedule, f"U.{layer}")


# ---- any knobs


@given(
    layers=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    tied=st.booleans(),
    clip=st.sampled_from([None, 1.0]),
    flags=st.fixed_dictionaries({"overlap_comm": st.booleans(), "activations": st.sampled_from(["recompute", "keep"])}),
    family=st.sampled_from(FAMILY),
    data=st.data(),
)
@settings(max_examples=150)
def test_the_family_is_safe_with_any_knobs(
    layers: int,
    accumulation: int,
    tied: bool,
    clip: float | None,
    flags: dict[str, Knob],
    family: str,
    data: st.DataObject,
) -> None:
    size, part, master = st.integers(0, 60_000), st.floats(0, 1), st.sampled_from(["fp32", "weights"])
    own = {
        "zero3_offload": {
            "max_live": size,
            "prefetch": st.integers(0, 4),
            "sub_group_size": size,
            "pin_memory": st.booleans(),
            "version": st.sampled_from(["0.19.5", "0.19.4"]),
            "master": master,
            "reentrant": st.booleans(),
        },
        "zero_offload": {"reduce_bucket_size": size, "master": master, "reentrant": st.booleans()},
        "zero_offload_pp": {"ratio": st.none() | part, "sub_group_size": size, "reduce_bucket_size": size},
        "superoffload": {"ratio": part, "sub_group_size": size},
        "zero_infinity": {
            "params_on_nvme": st.booleans(),
            "pipeline_read": st.booleans(),
            "pipeline_write": st.booleans(),
            "sub_group_size": size,
            "max_live": size,
        },
    }[family]
    knobs = {**flags, **data.draw(st.fixed_dictionaries(own))}
    model, step = blocks(layers, tied=tied), workload(accumulation=accumulation, clip=clip)
    schedule = policies.build(family, model, step, ROOM, **knobs)
    verify(schedule)
    assert schedule.workload == (step if knobs.get("master") == "weights" else replace(step, precision="bf16_fp32"))
    assert phases(schedule)[Phase.SCALE] == phases(schedule)[Phase.ADAM] == len(model.layers)

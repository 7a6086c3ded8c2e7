"""Muon in the simulator: what its step costs, that the bound holds for it, and plans beside all placements."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from small_steps import machine, period_if_it_fits, shallow, state_bytes, step
from strategies import MODEL, round_profile
from timed_profile import timed

from schedules import policies, presets
from schedules.op import Phase, Stream, Tier
from schedules.optimizer import step_flops, step_workspace
from schedules.program import Program
from schedules.schedule import Knob
from schedules.sizes import tensor_bytes
from schedules.traffic import phases_of
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from schedules.workspace import workspace_bytes
from sim import hardware
from sim.candidate import Candidate
from sim.cost import GPU, MissingCost, Terms, demands
from sim.knob_space import knob_space
from sim.placement_bound import NoPlacement, placement_bound
from sim.plan import bound_of_these_micro_batches, plan
from sim.prediction import estimated_workspace, memory_of, predict
from sim.room import Room, orders, state_of_block, ways_to_part
from sim.signature import in_words, signature

MUON = Workload(micro_batch_size=2, seq_len=16, optimizer="muon")
MEMORY = MemoryBudget(device_bytes=10**9, host_bytes=10**9)


def test_a_step_takes_its_products_and_its_passes() -> None:
    """By hand: 2 TB/s of memory, and 1,000 TFLOP/s of bf16 whatever the weights are."""
    for precision in ("bf16", "fp32"):
        built = policies.build("resident", MODEL, replace(MUON, precision=precision), MEMORY)
        profile = round_profile("gpu.memory_efficiency=100%", "gpu.matmul_efficiency=50%")
        for op, cost in zip(built.ops, demands(built, profile, Terms(issue=False)), strict=True):
            if op.phase != Phase.ADAM:
                continue
            assert op.layer is not None
            assert op.flops == step_flops(MODEL, built.workload, op.layer)
            by_hand = op.nbytes / profile.gpu.memory_bandwidth.value
            by_hand += op.flops / (0.5 * profile.gpu.matmul_flops.value)
            assert cost.duration_ns == pytest.approx(by_hand * 1e9, abs=1) and cost.usage == {GPU: 1.0}


def test_what_a_step_allocates_is_of_the_devices_memory() -> None:
    model, workload = shallow(2), replace(MUON, micro_batch_size=1)
    of_step = step_workspace(model, workload, 0)
    assert estimated_workspace(policies.build("resident", model, workload, MEMORY)) == of_step > 3e8
    p = Program(model, workload)
    p.keep_on_device(*(t for i in model.layers for t in (p.weight(i), p.grad(i), p.state(i))))
    for i in model.layers[:-1]:
        p.forward(i, 0)
    p.loss(0)
    for i in reversed(model.layers[:-1]):
        p.backward(i, 0)
    before = p.device_bytes()
    for i in model.layers:
        p.update(i, stream=Stream.COMPUTE)
    of_others = max(workspace_bytes(model, i, phase, workload) for i in model.layers for phase in phases_of(model, i))
    states = sum(p.nbytes(p.state(i)) for i in model.layers)  # counted once they are used
    assert p.device_bytes() - before - states == of_step - of_others > 0


def test_a_measured_profile_needs_the_time_of_muons_own_step() -> None:
    of_adamw = policies.build("resident", MODEL, replace(MUON, optimizer="adamw"), MEMORY)
    profile = timed(MODEL, [of_adamw.workload], names=["resident"])
    assert predict(of_adamw, profile).period_ns > 0
    built = policies.build("resident", MODEL, MUON, MEMORY)
    with pytest.raises(MissingCost, match=r"no measured time for .*/block/muon/device/bf16") as missing:
        predict(built, profile)
    assert "--optimizer muon" in missing.value.what.command
    told = {
        signature(op, MODEL, MUON): in_words(signature(op, MODEL, MUON)) for op in built.ops if op.phase == Phase.ADAM
    }
    assert told == {
        f"{MODEL.name}/block/muon/device/bf16": "Muon's step on the device in bf16",
        f"{MODEL.name}/embed/adam/device/bf16": "an optimizer's step on the device in bf16",
        f"{MODEL.name}/head/adam/device/bf16": "an optimizer's step on the device in bf16",
    }
    assert predict(built, timed(MODEL, [MUON], names=["resident"])).period_ns > 0


def test_the_bound_has_the_cpu_update_no_block() -> None:
    """Though the link is so slow that it would be better there."""
    model = shallow(4)
    slow = hardware.override(machine("h200", device_gb=8, host_gb=100), ["links.h2d.bandwidth=1GB/s"])
    found = {name: placement_bound(model, step(1, optimizer=name), slow) for name in ("adamw", "muon")}
    ends = 1 - sum(model.params(i) for i in model.blocks) / model.total_params
    assert found["adamw"].placed["state on CPU"] > 0.3
    assert found["muon"].placed["state on CPU"] < 2 * ends  # whose state is twice a matrix's


def test_the_bound_knows_what_a_step_allocates() -> None:
    """With room for all that a schedule holds at once but for that, nothing can be placed."""
    model, workload = shallow(2), replace(MUON, micro_batch_size=1)
    of_step = step_workspace(model, workload, 0)
    least = 4 * model.params(model.embed) + of_step  # weights and gradient of the head, as large as the embedding
    placement_bound(model, workload, machine("h200", device_gb=(least + 3e9) / 1e9, host_gb=100))
    with pytest.raises(NoPlacement):
        placement_bound(model, workload, machine("h200", device_gb=least / 1e9 - 0.01, host_gb=100))
    without = machine("h200", device_gb=(least - of_step) / 1e9 + 1.1, host_gb=100)
    placement_bound(model, replace(workload, optimizer="adamw"), without)


@pytest.mark.parametrize("precision", ["bf16", "bf16_split"])
def test_the_search_knows_how_large_a_blocks_state_is(precision: str) -> None:
    model, workload = shallow(2), replace(MUON, precision=precision)
    assert (
        state_of_block(model, workload)
        == tensor_bytes("o.0", model, workload)
        < 0.7 * state_of_block(model, replace(workload, optimizer="adamw"))
    )


def test_the_search_leaves_alone_what_muon_has_no_use_for() -> None:
    several = replace(MUON, accumulation=2)
    begun = Candidate(policy="streamed", workload=several)
    of_adamw, of_muon = (
        knob_space(MODEL, replace(several, optimizer=name), begun=begun).keys() for name in ("adamw", "muon")
    )
    assert of_adamw - of_muon == {"defer", "through", "order", "singly"} and of_muon <= of_adamw
    assert orders(several) == ("layers",) and ways_to_part(shallow(2), several) == (1,)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("blocks", [2, 4])
def test_where_all_states_stay_none_needs_a_buffer_to_pass_through(blocks: int) -> None:
    """Two more stay than beside the buffers; of two blocks it is all or none, and none took more of the host."""
    model, a100 = replace(presets.load("tiny"), num_hidden_layers=blocks), hardware.load("a100-pcie")
    tight = Candidate(policy="streamed", workload=MUON, knobs=(("grad_slots", 1), ("keep", 0), ("slots", 1)))
    takes = Room(model, a100, MEMORY).peaks(tight.with_knobs({"stay": blocks}))
    assert takes is not None
    device, host = takes[Tier.DEVICE], takes[Tier.HOST]
    room = Room(model, a100, MemoryBudget(device_bytes=device, host_bytes=host))
    assert room.stays(tight) == blocks
    assert Room(model, a100, MemoryBudget(device_bytes=device - 1, host_bytes=host)).stays(tight) < blocks
    other = hardware.override(a100, [f"gpu.memory={device}bytes", f"host.memory={host}bytes"])
    assert plan(model, other, seq_len=16, tokens_per_step=32, optimizer="muon").schedule.knobs["stay"] == blocks


@pytest.mark.parametrize("seed", range(24))
def test_no_schedule_is_faster_than_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    blocks, model = 4, shallow(4)
    workload = step(
        chance.choice([1, 4, 16]), accumulation=chance.choice([1, 1, 2, 4]), optimizer="muon",
        recompute=RECOMPUTED[seed % len(RECOMPUTED)], precision=chance.choice(["bf16", "bf16_16bit", "fp32"]),
    )  # fmt: skip
    device = chance.uniform(0.6, 2.0) * state_bytes(model, 8) / 1e9 + 2 + workload.tokens_per_microbatch / 1500
    slower = chance.choice([[], ["links.h2d.bandwidth=5GB/s", "links.d2h.bandwidth=5GB/s", "links.duplex=5GB/s"]])
    profile = hardware.override(
        hardware.load(chance.choice(["h200", "a100-pcie", "rtx4090"])), [f"gpu.memory={device:.3f}GB", *slower]
    )
    limit, simulated = placement_bound(model, workload, profile), 0
    for resident, stay in itertools.product((0, 2, blocks + 2), (0, 1, 3)):
        knobs: dict[str, Knob] = {"resident": resident, "stay": stay, "offload": chance.randint(0, blocks)}
        knobs |= {
            "hold": chance.choice([0, 1, blocks]),
            "slots": chance.choice([1, 2, 3]),
            "inputs": chance.choice([0, blocks]),
            "keep": chance.choice([0, 2]),
        }
        if profile.nvme is not None:
            knobs["nvme"] = chance.choice([0, 2])
        schedule = policies.build("streamed", model, workload, memory_of(profile), **knobs)
        period = period_if_it_fits(schedule, profile)
        simulated += period is not None
        assert period is None or period >= limit.period_ns, knobs
    assert simulated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_gb", "link"), [(4.0, "55GB/s"), (5.0, "12GB/s"), (9.0, "25GB/s")], ids=["short", "slow", "ample"]
)
def test_a_plan_is_no_slower_than_any_of_many_placements(device_gb: float, link: str) -> None:
    model = shallow(4)
    profile = hardware.override(
        machine("h200", device_gb=device_gb, host_gb=100), [f"links.{way}.bandwidth={link}" for way in ("h2d", "d2h")]
    )
    found = plan(model, profile, seq_len=512, tokens_per_step=8 * 512, optimizer="muon")
    assert found.schedule.workload.optimizer == "muon" and found.gap >= 0
    assert all(tried.workload.optimizer == "muon" for tried in found.tried)
    some: dict[str, Any] = {"resident": (0, 1, 3, 6), "stay": (0, 2), "offload": (0, 4), "slots": (2, 3)}
    best = min(
        period_if_it_fits(built, profile) or float("inf")
        for mode, accumulation in itertools.product(("none", "pointwise"), (1, 2))
        for values in itertools.product(*some.values())
        for built in [
            policies.build(
                "streamed",
                model,
                step(8 // accumulation, accumulation=accumulation, optimizer="muon", recompute=mode),
                memory_of(profile),
                **dict(zip(some, values, strict=True)),
            )
        ]
    )
    assert found.prediction.period_ns <= best * 1.002
    of_these = bound_of_these_micro_batches(found.schedule, profile)
    assert found.lower_bound_ns <= of_these <= found.prediction.period_ns


def test_with_clipping_a_small_models_plan_is_resident() -> None:
    found = plan(
        MODEL, hardware.load("h200"), seq_len=16, tokens_per_step=64, optimizer="muon", grad_clip=1.0, effort=20
    )
    assert not any(op.stream == Stream.CPU for op in found.schedule.ops) and found.gap >= 0


def test_with_clipping_blocks_that_do_not_fit_the_device_are_updated_before_their_forward() -> None:
    workload, profile = step(1, optimizer="muon", grad_clip=1.0), machine("h200", device_gb=8, host_gb=40)
    room = Room(shallow(8), profile, memory_of(profile))
    assert room.might_hold(workload)
    found = plan(shallow(8), profile, seq_len=512, micro_batch_size=1, optimizer="muon", grad_clip=1.0, effort=20)
    assert found.prediction.fits and found.gap >= 0
    updates = {op.layer: op for op in found.schedule.ops if op.phase == Phase.ADAM}
    index = found.schedule.index
    assert any(index[updates[i].name] < index[f"F.{i}.0"] for i in found.schedule.model.blocks)

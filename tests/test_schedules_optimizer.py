"""What an optimizer keeps of a layer, multiplies and allocates; and that Muon's update of a block is for the device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from schedules import policies, presets
from schedules.errors import InputError, ProgramError
from schedules.hazards import minimal_waits
from schedules.model import ModelSpec
from schedules.op import Phase, Stream
from schedules.optimizer import Matrices, matrices, state_bytes, step_bytes, step_flops, step_workspace
from schedules.parameters import is_matrix
from schedules.program import Program
from schedules.schedule import Knob
from schedules.sizes import tensor_bytes
from schedules.verify import ScheduleError, verify
from schedules.workload import PRECISIONS, MemoryBudget, Workload

TINY, MIXTURE = presets.load("tiny"), presets.load("gpt-oss-20b")
MUON = Workload(micro_batch_size=2, seq_len=16, optimizer="muon")
ADAMW = replace(MUON, optimizer="adamw")
MEMORY = MemoryBudget(device_bytes=10**9, host_bytes=10**9)


@pytest.mark.parametrize("model", [TINY, MIXTURE], ids=lambda model: model.name)
def test_muon_has_all_matrices_of_a_block_and_nothing_else(model: ModelSpec) -> None:
    found, at = [], 0
    for name, shape in model.parameter_shapes(0).items():
        if is_matrix(name, shape):
            found.append((at, math.prod(shape), shape[-2:]))
        at += math.prod(shape)
    assert [(of.start, of.size, (of.rows, of.columns)) for of in matrices(model, MUON, 0)] == found
    assert not matrices(model, MUON, model.embed) and not matrices(model, MUON, model.head)
    assert not matrices(model, ADAMW, 0)


def test_experts_are_so_many_matrices_of_which_some_are_orthogonalised_together() -> None:
    gate_up = next(of for of in matrices(MIXTURE, MUON, 0) if of.count > 1)
    assert (gate_up.count, gate_up.rows, gate_up.columns) == (32, 2880, 5760)
    assert gate_up.together == 4  # 16.6 M elements each, of 67 M
    assert Matrices(0, 3, 2, 2).together == 3
    assert Matrices(0, 1, 1 << 14, 1 << 14).together == 1  # larger than any group


@pytest.mark.parametrize(
    ("precision", "of_matrix", "of_other"),
    [("bf16", 4, 8), ("bf16_split", 6, 10), ("bf16_fp32", 8, 12), ("bf16_16bit", 2, 4), ("fp32", 4, 8)],
)
def test_muon_keeps_one_moment_of_a_matrix(precision: str, of_matrix: int, of_other: int) -> None:
    workload = replace(MUON, precision=precision)
    inside = sum(of.size for of in matrices(TINY, MUON, 0))
    kept = inside * of_matrix + (TINY.params(0) - inside) * of_other
    assert tensor_bytes("o.0", TINY, workload) == state_bytes(TINY, workload, 0, TINY.params(0)) == kept
    for layer in ("embed", "head"):
        of_adamw = tensor_bytes(f"o.{layer}", TINY, replace(workload, optimizer="adamw"))
        assert tensor_bytes(f"o.{layer}", TINY, workload) == of_adamw


def test_what_a_step_multiplies_by_hand() -> None:
    """Five iterations: XX^T and its square times X, 4 r^2 c, and the square itself, 2 r^3."""
    h, f, q, kv = TINY.hidden_size, TINY.intermediate_size, TINY.heads(0).q_width, TINY.heads(0).k_width
    shapes = [(h, q), (h, q), (h, kv), (h, kv), (h, f), (h, f), (h, f)]
    by_hand = 5 * sum(4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3 for s in shapes)
    assert step_flops(TINY, MUON, 0) == by_hand
    assert step_flops(TINY, ADAMW, 0) == step_bytes(TINY, ADAMW, 0) == step_workspace(TINY, ADAMW, 0) == 0
    assert step_flops(TINY, MUON, TINY.embed) == step_workspace(TINY, MUON, TINY.head) == 0


def test_what_passes_move_by_hand() -> None:
    """In bf16: written, read for the norm, read and written, read; and where it is taller than wide there and back."""
    one = replace(TINY, attention_bias=False, qk_norm=False)
    tall = sum(of.size for of in matrices(one, MUON, 0) if of.rows > of.columns)
    every = sum(of.size for of in matrices(one, MUON, 0))
    assert 0 < tall < every and step_bytes(one, MUON, 0) == 2 * (5 * every + 4 * tall)


def test_a_block_is_updated_on_the_device_alone() -> None:
    for policy in ("megatrain", "zero3_offload", "superoffload", "greedysnake"):
        with pytest.raises(InputError, match=r"is queued on (cpu|host): muon updates blocks on the device"):
            policies.build(policy, TINY, MUON, MEMORY)
    for policy in ("resident", "streamed", "paged_optimizer", "llmq"):
        verify(policies.build(policy, TINY, MUON, MEMORY))


def test_beside_the_compute_stream_is_no_place_for_an_update_that_takes_workspace() -> None:
    """Two ops that allocate would run at once, and the larger of the two is what is counted."""
    p = Program(TINY, MUON)
    with pytest.raises(
        ProgramError, match=r"update\(0\) is queued on h2d: muon updates blocks on the device's compute"
    ):
        p.update(0, stream=Stream.H2D)
    right = policies.build("resident", TINY, MUON, MEMORY)
    ops = tuple(replace(op, stream=Stream.D2H) if op.name == "U.0" else op for op in right.ops)
    with pytest.raises(ScheduleError, match=r"U\.0 multiplies matrices, as muon does, on d2h"):
        verify(replace(right, ops=ops, waits=minimal_waits(ops)))


def test_adapters_are_not_for_muon() -> None:
    with pytest.raises(InputError, match="lora_streamed: adapters are not trained by muon"):
        policies.build("lora_streamed", TINY, MUON, MEMORY)


def test_a_file_whose_blocks_the_cpu_updates_is_refused() -> None:
    forged = replace(policies.build("streamed", TINY, ADAMW, MEMORY), workload=MUON)
    with pytest.raises(ScheduleError, match=r"U\.3 multiplies matrices, as muon does, on cpu"):
        verify(forged)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_step_that_declares_too_few_flops_is_refused(share: float) -> None:
    right = policies.build("resident", TINY, MUON, MEMORY)
    ops = tuple(replace(op, flops=int(op.flops * share)) if op.phase == Phase.ADAM else op for op in right.ops)
    with pytest.raises(ScheduleError, match="this model and step need"):
        verify(replace(right, ops=ops, waits=minimal_waits(ops)))


def test_a_block_has_no_parts() -> None:
    with pytest.raises(InputError, match=r"layer 3 has no parts: muon updates whole matrices"):
        policies.build("streamed", TINY, MUON, MEMORY, parts=2)
    with pytest.raises(InputError, match="layer 0 has no parts"):
        tensor_bytes("g.0.0of2", TINY, MUON)
    assert tensor_bytes("g.embed.0of2", TINY, MUON)


@pytest.mark.parametrize(
    "knobs", [{"order": "microbatches", "hold": 1}, {"singly": 2, "hold": 1}], ids=lambda knobs: next(iter(knobs))
)
def test_streamed_tells_which_knobs_muon_has_no_use_for(knobs: dict[str, int | str]) -> None:
    several = replace(MUON, accumulation=2)
    with pytest.raises(InputError, match="those that are neither resident nor held take no singly or"):
        policies.build("streamed", TINY, several, MEMORY, **knobs)
    verify(policies.build("streamed", TINY, replace(several, grad_clip=1.0), MEMORY, resident=len(TINY.layers)))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"resident": 2},
        {"stay": 2},
        {"nvme": 3},
        {"nvme": 3, "nvme_weights": 2},
        {"defer": 2},
        {"hold": 2},
        {"hold": 1, "singly": 1},
        {"hold": len(TINY.blocks), "order": "microbatches"},
    ],
    ids=str,
)
def test_streamed_passes_states_through_the_device(knobs: dict[str, Knob], clip: float | None) -> None:
    memory = replace(MEMORY, nvme_bytes=10**9)
    built = policies.build("streamed", TINY, replace(MUON, accumulation=2, grad_clip=clip), memory, **knobs)
    verify(built)
    updates = {op.layer: op for op in built.ops if op.phase == Phase.ADAM}
    assert all(updates[i].stream == Stream.COMPUTE and updates[i].flops for i in TINY.blocks)
    ends = [i for i in (TINY.embed, TINY.head) if i >= knobs.get("resident", 0) - 1]
    assert all(updates[i].stream == Stream.CPU and not updates[i].flops for i in ends)


def test_muon_trains_weights_and_keeps_no_moments_of_8_bits() -> None:
    with pytest.raises(ValueError, match="muon trains weights, not adapters"):
        replace(MUON, lora_rank=4)
    with pytest.raises(ValueError, match="muon keeps a momentum of 16 or 32 bits: bf16_8bit is for adamw"):
        replace(MUON, precision="bf16_8bit")
    with pytest.raises(ValueError, match="optimizer 'sgd' is unknown; known are adamw, muon"):
        replace(MUON, optimizer="sgd")
    assert Workload.from_dict(MUON.to_dict()) == MUON
    assert all(kept.moment * 2 <= kept.state for kept in PRECISIONS.values())

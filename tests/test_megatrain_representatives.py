"""Which schedules are timed: few, of few blocks, with all the ops that a profile is to have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from quick_readings import hurry

from megatrain import profile
from megatrain.demo import POLICIES
from megatrain.fitting import told_left_out
from megatrain.initial import FEW, STANDARD_DEVIATION, repeated_parameters
from megatrain.representatives import (
    LENGTHS,
    covering,
    representatives,
    shapes_between,
    shapes_up_to,
    shortened,
    timed_in,
)
from megatrain.this_machine import Here
from schedules import policies
from schedules.model import ModelSpec
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim.prediction import predict

GIB = 1 << 30
H100 = Here(device="H100", on_gpu=True, device_bytes=77 * GIB, host_bytes=110 * GIB, free_bytes=110 * GIB)
STEPS = (Workload(micro_batch_size=4, seq_len=1024), Workload(micro_batch_size=1, seq_len=4096))


def built(
    model: ModelSpec,
    names: Sequence[str] = tuple(policies.comparable()),
    steps: Sequence[Workload] = STEPS,
    room: MemoryBudget = H100.budget,
) -> list[Schedule]:
    return [policies.build(name, model, step, room) for step in steps for name in names]


def test_a_model_is_shortened_to_its_first_blocks_of_every_kind() -> None:
    llama, mixed, demo = load("llama-3.1-70b"), load("gpt-oss-120b"), load("demo")
    assert shortened(llama, 8) == replace(llama, num_hidden_layers=8)
    assert shortened(demo, 8) is demo
    assert [mixed.layer_kind(i) for i in mixed.blocks[:3]] == ["block.sliding", "block", "block.sliding"]
    assert [shortened(mixed, n).num_hidden_layers for n in (1, 2, 3, 99)] == [2, 2, 3, 36]
    assert shortened(mixed, 1).layer_types == mixed.layer_types[:2]
    assert shortened(load("smollm3-3b"), 1).no_rope_layers == (1, 1, 1, 0)


@pytest.mark.slow
def test_few_blocks_have_all_ops_of_a_model_that_the_host_has_no_room_for() -> None:
    model = load("llama-3.1-70b")
    found, left = representatives(model, built, H100)
    assert timed_in(*found) >= timed_in(*built(model)) and not left
    assert {schedule.model.num_hidden_layers for schedule in found} <= set(LENGTHS)
    assert len(found) < len(STEPS) * len(policies.comparable()) / 2


def test_what_has_no_room_even_so_is_named_with_what_the_least_of_it_lacks() -> None:
    model, small = load("llama-3.1-70b"), replace(H100, device_bytes=22 * GIB)
    build = partial(built, names=("megatrain", "resident"), room=small.budget)
    found, left = representatives(model, build, small)
    assert {schedule.policy for schedule in found} == {"megatrain"}
    assert {schedule.policy for schedule, _ in left} == {"resident"}
    lines = told_left_out(found, left)
    assert len(lines) == 1 and lines[0].startswith("resident is not measured: it lacks at least")
    shortest = min(lack.over for _, lacking in left for lack in lacking.lacks)
    assert shortest < 40 * GIB < max(lack.over for _, lacking in left for lack in lacking.lacks)


def test_ops_that_only_the_whole_model_has_are_measured_in_it() -> None:
    """A policy that keeps its activations of so many blocks, and no others'."""
    model = replace(load("tiny"), num_hidden_layers=20)
    step = Workload(micro_batch_size=1, seq_len=16, precision="fp32")

    def build(of: ModelSpec) -> list[Schedule]:
        return [policies.build("streamed", of, step, H100.budget, keep=max(of.num_hidden_layers - 10, 0))]

    found, left = representatives(model, build, H100)
    assert [schedule.model.num_hidden_layers for schedule in found] == [8, 20] and not left


def test_the_whole_model_is_not_measured_for_a_pass_that_goes_by_bandwidth() -> None:
    """Gradients that add up on the host, where there are so many blocks."""
    model, step = replace(load("tiny"), num_hidden_layers=20), Workload(micro_batch_size=1, seq_len=16, accumulation=2)

    def build(of: ModelSpec) -> list[Schedule]:
        order = "microbatches" if of.num_hidden_layers > 10 else "layers"
        return [policies.build("streamed", of, step, H100.budget, keep=0, order=order)]

    found, left = representatives(model, build, H100)
    assert [schedule.model.num_hidden_layers for schedule in found] == [8] and not left
    lacking = timed_in(*build(model)) - timed_in(*found)
    assert lacking and all("/accumulate " in key for key in lacking)


def test_a_profile_of_few_blocks_predicts_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    model = replace(load("tiny"), num_hidden_layers=12)
    step = Workload(micro_batch_size=1, accumulation=2, seq_len=16, precision="fp32")
    build = partial(built, names=POLICIES, steps=[step], room=MemoryBudget(device_bytes=GIB, host_bytes=GIB))
    found, _ = representatives(model, build, H100)
    assert {schedule.model.num_hidden_layers for schedule in found} == {8}
    measured = profile.measure(found, progress=lambda done, note: None)
    assert all(predict(schedule, measured).period_ns > 0 for schedule in build(model))


def test_only_schedules_with_new_ops_are_run() -> None:
    chosen = 2 * built(load("tiny"), POLICIES)
    found = covering(chosen)
    assert 0 < len(found) < len(chosen) / 2 and found[0] is chosen[0]
    assert timed_in(*found) == timed_in(*chosen)


def test_shapes_lie_around_those_that_are_asked_for() -> None:
    assert shapes_up_to(4, 256) == [(4, 256), (1, 256), (2, 128), (4, 64), (1, 64)]
    assert shapes_between([(1, 64), (2, 128), (4, 256)], 3) == [(1, 128), (1, 512)]  # 256 is there
    assert shapes_up_to(1, 16) == [(1, 16), (1, 8), (1, 4)]


def test_shapes_are_of_a_multiple_of_tokens_where_products_need_that() -> None:
    shapes = shapes_up_to(2, 24, 16)
    assert shapes == [(2, 24)]
    shapes = shapes_up_to(2, 64, 16)
    assert shapes == [(2, 64), (1, 64), (1, 32), (2, 16), (1, 16)]
    assert shapes_between(shapes) == [(1, 24), (1, 37), (1, 56), (1, 84)]
    assert shapes_between(shapes, multiple=16) == [(1, 48), (1, 80)]  # 16, 32 and 64 are there


def test_weights_that_are_only_timed_are_like_random_ones() -> None:
    model = replace(load("qwen2.5-0.5b"), num_hidden_layers=2)
    for i in model.layers:
        shapes = model.parameter_shapes(i)
        flat = repeated_parameters(model, 0)(i)
        assert flat.dtype == torch.float32 and flat.numel() == model.params(i)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes.values()])
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            if len(shape) == 1:
                assert (part == (1.0 if "norm" in name else 0.0)).all()
                continue
            assert part.std() == pytest.approx(STANDARD_DEVIATION, rel=0.02) and part.mean().abs() < 1e-3
            rows = part.view(shape)[: 4 * FEW // shape[1]]
            assert len(rows.unique(dim=0)) == len(rows)

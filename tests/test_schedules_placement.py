"""Where the layers of a streamed step live: each in one place, and updated once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import presets
from schedules.placement import Places
from schedules.sweep import spread, spread_large
from schedules.workload import Workload

COUNTS = ("singly", "defer", "resident", "hold", "through", "stay", "nvme", "nvme_weights")


@st.composite
def places(draw: st.DrawFn) -> tuple[Places, Workload, range]:
    model = replace(presets.load("tiny"), num_hidden_layers=draw(st.integers(1, 9)))
    clip = draw(st.sampled_from([None, 1.0]))
    workload = Workload(micro_batch_size=1, accumulation=draw(st.integers(1, 3)), seq_len=8, grad_clip=clip)
    knobs = {name: draw(st.integers(0, len(model.blocks))) for name in COUNTS}
    groups = draw(st.sampled_from([1, workload.accumulation]))
    if groups > 1:
        knobs["singly"] = 0
    return Places(model, workload, groups=groups, parts=draw(st.integers(1, 3)), **knobs), workload, model.layers


@given(places())
def test_every_layer_has_one_place_and_one_update(drawn: tuple[Places, Workload, range]) -> None:
    found, _, layers = drawn
    assert sorted([*found.resident, *found.ends, *found.held, *found.streamed]) == list(layers)
    assert sorted(found.updates) == list(layers)
    in_time = len(layers) - len(found.late)
    assert set(found.updates[in_time:]) == found.late


@given(places())
def test_blocks_are_updated_on_the_device_if_they_stream_or_are_held_and_live_on_a_drive_if_they_stream(
    drawn: tuple[Places, Workload, range],
) -> None:
    found, workload, _ = drawn
    assert found.on_device <= {*found.streamed, *found.held}
    assert found.settled == found.on_device & set(found.held)
    assert found.carried == (found.on_device if workload.grad_clip is not None else set())
    assert found.on_device.isdisjoint(found.late)
    assert {i for i, _ in found.nvme_states} <= set(found.streamed)
    assert found.nvme_states.isdisjoint(found.staying)
    assert found.nvme_grads <= found.nvme_weights <= {i for i, _ in found.nvme_states}


@pytest.mark.parametrize(("hold", "held"), [(2, [7, 8]), (3, [3, 7, 8])])
def test_blocks_that_run_by_single_micro_batches_are_held_first(hold: int, held: list[int]) -> None:
    model = replace(presets.load("tiny"), num_hidden_layers=9)
    workload = Workload(micro_batch_size=1, accumulation=2, seq_len=8)
    knobs = dict.fromkeys(COUNTS, 0) | {"singly": 2, "hold": hold}
    assert Places(model, workload, groups=1, parts=1, **knobs).held == held


@given(places())
def test_a_layers_gradient_comes_once_a_group_or_once_a_micro_batch(drawn: tuple[Places, Workload, range]) -> None:
    found, workload, _ = drawn
    assert set(found.landings.values()) <= {found.groups, workload.accumulation}
    assert all(found.landings[i] == 1 for i in (found.on_device - found.settled) | found.gradually | found.nvme_grads)


@pytest.mark.parametrize(
    ("hold", "through", "settled", "streaming"),
    [(4, 2, 2, 0), (4, 4, 4, 0), (4, 6, 4, 2), (0, 3, 0, 3), (4, 0, 0, 0)],
)
def test_states_of_held_blocks_pass_first(hold: int, through: int, settled: int, streaming: int) -> None:
    model = replace(presets.load("tiny"), num_hidden_layers=9)
    knobs = dict.fromkeys(COUNTS, 0) | {"hold": hold, "through": through}
    found = Places(model, Workload(micro_batch_size=1, seq_len=8), groups=1, parts=1, **knobs)
    assert (len(found.settled), len(found.through & set(found.streamed))) == (settled, streaming)


@pytest.mark.parametrize("knob", ["hold", "through", "stay", "defer", "nvme"])
def test_small_blocks_are_placed_elsewhere_last(knob: str) -> None:
    """Some of Nemotron 3's have attention alone, a thirtieth of what those with experts have."""
    model = presets.load("nemotron-3-nano-30b-a3b")
    small = {i for i in model.blocks if 2 * model.params(i) < model.params(model.largest_block)}

    def chosen(count: int) -> set[int]:
        knobs = dict.fromkeys(COUNTS, 0) | {knob: count}
        places = Places(model, Workload(micro_batch_size=1, seq_len=8), groups=1, parts=1, **knobs)
        found = {
            "hold": set(places.held),
            "through": places.through,
            "stay": {i for i, _ in places.staying},
            "defer": places.late,
            "nvme": {i for i, _ in places.nvme_states},
        }[knob]
        assert len(found) == count
        return found

    blocks = len(model.blocks)
    assert len(small) == 6
    assert chosen(blocks - 6).isdisjoint(small)
    assert len(chosen(blocks - 4) & small) == 2 and chosen(blocks) == {*model.blocks}


@given(st.lists(st.integers(1, 9)), st.integers(0, 20))
def test_so_many_are_spread_over_the_large_ones_first(sizes: list[int], count: int) -> None:
    of = range(len(sizes))
    found = spread_large(of, count, sizes.__getitem__)
    large = [i for i in of if 2 * sizes[i] >= max(sizes)]
    assert len(found) == min(count, len(sizes))
    assert found <= {*large} or found >= {*large}
    if count <= len(large):
        assert found == spread(large, count)


def test_weights_on_a_drive_are_of_blocks_spread_over_those_whose_states_are_there() -> None:
    model = replace(presets.load("tiny"), num_hidden_layers=16)
    knobs = dict.fromkeys(COUNTS, 0) | {"nvme": 3, "nvme_weights": 1}
    found = Places(model, Workload(micro_batch_size=1, seq_len=8), groups=1, parts=1, **knobs)
    assert ({i for i, _ in found.nvme_states}, found.nvme_weights) == ({2, 7, 12}, {7})


def test_a_block_runs_all_micro_batches_of_a_group_at_a_visit_or_only_one() -> None:
    model = replace(presets.load("tiny"), num_hidden_layers=3)
    workload, knobs = Workload(micro_batch_size=1, accumulation=4, seq_len=8), dict.fromkeys(COUNTS, 0)
    above = Places(model, workload, groups=1, parts=1, **knobs | {"singly": 1})
    assert [above.turns(i) for i in model.blocks] == [4, 4, 1]
    in_groups = Places(model, workload, groups=2, parts=1, **knobs)
    assert [in_groups.turns(i) for i in model.blocks] == [2, 2, 2]

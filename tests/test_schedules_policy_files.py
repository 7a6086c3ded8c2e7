"""What a policy file of one's own may do, and what of it is refused: it stands for the step that was asked for."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from schedules import policies, presets
from schedules.policies import PolicyError
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

TINY = presets.load("tiny")
STEP = Workload(micro_batch_size=1, accumulation=2, seq_len=16, grad_clip=0.01)
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**10)
CALLS_OURS = """
from dataclasses import replace

from schedules.policies import load

{before}


def policy(model, workload, memory):
    return load("{ours}")({step}, memory)
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def built(folder: Path, of: str, step: Workload = STEP, ours: str = "streamed", before: str = "") -> Schedule:
    """By a policy that writes the step of another model or workload."""
    path = written(folder, CALLS_OURS.format(step=of, ours=ours, before=before))
    return policies.build(path, TINY, step, ROOM)


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ("model, replace(workload, grad_clip=None)", "its workload has grad_clip None, asked for was 0.01"),
        ("model, replace(workload, grad_clip=1.0)", "its workload has grad_clip 1.0, asked for was 0.01"),
        ("model, replace(workload, seq_len=8)", "its workload has seq_len 8, asked for was 16"),
        ("model, replace(workload, accumulation=1)", "its workload has accumulation 1, asked for was 2"),
        ("model, replace(workload, recompute='mlp')", "its workload has recompute mlp, asked for was none"),
        ("replace(model, num_hidden_layers=2), workload", "its model has num_hidden_layers 2, asked for was 4"),
    ],
)
def test_a_policy_that_writes_another_step_than_was_asked_for_is_refused(tmp_path: Path, of: str, told: str) -> None:
    with pytest.raises(PolicyError) as raised:
        built(tmp_path, of)
    assert str(raised.value) == f"mine computes another step: {told}"


def test_a_policy_may_choose_what_it_trains_in_which_types_and_to_clip(tmp_path: Path) -> None:
    step = replace(STEP, grad_clip=None)
    assert verify(built(tmp_path, "model, replace(workload, grad_clip=1.0)", step)).schedule.workload.grad_clip == 1.0
    assert verify(built(tmp_path, "model, replace(workload, precision='fp32')")).schedule.workload.precision == "fp32"
    evaluated = built(tmp_path, "model, workload", ours="flexgen_block", before='TRAINS = "nothing"')
    assert verify(evaluated).schedule.workload == replace(STEP, task="evaluate", grad_clip=None)


@pytest.mark.parametrize(("ours", "trained"), [("lora_streamed", "adapters"), ("flexgen_block", "nothing")])
def test_a_file_says_what_its_policy_trains_if_not_weights(tmp_path: Path, ours: str, trained: str) -> None:
    """Else it would be compared with policies that train all weights."""
    says = f'TRAINS = "{trained}"'
    with pytest.raises(PolicyError) as raised:
        built(tmp_path, "model, workload", ours=ours)
    told = f"mine trains {trained} and counts as a policy that trains weights: add {says} to its file"
    assert str(raised.value) == told
    assert built(tmp_path, "model, workload", ours=ours, before=says).workload.trains == trained
    with pytest.raises(PolicyError, match=f"mine trains weights and counts as a policy that trains {trained}: add TRA"):
        built(tmp_path, "model, workload", before=says)


def test_what_a_policy_prints_is_no_part_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built(tmp_path, "model, print('built') or workload", before="print('read')")
    assert capsys.readouterr() == ("", "read\nbuilt\n")


@pytest.mark.parametrize("first", ["model, workload, memory, /,", "asked, /, workload, memory,", "a, b, c,"])
def test_knobs_and_parameters_may_have_any_names(tmp_path: Path, first: str) -> None:
    text = f"""
from schedules.policies import load


def policy({first} *, name_or_path: int = 1, values: int = 1):
    return load("streamed")({first.replace("/,", "")} slots=name_or_path + values)
"""
    schedule = policies.build(written(tmp_path, text), TINY, STEP, ROOM, name_or_path=2)
    assert schedule.knobs == {"name_or_path": 2, "values": 1}
    assert schedule.ops == policies.build("streamed", TINY, STEP, ROOM, slots=3).ops


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ("slots: int = '2'", "mine: the default of knob slots must be a whole number, not '2'"),
        ("slots: int = None", "mine: the default of knob slots must be a whole number, not None"),
        ("slots: int = -1", "mine: the default of knob slots must be at least 0, not -1"),
        ("word: str = 'a\\n'", "mine: the default of knob word must be text that can be shown, not 'a\\n'"),
        ("order: Literal['a', 'b'] = 'c'", "mine: the default of knob order must be 'a' or 'b', not 'c'"),
    ],
)
def test_a_default_is_of_its_knobs_kind(tmp_path: Path, knob: str, told: str) -> None:
    path = written(tmp_path, f"from typing import Literal\n\ndef policy(model, workload, memory, *, {knob}): ...\n")
    with pytest.raises(PolicyError) as raised:
        policies.explain(path)
    assert str(raised.value) == told


def test_a_file_is_read_anew_however_soon_it_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same size within a second, by a script that varies a policy: Python tells files apart by these two."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = Path("docs/my_policy.py").read_text()
    for slots in (2, 3):
        path = written(tmp_path, text.replace("slots: int = 2", f"slots: int = {slots}"))
        os.utime(path, (1e9, 1e9))
        assert policies.build(path, TINY, replace(STEP, grad_clip=None), ROOM).knobs == {"slots": slots}
    assert not list(tmp_path.glob("__pycache__"))


@pytest.mark.parametrize("indents", [(8, 12), (8, 10), (8, 8), (6, 8), (12, 14), (8, 9)])
def test_what_a_knob_means_may_be_indented_at_will(tmp_path: Path, indents: tuple[int, int]) -> None:
    first, more = (" " * indent for indent in indents)
    text = f"""
def policy(model, workload, memory, *, slots: int = 2, keep: int = 0):
    \"""Build the step.

    Args:
{first}slots: device buffers
{more}for streamed
{more}weights: two at least.
{first}keep: blocks that
{more}keep all.

    Not so indented.
    \"""
"""
    told = {"slots": "device buffers for streamed weights: two at least.", "keep": "blocks that keep all."}
    assert {knob: meaning for knob, (_, meaning) in policies.knob_help(written(tmp_path, text)).items()} == told

"""The page on writing policies is one program: it runs, is safe, and leaves no method out."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules import policies
from schedules.errors import ProgramError
from schedules.policies import PolicyError
from schedules.presets import load
from schedules.program import Program
from schedules.ring import Ring
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

PAGE = (Path(__file__).parents[1] / "docs" / "policy_api.md").read_text(encoding="utf-8")
PIECE = re.compile(r"(<!-- error -->\n)?```python\n(.*?)```\n(?:```\n(.*?)\n```)?", re.DOTALL)
STEP = Workload(micro_batch_size=1, accumulation=2, seq_len=8, grad_clip=1.0)
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)
IMPORTS = """
from dataclasses import replace

from schedules.op import Stream, Tier
from schedules.program import Program
"""


def test_the_page_is_a_step_that_is_safe() -> None:
    names: dict[str, Any] = {"model": load("tiny"), "workload": STEP, "memory": ROOM}
    for error, piece, told in PIECE.findall(PAGE):
        if not error:
            exec(piece, names)
            continue
        with pytest.raises(ProgramError) as raised:
            exec(piece, names)
        assert str(raised.value) == told
    assert verify(names["p"].build(policy="page"))


@pytest.mark.parametrize("clip", [None, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("name", "knobs", "staleness"),
    [
        ("passing", {}, 0),
        ("at_once", {}, 0),
        ("before_forward", {}, 0),
        ("behind", {}, 1),
        ("behind", {"lag": 2}, 2),
        ("lora", {}, 0),
        ("evaluate", {}, 0),
    ],
)
def test_a_policy_of_the_page_is_safe_in_a_file_of_its_own(
    tmp_path: Path, name: str, knobs: dict[str, int], staleness: int, tied: bool, clip: float | None
) -> None:
    (text,) = (piece for _, piece, _ in PIECE.findall(PAGE) if f"def {name}(" in piece)
    path = tmp_path / "mine.py"
    path.write_text(IMPORTS + text.replace(f"def {name}(", "def policy("))
    model, step = replace(load("tiny"), tie_word_embeddings=tied), replace(STEP, grad_clip=clip)
    if name == "at_once" and clip:
        with pytest.raises(PolicyError, match="ask for no gradient clipping"):
            policies.build(path, model, step, ROOM)
    else:
        assert verify(policies.build(path, model, step, ROOM, **knobs)).schedule.staleness == staleness


def test_the_page_uses_what_copies_take_instead_of_a_home() -> None:
    """A staleness can be written with these only."""
    assert re.search(r"\.prefetch\([^\n]*out_of=", PAGE) and re.search(r"\.offload\([^\n]*into=", PAGE)


@pytest.mark.parametrize("kind", [Program, Ring])
def test_the_page_leaves_no_method_out(kind: type) -> None:
    methods = [name for name, _ in inspect.getmembers(kind) if not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"\.{name}\b", PAGE)] == []

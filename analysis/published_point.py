"""One number that others have published, with the run that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from schedules.schedule import Knob

Unit = Literal["TFLOP/s", "s", "tokens/s", "x"]
SIX_N = "6 x parameters x tokens"
RECOMPUTED = "8 x parameters x tokens + 16 x layers x hidden size x sequence x tokens"  # attention as if not causal


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published number and the run that it is of.

    Where `lacking` says what keeps it from being predicted, nothing is predicted, and model and machine are the
    publication's words; otherwise both are names of ours, and `policy` is the system's. Where `assumed` says what
    had to be assumed, the point stands apart: it counts in no median. Nor does one with `same_run_as`: that other
    number of its run counts. `micro_batch_size` is None where it is unpublished; then the largest that fits the machine
    is taken. `changes` are what is known or assumed of that machine where the profile is of another, as for `--set`.
    `precision` is the state that the system keeps, `recompute` and `matmul` as in Workload. `formula` is how TFLOP/s
    were counted; where it is empty that is unpublished, and they are taken to be SIX_N. `why` explains an error that is
    far off, from the trace; `note` is what else is known.
    """

    system: str
    model: str
    machine: str
    value: float
    unit: Unit
    source: str
    policy: str | None = None
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    micro_batch_size: int | None = None
    accumulation: int = 1
    seq_len: int = 1024
    precision: str = "bf16"
    recompute: str = "none"
    matmul: str | None = None
    grad_clip: float | None = None
    changes: tuple[str, ...] = ()
    formula: str = ""
    assumed: str = ""
    lacking: str = ""
    same_run_as: str = ""
    note: str = ""
    why: str = ""

"""A step's shape: its tokens, its bytes per parameter, and what has no meaning."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from small_model import WORKLOAD

from schedules.op import Tier
from schedules.workload import PRECISIONS, MemoryBudget, Workload


def test_workload_counts_tokens_and_round_trips() -> None:
    assert (WORKLOAD.tokens_per_microbatch, WORKLOAD.tokens_per_step) == (24, 48)
    assert list(WORKLOAD.microbatches) == [0, 1]
    assert Workload.from_dict(json.loads(json.dumps(WORKLOAD.to_dict()))) == WORKLOAD
    budget = MemoryBudget(device_bytes=80, host_bytes=1000)
    assert [budget.of(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)] == [80, 1000, 0]


def test_bytes_per_parameter_of_each_precision() -> None:
    assert {name: p.per_param for name, p in PRECISIONS.items()} == {
        "bf16": 12,  # the paper's
        "bf16_split": 14,
        "bf16_fp32": 16,
        "bf16_16bit": 8,
        "bf16_8bit": 6 + 8 / 256,
        "fp32": 16,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number of at least 1, not 0"),
        ({"accumulation": 1.5}, "accumulation must be a whole number"),
        ({"micro_batch_size": 10**3000}, "micro_batch_size must be a number of 64 bits, not one of 3001 digits"),
        ({"seq_len": math.nan}, "seq_len must be a whole number"),
        ({"precision": ["bf16"]}, r"precision \['bf16'\] is unknown"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown; known are bf16, "),
        ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown"),
        ({"grad_clip": 0.0}, "grad_clip must be a positive finite number or None"),
        ({"grad_clip": 10**400}, "grad_clip must be a positive finite number or None"),
        ({"grad_clip": math.nan}, "grad_clip must be a positive finite number or None"),
        ({"batch": 1}, "Workload has no field 'batch'"),
    ],
)
def test_bad_workloads_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.from_dict(WORKLOAD.to_dict() | changes)


@pytest.mark.parametrize("name", ["micro_batch_size", "seq_len"])
def test_a_workload_says_what_it_lacks(name: str) -> None:
    with pytest.raises(ValueError, match=f"Workload lacks the field '{name}'"):
        Workload.from_dict({key: value for key, value in WORKLOAD.to_dict().items() if key != name})


def test_a_block_of_moments_that_is_not_full_has_a_scale_as_well() -> None:
    assert [PRECISIONS["bf16_8bit"].state_bytes(params) for params in (0, 1, 256, 257)] == [0, 10, 520, 530]


def test_bad_budgets_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="host_bytes must be a whole number of at least 0, not -1"):
        MemoryBudget(device_bytes=1, host_bytes=-1)

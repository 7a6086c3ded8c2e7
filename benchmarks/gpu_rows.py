"""The steps that `gpu.py` measures, ours and the rivals', those first that are most worth their time on a GPU.

A GPU is lent for a while, and all rows together take more than an hour and a half. What the aims speak of takes a
quarter of that.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_case import PLANNED, Case
from gpu_steps import LASTS_S, LOADED_S, STEPS, WARM_UP, alone_steps

EXPECTED = Path(__file__).parent.parent / "analysis" / "results" / "gpu-expected"  # a page and a file for each GPU

MODELS = ("llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-7b", "qwen2.5-14b")
POLICIES = ("streamed", "megatrain", "megatrain_released", "zero3_offload", "resident")
KNOBS: dict[str, dict[str, Any]] = {"zero3_offload": {"master": "weights"}}  # for the state that the others have
ZERO3, TORCH = "deepspeed zero3", "plain torch"
# (sequence, micro-batch, accumulation): 2k, 8k and 64k tokens a step
BATCHES = ((1024, 2, 1), (1024, 8, 1), (4096, 4, 4))
SPUN = ("streamed",)  # policies that are run with spinning kernels as well
SPUN_UP_TO = 8192  # tokens of a step: above it issuing hides behind the kernels
# What a row takes beside its steps: imports, a plan, compiling; pinning host memory; DeepSpeed's start.
STARTUP_S, PLANNING_S, PINNED_GB_S, ENGINE_S = 12.0, 8.0, 4.0, 30.0
COMPILING_S = {None: 0.0, "blocks": 20.0, "graphs": 90.0}  # of plain PyTorch's model
DEEPSPEEDS = 1.8  # its step, in those that are expected of its schedule
ALONE = 1.5  # a step whose ops run one by one, in steps; two of those, or three


def _of(what: str, precision: str = "bf16") -> tuple[str, ...]:
    return tuple(f"{what} {count}x{micro}x{seq} {precision}" for seq, micro, count in BATCHES)


# Keys of cases. One point of each aim, and what it is held against, comes before all else: a short lease has them.
# First those steps that stream, which were predicted less well than others.
FIRST = (
    "llama-3.1-8b planned 16x1x4096 bf16_16bit in 12 GiB",
    "llama-3.1-8b planned 2x1x4096 bf16_16bit in 12 GiB",
    "llama-3.2-3b planned 1x8x1024 bf16",
    "llama-3.2-3b streamed 1x8x1024 bf16",
    "qwen2.5-7b planned 1x8x1024 bf16",
    "qwen2.5-14b planned 4x4x4096 bf16",
    *_of(f"qwen2.5-7b {ZERO3}")[:2],
    "llama-3.1-8b planned 4x4x4096 bf16_16bit",
    "qwen2.5-7b planned 1x2x1024 bf16",
    *_of("llama-3.2-1b resident", "bf16_16bit")[:2],
    *_of(f"llama-3.2-1b {TORCH}", "bf16_16bit")[:2],
    "llama-3.2-3b planned 1x2x1024 bf16",
    "llama-3.2-3b megatrain_released 1x8x1024 bf16",
    *_of(f"llama-3.2-3b {ZERO3}")[:2],
)
# The other policies of the aims, and the aims' other points.
NEXT = (
    "llama-3.2-3b megatrain 1x8x1024 bf16",
    "llama-3.2-3b zero3_offload master=weights 1x8x1024 bf16",
    "llama-3.2-3b streamed 1x2x1024 bf16",
    "llama-3.2-3b streamed 4x4x4096 bf16",
    "llama-3.2-3b planned 4x4x4096 bf16",
    f"llama-3.2-3b {ZERO3} 4x4x4096 bf16",
    "llama-3.2-1b resident 4x4x4096 bf16_16bit",
    f"llama-3.2-1b {TORCH} 4x4x4096 bf16_16bit",
    f"llama-3.2-1b {TORCH} compiled=blocks 1x8x1024 bf16_16bit",
    "qwen2.5-7b planned 4x4x4096 bf16",
    f"qwen2.5-7b {ZERO3} 4x4x4096 bf16",
)
AIMS = (*FIRST, *NEXT)  # what a lease of half an hour is for


def cases(models: tuple[str, ...]) -> list[Case]:
    """All rows, in the order in which they are measured."""
    every = [case for case in (*_ours(models), *_rivals(models)) if case.model in models]
    rank = {key: place for place, key in enumerate(AIMS)}
    return sorted(every, key=lambda case: rank.get(case.key, len(rank)))


def is_rival(case: Case) -> bool:
    return case.policy in (ZERO3, TORCH)


def engine(case: Case) -> tuple[str, str] | None:
    """Of which model and precision a DeepSpeed engine measures the case, if one does."""
    return (case.model, case.precision) if case.policy == ZERO3 else None


def spun(case: Case) -> bool:
    """Whether the case is run with spinning kernels as well."""
    return case.policy in SPUN and case.workload.tokens_per_step <= SPUN_UP_TO


def seconds(case: Case, gpu: str, *, pinned_GB: float = 0.0, engine: tuple[str, str] | None = None) -> float:
    """About how long a row takes on a GPU, from what was expected of it before; 0 where nothing was.

    `pinned_GB` of host memory are kept from rows before it, or DeepSpeed's engine of a model and a precision.
    """
    known, steps, startup, like = expected(gpu), float(WARM_UP + STEPS), STARTUP_S, case
    if case.policy == ZERO3:
        like = dataclasses.replace(case, policy="zero3_offload", precision="bf16", knobs=KNOBS["zero3_offload"])
        steps = (steps + 2.0) * DEEPSPEEDS  # two of them by phases
    elif case.policy == TORCH:
        like = dataclasses.replace(case, policy="resident", knobs={})
        startup += COMPILING_S[case.knobs.get("compiled")]
    else:
        steps += alone_steps(case) * ALONE + (steps if spun(case) else 0.0)
        startup += 2 * LOADED_S * ALONE + (PLANNING_S if case.policy == PLANNED else 0.0)
    row = known.get(like.key)
    if row is None:
        return 0.0
    if case.policy == ZERO3:
        startup += 0.0 if engine == (case.model, case.precision) else row["host_GB"] / PINNED_GB_S + ENGINE_S
    elif row["host_GB"] > round(pinned_GB, 1):  # as it is written down
        startup += row["host_GB"] / PINNED_GB_S
    return startup + steps * row["step_s"] + max(0.0, LASTS_S - STEPS * row["step_s"])


@functools.cache
def expected(gpu: str) -> dict[str, dict[str, float]]:
    file = EXPECTED / f"{gpu}.json"
    found: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _ours(models: tuple[str, ...]) -> Iterator[Case]:
    """The planner's and our own policy of all models, then the others'."""
    every = [case for model in models for case in _of_model(model)]
    yield from (case for case in every if case.policy in ("streamed", PLANNED))
    yield from (case for case in every if case.policy not in ("streamed", PLANNED))


def _case(model: str, policy: str, batch: tuple[int, int, int], **more: Any) -> Case:
    seq, micro, accumulation = batch
    return Case(model=model, policy=policy, seq_len=seq, micro_batch_size=micro, accumulation=accumulation, **more)


def of_batch(case: Case, batch: tuple[int, int, int]) -> Case:
    """The same with another batch."""
    seq, micro, accumulation = batch
    return dataclasses.replace(case, seq_len=seq, micro_batch_size=micro, accumulation=accumulation)


def _of_model(model: str) -> Iterator[Case]:
    large = BATCHES[-1]
    if model == "qwen2.5-14b":  # more than 128 GiB hold: some layers live on the GPU
        yield from (_case(model, "streamed", batch, knobs={"resident": "fit"}) for batch in BATCHES[1:])
        yield _case(model, PLANNED, large)
        return
    for batch in BATCHES:
        for policy in POLICIES:
            yield _case(model, policy, batch, knobs=KNOBS.get(policy, {}))
        # with moments as plain PyTorch has them, which is among the rivals
        yield _case(model, "resident", batch, precision="bf16_16bit")
        if batch == large or model in ("llama-3.2-3b", "qwen2.5-7b"):
            yield _case(model, PLANNED, batch)
    # where activations are what fills the GPU
    yield _case(model, "streamed", large, recompute="pointwise")
    if model == "llama-3.1-8b":  # fp32 moments, and the bf16 ones of those who publish these points
        yield _case(model, PLANNED, large, precision="bf16_16bit")
        for accumulation in (16, 2):  # 64k tokens a step, and 8k
            for precision in ("bf16", "bf16_16bit"):
                yield _case(model, PLANNED, (4096, 1, accumulation), precision=precision, device_gib=12)


def _rivals(models: tuple[str, ...]) -> Iterator[Case]:
    """DeepSpeed with our state, plain PyTorch as it comes, with checkpointing and compiled, DeepSpeed once with its
    usual state.
    """
    yield from (_case(model, ZERO3, batch) for model in models for batch in BATCHES)
    for model in models:
        for batch in BATCHES:
            yield _case(model, TORCH, batch, precision="bf16_16bit")
            yield _case(model, TORCH, batch, precision="bf16_16bit", knobs={"checkpointing": True})
            yield _case(model, TORCH, batch, precision="bf16_16bit", knobs={"compiled": "blocks"})
        yield _case(model, TORCH, BATCHES[0], precision="bf16_16bit", knobs={"compiled": "graphs"})
    yield from (_case(model, ZERO3, BATCHES[-1], precision="bf16_fp32") for model in models)

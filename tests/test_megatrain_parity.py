"""Every schedule trains as plain PyTorch does: losses, every gradient of every step, and the parameters."""

from __future__ import annotations

import math
import random
import tempfile
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import torch
from hand_written import WRITERS, small
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from torch import Tensor

from megatrain import adam, initial
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from megatrain.data import ByteText, inputs_and_targets, read_bytes, shares, standard_library
from megatrain.template import sinks, templates, views
from megatrain.train import Debug, Trainer
from schedules import policies, presets, trained
from schedules.model import ModelSpec
from schedules.op import Phase, Stream
from schedules.program import Program
from schedules.schedule import Knob, Schedule
from schedules.verify import ScheduleError, verify
from schedules.workload import PRECISIONS, MemoryBudget, Workload

MEMORY = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
# a large eps: where a gradient is near zero, Adam divides rounding errors by it and makes them visible
HYPER = Adam(lr=1e-3, eps=1e-4, weight_decay=0.1)
PLAIN = Adam(lr=1e-3)  # with the usual eps: nothing is rounded differently where it is used
STEPS = 8
LEARNT = 20  # steps after which that shows
VARIANTS: dict[str, dict[str, Knob]] = {
    "streamed, keep=0": {"keep": 0},
    "streamed, keep=1, defer=1, slots=3, slabs=1": {"keep": 1, "defer": 1, "slots": 3, "slabs": 1},
    "streamed, resident=2": {"resident": 2},
    "streamed, order=microbatches": {"order": "microbatches"},
    "streamed, keep=1, offload=1": {"keep": 1, "offload": 1},
    "streamed, offload=2, inputs=2, slack=2": {"keep": 0, "offload": 2, "inputs": 2, "slack": 2},
    "streamed, through=2, resident=1": {"through": 2, "resident": 1},
    "streamed, nvme=2, through=1": {"nvme": 2, "through": 1},
    "streamed, nvme=4, nvme_weights=3": {"nvme": 4, "nvme_weights": 3, "slots": 1, "nvme_slots": 1, "defer": 2},
    "streamed, parts=3, nvme=5, through=1, stay=4": {"parts": 3, "nvme": 5, "through": 1, "stay": 4, "nvme_slots": 1},
    "streamed, parts=2, nvme=8, nvme_weights=3": {"parts": 2, "nvme": 8, "nvme_weights": 3, "defer": 2},
    "streamed, parts=4, slabs=1": {"parts": 4, "slabs": 1, "defer": 1},
    "streamed, parts=3, order=microbatches": {"parts": 3, "slabs": 2, "order": "microbatches", "hold": 1},
    "streamed, parts=3, singly=2": {"parts": 3, "singly": 2, "resident": 1},
    "streamed, inputs=4, nvme_inputs=3": {"keep": 0, "inputs": 4, "nvme_inputs": 3, "slack": 2, "offload": 1},
    "streamed, nvme_weights=4, through=2": {"nvme": 4, "nvme_weights": 4, "through": 2, "resident": 1},
    "zero3_offload, overlap_comm=False": {"overlap_comm": False},
    "zero3_offload, prefetch=2, unpinned": {"prefetch": 2, "pin_memory": False, "max_live": 1},
    "zero_infinity, everything": {
        "params_on_nvme": True,
        "pipeline_read": True,
        "pipeline_write": True,
        "sub_group_size": 1,
        "max_live": 1,
    },
    "zero_offload, overlap_comm=True": {"overlap_comm": True, "reduce_bucket_size": 1},
    "zero_offload_pp, ratio=0.5": {"ratio": 0.5, "sub_group_size": 1},
    "superoffload, ratio=0.5": {"ratio": 0.5, "sub_group_size": 1, "overlap_comm": True},
    "fsdp_offload, activations=keep": {"activations": "keep"},
    "fsdp_offload, every=2": {"every": 2},
    "fsdp_offload, prefetch=True": {"prefetch": True},
    "fsdp_offload, gradient_sync=False": {"gradient_sync": False},
    "zero_offload, activations=host": {"activations": "host"},
    "zero3_offload, activations=inputs": {"activations": "inputs"},
    "zero3_offload, master=weights": {"master": "weights"},
    "zero_offload, master=weights": {"master": "weights"},
    "zero3_offload, every=3": {"every": 3},
    "zero_infinity, activations=nvme": {"activations": "nvme", "params_on_nvme": True},
    "resident, activations=nvme": {"keep": 1, "activations": "nvme"},
    "streamed, every=2": {"keep": 1, "every": 2},
    "streamed, every=3, nested": {"keep": 1, "every": 3, "nested": True},
    "streamed, hold=2": {"hold": 2, "resident": 1, "slots": 1},
    "streamed, hold=3, order=microbatches": {"hold": 3, "order": "microbatches", "defer": 1},
    "streamed, hold=2, through=3": {"hold": 2, "through": 3, "parts": 4, "stay": 2, "grad_slots": 1},
    "streamed, hold=3, through=2, order=microbatches": {"hold": 3, "through": 2, "order": "microbatches", "parts": 2},
    "streamed, singly=2": {"singly": 2, "hold": 1, "resident": 1},
    "streamed, singly=2, through=2": {"singly": 2, "hold": 2, "through": 2, "parts": 8, "defer": 1},
    "streamed, singly=3, offload=4": {"singly": 3, "keep": 0, "offload": 4, "through": 1, "defer": 1},
    "streamed, offload=2, nvme_offload=1": {"keep": 0, "offload": 2, "nvme_offload": 1},
    "gemini, every=4": {"every": 4, "placement": "auto"},
    "gemini, placement=auto": {"placement": "auto"},
    "gemini, max_prefetch=1": {"max_prefetch": 1},
    "gemini, placement=auto, max_prefetch=2, every=2": {"placement": "auto", "max_prefetch": 2, "every": 2},
    "paged_optimizer, pressure=1": {"pressure": 1.0},
    "llmq, offload=moment": {"offload": "moment"},
    "llmq, offload=states, activations=keep": {"offload": "states", "activations": "keep"},
    "llmq, offload=weights": {"offload": "weights"},
    "llmq, offload=gradients": {"offload": "gradients"},
    "lohan, swap=1, spill=2": {"swap": 1, "spill": 2},
    "lohan, inputs=host": {"swap": 1, "inputs": "host"},
    "greedysnake, alpha=1": {"alpha": 1.0},
    "greedysnake, activations=host": {"activations": "host"},
    "roundpipe, is_async=False": {"is_async": False},
    "roundpipe, activations=recompute, every=2": {"activations": "recompute", "every": 2},
    "zenflow, topk_ratio=0.5": {"topk_ratio": 0.5},
    "lora_streamed, resident=0, keep=1": {"resident": 0, "keep": 1, "rank": 4},
    "lora_streamed, resident=6": {"resident": 6},
    "lora_streamed, quantised=nf4": {"quantised": "nf4", "rank": 4, "keep": 1},
    "lora_streamed, nvme=3": {"resident": 1, "nvme": 3, "slots": 1},
    "lora_streamed, quantised=nf4, nvme=2": {"quantised": "nf4", "nvme": 2, "activations": "inputs"},
    "lora_streamed, whole=matrices, resident=4": {"quantised": "nf4", "resident": 4, "every": 2, "whole": "matrices"},
    "flexgen_block, activations=host": {"activations": "host", "slots": 1},
    "flexgen_block, block=1, resident=1, nvme=1": {"block": 1, "resident": 1, "nvme": 1},
    "flexgen_block, quantised=nf4, resident=2, nvme=1": {"quantised": "nf4", "resident": 2, "nvme": 1},
    "flexgen_block, whole=matrices": {"quantised": "nf4", "nvme": 1, "whole": "matrices"},
}
SCHEDULES = [*policies.names(), *VARIANTS, *WRITERS]


class Case(NamedTuple):
    tied: bool
    accumulation: int
    grad_clip: float | None

    @property
    def model(self) -> ModelSpec:
        return replace(presets.load("tiny"), tie_word_embeddings=self.tied)

    @property
    def workload(self) -> Workload:
        return Workload(
            micro_batch_size=2,
            accumulation=self.accumulation,
            seq_len=32,
            precision="fp32",
            grad_clip=self.grad_clip,
        )


FOUR_BLOCKS = small(blocks=4)  # as many as the variants speak of
WIDER = replace(FOUR_BLOCKS, head_dim=16)  # as products in fp8 need keys to be
ONE_PASS = Case(False, 1, None)
CASES = [ONE_PASS, Case(True, 2, None), Case(False, 2, 0.5), Case(True, 1, 0.5)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the number that every stream of the CPU backend uses


def schedule_of(name: str, model: ModelSpec, workload: Workload) -> Schedule:
    if name in WRITERS:
        return WRITERS[name](model, workload)
    if VARIANTS.get(name, {}).get("master") == "weights" and workload.precision not in ("bf16", "bf16_16bit"):
        pytest.skip("there is no such DeepSpeed: the weights that can be their own master are bf16")
    if workload.matmul and (name.startswith("lora") or "quantised" in VARIANTS.get(name, {})):
        pytest.skip("products in fp8 are of blocks whose own weights are trained, in bf16")
    return policies.build(name.split(",")[0], model, workload, MEMORY, **VARIANTS.get(name, {}))


def run(
    schedule: Schedule, steps: int, debug: Debug | None = None, hyper: Adam = HYPER, *, in_nf4: bool = False
) -> Reference:
    """`in_nf4`: it begins with what is left of the same weights in 4 bits."""
    gradients: list[dict[int, Tensor]] = [{} for _ in range(steps)]
    norms: list[float] = []
    start = initial.random_parameters(schedule.model, 0)

    def keep(step: int, layer: int, of: slice, grad: Tensor) -> None:
        n = trained.params(schedule.model, schedule.workload, layer)
        gradients[step].setdefault(layer, torch.full((n,), torch.nan, dtype=grad.dtype))[of] = grad

    with Trainer(
        verify(schedule),
        CpuBackend(),
        text(schedule.workload),
        hyper,
        initial=reference.in_nf4(start, schedule.model) if in_nf4 else start,
        on_gradient=keep,
        debug=debug or Debug(poison=False),
        nvme=Path(tempfile.gettempdir()),
    ) as trainer:
        losses = trainer.run(steps, on_step=lambda step, loss, norm: norms.extend([] if norm is None else [norm]))
        parameters = {i: trainer.parameters(i) for i in trained.layers(schedule.model, schedule.workload)}
    return Reference(losses=losses, gradients=gradients, norms=norms, parameters=parameters)


def text(workload: Workload) -> ByteText:
    return ByteText(text=_library(), workload=workload, seed=5)


@cache
def _library() -> Tensor:
    return read_bytes(standard_library(), 1 << 16)


@cache
def expected(
    case: Case,
    staleness: int = 0,
    changed: Workload | None = None,
    fresh: frozenset[int] = frozenset(),
    steps: int = STEPS,
) -> Reference:
    """Of the case's workload, or of the one that a policy makes of it; `fresh` layers are not stale."""
    workload = changed or case.workload
    rank = workload.lora_rank
    start = initial.random_parameters(case.model, 0)
    return reference.train(
        case.model,
        workload,
        text(workload),
        HYPER,
        initial=start if workload.quantised is None else reference.in_nf4(start, case.model),
        adapters=None if rank is None else initial.random_adapters(case.model, rank, 0),
        steps=steps,
        staleness=staleness,
        fresh=fresh,
    )


def fresh_of(schedule: Schedule) -> frozenset[int]:
    """The layers that a stale schedule updates on the device, at once."""
    if not schedule.staleness:
        return frozenset()
    return frozenset(
        op.layer
        for op in schedule.ops
        if op.phase == Phase.ADAM and op.stream == Stream.COMPUTE and op.layer is not None
    )


def error(found: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_training_by_schedule_is_plain_training(name: str, case: Case) -> None:
    schedule = schedule_of(name, case.model, case.workload)
    found, right = run(schedule, STEPS), expected(case, schedule.staleness, schedule.workload, fresh_of(schedule))
    assert found.losses == pytest.approx(right.losses, rel=1e-6)
    if right.norms:
        assert found.norms == pytest.approx(right.norms, rel=1e-5)
    updated = trained.layers(schedule.model, schedule.workload)
    for step in range(STEPS):
        for i in updated:
            # sums in another order; from the second step on of weights that already differ in the last bit
            limit = 1e-6 if step == 0 else 1e-5
            assert error(found.gradients[step][i], right.gradients[step][i]) < limit, (step, i)
    for i in updated:
        assert error(found.parameters[i], right.parameters[i]) < 5e-6, i


@pytest.mark.parametrize(("gradients", "beside"), [(2, True), (1, False)])
def test_updates_beside_the_next_blocks_micro_batches_or_before_are_plain_training(
    gradients: int, beside: bool
) -> None:
    case, knobs = Case(False, 4, None), {"keep": 1, "through": 3, "stay": 1, "parts": 4, "slots": 1}
    schedule = policies.build("streamed", case.model, case.workload, MEMORY, **knobs, grad_slots=gradients)
    ran = [op for op in schedule.streams[Stream.COMPUTE] if op.phase in (Phase.BACKWARD, Phase.ADAM)]
    apart = [a.phase != b.phase for a, b in pairwise(op for op in ran if op.layer in case.model.blocks)]
    between = sum(apart) > 2 * len(case.model.blocks)
    assert between == beside, "whether some are updated between a block's micro-batches"
    found, right = run(schedule, STEPS), expected(case)
    assert found.losses == pytest.approx(right.losses, rel=1e-6)
    for i in case.model.layers:
        assert error(found.parameters[i], right.parameters[i]) < 5e-6, i


def test_a_wide_sum_of_micro_batches_is_theirs_in_fp32() -> None:
    """Where the sum is bf16, as each micro-batch's gradient, it is rounded as often as something is added."""
    workload = Workload(micro_batch_size=1, accumulation=8, seq_len=32, precision="bf16")
    wide, narrow = (run(WRITERS[name](FOUR_BLOCKS, workload), 1) for name in ("summed_wide", "on_device"))
    exact = replace(workload, precision="fp32")
    right = run(WRITERS["on_device"](FOUR_BLOCKS, exact), 1)
    for i in FOUR_BLOCKS.layers:
        assert wide.gradients[0][i].dtype == torch.float32 and narrow.gradients[0][i].dtype == torch.bfloat16
        assert distance(wide, right, i) < 0.9 * distance(narrow, right, i)


def distance(found: Reference, right: Reference, i: int) -> float:
    """Of the gradients of layer i, relative to their length."""
    return float((found.gradients[0][i].float() - right.gradients[0][i]).norm() / right.gradients[0][i].norm())


def test_reference_learns_and_clips() -> None:
    free, clipped = expected(CASES[0], steps=LEARNT), expected(CASES[2])
    assert free.losses[-1] < free.losses[0] - 0.3
    norms = [torch.cat(list(g.values())).norm().item() for g in clipped.gradients]
    assert norms == pytest.approx([0.5] * STEPS, rel=1e-5)  # every step of these was longer


def test_a_stale_reference_applies_each_gradient_one_step_late() -> None:
    exact, stale = expected(CASES[0], steps=LEARNT), expected(CASES[0], staleness=1, steps=LEARNT)
    # two steps from the same weights, of different text; from the third on the weights are others
    assert stale.losses[0] == exact.losses[0]
    assert stale.losses[1] > exact.losses[1]
    assert stale.losses[-1] < stale.losses[0] - 0.3


# ---- the schedule changes no bit


def assert_same_bits(a: Reference, b: Reference) -> None:
    assert a.losses == b.losses
    for i, right in b.parameters.items():
        assert torch.equal(a.parameters[i], right), i


def tiny_workload(**options: Any) -> Workload:
    return Workload(micro_batch_size=2, seq_len=8, **options)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("precision", "matmul"), [*((precision, None) for precision in PRECISIONS), ("bf16", "fp8")])
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_one_micro_batch_all_schedules_yield_the_same_bits(name: str, precision: str, matmul: str | None) -> None:
    # No gradient is a sum of passes, so that no schedule has an order of its own; even the order of the global
    # norm's sum does not show, as it is taken in fp64. Scaling bf16 gradients in place rounds them, though.
    workload = tiny_workload(precision=precision, grad_clip=0.1 if precision == "fp32" else None, matmul=matmul)
    model = FOUR_BLOCKS if matmul is None else WIDER
    schedule = schedule_of(name, model, workload)
    right = everything_on_device(model, schedule.workload, schedule.staleness, fresh_of(schedule))
    assert_same_bits(run(schedule, 3), right)


@cache
def everything_on_device(model: ModelSpec, workload: Workload, staleness: int, fresh: frozenset[int]) -> Reference:
    """The workload as a policy makes it, of which many policies make the same one."""
    in_nf4 = workload.quantised is not None
    plain = (
        behind(model, workload, fresh) if staleness else WRITERS["on_device"](model, replace(workload, quantised=None))
    )
    return run(plain, 3, in_nf4=in_nf4)


@pytest.mark.parametrize("name", ["on_device", "streamed, parts=4, slabs=1"])
def test_what_has_no_master_is_rounded_as_layer_step_and_place_say(name: str) -> None:
    """The gradients that were applied, applied again beside the run."""
    found = run(schedule_of(name, FOUR_BLOCKS, tiny_workload(precision="bf16")), 2)
    initial_of = initial.random_parameters(FOUR_BLOCKS, 0)
    for i in FOUR_BLOCKS.layers:
        weights, n = initial_of(i).to(torch.bfloat16), FOUR_BLOCKS.params(i)
        state, decay = torch.zeros(8 * n, dtype=torch.uint8), adam.decayed(FOUR_BLOCKS.parameter_shapes(i))
        for step, gradients in enumerate(found.gradients):
            adam.step(weights, gradients[i], state, HYPER, step + 1, precision="bf16", decay=decay, layer=i)
        assert torch.equal(weights.float(), found.parameters[i]), i


def behind(model: ModelSpec, workload: Workload, fresh: frozenset[int]) -> Schedule:
    """Everything on the device; a step computes with the weights of one update ago, but of the `fresh` layers."""
    p = Program(model, workload, staleness=1)
    used = {i: p.buffer(f"used.{i}") for i in model.layers if i not in fresh}
    for i in model.layers:
        p.keep_on_device(p.weight(i), p.state(i), p.grad(i))
    for m in workload.microbatches:
        for i in model.layers[:-1]:
            p.forward(i, m, weights=used.get(i))
        p.loss(m, weights=used.get(model.head), embed_weights=used.get(model.embed))
        for i in reversed(model.layers[:-1]):
            p.backward(i, m, weights=used.get(i))
    if workload.grad_clip is not None:
        p.norm([p.at_home(p.grad(i)) for i in model.layers], stream=Stream.COMPUTE)
    for i in model.layers:
        if i in used:
            p.cast(p.at_home(p.weight(i)), (used[i], p.weight(i)), stream=Stream.COMPUTE)
        p.update(i, stream=Stream.COMPUTE)
    return p.build(policy="behind")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16_split"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_correct_schedule_does_not_notice_delays_and_poison(name: str, precision: str) -> None:
    workload = tiny_workload(accumulation=2, precision=precision, grad_clip=0.1)
    schedule = schedule_of(name, FOUR_BLOCKS, workload)
    right = run(schedule, 2)
    assert all(map(math.isfinite, right.losses))
    for seed in range(2):
        assert_same_bits(run(schedule, 2, Debug(poison=True, delay_s=2e-4, seed=seed)), right)


@settings(max_examples=60)
@given(name=st.sampled_from(policies.names()), seed=st.integers(0, 10**6), clip=st.sampled_from([None, 0.1]))
def test_two_ops_that_change_places_are_caught_or_do_no_harm(name: str, seed: int, clip: float | None) -> None:
    """Whatever the verifier lets pass is run, poisoned and delayed, and must change no bit."""
    schedule = schedule_of(name, small(), tiny_workload(precision="fp32", grad_clip=clip))
    ops, chance = list(schedule.ops), random.Random(seed)
    first, second = chance.sample(range(len(ops)), 2)
    if chance.random() < 0.7:
        second = (first + 1) % len(ops)  # neighbours often may change places
    ops[first], ops[second] = ops[second], ops[first]
    changed = replace(schedule, ops=tuple(ops))
    try:
        verify(changed)
    except ScheduleError:
        return
    assert_same_bits(run(changed, 2, Debug(poison=True, delay_s=2e-4, seed=seed)), run(schedule, 2))


# ---- and where plain PyTorch does the same operations in the same order, no bit differs


@cache
def same_order(staleness: int = 0, fresh: frozenset[int] = frozenset()) -> Reference:
    """Plain autograd over the whole model and torch's AdamW, with the executor's loss op and flat layers.

    Those two are the only places where the reference above does its sums in another order.
    """
    model, workload = ONE_PASS.model, ONE_PASS.workload
    updated = {i: initial.random_parameters(model, 0)(i).requires_grad_() for i in model.layers}
    stale = [i for i in model.layers if staleness and i not in fresh]
    flat = {i: v.detach().clone().requires_grad_() if i in stale else v for i, v in updated.items()}
    own = templates(model, seq_len=workload.seq_len, device=torch.device("cpu"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        list(updated.values()), lr=PLAIN.lr, betas=PLAIN.betas, eps=PLAIN.eps, weight_decay=0.0, fused=True
    )
    losses, gradients = [], []
    for step in range(STEPS):
        (inputs,), (targets,) = inputs_and_targets(text(workload).batch(step))
        parts = {i: views(values, model.parameter_shapes(i)) for i, values in flat.items()}
        x = own.embed.forward(parts[model.embed]["embed_tokens.weight"], inputs)
        for i in model.blocks:
            x = own.blocks[model.layer_kind(i)].forward(parts[i], x)
        head, d_hidden = parts[model.head], torch.empty_like(x)
        flat[model.head].grad = torch.empty_like(flat[model.head])
        into = sinks(flat[model.head].grad, model.parameter_shapes(model.head), accumulate=False)
        loss = own.head.loss_and_grads(
            head["norm.weight"],
            head["lm_head.weight"],
            x.detach(),
            targets,
            shares(text(workload), step, workload)[0].float(),
            d_hidden=d_hidden,
            norm_sink=into["norm.weight"],
            table_sink=into["lm_head.weight"],
        )
        x.backward(d_hidden)
        losses.append(float(loss))
        for i in stale:
            updated[i].grad, flat[i].grad = flat[i].grad, None
            flat[i].data.copy_(updated[i].data)
        gradients.append({i: values.grad.clone() for i, values in updated.items() if values.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Reference(
        losses=losses, gradients=gradients, norms=[], parameters={i: v.detach() for i, v in updated.items()}
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [name for name in SCHEDULES if name in WRITERS or policies.trains(name.split(",")[0]) == "weights"]
)
def test_in_the_same_order_of_operations_no_bit_differs(name: str) -> None:
    # with one pass: a policy that adds a second one on the device adds token by token into the embedding's sum
    schedule = schedule_of(name, ONE_PASS.model, ONE_PASS.workload)
    found, right = run(schedule, STEPS, hyper=PLAIN), same_order(schedule.staleness, fresh_of(schedule))
    assert_same_bits(found, right)
    for step in range(STEPS):
        for i in ONE_PASS.model.layers:
            assert torch.equal(found.gradients[step][i], right.gradients[step][i]), (step, i)

"""Products in fp8 in the simulator: what they cost, what a profile has of them, and that the bound holds for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_steps import machine, shallow
from strategies import round_profile
from timed_profile import timed

from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.flops import attention_flops
from schedules.op import Kind, Phase
from schedules.policies import PolicyError
from schedules.schedule import Knob, Schedule
from schedules.traffic import product_bytes
from schedules.workload import RECOMPUTED, Workload
from sim import hardware, whatif
from sim.cost import MissingCost, Terms, demands
from sim.placement_bound import placement_bound
from sim.plan import plan
from sim.prediction import memory_of, predict
from sim.signature import signature

MODEL = presets.load("demo")
FP8 = Workload(micro_batch_size=4, seq_len=256, matmul="fp8")
BF16 = replace(FP8, matmul=None)
PROFILE = round_profile("gpu.fp8_flops=2000TFLOP/s", "gpu.fp8_efficiency=25%")
PLENTY = memory_of(PROFILE)


def built(workload: Workload, policy: str = "streamed") -> Schedule:
    return policies.build(policy, MODEL, workload, PLENTY)


def durations(workload: Workload) -> dict[str, int]:
    schedule = built(workload)
    costs = demands(schedule, PROFILE, Terms(issue=False))
    return {op.name: cost.duration_ns for op, cost in zip(schedule.ops, costs, strict=True)}


def test_a_blocks_products_take_the_rate_of_their_format() -> None:
    """By hand, at 500 TFLOP/s of fp8, 250 of attention, and 2 TB/s."""
    schedule, found = built(FP8), durations(FP8)
    op = schedule.ops[schedule.index["B.3.0"]]
    attention = 2 * attention_flops(MODEL, 3, FP8)
    of_products = product_bytes(MODEL, 3, Phase.BACKWARD, FP8)
    by_hand = max((op.flops - attention) / 500e12, of_products / 2e12)
    by_hand += attention / 250e12 + (op.nbytes - of_products) / 2e12
    assert found[op.name] == pytest.approx(by_hand * 1e9, abs=1)


def test_all_else_costs_what_it_did() -> None:
    other = durations(BF16)
    changed = {name for name, ns in durations(FP8).items() if other[name] != ns}
    blocks = {op.name for op in built(FP8).ops if op.kind == Kind.COMPUTE and MODEL.is_block(op.layer or 0)}
    assert changed == {name for name in blocks if not name.startswith(("L.", "F.embed", "B.embed"))}


def test_a_machine_without_a_rate_refuses() -> None:
    both = r"leave out matmul, or give it gpu\.fp8_flops and gpu\.fp8_efficiency$"  # or one would be asked for after it
    with pytest.raises(Refused, match=f"a100-pcie states no rate of fp8 products: {both}"):
        predict(built(FP8), hardware.load("a100-pcie"))
    with pytest.raises(Refused, match=r"give it gpu\.fp8_efficiency$"):
        predict(built(FP8), hardware.override(hardware.load("a100-pcie"), ["gpu.fp8_flops=1TFLOP/s"]))


def test_a_measured_profile_knows_ops_by_the_format_of_their_products() -> None:
    schedule = built(FP8)
    op = schedule.ops[schedule.index["F.0.0"]]
    assert signature(op, MODEL, FP8) == f"{signature(op, MODEL, BF16)}/fp8"
    measured = timed(MODEL, [BF16], names=["streamed"])
    predict(built(BF16), measured)
    with pytest.raises(MissingCost, match=r"no measured time for demo/block/forward.*/fp8.*--matmul fp8"):
        predict(schedule, measured)
    measured = timed(MODEL, [FP8], names=["streamed"])
    predict(schedule, measured)
    with pytest.raises(MissingCost, match=r"forward.*/4x256/bf16; it covers demo at 4x256 in bf16, fp8; measure it"):
        predict(built(BF16), measured)


@pytest.mark.parametrize("policy", policies.names())
def test_no_policy_is_faster_than_its_bound_or_that_of_all_placements(policy: str) -> None:
    workload = replace(FP8, accumulation=2)
    try:
        schedule = built(workload, policy)
    except PolicyError as error:
        assert str(error) == "lora_streamed: adapters are not trained beside fp8 products: leave out matmul"
        return
    found = predict(schedule, PROFILE)
    assert found.period_ns >= found.bound_ns > 0
    if not schedule.staleness and schedule.workload.task == "train" and schedule.workload.precision == "bf16":
        any_placement = min(
            placement_bound(MODEL, replace(workload, recompute=mode), PROFILE, PLENTY).period_ns for mode in RECOMPUTED
        )
        assert found.period_ns >= any_placement


def test_what_if_a_gpu_multiplied_faster_is_asked_of_this_format_too() -> None:
    """On a machine whose other resources an op of a block hardly uses."""
    found = predict(built(FP8, "resident"), round_profile("gpu.fp8_flops=1TFLOP/s", "gpu.fp8_efficiency=25%"))
    assert whatif.marginal_gains(found)["GPU, matrix products, +25%"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("knob", [{"rank": 8}, {"quantised": "nf4"}])
def test_an_evaluation_with_adapters_or_quantised_says_what_it_lacks(knob: dict[str, Knob]) -> None:
    with pytest.raises(PolicyError, match=r"flexgen_block: .*fp8 products are of matrices in bf16.*: leave out matmul"):
        policies.build("flexgen_block", MODEL, FP8, PLENTY, **knob)


def test_a_plan_leaves_out_micro_batches_whose_tokens_are_no_multiple() -> None:
    small = machine("h200", device_gb=4, host_gb=64)
    found = plan(shallow(2), small, seq_len=24, tokens_per_step=96, matmul="fp8", effort=1)
    assert [step.micro_batch_size for step in found.asked] == [4, 2]
    with pytest.raises(InputError, match="need a micro-batch's tokens, 24, to be a multiple of 16"):
        plan(shallow(2), small, seq_len=24, tokens_per_step=24, matmul="fp8")


def test_the_largest_micro_batch_has_a_multiple_of_tokens() -> None:
    small, step = machine("h200", device_gb=4, host_gb=64), replace(FP8, micro_batch_size=2, seq_len=24)
    found = whatif.largest_micro_batch(shallow(2), small, step)
    assert found % 2 == 0 and found > whatif.largest_micro_batch(shallow(2), small, replace(step, seq_len=1024)) > 0


def test_a_plan_is_of_the_step_asked_for() -> None:
    found = plan(shallow(2), machine("h200", device_gb=4, host_gb=64), seq_len=256, micro_batch_size=4, matmul="fp8")
    assert found.schedule.workload.matmul == "fp8"
    assert found.gap >= 0

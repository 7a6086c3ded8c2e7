"""Products in fp8: which steps have them, and what they move and take, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules import codec, policies, presets
from schedules.flops import op_flops
from schedules.model import ModelError, ModelSpec
from schedules.op import Phase
from schedules.saved import saved_bytes
from schedules.traffic import op_bytes, pointwise_bytes, product_bytes
from schedules.verify import ScheduleError, verify
from schedules.workload import MemoryBudget, Workload
from schedules.workspace import workspace_bytes

# queries are as wide as the hidden state, keys and values half as wide
MODEL = ModelSpec(
    name="by hand", vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
FP8 = Workload(micro_batch_size=1, seq_len=16, matmul="fp8")
BF16 = replace(FP8, matmul=None)
MATRICES = 32 * (32 + 16 + 16) + 32 * 32 + 32 * (48 + 48) + 48 * 32
ATTENTION = 2 * 32 + 2 * 16  # elements a token: queries, keys and values read, the output written
PLENTY = MemoryBudget(device_bytes=10**9, host_bytes=10**9)


def test_operands_have_one_byte_and_results_two() -> None:
    inputs = 3 * 32 + 32 + 2 * 32 + 48  # once for every product
    outputs = (32 + 16 + 16) + 32 + (48 + 48) + 32
    forward = 16 * (inputs + 2 * outputs + 2 * ATTENTION) + MATRICES
    assert product_bytes(MODEL, 0, Phase.FORWARD, FP8) == forward
    down = 16 * (48 + 2 * 32) + 48 * 32
    assert product_bytes(MODEL, 0, Phase.RECOMPUTE, FP8, output=False) == forward - down
    normalised = replace(MODEL, pre_norm=False, post_norm=True)  # backward reads the MLP's output
    assert product_bytes(normalised, 0, Phase.RECOMPUTE, FP8, output=False) == forward
    of_inputs = outputs + 2 * inputs  # a gradient of the output makes one of the input,
    of_weights = outputs + inputs  # and with the input one of the weights, in bf16
    backward = 16 * (of_inputs + of_weights + 2 * 2 * ATTENTION) + MATRICES * (1 + 2)
    assert product_bytes(MODEL, 0, Phase.BACKWARD, FP8) == backward


def test_operands_are_made_once_for_all_products_of_an_input_and_again_for_backward() -> None:
    def more(phase: Phase, *, output: bool = True) -> int:
        fp8, bf16 = (pointwise_bytes(MODEL, 0, phase, w, output=output) for w in (FP8, BF16))
        return fp8 - bf16

    inputs, outputs = 32 + 32 + 32 + 48, (32 + 16 + 16) + 32 + (48 + 48) + 32
    assert more(Phase.FORWARD) == 5 * (16 * inputs + MATRICES)
    assert more(Phase.RECOMPUTE, output=False) == 5 * (16 * (inputs - 48) + MATRICES - 48 * 32)
    further_terms = 2 * 32 + 32  # of the inputs of three and of two products
    assert more(Phase.BACKWARD) == 16 * (6 * outputs + 5 * inputs + 6 * further_terms) + (5 + 4) * MATRICES


def test_an_mlp_that_is_computed_again_scales_its_matrices_for_every_chunk() -> None:
    once, thrice = (Workload(micro_batch_size=n, seq_len=8192, matmul="fp8", recompute="mlp") for n in (1, 3))
    of_mlp = 3 * 32 * 48

    def of_matrices(workload: Workload) -> int:
        """What does not grow with the tokens: more than in bf16, which reads its matrices once."""
        fp8, bf16 = (pointwise_bytes(MODEL, 0, Phase.FORWARD, w) for w in (workload, replace(workload, matmul=None)))
        return fp8 - bf16 - 5 * workload.tokens_per_microbatch * (32 + 32 + 32 + 48)

    assert of_matrices(once) == 5 * MATRICES
    assert of_matrices(thrice) == 5 * (MATRICES + 2 * of_mlp)
    # matrices of attention are multiplied once, and the sum of the parts' gradients is in fp32
    products = product_bytes(MODEL, 0, Phase.BACKWARD, thrice)
    products -= 3 * product_bytes(MODEL, 0, Phase.BACKWARD, once)
    attention = MATRICES - of_mlp
    assert products == of_mlp * (3 * (1 + 4) - 3 * (1 + 2)) - 2 * attention * (1 + 2)


def test_workspace_has_room_for_the_operands_of_one_product() -> None:
    """Of a wide MLP."""
    wide, matrix = replace(MODEL, intermediate_size=96), 32 * 96
    both_ways = 16 * (2 * 2 * 96 + 2 * 96 + 32 + 2 * 32 + 2 * 32) + matrix
    one_way = 16 * (2 * 2 * 96 + 96 + 32 + 2 * 32) + 2 * matrix
    assert workspace_bytes(wide, 0, Phase.BACKWARD, FP8) == max(both_ways, one_way)
    residual_and_norm, gate_and_up = 2 * 2 * 32, 2 * 2 * 96
    forward = 16 * (residual_and_norm + gate_and_up + 32) + matrix
    assert workspace_bytes(wide, 0, Phase.FORWARD, FP8) == forward > workspace_bytes(wide, 0, Phase.FORWARD, BF16)


def test_nothing_else_changes() -> None:
    for i in (MODEL.embed, MODEL.head):
        for phase in (Phase.EMBED, Phase.BACKWARD) if i == MODEL.embed else (Phase.LOSS,):
            assert op_bytes(MODEL, i, phase, FP8) == op_bytes(MODEL, i, phase, BF16)
    assert op_flops(MODEL, 0, Phase.BACKWARD, FP8) == op_flops(MODEL, 0, Phase.BACKWARD, BF16)
    assert saved_bytes(MODEL, 0, FP8) == saved_bytes(MODEL, 0, BF16)
    schedules = [policies.build("streamed", MODEL, w, PLENTY) for w in (FP8, BF16)]
    copied = [[op.nbytes for op in schedule.ops if op.phase == Phase.COPY] for schedule in schedules]
    assert copied[0] == copied[1]


def test_a_file_says_so_and_files_of_other_steps_do_not() -> None:
    schedule = policies.build("streamed", MODEL, FP8, PLENTY)
    verify(schedule)
    assert codec.loads(codec.dumps(schedule)).workload.matmul == "fp8"
    assert "matmul" not in BF16.to_dict()


@pytest.mark.parametrize(
    "change, told",
    [
        ({"matmul": "fp4"}, "matmul 'fp4' is unknown; known are fp8"),
        ({"precision": "fp32"}, "fp8 products are made of bf16 activations, not at precision fp32"),
        ({"lora_rank": 4}, "fp8 products are of blocks whose own weights are trained"),
    ],
)
def test_steps_without_products_in_fp8_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(FP8, **change)  # type: ignore[arg-type]


def test_models_and_batches_without_them_are_refused_by_policies_and_by_the_verifier() -> None:
    mixture = presets.load("tiny-moe")
    latent = replace(MODEL, num_key_value_heads=4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    with pytest.raises(ModelError, match="latent attention's products are not made in fp8"):
        policies.build("streamed", latent, FP8, PLENTY)
    with pytest.raises(ModelError, match="tiny-moe: experts' products are not made in fp8"):
        policies.build("streamed", mixture, FP8, PLENTY)
    odd = replace(FP8, seq_len=24)
    with pytest.raises(ModelError, match="need a micro-batch's tokens, 24, to be a multiple of 16"):
        policies.build("streamed", MODEL, odd, PLENTY)
    with pytest.raises(ScheduleError, match="a micro-batch's tokens, 24"):
        verify(replace(policies.build("streamed", MODEL, FP8, PLENTY), workload=odd))
    with pytest.raises(ModelError, match="need intermediate_size, 40, to be"):
        policies.build("streamed", replace(MODEL, intermediate_size=40), FP8, PLENTY)

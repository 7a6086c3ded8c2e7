"""Models whose tokens attend to some tokens of a long sequence: what is short enough is attention to all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import MODELS, TINY

from schedules import policies
from schedules.flops import attention_flops
from schedules.model import ModelError, ModelSpec
from schedules.verify import ScheduleError, verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.plan import plan
from sim.whatif import longest_sequence

MODEL: ModelSpec = MODELS["glm-5"]  # which chooses 32 tokens
ROOM = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
SHORT, LONG = (Workload(micro_batch_size=1, seq_len=length) for length in (32, 33))
TOLD = "a token of a sequence of 33 would attend to 32 chosen ones, and choosing is not supported"


def test_sequences_are_as_long_as_what_a_token_attends_to_at_most() -> None:
    verify(policies.build("streamed", MODEL, SHORT, ROOM))
    with pytest.raises(ModelError, match=f"{TOLD}: give sequences of at most 32"):
        policies.build("streamed", MODEL, LONG, ROOM)


def test_a_schedule_file_of_longer_ones_does_not_verify() -> None:
    schedule = policies.build("streamed", replace(MODEL, index_topk=33), LONG, ROOM)
    with pytest.raises(ScheduleError, match=TOLD) as caught:
        verify(replace(schedule, model=MODEL))
    assert "give sequences of at most 32" in str(caught.value)


def test_no_plan_is_made_for_longer_ones() -> None:
    with pytest.raises(ModelError, match=TOLD):
        plan(MODEL, hardware.load("rtx4090"), seq_len=33, tokens_per_step=33)


def test_the_longest_sequence_that_can_be_trained_is_no_longer() -> None:
    model, machine = replace(MODEL, index_topk=2048), hardware.load("rtx4090")
    assert longest_sequence(model, machine, SHORT) == 2048
    assert longest_sequence(MODEL, machine, SHORT) == 0, "it is a multiple of 1,024"


def test_attention_in_chunks_is_for_sequences_of_one_chunk() -> None:
    model = MODELS["llama-4"]
    verify(policies.build("streamed", model, SHORT, ROOM))
    told = (
        "of a sequence of 33 would attend to those of its chunk of 32 alone, and attention in chunks is not supported"
    )
    with pytest.raises(ModelError, match=f"{told}: give sequences of at most 32"):
        policies.build("streamed", model, LONG, ROOM)
    verify(policies.build("streamed", replace(model, attention_chunk_size=0), LONG, ROOM))


def test_attention_costs_what_it_does_without_choosing() -> None:
    all_of_them = replace(MODEL, architecture="DeepseekV3ForCausalLM", index_topk=0)
    assert attention_flops(MODEL, 1, SHORT) == attention_flops(all_of_them, 1, SHORT) > 0
    assert MODEL.total_params == all_of_them.total_params


def test_only_latent_attention_is_chosen_for() -> None:
    with pytest.raises(ModelError, match="index_topk is 8, and kv_lora_rank is 0"):
        replace(TINY, index_topk=8)

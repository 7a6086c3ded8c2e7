"""What LLM.Q (IST-DASLab/llmq) has published of single GPUs: the one system that tells its runs to the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from analysis.published_point import Point

_README = "README.md: two digits, or the hours to a billion tokens where those have more"
_WHERE = {
    "h100": "benchmarks/H100x1.md, median of steps 1 to 5",
    "rtxpro6000": "benchmarks/Pro6000x1.md, median of steps 1 to 5",
    "rtx4090": "benchmarks/4090x1.md, median of steps 1 to 5",
    "rtx5060ti": "benchmarks/5060Ti.md, median of steps 1 to 5",
    "rtx5090": f"{_README}; 524,288 tokens a step as it says of all, though the command beside these accumulates 8 "
    "times, which would change 1 % at most, and of the 7B 7 to 17 %",
    "l40s": _README,
}


def _source(machine: str) -> str:
    return f"IST-DASLab/llmq b77d969, {_WHERE[machine]}"


def _llmq(
    machine: str, model: str, micro: int, accumulation: int, value: float, *, offload: str = "nothing",
    activations: str = "keep", recompute: str = "none", matmul: str | None = None,
) -> Point:  # fmt: skip
    return Point(
        system="LLM.Q" if matmul is None else f"LLM.Q, {matmul}", policy="llmq", model=model, machine=machine,
        value=value, unit="tokens/s",
        micro_batch_size=micro, accumulation=accumulation, precision="bf16_16bit", grad_clip=1.0, recompute=recompute,
        matmul=matmul,
        knobs={"offload": offload, "activations": activations},
        source=_source(machine),
    )  # fmt: skip


def _llmq_in_8_bits(machine: str, model: str, micro: int, accumulation: int, value: float) -> Point:
    return Point(
        system="LLM.Q, fp8", model=model, machine=machine, value=value, unit="tokens/s", micro_batch_size=micro,
        accumulation=accumulation, source=_source(machine), lacking=_EIGHT_BIT_WEIGHTS,
    )  # fmt: skip


_TYPING_ERROR = "its command line says e4m3; its figure, and its place under bf16, say bf16"
_NEARLY_WHOLE = "recompute-ffn with recompute-att, all but one product of a block, is taken as the whole block"
_SCALED_ONCE = "weights are scaled once a step there, here for each of 128 micro-batches: some 2 s of 32"
_INPUTS_ALONE = "blocks' inputs leave the device and its moments stay, which leave first here"
_EIGHT_BIT_WEIGHTS = "no policy models this: weights in 8 bits on the device, their bf16 master on the host"
_EARLY = (
    "of a release of autumn 2025, when offloading was slower: a 7B on an RTX 4090 ran at 1,900 tokens/s in September, "
    "with other choices, and later at 2,777"
)
_SLOWER_THAN_ITS_PRODUCTS = (
    "compute-bound: steps of the same models are predicted within 2 % on an RTX 4090, which has the same chip; what an "
    "L40S sustains in training is less than the 230 TFLOP/s that its products attained alone"
)
_NOT_QKV = "recompute-ffn and recompute-norm, with recompute-qkv, which has no equal here"


_ALL_BUT_GRADIENTS: Mapping[str, str] = {"offload": "weights", "activations": "recompute"}

LLMQ: tuple[Point, ...] = (
    _llmq("h100", "qwen2.5-0.5b", 32, 16, 149626),
    _llmq("h100", "qwen2.5-1.5b", 32, 16, 58869),
    _llmq("h100", "qwen2.5-3b", 16, 32, 30915),
    _llmq("h100", "qwen2.5-7b", 4, 128, 13818),
    _llmq("h100", "qwen2.5-14b", 8, 64, 6329, offload="inputs", recompute="mlp"),
    _llmq("rtxpro6000", "qwen2.5-0.5b", 32, 16, 86217),
    _llmq("rtxpro6000", "qwen2.5-1.5b", 32, 16, 32421),
    _llmq("rtxpro6000", "qwen2.5-3b", 16, 32, 17183),
    _llmq("rtxpro6000", "qwen2.5-7b", 8, 64, 8079),
    _llmq("rtxpro6000", "qwen2.5-14b", 4, 128, 4035, offload="states"),
    _llmq("rtx4090", "qwen2.5-0.5b", 16, 32, 39846),
    _llmq("rtx4090", "qwen2.5-1.5b", 4, 128, 14072),
    _llmq("rtx4090", "qwen2.5-3b", 4, 128, 7005, offload="states", recompute="pointwise"),
    replace(
        _llmq("rtx4090", "qwen2.5-7b", 16, 32, 2777, offload="weights", activations="recompute"), note=_TYPING_ERROR
    ),
    _llmq("rtx4090", "qwen2.5-14b", 32, 16, 1349, offload="gradients", activations="recompute"),
    _llmq("rtx5060ti", "qwen2.5-0.5b", 10, 51, 13011),
    replace(_llmq("rtx5060ti", "qwen2.5-1.5b", 8, 64, 3899, activations="recompute"), assumed=_NEARLY_WHOLE),
    replace(_llmq("rtx5060ti", "qwen2.5-3b", 16, 32, 2013, offload="weights", recompute="mlp"), assumed=_NOT_QKV),
    _llmq("rtx5060ti", "qwen2.5-7b", 32, 16, 889, offload="gradients", activations="recompute"),
    *(
        _llmq(machine, f"qwen2.5-{size}", micro, accumulation, value, matmul="fp8")
        for machine, size, micro, accumulation, value in (
            ("h100", "0.5b", 32, 16, 164612),
            ("h100", "1.5b", 32, 16, 72990),
            ("h100", "3b", 16, 32, 40380),
            ("rtxpro6000", "0.5b", 32, 16, 95936),
            ("rtxpro6000", "1.5b", 32, 16, 40327),
            ("rtxpro6000", "3b", 16, 32, 23103),
            ("rtxpro6000", "7b", 8, 64, 11533),
            ("rtx4090", "0.5b", 16, 32, 47645),
            ("rtx5060ti", "0.5b", 12, 42, 16602),
        )
    ),
    replace(_llmq("rtx4090", "qwen2.5-1.5b", 4, 128, 20334, matmul="fp8"), why=_SCALED_ONCE),
    replace(
        _llmq("h100", "qwen2.5-7b", 16, 32, 19149, offload="inputs", recompute="mlp", matmul="fp8"),
        assumed=_INPUTS_ALONE,
    ),
    replace(
        _llmq("rtx5060ti", "qwen2.5-1.5b", 8, 64, 5768, offload="inputs", activations="recompute", matmul="fp8"),
        assumed=_INPUTS_ALONE,
    ),
    _llmq_in_8_bits("h100", "qwen2.5-14b", 16, 32, 9365),
    _llmq_in_8_bits("rtxpro6000", "qwen2.5-14b", 8, 64, 6026),
    _llmq_in_8_bits("rtx4090", "qwen2.5-3b", 4, 128, 10668),
    _llmq_in_8_bits("rtx4090", "qwen2.5-7b", 16, 32, 4333),
    _llmq_in_8_bits("rtx4090", "qwen2.5-14b", 32, 16, 2001),
    _llmq_in_8_bits("rtx5060ti", "qwen2.5-3b", 16, 32, 3129),
    _llmq_in_8_bits("rtx5060ti", "qwen2.5-7b", 32, 16, 1456),
    _llmq("rtx5090", "qwen2.5-0.5b", 8, 64, 55006),
    _llmq("rtx5090", "qwen2.5-0.5b", 16, 32, 55006),
    *(
        replace(
            _llmq("rtx5090", f"qwen2.5-{size}", micro, 512 // micro, value, activations="recompute", matmul=matmul),
            assumed=_NEARLY_WHOLE,
        )
        for size, micro, value, matmul in (
            ("0.5b", 32, 48031, None),
            ("1.5b", 8, 16972, None),
            ("3b", 4, 8198, None),
            ("3b", 8, 8600, None),
            ("0.5b", 32, 54113, "fp8"),
            ("3b", 4, 12980, "fp8"),
            ("3b", 8, 12980, "fp8"),
        )
    ),
    *(
        replace(
            _llmq("rtx5090", "qwen2.5-7b", micro, 512 // micro, value, **_ALL_BUT_GRADIENTS, matmul=matmul),
            assumed=f"blocks' inputs stay on the device, and leave it here; {_EARLY}",
        )
        for micro, value, matmul in ((4, 2503, None), (8, 3086, None), (4, 3193, "fp8"), (8, 4409, "fp8"))
    ),
    _llmq("rtx5090", "qwen2.5-0.5b", 8, 64, 69444, matmul="fp8"),
    _llmq("rtx5090", "qwen2.5-0.5b", 16, 32, 68871, matmul="fp8"),
    _llmq("rtx5090", "qwen2.5-1.5b", 8, 64, 27056, matmul="fp8"),
    replace(_llmq("l40s", "qwen2.5-0.5b", 16, 32, 43860), why=_SLOWER_THAN_ITS_PRODUCTS),
    _llmq("l40s", "qwen2.5-1.5b", 8, 64, 17000),
    _llmq("l40s", "qwen2.5-3b", 4, 128, 8900),
    replace(_llmq("l40s", "qwen2.5-7b", 4, 128, 3900, offload="states", recompute="pointwise"), assumed=_EARLY),
    replace(_llmq("l40s", "qwen2.5-14b", 16, 32, 1500, **_ALL_BUT_GRADIENTS), assumed=_EARLY),
    _llmq("l40s", "qwen2.5-0.5b", 32, 16, 46948, matmul="fp8"),
    _llmq("l40s", "qwen2.5-1.5b", 8, 64, 20000, matmul="fp8"),
    _llmq("l40s", "qwen2.5-3b", 4, 128, 11000, matmul="fp8"),
    _llmq_in_8_bits("l40s", "qwen2.5-7b", 4, 128, 5200),
    _llmq_in_8_bits("l40s", "qwen2.5-14b", 16, 32, 1700),
)

"""What others have published about the speed of a training step: every number with its run and its source.

Rates of links, memories and drives are not here: they stand in the hardware profiles. Sizes of the largest model
that fits somewhere are no speeds and are not here either.
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.llmq_points import LLMQ
from analysis.published_point import RECOMPUTED, SIX_N, Point
from schedules.schedule import Knob

_PAPER = "MegaTrain paper (arXiv 2604.05091, April 2026), from a digest; not re-read"
_LLMQ = "IST-DASLab/llmq, benchmarks/4090x1.md and its configurations"
_SUPER = "DeepSpeed blog on SuperOffload (blogs/deepspeed-superoffload), PyTorch blog of the same title"
_ADAM_PAPER = "ZeRO-Offload paper (USENIX ATC 2021), recalled; not re-read"
_UNKNOWN_BATCH = "batch unpublished: the largest that fits is assumed"
# the source: bf16 master and gradients, clipping as transformers sets it; of December 2025, eight months before 0.19.5;
# checkpoints as LLaMA-Factory (ff6d4d1, hparams/model_args.py: use_reentrant_gc) makes them where its files do not say
_LLMQ_ZERO3: Mapping[str, Knob] = {"master": "weights", "version": "0.19.4", "reentrant": True}
_LLMQ_ZERO2: Mapping[str, Knob] = {"master": "weights", "overlap_comm": True, "reentrant": True}
_MULTI = "more than one GPU"
_NO_POLICY = "no policy models this system"
_NO_PROFILE = "no profile of that machine"

_ZERO3 = (
    "the assumed batch is probably too large: the policy computes the loss in chunks, the usual baseline holds all "
    "logits; DeepSpeed up to 0.19.4 also copied gradients blocking and unpinned"
)
_PARTS = (
    "the sum agrees better than its parts: the thread that stores gradients into fresh pages is predicted a third too "
    "slow, at a rate measured on another machine, and clipping, at DRAM bandwidth, seven times too fast; fresh pages "
    "are counted since this step was predicted at a third of its time without them, so that it is no evidence"
)
_SLOWER_KERNELS = (
    "compute-bound: kernels fill the predicted step, products at 0.68 of the peak three quarters of it; what took "
    "longer is not known, slower products or gaps between eager kernels"
)

_LOHAN = "RC4ML/LoHan, evaluation_data.md"
_LOHAN_HOST = ("host.memory=768GB", "host.memory_bandwidth=300GB/s", "host.cores=52")  # two Xeon Gold 5320, 16 channels
_ONE_DRIVE = ("nvme.read=7GB/s", "nvme.write=4.2GB/s", "nvme.capacity=3.84TB")  # a P5510
_LOHAN_KNOBS: Mapping[str, Knob] = {"ssd": True, "inputs": "host"}
_TWELVE_DRIVES = ("nvme.read=84GB/s", "nvme.write=50.4GB/s", "nvme.capacity=46TB")
_LOHAN_MODEL = (
    "a 13B model of another shape, without a head; drives and memory by their data sheets; which activations are "
    "swapped and how TFLOP/s are counted are unpublished"
)
_FUYOU = _LOHAN_MODEL + "; batch unpublished in the abstract, and the machine: that of the paper's second version"


MEGATRAIN: tuple[Point, ...] = (
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="gh200",
        micro_batch_size=158, grad_clip=1.0, value=284, unit="TFLOP/s", formula=SIX_N, source=_PAPER,
        same_run_as="27.05 s", why=_SLOWER_KERNELS,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="gh200",
        micro_batch_size=158, grad_clip=1.0, value=27.05, unit="s", source=_PAPER,
        note="by the formula this is 273 TFLOP/s: the two published numbers differ by 4 %", why=_SLOWER_KERNELS,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-14b", machine="gh200",
        micro_batch_size=96, grad_clip=1.0, value=266, unit="TFLOP/s", formula=SIX_N, source=_PAPER,
        note="264 in another place of the same paper", why=_SLOWER_KERNELS,
    ),
    Point(
        system="MegaTrain without double buffering", model="qwen2.5-14b", machine="gh200",
        micro_batch_size=96, grad_clip=1.0, value=183, unit="TFLOP/s", formula=SIX_N, source=_PAPER,
        lacking=_NO_POLICY + ": the released code has no switch for it",
    ),
    Point(
        system="ZeRO-3 offload", policy="zero3_offload", model="qwen2.5-14b", machine="gh200",
        value=143, unit="TFLOP/s", formula=SIX_N, source=_PAPER,
        assumed=_UNKNOWN_BATCH + "; DeepSpeed's configuration is unpublished too",
        why="the prediction passes it near 6 sequences; " + _ZERO3,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="a100-pcie",
        grad_clip=1.0, value=128, unit="TFLOP/s", formula=SIX_N, source=_PAPER, assumed=_UNKNOWN_BATCH,
        note="122 in another place of the same paper",
    ),
    Point(
        system="Gemini", policy="gemini", model="qwen2.5-7b", machine="a100-pcie",
        value=53, unit="TFLOP/s", formula=SIX_N, source=_PAPER, assumed=_UNKNOWN_BATCH,
        why="the prediction passes it near 8 sequences; the usual baseline holds all logits, which the policy does not",
    ),
    Point(
        system="ZeRO-3 offload", policy="zero3_offload", model="qwen2.5-7b", machine="a100-pcie",
        value=36, unit="TFLOP/s", formula=SIX_N, source=_PAPER,
        assumed=_UNKNOWN_BATCH + "; DeepSpeed's configuration is unpublished too",
        why="the prediction passes it near 5 sequences; " + _ZERO3,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-7b", machine="h100",
        grad_clip=1.0, value=272, unit="TFLOP/s", formula=SIX_N, source=_PAPER, assumed=_UNKNOWN_BATCH,
    ),
    Point(
        system="MegaTrain", policy="megatrain_released", model="qwen2.5-14b", machine="mi355x",
        micro_batch_size=16, grad_clip=1.0, value=13.3, unit="s",
        source="a user's log of the released code, before the pinned flat copies", note=_PARTS,
    ),
    Point(
        system="MegaTrain, data parallel", model="not named", machine="several GPUs", value=22.9, unit="s",
        source="the released code's own benchmark; 27.2 s on one GPU", lacking=_MULTI + "; model and machine not named",
    ),
)  # fmt: skip

DEEPSPEED: tuple[Point, ...] = (
    Point(
        system="ZeRO-3 offload (LLaMA-Factory)", policy="zero3_offload", model="qwen2.5-7b", machine="rtx4090",
        micro_batch_size=32, accumulation=16, grad_clip=1.0, value=2523, unit="tokens/s", source=_LLMQ,
        knobs=_LLMQ_ZERO3,
    ),
    Point(
        system="ZeRO-3 offload (LLaMA-Factory)", policy="zero3_offload", model="qwen2.5-14b", machine="rtx4090",
        micro_batch_size=20, accumulation=26, grad_clip=1.0, value=1135, unit="tokens/s", source=_LLMQ,
        knobs=_LLMQ_ZERO3,
    ),
    Point(
        system="ZeRO-2 offload (LLaMA-Factory)", policy="zero_offload", model="qwen2.5-3b", machine="rtx4090",
        micro_batch_size=48, accumulation=11, grad_clip=1.0, value=5448, unit="tokens/s", source=_LLMQ,
        knobs=_LLMQ_ZERO2, note="the source: slightly faster than ZeRO-3 with 64 sequences",
    ),
    Point(
        system="ZeRO-3 parameter offload, LoRA", model="llama-3.1-8b", machine="h100", value=21.65, unit="tokens/s",
        source="Soup, docs/performance-and-quantization.md", lacking=_NO_POLICY + "; its batch is only called small",
    ),
    Point(
        system="ZeRO-Offload", model="10B", machine="V100 32 GB", value=40, unit="TFLOP/s",
        source="ZeRO-Offload paper, abstract", lacking=_NO_PROFILE + "; batch unpublished",
    ),
    Point(
        system="plain PyTorch", model="1.4B", machine="V100 32 GB", value=30, unit="TFLOP/s",
        source="ZeRO-Offload paper, abstract", lacking=_NO_PROFILE + "; batch unpublished",
    ),
    Point(
        system="ZeRO-3 offload over ZeRO-2 offload", model="13B", machine="V100 32 GB", value=2.3, unit="x",
        source="DeepSpeed, docs/_posts/2021-03-08-zero3-offload.md", lacking=_NO_PROFILE + "; batch unpublished",
    ),
    Point(
        system="ZeRO-3 offload, per GPU", model="not named", machine="512 x V100", value=50, unit="TFLOP/s",
        source="DeepSpeed, docs/_posts/2021-03-08-zero3-offload.md", lacking=_MULTI,
    ),
    Point(
        system="ZeRO-3: gradient copies no longer blocking", model="1.5B and 3B", machine="4 x RTX 4080S",
        value=1.3, unit="x", source="DeepSpeed pull request 8207: backward 18-28 % shorter", lacking=_MULTI,
    ),
    Point(
        system="ZeRO-Infinity, all GPUs", model="up to 1T", machine="512 x V100", value=25000, unit="TFLOP/s",
        source="ZeRO-Infinity paper (arXiv 2104.07857)", lacking=_MULTI,
    ),
    Point(
        system="ZeRO-Offload++ over ZeRO-3 offload", model="OPT-30B", machine="8 x H100", value=6, unit="x",
        source="DeepSpeed, blogs/deepspeed-offloadpp", lacking=_MULTI,
    ),
    Point(
        system="ZeRO-Offload++ over ZeRO-3 offload", model="OPT-13B", machine="8 x A100 40 GB", value=3, unit="x",
        source="DeepSpeed, blogs/deepspeed-offloadpp", lacking=_MULTI,
    ),
    Point(
        system="SuperOffload", policy="superoffload", model="qwen3-14b", machine="gh200",
        micro_batch_size=4, seq_len=4096, value=600, unit="TFLOP/s", formula=RECOMPUTED, source=_SUPER,
        assumed='"up to"; said of GPT-OSS-20B and Qwen3-14B together; the formula is that of its examples',
    ),
    Point(
        system="SuperOffload (released)", policy="superoffload", model="qwen3-14b", machine="gh200",
        micro_batch_size=4, seq_len=4096, value=500, unit="TFLOP/s", formula=RECOMPUTED,
        source="DeepSpeedExamples, training/DeepSpeed-SuperOffload README; the formula: finetune_zero3.py there",
        assumed='"up to about"; said of three models together',
    ),
    Point(
        system="SuperOffload over ZeRO-Offload", model="not named", machine="GH200", value=2, unit="x",
        source="SuperOffload paper (arXiv 2509.21271), average; 2.5 at most", lacking="model and batch not named",
    ),
    Point(
        system="SuperOffload, all its parts over none", model="not named", machine="GH200", value=2.06, unit="x",
        source="SuperOffload paper (arXiv 2509.21271), ablation", lacking="model and batch not named",
    ),
    Point(
        system="SuperOffload with Ulysses", model="13B, 1M tokens", machine="8 x GH200", value=544, unit="TFLOP/s",
        source="SuperOffload paper: 55 % of 989 TFLOP/s", lacking=_MULTI,
    ),
    Point(
        system="ZeRO-Offload", model="Llama-2-7B", machine="4 x A100", value=7, unit="s",
        source="DeepSpeed, blogs/deepspeed-zenflow", lacking=_MULTI,
    ),
    Point(
        system="ZeRO-Offload", model="Qwen2.5-3B", machine="2 x A100 40 GB", value=2.5, unit="s", micro_batch_size=8,
        source="independent table, two EPYC 7742; 2.50-2.89", lacking=_MULTI,
    ),
    Point(
        system="ZenFlow", model="Qwen2.5-3B", machine="2 x A100 40 GB", value=1.23, unit="s", micro_batch_size=8,
        source="independent table, two EPYC 7742; 1.23-1.42", lacking=_MULTI,
    ),
    Point(
        system="ZenFlow over ZeRO-Offload", model="not named", machine="not named", value=5, unit="x",
        source="ZenFlow paper (arXiv 2505.12242), up to", lacking="model, machine and batch not named",
    ),
    Point(
        system="ZenFlow over ZeRO-Infinity", model="not named", machine="not named", value=6.3, unit="x",
        source="ZenFlow paper (arXiv 2505.12242), up to", lacking="model, machine and batch not named",
    ),
)  # fmt: skip

OTHERS: tuple[Point, ...] = (
    Point(
        system="RoundPipe", policy="roundpipe", model="llama-3.1-8b", machine="rtx4090", value=3142, unit="tokens/s",
        source="RoundPipe README", changes=("host.memory=512GiB",),
        assumed=_UNKNOWN_BATCH + ", 1,024 tokens a sequence, and 512 GiB of host memory",
        why="its benchmark (benchmark/train.py) lets fp16 products add up in fp16, twice the rate counted here",
    ),
    Point(
        system="flextrain", policy="resident", model="llama-3.2-1b", machine="rtx5090", micro_batch_size=4,
        accumulation=8, seq_len=2048, precision="bf16_16bit", knobs={"activations": "keep"}, value=21856,
        unit="tokens/s", source="als244/flextrain, docs/verified_runs.md; 163.7 TFLOP/s",
        assumed="batch unpublished, and sequences are packed up to 2,048 tokens; all of it fits the device, so that "
        "nothing is in question of what its solver places",
    ),
    Point(
        system="flextrain", model="llama-3.1-8b", machine="rtx5090", value=3723, unit="tokens/s",
        source="als244/flextrain, docs/verified_runs.md; 168.7 TFLOP/s", formula="6N + causal attention",
        lacking=_NO_POLICY + ": every tensor placed by a solver",
    ),
    Point(
        system="LoHan, one drive", policy="lohan", model="llama-2-13b", machine="rtx4090", micro_batch_size=64,
        value=70.3, unit="TFLOP/s", source=_LOHAN, knobs=_LOHAN_KNOBS, precision="bf16_fp32",
        changes=(*_LOHAN_HOST, *_ONE_DRIVE), assumed=_LOHAN_MODEL, note="37.5 with 32 sequences, 53.1 with 48",
    ),
    Point(
        system="LoHan, twelve drives", policy="lohan", model="llama-2-13b", machine="rtx4090", micro_batch_size=64,
        value=155.8, unit="TFLOP/s", source=_LOHAN, knobs=_LOHAN_KNOBS, precision="bf16_fp32",
        changes=(*_LOHAN_HOST, *_TWELVE_DRIVES), assumed=_LOHAN_MODEL,
        note="156 in the abstract of the first version, Fuyou (arXiv 2403.06504 v1)",
        why="compute-bound, every block runs forward again; with the forward counted twice it would be 143",
    ),
    Point(
        system="ZeRO-Infinity", policy="zero_infinity", model="llama-2-13b", machine="rtx4090", value=45,
        unit="TFLOP/s", source="arXiv 2403.06504 v1", changes=(*_LOHAN_HOST, *_TWELVE_DRIVES), assumed=_FUYOU,
        why="here the drives give their full rate, which DeepSpeed's default I/O settings do not ask of them",
    ),
    Point(
        system="LoHan over the best baseline", model="13B", machine="RTX 4090", value=2.32, unit="x",
        source="arXiv 2403.06504 v2", lacking="drives and batch unpublished",
    ),
    Point(
        system="GreedySnake over ZeRO-Infinity", model="65B", machine="A100", value=1.96, unit="x",
        source="arXiv 2512.17570", lacking="drives and batch unpublished",
    ),
    Point(
        system="GreedySnake over ZeRO-Infinity", model="175B", machine="A100", value=2.53, unit="x",
        source="arXiv 2512.17570", lacking="drives and batch unpublished",
    ),
    Point(
        system="STRONGHOLD over its baselines", model="not named", machine="V100 32 GB", value=3.7, unit="x",
        source="SC 2022, pap381; 1.2-3.7", lacking=_NO_PROFILE,
    ),
    Point(
        system="Mobius over DeepSpeed", model="not named", machine="4-8 x RTX 3090 Ti", value=5.1, unit="x",
        source="ASPLOS 2023, recalled; 3.8-5.1", lacking=_MULTI,
    ),
    Point(
        system="TERAIO over ZeRO-Offload and ZeRO-Infinity", model="not named", machine="not named", value=1.47,
        unit="x", source="arXiv 2506.06472, mean", lacking="model, machine and batch not named",
    ),
    Point(
        system="10Cache over its baselines", model="not named", machine="not named", value=2.0, unit="x",
        source="arXiv 2511.14124, up to", lacking="model, machine and batch not named",
    ),
    Point(
        system="SSDTrain over conventional training", model="not named", machine="not named", value=1.31, unit="x",
        source="arXiv 2408.10013, up to", lacking="model, machine and batch not named",
    ),
    Point(
        system="LSP-Offload over its baselines", model="1.3B or 6.7B", machine="laptop 4 GB or RTX 4090", value=2.63,
        unit="x", source="arXiv 2406.10181; 33-62 % less time, the most of it",
        lacking="gradients are projected: another optimizer; batch unpublished",
    ),
    Point(
        system="GraceAdam over torch's CPU Adam", model="not named", machine="GH200", value=3.0, unit="x",
        source="SuperOffload, ASPLOS 2026; 1.3 over DeepSpeed's", lacking="an op, not a step",
    ),
    Point(
        system="torchao, no offload", model="1.1B vision transformer", machine="RTX 4070 Ti SUPER", value=1.27,
        unit="s", micro_batch_size=32, source="torchao, CPUOffloadOptimizer README", lacking="not a decoder",
    ),
    Point(
        system="torchao CPUOffloadOptimizer", model="1.1B vision transformer", machine="RTX 4070 Ti SUPER",
        value=1.52, unit="s", micro_batch_size=32, source="torchao, CPUOffloadOptimizer README",
        lacking="not a decoder",
    ),
    Point(
        system="ZeRO-Offload", model="1.1B vision transformer", machine="RTX 4070 Ti SUPER", value=3.13, unit="s",
        micro_batch_size=32, source="torchao, CPUOffloadOptimizer README", lacking="not a decoder",
    ),
    Point(
        system="TrainStream", model="1.8B, fp32", machine="RTX 5090 laptop", value=1.1, unit="s", micro_batch_size=8,
        seq_len=512, source="TrainStream 0.3.0, package page", lacking=_NO_PROFILE + " and no shape of the model",
    ),
    Point(
        system="TrainStream", model="3.6B", machine="RTX 5090 laptop", value=3.15, unit="s",
        source="TrainStream 0.3.0, package page", lacking=_NO_PROFILE + " and no shape of the model",
    ),
    Point(
        system="TrainStream, LoRA of rank 16", model="7B", machine="RTX 5090 laptop", value=1.25, unit="s",
        source="TrainStream 0.3.0, package page; 0.27 s with everything resident",
        lacking=_NO_PROFILE + " and no shape of the model",
    ),
    Point(
        system="Soup, streamed LoRA on NF4", model="8B", machine="RTX 3050 4 GB", value=119.6, unit="tokens/s",
        source="Soup, docs/performance-and-quantization.md", lacking=_NO_PROFILE,
    ),
    Point(
        system="prime-rl full_offload", model="Qwen3-30B-A3B", machine="8 x H200", value=3.96, unit="s",
        seq_len=8192, source="prime-rl pull request 3234; 1.75 s without offload", lacking=_MULTI,
    ),
    Point(
        system="prime-rl full_offload", model="Qwen3-30B-A3B", machine="8 x H200", value=5.73, unit="s",
        seq_len=16384, source="prime-rl pull request 3234; 5.17 s without offload", lacking=_MULTI,
    ),
    Point(
        system="Megatron HybridDeviceOptimizer, all offloaded", model="0.6B", machine="not named", value=1.68,
        unit="s", source="NeMo-RL pull request 3628; 0.752 s without, 1.19 s at half", lacking="machine not named",
    ),
    Point(
        system="PatrickStar", model="0.73B", machine="Ryzen 3700X", value=16, unit="TFLOP/s",
        source="Tencent/PatrickStar issue 67; 16-18, step 5.2-5.9 s", lacking="the GPU is not named",
    ),
)  # fmt: skip


def _adam(billions: float, seconds: float, machine: str, source: str) -> Point:
    return Point(
        system="CPU Adam alone", model=f"{billions:g}B", machine=machine, value=seconds, unit="s", source=source,
        lacking="an op, not a step; " + _NO_PROFILE,
    )  # fmt: skip


ADAM: tuple[Point, ...] = (
    *(
        _adam(billions, seconds, "DGX-2 host", _ADAM_PAPER)
        for billions, seconds in ((1, 0.22), (2, 0.51), (4, 1.03), (8, 2.41), (10, 2.57))
    ),
    _adam(11.6, 8.2, "not named", "DeepSpeed pull request 735; torch 56 s"),
    _adam(18, 10, "one of four 8 x A100 nodes", "DeepSpeed issue 6834: 72B over four nodes, overhead included"),
    _adam(1.35, 21.8, "Xeon Silver 4210R", "DeepSpeed issue 1635; the thread setting is suspected"),
)

POINTS: tuple[Point, ...] = (*MEGATRAIN, *DEEPSPEED, *LLMQ, *OTHERS, *ADAM)

# The step of the MI355X point, in the parts that its log tells apart, s.
MI355X_PHASES: Mapping[str, float] = {
    "forward": 0.57,
    "backward": 6.6,
    "gradient wait": 1.55,
    "clip": 1.9,
    "Adam": 1.2,
    "sync": 0.11,
    "rest": 1.2,
}

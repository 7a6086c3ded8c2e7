"""What else trains the same model on one GPU: plain PyTorch, resident, and DeepSpeed ZeRO-3 offload.

Both train a model of the transformers package with random weights, no dropout, scaled-dot-product attention, on
random tokens. Where a package is missing the row says so.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, ClassVar

import adam as adam_benchmark
import gpu_machine
import torch
from gpu_case import Case
from gpu_machine import Row
from gpu_steps import LASTS_S, MOST, STEPS, WARM_UP, first_counted, undisturbed
from torch import Tensor, nn

from megatrain.neighbours import Neighbours
from schedules import presets
from schedules.flops import model_flops_per_step
from schedules.model import ModelSpec

BUCKET = 250_000_000  # elements; more than a layer, as DeepSpeed's prefetch wants it
WARM = WARM_UP + 1  # steps before those that count: in the second torch records CUDA graphs, and the last is timed
PHASED_STEPS = 2  # after those that count, with the GPU idle between phases
# Of the host's memory per parameter, as the policy zero3_offload counts it with master=weights (the state that ours
# has) and with master=fp32 (as is usual): weights, sum of gradients, gradient, master, two moments in fp32.
ZERO3_HOST_BYTES = {"bf16": 2 + 2 + 2 + 2 + 8, "bf16_fp32": 2 + 2 + 4 + 4 + 8}


class LeftOut(Exception):
    """Why a rival cannot run here."""


class NotBegun(Exception):
    """Why DeepSpeed's engine of a model and a precision did not begin, whatever the batch."""


def builder(spec: ModelSpec) -> Callable[[], nn.Module]:
    """Makes the model as transformers has it, bf16, where the default device is.

    Whatever the package imports is imported here: within DeepSpeed's context, which replaces functions of torch, it
    cannot be.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except Exception as error:  # not installed, or of any package that it needs
        raise LeftOut(f"left out: transformers cannot be imported: {error}") from error
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        tie_word_embeddings=spec.tie_word_embeddings,
        attention_bias=spec.attention_bias,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    return lambda: LlamaForCausalLM(config).to(torch.bfloat16)


def tokens(case: Case, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (case.micro_batch_size, case.seq_len), device=gpu_machine.DEVICE)


def steps(case: Case, step: Callable[[], None]) -> Row:
    """Seconds of a step by the GPU's clock, nothing waiting between steps that the rival itself does not wait for."""
    spec, workload = presets.load(case.model), case.workload
    for _ in range(WARM):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        lasts_s = time.perf_counter() - begun
    count = max(STEPS, min(MOST, math.ceil(LASTS_S / max(lasts_s, 1e-6))))
    marks, neighbours = [gpu_machine.mark()], Neighbours(long_s=LASTS_S)
    with undisturbed():
        for _ in range(count):
            step()
            marks.append(gpu_machine.mark())
        torch.cuda.synchronize()
    disturbed = neighbours.told()
    counted = marks[first_counted(WARM_UP + count) - WARM_UP :]
    found = [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(counted)]
    median = statistics.median(found)
    return {
        "case": case.key,
        "model": case.model,
        "policy": case.policy,
        "tokens_per_step": workload.tokens_per_step,
        "step_s": {"median": median, "least": min(found), "most": max(found)},
        "tokens_per_s": workload.tokens_per_step / median,
        "model_TFLOP_s": model_flops_per_step(spec, workload) / median / 1e12,
        "gpu_peak_GB": torch.cuda.max_memory_allocated() / 1e9,
        "host_threads": torch.get_num_threads(),
        "disturbed": disturbed,
    }


def plain(case: Case) -> Row:
    """Everything on the GPU in bf16, moments too: precision bf16_16bit.

    The knob `compiled` is "blocks", each block by itself as torchtitan has it, or "graphs", the whole model with CUDA
    graphs (mode reduce-overhead), for steps that wait for launches.
    """
    spec = presets.load(case.model)
    gpu_machine.clear()
    build = builder(spec)
    with gpu_machine.DEVICE:
        model = build()
    if case.knobs.get("checkpointing"):
        model.gradient_checkpointing_enable()
    if case.knobs.get("compiled") == "blocks":
        for block in model.model.layers:
            block.compile()
    elif case.knobs.get("compiled") == "graphs":
        model.compile(mode="reduce-overhead")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        for _ in range(case.accumulation):
            batch = tokens(case, spec.vocab_size)
            if case.knobs.get("compiled") == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            (model(input_ids=batch, labels=batch).loss / case.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {**steps(case, step), "by": f"torch {torch.__version__}, transformers, AdamW(fused) with bf16 moments"}


class Zero3:
    """DeepSpeed's engine for a model and a precision: kept for all batches, as it begins slowly, and one to a process.

    What it replaces in torch, such as `nn.functional.linear`, stays replaced, and a list and a cache of its modules
    hold an engine's memory, of host and GPU, after its end: that goes with the process alone (version 0.19.8).
    """

    _begun: ClassVar[bool] = False
    _kept: ClassVar[tuple[tuple[str, str], Any] | None] = None

    @classmethod
    def kept(cls) -> tuple[str, str] | None:
        """Of which model and precision there is an engine."""
        return None if cls._kept is None else cls._kept[0]

    @classmethod
    def leaves_alone(cls, engine: tuple[str, str] | None) -> bool:
        """Whether this process may measure a row of that engine, of none if None."""
        return not cls._begun or (engine is not None and engine == cls.kept())

    @classmethod
    def engine(cls, case: Case, build: Callable[[], nn.Module]) -> Any:
        """The engine of the case's model and precision, set to its batch. Raises NotBegun."""
        of = (case.model, case.precision)
        assert cls.leaves_alone(of), "another process begins another engine"
        if not cls._begun:
            cls._begun = True
            try:
                cls._kept = of, _begun(case, build)
            except Exception as error:  # of any package that DeepSpeed is made of
                cause = f" (from {error.__cause__!r})" if error.__cause__ else ""
                raise NotBegun(f"{type(error).__name__}: {error}{cause}") from error
        assert cls._kept is not None
        _, engine = cls._kept
        engine.set_train_micro_batch_size(case.micro_batch_size)
        engine.set_train_batch_size(case.micro_batch_size * case.accumulation)
        return engine

    @classmethod
    def failed(cls) -> None:
        """What is left of a step would be in the way of the next."""
        cls._kept = None


def exactly_pinned(tensor: Tensor) -> Tensor:
    """A pinned copy of a tensor on the host, to stand in for DeepSpeed's.

    That asks torch, which rounds each block up to a power of two and keeps what is freed: a 7B would take 157 GB of the
    host and not 122. What it can be told to use instead (DS_PIN_MEMORY_BACKEND=native) keeps every parameter's first
    block for ever, 137 GB: a view holds its base, of which `data` knows nothing. Counted with version 0.19.8. On the
    GPU's side of the machine, where ours is.
    """
    return gpu_machine.as_trained(tensor).data


def _begun(case: Case, build: Callable[[], nn.Module]) -> Any:
    """A new engine. The package is installed."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if gpu_machine.DEVICE.type == "cuda":
        get_accelerator().pin_memory = exactly_pinned
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29511)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    adam_benchmark.load_deepspeed_kernel()
    gpu_machine.clear()  # its optimizer uses torch's number of threads
    config = settings(case, presets.load(case.model))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build()
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def zero3(case: Case, host_bytes: int) -> Row:
    """DeepSpeed, parameters and optimizer offloaded, checkpointing, settings as `settings` says them.

    What a step takes is measured undisturbed; the times of its phases come from more steps afterwards.
    """
    try:
        import deepspeed
    except Exception as error:  # not installed, or of any package that it needs
        raise LeftOut(f"left out: deepspeed cannot be imported: {error}") from error
    spec = presets.load(case.model)
    needed = spec.total_params * ZERO3_HOST_BYTES[case.precision]
    if needed > host_bytes:  # the system would end this process
        raise LeftOut(f"does not fit: {needed / 2**30:.1f} GiB of host memory, {host_bytes / 2**30:.1f} GiB available")
    build = builder(spec)
    phases: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}

    def at_once(name: str, work: Callable[[], Any]) -> Any:
        return work()

    def timed(name: str, work: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        value = work()
        torch.cuda.synchronize()
        phases[name].append(time.perf_counter() - begun)
        return value

    try:
        engine = Zero3.engine(case, build)
        torch.cuda.reset_peak_memory_stats()

        def step(do: Callable[[str, Callable[[], Any]], Any] = at_once) -> None:
            for _ in range(case.accumulation):
                batch = tokens(case, spec.vocab_size)
                loss = do("forward", lambda batch=batch: engine(input_ids=batch, labels=batch).loss)
                do("backward", lambda loss=loss: engine.backward(loss))
                do("step", engine.step)

        row = steps(case, step)
        for _ in range(PHASED_STEPS):
            step(timed)
    except Exception:
        Zero3.failed()
        raise
    return {
        **row,
        "by": f"deepspeed {deepspeed.__version__}",
        "settings": settings(case, spec),
        "phases_s": {name: sum(times) / PHASED_STEPS for name, times in phases.items()},
    }


def settings(case: Case, spec: ModelSpec) -> dict[str, Any]:
    """The usual configuration of ZeRO-3 offload, with overlap on, memory pinned and buckets above a layer.

    With precision "bf16" the optimizer's state is as ours: bf16 weights and no other master, fp32 moments.
    """
    pinned = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": case.micro_batch_size,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": case.precision == "bf16",
            "check_grad_overflow": False,  # a pass over all gradients that training in bf16 can do without
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": pinned,
            "offload_param": pinned,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1_000_000_000,
            "reduce_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 10 * spec.hidden_size,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        },
    }

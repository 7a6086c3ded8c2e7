"""What is asked of one training step, and how much memory there is for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from schedules.op import Tier
from schedules.whole_numbers import fault


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per parameter of weights, gradients and optimizer state, and bytes per activation element.

    Weights and gradients are what streams to and from the device. The state is what the optimizer alone
    reads: two fp32 moments (8 B), plus what the precision keeps of an fp32 master copy; or two bf16 moments (4 B); or
    two of 8 bits, with `state_per_block` bytes more for every STATE_BLOCK parameters of a layer. This is AdamW's state;
    `schedules.optimizer` has that of others.
    """

    name: str
    weight: int
    grad: int
    state: int
    activation: int
    moment: int = 4
    state_per_block: int = 0

    @property
    def per_param(self) -> float:
        """Bytes of training state per parameter: weight, gradient and optimizer state."""
        return self.weight + self.grad + self.state + self.state_per_block / STATE_BLOCK

    def state_bytes(self, params: int) -> int:
        """Bytes of the optimizer state of a layer with that many parameters."""
        return params * self.state + -(-params // STATE_BLOCK) * self.state_per_block


STATE_BLOCK = 256  # parameters that share a scale where moments are quantised

PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        # no master copy: bf16 weights are updated in place
        Precision(name="bf16", weight=2, grad=2, state=8, activation=2),
        # the bf16 weight is the upper half of an fp32 master, the state holds the lower 16 bits
        Precision(name="bf16_split", weight=2, grad=2, state=10, activation=2),
        # a whole fp32 master beside the bf16 weight
        Precision(name="bf16_fp32", weight=2, grad=2, state=12, activation=2),
        # moments in the parameters' type, as torch's optimizers have them
        Precision(name="bf16_16bit", weight=2, grad=2, state=4, activation=2, moment=2),
        # moments of 8 bits, and the largest of each in a block, fp32 (arXiv:2110.02861)
        Precision(name="bf16_8bit", weight=2, grad=2, state=2, activation=2, moment=1, state_per_block=8),
        Precision(name="fp32", weight=4, grad=4, state=8, activation=4),
    )
}

_LATER = ("task", "lora_rank", "recompute", "quantised", "matmul")  # fields that files written before them lack
ADAMW, MUON = OPTIMIZERS = ("adamw", "muon")
TASKS = ("train", "evaluate")
RECOMPUTED = ("none", "pointwise", "mlp")  # each includes the one before
QUANTISED = ("nf4",)  # see `schedules.quantised`
MATMUL = ("fp8",)  # see `schedules.fp8`


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step: `accumulation` micro-batches of `micro_batch_size` sequences of `seq_len` tokens.

    `precision` names a row of PRECISIONS, and `optimizer` one of OPTIMIZERS, see `schedules.optimizer`. `grad_clip` is
    the largest global gradient norm; None does not clip. The task is to train the model, or to evaluate its loss and
    nothing else. With `lora_rank` the model's own weights are frozen, and what is trained, or evaluated beside them,
    are adapters of that rank at every projection of its blocks but experts (LoRA, Hu et al., arXiv:2106.09685).
    `recompute` is what a block does not keep, though it keeps its activations, and computes again in its backward: with
    "pointwise" what takes no product of matrices, the outputs of its norms and of the MLP's gate; with "mlp" also all
    else that is as wide as the MLP, a chunk of tokens at a time. `quantised` is the format in which frozen blocks are
    kept, `schedules.quantised`; with None they are as they are computed with. `matmul` is the format in which blocks
    multiply by their matrices, `schedules.fp8`; with None it is that of the activations. Raises ValueError when a value
    has no meaning.
    """

    micro_batch_size: int
    accumulation: int = 1
    seq_len: int
    precision: str = "bf16"
    optimizer: str = ADAMW
    grad_clip: float | None = None
    task: str = "train"
    lora_rank: int | None = None
    recompute: str = "none"
    quantised: str | None = None
    matmul: str | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "accumulation", "seq_len"):
            _whole_number(name, getattr(self, name), least=1)
        _known_word("precision", self.precision, PRECISIONS)
        _known_word("optimizer", self.optimizer, OPTIMIZERS)
        _known_word("task", self.task, TASKS)
        _known_word("recompute", self.recompute, RECOMPUTED)
        if self.lora_rank is not None:
            _whole_number("lora_rank", self.lora_rank, least=1)
        if self.optimizer == MUON and self.lora_rank is not None:
            raise ValueError("muon trains weights, not adapters: leave out the lora_rank")
        if self.optimizer == MUON and self.bytes.state_per_block:
            raise ValueError(f"muon keeps a momentum of 16 or 32 bits: {self.precision} is for adamw")
        if self.quantised is not None:
            _known_word("quantised", self.quantised, QUANTISED)
            if self.trains == "weights":
                raise ValueError("what is quantised cannot be trained: give a lora_rank, or the task evaluate")
        if self.matmul is not None:
            _known_word("matmul", self.matmul, MATMUL)
            if self.bytes.activation != 2:
                raise ValueError(
                    f"{self.matmul} products are made of bf16 activations, not at precision {self.precision}"
                )
            if self.lora_rank is not None or self.quantised is not None:
                raise ValueError(f"{self.matmul} products are of blocks whose own weights are trained, in bf16")
        clip = self.grad_clip
        if clip is None:
            return
        if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 < clip <= sys.float_info.max:
            raise ValueError(f"grad_clip must be a positive finite number or None, not {clip!r}")

    @property
    def tokens_per_microbatch(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.accumulation * self.tokens_per_microbatch

    @property
    def microbatches(self) -> range:
        return range(self.accumulation)

    @property
    def trains(self) -> str:
        """What is trained: "weights", all of them, or "adapters" beside them, or "nothing"."""
        if self.task == "evaluate":
            return "nothing"
        return "weights" if self.lora_rank is None else "adapters"

    @property
    def multiplies_to_update(self) -> bool:
        """Whether the optimizer multiplies the matrices of blocks, which is then done on the device."""
        return self.optimizer == MUON

    @property
    def bytes(self) -> Precision:
        """Bytes per parameter and per activation element at this workload's precision."""
        return PRECISIONS[self.precision]

    def to_dict(self) -> dict[str, Any]:
        """All fields; those added to the language later only where they are not at their defaults."""
        usual = {field.name: field.default for field in fields(self) if field.name in _LATER}
        return {name: value for name, value in asdict(self).items() if name not in usual or value != usual[name]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        """The inverse of `to_dict`. Raises ValueError on a missing, unknown or meaningless field."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}; its fields are {', '.join(known)}")
        for name in ("micro_batch_size", "seq_len"):
            if name not in data:
                raise ValueError(f"{cls.__name__} lacks the field {name!r}")
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes a schedule may fill on each tier, and of device and host together, where these are one memory.

    No NVMe by default, and memories of their own. Raises ValueError on a negative number.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int = 0
    unified_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (number := getattr(self, field.name)) is not None:
                _whole_number(field.name, number, least=0, bounded=False)

    @property
    def device_and_host_bytes(self) -> int:
        """Bytes that may be filled on these two tiers together."""
        apart = self.device_bytes + self.host_bytes
        return apart if self.unified_bytes is None else min(apart, self.unified_bytes)

    def device_beside(self, host_bytes: int) -> int:
        """Bytes that may be filled on the device where so many are on the host: of one memory, what those leave."""
        if self.unified_bytes is None:
            return self.device_bytes
        return min(self.device_bytes, max(self.unified_bytes - host_bytes, 0))

    def of(self, tier: Tier) -> int:
        """Bytes that may be filled on a tier, whatever is on the others."""
        return {Tier.DEVICE: self.device_bytes, Tier.HOST: self.host_bytes, Tier.NVME: self.nvme_bytes}[tier]


def _whole_number(name: str, value: object, *, least: int, bounded: bool = True) -> None:
    if wrong := fault(value, least=least, bounded=bounded):
        raise ValueError(f"{name} {wrong}")


def _known_word(name: str, value: object, words: Iterable[str]) -> None:
    if value not in (known := list(words)):
        raise ValueError(f"{name} {value!r} is unknown; known are {', '.join(known)}")

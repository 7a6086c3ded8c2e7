"""Where training tokens come from, and in which order: text that every Python brings along, or random numbers.

Files of tokens are in `token_file`. A batch is a function of (seed, step) alone, so a run resumes at any step without
replaying those before. Training goes over all of a text before it comes back to any of it; an evaluation reads it from
its beginning.
"""

from __future__ import annotations

import functools
import math
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from schedules.errors import InputError
from schedules.workload import Workload

Numbers = np.ndarray[Any, Any]


class DataError(InputError):
    """There is too little text for one sequence, no file of tokens, or no batch of that number."""


class TokenSource(Protocol):
    """Batches by number, how many different tokens may occur in them, and which of these, if one does, ends a document
    that no token of another attends to or is predicted from.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def document_end(self) -> int | None: ...

    @property
    def sequences(self) -> int | None:
        """How many there are before the first comes again; None if none does."""
        ...

    @property
    def known_by(self) -> str:
        """What tells this text from another, in words."""
        ...

    def batch(self, step: int) -> Tensor:
        """int64 [accumulation, micro_batch_size, seq_len + 1] on the host: inputs and, one later, targets."""
        ...

    def learned(self, step: int) -> Tensor | None:
        """bool, as `batch`: of which tokens the loss is the mean, where they are predicted; None if of all."""
        ...


class _AllLearned:
    document_end = None

    def learned(self, step: int) -> Tensor | None:
        """See TokenSource."""
        return None


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A micro-batch [batch, seq + 1] as what is read and what is predicted, both contiguous [batch, seq]."""
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def shares(source: TokenSource, step: int, workload: Workload) -> Tensor:
    """What each target of a step counts for in its loss, float64 [accumulation, micro_batch_size, seq_len].

    They add up to 1, or are all 0 in a step that has nothing to learn.
    """
    learned = source.learned(step)
    if learned is None:
        return torch.full((*_of_a_step(workload), workload.seq_len), 1 / workload.tokens_per_step, dtype=torch.double)
    of_targets = learned[..., 1:].double()
    return of_targets / of_targets.sum().clamp(min=1)


def read_bytes(folder: Path, limit: int) -> Tensor:
    """Up to `limit` bytes of the folder's *.py files, one after another by name, as uint8 [bytes]."""
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return torch.from_numpy(np.frombuffer(bytes(text[:limit]), dtype=np.uint8).copy())


def standard_library() -> Path:
    """The folder of the running Python's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteText(_AllLearned):
    """Sequences of a text, a token per byte. Raises DataError if it is too short."""

    text: Tensor  # uint8 [bytes]
    workload: Workload
    seed: int = 0

    vocab_size = 256

    def __post_init__(self) -> None:
        if len(self.text) <= self.workload.seq_len:
            raise DataError(
                f"a text of {len(self.text)} bytes is too short for a sequence "
                f"of {self.workload.seq_len} tokens and the one that follows"
            )

    @property
    def sequences(self) -> int:
        """See TokenSource."""
        return sequences_in(len(self.text), self.workload)

    @property
    def known_by(self) -> str:
        """See TokenSource."""
        return known_by(len(self.text), zlib.crc32(self.text.numpy().data))

    def batch(self, step: int) -> Tensor:
        """See TokenSource."""
        begins = places(self.seed, step, len(self.text), self.workload)
        return self.text[begins[..., None] + torch.arange(self.workload.seq_len + 1)].long()


@dataclass(frozen=True, kw_only=True)
class RandomTokens(_AllLearned):
    """Independent, uniform tokens: nothing to learn, and every model's whole vocabulary."""

    vocab_size: int
    workload: Workload
    seed: int = 0

    sequences = None
    known_by = "random numbers"

    def batch(self, step: int) -> Tensor:
        """See TokenSource."""
        _require_number(self.seed, step)
        shape = (*_of_a_step(self.workload), self.workload.seq_len + 1)
        found = np.random.default_rng((self.seed, step)).integers(self.vocab_size, size=shape, dtype=np.int64)
        return torch.from_numpy(found)


def _of_a_step(workload: Workload) -> tuple[int, int]:
    return workload.accumulation, workload.micro_batch_size


def _require_number(seed: int, step: int) -> None:
    if step < 0 or seed < 0:
        raise DataError(f"steps and seeds count from 0, not step {step}, seed {seed}")


def whole_steps(source: TokenSource, workload: Workload) -> int:
    """How many steps read a text once, but for what is left of it. Raises DataError where not one does."""
    of_a_step = math.prod(_of_a_step(workload))
    if source.sequences is None or source.sequences < of_a_step:
        raise DataError(
            f"there are {source.sequences or 0:,} sequences of {workload.seq_len:,} tokens, too few for a step of "
            f"{of_a_step:,}: give a longer text, or shorter or fewer sequences"
        )
    return source.sequences // of_a_step


def sequences_in(tokens: int, workload: Workload) -> int:
    """How many sequences follow each other in so many tokens; the last one's last token is only predicted."""
    return (tokens - 1) // workload.seq_len


def places(seed: int, step: int, tokens: int, workload: Workload) -> Tensor:
    """Where the sequences of a step begin in a text of so many tokens, int64 [accumulation, micro_batch_size].

    A pass cuts the text into sequences that follow each other, from a random place on, and takes each once, in random
    order. Where nothing is trained they are taken as they come, and again from the beginning after the last.
    """
    sequences = sequences_in(tokens, workload)
    spare = tokens - sequences * workload.seq_len  # places at which the first may begin
    numbers, begins = _drawn(seed, step, sequences, spare, workload)
    return torch.from_numpy(begins + numbers * workload.seq_len)


def examples(seed: int, step: int, count: int, workload: Workload) -> Tensor:
    """Which of so many sequences are those of a step, int64 [accumulation, micro_batch_size]; in the same order."""
    return torch.from_numpy(_drawn(seed, step, count, 1, workload)[0])


def _drawn(seed: int, step: int, sequences: int, spare: int, workload: Workload) -> tuple[Numbers, Numbers]:
    """Which sequences of a pass are a step's, and at which of its `spare` places that pass begins."""
    _require_number(seed, step)
    shape = _of_a_step(workload)
    passes, numbers = np.divmod(np.arange(math.prod(shape)) + step * math.prod(shape), sequences)
    begins = np.zeros_like(numbers)
    if workload.task == "train":
        for number in np.unique(passes).tolist():
            begin, order = _pass(seed, number, sequences, spare)
            here = passes == number
            begins[here], numbers[here] = begin, order[numbers[here]]
    return numbers.reshape(shape), begins.reshape(shape)


@functools.lru_cache(maxsize=2)  # a step may end one and begin another
def _pass(seed: int, number: int, sequences: int, spare: int) -> tuple[int, Numbers]:
    """Where a pass over a text begins, and the order of its sequences."""
    # not torch's generator: on the CPU it reads only 32 bits of a seed, too few for both numbers
    chance = np.random.default_rng((seed, number))
    return int(chance.integers(spare)), chance.permutation(sequences)


def known_by(tokens: int, crc: int) -> str:
    """So many tokens, and the CRC-32 of their bytes, in words."""
    return f"{tokens:,} tokens, {crc:08x}"

"""Where training tokens come from: a file of them, text that every Python brings along, or random numbers.

A batch is a function of (seed, step) alone, so a run resumes at any step without replaying those before. Training goes
over all of a text before it comes back to any of it; an evaluation reads it from its beginning.
"""

from __future__ import annotations

import functools
import math
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from schedules.errors import InputError
from schedules.workload import Workload

CHECKED = 1 << 24  # tokens of a file looked at at a time


class DataError(InputError):
    """There is too little text for one sequence, no file of tokens, or no batch of that number."""


class TokenSource(Protocol):
    """Batches by number, and how many different tokens may occur in them."""

    @property
    def vocab_size(self) -> int: ...

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


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A micro-batch [batch, seq + 1] as what is read and what is predicted, both contiguous [batch, seq]."""
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


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
class ByteText:
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
        return _sequences_in(len(self.text), self.workload)

    @property
    def known_by(self) -> str:
        """See TokenSource."""
        return _known_by(self.text.numpy())

    def batch(self, step: int) -> Tensor:
        """See TokenSource."""
        places = _places(self.seed, step, len(self.text), self.workload)
        return self.text[places[..., None] + torch.arange(self.workload.seq_len + 1)].long()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """Sequences of a `.npy` file of token numbers, one dimension, of any integer type.

    The file is mapped: it may be larger than memory. All of it is looked at once, so that no token is met hours later
    that a vocabulary of `vocab_size` does not have. Raises DataError for one, and for a file that is missing, too
    short, or none of tokens.
    """

    path: Path
    vocab_size: int
    workload: Workload
    seed: int = 0

    def __post_init__(self) -> None:
        tokens = self._tokens
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(f"{self.path} holds {tokens.dtype} {list(tokens.shape)}, not integers in one dimension")
        if len(tokens) <= self.workload.seq_len:
            raise DataError(
                f"{self.path} has {len(tokens)} tokens, too few for a sequence of {self.workload.seq_len} and the one "
                "that follows"
            )
        for start in range(0, len(tokens), CHECKED):
            part = tokens[start : start + CHECKED]
            if part.min() < 0 or part.max() >= self.vocab_size:
                at = int(np.argmax((part < 0) | (part >= self.vocab_size)))
                raise DataError(
                    f"{self.path} holds token {part[at]} at place {start + at:,}, and the model's vocabulary is 0 to "
                    f"{self.vocab_size - 1}: make the file with this model's tokenizer"
                )

    @functools.cached_property
    def _tokens(self) -> np.ndarray[Any, Any]:
        try:
            found = np.load(self.path, mmap_mode="r")
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None
        # numpy takes what it does not know for a pickle, and believes a header
        except (ValueError, EOFError, BadZipFile, TokenError, LookupError, OverflowError, TypeError):
            found = None
        if not isinstance(found, np.ndarray):
            what = "no whole .npy file" if found is None else "an archive of arrays"
            raise DataError(f"{self.path} is {what}: give one array of token numbers, saved with numpy.save")
        return found

    @property
    def sequences(self) -> int:
        """See TokenSource."""
        return _sequences_in(len(self._tokens), self.workload)

    @property
    def known_by(self) -> str:
        """See TokenSource."""
        return _known_by(self._tokens)

    def batch(self, step: int) -> Tensor:
        """See TokenSource."""
        length = self.workload.seq_len + 1
        places = _places(self.seed, step, len(self._tokens), self.workload)
        found = np.stack([self._tokens[place : place + length] for place in places.flatten().tolist()]).astype(np.int64)
        return torch.from_numpy(found.reshape(*places.shape, length))


def from_file(path: Path, vocab_size: int, workload: Workload, seed: int = 0) -> TokenFile | ByteText:
    """A .npy file of token numbers; or a .txt file, a token per byte, for a model whose vocabulary is that.

    Raises DataError for a file that is missing, or is not of this vocabulary.
    """
    if path.suffix != ".txt":
        return TokenFile(path=path, vocab_size=vocab_size, workload=workload, seed=seed)
    if vocab_size != ByteText.vocab_size:
        raise DataError(
            f"{path} is text, and the model's vocabulary is {vocab_size} tokens, not {ByteText.vocab_size} bytes: make "
            "a .npy file of it with the model's tokenizer, as docs/training.md shows"
        )
    try:
        text = np.fromfile(path, dtype=np.uint8)
        return ByteText(text=torch.from_numpy(text), workload=workload, seed=seed)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
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


def _sequences_in(tokens: int, workload: Workload) -> int:
    """How many sequences follow each other in so many tokens; the last one's last token is only predicted."""
    return (tokens - 1) // workload.seq_len


def _places(seed: int, step: int, tokens: int, workload: Workload) -> Tensor:
    """Where the sequences of a step begin in a text of so many tokens, int64 [accumulation, micro_batch_size].

    A pass cuts the text into sequences that follow each other, from a random place on, and takes each once, in random
    order. Where nothing is trained they are taken as they come, and again from the beginning after the last.
    """
    _require_number(seed, step)
    shape, sequences = _of_a_step(workload), _sequences_in(tokens, workload)
    numbers = np.arange(math.prod(shape)) + step * math.prod(shape)
    passes, numbers = np.divmod(numbers, sequences)
    places = numbers * workload.seq_len
    if workload.task == "train":
        spare = tokens - sequences * workload.seq_len  # places at which the first may begin
        for number in np.unique(passes).tolist():
            begin, order = _pass(seed, number, sequences, spare)
            here = passes == number
            places[here] = begin + order[numbers[here]] * workload.seq_len
    return torch.from_numpy(places.reshape(shape))


@functools.lru_cache(maxsize=2)  # a step may end one and begin another
def _pass(seed: int, number: int, sequences: int, spare: int) -> tuple[int, np.ndarray[Any, Any]]:
    """Where a pass over a text begins, and the order of its sequences."""
    # not torch's generator: on the CPU it reads only 32 bits of a seed, too few for both numbers
    chance = np.random.default_rng((seed, number))
    return int(chance.integers(spare)), chance.permutation(sequences)


def _known_by(tokens: np.ndarray[Any, Any]) -> str:
    return f"{len(tokens):,} tokens, {zlib.crc32(np.ascontiguousarray(tokens[:CHECKED]).data):08x}"

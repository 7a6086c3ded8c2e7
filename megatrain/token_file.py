"""A file of tokens: running text, or an example a row, and which of its tokens are to be learned."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from megatrain.data import ByteText, DataError, Numbers, TokenSource, examples, known_by, places, sequences_in
from megatrain.documents import goes_on
from schedules.workload import Workload

CHECKED = 1 << 24  # tokens of a file looked at at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """Sequences of a `.npy` file of token numbers, of any integer type.

    One dimension is running text, of which sequences are cut; of two, each row is a sequence, padded where it is
    shorter. `loss_mask` is a `.npy` file of that shape, bool or of zeros and ones, which has one where a token is to be
    learned: not in prompts, and not in padding. With a `document_end` the first token of each document is not learned
    either, but for a sequence's first.

    The files are mapped: they may be larger than memory. All of them is looked at once, so that no token is met hours
    later that a vocabulary of `vocab_size` does not have. Raises DataError for one, for a file that is missing, too
    short, or none of tokens, and later for one that was written into: what is mapped would be other numbers, or none.
    A file that was replaced or removed is still mapped.
    """

    path: Path
    vocab_size: int
    workload: Workload
    seed: int = 0
    loss_mask: Path | None = None
    document_end: int | None = None

    def __post_init__(self) -> None:
        if self.document_end is not None and not 0 <= self.document_end < self.vocab_size:
            raise DataError(
                f"no document ends with token {self.document_end}: the model's vocabulary is 0 to {self.vocab_size - 1}"
            )
        self._require_shape()
        _ = self.known_by  # reads all of both

    def _require_shape(self) -> None:
        tokens, seq_len = self._tokens, self.workload.seq_len
        if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{self.path} holds {_held(tokens)}, not integers in one dimension, or in two with a sequence a row"
            )
        if tokens.ndim == 1 and len(tokens) <= seq_len:
            raise DataError(
                f"{self.path} has {len(tokens)} tokens, too few for a sequence of {seq_len} and the one that follows"
            )
        if tokens.ndim == 2 and (not len(tokens) or tokens.shape[1] != seq_len + 1):
            wanted = f"a row must have {seq_len + 1:,}, one more than a sequence, the last only to be predicted"
            other = "pad" if tokens.shape[1] <= seq_len else "cut"
            shorter = f": take sequences of {tokens.shape[1] - 1:,}, or {other} rows" if tokens.shape[1] > 1 else ""
            if not len(tokens):
                raise DataError(f"{self.path} has no rows")
            raise DataError(f"{self.path} has {len(tokens):,} rows of {tokens.shape[1]:,} tokens; {wanted}{shorter}")
        if self.loss_mask is not None and (self._mask.shape != tokens.shape or self._mask.dtype.kind not in "biu"):
            shape = list(tokens.shape)
            raise DataError(f"{self.loss_mask} holds {_held(self._mask)}: a mask of {self.path} is bool {shape}")

    @functools.cached_property
    def known_by(self) -> str:
        """See TokenSource."""
        known = known_by(self._tokens.size, self._checked_tokens())
        if self.loss_mask is not None:
            known += f", learned {self._checked_mask(self.loss_mask):08x}"
        return known if self.document_end is None else f"{known}, documents end with {self.document_end}"

    def _checked_tokens(self) -> int:
        """The CRC-32 of the tokens, all of which the vocabulary has."""
        tokens, crc = self._tokens, 0
        for start, part in _parts(tokens):
            if part.min() < 0 or part.max() >= self.vocab_size:
                at = int(np.argmax((part < 0) | (part >= self.vocab_size)))
                place = f"place {start + at:,}"
                if tokens.ndim == 2:
                    row, column = divmod(at, tokens.shape[1])
                    place = f"place {column:,} of row {start + row:,}"
                raise DataError(
                    f"{self.path} holds token {part.flat[at]} at {place}, and the model's vocabulary is 0 to "
                    f"{self.vocab_size - 1}: make the file with this model's tokenizer"
                )
            crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        return crc

    def _checked_mask(self, path: Path) -> int:
        """The CRC-32 of the mask, which is one, and of something."""
        crc = learned = 0
        for _, part in _parts(self._mask):
            if part.min() < 0 or part.max() > 1:
                raise DataError(f"{path} holds {part.min()} to {part.max()}: a mask holds zeros and ones")
            learned += int((part[:, 1:] if part.ndim == 2 else part).sum())
            crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        if self._mask.ndim == 1:
            learned -= int(self._mask[0])  # which nothing comes before
        if not learned:
            raise DataError(f"{path} has no token to learn: a mask has ones where a token is to be")
        return crc

    @functools.cached_property
    def _tokens(self) -> Numbers:
        return self._mapped(self.path, "token numbers")

    @functools.cached_property
    def _mask(self) -> Numbers:
        assert self.loss_mask is not None
        return self._mapped(self.loss_mask, "zeros and ones")

    @functools.cached_property
    def _written(self) -> dict[Path, tuple[int, int, int]]:
        """Of each mapped file, what `_last_written` told just before."""
        return {}

    def _mapped(self, path: Path, of: str) -> Numbers:
        try:
            self._written[path] = _last_written(path)
            found = np.load(path, mmap_mode="r")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        # numpy takes what it does not know for a pickle, and believes a header
        except (ValueError, EOFError, BadZipFile, TokenError, LookupError, OverflowError, TypeError):
            found = None
        if not isinstance(found, np.ndarray):
            what = "no whole .npy file" if found is None else "an archive of arrays"
            raise DataError(f"{path} is {what}: give one array of {of}, saved with numpy.save")
        return found

    def _require_unwritten(self) -> None:
        for path, (inode, *before) in self._written.items():
            try:
                now, *since = _last_written(path)
            except OSError:  # what was mapped has no name any more
                continue
            if now == inode and since != before:
                raise DataError(
                    f"{path} was written into after it was first read: write a new file, and rename it to that"
                )

    @property
    def sequences(self) -> int:
        """See TokenSource."""
        return len(self._tokens) if self._tokens.ndim == 2 else sequences_in(len(self._tokens), self.workload)

    def batch(self, step: int) -> Tensor:
        """See TokenSource."""
        return torch.from_numpy(self._of_step(self._tokens, step).astype(np.int64))

    def learned(self, step: int) -> Tensor | None:
        """See TokenSource."""
        found = None if self.loss_mask is None else torch.from_numpy(self._of_step(self._mask, step).astype(bool))
        if self.document_end is None:
            return found
        within = goes_on(self.batch(step), self.document_end)
        return within if found is None else found & within

    def _of_step(self, numbers: Numbers, step: int) -> Numbers:
        """What a file has for a step's sequences, [accumulation, micro_batch_size, seq_len + 1]."""
        self._require_unwritten()
        if numbers.ndim == 2:
            rows: Numbers = numbers[examples(self.seed, step, len(numbers), self.workload).numpy()]
            return rows
        begins, length = places(self.seed, step, len(numbers), self.workload), self.workload.seq_len + 1
        found = np.stack([numbers[begin : begin + length] for begin in begins.flatten().tolist()])
        return found.reshape(*begins.shape, length)


def from_file(
    path: Path,
    vocab_size: int,
    workload: Workload,
    seed: int = 0,
    *,
    loss_mask: Path | None = None,
    document_end: int | None = None,
) -> TokenSource:
    """A .npy file of token numbers; or a .txt file, a token per byte, for a model whose vocabulary is that.

    Raises DataError for a file that is missing, or is not of this vocabulary, or has a mask or documents and is not of
    tokens.
    """
    if path.suffix != ".txt":
        return TokenFile(
            path=path,
            vocab_size=vocab_size,
            workload=workload,
            seed=seed,
            loss_mask=loss_mask,
            document_end=document_end,
        )
    if document_end is not None:
        raise DataError(f"{path} is text, of one document: a token that ends one belongs to a .npy file of tokens")
    if loss_mask is not None:
        raise DataError(f"{path} is text, of which all is learned: a loss mask belongs to a .npy file of tokens")
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


def _last_written(path: Path) -> tuple[int, int, int]:
    """The number of the file that has this name now, its bytes, and when they were written, in ns."""
    of = path.stat()
    return of.st_ino, of.st_size, of.st_mtime_ns


def _held(numbers: Numbers) -> str:
    return f"{numbers.dtype} {list(numbers.shape)}"


def _parts(numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
    """A file's rows, or its numbers, some of them at a time, with the number of the first."""
    rows = max(1, CHECKED // (numbers.shape[1] if numbers.ndim == 2 else 1))
    for start in range(0, len(numbers), rows):
        yield start, numbers[start : start + rows]

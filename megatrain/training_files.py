"""The files that a training begins with and leaves behind, and what each of them is read as."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatrain import checkpoint, export, hf
from megatrain.adapters import folded
from megatrain.checkpoint import Checkpoint
from megatrain.data import ByteText, DataError, TokenSource, read_bytes, shares, standard_library, whole_steps
from megatrain.initial import random_parameters
from megatrain.preflight import require_room
from megatrain.token_file import from_file
from schedules.errors import InputError
from schedules.evaluation import evaluation
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.verify import Verified
from schedules.workload import Workload

OWN_SOURCES = "Python's own sources"
TEXT_BYTES = 8_000_000  # of source text; a demonstration sees a fraction of it


@dataclass(frozen=True, kw_only=True)
class Files:
    """What a training begins with and leaves behind.

    weights: a folder of Hugging Face's with the parameters to begin with; random ones if left out. Not with `resume`,
        unless adapters are trained.
    adapters: a folder of peft's, whose adapters are folded into those parameters. Not with `resume`, and not where
        adapters are trained: these would belong to weights that nobody has.
    tokens: see `megatrain.token_file.from_file`; the standard library's source text, a token per byte, if left out.
    loss_mask: a file beside that of tokens, see `megatrain.token_file.TokenFile`; all are learned if left out.
    document_end: the token that ends a document, in that file and in what is held out.
    held_out: a file as that of tokens, whose loss is told before the first step, after the last and, if given, after
        every `held_out_every`; held_out_mask: its mask.
    resume: a folder of checkpoints, from the newest of which to go on.
    save: a folder for a checkpoint at the end, and `every` so many steps.
    export: a folder for weights, or adapters, as Hugging Face has them, at the end.
    """

    weights: Path | None = None
    adapters: Path | None = None
    tokens: Path | None = None
    loss_mask: Path | None = None
    document_end: int | None = None
    held_out: Path | None = None
    held_out_mask: Path | None = None
    held_out_every: int | None = None
    resume: Path | None = None
    save: Path | None = None
    every: int | None = None
    export: Path | None = None

    # ---- before anything is read

    def require_beginning(self, workload: Workload) -> None:
        """Raises InputError where weights, adapters and a checkpoint do not go together."""
        adapted = workload.lora_rank is not None  # adapters are trained beside weights from elsewhere
        if adapted and self.adapters is not None:
            raise InputError(
                "--adapters become part of the weights: take a policy that trains or evaluates all of these; what was "
                "trained beside them goes on with --resume"
            )
        if workload.quantised is not None and self.adapters is not None:
            raise InputError(
                "--adapters become part of the weights, and would be rounded with them: leave out quantised"
            )
        for option, beginning in (("--weights", self.weights), ("--adapters", self.adapters)):
            if self.resume is not None and beginning is not None and not adapted:
                raise InputError(
                    f"--resume goes on with the checkpoint's weights: leave out {option}, or begin anew without it"
                )

    def require_room(self, schedule: Schedule, resumed: Checkpoint | None, steps: int) -> None:
        """Make the folders to save and export to.

        Raises:
            InputError: checkpoints on the way have no folder.
            CheckpointError, WeightsError: a folder holds what must not be replaced, or nothing is trained.
            NotSaved: there is no room for what would be written.
        """
        if self.every is not None and self.save is None:
            raise InputError("--every saves checkpoints on the way: say where to, with --save FOLDER")
        made = [folder for folder in (self.save, self.export) if folder is not None and not folder.exists()]
        wanted = []
        try:
            if self.save is not None and steps:
                every = self.every or steps
                saves, apart = -(-steps // every), min(every, steps % every or every)
                needed = checkpoint.require_folder(self.save, schedule, resumed, saves, apart=apart)
                wanted.append(("to save", self.save, needed))
            if self.export is not None:
                checkpoint.require_apart(self.export, self.save)
                export.require_writable(self.export, schedule.model, schedule.workload)
                wanted.append(("to export", self.export, export.written_bytes(schedule.model, schedule.workload)))
            require_room(wanted)
        except Exception:
            for folder in made:
                if folder.is_dir():
                    folder.rmdir()
            raise

    # ---- text

    def text(self, model: ModelSpec, workload: Workload, seed: int, steps: int) -> TokenSource:
        """What is read in so many steps. Raises DataError."""
        found: TokenSource
        if self.loss_mask is not None and self.tokens is None:
            raise DataError("a loss mask says which tokens of a file are learned: give the file, with --data")
        if self.document_end is not None and self.tokens is None:
            raise DataError("--document-end is a token of a file: give the file, with --data")
        if self.tokens is not None:
            found = from_file(
                self.tokens,
                model.vocab_size,
                workload,
                seed,
                loss_mask=self.loss_mask,
                document_end=self.document_end,
            )
        elif model.vocab_size < ByteText.vocab_size:
            raise DataError(
                f"{model.name} knows {model.vocab_size} tokens, fewer than there are bytes: give a .npy file of its "
                "tokens, with --data"
            )
        elif self.weights is not None and model.vocab_size != ByteText.vocab_size:
            raise DataError(
                f"{self.weights} was trained on tokens, not on bytes of {OWN_SOURCES}: give a .npy file made by its "
                "tokenizer, with --data, as docs/training.md shows"
            )
        else:
            found = ByteText(text=read_bytes(standard_library(), TEXT_BYTES), workload=workload, seed=seed)
        of_a_step = workload.accumulation * workload.micro_batch_size
        if workload.task == "evaluate" and found.sequences is not None and steps * of_a_step > found.sequences:
            raise DataError(
                f"there are {found.sequences:,} sequences of {workload.seq_len:,} tokens, and {steps:,} steps would "
                f"read some again: evaluate up to {found.sequences // of_a_step:,} steps of {of_a_step:,}"
            )
        return found

    def told_of(self, text: TokenSource) -> str:
        """Where `text` is from and what it is known by, in words that a checkpoint keeps."""
        return f"{self.tokens.resolve() if self.tokens else OWN_SOURCES} ({text.known_by})"

    def held_out_text(self, verified: Verified) -> TokenSource | None:
        """The text that is evaluated between steps, if any is.

        Raises DataError, InputError, and Refused as `schedules.evaluation` does.
        """
        if self.held_out is None:
            if self.held_out_mask is not None or self.held_out_every is not None:
                raise InputError("what is held out is a file of tokens: give it, with --held-out")
            return None
        model, workload = verified.schedule.model, verified.schedule.workload
        if workload.task == "evaluate":
            raise InputError("--held-out is evaluated while something is trained: give the text as --data")
        of = evaluation(verified).schedule.workload
        found = from_file(
            self.held_out, model.vocab_size, of, loss_mask=self.held_out_mask, document_end=self.document_end
        )
        try:
            steps = whole_steps(found, of)
        except DataError as error:
            raise DataError(f"{self.held_out}: {error}") from None
        if not any(shares(found, step, of).any() for step in range(steps)):
            raise DataError(
                f"{self.held_out_mask} has no token to learn in the {steps:,} whole steps that are evaluated"
            )
        return found

    # ---- parameters

    def parameters(self, model: ModelSpec, seed: int) -> Callable[[int], Tensor]:
        """Layer -> its parameters before the first step. Raises WeightsError, here or as a layer is read."""
        initial = random_parameters(model, seed)
        if self.weights is not None:
            initial = _finite(hf.parameters(self.weights, model), model, f"{self.weights} has weights")
        if self.adapters is not None:
            initial = _finite(folded(initial, self.adapters, model), model, f"{self.adapters} makes weights")
        return initial

    def began(self, resumed: Checkpoint | None) -> Path | None:
        """The folder of the weights that the training began with, before `resumed` was saved if it goes on from there.

        Warns where an export will lack what lies beside them.
        """
        if self.weights is not None or resumed is None or resumed.began is None:
            return self.weights
        if self.export is not None and not resumed.began.is_dir():
            warnings.warn(
                f"{resumed.began}, which the training began with, is gone: the export has no tokenizer", stacklevel=2
            )
        return resumed.began


def _finite(source: Callable[[int], Tensor], model: ModelSpec, has: str) -> Callable[[int], Tensor]:
    """`source`, which raises WeightsError where a layer's numbers are not finite: better known now than at a save."""

    def parameters(i: int) -> Tensor:
        found = source(i)
        if not checkpoint.all_finite(found):
            raise hf.WeightsError(
                f"{has} that are not finite numbers, in layer {model.layer_name(i)}: take a copy that is whole"
            )
        return found

    return parameters

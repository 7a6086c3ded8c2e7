"""What a measured profile holds times for, in words, and the command that measures what it lacks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from schedules.model import ModelSpec
from schedules.workload import ADAMW, RECOMPUTED, Workload
from sim.machine import SHAPE, HardwareProfile

LISTED = 6  # shapes; of more, the least and the most are named


def covered(profile: HardwareProfile) -> str:
    """The models that a profile has times of, at which micro-batch x sequence and in which element types.

    By their blocks: embedding and head are timed alike whatever format blocks multiply in.
    """
    table = profile.measured.op_times if profile.measured else None
    shapes: dict[tuple[str, str], set[tuple[int, int]]] = {}  # by model and what follows the shape in a signature
    for key in table.values if table else ():
        if (match := SHAPE.search(key)) and _is_of_block(key):
            of = shapes.setdefault((key.partition("/")[0], key[match.end() :]), set())
            of.add((int(match["batch"]), int(match["seq"])))
    alike: dict[tuple[str, str], list[str]] = {}
    for (model, element), found in shapes.items():
        alike.setdefault((model, _listed(sorted(found))), []).append(element.replace("/", ", "))
    return "; ".join(f"{model} at {at} in {' and '.join(kinds)}" for (model, at), kinds in alike.items()) or "no model"


def layer_name(model: ModelSpec, i: int) -> str:
    """What a layer's size stands under in a profile: its model and kind, as signatures begin."""
    return f"{model.name}/{model.layer_kind(i)}"


def is_of_another(profile: HardwareProfile, model: ModelSpec, i: int | None) -> bool:
    """Whether layers of that name had another size when they were timed: two models may have one name.

    Profiles from before tell no sizes.
    """
    sizes = profile.measured.layers if profile.measured else None
    if sizes is None or i is None:
        return False
    return sizes.values.get(layer_name(model, i), model.params(i)) != model.params(i)


def lacks_kind(profile: HardwareProfile, signature: str) -> bool:
    """Whether a profile has times of such steps, and of this kind of op at no shape: no policy that it timed has it."""
    table = profile.measured.op_times if profile.measured else None
    if table is None or SHAPE.sub("/", signature) in table.shapes:
        return False
    return any(_kind_of_step(key) == _kind_of_step(signature) for key in table.values)


def _kind_of_step(signature: str) -> tuple[str, bool, str | None]:
    """Model, whether it is of a block, and what follows the shape; None where there is none."""
    match = SHAPE.search(signature)
    return signature.partition("/")[0], _is_of_block(signature), signature[match.end() :] if match else None


def _is_of_block(signature: str) -> bool:
    return signature.split("/")[1].startswith("block")


def _listed(shapes: Sequence[tuple[int, int]]) -> str:
    names = [f"{batch}x{seq}" for batch, seq in shapes]
    return ", ".join(names) if len(names) <= LISTED else f"{len(names)} shapes from {names[0]} to {names[-1]}"


def command(
    model: str, workloads: Sequence[Workload], policy: str, profile: HardwareProfile, *, alone: bool = False
) -> str:
    """The command line that measures the ops of steps that differ in micro-batches and in what is computed again.

    Args:
        policy: whose ops they are, with any knobs.
        profile: where the ops are to stand too, and so are to be computed in the same way.
        alone: no other policy's ops are to be timed. So it is anyway where others train something else.
    """
    first = workloads[0]
    words = ["megatrain", "profile", model, "--batch", str(max(w.micro_batch_size for w in workloads))]
    words += ["--seq", str(max(w.seq_len for w in workloads)), "--precision", first.precision]
    if first.optimizer != ADAMW:
        words += ["--optimizer", first.optimizer]
    if first.matmul is not None:
        words += ["--matmul", first.matmul]
    modes = [mode for mode in RECOMPUTED if mode in {w.recompute for w in workloads}]
    if modes != ["none"]:
        words += [word for mode in modes for word in ("--recompute", mode)]
    if alone or first.lora_rank is not None or first.task != "train":
        words += ["--policy", policy]
    words += [f"--{name}" for name in (profile.way or "plain").split() if name != "plain"]
    if profile.nvme is not None:  # or what is measured anew would be a machine without a drive
        words += ["--nvme", "FOLDER"]
    return shlex.join([*words, "--out", "FILE"])

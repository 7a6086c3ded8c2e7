"""A training that stops and goes on is the training that did not stop, and no fault costs the checkpoint before."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchs_bits import of_torch

from megatrain import checkpoint, initial, session
from megatrain.adam import Adam
from megatrain.checkpoint import Checkpoint, CheckpointError, Diverged, NotSaved
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.train import Trainer
from schedules import policies, presets, trained
from schedules.hazards import minimal_waits
from schedules.op import Access, Kind, Op, Phase, Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import PRECISIONS, MemoryBudget, Workload

MODEL = replace(presets.load("tiny"), num_hidden_layers=2)
MEMORY = MemoryBudget(device_bytes=10**9, host_bytes=10**9, nvme_bytes=10**9)
EXACT = [name for name in policies.names() if name not in ("flexgen_block", "roundpipe", "zenflow")]

Layers = dict[int, tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def schedule(policy: str = "streamed", precision: str = "fp32", **changes: Any) -> Schedule:
    workload = Workload(micro_batch_size=1, accumulation=2, seq_len=16, precision=precision)
    return policies.build(policy, replace(MODEL, **changes), workload, MEMORY)


def train(
    of: Schedule,
    steps: int,
    folder: Path,
    *,
    resume: Checkpoint | None = None,
    save: bool = False,
    seed: int = 0,
    batch: int | None = None,
) -> tuple[list[float], Layers]:
    """Losses and what is kept of every layer after so many steps, which read that `batch` first."""
    data = RandomTokens(vocab_size=of.model.vocab_size, workload=of.workload, seed=3)
    with Trainer(
        verify(of),
        CpuBackend(),
        data,
        Adam(lr=1e-2, weight_decay=0.1),
        initial=initial.random_parameters(of.model, seed),
        resume=resume,
        nvme=folder,
    ) as trainer:
        if batch is not None:
            trainer.step = batch
        losses = trainer.run(steps)
        if save:
            trainer.save(folder / "checkpoints")
        return losses, {i: trainer.kept(i) for i in trained.layers(of.model, of.workload)}


def same(a: Layers, b: Layers) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for i in a for x, y in zip(a[i], b[i], strict=True)
    )


@pytest.mark.parametrize("policy", EXACT)
def test_going_on_has_the_bits_of_not_stopping(policy: str, tmp_path: Path) -> None:
    whole = schedule(policy)
    assert not whole.staleness
    losses, right = train(whole, 5, tmp_path)
    before, at_stop = train(whole, 2, tmp_path, save=True)
    after, found = train(whole, 3, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", whole))
    assert [*before, *after] == losses
    assert same(found, right) and not same(found, at_stop)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_goes_on_by_another_schedule_with_the_same_bits(precision: str, tmp_path: Path) -> None:
    one, other = schedule("streamed", precision), schedule("resident", precision)
    losses, right = train(one, 4, tmp_path)
    before, _ = train(one, 2, tmp_path, save=True)
    after, found = train(other, 2, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", other))
    assert [*before, *after] == losses
    assert same(found, right)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_in_parts_is_saved_and_resumed_as_in_one(precision: str, tmp_path: Path) -> None:
    """Parts on the drive, on the device and in the host; a schedule without parts goes on from there, and back."""
    one = schedule("streamed", precision)
    other = policies.build("streamed", one.model, one.workload, MEMORY, parts=3, nvme=2, stay=4, through=1)
    losses, right = train(one, 5, tmp_path)
    assert train(other, 5, tmp_path)[0] == losses
    before, _ = train(other, 2, tmp_path, save=True)
    between, _ = train(one, 1, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", one), save=True)
    after, found = train(other, 2, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", other))
    assert [*before, *between, *after] == losses
    assert same(found, right)


def test_a_stale_schedule_goes_on_with_all_its_weights_up_to_date(tmp_path: Path) -> None:
    stale = schedule("roundpipe")
    assert stale.staleness == 1
    train(stale, 2, tmp_path, save=True)
    after, _ = train(stale, 1, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", stale))
    exact = schedule("streamed")
    right, _ = train(exact, 1, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", exact))
    assert after == pytest.approx(right, rel=1e-6)


def computing_with_copies() -> Schedule:
    """Copies of the weights made before the update: touched first in a step, and behind at its end."""
    p = Program(MODEL, schedule().workload, staleness=1)
    copies = {i: p.buffer(f"copy.{i}") for i in MODEL.layers}
    for i in MODEL.layers:
        p.keep_on_device(p.weight(i), p.state(i), p.grad(i))
    for m in p.workload.microbatches:
        for i in MODEL.layers[:-1]:
            p.forward(i, m, weights=copies[i])
        p.loss(m, weights=copies[MODEL.head])
        for i in reversed(MODEL.layers[:-1]):
            p.backward(i, m, weights=copies[i])
    for i in MODEL.layers:
        p.prefetch(p.weight(i), into=copies[i], stream=Stream.COMPUTE)
        p.update(i, stream=Stream.COMPUTE)
    return p.build(policy="copies")


def test_a_checkpoint_holds_what_the_optimizer_wrote_and_not_a_copy(tmp_path: Path) -> None:
    copies = computing_with_copies()
    _, found = train(copies, 1, tmp_path, save=True)
    saved = checkpoint.read(tmp_path / "checkpoints", copies)
    _, right = train(schedule("resident"), 1, tmp_path)
    assert same(found, right)
    assert same({i: saved.layer(i) for i in found}, right)


def updating_in_other_buffers() -> Schedule:
    """As above, but weights and state live on a drive, so that no home is where the optimizer writes."""
    p = Program(MODEL, schedule().workload, staleness=1)
    p.keep_on_nvme(*(t for i in MODEL.layers for t in (p.weight(i), p.state(i))))
    copies, grads = ({i: p.buffer(f"{what}.{i}") for i in MODEL.layers} for what in ("copy", "grad"))
    weights, states = (p.slots(f"update.{what}", 2, Tier.HOST) for what in ("weight", "state"))
    for m in p.workload.microbatches:
        for i in MODEL.layers[:-1]:
            p.forward(i, m, weights=copies[i])
        p.loss(m, weights=copies[MODEL.head], grad=grads[MODEL.head])
        for i in reversed(MODEL.layers[:-1]):
            p.backward(i, m, weights=copies[i], grad=grads[i])
    for i in MODEL.layers:
        p.offload(p.grad(i), out_of=grads[i])
        weight = p.prefetch(p.weight(i), into=weights.next(), stream=Stream.NVME_READ)
        state = p.prefetch(p.state(i), into=states.next(), stream=Stream.NVME_READ)
        p.prefetch(p.weight(i), into=copies[i], out_of=weight)
        p.update(i, weights=weight, state=state)
        p.offload(p.weight(i), out_of=weight, stream=Stream.NVME_WRITE)
        p.offload(p.state(i), out_of=state, stream=Stream.NVME_WRITE)
    return p.build(policy="staged")


def test_a_checkpoint_holds_the_newest_weights_wherever_they_were_updated(tmp_path: Path) -> None:
    staged = updating_in_other_buffers()
    _, found = train(staged, 1, tmp_path, save=True)
    _, right = train(schedule("resident"), 1, tmp_path)
    assert same(found, right)
    assert same({i: checkpoint.read(tmp_path / "checkpoints", staged).layer(i) for i in found}, right)


def test_a_buffer_that_is_only_looked_at_is_no_home_of_what_it_holds(tmp_path: Path) -> None:
    """An op of an exact schedule waits for a slot's weights of the step before, which are behind those on the drive."""
    plain = policies.build("streamed", MODEL, schedule().workload, MEMORY, nvme=2, nvme_weights=2)
    last = {access.buffer: access.tensor for op in plain.ops for access in op.writes}
    buffer, tensor = next((b, t) for b, t in last.items() if b.startswith("weight") and t.startswith("w."))
    looks = Op(name="look", kind=Kind.PREFETCH, phase=Phase.SYNC, stream=Stream.HOST, reads=(Access(buffer, tensor),))
    ops = (looks, *plain.ops)
    looked = replace(plain, ops=ops, waits=minimal_waits(ops))
    assert verify(looked).initial[buffer] == tensor
    _, found = train(looked, 2, tmp_path)
    _, right = train(plain, 2, tmp_path)
    assert same(found, right)


def test_a_checkpoint_is_found_by_its_own_folder_too(tmp_path: Path) -> None:
    of = schedule()
    train(of, 2, tmp_path, save=True)
    itself = checkpoint.read(tmp_path / "checkpoints" / "step-00000002", of)
    assert itself == checkpoint.read(tmp_path / "checkpoints", of)
    checkpoint.require_folder(tmp_path / "checkpoints", of, itself, 1)  # it may be replaced by what goes on from it
    within = itself.folder / "more"
    for place, told in ((itself.folder, "is a checkpoint"), (within, "is in a checkpoint")):
        with pytest.raises(CheckpointError, match=rf"{told}, which a later save removes .*: take \S+/checkpoints,"):
            checkpoint.require_folder(place, of, itself, 1)
    assert not within.exists()
    coming = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.require_apart(coming)
    for place, told in ((coming, "is a checkpoint"), (coming / "hf", "is in a checkpoint")):
        with pytest.raises(CheckpointError, match=rf"{told}, which a later save removes .*: take \S+/checkpoints,"):
            session.Files(save=tmp_path / "checkpoints", export=place).require_room(of, itself, 2)
    (tmp_path / "checkpoints" / "step-00000002" / checkpoint.LAST).unlink()
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*step-00000002$"):
        checkpoint.read(tmp_path / "checkpoints" / "step-00000002", of)
    with pytest.raises(CheckpointError, match=r"in .* but step-00000002, which is incomplete: its save was"):
        checkpoint.read(tmp_path / "checkpoints", of)


def test_the_two_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    """The newest is proven by the step that is trained from it, and no sooner."""
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 2, tmp_path, save=True)
    for steps in ([2, 3], [3, 4], [4, 5]):
        found = checkpoint.read(folder, of)
        checkpoint.require_folder(folder, of, found, 1)
        train(of, 1, tmp_path, resume=found, save=True)
        assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in steps]
        assert checkpoint.read(folder, of).step == steps[-1]


def test_of_a_stale_schedule_the_newest_that_a_step_was_trained_from_stays_too(tmp_path: Path) -> None:
    """What a step computes with is a step older than the checkpoint before it."""
    of, folder = schedule("roundpipe"), tmp_path / "checkpoints"
    for every, kept in ((1, [2, 3, 4]), (3, [1, 4])):
        own = folder / str(every)
        session.train(verify(of), steps=1, hyper=Adam(lr=1e-3), files=session.Files(save=own))
        more = session.Files(save=own, every=every, resume=own)
        with pytest.warns(UserWarning, match="stale by 1"):
            session.train(verify(of), steps=3, hyper=Adam(lr=1e-3), files=more)
        assert sorted(path.name for path in own.iterdir()) == [f"step-{step:08d}" for step in kept]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("knobs", [{}, {"resident": 2, "nvme": 1}])
def test_an_evaluation_is_of_the_weights_that_the_checkpoint_has(
    precision: str, knobs: dict[str, int], tmp_path: Path
) -> None:
    of = schedule(precision=precision)
    train(of, 2, tmp_path, save=True)
    # before its update; whatever is evaluated reads the first batch
    right, _ = train(of, 1, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", of), batch=0)
    evaluation = policies.build("flexgen_block", of.model, of.workload, MEMORY, **knobs)
    losses, _ = train(evaluation, 1, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", evaluation))
    assert losses == pytest.approx(right, rel=1e-6)
    of_random_weights, _ = train(evaluation, 1, tmp_path)
    assert abs(of_random_weights[0] - right[0]) > 1e-3


# ---- frozen weights


def test_adapters_go_on_beside_the_weights_that_they_were_trained_beside(tmp_path: Path) -> None:
    of, folder = schedule("lora_streamed"), tmp_path / "checkpoints"
    losses, _ = train(of, 3, tmp_path)
    before, _ = train(of, 2, tmp_path, save=True)
    after, _ = train(of, 1, tmp_path, resume=checkpoint.read(folder, of))
    assert [*before, *after] == losses
    with pytest.raises(
        CheckpointError, match=r"beside other weights: those of layer embed and \d more differ; give the"
    ):
        train(of, 1, tmp_path, resume=checkpoint.read(folder, of), seed=1)


def test_a_checkpoint_that_does_not_tell_what_is_frozen_goes_on_beside_none() -> None:
    found = Checkpoint(folder=Path("1"), model=MODEL, workload=schedule().workload, step=1, checksums={})
    with pytest.raises(CheckpointError, match=r"those of layer 0 differ"):
        checkpoint.require_frozen(found, {"0": 5})


def test_one_number_more_or_less_makes_other_weights() -> None:
    checksums: dict[int, int] = {}
    source = initial.random_parameters(MODEL, 0)
    assert torch.equal(initial.with_checksums(source, checksums)(1), source(1))
    again: dict[int, int] = {}
    changed = source(1)
    initial.with_checksums(lambda i: changed, again)(1)
    assert again == checksums
    changed[7] = torch.nextafter(changed[7], torch.tensor(9.0))
    initial.with_checksums(lambda i: changed, again)(1)
    assert again != checksums


# ---- faults


def test_a_checkpoint_is_complete_when_its_contents_are_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could leave a name without them."""
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    target = folder / "step-00000002"
    synced: list[tuple[str, bool]] = []

    def sync(path: Path) -> None:
        assert path.is_dir() or path.stat().st_size > 0
        synced.append((path.name, (target / checkpoint.LAST).exists()))

    monkeypatch.setattr(checkpoint, "sync", sync)
    checkpoint.save(folder, of, 2, lambda i: right[i])
    layers = sorted(path.name for path in target.iterdir() if path.name != checkpoint.LAST)
    before = [name for name, complete in synced if not complete]
    assert sorted(before[:-2]) == layers and len(layers) == len(of.model.layers)
    assert before[-2:] == [f"{checkpoint.LAST}.partial", target.name]
    assert [name for name, complete in synced if complete] == [target.name, folder.name]


@pytest.mark.parametrize("lost", ["layer", "last", "folder"])
def test_what_does_not_reach_the_drive_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A file may be written and closed without an error, of which only a sync tells."""
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    real = checkpoint.sync

    def sync(path: Path) -> None:
        kind = "folder" if path.is_dir() else "last" if path.name.startswith(checkpoint.LAST) else "layer"
        if kind == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(checkpoint, "sync", sync)
    with pytest.raises(NotSaved, match=r"step 2 could not be written to .*Input/output error"):
        checkpoint.save(folder, of, 2, lambda i: right[i])
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert checkpoint.read(folder, of).step == 1


def on_third_layer(do: Callable[[], None]) -> Callable[..., None]:
    real, calls = checkpoint.save_file, iter(range(1000))

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        if next(calls) == 2:
            do()
        real(tensors, path)

    return save_file


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Killed(BaseException):
    """What no clean-up sees, as when the process is killed."""


def killed() -> None:
    raise Killed


def test_a_full_disk_costs_only_the_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    monkeypatch.setattr(checkpoint, "save_file", on_third_layer(full_disk))
    with pytest.raises(NotSaved, match=r"step 2 could not be written to .*No space left"):
        train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    found = checkpoint.read(folder, of)
    assert found.step == 1 and same({i: found.layer(i) for i in of.model.layers}, right)


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", on_third_layer(killed))
        with pytest.raises(Killed):
            train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    (folder / "step-00000002" / ".tmpzqyx4j").touch()  # safetensors writes to a file so named first
    (folder / "step-00000000").mkdir()  # older than what is read: no training is told of it
    found = checkpoint.read(folder, of)
    assert found.step == 1 and found.skipped == [folder / "step-00000002"]
    _, right = train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    found = checkpoint.read(folder, of)
    assert found.step == 2 and same({i: found.layer(i) for i in of.model.layers}, right)


def test_a_folder_of_another_trainer_is_left_alone(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    (folder / "step-00001000").mkdir(parents=True)
    (folder / "step-00001000" / "lit_model.pth").write_text("theirs")
    with pytest.raises(CheckpointError, match="step-00001000 is no checkpoint of ours, though it is called so"):
        checkpoint.require_folder(folder, of, None, 1)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*checkpoints$"):
        checkpoint.read(folder, of)
    train(of, 1, tmp_path, save=True)
    assert (folder / "step-00001000" / "lit_model.pth").read_text() == "theirs"


def test_a_checkpoint_behind_a_link_stays_whole_when_the_link_goes(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    elsewhere = Path(shutil.move(folder / "step-00000001", tmp_path / "larger drive"))
    (folder / "step-00000001").symlink_to(elsewhere)
    for step in (2, 3):
        checkpoint.save(folder, of, step, lambda i: right[i])
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert checkpoint.read(elsewhere, of).step == 1


def test_what_an_interrupted_save_left_goes_with_the_next(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    (folder / "step-00000007").mkdir(parents=True)
    (folder / "step-by-step").mkdir()
    train(of, 1, tmp_path, save=True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-by-step"]


def test_what_else_lies_beside_checkpoints_is_left_alone(tmp_path: Path) -> None:
    """A log of the run, say: it cost the checkpoint at the end, and a folder of notes was removed."""
    of, folder = schedule(), tmp_path / "checkpoints"
    (folder / "step-2-notes").mkdir(parents=True)
    (folder / "step-00000001.log").write_text("mine")
    (folder / "step-00000009").write_text("mine")
    train(of, 1, tmp_path, save=True)
    train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["step-00000001", "step-00000001.log", "step-00000002", "step-00000009", "step-2-notes"]
    assert checkpoint.read(folder, of).skipped == []


def test_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    with pytest.raises(NotSaved, match="step-00000001 is there already"):
        checkpoint.save(folder, of, 1, lambda i: right[i])
    assert same({i: checkpoint.read(folder, of).layer(i) for i in of.model.layers}, right)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    found = checkpoint.read(folder, of)
    file = found.folder / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"1\.safetensors cannot be read"):
        found.layer(1)
    (found.folder / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors cannot be read"):
        found.layer(1)
    last = found.folder / checkpoint.LAST
    body = json.loads(last.read_text())
    for text, told in (
        ("{", "cannot be read"),
        ("[]", "is damaged: it holds no JSON object"),
        (json.dumps({**body, "step": None}), "is damaged: its step is None"),
        (json.dumps({**body, "step": -1}), "is damaged: its step is -1"),
        (json.dumps({**body, "step": 3}), "is damaged: its step is 3, and its folder's another"),
        (json.dumps({**body, "frozen": 3}), "is damaged: its step is 1, what is frozen 3"),
        (json.dumps({**body, "checksums": {**body["checksums"], "1": {}}}), "is damaged: it lacks checksums"),
        (json.dumps({**body, "settings": {"seed": 3}}), "is damaged: it is not as it was saved"),
    ):
        last.write_text(text)
        with pytest.raises(CheckpointError, match=rf"training\.json {told}"):
            checkpoint.read(folder, of)


def test_what_was_saved_before_it_had_a_checksum_is_read(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    last = folder / "step-00000001" / checkpoint.LAST
    body = json.loads(last.read_text())
    del body["own_checksum"]
    last.write_text(json.dumps(body))
    assert same({i: checkpoint.read(folder, of).layer(i) for i in of.model.layers}, right)


def test_a_checkpoint_that_is_cut_off_is_told_with_the_one_before(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    file = folder / "step-00000002" / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    told = r"step-00000002/1\.safetensors cannot be read: .*; .*step-00000001 is older, and may be whole: resume"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.read(folder, of)
    assert checkpoint.read(folder / "step-00000001", of).step == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}'])
def test_what_makes_a_checkpoint_may_be_damaged_too_and_the_one_before_is_told(text: str, tmp_path: Path) -> None:
    """And whoever resumes from that is told how to save where both lie."""
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    last = folder / "step-00000002" / checkpoint.LAST
    body = json.loads(last.read_text())
    last.write_text(json.dumps(body | json.loads(text)) if "step" in text else text)
    with pytest.raises(CheckpointError, match=r"step-00000002/training\.json .*; .*step-00000001 is older"):
        checkpoint.read(folder, of)
    before = checkpoint.read(folder / "step-00000001", of)
    with pytest.raises(CheckpointError, match="would be removed: resume from it, remove it if it is damaged, or save"):
        checkpoint.require_folder(folder, of, before, 1)
    shutil.rmtree(folder / "step-00000002")
    checkpoint.require_folder(folder, of, before, 1)


@pytest.mark.parametrize("part", ["weights", "state"])
def test_a_bit_that_a_drive_changed_is_told(part: str, tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)
    file = folder / "step-00000002" / "1.safetensors"
    contents = load_file(file)
    contents[part].view(torch.uint8)[-1] ^= 1
    save_file(contents, file)
    told = rf"1\.safetensors is damaged: what was saved differs from its {part}; .*step-00000001 is older"
    with pytest.raises(CheckpointError, match=told):
        train(of, 1, tmp_path, resume=checkpoint.read(folder, of))


def test_an_evaluation_is_told_of_damage_as_a_training_is(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    (folder / "step-00000001" / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors cannot be read"):
        checkpoint.read(folder, schedule("flexgen_block"))


def test_a_checkpoint_that_was_half_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    train(of, 1, tmp_path, resume=checkpoint.read(folder, of), save=True)

    def interrupted(path: Path) -> None:
        (path / "0.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", interrupted)
        checkpoint.drop(folder, 2)
    found = checkpoint.read(folder, of)
    assert found.step == 1 and [path.name for path in found.skipped] == ["step-00000002"]
    assert checkpoint.told(folder).endswith("step-00000001 is kept")


def test_tensors_of_another_size_or_type_are_told_before_they_are_trained_from(tmp_path: Path) -> None:
    of = schedule()
    train(of, 1, tmp_path, save=True)
    found = checkpoint.read(tmp_path / "checkpoints", of)
    weights, state = found.layer(0)
    for changed in (
        {"weights": weights[1:]},
        {"weights": weights.view(2, -1)},
        {"weights": weights.to(torch.bfloat16)},
        {"weights": weights.view(torch.int32)},
        {"state": state[1:]},
        {"state": state.view(torch.float32)},
    ):
        parts = {"weights": weights, "state": state, **changed}
        save_file({name: part.contiguous() for name, part in parts.items()}, found.folder / "0.safetensors")
        with pytest.raises(CheckpointError, match=rf"0\.safetensors is damaged: its {next(iter(changed))} are torch"):
            found.layer(0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (schedule(precision="bf16"), "its precision is 'fp32', the schedule's 'bf16'; give --precision fp32"),
        (schedule(num_hidden_layers=3), "its model is one of 2 blocks .* the schedule's one of 3"),
        (schedule(rope_theta=2e4), "its model is one with rope_theta 10000.0, the schedule's one with .* 20000.0"),
        (schedule("lora_streamed"), "it has all weights, the schedule trains adapters of rank 16"),
    ],
)
def test_what_is_of_another_training_is_refused(other: Schedule, told: str, tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="there is no folder"):
        checkpoint.read(folder, of)
    train(of, 1, tmp_path, save=True)
    with pytest.raises(CheckpointError, match=told):
        checkpoint.read(folder, other)
    body = json.loads((folder / "step-00000001" / checkpoint.LAST).read_text())
    (folder / "step-00000001" / checkpoint.LAST).write_text(json.dumps({**body, "format": 1}))
    with pytest.raises(CheckpointError, match="has the format 1; this version reads 3"):
        checkpoint.read(folder, of)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("zero3_offload", "zero3_offload adds an fp32 master by itself: give --precision bf16 --knob master=weights$"),
        ("zero_offload", "zero_offload adds an fp32 master by itself: give --precision bf16 --knob master=weights$"),
        ("gemini", "give --precision bf16, and a policy that does not add an fp32 master by itself$"),
    ],
)
def test_who_adds_state_that_the_checkpoint_has_not_is_told_what_leaves_it_out(
    policy: str, told: str, tmp_path: Path
) -> None:
    train(schedule(precision="bf16"), 1, tmp_path, save=True)
    with pytest.raises(CheckpointError, match=told):
        checkpoint.read(tmp_path / "checkpoints", schedule(policy, "bf16"))


def test_a_model_by_another_name_is_the_same_model(tmp_path: Path) -> None:
    train(schedule(), 1, tmp_path, save=True)
    assert checkpoint.read(tmp_path / "checkpoints", schedule(name="mine")).step == 1


# ---- before a training


def test_a_checkpoint_of_another_training_is_not_to_be_removed(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    train(of, 1, tmp_path, save=True)
    with pytest.raises(CheckpointError, match=r"step-00000001 is a checkpoint that this training does not go on from"):
        checkpoint.require_folder(folder, of, None, 1)
    found = checkpoint.read(folder, of)
    checkpoint.require_folder(folder, of, found, 1)
    shutil.copytree(found.folder, folder / "step-00000007")
    with pytest.raises(CheckpointError, match="step-00000007"):
        checkpoint.require_folder(folder, of, found, 1)


def test_room_is_counted_for_as_many_checkpoints_as_there_will_be(tmp_path: Path) -> None:
    of, folder = schedule(), tmp_path / "checkpoints"
    one = MODEL.total_params * 12  # fp32 weights and two moments
    assert checkpoint.require_folder(tmp_path / "new" / "below", of, None, 1) == one
    assert (tmp_path / "new" / "below").is_dir()
    assert [checkpoint.require_folder(folder, of, None, saves) for saves in (1, 2, 9)] == [one, 2 * one, 2 * one]
    train(of, 1, tmp_path, save=True)
    files = list(folder.rglob("*.safetensors"))
    assert one <= sum(path.stat().st_size for path in files) <= one + 1000 * len(files)
    found = checkpoint.read(folder, of)
    assert [checkpoint.require_folder(folder, of, found, saves) for saves in (1, 9)] == [one, one]
    train(of, 1, tmp_path, resume=found, save=True)
    assert checkpoint.require_folder(folder, of, checkpoint.read(folder, of), 1) == 0  # the oldest goes first
    stale = [checkpoint.require_folder(tmp_path / "c", schedule("roundpipe"), None, 9, apart=n) for n in (1, 2)]
    assert stale == [3 * one, 2 * one]
    (tmp_path / "file").touch()
    with pytest.raises(NotSaved, match="no checkpoint can be written to"):
        checkpoint.require_folder(tmp_path / "file" / "below", of, None, 1)
    with pytest.raises(CheckpointError, match="flexgen_block trains nothing that could be saved"):
        checkpoint.require_folder(tmp_path / "new", schedule("flexgen_block"), None, 1)


def test_a_training_asks_for_room_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = schedule()
    one, weights = MODEL.total_params * 12, MODEL.total_params * 4
    began: list[int] = []

    def with_free(nbytes: int, files: session.Files) -> None:
        free = shutil._ntuple_diskusage(1, 1, nbytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
        began.clear()
        session.train(
            verify(of), steps=4, hyper=Adam(lr=1e-3), files=files, on_step=lambda step, loss, norm: began.append(step)
        )

    folders = [tmp_path / name for name in "abc"]
    for nbytes, files in (
        (one, session.Files(save=folders[0])),
        (2 * one, session.Files(save=folders[1], every=3)),
        (weights, session.Files(export=folders[2])),
    ):
        with pytest.raises(NotSaved):
            with_free(nbytes - 1, files)
        assert not began
        with_free(nbytes, files)


# ---- a training that diverges


def test_a_loss_that_is_not_finite_stops_and_costs_no_good_checkpoint(tmp_path: Path) -> None:
    """The step that diverges has a finite loss, and the checkpoint after it is of no use."""
    of, folder = schedule(), tmp_path / "checkpoints"
    losses: list[float] = []
    told: list[tuple[str, str]] = []
    files = session.Files(save=folder, every=1, export=tmp_path / "hf")
    with pytest.raises(Diverged, match=r"the loss of step 4 is nan: .*step-00000002 is kept; try a lower learning"):
        session.train(
            verify(of),
            steps=9,
            hyper=lambda step: Adam(lr=1e30 if step == 2 else 1e-3),
            files=files,
            on_step=lambda step, loss, norm: losses.append(loss),
            on_files=lambda event, folder: told.append((event, folder.name)),
        )
    assert told[-2:] == [("saved", "step-00000003"), ("removed", "step-00000003")]
    assert len(losses) == 4 and math.isfinite(losses[2]) and not math.isfinite(losses[3])
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert not list((tmp_path / "hf").iterdir())
    with pytest.raises(Diverged, match="no checkpoint was saved"):
        session.train(verify(of), steps=3, hyper=Adam(lr=1e30))


@of_torch  # on others a loss of weights of 1e30 may be finite
def test_a_stale_loss_that_is_not_finite_costs_no_good_checkpoint(tmp_path: Path) -> None:
    """The step after the one that diverges still computes with weights of before."""
    of, folder = schedule("roundpipe"), tmp_path / "checkpoints"
    told: list[tuple[str, str]] = []
    with pytest.raises(Diverged, match=r"the loss of step 5 is nan: .*step-00000002 is kept"):
        session.train(
            verify(of),
            steps=9,
            hyper=lambda step: Adam(lr=1e30 if step == 2 else 1e-3),
            files=session.Files(save=folder, every=1),
            on_files=lambda event, folder: told.append((event, folder.name)),
        )
    assert told[-2:] == [("removed", "step-00000003"), ("removed", "step-00000004")]
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """As after a last step, whose loss was still finite."""
    of, folder = schedule(), tmp_path / "checkpoints"
    _, right = train(of, 1, tmp_path, save=True)
    right[1][0][5] = float("inf")
    with pytest.raises(Diverged, match="the weights of layer 1 are not finite after step 2"):
        checkpoint.save(folder, of, 2, lambda i: right[i])
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checkpoint.all_finite(weights)
    for at in (0, 777, 1 << 19, len(weights) - 2, len(weights) - 1):
        for bad in (torch.nan, torch.inf, -torch.inf):
            found = weights.clone()
            found[at] = bad
            assert not checkpoint.all_finite(found)

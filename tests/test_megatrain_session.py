"""A whole run in one call: what it refuses before it begins, and what it leaves behind when it does."""

from __future__ import annotations

import errno
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain import checkpoint, initial, preflight, session
from megatrain.adam import Adam
from megatrain.checkpoint import CheckpointError, Diverged, NotSaved
from megatrain.cpu import CpuBackend, CpuEvent
from megatrain.data import DataError, RandomTokens
from megatrain.folder_lock import alone_in
from megatrain.hf import WeightsError
from megatrain.train import Trainer
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.model import ModelSpec
from schedules.op import Buffer, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import Verified, verify
from schedules.workload import MemoryBudget, Workload

MEMORY = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)


def verified(policy: str = "streamed", precision: str = "fp32", matmul: str | None = None) -> Verified:
    workload = Workload(micro_batch_size=1, accumulation=1, seq_len=16, precision=precision, matmul=matmul)
    return verify(policies.build(policy, presets.load("tiny"), workload, MEMORY))


def test_a_training_that_is_refused_closes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CpuBackend] = []

    class Watched(CpuBackend):
        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(session, "backend_of", lambda name: Watched())
    monkeypatch.setattr(preflight, "available_memory", lambda: 0)
    with pytest.raises(Refused):
        session.train(verified(), steps=1, hyper=Adam(lr=1e-3))
    assert len(closed) == 1


def test_a_model_of_fewer_tokens_than_bytes_needs_data_of_its_own(tmp_path: Path) -> None:
    model = replace(presets.load("tiny"), vocab_size=100)
    step = verify(policies.build("streamed", model, verified().schedule.workload, MEMORY))
    with pytest.raises(DataError, match=r"knows 100 tokens, fewer than there are bytes: give .* with --data"):
        session.train(step, steps=1, hyper=Adam(lr=1e-3))
    np.save(tmp_path / "tokens.npy", np.arange(100))
    found = session.train(step, steps=1, hyper=Adam(lr=1e-3), files=session.Files(tokens=tmp_path / "tokens.npy"))
    assert len(found.losses) == 1


def test_a_checkpoint_on_the_way_that_has_no_room_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one is written, of the same training; only the last may not be missing."""
    real, calls = checkpoint.save_file, list[Path]()

    def second_is_full(tensors: dict[str, Tensor], path: Path) -> None:
        calls.append(path)
        if path.parent.name in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", second_is_full)
    told: list[tuple[str, str]] = []
    full = {"step-00000002"}
    with pytest.warns(
        UserWarning, match=r"step 2 could not be written .*No space left on device; the training goes on"
    ):
        session.train(
            verified(), steps=3, hyper=Adam(lr=1e-3), files=session.Files(save=tmp_path / "run", every=1),
            on_files=lambda event, folder: told.append((event, folder.name)),
        )  # fmt: skip
    assert told == [("saved", "step-00000001"), ("saved", "step-00000003")]
    full = {"step-00000002"}
    with pytest.raises(NotSaved, match="step 2 could not"):
        session.train(verified(), steps=2, hyper=Adam(lr=1e-3), files=session.Files(save=tmp_path / "two", every=1))


def test_what_lives_on_is_not_looked_through_for_garbage_and_is_let_go_in_the_end() -> None:
    seen = list[int]()

    def train() -> None:
        seen.clear()
        session.train(verified(), steps=2, hyper=Adam(lr=1e-3), on_step=lambda *of: seen.append(gc.get_freeze_count()))

    gc.unfreeze()  # as everywhere but in tests
    try:
        train()
        assert min(seen) > 10_000 and gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    before = gc.get_freeze_count()
    train()
    # what the caller keeps from it stays so, but for what is no longer needed
    assert before - 1000 < gc.get_freeze_count() <= before and max(seen) <= before


def test_who_goes_on_exports_with_the_tokenizer_that_the_training_began_with(tmp_path: Path) -> None:
    base, step = tmp_path / "base", verified()
    session.train(step, steps=1, hyper=Adam(lr=1e-3), files=session.Files(export=base))
    (base / "tokenizer.json").write_text("{}")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    hyper, run = Adam(lr=1e-3), tmp_path / "run"
    session.train(step, steps=1, hyper=hyper, files=session.Files(weights=base, save=run))
    session.train(step, steps=1, hyper=hyper, files=session.Files(resume=run, save=run, export=tmp_path / "hf"))
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 7
    base.rename(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="which the training began with, is gone: the export has no tokenizer"):
        session.train(step, steps=1, hyper=hyper, files=session.Files(resume=run, export=tmp_path / "again"))


def test_one_training_at_a_time_saves_to_a_folder(tmp_path: Path) -> None:
    """Two would remove each other's checkpoints, or make one of parts of both."""
    files, told = session.Files(save=tmp_path / "run", every=1), list[str]()

    def second(step: int, loss: float, norm: float | None) -> None:
        with pytest.raises(CheckpointError, match=r"another training is saving to .*run: wait for its end") as error:
            session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=files)
        told.append(str(error.value))

    session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=files, on_step=second)
    assert len(told) == 1
    files = replace(files, resume=tmp_path / "run")
    session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=files)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000001", "step-00000002"]


def test_who_goes_on_with_other_settings_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """With other data, say, which a checkpoint does not choose."""
    run, step = tmp_path / "run", verified()
    session.train(step, steps=1, hyper=Adam(lr=1e-3), seed=3, files=session.Files(save=run))
    session.train(step, steps=1, hyper=Adam(lr=1e-3), seed=3, files=session.Files(resume=run))
    assert not recwarn.list
    told = r"-00000001 was trained with seed 3, learning rate 0\.001; this run goes on with seed 0, learning rate 0\.1"
    with pytest.warns(UserWarning, match=told):
        session.train(step, steps=1, hyper=Adam(lr=0.1), files=session.Files(resume=run))
    clipped = replace(step.schedule.workload, grad_clip=1.0)
    step = verify(policies.build("streamed", presets.load("tiny"), clipped, MEMORY))
    with pytest.warns(UserWarning, match=r"was trained with no clipping; this run goes on with clipping 1\.0"):
        session.train(step, steps=1, hyper=Adam(lr=1e-3), seed=3, files=session.Files(resume=run))


def test_who_goes_on_with_products_in_another_format_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    session.train(verified("streamed", "bf16", "fp8"), steps=1, hyper=Adam(lr=1e-3), files=session.Files(save=run))
    with pytest.warns(UserWarning, match="with products in fp8; this run goes on with products in the act"):
        session.train(verified("streamed", "bf16"), steps=1, hyper=Adam(lr=1e-3), files=session.Files(resume=run))


def test_who_goes_on_with_another_text_by_the_same_name_is_told(tmp_path: Path) -> None:
    run, text = tmp_path / "run", tmp_path / "text.npy"
    np.save(text, np.arange(300) % 256)
    session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=session.Files(tokens=text, save=run))
    np.save(text, np.arange(300) % 200)
    told = r"trained with data .*text\.npy \(300 tokens, \w+\); this run goes on with data .*text\.npy \(300 tokens"
    with pytest.warns(UserWarning, match=told):
        session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=session.Files(tokens=text, resume=run))


def test_going_on_with_a_stale_schedule_is_told_to_be_another_run(tmp_path: Path) -> None:
    run, stale = tmp_path / "run", verified("roundpipe")
    session.train(stale, steps=1, hyper=Adam(lr=1e-3), files=session.Files(save=run))
    with pytest.warns(UserWarning, match="where a run that was not stopped has them stale by 1"):
        session.train(stale, steps=1, hyper=Adam(lr=1e-3), files=session.Files(resume=run))


def test_no_checkpoint_is_looked_at_while_another_training_may_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, read = session.Files(resume=tmp_path / "run", save=tmp_path / "run"), checkpoint.read
    session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=replace(files, resume=None))

    def looking(folder: Path, schedule: Schedule) -> checkpoint.Checkpoint:
        with pytest.raises(CheckpointError, match="another training is saving"), alone_in(folder):
            pass
        return read(folder, schedule)

    monkeypatch.setattr(checkpoint, "read", looking)
    session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=files)


def test_a_drive_without_locks_is_saved_to_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without)
    session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=session.Files(save=tmp_path / "run"))
    assert (tmp_path / "run/step-00000001/training.json").is_file()


@pytest.mark.parametrize("forgotten", [0, 3])
def test_a_step_is_not_as_long_as_the_checkpoint_before_it(forgotten: int) -> None:
    ends = [10, 20, 30 + 500, 40 + 500, 50 + 1000, 60 + 1000, 70 + 1500][forgotten:]  # 500 ns for each save
    steps = np.arange(len(ends))
    ends_ns = np.array(ends)
    trace = Trace(
        digest="", machine="", source="measured", op=0 * steps, step=steps, issue_ns=ends_ns - 10,
        start_ns=ends_ns - 10, end_ns=ends_ns, waited_on=steps - 1,
    )  # fmt: skip
    found = {
        every: session.Trained(losses=[0.0] * 7, learned=[8] * 7, trace=trace, paused=range(every, 8, every)).step_ns
        for every in (1, 2, 9)
    }
    assert not found[1] and set(found[2]) == {10} and max(found[9]) == 510


def test_a_training_tells_what_it_does_with_folders_and_stops_when_asked(tmp_path: Path) -> None:
    told: list[tuple[str, object]] = []
    files = session.Files(save=tmp_path / "run", every=2, export=tmp_path / "hf")

    def train(steps: int, resume: Path | None = None, stop_at: int = 99) -> list[float]:
        told.clear()
        return session.train(
            verified(),
            steps=steps,
            hyper=Adam(lr=1e-3),
            files=replace(files, resume=resume),
            on_stage=lambda stage: told.append(("stage", stage)),
            on_step=lambda step, loss, norm: told.append(("loss", step)),
            on_files=lambda event, folder: told.append((event, folder.name)),
            stop=lambda: ("loss", stop_at) in told,
        ).losses

    assert len(train(9, stop_at=2)) == 4  # AHEAD of the one that is known
    filling = [("stage", f"filling layer {i} of 6") for i in range(1, 7)]
    begin = [("stage", "allocating memory"), *filling, ("stage", "first step")]
    losses = [("loss", step) for step in range(9)]
    assert told == [*begin, *losses[:2], ("saved", "step-00000002"), *losses[2:4], ("saved", "step-00000004")]
    (tmp_path / "run" / "step-00000006").mkdir()
    assert len(train(3, resume=tmp_path / "run", stop_at=4)) == 2
    resumed = [("skipped", "step-00000006"), ("resumed", "step-00000004")]
    assert told == [*resumed, *begin, *losses[4:6], ("saved", "step-00000006")]
    assert not list((tmp_path / "hf").iterdir())
    assert len(train(1, resume=tmp_path / "run")) == 1
    assert told[-2:] == [("saved", "step-00000007"), ("exported", "hf")]


@pytest.mark.parametrize(("stop_at", "trained"), [(None, 0), (0, 2), (1, 3), (7, 8), (6, 8)])
def test_no_step_begins_once_a_training_is_to_stop(stop_at: int | None, trained: int) -> None:
    """What it leaves is what as many steps leave."""
    step, told = verified(), [] if stop_at is not None else [None]
    data = RandomTokens(vocab_size=256, workload=step.schedule.workload)

    def trainer() -> Trainer[CpuEvent]:
        model = step.schedule.model
        return Trainer(step, CpuBackend(), data, Adam(lr=1e-3), initial=initial.random_parameters(model, 0))

    with trainer() as stopped, trainer() as whole:
        losses = stopped.run(8, on_step=lambda step, loss, norm: told.append(step), stop=lambda: stop_at in told)
        assert len(losses) == stopped.step == trained
        assert losses == whole.run(trained)
        for i in step.schedule.model.layers:
            assert all(map(torch.equal, stopped.kept(i), whole.kept(i)))


def test_adapters_begin_with_the_runs_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def adapters(model: ModelSpec, rank: int, seed: int) -> Callable[[int], Tensor]:
        seeds.append(seed)
        return initial.random_adapters(model, rank, seed)

    monkeypatch.setattr(session, "random_adapters", adapters)
    session.train(verified("lora_streamed"), steps=1, hyper=Adam(lr=1e-3), seed=7)
    assert seeds == [7]


def test_adapters_are_not_the_weights_that_they_stand_beside() -> None:
    model = presets.load("tiny")
    adapters, weights = initial.random_adapters(model, 4, 0)(0), initial.random_parameters(model, 0)(0)
    first = adapters[: 4 * model.hidden_size]  # of q_proj, whose weights come after the norm's
    beside = weights[model.hidden_size :][: len(first)]
    assert abs(float(torch.corrcoef(torch.stack([first, beside]))[0, 1])) < 0.5


def test_what_is_held_out_is_evaluated_before_between_and_after_as_a_checkpoint_is(tmp_path: Path) -> None:
    """And saving and evaluating each at its own time trains as nothing of either would."""
    text = np.random.default_rng(1).integers(0, 256, size=16 * 7 + 1)
    np.save(tmp_path / "text.npy", text)
    files = session.Files(
        held_out=tmp_path / "text.npy", held_out_every=2, save=tmp_path / "run", every=3, export=tmp_path / "hf"
    )
    told: list[tuple[int, float, int]] = []
    found = session.train(
        verified(), steps=5, hyper=Adam(lr=1e-2), files=files, on_held_out=lambda *each: told.append(each)
    )
    assert told == [(step, *of) for step, of in found.held_out.items()] and list(found.held_out) == [0, 2, 4, 5]
    assert {tokens for _, tokens in found.held_out.values()} == {16 * 7}
    assert found.paused == {0, 2, 3, 4, 5} and len(found.step_ns) < len(found.trace.step_ns())
    assert found.losses == session.train(verified(), steps=5, hyper=Adam(lr=1e-2)).losses
    for step in (3, 5):
        assert (tmp_path / "run" / f"step-{step:08d}").is_dir()
    of = session.Files(resume=tmp_path / "run", tokens=tmp_path / "text.npy")
    evaluated = session.train(verified("flexgen_block"), steps=7, hyper=Adam(lr=0.0), files=of)
    assert sum(evaluated.losses) / 7 == pytest.approx(told[-1][1], rel=1e-6)
    again = session.Files(resume=tmp_path / "run", held_out=tmp_path / "text.npy")
    more = session.train(verified(), steps=2, hyper=Adam(lr=1e-2), files=again)
    assert list(more.held_out) == [5, 7] and more.paused == {0, 2} and more.held_out[5] == found.held_out[5]


def test_of_what_is_held_out_each_token_to_learn_counts_the_same(tmp_path: Path) -> None:
    """Of two steps one has a token to learn, and the other all."""
    rows, mask = np.random.default_rng(0).integers(256, size=(3, 17)), np.ones((3, 17), dtype=bool)
    mask[0, :16] = False
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "mask.npy", mask)
    files = session.Files(held_out=tmp_path / "rows.npy", held_out_mask=tmp_path / "mask.npy")
    loss, tokens = session.train(verified(), steps=1, hyper=Adam(lr=0.0), files=files).held_out[1]
    of = session.Files(tokens=tmp_path / "rows.npy", loss_mask=tmp_path / "mask.npy")
    one, *both = session.train(verified("flexgen_block"), steps=3, hyper=Adam(lr=0.0), files=of).losses
    assert tokens == 33 and loss == pytest.approx((one + 16 * sum(both)) / 33, rel=1e-6)
    two = replace(verified().schedule.workload, accumulation=2)
    step = verify(policies.build("streamed", presets.load("tiny"), two, MEMORY))
    np.save(tmp_path / "mask.npy", np.arange(3)[:, None] * np.ones((1, 17), int) == 2)  # no whole step has the last
    with pytest.raises(DataError, match=r"mask\.npy has no token to learn in the 1 whole steps that are evaluated"):
        session.train(step, steps=1, hyper=Adam(lr=0.0), files=files)


def test_what_is_held_out_may_show_that_the_training_has_diverged(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.arange(17))
    files = session.Files(held_out=tmp_path / "text.npy", save=tmp_path / "run")
    with pytest.raises(Diverged, match=r"what is held out is nan after step 1: .*; no checkpoint was saved"):
        session.train(verified(), steps=1, hyper=Adam(lr=1e30), files=files)


def test_weights_that_are_not_finite_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """Of a token that the text has not, say: no loss would tell, and no checkpoint could be saved after hours."""
    base, hyper = tmp_path / "base", Adam(lr=1e-3)
    session.train(verified(), steps=1, hyper=hyper, files=session.Files(export=base))
    file = base / "model-00002-of-00006.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][5, 3] = float("nan")
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"base has weights that are not finite numbers, in layer 0: take a copy"):
        session.train(verified(), steps=1, hyper=hyper, files=session.Files(weights=base))


def test_adapters_that_are_not_finite_are_refused_before_the_first_step(tmp_path: Path) -> None:
    adapters, hyper = tmp_path / "adapters", Adam(lr=1e-3)
    session.train(verified("lora_streamed"), steps=1, hyper=hyper, files=session.Files(export=adapters))
    tensors = load_file(adapters / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"][2, 3] = float("inf")
    save_file(tensors, adapters / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=r"adapters makes weights that are not finite numbers, in layer 1"):
        session.train(verified(), steps=1, hyper=hyper, files=session.Files(adapters=adapters))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_first_loss_that_is_not_finite_is_not_the_learning_rates_fault(tmp_path: Path) -> None:
    """The weights are still those that the run began with: what made them so is in the past."""
    run = tmp_path / "run"
    session.train(verified(), steps=1, hyper=Adam(lr=1e30), files=session.Files(save=run))
    for policy in ("streamed", "roundpipe", "flexgen_block"):
        with pytest.raises(Refused, match=r"loss of step [12] is nan, and no step of this run had .* older") as refused:
            session.train(verified(policy), steps=3, hyper=Adam(lr=1e-5), files=session.Files(resume=run))
        assert not isinstance(refused.value, Diverged)


def test_an_evaluation_that_is_interrupted_closes_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Trainer, "close", lambda self, close=Trainer.close: (closed.append("trainer"), close(self)))
    np.save(tmp_path / "text.npy", np.arange(16 * 4 + 1))

    def interrupted(stage: str) -> None:
        if stage == "evaluating step 2 of 4":
            raise KeyboardInterrupt

    files = session.Files(held_out=tmp_path / "text.npy")
    with pytest.raises(KeyboardInterrupt):
        session.train(verified(), steps=1, hyper=Adam(lr=1e-3), files=files, on_stage=interrupted)
    assert closed


def test_adapters_of_a_checkpoint_are_evaluated_beside_their_weights(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.random.default_rng(1).integers(0, 256, size=16 * 3 + 1))
    lora = {"rank": 4, "quantised": "nf4"}

    def step(policy: str, **knobs: int | str) -> Verified:
        return verify(policies.build(policy, presets.load("tiny"), verified().schedule.workload, MEMORY, **knobs))

    hyper, held_out = Adam(lr=1e-2), tmp_path / "text.npy"
    files = session.Files(held_out=held_out, save=tmp_path / "run")
    trained = session.train(step("lora_streamed", **lora), steps=4, hyper=hyper, files=files)
    of = session.Files(resume=tmp_path / "run", tokens=held_out)
    found = session.train(step("flexgen_block", **lora), steps=3, hyper=hyper, files=of)
    assert sum(found.losses) / 3 == pytest.approx(trained.held_out[4][0], rel=1e-6)
    assert trained.held_out[4][0] != trained.held_out[0][0]
    with pytest.raises(CheckpointError, match=r"it has adapters of rank 4, the schedule evaluates all weights"):
        session.train(step("flexgen_block"), steps=1, hyper=hyper, files=of)


def test_a_training_that_is_stopped_is_not_evaluated_first(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.arange(17))
    done: list[int] = []
    found = session.train(
        verified(), steps=9, hyper=Adam(lr=1e-3), files=session.Files(held_out=tmp_path / "text.npy", held_out_every=1),
        on_step=lambda step, loss, norm: done.append(step), stop=lambda: len(done) >= 3,
    )  # fmt: skip
    assert len(found.losses) == 3 and list(found.held_out) == [0, 1, 2]


def test_an_evaluation_ends_early_when_it_is_stopped(tmp_path: Path) -> None:
    """What it found by then is no loss of the text."""
    np.save(tmp_path / "text.npy", np.arange(16 * 9 + 1))
    begun: list[str] = []
    found = session.train(
        verified(), steps=2, hyper=Adam(lr=1e-3), files=session.Files(held_out=tmp_path / "text.npy"),
        on_stage=begun.append, stop=lambda: "evaluating step 4 of 9" in begun,
    )  # fmt: skip
    assert not found.losses and not found.held_out and begun[-1] == "evaluating step 4 of 9"


@pytest.mark.parametrize(
    ("policy", "files", "told"),
    [
        ("streamed", session.Files(held_out_every=2), "what is held out is a file of tokens: give it, with --held-out"),
        ("streamed", session.Files(held_out_mask=Path("mask.npy")), "give it, with --held-out"),
        ("flexgen_block", session.Files(held_out=Path("text.npy")), "give the text as --data"),
        ("streamed", session.Files(held_out=Path("text.npy")), r"text\.npy cannot be read: No such file"),
    ],
)
def test_what_cannot_be_held_out_is_told_before_anything_is_trained(
    policy: str, files: session.Files, told: str
) -> None:
    with pytest.raises(InputError, match=told):
        session.train(verified(policy), steps=1, hyper=Adam(lr=1e-3), files=files)


def test_what_is_held_out_has_a_step_at_least(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((1, 17), dtype=np.int64))
    two = replace(verified().schedule.workload, accumulation=2)
    step = verify(policies.build("streamed", presets.load("tiny"), two, MEMORY))
    with pytest.raises(DataError, match=r"rows\.npy: there are 1 sequences of 16 tokens, too few for a step of 2"):
        session.train(step, steps=1, hyper=Adam(lr=1e-3), files=session.Files(held_out=tmp_path / "rows.npy"))


@pytest.mark.parametrize("policy", ["streamed", "lora_streamed"])
def test_a_checkpoint_is_exported_as_it_is_without_weights_text_or_memory(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same bits as at the end of the training; of adapters, too, which without their weights cannot go on."""
    hyper, run = Adam(lr=1e-2), tmp_path / "run"
    session.train(
        verified(policy), steps=2, hyper=hyper, seed=3, files=session.Files(save=run, export=tmp_path / "then")
    )
    monkeypatch.setattr(session, "backend_of", None)
    monkeypatch.setattr(session, "Trainer", None)
    told: list[str] = []
    files = session.Files(resume=run, save=run, export=tmp_path / "now")
    found = session.train(
        verified(policy), steps=0, hyper=hyper, files=files, on_files=lambda event, _: told.append(event)
    )
    assert told == ["resumed", "exported"] and not found.losses and not len(found.trace)
    for path in (tmp_path / "then").iterdir():
        assert (tmp_path / "now" / path.name).read_bytes() == path.read_bytes()
    for lacking in (session.Files(resume=run), session.Files(export=tmp_path / "other")):
        with pytest.raises(InputError, match="no steps are to be trained: that is to --export a checkpoint, with"):
            session.train(verified(policy), steps=0, hyper=hyper, files=lacking)
    with alone_in(run), pytest.raises(CheckpointError, match="another training"):
        session.train(verified(policy), steps=0, hyper=hyper, files=replace(files, export=tmp_path / "other"))


def test_what_is_reserved_of_nothing_on_a_drive_needs_none() -> None:
    built = policies.build(
        "streamed", presets.load("tiny"), Workload(micro_batch_size=1, seq_len=16, precision="fp32"), MEMORY
    )
    nothing = Buffer(name="nothing", tier=Tier.NVME, nbytes=0)
    run = session.train(verify(replace(built, buffers=(*built.buffers, nothing))), steps=1, hyper=Adam(lr=1e-3))
    assert len(run.losses) == 1

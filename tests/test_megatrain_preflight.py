"""Room for a training, asked for before it begins."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import adam_state, checkpoint, preflight
from megatrain.adam import Adam
from megatrain.checkpoint import NotSaved
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.hf import WeightsError
from megatrain.initial import random_parameters
from megatrain.nvme import Drive
from megatrain.session import train
from megatrain.store import Store, applying_bytes, bytes_within_steps, filling_bytes, keeping_bytes
from megatrain.this_machine import MAKING
from megatrain.train import Trainer
from megatrain.training_files import Files
from megatrain.workspace import peak_bytes
from schedules import policies, presets
from schedules.errors import Refused
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim.prediction import estimated_workspace

BUDGET = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)
CPU = torch.device("cpu")


def test_memory_of_both_tiers_is_ram_on_a_cpu_and_each_ones_own_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(micro_batch_size=1, accumulation=1, seq_len=16, precision="fp32")
    step = verify(policies.build("streamed", replace(presets.load("tiny"), vocab_size=1 << 12), workload, BUDGET))
    on_device, on_host = step.allocated_bytes()["device"], step.allocated_bytes()["host"]
    to_begin = filling_bytes(step, MAKING)
    more = to_begin - bytes_within_steps(step.schedule)  # activations have no memory before the first step
    assert 0 < more < to_begin
    on_host += to_begin
    on_gpu = on_device + estimated_workspace(step.schedule)
    assert on_gpu > on_device
    for kept, allocated in (("memory_reserved", 11), ("memory_allocated", 4)):  # by a training before in this process
        monkeypatch.setattr(torch.cuda, kept, lambda device, nbytes=allocated: nbytes)
    for device, gpu, ram, lacking in (
        ("cpu", 0, on_device + on_host - to_begin + more, ""),
        ("cpu", 0, on_device + on_host - to_begin + more - 1, "of memory are available on this machine"),
        ("cuda", on_gpu, on_host, ""),
        ("cuda", on_gpu - 1, on_host, r"\(device .* more within an op\), and .* of the GPU's memory are free"),
        ("cuda", on_gpu, on_host - 1, r"\(host .*\), and .* of memory are available on this machine"),
    ):
        monkeypatch.setattr(preflight, "available_memory", lambda ram=ram: ram)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gpu=gpu: (gpu - 7, 10**12))
        with pytest.raises(Refused, match=lacking) if lacking else nullcontext():
            preflight.require_memory(step, torch.device(device))


@pytest.mark.parametrize(
    ("policy", "precision", "of_largest"),
    [
        ("streamed", "fp32", (8, 0)),
        ("streamed", "bf16_split", (8, 0)),
        ("resident", "bf16", (8, 0)),
        ("resident", "bf16_fp32", (4 + 2 + 12, 0)),  # a master is made on the host
        ("zero_infinity", "bf16_fp32", (4 + 12, 12)),  # states' home is the drive
    ],
)
def test_what_is_counted_beside_the_buffers_is_what_it_takes(
    policy: str, precision: str, of_largest: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(adam_state.CHUNK, "cpu", 1 << 14)  # in proportion to the model
    model = replace(presets.load("tiny"), vocab_size=1 << 16)
    workload = Workload(micro_batch_size=1, seq_len=16, precision=precision)
    step = verify(policies.build(policy, model, workload, BUDGET))
    largest = max(map(model.params, model.layers))
    few = largest // 4  # what such a chunk takes
    with Drive(tmp_path) as drive:
        store = Store(step.schedule, CpuBackend().allocate, drive=drive)
        filling = peak_bytes(lambda: store.fill(step, random_parameters(model, 0)), CPU)
        saving = peak_bytes(
            lambda: checkpoint.save(tmp_path / "run", step.schedule, 1, lambda i: store.kept(step, i)), CPU
        )
    counted = filling_bytes(step, MAKING), keeping_bytes(step, on_gpu=False)
    assert counted == pytest.approx([of * largest for of in of_largest], rel=0.01)
    for bytes_counted, bytes_taken in zip(counted, (filling, saving), strict=True):
        assert bytes_taken == pytest.approx(bytes_counted, abs=few)


@pytest.mark.parametrize(
    ("knobs", "of_block"),
    [
        ({"through": 2}, 0),  # all is in memory, whole
        ({"through": 2, "parts": 2}, 8 + 4),  # the whole state, and half of it again on its way back
        ({"through": 2, "parts": 2, "nvme": 8, "nvme_weights": 4}, 4 + 8 + 8),  # all of it comes from the drive
    ],
    ids=str,
)
def test_what_is_counted_to_apply_a_gradient_between_steps_is_what_it_takes(
    knobs: dict[str, Any], of_block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(adam_state.CHUNK, "cpu", 1 << 14)
    model = replace(presets.load("tiny"), intermediate_size=1 << 13)
    workload = Workload(micro_batch_size=1, seq_len=16, precision="fp32", grad_clip=1.0)
    step = verify(policies.build("streamed", model, workload, BUDGET, **knobs))
    block = model.params(0)
    assert applying_bytes(step, on_gpu=False) == pytest.approx(of_block * block, rel=0.01)
    text = RandomTokens(vocab_size=model.vocab_size, workload=workload, seed=0)
    begin = random_parameters(model, 0)
    with Trainer(step, CpuBackend(), text, lambda _: Adam(lr=1e-3), initial=begin, nvme=tmp_path) as run:
        run.run(1)
        applying = peak_bytes(lambda: run.kept(model.embed), CPU)
    assert applying == pytest.approx(applying_bytes(step, on_gpu=False), abs=block)
    needed = step.allocated_bytes()
    buffers = needed["device"] + needed["host"]
    lacking = max(0, applying_bytes(step, on_gpu=False) - bytes_within_steps(step.schedule)) - 1
    monkeypatch.setattr(preflight, "available_memory", lambda: buffers + lacking)
    if lacking > 0:
        with pytest.raises(Refused, match="more to apply gradients between steps"):
            preflight.require_memory(step, CPU, begins=False)


def test_gradients_that_a_gpu_keeps_are_copied_to_be_applied() -> None:
    workload = Workload(micro_batch_size=1, accumulation=2, seq_len=16, precision="fp32", grad_clip=1.0)
    knobs: dict[str, Any] = {"through": 2, "hold": 2, "order": "microbatches"}
    model = presets.load("tiny")
    step = verify(policies.build("streamed", model, workload, BUDGET, **knobs))
    block = model.params(0)
    assert (applying_bytes(step, on_gpu=True), applying_bytes(step, on_gpu=False)) == (4 * block + 4 * block, 0)


def test_room_to_begin_and_to_save_is_asked_for_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(micro_batch_size=1, seq_len=16, precision="fp32")
    step = verify(policies.build("zero_infinity", replace(presets.load("tiny"), vocab_size=1 << 12), workload, BUDGET))
    needed, kept = step.allocated_bytes(), keeping_bytes(step, on_gpu=False) - bytes_within_steps(step.schedule)
    buffers = needed["device"] + needed["host"]
    monkeypatch.setattr(preflight, "available_memory", lambda: buffers + kept - 1)
    preflight.require_memory(step, CPU, begins=False)
    for options, of in (({"begins": False, "saves": True}, "save"), ({}, "begin")):
        with pytest.raises(Refused, match=rf"\(device .*, host .*, [0-9.]+ .B more to {of}\), and .* are available"):
            preflight.require_memory(step, CPU, **options)
    asked: list[dict[str, Any]] = []

    def noted(verified: object, device: object, **options: Any) -> None:
        asked.append(options)
        raise Refused("no room")

    monkeypatch.setattr("megatrain.session.require_memory", noted)
    for files in (Files(), Files(save=tmp_path), Files(export=tmp_path), Files(resume=tmp_path)):
        with pytest.raises(Refused, match="no room"):
            train(step, steps=1, hyper=lambda step: None, files=files)  # type: ignore[arg-type, return-value]
    told = [(options["begins"], options["saves"], options["exports"]) for options in asked]
    assert told == [(True, False, False), (True, True, False), (True, False, True), (False, False, False)]


def test_to_export_asks_for_room_for_weights_and_not_for_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose weights and state are both on a drive."""
    workload = Workload(micro_batch_size=1, seq_len=16, precision="bf16_split")
    knobs = {"params_on_nvme": True}
    step = verify(policies.build("zero_infinity", presets.load("tiny"), workload, BUDGET, **knobs))
    weights, both = (keeping_bytes(step, True, state=state) for state in (False, True))
    assert 0 < 4 * weights < both
    monkeypatch.setattr(preflight, "available_memory", lambda: step.allocated_bytes()["host"] + weights)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    preflight.require_memory(step, torch.device("cuda"), begins=False, exports=True)
    with pytest.raises(Refused, match="more to save"):
        preflight.require_memory(step, torch.device("cuda"), begins=False, saves=True)


def test_room_is_asked_for_together_where_folders_share_a_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil._ntuple_diskusage(9_000_000, 0, 3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    wanted = [("to save", tmp_path, 2_000_000), ("to export", tmp_path, 1_000_000)]
    preflight.require_room(wanted)
    with pytest.raises(
        NotSaved, match=r"to save in .* takes 2\.0 MB and to export in .* 1\.5 MB, and 3\.0 MB are free"
    ):
        preflight.require_room([wanted[0], ("to export", tmp_path, 1_500_000)])


def test_what_has_no_room_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9_000_000, 9_000_000, 0))
    workload = Workload(micro_batch_size=2, seq_len=16, precision="fp32")
    schedule = policies.build("streamed", presets.load("tiny"), workload, BUDGET)
    (tmp_path / "there").mkdir()
    for save, export in (("saved", "exported"), ("saved", "there"), ("there", None)):
        files = Files(save=tmp_path / save, export=None if export is None else tmp_path / export)
        with pytest.raises(NotSaved, match="0 B are free there"):
            files.require_room(schedule, None, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_export_that_is_refused_leaves_no_folder_for_checkpoints(tmp_path: Path) -> None:
    schedule = policies.build("resident", presets.load("tiny"), Workload(micro_batch_size=1, seq_len=16), BUDGET)
    full = tmp_path / "full"
    full.mkdir()
    (full / "model.safetensors").touch()
    with pytest.raises(WeightsError, match="has weights already"):
        Files(save=tmp_path / "saved", export=full).require_room(schedule, None, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]

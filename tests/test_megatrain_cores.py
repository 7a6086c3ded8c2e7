"""How many cores there are for a process: those that it may run on, or what a container's quota of time is for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain import cores
from megatrain.cores import usable_cores

pytestmark = pytest.mark.usefixtures("_allowed")


@pytest.fixture
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(192)))


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Its /proc and its control groups, none so far."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    return proc, groups


def group(folder: Path, version: int, quota: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")


def test_without_a_quota_they_are_those_that_it_may_run_on(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    assert usable_cores(*machine) == 192
    (proc / "self/cgroup").write_text("4:cpu,cpuacct:/user\n0::/user\n")
    group(groups / "cpu/user", 1, "-1")
    group(groups / "user", 2, "max")
    assert usable_cores(*machine) == 192


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["/", "/docker/0af3"])
@pytest.mark.parametrize(("quota", "count"), [("1600000", 16), ("1590000", 15), ("50000", 1), ("99900000", 192)])
def test_a_container_has_what_its_quota_is_for(
    machine: tuple[Path, Path], version: int, path: str, quota: str, count: int
) -> None:
    proc, groups = machine
    (proc / "self/cgroup").write_text(f"9:memory:/a\n4:cpu,cpuacct:{path}\n" if version == 1 else f"0::{path}\n")
    group(groups / "cpu" if version == 1 else groups, version, quota)
    assert usable_cores(*machine) == count


def test_the_narrowest_group_counts(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    (proc / "self/cgroup").write_text("0::/slurm/job/step\n")
    group(groups / "slurm/job/step", 2, "max")
    group(groups / "slurm/job", 2, "800000")
    group(groups / "slurm", 2, "3200000")
    assert usable_cores(*machine) == 8


def test_none_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_quotas", lambda proc, groups: iter([0]))
    assert usable_cores() == 1


def test_other_systems_let_a_process_have_every_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert usable_cores(tmp_path, tmp_path) == 10

"""How much memory there is for a process: the machine's, or what a container's limit leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain import ram
from megatrain.profile import this_cpu
from megatrain.ram import available_memory, total_memory
from megatrain.this_machine import machine_here

GIB = 1 << 30
WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
NONE = "9223372036854771712"  # no limit, as version 1 has it


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Its /proc and its control groups, none so far; 3 GiB of memory are available."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {3 * GIB // 1024} kB\n")
    return proc, groups


def group(folder: Path, version: int, *, limit: str, used: int, files: int) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    total = "total_" if version == 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{total}inactive_file {files - 7}\n{total}active_file 7\n")


def test_without_a_limit_there_is_what_the_machine_has(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    assert (total_memory(*machine), available_memory(*machine)) == (WHOLE, 3 * GIB)
    (proc / "self/cgroup").write_text("4:memory:/user\n0::/user\n")
    group(groups / "memory/user", 1, limit=NONE, used=GIB, files=7)
    group(groups / "user", 2, limit="max", used=GIB, files=7)
    assert (total_memory(*machine), available_memory(*machine)) == (WHOLE, 3 * GIB)
    (proc / "meminfo").unlink()
    assert available_memory(*machine) == WHOLE


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["/", "/docker/0af3"])
def test_a_container_has_what_its_limit_leaves(machine: tuple[Path, Path], version: int, path: str) -> None:
    """Its group is the outmost that it sees, by whatever name; Linux gives back what it keeps of files."""
    proc, groups = machine
    (proc / "self/cgroup").write_text(f"7:cpu,cpuacct:/a:b\n4:memory:{path}\n" if version == 1 else f"0::{path}\n")
    group(groups / "memory" if version == 1 else groups, version, limit=str(2 * GIB), used=GIB, files=1000)
    assert (total_memory(*machine), available_memory(*machine)) == (2 * GIB, GIB + 1000)


def test_the_narrowest_group_counts(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    (proc / "self/cgroup").write_text("0::/slurm/job/step\n")
    group(groups / "slurm/job/step", 2, limit="max", used=10, files=7)
    group(groups / "slurm/job", 2, limit=str(GIB), used=GIB // 2, files=7)
    group(groups / "slurm", 2, limit=str(2 * GIB), used=2 * GIB + 99, files=7)  # a limit that was lowered
    assert (total_memory(*machine), available_memory(*machine)) == (GIB, 0)


def test_policies_plan_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "_limits", lambda proc, groups: iter([(GIB, GIB // 4)]))
    found = machine_here(this_cpu, None)
    assert (found.device_bytes, found.host_bytes, found.free_bytes) == (GIB // 2, GIB // 2, GIB // 4)

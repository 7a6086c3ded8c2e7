"""A safetensors file with the mode of any other new file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors`. Raises OSError, SafetensorError."""
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; in its place comes a file that only its owner may read
    safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)

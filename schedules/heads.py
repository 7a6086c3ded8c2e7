"""Heads of attention: how many there are, and how wide they are."""

from __future__ import annotations

from dataclasses import dataclass

FLASH_DIM = 256  # the most that flash attention's kernels are for (PyTorch, flash_attn/flash_api.cpp)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Those of one block's attention.

    count, of_keys: of queries, and of keys and values, each of which count / of_keys query heads share.
    dim, value_dim: elements of a query or key, and of a value.
    values_are_keys: one projection makes both.
    gated: attention's output has a gate.
    """

    count: int
    of_keys: int
    dim: int
    value_dim: int
    values_are_keys: bool = False
    gated: bool = False

    @property
    def q_width(self) -> int:
        """Elements of one token's queries, all heads together."""
        return self.count * self.dim

    @property
    def k_width(self) -> int:
        """Elements of one token's keys."""
        return self.of_keys * self.dim

    @property
    def v_width(self) -> int:
        """Elements of one token's values."""
        return self.of_keys * self.value_dim

    @property
    def attended_width(self) -> int:
        """Elements of what attention returns of one token."""
        return self.count * self.value_dim

    @property
    def repeated(self) -> bool:
        """Whether attention on a GPU reads keys and values for each query head, by a kernel that shares none."""
        return self.dim > FLASH_DIM and self.count > self.of_keys

    @property
    def gate_width(self) -> int:
        """Elements by which that is multiplied; 0 without a gate."""
        return self.attended_width if self.gated else 0

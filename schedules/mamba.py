"""State spaces that choose what they keep (Mamba-2, Dao and Gu, arXiv:2405.21060): widths, FLOPs and traffic.

A short causal convolution, and a state per head in the place of attention to all tokens before: of a token's work
nothing grows with the sequence. `megatrain.mamba` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules import recurrence
from schedules.recurrence import CHUNK, convolved_words


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Heads of `head_dim` values, and groups of them that share what enters a state of `state_dim`, and what reads it.

    `kernel` tokens, its own included, go into each of the convolution's outputs. No step is less than `least_step`.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    least_step: float = 0.0

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Named as in `ModelSpec.parameter_shapes`."""
        return {
            "mamba.in_proj_z.weight": (self.value_width, hidden),
            "mamba.in_proj_xbc.weight": (self.mixed, hidden),
            "mamba.in_proj_dt.weight": (self.heads, hidden),
            "mamba.conv1d.weight": (self.mixed, 1, self.kernel),
            "mamba.conv1d.bias": (self.mixed,),
            "mamba.A_log": (self.heads,),
            "mamba.D": (self.heads,),
            "mamba.dt_bias": (self.heads,),
            "mamba.norm.weight": (self.value_width,),
            "mamba.out_proj.weight": (hidden, self.value_width),
        }

    @property
    def value_width(self) -> int:
        """Elements of one token's values, of what gates them, and of what the scan returns."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of what of one token enters the states, and of what reads them."""
        return self.groups * self.state_dim

    @property
    def mixed(self) -> int:
        """Elements of one token that the convolution mixes: values, and both of these."""
        return self.value_width + 2 * self.key_width

    @property
    def gates(self) -> int:
        """Elements of one token that the scan is given beside these: a step of each head."""
        return self.heads

    @property
    def norms(self) -> int:
        """Rows of one token that the gated norm is over."""
        return self.groups

    def flops(self, seq_len: int) -> int:
        """FLOPs of the scan's products forward, for one sequence; a multiply-add being 2.

        Per chunk, of pairs of tokens on and below the diagonal: of each group C.B, of each head what these weigh; and
        of each token and head two products with the state, its update and its reading.
        """
        whole, rest = divmod(seq_len, CHUNK)
        pairs = whole * CHUNK * (CHUNK + 1) // 2 + rest * (rest + 1) // 2
        return 2 * (pairs * (self.key_width + self.value_width) + 2 * seq_len * self.state_dim * self.value_width)

    @property
    def _words(self) -> tuple[int, int, int, int, int]:
        """In fp32 per token: keys, values, pairs of a chunk by head and by group, and a state per chunk."""
        state = -(-self.state_dim * self.value_width // CHUNK)
        return self.key_width, self.value_width, self.heads * CHUNK, self.groups * CHUNK, state

    def moved(self, *, backward: bool) -> tuple[int, int]:
        """Elements, and words in fp32, of one token that the scan moves, its products included.

        As `megatrain.mamba` computes it: products and copies read and write once, functions between them as torch's
        compiler makes kernels of them (2.11), which write some of what they need in between. Backward computes the
        chunks again.
        """
        keys, values, pairs, shared, state = self._words
        if backward:
            words = 26 * keys + 29 * values + 7 * pairs + 7 * shared + 14 * state
            return 6 * self.mixed + self.value_width, words
        words = 6 * keys + 11 * values + 2 * pairs + 2 * shared + 5 * state
        return self.mixed + self.value_width, words

    @property
    def unfused_words(self) -> int:
        """Words of one token that it moves beyond fused kernels, op by op: its convolution, what is left of values, and
        decays of pairs, by several functions each."""
        _, values, pairs, _, _ = self._words
        return convolved_words(self.mixed, self.kernel) + 10 * values + 8 * pairs

    def workspace_words(self, *, backward: bool) -> int:
        """Words in fp32 per token that are there at once, beside what the scan is given and returns."""
        keys, values, pairs, shared, state = self._words
        if backward:
            return 4 * keys + 8 * values + 2 * pairs + 2 * shared + 2 * state
        return 2 * keys + shared + max(3 * values + 3 * pairs, 5 * values, 3 * values + pairs + state)

    def share_at_once(self, batch: int, seq_len: int) -> float:
        """The part of a micro-batch that is worked through at a time."""
        sequences, groups, heads = self.together(batch, seq_len)
        return sequences * groups * heads / (batch * self.heads)

    def together(self, batch: int, seq_len: int) -> tuple[int, int, int]:
        """How many of `batch` sequences, of their groups, and of a group's heads are worked through at a time."""
        of_group = self.heads // self.groups
        heads = max(1, recurrence.AT_ONCE // (seq_len * self.head_dim))
        if heads < of_group:
            return 1, 1, heads
        if heads < self.heads:
            return 1, heads // of_group, of_group
        return min(batch, heads // self.heads), self.groups, of_group

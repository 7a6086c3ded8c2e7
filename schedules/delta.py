"""Linear attention by the gated delta rule (Gated DeltaNet, Yang et al., arXiv:2412.06464): widths, FLOPs and traffic.

Queries, keys and values go through a short causal convolution each, and a state per value head takes the place of
attention to all tokens before: of a token's work nothing grows with the sequence. `megatrain.delta` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules import recurrence
from schedules.recurrence import CHUNK, convolved_words


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Heads and their dimensions; each key head serves `value_heads` / `key_heads` value heads, in a row.

    `kernel` tokens, its own included, go into each of the convolution's outputs.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Of linear attention, named as in `ModelSpec.parameter_shapes`."""
        return {
            "linear_attn.in_proj_qkv.weight": (self.mixed, hidden),
            "linear_attn.in_proj_z.weight": (self.value_width, hidden),
            "linear_attn.in_proj_b.weight": (self.value_heads, hidden),
            "linear_attn.in_proj_a.weight": (self.value_heads, hidden),
            "linear_attn.conv1d.weight": (self.mixed, 1, self.kernel),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden, self.value_width),
        }

    @property
    def key_width(self) -> int:
        """Elements of one token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of one token's values, of what gates them, and of what the rule returns."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Elements of one token that the convolution mixes: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def gates(self) -> int:
        """Elements of one token that the rule is given beside these: of each value head a beta, and a decay's input."""
        return 2 * self.value_heads

    @property
    def norms(self) -> int:
        """Rows of one token that the gated norm is over."""
        return self.value_heads

    def flops(self, seq_len: int) -> int:
        """FLOPs of the rule's products forward, for one sequence; a multiply-add being 2.

        Per value head and chunk: of pairs of tokens k.k and what the inverse multiplies below the diagonal, q.k and
        what these weigh on it, too; and of each token three products with the state, W S, q S, and its update.
        """
        whole, rest = divmod(seq_len, CHUNK)
        below = whole * CHUNK * (CHUNK - 1) // 2 + rest * (rest - 1) // 2
        pairs = below * (2 * self.key_dim + self.value_dim) + (below + seq_len) * (self.key_dim + self.value_dim)
        return 2 * self.value_heads * (pairs + 3 * seq_len * self.key_dim * self.value_dim)

    @property
    def _words(self) -> tuple[int, int, int, int]:
        """In fp32 per token: keys and values of all value heads, pairs of a chunk, and a state per chunk."""
        keys, pairs = self.value_heads * self.key_dim, self.value_heads * CHUNK
        return keys, self.value_width, pairs, -(-keys * self.value_dim // CHUNK)

    def moved(self, *, backward: bool) -> tuple[int, int]:
        """Elements, and words in fp32, of one token that the rule moves, its products included.

        As `megatrain.delta` computes it: products and copies read and write once, functions between them as torch's
        compiler makes kernels of them (2.11), which write some of what they need in between. Backward computes the
        chunks again.
        """
        keys, values, pairs, state = self._words
        if backward:
            words = 46 * keys + 12 * self.key_width + 35 * values + 32 * pairs + 17 * state
            return 5 * self.mixed + self.value_width, words
        words = 17 * keys + 4 * self.key_width + 13 * values + 17 * pairs + 6 * state
        return self.mixed + self.value_width, words

    @property
    def unfused_words(self) -> int:
        """Words of one token that it moves beyond fused kernels, op by op: its convolution is made of a copy, a copy
        with zeros before, and a product and sums with two reads, its result has silu, and queries and keys a length.
        """
        keys, values, pairs, _ = self._words
        return convolved_words(self.mixed, self.kernel) + 16 * keys + 4 * values + 12 * pairs

    def workspace_words(self, *, backward: bool) -> int:
        """Words in fp32 per token that are there at once, beside what the rule is given and returns.

        Of its stages the larger: what the inverse multiplies, pairs of a chunk by eager kernels, or the states.
        """
        keys, values, pairs, state = self._words
        if backward:
            return 2 * state + max(5 * keys + 6 * values + 2 * pairs, 3 * keys + 4 * values + 14 * pairs)
        return max(4 * keys + 3 * values + 2 * pairs, 2 * keys + values + 7 * pairs, 3 * keys + values + pairs + state)

    def share_at_once(self, batch: int, seq_len: int) -> float:
        """The part of a micro-batch that is worked through at a time."""
        sequences, heads = self.together(batch, seq_len)
        return sequences * heads / (batch * self.key_heads)

    def together(self, batch: int, seq_len: int) -> tuple[int, int]:
        """How many of `batch` sequences, and of their key heads, are worked through at a time."""
        of_head = seq_len * self.value_heads // self.key_heads * self.value_dim
        heads = max(1, min(self.key_heads, recurrence.AT_ONCE // of_head))
        return (
            (max(1, min(batch, recurrence.AT_ONCE // (of_head * heads))), heads)
            if heads == self.key_heads
            else (1, heads)
        )

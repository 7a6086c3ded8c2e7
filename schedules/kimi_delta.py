"""Kimi Delta Attention (Kimi Linear, arXiv:2510.26692): linear attention each of whose channels decays by itself.

The gated delta rule of `schedules.delta`, but that a head's state forgets at one rate for each channel of its keys, and
that what makes decays, and what gates the output, goes through few numbers per token. `megatrain.channel_pairs` has
what differs between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.delta import DeltaNet
from schedules.recurrence import CHUNK

HALVINGS = CHUNK.bit_length() - 1  # of a chunk, until halves are single tokens


@dataclass(frozen=True, kw_only=True)
class KimiDelta(DeltaNet):
    """As many key heads as value heads, and keys as wide as values; see DeltaNet.

    Both that makes decays and what gates the output are made of as many numbers as a head has channels.
    """

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Named as in `ModelSpec.parameter_shapes`; but taps of queries, keys and values lie apart, as in files."""
        width, rank = self.value_width, self.rank
        return {
            **{f"self_attn.{x}_proj.weight": (width, hidden) for x in "qkv"},
            **{f"self_attn.{x}_conv1d.weight": (width, 1, self.kernel) for x in "qkv"},
            "self_attn.forget_gate.f_a_proj.weight": (rank, hidden),
            "self_attn.forget_gate.f_b_proj.weight": (width, rank),
            "self_attn.forget_gate.A_log": (1, 1, self.value_heads, 1),
            "self_attn.forget_gate.dt_bias": (width,),
            "self_attn.b_proj.weight": (self.value_heads, hidden),
            "self_attn.g_a_proj.weight": (rank, hidden),
            "self_attn.g_b_proj.weight": (width, rank),
            "self_attn.o_norm.weight": (self.value_dim,),
            "self_attn.o_proj.weight": (hidden, width),
        }

    @property
    def rank(self) -> int:
        """Elements of one token that decays are made of, and as many that what gates the output is."""
        return self.value_dim

    @property
    def gates(self) -> int:
        """A beta of each head, a decay's input of each channel, what these are made of, and what the gate is."""
        return self.value_heads + self.value_width + 2 * self.rank

    def moved(self, *, backward: bool) -> tuple[int, int]:
        """As `DeltaNet.moved`, with decays of each channel and pairs of tokens a half of a chunk at a time.

        Of a halving what is multiplied is made in 6 passes of keys, and read in 1.5; in backward both happen twice, and
        7 passes more make gradients and add them.
        """
        width, _, pairs, state = self._words
        if backward:
            words = (80 + 22 * HALVINGS) * width + 35 * width + 20 * pairs + 17 * state
            return 5 * self.mixed + 4 * self.value_width, words
        words = (25 + 15 * HALVINGS // 2) * width + 13 * width + 14 * pairs + 6 * state
        return self.mixed + 2 * self.value_width, words

    @property
    def unfused_words(self) -> int:
        """As `DeltaNet.unfused_words`; decays of channels by several functions each, with every halving."""
        width, _, pairs, _ = self._words
        return super().unfused_words + (8 + 5 * HALVINGS) * width - 12 * pairs

    def workspace_words(self, *, backward: bool) -> int:
        """As `DeltaNet.workspace_words`, with sums of decays as wide as keys."""
        width, _, pairs, state = self._words
        if backward:
            return 2 * state + max(16 * width + 4 * pairs, 7 * width + 14 * pairs)
        return max(8 * width + 2 * pairs, 3 * width + 7 * pairs, 5 * width + pairs + state)

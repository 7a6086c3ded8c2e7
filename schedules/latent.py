"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values through few numbers.

Keys and values of all heads are made of one latent vector per token, which has a norm, and of one key per token that
alone is turned by rotary embedding and that all heads share; queries may be made of another latent vector. Trained, it
is expanded: attention sees as many keys as queries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths in elements: of the latent vectors, of what of a head is turned and what is not, and of a head's values.

    q_rank is 0 where queries are projected at once.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Of attention, named as in `ModelSpec.parameter_shapes`."""
        q = self.heads * (self.nope + self.rope)
        if self.q_rank:
            queries = {
                "self_attn.q_a_proj.weight": (self.q_rank, hidden),
                "self_attn.q_a_layernorm.weight": (self.q_rank,),
                "self_attn.q_b_proj.weight": (q, self.q_rank),
            }
        else:
            queries = {"self_attn.q_proj.weight": (q, hidden)}
        return queries | {
            "self_attn.kv_a_proj_with_mqa.weight": (self.kv_rank + self.rope, hidden),
            "self_attn.kv_a_layernorm.weight": (self.kv_rank,),
            "self_attn.kv_b_proj.weight": (self.expanded, self.kv_rank),
            "self_attn.o_proj.weight": (hidden, self.heads * self.value),
        }

    @property
    def expanded(self) -> int:
        """Elements of one token that all heads' values, and what of their keys is not turned, are expanded to."""
        return self.heads * (self.nope + self.value)

    @property
    def compressed(self) -> int:
        """Elements of one token that queries, keys and values are compressed to, the key for all heads included."""
        return self.q_rank + self.kv_rank + self.rope

    @property
    def normed(self) -> int:
        """Of these, those that have a norm."""
        return self.q_rank + self.kv_rank

    @property
    def norms(self) -> int:
        return 2 if self.q_rank else 1

    @property
    def padded(self) -> bool:
        """Whether attention is given values with zeros behind: flash attention wants them as wide as keys."""
        return self.value != self.nope + self.rope

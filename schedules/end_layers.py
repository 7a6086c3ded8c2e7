"""The embedding and the head, which are of another size than blocks: they have buffers of their own."""

from __future__ import annotations

from schedules.op import Tier
from schedules.program import Program


def end_buffers(p: Program, of: str, tier: Tier = Tier.DEVICE) -> dict[int, str]:
    """A buffer for each, "embed.grad" and "head.grad" of "grad": a slot of a ring need not be as large as they are."""
    return {i: p.buffer(f"{p.model.layer_name(i)}.{of}", tier) for i in (p.model.embed, p.model.head)}

"""Colours that mean the same in every picture and are told apart by colour-blind readers.

The eight colours are those of Okabe and Ito, "Color Universal Design" (2008). Where there are more things
than colours, a marker or a name beside it tells those of one colour apart.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from schedules.op import Kind, Op, Phase

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
DARK_VERMILLION = "#803800"  # none of the eight: for what stands where another's vermillion does
PURPLE = "#CC79A7"
GREY = "#999999"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a policy is drawn: bars by colour, since its name stands beside them, points and lines also by marker."""

    colour: str
    marker: str = "o"


_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY)
_MARKERS = ("s", "^", "D", "v")

_POLICIES = {
    "zero3_offload": Style(colour=GREY),
    "zero3_offload master=weights": Style(colour=GREY, marker="P"),
    "streamed": Style(colour=BLUE),
    "lora_streamed": Style(colour=BLUE, marker="s"),
    "megatrain": Style(colour=GREEN),
    "megatrain_released": Style(colour=GREEN, marker="s"),
    "resident": Style(colour=BLACK, marker="s"),
    "zenflow": Style(colour=GREY, marker="v"),
    "zero_offload": Style(colour=GREY, marker="s"),
    "zero_infinity": Style(colour=GREY, marker="^"),
    "zero_offload_pp": Style(colour=GREY, marker="D"),
    "superoffload": Style(colour=VERMILLION),
    "gemini": Style(colour=PURPLE),
    "roundpipe": Style(colour=ORANGE),
    "greedysnake": Style(colour=SKY),
    "fsdp_offload": Style(colour=YELLOW),
}


def policy_style(policy: str) -> Style:
    """The style of a policy; one that is not known here gets its own by its name, the same everywhere."""
    known = _POLICIES.get(policy)
    if known is not None:
        return known
    number = zlib.crc32(policy.encode())
    return Style(colour=_COLOURS[number % len(_COLOURS)], marker=_MARKERS[number // len(_COLOURS) % len(_MARKERS)])


# What an op is, in the order of legends -> its colour.
OP_COLOURS = {
    "prefetch": SKY,
    "forward": GREEN,
    "recompute": YELLOW,
    "loss": PURPLE,
    "backward": BLUE,
    "offload": ORANGE,
    "Adam": VERMILLION,
    "Muon": DARK_VERMILLION,
    "other updates": GREY,
    "synchronise": BLACK,
}


def op_class(op: Op) -> str:
    """The key of OP_COLOURS for an op."""
    if op.phase == Phase.SYNC:
        return "synchronise"
    if op.kind in (Kind.PREFETCH, Kind.OFFLOAD):
        return str(op.kind)
    if op.kind == Kind.UPDATE:
        if op.phase != Phase.ADAM:
            return "other updates"
        return "Muon" if op.flops else "Adam"
    return "forward" if op.phase == Phase.EMBED else str(op.phase)


def ink(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour (relative luminance, WCAG 2)."""
    linear = [_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.18 else "white"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)

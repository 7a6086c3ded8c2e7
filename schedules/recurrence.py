"""What takes the place of attention where a block has a state instead: how many tokens are computed together."""

CHUNK = 64  # tokens that are computed together, as flash-linear-attention and transformers have it
AT_ONCE = 1 << 25  # elements of values that are worked through at a time, so that workspace does not grow with the step


def convolved_words(mixed: int, kernel: int) -> int:
    """Words in fp32 that a causal convolution of each channel by itself, and silu of it, move op by op of one token."""
    return mixed * (2 + 2 + 2 + 4 * (kernel - 1) + 2)

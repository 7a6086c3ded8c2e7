"""What takes the place of attention where a block has a state instead: how many tokens are computed together."""

CHUNK = 64  # tokens that are computed together, as flash-linear-attention and transformers have it
AT_ONCE = 1 << 25  # elements of values that are worked through at a time, so that workspace does not grow with the step

"""The stages by family: tile sizes, launches and table entry of each stage together; features that many have.

The functions `pick_...` choose a stage's -D options except HEAD_DIM. They raise ValueError if no tile fits, or if the
table of sizes lacks the head_dim.
"""

PLAIN = frozenset({"gqa", "causal", "window", "varlen", "lse", "strides"})
FORWARD_EXTRAS = frozenset({"mod", "rotary"})
FLOAT = frozenset({"float"})

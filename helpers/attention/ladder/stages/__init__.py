"""The stages by family: tile sizes, launches and table entry of each stage together; features that many have.

The functions `pick_...` choose a stage's -D options but for HEAD_DIM. They raise ValueError where no tile fits, or the
table of sizes has no such head_dim.
"""

PLAIN = frozenset({"gqa", "causal", "window", "varlen", "lse", "strides"})
FORWARD_EXTRAS = frozenset({"mod", "rotary"})
FLOAT = frozenset({"float"})

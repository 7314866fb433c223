"""The stages by family: tile sizes, launches and table entry of each stage together; features that many have."""

PLAIN = frozenset({"gqa", "causal", "window", "varlen", "lse", "strides"})
FORWARD_EXTRAS = frozenset({"mod", "rotary"})
FLOAT = frozenset({"float"})

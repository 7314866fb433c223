"""Studies: what was measured once, for a claim of a notebook, and how to measure it again."""

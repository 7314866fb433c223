"""A step of a checked run: what the threads of a warp did together between two barriers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Accesses that threads of one warp executed together between two barriers of their block.

    interval: how many barriers came before. threads: their numbers in the block. what: read global, write shared, ...
    count: how often. barrier: the line of the barrier that ends the interval; None at the block's end.
    """

    interval: int
    warp: int
    line: int
    what: str
    threads: tuple[int, ...]
    count: int
    barrier: int | None

    @property
    def width(self) -> float:
        """Its width in the picture: 1 for a count of one, and one more each time the count doubles."""
        return 1 + math.log2(self.count)

"""The rule of shared memory's banks: how many wavefronts one request of a warp takes.

32 banks of 4 bytes: word w is in bank w % 32, and a bank delivers one word per wavefront, to all lanes that
read it. Measured on an H200 (bench/studies/xray_vs_ncu.py of the course). The engine counts by the same rule, in
checker_profile.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

BANKS = 32


def wavefronts(words: Sequence[int]) -> int:
    """Count the wavefronts of lanes that are served together: the largest number of distinct words in one bank.

    words: indices of 4-byte words.
    """
    banks = [word % BANKS for word in {int(word) for word in np.ravel(words)}]
    return max(map(banks.count, banks))


def phases(size: int, offsets: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the words that lanes request together: 16 lanes of 8 bytes each at a time, or 8 of 16 bytes.

    Twice as many lanes are served together if every lane i has the address of lane i ^ 1, or of lane i ^ 2.

    Args:
        size: bytes per lane. offsets: {lane: byte offset}.

    Returns:
        {first lane: indices of words}, in the order of the lanes.
    """
    group = 32 if size <= 4 else 128 // size
    if size > 4 and any(all(offsets.get(i ^ k, o) == o for i, o in offsets.items()) for k in (1, 2)):
        group *= 2
    words_of: dict[int, list[int]] = {}
    for lane in sorted(offsets):
        words = range(offsets[lane] // 4, (offsets[lane] + size - 1) // 4 + 1)
        words_of.setdefault(lane // group * group, []).extend(words)
    return words_of


def wavefronts_of_request(size: int, offsets: Mapping[int, int]) -> int:
    """Count the wavefronts of all phases together; the arguments are those of `phases`."""
    return sum(map(wavefronts, phases(size, offsets).values()))

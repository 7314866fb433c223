"""Stage 01 as a kernel of Numba's, for its CUDA simulator. Importing this needs Numba.

A module of its own, because the simulator gives a kernel its thread indices by exchanging the name `cuda` among the
globals of the kernel's module.
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda


@cuda.jit
def attend(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
    """One head, a thread per query row; the running maximum and sum of stage 03 in place of S.

    q, o: (N, d), k, v: (N_kv, d), float32; o is 0 before.
    """
    row = cuda.grid(1)
    if row < q.shape[0]:
        largest, total = -math.inf, 0.0
        for key in range(k.shape[0]):
            score = 0.0
            for c in range(q.shape[1]):
                score += q[row, c] * k[key, c]
            score *= scale
            rescale = math.exp(largest - score) if score > largest else 1.0
            largest = max(largest, score)
            p = math.exp(score - largest)
            total = total * rescale + p
            for c in range(q.shape[1]):
                o[row, c] = o[row, c] * rescale + p * v[key, c]
        for c in range(q.shape[1]):
            o[row, c] /= total

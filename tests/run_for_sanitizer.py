"""Every stage at awkward sizes, once: the program to run under compute-sanitizer on a GPU.

    PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 python3 tests/run_for_sanitizer.py

The other tools: racecheck, synccheck, initcheck. Checks the results too, so a silent failure is none.
"""

from __future__ import annotations

import sys

from helpers import reference
from helpers.check import check, make_inputs
from helpers.device import ON_GPU, cp, describe
from helpers.stages import LADDER

SHAPES = ((1, 1, 1), (33, 31, 3), (65, 63, 8), (64, 127, 40), (127, 257, 64), (63, 65, 80), (65, 33, 128))


def main() -> int:
    """Run; the exit status is 0 when every result is right."""
    print(describe())
    if ON_GPU:
        cp.cuda.set_allocator(None)  # CuPy's pool hands out slices of large blocks: an overrun would land in one
    for stage in (stage for stage in LADDER.values() if "float32" in stage.dtypes):
        for n, n_kv, head_dim in SHAPES:
            q, k, v = make_inputs(n, n_kv, head_dim, seed=n + n_kv)
            check(f"{stage.name} {n}x{n_kv}x{head_dim}", stage(q, k, v), reference.attention(q, k, v))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The ladder: one callable per stage, all with the same signature.

    from helpers.stages import LADDER
    o = LADDER["online_softmax"](q, k, v)

This is the only launch geometry outside the notebooks. A new stage is one `.cu` file and one entry here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import kernel
from helpers.device import cp

MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder: attention by one kernel file.

    Called as `stage(q, k, v, *, softmax_scale=None)`.
    """

    number: int
    name: str  # of the kernel and of the stage
    file: str
    idea: str
    tiles: Callable[[int], dict[str, int]]  # HEAD_DIM -> the sizes it is compiled with
    scratch: bool = False  # whether the kernel takes an N x N_kv array S

    def defines(self, head_dim: int) -> dict[str, int]:
        """The -D options for a head dimension: HEAD_DIM and the tile sizes."""
        return {"HEAD_DIM": head_dim, **self.tiles(head_dim)}

    def __call__(self, q: Any, k: Any, v: Any, *, softmax_scale: float | None = None) -> Any:
        """softmax(softmax_scale * q k^T) v, for one head.

        Args:
            q: (N, d) float32, NumPy or device array; N >= 1 and 1 <= d <= 128.
            k, v: (N_kv, d) float32; N_kv >= 1.
            softmax_scale: 1 / sqrt(d) where it is not given.

        Returns:
            The output, (N, d) float32, a device array.

        Raises:
            TypeError: an array that is not float32; a softmax_scale that is no number.
            ValueError: shapes that do not fit each other or the stage; a softmax_scale that float32 cannot hold.
        """
        run, o = self.prepare(q, k, v, softmax_scale=softmax_scale)
        run()
        return o

    def prepare(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        source: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[Callable[[], None], Any]:
        """Everything but the launch: a function that launches, and the output it writes. For timing and experiments.

        Args:
            source: another text of the kernel in place of the file's.
            sizes: tile sizes in place of the stage's own, such as {"BLOCK_M": 32}.
        """
        for name, array in (("q", q), ("k", k), ("v", v)):
            self._check_array(name, array)
        _check_shapes(q, k, v)
        q, k, v = (cp.ascontiguousarray(cp.asarray(a)) for a in (q, k, v))
        n, head_dim = q.shape
        n_kv = k.shape[0]
        scale = _scale(softmax_scale, head_dim)
        defines = {**self.defines(head_dim), **(sizes or {})}
        compiled = kernel.load(source or self.file, self.name, defines=defines)
        o = cp.full(q.shape, cp.nan, dtype=cp.float32)  # a row that nobody writes shows
        scratch = (cp.empty((n, n_kv), dtype=cp.float32),) if self.scratch else ()
        block = defines["BLOCK_M"]
        grid = -(-n // block)
        args = (q, k, v, *scratch, o, cp.int32(n), cp.int32(n_kv), cp.float32(scale))
        return (lambda: compiled((grid,), (block,), args)), o

    def _check_array(self, name: str, array: Any) -> None:
        if not isinstance(array, (np.ndarray, cp.ndarray)):
            raise TypeError(f"{name} is a NumPy or a device array; got {type(array).__name__}")
        if array.dtype != np.float32:
            raise TypeError(f"{name} is {array.dtype}; stage {self.name} takes float32: {name}.astype('float32')")


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = isinstance(softmax_scale, (int, float, np.integer, np.floating)) and not isinstance(softmax_scale, bool)
    if not number:
        got = f"{type(softmax_scale).__name__} {softmax_scale!r:.40}"
        raise TypeError(f"softmax_scale is a number, or None for 1 / sqrt(head_dim); got {got}")
    if not abs(softmax_scale) <= float(np.finfo(np.float32).max):  # NaN compares as False
        raise ValueError(f"softmax_scale = {softmax_scale}; a finite float32 is needed")
    return float(softmax_scale)


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}; this stage takes one head: (rows, head_dim)")
        if array.shape[0] < 1:
            raise ValueError(f"{name} has shape {array.shape}; at least one row is needed")
    if not q.shape[1] == k.shape[1] == v.shape[1]:
        raise ValueError(f"head_dim differs: q {q.shape}, k {k.shape}, v {v.shape}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"each key needs its value: k has {k.shape[0]} rows, v has {v.shape[0]}")
    if not 1 <= q.shape[1] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim = {q.shape[1]}; this stage takes 1 to {MAX_HEAD_DIM}")


def _shared_tiles(head_dim: int) -> dict[str, int]:
    """The most query rows whose Q_smem, K_smem and V_smem fit 48 KB: each tile then serves that many rows."""
    block_n = 16
    row_stride = head_dim | 1
    for block_m in (128, 64, 32):
        if 4 * (block_m * row_stride + 2 * block_n * head_dim) <= 48 * 1024:
            break
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


_STAGES = (
    Stage(1, "naive", "01_naive.cu", "one thread per query row", lambda d: {"BLOCK_M": 64}, scratch=True),
    Stage(2, "tiled", "02_tiled.cu", "K and V tiles in shared memory, two passes", _shared_tiles),
    Stage(3, "online_softmax", "03_online_softmax.cu", "running max and sum, one pass", _shared_tiles),
)

LADDER: Mapping[str, Stage] = {stage.name: stage for stage in _STAGES}

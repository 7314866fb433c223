"""The table of stages. Launch geometry is here, in launches.py and in the notebooks that teach it, nowhere else.

A new stage is one `.cu` file and one entry of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from helpers import device
from helpers.attention.ladder import limits, tiles
from helpers.attention.ladder.call import Call
from helpers.attention.ladder.contract import Stage, Tuning
from helpers.attention.ladder.launches import (
    backward,
    backward_mma,
    heads_in_grid,
    hopper_backward,
    in_slots,
    one_head_each,
    persistent,
    row_sums,
    schedule,
    scores_of_one_head,
    split_and_persistent,
    strided,
    tiles_of_long_rows,
    tiles_of_rows,
    two_parts,
)
from helpers.attention.ladder.plan import Rung
from helpers.engine.nvrtc import why_no_cute

S = TypeVar("S", bound=Stage)

# ---- the sizes they are compiled with


def _shared_tiles(head_dim: int) -> dict[str, int]:
    """The most query rows whose Q_smem, K_smem and V_smem fit 48 KB: each tile then serves that many rows."""
    block_n = 16
    row_stride = head_dim | 1
    for block_m in (128, 64, 32):
        if 4 * (block_m * row_stride + 2 * block_n * head_dim) <= 48 * 1024:
            break
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


def _register_tiles(head_dim: int) -> dict[str, int]:
    """What `helpers.attention.ladder.tiles` picks for this device's shared memory."""
    return tiles.pick(head_dim, limits.most_shared()).defines


def _register_tiles_shared(sizes: Mapping[str, int]) -> int:
    chosen = tiles.Tiles(sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["THREADS"], sizes["THREADS_X"])
    return chosen.shared_bytes(sizes["HEAD_DIM"])


def _wmma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_wmma(head_dim, limits.most_shared())


def _mma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_mma(head_dim, limits.most_shared())


def _tf32_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_tf32(head_dim, limits.most_shared())


def _few_tf32_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_few_tf32(head_dim, limits.most_shared())


def _cute_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_cute(head_dim, limits.most_shared())


def _few_register_tiles(head_dim: int) -> dict[str, int]:
    few = tiles.pick_few(head_dim, limits.most_shared())
    return few.defines if few else {}


def _lone_register_tiles(head_dim: int) -> dict[str, int]:
    lone = tiles.pick_lone(head_dim, limits.most_shared())
    return lone.defines if lone else {}


def _few_mma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_few_mma(head_dim, limits.most_shared())


def _backward_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_backward(head_dim, limits.most_shared())


def _backward_mma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_backward_mma(head_dim, limits.most_shared())


def _other_backward_mma_tiles(blocks: str) -> Callable[[int], dict[str, int]]:
    return lambda head_dim: tiles.pick_other_backward_mma(blocks, head_dim, limits.most_shared())


def _in_order(call: Call) -> dict[str, int]:
    """The usual tiles where blocks add to dQ in order: with the smaller ones for few blocks, more would wait.

    With those an H200 took 2.2 to 6.6 times the time of atomics, at 1 and 4 heads of 4096 rows.
    """
    return {"DETERMINISTIC": 1, **_backward_mma_tiles(call.arrays["q"].shape[-1])} if call.deterministic else {}


def _few_backward_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_few_backward(head_dim, limits.most_shared())


def _hopper_variant(call: Call) -> dict[str, int]:
    """The tile for the call's mask, or for its functions of scores, which need registers."""
    keys, (left, right) = call.rows if call.packed else call.arrays["k"].shape[2], call.window
    if left >= 0 and right >= 0:
        keys = min(keys, left + right + 1)  # that a row sees
    if call.mod:
        biased = "bias" in call.arrays
        return tiles.pick_hopper_with_functions(call.head_dim, masked=bool(call.mod.mask), biased=biased)
    return tiles.pick_hopper(call.head_dim, call.window != (-1, -1), keys)


def _hopper_by_default(rows: int, all_rows: int, head_dim: int) -> bool:
    """Where it is faster than 07 on an H200: not for little work, of which 07 has smaller tiles.

    Nor on the CPU engine, which says 9.0: there, calls that name no stage keep 07, as on every GPU but Hopper's. So the
    outputs of notebooks 08 and 09, which call this way, are the same with and without such a GPU's stage.
    """
    return device.ON_GPU and (rows >= 512 if head_dim > 64 else all_rows >= 16384)


def _tf32_variant(call: Call) -> dict[str, int]:
    return tiles.packed_tf32(call.head_dim) if call.packed else {}


def _tf32_by_default(rows: int, all_rows: int, head_dim: int) -> bool:
    """Where it was faster than 05 on an H200: 0.85 times as fast with 4096 rows in all, 1.4 with 8192; not at 256.

    On the CPU engine, calls that name no stage keep 05, so that the outputs of notebooks stay.
    """
    return device.ON_GPU and all_rows >= 8192 and head_dim <= 128


def _fp16x3_by_default(rows: int, all_rows: int, head_dim: int) -> bool:
    """By name only: float32 is chosen for its accuracy, of which this loses some if a tile spans over 16 bits or so."""
    return False


def _hopper_backward_variant(call: Call) -> dict[str, int]:
    derivative = bool(call.mod and call.mod.has_derivative)
    in_order = {"DETERMINISTIC": 1} if call.deterministic else {}
    return in_order | tiles.pick_hopper_backward(call.head_dim, derivative)


def _hopper_backward_by_default(rows: int, all_keys: int, head_dim: int) -> bool:
    """Where most multiprocessors get a block: 08 has smaller ones for less."""
    return device.ON_GPU and all_keys >= 12288


def _vector(call: Call) -> dict[str, int]:
    """Whether rows are read 16 bytes at a time, as kernels in float32 do without being told."""
    return {} if call.aligned else {"VECTOR": 0}


EVERYTHING = frozenset({"gqa", "causal", "window", "varlen", "lse", "strides"})
FORWARD_EXTRAS = frozenset({"mod", "rotary"})
FLOAT = frozenset({"float"})
_REGISTER_TILED: Mapping[str, Any] = {  # 05 has the tiles of 04
    "tuning": Tuning(
        _register_tiles,
        few_blocks=_few_register_tiles,
        lone_blocks=_lone_register_tiles,
        variant=_vector,
    ),
    "threads": lambda sizes: sizes["THREADS"],
    "shared_bytes": _register_tiles_shared,
    "max_head_dim": tiles.MAX_HEAD_DIM,
}
_WARPS_OF_MMA: Mapping[str, Any] = {  # 07 and what is built on it: rows are copied 16 bytes at a time
    "dtypes": ("float16", "bfloat16"),
    "min_cc": 80,
    "head_dim_step": 8,
    "threads": lambda sizes: 32 * sizes["WARPS"],
    "needs_aligned": True,
}

_HOPPER_BACKWARD: Mapping[str, Any] = {
    "launches": hopper_backward,
    "slots": in_slots,
    "direction": "backward",
    "dtypes": ("float16", "bfloat16"),
    "min_cc": 90,
    "only_cc": True,
    "head_dim_step": 8,
    "threads": lambda sizes: 384,
    "needs_aligned": True,
}

_STAGES = (
    Stage(
        *(1, "naive", "01_naive.cu", "one thread per query row"),
        Tuning(lambda head_dim: {"BLOCK_M": 64}),
        launches=one_head_each,
        scratch=scores_of_one_head,
    ),
    Stage(
        *(2, "tiled", "02_tiled.cu", "K and V tiles in shared memory, two passes"),
        Tuning(_shared_tiles),
        launches=one_head_each,
    ),
    Stage(
        *(3, "online_softmax", "03_online_softmax.cu", "running max and sum, one pass"),
        Tuning(_shared_tiles),
        launches=one_head_each,
    ),
    Stage(
        *(4, "register_tiles", "04_register_tiles.cu", "a register tile per thread, float4"),
        launches=heads_in_grid,
        **_REGISTER_TILED,
    ),
    Stage(
        *(5, "heads_and_masks", "05_heads_and_masks.cu", "strides, masks, lengths: only the tiles that are seen"),
        launches=strided,
        slots=in_slots,
        features=EVERYTHING | FORWARD_EXTRAS,
        **_REGISTER_TILED,
    ),
    Stage(
        *(6, "flash_wmma", "06_wmma.cu", "tensor cores by the WMMA interface"),
        Tuning(_wmma_tiles),
        launches=strided,
        slots=in_slots,
        features=EVERYTHING | {"rotary"},
        dtypes=("float16", "bfloat16"),
        min_cc=75,
        head_dim_step=8,
        shared_bytes=lambda sizes: tiles.wmma_shared_bytes(sizes["HEAD_DIM"], sizes),
        needs_aligned=True,
    ),
    Stage(
        *(7, "flash_mma", "07_mma.cu", "FlashAttention-2: mma.sync, swizzled tiles, cp.async"),
        Tuning(_mma_tiles, _few_mma_tiles),
        launches=strided,
        slots=in_slots,
        features=EVERYTHING | FORWARD_EXTRAS | FLOAT,
        max_head_dim=256,
        shared_bytes=lambda sizes: tiles.mma_shared_bytes(sizes["HEAD_DIM"], sizes),
        **_WARPS_OF_MMA,
    ),
    Stage(
        *(8, "backward", "08_backward.cu", "the gradients: P again from lse, five products or seven"),
        Tuning(
            _backward_tiles,
            _few_backward_tiles,
            variant=_vector,
        ),
        launches=backward,
        slots=in_slots,
        scratch=row_sums,
        direction="backward",
        kernels=("backward_preprocess", "backward", "backward_dq"),
        features=EVERYTHING | {"deterministic", "mod"},
        max_head_dim=tiles.MAX_HEAD_DIM,
        threads=lambda sizes: sizes["THREADS"],
        shared_bytes=lambda sizes: tiles.backward_shared_bytes(sizes["HEAD_DIM"], sizes),
    ),
    Stage(
        *(8, "backward_mma", "08_backward_mma.cu", "the gradients on tensor cores: transposed scores, five products"),
        Tuning(
            _backward_mma_tiles,
            *map(_other_backward_mma_tiles, ("few", "fewest", "lone")),
            variant=_in_order,
        ),
        launches=backward_mma,
        slots=in_slots,
        scratch=tiles_of_rows,
        direction="backward",
        kernels=("backward_mma_preprocess", "backward_mma", "backward_mma_convert"),
        features=EVERYTHING | FLOAT | {"deterministic", "mod"},
        max_head_dim=256,
        shared_bytes=lambda sizes: tiles.backward_mma_shared_bytes(sizes["HEAD_DIM"], sizes),
        **_WARPS_OF_MMA,
    ),
    Stage(
        *(10, "hopper", "10_hopper.cu", "FlashAttention-3: TMA, wgmma, a producer and two consumers"),
        Tuning(tiles.pick_hopper, variant=_hopper_variant, by_default=_hopper_by_default),
        launches=persistent,
        scratch=schedule,
        features=EVERYTHING | FORWARD_EXTRAS | FLOAT,
        dtypes=("float16", "bfloat16"),
        min_cc=90,
        only_cc=True,
        max_head_dim=256,
        head_dim_step=8,
        threads=lambda sizes: 128 + 2 * sizes["BLOCK_M"],
        shared_bytes=lambda sizes: tiles.hopper_shared_bytes(sizes["HEAD_DIM"], sizes),
        needs_aligned=True,
    ),
    Stage(
        *(12, "flash_cute", "12_cute.cu", "07 in CuTe: its layouts, TiledCopy and TiledMMA"),
        Tuning(
            _cute_tiles,
            by_default=lambda rows, all_rows, head_dim: False,  # 07 computes the same, and compiles in a second
        ),
        launches=strided,
        slots=in_slots,
        features=EVERYTHING | {"rotary"},
        shared_bytes=lambda sizes: tiles.mma_shared_bytes(sizes["HEAD_DIM"], sizes),
        missing=why_no_cute,
        slow_to_compile=True,
        **_WARPS_OF_MMA,
    ),
    Stage(
        *(13, "hopper_backward_wide", "13_hopper_backward_wide.cu", "the same for rows of more than 128 elements"),
        Tuning(lambda head_dim: {"BLOCK_M": 64, "BLOCK_N": 64}, by_default=_hopper_backward_by_default),
        scratch=tiles_of_long_rows,
        kernels=tuple(f"hopper_backward_wide{part}" for part in ("_preprocess", "", "_convert")),
        features=EVERYTHING | FLOAT,
        max_head_dim=256,
        shared_bytes=lambda sizes: tiles.HOPPER_BACKWARD_WIDE_SHARED,
        **_HOPPER_BACKWARD,
    ),
    Stage(
        *(13, "hopper_backward", "13_hopper_backward.cu", "the gradients by wgmma and TMA, FlashAttention-3's way"),
        Tuning(tiles.pick_hopper_backward, variant=_hopper_backward_variant, by_default=_hopper_backward_by_default),
        scratch=tiles_of_rows,
        kernels=tuple(f"hopper_backward{part}" for part in ("_preprocess", "", "_convert")),
        features=EVERYTHING | FLOAT | {"deterministic", "mod"},
        max_head_dim=128,
        shared_bytes=lambda sizes: tiles.hopper_backward_shared_bytes(sizes["HEAD_DIM"], sizes),
        **_HOPPER_BACKWARD,
    ),
    Stage(
        *(15, "fp16x3", "15_fp16x3.cu", "float32 by wgmma: three products of fp16, a scale for each tile"),
        Tuning(tiles.pick_fp16x3, by_default=_fp16x3_by_default),
        launches=split_and_persistent,
        scratch=two_parts,
        kernels=("fp16x3_split", "fp16x3"),
        features=EVERYTHING | FORWARD_EXTRAS,
        min_cc=90,
        only_cc=True,
        head_dim_step=8,
        threads=lambda sizes: 128 + 2 * sizes["BLOCK_M"],
        shared_bytes=lambda sizes: tiles.fp16x3_shared_bytes(sizes["HEAD_DIM"], sizes),
        needs_aligned=True,
    ),
    Stage(
        *(15, "tf32", "15_tf32.cu", "float32 on tensor cores: three TF32 products, sums that do not drift"),
        Tuning(_tf32_tiles, _few_tf32_tiles, variant=_tf32_variant, by_default=_tf32_by_default),
        launches=strided,
        slots=in_slots,
        features=EVERYTHING | FORWARD_EXTRAS,
        min_cc=80,
        max_head_dim=256,
        head_dim_step=4,
        threads=lambda sizes: 32 * sizes["WARPS"],
        shared_bytes=lambda sizes: tiles.tf32_shared_bytes(sizes["HEAD_DIM"], sizes),
        needs_aligned=True,
    ),
)

LADDER: Mapping[str, Rung] = {stage.name: Rung.of(stage) for stage in _STAGES}


def forward_of(stages: Mapping[str, S]) -> dict[str, S]:
    """Those that compute the output."""
    return {name: stage for name, stage in stages.items() if stage.direction == "forward"}


def backward_of(stages: Mapping[str, S]) -> dict[str, S]:
    """Those that compute gradients."""
    return {name: stage for name, stage in stages.items() if stage.direction == "backward"}


def able_of(stages: Mapping[str, S], **needs: Any) -> list[S]:
    """Those that can do what a call that names none needs, on this device, the fastest first.

    Args:
        needs: as `Stage.why_not` has them.
    """
    return [stage for stage in reversed(stages.values()) if stage.why_not(**needs) is None]


def default_of(stages: Mapping[str, S], rows: int, all_rows: int, **needs: Any) -> S | None:
    """The stage for a call that names none: the last, and fastest, that can do it on this device; None if none can.

    Args:
        rows: of Q. all_rows: of all heads together; for gradients, of K. needs: as `Stage.why_not` has them.
    """
    able = able_of(stages, **needs)
    return next((stage for stage in able if stage.tuning.by_default(rows, all_rows, needs["head_dim"])), None)


FORWARD: Mapping[str, Rung] = forward_of(LADDER)
BACKWARD: Mapping[str, Rung] = backward_of(LADDER)

"""The climbs: the steps between a stage and the one before it, each a kernel file that differs by one idea.

    from helpers.attention.ladder.steps import BEFORE, CLIMBS
    show.diff(BEFORE["register_tiles"], CLIMBS["register_tiles"][0].file)

A step is a Stage, so whatever runs, checks or measures a stage runs, checks or measures a step. The last element of a
climb is the stage itself. A new climb adds a block below and its entries in CLIMBS, BEFORE and LAST_IDEAS.

A step keeps its number, which is that of its file, when another is inserted or removed: numbers may have gaps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from helpers.attention.ladder import limits, tiles
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.contract import Stage
from helpers.attention.ladder.launches import strided, strided_maps, strided_rotating, tiles_of_rows
from helpers.attention.ladder.table import LADDER

Sizes = Mapping[str, int]


def _step(target: Stage, file: str, idea: str, **changed: Any) -> Stage:
    """A step of the climb to target: the stage with another file, and what that file needs otherwise.

    It has one set of sizes for all grids, so that two steps differ by their text alone. None has functions of scores.
    """
    one_size = replace(target, tuning=target.tuning.of_one_size(), features=target.features - {"mod"})
    return one_size.changed(file=file, idea=idea, **changed)


def _first_that_fits(
    candidates: Callable[[int], list[dict[str, int]]], shared_bytes: Callable[[Sizes], int]
) -> Callable[[int], dict[str, int]]:
    """HEAD_DIM -> the first candidate for which a block of this device has shared memory; ValueError for none."""

    def pick(head_dim: int) -> dict[str, int]:
        most = limits.most_shared()
        for sizes in candidates(head_dim):
            if shared_bytes({"HEAD_DIM": head_dim, **sizes}) <= most:
                return sizes
        raise ValueError(f"head_dim = {head_dim}: no tile fits {most:,} bytes of shared memory")

    return pick


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ---- 03 -> 04


def _row_shared(sizes: Sizes) -> int:
    """sizeof(Shared), in bytes: K, V and Q, whose rows have an odd length."""
    d = sizes["HEAD_DIM"]
    return _up(4 * (2 * sizes["BLOCK_N"] * d + sizes["BLOCK_M"] * (d | 1)), 16)


def _words_shared(*, k_odd: bool, p_padding: int, q_transposed: bool) -> Callable[[Sizes], int]:
    """sizeof(Shared) of the steps whose tiles of K and V are words, not float4."""

    def shared_bytes(sizes: Sizes) -> int:
        d, m, n = sizes["HEAD_DIM"], sizes["BLOCK_M"], sizes["BLOCK_N"]
        v_row = _up(d, sizes["THREADS_X"])
        q = m * (_up(d, 4) if q_transposed else d | 1)
        return _up(4 * (n * ((d | 1 if k_odd else v_row) + v_row) + q + n * (m + p_padding)), 16)

    return shared_bytes


def _float4_shared(sizes: Sizes) -> int:
    """sizeof(Shared) of the steps whose rows of P have 4 words of padding, where the stage's have 8."""
    return LADDER["register_tiles"].shared_bytes(sizes) - 4 * 4 * sizes["BLOCK_N"]


def _one_row(head_dim: int) -> list[dict[str, int]]:
    return [{"BLOCK_M": rows, "BLOCK_N": 16} for rows in (128, 64, 32)]


def _two_rows(head_dim: int) -> list[dict[str, int]]:
    """Two rows a thread, or one where the accumulators of two would not fit the registers."""
    rows_per_thread = 2 if head_dim <= 64 else 1
    return [{**sizes, "THREADS": sizes["BLOCK_M"] // rows_per_thread} for sizes in _one_row(head_dim)]


def _four_by_four(head_dim: int) -> list[dict[str, int]]:
    sizes = ((64, 32, 128, 8), (32, 32, 64, 8), (16, 16, 32, 8))
    return [tiles.Tiles(*size).defines for size in sizes]


def _as_the_stage(head_dim: int) -> list[dict[str, int]]:
    """The stage's sizes, such as 8 x 8 scores a thread; smaller ones where a step's own padding leaves no room."""
    return [LADDER["register_tiles"].tiles(head_dim), *_four_by_four(head_dim)]


def _register_tiles() -> tuple[Stage, ...]:
    target = LADDER["register_tiles"]

    def step(
        file: str,
        idea: str,
        candidates: Callable[[int], list[dict[str, int]]] = _as_the_stage,
        shared_bytes: Callable[[Sizes], int] = target.shared_bytes,
        **changed: Any,
    ) -> Stage:
        return _step(
            target,
            f"steps/{file}",
            idea,
            tiles=_first_that_fits(candidates, shared_bytes),
            shared_bytes=shared_bytes,
            max_head_dim=128,
            **changed,
        )

    word_by_word: dict[str, Any] = {"variant": lambda call: {}}  # no float4 from global memory yet, so no -DVECTOR
    by_rows: dict[str, Any] = {**word_by_word, "threads": lambda sizes: sizes.get("THREADS", sizes["BLOCK_M"])}
    unpadded = _words_shared(k_odd=False, p_padding=0, q_transposed=False)
    padded = _words_shared(k_odd=True, p_padding=4, q_transposed=False)
    transposed = _words_shared(k_odd=True, p_padding=4, q_transposed=True)
    return (
        step("04_01_heads_in_grid.cu", "heads in the grid", _one_row, _row_shared, **by_rows),
        step("04_04_rows_per_thread.cu", "two rows a thread", _two_rows, _row_shared, **by_rows),
        step("04_07_eight_by_eight.cu", "8 x 8 scores a thread", _as_the_stage, unpadded, **word_by_word),
        step("04_08_padded_rows.cu", "rows of K and P padded", _as_the_stage, padded, **word_by_word),
        step("04_09_float4_q_and_p.cu", "float4 from Q and P", _as_the_stage, transposed, **word_by_word),
        step("04_10_float4_k_and_v.cu", "float4 from K and V", _as_the_stage, _float4_shared, **word_by_word),
        step("04_11_float4_from_global.cu", "float4 from global memory", _as_the_stage, _float4_shared),
        step("04_12_lanes_in_squares.cu", "lanes in squares"),
        step("04_14_exp2.cu", "exp2 for exp"),
        target,
    )


# ---- 06


def _without_s_shared(sizes: Sizes) -> int:
    """SHARED_BYTES of the step that has no S in shared memory yet."""
    return LADDER["flash_wmma"].shared_bytes(sizes) - 4 * sizes["BLOCK_M"] * (sizes["BLOCK_N"] + 4)


def _flash_wmma() -> tuple[Stage, ...]:
    target = LADDER["flash_wmma"]

    def step(file: str, idea: str, **changed: Any) -> Stage:
        return _step(target, f"steps/{file}", idea, **changed)

    return (
        step("06_01_row_per_lane.cu", "a row per lane", shared_bytes=_without_s_shared),
        step("06_02_qk_by_wmma.cu", "Q K^T by WMMA"),
        step("06_04_pv_by_wmma.cu", "P V by WMMA"),
        step("06_05_fragment_of_factors.cu", "a fragment of factors"),
        target,
    )


# ---- 06 -> 07


def _padded(head_dim: int) -> int:
    """Elements of a row in shared memory: whole fragments of 16, and 16 bytes of padding."""
    return _up(head_dim, 16) + 8


def _p_shared(sizes: Sizes) -> int:
    """SHARED_BYTES where P is stored: 128 rows with 16 bytes of padding each."""
    return _one_tile_shared(sizes) + 2 * sizes["BLOCK_M"] * (sizes["BLOCK_N"] + 8)


def _one_tile_shared(sizes: Sizes) -> int:
    """SHARED_BYTES of Q and one tile each of K and V, in padded rows."""
    return 2 * _padded(sizes["HEAD_DIM"]) * (sizes["BLOCK_M"] + 2 * sizes["BLOCK_N"])


def _swizzled_shared(sizes: Sizes) -> int:
    """Of Q and one tile each of K and V, in rows without padding."""
    return 2 * _up(sizes["HEAD_DIM"], 16) * (sizes["BLOCK_M"] + 2 * sizes["BLOCK_N"])


def _as_wmma(head_dim: int) -> list[dict[str, int]]:
    """The sizes of 06; fewer rows a block where there is little shared memory."""
    return [{"BLOCK_M": rows, "BLOCK_N": 32, "MIN_BLOCKS": 2} for rows in (128, 64)]


def _as_mma(head_dim: int) -> list[dict[str, int]]:
    """Sizes of 07 with 64 keys a tile at any head dimension up to 128."""
    if head_dim <= 128:
        return [{"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2}]
    small = {"BLOCK_M": 64, "BLOCK_N": 32, "WARPS": 4}
    return [{**sizes, "MIN_BLOCKS": 1} for sizes in ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8}, small)]


def _flash_mma() -> tuple[Stage, ...]:
    target, wmma = LADDER["flash_mma"], LADDER["flash_wmma"]

    def step(
        file: str,
        idea: str,
        shared_bytes: Callable[[Sizes], int] = target.shared_bytes,
        candidates: Callable[[int], list[dict[str, int]]] = _as_mma,
        **changed: Any,
    ) -> Stage:
        chosen = _first_that_fits(candidates, shared_bytes)
        return _step(target, f"steps/{file}", idea, tiles=chosen, shared_bytes=shared_bytes, **changed)

    by_rows: dict[str, Any] = {
        "candidates": _as_wmma,
        "threads": lambda sizes: sizes["BLOCK_M"],
        "max_head_dim": wmma.max_head_dim,
    }
    return (
        step("07_03_mma_sync.cu", "mma.sync for both products", wmma.shared_bytes, **by_rows),
        step("07_06_four_lanes_a_row.cu", "four lanes share a row", wmma.shared_bytes, **by_rows),
        step("07_07_s_in_registers.cu", "S in registers", _p_shared, **by_rows),
        step("07_08_p_in_registers.cu", "P in registers", _one_tile_shared, **by_rows),
        step("07_09_wider_tiles.cu", "64 keys a tile", _one_tile_shared),
        step("07_10_swizzle.cu", "swizzle", _swizzled_shared),
        step("07_11_double_buffering.cu", "double buffering"),
        step("07_12_addresses_by_xor.cu", "addresses by exclusive or"),
        step("07_13_addresses_of_copies.cu", "addresses of the copies"),
        step("07_16_lazy_rescale.cu", "rescale when it pays"),
        target,
    )


# ---- 08, float32 -> half types


def _backward_mma_shared(*, buffers: int, ds: int, p_stored: bool) -> Callable[[Sizes], int]:
    """SHARED_BYTES of the steps to 08 in half types: K and V, Q and dO with their lse and delta, dS and P.

    Args:
        buffers: of Q, dO, lse and delta. ds: buffers of dS. p_stored: P is stored even where nobody reads it.
    """

    def shared_bytes(sizes: Sizes) -> int:
        rows, keys, warps = sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["WARPS"]
        in_registers = sizes["WARPS_KEYS"] == sizes["WARPS_DKV"] == warps and not p_stored
        of_rows = 2 * 2 * _up(sizes["HEAD_DIM"], 16) * rows + 8 * rows
        return 2 * 2 * _up(sizes["HEAD_DIM"], 16) * keys + buffers * of_rows + 2 * (ds + 1 - in_registers) * keys * rows

    return shared_bytes


def _without_semaphores(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """The scratch arrays of the stage but for the semaphores."""
    return {name: spec for name, spec in tiles_of_rows(call, sizes).items() if name != "dq_semaphore"}


def _backward_mma() -> tuple[Stage, ...]:
    target = LADDER["backward_mma"]
    in_any_order: dict[str, Any] = {
        "scratch": _without_semaphores,
        "features": target.features - {"deterministic", "mod"},
        "variant": lambda call: {},
    }

    def step(file: str, idea: str, shared_bytes: Callable[[Sizes], int] = target.shared_bytes, **changed: Any) -> Stage:
        chosen = _first_that_fits(tiles.backward_mma_candidates, shared_bytes)
        return _step(target, f"steps/{file}", idea, tiles=chosen, shared_bytes=shared_bytes, **changed)

    one_buffer = _backward_mma_shared(buffers=1, ds=1, p_stored=True)
    two_buffers = _backward_mma_shared(buffers=2, ds=1, p_stored=False)
    # The first has plain sums for products; steps 2, 5 and 6 give them to the tensor cores.
    return (
        step("08_01_plain_products.cu", "plain products", one_buffer, **in_any_order),
        step("08_02_s_and_dp_by_mma.cu", "mma.sync for S and dP", one_buffer, **in_any_order),
        step("08_05_dv_and_dk_by_mma.cu", "mma.sync for dV and dK", one_buffer, **in_any_order),
        step("08_06_dq_by_mma.cu", "mma.sync for dQ", one_buffer, **in_any_order),
        step("08_07_order_of_fragments.cu", "dQ in the order of fragments", one_buffer, **in_any_order),
        step("08_08_four_floats.cu", "four floats an addition", one_buffer, **in_any_order),
        step("08_10_own_scores.cu", "own scores in registers", one_buffer, **in_any_order),
        step("08_12_double_buffering.cu", "double buffering", two_buffers, **in_any_order),
        step("08_13_dq_later.cu", "dQ a step later", **in_any_order),
        step("08_15_staggered.cu", "dQ staggered", **in_any_order),
        step("08_17_wide_stores.cu", "wide stores", **in_any_order),
        step("08_18_turns.cu", "turns", variant=lambda call: {"DETERMINISTIC": 1} if call.deterministic else {}),
        target,
    )


# ---- 07 -> 10


def _hopper_shared(*, q_empty: bool) -> Callable[[Sizes], int]:
    """SHARED_BYTES of the steps to 10 that have no room for O: Q, STAGES tiles each of K and V, mbarriers.

    Args:
        q_empty: Q is replaced, so there are mbarriers that say when.
    """

    def shared_bytes(sizes: Sizes) -> int:
        warpgroups = sizes["BLOCK_M"] // 64
        row = 128 * _up(sizes["HEAD_DIM"], 64) // 64
        barriers = (1 + q_empty) * warpgroups + 4 * sizes["STAGES"]
        return row * (sizes["BLOCK_M"] + 2 * sizes["STAGES"] * sizes["BLOCK_N"]) + 8 * barriers

    return shared_bytes


def _ring_shared(sizes: Sizes) -> int:
    """SHARED_BYTES of the steps where no mbarrier says that a stage is empty: Q, STAGES tiles each of K and V."""
    row = 128 * _up(sizes["HEAD_DIM"], 64) // 64
    return row * (sizes["BLOCK_M"] + 2 * sizes["STAGES"] * sizes["BLOCK_N"]) + 8 * (1 + 2 * sizes["STAGES"])


def _one_tile_shared_by_panels(sizes: Sizes) -> int:
    """SHARED_BYTES of the kernel that the climb begins with: Q and one tile each of K and V, no mbarriers."""
    return _ring_shared({**sizes, "STAGES": 1}) - 8 * 3


def _equal_registers(head_dim: int) -> int:
    """The most keys a tile where all threads have 168 registers, or 128 with three consumers: more would spill."""
    return 112 if head_dim <= 64 else 128


def _hopper_step(
    file: str,
    idea: str,
    shared_bytes: Callable[[Sizes], int] | None = None,
    most_keys: Callable[[int], int] = lambda head_dim: 256,
    stages: int = tiles.HOPPER_STAGES,
    **changed: Any,
) -> Stage:
    """A step with 10's tile for a call's mask and keys, or a narrower one."""
    target = LADDER["hopper"]

    def narrowed(sizes: Sizes, head_dim: int) -> dict[str, int]:
        return {**sizes, "BLOCK_N": min(sizes["BLOCK_N"], most_keys(head_dim)), "STAGES": stages}

    return _step(
        target,
        f"steps/{file}",
        idea,
        tiles=lambda head_dim: narrowed(target.tiles(head_dim), head_dim),
        variant=lambda call: narrowed(target.variant(call), call.arrays["q"].shape[-1]),
        shared_bytes=shared_bytes or target.shared_bytes,
        **changed,
    )


def _nothing(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """No arrays between launches: a block finds its tile in the grid."""
    return {}


def _hopper_base() -> Stage:
    return _hopper_step(
        "10_00_cp_async.cu",
        "07 by its headers",
        _one_tile_shared_by_panels,
        _equal_registers,
        stages=1,
        launches=strided,
        scratch=_nothing,
        threads=lambda sizes: 2 * sizes["BLOCK_M"],
        max_head_dim=128,
        min_cc=80,
        only_cc=False,
    )


def _hopper() -> tuple[Stage, ...]:
    step = _hopper_step
    in_grid: dict[str, Any] = {
        "launches": strided_maps,
        "scratch": _nothing,
        "shared_bytes": _hopper_shared(q_empty=False),
    }
    equal: dict[str, Any] = {**in_grid, "most_keys": _equal_registers, "max_head_dim": 128}
    no_producer: dict[str, Any] = {**equal, "threads": lambda sizes: 2 * sizes["BLOCK_M"]}
    ring: dict[str, Any] = {**no_producer, "shared_bytes": _ring_shared}
    return (
        step("10_01_tma.cu", "copies by TMA", stages=1, **ring),
        step("10_03_by_wgmma.cu", "products by wgmma", stages=1, **ring),
        step("10_04_ring.cu", "a ring of stages", **ring),
        step("10_05_empty_stages.cu", "mbarriers of empty stages", **no_producer),
        step("10_06_producer.cu", "a producer warpgroup", **equal),
        step("10_07_setmaxnreg.cu", "setmaxnreg", **in_grid),
        step("10_08_two_products.cu", "two products in flight", **in_grid),
        step("10_09_turns.cu", "turns of the consumers", **in_grid),
        step("10_10_table_of_tiles.cu", "a table of tiles", _hopper_shared(q_empty=True)),
        step("10_11_o_by_stmatrix.cu", "O by stmatrix"),
        step("10_13_lazy_rescale.cu", "lazy rescale"),
        step("10_14_integer_maxima.cu", "maxima as integers"),
        LADDER["hopper"],
    )


# ---- 07 -> 12


def _flash_cute() -> tuple[Stage, ...]:
    target = LADDER["flash_cute"]
    return (
        _step(target, "steps/12_02_tensors.cu", "tensors"),
        _step(target, "steps/12_03_tiled_copy.cu", "TiledCopy"),
        _step(target, "steps/12_04_s_by_tiled_mma.cu", "S by TiledMMA"),
        _step(target, "steps/12_05_o_by_tiled_mma.cu", "O by TiledMMA"),
        target,
    )


def _cute_base() -> Stage:
    """It includes nothing of CuTe, and has the tile that one writes first: with a larger one it would spill."""
    small = {"BLOCK_M": 64, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2}
    return _step(
        LADDER["flash_cute"],
        "steps/12_00_by_headers.cu",
        "07 by its headers",
        tiles=lambda head_dim: small,
        missing=lambda: None,
        slow_to_compile=False,
    )


# ---- 08 -> 13


def _one_stage_shared(sizes: Sizes) -> int:
    """SHARED_BYTES of the step without a ring: K and V; a tile each of Q, dO and dS, with lse and delta; mbarriers."""
    rows, keys, panels = sizes["BLOCK_M"], sizes["BLOCK_N"], _up(sizes["HEAD_DIM"], 64) // 64
    return 128 * panels * (2 * keys + 2 * rows) + 2 * rows * keys + 8 * rows + 8 * 5


def _without_dq_shared(sizes: Sizes) -> int:
    """Of the step that adds to dQ from registers."""
    panels = _up(sizes["HEAD_DIM"], 64) // 64
    return LADDER["hopper_backward"].shared_bytes(sizes) - 4 * 64 * panels * sizes["BLOCK_M"]


def _hopper_backward() -> tuple[Stage, ...]:
    target = LADDER["hopper_backward"]

    def step(file: str, idea: str, **changed: Any) -> Stage:
        return _step(
            replace(target, features=target.features - {"deterministic"}),
            f"steps/{file}",
            idea,
            scratch=_without_semaphores,
            variant=lambda call: {},
            **changed,
        )

    alone: dict[str, Any] = {"shared_bytes": _one_stage_shared, "threads": lambda sizes: 256}
    return (
        step("13_01_by_wgmma_and_tma.cu", "by wgmma and TMA", **alone),
        step("13_02_producer.cu", "a producer warpgroup", shared_bytes=_without_dq_shared),
        step("13_03_dq_by_bulk_addition.cu", "dQ by bulk addition"),
        step("13_04_overlap.cu", "overlap"),
        step("13_05_masks_apart.cu", "masks apart"),
        step("13_06_longest_first.cu", "longest first"),
        target,
    )


# ---- 07 -> 15


def _tf32() -> tuple[Stage, ...]:
    target = LADDER["tf32"]

    def step(file: str, idea: str, **changed: Any) -> Stage:
        return _step(target, f"steps/{file}", idea, **changed)

    return (
        step("15_01_three_products.cu", "three products", head_dim_step=8, inexact=8.0),
        step("15_02_sums_of_a_tile.cu", "new sums for each tile", head_dim_step=8),
        step("15_03_small_apart.cu", "small products apart", head_dim_step=8),
        step("15_04_four_neighbours.cu", "four neighbours a lane"),
        target,
    )


# ---- 10 -> 15 by fp16


def _fp16x3() -> tuple[Stage, ...]:
    target = LADDER["fp16x3"]
    return _step(target, "steps/15_fp16_01_three_products.cu", "three fp16 products"), target


# ---- all climbs

# The climb to each stage that has one, its last element the stage itself.
CLIMBS: Mapping[str, tuple[Stage, ...]] = {
    "register_tiles": _register_tiles(),
    "flash_wmma": _flash_wmma(),
    "flash_mma": _flash_mma(),
    "backward_mma": _backward_mma(),
    "hopper": _hopper(),
    "flash_cute": _flash_cute(),
    "hopper_backward": _hopper_backward(),
    "tf32": _tf32(),
    "fp16x3": _fp16x3(),
}

# Beside 11_rotary.cu, which rotates q and k in a pass of its own: 07 that rotates what it has loaded.
ROTATION_IN_LOAD = LADDER["flash_mma"].changed(
    number=11,
    name="rotation_in_load",
    file="steps/11_rotation_in_load.cu",
    idea="rotation in the load",
    launches=strided_rotating,
    features=LADDER["flash_mma"].features - {"mod"} | {"rotates"},
    variant=lambda call: {"ROTARY_DIM": 2 * call.arrays["rotary_cos"].shape[1]},
)

# A kernel that a climb begins anew with, read whole: it is no step, and the first step is made from it.
BASES: Mapping[str, Stage] = {"hopper": _hopper_base(), "flash_cute": _cute_base()}

# The file that the first step of each climb is reached from; its own file where the climb begins anew with one that is
# read whole.
BEFORE: Mapping[str, str] = {
    "register_tiles": "03_online_softmax.cu",
    "flash_wmma": "steps/06_01_row_per_lane.cu",
    "flash_mma": "06_wmma.cu",
    "backward_mma": "steps/08_01_plain_products.cu",
    "hopper": BASES["hopper"].file,
    "flash_cute": BASES["flash_cute"].file,
    "hopper_backward": "steps/13_01_by_wgmma_and_tma.cu",
    "tf32": "steps/15_01_three_products.cu",
    "fp16x3": "steps/15_fp16_01_three_products.cu",
}

# What the last step of each climb adds. That step is the stage itself, whose own `idea` names all of the climb.
LAST_IDEAS: Mapping[str, str] = {
    "register_tiles": "tiles copied ahead",
    "flash_wmma": "tiles fetched ahead",
    "flash_mma": "scores of any size",
    "backward_mma": "turns of two tiles",
    "hopper": "scores of any size",
    "flash_cute": "rows of S and O",
    "hopper_backward": "turns",
    "tf32": "rescale when it pays",
    "fp16x3": "two products in flight",
}


def files(stage: str) -> list[str]:
    """The files of the climb to a stage, each made from the one before it: at first the one in BEFORE."""
    own = [step.file for step in CLIMBS[stage]]
    return own if BEFORE[stage] == own[0] else [BEFORE[stage], *own]


def ideas(stage: str) -> list[str]:
    """The idea of each step of the climb to a stage, in order; the last is the stage's own."""
    return [*(step.idea for step in CLIMBS[stage][:-1]), LAST_IDEAS[stage]]


def numbered(climb: Sequence[Stage]) -> dict[int, Stage]:
    """The steps of a climb by the numbers in their files; the stage, whose file has none, comes after the last."""
    by_number: dict[int, Stage] = {}
    for step in climb:
        own = re.match(r"steps/\d\d_(?:fp16_)?(\d\d)_", step.file)
        by_number[int(own[1]) if own else max(by_number, default=0) + 1] = step
    return by_number


def by_number(stage: str) -> dict[int, Stage]:
    """The steps of the climb to a stage by their numbers, in order; the last is the stage itself."""
    return numbered(CLIMBS[stage])

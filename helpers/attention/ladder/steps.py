"""The climbs: the steps between a stage and the one before it, each a kernel file that differs by one idea.

    from helpers.attention.ladder.steps import BEFORE, CLIMBS
    show.diff(BEFORE["register_tiles"], CLIMBS["register_tiles"][0].file)

A step is a Stage, so whatever runs, checks or measures a stage runs, checks or measures a step. The last element of a
climb is the stage itself. A new climb is one more `_Climb` below.

A step keeps its number, which is that of its file, when another is inserted or removed: numbers may have gaps.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from helpers.attention.ladder import limits
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.extras import ROTARY
from helpers.attention.ladder.launch import Launch, Map
from helpers.attention.ladder.launches import given, position_strides, strided
from helpers.attention.ladder.params import ROTATION_PARAMS
from helpers.attention.ladder.plan import Rung
from helpers.attention.ladder.stage import Stage
from helpers.attention.ladder.stages.backward import (
    TILE_MAIL_BYTES,
    backward_mma_candidates,
    backward_scratch,
    without_semaphores,
)
from helpers.attention.ladder.stages.fp8 import variant_of_descales
from helpers.attention.ladder.stages.hopper import HOPPER_STAGES, launch_in_order, qkv_maps, schedule
from helpers.attention.ladder.table import LADDER
from helpers.attention.ladder.tiles import Sizes, Tiles, first_that_fits, round_up


class _Climb(NamedTuple):
    """The steps to a stage.

    last_idea: what the stage adds to the last step; its own `idea` names the whole climb. before: the file that the
    first step is made from; the step's own file if the climb starts afresh with it, read as a whole. base: a kernel
    that the climb starts afresh with, read as a whole: not a step, but the first step is made from it.
    """

    stage: str
    last_idea: str
    steps: tuple[Rung, ...]
    before: str = ""
    base: Rung | None = None


def _step(
    target: Rung,
    file: str,
    idea: str,
    shared_bytes: Callable[[Sizes], int] | None = None,
    candidates: Callable[[int], Sequence[Sizes]] | None = None,
    **changed: Any,
) -> Rung:
    """Make a step of the climb to target: the stage with another file, and the changes that this file needs.

    It has one set of sizes for all grids, so that steps differ only in their text. No step has functions of scores.

    Args:
        candidates: sizes by HEAD_DIM, the first of which that fits is used; by default the stage's own.
    """
    count = shared_bytes or target.shared_bytes
    if candidates:
        changed["tiles"] = lambda head_dim, limit: first_that_fits(candidates(head_dim), count, head_dim, limit)
    changed = {"features": target.features - {"mod"}, **changed}
    one_size = replace(target, tuning=target.tuning.of_one_size())
    return one_size.changed(file=f"steps/{file}", idea=idea, shared_bytes=count, **changed)


def _no_variant(call: Call) -> dict[str, int]:
    return {}


# ---- 03 -> 04


def _row_shared(sizes: Sizes) -> int:
    """Count sizeof(Shared), in bytes: K, V and Q, whose rows have an odd length."""
    d = sizes["HEAD_DIM"]
    return round_up(4 * (2 * sizes["BLOCK_N"] * d + sizes["BLOCK_M"] * (d | 1)), 16)


def _words_shared(sizes: Sizes, *, k_odd: bool, p_padding: int, q_transposed: bool) -> int:
    """Count sizeof(Shared) of the steps whose tiles of K and V are words, not float4."""
    d, m, n = sizes["HEAD_DIM"], sizes["BLOCK_M"], sizes["BLOCK_N"]
    v_row = round_up(d, sizes["THREADS_X"])
    q = m * (round_up(d, 4) if q_transposed else d | 1)
    return round_up(4 * (n * ((d | 1 if k_odd else v_row) + v_row) + q + n * (m + p_padding)), 16)


def _float4_shared(sizes: Sizes) -> int:
    """Count sizeof(Shared), in bytes, of the steps that pad rows of P by 4 words; the stage pads them by 8."""
    return LADDER["register_tiles"].shared_bytes(sizes) - 4 * 4 * sizes["BLOCK_N"]


def _one_row(head_dim: int) -> list[dict[str, int]]:
    return [{"BLOCK_M": rows, "BLOCK_N": 16} for rows in (128, 64, 32)]


def _two_rows(head_dim: int) -> list[dict[str, int]]:
    """Return sizes with two rows per thread, or one if the accumulators of two would not fit the registers."""
    rows_per_thread = 2 if head_dim <= 64 else 1
    return [{**sizes, "THREADS": sizes["BLOCK_M"] // rows_per_thread} for sizes in _one_row(head_dim)]


def _as_the_stage(head_dim: int) -> list[Sizes]:
    """Return the stage's sizes, such as 8 x 8 scores per thread, then smaller ones for steps that need more padding."""
    smaller = Tiles(64, 32, 128, 8), Tiles(32, 32, 64, 8), Tiles(16, 16, 32, 8)
    return [LADDER["register_tiles"].tiles(head_dim), *(tiles.defines for tiles in smaller)]


def _register_tiles() -> _Climb:
    step = partial(_step, LADDER["register_tiles"], candidates=_as_the_stage, max_head_dim=128)
    words = partial(step, variant=_no_variant)  # no float4 from global memory yet, so no -DVECTOR
    rows = partial(words, threads=lambda sizes: sizes.get("THREADS", sizes["BLOCK_M"]), shared_bytes=_row_shared)
    unpadded = partial(_words_shared, k_odd=False, p_padding=0, q_transposed=False)
    padded = partial(_words_shared, k_odd=True, p_padding=4, q_transposed=False)
    transposed = partial(_words_shared, k_odd=True, p_padding=4, q_transposed=True)
    steps = (
        rows("04_01_heads_in_grid.cu", "heads in the grid", candidates=_one_row),
        rows("04_04_rows_per_thread.cu", "two rows a thread", candidates=_two_rows),
        words("04_07_eight_by_eight.cu", "8 x 8 scores a thread", unpadded),
        words("04_08_padded_rows.cu", "rows of K and P padded", padded),
        words("04_09_float4_q_and_p.cu", "float4 from Q and P", transposed),
        words("04_10_float4_k_and_v.cu", "float4 from K and V", _float4_shared),
        step("04_11_float4_from_global.cu", "float4 from global memory", _float4_shared),
        step("04_12_lanes_in_squares.cu", "lanes in squares"),
        step("04_14_exp2.cu", "exp2 for exp"),
    )
    return _Climb("register_tiles", "tiles copied ahead", steps, "03_online_softmax.cu")


# ---- 06


def _without_s_shared(sizes: Sizes) -> int:
    """Count SHARED_BYTES of the step that has no S in shared memory yet."""
    return LADDER["flash_wmma"].shared_bytes(sizes) - 4 * sizes["BLOCK_M"] * (sizes["BLOCK_N"] + 4)


def _flash_wmma() -> _Climb:
    step = partial(_step, LADDER["flash_wmma"])
    steps = (
        step("06_01_row_per_lane.cu", "a row per lane", _without_s_shared),
        step("06_02_qk_by_wmma.cu", "Q K^T by WMMA"),
        step("06_04_pv_by_wmma.cu", "P V by WMMA"),
        step("06_05_fragment_of_factors.cu", "a fragment of factors"),
    )
    return _Climb("flash_wmma", "tiles fetched ahead", steps)


# ---- 06 -> 07


def _p_shared(sizes: Sizes) -> int:
    """Count SHARED_BYTES if P is stored: 128 rows with 16 bytes of padding each."""
    return _one_tile_shared(sizes) + 2 * sizes["BLOCK_M"] * (sizes["BLOCK_N"] + 8)


def _one_tile_shared(sizes: Sizes, padding: int = 8) -> int:
    """Count SHARED_BYTES of Q and one tile each of K and V, in rows of whole fragments of 16, with padding."""
    return 2 * (round_up(sizes["HEAD_DIM"], 16) + padding) * (sizes["BLOCK_M"] + 2 * sizes["BLOCK_N"])


def _as_wmma(head_dim: int) -> list[dict[str, int]]:
    """Return the sizes of flash_wmma; fewer rows per block if there is little shared memory."""
    return [{"BLOCK_M": rows, "BLOCK_N": 32, "MIN_BLOCKS": 2} for rows in (128, 64)]


def _as_mma(head_dim: int) -> list[dict[str, int]]:
    """Return sizes of flash_mma with 64 keys a tile at any head dimension up to 128."""
    if head_dim <= 128:
        return [{"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2}]
    small = {"BLOCK_M": 64, "BLOCK_N": 32, "WARPS": 4}
    return [{**sizes, "MIN_BLOCKS": 1} for sizes in ({"BLOCK_M": 128, "BLOCK_N": 64, "WARPS": 8}, small)]


def _flash_mma() -> _Climb:
    wmma = LADDER["flash_wmma"]
    step = partial(_step, LADDER["flash_mma"], candidates=_as_mma)
    of_wmma = {"max_head_dim": wmma.max_head_dim, "threads": lambda sizes: sizes["BLOCK_M"]}
    rows = partial(step, candidates=_as_wmma, **of_wmma)
    steps = (
        rows("07_03_mma_sync.cu", "mma.sync for both products", wmma.shared_bytes),
        rows("07_06_four_lanes_a_row.cu", "four lanes share a row", wmma.shared_bytes),
        rows("07_07_s_in_registers.cu", "S in registers", _p_shared),
        rows("07_08_p_in_registers.cu", "P in registers", _one_tile_shared),
        step("07_09_wider_tiles.cu", "64 keys a tile", _one_tile_shared),
        step("07_10_swizzle.cu", "swizzle", partial(_one_tile_shared, padding=0)),
        step("07_11_double_buffering.cu", "double buffering"),
        step("07_12_addresses_by_xor.cu", "addresses by exclusive or"),
        step("07_13_addresses_of_copies.cu", "addresses of the copies"),
        step("07_16_lazy_rescale.cu", "rescale when it pays"),
    )
    return _Climb("flash_mma", "scores of any size", steps, wmma.file)


# ---- 08, float32 -> half types


def _backward_mma_shared(sizes: Sizes, *, buffers: int, p_stored: bool) -> int:
    """Count SHARED_BYTES of the steps to backward_mma: K and V, Q and dO with their lse and delta, dS and P.

    Args:
        buffers: those of Q, dO, lse and delta. p_stored: P is stored even if no other warp reads it.
    """
    rows, keys, warps = sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["WARPS"]
    in_registers = sizes["WARPS_KEYS"] == sizes["WARPS_DKV"] == warps and not p_stored
    row = 2 * 2 * round_up(sizes["HEAD_DIM"], 16)
    return row * keys + buffers * (row * rows + 8 * rows) + 2 * (2 - in_registers) * keys * rows


def _backward_mma() -> _Climb:
    target = LADDER["backward_mma"]
    step = partial(_step, target, candidates=backward_mma_candidates)
    features = target.features - {"deterministic", "mod"}
    any_order = partial(step, scratch=without_semaphores, features=features, variant=_no_variant)
    one_buffer = partial(any_order, shared_bytes=partial(_backward_mma_shared, buffers=1, p_stored=True))
    two_buffers = partial(_backward_mma_shared, buffers=2, p_stored=False)
    # The first adds its products without tensor cores; steps 2, 5 and 6 give them to those.
    steps = (
        one_buffer("08_01_plain_products.cu", "plain products"),
        one_buffer("08_02_s_and_dp_by_mma.cu", "mma.sync for S and dP"),
        one_buffer("08_05_dv_and_dk_by_mma.cu", "mma.sync for dV and dK"),
        one_buffer("08_06_dq_by_mma.cu", "mma.sync for dQ"),
        one_buffer("08_07_order_of_fragments.cu", "dQ in the order of fragments"),
        one_buffer("08_08_four_floats.cu", "four floats an addition"),
        one_buffer("08_10_own_scores.cu", "own scores in registers"),
        any_order("08_12_double_buffering.cu", "double buffering", two_buffers),
        any_order("08_13_dq_later.cu", "dQ a step later"),
        any_order("08_15_staggered.cu", "dQ staggered"),
        any_order("08_17_wide_stores.cu", "wide stores"),
        step("08_18_turns.cu", "turns", variant=lambda call: {"DETERMINISTIC": 1} if call.deterministic else {}),
    )
    return _Climb("backward_mma", "turns of two tiles", steps)


# ---- 07 -> 10


def _ring_shared(sizes: Sizes, *, barriers: Callable[[int, int], int]) -> int:
    """Count SHARED_BYTES of the steps to hopper without space for O: Q, STAGES tiles each of K and V, mbarriers.

    Args:
        barriers: their number, by consumer warpgroups and stages.
    """
    row = 128 * round_up(sizes["HEAD_DIM"], 64) // 64
    count = barriers(sizes["BLOCK_M"] // 64, sizes["STAGES"])
    return row * (sizes["BLOCK_M"] + 2 * sizes["STAGES"] * sizes["BLOCK_N"]) + 8 * count


def _equal_registers(head_dim: int) -> int:
    """Return the most keys per tile if all threads have 168 registers, or 128 with three consumers: no spills."""
    return 112 if head_dim <= 64 else 128


def _hopper_step(
    file: str,
    idea: str,
    most_keys: Callable[[int], int] = lambda head_dim: 256,
    stages: int = HOPPER_STAGES,
    **changed: Any,
) -> Rung:
    """Make a step with hopper's tile for a call's mask and keys, or a narrower one."""
    target = LADDER["hopper"]

    def narrowed(sizes: Sizes, head_dim: int) -> dict[str, int]:
        return {**sizes, "BLOCK_N": min(sizes["BLOCK_N"], most_keys(head_dim)), "STAGES": stages}

    return _step(
        target,
        file,
        idea,
        tiles=lambda head_dim, limit: narrowed(target.tuning.tiles(head_dim, limit), head_dim),
        variant=lambda call: narrowed(target.variant(call), call.arrays["q"].shape[-1]),
        **changed,
    )


def _no_scratch(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Return no scratch arrays: a block's tile follows from its place in the grid."""
    return {}


def _strided_maps(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch the grid of flash_mma, with q, k and v as tensor maps."""
    return strided(stage, call, sizes, qkv_maps(sizes))


def _hopper() -> _Climb:
    base = _hopper_step(
        "10_00_cp_async.cu",
        "07 by its headers",
        _equal_registers,
        stages=1,
        shared_bytes=partial(_ring_shared, barriers=lambda groups, stages: 0),
        launches=strided,
        scratch=_no_scratch,
        threads=lambda sizes: 2 * sizes["BLOCK_M"],
        max_head_dim=128,
        min_cc=80,
        only_cc=False,
    )
    emptied = partial(_ring_shared, barriers=lambda groups, stages: groups + 4 * stages)
    q_emptied = partial(_ring_shared, barriers=lambda groups, stages: 2 * groups + 4 * stages)
    never_emptied = partial(_ring_shared, barriers=lambda groups, stages: 1 + 2 * stages)
    step = _hopper_step
    in_grid = partial(step, launches=_strided_maps, scratch=_no_scratch, shared_bytes=emptied)
    equal = partial(in_grid, most_keys=_equal_registers, max_head_dim=128)
    no_producer = partial(equal, threads=lambda sizes: 2 * sizes["BLOCK_M"])
    ring = partial(no_producer, shared_bytes=never_emptied)
    steps = (
        ring("10_01_tma.cu", "copies by TMA", stages=1),
        ring("10_03_by_wgmma.cu", "products by wgmma", stages=1),
        ring("10_04_ring.cu", "a ring of stages"),
        no_producer("10_05_empty_stages.cu", "mbarriers of empty stages"),
        equal("10_06_producer.cu", "a producer warpgroup"),
        in_grid("10_07_setmaxnreg.cu", "setmaxnreg"),
        in_grid("10_08_two_products.cu", "two products in flight"),
        in_grid("10_09_turns.cu", "turns of the consumers"),
        step("10_10_table_of_tiles.cu", "a table of tiles", shared_bytes=q_emptied),
        step("10_11_o_by_stmatrix.cu", "O by stmatrix"),
        step("10_13_lazy_rescale.cu", "lazy rescale"),
        step("10_14_integer_maxima.cu", "maxima as integers"),
    )
    return _Climb("hopper", "scores of any size", steps, base.file, base)


# ---- 07 -> 12


def _flash_cute() -> _Climb:
    step = partial(_step, LADDER["flash_cute"])
    # It includes nothing of CuTe, and has the tile that one would write first: a larger one would spill.
    base = step(
        "12_00_by_headers.cu",
        "07 by its headers",
        tiles=lambda head_dim, limit: {"BLOCK_M": 64, "BLOCK_N": 64, "WARPS": 4, "MIN_BLOCKS": 2},
        unavailable=lambda: None,
        slow_to_compile=False,
    )
    steps = (
        step("12_02_tensors.cu", "tensors"),
        step("12_03_tiled_copy.cu", "TiledCopy"),
        step("12_04_s_by_tiled_mma.cu", "S by TiledMMA"),
        step("12_05_o_by_tiled_mma.cu", "O by TiledMMA"),
    )
    return _Climb("flash_cute", "rows of S and O", steps, base.file, base)


# ---- 08 -> 13


def _one_stage_shared(sizes: Sizes) -> int:
    """Count SHARED_BYTES of the step without a ring: K, V, a tile each of Q, dO and dS, lse and delta, mbarriers."""
    rows, keys, panels = sizes["BLOCK_M"], sizes["BLOCK_N"], round_up(sizes["HEAD_DIM"], 64) // 64
    return 128 * panels * (2 * keys + 2 * rows) + 2 * rows * keys + 8 * rows + 8 * 5


def _without_mail(sizes: Sizes) -> int:
    """Count SHARED_BYTES of the steps whose blocks have one tile of keys."""
    return LADDER["hopper_backward"].shared_bytes(sizes) - TILE_MAIL_BYTES


def _without_dq_shared(sizes: Sizes) -> int:
    """Count SHARED_BYTES of the step that adds to dQ from registers."""
    return _without_mail(sizes) - 4 * round_up(sizes["HEAD_DIM"], 64) * sizes["BLOCK_M"]


def _hopper_backward() -> _Climb:
    target = LADDER["hopper_backward"]
    features = target.features - {"deterministic", "mod"}
    step = partial(_step, target, features=features, scratch=without_semaphores, variant=_no_variant)
    steps = (
        step("13_01_by_wgmma_and_tma.cu", "by wgmma and TMA", _one_stage_shared, threads=lambda sizes: 256),
        step("13_02_producer.cu", "a producer warpgroup", _without_dq_shared),
        step("13_03_dq_by_bulk_addition.cu", "dQ by bulk addition", _without_mail),
        step("13_04_overlap.cu", "overlap", _without_mail),
        step("13_05_masks_apart.cu", "masks apart", _without_mail),
        step("13_06_longest_first.cu", "longest first", _without_mail),
        step("13_07_turns.cu", "turns", _without_mail, scratch=backward_scratch),
    )
    return _Climb("hopper_backward", "persistent blocks", steps)


# ---- flash_mma -> tf32, and hopper -> fp16x3


def _tf32() -> _Climb:
    step = partial(_step, LADDER["tf32"])
    steps = (
        step("15_01_three_products.cu", "three products", head_dim_step=8, error_factor=8.0),
        step("15_02_sums_of_a_tile.cu", "new sums for each tile", head_dim_step=8),
        step("15_03_small_apart.cu", "small products apart", head_dim_step=8),
        step("15_04_four_neighbours.cu", "four neighbours a lane"),
    )
    return _Climb("tf32", "rescale when it pays", steps)


def _fp16x3() -> _Climb:
    steps = (_step(LADDER["fp16x3"], "15_fp16_01_three_products.cu", "three fp16 products"),)
    return _Climb("fp16x3", "two products in flight", steps)


# ---- hopper -> fp8


def _fewer_keys(head_dim: int) -> list[Sizes]:
    """Return fp8's sizes with fewer keys per tile: O summed in place needs registers in addition to all of S."""
    return [{**LADDER["fp8"].tiles(head_dim), "BLOCK_N": 160 if head_dim <= 64 else 128}]


_fp8_step = partial(_step, LADDER["fp8"], variant=variant_of_descales)  # their files do not transpose V


def _fp8() -> _Climb:
    of_heads = LADDER["fp8"].features - {"block_descale"}
    summed_in_place = {"candidates": _fewer_keys, "error_factor": 4.0}
    steps = (
        _fp8_step("16_01_one_level.cu", "O summed by the tensor core", features=of_heads, **summed_in_place),
        _fp8_step("16_02_two_levels.cu", "each tile of keys added in float32", features=of_heads),
        _fp8_step("16_05_row_of_ones.cu", "weights summed by a row of ones, maxima of bits"),
        _fp8_step("16_06_quarters.cu", "O of 256 columns in quarters"),
    )
    return _Climb("fp8", "consumers take turns, and leave tiles that they do not see", steps)


# ---- all climbs

_CLIMBS = (
    *(_register_tiles(), _flash_wmma(), _flash_mma(), _backward_mma(), _hopper(), _flash_cute(), _hopper_backward()),
    *(_tf32(), _fp16x3(), _fp8()),
)
# By stage: the climb, whose last element is the stage itself; see `_Climb` for the others.
CLIMBS: Mapping[str, tuple[Rung, ...]] = {climb.stage: (*climb.steps, LADDER[climb.stage]) for climb in _CLIMBS}
BASES: Mapping[str, Rung] = {climb.stage: climb.base for climb in _CLIMBS if climb.base}
BEFORE: Mapping[str, str] = {climb.stage: climb.before or climb.steps[0].file for climb in _CLIMBS}
LAST_IDEAS: Mapping[str, str] = {climb.stage: climb.last_idea for climb in _CLIMBS}


def _strided_rotating(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch like flash_mma, with the tables and positions of the rotary embedding."""
    numbers = *position_strides(call), call.arrays["rotary_cos"].shape[0]
    params = (np.array([numbers], ROTATION_PARAMS),)
    return strided(stage, call, sizes, tables=given(call, *ROTARY), more_params=params)


# Compared with 11_rotary.cu, which rotates q and k in a separate pass: flash_mma that rotates what it has loaded.
ROTATION_IN_LOAD = LADDER["flash_mma"].changed(
    number=11,
    name="rotation_in_load",
    file="steps/11_rotation_in_load.cu",
    idea="rotation in the load",
    launches=_strided_rotating,
    features=LADDER["flash_mma"].features - {"mod"} | {"rotates"},
    variant=lambda call: {"ROTARY_DIM": 2 * call.arrays["rotary_cos"].shape[1]},
)


@contextlib.contextmanager
def _by_pairs(sizes: Sizes) -> Iterator[Sizes]:
    """Yield the sizes of a tile for a cluster of two blocks, of which there are half as many."""
    with limits.reserve_sms(limits.multiprocessors() - limits.persistent_blocks() // 2):
        yield {**sizes, "BLOCK_M": 2 * sizes["BLOCK_M"]}


def _in_pairs(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    """Launch like hopper, by pairs; the boxes of K and V are the halves of a tile that the blocks of a pair copy."""
    half = sizes["BLOCK_N"] // 2
    with _by_pairs(sizes) as of_pair:
        order, main = launch_in_order(stage, call, of_pair, (Map("q", 64), Map("k", half), Map("v", half)))
    return [order, stage.launch((2 * main.grid[0],), sizes, main.args)]


def _order_of_pairs(call: Call, sizes: Sizes) -> dict[str, Spec]:
    """Describe the array of hopper's schedule, by pairs."""
    with _by_pairs(sizes) as of_pair:
        return schedule(call, of_pair)


# Compared with 10_14 and 10: two blocks of a cluster share K and V.
MULTICAST = _hopper_step(
    "10_15_multicast.cu",
    "K and V by multicast",
    launches=_in_pairs,
    scratch=_order_of_pairs,
    features=LADDER["hopper"].features - {"mod", "varlen"},
)


# Compared with 16_fp8.cu: the bytes of e4m3 weights without exp2.
_OF_HEADS = LADDER["fp8"].features - {"block_descale"}
FP8_CODES = _fp8_step("16_03_codes.cu", "weights as codes of e4m3", features=_OF_HEADS)


def files(stage: str) -> list[str]:
    """List the files of the climb to a stage, each made from the previous one, beginning with the one in BEFORE."""
    own = [step.file for step in CLIMBS[stage]]
    return own if BEFORE[stage] == own[0] else [BEFORE[stage], *own]


def ideas(stage: str) -> list[str]:
    """List the idea of each step of the climb to a stage, in order; the last is the stage's own."""
    return [*(step.idea for step in CLIMBS[stage][:-1]), LAST_IDEAS[stage]]


def numbered(climb: Sequence[Stage]) -> dict[int, Stage]:
    """Return the steps of a climb by the numbers in their files, and the stage, whose file has none, after the last."""
    by_number: dict[int, Stage] = {}
    for step in climb:
        own = re.match(r"steps/\d\d_(?:fp16_)?(\d\d)_", step.file)
        by_number[int(own[1]) if own else max(by_number, default=0) + 1] = step
    return by_number


def by_number(stage: str) -> dict[int, Stage]:
    """Return the steps of the climb to a stage by their numbers, in order; the last is the stage itself."""
    return numbered(CLIMBS[stage])

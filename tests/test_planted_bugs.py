"""Bugs planted in the text of each kernel: the check must find every one.

A passing check is worth as much as the bugs that it would have found. A new stage adds its bugs to BUGS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planted import ALL, Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import check, kernel, reference
from helpers.attention.ladder import FORWARD, LADDER, Stage

HEAD_DIM = 32


def out_of_bounds(name: str, old: str, new: str, **more: Any) -> Bug:
    return Bug(name, old, new, error=engine.LaunchError, cpu_only=True, **more)


def no_barrier(name: str, which: int, times: int) -> Bug:
    return Bug(name, "__syncthreads();", "", times=times, which=which, cpu_only=True)


NAIVE = (
    Bug("no scale", "s[j] = softmax_scale * dot;", "s[j] = dot;"),
    Bug("last word of the head forgotten", "c < HEAD_DIM; ++c) dot", "c < HEAD_DIM - 1; ++c) dot"),
    Bug("no maximum subtracted", "expf(s[j] - m_i)", "expf(s[j])", inputs="large logits"),
    Bug("last score for the largest", "m_i = fmaxf(m_i, s[j]);", "m_i = s[j];", inputs="large logits"),
    Bug("no division", "acc[c] / l_i", "acc[c]"),
    Bug("wrong row of Q", "Q + (size_t)row *", "Q + (size_t)threadIdx.x *"),
    Bug("wrong row of O", "O[(size_t)row *", "O[(size_t)threadIdx.x *"),
    Bug("neighbours' rows of O exchanged", "O[(size_t)row *", "O[(size_t)(row ^ 1) *"),
    Bug("last row forgotten", "if (row >= N) return;", "if (row >= N - 1) return;"),
    Bug("last key has no score", "j < N_kv;", "j < N_kv - 1;", times=3, which=0, cpu_only=True),
    Bug("last key not in l_i", "j < N_kv;", "j < N_kv - 1;", times=3, which=1),
    Bug("last key not in acc", "j < N_kv;", "j < N_kv - 1;", times=3, which=2),
    Bug("first key forgotten", "int j = 0;", "int j = 1;", times=3, which=ALL),
    out_of_bounds("one row too many", "if (row >= N) return;", "if (row > N) return;"),
    out_of_bounds("no test of the row", "if (row >= N) return;", ""),
    out_of_bounds("one key too many", "j < N_kv;", "j <= N_kv;", times=3, which=ALL),
)

# Parts that tiled and online_softmax share: the loads, the scores, the epilogue.
TILES = (
    Bug("no scale", "softmax_scale * s[j]", "s[j]"),
    Bug("last word of the head forgotten", "c < HEAD_DIM; ++c) {", "c < HEAD_DIM - 1; ++c) {"),
    Bug("no test of the tail's scores", "first + j < N_kv ? softmax_scale * s[j] : NEG_INF", "softmax_scale * s[j]"),
    Bug("tail scores one key too many", "first + j < N_kv ? softmax_scale", "first + j <= N_kv ? softmax_scale"),
    Bug("tail scores one key too few", "first + j < N_kv ? softmax_scale", "first + j < N_kv - 1 ? softmax_scale"),
    Bug("tail's scores are 0, not -inf", "softmax_scale * s[j] : NEG_INF", "softmax_scale * s[j] : 0.0f"),
    Bug("tail loads one key too few", "first + j < N_kv ? source", "first + j < N_kv - 1 ? source"),
    out_of_bounds("tail loads one key too many", "first + j < N_kv ? source", "first + j <= N_kv ? source"),
    out_of_bounds(
        "no test of the tail's loads",
        "first + j < N_kv ? source[(size_t)(first + j) * HEAD_DIM + c] : 0.0f",
        "source[(size_t)(first + j) * HEAD_DIM + c]",
    ),
    Bug("same keys in every tile", "source[(size_t)(first + j)", "source[(size_t)j"),
    Bug("half of a tile is not loaded", "i < BLOCK_N * HEAD_DIM;", "i < BLOCK_N * HEAD_DIM / 2;", cpu_only=True),
    Bug(
        "loads step too far", "BLOCK_N * HEAD_DIM; i += BLOCK_M", "BLOCK_N * HEAD_DIM; i += 2 * BLOCK_M", cpu_only=True
    ),
    Bug("wrong row of Q loaded", "Q[(size_t)(first_row + r)", "Q[(size_t)r"),
    out_of_bounds("one row of Q too many", "first_row + r < N ?", "first_row + r <= N ?"),
    Bug("V of the tile before", "load_tile(V_smem, V, first,", "load_tile(V_smem, V, first > 0 ? first - BLOCK_N : 0,"),
    Bug("K in place of V", "load_tile(V_smem, V,", "load_tile(V_smem, K,"),
    Bug("wrong row of O", "O[(size_t)row *", "O[(size_t)threadIdx.x *"),
    Bug("neighbours' rows of O exchanged", "O[(size_t)row *", "O[(size_t)(row ^ 1) *"),
    out_of_bounds("one row of O too many", "if (row < N)\n", "if (row <= N)\n"),
    out_of_bounds("no test of the row", "if (row < N)\n", ""),
)

ONE_PASS = "for (int first = 0; first < N_kv; first += BLOCK_N)"
SKIPS_THE_LAST = "for (int first = 0; first + BLOCK_N < N_kv; first += BLOCK_N)"
SKIPS_THE_FIRST = "for (int first = BLOCK_N; first < N_kv; first += BLOCK_N)"

REGISTER_TILES = (
    Bug("no scale", "softmax_scale * LOG2_E", "LOG2_E"),
    Bug("exp in place of exp2", "exp2f(", "expf(", times=2, which=ALL),
    Bug("last words of the head forgotten", "c < D4; ++c) {\n    float4 k", "c < D4 - 1; ++c) {\n    float4 k"),
    Bug("neighbours' rows of Q", "smem.Q[4 * c + i], y)", "smem.Q[4 * c + i], y ^ 1)"),
    Bug("P stored for the wrong keys", "&smem.P[x + j * THREADS_X]", "&smem.P[x * TILE_N + j]"),
    Bug("no test of the tail's scores", "if (first + BLOCK_N > N_kv)", "if (false)"),
    Bug("tail scores one key too many", "j * THREADS_X >= N_kv", "j * THREADS_X > N_kv"),
    Bug("tail scores one key too few", "j * THREADS_X >= N_kv", "j * THREADS_X >= N_kv - 1"),
    Bug("tail copies one key too few", "in_bounds = first + j < N_kv", "in_bounds = first + j < N_kv - 1"),
    out_of_bounds("tail copies one key too many", "in_bounds = first + j < N_kv", "in_bounds = first + j <= N_kv"),
    Bug("same keys in every tile", "(in_bounds ? first + j : 0)", "(in_bounds ? j : 0)"),
    Bug("half of a tile is not copied", "i < COPIES;", "i < COPIES / 2;", cpu_only=True),
    Bug("V of the tile before", "smem.V, V, first, N_kv", "smem.V, V, first > 0 ? first - BLOCK_N : 0, N_kv"),
    Bug("K in place of V", "smem.V, V,", "smem.V, K,"),
    out_of_bounds("one row of Q too many", "first_row + r < N ?", "first_row + r <= N ?"),
    Bug(
        "m_i of one thread, not of the row",
        "m_new = row_allreduce(m_new,",
        "(void)row_allreduce(m_new,",
        inputs="large logits",
    ),
    Bug("some of a row's threads are not asked", "bit <= THREADS_X;", "bit < THREADS_X;"),
    Bug(
        "a score not in the maximum",
        "m_new = fmaxf(m_new, s[j])",
        "m_new = fmaxf(m_new, s[j / 2])",
        inputs="large logits",
    ),
    Bug("no rescale of acc", "acc[c] *= rescale;", ";"),
    Bug("rescale the wrong way", "exp2f(m_i - m_new)", "exp2f(m_new - m_i)"),
    Bug("m_i of the last tile only", "float m_new = m_i;", "float m_new = NEG_INF;", inputs="large logits"),
    Bug("no maximum subtracted", "exp2f(s[j] - m_new)", "exp2f(s[j])", inputs="large logits"),
    Bug(
        "sum of one thread, not of the row",
        "1.0f / row_allreduce(l_i[i], [](float a, float b) { return a + b; })",
        "1.0f / l_i[i]",
    ),
    Bug("neighbours' rows of O exchanged", "const int r = row_of(i, y);", "const int r = row_of(i ^ 1, y);"),
    out_of_bounds("one row of O too many", "first_row + r < N &&", "first_row + r <= N &&"),
    Bug("skips the last tile", ONE_PASS, SKIPS_THE_LAST),
    no_barrier("no barrier before the first tile", 0, times=3),
    no_barrier("no barrier between S and P V", 1, times=3),
    no_barrier("no barrier between P V and the next S", 2, times=3),
    Bug("no wait for the first tile of K", "\n  wait_for_copies();\n", "\n", cpu_only=True),
    Bug("no wait for V", "    wait_for_copies();\n", "", times=2, which=0, cpu_only=True),
    Bug("no wait for K", "    wait_for_copies();\n", "", times=2, which=1, cpu_only=True),
)

BUGS: dict[str, tuple[Bug, ...]] = {
    "naive": NAIVE,
    "tiled": (
        *TILES,
        Bug("rescale the wrong way", "l_i *= expf(m_i - m_new);", "l_i *= expf(m_new - m_i);"),
        Bug(
            "m_i is new before the rescale",
            "l_i *= expf(m_i - m_new);\n    m_i = m_new;",
            "m_i = m_new;\n    l_i *= expf(m_i - m_new);",
        ),
        Bug("m_i of the last tile only", "float m_new = m_i;", "float m_new = NEG_INF;", inputs="large logits"),
        Bug("no maximum subtracted", "expf(s[j] - m_i)", "expf(s[j])", times=2, which=ALL, inputs="large logits"),
        Bug("no maximum subtracted in pass 1", "expf(s[j] - m_i)", "expf(s[j])", times=2, which=0),
        Bug("no maximum subtracted in pass 2", "expf(s[j] - m_i)", "expf(s[j])", times=2, which=1),
        Bug("pass 1 skips the last tile", ONE_PASS, SKIPS_THE_LAST, times=2, which=0),
        Bug("pass 2 skips the last tile", ONE_PASS, SKIPS_THE_LAST, times=2, which=1),
        no_barrier("no barrier before the load in pass 1", 0, times=4),
        no_barrier("no barrier after the load in pass 1", 1, times=4),
        no_barrier("no barrier before the loads in pass 2", 2, times=4),
        no_barrier("no barrier after the loads in pass 2", 3, times=4),
    ),
    "online_softmax": (  # its loads, scores and epilogue are tiled's text, whose bugs are planted only there
        Bug("no rescale of acc", "acc[c] *= rescale;", ";"),
        Bug("rescale the wrong way", "expf(m_i - m_new)", "expf(m_new - m_i)"),
        Bug(
            "m_i is new before the rescale",
            "const float rescale = expf(m_i - m_new);",
            "m_i = m_new; const float rescale = expf(m_i - m_new);",
        ),
        Bug("m_i of the last tile only", "float m_new = m_i;", "float m_new = NEG_INF;", inputs="large logits"),
        Bug("no maximum subtracted", "expf(s[j] - m_i)", "expf(s[j])", inputs="large logits"),
        Bug("skips the last tile", ONE_PASS, SKIPS_THE_LAST),
        no_barrier("no barrier before the loads", 0, times=2),
        no_barrier("no barrier after the loads", 1, times=2),
    ),
    "register_tiles": REGISTER_TILES,
}

# What 05 adds to 04: layouts in memory, visible keys, skipped tiles.
BUGS["heads_and_masks"] = (
    Bug(
        "heads share K and V in the wrong order",
        "head / (params.heads / params.kv_heads)",
        "head % params.kv_heads",
        inputs="views",
    ),
    Bug("the first batch for all", "V += sequence * params.v.batch + ", "V += ", inputs="views"),
    Bug("rows without a stride", "Q + r * params.q.row", "Q + r * HEAD_DIM", inputs="views"),
    out_of_bounds(
        "V with the rows of K",
        "load_tile(smem.V, V, params.v.row,",
        "load_tile(smem.V, V, params.k.row,",
        inputs="views",
    ),
    out_of_bounds("O with the rows of Q", "O + r * params.o.row", "O + r * params.q.row", inputs="views"),
    Bug("neighbours' rows of O exchanged", "O + r * params.o.row", "O + (r ^ 1) * params.o.row"),
    Bug(
        "positions begin at the top left",
        "window_lo = kv_len - q_len - params.window_left; const int window_hi = kv_len - q_len + params.window_right;",
        "window_lo = -params.window_left; const int window_hi = params.window_right;",
        inputs="causal",
    ),
    Bug("the diagonal is hidden", "THREADS_X > high", "THREADS_X >= high", inputs="causal"),
    Bug(
        "one key into the future",
        "min(row_pos + window_hi,",
        "min(row_pos + window_hi + 1,",
        inputs="causal",
    ),
    Bug("the window is a key short", "THREADS_X < low", "THREADS_X <= low", inputs="window"),
    Bug("the window has no left border", "j * THREADS_X < low || ", "", inputs="window"),
    Bug(
        "keys past the end",
        "min(row_pos + window_hi, end - 1 - first - x)",
        "row_pos + window_hi",
    ),
    Bug(
        "tiles across the diagonal count as full",
        "min(first_row + window_hi + 1, end)",
        "end",
        inputs="causal",
    ),
    Bug("tiles across the left border count as full", "first < last_row + window_lo || ", "", inputs="window"),
    Bug(
        "full for the first row is full for all",
        "first < last_row + window_lo",
        "first < first_row + window_lo",
        inputs="window",
    ),
    Bug(
        "the first key is skipped",
        "max(first_pos - params.window_left, 0)",
        "max(first_pos - params.window_left + 1, 0)",
        inputs="window",
    ),
    Bug(
        "the last key is skipped",
        "min(last_pos + params.window_right + 1, kv_len)",
        "min(last_pos + params.window_right, kv_len)",
        inputs="causal",
    ),
    Bug(
        "begins before the first key",
        "max(first_pos - params.window_left, 0)",
        "first_pos - params.window_left",
        inputs="window",
        cpu_only=True,
    ),
    Bug("a row that sees nothing yet", "m_i = M_INIT;", "m_i = NEG_INF;", inputs="nothing to see"),
    Bug("a row that saw nothing is divided", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum", inputs="nothing to see"),
    Bug(
        "a sequence has the keys of the next",
        "cu_seqlens_k[sequence + 1] - k_first",
        "params.N_kv - k_first",
        inputs="packed",
    ),
    Bug("a sequence has no rows", "cu_seqlens_q[sequence + 1]", "cu_seqlens_q[sequence]", inputs="packed"),
    Bug("every sequence has the keys of the first", "packed ? cu_seqlens_k[sequence] : 0", "0", inputs="packed"),
    Bug(
        "every sequence reads the rows of the first",
        "Q += sequence * params.q.batch + (q_first + first_row)",
        "Q += sequence * params.q.batch + first_row",
        inputs="packed",
    ),
    Bug("lse of sequences over each other", "* params.N + q_first;", "* params.N;", inputs="packed"),
    Bug("lse in powers of 2", "LN_2 * (m_i[i]", "(m_i[i]", inputs="views"),
    Bug(
        "lse of heads over each other",
        "* params.heads + head) * params.N",
        "* params.heads) * params.N",
        inputs="views",
    ),
    no_barrier("no barrier before K is read", 0, times=3),
    no_barrier("no barrier before P and V are read", 1, times=3),
    no_barrier("no barrier before P and V are replaced", 2, times=3),
)

# Where 15 by fp16 differs from 10, whose bugs are in test_hopper: two parts, exponents, O's sums, the ring.
WAITS = "    kv_ring.wait_full(stage);\n    const unsigned v ="
BUGS["fp16x3"] = (
    Bug("no lo of Q", "add_qk(S, q_lo, k, false);", "add_qk(S, q, k, false);"),
    Bug("no lo of K", "add_qk(S, q, k_lo, true);", ""),
    Bug(
        "no lo of P",
        "add_pv(O_tile, P_lo, v, false);\n  add_pv(O_tile, P_hi, v_lo, true);",
        "add_pv(O_tile, P_hi, v_lo, false);",
    ),
    Bug("no lo of V", "add_pv(O_tile, P_hi, v_lo, true);", ""),
    Bug(
        "O of the tiles before twice",
        "add_pv(O_tile, P_lo, v, false);",
        "add_pv(O_tile, P_lo, v, true);",
        cpu_only=True,
    ),
    Bug("elements of a pair exchanged", "x - rounded.x, y - rounded.y", "y - rounded.y, x - rounded.x"),
    Bug("no exponent of Q", "-(q_exponent + exponent.x)", "-exponent.x"),
    Bug("no exponent of V", "power_of_two(-v_exponent)", "1.0f"),
    Bug("exponent of V for that of K", "q_exponent + exponent.x", "q_exponent + exponent.y", inputs="uneven tiles"),
    Bug("exponents of the first tile", "exponents[first / BLOCK_N]", "exponents[0]", inputs="uneven tiles"),
    Bug("exponents of the first head", "BLOCK_N, 0, tile.kv_head,", "BLOCK_N, 0, 0,", inputs="uneven heads"),
    Bug("exponents of one sequence", "/ block + sequence + tile", "/ block + tile", inputs="packed"),
    Bug(
        "the exponent of one warp's elements",
        "largest = __reduce_max_sync(0xffffffff, of_warps",
        "__reduce_max_sync(0xffffffff, of_warps",
        inputs="uneven tiles",
    ),
    Bug(
        "no barrier before the exponent",
        "__syncthreads();",
        "",
        times=2,
        cpu_only=True,
    ),
    Bug("infinite hi", "MAX_EXPONENT = 14", "MAX_EXPONENT = 17"),
    Bug("lo is lost", "MAX_EXPONENT = 14", "MAX_EXPONENT = -12"),
    Bug("key tiles without an exponent", "tile.begin = tile.begin / BLOCK_N * BLOCK_N;", "", inputs="window"),
    Bug("acc is not rescaled", "  rescale_output(acc, rescale);\n", "", inputs="large logits"),
    Bug("m_i stays", "m_i[i] + RESCALE_THRESHOLD", "m_i[i] + 3e38f", inputs="large logits"),
    Bug("V is not waited for", WAITS, "    const unsigned v =", cpu_only=True),
    Bug("S is read in flight", "wgmma_wait<0>();\n    wgmma_registers(S);", "", cpu_only=True),
    Bug("O is read in flight", "wgmma_wait<1>();", "", cpu_only=True),
    Bug("the last O is left out", "    add_output(stage, exponent.y);\n", ""),
    Bug("exponent of the next V", "v_exponent = exponent.y", "&v_exponent = exponent.y", inputs="uneven tiles"),
    Bug("the parity stays", "index = 0;\n    phase ^= 1;", "index = 0;", cpu_only=True),
    Bug(
        "a stage is never given back",
        "if (leader) kv_ring.release(stage);",
        "",
        error=engine.LaunchError,
        cpu_only=True,
    ),
    Bug(
        "fewer bytes than expected",
        "expect(stage, KV_BYTES)",
        "expect(stage, TILE_BYTES)",
        cpu_only=True,
    ),
    Bug(
        "rows of O with those of Q",
        "8 * i * params.o.row",
        "8 * i * params.q.row",
        inputs="views",
        error=engine.LaunchError,
        cpu_only=True,
    ),
)

# Where 15 differs from 07, whose bugs are in test_tensor_cores: elements in two parts, sums, order of columns.
BUGS["tf32"] = (
    Bug("no lo of Q and P", "mma_m16n8k8(small, a.lo, b.hi);", ""),
    Bug("no lo of K and V", "mma_m16n8k8(small, a.hi, b.lo);", ""),
    Bug("lo from a hi of more bits", "+ 0x1000) & 0xffffe000", "+ 0x0800) & 0xfffff000"),
    Bug("small products are not added", "(S[m][n][e] + small[m][n][e])", "S[m][n][e]"),
    Bug("small products of the scores before", "Scores small = {};", "Scores small;", cpu_only=True),
    Bug(
        "O stays in the tensor cores",
        "mma_three(sum[m][j], sum[m][j],",
        "mma_three(acc[m][n + j], acc[m][n + j],",
        inputs="many keys",
    ),
    Bug("columns of Q exchanged", "set(i % 2, q.x)", "set(i % 2, q.y)"),
    Bug("columns of K in another order", "b[0].set(1, key.y)", "b[0].set(1, key.z)"),
    Bug("V's rows in the order of fragments", "swizzle_words(2 * t,", "swizzle_words(t,"),
    Bug("the same row of V twice", "(v_lane ^ 64 * i)", "v_lane", cpu_only=True),
    Bug("columns of V exchanged", "b[1].set(i, v.y)", "b[1].set(i, v.z)"),
    Bug("rows of P exchanged", "set(i % 2 + 2 * e, p)", "set(e + i % 2 * 2, p)"),
    Bug("columns of O in the order of products", "8 * n + 16 * e + 4 * t", "8 * n + 8 * t + 4 * e"),
    Bug(
        "swizzled on the way out alone",
        "copy_offset = swizzle_words(copy_row, copy_chunk)",
        "copy_offset = 16 * (copy_row * CHUNKS + copy_chunk)",
    ),
    Bug("no scale", "scale * (S[m][n][e]", "(S[m][n][e]"),
    Bug("acc is not rescaled", "row_pair(acc, i, n)[e] *= rescale;", ";", inputs="large logits"),
    Bug("l_i is not rescaled", "l_i[i] *= rescale;", "", inputs="large logits"),
    Bug("rescaled the wrong way", "exp2f(m_i[i] - m_new[i])", "exp2f(m_new[i] - m_i[i])"),
    Bug("m_i stays", "THRESHOLD 8.0f", "THRESHOLD 3e38f", inputs="large logits"),
    Bug("maxima of one lane", "m_new[i] = row_allreduce(m_new[i],", "row_allreduce(m_new[i],", inputs="large logits"),
    Bug("a row that sees nothing yet", "m_i = M_INIT;", "m_i = NEG_INF;", inputs="nothing to see"),
    Bug("a row that saw nothing is divided", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum", inputs="nothing to see"),
    Bug("tiles across the diagonal count as full", "min(first_row + window.hi + 1, end)", "end", inputs="causal"),
    Bug("tiles across the left border count as full", "first < last_row + window.lo || ", "", inputs="window"),
    out_of_bounds(
        "V with the rows of K",
        "V += (next - first) * params.v.row",
        "V += (next - first) * params.k.row",
        inputs="views",
    ),
    out_of_bounds("rows of O with those of Q", "O + r * params.o.row", "O + r * params.q.row", inputs="views"),
    Bug("lse of another row", "block.store_lse(lse, params, r,", "block.store_lse(lse, params, r ^ 1,", inputs="views"),
    Bug("no wait for the copies", "cp_async_wait<0>();", "", cpu_only=True),
    no_barrier("no barrier in the loop", 0, times=1),
    Bug(
        "the next tile overwrites this one",
        "K_copy + (stage_offset ^ TILE)",
        "K_copy + stage_offset",
        cpu_only=True,
    ),
)

CASES = [(name, bug) for name, bugs in BUGS.items() for bug in bugs]


def make_inputs(stage: Stage, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make two blocks of rows and several tiles of keys, the last of both incomplete."""
    tiles = stage.defines(HEAD_DIM)
    if kind == "many keys":  # every one of them adds to O
        q, k, v = check.make_inputs(40, 4096, HEAD_DIM)
        return q, k, np.abs(v)
    q, k, v = check.make_inputs(tiles["BLOCK_M"] + 6, 6 * tiles.get("BLOCK_N", 16) + 4, HEAD_DIM)
    if kind == "uneven tiles":  # of rows, each with its own magnitude
        of_q, of_k = (2.0 ** -(np.arange(len(a))[:, None] // size % 7) for a, size in ((q, 64), (k, tiles["BLOCK_N"])))
        q, k, v = (a.astype(np.float32) for a in (q * of_q, k * of_k, v * 2.0**-3 / of_k))
    if kind == "large logits":
        grow = np.float32(np.sqrt(1000 * np.sqrt(HEAD_DIM) / np.abs(q @ k.T).max()))
        q, k = q * grow, k * grow
    return q, k, v


def masked_inputs(stage: Stage, kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Return q, k, v with heads first on the device, and options, for what only stages from 05 on support.

    Each has another layout: a kernel that confuses their strides must not be right by chance.
    """
    rng = np.random.default_rng(0)
    sizes = stage.defines(HEAD_DIM)
    n, n_kv = sizes["BLOCK_M"] + 6, 5 if kind == "nothing to see" else 3 * sizes["BLOCK_N"] + 4

    def normal(*shape: int) -> Any:
        return device.cp.asarray(rng.standard_normal(shape, dtype=np.float32) + np.float32(0.25))

    q = normal(2, n, 4, HEAD_DIM).swapaxes(1, 2)
    k, v = normal(2, n_kv, 2, HEAD_DIM).swapaxes(1, 2), normal(2, 2, n_kv, HEAD_DIM + 4)[..., :HEAD_DIM]
    if kind == "uneven heads":  # each with its own magnitude; views, like all of them
        for a, factor in ((q, 0.5), (k, 0.25), (v, 8.0)):
            a[:, 1::2] *= np.float32(factor)
    if kind == "packed":
        v[..., 7:, :] *= np.float32(0.125)  # the second sequence has another magnitude
        cu = tuple(np.array(ends, np.int32) for ends in ([0, 9, n], [0, 7, n_kv]))
        return [q[0], k[0], v[0]], {"cu_seqlens": cu}
    window = {"window": (sizes["BLOCK_N"] + 5, 3)} if kind == "window" else {}
    return [q, k, v], {"causal": kind in ("causal", "nothing to see"), **window}


def run_masked_check(stage: Stage, text: str, kind: str) -> None:
    """Check the output and lse of a call with strides, shared heads and masks."""
    arrays, options = masked_inputs(stage, kind)
    run, (o, lse) = stage.prepare(*arrays, source=text, sizes=stage.tiles(HEAD_DIM), return_lse=True, **options)
    run()
    q, k, v, o, lse = (device.cp.asnumpy(a) for a in (*arrays, o, lse))
    cu_q, cu_k = options.pop("cu_seqlens", ([0, q.shape[-2]], [0, k.shape[-2]]))
    k, v = (a.repeat(2, axis=-3) for a in (k, v))
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = q[..., rows, :], k[..., keys, :], v[..., keys, :]
        want, want_lse = reference.attention(*one, return_lse=True, **options)
        check.check(stage.name, o[..., rows, :], want)
        check.check(f"{stage.name}: lse", lse[..., rows], want_lse)


def run_check(stage: Stage, text: str, kind: str) -> None:
    """Run the check of the stages' own tests on another text of the kernel."""
    if kind not in ("unit-normal", "large logits", "many keys", "uneven tiles"):
        return run_masked_check(stage, text, kind)
    q, k, v = make_inputs(stage, kind)
    run, o = stage.prepare(q, k, v, source=text, sizes=stage.tiles(HEAD_DIM))
    run()
    tolerance = check.tolerance_for(q, k) if kind == "large logits" else check.TOLERANCE
    check.check(stage.name, o, reference.attention(q, k, v), tolerance=tolerance)


def test_every_stage_has_its_bugs() -> None:
    """In float32; test_tensor_cores.py has the half types."""
    assert list(BUGS) == [s.name for s in FORWARD.values() if "float32" in s.dtypes]
    for bugs in BUGS.values():
        names = [bug.name for bug in bugs]
        assert len(set(names)) == len(names)


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, bugs in BUGS.items() for kind in sorted({bug.inputs for bug in bugs})]
)
@pytest.mark.parametrize("engine", ["this device", *["CPU engine"] * device.ON_GPU])
def test_kernel_without_a_bug_passes(name: str, kind: str, engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "CPU engine":
        request.getfixturevalue("cpu_engine")
    run_check(LADDER[name], kernel.source(LADDER[name].file), kind)


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(LADDER[name].file), bug) for name, bug in CASES)


@pytest.mark.exhaustive(one_of_each=lambda name, bug: (name, bug.cpu_only))
@pytest.mark.parametrize(("name", "bug"), CASES, ids=[f"{name}-{bug.name}" for name, bug in CASES])
def test_bug_is_seen(name: str, bug: Bug, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    stage = LADDER[name]
    text = bug.plant(kernel.source(stage.file))
    with pytest.raises(bug.error):
        run_check(stage, text, bug.inputs)


def test_a_kernel_that_has_changed_is_told() -> None:
    bug = Bug("no scale", "scale * dot", "dot")
    with pytest.raises(AssertionError, match=r"the kernel has changed: 'scale \* dot' was there 1 times"):
        bug.plant("float s = dot * scale;")
    assert Bug("", "a", "b", times=3, which=1).plant("a a a") == "a b a"
    assert Bug("", "a", "b", times=3, which=ALL).plant("a a a") == "b b b"

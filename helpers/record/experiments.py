"""What is measured beside the stages as they are: other tile sizes, and kernels whose text is changed.

Notebooks read them from the record. To add one is to add data: a Variant, or an Experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from helpers.record.cases import Case

ONE_HEAD = (Case((1, 1, 4096, 64)), Case((1, 1, 16384, 64)))
HEADS = (Case((4, 16, 4096, 64)), Case((4, 16, 4096, 128)))
HALF_HEADS = tuple(Case(case.shape, "bfloat16") for case in HEADS)
HALF_128 = HALF_HEADS[1:]
FLOAT16_HEADS = tuple(Case(case.shape, "float16") for case in HEADS)
FEW_BLOCKS = tuple(Case((1, 16, 512, head_dim), "bfloat16") for head_dim in (64, 128))


@dataclass(frozen=True)
class Variant:
    """A stage with other tile sizes, each by -D, at some cases."""

    stage: str
    sizes: tuple[Mapping[str, int], ...]
    cases: tuple[Case, ...] = ONE_HEAD


@dataclass(frozen=True)
class Experiment:
    """A stage with changes (old, new) to its text: what a notebook says of a GPU, measured.

    launches: how often the output is compared; more than one for races, and then every row is. An output may be
    wrong: the record says how many were.
    """

    name: str
    stage: str
    changes: tuple[tuple[str, str], ...]
    cases: tuple[Case, ...] = ONE_HEAD[:1]
    sizes: tuple[Mapping[str, int], ...] = ({},)
    launches: int = 1

    def apply(self, code: str) -> str:
        """The changed text. Raises ValueError where it is not the text that the changes were made for."""
        for old, new in self.changes:
            if old not in code:
                raise ValueError(f"the kernel has no {old!r}: mend the experiment {self.name!r}")
            code = code.replace(old, new)
        return code


_TILED = tuple({"BLOCK_M": m, "BLOCK_N": 16} for m in (32, 64, 128))
_ONLINE = tuple({"BLOCK_M": m, "BLOCK_N": n} for m, n in ((32, 16), (64, 8), (64, 16), (64, 32), (128, 16)))


def _register_tiles(*rows: tuple[int, int, int, int]) -> tuple[dict[str, int], ...]:
    """Sizes of 04, a row each."""
    return tuple(dict(zip(("BLOCK_M", "BLOCK_N", "THREADS", "THREADS_X"), row, strict=True)) for row in rows)


_REGISTER = _register_tiles((128, 64, 128, 8), (128, 64, 256, 16), (64, 32, 128, 8), (64, 64, 64, 8), (128, 32, 256, 8))
_TALLER = _register_tiles((64, 64, 128, 8), (128, 128, 256, 16), (128, 128, 128, 8))  # the last: 8 x 16 scores, spilled
_FEW = _register_tiles((128, 64, 128, 8), (64, 64, 128, 16), (32, 64, 128, 16), (32, 128, 128, 16))
_MMA = (
    {"BLOCK_N": 32},
    {"BLOCK_N": 64},
    {"BLOCK_N": 128},
    {"BLOCK_M": 64, "BLOCK_N": 64, "MIN_BLOCKS": 3},
    {"BLOCK_M": 256, "BLOCK_N": 64, "WARPS": 8, "MIN_BLOCKS": 1},
)

# What the stages' own sizes were chosen from.
VARIANTS = (
    Variant("naive", tuple({"BLOCK_M": m} for m in (32, 64, 128, 256))),
    Variant("tiled", _TILED),
    Variant("online_softmax", _ONLINE),
    Variant("register_tiles", _REGISTER, HEADS),
    Variant("register_tiles", _TALLER, HEADS[:1]),
    Variant("register_tiles", _REGISTER[:1] + _TALLER[:2], ONE_HEAD[1:]),
    Variant("register_tiles", _FEW, ONE_HEAD[:1]),
    Variant("register_tiles", ({},), (Case((1, 1, 131072, 128)),)),  # where S would take 69 GB
    Variant("flash_mma", _MMA, HALF_HEADS),
    Variant("flash_mma", ({"BLOCK_N": 32, "MIN_BLOCKS": 3}, {"BLOCK_N": 96}), HALF_HEADS[:1]),
    Variant("flash_mma", tuple({"BLOCK_M": m, "BLOCK_N": n} for m, n in ((128, 64), (64, 64), (64, 128))), FEW_BLOCKS),
)

_BEFORE = "    __syncthreads();  // hazard: the tile is overwritten while another thread still reads the one before\n"
_AFTER = "    __syncthreads();  // hazard: the tile is read before another thread has written its part of it\n"
_DIVIDE = "#pragma unroll\n    for (int c = 0; c < HEAD_DIM; ++c) acc[c] {};\n"
_DIVIDING = (  # the end of the loop over tiles divides; so acc is first multiplied by the old sum again
    ("acc[c] *= rescale;", "acc[c] *= l_i;"),
    ("= acc[c] / l_i;", "= acc[c];"),
)
_LOOP_END = "  }\n\n  // ---- epilogue"
_RECIPROCAL = "    const float r = 1.0f / l_i;\n" + _DIVIDE.format("*= r") + _LOOP_END
_STRIDE = ("#define Q_STRIDE (HEAD_DIM | 1)", "#define Q_STRIDE HEAD_DIM")
_OWN = _ONLINE[-1:]

# ---- 04_register_tiles.cu
_SERPENTINE = ("const int i = j % 2 == 0 ? n : TILE_M - 1 - n;", "const int i = n;")
_K_PADDING = ("K[BLOCK_N][D4 | 1]", "K[BLOCK_N][D4]")
_P_PADDING = ("P[BLOCK_N][BLOCK_M + 8]", "P[BLOCK_N][BLOCK_M]")
_LANES = (
    (
        "const int x = threadIdx.x / 4 % (THREADS_X / 2) * 2 + threadIdx.x % 2;",
        "const int x = threadIdx.x % THREADS_X;",
    ),
    (
        "const int y = threadIdx.x / (2 * THREADS_X) * 2 + threadIdx.x / 2 % 2;",
        "const int y = threadIdx.x / THREADS_X;",
    ),
    (
        """  a = op(a, __shfl_xor_sync(0xffffffff, a, 1));
#pragma unroll
  for (int bit = 4; bit <= THREADS_X; bit *= 2)""",
        """#pragma unroll
  for (int bit = 1; bit < THREADS_X; bit *= 2)""",
    ),
)
_NO_PADDING = (_K_PADDING, _P_PADDING)
_EXP = (("scale * LOG2_E * word", "scale * word"), ("exp2f(", "expf("))
_WORDS = (  # volatile: else the compiler joins four loads of a word to one of a float4 again
    (
        "// This thread's rows of one column of Q or P.",
        "__device__ __forceinline__ float4 words(const volatile float* a) {\n"
        "  return make_float4(a[0], a[1], a[2], a[3]);\n}\n\n// This thread's rows of one column of Q or P.",
    ),
    ("*reinterpret_cast<const float4*>(column + row_of(i, y))", "words(column + row_of(i, y))"),
    ("k[j] = smem.K[x + j * THREADS_X][c];", "k[j] = words(&smem.K[x + j * THREADS_X][c].x);"),
    ("const float4 v = smem.V[j][x + c * THREADS_X];", "const float4 v = words(&smem.V[j][x + c * THREADS_X].x);"),
)
_4_X_4 = {"BLOCK_M": 64, "BLOCK_N": 32, "THREADS": 128, "THREADS_X": 8}

# Up to the kernel of 04, one idea at a time: (idea, what is not in it yet, sizes). The last, cp.async, makes the stage.
_CLIMB = (
    ("4 x 4 scores a thread", (*_WORDS, *_NO_PADDING, *_LANES, _SERPENTINE, *_EXP), {**_4_X_4, "VECTOR": 0}),
    ("8 x 8 scores a thread", (*_WORDS, *_NO_PADDING, *_LANES, _SERPENTINE, *_EXP), {"VECTOR": 0}),
    ("float4 from shared memory", (*_NO_PADDING, *_LANES, _SERPENTINE, *_EXP), {"VECTOR": 0}),
    ("rows of K and P padded", (*_LANES, _SERPENTINE, *_EXP), {"VECTOR": 0}),
    ("float4 from global memory", (*_LANES, _SERPENTINE, *_EXP), {"ASYNC": 0}),
    ("lanes in squares", (_SERPENTINE, *_EXP), {"ASYNC": 0}),
    ("down one column, up the next", _EXP, {"ASYNC": 0}),
    ("exp2 for exp", (), {"ASYNC": 0}),
)
CLIMB = tuple(
    Experiment(f"climb {number}, {idea}", "register_tiles", missing, (Case((4, 16, 4096, 64)),), (sizes,))
    for number, (idea, missing, sizes) in enumerate(_CLIMB, 1)
)

# ---- 05_heads_and_masks.cu: the order in which blocks start
CAUSAL_HEADS = (Case((1, 16, 4096, 64), causal=True), Case((4, 16, 4096, 64), causal=True))
_FIRST_ROWS = ("tile = gridDim.x - 1 - block / heads,", "tile = block / heads,")
_HEAD_BY_HEAD = (
    ("if (params.window_right < UNLIMITED) {", "{"),
    ("tile = gridDim.x - 1 - block / heads,", "tile = blockIdx.x,"),
    ("head = block % heads % gridDim.y,", "head = block / gridDim.x % gridDim.y,"),
    ("sequence = block % heads / gridDim.y;", "sequence = block / gridDim.x / gridDim.y;"),
)

# ---- 06_wmma.cu and 07_mma.cu
_SWIZZLE = ("(chunk % S ^ row / (8 / S) % S)", "chunk % S")
_RAISE = ("#define RESCALE_THRESHOLD 8.0f", "#define RESCALE_THRESHOLD 0.0f")
_VOTE = ("if (!__any_sync(0xffffffff, exceeded)) return;", "")
_KEYS = "#pragma unroll\n  for (int k = 0; k < BLOCK_N / 16; ++k) {\n"
_COLUMNS = """#pragma unroll
    for (int n = 0; n < HEAD_DIM_PADDED / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans("""
_WEIGHTS = """#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
"""
_NO_OVERLAP = (  # all of P first, then all of P V
    ("v_lane) {\n" + _KEYS, "v_lane) {\n  unsigned P[BLOCK_N / 16][TILES_M][4];\n" + _KEYS),
    ("    unsigned a[TILES_M][4];\n" + _WEIGHTS, "    auto& a = P[k];\n" + _WEIGHTS),
    (_COLUMNS, "  }\n" + _KEYS + "    const auto& a = P[k];\n" + _COLUMNS),
)

# Up to the kernel of 07, one idea at a time: what is not in it yet is put back. The last, copies, makes the stage.
_NO_SWIZZLE = (_SWIZZLE, ("return (address ^ 32 * k % WIDTH) + 32 * k / WIDTH * WIDTH;", "return address + 32 * k;"))
_LANE = "threadIdx.x % 32"
_FORMULAS = (  # every address worked out from its row and its chunk
    (
        "swizzle_advance_k(q_lane, k) + 32 * m * HEAD_DIM_PADDED",
        f"q_lane + swizzle(threadIdx.x / 32 * 16 * TILES_M + 16 * m + {_LANE} % 16, 2 * k + {_LANE} / 16)",
    ),
    (
        "swizzle_advance_k(k_lane, k) + 32 * n * HEAD_DIM_PADDED",
        f"k_lane + swizzle(16 * n + {_LANE} / 16 * 8 + {_LANE} % 8, 2 * k + {_LANE} / 8 % 2)",
    ),
    (
        "swizzle_advance_k(v_lane, n) + 32 * k * HEAD_DIM_PADDED",
        f"v_lane + swizzle(16 * k + {_LANE} % 16, 2 * n + {_LANE} / 16)",
    ),
    ("gemm_qk<T>(S, q_lane, k_lane + stage_offset);", "gemm_qk<T>(S, Q_smem, K_smem + stage_offset);"),
    ("softmax_scale_log2, v_lane + stage_offset);", "softmax_scale_log2, V_smem + stage_offset);"),
)
_DECLARE = "    const int next = first + BLOCK_N;\n"
_COPY = """    if (next < end) {
      K += BLOCK_N * params.k.row;
      V += BLOCK_N * params.v.row;
      load_tile<BLOCK_N>(K_smem + (stage_offset ^ TILE) + copy_offset, K, params.k.row, end - next - copy_row);
      load_tile<BLOCK_N>(V_smem + (stage_offset ^ TILE) + copy_offset, V, params.v.row, end - next - copy_row);
      cp_async_commit();
    }
"""
_COPIES_FIRST = ((_DECLARE + _COPY, ""), ("    Scores S = {};\n", _DECLARE + _COPY + "    Scores S = {};\n"))
_ONE_TILE = (  # the next is requested when this one is used up
    (_DECLARE + _COPY, _DECLARE),
    ("first += BLOCK_N, stage_offset ^= TILE)", "first += BLOCK_N)"),
    (
        "softmax_scale_log2, v_lane + stage_offset);\n",
        "softmax_scale_log2, v_lane + stage_offset);\n    __syncthreads();\n"
        + _COPY.replace("(stage_offset ^ TILE)", "stage_offset"),
    ),
)
_CLIMB_07 = (
    ("first version", (*_ONE_TILE, *_NO_SWIZZLE, *_FORMULAS, _VOTE), {"BLOCK_M": 128, "WARPS": 8}),
    ("swizzle", (*_ONE_TILE, *_FORMULAS, _VOTE), {"BLOCK_M": 128, "WARPS": 8}),
    ("32 rows a warp", (*_ONE_TILE, *_FORMULAS, _VOTE), {}),
    ("next tile under way", (*_COPIES_FIRST, *_FORMULAS, _VOTE), {}),
    ("addresses by exclusive or", (*_COPIES_FIRST, _VOTE), {}),
    ("rescale when it pays", _COPIES_FIRST, {}),
)
CLIMB_07 = tuple(
    Experiment(f"climb {number}, {idea}", "flash_mma", missing, HALF_128, (sizes,))
    for number, (idea, missing, sizes) in enumerate(_CLIMB_07, 1)
)
# 06: tiles fetched when they are wanted, not before.
_NEXT_V = "fetch_tile(next, V, params.v.row, first, end);"
_NEXT_K = "fetch_tile(next, K, params.k.row, first + BLOCK_N, end);"
_NOT_AHEAD = (
    (_NEXT_V, ""),
    ("put_tile(V_smem, next);", _NEXT_V + " put_tile(V_smem, next);"),
    (_NEXT_K, ""),
    ("    put_tile(K_smem, next);\n", "    __syncthreads();\n" + _NEXT_K + "\n    put_tile(K_smem, next);\n"),
)
_WMMA_VOTE = ("if (__any_sync(0xffffffff, m_new > m_i + RESCALE_THRESHOLD)) {", "{")

EXPERIMENTS = (
    Experiment("no barrier before the load", "tiled", ((_BEFORE, ""),), sizes=_TILED, launches=50),
    Experiment("no barrier after the load", "tiled", ((_AFTER, ""),), sizes=_TILED, launches=50),
    Experiment("Q_STRIDE is even", "tiled", (_STRIDE,), sizes=_TILED, launches=50),
    Experiment(
        "divide at every tile",
        "online_softmax",
        (*_DIVIDING, (_LOOP_END, _DIVIDE.format("/= l_i") + _LOOP_END)),
        ONE_HEAD,
        _OWN,
    ),
    Experiment("one reciprocal per tile", "online_softmax", (*_DIVIDING, (_LOOP_END, _RECIPROCAL)), ONE_HEAD, _OWN),
    # 04: what each idea brings, taken out of the finished kernel.
    Experiment("one column of S after the other", "register_tiles", (_SERPENTINE,), HEADS),
    Experiment("rows of K at even distances", "register_tiles", (_K_PADDING,), HEADS),
    Experiment("rows of P unpadded", "register_tiles", (_P_PADDING,), HEADS),
    Experiment("threads of a warp in rows", "register_tiles", _LANES, HEADS),
    Experiment("copies wait in registers", "register_tiles", (), HEADS, ({"ASYNC": 0},)),
    Experiment("word by word", "register_tiles", (), HEADS, ({"VECTOR": 0},)),
    *CLIMB,
    # 05: which rows come first.
    Experiment("first rows first", "heads_and_masks", (_FIRST_ROWS,), CAUSAL_HEADS),
    Experiment("head by head", "heads_and_masks", _HEAD_BY_HEAD, CAUSAL_HEADS),
    # 07: the same.
    Experiment("no swizzle", "flash_mma", (_SWIZZLE,), HALF_128),
    Experiment("rescale at every tile", "flash_mma", (_VOTE,), HALF_128),
    Experiment("rescale when a maximum moves", "flash_mma", (_RAISE,), HALF_128),
    Experiment("all weights before the product", "flash_mma", _NO_OVERLAP, HALF_128),
    Experiment("16 rows a warp", "flash_mma", (), HALF_128, ({"BLOCK_M": 128, "WARPS": 8},)),
    Experiment("addresses by the formula", "flash_mma", _FORMULAS, HALF_128),
    Experiment("one tile at a time", "flash_mma", _ONE_TILE, HALF_128),
    *CLIMB_07,
    Experiment("rescale when a maximum moves", "flash_wmma", (_RAISE,), FLOAT16_HEADS),
    Experiment("rescale at every tile", "flash_wmma", (_WMMA_VOTE,), FLOAT16_HEADS),
    Experiment("tiles fetched when wanted", "flash_wmma", _NOT_AHEAD, FLOAT16_HEADS),
)

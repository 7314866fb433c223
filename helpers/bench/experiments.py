"""List what is measured in addition to the stages: other tile sizes, the steps of a climb, ideas removed one by one.

Notebooks read them from the record. To add one is to add data: a Variant, an Experiment, or a step in
helpers.attention.ladder.steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from helpers.attention.ladder import Stage
from helpers.attention.ladder.steps import CLIMBS, LAST_IDEAS, numbered
from helpers.bench.cases import Case, shape_of_tokens
from helpers.engine.cuda_source.edit import edit

WMMA, MMA = "flash_wmma", "flash_mma"

ONE_HEAD = (Case((1, 1, 4096, 64)), Case((1, 1, 16384, 64)))
HEADS = (Case((4, 16, 4096, 64)), Case((4, 16, 4096, 128)))
HALF_HEADS = tuple(Case(case.shape, "bfloat16") for case in HEADS)
HALF_128 = HALF_HEADS[1:]
FLOAT16_HEADS = tuple(Case(case.shape, "float16") for case in HEADS)
FEW_BLOCKS = tuple(Case((1, 16, 512, head_dim), "bfloat16") for head_dim in (64, 128))

HALF_GRADIENTS = tuple(replace(case, backward=True) for case in HALF_HEADS)

# For the steps to hopper: a head dimension, many keys and few, without a mask and with one.
HOPPER_HEADS = tuple(
    Case(shape_of_tokens(n, head_dim), "bfloat16", causal)
    for head_dim in (128, 64)
    for n in (8192, 2048)
    for causal in (False, True)
)

# For the steps to hopper_backward: 16,384 tokens and 2048 columns of all heads together.
HOPPER_GRADIENTS = tuple(
    Case(shape_of_tokens(4096, head_dim), "bfloat16", causal, backward=True)
    for head_dim in (128, 64)
    for causal in (False, True)
)

# The cases of the steps to a stage. Other climbs are timed at HEADS, in the first type that the stage takes.
CLIMB_CASES = {
    "register_tiles": HEADS[:1],
    "flash_wmma": FLOAT16_HEADS,
    "flash_mma": HALF_128,
    "flash_cute": HALF_128,
    "backward_mma": (*HALF_GRADIENTS, *(replace(case, causal=True) for case in HALF_GRADIENTS)),
    "hopper": HOPPER_HEADS,
    "hopper_backward": HOPPER_GRADIENTS,
    "tf32": HEADS,
    "fp8": tuple(Case(case.shape, "uint8", causal) for case in HEADS for causal in (False, True)),
    "fp16x3": (*HEADS, *(replace(case, causal=True) for case in HEADS)),
}


@dataclass(frozen=True)
class Step:
    """One step on the way to a stage, as measured. number: that of its file."""

    of: str  # the stage that the climb ends at
    number: int
    stage: Stage
    case: Case

    @property
    def is_last(self) -> bool:
        """True of the stage itself."""
        return self.stage is CLIMBS[self.of][-1]

    @property
    def idea(self) -> str:
        """The step's idea; for the stage itself, what it adds to the last step."""
        return LAST_IDEAS.get(self.of, self.stage.idea) if self.is_last else self.stage.idea

    @property
    def name(self) -> str:
        """Its name in the record: the stage that the climb leads to, and the step's file."""
        return f"{self.of}: {Path(self.stage.file).stem}"


def steps(only: Mapping[str, object] | None = None) -> Iterator[Step]:
    """Yield the steps to each stage that has a climb, with their cases; the last step is the stage itself.

    Args:
        only: names of stages; climbs to others are skipped.
    """
    for of, climb in CLIMBS.items():
        if only is None or of in only:
            cases = CLIMB_CASES.get(of) or [Case(case.shape, climb[-1].dtypes[0]) for case in HEADS]
            for case in cases:
                for number, stage in numbered(climb).items():
                    yield Step(of, number, stage, case)


@dataclass(frozen=True)
class Variant:
    """A stage with other tile sizes, set by -D, at some cases."""

    stage: str
    sizes: tuple[Mapping[str, int], ...]
    cases: tuple[Case, ...] = ONE_HEAD


@dataclass(frozen=True)
class Experiment:
    """A stage with changes (old, new) to its text: a notebook's claim about a GPU, measured.

    hits: how often each `old` occurs in the text. launches: how often the output is compared; more than one for races,
    and then every row is compared. An output may be wrong: the record says how many were. counted: Nsight Compute
    counts it too.
    """

    name: str
    stage: str
    changes: tuple[tuple[str, str], ...]
    cases: tuple[Case, ...] = ONE_HEAD[:1]
    sizes: tuple[Mapping[str, int], ...] = ({},)
    launches: int = 1
    hits: int = 1
    counted: bool = False

    def apply(self, code: str) -> str:
        """Return the changed text. Raises ValueError if the changes do not fit the text."""
        try:
            return edit(code, *self.changes, count=self.hits)
        except ValueError as error:
            raise ValueError(f"correct the experiment {self.name!r} of {self.stage}: {error}") from None


_TILED = tuple({"BLOCK_M": m, "BLOCK_N": 16} for m in (32, 64, 128))
_ONLINE = tuple({"BLOCK_M": m, "BLOCK_N": n} for m, n in ((32, 16), (64, 8), (64, 16), (64, 32), (128, 16)))


def _register_tiles(*rows: tuple[int, int, int, int]) -> tuple[dict[str, int], ...]:
    """Name the sizes of register_tiles, a row each."""
    return tuple(dict(zip(("BLOCK_M", "BLOCK_N", "THREADS", "THREADS_X"), row, strict=True)) for row in rows)


_REGISTER = _register_tiles((128, 64, 128, 8), (128, 64, 256, 16), (64, 32, 128, 8), (64, 64, 64, 8), (128, 32, 256, 8))
_TALLER = _register_tiles((64, 64, 128, 8), (128, 128, 256, 16), (128, 128, 128, 8))  # the last: 8 x 16 scores, spilled
# With the other tiles of 128 threads: register tiles of 4, 8, 12 rows by 4, 8, 12, 16 columns. Most of these spill.
_SWEEP = _register_tiles(*((m, n, 128, 8) for m, n in ((64, 96), (64, 128), (128, 32), (128, 96))))
_SWEEP += _register_tiles(*((192, n, 128, 8) for n in (32, 64, 96, 128)))
_FEW = _register_tiles((128, 64, 128, 8), (64, 64, 128, 16), (32, 64, 128, 16), (32, 128, 128, 16))
_MMA = (
    {"BLOCK_N": 32},
    {"BLOCK_N": 64},
    {"BLOCK_N": 128},
    {"BLOCK_M": 64, "BLOCK_N": 64, "MIN_BLOCKS": 3},
    {"BLOCK_M": 256, "BLOCK_N": 64, "WARPS": 8, "MIN_BLOCKS": 1},
)

# The sizes among which the stages' own sizes were chosen.
VARIANTS = (
    Variant("naive", tuple({"BLOCK_M": m} for m in (32, 64, 128, 256))),
    Variant("tiled", _TILED),
    Variant("online_softmax", _ONLINE),
    Variant("register_tiles", _REGISTER, HEADS),
    Variant("register_tiles", _TALLER + _SWEEP, HEADS[:1]),
    Variant("register_tiles", _REGISTER[:1] + _TALLER[:2], ONE_HEAD[1:]),
    Variant("register_tiles", _FEW, ONE_HEAD[:1]),
    Variant("register_tiles", ({},), (Case((1, 1, 131072, 128)),)),  # where S would take 69 GB
    Variant(MMA, _MMA, HALF_HEADS),
    Variant(MMA, ({"BLOCK_N": 32, "MIN_BLOCKS": 3}, {"BLOCK_N": 96}), HALF_HEADS[:1]),
    Variant(MMA, tuple({"BLOCK_M": m, "BLOCK_N": n} for m, n in ((128, 64), (64, 64), (64, 128))), FEW_BLOCKS),
)

# ---- 02_tiled.cu: the barrier in both passes
_BEFORE = (("    __syncthreads();\n    load_tile(K_smem", "    load_tile(K_smem"),)
_AFTER = (("    __syncthreads();\n    float s[BLOCK_N];", "    float s[BLOCK_N];"),)
_STRIDE = (("HEAD_DIM | 1", "HEAD_DIM"),)

# ---- 03_online_softmax.cu: the end of the loop over tiles divides, so acc is first multiplied by the old sum again
_LOOP_END = "  }\n\n  if (row < N)"
_DIVIDING = (("acc[c] *= rescale;", "acc[c] *= l_i;"), ("= acc[c] / l_i;", "= acc[c];"))
_DIVIDE = "#pragma unroll\n    for (int c = 0; c < HEAD_DIM; ++c) acc[c] {};\n"
_BY_THE_SUM = (_LOOP_END, _DIVIDE.format("/= l_i") + _LOOP_END)
_BY_A_RECIPROCAL = (_LOOP_END, "    const float r = 1.0f / l_i;\n" + _DIVIDE.format("*= r") + _LOOP_END)
_OWN = _ONLINE[-1:]

# ---- 05_heads_and_masks.cu: the order in which blocks start
CAUSAL_HEADS = (Case((1, 16, 4096, 64), causal=True), Case((4, 16, 4096, 64), causal=True))
_FIRST_ROWS = (("gridDim.x - 1 - ", ""),)
_HEAD_BY_HEAD = (
    ("    tile = gridDim.x - 1 - block / heads;\n", ""),
    ("    head = block % heads % gridDim.y;\n", ""),
    ("    sequence = block % heads / gridDim.y;\n", ""),
)

# ---- 06_wmma.cu: tiles are fetched when they are needed, not ahead
_NEXT_V = "fetch_tile(next, V, params.v.row, first, end);"
_NEXT_K = "fetch_tile(next, K, params.k.row, first + BLOCK_N, end);"
_NOT_AHEAD = (
    (_NEXT_V, ""),
    ("put_tile(V_smem, next);", _NEXT_V + " put_tile(V_smem, next);"),
    (_NEXT_K, ""),
    ("    put_tile(K_smem, next);\n", "    __syncthreads();\n" + _NEXT_K + "\n    put_tile(K_smem, next);\n"),
)


# ---- 06_wmma.cu and 07_mma.cu: how far a maximum may move before acc is rescaled
def _voted(far: str) -> tuple[tuple[str, str], ...]:
    """Change flash_wmma to vote: m_i and acc change only if one of the warp's maxima has moved by this much."""
    begin, end = "    const float rescale = exp2f(m_i - m_new);\n", "acc[m][n].x[e] *= factor.x[e];\n    }\n"
    return ((begin, f"    if (__any_sync(0xffffffff, m_new > m_i + {far})) {{\n{begin}"), (end, f"{end}    }}\n"))


_WMMA_AT_ANY_MOVE, _WMMA_LAZY = _voted("0.0f"), _voted("8.0f")
_AT_ANY_MOVE = ((" 8.0f", " 0.0f"),)
_AT_EVERY_TILE = (("  if (!__any_sync(0xffffffff, exceeded)) return;\n", ""),)

# ---- 07_mma.cu: all of P first, then all of PV
_KEYS = "#pragma unroll\n  for (int k = 0; k < BLOCK_N / 16; ++k) {\n"
_PACKED = "a[m][i] = pack(T(), x, y);\n      }\n"
_NO_OVERLAP = (
    (_KEYS + "    unsigned a[TILES_M][4];\n", f"  unsigned P[BLOCK_N / 16][TILES_M][4];\n{_KEYS}    auto& a = P[k];\n"),
    (_PACKED, f"{_PACKED}  }}\n{_KEYS}    const auto& a = P[k];\n"),
)

# ---- 15_tf32.cu: products left out, hi by the instruction for it, more rows per warp
TF32_ONE_PRODUCT = (
    ("mma_m16n8k8(small, a.lo, b.hi);", ""),
    ("mma_m16n8k8(small, a.hi, b.lo);", ""),
)
_BY_CVT = (
    (
        "hi = (__float_as_uint(x) + 0x1000) & 0xffffe000;",
        'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(x));',
    ),
)

# ---- 15_fp16x3.cu: half of the additions to acc wait for S
_ADDED_ANYWHERE = (("      wgmma_registers(acc);", ""),)

# What the steps of a climb do not show: a race, an idea in two halves, a choice without a step, and an idea at a shape
# or type at which its climb is not timed.
EXPERIMENTS = (
    Experiment("no barrier before the load", "tiled", _BEFORE, sizes=_TILED, launches=50, hits=2),
    Experiment("no barrier after the load", "tiled", _AFTER, sizes=_TILED, launches=50, hits=2),
    Experiment("Q_STRIDE is even", "tiled", _STRIDE, sizes=_TILED, launches=50, counted=True),
    Experiment("divide at every tile", "online_softmax", (*_DIVIDING, _BY_THE_SUM), ONE_HEAD, _OWN),
    Experiment("one reciprocal per tile", "online_softmax", (*_DIVIDING, _BY_A_RECIPROCAL), ONE_HEAD, _OWN),
    Experiment(
        "one column of S after the other",
        "register_tiles",
        (("j % 2 == 0 ? n : TILE_M - 1 - n", "n"),),
        HEADS,
        counted=True,
    ),
    Experiment("rows of K at even distances", "register_tiles", (("[D4 | 1]", "[D4]"),), HEADS),
    Experiment("rows of P unpadded", "register_tiles", (("[BLOCK_M + 8]", "[BLOCK_M]"),), HEADS),
    Experiment("copies wait in registers", "register_tiles", (), HEADS, ({"ASYNC": 0},)),
    Experiment("word by word", "register_tiles", (), HEADS, ({"VECTOR": 0},)),
    Experiment("first rows first", "heads_and_masks", _FIRST_ROWS, CAUSAL_HEADS),
    Experiment("head by head", "heads_and_masks", _HEAD_BY_HEAD, CAUSAL_HEADS),
    Experiment("rescale when a maximum moves", WMMA, _WMMA_AT_ANY_MOVE, FLOAT16_HEADS),
    Experiment("rescale when it moves by 2^8", WMMA, _WMMA_LAZY, FLOAT16_HEADS),
    Experiment("tiles fetched when wanted", WMMA, _NOT_AHEAD, FLOAT16_HEADS),
    Experiment("rescale when a maximum moves", MMA, _AT_ANY_MOVE, HALF_128, hits=2),  # 07 and any_size.cuh
    Experiment("rescale at every tile", MMA, _AT_EVERY_TILE, HALF_128),
    Experiment("all weights before the product", MMA, _NO_OVERLAP, HALF_128),
    Experiment("16 rows a warp", MMA, (), HALF_128, ({"BLOCK_M": 128, "WARPS": 8},)),
    Experiment("one TF32 product", "tf32", TF32_ONE_PRODUCT, HEADS),
    Experiment("hi by cvt.rna.tf32", "tf32", _BY_CVT, HEADS),
    Experiment("16 rows a warp", "tf32", (), HEADS[:1], ({"BLOCK_M": 64, "WARPS": 4, "MIN_BLOCKS": 3},)),
    Experiment("no turns", "fp16x3", (), HEADS, ({"PINGPONG": 0},)),
    Experiment("O is added where the compiler has it", "fp16x3", _ADDED_ANYWHERE, HEADS),
)

# ---- the backward pass
_SCALAR = ({"VECTOR_ATOMICS": 0},)

# ---- 13_hopper_backward.cu: dQ from the consumers' registers; heads that share the L2 cache
_STORED = """\
      dQ_smem[n * 128] =
          make_float4(dQ_acc[4 * n], dQ_acc[4 * n + 1], dQ_acc[4 * n + 2], dQ_acc[4 * n + 3]);
    async_proxy_fence();
    named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);
"""
_ADDED = """\
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target + n * 128),
                   "f"(dQ_acc[4 * n]), "f"(dQ_acc[4 * n + 1]), "f"(dQ_acc[4 * n + 2]),
                   "f"(dQ_acc[4 * n + 3])
                   : "memory");
"""
_TARGET = """\
    float4* const target =
        reinterpret_cast<float4*>(
            dQ_accum + (rows.first_slot + step.slot()) * (BLOCK_M * DQ_COLUMNS)) +
        consumer * (DQ_BYTES / 16) + thread;
"""
_FROM_REGISTERS = (
    ("warp_id >= 1 && warp_id <= ADDERS", "false"),
    ("named_barrier_sync(DQ_EMPTY + consumer, 160);", _TARGET),
    (_STORED, _ADDED),
)
_ALL_HEADS = (("? (int)(L2_BYTES / (head_rows * 4 * (HEAD_DIM + DQ_COLUMNS)))", "? 1 << 20"),)

# Experiments with gradients.
GRADIENTS = (
    Experiment(
        "scalar atomics", "backward", (), tuple(Case((4, 16, 4096, d), backward=True) for d in (64, 128)), _SCALAR
    ),
    Experiment("scalar atomics", "backward_mma", (), HALF_GRADIENTS, _SCALAR),
    Experiment("vector atomics", "hopper_backward", _FROM_REGISTERS, HOPPER_GRADIENTS, ({"PERSISTENT": 0},)),
    Experiment(
        "all heads together", "hopper_backward", _ALL_HEADS, tuple(case for case in HOPPER_GRADIENTS if case.causal)
    ),
)
(_TURNS,) = (step for step in CLIMBS["backward_mma"] if step.idea == "turns")
# Deterministic steps, which their climb does not time: (step, idea, cases).
DETERMINISTIC_STEPS: tuple[tuple[Stage, str, tuple[Case, ...]], ...] = (
    (_TURNS, "a turn for each tile of dQ", CLIMB_CASES["backward_mma"]),
)

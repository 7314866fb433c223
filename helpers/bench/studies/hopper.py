"""Look inside hopper on a GPU of compute capability 9.0: cycles of one block and of its parts, ideas removed.

"timelines": the cycles at which one block's copies arrived, its products were started and its weights were computed,
recorded by a copy of the kernel. "rings": the same for one to four stages at one tile. "clocks": products of one
warpgroup in parallel with weights of another, from registers and shared memory only. "changes": the kernel with one
idea removed, or with other tiles, in turns with the unchanged kernel; some compute something else, and are only timed.
"multicast": two blocks that share K and V, in turns with the kernel. "mma_loop": the rate of mma.sync per cycle.
"power": the kernel's speed, its clock and its share of the tensor cores' rate per cycle, from a cold start, with zeros
and with random numbers.

    python3 -m helpers.bench.study hopper FILE rings    # only these sections; FILE keeps the others
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.attention import kernel
from helpers.attention.ladder import LADDER
from helpers.attention.ladder.call import Call
from helpers.attention.ladder.stages.hopper import HOPPER_STAGES, hopper_shared_bytes, pick_hopper
from helpers.attention.ladder.steps import MULTICAST
from helpers.bench import records
from helpers.bench.cases import Case, Inputs, Shape, call_of, shape_of_tokens
from helpers.bench.harness import Part, Row, Study, compare_case, speed_text
from helpers.bench.job import tile_sizes
from helpers.bench.timing import Sensors, elapsed
from helpers.device import ON_GPU, cp
from helpers.draw.picture import GPU, WRITE, Picture, Text, figure, styled
from helpers.engine.cuda_source.edit import edit

recorded = records.reader("nvidia-h200-hopper.json")
STAGE = LADDER["hopper"]
DTYPE = "bfloat16"
ROUNDS = 16
BATCH, BATCHES = (10, 5) if ON_GPU else (1, 1)  # launches per measured share, and repetitions
KERNEL_BEGINS = "template <typename T>\n__global__ void __launch_bounds__(THREADS, 1) hopper("
CONSUMERS_BEGIN = "  setmaxnreg_increase<CONSUMER_REGISTERS>();"
FLOP_PER_CLOCK = {"bfloat16": 4096, "tf32": 2048}  # of one multiprocessor's tensor cores, by the data sheet
TRACED_BLOCK, TRACED_TILES = 5, 24  # key tiles of its first tile of rows
STAMPS, V_STAMPS = 7, 2  # per consumer and key tile: see `traced`

Edits = tuple[tuple[str, str], ...]


def text() -> str:
    """Return the kernel's source."""
    return kernel.source(STAGE.file)


# ---- the cycles of one block


def traced(source: str) -> str:
    """Return a copy of the kernel whose block TRACED_BLOCK records cycles in `consumer_clocks` and `copy_clocks`.

    consumer_clocks[consumer][key tile]: the step begins; its turn comes; all products are issued; S is ready; half of
    the weights are; O is ready; the step ends; and two between the turn and the products: the wait for V begins; V has
    arrived. copy_clocks[0]: K's copy is started; [1]: V's; [2]: K has arrived; [3]: V has. The producer's fourth warp,
    which is otherwise idle, waits for the arrivals in the order of the requests: a tile's K, then the previous tile's
    V.

    Clocks have 64 bits: 32 would wrap around, the CPU engine's nanoseconds even within a launch.
    """
    head = f"""
constexpr int TRACED_BLOCK = {TRACED_BLOCK}, TRACED_TILES = {TRACED_TILES};
__device__ long long consumer_clocks[3][TRACED_TILES][{STAMPS + V_STAMPS}], copy_clocks[4][TRACED_TILES];
#define STAMP(i) \\
  if (leader && blockIdx.x == TRACED_BLOCK && step < TRACED_TILES) consumer_clocks[consumer][step][i] = clock64()
"""
    watch = """    if (threadIdx.x == 96 && blockIdx.x == TRACED_BLOCK)
      for (int i = 0; i <= TRACED_TILES; ++i) {
        if (i < TRACED_TILES) {
          k_ring.wait_full({i % STAGES, unsigned(i / STAGES & 1)});
          copy_clocks[2][i] = clock64();
        }
        if (i > 0) {
          v_ring.wait_full({(i - 1) % STAGES, unsigned((i - 1) / STAGES & 1)});
          copy_clocks[3][i - 1] = clock64();
        }
      }
"""
    own = "(warp_id == 0 ? copy_clocks[0] : copy_clocks[1])"  # with copy_clocks[warp_id], rings of 80 keys would spill
    asked = f"          if (blockIdx.x == TRACED_BLOCK && step < TRACED_TILES) {own}[step] = clock64();\n"
    states = "    PipelineState<STAGES> stage;\n", "  PipelineState<STAGES> k_stage;\n"
    leaves = "    if (threadIdx.x % 32 != 0 || warp_id == 3) return;\n"
    expects, advances = (
        "          const unsigned full = ring.expect(stage, TILE_BYTES);\n",
        "first = key_tiles.next(first), stage.advance())",
    )
    waits = "      k_ring.wait_full(k_stage);\n      if (PINGPONG)"
    passes = "      if (PINGPONG) named_barrier_arrive(next_turn, 256);\n"
    waits_for_v = "      v_ring.wait_full(v_stage);\n"
    started = f"      start_pv<T>(acc, P, advance_tiles(v, v_stage.index, TILE_BYTES));\n{passes}"
    scores_there = "      wgmma_wait<1>();\n      wgmma_registers(S);\n"
    half = "      weights(0, GROUPS / 2);\n      wgmma_wait<0>();\n      wgmma_registers(acc);\n"
    ends = "      to_operand<T>(P, S, GROUPS / 2, GROUPS);\n"
    turn = "named_barrier_sync(my_turn, 256);\n      start_qk<T>"
    next_tile = "    q_stage.phase ^= 1;"
    return edit(
        source,
        (KERNEL_BEGINS, head + KERNEL_BEGINS),
        (leaves, watch + leaves),
        *((state, f"{state}{state.partition('P')[0]}int step = 0;  // of keys\n") for state in states),
        (expects, asked + expects),
        (advances, advances.replace("stage", "++step, stage")),
        (next_tile, f"    ++step;\n{next_tile}"),
        (waits, f"      ++step;\n      STAMP(0);\n{waits}"),
        (turn, turn.replace("      start", "      STAMP(1);\n      start")),
        (waits_for_v, f"      STAMP(7);\n{waits_for_v}      STAMP(8);\n"),
        (started, f"{started}      STAMP(2);\n"),
        (scores_there, f"{scores_there}      STAMP(3);\n"),
        (half, half.replace("      wgmma_wait", "      STAMP(4);\n      wgmma_wait") + "      STAMP(5);\n"),
        (ends, f"{ends}      STAMP(6);\n"),
    )


@dataclass(frozen=True)
class Work:
    """A timed or traced call: without a mask or causal, with as many keys as rows."""

    case: Case
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def defines(self) -> dict[str, int]:
        """All -D options, in a stage's order, so that CuPy's cache knows them."""
        return {**tile_sizes(STAGE, self.case), **self.tile}

    @property
    def tile(self) -> dict[str, int]:
        """The tile of two consumers that notebook 10 reads, even if the stage would take one of three."""
        *_, rows, head_dim = self.case.shape
        return {**pick_hopper(head_dim, self.case.causal, rows), **dict(self.sizes)}

    def arrays(self) -> tuple[Any, ...]:
        """Return q, k, v on the device."""
        return _inputs(self.case.shape).device


@functools.lru_cache(maxsize=8)
def _inputs(shape: Shape) -> Inputs:
    """Make the inputs of a shape once, for everything that is measured at it."""
    return Inputs(shape, DTYPE)


def trace(work: Work) -> dict[str, Any]:
    """Return the cycles of one block, relative to the first: of each consumer and key tile, and of the copies."""
    source = traced(text())
    ready, arrays, _ = STAGE.plan(*work.arrays(), causal=work.case.causal, source=source, sizes=work.tile)
    (order, ordering, its_args), (launch, compiled, args) = ready.resolve_arguments(arrays)
    ordering(order.grid, order.block, its_args)
    name = STAGE.kernel_name(DTYPE)
    module = cp.RawModule(code=source, options=compiled.options, name_expressions=(name,))
    run = kernel.typed(module, name, source)
    for _ in range(3 if ON_GPU else 1):
        run(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
    cp.cuda.Device().synchronize()
    shapes = {"consumer_clocks": (3, TRACED_TILES, STAMPS + V_STAMPS), "copy_clocks": (4, TRACED_TILES)}
    clocks = {name: cp.asnumpy(cp.ndarray(shape, np.int64, module.get_global(name))) for name, shape in shapes.items()}
    consumers = clocks["consumer_clocks"][: work.defines["BLOCK_M"] // 64, 1:]  # the first key tile has no step
    copies = clocks["copy_clocks"]
    zero = int(copies[:2, 0].min())
    steps = [np.pad(each - zero, ((1, 0), (0, 0))) for each in consumers]
    return {
        "shape": list(work.case.shape),
        "causal": work.case.causal,
        "sizes": work.defines,
        "stages": work.defines.get("STAGES", HOPPER_STAGES),
        "consumers": [each[:, :STAMPS].tolist() for each in steps],
        "waits_for_v": [each[:, STAMPS:].tolist() for each in steps],
        "asked": (copies[:2] - zero).tolist(),
        "full": (copies[2:] - zero).tolist(),
    }


# ---- a launch's clock

NOTE = """
// When block 0's first producer begins, and when it ends: its clock and nanoseconds, added up over all launches. The
// sums may wrap, which their differences do not show.
__device__ unsigned long long noted[2][2];
__device__ __forceinline__ void note(int end) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  noted[end][0] += clock64();
  noted[end][1] += now;
}
"""


def clocked(source: str) -> str:
    """Return a copy of the kernel whose first producer records its begin and end in `noted`.

    Not a consumer: these use all registers, and at head_dim 128 recording cost 6 %.
    """
    begins, ends = (
        "    const int warp_id = threadIdx.x / 32;\n    if (threadIdx.x % 32 != 0",
        f"    return;\n  }}\n{CONSUMERS_BEGIN}",
    )
    return edit(
        source,
        (KERNEL_BEGINS, NOTE + KERNEL_BEGINS),
        (begins, f"    note(0);\n{begins}"),
        (ends, f"    note(1);\n{ends}"),
    )


def own_mhz(compiled: kernel.Kernel) -> float:
    """Return the clock in MHz of a `clocked` kernel's launches since the last call, while block 0 was running."""
    noted = cp.ndarray((2, 2), np.int64, compiled.module.get_global("noted"))
    begins, ends = cp.asnumpy(noted).copy()
    noted[...] = 0
    clocks, nanoseconds = (ends - begins).tolist()
    return 1e3 * clocks / max(nanoseconds, 1)


def share(tflops: float, blocks: int, mhz: float) -> float:
    """Return the share that these TFLOP/s are of the rate of this many multiprocessors' tensor cores at a clock."""
    return tflops * 1e6 / (blocks * FLOP_PER_CLOCK["bfloat16"] * mhz)


# ---- products next to weights

OVERLAP = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    beside(float* out, long long* clocks, int steps, float scale) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  unsigned* const words = reinterpret_cast<unsigned*>(dynamic_smem);
  for (int i = threadIdx.x; i < SHARED_BYTES / 4; i += THREADS) words[i] = 0x3c003c00;
  async_proxy_fence();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    return;
  }
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  if (!(ACTIVE >> (warpgroup - 1) & 1)) return;
  const unsigned Q_smem = smem_address(dynamic_smem);
  const unsigned long long q = wgmma_descriptor(Q_smem), k = wgmma_descriptor(Q_smem + K_AT);
  const unsigned long long v = wgmma_descriptor(Q_smem + V_AT, BLOCK_N * 128);
  using T = __nv_bfloat16;
  Scores S;
  Weights P;
  Output acc;
  Statistics m = {M_INIT, M_INIT}, l = {}, r = {};
  for (int i = 0; i < BLOCK_N / 2; ++i) S[i] = threadIdx.x * 0.01f + i;
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
  to_operand<T>(P, S, 0, BLOCK_N / 8);
  if (ACTIVE == 3) named_barrier_sync(3, 256);
  const long long start = clock64();
  if (warpgroup == 1) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      start_qk<T>(S, q, k);
      start_pv<T>(acc, P, v);
      wgmma_wait<0>();
      wgmma_registers(S);
      wgmma_registers(acc);
    }
  } else {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (PART & 1) online_softmax_maxima(S, m, l, r, scale);
      if (PART & 2) online_softmax_weights(S, m, l, scale, 0, BLOCK_N / 8);
      wgmma_registers(S);
      if (PART & 4) {
        to_operand<T>(P, S, 0, BLOCK_N / 8);
        for (int i = 0; i < BLOCK_N / 16; ++i)
          for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(P[i][j]));
      }
    }
  }
  const long long end = clock64();
  if (blockIdx.x == 0 && threadIdx.x % 128 == 0) clocks[warpgroup - 1] = end - start;
  float sum = l[0] + m[0] + r[0] + l[1];
  for (int i = 0; i < BLOCK_N / 2; ++i) sum += S[i];
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) sum += acc[i];
  for (int i = 0; i < BLOCK_N / 16; ++i) sum += __uint_as_float(P[i][0] ^ P[i][1] ^ P[i][2] ^ P[i][3]);
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
"""
OVERLAP_TILES = ((64, 128, 192), (128, 128, 160))  # head_dim, BLOCK_M, BLOCK_N: two consumers
PARTS = {7: "maxima, exp2 and packing", 1: "maxima", 2: "exp2 and sums"}
TOGETHER = ((1, 7), *((active, part) for part in PARTS for active in (2, 3)))  # (working warpgroups, the part)


def overlap_source() -> str:
    """Return the kernel's functions, with a kernel that runs products in one warpgroup and weights in another."""
    source = text()
    return source[: source.index(KERNEL_BEGINS)] + OVERLAP


def _overlap_defines(head_dim: int, block_m: int, block_n: int, active: int, part: int) -> dict[str, int]:
    return {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "ACTIVE": active, "PART": part}


def overlap(steps: int = 400) -> Iterator[dict[str, Any]]:
    """Yield the cycles per step of products, and of weights, each alone (the other is None) and in parallel."""
    for head_dim, block_m, block_n in OVERLAP_TILES:
        for active, part in TOGETHER:
            run = kernel.load(
                overlap_source(), "beside", defines=_overlap_defines(head_dim, block_m, block_n, active, part)
            )
            shared = hopper_shared_bytes({"HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n})
            out, clocks = cp.zeros(132 * 384, cp.float32), cp.zeros(2, cp.int64)
            args = out, clocks, np.int32(steps), np.float32(0.1)
            for _ in range(2):
                run((132 if ON_GPU else 1,), (384,), args, shared_mem=shared)
            products, weights = (int(n) / steps for n in cp.asnumpy(clocks))
            yield {
                "head_dim": head_dim,
                "block_n": block_n,
                "part": PARTS[part],
                "products": products if active & 1 else None,
                "weights": weights if active & 2 else None,
            }


# ---- single ideas removed


def row_order(steps: np.ndarray, heads: int, blocks: int) -> np.ndarray:
    """Deal the tiles to the blocks in the order of heads and rows: (rounds, blocks), head * row tiles + row tile.

    Args:
        steps: (row tiles,), the work of each.
    """
    return _dealt(np.arange(heads * len(steps)), blocks)


def zigzag(steps: np.ndarray, heads: int, blocks: int) -> np.ndarray:
    """Deal the tiles longest first, for all heads together, with every other round reversed."""
    row_tiles = len(steps)
    longest = np.argsort(-steps, kind="stable")
    table = _dealt((np.arange(heads)[None, :] * row_tiles + longest[:, None]).ravel(), blocks)
    table[1::2] = table[1::2, ::-1]
    return table


def _dealt(order: np.ndarray, blocks: int) -> np.ndarray:
    """Deal tiles to the blocks in turn: (rounds, blocks), -1 for no tile."""
    return np.pad(order, (0, -len(order) % blocks), constant_values=-1).reshape(-1, blocks)


def steps_of_rows(rows: int, keys: int, window: tuple[int, int], block_m: int, block_n: int) -> np.ndarray:
    """Count the tiles of keys that each tile of rows sees, at least one: (row tiles,)."""
    first = np.arange(0, rows, block_m)
    last = np.minimum(first + block_m, rows) - 1
    left, right = (keys + rows if side < 0 else side for side in window)
    begin = np.maximum(first + keys - rows - left, 0)
    end = np.minimum(last + keys - rows + right + 1, keys)
    return np.maximum(-(-(end - begin) // block_n), 1)


def table_of(call: Call, sizes: Mapping[str, int], **cu_seqlens: Any) -> np.ndarray:
    """Return the blocks' table of tiles in the format of 10_order.cu: (rounds, blocks, 4)."""
    order, _ = STAGE.launches(STAGE, call, sizes)
    table = cp.empty(STAGE.scratch(call, sizes)["schedule"].shape, np.int32)
    args = order.arguments({"schedule": table, **cu_seqlens})
    kernel.load(order.file, order.kernel)(order.grid, order.block, args)
    return cp.asnumpy(table)


@dataclass(frozen=True)
class Change:
    """The kernel with one change. right: it computes the same; otherwise it is only timed.

    plus: added to q and to k.
    """

    name: str
    edits: Edits = ()
    sizes: tuple[tuple[str, int], ...] = ()
    order: Callable[..., np.ndarray] | None = None
    right: bool = True
    plus: tuple[float, float] = (0.0, 0.0)

    @property
    def text(self) -> str:
        """The kernel's source, which records its own clock."""
        return clocked(edit(text(), *self.edits) if self.edits else text())


_WAIT_FOR_BOTH = (("wgmma_wait<1>();\n      wgmma_registers(S);", "wgmma_wait<0>();\n      wgmma_registers(S);"),)
_FLOAT_MAXIMA = (
    ("int highest = __float_as_int(S[2 * i]);", "float highest = S[2 * i];"),
    (
        "max(max(highest, __float_as_int(S[4 * n + 2 * i])), __float_as_int(S[4 * n + 2 * i + 1]))",
        "fmaxf(fmaxf(highest, S[4 * n + 2 * i]), S[4 * n + 2 * i + 1])",
    ),
    ("fmaxf(__int_as_float(highest), 0.0f)", "fmaxf(highest, 0.0f)"),
)
_EXCEEDS = "if (exceeds_limit(S, maxima.limit, softmax_scale_log2)) rescaled = move();"
_EVERY_TILE = ((_EXCEEDS, "rescaled = move();"), ("if (!__any_sync(0xffffffff, exceeds)) return false;", ""))
_NO_MAXIMA = ((_EXCEEDS, ""),)
_NO_EXP2 = (('asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "y = x;"),)
_NO_SUMS = (("l_i[i] += S[4 * n + 2 * i] + S[4 * n + 2 * i + 1];", ""),)
_SAME_ROWS = (("tile.k_first + first, tile.kv_head,\n              batch)", "0, 0, 0)"),)

AS_IT_IS = Change("as it is")
IDEAS = (
    Change("no turns", sizes=(("PINGPONG", 0),)),
    Change("weights wait for both products", _WAIT_FOR_BOTH),
    Change("rescale at every tile", _EVERY_TILE),
    Change("maxima of floats, two at a time", _FLOAT_MAXIMA),
    Change("copies always of the same rows", _SAME_ROWS, right=False),
    Change("no maxima", _NO_MAXIMA, right=False),
    Change("no exp2", _NO_EXP2, right=False),
    Change("no sums", _NO_SUMS, right=False),
    Change("no maxima, no exp2, no sums", (*_NO_MAXIMA, *_NO_EXP2, *_NO_SUMS), right=False),
    *(Change(f"scores around {plus * -plus:g} d", right=False, plus=(plus, -plus)) for plus in (1.0, 2.0)),
)
ORDERS = (
    Change("tiles in the order of rows", order=row_order),
    Change("longest tiles first, in a zigzag", order=zigzag),
    Change("no turns", sizes=(("PINGPONG", 0),)),
)


def _tile(block_m: int, block_n: int, stages: int = HOPPER_STAGES) -> Change:
    more = f", {stages} stages" if stages != HOPPER_STAGES else ""
    sizes = (("BLOCK_M", block_m), ("BLOCK_N", block_n)) + ((("STAGES", stages),) if more else ())
    return Change(f"{block_m} rows x {block_n} keys{more}", sizes=sizes)


LONG_64, LONG_128 = (Case(shape_of_tokens(8192, d), DTYPE) for d in (64, 128))
CAUSAL_128 = Case((8, 16, 2048, 128), DTYPE, causal=True)
CHANGES: tuple[tuple[Case, tuple[Change, ...]], ...] = (
    (LONG_128, (AS_IT_IS, *IDEAS, _tile(128, 128), _tile(128, 144), _tile(128, 176))),
    (LONG_64, (AS_IT_IS, *IDEAS, _tile(128, 128), _tile(128, 192), _tile(192, 128, 3))),
    (CAUSAL_128, (AS_IT_IS, *ORDERS, _tile(128, 160))),
)


def changes(
    planned: Sequence[tuple[Case, tuple[Change, ...]]] = CHANGES, rounds: int = ROUNDS
) -> Iterator[dict[str, Any]]:
    """Time each change: each round times all changes of a case in turn.

    share: that of the tensor cores' rate per cycle, which shows the cost of a change if power does not limit it.
    """
    for case, wanted in planned:
        runs, shares, outputs = {}, {}, {}
        for change in wanted:
            run, share_of, o = _prepared(case, change)
            run()
            runs[change.name], outputs[change.name] = run, cp.asnumpy(o)[-1, -1].astype(np.float32)
            shares[change.name] = statistics.median(share_of() for _ in range(BATCHES))
            error = float(np.abs(outputs[change.name] - outputs[wanted[0].name]).max())
            if change.right and not error < 0.02:
                raise ValueError(f"{change.name} at {case}: differs by {error} from the unchanged kernel")
        rows = compare_case(case, runs, rounds, over=wanted[0].name, itself=True)
        for change, row in zip(wanted, rows, strict=True):
            yield {**row, "share": shares[change.name], "right": change.right}


def _prepared(case: Case, change: Change) -> tuple[Callable[[], None], Callable[[], float], Any]:
    """Prepare a launch with the change; return it, its rate per cycle (see `share`), and its output.

    A table with another order is made on the host beforehand.
    """
    arrays = Work(case).arrays()
    if any(change.plus):
        q, k, v = (a.astype(np.float32) for a in _inputs(case.shape).host)
        arrays = tuple(cp.asarray(a.astype(arrays[0].dtype)) for a in (q + change.plus[0], k + change.plus[1], v))
    ready, planned, o = STAGE.plan(*arrays, causal=case.causal, source=change.text, sizes=Work(case, change.sizes).tile)
    (ordering, orders, its_args), (launch, compiled, args) = ready.resolve_arguments(planned)
    launches = [orders.bind(ordering.grid, ordering.block, its_args)]
    if change.order is not None:
        batch, heads, n, _ = case.shape
        sizes = Work(case, change.sizes).defines
        steps = steps_of_rows(n, n, call_of(case).window, sizes["BLOCK_M"], sizes["BLOCK_N"])
        order = change.order(steps, heads * batch, launch.grid[0])
        head, row_tile = np.divmod(order, len(steps))
        first_row = np.where(order < 0, -1, row_tile * sizes["BLOCK_M"])
        entries = np.stack([head // heads, head % heads, head % heads, first_row], axis=-1)  # with as many KV heads
        at = launch.args.index("schedule")
        args = (*args[:at], cp.asarray(np.ascontiguousarray(entries, np.int32)), *args[at + 1 :])
        launches = []
    launches.append(compiled.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes))

    def run(keep: Any = planned) -> None:  # tensor maps contain only addresses
        for each in launches:
            each()

    def batch() -> None:
        for _ in range(BATCH):
            run()

    def share_of() -> float:
        own_mhz(compiled)  # discards earlier launches
        ms = elapsed(batch) / BATCH
        return share(case.flops / ms / 1e9, launch.grid[0], own_mhz(compiled))

    return run, share_of, o


# ---- two blocks of a cluster share K and V

# An arrival with release semantics for the whole cluster waits for this thread's memory writes, of which consumers have
# none.
RELEASES = (
    "mbarrier.arrive.shared::cluster.b64 _, [%0];",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];",
)
SHARED = tuple(
    Case((tokens // n, heads, n, d), "float16", causal=causal)
    for tokens, heads, d in ((16384, 16, 128), (16384, 32, 64))
    for n in (4096, 16384)
    for causal in (False, True)
)


def multicast(cases: Sequence[Case] = SHARED, rounds: int = ROUNDS - 1) -> Iterator[list[Row]]:
    """Time 10_15, and the same with arrivals that release to the cluster, in turns with the kernel.

    Raises:
        ValueError: an output differs from the kernel's in any bit.
    """
    released = edit(kernel.source(MULTICAST.file), RELEASES)
    ways = {
        "as it is": (STAGE, None),
        "multicast": (MULTICAST, None),
        "multicast, .release.cluster": (MULTICAST, released),
    }
    for case in cases:
        arrays, runs, outputs = Work(case).arrays(), {}, {}
        for name, (stage, source) in ways.items():
            runs[name], o = stage.prepare(*arrays, causal=case.causal, source=source)
            runs[name]()
            outputs[name] = cp.asnumpy(o)
            if outputs[name].tobytes() != outputs["as it is"].tobytes():
                raise ValueError(f"{name} at {case}: differs from the unchanged kernel")
        yield compare_case(case, runs, rounds, over="as it is", itself=True)


# ---- mma.sync in a loop

LOOP = """
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.FORM.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
extern "C" __global__ void mma_loop(long long* clocks, float* out, int steps) {
  float acc[8][4] = {};
  unsigned a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {threadIdx.x, 5};
  __syncthreads();
  const long long begin = clock64();
  for (int step = 0; step < steps; ++step)
#pragma unroll
    for (int i = 0; i < 8; ++i) mma(acc[i], a, b);
  __syncthreads();
  const long long end = clock64();
  if (threadIdx.x == 0) clocks[blockIdx.x] = end - begin;
  float sum = 0;
  for (auto& tile : acc) for (float x : tile) sum += x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


FORMS = {"bfloat16": ("m16n8k16.row.col.f32.bf16.bf16", 16), "tf32": ("m16n8k8.row.col.f32.tf32.tf32", 8)}


def mma_loop(warps: int = 16, dtype: str = "bfloat16", steps: int = 4096, blocks: int = 132) -> dict[str, Any]:
    """Measure mma.sync's FLOP per cycle and multiprocessor, with operands in registers."""
    form, depth = FORMS[dtype]
    loop = cp.RawKernel(LOOP.replace("FORM", form), "mma_loop")
    clocks, out = cp.zeros(blocks, cp.int64), cp.zeros(32 * warps * blocks, cp.float32)
    for _ in range(2):
        loop((blocks,), (32 * warps,), (clocks, out, np.int32(steps)))
    flop = warps * steps * 8 * (2 * 16 * 8 * depth)
    return {"dtype": dtype, "warps": warps, "flop_per_clock": flop / statistics.median(cp.asnumpy(clocks).tolist())}


def mma_share(dtype: str = "bfloat16") -> float | None:
    """Return mma.sync's recorded best rate per cycle, as a share of the data sheet's; None if missing."""
    rows = [row for row in (recorded() or {}).get("mma_loop", ()) if row["dtype"] == dtype]
    return max(row["flop_per_clock"] for row in rows) / FLOP_PER_CLOCK[dtype] if rows else None


# ---- power: a GPU that warms up, and the numbers that it multiplies

NUMBERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # from standard normal ones
    "zeros": np.zeros_like,
    "uniform, 0 to 1": lambda x: np.random.default_rng(0).random(x.shape, np.float32),
    "normal": lambda x: x,
}


def power(seconds: float = 8.0, rest: float = 4.0, batch_s: float = 0.25) -> list[dict[str, Any]]:
    """Launch the kernel repeatedly on a GPU that had a rest, with each kind of numbers: a row per batch.

    s: when the batch ended. mhz: its launches' own clock. share: see `share`. sm_mhz, watts: medians of nvidia-smi's
    readings meanwhile.
    """
    rows: list[dict[str, Any]] = []
    for case in (LONG_128, LONG_64):
        for name, numbers in NUMBERS.items():
            host = [numbers(a.astype(np.float32)) for a in _inputs(case.shape).host]
            arrays = tuple(cp.asarray(a.astype(Work(case).arrays()[0].dtype)) for a in host)
            ready, planned, _ = STAGE.plan(*arrays, source=clocked(text()))
            run, (_, (launch, compiled, _)) = ready.bind(planned), ready.resolve_arguments(planned)
            ms = elapsed(run) if ON_GPU else 1e3 * batch_s
            launches = max(1, round(1e3 * batch_s / min(elapsed(run), ms)))
            cp.cuda.Device().synchronize()
            time.sleep(rest)
            with Sensors() as sensors:
                time.sleep(0.5 if ON_GPU else 0.0)
                began = time.perf_counter()
                own_mhz(compiled)  # discards earlier launches
                while (begin := time.perf_counter()) - began < seconds:
                    ms = elapsed(lambda run=run, launches=launches: [run() for _ in range(launches)]) / launches
                    end = time.perf_counter()
                    tflops, mhz = case.flops / ms / 1e9, own_mhz(compiled)
                    row = {"s": end - began, "tflops": tflops, "mhz": mhz, "share": share(tflops, launch.grid[0], mhz)}
                    what = {"shape": list(case.shape), "numbers": name}
                    rows.append({**what, **row, **sensors.between(begin, end)})
    return rows


def _power(head_dim: int, record: Mapping[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
    """Return the recorded rows of `power` at a head_dim, by the kind of numbers."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in ((recorded() if record is None else record) or {}).get("power", ()):
        if row["shape"][3] == head_dim:
            found.setdefault(row["numbers"], []).append(row)
    return found


@styled
def power_picture(head_dim: int = 128, record: Mapping[str, Any] | None = None) -> Picture | Text:
    """Draw recorded TFLOP/s, clock and share while the GPU warms up: normal numbers and zeros."""
    by_numbers = _power(head_dim, record)
    rows = by_numbers.get("normal")
    if not rows:
        return Text(f"*({records.NO_RECORD})*")
    fig, axes = figure(7.6, 4.6, rows=3)
    lines = {"tflops": "TFLOP/s", "mhz": "MHz", "share": "share of\ntensor cores"}
    colours = {"normal": GPU, "zeros": WRITE}
    shown = {numbers: by_numbers[numbers] for numbers in colours if numbers in by_numbers}
    for ax, (name, label) in zip(axes, lines.items(), strict=True):
        for numbers, each in shown.items():
            ax.plot([row["s"] for row in each], [row[name] for row in each], color=colours[numbers], label=numbers)
        ax.set_ylabel(label)
    axes[0].legend(loc="lower right", ncols=2)
    most = max(row["tflops"] for each in shown.values() for row in each)
    for ax, top in zip(axes, (1.1 * most, 2100, 1), strict=True):
        ax.set_ylim(0, top)
    axes[-1].set_xlabel("seconds of launching it over and over, after a rest")
    first, last = rows[0], rows[-1]
    return Picture(
        fig,
        f"normal numbers: in {last['s']:.0f} s from {first['tflops']:.0f} to {last['tflops']:.0f} TFLOP/s, "
        f"from {first['mhz']:.0f} to {last['mhz']:.0f} MHz, "
        f"from {first['share']:.1%} to {last['share']:.1%} of the tensor cores",
    )


@records.shown
def power_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the warm kernel's speed by the numbers that it multiplies: medians of the last half."""
    lines = [f"{'':26}{'TFLOP/s':>9}{'MHz':>7}{'share':>8}{'watts':>7}"]
    for head_dim in (128, 64):
        for name, rows in _power(head_dim, record).items():
            warm = rows[len(rows) // 2 :]
            tflops, mhz, share = (statistics.median(row[key] for row in warm) for key in ("tflops", "mhz", "share"))
            watts = [row["watts"] for row in warm if "watts" in row]
            power_cell = f"{statistics.median(watts):7.0f}" if watts else ""
            lines.append(f"d = {head_dim:3}, {name:17}{tflops:9.0f}{mhz:7.0f}{share:8.1%}{power_cell}")
    return "\n".join(lines) if lines[1:] else records.NO_RECORD


# ---- the record

# 80 keys: the largest tile of which four stages fit at d = 128, so that rings of one to four differ in nothing else.
RINGS = tuple(Work(LONG_128, (("BLOCK_N", 80), ("STAGES", stages))) for stages in (1, 2, 3, 4))
TRACED = (Work(Case((2, 16, 8192, 128), DTYPE)), Work(Case((2, 32, 8192, 64), DTYPE), (("BLOCK_M", 128),)))


SECTIONS: dict[str, Part] = {
    "timelines": lambda: map(trace, TRACED),
    "rings": lambda: map(trace, RINGS),
    "clocks": lambda: overlap(),
    "changes": lambda: changes(),
    "multicast": lambda: multicast(),
    "mma_loop": lambda: (mma_loop(warps, dtype) for dtype in FORMS for warps in (4, 8, 16, 32)),
    "power": lambda: power(),
}


def compilations(sections: Collection[str] = tuple(SECTIONS)) -> list[tuple[str, str, dict[str, int]]]:
    """List (source, kernel, -D options) of everything that these sections launch; `mma_loop` compiles its own."""
    name = STAGE.kernel_name(DTYPE)
    texts = []
    for section, works in {"rings": RINGS, "timelines": TRACED}.items():
        if section in sections:
            texts += [(traced(text()), name, work.defines) for work in works]
    if "changes" in sections:
        for case, wanted in CHANGES:
            texts += [(change.text, name, Work(case, change.sizes).defines) for change in wanted]
    if "power" in sections:
        texts += [(clocked(text()), name, Work(case).defines) for case in (LONG_128, LONG_64)]
    if "clocks" in sections:
        for tile in OVERLAP_TILES:
            texts += [(overlap_source(), "beside", _overlap_defines(*tile, *combination)) for combination in TOGETHER]
    return [one for i, one in enumerate(texts) if one not in texts[:i]]


def _compile_ahead(sections: Collection[str]) -> None:
    """Compile in parallel what these sections launch, into CuPy's cache."""

    def compile_one(source: str, name: str, defines: Mapping[str, int]) -> None:
        kernel.load(source, name, defines=defines).function.attributes  # noqa: B018 - this compiles

    kernel.side_by_side([functools.partial(compile_one, *one) for one in compilations(sections)])


STUDY = Study("hopper", SECTIONS, prepare=_compile_ahead)
take = STUDY.take


def timeline(head_dim: int) -> dict[str, Any] | None:
    """Return the recorded cycles of one block at this head_dim, for `show.clocks_as_spans`; None without a record."""
    return next((t for t in (recorded() or {}).get("timelines", ()) if t["shape"][3] == head_dim), None)


def rings() -> dict[str, dict[str, Any]]:
    """Return the recorded cycles of one block for each number of stages, by its name in a figure.

    If no rings are recorded, those of the stage itself at d = 128; without a record, {}.
    """
    record, own = recorded() or {}, timeline(128)
    return {f"STAGES = {each['stages']}": each for each in record.get("rings", [own] if own else [])}


def ablation(name: str, head_dim: int, *, causal: bool = False) -> dict[str, Any] | None:
    """Return one recorded change, or None."""
    for row in (recorded() or {}).get("changes", ()):
        if (row["name"], row["shape"][3], row["causal"]) == (name, head_dim, causal):
            return row
    return None


@records.shown
def ablations_table(
    head_dim: int,
    *,
    causal: bool = False,
    record: Mapping[str, Any] | None = None,
    names: Collection[str] = (),
) -> str:
    """Format the recorded changes at one head_dim: speed relative to the unchanged kernel, with its range.

    names: only these changes; all if empty.
    """
    rows = [r for r in record["changes"] if (r["shape"][3], r["causal"]) == (head_dim, causal)]
    rows = [r for r in rows if not names or r["name"] in names]
    if not rows:
        return records.NO_RECORD
    batch, heads, n, d = rows[0]["shape"]
    lines = [f"{batch} x {heads} heads, N = {n}, d = {d}{', causal' * causal}"]
    for row in rows:
        share = f"  {row['share']:.1%} of the tensor cores" if "share" in row else ""
        more = "" if row["right"] else "  times only"
        lines.append(f"  {row['name']:34}{row['tflops']:6.0f} TFLOP/s  {speed_text(row)}{share}{more}")
    return "\n".join(lines)


def side_by_side() -> dict[int, tuple[float, ...]]:
    """Return {head_dim: recorded cycles per key tile: products alone, all of the softmax alone, both in parallel}."""
    cycles: dict[int, list[float]] = {}
    for row in (recorded() or {}).get("clocks", ()):
        if row["part"] == PARTS[7]:
            cycles.setdefault(row["head_dim"], []).append(max(row["products"] or 0, row["weights"] or 0))
    return {head_dim: tuple(each) for head_dim, each in cycles.items()}


def late_table() -> str:
    """Format, for each of `rings`, the median cycles per key tile and how often a consumer requests K or V early."""
    lines = [f"{'':12}{'cycles a tile':>15}{'K is late':>12}{'V is late':>12}"]
    for name, ring in rings().items():
        begins, asks = np.array(ring["consumers"])[:, 1:, 0], np.array(ring["waits_for_v"])[:, 1:, 0]
        k_full, v_full = np.array(ring["full"])
        late = (k_full[1:] > begins).mean(), (v_full[:-1] > asks).mean()  # V is one key tile behind K
        took = np.median(np.diff(begins))
        lines.append(f"{name:12}{took:15,.0f}" + "".join(f"{share:12.0%}" for share in late))
    return "\n".join(lines) if lines[1:] else records.NO_RECORD


@records.shown
def clocks_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the cycles per key tile of products and of weights, alone and in parallel, as text."""
    lines = [f"{'cycles a step':60}{'products':>10}{'weights':>10}"]
    for row in record["clocks"]:
        both = row["products"] is not None and row["weights"] is not None
        what = "products alone" if row["weights"] is None else f"{row['part']} {'with products' if both else 'alone'}"
        cells = "".join(
            f"{row[name]:10.0f}" if row[name] is not None else f"{'':10}" for name in ("products", "weights")
        )
        lines.append(f"d = {row['head_dim']:3}, {row['block_n']} keys  {what:27}".ljust(60) + cells)
    return "\n".join(lines)


def rings_table(record: Mapping[str, Any]) -> str:
    """Format the recorded cycles per key tile for each number of stages, and a consumer's share of waiting."""
    lines = [f"{'median cycles a key tile':30}{'in all':>8}{'K or turn':>12}{'V':>8}{'S':>8}{'O':>8}"]
    for ring in record["rings"]:
        steps, v = np.array(ring["consumers"])[:, 1:], np.array(ring["waits_for_v"])[:, 1:]
        in_all, waits = np.diff(steps[..., 0]), np.diff(steps)
        medians = (np.median(each) for each in (in_all, waits[..., 0], np.diff(v), waits[..., 2], waits[..., 4]))
        cells = "".join(f"{clocks:{width}.0f}" for clocks, width in zip(medians, (8, 12, 8, 8, 8), strict=True))
        lines.append(f"{ring['sizes']['BLOCK_N']} keys, STAGES = {ring['stages']}".ljust(30) + cells)
    return "\n".join(lines)


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format the sections of a record, by default the committed one, that have a table, as text."""
    texts = [record["device"]]
    if "changes" in record:
        at = ((128, False), (64, False), (128, True))
        texts += [ablations_table(d, causal=causal, record=record) for d, causal in at]
    tables = {"clocks": clocks_table, "rings": rings_table, "power": power_table}
    texts += [each(record) for name, each in tables.items() if name in record]
    return "\n\n".join(texts)

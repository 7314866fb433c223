"""Record the cycles of one block of hopper_backward: its products, its waits, the additions to dQ.

Copies of the kernel record them. "blocks": for all blocks of a launch with one tile of keys each, the time outside of
steps: before the first, after the last, and until the multiprocessor's next block begins.

    python3 -m helpers.bench.study backward_timeline FILE
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.attention import kernel
from helpers.attention.ladder import BACKWARD, LADDER, backward
from helpers.bench import records
from helpers.bench.cases import Case, Inputs
from helpers.bench.harness import Study, heads_text
from helpers.device import ON_GPU, cp, describe
from helpers.engine.cuda_source.edit import edit

recorded = records.reader("nvidia-h200-backward-timeline.json")
STAGE = BACKWARD["hopper_backward"]
DTYPE = "bfloat16"
TRACED_STEPS = 24  # of the traced block, counted from its first
CASES = (Case((2, 16, 8192, 128), DTYPE), Case((2, 32, 8192, 64), DTYPE))
MOST_BLOCKS = 8192
BLOCK_CASES = tuple(
    Case((16384 // n if n != 2112 else 8, 2048 // head_dim, n, head_dim), DTYPE, causal)
    for head_dim in (128, 64)
    for n, causal in ((512, False), (512, True), (2112, False), (2112, True), (16384, True))
)

# In the order in which a consumer passes them. Reading the clock right after `bar.sync` does not wait for the barrier
# (BAR.SYNC.DEFER_BLOCKING): at_ds, at_dq and the adder's at_full say when a warp has arrived, not when it may continue.
MARKS = (
    *("begins", "q_there", "do_there", "s_there", "weights", "dp_there", "ds_stored", "at_ds"),
    *("dq_there", "at_dq", "dq_stored", "ends"),
)
ADDER_MARKS = ("waits", "at_full", "added")
# The parts of a consumer's step, each from the end of the previous one.
PARTS = {
    "S": "s_there",
    "P": "weights",
    "wait for dP": "dp_there",
    "dS": "ds_stored",
    "wait for the other's dS": "opened",
    "dV, dQ": "dq_there",
    "store of dQ": "dq_stored",
    "rest of dK": "ends",
    "to the next step": "begins",
}


def traced(source: str) -> str:
    """Return a copy of the kernel whose second block records cycles in `consumer_clocks` and `adder_clocks`.

    consumer_clocks[consumer][step]: see `MARKS`. adder_clocks[step]: the warp that adds to dQ waits for the tile; has
    arrived at its barrier; the addition has read it. Steps after TRACED_STEPS are not recorded.
    """
    begins = "template <typename T>\n__global__ void __launch_bounds__(THREADS, 1) hopper_backward("
    head = f"""
constexpr int TRACED_STEPS = {TRACED_STEPS};
__device__ long long consumer_clocks[2][TRACED_STEPS][{len(MARKS)}], adder_clocks[TRACED_STEPS][{len(ADDER_MARKS)}];
#define IS_TRACED (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) == 1)
#define STAMP(i) \\
  if (leader && IS_TRACED && step.count < TRACED_STEPS) consumer_clocks[consumer][step.count][i] = clock64()
#define STAMP_ADDER(i) \\
  if (lane_id == 0 && IS_TRACED && number < TRACED_STEPS) adder_clocks[number][i] = clock64()
"""

    def stamp(mark: str) -> str:
        return f"    STAMP({MARKS.index(mark)});\n"

    def before(line: str, mark: str) -> tuple[str, str]:
        return line, stamp(mark) + line

    def after(line: str, mark: str) -> tuple[str, str]:
        return line, line + stamp(mark)

    empty, full = "named_barrier_sync(DQ_EMPTY + consumer, 160);", "named_barrier_sync(DQ_FULL + mine, 288);"
    other, arrives = "const bool other = step.count % ADDERS != mine;", "__syncwarp();\n        arrive_empty();"
    return edit(
        source,
        (begins, head + begins),
        before("    bar.q_ring.wait_full(step.stage());\n", "begins"),
        before("    start_scores<T, HEAD_DIM_PADDED>(S, k, q);\n", "q_there"),
        before("    start_scores<T, HEAD_DIM_PADDED>(dP, v, dO);\n", "do_there"),
        after("    wgmma_wait<1>();\n    wgmma_registers(S);\n", "s_there"),
        before("    wgmma_wait<0>();\n    wgmma_registers(dP);\n", "weights"),
        after("    wgmma_registers(dP);\n", "dp_there"),
        after("    start_keys<T>(dV_acc, P, dO);\n    async_proxy_fence();\n", "ds_stored"),
        before("    float dQ_acc[DQ_ROWS / 2];\n", "at_ds"),
        (empty, f"{stamp('dq_there').strip()}\n    {empty}\n{stamp('at_dq')}"),
        after("    named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);\n", "dq_stored"),
        after("    wgmma_wait<0>();\n    wgmma_registers(dK_acc);\n", "ends"),
        (other, f"{other}\n        const int number = step.count;"),
        (full, f"STAMP_ADDER(0);\n        {full}\n        STAMP_ADDER(1);"),
        (arrives, f"STAMP_ADDER(2);\n        {arrives}"),
    )


def _launched(case: Case, source: str) -> tuple[Any, int]:
    """Launch a copy of the kernel; return its module, and its number of blocks."""
    q, k, v = Inputs(case.shape, DTYPE).device
    o, lse = LADDER["hopper"](q, k, v, causal=case.causal, return_lse=True)
    ready, arrays, _ = backward.plan(
        STAGE, q, q, k, v, o, lse, causal=case.causal, source=source, sizes={"PERSISTENT": 0}
    )
    name, n_blocks = STAGE.kernel_name(DTYPE), 0
    for launch, compiled, args in ready.resolve_arguments(arrays):
        if compiled.name != name:
            compiled(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
            continue
        module = cp.RawModule(code=source, options=compiled.options, name_expressions=(name,))
        run = kernel.typed(module, name, source)
        n_blocks = math.prod(launch.grid)
        for _ in range(3 if ON_GPU else 1):
            run(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
    cp.cuda.Device().synchronize()
    return module, n_blocks


def trace(case: Case) -> dict[str, Any]:
    """Return the cycles of one block, relative to the first, by step."""
    module, _ = _launched(case, traced(kernel.source(STAGE.file)))
    shapes = {"consumer_clocks": (2, TRACED_STEPS, len(MARKS)), "adder_clocks": (TRACED_STEPS, len(ADDER_MARKS))}
    clocks = {name: cp.asnumpy(cp.ndarray(shape, np.int64, module.get_global(name))) for name, shape in shapes.items()}
    zero = int(clocks["consumer_clocks"][:, 0, 0].min())
    return {
        "shape": list(case.shape),
        "consumers": (clocks["consumer_clocks"] - zero).tolist(),
        "adders": (clocks["adder_clocks"] - zero).tolist(),
    }


# ---- all blocks of a launch


def noted(source: str) -> str:
    """Return a copy of the kernel whose first consumer records a row of `block_clocks` for each block.

    A row: its multiprocessor, and the cycles at which the block begins, its first step begins, its last step has ended,
    and dK and dV are stored.
    """
    begins = "template <typename T>\n__global__ void __launch_bounds__(THREADS, 1) hopper_backward("
    head = f"""
__device__ long long block_clocks[{MOST_BLOCKS}][5];
#define NOTE(i, what) \\
  if (threadIdx.x == 128) block_clocks[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)][i] = (what)
"""
    first = "  const AttentionParams& forward = params.forward;\n  const bool by_tile"
    own = '  unsigned multiprocessor;\n  asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));\n'
    loop = "  for (; step.more(); step.advance()) {\n    const int first_row"
    last = "  named_barrier_sync(DS_READY, 256);\n  const float scale[2]"
    stores = "one, dV + block.of_keys(params.d_v) + warp_key * params.d_v.row, params.d_v.row, keys, HEAD_DIM);\n"
    return edit(
        source,
        (begins, head + begins),
        (first, f"{own}  NOTE(0, multiprocessor);\n  NOTE(1, clock64());\n{first}"),
        (loop, f"  NOTE(2, clock64());\n{loop}"),
        (last, f"  NOTE(3, clock64());\n{last}"),
        (stores, f"{stores}  NOTE(4, clock64());\n"),
    )


def blocks(case: Case) -> dict[str, Any]:
    """Return the median cycles of a block before, in and after its steps, and until the next block begins.

    "outside": the share of time outside of steps, between a multiprocessor's first block and its last.
    """
    module, n_blocks = _launched(case, noted(kernel.source(STAGE.file)))
    notes = cp.asnumpy(cp.ndarray((MOST_BLOCKS, 5), np.int64, module.get_global("block_clocks")))[:n_blocks]
    between, inside, whole = [], 0, 0
    for multiprocessor in np.unique(notes[:, 0]):
        own = notes[notes[:, 0] == multiprocessor, 1:]
        own = own[np.argsort(own[:, 0])]
        between.append(own[1:, 0] - own[:-1, 3])
        inside += int((own[:, 2] - own[:, 1]).sum())
        whole += int(own[-1, 3] - own[0, 0])
    parts = np.diff(notes[:, 1:], axis=1)
    cycles = dict(zip(("before", "steps", "after"), map(float, np.median(parts, axis=0)), strict=True))
    gaps_between = np.concatenate(between)
    cycles["between"] = float(np.median(gaps_between)) if gaps_between.size else 0.0
    return {"shape": list(case.shape), "causal": case.causal, **cycles, "outside": 1 - inside / whole}


STUDY = Study(
    "backward_timeline",
    {"rows": lambda: map(trace, CASES), "blocks": lambda: map(blocks, BLOCK_CASES)},
    head=lambda: {"device": describe()},
)
take = STUDY.take


def timeline(head_dim: int) -> dict[str, Any] | None:
    """Return the recorded cycles of one block at this head_dim; None without a record."""
    return next((row for row in (recorded() or {}).get("rows", ()) if row["shape"][3] == head_dim), None)


def _steady(row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the marks of the consumers and of the adding warp, for all recorded steps except the first two."""
    consumers, adders = np.array(row["consumers"]), np.array(row["adders"])
    noted = np.count_nonzero(consumers[0, :, 0] >= 0)  # unrecorded steps have the clock 0, minus that of the first mark
    return consumers[:, 2:noted], adders[2:noted]


def parts(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the median cycles of each part of a step for each consumer, without the first two steps.

    The barrier of dS opens when the later consumer has stored its dS.
    """
    steps, _ = _steady(row)
    marks = {mark: steps[..., i] for i, mark in enumerate(MARKS)}
    marks["opened"] = np.broadcast_to(marks["ds_stored"].max(axis=0), steps.shape[:2])
    lengths, last = {}, marks["begins"]
    for part, mark in PARTS.items():
        is_next = mark == "begins"
        lengths[part] = marks[mark][:, 1:] - last[:, :-1] if is_next else marks[mark] - last
        last = marks[mark]
    lengths["together"] = np.diff(marks["begins"], axis=1)
    return {part: np.median(cycles, axis=1).tolist() for part, cycles in lengths.items()}


def gaps(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the median cycles of a step in which a unit is idle, and those of the addition to dQ.

    No product is in flight while both consumers compute dS (until dV, issued just before the mark), and from the last
    dK to the next S.
    """
    steps, adders = _steady(row)
    marks = {mark: steps[..., i] for i, mark in enumerate(MARKS)}
    read = adders[:, ADDER_MARKS.index("added")]
    cycles = {
        "no product during dS": marks["ds_stored"].min(axis=0) - marks["dp_there"].max(axis=0),
        "no product, dK to S": marks["q_there"][:, 1:].min(axis=0) - marks["ends"][:, :-1].max(axis=0),
        "dQ: stored to read": read - marks["dq_stored"].max(axis=0),
        "    read to next dQ": marks["dq_there"][:, 1:].min(axis=0) - read[:-1],
    }
    return {name: float(np.median(values)) for name, values in cycles.items()}


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format the median cycles of the parts of a step, by head_dim and consumer, and its gaps."""
    rows = record["rows"]
    heads = [f"d = {row['shape'][3]}, consumer {i + 1}" for row in rows for i in range(len(row["consumers"]))]
    lines = [f"{'cycles of a step':24}" + "".join(f"{head:>20}" for head in heads)]
    for part in (*PARTS, "together"):
        lines.append(f"{part:24}" + "".join(f"{cycles:20,.0f}" for row in rows for cycles in parts(row)[part]))
    for name in gaps(rows[0]):
        lines.append(f"{name:24}" + "".join(f"{gaps(row)[name]:20,.0f}{'':20}" for row in rows).rstrip())
    return "\n".join([*lines, *(["", blocks_table(record)] if "blocks" in record else [])])


@records.shown
def blocks_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the median cycles of a block outside of its steps, a call a line."""
    names = ("before", "steps", "after", "between")
    lines = [f"{'cycles of a block':42}" + "".join(f"{name:>10}" for name in names) + f"{'not in steps':>14}"]
    for row in record["blocks"]:
        cycles = "".join(f"{row[name]:10,.0f}" for name in names)
        lines.append(f"{heads_text(row):42}{cycles}{row['outside']:14.0%}")
    return "\n".join(lines)

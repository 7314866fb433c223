"""Record the cycles of one block of hopper_backward: its products, what waits for what, the additions to dQ.

Measured by a copy of the kernel that notes them.

    python3 -m helpers.bench.study backward_timeline FILE
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.attention import kernel
from helpers.attention.ladder import BACKWARD, LADDER, backward
from helpers.bench import records
from helpers.bench.cases import Case, Inputs
from helpers.bench.harness import Study
from helpers.device import ON_GPU, cp, describe
from helpers.engine.cuda_source.edit import edit

recorded = records.reader("nvidia-h200-backward-timeline.json")
STAGE = BACKWARD["hopper_backward"]
DTYPE = "bfloat16"
TRACED_STEPS = 24  # of the traced block, from its first
CASES = (Case((2, 16, 8192, 128), DTYPE), Case((2, 32, 8192, 64), DTYPE))

# In the order in which a consumer passes them.
MARKS = (
    *("begins", "q_there", "do_there", "s_there", "weights", "dp_there", "ds_stored", "ds_ready"),
    *("dq_there", "dq_empty", "dq_stored", "ends"),
)
ADDER_MARKS = ("waits", "full", "added")


def traced(source: str) -> str:
    """Return a copy of the kernel whose second block notes cycles in `consumer_clocks` and `adder_clocks`.

    consumer_clocks[consumer][step]: see `MARKS`. adder_clocks[step]: the warp that adds to dQ waits for the tile; has
    it; the addition has read it. Steps after TRACED_STEPS are not noted.
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
        before("    float dQ_acc[DQ_ROWS / 2];\n", "ds_ready"),
        (empty, f"{stamp('dq_there').strip()}\n    {empty}\n{stamp('dq_empty')}"),
        after("    named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);\n", "dq_stored"),
        after("    wgmma_wait<0>();\n    wgmma_registers(dK_acc);\n", "ends"),
        (other, f"{other}\n        const int number = step.count;"),
        (full, f"STAMP_ADDER(0);\n        {full}\n        STAMP_ADDER(1);"),
        (arrives, f"STAMP_ADDER(2);\n        {arrives}"),
    )


def trace(case: Case) -> dict[str, Any]:
    """Return the cycles of one block, from the first one, by step."""
    q, k, v = Inputs(case.shape, DTYPE).device
    o, lse = LADDER["hopper"](q, k, v, return_lse=True)
    source = traced(kernel.source(STAGE.file))
    ready, arrays, _ = backward.plan(STAGE, q, q, k, v, o, lse, source=source)
    name = STAGE.kernel_name(DTYPE)
    for launch, compiled, args in ready.resolve_arguments(arrays):
        if compiled.name != name:
            compiled(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
            continue
        module = cp.RawModule(code=source, options=compiled.options, name_expressions=(name,))
        run = kernel.typed(module, name, source)
        for _ in range(3 if ON_GPU else 1):
            run(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
    cp.cuda.Device().synchronize()
    shapes = {"consumer_clocks": (2, TRACED_STEPS, len(MARKS)), "adder_clocks": (TRACED_STEPS, len(ADDER_MARKS))}
    clocks = {name: cp.asnumpy(cp.ndarray(shape, np.int64, module.get_global(name))) for name, shape in shapes.items()}
    zero = int(clocks["consumer_clocks"][:, 0, 0].min())
    return {
        "shape": list(case.shape),
        "consumers": (clocks["consumer_clocks"] - zero).tolist(),
        "adders": (clocks["adder_clocks"] - zero).tolist(),
    }


STUDY = Study("backward_timeline", {"rows": lambda: map(trace, CASES)}, head=lambda: {"device": describe()})
take = STUDY.take


def timeline(head_dim: int) -> dict[str, Any] | None:
    """Return the recorded cycles of one block at this head_dim, None without a record."""
    return next((row for row in (recorded() or {}).get("rows", ()) if row["shape"][3] == head_dim), None)


def table(record: Mapping[str, Any] | None = None) -> str:
    """Format the median cycles between the marks of a step, of all but the first two steps."""
    record = record or recorded() or {"rows": []}
    lines = []
    for row in record["rows"]:
        noted = np.count_nonzero(np.array(row["adders"])[:, 1] > 0)
        steps = np.array(row["consumers"])[:, 2:noted]
        lines.append(f"{'x'.join(map(str, row['shape']))}, cycles of a step and from one mark to the next")
        lines.append(f"    {'step':10}{np.median(np.diff(steps[..., 0], axis=1)):8.0f}")
        for i, mark in enumerate(MARKS[1:]):
            lines.append(f"    {mark:10}{np.median(steps[..., i + 1] - steps[..., i]):8.0f}")
    return "\n".join(lines)

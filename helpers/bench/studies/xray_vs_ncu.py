"""Compare the X-ray's counters with a GPU's own, for the same launches.

    python3 -m helpers.bench.study xray_vs_ncu FILE           # with a GPU and Nsight Compute
    python3 -m helpers.bench.studies.xray_vs_ncu              # run by Nsight Compute

`ours` is what the checked run counts, `hardware` what Nsight Compute counts on the chip. If they differ, the row says
why. Bytes at DRAM are recorded, too: caches serve most requests of threads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers import engine
from helpers.attention import kernel
from helpers.attention.check import make_inputs
from helpers.bench import ncu, records
from helpers.bench.harness import Study, words_of_process
from helpers.engine import checked
from helpers.engine.cuda_source.edit import edit

RECORD = records.MEASURED / "nvidia-h200-counters.json"
recorded = records.reader(RECORD.name)

# figure -> Nsight Compute's metric. A sector is 32 bytes, a wavefront one pass through shared memory.
FIGURES = {
    "global load bytes": "smsp__sass_data_bytes_mem_global_op_ld.sum",
    "global load requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global load sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global store bytes": "smsp__sass_data_bytes_mem_global_op_st.sum",
    "global store requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global store sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared load bytes": "smsp__sass_data_bytes_mem_shared_op_ld.sum",
    "shared load requests": "smsp__sass_inst_executed_op_shared_ld.sum",
    "shared load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared store bytes": "smsp__sass_data_bytes_mem_shared_op_st.sum",
    "shared store requests": "smsp__sass_inst_executed_op_shared_st.sum",
    "shared store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
# Also recorded; a checked run has no such figures.
ALSO_COUNTED = {
    "dram bytes read": "dram__bytes_read.sum",
    "dram bytes written": "dram__bytes_write.sum",
    "bank conflicts, shared loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank conflicts, shared stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
}
# Bytes that threads request, from all memories: a warp's accesses of each width, times 32 lanes.
ASKED = "bytes asked for"
WIDTHS = {
    4: "smsp__sass_inst_executed_op_memory_32b.sum",
    8: "smsp__sass_inst_executed_op_memory_64b.sum",
    16: "smsp__sass_inst_executed_op_memory_128b.sum",
}
METRICS = (*FIGURES.values(), *ALSO_COUNTED.values(), *WIDTHS.values())

WORDS = 1 << 15  # of `in` and of `out` in the patterns
WIDE = (4, 128)  # grid, block

# name -> (grid, block, body). t is the thread, i its number in the grid; x and y are its place in a 32 x 32 block.
PATTERNS: dict[str, tuple[int, int | tuple[int, int], str]] = {
    "unit_stride": (*WIDE, "out[i] = in[i];"),
    "offset_by_one": (*WIDE, "out[i] = in[i + 1];"),
    "stride_2": (*WIDE, "out[i] = in[2 * i];"),
    "stride_32": (*WIDE, "out[i] = in[32 * i];"),
    "one_word_a_warp": (*WIDE, "out[i] = in[i / 32];"),
    "reversed_order": (*WIDE, "out[i] = in[511 - i];"),
    "float2_copy": (*WIDE, "((float2 *)out)[i] = ((const float2 *)in)[i];"),
    "float4_copy": (*WIDE, "((float4 *)out)[i] = ((const float4 *)in)[i];"),
    "every_second_lane": (*WIDE, "if (t % 2 == 0) out[i] = in[i];"),
    "blocks_of_40": (4, 40, "out[i] = in[i];"),
    "transpose": (4, (32, 32), "__shared__ float s[32][32]; s[y][x] = in[i]; __syncthreads(); out[i] = s[x][y];"),
    "transpose_padded": (
        4,
        (32, 32),
        "__shared__ float s[32][33]; s[y][x] = in[i]; __syncthreads(); out[i] = s[x][y];",
    ),
    "transpose_swizzled": (
        4,
        (32, 32),
        "__shared__ float s[32][32]; s[y][x ^ y] = in[i]; __syncthreads(); out[i] = s[x][y ^ x];",
    ),
    "shared_stride_2": (*WIDE, "__shared__ float s[256]; s[2 * t] = in[i]; __syncthreads(); out[i] = s[254 - 2 * t];"),
    "shared_one_word": (*WIDE, "__shared__ float s[128]; s[t] = in[i]; __syncthreads(); out[i] = s[t / 32];"),
    "shared_float2": (*WIDE, "SHARED(float2, 127 - t)"),
    "shared_float4": (*WIDE, "SHARED(float4, 127 - t)"),
    "shared_float2_one": (*WIDE, "SHARED(float2, t / 32)"),
    "shared_float4_one": (*WIDE, "SHARED(float4, t / 32)"),
    "shared_float2_pairs": (*WIDE, "SHARED(float2, t / 2)"),
    "shared_float4_pairs": (*WIDE, "SHARED(float4, t / 2)"),
    "shared_float2_halves": (*WIDE, "SHARED(float2, t % 16)"),
    "shared_float4_quarters": (*WIDE, "SHARED(float4, t % 8)"),
    "shared_float2_two_apart": (*WIDE, "SHARED(float2, t & ~2)"),
    "shared_float4_two_apart": (*WIDE, "SHARED(float4, t & ~2)"),
    "shared_float2_mixed": (*WIDE, "SHARED(float2, t % 32 < 16 ? t / 2 : t)"),
    "shared_float4_mixed": (*WIDE, "SHARED(float4, t % 32 < 16 ? t / 2 : t)"),
    "shared_float2_even_lanes": (*WIDE, "SOME(float2, t % 2 == 0, t / 2)"),
    "shared_float4_even_lanes": (*WIDE, "SOME(float4, t % 2 == 0, t / 2)"),
    "shared_float2_half_lanes": (*WIDE, "SOME(float2, t % 16 < 8, t / 16 * 8 + t % 8)"),
    "shared_float4_half_lanes": (*WIDE, "SOME(float4, t % 8 < 4, t / 8 * 4 + t % 4)"),
    "shared_float4_rows": (
        *WIDE,
        "__shared__ float4 s[32 * 16]; for (int k = 0; k < 4; ++k) s[t + 128 * k] = ((const float4 *)in)[t + 128 * k]; "
        "__syncthreads(); ((float4 *)out)[i] = s[t % 32 * 16];",
    ),
    "shared_float4_rows_padded": (
        *WIDE,
        "__shared__ float4 s[32 * 17]; for (int k = 0; k < 4; ++k) s[t + 128 * k] = ((const float4 *)in)[t + 128 * k]; "
        "if (t < 32) s[512 + t] = ((const float4 *)in)[512 + t]; __syncthreads(); ((float4 *)out)[i] = s[t % 32 * 17];",
    ),
}
_SHARED = (
    "#define SHARED(T, INDEX) __shared__ T s[128]; s[t] = ((const T *)in)[i]; __syncthreads(); "
    "((T *)out)[i] = s[INDEX];\n"
    "#define SOME(T, WHEN, INDEX) __shared__ T s[128]; s[t] = ((const T *)in)[i]; __syncthreads(); "
    "if (WHEN) ((T *)out)[i] = s[INDEX];\n"
)


def pattern_code() -> str:
    """Write the source of all patterns, a kernel each, on its own line."""
    kernels = []
    for name, (_, block, body) in PATTERNS.items():
        where = "const int x = threadIdx.x, y = threadIdx.y, i = (blockIdx.x * 32 + y) * 32 + x;"
        if isinstance(block, int):
            where = "const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;"
        kernels.append(
            f'extern "C" __global__ void {name}(const float *__restrict__ in, float *__restrict__ out) '
            f"{{ {where} {body} }}"
        )
    return _SHARED + "\n".join(kernels) + "\n"


@dataclass(frozen=True)
class CountedLaunch:
    """One kernel to count: its source, options, and launch. args: NumPy arrays and scalars."""

    name: str
    code: str
    options: tuple[str, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]


def patterns() -> list[CountedLaunch]:
    """List the patterns' launches."""
    code = pattern_code()
    launches = []
    for name, (grid, block, _) in PATTERNS.items():
        arrays = (np.arange(WORDS, dtype=np.float32), np.zeros(WORDS, np.float32))
        launches.append(
            CountedLaunch(name, code, kernel.options(), (grid,), (block,) if isinstance(block, int) else block, arrays)
        )
    return launches


def stages() -> list[CountedLaunch]:
    """List naive, tiled and online_softmax at 1024 rows and keys of 64 words, with the tile sizes of their files."""
    n, d = 1024, 64
    q, k, v = make_inputs(n, n, d, seed=0)
    scale = (np.int32(n), np.int32(n), np.float32(d**-0.5))
    out = np.zeros((n, d), np.float32)
    launches = []
    for file, block_m, scratch in (
        ("01_naive.cu", 64, (np.zeros((n, n), np.float32),)),
        ("02_tiled.cu", 128, ()),
        ("03_online_softmax.cu", 128, ()),
    ):
        options = kernel.options({"HEAD_DIM": d, "BLOCK_M": block_m})
        args = (q, k, v, *scratch, out, *scale)
        launches.append(CountedLaunch(file[3:-3], kernel.source(file), options, (-(-n // block_m),), (block_m,), args))
    return launches


# What the GPU's compiler makes of the stages, written out: naive keeps the row of Q in registers, the others read four
# words of a row of K and V at once.
_ROW = ("  const float* q = Q + (size_t)row * HEAD_DIM;\n",)
_ROW += ("  float q[HEAD_DIM];\n  for (int c = 0; c < HEAD_DIM; ++c) q[c] = Q[(size_t)row * HEAD_DIM + c];\n",)
_SCORES = (
    """#pragma unroll 4
  for (int c = 0; c < HEAD_DIM; ++c) {
    const float q_c = q[c];
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) s[j] += q_c * K_smem[j][c];
  }
""",
    """  for (int c = 0; c < HEAD_DIM; c += 4) {
    const float q_0 = q[c], q_1 = q[c + 1], q_2 = q[c + 2], q_3 = q[c + 3];
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) {
      const float4 k = *(const float4*)&K_smem[j][c];
      s[j] += q_0 * k.x, s[j] += q_1 * k.y, s[j] += q_2 * k.z, s[j] += q_3 * k.w;
    }
  }
""",
)
_OUTPUT = (
    "      for (int c = 0; c < HEAD_DIM; ++c) acc[c] += p * V_smem[j][c];\n",
    """      for (int c = 0; c < HEAD_DIM; c += 4) {
        const float4 v = *(const float4*)&V_smem[j][c];
        acc[c] += p * v.x, acc[c + 1] += p * v.y, acc[c + 2] += p * v.z, acc[c + 3] += p * v.w;
      }
""",
)


def as_compiled() -> list[CountedLaunch]:
    """List the stages with their source changed to what the GPU's compiler makes of it.

    Raises:
        ValueError: a stage does not contain the text to change.
    """
    changed = []
    for launch in stages():
        code = edit(launch.code, *((_ROW,) if launch.name == "naive" else (_SCORES, _OUTPUT)))
        name = f"{launch.name}_as_compiled"
        changed.append(replace(launch, name=name, code=code.replace(f" {launch.name}(", f" {name}(")))
    return changed


def everything() -> list[CountedLaunch]:
    """List all launches of the record."""
    return [*patterns(), *stages(), *as_compiled()]


def ours(launch: CountedLaunch) -> dict[str, int]:
    """Return the figures of a checked run, without zeros.

    Raises:
        AssertionError: the run had a finding.
    """
    function = engine.RawModule(code=launch.code, options=launch.options).get_function(launch.name)
    args = tuple(engine.asarray(a) if isinstance(a, np.ndarray) else a for a in launch.args)
    seen = checked.observe(function, launch.grid, launch.block, args, profile=True)
    assert not seen.issues and seen.abort is None, (launch.name, seen.issues, seen.abort)
    total = dict.fromkeys(FIGURES, 0)
    for site in seen.sites:
        is_global = not seen.regions[site.region].is_shared
        kind = f"{'global' if is_global else 'shared'} {'store' if site.is_write else 'load'}"
        total[f"{kind} bytes"] += site.count * site.size
        total[f"{kind} requests"] += site.requests
        total[f"{kind} {'sectors' if is_global else 'wavefronts'}"] += site.sectors if is_global else site.wavefronts
    total[ASKED] = sum(count for name, count in total.items() if name.endswith("bytes"))
    return {name: count for name, count in total.items() if count}


# ------------------------------------------------------------------------------------------------ on the GPU


def launch_all() -> None:
    """Launch everything once with CuPy."""
    from helpers.device import cp

    for launch in everything():
        function = cp.RawModule(code=launch.code, options=launch.options).get_function(launch.name)
        function(
            launch.grid, launch.block, tuple(cp.asarray(a) if isinstance(a, np.ndarray) else a for a in launch.args)
        )
        cp.cuda.Device().synchronize()


# ------------------------------------------------------------------------------------------------ the record


def parse(text: str) -> dict[str, dict[str, int]]:
    """Parse Nsight Compute's raw CSV page: kernel -> metric -> count.

    Raises:
        ValueError: the text has no table, or a unit that is not a base unit.
    """
    by_kernel: dict[str, dict[str, int]] = {}
    for name, columns in ncu.launches_of(text):
        counts = {}
        for column, (value, unit) in columns.items():
            if column not in METRICS:
                continue
            if unit not in ("", "byte", "sector", "request", "inst"):
                raise ValueError(f"{column} is in {unit!r}; run ncu with --print-units base")
            counts[column] = round(float(value.replace(",", "")))
        by_kernel[name] = counts
    return by_kernel


_WORDS_ONCE = "counts something else: a word that several lanes of a request ask for counts once"
_ROW_KEPT = "the compiler keeps the row of Q in registers, read once and not once for each key: see naive_as_compiled"
_FOUR_WORDS = "the compiler reads four words of K_smem or V_smem at once (128-bit loads): see {}_as_compiled"
_WHOLE_WARPS = "counts whole warps; here some lanes take no part"


def _why(name: str, figure: str) -> str:
    """Return why a figure of a kernel differs; "" if no reason is known."""
    if name == "naive" and figure in (ASKED, "global load requests", "global load sectors"):
        return _ROW_KEPT
    if name in ("tiled", "online_softmax") and figure in ("shared load requests", "shared load wavefronts"):
        return _FOUR_WORDS.format(name)
    if figure in ("global load bytes", "shared load bytes"):
        return _WORDS_ONCE
    partial = name.endswith("_lanes") or name in ("every_second_lane", "blocks_of_40", "shared_float4_rows_padded")
    if figure == ASKED and partial:
        return _WHOLE_WARPS
    return ""


def compared(measured: Mapping[str, Mapping[str, int]], launches: Iterable[CountedLaunch]) -> list[dict[str, Any]]:
    """Make the record's rows: each kernel's figures, ours and the hardware's, and why they differ by over 1 %."""
    table = []
    for launch in launches:
        counts, mine = measured[launch.name], ours(launch)
        theirs = {figure: counts[metric] for figure, metric in FIGURES.items()}
        theirs[ASKED] = 32 * sum(width * counts[metric] for width, metric in WIDTHS.items())
        figures = {}
        for figure, hardware in theirs.items():
            own = mine.get(figure, 0)
            if own or hardware:
                ratio = round(own / hardware, 4) if hardware else None
                figures[figure] = {"ours": own, "hardware": hardware, "ratio": ratio}
                if abs(own - hardware) > 0.01 * hardware:
                    figures[figure]["why"] = _why(launch.name, figure)
        also = {name: counts[metric] for name, metric in ALSO_COUNTED.items()}
        table.append(
            {"kernel": launch.name, "grid": launch.grid, "block": launch.block, "figures": figures, "beside": also}
        )
    return table


def rows() -> list[dict[str, Any]]:
    """Count everything with Nsight Compute, and with checked runs of the same launches. Clocks are not locked.

    Raises:
        RuntimeError: ncu is missing, or failed with this message.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "ncu.csv")
        names = [launch.name for launch in everything()]
        ncu.profile(table, METRICS, names, ("helpers.bench.studies.xray_vs_ncu",))
        return compared(parse(table.read_text()), everything())


def _head() -> dict[str, Any]:
    how = {
        "ours": "a checked run of the CPU engine (helpers.xray)",
        "hardware": "Nsight Compute, one launch of each kernel, caches flushed before it, clocks left alone",
        **ncu.about(),
        "metrics": {**FIGURES, **ALSO_COUNTED, ASKED: " + ".join(f"32 * {w} * {m}" for w, m in WIDTHS.items())},
        "command": "python3 -m helpers.bench.study xray_vs_ncu FILE",
    }
    return {"how": how}


STUDY = Study("xray_vs_ncu", {"rows": rows}, _head)
take = STUDY.take


@records.shown
def table(record: Any = None, kernels: Sequence[str] | None = None) -> str:
    """Format the recorded rows as text: our figure, the hardware's, the ratio; and why they differ.

    Args:
        kernels: only these; None for all.
    """
    lines = [f"{'kernel':26} {'figure':24} {'ours':>13} {'hardware':>13} {'ratio':>7}"]
    for row in record["rows"]:
        if kernels is not None and row["kernel"] not in kernels:
            continue
        for figure, value in row["figures"].items():
            ratio = f"{value['ratio']:.3f}" if value["ratio"] is not None else ""
            lines.append(f"{row['kernel']:26} {figure:24} {value['ours']:13,} {value['hardware']:13,} {ratio:>7}")
            if "why" in value:
                lines.append(f"{'':26} {value['why']}")
        for name in ("dram bytes read", "dram bytes written"):
            if name in row["beside"]:
                lines.append(f"{row['kernel']:26} {name:24} {'':13} {row['beside'][name]:13,}")
    return "\n".join(lines)


if __name__ == "__main__":
    words_of_process("xray_vs_ncu", 0)
    launch_all()

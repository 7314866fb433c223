"""The X-ray's FLOP equal hand counts exactly: small kernels, the stages 01 to 03, and whole tiles on tensor cores."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from helpers import engine
from helpers.attention.check import make_inputs
from helpers.attention.ladder import LADDER
from helpers.engine import compiler
from helpers.engine.assembly import with_flop
from helpers.lesson import shortcuts
from helpers.xray import Report, xray

counted = pytest.mark.skipif(
    compiler._is_clang() or platform.machine() not in ("x86_64", "AMD64"), reason="g++ for x86 alone counts FLOP"
)
THREADS = 3 * 48
HALF, BFLOAT16 = "#include <cuda_fp16.h>\n", "#include <cuda_bf16.h>\n"


def seen(body: str, head: str = "") -> Report:
    code = f'{head}extern "C" __global__ void run(float* x, double* y, int n) {{ const int i = threadIdx.x; {body} }}'
    args = engine.ones(64, np.float32), engine.ones(64, np.float64), np.int32(7)
    return xray(engine.RawKernel(code, "run"), (3,), (48,), args)


@counted
@pytest.mark.parametrize(
    "body, flop",
    [
        ("x[i] += 1;", THREADS),
        ("x[i] = fmaf(x[i], 2.0f, 1.0f);", 2 * THREADS),
        ("float a = x[i], s = 0; for (int j = 0; j < n; ++j) s = fmaf(a, s, a); x[i] = s;", 2 * 7 * THREADS),
        ("if (i < 10) x[i] *= 3; else x[i] = x[i] / 3 - 1;", 3 * 10 + 2 * (THREADS - 3 * 10)),
        ("for (int j = 0; j < i; ++j) x[i] += 1;", 3 * 48 * 47 // 2),
        ("y[i] = sqrt(y[i]) * y[i];", 2 * THREADS),
        ("float4 v = ((float4*)x)[i % 16]; x[i] = v.x * v.y + v.z * v.w;", 3 * THREADS),
        ("atomicAdd(x, 1.0f);", THREADS),
        ('float a = x[i]; asm("fma.rn.f32 %0, %0, %0, %0;" : "+f"(a)); x[i] = a;', 2 * THREADS),
        ("x[i] = fmaxf(x[i], 0.5f);", 0),
        ("x[i] = -(float)(int)x[i];", 0),
        ("x[i] = expf(rsqrtf(x[i]));", 0),
    ],
)
def test_of_floats(body: str, flop: int) -> None:
    report = seen(body)
    assert (report.flop, report.tensor_flop) == (flop, 0)
    requested = sum(f.read + f.written for f in report.traffic.values())
    assert report.flop_per_byte == flop / requested


@counted
@pytest.mark.parametrize(
    "head, body, flop",
    [
        (HALF, "__half a = __float2half(x[i]); x[i] = __half2float(a);", 0),
        (HALF, "__half a = __float2half(x[i]); x[i] = __half2float(a * a + a);", 2),
        (HALF, "__half2 a = __float2half2_rn(x[i]); a = __hfma2(a, a, a); x[i] = __low2float(a) + __high2float(a);", 5),
        (BFLOAT16, "__nv_bfloat16 a = __float2bfloat16(x[i]); x[i] = __bfloat162float(__hfma(a, a, a));", 2),
    ],
)
def test_of_16_bit_numbers(head: str, body: str, flop: int) -> None:
    assert seen(body, head).flop == flop * THREADS


@counted
def test_the_next_launch_counts_afresh() -> None:
    q, k, v = make_inputs(32, 32, 16)
    assert shortcuts.xray_stage("naive", q, k, v).flop == shortcuts.xray_stage("naive", q, k, v).flop


@counted
@pytest.mark.parametrize("name", ["naive", "tiled", "online_softmax"])
def test_of_stages(name: str) -> None:
    n, n_kv, d = 200, 96, 64  # a whole number of tiles of keys; blocks have more threads than there are rows
    q, k, v = make_inputs(n, n_kv, d)
    sizes = LADDER[name].defines(d)
    rows = n if name == "naive" else -(-n // sizes["BLOCK_M"]) * sizes["BLOCK_M"]
    tiles = n_kv // sizes.get("BLOCK_N", n_kv)
    products = 4 * rows * n_kv * d
    softmax = 3 * rows * n_kv  # scaled, the maximum subtracted, added to l
    if name == "tiled":  # scores once more, scaled, the maximum subtracted; l rescaled by exp(a difference)
        products += 2 * rows * n_kv * d
        softmax += 2 * rows * n_kv + 2 * rows * tiles
    if name == "online_softmax":  # l and acc rescaled
        softmax += (2 + d) * rows * tiles
    report = shortcuts.xray_stage(name, q, k, v, sizes=sizes)
    assert report.flop == products + softmax + n * d  # each element of the output divided


def whole(n: int, tile: int) -> int:
    return -(-n // tile) * tile


@pytest.mark.parametrize("name", ["flash_wmma", "flash_mma", "hopper"])
def test_of_tensor_cores(name: str) -> None:
    n, n_kv, d = 50, 70, 64
    arrays = [a.astype(np.float16) for a in make_inputs(n, n_kv, d)]
    sizes = LADDER[name].defines(d)
    report = shortcuts.xray_stage(name, *arrays, sizes=sizes)
    assert report.tensor_flop == 4 * whole(n, sizes["BLOCK_M"]) * whole(n_kv, sizes["BLOCK_N"]) * d, sizes


FRAGMENTS = """#include <mma.h>
using namespace nvcuda::wmma;
extern "C" __global__ void run() {
  fragment<matrix_a, SHAPE, FACTOR, row_major> a;
  fragment<matrix_b, SHAPE, FACTOR, col_major> b;
  fragment<accumulator, SHAPE, SUM> c;
  fill_fragment(a, 1), fill_fragment(b, 1), fill_fragment(c, 0);
  mma_sync(c, a, b, c);
}"""


@pytest.mark.parametrize(
    "shape, factor, of_sums, flop",
    [
        ("16, 16, 16", "__half", "float", 2 * 16 * 16 * 16),
        ("8, 8, 4", "double", "double", 2 * 8 * 8 * 4),
        ("16, 16, 16", "signed char", "int", 0),
    ],
)
def test_of_fragments(shape: str, factor: str, of_sums: str, flop: int) -> None:
    code = FRAGMENTS.replace("SHAPE", shape).replace("FACTOR", factor).replace("SUM", of_sums)
    report = xray(engine.RawKernel(code, "run"), (3,), (64,), ())
    assert report.tensor_flop == 6 * flop and not report.flop


SUMS = '{%0, %1, %2, %3}, {%4, %4}, {%4}, {%0, %1, %2, %3};" : "+f"(f), "+f"(g), "+f"(h), "+f"(l) : "r"(u)'
DOUBLES = '{%0, %1}, {%2}, {%2}, {%0, %1};" : "+d"(d), "+d"(e) : "d"(1.0)'


@pytest.mark.parametrize(
    "instruction, operands, flop",
    [
        ("m8n8k4.row.col.f64.f64.f64.f64", DOUBLES, 2 * 8 * 8 * 4),
        ("m16n8k4.row.col.f32.tf32.tf32.f32", SUMS, 2 * 16 * 8 * 4),
        ("m16n8k8.row.col.f32.f16.f16.f32", SUMS, 2 * 16 * 8 * 8),
    ],
)
def test_of_ptx(instruction: str, operands: str, flop: int) -> None:
    values = "float f = 0, g = 0, h = 0, l = 0; double d = 0, e = 0; unsigned u = 0;"
    code = f'{values} asm volatile("mma.sync.aligned.{instruction} {operands});'
    report = xray(engine.RawKernel(f'extern "C" __global__ void run() {{ {code} }}', "run"), (3,), (64,), ())
    assert report.tensor_flop == 6 * flop and not report.flop


BLOCK = "\tcall\t__sanitizer_cov_trace_pc@PLT\n"


@pytest.mark.parametrize(
    "lines, flop",
    [
        ("\taddss\t(%rax), %xmm0\n\tdivsd\t%xmm1, %xmm0\n", 2),
        ("\tvfmadd213ss\t%xmm0, %xmm1, %xmm2\n\tvfnmsub231sd\t%xmm0, %xmm1, %xmm2\n", 4),
        ("\tcall\tfmaf@PLT\n\tcall\tfma@PLT\n\tcall\tfmaxf@PLT\n", 4),
        ("\tmulps\t%xmm0, %xmm1\n\tvaddpd\t%ymm0, %ymm1, %ymm2\n\tvfmadd132ps\t%zmm0, %zmm1, %zmm2\n", 4 + 4 + 32),
        ("\tvmaxss\t%xmm0, %xmm1, %xmm2\n\tcomiss\t%xmm0, %xmm1\n\tcvtss2sd\t%xmm0, %xmm0\n\taddq\t$1, %rax\n", 0),
        ("\t.loc 2 7 1\n\taddss\t%xmm0, %xmm1\n\t.loc 1 8 1 is_stmt 0\n\tsubss\t%xmm0, %xmm1\n", 1),
    ],
)
def test_instructions(lines: str, flop: int) -> None:
    files = '\t.file 1 "kernel.cu"\n\t.file 2 "/engine/include/float16_formats.h"\n'
    text = with_flop(f"{files}\taddss\t%xmm0, %xmm1\n{BLOCK}{lines}{BLOCK}\tret\n")
    sums = [int(line.split()[1].strip("$,")) for line in text.splitlines() if ".Lengine_flop(" in line]
    assert sums == ([flop] if flop else [])
    assert not flop or text.split(BLOCK)[1].startswith(f"\taddq ${flop}, .Lengine_flop(%rip)\n")

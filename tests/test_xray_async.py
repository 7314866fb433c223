"""The X-ray counts asynchronous copies and matrix instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_files import cuda_text
from planted_files import out, some

from helpers import engine
from helpers.attention import kernel, reference
from helpers.attention.check import make_inputs
from helpers.attention.ladder import LADDER
from helpers.xray import xray


def test_a_file_in_a_folder_is_found_behind_its_headers() -> None:
    """For a wrapper in a header, the X-ray names the line of a climb's step that calls it."""
    code = """#line 1 "head.cuh"
__device__ __forceinline__ float get(const float* in, int i) { return in[i]; }
#line 1 "steps/file.cu"
extern "C" __global__ void k(const float* in, float* out) {
  out[threadIdx.x] = get(in, threadIdx.x + 1);
}
"""
    function = engine.RawModule(code=code).get_function("k")
    (found,) = xray(function, (1,), (32,), (some(32), out(32))).findings
    assert (found.file, found.line) == ("steps/file.cu", 2)


# ------------------------------------------------------------------------------------ figures

# Rows of 64 halves, PITCH apart; with SWIZZLE, 16-byte chunk c of row r is at c ^ (r % 8).
FIGURES = cuda_text("xray_async_figures")


@pytest.mark.parametrize(("pitch", "swizzle", "turns"), [(64, 0, 32), (72, 0, 4), (64, 1, 4), (80, 0, 8)])
def test_bank_conflicts_of_ldmatrix_and_traffic_of_copies(pitch: int, swizzle: int, turns: int) -> None:
    """An 8 x 8 matrix takes a wavefront per row in the same banks: 8 at a pitch of 128 bytes, 1 at 144, 2 at 160."""
    code = "#include <cuda_fp16.h>\n" + FIGURES
    function = engine.RawModule(code=code, options=(f"-DPITCH={pitch}", f"-DSWIZZLE={swizzle}")).get_function("figures")
    report = xray(function, (1,), (32,), (some(64 * 64, np.float16), out(32)))
    report.assert_clean()
    texts = list(enumerate(FIGURES.splitlines()[2:], 1))
    lines = {mark: n for mark in ("copy", "load") for n, text in texts if f"// {mark}" in text}
    load = report.by_line["figures.cu", lines["load"]]
    assert (load.loads, load.wavefronts, load.read) == (4, 4 * turns, 4 * 32 * 16)
    assert load.conflicts == 4 * (turns - 4)
    copies = report.by_access["figures.cu", lines["copy"]]
    assert (copies["in"].loads, copies["in"].sectors, copies["in"].read) == (16, 16 * 16, 64 * 128)
    assert (copies["s"].stores, copies["s"].written) == (16, 64 * 128)
    assert copies["s"].wavefronts == 16 * 4 if pitch == 64 else copies["s"].wavefronts >= 16 * 4


WMMA_FIGURES = r"""
#include <mma.h>
using namespace nvcuda;
#line 1 "figures.cu"
extern "C" __global__ void figures(const half *a, const half *b, float *out) {
  __shared__ __align__(128) half s[16 * 64];
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> A;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> B;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> C;
  for (int i = threadIdx.x; i < 16 * 64; i += 32) s[i] = a[i];
  __syncwarp();
  wmma::fill_fragment(C, 0.0f);
  wmma::load_matrix_sync(A, s, 64);
  wmma::load_matrix_sync(B, b, 16);
  wmma::mma_sync(C, A, B, C);
  wmma::store_matrix_sync(out, C, 16, wmma::mem_row_major);
}
"""


def test_figures_of_wmma() -> None:
    """They equal a GPU compiler's: ldmatrix from shared memory, a word per lane and matrix from global memory."""
    function = engine.RawModule(code=WMMA_FIGURES).get_function("figures")
    report = xray(function, (1,), (32,), (some(16 * 64, np.float16), some(256, np.float16), out(256)))
    report.assert_clean()
    shared, loaded, stored = (report.by_line["figures.cu", line] for line in (9, 10, 12))
    assert (shared.loads, shared.read, shared.wavefronts) == (1, 512, 32)
    assert (loaded.loads, loaded.read, loaded.sectors) == (4, 512, 4 * 8)
    assert (stored.stores, stored.written, stored.sectors) == (4, 1024, 4 * 8)


@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("stage", ["flash_wmma", "flash_mma", "hopper"])
@pytest.mark.parametrize(("shape", "causal"), [((33, 70, 40), False), ((65, 33, 64), True)], ids=str)
def test_the_stages_with_tensor_cores_are_clean(
    stage: str, shape: tuple[int, int, int], causal: bool, cpu_engine: Any
) -> None:
    reports = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        reports.append(xray(self, grid, block, args, shared_mem))

    n, n_kv, d = shape
    q, k, v = (x.astype(np.float16) for x in make_inputs(n, n_kv, d))
    with kernel.launches_replaced(checked):
        got = engine.asnumpy(LADDER[stage](q, k, v, causal=causal))
    for report in reports:  # 10 begins with a launch that orders the tiles
        report.assert_clean()
    assert report.traffic["O"].written == 2 * n * d
    expected = reference.attention(*(x.astype(np.float32) for x in (q, k, v)), causal=causal)
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=0.01)
    files = {file for file, _ in report.by_line}
    assert files == {LADDER[stage].file}, "lines of wrappers in headers are told as the kernel's"

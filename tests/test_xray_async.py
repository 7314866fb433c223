"""The bug zoo of asynchronous copies and matrix instructions: one planted bug each, found at its line; clean twins."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from zoo import Bug, out, some

from helpers import engine
from helpers.attention import kernel, reference
from helpers.attention.check import make_inputs
from helpers.attention.ladder import LADDER
from helpers.xray import Report, xray

HEAD = r"""
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(N) asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory")
__device__ __forceinline__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy(void *to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(to)), "l"(from) : "memory");
}
"""
LDMATRIX = (
    'asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(&s[t % 8 * PITCH])));'
    "  // MARK"
)


def matrix(pitch: int, mark: str) -> str:
    return LDMATRIX.replace("PITCH", str(pitch)).replace("MARK", mark)


ZOO = [
    Bug(
        "no_wait",
        "not waited for",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  COMMIT();
  /* no wait */
  __syncthreads();
  out[t] = s[63 - t];  // here
  WAIT(0);
}
""",
        (("/* no wait */", "WAIT(0);"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "reads_its_own_too_early",
        "not waited for",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  COMMIT();
  /* no wait */
  out[t] = s[t];  // here
  WAIT(0);
}
""",
        (("/* no wait */", "WAIT(0);"),),
        lambda: (some(64), out(64)),
        array="s",
        index=0,
        at_thread=0,
    ),
    Bug(
        "waits_for_the_group_before",
        "not waited for",
        """NAME(const float *in, float *out) {
  __shared__ float s[2][64];
  int t = threadIdx.x;
  float sum = 0;
  copy(&s[0][t], &in[t]);
  COMMIT();
  for (int i = 0; i < 3; ++i) {
    if (i < 2) copy(&s[(i + 1) % 2][t], &in[64 * (i + 1) + t]);  // there
    COMMIT();
    WAIT(1 /* but not for the last */);
    __syncthreads();
    sum += s[(i + 1) % 2 + 0 * i][63 - t];  // here
    __syncthreads();
  }
  out[t] = sum;
  WAIT(0);
}
""",
        (("s[(i + 1) % 2 + 0 * i]", "s[i % 2]"),),
        lambda: (some(192), out(64)),
        array="s",
    ),
    Bug(
        "never_committed",
        "not waited for",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  /* no commit */
  WAIT(0);
  out[t] = s[t];  // here
  asm volatile("cp.async.wait_all;");
}
""",
        (("/* no commit */", "COMMIT();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "no_barrier_after_the_wait",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // here
  COMMIT();
  WAIT(0);
  /* no barrier */
  out[t] = s[63 - t];  // there
}
""",
        (("/* no barrier */", "__syncthreads();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "no_barrier_before_the_tile_is_used_again",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  float sum = 0;
  for (int tile = 0; tile < 3; ++tile) {
    copy(&s[t], &in[64 * tile + t]);  // here
    COMMIT();
    WAIT(0);
    __syncthreads();
    for (int i = 0; i < 64; ++i) sum += s[i];  // there
    /* no barrier */
  }
  out[t] = sum;
}
""",
        (("/* no barrier */", "__syncthreads();"),),
        lambda: (some(192), out(64)),
        array="s",
    ),
    Bug(
        "written_while_in_flight",
        "not waited for",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // there
  COMMIT();
  /* no wait */
  s[t] = 1;  // here
  WAIT(0);
  out[t] = s[t];
}
""",
        (("/* no wait */", "WAIT(0);"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "never_waited_for",
        "never waited for",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t]);  // here
  COMMIT();
  out[t] = in[t];
  /* no wait */
}
""",
        (("/* no wait */", "WAIT(0);"),),
        lambda: (some(64), out(64)),
        array="s",
        index=0,
        at_thread=0,
    ),
    Bug(
        "copies_past_the_end",
        "out of bounds",
        """NAME(const float *in, float *out) {
  __shared__ float s[60];
  int t = threadIdx.x;
  if (t < 64 /* all */) copy(&s[t], &in[t]);  // here
  COMMIT();
  WAIT(0);
  __syncthreads();
  out[t] = s[t % 60];
}
""",
        (("t < 64 /* all */", "t < 60"),),
        lambda: (some(64), out(64)),
        array="s",
        index=60,
        at_thread=60,
    ),
    Bug(
        "reads_past_the_end",
        "out of bounds",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  copy(&s[t], &in[t + 2]);  // here
  COMMIT();
  WAIT(0);
  out[t] = s[t];
}
""",
        (("t + 2", "t"),),
        lambda: (some(64), out(64)),
        array="in",
        index=64,
        at_thread=62,
    ),
    Bug(
        "matrix_read_too_early",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ __align__(16) unsigned short s[64];
  int t = threadIdx.x;
  unsigned r;
  ((unsigned *)s)[t] = (unsigned)in[t];  // here
  /* no barrier */
  LOAD
  out[t] = (float)r;
}
""".replace("LOAD", matrix(8, "there")),
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (some(64), out(32)),
        block=32,
        array="s",
    ),
    Bug(
        "matrix_never_written",
        "uninitialised",
        """NAME(const float *in, float *out) {
  __shared__ __align__(16) unsigned short s[128];
  int t = threadIdx.x;
  unsigned r;
  s[t] = (unsigned short)in[t], s[t + 32] = (unsigned short)in[t];  /* and no more */
  __syncwarp();
  LOAD
  out[t] = (float)r;
}
""".replace("LOAD", matrix(16, "here")),
        (("/* and no more */", "s[t + 64] = s[t + 96] = 0;"),),
        lambda: (some(64), out(32)),
        block=32,
        array="s",
    ),
    Bug(
        "matrix_rows_not_aligned",
        "misaligned",
        """NAME(const float *in, float *out) {
  __shared__ __align__(16) unsigned short s[128];
  int t = threadIdx.x;
  unsigned r;
  for (int i = t; i < 128; i += 32) s[i] = (unsigned short)in[t];
  __syncwarp();
  LOAD
  out[t] = (float)r;
}
""".replace("LOAD", matrix(12, "here")),
        (("* 12", "* 16"),),
        lambda: (some(64), out(32)),
        block=32,
    ),
    Bug(
        "half_a_warp_multiplies",
        "deadlock",
        """NAME(const float *in, float *out) {
  int t = threadIdx.x;
  float d[4] = {in[t], 0, 0, 0};
  unsigned a = 0;
  if (t < 16 /* lanes */)
    asm volatile(  // here
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4}, {%4}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
  __syncthreads();
  out[t] = d[0];
}
""",
        (("t < 16 /* lanes */", "t < 32"),),
        lambda: (some(64), out(32)),
        block=32,
    ),
]
WMMA = [
    Bug(
        "fragment_stored_over_what_others_read",
        "race",
        """NAME(const half *in, float *out) {
  __shared__ __align__(32) float s[256];
  int t = threadIdx.x;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fill_fragment(c, 0.0f);
  wmma::load_matrix_sync(a, in, 16);
  wmma::load_matrix_sync(b, in, 16);
  wmma::mma_sync(c, a, b, c);
  wmma::store_matrix_sync(s, c, 16, wmma::mem_row_major);  // there
  /* no barrier */
  for (int i = 0; i < 8; ++i) out[8 * t + i] = s[8 * t + i];  // here
}
""",
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (some(256, np.float16), out(256)),
        block=32,
        array="s",
    ),
    Bug(
        "fragment_past_the_end",
        "out of bounds",
        """NAME(const half *in, float *out) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::load_matrix_sync(a, in + 16, 16);  // here
  out[threadIdx.x] = (float)a.x[0];
}
""",
        (("in + 16", "in"),),
        lambda: (some(256, np.float16), out(32)),
        block=32,
        array="in",
    ),
]


def code_of(bug: Bug, *, fixed: bool) -> str:
    """One module for each bug: the head has line numbers of its own."""
    head = "#include <mma.h>\nusing namespace nvcuda;\n" if bug in WMMA else HEAD
    return f'#line 1 "head.cuh"\n{head}{bug.text(fixed=fixed)}'


@functools.cache
def look(name: str, fixed: bool) -> Report:
    bug = next(bug for bug in [*ZOO, *WMMA] if bug.name == name)
    function = engine.RawModule(code=code_of(bug, fixed=fixed)).get_function(f"{name}_fixed" if fixed else name)
    return xray(function, (bug.grid,), (bug.block,), bug.args(), bug.shared_mem, timeout=10)


@pytest.mark.parametrize("bug", [*ZOO, *WMMA], ids=lambda bug: bug.name)
def test_each_bug_is_found_where_it_is(bug: Bug) -> None:
    report = look(bug.name, False)
    assert [f.kind for f in report.findings] == [bug.kind], report.findings
    found = report.findings[0]
    here, there = bug.line("here"), bug.line("there")
    assert found.file == f"{bug.name}.cu" and f"{bug.name}.cu:{here}" in found.message
    if there is not None:
        assert {found.line, found.other_line} == {here, there}, found
    else:
        assert found.line == here, found
    for got, wanted in ((found.array, bug.array), (found.index, bug.index)):
        assert wanted is None or got == wanted, found
    assert bug.at_thread is None or found.thread == (bug.at_thread, 0, 0), found


@pytest.mark.parametrize("bug", [*ZOO, *WMMA], ids=lambda bug: bug.name)
def test_the_fixed_twin_is_clean(bug: Bug) -> None:
    look(bug.name, True).assert_clean()


def test_a_file_in_a_folder_is_found_behind_its_headers() -> None:
    """As a step of a climb: of a wrapper in a header, the line of the step that calls it is told."""
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

# Rows of 64 halves, PITCH apart; with SWIZZLE, 16-byte piece c of row r is at c ^ (r % 8).
FIGURES = r"""
#line 1 "figures.cu"
extern "C" __global__ void figures(const __half *in, float *out) {
  __shared__ __align__(128) __half s[64 * PITCH];
  int t = threadIdx.x;
  for (int i = t; i < 64 * 8; i += 32) {
    int row = i / 8, piece = SWIZZLE ? i % 8 ^ row % 8 : i % 8;
    unsigned to = (unsigned)__cvta_generic_to_shared(&s[row * PITCH + 8 * piece]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in + 8 * i));  // copy
  }
  asm volatile("cp.async.wait_all;");
  __syncwarp();
  unsigned r[4], sum = 0;
  for (int k = 0; k < 4; ++k) {
    int row = t % 16, piece = 2 * k + t / 16;
    unsigned from = (unsigned)__cvta_generic_to_shared(&s[row * PITCH + 8 * (SWIZZLE ? piece ^ row % 8 : piece)]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"  // load
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
    sum += r[0] ^ r[1] ^ r[2] ^ r[3];
  }
  out[t] = (float)sum;
}
"""


@pytest.mark.parametrize(("pitch", "swizzle", "turns"), [(64, 0, 32), (72, 0, 4), (64, 1, 4), (80, 0, 8)])
def test_bank_conflicts_of_ldmatrix_and_traffic_of_copies(pitch: int, swizzle: int, turns: int) -> None:
    """Each 8 x 8 matrix takes a turn for every row in the same banks: 8 at a pitch of 128 bytes, 1 at 144, 2 at 160."""
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
    """As a GPU's compiler makes it: ldmatrix from shared memory, a word of each lane and matrix from global memory."""
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
    for report in reports:  # 10 begins with a launch of its own, which orders the tiles
        report.assert_clean()
    assert report.traffic["O"].written == 2 * n * d
    expected = reference.attention(*(x.astype(np.float32) for x in (q, k, v)), causal=causal)
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=0.01)
    files = {file for file, _ in report.by_line}
    assert files == {LADDER[stage].file}, "lines of wrappers in headers are told as the kernel's"

"""CuTe on the CPU engine: its layouts against its documentation, its atoms against NumPy, and the X-ray's figures.

Kernels with CuTe take g++ some seconds each, so that most tests share two sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.attention import kernel
from helpers.engine import compiler, cutlass, nvrtc, unset
from helpers.lesson.shortcuts import cute_offsets
from helpers.xray import xray

has_cute = pytest.mark.skipif(nvrtc.why_no_cute() is not None, reason=nvrtc.why_no_cute() or "")
pytestmark = [pytest.mark.exhaustive, has_cute]  # compiling CuTe takes seconds for each test

STD = ("-std=c++17",)


def module(cp: Any, code: str, names: tuple[str, ...] = ()) -> Any:
    """Compile CuTe's headers from the folder in the options on the engine; on a GPU `compiled` does that."""
    return compiled(cp, code, names, (*STD, *kernel.headers(code)) if cp is engine else STD)


# ---------------------------------------------------------------- layouts

# Layouts, each with its values in CuTe's documentation (media/docs/cpp/cute, 01_layout and 02_layout_algebra).
DOCUMENTED = {
    "coalesce(Layout<Shape<_2, Shape<_1, _6>>, Stride<_1, Stride<_6, _2>>>{})": "_12:_1",
    "composition(Layout<Shape<_6, _2>, Stride<_8, _2>>{}, Layout<Shape<_4, _3>, Stride<_3, _1>>{})": (
        "((_2,_2),_3):((_24,_2),_8)"
    ),
    "composition(Layout<Int<20>, _2>{}, Layout<Shape<_5, _4>, Stride<_4, _1>>{})": "(_5,_4):(_8,_2)",
    "composition(Layout<Shape<_10, _2>, Stride<_16, _4>>{}, Layout<Shape<_5, _4>, Stride<_1, _5>>{})": (
        "(_5,(_2,_2)):(_16,(_80,_4))"
    ),
    "complement(Layout<_4, _1>{}, _24{})": "_6:_4",
    "complement(Layout<_6, _4>{}, _24{})": "_4:_1",
    "complement(Layout<_4, _2>{}, _24{})": "(_2,_3):(_1,_8)",
    "complement(Layout<Shape<_2, _2>, Stride<_1, _6>>{}, _24{})": "(_3,_2):(_2,_12)",
    "logical_divide(Layout<Shape<_4, _2, _3>, Stride<_2, _1, _8>>{}, Layout<_4, _2>{})": (
        "((_2,_2),(_2,_3)):((_4,_1),(_2,_8))"
    ),
    "logical_product(Layout<Shape<_2, _2>, Stride<_4, _1>>{}, Layout<_6, _1>{})": (
        "((_2,_2),(_2,_3)):((_4,_1),(_2,_8))"
    ),
}
# The table of (3,(2,3)):(3,(12,1)) in 01_layout.
HIERARCHICAL = [[0, 12, 1, 13, 2, 14], [3, 15, 4, 16, 5, 17], [6, 18, 7, 19, 8, 20]]

LAYOUTS = (
    """
#include <cute/layout.hpp>
#include <cute/swizzle_layout.hpp>
using namespace cute;
extern "C" __global__ void documented() {
"""
    + "".join(f'  print({expression}); print("\\n");\n' for expression in DOCUMENTED)
    + """
}
extern "C" __global__ void offsets(int* hierarchical, int* swizzled) {
  const Layout layout = make_layout(make_shape(_3{}, make_shape(_2{}, 3)), make_stride(_3{}, make_stride(12, _1{})));
  if (threadIdx.x < size(layout)) hierarchical[threadIdx.x] = layout(threadIdx.x);
  const auto tile = composition(Swizzle<3, 3, 3>{}, Layout<Shape<_64, _64>, Stride<_64, _1>>{});
  for (int i = threadIdx.x; i < size(tile); i += blockDim.x) swizzled[i] = tile(i / 64, i % 64);
}
"""
)


def test_layouts_are_those_of_the_documentation(capfd: pytest.CaptureFixture[str]) -> None:
    module(engine, LAYOUTS).get_function("documented")((1,), (1,), ())
    assert capfd.readouterr().out.split() == list(DOCUMENTED.values())


@on_each_device
def test_offsets_of_a_layout_and_of_a_swizzle(cp: Any) -> None:
    hierarchical, swizzled = cp.zeros(18, np.int32), cp.zeros((64, 64), np.int32)
    module(cp, LAYOUTS).get_function("offsets")((1,), (64,), (hierarchical, swizzled))
    found = np.asarray(hierarchical.get() if hasattr(hierarchical, "get") else hierarchical)
    assert found.reshape(6, 3).T.tolist() == HIERARCHICAL  # the first mode runs fastest
    row, column = np.mgrid[:64, :64]
    expected = row * 64 + (column // 8 ^ row % 8) * 8 + column % 8
    assert np.array_equal(swizzled.get() if hasattr(swizzled, "get") else swizzled, expected)


def test_a_notebook_asks_cute() -> None:
    found = cute_offsets(
        {
            "plain": ("Layout<Shape<_2, _3>, Stride<_3, _1>>{}", 2, 3),
            "column": ("Layout<Shape<_4, _1>, Stride<_2, _0>>{}", 4, 1),
        }
    )
    assert found["plain"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["column"].tolist() == [[0], [2], [4], [6]]


# ---------------------------------------------------------------- atoms

GEMM = cuda_text("cute_engine_gemm")
# No uninitialised variables and no arrays, so that the X-ray needs no second build to look for those
# (tests/test_cute.py has one, for 12).
assert not unset.has_candidates(GEMM)
SHARED = 2 * 64 * (64 + 32)
BUILDS = {"half": "gemm_tile<half_t, 3>", "bfloat16": "gemm_tile<bfloat16_t, 0>"}  # with a swizzle, and without


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(GEMM.splitlines(), start=1) if text in line)


def tile(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return A and B as bits, C = A B^T with A's rows from the 50th on replaced by zeros, and 50."""
    rng = np.random.default_rng(12)
    values = rng.standard_normal((96, 64)).astype(np.float32)
    if dtype == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        bits = values.astype(np.float16).view(np.uint16)
        values = bits.view(np.float16).astype(np.float32)
    values = values.astype(np.float64)
    values[50:64] = 0
    return bits[:64].copy(), bits[64:].copy(), values[:64] @ values[64:].T, 50


@pytest.mark.parametrize("where", BACKENDS)  # not `cp`: NVRTC takes half a minute for these
@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_a_product_through_tiled_copies_and_a_tiled_mma(where: Any, dtype: str) -> None:
    a, b, expected, rows = tile(dtype)
    c = where.zeros((64, 32), np.float32)
    run = module(where, GEMM, tuple(BUILDS.values())).get_function(BUILDS[dtype])
    run(
        (1,),
        (128,),
        (where.asarray(a), where.asarray(b), c, np.int32(rows), np.bool_(True), np.bool_(True)),
        shared_mem=SHARED,
    )
    found = np.asarray(c.get() if hasattr(c, "get") else c)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def seen(build: str, *, waits: bool = True, meets: bool = True) -> Any:
    a, b, _, rows = tile(build)
    run = module(engine, GEMM, tuple(BUILDS.values())).get_function(BUILDS[build])
    args = (
        engine.asarray(a),
        engine.asarray(b),
        engine.zeros((64, 32), np.float32),
        np.int32(rows),
        np.bool_(waits),
        np.bool_(meets),
    )
    return xray(run, (1,), (128,), args, SHARED)


def test_the_xray_counts_by_the_readers_lines() -> None:
    report = seen("half")
    assert report.findings == []
    # ldmatrix: each warp reads its 16 rows of A, and all of B; eight rows of 16 bytes are one wavefront.
    a, b = (report.by_line["kernel.cu", line_of(f"// ldmatrix of {name}")] for name in "AB")
    assert (a.read, a.wavefronts, a.conflicts) == (64 * 64 * 2, 64, 0)
    assert (b.read, b.wavefronts, b.conflicts) == (4 * 32 * 64 * 2, 128, 0)
    # cp.async with zfill: 50 rows are read, 64 are written.
    copied = report.by_line["kernel.cu", line_of("_, m, _));  // A")]
    assert (copied.read, copied.written) == (50 * 128, 64 * 128)


def test_the_xray_sees_bank_conflicts_without_the_swizzle() -> None:
    report = seen("bfloat16")
    assert report.findings == []
    for name, wavefronts in (("A", 64), ("B", 128)):
        figures = report.by_line["kernel.cu", line_of(f"// ldmatrix of {name}")]
        assert figures.wavefronts == 8 * wavefronts  # rows are 128 bytes apart: all eight in the same banks


def test_the_xray_sees_a_missing_barrier_and_a_missing_wait() -> None:
    races = [finding for finding in seen("half", meets=False).findings if finding.kind == "race"]
    assert {line_of("// ldmatrix of A"), line_of("// ldmatrix of B")} <= {
        line for finding in races for line in (finding.line, finding.other_line)
    }
    assert {finding.kind for finding in seen("half", waits=False).findings} == {"not waited for", "never waited for"}


# ---------------------------------------------------------------- the changed copies of headers

ATOM = """#pragma once
#define TRAP asm volatile("brkpt;")
struct Atom {
  static void wait() {
    asm volatile("cp.async.wait_group %0;"
                 :: "n"(1)
                 : "memory");
  }
};
"""


def test_copies_of_headers_keep_their_lines_and_follow_the_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    config, atom = tmp_path / "cute" / "config.hpp", tmp_path / "cute" / "arch" / "atom.hpp"
    atom.parent.mkdir(parents=True)
    config.write_text("#  define CUTE_STL_NAMESPACE cuda::std\n#  define CUTE_STL_NAMESPACE_IS_CUDA_STD\n")
    atom.write_text(ATOM)
    (atom.parent / "plain.hpp").write_text("#pragma once\n")
    flags = cutlass.compiled(["-Ielsewhere", f"-I{tmp_path}"])
    copies = Path(flags[2])
    assert flags == ["-Ielsewhere", "-isystem", str(copies), "-isystem", str(tmp_path)]
    assert sorted(p.name for p in copies.rglob("*.hpp")) == ["atom.hpp", "config.hpp"]  # the others are unchanged
    made = (copies / "cute" / "arch" / "atom.hpp").read_text().splitlines()
    assert made[0] == '#line 1 "cute/arch/atom.hpp"' and len(made) - 1 == len(ATOM.splitlines())
    assert [line for line in made if "asm volatile" in line] == [ATOM.splitlines()[1]]  # the macro's
    assert "engine_async_wait" in made[5] and made[9] == "};"
    assert "CUTE_STL_NAMESPACE std" in (copies / "cute" / "config.hpp").read_text()

    atom.write_text(ATOM + "// another version\n")
    cutlass._copies.cache_clear()
    compiler.name_by_contents.cache_clear()
    assert Path(cutlass.compiled([f"-I{tmp_path}"])[1]) != copies
    cutlass._copies.cache_clear()


# ---------------------------------------------------------------- what is refused

SMALL = '#include <cute/tensor.hpp>\nusing namespace cute;\nextern "C" __global__ void k(float* out) {{\n  {body}\n}}\n'


def small(body: str) -> Any:
    return module(engine, SMALL.format(body=body)).get_function("k")


def test_what_the_engine_lacks_is_named_with_the_readers_line() -> None:
    run = small("__shared__ float s[4]; SM90_TMA_REDUCE_ADD_1D::copy(out, s, 0);")
    with pytest.raises(engine.LaunchError, match=r"kernel\.cu:4: .* does not know the instruction cp\.reduce\.async"):
        run((1,), (1,), (engine.zeros(1, np.float32),))


def test_a_wrong_layout_is_an_error_of_the_readers_line() -> None:
    with pytest.raises(engine.CompileError) as caught:
        small(
            "auto a = make_tensor<float>(Shape<_4, _8>{}); auto c = make_tensor<float>(Shape<_4, _4>{}); gemm(a, c, c);"
        )
    message = str(caught.value)
    assert message.startswith("kernel.cu:4: error: ") and len(message) < 3000


def test_without_the_folder_the_package_is_named() -> None:
    with pytest.raises(
        engine.CompileError, match=r"kernel\.cu:1: error: <cute/tensor\.hpp> belongs to CUTLASS.*-I<folder>"
    ):
        engine.RawModule(code=SMALL.format(body="out[0] = 1;"), options=STD).compile()

"""asm statements on the CPU engine: how they are parsed, what each instruction computes, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

# ------------------------------------------------------------------------------------ functions

FUNCTIONS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "ex2": ("ex2.approx.f32", np.exp2),
    "ex2_ftz": ("ex2.approx.ftz.f32", np.exp2),
    "lg2": ("lg2.approx.f32", np.log2),
    "rcp_ftz": ("rcp.approx.ftz.f32", np.reciprocal),
    "rsqrt_ftz": ("rsqrt.approx.ftz.f32", lambda x: 1 / np.sqrt(x)),
    "sqrt_ftz": ("sqrt.approx.ftz.f32", np.sqrt),
}
PAIRS = {
    "cvt_f16": ("cvt.rn.f16x2.f32", np.float16, False),
    "cvt_bf16": ("cvt.rn.bf16x2.f32", ml_dtypes.bfloat16, False),
    "cvt_relu_f16": ("cvt.rn.relu.f16x2.f32", np.float16, True),
    "cvt_relu_bf16": ("cvt.rn.relu.bf16x2.f32", ml_dtypes.bfloat16, True),
}
EX2_PAIRS = {"ex2_f16": ("ex2.approx.f16x2", np.float16), "ex2_bf16": ("ex2.approx.ftz.bf16x2", ml_dtypes.bfloat16)}


def functions_source() -> str:
    text = ""
    for name, (instruction, _) in FUNCTIONS.items():
        text += f"""
extern "C" __global__ void {name}(const float *x, float *y) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("{instruction} %0, %1;" : "=f"(y[i]) : "f"(x[i]));
}}"""
    for name, (instruction, *_) in PAIRS.items():
        text += f"""
extern "C" __global__ void {name}(const float *high, const float *low, unsigned *y) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm("{instruction} %0, %1, %2;" : "=r"(y[i]) : "f"(high[i]), "f"(low[i]));
}}"""
    for name, (instruction, _) in EX2_PAIRS.items():
        text += f"""
extern "C" __global__ void {name}(const unsigned *x, unsigned *y) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm("{instruction} %0, %1;" : "=r"(y[i]) : "r"(x[i]));
}}"""
    return text


def numbers(n: int = 4096) -> np.ndarray:
    """Make float32 of all sizes, including subnormals, infinities and NaN."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32).view(np.float32).copy()
    x[n // 4 :] = rng.uniform(-140, 140, n - n // 4)
    x[n // 2 :] = -np.exp2(rng.uniform(-30, 6, n - n // 2))
    x[3 * n // 4 :] = rng.uniform(0, 4, n // 4)
    x[:10] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-40, -1e-40, 65520]
    return x


@on_each_device
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(cp: Any, name: str) -> None:
    """Within 2 units in the last place, as the PTX ISA specifies for a GPU; special values are exact."""
    instruction, f = FUNCTIONS[name]
    x = numbers()
    y = cp.zeros(len(x), np.float32)
    compiled(cp, functions_source()).get_function(name)((len(x) // 64,), (64,), (cp.asarray(x), y))
    got = cp.asnumpy(y)
    flush = (lambda v: np.where(np.abs(v) < 2.0**-126, np.copysign(0, v), v)) if ".ftz" in instruction else lambda v: v
    with np.errstate(all="ignore"):
        exact = f(flush(x.astype(np.float64)))
        nearest = flush(exact.astype(np.float32))
        step = np.spacing(np.maximum(np.abs(exact), 2.0**-126).astype(np.float32)).astype(np.float64)
        off = np.abs(got.astype(np.float64) - exact) / step
    special = ~np.isfinite(nearest) | (nearest == 0)
    np.testing.assert_array_equal(got[special], nearest[special])
    near_one = (x > 0.5) & (x < 2) if name == "lg2" else np.zeros(len(x), bool)  # there lg2 has an absolute bound
    assert (off[~special & ~near_one] <= 2).all()
    assert (np.abs(got.astype(np.float64)[near_one] - exact[near_one]) <= 2.0**-22).all()
    if ".ftz" in instruction:
        assert not ((got != 0) & (np.abs(got) < 2.0**-126)).any()
    if name.startswith("ex2"):
        assert got[3] == 0 and got[2] == np.inf and np.isnan(got[4]) and got[0] == 1


@on_each_device
@pytest.mark.parametrize("name", PAIRS)
def test_conversions_of_pairs(cp: Any, name: str) -> None:
    _, dtype, relu = PAIRS[name]
    high, low = numbers(), numbers()[::-1].copy()
    y = cp.zeros(len(high), np.uint32)
    compiled(cp, functions_source()).get_function(name)(
        (len(high) // 64,), (64,), (cp.asarray(high), cp.asarray(low), y)
    )
    got = cp.asnumpy(y)
    for x, bits in ((high, got >> 16), (low, got & 0xFFFF)):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = np.where(relu & (x <= 0), 0, x).astype(np.float32).astype(dtype).view(np.uint16)
        np.testing.assert_array_equal(bits, np.where(np.isnan(x), 0x7FFF, expected))


@on_each_device
@pytest.mark.parametrize("name", EX2_PAIRS)
def test_powers_of_two_of_pairs(cp: Any, name: str) -> None:
    _, dtype = EX2_PAIRS[name]
    x = np.arange(65536, dtype=np.uint32)
    y = cp.zeros(len(x), np.uint32)
    pairs = x | x[::-1] << np.uint32(16)
    compiled(cp, functions_source()).get_function(name)((256,), (256,), (cp.asarray(pairs), y))
    got = cp.asnumpy(y)
    with np.errstate(all="ignore"):
        exact = np.exp2(x.astype(np.uint16).view(dtype).astype(np.float64)).astype(np.float32)
        if dtype is not np.float16:
            exact = np.where(exact < 2.0**-126, 0, exact)
        expected = exact.astype(dtype).view(np.uint16).astype(np.int64)
    number = ~np.isnan(exact)
    assert np.abs((got & 0xFFFF).astype(np.int64) - expected)[number].max() <= 1
    np.testing.assert_array_equal(got & 0xFFFF, (got >> 16)[::-1])
    assert ((got & 0xFFFF)[~number] == 0x7FFF).all()


# ------------------------------------------------------------------------------------ statements

STATEMENTS = cuda_text("engine_ptx_statements")


@on_each_device
def test_integers(cp: Any) -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 96).astype(np.uint32)
    y = cp.zeros(96, np.uint32)
    compiled(cp, STATEMENTS).get_function("integers")((1,), (32,), (cp.asarray(x), y))
    a, b, c = x.reshape(3, 32)
    got = cp.asnumpy(y).reshape(3, 32)
    octets = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], axis=1)
    for lane in range(32):
        picked = 0
        for i in range(4):
            selector = int(c[lane]) >> 4 * i & 15
            value = int(octets[lane, selector & 7])
            picked |= (value if selector < 8 else 255 * (value >> 7)) << 8 * i
        assert got[0, lane] == picked
    np.testing.assert_array_equal(got[1], (a & b) | (a & c) | (b & c))
    np.testing.assert_array_equal(got[2], a ^ b ^ c)


@on_each_device
def test_forms_of_statements(cp: Any) -> None:
    y = cp.full(16, -1, np.int32)
    module = cp.RawModule(code=STATEMENTS, options=("-std=c++17",))  # with its own counter
    module.get_function("forms")((1,), (1,), (y,))
    line = STATEMENTS[: STATEMENTS.index("__LINE__")].count("\n") + 1
    expected = [31, -1, 7, 4, 5, 42, 0, 1, 101, line, 7 + 10 + 100, 1]
    assert cp.asnumpy(y)[:12].tolist() == expected


@on_each_device
def test_special_registers(cp: Any) -> None:
    y = cp.zeros((2, 80, 5), np.uint32)
    compiled(cp, STATEMENTS).get_function("special")((2,), (80,), (y,))
    got, t = cp.asnumpy(y), np.arange(80)
    for block in range(2):
        lane, warp, *others = got[block].T
        np.testing.assert_array_equal([lane, *others], [t % 32, t, 0 * t + block, 0 * t + 80])
        # On a GPU %warpid is a place in the SM: only its equality for all lanes is guaranteed.
        np.testing.assert_array_equal(warp, t // 32 if cp is engine else warp[t // 32 * 32])


@on_each_device
def test_numbered_barriers(cp: Any) -> None:
    x = np.random.default_rng(3).integers(0, 100, (7, 2, 32)).astype(np.int32)
    out = cp.zeros((2, 32), np.int32)
    compiled(cp, STATEMENTS).get_function("pairs")((1,), (128,), (cp.asarray(x), out, np.int32(7)))
    np.testing.assert_array_equal(cp.asnumpy(out), x.sum(0)[:, ::-1])


# ------------------------------------------------------------------------------------ errors


def refused(statement: str, before: str = "") -> str:
    """Return the compiler's message for a kernel with this statement in its third line."""
    code = f'extern "C" __global__ void k(int *a, float *f, long long *w) {{\n{before}\n  {statement}\n}}\n'
    with pytest.raises(engine.CompileError) as caught:
        engine.RawModule(code=code).compile()
    return str(caught.value)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ('asm("mov.b32 %0, %2;" : "=r"(a[0]) : "r"(1));', "no operand %2"),
        ('asm("mov.b32 %0, %1;" :: "r"(a[0]), "r"(1));', 'writes to %0, whose constraint is "r"'),
        ('asm("mov.b32 %0, %1;" : "=r"(a[0]), "=r"(a[1]));', 'reads %1, whose constraint is "=r"'),
        ('asm("mov.b32 %0, x;" : "=r"(a[0]));', "x is no operand and no register"),
        ('asm("bra THERE;");', "no label THERE to jump to"),
        ('asm("{ .reg .pred p; @q mov.b32 %0, 1; }" : "=r"(a[0]));', "q is no predicate of the statement"),
        ('asm("mov.b32 %0, 1; }" : "=r"(a[0]));', "a } without a {"),
        ('asm("mov.b32 %[to], 1;" : [to] "=r"(a[0]));', "its operands cannot be read: [to]"),
        ('asm("lop3.b32 %0, %1, %1, %1, %1;" : "=r"(a[0]) : "r"(1));', "takes a constant where it has %1"),
        ('asm(TEXT : "=r"(a[0]));', "no string literal"),
        ('asm("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, %1;" : "=r"(a[0]) : "r"(1));', "address in brackets"),
    ],
)
def test_what_cannot_be_followed_is_named(statement: str, says: str) -> None:
    message = refused(statement)
    assert message.startswith("kernel.cu:3: `asm(") and says in message, message


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ('asm("mov.b32 %0, %1;" : "=r"(a[0]) : "r"(1.0f));', "than its constraint says"),
        ('asm("mov.b32 %0, %1;" : "=r"(w[0]) : "r"(1));', "than its constraint says"),
        ('asm("mov.f32 %0, %1;" : "=f"(f[0]) : "f"(1.0));', "than its constraint says"),
        ('asm("mov.b32 %0, %1;" : "=l"(w[0]) : "r"(1));', "another size"),
        ('asm("cp.async.wait_group %0;" :: "n"(a[0]));', "constant"),
        ('asm("cp.async.cg.shared.global [%0], [%1], 4;" :: "r"(0), "l"(w));', "cp.async.cg copies 16 bytes"),
    ],
)
def test_operands_of_other_types_are_compile_errors(statement: str, says: str) -> None:
    message = refused(statement)
    assert says in message, message


def test_the_file_of_a_pasted_header_is_named() -> None:
    code = '#line 1 "ptx.cuh"\n__device__ void f() {\n  asm volatile("mov.b32 %0, %1;" :: "r"(1));\n}\n#line 1 "k.cu"\n'
    with pytest.raises(
        engine.CompileError, match=r"^ptx\.cuh:2: `asm volatile\(\"mov.b32 %0, %1;\" .*;` is inline PTX"
    ):
        engine.RawModule(code=code).compile()


UNKNOWN = cuda_text("engine_ptx_unknown")


def test_an_unknown_instruction_stops_who_reaches_it() -> None:
    module, a = engine.RawModule(code=UNKNOWN), engine.zeros(1, np.int32)
    module.get_function("right")((1,), (1,), (a,))
    assert a[0] == 7
    for name, says in (
        ("wrong", "does not know the instruction vote.any.u32. The nearest that it knows: vote.sync."),
        ("almost", "does not know the instruction cp.async.wait_groups. The nearest that it knows: cp.async.wait_"),
        ("strange", "does not know the instruction quux.v9. Say it in another way, in CUDA C++ perhaps, or run this"),
        ("few", "mov.b32 takes 2 operands, not 1. Say it in another way"),
        ("many", "ldmatrix.sync.aligned.m8n8.x2.shared.b16 takes 2 registers where it has {%0}"),
        ("host", 'the constraint "=a" is none of r, l, f, d, h, q, n'),
        ("special", "does not know the special register %total_smem_size"),
    ):
        with pytest.raises(engine.LaunchError) as caught:
            module.get_function(name)((1,), (1,), (a,))
        message = str(caught.value)
        begin = next(i for i, text in enumerate(UNKNOWN.splitlines(), 1) if f"void {name}(" in text)
        line = next(i for i, text in enumerate(UNKNOWN.splitlines(), 1) if i > begin and "asm" in text)
        assert "inline PTX: " in message and says in message and f"kernel.cu:{line}" in message, message


BROKEN = cuda_text("engine_ptx_broken")


@functools.cache
def broken() -> Any:
    return engine.RawModule(code=BROKEN)


@pytest.mark.parametrize(
    ("name", "block", "says"),
    [
        ("nobody_else", 96, "waits in bar.sync 3 at kernel.cu:"),
        ("odd_count", 64, "bar.sync takes a number from 0 to 15"),
        ("misaligned", 32, "misaligned address: ldmatrix takes an address that is a multiple of 16 bytes"),
        ("global_address", 32, "not in shared memory"),
        (
            "half_a_warp",
            32,
            "mma.sync.m16n8k8 (f16) with mask 0xffffffff, and lanes 0xffff0000 of that mask never arrive: "
            "lane 16 waits in __syncthreads() at",
        ),
        ("some_have_left", 32, "needs all 32 lanes of the warp, and lanes 0x00000020 have left"),
        ("small_block", 48, "needs all 32 lanes of the warp, and lanes 0xffff0000 have left the kernel or were never"),
        ("two_operations", 32, "meet in different operations"),
        ("wmma_misaligned", 32, "misaligned address: wmma takes matrices at multiples of 16 bytes"),
        ("wmma_distance", 32, "multiple of 16 bytes"),
        ("wmma_half_a_warp", 32, "wmma::store_matrix_sync needs all 32 lanes"),
        ("wild_load", 32, "illegal read of out["),
    ],
)
def test_errors_at_run_time_name_line_and_thread(name: str, block: int, says: str) -> None:
    with pytest.raises(engine.LaunchError) as caught:
        broken().get_function(name)((1,), (block,), (engine.zeros(1024, np.float32),))
    message = str(caught.value)
    assert says in message and f"[{name}, block (0,0,0), thread (" in message, message
    begin = next(i for i, text in enumerate(BROKEN.splitlines(), 1) if f"void {name}(" in text)
    assert any(f"kernel.cu:{line}" in message for line in range(begin + 1, begin + 5)), message

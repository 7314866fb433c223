"""Tensor cores on the CPU engine: mma.sync, ldmatrix, stmatrix and wmma against exact arithmetic and the ISA's layouts.

The model here uses integers and the ISA's formulas. RECORDED has checksums of the same launches on an H200, and the
engine must give the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4

# ------------------------------------------------------------------------------------ mma.sync

# name -> shape and types, registers of D, A, B, C
MMA = {
    "k16_f16": ("m16n8k16.row.col.f32.f16.f16.f32", 4, 4, 2, 4),
    "k16_bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 4, 2, 4),
    "k16_half": ("m16n8k16.row.col.f16.f16.f16.f16", 2, 4, 2, 2),
    "k8_f16": ("m16n8k8.row.col.f32.f16.f16.f32", 4, 2, 1, 4),
    "k8_bf16": ("m16n8k8.row.col.f32.bf16.bf16.f32", 4, 2, 1, 4),
    "k8_half": ("m16n8k8.row.col.f16.f16.f16.f16", 2, 2, 1, 2),
    "k8_tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 4, 2, 4),
    "k4_tf32": ("m16n8k4.row.col.f32.tf32.tf32.f32", 4, 2, 1, 4),
}
WARPS = 512  # random products of each type


def asm(instruction: str, groups: list[tuple[str, str, int]]) -> str:
    """Write an asm statement: groups of (constraint, array, registers), in braces, in the instruction's order."""
    shown, operands, number = [], [], 0
    for constraint, array, count in groups:
        names = [f"%{number + i}" for i in range(count)]
        shown.append("{" + ", ".join(names) + "}")
        operands.append((constraint, [f'"{constraint}"({array}[{i}])' for i in range(count)]))
        number += count
    outs = ", ".join(", ".join(names) for constraint, names in operands if constraint[0] == "=")
    ins = ", ".join(", ".join(names) for constraint, names in operands if constraint[0] != "=")
    return f'asm volatile("{instruction} {", ".join(shown)};" : {outs} : {ins});'


def mma_source() -> str:
    """Write a kernel of each kind: registers in, registers out."""
    kernels = []
    for name, (types, d, a, b, c) in MMA.items():
        statement = asm(f"mma.sync.aligned.{types}", [("=r", "D", d), ("r", "A", a), ("r", "B", b), ("r", "C", c)])
        kernels.append(f"""
extern "C" __global__ void {name}(const unsigned *a, const unsigned *b, const unsigned *c, unsigned *d) {{
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned A[4], B[2], C[4], D[4] = {{0, 0, 0, 0}};
  for (int i = 0; i < 4; ++i) A[i] = a[t * 4 + i], C[i] = c[t * 4 + i];
  for (int i = 0; i < 2; ++i) B[i] = b[t * 2 + i];
  {statement}
  for (int i = 0; i < 4; ++i) d[t * 4 + i] = D[i];
}}""")
    return "\n".join(kernels)


def random_bits(rng: np.random.Generator, kind: int, n: int, exponent: int, mantissa: int) -> np.ndarray:
    """Draw n random floats of a format, as uint32: of one size, of all, tiny, any bits, mostly zeros, infinities."""
    bits = rng.integers(0, 2 ** (1 + exponent + mantissa), n)
    top, bias = (1 << exponent) - 1, (1 << (exponent - 1)) - 1
    sign, fraction = bits >> (exponent + mantissa), bits & ((1 << mantissa) - 1)
    size = {
        0: bias + rng.integers(-3, 4, n),
        1: rng.integers(1, top, n),
        2: np.where(rng.random(n) < 0.4, 0, bias + rng.integers(-6, 3, n)),
        3: bits >> mantissa & top,
        4: np.where(rng.random(n) < 0.7, 0, bias + rng.integers(-10, 10, n)),
        5: np.full(n, bias),
        6: bias + rng.integers(-bias // 4 - 8, bias // 4 + 8, n),
        7: np.where(rng.random(n) < 0.02, top, bias + rng.integers(-3, 4, n)),
    }[kind]
    if kind in (2, 4, 7):
        fraction = np.where(rng.random(n) < 0.5, 0, fraction)
    return (sign << (exponent + mantissa) | np.clip(size, 0, top) << mantissa | fraction).astype(np.uint32)


def formats(name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (exponent, mantissa) bits of the factors and of the accumulators."""
    factors = {"f16": (5, 10), "half": (5, 10), "bf16": (8, 7), "tf32": (8, 10)}[name.split("_")[1]]
    return factors, (5, 10) if name.endswith("half") else (8, 23)


def mma_inputs(name: str) -> list[np.ndarray]:
    """Make registers a (WARPS, 32, 4), b (WARPS, 32, 2), c (WARPS, 32, 4): each eighth of the warps of another kind."""
    rng = np.random.default_rng(sum(map(ord, name)))
    factors, sums = formats(name)
    found = []
    for width, (exponent, mantissa) in ((4, factors), (2, factors), (4, sums)):
        pair = exponent + mantissa < 16
        rows = [random_bits(rng, k % 8, 32 * width * (1 + pair), exponent, mantissa) for k in range(WARPS)]
        bits = np.stack(rows).reshape(WARPS, 32, width, 1 + pair)
        if mantissa == 10 and exponent == 8:  # tf32 ignores the last 13 bits of a float
            bits = bits << 13 | rng.integers(0, 1 << 13, bits.shape).astype(np.uint32)
        found.append(np.ascontiguousarray(bits[..., 0] | bits[..., -1] << 16 if pair else bits[..., 0]))
    found[2][WARPS // 2 :: 2] = 0  # products without addends
    return found


def half_of(words: np.ndarray, half: int) -> np.ndarray:
    return words >> np.uint32(16 * half) & np.uint32(0xFFFF)


def matrices(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert registers to bits of the matrices A (n, 16, K), B (n, K, 8), C (n, 16, 8), by the ISA's formulas."""
    _, _, in_a, in_b, in_c = MMA[name]
    K = int(name[1:].split("_")[0])
    A, B, C = (np.zeros((len(a), *shape), np.uint32) for shape in ((16, K), (K, 8), (16, 8)))
    if name.endswith("tf32"):
        for i in range(in_a):
            A[:, G + i % 2 * 8, T + i // 2 * 4] = a[:, :, i] >> np.uint32(13)
        for i in range(in_b):
            B[:, T + 4 * i, G] = b[:, :, i] >> np.uint32(13)
    else:
        for half in range(2):
            for i in range(in_a):
                A[:, G + i % 2 * 8, 2 * T + half + i // 2 * 8] = half_of(a[:, :, i], half)
            for i in range(in_b):
                B[:, 2 * T + half + 8 * i, G] = half_of(b[:, :, i], half)
    for i in range(4):
        C[:, G + i // 2 * 8, 2 * T + i % 2] = c[:, :, i] if in_c == 4 else half_of(c[:, :, i // 2], i % 2)
    return A, B, C


def result(name: str, d: np.ndarray) -> np.ndarray:
    """Convert the registers D to bits of the matrix (n, 16, 8)."""
    D = np.zeros((len(d), 16, 8), np.uint32)
    for i in range(4):
        D[:, G + i // 2 * 8, 2 * T + i % 2] = d[:, :, i] if MMA[name][1] == 4 else half_of(d[:, :, i // 2], i % 2)
    return D


def values(bits: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    """Convert bits of a format to float64."""
    as_float = bits.astype(np.uint32) << np.uint32(23 - mantissa) if exponent == 8 else None
    if as_float is not None:
        return as_float.view(np.float32).astype(np.float64)
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def parts(bits: np.ndarray, exponent: int, mantissa: int) -> tuple[np.ndarray, np.ndarray]:
    """Split into the significand as a signed integer, and the exponent; zero gets a very small one."""
    bits = bits.astype(np.int64)
    biased, fraction = bits >> mantissa & ((1 << exponent) - 1), bits & ((1 << mantissa) - 1)
    significand = np.where(biased > 0, fraction | 1 << mantissa, fraction)
    power = np.where(significand == 0, -2000, np.maximum(biased, 1) - (1 << (exponent - 1)) + 1)
    return np.where(bits >> (exponent + mantissa), -significand, significand), power


def shifted(x: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Compute x * 2**left, truncating the magnitude."""
    magnitude, left = np.abs(x), np.clip(left, -63, 40)
    moved = np.where(left >= 0, magnitude << np.maximum(left, 0), magnitude >> np.maximum(-left, 0))
    return np.sign(x) * moved


def tensor_core(name: str, A: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    """Compute D = A B + C in bits, as on compute capability 9.0: cut 25 bits below the top exponent, summed, cut."""
    factors, sums = formats(name)
    (a, ea), (b, eb), (c, ec) = parts(A, *factors), parts(B, *factors), parts(C, *sums)
    product, power = a[:, :, None] * b.swapaxes(1, 2)[:, None], ea[:, :, None] + eb.swapaxes(1, 2)[:, None]
    top = np.maximum(np.maximum(power.max(-1), ec), -133)
    total = shifted(product, 25 - 2 * factors[1] - (top[..., None] - power)).sum(-1)
    total += shifted(c, 25 - sums[1] - (top - ec))
    exact = np.ldexp(total.astype(np.float64), (top - 25).astype(np.int32))
    with np.errstate(all="ignore"):
        plain = values(A, *factors)[:, :, :, None] * values(B, *factors)[:, None]
        plain = plain.sum(2) + values(C, *sums)  # the result for infinities and NaN
        exact = np.where(np.isfinite(plain), exact, plain)
        if sums == (5, 10):
            bits = exact.astype(np.float16).view(np.uint16).astype(np.uint32)
            bits = np.where(bits == 0x8000, 0, bits)
            return np.where(np.isnan(exact), 0x7FFF, bits)
        near = exact.astype(np.float32)
        away = (np.abs(near.astype(np.float64)) > np.abs(exact)) & (np.abs(exact) < 2.0**128)
        cut = np.where(away, np.nextafter(near, np.float32(0)), near) + np.float32(0)
    return np.where(np.isnan(exact), 0x7FFFFFFF, cut.view(np.uint32))


def run_mma(cp: Any, name: str) -> np.ndarray:
    d = cp.zeros((WARPS, 32, 4), np.uint32)
    given = [cp.asarray(x) for x in mma_inputs(name)]
    compiled(cp, mma_source()).get_function(name)((WARPS // 4,), (128,), (*given, d))
    return cp.asnumpy(d)


@on_each_device
@pytest.mark.parametrize("name", MMA)
def test_mma_gives_the_bits_of_the_model(cp: Any, name: str) -> None:
    expected = tensor_core(name, *matrices(name, *mma_inputs(name)))
    got = result(name, run_mma(cp, name))
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(values(got, *formats(name)[1])).any()


@pytest.mark.parametrize("name", MMA)
def test_mma_of_ordinary_numbers_is_near_the_exact_one(name: str) -> None:
    """Each of the K + 1 terms loses less than 2**-25 of the largest exponent, the result less than its last bit."""
    factors, sums = formats(name)
    A, B, C = (m[::8] for m in matrices(name, *mma_inputs(name)))
    got = values(result(name, run_mma(engine, name))[::8], *sums)
    a, b, c = values(A, *factors), values(B, *factors), values(C, *sums)
    exact = np.einsum("nik,nkj->nij", a, b) + c
    largest = np.maximum(np.max(np.abs(a[:, :, :, None] * b[:, None]), axis=2), np.abs(c))
    bound = (A.shape[2] + 1) * largest * 2.0**-24 + np.abs(exact) * 2.0 ** -(sums[1])
    assert (np.abs(got - exact) <= bound).all()


# ------------------------------------------------------------------------------------ ldmatrix, stmatrix


def matrix_source() -> str:
    """Write ldmatrix and stmatrix: lane l passes the address of row rows[l]; lanes whose address is unused pass 1."""
    kernels = []
    for n in (1, 2, 4):
        names = ", ".join(f"%{i}" for i in range(n))
        for trans in ("", ".trans"):
            outs = ", ".join(f'"=r"(D[{i}])' for i in range(n))
            ins = ", ".join(f'"r"(D[{i}])' for i in range(n))
            stored = ", ".join(f"%{i + 1}" for i in range(n))
            title = f"x{n}{trans[1:]}"
            kernels.append(f"""
extern "C" __global__ void ld{title}(const unsigned *in, const int *rows, unsigned *out) {{
  extern __shared__ __align__(128) unsigned s[];
  int t = threadIdx.x;
  for (int i = t; i < 256; i += 32) s[i] = in[i];
  __syncthreads();
  unsigned D[4] = {{0, 0, 0, 0}}, row = t < 8 * {n} ? (unsigned)__cvta_generic_to_shared(s + 4 * rows[t]) : 1;
  asm volatile("ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{names}}}, [%{n}];" : {outs} : "r"(row) : "memory");
  for (int i = 0; i < 4; ++i) out[4 * t + i] = D[i];
}}
extern "C" __global__ void st{title}(const unsigned *in, const int *rows, unsigned *out) {{
  __shared__ __align__(16) unsigned s[256];
  int t = threadIdx.x;
  unsigned D[4], row = t < 8 * {n} ? (unsigned)__cvta_generic_to_shared(s + 4 * rows[t]) : 1;
  for (int i = t; i < 256; i += 32) s[i] = 0;
  for (int i = 0; i < 4; ++i) D[i] = in[4 * t + i];
  __syncthreads();
  asm volatile("stmatrix.sync.aligned.m8n8.x{n}{trans}.shared::cta.b16 [%0], {{{stored}}};"
               :: "r"(row), {ins} : "memory");
  __syncthreads();
  for (int i = t; i < 256; i += 32) out[i] = s[i];
}}""")
    return "\n".join(kernels)


def fragments(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """Compute the result of ldmatrix: from rows (n, 8, 8) of 16-bit numbers, (32, n) words."""
    source = rows.swapaxes(1, 2) if transposed else rows
    low, high = source[:, G, 2 * T].astype(np.uint32), source[:, G, 2 * T + 1].astype(np.uint32)
    return (low | high << 16).T


@on_each_device
@pytest.mark.parametrize("trans", ["", "trans"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ldmatrix_and_stmatrix(cp: Any, n: int, trans: str) -> None:
    rng = np.random.default_rng(n)
    memory = rng.integers(0, 2**32, 256).astype(np.uint32)
    rows = rng.permutation(64)[:32].astype(np.int32)
    module = compiled(cp, matrix_source())
    out = cp.zeros((32, 4), np.uint32)
    module.get_function(f"ldx{n}{trans}")((1,), (32,), (cp.asarray(memory), cp.asarray(rows), out), shared_mem=1024)
    taken = memory.view(np.uint16).reshape(64, 8)[rows[: 8 * n]].reshape(n, 8, 8)
    np.testing.assert_array_equal(cp.asnumpy(out)[:, :n], fragments(taken, bool(trans)))
    assert not cp.asnumpy(out)[:, n:].any()

    registers = rng.integers(1, 2**32, (32, 4)).astype(np.uint32)
    written = cp.zeros(256, np.uint32)
    module.get_function(f"stx{n}{trans}")((1,), (32,), (cp.asarray(registers), cp.asarray(rows), written))
    there = cp.asnumpy(written).view(np.uint16).reshape(64, 8)
    np.testing.assert_array_equal(fragments(there[rows[: 8 * n]].reshape(n, 8, 8), bool(trans)), registers[:, :n])
    assert not np.delete(there, rows[: 8 * n], axis=0).any()


# ------------------------------------------------------------------------------------ wmma

SHAPES = [(16, 16, 16), (32, 8, 16), (8, 32, 16)]
WMMA = cuda_text("engine_tensor_wmma")
PRODUCTS = [("__half", "float"), ("__half", "__half"), ("__nv_bfloat16", "float")]
WMMA_NAMES = (
    *(f"factors<{t}, {m}, {n}, {k}>" for t in ("__half", "__nv_bfloat16") for m, n, k in SHAPES),
    *(f"sums<{t}, {m}, {n}, {k}>" for t in ("__half", "float") for m, n, k in SHAPES),
    *(f"product<{t}, {s}, {m}, {n}, {k}>" for t, s in PRODUCTS for m, n, k in SHAPES),
)


def wmma(cp: Any, name: str) -> Any:
    return compiled(cp, WMMA, WMMA_NAMES).get_function(name)


def tall(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (row, k) of each element of a lane: the factor with 16 rows for each mma."""
    return [(G + i // 2 % 2 * 8 + i // 8 * 16, 2 * T + i % 2 + i // 4 % 2 * 8) for i in range(rows // 2)]


def wide(columns: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (k, column) of each element of a lane: the factor with 8 columns for each mma."""
    return [(2 * T + i % 2 + i // 2 % 2 * 8, G + i // 4 * 8) for i in range(columns // 2)]


def place(use: str, shape: tuple[int, int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (row, column) of each distinct element of a lane's fragment, by the layouts of m16n8k16."""
    m, n, _ = shape
    flipped = m == 8  # the transposes: D' = B' A'
    if use == "a":
        return [(c, k) for k, c in wide(m)] if flipped else tall(m)
    if use == "b":
        return [(k, r) for r, k in tall(n)] if flipped else wide(n)
    if flipped:
        return [(2 * T + i % 2, G + i // 2 % 2 * 8 + i // 4 * 16) for i in range(8)]
    if m == 32:
        return [(G + i // 2 % 2 * 8 + i // 4 * 16, 2 * T + i % 2) for i in range(8)]
    return [(G + i // 2 % 2 * 8, 2 * T + i % 2 + i // 4 * 8) for i in range(8)]


@on_each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("in_shared", [0, 1], ids=["global", "shared"])
@pytest.mark.parametrize("dtype", ["__half", "__nv_bfloat16"])
def test_lanes_of_factors(cp: Any, dtype: str, in_shared: int, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    out = cp.full((4, 32, 32), -1, np.int32)
    memory = cp.zeros(512, np.float16 if dtype == "__half" else ml_dtypes.bfloat16)
    wmma(cp, f"factors<{dtype}, {m}, {n}, {k}>")((1,), (32,), (out, memory, np.int32(in_shared)))
    told = cp.asnumpy(out)
    for number, (use, rows, columns) in enumerate((("a", m, k), ("a", m, k), ("b", k, n), ("b", k, n))):
        elements = place(use, shape)
        index = [r * columns + c if number % 2 == 0 else c * rows + r for r, c in elements]
        held = 16 if dtype == "__half" else len(elements)  # __half: each element twice, up to 16
        expected = np.stack([index[i % len(index)] for i in range(held)], axis=1)
        np.testing.assert_array_equal(told[number][:, :held], expected)
        assert (told[number][:, held:] == -1).all()
        assert len(np.unique(expected)) == rows * columns


@on_each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["__half", "float"])
def test_lanes_of_accumulators(cp: Any, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    out = cp.full((2, 32, 32), -1, np.int32)
    wmma(cp, f"sums<{dtype}, {m}, {n}, {k}>")((1,), (32,), (out,))
    elements = place("c", shape)
    for told, index in zip(
        cp.asnumpy(out), ([r * n + c for r, c in elements], [c * m + r for r, c in elements]), strict=True
    ):
        np.testing.assert_array_equal(told[:, :8], np.stack(index, axis=1))
        assert (told[:, 8:] == -1).all()


def wmma_case(name: str, seed: int) -> Iterator[np.ndarray]:
    """Make A, the transpose of B, and C for 64 products."""
    rng = np.random.default_rng(seed)
    dtype, sums = name.split("<")[1].split(", ")[:2]
    m, n, k = map(int, name[:-1].split(", ")[-3:])
    types = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16, "float": np.float32}
    for shape, kind in (((64, m, k), dtype), ((64, n, k), dtype), ((64, m, n), sums)):
        yield (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, shape))).astype(types[kind])


def run_wmma(cp: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    a, b, c = wmma_case(name, len(name))
    m, n = c.shape[1:]
    d, ones = cp.zeros((64, n, m + 8), c.dtype), cp.zeros((m, n), c.dtype)
    wmma(cp, name)((64,), (32,), (cp.asarray(a), cp.asarray(b), cp.asarray(c), d, ones))
    return cp.asnumpy(d), cp.asnumpy(ones)


@on_each_device
@pytest.mark.parametrize("name", [name for name in WMMA_NAMES if name.startswith("product")])
def test_wmma_products(cp: Any, name: str) -> None:
    a, b, c = wmma_case(name, len(name))
    d, ones = run_wmma(cp, name)
    kind = "k16_half" if c.dtype == np.float16 else "k16_f16" if a.dtype == np.float16 else "k16_bf16"
    word = np.uint16 if c.dtype == np.float16 else np.uint32
    expected = tensor_core(
        kind, a.view(np.uint16), b.view(np.uint16).swapaxes(1, 2), np.ascontiguousarray(c).view(word)
    )
    m = c.shape[1]
    np.testing.assert_array_equal(d[:, :, :m].swapaxes(1, 2).copy().view(word), expected)
    assert not d[:, :, m:].astype(np.float32).any() and (ones == 1).all()


# ------------------------------------------------------------------------------------ an H200's results


# name -> checksums of the inputs and of the result
RECORDED = {
    "k16_f16": (3043622222, 1099094064),
    "k16_bf16": (2778507910, 1917277163),
    "k16_half": (2587512546, 1264566166),
    "k8_f16": (2734762872, 3625796465),
    "k8_bf16": (510189044, 3716592066),
    "k8_half": (924785442, 1750782682),
    "k8_tf32": (3101772636, 963875049),
    "k4_tf32": (1761533917, 2542687227),
    "product<__half, float, 16, 16, 16>": (1332124252, 1558734185),
    "product<__half, float, 32, 8, 16>": (1684695948, 3957341886),
    "product<__half, float, 8, 32, 16>": (1710759881, 1523911510),
    "product<__half, __half, 16, 16, 16>": (808173072, 3906475402),
    "product<__half, __half, 32, 8, 16>": (1921878531, 3507749437),
    "product<__half, __half, 8, 32, 16>": (2286676717, 2265550769),
    "product<__nv_bfloat16, float, 16, 16, 16>": (3631071272, 4148841846),
    "product<__nv_bfloat16, float, 32, 8, 16>": (986967359, 613955708),
    "product<__nv_bfloat16, float, 8, 32, 16>": (1801621998, 304546527),
}


def checksums(cp: Any, name: str) -> tuple[int, int]:
    """Hash the inputs and the result of a kernel above, for comparison with RECORDED."""
    inputs = mma_inputs(name) if name in MMA else list(wmma_case(name, len(name)))
    result = run_mma(cp, name) if name in MMA else run_wmma(cp, name)[0]
    return zlib.crc32(b"".join(x.tobytes() for x in inputs)), zlib.crc32(result.tobytes())


@pytest.mark.parametrize("name", RECORDED)
def test_the_bits_are_those_of_an_h200(name: str) -> None:
    inputs, result = checksums(engine, name)
    if inputs != RECORDED[name][0]:
        pytest.skip("NumPy's random numbers are others here")
    assert result == RECORDED[name][1]

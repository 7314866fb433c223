"""Inline PTX of warps and blocks: forms of statements, shuffles and votes, barriers, branches, tensor cores."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine

# ------------------------------------------------------------------------------------ forms of statements

WRITTEN = cuda_text("engine_ptx_warp_written")


@on_each_device
def test_statements_as_people_write_them(cp: Any) -> None:
    x = np.arange(100, 132, dtype=np.int32)
    y = cp.zeros((5, 32), np.int32)
    compiled(cp, WRITTEN).get_function("written")((1,), (32,), (cp.asarray(x), y))
    t = np.arange(32)
    line = next(i for i, text in enumerate(WRITTEN.splitlines(), 1) if "__LINE__" in text)
    expected = [x + 10, 0 * t + line, t + 8, 3 * t, 0 * t + 7 + 100 + 32]
    np.testing.assert_array_equal(cp.asnumpy(y), expected)


@on_each_device
def test_loops_and_exits(cp: Any) -> None:
    """The kernel counts the steps of "half, or three times and one" that lead to 1."""

    def steps(n: int) -> int:
        return 0 if n <= 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    x = np.arange(1, 33, dtype=np.uint32)
    y = cp.zeros((2, 32), np.uint32)
    compiled(cp, WRITTEN).get_function("loops")((1,), (32,), (cp.asarray(x), y))
    expected = np.array([steps(int(n)) for n in x])
    np.testing.assert_array_equal(cp.asnumpy(y), [expected, expected <= 40])


def test_an_error_in_a_macro_names_the_line_of_its_use() -> None:
    macro = '#define BAD(x) \\\n  asm volatile("mov.b32 x, %0;" \\\n  :: "r"(x))\n'
    code = macro + 'extern "C" __global__ void k(int *a) {\n  BAD(a[0]);\n}\n'
    with pytest.raises(
        engine.CompileError, match=r"^kernel\.cu:5: `BAD\(a\[0\]\);` is inline PTX, and x is no operand"
    ):
        engine.RawModule(code=code).compile()


def test_macros_of_the_options_and_of_the_users_headers(tmp_path: Any) -> None:
    text = '#include <cuda_fp16.h>\n#define SET(x) asm("mov.b32 %0, " NUMBER ";" : "=r"(x))\n'
    (tmp_path / "own.cuh").write_text(text)
    (tmp_path / "shared.cuh").write_text("#include <cuda_fp16.h>\n#define SHARED extern __shared__ int s[]\n")
    includes = '#include <stdlib.h>\n#include <algorithm>\n#include "own.cuh"\n'
    code = includes + 'extern "C" __global__ void k(int *a) {\n  SET(a[0]);\n}\n'
    for number in (5, 6):
        y = engine.zeros(1, np.int32)
        options = (f"-I{tmp_path}", f'-DNUMBER="{number}"')
        engine.RawModule(code=code, options=options).get_function("k")((1,), (1,), (y,))
        assert y[0] == number
    code = '#include "shared.cuh"\nextern "C" __global__ void k(int *a) {\n  SHARED;\n  s[1] = 3;\n  a[0] = s[1];\n}\n'
    engine.RawModule(code=code, options=(f"-I{tmp_path}",)).get_function("k")((1,), (1,), (y,), shared_mem=8)
    assert y[0] == 3


# ------------------------------------------------------------------------------------ lanes

LANES = cuda_text("engine_ptx_warp_lanes")


@on_each_device
@pytest.mark.parametrize("c", [0x1F, 0x181F, 0x1C00, 0x0F])
def test_shuffles(cp: Any, c: int) -> None:
    rng = np.random.default_rng(c)
    x, by = rng.integers(0, 2**32, 32).astype(np.uint32), rng.integers(0, 32, 32).astype(np.uint32)
    y = cp.zeros(9 * 32, np.uint32)
    args = (cp.asarray(x), y, cp.asarray(by), cp.asarray(np.array([c], np.uint32)))
    compiled(cp, LANES).get_function("shuffles")((1,), (32,), args)
    got = cp.asnumpy(y)
    segments, limit = c >> 8 & 31, c & 31
    for i, mode in enumerate(("up", "down", "bfly", "idx")):
        for lane in range(32):
            first, b = lane & segments, int(by[lane])
            last = first | (limit & ~segments)
            source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segments)}[mode]
            inside = source >= last if mode == "up" else source <= last
            assert got[64 * i + 32 + lane] == inside, (mode, lane)
            assert got[64 * i + lane] == x[source if inside else lane], (mode, lane)
    np.testing.assert_array_equal(got[256:], x[np.arange(32) ^ 1])


@on_each_device
def test_votes_matches_and_masks(cp: Any) -> None:
    x = np.random.default_rng(1).integers(0, 8, 32).astype(np.uint32)
    y = cp.zeros((13, 32), np.uint32)
    compiled(cp, LANES).get_function("votes")((1,), (32,), (cp.asarray(x), y))
    got, ones, t = cp.asnumpy(y), np.ones(32, np.uint32), np.arange(32)
    assert (got[0] == sum(int(v > 3) << i for i, v in enumerate(x))).all()
    np.testing.assert_array_equal(got[1:3], [ones, ones])
    assert got[3].tolist() == [sum(int(v == u) << i for i, u in enumerate(x)) for v in x]
    assert (got[4] == 2**32 - 1).all() and (got[5] == 1).all()
    assert (got[6] == x.sum()).all() and (got[7] == x.max()).all() and (got[8] == np.bitwise_xor.reduce(x)).all()
    assert (got[9] == 2**32 - 1).all() and got[10].sum() == 1
    assert (got[11] == 2**32 - 1).all()
    assert got[12].tolist() == [((2 << int(i)) - 1 - (2**32 - (1 << int(i)))) % 2**32 for i in t]


@on_each_device
def test_special_registers_of_blocks(cp: Any) -> None:
    y, w = cp.zeros((6, 8, 4), np.uint32), cp.zeros(48, np.uint64)
    compiled(cp, LANES).get_function("registers")((3,), (8, 6), (y, w), shared_mem=512)
    got = cp.asnumpy(y)
    assert (got[..., 0] == np.arange(6)[:, None]).all() and (got[..., 1:] == [6, 3, 512]).all()
    assert (cp.asnumpy(w) == 1).all()


@on_each_device
def test_barriers_that_count(cp: Any) -> None:
    x = (np.arange(64) % 3).astype(np.int32)
    y = cp.zeros((3, 64), np.int32)
    compiled(cp, LANES).get_function("counts")((1,), (64,), (cp.asarray(x), y))
    np.testing.assert_array_equal(cp.asnumpy(y), np.array([[(x > 0).sum()], [0], [1]]) * np.ones((1, 64), int))


# ------------------------------------------------------------------------------------ tensor cores

SHAPES = {
    # M, K, bits, the types of A and B, more
    "s8_16": (8, 16, 8, "s8", "s8", ""),
    "u8_s8_16": (16, 16, 8, "u8", "s8", ""),
    "s8_32": (16, 32, 8, "s8", "u8", ""),
    "s8_sat": (16, 32, 8, "s8", "s8", ".satfinite"),
    "s4_32": (8, 32, 4, "s4", "u4", ""),
    "u4_64": (16, 64, 4, "u4", "s4", ""),
    "b1_and": (16, 256, 1, "b1", "b1", ".and.popc"),
    "b1_xor": (8, 128, 1, "b1", "b1", ".xor.popc"),
}


def products_source() -> str:
    code = ""
    for name, (m, k, bits, a, b, more) in SHAPES.items():
        chunks, tall = k * bits // 128, m // 8
        n_a, n_b, n_c = chunks * tall, chunks, 2 * tall
        tail = f".s32.{a}.{b}.s32" + (more if bits == 1 else "")
        middle = "" if bits == 1 else more
        regs = [f"%{i}" for i in range(n_c + n_a + n_b)]
        d_text, a_text, b_text = (
            "{" + ", ".join(part) + "}" for part in (regs[:n_c], regs[n_c : n_c + n_a], regs[n_c + n_a :])
        )
        outs = ", ".join(f'"+r"(d[{i}])' for i in range(n_c))
        ins = ", ".join(
            [f'"r"(a[lane * {n_a} + {i}])' for i in range(n_a)] + [f'"r"(b[lane * {n_b} + {i}])' for i in range(n_b)]
        )
        code += f"""
extern "C" __global__ void product_{name}(const int *a, const int *b, int *c) {{
  int lane = threadIdx.x, *d = c + lane * {n_c};
  asm volatile("mma.sync.aligned.m{m}n8k{k}.row.col{middle}{tail} {d_text}, {a_text}, {b_text}, {d_text};"
               : {outs} : {ins});
}}"""
    return code


PRODUCTS_SOURCE = products_source()


def unpacked(words: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    """Return words with their numbers along a new last axis."""
    shifted = (words.astype(np.uint32)[..., None] >> (np.arange(0, 32, bits)).astype(np.uint32)) & np.uint32(
        2**bits - 1
    )
    values = shifted.astype(np.int64)
    return np.where(signed & (values >= 2 ** (bits - 1)), values - 2**bits, values)


@on_each_device
@pytest.mark.parametrize("name", SHAPES)
def test_integer_products(cp: Any, name: str) -> None:
    m, k, bits, a_type, b_type, more = SHAPES[name]
    rng = np.random.default_rng(2)
    chunks, tall = k * bits // 128, m // 8
    a, b = (rng.integers(0, 2**32, (32, n)).astype(np.uint32) for n in (chunks * tall, chunks))
    big = 2**31 - 2000 if "sat" in more else 1000
    c = rng.integers(big - 900, big, (32, 2 * tall)).astype(np.int32)
    d = cp.asarray(c)
    args = (cp.asarray(a.view(np.int32)), cp.asarray(b.view(np.int32)), d)
    compiled(cp, PRODUCTS_SOURCE).get_function(f"product_{name}")((1,), (32,), args)
    lanes, per = np.arange(32), 32 // bits
    g, t = lanes // 4, lanes % 4
    left, right, start = np.zeros((m, k), np.int64), np.zeros((k, 8), np.int64), np.zeros((m, 8), np.int64)
    got = np.zeros((m, 8), np.int64)
    a_values, b_values = unpacked(a, bits, a_type[0] == "s"), unpacked(b, bits, b_type[0] == "s")
    for lane in lanes:
        for i in range(chunks * tall):
            first = (i // tall) * 4 * per + t[lane] * per
            left[g[lane] + 8 * (i % tall), first : first + per] = a_values[lane, i]
        for i in range(chunks):
            first = i * 4 * per + t[lane] * per
            right[first : first + per, g[lane]] = b_values[lane, i]
        for i in range(2 * tall):
            place = g[lane] + 8 * (i // 2), 2 * t[lane] + i % 2
            start[place], got[place] = c[lane, i], cp.asnumpy(d)[lane, i]
    if bits == 1:
        expected = start + np.array([[(x & y if "and" in more else x ^ y).sum() for y in right.T] for x in left])
    else:
        expected = start + left @ right
    if "sat" in more:
        expected = np.clip(expected, -(2**31), 2**31 - 1)
        assert (expected == 2**31 - 1).any()
    np.testing.assert_array_equal(got, expected)


EIGHTS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
EIGHT_SOURCE = "".join(
    f"""
extern "C" __global__ void eight_{a}_{b}(const unsigned *a, const unsigned *b, float *c) {{
  int lane = threadIdx.x;
  float *d = c + lane * 4;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}},\\n"
               "  {{%8, %9}}, {{%0, %1, %2, %3}};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[lane * 4]), "r"(a[lane * 4 + 1]), "r"(a[lane * 4 + 2]), "r"(a[lane * 4 + 3]),
                 "r"(b[lane * 2]), "r"(b[lane * 2 + 1]));
}}"""
    for a in EIGHTS
    for b in EIGHTS
)


@on_each_device
@pytest.mark.parametrize("a_type", EIGHTS)
@pytest.mark.parametrize("b_type", EIGHTS)
def test_products_of_eight_bits(cp: Any, a_type: str, b_type: str) -> None:
    """Small whole numbers, whose sums are exact."""
    rng = np.random.default_rng(4)
    a = rng.integers(-7, 8, (32, 16)).astype(EIGHTS[a_type])
    b = rng.integers(-7, 8, (32, 8)).astype(EIGHTS[b_type])
    c = rng.integers(-50, 50, (32, 4)).astype(np.float32) / 4
    d = cp.asarray(c)
    args = (cp.asarray(a.view(np.uint8).view(np.uint32)), cp.asarray(b.view(np.uint8).view(np.uint32)), d)
    compiled(cp, EIGHT_SOURCE).get_function(f"eight_{a_type}_{b_type}")((1,), (32,), args)
    left, right = np.zeros((16, 32)), np.zeros((32, 8))
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(4):
            first = i // 2 * 16 + 4 * t
            left[g + 8 * (i % 2), first : first + 4] = a[lane, 4 * i : 4 * i + 4]
        for i in range(2):
            first = 16 * i + 4 * t
            right[first : first + 4, g] = b[lane, 4 * i : 4 * i + 4]
    product = left @ right
    got = cp.asnumpy(d)
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            assert got[lane, i] == c[lane, i] + product[row, column]


MORE = cuda_text("engine_ptx_warp_more")


@on_each_device
def test_products_of_doubles(cp: Any) -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(-99, 99, n).astype(np.float64) for n in (32, 32, 64))
    d = cp.asarray(c)
    compiled(cp, MORE).get_function("doubles")((1,), (32,), (cp.asarray(a), cp.asarray(b), d))
    product = a.reshape(8, 4) @ b.reshape(8, 4).T
    np.testing.assert_array_equal(cp.asnumpy(d).reshape(8, 8), c.reshape(8, 8) + product)


@on_each_device
def test_moved_matrix(cp: Any) -> None:
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    y = cp.zeros(32, np.uint32)
    compiled(cp, MORE).get_function("moved")((1,), (32,), (cp.asarray(x.reshape(-1).view(np.uint32)), y))
    np.testing.assert_array_equal(cp.asnumpy(y).view(np.uint16).reshape(8, 8), x.T)


@on_each_device
def test_modifiers_in_another_order_and_registers_left_out(cp: Any) -> None:
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    y = cp.zeros(320, np.uint32)
    compiled(cp, MORE).get_function("orders")((1,), (32,), (cp.asarray(x.reshape(-1).view(np.uint32)), y))
    got = cp.asnumpy(y)[:256].view(np.uint16).reshape(8, 8, 8)
    np.testing.assert_array_equal(got[:4], x)
    np.testing.assert_array_equal(got[4:6], x[:2].transpose(0, 2, 1))
    np.testing.assert_array_equal(got[6:], x[1::2])
    np.testing.assert_array_equal(cp.asnumpy(y)[256:].view(np.float32), np.repeat([1.5, 2.0], 32))

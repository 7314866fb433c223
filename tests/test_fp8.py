"""Arrays to e4m3 and back: every case of rounding, against the format's definition."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from helpers.attention import check, reference
from helpers.attention.fp8 import (
    E4M3,
    dequantise,
    descale_of,
    hadamard,
    minus_mean,
    quantise,
)

# The 127 finite numbers that are not negative: subnormals in steps of 2^-9, then eight for each power of 2.
BYTES = np.arange(127)
NUMBERS = np.where(BYTES < 8, BYTES * 2.0**-9, (8 + BYTES % 8) * 2.0 ** (BYTES // 8 - 10))


def by_definition(x: np.ndarray) -> np.ndarray:
    """Return the byte of the nearest number; of two equally near ones, the even byte."""
    x = x.astype(np.float64)
    size = np.minimum(np.abs(np.nan_to_num(x, nan=0.0, posinf=1e9, neginf=-1e9)), 448.0)
    low = np.minimum(np.searchsorted(NUMBERS, size, side="right") - 1, 125)
    below, above = size - NUMBERS[low], NUMBERS[low + 1] - size
    found = low + ((above < below) | ((above == below) & (low % 2 == 1)))
    return np.where(np.isnan(x), 0x7F, found | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


EVERY = np.arange(1 << 16, dtype=np.uint16)
# Rounding changes at numbers that bfloat16 can represent: these and the float32 next to them are all cases.
FLOATS = (EVERY.astype(np.uint32)[:, None] << 16 | np.array([0, 1, 0x8000, 0xFFFF], np.uint32)).view(np.float32)


@pytest.mark.parametrize(
    "x", [EVERY.view(np.float16), EVERY.view(ml_dtypes.bfloat16), FLOATS], ids=["float16", "bfloat16", "float32"]
)
def test_every_number_is_rounded_to_the_nearest_even(x: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(quantise(x), by_definition(x))
        if x.dtype == np.float32:
            np.testing.assert_array_equal(quantise(x.astype(np.float64)), by_definition(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_every_byte_comes_back(dtype: type) -> None:
    every = np.arange(256, dtype=np.uint8)
    for given in (every, every.view(E4M3)):
        back = dequantise(given, dtype=dtype)
        assert back.dtype == dtype and np.isnan(back[[0x7F, 0xFF]].astype(float)).all()
        values = back.astype(np.float64)
        np.testing.assert_array_equal(values[:127], NUMBERS)
        np.testing.assert_array_equal(values[128:255], -NUMBERS)
        assert np.signbit(values[128])
        finite = every % 128 != 127
        np.testing.assert_array_equal(quantise(back)[finite], every[finite])


def test_a_scale_of_each_row() -> None:
    x = np.random.default_rng(3).standard_normal((4, 5, 64)).astype(np.float32) * 100
    descale = np.abs(x).max(-1, keepdims=True) / 448
    back = dequantise(quantise(x, descale), descale)
    assert back.shape == x.shape
    np.testing.assert_allclose(back, x, rtol=2**-4, atol=float(descale.max()) * 2**-10)
    np.testing.assert_array_equal((quantise(x, descale) & 0x7F).max(-1), 0x7E)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="x is of int64: e4m3 is made of float32"):
        quantise(np.arange(3))
    with pytest.raises(TypeError, match="x is of float32: e4m3 comes as uint8 bytes"):
        dequantise(np.zeros(3, np.float32))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axis, shape", [(None, (1, 1, 1)), ((1, 2), (3, 1, 1)), (-1, (3, 5, 1))])
def test_a_descale_makes_the_largest_448(axis: int | tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    x = 3 * normal(3, 5, 16)
    descale = descale_of(x, axis)
    assert descale.shape == shape and descale.dtype == np.float32
    back = dequantise(quantise(x, descale), dtype=np.float64)
    np.testing.assert_array_equal(np.abs(back).max(axis=axis, keepdims=True), np.full(shape, 448.0))


def test_the_descale_of_zeros_is_one() -> None:
    np.testing.assert_array_equal(descale_of(np.zeros((2, 3, 4)), (1, 2)), np.ones((2, 1, 1)))


def test_attention_does_not_change_with_the_mean_of_k_or_a_rotation() -> None:
    q, k, v = normal(2, 7, 32), normal(2, 40, 32, seed=1) + 5, normal(2, 40, 32, seed=2)
    expected, rotation = reference.attention(q, k, v), hadamard(32, seed=3)
    np.testing.assert_allclose(minus_mean(k).mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(reference.attention(q, minus_mean(k), v), expected, atol=2e-6)
    np.testing.assert_allclose(reference.attention(q @ rotation, k @ rotation, v), expected, atol=1e-5)
    np.testing.assert_array_equal(minus_mean(k.swapaxes(0, 1), axis=0), minus_mean(k).swapaxes(0, 1))


@pytest.mark.parametrize("d, seed", [(1, None), (2, None), (64, None), (128, 0)])
def test_a_hadamard_matrix_is_orthogonal(d: int, seed: int | None) -> None:
    matrix = hadamard(d, seed)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix), d**-0.5, rtol=1e-6)


def test_other_sizes_of_hadamard_matrices_are_refused() -> None:
    for d in (0, 12, -2):
        with pytest.raises(ValueError, match=f"d is {d}"):
            hadamard(d)


def test_what_is_expected_of_a_kernel() -> None:
    """The numbers that bytes and descales stand for, with heads that share keys, and rows that see none."""
    shapes = (1, 9, 4, 32), (1, 6, 2, 32), (1, 6, 2, 32)
    q, k, v = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    descales = [descale_of(a, (1, 3)) for a in (q, k, v)]
    e4m3 = [quantise(a, descale) for a, descale in zip((q, k, v), descales, strict=True)]
    by_head = {f"{name}_descale": d[:, 0, :, 0] for name, d in zip("qkv", descales, strict=True)}
    expected = check.expect(*e4m3, **by_head, causal=True)
    wide = [dequantise(a, d, np.float64).swapaxes(1, 2) for a, d in zip(e4m3, descales, strict=True)]
    o = reference.attention(wide[0], *(a.repeat(2, axis=1) for a in wide[1:]), causal=True)
    np.testing.assert_allclose(expected.o.swapaxes(1, 2), o, atol=1e-12)
    assert 0.005 < expected.tolerance < 0.3 and expected.lse.shape == (1, 4, 9)
    np.testing.assert_array_equal(expected.o[:, :3], 0)

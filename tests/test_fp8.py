"""Arrays to e4m3 and back: every case of rounding, against the format's definition."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from helpers.attention.fp8 import E4M3, dequantise, quantise

# The 127 finite numbers that are not negative: subnormals in steps of 2^-9, then eight for each power of 2.
BYTES = np.arange(127)
NUMBERS = np.where(BYTES < 8, BYTES * 2.0**-9, (8 + BYTES % 8) * 2.0 ** (BYTES // 8 - 10))


def by_definition(x: np.ndarray) -> np.ndarray:
    """The byte of the nearest number; of two that are as near, the even byte."""
    x = x.astype(np.float64)
    size = np.minimum(np.abs(np.nan_to_num(x, nan=0.0, posinf=1e9, neginf=-1e9)), 448.0)
    low = np.minimum(np.searchsorted(NUMBERS, size, side="right") - 1, 125)
    below, above = size - NUMBERS[low], NUMBERS[low + 1] - size
    found = low + ((above < below) | ((above == below) & (low % 2 == 1)))
    return np.where(np.isnan(x), 0x7F, found | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


EVERY = np.arange(1 << 16, dtype=np.uint16)
# Where rounding changes lies a number that bfloat16 has too: the float32 beside all of those are all cases.
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

"""Notebooks 15 and 15b measure in NumPy how much precision a number's parts keep, and three products of them."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.bench.studies import tf32 as study
from helpers.lesson import split_products as split

RNG = np.random.default_rng(15)


@pytest.mark.parametrize("parts, bits", [(split.tf32_parts, 23), (split.fp16_parts, 22), (split.bf16_parts, 16)])
def test_two_parts_keep_so_many_bits(parts, bits: int) -> None:
    x = RNG.uniform(1, 2, 10_000).astype(np.float32)
    hi, lo = parts(x)
    error = np.abs(hi + lo - x).max()
    assert 2.0 ** (-bits - 3) < error <= 2.0**-bits
    assert np.abs(lo).max() <= 2.0**-8 and np.abs(hi - x).max() <= 2.0 ** -(8 if bits == 16 else 11)


def test_fp16_loses_what_is_far_below_the_largest_of_its_tile() -> None:
    for below, error in ((8, 2**-23), (20, 2**-19)):
        x = np.append(np.float32(1), (RNG.uniform(1, 2, 1000) * 2.0**-below).astype(np.float32))
        hi, lo = split.fp16_parts(x)
        off = (np.abs(hi + lo - x) / x)[1:].max()
        assert error / 4 < off <= error


def test_three_products_are_nearly_those_of_float32() -> None:
    q, k = RNG.standard_normal((2, 64, 64))
    errors = {parts: split.error_of_scores(parts, q, k) for parts in (None, split.tf32_parts, split.bf16_parts)}
    assert errors[split.tf32_parts] < 2 * errors[None] and errors[split.bf16_parts] > 5 * errors[split.tf32_parts]
    columns = np.exp2(-np.linspace(0, 36, 64).round())  # large columns of Q meet small ones of K
    spread = {parts: split.error_of_scores(parts, q * columns, k / columns) for parts in errors}
    assert split.error_of_scores(split.fp16_parts, q * columns, k / columns) > 100 * spread[split.tf32_parts]


def test_recorded_errors_are_found_by_kernel_and_case() -> None:
    row = {"name": "15", "head_dim": 64, "scale": 1, "positive": True, "keys": 1024, "max": 2e-7}
    errors = study.largest_errors({"errors": [row, {**row, "name": "05", "max": 3e-7}]})
    assert errors["05"] == {study.ErrorCase(64, 1, True, 1024): 3e-7} and set(errors) == {"15", "05"}
    recorded = study.largest_errors()
    assert set(recorded["15"]) == set(recorded["05"]) and min(case.keys for case in recorded["15"]) >= 1024

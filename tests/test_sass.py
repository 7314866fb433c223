"""Recorded SASS is read as it was written, and supports the conclusions of notebooks 06 and 15."""

from __future__ import annotations

import pytest

from helpers.bench import sass


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fragments_of_bfloat16_take_four_loads(head_dim: int) -> None:
    half, brain = (sass.instance("06", dtype, head_dim)["counts"] for dtype in ("float16", "bfloat16"))
    assert half["LDSM"] and not half["LD"] and not half["MOVM"]
    assert brain["LD"] == 4 * half["LDSM"] and not brain["LDSM"] and brain["MOVM"]
    assert all(half[kind] == brain[kind] for kind in ("HMMA", "LDS", "STS", "LDG", "STG"))


def test_tables() -> None:
    table = sass.counts_table("06").splitlines()
    assert table[1].split() == ["float16", "bfloat16"] and any(line.split() == ["LDSM", "14", "0"] for line in table)
    assert sum("MOVM" in line for line in sass.excerpt("06", "bfloat16").splitlines()) == 4
    with pytest.raises(KeyError, match="float32"):
        sass.instance("06", "float32")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_splits_of_15_are_three_instructions_for_each_element_of_a_warp(head_dim: int) -> None:
    found = sass.instance("15", "float32", head_dim)
    counts, sizes = found["counts"], found["defines"]
    rows, keys = sizes["BLOCK_M"] // sizes["WARPS"], sizes["BLOCK_N"]
    assert counts["HMMA"] == 3 * 2 * rows * keys * head_dim // (16 * 8 * 8)
    assert found["splits"] == (rows * head_dim + 2 * keys * head_dim + rows * keys) // 32
    assert all(found["splits"] <= counts[kind] for kind in ("LOP3", "IADD3, VIADD", "FADD"))

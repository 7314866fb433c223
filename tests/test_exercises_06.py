"""Typical answers to the exercises of notebook 06."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

TABLE = {
    "06_row_of_scores": (
        Wrong(
            "no wait after the store",
            (("S_STRIDE, tc::mem_row_major);\n    __syncwarp();", "S_STRIDE, tc::mem_row_major);"),),
            "X-ray",
            "race: ",
            "race",
        ),
        Wrong(
            "zeros count", (("first + j < N_kv ? softmax_scale", "true ? softmax_scale"),), "awkward", "lse at", "tail"
        ),
        Wrong("K is not transposed", (("tc::col_major", "tc::row_major"),), "first", "lse at", "wrong"),
        Wrong("K from the first column on", (("K_smem + k", "K_smem"),), "awkward", "d = 64"),
        Wrong("stored by columns", (("tc::mem_row_major", "tc::mem_col_major"),), "first", "lse at"),
        Wrong("another stride", (("S_smem, S, S_STRIDE", "S_smem, S, 16"),), "first", "lse at"),
        Wrong(
            "not added up",
            (
                (
                    "tc::mma_sync(S, q_frag, k_frag, S);",
                    "tc::fill_fragment(S, 0.0f);\n      tc::mma_sync(S, q_frag, k_frag, S);",
                ),
            ),
            "awkward",
            "d = 64",
        ),
        Wrong(
            "nothing stored",
            (("tc::store_matrix_sync(S_smem, S, S_STRIDE, tc::mem_row_major);", ""),),
            "X-ray",
            "uninitialised: ",
            "unset",
        ),
        Wrong(
            "the last key left out",
            (("first + j < N_kv ? softmax_scale", "first + j < N_kv - 1 ? softmax_scale"),),
            "first",
            "lse at",
        ),
        Wrong("Q twice", (("k_frag, K_smem + k", "k_frag, Q_smem + k"),), "first", "lse at", "wrong"),
        Right(
            "a block's barrier",
            (
                (
                    "S_STRIDE, tc::mem_row_major);\n    __syncwarp();",
                    "S_STRIDE, tc::mem_row_major);\n    __syncthreads();",
                ),
            ),
        ),
        Right(
            "the loop ends at the last key",
            (
                ("lane < 16 && j < 16", "lane < 16 && j < 16 && first + j < N_kv"),
                (
                    "first + j < N_kv ? softmax_scale * S_smem[lane * S_STRIDE + j] : NEG_INF",
                    "softmax_scale * S_smem[lane * S_STRIDE + j]",
                ),
            ),
        ),
    )
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)

"""Typical answers to the exercises of notebook 13: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

PANELS, STEP = "wgmma_descriptor(smem_address(Q_smem), 64 * 128)", "step = i * 16 * 128 / 16"
FENCE = "      async_proxy_fence();\n"
BULK, BACK = "        bulk_add(", "      if (i + 1 < tiles) named_barrier_arrive(EMPTY, 160);\n"
LATE = "      if (threadIdx.x == 128) tma_store_wait_read<0>();\n"
WAIT, COMMIT = "tma_store_wait_read<0>();", "        tma_store_commit();\n"

TABLE = {
    "13_mn_major": (
        Wrong("no distance", ((PANELS, "wgmma_descriptor(smem_address(Q_smem))"),), "first", "dK", "panels"),
        Wrong("in units of 16 bytes", ((PANELS, PANELS.replace("128)", "128 / 16)")),), "first", "dK", "panels"),
        Wrong("twice as far", ((PANELS, PANELS.replace("64 * 128", "2 * 64 * 128")),), "first", "", "bounds"),
        Wrong("the step of S", ((STEP, "step = 2 * i"),), "first", "dK", "step"),
        Wrong(
            "the address of the next panel",
            ((PANELS, PANELS.replace("64 * 128)", "smem_address(Q_smem[1]))")),),
            "first",
        ),
        Wrong("from the second panel on", ((PANELS, PANELS.replace("(Q_smem)", "(Q_smem[1])")),), "first"),
        Wrong("as many as rows", ((STEP, "step = 16 * i"),), "first", "The step is wrong", "step"),
        Wrong("in bytes", ((STEP, "step = i * 16 * 128"),), "first", "", "bounds"),
        Right("the same numbers", ((PANELS, PANELS.replace("64 * 128", "8192")), (STEP, "step = 128 * i"))),
        Right(
            "by the addresses",
            ((PANELS, PANELS.replace("64 * 128", "smem_address(Q_smem[1]) - smem_address(Q_smem[0])")),),
        ),
    ),
    "13_find_the_fence": (
        Wrong("as it was", ((FENCE, ""), (WAIT, "")), "first", "", "fence"),
        Wrong("no fence", ((FENCE, ""),), "X-ray", "no proxy fence", "fence"),
        Wrong("the fence of one thread", ((FENCE, "      if (threadIdx.x == 0)" + FENCE[5:]),), "X-ray", "", "fence"),
        Wrong("a barrier in its place", ((FENCE, "      __syncthreads();\n"),), "first", "", "deadlock"),
        Wrong("waits before it adds", ((WAIT, ""), (BULK, WAIT + "\n" + BULK)), "first", "", "race"),
        Wrong("waits after the tile is given back", ((WAIT, ""), (BACK, BACK + LATE)), "X-ray", "", "race"),
        Wrong("no wait", ((WAIT, ""),), "first", "", "race"),
        Wrong(
            "twice",
            ((COMMIT, f"{COMMIT}        bulk_add(dQ + 512 * i, smem_address(tile), 2048);\n{COMMIT}"),),
            "first",
        ),
        Right("until the addition is done", ((WAIT, "tma_store_wait();"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)

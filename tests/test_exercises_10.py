"""Typical answers to the exercises of notebook 10: each wrong one fails in its row, other right forms pass."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

EMPTY, FULL = "parity = (tile / STAGES & 1) ^ 1;", "parity = tile / STAGES & 1;"
ARRIVE = "    mbarrier_arrive(empty + 8 * stage);\n"
WAIT_FULL = "    mbarrier_wait(full + 8 * stage, parity);\n"
READ = "    for (int r = 0; r < ROWS; ++r) sum += "
STAGE = "stage = tile % STAGES;"
FIELDS = "swizzle_128b << 62 | eight_rows << 32 | address / 16"

TABLE = {
    "10_ring": (
        Wrong("empty waited for as full is", ((EMPTY, FULL),), "first", "deadlock", "deadlock"),
        Wrong("full waited for as empty is", ((FULL, EMPTY),), "X-ray", "not waited for", "wait"),
        Wrong("the parity of the tile", ((FULL, "parity = tile & 1;"),), "X-ray"),
        Wrong("the parity of the stage", ((FULL, "parity = stage & 1;"),), "X-ray"),
        Wrong("always the first phase", ((EMPTY, "parity = 1;"),), "X-ray"),
        Wrong("nobody gives a stage back", ((ARRIVE, ""),), "first", "64 more arrivals", "deadlock"),
        Wrong("one thread gives it back", ((ARRIVE, "    if (column == 0)" + ARRIVE[3:]),), "first", "deadlock"),
        Wrong("given back before it is read", ((ARRIVE, ""), (WAIT_FULL, WAIT_FULL + ARRIVE)), "X-ray", "race", "race"),
        Wrong("the wrong barrier is arrived at", ((ARRIVE, ARRIVE.replace("empty", "full")),), "first"),
        Wrong(
            "one stage for all tiles",
            (
                (STAGE, "stage = 0;"),
                (STAGE, "stage = 0;"),
                (EMPTY, "parity = tile & 1 ^ 1;"),
                (FULL, "parity = tile & 1;"),
            ),
            "limit",
            "copies in flight at first: 1",
        ),
        Wrong(
            "stages and phases exchanged",
            ((STAGE, "stage = tile / STAGES % STAGES;"), (STAGE, "stage = tile / STAGES % STAGES;")),
            "first",
        ),
        Right("in other words", ((EMPTY, "parity = tile / STAGES % 2 == 0;"), (FULL, "parity = tile / STAGES % 2;"))),
        Right("bits", ((FULL, "parity = (tile / STAGES) & 1;"), (EMPTY, "parity = ((tile + STAGES) / STAGES) & 1;"))),
    ),
    "10_descriptor": (
        Wrong("the address in bytes", ((FIELDS, FIELDS.replace(" / 16", "")),), "first", "bounds"),
        Wrong("the distance in bytes", (("8 * 128 / 16", "8 * 128"),), "first"),
        Wrong("the distance of one row", (("8 * 128 / 16", "128 / 16"),), "first"),
        Wrong("no swizzle", (("swizzle_128b << 62 | ", ""),), "first"),
        Wrong("another swizzle", (("swizzle_128b = 1", "swizzle_128b = 2"),), "first"),
        Wrong("the distance in the other field", (("eight_rows << 32", "eight_rows << 16"),), "first"),
        Wrong("the first columns four times", (("step = i * 16 * 2 / 16", "step = 0"),), "first"),
        Wrong("a step in elements", (("step = i * 16 * 2 / 16", "step = i * 16"),), "first"),
        Wrong("a step of 8 columns", (("step = i * 16 * 2 / 16", "step = i"),), "first"),
        Wrong("the header's function", ((FIELDS, "wgmma_descriptor(address)"),), "limit", "wgmma_descriptor: 1"),
        Right("sums", ((FIELDS, "(swizzle_128b << 62) + (eight_rows << 32) + (address >> 4)"),)),
        Right("masked as the manual has it", ((FIELDS, FIELDS.replace("address", "(address & 0x3ffff)")),)),
        Right("numbers", ((FIELDS, "0x4000004000000000ull | address / 16"), ("i * 16 * 2 / 16", "2 * i"))),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)

"""The recorded SASS of 07's tile loop: how it is extracted, and that it is the code that Nsight Compute counted."""

from __future__ import annotations

import pytest

from helpers.attention.ladder.steps import by_number, ideas
from helpers.bench import counters, sass_loop
from helpers.bench.sass_loop import Instruction
from helpers.bench.steps import RENAMED

# address, opcode, text: a loop of four lines, one of which a branch skips; a copy that a branch skips stays.
LISTING = [
    Instruction(0x00, "MOV", "MOV R0, R1"),
    Instruction(0x10, "HMMA", "HMMA R0, R1, R2, R0"),
    Instruction(0x20, "BRA", "@P0 BRA `(.L_x_2)"),
    Instruction(0x30, "FSEL", "FSEL R0, R1, R2, P0"),
    Instruction(0x40, "BRA", "@P1 BRA `(.L_x_3)"),
    Instruction(0x50, "LDGSTS", "LDGSTS [R0], [R2]"),
    Instruction(0x60, "HMMA", "HMMA R4, R1, R2, R4"),
    Instruction(0x70, "BRA", "@P0 BRA `(.L_x_1)"),
    Instruction(0x80, "EXIT", "EXIT"),
]
LABELS = {".L_x_1": 0x10, ".L_x_2": 0x40, ".L_x_3": 0x60}


def test_the_tile_loop_is_cut_out() -> None:
    assert [i.address for i in sass_loop.tile_loop(LISTING, LABELS)] == [0x10, 0x20, 0x40, 0x50, 0x60, 0x70]


@pytest.mark.parametrize(
    "text, moves",
    [("IMAD.MOV.U32 R1, RZ, RZ, R2", True), ("MOV R1, R2", True), ("IMAD.MOV.U32 R1, RZ, RZ, 0x4", False)],
)
def test_moves(text: str, moves: bool) -> None:
    assert sass_loop.is_move(Instruction(0, "IMAD", text)) == moves


def test_the_record_is_of_steps_of_today() -> None:
    """In order; newer steps are missing."""
    record = sass_loop.recorded()
    assert record is not None
    recorded = [row["idea"] for row in record["steps"]]
    first = ideas("flash_mma").index(sass_loop.FIRST)
    assert recorded == [idea for idea in (*ideas("flash_mma")[first:-1], sass_loop.STAGE) if idea in recorded]
    assert record["excerpts"].keys() == sass_loop.EXCERPTS.keys()
    for row in record["steps"]:
        assert sum(row["opcodes"].values()) == row["instructions"]
        # 2 products of 32 rows, 64 keys and 128 columns
        assert row["opcodes"]["HMMA"] == 2 * 32 * 64 * sass_loop.HEAD_DIM // (16 * 8 * 16)


def test_the_record_counts_what_nsight_compute_counted() -> None:
    """Instructions of a warp per tile; the counted ones include the prologue, the epilogue and rare code."""
    counted = counters.recorded()
    assert counted is not None
    numbers = dict(zip(ideas("flash_mma"), by_number("flash_mma"), strict=True))
    rows = [row for row in counted["rows"] if row.get("of") == "flash_mma" or row["stage"] == "flash_mma"]
    compared = 0
    for row in rows:
        idea = row.get("idea")
        number = numbers[RENAMED.get(("flash_mma", idea), idea)] if idea else max(numbers.values())
        instructions = sass_loop.instructions(number)
        if instructions is not None and row["shape"][3] == sass_loop.HEAD_DIM:
            tiles = 16 * (4096 // 32) * (4096 // 64)  # heads, warps, tiles
            # 1 % less, because some texts have changed slightly since they were counted.
            assert 0.99 * instructions < row["figures"]["instructions"] / tiles < 1.06 * instructions, row["stage"]
            compared += 1
    assert compared >= len(sass_loop.recorded()["steps"]) - 3  # the newest steps were not counted yet


def test_a_table_and_excerpts() -> None:
    lines = sass_loop.table(("HMMA", "moves")).splitlines()
    assert len(lines) == 1 + len(sass_loop.recorded()["steps"])
    assert lines[-1].split()[-2:] == ["256", "3"]
    assert "HMMA" in sass_loop.excerpt("second product") and "MOV" in sass_loop.excerpt("register moves")

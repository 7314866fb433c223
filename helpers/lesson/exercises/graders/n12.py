"""The exercise of notebook 12: layouts of CuTe's without bank conflicts."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.graders.n10 import name_symptom
from helpers.lesson.exercises.trial import Trial, exercise

CHUNK = (
    "Chunks of 8 elements must stay together: columns are neighbours, and bits 0 to 2 of the offset stay.",
    "M is the lowest bit that is changed: 3 keeps the 8 elements of a chunk where they are.",
)


@exercise(
    "12_swizzle_layout",
    minutes=12,
    hints={
        "half tile": (
            "Write the offset of (row, column) in bits: columns are bits 0 to 4, rows from bit 5 on. Which are banks?",
            "A bank has 2 elements, so bits 1 to 5 are the bank: the row's lowest bit and two chunk bits are in it.",
            "Rows 0, 2, 4 and 6 need different chunk bits: bits 3 and 4, each with the row's bit 1 or 2: 3 places up.",
        ),
        "float tile": (
            "A column has 32 elements, and their offsets are column + 32 row: one bank. How many bits is a bank?",
            "Bits 0 to 4 of the offset are the bank. Where is the row? All five of its bits have to come in.",
        ),
        "bounds": "A padded row needs more memory than the tile has. Permute within the tile: Swizzle<B, M, S>.",
        "compile": (
            "Is it a number that CuTe has no name for? _33 is Int<33>; _1, _2, _32 and some others have names.",
            "B bits from M on and B bits from M + S on must not overlap, so S is at least B.",
        ),
        "chunk": CHUNK,
        "": CHUNK,
    },
)
def swizzle_layout(trial: Trial) -> None:
    for n in trial.sizes("N", 32, 45, 1):
        _, k, _ = trial.inputs(1, n, 32, np.float16)
        o, transposed = trial.empty(n, 32), trial.empty(32, n)
        try:
            trial.launch("tiles", blocks(n, 32), 32, k, o, transposed, n)
        finally:
            if trial.report and trial.report.findings[:1] and trial.report.findings[0].kind == "misaligned":
                name_symptom(trial, "chunk")
        trial.expect("O", o, k.astype(np.float32))
        trial.expect("T", transposed, k.astype(np.float32).T)
    if trial.report:
        for array, tile in (("K_smem", "half tile"), ("F_smem", "float tile")):
            conflicts = trial.figures(array).conflicts
            trial.limit(f"bank conflicts of {array}", conflicts, exactly=0, symptom=tile)

"""Grader of notebook 12: CuTe layouts without bank conflicts."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import blocks
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("12_swizzle_layout", minutes=12)
def swizzle_layout(trial: Trial) -> None:
    for n in trial.sizes("N", 32, 45, 1):
        _, k, _ = trial.inputs(1, n, 32, np.float16)
        o, transposed = trial.empty(n, 32), trial.empty(32, n)
        try:
            trial.launch("tiles", blocks(n, 32), 32, k, o, transposed, n)
        finally:
            if trial.report and trial.report.findings[:1] and trial.report.findings[0].kind == "misaligned":
                trial.blame("chunk", everywhere=True)
        trial.expect("O", o, k.astype(np.float32))
        trial.expect("T", transposed, k.astype(np.float32).T)
    if trial.report:
        for array, tile in (("K_smem", "half tile"), ("F_smem", "float tile")):
            conflicts = trial.figures(array).conflicts
            trial.limit(f"bank conflicts of {array}", conflicts, exactly=0, symptom=tile)

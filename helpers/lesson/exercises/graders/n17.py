"""Grader of notebook 17: which keys a row sees in a step of zigzag."""

from __future__ import annotations

import numpy as np

from helpers.attention.ring_schedules import positions
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("17_zigzag", minutes=10)
def zigzag(trial: Trial) -> None:
    """Test all steps of all ranks: 4 ranks, a number that is not a power of two, and a single rank."""
    first = 4, 6
    for ranks, n in trial.sizes("ranks, n", first, (3, 10), (5, 2), (1, 8)):
        _, _, v = trial.inputs(1, ranks * n, 64)
        where = [positions("zigzag", ranks, rank, n) for rank in range(ranks)]
        for step in range(ranks):
            for rank in range(ranks):
                source = (rank - step) % ranks
                o, asked = trial.empty(n, 64), trial.empty(1, dtype=np.int32)
                trial.launch("add_seen", n, 64, v[where[source]], o, asked, n, rank, ranks, step)
                at = f"{trial.size}, rank {rank}, step {step}"
                noted = trial.xp.asnumpy(asked).astype(np.float64)
                trial.expect("asked", noted, np.array([float(source)]), at=at, symptom="source")
                seen = where[source][None, :] <= where[rank][:, None]
                symptom = "own" if source == rank else "before" if source < rank else "behind"
                trial.expect("O", o, seen @ v[where[source]].astype(np.float64), at=at, symptom=symptom)
    if trial.report:
        ranks, n = first
        tokens = ranks * n
        pairs = tokens * (tokens + 1) // 2
        read = sum(report.traffic["V"].read for report in trial.reports)
        trial.limit("bytes of V read, all ranks and steps", read, at_most=4 * 64 * pairs)

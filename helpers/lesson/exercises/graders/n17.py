"""The exercise of notebook 17: which keys a row sees in a step of zigzag."""

from __future__ import annotations

import numpy as np

from helpers.attention.ring import positions
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "17_zigzag",
    minutes=10,
    hints={
        "source": (
            "These keys are not the noted rank's. Each step moves keys on by one rank: which rank had them first?",
            "After one step a rank has the keys of the rank before it, and rank 0 has those of the last rank.",
            "source = (rank - step + ranks) % ranks: in C++ the remainder of a negative number is negative.",
        ),
        "own": (
            "It goes wrong in step 0, with the rank's own keys: two chunks, in their order in the sequence.",
            "Own key j is at or before own row i exactly if j <= i, whichever chunks they are in.",
            "if (source == rank) end = row + 1;",
        ),
        "before": (
            "It goes wrong with keys of a rank before this one. Its front chunk is before all rows of this rank; and "
            "where is its back chunk?",
            "Rank s < r has chunk 2 ranks - 1 - s at its back: behind both chunks of rank r.",
            "else if (source < rank) end = half;",
        ),
        "behind": (
            "It goes wrong with keys of a rank after this one. Where are its chunks, relative to this rank's two?",
            "Chunks s and 2 ranks - 1 - s with s > r are both between chunks r and 2 ranks - 1 - r.",
            "else end = row < half ? 0 : n;",
        ),
        "limit": "A row of V that is not seen is not read, not even to be multiplied by 0: end the loop before it.",
        "": (
            "Three cases: own keys, keys of a rank before this one, keys of a rank behind it. Draw chunks for 2 ranks.",
            "In two of the three cases, a row sees all keys of a chunk or none.",
        ),
    },
)
def zigzag(trial: Trial) -> None:
    """Test all steps of all ranks: 4 ranks, a number that is no power of two, and one alone."""
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

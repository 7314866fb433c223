"""The exercises of notebook 13: Q as a right operand that is summed over rows, and the fence before a bulk addition."""

from __future__ import annotations

import numpy as np

from helpers.lesson.exercises.graders.expected import product
from helpers.lesson.exercises.graders.n10 import name_symptom, tensor_map_of
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "13_mn_major",
    minutes=8,
    only_cc=90,
    hints={
        "panels": (
            "The step is right, and so are columns 0 to 63 of dK. Where does the product find columns 64 to 127 of Q?",
            "The next panel begins where this one ends: it has 64 rows of 128 bytes.",
            "wgmma_descriptor(smem_address(Q_smem), 64 * 128): this argument counts bytes.",
        ),
        "step": (
            "The step is wrong: a product takes 16 rows of Q. How many bytes further do the next 16 rows begin?",
            "A row of a panel has 128 bytes, and an address in a descriptor counts 16 bytes.",
            "A step adds 16 * 128 / 16, so that step i adds 128 * i.",
        ),
        "bounds": (
            "A product reads past the tile. The first argument's address and the step count 16 bytes, the panels' "
            "distance counts bytes.",
            "The distance of the panels is 64 * 128 bytes, and step i adds i * 16 * 128 / 16.",
        ),
        "limit": "Four products for each tile: 16 rows each.",
        "": "Four products of 16 rows: in each of them, where does the next panel begin? And the next 16 rows?",
    },
)
def mn_major(trial: Trial) -> None:
    for n in trial.sizes("N", 128, 70, 1):
        q, ds, _ = (a.astype(np.float16) for a in trial.inputs(n, n, 128))
        ds = ds[:, :64].copy()
        q_on_device, dk, expected = trial.xp.asarray(q), trial.empty(64, 128), product(ds.T, q)
        symptom = ""
        try:
            trial.launch("gradient", 1, 128, tensor_map_of(trial, q_on_device, 64), trial.xp.asarray(ds), dk, n)
            tolerance = 1e-3 * max(1.0, float(np.abs(expected).max()))
            left = np.abs(trial.xp.asnumpy(dk)[:, :64] - expected[:, :64])
            symptom = "panels" if left.max() <= tolerance else "step"
            trial.expect("dK", dk, expected, tolerance=tolerance)
        finally:
            kinds = [finding.kind for finding in trial.report.findings[:1]] if trial.report else []
            name_symptom(trial, symptom or ("step" if kinds == ["misaligned"] else "bounds"))
    if trial.report:
        products = sum(event.kind == "product" for event in trial.report.events)
        trial.limit("products", products, exactly=8)


@exercise(
    "13_find_the_fence",
    minutes=7,
    only_cc=90,
    hints={
        "fence": (
            "TMA reaches shared memory by another path than ordinary stores: what makes those visible there?",
            "Each thread that has written fences its own stores, before it tells others that the tile is there.",
            "async_proxy_fence(); before the named_barrier_arrive.",
        ),
        "race": (
            "The X-ray names an addition that reads the tile while others write it. Who may write again, and when?",
            "An addition that is started has not read its tile. Which line of hopper.cuh waits for that?",
            "tma_store_wait_read<0>(); after the commit, before the tile is given back.",
        ),
        "limit": "One bulk addition of 2048 bytes for each block and tile.",
        "": (
            "Nothing waits for the addition: it may still read its tile when the next one is written.",
            "tma_store_wait_read<0>() waits until all groups that this thread has committed have read their tiles.",
        ),
    },
)
def find_the_fence(trial: Trial) -> None:
    first = 3, 4
    for blocks, tiles in trial.sizes("blocks, tiles", first, (2, 1), (1, 5)):
        parts, _, _ = trial.inputs(blocks, 1, 512 * tiles)
        dq, expected = trial.xp.zeros((tiles, 512), np.float32), parts.astype(float).sum(0).reshape(tiles, 512)
        trial.launch("add_tiles", blocks, 160, parts, dq, tiles)
        trial.expect("dQ", dq, expected, tolerance=1e-5 * max(1.0, float(np.abs(expected).max())))
    if trial.report:
        if any(finding.kind == "no proxy fence" for finding in trial.report.findings):
            trial.blame("fence")
        trial.limit("bytes added", trial.figures("dQ").written, exactly=2048 * first[0] * first[1])

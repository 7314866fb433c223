"""The exercises of notebook 10: a ring of stages that TMA fills, and the descriptor of a tile for wgmma."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers import engine
from helpers.attention.ladder import tensor_maps
from helpers.attention.ladder.call import Spec
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


def _tensor_map(trial: Trial, array: Any, box_rows: int) -> np.ndarray:
    """The map of an array (rows, 64) of float16 on the trial's device, for swizzled copies of whole rows."""
    spec = Spec.dense((1, 1, *array.shape), array.dtype)
    if trial.on_gpu:
        return tensor_maps.tensor_map(spec, array.data.ptr, box_rows=box_rows)
    # On a machine with a GPU, whose driver makes maps of its own, the engine's arrays need the engine's.
    box = (tensor_maps.PANEL_COLUMNS, box_rows, 1, 1)
    sizes, strides = tensor_maps.dimensions(spec)
    encoded = engine.tensor_map.encode_tiled("float16", array.ctypes.data, sizes, strides, box, swizzle=128)
    return encoded.view(tensor_maps.TENSOR_MAP)


@exercise(
    "10_ring",
    minutes=10,
    only_cc=90,
    hints={
        "deadlock": (
            "At tile 0 every stage is empty. Which parity counts as ended for an mbarrier that is new?",
            "A stage has had tile / STAGES tiles before this one, and its `full` has ended that many phases.",
            "full: tile / STAGES & 1. empty: the opposite, as its first wait is for the phase before the first one.",
        ),
        "wait": (
            "The consumer reads a stage whose copy is in flight. Which phase of `full` is that of this tile?",
            "Tiles 0, 1, 2 are the first phase of their `full`, of parity 0; tiles 3, 4, 5 are the second.",
        ),
        "race": (
            "A copy replaces a tile that a thread still reads. When has a thread read its last element of it?",
            "Arrive at `empty` after the loop over the rows; the producer waits for the phase of the tile before.",
        ),
        "limit": "With three stages, three copies can be in flight: do neighbouring tiles have different stages?",
        "": (
            "Tile by tile: stage 0, 1, 2, 0, 1, 2, ... What has each stage's `full` seen before this tile?",
            "The stage is tile % STAGES, and tile / STAGES says how often it has been used before.",
        ),
    },
)
def ring(trial: Trial) -> None:
    for n in trial.sizes("N", 128, 1, 83):
        _, _, v = trial.inputs(1, n, 64, np.float16)
        v_on_device, o = trial.xp.asarray(v), trial.empty(64)
        trial.launch("sums", 1, 96, _tensor_map(trial, v_on_device, 16), o, n)
        trial.expect("O", o, v.sum(axis=0, dtype=np.float64), tolerance=1e-4)
    if trial.report:
        kinds = [event.kind for event in trial.report.events]
        first = kinds.index("landed") if "landed" in kinds else len(kinds)
        trial.limit("copies in flight at first", kinds[:first].count("load"), at_least=3)


@exercise(
    "10_descriptor",
    minutes=8,
    only_cc=90,
    hints={
        "bounds": (
            "The descriptor points out of the block's memory. In which unit are the address and the distance?",
            "Both fields count 16 bytes: a row of 128 bytes is 8 of them.",
        ),
        "limit": "A product takes 16 of the 64 columns, for all rows and keys. Write the descriptor by its fields.",
        "": (
            "Rows of 128 bytes: how many bytes are eight of them? And what stands in bits 62 and 63?",
            "16 columns of 16 bits are 32 bytes, and the address counts 16 bytes; the swizzle applies to addresses.",
            "1ull << 62 | (1024 / 16ull) << 32 | address / 16, and a step adds 2.",
        ),
    },
)
def descriptor(trial: Trial) -> None:
    for n, n_kv in trial.sizes("N, N_kv", (64, 64), (100, 70)):
        q, k, _ = trial.inputs(n, n_kv, 64, np.float16)
        on_device, s = [trial.xp.asarray(a) for a in (q, k)], trial.empty(n, n_kv)
        maps = [_tensor_map(trial, a, 64) for a in on_device]
        trial.launch("scores", (blocks(n_kv, 64), blocks(n, 64)), 128, *maps, s, n, n_kv)
        trial.expect("S", s, product(q, k.T), tolerance=1e-3)
    if trial.report:
        products = sum(event.kind == "product" for event in trial.report.events)
        trial.limit("products", products, exactly=4)
        trial.limit("calls of wgmma_descriptor", trial.plain.count("wgmma_descriptor("), exactly=0)

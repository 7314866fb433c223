"""The exercises of notebook 10: a ring of stages that TMA fills, and the descriptor of a tile for wgmma."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers import engine
from helpers.attention.ladder import tensor_maps
from helpers.attention.ladder.call import Spec
from helpers.lesson.exercises.graders.expected import blocks, product
from helpers.lesson.exercises.trial import Trial, exercise


def tensor_map_of(trial: Trial, array: Any, box_rows: int) -> np.ndarray:
    """Encode the tensor map of a float16 array (rows, 64) on the trial's device, for swizzled copies of whole rows."""
    spec = Spec.dense((1, 1, *array.shape), array.dtype)
    if trial.on_gpu:
        return tensor_maps.tensor_map(spec, array.data.ptr, box_rows=box_rows)
    # On a machine with a GPU, whose driver makes maps of its own, the engine's arrays need the engine's.
    box = (tensor_maps.PANEL_COLUMNS, box_rows, 1, 1)
    sizes, strides = tensor_maps.dimensions(spec)
    encoded = engine.tensor_map.encode_tiled("float16", array.ctypes.data, sizes, strides, box, swizzle=128)
    return encoded.view(tensor_maps.TENSOR_MAP)


def name_symptom(trial: Trial, symptom: str) -> None:
    """Put one of this exercise's own symptoms first in every row that has failed."""
    for row in trial.rows.values():
        if symptom and row.passed is False and symptom not in row.symptoms:
            row.symptoms = (symptom, *row.symptoms)


TILES, STAGES = 8, 3  # of the ring, at the first size


@exercise(
    "10_ring",
    minutes=20,
    only_cc=90,
    hints={
        "stage of the producer": (
            "The producer's stage is wrong. The tiles go round the three stages: which stage does tile 4 get?",
            "Its stage is tile % STAGES.",
        ),
        "parity of the producer": (
            "The producer's parity is wrong. Its stage is new at tiles 0 to 2: which parity has then counted as ended?",
            "From tile 3 on, it waits for the stage's last tile to be given back. At tile 3 that is the first phase.",
            "At tiles 0 to 2 the parity is 1, at 3 to 5 it is 0, then 1 again: (tile / STAGES & 1) ^ 1.",
        ),
        "stage of the consumer": (
            "The consumers' stage is wrong. They take the tiles in the order in which the producer has copied them.",
            "Its stage is tile % STAGES, as the producer's.",
        ),
        "parity of the consumer": (
            "The consumers' parity is wrong. How many phases has this stage's `full` ended before this tile?",
            "Tiles 0 to 2 are the first phase of their `full`, of parity 0; tiles 3 to 5 are the second.",
            "The parity is tile / STAGES & 1.",
        ),
        "no arrival": (
            "The waits are right, but no thread releases a stage. Which mbarrier does the producer wait for at tile 3?",
            "Each of the 64 threads arrives at the `empty` of its stage, after the loop over the rows.",
        ),
        "few arrivals": (
            "Both waits are right, but too few threads arrive at `empty`. How many does mbarrier_init expect there?",
            "All 64 threads arrive, each once a tile: leave the `if` out.",
        ),
        "many arrivals": (
            "Both waits are right, but a thread arrives more than once for a tile. In which loop does it arrive?",
            "Once a tile, after the loop over the rows.",
        ),
        "arrival elsewhere": (
            "Both waits are right, but a thread gives back another stage than the one that it has read.",
            "Arrive at `empty + 8 * stage`.",
        ),
        "crash": "There is no mbarrier at this address. An mbarrier takes 8 bytes: where is that of the next stage?",
        "arrival at full": (
            "A thread that has read a tile arrives at the wrong mbarrier. Which one tells the producer to copy again?",
            "`full` is for the copies. Consumers arrive at `empty + 8 * stage`.",
        ),
        "race": (
            "Both waits are right, but a copy replaces a tile that is still read. When has a thread read it all?",
            "Arrive at `empty` after the loop over the rows, not before it.",
        ),
        "": (
            "Tile by tile: stage 0, 1, 2, 0, 1, 2, ... What has each stage's `full` seen before this tile?",
            "The stage is tile % STAGES, and tile / STAGES says how often it has been used before.",
        ),
    },
)
def ring(trial: Trial) -> None:
    for n in trial.sizes("N", 16 * TILES, 1, 83):
        _, _, v = trial.inputs(1, n, 64, np.float16)
        v_on_device, o = trial.xp.asarray(v), trial.empty(64)
        try:
            trial.launch("sums", 1, 96, tensor_map_of(trial, v_on_device, 16), o, n)
            trial.expect("O", o, v.sum(axis=0, dtype=np.float64), tolerance=1e-4)
        finally:
            name_symptom(trial, _wrong_in_ring(trial.report.events) if trial.report else "")
    if trial.report:
        kinds = [event.kind for event in trial.report.events]
        first = kinds.index("landed") if "landed" in kinds else len(kinds)
        symptom = _wrong_in_ring(trial.report.events)
        trial.limit("copies in flight at first", kinds[:first].count("load"), at_least=STAGES, symptom=symptom)
        elsewhere = _given_back_elsewhere(trial.report.events)
        trial.limit("stages given back in place of another", elsewhere, exactly=0, symptom="arrival elsewhere")


def _wrong_in_ring(events: Sequence[Any]) -> str:
    """Find the ring's wrong hole by the waits and arrivals of its threads at the first size; "" if none is wrong.

    The mbarriers count in the order of their initialisation: `full` and `empty` of stage 0, of stage 1, ...
    """
    for who, thread, is_empty in (("producer", 0, 1), ("consumer", 32, 0), ("consumer", 64, 0)):
        tried = [event for event in events if event.thread == thread and event.kind in ("wait", "waited")]
        waits = [(event.number, event.value) for event in tried if event.kind == "waited"]
        waits += [(event.number, event.value) for event in tried[-1:] if event.kind == "wait"]  # that has not ended
        for tile, (number, parity) in enumerate(waits[:TILES]):
            if number != 2 * (tile % STAGES) + is_empty:
                return f"stage of the {who}"
            if parity != tile // STAGES % 2 ^ is_empty:
                return f"parity of the {who}"
    arrivals = [event for event in events if event.kind == "arrive" and event.thread >= 32]
    if any(event.number % 2 == 0 for event in arrivals):
        return "arrival at full"
    if len({event.thread for event in arrivals}) < 64:
        return "few arrivals" if arrivals else "no arrival"
    if sum(event.thread == 32 for event in arrivals) > TILES:
        return "many arrivals"
    return "arrival elsewhere" if _given_back_elsewhere(events) else ""


def _given_back_elsewhere(events: Sequence[Any]) -> int:
    """Count the tiles for which another stage than theirs is given back."""
    arrivals = [event.number for event in events if event.kind == "arrive" and event.thread == 32]
    return sum(number != 2 * (tile % STAGES) + 1 for tile, number in enumerate(arrivals))


# Addresses of tiles, and the fields of their descriptors: (symptom, first bit, bits, what is expected there).
ADDRESSES = (0, 1024, 0x8400)
FIELDS = (("address", 0, 14, None), ("rows", 32, 14, 1024 // 16), ("base", 49, 3, 0), ("swizzle", 62, 2, 1))
ASK = """
extern "C" __global__ void descriptors(const unsigned* addresses, unsigned long long* bits) {
  bits[threadIdx.x] = descriptor(addresses[threadIdx.x]);
}
"""


@exercise(
    "10_descriptor",
    minutes=20,
    only_cc=90,
    hints={
        "address": (
            "The address of the descriptor is wrong: bits 0 to 13. In which unit does it count?",
            "It counts 16 bytes: address / 16.",
        ),
        "rows": (
            "The distance of eight rows is wrong: bits 32 to 45. A row has 128 bytes; in which unit does it count?",
            "Eight rows are 1024 bytes, and the field counts 16 bytes. Shift an unsigned long long, not an int.",
            "8 * 128 / 16ull << 32.",
        ),
        "swizzle": (
            "The swizzle is wrong: bits 62 and 63. Which number stands for 128 bytes?",
            "1ull << 62: an int has no bit 62.",
        ),
        "base": "Bits 49 to 51 have to be 0. Does a field reach into them?",
        "step": (
            "The descriptor is right. The step is not: how many bytes further are the next 16 columns of a row?",
            "16 columns of 16 bits are 32 bytes, and the address in a descriptor counts 16 bytes.",
            "A step adds 2, so that step i adds 2 * i.",
        ),
        "limit": "The products are right. Write the descriptor by its fields, without wgmma_descriptor.",
        "": "Rows of 128 bytes: how many bytes are eight of them? And what stands in bits 62 and 63?",
    },
)
def descriptor(trial: Trial) -> None:
    symptom = _wrong_field(trial) or "step"
    for n, n_kv in trial.sizes("N, N_kv", (64, 64), (100, 70)):
        q, k, _ = trial.inputs(n, n_kv, 64, np.float16)
        on_device, s = [trial.xp.asarray(a) for a in (q, k)], trial.empty(n, n_kv)
        maps = [tensor_map_of(trial, a, 64) for a in on_device]
        try:
            trial.launch("scores", (blocks(n_kv, 64), blocks(n, 64)), 128, *maps, s, n, n_kv)
            trial.expect("S", s, product(q, k.T), tolerance=1e-3)
        finally:
            name_symptom(trial, symptom)
    if trial.report:
        products = sum(event.kind == "product" for event in trial.report.events)
        trial.limit("products", products, exactly=4)
        trial.limit("uses of wgmma_descriptor", len(re.findall(r"\bwgmma_descriptor\b", trial.plain)), exactly=0)


def _wrong_field(trial: Trial) -> str:
    """Return the first wrong field of a learner's descriptor; "" if all are right."""
    addresses = trial.xp.asarray(np.array(ADDRESSES, np.uint32))
    bits = trial.xp.zeros(len(ADDRESSES), np.uint64)
    trial.launch("descriptors", 1, len(ADDRESSES), addresses, bits, extra=ASK)
    made = list(zip(ADDRESSES, map(int, trial.xp.asnumpy(bits)), strict=True))
    for symptom, first, width, expected in FIELDS:
        for address, value in made:
            if value >> first & (1 << width) - 1 != (address // 16 if expected is None else expected):
                return symptom
    return ""

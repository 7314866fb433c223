"""Graders of notebook 10: a ring of stages that TMA fills, and the descriptor of a tile for wgmma."""

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
    # On a machine with a GPU the driver makes tensor maps, but the engine's arrays need the engine's own.
    box = (tensor_maps.box_columns(spec), box_rows, 1, 1)
    sizes, strides = tensor_maps.dimensions(spec)
    encoded = engine.tensor_map.encode_tiled("float16", array.ctypes.data, sizes, strides, box, swizzle=128)
    return encoded.view(tensor_maps.TENSOR_MAP)


TILES, STAGES = 8, 3  # of the ring, at the first size


@exercise("10_ring", minutes=20, only_cc=90)
def ring(trial: Trial) -> None:
    for n in trial.sizes("N", 16 * TILES, 1, 83):
        _, _, v = trial.inputs(1, n, 64, np.float16)
        v_on_device, o = trial.xp.asarray(v), trial.empty(64)
        try:
            trial.launch("sums", 1, 96, tensor_map_of(trial, v_on_device, 16), o, n)
            trial.expect("O", o, v.sum(axis=0, dtype=np.float64), tolerance=1e-4)
        finally:
            trial.blame(_wrong_in_ring(trial.report.events) if trial.report else "", everywhere=True)
    if trial.report:
        kinds = [event.kind for event in trial.report.events]
        first = kinds.index("landed") if "landed" in kinds else len(kinds)
        symptom = _wrong_in_ring(trial.report.events)
        trial.limit("copies in flight at first", kinds[:first].count("load"), at_least=STAGES, symptom=symptom)
        elsewhere = _given_back_elsewhere(trial.report.events)
        trial.limit("stages given back in place of another", elsewhere, exactly=0, symptom="arrival elsewhere")


def _wrong_in_ring(events: Sequence[Any]) -> str:
    """Find the ring's wrong hole by the waits and arrivals of its threads at the first size; "" if none is wrong.

    The mbarriers are numbered in the order of their initialisation: `full` and `empty` of stage 0, of stage 1, ...
    """
    for who, thread, is_empty in (("producer", 0, 1), ("consumer", 32, 0), ("consumer", 64, 0)):
        tried = [event for event in events if event.thread == thread and event.kind in ("wait", "waited")]
        waits = [(event.number, event.value) for event in tried if event.kind == "waited"]
        waits += [(event.number, event.value) for event in tried[-1:] if event.kind == "wait"]  # the open wait
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
    """Count the tiles after which the wrong stage is released."""
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


@exercise("10_descriptor", minutes=20, only_cc=90)
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
            trial.blame(symptom, everywhere=True)
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

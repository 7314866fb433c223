"""The last two steps of a ring in one grid, which goes on to keys while they arrive: see kernels/ring_arriving.cuh.

K and V come some heads at a time, as blocks need them, and behind each piece a count of heads, for which the kernel
waits. Copy engines bring them. Were it kernels, as of NCCL, or of copies within a GPU, those could wait for a
multiprocessor, and the blocks, which have all, for the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.comms import Comms, Message
from helpers.attention.ladder.layout import dense
from helpers.attention.ring_masks import MaskedStep, Piece
from helpers.attention.ring_schedules import Product, Step, empty_of, some_rows

PIECES = 4  # of K and V that a kernel waits for
# Of a row and a key that it sees, for each head of K and V. With few, heads arrive later than blocks come to them. No
# number is enough: on two H200s the results are right, but pieces of heads have not been timed.
LEAST_PAIRS = math.inf

Plan = Sequence[Step | MaskedStep]


def goes_on(comms: Comms, plan: Plan, heads: int, kv_heads: int) -> bool:
    """Return True if the last two steps are one grid, which waits for the keys of the last one.

    Each rank has one product at most in each of them, and the rows of the second are the last ones of the first.
    """
    if len(plan) < 2 or not comms.by_copy_engines:
        return False
    one, next_one = plan[-2:]
    if isinstance(one, MaskedStep) or isinstance(next_one, MaskedStep):
        return False
    pairs = []
    for rank in comms.ranks:
        own, others = one.products[rank], next_one.products[rank]
        if len(own) > 1 or len(others) > len(own):
            return False
        for (rows, _, _), (later, keys, causal) in zip(own, others, strict=False):
            if later[1] != rows[1] or later[0] < rows[0] or keys[0] or causal:
                return False
        pairs.append(sum(product.pairs for product in (*own, *others)))
    return max(pairs) * heads >= LEAST_PAIRS * kv_heads


def arriving_arrays(
    product: Product | Piece, others: Sequence[Product | Piece], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a product needs to go on to keys that arrive meanwhile; others: the products of these keys.

    given: the arrays of `bring`, or specs of the rank's own arrays.
    """
    if not others:
        return {}
    (other,), q = others, given["q"]
    if "arrived" not in given:
        like = dense(given["k"].shape, q.dtype)._replace(device=q.device)
        count = dense((1,), np.dtype(np.int32))._replace(device=q.device)
        given = {"q": q, "k_arriving": like, "v_arriving": like, "arrived": count}
    return {
        "q_arriving": some_rows(q, other.rows),
        **{name: some_rows(given[name], other.keys) for name in ("k_arriving", "v_arriving")},
        "arrived": given["arrived"],
    }


def pieces(batch: int, kv_heads: int) -> list[tuple[slice, slice]]:
    """Cut K and V into sequences with all heads, or into some heads of each sequence, in the order of both."""
    if batch >= PIECES or kv_heads == 1:
        return [(each, slice(0, kv_heads)) for each in _parts(batch, min(batch, PIECES))]
    groups = _parts(kv_heads, min(kv_heads, -(-PIECES // batch)))
    return [(slice(i, i + 1), group) for i in range(batch) for group in groups]


def _parts(count: int, parts: int) -> list[slice]:
    ends = [count * i // parts for i in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def bring(
    comms: Comms, at_hand: Sequence[Sequence[Any]]
) -> tuple[Callable[[], list[tuple[Any, ...]]], list[dict[str, Any]]]:
    """Start to send each rank's K and V to the next one, in pieces, and behind each how many heads have arrived.

    Returns:
        A function that waits for all of them and returns K and V of each local rank; and for each local rank the arrays
        that fill meanwhile: k_arriving, v_arriving and arrived.
    """
    sends, receives, received = [], [], []
    for rank, pair in zip(comms.ranks, at_hand, strict=True):
        after, before = (rank + 1) % comms.size, (rank - 1) % comms.size
        batch, _, kv_heads, _ = pair[0].shape
        cuts = pieces(batch, kv_heads)
        with comms.on(rank):
            mine = [device.cp.ascontiguousarray(a) for a in pair]
            theirs = [empty_of(a, a.shape) for a in mine]
            arrived = device.cp.zeros(1, dtype=np.int32)
            counts = _counts(comms, rank, [kv_heads * (of.stop - 1) + heads.stop for of, heads in cuts])
        for i, (of, heads) in enumerate(cuts):
            for a, b in zip(mine, theirs, strict=True):
                here, there = (x[of] if heads == slice(0, kv_heads) else x[of.start, :, heads] for x in (a, b))
                sends.append(Message(rank, after, here))
                receives.append(Message(rank, before, there))
            sends.append(Message(rank, after, counts[i : i + 1]))
            receives.append(Message(rank, before, arrived))
        received.append({"k_arriving": theirs[0], "v_arriving": theirs[1], "arrived": arrived})
    wait = comms.start(sends, receives)

    def all_arrived(alive: Any = sends) -> list[tuple[Any, ...]]:
        wait()
        return [(each["k_arriving"], each["v_arriving"]) for each in received]

    return all_arrived, received


def _counts(comms: Comms, rank: int, counts: Sequence[int]) -> Any:
    """Return how many heads there are behind each piece, on a rank's device: int32 (pieces,)."""
    key = rank, *counts
    if key not in comms.counts:
        comms.counts[key] = device.cp.asarray(np.int32(counts))
        if device.ON_GPU:
            device.cp.cuda.Device().synchronize()  # later calls may be on other streams
    return comms.counts[key]

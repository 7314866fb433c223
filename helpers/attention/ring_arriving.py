"""The last two steps of a ring in one grid, which goes on to keys while they arrive: see kernels/ring_arriving.cuh.

K and V come in pieces, and behind each a count of the keys that are there, for which the kernel waits. Copy engines
bring them. Were it kernels, those could wait for a multiprocessor, and all blocks, which have them, for the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.comms import Comms, Message
from helpers.attention.ladder.layout import dense
from helpers.attention.ring_masks import MaskedStep, Piece
from helpers.attention.ring_schedules import Product, Step, empty_of, some_rows

PIECES, PIECE_BYTES = 4, 2**23  # of K and V that a kernel waits for: at most so many, at least so large
# With more heads of K and V their copy would be late: a tile of 128 rows goes through a chunk in the time in which 10
# of a half type are copied, by models of an H200 and its links.
MOST_KV_HEADS = 20

Plan = Sequence[Step | MaskedStep]


def goes_on(comms: Comms, plan: Plan, kv_heads: int) -> bool:
    """Return True if the last two steps can be one grid, which waits for the keys of the last one.

    Each rank has one product at most in each of them, and the rows of the second are the last ones of the first.
    """
    if len(plan) < 2 or not comms.by_copy_engines or kv_heads > MOST_KV_HEADS:
        return False
    one, next_one = plan[-2:]
    if isinstance(one, MaskedStep) or isinstance(next_one, MaskedStep):
        return False
    for rank in comms.ranks:
        own, others = one.products[rank], next_one.products[rank]
        if len(own) > 1 or len(others) > len(own):
            return False
        for (rows, _, _), (later, keys, causal) in zip(own, others, strict=False):
            if later[1] != rows[1] or later[0] < rows[0] or keys[0] or causal:
                return False
    return True


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


def bring(
    comms: Comms, at_hand: Sequence[Sequence[Any]]
) -> tuple[Callable[[], list[tuple[Any, ...]]], list[dict[str, Any]]]:
    """Start to send each rank's K and V to the next one, in pieces, and behind each how many keys have arrived.

    Returns:
        As `_pass_on`; and for each local rank the arrays that fill meanwhile: k_arriving, v_arriving and arrived.
    """
    sends, receives, received = [], [], []
    for rank, pair in zip(comms.ranks, at_hand, strict=True):
        after, before = (rank + 1) % comms.size, (rank - 1) % comms.size
        batch, n, *_ = pair[0].shape
        pieces = max(min(PIECES, 2 * pair[0].nbytes // PIECE_BYTES), 1)
        ends = [batch * n * i // pieces for i in range(pieces + 1)]
        with comms.on(rank):
            mine = [device.cp.ascontiguousarray(a) for a in pair]
            theirs = [empty_of(a, a.shape) for a in mine]
            count, counts = device.cp.zeros(1, dtype=np.int32), _counts(comms, rank, ends)
            flat = [(a.reshape(batch * n, -1), b.reshape(batch * n, -1)) for a, b in zip(mine, theirs, strict=True)]
        for i, (first, end) in enumerate(pairwise(ends)):
            for here, there in (*((a[first:end], b[first:end]) for a, b in flat), (counts[i : i + 1], count)):
                sends.append(Message(rank, after, here))
                receives.append(Message(rank, before, there))
        received.append({"k_arriving": theirs[0], "v_arriving": theirs[1], "arrived": count})
    wait = comms.start(sends, receives)

    def arrived(alive: Any = sends) -> list[tuple[Any, ...]]:
        wait()
        return [(each["k_arriving"], each["v_arriving"]) for each in received]

    return arrived, received


def _counts(comms: Comms, rank: int, ends: Sequence[int]) -> Any:
    """Return how many keys there are behind each piece, on a rank's device: int32 (pieces,)."""
    key = rank, *ends
    if key not in comms.counts:
        comms.counts[key] = device.cp.asarray(np.int32(ends[1:]))
        if device.ON_GPU:
            device.cp.cuda.Device().synchronize()  # later calls may be on other streams
    return comms.counts[key]

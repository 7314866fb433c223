"""Graders of notebook 14: the merge of partial results, the block table, and the ticket that the last block draws."""

from __future__ import annotations

import numpy as np

from helpers.attention.check import TOLERANCE
from helpers.lesson.exercises.trial import Trial, exercise


@exercise(
    "14_merge",
    minutes=10,
    hints={
        "empty part": (
            "It goes wrong where a part has no keys. What is weight * *o if the weight is 0 and the element is NaN?",
            "0 times NaN is NaN, so a part whose lse is -inf must not be read at all.",
            "if (lse_i == NEG_INF) continue;",
        ),
        "empty row": (
            "It goes wrong in a row without keys: all lse are -inf. What are sum, acc and their quotient then?",
            "0 / 0 is NaN: such a row gets 0. Its lse needs nothing: m is -inf already, and logf(0) too.",
        ),
        "one part": (
            "With one part the output is that part: its weight is 1. What else do you add to sum?",
            "Nothing: a row without keys is the one case in which sum is 0, and an `if` is enough for it.",
        ),
        "large": (
            "Large scores: expf of a lse alone overflows. Which difference is never above 0?",
            "The weight is expf(lse_i - m).",
        ),
        "lse": (
            "O is right and lse is not. sum holds sums of e^(lse_i - m): how does the row's lse follow from m and sum?",
            "lse_row = m + logf(sum).",
        ),
        "limit": ("Each element of O_part is read once: the weight is needed, not a second pass over the outputs.",),
        "": (
            "Part i saw keys whose exponentials add up to e^lse_i. So which share of all exponentials does it have?",
            "Its weight is e^(lse_i - m), relative to the largest. sum adds up weights, acc weights times outputs.",
            "const float weight = expf(lse_i - m); sum += weight; acc += weight * *o;",
        ),
    },
)
def merge(trial: Trial) -> None:
    """Test parts of several sizes, one part alone, parts and rows without keys, and an lse too large for exp."""
    first = 5, 3, "none", 1
    sizes = (7, 1, "none", 1), (4, 40, "none", 1), (6, 5, "part", 1), (6, 3, "row", 1), (5, 6, "none", 200)
    for n, parts, without, factor in trial.sizes("N, parts, without keys, factor of lse", first, *sizes):
        empty = f"empty {without}" if without != "none" else ""
        o_part = trial.rng.standard_normal((parts, n, 64)).astype(np.float32) + np.float32(0.5)
        lse_part = (factor * (trial.rng.standard_normal((parts, n)) + 1)).astype(np.float32)
        if empty:
            lse_part[1:-1] = -np.inf
            lse_part[0, ::2] = -np.inf
        if empty == "empty row":
            lse_part[:, ::2] = -np.inf
        nobody = np.flatnonzero(lse_part == -np.inf)  # nobody wrote their outputs: these may be anything
        o_part.reshape(-1, 64)[nobody] = np.where(nobody % 2, np.nan, np.inf)[:, None]
        o, lse = trial.empty(n, 64), trial.empty(n)
        trial.launch("merge", n, 64, o_part, lse_part, o, lse, n, parts)
        expected, expected_lse = _merged(o_part, lse_part)
        tolerance = 6e-7 if parts == 1 else TOLERANCE  # one part is the output, and rounded twice at most
        is_near = np.allclose(trial.xp.asnumpy(o), expected, atol=TOLERANCE)
        symptom = empty or "one part" * (parts == 1 and is_near)
        trial.expect("O", o, expected, tolerance=tolerance, large=factor > 1, symptom=symptom)
        tolerance = max(1e-5, float(np.abs(lse_part[lse_part > -np.inf]).max(initial=0)) * 2.0**-20)
        trial.expect(
            "lse", lse, expected_lse, tolerance=tolerance, large=factor > 1, symptom=empty or "lse" * (factor == 1)
        )
    if trial.report:
        trial.limit("bytes of O_part read", trial.figures("O_part").read, at_most=4 * 64 * first[0] * first[1])


def _merged(o_part: np.ndarray, lse_part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge parts (parts, N, 64) and (parts, N) to the output (N, 64) and the lse (N,), in float64."""
    lse_part = lse_part.astype(np.float64)
    m = lse_part.max(axis=0)
    finite = np.where(np.isfinite(m), m, 0.0)
    weights = np.exp(lse_part - finite)
    total = weights.sum(axis=0)
    seen = np.where(weights[..., None] > 0, o_part.astype(np.float64), 0.0)
    o = (weights[..., None] * seen).sum(axis=0) / np.where(total > 0, total, 1.0)[:, None]
    with np.errstate(divide="ignore"):
        return o, finite + np.log(total)


@exercise(
    "14_block_table",
    minutes=8,
    hints={
        "past the end": (
            "It goes wrong where a sequence ends within 16 keys. What is 0 * v[i] if that value was never written?",
            "0 times NaN is NaN, so past the end v[i] has to be 0 itself: compare key with length.",
        ),
        "order": (
            "These are the values that lie there if pages were in order. Which entry of the table has this key's page?",
            "A sequence has table_row entries, and each stands for page_size keys: entry key / page_size of its row.",
            "const int page = block_table[sequence * table_row + key / page_size];",
        ),
        "first row": (
            "The first sequence is right. Where does the row of another one begin in the block table?",
            "Row `sequence` begins at sequence * table_row.",
        ),
        "page size": (
            "With pages of 16 keys it is right. Which number of your lines should be page_size?",
            "The page is entry key / page_size, and the key's place in it key % page_size.",
        ),
        "limit": (
            "Values that no key has are read: the limit counts bytes of V. Compare key with length before you load.",
        ),
        "bounds": (
            "An entry of the table that belongs to no key may be any number, so V must not be read by it.",
            "Look up the page only if key < length.",
        ),
        "": (
            "Two steps: from the key to its page, by the table; from the page to the key's row of V.",
            "The row is page * page_size + key % page_size, and a row of V has 64 numbers.",
            "v[i] = V[(page * page_size + key % page_size) * 64 + c];",
        ),
    },
)
def block_table(trial: Trial) -> None:
    """Test pages of several sizes, which 16 keys may cross; no keys; NaN and wild page numbers past the end."""
    first, read = (3, 16), 0
    for count, page in trial.sizes("sequences, page_size", first, (4, 5), (3, 1), (2, 48)):
        is_first = page == first[1]
        lengths = trial.rng.integers(17, 60, count).astype(np.int32)
        lengths[lengths % 16 == 0] += 1  # no sequence ends where 16 keys do
        if is_first:
            lengths[::-1].sort()  # the longest first, so that its row of the table holds pages enough for the others
            read = 4 * 64 * int(lengths.sum())
        else:
            lengths[-1] = 0
        table_row, room = -(-60 // page) + 1, 64
        table = trial.rng.permutation(count * table_row).reshape(count, table_row).astype(np.int32)
        spare = -(-16 // page)  # pages of nobody at the end, so that a key's place in too large a page is still in V
        v = np.full((table.size + spare, page, 64), np.nan, np.float32)
        p, expected = np.zeros((count, room), np.float32), np.zeros((count, 64))
        for i, length in enumerate(lengths):
            _, _, values = trial.inputs(1, room, 64)
            keys = np.arange(length)
            v[table[i, keys // page], keys % page] = values[:length]
            p[i, :length] = trial.rng.random(length) / room
            expected[i] = p[i, :length].astype(np.float64) @ values[:length]
            table[i, -(-length // page) :] = 2**30 + i
        o = trial.empty(count, 64)
        trial.launch("output", count, 64, v, p, table, lengths, o, page, table_row, room)
        trial.expect("O", o, expected, symptom=_slip(trial, trial.xp.asnumpy(o), expected, is_first))
    if trial.report:
        trial.limit("bytes of V read", trial.figures("V").read, at_most=read)


def _slip(trial: Trial, got: np.ndarray, expected: np.ndarray, is_first: bool) -> str:
    """Return the cause of a wrong output as a symptom; "" if it is unknown."""
    if trial.plain.count("block_table") < 2:  # once as an argument
        return "order"
    if not is_first:
        return "page size"
    if not np.isfinite(got).all():
        return "past the end"
    return "first row" if np.allclose(got[0], expected[0], rtol=0, atol=TOLERANCE) else ""


@exercise(
    "14_ticket",
    minutes=10,
    hints={
        "reset": (
            "The first launch is right and the second is not: the ticket is not 0 again. Who could reset it?",
            "With atomicInc(ticket, gridDim.x - 1) the last block's draw puts the ticket back to 0.",
        ),
        "reset by all": (
            "Every block puts the ticket back to 0, so that the next one draws 0 again. Which block alone may do so?",
            "The last one, after its draw: no other block draws in this launch after it.",
        ),
        "no draw": (
            "The block with the highest number need not come last. What do all blocks share, so that one can know it?",
            "The ticket: each block draws a number when its part is written, and the last number is gridDim.x - 1.",
        ),
        "early": (
            "A block adds up parts that others have not written yet. Which old value does the last draw get?",
            "Draws get 0, 1, 2, ...: the last block is the one that gets gridDim.x - 1.",
        ),
        "race": (
            "Another block can see the ticket before it sees the part. What must come before the draw?",
            "Each thread needs a fence, __threadfence(), for what it has written; then the threads need a barrier.",
            "__threadfence(); __syncthreads(); then thread 0 draws.",
        ),
        "is_last": (
            "Threads of a block meet at is_last. Which one draws and sets it, and what must the others wait for?",
            "Thread 0 alone draws and sets it; then comes a __syncthreads(), then the others read it.",
        ),
        "empty": (
            "Nobody wrote O: no block found that it is the last. Which old value does the last of gridDim.x draws get?",
            "Draws get 0, 1, 2, ...: the last block is the one that gets gridDim.x - 1.",
        ),
        "limit": ("One thread of a block draws, for all of them: in shared memory the others learn what it got.",),
        "": (
            "Four lines: a fence, a barrier, the draw by one thread, a barrier.",
            "is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1, in thread 0.",
        ),
    },
)
def ticket(trial: Trial) -> None:
    """Test each size twice with the same ticket, more blocks than rows, and one block alone."""
    first_blocks = 4
    for n, grid in trial.sizes("N, blocks", (37, first_blocks), (3, 8), (20, 1)):
        _, _, v = trial.inputs(1, n, 64)
        v_there = trial.xp.asarray(v)
        drawn = trial.xp.asarray(np.zeros(1, np.uint32))
        for again in (False, True):
            partial, o = trial.empty(grid, 64), trial.empty(64)
            trial.launch("sum_rows", grid, 64, v_there, partial, drawn, o, n)
            symptom = "reset" if again else "early"
            where = trial.size + ", launched again" * again
            trial.expect("O", o, v.sum(axis=0, dtype=np.float64), at=where, tolerance=1e-4, symptom=symptom)
            trial.blame(_raced(trial))
        left = trial.xp.asnumpy(drawn).astype(np.float64)
        trial.expect("ticket afterwards", left, np.zeros(1), symptom="reset")
    if trial.report:
        draws = trial.figures("ticket").atomics
        trial.limit("atomics", draws, at_most=first_blocks)


def _raced(trial: Trial) -> str:
    """Return the cause of the races: is_last, no draw, a draw too early, or one that was not the last; "" if none."""
    races = [str(finding) for finding in trial.report.findings] if trial.report else []
    if not races:
        return ""
    if "is_last" in races[0]:
        return "is_last"
    ticket = trial.figures("ticket")
    if ticket.written // 4 - ticket.atomics > 1:
        return "reset by all"
    before, draw, _ = trial.plain.partition("atomic")
    if not draw:
        return "no draw"
    before = before.rpartition("partial[")[2]  # what comes after the part is written
    return "early" if "__threadfence()" in before and "__syncthreads()" in before else "race"

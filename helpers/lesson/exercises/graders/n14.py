"""Graders of notebook 14: the merge of partial results, the block table, and the ticket that the last block draws."""

from __future__ import annotations

import numpy as np

from helpers.attention.check import TOLERANCE
from helpers.lesson.exercises.trial import Trial, exercise


@exercise("14_merge", minutes=10)
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
        nobody = np.flatnonzero(lse_part == -np.inf)  # their outputs were never written and may be anything
        o_part.reshape(-1, 64)[nobody] = np.where(nobody % 2, np.nan, np.inf)[:, None]
        o, lse = trial.empty(n, 64), trial.empty(n)
        trial.launch("merge", n, 64, o_part, lse_part, o, lse, n, parts)
        expected, expected_lse = _merged(o_part, lse_part)
        tolerance = 6e-7 if parts == 1 else TOLERANCE  # a single part is the output, rounded at most twice
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


@exercise("14_block_table", minutes=8)
def block_table(trial: Trial) -> None:
    """Test pages of several sizes, which 16 keys may cross; no keys; NaN and wild page numbers past the end."""
    first, read = (3, 16), 0
    for count, page in trial.sizes("sequences, page_size", first, (4, 5), (3, 1), (2, 48)):
        is_first = page == first[1]
        lengths = trial.rng.integers(17, 60, count).astype(np.int32)
        lengths[lengths % 16 == 0] += 1  # no sequence ends at a multiple of 16 keys
        if is_first:
            lengths[::-1].sort()  # the longest first, so that its row of the table has enough pages for the others
            read = 4 * 64 * int(lengths.sum())
        else:
            lengths[-1] = 0
        table_row, room = -(-60 // page) + 1, 64
        table = trial.rng.permutation(count * table_row).reshape(count, table_row).astype(np.int32)
        spare = -(-16 // page)  # unused pages at the end: an index with too large a page size stays in V
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
    if trial.plain.count("block_table") < 2:  # only as an argument
        return "order"
    if not is_first:
        return "page size"
    if not np.isfinite(got).all():
        return "past the end"
    return "first row" if np.allclose(got[0], expected[0], rtol=0, atol=TOLERANCE) else ""


@exercise("14_ticket", minutes=10)
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
    """Return the cause of the races: is_last, no ticket, a ticket drawn too early, or a wrong last one; "" if none."""
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

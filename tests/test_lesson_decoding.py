"""Notebook 14's views of decoding: pieces contain every key once, X-rays follow the plan, pictures."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention.ladder import limits
from helpers.draw import decoding as draw
from helpers.lesson import decoding, show

pytestmark = pytest.mark.skipif(limits.compute_capability() < 80, reason="needs compute capability 8.0")
LENGTHS = [100, 0, 40, 260, 1]


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page", [0, 16])
def test_inputs_and_runs(num_splits: int, page: int) -> None:
    arrays = decoding.inputs(LENGTHS, page=page)
    for o in decoding.run(arrays, num_splits=num_splits):
        assert np.abs(o - decoding.expected(arrays)).max() < 3e-3


@pytest.mark.parametrize("num_splits, multiprocessors", [(0, 1), (0, 4), (0, 132), (1, 4), (3, 4)])
def test_pieces_have_every_key_once(num_splits: int, multiprocessors: int) -> None:
    kv_heads = 2
    cut = decoding.pieces(LENGTHS, heads=8, kv_heads=kv_heads, multiprocessors=multiprocessors, num_splits=num_splits)
    read = {(i, head): np.zeros(length, int) for i, length in enumerate(LENGTHS) for head in range(kv_heads)}
    for piece in cut:
        read[piece.sequence, piece.kv_head][piece.first : piece.end] += 1
    assert all((counts == 1).all() for counts in read.values())
    counts = decoding.parts(cut)
    assert len(counts) == len(read)
    assert max(counts.values()) <= (num_splits or 2 * multiprocessors)
    if not num_splits:  # equal, except the last one; at most two blocks share a multiprocessor
        tiles: dict[int, int] = {}
        for piece in cut:
            tiles[piece.block] = tiles.get(piece.block, 0) + max(1, -(-(piece.end - piece.first) // 16))
        *first, last = tiles.values()
        assert len(set(first)) <= 1 and all(last <= each for each in first) and len(tiles) <= 2 * multiprocessors


def test_sequences_that_are_all_as_long_are_cut_alike() -> None:
    counts = decoding.parts(decoding.pieces([8192] * 3)).values()
    assert len(counts) == 24 and len(set(counts)) == 1 and max(counts) > 1


@pytest.mark.exhaustive
def test_an_x_ray_has_the_parts_of_the_pieces() -> None:
    (report,) = decoding.xray_launches(decoding.inputs(LENGTHS), multiprocessors=4)
    assert report.clean
    counts = decoding.parts(decoding.pieces(LENGTHS, heads=8, kv_heads=2, d=64, multiprocessors=4)).values()
    cut = sum(count for count in counts if count > 1)
    assert report.traffic["partial_o"].written == report.traffic["partial_o"].read == cut * 4 * 64 * 4
    assert [
        len(decoding.xray_launches(decoding.inputs(LENGTHS), stage="split_keys", num_splits=n)) for n in (1, 2)
    ] == [1, 2]


def test_blocks_take_the_first_multiprocessor_that_is_free() -> None:
    cut = [decoding.Piece(block, block, 0, 0, keys) for block, keys in enumerate([30, 10, 5, 9])]
    places = decoding.on_multiprocessors(cut, 2)
    assert [place[:3] for place in places] == [(0, 0, 30), (1, 0, 10), (1, 10, 15), (1, 15, 24)]
    assert (
        "done after" not in show.schedules({"x": places}, ylabel="", xlabel="", ends=False).figure.axes[0].get_title()
    )


def test_bytes_in_flight_are_those_of_the_rings() -> None:
    assert decoding.bytes_in_flight("packed_heads") < decoding.bytes_in_flight("copies_in_flight") <= decoding.SHARED


def test_the_record_is_read_by_its_rows() -> None:
    speeds = decoding.recorded_speeds("steps")
    assert len(speeds) == 3 and all(len(names) == 7 for names in speeds.values())
    lines = decoding.climb_table().splitlines()
    assert len(lines) == 8 and all(len(line) < 100 for line in lines)
    (batch, keys, *_), first = next(iter(speeds.items()))
    assert f"{batch} × {keys:,} keys" in lines[0]
    one, two = first["split_keys"], first["packed_heads"]
    assert lines[3].startswith("2 packed heads") and f"{two:,.0f}" in lines[3] and f"{two / one:.2f}×" in lines[3]
    beside = decoding.recorded_speeds()
    assert all("14, pages of 16" in row and not any("64" in name for name in row) for row in beside.values())


def test_pictures() -> None:
    owners = np.array([[0, -1, -1, -1], [0, 1, 12, -1]])
    pages = draw.pages(owners, {"keys": [3, 5]})
    assert "4 pages over 2 steps, 50% of them taken" in repr(pages) and pages.png()
    dots = draw.speeds({"row": {"ours": 3.0, "roof": 4.0, "peer": 2.0}}, ours="ours", roof="roof", xlabel="GB/s")
    assert "row: ours 3, roof 4, peer 2" in repr(dots) and dots.png()

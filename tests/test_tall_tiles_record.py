"""Tiles of 192 rows compared with the usual ones: what the stage's rule for them loses, according to the record."""

from __future__ import annotations

from typing import Any

from helpers.bench.studies import tall_tiles
from helpers.bench.studies.tall_tiles import Case

TAKEN, LEFT = Case(8, 16, 16, 2112, 2112, 128, causal=False), Case(16, 16, 16, 1000, 1000, 128, causal=True)


def pair(case: Case, ms: float, usual: float) -> list[dict[str, Any]]:
    """Make a case's rows of a record."""
    speed = usual / ms
    timed = {"speed": speed, "speed_q1": speed - 0.01, "speed_q3": speed + 0.01}
    return [
        {"name": tall_tiles.TALL_WAY, **case._asdict(), "ms": ms, **timed},
        {"name": tall_tiles.USUAL, **case._asdict(), "ms": usual},
    ]


def test_the_rule_loses_where_it_takes_the_slower_tiles() -> None:
    assert TAKEN.is_tall() and not LEFT.is_tall()
    lost = tall_tiles.losses({"rows": [*pair(TAKEN, 1.1, 1.0), *pair(LEFT, 1.0, 1.25)]})
    assert {case: round(share, 9) for case, share in lost.items()} == {TAKEN: 0.1, LEFT: 0.25}
    assert set(tall_tiles.losses({"rows": [*pair(TAKEN, 1.0, 1.1), *pair(LEFT, 1.1, 1.0)]}).values()) == {0.0}


def test_a_line_has_both_tiles() -> None:
    line, last = tall_tiles.table({"rows": pair(TAKEN, 0.5, 0.55)}).splitlines()[1:]
    assert " ".join(line.split()) == ("8 x 16 heads of 128, N = 2112 0.5500 ms 128 x 176 1.10× (1.09 to 1.11) taken")
    assert last.startswith("The tiles taken take at most 0.0%")


def test_the_rule_loses_at_most_a_hundredth_of_what_was_measured() -> None:
    record = tall_tiles.recorded()
    assert record is not None and len(record["rows"]) == 2 * len(tall_tiles.CASES)
    lost = tall_tiles.losses(record)
    assert set(lost) == set(tall_tiles.CASES)
    assert max(lost.values()) <= 0.01, {case: share for case, share in lost.items() if share > 0.01}

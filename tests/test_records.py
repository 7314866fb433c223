"""Records are written, read and shown; the runner of the studies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.bench import records, study
from helpers.bench.harness import Study


@pytest.mark.parametrize("path", sorted(records.MEASURED.glob("*.json")), ids=lambda path: path.stem)
def test_committed_records_have_one_row_a_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == records.as_json(json.loads(text)) + "\n"


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [{"name": f"row {i}", "times": [0.1 * i, i / 3], "more": {"a": None}} for i in range(9)]
    record = {"how": {"what": 100 * "x", "again": 100 * "µ"}, "rows": rows, "none": [], "one": True}
    path = tmp_path / "new folder" / "record.json"
    assert records.load(path) is None
    records.save(path, record)
    assert records.load(path) == record
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + (2 + 2) + (2 + len(rows)) + 2
    assert [json.loads(line.rstrip(",")) for line in lines if '"name"' in line] == rows
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_a_table_is_of_the_committed_record_where_none_is_given() -> None:
    committed: list[Any] = [None]

    @records.table_of(lambda: committed[0])
    def table(name: str, *, record: Any = None) -> str:
        return f"{name}: {record['device']}"

    assert table("a") == records.NO_RECORD
    assert table("a", record={"device": "another"}) == "a: another"
    committed[0] = {"device": "this one"}
    assert table("b") == "b: this one"


@pytest.mark.parametrize("name", study.STUDIES)
def test_each_study_shows_what_is_recorded_and_can_measure_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = study.module_of(name)
    assert callable(module.take)
    assert study.main([name]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") > 5 and records.NO_RECORD not in text


@pytest.mark.parametrize("name", study.STUDIES)
def test_without_a_record_a_study_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ring's text begins with calculated figures; promises reads its record differently."""
    monkeypatch.setattr(records, "load", lambda path: None)
    if name not in ("ring", "promises"):
        assert study.module_of(name).table() == records.NO_RECORD


def test_a_study_is_measured_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"n": 1}]
    one = Study("bits", {"rows": lambda: rows}, lambda: {"device": "a GPU"}, line=lambda row: f"row {row['n']}")
    module = SimpleNamespace(take=one.take, table=lambda record=None: f"rows: {record['rows']}")
    monkeypatch.setattr(study, "module_of", lambda name: module)
    path = tmp_path / "bits.json"
    assert study.main(["bits", str(path)]) == 0
    assert capsys.readouterr().out == "row 1\nrows: 0 s\nrows: [{'n': 1}]\n"
    assert records.load(path) == {"device": "a GPU", "rows": [{"n": 1}]}
    with pytest.raises(SystemExit, match="a single FILE"):
        study.main(["bits", str(path), "more"])


def test_parts_are_measured_alone_and_one_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    """Rows that name their part share a list; a part of dicts is whole; records of different GPUs are not mixed."""
    path, device = tmp_path / "r.json", ["a GPU"]

    def fails() -> Iterator[Any]:
        yield {"part": "fails", "n": 1}
        raise ValueError("no more")

    parts: dict[str, Any] = {
        "rows": lambda: ([{"part": "rows", "n": n}] for n in (1, 2)),
        "own": lambda: iter([{"n": 3}, {"n": 4}]),
        "fails": fails,
        "whole": lambda: {"n": 5},
        "asked for": lambda: [{"n": 6}],
    }
    of = Study("some", parts, lambda: {"device": device[0]}, optional=("asked for",))
    whole = {
        "device": "a GPU",
        "rows": [{"part": "rows", "n": 1}, {"part": "rows", "n": 2}, {"part": "fails", "n": 1}],
        "own": [{"n": 3}, {"n": 4}],
        "whole": {"n": 5},
    }
    assert of.take(path) == {**whole, "failed": {"fails": "ValueError: no more"}} == records.load(path)
    parts["rows"] = lambda: [{"part": "rows", "n": 7}]
    parts["own"] = lambda: [{"n": 8}]
    again = of.take(path, ["rows", "own", "asked for"])
    rows = [{"part": "fails", "n": 1}, {"part": "rows", "n": 7}]
    assert again == {**whole, "rows": rows, "own": [{"n": 8}], "asked for": [{"n": 6}]} == records.load(path)
    with pytest.raises(SystemExit, match="some has no part 'flats'; its parts are rows, own, fails"):
        of.take(path, ["flats"])
    device[0] = "another"
    with pytest.raises(SystemExit, match="is of a GPU; this is another"):
        of.take(path, ["own"])


def test_the_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in study.STUDIES)
    assert study.main(["no such study"]) == 2

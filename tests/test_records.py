"""How records are written, read and shown, and the runner of the studies."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.bench import records, study


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
    assert hasattr(module, "take") or hasattr(module, "measure")
    assert study.main([name]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") > 5 and records.NO_RECORD not in text


def test_a_study_is_measured_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record: dict[str, Any] = {"rows": [1], "failed": {}}
    module = SimpleNamespace(measure=lambda: record, table=lambda record=None: f"rows: {record and record['rows']}")
    monkeypatch.setattr(study, "module_of", lambda name: module)
    path = tmp_path / "bits.json"
    assert study.main(["bits", str(path)]) == 0
    assert capsys.readouterr().out == "rows: [1]\n" and records.load(path) == record
    record["failed"] = {"a part": "ValueError"}
    assert study.main(["bits", str(path)]) == 1
    with pytest.raises(SystemExit, match="one FILE"):
        study.main(["bits", str(path), "more"])


def test_the_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in study.STUDIES)
    assert study.main(["no such study"]) == 2

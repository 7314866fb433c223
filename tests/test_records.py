"""Records are written, read and shown; the runner of the studies."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.bench import frozen, records, sass_loop, study
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
    monkeypatch.setattr(study, "ON_GPU", True)
    path = tmp_path / "bits.json"
    assert study.main(["bits", str(path)]) == 0
    assert capsys.readouterr().out == "row 1\nrows: 0 s\nrows: [{'n': 1}]\n"
    assert records.load(path) == {"device": "a GPU", "rows": [{"n": 1}]}
    assert study.main(["bits", str(path), "more"]) == 2
    assert capsys.readouterr().err == "bits takes a single FILE; got also more\n"


NO_GPU = "measuring needs a GPU; printing the table does not"


@pytest.mark.parametrize("name", study.STUDIES)
def test_a_study_says_in_a_line_that_it_cannot_be_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU, with an unknown word, without PyTorch or ncu, and where the record cannot be written."""
    module = study.module_of(name)
    of = getattr(module, "STUDY", None)
    broken, a_list = tmp_path / "broken.json", tmp_path / "list.json"
    broken.write_text('{"rows": [')
    a_list.write_text("[]")

    def refusal(*words: str) -> str:
        assert study.main([name, *words]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1, out + err
        return err.strip()

    monkeypatch.setattr(study, "ON_GPU", False)
    assert refusal(str(tmp_path / "record.json")) == NO_GPU
    monkeypatch.setattr(study, "ON_GPU", True)
    monkeypatch.setattr(study.peers, "torch_on_gpu", lambda: None)
    if of and of.needs:
        assert refusal(str(tmp_path / "record.json")).startswith(f"{name} needs torch, which is not installed")
    monkeypatch.setattr(study.peers, "torch_on_gpu", lambda: SimpleNamespace())
    installed = SimpleNamespace(find_spec=lambda name: name)
    monkeypatch.setattr(study, "importlib", SimpleNamespace(util=installed, import_module=importlib.import_module))
    assert "is not a record" in refusal(str(broken)) and broken.read_text() == '{"rows": ['
    assert "is not a record" in refusal(str(a_list))
    assert refusal(str(tmp_path)).endswith("cannot be written: it is a folder")
    assert "cannot be written: " in refusal(str(broken / "record.json"))
    refused = refusal(str(tmp_path / "record.json"), "nonsense")
    assert refused.startswith((f"{name} has no ", f"{name} takes a single FILE; got also nonsense")), refused


def test_programs_that_measure_say_in_a_line_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    monkeypatch.setattr(sass_loop.shutil, "which", lambda program: None if program == "nvdisasm" else program)
    assert sass_loop.main([str(tmp_path / "record.json")]) == 2
    assert capsys.readouterr().err == "nvdisasm is not in PATH: it comes with the CUDA toolkit\n"
    monkeypatch.setattr(sass_loop.shutil, "which", lambda program: program)
    for words in ([str(broken)], [], ["a", "b"]):
        assert sass_loop.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for words in ([str(broken)], [str(tmp_path / "new.json"), "--against", str(broken)], ["new", "--against", "none"]):
        with pytest.raises(SystemExit, match="2"):
            frozen.main(words)
        assert "error: " in capsys.readouterr().err.splitlines()[-1]
    for module, words in (("decoding", []), ("profile_stages", ["launch"]), ("ring", ["id"]), ("score_mod", [])):
        monkeypatch.setattr(sys, "argv", ["study", *words])
        monkeypatch.delitem(sys.modules, f"helpers.bench.studies.{module}", raising=False)
        with pytest.raises(SystemExit, match="2"):
            runpy.run_module(f"helpers.bench.studies.{module}", run_name="__main__")
        assert f"study {module} FILE` starts this process, on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (("helpers.site.xrays", "none.cu"), "no stage or step has a file none.cu"),
        (("helpers.site.slides", "/dev/null/slides"), "no slides: "),
        (("helpers.setup.make_lock",), "uv is needed"),
        (("helpers.examples.ring_gpt",), "torchrun --nproc-per-node 2"),
    ],
)
def test_other_programs_say_in_a_line_what_is_missing(words: tuple[str, ...], message: str) -> None:
    if words[0] == "helpers.examples.ring_gpt":
        pytest.importorskip("torch")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PATH": ""}
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


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


def test_a_part_that_is_refused_does_not_end_the_others(tmp_path: Path) -> None:
    def refuse() -> dict[str, int]:
        raise records.Refused("no ncu")

    record = Study("toy", {"a": refuse, "b": lambda: {"rows": 1}}, lambda: {"device": "any"}).take(tmp_path / "r.json")
    assert "no ncu" in record["failed"]["a"] and record["b"] == {"rows": 1}

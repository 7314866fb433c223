"""Tests of the engine and the X-ray are left out of the short run where nothing that they read has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import unchanged

ENGINE, COURSE = unchanged.TESTS / "test_engine_math.py", unchanged.TESTS / "test_attention.py"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "builds"))


def test_what_a_file_of_tests_reads() -> None:
    names = {path.relative_to(unchanged.ROOT).as_posix() for path in unchanged.read_by(ENGINE)}
    assert {"tests/test_engine_math.py", "tests/conftest.py", "tests/two_speeds.py", "helpers/engine"} <= names
    assert "helpers/xray" in names and "tests/half_gradients.py" not in names and "kernels" not in names
    of_kernels = set(unchanged.read_by(unchanged.TESTS / "test_xray_counters.py"))
    assert {unchanged.ROOT / "kernels", unchanged.ROOT / "helpers" / "attention"} <= of_kernels


def test_a_file_that_has_passed_is_left_out_and_others_are_not(tmp_path: Path) -> None:
    record = tmp_path / "record.txt"
    assert unchanged.unchanged(record) == []
    unchanged.keep([ENGINE, COURSE])
    assert unchanged.unchanged(record) == [ENGINE] and not record.exists()


def test_a_change_of_what_is_read_or_of_a_setting_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record.txt"
    unchanged.keep([ENGINE], record)
    with monkeypatch.context() as patched:
        patched.setattr(unchanged, "hash_of", lambda path: "another")
        assert unchanged.unchanged(record) == []
    monkeypatch.setattr(unchanged, "_environment", lambda: "another compiler")
    assert unchanged.unchanged(record) == [ENGINE], "the record holds for every machine"
    assert unchanged.unchanged(tmp_path / "no record") == []


def test_some_run_on_each_machine_whatever_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = unchanged.TESTS / unchanged.FIRST[0]
    unchanged.keep([first, ENGINE], tmp_path / "record.txt")
    assert {first, ENGINE} <= set(unchanged.unchanged(tmp_path / "record.txt"))
    monkeypatch.setattr(unchanged, "_environment", lambda: "another compiler")
    assert unchanged.unchanged(tmp_path / "record.txt") == [ENGINE]


def test_the_record_names_files_that_are_there() -> None:
    assert all(
        unchanged.is_of_the_engine(path) and path.is_file()
        for path in map(unchanged.TESTS.joinpath, unchanged.recorded())
    )

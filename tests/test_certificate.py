"""The certificate: an honest one is confirmed, and every change to it is refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.lesson import certify
from helpers.lesson.certify import digest
from helpers.lesson.exercises import exercise, hints, progress

NAME, OTHER = "00_safe_softmax", "00_first_kernel"
FIGURE = "bytes of S read"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the file of a learner who has solved one of two exercises."""
    folder = tmp_path_factory.mktemp("honest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_PROGRESS", str(folder / "progress.json"))
        patch.setattr(progress, "_session", {})
        patch.chdir(folder)
        progress.note(NAME, exercise.ours(NAME).replace("s[j] - m_i", "-m_i + s[j]"), passed=True)
        progress.note(OTHER, exercise.ours(OTHER).replace("blockIdx.x", "threadIdx.x", 1), passed=True)  # now wrong
        exercise.certificate("00_attention")
    return json.loads((folder / "certificate_00.json").read_text())


@pytest.fixture(autouse=True)
def fresh() -> None:
    hints.forget()


def said_of(content: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    file = folder / "ada.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    status = certify.main([str(file)])
    return status, capsys.readouterr().out


def test_an_honest_one_is_confirmed(honest: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(honest["exercises"]) == [NAME], "what fails is not in the file"
    (first, _) = honest["exercises"][NAME]["launches"]
    assert first["FLOP on tensor cores"] == 0
    assert first[FIGURE] > 0 and first["kernel"] == "safe_softmax" and "N = 33" in honest["exercises"][NAME]["size"]
    status, out = said_of(honest, tmp_path, capsys)
    assert status == 0 and "ada.json: 1 of 1 confirmed" in out and f"[PASS] {NAME}" in out
    assert f"safe_softmax: {first[FIGURE] + first['bytes of P read']:,} bytes read" in out
    assert f"not in the file: {OTHER}" in out


def changed(key: str, value: Any, *, forge: bool) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        if key in (FIGURE, "FLOP"):
            assert said["launches"][0].get(key) != value
            said["launches"][0][key] = value
        else:
            said[key] = value(said[key]) if callable(value) else value
        if forge:
            said["digest"] = digest(NAME, said)

    return change


def comment(text: str) -> str:
    return text + "// mine\n"


def spoil(text: str) -> str:
    return text.replace("expf(-m_i + s[j])", "expf(s[j])")


@pytest.mark.parametrize(
    "change, words",
    [
        (changed("text", comment, forge=False), ["changed after the file was written", "the text itself is right"]),
        (changed(FIGURE, 1, forge=False), ["changed after", f"safe_softmax, {FIGURE}: the file says 1, the X-ray "]),
        (changed(FIGURE, 1, forge=True), [f"safe_softmax, {FIGURE}: the file says 1, the X-ray "]),
        (changed("FLOP", 1, forge=False), ["changed after", "the text itself is right"]),
        (changed("size", "N = 1", forge=True), ["the file says 'N = 1', the grader's first size is N = 33"]),
        (changed("launches", [], forge=True), ["the file has 0 launches, the X-ray 2"]),
        (changed("launches", None, forge=True), ["the file has 0 launches, the X-ray 2"]),
        (changed("launches", [1, 2], forge=True), ["the file has 2 launches, the X-ray 2"]),
        (changed("text", spoil, forge=True), ["right at the first size: P of scores near -100,000"]),
        (changed("text", spoil, forge=False), ["changed after", "right at the first size: "]),
        (changed("text", 1, forge=True), ["not what exercise.certificate() writes"]),
        (changed("more", 1, forge=True), ["not what exercise.certificate() writes"]),
        (changed("digest", 1, forge=False), ["changed after"]),
    ],
)
def test_what_was_changed_is_refused(
    change: Callable[[dict[str, Any]], None],
    words: list[str],
    honest: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = json.loads(json.dumps(honest))
    change(copy["exercises"][NAME])
    status, out = said_of(copy, tmp_path, capsys)
    assert status == 1 and "0 of 1 confirmed" in out and f"[FAIL] {NAME}" in out
    assert all(word in out for word in words), out


def test_flop_are_shown_not_compared(
    honest: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = json.loads(json.dumps(honest))
    launch = copy["exercises"][NAME]["launches"][0]
    counted = launch.pop("FLOP", None)  # as with clang
    copy["exercises"][NAME]["digest"] = digest(NAME, copy["exercises"][NAME])
    status, out = said_of(copy, tmp_path, capsys)
    assert status == 0 and (counted is None or f" barriers, {counted:,} FLOP: " in out)


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "no file of exercise.certificate(): JSONDecodeError"),
        ("[]", "no file of exercise.certificate(): TypeError"),
        ({"exercises": []}, "no file of exercise.certificate(): AttributeError"),
        ({"exercises": {}}, "0 of 0 confirmed"),
        ({"exercises": {"00_no_such": {}}}, "the course has no exercise of this name"),
    ],
)
def test_what_is_no_certificate(content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = said_of(content, tmp_path, capsys)
    assert status == 1 and words in out
    assert certify.main([str(tmp_path / "none.json")]) == 1 and certify.main([]) == 2


def test_with_nothing_solved_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(progress, "_session", {})
    monkeypatch.chdir(tmp_path)
    exercise.certificate("03")
    assert capsys.readouterr().out == "0 of 4 exercises solved: nothing is written.\n" and not list(tmp_path.iterdir())
    assert "certificate" not in repr(exercise.progress())

"""Machine code of two texts of a kernel is compared: a changed constant differs, a changed comment does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.attention import kernel
from helpers.bench import same_sass
from helpers.engine import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="NVRTC is not installed")
ONE = ["--only", "01", "--arch", "sm_80", "--head-dims", "64"]


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A copy of the kernels, as of another checkout."""
    return Path(shutil.copytree(kernel.KERNELS, tmp_path / "kernels"))


def edited(folder: Path, old: str, new: str) -> None:
    file = folder / "01_naive.cu"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_comment_changes_nothing(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(before, "//", "// another word;")
    assert same_sass.main([str(before), *ONE]) == 0
    assert capsys.readouterr().out == "01_naive.cu float32 d=64 sm_80: same\n"


def test_a_constant_does(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(before, "c < HEAD_DIM", "c < HEAD_DIM - 1")
    assert same_sass.main([str(before), *ONE]) == 1
    assert "sm_80: DIFFERS: naive: " in capsys.readouterr().out


def test_a_kernel_that_was_not_there_is_new(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (before / "01_naive.cu").unlink()
    assert same_sass.main([str(before), *ONE]) == 0
    assert capsys.readouterr().out.endswith(": new\n")


def test_what_does_not_compile_is_a_difference(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(before, "c < HEAD_DIM", "c < HEAD_DIMENSION")
    assert same_sass.main([str(before), *ONE]) == 1
    text = capsys.readouterr().out
    assert "FAILS: " in text and "HEAD_DIMENSION" in text


def test_the_folder_of_kernels_is_as_before(before: Path) -> None:
    usual = kernel.KERNELS
    assert same_sass.text_of(before, "01_naive.cu") == kernel.source("01_naive.cu")
    assert usual == kernel.KERNELS

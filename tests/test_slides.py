"""The slides of the three lectures: none is empty, and each has all questions and pictures of its notebooks."""

from __future__ import annotations

from pathlib import Path

from helpers.lesson.exercises.holes import number_of
from helpers.site import notebook_pages, slides


def test_slides(tmp_path: Path) -> None:
    numbers = [number for several in slides.LECTURES.values() for number in several]
    for notebook in (notebook_pages.read(path) for path in notebook_pages.paths() if number_of(path.name) in numbers):
        cells = notebook["cells"]
        pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", ()))
        asked = sum(cell["source"].count("= predict(") for cell in cells)
        kinds = [cell["metadata"]["slideshow"]["slide_type"] for cell in slides.slides(notebook)]
        assert (kinds.count("-"), kinds.count("slide")) == (pictures, 1 + asked + pictures)
        assert kinds.count("fragment") == asked >= 4, "each question has its answer"
    for page in slides.write(tmp_path / "slides"):
        text = page.read_text(encoding="utf-8")
        assert text.count("<section") > 20 and text.count("data:image/png;base64") >= 8 and "reveal" in text
        assert "No guess yet" not in text and "import sys" not in text

"""CUDA that tests compile and that fills a screen, in files of its own: tests/cuda/NAME.cu."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "cuda"


def cuda_text(name: str) -> str:
    """Return the text of a file, with an empty line in place of the first one, which says whose it is."""
    return "\n" + (FOLDER / f"{name}.cu").read_text(encoding="utf-8").partition("\n")[2]

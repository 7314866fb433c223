"""CUDA of tests that fills a screen, in separate files: tests/cuda/NAME.cu."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "cuda"


def cuda_text(name: str) -> str:
    """Return the text of a file, with its first line, which names the test, replaced by an empty one."""
    return "\n" + (FOLDER / f"{name}.cu").read_text(encoding="utf-8").partition("\n")[2]

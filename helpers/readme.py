"""The parts of README.md that are made from the recorded GPU run: its table and its plot.

    python3 helpers/course.py bench --readme      writes both again

A test compares the table with the record, so README never says what nobody measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RECORD = ROOT / "notebooks" / "measured" / "nvidia-h200.json"
PLOT = ROOT / "notebooks" / "measured" / "ladder.png"
SHAPE = (1, 1, 16384, 64)
PEER = "SDPA efficient"
BEGIN, END = "<!-- table: made by course.py bench --readme -->", "<!-- end of table -->"

_LESSONS = (
    ("00_attention", None, "what attention computes, what it costs, how the course works"),
    ("01_naive", "naive", "one thread per query row: correct first"),
    ("02_tiled", "tiled", "K and V tiles in shared memory; barriers and banks"),
    ("03_online_softmax", "online_softmax", "one pass: the recurrence of FlashAttention"),
)


def table(record: dict[str, Any]) -> str:
    """The notebooks as a Markdown table, with the recorded time of each stage and its ratio to the peer."""
    by_name = {r["name"]: r for r in record["results"] if tuple(r["shape"]) == SHAPE and r["kind"] in ("stage", "peer")}
    peer = by_name[PEER]
    lines = [
        f"| notebook | what you learn | ms | TFLOP/s | speed against {PEER} |",
        "|---|---|---:|---:|---:|",
    ]
    for notebook, stage, lesson in _LESSONS:
        link = f"[{notebook}](notebooks/{notebook}.ipynb)"
        if stage is None:
            lines.append(f"| {link} | {lesson} | | | |")
            continue
        r = by_name[stage]
        lines.append(f"| {link} | {lesson} | {r['ms']:.2f} | {r['tflops']:.1f} | {peer['ms'] / r['ms']:.2f} |")
    for name in (PEER, "SDPA math"):
        r = by_name[name]
        ratio = f"{peer['ms'] / r['ms']:.2f}"
        lines.append(f"| *peer* | PyTorch, {name} backend | {r['ms']:.2f} | {r['tflops']:.1f} | {ratio} |")
    roof = next(r for r in record["results"] if r["name"] == "matmul")
    lines.append(f"| *roof* | PyTorch, float32 matrix product, 8192³ | | {roof['tflops']:.1f} | |")
    device = record["device"]
    n, d = SHAPE[2:]
    lines += [
        "",
        f"One head, N = {n:,}, d = {d}, float32, median of many launches on one {device['name']} "
        f"(driver {device['driver']}, CuPy {device['cupy']}, NVRTC {device['nvrtc']}, PyTorch {device['torch']}); "
        "all in one run, in [nvidia-h200.json](notebooks/measured/nvidia-h200.json).",
    ]
    return "\n".join(lines)


def with_table(text: str, record: dict[str, Any]) -> str:
    """README's text with the table between its markers made anew.

    Raises:
        ValueError: the markers are missing.
    """
    pattern = re.escape(BEGIN) + r".*?" + re.escape(END)
    if not re.search(pattern, text, flags=re.S):
        raise ValueError(f"README.md has no part between {BEGIN!r} and {END!r}")
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{table(record)}\n\n{END}", text, flags=re.S)


def write() -> None:
    """Make README's table and plot from the record."""
    from helpers import show

    record = json.loads(RECORD.read_text())
    README.write_text(with_table(README.read_text(), record))
    names = ("naive", "tiled", "online_softmax", "SDPA math", PEER)
    picture = show.measured_bars(SHAPE, names, quantity="tflops", record=record)
    PLOT.write_bytes(picture.png())

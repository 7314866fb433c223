"""Make README's table and plot from the recorded GPU run.

    python3 helpers/course.py bench --readme      rewrites both

Tests compare the table, and the figures stored in the plot's file, with the record, so README shows only measured
figures.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin  # comes with matplotlib

from helpers.attention.ladder import LADDER
from helpers.bench import plots, reading
from helpers.bench.plan import gradients
from helpers.bench.results import MAIN_PEER, RECORD, roof_name
from helpers.draw.picture import Picture

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PLOT = ROOT / "notebooks" / "measured" / "ladder.png"
BEGIN, END = "<!-- table: made by course.py bench --readme -->", "<!-- end of table -->"

# The columns: (batch, heads, rows, head_dim), type. Columns that the record lacks are left out.
COLUMNS = (
    ((1, 1, 16384, 64), "float32"),
    ((4, 16, 4096, 64), "float32"),
    ((4, 16, 4096, 128), "float32"),
    ((4, 16, 4096, 64), "bfloat16"),
    ((4, 16, 4096, 128), "bfloat16"),
)
# The columns of the table of gradients: also whether causal. The last two shapes are those of FlashAttention-2's
# figures.
GRADIENT_COLUMNS = (
    ((4, 16, 4096, 64), "float32", False),
    ((4, 16, 4096, 128), "float32", False),
    *(((4, heads, 4096, d), "bfloat16", causal) for heads, d in ((32, 64), (16, 128)) for causal in (False, True)),
)
NEIGHBOURS = "functions of scores as a line of CUDA, block masks; when fusing loses: rotary embedding, projection"
MANY_GPUS = "many GPUs: ring attention, zigzag, all-gather; over NCCL, peer copies or virtual ranks"
DECODING = "one token at a time: split keys, packed heads, a cache in pages, merged by the last block"
PEERS = {  # name in the record -> name in the table
    **{name: f"PyTorch, {name}" for name in ("SDPA efficient", "SDPA math", "SDPA flash", "SDPA cuDNN")},
    **{name: name for name in ("FlashAttention-3", "FlashAttention-4")},
}


def _columns(record: Mapping[str, Any]) -> list[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Return (heading, type, results by name) of each column that the record can fill."""
    columns = []
    for shape, dtype in COLUMNS:
        results = {r["name"]: r for r in reading.measurements(shape, dtype=dtype, record=record)}
        stage = any(r["kind"] == "stage" for r in results.values())
        if stage and MAIN_PEER[dtype] in results:
            batch, heads, n, head_dim = shape
            many = f"{batch} × {heads} heads" if batch * heads > 1 else "one head"
            columns.append((f"{dtype}<br>{many}<br>N = {n}, d = {head_dim}", dtype, results))
    return columns


def ladder_table(record: Mapping[str, Any]) -> str:
    """Format the recorded stages as Markdown: TFLOP/s, and in brackets the speed relative to the column's peer."""
    columns = _columns(record)
    rows = [(0, "00_attention", "what attention computes, what it costs, how the course works", [""] * len(columns))]
    rows.append((11, "11_fused", NEIGHBOURS, [""] * len(columns)))  # its stages have their own record
    rows.append((14, "14_decoding", DECODING, [""] * len(columns)))  # not a stage; has its own record
    rows.append((17, "17_many_gpus", MANY_GPUS, [""] * len(columns)))  # the same

    def cells_of(name: str) -> list[str]:
        return [_cell(results.get(name), results[MAIN_PEER[dtype]]) for _, dtype, results in columns]

    for stage in LADDER.values():
        if any(cells := cells_of(stage.name)):
            rows.append((stage.number, Path(stage.file).stem, stage.idea, cells))
    lines = _head([heading for heading, *_ in columns])
    lines += [_row(_link(file), idea, cells) for _, file, idea, cells in sorted(rows, key=lambda row: row[0])]
    lines += [_row("*peer*", label, cells) for name, label in PEERS.items() if any(cells := cells_of(name))]
    roofs = {r["name"]: r["tflops"] for r in record["results"] if r["kind"] == "roof"}
    cells = [_number(roofs[roof_name(dtype)]) for _, dtype, _ in columns]
    lines.append(_row("*roof*", "PyTorch, matrix product, 8192³", cells))
    device = record["device"]
    lines += [
        "",
        "TFLOP/s, and in brackets the speed relative to PyTorch's SDPA: its memory-efficient backend in float32"
        + (", its FlashAttention-2 in bfloat16" if any(dtype == "bfloat16" for _, dtype, _ in columns) else "")
        + f". Median of many launches on one {device['name']} (driver {device['driver']}, CuPy {device['cupy']}, "
        f"NVRTC {device['nvrtc']}, PyTorch {device['torch']}); all in one run{_earlier(record)}, "
        "in [nvidia-h200.json](notebooks/measured/nvidia-h200.json).",
    ]
    return "\n".join(lines)


def _earlier(record: Mapping[str, Any]) -> str:
    """Say which rows are from other runs, and by how much the peers that two runs timed differ."""
    earlier = record["how"].get("earlier")
    if earlier is None:
        return ""
    *names, last = earlier["names"]
    ratio = earlier["time_beside_the_earlier_run"]
    return (
        f" but {', '.join(names)} and {last}, from other runs (peers that two of them timed took {ratio['min']:.2f} to "
        f"{ratio['max']:.2f} times as long in the later one, median {ratio['median']:.2f})"
    )


def gradients_table(record: Mapping[str, Any]) -> str:
    """Format the recorded gradients as a second table with the same columns; "" if none are recorded."""
    columns = []
    for shape, dtype, causal in GRADIENT_COLUMNS:
        rows_at = reading.measurements(shape, dtype=dtype, causal=causal, record=record, backward=True)
        results = {r["name"]: r for r in rows_at}
        if MAIN_PEER[dtype] in results and any(r["kind"] == "backward" for r in rows_at):
            batch, heads, n, d = shape
            heading = f"{dtype}{', causal' * causal}<br>{batch} × {heads} heads<br>N = {n}, d = {d}"
            columns.append((heading, results, results[MAIN_PEER[dtype]]))
    if not columns:
        return ""
    lines = [
        "The gradients alone, from the output and the log-sum-exp that the forward pass left; 2.5 times its FLOP:",
        "",
        *_head([heading for heading, *_ in columns]),
    ]
    rows = [
        (_link(Path(way.stage.file).stem), way.stage.idea + "; deterministic" * way.deterministic, way.name)
        for way in gradients()
    ]
    rows += [("*peer*", label, name) for name, label in PEERS.items()]
    for first, second, name in rows:
        cells = [_cell(results.get(name), peer) for _, results, peer in columns]
        if any(cells):
            lines.append(_row(first, second, cells))
    return "\n".join(lines)


def _link(title: str) -> str:
    """Link a kernel's name to its notebook: a workshop with its name, or the notebook with its number."""
    folder, number, idea = ROOT / "notebooks", title[:2], title[3:]
    several = (sorted(folder.glob(f"{number}{pattern}.ipynb")) for pattern in (f"_{idea}", f"[a-z]_{idea}", "_*"))
    files = next(filter(None, several), [])
    return f"[{title}](notebooks/{files[0].name})" if files else title


def _head(headings: list[str]) -> list[str]:
    return [_row("notebook", "the idea", headings), "|---|---|" + "---:|" * len(headings)]


def _row(first: str, second: str, cells: list[str]) -> str:
    return f"| {first} | {second} | " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _cell(result: Mapping[str, Any] | None, peer: Mapping[str, Any]) -> str:
    if result is None:
        return ""
    if result is peer:
        return f"{_number(result['tflops'])} (1)"
    ratio = peer["ms"] / result["ms"]
    return f"{_number(result['tflops'])} ({ratio:{'.2f' if ratio > 0.01 else '.1g'}})"


def with_table(text: str, record: Mapping[str, Any]) -> str:
    """Replace the tables between the markers in README's text.

    Raises:
        ValueError: the markers are missing.
    """
    pattern = re.escape(BEGIN) + r".*?" + re.escape(END)
    if not re.search(pattern, text, flags=re.S):
        raise ValueError(f"README.md has no part between {BEGIN!r} and {END!r}")
    tables = "\n\n".join(filter(None, (ladder_table(record), gradients_table(record))))
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{tables}\n\n{END}", text, flags=re.S)


def picture(record: Mapping[str, Any]) -> Picture:
    """Draw the ladder at the table's columns, a row of panels for each type."""
    by_type: dict[str, list[tuple[int, ...]]] = {}
    for shape, dtype in COLUMNS:
        if any(r["kind"] == "stage" for r in reading.measurements(shape, dtype=dtype, record=record)):
            by_type.setdefault(dtype, []).append(shape)
    return plots.measured_overview(by_type, record=record)


def digest(record: Mapping[str, Any]) -> str:
    """Hash everything that the plot shows: each bar, each roof, the GPU's name."""
    shown = [
        [shape, dtype, r["name"], r["kind"], r["tflops"]]
        for shape, dtype in COLUMNS
        for r in reading.measurements(shape, dtype=dtype, record=record)
    ]
    roofs = [[r["name"], r.get("tflops")] for r in record["results"] if r["kind"] == "roof"]
    return hashlib.sha256(json.dumps([shown, roofs, record["device"]["name"]]).encode()).hexdigest()


def plot(record: Mapping[str, Any]) -> bytes:
    """Return the picture as PNG, with the digest of its content in its text chunk."""
    noted, file = PngImagePlugin.PngInfo(), io.BytesIO()
    noted.add_text("record", digest(record))
    Image.open(io.BytesIO(picture(record).png())).save(file, "PNG", optimize=True, pnginfo=noted)
    return file.getvalue()


def plotted() -> str | None:
    """Read the digest from the plot's file; None if there is none."""
    with Image.open(PLOT) as image:
        return image.text.get("record")


def write() -> None:
    """Make README's table and plot from the record."""
    record = json.loads(RECORD.read_text())
    README.write_text(with_table(README.read_text(), record))
    PLOT.write_bytes(plot(record))

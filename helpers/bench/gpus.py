"""Show the records of all GPUs side by side, and check a record before it is committed.

    python3 helpers/course.py bench --peers --json notebooks/measured/nvidia-a100-sxm4-80gb.json
    python3 -m helpers.bench.gpus [FILE ...]     # what is wrong with records; the committed ones if none is named

A record is notebooks/measured/GPU.json, named after the GPU that its "device" names. `side_by_side` shows all of
them, in notebook 09 and on the site.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from helpers.attention.ladder import LADDER
from helpers.bench import reading
from helpers.bench.results import MAIN_PEER, NO_RECORD, PATHS, RECORD, Measurement, Note, roof_name
from helpers.draw.picture import Text

FOLDER = RECORD.parent
KINDS = {
    *("stage", "peer", "roof", "variant", "step", "experiment", "host"),
    *("backward", "backward peer", "backward step", "backward experiment"),
}
# What a record says about its machine. None of it identifies the machine or its owner.
NEEDED = {"description", "python", "numpy", "name", "compute_capability", "multiprocessors", "cupy", "nvrtc"}
ALLOWED = NEEDED | {"clock_mhz", "l2_bytes", "memory_bytes", "cuda_driver_api", "driver", "torch", "triton", "cudnn"}
MAIL = re.compile(r"[\w.+-]+@[\w-]+\.\w")
# (batch, heads, rows, head_dim), type: the columns of the table of all GPUs.
SHOWN = (((4, 16, 4096, 64), "float32"), ((4, 16, 4096, 128), "bfloat16"))


def slug(name: str) -> str:
    """Return a GPU's name as it is in a file's name: "NVIDIA A100-SXM4-80GB" is "nvidia-a100-sxm4-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def problems(record: Any, file: str | None = None) -> list[str]:
    """List what prevents a record from being committed, a sentence each.

    Args:
        record: the content of the JSON file. file: its name, if that should be checked.
    """
    if not isinstance(record, Mapping) or {"device", "how", "results", "notes"} - set(record):
        return ['it is no record of `bench --json`: "device", "how", "results" and "notes" are needed']
    device = record["device"]
    wrong = [f'"device" lacks {name!r}: it was not measured on a GPU' for name in sorted(NEEDED - set(device))]
    wrong += [f'"device" has {name!r}, which no record needs' for name in sorted(set(device) - ALLOWED)]
    name = str(device.get("name", ""))
    if file is not None and name and file != f"{slug(name)}.json":
        wrong.append(f"the file of {name} is named {slug(name)}.json, not {file}")
    if "done" in record["how"]:
        wrong.append("the run was stopped before its end: bench --resume finishes it")
    for i, result in enumerate(record["results"]):
        wrong += [f"result {i} ({_label(result)}): {what}" for what in _wrong(result)]
    wrong += [
        f"note {i}: its fields are not a note's" for i, note in enumerate(record["notes"]) if not _fits(note, Note)
    ]
    wrong += [f"{_label(note)} failed: {note.get('why')}" for note in record["notes"] if note.get("failed")]
    for text in _texts(record):
        if PATHS.search(text) or MAIL.search(text):
            wrong.append(f"it holds a path or an address: {text[:80]!r}")
    if not any(result.get("kind") == "stage" for result in record["results"]):
        wrong.append("it has no stage")
    return wrong


def _label(entry: Any) -> str:
    return f"{entry.get('kind')} {entry.get('name')}" if isinstance(entry, Mapping) else str(entry)[:40]


def _fits(entry: Any, kind: type) -> bool:
    """Return True if an entry has exactly the fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return isinstance(entry, Mapping) and needed <= set(entry) <= names


def _wrong(result: Any) -> list[str]:
    """List what is wrong with a measurement."""
    if not _fits(result, Measurement):
        return ["its fields are not a measurement's"]
    wrong = []
    if result["kind"] not in KINDS:
        wrong.append(f"the kind {result['kind']!r} is unknown")
    times = [result["ms_min"], result["ms"], result["ms_max"]]
    figures = [*times, *(result[name] for name in ("tflops", "gbps") if result.get(name) is not None)]
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in figures):
        wrong.append("a time or a rate is not a positive number")
    elif times != sorted(times):
        wrong.append("ms is not between ms_min and ms_max")
    if result["kind"] in ("stage", "backward"):
        error, allowed = result.get("max_error"), result.get("tolerance")
        if error is None or allowed is None or not error <= allowed:
            wrong.append(f"it was not right: max_error {error}, tolerance {allowed}")
    return wrong


def _texts(value: Any) -> list[str]:
    """List all texts in a value, including names of fields."""
    if isinstance(value, Mapping):
        return [text for key, each in value.items() for text in (str(key), *_texts(each))]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def records(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Read all committed records, by their GPU's name: newest compute capability first, then by name."""
    by_gpu = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        device = record.get("device") if isinstance(record, dict) and "results" in record else None
        if isinstance(device, dict) and path.stem == slug(str(device.get("name", ""))):
            by_gpu[device["name"]] = record
    newest = sorted(by_gpu, key=lambda name: (-float(by_gpu[name]["device"]["compute_capability"]), name))
    return {name: by_gpu[name] for name in newest}


def side_by_side(
    cases: Sequence[tuple[Sequence[int], str]] = SHOWN, *, folder: Path = FOLDER, causal: bool = False
) -> Text:
    """Format every stage on every recorded GPU: TFLOP/s, and the share of the GPU's own matrix product.

    Args:
        cases: (shape, dtype): (batch, heads, rows, head_dim) each; a column for each case and GPU that has it.

    Returns:
        A table, and how to add a GPU. One sentence if nothing is recorded.
    """
    columns = []
    for shape, dtype in cases:
        for name, record in records(folder).items():
            at = reading.measurements(shape, dtype=dtype, causal=causal, record=record)
            roofs = {r["name"]: r for r in record["results"] if r["kind"] == "roof"}
            if any(r["kind"] == "stage" for r in at):
                columns.append((name, shape, dtype, {r["name"]: r for r in at}, roofs.get(roof_name(dtype))))
    if not columns:
        return Text(f"*({NO_RECORD})*")
    heads = [f"{name}<br>{dtype}, $d$ = {shape[3]}" for name, shape, dtype, _, _ in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
    for name, stage in LADDER.items():
        row = [_share(results.get(name), roof) for _, _, _, results, roof in columns]
        if any(row):
            lines.append(f"| {stage.number:02} {name} | {' | '.join(row)} |")
    peers = [_share(results.get(MAIN_PEER[dtype]), roof) for _, _, dtype, results, roof in columns]
    lines.append(f"| *PyTorch, {' or '.join(dict.fromkeys(MAIN_PEER[c[2]] for c in columns))}* | {' | '.join(peers)} |")
    roofs = [f"{roof['tflops']:.3g}" if roof else "" for *_, roof in columns]
    lines.append(f"| *its matrix product* | {' | '.join(roofs)} |")
    batch, heads_, rows, _ = cases[0][0]
    gpus = list(dict.fromkeys(name for name, *_ in columns))
    lines += [
        "",
        f"TFLOP/s, and the share of the GPU's own matrix product; {batch} × {heads_} heads of {rows} rows. "
        f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} so far. Yours is a pull request with the file that "
        "`python3 helpers/course.py bench --peers --json FILE` writes.",
    ]
    return Text("\n".join(lines))


def _share(result: Mapping[str, Any] | None, roof: Mapping[str, Any] | None) -> str:
    if not result or not result.get("tflops"):
        return ""
    return f"{result['tflops']:.3g}" + (f" ({result['tflops'] / roof['tflops']:.0%})" if roof else "")


def main(words: Sequence[str]) -> int:
    """Print what is wrong with the named records, or the committed ones. Return 1 if something is."""
    paths = [Path(word) for word in words] or [FOLDER / f"{slug(name)}.json" for name in records()]
    wrong = 0
    for path in paths:
        try:
            messages = problems(json.loads(path.read_text(encoding="utf-8")), path.name)
        except (OSError, ValueError) as error:
            messages = [f"it cannot be read: {error}"]
        wrong += bool(messages)
        print("\n".join([f"{path.name}: {'can be committed' if not messages else 'cannot be committed:'}", *messages]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

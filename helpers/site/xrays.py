"""X-rays of small launches, line by line, for the pages of kernels.

    python3 -m helpers.site.xrays [FILE ...]      # prints them as JSON; `build` runs it in a separate process

Each stage and step is launched once on the CPU engine, with the sizes in `LAUNCH`. A kernel's figures are cached next
to the engine's builds, under a hash of its text and the engine: only changed kernels are launched again.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from helpers.attention import kernel
from helpers.attention.decoders import DECODERS, SPLIT_KV
from helpers.attention.fp8 import quantise
from helpers.attention.ladder import LADDER, Rung
from helpers.attention.ladder.steps import BASES, CLIMBS
from helpers.engine import compiler, nvrtc
from helpers.lesson import decoding
from helpers.lesson.shortcuts import xray_gradients, xray_stage
from helpers.site.links import ROOT, run_on_cpu
from helpers.xray import Report

ROWS, KEYS, HEAD_DIM = 128, 256, 64
LENGTHS = (100, 40, 260)
LAUNCH = {
    "forward": f"one head of {ROWS} queries and {KEYS} keys, head_dim {HEAD_DIM}",
    "backward": f"one head of {ROWS} queries and {ROWS} keys, head_dim {HEAD_DIM}",
    "decode": f"one new token of sequences of {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]} keys, "
    f"8 heads that share 2 of K and V, head_dim {HEAD_DIM}, planned for a GPU of 4 multiprocessors",
}
# For one line and one array: bytes that the threads read and wrote, warps' requests to global memory and the sectors
# that they touch, requests to shared memory, their wavefronts, and those beyond the minimum.
COUNTS = ("read", "written", "requests", "sectors", "shared_requests", "wavefronts", "conflicts")
Xray = dict[str, Any]


def stages() -> dict[str, Rung]:
    """Map files below kernels/ to the stages and steps that are launched: all except those that include CuTe."""
    every = (stage for climb in (*CLIMBS.values(), BASES.values()) for stage in climb)
    by_file = {stage.file: stage for stage in (*LADDER.values(), *every, *DECODERS.values())}
    return {file: stage for file, stage in by_file.items() if not nvrtc.uses_cute(kernel.source(file))}


def xray_of(stage: Rung) -> Xray:
    """Launch a stage once under the X-ray, or read the cached figures.

    Returns:
        "what": the launch in words. "launches": [kernel, grid, block] for each. "findings": their number.
        "arrays": name -> `COUNTS`; "shared" the names that are in shared memory. "lines": file -> line -> array ->
        `COUNTS`.
    """
    kept = compiler.cache_dir() / f"site-xray-{_key(stage.file)}.json"
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    result = _summary(LAUNCH[stage.direction], _reports(stage))
    compiler.keep(kept, json.dumps(result))
    return result


def _reports(stage: Rung) -> list[Report]:
    rng = np.random.default_rng(0)
    if stage.direction == "decode":
        own = None if stage is SPLIT_KV else stage.name
        return decoding.xray_launches(decoding.inputs(LENGTHS), stage=own)
    keys = KEYS if stage.direction == "forward" else ROWS
    shapes = [(ROWS, HEAD_DIM)] * (2 - (stage.direction == "forward")) + [(keys, HEAD_DIM)] * 2
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    if "uint8" in stage.dtypes:
        arrays = [quantise(a) for a in arrays]
    elif "float32" not in stage.dtypes:
        arrays = [a.astype(np.float16) for a in arrays]
    if stage.direction == "forward":
        return [xray_stage(stage, *arrays)]
    return list(xray_gradients(stage, *arrays).values())


def _summary(what: str, reports: Sequence[Report]) -> Xray:
    lines: dict[str, dict[int, dict[str, list[int]]]] = {}
    arrays: dict[str, list[int]] = {}
    for report in reports:
        for (file, line), parts in report.by_access.items():
            of_line = lines.setdefault(file, {}).setdefault(line, {})
            for name, f in parts.items():
                counts = [f.read, f.written, f.requests - f.shared_requests, f.sectors]
                counts += [f.shared_requests, f.wavefronts, f.conflicts]
                _add(of_line.setdefault(name, [0] * len(COUNTS)), counts)
                _add(arrays.setdefault(name, [0] * len(COUNTS)), counts)
    return {
        "what": what,
        "launches": [[report.name, report.grid, report.block] for report in reports],
        "findings": sum(len(report.findings) for report in reports),
        "arrays": arrays,
        "shared": sorted({name for report in reports for name in report.shared}),
        "lines": lines,
    }


def _add(to: list[int], counts: Iterable[int]) -> None:
    to[:] = [one + other for one, other in zip(to, counts, strict=True)]


def _key(file: str) -> str:
    """Return a key of all that a kernel's figures depend on: its text, the engine, the stages' sizes, this file."""
    return hashlib.sha256(f"{_surroundings()}\0{file}\0{kernel.source(file)}".encode()).hexdigest()[:32]


@functools.cache
def _surroundings() -> str:
    digest = hashlib.sha256()
    for folder in ("helpers/engine", "helpers/attention/ladder"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                digest.update(path.read_bytes())
    digest.update((ROOT / "helpers" / "site" / "xrays.py").read_bytes())
    return digest.hexdigest()


def on_cpu(files: Sequence[str] = ()) -> dict[str, Xray]:
    """Record the X-rays with `run_on_cpu`. files: below kernels/; empty for all of `stages()`."""
    return json.loads(run_on_cpu("xrays", "the X-rays of the kernels", *files))


def _all(files: Sequence[str]) -> Iterator[tuple[str, Xray]]:
    by_file = stages()
    if unknown := set(files) - set(by_file):
        print(f"no stage or step has a file {min(unknown)}", file=sys.stderr)
        sys.exit(2)
    for file in files or by_file:
        yield file, xray_of(by_file[file])


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(json.dumps(dict(_all(sys.argv[1:]))))

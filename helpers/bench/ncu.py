"""Run programs under Nsight Compute, and read its CSV."""

from __future__ import annotations

import csv
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.device import describe

_ABOUT = "==ABOUT== "  # begins the line that a CSV is stamped with; Nsight Compute's own notes begin with == as well


def about() -> dict[str, str]:
    """Name this machine's device and Nsight Compute: {"device": ..., "ncu": the version}."""
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    return {"device": describe(), "ncu": version[-1] if version else ""}


def stamp(target: Path) -> None:
    """Write what measured into a CSV, as its first line."""
    target.write_text(f"{_ABOUT}{json.dumps(about())}\n{target.read_text()}")


def stamped(text: str) -> dict[str, str]:
    """Read what `stamp` wrote. Raises ValueError for a CSV without it."""
    line = text.partition("\n")[0]
    if not line.startswith(_ABOUT):
        raise ValueError(f"the CSV does not begin with {_ABOUT}, so it does not say which device was measured")
    return json.loads(line.removeprefix(_ABOUT))


@functools.cache
def known_metrics() -> frozenset[str]:
    """List the base names of this ncu's metrics for this GPU. Raises RuntimeError without ncu."""
    try:
        asked = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"Nsight Compute is needed, as `ncu` on the path: {error}") from None
    return frozenset(line.split()[0] for line in asked.stdout.splitlines() if line.strip())


def _is_known(metric: str, known: frozenset[str]) -> bool:
    """Return True if ncu has a metric: its base name is known, or it is a figure of the launch."""
    return metric.split(".")[0] in known or metric.startswith("launch__")


def first_known(metrics: Sequence[str]) -> str:
    """Return the first of some metrics that this ncu has; if it has none of them, the first."""
    return next((name for name in metrics if _is_known(name, known_metrics())), metrics[0])


def profile(target: Path, wanted: Sequence[str], kernels: Sequence[str], words: Sequence[str], *options: str) -> None:
    """Run `python3 -m WORDS` under Nsight Compute, and write its CSV of these kernels' metrics.

    A metric that this ncu does not know is left out, and named on stderr.

    Raises:
        RuntimeError: ncu is missing or failed; the message is its own.
    """
    known = known_metrics()
    metrics = [name for name in wanted if _is_known(name, known)]
    print("not known to this ncu:", sorted(set(wanted) - set(metrics)), file=sys.stderr)
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", *options]
    command += [
        "--kernel-name-base",
        "function",
        "-k",
        f"regex:^({'|'.join(kernels)})$",
        "--metrics",
        ",".join(metrics),
    ]
    command += ["--print-kernel-base", "function", "--log-file", str(target)]
    done = subprocess.run([*command, sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def launches_of(text: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Parse Nsight Compute's raw page as CSV into a pair for each launch: kernel, column -> (value, unit).

    Raises:
        ValueError: the text has no such table.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table of ncu --csv --page raw in: {text[:300]!r}")
    head, units, *table = [row for row in csv.reader(lines[start:]) if row and not row[0].startswith("==")]
    launches = []
    for row in table:
        columns = dict(zip(head, zip(row, units, strict=True), strict=True))
        launches.append((columns["Kernel Name"][0].split("(")[0], columns))
    return launches

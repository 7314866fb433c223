"""Run programs under Nsight Compute, and read its CSV."""

from __future__ import annotations

import csv
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.bench.counters import FIGURES, STALLS, stall_metric
from helpers.bench.records import Refused
from helpers.device import cp, describe

Columns = Mapping[str, tuple[str, str]]  # those of one launch: name -> (value, unit)
MARK = "utilisation_mark"
# ncu always reports this with the launch, and does not list it among its metrics.
UNASKED = FIGURES["occupancy % at most"]
_UNITS = {"nsecond": 1e-6, "ns": 1e-6, "usecond": 1e-3, "us": 1e-3, "msecond": 1.0, "ms": 1.0}


def about() -> dict[str, str]:
    """Return {"device": this machine's, "ncu": the version of Nsight Compute}. Raises Refused without ncu."""
    version = _asked("--version").strip().splitlines()
    return {"device": describe(), "ncu": version[-1] if version else ""}


def _asked(option: str) -> str:
    """Return what `ncu` prints with an option. Raises Refused without ncu."""
    try:
        return subprocess.run(["ncu", option], capture_output=True, text=True).stdout
    except OSError as error:
        raise Refused(f"Nsight Compute is needed: `ncu` must be on PATH: {error}") from None


@functools.cache
def known_metrics() -> frozenset[str]:
    """List the base names of this ncu's metrics for this GPU. Raises Refused without ncu."""
    return frozenset(line.split()[0] for line in _asked("--query-metrics").splitlines() if line.strip())


def _is_known(metric: str, known: frozenset[str]) -> bool:
    """Return True if ncu has a metric: its base name is known, or it is a figure of the launch."""
    return metric.split(".")[0] in known or metric.startswith("launch__")


def first_known(metrics: Sequence[str]) -> str:
    """Return the first of these metrics that this ncu has; if it has none, the first."""
    return next((name for name in metrics if _is_known(name, known_metrics())), metrics[0])


def profile(target: Path, wanted: Sequence[str], kernels: Sequence[str], words: Sequence[str], *options: str) -> None:
    """Run `python3 -m WORDS` under Nsight Compute, and write its CSV of these kernels' metrics.

    Metrics that this ncu does not know are left out, and named on stderr.

    Raises:
        Refused: ncu is missing.
        RuntimeError: ncu failed with this message.
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
        raise RuntimeError(f"ncu exited with code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def launches_of(text: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Parse Nsight Compute's raw CSV page into a pair for each launch: kernel, column -> (value, unit).

    Raises:
        ValueError: the text has no table.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"the output of ncu --csv --page raw has no table: {text[:300]!r}")
    head, units, *table = [row for row in csv.reader(lines[start:]) if row and not row[0].startswith("==")]
    launches = []
    for row in table:
        columns = dict(zip(head, zip(row, units, strict=True), strict=True))
        launches.append((columns["Kernel Name"][0].split("(")[0], columns))
    return launches


# ---- runs of several launches, separated by a mark before each


def marked() -> Callable[[int, Callable[[], object]], None]:
    """Make a function that runs something between the profiler's start and stop, after a mark with its number."""
    from cupy.cuda import profiler

    mark = cp.RawModule(code=f'extern "C" __global__ void {MARK}() {{}}').get_function(MARK)

    def count(number: int, run: Callable[[], object]) -> None:
        cp.cuda.Device().synchronize()
        profiler.start()
        try:
            mark((number,), (1,), ())
            run()
            cp.cuda.Device().synchronize()
        finally:
            profiler.stop()

    return count


def taken() -> dict[str, str]:
    """Return the metric that each figure is read from here."""
    return {figure: first_known(metrics) for figure, metrics in FIGURES.items()}


def counted(module: str, *words: str) -> tuple[Any, str]:
    """Run `python3 -m MODULE launch FILE WORDS`, which counts `marked` runs; return FILE's content and ncu's CSV."""
    with tempfile.TemporaryDirectory() as folder:
        table, file = Path(folder, "ncu.csv"), Path(folder, "launched.json")
        asked = [metric for metric in taken().values() if metric not in UNASKED] + [*map(stall_metric, STALLS.values())]
        profile(table, asked, [".*"], (module, "launch", str(file), *words), "--profile-from-start", "off")
        return json.loads(file.read_text()), table.read_text()


def runs_of(text: str) -> dict[int, list[tuple[str, Columns]]]:
    """Parse a CSV of marked runs: each run's launches, (kernel, columns), by its number."""
    runs: dict[int, list[tuple[str, Columns]]] = {}
    number = 0
    for name, columns in launches_of(text):
        if name == MARK:
            number = int(_number(*columns["launch__grid_size"]))
        else:
            runs.setdefault(number, []).append((name, columns))
    return runs


def figures_of(launches: Sequence[Columns]) -> dict[str, float]:
    """Return the figures of one run from its launches' columns, except those without a number.

    Counts and times are added; percentages are averaged, each weighted by its launch's time; registers, blocks and the
    like are those of the longest launch.
    """
    (duration,) = FIGURES["ms"]
    times = [_number(*columns[duration]) if duration in columns else 1.0 for columns in launches]
    figures = {}
    for figure, metrics in FIGURES.items():
        metric = next((m for m in metrics if m in launches[0]), None)
        if metric is None:
            continue
        values = [_number(*columns[metric]) for columns in launches]
        if metric.endswith(".sum"):
            value = sum(values)
        elif metric.startswith("launch__"):
            value = values[times.index(max(times))]
        else:
            value = sum(v * t for v, t in zip(values, times, strict=True)) / sum(times)
        if math.isfinite(value):
            figures[figure] = float(f"{value:.6g}")
    return figures


def stalls_of(launches: Sequence[Columns]) -> dict[str, float]:
    """Return the cycles in each of the STALLS per issued instruction, for a run's longest launch, without zeros."""
    (duration,) = FIGURES["ms"]
    longest = max(launches, key=lambda columns: _number(*columns[duration]) if duration in columns else 0.0)
    clocks = {state: _number(*longest.get(stall_metric(name), ("", ""))) for state, name in STALLS.items()}
    return {state: float(f"{value:.4g}") for state, value in clocks.items() if math.isfinite(value) and value > 0}


def _number(value: str, unit: str) -> float:
    """Parse a figure of Nsight Compute's, times in milliseconds; NaN if it is not a number."""
    try:
        return float(value.replace(",", "")) * _UNITS.get(unit, 1.0)
    except ValueError:
        return math.nan

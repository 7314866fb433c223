"""How long a launch takes, and at which clocks: device events, a cold L2 cache, the median of many."""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.device import ON_GPU, cp

FLUSH_BYTES = 256 << 20  # larger than any L2
MOST_FLUSHES = 32
HIDES_MS = 5.0  # beside a launch this long, Python's part does not count
SLOW_S = 1.0  # a launch longer than this is timed once
FEWEST = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch: the median of many, and their spread."""

    ms: float
    ms_min: float
    ms_max: float
    launches: int


def elapsed(launch: Callable[[], object], flush: Any = None, times: int = 1, *, read: bool = False) -> float:
    """Milliseconds of one launch between two events; `flush` is an array that is overwritten `times` before it.

    Args:
        read: it is read in the end, so that the L2 cache is left with nothing that a launch would have to write back.
    """
    for _ in range(times if flush is not None else 0):
        _overwrite(flush)
    if read and flush is not None:
        flush.view(cp.int64).max()
    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    launch()
    end.record()
    end.synchronize()
    return cp.cuda.get_elapsed_time(start, end)


def _overwrite(flush: Any) -> None:
    flush[...] = 0


def _flushes(launch: Callable[[], object], flush: Any) -> int:
    """How many flushes keep the GPU busy while Python launches, so that the events time the GPU and not Python."""
    busy = min(elapsed(lambda: _overwrite(flush)) for _ in range(3))
    took = []
    for _ in range(3):
        began = time.perf_counter()
        launch()
        took.append(1e3 * (time.perf_counter() - began))
        cp.cuda.Device().synchronize()
    return min(MOST_FLUSHES, 1 + math.ceil(1.5 * min(took) / busy))


# Of a measurement that says nothing else. What the CPU engine takes tells nothing of a kernel, so it is soon known.
BUDGET_S = 0.5 if ON_GPU else 0.1


def measure(launch: Callable[[], object], *, budget_s: float = BUDGET_S, most: int = 200, warm: bool = False) -> Timing:
    """Time a launch, warmed up, with a cold L2 cache on a GPU, and without the time that Python needs to launch it.

    Args:
        launch: starts the work; on a GPU on the default stream.
        budget_s: about how long to go on for. Three launches are timed at least, or one that takes over a second.
        most: launches at most.
        warm: it has been launched before, so a slow first launch counts.
    """
    if not warm:
        launch()
    cp.cuda.Device().synchronize()
    flush = cp.empty(FLUSH_BYTES, dtype=cp.uint8) if ON_GPU else None
    began = time.perf_counter()
    first = elapsed(launch, flush)
    if first >= 1e3 * SLOW_S:
        return Timing(first, first, first, 1)
    flushes = _flushes(launch, flush) if ON_GPU and first < HIDES_MS else 1
    while time.perf_counter() - began < budget_s / 10:  # the clocks come up
        elapsed(launch, flush, flushes)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < FEWEST or (time.perf_counter() - began < budget_s and len(times) < most):
        times.append(elapsed(launch, flush, flushes))
    return Timing(statistics.median(times), min(times), max(times), len(times))


def in_turns(runs: Mapping[Any, Callable[[], Any]], rounds: int, *, read: bool = False) -> dict[Any, list[float]]:
    """Milliseconds of each run, one for each round: in a round all are timed, one after the other.

    All have been launched before. On a GPU each is launched before it is timed, so that it has the same clocks then,
    and timed twice, with work queued before it that takes longer than its launch takes Python: the better one counts.

    Args:
        read: as `elapsed` has it.
    """
    flush = cp.empty(FLUSH_BYTES, dtype=cp.uint8) if ON_GPU else None
    flushes = {}
    for name, run in runs.items():
        flushes[name] = _flushes(run, flush) if ON_GPU and elapsed(run, flush) < HIDES_MS else 1
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if ON_GPU:
                run()
            times[name].append(min(elapsed(run, flush, flushes[name], read=read) for _ in range(2 if ON_GPU else 1)))
    return times


def speeds(taken: Sequence[float], beside: Sequence[float]) -> dict[str, float]:
    """How many times as fast one is as the other, round by round: the median, with its range."""
    ratios = [theirs / its for its, theirs in zip(taken, beside, strict=True)]
    return {"speed": statistics.median(ratios), "speed_min": min(ratios), "speed_max": max(ratios)}


QUERY = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


class Clocks:
    """The GPU's clocks and power while it works, read by nvidia-smi ten times a second.

    with Clocks() as clocks: ...; clocks.between(begin, end), in seconds of time.perf_counter(). Where there is no
    nvidia-smi, there are no samples.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        if ON_GPU:
            command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "-lms", "100"]
            command += ["--format=csv,noheader,nounits", "-i", cp.cuda.Device().pci_bus_id]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def _read(self, lines: Any) -> None:
        for line in lines:
            self.take(line)

    def take(self, line: str) -> None:
        """Note one line of nvidia-smi's; what is no number ("[N/A]") is left out."""
        sample = {}
        for name, text in zip(QUERY, line.split(","), strict=False):
            with contextlib.suppress(ValueError):
                sample[name] = float(text)
        self.samples.append((time.perf_counter(), sample))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """The median of each figure over the samples between two times; empty where there is none."""
        within = [sample for when, sample in self.samples if begin <= when <= end]
        names = [name for name in QUERY if any(name in sample for sample in within)]
        return {name: statistics.median(s[name] for s in within if name in s) for name in names}

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

"""Time launches with device events and a cold L2 cache, and read the GPU's clock and power meanwhile."""

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

import numpy as np

from helpers.device import ON_GPU, cp

FLUSH_BYTES = 256 << 20  # larger than any L2
MOST_FLUSHES = 32
HIDES_MS = 5.0  # compared with a launch this long, Python's part is negligible
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
    """Time one launch between two events, in milliseconds, after overwriting the array `flush` `times` times.

    Args:
        read: then read `flush`, so that the L2 cache contains nothing that the launch would have to write back.
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
    """Count the flushes that keep the GPU busy while Python launches, so that events time the GPU and not Python."""
    busy = min(elapsed(lambda: _overwrite(flush)) for _ in range(3))
    took = []
    for _ in range(3):
        began = time.perf_counter()
        launch()
        took.append(1e3 * (time.perf_counter() - began))
        cp.cuda.Device().synchronize()
    return min(MOST_FLUSHES, 1 + math.ceil(1.5 * min(took) / busy))


# Default seconds of a measurement. The CPU engine's times say nothing about a kernel, so few launches suffice.
BUDGET_S = 0.5 if ON_GPU else 0.1


def measure(launch: Callable[[], object], *, budget_s: float = BUDGET_S, most: int = 200, warm: bool = False) -> Timing:
    """Time a launch, warmed up, with a cold L2 cache on a GPU, and without the time that Python needs to launch it.

    Args:
        launch: starts the work; on a GPU on the default stream.
        budget_s: about how long to continue. At least three launches are timed, or one that takes over a second.
        most: the largest number of timed launches.
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
    while time.perf_counter() - began < budget_s / 10:  # until the GPU has raised its clock
        elapsed(launch, flush, flushes)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < FEWEST or (time.perf_counter() - began < budget_s and len(times) < most):
        times.append(elapsed(launch, flush, flushes))
    return Timing(statistics.median(times), min(times), max(times), len(times))


def in_turns(runs: Mapping[Any, Callable[[], Any]], rounds: int, *, read: bool = False) -> dict[Any, list[float]]:
    """Time runs in turns: milliseconds of each run, one for each round, in which all are timed once.

    All have been launched before. On a GPU each is launched right before it is timed, so that the clock is that of its
    own run. It is timed twice, after queued work that takes longer than Python's launch, and the shorter time counts.

    Args:
        read: see `elapsed`.
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


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lower and the upper quartile, which a single interrupted round does not change."""
    if len(values) < 2:
        return (values[0],) * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), low, high


def speeds(taken: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the speed of `taken` relative to `others`, round by round: median, extremes and quartiles.

    Args:
        taken, others: milliseconds of both, one for each round.
    """
    ratios, (median, low, high) = _ratios(taken, others), gain_of(taken, others)
    extremes = {"speed_min": min(ratios), "speed_max": max(ratios)}
    return {"speed": median, **extremes, "speed_q1": low, "speed_q3": high}


def _ratios(taken: Sequence[float], others: Sequence[float]) -> list[float]:
    return [theirs / its for its, theirs in zip(taken, others, strict=True)]


def gain_of(taken: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the speed of `taken` relative to `others`: the median and the quartiles of the rounds' ratios."""
    return list(quartiles(_ratios(taken, others)))


def speed_range(row: Mapping[str, float]) -> tuple[float, float]:
    """Return the quartiles of a row's speed; older records have only the extremes."""
    low, high = ("speed_q1", "speed_q3") if "speed_q1" in row else ("speed_min", "speed_max")
    return row[low], row[high]


# Cycles and nanoseconds of one waiting thread. Both counts begin and end at a tick of the timer.
CLOCK = r"""
extern "C" __global__ void clock_rate(long long* rate, int nanoseconds) {
  long long tick, begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(tick));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  while (begin == tick);
  const long long cycles = clock64();
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
  rate[0] = clock64() - cycles;
  rate[1] = now - begin;
}
"""
CLOCK_NS = 200_000  # too short for the GPU to raise its clock after other work, long compared with a tick of 1 µs


def sm_mhz() -> float:
    """Return the multiprocessors' clock in MHz, as counted by a kernel that is launched now."""
    rate = cp.zeros(2, cp.int64)
    cp.RawKernel(CLOCK, "clock_rate")((1,), (1,), (rate, np.int32(CLOCK_NS)))
    cycles, nanoseconds = cp.asnumpy(rate).tolist()
    return 1e3 * cycles / nanoseconds


QUERY = {"memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


class Sensors:
    """The GPU's power, temperature and memory clock while it works, read by nvidia-smi ten times a second.

    with Sensors() as sensors: ...; sensors.between(begin, end), in seconds of time.perf_counter(). Without nvidia-smi
    there are no samples.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sensors:
        if ON_GPU:
            command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "-lms", "100"]
            command += ["--format=csv,noheader,nounits", "-i", cp.cuda.Device().pci_bus_id]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def _read(self, lines: Any) -> None:
        for line in lines:
            self.parse(line)

    def parse(self, line: str) -> None:
        """Parse one line of nvidia-smi; drop non-numbers ("[N/A]")."""
        sample = {}
        for name, text in zip(QUERY, line.split(","), strict=False):
            with contextlib.suppress(ValueError):
                sample[name] = float(text)
        self.samples.append((time.perf_counter(), sample))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return the median of each figure over the samples between two times; {} without samples."""
        within = [sample for when, sample in self.samples if begin <= when <= end]
        names = [name for name in QUERY if any(name in sample for sample in within)]
        return {name: statistics.median(s[name] for s in within if name in s) for name in names}

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

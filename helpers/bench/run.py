"""Run the jobs of a run: each is checked, then timed; failures are noted, and the run continues."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from helpers.bench.cases import Case, Inputs
from helpers.bench.host_cost import host_time
from helpers.bench.job import Job, torch_cuda
from helpers.bench.results import Measurement, Record
from helpers.bench.timing import Sensors, Timing, elapsed, gain_of, in_turns, measure, sm_mhz
from helpers.device import ON_GPU, cp, describe

INTERRUPTED = "interrupted: what was measured until then is in the table; --json FILE --resume goes on"
FEWEST_ROUNDS, MOST_ROUNDS = 7, 40
LOST = "the CUDA context is lost after the failure above"


class JobRunner:
    """Run jobs. Keeps the inputs of the latest shape and type, since jobs are sorted by them."""

    def __init__(self, budget_s: float, sensors: Sensors | None = None) -> None:
        self.budget_s, self.sensors = budget_s, sensors
        self._inputs: Inputs | None = None

    def run(self, job: Job) -> Measurement:
        """Check, then time. Raises WrongOutput, and whatever the launch raises."""
        with contextlib.ExitStack() as contexts:
            launch, seen = self.launched(job, contexts)
            begin = time.perf_counter()
            if job.on_host:
                timing = host_time(launch)
            else:
                timing = measure(launch, budget_s=self.budget_s * job.share, warm=job.warm)
            clocks = self._clocks(begin, time.perf_counter())
        return _measurement(job, timing, clocks, seen)

    def run_in_turns(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Measurement | Exception]]:
        """Do what `run` does for compared jobs of one case: check one by one, time in turns, at the same clock.

        Yields each job with its measurement, or with its exception. A step gets its gain over the previous step, or
        over the climb's base; a peer gets the fastest stage's gain over it.
        """
        self._take_inputs(jobs[0].case)
        with contextlib.ExitStack() as contexts:
            launched: list[tuple[Job, Callable[[], Any], dict[str, Any]]] = []
            base = jobs[0].base()
            for job in [*([base] if base else []), *jobs]:
                try:
                    launched.append((job, *self.launched(job, contexts)))
                except Exception as error:
                    if job is not base:
                        yield job, error
            runs = {number: run for number, (_, run, _) in enumerate(launched)}
            begin = time.perf_counter()
            once = [1e-3 * elapsed(run) for run in runs.values()]  # warm
            seconds = self.budget_s * jobs[0].share * len(runs)
            times = in_turns(runs, round(min(MOST_ROUNDS, max(FEWEST_ROUNDS, seconds / max(3 * sum(once), 1e-9)))))
            clocks = self._clocks(begin, time.perf_counter())
        ours = [number for number, (job, _, _) in enumerate(launched) if not job.is_peer]
        fastest = min(ours, key=lambda number: statistics.median(times[number]), default=None)
        for number, (job, _, seen) in enumerate(launched):
            taken = times[number]
            if job is base:
                continue
            if job.climb and number > 0:
                seen["gain"] = gain_of(taken, times[number - 1])
                seen["over"] = launched[number - 1][0].name
            if job.is_peer and fastest is not None:
                seen["gain"] = gain_of(times[fastest], taken)
                seen["fastest"] = launched[fastest][0].name
            timing = Timing(statistics.median(taken), min(taken), max(taken), len(taken))
            yield job, _measurement(job, timing, clocks, seen)

    def launched(self, job: Job, contexts: contextlib.ExitStack) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Make a launch and check it; return the check's results, too."""
        launch, check = contexts.enter_context(job.make(job.case and self._take_inputs(job.case)))
        return launch, check()

    def _take_inputs(self, case: Case) -> Inputs:
        if self._inputs is None or (self._inputs.shape, self._inputs.dtype) != (case.shape, case.dtype):
            self._inputs = None  # free them before the next ones are made
            free_pools()
            self._inputs = Inputs(case.shape, case.dtype)
        return self._inputs

    def _clocks(self, begin: float, end: float) -> dict[str, float]:
        """Return the multiprocessors' clock right now, and the medians of the sensors between two times."""
        if self.sensors is None or not ON_GPU:
            return {}
        return {"sm_mhz": sm_mhz(), **self.sensors.between(begin, end)}


def _measurement(job: Job, timing: Timing, clocks: Mapping[str, float], seen: Mapping[str, Any]) -> Measurement:
    case = job.case
    where = {"shape": list(case.shape), "dtype": case.dtype, "causal": case.causal} if case else {}
    row = {**where, **job.row, **asdict(timing), "clocks": dict(clocks), **job.rate(timing.ms), **seen}
    return Measurement(job.name, job.kind, note=job.note(), **row)


def free_pools() -> None:
    """Return unused memory to the GPU, so that CuPy and PyTorch do not starve each other."""
    if ON_GPU:
        cp.get_default_memory_pool().free_all_blocks()
        if cuda := torch_cuda():
            cuda.empty_cache()


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile the kernels of the jobs in parallel. An error recurs, and is noted, when its job runs."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for future in [pool.submit(job.compile) for job in jobs if job.compile is not None]:
            with contextlib.suppress(Exception):
                future.result()


def device_facts() -> dict[str, Any]:
    """Describe the device and the software, with versions."""
    facts: dict[str, Any] = {"description": describe(), "python": platform.python_version(), "numpy": np.__version__}
    if not ON_GPU:
        return facts
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    driver = cp.cuda.runtime.driverGetVersion()
    facts |= {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "clock_mhz": properties["clockRate"] / 1000,
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": properties["totalGlobalMem"],
        "cuda_driver_api": f"{driver // 1000}.{driver % 1000 // 10}",
        "nvrtc": ".".join(map(str, cp.cuda.nvrtc.getVersion())),
        "cupy": cp.__version__,
    }
    with contextlib.suppress(OSError, AttributeError):
        facts["driver"] = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text()).group(0)
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name):
            facts[name] = __import__(name).__version__
    torch = sys.modules.get("torch")
    if torch and torch.backends.cudnn.is_available():
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def how_measured() -> dict[str, Any]:
    """Describe what a reader must know about the figures."""
    return {
        "timer": "device events around one launch, queued behind other work" if ON_GPU else "wall clock",
        "statistic": "median; ms_min and ms_max are the spread",
        "in turns": "what computes the same of a case, and the steps of a climb: round by round, so with one clock; "
        "gain, of a step over the one before it and of the fastest stage over a peer, is the median and the quartiles "
        "of the rounds' ratios",
        "l2": "flushed by a 256 MB write before each launch" if ON_GPU else "as it is",
        "inputs": "normal, unit variance, mean 0.25; checked against float64 on sampled rows and heads before timing",
        "tolerance": "float32: 1e-5; half types: twice the error of NumPy attention that rounds P and O to the type",
        "flops": "4 * batch * heads * rows * keys * head_dim, half of it where causal; 2.5 times that for gradients",
        "backward": "the gradients alone; the output and lse are there. Checked against float64 on sampled rows",
        "clocks": "sm_mhz: cycles over nanoseconds in a kernel launched right after the measurement; others: by "
        "nvidia-smi, every 100 ms, the median while it ran, none if it was shorter",
        "extra_bytes": "device memory held beyond q, k, v and the output, after one launch; PyTorch's at its peak",
        "host": "wall clock of a batch of calls that do not wait for the GPU, divided by their number",
        "command": "python3 helpers/course.py bench --json FILE",
    }


class ProgressBar:
    """A progress bar on a terminal; nothing if the output is a file."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty()
        self.began = time.perf_counter()

    def step(self, label: str, count: int = 1) -> None:
        """Show the current step, and its share of the whole."""
        if self.shown:
            filled = round(24 * self.done / max(self.total, 1))
            bar = "#" * filled + "." * (24 - filled)
            seconds = time.perf_counter() - self.began
            sys.stderr.write(f"\r[{bar}] {self.done}/{self.total} {seconds:4.0f} s {label[:48]:<48}")
            sys.stderr.flush()
        self.done += count

    def close(self) -> None:
        """Clear the line."""
        if self.shown:
            sys.stderr.write("\r" + " " * 100 + "\r")


def run_all(jobs: Sequence[Job], record: Record, budget_s: float, path: Path | None, within_s: float = math.inf) -> str:
    """Run the jobs into the record, which is saved on the way. Return why it stopped early, or "".

    Exceptions of a job are noted, and the next one runs; so are jobs left after `within_s`. Ctrl-C and SIGTERM end it.
    """
    progress, saved = ProgressBar(len(jobs) + ON_GPU), 0.0
    began = time.perf_counter()
    done = record.how.setdefault("done", [])
    before = _on_sigterm(signal.default_int_handler)
    stopped = ""
    try:
        if ON_GPU:
            progress.step("compiling")
            compile_all(jobs)
        with Sensors() as sensors:
            runner = JobRunner(budget_s, sensors)
            for group in _groups(jobs):
                if time.perf_counter() - began > within_s:
                    for job in group:
                        record.add_note(job.name, job.kind, f"{within_s:g} s were over", job.case, left=True)
                    continue
                progress.step(f"{group[0].name} {group[0].case or ''}", len(group))
                is_alive = True
                for job, result in _results(runner, group):
                    done.append(str(job.key))
                    if isinstance(result, Measurement):
                        record.results.append(result)
                        continue
                    # PyTorch reports in this way that a backend is not available; all other jobs should have run.
                    why = f"{type(result).__name__}: {str(result).strip().splitlines()[0] if str(result) else ''}"
                    record.add_note(job.name, job.kind, why, job.case, failed=job.kind != "peer")
                    if not (is_alive := _alive()):
                        break
                    if len(group) == 1:
                        runner = JobRunner(budget_s, sensors)  # releases the memory of the failed one
                if not is_alive:
                    stopped = LOST
                    break
                if path and time.perf_counter() - saved > 1:
                    record.save(path)
                    saved = time.perf_counter()
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    finally:
        progress.close()
        _on_sigterm(before)
        record.how["seconds"] = record.how.get("seconds", 0) + round(time.perf_counter() - began, 1)
        if stopped or sys.exc_info()[0]:
            if path:
                record.save(path)
        else:
            del record.how["done"]  # only an unfinished run needs it
    return stopped


def _groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group the jobs that are compared, in order. Without a GPU each is alone, since a CPU's clock is steady."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.compared_with if ON_GPU else None) or job.key, []).append(job)
    return list(groups.values())


def _results(runner: JobRunner, group: Sequence[Job]) -> Iterator[tuple[Job, Measurement | Exception]]:
    """Yield each job of a group with its measurement, or with its exception."""
    left = list(group)
    try:
        for job, result in runner.run_in_turns(group) if len(group) > 1 else [(group[0], runner.run(group[0]))]:
            left.remove(job)
            yield job, result
    except Exception as error:
        yield from ((job, error) for job in left)


def _alive() -> bool:
    """Return True if the device still works: after an illegal access, a process can no longer use it."""
    try:
        cp.cuda.Device().synchronize()
        float(cp.ones(1, dtype=cp.float32)[0])
    except Exception:
        return False
    return True


def _on_sigterm(handler: Any) -> Any:
    """Set the handler of SIGTERM, which `timeout` sends; return the previous one. No effect outside the main thread."""
    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:
        return None

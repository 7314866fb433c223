"""Doing the measurements of a run: each is checked, then timed; what fails is noted, and the next one goes on."""

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

from helpers.attention import reference
from helpers.attention.ladder import LADDER, backward
from helpers.attention.ladder.steps import BASES, BEFORE
from helpers.bench.cases import TYPES, Inputs
from helpers.bench.experiments import Step
from helpers.bench.host_cost import host_time
from helpers.bench.plan import Job, tile_sizes, tiles_text, why_not
from helpers.bench.results import Measurement, Record
from helpers.bench.timing import Clocks, Timing, elapsed, in_turns, measure, speeds
from helpers.device import ON_GPU, cp, describe

INTERRUPTED = "interrupted: what was measured until then is in the table; --json FILE --resume goes on"
FEWEST_ROUNDS, MOST_ROUNDS = 7, 40
LOST = "the GPU takes no more work from this process after the failure above"


class WrongOutput(AssertionError):
    """A stage whose output is wrong: it is not timed."""


class JobRunner:
    """Runs jobs. Inputs of the latest shape and type are kept: jobs come sorted."""

    def __init__(self, budget_s: float, clocks: Clocks | None = None) -> None:
        self.budget_s, self.clocks = budget_s, clocks
        self._inputs: Inputs | None = None

    def run(self, job: Job) -> Measurement:
        """Check, then time. Raises WrongOutput, and whatever the launch raises."""
        if job.kind == "roof":
            return self._roof(job)
        inputs = self._take_inputs(job.case)
        if job.kind == "host":
            return self._host(job, inputs)
        if job.kind == "experiment":
            return self._experiment(job, inputs)
        with contextlib.ExitStack() as contexts:
            launch, seen = self._launched(job, inputs, contexts)
            timed = self._timed(launch, share=job.share)
        return _measurement(job, timed, **seen)

    def run_in_turns(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Measurement | Exception]]:
        """What `run` does for jobs that are compared, of one case: checked one by one, timed in turns, with one clock.

        Yields each job with its measurement, or with what it raised. A step has its gain over the step before, or over
        what the climb begins at; a peer that of the fastest stage over it.
        """
        inputs = self._take_inputs(jobs[0].case)
        with contextlib.ExitStack() as contexts:
            launched: list[tuple[Job, Callable[[], Any], dict[str, Any]]] = []
            base = _base(jobs[0])
            for job in [*([base] if base else []), *jobs]:
                try:
                    launched.append((job, *self._launched(job, inputs, contexts)))
                except Exception as error:
                    if job is not base:
                        yield job, error
            runs = {number: run for number, (_, run, _) in enumerate(launched)}
            begin = time.perf_counter()
            once = [1e-3 * elapsed(run) for run in runs.values()]  # warm
            seconds = self.budget_s * jobs[0].share * len(runs)
            times = in_turns(runs, round(min(MOST_ROUNDS, max(FEWEST_ROUNDS, seconds / max(3 * sum(once), 1e-9)))))
            end = time.perf_counter()
        ours = [number for number, (job, _, _) in enumerate(launched) if job.kind in ("stage", "backward")]
        fastest = min(ours, key=lambda number: statistics.median(times[number]), default=None)
        for number, (job, _, seen) in enumerate(launched):
            taken = times[number]
            if job is base:
                continue
            if isinstance(job.what, Step) and number > 0:
                seen["gain"] = list(speeds(taken, times[number - 1]).values())
                seen["over"] = launched[number - 1][0].name
            if job.kind in ("peer", "backward peer") and fastest is not None:
                seen["gain"] = list(speeds(times[fastest], taken).values())
                seen["fastest"] = launched[fastest][0].name
            timing = Timing(statistics.median(taken), min(taken), max(taken), len(taken))
            yield job, _measurement(job, self._with_clocks(timing, begin, end), **seen)

    def _launched(
        self, job: Job, inputs: Inputs, contexts: contextlib.ExitStack
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """A launch that has run once and was right, and what was seen then."""
        if job.case.backward:
            launch = self._gradients(job, inputs, contexts)
            return launch, _right(*inputs.gradient_sample(job.case.causal).error(launch()))
        launch = contexts.enter_context(self._ready(job, inputs))
        before = _held()
        o = launch()
        extra = None if before is None else _held(peak=True) - before - o.nbytes
        sample = inputs.sample(job.case.causal)
        tolerance = sample.tolerance * (job.stage.error_factor if job.stage else 1.0)
        return launch, {**_right(sample.error(o), tolerance), "extra_bytes": extra}

    def _roof(self, job: Job) -> Measurement:
        roof = job.what
        timed = self._timed(roof.ready(), warm=False)
        rate = roof.work / timed["ms"] / (1e9 if roof.quantity == "tflops" else 1e6)
        return Measurement(
            job.name, job.kind, list(roof.shape), roof.dtype, note=roof.note, **{roof.quantity: rate}, **timed
        )

    def _host(self, job: Job, inputs: Inputs) -> Measurement:
        with job.what.ready(inputs) as (call, output):
            sample = inputs.sample(job.case.causal)
            seen = _right(sample.error(output(call())), sample.tolerance)
            begin = time.perf_counter()
            timing = host_time(call)
        case = job.case
        return Measurement(
            *(job.name, job.kind, list(case.shape), case.dtype),
            **{"note": job.what.note, "causal": case.causal, **seen},
            **self._with_clocks(timing, begin),
        )

    def _take_inputs(self, case: Any) -> Inputs:
        if self._inputs is None or (self._inputs.shape, self._inputs.dtype) != (case.shape, case.dtype):
            self._inputs = None  # before the next ones are made
            _free()
            self._inputs = Inputs(case.shape, case.dtype)
        return self._inputs

    @contextlib.contextmanager
    def _ready(self, job: Job, inputs: Inputs) -> Iterator[Callable[[], Any]]:
        """A function that launches and returns the output. Memory that it needs beyond q, k and v is not held yet."""
        if job.kind == "peer":
            with job.what.ready(inputs, job.case.causal) as launch:
                yield launch
            return
        stage, source, arrays, prepared = job.stage, job.source, inputs.device, []

        def launch() -> Any:
            if not prepared:
                prepared.append(stage.prepare(*arrays, causal=job.case.causal, source=source, sizes=job.sizes or None))
            run, o = prepared[0]
            run()
            return o

        yield launch

    def _gradients(self, job: Job, inputs: Inputs, contexts: contextlib.ExitStack) -> Callable[[], Any]:
        """A launch of the gradients alone: the forward that they start from has run before."""
        if job.kind == "backward peer":
            return contexts.enter_context(job.what.ready(inputs, job.case.causal))
        run, arrays = job.gradients.prepare(inputs, job.case.causal, job.sizes or None)

        def launch() -> Any:
            run()
            return arrays

        return launch

    def _timed(self, launch: Callable[[], Any], *, warm: bool = True, share: float = 1.0) -> dict[str, Any]:
        begin = time.perf_counter()
        return self._with_clocks(measure(launch, budget_s=self.budget_s * share, warm=warm), begin)

    def _with_clocks(self, timing: Any, begin: float, end: float | None = None) -> dict[str, Any]:
        end = time.perf_counter() if end is None else end
        return {**asdict(timing), "clocks": self.clocks.between(begin, end) if self.clocks else {}}

    def _experiment(self, job: Job, inputs: Inputs) -> Measurement:
        """Launch a changed stage; count the launches whose output is wrong."""
        experiment, sample = job.what, inputs.sample(job.case.causal)
        whole = None
        if experiment.launches > 1:  # a race may show in one row alone
            whole = cp.asarray(reference.attention(*inputs.host, causal=job.case.causal))
        wrong, worst = 0, 0.0
        with self._ready(job, inputs) as launch:
            for _ in range(experiment.launches):
                o = launch()
                error = sample.error(o) if whole is None else float(abs(o - whole).max())
                wrong += not error <= sample.tolerance
                worst = max(worst, error) if error == error else float("nan")
                o[...] = cp.nan
            timed = self._timed(launch, share=job.share)
        more = {"wrong_launches": wrong, "checked_launches": experiment.launches}
        return _measurement(job, timed, max_error=worst, tolerance=sample.tolerance, **more)


def _right(error: float, tolerance: float) -> dict[str, Any]:
    """What a record keeps of a check. Raises WrongOutput."""
    if not error <= tolerance:
        raise WrongOutput(f"max error {error:.1e} > {tolerance:.1e}; not timed")
    return {"max_error": error, "tolerance": tolerance}


def _base(job: Job) -> Job | None:
    """What the climb that a step belongs to begins at, as a job of the same case; None where that computes another."""
    if not isinstance(job.what, Step):
        return None
    file = BEFORE.get(job.what.of)
    known = (*BASES.values(), *LADDER.values())
    stage = next((stage for stage in known if stage.file == file and stage.direction == job.stage.direction), None)
    if stage is None or why_not(stage, job.case) is not None:
        return None
    return Job(job.kind, stage.name, Step(job.what.of, 0, stage, job.case), job.case)


def _measurement(job: Job, timed: Mapping[str, Any], **more: Any) -> Measurement:
    case = job.case
    more |= {"tflops": case.flops / timed["ms"] / 1e9, "note": tiles_text(job), "causal": case.causal}
    if isinstance(job.what, Step):
        more |= {"step": job.what.number, "idea": job.what.idea}
    return Measurement(job.name, job.kind, list(case.shape), case.dtype, **timed, **more)


def _torch_cuda() -> Any | None:
    return sys.modules["torch"].cuda if ON_GPU and "torch" in sys.modules else None


def _held(*, peak: bool = False) -> int | None:
    """Bytes of the GPU's memory that arrays hold now; or PyTorch's most since the last call, with CuPy's of now."""
    if not ON_GPU:
        return None
    torch_cuda = _torch_cuda()
    total = cp.get_default_memory_pool().used_bytes()
    if torch_cuda:
        total += torch_cuda.max_memory_allocated() if peak else torch_cuda.memory_allocated()
        torch_cuda.reset_peak_memory_stats()
    return total


def _free() -> None:
    """Give memory that nothing uses back to the GPU, so that CuPy and PyTorch do not starve each other."""
    if ON_GPU:
        cp.get_default_memory_pool().free_all_blocks()
        torch_cuda = _torch_cuda()
        if torch_cuda:
            torch_cuda.empty_cache()


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile the kernels of the jobs, many at a time. An error shows again, and is noted, when its job runs."""

    def compile_one(job: Job) -> None:
        one = cp.zeros((1, 1, 1, job.case.shape[3]), dtype=TYPES[job.case.dtype])
        sizes = {**tile_sizes(job.stage, job.case), **job.sizes}
        if way := job.gradients:
            lse = cp.zeros((1, 1, 1), dtype=cp.float32)
            how = {"deterministic": way.deterministic, "source": way.source, "sizes": sizes}
            backward.prepare(job.stage, one, one, one, one, one, lse, **how)
            return
        job.stage.prepare(one, one, one, source=job.source, sizes=sizes)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for future in [pool.submit(compile_one, job) for job in jobs if job.stage is not None]:
            with contextlib.suppress(Exception):
                future.result()


def device_facts() -> dict[str, Any]:
    """What ran it, by name and version."""
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
    """What a reader must know of the figures."""
    return {
        "timer": "device events around one launch, queued behind other work" if ON_GPU else "wall clock",
        "statistic": "median; ms_min and ms_max are the spread",
        "in turns": "what computes the same of a case, and the steps of a climb: round by round, so with one clock; "
        "gain, of a step over the one before it and of the fastest stage over a peer, is the median, the least and the "
        "most of the rounds' ratios",
        "l2": "flushed by a 256 MB write before each launch" if ON_GPU else "as it is",
        "inputs": "normal, unit variance, mean 0.25; checked against float64 on sampled rows and heads before timing",
        "tolerance": "float32: 1e-5; half types: twice the error of NumPy attention that rounds P and O to the type",
        "flops": "4 * batch * heads * rows * keys * head_dim, half of it where causal; 2.5 times that for gradients",
        "backward": "the gradients alone; the output and lse are there. Checked against float64 on sampled rows",
        "clocks": "nvidia-smi, every 100 ms, the median while a measurement ran; none where it was shorter",
        "extra_bytes": "device memory held beyond q, k, v and the output, after one launch; PyTorch's at its peak",
        "host": "wall clock of a batch of calls that do not wait for the GPU, divided by their number",
        "command": "python3 helpers/course.py bench --json FILE",
    }


class ProgressBar:
    """A bar on a terminal; nothing where the output is a file."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty()
        self.began = time.perf_counter()

    def step(self, label: str, count: int = 1) -> None:
        """Say what is being done now, and how much of the whole that is."""
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
    """Run the jobs into the record, which is saved on the way. Why it stopped early, or "".

    What a job raises is noted, and the next one runs; so is what is left after `within_s`. Ctrl-C and SIGTERM end it.
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
        with Clocks() as clocks:
            runner = JobRunner(budget_s, clocks)
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
                    # PyTorch says in this way that a backend cannot; all others should have run.
                    why = f"{type(result).__name__}: {str(result).strip().splitlines()[0] if str(result) else ''}"
                    record.add_note(job.name, job.kind, why, job.case, failed=job.kind != "peer")
                    if not (is_alive := _alive()):
                        break
                    if len(group) == 1:
                        runner = JobRunner(budget_s, clocks)  # lets go of the failed one's memory
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
            del record.how["done"]  # only a run that was not finished needs it
    return stopped


def _groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs in their order, those that are compared together. Without a GPU one by one: a CPU's clock stays."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.compared if ON_GPU else None) or job.key, []).append(job)
    return list(groups.values())


def _results(runner: JobRunner, group: Sequence[Job]) -> Iterator[tuple[Job, Measurement | Exception]]:
    """Each job of a group with its measurement, or with what it raised."""
    left = list(group)
    try:
        for job, result in runner.run_in_turns(group) if len(group) > 1 else [(group[0], runner.run(group[0]))]:
            left.remove(job)
            yield job, result
    except Exception as error:
        yield from ((job, error) for job in left)


def _alive() -> bool:
    """Whether the device still takes work: after an illegal access a process has lost it."""
    try:
        cp.cuda.Device().synchronize()
        float(cp.ones(1, dtype=cp.float32)[0])
    except Exception:
        return False
    return True


def _on_sigterm(handler: Any) -> Any:
    """Set the handler of SIGTERM, as `timeout` sends it; the handler before. Nothing outside the main thread."""
    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:
        return None

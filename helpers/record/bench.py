"""Times of the stages and of their peers: `course.py ladder`, `course.py bench`, and the recorded JSON.

A figure is only worth something beside others from the same run, so peers and roofs are timed by the same clock, on the
same inputs, between the stages. Nothing is timed before it has been checked. What is timed is data: the cases below,
stages.LADDER, peers.py and experiments.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helpers import kernel, reference
from helpers.device import ON_GPU, cp, describe
from helpers.ladder import LADDER, Stage
from helpers.record import peers, readme
from helpers.record.cases import TYPES, Case, Inputs, error_on_sample, flops
from helpers.record.experiments import EXPERIMENTS, VARIANTS
from helpers.record.results import Record, Result, table
from helpers.record.timing import Clocks, measure

__all__ = ["Case", "Record", "Result", "bench", "error_on_sample", "flops", "ladder", "measure", "table"]

# What the record holds. Half types: the main shapes in both; bfloat16 alone where time is drawn against N, with
# 16384 tokens and 2048 columns of all heads together, as FlashAttention's papers have it.
SHAPES = ((1, 1, 4096, 64), (1, 1, 16384, 64), (1, 16, 4096, 64), (4, 16, 4096, 64), (4, 16, 4096, 128))
ONE_HEAD_SWEEP = tuple((1, 1, n, 64) for n in (1024, 2048, 8192))
HALF_SWEEP = tuple((16384 // n, 2048 // d, n, d) for d in (128, 64) for n in (512, 2048, 4096, 8192, 16384))
QUICK = ((1, 1, 4096, 64), (4, 16, 4096, 64))
ON_CPU = (1, 1, 1024, 64)  # the engine is for understanding, not for speed: one shape says what there is to say
FOR_NUMBA = (1, 1, 64, 16)  # its simulator takes a second for this
BUDGET_S, QUICK_BUDGET_S = 0.15, 0.03
SIDE_SHARE = 0.5  # of it for what stands beside the ladder: variants, experiments, the sweep over N


class WrongOutput(AssertionError):
    """A stage whose output is wrong: it is not timed."""


# ---------------------------------------------------------------------------------------- one measurement


@dataclass(frozen=True)
class Job:
    """One measurement: what (a Stage, Experiment, Peer or Roof), at which case, with which tile sizes."""

    kind: str
    name: str
    what: Any
    case: Case | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the time for one measurement."""
        main = self.kind in ("stage", "peer") and not _swept(self.case)
        return 1.0 if main else SIDE_SHARE

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for the same measurement in another process."""
        return (self.kind, self.name, str(self.case), str(dict(self.sizes)))


def _swept(case: Case) -> bool:
    """Whether a case is timed only to draw time against N."""
    return case.shape in HALF_SWEEP and case.shape not in SHAPES


class Bench:
    """Runs jobs. Inputs of the latest shape and type are kept: jobs come sorted."""

    def __init__(self, budget_s: float, clocks: Clocks | None = None) -> None:
        self.budget_s, self.clocks = budget_s, clocks
        self._inputs: Inputs | None = None

    def run(self, job: Job) -> Result:
        """Check, then time. Raises WrongOutput, and whatever the launch raises."""
        if job.kind == "roof":
            timed = self._timed(job.what.ready(), warm=False)
            rate = job.what.work / timed["ms"] / (1e9 if job.what.quantity == "tflops" else 1e6)
            shape, note = list(job.what.shape), job.what.note
            return Result(job.name, job.kind, shape, job.what.dtype, note=note, **{job.what.quantity: rate}, **timed)
        inputs = self._take_inputs(job.case)
        if job.kind == "experiment":
            return self._experiment(job, inputs)
        with self._ready(job, inputs) as launch:
            before = _held()
            o = launch()
            extra = None if before is None else _held(peak=True) - before - o.nbytes
            error, tolerance = self._checked(job, inputs, o)
            timed = self._timed(launch, share=job.share)
        return self._result(job, timed, max_error=error, tolerance=tolerance, extra_bytes=extra)

    def _result(self, job: Job, timed: Mapping[str, Any], **more: Any) -> Result:
        case, stage = job.case, LADDER.get(job.what.stage) if job.kind == "experiment" else job.what
        note = tiles(stage, case, job.sizes) if job.kind != "peer" else ""
        rate = case.flops / timed["ms"] / 1e9
        return Result(
            job.name,
            job.kind,
            list(case.shape),
            case.dtype,
            tflops=rate,
            note=note,
            causal=case.causal,
            **timed,
            **more,
        )

    def _take_inputs(self, case: Case) -> Inputs:
        if self._inputs is None or (self._inputs.shape, self._inputs.dtype) != (case.shape, case.dtype):
            self._inputs = None  # before the next ones are made
            _free()
            self._inputs = Inputs(case.shape, case.dtype)
        return self._inputs

    @contextlib.contextmanager
    def _ready(self, job: Job, inputs: Inputs, source: str | None = None) -> Iterator[Callable[[], Any]]:
        """A function that launches and returns the output. Memory that it needs beyond q, k and v is not held yet."""
        if job.kind == "peer":
            with job.what.ready(inputs, job.case.causal) as launch:
                yield launch
            return
        stage = LADDER[job.what.stage] if job.kind == "experiment" else job.what
        arrays, prepared = inputs.device, []

        def launch() -> Any:
            if not prepared:
                prepared.append(stage.prepare(*arrays, causal=job.case.causal, source=source, sizes=job.sizes or None))
            run, o = prepared[0]
            run()
            return o

        yield launch

    def _checked(self, job: Job, inputs: Inputs, o: Any) -> tuple[float, float]:
        sample = inputs.sample(job.case.causal)
        error = sample.error(o)
        if not error <= sample.tolerance:
            raise WrongOutput(f"max error {error:.1e} > {sample.tolerance:.1e}; not timed")
        return error, sample.tolerance

    def _timed(self, launch: Callable[[], Any], *, warm: bool = True, share: float = 1.0) -> dict[str, Any]:
        begin = time.perf_counter()
        timing = measure(launch, budget_s=self.budget_s * share, warm=warm)
        return {**asdict(timing), "clocks": self.clocks.between(begin, time.perf_counter()) if self.clocks else {}}

    def _experiment(self, job: Job, inputs: Inputs) -> Result:
        """Launch a changed stage; count the launches whose output is wrong."""
        experiment, sample = job.what, inputs.sample(job.case.causal)
        code = experiment.apply(kernel.source(LADDER[experiment.stage].file))
        whole = None
        if experiment.launches > 1:  # a race may show in one row alone
            whole = cp.asarray(reference.attention(*inputs.host, causal=job.case.causal))
        wrong, worst = 0, 0.0
        with self._ready(job, inputs, code) as launch:
            for _ in range(experiment.launches):
                o = launch()
                error = sample.error(o) if whole is None else float(abs(o - whole).max())
                wrong += not error <= sample.tolerance
                worst = max(worst, error) if error == error else float("nan")
                o[...] = cp.nan
            timed = self._timed(launch, share=job.share)
        more = {"wrong_launches": wrong, "checked_launches": experiment.launches}
        return self._result(job, timed, max_error=worst, tolerance=sample.tolerance, **more)


def tiles(stage: Stage, case: Case, sizes: Mapping[str, int] | None = None) -> str:
    """The sizes that a stage is compiled with for a case, as "BLOCK_M=64 BLOCK_N=16"."""
    defines = {**_own(stage, case), **(sizes or {})}
    return " ".join(f"{name}={value}" for name, value in defines.items() if name != "HEAD_DIM")


def _own(stage: Stage, case: Case) -> dict[str, int]:
    """The -D options that a stage chooses for a case."""
    batch, heads, rows, head_dim = case.shape
    return stage.defines_for(head_dim, rows, batch * heads, uneven=case.causal)


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


# ------------------------------------------------------------------------------------------------ the plan


def cases(*, on_gpu: bool = ON_GPU, quick: bool = False) -> list[Case]:
    """The cases of a run, each once, those of a shape and a type together."""
    if not on_gpu:
        return [Case(ON_CPU, dtype) for dtype in ("float32", "float16")]
    found = [Case(shape, "float32", causal) for shape in (QUICK if quick else SHAPES) for causal in (False, True)]
    if quick:
        return [*found, *(Case(QUICK[-1], "bfloat16", causal) for causal in (False, True))]
    found += [Case(shape) for shape in ONE_HEAD_SWEEP]
    main = SHAPES[-2:]
    found += [Case(SHAPES[2], "bfloat16")]
    for dtype, shapes in (("float16", main), ("bfloat16", (*main, *HALF_SWEEP))):
        found += [Case(shape, dtype, causal) for shape in shapes for causal in (False, True)]
    return list(dict.fromkeys(found))


def why_not(stage: Stage, case: Case) -> str | None:
    """Why a stage cannot do a case on this device, or None."""
    return stage.why_not(head_dim=case.shape[3], dtype=case.dtype, causal=case.causal)


def plan(
    record: Record, *, quick: bool = False, with_peers: bool = True, only: Sequence[str] = (), on_gpu: bool = ON_GPU
) -> list[Job]:
    """All measurements of a run, sorted by their inputs. What is known not to work is noted in the record.

    Args:
        only: names of stages; the other stages, variants and experiments are left out.
    """
    stages = {name: stage for name, stage in LADDER.items() if not only or name in only}
    torch = peers.torch_on_gpu() if with_peers and on_gpu else None
    others = peers.TORCH if torch else () if on_gpu else (peers.NUMPY,)
    jobs = [Job("roof", roof.name, roof) for roof in peers.TORCH_ROOFS] if torch else []
    wanted = cases(on_gpu=on_gpu, quick=quick)
    numba = None if on_gpu or quick or not with_peers else peers.numba_simulator()
    if numba:
        wanted.append(Case(FOR_NUMBA))
    for case in wanted:
        candidates = [("stage", name, stage, why_not(stage, case)) for name, stage in stages.items()]
        here = [*others, numba] if numba and case.shape == FOR_NUMBA else others
        here = [peer for peer in here if peer.sweep or not _swept(case)]
        candidates += [("peer", peer.name, peer, peer.why_not(case.dtype, case.causal)) for peer in here]
        for kind, name, what, why in candidates:
            if why is None:
                jobs.append(Job(kind, name, what, case))
            elif on_gpu:
                record.add_note(name, kind, why, case)
    if on_gpu and not quick:
        more = [
            Job("variant", v.stage, stages[v.stage], c, s)
            for v in VARIANTS
            if v.stage in stages
            for c in v.cases
            for s in v.sizes
        ]
        more += [
            Job("experiment", f"{e.stage}: {e.name}", e, c, s)
            for e in EXPERIMENTS
            if e.stage in stages
            for c in e.cases
            for s in e.sizes
        ]
        more.sort(key=lambda job: (job.case.dtype, job.case.shape))
        # The sweep comes last: a run that is stopped early has the ladder and what the notebooks quote.
        sweep = [job for job in jobs if job.case and _swept(job.case)]
        jobs = [job for job in jobs if job not in sweep] + more + sweep
    return jobs


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile the kernels of the jobs, many at a time. An error shows again, and is noted, when its job runs."""

    def compile_one(job: Job) -> None:
        stage, source = job.what, None
        if job.kind == "experiment":
            stage = LADDER[job.what.stage]
            source = job.what.apply(kernel.source(stage.file))
        one = cp.zeros((1, 1, 1, job.case.shape[3]), dtype=TYPES[job.case.dtype])
        stage.prepare(one, one, one, source=source, sizes={**_own(stage, job.case), **job.sizes})

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for future in [pool.submit(compile_one, job) for job in jobs if job.kind not in ("roof", "peer")]:
            with contextlib.suppress(Exception):
                future.result()


def _device() -> dict[str, Any]:
    """What ran it, by name and version."""
    found: dict[str, Any] = {"description": describe(), "python": platform.python_version(), "numpy": np.__version__}
    if not ON_GPU:
        return found
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    driver = cp.cuda.runtime.driverGetVersion()
    found |= {
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
        found["driver"] = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text()).group(0)
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name):
            found[name] = __import__(name).__version__
    torch = sys.modules.get("torch")
    if torch and torch.backends.cudnn.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def _how() -> dict[str, Any]:
    return {
        "timer": "device events around one launch, queued behind other work" if ON_GPU else "wall clock",
        "statistic": "median; ms_min and ms_max are the spread",
        "l2": "flushed by a 256 MB write before each launch" if ON_GPU else "as it is",
        "inputs": "normal, unit variance, mean 0.25; checked against float64 on sampled rows and heads before timing",
        "tolerance": "float32: 1e-5; half types: twice the error of NumPy attention that rounds P and O to the type",
        "flops": "4 * batch * heads * rows * keys * head_dim, half of it where causal",
        "clocks": "nvidia-smi, every 100 ms, the median while a measurement ran; none where it was shorter",
        "extra_bytes": "device memory held beyond q, k, v and the output, after one launch; PyTorch's at its peak",
        "command": "python3 helpers/course.py bench --json FILE",
    }


# ---------------------------------------------------------------------------------------- what is printed


class Progress:
    """A bar on a terminal; nothing where the output is a file."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty()
        self.began = time.perf_counter()

    def step(self, label: str) -> None:
        """Say what is being done now."""
        if self.shown:
            filled = round(24 * self.done / max(self.total, 1))
            bar = "#" * filled + "." * (24 - filled)
            seconds = time.perf_counter() - self.began
            sys.stderr.write(f"\r[{bar}] {self.done}/{self.total} {seconds:4.0f} s {label[:48]:<48}")
            sys.stderr.flush()
        self.done += 1

    def close(self) -> None:
        """Clear the line."""
        if self.shown:
            sys.stderr.write("\r" + " " * 100 + "\r")


# ------------------------------------------------------------------------------------------- the commands


def ladder(argv: Sequence[str] = ()) -> int:
    """Each stage on this machine's device: checked, then timed, in a table. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="course.py ladder", description="Check and time each stage on this machine.")
    parser.add_argument(
        "--n", type=int, default=4096 if ON_GPU else 1024, help="query and key rows (default %(default)s)"
    )
    parser.add_argument("--d", type=int, default=64, help="head dimension, 1 to 128 (default %(default)s)")
    parser.add_argument("--stage", choices=list(LADDER), action="append", help="only this stage; may be repeated")
    wish = parser.parse_args(argv)
    if wish.n < 1 or not 1 <= wish.d <= 128:
        parser.error(f"--n is at least 1 and --d is 1 to 128; got --n {wish.n} --d {wish.d}")
    print(describe())
    record = Record({}, {})
    jobs, skipped = [], []
    for name in wish.stage or LADDER:
        stage = LADDER[name]
        cases_ = [Case((1, 1, wish.n, wish.d), dtype) for dtype in stage.dtypes]
        reasons = [why_not(stage, case) for case in cases_]
        possible = [case for case, why in zip(cases_, reasons, strict=True) if why is None]
        if possible:  # in the first type that it can on this device
            jobs.append(Job("stage", name, stage, possible[0]))
        else:
            skipped.append(f"[SKIP] {name}: {reasons[0]}")
    jobs.append(Job("peer", "NumPy", peers.NUMPY, Case((1, 1, wish.n, wish.d))))
    progress, runner = Progress(len(jobs)), Bench(1.0)
    failed = 0
    for job in jobs:
        progress.step(job.name)
        try:
            r = runner.run(job)
        except WrongOutput as error:
            failed += 1
            print(f"[FAIL] {job.name} at {job.case}: {error}")
            continue
        record.results.append(r)
        print(f"[PASS] {r.name}: output matches reference (max error: {r.max_error:.1e} <= {r.tolerance:.1e})")
    progress.close()
    print("\n".join([*skipped, table(record)]))
    return 1 if failed else 0


def bench(argv: Sequence[str] = ()) -> int:
    """Every stage at the recorded shapes, with peers and roofs. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="course.py bench",
        description="Time every stage at the recorded shapes; on a GPU beside PyTorch's backends, if installed.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE, from the first result on")
    parser.add_argument("--quick", action="store_true", help="fewer launches, and few shapes")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="with PyTorch (by default where it is installed), or without",
    )
    parser.add_argument("--stage", choices=list(LADDER), action="append", help="only this stage; may be repeated")
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS", help="leave out what takes longer")
    parser.add_argument("--resume", action="store_true", help="leave out what FILE has already")
    parser.add_argument("--readme", action="store_true", help="only write README's table and plot from the record")
    wish = parser.parse_args(argv)
    if wish.readme:
        readme.write()
        print(f"written: {readme.README.name}, {readme.PLOT.name}")
        return 0
    if wish.peers and ON_GPU and peers.torch_on_gpu() is None:
        parser.error("--peers: PyTorch is not installed, or sees no GPU")
    if wish.resume and not wish.json:
        parser.error("--resume needs --json FILE")
    resumed = wish.resume and wish.json.is_file()
    planned = Record({}, _how())
    jobs = plan(planned, quick=wish.quick, with_peers=wish.peers is not False, only=wish.stage or ())
    planned.device = _device()
    record = Record.load(wish.json) if resumed else planned
    if resumed:
        done = set(record.how.get("done", ()))
        jobs = [job for job in jobs if str(job.key) not in done]
    print(record.device["description"])
    stopped = _run_all(jobs, record, QUICK_BUDGET_S if wish.quick else BUDGET_S, wish.json, wish.within)
    if stopped == LOST and wish.json:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-c", _AGAIN, *_without(argv, "--resume"), "--resume"])
    print(table(record))
    if wish.json:
        record.save(wish.json)
        print(f"written to {wish.json}")
    if stopped:
        print(stopped, file=sys.stderr)
        return 130 if stopped == INTERRUPTED else 1
    return 1 if any(note.failed for note in record.notes) else 0


INTERRUPTED = "interrupted: what was measured until then is in the table; --json FILE --resume goes on"
LOST = "the GPU takes no more work from this process after the failure above"
_AGAIN = "import sys; from helpers import bench; sys.exit(bench.bench(sys.argv[1:]))"


def _without(words: Sequence[str], one: str) -> list[str]:
    return [word for word in words if word != one]


def _run_all(
    jobs: Sequence[Job], record: Record, budget_s: float, path: Path | None, within_s: float = math.inf
) -> str:
    """Run the jobs into the record, which is saved on the way. Why it stopped early, or "".

    What a job raises is noted, and the next one runs; so is what is left after `within_s`. Ctrl-C and SIGTERM end it.
    """
    progress, saved = Progress(len(jobs) + ON_GPU), 0.0
    began = time.perf_counter()
    done = record.how.setdefault("done", [])
    before = _on_sigterm(signal.default_int_handler)
    stopped = ""
    try:
        if ON_GPU:
            progress.step("compiling")
            compile_all(jobs)
        with Clocks() as clocks:
            runner = Bench(budget_s, clocks)
            for job in jobs:
                if time.perf_counter() - began > within_s:
                    record.add_note(job.name, job.kind, f"{within_s:g} s were over", job.case)
                    continue
                progress.step(f"{job.name} {job.case or ''}")
                try:
                    record.results.append(runner.run(job))
                except Exception as error:
                    # PyTorch says in this way that a backend cannot; all others should have run.
                    why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                    record.add_note(job.name, job.kind, why, job.case, failed=job.kind != "peer")
                    runner = Bench(budget_s, clocks)  # lets go of the failed one's memory
                    if not _alive():
                        done.append(str(job.key))
                        stopped = LOST
                        break
                done.append(str(job.key))
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

"""Times of the stages and of their peers: `course.py ladder`, `course.py bench`, and the recorded JSON.

A figure is only worth something beside others from the same run, so peers and roofs are timed by the same clock, on the
same inputs, between the stages. Nothing is timed before it has been checked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers import kernel, readme, reference
from helpers.check import TOLERANCE, make_inputs
from helpers.device import ON_GPU, cp, describe
from helpers.stages import LADDER, Stage

MEASURED = Path(__file__).resolve().parent.parent / "notebooks" / "measured"

# (batch, heads, rows, head_dim): what the record holds.
SHAPES = ((1, 1, 4096, 64), (1, 1, 16384, 64))

# Tile sizes that were tried, at all SHAPES: what the stages' own sizes were chosen from.
VARIANTS: dict[str, tuple[dict[str, int], ...]] = {
    "naive": tuple({"BLOCK_M": m} for m in (32, 64, 128, 256)),
    "tiled": tuple({"BLOCK_M": m, "BLOCK_N": 16} for m in (32, 64, 128)),
    "online_softmax": tuple(
        {"BLOCK_M": m, "BLOCK_N": n} for m, n in ((32, 16), (64, 8), (64, 16), (64, 32), (128, 16))
    ),
}

SAMPLED_ROWS = 256  # of the output are compared with float64: enough to see any wrong tile, cheap at any N


@dataclass(frozen=True)
class Experiment:
    """A stage with changes (old, new) to its text: what a notebook says of a GPU, measured."""

    name: str
    stage: str
    changes: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[int, int, int, int], ...] = SHAPES[:1]
    sizes: tuple[dict[str, int], ...] = VARIANTS["tiled"]

    def apply(self, code: str) -> str:
        """The changed text. Raises ValueError where it is not the text that the changes were made for."""
        for old, new in self.changes:
            if old not in code:
                raise ValueError(f"the kernel has no {old!r}: mend the experiment {self.name!r}")
            code = code.replace(old, new)
        return code


_BEFORE = "    __syncthreads();  // hazard: the tile is overwritten while another thread still reads the one before\n"
_AFTER = "    __syncthreads();  // hazard: the tile is read before another thread has written its part of it\n"
_DIVIDE = "#pragma unroll\n    for (int c = 0; c < HEAD_DIM; ++c) acc[c] {};\n"
_DIVIDING = (  # the end of the loop over tiles divides; so acc is first multiplied by the old sum again
    ("acc[c] *= rescale;", "acc[c] *= l_i;"),
    ("= acc[c] / l_i;", "= acc[c];"),
)
_LOOP_END = "  }\n\n  // ---- epilogue"
_OWN_SIZES = (VARIANTS["online_softmax"][-1],)

EXPERIMENTS = (
    Experiment("no barrier before the load", "tiled", ((_BEFORE, ""),)),
    Experiment("no barrier after the load", "tiled", ((_AFTER, ""),)),
    Experiment("Q_STRIDE is even", "tiled", (("#define Q_STRIDE (HEAD_DIM | 1)", "#define Q_STRIDE HEAD_DIM"),)),
    Experiment(
        "divide at every tile",
        "online_softmax",
        (*_DIVIDING, (_LOOP_END, _DIVIDE.format("/= l_i") + _LOOP_END)),
        SHAPES,
        _OWN_SIZES,
    ),
    Experiment(
        "one reciprocal per tile",
        "online_softmax",
        (*_DIVIDING, (_LOOP_END, "    const float r = 1.0f / l_i;\n" + _DIVIDE.format("*= r") + _LOOP_END)),
        SHAPES,
        _OWN_SIZES,
    ),
)
EXPERIMENT_LAUNCHES = 50


class WrongOutput(AssertionError):
    """A stage whose output is wrong: it is not timed."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch: the median of many, and their spread."""

    ms: float
    ms_min: float
    ms_max: float
    launches: int


@dataclass
class Result:
    """One line of the record."""

    name: str
    kind: str  # "stage", "peer", "roof"; a stage with other tile sizes is a "variant", with other text an "experiment"
    shape: list[int]
    dtype: str
    ms: float
    ms_min: float
    ms_max: float
    launches: int
    tflops: float | None = None
    gbps: float | None = None
    max_error: float | None = None
    note: str = ""
    wrong_launches: int | None = None  # of an experiment, out of `launches`


@dataclass
class Record:
    """Everything that is needed to read the figures, and to measure them again."""

    device: dict[str, Any]
    how: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def flops(n: int, n_kv: int, head_dim: int) -> int:
    """Floating-point operations of attention as everybody counts them: two matrix products, softmax left out."""
    return 4 * n * n_kv * head_dim


def measure(launch: Callable[[], object], *, budget_s: float = 0.5, most: int = 200) -> Timing:
    """Time a launch, warmed up, with a cold L2 cache on a GPU.

    Args:
        launch: starts the work; on a GPU on the default stream.
        budget_s: about how long to go on for.
        most: launches at most.
    """
    launch()
    cp.cuda.Device().synchronize()
    flush = cp.empty(256 << 20, dtype=cp.uint8) if ON_GPU else None  # larger than any L2
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < budget_s and len(times) < most):
        if flush is not None:
            flush[...] = 0
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end))
    return Timing(statistics.median(times), min(times), max(times), len(times))


def error_on_sample(o: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, seed: int = 1) -> float:
    """Largest absolute error of some rows of `o` (N, d) against float64; NaN if a sampled value is NaN."""
    n = q.shape[0]
    rows = np.sort(np.random.default_rng(seed).choice(n, size=min(n, SAMPLED_ROWS), replace=False))
    expected = reference.attention(q[rows], k, v)
    return float(np.max(np.abs(cp.asnumpy(o)[rows] - expected)))


class Progress:
    """A bar on a terminal; nothing where the output is a file."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty()

    def step(self, label: str) -> None:
        """Say what is being done now."""
        if self.shown:
            filled = round(24 * self.done / max(self.total, 1))
            bar = "#" * filled + "." * (24 - filled)
            sys.stderr.write(f"\r[{bar}] {self.done}/{self.total} {label:<30}")
            sys.stderr.flush()
        self.done += 1

    def close(self) -> None:
        """Clear the line."""
        if self.shown:
            sys.stderr.write("\r" + " " * 72 + "\r")


def _time_stage(stage: Stage, shape: Sequence[int], budget_s: float, sizes: Mapping[str, int] | None = None) -> Result:
    _, _, n, head_dim = shape
    q, k, v = make_inputs(n, n, head_dim, seed=n)
    launch, o = stage.prepare(q, k, v, sizes=sizes)
    launch()
    error = error_on_sample(o, q, k, v)
    if not error <= TOLERANCE:
        raise WrongOutput(f"[FAIL] {stage.name} at {tuple(shape)}: max error {error:.1e} > {TOLERANCE:.1e}; not timed")
    t = measure(launch, budget_s=budget_s)
    return Result(
        stage.name,
        "variant" if sizes else "stage",
        list(shape),
        "float32",
        **asdict(t),
        tflops=flops(n, n, head_dim) / t.ms / 1e9,
        max_error=error,
        note=" ".join(f"{name}={value}" for name, value in {**stage.tiles(head_dim), **(sizes or {})}.items()),
    )


def _experiment(experiment: Experiment, sizes: Mapping[str, int], shape: Sequence[int]) -> Result:
    """Launch a changed stage many times; count the launches whose output is wrong."""
    stage = LADDER[experiment.stage]
    code = experiment.apply(kernel.source(stage.file))
    _, _, n, head_dim = shape
    q, k, v = make_inputs(n, n, head_dim, seed=n)
    expected = cp.asarray(reference.attention(q, k, v))
    launch, o = stage.prepare(q, k, v, source=code, sizes=sizes)
    wrong, worst = 0, 0.0
    for _ in range(EXPERIMENT_LAUNCHES):
        o[...] = cp.nan
        launch()
        error = float(abs(o - expected).max())
        wrong += not error <= TOLERANCE
        worst = max(worst, error)
    t = replace(measure(launch, budget_s=0.1), launches=EXPERIMENT_LAUNCHES)
    return Result(
        f"{stage.name}: {experiment.name}",
        "experiment",
        list(shape),
        "float32",
        **asdict(t),
        max_error=worst,
        note=" ".join(f"{name}={value}" for name, value in sizes.items()),
        wrong_launches=wrong,
    )


def _numpy_peer(shape: Sequence[int], budget_s: float) -> Result:
    """Attention in float32 NumPy: what a reader has without any kernel."""
    _, _, n, head_dim = shape
    q, k, v = make_inputs(n, n, head_dim, seed=n)

    def run() -> np.ndarray:
        s = q @ k.T / np.float32(math.sqrt(head_dim))
        p = np.exp(s - s.max(axis=1, keepdims=True))
        return (p / p.sum(axis=1, keepdims=True)) @ v

    error = error_on_sample(run(), q, k, v)
    t = measure(run, budget_s=budget_s)
    return Result(
        "NumPy", "peer", list(shape), "float32", **asdict(t), tflops=flops(n, n, head_dim) / t.ms / 1e9, max_error=error
    )


def _torch() -> Any | None:
    """PyTorch, if it is installed and sees the GPU; it is a peer, never a need."""
    if not ON_GPU or importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def _torch_peers(torch: Any, shape: Sequence[int], budget_s: float) -> Iterator[Result]:
    """SDPA's float32 backends, forced one by one, on the inputs of the stages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads, n, head_dim = shape
    arrays = make_inputs(n, n, head_dim, seed=n)
    q, k, v = (torch.from_numpy(a).cuda().expand(batch, heads, n, head_dim).contiguous() for a in arrays)
    torch.backends.cuda.matmul.allow_tf32 = False
    work = batch * heads * flops(n, n, head_dim)
    for name, backend in (("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION), ("SDPA math", SDPBackend.MATH)):
        with sdpa_kernel(backend), torch.no_grad():
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)  # noqa: E731
            error = error_on_sample(run()[0, 0].cpu().numpy(), *arrays)
            t = measure(run, budget_s=budget_s)
        yield Result(name, "peer", list(shape), "float32", **asdict(t), tflops=work / t.ms / 1e9, max_error=error)


def _torch_roofs(torch: Any, budget_s: float) -> Iterator[Result]:
    """What the machine can do at best: a large float32 product without TF32, and a large copy."""
    torch.backends.cuda.matmul.allow_tf32 = False
    n = 8192
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    t = measure(lambda: a @ b, budget_s=budget_s)
    yield Result("matmul", "roof", [n, n, n], "float32", **asdict(t), tflops=2 * n**3 / t.ms / 1e9)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    t = measure(lambda: target.copy_(source), budget_s=budget_s)
    yield Result(
        "copy", "roof", [1 << 28], "float32", **asdict(t), gbps=2 * source.nbytes / t.ms / 1e6, note="read + write"
    )


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
    with contextlib.suppress(OSError):
        found["driver"] = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text()).group(0)
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name):
            found[name] = __import__(name).__version__
    return found


def _table(results: Sequence[Result]) -> str:
    lines = [f"{'':18}{'shape':>20}{'ms':>10}{'spread':>17}{'TFLOP/s':>9}{'max error':>11}"]
    for r in results:
        shape = "x".join(map(str, r.shape))
        rate = f"{r.tflops:9.3g}" if r.tflops is not None else f"{r.gbps:7.0f}GB" if r.gbps is not None else " " * 9
        error = f"{r.max_error:11.1e}" if r.max_error is not None else ""
        spread = f"{r.ms_min:.3f}-{r.ms_max:.3f}"
        lines.append(f"{r.name:18}{shape:>20}{r.ms:10.3f}{spread:>17}{rate}{error}  {r.note}".rstrip())
    return "\n".join(lines)


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
    shape = (1, 1, wish.n, wish.d)
    stages = [LADDER[name] for name in wish.stage or LADDER]
    progress = Progress(len(stages) + 1)
    results = []
    failures = []
    for stage in stages:
        progress.step(stage.name)
        try:
            results.append(_time_stage(stage, shape, budget_s=1.0))
        except WrongOutput as error:
            failures.append(str(error))
    progress.step("NumPy")
    results.append(_numpy_peer(shape, budget_s=1.0))
    progress.close()
    for r in results:
        print(f"[PASS] {r.name}: output matches reference (max error: {r.max_error:.1e} <= {TOLERANCE:.1e})")
    print("\n".join([*failures, _table(results)]))
    return 1 if failures else 0


def bench(argv: Sequence[str] = ()) -> int:
    """Every stage at the recorded shapes, with peers and roofs. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="course.py bench",
        description="Time every stage at the recorded shapes; on a GPU beside PyTorch's backends, if installed.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer launches, and the smallest shape only")
    parser.add_argument("--readme", action="store_true", help="only write README's table and plot from the record")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    wish = parser.parse_args(argv)
    if wish.readme:
        readme.write()
        print(f"written: {readme.README.name}, {readme.PLOT.name}")
        return 0
    budget = 0.2 if wish.quick else 1.0
    # The engine is for understanding, not for speed: on the CPU one small shape says what there is to say.
    shapes = (SHAPES[:1] if wish.quick else SHAPES) if ON_GPU else ((1, 1, 1024, 64),)
    torch = None if wish.no_peers else _torch()
    how = {
        "timer": "device events around one launch" if ON_GPU else "wall clock around one launch",
        "statistic": "median; ms_min and ms_max are the spread",
        "l2": "flushed by a 256 MB write before each launch" if ON_GPU else "as it is",
        "inputs": "normal, unit variance, mean 0.25; checked against float64 on sampled rows before timing",
        "flops": "4 * rows * keys * head_dim",
        "command": "python3 helpers/course.py bench --json FILE",
    }
    record = Record(_device(), how)
    print(record.device["description"])
    variants = len(SHAPES) * sum(map(len, VARIANTS.values())) + sum(len(e.shapes) * len(e.sizes) for e in EXPERIMENTS)
    variants = variants if ON_GPU and not wish.quick else 0
    progress = Progress(len(shapes) * (len(LADDER) + (2 if torch else 1)) + (2 if torch else 0) + variants)
    if torch:
        for roof in _torch_roofs(torch, budget):
            progress.step(roof.name)
            record.results.append(roof)
    for shape in shapes:
        for stage in LADDER.values():
            progress.step(stage.name)
            record.results.append(_time_stage(stage, shape, budget))
        peers = _torch_peers(torch, shape, budget) if torch else [_numpy_peer(shape, budget)] if not ON_GPU else []
        for peer in peers:
            progress.step(peer.name)
            record.results.append(peer)
    if ON_GPU and not wish.quick:
        for shape, (name, variants) in itertools.product(SHAPES, VARIANTS.items()):
            for sizes in variants:
                progress.step(f"{name} {sizes}")
                record.results.append(_time_stage(LADDER[name], shape, budget, sizes))
        for experiment in EXPERIMENTS:
            for shape, sizes in itertools.product(experiment.shapes, experiment.sizes):
                progress.step(experiment.name)
                record.results.append(_experiment(experiment, sizes, shape))
    progress.close()
    print(_table(record.results))
    if wish.json:
        record.save(wish.json)
        print(f"written to {wish.json}")
    return 0

"""What each stage makes a GPU do: bytes at DRAM, occupancy, issued instructions, busy pipes, by Nsight Compute.

    python3 -m helpers.record.counters measure FILE    # on a machine with a GPU and Nsight Compute (ncu): writes JSON
    python3 -m helpers.record.counters                 # anywhere: prints the recorded table

All stages of the ladder, at one shape and, from 04 on, at one with wider heads; the steps that led to 04 and 07; beside
them PyTorch's attention and matrix products, where PyTorch is installed. A stage that takes long gets one head: its
launches are alike, one for each. A mark is launched before each run, so that every kernel is known by its place and
none by its name.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from helpers import kernel
from helpers.device import ON_GPU, cp, describe
from helpers.ladder.stages import LADDER
from helpers.record import peers
from helpers.record import xray_vs_ncu as hardware
from helpers.record.cases import Case, Inputs
from helpers.record.experiments import CLIMB, CLIMB_07, Experiment
from helpers.record.results import NO_RECORD
from helpers.record.timing import elapsed

RECORD = Path(__file__).resolve().parents[2] / "notebooks" / "measured" / "nvidia-h200-stages.json"
SHAPE = (1, 16, 4096, 64)
WIDE = 128  # the other head_dim,
WIDE_FROM = 4  # from this stage on
SLOW_MS = 10.0  # more than this, and one head is enough
TYPES = ("float32", "bfloat16", "float16")  # a stage is counted in the first of these that it takes,
ALL_TYPES = ("flash_wmma",)  # these in all that they take
MARK = "utilisation_mark"
COLUMNS = 5  # of the table, side by side

_BUSY = ".avg.pct_of_peak_sustained_active"
# figure -> Nsight Compute's metrics; the first one that the chip has is taken.
FIGURES: dict[str, tuple[str, ...]] = {
    "ms": ("gpu__time_duration.sum",),
    "dram bytes read": ("dram__bytes_read.sum",),
    "dram bytes written": ("dram__bytes_write.sum",),
    "L2 bytes": ("lts__t_bytes.sum",),
    "occupancy %": ("sm__warps_active" + _BUSY,),
    "occupancy % at most": ("sm__maximum_warps_per_active_cycle_pct",),
    "multiprocessors at work %": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "issue slots used %": ("smsp__issue_active" + _BUSY, "sm__inst_issued" + _BUSY),
    "instructions": ("smsp__inst_executed.sum",),
    "FMA pipe %": ("sm__pipe_fma_cycles_active" + _BUSY, "sm__inst_executed_pipe_fma" + _BUSY),
    "tensor pipe %": (
        "sm__pipe_tensor_cycles_active" + _BUSY,
        "sm__pipe_tensor_op_hmma_cycles_active" + _BUSY,
        "sm__inst_executed_pipe_tensor_op_hmma" + _BUSY,
        "sm__inst_executed_pipe_tensor" + _BUSY,
    ),
    "exp2 pipe %": ("sm__inst_executed_pipe_xu" + _BUSY,),
    "shared memory %": ("l1tex__data_pipe_lsu_wavefronts_mem_shared" + ".avg.pct_of_peak_sustained_active",),
    "bank conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "registers": ("launch__registers_per_thread",),
    "local memory instructions": (
        "smsp__inst_executed_op_local.sum",
        "smsp__sass_inst_executed_op_local.sum",
        "smsp__inst_executed_op_local_ld.sum",
        "smsp__sass_inst_executed_op_local_ld.sum",
    ),
    "static shared bytes": ("launch__shared_mem_per_block_static",),
    "dynamic shared bytes": ("launch__shared_mem_per_block_dynamic",),
    "blocks": ("launch__grid_size",),
    "threads a block": ("launch__block_size",),
}
# ncu gives this one with the figures of the launch, unasked, and does not list it among its metrics.
UNASKED = FIGURES["occupancy % at most"]
_UNITS = {"nsecond": 1e-6, "ns": 1e-6, "usecond": 1e-3, "us": 1e-3, "msecond": 1.0, "ms": 1.0}


def cases() -> Iterator[tuple[str, Case]]:
    """Each stage of the ladder with its cases; those that this device cannot run are left out."""
    for head_dim in (SHAPE[3], WIDE):
        for name, stage in LADDER.items():
            if head_dim == SHAPE[3] or stage.number >= WIDE_FROM:
                takes = [dtype for dtype in TYPES if stage.why_not(head_dim=head_dim, dtype=dtype) is None]
                for dtype in takes if name in ALL_TYPES else takes[:1]:
                    yield name, Case((*SHAPE[:3], head_dim), dtype)


def experiment_cases() -> Iterator[tuple[Experiment, Case]]:
    """The steps that led to 04 and to 07, each at the head_dim at which it is timed."""
    for experiment in (*CLIMB, *CLIMB_07):
        for timed in experiment.cases:
            case = Case((*SHAPE[:3], timed.shape[3]), timed.dtype)
            if LADDER[experiment.stage].why_not(head_dim=case.shape[3], dtype=case.dtype) is None:
                yield experiment, case


def peer_cases() -> Iterator[tuple[peers.Peer, Case]]:
    """PyTorch's fused attentions: each in the types in which a stage is set beside it, or else in bfloat16."""
    for head_dim in (SHAPE[3], WIDE):
        for peer in peers.TORCH:
            beside = [dtype for dtype in TYPES if peers.MAIN_PEER[dtype] == peer.name]
            for dtype in (beside or ["bfloat16"]) if peer.sweep else []:
                yield peer, Case((*SHAPE[:3], head_dim), dtype)


def _entry(name: str, kind: str, case: Case) -> dict[str, Any]:
    return {"stage": name, "kind": kind, "dtype": case.dtype, "shape": list(case.shape), "flop": case.flops}


@contextlib.contextmanager
def _stage(entry: dict[str, Any], case: Case, experiment: Experiment | None = None) -> Iterator[Callable[[], Any]]:
    """A stage's run, which has run before. The output is checked at the end. A slow one's entry becomes one head's."""
    stage = LADDER[experiment.stage if experiment else entry["stage"]]
    source = experiment.apply(kernel.source(stage.file)) if experiment else None
    options = {"source": source, "sizes": experiment.sizes[0] if experiment else None}
    inputs = Inputs(case.shape, case.dtype)
    run, o = stage.prepare(*inputs.device, **options)
    run()
    if elapsed(run) > SLOW_MS:
        case = Case((1, 1, *case.shape[2:]), case.dtype)
        entry.update(_entry(entry["stage"], entry["kind"], case))
        inputs = Inputs(case.shape, case.dtype)
        run, o = stage.prepare(*inputs.device, **options)
    yield run
    sample = inputs.sample()
    error = sample.error(o)
    if not error <= sample.tolerance:
        raise AssertionError(f"max error {error:.1e} > {sample.tolerance:.1e}")


@contextlib.contextmanager
def _roof(roof: peers.Roof) -> Iterator[Callable[[], Any]]:
    yield roof.ready()


def _runs(with_peers: bool) -> Iterator[tuple[dict[str, Any], AbstractContextManager[Callable[[], Any]]]]:
    """What is launched: the entry of the record, and a context that gives the run."""
    for name, case in cases():
        entry = _entry(name, "stage", case)
        yield entry, _stage(entry, case)
    for experiment, case in experiment_cases():
        entry = _entry(f"{experiment.stage}: {experiment.name}", "experiment", case)
        yield entry, _stage(entry, case, experiment)
    if with_peers:
        for peer, case in peer_cases():
            yield _entry(peer.name, "peer", case), peer.ready(Inputs(case.shape, case.dtype), False)
        for roof in peers.TORCH_ROOFS:
            if roof.quantity == "tflops":
                entry = {"stage": roof.name, "kind": "roof", "dtype": roof.dtype, "shape": list(roof.shape)}
                yield {**entry, "flop": roof.work}, _roof(roof)


def launch_all(target: Path) -> None:
    """Run each stage and peer once between the profiler's start and stop, after a mark whose grid has its number.

    Writes {"peers": PyTorch's version or why there are none, "rows": what was launched, the first has the number 1}
    as JSON. What fails is written with its error. Raises RuntimeError where there is no GPU.
    """
    if not ON_GPU:
        raise RuntimeError("this needs a GPU and CuPy; the table does not")
    from cupy.cuda import profiler

    mark = cp.RawModule(code=f'extern "C" __global__ void {MARK}() {{}}').get_function(MARK)
    torch = peers.torch_on_gpu()
    launched: list[dict[str, Any]] = []
    for entry, ready in _runs(torch is not None):
        launched.append(entry)
        try:
            with ready as run:
                run()
                cp.cuda.Device().synchronize()
                profiler.start()
                try:
                    mark((len(launched),), (1,), ())
                    run()
                    cp.cuda.Device().synchronize()
                finally:
                    profiler.stop()
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
    version = "left out: no PyTorch that sees the GPU" if torch is None else f"PyTorch {torch.__version__}"
    target.write_text(json.dumps({"peers": version, "rows": launched}))


def rows(launched: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The record's rows from what was launched and Nsight Compute's CSV, in which a mark precedes each run.

    Where a run is several launches, counts and times are added; percentages are averaged, each weighted by its
    launch's time; registers, blocks and such are the longest launch's.
    """
    runs: dict[int, list[tuple[str, dict[str, tuple[str, str]]]]] = {}
    number = 0
    for name, columns in hardware.launches_of(text):
        if name == MARK:
            number = int(_number(*columns["launch__grid_size"]))
        else:
            runs.setdefault(number, []).append((name, columns))
    found = []
    for number, entry in enumerate(launched, 1):
        seen = runs.get(number, [])
        row: dict[str, Any] = {**entry, "launches": len(seen), "kernels": list(dict.fromkeys(name for name, _ in seen))}
        if not seen:
            row.setdefault("error", "no launch of it was counted")
        row["figures"] = {} if "error" in row else _figures([columns for _, columns in seen])
        found.append(row)
    return found


def _figures(launches: Sequence[Mapping[str, tuple[str, str]]]) -> dict[str, float]:
    """The figures of one run from its launches' columns; what ncu gave no number for is left out."""
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


def _number(value: str, unit: str) -> float:
    """A figure of Nsight Compute's; times in milliseconds. NaN for what is no number."""
    try:
        return float(value.replace(",", "")) * _UNITS.get(unit, 1.0)
    except ValueError:
        return math.nan


def measure(target: Path) -> None:
    """Launch all stages and peers under Nsight Compute and write the JSON record.

    Raises:
        RuntimeError: ncu is missing or failed; the message is its own.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        table, file = Path(folder, "ncu.csv"), Path(folder, "launched.json")
        taken = {figure: hardware.first_known(metrics) for figure, metrics in FIGURES.items()}
        asked = [metric for metric in taken.values() if metric not in UNASKED]
        words = ("helpers.record.counters", "launch", str(file))
        hardware.ncu(table, asked, [".*"], words, "--profile-from-start", "off")
        launched = json.loads(file.read_text())
        found = rows(launched["rows"], table.read_text())
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    how = {
        "device": describe(),
        "ncu": version[-1] if version else "",
        "python": platform.python_version(),
        "peers": launched["peers"],
        "what": "one run each, caches flushed before each launch, clocks left alone; the stages' output was checked",
        "metrics": taken,
        "seconds": round(time.monotonic() - began, 1),
        "command": "python3 -m helpers.record.counters measure FILE",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in found)
    target.write_text(f'{{\n "how": {json.dumps(how, indent=2)},\n "rows": [\n{lines}\n ]\n}}\n')


def recorded(path: Path | None = None) -> dict[str, Any] | None:
    """The record, or None where there is none."""
    path = path or RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def select(
    record: Mapping[str, Any],
    stages: Sequence[str] | None = None,
    *,
    head_dim: int | str = SHAPE[3],
    dtype: str = "first",
) -> list[Mapping[str, Any]]:
    """Some of a record's rows, in its order.

    Args:
        stages: these alone, peers, matrix products and steps too ("SDPA flash", "flash_mma: climb 2, swizzle");
            or all but the steps.
        head_dim: a number, or "all". A row that has none, such as a matrix product's, is always taken.
        dtype: a type, "all", or "first" for the first in which each was counted.
    """
    first: dict[str, str] = {}
    for row in record["rows"]:
        first.setdefault(row["stage"], row.get("dtype"))
    return [
        row
        for row in record["rows"]
        if (row.get("kind") != "experiment" if stages is None else row["stage"] in stages)
        and (head_dim == "all" or _head_dim(row) in (head_dim, None))
        and (dtype == "all" or row.get("dtype") == (first[row["stage"]] if dtype == "first" else dtype))
    ]


def _head_dim(row: Mapping[str, Any]) -> int | None:
    shape = row.get("shape", ())
    return shape[3] if len(shape) == 4 else None


def table(
    record: Mapping[str, Any] | None = None,
    stages: Sequence[str] | None = None,
    *,
    head_dim: int | str = SHAPE[3],
    dtype: str = "first",
) -> str:
    """The recorded figures as text, a stage a column, a few columns side by side. For the rest see `select`."""
    record = record or recorded()
    if record is None:
        return NO_RECORD
    wanted = select(record, stages, head_dim=head_dim, dtype=dtype)
    shown = [row for row in wanted if row["figures"]]
    lines: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = [
        ("", lambda row: row["stage"]),
        ("", lambda row: row["dtype"]),
        ("heads", lambda row: math.prod(row["shape"][:2]) if _head_dim(row) else ""),
    ]
    if any(_head_dim(row) not in (SHAPE[3], None) for row in shown):
        lines.append(("head_dim", lambda row: _head_dim(row) or ""))
    for figure in FIGURES:
        if any(figure in row["figures"] for row in shown):
            lines.append((figure, lambda row, figure=figure: _text(row["figures"].get(figure))))
    blocks = [
        "\n".join(
            (f"{head:28}" + "".join(f"{cell(row):>18}" for row in shown[i : i + COLUMNS])).rstrip()
            for head, cell in lines
        )
        for i in range(0, len(shown), COLUMNS)
    ]
    failed = [f"{row['stage']}: {row['error']}" for row in wanted if "error" in row]
    return "\n\n".join([*blocks, *(["\n".join(failed)] if failed else [])])


def steps(
    names: Mapping[str, str],
    figures: Sequence[str],
    *,
    head_dim: int,
    record: Mapping[str, Any] | None = None,
) -> str:
    """Some figures as text, a run a line: for a climb.

    Args:
        names: what a line begins with -> the run's name in the record.
        figures: keys of FIGURES, a column each.
    """
    record = record or recorded()
    if record is None:
        return NO_RECORD
    width = max(map(len, names)) + 2
    lines = [" " * width + "".join(f"{figure:>{len(figure) + 3}}" for figure in figures)]
    for label, name in names.items():
        row = next(iter(select(record, [name], head_dim=head_dim)), None)
        found = row["figures"] if row else {}
        cells = (f"{_text(found.get(figure)):>{len(figure) + 3}}" for figure in figures)
        lines.append(f"{label:{width}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def main(words: Sequence[str]) -> None:
    """measure FILE, launch FILE, or nothing for the table."""
    if len(words) == 2 and words[0] in ("measure", "launch"):
        (measure if words[0] == "measure" else launch_all)(Path(words[1]))
    elif not words:
        print(table(head_dim="all", dtype="all"))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

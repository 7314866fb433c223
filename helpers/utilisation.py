"""What each stage makes a GPU do: bytes at DRAM, occupancy, issued instructions, busy pipes, by Nsight Compute.

    python3 -m helpers.utilisation measure FILE    # on a machine with a GPU and Nsight Compute (ncu): writes JSON
    python3 -m helpers.utilisation                 # anywhere: prints the recorded table

All stages of the ladder, at one shape. A stage that takes long gets one head: its launches are alike, one for each.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import hardware
from helpers.cases import Case, Inputs
from helpers.device import ON_GPU, cp, describe
from helpers.stages import LADDER
from helpers.timing import elapsed

RECORD = Path(__file__).resolve().parent.parent / "notebooks" / "measured" / "nvidia-h200-stages.json"
SHAPE = (1, 16, 4096, 64)
SLOW_MS = 10.0  # more than this, and one head is enough
TYPES = ("float32", "bfloat16", "float16")  # a stage is counted in the first of these that it takes

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
    "static shared bytes": ("launch__shared_mem_per_block_static",),
    "dynamic shared bytes": ("launch__shared_mem_per_block_dynamic",),
    "blocks": ("launch__grid_size",),
    "threads a block": ("launch__block_size",),
}
_UNITS = {"nsecond": 1e-6, "ns": 1e-6, "usecond": 1e-3, "us": 1e-3, "msecond": 1.0, "ms": 1.0}


def cases() -> Iterator[tuple[str, Case]]:
    """Each stage of the ladder with its case; those that this device cannot run are left out."""
    for name, stage in LADDER.items():
        for dtype in TYPES:
            if stage.why_not(head_dim=SHAPE[3], dtype=dtype) is None:
                yield name, Case(SHAPE, dtype)
                break


def launch_all(target: Path) -> None:
    """Launch each stage once between the profiler's start and stop; write what was launched as JSON, in that order.

    A stage that fails is written with its error. Raises RuntimeError where there is no GPU.
    """
    if not ON_GPU:
        raise RuntimeError("this needs a GPU and CuPy; the table does not")
    from cupy.cuda import profiler

    launched = []
    for name, case in cases():
        stage, one_head = LADDER[name], Case((1, 1, *SHAPE[2:]), case.dtype)
        try:
            run, o = stage.prepare(*Inputs(case.shape, case.dtype).device)
            run()
            if elapsed(run) > SLOW_MS:
                case = one_head
                run, o = stage.prepare(*Inputs(case.shape, case.dtype).device)
            cp.cuda.Device().synchronize()
            profiler.start()
            run()
            cp.cuda.Device().synchronize()
            profiler.stop()
            sample = Inputs(case.shape, case.dtype).sample()
            error = sample.error(o)
            if not error <= sample.tolerance:
                raise AssertionError(f"max error {error:.1e} > {sample.tolerance:.1e}")
        except Exception as error:
            launched.append({"stage": name, "error": f"{type(error).__name__}: {error}"})
            continue
        launched.append({"stage": name, "dtype": case.dtype, "shape": list(case.shape), "flop": case.flops})
    target.write_text(json.dumps(launched))


def rows(launched: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The record's rows from what was launched and Nsight Compute's CSV.

    Where a stage launched several times, counts and times are added and percentages averaged.
    """
    by_kernel: dict[str, list[dict[str, tuple[str, str]]]] = {}
    for kernel_name, columns in hardware.launches_of(text):
        by_kernel.setdefault(re.sub(r"<.*", "", kernel_name), []).append(columns)
    found = []
    for entry in launched:
        seen = by_kernel.get(entry["stage"], [])
        figures: dict[str, float] = {}
        for figure, metrics in FIGURES.items():
            metric = next((m for m in metrics if seen and m in seen[0]), None)
            if metric is not None and "error" not in entry:
                values = [_number(*columns[metric]) for columns in seen]
                adds = metric.endswith(".sum")
                figures[figure] = float(f"{sum(values) / (1 if adds else len(values)):.6g}")
        found.append({**entry, "launches": len(seen), "figures": figures})
    return found


def _number(value: str, unit: str) -> float:
    """A figure of Nsight Compute's; times in milliseconds."""
    return float(value.replace(",", "") or "nan") * _UNITS.get(unit, 1.0)


def measure(target: Path) -> None:
    """Launch all stages under Nsight Compute and write the JSON record.

    Raises:
        RuntimeError: ncu is missing or failed; the message is its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        table, launched = Path(folder, "ncu.csv"), Path(folder, "launched.json")
        wanted = [hardware.first_known(metrics) for metrics in FIGURES.values()]
        words = ("helpers.utilisation", "launch", str(launched))
        hardware.ncu(table, wanted, list(LADDER), words, "--profile-from-start", "off")
        found = rows(json.loads(launched.read_text()), table.read_text())
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    how = {
        "device": describe(),
        "ncu": version[-1] if version else "",
        "python": platform.python_version(),
        "what": "one run of each stage, caches flushed before each launch, clocks left alone; the output was checked",
        "metrics": {figure: list(metrics) for figure, metrics in FIGURES.items()},
        "command": "python3 -m helpers.utilisation measure FILE",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in found)
    target.write_text(f'{{\n "how": {json.dumps(how, indent=2)},\n "rows": [\n{lines}\n ]\n}}\n')


def recorded(path: Path | None = None) -> dict[str, Any] | None:
    """The record, or None where there is none."""
    path = path or RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def table(record: Mapping[str, Any] | None = None, stages: Sequence[str] | None = None) -> str:
    """The recorded figures as text, a stage a column.

    Args:
        stages: these alone, or all.
    """
    record = record or recorded()
    if record is None:
        return "no GPU run is recorded yet"
    shown = [row for row in record["rows"] if (stages is None or row["stage"] in stages) and row["figures"]]
    lines = [f"{'':28}" + "".join(f"{row['stage']:>18}" for row in shown)]
    lines.append(f"{'':28}" + "".join(f"{row['dtype']:>18}" for row in shown))
    lines.append(f"{'heads':28}" + "".join(f"{row['shape'][0] * row['shape'][1]:>18}" for row in shown))
    for figure in FIGURES:
        if any(figure in row["figures"] for row in shown):
            lines.append(f"{figure:28}" + "".join(f"{_text(row['figures'].get(figure)):>18}" for row in shown))
    failed = [f"{row['stage']}: {row['error']}" for row in record["rows"] if "error" in row]
    return "\n".join(line.rstrip() for line in [*lines, *failed])


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def main(words: Sequence[str]) -> None:
    """measure FILE, launch FILE, or nothing for the table."""
    if len(words) == 2 and words[0] in ("measure", "launch"):
        (measure if words[0] == "measure" else launch_all)(Path(words[1]))
    elif not words:
        print(table())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

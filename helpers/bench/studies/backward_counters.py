"""Compare hopper_backward with FlashAttention-4, and hopper with cuDNN: Nsight Compute's counters, and the clock.

    python3 -m helpers.bench.study backward_counters FILE
    python3 -m helpers.bench.studies.backward_counters launch FILE    # run by Nsight Compute

bfloat16, 16,384 tokens or 8 x 2112, heads x head_dim = 2048; only the backward pass, by torch.autograd, and the forward
pass of causal calls with 512 rows. "rows": the figures of `helpers.bench.counters` for the longest kernel, and the
other kernels' share of the time. "power": all in turns, each launched repeatedly for a while, and the clock right
afterwards. FlashAttention-4 is left out if it is not installed. "without": the loops of copies of hopper_backward with
parts removed, whose gradients are wrong; their texts are not kept.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers.bench import ncu, records
from helpers.bench.cases import Case
from helpers.bench.harness import Study, figures, heads_text, require_same, words_of_process
from helpers.bench.peers import flash_attention_4
from helpers.bench.studies.autograd import FLASH4, OURS, forwards, inputs
from helpers.bench.studies.hopper import share
from helpers.bench.timing import Sensors, sm_mhz, speeds
from helpers.device import ON_GPU, cp, describe

recorded = records.reader("nvidia-h200-backward_counters.json")
CASES = tuple(
    Case((batch, 2048 // head_dim, n, head_dim), "bfloat16", causal, backward=True)
    for head_dim in (128, 64)
    for batch, n in ((1, 16384), (4, 4096), (8, 2112))
    for causal in (False, True)
) + tuple(Case((32, 2048 // head_dim, 512, head_dim), "bfloat16", True) for head_dim in (128, 64))
CUDNN = "SDPA cuDNN"
MULTIPROCESSORS = 132
ROUNDS, ROUND_S = 5, 0.12


def passes(case: Case) -> dict[str, Callable[[], Any]]:
    """Return each way's pass, ours first: a function that returns (batch, N, heads, d), or three such gradients.

    For gradients the forward passes have run. Raises WrongOutput if a result differs.
    """
    import torch

    given, do = inputs(case)
    peers = [FLASH4] * (flash_attention_4() is not None)
    peers += [CUDNN] * (not case.backward and torch.cuda.is_available())
    if case.backward:
        for a in given:
            a.requires_grad_()
    made = forwards(given, case.causal, peers)
    if case.backward:
        outputs = {name: forward() for name, forward in made.items()}
        gradients = functools.partial(torch.autograd.grad, inputs=given, grad_outputs=do, retain_graph=True)
        made = {name: functools.partial(gradients, o) for name, o in outputs.items()}
    require_same(str(case), made)
    return made


def _what(case: Case) -> dict[str, Any]:
    return {"pass": "backward" if case.backward else "forward", "shape": list(case.shape), "causal": case.causal}


# ---- counters


def launch_all(target: Path, cases: tuple[Case, ...] = CASES) -> None:
    """Count each pass once, and write what was launched as JSON; the first has the number 1."""
    for case in cases:
        passes(case)  # compiles
    launched: list[dict[str, Any]] = []
    count = ncu.marked()
    for case in cases:
        for name, run in passes(case).items():
            launched.append({"name": name, **_what(case)})
            count(len(launched), run)
            target.write_text(json.dumps(launched))


def rows() -> Iterator[list[dict[str, Any]]]:
    """Launch all passes under Nsight Compute.

    figures, stalls: those of the longest kernel. others: the other kernels' share of the pass's time.
    """
    launched, text = ncu.counted("helpers.bench.studies.backward_counters")
    runs, found = ncu.runs_of(text), []
    for number, entry in enumerate(launched, 1):
        each = [(ncu.figures_of([columns]), name, columns) for name, columns in runs.get(number, ())]
        if each:
            of_main, kernel, columns = max(each, key=lambda one: one[0]["ms"])
            others = {"kernels": len(each), "others": 1 - of_main["ms"] / sum(one["ms"] for one, *_ in each)}
            stalls = ncu.stalls_of([columns])
            found.append({**entry, "kernel": kernel, **others, "figures": of_main, "stalls": stalls})
    yield found


# ---- the clock


def power(
    cases: tuple[Case, ...] = CASES, rounds: int = ROUNDS, round_s: float = ROUND_S
) -> Iterator[list[dict[str, Any]]]:
    """Time the passes in turns, each repeated for round_s seconds with the queue kept full.

    mhz: the median clock of a waiting kernel, launched right afterwards. share: of the tensor cores' rate at that
    clock, over the whole pass with all its kernels. watts: from nvidia-smi.
    """
    for case in cases:
        made = passes(case)
        seen: dict[str, list[tuple[float, float, float | None]]] = {name: [] for name in made}
        with Sensors() as sensors:
            for i in range(rounds + 1):
                for name, run in made.items():
                    began = time.perf_counter()
                    ms, mhz = _over_and_over(run, round_s), sm_mhz()
                    watts = sensors.between(began + round_s / 3, time.perf_counter()).get("watts")
                    if i > 0:  # before that the GPU warms up
                        seen[name].append((ms, mhz, watts))
        times = {name: [ms for ms, *_ in each] for name, each in seen.items()}
        rows = []
        for name, each in seen.items():
            timed, mhz = figures(times[name], case.flops), statistics.median(mhz for _, mhz, _ in each)
            row = {"name": name, **_what(case), **timed, "mhz": mhz}
            row["share"] = share(timed["tflops"], MULTIPROCESSORS, mhz)
            if known := [watts for *_, watts in each if watts is not None]:
                row["watts"] = statistics.median(known)
            rows.append(row if name == OURS else row | speeds(times[OURS], times[name]))
        yield rows


def _over_and_over(run: Callable[[], Any], seconds: float) -> float:
    """Return milliseconds per launch over many launches, without the first ones, which fill the queue."""
    events = [cp.cuda.Event(), cp.cuda.Event()]
    run()
    events[0].record()
    run()
    events[1].record()
    events[1].synchronize()
    count = max(2, round(1e3 * seconds / max(cp.cuda.get_elapsed_time(*events), 1e-3))) if ON_GPU else 1
    for _ in range(max(1, count // 8)):
        run()
    events[0].record()
    for _ in range(count):
        run()
    events[1].record()
    events[1].synchronize()
    return cp.cuda.get_elapsed_time(*events) / count


STUDY = Study(
    "backward_counters",
    {"rows": rows, "power": power},
    lambda: {"device": describe(), "rounds": ROUNDS},
    needs=("torch",),
)
take = STUDY.take

COLUMNS = {  # head of a column: figure of the longest kernel
    "tensor": "tensor pipe %",
    "shared": "shared memory %",
    "issue": "issue slots used %",
    "SMs": "multiprocessors at work %",
}


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a case and a way a line: per cent of the longest kernel's cycles, bytes, time, clock."""
    heads = (*COLUMNS, "L2 GB", "DRAM GB", "conflicts", "others", "TFLOP/s", "MHz", "share")
    lines = [f"{'bfloat16':69}" + "".join(f"{head:>10}" for head in heads)]
    timed = {_key(row): row for row in record.get("power", ())}
    for row in record["rows"]:
        what = f"{row['pass']}: {heads_text(row)}"
        own, clock = row["figures"], timed.get(_key(row))
        dram = (own["dram bytes read"] + own["dram bytes written"]) / 1e9
        cells = [f"{own[figure]:.0f} %" for figure in COLUMNS.values()]
        cells += [f"{own['L2 bytes'] / 1e9:.1f}", f"{dram:.2f}", f"{own['bank conflicts'] / 1e6:.1f} M"]
        cells += [f"{row['others']:.1%}"]
        cells += [f"{clock['tflops']:.0f}", f"{clock['mhz']:,.0f}", f"{clock['share']:.0%}"] if clock else []
        lines.append(f"{what:52}{row['name']:17}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


BESIDE = {"tensor cores busy": "tensor pipe %", "shared memory busy": "shared memory %"}
SHORT = {OURS: "13", FLASH4: "FA4"}
LEAST = 0.08  # share of a warp's cycles: shorter waits are left out


@records.shown
def beside(record: Mapping[str, Any] | None = None, *, n: int) -> str:
    """Format the backward passes of N rows without a mask as text: ours and FlashAttention-4's, side by side.

    The first lines describe the longest kernel; then come shares of its warps' cycles; then the whole pass in turns.
    """
    rows = [row for row in record["rows"] if (row["pass"], row["shape"][2], row["causal"]) == ("backward", n, False)]
    timed = {_key(row): row for row in record["power"]}
    clocks = [timed[_key(row)] for row in rows]
    shares = [{state: spent / sum(row["stalls"].values()) for state, spent in row["stalls"].items()} for row in rows]
    states = dict.fromkeys(state for share in shares for state in share)
    waits = [state for state in states if any(share.get(state, 0.0) >= LEAST for share in shares)]
    waits.sort(key=lambda state: (state != "issued", -shares[0].get(state, 0.0)))
    cells = {
        f"N = {n}": [f"d = {row['shape'][3]}, {SHORT.get(row['name'], row['name'])}" for row in rows],
        **{what: [f"{row['figures'][figure]:.0f} %" for row in rows] for what, figure in BESIDE.items()},
        "bytes from the L2 cache": [f"{row['figures']['L2 bytes'] / 1e9:.1f} GB" for row in rows],
        "bank conflicts": [f"{row['figures']['bank conflicts'] / 1e6:.1f} M" for row in rows],
        "of a warp's cycles:": [],
        **{f"  {state}": [f"{share.get(state, 0.0):.0%}" for share in shares] for state in waits},
        "time": [f"{row['ms']:.2f} ms" for row in clocks],
        "clock": [f"{row['mhz']:,.0f} MHz" for row in clocks],
        "power": [f"{row['watts']:.0f} W" if "watts" in row else "" for row in clocks],
    }
    return "\n".join((f"{what:34}" + "".join(f"{cell:>15}" for cell in line)).rstrip() for what, line in cells.items())


@records.shown
def without_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the loops of copies with parts removed as text, a copy a line: time, tensor cores, conflicts."""
    lines = [f"{'without':28}{'time':>10}{'tensor cores':>16}{'bank conflicts':>16}"]
    for row in record["without"]:
        conflicts = f"{row['bank conflicts'] / 1e6:.1f} M"
        lines.append(f"{row['name']:28}{row['ms']:7.2f} ms{row['tensor pipe %']:14.0f} %{conflicts:>16}")
    return "\n".join(lines)


def flash4_speeds(record: Mapping[str, Any], n: int) -> list[float]:
    """List the speedups of the backward passes of N rows over FlashAttention-4's, the lowest first."""
    found = [row for row in record["power"] if (row["name"], row["pass"], row["shape"][2]) == (FLASH4, "backward", n)]
    return sorted(row["speed"] for row in found)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["name"], row["pass"], *row["shape"], row["causal"]


if __name__ == "__main__":  # run by Nsight Compute
    launch_all(Path(words_of_process("backward_counters", 2)[1]))

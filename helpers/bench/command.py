"""The commands `course.py ladder` and `course.py bench`: times of the stages and of their peers.

A figure is meaningful only compared with others from the same run, so peers and roofs are timed with the same clock, on
the same inputs, between the stages. Everything is checked before it is timed. plan.py lists what is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.attention.ladder import limits
from helpers.bench import architectures, gpus, peers, readme, records
from helpers.bench.cases import Case
from helpers.bench.job import WrongOutput, of_peer, of_stage, why_not
from helpers.bench.plan import forward, gradients, plan, still_to_do
from helpers.bench.results import Record, results_table
from helpers.bench.run import (
    INTERRUPTED,
    LOST,
    JobRunner,
    ProgressBar,
    device_facts,
    how_measured,
    run_all,
)
from helpers.device import ON_GPU, describe

ENGINE = """\
The times below are the CPU engine's, and no GPU's: it runs each CUDA thread as a fiber on this machine's cores, and
NumPy, in the last row, is faster. What later stages add is in a GPU's hardware, which the engine imitates by function
calls: we suspect that this is why they are slower here than earlier ones. README has the times of a GPU."""
BUDGET_S, QUICK_BUDGET_S = 0.15, 0.03  # seconds per measurement


def ladder(argv: Sequence[str] = ()) -> int:
    """Check each stage on this machine's device, time it, and print a table. Return the exit status."""
    stages = forward()
    widest = max(stage.max_head_dim for stage in stages.values())
    parser = argparse.ArgumentParser(prog="course.py ladder", description="Check and time each stage on this machine.")
    parser.add_argument(
        "--n", type=int, default=4096 if ON_GPU else 1024, help="query and key rows (default %(default)s)"
    )
    parser.add_argument("--d", type=int, default=64, help=f"head dimension, 1 to {widest} (default %(default)s)")
    parser.add_argument("--stage", choices=list(stages), action="append", help="only this stage; may be repeated")
    parser.add_argument("--gpus", action="store_true", help="only say what each GPU, from Turing to Blackwell, runs")
    options = parser.parse_args(argv)
    if options.gpus:
        print("\n".join(map(architectures.text, architectures.CARDS)))
        return 0
    if options.n < 1 or not 1 <= options.d <= widest:
        parser.error(f"--n is at least 1 and --d is 1 to {widest}; got --n {options.n} --d {options.d}")
    print(describe() if ON_GPU else f"{describe()}\n{ENGINE}\n")
    if ON_GPU and (cc := limits.compute_capability()) in architectures.CARDS:
        print(architectures.text(cc))
    record = Record({}, {})
    jobs, skipped = [], []
    for name in options.stage or stages:
        stage = stages[name]
        cases = [Case((1, 1, options.n, options.d), dtype) for dtype in stage.dtypes]
        reasons = [why_not(stage, case) for case in cases]
        possible = [case for case, why in zip(cases, reasons, strict=True) if why is None]
        if possible:  # in the first type that it supports on this device
            jobs.append(of_stage(stage, possible[0]))
        else:
            skipped.append(f"[SKIP] {name}: {reasons[0]}")
    jobs.append(of_peer(peers.NUMPY, Case((1, 1, options.n, options.d))))
    progress, runner = ProgressBar(len(jobs)), JobRunner(1.0)
    failed = 0
    for job in jobs:
        progress.step(job.name)
        try:
            r = runner.run(job)
        except WrongOutput as error:
            failed += 1
            print(f"[FAIL] {job.name} at {job.case}: {error}")
            continue
        except MemoryError as error:
            skipped.append(f"[SKIP] {job.name} at {job.case}: too little memory: {error}")
            continue
        record.results.append(r)
        print(f"[PASS] {r.name}: output matches reference (max error: {r.max_error:.1e} <= {r.tolerance:.1e})")
    progress.close()
    print("\n".join([*skipped, results_table(record)]))
    return 1 if failed else 0


def bench(argv: Sequence[str] = ()) -> int:
    """Time every stage at the recorded shapes, with peers and roofs. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="course.py bench",
        description="Time every stage at the recorded shapes; on a GPU also PyTorch's backends, if installed.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE, from the first result on")
    parser.add_argument("--quick", action="store_true", help="fewer launches, and few shapes")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        help="with PyTorch (by default where it is installed), or without",
    )
    names = [*forward(), *dict.fromkeys(each.stage.name for each in gradients())]
    parser.add_argument("--stage", choices=names, action="append", help="only this stage; may be repeated")
    parser.add_argument("--steps", action="store_true", help="only the steps of climbs, in place of those in FILE")
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS", help="leave out what takes longer")
    parser.add_argument("--resume", action="store_true", help="measure only what FILE has not")
    parser.add_argument("--readme", action="store_true", help="only write README's table and plot from the record")
    options = parser.parse_args(argv)
    if options.readme:
        readme.write()
        print(f"written: {readme.README.name}, {readme.PLOT.name}")
        return 0
    if options.peers and not ON_GPU:
        parser.error("--peers: there is no GPU here; `ladder` checks and times the stages on this machine")
    if options.peers and peers.torch_on_gpu() is None:
        parser.error("--peers: PyTorch is not installed, or sees no GPU")
    if options.resume and not options.json:
        parser.error("--resume needs --json FILE")
    saved = None
    if options.json:
        try:
            records.opened(options.json).unlink()
            saved = Record.load(options.json) if options.json.is_file() else None
        except OSError as error:
            parser.error(f"--json {options.json}: {error.strerror}")
        except ValueError as error:
            if options.resume or options.steps:
                parser.error(f"--json {options.json}: it cannot be continued: {error}")
    record = Record({}, how_measured())
    jobs = plan(record, quick=options.quick, with_peers=options.peers is not False, only=options.stage or ())
    record.device = device_facts()
    if options.steps:
        jobs = [job for job in jobs if job.climb]
    if (options.resume or options.steps) and saved:
        record = saved
        if options.resume:
            jobs = still_to_do(jobs, record)
        else:
            climbs = {job.climb for job in jobs}
            record.results = [r for r in record.results if r.step is None or r.name.partition(": ")[0] not in climbs]
        record.forget_left((job.kind, job.name, str(job.case)) for job in jobs)
    print(record.device["description"])
    stopped = run_all(jobs, record, QUICK_BUDGET_S if options.quick else BUDGET_S, options.json, options.within)
    if stopped == LOST and options.json:
        sys.stdout.flush()
        os.execv(
            sys.executable, [sys.executable, "-c", _AGAIN, *(word for word in argv if word != "--resume"), "--resume"]
        )
    print(results_table(record))
    if options.json:
        record.save(options.json)
        print(f"written to {options.json}")
        _say_how_to_share(options.json)
    if stopped:
        print(stopped, file=sys.stderr)
        return 130 if stopped == INTERRUPTED else 1
    return 1 if any(note.failed for note in record.notes) else 0


def _say_how_to_share(path: Path) -> None:
    """Print how to contribute a GPU's record, or what it still lacks."""
    if not ON_GPU:
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    missing = gpus.problems(saved)
    file = f"notebooks/measured/{gpus.slug(saved['device']['name'])}.json"
    if missing:
        print("\n".join(["As a record of the course it lacks:", *missing[:5], *["..."] * (len(missing) > 5)]))
    else:
        print(f"It names neither this machine nor you. To add it to the course: a pull request with it as {file}")


_AGAIN = "import sys; from helpers.bench import command; sys.exit(command.bench(sys.argv[1:]))"

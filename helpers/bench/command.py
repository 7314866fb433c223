"""The commands `course.py ladder` and `course.py bench`: times of the stages and of their peers.

A figure is only worth something beside others from the same run, so peers and roofs are timed by the same clock, on the
same inputs, between the stages. Nothing is timed before it has been checked. What is timed is in plan.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.bench import gpus, peers, readme
from helpers.bench.cases import Case
from helpers.bench.plan import Job, forward, gradients, plan, recorded_stages, still_to_do, why_not
from helpers.bench.results import Record, results_table
from helpers.bench.run import (
    INTERRUPTED,
    LOST,
    JobRunner,
    ProgressBar,
    WrongOutput,
    device_facts,
    how_measured,
    run_all,
)
from helpers.device import ON_GPU, describe

ENGINE = """\
These are times of the CPU engine, and no GPU's: it runs each CUDA thread as a fiber on this machine's cores. What later
stages add is in a GPU's hardware: barriers, shuffles, asynchronous copies, tensor cores. The engine computes each by
function calls, and we suspect that this is why later stages are slower here. README has the times of a GPU."""
BUDGET_S, QUICK_BUDGET_S = 0.15, 0.03  # for one measurement


def ladder(argv: Sequence[str] = ()) -> int:
    """Each stage on this machine's device: checked, then timed, in a table. Returns the exit status."""
    stages = forward()
    widest = max(stage.max_head_dim for stage in stages.values())
    parser = argparse.ArgumentParser(prog="course.py ladder", description="Check and time each stage on this machine.")
    parser.add_argument(
        "--n", type=int, default=4096 if ON_GPU else 1024, help="query and key rows (default %(default)s)"
    )
    parser.add_argument("--d", type=int, default=64, help=f"head dimension, 1 to {widest} (default %(default)s)")
    parser.add_argument("--stage", choices=list(stages), action="append", help="only this stage; may be repeated")
    wish = parser.parse_args(argv)
    if wish.n < 1 or not 1 <= wish.d <= widest:
        parser.error(f"--n is at least 1 and --d is 1 to {widest}; got --n {wish.n} --d {wish.d}")
    print(describe())
    record = Record({}, {})
    jobs, skipped = [], []
    for name in wish.stage or stages:
        stage = stages[name]
        cases = [Case((1, 1, wish.n, wish.d), dtype) for dtype in stage.dtypes]
        reasons = [why_not(stage, case) for case in cases]
        possible = [case for case, why in zip(cases, reasons, strict=True) if why is None]
        if possible:  # in the first type that it can on this device
            jobs.append(Job("stage", name, stage, possible[0]))
        else:
            skipped.append(f"[SKIP] {name}: {reasons[0]}")
    jobs.append(Job("peer", "NumPy", peers.NUMPY, Case((1, 1, wish.n, wish.d))))
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
        record.results.append(r)
        print(f"[PASS] {r.name}: output matches reference (max error: {r.max_error:.1e} <= {r.tolerance:.1e})")
    progress.close()
    print("\n".join([*skipped, results_table(record)]))
    if not ON_GPU:
        print(f"\n{ENGINE}")
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
    names = [*recorded_stages(), *dict.fromkeys(each.stage.name for each in gradients())]
    parser.add_argument("--stage", choices=names, action="append", help="only this stage; may be repeated")
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS", help="leave out what takes longer")
    parser.add_argument("--resume", action="store_true", help="measure only what FILE has not")
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
    record = Record({}, how_measured())
    jobs = plan(record, quick=wish.quick, with_peers=wish.peers is not False, only=wish.stage or ())
    record.device = device_facts()
    if wish.resume and wish.json.is_file():
        record = Record.load(wish.json)
        jobs = still_to_do(jobs, record)
        record.forget_left((job.kind, job.name, str(job.case)) for job in jobs)
    print(record.device["description"])
    stopped = run_all(jobs, record, QUICK_BUDGET_S if wish.quick else BUDGET_S, wish.json, wish.within)
    if stopped == LOST and wish.json:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-c", _AGAIN, *_without(argv, "--resume"), "--resume"])
    print(results_table(record))
    if wish.json:
        record.save(wish.json)
        print(f"written to {wish.json}")
        _tell_of_sharing(wish.json)
    if stopped:
        print(stopped, file=sys.stderr)
        return 130 if stopped == INTERRUPTED else 1
    return 1 if any(note.failed for note in record.notes) else 0


def _tell_of_sharing(path: Path) -> None:
    """How a GPU's record becomes one of the course's, or what keeps it from that."""
    if not ON_GPU:
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    told = gpus.problems(found)
    file = f"notebooks/measured/{gpus.slug(found['device']['name'])}.json"
    if told:
        print("\n".join(["As a record of the course it lacks:", *told[:5], *["..."] * (len(told) > 5)]))
    else:
        print(f"It names neither this machine nor you. To add it to the course: a pull request with it as {file}")


_AGAIN = "import sys; from helpers.bench import command; sys.exit(command.bench(sys.argv[1:]))"


def _without(words: Sequence[str], one: str) -> list[str]:
    return [word for word in words if word != one]

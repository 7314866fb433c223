"""Run stages, steps, gradients and peers under Nsight Compute, once each, for `helpers.bench.counters`.

    python3 -m helpers.bench.study profile_stages FILE [STAGE or PEER ...]
    python3 -m helpers.bench.studies.profile_stages launch FILE    # run by Nsight Compute; writes what was launched

Needs a GPU and Nsight Compute. If stages are named, only their rows are measured again, and FILE keeps the others. A
slow stage gets one head: it has one launch per head, all alike. A mark is launched before each run, so that every
kernel is identified by its place, not by its name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.attention.ladder import LADDER
from helpers.bench import counters, harness, ncu, peers, records
from helpers.bench.cases import Case
from helpers.bench.counters import SHAPE, WIDE, counters_table, stall_metric
from helpers.bench.experiments import EXPERIMENTS, WMMA, Experiment, Step, steps
from helpers.bench.job import Gradients, Job, of_experiment, of_gradients, of_peer, of_roof, of_stage, of_step
from helpers.bench.plan import forward, gradients
from helpers.bench.results import MAIN_PEER
from helpers.bench.run import JobRunner
from helpers.bench.timing import elapsed

recorded = counters.recorded
WIDE_FROM = 4  # from this stage on, also at the other head_dim
SLOW_MS = 10.0  # if it takes longer, one head is enough
ONE_HEAD = ("SDPA efficient", "SDPA math")  # counted at one head too, where the second is faster
TYPES = ("float32", "bfloat16", "float16")  # a stage is counted in the first of these that it takes,
ALL_TYPES = (WMMA,)  # these in all that they take


def cases() -> Iterator[tuple[str, Case]]:
    """Yield each stage of the ladder with its cases, except those that this device cannot run."""
    for head_dim in (SHAPE[3], WIDE):
        for name, stage in forward().items():
            if head_dim == SHAPE[3] or stage.number >= WIDE_FROM:
                takes = [dtype for dtype in TYPES if stage.why_not(head_dim=head_dim, dtype=dtype) is None]
                for dtype in takes if name in ALL_TYPES else takes[:1]:
                    yield name, Case((*SHAPE[:3], head_dim), dtype)


def step_cases() -> Iterator[tuple[Step, Case]]:
    """Yield the steps of all climbs, each at the head_dims and in the types at which it is timed, without a mask.

    The last is the stage itself, which is counted among the stages.
    """
    seen = set()
    for step in steps():
        case = replace(step.case, shape=(*SHAPE[:3], step.case.shape[3]))
        if step.is_last or case.causal or (step.name, case) in seen:  # only one length is counted
            continue
        seen.add((step.name, case))
        if step.stage.why_not(head_dim=case.shape[3], dtype=case.dtype) is None:
            yield step, case


def peer_cases() -> Iterator[tuple[peers.Peer, Case]]:
    """Yield PyTorch's fused attentions, each in the types in which a stage is compared with it, else in bfloat16."""
    for head_dim in (SHAPE[3], WIDE):
        for peer in peers.attentions():
            types = [dtype for dtype in TYPES if MAIN_PEER[dtype] == peer.name]
            for dtype in (types or ["bfloat16"]) if peer.sweep else []:
                yield peer, Case((*SHAPE[:3], head_dim), dtype)


def gradient_cases() -> Iterator[tuple[Gradients, Case]]:
    """Yield the stages that compute gradients, deterministic or not, in the first type that they take."""
    for head_dim in (SHAPE[3], WIDE):
        for way in gradients():
            takes = [dtype for dtype in TYPES if way.stage.why_not(head_dim=head_dim, dtype=dtype) is None]
            for dtype in takes[:1]:
                yield way, Case((*SHAPE[:3], head_dim), dtype, backward=True)


def gradient_peer_cases() -> Iterator[tuple[peers.Peer, Case]]:
    """Yield PyTorch's gradients at the stages' cases."""
    for case in dict.fromkeys(case for _, case in gradient_cases()):
        for peer in peers.TORCH_BACKWARD:
            if peer.name in (MAIN_PEER[case.dtype], "SDPA cuDNN") and peer.why_not(case.dtype, case.causal) is None:
                yield peer, case


def experiment_cases() -> Iterator[tuple[Experiment, Case]]:
    """Yield the experiments whose effect notebooks explain by counters, each with its stage's own sizes."""
    for experiment in EXPERIMENTS:
        if experiment.counted:
            yield experiment, experiment.cases[0]


def _entry(job: Job) -> dict[str, Any]:
    """Return the record's fields of a job before it is counted."""
    name = job.name + " backward" * (job.kind == "backward peer")
    if job.case is None:
        return {"stage": name, "kind": job.kind, **job.row, "flop": round(job.rate(1.0)["tflops"] * 1e9)}
    entry = {"stage": name, "kind": job.kind, "dtype": job.case.dtype, "shape": list(job.case.shape)}
    return {**entry, "flop": job.case.flops, **({"of": job.climb, **job.row} if job.climb else {})}


def _jobs(with_peers: bool) -> Iterator[tuple[Job, Callable[[Case], Job] | None]]:
    """Yield the jobs to count; with a function that makes the same at another case, if one head is enough."""
    for name, case in cases():
        make: Callable[[Case], Job] = functools.partial(of_stage, LADDER[name])
        yield make(case), make
    for step, case in step_cases():
        make = lambda case, step=step: of_step(replace(step, case=case))  # noqa: E731
        yield make(case), None if case.backward else make
    for experiment, case in experiment_cases():
        make = functools.partial(of_experiment, experiment, sizes={})
        yield make(case), make
    yield from ((of_gradients(way, case), None) for way, case in gradient_cases())
    if with_peers:
        yield from ((of_peer(peer, case), None) for peer, case in (*peer_cases(), *gradient_peer_cases()))
        for peer in peers.TORCH:
            if peer.name in ONE_HEAD:
                job = of_peer(peer, Case((1, 1, *SHAPE[2:])))
                yield replace(job, name=f"{peer.name}, one head", kind="experiment"), None
        yield from ((of_roof(roof), None) for roof in peers.TORCH_ROOFS if roof.quantity == "tflops")


def of_stages(entry: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return True if a row belongs to one of these stages, or to its steps or experiments; without stages, True."""
    name = entry["stage"]
    return not names or any(name == stage or name.startswith((f"{stage} ", f"{stage}:")) for stage in names)


def launch_all(target: Path, names: Sequence[str] = ()) -> None:
    """Run each stage and peer once between the profiler's start and stop, after a mark whose grid has its number.

    names: of the stages and peers to run; empty for all.

    Writes {"peers": PyTorch's version or why there are none, "rows": the launches, numbered from 1} as JSON, failures
    with their errors.
    """
    torch, runner, counted = peers.torch_on_gpu(), JobRunner(0.0), ncu.marked()
    launched: list[dict[str, Any]] = []
    for job, at_another_case in _jobs(torch is not None):
        if not of_stages(_entry(job), names):
            continue
        launched.append(_entry(job))
        try:
            with contextlib.ExitStack() as contexts:
                run, _ = runner.launched(job, contexts)
                if at_another_case and elapsed(run) > SLOW_MS:
                    job = at_another_case(replace(job.case, shape=(1, 1, *job.case.shape[2:])))
                    launched[-1] = _entry(job)
                    run, _ = runner.launched(job, contexts)
                counted(len(launched), run)
        except Exception as error:
            launched[-1]["error"] = f"{type(error).__name__}: {error}"
    version = "left out: no PyTorch that sees the GPU" if torch is None else f"PyTorch {torch.__version__}"
    target.write_text(json.dumps({"peers": version, "rows": launched}))


def rows(launched: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the record's rows from the launches and Nsight Compute's CSV, in which a mark precedes each run."""
    table_rows, runs = [], ncu.runs_of(text)
    for number, entry in enumerate(launched, 1):
        seen = runs.get(number, [])
        row: dict[str, Any] = {**entry, "launches": len(seen), "kernels": list(dict.fromkeys(name for name, _ in seen))}
        if not seen:
            row.setdefault("error", "no launch of it was counted")
        row["figures"] = {} if "error" in row else ncu.figures_of([columns for _, columns in seen])
        if stalls := {} if "error" in row else ncu.stalls_of([columns for _, columns in seen]):
            row["stalls"] = stalls
        table_rows.append(row)
    return table_rows


def merged(
    before: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Replace the rows of the named stages by new ones, at the place of the first."""
    others = [row for row in before if not of_stages(row, names)]
    first = next((i for i, row in enumerate(before) if of_stages(row, names)), len(before))
    return [*others[:first], *again, *others[first:]]


def _earlier(target: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the record whose other rows stay; empty without names. Raises Refused if there is none, or no such stage."""
    if not names:
        return {"how": {}, "rows": []}
    record = records.load(target) or {}
    entries = [*record.get("rows", ()), *(_entry(job) for job, _ in _jobs(True))]
    for name in names:
        if not any(of_stages(entry, (name,)) for entry in entries):
            raise records.Refused(f"profile_stages has no stage or peer {name!r}")
    if "how" not in record:
        raise records.Refused(f"{target} has no rows to keep: measure all stages first, without naming any")
    return record


def take(target: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Launch all stages, steps, gradients and peers under Nsight Compute and write the record.

    names: of stages and peers. Their rows are measured, and replace those in target, which keeps its other rows.

    Raises:
        records.Refused: ncu is missing, or target's other rows come from another device, or other software.
        RuntimeError: ncu failed with this message.
    """
    began = time.monotonic()
    old = _earlier(target, names)
    launched, text = ncu.counted("helpers.bench.studies.profile_stages", *names)
    new_rows = rows(launched["rows"], text)
    how = {
        **ncu.about(),
        "python": platform.python_version(),
        "peers": launched["peers"],
        "what": "one run each, caches flushed before each launch, clocks left alone; the stages' output was checked",
        "metrics": ncu.taken(),
        "stalls": "clocks a warp spent in each state per instruction issued: " + stall_metric("*"),
        "seconds": round(time.monotonic() - began, 1),
        "command": " ".join(("python3 -m helpers.bench.study profile_stages FILE", *names)),
    }
    if names:
        if not any("peer" in row.get("kind", "") for row in new_rows):
            how["peers"] = old["how"]["peers"]
        different = [key for key in ("device", "ncu", "peers", "metrics", "stalls") if how[key] != old["how"].get(key)]
        if different:
            raise records.Refused(f"{target}: its rows were measured with another {different[0]}; measure all of them")
        new_rows = merged(old["rows"], new_rows, names)
        how |= {"seconds": old["how"]["seconds"], "command": old["how"]["command"], "again": how["command"]}
    record = {"how": how, "rows": new_rows}
    records.save(target, record)
    return record


def table(record: Mapping[str, Any] | None = None) -> str:
    """Format all rows of a record, by default the committed one, as text."""
    return counters_table(record, head_dim="all", dtype="all")


if __name__ == "__main__":
    _, file, *stages = harness.words_of_process("profile_stages", 2)
    launch_all(Path(file), stages)

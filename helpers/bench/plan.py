"""Plan the measurements of a run: the ladder at the recorded shapes, peers, roofs, other tiles, steps, experiments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helpers.attention.ladder import LADDER, Rung, backward_of, forward_of
from helpers.bench import experiments, host_cost, peers
from helpers.bench.cases import Case, shape_of_tokens
from helpers.bench.job import (
    Gradients,
    Job,
    of_experiment,
    of_gradients,
    of_host,
    of_peer,
    of_roof,
    of_stage,
    of_step,
    why_not,
)
from helpers.bench.results import Record
from helpers.device import ON_GPU

# The cases of the record. Half types and e4m3: the main shapes in each; only bfloat16 for plots of time against N, with
# 16,384 tokens and 2048 columns of all heads together, as in FlashAttention's papers.
SHAPES = ((1, 1, 4096, 64), (1, 1, 16384, 64), (1, 16, 4096, 64), (4, 16, 4096, 64), (4, 16, 4096, 128))
ONE_HEAD_SWEEP = tuple((1, 1, n, 64) for n in (1024, 2048, 8192))
HALF_SWEEP = tuple(shape_of_tokens(n, d) for d in (128, 64) for n in (512, 2048, 4096, 8192, 16384))
QUICK = ((1, 1, 4096, 64), (4, 16, 4096, 64))
ON_CPU = (1, 1, 1024, 64)  # the engine is for understanding, not for speed: one shape suffices
FOR_NUMBA = (1, 1, 64, 16)  # its simulator takes a second for this
# Cases of gradients: a shape for each head dimension in float32; in half types also those of FlashAttention-2's tables,
# and launches of few blocks, long enough that the host's time does not show.
FEW_BLOCKS = tuple((1, heads, 4096, d) for heads in (1, 4) for d in (64, 128))
BACKWARD_SHAPES = {
    "float32": SHAPES[-2:],
    "float16": SHAPES[-2:],
    "bfloat16": (
        *(*SHAPES[-2:], *(shape for shape in HALF_SWEEP if shape[2] >= 2048), *FEW_BLOCKS),
        *((16384 // n, 8, n, 256) for n in (2048, 4096, 16384)),
    ),
}
WITH_ALIBI = tuple(Case((4, 8, 4096, 256), "bfloat16", causal, backward=True) for causal in (False, True))
SIDE_SHARE = 0.5  # of the usual time per measurement: for everything but the ladder, and for the sweep over N


def swept(case: Case) -> bool:
    """Return True if a case is timed only for the plot of time against N."""
    return case.shape in HALF_SWEEP and case.shape not in SHAPES


def share_of(case: Case) -> float:
    """Return the share of the usual time per measurement that the ladder's jobs get at a case."""
    return SIDE_SHARE if swept(case) else 1.0


def cases(*, on_gpu: bool = ON_GPU, quick: bool = False) -> list[Case]:
    """List the cases of a run, each once; cases with the same shape and type are consecutive."""
    if not on_gpu:
        return [Case(ON_CPU, dtype) for dtype in ("float32", "float16", "uint8")]
    chosen = [Case(shape, "float32", causal) for shape in (QUICK if quick else SHAPES) for causal in (False, True)]
    if quick:
        return [
            *chosen,
            *(Case(QUICK[-1], dtype, causal) for dtype in ("bfloat16", "uint8") for causal in (False, True)),
        ]
    chosen += [Case(shape) for shape in ONE_HEAD_SWEEP]
    main = SHAPES[-2:]
    chosen += [Case(SHAPES[2], "bfloat16")]
    for dtype, shapes in (("float16", main), ("bfloat16", (*main, *HALF_SWEEP)), ("uint8", main)):
        chosen += [Case(shape, dtype, causal) for shape in shapes for causal in (False, True)]
    return list(dict.fromkeys(chosen))


def forward() -> dict[str, Rung]:
    """Return the stages that compute attention, by name."""
    return forward_of(LADDER)


def gradients() -> list[Gradients]:
    """List the stages that compute gradients, each also deterministic if it can be."""
    return [
        Gradients(stage, deterministic)
        for stage in backward_of(LADDER).values()
        for deterministic in (False, True)
        if not deterministic or "deterministic" in stage.features
    ]


def plan(
    record: Record, *, quick: bool = False, with_peers: bool = True, only: Sequence[str] = (), on_gpu: bool = ON_GPU
) -> list[Job]:
    """Plan all measurements of a run, sorted by their inputs. Known failures are noted in the record.

    Args:
        only: names of stages; others, with their variants, steps and experiments, are skipped.
    """
    stages = {name: stage for name, stage in forward().items() if not only or name in only}
    torch = peers.torch_on_gpu() if with_peers and on_gpu else None
    others = peers.attentions() if torch else () if on_gpu else (peers.NUMPY,)
    jobs = [of_roof(roof) for roof in peers.TORCH_ROOFS] if torch else []
    if on_gpu and not only and not quick:
        jobs += [of_host(call) for call in host_cost.calls(torch is not None)]
    wanted = cases(on_gpu=on_gpu, quick=quick)
    numba = None if on_gpu or quick or not with_peers else peers.numba_simulator()
    if numba:
        wanted.append(Case(FOR_NUMBA))
    for case in wanted:
        peers_of_case = [*others, numba] if numba and case.shape == FOR_NUMBA else others
        peers_of_case = [peer for peer in peers_of_case if peer.sweep or not swept(case)]
        how = {"compared_with": case, "share": share_of(case)}
        candidates = [(of_stage(stage, case, **how), why_not(stage, case)) for stage in stages.values()]
        candidates += [(of_peer(peer, case, **how), peer.why_not(case.dtype, case.causal)) for peer in peers_of_case]
        for job, why in candidates:
            if why is None:
                jobs.append(job)
            elif on_gpu:
                record.add_note(job.name, job.kind, why, case)
    if on_gpu and not quick:
        more = sorted(_side_jobs(stages), key=lambda job: (job.case.dtype, job.case.shape))
        # The sweep comes last, so that a run that is stopped early has the ladder and what the notebooks quote.
        sweep = [job for job in jobs if job.compared_with and swept(job.case)]
        of_gradients = sorted(_gradient_jobs(only, torch is not None), key=lambda job: (job.case.dtype, job.case.shape))
        jobs = [job for job in jobs if job not in sweep] + more + of_gradients + sweep
    return jobs


def _gradient_jobs(only: Sequence[str], with_peers: bool) -> Iterator[Job]:
    """Yield the backward pass's jobs: stages at the cases that they support, peers, steps, experiments."""
    stages = [each for each in gradients() if not only or each.stage.name in only]
    for dtype, shapes in BACKWARD_SHAPES.items():
        for shape in dict.fromkeys(shapes):
            for causal in (False, True):
                case = Case(shape, dtype, causal, backward=True)
                how = {"compared_with": case, "share": share_of(case)}
                able = [each for each in stages if why_not(each.stage, case) is None]
                best = {each.stage.number: each.stage for each in able}  # of two stages, not the one for long rows
                able = [each for each in able if each.stage is best[each.stage.number]]
                yield from (of_gradients(each, case, **how) for each in able)
                if able and with_peers:
                    others = (peer for peer in peers.TORCH_BACKWARD if peer.why_not(dtype, causal) is None)
                    yield from (of_peer(peer, case, **how) for peer in others)
    by_name = {each.name: each.stage for each in stages}
    aside: dict[str, Any] = {"kind": "backward experiment", "share": SIDE_SHARE}
    for experiment in experiments.GRADIENTS:
        if experiment.stage in by_name:
            what = Gradients(by_name[experiment.stage], False, experiment.name, experiment)
            for case in experiment.cases:
                yield from (of_gradients(what, case, sizes, **aside) for sizes in experiment.sizes)
    for name in ("hopper_backward_wide", "backward_mma"):
        if name in by_name:
            what = Gradients(by_name[name], False, "ALiBi", alibi=True)
            yield from (of_gradients(what, case, **aside) for case in WITH_ALIBI)
    yield from _steps(by_name)
    for step, idea, cases in experiments.DETERMINISTIC_STEPS:
        what = Gradients(step, True, idea)
        if step.name in by_name:
            yield from (of_gradients(what, case, **aside) for case in cases)


def _steps(stages: Mapping[str, Rung]) -> Iterator[Job]:
    steps = (step for step in experiments.steps(stages) if why_not(step.stage, step.case) is None)
    return (of_step(step, share=SIDE_SHARE) for step in steps)


def _side_jobs(stages: Mapping[str, Rung]) -> Iterator[Job]:
    """Yield these stages' jobs besides the ladder: other tile sizes, steps and experiments."""
    for variant in experiments.VARIANTS:
        if variant.stage in stages:
            stage = stages[variant.stage]
            for case in variant.cases:
                how: dict[str, Any] = {"kind": "variant", "name": variant.stage, "share": SIDE_SHARE}
                yield from (of_stage(stage, case, sizes, **how) for sizes in variant.sizes)
    yield from _steps(stages)
    for experiment in experiments.EXPERIMENTS:
        if experiment.stage in stages:
            for case in experiment.cases:
                yield from (of_experiment(experiment, case, sizes, share=SIDE_SHARE) for sizes in experiment.sizes)


def still_to_do(jobs: Sequence[Job], record: Record) -> list[Job]:
    """Return the jobs that have neither a result nor a failure in the record.

    An interrupted run has noted its finished jobs in record.how["done"]. Results of a complete run are recognised by
    name, case and tile sizes. Jobs that were skipped for lack of time are still to do.
    """
    if "done" in record.how:
        done = set(record.how["done"])
        return [job for job in jobs if str(job.key) not in done]
    measured = Counter(_identity(r.kind, r.name, r.case, r.note) for r in record.results)
    refused = Counter((n.kind, n.name, case) for n in record.notes if not n.left for case in n.cases)
    left = []
    for job in jobs:
        result, note = _identity(job.kind, job.name, job.case, job.note()), (job.kind, job.name, str(job.case))
        if measured[result]:
            measured[result] -= 1
        elif refused[note]:
            refused[note] -= 1
        else:
            left.append(job)
    return left


def _identity(kind: str, name: str, case: Case | None, note: str) -> tuple[str, ...]:
    """Return what a job and its result have in common."""
    return (kind, name) if kind in ("roof", "host") else (kind, name, str(case), note)

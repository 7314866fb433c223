"""Which measurements a run has: the ladder at the recorded shapes, peers, roofs, and what stands beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.attention import flash_attention, kernel
from helpers.attention.ladder import LADDER, Rung, backward, backward_of, forward_of
from helpers.bench import experiments, host_cost, peers
from helpers.bench.cases import Case, Inputs, call_of
from helpers.bench.results import Measurement, Record
from helpers.device import ON_GPU, cp

# What the record holds. Half types: the main shapes in both; bfloat16 alone where time is drawn against N, with
# 16384 tokens and 2048 columns of all heads together, as FlashAttention's papers have it.
SHAPES = ((1, 1, 4096, 64), (1, 1, 16384, 64), (1, 16, 4096, 64), (4, 16, 4096, 64), (4, 16, 4096, 128))
ONE_HEAD_SWEEP = tuple((1, 1, n, 64) for n in (1024, 2048, 8192))
HALF_SWEEP = tuple((16384 // n, 2048 // d, n, d) for d in (128, 64) for n in (512, 2048, 4096, 8192, 16384))
QUICK = ((1, 1, 4096, 64), (4, 16, 4096, 64))
ON_CPU = (1, 1, 1024, 64)  # the engine is for understanding, not for speed: one shape says what there is to say
FOR_NUMBA = (1, 1, 64, 16)  # its simulator takes a second for this
# Of the gradients: a shape of each head dimension in float32; in half types also those of FlashAttention-2's tables,
# and launches of few blocks, which are long enough that the host does not show.
FEW_BLOCKS = tuple((1, heads, 4096, d) for heads in (1, 4) for d in (64, 128))
BACKWARD_SHAPES = {
    "float32": SHAPES[-2:],
    "float16": SHAPES[-2:],
    "bfloat16": (
        *(*SHAPES[-2:], *(shape for shape in HALF_SWEEP if shape[2] >= 2048), *FEW_BLOCKS),
        *((16384 // n, 8, n, 256) for n in (2048, 4096, 16384)),
    ),
}
BESIDE = ("variant", "step", "experiment", "backward step", "backward experiment")  # the ladder
SIDE_SHARE = 0.5  # of the time for one measurement: for what stands beside the ladder, and for the sweep over N


@dataclass(frozen=True)
class Gradients:
    """A stage that computes gradients, in one of its two ways. idea: what was changed in it, by sizes or text."""

    stage: Rung
    deterministic: bool
    idea: str = ""
    changed: experiments.Experiment | None = None

    @property
    def name(self) -> str:
        """As the record has it."""
        return self.stage.name + " deterministic" * self.deterministic + f": {self.idea}" * bool(self.idea)

    @property
    def source(self) -> str | None:
        """The text that is compiled in place of the stage's file."""
        changes = self.changed is not None and self.changed.changes
        return self.changed.apply(kernel.source(self.stage.file)) if changes else None

    def prepare(
        self, inputs: Inputs, causal: bool = False, sizes: Mapping[str, int] | None = None
    ) -> tuple[Callable[[], None], tuple[Any, Any, Any]]:
        """What `helpers.attention.ladder.backward.prepare` gives, from the output and the lse of a forward that runs
        now."""
        q, k, v = inputs.device
        models = (a.swapaxes(1, 2) for a in (q, k, v))
        o, lse = flash_attention(*models, causal=causal, return_lse=True)
        return backward.prepare(
            self.stage,
            *(cp.asarray(inputs.do), q, k, v, o.swapaxes(1, 2), lse),
            causal=causal,
            deterministic=self.deterministic,
            source=self.source,
            sizes=sizes,
        )


@dataclass(frozen=True)
class Job:
    """One measurement: what is measured, at which case, with which tile sizes.

    what: a Rung (kinds "stage" and "variant"), Step, Experiment, Peer, Roof or HostCall; of gradients, Gradients
    (kinds "backward" and "backward experiment"), a Step ("backward step") or a Peer ("backward peer").
    """

    kind: str
    name: str
    what: Any
    case: Case | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def stage(self) -> Rung | None:
        """The stage that is launched; None where it is something else."""
        by_kind = {
            "stage": lambda: self.what,
            "variant": lambda: self.what,
            "step": lambda: self.what.stage,
            "experiment": lambda: LADDER[self.what.stage],
            "backward": lambda: self.what.stage,
            "backward experiment": lambda: self.what.stage,
            "backward step": lambda: self.what.stage,
        }
        return by_kind[self.kind]() if self.kind in by_kind else None

    @property
    def gradients(self) -> Gradients | None:
        """The way in which gradients are computed, where that is what the job measures and not a peer."""
        if self.stage is None or not self.case.backward:
            return None
        return self.what if isinstance(self.what, Gradients) else Gradients(self.stage, deterministic=False)

    @property
    def source(self) -> str | None:
        """The text that is compiled in place of the stage's file: an experiment's."""
        return self.what.apply(kernel.source(self.stage.file)) if self.kind == "experiment" else None

    @property
    def share(self) -> float:
        """Of the time for one measurement."""
        beside = self.kind in BESIDE or (self.case is not None and swept(self.case))
        return SIDE_SHARE if beside else 1.0

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for the same measurement in another process."""
        return (self.kind, self.name, str(self.case), str(dict(self.sizes)))

    @property
    def compared(self) -> tuple[Any, ...] | None:
        """The same for all jobs that are compared, and so timed in turns: what computes the same of a case, and the
        steps of a climb."""
        if self.kind in ("stage", "peer", "backward", "backward peer"):
            return self.case.backward, self.case
        return (self.what.of, self.case) if isinstance(self.what, experiments.Step) else None


def swept(case: Case) -> bool:
    """Whether a case is timed only to draw time against N."""
    return case.shape in HALF_SWEEP and case.shape not in SHAPES


def cases(*, on_gpu: bool = ON_GPU, quick: bool = False) -> list[Case]:
    """The cases of a run, each once, those of a shape and a type together."""
    if not on_gpu:
        return [Case(ON_CPU, dtype) for dtype in ("float32", "float16")]
    chosen = [Case(shape, "float32", causal) for shape in (QUICK if quick else SHAPES) for causal in (False, True)]
    if quick:
        return [*chosen, *(Case(QUICK[-1], "bfloat16", causal) for causal in (False, True))]
    chosen += [Case(shape) for shape in ONE_HEAD_SWEEP]
    main = SHAPES[-2:]
    chosen += [Case(SHAPES[2], "bfloat16")]
    for dtype, shapes in (("float16", main), ("bfloat16", (*main, *HALF_SWEEP))):
        chosen += [Case(shape, dtype, causal) for shape in shapes for causal in (False, True)]
    return list(dict.fromkeys(chosen))


def forward() -> dict[str, Rung]:
    """The stages that compute attention, by name: what the cases, the peers and the checks are of."""
    return forward_of(LADDER)


def gradients() -> list[Gradients]:
    """The stages that compute gradients, each in the ways that it has."""
    return [
        Gradients(stage, deterministic)
        for stage in backward_of(LADDER).values()
        for deterministic in (False, True)
        if not deterministic or "deterministic" in stage.features
    ]


def why_not(stage: Rung, case: Case) -> str | None:
    """Why a stage cannot do a case on this device, or None."""
    return stage.why_not(head_dim=case.shape[3], dtype=case.dtype, causal=case.causal)


def plan(
    record: Record, *, quick: bool = False, with_peers: bool = True, only: Sequence[str] = (), on_gpu: bool = ON_GPU
) -> list[Job]:
    """All measurements of a run, sorted by their inputs. What is known not to work is noted in the record.

    Args:
        only: names of stages; the other stages, with their variants, steps and experiments, are left out.
    """
    stages = {name: stage for name, stage in forward().items() if not only or name in only}
    torch = peers.torch_on_gpu() if with_peers and on_gpu else None
    others = peers.beside_torch() if torch else () if on_gpu else (peers.NUMPY,)
    jobs = [Job("roof", roof.name, roof) for roof in peers.TORCH_ROOFS] if torch else []
    if on_gpu and not only and not quick:
        jobs += [Job("host", call.name, call, host_cost.CASE) for call in host_cost.calls(torch is not None)]
    wanted = cases(on_gpu=on_gpu, quick=quick)
    numba = None if on_gpu or quick or not with_peers else peers.numba_simulator()
    if numba:
        wanted.append(Case(FOR_NUMBA))
    for case in wanted:
        candidates = [("stage", name, stage, why_not(stage, case)) for name, stage in stages.items()]
        peers_of_case = [*others, numba] if numba and case.shape == FOR_NUMBA else others
        peers_of_case = [peer for peer in peers_of_case if peer.sweep or not swept(case)]
        candidates += [("peer", peer.name, peer, peer.why_not(case.dtype, case.causal)) for peer in peers_of_case]
        for kind, name, what, why in candidates:
            if why is None:
                jobs.append(Job(kind, name, what, case))
            elif on_gpu:
                record.add_note(name, kind, why, case)
    if on_gpu and not quick:
        more = sorted(_beside(stages), key=lambda job: (job.case.dtype, job.case.shape))
        # The sweep comes last: a run that is stopped early has the ladder and what the notebooks quote.
        sweep = [job for job in jobs if job.kind in ("stage", "peer") and swept(job.case)]
        of_gradients = sorted(_of_gradients(only, torch is not None), key=lambda job: (job.case.dtype, job.case.shape))
        jobs = [job for job in jobs if job not in sweep] + more + of_gradients + sweep
    return jobs


def _of_gradients(only: Sequence[str], with_peers: bool) -> Iterator[Job]:
    """What is measured of the backward: the cases that a stage can do, and peers beside them."""
    stages = [each for each in gradients() if not only or each.stage.name in only]
    for dtype, shapes in BACKWARD_SHAPES.items():
        for shape in dict.fromkeys(shapes):
            for causal in (False, True):
                case = Case(shape, dtype, causal, backward=True)
                able = [each for each in stages if why_not(each.stage, case) is None]
                best = {each.stage.number: each.stage for each in able}  # of a rung with two: not the one for long rows
                able = [each for each in able if each.stage is best[each.stage.number]]
                yield from (Job("backward", each.name, each, case) for each in able)
                if able and with_peers:
                    others = (peer for peer in peers.TORCH_BACKWARD if peer.why_not(dtype, causal) is None)
                    yield from (Job("backward peer", peer.name, peer, case) for peer in others)
    by_name = {each.name: each.stage for each in stages}
    for experiment in experiments.GRADIENTS:
        if experiment.stage in by_name:
            what = Gradients(by_name[experiment.stage], False, experiment.name, experiment)
            for case in experiment.cases:
                yield from (Job("backward experiment", what.name, what, case, sizes) for sizes in experiment.sizes)
    for step in experiments.steps(by_name):
        if why_not(step.stage, step.case) is None:
            yield Job("backward step", step.name, step, step.case)
    for step, idea, cases in experiments.DETERMINISTIC_STEPS:
        what = Gradients(step, True, idea)
        if step.name in by_name:
            yield from (Job("backward experiment", what.name, what, case) for case in cases)


def _beside(stages: Mapping[str, Rung]) -> Iterator[Job]:
    """What is measured beside these stages."""
    for variant in experiments.VARIANTS:
        if variant.stage in stages:
            for case in variant.cases:
                yield from (Job("variant", variant.stage, stages[variant.stage], case, s) for s in variant.sizes)
    for step in experiments.steps(stages):
        if why_not(step.stage, step.case) is None:
            yield Job("step", step.name, step, step.case)
    for experiment in experiments.EXPERIMENTS:
        if experiment.stage in stages:
            name = f"{experiment.stage}: {experiment.name}"
            for case in experiment.cases:
                yield from (Job("experiment", name, experiment, case, s) for s in experiment.sizes)


def tile_sizes(stage: Rung, case: Case) -> dict[str, int]:
    """The -D options that a stage chooses for a case, whose arrays are contiguous."""
    batch, heads, rows, head_dim = case.shape
    usual = stage.defines_for(head_dim, rows, batch * heads, uneven=case.causal)
    return {**usual, **stage.variant(call_of(case))}


def tiles_text(job: Job) -> str:
    """The sizes that a job's stage is compiled with, as "BLOCK_M=64 BLOCK_N=16"; empty where it has no stage."""
    if job.stage is None:
        return ""
    defines = {**tile_sizes(job.stage, job.case), **job.sizes}
    return " ".join(f"{name}={value}" for name, value in defines.items() if name != "HEAD_DIM")


def still_to_do(jobs: Sequence[Job], record: Record) -> list[Job]:
    """The jobs that the record has no result of, and no failure.

    A run that was stopped has noted in record.how["done"] what it did. Of one that came to its end, results tell: by
    name, case and tile sizes. What there was no time for is to be done.
    """
    if "done" in record.how:
        done = set(record.how["done"])
        return [job for job in jobs if str(job.key) not in done]
    measured = Counter(_identity(r.kind, r.name, _case_of(r), r) for r in record.results)
    refused = Counter((n.kind, n.name, case) for n in record.notes if not n.left for case in n.cases)
    left = []
    for job in jobs:
        result, note = _identity(job.kind, job.name, job.case, job), (job.kind, job.name, str(job.case))
        if measured[result]:
            measured[result] -= 1
        elif refused[note]:
            refused[note] -= 1
        else:
            left.append(job)
    return left


def _case_of(r: Measurement) -> Case:
    return Case(tuple(r.shape), r.dtype, r.causal, backward=r.kind.startswith("backward"))


def _identity(kind: str, name: str, case: Case | None, of: Job | Measurement) -> tuple[str, ...]:
    """The same for a job and for its result."""
    if kind in ("roof", "host"):
        return (kind, name)
    return (kind, name, str(case), tiles_text(of) if isinstance(of, Job) else of.note)

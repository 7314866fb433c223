"""A job: one measurement of a run, as closures. The runner need not know what it launches."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helpers.attention import flash_attention, kernel, reference
from helpers.attention.ladder import LADDER, Rung, backward
from helpers.attention.ladder.steps import BASES, BEFORE
from helpers.bench import experiments, host_cost, peers
from helpers.bench.cases import Case, Inputs, Sample, alibi_slopes, call_of
from helpers.device import ON_GPU, cp
from helpers.engine.cuda_source.signatures import dtype_of

Launch = Callable[[], Any]
Check = Callable[[], dict[str, Any]]


class WrongOutput(AssertionError):
    """A job's output is wrong, so it is not timed."""


@dataclass(frozen=True)
class Job:
    """One measurement.

    Args:
        name, kind: as in the record.
        case: what is computed; None for a roof.
        make: from the inputs of the case (None without one), a context that gives a launch and a check. The check runs
            the launch for the first time, and returns the record's fields about its output, or raises WrongOutput.
        compared_with: equal for all jobs that are timed in turns; None for a job that is timed alone.
        base: returns the job that a climb begins at. It is timed with the others and not recorded.
        climb: the stage that a climb ends at, if the job is a step of it.
        is_peer: whether it is timed to be compared with the stages.
        sizes: tile sizes in place of the stage's own.
        note: returns the row's note.
        row: further fields of the record's row.
        rate: from milliseconds, the row's rate.
        compile: compiles what it launches.
        share: share of the usual time for one measurement.
        on_host: whether to measure the host's time, not the device's.
        warm: whether the check has launched it.
    """

    name: str
    kind: str
    case: Case | None
    make: Callable[[Any], AbstractContextManager[tuple[Launch, Check]]]
    compared_with: Hashable = None
    base: Callable[[], Job | None] = lambda: None
    climb: str = ""
    is_peer: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    note: Callable[[], str] = str
    row: Mapping[str, Any] = field(default_factory=dict)
    rate: Callable[[float], Mapping[str, float]] = lambda ms: {}
    compile: Callable[[], object] | None = None
    share: float = 1.0
    on_host: bool = False
    warm: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for the same measurement in another process."""
        return (self.kind, self.name, str(self.case), str(dict(self.sizes)))


# ---- checks


def require_accuracy(error: float, tolerance: float) -> dict[str, Any]:
    """Return a check's fields of the record. Raises WrongOutput."""
    if not error <= tolerance:
        raise WrongOutput(f"max error {error:.1e} > {tolerance:.1e}; not timed")
    return {"max_error": error, "tolerance": tolerance}


def _check_output(case: Case, error_factor: float, inputs: Inputs, launch: Launch) -> dict[str, Any]:
    """Launch once: compare the output, and count the extra memory."""
    before = _allocated_bytes()
    o = launch()
    extra = None if before is None else _allocated_bytes(peak=True) - before - o.nbytes
    sample = inputs.sample(case.causal)
    return {**require_accuracy(sample.error(o), sample.tolerance * error_factor), "extra_bytes": extra}


def _check_gradients(case: Case, inputs: Inputs, launch: Launch, *, alibi: bool = False) -> dict[str, Any]:
    return require_accuracy(*inputs.gradient_sample(case.causal, alibi=alibi).error(launch()))


def _count_wrong(experiment: experiments.Experiment, case: Case, inputs: Inputs, launch: Launch) -> dict[str, Any]:
    """Launch a changed stage; count the launches with a wrong output."""
    sample: Sample = inputs.sample(case.causal)
    whole = None
    if experiment.launches > 1:  # a race may show in a single row
        whole = cp.asarray(reference.attention(*inputs.host, causal=case.causal))
    wrong, worst = 0, 0.0
    for _ in range(experiment.launches):
        o = launch()
        error = sample.error(o) if whole is None else float(abs(o - whole).max())
        wrong += not error <= sample.tolerance
        worst = max(worst, error) if error == error else float("nan")
        o[...] = cp.nan
    counts = {"wrong_launches": wrong, "checked_launches": experiment.launches}
    return {**counts, "max_error": worst, "tolerance": sample.tolerance}


def torch_cuda() -> Any | None:
    """Return PyTorch's module `cuda`, if PyTorch is imported and there is a GPU."""
    return sys.modules["torch"].cuda if ON_GPU and "torch" in sys.modules else None


def _allocated_bytes(*, peak: bool = False) -> int | None:
    """Count the bytes of the GPU's memory that arrays hold now. None on the CPU.

    peak: PyTorch's maximum since the last call.
    """
    if not ON_GPU:
        return None
    cuda = torch_cuda()
    total = cp.get_default_memory_pool().used_bytes()
    if cuda:
        total += cuda.max_memory_allocated() if peak else cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
    return total


# ---- stages and their variants


def tile_sizes(stage: Rung, case: Case) -> dict[str, int]:
    """Return the -D options that a stage chooses for a case with contiguous arrays."""
    batch, heads, rows, head_dim = case.shape
    usual = stage.defines_for(head_dim, rows, batch * heads, uneven=case.causal)
    return {**usual, **stage.variant(call_of(case))}


def _tiles_text(stage: Rung, case: Case, sizes: Mapping[str, int]) -> str:
    """Format the tile sizes that a stage is compiled with, as "BLOCK_M=64 BLOCK_N=16"."""
    defines = {**tile_sizes(stage, case), **sizes}
    return " ".join(f"{name}={value}" for name, value in defines.items() if name != "HEAD_DIM")


def of_stage(
    stage: Rung,
    case: Case,
    sizes: Mapping[str, int] | None = None,
    *,
    kind: str = "stage",
    name: str = "",
    text: Callable[[], str | None] = lambda: None,
    check: Callable[[Inputs, Launch], dict[str, Any]] | None = None,
    **more: Any,
) -> Job:
    """Make the job of a stage that computes attention.

    Args:
        text: returns the text to compile instead of the stage's file.
        check: replaces the comparison of one output.
        more: further fields of the job.
    """
    sizes = sizes or {}
    check = check or functools.partial(_check_output, case, stage.error_factor)

    @contextlib.contextmanager
    def make(inputs: Inputs) -> Iterator[tuple[Launch, Check]]:
        """Make the launch. The first call prepares it, so that no memory beyond q, k and v is allocated before."""
        source, arrays, prepared = text(), inputs.device, []

        def launch() -> Any:
            if not prepared:
                prepared.append(stage.prepare(*arrays, causal=case.causal, source=source, sizes=sizes or None))
            run, o = prepared[0]
            run()
            return o

        yield launch, lambda: check(inputs, launch)

    def compile_it() -> None:
        one = cp.zeros((1, 1, 1, case.shape[3]), dtype=dtype_of(case.dtype))
        stage.prepare(one, one, one, source=text(), sizes={**tile_sizes(stage, case), **sizes})

    return Job(
        name or stage.name, kind, case, make, sizes=sizes, compile=compile_it, **_of_case(case, stage, sizes), **more
    )


def _of_case(case: Case, stage: Rung | None = None, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the fields of a job that follow from its case."""
    note = functools.partial(_tiles_text, stage, case, sizes or {}) if stage else str
    return {"note": note, "rate": lambda ms: {"tflops": case.flops / ms / 1e9}}


def of_experiment(experiment: experiments.Experiment, case: Case, sizes: Mapping[str, int], **more: Any) -> Job:
    """Make the job of a stage with a changed text; its output may be wrong."""
    stage = LADDER[experiment.stage]
    return of_stage(
        stage,
        case,
        sizes,
        kind="experiment",
        name=f"{experiment.stage}: {experiment.name}",
        text=lambda: experiment.apply(kernel.source(stage.file)),
        check=functools.partial(_count_wrong, experiment, case),
        **more,
    )


@dataclass(frozen=True)
class Gradients:
    """A stage that computes gradients, deterministic or not.

    Args:
        idea: what was changed, by sizes or text. alibi: the scores have ALiBi's bias.
    """

    stage: Rung
    deterministic: bool
    idea: str = ""
    changed: experiments.Experiment | None = None
    alibi: bool = False

    @property
    def name(self) -> str:
        """Its name in the record."""
        return self.stage.name + " deterministic" * self.deterministic + f": {self.idea}" * bool(self.idea)

    @property
    def source(self) -> str | None:
        """The text to compile instead of the stage's file."""
        changes = self.changed is not None and self.changed.changes
        return self.changed.apply(kernel.source(self.stage.file)) if changes else None

    def prepare(
        self, inputs: Inputs, causal: bool = False, sizes: Mapping[str, int] | None = None
    ) -> tuple[Callable[[], None], tuple[Any, Any, Any]]:
        """Run the forward pass now, and return what `helpers.attention.ladder.backward.prepare` makes of its output."""
        q, k, v = inputs.device
        models = (a.swapaxes(1, 2) for a in (q, k, v))
        slopes = cp.asarray(alibi_slopes(q.shape[1]).astype(np.float32)) if self.alibi else None
        o, lse = flash_attention(*models, causal=causal, return_lse=True, alibi_slopes=slopes)
        return backward.prepare(
            self.stage,
            *(cp.asarray(inputs.do), q, k, v, o.swapaxes(1, 2), lse),
            causal=causal,
            deterministic=self.deterministic,
            source=self.source,
            sizes=sizes,
            alibi_slopes=slopes,
        )


def of_gradients(
    way: Gradients,
    case: Case,
    sizes: Mapping[str, int] | None = None,
    *,
    kind: str = "backward",
    name: str = "",
    **more: Any,
) -> Job:
    """Make the job of a stage's gradients only: the forward pass that they need runs before."""
    sizes = sizes or {}

    @contextlib.contextmanager
    def make(inputs: Inputs) -> Iterator[tuple[Launch, Check]]:
        run, arrays = way.prepare(inputs, case.causal, sizes or None)

        def launch() -> Any:
            run()
            return arrays

        yield launch, lambda: _check_gradients(case, inputs, launch, alibi=way.alibi)

    def compile_it() -> None:
        one = cp.zeros((1, 1, 1, case.shape[3]), dtype=dtype_of(case.dtype))
        lse = cp.zeros((1, 1, 1), dtype=cp.float32)
        how: dict[str, Any] = {"deterministic": way.deterministic, "source": way.source}
        if way.alibi:
            how["alibi_slopes"] = cp.zeros((1,), dtype=cp.float32)
        all_sizes = {**tile_sizes(way.stage, case), **sizes}
        backward.prepare(way.stage, one, one, one, one, one, lse, **how, sizes=all_sizes)

    of_case = _of_case(case, way.stage, sizes)
    return Job(name or way.name, kind, case, make, sizes=sizes, compile=compile_it, **of_case, **more)


def of_step(step: experiments.Step, **more: Any) -> Job:
    """Make the job that times one step of a climb."""
    more |= {"row": {"step": step.number, "idea": step.idea}, "compared_with": (step.of, step.case)}
    more |= {"climb": step.of, "base": functools.partial(_base, step), "name": step.name}
    return _of_stage_in_direction(step, step.case, **more)


def _of_stage_in_direction(step: experiments.Step, case: Case, **more: Any) -> Job:
    if case.backward:
        return of_gradients(Gradients(step.stage, deterministic=False), case, kind="backward step", **more)
    return of_stage(step.stage, case, kind="step", **more)


def _base(step: experiments.Step) -> Job | None:
    """Make the job that a step's climb begins at, for the step's case; None if that computes something else."""
    file = BEFORE.get(step.of)
    known = (*BASES.values(), *LADDER.values())
    stage = next((stage for stage in known if stage.file == file and stage.direction == step.stage.direction), None)
    if stage is None or why_not(stage, step.case) is not None:
        return None
    begin = experiments.Step(step.of, 0, stage, step.case)
    return _of_stage_in_direction(begin, step.case, name=stage.name)


def why_not(stage: Rung, case: Case) -> str | None:
    """Return why a stage cannot do a case on this device, or None."""
    return stage.why_not(head_dim=case.shape[3], dtype=case.dtype, causal=case.causal)


# ---- peers, roofs, host time


def of_peer(peer: peers.Peer, case: Case, **more: Any) -> Job:
    """Make the job of a peer's attention, or of its gradients."""

    @contextlib.contextmanager
    def make(inputs: Inputs) -> Iterator[tuple[Launch, Check]]:
        with peer.ready(inputs, case.causal) as launch:
            check = _check_gradients if case.backward else functools.partial(_check_output, error_factor=1.0)
            yield launch, lambda: check(case=case, inputs=inputs, launch=launch)

    kind = "backward peer" if case.backward else "peer"
    return Job(peer.name, kind, case, make, is_peer=True, **_of_case(case), **more)


def of_roof(roof: peers.Roof) -> Job:
    """Make the job of a roof."""

    @contextlib.contextmanager
    def make(_: None) -> Iterator[tuple[Launch, Check]]:
        yield roof.ready(), dict

    row = {"shape": list(roof.shape), "dtype": roof.dtype}
    per_ms = 1e9 if roof.quantity == "tflops" else 1e6
    rate = lambda ms: {roof.quantity: roof.work / ms / per_ms}  # noqa: E731
    return Job(roof.name, "roof", None, make, note=lambda: roof.note, row=row, rate=rate, warm=False)


def of_host(call: host_cost.HostCall) -> Job:
    """Make the job that measures a call's time on the host."""

    @contextlib.contextmanager
    def make(inputs: Inputs) -> Iterator[tuple[Launch, Check]]:
        with call.ready(inputs) as (launch, output):
            sample = inputs.sample(host_cost.CASE.causal)
            yield launch, lambda: require_accuracy(sample.error(output(launch())), sample.tolerance)

    return Job(call.name, "host", host_cost.CASE, make, note=lambda: call.note, on_host=True)

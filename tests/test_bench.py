"""The bench: what it counts and checks, what it does when something fails; README's table.

Clocks, stages and peers are fakes where a real one could not show a mistake.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.attention import kernel, reference
from helpers.attention.ladder import BACKWARD, FORWARD, LADDER, limits
from helpers.attention.ladder.steps import CLIMBS, LAST_IDEAS, by_number
from helpers.bench import (
    cases,
    command,
    experiments,
    harness,
    host_cost,
    peers,
    plan,
    readme,
    run,
    timing,
)
from helpers.bench.cases import Case, Inputs, alibi_slopes
from helpers.bench.job import (
    Gradients,
    WrongOutput,
    of_experiment,
    of_gradients,
    of_host,
    of_peer,
    of_stage,
    of_step,
    tile_sizes,
    why_not,
)
from helpers.bench.results import Measurement, Note, Record, results_table
from helpers.bench.run import JobRunner
from helpers.device import ON_GPU, cp
from helpers.lesson import show

# 12 takes ten seconds to compile, and has its own tests.
QUICK = {name: stage for name, stage in FORWARD.items() if stage.unavailable() is None and not stage.slow_to_compile}

SMALL = (2, 3, 48, 16)


# ------------------------------------------------------------------------------------------------------ the clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], list[float]]:
    """clock(times): launches take these milliseconds in turn, the last one repeatedly; returns the list of launches."""

    def start(times: list[float]) -> list[float]:
        now, taken = [0.0], []
        script = itertools.chain(times, itertools.repeat(times[-1]))

        def elapsed(launch: Callable[[], object], flush: Any = None, times: int = 1) -> float:
            launch()
            taken.append(next(script))
            now[0] += taken[-1] / 1e3
            return taken[-1]

        monkeypatch.setattr(timing, "elapsed", elapsed)
        monkeypatch.setattr(timing, "_flushes", lambda launch, flush: 1)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
        return taken

    return start


def test_measure_takes_the_median_and_the_spread(clock: Any) -> None:
    taken = clock([9.0, 5.0, 1.0, 7.0])
    calls: list[int] = []
    t = timing.measure(lambda: calls.append(1), budget_s=0.0)
    assert (t.ms, t.ms_min, t.ms_max, t.launches) == (5.0, 1.0, 7.0, 3), "9.0 was to warm up"
    assert len(taken) == 4 and len(calls) == 5
    clock([2.0, 4.0, 2.0, 2.0, 2.0, 100.0])
    assert timing.measure(lambda: None, budget_s=0.02).ms == 2.0, "not the mean"


@pytest.mark.parametrize(
    ("ms", "budget_s", "most", "launches"), [(10.0, 0.15, 200, 15), (1.0, 9.0, 40, 40), (400.0, 0.1, 9, 3)]
)
def test_measure_keeps_its_budget(clock: Any, ms: float, budget_s: float, most: int, launches: int) -> None:
    clock([ms])
    assert timing.measure(lambda: None, budget_s=budget_s, most=most).launches == pytest.approx(launches, abs=1)


def test_a_slow_launch_is_timed_once(clock: Any) -> None:
    for warm, calls in ((True, 1), (False, 2)):
        taken: list[int] = []
        clock([1500.0, 2.0])
        t = timing.measure(lambda: taken.append(1), warm=warm)  # noqa: B023
        assert (t.ms, t.launches, len(taken)) == (1500.0, 1, calls)


def test_flushes_outlast_pythons_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=0.0005)
    monkeypatch.setattr(timing, "elapsed", lambda launch: 0.1)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert timing._flushes(lambda: None, None) == 9  # 0.5 ms to launch, times 1.5, 0.1 ms per flush, and one more


@pytest.mark.skipif(not ON_GPU, reason="the GPU's own clock")
def test_events_do_not_time_python() -> None:
    """A kernel of some microseconds takes no longer if Python needs a millisecond to launch it."""
    from time import perf_counter, sleep

    array = cp.ones(1 << 20, dtype=cp.float32)

    def late() -> None:
        began = perf_counter()
        sleep(0.0005)
        array.fill(1)
        assert perf_counter() - began > 0.0005

    assert timing.measure(late, budget_s=0.1).ms < 0.1


def test_sensors_are_the_medians_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    sensors = timing.Sensors()
    for line in ("2619, 70.5, 30", "2619, 600, 40", "2619, [N/A], 41", "2619, 500, 42"):
        sensors.parse(line)
    assert sensors.between(1, 2) == {"memory_mhz": 2619, "watts": 600, "celsius": 40.5}
    assert sensors.between(10, 20) == {}
    with timing.Sensors() as nothing:
        pass
    assert ON_GPU or nothing.samples == []


def test_a_kernel_reads_the_clock() -> None:
    """The engine's clock counts nanoseconds."""
    mhz = timing.sm_mhz()
    assert 100 < mhz < 4000 if ON_GPU else mhz == pytest.approx(1000, rel=0.05)


def test_one_slow_round_does_not_move_the_range() -> None:
    speeds = timing.speeds([1.0] * 8, [1.10, 1.11, 1.11, 1.11, 1.11, 1.11, 1.12, 25.26])
    assert harness.speed_text(speeds) == "1.11× (1.11 to 1.11)" and speeds["speed_max"] == 25.26
    old = {"speed": 1.11, "speed_min": 1.10, "speed_max": 25.26}
    assert harness.speed_text(old) == "1.11× (1.10 to 25.26)", "a record without quartiles"
    assert timing.quartiles([2.0]) == (2.0, 2.0, 2.0)


# ---------------------------------------------------------------------------------------- counts and checks


def test_flops_are_two_matrix_products() -> None:
    assert cases.flops(3, 5, 7) == 2 * 3 * 5 * 7 + 2 * 3 * 5 * 7
    assert cases.flops(8, 8, 4, causal=True) == cases.flops(8, 8, 4) / 2
    assert Case((2, 3, 10, 4)).flops == 6 * cases.flops(10, 10, 4)
    assert [Case((2, 3, 10, 4), dtype).bytes for dtype in cases.TYPES] == [4 * 960, 2 * 960, 2 * 960]


def test_a_sample_sees_a_wrong_row_and_nan() -> None:
    inputs = Inputs((1, 1, 40, 4))
    o = reference.attention(*inputs.host)
    assert inputs.sample().error(cp.asarray(o)) < 1e-14
    o[0, 0, 17] += 0.5
    assert inputs.sample().error(cp.asarray(o)) == pytest.approx(0.5)
    o[0, 0, 17, 0] = np.nan
    assert np.isnan(inputs.sample().error(cp.asarray(o)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", cases.TYPES)
def test_the_sample_is_attention_and_sees_what_is_wrong(dtype: str, causal: bool) -> None:
    inputs = Inputs(SMALL, dtype)
    sample = inputs.sample(causal)
    right = reference.attention(*inputs.host, causal=causal)
    heads = right.reshape(6, *SMALL[2:])
    assert np.allclose(heads[sample.heads][:, sample.rows], sample.expected, atol=1e-14)
    assert {0, 5} <= set(sample.heads.tolist()) and {0, 47} <= set(sample.rows.tolist())
    assert sample.error(right) < 1e-14
    # An output rounded to the type passes; one with a slightly larger error than that rounding does not.
    assert sample.error(right.astype(cases.TYPES[dtype])) <= sample.tolerance
    assert sample.error(right + 1.1 * sample.tolerance) > sample.tolerance
    assert sample.tolerance <= {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    wrong = {
        "the other mask": reference.attention(*inputs.host, causal=not causal),
        "heads exchanged": right[:, ::-1],
        "batches exchanged": right[::-1],
        "a key forgotten": reference.attention(*(a[..., : (None, -1, -1)[i], :] for i, a in enumerate(inputs.host))),
        "another scale": reference.attention(*inputs.host, causal=causal, softmax_scale=1 / 16),
    }
    for what, o in wrong.items():
        assert not sample.error(o) <= sample.tolerance, what
    last = right.copy()
    last[-1, -1, -1, -1] = np.nan
    assert np.isnan(sample.error(last))


def test_a_sample_of_a_large_output_is_small() -> None:
    sample = Inputs((4, 16, 300, 8)).sample()
    assert sample.expected.shape == (4, 64, 8) and sample.heads.tolist()[::3] == [0, 63]
    assert sample.rows[0] == 0 and sample.rows[-1] == 299 and len(set(sample.rows.tolist())) == 64


def test_tensors_are_read_as_float32() -> None:
    class Tensor:
        def float(self) -> Any:
            return self

        cpu = float

        def numpy(self) -> np.ndarray:
            return np.ones(3, np.float32)

    assert cases.as_numpy(Tensor()).dtype == np.float32


# ------------------------------------------------------------------------------------------------------ the plan


class Fake:
    """A stage whose kernel is written in NumPy."""

    idea, number, max_head_dim, direction, error_factor = "an idea", 0, 128, "forward", 1.0

    def __init__(
        self,
        name: str,
        dtypes: tuple[str, ...] = ("float32",),
        *,
        causal: bool = True,
        act: Any = None,
        file: str = "01_naive.cu",
    ) -> None:
        self.name, self.dtypes, self.causal, self.act, self.file = name, dtypes, causal, act, file

    def defines_for(self, head_dim: int, rows: int, heads: int, *, uneven: bool = False) -> dict[str, int]:
        return {"HEAD_DIM": head_dim, "BLOCK_M": head_dim}

    def variant(self, call: Any) -> dict[str, int]:
        return {}

    def why_not(self, *, head_dim: int, dtype: str, causal: bool = False) -> str | None:
        if dtype not in self.dtypes:
            return f"no {dtype}"
        return "no causal" if causal and not self.causal else None

    def prepare(self, q: Any, k: Any, v: Any, *, causal: bool = False, source: Any = None, sizes: Any = None) -> Any:
        o = cp.full(q.shape, cp.nan, dtype=q.dtype)

        def run() -> None:
            right = reference.attention(*(cp.asnumpy(a) for a in (q, k, v)), causal=causal).astype(o.dtype)
            o[...] = cp.asarray(right)
            if self.act:
                self.act(o)

        return run, o


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """fakes(stage, ...): the ladder consists of these, at two small cases, without peers, variants or experiments."""

    def use(*stages: Fake) -> None:
        monkeypatch.setattr(plan, "LADDER", {stage.name: stage for stage in stages})
        monkeypatch.setattr(plan, "cases", lambda **_: [Case(SMALL), Case(SMALL, "float32", True)])
        monkeypatch.setattr(command, "BUDGET_S", 0.001)
        monkeypatch.setattr(experiments, "VARIANTS", ())
        monkeypatch.setattr(experiments, "EXPERIMENTS", ())
        monkeypatch.setattr(experiments, "CLIMBS", {})
        monkeypatch.setattr(host_cost, "calls", lambda with_torch: ())
        monkeypatch.setattr(peers, "torch_on_gpu", lambda: None)
        monkeypatch.setattr(peers, "numba_simulator", lambda: None)

    return use


def test_cases_of_the_record() -> None:
    found = plan.cases(on_gpu=True)
    assert len(found) == len(set(found))
    for shape, causal in itertools.product(
        ((1, 1, 16384, 64), (1, 1, 4096, 64), (1, 16, 4096, 64), (4, 16, 4096, 64), (4, 16, 4096, 128)), (False, True)
    ):
        assert Case(shape, "float32", causal) in found
    for head_dim, dtype, causal in itertools.product((64, 128), ("float16", "bfloat16"), (False, True)):
        assert Case((4, 16, 4096, head_dim), dtype, causal) in found
    sweep = {c.shape for c in found if c.dtype == "bfloat16" and c.shape[0] * c.shape[2] == 16384}
    for head_dim, n in itertools.product((64, 128), (512, 2048, 4096, 8192, 16384)):
        assert (16384 // n, 2048 // head_dim, n, head_dim) in sweep
    runs = [key for key, _ in itertools.groupby(found, key=lambda c: (c.shape, c.dtype))]
    assert len(runs) == len(set(runs)), "inputs are made once"
    assert set(plan.cases(on_gpu=True, quick=True)) < set(found) and len(plan.cases(on_gpu=False)) == 3


def test_plan_notes_what_cannot_be_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Fake("plain", causal=False), Fake("half", ("bfloat16", "float16"))
    monkeypatch.setattr(plan, "LADDER", {stage.name: stage for stage in stages})
    monkeypatch.setattr(peers, "torch_on_gpu", lambda: "PyTorch")
    record = Record({}, {})
    jobs = plan.plan(record, on_gpu=True)
    assert len({job.key for job in jobs}) == len(jobs)
    assert {job.case.dtype for job in jobs if job.name == "plain"} == {"float32"}
    assert not any(job.case.causal for job in jobs if job.name == "plain")
    assert {(job.case.dtype, job.case.causal) for job in jobs if job.name == "half"} == {
        *itertools.product(("float16", "bfloat16"), (False, True)),
    }
    assert [job.name for job in jobs[:4]] == ["matmul", "copy", "matmul float16", "matmul bfloat16"]
    flash = {job.case.dtype for job in jobs if job.name == "SDPA flash"}
    assert flash == {"float16", "bfloat16"}, "FlashAttention-2 has no float32"
    why = {(note.name, note.why) for note in record.notes}
    assert {("plain", "no causal"), ("plain", "no bfloat16"), ("half", "no float32")} <= why
    assert sum(len(n.cases) for n in record.notes if n.name == "plain") + sum(j.name == "plain" for j in jobs) == len(
        plan.cases(on_gpu=True)
    )
    only = plan.plan(Record({}, {}), on_gpu=True, only=["half"], with_peers=False)
    assert {job.name for job in only} == {"half"}


def test_variants_and_experiments_are_planned_on_a_gpu_alone() -> None:
    kinds = lambda **kwargs: [job.kind for job in plan.plan(Record({}, {}), with_peers=False, **kwargs)]  # noqa: E731
    full = kinds(on_gpu=True)
    there = lambda found: sum(len(a.cases) * len(a.sizes) for a in found if a.stage in LADDER)  # noqa: E731
    assert full.count("variant") == there(experiments.VARIANTS)
    assert full.count("experiment") == there(experiments.EXPERIMENTS)
    steps = [step for step in experiments.steps() if step.stage.unavailable() is None]
    assert full.count("step") + full.count("backward step") == len(steps)
    assert full.count("backward step") == sum(step.case.backward for step in steps) > 0
    assert full.count("host") == len(host_cost.calls(False))
    assert {*kinds(on_gpu=True, quick=True), *kinds(on_gpu=False)} == {"stage", "peer"}


def test_gradients_are_planned_beside_their_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "torch_on_gpu", lambda: "PyTorch")
    jobs = [job for job in plan.plan(Record({}, {}), on_gpu=True) if job.kind.startswith("backward")]
    names = {job.name for job in jobs if job.kind == "backward" and job.case.dtype == "float32"}
    assert {"backward", "backward deterministic"} <= names
    for job in jobs:
        assert job.case.backward and str(job.case).endswith(" backward")
        assert job.case.flops == 2.5 * Case(job.case.shape, job.case.dtype, job.case.causal).flops
        assert any(peer.kind == "backward peer" and peer.case == job.case for peer in jobs)
    half = {(job.name, job.case.shape) for job in jobs if job.kind == "backward" and job.case.dtype == "bfloat16"}
    for shape in (4, 16, 4096, 128), (4, 32, 4096, 64), (8, 16, 2048, 128), (1, 32, 16384, 64):
        assert {("backward_mma", shape), ("backward_mma deterministic", shape)} <= half
    only = plan.plan(Record({}, {}), on_gpu=True, only=["backward"], with_peers=False)
    assert {job.name for job in only} == {"backward", "backward deterministic", "backward: scalar atomics"}
    runs = [key for key, _ in itertools.groupby(jobs, key=lambda job: (job.case.shape, job.case.dtype))]
    assert len(runs) == len(set(runs)), "inputs are made once"


def test_steps_of_gradients_are_checked_and_timed() -> None:
    """Steps of backward_mma unchanged; the turns of one tile as an experiment with the deterministic kernel."""
    jobs = plan.plan(Record({}, {}), on_gpu=True, only=["backward_mma"], with_peers=False)
    planned = [each for each in jobs if each.kind == "backward step"]
    climb = CLIMBS["backward_mma"]
    for case in experiments.CLIMB_CASES["backward_mma"]:
        assert [each.row["step"] for each in planned if each.case == case] == [*by_number("backward_mma")]
    assert {(case.shape[3], case.causal) for case in (each.case for each in planned)} == set(
        itertools.product((64, 128), (False, True))
    )
    turns = "backward_mma deterministic: a turn for each tile of dQ"
    assert turns in [each.name for each in jobs]
    small = Case((1, 2, 70, 64), "bfloat16", True, backward=True)
    first = dataclasses.replace(next(experiments.steps(["backward_mma"])), case=small)
    way = Gradients(climb[-2], True, turns.partition(": ")[2])
    for each in (of_step(first), of_gradients(way, small, kind="backward experiment")):
        run.compile_all([each])
        r = JobRunner(0.001).run(each)
        assert (r.kind, r.name) == (each.kind, each.name) and r.max_error <= r.tolerance and "BLOCK_M=64" in r.note
        assert (r.step, r.idea) == ((1, climb[0].idea) if r.kind == "backward step" else (None, ""))
        assert plan.still_to_do([each], Record({}, {}, [r])) == []
    assert each.name == turns


@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_checked_and_timed(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((1, 2, 70, 16), "bfloat16", causal, backward=True)
    for way in plan.gradients():
        if "bfloat16" in way.stage.dtypes:
            r = JobRunner(0.001).run(of_gradients(way, case))
            assert r.max_error < r.tolerance
    case = Case((1, 2, 70, 16), "float32", causal, backward=True)
    for way in plan.gradients():
        if "float32" in way.stage.dtypes:
            planned = of_gradients(way, case)
            r = JobRunner(0.001).run(planned)
            assert r.kind == "backward" and r.name == way.name and r.max_error < r.tolerance
            assert r.tflops == pytest.approx(case.flops / r.ms / 1e9)
            assert plan.still_to_do([planned], Record({}, {}, [r])) == []
    with_alibi = JobRunner(0.001).run(of_gradients(Gradients(BACKWARD["backward"], False, "ALiBi", alibi=True), case))
    assert with_alibi.name == "backward: ALiBi" and with_alibi.max_error < with_alibi.tolerance
    text = kernel.source("08_backward.cu")
    wrong = text.replace("(dp[i][j] - delta[i])", "dp[i][j]")
    monkeypatch.setattr(kernel, "source", lambda file: wrong if file == "08_backward.cu" else text)
    with pytest.raises(WrongOutput):
        JobRunner(0.001).run(of_gradients(plan.gradients()[0], case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_sample_of_gradients_is_the_reference(dtype: str, causal: bool, alibi: bool) -> None:
    inputs = Inputs((1, 2, 300, 16), dtype)
    sample = inputs.gradient_sample(causal, alibi=alibi)
    slopes = {"alibi_slopes": alibi_slopes(2)} if alibi else {}
    exact = reference.attention_backward(inputs.do, *inputs.host, causal=causal, **slopes)
    for name, a in zip(("dq", "dk", "dv"), exact, strict=True):
        np.testing.assert_allclose(sample.expected[name], a[0][:, sample.rows], rtol=1e-9, atol=1e-12)
    error, tolerance = sample.error(tuple(cp.asarray(a.astype(np.float32)) for a in exact))
    assert error < 1e-5 <= tolerance
    error, tolerance = sample.error(tuple(cp.asarray(a.astype(np.float32)) + np.float32(0.1) for a in exact))
    assert error > tolerance


# ------------------------------------------------------------------------------------------------------ the run


def run_bench(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = command.bench(["--no-peers", "--json", str(path), *words])
    return status, json.loads(path.read_text())


def test_a_wrong_stage_is_noted_and_not_timed(fakes: Any, tmp_path: Path) -> None:
    def spoil(o: Any) -> None:
        o[-1, -1, -1, 0] = cp.nan

    fakes(Fake("wrong", act=spoil), Fake("right"))
    status, record = run_bench(tmp_path / "r.json")
    assert status == 1
    assert [r["name"] for r in record["results"] if r["kind"] == "stage"] == ["right", "right"]
    (note,) = (n for n in record["notes"] if n["name"] == "wrong")
    assert note["failed"] and "max error nan" in note["why"] and len(note["cases"]) == 2


def test_a_crash_is_noted_and_the_rest_is_measured(fakes: Any, tmp_path: Path, capsys: Any) -> None:
    def crash(o: Any) -> None:
        raise MemoryError("no room\nfor it")

    fakes(Fake("first"), Fake("broken", act=crash), Fake("last"))
    status, record = run_bench(tmp_path / "r.json")
    names = [r["name"] for r in record["results"] if r["kind"] == "stage"]
    assert status == 1 and names == ["first", "last", "first", "last"]
    assert [n["why"] for n in record["notes"]] == ["MemoryError: no room"]
    assert "[FAIL] broken (2 cases, first 2x3x48x16 float32): MemoryError: no room" in capsys.readouterr().out


ALONE = [] if ON_GPU else ["first"]  # a GPU times the first in turns with the one that ends the run


def test_an_interrupted_run_is_written_and_goes_on(fakes: Any, tmp_path: Path) -> None:
    seen: list[int] = []

    def interrupt(o: Any) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise KeyboardInterrupt

    fakes(Fake("first"), Fake("second", act=interrupt))
    status, record = run_bench(tmp_path / "r.json")
    assert status == 130 and [r["name"] for r in record["results"]][:1] == ALONE and len(record["how"]["done"]) < 3
    status, record = run_bench(tmp_path / "r.json", "--resume")
    stages = [(r["name"], r["causal"]) for r in record["results"] if r["kind"] == "stage"]
    assert status == 0 and "done" not in record["how"]
    assert stages == [("first", False), ("second", False), ("first", True), ("second", True)]


def test_what_is_left_when_the_time_is_over_is_noted(fakes: Any, tmp_path: Path) -> None:
    fakes(Fake("first"))
    status, record = run_bench(tmp_path / "r.json", "--within", "0")
    assert status == 0 and not [r for r in record["results"] if r["kind"] == "stage"] and "done" not in record["how"]
    (note,) = (n for n in record["notes"] if n["name"] == "first")
    assert note["why"] == "0 s were over" and len(note["cases"]) == 2


def test_a_finished_record_is_not_measured_again(fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither results, for each tile size, nor failures are repeated; what has been added since is measured."""

    def crash(o: Any) -> None:
        raise MemoryError("no room")

    def variants(*rows: int) -> None:
        sizes = tuple({"BLOCK_M": size} for size in rows)
        monkeypatch.setattr(experiments, "VARIANTS", (experiments.Variant("first", sizes, (Case(SMALL),)),))

    monkeypatch.setattr(command, "plan", lambda record, **_: plan.plan(record, on_gpu=True, with_peers=False))
    fakes(Fake("first"), Fake("broken", act=crash))
    variants(8, 16)
    assert run_bench(tmp_path / "r.json")[0] == 1
    status, before = run_bench(tmp_path / "r.json", "--resume")
    stages = [(r["name"], r["kind"], r["causal"], r["note"]) for r in before["results"]]
    assert status == 1 and len(stages) == len(set(stages)) == 2 + 2
    assert [len(note["cases"]) for note in before["notes"]] == [2]

    fakes(Fake("first"), Fake("broken"), Fake("new"))
    variants(8, 16, 32)
    _, after = run_bench(tmp_path / "r.json", "--resume")
    assert after["results"][: len(stages)] == before["results"]
    added = [(r["name"], r["kind"], r["note"]) for r in after["results"][len(stages) :]]
    assert added == [("new", "stage", "BLOCK_M=16"), ("new", "stage", "BLOCK_M=16"), ("first", "variant", "BLOCK_M=32")]


def test_what_was_left_is_measured_by_a_resumed_run(fakes: Any, tmp_path: Path) -> None:
    """Its note is removed; a run without time notes it again, once."""
    fakes(Fake("first"), Fake("second"))
    run_bench(tmp_path / "r.json", "--within", "0")
    _, record = run_bench(tmp_path / "r.json", "--within", "0", "--resume")
    assert [len(n["cases"]) for n in record["notes"] if n["name"] == "first"] == [2]
    run_bench(tmp_path / "r.json", "--stage", "first", "--resume")
    status, record = run_bench(tmp_path / "r.json", "--stage", "first", "--resume")
    assert status == 0 and [r["name"] for r in record["results"] if r["kind"] == "stage"] == ["first", "first"]
    assert "first" not in [note["name"] for note in record["notes"]]
    assert [(n["why"], len(n["cases"])) for n in record["notes"] if n["name"] == "second"] == [("0 s were over", 2)]


def test_steps_are_checked_and_recorded_in_their_order(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is the stage; a wrong step is not timed, and the others are timed in turns."""

    def spoil(o: Any) -> None:
        o[...] = 0

    last = Fake("last")
    fakes(last)
    monkeypatch.setattr(
        experiments,
        "CLIMBS",
        {"last": (Fake("last", file="steps/1_a.cu"), Fake("last", file="steps/2_b.cu", act=spoil), last)},
    )
    monkeypatch.setattr(experiments, "HEADS", (Case(SMALL),))
    jobs = [job for job in plan.plan(Record({}, {}), on_gpu=True, with_peers=False) if job.kind == "step"]
    assert [(each.name, each.row["step"], each.case) for each in jobs] == [
        ("last: 1_a", 1, Case(SMALL)),
        ("last: 2_b", 2, Case(SMALL)),
        ("last: 01_naive", 3, Case(SMALL)),
    ]
    assert len({each.compared_with for each in jobs}) == 1
    right = JobRunner(0.001).run(jobs[0])
    assert (right.step, right.idea, right.note) == (1, "an idea", "BLOCK_M=16") and right.max_error <= right.tolerance
    with pytest.raises(WrongOutput):
        JobRunner(0.001).run(jobs[1])
    found = {each.name: result for each, result in JobRunner(0.001).run_in_turns(jobs)}
    wrong, first, last_step = (found[jobs[number].name] for number in (1, 0, 2))
    assert isinstance(wrong, WrongOutput) and first.gain == []
    assert last_step.launches == first.launches == run.FEWEST_ROUNDS
    median, low, high = last_step.gain
    assert low <= median <= high and low <= first.ms_max / last_step.ms_min
    assert (first.over, last_step.over) == ("", first.name)


def test_steps_are_timed_again_in_place_of_those_of_a_record(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "plan", lambda record, **_: plan.plan(record, on_gpu=True, with_peers=False))
    last = Fake("last")
    fakes(last)
    climb = (*(Fake("last", file=f"steps/{n}.cu") for n in ("01_01_a", "01_02_gone", "01_03_b")), last)
    monkeypatch.setattr(experiments, "HEADS", (Case(SMALL),))
    monkeypatch.setattr(experiments, "CLIMBS", {"last": climb})
    _, before = run_bench(tmp_path / "r.json")
    monkeypatch.setattr(experiments, "CLIMBS", {"last": (climb[0], *climb[2:])})
    status, after = run_bench(tmp_path / "r.json", "--steps")
    others, steps = ([r for r in after["results"] if (r["kind"] == "step") == is_step] for is_step in (False, True))
    assert status == 0 and others == [r for r in before["results"] if r["kind"] != "step"]
    assert [(r["name"], r["step"]) for r in steps] == [
        ("last: 01_01_a", 1),
        ("last: 01_03_b", 3),
        ("last: 01_naive", 4),
    ]
    if ON_GPU:
        assert [r["over"] for r in steps] == ["", "last: 01_01_a", "last: 01_03_b"]


def test_gains_are_of_neighbours_that_were_timed_in_turns() -> None:
    rows = [{"step": n, "ms": ms, "ms_min": ms, "ms_max": ms} for n, ms in ((1, 2.0), (2, 1.0), (3, 1.0))]
    rows[1] |= {"gain": [1.5, 1.49, 1.51], "follows": 1}
    rows[2] |= {"gain": [0.9, 0.8, 1.0], "follows": 2}
    assert show.speedup(rows[0], rows[1]) == "1.50×", "the clock had changed between their medians"
    assert show.speedup(rows[1], rows[2]) == "0.90× (0.80 to 1.00)"
    assert show.speedup(rows[0], rows[2]) == "2.00×", "not neighbours"


@pytest.mark.parametrize("over, told", [("", "1.25×"), ("k: 01_02_gone", "1.25×"), ("k: 01_01_a", "2.00×")])
def test_a_gain_over_a_step_that_is_gone_is_not_one_over_the_step_before(
    monkeypatch: pytest.MonkeyPatch, over: str, told: str
) -> None:
    """Otherwise the medians are compared; in older records, step numbers tell what a gain is relative to."""
    steps = {"first": "steps/01_01_a.cu", "third": "steps/01_03_c.cu", "whole": "01_whole.cu"}
    climb = tuple(dataclasses.replace(LADDER["naive"], idea=idea, file=file) for idea, file in steps.items())
    monkeypatch.setitem(CLIMBS, "k", climb)
    monkeypatch.setitem(LAST_IDEAS, "k", "whole")
    at = {"kind": "step", "shape": list(SMALL), "dtype": "float16", "causal": False}
    results = [
        at | {"name": f"k: {file[6:-3]}", "idea": idea, "step": n, "ms": ms, "ms_min": ms, "ms_max": ms, "tflops": 1.0}
        for (idea, file), n, ms in zip(steps.items(), (1, 3, 4), (1.0, 0.8, 0.4), strict=True)
    ]
    results[1] |= {"gain": [2.0, 2.0, 2.0], "over": over}
    results[2] |= {"gain": [1.5, 1.5, 1.5]}
    rows = show.climb("k", SMALL, dtype="float16", record={"device": {}, "results": results})
    assert [row["step"] for row in rows] == [1, 3, 4]
    assert show.speedup(rows[0], rows[1]) == told
    assert show.speedup(rows[1], rows[2]) == "1.50×"


def test_a_climb_is_read_and_drawn_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step inserted after the run is in its place, and marked as not measured."""

    def line(name: str, kind: str, tflops: float, **more: Any) -> dict[str, Any]:
        at = {"shape": list(SMALL), "dtype": "float16", "causal": False}
        return {"name": name, "kind": kind, "tflops": tflops, **at, **more}

    results = [
        line("k", "stage", 30.0),
        line("k", "stage", 99.0, causal=True),
        line("k: b", "step", 18.0, step=2, idea="a detour"),
        line("k: a", "step", 20.0, step=1, idea="first"),
        line("k: a", "step", 5.0, step=1, idea="first", dtype="float32"),
        line("l: a", "step", 7.0, step=1, idea="another's"),
        line("backward_mma: a", "backward step", 40.0, step=1, idea="gradients"),
        line("backward_mma", "backward", 50.0),
    ]
    for name, ideas in (("k", ("first", "a bridge", "a detour", "whole")), ("backward_mma", ("gradients", "whole"))):
        monkeypatch.setitem(CLIMBS, name, tuple(dataclasses.replace(LADDER["naive"], idea=idea) for idea in ideas))
        monkeypatch.setitem(LAST_IDEAS, name, "whole")
    record = {"device": {"name": "a GPU"}, "results": results}
    rows = show.climb("k", SMALL, dtype="float16", record=record)
    assert [(r.get("step"), str(r["tflops"])) for r in rows] == [(1, "20.0"), (2, "nan"), (3, "18.0"), (None, "30.0")]
    assert show.speedup(rows[0], rows[1]) == "not measured yet"
    picture = show.measured_climb("k", SMALL, dtype="float16", record=record)
    assert picture.alt == (
        "1  first: 20.0 TFLOP/s; 2  a bridge: not measured yet; "
        "3  a detour: 18.0  -10% TFLOP/s; 4  k: 30.0  +67% TFLOP/s"
    )
    assert len({bar.get_facecolor() for bar in picture.figure.axes[0].patches}) == 2, "one that is slower is marked"
    level = [r | {"tflops": 20.0 - 0.01 * (r["name"] != "k: a")} for r in results]
    alike = show.measured_climb("k", SMALL, dtype="float16", record={**record, "results": level})
    assert alike.alt.endswith("3  a detour: 20.0  0% TFLOP/s; 4  k: 20.0  0% TFLOP/s"), "no -0%"
    assert [r["tflops"] for r in show.climb("backward_mma", SMALL, dtype="float16", record=record)] == [40.0, 50.0]
    assert show.measured_climb("backward_mma", SMALL, dtype="float16", record=record).alt.startswith(
        "1  gradients: 40.0 TFLOP/s; 2  backward_mma"
    )
    assert show.climb("k", SMALL, dtype="bfloat16", record=record) == []
    timed = {**record, "results": [{**r, "ms": 100 / r["tflops"]} for r in results]}
    timed["results"].append({**line("peer", "backward peer", 100.0), "ms": 1.0})
    picture = show.measured_climb_times("k", SMALL, dtype="float16", beside={"peer": "theirs"}, record=timed)
    assert picture.alt == "1  first: 5.00 ms; 3  a detour: 5.56 ms   0.90×; 4  k: 3.33 ms   1.67×; theirs: 1 ms"
    chosen = show.measured_climb_times("k", SMALL, [1, 4], dtype="float16", record=timed)
    assert chosen.alt == "1  first: 5.00 ms; 4  k: 3.33 ms   1.50×", "a gain is over the step that is shown before"
    assert "not yet recorded" in repr(show.measured_climb_times("m", SMALL, record=timed))
    assert "not yet recorded" in repr(show.measured_climb("m", SMALL, record=record))


def test_the_sweep_comes_last_and_is_timed_for_less() -> None:
    jobs = plan.plan(Record({}, {}), on_gpu=True, with_peers=False)
    swept = [job.kind == "stage" and job.case.dtype == "bfloat16" and job.case.shape not in plan.SHAPES for job in jobs]
    assert swept == sorted(swept) and any(swept)
    for job, side in zip(jobs, swept, strict=True):
        beside = job.kind in ("variant", "step", "experiment", "backward step", "backward experiment")
        backward = job.kind.startswith("backward") and plan.swept(job.case)
        assert job.share == (plan.SIDE_SHARE if side or beside or backward else 1.0)


def test_sigterm_writes_the_record(fakes: Any, tmp_path: Path) -> None:
    """`timeout` sends SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals go to the main thread")
    fakes(Fake("first"), Fake("second", act=lambda o: os.kill(os.getpid(), signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        status, record = run_bench(tmp_path / "r.json")
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert status == 130 and [r["name"] for r in record["results"]][:1] == ALONE
    assert after == signal.SIG_IGN, "the handler is put back"


def test_a_lost_device_is_left_for_another_process(fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access the process cannot use the GPU any more; a new process continues after the failure."""

    def crash(o: Any) -> None:
        raise RuntimeError("illegal address")

    path, started = tmp_path / "r.json", []

    def start(program: str, words: list[str]) -> None:
        started.append(words)
        raise SystemExit

    fakes(Fake("first"), Fake("bad", act=crash), Fake("last"))
    monkeypatch.setattr(run, "_alive", lambda: False)
    monkeypatch.setattr(command.os, "execv", start)
    with pytest.raises(SystemExit):
        run_bench(path)
    (words,) = started
    assert words[3:] == ["--no-peers", "--json", str(path), "--resume"]
    exec(words[2].partition("sys.exit")[0], names := {})
    assert names["command"] is command, "what the new process runs can be imported"
    monkeypatch.setattr(run, "_alive", lambda: True)
    assert command.bench(words[3:]) == 1
    record = json.loads(path.read_text())
    stages = [r["name"] for r in record["results"] if r["kind"] == "stage"]
    assert stages == ["first", "last", "first", "last"] and len(record["notes"]) == 1


def test_peers_without_a_gpu_are_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README names this command, and the CPU engine would take hours for the shapes of a GPU's record."""
    monkeypatch.setattr(command, "ON_GPU", False)
    monkeypatch.setattr(command, "plan", lambda *_, **__: pytest.fail("it measures"))
    with pytest.raises(SystemExit):
        command.bench(["--peers"])
    assert "there is no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("", ["--resume"], "it cannot be continued: Expecting value"),
        ("[]", ["--resume"], "it cannot be continued: record.json is no record of `bench --json`"),
        ('{"device": {}}', ["--steps"], "it cannot be continued: record.json is no record of `bench --json`"),
        (None, [], "it is a folder"),
    ],
)
def test_what_no_record_can_be_written_to_is_said_first(
    text: str | None, words: list[str], said: str, fakes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes(Fake("right", act=lambda o: pytest.fail("nothing is measured")))
    path = tmp_path / "record.json"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(SystemExit):
        command.bench(["--no-peers", "--json", str(path), *words])
    assert f"--json {path}: {said}" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]


def test_a_record_goes_to_json_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real stages and NumPy, at a small shape on the CPU; on a GPU at the shapes of --quick."""
    monkeypatch.setattr(plan, "ON_CPU", (1, 1, 80, 16))
    path = tmp_path / "folder" / "record.json"
    here = set(plan.forward()) & set(QUICK)
    named = [word for name in here for word in ("--stage", name)]
    assert command.bench(["--quick", "--no-peers", "--json", str(path), *named]) == 0
    record = json.loads(path.read_text())
    assert {r["name"] for r in record["results"] if r["kind"] == "stage"} == here
    fields = {f.name for f in dataclasses.fields(Measurement)}
    for r in record["results"]:
        assert set(r) == fields
        assert r["ms_min"] <= r["ms"] <= r["ms_max"]
        assert r["max_error"] <= r["tolerance"]
        case = Case(tuple(r["shape"]), r["dtype"], r["causal"])
        assert r["tflops"] == pytest.approx(case.flops / r["ms"] / 1e9, rel=1e-4)
    assert len(Record.load(readme.RECORD).results) > 300, "the committed record, of before there were steps, is read"
    again = Record.load(path)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_memory_beyond_the_inputs_is_counted(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([1000, 1000 + cp.empty(SMALL, dtype=cp.float32).nbytes + 77])
    monkeypatch.setattr("helpers.bench.job._allocated_bytes", lambda *, peak=False: next(held))
    assert JobRunner(0.001).run(of_stage(Fake("one"), Case(SMALL))).extra_bytes == 77


def test_peers_are_timed_like_stages() -> None:
    @contextmanager
    def ready(inputs: Inputs, causal: bool) -> Any:
        yield lambda: reference.attention(*inputs.host, causal=causal)

    runner = JobRunner(0.001)
    r = runner.run(of_peer(peers.Peer("other", ready), Case(SMALL, "float16", True)))
    assert (r.kind, r.dtype, r.causal) == ("peer", "float16", True) and r.max_error < 1e-14

    @contextmanager
    def deaf(inputs: Inputs, causal: bool) -> Any:
        yield lambda: reference.attention(*inputs.host)

    with pytest.raises(WrongOutput):
        runner.run(of_peer(peers.Peer("other", deaf), Case(SMALL, "float16", True)))


@pytest.mark.parametrize("causal", [False, True])
def test_numpy_is_a_peer(causal: bool) -> None:
    r = JobRunner(0.001).run(of_peer(peers.NUMPY, Case(SMALL, "float32", causal)))
    assert r.max_error <= 1e-5
    assert peers.NUMPY.why_not("float16", False) and not peers.NUMPY.why_not("float32", True)


def test_numbas_simulator_is_a_peer() -> None:
    peer = peers.numba_simulator()
    if peer is None:
        pytest.skip("there is no Numba, or it was imported without its simulator")
    assert JobRunner(0.001).run(of_peer(peer, Case((1, 2, 33, 4)))).max_error <= 1e-5


def test_table_sets_each_line_beside_its_peers() -> None:
    common = {"shape": [1, 1, 8, 4], "ms_min": 1.0, "ms_max": 1.0, "launches": 3, "dtype": "float16"}
    results = [
        Measurement("matmul float16", "roof", **common, ms=1.0, tflops=100.0),
        Measurement("ours", "stage", **common, ms=2.0, tflops=25.0, max_error=1e-4),
        Measurement("SDPA flash", "peer", **common, ms=1.0, tflops=50.0, max_error=1e-4),
    ]
    record = Record({}, {}, results, [Note("naive", "stage", "no causal", ["a", "b"])])
    lines = {line.split("  ")[0]: line.split() for line in results_table(record).splitlines()}
    assert lines["ours"][4:6] == ["25.0%", "0.500"] and lines["SDPA flash"][5:7] == ["50.0%", "1.000"]
    assert "naive (2 cases, first a): no causal" in results_table(record)


def test_gradients_have_a_table_of_their_own() -> None:
    common = {"shape": [1, 1, 8, 4], "ms_min": 1.0, "ms_max": 1.0, "launches": 3, "dtype": "float16", "tflops": 1.0}
    kinds = ("stage", "peer", "backward", "backward peer")
    results = [Measurement(kind, kind, **common, ms=1.0 + i, max_error=0.0) for i, kind in enumerate(kinds)]
    _, output, gradients = results_table(Record({}, {}, results)).split("1x1x8x4 float16")
    assert output.startswith("\n") and gradients.startswith(" backward\n")
    assert "stage" in output and "backward" not in output and "1.333" in gradients


def test_all_kernels_are_compiled_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of stages, variants and experiments; one that cannot be compiled is left to its job."""
    seen = []

    def prepare(self: Any, q: Any, k: Any, v: Any, *, source: Any = None, sizes: Any = None) -> Any:
        seen.append((self.name, q.shape[-1], q.dtype.name, dict(sizes), source is not None))
        raise ValueError("does not compile")

    monkeypatch.setattr(Fake, "prepare", prepare)
    half, plain = Fake("half", ("bfloat16",)), Fake("plain")
    monkeypatch.setattr("helpers.bench.job.LADDER", {"half": half, "plain": plain})
    experiment = experiments.Experiment("other", "plain", (("scale * dot", "scale * dot"),))
    jobs = [
        of_peer(peers.NUMPY, Case(SMALL)),
        of_stage(half, Case(SMALL, "bfloat16", True)),
        of_stage(plain, Case(SMALL), {"BLOCK_M": 8}, kind="variant"),
        of_experiment(experiment, Case((1, 1, 9, 24)), {}),
    ]
    run.compile_all(jobs)
    assert sorted(seen, key=str) == [
        ("half", 16, "bfloat16", {"HEAD_DIM": 16, "BLOCK_M": 16}, False),
        ("plain", 16, "float32", {"HEAD_DIM": 16, "BLOCK_M": 8}, False),
        ("plain", 24, "float32", {"HEAD_DIM": 24, "BLOCK_M": 24}, True),
    ]


# -------------------------------------------------------------------------------------------------------- the host


def test_the_host_is_timed_between_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the median of batches after the first; waiting for the GPU is not timed, and never within a batch."""
    now, events = [0], []

    def call() -> None:
        events.append("call")
        now[0] += {0: 900, 1: 40, 2: 20}.get(events.count("wait") - 1, 30) * 1000

    def wait() -> None:
        events.append("wait")
        now[0] += 10**9

    monkeypatch.setattr(host_cost.time, "perf_counter_ns", lambda: now[0])
    device = SimpleNamespace(synchronize=wait)
    monkeypatch.setattr(host_cost, "cp", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    t = host_cost.host_time(call, batches=3, calls=4)
    assert (t.ms, t.ms_min, t.ms_max, t.launches) == pytest.approx((0.030, 0.020, 0.040, 12))
    assert events == [*["wait", *4 * ["call"]] * 4, "wait"]


@pytest.mark.parametrize("call", host_cost.calls(False), ids=lambda call: call.name)
def test_calls_whose_host_cost_is_recorded_are_right(call: host_cost.HostCall) -> None:
    inputs = Inputs(host_cost.CASE.shape, host_cost.CASE.dtype)
    with call.ready(inputs) as (run_it, output):
        o = output(run_it())
        assert o.shape == host_cost.CASE.shape
        assert inputs.sample(True).error(o) <= inputs.sample(True).tolerance


def test_host_costs_are_planned_checked_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def ready(inputs: Inputs) -> Any:
        right = reference.attention(*inputs.host, causal=True)
        yield lambda: right, lambda o: o

    @contextmanager
    def wrong(inputs: Inputs) -> Any:
        yield lambda: 0 * inputs.host[0], lambda o: o

    monkeypatch.setattr(run, "host_time", lambda call: timing.Timing(0.0375, 0.03, 0.045, 2000))
    r = JobRunner(0.001).run(of_host(host_cost.HostCall("one call", ready, "a note")))
    assert (r.kind, r.ms, r.launches, r.shape, r.causal) == ("host", 0.0375, 2000, [1, 4, 64, 64], True)
    assert "one call      37.5 µs   40.0%  a note" in results_table(Record({}, {}, [r]))
    with pytest.raises(WrongOutput):
        JobRunner(0.001).run(of_host(host_cost.HostCall("x", wrong)))
    names = {call.name for call in host_cost.calls(True)}
    kinds = ("CuPy arrays", "torch tensors")
    assert {
        f"flash_attention{how}, {kind}" for how in ("", "_varlen", "_varlen with max_seqlen") for kind in kinds
    } < names
    assert {"a prepared launch", "SDPA, torch tensors"} < names and len(names) == 8


# ---------------------------------------------------------------------------------------------------- the ladder


def test_ladder_prints_a_line_for_each_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "JobRunner", lambda seconds: JobRunner(seconds / 100))
    assert command.ladder(["--n", "70", "--d", "16", *(word for name in QUICK for word in ("--stage", name))]) == 0
    text = capsys.readouterr().out
    for name, stage in QUICK.items():
        tolerance = r"1\.0e-05" if "float32" in stage.dtypes else r"\S+"
        assert re.search(rf"\[PASS\] {name}: output matches reference \(max error: \S+ <= {tolerance}\)", text)
    assert ("The times below are the CPU engine's" in text.partition("[PASS]")[0]) != ON_GPU


def test_ladder_takes_the_first_type_that_works_and_says_what_cannot(fakes: Any, capsys: Any) -> None:
    fakes(Fake("half", ("bfloat16",)), Fake("none", ()), Fake("plain"))
    plan.LADDER["none"].dtypes = ("float32",)
    plan.LADDER["none"].why_not = lambda **_: "needs another GPU"
    assert command.ladder(["--n", "20", "--d", "8"]) == 0
    text = capsys.readouterr().out
    assert "1x1x20x8 bfloat16" in text and "[SKIP] none: needs another GPU" in text and "[PASS] plain" in text


@pytest.mark.parametrize("argv", [["--n", "0"], ["--d", "257"], ["--stage", "nonsense"]])
def test_ladder_refuses_sizes_it_cannot_run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.ladder(argv)
    assert "--" in capsys.readouterr().err


def test_ladder_takes_the_widest_head_of_any_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.ladder(["--n", "40", "--d", "256", "--stage", "naive", "--stage", "register_tiles"]) == 0
    text = capsys.readouterr().out
    assert "[PASS] register_tiles" in text and "[SKIP] naive: head_dim = 256" in text


def test_ladder_leaves_out_what_finds_no_memory(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def too_much(o: Any) -> None:
        raise MemoryError("Unable to allocate 24 GiB")

    fakes(Fake("large", act=too_much), Fake("small"))
    assert command.ladder(["--n", "33", "--d", "8"]) == 0
    text = capsys.readouterr().out
    assert "[SKIP] large at 1x1x33x8 float32: too little memory: Unable to allocate 24 GiB" in text
    assert "[PASS] small" in text


def test_ladder_reports_a_wrong_stage(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fakes(Fake("naive", act=lambda o: o.fill(0.0)))
    assert command.ladder(["--n", "33", "--d", "8"]) == 1
    text = capsys.readouterr().out
    assert "[FAIL] naive" in text and "[PASS] naive" not in text


# ------------------------------------------------------------------------------------------------------ experiments


def test_texts_of_experiments_are_there() -> None:
    for experiment in (*experiments.EXPERIMENTS, *experiments.GRADIENTS):
        text = kernel.source(LADDER[experiment.stage].file)
        assert (experiment.apply(text) != text) == bool(experiment.changes), experiment.name


@pytest.mark.exhaustive(one_of_each=lambda experiment: experiment.stage)
@pytest.mark.parametrize("experiment", experiments.EXPERIMENTS, ids=lambda e: f"{e.stage}: {e.name}")
def test_experiments_change_the_text_they_name(experiment: experiments.Experiment) -> None:
    few = dataclasses.replace(experiment, launches=min(experiment.launches, 2))
    measured = experiment.cases[0]
    why = why_not(LADDER[experiment.stage], measured)
    if why:
        pytest.skip(why)
    case = Case((1, 1, 100, measured.shape[3]), measured.dtype, measured.causal)
    r = JobRunner(0.001).run(of_experiment(few, case, experiment.sizes[0]))
    # The engine runs threads in order, so there a missing barrier is always wrong; another text never is.
    if not ON_GPU:
        wrong = (
            experiment.launches > 1 and "barrier" in experiment.name
        ) or experiment.changes == experiments.TF32_ONE_PRODUCT
        assert r.wrong_launches == (few.launches if wrong else 0)


@pytest.mark.exhaustive(one_of_each=lambda experiment: experiment.stage)
@pytest.mark.parametrize("experiment", experiments.GRADIENTS, ids=lambda e: f"{e.stage}: {e.name}")
def test_experiments_with_gradients_are_right(experiment: experiments.Experiment) -> None:
    measured, stage = experiment.cases[0], LADDER[experiment.stage]
    if why := why_not(stage, measured):
        pytest.skip(why)
    case = dataclasses.replace(measured, shape=(1, 2, 100, measured.shape[3]))
    what = Gradients(stage, False, experiment.name, experiment)
    r = JobRunner(0.001).run(of_gradients(what, case, experiment.sizes[0], kind="backward experiment"))
    assert r.name == f"{experiment.stage}: {experiment.name}" and r.max_error <= r.tolerance
    assert bool(experiment.changes) == (what.source is not None)


def test_an_experiment_on_another_text_is_refused() -> None:
    experiment = experiments.Experiment("x", "naive", (("no such text", ""),))
    with pytest.raises(ValueError, match="correct the experiment"):
        JobRunner(0.001).run(of_experiment(experiment, Case((1, 1, 8, 8)), {}))


@pytest.mark.parametrize(
    "measured", [*experiments.VARIANTS, *experiments.EXPERIMENTS, *experiments.GRADIENTS], ids=lambda m: m.stage
)
def test_sizes_are_some_that_the_kernel_has(measured: Any) -> None:
    names = re.findall(r"#ifndef (\w+)", kernel.source(LADDER[measured.stage].file))
    for sizes in measured.sizes:
        assert set(sizes) <= set(names)


# ---------------------------------------------------------------------------------------------------------- README


def test_readme_has_the_table_of_the_record() -> None:
    record = json.loads(readme.RECORD.read_text())
    text = readme.README.read_text()
    assert readme.with_table(text, record) == text, "run: python3 helpers/course.py bench --readme"
    assert readme.plotted() == readme.digest(record), "another record's plot: python3 helpers/course.py bench --readme"


def test_the_plot_is_known_by_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bar, a roof or another GPU changes the digest; what is not drawn does not. It is stored in the file."""
    record = json.loads(readme.RECORD.read_text())
    digests = [readme.digest(record)]
    at = [(tuple(r["shape"]), r["dtype"], r["kind"], r["causal"]) for r in record["results"]]
    shape, dtype = readme.COLUMNS[0]
    record["results"][at.index((shape, dtype, "stage", True))]["tflops"] *= 2
    assert readme.digest(record) == digests[0], "no causal mask in the plot"
    for kind in ("stage", "peer", "roof"):
        index = next(
            i
            for i, found in enumerate(at)
            if found[2] == kind and (kind == "roof" or found == (shape, dtype, kind, False))
        )
        record["results"][index]["tflops"] *= 1.001
        digests.append(readme.digest(record))
    record["device"]["name"] = "another GPU"
    digests.append(readme.digest(record))
    assert len(set(digests)) == 5
    monkeypatch.setattr(readme, "PLOT", tmp_path / "plot.png")
    readme.PLOT.write_bytes(readme.plot(record))
    assert readme.plotted() == digests[-1]
    readme.PLOT.write_bytes(readme.picture(record).png())
    assert readme.plotted() is None


def test_readme_tells_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other figures give another table; unrecorded columns are left out."""
    record = json.loads(readme.RECORD.read_text())
    head = readme.ladder_table(record).splitlines()[0]
    recorded = {(tuple(r["shape"]), r["dtype"]) for r in record["results"] if r["kind"] == "stage"}
    assert head.count("N = ") == sum(column in recorded for column in readme.COLUMNS)
    for r in record["results"]:
        if r["name"] == "tiled" and r["kind"] == "stage":
            r["tflops"], r["ms"] = 12.34, 1e3
    (line,) = (line for line in readme.ladder_table(record).splitlines() if "02_tiled" in line)
    assert "12.3 (0.0" in line
    shape, dtype = (4, 16, 4096, 64), "bfloat16"
    common = {"shape": list(shape), "dtype": dtype, "causal": False}
    record["results"] += [
        {"name": "naive", "kind": "stage", "ms": 2.0, "tflops": 123.4, **common},
        {"name": "SDPA flash", "kind": "peer", "ms": 1.0, "tflops": 246.8, **common},
        {"name": "matmul bfloat16", "kind": "roof", "tflops": 700.0, **common, "shape": [8, 8, 8]},
    ]
    monkeypatch.setattr(readme, "COLUMNS", ((shape, dtype),))
    text = readme.ladder_table(record)
    for cells in ("| 123 (0.50) |", "| 247 (1) |", "| 700 |"):
        assert cells in text
    assert readme.picture(record).alt.startswith("bfloat16 (4, 16, 4096, 64)")


def test_readme_tells_the_recorded_gradients() -> None:
    record = json.loads(readme.RECORD.read_text())
    record["results"] = [r for r in record["results"] if not r["kind"].startswith("backward")]
    assert readme.gradients_table(record) == ""
    common = {"shape": [4, 16, 4096, 128], "dtype": "bfloat16", "causal": True}
    record["results"] += [
        {"name": "backward_mma", "kind": "backward", "ms": 1.0, "tflops": 290.0, **common},
        {"name": "backward_mma deterministic", "kind": "backward", "ms": 1.25, "tflops": 232.0, **common},
        {"name": "SDPA flash", "kind": "backward peer", "ms": 1.1, "tflops": 264.0, **common},
    ]
    head, _, *rows = readme.gradients_table(record).splitlines()[2:]
    assert head.endswith("| bfloat16, causal<br>4 × 16 heads<br>N = 4096, d = 128 |")
    assert [row.split("| ")[-1] for row in rows] == ["290 (1.10) |", "232 (0.88) |", "264 (1) |"]
    assert "; deterministic |" in rows[1]
    assert readme.gradients_table(record) in readme.with_table(readme.README.read_text(), record)
    assert readme.ladder_table(record).count("backward") == 0


def test_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no part between"):
        readme.with_table("no markers", json.loads(readme.RECORD.read_text()))


def test_links_of_readme_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", readme.README.read_text()):
        assert target.startswith("http") or (readme.ROOT / target).exists(), target


def test_sizes_that_go_by_the_mask_are_those_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 has other tiles with a mask, with few keys, and where tall ones fit; those of 04 depend on head_dim only."""

    def block_n(name: str, rows: int, causal: bool) -> int:
        return tile_sizes(LADDER[name], Case((1, 16, rows, 128), "bfloat16", causal))["BLOCK_N"]

    monkeypatch.setattr(limits, "persistent_blocks", lambda: 132)
    assert [block_n("hopper", 4096, causal) for causal in (False, True)] == [160, 128]
    assert [block_n("hopper", rows, False) for rows in (512, 3000)] == [128, 64]
    assert block_n("register_tiles", 4096, False) == block_n("register_tiles", 4096, True)

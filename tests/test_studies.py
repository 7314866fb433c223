"""All studies run and check their ways, return rows with the recorded fields, and print a table.

Each is measured at toy sizes on the CPU engine, whose times say nothing about a kernel.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import device
from helpers.attention.comms import virtual_ranks
from helpers.attention.ladder import BACKWARD, LADDER
from helpers.attention.models.char_gpt import Config
from helpers.bench import cases, decode_loop, ncu, records, study
from helpers.bench.cases import Case
from helpers.bench.results import Record
from helpers.bench.studies import (
    autograd,
    backward_counters,
    backward_timeline,
    bias_gradient,
    bits,
    cute,
    decoding,
    first_store,
    fp8,
    fused,
    hopper,
    pipes,
    presets,
    profile_stages,
    promises,
    ring,
    score_mod,
    tall_tiles,
    tf32,
    torch_model,
    train,
    xray_vs_ncu,
)
from helpers.engine import nvrtc

pytestmark = pytest.mark.skipif(device.ON_GPU, reason="on a GPU the records themselves are measured")

Toy = Callable[[pytest.MonkeyPatch, Path], Any]
TOYS: dict[str, Toy] = {}


def toy(function: Toy) -> Toy:
    """Register the function that measures the study with its name at toy sizes; it returns the record."""
    TOYS[function.__name__.removesuffix("_")] = function
    return function


def taken(module: Any, path: Path, **parts: Any) -> Any:
    """Measure these parts of a study like its command, without compiling ahead in other processes."""
    assert set(parts) <= set(module.STUDY.parts)
    small = dataclasses.replace(module.STUDY, parts=parts, prepare=lambda parts: None, head=lambda: HEADS[module])
    return small.take(path)


HEADS: dict[Any, dict[str, Any]] = {
    **{
        module: {"device": "a CPU", "how": "a toy"}
        for module in (autograd, bias_gradient, fp8, hopper, presets, ring, score_mod, tf32)
    },
    bits: {"device": "a CPU", "shape": [1, 1, 33, 16], "runs": 2},
    cute: {"device": "a CPU", "how": {"nvrtc": "", "architecture": "", "processes": 1, "machine": ""}},
    backward_timeline: {"device": {"description": "a CPU"}},
    **{module: {"device": "a CPU", "rounds": 1} for module in (backward_counters, first_store)},
    tall_tiles: {"device": "a CPU", "rounds": 1},
    pipes: {"device": "a CPU"},
    decoding: {"device": {"description": "a CPU"}},
    fused: {"device": "a CPU", "dtype": "bfloat16"},
    torch_model: {"device": {"description": "a CPU", "torch": "", "transformers": ""}},
}


@toy
def autograd_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    pytest.importorskip("torch")
    monkeypatch.setattr(autograd, "PEERS", {"SDPA flash": "MATH"})
    return taken(autograd, path, rows=partial(autograd.rows, (Case((1, 2, 32, 16), "bfloat16", True),), 1))


@toy
def bias_gradient_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    pytest.importorskip("torch")
    monkeypatch.setattr(bias_gradient, "BACKENDS", {"SDPA efficient": "MATH"})
    monkeypatch.setattr(bias_gradient, "DTYPE", "float16")
    return taken(bias_gradient, path, rows=partial(bias_gradient.rows, ((2, 2, 32, 16),)))


@toy
def bits_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    monkeypatch.setattr(bits, "BACKWARD", {"backward": BACKWARD["backward"]})
    return taken(bits, path, rows=partial(bits.rows, (1, 1, 33, 16), 2))


@toy
def cute_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    case, way = Case((1, 2, 70, 40), "bfloat16", causal=True), cute.COMPARED_WITH
    compiled = (lambda: [cute.cold(way, 64)]) if nvrtc.version() else list
    return taken(cute, path, compiled=compiled, timed=partial(cute.timed, [case], [way], 1))


@toy
def decoding_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    pytest.importorskip("torch")
    row = (2, 64, 2, 1, 64)
    for name in ("ROWS", "STEP_ROWS"):
        monkeypatch.setattr(decoding, name, (row,))
    monkeypatch.setattr(decoding, "ROUNDS", 2)
    monkeypatch.setattr(decoding, "PEERS", ())
    monkeypatch.setattr(decoding, "DTYPE", "float16")  # NumPy's DLPack has no bfloat16
    few = {"LONG": ((90, 20),), "LONG_SPLITS": (2,), "PREFIXES": ((2, 64, 64),), "TREES": ((1, 48, 5),)}
    few |= {"DIMS": ((64, 64), (96, 80)), "PARTS": ((row, 2),)}
    for name, value in {**few, "FP8_ROWS": (row,), "HEADS": row[2:]}.items():
        monkeypatch.setattr(decoding, name, value)
    monkeypatch.setattr(decoding, "REAL_HEADS", 2)
    names = "rows", "steps", "long", "prefix", "tree", "fp8", "dims", "parts", "real"
    parts = {name: decoding.STUDY.parts[name] for name in names}
    config = Config(32, 1, 1, 64)
    parts["graph"] = partial(decode_loop.graph_rows, (2,), config, 20, 1)
    parts["server"] = partial(decode_loop.server_rows, (0,), Config(128, 1, 1, 64), 3, 40)
    return taken(decoding, path, **parts)


@toy
def fp8_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    for name, value in {"HEADS": 2, "ROWS": 64, "KEYS": 160, "HEAD_DIM": 64, "RUNGS": fp8.RUNGS[1:]}.items():
        monkeypatch.setattr(fp8, name, value)
    monkeypatch.setattr(fp8, "TRAINED", {"config": Config(16, 1, 1, 16), "batch": 2, "steps": 2, "warm_up": 1})
    text = train.origin()[:2000]
    return taken(
        fp8,
        path,
        rungs=partial(fp8.of_rungs, ("K with a mean",)),
        lengths=partial(fp8.of_lengths, (200,)),
        model=partial(fp8.of_model, text, 1),
        speeds=partial(fp8.of_speeds, ((1, 1, 200, 64),), 1),
        turns=partial(fp8.of_turns, ((1, 1, 200, 64),), 1),
        transposition=partial(fp8.of_transposition, ((1, 1, 200, 64),), 1),
    )


@toy
def fused_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    tiny = fused.case_of(96, 64, tokens=192, columns=128)  # two sequences of two heads
    monkeypatch.setattr(fused, "PLAN", (("rotary", tiny), ("projection", tiny)))
    monkeypatch.setattr(fused, "ROUNDS", 1)
    parts = {name: fused.STUDY.parts[name] for name in ("rotary", "projection")}
    return taken(fused, path, **parts, kernels=partial(fused.kernels, tiny))


@toy
def first_store_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    case = Case((1, 1, 130, 64), "bfloat16", True, backward=True)
    return taken(first_store, path, rows=partial(first_store.rows, (case,), 1))


@toy
def backward_timeline_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    case = Case((1, 1, 512, 64), "bfloat16")
    parts = {"rows": lambda: [backward_timeline.trace(case)], "blocks": lambda: [backward_timeline.blocks(case)]}
    return taken(backward_timeline, path, **parts)


@toy
def tall_tiles_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    case = tall_tiles.Case(1, 2, 1, 200, 230, 128, causal=True)
    return taken(tall_tiles, path, rows=partial(tall_tiles.rows, (case,), 1))


@toy
def pipes_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    return taken(pipes, path, rows=partial(pipes.rows, 1, 1))


@toy
def hopper_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    tiny = Case((1, 4, 200, 64), "bfloat16")
    changes = partial(hopper.changes, [(tiny, (hopper.AS_IT_IS, hopper.IDEAS[0]))], 1)
    return taken(hopper, path, changes=changes, **{"mma_loop": lambda: [hopper.mma_loop(1, "bfloat16", 1, 1)]})


@toy
def presets_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    monkeypatch.setattr(presets, "SHAPES", ((1, 1, 64, 64),))
    monkeypatch.setattr(presets, "CANDIDATES", ((64, 32, 4, 1),))
    return taken(presets, path, rows=presets.rows)


def nsight_compute(monkeypatch: pytest.MonkeyPatch, launch: Callable[[Path], list[str]]) -> None:
    """Make Nsight Compute return a CSV with 1 for each metric of each launch. launch returns the launches' names."""
    profiler = SimpleNamespace(start=lambda: None, stop=lambda: None)
    cuda = SimpleNamespace(profiler=profiler)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(ncu, "first_known", lambda metrics: metrics[0])
    monkeypatch.setattr(ncu, "about", lambda: {"device": "a CPU", "ncu": "none"})

    def profile(target: Path, wanted: list[str], kernels: list[str], words: tuple[str, ...], *options: str) -> None:
        metrics = list(dict.fromkeys([*wanted, "launch__grid_size"]))
        table = io.StringIO()
        writer = csv.writer(table, quoting=csv.QUOTE_ALL)
        writer.writerows([["ID", "Kernel Name", *metrics], ["", "", *[""] * len(metrics)]])
        for number, name in enumerate(launch(Path(words[-1])), 1):
            writer.writerow([0, ncu.MARK, *[number] * len(metrics)])
            writer.writerow([0, name, *[1] * len(metrics)])
        target.write_text(table.getvalue())

    monkeypatch.setattr(ncu, "profile", profile)


@toy
def profile_stages_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    monkeypatch.setattr(profile_stages, "cases", lambda: [("naive", Case((1, 2, 33, 16)))])
    for name in ("step_cases", "experiment_cases"):
        monkeypatch.setattr(profile_stages, name, list)
    backward = [(way, Case((1, 2, 33, 16), backward=True)) for way in profile_stages.gradients()[:1]]
    monkeypatch.setattr(profile_stages, "gradient_cases", lambda: backward)

    def launch(file: Path) -> list[str]:
        profile_stages.launch_all(file)
        return [row["stage"] for row in json.loads(file.read_text())["rows"]]

    nsight_compute(monkeypatch, launch)
    return profile_stages.take(path)


@toy
def backward_counters_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    pytest.importorskip("torch")
    cases = tuple(Case((1, 2, 33, 16), "bfloat16", True, backward=backward) for backward in (True, False))

    def launch(file: Path) -> list[str]:
        backward_counters.launch_all(file, cases)
        return ["kernel"] * len(json.loads(file.read_text()))

    nsight_compute(monkeypatch, launch)
    power = partial(backward_counters.power, cases, 1, 0.0)
    return taken(backward_counters, path, rows=backward_counters.rows, power=power)


@toy
def promises_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    monkeypatch.setattr(promises, "forward", lambda: {"naive": LADDER["naive"]})
    monkeypatch.setattr(promises, "BUDGET_S", 0.01)
    monkeypatch.setattr(promises, "WAITS", 2)
    small = promises.Small("a few tokens", 33, 33, 4, 2, 16)
    return promises.take(path, cases=[Case((1, 1, 40, 40))], smalls=[small])


@toy
def ring_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    comms = {"peer copies": virtual_ranks(2)}
    monkeypatch.setattr(ring, "_comms", lambda: (comms, {}))
    monkeypatch.setattr(ring, "HEADS", ((2, 1),))
    monkeypatch.setattr(ring, "D", 64)
    monkeypatch.setattr(ring, "ROUNDS", 1)
    monkeypatch.setattr(ring, "AT_LEAST_MS", 0.0)
    monkeypatch.setattr(ring, "SCHEDULES", ("zigzag",))
    monkeypatch.setattr(ring, "LOCAL", (8,))
    monkeypatch.setattr(ring, "_gpus", lambda: 2)
    right = {"rank": 0, "schedule": "ring", "bits": True}
    monkeypatch.setattr(ring, "processes", lambda kind, size: ([[right] * len(ring.SCHEDULES)] * size, [""] * size))
    return taken(
        ring,
        path,
        correct=lambda: ring._agreed(ring.correct(comms["peer copies"], "peer copies", 16, (2, 1), 64)),
        **{name: ring.STUDY.parts[name] for name in ("processes", "copies", "forward")},
    )


@toy
def score_mod_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    pytest.importorskip("torch")

    def no_compiler(*_: Any) -> Any:
        raise RuntimeError("FlexAttention would be compiled for minutes")

    monkeypatch.setattr(score_mod, "_flex", no_compiler)
    monkeypatch.setattr(score_mod, "SHAPES", ((1, 2, 64, 64),))
    monkeypatch.setattr(score_mod, "SAMPLED", ((0, 1),))
    monkeypatch.setattr(score_mod, "ROUNDS", 1)
    monkeypatch.setattr(score_mod, "DTYPE", "float16")
    return taken(score_mod, path, **{"no function": score_mod.STUDY.parts["no function"]})


@toy
def tf32_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    monkeypatch.setattr(tf32, "HEAD_DIMS", (64,))
    monkeypatch.setattr(tf32, "KINDS", tf32.KINDS[:1])
    monkeypatch.setattr(tf32, "ROWS", 64)
    monkeypatch.setattr(tf32, "ROUNDS", 1)
    monkeypatch.setattr(tf32, "CLIMBS", {"tf32": (LADDER["tf32"],)})
    monkeypatch.setattr(tf32, "shape_of_tokens", lambda n, head_dim: (1, 1, 80, head_dim))
    monkeypatch.setattr(tf32, "TILES", {64: tf32.TILES[64][:1]})
    return taken(
        tf32,
        path,
        errors=partial(tf32.errors, (64,), False),
        speeds=partial(tf32.of_speeds, (80,), False),
        fp16x3_tiles=tf32.of_tiles,
    )


@toy
def torch_model_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sizes = {"LAYERS": 1, "HIDDEN": 32, "HEADS": 2, "MLP": 32, "WORDS": 50, "LENGTHS": (8,), "ROUNDS": 1}
    for name, value in {**sizes, "KV_HEADS": (2,)}.items():
        monkeypatch.setattr(torch_model, name, value)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    prefill = partial(torch_model.speed, "prefill", 2, lengths=(8,))
    return taken(torch_model, path, accuracy=partial(torch_model.accuracy, 2, 8), prefill=prefill)


@toy
def train_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    how = {"batch": 2, "steps": 2, "warm_up": 1, "every": 1, "compared": 2, "contexts": (16,), "timed": 1, "sample": 3}
    text = train.origin()[:2000]
    monkeypatch.setattr(train, "measure", partial(train.measure, text, train.Sizes(Config(16, 1, 1, 16), **how)))
    return train.take(path)


@toy
def xray_vs_ncu_(monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    (launch,) = (launch for launch in xray_vs_ncu.patterns() if launch.name == "unit_stride")
    monkeypatch.setattr(xray_vs_ncu, "everything", lambda: [launch])
    nsight_compute(monkeypatch, lambda _: [launch.name])
    record = xray_vs_ncu.take(path)
    assert record["how"]["device"] == "a CPU" and record["rows"][0]["figures"]["global load requests"]["hardware"] == 1
    return record


# ---- the contract


def rows_by_part(record: Any) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of a record by their list and, if a list has several parts, by part."""
    if isinstance(record, Record):
        record = {"results": [dataclasses.asdict(result) for result in record.results]}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, rows in record.items():
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, Mapping):
                found.setdefault(str((name, row.get("part"), row.get("kind"))), []).append(row)
    return found


# In the short run: one of stages, one of instructions, two that Nsight Compute measures. A study measures on a GPU what
# a record says; learners do not run any.
IN_SHORT = ("bits", "pipes", "profile_stages", "xray_vs_ncu")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in IN_SHORT)) for name in study.STUDIES]
)
def test_a_study_gives_rows_of_the_recorded_form_and_prints_them(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, path = study.module_of(name), tmp_path / "record.json"
    record = TOYS[name](monkeypatch, path)
    assert "WRONG" not in capsys.readouterr().out
    if not isinstance(record, Record):
        assert not record.get("failed") and records.load(path) is not None
    committed, measured = rows_by_part(module.recorded() or {}), rows_by_part(record)
    assert measured
    text = module.table(record)
    for part, rows in measured.items():
        keys = [set(row) for row in committed.get(part, rows)]  # a part may not be recorded yet
        for row in rows:
            assert set(row) >= set.intersection(*keys) - ADDED_BY_OTHERS, part
            assert not isinstance(row.get("error"), str), row
            assert row.get("max_error") is None or row["max_error"] <= row.get("tolerance", 0.1)
    assert any(
        name in text
        for name in {
            row.get("name") or row.get("stage") or row.get("kernel", "") for rows in measured.values() for row in rows
        }
    )


# Keys of rows that need a peer, or a GPU, to compare with.
ADDED_BY_OTHERS = {"speed", "speed_min", "speed_max", "blocks", "loop", "opcodes", "instructions"}


@pytest.mark.exhaustive(one_of_each=lambda checked: checked)
@pytest.mark.parametrize(
    ("name", "target", "checked", "wrong"),
    [
        *((name, cases.Sample, "error", lambda *_: 1e9) for name in ("presets", "profile_stages")),
        ("ring", ring, "TOLERANCE", 0.0),
        *((name, module, "TOLERANCE", 0.0) for name, module in (("decoding", decoding), ("score_mod", score_mod))),
        ("tf32", cases.Sample, "error", lambda *_: 1e9),
        pytest.param("fp8", fp8, "MOST_RMS", 0.0, marks=pytest.mark.exhaustive),  # its kernels take eleven builds
    ],
    ids=lambda value: value if isinstance(value, str) and value in study.STUDIES else "",
)
def test_a_wrong_result_is_not_timed(
    name: str, target: Any, checked: str, wrong: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cute and fused have such tests in their own files."""
    monkeypatch.setattr(target, checked, wrong)
    record = TOYS[name](monkeypatch, tmp_path / "record.json")
    rows = [row for each in rows_by_part(record).values() for row in each]
    refused = [row for row in rows if "failed" in row or "error" in row]
    timed = [row for row in rows if row.get("name") != "read (sum)"]
    assert refused or record.get("failed") or not timed


def test_what_turns_gain() -> None:
    """The extremes of all shapes; without a record, nothing."""
    rows = [{"name": "no turns", "shape": [1, 1, 9, d], "speed": s} for d, s in ((64, 1.03), (128, 0.99), (256, 1.1))]
    rows.append({"name": "turns", "shape": [1, 1, 9, 64], "speed": 1.2})
    assert fp8.gained_by_turns({"turns": rows}) == (0.99, 1.03)
    assert fp8.gained_by_turns({"turns": []}) == (1, 1)

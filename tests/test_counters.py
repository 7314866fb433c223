"""Figures are read from Nsight Compute's CSV and from the recorded table. Nothing here needs a GPU."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.attention.ladder import BACKWARD, LADDER
from helpers.attention.ladder.steps import CLIMBS, LAST_IDEAS
from helpers.bench import counters, ncu, peers, plan, records
from helpers.bench.cases import Case
from helpers.bench.experiments import CLIMB_CASES, WMMA, Step
from helpers.bench.studies import profile_stages
from helpers.lesson import show

MS, READ = "gpu__time_duration.sum", "dram__bytes_read.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
METRICS = {
    MS: "nsecond",
    READ: "byte",
    OCCUPANCY: "%",
    "launch__registers_per_thread": "register/thread",
    "launch__grid_size": "",
}
LOOPS, TEMPLATE, FLASH, MATMUL = (
    {"stage": "loops", "kind": "stage", "dtype": "float32", "shape": [1, 2, 8, 64], "flop": 100.0},
    {"stage": "template", "kind": "stage", "dtype": "float16", "shape": [1, 1, 8, 64], "flop": 50.0},
    {"stage": "SDPA flash", "kind": "peer", "dtype": "bfloat16", "shape": [1, 2, 8, 64], "flop": 100.0},
    {"stage": "matmul", "kind": "roof", "dtype": "float32", "shape": [8, 8, 8], "flop": 1024.0},
)
BROKEN = {**LOOPS, "stage": "broken", "error": "RuntimeError: no"}


def line(*cells: str) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def mark(number: int) -> tuple[str, ...]:
    return (ncu.MARK, "1,000", "0", "1.5", "16", str(number))


def csv_of(*launches: tuple[str, ...], metrics: dict[str, str] = METRICS) -> str:
    """Return Nsight Compute's raw page: the kernel's name and the figures of each launch."""
    table = [line(str(i), *cells) for i, cells in enumerate(launches)]
    head = [line("ID", "Kernel Name", *metrics), line("", "", *metrics.values())]
    return "\n".join(["==PROF== Connected to process 1", *head, *table])


LAUNCHED = [LOOPS, BROKEN, TEMPLATE, FLASH, MATMUL]
CSV = csv_of(
    mark(1),
    ("loops", "1,000,000", "1,024", "25.5", "80", "64"),
    ("loops", "3,000,000", "2,048", "12.5", "80", "64"),
    mark(2),  # and then it failed
    mark(3),
    ("template<__half>(int)", "2,000,000", "7", "50", "255", "8"),
    mark(4),
    ("prepare", "1,000", "8", "10", "16", "1"),
    ("template<__half>(int)", "3,000", "8", "30", "128", "512"),  # the name does not identify it
    ("prepare", "4", "8", "n/a", "16", "1"),
)


def test_a_run_is_what_stands_between_two_marks() -> None:
    loops, broken, template, flash, matmul = profile_stages.rows(LAUNCHED, CSV)
    assert loops["launches"] == 2 and loops["kernels"] == ["loops"]
    assert template["launches"] == 1 and template["figures"]["ms"] == 2.0 and template["figures"]["registers"] == 255
    assert flash["launches"] == 3 and flash["kernels"] == ["prepare", "template<__half>"]
    assert broken["figures"] == {} and broken["error"] == "RuntimeError: no"
    assert matmul["figures"] == {} and matmul["error"] == "no launch of it was counted"
    assert [row["flop"] for row in (loops, flash, matmul)] == [100, 100, 1024]


def test_counts_are_added_and_shares_averaged_by_time() -> None:
    """A figure that describes one launch is the longest launch's."""
    loops, _, _, flash, _ = profile_stages.rows(LAUNCHED, CSV)
    occupancy = (25.5 + 3 * 12.5) / 4
    assert loops["figures"] == {
        **{"ms": 4.0, "dram bytes read": 3072, "occupancy %": occupancy, "registers": 80, "blocks": 64}
    }
    assert flash["figures"]["registers"] == 128 and flash["figures"]["blocks"] == 512
    assert flash["figures"]["dram bytes read"] == 24 and "occupancy %" not in flash["figures"]  # n/a is not a number


def test_kernels_before_the_first_mark_are_nobodys() -> None:
    (row,) = profile_stages.rows([LOOPS], csv_of(("loops", "1", "1", "1", "1", "1")))
    assert row["launches"] == 0 and row["figures"] == {} and "error" in row


def test_the_first_known_metric_of_a_figure_is_taken() -> None:
    first, second = counters.FIGURES["tensor pipe %"][1:3]
    metrics = {second: "%", first: "%", "launch__grid_size": ""}
    text = csv_of((ncu.MARK, "0", "0", "1"), ("loops", "1", "2", "64"), metrics=metrics)
    assert profile_stages.rows([LOOPS], text)[0]["figures"]["tensor pipe %"] == 2.0


def test_warp_states_are_those_of_the_longest_launch() -> None:
    """Its cycles per instruction; a state without warps is left out."""
    states = [counters.stall_metric(counters.STALLS[name]) for name in ("issued", "barrier", "branch")]
    metrics = {MS: "nsecond", "launch__grid_size": "", **dict.fromkeys(states, "inst")}
    first, second = ("loops", "10", "64", "1", "0.5", "0"), ("loops", "30", "64", "1", "2.25", "0")
    text = csv_of((ncu.MARK, "1", "1", "0", "0", "0"), first, second, metrics=metrics)
    (row,) = profile_stages.rows([LOOPS], text)
    assert row["stalls"] == {"issued": 1.0, "barrier": 2.25}
    (row,) = profile_stages.rows([BROKEN], text)
    assert "stalls" not in row


def test_the_table_of_warp_states() -> None:
    """Issued first, then the largest; small ones are left out, but count in the sum."""
    stalls = {"issued": 1.0, "branch": 0.05, "barrier": 0.5, "busy pipe": 2.0}
    record = record_of({**FLASH, "stalls": stalls}, {**LOOPS, "stalls": {"issued": 1.0}}, HALF)
    text = counters.stalls_table(["loops", "SDPA flash"], head_dim=64, record=record)
    head, *lines = text.splitlines()
    assert head.split() == ["loops", "float32", "SDPA", "flash", "bfloat16"]
    assert [line.split()[0] for line in lines] == ["issued", "busy", "barrier", "together"]
    assert lines[1].split() == ["busy", "pipe", "2"] and lines[-1].split() == ["together", "1", "3.55"]


def record_of(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": [{"figures": {"ms": float(i), "registers": 80.0}, **row} for i, row in enumerate(rows)]}


WIDE = {**LOOPS, "shape": [1, 2, 8, 128]}
HALF = {**LOOPS, "dtype": "float16"}
OLD = {"stage": "loops", "dtype": "float32", "shape": [1, 2, 8, 64], "flop": 1.0, "launches": 1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 3, 4]),
        ({"stages": ["loops"]}, [0]),
        ({"stages": ["loops"], "head_dim": 128}, [2]),
        ({"stages": ["loops"], "dtype": "float16"}, [1]),
        ({"stages": ["loops"], "dtype": "all"}, [0, 1]),
        ({"head_dim": "all", "dtype": "all"}, [0, 1, 2, 3, 4]),
        ({"stages": ["matmul", "SDPA flash"], "head_dim": 128}, [4]),  # a matrix product has no head_dim
        ({"dtype": "bfloat16"}, [3]),
        ({"stages": ["nobody"]}, []),
    ],
)
def test_rows_are_chosen_by_name_head_dim_and_type(options: dict[str, Any], expected: list[int]) -> None:
    record = record_of(LOOPS, HALF, WIDE, FLASH, MATMUL)
    assert [row["figures"]["ms"] for row in counters.select(record, **options)] == expected


def test_the_table_has_few_columns_side_by_side() -> None:
    record = record_of(LOOPS, HALF, WIDE, FLASH, MATMUL, {**BROKEN, "figures": {}}, TEMPLATE)
    text = counters.counters_table(record, head_dim="all", dtype="all")
    blocks = text.split("\n\n")
    assert [block.split("\n")[0].split() for block in blocks[:2]] == [
        ["loops", "loops", "loops", "SDPA", "flash", "matmul"],
        ["template"],
    ]
    assert max(map(len, text.split("\n"))) <= 120 and "tensor pipe" not in text
    assert ["head_dim", "64", "64", "128", "64"] in [line.split() for line in blocks[0].split("\n")]
    assert blocks[2] == "broken: RuntimeError: no"
    assert "broken" not in counters.counters_table(record, ["loops"])


def test_a_table_of_one_shape_does_not_name_its_head_dim() -> None:
    """Nor does a record from before there were peers and kinds."""
    expected = [["loops"], ["float32"], ["heads", "2"], ["ms", "0"], ["registers", "80"]]
    for row in (LOOPS, OLD):
        assert [line.split() for line in counters.counters_table(record_of(row)).split("\n")] == expected


def test_a_csv_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table"):
        profile_stages.rows(LAUNCHED, "==ERROR== no permission")


def test_each_stage_is_counted_in_its_first_type() -> None:
    """At d = 64; from 04 on at 128 too; WMMA in both half types."""
    found = [(name, case.shape[3], case.dtype) for name, case in profile_stages.cases()]
    assert all(case.shape[:3] == counters.SHAPE[:3] for _, case in profile_stages.cases())
    first = {name: dtype for name, _, dtype in reversed(found)}
    for name, stage in LADDER.items():
        if name in first:
            assert (first[name] == "float32") == ("float32" in stage.dtypes)
            types = ["bfloat16", "float16"] if name == WMMA else [first[name]]
            dims = [64, 128] if stage.number >= 4 else [64]
            assert [row for row in found if row[0] == name] == [(name, d, dtype) for d in dims for dtype in types]


def test_the_steps_are_counted_where_they_are_timed() -> None:
    found = [(step.name, case.shape, case.dtype) for step, case in profile_stages.step_cases()]
    for of, climb in CLIMBS.items():
        files = [f"{of}: {Path(stage.file).stem}" for stage in climb[:-1]]
        for timed in CLIMB_CASES.get(of) or ():
            if climb[0].why_not(head_dim=timed.shape[3], dtype=timed.dtype) is None:
                at = ((*profile_stages.SHAPE[:3], timed.shape[3]), timed.dtype)
                assert [name for name, *where in found if tuple(where) == at and name.startswith(f"{of}: ")] == files
    assert ("register_tiles", 64, "float32") in {(name.split(":")[0], at[3], dtype) for name, at, dtype in found}


def test_steps_of_gradients_are_counted_as_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both head dimensions, without a mask."""
    found = [(step, case) for step, case in profile_stages.step_cases() if step.of in BACKWARD]
    assert found and {case.shape[3] for _, case in found} == {64, 128}
    assert all(case.backward and not case.causal for _, case in found)
    small = Case((1, 1, 40, 64), "bfloat16", backward=True)
    monkeypatch.setattr(profile_stages, "step_cases", lambda: [(found[0][0], small)])
    for name in ("cases", "experiment_cases", "gradient_cases"):
        monkeypatch.setattr(profile_stages, name, lambda: [])
    ((job, at_another_case),) = profile_stages._jobs(with_peers=False)
    entry = profile_stages._entry(job)
    assert at_another_case is None
    assert (entry["kind"], entry["of"], entry["step"]) == ("backward step", "backward_mma", 1)
    assert entry["flop"] == small.flops


def test_a_climb_is_a_step_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are found by their ideas: a step inserted since then is marked as not measured."""
    for name, ideas in (("k", ("one idea", "a bridge", "more", "whole")), ("b", ("gradients", "whole"))):
        steps = tuple(replace(LADDER["naive"], idea=idea) for idea in ideas)
        monkeypatch.setitem(CLIMBS, name, steps)
        monkeypatch.setitem(LAST_IDEAS, name, "whole")

    def row(name: str, kind: str, **more: Any) -> dict[str, Any]:
        at = {"dtype": "float16", "shape": [1, 1, 8, 64]}
        more = {"of": "k", **more} if kind == "step" else more
        return {"stage": name, "kind": kind, **at, **more}

    record = {
        "rows": [
            row("k", "stage", dtype="bfloat16", figures={"registers": 99}),
            row("k", "stage", figures={"registers": 8}),
            row("k: second", "step", step=2, idea="more", figures={"ms": 2.0}),
            row("k: first", "step", step=1, idea="one idea", figures={"registers": 40, "ms": 1.25}),
            row("b: first", "backward step", step=1, idea="gradients", figures={"ms": 3.0}, of="b"),
            row("b", "backward", figures={"ms": 2.5}),
            row("k: first", "step", step=1, idea="one idea", figures={"ms": 7.0}, shape=[1, 1, 8, 128]),
            row("l: first", "step", step=1, idea="another's", figures={"ms": 9.0}, of="l"),
        ]
    }
    text = counters.climb_table("k", ["registers", "ms"], head_dim=64, record=record)
    assert [line.split() for line in text.split("\n")] == [
        *(["registers", "ms"], ["1", "one", "idea", "40", "1.25"]),
        ["2", "a", "bridge", *(2 * ["not", "measured", "yet"])],
        *(["3", "more", "2"], ["k", "8"]),
    ]
    assert counters.select(record, dtype="float16") == [record["rows"][1]], "steps are left out where none is named"
    assert counters.climb_table("none", ["ms"], head_dim=64, record=record).split() == ["ms"]
    of_gradients = counters.climb_table("b", ["ms"], head_dim=64, record=record)
    assert of_gradients.split() == ["ms", *("1", "gradients", "3"), *("b", "2.5")]
    some = counters.climb_table("k", ["ms"], head_dim=64, record=record, numbers=(1,), after=("k",))
    assert [line.split() for line in some.split("\n")] == [["ms"], ["k"], ["1", "one", "idea", "1.25"]]


def test_the_cycles_of_a_warp_for_one_tile() -> None:
    row = {"of": "flash_mma", "stage": "flash_mma: 07_10_swizzle", "kind": "step", "idea": "swizzle", "step": 10}
    stalls = {"issued": 1.0, "fixed latency": 2.0, "barrier": 0.5}
    row |= {"shape": [1, 1, 8, 64], "figures": {"instructions": 400.0}, "stalls": stalls}
    shown = {"fixed latency": "arithmetic"}
    text = counters.cycles_table("flash_mma", (10, 11), shown, head_dim=64, tile=(4, 2), record={"rows": [row]})
    assert [line.split() for line in text.split("\n")] == [["in", "all", "arithmetic"], ["10", "swizzle", "175", "100"]]


def test_peers_are_counted_where_stages_stand_beside_them() -> None:
    found = [(peer.name, case.shape, case.dtype) for peer, case in profile_stages.peer_cases()]
    for d in (64, 128):
        shape = (*counters.SHAPE[:3], d)
        assert [(name, dtype) for name, at, dtype in found if at == shape] == [
            ("SDPA efficient", "float32"),
            ("SDPA flash", "bfloat16"),
            ("SDPA flash", "float16"),
            ("SDPA cuDNN", "bfloat16"),
        ]


def test_gradients_are_counted_each_in_its_ways_beside_pytorchs() -> None:
    found = [(way.name, case.shape, case.dtype) for way, case in profile_stages.gradient_cases()]
    beside = [(peer.name, case.shape, case.dtype) for peer, case in profile_stages.gradient_peer_cases()]
    assert all(case.backward for _, case in profile_stages.gradient_cases())
    for d in (64, 128):
        shape = (*counters.SHAPE[:3], d)
        for name in ("backward", "backward deterministic"):
            assert (name, shape, "float32") in found
        assert ("SDPA efficient", shape, "float32") in beside
        assert ("SDPA cuDNN", shape, "bfloat16") in beside
    assert len(set(beside)) == len(beside) and {dtype for *_, dtype in beside} == {dtype for *_, dtype in found}


def test_gradients_are_in_a_table_where_they_are_named() -> None:
    named = (("SDPA efficient", "peer"), ("backward", "backward"), ("SDPA efficient backward", "backward peer"))
    rows = [{**LOOPS, "stage": name, "kind": kind, "figures": {"ms": 1.0}} for name, kind in named]
    record = record_of(*rows)
    assert [row["stage"] for row in counters.select(record)] == ["SDPA efficient"]
    assert [row["stage"] for row in counters.select(record, ["backward", "SDPA efficient backward"])] == [
        *("backward", "SDPA efficient backward")
    ]


def test_experiments_that_a_notebook_explains_are_counted() -> None:
    """They compile like their stage, from a text of their own."""
    found = {experiment.name: case for experiment, case in profile_stages.experiment_cases()}
    assert found["Q_STRIDE is even"] == Case((1, 1, 4096, 64)) and len(found) == len(set(found))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A profiler that records when it starts and stops, a kernel that records the marks, and no CUDA."""
    seen: list[Any] = []
    profiler = SimpleNamespace(start=lambda: seen.append("start"), stop=lambda: seen.append("stop"))
    kernel = SimpleNamespace(get_function=lambda name: lambda grid, block, args: seen.append((name, grid)))
    fake_cuda = SimpleNamespace(profiler=profiler)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=fake_cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake_cuda)
    monkeypatch.setattr(profile_stages, "step_cases", lambda: [])
    monkeypatch.setattr(profile_stages, "experiment_cases", lambda: [])
    monkeypatch.setattr(profile_stages, "gradient_cases", lambda: [])
    synchronize = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(ncu, "cp", SimpleNamespace(RawModule=lambda **_: kernel, cuda=synchronize))
    return seen


def test_each_run_follows_a_mark_with_its_number(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prepare(name: str, fails: bool, q: Any, *_: Any, **how: Any) -> tuple[Any, Any]:
        def run() -> None:
            if fails and events[-1][0] == ncu.MARK:
                raise RuntimeError("it broke")
            events.append((name, *q.shape))

        return run, q

    class Sample:
        tolerance = 1.0

        def error(self, o: Any) -> float:
            return float("nan") if o.shape[3] == 128 else 0.0

    def inputs(shape: Any, dtype: str) -> SimpleNamespace:
        arrays = (np.empty(shape), None, None)
        return SimpleNamespace(shape=shape, dtype=dtype, device=arrays, torch=arrays, sample=lambda causal: Sample())

    ladder = {
        name: SimpleNamespace(
            prepare=partial(prepare, name, name == "bad"),
            **{"name": name, "file": f"{name}.cu", "idea": "an idea", "error_factor": 1.0, "direction": "forward"},
        )
        for name in ("slow", "bad", "fast", "nearly")
    }
    step = Step("fast", 3, ladder.pop("nearly"), Case((1, 2, 8, 64)))
    cases = [(name, Case((1, 2, 8, d))) for name, d in (("slow", 64), ("bad", 64), ("fast", 64), ("fast", 128))]
    monkeypatch.setattr(profile_stages, "LADDER", ladder)
    monkeypatch.setitem(CLIMBS, "fast", (None,))
    monkeypatch.setattr("helpers.bench.run.Inputs", inputs)
    monkeypatch.setattr(profile_stages, "cases", lambda: cases)
    monkeypatch.setattr(profile_stages, "step_cases", lambda: [(step, Case((1, 2, 8, 64)))])
    monkeypatch.setattr(profile_stages, "elapsed", lambda run: 11.0 if events[-1][0] == "slow" else 1.0)

    @contextlib.contextmanager
    def ready(_: Any, causal: bool) -> Iterator[Any]:
        yield lambda: events.append("peer") or np.empty((1, 1, 1, 64))

    def no_memory() -> Any:
        raise MemoryError("too large")

    product = peers.Roof("product", "float32", (8, 8, 8), "tflops", 1024.0, lambda: lambda: events.append("product"))
    copy = peers.Roof("copy", "float32", (8,), "gbps", 64.0, no_memory)
    monkeypatch.setattr(peers, "TORCH", (peers.Peer("peer", ready), peers.Peer("other", ready, sweep=False)))
    monkeypatch.setattr(peers, "TORCH_ROOFS", (product, copy, replace(copy, quantity="tflops")))
    monkeypatch.setattr(peers, "torch_on_gpu", lambda: SimpleNamespace(__version__="9"))
    monkeypatch.setattr(profile_stages, "ONE_HEAD", ("other",))
    profile_stages.launch_all(tmp_path / "launched.json")

    counted, on = [], False
    for event in events:
        on = event == "start" or (on and event != "stop")
        if on and event != "start":
            counted.append(event)
    mark = [(ncu.MARK, (number,)) for number in range(10)]
    assert counted == [
        *(mark[1], ("slow", 1, 1, 8, 64), mark[2], mark[3], ("fast", 1, 2, 8, 64)),
        *(mark[5], ("nearly", 1, 2, 8, 64), mark[6], "peer", mark[7], "peer", mark[8], "peer", mark[9], "product"),
    ]
    written = json.loads((tmp_path / "launched.json").read_text())
    assert written["peers"] == "PyTorch 9"
    assert [(row["stage"], row.get("error", "")) for row in written["rows"]] == [
        *(("slow", ""), ("bad", "RuntimeError: it broke"), ("fast", "")),
        *(("fast", "WrongOutput: max error nan > 1.0e+00; not timed"), ("fast: nearly", "")),
        *(("peer", ""), ("peer", ""), ("other, one head", ""), ("product", "")),
        ("copy", "MemoryError: too large"),
    ]
    slow, *_, peer, one_head, product_row, _ = written["rows"]
    assert (one_head["kind"], one_head["shape"]) == ("experiment", [1, 1, *counters.SHAPE[2:]])
    assert slow == {
        **{"stage": "slow", "kind": "stage", "dtype": "float32", "shape": [1, 1, 8, 64], "flop": 4.0 * 8 * 8 * 64}
    }
    assert written["rows"][4] == {
        **{
            "stage": "fast: nearly",
            "kind": "step",
            "dtype": "float32",
            "shape": [1, 2, 8, 64],
            "flop": 8.0 * 8 * 8 * 64,
        },
        **{"of": "fast", "step": 3, "idea": "an idea"},
    }
    assert (peer["kind"], peer["dtype"], peer["shape"]) == ("peer", "bfloat16", [*counters.SHAPE[:3], 128])
    assert (product_row["kind"], product_row["shape"], product_row["flop"]) == ("roof", [8, 8, 8], 1024.0)


def test_without_pytorch_the_peers_are_left_out(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_stages, "cases", lambda: [])
    monkeypatch.setattr(peers, "torch_on_gpu", lambda: None)
    profile_stages.launch_all(tmp_path / "launched.json")
    written = json.loads((tmp_path / "launched.json").read_text())
    assert written == {"peers": "left out: no PyTorch that sees the GPU", "rows": []} and events == []


@pytest.mark.parametrize(
    ("name", "names", "wanted"),
    [
        ("mma", (), True),
        ("mma", ("mma",), True),
        ("mma: 07_01_step", ("other", "mma"), True),
        ("mma deterministic", ("mma",), True),
        ("mma_backward", ("mma",), False),
        ("wmma", ("mma",), False),
        ("peer", ("mma",), False),
        ("peer backward", ("mma", "peer backward"), True),
    ],
)
def test_a_row_is_of_the_stages_that_are_named(name: str, names: tuple[str, ...], wanted: bool) -> None:
    assert profile_stages.of_stages({"stage": name}, names) is wanted


def test_rows_measured_again_take_the_place_of_those_before() -> None:
    def rows(*names: str) -> list[dict[str, str]]:
        return [{"stage": name.rstrip("!"), "when": name[-1]} for name in names]

    kept = rows("a", "b: 1", "peer", "b", "c")
    again = rows("b: 1!", "b: 2!", "b!")
    assert profile_stages.merged(kept, again, ["b"]) == rows("a", "b: 1!", "b: 2!", "b!", "peer", "c")
    assert profile_stages.merged(kept, rows("d!"), ["d"]) == [*kept, *rows("d!")]


def test_measure_asks_for_every_kernel_and_writes_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def profile(target: Path, wanted: list[str], kernels: list[str], words: tuple[str, ...], *options: str) -> None:
        asked.update(wanted=wanted, kernels=kernels, options=options, stages=words[3:])
        target.write_text(CSV)
        Path(words[2]).write_text(
            json.dumps({"peers": asked.get("peers", "PyTorch 9"), "rows": asked.get("rows", LAUNCHED)})
        )

    monkeypatch.setattr(ncu, "profile", profile)
    monkeypatch.setattr(ncu, "first_known", lambda metrics: metrics[0])
    monkeypatch.setattr(ncu, "describe", lambda: "some GPU")
    monkeypatch.setattr(
        ncu.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="NVIDIA\nVersion 1\n", stderr="")
    )
    profile_stages.take(tmp_path / "made" / "record.json")
    record = counters.recorded(tmp_path / "made" / "record.json")
    assert record is not None and record["how"]["peers"] == "PyTorch 9" and record["how"]["ncu"] == "Version 1"
    assert record["how"]["device"] == "some GPU"
    assert record["rows"] == profile_stages.rows(LAUNCHED, CSV)
    assert re.match(f"^({asked['kernels'][0]})$", "any_kernel") and asked["options"] == ("--profile-from-start", "off")
    assert "launch__grid_size" in asked["wanted"], "by which the marks are told apart"
    assert not set(ncu.UNASKED) & set(asked["wanted"]) and MS in asked["wanted"]

    # Once more for some of the stages, without PyTorch.
    target, names = tmp_path / "made" / "record.json", sorted({row["stage"] for row in LAUNCHED[:2]})
    asked |= {"peers": "left out", "rows": LAUNCHED[:2]}
    profile_stages.take(target, names)
    again = json.loads(target.read_text())
    assert asked["stages"] == tuple(names) and again["how"]["peers"] == "PyTorch 9"
    assert again["how"]["again"].endswith(f"profile_stages FILE {' '.join(names)}")
    assert again["rows"] == record["rows"]
    monkeypatch.setattr(ncu, "describe", lambda: "another GPU")
    with pytest.raises(records.Refused, match="measured with another device"):
        profile_stages.take(target, names)
    with pytest.raises(records.Refused, match="no stage or peer 'nonsense'"):
        profile_stages.take(target, ["nonsense"])
    with pytest.raises(records.Refused, match="has no rows to keep"):
        profile_stages.take(tmp_path / "none.json", ["naive"])
    assert json.loads(target.read_text()) == again


def test_ncu_is_told_to_leave_the_clocks_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It also gets the metrics that it knows, for the requested kernels."""
    seen = []
    ncu.known_metrics.cache_clear()

    class Done:
        returncode, stderr = 0, ""
        stdout = "dram__bytes_read  bytes read\nsm__warps_active  warps\n"

    monkeypatch.setattr(ncu.subprocess, "run", lambda words, **_: seen.append(words) or Done())
    ncu.profile(tmp_path / "x.csv", [*METRICS, "nobody__knows.sum"], ["one", "two"], ("a.module", "launch"), "--extra")
    words = seen[-1]
    assert words[words.index("--clock-control") + 1] == "none" and "--extra" in words
    assert words[words.index("-k") + 1] == "regex:^(one|two)$"
    metrics = words[words.index("--metrics") + 1].split(",")
    assert metrics == [name for name in METRICS if "time_duration" not in name]
    assert words[-3:] == ["-m", "a.module", "launch"]
    assert ncu.first_known(("nobody__knows.sum", "sm__warps_active.avg", "dram__bytes_read.sum")).startswith("sm__w")

    Done.returncode = 1
    with pytest.raises(RuntimeError, match="ncu exited with code 1"):
        ncu.profile(tmp_path / "x.csv", METRICS, ["one"], ("a.module", "launch"))

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("ncu")

    monkeypatch.setattr(ncu.subprocess, "run", missing)
    ncu.known_metrics.cache_clear()
    with pytest.raises(records.Refused, match="Nsight Compute is needed"):
        ncu.profile(tmp_path / "x.csv", METRICS, ["one"], ("a.module", "launch"))
    ncu.known_metrics.cache_clear()


def test_the_record_is_of_stages_that_are_there() -> None:
    record = counters.recorded()
    if record is None:
        assert "no GPU run is recorded yet" in counters.counters_table()
        pytest.skip("no record yet")
    names = {*LADDER, *(peer.name for peer in peers.TORCH), *(roof.name for roof in peers.TORCH_ROOFS)}
    rows = [row for row in record["rows"] if row["kind"] != "experiment"]  # so steps were named in older records
    gradients = {way.name for way in plan.gradients()} | {f"{peer.name} backward" for peer in peers.TORCH_BACKWARD}
    by_name = [row["stage"] for row in rows if row["kind"] in ("backward", "backward peer")]
    assert set(by_name) <= gradients
    assert {row["stage"] for row in rows if row["stage"] not in by_name and "step" not in row["kind"]} <= names
    for row in rows:
        assert "error" not in row
        assert row["figures"]["dram bytes read"] > 0 and 0 < row["figures"]["occupancy %"] <= 100
    assert all(row["stage"] in counters.counters_table() for row in rows if row["kind"] not in counters.BY_NAME)
    climbs = {row["of"] for row in rows if "step" in row["kind"]}  # its steps: see test_climb_record
    assert {"register_tiles", "flash_wmma", "flash_mma", "hopper"} <= climbs <= set(CLIMBS)


def test_the_roofline_takes_the_bytes_of_its_head_dim() -> None:
    """And of its type: not those of the last row."""
    counts = ((LOOPS, 10.0), (HALF, 25.0), (WIDE, 50.0), (MATMUL, 1.0))
    counted = [
        {**row, "flop": 100.0, "figures": {"dram bytes read": n, "dram bytes written": 0.0}} for row, n in counts
    ]
    roofs = [
        {"kind": "roof", "name": name, "shape": [8, 8, 8], "tflops": 1.0, "gbps": 1.0}
        for name in ("matmul", "matmul float16", "copy")
    ]
    for row, n in counts[:3]:
        result = {**row, "kind": "stage", "name": "loops", "ms": 1.0, "tflops": 0.5}
        record = {"device": {}, "results": [result, *roofs]}
        picture = show.measured_roofline(row["shape"], dtypes=[row["dtype"]], record=record, counted={"rows": counted})
        assert f": {100 / n:g} FLOP per byte (counted)" in picture.alt

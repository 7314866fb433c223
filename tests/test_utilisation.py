"""What is read out of Nsight Compute's CSV, and the recorded table. Nothing here needs a GPU."""

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

from helpers.draw import show
from helpers.ladder.stages import LADDER
from helpers.record import counters as utilisation
from helpers.record import peers
from helpers.record import xray_vs_ncu as hardware
from helpers.record.cases import Case
from helpers.record.experiments import CLIMB, CLIMB_07, Experiment

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
    return (utilisation.MARK, "1,000", "0", "1.5", "16", str(number))


def csv_of(*launches: tuple[str, ...], metrics: dict[str, str] = METRICS) -> str:
    """Nsight Compute's raw page: the kernel's name and the figures of each launch."""
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
    ("template<__half>(int)", "3,000", "8", "30", "128", "512"),  # a name says nothing
    ("prepare", "4", "8", "n/a", "16", "1"),
)


def test_a_run_is_what_stands_between_two_marks() -> None:
    loops, broken, template, flash, matmul = utilisation.rows(LAUNCHED, CSV)
    assert loops["launches"] == 2 and loops["kernels"] == ["loops"]
    assert template["launches"] == 1 and template["figures"]["ms"] == 2.0 and template["figures"]["registers"] == 255
    assert flash["launches"] == 3 and flash["kernels"] == ["prepare", "template<__half>"]
    assert broken["figures"] == {} and broken["error"] == "RuntimeError: no"
    assert matmul["figures"] == {} and matmul["error"] == "no launch of it was counted"
    assert [row["flop"] for row in (loops, flash, matmul)] == [100, 100, 1024]


def test_counts_are_added_and_shares_averaged_by_time() -> None:
    """And what one launch has, the longest one tells."""
    loops, _, _, flash, _ = utilisation.rows(LAUNCHED, CSV)
    occupancy = (25.5 + 3 * 12.5) / 4
    assert loops["figures"] == {
        **{"ms": 4.0, "dram bytes read": 3072, "occupancy %": occupancy, "registers": 80, "blocks": 64}
    }
    assert flash["figures"]["registers"] == 128 and flash["figures"]["blocks"] == 512
    assert flash["figures"]["dram bytes read"] == 24 and "occupancy %" not in flash["figures"]  # n/a is no number


def test_kernels_before_the_first_mark_are_nobodys() -> None:
    (row,) = utilisation.rows([LOOPS], csv_of(("loops", "1", "1", "1", "1", "1")))
    assert row["launches"] == 0 and row["figures"] == {} and "error" in row


def test_the_first_known_metric_of_a_figure_is_taken() -> None:
    first, second = utilisation.FIGURES["tensor pipe %"][1:3]
    metrics = {second: "%", first: "%", "launch__grid_size": ""}
    text = csv_of((utilisation.MARK, "0", "0", "1"), ("loops", "1", "2", "64"), metrics=metrics)
    assert utilisation.rows([LOOPS], text)[0]["figures"]["tensor pipe %"] == 2.0


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
        ({"stages": ["matmul", "SDPA flash"], "head_dim": 128}, [4]),  # a product has no head_dim
        ({"dtype": "bfloat16"}, [3]),
        ({"stages": ["nobody"]}, []),
    ],
)
def test_rows_are_chosen_by_name_head_dim_and_type(options: dict[str, Any], expected: list[int]) -> None:
    record = record_of(LOOPS, HALF, WIDE, FLASH, MATMUL)
    assert [row["figures"]["ms"] for row in utilisation.select(record, **options)] == expected


def test_the_table_has_few_columns_side_by_side() -> None:
    record = record_of(LOOPS, HALF, WIDE, FLASH, MATMUL, {**BROKEN, "figures": {}}, TEMPLATE)
    text = utilisation.table(record, head_dim="all", dtype="all")
    blocks = text.split("\n\n")
    assert [block.split("\n")[0].split() for block in blocks[:2]] == [
        ["loops", "loops", "loops", "SDPA", "flash", "matmul"],
        ["template"],
    ]
    assert max(map(len, text.split("\n"))) <= 120 and "tensor pipe" not in text
    assert ["head_dim", "64", "64", "128", "64"] in [line.split() for line in blocks[0].split("\n")]
    assert blocks[2] == "broken: RuntimeError: no"
    assert "broken" not in utilisation.table(record, ["loops"])


def test_a_table_of_one_shape_does_not_name_its_head_dim() -> None:
    """Nor does a record of before there were peers and kinds."""
    expected = [["loops"], ["float32"], ["heads", "2"], ["ms", "0"], ["registers", "80"]]
    for row in (LOOPS, OLD):
        assert [line.split() for line in utilisation.table(record_of(row)).split("\n")] == expected


def test_a_csv_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table"):
        utilisation.rows(LAUNCHED, "==ERROR== no permission")


def test_each_stage_is_counted_in_its_first_type() -> None:
    """At d = 64; from 04 on at 128 too; WMMA in both half types."""
    found = [(name, case.shape[3], case.dtype) for name, case in utilisation.cases()]
    assert all(case.shape[:3] == utilisation.SHAPE[:3] for _, case in utilisation.cases())
    first = {name: dtype for name, _, dtype in reversed(found)}
    for name, stage in LADDER.items():
        if name in first:
            assert (first[name] == "float32") == ("float32" in stage.dtypes)
            types = ["bfloat16", "float16"] if name == "flash_wmma" else [first[name]]
            dims = [64, 128] if stage.number >= 4 else [64]
            assert [row for row in found if row[0] == name] == [(name, d, dtype) for d in dims for dtype in types]


def test_the_steps_are_counted_where_they_are_timed() -> None:
    found = [(experiment.name, case.shape[3], case.dtype) for experiment, case in utilisation.experiment_cases()]
    assert [row for row in found if row[2] == "float32"] == [(step.name, 64, "float32") for step in CLIMB]
    if LADDER["flash_mma"].why_not(head_dim=128, dtype="bfloat16") is None:
        assert [row for row in found if row[2] != "float32"] == [(step.name, 128, "bfloat16") for step in CLIMB_07]


def test_steps_are_a_run_a_line() -> None:
    def row(name: str, kind: str, **figures: float) -> dict[str, Any]:
        return {"stage": name, "kind": kind, "dtype": "float32", "shape": [1, 1, 8, 64], "figures": figures}

    record = {"rows": [row("k: one", "experiment", registers=40, ms=1.25), row("k", "stage", registers=8)]}
    text = utilisation.steps(
        {"first": "k: one", "last": "k", "other": "none"}, ["registers", "ms"], head_dim=64, record=record
    )
    assert [line.split() for line in text.split("\n")] == [
        *(["registers", "ms"], ["first", "40", "1.25"], ["last", "8"], ["other"])
    ]
    assert utilisation.select(record) == [record["rows"][1]]
    assert utilisation.steps({"": "none"}, ["ms"], head_dim=64, record={"rows": []}).split() == ["ms"]


def test_peers_are_counted_where_stages_stand_beside_them() -> None:
    found = [(peer.name, case.shape, case.dtype) for peer, case in utilisation.peer_cases()]
    for d in (64, 128):
        shape = (*utilisation.SHAPE[:3], d)
        assert [(name, dtype) for name, at, dtype in found if at == shape] == [
            ("SDPA efficient", "float32"),
            ("SDPA flash", "bfloat16"),
            ("SDPA flash", "float16"),
            ("SDPA cuDNN", "bfloat16"),
        ]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A profiler that notes when it starts and stops, a kernel that notes the marks, and no CUDA."""
    seen: list[Any] = []
    profiler = SimpleNamespace(start=lambda: seen.append("start"), stop=lambda: seen.append("stop"))
    kernel = SimpleNamespace(get_function=lambda name: lambda grid, block, args: seen.append((name, grid)))
    fake_cuda = SimpleNamespace(profiler=profiler)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=fake_cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake_cuda)
    monkeypatch.setattr(utilisation, "ON_GPU", True)
    monkeypatch.setattr(utilisation, "experiment_cases", lambda: [])
    synchronize = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(utilisation, "cp", SimpleNamespace(RawModule=lambda **_: kernel, cuda=synchronize))
    return seen


def test_each_run_follows_a_mark_with_its_number(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prepare(name: str, fails: bool, q: Any, *_: Any, source: Any, sizes: Any) -> tuple[Any, Any]:
        def run() -> None:
            if fails and events[-1][0] == utilisation.MARK:
                raise RuntimeError("it broke")
            events.append((source or name, *q.shape))
            assert sizes == ({"BLOCK_M": 8} if source else None)

        return run, q

    class Sample:
        tolerance = 1.0

        def error(self, o: Any) -> float:
            return float("nan") if o.shape[3] == 128 else 0.0

    inputs = lambda shape, dtype: SimpleNamespace(device=(np.empty(shape), None, None), sample=Sample)  # noqa: E731
    ladder = {
        name: SimpleNamespace(prepare=partial(prepare, name, name == "bad"), file="fast.cu")
        for name in ("slow", "bad", "fast")
    }
    step = Experiment("a step", "fast", (("fast", "faster"),), sizes=({"BLOCK_M": 8},))
    cases = [(name, Case((1, 2, 8, d))) for name, d in (("slow", 64), ("bad", 64), ("fast", 64), ("fast", 128))]
    monkeypatch.setattr(utilisation, "LADDER", ladder)
    monkeypatch.setattr(utilisation, "Inputs", inputs)
    monkeypatch.setattr(utilisation, "cases", lambda: cases)
    monkeypatch.setattr(utilisation, "experiment_cases", lambda: [(step, Case((1, 2, 8, 64)))])
    monkeypatch.setattr(utilisation.kernel, "source", lambda file: file.removesuffix(".cu"))
    monkeypatch.setattr(utilisation, "elapsed", lambda run: 11.0 if events[-1][0] == "slow" else 1.0)

    @contextlib.contextmanager
    def ready(_: Any, causal: bool) -> Iterator[Any]:
        yield lambda: events.append("peer")

    def no_memory() -> Any:
        raise MemoryError("too large")

    product = peers.Roof("product", "float32", (8, 8, 8), "tflops", 1024.0, lambda: lambda: events.append("product"))
    copy = peers.Roof("copy", "float32", (8,), "gbps", 64.0, no_memory)
    monkeypatch.setattr(peers, "TORCH", (peers.Peer("peer", ready), peers.Peer("other", ready, sweep=False)))
    monkeypatch.setattr(peers, "TORCH_ROOFS", (product, copy, replace(copy, quantity="tflops")))
    monkeypatch.setattr(peers, "torch_on_gpu", lambda: SimpleNamespace(__version__="9"))
    utilisation.launch_all(tmp_path / "launched.json")

    counted, on = [], False
    for event in events:
        on = event == "start" or (on and event != "stop")
        if on and event != "start":
            counted.append(event)
    mark = [(utilisation.MARK, (number,)) for number in range(10)]
    wide = ("fast", 1, 2, 8, 128)
    assert counted == [
        *(mark[1], ("slow", 1, 1, 8, 64), mark[2], mark[3], ("fast", 1, 2, 8, 64), mark[4], wide),
        *(mark[5], ("faster", 1, 2, 8, 64), mark[6], "peer", mark[7], "peer", mark[8], "product"),
    ]
    written = json.loads((tmp_path / "launched.json").read_text())
    assert written["peers"] == "PyTorch 9"
    assert [(row["stage"], row.get("error", "")) for row in written["rows"]] == [
        *(("slow", ""), ("bad", "RuntimeError: it broke"), ("fast", "")),
        *(("fast", "AssertionError: max error nan > 1.0e+00"), ("fast: a step", "")),
        *(("peer", ""), ("peer", ""), ("product", "")),
        ("copy", "MemoryError: too large"),
    ]
    slow, *_, peer, product_row, _ = written["rows"]
    assert slow == {
        **{"stage": "slow", "kind": "stage", "dtype": "float32", "shape": [1, 1, 8, 64], "flop": 4.0 * 8 * 8 * 64}
    }
    assert written["rows"][4]["kind"] == "experiment"
    assert (peer["kind"], peer["dtype"], peer["shape"]) == ("peer", "bfloat16", [*utilisation.SHAPE[:3], 128])
    assert (product_row["kind"], product_row["shape"], product_row["flop"]) == ("roof", [8, 8, 8], 1024.0)


def test_without_pytorch_the_peers_are_left_out(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(utilisation, "cases", lambda: [])
    monkeypatch.setattr(peers, "torch_on_gpu", lambda: None)
    utilisation.launch_all(tmp_path / "launched.json")
    written = json.loads((tmp_path / "launched.json").read_text())
    assert written == {"peers": "left out: no PyTorch that sees the GPU", "rows": []} and events == []


def test_measure_asks_for_every_kernel_and_writes_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def ncu(target: Path, wanted: list[str], kernels: list[str], words: tuple[str, ...], *options: str) -> None:
        asked.update(wanted=wanted, kernels=kernels, options=options)
        target.write_text(CSV)
        Path(words[-1]).write_text(json.dumps({"peers": "PyTorch 9", "rows": LAUNCHED}))

    monkeypatch.setattr(hardware, "ncu", ncu)
    monkeypatch.setattr(hardware, "first_known", lambda metrics: metrics[0])
    monkeypatch.setattr(utilisation, "describe", lambda: "some GPU")
    monkeypatch.setattr(
        utilisation.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="NVIDIA\nVersion 1\n", stderr="")
    )
    utilisation.measure(tmp_path / "made" / "record.json")
    record = utilisation.recorded(tmp_path / "made" / "record.json")
    assert record is not None and record["how"]["peers"] == "PyTorch 9" and record["how"]["ncu"] == "Version 1"
    assert record["rows"] == utilisation.rows(LAUNCHED, CSV)
    assert re.match(f"^({asked['kernels'][0]})$", "any_kernel") and asked["options"] == ("--profile-from-start", "off")
    assert "launch__grid_size" in asked["wanted"], "by which the marks are told apart"
    assert not set(utilisation.UNASKED) & set(asked["wanted"]) and MS in asked["wanted"]


def test_ncu_is_told_to_leave_the_clocks_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And is asked for the metrics that it knows, of the kernels that are wanted."""
    seen = []
    hardware.known_metrics.cache_clear()

    class Done:
        returncode, stderr = 0, ""
        stdout = "dram__bytes_read  bytes read\nsm__warps_active  warps\n"

    monkeypatch.setattr(hardware.subprocess, "run", lambda words, **_: seen.append(words) or Done())
    hardware.ncu(tmp_path / "x.csv", [*METRICS, "nobody__knows.sum"], ["one", "two"], ("a.module", "launch"), "--extra")
    words = seen[-1]
    assert words[words.index("--clock-control") + 1] == "none" and "--extra" in words
    assert words[words.index("-k") + 1] == "regex:^(one|two)$"
    metrics = words[words.index("--metrics") + 1].split(",")
    assert metrics == [name for name in METRICS if "time_duration" not in name]
    assert words[-3:] == ["-m", "a.module", "launch"]
    assert hardware.first_known(("nobody__knows.sum", "sm__warps_active.avg", "dram__bytes_read.sum")).startswith(
        "sm__w"
    )

    Done.returncode = 1
    with pytest.raises(RuntimeError, match="ncu ended with 1"):
        hardware.ncu(tmp_path / "x.csv", METRICS, ["one"], ("a.module", "launch"))

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("ncu")

    monkeypatch.setattr(hardware.subprocess, "run", missing)
    hardware.known_metrics.cache_clear()
    with pytest.raises(RuntimeError, match="Nsight Compute is needed"):
        hardware.ncu(tmp_path / "x.csv", METRICS, ["one"], ("a.module", "launch"))
    hardware.known_metrics.cache_clear()


def test_the_record_is_of_stages_that_are_there() -> None:
    record = utilisation.recorded()
    if record is None:
        assert "no GPU run is recorded yet" in utilisation.table()
        pytest.skip("no record yet")
    steps = {f"{step.stage}: {step.name}" for step in (*CLIMB, *CLIMB_07)}
    names = {*LADDER, *(peer.name for peer in peers.TORCH), *(roof.name for roof in peers.TORCH_ROOFS)}
    assert steps <= {row["stage"] for row in record["rows"]} <= names | steps
    for row in record["rows"]:
        assert "error" not in row
        assert row["figures"]["dram bytes read"] > 0 and 0 < row["figures"]["occupancy %"] <= 100
    assert all(row["stage"] in utilisation.table() for row in record["rows"] if row["stage"] in names)


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

"""What is recorded of stage 10 on a GPU: the texts that are launched there, run here, and how a record is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import device
from helpers.attention import compile_report, kernel
from helpers.attention.ladder import limits
from helpers.bench import records
from helpers.bench.cases import Case
from helpers.bench.studies import hopper
from helpers.draw import hopper as pictures
from helpers.draw import spans
from helpers.lesson.shortcuts import look

TINY = Case((1, 3, 400, 64), "bfloat16")
SMALL = {"sizes": (("BLOCK_M", 128), ("BLOCK_N", 16))}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if device.ON_GPU:
        pytest.skip("what is recorded on a GPU makes its arrays there")
    monkeypatch.setattr(limits, "multiprocessors", lambda: 6)


def test_a_traced_block_notes_its_clocks_in_their_order() -> None:
    found = hopper.trace(hopper.Work(TINY, SMALL["sizes"]))
    assert found["stages"] == 2 and len(found["consumers"]) == 2
    for consumer in found["consumers"]:
        assert len(consumer) == hopper.TRACED_TILES
        for step in consumer[1:]:
            assert len(step) == hopper.STAMPS and step == sorted(step) and step[0] > 0
    for asked, full in zip(found["asked"], found["full"], strict=True):
        assert all(0 <= begin < end for begin, end in zip(asked, full, strict=True))
    rows = spans.clocks_as_spans(found, 8, 12)
    assert list(rows)[:4] == ["K, stage 0", "K, stage 1", "V, stage 0", "V, stage 1"] and len(rows) == 10
    assert all(0 <= begin < end for found in rows.values() for begin, end, _ in found)
    drawn = pictures.roles(found, 8, 9)
    words = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert {"full", "empty", "turn", "K", "V"} <= set(words), words
    assert "key tiles 8 to 9" in repr(drawn) and "consumer 2: weights" in repr(drawn)


def test_the_strides_of_a_descriptor() -> None:
    drawn = pictures.descriptor_panels(131072, 20480, 1024, rows=160, columns=128)
    words = [text.get_text() for text in drawn.figure.axes[0].texts]
    first_rows = [f"{131072 + panel * 20480 + group * 1024:,}" for panel in (0, 1) for group in (0, 1)]
    assert set(first_rows) <= set(words) and words.count("keys 16 to 159") == 2
    assert "20,480" in repr(drawn) and "+ 128 in the descriptor" in words[-1]


def test_an_xrays_events_as_spans() -> None:
    """Three tiles of keys: each is copied once, is full once, and has an S and an O of each consumer."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 64)).astype(np.float16) for n in (128, 48, 48))
    report = look("hopper", q, k, v, sizes={"BLOCK_M": 128, "BLOCK_N": 16})
    rows = spans.events_as_spans(report.events)
    for buffer, tiles in (("K, stage 0", 2), ("K, stage 1", 1), ("V, stage 0", 2), ("Q 1", 1), ("Q 2", 1)):
        kinds = [what for *_, what in rows[buffer]]
        assert kinds == ["copy in flight", "full"] * tiles, buffer
        times = [time for begin, end, _ in rows[buffer] for time in (begin, end)]
        assert times == sorted(times), buffer
    for consumer in (1, 2):
        assert [len(rows[f"consumer {consumer}: {part}"]) for part in "SO"] == [3, 3]
        assert {what for *_, what in rows[f"consumer {consumer}: warps"]} == {"waits", "weights"}
    assert "K, stage 0: 4 spans" in repr(spans.spans(rows, xlabel="order"))


def test_changes_are_compared_with_the_kernel_as_it_is() -> None:
    tiny = Case((1, 4, 200, 64), "bfloat16")  # of two tiles of rows and two of keys, neither of them full
    rows = list(hopper.changes([(tiny, (hopper.AS_IT_IS, *hopper.IDEAS))], rounds=1))
    assert [row["name"] for row in rows][:2] == ["as it is", "no turns"] and rows[0]["speed"] == 1
    causal = Case((1, 5, 300, 64), "bfloat16", causal=True)
    assert len(list(hopper.changes([(causal, (hopper.AS_IT_IS, *hopper.ORDERS))], rounds=1))) == 4
    wrong = hopper.Change("no exp2", next(idea for idea in hopper.IDEAS if idea.name == "no exp2").edits)
    with pytest.raises(ValueError, match="no exp2 at 1x4x200x64 bfloat16: differs by"):
        list(hopper.changes([(tiny, (hopper.AS_IT_IS, wrong))], rounds=1))


def test_a_gpu_that_becomes_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs run, on the CPU too; that one's figures say nothing."""
    assert hopper.mma_loop(warps=1, steps=1, blocks=1)["flop_per_clock"] > 0
    monkeypatch.setattr(hopper, "LONG_128", TINY)
    rows = hopper.warming(seconds=0.01, rest=0, batch=1)
    assert rows and all(row["tflops"] > 0 for row in rows)
    picture = hopper.warming_picture({"warming": [row | {"sm_mhz": 1980.0, "watts": 700.0} for row in rows]})
    assert "TFLOP/s in 0 s" in picture.alt


def test_clocks_of_both_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "BESIDE_TILES", ((64, 128, 16),))
    rows = list(hopper.beside(steps=2))
    assert len(rows) == len(hopper.TOGETHER)
    for row, (active, _) in zip(rows, hopper.TOGETHER, strict=True):
        assert (row["products"] is None, row["weights"] is None) == (not active & 1, not active & 2)
        assert all(row[name] is None or row[name] > 0 for name in ("products", "weights"))


def test_every_text_that_is_launched_compiles_without_spills_and_warnings() -> None:
    texts = {(source, defines["HEAD_DIM"]): (source, name, defines) for source, name, defines in hopper.compilations()}
    for source, name, defines in texts.values():
        try:
            report = compile_report.compile_report(source, defines, "sm_90a", name=name)
        except compile_report.NvrtcMissing as error:
            pytest.skip(str(error))
        assert report.spill_bytes == 0 and not report.warnings, (defines, str(report))


def record() -> dict[str, Any]:
    of_128 = {"shape": [2, 16, 8192, 128], "causal": False, "right": True, "ms": 1.0, "tflops": 600.0}
    speeds = {"speed": 0.92, "speed_min": 0.9, "speed_max": 0.94}
    return {
        "device": "a GPU",
        "timelines": [],
        "clocks": [
            {"head_dim": 128, "block_n": 160, "part": "maxima", "products": 1355.2, "weights": None},
            {"head_dim": 128, "block_n": 160, "part": "maxima", "products": 1388.0, "weights": 300.0},
        ],
        "changes": [{**of_128, "name": "no turns", **speeds}, {**of_128, "name": "no exp2", **speeds, "right": False}],
    }


def ladder_record(least: float) -> dict[str, Any]:
    case = {"shape": [2, 16, 8192, 128], "causal": False, "dtype": "bfloat16", "tflops": 600.0}
    rows = [case | {"kind": "stage", "name": "hopper"}, case | {"kind": "peer", "name": "SDPA flash"}]
    rows.append(case | {"kind": "peer", "name": "SDPA cuDNN", "gain": [1.2, least, 1.21], "fastest": "hopper"})
    return {"device": {}, "results": rows}


def test_tables() -> None:
    text = hopper.table(record())
    assert "no turns" in text and "0.92× (0.90 to 0.94)\n" in text and "(0.90 to 0.94)  times only" in text
    assert hopper.peers_table(ladder_record(1.19)).splitlines()[1].split()[-6:] == [
        "600",
        "TFLOP/s",
        "1.20×",
        "(1.19",
        "to",
        "1.21)",
    ]
    assert text.splitlines()[-2].split()[-3:] == ["products", "alone", "1355"]
    assert text.splitlines()[-1].split()[-5:] == ["maxima", "beside", "products", "1388", "300"]


def test_where_it_is_not_ahead() -> None:
    assert hopper.not_ahead(ladder_record(1.19)) == []
    assert hopper.not_ahead(ladder_record(0.98)) == ["d = 128, N = 8192: SDPA cuDNN, 1.20× (0.98 to 1.21)"]


def test_without_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(hopper, "recorded", lambda: None)
    monkeypatch.setattr(hopper.reading, "results_of", lambda record: [])
    assert (
        hopper.table() == hopper.clocks_table() == hopper.changes_table(64) == hopper.peers_table() == records.NO_RECORD
    )
    assert hopper.not_ahead() == []
    assert hopper.timeline(64) is None and hopper.change("no turns", 64) is None


def test_the_edits_are_those_of_todays_kernel() -> None:
    assert hopper.traced(kernel.source(hopper.STAGE.file)).count("STAMP(") == 8


def test_the_table_of_tiles_spreads_the_work() -> None:
    """N = 512, causal: 4 tiles of rows a head, which see 1 to 4 key tiles; 132 is a multiple of 4."""
    case = Case((32, 16, 512, 128), "bfloat16", causal=True)
    ours, by_rows = hopper.work_of_blocks(case), hopper.work_of_blocks(case, hopper.row_order)
    assert ours.sum() == by_rows.sum() == 32 * 16 * (1 + 2 + 3 + 4)
    assert by_rows.max() == 16 * 4 and ours.max() < 1.1 * ours.mean()

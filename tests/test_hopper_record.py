"""Records of the stage hopper: the sources for a GPU also run here, and a record is read."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import needs_nvrtc

from helpers import device
from helpers.attention import compile_report, kernel
from helpers.attention.ladder import limits
from helpers.attention.ladder.stages.hopper import hopper_shared_bytes
from helpers.bench import records
from helpers.bench.cases import Case
from helpers.bench.studies import hopper
from helpers.device import cp
from helpers.draw import hopper as pictures
from helpers.draw import spans

TINY = Case((1, 3, 400, 64), "bfloat16")
SMALL = {"sizes": (("BLOCK_M", 128), ("BLOCK_N", 16))}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if device.ON_GPU:
        pytest.skip("what is recorded on a GPU makes its arrays there")
    monkeypatch.setattr(limits, "multiprocessors", lambda: 6)


@pytest.mark.exhaustive(one_of_each=lambda stages, faster: (stages == 1, faster))
@pytest.mark.parametrize(("stages", "faster"), [(1, 0), (2, 12), (4, 0), (2, 0), (3, 0)])
def test_a_traced_block_notes_its_clocks_in_their_order(
    stages: int, faster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a clock that is faster by a factor of 2^faster: a launch lasts longer than 32 bits of it."""
    traced = hopper.traced
    its_clock = rf"(clock64() << {faster})"
    monkeypatch.setattr(hopper, "traced", lambda source: re.sub(r"\bclock(64)?\(\)", its_clock, traced(source)))
    found = hopper.trace(hopper.Work(TINY, (*SMALL["sizes"], ("STAGES", stages))))
    assert found["stages"] == stages and len(found["consumers"]) == 2
    for consumer, waits_for_v in zip(found["consumers"], found["waits_for_v"], strict=True):
        assert len(consumer) == len(waits_for_v) == hopper.TRACED_TILES
        for step, v in zip(consumer[1:], waits_for_v[1:], strict=True):
            clocks = [*step[:2], *v, *step[2:]]
            assert len(step) == hopper.STAMPS and clocks == sorted(clocks) and step[0] > 0
    for i, (asked, full) in enumerate(zip(found["asked"], found["full"], strict=True)):
        assert all(0 <= begin < end for begin, end in zip(asked, full, strict=True))
        for tile in range(1, hopper.TRACED_TILES - stages - 1):  # a stage is requested again when all have read it
            read = max(consumer[tile + i][3 if i == 0 else 5] for consumer in found["consumers"])
            assert asked[tile + stages] > read
    assert found["full"][0][-1] > 2**32 or not faster
    rows = spans.clocks_as_spans(found, 8, 12)
    of_ring = [f"{which}, stage {stage}" for which in "KV" for stage in range(stages)]
    assert list(rows)[: len(of_ring)] == of_ring and len(rows) == len(of_ring) + 6
    assert all(0 <= begin < end for found in rows.values() for begin, end, _ in found)
    drawn = pictures.roles(found, 8, 9)
    words = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert {"full", "empty", "K", "V"} <= set(words), words
    assert "key tiles 8 to 9" in repr(drawn) and "consumer 2: weights" in repr(drawn)


def test_a_wait_for_v_is_a_wait_of_the_warps() -> None:
    """A record without these clocks counts them with those of starting products."""
    timeline = {
        "stages": 1,
        "consumers": [[[0] * 7, [0, 10, 50, 60, 70, 80, 90]]],
        "asked": [[0, 0], [0, 0]],
        "full": [[1, 1], [1, 1]],
    }
    before = spans.clocks_as_spans(timeline, 1, 1)
    now = spans.clocks_as_spans({**timeline, "waits_for_v": [[[0, 0], [20, 40]]]}, 1, 1)
    warps, o = "consumer 1: warps", "consumer 1: O"
    assert before[warps][:3] == [(0, 10, "waits"), (10, 50, "starts products"), (50, 60, "waits")]
    started = [(10, 20, "starts products"), (20, 40, "waits"), (40, 50, "starts products")]
    assert now[warps] == [before[warps][0], *started, *before[warps][2:]]
    assert (before[o], now[o]) == ([(10, 80, "O in flight")], [(40, 80, "O in flight")])


def test_four_stages_fit_the_rings_tile_and_no_larger_one() -> None:
    most = 227 * 1024
    rings = [work.defines for work in hopper.RINGS]
    assert [each["STAGES"] for each in rings] == [1, 2, 3, 4]
    sizes = {name for each in rings for name in each.items() if name[0] != "STAGES"}
    assert len(sizes) == 3, "they differ in nothing else"
    assert hopper_shared_bytes({"HEAD_DIM": 128, **rings[-1]}) <= most
    assert hopper_shared_bytes({"HEAD_DIM": 128, **rings[-1], "BLOCK_N": rings[-1]["BLOCK_N"] + 16}) > most


def test_sections_are_measured_alone_and_the_others_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hopper, "compilations", lambda sections: [])
    for name in hopper.SECTIONS:
        monkeypatch.setitem(hopper.SECTIONS, name, lambda name=name: [name])
    path = tmp_path / "hopper.json"
    assert hopper.take(path, ["rings"]) == {"device": device.describe(), "rings": ["rings"]}
    records.save(path, {"device": device.describe(), "rings": [], "power": [1]})
    hopper.take(path, ["rings"])
    assert records.load(path) == {"device": device.describe(), "rings": ["rings"], "power": [1]}
    assert set(hopper.take(path)) == {"device", *hopper.SECTIONS}
    with pytest.raises(SystemExit, match="hopper has no part 'ring'; its parts are timelines, rings"):
        hopper.take(path, ["ring"])
    records.save(path, {"device": "another"})
    with pytest.raises(SystemExit, match="is of another; this is"):
        hopper.take(path, ["rings"])


def test_changes_are_compared_with_the_kernel_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "multiprocessors", lambda: 3)  # at least one block takes two tiles
    tiny = Case((1, 2, 200, 64), "bfloat16")  # two tiles of rows and two of keys, none of them full
    rows = list(hopper.changes([(tiny, (hopper.AS_IT_IS, *hopper.IDEAS))], rounds=1))
    assert [row["name"] for row in rows][:2] == ["as it is", "no turns"] and rows[0]["speed"] == 1
    causal = Case((1, 3, 300, 64), "bfloat16", causal=True)
    assert len(list(hopper.changes([(causal, (hopper.AS_IT_IS, *hopper.ORDERS))], rounds=1))) == 4
    wrong = hopper.Change("no exp2", next(idea for idea in hopper.IDEAS if idea.name == "no exp2").edits)
    with pytest.raises(ValueError, match="no exp2 at 1x2x200x64 bfloat16: differs by"):
        list(hopper.changes([(tiny, (hopper.AS_IT_IS, wrong))], rounds=1))


@pytest.mark.parametrize("dtype", hopper.FORMS)
def test_mma_sync_in_a_loop(dtype: str) -> None:
    """It also runs on the CPU, whose figures say nothing."""
    assert hopper.mma_loop(warps=1, dtype=dtype, steps=1, blocks=1)["flop_per_clock"] > 0


def test_the_share_of_what_mma_sync_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"dtype": "tf32", "flop_per_clock": n} for n in (512, 1024)]
    monkeypatch.setattr(hopper, "recorded", lambda: {"mma_loop": rows})
    assert hopper.mma_share("tf32") == 0.5 and hopper.mma_share() is None


def test_power_by_the_numbers_that_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONG_128", "LONG_64"):
        monkeypatch.setattr(hopper, name, Case((1, 1, 130, 64), "bfloat16"))
    rows = hopper.power(seconds=0.01, rest=0, batch_s=0.01)
    assert {row["numbers"] for row in rows} == set(hopper.NUMBERS)
    assert all(row["tflops"] > 0 and row["mhz"] > 0 and row["share"] > 0 for row in rows)
    kept = cp.asarray(np.array([[5, 7], [2_000_005, 1_000_007]]))  # 2e6 clocks in 1 ms
    module = SimpleNamespace(get_global=lambda name: kept.data)
    assert hopper.own_mhz(SimpleNamespace(module=module)) == 2000
    assert not cp.asnumpy(kept).any(), "the next launches are counted from 0"
    assert hopper.share(4096 * 132 * 1e-3, 132, 2000) == 0.5


def test_power_as_a_picture_and_a_table() -> None:
    row = {"shape": [1, 1, 1, 128], "numbers": "normal", "s": 1.0, "tflops": 700.0, "mhz": 1500.0, "share": 0.95}
    rows = [row, {**row, "s": 8.0, "mhz": 1340.0, "sm_mhz": 1980.0, "watts": 690.0}]
    picture = hopper.power_picture(record={"power": rows})
    assert "from 1500 to 1340 MHz, from 95.0% to 95.0%" in picture.alt
    line = hopper.power_table({"power": rows}).splitlines()[1]
    assert line.split() == ["d", "=", "128,", "normal", "700", "1340", "95.0%", "690"]


def test_clocks_of_both_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "OVERLAP_TILES", ((64, 128, 16),))
    rows = list(hopper.overlap(steps=2))
    assert len(rows) == len(hopper.TOGETHER)
    for row, (active, _) in zip(rows, hopper.TOGETHER, strict=True):
        assert (row["products"] is None, row["weights"] is None) == (not active & 1, not active & 2)
        assert all(row[name] is None or row[name] > 0 for name in ("products", "weights"))


@pytest.mark.exhaustive  # two dozen kernels, through ptxas; those that are not ablations are compiled in test_hopper.py
@needs_nvrtc
def test_every_text_that_is_launched_compiles_without_spills_and_warnings() -> None:
    texts = {
        (source, defines["HEAD_DIM"], defines.get("STAGES")): (source, name, defines)
        for source, name, defines in hopper.compilations()
    }
    for source, name, defines in texts.values():
        report = compile_report.compile_report(source, defines, "sm_90a", name=name)
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


def test_tables() -> None:
    text = hopper.table(record())
    assert "no turns" in text and "0.92× (0.90 to 0.94)\n" in text and "(0.90 to 0.94)  times only" in text
    assert text.splitlines()[-2].split()[-3:] == ["products", "alone", "1355"]
    assert text.splitlines()[-1].split()[-5:] == ["maxima", "with", "products", "1388", "300"]


def test_without_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(hopper, "recorded", lambda: None)
    assert hopper.table() == hopper.clocks_table() == hopper.ablations_table(64) == records.NO_RECORD
    assert hopper.timeline(64) is None and hopper.ablation("no turns", 64) is None
    assert hopper.power_table() == records.NO_RECORD and hopper.mma_share() is None
    assert hopper.rings() == {}


def test_rings_are_those_of_the_record_or_the_stages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"shape": [2, 16, 8192, 128], "stages": 2}
    monkeypatch.setattr(hopper, "recorded", lambda: {"timelines": [own]})
    assert hopper.rings() == {"STAGES = 2": own}
    rings = [own | {"stages": stages} for stages in (1, 3)]
    monkeypatch.setattr(hopper, "recorded", lambda: {"timelines": [own], "rings": rings})
    assert hopper.rings() == {"STAGES = 1": rings[0], "STAGES = 3": rings[1]}


def test_the_waits_of_rings() -> None:
    steps = [[0] * 7, *([at, at + 5, at + 50, at + 60, at + 70, at + 77, at + 90] for at in (0, 100, 200))]
    waits_for_v = [[0, 0], *([at + 8, at + 41] for at in (0, 100, 200))]
    ring = {"sizes": {"BLOCK_N": 80}, "stages": 1, "consumers": [steps], "waits_for_v": [waits_for_v]}
    text = hopper.table({"device": "a GPU", "rings": [ring]})
    assert text.splitlines()[-1].split()[-6:] == ["1", "100", "5", "33", "10", "7"]


def test_what_notebook_10_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key tile's K is late if its step begins before; V is requested one key tile after its own."""
    steps = [[0] * 7, *([at] * 7 for at in (100, 200, 300))]
    waits_for_v = [[0, 0], *([at + 50, at + 60] for at in (100, 200, 300))]
    full = [[10, 120, 190, 290], [40, 255, 260, 400]]  # K of key tile 1 is late, V of 1 is
    ring = {"stages": 2, "consumers": [steps], "waits_for_v": [waits_for_v], "full": full}
    clocks = [
        {"head_dim": 128, "part": hopper.PARTS[7], "products": products, "weights": weights}
        for products, weights in ((1355.0, None), (None, 900.0), (1419.0, 1420.0))
    ]
    clocks.append({"head_dim": 128, "part": "maxima", "products": 1.0, "weights": None})
    monkeypatch.setattr(hopper, "recorded", lambda: {"rings": [ring], "clocks": clocks})
    assert hopper.late_table().splitlines()[1].split() == ["STAGES", "=", "2", "100", "33%", "33%"]
    assert hopper.side_by_side() == {128: (1355.0, 900.0, 1420.0)}
    assert "no turns" not in hopper.ablations_table(128, record=record(), names=("no exp2",))
    monkeypatch.setattr(hopper, "recorded", lambda: None)
    assert hopper.late_table() == records.NO_RECORD and hopper.side_by_side() == {}


def test_the_edits_are_those_of_todays_kernel() -> None:
    assert hopper.traced(kernel.source(hopper.STAGE.file)).count("STAMP(") == 10


def test_the_table_of_tiles_spreads_the_work() -> None:
    """N = 512, causal: 4 tiles of rows per head, which see 1 to 4 key tiles; 132 is a multiple of 4."""
    case = Case((32, 16, 512, 128), "bfloat16", causal=True)
    call, sizes, blocks = hopper.call_of(case), hopper.Work(case).defines, 132
    steps = hopper.steps_of_rows(512, 512, call.window, sizes["BLOCK_M"], sizes["BLOCK_N"])
    with limits.pretend_gpu(limits.Limits(limits.most_shared(), blocks, 90)):
        by_stage = hopper.table_of(call, sizes)[..., 3] // sizes["BLOCK_M"]
    tables = by_stage, hopper.row_order(steps, 32 * 16, blocks)
    ours, by_rows = (np.where(table < 0, 0, steps[table % len(steps)]).sum(axis=0) for table in tables)
    assert ours.sum() == by_rows.sum() == 32 * 16 * (1 + 2 + 3 + 4)
    assert by_rows.max() == 16 * 4 and ours.max() < 1.1 * ours.mean()

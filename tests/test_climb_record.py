"""The climb so far: the figures read from the records, and the measurements made in addition."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.attention import kernel
from helpers.attention.ladder.steps import CLIMBS, LAST_IDEAS, by_number, ideas
from helpers.bench import climb, counters, reading, roofline, study
from helpers.bench.cases import Case
from helpers.bench.results import NO_RECORD, Measurement, Note, Record
from helpers.bench.steps import RENAMED
from helpers.bench.studies import promises
from helpers.device import ON_GPU
from helpers.engine import nvrtc


def result(
    name: str, kind: str, ms: float, *, shape: Any = climb.SHAPE, dtype: str = "float32", **more: Any
) -> dict[str, Any]:
    """Make a recorded result with a spread of 2 %."""
    spread = {"ms": ms, "ms_min": 0.99 * ms, "ms_max": 1.01 * ms, "launches": 3, "tflops": 100 / ms}
    return asdict(Measurement(name, kind, list(shape), dtype, **spread)) | more


def step(name: str, number: int, ms: float, idea: str = "an idea", **more: Any) -> dict[str, Any]:
    return result(name, "step", ms, step=number, idea=idea, **more)


WIDE = (4, 16, 4096, 128)
RESULTS = [
    result("naive", "stage", 100.0),
    result("tiled", "stage", 50.0),
    result("online_softmax", "stage", 40.0),
    result("register_tiles", "stage", 8.0),
    result("heads_and_masks", "stage", 10.0),
    result("flash_wmma", "stage", 4.0, dtype="float16"),
    result("flash_wmma", "stage", 5.0, dtype="bfloat16"),
    result("flash_wmma", "stage", 6.0, dtype="bfloat16", shape=WIDE),
    result("flash_mma", "stage", 2.0, dtype="bfloat16"),
    result("flash_mma", "stage", 3.0, dtype="bfloat16", shape=WIDE),
    result("backward", "backward", 30.0),
    result("backward_mma", "backward", 5.0, dtype="bfloat16"),
    result("backward_mma deterministic", "backward", 6.0, dtype="bfloat16"),
    # the climb to 04 in a wrong order, one step slower; that to 07 at another shape
    step("register_tiles: 04_04_b", 4, 24.0, "two rows a thread"),
    step("register_tiles: 04_01_a", 1, 20.0, "heads in the grid"),
    step("register_tiles: 04_07_c", 7, 23.9, "8 x 8 scores a thread"),
    step("flash_mma: 07_03_a", 3, 4.5, "mma.sync for both products", dtype="bfloat16", shape=WIDE),
    step("flash_mma: 07_03_a", 3, 9.9, "mma.sync for both products", dtype="float16", shape=WIDE),
    result("backward_mma: 08_01_a", "backward step", 20.0, step=1, idea="tensor cores", dtype="bfloat16"),
    result(
        "backward_mma: 08_02_b", "backward step", 10.0, step=2, idea="dQ in the order of fragments", dtype="bfloat16"
    ),
    result("SDPA math", "peer", 20.0),
    result("SDPA math", "peer", 40.0, dtype="bfloat16"),
    result("SDPA flash", "peer", 2.2, dtype="bfloat16"),
]
RECORD = {"device": {"name": "Some GPU"}, "results": RESULTS}


def test_stages_are_set_beside_the_one_before() -> None:
    found = {gain.stage: (gain.place, round(gain.factor, 3)) for gain in climb.between_stages(RECORD)}
    assert found == {
        "tiled": ("01 → 02", 2.0),
        "online_softmax": ("02 → 03", 1.25),
        "register_tiles": ("03 → 04", 5.0),
        "heads_and_masks": ("04 → 05", 0.8),
        "flash_wmma": ("05 → 06", 2.0),  # no common type: bfloat16, as in README
        "flash_mma": ("06 → 07", 2.5),
        "backward_mma": ("08", 6.0),  # compared with the float32 gradients, not with 07
    }


def test_a_stage_is_beside_the_one_that_it_improves_on() -> None:
    more = [
        result("hopper", "stage", 1.0, dtype="bfloat16"),
        result("flash_cute", "stage", 2.5, dtype="bfloat16"),
        result("tf32", "stage", 5.0),
    ]
    found = {gain.stage: gain for gain in climb.between_stages({**RECORD, "results": [*RESULTS, *more]})}
    places = {name: (found[name].place, found[name].factor) for name in ("hopper", "flash_cute", "tf32")}
    assert places == {"hopper": ("07 → 10", 2.0), "flash_cute": ("07 → 12", 0.8), "tf32": ("05 → 15", 2.0)}


def all_steps(record: Any = None) -> list[climb.Gain]:
    return [gain for stage in CLIMBS for gain in climb.between_steps(stage, record)]


def test_steps_begin_at_the_stage_before_and_end_at_the_stage() -> None:
    found = climb.between_steps("register_tiles", RECORD)
    assert [(gain.place, gain.idea) for gain in found] == [
        ("1", "heads in the grid"),
        ("4", "two rows a thread"),
        ("7", "8 x 8 scores a thread"),
        (f"8 to {max(by_number('register_tiles'))}", LAST_IDEAS["register_tiles"]),
    ]
    assert [round(gain.factor, 2) for gain in found] == [2.0, 0.83, 1.0, 2.99]
    first, last = climb.between_steps("flash_mma", RECORD)  # at the shape and in the type of the climb
    assert (round(first.factor, 3), round(last.factor, 3)) == (1.333, 1.5)
    assert climb.between_steps("flash_wmma", RECORD) == []
    of_gradients = climb.between_steps("backward_mma", RECORD)  # the first measured one is compared with none
    assert [(gain.place, gain.factor) for gain in of_gradients] == [
        ("7", 2.0),
        (f"8 to {max(by_number('backward_mma'))}", 2.0),
    ]
    assert len(all_steps(RECORD)) == 8
    assert [gain.idea for gain in all_steps(RECORD) if gain.is_slower] == ["two rows a thread"]


def test_a_step_within_the_spread_is_not_slower() -> None:
    before, after = (result("a", "step", ms) for ms in (10.0, 10.15))  # each has a spread of 2 %
    gain = climb.Gain("a", "1", "an idea", before, after)
    assert gain.factor < climb.SLOWER and not gain.is_slower
    assert climb.Gain("a", "1", "an idea", before, after | {"ms": 10.3, "ms_min": 10.2}).is_slower


def test_worth_keeps_what_matters_and_adds_up_the_rest() -> None:
    text = climb.gains_table(record=RECORD).markdown
    rows = text.splitlines()[2:]
    assert "| **03 → 04** | **a register tile per thread, float4** (float32, d = 64) | 2.5 → 12.5 | 5.00× |" in rows
    assert "| step 4 | two rows a thread | 5 → 4.17 | 0.83× |" in rows
    assert "| step 8 | rows of K and P padded | not measured yet | |" in rows
    assert "| | 1 more step | | 1.00× |" in rows and "8 x 8 scores a thread" not in text
    assert "| | *steps at bfloat16, d = 128* | | |" in rows
    assert sum("steps at" in row for row in rows) == 1  # those to 04 are at the stage's own shape
    assert NO_RECORD in climb.gains_table(record={"results": []}).markdown


def test_the_factor_is_that_of_the_pair() -> None:
    other = Record({}, {}, [Measurement(**result("plain attention", "plain", 12.0, dtype="bfloat16"))])
    text = climb.peers_table(RECORD, other).markdown
    rows = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in text.splitlines()[2:]}
    assert rows["SDPA math, whose scores are float32"] == ["2.50×", "", "8.00×", "", "20.00×", ""]
    assert rows["SDPA flash (FlashAttention-2)"] == ["", "", "0.44×", "", "1.10×", ""]
    assert rows["three PyTorch calls in the same type"] == ["", "", "2.40×", "", "6.00×", ""]
    assert rows["01, in float32"][0] == "12.50×" and "SDPA cuDNN" not in rows
    assert NO_RECORD in climb.peers_table({"results": []}, Record({}, {})).markdown


def test_ratios_of_different_kinds_have_no_decimals() -> None:
    record = {**RECORD, "results": [result("naive", "stage", 1234.5), result("register_tiles", "stage", 1.0)]}
    assert "| 1,234× |" in climb.peers_table(record, Record({}, {})).markdown


def test_traffic_is_of_one_head() -> None:
    def row(stage: str, shape: Any, dram: float, l2: float, dtype: str = "float32") -> dict[str, Any]:
        figures = {"dram bytes read": dram / 2, "dram bytes written": dram / 2, "L2 bytes": l2}
        return {"stage": stage, "shape": shape, "dtype": dtype, "figures": figures}

    one, many = [1, 1, 4096, 64], [1, 16, 4096, 64]
    counted = {
        "rows": [
            row("register_tiles", many, 16 * 2**20, 16 * 2**22),
            row("register_tiles", [1, 16, 4096, 128], 1.0, 1.0),
            row("SDPA math, one head", one, 2**27, 2**23),
            row("flash_mma", many, 1.0, 1.0, "bfloat16"),
        ]
    }
    found = climb.traffic(counted)
    assert list(found) == ["SDPA math, one head", "register_tiles"]
    assert found["register_tiles"] == {"dram": 2**20, "L2": 2**22}
    text = climb.traffic_table(counted).markdown
    assert "| 1 MiB (128× less) | 4 MiB (2× less) |" in text and "| 128 MiB | 8 MiB |" in text
    counted["rows"][0]["figures"]["L2 bytes"] = 16 * 2**24
    assert "| 16 MiB (2× more) |" in climb.traffic_table(counted).markdown
    assert NO_RECORD in climb.traffic_table({"rows": []}).markdown


def test_what_did_not_fit_says_so() -> None:
    one, many = promises.LONG_CASES
    ran = Measurement(**result("register_tiles", "stage", 195.0, shape=one.shape, extra_bytes=0))
    why = Note("SDPA math", "peer", "OutOfMemoryError: CUDA out of memory. Tried to allocate", [str(one), str(many)])
    other = Note("tiled", "stage", "it takes float32, not bfloat16", [str(many)])
    rows = climb.long_table(Record({}, {}, [ran], [why, other])).markdown.splitlines()[2:]
    assert rows == [
        "| 1 head, float32 | 64 GiB | register_tiles | 195 | 0.513 | 0 bytes |",
        "|  |  | SDPA math | out of memory |  |  |",
        "| 16 heads, bfloat16 | 512 GiB | SDPA math | out of memory |  |  |",
        "|  |  | tiled | it takes float32, not bfloat16 |  |  |",
    ]


def test_latencies_stand_beside_the_devices_own_time() -> None:
    def one(name: str, kind: str, ms: float, note: str) -> Measurement:
        return Measurement(**result(name, kind, ms, note=note))

    record = Record({}, {}, [one("ours", "latency", 0.05, "a"), one("ours", "device", 0.01, "a")])
    assert climb.latency_table(record).markdown.splitlines()[2:] == ["| a | ours | 50.0 | 10.0 |"]
    assert NO_RECORD in climb.latency_table(Record({}, {})).markdown


def test_the_committed_record_fills_every_table() -> None:
    assert reading.recorded() is not None
    for table in (climb.gains_table(), climb.peers_table(), climb.traffic_table()):
        assert NO_RECORD not in table.markdown and "nan" not in table.markdown
    names = {gain.stage for gain in all_steps()}
    assert {"register_tiles", "flash_wmma", "flash_mma"} <= names
    assert all(np.isfinite(gain.factor) and gain.idea for gain in all_steps())


@pytest.mark.parametrize(
    "rows", [reading.recorded()["results"], counters.recorded()["rows"]], ids=["times", "counters"]
)
def test_every_recorded_step_is_found_by_its_idea(rows: list[dict[str, Any]]) -> None:
    """A file may be renamed; an idea renamed in its climb must be renamed here too. Removed steps have no rows."""
    recorded: dict[str, set[str]] = {}
    for row in rows:
        if "step" in row["kind"]:
            recorded.setdefault(row.get("of") or row["name"].partition(": ")[0], set()).add(row["idea"])
    for stage, found in recorded.items():
        assert {RENAMED.get((stage, idea), idea) for idea in found} <= set(ideas(stage))
    assert recorded


def test_the_roofline_has_the_gradients_where_their_bytes_were_counted() -> None:
    picture = roofline.measured_roofline(climb.SHAPE, gradients=True)
    assert "backward: " in picture.alt and "backward_mma, bfloat16: " in picture.alt
    assert "deterministic" not in picture.alt
    without = roofline.measured_roofline(climb.SHAPE)
    assert "backward" not in without.alt and picture.alt.startswith("roofline: naive")


def timed(ms: float, spread: float = 0.0) -> dict[str, float]:
    return {"ms": ms, "ms_min": ms, "ms_max": ms * (1 + spread)}


MODELS = {
    "prefill": [
        {"kind": "prefill", "implementation": name, "n": n, "kv_heads": heads} | more
        for n, heads, name, more in (
            (4096, 16, "course", {**timed(2.0), "tokens_per_s": 2048000.4, "peak_bytes": 2**30}),
            (4096, 16, "sdpa", {**timed(3.0, 0.2), "tokens_per_s": 1365333.3, "peak_bytes": 2**31}),
            (4096, 16, "eager", {"error": "OutOfMemoryError: CUDA out of memory. Tried"}),
            (512, 16, "course", {**timed(1.0), "tokens_per_s": 512000.0, "peak_bytes": 2**20}),
            (512, 4, "course", {**timed(1.0), "tokens_per_s": 1.0, "peak_bytes": 1}),
        )
    ],
    "host": [
        {"call": "SDPA", "what": "forward", "us": 25.4},
        {"call": "SDPA", "what": "forward and backward", "us": 99.6},
        {"call": "ours", "what": "forward", "us": 35.0},
    ],
}


def test_models_are_shown_by_length_and_attention() -> None:
    rows = climb.models_table("prefill", record=MODELS).markdown.splitlines()[2:]
    assert rows == [
        "| 512 | 512,000 |  |  | 1 MiB |  |  |",
        "| 4,096 | 2,050,000 | 1,370,000 (20%) | out of memory | 1 GiB | 2 GiB |  |",
    ]
    assert climb.model_speed("prefill", 4096, record=MODELS)["sdpa"]["ms"] == 3.0
    assert climb.model_speed("training", 4096, record=MODELS) == {}
    assert NO_RECORD in climb.models_table("training", record=MODELS).markdown
    rows = climb.calls_table(MODELS).markdown.splitlines()[2:]
    assert rows == ["| `SDPA` | 25 | 100 |", "| `ours` | 35 |  |"]
    assert NO_RECORD in climb.calls_table({}).markdown


# ---- measuring


SMALL = promises.Small("a few tokens", 33, 33, 4, 2, 16)  # with fewer rows PyTorch would align its mask differently


def test_one_waits_for_the_middle_of_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0], []

    def call() -> None:
        calls.append(None)
        now[0] += 1_000_000 * len(calls)  # 1, 2, 3, ... ms

    monkeypatch.setattr(promises.time, "perf_counter_ns", lambda: now[0])
    assert promises.waited(call, calls=100) == {"ms": 70.5, "ms_min": 31.0, "ms_max": 111.0, "launches": 100}
    assert len(calls) == 120


def test_small_calls_are_measured_both_ways() -> None:
    found = list(promises.latencies(SMALL, calls=3))
    assert [r.kind for r in found[:2]] == ["latency", "device"]
    assert found[0].name == "flash_attention, CuPy arrays" and found[0].shape == [1, 4, 33, 16]
    assert found[0].note == "a few tokens: 33 keys of 2 heads" and 0 < found[0].ms_min <= found[0].ms <= found[0].ms_max


@pytest.mark.skipif(ON_GPU, reason="on a GPU this is measured, at full size")
def test_a_record_is_taken_saved_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "promises.json"
    monkeypatch.setattr(promises, "RECORD", path)
    monkeypatch.setattr(promises, "BUDGET_S", 0.01)
    stages = {
        name: stage for name, stage in promises.forward().items() if not nvrtc.uses_cute(kernel.source(stage.file))
    }
    monkeypatch.setattr(promises, "forward", lambda: stages)  # without CuTe, whose build takes 20 s
    assert promises.recorded() is None
    assert study.main(["promises"]) == 0
    assert capsys.readouterr().out == f"{NO_RECORD}\n"
    taken = promises.take(path, cases=[Case((1, 1, 40, 40)), Case((1, 2, 40, 40), "bfloat16")], smalls=[SMALL])
    kept = promises.recorded()
    assert [(r.kind, r.name) for r in kept.results] == [(r.kind, r.name) for r in taken.results]
    assert kept.how == taken.how and not any(note.failed for note in taken.notes)
    measured = [(r.name, r.dtype) for r in taken.results if r.kind == "stage"]
    assert measured[0] == ("tf32", "float32") and ("naive", "float32") in measured
    assert ("flash_mma", "bfloat16") in measured
    assert study.main(["promises"]) == 0
    text = capsys.readouterr().out
    assert "naive" in text and "latency; a few tokens" in text


def test_naive_comes_last_of_its_case() -> None:
    """Its scratch fills half of a GPU, and is freed before the next case."""
    names = [job.name for job in promises.jobs() if job.case == promises.LONG_CASES[0]]
    assert names[-1] == "naive"
    assert promises.scores_bytes(promises.LONG_CASES[0]) == 64 * 2**30


@pytest.mark.skipif(not promises.peers.torch_on_gpu(), reason="plain attention is PyTorch's, on a GPU")
def test_plain_attention_is_attention() -> None:
    for dtype, worst in (("float32", 1e-5), ("bfloat16", 0.03)):
        found = promises.plain(Case((1, 2, 256, 64), dtype))
        assert found.max_error <= worst and found.ms > 0


def test_how_busy_cuda_cores_and_shared_memory_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 1, 8, 64)
    at = {"shape": list(shape), "dtype": "float32"}
    results = [
        {"name": "k: 04_01", "kind": "step", "tflops": 20.0, **at},
        {"name": "matmul", "kind": "roof", "tflops": 50.0},
    ]
    device = {"name": "a GPU", "multiprocessors": 100, "clock_mhz": 1000}
    figures = {"FMA pipe %": 40.0, "shared memory %": 75.0}
    rows = [{"stage": row["name"], "dtype": "float32", "figures": figures} for row in results]
    monkeypatch.setattr(climb.reading, "recorded", lambda: {"device": device, "results": results})
    monkeypatch.setattr(climb.counters, "recorded", lambda: {"rows": rows})
    names = {"03": "k: 04_01", "a product": "matmul"}
    assert [line.split()[-5:] for line in climb.busy_table(shape, names).split("\n")[1:]] == [
        ["20.0", "40", "%", "75", "%"],
        ["50.0", "40", "%", "75", "%"],
        ["every", "cycle", "25.6", "100", "%"],
    ]
    assert len(climb.busy_table(shape, names, roof=False).split("\n")) == 3
    monkeypatch.setattr(climb.counters, "recorded", lambda: None)
    assert climb.busy_table(shape, names) == NO_RECORD

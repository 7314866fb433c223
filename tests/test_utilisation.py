"""What is read out of Nsight Compute's CSV, and the recorded table. Nothing here needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import hardware, utilisation
from helpers.stages import LADDER

METRICS = {
    "gpu__time_duration.sum": "nsecond",
    "dram__bytes_read.sum": "byte",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    "launch__registers_per_thread": "register/thread",
}
ROWS = (
    ("loops", ("1,000,000", "1,024", "25.5", "80")),
    ("loops", ("3,000,000", "2,048", "12.5", "80")),
    ("template<__half>(int)", ("2,000,000", "7", "50", "255")),
)
LAUNCHED = [
    {"stage": "loops", "dtype": "float32", "shape": [1, 2, 8, 4], "flop": 100.0},
    {"stage": "template", "dtype": "float16", "shape": [1, 1, 8, 4], "flop": 50.0},
    {"stage": "broken", "error": "RuntimeError: no"},
]


def line(*cells: str) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


CSV = "\n".join(
    [
        "==PROF== Connected to process 1",
        line("ID", "Kernel Name", *METRICS),
        line("", "", *METRICS.values()),
        *(line(str(i), name, *values) for i, (name, values) in enumerate(ROWS)),
    ]
)


def test_launches_of_one_stage_are_added_and_shares_averaged() -> None:
    loops, template, broken = utilisation.rows(LAUNCHED, CSV)
    assert loops["launches"] == 2
    assert loops["figures"] == {"ms": 4.0, "dram bytes read": 3072, "occupancy %": 19.0, "registers": 80}
    assert template["launches"] == 1 and template["figures"]["ms"] == 2.0
    assert broken["figures"] == {} and broken["error"] == "RuntimeError: no"
    text = utilisation.table({"rows": [loops, template, broken]})
    assert "3,072" in text and "broken: RuntimeError: no" in text and "tensor pipe" not in text
    assert "template" not in utilisation.table({"rows": [loops, template]}, ["loops"])


def test_the_first_known_metric_of_a_figure_is_taken() -> None:
    first, second = utilisation.FIGURES["tensor pipe %"][1:3]
    text = "\n".join([line("ID", "Kernel Name", second, first), line("", "", "%", "%"), line("0", "loops", "1", "2")])
    (row, *_) = utilisation.rows(LAUNCHED, text)
    assert row["figures"]["tensor pipe %"] == 2.0


def test_a_csv_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table"):
        utilisation.rows(LAUNCHED, "==ERROR== no permission")


def test_each_stage_is_counted_in_its_first_type() -> None:
    found = dict(utilisation.cases())
    assert list(found) == [name for name in LADDER if name in found]
    for name, case in found.items():
        assert case.shape == utilisation.SHAPE
        assert (case.dtype == "float32") == ("float32" in LADDER[name].dtypes)


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
    for row in record["rows"]:
        assert row["stage"] in LADDER and "error" not in row
        assert row["figures"]["dram bytes read"] > 0 and 0 < row["figures"]["occupancy %"] <= 100
    assert json.dumps(record) and all(row["stage"] in utilisation.table() for row in record["rows"])

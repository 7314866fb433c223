"""The bench: what it counts, that a wrong stage is never timed, and that README says what was recorded."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from helpers import bench, readme
from helpers.device import cp
from helpers.stages import LADDER


def test_flops_are_two_matrix_products() -> None:
    assert bench.flops(3, 5, 7) == 2 * 3 * 5 * 7 + 2 * 3 * 5 * 7


def test_measure_returns_the_median_and_the_spread() -> None:
    calls = []
    t = bench.measure(lambda: calls.append(1), budget_s=0.0)
    assert len(calls) == t.launches + 1  # one to warm up
    assert t.launches >= 3
    assert 0 <= t.ms_min <= t.ms <= t.ms_max


def test_error_on_sample_sees_a_wrong_row_and_nan() -> None:
    q, k, v = bench.make_inputs(40, 30, 4, seed=3)
    o = bench.reference.attention(q, k, v)
    assert bench.error_on_sample(cp.asarray(o), q, k, v) == 0.0
    o[17] += 0.5
    assert bench.error_on_sample(cp.asarray(o), q, k, v) == pytest.approx(0.5)
    o[17, 0] = np.nan
    assert np.isnan(bench.error_on_sample(cp.asarray(o), q, k, v))


def test_ladder_prints_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.ladder(["--n", "70", "--d", "8"]) == 0
    text = capsys.readouterr().out
    for name in LADDER:
        assert re.search(rf"\[PASS\] {name}: output matches reference \(max error: \S+ <= 1\.0e-05\)", text)


@pytest.mark.parametrize("argv", [["--n", "0"], ["--d", "129"], ["--stage", "nonsense"]])
def test_ladder_refuses_sizes_it_cannot_run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.ladder(argv)
    assert "--" in capsys.readouterr().err


def test_a_wrong_stage_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = LADDER["naive"]

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(stage, name)

        def prepare(self, *args: object, **kwargs: object) -> tuple[object, object]:
            _, o = stage.prepare(*args, **kwargs)
            return lambda: None, o  # never launched: the poison stays

    monkeypatch.setattr(bench, "LADDER", {"naive": Broken()})
    assert bench.ladder(["--n", "33", "--d", "8"]) == 1
    text = capsys.readouterr().out
    assert "[FAIL] naive" in text
    assert "[PASS] naive" not in text


def test_a_record_goes_to_json_and_back(tmp_path: pytest.TempPathFactory) -> None:
    path = tmp_path / "folder" / "record.json"
    assert bench.bench(["--quick", "--no-peers", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    stages = [r for r in record["results"] if r["kind"] == "stage"]
    assert [r["name"] for r in stages] == list(LADDER)
    fields = {f.name for f in dataclasses.fields(bench.Result)}
    for r in record["results"]:
        assert set(r) == fields
        assert r["ms_min"] <= r["ms"] <= r["ms_max"]


def test_readme_has_the_table_of_the_record() -> None:
    record = json.loads(readme.RECORD.read_text())
    text = readme.README.read_text()
    assert readme.with_table(text, record) == text, "run: python3 helpers/course.py bench --readme"
    assert readme.PLOT.is_file()


def test_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no part between"):
        readme.with_table("no markers", json.loads(readme.RECORD.read_text()))


def test_links_of_readme_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", readme.README.read_text()):
        assert target.startswith("http") or (readme.ROOT / target).exists(), target


@pytest.mark.parametrize("experiment", bench.EXPERIMENTS, ids=lambda e: e.name)
def test_experiments_change_the_text_they_name(experiment: bench.Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "EXPERIMENT_LAUNCHES", 2)
    r = bench._experiment(experiment, {"BLOCK_M": 64, "BLOCK_N": 16}, (1, 1, 100, 8))
    # The engine runs threads in turn, so there a missing barrier is always wrong; another row length is never.
    if not bench.ON_GPU:
        assert r.wrong_launches == (2 if "barrier" in experiment.name else 0)


def test_an_experiment_on_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="mend the experiment"):
        bench._experiment(bench.Experiment("x", "naive", (("no such text", ""),)), {"BLOCK_M": 64}, (1, 1, 8, 8))

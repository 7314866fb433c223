"""Records of GPUs: which can be committed, and how all of them are shown."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import command, gpus
from helpers.bench.results import RECORD, Record, without_paths

Data = dict[str, Any]


@pytest.fixture(scope="module")
def committed() -> Data:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_committed_records_can_be_committed() -> None:
    """Including those of other people's GPUs, once there are some."""
    paths = [gpus.FOLDER / f"{gpus.slug(name)}.json" for name in gpus.records()]
    assert RECORD in paths
    assert gpus.main([]) == 0, [gpus.problems(json.loads(path.read_text()), path.name) for path in paths]


def stage(data: Data) -> Data:
    return next(r for r in data["results"] if r["kind"] == "stage")


SPOILED: dict[str, tuple[Callable[[Data], Any], str]] = {
    "a list": (lambda d: d.clear(), "no record"),
    "no GPU": (lambda d: d["device"].pop("compute_capability"), "lacks 'compute_capability'"),
    "host name": (lambda d: d["device"].update(hostname="mine"), "has 'hostname'"),
    "user in a path": (lambda d: d["how"].update(command="/home/mine/course.py"), "path or an address"),
    "path of Windows": (lambda d: d["how"].update(command=r"C:\Users\mine\course.py"), "path or an address"),
    "mail": (lambda d: d["notes"].append(note("ask me@home.example")), "path or an address"),
    "stopped": (lambda d: d["how"].update(done=["x"]), "stopped before its end"),
    "failed": (lambda d: d["notes"].append(note("wrong output", failed=True)), "naive failed: wrong output"),
    "negative": (lambda d: stage(d).update(ms_min=-1.0), "not a positive number"),
    "NaN": (lambda d: stage(d).update(tflops=float("nan")), "not a positive number"),
    "text for a time": (lambda d: stage(d).update(ms="3"), "not a positive number"),
    "spread": (lambda d: stage(d).update(ms_min=stage(d)["ms_max"] * 2), "not between"),
    "not right": (lambda d: stage(d).update(max_error=1.0), "it was not right"),
    "not checked": (lambda d: stage(d).pop("max_error"), "it was not right"),
    "unknown kind": (lambda d: stage(d).update(kind="guess"), "kind 'guess' is unknown"),
    "unknown field": (lambda d: stage(d).update(owner="me"), "not a measurement's"),
    "missing field": (lambda d: stage(d).pop("shape"), "not a measurement's"),
    "odd note": (lambda d: d["notes"].append({"why": "x"}), "not a note's"),
    "peers alone": (lambda d: d.update(results=[r for r in d["results"] if r["kind"] == "peer"]), "no stage"),
}


def note(why: str, failed: bool = False) -> Data:
    return {"name": "naive", "kind": "stage", "why": why, "cases": ["x"], "failed": failed, "left": False}


@pytest.mark.parametrize(("spoil", "said"), SPOILED.values(), ids=SPOILED.keys())
def test_what_cannot_be_committed(spoil: Callable[[Data], Any], said: str, committed: Data) -> None:
    data = copy.deepcopy(committed)
    spoil(data)
    assert any(said in sentence for sentence in gpus.problems(data)), gpus.problems(data)


def test_the_file_has_the_gpus_name(committed: Data) -> None:
    assert gpus.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
    assert gpus.slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    assert not gpus.problems(committed, "nvidia-h200.json")
    assert "is named nvidia-h200.json" in gpus.problems(committed, "mine.json")[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("OSError: /home/me/course/helpers/x.py is missing", "OSError: x.py is missing"),
        (r"DLL load failed: C:\Users\me\cuda\nvrtc.dll", "DLL load failed: nvrtc.dll"),
        ("see ~/secret/notes.txt", "see notes.txt"),
        ("1/sqrt(d), TFLOP/s, 4 x 16/2 heads", "1/sqrt(d), TFLOP/s, 4 x 16/2 heads"),
        ("out of memory: needs 12/24 GiB", "out of memory: needs 12/24 GiB"),
    ],
)
def test_notes_have_no_paths(text: str, wanted: str) -> None:
    record = Record({}, {})
    record.add_note("naive", "stage", text, None)
    assert record.notes[0].why == wanted == without_paths(text)


def test_bench_says_how_to_send_a_record(
    committed: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ON_GPU", True)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(committed))
    command._say_how_to_share(file)
    assert "a pull request with it as notebooks/measured/nvidia-h200.json" in capsys.readouterr().out
    file.write_text(json.dumps({**committed, "device": {**committed["device"], "hostname": "mine"}}))
    command._say_how_to_share(file)
    assert "'hostname', which no record needs" in capsys.readouterr().out


# ---- side by side


def another(committed: Data, name: str, capability: str, faster: float) -> Data:
    """Make up a record, for the table only."""
    data = copy.deepcopy(committed)
    data["device"].update(name=name, compute_capability=capability)
    data["results"] = [r for r in data["results"] if r["name"] != "hopper"]
    for result in data["results"]:
        if result.get("tflops"):
            result["tflops"] *= faster
    return data


def test_all_gpus_are_shown(committed: Data, tmp_path: Path) -> None:
    made = {"NVIDIA H200": committed, "NVIDIA A100": another(committed, "NVIDIA A100", "8.0", 0.5)}
    for name, data in made.items():
        (tmp_path / f"{gpus.slug(name)}.json").write_text(json.dumps(data))
    (tmp_path / "nvidia-h200-counters.json").write_text(json.dumps({"device": committed["device"], "results": []}))
    (tmp_path / "other.json").write_text(json.dumps(committed))
    assert list(gpus.records(tmp_path)) == ["NVIDIA H200", "NVIDIA A100"]
    text = gpus.side_by_side(folder=tmp_path).markdown
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()[2:-2]
    }
    heads = text.splitlines()[0].split("|")[2:-1]
    assert [head.split("<br>")[0].strip() for head in heads] == ["NVIDIA H200", "NVIDIA A100"] * 2
    fast, slow = (float(cell.split()[0]) for cell in rows["04 register_tiles"][:2])
    assert slow == pytest.approx(fast / 2, rel=0.01)
    assert rows["10 hopper"][2] and not rows["10 hopper"][3] and "2 GPUs so far" in text
    shares = [re.search(r"\((\d+)%\)", cell)[1] for cell in rows["04 register_tiles"][:2]]
    assert shares[0] == shares[1], "each beside its own matrix product"


def test_the_figures_are_those_of_the_record(committed: Data) -> None:
    text = gpus.side_by_side().markdown
    for shape, dtype in gpus.SHOWN:
        for result in committed["results"]:
            case = (tuple(result["shape"]), result["dtype"], result.get("causal", False))
            if result["kind"] == "stage" and case == (shape, dtype, False):
                assert f"{result['tflops']:.3g} (" in text


def test_without_a_record_it_says_so(tmp_path: Path) -> None:
    assert "no GPU run is recorded" in gpus.side_by_side(folder=tmp_path).markdown

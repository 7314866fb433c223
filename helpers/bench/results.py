"""The record of a run: what was timed, what was not and why, as JSON and as a table.

Reading it needs neither a GPU nor the modules that measure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helpers.bench import records
from helpers.bench.cases import Case
from helpers.bench.records import NO_RECORD  # noqa: F401 - what a table of no record says

RECORD = records.MEASURED / "nvidia-h200.json"
# The peer that a stage is compared with, by type: PyTorch's fastest in float32, FlashAttention-2 in half types.
MAIN_PEER = {"float32": "SDPA efficient", "float16": "SDPA flash", "bfloat16": "SDPA flash"}


# A path with two parts or more, on Linux, macOS or Windows: error messages contain them, and records must not.
PATHS = re.compile(r"(?<![\w.)\]])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?")


def without_paths(text: str) -> str:
    """Shorten each path in a text to its last part: a full path would identify the machine."""
    return PATHS.sub(lambda path: re.split(r"[/\\]", path.group().rstrip("/\\"))[-1], text)


def roof_name(dtype: str) -> str:
    """Return the name of a type's matrix product in the record."""
    return "matmul" if dtype == "float32" else f"matmul {dtype}"


@dataclass
class Measurement:
    """One row of the record. Times are in milliseconds: the device's or, for the kind "host", the host's.

    kind: "stage", "peer" or "roof"; "variant", a stage with other tile sizes; "step", one on the way to a stage;
    "experiment", a stage with a changed text; "host", a call's time on the host; "backward", a stage that computes
    gradients, "backward peer", "backward step" and "backward experiment".
    """

    name: str
    kind: str
    shape: list[int]
    dtype: str
    ms: float
    ms_min: float
    ms_max: float
    launches: int
    tflops: float | None = None
    gbps: float | None = None
    max_error: float | None = None
    note: str = ""
    wrong_launches: int | None = None  # for an experiment, out of checked_launches
    causal: bool = False
    tolerance: float | None = None
    checked_launches: int | None = None
    extra_bytes: int | None = None  # device memory beyond q, k, v and the output
    clocks: dict[str, float] = field(default_factory=dict)  # medians while it was timed
    step: int | None = None  # for a step: its number, that of its file
    idea: str = ""  # for a step
    # For two that were timed in turns, round by round: the speedup of a step over the one before it, and of the fastest
    # stage over this peer. The median and the quartiles; in older records, the extremes. fastest: that stage's name.
    gain: list[float] = field(default_factory=list)
    over: str = ""  # for a step with a gain: the name of the step before it
    fastest: str = ""

    @property
    def case(self) -> Case:
        """Return what was computed: shape, dtype, mask and direction."""
        return Case(tuple(self.shape), self.dtype, self.causal, backward=self.kind.startswith("backward"))


@dataclass
class Note:
    """Something that was not timed, and why. failed: it should have been. left: there was no time for it."""

    name: str
    kind: str
    why: str
    cases: list[str]
    failed: bool = False
    left: bool = False


@dataclass
class Record:
    """Everything needed to read the figures, and to measure them again."""

    device: dict[str, Any]
    how: dict[str, Any]
    results: list[Measurement] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add_note(
        self, name: str, kind: str, why: str, case: Case | None, *, failed: bool = False, left: bool = False
    ) -> None:
        """Note why something was not timed, without its paths; cases with the same reason share a note."""
        why = without_paths(why)
        for note in self.notes:
            if (note.name, note.kind, note.why) == (name, kind, why):
                note.cases.append(str(case))
                return
        self.notes.append(Note(name, kind, why, [str(case)], failed, left))

    def forget_left(self, planned: Iterable[tuple[str, str, str]]) -> None:
        """Remove the notes about jobs, (kind, name, case), that lacked time and are planned again."""
        cases = set(planned)
        for note in self.notes:
            if note.left:
                note.cases = [case for case in note.cases if (note.kind, note.name, case) not in cases]
        self.notes = [note for note in self.notes if note.cases]

    def save(self, path: Path) -> None:
        """Save as JSON, a result a line: see `records.save`."""
        rows = {
            "results": [_rounded(asdict(result)) for result in self.results],
            "notes": [_rounded(asdict(note)) for note in self.notes],
        }
        records.save(path, {"device": self.device, "how": self.how, **rows})

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record that `save` wrote. ValueError for another file."""
        saved = records.load(path)
        try:
            results = [Measurement(**r) for r in saved["results"]]
            return cls(saved["device"], saved["how"], results, [Note(**n) for n in saved.get("notes", [])])
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{path.name} is no record of `bench --json`") from None


def _rounded(value: Any) -> Any:
    """Round floats to six digits, more than a clock resolves."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def results_table(record: Record) -> str:
    """Format the results case by case, each line with its share of the roof and its speed over each peer."""
    roofs = {r.name: r for r in record.results if r.kind == "roof"}
    lines = [
        f"{r.name:18}{r.tflops or r.gbps:9.1f} {'TFLOP/s' if r.tflops else 'GB/s'}, {r.ms:.3f} ms {_clocks(r)}".rstrip()
        for r in roofs.values()
    ]
    groups: dict[Case, list[Measurement]] = {}
    for r in record.results:
        if r.kind not in ("roof", "host"):
            groups.setdefault(r.case, []).append(r)
    for case, results in groups.items():
        others = [r for r in results if r.kind in ("peer", "backward peer")]
        roof = roofs.get(roof_name(case.dtype))
        width = max(18, *(len(r.name) for r in results)) + 1
        head = f"{'':{width}}{'ms':>10}{'spread':>8}{'TFLOP/s':>9}" + f"{'of roof':>9}" * (roof is not None)
        columns = {peer.name: f"  x {peer.name.removeprefix('SDPA ')}" for peer in others}
        head += "".join(f"{name:>12}" for name in columns.values())
        lines += ["", str(case), head + f"{'max error':>11}"]
        for r in results:
            line = f"{r.name:{width}}{r.ms:10.3f}{(r.ms_max - r.ms_min) / r.ms:8.1%}{r.tflops:9.3g}"
            line += f"{r.tflops / roof.tflops:9.1%}" if roof else ""
            line += "".join(f"{peer.ms / r.ms:{max(12, len(columns[peer.name]))}.3f}" for peer in others)
            wrong = f"  {r.wrong_launches} of {r.checked_launches} launches wrong" if r.wrong_launches else ""
            lines.append(f"{line}{r.max_error:11.1e}  {r.note}{wrong}".rstrip())
    lines += _host_lines([r for r in record.results if r.kind == "host"])
    if record.notes:
        lines += ["", "not timed:"]
        for note in record.notes:
            where = note.cases[0] if len(note.cases) == 1 else f"{len(note.cases)} cases, first {note.cases[0]}"
            lines.append(f"{'[FAIL] ' * note.failed}{note.name} ({where}): {note.why}")
    return "\n".join(lines)


def _host_lines(results: list[Measurement]) -> list[str]:
    """Format calls' times on the host, a line each."""
    if not results:
        return []
    width = max(len(r.name) for r in results) + 1
    lines = ["", f"{results[0].case}: on the host, a call"]
    for r in results:
        lines.append(f"{r.name:{width}}{1e3 * r.ms:9.1f} µs{(r.ms_max - r.ms_min) / r.ms:8.1%}  {r.note}".rstrip())
    return lines


def _clocks(r: Measurement) -> str:
    units = {"sm_mhz": "MHz", "memory_mhz": "MHz memory", "watts": "W", "celsius": "°C"}
    return " ".join(f"{value:.0f} {units[name]}" for name, value in r.clocks.items())

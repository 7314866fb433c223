"""Format the climb so far from the committed records: what each idea gained, and predictions against measurements.

Tables as Markdown, for notebooks. Nothing is measured here; a table says what its record lacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.attention.ladder import LADDER, Stage
from helpers.attention.ladder.layout import titles
from helpers.attention.ladder.steps import BEFORE, by_number
from helpers.bench import counters, reading, records
from helpers.bench.reading import case_of
from helpers.bench.results import NO_RECORD, Measurement, Record
from helpers.bench.steps import NOT_MEASURED, idea_of, is_measured
from helpers.bench.studies import promises, torch_model
from helpers.draw.picture import Text, bytes_text

SHAPE = (4, 16, 4096, 64)  # every stage is recorded at this shape
AT_LEAST = 1.1
SLOWER = 0.99  # a slower step counts as slower, unless one of its launches was as fast as one of the step before


@dataclass(frozen=True)
class Gain:
    """The effect of one idea: the recorded results without it and with it.

    place: "01 → 02" for stages, the step's number for steps, "2 to 4" if 2 and 3 are not measured. stage: the one that
    it leads to.
    """

    stage: str
    place: str
    idea: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def factor(self) -> float:
        """The speedup; below 1, a slowdown."""
        in_turns = reading.gain(self.before, self.after)
        return in_turns[0] if in_turns else self.before["ms"] / self.after["ms"]

    @property
    def is_slower(self) -> bool:
        """True if it is slower by more than 1 %, and by more than the spread of both."""
        in_turns = reading.gain(self.before, self.after)
        return self.factor < SLOWER and (in_turns[2] < 1 if in_turns else self.after["ms_min"] > self.before["ms_max"])

    @property
    def text(self) -> str:
        """The factor, with its range if the spread is above 5 %."""
        return reading.speedup(self.before, self.after)


def between_stages(record: Any = None) -> list[Gain]:
    """List each stage with the one that it improves on, at SHAPE.

    That is the last stage before it with the same direction that was measured in one of its types, or the one that
    `IN_PLACE_OF` names. If there is no such stage, the last one is taken, each in its first type. Among stages with the
    same number, those for a single architecture come last.
    """
    record = reading.in_turns(record)
    gains, earlier = [], []
    for stage in sorted(LADDER.values(), key=lambda stage: (stage.number, stage.only_cc)):
        results = _of_stage(stage, record)
        others = [one for one in reversed(earlier) if one[0].direction == stage.direction]
        others.sort(key=lambda one: (one[0].name != IN_PLACE_OF.get(stage.name), results.keys().isdisjoint(one[1])))
        if others and results:
            other, theirs = others[0]
            dtype = next((dtype for dtype in results if dtype in theirs), None)
            pair = (
                (theirs[dtype], results[dtype])
                if dtype
                else (next(iter(theirs.values())), next(iter(results.values())))
            )
            name = stage.idea.removeprefix("the gradients ")
            place = " → ".join(dict.fromkeys(f"{s.number:02}" for s in (other, stage)))
            gains.append(Gain(stage.name, place, name, *pair))
        if results:
            earlier.append((stage, results))
    return gains


IN_PLACE_OF = {"flash_cute": "flash_mma"}  # stages that rewrite another one


def _of_stage(stage: Stage, record: Any) -> dict[str, dict[str, Any]]:
    """Return the results of a stage at SHAPE by type: bfloat16 before float16, as in README's table."""
    how = {"record": record, "backward": stage.direction == "backward"}
    by_type = {dtype: reading.measurements(SHAPE, [stage.name], dtype=dtype, **how) for dtype in sorted(stage.dtypes)}
    return {dtype: results[0] for dtype, results in by_type.items() if results}


def between_steps(stage: str, record: Any = None) -> list[Gain]:
    """List the recorded steps of a climb, each with the step before, at the climb's first shape and type.

    The first step is compared with the stage before, if that computes the same, and else with nothing. A step that
    follows unmeasured ones is compared with the last measured one, and its place names all of them.
    """
    record = reading.in_turns(record)
    rows = [r for r in reading.results_of(record) if r["kind"] in ("step", "backward step")]
    case = next((case_of(r) for r in rows if r["name"].startswith(f"{stage}: ")), None)
    if case is None:
        return []
    shape, dtype, causal = case
    gains, before, first = [], _before(stage, case, record), None
    rows = reading.climb(stage, shape, dtype=dtype, causal=causal, record=record)
    for number, after in zip(by_number(stage), rows, strict=False):
        first = number if first is None else first
        if is_measured(after):
            place = f"{first} to {number}" if first < number else str(number)
            if before is not None:
                gains.append(Gain(stage, place, idea_of(stage, number), before, after))
            before, first = after, None
    return gains


def _before(stage: str, case: tuple[Any, ...], record: Any) -> Mapping[str, Any] | None:
    """Return the result of the stage that a climb begins at, in the climb's or another type; None if not comparable."""
    previous = next((s for s in LADDER.values() if s.file == BEFORE.get(stage)), None)
    if previous is None or previous.direction != LADDER[stage].direction:
        return None
    shape, dtype, causal = case
    how = {"causal": causal, "record": record, "backward": previous.direction == "backward"}
    types = sorted(previous.dtypes, key=lambda other: other != dtype)
    results = (reading.measurements(shape, [previous.name], dtype=one, **how) for one in types)
    return next((first[0] | {"step": 0} for first in results if first), None)


def not_measured(stage: str, record: Any = None) -> list[tuple[int, str]]:
    """List (number, idea) of the steps missing in the record of a climb that has others."""
    gains = between_steps(stage, record)
    if not gains:
        return []
    shape, dtype, causal = case_of(gains[0].after)
    rows = reading.climb(stage, shape, dtype=dtype, causal=causal, record=record)
    return [(row["step"], row["idea"]) for row in rows if not is_measured(row)]


def by_idea(stage: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the recorded results of a climb by the idea of their step, without steps that have no result.

    Args:
        results: as `reading.climb` returns them. The stage's own result is that of the last step.
    """
    return {r.get("idea") or idea_of(stage, -1): r for r in results if is_measured(r)}


def gains_table(*, record: Any = None) -> Text:
    """Format what each idea gained as one table: stages in bold, each followed by the steps of its climb.

    Steps that gain less than AT_LEAST, and are not clearly slower, share a line.
    """
    record = reading.in_turns(record)
    stages = between_stages(record)
    if not stages:
        return Text(f"*({NO_RECORD})*")
    lines = ["| | idea | TFLOP/s | times as fast |", "|---|---|---:|---:|"]
    for gain in stages:
        lines.append(_row(f"**{gain.place}**", f"**{gain.idea}** ({_where(gain)})", gain))
        climb = between_steps(gain.stage, record)
        if climb and case_of(climb[0].after) != case_of(gain.after):
            lines.append(f"| | *steps at {_where(climb[0])}* | | |")
        small = [step for step in climb if step.factor < AT_LEAST and not step.is_slower]
        rows = [(int(g.place.split()[-1]), _row(f"step {g.place}", g.idea, g)) for g in climb if g not in small]
        rows += [(n, f"| step {n} | {idea} | {NOT_MEASURED} | |") for n, idea in not_measured(gain.stage, record)]
        lines += [line for _, line in sorted(rows)]
        if small:
            together = math.prod(step.factor for step in small)
            lines.append(f"| | {len(small)} more step{'s, together' * (len(small) > 1)} | | {together:.2f}× |")
    return Text("\n".join(lines))


def _row(first: str, idea: str, gain: Gain) -> str:
    before, after = (f"{r['tflops']:.3g}" for r in (gain.before, gain.after))
    return f"| {first} | {idea} | {before} → {after} | {gain.text} |"


def _where(gain: Gain) -> str:
    """Format the type, or both types, and d; the other sizes are always 4 x 16 heads of 4096 rows."""
    types = dict.fromkeys((gain.before["dtype"], gain.after["dtype"]))
    return f"{' → '.join(map(titles, types))}, d = {gain.after['shape'][3]}"


# ---- utilisation of the CUDA cores and of shared memory


def cuda_core_peak(record: Any = None) -> float:
    """Return a GPU's TFLOP/s if every float32 multiplier starts an FMA in every cycle."""
    device = reading.in_turns(record)["device"]
    return device["multiprocessors"] * 128 * 2 * device["clock_mhz"] / 1e6  # 128 multipliers each, 2 FLOP per FMA


def busy_table(shape: Sequence[int], names: Mapping[str, str], *, roof: bool = True) -> str:
    """Format speed, multiplier and shared-memory utilisation of float32 kernels at a shape, a kernel a line.

    Args:
        shape: (batch, heads, n, head_dim). names: {label of a line: a stage, a step or a matrix product}.
        roof: add a last line for `cuda_core_peak`.
    """
    record, counted = reading.recorded(), counters.recorded()
    if record is None or counted is None:
        return records.NO_RECORD
    columns = f"{'TFLOP/s':>8}{'multipliers busy':>19}{'shared memory busy':>21}"
    lines = [f"{'on an ' + record['device']['name']:32}{columns}"]
    for what, name in names.items():
        at = {"name": name, "record": record}
        kinds = ({"kind": kind, "shape": tuple(shape)} for kind in ("stage", "step"))
        result = next(filter(None, (reading.result(**at, **kind) for kind in (*kinds, {"kind": "roof"}))))
        (row,) = counters.select(counted, [name], head_dim=shape[3])
        fma, shared = (row["figures"][f"{unit} %"] for unit in ("FMA pipe", "shared memory"))
        lines.append(f"{what:32}{result['tflops']:8.1f}{fma:17.0f} %{shared:19.0f} %")
    if roof:
        lines.append(f"{'every multiplier, every cycle':32}{cuda_core_peak(record):8.1f}{100:17} %")
    return "\n".join(lines)


# ---- predictions and measurements


def peers_table(record: Any = None, other: Record | None = None) -> Text:
    """Compare register_tiles, flash_wmma and flash_mma with others at SHAPE and d = 128, as a table."""
    record = reading.in_turns(record)
    other = promises.recorded() if other is None else other
    results, plain = reading.results_of(record or {}), [vars(result) for result in other.results] if other else []
    columns = [(name, dtype, d) for name, dtype in _OURS for d in (64, 128)]
    lines = [
        "| how many times as fast as | " + " | ".join(f"{LADDER[n].number:02}, d = {d}" for n, _, d in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for title, wanted in _OTHERS.items():
        cells = []
        for name, dtype, d in columns:
            case = {"shape": [*SHAPE[:3], d], "dtype": dtype, "causal": False}
            ours = records.first(results, kind="stage", name=name, **case)
            theirs = records.first(plain if wanted["kind"] == "plain" else results, **case | wanted)
            cells.append(_times(theirs, ours) if ours and theirs else "")
        if any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return Text("\n".join(lines) if len(lines) > 2 else f"*({NO_RECORD})*")


def _times(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
    """Format a ratio like `reading.speedup`, but without decimals from 100 on."""
    ratio = slower["ms"] / faster["ms"]
    return f"{ratio:,.0f}×" if ratio >= 100 else reading.speedup(slower, faster)


_OURS = (("register_tiles", "float32"), ("flash_wmma", "bfloat16"), ("flash_mma", "bfloat16"))


# What a line is compared with: the fields of a result that is not ours; kind "plain" is in the record of promises.
_OTHERS = {
    "01, in float32": {"kind": "stage", "name": "naive", "dtype": "float32"},
    "SDPA math, whose scores are float32": {"kind": "peer", "name": "SDPA math"},
    "three PyTorch calls in the same type": {"kind": "plain"},
    "SDPA efficient": {"kind": "peer", "name": "SDPA efficient"},
    "SDPA flash (FlashAttention-2)": {"kind": "peer", "name": "SDPA flash"},
    "SDPA cuDNN": {"kind": "peer", "name": "SDPA cuDNN"},
}


def _measured(record: Record | None, **wanted: Any) -> Measurement | None:
    """Return the first measurement with these field values."""
    row = records.first(map(vars, record.results), **wanted) if record else None
    return Measurement(**row) if row else None


# How many bytes move the scores through memory or avoid it: float32, N = 4096, d = 64; per head.
_MOVERS = {
    "SDPA math, one head": "scores are stored, and read back",
    "naive": "scores are stored, and read back",
    "tiled": "scores stay in the block; computed twice",
    "online_softmax": "scores stay in the block",
    "register_tiles": "scores stay in the block; a launch of 16 heads",
    "SDPA efficient": "scores stay in the block; a launch of 16 heads",
}


def traffic(record: Any = None) -> dict[str, dict[str, float]]:
    """Return the bytes per head of 4096 rows, d = 64, float32: {name: {"dram": bytes, "L2": bytes}}."""
    record = counters.recorded() if record is None else record
    by_name: dict[str, dict[str, float]] = {}
    for row in (record or {"rows": ()})["rows"]:
        batch, heads, n, d = row["shape"] if len(row["shape"]) == 4 else (0, 0, 0, 0)
        figures = row["figures"]
        if row["stage"] in _MOVERS and (n, d, row["dtype"]) == (4096, 64, "float32") and "L2 bytes" in figures:
            dram = figures["dram bytes read"] + figures["dram bytes written"]
            by_name[row["stage"]] = {"dram": dram / (batch * heads), "L2": figures["L2 bytes"] / (batch * heads)}
    return {name: by_name[name] for name in _MOVERS if name in by_name}


def traffic_table(record: Any = None) -> Text:
    """Format `traffic` as a table, with its ratio to SDPA math's traffic."""
    by_name = traffic(record)
    first = by_name.get("SDPA math, one head")
    if first is None:
        return Text(f"*({NO_RECORD})*")
    lines = ["| one head, N = 4096, d = 64, float32 | HBM | L2 | |", "|---|---:|---:|---|"]
    for name, bytes_ in by_name.items():
        cells = []
        for level in ("dram", "L2"):
            times = first[level] / bytes_[level]
            ratio = f" ({times:.3g}× less)" if times >= 1 else f" ({1 / times:.3g}× more)"
            cells.append(bytes_text(bytes_[level]) + (ratio if name != "SDPA math, one head" else ""))
        lines.append(f"| {name} | {' | '.join(cells)} | {_MOVERS[name]} |")
    return Text("\n".join(lines))


@records.table_of(promises.recorded, lambda: Text(f"*({NO_RECORD}: N = {promises.LONG:,})*"))
def long_table(record: Record | None = None) -> Text:
    """Format one launch at N = 131,072: time and memory beyond Q, K, V and O, or why it is missing."""
    lines = ["| | N × N scores | | ms | TFLOP/s | memory beyond Q, K, V, O |", "|---|---:|---|---:|---:|---:|"]
    for case in promises.LONG_CASES:
        heads = case.shape[1]
        title = f"{heads} head{'s' * (heads > 1)}, {case.dtype}"
        scores = bytes_text(promises.scores_bytes(case))
        for cells in _long_rows(record, case):
            lines.append(f"| {title} | {scores} | {' | '.join(cells)} |")
            title = scores = ""
    return Text("\n".join(lines))


def _long_rows(record: Record, case: Any) -> Iterator[tuple[str, str, str, str]]:
    for r in record.results:
        if (tuple(r.shape), r.dtype) == (case.shape, case.dtype) and r.kind in ("stage", "peer"):
            extra = "" if r.extra_bytes is None else bytes_text(r.extra_bytes)
            yield r.name, f"{r.ms:,.0f}", f"{r.tflops:.3g}", extra
    for note in record.notes:
        if str(case) in note.cases:
            why = "out of memory" if "OutOfMemory" in note.why else note.why
            yield note.name, why, "", ""


def latency_table(record: Record | None = None) -> Text:
    """Format small calls: µs from the call to the result, and on the device only."""
    record = promises.recorded() if record is None else record
    waits = [r for r in record.results if r.kind in ("latency", "device")] if record else []
    if not waits:
        return Text(f"*({NO_RECORD}: small calls)*")
    lines = ["| | | µs until the result is there | µs of the GPU |", "|---|---|---:|---:|"]
    for note in dict.fromkeys(r.note for r in waits):
        title = note
        for name in dict.fromkeys(r.name for r in waits if r.note == note):
            both = [_measured(record, kind=kind, name=name, note=note) for kind in ("latency", "device")]
            cells = (f"{1e3 * r.ms:.1f}" if r else "" for r in both)
            lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
            title = ""
    return Text("\n".join(lines))


# ---- inside PyTorch models

ATTENTIONS = {"course": "ours", "sdpa": "SDPA flash", "eager": "eager: scores in memory"}


def in_models(record: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the record of PyTorch models; {} if there is none."""
    return (records.load(torch_model.RECORD) or {}) if record is None else record


def model_speed(
    kind: str, n: int, *, kv_heads: int = 16, record: Mapping[str, Any] | None = None
) -> dict[str, Mapping[str, Any]]:
    """Return a model's results with each attention, {"course": ..., "sdpa": ..., "eager": ...}; {} if not recorded.

    Args:
        kind: "prefill", one forward pass, or "training", forward and backward. n: tokens of the one sequence.
    """
    rows = in_models(record).get(kind, ())
    return {r["implementation"]: r for r in rows if (r["n"], r["kv_heads"]) == (n, kv_heads)}


def models_table(kind: str, *, kv_heads: int = 16, record: Mapping[str, Any] | None = None) -> Text:
    """Format a model's tokens per second (spreads above 5 % in brackets) and peak memory with each attention."""
    lengths = sorted({r["n"] for r in in_models(record).get(kind, ()) if r["kv_heads"] == kv_heads})
    if not lengths:
        return Text(f"*({NO_RECORD}: {kind} of a model of PyTorch)*")
    headings = [f"{what}, {title}" for what in ("tokens/s", "memory") for title in ATTENTIONS.values()]
    lines = [
        "| N | " + " | ".join(headings) + " |",
        "|---:|" + "---:|" * len(headings),
    ]
    for n in lengths:
        by_attention = model_speed(kind, n, kv_heads=kv_heads, record=record)
        ran = [by_attention.get(name, {}) for name in ATTENTIONS]
        errors = ["out of memory" if "OutOfMemory" in r.get("error", "") else r.get("error", "") for r in ran]
        speeds = [_rate(r) if "ms" in r else why for r, why in zip(ran, errors, strict=True)]
        peaks = [bytes_text(r["peak_bytes"]) if "ms" in r else "" for r in ran]
        lines.append(f"| {n:,} | {' | '.join(speeds)} | {' | '.join(peaks)} |")
    return Text("\n".join(lines))


def _rate(r: Mapping[str, Any]) -> str:
    """Format tokens per second to three digits, with spreads above 5 % in brackets."""
    low, high = ("ms_q1", "ms_q3") if "ms_q1" in r else ("ms_min", "ms_max")
    spread = (r[high] - r[low]) / r["ms"]
    rate = float(f"{r['tokens_per_s']:.3g}")
    return f"{rate:,.0f}" + (f" ({spread:.0%})" if spread > 0.05 else "")


def calls_table(record: Mapping[str, Any] | None = None) -> Text:
    """Format the host's microseconds per call on PyTorch's tensors."""
    rows = in_models(record).get("host", ())
    if not rows:
        return Text(f"*({NO_RECORD}: the host's share of a call)*")
    columns = dict.fromkeys(r["what"] for r in rows)
    lines = ["| µs | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in dict.fromkeys(r["call"] for r in rows):
        us = {r["what"]: f"{r['us']:,.0f}" for r in rows if r["call"] == name}
        lines.append(f"| `{name}` | " + " | ".join(us.get(what, "") for what in columns) + " |")
    return Text("\n".join(lines))

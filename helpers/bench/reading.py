"""Read the record of a run: results by shape, by step, by tile size.

helpers.bench.plan defines what is recorded. In each function, `record` replaces the committed record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.attention.ladder import LADDER
from helpers.bench import records, steps
from helpers.bench.results import RECORD


def recorded(path: Path | str = RECORD) -> dict[str, Any] | None:
    """Read the recorded GPU run, {"device": {...}, "how": {...}, "results": [...]}; None if there is none."""
    return records.load(Path(path))


def results_of(record: Any = None) -> list[dict[str, Any]]:
    """Return all results of a record, by default the committed one's; empty if there is none."""
    return (in_turns(record) or {}).get("results", [])


def in_turns(record: Any = None) -> Any:
    """Return the record whose steps and peers were timed in turns: the committed one, unless another is given."""
    return recorded() if record is None else record


def roofs(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the recorded roofs by name."""
    return {r["name"]: r for r in record["results"] if r["kind"] == "roof"}


def case_of(r: Mapping[str, Any]) -> tuple[tuple[int, ...], str, bool]:
    """Return a row's shape, type and whether it is causal."""
    return tuple(r["shape"]), r.get("dtype"), r.get("causal", False)


def measurements(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
    backward: bool = False,
) -> list[dict[str, Any]]:
    """Return the recorded results at one shape (batch, heads, n, head_dim), in the order of `names` or of the record.

    Left out are stages with other tile sizes (kind "variant") or a changed text ("experiment"), steps and host times:
    see `climb` and `recorded()`. backward: those of the gradients, not of the output.
    """
    wanted = (tuple(shape), dtype, causal)
    fitting = [
        r
        for r in results_of(record)
        if case_of(r) == wanted
        and r["kind"] in (("backward", "backward peer") if backward else ("stage", "peer", "roof"))
    ]
    if names is None:
        return fitting
    by_name = {r["name"]: r for r in fitting}
    return [by_name[name] for name in names if name in by_name]


def climb(
    stage: str, shape: Sequence[int], *, dtype: str = "float32", causal: bool = False, record: Any = None
) -> list[dict[str, Any]]:
    """Return the recorded results of a climb at one shape, one for each step; the stage itself is last.

    Each has "name", "tflops", "ms", "ms_min", "ms_max" and more; steps have "step", the number, and "idea". The figures
    of unmeasured steps are NaN. Empty if no step is recorded. record: None for that of `in_turns`.
    """
    record = in_turns(record)
    rows = [
        r
        for r in results_of(record)
        if case_of(r) == (tuple(shape), dtype, causal) and r["kind"] in ("step", "backward step")
    ]
    backward = LADDER[stage].direction == "backward" if stage in LADDER else False
    how = {"dtype": dtype, "causal": causal, "record": record, "backward": backward}
    of_stage = next(iter(measurements(shape, [stage], **how)), None)
    not_measured = dict.fromkeys(("tflops", "ms", "ms_min", "ms_max"), math.nan)
    return [not_measured | row for row in steps.in_order(stage, rows, of_stage)]


def result(*, record: Any = None, **wanted: Any) -> dict[str, Any] | None:
    """Return the first recorded result with all of these values, such as name=, kind=, dtype=, shape=; or None."""
    wanted = {key: list(value) if isinstance(value, tuple) else value for key, value in wanted.items()}
    return records.first(results_of(record), **wanted)


def gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[float]:
    """Return a step's speedup over the previous one, if they were timed in turns; otherwise an empty list.

    The median and the range over the rounds: the quartiles or, in older records, the extremes.
    """
    follows = before.get("step") is not None and before["step"] == after.get("follows")
    return (after.get("gain") or []) if follows else []


def speedup(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
    """Format the speedup of one recorded result over another, with the range if it is above 5 %.

    The text says if one of them is an unmeasured step. For consecutive steps that were timed in turns, the range is
    that of the rounds' ratios.
    """
    if math.isnan(slower["ms"] / faster["ms"]):
        return steps.NOT_MEASURED
    if in_turns := gain(slower, faster):
        median, low, high = in_turns
        return range_text(in_turns) if high - low > 0.05 * median else f"{median:.2f}×"
    text = f"{slower['ms'] / faster['ms']:.2f}×"
    if all(r["ms_max"] - r["ms_min"] <= 0.05 * r["ms"] for r in (slower, faster)):
        return text
    return f"{text} ({slower['ms_min'] / faster['ms_max']:.2f} to {slower['ms_max'] / faster['ms_min']:.2f})"


def range_text(gain: Sequence[float]) -> str:
    """Format a recorded gain and its range, such as "1.11× (1.10 to 1.12)"."""
    median, low, high = gain
    return f"{median:.2f}× ({low:.2f} to {high:.2f})"


def experiment_times(
    stage: str, shape: Sequence[int], *, dtype: str = "float32", causal: bool = False, record: Any = None
) -> dict[str, float]:
    """Return the recorded milliseconds of a stage and its experiments by name; {} without a record.

    Args:
        shape: (batch, heads, n, head_dim).
    """
    wanted, times = (tuple(shape), dtype, causal), {}
    for r in results_of(record):
        name, _, experiment = r["name"].partition(": ")
        if name == stage and case_of(r) == wanted and r["kind"] in ("stage", "experiment"):
            times[experiment or name] = r["ms"]
    return times

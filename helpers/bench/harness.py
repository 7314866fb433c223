"""Run studies: check each way, time the ways in turns, make rows, and save the record after each row.

A "way" is one of the implementations that a study compares. A module of `studies/` defines the ways, the parts of its
record, and how the record is printed:

    STUDY = Study("bits", {"rows": rows})
    take = STUDY.take

Each part is a function that yields rows. A row that names its part, in "part", goes to the record's list "rows"; other
rows go to the list named after the part.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from helpers.attention import kernel
from helpers.attention.ladder import Rung
from helpers.bench import records
from helpers.bench.cases import Case
from helpers.bench.job import Job, WrongOutput, of_stage
from helpers.bench.run import JobRunner, compile_all
from helpers.bench.timing import in_turns, speed_range, speeds
from helpers.device import ON_GPU, describe

Row = dict[str, Any]
Way = Callable[[], Any]
Part = Callable[[], Iterable[Any]]
Name = TypeVar("Name", bound=Hashable)


def words_of_process(study: str, least: int) -> list[str]:
    """Return the arguments of a process that a study starts on a GPU. Exits with a line and 2 if it is none."""
    if len(sys.argv) <= least or not ON_GPU:
        print(f"`python3 -m helpers.bench.study {study} FILE` starts this process, on a GPU", file=sys.stderr)
        sys.exit(2)
    return sys.argv[1:]


def figures(taken: Sequence[float], flops: float | None = None) -> Row:
    """Return the median and the extremes of times in milliseconds and, with `flops`, the TFLOP/s at the median."""
    ms = statistics.median(taken)
    rate = {} if flops is None else {"tflops": flops / ms / 1e9}
    return {"ms": ms, "ms_min": min(taken), "ms_max": max(taken), **rate}


def compare(
    ways: Mapping[Name, Way],
    rounds: int,
    *,
    flops: float | None = None,
    over: Name | None = None,
    of: Name | None = None,
    itself: bool = False,
    read: bool = False,
) -> dict[Name, Row]:
    """Time ways in turns, and return each one's figures. All have been run and checked before.

    Args:
        over: a way; each row gets its own way's speedup over this one.
        of: a way; each row gets this way's speedup over its own.
        itself: the row of the way in `over` or `of` gets a speedup, too, which is 1.
        read: see `timing.elapsed`.
    """
    times = in_turns(ways, rounds, read=read)
    rows = {name: figures(taken, flops) for name, taken in times.items()}
    for name, row in rows.items():
        if over in times and (itself or name != over):
            row |= speeds(times[name], times[over])
        if of in times and (itself or name != of):
            row |= speeds(times[of], times[name])
    return rows


def compare_case(case: Case, ways: Mapping[str, Way], rounds: int, **how: Any) -> list[Row]:
    """Time the ways of a case as `compare` does: one row each, with its shape, type and mask."""
    what = {"shape": list(case.shape), "dtype": case.dtype, "causal": case.causal}
    how = {"flops": case.flops, **how}
    return [{"name": name, **what, **row} for name, row in compare(ways, rounds, **how).items()]


def require_same(what: str, ways: Mapping[str, Callable[[], Any]], most: float = 0.02) -> None:
    """Run all ways, which return one or more arrays each, and compare them with the first way's.

    Raises:
        WrongOutput: a way differs by more than this share of the largest number.
    """
    expected = None
    for name, run in ways.items():
        result = run()
        expected = result if expected is None else expected
        for a, b in zip(expected, result, strict=True):  # of one array: its sequences
            error, largest = float(abs(a - b).max()), float(abs(b).max())
            if not error <= most * largest:
                raise WrongOutput(f"{what}: {name} differs by {error:.2e} of {largest:.2e}")


def fields_text(row: Mapping[str, Any]) -> str:
    """Format the fields of a new row."""
    return " ".join(f"{name}={v:.4g}" if isinstance(v, float) else f"{name}={v}" for name, v in row.items())


def heads_text(row: Mapping[str, Any]) -> str:
    """Format the shape and mask of a row as "4 x 16 heads of 64, N = 4096, causal"."""
    batch, heads, n, d = row["shape"]
    return f"{batch} x {heads} heads of {d}, N = {n}" + ", causal" * row["causal"]


def compare_jobs(
    runner: JobRunner, jobs: Sequence[Job], rounds: int, *, over: str | None = None, of: str | None = None
) -> list[Row]:
    """Check jobs of one case, then time them in turns. Return a row for each: its figures, and its check's results.

    Args:
        over, of: see `compare`; this job's own row has a speedup, too.

    Raises:
        WrongOutput: the output of a job is wrong.
    """
    (case,) = {job.case for job in jobs}
    with contextlib.ExitStack() as contexts:
        launched = _launched(runner, {job.name: job for job in jobs}, contexts)
        runs = {name: run for name, (run, _) in launched.items()}
        rows = compare(runs, rounds, flops=case.flops, over=over, of=of, itself=True)
    what = {"shape": list(case.shape), "causal": case.causal}
    return [{**what, "name": name, **row, **launched[name][1]} for name, row in rows.items()]


def compare_tiles(case: Case, ways: Mapping[Name, tuple[Rung, Mapping[str, int]]]) -> dict[Name, Row]:
    """Compile stages with other tile sizes in parallel, check them, and time them in turns.

    Returns:
        For each way: "full" and "causal", TFLOP/s without a mask and with one, and "local_bytes" per thread.

    Raises:
        WrongOutput: an output is wrong.
    """
    masked = replace(case, causal=True)
    jobs = {
        (name, each): of_stage(stage, each, sizes, name=str(dict(sizes)))
        for (name, (stage, sizes)), each in itertools.product(ways.items(), (case, masked))
    }
    compile_all(list(jobs.values()))
    with contextlib.ExitStack() as contexts:
        launched = _launched(JobRunner(0.0), jobs, contexts)
        times = in_turns({key: run for key, (run, _) in launched.items()}, 5)
    rows = {}
    for name, (stage, sizes) in ways.items():
        defines = {"HEAD_DIM": case.shape[3], **sizes}
        built = kernel.load_all(stage.file, stage.kernel_names(case.dtype), defines=defines)
        rows[name] = {"local_bytes": built[stage.kernel_name(case.dtype)].attributes.get("local_size_bytes")}
        for what, each in (("full", case), ("causal", masked)):
            rows[name][what] = round(each.flops / statistics.median(times[name, each]) / 1e9, 1)
    return rows


def _launched(runner: JobRunner, jobs: Mapping[Any, Job], contexts: contextlib.ExitStack) -> dict[Any, tuple[Way, Row]]:
    """Launch and check jobs; return each launch, and its check's results."""
    launched = {}
    for key, job in jobs.items():
        try:
            launched[key] = runner.launched(job, contexts)
        except WrongOutput as error:
            raise WrongOutput(f"{job.name} at {job.case}: {error}") from None
    return launched


def speed_text(row: Mapping[str, float], width: int = 0) -> str:
    """Format a row's speed and its range as text, such as "1.11× (1.10 to 1.12)"."""
    low, high = speed_range(row)
    return f"{row['speed']:{width}.2f}× ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Study:
    """A record and the functions that measure its parts.

    Args:
        name: of the module in `studies/`.
        parts: a function for each part. It yields rows, or lists of rows that are saved together; or it returns a dict,
            which is the whole part.
        head: returns what a record says about its machine and how it was measured.
        prepare: called first with the parts to measure: it compiles ahead.
        line: formats a new row for printing.
        optional: parts that are measured only if they are named.
        needs: Python packages without which nothing can be measured.
        key: the key under which a row names its part.
        replaces: returns whether a row of an earlier record is replaced when its part is measured again.
    """

    name: str
    parts: Mapping[str, Part]
    head: Callable[[], Mapping[str, Any]] = lambda: {"device": describe()}
    prepare: Callable[[Collection[str]], None] = lambda parts: None
    line: Callable[[Row], str] | None = None
    optional: Collection[str] = ()
    needs: Sequence[str] = ()
    key: str = "part"
    replaces: Callable[[Row], bool] = lambda row: True

    def take(self, path: Path, words: Sequence[str] = ()) -> dict[str, Any]:
        """Measure, and write the record to path after each row. A part that raises is noted in record["failed"].

        words: the parts to measure; all but the optional ones if empty. The other parts of the record in path stay.
        """
        self.check_parts(words)
        parts = list(words) or [part for part in self.parts if part not in self.optional]
        head = dict(self.head())
        record = self._other_parts(path, parts, head) if words and path.is_file() else {}
        record |= head
        self.prepare(parts)
        for part in parts:
            began = time.perf_counter()
            try:
                self._measure(part, path, record)
            except (Exception, records.Refused) as error:  # the other parts still count, and GPU time is scarce
                record.setdefault("failed", {})[part] = f"{type(error).__name__}: {str(error)[:600]}"
                print(f"[FAIL] {part}: {record['failed'][part]}", flush=True)
            records.save(path, record)
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
        return record

    def check_parts(self, words: Sequence[str]) -> None:
        """Raise Refused unless all words name parts, of several."""
        if len(self.parts) == 1:
            records.check_single_file(self.name, words)
        if unknown := [word for word in words if word not in self.parts]:
            raise records.Refused(f"{self.name} has no part {unknown[0]!r}; its parts are {', '.join(self.parts)}")

    def _measure(self, part: str, path: Path, record: dict[str, Any]) -> None:
        """Measure a part into a record, and save it after each row."""
        result = self.parts[part]()
        if isinstance(result, Mapping):
            record[part] = result
            return
        own: list[Row] = []  # rows that do not name their part; they replace an earlier record's
        named = False
        for each in result:
            rows = each if isinstance(each, list) else [each]
            for row in rows:
                named = self.key in row
                (record.setdefault("rows", []) if named else own).append(row)
            if not named:
                record[part] = own
            records.save(path, record)
            if self.line is not None:
                print("\n".join(map(self.line, rows)), flush=True)
        if not own and part in record and part != "rows":
            record[part] = own

    def _other_parts(self, path: Path, parts: Collection[str], head: Mapping[str, Any]) -> dict[str, Any]:
        """Read an earlier record without the rows that are measured again. Raises Refused if it is from another GPU."""
        record = records.load(path)
        if "device" not in record:
            raise records.Refused(f"{path} has no parts of {self.name} to keep: write another FILE")
        devices = record["device"], head["device"]
        before, now = (each if isinstance(each, str) else each.get("name") or each["description"] for each in devices)
        if before != now:
            raise records.Refused(f"{path} is of {before}; this is {now}: write another FILE")
        record.pop("failed", None)
        if "rows" in record:
            kept = (row for row in record["rows"] if row.get(self.key) not in parts or not self.replaces(row))
            record["rows"] = list(kept)
        return record

"""A checked run of one launch, and what it saw: every byte the kernel asked for, and every race it has.

    report = xray(kernel, grid, block, args)
    report                      # a table; in Jupyter, HTML
    report.findings             # [] when clean
    report.source()             # the .cu with the figures beside its lines

The launch runs on the CPU engine's checked build, on a GPU machine too. Names follow compute-sanitizer and Nsight
Compute, which come next in a reader's life. **Bytes here are what the threads asked for.** A GPU's caches answer most
requests, so its memory moves less: there is no cache model here.

What is not seen: an access that jumps from one `__shared__` array right into another (more than 4 KB past its end; the
address is all there is to judge by), a memcpy whose size is not known at compile time, and FLOPs.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from helpers import cpu
from helpers.cpu import checked, failures, module
from helpers.cuda_source import source
from helpers.device import ON_GPU, cp
from helpers.draw import timeline

KINDS = {
    checked.RACE: "race",
    checked.OUT_OF_BOUNDS: "out of bounds",
    checked.UNINITIALISED: "uninitialised",
    checked.MISALIGNED: "misaligned",
    checked.IN_FLIGHT: "not waited for",
    checked.NEVER_WAITED: "never waited for",
}

_STOPPED = {
    **dict.fromkeys(failures.DIVERGENCE, "barrier divergence"),
    **dict.fromkeys(failures.DEADLOCK, "deadlock"),
    **dict.fromkeys(failures.MISALIGNED, "misaligned"),
    failures.Reason.ILLEGAL_ACCESS: "out of bounds",
    failures.Reason.EXPIRED: "endless loop",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. file, line: of the access; other_*: of the earlier access that it collides with.

    kind: race, out of bounds, uninitialised, misaligned, not waited for, never waited for (asynchronous copies), never
    written, barrier divergence, deadlock, endless loop, or stopped (a failed assertion, a division by zero).
    block, thread: (x, y, z). array, index: what was touched, in elements (of 4 bytes in shared memory).
    count: how often the same two lines did the same.
    """

    kind: str
    message: str
    file: str | None = None
    line: int | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    array: str | None = None
    index: int | None = None
    other_file: str | None = None
    other_line: int | None = None
    other_block: tuple[int, int, int] | None = None
    other_thread: tuple[int, int, int] | None = None
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" ({self.count:,} times)" if self.count > 1 else "")


@dataclass
class Figures:
    """What an array, or a line of the source, cost.

    read, written: bytes that threads asked for. loads, stores: requests, one for each instruction of a warp;
    shared_requests: those of them that went to shared memory. sectors: 32-byte pieces of global memory touched by the
    others; wavefronts: turns of shared memory; conflicts: turns beyond what lanes so wide need: one for 4 bytes each,
    four for 16. atomics: accesses that were atomic.
    """

    read: int = 0
    written: int = 0
    loads: int = 0
    stores: int = 0
    shared_requests: int = 0
    sectors: int = 0
    wavefronts: int = 0
    conflicts: int = 0
    atomics: int = 0

    @property
    def requests(self) -> int:
        """Instructions of warps that touched it."""
        return self.loads + self.stores

    @property
    def sectors_per_request(self) -> float:
        """4 is a warp reading 32 neighbouring words; 1 is all lanes at one word; 32 is each lane somewhere else."""
        requests = self.requests - self.shared_requests
        return self.sectors / requests if requests else 0.0

    @property
    def wavefronts_per_request(self) -> float:
        """For words, 1 is no bank conflict, and 32 is a warp whose lanes all wait for the same bank."""
        return self.wavefronts / self.shared_requests if self.shared_requests else 0.0

    def add(self, site: checked.Site, *, is_shared: bool) -> None:
        """Count one instruction in."""
        size = site.count * site.size
        if site.is_write:
            self.written += size
            self.stores += site.requests
        else:
            self.read += size
            self.loads += site.requests
        self.shared_requests += site.requests if is_shared else 0
        self.sectors += site.sectors
        self.wavefronts += site.wavefronts
        self.conflicts += max(site.wavefronts - site.requests * max(1, site.size // 4), 0)
        self.atomics += site.count if site.is_atomic and site.is_write else 0


_Row = tuple[str, float, str, str]  # mark, share of all bytes, figures, code
_COLUMNS = (("bytes", 13), ("share", 5), ("requests", 10), ("sect/req", 8), ("wave/req", 8))


class Listing(str):
    """A listing of source with figures: a text, and HTML in Jupyter."""

    rows: list[_Row]

    def __new__(cls, rows: list[_Row]) -> Listing:
        listing = super().__new__(cls, "\n".join(f"{figures} {code}".rstrip() for _, _, figures, code in rows))
        listing.rows = rows
        return listing

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        lines = []
        for mark, share, figures, code in self.rows:
            colour = "rgba(213,94,0,0.30)" if mark == "!" else f"rgba(0,114,178,{0.5 * share:.2f})"
            style = f" style='background:{colour}'" if mark == "!" or share >= 0.01 else ""
            lines.append(f"<span{style}>{html.escape(f'{figures} {code}'.rstrip())}</span>")
        return "<pre style='white-space:pre;overflow-x:auto;line-height:1.35'>" + "\n".join(lines) + "</pre>"


def _columns(f: Figures, total: int) -> str:
    """What a line, or one array of it, asked for, under _COLUMNS."""
    size = f.read + f.written
    per = [f"{value:.1f}" if value else "" for value in (f.sectors_per_request, f.wavefronts_per_request)]
    values = (f"{size:,}", f"{size / total:.0%}", f"{f.requests:,}", *per)
    return " ".join(f"{value:>{width}}" for value, (_, width) in zip(values, _COLUMNS, strict=True))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))] for r in rows]
    return ["  ".join(row).rstrip() for row in aligned]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    """The same rows for Jupyter, in the colours of its theme."""
    body = ""
    for row, tag in zip(rows, ["th"] + ["td"] * len(rows), strict=False):
        body += "<tr>"
        for column, value in enumerate(row):
            align = "right" if column else "left"
            body += f"<{tag} style='padding:2px 10px;text-align:{align}'>{html.escape(value)}</{tag}>"
        body += "</tr>"
    return f"<table>{body}</table>"


def fetch_maps(fetches: Mapping[str, np.ndarray]) -> Any:
    """How often each element was fetched, as images on one colour scale: {title: `Report.fetches[array]`, ...}."""
    from helpers.draw import show

    images = {}
    for name, counts in fetches.items():
        low, high = int(counts.min()), int(counts.max())
        times = f"{low:,} times each" if low == high else f"{low:,} to {high:,} times"
        images[f"{name}: {times}"] = np.atleast_2d(counts)
    return show.heatmap(images, xlabel="column", ylabel="row", colour="fetches")


class Table:
    """Figures side by side: a text, and HTML in Jupyter."""

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        self.rows = [tuple(row) for row in rows]

    def __repr__(self) -> str:
        return "\n".join(_table(self.rows))

    def _repr_html_(self) -> str:
        return _html_table(self.rows)


def compare(*reports: Report) -> Table:
    """Bytes that the threads asked of each array of global memory, a column for each report."""
    arrays = dict.fromkeys(name for report in reports for name in report.traffic)
    rows = [("bytes asked for", *(report.name for report in reports))]
    for name in arrays:
        figures = [report.traffic.get(name) for report in reports]
        rows.append((name, *(f"{f.read + f.written:,}" if f else "" for f in figures)))
    totals = [sum(f.read + f.written for f in report.traffic.values()) for report in reports]
    rows.append(("together", *(f"{total:,}" for total in totals)))
    requests = [sum(f.requests for f in report.traffic.values()) for report in reports]
    return Table([*rows, ("requests of warps", *(f"{number:,}" for number in requests))])


@dataclass
class Report:
    """What a checked run saw.

    findings: [] when clean. traffic: figures by array of global memory. shared: by `__shared__` array. by_line: by
    (file, line). fetches: by array, how often each element was read, in the array's shape. barriers: reached, by
    blocks. collectives: shuffles, votes and their like, by warps.
    """

    name: str
    code: str
    findings: list[Finding]
    traffic: dict[str, Figures]
    shared: dict[str, Figures]
    by_line: dict[tuple[str, int], Figures]
    fetches: dict[str, np.ndarray]
    barriers: int
    collectives: int
    worst: dict[tuple[str, int], list[tuple[str, int, dict[int, int]]]] = field(default_factory=dict, repr=False)
    by_access: dict[tuple[str, int], dict[str, Figures]] = field(default_factory=dict, repr=False)  # by_line, by array
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    passed: dict[int, list[timeline.Step]] = field(default_factory=dict, repr=False)  # by block

    @property
    def clean(self) -> bool:
        """No findings."""
        return not self.findings

    def assert_clean(self) -> None:
        """For tests. Raises AssertionError with the findings where there are any."""
        if self.findings:
            raise AssertionError("\n".join([f"{self.name}: {self.summary()}", *map(str, self.findings)]))

    def summary(self) -> str:
        """`0 findings`, as a sanitizer ends."""
        return f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}"

    # ------------------------------------------------------------------------------------ as text

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, f in self.traffic.items():
            per = f"{f.sectors_per_request:.2f}" if f.requests else ""
            rows.append((name, f"{f.read:,}", f"{f.written:,}", f"{f.requests:,}", per, ""))
        for name, f in self.shared.items():
            name = name if " " in name else f"__shared__ {name}"
            rows.append((name, f"{f.read:,}", f"{f.written:,}", f"{f.requests:,}", "", f"{f.conflicts:,}"))
        return rows

    _HEAD = ("array", "bytes read", "bytes written", "requests", "sectors/request", "bank conflicts")

    def _notes(self) -> list[str]:
        counted = [
            f"{number:,} {name}{'' if number == 1 else 's'}"
            for number, name in ((self.barriers, "barrier"), (self.collectives, "warp-wide operation"))
            if number
        ]
        return [
            *([f"{', '.join(counted)}, counted once for each block or warp."] if counted else []),
            "A request is one instruction of one warp. A sector is 32 bytes: 32 neighbouring words are 4.",
            "Bytes are what the threads asked for. Caches answer most of it: memory moves less.",
        ]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.summary()}"]
        for finding in self.findings:
            lines += textwrap.wrap(str(finding), 100, initial_indent="  ", subsequent_indent="    ")
        return "\n".join([*lines, *_table([self._HEAD, *self._rows()]), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = "rgba(0,158,115,0.25)" if self.clean else "rgba(213,94,0,0.25)"
        found = "".join(f"<li><code>{html.escape(str(f))}</code></li>" for f in self.findings)
        notes = "<br/>".join(map(html.escape, self._notes()))
        summary = f"<span style='background:{colour};padding:1px 6px'>{self.summary()}</span>"
        return (
            f"<p><b>{html.escape(self.name)}</b>: {summary}</p>"
            f"{f'<ul>{found}</ul>' if found else ''}{_html_table([self._HEAD, *self._rows()])}"
            f"<p style='font-size:90%;opacity:0.8'>{notes}</p>"
        )

    def source(self, *, around: int | None = None) -> Listing:
        """The source with what each line asked for beside it: bytes, requests, and what a request costs.

        A line that touches several arrays at different costs has a row for each below it. `!` marks the lines of the
        findings. In Jupyter the lines with the most bytes are shaded.

        Args:
            around: only the lines that touch memory or have findings, with so many lines around each; None: all.
        """
        table = source.line_table(self.code, "kernel.cu")
        total = sum(f.read + f.written for f in self.by_line.values()) or 1
        flagged = {(f.file, f.line) for f in self.findings} | {(f.other_file, f.other_line) for f in self.findings}
        near = None
        if around is not None:
            steps = range(-around, around + 1)
            near = {(file, line + k) for file, line in [*self.by_line, *flagged] if line for k in steps}
        rows: list[_Row] = [("", 0.0, " ".join(f"{name:>{width}}" for name, width in _COLUMNS), "")]
        blank = " " * len(rows[0][2])
        for (file, number), text in table.items():
            if near is not None and (file, number) not in near:
                if rows[-1][3] != "...":
                    rows.append(("", 0.0, blank, "..."))
                continue
            f = self.by_line.get((file, number))
            share = (f.read + f.written) / total if f else 0.0
            mark = "!" if (file, number) in flagged else "|"
            rows.append((mark, share, _columns(f, total) if f else blank, f"{mark} {number:4} {text}"))
            parts = self.by_access.get((file, number), {})
            if len({p.sectors_per_request for p in parts.values() if p.sectors}) > 1 or (
                len({p.wavefronts_per_request for p in parts.values() if p.wavefronts}) > 1
            ):
                rows += [("", 0.0, _columns(p, total), f"|        of which {name}") for name, p in parts.items()]
        return Listing(rows)

    # ------------------------------------------------------------------------------------ as pictures

    def heatmap(self, *arrays: str) -> Any:
        """How often each element of an array was fetched, as an image; several arrays share a colour scale.

        Raises:
            KeyError: no such array; the message names those there are.
        """
        for name in arrays:
            if name not in self.fetches:
                raise KeyError(f"no array {name!r}; there are: {', '.join(self.fetches)}")
        return fetch_maps({name: self.fetches[name] for name in arrays})

    def banks(self, line: int, array: str | None = None) -> Any:
        """Which lane hits which bank of shared memory, in the costliest request of a line.

        Lanes with 8 or 16 bytes each are served in groups, of 16 or 8 lanes: there is a picture for each, with a row
        for each word of a lane.

        Raises:
            KeyError: the line reads and writes no shared memory.
        """
        from helpers.draw import show

        found: dict[str, tuple[int, dict[int, int]]] = {}  # array -> bytes of a lane, where each lane goes
        for (_, number), samples in self.worst.items():
            for name, size, offsets in samples if number == line else ():
                if name not in self.shared or (array is not None and name != array):
                    continue
                phases = [show.turns(words) for words in _phases(size, offsets).values()]
                if name not in found or sum(phases) > sum(map(show.turns, _phases(*found[name]).values())):
                    found[name] = size, offsets
        if not found:
            lines = sorted({n for (_, n), samples in self.worst.items() if any(s[0] in self.shared for s in samples)})
            what = f"the shared array {array!r}" if array is not None else "no shared memory"
            verb = "does not touch" if array is not None else "touches"
            there = ", ".join(map(str, lines)) or "none"
            raise KeyError(f"line {line} {verb} {what}; lines that touch shared memory: {there}")
        pictures, lanes_of = {}, []
        for name, (size, offsets) in found.items():
            for first, words in _phases(size, offsets).items():
                words_each = max(1, size // 4)
                lanes = [lane for lane in sorted(offsets) if lane >= first][: len(words) // words_each]
                pictures[f"{name}, line {line}" + (f", from lane {first}" if size > 4 else "")] = words
                lanes_of.append((lanes, words_each))
        picture = show.bank_picture(pictures)
        for ax, (lanes, words_each) in zip(picture.figure.axes, lanes_of, strict=True):
            if words_each > 1:  # a lane has a row for each of its words
                ax.set_yticks([(i + 0.5) * words_each for i in range(len(lanes))], lanes, fontsize=7)
        return picture

    def steps(self, block: int | Sequence[int] = 0) -> list[timeline.Step]:
        """What the warps of a block did between its barriers, in order: `timeline` as data.

        Memory instructions only. Threads of a warp are together where a GPU would keep them together.

        Args:
            block: its number, x first, or its index (x, y, z).

        Raises:
            IndexError: the grid has no such block. KeyError: its steps were too many to keep.
        """
        if not isinstance(block, int):
            x, y, z = (*block, 0, 0)[:3]
            block = x + self.grid[0] * (y + self.grid[1] * z)
        n_blocks = self.grid[0] * self.grid[1] * self.grid[2]
        if not 0 <= block < n_blocks:
            raise IndexError(f"the grid has blocks 0 to {n_blocks - 1}; asked for {block}")
        if block not in self.passed:
            raise KeyError(f"block {block} left no steps: it touched no memory, or the launch is too long to keep them")
        return self.passed[block]

    def timeline(self, block: int | Sequence[int] = 0, *, intervals: tuple[int, int] = (0, 6)) -> Any:
        """Which thread of a block was where between its barriers.

        From left to right: the memory instructions of each warp, in its order, up to the barrier where it waits for the
        others. Each time a count doubles, its box is one unit wider. Where a box is not as high as its warp, the
        warp has diverged. Time is not known: a GPU's warps take turns as it likes.

        Args:
            block: its number or index, as for `steps`. intervals: the first one to draw, and one past the last.
        """
        steps = self.steps(block)
        first, last = intervals
        drawn = [step for step in steps if first <= step.interval < last]
        if not drawn:
            raise IndexError(f"intervals 0 to {steps[-1].interval} have steps; asked for {first} to {last - 1}")
        number = next(n for n, s in self.passed.items() if s is steps)
        n_threads = self.block[0] * self.block[1] * self.block[2]
        skipped = len({step.interval for step in steps if step.interval >= last})
        return timeline.picture(self.name, checked.index(number, self.grid), n_threads, drawn, skipped)


def _phases(size: int, offsets: Mapping[int, int]) -> dict[int, list[int]]:
    """The words that lanes of a request ask at once: 8 bytes go by 16 lanes, 16 bytes by 8; {first lane: words}."""
    group = 32 if size <= 4 else 128 // size
    if size > 4 and any(all(offsets.get(i ^ k, o) == o for i, o in offsets.items()) for k in (1, 2)):
        group *= 2  # pairs of lanes share an address
    phases: dict[int, list[int]] = {}
    for lane in sorted(offsets):
        first = lane // group * group
        words = range(offsets[lane] // 4, (offsets[lane] + size - 1) // 4 + 1)
        phases.setdefault(first, []).extend(words)
    return phases


def _steps(seen: checked.Observed, passed: checked.Passed) -> list[timeline.Step]:
    """The steps of one block, those of the same line and lanes put together."""
    counts: dict[tuple[Any, ...], int] = {}
    for interval, warp, number, lanes, count in passed.steps:
        site = seen.sites[number]
        where = "global" if seen.regions[site.region].kind == checked.ARRAY else "shared"
        what = "atomic" if site.is_atomic else f"{'write' if site.is_write else 'read'} {where}"
        threads = tuple(32 * warp + lane for lane in range(32) if lanes >> lane & 1)
        key = (interval, warp, site.place[1] if site.place else 0, what, threads)
        counts[key] = counts.get(key, 0) + count
    ends = dict(enumerate(line for _, line in passed.barriers))
    in_order = sorted(counts.items(), key=lambda item: item[0][0])
    return [timeline.Step(*key, count, ends.get(key[0])) for key, count in in_order]


def xray(
    kernel: Any,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared_mem: int = 0,
    *,
    timeout: float = 60.0,
) -> Report:
    """Run a launch on the checked build, and report what it saw.

    Args:
        kernel: a `helpers.kernel.Kernel`, or a kernel of the CPU engine.
        grid, block, args, shared_mem: as for a launch. The arrays hold the kernel's results afterwards.
        timeout: seconds that one block may take; after that its loop is taken for an endless one.

    Raises:
        TypeError, LaunchError, CompileError: for a launch that is refused before it starts. What goes wrong while it
        runs is a finding.
    """
    engine_kernel = _engine_kernel(kernel)
    if kernel is not engine_kernel:  # as a launch of helpers.kernel does
        limit = max(shared_mem, engine_kernel.max_dynamic_shared_size_bytes)
        engine_kernel.max_dynamic_shared_size_bytes = limit
    given = [cpu.asarray(cp.asnumpy(a)) if ON_GPU and isinstance(a, cp.ndarray) else a for a in args]
    seen = checked.observe(engine_kernel, grid, block, given, shared_mem, profile=True, timeout=timeout)
    if ON_GPU:
        for a, b in zip(args, given, strict=True):
            if isinstance(a, cp.ndarray) and a is not b:
                a[...] = cp.asarray(cpu.asnumpy(b))
    report = _report(engine_kernel, seen, given)
    report.grid, report.block = module._size("grid", grid), module._size("block", block)
    report.passed = {number: _steps(seen, passed) for number, passed in seen.passed.items()}
    return report


def _engine_kernel(kernel: Any) -> Any:
    """The CPU engine's kernel of the same text and options."""
    function = getattr(kernel, "function", kernel)
    if isinstance(function, cpu.RawKernel):
        return function
    code, options = getattr(kernel, "code", None), getattr(kernel, "options", None)
    if code is None or options is None:
        raise TypeError(f"xray takes a kernel of helpers.kernel or of the CPU engine; got {type(kernel).__name__}")
    names = (kernel.name,) if "<" in kernel.name else None
    return cpu.RawModule(code=code, options=options, name_expressions=names).get_function(kernel.name)


def _report(kernel: Any, seen: checked.Observed, args: Sequence[Any]) -> Report:
    traffic: dict[str, Figures] = {}
    shared: dict[str, Figures] = {}
    by_line: dict[tuple[str, int], Figures] = {}
    worst: dict[tuple[str, int], list[tuple[str, int, dict[int, int]]]] = {}
    for region in seen.regions:
        (traffic if region.kind == checked.ARRAY else shared)[region.name] = Figures()
    by_access: dict[tuple[str, int], dict[str, Figures]] = {}
    for site in seen.sites:
        region = seen.regions[site.region]
        is_shared = region.kind != checked.ARRAY
        (shared if is_shared else traffic)[region.name].add(site, is_shared=is_shared)
        if site.place:
            by_line.setdefault(site.place, Figures()).add(site, is_shared=is_shared)
            parts = by_access.setdefault(site.place, {})
            parts.setdefault(region.name, Figures()).add(site, is_shared=is_shared)
            if site.worst:
                worst.setdefault(site.place, []).append((region.name, site.size, site.worst))
    fetches = {part.name: part.fetches for r in seen.regions for part in r.parts if part.fetches is not None}
    findings = _merged(seen)
    if seen.stopped is not None:
        end = _stopped(seen, seen.stopped)
        if not any((f.kind, f.line) == (end.kind, end.line) for f in findings):  # else the access has told it already
            findings.append(end)
    else:
        findings += [f for r in seen.regions for part in r.parts if (f := _never_written(part))]
    return Report(
        kernel.name,
        kernel.code,
        findings,
        traffic,
        shared,
        by_line,
        fetches,
        seen.barriers,
        seen.collectives,
        worst,
        by_access,
    )


def _merged(seen: checked.Observed) -> list[Finding]:
    """One finding for one bug, counted together.

    Inlined copies of a line are one line. Two lines that race are told once, whichever of them came first.
    A read that races with the write it should have waited for may find nothing written yet: the race is the bug. One
    that meets an asynchronous copy in flight races with its landing: the missing wait is the bug.
    """
    merged: dict[tuple[Any, ...], Finding] = {}
    racing = set()
    for found in seen.found:
        f = _finding(seen, found)
        sides = (f.file, f.line), (f.other_file, f.other_line)
        key = (f.kind, f.array, frozenset(sides))
        known = merged.get(key)
        merged[key] = f if known is None else replace(known, count=known.count + f.count)
        if f.kind == "race":
            racing |= {(f.array, side) for side in sides}
    for _, array, sides in [key for key in merged if key[0] == "not waited for"]:
        merged.pop(("race", array, sides), None)
    return [f for f in merged.values() if f.kind != "uninitialised" or (f.array, (f.file, f.line)) not in racing]


def _at(access: checked.Access) -> str:
    place = f"{access.place[0]}:{access.place[1]}" if access.place else "an unknown line"
    return f"block {_triple(access.block)} thread {_triple(access.thread)} at {place}"


def _triple(index: tuple[int, int, int]) -> str:
    return f"({index[0]},{index[1]},{index[2]})"


def _element(region: checked.Region | None, offset: int) -> tuple[str, int, int | None]:
    """A byte of a region as an array, an index in it and how many elements that array reaches over.

    Of shared memory: its name, the index of the word, and None.
    """
    part = region.part_at(offset) if region else None
    if part is None:
        return region.name if region else "memory", offset // 4, None
    return part.name, (offset - part.begin) // part.itemsize, (part.end - part.begin) // part.itemsize


def _finding(seen: checked.Observed, found: checked.Found) -> Finding:
    region = seen.regions[found.region] if found.region < len(seen.regions) else None
    verb = "write of" if found.access.is_write else "read of"
    name, index, elements = _element(region, found.offset)
    what = f"{verb} {name}[{index}]"
    if elements is None:
        piece = f"word {index}" if found.offset % 4 == 0 else f"byte {found.offset}"
        what = f"{verb} {piece} of {name if ' ' in name else f'__shared__ {name}'}"
    kind = KINDS[found.kind]
    if found.kind == checked.RACE and found.other is not None:
        theirs = "write" if found.other.is_write else "read"
        message = f"{what} by {_at(found.access)} races with {theirs} by {_at(found.other)}"
    elif found.kind == checked.OUT_OF_BOUNDS:
        size = f"{elements:,} elements" if elements is not None else f"{region.size:,} bytes"
        message = f"{what}, which has {size}, by {_at(found.access)}"
    elif found.kind == checked.IN_FLIGHT and found.other is not None:
        message = f"{what} by {_at(found.access)}, while the asynchronous copy to it by {_at(found.other)} is in flight"
    elif found.kind == checked.NEVER_WAITED:
        what = what.replace("write of", "the asynchronous copy to")
        message = f"{what} was not waited for when its thread ended, by {_at(found.access)}"
    elif found.kind == checked.UNINITIALISED:
        message = f"{what}, which nobody has written, by {_at(found.access)}"
    else:
        size = f"{found.size} bytes at an address that is no multiple of {found.size}"
        message = f"{what}: {size}, by {_at(found.access)}"
    file, line = found.access.place or (None, None)
    other_file, other_line = (found.other.place if found.other else None) or (None, None)
    return Finding(
        kind,
        message,
        file,
        line,
        found.access.block,
        found.access.thread,
        name,
        index,
        other_file,
        other_line,
        found.other.block if found.other else None,
        found.other.thread if found.other else None,
        found.count,
    )


def _never_written(part: checked.Part) -> Finding | None:
    """An array that the kernel may write, with elements that had no value before and have none after."""
    if not part.writable or part.state is None:
        return None
    left = np.flatnonzero(part.state == checked.UNWRITTEN)
    if left.size == 0:
        return None
    count = f"{left.size:,} of {part.state.size:,} elements of {part.name}"
    message = f"{count} were never written, the first is {part.name}[{left[0]}]"
    return Finding("never written", message, array=part.name, index=int(left[0]))


def _stopped(seen: checked.Observed, stopped: checked.Stopped) -> Finding:
    """What ended the launch, as a finding."""
    kind = _STOPPED.get(stopped.reason, "stopped")
    region = seen.regions[stopped.region] if stopped.region is not None else None
    name = index = None
    if region is not None and stopped.offset is not None:
        name, index, _ = _element(region, stopped.offset)
    file, line = stopped.place or (None, None)
    other_file, other_line = stopped.other_place or (None, None)
    who = _at(checked.Access(stopped.place, stopped.block, stopped.thread, False))
    message = f"{stopped.message.removeprefix(f'{kind}: ')}, in {who}"
    return Finding(kind, message, file, line, stopped.block, stopped.thread, name, index, other_file, other_line)

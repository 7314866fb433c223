"""The result of a checked run of one launch: every byte the kernel requested, and every race it has.

    report = xray(kernel, grid, block, args)
    report                      # a table; in Jupyter, HTML
    report.findings             # [] when clean
    report.source()             # the .cu with figures for each line
    report.trace                # the order of waits, copies and products, for xray(..., trace=True)

The launch runs on the CPU engine's checked build, on a GPU machine too. Names follow compute-sanitizer and Nsight
Compute, the tools to use next. **Bytes here are what the threads requested.** A GPU's caches serve most
requests, so its memory moves less: there is no cache model here.

Not detected: an access that jumps from one `__shared__` array or variable right into another (more than 4 KB past its
end; only the address is known), and an access past a local array through a pointer. Local variables are registers,
whose accesses cannot be observed: a missing initial value is found if the results depend on it. Volatile accesses by
threads of different blocks are taken to be signals between them.

FLOP are not in the table, because their number depends slightly on the host's compiler: see `report.flop`.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import banks, failures, observed
from ..cuda_source import source
from ..steps import Step
from . import hooks
from .figures import Figures
from .findings import Finding
from .render import COLUMNS, Listing, Row, columns, fetch_maps, first_line, html_table, text_table
from .trace import Trace


@dataclass(frozen=True)
class Report:
    """The results of a checked run.

    findings: [] when clean. traffic: figures by array of global memory. shared: by `__shared__` array. by_line: by
    (file, line). fetches: by array, how often each element was read, in the array's shape. barriers: reached, by
    blocks. collectives: shuffles, votes and the like, by warps, of which warp_barriers are __syncwarp. notes: not
    errors, but worth a look. events: warps' requests to TMA, tensor cores and barriers, in the engine's order, which
    may differ from a GPU's. trace: the same and more, with phases, for `xray(..., trace=True)`; else None.

    flop: what threads computed with floats and doubles: an addition, subtraction, multiplication, division or square
    root is one, an FMA two; expf and the like, maxima, comparisons and conversions none (exactly: `with_flop` of
    engine/assembly.py). None if not counted: with clang, or on ARM. tensor_flop: products of real numbers on tensor
    cores, 2 m n k for each, padding included.
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
    passed: Mapping[int, list[Step]] = field(default_factory=dict, repr=False)  # by block
    notes: list[str] = field(default_factory=list)
    events: tuple[observed.Event, ...] = field(default=(), repr=False)
    flop: int | None = None
    tensor_flop: int = 0
    warp_barriers: int = 0
    trace: Trace | None = field(default=None, repr=False)

    @property
    def clean(self) -> bool:
        """True without findings."""
        return not self.findings

    @property
    def flop_per_byte(self) -> float | None:
        """FLOP of threads and tensor cores per requested byte of global memory.

        None if FLOP are not counted, or nothing was requested.
        """
        requested = sum(f.read + f.written for f in self.traffic.values())
        return (self.flop + self.tensor_flop) / requested if self.flop is not None and requested else None

    def assert_clean(self) -> None:
        """Raise an AssertionError that lists the findings, if there are any: for tests."""
        if self.findings:
            raise AssertionError("\n".join([f"{self.name}: {self.summary()}", *map(str, self.findings)]))

    def summary(self) -> str:
        """Return the number of findings as a sanitizer reports it: `0 findings`."""
        return f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}"

    # ------------------------------------------------------------------------------------ as text

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for name, f in self.traffic.items():
            per = f"{f.sectors_per_request:.2f}" if f.requests else ""
            rows.append((name, f"{f.read:,}", f"{f.written:,}", f"{f.requests:,}", per, ""))
        for name, f in self.shared.items():
            name = name if " " in name else f"__shared__ {name}"
            rows.append((name, f"{f.read:,}", f"{f.written:,}", f"{f.requests:,}", "", f"{f.conflicts:,}"))
        return rows

    HEAD = ("array", "bytes read", "bytes written", "requests", "sectors/request", "bank conflicts")

    def _notes(self) -> list[str]:
        counted = [
            f"{number:,} {name}{'' if number == 1 else 's'}"
            for number, name in ((self.barriers, "barrier"), (self.collectives, "warp-wide operation"))
            if number
        ]
        return [
            *([f"{', '.join(counted)}, counted once for each block or warp."] if counted else []),
            "A request is one instruction of one warp. A sector is 32 bytes: 32 neighbouring words are 4.",
            "Bytes are what the threads requested. Caches serve most of it, so memory moves less.",
        ]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.summary()}"]
        for finding in self.findings:
            lines += textwrap.wrap(str(finding), 100, initial_indent="  ", subsequent_indent="    ")
            for line in finding.explanation.splitlines():
                lines += textwrap.wrap(line.strip(), 100, initial_indent="    ", subsequent_indent="      ")
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", 100, initial_indent="  ", subsequent_indent="    ")
        return "\n".join([*lines, *text_table([self.HEAD, *self._rows()]), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = "rgba(0,158,115,0.25)" if self.clean else "rgba(213,94,0,0.25)"
        items = "".join(
            f"<li><code>{html.escape(str(f))}</code>{_lines_as_html(f.explanation)}</li>" for f in self.findings
        )
        items += "".join(f"<li>note: {html.escape(note)}</li>" for note in self.notes)
        notes = "<br/>".join(map(html.escape, self._notes()))
        summary = f"<span style='background:{colour};padding:1px 6px'>{self.summary()}</span>"
        return first_line(f"{self.name}: {self.summary()}") + (
            f"<p><b>{html.escape(self.name)}</b>: {summary}</p>"
            f"{f'<ul>{items}</ul>' if items else ''}{html_table([self.HEAD, *self._rows()])}"
            f"<p style='font-size:90%;opacity:0.8'>{notes}</p>"
        )

    def source(self, *, around: int | None = None) -> Listing:
        """Return the source with the figures of each line: bytes, requests, and the cost of a request.

        A line that accesses several arrays at different costs has a row for each below it. `!` marks lines with
        findings. In Jupyter the lines with the most bytes are shaded.

        Args:
            around: only the lines that access memory or have findings, with this many lines of context; None: all.
        """
        table = source.line_table(self.code, "kernel.cu")
        total = sum(f.read + f.written for f in self.by_line.values()) or 1
        flagged = {(f.file, f.line) for f in self.findings} | {(f.other_file, f.other_line) for f in self.findings}
        near = None
        if around is not None:
            steps = range(-around, around + 1)
            near = {(file, line + k) for file, line in [*self.by_line, *flagged] if line for k in steps}
        rows: list[Row] = [("", 0.0, " ".join(f"{name:>{width}}" for name, width in COLUMNS), "")]
        blank = " " * len(rows[0][2])
        for (file, number), text in table.items():
            if near is not None and (file, number) not in near:
                if rows[-1][3] != "...":
                    rows.append(("", 0.0, blank, "..."))
                continue
            f = self.by_line.get((file, number))
            share = (f.read + f.written) / total if f else 0.0
            mark = "!" if (file, number) in flagged else "|"
            rows.append((mark, share, columns(f, total) if f else blank, f"{mark} {number:4} {text}"))
            parts = self.by_access.get((file, number), {})
            if len({p.sectors_per_request for p in parts.values() if p.sectors}) > 1 or (
                len({p.wavefronts_per_request for p in parts.values() if p.wavefronts}) > 1
            ):
                rows += [("", 0.0, columns(p, total), f"|        of which {name}") for name, p in parts.items()]
        return Listing(rows)

    # ------------------------------------------------------------------------------------ as pictures

    def heatmap(self, *arrays: str) -> Any:
        """Draw how often each element of an array was fetched; several arrays share a colour scale.

        Raises:
            KeyError: no such array; the message lists the arrays.
        """
        for name in arrays:
            if name not in self.fetches:
                raise KeyError(f"no array {name!r}; there are: {', '.join(self.fetches)}")
        return fetch_maps({name: self.fetches[name] for name in arrays})

    def banks(self, line: int, array: str | None = None) -> Any:
        """Draw which lane accesses which bank of shared memory, in the costliest request of a line.

        Lanes with 8 or 16 bytes each are served in groups of 16 or 8 lanes: each group has a picture, with a row for
        each word of a lane.

        Raises:
            KeyError: the line does not access shared memory.
        """
        arrays: dict[str, tuple[int, dict[int, int]]] = {}  # array -> bytes per lane, offset of each lane
        for (_, number), samples in self.worst.items():
            for name, size, offsets in samples if number == line else ():
                if name not in self.shared or (array is not None and name != array):
                    continue
                cost = banks.wavefronts_of_request(size, offsets)
                if name not in arrays or cost > banks.wavefronts_of_request(*arrays[name]):
                    arrays[name] = size, offsets
        if not arrays:
            lines = sorted({n for (_, n), samples in self.worst.items() if any(s[0] in self.shared for s in samples)})
            what = f"the shared array {array!r}" if array is not None else "no shared memory"
            verb = "does not touch" if array is not None else "touches"
            where = ", ".join(map(str, lines)) or "none"
            raise KeyError(f"line {line} {verb} {what}; lines that touch shared memory: {where}")
        banks_of, lanes_of = {}, []
        for name, (size, offsets) in arrays.items():
            for first, words in banks.phases(size, offsets).items():
                words_each = max(1, size // 4)
                lanes = [lane for lane in sorted(offsets) if lane >= first][: len(words) // words_each]
                banks_of[f"{name}, line {line}" + (f", from lane {first}" if size > 4 else "")] = words
                lanes_of.append((lanes, words_each))
        picture = hooks.drawings("threads").bank_picture(banks_of)
        for ax, (lanes, words_each) in zip(picture.figure.axes, lanes_of, strict=True):
            if words_each > 1:  # a lane has a row for each of its words
                ax.set_yticks([(i + 0.5) * words_each for i in range(len(lanes))], lanes, fontsize=7)
        return picture

    def steps(self, block: int | Sequence[int] = 0) -> list[Step]:
        """Return what the warps of a block did between its barriers, in order: the data for `timeline`.

        Only memory instructions are listed. Threads of a warp are grouped as a GPU would group them.

        Args:
            block: its number, x first, or its index (x, y, z).

        Raises:
            IndexError: the grid has no such block.
            KeyError: no steps of the block were kept: it touched no memory, or the launch was too long.
        """
        number = self._number(block)
        if number not in self.passed:
            why = "it touched no memory, or the launch is too long to keep them"
            raise KeyError(f"block {number} left no steps: {why}")
        return self.passed[number]

    def _number(self, block: int | Sequence[int]) -> int:
        """Return the number of a block given by its number or its index."""
        if not isinstance(block, int):
            x, y, z = (*block, 0, 0)[:3]
            block = x + self.grid[0] * (y + self.grid[1] * z)
        n_blocks = self.grid[0] * self.grid[1] * self.grid[2]
        if not 0 <= block < n_blocks:
            raise IndexError(f"the grid has blocks 0 to {n_blocks - 1}; got {block}")
        return block

    def timeline(self, block: int | Sequence[int] = 0, *, intervals: tuple[int, int] = (0, 6)) -> Any:
        """Draw which lines a block's threads executed between its barriers.

        From left to right: the memory instructions of each warp, in its order, up to the barrier where it waits for the
        others. Each time a count doubles, its box is one unit wider. If a box is not as high as its warp, the warp has
        diverged. The axis does not show time: a GPU may interleave its warps in any way.

        Args:
            block: its number or index, as for `steps`. intervals: the first one to draw, and one past the last.
        """
        number = self._number(block)
        steps = self.steps(number)
        first, last = intervals
        drawn = [step for step in steps if first <= step.interval < last]
        if not drawn:
            raise IndexError(f"intervals 0 to {steps[-1].interval} have steps; got {first} to {last - 1}")
        n_threads = self.block[0] * self.block[1] * self.block[2]
        skipped = len({step.interval for step in steps if step.interval >= last})
        return hooks.drawings("timeline").picture(
            self.name, failures.index(number, self.grid), n_threads, drawn, skipped
        )


def _lines_as_html(text: str) -> str:
    return "".join(f"<br/>{html.escape(line)}" for line in text.splitlines())

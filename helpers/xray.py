"""A checked run of one launch, and what it saw: every byte the kernel asked for, and every race it has.

    report = xray(kernel, grid, block, args)
    report                      # a table; in Jupyter, HTML
    report.findings             # [] when clean
    report.source()             # the .cu with the figures beside its lines

The launch runs on the CPU engine's checked build, on a GPU machine too. Names follow compute-sanitizer and Nsight
Compute, which come next in a reader's life. **Bytes here are what the threads asked for.** A GPU's caches answer most
requests, so its memory moves less: there is no cache model here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helpers import cpu
from helpers.cpu import checked, source
from helpers.device import ON_GPU, cp

KINDS = {
    checked.RACE: "race",
    checked.OUT_OF_BOUNDS: "out of bounds",
    checked.UNINITIALISED: "uninitialised",
    checked.MISALIGNED: "misaligned",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. file, line: of the access; other_*: of the earlier access that it collides with.

    kind: race, out of bounds, uninitialised, misaligned, never written, barrier divergence, deadlock, or stopped.
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
        return f"{self.kind}: {self.message}" + (f" ({self.count} times)" if self.count > 1 else "")


@dataclass
class Figures:
    """What an array, or a line of the source, cost.

    read, written: bytes that threads asked for. loads, stores: requests, one for each instruction of a warp. sectors:
    32-byte pieces of global memory touched by them; wavefronts: turns of shared memory. ideal: the fewest sectors or
    wavefronts that the same bytes need. atomics: accesses that were atomic.
    """

    read: int = 0
    written: int = 0
    loads: int = 0
    stores: int = 0
    sectors: int = 0
    wavefronts: int = 0
    atomics: int = 0

    @property
    def requests(self) -> int:
        """Instructions of warps that touched it."""
        return self.loads + self.stores

    @property
    def sectors_per_request(self) -> float:
        """4 is a warp reading 32 neighbouring words; 1 is all lanes at one word; 32 is each lane somewhere else."""
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def conflicts(self) -> int:
        """Turns of shared memory beyond one for each request."""
        return max(self.wavefronts - self.requests, 0) if self.wavefronts else 0

    def add(self, site: checked.Site) -> None:
        """Count one instruction in."""
        size = site.count * site.size
        if site.is_write:
            self.written += size
            self.stores += site.requests
        else:
            self.read += size
            self.loads += site.requests
        self.sectors += site.sectors
        self.wavefronts += site.wavefronts
        self.atomics += site.count if site.is_atomic and site.is_write else 0


@dataclass
class Report:
    """What a checked run saw.

    findings: [] when clean. traffic: figures by array of global memory. shared: by `__shared__` array. by_line: by (file,
    line). fetches: by array, how often each element was read, in the array's shape. barriers: reached, by blocks.
    collectives: shuffles, votes and their like, by warps.
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
            rows.append(
                (f"__shared__ {name}", f"{f.read:,}", f"{f.written:,}", f"{f.requests:,}", "", f"{f.conflicts:,}")
            )
        return rows

    _HEAD = ("array", "bytes read", "written", "requests", "sectors/request", "bank conflicts")

    def __str__(self) -> str:
        rows = [self._HEAD, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self._HEAD))]
        lines = [f"{self.name}: {self.summary()}", *(f"  {finding}" for finding in self.findings)]
        for row in rows:
            lines.append("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]))
        lines.append(f"{self.barriers:,} barriers (by blocks), {self.collectives:,} warp-wide operations")
        lines.append("Bytes are those that threads asked for. Caches answer most of them: memory moves fewer.")
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = "padding:2px 10px;text-align:right"
        head = "".join(f"<th style='{cell}'>{html.escape(name)}</th>" for name in self._HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td style='{cell}'>{html.escape(value)}</td>" for value in row) + "</tr>" for row in self._rows()
        )
        colour = "rgba(0,158,115,0.25)" if self.clean else "rgba(213,94,0,0.25)"
        found = "".join(f"<li><code>{html.escape(str(f))}</code></li>" for f in self.findings)
        return (
            f"<p><b>{html.escape(self.name)}</b>: <span style='background:{colour};padding:1px 6px'>{self.summary()}</span></p>"
            f"{f'<ul>{found}</ul>' if found else ''}<table><tr>{head}</tr>{body}</table>"
            f"<p>{self.barriers:,} barriers (by blocks), {self.collectives:,} warp-wide operations. Bytes are those that threads "
            "asked for. Caches answer most of them: memory moves fewer.</p>"
        )

    def source(self, *, around: int | None = None) -> str:
        """The source with bytes, requests, and sectors or wavefronts per request beside each line that touches memory.

        around: only such lines, with so many lines around each; the whole source where it is None.
        """
        table = source.line_table(self.code, "kernel.cu")
        total = sum(f.read + f.written for f in self.by_line.values()) or 1
        flagged = {(f.file, f.line) for f in self.findings} | {(f.other_file, f.other_line) for f in self.findings}
        near = None
        if around is not None:
            near = {(file, line + k) for file, line in [*self.by_line, *flagged] if line for k in range(-around, around + 1)}
        lines = [f"{'bytes':>13} {'%':>4} {'requests':>10} {'per request':>12}"]
        for (file, number), text in table.items():
            if near is not None and (file, number) not in near:
                if lines[-1] != "...":
                    lines.append("...")
                continue
            f = self.by_line.get((file, number))
            figures = " " * 42
            if f is not None:
                size = f.read + f.written
                pieces = f.sectors + f.wavefronts
                per = f"{pieces / f.requests:.1f} {'sect' if f.sectors else 'wave'}" if f.requests else ""
                figures = f"{size:13,} {size / total:4.0%} {f.requests:10,} {per:>12}"
            mark = "!" if (file, number) in flagged else "|"
            lines.append(f"{figures} {mark} {number:4} {text}".rstrip())
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------ as pictures

    def heatmap(self, *arrays: str) -> Any:
        """How often each element of an array was fetched, as an image; several arrays share a colour scale.

        Raises:
            KeyError: no such array; the message names those there are.
        """
        from helpers import show

        for name in arrays:
            if name not in self.fetches:
                raise KeyError(f"no array {name!r}; there are: {', '.join(self.fetches)}")
        images = {f"{name}: fetched": np.atleast_2d(self.fetches[name]) for name in arrays}
        return show.heatmap(images, xlabel="column", ylabel="row", colour="fetches")

    def banks(self, line: int, array: str | None = None) -> Any:
        """Which lane hits which bank of shared memory, in the costliest request of a line.

        Raises:
            KeyError: the line reads and writes no shared memory.
        """
        from helpers import show

        found = {}
        for (_, number), samples in self.worst.items():
            for name, size, offsets in samples if number == line else ():
                if name in self.shared and (array is None or name == array):
                    words = [offsets[lane] // 4 for lane in sorted(offsets)]
                    found[f"{name}, line {line}"] = words
        if not found:
            lines = sorted({n for (_, n), samples in self.worst.items() if any(s[0] in self.shared for s in samples)})
            raise KeyError(f"line {line} touches no shared memory; these do: {', '.join(map(str, lines)) or 'none'}")
        return show.bank_picture(found)


def xray(kernel: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0) -> Report:
    """Run a launch on the checked build, and report what it saw.

    Args:
        kernel: a `helpers.kernel.Kernel`, or a kernel of the CPU engine.
        grid, block, args, shared_mem: as for a launch. The arrays hold the kernel's results afterwards.

    Raises:
        TypeError, LaunchError, CompileError: for a launch that is refused before it starts. What goes wrong while it
        runs is a finding.
    """
    engine_kernel = _engine_kernel(kernel)
    given = [cpu.asarray(cp.asnumpy(a)) if ON_GPU and isinstance(a, cp.ndarray) else a for a in args]
    seen = checked.observe(engine_kernel, grid, block, given, shared_mem, profile=True)
    if ON_GPU:
        for a, b in zip(args, given, strict=True):
            if isinstance(a, cp.ndarray) and a is not b:
                a[...] = cp.asarray(cpu.asnumpy(b))
    return _report(engine_kernel, seen, given)


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
    for site in seen.sites:
        region = seen.regions[site.region]
        (traffic if region.kind == checked.ARRAY else shared)[region.name].add(site)
        if site.place:
            by_line.setdefault(site.place, Figures()).add(site)
            if site.worst:
                worst.setdefault(site.place, []).append((region.name, site.size, site.worst))
    arrays = {p.name: a for p, a in zip(kernel.parameters, args, strict=True) if p.kind == "p" and a is not None}
    fetches = {
        r.name: r.fetches.reshape(arrays[r.name].shape)
        for r in seen.regions
        if r.kind == checked.ARRAY and r.name in arrays and arrays[r.name].size == r.fetches.size
    }
    findings = [_finding(seen, found) for found in seen.found]
    findings += [f for r in seen.regions if (f := _never_written(r))]
    if seen.failure is not None:
        findings.append(_stopped(seen.failure))
    return Report(
        kernel.name, kernel.code, findings, traffic, shared, by_line, fetches, seen.barriers, seen.collectives, worst
    )


def _at(access: checked.Access) -> str:
    place = f"{access.place[0]}:{access.place[1]}" if access.place else "an unknown line"
    return f"block {_triple(access.block)} thread {_triple(access.thread)} at {place}"


def _triple(index: tuple[int, int, int]) -> str:
    return f"({index[0]},{index[1]},{index[2]})"


def _finding(seen: checked.Observed, found: checked.Found) -> Finding:
    region = seen.regions[found.region] if found.region < len(seen.regions) else None
    element = region.dtype.itemsize if region and region.dtype is not None else 4
    index = found.offset // element
    verb = "write of" if found.access.is_write else "read of"
    name = region.name if region else "memory"
    where = f"__shared__ {name}" if region and region.kind != checked.ARRAY else name
    what = f"{verb} {where}[{index}]" if region and region.dtype is not None else f"{verb} {where}+{found.offset}B"
    kind = KINDS[found.kind]
    if found.kind == checked.RACE and found.other is not None:
        theirs = "write" if found.other.is_write else "read"
        message = f"{what} by {_at(found.access)} races with {theirs} by {_at(found.other)}"
    elif found.kind == checked.OUT_OF_BOUNDS:
        size = f"{region.size // element:,} elements" if region and region.dtype is not None else f"{region.size:,} bytes"
        message = f"{what}, which has {size}, by {_at(found.access)}"
    elif found.kind == checked.UNINITIALISED:
        message = f"{what}, which nobody has written, by {_at(found.access)}"
    else:
        message = f"{what}: {found.size} bytes at an address that is no multiple of {found.size}, by {_at(found.access)}"
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


def _never_written(region: checked.Region) -> Finding | None:
    """An array that the kernel may write, with elements that had no value before and have none after."""
    if region.kind != checked.ARRAY or not region.writable:
        return None
    left = np.flatnonzero(region.state == checked.UNWRITTEN)
    if left.size == 0:
        return None
    message = f"{left.size:,} of {region.state.size:,} elements of {region.name} were never written, the first is {region.name}[{left[0]}]"
    return Finding("never written", message, array=region.name, index=int(left[0]))


def _stopped(failure: str) -> Finding:
    """What ended the launch, as a finding."""
    first = failure.partition("\n")[0]
    kind = next((k for k in ("barrier divergence", "deadlock") if k in first), "stopped")
    if first.startswith("illegal"):
        kind = "out of bounds"
    elif first.startswith("misaligned"):
        kind = "misaligned"
    place = re.search(r"([\w.\-]+\.(?:cu|cuh|h)|cell):(\d+)", first)
    return Finding(kind, first, place.group(1) if place else None, int(place.group(2)) if place else None)

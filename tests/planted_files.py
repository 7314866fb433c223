"""Kernels with one planted bug each, tests/planted/TOPIC/NAME.cu: read, launched under the X-ray, and fixed.

tests/planted/README.md describes the format of a file. The kernels of a topic are compiled together, and so are their
twins, in which the bugs are fixed.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hopper_tiles import FOLDER, OPTIONS, halves, map_of

from helpers import engine
from helpers.xray import Report, xray

TOPICS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())

_FINDS = re.compile(
    r"^// finds: (?P<kind>[\w ]+)(?:, (?!block|thread)(?P<array>[\w ]+)(?:\[(?P<index>-?\d+)\])?)?"
    r"(?:, block (?P<block>\d+))?(?:, thread (?P<thread>\d+))?$",
    re.M,
)
_LAUNCH = re.compile(r"^// launch: <<<(\d+), (\d+)(?:, (\d+))?>>>\((.*)\)$", re.M)
_FIX = re.compile(r"^(?P<space> *)(?P<bug>.*?) *// fix:(?P<twin>.*)$", re.M)


def out(shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Return an unwritten array: full of NaN."""
    return engine.full(shape, np.nan, dtype=dtype)


def some(n: int, dtype: Any = np.float32) -> Any:
    """Return 0, 1, 2, ..."""
    return engine.asarray(np.arange(n).astype(dtype))


def zeros(n: int, dtype: Any = np.int32) -> Any:
    """Return n zeros."""
    return engine.zeros(n, dtype=dtype)


def ones(n: int) -> Any:
    """Return n ones in float32."""
    return engine.ones(n, np.float32)


def empty(n: int, dtype: Any = np.float32) -> Any:
    """Return an array like cp.empty."""
    return engine.empty(n, dtype)


def first(n: int, *, of: int) -> Any:
    """Return an array whose first n elements the host has written."""
    array = empty(of)
    array[:n] = 1
    return array


_TYPES = {name: getattr(np, name) for name in ("int8", "int32", "uint32", "float16", "float32", "float64")}
_INPUTS = {f.__name__: f for f in (out, some, zeros, ones, empty, first, halves, map_of)} | _TYPES


@dataclass(frozen=True)
class Planted:
    """A file: a kernel with the file's name, the finding that it must give, and its launch."""

    path: Path

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def topic(self) -> str:
        return self.path.parent.name

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def finds(self) -> dict[str, str | None]:
        """The kind of the finding; the array, index, block and thread if only one value is right."""
        match = _FINDS.search(self.text)
        assert match, f"{self.path}: no line `// finds: kind, array[index], block n, thread n`"
        return match.groupdict()

    def line(self, mark: str) -> int | None:
        """Return the number of the line with `// mark`."""
        lines = [number for number, text in enumerate(self.text.splitlines(), 1) if f"// {mark}" in text]
        return lines[0] if lines else None

    def code(self, *, fixed: bool) -> str:
        """Return the kernel's text, or its twin's, without includes; lines keep their numbers."""
        text = _FIX.sub(lambda fix: fix["space"] + fix["twin" if fixed else "bug"].strip(), self.text)
        return f'#line 1 "{self.name}.cu"\n' + re.sub(r"^#include.*", "", text, flags=re.M)

    def look(self, *, fixed: bool = False, trace: bool = False) -> Report:
        """X-ray the bug, or its twin. trace: record the order too."""
        match = _LAUNCH.search(self.text)
        assert match, f"{self.path}: no line `// launch: <<<grid, block>>>(arguments)`"
        grid, block, shared_mem = (int(number or 0) for number in match.groups()[:3])
        args = eval(f"({match[4]},)", _INPUTS)
        function = module(self.topic, fixed=fixed).get_function(self.name)
        timeout = 1.0 if self.finds["kind"] == "endless loop" and not fixed else 60.0
        return xray(function, (grid,), (block,), args, shared_mem, timeout=timeout, trace=trace)

    def assert_found(self, report: Report) -> None:
        """Fail unless the report has this bug's finding, in its place, and no other."""
        assert [f.kind for f in report.findings] == [self.finds["kind"]], report.findings
        found = report.findings[0]
        assert not report.clean and found.message
        here, there = self.line("here"), self.line("there")
        if here is not None:
            assert found.file == f"{self.name}.cu"
            assert {found.line, found.other_line} == {here, there}, found
            assert f"{self.name}.cu:{here}" in found.message
            assert there is None or found.message.count(f"{self.name}.cu:{there}") >= 1 + (here == there)
        place = {"array": found.array, "index": found.index, "block": _x(found.block), "thread": _x(found.thread)}
        for name, value in place.items():
            assert self.finds[name] in (None, str(value)), found


def _x(index: tuple[int, int, int] | None) -> int | None:
    """Return a one-dimensional index as a number."""
    return index[0] if index is not None and index[1:] == (0, 0) else None


FILES = [Planted(path) for path in sorted(FOLDER.glob("*/*.cu"))]


def planted(name: str) -> Planted:
    """Return the file of a kernel."""
    return next(file for file in FILES if file.name == name)


@functools.cache
def header(name: str) -> str:
    """Return the text of a header of tests/planted."""
    return f'#line 1 "{name}"\n' + (FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def source(topic: str, *, fixed: bool) -> str:
    """Return all kernels of a topic, or all twins, after their includes."""
    files = [file for file in FILES if file.topic == topic]
    includes = dict.fromkeys(line for file in files for line in re.findall(r"^#include.*", file.text, re.M))
    heads = [header(line.split('"')[1]) if '"' in line else f"{line}\n" for line in includes]
    return "".join([*heads, *(file.code(fixed=fixed) for file in files)])


def options(topic: str) -> tuple[str, ...]:
    """Return a topic's compilation options."""
    return OPTIONS if topic in ("tma", "wgmma", "hangs", "clusters") else ("-std=c++17",)


@functools.cache
def module(topic: str, *, fixed: bool) -> engine.RawModule:
    """Return the compiled kernels of a topic, or their twins."""
    return engine.RawModule(code=source(topic, fixed=fixed), options=options(topic))

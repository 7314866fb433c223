"""Read a compiled kernel's library: its symbols, its `__shared__` arrays, the lines of addresses.

Every kernel's symbols are read, so ELF is parsed by hand in 0.8 ms of CPU time; pyelftools takes 5.6 ms (and 57 ms for
its import). pyelftools reads DWARF once per library: the lines of its addresses are saved next to it. On macOS
libraries are not ELF: then the functions return that nothing is known.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import compiler

# Elf64_Shdr and Elf64_Sym from <elf.h>.
_SECTION = np.dtype(
    {
        "names": ["name", "type", "flags", "address", "offset", "size", "link", "info", "alignment", "entry_size"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u8", "<u8"],
    }
)
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_SYMTAB = 2
_OBJECT, _SECTION_NAME, _FILE, _TLS = 1, 3, 4, 6
_LOCAL = 0
_WRITE, _THREAD_LOCAL = 1, 0x400


@dataclass(frozen=True)
class Symbol:
    """One symbol: value is an address in the library, or an offset in its thread-local segment."""

    name: str
    value: int
    size: int
    is_variable: bool
    is_thread_local: bool
    is_local: bool
    is_writable: bool


@dataclass(frozen=True)
class Table:
    """The symbols of a library's own source, and the alignment of its thread-local segment."""

    symbols: tuple[Symbol, ...]
    alignment: int

    def find(self, name: str) -> Symbol | None:
        """Find the symbol with that name that other libraries can see."""
        return next((s for s in self.symbols if s.name == name and not s.is_local), None)

    def has_state(self) -> bool:
        """Return True if the library keeps variables from one launch to the next."""
        return any(s.is_variable and s.is_writable and s.size and "engine_table" not in s.name for s in self.symbols)


def table(path: Path) -> Table:
    """Read a library's symbol table; it is empty unless the library is 64-bit little-endian ELF.

    Raises:
        OSError: the file is broken.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return Table((), 1)
    try:
        return _read_elf(data)
    except (ValueError, IndexError, struct.error) as error:
        raise OSError(f"{path} is broken: {error}") from None


def _read_elf(data: bytes) -> Table:
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    _, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    sections = np.frombuffer(data, _SECTION, count, offset)

    def text(base: int, position: int) -> str:
        begin = base + position
        return data[begin : data.index(b"\0", begin)].decode(errors="replace")

    names = int(sections[names_index]["offset"])
    read_only = [text(names, int(s["name"])).startswith(".data.rel.ro") for s in sections]
    writable = [bool(int(s["flags"]) & _WRITE) and not r for s, r in zip(sections, read_only, strict=True)]
    alignment = max([int(s["alignment"]) for s in sections if int(s["flags"]) & _THREAD_LOCAL], default=1)
    symbols = []
    for section in sections[sections["type"] == _SYMTAB]:
        strings = int(sections[section["link"]]["offset"])
        ours = False  # a local symbol belongs to the file named before it: zig adds its own files
        for raw in np.frombuffer(data, _SYMBOL, int(section["size"]) // _SYMBOL.itemsize, int(section["offset"])):
            kind, home, is_local = int(raw["info"]) & 15, int(raw["section"]), int(raw["info"]) >> 4 == _LOCAL
            if kind == _FILE:
                ours = text(strings, int(raw["name"])) == "kernel.cpp"
            if kind in (_FILE, _SECTION_NAME) or kind > _TLS or home == 0 or (is_local and not ours):
                continue
            symbols.append(
                Symbol(
                    text(strings, int(raw["name"])),
                    int(raw["value"]),
                    int(raw["size"]),
                    kind == _OBJECT,
                    kind == _TLS,
                    is_local,
                    home < count and writable[home],
                )
            )
    return Table(tuple(symbols), max(alignment, 1))


def name_at(symbols: Table, address: int) -> str | None:
    """Return the linker's name for the function at an address of the library, or None if no symbol has that address."""
    # GCC adds local aliases for the same address; their names have a dot.
    names = (s.name for s in symbols.symbols if s.value == address and s.size and not s.is_thread_local)
    return min(names, key=lambda name: ("." in name, len(name)), default=None)


@dataclass(frozen=True)
class SharedArray:
    """A static `__shared__` array: its place in the thread-local segment.

    is_guard: a flag, not an array: g++ keeps one for each array whose type has constructors.
    """

    name: str
    offset: int
    size: int
    is_guard: bool = False


def shared_arrays(symbols: Table, mangled: Mapping[str, str]) -> dict[str, list[SharedArray]]:
    """Return the static `__shared__` arrays of each kernel.

    Each is a thread-local symbol. For an array declared in a kernel, it contains the kernel's name. Arrays declared in
    device functions or at file scope are listed for every kernel, because symbols do not tell which kernel uses them.

    Args:
        symbols: the library's.
        mangled: kernel name -> its linker symbol.
    """
    prefixes = {}
    for name, own in mangled.items():
        encoding = own[2:] if own.startswith("_Z") else f"{len(own)}{own}"
        prefixes[name] = f"_ZZ{encoding}E"
    arrays: dict[str, list[SharedArray]] = {name: [] for name in mangled}
    for symbol in symbols.symbols:
        if not symbol.is_thread_local or "engine_anchor_byte" in symbol.name:
            continue
        is_guard = symbol.name.startswith("_ZGV") or symbol.name == "__tls_guard"
        owner = symbol.name.replace("_ZGV", "_Z", 1) if is_guard else symbol.name
        holders = [name for name, prefix in prefixes.items() if owner.startswith(prefix)]
        for name in holders or mangled:
            arrays[name].append(SharedArray(plain_name(symbol.name), symbol.value, symbol.size, is_guard))
    return arrays


def plain_name(symbol: str) -> str:
    """Return the last name in a linker symbol: `tile` of _ZZ5tiledE4tile."""
    last = symbol
    for match in re.finditer(r"(\d+)(?=[A-Za-z_])", symbol):
        name = symbol[match.end() : match.end() + int(match.group(1))]
        if len(name) == int(match.group(1)):
            last = name
    return last


class _Span(NamedTuple):
    """Addresses from begin to end that belong to a line."""

    begin: int
    end: int
    file: str
    line: int


def places_of(path: Path, address: int) -> list[tuple[str, int]]:
    """Return the source lines (file, line) of an address in the library, from its DWARF.

    The first is the instruction's own; if it was inlined, the lines of the calls follow, innermost first.
    """
    return list(_places_of(path, address))


@functools.lru_cache(maxsize=4096)  # each launch of a checked run looks up the places of all accesses
def _places_of(path: Path, address: int) -> tuple[tuple[str, int], ...]:
    rows, calls, _ = _lines(path)
    spans = [next((span for span in rows if span.begin <= address < span.end), None)]
    spans += [span for span in reversed(calls) if span.begin <= address < span.end]
    return tuple((span.file, span.line) for span in spans if span)


def statements_at(path: Path, address: int) -> list[tuple[str, int]]:
    """Return (file, line) of every statement that begins at an address's instruction, last first.

    A loop whose body was moved out is only a jump to itself: an instruction without a line, where the statements of the
    body begin.
    """
    rows, _, begins = _lines(path)
    span = next((span for span in rows if span.begin <= address < span.end), None)
    return list(reversed(begins.get(span.begin, []))) if span else []


def place_before(path: Path, address: int, files: Collection[str], most: int = 256) -> tuple[str, int] | None:
    """Return (file, line) of the nearest instruction before an address that is in one of these files.

    For an empty loop, which compilers reduce to a jump without a line of its own.
    """
    near = [span for span in _lines(path)[0] if span.file in files and 0 <= address - span.begin < most]
    last = max(near, key=lambda span: span.begin, default=None)
    return (last.file, last.line) if last is not None else None


_Lines = tuple[list[_Span], list[_Span], dict[int, list[tuple[str, int]]]]


@functools.lru_cache(maxsize=16)
def _lines(path: Path) -> _Lines:
    """Return a library's line table, its inlined calls (outer ones first), and all statements by address.

    They are read once, and saved next to a library of the cache.
    """
    kept = path.with_suffix(".lines")
    with contextlib.suppress(OSError, ValueError):
        if kept.stat().st_mtime_ns >= path.stat().st_mtime_ns:
            files, rows, calls, begins = json.loads(kept.read_text())
            rows, calls = (
                [_Span(low, high, files[file], line) for low, high, file, line in spans] for spans in (rows, calls)
            )
            return rows, calls, {address: [(files[file], line) for file, line in places] for address, places in begins}
    rows, calls, begins = lines = _read_lines(path)
    if path.parent == compiler.cache_dir():
        files = dict.fromkeys([*(span.file for span in (*rows, *calls)), *(f for at in begins.values() for f, _ in at)])
        number = {file: at for at, file in enumerate(files)}
        spans = [[(low, high, number[file], line) for low, high, file, line in each] for each in (rows, calls)]
        places = [(address, [(number[file], line) for file, line in at]) for address, at in begins.items()]
        with contextlib.suppress(OSError):
            compiler.keep(kept, json.dumps([[*files], *spans, places], separators=(",", ":")))
    return lines


def _read_lines(path: Path) -> _Lines:
    """Read what `_lines` returns from a library's DWARF."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    rows: list[_Span] = []
    calls: list[_Span] = []
    begins: dict[int, list[tuple[str, int]]] = {}
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            dwarf = elf.get_dwarf_info() if elf.has_dwarf_info() else None
            for unit in dwarf.iter_CUs() if dwarf else ():
                program = dwarf.line_program_for_CU(unit)
                if program is None:
                    continue
                folders = ["", *(folder.decode() for folder in program["include_directory"])]
                entries = [(folders[entry.dir_index], entry.name.decode()) for entry in program["file_entry"]]
                # As in `#line`, such as steps/01.cu; for a system file, its name.
                files = [f"{at}/{name}" if at and not at.startswith("/") else name for at, name in entries]
                before = None
                for state in (entry.state for entry in program.get_entries() if entry.state is not None):
                    if before is not None and before.address < state.address:
                        rows.append(_Span(before.address, state.address, files[before.file - 1], before.line))
                    before = None if state.end_sequence else state
                    if before is not None:
                        begins.setdefault(state.address, []).append((files[state.file - 1], state.line))
                for die in unit.iter_DIEs():  # parents come before their children
                    if die.tag == "DW_TAG_inlined_subroutine":
                        at = [die.attributes[f"DW_AT_call_{what}"].value for what in ("file", "line")]
                        calls += [_Span(low, high, files[at[0] - 1], at[1]) for low, high in _ranges(dwarf, unit, die)]
    except ELFError:
        pass
    return rows, calls, begins


def _ranges(dwarf: Any, unit: Any, die: Any) -> Iterator[tuple[int, int]]:
    """Return the address ranges of a DIE."""
    attributes = die.attributes
    if "DW_AT_low_pc" in attributes and "DW_AT_high_pc" in attributes:
        low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
        yield low, high.value if high.form == "DW_FORM_addr" else low + high.value
    elif "DW_AT_ranges" in attributes:
        top = unit.get_top_DIE().attributes
        base = top["DW_AT_low_pc"].value if "DW_AT_low_pc" in top else 0
        for entry in dwarf.range_lists().get_range_list_at_offset(attributes["DW_AT_ranges"].value, unit):
            if hasattr(entry, "base_address"):
                base = entry.base_address
            else:
                yield base + entry.begin_offset, base + entry.end_offset

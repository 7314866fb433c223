"""What a compiled kernel's library says of itself: lines of addresses, sizes of `__shared__` arrays (ELF and DWARF)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile


def static_shared(path: Path, mangled: dict[str, str]) -> dict[str, int]:
    """Bytes of static shared memory of each kernel.

    Args:
        path: the library.
        mangled: kernel name -> its linker symbol.

    A function's `__shared__` arrays are thread-local symbols that carry the function's name. Arrays of device
    functions are counted for every kernel: which of them a kernel calls is not known here.
    """
    prefixes = {}
    for name, symbol in mangled.items():
        encoding = symbol[2:] if symbol.startswith("_Z") else f"{len(symbol)}{symbol}"
        prefixes[name] = f"_ZZ{encoding}E"
    own = dict.fromkeys(mangled, 0)
    common = 0
    try:
        with path.open("rb") as file:
            table = ELFFile(file).get_section_by_name(".symtab")
            for symbol in table.iter_symbols() if table else ():
                if symbol["st_info"]["type"] != "STT_TLS" or "engine_shared_anchor" in symbol.name:
                    continue
                holders = [name for name, prefix in prefixes.items() if symbol.name.startswith(prefix)]
                for name in holders:
                    own[name] += symbol["st_size"]
                if not holders:
                    common += symbol["st_size"]
    except ELFError:  # macOS: not ELF, so not known
        return dict.fromkeys(mangled, 0)
    return {name: size + common for name, size in own.items()}


def _linker_symbols(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> (address, size) of the library's functions and variables."""
    try:
        with path.open("rb") as file:
            table = ELFFile(file).get_section_by_name(".symtab")
            all_symbols = table.iter_symbols() if table else ()
            return {s.name: (s["st_value"], s["st_size"]) for s in all_symbols if s["st_size"]}
    except ELFError:
        return {}


def name_at(path: Path, library: ctypes.CDLL, address: int) -> str | None:
    """The linker symbol of the function at an address of the loaded library."""
    found = _linker_symbols(path)
    anchor = found.get("engine_entries")
    if anchor is None:
        return None
    base = ctypes.cast(library.engine_entries, ctypes.c_void_p).value - anchor[0]
    # GCC adds local aliases of the same address; their names have a dot.
    return min((name for name, (value, _) in found.items() if value == address - base), key=len, default=None)


def size_of(path: Path, variable: str) -> int:
    """Bytes of a variable of the library; 0 where there is none of that name."""
    return _linker_symbols(path).get(variable, (0, 0))[1]


def line_of(path: Path, address: int) -> tuple[str, int] | None:
    """File and line of an address in the library, from its DWARF line table; None where there is none."""
    try:
        with path.open("rb") as file:
            elf = ELFFile(file)
            if not elf.has_dwarf_info():
                return None
            dwarf = elf.get_dwarf_info()
            for unit in dwarf.iter_CUs():
                program = dwarf.line_program_for_CU(unit)
                if program is None:
                    continue
                before = None
                for entry in program.get_entries():
                    state = entry.state
                    if state is None:
                        continue
                    if before is not None and before.address <= address < state.address:
                        return program["file_entry"][before.file - 1].name.decode(), before.line
                    before = None if state.end_sequence else state
    except ELFError:
        return None
    return None

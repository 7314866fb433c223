"""Place static `__shared__` arrays as a GPU's compiler does, in the assembly of a kernel.

They are the thread-local variables of a module. A GPU places those of a kernel one after the other in the order of the
source, each at a multiple of its type's alignment, from a round address on (PTX writes `.shared .align 2` for an array
of half). So in `__shared__ half a[256], b[256]` both are at multiples of 512 bytes, which wmma accepts, and after
`__shared__ char flag` an array may not be at one. g++ writes thread-locals in reverse order, and those of one function
after those of another at any address.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass

REDZONE = 4096  # bytes at least between two arrays of a checked build: what a row of a tile takes, and more
ROUND = 128  # a multiple of it is where the first array of a function lies, in the fast and in the checked build

_SECTION = re.compile(r"\s*\.(section\s+([^\s,]+)|text|data|bss|previous|pushsection|popsection)")
_LABEL = re.compile(r"([A-Za-z_][\w.$]*):")
_ALIGN = re.compile(r"\s*\.(b|p2)?align\s+(\d+)")
_ALIGNS_BY_POWERS = platform.machine() in ("aarch64", "arm64")  # there .align 3 is .balign 8
_SPACE = re.compile(r"\s*\.(?:zero|skip|space|byte|short|value|2byte|long|4byte|quad|8byte)\b")


@dataclass
class _Variable:
    name: str
    lines: list[str]

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("_ZGV") or self.name == "__tls_guard"

    def with_gap(self) -> list[str]:
        at = next(i for i, line in enumerate(self.lines) if _LABEL.match(line))  # behind .align, which so stays true
        return [*self.lines[:at], f"\t.zero {redzone(self.lines[:at])}", *self.lines[at:]]


def redzone(lines: list[str]) -> int:
    """Return the bytes of the gap before a variable: a multiple of its alignment, from the lines before it."""
    size = REDZONE
    for match in filter(None, map(_ALIGN.match, lines)):
        is_power = match[1] == "p2" or (match[1] is None and _ALIGNS_BY_POWERS)
        size = max(size, 1 << int(match[2]) if is_power else int(match[2]))  # both are powers of two
    return size


def _owner(name: str) -> str:
    """Return the function that declares an array, by the array's linker symbol; "" for the file."""
    match = re.match(r"(_ZZ.*E)\d+\w+$", name.replace("_ZGV", "_Z", 1))
    return match.group(1) if match else "engine" if "engine_anchor_byte" in name else ""


def laid_out(assembly: str, *, backwards: bool, redzones: bool) -> str:
    """Return the assembly with its thread-locals in the order of a GPU.

    Args:
        backwards: the compiler has written them in the reverse order of the source, as g++ does.
        redzones: a gap before each, in which no access is right. It keeps addresses the same modulo ROUND.

    A compiler for macOS spells thread-locals otherwise: then nothing changes.
    """
    lines: list[str] = []
    variables: list[_Variable] = []
    pending: list[str] = []
    name, inside = "", False
    for line in assembly.splitlines():
        directive = _SECTION.match(line)
        if directive:
            lines += pending  # what stood behind the last variable
            pending, name = [], ""
            inside = (directive.group(2) or "").startswith(".tbss")
            if inside:
                continue
        if not inside:
            lines.append(line)
            continue
        pending.append(line)
        label = _LABEL.match(line)
        if label and not label.group(1).startswith(".L"):
            name = label.group(1)
        if name and _SPACE.match(line):
            variables.append(_Variable(name, pending))
            pending, name = [], ""
    if not variables:
        return assembly
    lines += pending
    lines.append('\t.section\t.tbss,"awT",@nobits')
    groups: dict[str, list[_Variable]] = {}
    for variable in reversed(variables) if backwards else variables:
        groups.setdefault(_owner(variable.name), []).append(variable)
    for group in groups.values():
        # Of an array whose type has constructors, compilers keep a flag: not between the arrays, as GPUs have none.
        lines += [line for variable in group if variable.is_flag for line in variable.lines]
        lines.append(f"\t.balign {ROUND}")
        for variable in group:
            if not variable.is_flag:
                lines += variable.with_gap() if redzones else variable.lines
    return "\n".join([*lines, "\t.text"]) + "\n"

"""What a checked build needs of its assembly that the compiler's own options do not give."""

from __future__ import annotations

import re

from .shared_layout import REDZONE

_COPIES = re.compile(r"^(\s+(?:call|callq|bl)\s+_?)(memcpy|memmove|memset)\b", re.M)


def instrumented(assembly: str) -> str:
    """The assembly of a checked build, with what the compiler's own options do not give it.

    Calls of memcpy, memmove and memset go to the checker's: g++ tells nobody of them, and clang expects a library that
    takes their names.
    """
    return _with_redzones(_COPIES.sub(r"\1engine_checked_\2", assembly))


_HOLDING = (".bss", ".data")  # sections of variables; of __shared__ arrays: see shared_layout.py
_LOCAL = re.compile(r"^\s+\.local\s+(\S+)\n\s+\.comm\s+\1,(\d+),(\d+)$", re.M)


def _with_redzones(assembly: str) -> str:
    """The assembly with a gap before each variable of the module, in which no access is right.

    A compiler for macOS spells them otherwise: then no gaps.
    """
    gap = f"\t.zero {REDZONE}\n\t.balign 128"
    statics = rf"\t.pushsection .bss\n{gap}\n\t.type \1, @object\n\t.size \1, \2\n\1:\n\t.zero \2\n\t.popsection"
    lines, inside, sizes = [], "", set()
    for line in assembly.splitlines():
        directive = re.match(r"\s*\.(section\s+([^\s,]+)|text|data|bss|previous|pushsection|popsection)", line)
        if directive:
            section = directive.group(2) or f".{directive.group(1)}"
            inside = section if section.startswith(_HOLDING) and not section.startswith(".data.rel.ro") else ""
        elif inside and re.match(r"[A-Za-z_]\S*:", line):
            lines.append(gap)
            sizes.add(inside)
        lines.append(line)
    text, n_statics = _LOCAL.subn(statics, "\n".join(lines) + "\n")
    sizes |= {".bss"} if n_statics else set()
    return text + "".join(f"\t{section}\n{gap}\n" for section in sorted(sizes & {".bss", ".data"}))

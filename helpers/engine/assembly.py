"""Change a checked build's assembly where the compiler's own options do not suffice."""

from __future__ import annotations

import re

from .shared_layout import REDZONE, redzone

_COPIES = re.compile(r"^(\s+(?:call|callq|bl)\s+_?)(memcpy|memmove|memset)\b", re.M)


def instrumented(assembly: str) -> str:
    """Return a checked build's assembly with what the compiler's own options do not provide.

    Calls of memcpy, memmove and memset go to the checker's: g++ has no hooks for them, and clang expects a library that
    takes their names.
    """
    return _with_redzones(_COPIES.sub(r"\1engine_checked_\2", assembly))


# 0xFE in each byte, as g++ fills local variables: a 32-bit or 64-bit number, the bytes of a vector, or one byte that
# goes to all bytes of a vector.
_TO_ALL_BYTES = r"(?:vmovd\t\1, (%xmm\d+)\n(?:.*\n){0,30}?\tvpbroadcastb\t\2,|vpbroadcastb\t\1,)"
_PATTERN = re.compile(
    r"(?<![\w-])-(?:16843010|72340172838076674)\b|(?:^\s+\.byte\s+-2\n){4,}"
    rf"|(?<=\tmovl\t\$)-2(?=, (%\w+)\n(?:(?!.*, \1$).*\n){{0,30}}?\t{_TO_ALL_BYTES})",
    re.M,
)


def with_nan(assembly: str) -> str:
    """Return g++'s assembly in which its pattern for local variables is 0xFF in each byte: NaN, as clang's is.

    g++'s own is -1.7e38, which a product with 0 hides.
    """
    return _PATTERN.sub(lambda match: match[0].replace("-2", "-1") if "-2" in match[0] else "-1", assembly)


_HOLDING = (".bss", ".data")  # sections of variables; of __shared__ arrays: see shared_layout.py
_LOCAL = re.compile(r"^\s+\.local\s+(\S+)\n\s+\.comm\s+\1,(\d+),(\d+)$", re.M)


def _with_redzones(assembly: str) -> str:
    """Return the assembly with a gap before each variable of the module, in which every access is an error.

    Compilers for macOS use other directives: then there are no gaps.
    """

    def gap(size: int = REDZONE) -> str:
        return f"\t.zero {size}\n\t.balign 128"

    def static(match: re.Match[str]) -> str:
        name, size, alignment = match.groups()
        align = f"\t.balign {alignment}\n{gap(max(REDZONE, int(alignment)))}"
        kind = f"\t.type {name}, @object\n\t.size {name}, {size}"
        return f"\t.pushsection .bss\n{align}\n{kind}\n{name}:\n\t.zero {size}\n\t.popsection"

    lines, inside, sizes = [], "", set()
    begin = 0  # of the lines of a variable
    for line in assembly.splitlines():
        directive = re.match(r"\s*\.(section\s+([^\s,]+)|text|data|bss|previous|pushsection|popsection)", line)
        if directive:
            section = directive.group(2) or f".{directive.group(1)}"
            inside = section if section.startswith(_HOLDING) and not section.startswith(".data.rel.ro") else ""
        elif inside and re.match(r"[A-Za-z_]\S*:", line):
            lines.append(gap(redzone(lines[begin:])))
            begin = len(lines)
            sizes.add(inside)
        lines.append(line)
    text, n_statics = _LOCAL.subn(static, "\n".join(lines) + "\n")
    sizes |= {".bss"} if n_statics else set()
    return text + "".join(f"\t{section}\n{gap()}\n" for section in sorted(sizes & {".bss", ".data"}))


FLOP = "engine_flop"  # the symbol of the sum
_BLOCK = re.compile(r"\s+call\s+__sanitizer_cov_trace_pc\b")
_ARITHMETIC = re.compile(r"\s+v?(?:add|sub|mul|div|sqrt|(fn?m(?:add|sub)\d+))([sp])([sd])\s|\s+call\s+fmaf?\b")
_NO_ARITHMETIC = "float16_formats|math_functions|mma_types|conversions|functions|cuda_fp8|cuda_e8m0"
_NOT_COUNTED = re.compile(rf'^\s+\.file (\d+) "[^"\n]*/include/(?:ptx/)?(?:{_NO_ARITHMETIC})\.h"', re.M)


def with_flop(assembly: str) -> str:
    """Return g++'s assembly of a profiled build for x86 in which each basic block adds its FLOP to a sum.

    Counted is what the compiler left: of float and double, an addition, subtraction, multiplication, division or square
    root is one, and an FMA two, whether the processor fuses it or not. 16-bit numbers are computed as floats and count
    as those. These count nothing: comparisons, maxima, conversions (except those of 64-bit unsigned integers, for which
    x86 needs arithmetic), functions such as expf and rsqrtf, approximations of PTX, and what the engine computes in a
    function of its own, such as __fadd_rz. Products on tensor cores are counted apart, by engine_tensor_flop.

    A folded constant counts nothing, and what was moved out of a loop counts once, so another version of g++ may
    count a little more or less.
    """
    lines: list[str] = []
    counts: dict[int, int] = {}
    emulation = set(_NOT_COUNTED.findall(assembly))
    block, is_counted = 0, True
    for line in assembly.splitlines():
        lines.append(line)
        if line.startswith("\t.loc "):
            is_counted = line.split(None, 2)[1] not in emulation
        elif _BLOCK.match(line):
            block = len(lines)
            lines.append("")  # flags are free behind a call
        elif is_counted and (match := _ARITHMETIC.match(line)):
            fused, packed, kind = match.groups()
            bits = 512 if "%zmm" in line else 256 if "%ymm" in line else 128
            width = bits // (32 if kind == "s" else 64) if packed == "p" else 1
            counts[block] = counts.get(block, 0) + width * (2 if fused or not kind else 1)
    counts.pop(0, None)
    for at, count in counts.items():
        lines[at] = f"\taddq ${count}, .L{FLOP}(%rip)"
    # Without a type and a size, it is no variable of the module's.
    variable = f"\t.pushsection .bss\n\t.balign 8\n\t.globl {FLOP}\n{FLOP}:\n.L{FLOP}:\n\t.zero 8\n\t.popsection"
    return "\n".join([*lines, variable]) + "\n"

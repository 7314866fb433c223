"""Show a compiler's errors with the kernel's own lines, and name what the engine lacks.

A host compiler does not know CUDA. It reports "No such file" for a header that only a GPU's toolkit has, calls a
texture undeclared, and blames the end of the engine's own text for a brace that the kernel does not close.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import compiler, host_names
from .cuda_source import source

SOURCE_NAME = "kernel.cu"  # the name of a source without its own #line in messages
ENTRIES, FIRST_ENTRY = "entries", 3  # the table of kernels after the source, and its first line with a kernel

_Place = tuple[str, int]
_MOST_LINES = 24  # shown of a message: later errors mostly follow from the first ones


@dataclass
class _Error:
    """One error of the compiler. near: the other places that it names, each with its message."""

    file: str
    line: int
    column: int
    message: str
    near: list[tuple[str, int, str]] = field(default_factory=list)


def explain(diagnostics: str, code: str, names: Sequence[str]) -> str:
    """Return the compiler's errors, each with its line of the source.

    Args:
        diagnostics: the output of g++ or clang++.
        code: the source text.
        names: the kernels and name expressions of the table `ENTRIES`, in their order.
    """
    # A kernel's build may disable exceptions; the message is a GPU compiler's.
    refused = r"exception handling disabled, use .?-fexceptions.? to enable|cannot use '\w+' with exceptions disabled"
    diagnostics = re.sub(refused, "device code does not support exception handling", diagnostics)
    table = source.line_table(code, SOURCE_NAME)
    errors = _errors(diagnostics)
    unclosed = _unbalanced_brace(code)
    if unclosed is not None and any("{" in e.message or "}" in e.message or e.file == ENTRIES for e in errors):
        return "\n".join(_quoted(*unclosed, table))
    lacking = _undeclared(errors, table) or _lacking(errors, code, table)
    if lacking:
        return "\n".join(lacking)
    shown: list[str] = []
    elsewhere: list[str] = []  # errors in headers: reported only if the source itself has none
    named: set[int] = set()
    for error in errors:
        if error.file == ENTRIES:  # only each entry's first error: the others follow from it
            name = _name(names, error.line)
            if name and error.line not in named:
                plain = name.split("::")[-1]
                is_bare = "<" not in name and source.is_template(code, plain)
                message = (
                    f"{plain} is a template: write the instance, such as {name}<float>" if is_bare else error.message
                )
                shown.append(f"name expression {name}: {message}")
            named.add(error.line)
        elif (error.file, error.line) in table:
            shown += _quoted((error.file, error.line), error.message + _instance(error, names), table, error.column)
            for file, line, message in error.near:
                if message and (file, line) in table:
                    shown.append(f"{file}:{line}: note: {message}")
        else:
            header = error.file.rpartition("/")[2]
            if error.message == "static assertion failed":
                error.message += _asserted(error.file, error.line)
            user = next(((file, line) for file, line, _ in error.near if (file, line) in table), None)
            if user:
                text = f"{error.message} ({header}:{error.line}){_instance(error, names)}"
                elsewhere += _quoted(user, text, table)
            else:
                elsewhere.append(f"{header}:{error.line}: error: {error.message}")
        if len(shown) > _MOST_LINES:
            return "\n".join([*shown, "(and more)"])
    return "\n".join(shown or elsewhere) or diagnostics.strip()


def _errors(diagnostics: str) -> list[_Error]:
    """Return the compiler's errors. g++ names a template error's origin before it, clang++ after it."""
    errors: list[_Error] = []
    before: list[tuple[str, int, str]] = []
    for text in diagnostics.splitlines():
        match = re.match(r"(.+?):(\d+):(?:(\d+):)?\s+(?:(?:fatal )?(error|note): )?(.*)", text)
        if not match:
            continue
        file, line, column, kind, message = match.groups()
        if kind == "error":
            errors.append(_Error(file, int(line), int(column or 0), message, before))
            before = []
        elif kind == "note" and errors:
            errors[-1].near.append((file, int(line), message))
        elif kind is None and re.match(r"required (from|by)|recursively required|in .constexpr. expansion", message):
            before.append((file, int(line), message))
    return errors


def _asserted(file: str, line: int) -> str:
    """Return the condition of a static_assert without a message, by its line in a header; "" if it cannot be read."""
    try:
        text = Path(file).read_text(errors="replace").splitlines()[line - 1].strip()
    except (OSError, IndexError):
        return ""
    return f": {text}"


def _name(names: Sequence[str], line: int) -> str | None:
    at = line - FIRST_ENTRY
    return names[at] if 0 <= at < len(names) else None


def _instance(error: _Error, names: Sequence[str]) -> str:
    """Return the kernel's instance in which a template's error occurred, if it has a name."""
    lines = [line for file, line, _ in error.near if file == ENTRIES]
    name = _name(names, lines[-1]) if lines else None
    return f" [in {name}]" if name and "<" in name else ""


def _quoted(place: _Place, message: str, table: Mapping[_Place, str], column: int = 0) -> list[str]:
    """Format an error with its line below it, and a mark below its column."""
    lines = [f"{place[0]}:{place[1]}: error: {message}"]
    if place in table:
        lines.append(f"{place[1]:>6} | {table[place].expandtabs(4)}")
        if column:
            lines.append(" " * (8 + column) + "^")
    return lines


def undefined(name: str, code: str) -> str:
    """Return the message for a name that the source declares and never defines."""
    if re.search(rf"\b{name}\s*\[\s*\]", code) and source.has_dynamic_shared(code):
        return (
            f"{name} is declared by a macro that holds extern __shared__ without the array's name. Write the "
            f"declaration out: extern __shared__ float {name}[];"
        )
    shown = _demangled(name)
    own = re.escape(re.split(r"[<(]", shown)[0].rpartition("::")[2])
    is_kernel = re.search(rf"__global__[^;{{}}]*\b{own}\s*\(", code)
    return f"{shown} is declared, but nowhere defined" + ": a header of prototypes is no source" * bool(is_kernel)


def _demangled(symbol: str) -> str:
    """Demangle a symbol with the compiler's tool; return it unchanged if there is no such tool."""
    program = shutil.which("c++filt")
    if program is None or not symbol.startswith("_Z"):
        return symbol
    return subprocess.run([program, symbol], capture_output=True, text=True).stdout.strip() or symbol


# ---------------------------------------------------------------- braces


def _branches(clean: str, *, first: bool) -> list[str]:
    """Return the lines without directives: only the first branch of each conditional, or only its #else."""
    branch: list[str] = []
    skipping: list[bool] = []
    in_directive = False
    for line in clean.split("\n"):
        directive = re.match(r"\s*#\s*(\w*)", line)
        word = directive.group(1) if directive and not in_directive else ""
        if word in ("if", "ifdef", "ifndef"):
            skipping.append(not first or bool(re.match(r"\s*#\s*if\s+0\s*$", line)))
        elif word == "else" and skipping:
            skipping[-1] = not skipping[-1]
        elif word == "elif" and skipping:
            skipping[-1] = True
        elif word == "endif" and skipping:
            skipping.pop()
        in_directive = in_directive or bool(directive)
        branch.append("" if in_directive or any(skipping) else line)
        in_directive = in_directive and line.rstrip().endswith("\\")
    return branch


def _unbalanced_brace(code: str) -> tuple[_Place, str] | None:
    """Return the place of an unmatched brace, and what is wrong with it; None if all match.

    Among several candidates, it is the first whose partner is indented less than the line that opened it. The branches
    taken by conditionals are unknown here, so a brace is reported only if it is unmatched either way.
    """
    clean = source.blank_comments(code)
    brace = _unbalanced(_branches(clean, first=True))
    if brace is None or _unbalanced(_branches(clean, first=False)) is None:
        return None
    number, closes = brace
    if closes:
        return _place(code, number), "this brace closes nothing: there is one } too many, here or above"
    return _place(code, number), "the brace { that opens here is never closed: a } is missing"


def _unbalanced(lines: Sequence[str]) -> tuple[int, bool] | None:
    """Return the line of an unmatched brace, counted from 0, and whether it is a closing one."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    open_lines: list[int] = []
    suspect: int | None = None
    for number, line in enumerate(lines):
        for column, char in enumerate(line):
            if char == "{":
                open_lines.append(number)
            elif char == "}":
                if not open_lines:
                    return number, True
                opened = open_lines.pop()
                first = not line[:column].strip()
                if first and opened != number and indents[number] < indents[opened] and suspect is None:
                    suspect = opened
    if not open_lines:
        return None
    return (open_lines[0] if suspect is None else suspect), False


def _place(code: str, number: int) -> _Place:
    """Return file and line, as compilers count them, of a line of the text, counted from 0."""
    lines = code.split("\n")
    lines[number] += "\0"
    return next(place for place, text in source.line_table("\n".join(lines), SOURCE_NAME).items() if "\0" in text)


# ---------------------------------------------------------------- what the engine does not have

_OF_CUDA = re.compile(
    r"(cub|thrust|cuda|nv|crt|cooperative_groups|cupy)/|"
    r"(cooperative_groups|cu\w*|nv\w*|mma|sm_\d+\w*|(math|device|driver|host|texture|surface|vector)_\w+|library_types|"
    r"builtin_types|channel_descriptor|common_functions)\.h$"
)
_LIBRARIES = {
    r"curand_(?:kernel|uniform|normal|philox|mtgp32|poisson|lognormal|discrete)\w*\.h": (
        "is cuRAND's header for kernels, which comes with the CUDA toolkit and not with CuPy: NVRTC finds it where "
        "an -I names the toolkit's folder, and the CPU engine does not have it. Make random numbers on the host, or "
        "hash the thread's index"
    ),
    r"(cublas|cusolver|cusparse|cufft|curand|cudnn|nccl|nvml|npp|nvtx|cutensor|nvjpeg)": (
        "belongs to a library that the host calls or that only a GPU has"
    ),
    r"(cutlass|cute)/": (
        "belongs to CUTLASS, whose headers come with `pip install --no-deps nvidia-cutlass==4.2.0.0`: "
        "options=('-I<folder>',) names their folder, the one that contains cute/ and cutlass/"
    ),
    r"(torch|ATen|c10|pybind11)/|torch\.h": "belongs to PyTorch's host code: cut the kernel out of the extension",
}

_TEXTURE = (
    r"\btex(1D|2D|3D|ref|Cubemap)\w*|\bcudaTextureObject_t\b|\btexture\s*<|\bcudaTextureType\w*|\bcudaReadMode\w*|"
    r"\bcudaCreateTextureObject\b|\bcudaTextureDesc\b"
)
_SURFACE = r"\bsurf(1D|2D|3D|Cubemap)\w*|\bcudaSurfaceObject_t\b|\bsurface\s*<|\bcudaSurfaceType\w*"
_LACKING = (
    (
        r"<<<",
        "kernels are launched from Python: kernel(grid, block, args). A launch by <<<...>>> is host code, or, in a "
        "kernel, dynamic parallelism, which the CPU engine does not offer",
    ),
    (
        _TEXTURE,
        "the CPU engine has no textures (texture<>, cudaTextureObject_t, tex1D, tex2D, tex3D, tex1Dfetch). Read the "
        "array itself, through __ldg where it is const, or run this kernel on a GPU",
    ),
    (
        _SURFACE,
        "the CPU engine has no surfaces (surface<>, cudaSurfaceObject_t, surf2Dread, surf2Dwrite). Read and write the "
        "array itself, or run this kernel on a GPU",
    ),
    (
        r"non-local lambda expression",
        "this macro declares an extern __shared__ array outside of a function. Use it within the kernel, or write the "
        "declaration without a macro",
    ),
)


def _lacking(errors: Sequence[_Error], code: str, table: Mapping[_Place, str]) -> list[str]:
    """Return the errors about what the engine lacks, each once by its name; empty if there are none."""
    clean = source.line_table(source.blank_comments(code), SOURCE_NAME)
    shown: list[str] = []
    said: set[str] = set()
    for error in errors:
        place = error.file, error.line
        if place not in table:  # a macro of the engine's that contains the source's own macros
            places = [
                (file, line) for file, line, message in error.near if "macro" in message and (file, line) in table
            ]
            if not places:
                continue
            place = places[-1]
        header = re.match(r"'?‘?([\w./+-]+)'?’?(?:: No such file or directory| file not found)", error.message)
        if header:
            shown += _quoted(place, _no_header(header.group(1)), table)
            continue
        for pattern, message in _LACKING:
            if message not in said and (re.search(pattern, clean.get(place, "")) or re.search(pattern, error.message)):
                shown += _quoted(place, message, table, error.column)
                said.add(message)
                break
    return shown


# Types of CUDA's headers, and each one's header.
_HEADER_OF = {
    r"(?:__)?half2?(?:_raw)?|__\w*half\w*|__h(?:add|sub|mul|div|fma|neg|max|min|lt|le|gt|ge|eq)2?": "cuda_fp16.h",
    r"(?:__)?nv_bfloat162?|__float2bfloat16\w*|__bfloat162float": "cuda_bf16.h",
    r"__nv_fp8\w*": "cuda_fp8.h",
    r"nvcuda|wmma": "mma.h",
    r"cooperative_groups": "cooperative_groups.h",
    r"cuComplex|cuFloatComplex|cuDoubleComplex": "cuComplex.h",
    r"CUDART_\w+": "math_constants.h",
}
_UNDECLARED = re.compile(
    r"[‘'](?:\w+::)*(\w+)[’'](?: was not declared| does not name a type| has not been declared| is not a member of|"
    r" is not a namespace-name| is not a type| was not declared in this scope)|"
    r"(?:unknown type name|use of undeclared identifier|no type named|no member named) [‘'](\w+)[’']"
)


def _undeclared(errors: Sequence[_Error], table: Mapping[_Place, str]) -> list[str]:
    """Return the errors about names that a GPU's compiler does not know either, with the header that defines them.

    A compiler's further errors about an unknown type all follow from the first.
    """
    shown: list[str] = []
    said: set[str] = set()
    for error in errors:
        dynamic = re.search(r"(?:[‘'](\w+)[’']|variable) does not have a constant initializer", error.message)
        if dynamic and (error.file, error.line) in table:
            name = dynamic[1] or "a variable"
            shown += _quoted(
                (error.file, error.line),
                f"{name} would be computed before a kernel runs, which a GPU does not do (dynamic initialization "
                "is not supported): give it a value that is constexpr, or write to it in a kernel or by get_global",
                table,
                error.column,
            )
            return shown
        match = _UNDECLARED.search(error.message)
        if match is None:
            continue
        name = (match[1] or match[2]).removeprefix(host_names.PREFIX)
        header = next((header for names, header in _HEADER_OF.items() if re.fullmatch(names, name)), "")
        message = host_names.of(name) or (f"{name} comes with a header: #include <{header}>" if header else "")
        places = [(error.file, error.line), *((file, line) for file, line, _ in error.near)]
        place = next((place for place in places if place in table), None)
        if message and place and name not in said:
            at = re.search(rf"\b{name}\b", table[place].expandtabs(4))
            shown += _quoted(place, message, table, at.start() + 1 if at else 0)
            said.add(name)
    return shown


def available_headers() -> list[str]:
    """Return the CUDA headers that a kernel may include on the engine: sorted, with those in folders last."""
    hidden = {"engine_entries.h", "engine_std.h"}
    names = {p.relative_to(compiler.INCLUDE).as_posix() for p in compiler.INCLUDE.rglob("*") if p.is_file()}
    shown = [name for name in names if _OF_CUDA.match(name) and name.rpartition("/")[2] not in hidden]
    return sorted(shown, key=lambda name: ("/" in name, name))


def _no_header(name: str) -> str:
    for pattern, what in _LIBRARIES.items():
        if re.match(pattern, name):
            return f"<{name}> {what}"
    if _OF_CUDA.match(name):
        return (
            f"<{name}> is a header of CUDA that the CPU engine does not have. It has: {', '.join(available_headers())}"
            ". Do without it, or run this kernel on a GPU"
        )
    return (
        f"{name} was not found. Your own headers are looked up in the current folder, and in the folders of "
        "options=('-I<folder>',)"
    )

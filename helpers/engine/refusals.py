"""Report what a GPU's compiler refuses and a host's accepts, before the kernel is compiled, with its line.

Without these rules a learner without NVRTC (it does not exist for macOS) would learn on a GPU that a header is missing.
NVRTC, as CuPy calls it, compiles for the device alone: functions without __device__ or __host__ are the device's,
__host__ alone is refused, and the C and C++ libraries' headers do not exist. These are the common forms;
helpers/engine/nvrtc.py runs NVRTC itself.

A source is judged after the preprocessor, so that excluded text (the host's part of a file, inside `#ifndef
__CUDACC_RTC__`) does not count. Starting a preprocessor takes longer than reading a kernel. So the text is first read
as it is written: if no macro can hide anything and nothing is found, that suffices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import compiler, host_names
from .cuda_source.source import blank_comments
from .translate import function_bodies

# Of C, of C++, and of the system.
HOST_HEADERS = set(
    """assert.h complex.h ctype.h errno.h fenv.h float.h inttypes.h limits.h locale.h math.h setjmp.h signal.h
    stdarg.h stdbool.h stddef.h stdint.h stdio.h stdlib.h string.h time.h wchar.h unistd.h pthread.h sys/time.h
    sys/types.h memory.h algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv
    chrono cinttypes climits clocale cmath compare complex concepts condition_variable coroutine csetjmp csignal
    cstdarg cstddef cstdint cstdio cstdlib cstring ctime cwchar deque exception execution filesystem forward_list
    fstream functional future initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale
    map memory memory_resource mutex new numbers numeric optional ostream queue random ranges ratio regex
    scoped_allocator semaphore set shared_mutex source_location span sstream stack stdexcept streambuf string
    string_view strstream syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map
    unordered_set utility valarray variant vector version""".split()  # noqa: SIM905
)
_INSTEAD = {
    "assert.h": "assert is built in",
    "cassert": "assert is built in, and <cuda/std/cassert> exists",
    "stdio.h": "printf is built in",
    "cstdio": "printf is built in",
    "math.h": "its functions are built in",
    "cmath": "its functions are built in",
    "stdint.h": "write unsigned int and long long, or include <cuda/std/cstdint>",
    "cstdint": "write unsigned int and long long, or include <cuda/std/cstdint>",
    "limits": "include <cuda/std/limits>",
    "cfloat": "include <cuda/std/cfloat>",
    "float.h": "include <cuda/std/cfloat>",
    "type_traits": "include <cuda/std/type_traits>",
    "algorithm": "min and max are built in",
}
_MARK = "engine_host_header"

_ATTRIBUTES = re.compile(r"\b(?:__align__|alignas|__attribute__|__launch_bounds__|__cluster_dims__|__maxnreg__)\s*\(")
PREPROCESSOR = (
    *("-D__CUDACC__=1", "-D__CUDACC_RTC__=1", "-D__NVCC__=1", "-D__CUDA_ARCH__=900"),
    *("-D__CUDACC_VER_MAJOR__=12", "-D__CUDACC_VER_MINOR__=9"),
)  # these tell a source which compiler reads it


def for_preprocessor(code: str, folders: list[Path]) -> str:
    """Return the source without foreign headers: the host's become marks that the preprocessor keeps."""
    clean = blank_comments(code)
    if "include" not in clean:
        return code

    def without(match: re.Match[str]) -> str:
        name = match.group(2)
        if any((folder / name).is_file() for folder in folders):
            return match.group()
        return f'{_MARK} "{name}"' if name in HOST_HEADERS else ""

    lines = []
    for line, text in zip(clean.split("\n"), code.split("\n"), strict=True):
        include = re.match(r"(\s*#\s*include\s*)<([^>]+)>", line) if "include" in line else None
        lines.append(without(include) if include else text)
    return "\n".join(lines)


_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)((?:\\\n|[^\n])*)", re.M)
# Of a #define: it stands for nothing, or for what a declaration or a body is made of.
_HIDES = re.compile(
    r"\s*\w+\s*$|.*(?:[{};]|##|\b__(?:shared|device|global|constant|host)__|"
    r"\b(?:thread_local|static|void|bool|char|short|int|long|float|double|unsigned|signed|auto)\b)",
    re.S,
)


@functools.lru_cache(maxsize=64)  # a kernel's checked builds ask again
def _is_plainly_right(text: str, expressions: tuple[str, ...]) -> bool:
    """Return True if the text is accepted, as far as that shows without the preprocessor."""
    clean = blank_comments(text)
    directives = [match.groups() for match in _DIRECTIVE.finditer(clean)]
    if any(word == "define" and _HIDES.match(rest) for word, rest in directives):
        return False
    clean = _DIRECTIVE.sub(lambda match: "\n" * match.group().count("\n"), clean)
    return _MARK not in text and next(_findings(clean, clean, expressions), None) is None


def refusal(code: str, macros: str, name: str, flags: Sequence[str], expressions: tuple[str, ...] = ()) -> str:
    """Return what NVRTC refuses in a source, as a compiler's error; "" if nothing is found.

    Args:
        macros: lines of #define that come before it. name: what the source is called. flags: the compiler's.
        expressions: the name expressions.
    """
    folders = [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    text = f'{macros}#line 1 "{name}"\n{for_preprocessor(code, folders)}'
    if _is_plainly_right(text, expressions):
        return ""
    error = first(compiler.preprocess(text, [*PREPROCESSOR, *flags]), expressions)
    return f"{error[0]}:{error[1]}: error: {error[2]}" if error else ""


def _places(text: str) -> tuple[str, list[tuple[int, str, int]]]:
    """Remove the line markers of preprocessed text, and return where its lines are from: (offset, file, line)."""
    lines, places, at = [], [], 0
    file, number = "", 1
    for line in text.split("\n"):
        marker = re.match(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"', line)
        if marker:
            number, file = int(marker.group(1)), marker.group(2)
            continue
        places.append((at, file, number))
        lines.append(line)
        at += len(line) + 1
        number += 1
    return "\n".join(lines), places


def first(preprocessed: str, expressions: tuple[str, ...] = ()) -> tuple[str, int, str] | None:
    """Return (file, line, message) of the first thing that NVRTC refuses; None if nothing is found."""
    text, places = _places(preprocessed)
    clean = blank_comments(text)
    earliest = min(_findings(clean, text, expressions), default=None)
    if earliest is None:
        return None
    at, message = earliest
    _, file, line = max(place for place in places if place[0] <= at)
    return file, line, message


def _findings(clean: str, text: str, expressions: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    for match in re.finditer(rf'\b{_MARK}\s*"([^"]*)"', text):
        name = match.group(1)
        hint = f" ({_INSTEAD[name]})" if name in _INSTEAD else ""
        yield match.start(), f"<{name}> is a header of the host, which NVRTC does not have: leave it out{hint}"
    bodies = function_bodies(clean)
    for begin, _, head in bodies:
        yield from _of_function(clean, begin - len(head), head)
    yield from _of_host(clean)
    yield from _of_shared(clean)
    yield from _of_file(clean, bodies)
    yield from _of_constants(clean)
    if re.search(r"\bstd\b", clean):
        for at, name in host_names.outside_of_std(host_names.without_unused_templates(clean, expressions)):
            yield at, host_names.of_std(name)


def _plain_head(head: str) -> str:
    """Return a function's head without attributes in parentheses and without the text before it in its class."""
    while match := _ATTRIBUTES.search(head):
        depth, end = 0, len(head)
        for index in range(match.end() - 1, len(head)):
            depth += {"(": 1, ")": -1}.get(head[index], 0)
            if depth == 0:
                end = index + 1
                break
        head = head[: match.start()] + " " * (end - match.start()) + head[end:]
    return re.sub(r"\b(?:public|private|protected)\s*:(?!:)", lambda m: " " * len(m.group()), head)


# Extensions of a host's compiler, as g++ and clang++ warn of them, that NVRTC does not have.
_EXTENSION = re.compile(
    r"^(.+?):(\d+):(?:\d+:)? warning: (.*(?:"
    r"designated initializers|lambda templates are|template parameter list for lambdas|loops? (?:with initializer|"
    r"initialization statement)|member initializers? for bit-field|omitt?(?:ing|ed) (?:the )?middle|braced-groups|"
    r"GNU statement expression|zero.size array|range expressions in switch|GNU case range|flexible array|"
    r"compound.literals|C\+\+23 .size_t|.size_t. suffix|address.of.(?:a )?label|in parameter declaration only).*)$",
    re.M,
)


_TEXT = re.compile(r'R?"(?:[^"\\]|\\.)*(?:"|$)')  # of inline PTX, perhaps, which may begin with a brace


def extension(diagnostics: str, lines: Mapping[tuple[str, int], str]) -> str:
    """Return as an error what a compiler has warned of and NVRTC refuses; "" if there is nothing.

    lines: the source's own lines, by file and number. (Inline PTX has become braces within brackets.)
    """
    for file, line, message in _EXTENSION.findall(diagnostics):
        text = _TEXT.sub('""', lines.get((file, int(line)), ""))
        if text.strip() and ("braced" not in message or re.search(r"\(\s*\{", text)):
            what = re.sub(r"\s*\[-W[^\]]*\]$", "", message)
            return f"{file}:{line}: error: {what}: it is an extension that NVRTC does not have"
    return ""


_TEMPLATE = re.compile(r"\btemplate\s*<")


def _without_template(head: str) -> str:
    """Blank the template parameters in a declaration's head: they may hold types of functions."""
    while match := _TEMPLATE.search(head):
        angles = brackets = 0
        end = len(head)
        for index in range(match.end() - 1, len(head)):
            brackets += {"(": 1, ")": -1}.get(head[index], 0)
            angles += {"<": 1, ">": -1}.get(head[index], 0) if brackets == 0 else 0
            if angles == 0 and brackets == 0:
                end = index + 1
                break
        head = head[: match.start()] + " " * (end - match.start()) + head[end:]
    return head


_NAMED = re.compile(r"(~?\w+|operator\s*[^\s\w(]+|operator\s*\(\s*\))\s*\(")
_VALUE = re.compile(r"\b(?:bool|char|short|int|long|float|double|unsigned|signed|half|size_t)\b")


def _of_function(clean: str, at: int, head: str) -> Iterator[tuple[int, str]]:
    plain = _plain_head(_without_template(head))
    named = _NAMED.search(plain)
    if "__global__" not in plain or named is None:
        return
    returned = re.search(r"\)\s*->([^()]*)$", plain)
    before = plain[: named.start()]
    if _VALUE.search(returned[1]) if returned else re.search(r"\bauto\b", before) or _VALUE.search(before):
        yield at + named.start(), f"{named.group(1)} is a __global__ function, and those return void"


def _of_host(clean: str) -> Iterator[tuple[int, str]]:
    """Yield functions of the host's alone, and lambdas with a memory space."""
    for match in re.finditer(r"(?<!\])\]\s*(__(?:host|device)__)\b", clean):
        yield (
            match.start(1),
            f"a lambda with {match.group(1)} needs nvcc's --extended-lambda: leave it out, as a lambda in a kernel is "
            "the device's already",
        )
    for match in re.finditer(r"__host__(?<=\b__host__)\b", clean):
        begin = max(clean.rfind(end, 0, match.start()) for end in ";{}") + 1
        rest = re.compile(r"[;{}]").search(clean, match.end())
        head = _plain_head(_without_template(clean[begin : rest.start() if rest else len(clean)]))
        if "__device__" in head or re.search(r"=\s*(?:default|delete)\s*$", head):
            continue
        named = _NAMED.search(head)
        if named is None or "=" in head[: named.start()]:
            yield match.start(), "a variable is not __host__: leave it out, and it is the device's"
        elif not re.search(rf"\b__device__\b[^;{{}}]*\b{re.escape(named.group(1))}\s*\(", clean):
            yield (
                begin + named.start(),
                f"{named.group(1)} is a __host__ function, and NVRTC compiles for the device alone: write __device__",
            )


def _of_shared(clean: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"__shared__(?<=\b__shared__)\b((?:\[[^\]]*\]|[^;{}=\[])*)([={;])", clean):
        if re.search(r"\b(?:struct|union|class)\b", match.group(1)):
            continue  # its members follow
        if match.group(2) != ";" and "(" not in _plain_head(match.group(1)):
            name = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", match.group(1))
            what = name.group(1) if name else "it"
            extern = re.search(r"\bextern\s+$", clean[: match.start()])
            yield (
                extern.start() if extern else match.start(),
                (
                    f"{what} is in shared memory, which cannot be initialised where it is declared: write to it in the "
                    "kernel, then __syncthreads()"
                ),
            )


def _of_file(clean: str, bodies: list[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Yield variables in a function that name a memory space, which the function decides."""
    inside = [(begin, end) for begin, end, _ in bodies]
    spaced = r"__(?<=\b__)(?:device|constant)__\s+(?!__)[^;{}()=]*?(\w+)\s*(?:\[[^;{}()]*\])*\s*[=;]"
    for match in re.finditer(spaced, clean):
        if any(begin < match.start() < end for begin, end in inside):
            yield match.start(), f"{match.group(1)}: a variable of a function is neither __device__ nor __constant__"
    for match in re.finditer(r"\b(?!return\b)\w+[\s*&]+(\w+)\s*\[[^\]\n;]*\bwarpSize\b[^\]\n;]*\]\s*[;={\[]", clean):
        yield match.start(1), "warpSize is no constant for NVRTC, so no size of an array: write 32"
    for match in re.finditer(r"thread_local(?<=\bthread_local)\b", clean):
        yield match.start(), "thread_local is for a host's threads: a kernel's variables are its thread's already"


def _of_constants(clean: str) -> Iterator[tuple[int, str]]:
    for declared in re.finditer(r"__constant__(?<=\b__constant__)\b[^;{}()=]*?(\w+)\s*(?:=[^;]*)?;", clean):
        name = declared.group(1)
        if len(re.findall(rf"(?:\w|\*|&)\s+{name}\b\s*[\[=;,){{]|,\s*{name}\s*=", clean)) > 1:
            continue  # another variable of that name may be meant
        written = rf"(?<![.>\w]){name}\b\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*{name}\b"
        for match in re.finditer(written, clean[declared.end() :]):
            yield declared.end() + match.start(), f"{name} is __constant__: a kernel cannot write to it"

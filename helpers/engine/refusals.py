"""What a GPU's compiler refuses and a host's would accept: reported before the kernel is compiled, with its line.

Without these rules a learner who has no NVRTC (macOS has none) would learn only on a GPU that a function needs
__device__. NVRTC knows no host: every function and every variable of a file says where it lives, and the C and C++
libraries' headers do not exist. These are the common forms; helpers/engine/nvrtc.py asks NVRTC itself.

A source is judged after the preprocessor, so that what it leaves out (the host's part of a file, inside `#ifndef
__CUDACC_RTC__`) does not count. Starting one takes longer than reading a kernel. So the text is read first as it is
written, and where no macro can hide anything and nothing is found, that is all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import compiler
from .cuda_source.source import blank_comments
from .translate import function_bodies

# Of C, of C++, and of the system. <assert.h> is left out: the engine has its own.
HOST_HEADERS = set(
    """complex.h ctype.h errno.h fenv.h float.h inttypes.h limits.h locale.h math.h setjmp.h signal.h stdarg.h stdbool.h
    stddef.h stdint.h stdio.h stdlib.h string.h time.h wchar.h unistd.h pthread.h sys/time.h sys/types.h memory.h
    algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits
    clocale cmath compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint cstdio
    cstdlib cstring ctime cwchar deque exception execution filesystem forward_list fstream functional future
    initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale map memory memory_resource
    mutex new numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore set
    shared_mutex source_location span sstream stack stdexcept streambuf string string_view strstream syncstream
    system_error thread tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector
    version""".split()  # noqa: SIM905
)
_INSTEAD = {
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

# How somebody says that the source is compiled by another compiler or with other rules than NVRTC's own.
OTHER_RULES = {"-default-device", "--device-as-default-execution-space", "-device-as-default-execution-space"}
_ANNOTATED = re.compile(r"\b__(?:device|global|host)__\b")
_ATTRIBUTES = re.compile(r"\b(?:__align__|alignas|__attribute__|__launch_bounds__|__cluster_dims__|__maxnreg__)\s*\(")
PREPROCESSOR = (
    *("-D__CUDACC__=1", "-D__CUDACC_RTC__=1", "-D__NVCC__=1", "-D__CUDA_ARCH__=900"),
    *("-D__CUDACC_VER_MAJOR__=12", "-D__CUDACC_VER_MINOR__=9"),
)  # by these a source sees who compiles it


def for_preprocessor(code: str, folders: list[Path]) -> str:
    """The source without the headers that are none of its own: a host's become marks that the preprocessor keeps."""
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
def _is_plainly_right(text: str) -> bool:
    """Whether nothing in the text is refused, as far as that can be told without the preprocessor."""
    clean = blank_comments(text)
    directives = [match.groups() for match in _DIRECTIVE.finditer(clean)]
    if any(word == "define" and _HIDES.match(rest) for word, rest in directives):
        return False
    clean = _DIRECTIVE.sub(lambda match: "\n" * match.group().count("\n"), clean)
    return _MARK not in text and next(_findings(clean, clean), None) is None


def refusal(code: str, macros: str, name: str, flags: Sequence[str]) -> str:
    """What NVRTC refuses in a source, as a compiler's error; "" where nothing was found.

    Args:
        macros: lines of #define that come before it. name: what the source is called. flags: the compiler's.
    """
    folders = [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    text = f'{macros}#line 1 "{name}"\n{for_preprocessor(code, folders)}'
    if _is_plainly_right(text):
        return ""
    error = first(compiler.preprocess(text, [*PREPROCESSOR, *flags]))
    return f"{error[0]}:{error[1]}: error: {error[2]}" if error else ""


def _places(text: str) -> tuple[str, list[tuple[int, str, int]]]:
    """Preprocessed text without its line markers, and where each of its lines is from: (offset, file, line)."""
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


def first(preprocessed: str) -> tuple[str, int, str] | None:
    """(file, line, what is wrong) of the first thing that NVRTC refuses; None where nothing was found."""
    text, places = _places(preprocessed)
    clean = blank_comments(text)
    earliest = min(_findings(clean, text), default=None)
    if earliest is None:
        return None
    at, message = earliest
    _, file, line = max(place for place in places if place[0] <= at)
    return file, line, message


def _findings(clean: str, text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(rf'\b{_MARK}\s*"([^"]*)"', text):
        name = match.group(1)
        hint = f" ({_INSTEAD[name]})" if name in _INSTEAD else ""
        yield match.start(), f"<{name}> is a header of the host, which NVRTC does not have: leave it out{hint}"
    bodies = function_bodies(clean)
    for begin, _, head in bodies:
        yield from _of_function(clean, begin - len(head), head)
    yield from _of_shared(clean)
    yield from _of_file(clean, bodies)
    yield from _of_constants(clean)


def _plain_head(head: str) -> str:
    """A function's head without attributes in parentheses, and without what stood before it in its class."""
    while match := _ATTRIBUTES.search(head):
        depth, end = 0, len(head)
        for index in range(match.end() - 1, len(head)):
            depth += {"(": 1, ")": -1}.get(head[index], 0)
            if depth == 0:
                end = index + 1
                break
        head = head[: match.start()] + " " * (end - match.start()) + head[end:]
    return re.sub(r"\b(?:public|private|protected)\s*:(?!:)", lambda m: " " * len(m.group()), head)


def _of_function(clean: str, at: int, head: str) -> Iterator[tuple[int, str]]:
    plain = _plain_head(head)
    named = re.search(r"(~?\w+|operator\s*[^\s\w(]+|operator\s*\(\s*\))\s*\(", plain)
    if named is None or "(" not in plain or re.search(r"[=\[]", plain[: named.start()].replace("[[", "")):
        return  # a struct with attributes; a lambda, or an initialiser
    if re.search(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", plain[: named.start()]):
        return  # a macro of a header that is not read here may say it
    at += named.start()
    declared = rf"\b__(?:device|global)__\b[^;{{}}]*\b{re.escape(named.group(1))}\s*\("
    if not _ANNOTATED.search(plain) and not re.search(declared, clean):
        yield (
            at,
            (
                f"{named.group(1)} is a function of the host: write __device__ before it (NVRTC refuses a function "
                "that says neither __device__ nor __global__)"
            ),
        )
    if "__global__" in plain and not re.search(r"\bvoid\b", plain[: named.start()]):
        yield at, f"{named.group(1)} is a __global__ function, and those return void"
    if "__global__" in plain and re.search(r"\b__device__\b", plain):
        yield at, f"{named.group(1)} cannot be __global__ and __device__ at once"
    if "__host__" in plain and "__device__" not in plain:
        yield at, f"{named.group(1)} is a __host__ function, and NVRTC compiles for the device alone: write __device__"


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
    """Variables: those of a file that say nothing of where they are, those of a function that say too much."""
    inside = [(begin, end) for begin, end, _ in bodies]
    spaced = r"__(?<=\b__)(?:device|constant)__\s+(?!__)[^;{}()=]*?(\w+)\s*(?:\[[^;{}()]*\])*\s*[=;]"
    for match in re.finditer(spaced, clean):
        if any(begin < match.start() < end for begin, end in inside):
            yield match.start(), f"{match.group(1)}: a variable of a function is neither __device__ nor __constant__"
    for match in re.finditer(r"thread_local(?<=\bthread_local)\b", clean):
        yield match.start(), "thread_local is for a host's threads: a kernel's variables are its thread's already"
    for begin, end in _outside_of_braces(clean):
        for match in re.finditer(r"(?<=[;}])\s*|^\s*", clean[max(begin - 1, 0) : end]):
            variable = _VARIABLE.match(clean, max(begin - 1, 0) + match.end())
            if variable:
                yield (
                    variable.start(),
                    (
                        f"{variable.group(1)} is a variable of the host: write __device__, __constant__ or constexpr "
                        "before it"
                    ),
                )


_TYPE = r"(?:unsigned|signed|int|float|double|char|short|long)(?:\s+(?:unsigned|int|char|short|long|double))*"
_VARIABLE = re.compile(
    rf"(?:static\s+|volatile\s+)*(?:{_TYPE}\s+|(?:const\s+)?{_TYPE}\s*(?:const\s*)?(?:\*\s*)+)(?!const\b)(\w+)"
    r"\s*(?:\[[^\]]*\]\s*)*(?:=[^=]|;|,|\{)"
)


def _outside_of_braces(clean: str) -> Iterator[tuple[int, int]]:
    """The stretches of the text that no braces enclose."""
    depth = begin = 0
    for match in re.finditer("[{}]", clean):
        if depth == 0:
            yield begin, match.start()
        depth += 1 if match.group() == "{" else -1
        begin = match.end()
    if depth == 0:
        yield begin, len(clean)


def _of_constants(clean: str) -> Iterator[tuple[int, str]]:
    for declared in re.finditer(r"__constant__(?<=\b__constant__)\b[^;{}()=]*?(\w+)\s*(?:=[^;]*)?;", clean):
        name = declared.group(1)
        if len(re.findall(rf"(?:\w|\*|&)\s+{name}\b\s*[\[=;,){{]|,\s*{name}\s*=", clean)) > 1:
            continue  # another variable of that name may be meant
        written = rf"(?<![.>\w]){name}\b\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*{name}\b"
        for match in re.finditer(written, clean[declared.end() :]):
            yield declared.end() + match.start(), f"{name} is __constant__: a kernel cannot write to it"

"""The device libraries that CuPy brings: its own headers, and NVIDIA's CUB, libcu++ and Thrust.

They stay CuPy's files: found in its package at run time, never copied, and compiled unchanged. To libcu++ and CUB the
engine presents itself as nvcc with g++ (or clang++) beneath it. Their inline PTX is translated
like a kernel's own, but after the preprocessor: an unknown instruction fails when a thread reaches it, because most of
these headers' code is never called.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import compiler, ptx
from .cuda_source.source import blank_comments

_INCLUDE = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.M)
_LIBRARY = re.compile(r"(cub|thrust|cuda|nv)/")
_MISSING = re.compile(r"error: '?((?:cub|thrust|cuda|nv|cupy)/[\w./]+)'?(?:: No such file| file not found)")
_OF_THE_HOST = re.compile(r"cub/device/|thrust/(?!complex\.h|detail/)")
SHIMS = compiler.INCLUDE / "libraries"  # headers of ours in place of theirs


@functools.cache
def folder() -> Path | None:
    """Return the include folder of the installed CuPy without importing it; None if there is none.

    It is looked up on the path: in sys.modules another module may have CuPy's name, such as this engine.
    """
    try:
        spec = importlib.machinery.PathFinder.find_spec("cupy")
    except (ImportError, ValueError):
        return None
    for place in (spec and spec.submodule_search_locations) or ():
        include = Path(place) / "_core" / "include"
        if include.is_dir():
            version = (Path(place) / "_version.py").read_bytes()
            compiler.name_folder(include, f"cupy-{hashlib.sha256(version).hexdigest()[:15]}/include")
            return include
    return None


def cupy_options() -> list[str]:
    """Return the options for `<cupy/complex.cuh>` and its kin, which CuPy itself passes to NVRTC."""
    return ["-I", str(folder())] if folder() else []


def translate_cucomplex(code: str) -> str:
    """Replace cuComplex.h by CuPy's bridge, which makes cuComplex CuPy's `complex<float>`."""
    return re.sub(r"^(\s*#\s*include\s*)<\s*cuComplex\.h\s*>", r"\1<cupy/cuComplex_bridge.h>", code, flags=re.M)


def needed(code: str) -> bool:
    """Return True if the source includes a header of CUB, libcu++ or Thrust that the engine lacks."""
    names = _INCLUDE.findall(blank_comments(code))
    return any(_LIBRARY.match(name) and not (compiler.INCLUDE / name).is_file() for name in names)


def missing(diagnostics: str) -> str:
    """Return the library's header that a compiler did not find, "" if that was not the error."""
    match = _MISSING.search(diagnostics)
    return match[1] if match else ""


def of_the_host(code: str) -> str:
    """Return the end of an error about a header for calls from the host; "" if there is none."""
    header = next((name for name in _INCLUDE.findall(blank_comments(code)) if _OF_THE_HOST.match(name)), "")
    return (
        f"\n<{header}> is for what a host calls, not a kernel: within one, <cub/block/...> and <cub/warp/...>"
        if header
        else ""
    )


def whose(header: str) -> str:
    """Name the library of a header, for a machine that does not have it."""
    owner = {"cub": "CUB", "thrust": "Thrust", "cupy": "CuPy"}.get(header.partition("/")[0], "libcu++")
    return (
        f"{header} is a header of {owner}, which comes with CuPy: the CPU engine compiles it where CuPy is installed "
        "(pip install cupy-cuda12x, which needs no GPU for this)"
    )


@functools.cache
def options() -> list[str]:
    """Return the options for CUB, libcu++ and Thrust; their folders come before the engine's own.

    Empty where CuPy, or its part of them, is not installed.
    """
    bundled = folder() / "cupy" / "_cccl" if folder() else None
    if bundled is None or not bundled.is_dir():
        return []
    version = (folder().parents[1] / "_version.py").read_text()
    flags = [f"-DENGINE_LIBRARIES=0x{hashlib.sha256(version.encode()).hexdigest()[:15]}"]
    for place in (SHIMS, *(bundled / name for name in ("cub", "libcudacxx", "thrust"))):
        flags += ["-I", str(place)]
    # g++ takes `using BlockScan = BlockScan<...>` in a class for an error, which nvcc and clang do not.
    return flags if "clang" in compiler.compiler()[1].lower() else [*flags, "-fpermissive"]


@functools.cache
def translation_hash() -> str:
    """Hash the Python files that `expanded` depends on: a part of the key of what is built with it."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(Path(ptx.__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile\b|__volatile__\b)?\s*\(")
# Translated PTX speaks of what cuda_runtime.h has as macros, which the preprocessor is done with.
_MACROS = "".join(
    f"#define {name} (engine_lane()->{field})\n"
    for name, field in {
        "threadIdx": "thread_index",
        "blockIdx": "block_index",
        "blockDim": "block_size",
        "gridDim": "grid_size",
    }.items()
)
_LINE = re.compile(r'^# \d+ "([^"]*)"(.*)$', re.M)  # a file, and a 3 where it is the system's


_LABEL = re.compile(r'\s*"\w+"\s*')  # a declaration's name for the linker


def expanded(text: str, flags: Sequence[str]) -> tuple[str, str]:
    """Paste the includes of a text with ptx_instructions.h, and translate all its inline PTX.

    Returns that, and the preprocessor's own messages.

    The C library's headers contain asm of their own, which names symbols of the linker: it stays.
    """
    command = [*compiler.compiler()[0], *flags, "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        return "", done.stderr
    code = ptx.raw_strings(done.stdout)
    lines = [(match.start(), match[1], "3" in match[2].split()) for match in _LINE.finditer(code)]
    ours = (str(folder()), str(compiler.INCLUDE))
    pieces, end, near = [_MACROS], 0, 0
    for number, match in enumerate(_ASM.finditer(code)):
        if match.start() < end:
            continue
        while near + 1 < len(lines) and lines[near + 1][0] < match.start():
            near += 1
        _, file, of_the_system = lines[near]
        if of_the_system and not file.startswith(ours):
            continue
        close = _closing(code, match.end())
        if _LABEL.fullmatch(code, match.end(), close):
            continue
        pieces += [code[end : match.start()], statement(code[match.end() : close], number)]
        pieces.append("\n" * code.count("\n", match.start(), close))
        end = close + 1
    return "".join([*pieces, code[end:]]), done.stderr


_STRING_OR_BRACKET = re.compile(r'"(?:\\.|[^"\\])*"|[()]')


def _closing(code: str, at: int) -> int:
    """Return the bracket that ends what stands at an index within brackets; strings are skipped."""
    depth = 1
    for match in _STRING_OR_BRACKET.finditer(code, at):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return len(code)


def statement(inside: str, number: int, *, is_volatile: bool = True) -> str:
    """Translate one asm statement of a library to C++; an unknown one fails when a thread reaches it."""
    inside = re.sub(r'^\s*# \d+ "[^\n]*$', "", inside, flags=re.M)
    try:
        return ptx.rewrite(inside, number, is_volatile=is_volatile)
    except ValueError as error:
        message = str(error).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'engine_fail("inline PTX: {message}", __FILE__, __LINE__)'

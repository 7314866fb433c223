"""Compile with NVRTC first: a GPU's compiler needs no GPU, and refuses some code that the CPU engine accepts.

    from rawkernel import nvrtc  # in the course: from helpers.engine
    nvrtc.check_first()          # or COURSE_NVRTC=1 before Python starts

From then on the engine compiles a kernel only after NVRTC has accepted it, and reports NVRTC's errors with the kernel's
lines. That costs 0.1 to 0.3 s for a new source; the answers are kept with the engine's builds. Without NVRTC (it does
not exist for macOS) nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from . import libraries
from .compiler import CompileError, cache_dir, keep, name_by_contents, name_folder, with_paths, without_paths
from .cuda_source import source
from .module import RawModule

ARCH = "compute_90"  # the architecture whose limits the engine has
# What CuPy adds to the options of every RawKernel and RawModule.
ALWAYS = ("-ftz=true", "--device-as-default-execution-space")


@functools.cache
def version() -> tuple[int, int] | None:
    """Return the version of the NVRTC that CuPy finds, such as (12, 9); None without CuPy or NVRTC."""
    try:
        from cupy.cuda import nvrtc

        return nvrtc.getVersion()
    except Exception:  # a broken installation of CuPy can raise anything
        return None


def check_first(on: bool = True) -> None:
    """Compile the CPU engine's modules with NVRTC first from now on or, with False, no longer."""
    RawModule.ask_first = _ask if on else None


def _ask(module: RawModule) -> None:
    if module.backend != "nvrtc" or module.jitify:  # nvcc compiles the source, or Jitify rewrites it first
        return
    refused = refusal(module.code, module.options, module.name_expressions)
    if refused:
        raise CompileError(f"NVRTC refuses this source, as it would for a GPU:\n{refused}")


@functools.lru_cache(maxsize=256)
def refusal(code: str, options: tuple[str, ...] = (), names: Sequence[str] = ()) -> str:
    """Return NVRTC's errors for a source, each with its line; "" if it accepts it, or is not installed.

    Args:
        code, options: as `cupy.RawModule` takes them. names: the name expressions.
    """
    installed = version()
    if installed is None:
        return ""
    known = header_options(code)  # the key names their folders by contents
    own = re.search(r'^\s*#\s*include\s*"', code, re.M) or any(
        option.startswith("-I") and option not in known for option in options
    )
    options = (*options, *known)
    asked = without_paths(repr((code, (*options, *ALWAYS), tuple(names), installed)))
    key = hashlib.sha256(asked.encode()).hexdigest()[:32]
    answer = cache_dir() / f"nvrtc-{key}.txt"
    if answer.exists() and not own:  # the text of included files is not in the key
        return with_paths(answer.read_text())
    log = _compile(code, options, names)
    keep(answer, without_paths(log))
    return log


def cupy_options(options: tuple[str, ...], arch: str = ARCH) -> tuple[str, ...]:
    """Return what CuPy passes to NVRTC for these options of a `RawModule`: it adds header folders.

    arch: CuPy passes the device's, such as sm_90. For C++ errors compute_90 is equivalent, and runs no assembler.
    """
    from cupy._core import core

    return (*core.assemble_cupy_compiler_options(options), *ALWAYS, f"-arch={arch}")


def _compile(code: str, options: tuple[str, ...], names: Sequence[str]) -> str:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, cupy_options(options))
        except nvrtc.NVRTCError as error:
            return _errors(nvrtc.getProgramLog(program), code) or str(error)
        return ""
    finally:
        nvrtc.destroyProgram(program)


def _errors(log: str, code: str, most: int = 8) -> str:
    """Return the errors of NVRTC's log in the engine's format: "kernel.cu:3: error: ...", and the line."""
    table = source.line_table(code, "kernel.cu")
    shown: list[str] = []
    for match in re.finditer(r"^(.+?)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$", log, re.M):
        file, line = match.group(1), int(match.group(2))
        text = f"{file}:{line}: error: {match.group(3).strip()}"
        if (file, line) in table:
            text += f"\n{line:>6} | {table[file, line].rstrip()}"
        shown.append(text)
    return "\n".join([*shown[:most], *(["(and more)"] if len(shown) > most else [])]) or log.strip()


def header_folder(header: str) -> Path | None:
    """Return the folder of a CUDA toolkit, from a wheel or installed, with this header; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    folders = [wheel / part / "include" for wheel in wheels for part in ("cuda_nvcc", "cu13")]
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    folders += [Path(root) / "include" for root in roots if root]
    return next((folder for folder in folders if (folder / header).is_file()), None)


CUTLASS = "nvidia-cutlass==4.2.0.0"  # the package with CuTe's headers, as in environment.yml
# Where packages keep the folder with cute/ and cutlass/. 4.2 is nvidia-cutlass's last version; its successor nvidia-
# cutlass-dsl has no headers, and flashinfer-python has newer ones.
CUTE_FOLDERS = {"cutlass_library": "source/include", "flashinfer": "data/cutlass/include"}


class CuteMissing(ImportError):
    """A source includes CuTe's headers, and their package is not installed. The message says how to install it."""


@functools.cache
def cute_folder() -> Path | None:
    """Return the folder with `cute/tensor.hpp`; None if there is none.

    It comes from a clone of CUTLASS at `$CUTLASS_PATH`, else from the first installed package of `CUTE_FOLDERS`. No
    package is imported, because that needs others that the course does not use.
    """
    clone = os.environ.get("CUTLASS_PATH")
    folders = [Path(clone) / "include"] if clone else []
    for name, below in CUTE_FOLDERS.items():
        spec = importlib.util.find_spec(name)
        folders += [Path(place) / below for place in spec.submodule_search_locations or ()] if spec else []
    return next((folder for folder in folders if (folder / "cute" / "tensor.hpp").is_file()), None)


def cute_version() -> str | None:
    """Return the version of the headers in `cute_folder()`, such as "4.2.0"; None without them."""
    header = cute_folder() and cute_folder() / "cutlass" / "version.h"
    if not header or not header.is_file():
        return None
    text = header.read_text(encoding="utf-8")
    numbers = (re.search(rf"^#define CUTLASS_{part} (\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(number[1] for number in numbers if number)


def uses_cute(code: str) -> bool:
    """Return True if a source includes a header of CuTe's, such as <cute/tensor.hpp>."""
    return re.search(r"^\s*#\s*include\s*<cute/", code, re.M) is not None


def why_no_cute() -> str | None:
    """Return a message that CuTe's headers are missing, and how to install them; None if they are installed."""
    if cute_folder() is not None:
        return None
    return f"CuTe's headers are missing: {sys.executable} -m pip install --no-deps {CUTLASS}"


def cute_options(code: str) -> tuple[str, ...]:
    """Return the -I option for a source that includes CuTe's headers; nothing for others.

    Raises:
        CuteMissing: CuTe's headers are not installed.
    """
    if not uses_cute(code):
        return ()
    if reason := why_no_cute():
        raise CuteMissing(f"the source includes <cute/...>. {reason}")
    installed = version()
    cccl = _cccl_folder() if installed and installed >= (13, 0) else None
    return (f"-I{cute_folder()}", *((f"-I{cccl}",) if cccl else ()))


@functools.cache
def _cccl_folder() -> Path | None:
    """Return CuPy's folder whose subfolder cccl has cuda/std, where CUTLASS looks for it since CUDA 13."""
    include = libraries.folder()
    libcudacxx = include / "cupy/_cccl/libcudacxx" if include else None
    if libcudacxx is None or not (libcudacxx / "cuda" / "std").is_dir():
        return None
    name = hashlib.sha256(str(libcudacxx).encode()).hexdigest()[:16]
    folder = cache_dir() / f"cccl-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "cccl"
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another process has just made it
            link.symlink_to(libcudacxx, target_is_directory=True)
    return folder


@functools.cache
def _name_toolkit(folder: Path) -> None:
    """Name the toolkit's folder by the part of it that NVRTC reads."""
    parts = sorted((folder / "crt").glob("mma.h*"))
    digest = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:32]
    name_folder(folder, f"toolkit/{digest}/include")


def header_options(code: str) -> tuple[str, ...]:
    """Return NVRTC's options for the headers of a source, besides CuPy's own for CUDA and CCCL.

    mma.h includes crt/mma.h, which comes with the compiler nvcc.

    Raises:
        CuteMissing: CuTe's headers are not installed.
    """
    folder = header_folder("crt/mma.h") if re.search(r"^\s*#\s*include\s*<mma\.h>", code, re.M) else None
    cute = cute_options(code)
    if folder:
        _name_toolkit(folder)
    if cute:
        name_by_contents(cute_folder())
    return (*((f"-I{folder}",) if folder else ()), *cute)

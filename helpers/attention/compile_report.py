"""Report the registers, shared memory, spills and stack of a kernel that NVRTC compiles. No GPU is needed.

    from helpers.attention.compile_report import compile_report
    print(compile_report("03_online_softmax.cu", {"HEAD_DIM": 64}, "sm_90"))

The compiler and its options are those of `cupy.RawModule`, so the numbers are those of the kernel that a launch uses.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from helpers.attention import kernel
from helpers.engine import CompileError
from helpers.engine.compiler import cache_dir, keep, without_paths
from helpers.engine.cuda_source import source
from helpers.engine.nvrtc import ALWAYS, cupy_options, header_options

# Turing (RTX 20, T4), Ampere (A100; RTX 30), Ada (RTX 40, L4), Hopper (H100, H200), Blackwell (RTX 50).
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


class NvrtcMissing(RuntimeError):
    """CuPy or the NVRTC library is not installed. The message says which, and how to install it."""


@dataclass(frozen=True)
class CompileReport:
    """One kernel compiled for one architecture.

    registers: 32-bit registers per thread; 255 is the maximum.
    shared_bytes: static shared memory per block, in bytes.
    spill_bytes: stores and loads of values that found no register, in bytes of instructions, not of traffic.
    stack_bytes: local memory per thread, in bytes: arrays whose index is known only at run time, and spills.
    warnings: the assembler's, about instructions of sm_90a that it ignores (setmaxnreg, C7508) or serialises (wgmma,
    C7510 to C7517).
    """

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.kernel} for {self.arch}: {self.registers} registers, {self.shared_bytes:,} bytes of shared memory, "
            f"{self.spill_bytes} of spills, {self.stack_bytes} of stack"
            + "".join(f"; {warning}" for warning in self.warnings)
        )


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that CuPy finds, such as (12, 9).

    Raises:
        NvrtcMissing: CuPy is not installed, or does not find NVRTC.
    """
    try:
        from cupy.cuda import nvrtc
    except Exception as error:  # a broken installation of CuPy can raise anything
        raise NvrtcMissing(
            f"NVRTC is called through CuPy, which does not import ({type(error).__name__}: {error}). On Linux and "
            "Windows: pip install cupy-cuda12x 'nvidia-cuda-nvrtc-cu12==12.9.*'. There is none for macOS."
        ) from error
    try:
        return nvrtc.getVersion()
    except Exception as error:
        raise NvrtcMissing(
            f"CuPy is installed, but finds no NVRTC ({type(error).__name__}: {error}). "
            "Install it: pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'"
        ) from error


def compile_report(
    file: str, defines: Mapping[str, Any] | None = None, arch: str = "sm_80", *, name: str | None = None
) -> CompileReport:
    """Compile a kernel with NVRTC and read its assembler's log.

    Args:
        file: a file of `kernels/`, or source text (anything with a line break), as `helpers.attention.kernel.load`
            takes it. defines: sizes by name, such as {"HEAD_DIM": 64}; None for the file's own.
        arch: the architecture, such as "sm_90" or "sm_90a".
        name: the kernel, or a name expression such as "scale<float>"; needed if the source has several.

    Raises:
        NvrtcMissing: CuPy or NVRTC is not installed.
        FileNotFoundError: there is no such file.
        ValueError: NVRTC does not know the architecture, or several kernels could be meant.
        CompileError: the source does not compile; the message is the compiler's.
        CuteMissing: it includes CuTe's headers, which are not installed.
    """
    code = file if "\n" in file else kernel.source(file)
    _check_arch(arch)
    kernels = source.kernels(code)
    if name is None:
        if len(kernels) != 1:
            raise ValueError(f"name= says which kernel is meant; the source has: {', '.join(kernels) or 'none'}")
        (name,) = kernels
    if re.sub(r"<.*", "", name).split("::")[-1] not in kernels:
        raise ValueError(f"the source has no kernel {name!r}; its kernels: {', '.join(kernels) or 'none'}")
    # NVRTC compiles every extern "C" kernel in any case, so one compilation reports all of them.
    log, symbol = _compiled(code, kernel.options(defines), arch, "" if _is_of_c(code, name) else name)
    return read_log(log, name, symbol or name, arch)


def _check_arch(arch: str) -> None:
    major, minor = nvrtc_version()
    from cupy.cuda import nvrtc

    architectures = {f"sm_{number}" for number in nvrtc.getSupportedArchs()}
    if not isinstance(arch, str) or re.sub(r"[af]$", "", arch) not in architectures:
        names = ", ".join(sorted(architectures, key=lambda text: int(text[3:])))
        raise ValueError(f"NVRTC {major}.{minor} does not know arch={arch!r}; it knows {names}")


def _is_of_c(code: str, name: str) -> bool:
    """Return True if a kernel is extern "C": its name is its symbol's."""
    return bool(re.search(rf'\bextern\s+"."[^;{{}}"]*\b{re.escape(name)}\s*\(', source.blank_comments(code)))


@functools.lru_cache(maxsize=256)
def _compiled(code: str, options: tuple[str, ...], arch: str, instance: str) -> tuple[str, str]:
    """Return the assembler's log, and the symbol of the kernel that the name expression means, or "".

    It is cached with the engine's builds, because other notebooks and tests compile the same kernels.
    """
    options = (*options, *header_options(code))
    asked = without_paths(repr((code, (*options, *ALWAYS), arch, instance, nvrtc_version())))
    key = hashlib.sha256(asked.encode()).hexdigest()[:32]
    path = cache_dir() / f"report-{key}.json"
    changes = re.search(r'^\s*#\s*include\s*"', code, re.M)  # the key does not contain such included files
    if path.exists() and not changes:
        log, symbol = json.loads(path.read_text())
        return log, symbol
    compiled = _compile(code, options, arch, instance)
    if not changes:
        keep(path, json.dumps(compiled))
    return compiled


def _compile(code: str, options: tuple[str, ...], arch: str, instance: str) -> tuple[str, str]:
    from cupy.cuda import nvrtc

    with program(code, options, arch, (instance,) if instance else (), log=True) as made:
        return nvrtc.getProgramLog(made), nvrtc.getLoweredName(made, instance) if instance else ""


@contextlib.contextmanager
def program(
    code: str, options: tuple[str, ...], arch: str, names: Iterable[str] = (), *, log: bool = False
) -> Iterator[Any]:
    """Compile a program with NVRTC like RawModule; destroy it at the end.

    Args:
        options: with those of `header_options`. names: name expressions of the template instances to compile.
        log: assemble it whether or not NVRTC has it in a cache, with the assembler's log.

    Raises:
        CompileError: NVRTC rejects the source; the message is its log.
    """
    from cupy.cuda import nvrtc

    more = ("--ptxas-options=-v",) if log else ()
    if log and nvrtc.getVersion() >= (12, 9):
        more = (*more, "-no-cache")  # NVRTC does not assemble what it finds in its cache: there would be no log
    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        for name in names:  # this makes the template's instance, and gives the name that the assembler will use
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (*cupy_options(options, arch), *more))
        except nvrtc.NVRTCError as error:
            text = nvrtc.getProgramLog(program).strip()
            raise CompileError(f"NVRTC refused the source for {arch} ({error}):\n{text}") from None
        yield program
    finally:
        nvrtc.destroyProgram(program)


def read_log(log: str, name: str, symbol: str, arch: str) -> CompileReport:
    """Read the kernel's part of the assembler's log. Each part opens with the kernel's name.

    Raises:
        CompileError: the log does not say what the kernel uses.
    """
    parts = re.split(r"Compiling entry function '(\w+)' for '\w+'", log)
    part = dict(zip(parts[1::2], parts[2::2], strict=True)).get(symbol, "")
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
    used = re.search(r"Used (\d+) registers.*", part)
    if frame is None or used is None:
        raise CompileError(f"NVRTC's log does not say what {name} uses on {arch}:\n{log.strip()}")
    shared = re.search(r"(\d+) bytes smem", used.group(0))
    return CompileReport(
        kernel=name,
        arch=arch,
        registers=int(used.group(1)),
        shared_bytes=int(shared.group(1)) if shared else 0,
        spill_bytes=int(frame.group(2)) + int(frame.group(3)),
        stack_bytes=int(frame.group(1)),
        warnings=tuple(re.findall(r"\((?:C7508|C751[0-7])\) .*", log)),
    )

"""NVRTC, a GPU's compiler, asked first: it refuses what the CPU engine takes, and needs no GPU.

    from helpers import nvrtc
    nvrtc.check_first()     # or COURSE_NVRTC=1 before Python starts

From then on the engine compiles a kernel only after NVRTC has accepted it, and reports what NVRTC refuses, with the
kernel's line. That costs 0.1 to 0.3 s for a new source; the answers are kept beside the engine's builds. Where NVRTC
is not installed (there is none for macOS), nothing changes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from helpers import cpu
from helpers.cuda_source import source

ARCH = "compute_90"  # the engine's limits are those of this architecture


@functools.cache
def version() -> tuple[int, int] | None:
    """The version of the NVRTC that CuPy finds, such as (12, 9); None where there is no CuPy or no NVRTC."""
    try:
        from cupy.cuda import nvrtc

        return nvrtc.getVersion()
    except Exception:  # a broken installation of CuPy fails in many ways
        return None


def check_first(on: bool = True) -> None:
    """From now on the CPU engine's modules are compiled by NVRTC before they are compiled for the CPU; or no longer."""
    cpu.RawModule.ask_first = _ask if on else None


def _ask(module: cpu.RawModule) -> None:
    refused = refusal(module.code, module.options, module.name_expressions)
    if refused:
        raise cpu.CompileError(f"NVRTC refuses this source, as it would for a GPU:\n{refused}")


@functools.lru_cache(maxsize=256)
def refusal(code: str, options: tuple[str, ...] = (), names: Sequence[str] = ()) -> str:
    """NVRTC's errors for a source, each with its line; "" where it accepts the source, or is not installed.

    Args:
        code, options: as `cupy.RawModule` takes them. names: the name expressions.
    """
    found = version()
    if found is None:
        return ""
    own = re.search(r'^\s*#\s*include\s*"', code, re.M) or any(option.startswith("-I") for option in options)
    folder = header_folder("crt/mma.h") if re.search(r"#\s*include\s*<mma\.h>", code) else None
    if folder is not None:  # mma.h includes it, and CuPy does not tell NVRTC where it is
        options = (*options, f"-I{folder}")
    key = hashlib.sha256(repr((code, options, tuple(names), found, os.getcwd())).encode()).hexdigest()[:32]
    kept = cpu.compiler.cache_dir() / f"nvrtc-{key}.txt"
    if kept.exists() and not own:  # of files that the source includes, the text is not in the key
        return kept.read_text()
    log = _compile(code, options, names)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix="asking-", delete=False) as file:
        file.write(log)
    os.replace(file.name, kept)
    return log


def _compile(code: str, options: tuple[str, ...], names: Sequence[str]) -> str:
    from cupy._core import core
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        wanted = (*core.assemble_cupy_compiler_options(options), "-ftz=true", f"-arch={ARCH}")
        try:
            nvrtc.compileProgram(program, wanted)
        except nvrtc.NVRTCError as error:
            return _errors(nvrtc.getProgramLog(program), code) or str(error)
        return ""
    finally:
        nvrtc.destroyProgram(program)


def _errors(log: str, code: str, most: int = 8) -> str:
    """The errors of NVRTC's log as the engine shows its own: "kernel.cu:3: error: ...", and the line."""
    table = source.line_table(code, "kernel.cu")
    shown: list[str] = []
    for match in re.finditer(r"^(.+?)\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$", log, re.M):
        file, line = match.group(1), int(match.group(2))
        told = f"{file}:{line}: error: {match.group(3).strip()}"
        if (file, line) in table:
            told += f"\n{line:>6} | {table[file, line].rstrip()}"
        shown.append(told)
    return "\n".join([*shown[:most], *(["(and more)"] if len(shown) > most else [])]) or log.strip()


def header_folder(header: str) -> Path | None:
    """The folder of the CUDA toolkit, a wheel's or an installed one's, with this header; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    folders = [wheel / part / "include" for wheel in wheels for part in ("cuda_nvcc", "cu13")]
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    folders += [Path(root) / "include" for root in roots if root]
    return next((folder for folder in folders if (folder / header).is_file()), None)

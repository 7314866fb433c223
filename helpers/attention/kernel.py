"""From a `.cu` file to a kernel that checks its arguments.

    tiled = load("02_tiled.cu", "tiled", defines={"HEAD_DIM": 64})
    tiled((grid,), (block,), (q, k, v, o, n, n_kv, scale))

CuPy passes whatever it is given: a Python float as 8 bytes where the kernel reads 4, a view without its strides, three
arguments for five. A typed launch compares them with the kernel's signature first, on a GPU and on the CPU alike.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from helpers.device import ON_GPU, cp
from helpers.engine.cuda_source import signatures
from helpers.engine.cuda_source import source as cuda_text
from helpers.engine.nvrtc import cute_options, header_folder

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

OPTIONS = ("-std=c++17",)
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_Stamp = tuple[int, int, int] | None  # when a file was changed, its size and its inode; None if there is no file
_TEXTS: dict[Path, tuple[dict[Path, _Stamp], str]] = {}  # a text, and the stamps of all files that it depends on
_RACY_NS = 50_000_000  # a file this young may change again without a new stamp

# What calls in this process have cost beyond their launches: "compiled" (modules), "loaded" (modules requested by
# text), "planned" and "checked" (calls of new shapes), "chosen" (families of calls, for which a stage is chosen).
COUNTS: Counter[str] = Counter()

_run_instead: Callable[..., Any] | None = None  # see `launches_replaced`


@contextlib.contextmanager
def launches_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Call `run(kernel, grid, block, args, shared_mem=...)` instead of launching on the CPU engine, in this context.

    This shows an X-ray, or a test, what a stage launches. On a GPU it does not affect planned calls.
    """
    global _run_instead
    before, _run_instead = _run_instead, run
    try:
        yield
    finally:
        _run_instead = before


def launches_are_replaced() -> bool:
    """Return True within `launches_replaced`, where arguments are not compared with the kernels' signatures."""
    return _run_instead is not None


def source(file: str) -> str:
    """Return the complete text of `kernels/<file>`: the course's own includes are pasted in.

    Pasting matters: CuPy's cache only looks at the text itself, not at included files, so an edited header would go
    unnoticed. The `#line` directives make compilers name the original files and lines. A header with `#pragma once` is
    pasted at its first inclusion, without that line, about which compilers warn in a main file. Text appended after the
    headers is numbered as lines of kernel.cu.

    Every launch of a stage requests its text, which is read and pasted again only when one of its files has changed.

    Raises:
        FileNotFoundError: there is no such file; the message lists the existing ones.
    """
    path = KERNELS / file
    stamps, text = _TEXTS.get(path, ({}, ""))
    if stamps and all(_stamp(each) == stamp for each, stamp in stamps.items()):
        return text
    if not path.is_file():
        names = ", ".join(sorted(p.name for p in KERNELS.glob("*.cu")))
        raise FileNotFoundError(f"no kernel file {file!r} in {KERNELS.name}/; there are: {names}")
    stamps = {path: _stamp(path)}
    text = "\n".join(_pasted(path.read_text(encoding="utf-8"), file, 1, stamps, set())) + "\n"
    if path.suffix == ".cuh":
        text += '#line 1 "kernel.cu"\n'
    youngest = max(stamp[0] for stamp in stamps.values() if stamp)
    if time.time_ns() - youngest > _RACY_NS:
        _TEXTS[path] = stamps, text
    return text


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def with_headers(code: str, name: str, *, first_line: int = 1) -> str:
    """Paste the course's own headers into a text, like `source`. Compilers call it `name`, and number its lines from
    `first_line`."""
    return "\n".join(_pasted(code, name, first_line, {}, set())) + "\n"


def _pasted(code: str, name: str, first_line: int, stamps: dict[Path, _Stamp], once: set[str]) -> list[str]:
    """List the lines of a text with its headers; `stamps` gets every file looked for, `once` those pasted once."""
    lines = [f'#line {first_line} "{name}"']
    for number, line in enumerate(code.splitlines(), start=first_line):
        include = _INCLUDE.match(line)
        header = include.group(1) if include else ""
        path = KERNELS / header
        if header:
            stamps[path] = _stamp(path)
        if header in once or _PRAGMA_ONCE.match(line):
            once.add(header or name)
            lines.append("")
        elif header and path.is_file():
            lines += [
                *_pasted(path.read_text(encoding="utf-8"), header, 1, stamps, once),
                f'#line {number + 1} "{name}"',
            ]
        else:
            lines.append(line)
    return lines


def options(defines: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the options for `RawModule`: {"HEAD_DIM": 64} becomes ("-std=c++17", "-DHEAD_DIM=64")."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in (defines or {}).items()))


@functools.cache
def wmma_headers() -> tuple[str, ...]:
    """Return the option that lets NVRTC compile `#include <mma.h>`: nothing on the CPU, whose engine has its own.

    mma.h includes crt/mma.h, which comes with the compiler nvcc, in a folder that CuPy does not pass to NVRTC.
    """
    if not ON_GPU:
        return ()
    folder = header_folder("crt/mma.h")
    return () if folder is None else (f"-I{folder}",)


def headers(code: str) -> tuple[str, ...]:
    """Return the options for headers that a source includes and CuPy does not find: `wmma_headers`, and CuTe's.

    Raises:
        CuteMissing: the source includes CuTe's headers, and the package nvidia-cutlass is not installed.
    """
    return (*(wmma_headers() if "<mma.h>" in code else ()), *(cute_options(code) if "cute/" in code else ()))


def precision(code: str) -> tuple[str, ...]:
    """Return the option for a source with a caller's function of scores: divisions within 2 ulp, as in Triton."""
    return ("-prec-div=false",) if ON_GPU and "#define SCORE_MOD 1" in code else ()


def architecture(code: str) -> tuple[str, ...]:
    """Return the option for a source with instructions that only sm_90a has, on a GPU that has them.

    CuPy passes -arch=sm_90 as well; NVRTC keeps the "a", whichever comes first.
    """
    if not ON_GPU or "wgmma." not in code:
        return ()
    return ("-arch=sm_90a",) if int(cp.cuda.Device().compute_capability) == 90 else ()


def _without_fields(arg: Any) -> Any:
    """Return a struct as plain bytes: else NumPy describes its fields in every launch, 14 us for AttentionParams."""
    return arg.view(f"V{arg.itemsize}") if isinstance(arg, np.ndarray) and arg.dtype.names else arg


class Kernel:
    """A kernel of a module that is launched only with arguments that match it.

    Called like CuPy's kernels: `kernel(grid, block, args, shared_mem=0)`.
    """

    def __init__(self, module: Any, name: str, code: str | None = None, *, build: bool = True) -> None:
        """
        Args:
            module: a `cp.RawModule`.
            name: the kernel, or the name expression of an instance.
            code: the module's source, if the module itself does not keep it.
            build: False: on the CPU engine it is built when it is first launched, see `built_when_launched`.

        Raises:
            ValueError: the source has no kernel of that name.
        """
        text = code if code is not None else module.code
        parameters = signatures.from_source(text, name)
        if parameters is None:
            names = ", ".join(cuda_text.kernels(text)) or "none"
            raise ValueError(f"the source has no kernel {name!r}; its kernels: {names}")
        self.name, self.module = name, module
        self.code, self.options = text, tuple(module.options)  # what a checked run of the same kernel compiles
        self.parameters = parameters
        later = not build and hasattr(module, "kernel_to_build")
        self.function = module.kernel_to_build(name) if later else module.get_function(name)

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Check the arguments, then launch.

        Args:
            grid, block: one to three sizes each.
            args: device arrays for pointers, NumPy scalars (`cp.float32(...)`) or Python ints for scalars.
            shared_mem: dynamic shared memory in bytes; more than 48 KB is opted into here.

        Raises:
            TypeError: an argument is missing, superfluous, or of the wrong type; or grid or block is not a tuple of
                whole numbers.
            ValueError: an array with gaps, or more shared memory than the device has.
        """
        self.bind(grid, block, args, shared_mem=shared_mem)()

    def bind(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> Callable[[], None]:
        """Check everything now, and return a function that only launches."""
        if _run_instead is not None:
            return functools.partial(_run_instead, self, grid, block, args, shared_mem=shared_mem)
        sizes = signatures.sizes_of("grid", grid), signatures.sizes_of("block", block)
        signatures.check_all(self.name, self.parameters, args, cp.ndarray, contiguous=True)
        if shared_mem:
            self._opt_in(shared_mem)
        launch = *sizes, tuple(map(_without_fields, args)) if ON_GPU else tuple(args)
        return lambda: self.function(*launch, shared_mem=shared_mem)

    def launch_known(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int) -> None:
        """Launch with arguments like some that `bind` has compared: only the CPU engine checks them."""
        if _run_instead is not None:
            _run_instead(self, grid, block, args, shared_mem=shared_mem)
        else:
            self.function(grid, block, args, shared_mem=shared_mem)

    def build(self) -> None:
        """Build it now, if that was postponed to the first launch."""
        if hasattr(self.module, "kernel_to_build"):
            self.function.attributes  # noqa: B018 - this compiles

    def _opt_in(self, shared_mem: int) -> None:
        """Request more than 48 KB of shared memory for launches that need it; static memory counts as well."""
        if shared_mem <= self.function.max_dynamic_shared_size_bytes:
            return
        static = self.function.attributes["shared_size_bytes"]
        most = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["sharedMemPerBlockOptin"]
        if static + shared_mem > most:
            raise ValueError(
                f"{self.name} needs {shared_mem:,} bytes of dynamic shared memory and {static:,} static ones; "
                f"this device gives a block {most:,}. Choose smaller tiles: -DBLOCK_M=..., -DBLOCK_N=..."
            )
        self.function.max_dynamic_shared_size_bytes = shared_mem

    @property
    def attributes(self) -> dict[str, int]:
        """The compiler's report: shared_size_bytes and, on a GPU, num_regs and local_size_bytes."""
        return self.function.attributes


_later = contextvars.ContextVar("_later", default=False)


@contextlib.contextmanager
def built_when_launched() -> Iterator[None]:
    """Postpone the build of kernels loaded in this context to their first launch on the CPU engine.

    An X-ray makes its own build, so an earlier one would be wasted. Errors in the source are then reported by the
    X-ray or by the first launch.
    """
    before = _later.set(True)
    try:
        yield
    finally:
        _later.reset(before)


@functools.lru_cache(maxsize=256)
def _compiled(code: str, compiler_options: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Kernel]:
    instances = tuple(name for name in names if "<" in name)
    COUNTS["compiled"] += 1
    module = cp.RawModule(code=code, options=compiler_options, name_expressions=instances or None)
    return {name: Kernel(module, name, code, build=not _later.get()) for name in names}


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Use only kernels that are compiled in this context, and none of these afterwards."""
    global _compiled
    before, _compiled = _compiled, functools.lru_cache(maxsize=256)(_compiled.__wrapped__)
    try:
        yield
    finally:
        _compiled = before


def load(file_or_code: str, name: str, *, defines: Mapping[str, Any] | None = None) -> Kernel:
    """Compile a kernel, or take it from this process's cache.

    Args:
        file_or_code: a file of `kernels/`, or source text (anything with a line break).
        name: the kernel's name, or a name expression such as "wmma<half>".
        defines: sizes by name, such as {"HEAD_DIM": 64}.
    """
    return load_all(file_or_code, (name,), defines=defines)[name]


def load_all(
    file_or_code: str, names: Sequence[str], *, defines: Mapping[str, Any] | None = None
) -> Mapping[str, Kernel]:
    """Load several kernels of one source by name, compiled together: the compiler reads the source once."""
    COUNTS["loaded"] += 1
    code = file_or_code if "\n" in file_or_code else source(file_or_code)
    with _print_if_slow(f"compiling {', '.join(names)}: once, and kept on disk for later processes"):
        kernels = _compiled(
            code, (*options(defines), *headers(code), *architecture(code), *precision(code)), tuple(names)
        )
        if not _later.get():
            for compiled in kernels.values():
                compiled.build()
    return kernels


@contextlib.contextmanager
def _print_if_slow(message: str, seconds: float = 1.0) -> Iterator[None]:
    """Print the message if this takes longer than that. In a terminal only: notebooks keep their outputs."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(seconds, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def side_by_side(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run jobs and return their results. On a GPU they run in threads: NVRTC compiles without Python's lock."""
    if not ON_GPU or len(jobs) < 2:
        return [job() for job in jobs]
    number = cp.cuda.runtime.getDevice()

    def on_this_device(job: Callable[[], Any]) -> Any:  # a thread begins with the first one
        with cp.cuda.Device(number):
            return job()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(contextvars.copy_context().run, on_this_device, job) for job in jobs]
        return [future.result() for future in futures]


def typed(module: Any, name: str, code: str | None = None) -> Kernel:
    """Return a kernel of `module`, a `cp.RawModule` that you compiled yourself, with its launches checked."""
    return Kernel(module, name, code)

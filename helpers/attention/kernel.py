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
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def source(file: str, pasted: set[str] | None = None) -> str:
    """The text of `kernels/<file>`, complete: the course's own includes are pasted in, each where it is first included.

    Pasting matters: CuPy's cache looks at the text it is given, not at the files that text includes, so an edited
    header would go unnoticed. The `#line` directives make compilers name the original files and lines.

    Args:
        file: in kernels/. pasted: headers that the text already has; those pasted here are added.

    Raises:
        FileNotFoundError: there is no such file; the message lists those there are.
    """
    path = KERNELS / file
    if not path.is_file():
        names = ", ".join(sorted(p.name for p in KERNELS.glob("*.cu")))
        raise FileNotFoundError(f"no kernel file {file!r} in {KERNELS.name}/; there are: {names}")
    pasted = set() if pasted is None else pasted
    lines = [f'#line 1 "{file}"']
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        include = _INCLUDE.match(text) if "#" in text else None  # at every call of a stage: most lines have none
        if include and include[1] in pasted:
            lines.append("")
        elif include and (KERNELS / include[1]).is_file():
            pasted.add(include[1])
            lines += [source(include[1], pasted).rstrip("\n"), f'#line {number + 1} "{file}"']
        else:
            lines.append(text)
    return "\n".join(lines) + "\n"


def options(defines: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Compiler options for `RawModule`: {"HEAD_DIM": 64} becomes ("-std=c++17", "-DHEAD_DIM=64")."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in (defines or {}).items()))


@functools.cache
def wmma_headers() -> tuple[str, ...]:
    """The option that lets NVRTC compile `#include <mma.h>`: nothing on the CPU, whose engine has its own.

    mma.h includes crt/mma.h, which comes with the compiler nvcc, in a folder that CuPy does not pass to NVRTC.
    """
    if not ON_GPU:
        return ()
    folder = header_folder("crt/mma.h")
    return () if folder is None else (f"-I{folder}",)


def headers(code: str) -> tuple[str, ...]:
    """The options for the headers that a source includes and CuPy does not find: `wmma_headers`, and CuTe's.

    Raises:
        CuteMissing: the source includes CuTe's headers, and the package nvidia-cutlass is not installed.
    """
    return (*(wmma_headers() if "<mma.h>" in code else ()), *cute_options(code))


def architecture(code: str) -> tuple[str, ...]:
    """The option for a source with instructions of sm_90a alone, on a GPU that has them.

    CuPy passes -arch=sm_90 as well; NVRTC keeps the "a", whichever comes first.
    """
    if not ON_GPU or "wgmma." not in code:
        return ()
    return ("-arch=sm_90a",) if int(cp.cuda.Device().compute_capability) == 90 else ()


def _without_fields(arg: Any) -> Any:
    """A struct as plain bytes: else NumPy describes its fields at every launch, 14 us for those of AttentionParams."""
    return arg.view(f"V{arg.itemsize}") if isinstance(arg, np.ndarray) and arg.dtype.names else arg


class Kernel:
    """A kernel of a module, launched only with arguments it can take.

    Called as CuPy's kernels are: `kernel(grid, block, args, shared_mem=0)`.
    """

    def __init__(self, module: Any, name: str, code: str | None = None, *, build: bool = True) -> None:
        """
        Args:
            module: a `cp.RawModule`.
            name: the kernel, or the name expression of an instance.
            code: the module's source, where the module itself does not keep it.
            build: False: on the CPU engine it is built when it is first launched, see `built_when_launched`.

        Raises:
            ValueError: the source has no kernel of that name.
        """
        text = code if code is not None else module.code
        found = signatures.from_source(text, name)
        if found is None:
            there = ", ".join(cuda_text.kernels(text)) or "none"
            raise ValueError(f"the source has no kernel {name!r}; its kernels: {there}")
        self.name, self.module = name, module
        self.code, self.options = text, tuple(module.options)  # what a checked run of the same kernel compiles
        self.parameters = found
        later = not build and hasattr(module, "kernel_to_build")
        self.function = module.kernel_to_build(name) if later else module.get_function(name)

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Check the arguments, then launch.

        Args:
            grid, block: one to three sizes each.
            args: device arrays for pointers, NumPy scalars (`cp.float32(...)`) or Python ints for scalars.
            shared_mem: dynamic shared memory in bytes; more than 48 KB is opted into here.

        Raises:
            TypeError: an argument is missing, too many, or of another type than the kernel's; or grid or block is no
                tuple of whole numbers.
            ValueError: an array with gaps, or more shared memory than the device has.
        """
        self.bind(grid, block, args, shared_mem=shared_mem)()

    def bind(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> Callable[[], None]:
        """The same with the launch left out: everything is checked now, and calling the result only launches."""
        sizes = signatures.sizes_of("grid", grid), signatures.sizes_of("block", block)
        signatures.check_all(self.name, self.parameters, args, cp.ndarray, contiguous=True)
        if shared_mem:
            self._opt_in(shared_mem)
        launch = *sizes, tuple(map(_without_fields, args)) if ON_GPU else tuple(args)
        return lambda: self.function(*launch, shared_mem=shared_mem)

    def build(self) -> None:
        """Build it now, if that was left for the first launch."""
        if hasattr(self.module, "kernel_to_build"):
            self.function.attributes  # noqa: B018 - this compiles

    def _opt_in(self, shared_mem: int) -> None:
        """A launch may ask for more than 48 KB of shared memory only after saying so; static memory counts as well."""
        if shared_mem <= self.function.max_dynamic_shared_size_bytes:
            return
        static = self.function.attributes["shared_size_bytes"]
        most = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["sharedMemPerBlockOptin"]
        if static + shared_mem > most:
            raise ValueError(
                f"{self.name} asks for {shared_mem:,} bytes of dynamic shared memory beside {static:,} static ones; "
                f"this device gives a block {most:,}. Choose smaller tiles: -DBLOCK_M=..., -DBLOCK_N=..."
            )
        self.function.max_dynamic_shared_size_bytes = shared_mem

    @property
    def attributes(self) -> dict[str, int]:
        """What the compiler reports: shared_size_bytes and, on a GPU, num_regs and local_size_bytes."""
        return self.function.attributes


_later = contextvars.ContextVar("_later", default=False)


@contextlib.contextmanager
def built_when_launched() -> Iterator[None]:
    """Within it, kernels that are loaded for the CPU engine are not built yet: an X-ray has a build of its own.

    What is wrong with their source is then told by the X-ray, or by the first launch.
    """
    before = _later.set(True)
    try:
        yield
    finally:
        _later.reset(before)


@functools.lru_cache(maxsize=256)
def _compiled(code: str, compiler_options: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Kernel]:
    instances = tuple(name for name in names if "<" in name)
    module = cp.RawModule(code=code, options=compiler_options, name_expressions=instances or None)
    return {name: Kernel(module, name, code, build=not _later.get()) for name in names}


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
    """Several kernels of one source by name, compiled together: the compiler reads the source once."""
    code = file_or_code if "\n" in file_or_code else source(file_or_code)
    found = _compiled(code, (*options(defines), *headers(code), *architecture(code)), tuple(names))
    if not _later.get():
        for compiled in found.values():
            compiled.build()
    return found


def typed(module: Any, name: str, code: str | None = None) -> Kernel:
    """A checked launch of a kernel of `module`, a `cp.RawModule` that you compiled yourself."""
    return Kernel(module, name, code)

"""RawModule and RawKernel with CuPy's face: CUDA C++ text in, launches on the CPU engine out."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import arguments, array, compiler, runtime, source, symbols
from .arguments import Parameter
from .compiler import CompileError

# What the engine lets a launch ask for: the limits of a GPU of compute capability 9.0.
MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
SHARED_PER_BLOCK = 48 * 1024
SHARED_PER_BLOCK_OPTIN = 227 * 1024

_NAME = "kernel.cu"  # what a source without a #line of its own is called in messages


class LaunchError(RuntimeError):
    """A launch that a GPU would refuse, or that failed while it ran."""


class _CParameter(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char),
        ("text", ctypes.c_char_p),
        ("is_const", ctypes.c_bool),
        ("size", ctypes.c_uint),
    ]


class _CEntry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("parameters", ctypes.POINTER(_CParameter)),
    ]


_GPU_ONLY = re.compile(
    r"-(-?use_fast_math|lineinfo|-?generate-line-info|G|-device-debug|arch.*|-gpu-architecture.*|-?ptxas-options.*|"
    r"Xptxas.*|-?maxrregcount.*|-?ftz.*|-?prec-div.*|-?prec-sqrt.*|-?fmad.*|-?extra-device-vectorization|w|-?dopt.*|"
    r"-?restrict|-?device-as-default-execution-space|-?default-device|-?split-compile.*|-?jit.*)$"
)


def _host_options(options: Iterable[str]) -> list[str]:
    """NVRTC's options as a host compiler's. Those that only steer a GPU's code are dropped.

    Raises:
        CompileError: an option that NVRTC does not know either, or that the engine cannot follow.
    """
    if isinstance(options, str):
        raise TypeError(f"options is a tuple of strings, not one string: options=({options!r},)")
    found, waiting = [], ""
    for option in options:
        if waiting:
            found.append(waiting + option)
            waiting = ""
        elif option in ("-D", "-I", "-U", "--define-macro", "--include-path", "--undefine-macro"):
            waiting = {"--define-macro": "-D", "--include-path": "-I", "--undefine-macro": "-U"}.get(option, option)
        elif match := re.fullmatch(r"(?:--define-macro|--include-path|--undefine-macro)=(.+)", option):
            found.append("-" + {"d": "D", "i": "I", "u": "U"}[option[2]] + match.group(1))
        elif re.match(r"-[DIU].", option):
            found.append(option)
        elif match := re.fullmatch(r"--?std=(c\+\+\d\w)", option):
            found.append(f"-std={max(match.group(1), 'c++17')}")  # the engine's own headers need 17
        elif not _GPU_ONLY.match(option):
            raise CompileError(f"unrecognized option {option!r}; the CPU engine takes -D, -I, -U and -std=c++NN")
    if waiting:
        raise CompileError(f"the option {waiting} stands last and has no value")
    return found


def _explain(diagnostics: str, code: str) -> str:
    """The compiler's errors, each with its line of the source."""
    table = source.line_table(code, _NAME)
    shown: list[str] = []
    elsewhere: list[str] = []  # in headers: told only where the source itself is not blamed
    for text in diagnostics.splitlines():
        match = re.match(r"(.+?):(\d+):(?:(\d+):)? (?:fatal )?(error|note): (.*)", text)
        if not match or (match.group(4) == "note" and not shown):
            continue
        file, line, column, kind, message = match.groups()
        if (file, int(line)) not in table:
            if kind == "error":
                elsewhere.append(f"{file.rpartition('/')[2]}:{line}: error: {message}")
            continue
        shown.append(f"{file}:{line}: {kind}: {message}")
        if kind == "error":
            stripped = table[file, int(line)].expandtabs(4)
            shown.append(f"{line:>6} | {stripped}")
            if column:
                shown.append(" " * (8 + int(column)) + "^")
        if len(shown) > 24:
            shown.append("(and more)")
            break
    return "\n".join(shown or elsewhere) or diagnostics.strip()


class RawModule:
    """CUDA C++ source whose kernels run on the CPU; the parameters are `cupy.RawModule`'s.

    Args:
        code: the source text.
        options: -D, -I, -U and -std=; options that only steer a GPU's code are accepted and have no effect.
        name_expressions: the template instances to make, such as "softmax<float, 64>".

    Raises:
        TypeError, ValueError: wrong arguments. Compiling is lazy: see `compile`.
    """

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("RawModule takes exactly one of code and path")
        if path is not None:
            raise TypeError("path names a compiled cubin or PTX file, which only a GPU runs; give the source as code=")
        if not isinstance(code, str):
            raise TypeError(f"code is the source text, a str; got {type(code).__name__}")
        if enable_cooperative_groups:
            raise ValueError("grid-wide synchronisation is not offered by the CPU engine")
        self.code = code
        self.options = tuple(options) if not isinstance(options, str) else options
        self.name_expressions = tuple(name_expressions or ())
        self._entries: dict[str, tuple[ctypes.CDLL, Path, _CEntry]] = {}
        self._compiled = False

    def compile(self, log_stream: Any = None) -> None:
        """Compile now rather than at the first `get_function`.

        Raises:
            CompileError: the compiler refused, with the lines of the source it speaks of.
            NoCompilerError: there is no C++ compiler.
        """
        if not self._compiled:
            found = source.kernels(self.code)
            plain = [name for name in found if not source.is_template(self.code, name)]
            self._build([*plain, *(name for name in self.name_expressions if name not in plain)], log_stream)
            self._compiled = True

    def _build(self, names: list[str], log_stream: Any = None) -> None:
        try:
            prelude, body = source.translate(self.code)
        except ValueError as error:
            raise CompileError(str(error)) from None
        options = _host_options(self.options)
        entries = ",\n".join(f'engine::entry<{name}>("{name}")' for name in names)
        text = (
            f'#include "cuda_runtime.h"\n{prelude}\n#line 1 "{_NAME}"\n{body}\n#line 1 "entries"\n'
            f'extern "C" const engine::Entry *engine_entries(int *count) {{\n'
            f"  static const engine::Entry entries[] = {{{entries}{', ' if entries else ''}engine::Entry{{}}}};\n"
            f"  *count = {len(names)};\n  return entries;\n}}\n"
            f"static thread_local char engine_shared_anchor_byte;\n"
            f'extern "C" void *engine_shared_anchor() {{ return &engine_shared_anchor_byte; }}\n'
        )
        path, diagnostics = compiler.build(text, ["-I", str(compiler.INCLUDE), "-w", *options])
        if path is None:
            raise CompileError(_explain(diagnostics, self.code))
        if log_stream is not None:
            log_stream.write(diagnostics)
        lib = runtime.library_of(path)
        lib.engine_entries.restype = ctypes.POINTER(_CEntry)
        count = ctypes.c_int()
        table = lib.engine_entries(ctypes.byref(count))
        for index in range(count.value):
            self._entries[table[index].name.decode()] = (lib, path, table[index])

    def get_function(self, name: str) -> RawKernel:
        """The kernel of that name, or of that name expression.

        Raises:
            CompileError: the source does not compile.
            LaunchError: the source has no such kernel; the message names those it has.
        """
        self.compile()
        if name not in self._entries:
            found = source.kernels(self.code)
            hint = f"; it has {', '.join(found)}" if found else "; it has no __global__ function"
            if name in found:
                hint = f"; {name} is a template: name an instance in name_expressions, such as '{name}<float>'"
            raise LaunchError(f"the source has no kernel {name!r}{hint}")
        return RawKernel._of(self, name)

    def get_global(self, name: str) -> array.ndarray:
        """The bytes of a `__device__` or `__constant__` variable, as a device array of uint8 that aliases it.

        (CuPy returns a bare pointer; an array can be written with `[...] =` on either after `.view`.)

        Raises:
            LaunchError: the source has no such variable.
        """
        self.compile()
        for lib, path, _ in self._entries.values():
            size = symbols.size_of(path, name)
            if size:
                pointer = (ctypes.c_byte * size).in_dll(lib, name)
                return np.frombuffer(pointer, dtype=np.uint8).view(array.ndarray)
        raise LaunchError(f"the source has no variable {name!r} of external linkage")


class RawKernel:
    """One kernel; the parameters are `cupy.RawKernel`'s. Called as `kernel(grid, block, args, shared_mem=0)`."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        jitify: bool = False,
    ) -> None:
        names = (name,) if "<" in name else ()
        self._module = RawModule(
            code=code,
            options=options,
            name_expressions=names,
            enable_cooperative_groups=enable_cooperative_groups,
        )
        self.name = name
        self._max_dynamic: int | None = None
        self._made = False

    @classmethod
    def _of(cls, module: RawModule, name: str) -> RawKernel:
        kernel = cls.__new__(cls)
        kernel._module, kernel.name, kernel._max_dynamic, kernel._made = module, name, None, False
        kernel._make()
        return kernel

    @property
    def code(self) -> str:
        """The source text."""
        return self._module.code

    @property
    def options(self) -> tuple[str, ...]:
        """The options it is compiled with."""
        return self._module.options

    def compile(self, log_stream: Any = None) -> None:
        """Compile now rather than at the first launch."""
        self._module.compile(log_stream)

    def _make(self) -> None:
        if self._made:
            return
        self._module.compile()
        if self.name not in self._module._entries:
            self._module.get_function(self.name)  # raises, and says which kernels there are
        self._lib, self._path, entry = self._module._entries[self.name]
        names = [p.name for p in source.kernels(self.code).get(re.sub(r"<.*", "", self.name).split("::")[-1], [])]
        self.parameters = []
        for index in range(entry.count):
            raw = entry.parameters[index]
            name = names[index] if len(names) == entry.count else ""
            self.parameters.append(Parameter(name, raw.kind.decode(), raw.text.decode(), raw.is_const, raw.size))
        self._run = entry.run
        self._anchor = ctypes.cast(self._lib.engine_shared_anchor, ctypes.c_void_p).value
        mangled = {
            name: symbols.name_at(self._path, self._lib, other.function) or name
            for name, (_, _, other) in self._module._entries.items()
        }
        self._static_shared = symbols.static_shared(self._path, mangled)[self.name]
        if self._static_shared > SHARED_PER_BLOCK:
            raise CompileError(
                f"{self.name} declares {self._static_shared:,} bytes of static __shared__ memory; a GPU's limit is "
                f"{SHARED_PER_BLOCK:,} (0xc000). Use smaller tiles, or dynamic memory: extern __shared__ float s[];"
            )
        self._made = True

    @property
    def attributes(self) -> dict[str, int]:
        """What the engine knows of the compiled kernel. Registers are a GPU's: the CPU has none to count."""
        self._make()
        return {
            "shared_size_bytes": self._static_shared,
            "max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes,
            "max_threads_per_block": MAX_THREADS_PER_BLOCK,
        }

    @property
    def shared_size_bytes(self) -> int:
        """Static shared memory in bytes."""
        return self.attributes["shared_size_bytes"]

    @property
    def max_threads_per_block(self) -> int:
        """The largest block the kernel can be launched with."""
        return MAX_THREADS_PER_BLOCK

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """How much dynamic shared memory a launch may ask for, in bytes; set it to go beyond 48 KB."""
        self._make()
        return SHARED_PER_BLOCK - self._static_shared if self._max_dynamic is None else self._max_dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._make()
        limit = SHARED_PER_BLOCK_OPTIN - self._static_shared
        if not 0 <= size <= limit:
            raise LaunchError(
                f"max_dynamic_shared_size_bytes = {size:,} is refused: at most {limit:,} bytes are left of "
                f"{SHARED_PER_BLOCK_OPTIN:,} beside {self._static_shared:,} static ones (invalid argument on a GPU)"
            )
        self._max_dynamic = int(size)

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Any = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        """Launch and wait.

        Args:
            grid, block: one to three sizes.
            args: device arrays for pointers (or None for a null pointer), NumPy scalars for scalars.
            shared_mem: bytes of dynamic shared memory.

        Raises:
            TypeError: an argument is missing, too many, or not of the kernel's type.
            LaunchError: a launch a GPU would refuse, or one that failed: a wild pointer, a barrier that part of a
                block never reaches, a deadlock, an assertion. It names block, thread and line.
            KeyboardInterrupt: interrupted; the launch has been stopped.
        """
        self._make()
        grid, block = _size("grid", grid), _size("block", block)
        self._check_limits(grid, block, shared_mem)
        keep = self._pack(args)
        pointers = (ctypes.c_void_p * max(len(keep), 1))(*(ctypes.addressof(value) for value in keep))
        request = runtime.Launch(
            self._run,
            ctypes.addressof(pointers),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            int(shared_mem),
            self._anchor,
        )
        ended = runtime.launch(request)
        runtime.echo(ended.printed)
        if ended.failure is not None:
            raise LaunchError(self._tell(ended.failure, grid, block, args))

    def _check_limits(self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int) -> None:
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK:
            raise LaunchError(
                f"a block of {block} has {threads:,} threads; a GPU takes {MAX_THREADS_PER_BLOCK:,} at most"
            )
        for what, sizes, limits in (("block", block, MAX_BLOCK), ("grid", grid, MAX_GRID)):
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if not 1 <= size <= limit:
                    raise LaunchError(f"{what}.{axis} = {size:,}: a GPU takes 1 to {limit:,}")
        if shared_mem < 0 or shared_mem > self.max_dynamic_shared_size_bytes:
            raise LaunchError(
                f"shared_mem = {shared_mem:,} bytes, but a launch of {self.name} may ask for "
                f"{self.max_dynamic_shared_size_bytes:,} (48 KB less {self._static_shared:,} static, if not raised). "
                f"Set kernel.max_dynamic_shared_size_bytes = {shared_mem} before the launch, up to "
                f"{SHARED_PER_BLOCK_OPTIN - self._static_shared:,} (a GPU says: invalid argument)"
            )

    def _pack(self, args: Sequence[Any]) -> list[Any]:
        """The arguments as C values, checked against the signature."""
        arguments.check_all(self.name, self.parameters, args, array.ndarray, contiguous=False)
        return [self._pack_one(*pair) for pair in zip(self.parameters, args, strict=True)]

    def _pack_one(self, parameter: Parameter, value: Any) -> Any:
        if parameter.kind == "p":
            return ctypes.c_void_p(0 if value is None else value.ctypes.data)
        if parameter.kind == "S":
            data = np.asarray(value)
            if data.nbytes != parameter.size:
                raise TypeError(
                    f"parameter {parameter.name!r} of {self.name} is a struct of {parameter.size} bytes; "
                    f"got {type(value).__name__} of {data.nbytes}"
                )
            return (ctypes.c_byte * parameter.size).from_buffer_copy(data.tobytes())
        dtype = np.dtype(array.bfloat16 if parameter.dtype == "bfloat16" else parameter.dtype)
        return (ctypes.c_byte * dtype.itemsize).from_buffer_copy(np.asarray(value, dtype).tobytes())

    def _tell(self, failure: runtime.Failure, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> str:
        """A failed launch in words."""
        block_index = _index(failure.block, grid)
        thread = _index(failure.thread, block)
        who = f"{self.name}, block {block_index}, thread {thread}"
        table = source.line_table(self.code, _NAME)

        def quote(file: str, line: int) -> str:
            text = table.get((file, line))
            return f"\n{line:>6} | {text.rstrip()}" if text is not None else ""

        if failure.kind == runtime.MESSAGE:
            file = failure.file.decode(errors="replace")
            message = failure.message.decode(errors="replace")
            return f"{file}:{failure.line}: {message} [{who}]{quote(file, failure.line)}"
        where, line_text = "at an unknown line", ""
        module = failure.module.decode(errors="replace")
        if module:
            found = symbols.line_of(Path(module), failure.module_pc) if module == str(self._path) else None
            where = f"at {found[0]}:{found[1]}" if found else f"in {Path(module).name}"
            line_text = quote(*found) if found else ""
        if failure.message == b"stack":
            what = "the thread's local arrays do not fit the engine's stack of 256 KB"
        elif failure.signal in _ARITHMETIC:
            what = "integer division by zero (a GPU does not stop for it: the result is garbage)"
        else:
            verb = {1: "write to", 0: "read of"}.get(failure.is_write, "access to")
            what = f"illegal {verb} {self._describe(failure.address, args)}"
        return f"{what} {where} [{who}; {runtime.signal_name(failure.signal)}]{line_text}"

    def _describe(self, address: int, args: Sequence[Any]) -> str:
        """An address in terms of the arguments, where it lies in or near one."""
        if address == 0:
            return "a null or misaligned address"
        best: tuple[int, str] | None = None
        for parameter, value in zip(self.parameters, args, strict=True):
            if not isinstance(value, array.ndarray) or value.nbytes == 0:
                continue
            begin = value.ctypes.data
            distance = max(begin - address, address - (begin + value.nbytes - 1), 0)
            if distance > 1 << 20 or (best is not None and distance >= best[0]):
                continue
            element = (address - begin) // value.dtype.itemsize
            text = f"{parameter.name or 'an array'}[{element}], which has {value.size:,} elements"
            best = (distance, text)
        return best[1] if best else f"address 0x{address:x}, which is far from every array"


_ARITHMETIC = {8}  # SIGFPE


def _size(what: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    if isinstance(sizes, (int, np.integer)):
        raise TypeError(f"{what} is a tuple of one to three sizes: ({sizes},)")
    values = tuple(sizes)
    if not 1 <= len(values) <= 3:
        raise TypeError(f"{what} is a tuple of one to three sizes; got {values!r}")
    for value in values:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise TypeError(f"{what} holds whole numbers; got {value!r} of type {type(value).__name__}")
    return tuple(int(v) for v in values) + (1,) * (3 - len(values))


def _index(linear: int, sizes: Sequence[int]) -> str:
    x, y, z = linear % sizes[0], linear // sizes[0] % sizes[1], linear // sizes[0] // sizes[1]
    return f"({x},{y},{z})"

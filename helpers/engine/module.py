"""RawModule and RawKernel with CuPy's interface: they take CUDA C++ text and launch it on the CPU engine."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from . import (
    arithmetic,
    array,
    compiler,
    cutlass,
    failures,
    libraries,
    messages,
    refusals,
    residency,
    runtime,
    structures,
    symbols,
    tensor_map,
)
from .compiler import CompileError
from .copies import extent_of
from .cuda_source import signatures, source
from .cuda_source.signatures import Parameter
from .messages import SOURCE_NAME
from .structures import Entry, EntryParameter, LaunchRequest
from .translate import translate

# What the engine lets a launch ask for: the limits of a GPU of compute capability 9.0.
MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
SHARED_PER_BLOCK = 48 * 1024
SHARED_PER_BLOCK_OPTIN = 227 * 1024
SHARED_PER_MULTIPROCESSOR = 228 * 1024

_REGISTERS = 64 * 1024  # of a multiprocessor
_STRUCT_ALIGNMENT = 128
# Tiles of TMA and wgmma begin at multiples of this, and so does a GPU's dynamic shared memory.
_TILE_ALIGNMENT, _HOPPER = 1024, re.compile(r"wgmma|cp\.async\.bulk|hopper\.cuh")

_ENTRIES, _FIRST_ENTRY = messages.ENTRIES, messages.FIRST_ENTRY


class LaunchError(RuntimeError):
    """A launch that a GPU would refuse, or that failed while it ran."""


_GPU_ONLY = re.compile(
    r"-(-?use_fast_math|lineinfo|-?generate-line-info|G|-device-debug|arch.*|-gpu-architecture.*|-?ptxas-options.*|"
    r"Xptxas.*|-?maxrregcount.*|-?ftz.*|-?prec-div.*|-?prec-sqrt.*|-?fmad.*|-?extra-device-vectorization|w|-?dopt.*|"
    r"dc|-?relocatable-device-code.*|-?rdc.*|-?restrict|-?device-as-default-execution-space|-?default-device|"
    r"-?split-compile.*|-?jit.*)$"
)


# What a GPU's compiler refuses too: arrays of a size that only the run knows, arithmetic on void*, exceptions, types at
# run time.
_STRICT = ("-Werror=vla", "-Werror=pointer-arith", "-fno-exceptions", "-fno-rtti")

_NO_STD_MIN = re.compile(r"(?:min|max). is not a member of .std|no member named .(?:min|max). in namespace .std")

_LONG = {"--define-macro": "-D", "--include-path": "-I", "--undefine-macro": "-U"}


def _host_options(options: Iterable[str]) -> tuple[list[str], str]:
    """NVRTC's options as (a host compiler's, preprocessor lines). Those that only steer a GPU's code are dropped.

    Macros become lines after the engine's own headers, which they must not change: -DN=64 is nobody else's N.

    Raises:
        CompileError: an option that NVRTC does not know either, or that the engine cannot follow.
    """
    if isinstance(options, str):
        raise TypeError(f"options is a tuple of strings, not one string: options=({options!r},)")
    found, macros, waiting = [], [], ""
    for option in options:
        if option in (*_LONG, *_LONG.values()) and not waiting:
            waiting = _LONG.get(option, option)
            continue
        for long, short in _LONG.items():
            option = short + option[len(long) + 1 :] if option.startswith(f"{long}=") else option
        option, waiting = waiting + option, ""
        kind, value = option[:2], option[2:]
        if kind == "-I" and value:
            found.append("-I" + os.path.abspath(value))  # the compiler runs in another folder
        elif kind in ("-D", "-U") and re.match(r"__|NDEBUG\b", value):
            found.append(option)  # the language's own, such as __CUDA_NO_HALF_OPERATORS__: for the headers too
        elif kind == "-D" and value:
            name, equals, text = value.partition("=")
            macros.append(f"#define {name} {text if equals else 1}\n")
        elif kind == "-U" and value:
            macros.append(f"#undef {value}\n")
        elif match := re.fullmatch(r"--?std=(c\+\+\d\w)", option):
            found.append(f"-std={max(match.group(1), 'c++17')}")  # the engine's own headers need 17
        elif not _GPU_ONLY.match(option):
            raise CompileError(f"unrecognized option {option!r}; the CPU engine takes -D, -I, -U and -std=c++NN")
    if waiting:
        raise CompileError(f"the option {waiting} comes last and has no value")
    return found, "".join(macros)


def _first_headers(code: str, folders: Sequence[Path]) -> str:
    """The headers of these folders that the source includes, read before its macros: `#define N 64` must not change
    them.
    """
    text = source.blank_comments(code)
    if re.search(r"#\s*define\s+_?_?CUDA_NO", text):  # macros that are meant for the headers
        return ""
    names = re.findall(r"^\s*#\s*include\s*<([^>]+)>", text, re.M)
    there = [name for name in dict.fromkeys(names) if any((folder / name).is_file() for folder in folders)]
    return "".join(f"#include <{name}>\n" for name in there)


# One line of the table of a module's kernels. A constant: were it a call, the table would be filled at its first use,
# behind a lock of the C++ library's, which is what a linker takes longest to read.
_ENTRY = (
    '{{"{name}", (void*)engine::Kernel<{name}>::function, engine::Kernel<{name}>::run, engine::Kernel<{name}>::count, '
    "engine::Kernel<{name}>::parameters}},\n"
)

# Modules of the same source and options are one in memory, as they are with CuPy: they share their variables.
_LOADED: dict[tuple[Path, tuple[str, ...]], runtime.KernelLibrary] = {}


def _warnings(diagnostics: str, code: str) -> str:
    """Of a compiler's warnings, those about lines of the source."""
    table = source.line_table(code, SOURCE_NAME)
    found = re.findall(r"^(.+?):(\d+):(?:\d+:)? (warning: .*)$", diagnostics, re.M)
    return "".join(f"{file}:{line}: {text}\n" for file, line, text in found if (file, int(line)) in table)


class RawModule:
    """CUDA C++ source whose kernels run on the CPU; the parameters are `cupy.RawModule`'s.

    Args:
        code: the source text.
        options: -D, -I, -U and -std=; options that only steer a GPU's code are accepted and have no effect.
        name_expressions: the template instances to make, such as "softmax<float, 64>".

    Raises:
        TypeError, ValueError: wrong arguments. Compiling is lazy: see `compile`.
    """

    # Asked before a module is compiled; what it raises ends that. helpers/engine/nvrtc.py puts NVRTC here.
    ask_first: ClassVar[Callable[[RawModule], None] | None] = None

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
        self.enable_cooperative_groups = bool(enable_cooperative_groups)
        self.code = code
        self._translates_cucomplex = translate_cucomplex
        if translate_cucomplex and libraries.folder() is None:
            raise ValueError("translate_cucomplex takes headers of CuPy's, which is not installed here")
        self._backend, self._jitify = backend, jitify
        self.options = tuple(options) if not isinstance(options, str) else options
        self.name_expressions = tuple(name_expressions or ())
        self._entries: dict[str, Entry] = {}
        self._library: runtime.KernelLibrary | None = None
        self._asked: set[str] = set()  # variables that the host may have written
        self._instrumented = ""  # "checked" or "profiled": see `instrumented`
        self._uses_libraries: bool | None = None  # CUB and its kin; None: not known yet
        self._with_algorithm = False  # std::min is to be found
        self._filling: tuple[str, ...] = ()  # flags: see `filled`

    def compile(self, log_stream: Any = None) -> None:
        """Compile now rather than at the first `get_function`.

        Raises:
            CompileError: the compiler refused; the message shows the lines of the source.
            NoCompilerError: there is no C++ compiler.
        """
        if self._library is None:
            if self.ask_first is not None:
                self.ask_first()
            found = source.kernels(self.code)
            plain = [name for name in found if not source.is_template(self.code, name)]
            self._build([name for name in plain if name not in self.name_expressions], log_stream)

    def _build(self, plain: list[str], log_stream: Any = None) -> None:
        code = libraries.translate_cucomplex(self.code) if self._translates_cucomplex else self.code
        flags, macros = _host_options(self.options)
        if self._uses_libraries is None:
            self._uses_libraries = bool(libraries.options()) and libraries.needed(self.code)
        flags = cutlass.compiled(flags) if cutlass.includes(code) else flags
        folders = [compiler.INCLUDE, *compiler.system_folders(flags)]
        options = libraries.options() if self._uses_libraries else []
        options = [*options, "-I", str(compiler.INCLUDE), *_STRICT, *flags, *self._filling]
        options += libraries.cupy_options() if "cupy/" in code or self._uses_libraries else []
        first, ptx = '#include "cuda_runtime.h"\n', "#include <ptx_instructions.h>\n"
        then = (
            f"{'#include <algorithm>' + chr(10) if self._with_algorithm else ''}{_first_headers(code, folders)}{macros}"
        )
        was_expanded = False

        def expanded(code: str) -> str | None:
            nonlocal was_expanded
            was_expanded = True
            return compiler.expanded(first + ptx + then, code, SOURCE_NAME, options)

        try:
            body = translate(code, expanded, SOURCE_NAME, keep_asm=self._uses_libraries, folders=folders)
        except ValueError as error:
            raise CompileError(str(error)) from None
        names = [*plain, *self.name_expressions]
        entries = "".join(_ENTRY.format(name=name) for name in names)
        needs_ptx = self._uses_libraries or len(folders) > 1 or "engine::ptx::" in body
        if not needs_ptx and not was_expanded:
            ptx = ""  # (expanded text lacks what this includes)
        bridge = "#include <cupy/complex.cuh>\n" if self._translates_cucomplex else ""

        def whole(body: str) -> str:
            return (
                f'{first}{ptx}{then}{bridge}#line 1 "{SOURCE_NAME}"\n{body}\n'
                f'#line 1 "{_ENTRIES}"\n'
                f'extern "C" const engine::Entry *engine_entries(int *engine_count, unsigned *engine_sizes) {{\n'
                f"static const engine::Entry engine_table[] = {{\n{entries}{{}}}};\n"
                f"*engine_count = {len(names)};\n"
                "engine_sizes[0] = sizeof(engine::Entry), engine_sizes[1] = sizeof(engine::Parameter);\n"
                "return engine_table;\n}\n"
            )

        def refuse() -> str:
            other_rules = self._uses_libraries or self._jitify or refusals.OTHER_RULES & set(self.options)
            if self._backend != "nvrtc" or other_rules:  # (macros of libraries are not known here)
                return ""
            return refusals.refusal(self.code, macros, SOURCE_NAME, flags)

        text = whole(arithmetic.edited(body))
        changes: dict[str, Any] = {"plain": whole(body), "refuse": refuse}
        if self._uses_libraries:
            changes |= {"expand": libraries.expanded, "expand_key": libraries.translation_hash()}
        path, diagnostics = compiler.build(text, options, checked=self._instrumented, **changes)
        if path is None:
            # Included by a header of the user's?
            if not self._uses_libraries and libraries.missing(diagnostics) and libraries.options():
                self._uses_libraries = True
                return self._build(plain, log_stream)
            # NVRTC, which has none, does not look into templates that nobody uses.
            if not self._with_algorithm and _NO_STD_MIN.search(diagnostics):
                self._with_algorithm = True
                return self._build(plain, log_stream)
            if not libraries.options() and (header := libraries.missing(diagnostics)):
                raise CompileError(f"{messages.explain(diagnostics, self.code, names)}\n{libraries.whose(header)}")
            # The text shows kernels that the preprocessor leaves out, or that a namespace holds: do without them.
            blamed = {int(line) for line in re.findall(rf"^{_ENTRIES}:(\d+):", diagnostics, re.M)}
            unknown = [name for line, name in enumerate(plain, _FIRST_ENTRY) if line in blamed]
            if unknown:
                return self._build([name for name in plain if name not in unknown], log_stream)
            raise CompileError(messages.explain(diagnostics, self.code, names))
        if log_stream is not None:
            log_stream.write(_warnings(compiler.warnings(text, options), self.code))
        shared = not (self._instrumented or self._filling)  # else its variables start afresh
        try:
            library = (_LOADED.get((path, self.options)) if shared else None) or runtime.KernelLibrary(path)
        except (OSError, AttributeError) as error:
            undefined = re.search(r"undefined symbol: (\w+)|symbol not found.*'_(\w+)'", str(error))
            if undefined:
                name = undefined.group(1) or undefined.group(2)
                raise CompileError(messages.undefined(name, self.code)) from None
            path.unlink(missing_ok=True)  # a broken file in the cache
            built = compiler.build(text, options, checked=self._instrumented, **changes)
            library = runtime.KernelLibrary(built[0])
        library.handle.engine_entries.restype = ctypes.POINTER(Entry)
        count, sizes = ctypes.c_int(), (ctypes.c_uint * 2)()
        table = library.handle.engine_entries(ctypes.byref(count), sizes)
        ours = {"Entry": ctypes.sizeof(Entry), "Parameter": ctypes.sizeof(EntryParameter)}
        structures.compare({name: (size, theirs) for (name, size), theirs in zip(ours.items(), sizes, strict=True)})
        self._entries = {table[index].name.decode(): table[index] for index in range(count.value)}
        self._library = library
        if shared:
            _LOADED[path, self.options] = library

    def __getstate__(self) -> dict[str, Any]:
        """To be pickled: the source and how it is compiled, not what was made of it."""
        return self.__dict__ | {"_entries": {}, "_library": None, "_asked": set()}

    def _twin(self) -> RawModule:
        """A module of the same source, to be built in another way."""
        return RawModule(
            code=self.code,
            options=self.options,
            backend=self._backend,
            translate_cucomplex=self._translates_cucomplex,
            enable_cooperative_groups=self.enable_cooperative_groups,
            name_expressions=self.name_expressions,
            jitify=self._jitify,
        )

    def instrumented(self, *, profile: bool) -> RawModule:
        """The same source, built so that every memory access calls the engine's checker: for checked.py.

        Its variables have the values that the host gave to this module's. profile: every basic block calls it as well.
        """
        twin = self._twin()
        twin._instrumented = "profiled" if profile else "checked"
        twin.copy_variables(self)
        return twin

    def filled(self, value: str) -> RawModule:
        """The same source, built so that local variables without a value begin with one: see `compiler.filling`.

        And so that each index is compared with the size of the array, where its type has one.
        """
        twin = self._twin()
        twin._filling = (*compiler.filling(value), *compiler.bounds())
        twin.copy_variables(self)
        return twin

    def copy_variables(self, other: RawModule) -> None:
        """The variables that a host has asked for, here or there, get the values that they have in `other`."""
        for name in sorted(other._asked | self._asked):
            self.get_global(name)[...] = other.get_global(name)

    def get_function(self, name: str) -> RawKernel:
        """The kernel of that name, or of that name expression.

        Raises:
            CompileError: the source does not compile.
            LaunchError: the source has no such kernel; the message names those it has.
        """
        self.compile()
        self._find(name)
        kernel = self.kernel_to_build(name)
        kernel._make()
        return kernel

    def kernel_to_build(self, name: str) -> RawKernel:
        """The kernel of that name, built when it is first launched. A checked run has a build of its own."""
        return RawKernel._of(self, name)

    def _find(self, name: str) -> tuple[runtime.KernelLibrary, Entry]:
        library, entry = self._library, self._entries.get(name)
        if entry is None:
            found = source.kernels(self.code)
            hint = f"; it has {', '.join(found)}" if found else "; it has no __global__ function"
            if name in found:
                hint = ": the preprocessor leaves it out, or a namespace holds it"
                if source.is_template(self.code, name):
                    hint = f"; {name} is a template: name an instance in name_expressions, such as '{name}<float>'"
            raise LaunchError(
                f"the source has no kernel {name!r}{hint} (a GPU says: CUDA_ERROR_NOT_FOUND: named symbol not found)"
            )
        symbol = library.symbol_at(entry.function)
        if name not in self.name_expressions and symbol not in (None, name):
            raise LaunchError(
                f'{name} is not declared extern "C", so a GPU knows it as {symbol!r} only: write extern "C" before '
                f"__global__, or ask for name_expressions=({name!r},)"
            )
        return library, entry

    def get_global(self, name: str) -> array.ndarray:
        """The bytes of a `__device__` or `__constant__` variable, as a device array of uint8 that aliases it.

        CuPy returns a bare pointer. Both can be made into an array that is written with `[...] =`:
        `cp.ndarray((16,), cp.float32, module.get_global("weights"))`.

        Raises:
            LaunchError: the source has no such variable, or it is static or const.
        """
        self.compile()
        memory = self._library.variable(name)
        if memory is None:
            raise LaunchError(f"the source has no variable {name!r} that is neither static nor const")
        self._asked.add(name)
        return np.frombuffer(memory, dtype=np.uint8).view(array.ndarray)


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
            backend=backend,
            jitify=jitify,
            name_expressions=names,
            translate_cucomplex=translate_cucomplex,
            enable_cooperative_groups=enable_cooperative_groups,
        )
        self.name = name
        self._max_dynamic: int | None = None
        self._at_least = 0  # what `allow_dynamic_shared` was told before the kernel was built
        self._made = False
        self._forget_filled()

    @classmethod
    def _of(cls, module: RawModule, name: str) -> RawKernel:
        kernel = cls.__new__(cls)
        kernel._module, kernel.name, kernel._max_dynamic, kernel._made = module, name, None, False
        kernel._at_least = 0
        kernel._forget_filled()
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        """To be pickled: the module and the name."""
        kept = {name: self.__dict__[name] for name in ("_module", "name", "_max_dynamic", "_at_least")}
        return kept | {"_made": False, "_filled": {}, "known_set": set()}

    def _forget_filled(self) -> None:
        self._filled: dict[str, RawKernel] = {}  # by what their local variables are filled with
        self.known_set: set[tuple[Any, ...]] = set()  # forms of launches that use no variable without a value

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
        self._library, entry = self._module._find(self.name)
        names = [p.name for p in source.kernels(self.code).get(re.sub(r"<.*", "", self.name).split("::")[-1], [])]
        self.parameters = []
        for index in range(entry.count):
            raw = entry.parameters[index]
            name = names[index] if len(names) == entry.count else ""
            kind, dtype = raw.kind.decode(), raw.text.decode()
            if kind == "s" and raw.size != signatures.dtype_of(dtype).itemsize:
                kind = "S"  # float4 by value: of the dtype float32, but no scalar
            self.parameters.append(Parameter(name, kind, dtype, raw.is_const, raw.size))
        self._run = entry.run
        everyone = {
            name: self._library.symbol_at(other.function) or name for name, other in self._module._entries.items()
        }
        arrays = symbols.shared_arrays(self._library.symbols, everyone)[self.name]
        self._shared_arrays = [array for array in arrays if not source.is_only_declared(self.code, array.name)]
        self._static_shared = sum(shared.size for shared in self._shared_arrays if not shared.is_guard)
        if self._static_shared > SHARED_PER_BLOCK:
            raise CompileError(
                f"{self.name} declares {self._static_shared:,} bytes of static __shared__ memory; a GPU's limit is "
                f"{SHARED_PER_BLOCK:,} (0xc000). Use smaller tiles, or dynamic memory: extern __shared__ float s[];"
            )
        plain = re.sub(r"<.*", "", self.name).split("::")[-1]
        defined = dict(re.findall(r"^#define (\w+) (.*)$", _host_options(self.options)[1], re.M))
        bounds = source.launch_bounds(self.code, plain, defined)
        self._most_threads = min(bounds or MAX_THREADS_PER_BLOCK, MAX_THREADS_PER_BLOCK)
        self._least_blocks = source.least_blocks(self.code, plain)
        self._tile_alignment = _TILE_ALIGNMENT if _HOPPER.search(self.code) else 0
        self._made = True
        self.allow_dynamic_shared(self._at_least)

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes of the compiled kernel. Registers are not among them: only a GPU's compiler assigns them."""
        self._make()
        return {
            "shared_size_bytes": self._static_shared,
            "max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes,
            "max_threads_per_block": self._most_threads,
        }

    @property
    def shared_size_bytes(self) -> int:
        """Static shared memory in bytes."""
        return self.attributes["shared_size_bytes"]

    @property
    def max_threads_per_block(self) -> int:
        """The most threads a block of the kernel can have."""
        return self.attributes["max_threads_per_block"]

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

    def allow_dynamic_shared(self, size: int) -> None:
        """Let launches ask for that many bytes of dynamic shared memory, if they may not already; nothing is built.

        Raises:
            LaunchError: more than a block may have. Of a kernel that is not built yet: when it is.
        """
        if not self._made:
            self._at_least = max(self._at_least, size)
        elif size > self.max_dynamic_shared_size_bytes:
            self.max_dynamic_shared_size_bytes = size

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
            enable_cooperative_groups: all blocks are on the device at once, and may meet in grid.sync(). Also where
                the kernel was made with it.

        Raises:
            TypeError: an argument is missing, too many, or not of the kernel's type.
            LaunchError: a launch a GPU would refuse, or one that failed: a wild pointer, a barrier that part of a
                block never reaches, a deadlock, an assertion. It names block, thread and line.
            KeyboardInterrupt: interrupted; the launch has been stopped.
        """
        args = self.arguments(args)
        cooperative = enable_cooperative_groups or self.enable_cooperative_groups
        sizes = self.check(grid, block, args, shared_mem, cooperative=cooperative)
        with array.Lent() as lent:
            prepared = self.prepare(
                *sizes, args, shared_mem, lambda _, value: lent.address(value), cooperative=cooperative
            )
            limit = runtime.time_limit()
            ended = runtime.launch(prepared.request, timeout=limit)
            overrun = lent.overrun()
        runtime.echo(ended.printed)
        if ended.failure is not None:
            told = self._tell(ended.failure, prepared)
            if ended.failure.reason == structures.Reason.EXPIRED:
                told += f"\nA block may take {limit:g} s. COURSE_CPU_TIMEOUT sets another limit in seconds; 0 sets none"
            raise LaunchError(told)
        if overrun is not None:
            raise LaunchError(
                f"{self.name} wrote to {prepared.describe(overrun, None)}. It was seen after the launch, so the "
                "thread is not known: look for an index that no condition keeps inside the array"
            )

    # ------------------------------------------------------------------------------------ a launch in its parts

    @property
    def enable_cooperative_groups(self) -> bool:
        """Whether all its launches are cooperative ones."""
        return self._module.enable_cooperative_groups

    @property
    def module(self) -> RawModule:
        """The module that it is a kernel of."""
        return self._module

    @property
    def library(self) -> runtime.KernelLibrary:
        """Its compiled module in memory."""
        self._make()
        return self._library

    @property
    def shared_arrays(self) -> list[symbols.SharedArray]:
        """Its static `__shared__` arrays, and the flags that a compiler keeps beside them."""
        self._make()
        return self._shared_arrays

    def instrumented(self, *, profile: bool) -> RawKernel:
        """The same kernel of `RawModule.instrumented`, with the same limit of dynamic shared memory."""
        twin = self._module.instrumented(profile=profile).get_function(self.name)
        twin._max_dynamic = self._max_dynamic
        twin.allow_dynamic_shared(self._at_least)
        return twin

    def arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments with arrays in place of addresses: of `array.data.ptr`, say, the bytes from there on.

        Raises:
            TypeError: an address for a pointer is in no device array.
        """
        self._make()
        if not isinstance(args, (tuple, list)) or len(args) != len(self.parameters):
            return args  # refused with the others' words
        return tuple(
            self._array_at(parameter, value) if parameter.kind == "p" and signatures.is_address(value) else value
            for parameter, value in zip(self.parameters, args, strict=True)
        )

    def _array_at(self, parameter: Parameter, value: Any) -> array.ndarray:
        address = int(getattr(value, "ptr", value))
        found = array.at(address)
        if found is None:
            raise TypeError(
                f"parameter {parameter} of {self.name} is a pointer and got the number {address} (0x{address:x}), "
                "which is no address in a device array that still lives"
            )
        if parameter.dtype in ("void", "struct"):
            return found
        dtype = signatures.dtype_of(parameter.dtype)
        return found if address % dtype.itemsize else found[: found.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def filled(self, value: str) -> RawKernel:
        """The same kernel of `RawModule.filled`."""
        twin = self._filled.get(value)
        if twin is None:
            twin = self._module.filled(value).get_function(self.name)
            if not twin.library.symbols.has_state():  # else it starts afresh each time
                self._filled[value] = twin
        return twin

    def check(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        *,
        cooperative: bool = False,
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Refuse a launch as calling the kernel does.

        Returns:
            grid and block, with three sizes each.

        Raises:
            TypeError, LaunchError: as for a launch.
        """
        self._make()
        sizes = _three("grid", grid), _three("block", block)
        self._check_limits(*sizes, shared_mem, cooperative)
        signatures.check_all(self.name, self.parameters, args, array.ndarray, contiguous=False)
        return sizes

    def prepare(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
        shared_mem: int,
        locate: Callable[[int, array.ndarray], int],
        *,
        cooperative: bool = False,
    ) -> PreparedLaunch:
        """A launch that `check` has let through, as `runtime.launch` takes it.

        Args:
            locate: (number of the parameter, array) -> the address that the kernel gets for it.
        """
        args, tensors = list(args), self.tensors(args)
        for number, (_, tensor) in tensors.items():
            args[number] = tensor_map.moved(args[number], locate(number, tensor))
        values = [
            ctypes.c_void_p(0 if value is None else locate(number, value))
            if parameter.kind == "p"
            else self._pack(parameter, value)
            for number, (parameter, value) in enumerate(zip(self.parameters, args, strict=True))
        ]
        maps = ctypes.create_string_buffer(b"".join(args[number].tobytes() for number in tensors))
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        arrays = self._shared_arrays
        request = LaunchRequest(
            self._run,
            ctypes.addressof(pointers),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            int(shared_mem),
            min((shared.offset for shared in arrays), default=0),
            max((shared.offset + shared.size for shared in arrays), default=0),
            self._library.symbols.alignment,
            self._library.anchor_offset,
            self._library.anchor,
            residency.blocks_at_once(block[0] * block[1] * block[2], self._static_shared + int(shared_mem)),
            int(cooperative),
            self._tile_alignment,
            self._registers(block[0] * block[1] * block[2]),
            runtime.order(),
            ctypes.addressof(maps),
            len(tensors),
        )
        return PreparedLaunch(self, grid, block, tuple(args), [*values, maps], pointers, request)

    def tensors(self, args: Sequence[Any]) -> dict[int, tuple[tensor_map.Described, array.ndarray]]:
        """By number of the parameter, the tensor maps among the arguments and the arrays that they describe.

        Raises:
            LaunchError: the array of a map lives no more, or has not as many bytes as the map says.
        """
        found = {}
        for number, (parameter, value) in enumerate(zip(self.parameters, args, strict=True)):
            described = tensor_map.described(value) if parameter.kind == "S" else None
            if described is None:
                continue
            memory = array.at(described.address)
            if memory is None:
                raise LaunchError(
                    f"the tensor map {parameter.name!r} of {self.name} is of an array at 0x{described.address:x}, "
                    "where there is no device array (any more): make it of one that lives as long as the launch"
                )
            if described.nbytes > memory.nbytes:
                raise LaunchError(
                    f"the tensor map {parameter.name!r} of {self.name} reaches over {described.nbytes:,} bytes, and "
                    f"the array from its address on has {memory.nbytes:,}: look at its dims {described.dims} and "
                    f"strides {described.strides}"
                )
            found[number] = described, memory.typed(described.shape, described.dtype, described.byte_strides)
        return found

    def _registers(self, threads: int) -> int:
        """Registers that each thread begins with, where `__launch_bounds__` tells them; 0 where it does not."""
        if not self._least_blocks:
            return 0
        whole_warps = (threads + 31) // 32 * 32
        return min(_REGISTERS // (self._least_blocks * whole_warps) // 8 * 8, 256)

    def _check_limits(self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int, cooperative: bool) -> None:
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK:
            raise LaunchError(
                f"a block of {block} has {threads:,} threads; a GPU takes {MAX_THREADS_PER_BLOCK:,} at most"
            )
        if threads > self._most_threads:
            raise LaunchError(
                f"a block of {block} has {threads:,} threads; {self.name} is compiled for {self._most_threads:,} at "
                "most, by its __launch_bounds__ (a GPU refuses the launch)"
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

        blocks, shared = grid[0] * grid[1] * grid[2], self._static_shared + shared_mem
        if cooperative and blocks > residency.blocks_at_once(threads, shared):
            raise LaunchError(
                f"a cooperative launch has all its blocks on the GPU at once: {blocks:,} blocks of {threads:,} threads "
                f"with {shared:,} bytes of shared memory are too many. An H200 holds "
                f"{residency.blocks_on_gpu(threads, shared):,} of them at most, and the CPU engine has stacks for "
                f"{residency.most_threads():,} threads at once. Let each block do the work of several"
            )

    def _pack(self, parameter: Parameter, value: Any) -> Any:
        """A scalar or a struct as a C value."""
        if parameter.kind == "S":
            data = np.asarray(value)
            if data.nbytes != parameter.size:
                raise TypeError(
                    f"parameter {parameter.name!r} of {self.name} is a struct of {parameter.size} bytes; "
                    f"got {type(value).__name__} of {data.nbytes}"
                )
            memory = np.empty(parameter.size + _STRUCT_ALIGNMENT, np.uint8)  # as the most aligned struct wants it
            begin = -memory.ctypes.data % _STRUCT_ALIGNMENT
            memory[begin : begin + parameter.size] = np.frombuffer(data.tobytes(), np.uint8)
            return (ctypes.c_byte * parameter.size).from_buffer(memory.data, begin)
        dtype = signatures.dtype_of(parameter.dtype)
        return (ctypes.c_byte * dtype.itemsize).from_buffer_copy(np.asarray(value, dtype).tobytes())

    def line_at(self, place: int) -> tuple[str, int] | None:
        """(file, line) of the source, and of none of its headers, for a place in the library; None: there is none."""
        table = source.line_table(self.code, SOURCE_NAME)
        found = symbols.places_of(self._library.path, place) if place else []
        return next((at for at in found if at in table and not at[0].endswith(failures.HEADERS)), None)

    def _tell(self, failure: structures.Failure, prepared: PreparedLaunch) -> str:
        """A failed launch in words."""
        block_at, thread_at = (
            failures.index(failure.block, prepared.grid),
            failures.index(failure.thread, prepared.block),
        )
        who = f"{self.name}, block {failures.triple(block_at)}, thread {failures.triple(thread_at)}"
        table = source.line_table(self.code, SOURCE_NAME)
        what = prepared.words(failure)

        def quote(place: tuple[str, int]) -> str:
            return f"\n{place[1]:>6} | {table[place].rstrip()}" if place in table else ""

        place = failures.place_of(failure, self.line_at)
        if place is not None:
            return f"{place[0]}:{place[1]}: {what} [{who}]{quote(place)}"
        # A line of the source rather than of a header whose function was inlined there.
        places = symbols.places_of(self._library.path, failure.place) if failure.place else []
        expired = failure.reason == structures.Reason.EXPIRED
        if expired:  # an empty loop has no line of its own, but that of its caller or of what was moved out of it
            places += symbols.statements_at(self._library.path, failure.place) if failure.place else []
            places = [place for place in places if place in table and table[place].strip() != "}"]
        place = next((place for place in places if place in table), places[0] if places else None)
        where = f"at {place[0]}:{place[1]}" if place else "at an unknown line"
        if expired and place is None:
            place = symbols.place_before(self._library.path, failure.place, {file for file, _ in table})
            place = _loop_at(place, table) if place else None
            where = f"near {place[0]}:{place[1]}" if place else where
        signal = f"; {runtime.signal_name(failure.signal)}" if failure.signal else ""
        return f"{what} {where} [{who}{signal}]{quote(place) if place else ''}"


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that only has to be run. values (the arguments, then the tensor maps) and pointers are what `request`
    points to: it lives as long as they.
    """

    kernel: RawKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Any, ...]
    values: list[Any]
    pointers: ctypes.Array
    request: LaunchRequest

    def words(self, failure: structures.Failure) -> str:
        """Why it failed, without who and where."""
        return failures.words(failure, self.block, lambda address: self.describe(address, failure), self.kernel.line_at)

    def describe(self, address: int, failure: structures.Failure | None) -> str:
        """An address in terms of the arguments and of shared memory, where it is in or near one."""
        if address < 4096:
            return "a null pointer" if address == 0 else f"address {address}: a null pointer and an index"
        near: list[tuple[int, str]] = []
        for parameter, value, packed in zip(self.kernel.parameters, self.args, self.values[:-1], strict=True):
            if parameter.kind == "p" and value is not None and value.nbytes:
                begin, end = (at - value.ctypes.data for at in extent_of(value))
                inside = address - packed.value
                element = f"{parameter.name or 'an array'}[{inside // value.dtype.itemsize}]"
                size = (end - begin) // value.dtype.itemsize  # a view with gaps reaches further than its elements
                near.append((_distance(inside - begin, end - begin), f"{element}, which has {size:,} elements"))
        pieces = []
        if failure is not None and failure.static_base:
            base = failure.static_base
            arrays = (s for s in self.kernel.shared_arrays if not s.is_guard)
            pieces = [(f"__shared__ {s.name}", base + s.offset, s.size) for s in arrays]
        if failure is not None and failure.dynamic_size:
            pieces.append(("dynamic shared memory", failure.dynamic_base, failure.dynamic_size))
        elif failure is not None and failure.dynamic_base and source.has_dynamic_shared(self.kernel.code):
            inside = address - failure.dynamic_base
            text = (
                f"byte {inside} of dynamic shared memory (extern __shared__), but the launch gave 0 bytes of dynamic "
                "shared memory: kernel(grid, block, args, shared_mem=bytes)"
            )
            near.append((_distance(inside, 1), text))
        for name, begin, size in pieces:
            text = f"byte {address - begin} of {name}, which has {size:,} bytes"
            near.append((_distance(address - begin, size), text))
        distance, text = min(near, default=(_FAR, ""), key=lambda pair: pair[0])
        return text if distance < _FAR else f"address 0x{address:x}, which is far from every array"


_FAR = 1 << 20  # the guards around arrays are as wide


def _distance(inside: int, size: int) -> int:
    return max(-inside, inside - (size - 1), 0)


def _loop_at(place: tuple[str, int], table: Mapping[tuple[str, int], str]) -> tuple[str, int]:
    """The nearest line with a loop's first word, up to and including a place; the place itself where there is none."""
    file, line = place
    words = re.compile(r"\b(for|while|do)\b")
    return next(((file, n) for n in range(line, 0, -1) if words.search(table.get((file, n), ""))), place)


def _three(what: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    found = signatures.sizes_of(what, sizes)
    return found + (1,) * (3 - len(found))

"""RawModule and RawKernel with CuPy's interface: they take CUDA C++ text and launch it on the CPU engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from . import build, compiler, host_names, known, libraries, limits, options, runtime, settings, symbols
from .array import GuardedArguments, ndarray
from .compiler import CompileError
from .cuda_source import signatures, source
from .cuda_source.signatures import Parameter
from .failures import LaunchError
from .launch import CompiledKernel
from .limits import Sizes
from .observed import Access
from .structures import Entry, Reason


class RawModule:
    """CUDA C++ source whose kernels run on the CPU; the parameters are `cupy.RawModule`'s.

    Args:
        code: the source text.
        options: -D, -I, -U and -std=; options that only affect a GPU's code are accepted without effect.
        name_expressions: the template instances to compile, such as "softmax<float, 64>".

    Raises:
        TypeError, ValueError: wrong arguments. Compiling is lazy: see `compile`.
    """

    # Called before a module is compiled; an exception stops that. nvrtc.py sets it to NVRTC.
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
            raise TypeError(f"code must be the source text, a str; got {type(code).__name__}")
        if translate_cucomplex and libraries.folder() is None:
            raise ValueError("translate_cucomplex needs CuPy's headers, and CuPy is not installed here")
        self._recipe = build.Recipe(
            code,
            tuple(options) if not isinstance(options, str) else options,
            tuple(name_expressions or ()),
            backend,
            jitify,
            translate_cucomplex,
            bool(enable_cooperative_groups),
        )
        self._built: build.Built | None = None
        self._asked: set[str] = set()  # variables that the host may have written
        self._kept: dict[str, RawModule] = {}  # instrumented twins

    @property
    def code(self) -> str:
        """The source text."""
        return self._recipe.code

    @property
    def options(self) -> tuple[str, ...]:
        """The options of its compilation."""
        return self._recipe.options

    @property
    def name_expressions(self) -> tuple[str, ...]:
        """The template instances that it compiles."""
        return self._recipe.name_expressions

    @property
    def backend(self) -> str:
        """The compiler whose rules the source follows: "nvrtc" or "nvcc"."""
        return self._recipe.backend

    @property
    def jitify(self) -> bool:
        """True if Jitify, which provides a host's headers, reads the source before NVRTC."""
        return self._recipe.jitify

    @property
    def enable_cooperative_groups(self) -> bool:
        """True if all launches of its kernels are cooperative."""
        return self._recipe.cooperative

    def compile(self, log_stream: Any = None) -> None:
        """Compile now rather than at the first `get_function`.

        log_stream: receives the compiler's warnings through `write`.

        Raises:
            CompileError: the compiler refused; the message shows the lines of the source.
            NoCompilerError: there is no C++ compiler.
        """
        if self._built is None:
            if self.ask_first is not None:
                self.ask_first()
            self._built = known.built(self._recipe, log_stream)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle or copy the source and its options, not the compiled module."""
        return self.__dict__ | {"_built": None, "_asked": set(), "_kept": {}}

    def _twin(self, **changes: Any) -> RawModule:
        """Build a module from the same source in another way, with this one's values of variables."""
        twin = copy.copy(self)
        twin._recipe = replace(self._recipe, **changes)
        twin.copy_variables(self)
        return twin

    def instrumented(self, *, profile: bool, keep: bool = False) -> RawModule:
        """Build the same source so that every memory access calls the engine's checker: for checked.py.

        Its variables get the values that the host gave to this module's.

        Args:
            profile: every basic block calls it as well.
            keep: return the same module each time: its other variables have the values that launches have left.
        """
        how = "profiled" if profile else "checked"
        if not keep:
            return self._twin(instrumented=how)
        twin = self._kept.get(how)
        if twin is None:
            twin = self._kept[how] = self._twin(instrumented=how)
        else:
            twin.copy_variables(self)
        return twin

    def filled(self, value: str) -> RawModule:
        """Build the same source so that uninitialised local variables begin with a fill value: see `compiler.filling`.

        Each index is also compared with the array's size, if its type has one.
        """
        return self._twin(filling=(*compiler.filling(value), *compiler.bounds()))

    def copy_variables(self, other: RawModule) -> None:
        """Set the variables that the host has requested, here or there, to their values in `other`."""
        for name in sorted(other._asked | self._asked):
            self.get_global(name)[...] = other.get_global(name)

    def get_function(self, name: str) -> RawKernel:
        """Return the kernel with that name, or with that name expression.

        Raises:
            CompileError: the source does not compile.
            LaunchError: the source has no such kernel; the message lists its kernels.
        """
        kernel = self.kernel_to_build(name)
        kernel.compiled()
        return kernel

    def kernel_to_build(self, name: str) -> RawKernel:
        """Return the kernel with that name, to be built at its first launch. A checked run has its own build."""
        kernel = RawKernel.__new__(RawKernel)
        kernel._begin(self, name)
        return kernel

    def get_global(self, name: str) -> ndarray:
        """Return the bytes of a `__device__` or `__constant__` variable, as a uint8 device array that aliases it.

        CuPy returns a bare pointer. Either can be wrapped in an array and written with `[...] =`:
        `cp.ndarray((16,), cp.float32, module.get_global("weights"))`.

        Raises:
            LaunchError: the source has no such variable, or it is static or const.
        """
        self.compile()
        memory = self._built.library.variable(name)
        if memory is None:
            raise LaunchError(f"the source has no variable {name!r} that is neither static nor const")
        self._asked.add(name)
        return np.frombuffer(memory, dtype=np.uint8).view(ndarray)

    def compiled_kernel(self, name: str) -> CompiledKernel:
        """Return the kernel with that name in memory.

        Raises:
            CompileError: the source does not compile, or the kernel has too much static `__shared__` memory.
            LaunchError: the source has no such kernel; the message lists its kernels.
        """
        self.compile()
        entry, library = self._entry(name), self._built.library
        plain = re.sub(r"<.*", "", name).split("::")[-1]
        linked = {key: library.symbol_at(other.function) or key for key, other in self._built.entries.items()}
        arrays = symbols.shared_arrays(library.symbols, linked)[name]
        defined = dict(
            re.findall(r"^#define (\w+) (.*)$", options.for_host(self.options, self._recipe.backend)[1], re.M)
        )
        text = self._built.text
        bounds = source.launch_bounds(text, plain, defined)
        kernel = CompiledKernel(
            name=name,
            code=self.code,
            library=library,
            run=entry.run,
            parameters=tuple(_parameters(entry, source.kernels(text).get(plain, []))),
            shared_arrays=tuple(one for one in arrays if not source.is_only_declared(text, one.name)),
            most_threads=min(bounds or limits.MAX_THREADS_PER_BLOCK, limits.MAX_THREADS_PER_BLOCK),
            least_blocks=source.least_blocks(text, plain),
            uses_tiles=self._built.uses_tiles,
            cluster=limits.cluster_of(name, tuple(entry.cluster)),
        )
        if kernel.static_shared > limits.SHARED_PER_BLOCK:
            raise CompileError(
                f"{name} declares {kernel.static_shared:,} bytes of static __shared__ memory; a GPU's limit is "
                f"{limits.SHARED_PER_BLOCK:,} (0xc000). Use smaller tiles, or dynamic memory: extern __shared__ float "
                "s[];"
            )
        return kernel

    def _entry(self, name: str) -> Entry:
        entry = self._built.entries.get(name)
        if entry is None:
            kernels = source.kernels(self._built.text)
            hint = f"; it has {', '.join(kernels)}" if kernels else "; it has no __global__ function"
            if name in kernels:
                hint = ": the preprocessor leaves it out, or a namespace holds it"
                if source.is_template(self._built.text, name):
                    hint = f"; {name} is a template: name an instance in name_expressions, such as '{name}<float>'"
            raise LaunchError(
                f"the source has no kernel {name!r}{hint} (a GPU says: CUDA_ERROR_NOT_FOUND: named symbol not found)"
            )
        symbol = self._built.library.symbol_at(entry.function)
        symbol = symbol.removeprefix(host_names.PREFIX) if symbol else None  # a C library has this name too
        if name not in self.name_expressions and symbol not in (None, name):
            raise LaunchError(
                f'{name} is not declared extern "C", so a GPU knows it as {symbol!r} only: write extern "C" before '
                f"__global__, or ask for name_expressions=({name!r},)"
            )
        return entry


def _parameters(entry: Entry, declared: Sequence[source.Declared]) -> list[Parameter]:
    """Return a kernel's parameters as the compiler reports them, with the names of the source."""
    parameters = []
    for index in range(entry.count):
        raw = entry.parameters[index]
        name, type_ = (declared[index].name, declared[index].type) if len(declared) == entry.count else ("", "")
        kind, dtype = raw.kind.decode(), raw.text.decode()
        if kind == "s" and raw.size != signatures.dtype_of(dtype).itemsize:
            kind = "S"  # float4 by value: its dtype is float32, but it is not a scalar
        parameters.append(Parameter(name, kind, dtype, raw.is_const, raw.size, type_ if kind == "p" else ""))
    return parameters


_ATTRIBUTES = (
    *("binary_version", "cache_mode_ca", "max_dynamic_shared_size_bytes", "max_threads_per_block"),
    *("preferred_shared_memory_carveout", "ptx_version", "shared_size_bytes"),
)
_OF_A_GPUS_COMPILER = ("num_regs", "local_size_bytes", "const_size_bytes")
_IS_DECIDED = "is what a GPU's compiler decides, and the CPU engine runs no code of a GPU"
_PICKLED = ("module", "name", "_max_dynamic", "_carveout", "_at_least")


class _Attributes(dict):
    """Attributes with CuPy's names; a missing one raises an error that explains it."""

    def __missing__(self, name: str) -> int:
        raise KeyError(f"{name} {_IS_DECIDED}" if name in _OF_A_GPUS_COMPILER else name)


class RawKernel:
    """One kernel, with `cupy.RawKernel`'s parameters. Called as `kernel(grid, block, args, shared_mem=0)`."""

    # Finds the access that wrote past the end of an array, after the launch. checked.py sets it, because that needs a
    # checked run, which builds on this module.
    explain_overrun: ClassVar[Callable[[RawKernel, Sizes, Sizes, Sequence[Any], int], Access | None] | None] = None
    # Called instead of a launch, (kernel, grid, block, args, shared_mem, cooperative=, timeout=): xray/sanitize.py.
    launch_instead: ClassVar[Callable[..., None] | None] = None

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
        module = RawModule(
            code=code,
            options=options,
            backend=backend,
            jitify=jitify,
            name_expressions=(name,) if "<" in name else (),
            translate_cucomplex=translate_cucomplex,
            enable_cooperative_groups=enable_cooperative_groups,
        )
        self._begin(module, name)

    def _begin(self, module: RawModule, name: str) -> None:
        self.module, self.name = module, name
        self._max_dynamic: int | None = None
        self._carveout = -1
        self._at_least = 0  # the size passed to `allow_dynamic_shared` before the kernel was built
        self._forget()

    def _forget(self) -> None:
        self._compiled: CompiledKernel | None = None
        self._filled: dict[str, RawKernel] = {}  # by the fill value of their local variables
        self.known_set: set[tuple[Any, ...]] = set()  # forms of launches that use no uninitialised variable

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the module and the name."""
        return {name: self.__dict__[name] for name in _PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def code(self) -> str:
        """The source text."""
        return self.module.code

    @property
    def options(self) -> tuple[str, ...]:
        """The options of its compilation."""
        return self.module.options

    @property
    def enable_cooperative_groups(self) -> bool:
        """True if all its launches are cooperative."""
        return self.module.enable_cooperative_groups

    def compile(self, log_stream: Any = None) -> None:
        """Compile now rather than at the first launch."""
        self.module.compile(log_stream)

    def compiled(self) -> CompiledKernel:
        """Return the kernel in memory; build it if necessary."""
        if self._compiled is None:
            self._compiled = self.module.compiled_kernel(self.name)
            self.allow_dynamic_shared(self._at_least)
        return self._compiled

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes of the compiled kernel, without registers, which only a GPU's compiler assigns."""
        return _Attributes({name: getattr(self, name) for name in _ATTRIBUTES})

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_GPUS_COMPILER:
            raise AttributeError(f"{name} {_IS_DECIDED}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Those of a GPU of compute capability 9.0 that NVRTC compiled for.
    binary_version = ptx_version = 90
    cache_mode_ca = 0

    @property
    def preferred_shared_memory_carveout(self) -> int:
        """The share of the L1 cache that a GPU would use as shared memory, in percent; -1: the GPU's choice."""
        return self._carveout

    @preferred_shared_memory_carveout.setter
    def preferred_shared_memory_carveout(self, percent: int) -> None:
        if not -1 <= percent <= 100:
            raise LaunchError(f"preferred_shared_memory_carveout = {percent}: a percentage, or -1 (invalid argument)")
        self._carveout = int(percent)

    @property
    def shared_size_bytes(self) -> int:
        """Static shared memory in bytes."""
        return self.compiled().static_shared

    @property
    def max_threads_per_block(self) -> int:
        """The maximum number of threads in a block of the kernel."""
        return self.compiled().most_threads

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The dynamic shared memory that a launch may request, in bytes; set it to go beyond 48 KB."""
        static = self.compiled().static_shared
        return limits.SHARED_PER_BLOCK - static if self._max_dynamic is None else self._max_dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        static = self.compiled().static_shared
        limit = limits.SHARED_PER_BLOCK_OPTIN - static
        if not 0 <= size <= limit:
            raise LaunchError(
                f"max_dynamic_shared_size_bytes = {size:,} is refused: at most {limit:,} bytes are left of a block's "
                f"{limits.SHARED_PER_BLOCK_OPTIN:,}, of which {static:,} are static (invalid argument on a GPU)"
            )
        self._max_dynamic = int(size)

    def allow_dynamic_shared(self, size: int) -> None:
        """Let launches request this many bytes of dynamic shared memory, unless they already may; build nothing.

        Raises:
            LaunchError: more than a block may have; for an unbuilt kernel, when it is built.
        """
        if self._compiled is None:
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
        timeout: float | None = None,
    ) -> None:
        """Launch and wait.

        Args:
            grid, block: one to three sizes; 0 is 1, as in CuPy.
            args: device arrays for pointers (or None or 0 for a null pointer), NumPy scalars for scalars.
            shared_mem: bytes of dynamic shared memory.
            enable_cooperative_groups: all blocks are on the device at once, and may meet in grid.sync(). Also if the
                kernel was made with it.
            timeout: seconds that a block may take, `math.inf` for no limit; None is `runtime.time_limit()`. CuPy has no
                such parameter.

        Raises:
            TypeError: an argument is missing, superfluous, or of the wrong type.
            LaunchError: a launch that a GPU would refuse, or that failed: a wild pointer, a barrier that part of a
                block never reaches, a deadlock, an assertion. It names block, thread and line, also as fields.
            KeyboardInterrupt: interrupted; the launch has been stopped.
        """
        cooperative = enable_cooperative_groups or self.enable_cooperative_groups
        if self.launch_instead is not None:
            __tracebackhide__ = True  # hides the frame in pytest
            return self.launch_instead(self, grid, block, args, shared_mem, cooperative=cooperative, timeout=timeout)
        compiled = self.compiled()
        args = compiled.arguments(args)
        sizes = self.check(grid, block, args, shared_mem, cooperative=cooperative)
        limit = runtime.time_limit() if timeout is None else timeout
        with GuardedArguments() as guarded:
            prepared = compiled.prepare(*sizes, args, shared_mem, guarded.address, cooperative=cooperative)
            ended = runtime.launch(prepared.request, timeout=limit)
            overrun = guarded.overrun()
        runtime.echo(ended.printed)
        if ended.failure is not None:
            error = prepared.error(ended.failure)
            if error.reason == Reason.EXPIRED and timeout is None:
                variable = settings.variable("CPU_TIMEOUT")
                how = f"A block may take {limit:g} s. {variable} sets another limit in seconds; 0 sets none"
                error.args = (f"{error}\n{how}",)
            raise error
        if overrun is not None:
            by = self.explain_overrun(*sizes, args, shared_mem) if self.explain_overrun is not None else None
            raise prepared.error_of_overrun(overrun, by)

    # ------------------------------------------------------------------------------------ the parts of a launch

    @property
    def library(self) -> runtime.KernelLibrary:
        """Its compiled module in memory."""
        return self.compiled().library

    def instrumented(self, *, profile: bool, keep: bool = False) -> RawKernel:
        """Return the same kernel from `RawModule.instrumented`, with the same limit of dynamic shared memory."""
        twin = self.module.instrumented(profile=profile, keep=keep).get_function(self.name)
        twin._max_dynamic = self._max_dynamic
        twin.allow_dynamic_shared(self._at_least)
        return twin

    def filled(self, value: str) -> RawKernel:
        """Return the same kernel from `RawModule.filled`."""
        twin = self._filled.get(value)
        if twin is None:
            twin = self.module.filled(value).get_function(self.name)
            if not twin.library.symbols.has_state():  # without state it starts afresh each time
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
    ) -> tuple[Sizes, Sizes]:
        """Refuse what a launch would refuse.

        Returns:
            grid and block, with three sizes each.

        Raises:
            TypeError, LaunchError: as for a launch.
        """
        compiled = self.compiled()
        grid, block = _three("grid", grid), _three("block", block)
        limits.check_sizes(self.name, grid, block, compiled.most_threads)
        limits.check_cluster(self.name, grid, compiled.cluster, cooperative=cooperative)
        static = compiled.static_shared
        limits.check_dynamic_shared(self.name, shared_mem, self.max_dynamic_shared_size_bytes, static)
        if cooperative:
            limits.check_cooperative(grid, block, static + shared_mem)
        signatures.check_all(self.name, compiled.parameters, args, ndarray, contiguous=False)
        return grid, block


def _three(what: str, sizes: Sequence[int]) -> Sizes:
    if isinstance(sizes, list):
        raise TypeError(f"{what} is {sizes!r:.60}, a list: CuPy takes a tuple; write {tuple(sizes)!r:.60}")
    sizes = signatures.sizes_of(what, sizes)
    if 0 in sizes:  # CuPy turns 0 into 1
        sizes = tuple([size or 1 for size in sizes])
    return sizes + (1,) * (3 - len(sizes))

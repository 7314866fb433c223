"""From a module's source to its library in memory: which text is compiled, and what is tried after an error."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import arithmetic, compiler, cutlass, host_names, libraries, messages, options, refusals, runtime, structures
from .compiler import CompileError
from .cuda_source import source
from .messages import SOURCE_NAME
from .structures import Entry, EntryParameter
from .translate import translate

# A GPU's compiler refuses these too: arrays with a size known only at run time, arithmetic on void*, exceptions, run-
# time types.
_STRICT = ("-Werror=vla", "-Werror=pointer-arith", "-Werror=register", "-fno-exceptions", "-fno-rtti", "-Wno-narrowing")
_RUNTIME, _PTX = '#include "cuda_runtime.h"\n', "#include <ptx_instructions.h>\n"
_NO_STD_MIN = re.compile(r"(?:min|max). is not a member of .std|no member named .(?:min|max). in namespace .std")
# Functions of the C library that the engine's headers declare and a GPU lacks: kernels may have their names.
_OF_C = frozenset(
    ("abort", "div", "drem", "exit", "gamma", "index", "ldiv", "lldiv", "rand", "random", "rindex", "select")
) | {"significand", "srand", "srandom", "system", "time"}
# What g++ and clang++ report about braces within brackets, which inline PTX becomes.
_CLANGS_BRACES = re.compile(r"use of GNU statement expression extension(?: from macro expansion)?")
_BRACES = "braced-groups within expressions"
_UNDEFINED = re.compile(r"undefined symbol: (\w+)|symbol not found.*'_(\w+)'")
# In a source as written, or with its inline PTX as calls to the engine: it uses TMA or wgmma.
_OF_OTHERS = re.compile(r"(?:cub|thrust|cuda|nv|cupy|cute|cutlass)/")  # libraries with these headers
_TILES = re.compile(r"wgmma|cp\.(?:reduce\.)?async\.bulk|engine_bulk_|::(?:bulk|tensor)_(?:copy|store|load|add)\(")

# One line of the table of a module's kernels. It is a constant: a call would fill the table at its first use, behind a
# lock of the C++ library's, which takes a linker longest to read.
_ENTRY = (
    '{{"{name}", (void*)engine::Kernel<{name}>::function, engine::Kernel<{name}>::run, engine::Kernel<{name}>::count, '
    "engine::Kernel<{name}>::parameters, {cluster}}},\n"
)

# Modules with the same source and options share one library in memory, as in CuPy: they share their variables.
_LOADED: dict[tuple[Path, tuple[str, ...]], runtime.KernelLibrary] = {}


@dataclass(frozen=True)
class Recipe:
    """A source and how it is compiled: the parameters of `RawModule`, and those of a checked run.

    instrumented: "checked" or "profiled", for `compiler.build`. filling: flags from `compiler.filling` and `bounds`.
    """

    code: str
    options: tuple[str, ...] = ()
    name_expressions: tuple[str, ...] = ()
    backend: str = "nvrtc"
    jitify: bool = False
    translate_cucomplex: bool = False
    cooperative: bool = False
    instrumented: str = ""
    filling: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """True if its modules share their variables; those of a checked run start with initial values."""
        return not (self.instrumented or self.filling)


@dataclass(frozen=True)
class Built:
    """A module in memory. entries: its kernels by name. uses_tiles: it has instructions of TMA or wgmma.

    text: the source in which kernels were found, see `_Attempt.reading`.
    """

    library: runtime.KernelLibrary
    entries: dict[str, Entry]
    uses_tiles: bool
    text: str


def build(recipe: Recipe, log_stream: Any = None) -> Built:
    """Compile a source, or take it from the cache, and load it.

    log_stream: receives the compiler's warnings through `write`.

    Raises:
        CompileError: the compiler refused; the message shows the lines of the source.
        NoCompilerError: there is no C++ compiler.
    """
    attempt = _Attempt(recipe, bool(libraries.options()) and libraries.needed(recipe.code))
    start = attempt.beginning()
    text, headers = attempt.reading(start)
    plain = [name for name in source.kernels(text) if not source.is_template(text, name)]
    kernels = tuple(name for name in plain if name not in recipe.name_expressions)
    attempt = replace(attempt, kernels=kernels, text=text, headers=tuple(headers))
    while True:
        program = attempt.program(start)
        path, diagnostics = program.build()
        if path is None:
            attempt = attempt.after(diagnostics)
            start = attempt.beginning()
            continue
        try:
            library = _load(program, path)
            break
        except _Undefined as error:
            attempt = attempt.without(error.args[0])
    if log_stream is not None:
        log_stream.write(_warnings(compiler.warnings(program.text, program.options), recipe.code))
    return Built(library, entries(library), _TILES.search(program.text) is not None, text)


@dataclass(frozen=True)
class _Program:
    """The compiler's input. edits: the other arguments of `compiler.build`."""

    recipe: Recipe
    text: str
    options: list[str]
    edits: dict[str, Any]

    def build(self) -> tuple[Path | None, str]:
        return compiler.build(self.text, self.options, checked=self.recipe.instrumented, **self.edits)


@dataclass(frozen=True)
class _Attempt:
    """One attempt. kernels: those that are not templates. with_algorithm: include <algorithm>, for std::min."""

    recipe: Recipe
    uses_libraries: bool  # includes CUB, libcu++ or Thrust
    kernels: tuple[str, ...] = ()
    text: str = ""  # set by `reading`, like the next field
    headers: tuple[str, ...] = ()
    with_algorithm: bool = False

    @property
    def names(self) -> list[str]:
        """The kernels of the module's table."""
        return [*self.kernels, *self.recipe.name_expressions]

    def beginning(self) -> _Beginning:
        """Return the text before the source. It depends on what the attempt uses, not on its kernels."""
        recipe = self.recipe
        code = libraries.translate_cucomplex(recipe.code) if recipe.translate_cucomplex else recipe.code
        flags, macros = options.for_host(recipe.options, recipe.backend)
        host_flags = cutlass.compiled(flags) if "cut" in code and cutlass.includes(code) else flags
        folders = [compiler.INCLUDE, *compiler.system_folders(host_flags)]
        algorithm = "#include <algorithm>\n" if self.with_algorithm else ""
        head = f"{algorithm}{_first_headers(code, folders)}"
        return _Beginning(code, macros, host_flags, folders, self._arguments(code, host_flags), head)

    def reading(self, start: _Beginning) -> tuple[str, list[str]]:
        """Return the source in which to look for kernels, and the CUDA headers that it includes.

        That is the preprocessor's output if macros, or the source's own headers, may define or name kernels.

        Raises:
            CompileError: an unknown option.
        """
        includes = re.findall(r'^[ \t]*#\s*include\s*([<"])([^>"]+)[>"]', start.code, re.M)
        folders = any(option.startswith("-I") for option in start.flags)
        own = any(
            not (compiler.INCLUDE / name).is_file() and (mark == '"' or (folders and not _OF_OTHERS.match(name)))
            for mark, name in includes
        )
        text, headers = start.code, [name for _, name in includes]
        if own or source.macros_make_kernels(start.code, start.macros):
            before = f"{_RUNTIME}{_PTX}{start.head}{start.macros}"
            whole = compiler.expanded(before, start.code, SOURCE_NAME, start.arguments)
            if whole is not None:
                text, headers = compiler.own_parts(whole), [*headers, *compiler.included(whole)]
        return text, headers

    def _is_for_nvrtc(self, flags: Sequence[str]) -> bool:
        """Return True if only NVRTC's rules apply: CUB, libcu++ and CuTe are compiled as on a host."""
        of_others = self.uses_libraries or "-isystem" in flags
        return self.recipe.backend == "nvrtc" and not self.recipe.jitify and not of_others

    def _hides(self, start: _Beginning) -> str:
        """Return the lines that hide names which only the host's headers provide, see host_names.py."""
        recipe = self.recipe
        if not self._is_for_nvrtc(start.flags):
            return ""
        own = sorted(_OF_C.intersection(self.names))  # also in a host's C library only
        renamed = "".join(f"#define {name} {host_names.PREFIX}{name}\n" for name in own)
        text = "" if self.text == start.code else self.text
        given = _device_options(recipe.options)
        return _hidden(start.code, text, recipe.name_expressions, self.headers, self.kernels, given) + renamed

    def program(self, start: _Beginning) -> _Program:
        """Return the text for the compiler.

        Raises:
            CompileError: an unknown option, or inline PTX that the engine cannot follow.
        """
        recipe = self.recipe
        code, host_flags, folders, arguments = start.code, start.flags, start.folders, start.arguments
        macros = start.macros
        head = f"{start.head}{self._hides(start)}{macros}"
        body, was_expanded = self._translated(code, head, arguments, folders)
        # (Expanded text lacks what the PTX header includes.)
        needs_ptx = was_expanded or self.uses_libraries or len(folders) > 1 or "engine::ptx::" in body
        bridge = "#include <cupy/complex.cuh>\n" if recipe.translate_cucomplex else ""
        head = f"{_RUNTIME}{_PTX if needs_ptx else ''}{head}{bridge}"
        edits: dict[str, Any] = {
            "plain": self._whole(head, body),
            "refuse": lambda: self._refusal(macros, host_flags),
        }
        if self._is_for_nvrtc(host_flags):
            edits["forbid"] = functools.partial(_extension, code, recipe.name_expressions)
        if self.uses_libraries:
            edits |= {"expand": libraries.expanded, "expand_key": libraries.translation_hash()}
        return _Program(recipe, self._whole(head, _edited(body)), arguments, edits)

    def _arguments(self, code: str, flags: Sequence[str]) -> list[str]:
        arguments = libraries.options() if self.uses_libraries else []
        as_nvrtc = ["-DENGINE_AS_NVRTC"] if self._is_for_nvrtc(flags) else []
        arguments = [*arguments, "-I", str(compiler.INCLUDE), *_STRICT, *as_nvrtc, *flags, *self.recipe.filling]
        return arguments + (libraries.cupy_options() if "cupy/" in code or self.uses_libraries else [])

    def _translated(self, code: str, head: str, arguments: list[str], folders: Sequence[Path]) -> tuple[str, bool]:
        """Translate the source for a host compiler, and return whether the preprocessor has run."""

        how = self.uses_libraries, tuple(folders)
        try:
            alone = _translated_alone(code, *how)
            if alone is not None:
                return alone, False
            whole = _translated.__wrapped__ if compiler.may_include_own(code, arguments) else _translated
            return whole(code, f"{_RUNTIME}{_PTX}{head}", tuple(arguments), *how), True
        except ValueError as error:
            raise CompileError(str(error)) from None

    def _whole(self, head: str, body: str) -> str:
        clusters = {name: source.cluster_dims(self.text, name) for name in self.names}
        entries = "".join(_ENTRY.format(name=name, cluster=clusters[name][1]) for name in self.names)
        before = "".join(dict.fromkeys(declared for declared, _ in clusters.values()))
        return (
            f'{head}#line 1 "{SOURCE_NAME}"\n{body}\n{before}#line 1 "{messages.ENTRIES}"\n'
            'extern "C" const engine::Entry *engine_entries(int *engine_count, unsigned *engine_sizes) {\n'
            f"static const engine::Entry engine_table[] = {{\n{entries}{{}}}};\n"
            f"*engine_count = {len(self.names)};\n"
            "engine_sizes[0] = sizeof(engine::Entry), engine_sizes[1] = sizeof(engine::Parameter);\n"
            "return engine_table;\n}\n"
        )

    def _refusal(self, macros: str, flags: Sequence[str]) -> str:
        recipe = self.recipe
        if recipe.backend != "nvrtc" or recipe.jitify:  # under the rules of nvcc or Jitify, host headers exist
            return ""
        return refusals.refusal(recipe.code, macros, SOURCE_NAME, flags, recipe.name_expressions)

    def after(self, diagnostics: str) -> _Attempt:
        """Return what to try next when the compiler has refused this attempt.

        Raises:
            CompileError: there is nothing left to try.
        """
        code, header = self.recipe.code, libraries.missing(diagnostics)
        if header and libraries.options() and not self.uses_libraries:  # a user's header includes it
            return replace(self, uses_libraries=True)
        # NVRTC has no std::min, and does not check templates that are never used.
        if not self.with_algorithm and _NO_STD_MIN.search(diagnostics):
            return replace(self, with_algorithm=True)
        if header and not libraries.options():
            raise CompileError(f"{messages.explain(diagnostics, code, self.names)}\n{libraries.whose(header)}")
        # The text shows kernels that the preprocessor removes, or that are in a namespace: try without them.
        blamed = {int(line) for line in re.findall(rf"^{messages.ENTRIES}:(\d+):", diagnostics, re.M)}
        unblamed = [name for line, name in enumerate(self.kernels, messages.FIRST_ENTRY) if line not in blamed]
        if len(unblamed) < len(self.kernels):
            return replace(self, kernels=tuple(unblamed))
        raise CompileError(messages.explain(diagnostics, code, self.names) + libraries.of_the_host(code))

    def without(self, symbol: str) -> _Attempt:
        """Return what to try when a symbol is undefined: the module without kernels that are only declared.

        Raises:
            CompileError: the symbol is not a kernel's.
        """
        left = tuple(
            name for name in self.kernels if symbol not in (name, f"_{name}") and f"{len(name)}{name}" not in symbol
        )
        if len(left) == len(self.kernels):
            raise CompileError(messages.undefined(symbol, self.recipe.code))
        return replace(self, kernels=left)


@dataclass(frozen=True)
class _Beginning:
    """The text before a source. head: the headers that are read first. macros: lines of #define, from the options."""

    code: str
    macros: str
    flags: list[str]
    folders: list[Path]
    arguments: list[str]
    head: str


class _Expanded(Exception):
    """The translation of a source depends on the preprocessor's output."""


# Computed once for all builds of a source: for other sizes, and for checked runs.


@functools.lru_cache(maxsize=64)
def _translated_alone(code: str, keep_asm: bool, folders: tuple[Path, ...]) -> str | None:
    """Translate a source without the preprocessor; None if it is needed."""

    def expanded(code: str) -> str | None:
        raise _Expanded

    try:
        return translate(code, expanded, SOURCE_NAME, keep_asm=keep_asm, folders=folders)
    except _Expanded:
        return None


@functools.lru_cache(maxsize=16)
def _translated(code: str, before: str, arguments: tuple[str, ...], keep_asm: bool, folders: tuple[Path, ...]) -> str:
    """Translate a source with the preprocessor's output. before: the lines that it reads first."""

    def expanded(code: str) -> str | None:
        return compiler.expanded(before, code, SOURCE_NAME, [*arguments])

    return translate(code, expanded, SOURCE_NAME, keep_asm=keep_asm, folders=folders)


@functools.lru_cache(maxsize=64)
def _edited(body: str) -> str:
    return arithmetic.edited(body)


def _device_options(given: Sequence[str]) -> tuple[str, ...]:
    """Return the options that provide types, see `host_names.hidden`."""
    return tuple(option for option in given if "device-" in option)


@functools.lru_cache(maxsize=64)
def _hidden(
    code: str,
    text: str,
    expressions: tuple[str, ...],
    headers: tuple[str, ...],
    kernels: tuple[str, ...],
    given: tuple[str, ...],
) -> str:
    """Return the lines that hide a host's names. text: where to look for kernels, if not in the source."""
    clean = source.blank_comments(code) + source.blank_comments(text)
    clean = host_names.without_unused_templates(clean, expressions)
    return host_names.hidden(clean, headers, kernels=kernels, options=given)


def _extension(code: str, expressions: tuple[str, ...], diagnostics: str) -> str:
    """Return which extension, according to a compiler's warnings, NVRTC would refuse, see `refusals.extension`."""
    clean = host_names.without_unused_templates(source.blank_comments(code), expressions)
    lines = source.line_table(clean, SOURCE_NAME)
    return refusals.extension(_CLANGS_BRACES.sub(_BRACES, diagnostics), lines)


class _Undefined(Exception):
    """A symbol that the source declares and uses, and never defines."""


def _first_headers(code: str, folders: Sequence[Path]) -> str:
    """Return the headers of these folders that the source includes.

    They are read before the source's macros, because `#define N 64` must not change them.
    """
    text = source.blank_comments(code)
    if re.search(r"#\s*define\s+_?_?CUDA_NO", text):  # these macros are meant for the headers
        return ""
    names = dict.fromkeys(re.findall(r"^\s*#\s*include\s*<([^>]+)>", text, re.M))
    return "".join(f"#include <{name}>\n" for name in names if any((folder / name).is_file() for folder in folders))


def _warnings(diagnostics: str, code: str) -> str:
    """Return those compiler warnings that concern lines of the source."""
    table = source.line_table(code, SOURCE_NAME)
    every = re.findall(r"^(.+?):(\d+):(?:\d+:)? (warning: .*)$", diagnostics, re.M)
    return "".join(f"{file}:{line}: {text}\n" for file, line, text in every if (file, int(line)) in table)


def load(path: Path, recipe: Recipe) -> runtime.KernelLibrary:
    """Load a library into memory; modules of the same source and options share one.

    Raises:
        OSError, AttributeError: it is missing or broken, or a symbol is undefined.
    """
    loaded = _LOADED.get((path, recipe.options)) if recipe.is_shared else None
    if loaded is None:
        loaded = runtime.KernelLibrary(path)
        if recipe.is_shared:
            _LOADED[path, recipe.options] = loaded
    return loaded


def _load(program: _Program, path: Path) -> runtime.KernelLibrary:
    try:
        return load(path, program.recipe)
    except (OSError, AttributeError) as error:
        undefined = _UNDEFINED.search(str(error))
        if undefined:
            raise _Undefined(undefined[1] or undefined[2]) from None
    path.unlink(missing_ok=True)  # a broken file in the cache
    rebuilt, _ = program.build()
    return load(rebuilt, program.recipe)


def entries(library: runtime.KernelLibrary) -> dict[str, Entry]:
    """Read the table of a library's kernels."""
    library.handle.engine_entries.restype = ctypes.POINTER(Entry)
    count, sizes = ctypes.c_int(), (ctypes.c_uint * 2)()
    table = library.handle.engine_entries(ctypes.byref(count), sizes)
    structures.compare(
        {"Entry": (ctypes.sizeof(Entry), sizes[0]), "Parameter": (ctypes.sizeof(EntryParameter), sizes[1])}
    )
    return {table[index].name.decode(): table[index] for index in range(count.value)}

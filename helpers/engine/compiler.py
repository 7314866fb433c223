"""Find a C++ compiler, compile with it, and cache the builds.

Builds are cached by content: the key is a hash over the source, the flags, the compiler's version and the engine's
headers. Neither the key nor the build contains the headers' paths, so checkouts in different places share builds. A
build is written under a temporary name and moved into place, so parallel processes never see half a file; if several
need the same build, one compiles and the others wait.

For a small kernel, g++ spends most of its time on the engine's headers. They are therefore precompiled, once for each
list of headers that a source begins with and each set of options.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from .assembly import instrumented, with_flop, with_nan

try:
    import fcntl
except ImportError:  # no file locks here: two processes may then build the same thing
    fcntl = None

from . import arithmetic, settings, shared_layout

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"  # the headers that kernels see
ENGINE = HERE / "cpp"  # the sources of the engine's own library


class CompileError(Exception):
    """The compiler refused the source. The message shows the wrong lines of the source."""


class NoCompilerError(RuntimeError):
    """There is no C++17 compiler on this machine."""


def cache_dir() -> Path:
    """Return the folder of builds: `$COURSE_CACHE`, else the user's cache folder, else a temporary one."""
    chosen = settings.value("CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base if chosen else base / settings.CACHE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"{settings.CACHE}-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def keep(path: Path, text: str) -> None:
    """Write a file of the cache atomically: no other process sees half of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="keeping-", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _candidates() -> list[list[str]]:
    """Yield commands that may be a C++ compiler, the user's own choice first."""
    chosen = os.environ.get("CXX", "").split()
    commands = [chosen] if chosen else []
    commands += [[name] for name in ("c++", "g++", "clang++")]
    if importlib.util.find_spec("ziglang"):
        commands.append([sys.executable, "-m", "ziglang", "c++"])
    return [command for command in commands if shutil.which(command[0])]


@functools.cache
def compiler() -> tuple[tuple[str, ...], str]:
    """Return the compiler's command and its version line.

    Raises:
        NoCompilerError: no `$CXX`, c++, g++, clang++ or ziglang answers.
    """
    for command in _candidates():
        try:
            answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0 and answer.stdout:
            return tuple(command), answer.stdout.splitlines()[0]
    raise NoCompilerError(
        "The CPU engine needs a C++17 compiler for kernels and found none ($CXX, c++, g++, clang++, ziglang). "
        "Install one: `sudo apt install g++` (Debian, Ubuntu), `xcode-select --install` (macOS), or "
        "`pip install ziglang` (any system, about 100 MB)."
    )


def _is_clang() -> bool:
    command, version = compiler()
    return "clang" in version.lower() or "zig" in " ".join(command)


def _is_gcc_on_linux() -> bool:
    return sys.platform == "linux" and not _is_clang()


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """Return flags for this processor: AVX2 and FMA if available, since a GPU fuses multiply and add."""
    if platform.machine() in ("x86_64", "AMD64") and sys.platform == "linux":
        try:
            flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
        except OSError:
            flags = []
        if {"avx2", "fma", "f16c", "bmi2", "movbe"} <= set(flags):
            return ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mmovbe")
    return ()


@functools.cache
def _headers_hash() -> str:
    """Return a hash of what kernels include; of the engine's own headers they see only one."""
    return _hash_of(sorted([*INCLUDE.rglob("*"), ENGINE / "engine.h"]))


def _hash_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _edits_hash() -> str:
    ours = ("arithmetic.py", "assembly.py", "shared_layout.py", "refusals.py", "host_names.py", "translate.py")
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in ours)).hexdigest()


# Names of header folders, which differ between checkouts, in keys and builds: in __FILE__ and in debug information. A
# name identifies the folder's contents, except for our own folders, whose contents are hashed separately.
_NAMED = {str(INCLUDE): f"{settings.FOLDER}/include", str(ENGINE): f"{settings.FOLDER}/cpp"}
_RENAMES = "-ffile-prefix-map=as-it-is=as-it-is"  # compilers that accept this option can rename folders


def name_folder(folder: Path, name: str) -> None:
    """Give a folder in the options a name that identifies its contents."""
    _NAMED[str(folder)] = name


@functools.cache
def name_by_contents(folder: Path) -> str:
    """Name a folder by a hash over all its files, and return the name."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    name = f"headers/{digest.hexdigest()[:32]}/include"
    name_folder(folder, name)
    return name


def without_paths(text: str) -> str:
    """Replace the paths of folders in a text by their names."""
    for path, name in _NAMED.items():
        text = text.replace(path, name)
    return text


def with_paths(text: str) -> str:
    """Replace the names of folders in a text by their paths."""
    for path, name in _NAMED.items():
        text = text.replace(f"{name}/", f"{path}/")
    return text


def _renaming(options: Sequence[str]) -> list[str]:
    """Return the flags that make the compiler use these names for the folders in the options."""
    if _RENAMES not in flags():
        return []
    return [f"-ffile-prefix-map={path}={name}" for path, name in _NAMED.items() if any(path in o for o in options)]


def _key(parts: Sequence[str]) -> str:
    text = "\0".join(parts)
    return hashlib.sha256((without_paths(text) if _RENAMES in parts else text).encode()).hexdigest()[:32]


# Options that some compilers lack.
_OPTIONAL = (
    _RENAMES,
    "-fno-semantic-interposition",
    "-fno-gnu-unique",  # two modules never share a static variable
    "-fno-finite-loops",  # C++ may delete an endless loop, but here it must stay, to be interrupted
    "-fno-isolate-erroneous-paths-dereference",  # x / 0 divides instead of trapping
    "-fno-strict-float-cast-overflow",  # clang: real numbers saturate when they become integers
    "-gstatement-frontiers",  # an endless loop keeps its line even if the compiler moved its body out
    "-fno-optimize-sibling-calls",  # a fault in memset finds the line that called it
    "-fstack-clash-protection",  # a large local array reaches the guard of its stack
    "-mtls-dialect=" + ("trad" if platform.machine() in ("aarch64", "arm64") else "gnu"),  # see __tls_get_addr
)


@functools.cache
def _granted(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags that the compiler accepts. The answer is kept with the builds."""
    command, version = compiler()
    key = hashlib.sha256("\0".join([version, *command, *flags]).encode()).hexdigest()[:32]
    folder = cache_dir()
    answer = folder / f"flags-{key}.txt"
    if answer.exists():
        return tuple(answer.read_text().split())
    with tempfile.TemporaryDirectory(dir=folder, prefix="asking-") as scratch:

        def takes(*flags: str) -> bool:
            (Path(scratch) / "empty.cpp").write_text("int nothing;\n")
            asked = [*command, "-Werror", *flags, "-c", "empty.cpp", "-o", "empty.o"]
            return subprocess.run(asked, capture_output=True, cwd=scratch).returncode == 0

        def taken(flags: tuple[str, ...]) -> tuple[str, ...]:
            """Bisect a refused list: most compilers refuse one or two of the flags."""
            if takes(*flags):
                return flags
            half = len(flags) // 2
            return (*taken(flags[:half]), *taken(flags[half:])) if half else ()

        granted = taken(flags)
        (Path(scratch) / "flags").write_text("\n".join(granted))
        os.replace(Path(scratch) / "flags", answer)
    return granted


def filling(value: str) -> tuple[str, ...]:
    """Return flags that fill uninitialised local variables with "zero", or with a "pattern" that is NaN (with_nan).

    () if the compiler cannot.
    """
    flag = f"-ftrivial-auto-var-init={value}"
    # Older clangs accept zeros only with a second flag, which newer ones do not know.
    enabling = "-enable-trivial-auto-var-init-zero-knowing-it-will-be-removed-from-clang"
    return _granted((flag,)) or (_granted((flag, enabling)) if _is_clang() else ())


def bounds() -> tuple[str, ...]:
    """Return flags that compare each index with the array's size, if its type has one.

    They also compare each access through a pointer with its array, if the compiler can trace the pointer to it.
    """
    return ("-fsanitize=array-bounds" if _is_clang() else "-fsanitize=bounds-strict", "-fsanitize=object-size")


_NO_FORTIFY = "-U_FORTIFY_SOURCE"
_ANY_TLS = "-DENGINE_ANY_TLS"


def use_any_tls() -> None:
    """Build the engine and kernels without the space that glibc reserves for variables from now on: see ENGINE_TLS."""
    os.environ[settings.variable("ENGINE_FLAGS")] = f"{settings.value('ENGINE_FLAGS')} {_ANY_TLS}"
    engine_library.cache_clear()


def optimisation() -> str:
    """Return the -O level of the fast build: 2, or that of `COURSE_CPU_OPTIMISATION`.

    Level 1 compiles faster, and runs slower; level g takes two thirds of the time of level 1 to compile.

    Raises:
        ValueError: it is not 0 to 3 or g.
    """
    chosen = settings.value("CPU_OPTIMISATION", "2")
    if chosen not in ("0", "1", "2", "3", "g"):
        raise ValueError(f"{settings.variable('CPU_OPTIMISATION')} must be a number from 0 to 3, or g; got {chosen!r}")
    return chosen


def flags(level: int | None = None) -> list[str]:
    """Return the flags of the fast build, with the -O level of `optimisation` or another one.

    No -ffast-math (it makes -INFINITY undefined); -fno-strict-aliasing because kernels cast float* to float4*.
    """
    command, _ = compiler()
    options = ["-std=c++17", f"-O{optimisation() if level is None else level}", "-fPIC", "-pthread"]
    options += ["-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"]
    options += _granted((*_OPTIONAL, *_machine_flags()))
    # DWARF 5 with #line would name the generated file. -g1 is last, because -gdwarf-4 after it asks for types and
    # variables too.
    options += ["-gdwarf-4", "-g1"]
    options += [_ANY_TLS] if _ANY_TLS in settings.value("ENGINE_FLAGS") else []
    options.append(_NO_FORTIFY)  # some systems' g++ defines it, and replaces memcpy by another function
    if command[-2:] == ("ziglang", "c++"):
        options += ["-fno-sanitize=undefined", "-UNDEBUG"]  # zig adds these itself
    return options


def preprocess(text: str, options: list[str]) -> str:
    """Run the preprocessor, and return the text with line markers; "" if it fails."""
    command = [*compiler()[0], "-std=c++17", "-w", *_quoted(), *options, "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def _preprocessed(text: str, options: list[str]) -> str:
    """Return the text with its includes pasted in if it may include the user's files, which can change; else ""."""
    names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M)
    ours = all((INCLUDE / name).exists() or (ENGINE / name).exists() for name in names)
    if ours and not any(re.match("-I.", option) for option in options):
        return ""
    command = [*compiler()[0], *options, "-E", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stdout


def _quoted() -> list[str]:
    """Return options for the folder of quoted includes: the current one, unless it has been removed."""
    try:
        return ["-iquote", os.getcwd()]
    except FileNotFoundError:
        return []


_LINE = re.compile(r'^#line \d+ ".*$', re.M)
OF_THE_SYSTEM = "/* of the system */"  # after the #line of a header that is not part of the source
# Names that the translation has to find, and that must stay unexpanded.
_KEPT = ("__shared__", "__global__", "__device__", "__host__", "__constant__", "__launch_bounds__")
_KEPT += ("__cluster_dims__",)


def may_include_own(code: str, options: Sequence[str]) -> bool:
    """Return True if a source may include the user's files, which can change."""
    return re.search(r'^\s*#\s*include\s*"', code, re.M) is not None or any(re.match("-I.", o) for o in options)


def expanded(before: str, code: str, name: str, extra: list[str]) -> str | None:
    """Return the source with macros expanded and the user's includes pasted in; #line gives the lines.

    before: lines before the source that are not returned. name: the source's name. extra: options. The result is kept
    with the builds if it includes no user's file. None if the preprocessor fails.
    """
    marker = "#pragma engine_source_begins"
    undefined = "".join(f"#undef {word}\n" for word in _KEPT)
    text = f'{before}{undefined}{marker}\n#line 1 "{name}"\n{code}\n'
    options = [*flags(), *extra, *_renaming(extra)]
    target = cache_dir() / f"expanded-{_key([text, compiler()[1], *compiler()[0], *options, _headers_hash()])}.cpp"
    own = not may_include_own(code, extra)
    if own and target.exists():
        return _LINE.sub(lambda line: with_paths(line[0]), target.read_text())
    command = [*compiler()[0], *options, *_quoted(), "-E", "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    # `# 12 "kernel.cu" 2 3` also marks where includes begin and end; the 3 means a system header.
    after = done.stdout.partition(marker + "\n")[2]
    theirs = rf'^# (\d+ "{re.escape(str(INCLUDE))}[^"\n]*"|\d+ "[^"\n]*"(?=.* 3\b)).*$'
    after = re.sub(theirs, rf"#line \1 {OF_THE_SYSTEM}", after, flags=re.M)
    after = re.sub(r'^# (\d+ "[^"\n]*").*$', r"#line \1", after, flags=re.M)
    if own:
        keep(target, _LINE.sub(lambda line: without_paths(line[0]), after))
    return after


def own_parts(expanded: str) -> str:
    """Return a preprocessed source without the headers of the system, the engine and libraries."""
    kept, is_own = [], True
    for line in expanded.splitlines():
        if line.startswith("#line "):
            is_own = OF_THE_SYSTEM not in line and not any(folder in line for folder in _NAMED)
        elif is_own:
            kept.append(line)
    return "\n".join(kept)


def included(expanded: str) -> list[str]:
    """Return the CUDA headers in a preprocessed source, by their names in #include."""
    name = r'^#line \d+ "[^"\n]*/((?:cuda/|cub/|thrust/|cooperative_groups|cuda_)[^"\n]*)"'
    return list(dict.fromkeys(re.findall(name, expanded, re.M)))


# The checked build: every access calls a hook of the engine first. -O1 keeps the source's accesses, line by line; a GPU
# would not make vectorised ones. The library of -fsanitize=thread is not linked, because the engine defines its
# functions.
_CHECKED_GCC = ["--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1"]
# g++ has no hook for a struct that a call returns directly into memory, so calls are kept to a minimum.
_INLINED = ["-findirect-inlining", "-finline-functions", "-finline-small-functions"]
_INLINED += ["--param", "max-inline-insns-auto=400", "--param", "early-inlining-insns=100"]
_CHECKED_CLANG = ["-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-distinguish-volatile=1"]
_CHECKED_CLANG += ["-mllvm", "-tsan-instrument-read-before-write=1"]  # a += 1 reads too


def _checked_flags(profiled: bool) -> list[str]:
    own = [*_CHECKED_CLANG, "-fno-vectorize"] if _is_clang() else [*_CHECKED_GCC, "-fno-tree-vectorize", *_INLINED]
    own.append("-fno-slp-vectorize" if _is_clang() else "-fno-tree-slp-vectorize")
    if not _is_clang() and platform.machine() in ("x86_64", "AMD64"):
        own.append("-mstringop-strategy=libcall")  # memcpy stays a call if it is more than a load and a store
    usual = [flag for flag in flags() if not flag.startswith("-O")]
    if profiled:  # a call in each basic block; blocks stay in source order
        own += ["-fsanitize-coverage=trace-pc", *([] if _is_clang() else ["-fno-reorder-blocks"])]
    sanitized = "-fsanitize=thread,shift-exponent,float-cast-overflow"
    return [*usual, "-O1", sanitized, *own, f"-DENGINE_CHECKED={shared_layout.REDZONE}"]


def _locked(path: Path) -> IO[str] | None:
    while True:
        try:
            file = open(path, "w")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:  # removed by the lock's previous holder: this lock belongs to no file
            continue
        except OSError:  # a file system without locks
            return None


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Admit one process at a time among those that want to write `target`. The lock ends with its process."""
    path = target.with_name(f"{target.name}.lock")
    file = _locked(path) if fcntl else None
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)
            file.close()


_INCLUDE_LINE = re.compile(r'#include ["<]([^">]+)[">]\n')


def system_folders(options: Sequence[str]) -> list[Path]:
    """Return the option folders that are the system's: their headers do not change."""
    return [Path(after) for option, after in itertools.pairwise(options) if option == "-isystem"]


def _first_includes(text: str, folders: list[Path]) -> str:
    """Return the `#include` lines that the text begins with, as long as their headers are in these folders."""
    end = 0
    while (match := _INCLUDE_LINE.match(text, end)) and any((folder / match[1]).is_file() for folder in folders):
        end = match.end()
    return text[:end]


def _precompiled(text: str, options: list[str]) -> tuple[Path | None, str]:
    """Precompile the headers that the text includes first; return that header and the rest of the text.

    A new list of headers may never occur again, so at first only its first header is precompiled. The header is None if
    there is nothing to gain: a compiler other than g++, or macros that the headers may test.
    """
    includes = _first_includes(text, [INCLUDE, *system_folders(options)])
    if not includes or not _is_gcc_on_linux() or any(re.match("-[DU]_", o) and o != _NO_FORTIFY for o in options):
        return None, text
    command, version = compiler()
    # Without the user's folders, and without options that change nothing in the headers' functions: these set all of
    # their locals.
    options = [
        option
        for option in options
        if not re.match("-I.|-ftrivial-auto-var-init|-fsanitize=(?:bounds|object-size)", option)
    ]

    def place(includes: str) -> Path:
        parts = [includes, version, *command, *options, _headers_hash()]
        return cache_dir() / f"headers-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"

    folder, first = place(includes), includes.partition("\n")[0] + "\n"
    met = folder.with_suffix(".met")
    if includes != first and not folder.exists() and not met.exists():
        met.touch()
        includes, folder = first, place(first)
    if not folder.exists():
        with _alone(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
            if not folder.exists():
                _drop_old_headers(folder.parent)
                header = Path(scratch) / "made"
                header.mkdir()
                (header / "engine.h").write_text(includes)
                how = ["-x", "c++-header", "engine.h", "-o", "engine.h.gch"]
                if subprocess.run([*command, *options, *how], capture_output=True, cwd=header).returncode != 0:
                    return None, text
                header.rename(folder)
    return folder / "engine.h", text[len(includes) :]


def _drop_old_headers(folder: Path, days: int = 30) -> None:
    """Delete the headers of an older engine or compiler: each takes 10 MB, and half a second to make."""
    for old in folder.glob("headers-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > days * 86400:
                old.unlink() if old.is_file() else shutil.rmtree(old)


# Names in assembly that only the C++ library has: std's, type information, exceptions, and the operators new and
# delete, except the engine's own, see _OWN.
_OF_THE_CPP_LIBRARY = re.compile(
    r"\b(_Zn(?![wa]m\b)|_Zd(?![la]Pvm?\b)|_ZS|_ZNS|_ZNKS|_ZT|_ZG|__cxa_|__gxx_|__dynamic_cast|_Unwind_)"
)


def _link_flags(assembly: str) -> list[str]:
    options = ["-shared"]
    if sys.platform == "linux":
        options.append("-Wl,-Bsymbolic")  # a kernel may be called sync or send, like functions of the C library
    if sys.platform == "darwin":
        options += ["-undefined", "dynamic_lookup"]
    if _is_clang():
        options.append("-gdwarf-4")  # its assembler would write another version's line table
    if _is_gcc_on_linux() and not _OF_THE_CPP_LIBRARY.search(assembly):
        options += ["-nodefaultlibs", "-lm", "-lgcc", "-lc"]  # a linker spends most time reading what is never called
    return options


# What the kernel of an attention step calls: the engine, its instrumentation, and a few mathematical functions.
_USUAL_CALLS = re.compile(
    r"engine_\w+|__(?:tsan|ubsan|sanitizer|tls_get)_\w+|(?:exp2?|log2?|pow|sqrt|floor|ceil|trunc|nearbyint|rint|fmod)f?"
)


@functools.cache
def _binutils() -> tuple[str, str, str] | None:
    """Return the assembler, the linker and the mathematical library of g++; None if they are not known."""
    if not _is_gcc_on_linux() or platform.machine() not in ("x86_64", "AMD64"):
        return None
    asked = ("-print-prog-name=as", "-print-prog-name=ld", "-print-file-name=libm.so.6")
    answers = [
        subprocess.run([*compiler()[0], question], capture_output=True, text=True).stdout.strip() for question in asked
    ]
    usable = all(shutil.which(program) for program in answers[:2]) and os.path.isabs(answers[2])
    return (answers[0], answers[1], answers[2]) if usable else None


def _quick_link(assembly: str) -> tuple[str, str, str] | None:
    """Return the commands for a kernel that calls nothing unusual: without g++ linking takes half the time.

    Most of g++'s extra time goes into reading the C library's symbols, which such a kernel does not need.
    """
    defined = set(re.findall(r"^([\w.$]+):", assembly, re.M))
    # The lines with calls first: elsewhere the pattern tries every letter of names that may be thousands long.
    lines = "\n".join(line for line in assembly.splitlines() if "@PLT" in line or "@GOT" in line)
    called = set(re.findall(r"([\w.$]+)@(?:PLT|GOT)", lines)) - defined
    return _binutils() if all(_USUAL_CALLS.fullmatch(name) for name in called) else None


# Functions that a kernel calls and the engine replaces by its own, engine_own_*: to end the process, memory, and the
# operators new and delete, by their linker names.
_OWN = ("exit", "_Exit", "quick_exit", "malloc", "free", "_Znwm", "_Znam", "_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZdaPvm")
_OWN_CALLS = "".join(f".set {name}, engine_own_{name}\n" for name in _OWN)


def _compile_objects(texts: Sequence[str], options: list[str], output: Path) -> tuple[bool, str]:
    """Compile texts in parallel, and link them; like `_compile`."""
    command, scratch = compiler()[0], output.parent
    objects, running = [], []
    for i, text in enumerate(texts):
        source = scratch / f"part{i}.cpp"
        source.write_text(text)
        objects.append(str(source.with_suffix(".o")))
        how = [*command, *options, "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(how, stderr=subprocess.PIPE, text=True, cwd=scratch))
    try:
        diagnostics = "".join([process.communicate()[1] for process in running])
    except BaseException:  # an interrupt ends all of them
        for process in running:
            process.kill()
        raise
    if any(process.returncode != 0 for process in running):
        return False, diagnostics
    # (Without C++ symbols the C++ library would not be linked, but the engine needs it.)
    link = [*command, *options, *objects, "-o", str(output), *_link_flags("_ZS")]
    done = subprocess.run(link, capture_output=True, text=True, cwd=scratch)
    return done.returncode == 0, diagnostics + done.stderr


def _compile(text: str, options: list[str], checked: str, output: Path) -> tuple[bool, str]:
    """Compile and link `text` in the folder of `output`; return whether that worked, and the output."""
    if OBJECT_ENDS in text:
        return _compile_objects(text.split(OBJECT_ENDS), options, output)
    command, scratch = compiler()[0], output.parent
    source, compiled = scratch / "kernel.cpp", scratch / "kernel.s"
    source.write_text(text)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=scratch)

    if not checked and sys.platform != "linux":
        done = run(*options, *_link_flags(""), str(source), "-o", str(output))
        return done.returncode == 0, done.stderr
    done = run(*options, "-S", str(source), "-o", str(compiled))
    if done.returncode != 0:
        return False, done.stderr
    assembly = compiled.read_text("latin-1")  # strings in the debug information need not be valid text
    of_kernels = "engine_anchor" in assembly  # not for the engine itself
    if of_kernels:
        assembly = shared_layout.laid_out(assembly, backwards=not _is_clang(), redzones=bool(checked))
    if checked:
        assembly = instrumented(assembly)
    if "-ftrivial-auto-var-init=pattern" in options and not _is_clang():
        assembly = with_nan(assembly)
    if checked == "profiled" and not _is_clang() and platform.machine() in ("x86_64", "AMD64"):
        assembly = with_flop(assembly)  # (clang omits blocks that others imply)
    if of_kernels:
        assembly = _OWN_CALLS + assembly
    compiled.write_text(assembly, "latin-1")
    if programs := _quick_link(assembly):
        assembler, linker, mathematics = programs
        object_file = str(scratch / "kernel.o")
        quick = [assembler, str(compiled), "-o", object_file]
        link = [linker, "-shared", "-Bsymbolic", "--eh-frame-hdr", object_file, mathematics, "-o", str(output)]
        if all(subprocess.run(command, capture_output=True, cwd=scratch).returncode == 0 for command in (quick, link)):
            return True, done.stderr
    linked = run(str(compiled), "-o", str(output), *_link_flags(assembly))
    return linked.returncode == 0, done.stderr + linked.stderr


def _silent_conversions(text: str, options: list[str]) -> str:
    """Return the warnings about real numbers that silently become integers, with each expression's range."""
    ranges = "-fdiagnostics-print-source-range-info" if _is_clang() else "-fdiagnostics-format=json"
    how = [arithmetic.SILENT, "-fsyntax-only", ranges, "-x", "c++", "-"]
    return subprocess.run([*compiler()[0], *options, *how], input=text, capture_output=True, text=True).stderr


def _own_and_target(
    text: str, extra: list[str], kind: str, checked: str, expand_key: str, plain: str | None
) -> tuple[list[str], Path]:
    """Return the flags of a build, and the file that keeps it."""
    command, version = compiler()
    # The engine itself has its own level: see _engine_source.
    usual = flags(3 if _is_clang() else 1) if kind == "engine" else flags()
    own = [*(_checked_flags(checked == "profiled") if checked else usual), *extra, *_renaming(extra)]
    parts = [text, plain or "", version, *command, *own, _headers_hash(), _edits_hash()]
    parts += [_preprocessed(text, [*own, *_quoted()]), expand_key]
    return own, cache_dir() / f"{kind}-{_key(parts)}.so"


# Of a refusal: it names a line with an error. And: it may change later, with more memory or an installed header.
_IN_A_LINE = re.compile(r":\d+: error: ")
_OF_THE_MACHINE = re.compile(
    r"fatal error: |internal compiler error|[Kk]illed|No space left|[Mm]emory exhausted|out of memory"
)


def build(
    text: str,
    extra: list[str],
    kind: str = "kernel",
    *,
    checked: str = "",
    expand: Callable[[str, list[str]], tuple[str, str]] | None = None,
    expand_key: str = "",
    plain: str | None = None,
    refuse: Callable[[], str] = str,
    forbid: Callable[[str], str] | None = None,
) -> tuple[Path | None, str]:
    """Compile C++ `text` into a shared library, or take it from the cache.

    Quoted includes are looked up in the current folder, as in NVRTC.

    Args:
        checked: "checked": every memory access calls the engine's checker; "profiled": every basic block as well.
        expand: (text, flags) -> the text to compile instead, "" if that failed; and diagnostics. It is called only if
            there is something to build, so expand_key contains what else it depends on.
        plain: compiled if the compiler refuses `text`, which is this text with the edits of arithmetic.py. With it,
            real numbers that silently become integers are edited too.
        refuse: called before anything is compiled; a result other than "" is the error, and nothing is compiled.
        forbid: gets the compiler's warnings, including pedantic ones; a result other than "" is the error.

    Returns:
        (path, diagnostics): path is None when the compiler refused, diagnostics is what it printed. Refusals are cached
        like builds, because reading CuTe's headers takes a quarter of a minute in any case.
    """
    own, target = _own_and_target(text, extra, kind, checked, expand_key, plain)
    options, refusal = [*own, *_quoted()], target.with_suffix(".refused")

    def kept() -> tuple[Path | None, str] | None:
        if target.exists():
            return target, ""
        return (None, with_paths(refusal.read_text())) if refusal.exists() else None

    if answer := kept():
        return answer
    with _alone(target), tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        if answer := kept():  # another process has built it meanwhile
            return answer
        refused = refuse()
        if refused:
            return None, refused
        output = Path(scratch) / "kernel.so"
        compiled = text

        def attempt(text: str, *warnings: str) -> tuple[bool, str]:
            nonlocal compiled
            if expand:
                text, diagnostics = expand(text, options)
                if not text:
                    return False, diagnostics
            compiled = text
            header, rest = (None, text) if expand else _precompiled(text, own)
            included = ["-include", str(header)] if header else []
            good, diagnostics = _compile(rest, [*options, *warnings, *included], checked, output)
            if not good and header and not _IN_A_LINE.search(diagnostics):
                # No error is in a line of the source: was the precompiled header damaged by a crash or a full disk?
                good, diagnostics = _compile(text, [*options, *warnings], checked, output)
                if good:
                    shutil.rmtree(header.parent, ignore_errors=True)
            return good, diagnostics

        if plain is None:
            good, diagnostics = attempt(text, "-w")
        else:
            pedantic = ["-Wpedantic"] if forbid else []
            good, diagnostics = attempt(text, *(["-w"] if expand else [arithmetic.SILENT, *pedantic]))
            if good and forbid and (refused := forbid(diagnostics)):
                return None, refused
            silent = good and arithmetic.SILENT in diagnostics
            softer = arithmetic.with_soft_conversions(text, _silent_conversions(text, options)) if silent else text
            if softer != text and not attempt(softer)[0]:
                good, _ = attempt(text)
            if not good and plain != text:
                good, diagnostics = attempt(plain)
        if not good:
            if _IN_A_LINE.search(diagnostics) and not _OF_THE_MACHINE.search(diagnostics):
                keep(refusal, without_paths(diagnostics))
            return None, diagnostics
        if set(bounds()) & set(extra):
            keep(target.with_suffix(".cpp"), compiled)
        os.replace(output, target)
    return target, diagnostics


def compiled_text(library: Path) -> str:
    """Return the text of a build with `bounds`, edited as it was compiled, because messages give its columns.

    "" if the cache has lost it.
    """
    text = library.with_suffix(".cpp")
    return text.read_text() if text.exists() else ""


def warnings(text: str, extra: list[str]) -> str:
    """Compile C++ that is known to be accepted, and return the compiler's warnings, which are kept with the builds."""
    own = [*flags(), *extra, *_renaming(extra)]
    asked = [text, compiler()[1], *compiler()[0], *own, _headers_hash(), _preprocessed(text, [*own, *_quoted()])]
    answer = cache_dir() / f"warnings-{_key(asked)}.txt"
    if answer.exists():
        return with_paths(answer.read_text())
    header, rest = _precompiled(text, own)  # that of the fast build
    command = [*compiler()[0], *own, *_quoted(), *(["-include", str(header)] if header else [])]
    command += ["-Wall", "-fsyntax-only", "-x", "c++", "-"]
    said = subprocess.run(command, input=rest, capture_output=True, text=True).stderr
    keep(answer, without_paths(said))
    return said


# Two objects, compiled in parallel: one runs kernels, the other analyses checked runs. Each is one text, so that every
# switch of fibers and every access is inlined across files. worker.h comes first: it sets macros for the system's
# headers, before any of them is read.
OBJECT_ENDS = "\n/* the next object */\n"
_PARTS: tuple[str, ...] = (
    "trace",
    "kernel_calls",
    "scheduler",
    "residents",
    "clusters",
    "async_copies",
    "mbarriers",
    "tensor_copies",
    "failure",
    "division",
)
_PARTS += ("faults", "memory", "launch", "tensor_core", "tensor_other", "warpgroups", "tensor_warpgroup")
_PARTS += ("tensor_eights", "rounding", "board")
_CHECKER: tuple[str, ...] = ("checker_lists", "checker_clocks", "checker_order", "checker_notes", "checker_mbarriers")
_CHECKER += ("checker_access", "checker_hooks", "checker_async", "checker_profile", "checker_local", "checker")

# Files whose product loops need more. The rest is as fast at -O1, which g++ compiles in half the time: the first test
# on a new machine waits for this build.
_PRODUCTS = ("tensor_core", "tensor_other", "tensor_warpgroup", "tensor_eights")


def _part(name: str) -> str:
    """Return the text of a part of the engine; g++ gets the part's level, other compilers have one level for all."""
    text = f'#line 1 "{name}.cpp"\n{(ENGINE / name).with_suffix(".cpp").read_text()}'
    if name not in _PRODUCTS or _is_clang():
        return text
    return f'#pragma GCC push_options\n#pragma GCC optimize("O2")\n{text}\n#pragma GCC pop_options'


def _engine_source() -> tuple[str, list[str]]:
    """Return the engine's text, and the extra flags that it needs."""
    checker = '#include "worker.h"\n' + "\n".join(map(_part, _CHECKER))
    text = "\n".join(map(_part, _PARTS)) + OBJECT_ENDS + checker
    return text, ["-I", str(ENGINE), *settings.value("ENGINE_FLAGS").split()]


def _engine_headers_hash() -> str:
    return _hash_of(sorted(ENGINE.glob("*.h")))


def engine_is_built() -> bool:
    """Return True if `engine_library` is in the cache; compiling it takes half a minute.

    Raises:
        NoCompilerError: as for `compiler`.
    """
    text, extra = _engine_source()
    return _own_and_target(text, extra, "engine", "", _engine_headers_hash(), None)[1].exists()


@functools.cache
def engine_library() -> Path:
    """Compile the engine itself, once for this machine and compiler, and return the library.

    `$COURSE_ENGINE_FLAGS` adds to its flags: -DENGINE_UCONTEXT switches fibers the way other processors do.

    Raises:
        CompileError: the compiler cannot build the engine (too old for C++17, for instance).
    """
    text, extra = _engine_source()
    path, diagnostics = build(text, extra, kind="engine", expand_key=_engine_headers_hash())
    if path is None:
        raise CompileError(f"{compiler()[1]} could not build the CPU engine:\n{diagnostics}")
    return path

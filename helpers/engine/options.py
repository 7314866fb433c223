"""Translate a module's NVRTC options for a host compiler."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

from .compiler import CompileError

# NVRTC 12.9's options that only affect a GPU's code or NVRTC's messages, in all accepted spellings.
_FLAGS = set(
    """--device-c -dc --device-w -dw --extensible-whole-program -ewp --device-debug -G -dlto --dlink-time-opt
    -gen-opt-lto --gen-opt-lto -optix-ir --optix-ir --generate-line-info -lineinfo -use_fast_math
    --use_fast_math -extra-device-vectorization --extra-device-vectorization -no-source-include
    --no-source-include --disable-warnings -w -restrict --restrict --device-as-default-execution-space
    -default-device -device-int128 --device-int128 --display-error-number -err-no --no-display-error-number
    -no-err-no -fdevice-syntax-only --fdevice-syntax-only -minimal --minimal -no-cache --no-cache -pch --pch""".split()  # noqa: SIM905
)
_BOOLEANS = (
    r"--?(?:ftz|prec-sqrt|prec-div|fmad|modify-stack-limit|builtin-move-forward|builtin-initializer-list|pch-messages|"
    r"pch-verbose|instantiate-templates-in-pch|device-stack-protector)|--version-ident|--brief-diagnostics|-brief-diag|"
    r"--relocatable-device-code|-rdc"
)
_VALUED = re.compile(
    rf"(?:{_BOOLEANS})=(?:true|false)|(?:--gpu-architecture|-arch)=(?:sm|compute|lto)_\d+[af]?|--?maxrregcount=\d+|"
    r"(?:--ptxas-options|-Xptxas)=.+|--?dopt=on|--?split-compile=\d+|--?diag-(?:error|suppress|warn)=[\d,]+|"
    r"--optimization-info=\w+|-opt-info=\w+|--jump-table-density=\d+|-jtd=\d+|(?:--Ofast-compile|-Ofc)=\w+|"
    r"--?(?:time|create-pch|use-pch|pch-dir|frandom-seed|fdevice-time-trace)=.+"
)
_WITH_A_VALUE_BEHIND = {"--ptxas-options", "-Xptxas"}
_OF_NVCC = re.compile(
    r"-(O[0-3]|-?optimize.*|-?expt-.*|m64|-?extended-lambda|t\d+|-?threads.*|-?(?:ptxas-options|Xptxas|maxrregcount|ftz|"
    r"prec-div|prec-sqrt|fmad|dopt|rdc|relocatable-device-code|split-compile|arch|gpu-architecture|gencode|"
    r"generate-line-info|lineinfo|restrict|use_fast_math)\b.*)$"
)

_STANDARDS = (r"--?std=(c\+\+(?:03|11|14|17|20))", r"--?std=(c\+\+\d\w)")  # for NVRTC, for nvcc

_LONG = {"--define-macro": "-D", "--include-path": "-I", "--undefine-macro": "-U"}


def for_host(options: Iterable[str], backend: str = "nvrtc") -> tuple[list[str], str]:
    """Translate NVRTC's options to a host compiler's and to preprocessor lines.

    Those that only affect a GPU's code are dropped.

    Macros become lines after the engine's own headers, so that -DN=64 does not change an N there.

    Raises:
        CompileError: an option that NVRTC does not know either, or that the engine does not support.
    """
    if isinstance(options, str):
        raise TypeError(f"options is a tuple of strings, not one string: options=({options!r},)")
    flags, macros, waiting = [], [], ""
    for option in map(str.strip, options):  # NVRTC ignores blanks around an option
        if option in (*_LONG, *_LONG.values()) and not waiting:
            waiting = _LONG.get(option, option)
            continue
        for long, short in _LONG.items():
            option = short + option[len(long) + 1 :] if option.startswith(f"{long}=") else option
        if waiting == "-Xptxas":
            waiting = ""
            continue
        if option in _WITH_A_VALUE_BEHIND:
            waiting = "-Xptxas"
            continue
        option, waiting = waiting + option, ""
        kind, value = option[:2], option[2:].lstrip()
        if kind == "-I" and value:
            with contextlib.suppress(FileNotFoundError):  # a path relative to a removed current folder
                flags.append("-I" + os.path.abspath(value))  # the compiler runs in another folder
        elif kind in ("-D", "-U") and re.match(r"__|NDEBUG\b", value):
            flags.append(option)  # a macro of the language, such as __CUDA_NO_HALF_OPERATORS__: for the headers too
        elif kind == "-D" and value:
            name, equals, text = value.partition("=")
            macros.append(f"#define {name} {text if equals else 1}\n")
        elif kind == "-U" and value:
            macros.append(f"#undef {value}\n")
        elif match := re.fullmatch(r"(?:--pre-include|-include)=(.+)", option):
            macros.append(f'#include "{match.group(1)}"\n')
        elif match := re.fullmatch(_STANDARDS[backend == "nvcc"], option):
            flags.append(f"-std={max(match.group(1), 'c++17')}")  # the engine's own headers need C++17
        elif (
            option not in _FLAGS
            and not _VALUED.fullmatch(option)
            and not (backend == "nvcc" and _OF_NVCC.match(option))
        ):
            raise CompileError(
                f"unrecognized option {option!r}: NVRTC does not take it either. Of its options the CPU engine follows "
                "-D, -I, -U, -include and -std=c++NN; those that steer a GPU's code have no effect here"
            )
    if waiting:
        raise CompileError(f"the option {waiting} comes last and has no value")
    return flags, "".join(macros)

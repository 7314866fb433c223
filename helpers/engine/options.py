"""NVRTC's options, as a module is given them, for a host compiler."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from .compiler import CompileError

_GPU_ONLY = re.compile(
    r"-(-?use_fast_math|lineinfo|-?generate-line-info|G|-device-debug|arch.*|-gpu-architecture.*|-?ptxas-options.*|"
    r"Xptxas.*|-?maxrregcount.*|-?ftz.*|-?prec-div.*|-?prec-sqrt.*|-?fmad.*|-?extra-device-vectorization|w|-?dopt.*|"
    r"dc|-?relocatable-device-code.*|-?rdc.*|-?restrict|-?device-as-default-execution-space|-?default-device|"
    r"-?split-compile.*|-?jit.*)$"
)

_OF_NVCC = re.compile(r"-(O[0-3]|-?optimize.*|-?expt-.*|m64|-?extended-lambda|t\d+|-?threads.*)$")

_LONG = {"--define-macro": "-D", "--include-path": "-I", "--undefine-macro": "-U"}


def for_host(options: Iterable[str], backend: str = "nvrtc") -> tuple[list[str], str]:
    """NVRTC's options as (a host compiler's, preprocessor lines). Those that only steer a GPU's code are dropped.

    Macros become lines after the engine's own headers, which they must not change: -DN=64 leaves their N alone.

    Raises:
        CompileError: an option that NVRTC does not know either, or that the engine cannot follow.
    """
    if isinstance(options, str):
        raise TypeError(f"options is a tuple of strings, not one string: options=({options!r},)")
    flags, macros, waiting = [], [], ""
    for option in options:
        if option in (*_LONG, *_LONG.values()) and not waiting:
            waiting = _LONG.get(option, option)
            continue
        for long, short in _LONG.items():
            option = short + option[len(long) + 1 :] if option.startswith(f"{long}=") else option
        option, waiting = waiting + option, ""
        kind, value = option[:2], option[2:]
        if kind == "-I" and value:
            flags.append("-I" + os.path.abspath(value))  # the compiler runs in another folder
        elif kind in ("-D", "-U") and re.match(r"__|NDEBUG\b", value):
            flags.append(option)  # the language's own, such as __CUDA_NO_HALF_OPERATORS__: for the headers too
        elif kind == "-D" and value:
            name, equals, text = value.partition("=")
            macros.append(f"#define {name} {text if equals else 1}\n")
        elif kind == "-U" and value:
            macros.append(f"#undef {value}\n")
        elif match := re.fullmatch(r"--?std=(c\+\+\d\w)", option):
            flags.append(f"-std={max(match.group(1), 'c++17')}")  # the engine's own headers need 17
        elif not _GPU_ONLY.match(option) and not (backend == "nvcc" and _OF_NVCC.match(option)):
            raise CompileError(f"unrecognized option {option!r}; the CPU engine takes -D, -I, -U and -std=c++NN")
    if waiting:
        raise CompileError(f"the option {waiting} comes last and has no value")
    return flags, "".join(macros)

"""Names of the C and C++ libraries that the engine's headers provide, and NVRTC does not.

The engine's headers include the host's, so `uint32_t`, `INFINITY` and `std::swap` exist without an include. On a GPU
they do not: NVRTC has none of the host's headers, and only those members of std that `IN_STD` names. So the names of
this kind that a source uses are hidden before its first line. A macro is undefined, so that `#ifndef M_PI` gives a
GPU's answer; a type or a function is renamed, so that a source may declare its own. Names that come with NVRTC's own
headers stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from .cuda_source.source import matching_bracket
from .translate import function_bodies

PREFIX = "engine_host_"
IN_STD = ("align_val_t", "forward", "initializer_list", "move")

_SIZES = (8, 16, 32, 64)
_KINDS = [f"{kind}{size}" for kind in ("", "_fast", "_least") for size in _SIZES] + ["max", "ptr"]
_INTEGERS = {f"{sign}int{kind}_t" for sign in ("", "u") for kind in _KINDS}
_LIMITS = {
    f"{name.upper()[:-2]}_{end}" for name in _INTEGERS for end in ("MAX", "MIN") if end == "MAX" or name[0] == "i"
}
_LIMITS |= {f"{sign}INT{kind}_C" for sign in ("", "U") for kind in (*_SIZES, "MAX")} | {"SIZE_MAX", "PTRDIFF_MAX"}
_LIMITS |= {"PTRDIFF_MIN", "SSIZE_MAX", "MB_LEN_MAX", "OFFSET_MAX", "CHAR_BIT", "WCHAR_MAX", "WCHAR_MIN"}
_LIMITS |= {f"{name}_{end}" for name in ("CHAR", "SCHAR", "SHRT", "INT", "LONG", "LLONG") for end in ("MAX", "MIN")}
_LIMITS |= {f"{name}_MAX" for name in ("UCHAR", "USHRT", "UINT", "ULONG", "ULLONG")}
_REALS = {"INFINITY", "NAN", "HUGE_VAL", "HUGE_VALF", "HUGE_VALL"}
_CONSTANTS = {
    f"M_{name}{end}"
    for name in "E LOG2E LOG10E LN2 LN10 PI PI_2 PI_4 1_PI 2_PI 2_SQRTPI SQRT2 SQRT1_2".split()  # noqa: SIM905
    for end in ("", "f", "l")
}
_TIMES = {"time_t", "timespec"}
_OTHER_MACROS = set(
    """offsetof MAXFLOAT RAND_MAX EOF BUFSIZ EXIT_SUCCESS EXIT_FAILURE CLOCKS_PER_SEC FP_NAN FP_INFINITE FP_ZERO
    FP_SUBNORMAL FP_NORMAL FP_ILOGB0 FP_ILOGBNAN PATH_MAX stdin stdout stderr""".split()  # noqa: SIM905
)
_OTHER_TYPES = set(
    """uint ulong ushort u_char u_short u_int u_long u_int8_t u_int16_t u_int32_t u_int64_t ssize_t off_t pid_t FILE
    div_t ldiv_t lldiv_t float_t double_t max_align_t nullptr_t timeval tm clockid_t""".split()  # noqa: SIM905
)
# Those that a source calls and does not declare. Of the others of their kind an error says as much.
_FUNCTIONS = set(
    """abort aligned_alloc atoi atof atol atoll atexit bcmp bcopy bzero bsearch calloc ctime difftime div drand48 exit
    exp10l expl fabsl fclose fflush ffs ffsl ffsll finite fopen fpclassify fprintf fputc fputs fread free_sized fwrite
    getc getchar getenv gmtime isgreater isgreaterequal isinff isless islessequal islessgreater isnanf isnormal
    isunordered ldiv lldiv localtime logl log2l log10l fmal fmaxl fminl floorl ceill roundl truncl lrand48 memccpy
    memchr memcmp memmem memmove mempcpy mktime mrand48 nanosleep perror posix_memalign powl putc putchar puts qsort
    quick_exit rand rand_r random realloc remove rewind roundeven roundevenf scanf select setenv sinl cosl tanl
    snprintf sprintf sqrtl srand srand48 srandom sscanf stpcpy strcasecmp strcat strchr strcmp strcoll strcpy strcspn
    strdup strerror
    strftime strlen strncat strncmp strncpy strndup strnlen strpbrk strrchr strspn strstr strtod strtof strtok strtol
    strtold strtoll strtoul strtoull system time vfprintf vsnprintf vsprintf clock_gettime""".split()  # noqa: SIM905
)
# Of a host's compiler: of its own functions NVRTC has only these.
_BUILTINS = set(
    """expect unreachable assume isnan isinf isfinite signbit is_constant_evaluated assume_aligned bit_cast addressof
    LINE FILE FUNCTION COLUMN va_start va_end va_arg va_copy va_list rotateleft32 choose_expr types_compatible_p shuffle
    shufflevector convertvector copysign""".split()  # noqa: SIM905
)
_OF_COMPILERS = {"__typeof__", "__typeof", "__COUNTER__", "_Complex", "_Float16", "__float128", "__int128", "alloca"}
_MACROS = _LIMITS | _REALS | _CONSTANTS | _OTHER_MACROS
_TYPES = _INTEGERS | _TIMES | _OTHER_TYPES
_OF_CFLOAT = {
    f"{kind}_{name}"
    for kind in ("FLT", "DBL", "LDBL")
    for name in "MAX MIN EPSILON DIG MANT_DIG MAX_EXP MIN_EXP TRUE_MIN RADIX".split()  # noqa: SIM905
}

_WORD = re.compile(r"\b[A-Za-z_]\w*\b")
_BRINGS_MOST = re.compile(r"(?:cuda|cub|thrust|nv|cute|cutlass)/|cooperative_groups|cuda_pipeline")
_BRINGS_LITTLE = {  # of the headers that the pattern above takes
    "cuda/std/cassert": set[str](),
    "cuda/std/initializer_list": set[str](),
    "cuda/std/cfloat": set[str](),
    "cuda/std/climits": _LIMITS,
    "cuda/std/cstddef": {"offsetof"},
}
_REALS_COME_WITH = re.compile(r"cuda/std/(?:cmath|complex)$|(?:cub|thrust|cute|cutlass)/")


def _brought(headers: Iterable[str]) -> set[str]:
    """Return the names that a source has from CUDA's own headers."""
    names: set[str] = set()
    for header in headers:
        if header in _BRINGS_LITTLE:
            names |= _BRINGS_LITTLE[header]
        elif _BRINGS_MOST.match(header):
            names |= _INTEGERS | _LIMITS | _TIMES | {"offsetof"}
        if _REALS_COME_WITH.match(header):
            names |= _REALS
        if header == "cupy/carray.cuh":
            names |= _CONSTANTS
    return names


_TEMPLATE = re.compile(r"\btemplate\s*<(?!\s*>)")
_CLASS_TEMPLATE = re.compile(r"\btemplate\s*<(?!\s*>)[^;{}]*>\s*(?:struct|class)\s+(\w+)[^;{}()]*\{")


def without_unused_templates(clean: str, expressions: Iterable[str] = ()) -> str:
    """Blank the bodies of templates that are never used: NVRTC does not read them.

    expressions: the name expressions, which use templates.
    """
    if not _TEMPLATE.search(clean):
        return clean
    count = Counter(_WORD.findall(" ".join([clean, *expressions])))
    classes = [
        (match.start(), matching_bracket(clean, match.end() - 1, "{", "}"), match[1])
        for match in _CLASS_TEMPLATE.finditer(clean)
    ]
    for begin, end, head in reversed(function_bodies(clean)):
        around = [name for first, last, name in classes if first < begin < last]
        named = re.findall(r"(\w+)\s*\(", head)
        is_template = bool(around) or _TEMPLATE.search(head) is not None
        if is_template and any(count[name] == 1 for name in [*named[-1:], *named[:1], *around]):
            clean = clean[: begin + 1] + re.sub(r"[^\n]", " ", clean[begin + 1 : end]) + clean[end:]
    return clean


def hidden(clean: str, headers: Iterable[str], *, kernels: Iterable[str] = (), options: Iterable[str] = ()) -> str:
    """Return lines that hide the names which a source uses and a GPU's compiler lacks; "" if it uses none.

    Args:
        clean: the source without comments. headers: that it includes. kernels: whose names stay as they are.
        options: the source's: one of NVRTC's brings __int128, another __float128.
    """
    words = set(_WORD.findall(clean))
    of_compilers = (words & _OF_COMPILERS) | {
        word for word in words if word.startswith("__builtin_") and word[len("__builtin_") :] not in _BUILTINS
    }
    of_compilers -= {f"__{option.rpartition('device-')[2]}" for option in options}
    used = (words & (_MACROS | _TYPES | _FUNCTIONS)) | of_compilers
    lines = []
    if re.search(r"\bvoid\s+main\s*\(", clean):  # a host's compiler demands an int
        lines.append(f"#define main {PREFIX}main\n")
    for name in sorted(used - _brought(headers) - set(kernels)):
        if name in of_compilers:
            lines += [f"#undef {name}\n", f"#define {name} {PREFIX}{name}\n"]
            continue
        if name in _MACROS:
            lines.append(f"#undef {name}\n")
            if name not in ("stdin", "stdout", "stderr"):  # which are also variables
                continue
        is_called = re.search(rf"(?<![\w.>]){name}\s*\(", clean)
        if name in (*_TYPES, *_OTHER_MACROS) or (is_called and not _declares(clean, name)):
            lines.append(f"#define {name} {PREFIX}{name}\n")
    return "".join(lines)


def _declares(clean: str, name: str) -> bool:
    """Return True if the word before the name can be a type, as in `int rand() {` or `float time;`."""
    before = re.finditer(rf"([A-Za-z_]\w*|[*&>])\s*\b{name}\s*[(\[=;,){{]", clean)
    return any(word[1] not in ("return", "else", "case", "do", "*", "&", ">") for word in before)


# What `using namespace std` gives a source; the others are functions of real numbers, which are there without it.
_USING_STD = ("swap", "pair", "make_pair", "tuple", "is_same", "enable_if_t", "conditional_t", "exchange", "declval")


def outside_of_std(clean: str) -> Iterator[tuple[int, str]]:
    """Return the place and the name of a member of std that NVRTC's std lacks."""
    if re.search(r"\bnamespace\s+std\s*[{=]|\busing\s+namespace\s+(?:::\s*)?cuda\s*;", clean):
        return  # it has one of its own
    for match in re.finditer(r"std\s*::\s*(\w+)", clean):
        before = clean[: match.start()].rstrip()
        if re.search(r"\w$", clean[: match.start()]) or re.search(r"[\w>]\s*::$", before):
            continue  # cuda::std
        if match[1] not in IN_STD:
            yield match.start(), match[1]
    if re.search(r"\busing\s+namespace\s+std\s*;", clean):
        for name in _USING_STD:
            for match in re.finditer(rf"(?<![\w.>:]){name}\s*[(<]", clean):
                if not re.search(rf"\b(?!return\b|else\b)\w+[\s*&]+{name}\s*[(<]|\b(?:struct|class)\s+{name}\b", clean):
                    yield match.start(), name


# ---------------------------------------------------------------- what is said of them

_INSTEAD = {
    "INFINITY": "write __int_as_float(0x7f800000), or include <math_constants.h> for CUDART_INF_F",
    "HUGE_VALF": "write __int_as_float(0x7f800000), or include <math_constants.h> for CUDART_INF_F",
    "HUGE_VAL": "write __longlong_as_double(0x7ff0000000000000), or include <math_constants.h> for CUDART_INF",
    "NAN": "write __int_as_float(0x7fffffff), or include <math_constants.h> for CUDART_NAN_F",
    "M_PI": "write 3.14159265f, or include <math_constants.h> for CUDART_PI_F and CUDART_PI",
    "uint": "write unsigned int",
    "u_int": "write unsigned int",
    "ushort": "write unsigned short",
    "ulong": "write unsigned long",
    "ssize_t": "write long long",
    "FILE": "printf is built in, and writes to the host's output",
    "fprintf": "printf is built in, and writes to the host's output",
    "puts": "printf is built in",
    "putchar": "printf is built in",
    "exit": "return ends a thread, __trap() the launch",
    "abort": "return ends a thread, __trap() the launch",
    "memmove": "memcpy and memset are built in",
    "memcmp": "memcpy and memset are built in; write the loop",
    "strlen": "write the loop",
    "rand": "make random numbers on the host, or hash the index",
    "time": "clock64() counts a multiprocessor's cycles",
    "offsetof": "include <cuda/std/cstddef>",
}
_INSTEAD_IN_STD = {
    **dict.fromkeys(("min", "max"), "min and max are built in: leave std:: out"),
    "swap": "include <cuda/std/utility> and write cuda::std::swap, or swap by a third variable",
    "numeric_limits": "include <cuda/std/limits> and write cuda::std::numeric_limits",
    "size_t": "size_t is built in: leave std:: out",
    "printf": "printf is built in: leave std:: out",
}
_IN_CUDA_STD = {
    "cuda/std/type_traits": r"is_\w+|remove_\w+|add_\w+|enable_if\w*|conditional\w*|integral_constant|true_type|"
    r"false_type|decay\w*|void_t|make_(?:un)?signed\w*|underlying_type\w*|common_type\w*",
    "cuda/std/utility": r"pair|make_pair|exchange|declval|(?:make_)?(?:index|integer)_sequence\w*|as_const",
    "cuda/std/tuple": r"tuple\w*|make_tuple|tie|get|apply",
    "cuda/std/array": r"array",
    "cuda/std/cstdint": r"u?int\w*_t",
    "cuda/std/cstddef": r"byte|ptrdiff_t|nullptr_t|max_align_t",
    "cuda/std/functional": r"plus|minus|multiplies|less|greater|reference_wrapper",
    "cuda/std/optional": r"optional|nullopt",
    "cuda/std/complex": r"complex",
}


def of_std(name: str) -> str:
    """Return the message for a name of std's."""
    header = next((header for header, names in _IN_CUDA_STD.items() if re.fullmatch(names, name)), "")
    hint = _INSTEAD_IN_STD.get(name) or (
        f"include <{header}> and write cuda::std::{name}"
        if header
        else "CUDA's functions of real numbers are built in: leave std:: out"
        if re.match(r"(?:a?(?:sin|cos|tan)h?|exp|log|pow|sqrt|cbrt|f?abs|f\w+|round|trunc|ceil|is\w+|erf|nan)", name)
        else "cuda::std has much of the library, in <cuda/std/...>"
    )
    return f"NVRTC's std has no {name}: {hint}"


def of(name: str) -> str:
    """Return the message for a name that is not declared; "" unless it is one of the host's."""
    if name in _OF_CFLOAT:
        return f"NVRTC does not know {name} without a header: include <cuda/std/cfloat>"
    if name in _INSTEAD:
        hint = _INSTEAD[name]
    elif name in _INTEGERS:
        kind = {"8": "signed char", "16": "short", "32": "int", "64": "long long"}.get(name.strip("uint_"), "")
        plain = kind.replace("signed ", "") if name[0] == "u" else kind
        own = f"write {'unsigned ' if name[0] == 'u' else ''}{plain}, or " if kind else ""
        hint = f"{own}include <cuda/std/cstdint>"
    elif name in _LIMITS:
        short = re.fullmatch(r"U?(?:CHAR|SCHAR|SHRT|INT|LONG|LLONG)_(?:MAX|MIN)|CHAR_BIT", name)
        hint = "include <cuda/std/climits>" if short else "include <cuda/std/cstdint>"
    elif name in _CONSTANTS:
        hint = "write the number, or include <math_constants.h> for CUDART_PI, CUDART_LN2, CUDART_SQRT_TWO, ..."
    elif name == "__int128":
        hint = "options=('--device-int128',) brings it"
        return f"NVRTC does not know {name} by itself: {hint}"
    elif name in _OF_COMPILERS or name.startswith("__builtin_"):
        cuda = {"popcount": "__popc", "clz": "__clz", "ffs": "__ffs", "popcountll": "__popcll", "clzll": "__clzll"}
        cuda |= {"memcpy": "memcpy", "inff": "__int_as_float(0x7f800000)", "fabsf": "fabsf", "sqrtf": "sqrtf"}
        hint = cuda.get(name.removeprefix("__builtin_"), "")
        return f"{name} is of a host's compiler, and NVRTC does not know it{f': write {hint}' if hint else ''}"
    elif name in _MACROS | _TYPES | _FUNCTIONS:
        hint = "it belongs to a header of the host"
    else:
        return ""
    return f"NVRTC does not know {name} without a header: {hint}"

"""Functions of scores, written in CUDA by the caller: what `kernels/hooks.cuh` puts between scale and softmax.

    flash_attention(q, k, v, score_mod="cap * tanhf(score / cap)", mod_args={"cap": np.float32(30)})
    flash_attention(q, k, v, mask_mod="document[q_idx] == document[kv_idx]", mod_args={"document": ids})

This module turns the texts into a struct before a kernel's text, and their arguments into parameters of the kernel.
bias, alibi_slopes and sinks become functions too.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from helpers.attention.ladder.layout import Spec
from helpers.engine.cuda_source.signatures import dtype_of

NAMES = ("score", "distance", "batch", "head", "kv_head", "q_idx", "kv_idx", "q_len", "kv_len")
_TAKEN = {
    *NAMES,
    *("y", "loaded", "load_pair", "prefetch", "grad", "bias", "alibi_slopes", "sinks", "sink", "score_mod", "mask_mod"),
    *("entries", "block_mask", "mask_batch", "mask_head", "mask_tile", "drafts_follow"),
}
_C_TYPES = {
    **{"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "bool": "bool"},
    **{
        f"{sign}int{bits}": f"{c_sign} {c_type}"
        for sign, c_sign in (("", "signed"), ("u", "unsigned"))
        for bits, c_type in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
    },
}
_NAME = r"[A-Za-z_]\w*"
_NEG_INF = "__int_as_float(0xff800000)"


class Pair(NamedTuple):
    """Two neighbours of an array, loaded together. at: the address of the first. text: a function of `loaded`."""

    dtype: str
    at: str
    text: str


class Function(NamedTuple):
    """One function of scores. name: its name in messages. grad: its derivative, from `score` and the result `y`.

    pair: set if two neighbours may be loaded together.
    """

    name: str
    text: str
    grad: str | None = "1"
    pair: Pair | None = None


class ScoreMod(NamedTuple):
    """The functions between the scale and the softmax of a call.

    scores: applied in order. mask: true if a row sees a key; empty for all. sink: the text of a sink's score, or empty.
        values: (name, dtype, number) of each argument by value, a float as text. arrays: (name, dtype, the call's name
        for it) of each pointer. kept: the number of a `BlockMask`, or 0.
    """

    scores: tuple[Function, ...] = ()
    mask: str = ""
    sink: str = ""
    values: tuple[tuple[str, str, Any], ...] = ()
    arrays: tuple[tuple[str, str, str], ...] = ()
    kept: int = 0

    def and_then(self, other: ScoreMod) -> ScoreMod:
        """Return the functions of both, the other's last."""
        scores, values, arrays = self.scores + other.scores, self.values + other.values, self.arrays + other.arrays
        return ScoreMod(
            scores, self.mask or other.mask, self.sink or other.sink, values, arrays, self.kept or other.kept
        )

    def with_mask_as_score(self) -> ScoreMod:
        """Return the same with its mask as a function of the score, for kernels without a block mask."""
        if not self.mask:
            return self
        hides = Function("mask_mod", f"bool({self.mask}) ? score : {_NEG_INF}", None)
        return self._replace(scores=(*self.scores, hides), mask="", kept=0)

    @property
    def form(self) -> ScoreMod:
        """The same without the numbers: everything that the text depends on."""
        return self._replace(values=tuple((name, dtype, None) for name, dtype, _ in self.values), kept=0)

    @property
    def names_used(self) -> set[str]:
        """The names that the mask uses."""
        return set(re.findall(_NAME, self.mask))

    @property
    def depends_on_head_index(self) -> bool:
        """True if a launch of only some heads would compute something else: only bias and slopes are cut like q."""
        return bool(self.mask or self.sink or any(function.name == "score_mod" for function in self.scores))

    @property
    def mask_changes(self) -> bool:
        """True if two calls of the same shapes may have different masks."""
        return not self.kept and any(name in self.names_used for name, *_ in self.arrays)

    def without_scores(self) -> ScoreMod:
        """Return only the mask."""
        return self._replace(scores=(), sink="")

    def arguments(self, block_mask: tuple[Any, ...] = (None, np.int64(0), np.int64(0), np.int32(0))) -> tuple[Any, ...]:
        """Return the arguments for `HOOK_PARAMETERS`, which come after a kernel's own.

        Args:
            block_mask: its array, and the strides of batch, head and tile, in elements.
        """
        numbers = ((dtype, float(value) if type(value) is str else value) for _, dtype, value in self.values)
        values = (dtype_of(dtype).type(number) for dtype, number in numbers)
        return (*(array for *_, array in self.arrays), *values, *(block_mask if self.mask else ()))

    @property
    def has_derivative(self) -> bool:
        """True if some function's derivative is not 1."""
        return any(function.grad != "1" for function in self.scores)

    def text(self, *, backward: bool = False, pairs: bool = False) -> str:
        """Write the text that comes before a kernel's.

        Args:
            backward: with derivatives that are not 1. pairs: keys 2 j and 2 j + 1 of a thread are neighbours.
        """
        members = [*((f"const {_C_TYPES[dtype]}* __restrict__", name) for name, dtype, _ in self.arrays)]
        members += [(f"{_C_TYPES[dtype]}", name) for name, dtype, _ in self.values]
        parameters = [
            f"const {kind.removeprefix('const ')} mod_{name}" if "*" not in kind else f"{kind} mod_{name}"
            for kind, name in members
        ]
        passed = [f"mod_{name}" for _, name in members]
        if self.mask:
            of_mask = {
                "block_mask": "const int* __restrict__",
                "mask_batch": "long long",
                "mask_head": "long long",
                "mask_tile": "int",
            }
            members += [(kind, name) for name, kind in of_mask.items()]
            parameters += [f"{kind if '*' in kind else f'const {kind}'} {name}" for name, kind in of_mask.items()]
            passed += of_mask
        pair = next((function.pair for function in self.scores if function.pair), None) if pairs else None
        grad = backward and self.has_derivative
        lines = [
            "#include <cuda_fp16.h>\n#include <cuda_bf16.h>",
            f"#define HOOK_PARAMETERS {''.join(f', {parameter}' for parameter in parameters)}",
            f"#define HOOK_ARGUMENTS {''.join(f'{name}, ' for name in passed)}",
            f"#define SCORE_MOD {int(bool(self.scores))}\n#define SCORE_GRAD {int(grad)}",
            f"#define MASK_MOD {int(bool(self.mask))}\n#define SINK {int(bool(self.sink))}",
            f"#define BIAS_BYTES {dtype_of(pair.dtype).itemsize if pair else 0}",
            _CHECKS,
            "struct Hooks {",
            *('#line 1 "mod_args"', *(f"  {kind} {name};" for kind, name in members), '#line 1 "score_mod.h"'),
            "  int batch, head, kv_head, q_len, kv_len;",
        ]
        for i, function in enumerate(self.scores):
            lines += _member(
                f"score_mod_{i}", _OF_SCORE, pair.text if pair and function.pair else function.text, function.name
            )
            if grad:
                lines += _member(
                    f"grad_{i}", f"{_OF_SCORE}, const float y", function.grad or "1", f"{function.name}_grad"
                )
        if self.scores:
            lines.append(f"  __device__ __forceinline__ float score_mod({_OF_SCORE}, float* grad) const {{")
            last, slopes = "score", []
            given = "q_idx, kv_idx, distance, loaded"
            for i in range(len(self.scores)):
                lines.append(f"    const float y{i} = score_mod_{i}({last}, {given});")
                slopes.append(f"grad_{i}({last}, {given}, y{i})")
                last = f"y{i}"
            lines += [f"    *grad = {' * '.join(slopes)};"] if grad else []
            lines += [f"    return {last};", "  }"]
            load = "make_float2(0.0f, 0.0f)"
            if pair:
                load = _PAIRS[pair.dtype].format(pair.at)
                lines.append("  __device__ __forceinline__ void prefetch(const int q_idx, const int kv_idx) const {")
                lines += [f'    asm volatile("prefetch.global.L1 [%0];" :: "l"({pair.at}));', "  }"]
            lines.append("  __device__ __forceinline__ float2 load_pair(const int q_idx, const int kv_idx) const {")
            lines += [f"    return {load};", "  }"]
        if self.mask:
            lines += _member("mask_mod", "const int q_idx, const int kv_idx", self.mask, "mask_mod", "bool")
            lines += [
                "  __device__ __forceinline__ const int* entries(const int tile) const {",
                "    return block_mask + batch * mask_batch + head * mask_head + (long long)tile * mask_tile;",
                "  }",
            ]
        if self.sink:
            lines += _member("sink", "", self.sink, "sinks")
        return "\n".join([*lines, "};", ""])

    @contextlib.contextmanager
    def compile_errors_as_value_errors(self) -> Iterator[None]:
        """Turn a compiler's message about the caller's text into a ValueError that shows the text."""
        try:
            yield
        except Exception as error:
            found = re.search(rf"^({_NAMED})(?:\(\d+\)|:\d+)(?::\d+)?: error: (.*)", str(error), re.M)
            if found is None:
                raise
            why = re.sub(r'static assertion failed(?:: | with )"?([^"]*)"?', r"\1", found[2])
            text = textwrap.indent(self._texts()[found[1]], "    ")
            raise ValueError(f"{found[1]} does not compile: {why}\n{text}") from error

    def _texts(self) -> dict[str, str]:
        texts = {function.name: function.text for function in self.scores}
        texts |= {f"{function.name}_grad": function.grad or "1" for function in self.scores}
        args = ", ".join(name for name, *_ in (*self.arrays, *self.values))
        return texts | {"mask_mod": self.mask, "mod_args": args}


_NAMED = "score_mod_grad|score_mod|mask_mod|mod_args"
_OF_SCORE = "const float score, const int q_idx, const int kv_idx, const float distance, const float loaded"
_CHECKS = """\
template <typename Result, typename T>
constexpr bool mod_returns = false;
template <typename Result>
constexpr bool mod_returns<Result, Result> = true;
template <typename Result>
constexpr bool mod_returns<Result, int> = true;
__device__ __forceinline__ float2 mod_half_pair(unsigned two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}
__device__ __forceinline__ float2 mod_bfloat16_pair(unsigned two) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
__device__ __forceinline__ float2 mod_bool_pair(unsigned short two) {
  return make_float2(two & 0xff, two >> 8);
}"""
_SHOULD_BE = {
    "float": "a score is a float: write 0.5f for 0.5, and float(x) for another type",
    "bool": "mask_mod says true or false: a bool, or an int",
}


def _member(name: str, parameters: str, text: str, shown_name: str, result: str = "float") -> list[str]:
    """Write a function of the struct.

    #line puts the caller's text, and the check of its type, into a file with the argument's name, so that messages and
    the X-ray show that name and its lines.
    """
    head = f"  __device__ __forceinline__ {result} {name}({parameters}) const {{"
    check = f'static_assert(mod_returns<{result}, decltype(+mod_result)>, "{_SHOULD_BE[result]}");'
    end = "\n);" if "//" in text else ");"
    body = f"    auto mod_result = ({text}{end}\n    {check}\n    return mod_result;"
    return [head, f'#line 1 "{shown_name}"', body, '#line 1 "score_mod.h"', "  }"]


class BlockMask:
    """A mask_mod whose arguments do not change, so that its tiles are classified once per shape."""

    _numbers = itertools.count(1)

    def __init__(self, mask_mod: str, mod_args: Mapping[str, Any] | None = None) -> None:
        """Take the arguments of `make_block_mask`."""
        self.mask_mod, self.mod_args = _text("mask_mod", mask_mod), dict(mod_args or {})
        self.number = next(self._numbers)


def make_block_mask(mask_mod: str, mod_args: Mapping[str, Any] | None = None) -> BlockMask:
    """Make a mask for many calls of attention: `flash_attention(q, k, v, mask_mod=block_mask)`.

    The first call of each shape classifies its tiles for all later ones, so the arrays in mod_args must not change
    afterwards.

    Args:
        mask_mod, mod_args: as in `helpers.attention.flash_attention`.
    """
    return BlockMask(mask_mod, mod_args)


def parse_score_mod(
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    mod_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    *,
    backward: bool = False,
) -> tuple[ScoreMod | None, dict[str, Any]]:
    """Return the caller's functions, and the arrays that they read by the names that a call has for them.

    Raises:
        TypeError: a text is not a string; an argument is neither a NumPy number nor an array.
        ValueError: a name is not valid in C++, or is reserved; a derivative or arguments are given without a function.
    """
    if score_mod is mask_mod is mod_args is score_mod_grad is None:  # most calls
        return None, {}
    if not isinstance(mod_args, Mapping | None):
        raise TypeError(f"mod_args must be a dict: {{name: number or array}}; got {type(mod_args).__name__}")
    if score_mod is None and mask_mod is None:
        if mod_args or score_mod_grad is not None:
            given = "mod_args is" if mod_args else "score_mod_grad is"
            raise ValueError(f"{given} given without score_mod or mask_mod: nothing reads it")
        return None, {}
    scores, kept, args = (), 0, dict(mod_args or {})
    if isinstance(mask_mod, BlockMask):
        kept = mask_mod.number
        for name, value in mask_mod.mod_args.items():
            if args.setdefault(name, value) is not value:
                raise ValueError(f"mod_args[{name!r}] is not the one that the block mask was made with")
        others = args.keys() - mask_mod.mod_args.keys()  # these may change from call to call
        kept = 0 if others.intersection(re.findall(_NAME, mask_mod.mask_mod)) else kept
        mask_mod = mask_mod.mask_mod
    if score_mod is not None:
        if score_mod_grad is None and backward:
            raise ValueError(
                "gradients with a score_mod need score_mod_grad, its derivative by score: '1' for a sum; it may use y, "
                "the result"
            )
        grad = None if score_mod_grad is None else _text("score_mod_grad", score_mod_grad)
        scores = (Function("score_mod", _text("score_mod", score_mod), grad),)
    elif score_mod_grad is not None:
        raise ValueError("score_mod_grad is given without score_mod: there is nothing to differentiate")
    values, arrays, by_name = [], [], {}
    for name, value in args.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name) or name in _TAKEN:
            raise ValueError(f"mod_args has {name!r}: a name in C++ is needed, and none of {', '.join(sorted(_TAKEN))}")
        if name.isupper() and len(name) > 1:
            raise ValueError(f"mod_args has {name!r}: kernels have macros in capitals, such as HEAD_DIM")
        if type(value) in _OF_PYTHON:
            if type(value) is int and not -(2**31) <= value < 2**31:
                raise ValueError(f"mod_args[{name!r}] = {value} is no int32; write np.int64(...)")
            value = _OF_PYTHON[type(value)](value)
        if isinstance(value, np.generic):
            if value.dtype.name not in _C_TYPES:
                raise TypeError(f"mod_args[{name!r}] is {value.dtype}; write np.float32(...)")
            number = value.item()  # a float as text: -0.0 == 0.0, and NaN is not NaN
            values.append((name, value.dtype.name, repr(number) if type(number) is float else number))
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            by_name[key := f"mod_args[{name!r}]"] = value
            arrays.append((name, "", key))
        else:
            raise TypeError(
                f"mod_args[{name!r}] must be a NumPy number or an array; got {type(value).__name__} {value!r:.40}"
            )
    mask = "" if mask_mod is None else _text("mask_mod", mask_mod)
    return ScoreMod(scores, mask, "", tuple(values), tuple(arrays), kept), by_name


_OF_PYTHON = {bool: np.bool_, int: np.int32, float: np.float32}


def _text(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise TypeError(f"{name} must be an expression in CUDA, such as 'score - slope[head]'; got {text!r:.60}")
    return text.strip()


def bind_to_call(mod: ScoreMod | None, arrays: Mapping[str, Spec]) -> ScoreMod | None:
    """Return a call's functions: the caller's, whose arrays now have types, then those of its bias, slopes and sinks.

    In this order a key that a bias hides stays hidden, and a soft cap applies only to q k^T, as in models.
    """
    presets = ScoreMod()
    if bias := arrays.get("bias"):
        presets = presets.and_then(_bias(bias))
    if slopes := arrays.get("alibi_slopes"):
        values, index = _index("alibi_slopes", slopes, ("batch", "head"))
        text = f"score - alibi_slopes[{index}] * fabsf(distance)"
        presets = presets.and_then(
            ScoreMod((Function("alibi_slopes", text),), values=values, arrays=(_pointer("alibi_slopes", slopes),))
        )
    if tree := arrays.get("tree"):
        presets = presets.and_then(_tree(tree))
    if sinks := arrays.get("sinks"):
        presets = presets.and_then(ScoreMod(sink="sinks[head]", arrays=(_pointer("sinks", sinks),)))
    if mod is not None:
        mod = mod._replace(arrays=tuple((name, arrays[key].dtype.name, key) for name, _, key in mod.arrays))
        for _, dtype, key in mod.arrays:
            if dtype not in _C_TYPES:
                raise TypeError(f"{key} is {dtype}; one of {', '.join(_C_TYPES)} is needed")
    whole = mod.and_then(presets) if mod else presets
    return whole if whole != ScoreMod() else None


DISTANCE_TABLE = "score + (table + head * width + reach)[{}]"  # the code of score_mods.relative_bias
DISTANCE = "kv_idx - q_idx"


def distance_table(mod: ScoreMod | None) -> str | None:
    """Return the call's name for the table of `score_mods.relative_bias`; None for other functions."""
    before, after = DISTANCE_TABLE.split("{}")
    for function in mod.scores if mod else ():
        if function.name == "score_mod" and function.text.startswith(before) and function.text.endswith(after):
            return next((key for name, _, key in mod.arrays if name == "table"), None)
    return None


def check_distances(mod: ScoreMod | None, arrays: Mapping[str, Spec], longest: int) -> None:
    """Raise ValueError if `relative_bias` does not clamp distances to the table, and the call has longer ones.

    longest: rows or keys of the longest sequence.
    """
    table = distance_table(mod)
    if mod is None or table is None or mod.scores[0].text != DISTANCE_TABLE.format(DISTANCE):
        return
    if longest > (most := arrays[table].shape[1] // 2 + 1):
        raise ValueError(
            f"this relative_bias is for {most} rows and keys or fewer, and a sequence has {longest}: "
            f"give it longest={longest}, or none"
        )


def _pointer(name: str, a: Spec) -> tuple[str, str, str]:
    return name, np.dtype(a.dtype).name, name


def _bias(bias: Spec) -> ScoreMod:
    """Make the function of a bias: an array added to the scores, or of bool, True where a row sees a key."""
    values, index = _index("bias", bias, ("batch", "head", "(q_idx - kv_len + q_len)", "kv_idx"))
    seen = bias.dtype == np.bool_
    text, of_pair = (
        (f"bias[{index}] ? score : {_NEG_INF}", f"loaded != 0.0f ? score : {_NEG_INF}")
        if seen
        else (f"score + float(bias[{index}])", "score + loaded")
    )
    size = bias.dtype.itemsize
    steps = [stride for count, stride in zip(bias.shape[:3], bias.strides[:3], strict=True) if count > 1]
    whole = (
        bias.strides[3] == size
        and bias.shape[3] % 2 == 0
        and not any(step % (2 * size) for step in (bias.offset, *steps))
    )
    pair = Pair(bias.dtype.name, f"bias + {index}", of_pair) if whole else None
    return ScoreMod((Function("bias", text, "1", pair),), values=values, arrays=(_pointer("bias", bias),))


def _tree(tree: Spec) -> ScoreMod:
    """Make the function of a tree of drafts: each of the newest tokens sees its ancestors and itself."""
    values, index = _index("drafts_follow", tree, ("batch", "token"))
    follows = f"""[&] {{
  const int first = kv_len - q_len, seen = kv_idx - first;
  if (seen < 0) return true;
  int token = q_idx - first;
  while (token > seen) token = min(drafts_follow[{index}], token - 1);
  return token == seen;
}}()"""
    text = f"{follows} ? score : {_NEG_INF}"
    return ScoreMod((Function("tree", text),), values=values, arrays=(("drafts_follow", tree.dtype.name, "tree"),))


# Two neighbours as float2, in one load: the types' own structs would be loaded by halves.
_PAIRS = {
    "float32": "*reinterpret_cast<const float2*>({})",
    "float16": "mod_half_pair(*reinterpret_cast<const unsigned*>({}))",
    "bfloat16": "mod_bfloat16_pair(*reinterpret_cast<const unsigned*>({}))",
    "bool": "mod_bool_pair(*reinterpret_cast<const unsigned short*>({}))",
}


def _index(name: str, a: Spec, axes: tuple[str, ...]) -> tuple[tuple[tuple[str, str, int], ...], str]:
    """Write the index of an array's element. Returns the strides, which become values, and the expression."""
    values, terms = [], []
    for axis, size, stride in zip(axes, a.shape, a.strides, strict=True):
        step = stride // a.dtype.itemsize
        if size > 1 and step == 1:
            terms.append(axis)
        elif size > 1:
            values.append((f"{name}_step_{len(values)}", "int64", step))
            terms.append(f"{axis} * {values[-1][0]}")
    return tuple(values), " + ".join(terms) or "0"

"""Tell whether a change affects any launch, or any text that is compiled. Needs no GPU and compiles nothing.

    python3 -m helpers.bench.frozen before.json                    # writes the hashes of this checkout
    python3 -m helpers.bench.frozen now.json --against before.json # and compares them with another checkout's
    python3 -m helpers.bench.frozen now.json --sass --only 05 07 --variants score_mod mask_mod --dtypes float16

Every stage, step and decoder is planned as for an H200, for each of its dtypes, three head dimensions and the variants
below, for few rows and for many. Each call has two hashes. The hash of its launches (grid, block, bytes of shared
memory, arguments, scratch arrays) must not change. If the hash of its text changes, its machine code or its time must
not: `--sass`, which needs NVRTC, adds a hash of the machine code, with the caller's functions. If that is the same,
measurements from before the change still hold. The exit code is 1 if a launch differs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.attention import kernel
from helpers.attention.compile_report import program
from helpers.attention.decoders import DECODERS, SPLIT_KV, DecodeCall
from helpers.attention.kernel import Kernel
from helpers.attention.ladder import BACKWARD, LADDER, Stage, limits
from helpers.attention.ladder.call import BackwardOptions, Call, ForwardOptions
from helpers.attention.ladder.extras import needs
from helpers.attention.ladder.launch import Launch, Map, Part
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.score_mod import parse_score_mod
from helpers.attention.ladder.steps import BASES, CLIMBS, FP8_CODES, MULTICAST, ROTATION_IN_LOAD
from helpers.bench import records
from helpers.engine.cuda_source.signatures import dtype_of
from helpers.engine.nvrtc import header_options

H200 = limits.Limits(232_448, 132, 90)
HEAD_DIMS = (64, 72, 128)


class Shape(NamedTuple):
    """The sizes of a call. Calls with few blocks have other tiles than calls with more blocks than multiprocessors."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int


SHAPES = Shape(2, 4, 2, 200, 333), Shape(4, 16, 4, 4096, 4096)
Hashes = tuple[str, ...]  # those of launches and of texts; on request, of machine code


class Variant(NamedTuple):
    """A call's options. functions: arguments of `parse_score_mod`."""

    options: Mapping[str, Any] = {}
    functions: Mapping[str, str] = {}
    packed: bool = False
    rotary: bool = False


VARIANTS = {
    "plain": Variant(),
    "causal": Variant({"causal": True}),
    "window": Variant({"window": (64, 32)}),
    "packed": Variant(packed=True),
    "lse": Variant({"return_lse": True}),
    "score_mod": Variant(functions={"score_mod": "2.0f * score + distance", "score_mod_grad": "2.0f"}),
    "mask_mod": Variant(functions={"mask_mod": "q_idx - kv_idx < 100"}),
    "rotary": Variant(rotary=True),
    "deterministic": Variant({"deterministic": True, "causal": True}),
    "float_out": Variant({"out": "float32"}),
}
DECODED = ("plain", "pages", "new keys", "lse")  # variants of decoders


def stages() -> Iterator[Stage]:
    """Yield each stage and each step, forward and backward, once."""
    steps = (*BASES.values(), *(step for climb in CLIMBS.values() for step in climb))
    seen: set[tuple[str, str]] = set()
    for stage in (*LADDER.values(), *BACKWARD.values(), *steps, ROTATION_IN_LOAD, FP8_CODES, MULTICAST):
        if (stage.name, stage.file) not in seen:
            seen.add((stage.name, stage.file))
            yield stage


def _specs(stage: Stage, shape: Shape, dtype: Any, head_dim: int, variant: Variant) -> tuple[dict[str, Spec], Any]:
    """Return the arrays of a call as stages take them, and the longest sequences if they are packed."""
    batch, heads, kv_heads, n, n_kv = shape._replace(batch=1) if variant.packed else shape
    if "gqa" not in stage.features:
        kv_heads = heads
    of_q, of_k = (batch, heads, n, head_dim), (batch, kv_heads, n_kv, head_dim)
    arrays = {name: Spec.dense(of_q if name == "q" else of_k, dtype) for name in "qkv"}
    out = dtype_of(variant.options.get("out") or stage.result_dtype(dtype.name))
    arrays["o"] = Spec.dense(of_q, dtype if stage.direction == "backward" else out)
    if stage.direction == "backward":
        arrays["do"] = Spec.dense(of_q, dtype)
        arrays |= {f"d{name}": Spec.dense(of_q if name == "q" else of_k, out) for name in "qkv"}
    if stage.direction == "backward" or variant.options.get("return_lse"):
        arrays["lse"] = Spec.dense(of_q[:3], np.float32)
    longest = (None, None)
    if variant.packed:
        arrays |= {f"cu_seqlens_{name}": Spec.dense((4,), np.int32) for name in "qk"}
        longest = n // 2, n_kv // 2
    if variant.rotary:
        arrays |= {f"rotary_{name}": Spec.dense((max(n, n_kv), 16), np.float32) for name in ("cos", "sin")}
    return arrays, longest


def of_stage(
    stage: Stage, shape: Shape, dtype_name: str, head_dim: int, variant: Variant, *, sass: bool = False
) -> Hashes | None:
    """Return the hashes of one call; None if the stage cannot do it."""
    backward = stage.direction == "backward"
    functions = dict(variant.functions)
    if not backward:
        functions.pop("score_mod_grad", None)
    mod, _ = parse_score_mod(**functions, backward=backward) if functions else (None, {})
    if variant.options.get("deterministic") and not backward:
        return None
    named = {name: value for name, value in variant.options.items() if not (backward and name == "return_lse")}
    options = (BackwardOptions if backward else ForwardOptions)(mod=mod, **named)
    dtype = dtype_of(dtype_name)
    arrays, longest = _specs(stage, shape, dtype, head_dim, variant)
    q, k = arrays["q"], arrays["k"]
    asked = {**options.needs(q, k, packed=variant.packed), **needs(arrays)}
    if stage.why_not(**asked) and not (stage.unavailable() and _able_but_unavailable(stage, asked)):
        return None
    if "rotates" in stage.features and not variant.rotary:
        return None
    call = Call.of(arrays, options.checked(head_dim), longest)
    if stage.unreadable(call):
        return None  # it would be copied first
    ready = CompiledPlan(stage, call, stage.sizes_for(call))
    hashes = _hashes(ready.launches, arrays, ready.scratch, list(ready.kernels.values()))
    return (
        (*hashes, _hash_of_machine_code(ready.kernels, stage.architecture(H200.compute_capability))) if sass else hashes
    )


def _able_but_unavailable(stage: Stage, asked: Mapping[str, Any]) -> bool:
    """Return True if all that a stage lacks is a library whose headers it includes."""
    return stage.changed(unavailable=lambda: None).why_not(**asked) is None


def of_decoder(
    decoder: Stage, shape: Shape, dtype_name: str, head_dim: int, variant: str, *, sass: bool = False
) -> Hashes | None:
    """Return the hashes of one call with one new token per sequence; only split_kv has "pages" and "new keys"."""
    dtype = dtype_of(dtype_name)
    if dtype_name not in decoder.dtypes or head_dim == 72 or (variant != "plain" and decoder is not SPLIT_KV):
        return None
    batch, heads, kv_heads, _, keys = shape
    cache = Spec.dense((batch, keys, kv_heads, head_dim), dtype)
    arrays = {"q": Spec.dense((batch, 1, heads, head_dim), dtype), "k_cache": cache, "v_cache": cache}
    arrays |= {"o": arrays["q"], "cache_seqlens": Spec.dense((batch,), np.int32)}
    if variant == "pages":
        pages = Spec.dense((keys, 16, kv_heads, head_dim), dtype)
        arrays |= {"k_cache": pages, "v_cache": pages, "block_table": Spec.dense((batch, -(-keys // 16)), np.int32)}
    elif variant == "new keys":
        arrays |= {name: Spec.dense((batch, 1, kv_heads, head_dim), dtype) for name in "kv"}
    elif variant == "lse":
        arrays["lse"] = Spec.dense((batch, heads, 1), np.float32)
    call = DecodeCall(arrays, (-1, 0), head_dim**-0.5, 0, None)
    planned = CompiledPlan(decoder, call, decoder.sizes_for(call))
    hashes = _hashes(planned.launches, arrays, planned.scratch, planned.kernels.values())
    return (*hashes, _hash_of_machine_code(planned.kernels, "sm_90")) if sass else hashes


def _hashes(
    launches: Iterable[Launch],
    arrays: Mapping[str, Spec],
    scratch: Mapping[str, Spec],
    kernels: Iterable[Kernel],
) -> tuple[str, str]:
    """Hash the launches and the texts. Names of arrays, kernels and files are ignored."""
    every = {**arrays, **scratch}

    def argument(arg: Any) -> Any:
        if isinstance(arg, str):
            return tuple(every[arg]) if arg in every else arg
        if isinstance(arg, Part | Map):
            rest = arg.index if isinstance(arg, Part) else arg.box_rows
            return type(arg).__name__, tuple(every[arg.name]), str(rest)
        return None if arg is None else (str(arg.dtype), arg.tobytes().hex())

    geometry = [
        (each.grid, each.block, each.shared_bytes, each.once, *(repr(argument(arg)) for arg in each.args))
        for each in launches
    ]
    made = [tuple(spec) for spec in scratch.values()]
    texts = [(each.code, sorted(each.options)) for each in kernels]
    return _hash(repr((geometry, made))), _hash(repr(texts))


def machine_code(code: str, options: tuple[str, ...], arch: str, names: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Compile a source, and return each kernel's instructions by its symbol.

    Args:
        code: the source, complete. options: such as -DHEAD_DIM=64. arch: such as "sm_90a".
        names: name expressions of the template instances to return.

    Raises:
        CompileError: NVRTC rejects the source; the message is its log.
    """
    from cupy.cuda import nvrtc
    from elftools.elf.elffile import ELFFile

    with program(code, (*options, *header_options(code)), arch, names) as compiled:
        sections = ELFFile(io.BytesIO(nvrtc.getCUBIN(compiled))).iter_sections()
    return {s.name.removeprefix(".text."): s.data() for s in sections if s.name.startswith(".text.")}


def _hash_of_machine_code(kernels: Mapping[str, Kernel], arch: str) -> str:
    """Hash the machine code of all kernels of a call."""
    found = []
    for compiled in kernels.values():
        for symbol, code in sorted(_machine_code(compiled.code, compiled.options, arch, compiled.name).items()):
            found.append(f"{symbol} {hashlib.sha256(code).hexdigest()}")
    return _hash("\n".join(found))


@functools.cache
def _machine_code(code: str, options: tuple[str, ...], arch: str, name: str) -> dict[str, bytes]:
    return machine_code(code, options, arch, (name,) if "<" in name else ())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def everything(
    only: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    head_dims: Sequence[int] = HEAD_DIMS,
    variants: Sequence[str] = (),
    *,
    sass: bool = False,
) -> Iterator[tuple[str, Hashes]]:
    """Yield each call by its name, "file dtype d=64 variant shape", with its hashes; all calls if nothing is named.

    Args:
        only: beginnings of files' names. sass: with machine code.
    """
    of_all = (*((stage, VARIANTS) for stage in stages()), *((decoder, DECODED) for decoder in DECODERS.values()))
    with limits.pretend_gpu(H200), kernel.built_when_launched():
        for (number, shape), head_dim, (stage, known) in itertools.product(enumerate(SHAPES), head_dims, of_all):
            if only and not stage.file.removeprefix("steps/").startswith(tuple(only)):
                continue
            for dtype, variant in itertools.product(stage.dtypes, known):
                if dtype in (dtypes or (dtype,)) and variant in (variants or (variant,)):
                    hashes = _of_call(stage, shape, dtype, head_dim, variant, sass=sass)
                    yield f"{stage.file} {stage.name} {dtype} d={head_dim} {variant} {number}", hashes or ()


def _of_call(stage: Stage, shape: Shape, dtype: str, head_dim: int, variant: str, *, sass: bool) -> Hashes | None:
    if stage in DECODERS.values():
        return of_decoder(stage, shape, dtype, head_dim, variant, sass=sass)
    return of_stage(stage, shape, dtype, head_dim, VARIANTS[variant], sass=sass)


def main(arguments: list[str] | None = None) -> int:
    """Write the hashes to a file; with --against, print what differs, and return 1 if a launch does."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, help="where the hashes go, JSON")
    parser.add_argument("--against", type=Path, help="the hashes of another checkout")
    parser.add_argument("--only", nargs="+", default=[], metavar="START", help="files whose names begin so")
    parser.add_argument("--dtypes", nargs="+", default=[])
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--sass", action="store_true", help="with hashes of the machine code")
    options = parser.parse_args(arguments)
    try:
        records.check_file(options.file)
        before = records.load(options.against) if options.against else {}
        if before is None:
            raise records.Refused(f"{options.against} does not exist")
    except (records.Refused, OSError, ValueError) as error:
        parser.error(str(error))
    chosen = options.only, options.dtypes, options.head_dims, options.variants
    now = {name: list(hashes) for name, hashes in everything(*chosen, sass=options.sass) if hashes}
    options.file.write_text(json.dumps(now, indent=0) + "\n")
    print(f"{len(now)} calls")
    if not options.against:
        return 0
    both = [name for name in now if name in before]
    print(f"in both: {len(both)}; {len(before) - len(both)} are there no more, {len(now) - len(both)} are new")
    launches, texts, codes = (
        [name for name in both if now[name][i : i + 1] != before[name][i : i + 1]] for i in range(3)
    )
    for what, names in {"launches": launches, "texts": texts, "machine code": codes}.items():
        print(f"other {what}: {len(names)}", *(names if what != "texts" else ()), sep="\n  ")
    print("files with other texts:", *sorted({name.split()[0] for name in texts}))
    return bool(launches)


if __name__ == "__main__":
    sys.exit(main())

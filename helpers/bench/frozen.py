"""Whether a change has changed any launch, or any text that is compiled. Needs no GPU; nothing is compiled.

    python3 -m helpers.bench.frozen before.json                    # writes the hashes of this checkout
    python3 -m helpers.bench.frozen now.json --against before.json # and compares them with those of another

Every stage, step and decoder is planned as for an H200, for each of its dtypes, three head dimensions and the variants
below, of few rows and of many. Each call has two hashes. That of its launches (grid, block, bytes of shared memory,
arguments, scratch arrays) has to stay as it is. Where that of its text differs, its machine code has to be the same
(`helpers.bench.same_sass`), or its time. The exit code is 1 if a launch differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.attention import kernel
from helpers.attention.decoders import DECODERS, SPLIT_KV, Decoder
from helpers.attention.decoders import Call as DecoderCall
from helpers.attention.decoding import Planned
from helpers.attention.ladder import BACKWARD, LADDER, Stage, limits
from helpers.attention.ladder.call import Call, Options
from helpers.attention.ladder.extras import needs
from helpers.attention.ladder.launch import Launch, Map, Part
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.plan import Ready
from helpers.attention.ladder.score_mod import read
from helpers.attention.ladder.steps import BASES, CLIMBS, ROTATION_IN_LOAD
from helpers.engine.cuda_source.signatures import dtype_of

H200 = limits.Limits(232_448, 132, 90)
HEAD_DIMS = (64, 72, 128)


class Shape(NamedTuple):
    """The sizes of a call. Few blocks, and more than an H200 has multiprocessors, have tiles of their own."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int


SHAPES = Shape(2, 4, 2, 200, 333), Shape(4, 16, 4, 4096, 4096)
Hashes = tuple[str, str]


class Variant(NamedTuple):
    """What a call asks for. functions: as `score_mod.read` takes them."""

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
    "float_out": Variant({"float_out": True}),
}


def stages() -> Iterator[Stage]:
    """Each stage and each step, forward and backward, once."""
    steps = (*BASES.values(), *(step for climb in CLIMBS.values() for step in climb))
    seen: set[tuple[str, str]] = set()
    for stage in (*LADDER.values(), *BACKWARD.values(), *steps, ROTATION_IN_LOAD):
        if (stage.name, stage.file) not in seen:
            seen.add((stage.name, stage.file))
            yield stage


def _specs(stage: Stage, shape: Shape, dtype: Any, head_dim: int, variant: Variant) -> tuple[dict[str, Spec], Any]:
    """The arrays of a call, as stages take them, and the longest sequences where they are packed."""
    batch, heads, kv_heads, n, n_kv = shape._replace(batch=1) if variant.packed else shape
    if "gqa" not in stage.features:
        kv_heads = heads
    of_q, of_k = (batch, heads, n, head_dim), (batch, kv_heads, n_kv, head_dim)
    arrays = {name: Spec.dense(of_q if name == "q" else of_k, dtype) for name in "qkv"}
    out = np.dtype(np.float32) if variant.options.get("float_out") else dtype
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


def of_stage(stage: Stage, shape: Shape, dtype_name: str, head_dim: int, variant: Variant) -> Hashes | None:
    """The hashes of one call; None where the stage cannot do it."""
    backward = stage.direction == "backward"
    functions = dict(variant.functions)
    if not backward:
        functions.pop("score_mod_grad", None)
    mod, _ = read(**functions, backward=backward) if functions else (None, {})
    options = Options(mod=mod, **variant.options)
    dtype = dtype_of(dtype_name)
    arrays, longest = _specs(stage, shape, dtype, head_dim, variant)
    q, k = arrays["q"], arrays["k"]
    asked = {**options.needs(q, k, packed=variant.packed), **needs(arrays)}
    if stage.why_not(**asked) and not (stage.missing() and _able_but_missing(stage, asked)):
        return None
    if "rotates" in stage.features and not variant.rotary:
        return None
    call = Call.of(arrays, options.checked(head_dim), longest)
    if stage.unreadable(call):
        return None  # it would be copied first
    ready = Ready(stage, call, stage.sizes_for(call))
    texts = [(ready.kernels[each.kernel].code, ready.kernels[each.kernel].options) for each in ready.launches]
    return _hashes(ready.launches, arrays, ready.scratch, texts)


def _able_but_missing(stage: Stage, asked: Mapping[str, Any]) -> bool:
    """Whether all that a stage lacks is a library that it includes."""
    return stage.changed(missing=lambda: None).why_not(**asked) is None


def of_decoder(decoder: Decoder, shape: Shape, dtype_name: str, head_dim: int, variant: str) -> Hashes | None:
    """The hashes of one call, of one new token a sequence; "pages" and "new keys" are of 14 alone."""
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
    planned = Planned(decoder, DecoderCall(arrays, (-1, 0), head_dim**-0.5, 0, None), tuple(arrays), {})
    texts = [(compiled.code, compiled.options) for compiled in planned.kernels]
    return _hashes(planned.launches, arrays, planned.scratch, texts)


def _hashes(
    launches: Iterable[Launch],
    arrays: Mapping[str, Spec],
    scratch: Mapping[str, Spec],
    texts: Iterable[tuple[str, tuple[str, ...]]],
) -> Hashes:
    """Of the launches and of the texts. Names of arrays do not count, nor do those of kernels and files."""
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
    return _hash(repr((geometry, made))), _hash(repr([(code, sorted(options)) for code, options in texts]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def everything() -> Iterator[tuple[str, Hashes]]:
    """Each call by its name, "file dtype d=64 variant shape", with its hashes."""
    with limits.of_another(H200), kernel.built_when_launched():
        for number, shape in enumerate(SHAPES):
            for stage in stages():
                for dtype in stage.dtypes:
                    for head_dim in HEAD_DIMS:
                        for name, variant in VARIANTS.items():
                            if hashes := of_stage(stage, shape, dtype, head_dim, variant):
                                yield f"{stage.file} {stage.name} {dtype} d={head_dim} {name} {number}", hashes
            for decoder in DECODERS.values():
                for dtype in decoder.dtypes:
                    for head_dim in HEAD_DIMS:
                        for name in ("plain", "pages", "new keys", "lse"):
                            if hashes := of_decoder(decoder, shape, dtype, head_dim, name):
                                yield f"{decoder.file} {decoder.name} {dtype} d={head_dim} {name} {number}", hashes


def main(arguments: list[str] | None = None) -> int:
    """Write the hashes, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, help="where the hashes go, JSON")
    parser.add_argument("--against", type=Path, help="the hashes of another checkout")
    options = parser.parse_args(arguments)
    now = {name: list(hashes) for name, hashes in everything()}
    options.file.write_text(json.dumps(now, indent=0) + "\n")
    print(f"{len(now)} calls")
    if not options.against:
        return 0
    before = json.loads(options.against.read_text())
    both = [name for name in now if name in before]
    print(f"not there any more: {len(before) - len(both)}; new: {len(now) - len(both)}")
    launches, texts = ([name for name in both if now[name][i] != before[name][i]] for i in (0, 1))
    print(f"of {len(both)} in both, {len(launches)} with other launches, {len(texts)} with other texts")
    for name in launches:
        print("other launch:", name)
    for file in sorted({name.split()[0] for name in texts}):
        print("other text:", file)
    return bool(launches)


if __name__ == "__main__":
    sys.exit(main())

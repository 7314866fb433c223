"""Decoding: a few new tokens of each sequence attend to its cache of keys and values, which may lie in pages.

    from helpers.attention import flash_attention_with_kvcache
    o = flash_attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, k=k, v=v)

How a launch is cut up follows from shapes alone, so that the host need not read a length. Where it does, it is to check
them: see `checked`. The kernels and their launches are in decoders.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention import kernel
from helpers.attention.cache_slots import check_slots
from helpers.attention.decoders import DECODERS, SMALLEST_TILE, SPLIT_KV, Call, Decoder
from helpers.attention.ladder import limits
from helpers.attention.ladder.call import MAX_ROWS, _check_same_dtype, mask_window, softmax_scale_of
from helpers.attention.ladder.kinds import DeviceArrays, TorchTensors, as_device_array, as_kind_of, kind_of, on_device
from helpers.attention.ladder.launch import Arguments, DirectLaunch
from helpers.attention.ladder.launches import C_NAMES
from helpers.attention.ladder.layout import Spec, address
from helpers.attention.ladder.plan import Latest
from helpers.attention.ladder.score_mod import ScoreMod, of_call, read
from helpers.attention.scalars import check_flags, whole_number

HEAD_DIMS = (64, 128, 256)
_Kind = DeviceArrays | TorchTensors


def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    block_table: Any = None,
    k: Any = None,
    v: Any = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    sinks: Any = None,
    score_mod: str | None = None,
    mod_args: Mapping[str, Any] | None = None,
    stage: str | None = None,
    checked: bool | None = None,
) -> Any:
    """Attention of the newest tokens of each sequence to all of its tokens, as FlashAttention's function of that name.

    Args:
        q: (batch, seq_q, heads, head_dim), float32, float16 or bfloat16; head_dim 64, 128 or 256. The last of the
            seq_q tokens is the sequence's last: it is at its last key.
        k_cache, v_cache: (batch, seq_max, kv_heads, head_dim) of q's dtype, or with block_table (pages, page_size,
            kv_heads, head_dim), page_size a power of two. Read where they are: rows contiguous, at multiples of 16
            bytes. kv_heads divides heads. What lies behind a sequence's end may be anything, NaN too.
        cache_seqlens: (batch,) int32: how many keys of each sequence are in the cache, without those of k: at least 0,
            and with those of k no more than the cache has room for. Unchecked, a kernel takes the nearest such number:
            it never leaves the cache, and new tokens for a full one replace its last keys.
        block_table: (batch, pages of a sequence) int32: in which page keys i * page_size to (i + 1) * page_size - 1
            are. Entries that no key needs are not looked at; the others are pages that there are. A row of a page that
            is written is a key of one sequence alone. Unchecked, another page is memory outside of the cache, and of
            two sequences that write one row either may win.
        k, v: (batch, seq_q, kv_heads, head_dim): the new tokens', written into the cache by this launch, at
            cache_seqlens to cache_seqlens + seq_q - 1, and attended to. None: they are in the cache already.
        causal: a token sees no later one.
        window: (left, right): how many keys before and after its own a token sees; -1 for no limit.
        softmax_scale: 1 / sqrt(head_dim) where it is not given.
        num_splits: how many parts each sequence is cut into, at most; 0: all of the work is cut into equal stretches,
            one for each multiprocessor, whatever the lengths (Stream-K).
        return_lse: also the natural log of the sum of exp(scaled scores), float32 (batch, heads, seq_q).
        sinks, score_mod, mod_args: as `helpers.attention.flash_attention` has them.
        stage: one of DECODERS; without it the last.
        checked: whether the host reads cache_seqlens and block_table before the launch, and refuses what breaks their
            rules. On a GPU it has to wait for them, so this is for tests and for finding a fault, and no CUDA graph can
            be made of it. None: on the CPU engine, but not on a GPU.

    Returns:
        The output, of q's shape, dtype and kind of array; with return_lse, (o, lse). A token that sees no key gets 0,
        and lse -inf.

    Raises:
        TypeError: no array, a dtype that is not one of those, arguments of the wrong type.
        ValueError: shapes that do not fit each other; a cache that cannot be read where it is, or written; checked, a
            length or an entry of block_table that breaks the rules above.
        MemoryError: num_splits asks for more scratch than there is memory.
    """
    mod, of_mod = read(score_mod, None, mod_args)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, **of_mod}
    for name, a in (("block_table", block_table), ("k", k), ("v", v), ("sinks", sinks)):
        if a is not None:
            arrays[name] = a
    if checked is None:
        checked = not device.ON_GPU
    options = Options(causal, softmax_scale, num_splits, return_lse, stage, mod, checked, window)
    return _call(arrays, options)


class Options(NamedTuple):
    """What a call asks for, as it was given."""

    causal: bool = True
    softmax_scale: float | None = None
    num_splits: int = 0
    return_lse: bool = False
    stage: str | None = None
    mod: ScoreMod | None = None
    checked: bool = False
    window: tuple[int, int] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for options that mean the same. True and 1 are equal, so types belong to it."""
        window = self[-1]
        return self[:-1], *map(type, self), window if window is None else repr(window)


# ---- a call


class Planned:
    """A call that was checked, planned and compiled: only its arrays are new."""

    def __init__(
        self,
        decoder: Decoder,
        call: Call,
        inputs: Sequence[str],
        outputs: Mapping[str, tuple[tuple[int, ...], Any]],
        *,
        source: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            inputs: the names of the arrays of the call, in order. outputs: shapes and dtypes. source: another text of
                the kernel. sizes: in place of the decoder's own.
        """
        self.sizes = {**decoder.sizes(call), **(sizes or {})}
        self.scratch = decoder.scratch(call, self.sizes)
        self.launches = decoder.launches(call, self.sizes)
        self.outputs, self._zeroed, self._num_splits = [*outputs.values()], decoder.zeroed, call.num_splits
        self.names = (*inputs, *outputs, *self.scratch)
        code = source or decoder.file
        if call.mod:
            code = call.mod.text() + (code if "\n" in code else kernel.source(code))
        name = C_NAMES[call.arrays["q"].dtype.name]
        kernels = {launch.kernel: f"{launch.kernel}<{name}>" for launch in self.launches}
        with call.mod.explained() if call.mod else contextlib.nullcontext():
            loaded = kernel.load_all(code, tuple(kernels.values()), defines=self.sizes)
        self.kernels = [loaded[kernels[launch.kernel]] for launch in self.launches]
        self._direct: list[DirectLaunch] = []
        if device.ON_GPU:
            slots = {each: 8 * i for i, each in enumerate(self.names)}
            for launch, compiled in zip(self.launches, self.kernels, strict=True):
                arguments = Arguments(launch, compiled.function, slots)
                self._direct.append(DirectLaunch(arguments, launch, slots, {}))

    def __call__(self, kind: _Kind, given: Sequence[Any], *, compare: bool = False) -> Any:
        """Launch on the current device. compare: the arguments with the kernel's signature, as for a first call."""
        like, stream = given[0], kind.stream(given[0]) if device.ON_GPU else 0
        outputs = [kind.empty(shape, dtype, like) for shape, dtype in self.outputs]
        arrays = [*given, *outputs, *self._scratch_on(kind, like, stream)]
        if compare or not device.ON_GPU:
            with kind.on_stream_of(like):
                for launch in self.bind(dict(zip(self.names, map(kind.array, arrays), strict=True))):
                    launch()
        else:
            addresses = list(map(kind.pointer, arrays))
            for direct in self._direct:
                direct(addresses, stream)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def bind(self, arrays: Mapping[str, Any]) -> list[Callable[[], None]]:
        """The launches on these device arrays; every argument is compared with the kernel's signature, now."""
        return [
            compiled.bind(launch.grid, launch.block, launch.arguments(arrays), shared_mem=launch.shared_bytes)
            for launch, compiled in zip(self.launches, self.kernels, strict=True)
        ]

    def _scratch_on(self, kind: _Kind, like: Any, stream: int) -> list[Any]:
        """The scratch arrays: kept for a stream, whose launches follow each other. What a graph captures is its own."""
        captured = device.ON_GPU and kind.is_captured(stream)
        kept: dict[str, Any] = {}
        if not captured and stream != _OF_EACH_THREAD:
            kept = _KEPT.setdefault((kind, kind.device_id(like), stream), {})
        arrays = []
        for name, spec in self.scratch.items():
            a = kept.get(name)
            if a is None or math.prod(a.shape) < spec.size:
                try:
                    a = kept[name] = kind.empty((spec.size,), spec.dtype, like)
                except Exception as error:
                    if not self._num_splits or not _is_out_of_memory(error):
                        raise
                    size = spec.size * spec.dtype.itemsize
                    raise MemoryError(
                        f"num_splits = {self._num_splits}: {name}, what the parts hand to each other, takes {size:,} "
                        f"bytes, and there is no such memory: fewer parts are needed"
                    ) from error
                if name in self._zeroed:
                    with kind.on_stream_of(like):
                        kind.fill(a, 0)
            arrays.append(a)
        if captured:
            kind.keep(arrays)
        return arrays


def _is_out_of_memory(error: Exception) -> bool:
    """CuPy's is a MemoryError, PyTorch's a RuntimeError."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


_OF_EACH_THREAD = 2  # CUDA's handle of as many streams as threads
_KEPT: dict[tuple[Any, ...], dict[str, Any]] = {}
_PLANNED: Latest[Planned] = Latest()


def forget() -> None:
    """Forget all earlier calls and their scratch."""
    _PLANNED.clear()
    _KEPT.clear()


def _call(arrays: dict[str, Any], options: Options) -> Any:
    """Launch a call of known shapes, of which only the addresses are new; or plan one of new shapes."""
    given = (*arrays.values(),)
    kind = kind_of(*given)
    if kind is None:
        return _from_elsewhere(arrays, options)
    described = [*map(kind.describe, given)]
    key = kind, *arrays, options.key, *described
    try:
        planned = _PLANNED.get(key)
    except TypeError:  # an option that cannot be a key, and is to be refused
        planned = None
    if planned is None and not all(map(kind.takes, given)):
        return _from_elsewhere(arrays, options)
    with on_device(kind.device_id(given[0])):
        if planned is not None:
            if options.checked:
                _check_contents(kind, arrays, options)
            return planned(kind, given)
        specs = dict(zip(arrays, map(kind.spec, described), strict=True))
        decoder, call, outputs = check(specs, options)
        if options.checked:
            _check_contents(kind, arrays, options)
        if call is None:
            return _nothing_seen(kind, arrays["q"], outputs)
        copies = {name: kind.copy(arrays[name]) for name in _unreadable(call)}
        if call.softmax_scale < 0:  # kernels find maxima before they scale the scores
            copies["q"] = kind.negative(arrays["q"])
            options = options._replace(softmax_scale=-call.softmax_scale)
        if copies:
            if device.ON_GPU and kind.is_captured(kind.stream(given[0])):
                kind.keep([*copies.values()])
            return _call(arrays | copies, options._replace(checked=False))
        planned = Planned(decoder, call, tuple(arrays), outputs)
        result = planned(kind, given, compare=True)
        _PLANNED.keep(key, planned)
        return result


def _from_elsewhere(arrays: Mapping[str, Any], options: Options) -> Any:
    """The call on device arrays, and its result as an array like the caller's; NumPy's caches get the new tokens."""
    written = _WRITTEN[:2] if {"k", "v"} <= {*arrays} else ()
    for name in written:
        if not isinstance(arrays[name], (np.ndarray, device.cp.ndarray)) and kind_of(arrays[name]) is None:
            got = type(arrays[name]).__name__
            raise TypeError(f"{name} is written: an array of NumPy or the device, or a tensor on a GPU; got {got}")
        if getattr(arrays[name], "is_neg", bool)():  # a copy would get the new tokens
            raise ValueError(f"{name} is written, and its signs are not those in memory: {name}.resolve_neg()")
    if written:
        _check_written(arrays)
    q = as_device_array("q", arrays["q"])
    with q.device if device.ON_GPU else contextlib.nullcontext():
        there = {name: q if name == "q" else as_device_array(name, a) for name, a in arrays.items()}
        result = _call(there, options)
        for name in written:
            if there[name] is not arrays[name] and isinstance(arrays[name], np.ndarray):
                arrays[name][...] = device.cp.asnumpy(there[name])
    if isinstance(result, tuple):
        return tuple(as_kind_of(arrays["q"], a) for a in result)
    return as_kind_of(arrays["q"], result)


def _unreadable(call: Call) -> list[str]:
    """The arrays that have to be copied: all but the caches, which are too large, may be."""
    unreadable = []
    for name, a in call.arrays.items():
        if name in _ROWS:
            readable = name not in ("q", "k", "v") or (a.in_rows and a.aligned)
        else:
            readable = a.in_rows if name == "block_table" else name == "lse" or a.contiguous
        unreadable += [name] * (not readable)
    return unreadable


_ROWS = ("q", "k_cache", "v_cache", "k", "v", "o")


def _nothing_seen(kind: _Kind, like: Any, outputs: Mapping[str, tuple[tuple[int, ...], Any]]) -> Any:
    """What is returned where there is no token, or no room for a key: zeros, and lse -inf."""
    made = {name: kind.empty(shape, dtype, like) for name, (shape, dtype) in outputs.items()}
    with kind.on_stream_of(like):
        for name, a in made.items():
            kind.fill(a, -math.inf if name == "lse" else 0)
    return made["o"] if len(made) == 1 else tuple(made.values())


# ---- checks


def _check_contents(kind: _Kind, arrays: Mapping[str, Any], options: Options) -> None:
    """ValueError for lengths, or entries of the block table, that no launch may have. The host waits for them."""
    q, k_cache, table = arrays["q"], arrays["k_cache"], arrays.get("block_table")
    if device.ON_GPU and kind.is_captured(kind.stream(q)):
        raise ValueError("checked=True reads cache_seqlens on the host, which a CUDA graph cannot: checked=False")
    if "k" in arrays:
        _check_written({name: kind.array(a) for name, a in arrays.items() if name in _WRITTEN})
    check_slots(
        kind.host(arrays["cache_seqlens"]),
        None if table is None else kind.host(table),
        rows=k_cache.shape[1],
        pages=k_cache.shape[0],
        tokens=q.shape[1],
        appends="k" in arrays,
        window=mask_window(options.window, options.causal),
    )


_WRITTEN = ("k_cache", "v_cache", "k", "v")  # two of them, with what the two others have


def _check_written(arrays: Mapping[str, Any]) -> None:
    """ValueError for caches that cannot get new tokens: read-only ones, and two that share memory."""
    for name in _WRITTEN[:2]:
        if isinstance(arrays[name], np.ndarray) and not arrays[name].flags.writeable:
            raise ValueError(f"{name} is read-only, and gets the new tokens of k and v: give {name}.copy()")
        if isinstance(arrays[name], np.ndarray):
            _check_no_repeats(name, arrays[name])
    if not all(isinstance(arrays[name], (np.ndarray, device.cp.ndarray)) for name in _WRITTEN):
        return
    k_cache, v_cache, k, v = (_Addresses(arrays[name]) for name in _WRITTEN)
    if k_cache == v_cache and k == v:  # each key is its value
        return
    if np.shares_memory(np.asarray(k_cache), np.asarray(v_cache)):
        raise ValueError("k_cache and v_cache share memory: new keys and values would overwrite each other")


def _check_no_repeats(name: str, cache: Any) -> None:
    """ValueError for a cache, or its spec, that new tokens would be written into several times at once."""
    if any(step == 0 and n > 1 for n, step in zip(cache.shape, cache.strides, strict=True)):
        raise ValueError(
            f"{name} has shape {cache.shape} and strides {cache.strides}: several of its keys are one in memory, into "
            f"which k and v would be written: give {name}.copy()"
        )


class _Addresses:
    """Where an array's elements are, for NumPy to compare: it reads no memory for that, so the device's will do."""

    def __init__(self, a: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address(a), True),
            "typestr": f"|V{a.dtype.itemsize}",
            "shape": tuple(a.shape),
            "strides": tuple(a.strides),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Addresses) and self.__array_interface__ == other.__array_interface__

    __hash__ = None  # type: ignore[assignment]


def check(
    specs: Mapping[str, Spec], options: Options
) -> tuple[Decoder, Call | None, dict[str, tuple[tuple[int, ...], Any]]]:
    """Who does a call, the call, None where there is nothing to see, and the shapes and dtypes of what it returns.

    Raises:
        TypeError, ValueError: as `flash_attention_with_kvcache`.
    """
    q, k_cache, table = specs["q"], specs["k_cache"], specs.get("block_table")
    decoder = _decoder_of(specs, options)
    _check_shapes(specs)
    for name, a in specs.items():
        if a.device != q.device:
            raise ValueError(f"{name} is on GPU {a.device} and q on GPU {q.device}: one device for all is needed")
    check_flags(return_lse=options.return_lse, checked=options.checked)
    splits = whole_number("num_splits", options.num_splits)
    if splits < 0:
        raise ValueError(f"num_splits = {splits}; 1 or more are possible, or 0 for equal stretches of all work")
    window = mask_window(options.window, options.causal)
    scale = softmax_scale_of(options.softmax_scale, q.shape[3])
    batch, tokens, heads, _ = q.shape
    outputs: dict[str, tuple[tuple[int, ...], Any]] = {"o": (q.shape, q.dtype)}
    if options.return_lse:
        outputs["lse"] = (batch, heads, tokens), np.dtype(np.float32)
    room = k_cache.shape[1] * (table.shape[1] if table else 1)
    if not (batch and tokens and room):
        return decoder, None, outputs
    arrays = {**specs, **{name: Spec.dense(shape, dtype) for name, (shape, dtype) in outputs.items()}}
    # More parts than 16 keys, the smallest tile, would be empty ones.
    call = Call(arrays, window, scale, min(splits, -(-room // SMALLEST_TILE)), of_call(options.mod, arrays))
    return decoder, call, outputs


def _decoder_of(specs: Mapping[str, Spec], options: Options) -> Decoder:
    stage, q = options.stage, specs["q"]
    if stage is not None and (not isinstance(stage, str) or stage not in DECODERS):
        raise ValueError(f"stage={stage!r} does not decode; there are: {', '.join(DECODERS)}")
    decoder = SPLIT_KV if stage is None else DECODERS[stage]
    if q.dtype.name not in decoder.dtypes:
        raise TypeError(f"q is {q.dtype}; {decoder.name} takes {', '.join(decoder.dtypes)}: q.astype('float16')")
    if limits.compute_capability() < decoder.min_cc:
        here = limits.compute_capability() / 10
        raise ValueError(f"{decoder.name} needs compute capability {decoder.min_cc / 10}; this GPU has {here}")
    missing = [name for name in ("block_table", "k", "sinks") if name in specs] + ["score_mod"] * bool(options.mod)
    if decoder is not SPLIT_KV and missing:
        raise ValueError(f"{decoder.name} is a step to {SPLIT_KV.name}: it has no {missing[0]}")
    return decoder


def _check_shapes(specs: Mapping[str, Spec]) -> None:
    q, k_cache, v_cache = specs["q"], specs["k_cache"], specs["v_cache"]
    table, lengths = specs.get("block_table"), specs["cache_seqlens"]
    forms = {"q": "(batch, seq_q, heads, head_dim)", "k": "(batch, seq_q, kv_heads, head_dim)"}
    of_cache = "(pages, page_size, kv_heads, head_dim)" if table else "(batch, seq_max, kv_heads, head_dim)"
    forms |= {"k_cache": of_cache, "v_cache": of_cache, "v": forms["k"]}
    for name, a in specs.items():
        if name not in forms:
            continue
        if a.ndim != 4:
            raise ValueError(f"{name} has shape {a.shape}; 4 axes are needed: {forms[name]}")
        _check_same_dtype(name, a, q)
        if a.shape[1] >= MAX_ROWS:
            raise ValueError(f"{name} has shape {a.shape}; fewer than {MAX_ROWS:,} rows are needed")
        if a.shape[3] != q.shape[3]:
            raise ValueError(f"head_dim differs: q has shape {q.shape} and {name} {a.shape}")
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim = {head_dim}; decoding takes {', '.join(map(str, HEAD_DIMS))}")
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"k_cache has shape {k_cache.shape} and v_cache {v_cache.shape}: each key needs its value")
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} heads of q cannot share {kv_heads} heads of the cache: kv_heads must divide heads")
    if lengths.dtype != np.int32:
        raise TypeError(f"cache_seqlens is {lengths.dtype}; int32 is needed: cache_seqlens.astype('int32')")
    if lengths.shape != (batch,):
        raise ValueError(f"cache_seqlens has shape {lengths.shape}; ({batch},) is needed, a number for each sequence")
    room = k_cache.shape[1]
    if table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"q has {batch} sequences and the cache {k_cache.shape[0]}: one number is needed")
    else:
        if table.dtype != np.int32:
            raise TypeError(f"block_table is {table.dtype}; int32 is needed: block_table.astype('int32')")
        if table.ndim != 2 or table.shape[0] != batch:
            raise ValueError(f"block_table has shape {table.shape}; ({batch}, pages of a sequence) is needed")
        if room < 1 or room & (room - 1):
            raise ValueError(f"pages of {room} keys; a power of two is needed")
        room *= table.shape[1]
        if room >= MAX_ROWS:
            raise ValueError(f"block_table has shape {table.shape}: {room:,} keys; fewer than {MAX_ROWS:,} are needed")
    if ("k" in specs) != ("v" in specs):
        raise ValueError("k and v come together: each new key needs its value")
    if "k" in specs:
        wanted = batch, tokens, kv_heads, head_dim
        for name in "kv":
            if specs[name].shape != wanted:
                raise ValueError(f"{name} has shape {specs[name].shape}; {wanted} is needed: as many tokens as q has")
        if tokens > room:
            raise ValueError(f"{tokens} new tokens, and the cache has room for {room}")
        for name in _WRITTEN[:2]:
            _check_no_repeats(name, specs[name])
    for name in ("k_cache", "v_cache"):
        if not (specs[name].in_rows and specs[name].aligned):
            raise ValueError(
                f"{name} is read where it is: the words of a row must be neighbours, and rows start at multiples of 16 "
                f"bytes; got strides {specs[name].strides}"
            )
        if specs[name].strides[1] >= 2**32 or (table is not None and specs[name].strides[0] >= 2**32):
            raise ValueError(f"{name} has strides {specs[name].strides}; a row or a page is less than 4 GB long")
    if (sinks := specs.get("sinks")) and (sinks.dtype != np.float32 or sinks.shape != (heads,)):
        raise ValueError(f"sinks is {sinks.dtype} {sinks.shape}; float32 ({heads},) is needed: one for each head")


# ---- for X-rays and experiments


def plan(
    arrays: Mapping[str, Any], options: Options, *, source: str | None = None, sizes: Mapping[str, int] | None = None
) -> tuple[Planned, dict[str, Any]]:
    """A call of device arrays, planned, and all its arrays by name: outputs full of NaN, tickets of 0.

    `planned.bind(arrays)` gives its launches; source and sizes are as `Planned` has them.
    """
    kind, cp = DeviceArrays(), device.cp
    decoder, call, outputs = check({name: kind.spec(kind.describe(a)) for name, a in arrays.items()}, options)
    if call is None:
        raise ValueError("there is nothing to launch: no token, or no room for a key")
    planned = Planned(decoder, call, tuple(arrays), outputs, source=source, sizes=sizes)
    made = {name: cp.full(shape, np.nan, dtype=dtype) for name, (shape, dtype) in outputs.items()}
    for name, spec in planned.scratch.items():
        made[name] = cp.full(spec.shape, 0 if name in decoder.zeroed else np.nan, dtype=spec.dtype)
    return planned, {**arrays, **made}

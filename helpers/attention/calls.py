"""Attention for models: one entry point to all stages of the ladder, with the names of FlashAttention's own interface.

    from helpers.attention import flash_attention, flash_attention_backward
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)  # (batch, seq, heads, head_dim)
    dq, dk, dv = flash_attention_backward(do, q, k, v, o, lse, causal=True)

The arrays may be NumPy's, the device's (CuPy's on a GPU), or anything with `__dlpack__`, such as PyTorch's and JAX's
tensors; for PyTorch's with gradients there is `helpers.torch_attention`. The output is an array of q's kind, on q's
device. A device array is read where it is, whatever its strides, as long as the words of a row are neighbours:
`q.swapaxes(1, 2)` of a (batch, heads, seq, head_dim) array costs nothing.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder import LADDER, Stage, backward_of, default_of, forward_of
from helpers.attention.ladder.call import (
    BATCHED,
    CU_SEQLENS,
    MAX_ROWS,
    PACKED,
    Options,
    check_cu_seqlens,
    check_gradient_arrays,
    check_model_arrays,
    longest_of,
)
from helpers.attention.ladder.extras import NAMES, check_positions, extra_inputs
from helpers.attention.ladder.extras import needs as needs_of_extras
from helpers.attention.ladder.kinds import DeviceArrays, TorchTensors, kind_of, kind_of_all, on_device
from helpers.attention.ladder.layout import four_axes
from helpers.attention.ladder.plan import WITH_HEAD_DIM, Ready, plan

_CPU, _CUDA, _CUDA_HOST, _MANAGED = 1, 2, 3, 13  # device types of DLPack


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    bias: Any = None,
    alibi_slopes: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    stage: str | int | None = None,
) -> Any:
    """softmax(softmax_scale * q k^T + bias) v for each head of each batch, with q and k rotated where that is asked.

    Args:
        q: (batch, seq, heads, head_dim).
        k, v: (batch, seq_kv, kv_heads, head_dim) of q's dtype. kv_heads divides heads: that many heads of q in a row
            share one of k and v (grouped-query attention; with one, multi-query).
        causal: query i sees key j up to i + seq_kv - seq: the last query sees every key (bottom-right alignment, as
            FlashAttention defines it since version 2.1).
        window: (left, right): how many keys before and after that diagonal a query sees; -1 for no limit. With
            causal=True right is 0.
        softmax_scale: 1 / sqrt(head_dim) where it is not given.
        return_lse: also the natural log of the sum of exp(scaled scores), float32 (batch, heads, seq).
        bias: (batch, heads, seq, seq_kv), each axis of that length or 1; leading axes may be left out, as in NumPy's
            broadcasting; read where it is, whatever its strides. Of q's dtype or float32: added to the scaled scores;
            below about -1e37 it counts as -inf. Of bool: True where a query may see a key. (So is PyTorch's attn_mask.)
            Combines with causal and window. Fastest with keys that are neighbours and rows at multiples of 16 bytes.
        alibi_slopes: float32 (heads,) or (batch, heads): -slope * |i + seq_kv - seq - j| is added to the scaled scores
            (Press et al. 2022, "Train Short, Test Long", whose masks are causal; both sides as FlashAttention has it).
        rotary_cos, rotary_sin: (positions, rotary_dim / 2) of q's dtype or float32, for a rotary embedding of the first
            rotary_dim words of each row of q and k (Su et al. 2021, "RoFormer"). Computed in float32 and rounded to
            q's dtype. In half types rotary_dim is a multiple of 16.
        rotary_interleaved: words 2 p and 2 p + 1 are a pair (GPT-J); else p and p + rotary_dim / 2 (GPT-NeoX, Llama).
        rotary_positions: (q_positions, k_positions), int32 of shape (seq,) or (batch, seq), and of (seq_kv,) or
            (batch, seq_kv); None: query i is at i + seq_kv - seq and key j at j. Only those in NumPy arrays are looked
            at: elsewhere a position that is not in the tables counts as the nearest that is.
        stage: a stage of the ladder, by name or number; without it the last, and fastest, that can do this here
            (10 only on a GPU, and not for little work; 11 only with a bias, slopes or a rotary embedding).

    Returns:
        The output, of q's shape, dtype and kind of array; with return_lse, (o, lse). A query that sees no key, or none
        whose bias is above -inf, gets 0, and lse -inf. A launch with few blocks gets smaller tiles: in another batch,
        or of another length, the same query may differ in the last bits.

    Raises:
        TypeError: no array, a dtype that no stage takes, arguments of the wrong type.
        ValueError: shapes that do not fit each other; a malformed window; a stage that cannot do this: the message
            says why, and which stages can.
    """
    extras = extra_inputs(bias, alibi_slopes, rotary_cos, rotary_sin, rotary_interleaved, rotary_positions)
    options = Options(causal, softmax_scale, return_lse, False, rotary_interleaved, stage, window)
    return _call({"q": q, "k": k, "v": v, **extras}, options)


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    stage: str | int | None = None,
) -> Any:
    """flash_attention of sequences of several lengths, packed one after the other with no padding.

    Sequence i has the tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q, and so of k and v. A sequence may be
    empty on either side: without keys, its queries get 0 and lse -inf.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (tokens_kv, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: 0, then the tokens up to the end of each sequence. Without
            max_seqlen_q and max_seqlen_k the host reads them, so that a mistake is an error; a device array is waited
            for.
        max_seqlen_q, max_seqlen_k: at least the rows of the longest sequence of q and of k. With both, the host does
            not read cu_seqlens, so that the call can be captured in a CUDA graph. On a GPU nothing is then known to be
            wrong: with a max_seqlen_q that is too small, rows at the end of a sequence are not written.
        bias: refused: packed sequences have no common (seq, seq_kv).
        alibi_slopes: float32 (heads,) or (sequences, heads).
        rotary_positions: (q_positions, k_positions), int32 (tokens,) and (tokens_kv,); None: in each sequence, query i
            is at i + its keys - its queries, and key j at j. A query before the first key counts as position 0.
        The others: as flash_attention has them; the diagonal of causal and window is each sequence's own.

    Returns:
        The output as q, (tokens, heads, head_dim); with return_lse, (o, lse), lse float32 (heads, tokens).

    Raises:
        TypeError, ValueError: as flash_attention, and for cu_seqlens that are not int32, do not begin at 0, fall, or do
        not end at the number of tokens.
    """
    extras = extra_inputs(bias, alibi_slopes, rotary_cos, rotary_sin, rotary_interleaved, rotary_positions)
    options = Options(causal, softmax_scale, return_lse, False, rotary_interleaved, stage, window)
    longest = _longest(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _call({"q": q, "k": k, "v": v, **lengths, **extras}, options, longest)


def flash_attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    stage: str | int | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of sum(do * flash_attention(q, k, v)) with respect to q, k and v.

    Args:
        do: the gradient of the loss with respect to the output, (batch, seq, heads, head_dim), of q's dtype.
        q, k, v, causal, window, softmax_scale: as flash_attention had them.
        o, lse: what flash_attention(..., return_lse=True) returned: (batch, seq, heads, head_dim) of q's dtype, and
            float32 (batch, heads, seq).
        deterministic: the same bits in every run, on the same device. Without it, blocks add to dq in any order.
        stage: a stage of the ladder that computes gradients, by name or number; without it the last that can do this.

    Returns:
        (dq, dk, dv) with the shapes, the dtype and the kind of q, k and v, C-contiguous. Where heads of q share a head
        of k and v, its gradients are summed over them. A query that sees no key has a gradient of 0, and so has a key
        that no query sees.

    Raises:
        TypeError, ValueError: as flash_attention, and for do, o and lse that do not fit q.
    """
    options = Options(causal, softmax_scale, False, deterministic, False, stage, window)
    return _call({"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}, options)


def flash_attention_varlen_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    stage: str | int | None = None,
) -> tuple[Any, Any, Any]:
    """flash_attention_backward of sequences of several lengths, packed as flash_attention_varlen has them.

    Args:
        do, q, o: (tokens, heads, head_dim). lse: float32 (heads, tokens).
        k, v: (tokens_kv, kv_heads, head_dim).
        The others: as flash_attention_varlen and flash_attention_backward have them.

    Returns:
        (dq, dk, dv), as flash_attention_backward.

    Raises:
        TypeError, ValueError: as flash_attention_varlen, and for do, o and lse that do not fit q.
    """
    longest = _longest(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    options = Options(causal, softmax_scale, False, deterministic, False, stage, window)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _call({"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, **lengths}, options, longest)


# ---- a call of any kind: its arrays by name, its options, and the rows and keys of the longest sequence if packed

_Kind = DeviceArrays | TorchTensors
_Lengths = tuple[int | None, int | None]


def _call(arrays: dict[str, Any], options: Options, longest: _Lengths = (None, None)) -> Any:
    """Launch a call that was planned before; plan and launch any other."""
    given = (*arrays.values(),)
    kind, key = kind_of_all(*given), None
    if kind is not None:
        # A forward does not depend on the longest keys, unless the rotary tables must reach as far.
        lengths = longest if "do" in arrays or "rotary_cos" in arrays else longest[0]
        key = kind, *arrays, options.key, lengths, *map(kind.describe, given)
        try:
            planned = _PLANNED.get(key)
        except TypeError:  # an option that cannot be a key, and is to be refused
            planned = key = None
        if planned is not None:
            return planned(kind, given)
    return _first(kind, key, arrays, options, longest)


class _PlannedCall:
    """A call that was checked, planned and compiled before: only its arrays are new."""

    def __init__(self, ready: Ready, inputs: Sequence[str], outputs: Mapping[str, _Output], device_id: int) -> None:
        """
        Args:
            inputs: the names of the arrays of the call, in order. outputs: as `_outputs` gives them.
        """
        self._ready, self._outputs, self._device_id = ready, tuple(outputs.values()), device_id
        self._names = (*inputs, *outputs)
        self._scratch = [(spec.shape, spec.dtype.name) for spec in ready.scratch.values()]
        self._launches = ready.direct((*self._names, *ready.scratch)) if device.ON_GPU else []

    def __call__(self, kind: _Kind, given: Sequence[Any]) -> Any:
        """Launch. The arrays are like the first call's: same shapes, strides, dtypes, alignment and device."""
        with on_device(self._device_id):
            outputs = [make(kind, given) for make in self._outputs]
            self.launch(kind, [*given, *outputs])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def launch(self, kind: _Kind, arrays: list[Any]) -> None:
        """Launch on these inputs and outputs, on the current device."""
        if device.ON_GPU:
            like = arrays[0]
            if self._scratch:
                arrays += [kind.empty(shape, dtype, like) for shape, dtype in self._scratch]
            addresses, stream = list(map(kind.pointer, arrays)), kind.stream(like)
            for launch in self._launches:
                launch(addresses, stream)
        else:
            self._ready.bind(_as_stages_have_them(zip(self._names, arrays, strict=True)))()


_PLANNED: dict[tuple[Hashable, ...], _PlannedCall] = {}
_MOST_PLANNED = 1024  # lengths that change at every call would else fill the memory


def forget() -> None:
    """Forget all earlier calls: the next one of each kind is checked and planned again."""
    _PLANNED.clear()


# ---- the first call of its kind


def _first(
    kind: _Kind | None, key: tuple[Hashable, ...] | None, arrays: dict[str, Any], options: Options, longest: _Lengths
) -> Any:
    """Check the call, choose a stage, launch it; and keep what was worked out, if nothing had to be copied."""
    like = arrays["q"]
    with contextlib.ExitStack() as contexts:
        if kind is not None:
            contexts.enter_context(on_device(kind.device_id(like)))
            contexts.enter_context(kind.on_stream_of(like))
        inputs = {name: _on_device(name, a, kind) for name, a in arrays.items() if name in _OF_MODELS}
        if kind is None and device.ON_GPU:
            contexts.enter_context(inputs["q"].device)
        _check(inputs, packed="cu_seqlens_q" in arrays)
        inputs |= _lengths_on_device(arrays, kind)
        inputs |= _extras_on_device(arrays, kind, inputs["q"])
        views = _as_stages_have_them(inputs.items())
        stage = _choose(views, options)
        checked = options.checked(views["q"].shape[-1])
        ours = kind or kind_of(inputs["q"])
        makers = _outputs(stage, tuple(arrays), views, options)
        given = tuple((arrays if kind else inputs).values())
        outputs = [make(ours, given) for make in makers.values()]
        written = {name: ours.array(a) for name, a in zip(makers, outputs, strict=True)}
        if views["q"].size == 0 or ("do" in views and views["k"].size == 0):  # packed sequences without a token
            for a in written.values():
                a[...] = 0
        else:
            ready, read, in_place = plan(stage, views | _as_stages_have_them(written.items()), checked, longest=longest)
            planned = _PlannedCall(ready, tuple(arrays), makers, kind.device_id(like)) if key and in_place else None
            if planned and device.ON_GPU and ready.checked:
                planned.launch(kind, [*given, *outputs])
            else:
                ready.bind(read)()
            if planned:
                _remember(key, planned)
    if kind is None:
        sources = (_SOURCES.get(name, "q") for name in makers)
        outputs = [_as_kind_of(arrays[source], a) for source, a in zip(sources, outputs, strict=True)]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _remember(key: tuple[Hashable, ...], planned: _PlannedCall) -> None:
    if len(_PLANNED) >= _MOST_PLANNED:
        _PLANNED.clear()
    _PLANNED[key] = planned


_OF_MODELS = WITH_HEAD_DIM | {"lse"}
_SOURCES = {"dq": "q", "dk": "k", "dv": "v"}  # what an output is like, where that is not q
_Output = Callable[[_Kind, Sequence[Any]], Any]


def _as_stages_have_them(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Arrays (batch, seq, heads, head_dim) as (batch, heads, seq, head_dim); packed ones as (1, heads, tokens, ...)."""
    return {name: four_axes(a.swapaxes(-3, -2)) if name in WITH_HEAD_DIM else a for name, a in named}


def _outputs(stage: Stage, names: Sequence[str], views: Mapping[str, Any], options: Options) -> dict[str, _Output]:
    """How what a call returns is made of its arrays, by name; a stage without strides writes whole heads."""
    if stage.direction == "backward":
        return {name: _empty_like(names.index(source)) for name, source in _SOURCES.items()}
    q = views["q"]
    first = names.index("q")
    lse_shape = q.shape[:-1] if "cu_seqlens_q" not in views else q.shape[1:-1]
    shape, dtype = q.shape, q.dtype.name

    def whole_heads(kind: _Kind, given: Sequence[Any]) -> Any:
        return kind.empty(shape, dtype, given[first]).swapaxes(-3, -2)

    def lse(kind: _Kind, given: Sequence[Any]) -> Any:
        return kind.empty(lse_shape, "float32", given[first])

    o = _empty_like(first) if "strides" in stage.features else whole_heads
    return {"o": o, "lse": lse} if options.return_lse else {"o": o}


def _empty_like(number: int) -> _Output:
    return lambda kind, given: kind.empty_like(given[number])


def _check(inputs: Mapping[str, Any], packed: bool) -> None:
    """TypeError or ValueError where device arrays do not fit each other."""
    q, k, v = (inputs[name] for name in "qkv")
    check_model_arrays(q, k, v, PACKED if packed else BATCHED)
    if "do" not in inputs:
        return
    do, o, lse = (inputs[name] for name in ("do", "o", "lse"))
    check_gradient_arrays(do, q, o, lse, q.swapaxes(-3, -2).shape[:-1])
    for name in ("do", "o", "lse"):
        _check_device(name, inputs[name], q)


def _check_device(name: str, a: Any, q: Any) -> None:
    if device.ON_GPU and a.device != q.device:
        raise ValueError(f"{name} is on {a.device} and q on {q.device}: one device for all is needed")


def _extras_on_device(arrays: Mapping[str, Any], kind: _Kind | None, q: Any) -> dict[str, Any]:
    """The extra inputs as device arrays, on q's device. NumPy's stay until their values have been looked at."""
    extras = {name: a for name, a in arrays.items() if name in NAMES}
    for name, a in extras.items():
        if type(a) is not np.ndarray:
            extras[name] = _on_device(name, a, kind)
            _check_device(name, extras[name], q)
    check_positions(extras)
    return {name: device.cp.asarray(a) for name, a in extras.items()}


def _lengths_on_device(arrays: Mapping[str, Any], kind: _Kind | None) -> dict[str, Any]:
    """cu_seqlens_q and cu_seqlens_k as device arrays, where sequences are packed."""
    lengths = {name: _on_device(name, arrays[name], kind) for name in CU_SEQLENS if name in arrays}
    for name, cu in lengths.items():
        check_cu_seqlens(name, cu)
    sequences = [len(cu) - 1 for cu in lengths.values()]
    if sequences and sequences[0] != sequences[1]:
        raise ValueError(f"cu_seqlens_q describes {sequences[0]} sequences and cu_seqlens_k describes {sequences[1]}")
    return lengths


def _choose(views: Mapping[str, Any], options: Options) -> Stage:
    """The stage that was asked for, or the one for calls that name none."""
    if not isinstance(options.deterministic, (bool, np.bool_)):
        got = f"{type(options.deterministic).__name__} {options.deterministic!r:.40}"
        raise TypeError(f"deterministic is True or False; got {got}")
    q, wanted = views["q"], options.stage
    needs = {**options.needs(q, views["k"], packed="cu_seqlens_q" in views), **needs_of_extras(views)}
    stages = (backward_of if "do" in views else forward_of)(LADDER)
    if wanted is None:
        if (stage := default_of(stages, q.shape[-2], math.prod(q.shape[:-1]), **needs)) is not None:
            return stage
        dtypes = sorted({dtype for stage in stages.values() for dtype in stage.dtypes})
        if q.dtype.name not in dtypes:
            raise TypeError(f"q is {q.dtype}; the stages take {', '.join(dtypes)}: q.astype('float32')")
        reasons = (f"{name}: {stage.why_not(**needs)}" for name, stage in stages.items())
        raise ValueError("no stage can: " + "; ".join(reasons))
    named = [s for s in stages.values() if wanted in (s.name, s.number) and wanted is not True]
    stage = next((s for s in reversed(named) if s.why_not(**needs) is None), named[-1] if named else None)
    if stage is None:
        names = ", ".join(f"{stage.number} {stage.name}" for stage in stages.values())
        raise ValueError(f"stage={wanted!r} is not in the ladder, which has: {names}")
    if reason := stage.why_not(**needs):
        able = ", ".join(name for name, other in stages.items() if other.why_not(**needs) is None)
        raise ValueError(f"stage {stage.name} cannot: {reason}. Stages that can: {able or 'none'}")
    return stage


def _longest(
    cu_seqlens_q: Any, cu_seqlens_k: Any, q: Any, k: Any, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> _Lengths:
    """Rows of the longest sequence of q, and of k: as the caller says, or from the numbers, which are then checked."""
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        whole = isinstance(most, (int, np.integer)) and not isinstance(most, bool)
        if most is not None and not (whole and 0 <= most < MAX_ROWS):
            raise TypeError(f"{name} is a whole number of rows, or None; got {type(most).__name__} {most!r:.40}")
    both_given = max_seqlen_q is not None and max_seqlen_k is not None
    if both_given and device.ON_GPU:
        return int(max_seqlen_q), int(max_seqlen_k)
    longest: list[int] = []
    host = None
    for of, given_cu, a, most in (("q", cu_seqlens_q, q, max_seqlen_q), ("k", cu_seqlens_k, k, max_seqlen_k)):
        if getattr(a, "ndim", 0) != len(PACKED):
            return None, None  # which is refused further on
        if of == "q" or cu_seqlens_k is not cu_seqlens_q:  # one array for both is read once
            kind = kind_of(given_cu)
            given = _on_device(f"cu_seqlens_{of}", given_cu, None) if kind is None else given_cu
            host = (kind or kind_of(given)).host(given)
        longest.append(longest_of(f"cu_seqlens_{of}", host, of, a.shape[0]))
        if most is not None and longest[-1] > most:
            raise ValueError(f"max_seqlen_{of} = {most}, and the longest sequence of {of} has {longest[-1]} rows")
    return (int(max_seqlen_q), int(max_seqlen_k)) if both_given else (longest[0], longest[1])


def _on_device(name: str, a: Any, kind: _Kind | None) -> Any:
    """A device array that shares a's memory, where a is of a known kind or on a GPU; otherwise a copy on the device."""
    if kind is not None:
        return kind.array(a)
    if isinstance(a, device.cp.ndarray):
        return a
    if isinstance(a, np.ndarray):
        return device.cp.asarray(a)
    if getattr(a, "requires_grad", False) is True:
        raise TypeError(
            f"{name} requires grad, and this function keeps nothing for gradients: use "
            f"helpers.torch_attention.flash_attention, or give {name}.detach()"
        )
    if not hasattr(a, "__dlpack__"):
        raise TypeError(f"{name} is an array of NumPy or the device, or one with __dlpack__; got {type(a).__name__}")
    where = int(a.__dlpack_device__()[0])
    if where not in (_CPU, _CUDA, _CUDA_HOST, _MANAGED):
        raise TypeError(f"{name} is on a device of DLPack's type {where}; the CPU (1) or a CUDA GPU (2) is needed")
    if where != _CPU and not device.ON_GPU:
        raise TypeError(f"{name} is on a GPU, and the kernels run on the CPU engine here: move it to the CPU")
    try:
        return device.cp.asarray(np.from_dlpack(a)) if where == _CPU else device.cp.from_dlpack(a)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name}, a {type(a).__name__}, does not come through DLPack: {error}") from error


def _as_kind_of(like: Any, a: Any) -> Any:
    """A device array as the kind of array that `like` is, on the device where it is."""
    if isinstance(like, device.cp.ndarray):
        return a
    if isinstance(like, np.ndarray) or int(like.__dlpack_device__()[0]) == _CPU:
        a = device.cp.asnumpy(a)
    if isinstance(like, np.ndarray):
        return a
    library = sys.modules[type(like).__module__.partition(".")[0]]
    from_dlpack = getattr(library, "from_dlpack", None) or getattr(
        getattr(library, "dlpack", None), "from_dlpack", None
    )
    return from_dlpack(a) if from_dlpack else a

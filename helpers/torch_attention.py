"""Attention for PyTorch, with gradients: the course's kernels where a model calls torch's.

    from helpers.torch_attention import flash_attention, scaled_dot_product_attention
    o = flash_attention(q, k, v, causal=True)                    # (batch, seq, heads, head_dim), as FlashAttention
    o = scaled_dot_product_attention(q, k, v, is_causal=True)    # (..., heads, seq, head_dim), as torch.nn.functional

Tensors on a GPU are read where they are, on PyTorch's current stream; outputs and scratch are of PyTorch's allocator.
Tensors on the CPU go through the CPU engine where there is no GPU (no copy), and through the GPU where there is one.
A call is an `autograd.Function`. Where PyTorch traces it, forward and backward are one `torch.library` operator each,
`course::flash_attention` and `course::flash_attention_backward`, which `torch.compile(fullgraph=True)` keeps as nodes.

PyTorch is optional: this module alone, and what imports it, needs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers import device
from helpers.attention import calls
from helpers.attention.ladder.call import mask_window, softmax_scale_of
from helpers.engine.cuda_source.signatures import dtype_of

try:
    import torch
except ImportError as error:
    raise ImportError(
        "helpers.torch_attention needs PyTorch, which is not installed here: pip install torch. "
        "helpers.attention does without it, for arrays of NumPy and CuPy."
    ) from error

__all__ = ["flash_attention", "flash_attention_varlen", "run_flash", "scaled_dot_product_attention"]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    stage: str | int | None = None,
) -> torch.Tensor:
    """softmax(softmax_scale * q k^T) v for each head of each batch, differentiable once.

    Args:
        q: (batch, seq, heads, head_dim): float32, float16 or bfloat16, of any strides.
        k, v: (batch, seq_kv, kv_heads, head_dim) of q's dtype and device. kv_heads divides heads.
        causal: query i sees key j up to i + seq_kv - seq (bottom-right alignment, as FlashAttention has it).
        window: (left, right): how many keys before and after that diagonal a query sees; -1 for no limit.
        softmax_scale: 1 / sqrt(head_dim) where it is not given.
        deterministic: gradients that are the same to the bit in every run, on the same device. Also where
            `torch.use_deterministic_algorithms(True)` was called.
        stage: a stage of the ladder for the forward, by name or number; without it the last that can. The first four
            keep no log-sum-exp, so they have no gradients.

    Returns:
        The output: q's shape, C-contiguous, of q's dtype; under `torch.autocast` of autocast's dtype. A query that
        sees no key gets 0.

    Raises:
        TypeError: no tensors; a dtype that no stage takes; options of the wrong type.
        ValueError: shapes or devices that do not fit each other; something that no stage, or not this one, can do.
        NotImplementedError: when it is differentiated twice.
    """
    return _call(q, k, v, None, None, None, None, causal, window, softmax_scale, deterministic, stage)


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    stage: str | int | None = None,
) -> torch.Tensor:
    """flash_attention of sequences of several lengths, packed one after the other with no padding.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (tokens_kv, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on q's device: 0, then the tokens up to the end of each
            sequence. Without max_seqlen_q and max_seqlen_k the host reads them, and waits for the GPU.
        max_seqlen_q, max_seqlen_k: at least the rows of the longest sequence of q and of k. With both, the call can be
            captured in a CUDA graph; too small a number on a GPU leaves rows unwritten.
        The others: as flash_attention has them; the diagonal of causal and window is each sequence's own.

    Returns:
        The output as q, (tokens, heads, head_dim).

    Raises:
        TypeError, ValueError: as flash_attention, and for cu_seqlens that are not int32, do not begin at 0, fall, or do
        not end at the number of tokens.
    """
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    for name, cu in zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=False):
        if not isinstance(cu, torch.Tensor):
            raise TypeError(f"{name} is a torch tensor; got {type(cu).__name__}")
    return _call(q, k, v, *packed, causal, window, softmax_scale, deterministic, stage)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by the course's kernels: its layout, defaults and alignment.

    Args:
        query: (..., heads, L, head_dim), or (L, head_dim).
        key, value: (..., heads, S, head_dim). What is before L and S is broadcast, as PyTorch does.
        attn_mask: broadcasts to (..., heads, L, S). Of bool: True where a query may see a key. Of query's dtype or
            float32: added to the scaled scores. Not with gradients, nor under torch.compile: there is no backward.
        dropout_p: 0.0. The kernels have none.
        is_causal: query i sees key j where j <= i, also where L and S differ (top-left alignment; flash_attention's
            causal=True is bottom-right).
        scale: 1 / sqrt(head_dim) where it is not given.
        enable_gqa: key and value may have fewer heads, a divisor of query's.

    Returns:
        (..., heads, L, head_dim).

    Raises:
        RuntimeError: PyTorch's own error for shapes and dtypes that do not fit each other.
        NotImplementedError: gradients with attn_mask, dropout, or a value whose head_dim is not the key's. It says what
            to use.
        TypeError, ValueError: as flash_attention.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p = {dropout_p}: these kernels have no dropout. Set it to 0.0 (model.eval() does in most models) "
            "or call torch.nn.functional.scaled_dot_product_attention"
        )
    for name, a in (("query", query), ("key", key), ("value", value)):
        if not isinstance(a, torch.Tensor):
            raise TypeError(f"{name} is a torch tensor; got {type(a).__name__}")
        if a.device != query.device:
            raise RuntimeError(f"{name} is on {a.device} and query on {query.device}: one device for all is needed")
    query, key, value = _autocast(query, key, value)
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    lead = _leading_axes(query, key, value, enable_gqa)
    if lead is None:
        _refuse(query, key, value, options)
    rows, keys = query.shape[-2], key.shape[-2]
    if attn_mask is not None:
        return _with_mask(query, key, value, attn_mask, lead, options)
    if 0 in (*query.shape, *key.shape):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)  # nothing to compute
    window = None
    if is_causal and keys > rows:  # no row sees the keys after its own number
        key, value = key[..., :rows, :], value[..., :rows, :]
    elif is_causal and keys < rows:  # bottom-right is j <= i + keys - rows
        is_causal, window = False, (-1, rows - keys)
    q, k, v = _as_models_have_them((query, key, value), lead)
    o = flash_attention(q, k, v, causal=is_causal, window=window, softmax_scale=scale).transpose(1, 2)
    return o if len(lead[0]) == 2 else o.reshape(*lead[0], rows, o.shape[-1])


def _with_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    lead: tuple[tuple[int, ...], ...],
    options: dict[str, Any],
) -> torch.Tensor:
    """scaled_dot_product_attention with a mask, of shapes that fit, by stage 11."""
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is a torch tensor, or None; got {type(attn_mask).__name__}")
    if attn_mask.device != query.device:
        where = f"attn_mask is on {attn_mask.device} and query on {query.device}"
        raise RuntimeError(f"{where}: one device for all is needed")
    if attn_mask.is_floating_point():
        (attn_mask,) = _autocast(attn_mask)
    scores = (*lead[0], query.shape[-2], key.shape[-2])
    try:
        fits = tuple(torch.broadcast_shapes(attn_mask.shape, scores)) == scores
    except RuntimeError:
        fits = False
    if options["is_causal"] or not fits or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        _refuse(query, key, value, {**options, "attn_mask": attn_mask.to("meta")})
    given = query, key, value, attn_mask
    if torch.is_grad_enabled() and any(a.requires_grad for a in given):
        raise NotImplementedError(
            "attn_mask: these kernels have no gradients with one. Without gradients call under torch.no_grad(). A "
            "causal mask is is_causal=True (top-left), or helpers.torch_attention.flash_attention(..., causal=True) "
            "(bottom-right); a band of keys is its window=(left, right); padded sequences are "
            "flash_attention_varlen's. For any other: torch.nn.functional.scaled_dot_product_attention"
        )
    if _is_traced(*given):
        raise NotImplementedError(
            "attn_mask: these kernels are no operator of torch.compile with one: "
            "torch.nn.functional.scaled_dot_product_attention is"
        )
    if 0 in (*query.shape, *key.shape):
        return torch.nn.functional.scaled_dot_product_attention(*given, **options)  # nothing to compute
    if len(lead[0]) > 2:
        attn_mask = attn_mask.expand(scores).flatten(0, -4)
    bias = attn_mask.detach()
    how = {"bias": _array(bias) if bias.device.type == "cpu" else bias, "softmax_scale": options["scale"]}
    o = _on_arrays(calls.flash_attention, _as_models_have_them(given[:3], lead), how)[0].transpose(1, 2)
    return o if len(lead[0]) == 2 else o.reshape(*lead[0], query.shape[-2], o.shape[-1])


def run_flash(Q: Any, K: Any, V: Any, causal: bool = False) -> Any:
    """softmax(Q K^T / sqrt(d)) V in one line, for tensors (with gradients) and for arrays.

    Args:
        Q: (N, d), (heads, N, d) or (batch, heads, N, d): tensors, or arrays as helpers.attention takes them.
        K, V: the same with N_kv rows; their heads may be a divisor of Q's.
        causal: row i sees keys up to i + N_kv - N: the last row sees all.

    Returns:
        The output, of Q's shape, dtype and kind.

    Raises:
        TypeError, ValueError: as flash_attention, and for arrays that have not 2 to 4 axes, all the same number.
    """
    axes = {getattr(a, "ndim", 0) for a in (Q, K, V)}
    if len(axes) != 1 or not axes <= {2, 3, 4}:
        shapes = ", ".join(str(tuple(getattr(a, "shape", ()))) for a in (Q, K, V))
        raise ValueError(f"Q, K and V are (N, d), (heads, N, d) or (batch, heads, N, d), all three alike; got {shapes}")
    call = flash_attention if isinstance(Q, torch.Tensor) else calls.flash_attention
    missing = 4 - Q.ndim
    q, k, v = (a[(None,) * missing].swapaxes(1, 2) for a in (Q, K, V))
    return call(q, k, v, causal=causal).swapaxes(1, 2)[(0,) * missing]


# ---- shapes as torch.nn.functional has them


def _leading_axes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """What each is broadcast to before its last two axes; None for what these kernels, or nobody, can take."""
    q, k, v = query.shape, key.shape, value.shape
    one_dtype = query.dtype == key.dtype == value.dtype
    if not one_dtype or min(len(q), len(k), len(v)) < 2 or k[-2:] != v[-2:] or q[-1] != k[-1]:
        return None
    if q[:-2] == k[:-2] == v[:-2]:
        return q[:-2], k[:-2], v[:-2]
    try:
        if not enable_gqa:
            lead = tuple(torch.broadcast_shapes(q[:-2], k[:-2], v[:-2]))
            return lead, lead, lead
        if min(len(q), len(k), len(v)) < 3 or k[-3] != v[-3] or not k[-3] or q[-3] % k[-3]:
            return None
        batch = tuple(torch.broadcast_shapes(q[:-3], k[:-3], v[:-3]))
        return (*batch, q[-3]), (*batch, k[-3]), (*batch, v[-3])
    except RuntimeError:
        return None


def _refuse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> None:
    """Raise PyTorch's own error; where PyTorch has none, NotImplementedError."""
    torch.nn.functional.scaled_dot_product_attention(*(a.to("meta") for a in (query, key, value)), **options)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    raise NotImplementedError(
        f"{shapes}: these kernels take one head_dim for all three, and as many heads of value as of key. "
        "torch.nn.functional.scaled_dot_product_attention takes these"
    )


def _as_models_have_them(
    tensors: tuple[torch.Tensor, ...], lead: tuple[tuple[int, ...], ...]
) -> tuple[torch.Tensor, ...]:
    """Each broadcast to its leading axes, and then (batch, rows, heads, head_dim)."""
    return tuple(
        _four_axes(a if a.shape[:-2] == axes else a.expand(*axes, *a.shape[-2:])).transpose(1, 2)
        for a, axes in zip(tensors, lead, strict=True)
    )


def _four_axes(a: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, head_dim)."""
    if a.ndim < 4:
        return a[(None,) * (4 - a.ndim)]
    return a if a.ndim == 4 else a.flatten(0, -4)


# ---- one call of the operator


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    window: tuple[int, int] | None,
    softmax_scale: float | None,
    deterministic: bool,
    stage: str | int | None,
) -> torch.Tensor:
    """What the wrapper does outside of the operator: types, devices, autocast."""
    for name, a in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if a is None and name.startswith("cu"):
            continue
        if not isinstance(a, torch.Tensor):
            raise TypeError(f"{name} is a torch tensor; got {type(a).__name__}. Arrays: helpers.attention")
        if a.device != q.device:
            raise ValueError(f"{name} is on {a.device} and q on {q.device}: one device for all is needed")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is True or False; got {type(deterministic).__name__} {deterministic!r:.40}")
    left, right = mask_window(window, causal)
    scale = None if softmax_scale is None else softmax_scale_of(softmax_scale, 1)
    q, k, v = _autocast(q, k, v)
    keep_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    flags = [causal, deterministic or torch.are_deterministic_algorithms_enabled(), keep_lse]
    limits = [left, right, *(-1 if most is None else most for most in (max_seqlen_q, max_seqlen_k))]
    named = None if stage is None else str(stage)
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, limits, scale, flags, named
    if _is_traced(q, k, v):
        return _forward(*given)[0]
    return (_Attention.apply if keep_lse else _output)(*given)[0]


def _is_traced(*tensors: torch.Tensor) -> bool:
    """Does PyTorch look at operators here, as torch.compile, torch.export and fake tensors do?

    An operator's own bookkeeping takes the host longer than the rest of the call, so it is left out where nobody looks.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(a) is not torch.Tensor and type(a) is not torch.nn.Parameter for a in tensors)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's type where that is on, as PyTorch casts them for its own attention."""
    where = tensors[0].device.type
    if not torch.is_autocast_enabled(where):
        return tensors
    dtype = torch.get_autocast_dtype(where)
    return tuple(a.to(dtype) if a.is_floating_point() and a.dtype != torch.float64 else a for a in tensors)


# ---- the operators

# Few arguments: torch.library's autograd copies the whole schema twice for each, at every call that keeps lse.
# limits: the window's left and right, max_seqlen_q and max_seqlen_k, with -1 for what is not given.
# flags: causal, deterministic, and whether lse is kept for gradients.
_SHARED = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt[] limits, float? softmax_scale, bool[] flags"


def _output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    limits: list[int],
    softmax_scale: float | None,
    flags: list[bool],
    stage: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output; and lse, float32 (batch, heads, seq) or (heads, tokens), empty where it is not kept.

    cu_seqlens_q is None: q is (batch, seq, heads, head_dim); otherwise (tokens, heads, head_dim).
    """
    causal, _, keep_lse = flags
    options: dict[str, Any] = {"causal": causal, "window": tuple(limits[:2]), "softmax_scale": softmax_scale}
    options["return_lse"] = keep_lse
    options["stage"] = int(stage) if stage is not None and stage.isdecimal() else stage
    if cu_seqlens_q is None:
        outputs = _on_arrays(calls.flash_attention, (q, k, v), options)
    else:
        packed = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        outputs = _on_arrays(calls.flash_attention_varlen, packed, options | _longest(limits))
    return (outputs[0], outputs[1]) if keep_lse else (outputs[0], q.new_empty(0, dtype=torch.float32))


_forward = torch.library.custom_op(
    "course::flash_attention",
    _output,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SHARED}, str? stage) -> (Tensor, Tensor)",
)


@_forward.register_fake
def _fake_forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    keep_lse = rest[-2][2]
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if keep_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


def _gradients(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    limits: list[int],
    softmax_scale: float | None,
    flags: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), C-contiguous, of the shapes and dtypes of q, k and v."""
    causal, deterministic, _ = flags
    options: dict[str, Any] = {"causal": causal, "window": tuple(limits[:2]), "softmax_scale": softmax_scale}
    options["deterministic"] = deterministic
    tensors = do, q, k, v, o, lse
    if cu_seqlens_q is None:
        dq, dk, dv = _on_arrays(calls.flash_attention_backward, tensors, options)
    else:
        packed = (*tensors, cu_seqlens_q, cu_seqlens_k)
        dq, dk, dv = _on_arrays(calls.flash_attention_varlen_backward, packed, options | _longest(limits))
    return dq, dk, dv


_backward = torch.library.custom_op(
    "course::flash_attention_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SHARED}) -> (Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _fake_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _longest(limits: list[int]) -> dict[str, int | None]:
    """max_seqlen_q and max_seqlen_k, None where they are not given."""
    rows, keys = (None if most < 0 else most for most in limits[2:])
    return {"max_seqlen_q": rows, "max_seqlen_k": keys}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the backward starts from. lse is no result of the operator's user: it has no gradient."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options, _ = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k)
    ctx.options = options
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    """A gradient for each input of the operator."""
    if do is None:
        return (None,) * 9
    *tensors, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if not ctx.options[-1][2]:
        raise RuntimeError("course::flash_attention kept no lse (the third of flags), which gradients start from")
    # With create_graph=True the gradients may be differentiated: the operator says what is wrong then.
    backward: Any = _backward if torch.is_grad_enabled() or _is_traced(do, *tensors) else _gradients
    return (*backward(do, *tensors, cu_seqlens_q, cu_seqlens_k, *ctx.options), *(None,) * 6)


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "flash_attention has no second derivatives: its gradients were to be differentiated. With "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), torch.nn.functional.scaled_dot_product_attention has them"
    )


class _Attention(torch.autograd.Function):
    """The same without an operator, for calls that nobody traces."""

    forward = staticmethod(_output)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_differentiate)


_forward.register_autograd(_differentiate, setup_context=_keep)
_backward.register_autograd(_no_second_derivative)


# ---- tensors as helpers.attention takes them


def _on_arrays(call: Any, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """A function of helpers.attention on tensors that autograd does not look at; new C-contiguous tensors."""
    if tensors[0].device.type == "cpu":
        outputs = call(*map(_array, tensors), **options)
        return tuple(map(_tensor, outputs if isinstance(outputs, tuple) else (outputs,)))
    if device.ON_GPU:
        driver, runtime = device.cp.cuda.driver, device.cp.cuda.runtime
        if not driver.ctxGetCurrent():  # a thread of autograd's that has launched nothing yet
            runtime.setDevice(runtime.getDevice())
    outputs = call(*(_readable(a.detach()) for a in tensors), **options)
    return tuple(a.contiguous() for a in (outputs if isinstance(outputs, tuple) else (outputs,)))


def _readable(a: torch.Tensor) -> torch.Tensor:
    """The tensor, or PyTorch's copy of it where a kernel needs one: so that no other allocator is asked for it."""
    if a.ndim < 3 or a.numel() == 0:
        return a.contiguous()
    strides = a.stride()
    if strides[-1] != 1 and a.shape[-1] > 1:
        return a.contiguous()
    size, bits = a.element_size(), a.data_ptr()
    if size == 2:  # kernels in half types copy 16 bytes at a time
        for n, step in zip(a.shape[:-1], strides[:-1], strict=True):
            bits |= size * step if n > 1 else 0
        if bits % 16:
            return a.clone(memory_format=torch.contiguous_format)
    return a


def _array(a: torch.Tensor) -> Any:
    """A device array of a CPU tensor: of the same memory on the CPU engine, a copy on a GPU."""
    a = a.detach().resolve_conj().resolve_neg()
    as_bits = a.dtype == torch.bfloat16  # NumPy has none
    host = a.view(torch.int16).numpy().view(dtype_of("bfloat16")) if as_bits else a.numpy()
    return device.cp.asarray(host) if device.ON_GPU else host.view(device.cp.ndarray)


def _tensor(a: Any) -> torch.Tensor:
    """The reverse of `_array`, contiguous."""
    a = device.cp.asnumpy(a) if device.ON_GPU else np.asarray(a).view(np.ndarray)
    a = np.ascontiguousarray(a)
    if a.dtype == dtype_of("bfloat16"):
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)

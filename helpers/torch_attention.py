"""Attention for PyTorch, with gradients: the course's kernels where a model calls torch's.

    from helpers.torch_attention import flash_attention, scaled_dot_product_attention
    o = flash_attention(q, k, v, causal=True)                    # (batch, seq, heads, head_dim), as FlashAttention
    o = scaled_dot_product_attention(q, k, v, is_causal=True)    # (..., heads, seq, head_dim), as torch.nn.functional

Tensors on a GPU are read where they are, on PyTorch's current stream; outputs and scratch are of PyTorch's allocator.
Tensors on the CPU go through the CPU engine where there is no GPU (no copy), and through the GPU where there is one.
With gradients a call is an `autograd.Function`. If PyTorch traces it, forward and backward are one `torch.library`
operator each, `course::flash_attention` and `course::flash_attention_backward` (`..._wrt`: also of a bias), which
`torch.compile(fullgraph=True)` keeps as nodes.

If the host limits the speed of training, `torch.autograd.set_multithreading_enabled(False)` keeps the backward in
the caller's thread: on the host of an H200, a short forward and backward took half the time, PyTorch's SDPA too.
`torch.compile` saves time around attention. Of a short call alone, compiled, its own code took several times the call.

PyTorch is optional: this module needs it, its two neighbours (`torch_autograd`, `torch_tensors`) and what imports them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from helpers import device
from helpers.attention import calls, decoding
from helpers.attention.ladder.call import ForwardOptions
from helpers.attention.ladder.extras import DESCALES, as_kernels_read, extra_inputs
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.score_mod import BlockMask, distance_table, parse_score_mod
from helpers.engine.cuda_source.signatures import dtype_of
from helpers.torch_autograd import (
    CONSTANTS,
    Attention,
    Inputs,
    Options,
    attend,
    attend_plain,
    forward_operator,
    is_plain,
)
from helpers.torch_tensors import (
    array_of,
    check_numbers,
    check_tensors,
    each_tensor,
    is_traced,
    outside_of_graphs,
    resolved,
    tensor_of,
    to_autocast,
    torch,
)

__all__ = [
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "run_flash",
    "scaled_dot_product_attention",
]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    stage: str | int | None = None,
    **extras: Any,
) -> Any:
    """softmax(softmax_scale * q k^T + bias) v for each head of each batch, differentiable once.

    Args:
        q: (batch, seq, heads, head_dim): float32, float16 or bfloat16, of any strides; or float8_e4m3fn, which has no
            gradients.
        k, v: (batch, seq_kv, kv_heads, head_dim) of q's dtype and device. kv_heads divides heads.
        causal: query i sees key j up to i + seq_kv - seq (bottom-right alignment, as in FlashAttention).
        window: (left, right): how many keys before and after that diagonal a query sees; -1 for no limit.
        softmax_scale: by default 1 / sqrt(head_dim).
        return_lse: also the log-sum-exp of each row, float32 (batch, heads, seq). It has no gradient.
        deterministic: gradients with the same bits in every run, on the same device. Also if
            `torch.use_deterministic_algorithms(True)` was called.
        stage: a stage of the ladder for the forward pass, by name or number; by default the last that supports the
            call. The first four keep no log-sum-exp, so they have no gradients.
        extras: see helpers.attention.flash_attention. bias: (batch, heads, seq, seq_kv), or what broadcasts to it, of
            q's dtype, float32 or bool. alibi_slopes: float32 (heads,) or (batch, heads). sinks: float32 (heads,). These
            three have gradients, of their own shapes, which are the same to the bit in every run. score_mod, mask_mod
            (text or a BlockMask), mod_args (tensors and NumPy scalars) and score_mod_grad, which gradients with a
            score_mod need: these four not under torch.compile. Tensors in mod_args are constants, but for the table of
            score_mods.relative_bias. rotary_cos, rotary_sin, rotary_interleaved and rotary_positions: with gradients
            and under torch.compile, PyTorch's operations rotate q and k before the kernel. q_descale, k_descale,
            v_descale and out_dtype: for e4m3.

    Returns:
        The output: q's shape, C-contiguous, of q's dtype; under `torch.autocast` of autocast's dtype; from e4m3 of
        out_dtype. A query that sees no key gets 0. With return_lse, (o, lse).

    Raises:
        TypeError: no tensors; a dtype that no stage takes; options of the wrong type; a tensor in mod_args that
            requires grad, outside of torch.no_grad(), other than the table of score_mods.relative_bias.
        ValueError: shapes or devices that do not fit each other; something that no stage, or not this one, can do;
            gradients with a score_mod and no score_mod_grad.
        NotImplementedError: score_mod, mask_mod or e4m3 under torch.compile; tangents (forward-mode derivatives),
            tensors of torch.func's transforms and meta tensors; when its gradients are differentiated.
    """
    options = ForwardOptions(window, causal, softmax_scale, return_lse, stage=stage)
    if not extras and type(deterministic) is bool and is_plain(q, k, v):
        return attend_plain(q, k, v, options, deterministic)
    return _call(Inputs(q, k, v), Options(options, deterministic), extras)


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
    return_lse: bool = False,
    deterministic: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    stage: str | int | None = None,
    **extras: Any,
) -> Any:
    """Compute flash_attention of sequences of several lengths, packed one after the other with no padding.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (tokens_kv, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on q's device: 0, then the number of tokens up to the end of
            each sequence. Unless both maxima are given, the host reads them and waits for the GPU.
        max_seqlen_q, max_seqlen_k: at least the rows of the longest sequence of q and of k. With both, the call can be
            captured in a CUDA graph; on a GPU, too small a value leaves rows unwritten. The others: see flash_attention
            and helpers.attention.flash_attention_varlen; a bias is refused. Each sequence has its own diagonal for
            causal and window.

    Returns:
        The output as q, (tokens, heads, head_dim); with return_lse, (o, lse), lse float32 (heads, tokens).

    Raises:
        TypeError, ValueError, NotImplementedError: as for flash_attention. TypeError, ValueError: for cu_seqlens that
            are not int32, do not begin at 0, decrease, or do not end at the number of tokens.
    """
    check_tensors({"q": q, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    forward = ForwardOptions(window, causal, softmax_scale, return_lse, stage=stage)
    options = Options(forward, deterministic, (max_seqlen_q, max_seqlen_k))
    return _call(Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k), options, extras)


@outside_of_graphs
def flash_attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    prefix_k: torch.Tensor | None = None,
    prefix_v: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Call helpers.attention.flash_attention_with_kvcache, which documents the arguments, on tensors; no gradients.

    Tensors on a GPU may be given to that function as well; those on the CPU get the new tokens here. Under
    torch.compile a graph ends before this call, and another begins after it.

    Raises:
        TypeError: no tensors, or one that requires grad outside of torch.no_grad(). TypeError, ValueError: as there.
        NotImplementedError: tangents, tensors of torch.func's transforms and meta tensors.
    """
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    optional = {"block_table": block_table, "k": k, "v": v, "prefix_k": prefix_k, "prefix_v": prefix_v, "tree": tree}
    named |= {name: a for name, a in optional.items() if a is not None}
    check_tensors(named)
    for name, a in named.items():
        if a.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"{name} requires grad, and decoding has no gradients: call it within torch.no_grad()")
    check_numbers({**named, **options, **(options.get("mod_args") or {})})
    for name in ("k_cache", "v_cache"):
        if named[name].is_neg() and k is not None:  # a copy would get the new tokens
            raise ValueError(f"{name} is written, and its signs are not those in memory: {name}.resolve_neg()")
    if q.is_cuda:
        given = {name: resolved(a) for name, a in named.items()}
        return decoding.flash_attention_with_kvcache(**given, **each_tensor(resolved, options))
    arrays = {name: array_of(a) for name, a in named.items()}
    outputs = decoding.flash_attention_with_kvcache(**arrays, **each_tensor(array_of, options))
    if device.ON_GPU and k is not None:  # they were copies
        k_cache.copy_(tensor_of(arrays["k_cache"]))
        v_cache.copy_(tensor_of(arrays["v_cache"]))
    return tuple(map(tensor_of, outputs)) if isinstance(outputs, tuple) else tensor_of(outputs)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fallback: bool = False,
) -> torch.Tensor:
    """Replace `torch.nn.functional.scaled_dot_product_attention`, with its layout, defaults and alignment.

    Args:
        query: (..., heads, L, head_dim), or (L, head_dim).
        key, value: (..., heads, S, head_dim). Axes before L and S are broadcast, as in PyTorch.
        attn_mask: broadcasts to (..., heads, L, S). Of bool: True where a query may see a key. Of query's dtype or
            float32: added to the scaled scores, and differentiable.
        dropout_p: 0.0. The kernels do not support dropout.
        is_causal: query i sees key j if j <= i, even if L and S differ (top-left alignment; flash_attention's
            causal=True is bottom-right).
        scale: by default 1 / sqrt(head_dim).
        enable_gqa: key and value may have fewer heads, a divisor of query's.
        fallback: PyTorch computes what these kernels refuse, with one warning for each reason.

    Returns:
        (..., heads, L, head_dim).

    Raises:
        RuntimeError: PyTorch's own error for shapes and dtypes that do not match.
        NotImplementedError: dropout, 8-bit types, a value whose head_dim is not the key's, or what flash_attention
            raises it for. It says what to use.
        TypeError, ValueError: as for flash_attention.
    """
    try:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (NotImplementedError, TypeError, ValueError) as why:
        if not fallback:
            raise
        warn_of_fallback(str(why))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def warn_of_fallback(why: str) -> None:
    """Warn that PyTorch computes a call instead of the kernels, once per reason, whatever the shapes."""
    reason = re.sub(r"\d+", "", why)
    if reason not in _WARNED and not torch.compiler.is_compiling():
        _WARNED.add(reason)
        warnings.warn(f"PyTorch computes this attention, not the course's kernels. {why}", stacklevel=3)


_WARNED: set[str] = set()


def run_flash(Q: Any, K: Any, V: Any, causal: bool = False) -> Any:
    """Compute softmax(Q K^T / sqrt(d)) V in one line, for tensors (with gradients) and for arrays.

    Args:
        Q: (N, d), (heads, N, d) or (batch, heads, N, d): tensors, or arrays as helpers.attention takes them.
        K, V: the same with N_kv rows; their heads may be a divisor of Q's.
        causal: row i sees keys up to i + N_kv - N: the last row sees all.

    Returns:
        The output, of Q's shape, dtype and kind.

    Raises:
        TypeError, ValueError: as for flash_attention, and unless all arrays have the same number of axes, 2 to 4.
    """
    axes = {getattr(a, "ndim", 0) for a in (Q, K, V)}
    if len(axes) != 1 or not axes <= {2, 3, 4}:
        shapes = ", ".join(str(tuple(getattr(a, "shape", ()))) for a in (Q, K, V))
        raise ValueError(f"Q, K and V must all be (N, d), (heads, N, d) or (batch, heads, N, d); got {shapes}")
    call = flash_attention if isinstance(Q, torch.Tensor) else calls.flash_attention
    missing = 4 - Q.ndim
    q, k, v = (a[(None,) * missing].swapaxes(1, 2) for a in (Q, K, V))
    return call(q, k, v, causal=causal).swapaxes(1, 2)[(0,) * missing]


# ---- layout and rules of torch.nn.functional


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention with the kernels only, or raise."""
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p = {dropout_p}: these kernels have no dropout. Set it to 0.0 (model.eval() does in most models) "
            "or call torch.nn.functional.scaled_dot_product_attention"
        )
    plain = is_plain(query, key, value)
    if not plain:
        named = {"query": query, "key": key, "value": value}
        check_tensors(named, other_device=RuntimeError)
        check_numbers({**named, "attn_mask": attn_mask})
        query, key, value = to_autocast(query, key, value)
    refuse_eight_bits(query, "scaled_dot_product_attention")
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    broadcast = _broadcast(query, key, value, enable_gqa)
    if broadcast is None:
        _refuse((query, key, value), options)
    lead, q, k, v = broadcast
    mask = None
    if attn_mask is not None:
        mask = _mask((query, key, value), attn_mask, lead, options)
    if not (query.numel() and key.numel()):  # nothing to compute
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, **options)
    rows, keys = query.shape[-2], key.shape[-2]
    window = None
    if is_causal and keys > rows:  # no row sees the keys after its own number
        k, v = k[..., :rows, :], v[..., :rows, :]
    elif is_causal and keys < rows:  # bottom-right is j <= i + keys - rows
        is_causal, window = False, (-1, rows - keys)
    if plain and mask is None:
        o = attend_plain(q, k, v, ForwardOptions(window, is_causal, scale), heads_first=True)
    else:
        how = {"causal": is_causal, "window": window, "softmax_scale": scale}
        if mask is not None:
            how["bias"] = mask.expand(*lead, rows, keys).flatten(0, -4) if len(lead) > 2 else mask
        o = attend_heads_first(q, k, v, **how).transpose(1, 2)
    return o if len(lead) == 2 else o.reshape(*lead, rows, o.shape[-1])


def _mask(
    qkv: tuple[torch.Tensor, ...], attn_mask: Any, lead: tuple[int, ...], options: dict[str, Any]
) -> torch.Tensor:
    """Cast attn_mask like autocast, or raise for one that PyTorch or the kernels refuse.

    lead: the axes of the output before its rows.
    """
    query, key, _ = qkv
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask must be a torch tensor, or None; got {type(attn_mask).__name__}")
    check_tensors({"query": query, "attn_mask": attn_mask}, other_device=RuntimeError)
    if attn_mask.is_floating_point():
        (attn_mask,) = to_autocast(attn_mask)
    scores = (*lead, query.shape[-2], key.shape[-2])
    try:
        fits = tuple(torch.broadcast_shapes(attn_mask.shape, scores)) == scores
    except RuntimeError:
        fits = False
    if options["is_causal"] or not fits or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        _refuse(qkv, {**options, "attn_mask": attn_mask.to("meta")})
    return attn_mask


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Broadcast the axes before the last two like PyTorch; None for what PyTorch or the kernels refuse.

    Returns:
        The output's axes before its last two; and q, k and v, each (batch, heads, rows, head_dim).
    """
    q, k, v = query.shape, key.shape, value.shape
    one_dtype = query.dtype == key.dtype == value.dtype
    if q == k == v and one_dtype and len(q) == 4:
        return q[:-2], query, key, value
    if not one_dtype or min(len(q), len(k), len(v)) < 2 or k[-2:] != v[-2:] or q[-1] != k[-1]:
        return None
    leads = q[:-2], k[:-2], v[:-2]
    if not leads[0] == leads[1] == leads[2]:
        first = -3 if enable_gqa else -2  # the head axis may differ
        if enable_gqa and (min(len(q), len(k), len(v)) < 3 or k[-3] != v[-3] or not k[-3] or q[-3] % k[-3]):
            return None
        try:
            batch = torch.broadcast_shapes(q[:first], k[:first], v[:first])
        except RuntimeError:
            return None
        leads = (*batch, *q[first:-2]), (*batch, *k[first:-2]), (*batch, *v[first:-2])
    return leads[0], _four_axes(query, leads[0]), _four_axes(key, leads[1]), _four_axes(value, leads[2])


def _four_axes(a: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """Broadcast (..., rows, head_dim) to these leading axes, and view them as (batch, heads)."""
    a = a if a.shape[:-2] == lead else a.expand(*lead, *a.shape[-2:])
    if a.ndim < 4:
        return a[(None,) * (4 - a.ndim)]
    return a if a.ndim == 4 else a.flatten(0, -4)


def _refuse(qkv: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """Raise PyTorch's own error, or NotImplementedError for what PyTorch supports."""
    torch.nn.functional.scaled_dot_product_attention(*(a.to("meta") for a in qkv), **options)
    query, key, value = qkv
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    raise NotImplementedError(
        f"{shapes}: these kernels take one head_dim for all three, and as many heads of value as of key. "
        "torch.nn.functional.scaled_dot_product_attention takes these"
    )


# ---- calls that are not plain


def attend_heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    """Compute flash_attention of (batch, heads, seq, head_dim), as (batch, seq, heads, head_dim).

    how: causal, window and softmax_scale, all of them; and other options of flash_attention. With only those three,
    autograd sees one operation instead of four, because the transpositions are inside it.
    """
    if len(how) == 3 and is_plain(q, k, v):
        options = ForwardOptions(how["window"], how["causal"], how["softmax_scale"])
        return attend_plain(q, k, v, options, heads_first=True).transpose(1, 2)
    return flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)


def _call(inputs: Inputs, options: Options, extras: dict[str, Any]) -> Any:
    """Run a call that is not plain: check types and devices, cast, and choose autograd, an operator or neither.

    extras: the options of flash_attention that it takes by that name.
    """
    named = inputs.given()
    check_tensors({**dict.fromkeys("qkv"), **named})
    if not isinstance(options.deterministic, bool):
        got = f"{type(options.deterministic).__name__} {options.deterministic!r:.40}"
        raise TypeError(f"deterministic must be True or False; got {got}")
    check_numbers(named)
    q, k, v = to_autocast(inputs.q, inputs.k, inputs.v)
    traced = is_traced(q, k, v)
    if not (q is inputs.q and k is inputs.k and v is inputs.v):
        inputs = inputs._replace(q=q, k=k, v=v)
    if q.dtype.itemsize == 1:
        return _in_eight_bits(inputs, options, extras, traced=traced)
    if given := [name for name in (*DESCALES, "out_dtype") if extras.get(name) is not None]:
        raise TypeError(f"{given[0]} is for float8_e4m3fn, and q is {q.dtype}")
    constants, functions, rotary = _split(extras, traced=traced) if extras else ({}, {}, {})
    if "rotary_cos" in rotary:
        differentiated = any(getattr(a, "requires_grad", False) for a in (q, k, v, *rotary.values()))
        if traced or (differentiated and torch.is_grad_enabled()):
            q, k = _rotated(inputs, traced=traced, **rotary)
            inputs, rotary = inputs._replace(q=q, k=k), {}
    if functions:
        options = options._replace(functions=functions)
    table = _table(functions)
    differentiable = q, k, v, *constants.values(), table
    keep_lse = torch.is_grad_enabled() and any([getattr(a, "requires_grad", False) for a in differentiable])
    if not keep_lse and not traced:
        return attend(inputs, options, **constants, **rotary)
    inputs = inputs._replace(**{name: torch.as_tensor(a, device=q.device) for name, a in constants.items()})
    return_lse, deterministic = options.forward.return_lse, torch.are_deterministic_algorithms_enabled()
    options = options._replace(
        forward=options.forward._replace(return_lse=keep_lse or return_lse),
        deterministic=options.deterministic or deterministic,
    )
    if functions:
        parse_score_mod(**functions, backward=True)  # without a derivative this raises here, not in the backward pass
    if table is not None:  # an input of autograd's function, which reads these numbers and no graph
        functions["mod_args"]["table"] = table.detach()
    o, lse = forward_operator(*inputs, *options.flat()) if traced else Attention.apply(*inputs, table, options)
    return (o, lse) if return_lse else o


def _in_eight_bits(inputs: Inputs, options: Options, extras: dict[str, Any], *, traced: bool) -> Any:
    """Run a call whose q is e4m3, which has no gradients and no operator.

    Raises:
        TypeError: q, k or v requires grad.
        NotImplementedError: under torch.compile.
    """
    if traced:
        raise NotImplementedError(
            f"q is {inputs.q.dtype}: the operators for torch.compile take no 8-bit types. "
            "torch.compiler.disable(flash_attention) is called outside of the graph, and takes them"
        )
    for name in "qkv":
        if getattr(inputs, name).requires_grad and torch.is_grad_enabled():
            dtype = inputs.q.dtype
            raise TypeError(f"{name} requires grad and is {dtype}; no stage has its gradients: give {name}.detach()")
    return attend(inputs, options, **{name: a for name, a in extras.items() if a is not None})


def refuse_eight_bits(query: torch.Tensor, where: str) -> None:
    """Raise NotImplementedError for 8-bit types, if a caller has no descales and expects query's dtype."""
    if query.dtype.itemsize == 1:
        raise NotImplementedError(
            f"query is {query.dtype}: {where} has no descales. helpers.torch_attention.flash_attention takes e4m3"
        )


_FUNCTIONS = "score_mod", "mask_mod", "mod_args", "score_mod_grad"


def _split(extras: dict[str, Any], *, traced: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split the given options into constants (`CONSTANTS`), functions of scores (`_FUNCTIONS`), the rotary embedding.

    Raises:
        TypeError: an unknown name; a tensor in mod_args requires grad and is not the table of relative_bias.
        NotImplementedError: functions of scores in a traced call, whose operators cannot take them.
    """
    given = {name: a for name, a in extras.items() if a is not None}
    functions = {name: given.pop(name) for name in _FUNCTIONS if name in given}
    extra_inputs(**given)
    constants = {name: given.pop(name) for name in CONSTANTS if name in given}
    if functions and traced:
        raise NotImplementedError(
            f"{', '.join(functions)}: the operators for torch.compile take no functions of scores. "
            "torch.compiler.disable(flash_attention) is called outside of the graph, and takes them"
        )
    args = dict(functions.get("mod_args", {}))
    if "mod_args" in functions:
        functions["mod_args"] = args  # a copy, because the backward pass reads it too
    if isinstance(mask := functions.get("mask_mod"), BlockMask):
        args = mask.mod_args | args
    positions = {f"rotary_positions[{i}]": a for i, a in enumerate(given.get("rotary_positions", ()))}
    check_numbers({**constants, **given, **positions, **args})
    table = _table(functions)
    for name, a in args.items():
        if torch.is_grad_enabled() and getattr(a, "requires_grad", False) and a is not table:
            name = f"mod_args[{name!r}]"
            raise TypeError(
                f"{name} requires grad, and of mod_args only the table of score_mods.relative_bias has a gradient: "
                f"give {name}.detach()"
            )
    return constants, functions, given


def _table(functions: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the table of distances of `score_mods.relative_bias`; None for other functions."""
    if not functions.get("score_mod"):
        return None
    names = "score_mod", "mask_mod", "mod_args"
    mod, arrays = parse_score_mod(*(functions.get(name) for name in names))
    key = distance_table(mod)
    return arrays[key] if key and isinstance(arrays[key], torch.Tensor) else None


# ---- the rotary embedding, with gradients


def _rotated(
    inputs: Inputs,
    *,
    traced: bool,
    rotary_cos: torch.Tensor,
    rotary_sin: torch.Tensor,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k with PyTorch's operations, whose gradient rotates back.

    Raises:
        TypeError, ValueError: for tables and positions that helpers.attention refuses.
    """
    named = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    named |= zip(("q_positions", "k_positions"), rotary_positions or (), strict=False)
    named = {name: torch.as_tensor(a, device=inputs.q.device) for name, a in named.items()}
    if not traced:
        _check_rotary(inputs, named)
    cos, sin, *positions = named.values()
    pairs = zip((inputs.q, inputs.k), positions or _positions(inputs), strict=True)
    q, k = (_turned(a, at, (cos, sin), rotary_interleaved) for a, at in pairs)
    return q, k


def _turned(
    a: torch.Tensor, positions: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], interleaved: bool
) -> torch.Tensor:
    """Rotate the first columns of (..., rows, heads, head_dim) in float32, and round to a's dtype."""
    rows = positions.long().clamp(0, len(tables[0]) - 1)
    cos, sin = (table.float()[rows][..., None, :] for table in tables)
    rotary_dim = 2 * cos.shape[-1]
    pairs = a[..., :rotary_dim].float()
    x, y = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    turned = x * cos - y * sin, x * sin + y * cos
    both = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([both.to(a.dtype), a[..., rotary_dim:]], -1)


def _positions(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Count positions of q's rows and of k's: a sequence's keys from 0, and its last row at its last key."""
    of_q, of_k = (torch.arange(a.shape[-3], device=a.device) for a in (inputs.q, inputs.k))
    if inputs.cu_seqlens_q is None:
        return of_q + (len(of_k) - len(of_q)), of_k
    cu_q, cu_k = inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k.long()
    shifts = cu_k.diff() - cu_q[1:], -cu_k[:-1]
    rows, keys = (
        at + shift.repeat_interleave(cu.diff(), output_size=len(at))
        for at, shift, cu in zip((of_q, of_k), shifts, (cu_q, cu_k), strict=True)
    )
    return rows, keys


def _check_rotary(inputs: Inputs, tables_and_positions: Mapping[str, torch.Tensor]) -> None:
    """Check the tables and the positions as helpers.attention does."""
    specs = {}
    for name, a in {"q": inputs.q, "k": inputs.k, **tables_and_positions}.items():
        dtype = dtype_of(str(a.dtype).removeprefix("torch."))
        specs[name] = Spec(tuple(a.shape), tuple(step * dtype.itemsize for step in a.stride()), dtype)
    specs |= {name: specs[name].heads_first for name in "qk"}
    as_kernels_read(specs, sequences=inputs.q.shape[0], packed=inputs.cu_seqlens_q is not None)

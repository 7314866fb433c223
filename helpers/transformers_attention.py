"""The course's attention inside models of Hugging Face's transformers, by their registry of attention functions.

    from helpers.transformers_attention import register
    register()                                                                    # or register(fallback=True)
    model = LlamaForCausalLM._from_config(config, attn_implementation="course")
    model.set_attn_implementation("course")                                       # or for an existing model

Causal models, with their KV cache, and models that see both ways; sliding windows; grouped heads; soft caps (Gemma 2);
attention sinks (gpt-oss); gradients. Padded batches are unpadded, go through the kernels for packed sequences, and are
padded again. Dropout, other masks and static caches, which the kernels do not support, are errors or, with
fallback=True, go to transformers' own SDPA attention. SDPA has no soft caps, sinks or paged caches, so for these there
is no fallback.

transformers (5 or later) and PyTorch are optional: only this module needs both.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from helpers.attention.score_mods import soft_cap
from helpers.torch_attention import (
    attend_heads_first,
    flash_attention_varlen,
    refuse_eight_bits,
    torch,
    warn_of_fallback,
)

try:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise ImportError(
        "helpers.transformers_attention needs transformers 5 or later: pip install transformers. "
        "helpers.torch_attention does not need it"
    ) from error

__all__ = ["NAME", "attend", "mask_of", "register"]

NAME = "course"


def register(name: str = NAME, *, fallback: bool = False) -> str:
    """Register the course's attention as an `attn_implementation` of that name, and return the name.

    fallback: transformers' SDPA attention computes what the kernels do not support, with one warning per reason.
    """
    AttentionInterface.register(name, partial(attend, fallback=fallback))
    AttentionMaskInterface.register(name, partial(mask_of, fallback=fallback))
    return name


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    fallback: bool = False,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention, called as transformers calls its attention functions.

    Args:
        module: the layer. Its `is_causal` is used if the argument is None; without that attribute, True.
        query: (batch, heads, seq, head_dim).
        key, value: (batch, kv_heads, seq_kv, head_dim), including the KV cache. The last query sees all.
        attention_mask: None, or (batch, seq_kv) bool, False for padding, as `mask_of` returns them.
        dropout: 0. scaling: by default 1 / sqrt(head_dim).
        sliding_window: how many keys a query sees, including itself; in bidirectional attention, itself and
            sliding_window - 1 on either side, as transformers calls FlashAttention. Padding does not count.
        softcap: scaled scores become softcap * tanh(score / softcap), before any mask. Not under torch.compile.
        s_aux: (heads,) of any floating dtype: the score of each head's sink, which may be trained.
        fallback: use SDPA for what the kernels do not support, without softcap and s_aux; then attention_mask may have
            four axes.
        more: other arguments of some models; those that change the result must be None.

    Returns:
        The output (batch, seq, heads, head_dim), and None instead of the weights, which no kernel stores. With a causal
        mask or a window, the rows of padding are 0.

    Raises:
        ValueError: for what is not supported. The message says what to use instead.
        TypeError, NotImplementedError: as helpers.torch_attention.flash_attention.
    """
    for what in ("cache", *(() if fallback else ("position_bias",))):
        if more.get(what) is not None:
            raise ValueError(f'this model needs {what}, which {NAME!r} does not support: attn_implementation="eager"')
    if more.get("output_attentions"):
        raise ValueError(f'{NAME!r} does not store the weights: output_attentions needs attn_implementation="eager"')
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None
    if sliding_window is not None and key.shape[2] > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    try:
        refuse_eight_bits(query, NAME)
        _refuse(attention_mask, dropout, more)
        how = {"causal": causal, "window": window, "softmax_scale": scaling}
        how |= {} if softcap is None else soft_cap(softcap)
        how |= {} if s_aux is None else {"sinks": s_aux.float()}
        if attention_mask is None:
            return attend_heads_first(query, key, value, **how), None
        q, k, v = (a.transpose(1, 2) for a in (query, key, value))
        return _without_padding(q, k, v, attention_mask, how), None
    except (NotImplementedError, TypeError, ValueError) as why:
        if not fallback or softcap is not None or s_aux is not None:
            raise
        if attention_mask is None or attention_mask.ndim == 2 or not _MADE:
            warn_of_fallback(str(why))
    if attention_mask is None or attention_mask.ndim == 2:
        attention_mask = _four_axes(attention_mask, query, key, causal, window)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **more
    )


def _refuse(attention_mask: torch.Tensor | None, dropout: float, more: dict[str, Any]) -> None:
    """Raise ValueError for what SDPA supports and the kernels do not."""
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, and {NAME!r} takes no mask: a model that makes "
            'its own needs attn_implementation="sdpa" or "eager", or register(fallback=True)'
        )
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}, and {NAME!r} has none: model.eval(), or config.attention_dropout = 0.0 "
            '(in some models attn_pdrop or attention_probs_dropout_prob), or attn_implementation="sdpa", or '
            "register(fallback=True)"
        )
    if more.get("position_bias") is not None:
        raise ValueError(f"this model needs position_bias, which {NAME!r} does not support")


def _four_axes(
    padding: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool, window: tuple[int, int] | None
) -> torch.Tensor | None:
    """Build SDPA's mask, (batch or 1, 1, seq, seq_kv) bool, True for visible keys; None if is_causal suffices."""
    rows, keys = query.shape[2], key.shape[2]
    if padding is None and window is None and (not causal or rows in (1, keys)):
        return None
    distance = torch.arange(keys, device=key.device) - torch.arange(keys - rows, keys, device=key.device)[:, None]
    left, right = window or (rows + keys, rows + keys)
    seen = ((distance >= -left) & (distance <= (0 if causal else right)))[None, None]
    return seen if padding is None else seen & padding[:, None, None, :]


# ---- padding


class _Tokens(NamedTuple):
    """The tokens of a batch without its padding.

    at: their indices among all tokens of the batch; None for all. cu_seqlens: where each sequence begins, int32 (batch
    + 1,). longest: tokens of the longest sequence.
    """

    at: torch.Tensor | None
    cu_seqlens: torch.Tensor
    longest: int

    @classmethod
    def of(cls, mask: torch.Tensor) -> _Tokens:
        """Find the tokens where mask, (batch, tokens) bool, is True. The host waits for the GPU."""
        lengths = mask.sum(-1, dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(mask.flatten().nonzero().flatten(), cu_seqlens, int(lengths.max()))

    @classmethod
    def all(cls, a: torch.Tensor) -> _Tokens:
        """Take all tokens of an array (batch, tokens, ...)."""
        batch, tokens = a.shape[:2]
        steps = torch.arange(batch + 1, dtype=torch.int32, device=a.device)
        return cls(None, steps * tokens, tokens)

    def pack(self, a: torch.Tensor) -> torch.Tensor:
        """Drop the padding: (batch, tokens, heads, head_dim) to (tokens without padding, heads, head_dim)."""
        return a.flatten(0, 1) if self.at is None else a.flatten(0, 1).index_select(0, self.at)

    def pad(self, o: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Reverse `pack`, with zeros for padding."""
        if self.at is not None:
            o = o.new_zeros(like.shape).flatten(0, 1).index_copy(0, self.at, o)
        return o.view(like.shape)


def _without_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, how: dict[str, Any]
) -> torch.Tensor:
    """Compute attention of a padded batch, (batch, tokens, heads, head_dim). mask: that of the keys.

    With a causal mask or a window, which align the last query with the last key, the mask also tells which queries are
    padding. Otherwise it may describe other tokens (cross-attention), so all queries are used.
    """
    known = getattr(mask, "tokens", {})  # those of the previous layers in this forward pass
    which = q.shape[1], how["causal"] or how["window"] is not None
    if which not in known:
        keys = _Tokens.of(mask)
        if not which[1]:
            rows = _Tokens.all(q)
        else:
            rows = keys if q.shape[1] == k.shape[1] else _Tokens.of(mask[:, -q.shape[1] :])
        mask.tokens = known = {**known, which: (rows, keys)}  # type: ignore[attr-defined]
    rows, keys = known[which]
    most = {"max_seqlen_q": rows.longest, "max_seqlen_k": keys.longest}
    packed = rows.pack(q), keys.pack(k), keys.pack(v)
    return rows.pad(flash_attention_varlen(*packed, rows.cu_seqlens, keys.cu_seqlens, **most, **how), q)


def mask_of(*, fallback: bool = False, **given: Any) -> torch.Tensor | None:
    """Return the mask of a model's forward pass, which transformers requests once: None or the padding's.

    Args, as passed by transformers: see `_padding_of`. fallback: return SDPA's mask instead of an error.

    Returns:
        None; or (batch, kv_length) bool, False for padding; with fallback perhaps four axes.

    Raises:
        ValueError: as for `_padding_of`.
    """
    try:
        return _padding_of(**given)
    except ValueError as why:
        if not fallback:
            raise
        warn_of_fallback(str(why))
    _MADE.add(NAME)
    return sdpa_mask(**given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


_MADE: set[str] = set()  # not empty after `mask_of` has made a mask of four axes, and has said why


def _padding_of(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> torch.Tensor | None:
    """Return the mask of padding; None if no key is padding.

    Args:
        attention_mask: (batch, tokens so far) bool, False for padding; or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the mask is no more than causal, or none.
        local_size: the width of a sliding window or of a chunk.

    Raises:
        ValueError: packed sequences; a mask other than causal, a sliding window or none; a cache longer than its
            contents.
    """
    more_than_causal = not (allow_is_causal_skip or allow_is_bidirectional_skip)
    if more_than_causal or (allow_is_causal_skip and int(q_offset) + q_length != kv_offset + kv_length):
        raise ValueError(
            f"{NAME!r} has causal masks, sliding windows and none, and caches without room to spare, such as "
            "DynamicCache; this model asks for another mask here (a static cache, packed sequences by position_ids, "
            'blocks that see both ways): attn_implementation="sdpa", or register(fallback=True). While a CUDA graph is '
            "captured or a model compiled, transformers does not read position_ids, and takes those of a call without "
            "a cache for packed sequences: use_cache=True"
        )
    chunks = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if chunks and local_size < kv_offset + kv_length:  # a later chunk than the first may begin among the cached keys
        raise ValueError(
            f'{NAME!r} has no chunks of {local_size} tokens: attn_implementation="sdpa", or register(fallback=True)'
        )
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.shape[1] != kv_length:
        raise ValueError(
            f"{NAME!r} needs an attention_mask of all {kv_length} keys, those in the cache too; it has "
            f"{attention_mask.shape[1]}"
        )
    return None if bool(attention_mask.all()) else attention_mask

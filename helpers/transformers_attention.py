"""The course's attention inside models of Hugging Face's transformers, by their registry of attention functions.

    from helpers.transformers_attention import register
    register()
    model = LlamaForCausalLM._from_config(config, attn_implementation="course")
    model.set_attn_implementation("course")                                       # or for a model that is there

Causal models, with their KV cache, and models that see both ways; sliding windows; grouped heads; gradients. What the
kernels do not do is an error: padding, dropout, other masks, attention sinks, soft caps, static and paged caches.

transformers (5 or later) and PyTorch are optional: this module alone needs both.
"""

from __future__ import annotations

from typing import Any

from helpers.torch_attention import flash_attention, torch

try:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        "helpers.transformers_attention needs transformers 5 or later: pip install transformers. "
        "helpers.torch_attention does without it"
    ) from error

__all__ = ["NAME", "attend", "check_mask", "register"]

NAME = "course"


def register(name: str = NAME) -> str:
    """Make our attention an `attn_implementation` of that name, which is returned."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, check_mask)
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
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it, once a layer.

    Args:
        module: the layer. Its `is_causal` holds where the argument is None, and True where it has none.
        query: (batch, heads, seq, head_dim).
        key, value: (batch, kv_heads, seq_kv, head_dim), with what the KV cache had before. The last query sees all.
        attention_mask: None, as `check_mask` returns it.
        dropout: 0. scaling: 1 / sqrt(head_dim) where it is not given.
        sliding_window: how many keys a query sees, itself among them; where it sees both ways, itself and
            sliding_window - 1 on either side, as transformers calls FlashAttention.
        more: other arguments of some models; those that change the result have to be None.

    Returns:
        The output (batch, seq, heads, head_dim), and None in place of the weights, which no kernel holds.

    Raises:
        ValueError: for what the kernels do not do. The message says what to use instead.
    """
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, and {NAME!r} takes no mask: a model that makes "
            'its own needs attn_implementation="sdpa" or "eager"'
        )
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}, and {NAME!r} has none: model.eval(), or config.attention_dropout = 0.0 "
            '(in some models attn_pdrop or attention_probs_dropout_prob), or attn_implementation="sdpa"'
        )
    for what in ("softcap", "s_aux", "position_bias", "cache"):
        if more.get(what) is not None:
            raise ValueError(f'this model needs {what}, which {NAME!r} has not: attn_implementation="eager"')
    if more.get("output_attentions"):
        raise ValueError(f'{NAME!r} never holds the weights: output_attentions needs attn_implementation="eager"')
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None
    if sliding_window is not None and key.shape[2] > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    q, k, v = (a.transpose(1, 2) for a in (query, key, value))
    return flash_attention(q, k, v, causal=causal, window=window, softmax_scale=scaling), None


def check_mask(
    batch_size: int,
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
) -> None:
    """The mask of a forward pass of a model: None, for transformers asks this first; or an error.

    Args, as transformers gives them:
        attention_mask: (batch, tokens so far) bool, False for padding; or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the mask is no more than causal, or none.
        local_size: the width of a sliding window or of a chunk.

    Raises:
        ValueError: padding; packed sequences; a mask that is more than causal, a sliding window or none; a cache that
            is longer than what is in it.
    """
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if attention_mask.shape[1] != kv_length or not bool(attention_mask.all()):
            raise ValueError(
                f"{NAME!r} takes no padding: the attention_mask hides tokens. Give sequences of one length, one at a "
                "time, or pack them (helpers.torch_attention.flash_attention_varlen); or use "
                'attn_implementation="sdpa"'
            )
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise ValueError(
            f"{NAME!r} has causal masks, sliding windows and none; this model asks for another one here (packed "
            'sequences by position_ids, a static cache, blocks that see both ways): attn_implementation="sdpa"'
        )
    chunks = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if chunks and local_size < kv_length:
        raise ValueError(f'{NAME!r} has no chunks of {local_size} tokens: attn_implementation="sdpa"')
    if allow_is_causal_skip and int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(
            f"the last query is at {int(q_offset) + q_length - 1} and the last key at {kv_offset + kv_length - 1}: "
            f'{NAME!r} needs a cache without room to spare, such as DynamicCache; or attn_implementation="sdpa"'
        )

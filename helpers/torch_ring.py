"""Ring attention for PyTorch: sequences that are cut over the ranks of a process group, with gradients.

    distributed.init_process_group("gloo")           # "nccl" where each rank has a GPU; torchrun starts the processes
    where = local_positions(tokens.shape[1])         # the tokens of this rank, and their positions for an embedding
    q, k, v = model(tokens[:, where])                # (batch, rows, heads, head_dim)
    o = ring_attention(q, k, v, causal=True)         # of the rows of this rank

Every rank calls with its own part; `helpers.examples.ring_gpt` trains a model in this way. On GPUs, CuPy's NCCL sends
the arrays; without one, gloo does, and the kernels run on the CPU engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from helpers import device
from helpers.attention import comms, ring, ring_schedules
from helpers.attention.comms import Comms
from helpers.attention.ladder.kinds import TorchTensors
from helpers.torch_tensors import array_of, check_tensors, outside_of_graphs, tensor_of, to_autocast, torch

distributed = torch.distributed


def local_positions(tokens: int, group: Any = None, *, schedule: str = "zigzag", uneven: bool = False) -> torch.Tensor:
    """Return the positions of this rank's tokens in a sequence with this many, int64 (rows,), on the CPU.

    Args:
        group: see `ring_attention`. uneven: parts may differ in length; `ring_attention` then needs tokens.

    Raises:
        TypeError, ValueError: an unknown schedule; without `uneven`, tokens that cannot be cut into equal chunks.
        RuntimeError: there is no process group.
    """
    ranks = _comms(group)
    parts = ring_schedules.shard(np.arange(tokens)[None], ranks.size, schedule, uneven=uneven)
    return torch.from_numpy(parts[ranks.ranks[0]][0])


@outside_of_graphs
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    tokens: int | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    schedule: str = "zigzag",
    group: Any = None,
) -> Any:
    """Compute softmax(softmax_scale * q k^T) v for a sequence cut over the ranks of a group, differentiable once.

    All ranks call it in the same order, with tensors of the same shapes and the same options; otherwise each gets an
    error that names the difference. Every rank has to take part in the backward: a rank whose loss does not depend on
    the output lets the others wait.

    Args:
        q: (batch, rows, heads, head_dim), the rows at `local_positions`. float32, float16 or bfloat16.
        k, v: (batch, keys, kv_heads, head_dim) of q's dtype and device; kv_heads divides heads.
        causal, window, cu_seqlens, tokens, softmax_scale, schedule: see helpers.attention.ring_attention; cu_seqlens is
            that of the whole sequence, and not a tensor.
        return_lse: also the log-sum-exp of each row, float32 (batch, heads, rows). It has no gradient.
        deterministic: gradients with the same bits in every run. Also if `torch.use_deterministic_algorithms(True)` was
            called.
        group: of torch.distributed, or ranks of helpers.attention.comms of which this process has one, such as
            `gloo_of_torch(timeout=60)`; None for the default group.

    Returns:
        The output of this rank's rows, of q's shape and dtype; under `torch.autocast` of autocast's dtype. With
        return_lse, (o, lse).

    Raises:
        TypeError, ValueError: as for helpers.attention.ring_attention, and for tensors on several devices.
        RuntimeError: there is no process group, another rank has refused the call, or has failed.
        TimeoutError: another rank has not come in time.
    """
    check_tensors({"q": q, "k": k, "v": v})
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = {"causal": causal, "window": window, "cu_seqlens": cu_seqlens, "tokens": tokens}
    options |= {"softmax_scale": softmax_scale, "schedule": schedule, "comms": _comms(group)}
    o, lse = _Ring.apply(*to_autocast(q, k, v), options, deterministic)
    return (o, lse) if return_lse else o


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], deterministic: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output and lse of this rank's rows."""
        with _on_stream_of(q):
            (o,), (lse,) = ring.ring_attention(*([_array(a)] for a in (q, k, v)), return_lse=True, **options)
            o, lse = _tensor(o, q), _tensor(lse, q)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.options = {**options, "deterministic": deterministic}
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of q, k and v; for keys, from the rows of all ranks."""
        tensors = do.contiguous(), *ctx.saved_tensors
        with _on_stream_of(do):
            gradients = ring.ring_attention_backward(*([_array(a)] for a in tensors), **ctx.options)
            return (*(_tensor(a, do) for (a,) in gradients), None, None)


# ---- ranks, and tensors as arrays

_COMMS: WeakKeyDictionary[Any, Comms] = WeakKeyDictionary()  # by group, because NCCL takes seconds to connect


def _comms(group: Any) -> Comms:
    """Return this process's rank in a group, which the first call joins."""
    if isinstance(group, Comms):
        if len(group.ranks) != 1:
            raise ValueError(f"group has {len(group.ranks)} ranks in this process; tensors are those of one")
        return group
    if not distributed.is_initialized():
        raise RuntimeError("there is no process group: start with torchrun, and call init_process_group() first")
    group = distributed.group.WORLD if group is None else group
    if group not in _COMMS:
        _COMMS[group] = comms.nccl_of_torch(group) if device.ON_GPU else comms.gloo_of_torch(group)
    return _COMMS[group]


def _on_stream_of(a: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    return TorchTensors(torch).on_stream_of(a) if a.is_cuda else contextlib.nullcontext()


def _array(a: torch.Tensor) -> Any:
    return TorchTensors(torch).device_array(a.detach().resolve_neg()) if a.is_cuda else array_of(a)


def _tensor(a: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a's memory, on the device of `like`."""
    if not like.is_cuda:
        return tensor_of(a)
    if a.dtype.name == "bfloat16":  # CuPy does not export it
        return torch.from_dlpack(a.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(a)

"""PyTorch's tensors on their way to the kernels: which ones cannot be read, and arrays that share their memory.

PyTorch is optional, but required by importers of this module.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder.kinds import as_bytes
from helpers.attention.ladder.score_mod import BlockMask
from helpers.engine.cuda_source.signatures import dtype_of

try:
    import torch
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError(
        "helpers.torch_attention needs PyTorch, which is not installed here: pip install torch. "
        "helpers.attention does without it, for arrays of NumPy and CuPy."
    ) from error


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function out of graphs, like `torch.compiler.disable`.

    That imports PyTorch's compiler, which takes longer than PyTorch itself, so it is postponed until something is
    compiled.
    """
    apart: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal apart
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if apart is None:
            apart = torch.compiler.disable(function)
        return apart(*args, **kwargs)

    return call


# ---- what a kernel cannot read


def check_tensors(named: Mapping[str, Any], *, other_device: type[Exception] = ValueError) -> None:
    """Raise TypeError for anything but tensors, and `other_device` for one that is not on the first one's device."""
    first = next(iter(named))
    for name, a in named.items():
        if not isinstance(a, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(a).__name__}. Arrays: helpers.attention")
        if a.device != named[first].device:
            where = f"{name} is on {a.device} and {first} on {named[first].device}"
            raise other_device(f"{where}: one device for all is needed")


def check_numbers(named: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for tensors whose memory a kernel cannot read; other values pass.

    A kernel reads memory, so it would ignore a tangent, and a meta tensor has no memory.
    """
    transformed = is_transformed()
    if torch.compiler.is_compiling():
        if transformed:  # a graph would lose a tangent silently; outside of graphs each tensor is checked
            raise NotImplementedError(
                "torch.compile within a transform of torch.func or a level of torch.autograd.forward_ad: these kernels "
                f"have none of these. {INSTEAD}"
            )
        return
    for name, a in named.items():
        if not isinstance(a, torch.Tensor):
            continue
        if transformed:
            _check_untransformed(name, a)
        if a.is_meta and not is_traced(a):
            raise NotImplementedError(
                f"{name} is on the device meta, which has no numbers for a kernel to read. "
                "torch.nn.functional.scaled_dot_product_attention gives the shape of the output"
            )


@outside_of_graphs
def _check_untransformed(name: str, a: torch.Tensor) -> None:
    """Raise NotImplementedError for a tensor with a tangent, or inside one of torch.func's transforms."""
    active = torch._C._are_functorch_transforms_active()
    of_func = torch._C._functorch.is_functorch_wrapped_tensor(a)
    if of_func or (active and a.requires_grad and torch.is_grad_enabled()):
        raise NotImplementedError(
            f"{name} is in a transform of torch.func (grad, vjp, jvp, vmap, jacrev ...), and these kernels have none: "
            f"torch.autograd.grad has their gradients outside of one. {INSTEAD}"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(a).tangent is not None:
        raise NotImplementedError(
            f"{name} has a tangent (torch.autograd.forward_ad), and these kernels have no forward-mode derivatives. "
            f"{INSTEAD}"
        )


INSTEAD = (
    "torch.nn.functional.scaled_dot_product_attention, within "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), has them"
)


def is_traced(*tensors: torch.Tensor) -> bool:
    """Return True if PyTorch records operators here, as with torch.compile, torch.export and fake tensors.

    An operator's bookkeeping takes the host longer than the rest of the call, so other calls do not use one.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return not _KNOWN.issuperset(map(type, tensors))


_KNOWN = {torch.Tensor, torch.nn.Parameter}


def is_transformed() -> bool:
    """Return True if tensors may carry tangents or a level of torch.func, which only PyTorch's operations propagate."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def to_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to autocast's dtype if it is on, as PyTorch does for its own attention."""
    where = tensors[0].device.type
    if where == "meta" or not torch.is_autocast_enabled(where):  # PyTorch has no autocast on meta
        return tensors
    dtype = torch.get_autocast_dtype(where)
    return tuple(a.to(dtype) if a.is_floating_point() and 2 <= a.dtype.itemsize <= 4 else a for a in tensors)


# ---- tensors and the arrays of helpers.attention


def on_arrays(call: Any, named: Mapping[str, Any]) -> Any:
    """Call a function of helpers.attention outside of autograd; return new C-contiguous tensors.

    named: its arguments, tensors and others; q decides where it runs.
    """
    on_cpu = named["q"].device.type == "cpu"
    each = functools.cache(array_of if on_cpu else resolved)  # one tensor in two places stays one
    outputs = call(**each_tensor(each, named))
    if not on_cpu:
        return contiguous(outputs)
    return tuple(map(tensor_of, outputs)) if isinstance(outputs, tuple) else tensor_of(outputs)


def contiguous(outputs: Any) -> Any:
    """Make a tensor, or each of a tuple, C-contiguous."""
    return tuple([a.contiguous() for a in outputs]) if isinstance(outputs, tuple) else outputs.contiguous()


def each_tensor(function: Callable[[torch.Tensor], Any], option: Any) -> Any:
    """Replace each tensor in an option, or in several, by what the function returns for it."""
    if isinstance(option, torch.Tensor):
        return function(option)
    if isinstance(option, tuple):
        return tuple([each_tensor(function, a) for a in option])
    if isinstance(option, dict):
        return {name: a if type(a) in _NO_TENSORS else each_tensor(function, a) for name, a in option.items()}
    if isinstance(option, BlockMask):
        mask = copy.copy(option)  # with its number: it is the same mask
        mask.mod_args = each_tensor(function, option.mod_args)
        return mask
    return option


_NO_TENSORS = frozenset({bool, int, float, str, type(None)})


def resolved(a: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, without being a parameter, and with its signs resolved in memory."""
    plain = type(a) is torch.Tensor and not (a.requires_grad or a.is_neg())
    return a if plain else a.detach().resolve_neg()


def array_of(a: torch.Tensor) -> Any:
    """Make a device array of a CPU tensor: sharing its memory on the CPU engine, a copy on a GPU."""
    a = a.detach().resolve_conj().resolve_neg()
    if a.dtype == torch.bfloat16:  # NumPy does not have it
        host = a.view(torch.int16).numpy().view(dtype_of("bfloat16"))
    else:
        host = as_bytes("the tensor", a).numpy()
    return device.cp.asarray(host) if device.ON_GPU else host.view(device.cp.ndarray)


def tensor_of(a: Any) -> torch.Tensor:
    """Reverse `array_of`; the tensor is contiguous."""
    a = device.cp.asnumpy(a) if device.ON_GPU else np.asarray(a).view(np.ndarray)
    a = np.ascontiguousarray(a)
    if a.dtype == dtype_of("bfloat16"):
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)

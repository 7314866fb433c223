"""Peers of the stages: PyTorch's attention, backend by backend, its matrix product, and other libraries' attention.

Peers are optional: those that are not installed are left out. All get the inputs of the stages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.attention.ladder.layout import titles
from helpers.bench.cases import Inputs
from helpers.bench.results import roof_name
from helpers.device import ON_GPU, cp


@dataclass(frozen=True)
class Peer:
    """Another implementation of attention.

    ready(inputs, causal) is a context: it gives a function that runs attention once and returns the output.
    """

    name: str
    ready: Callable[[Inputs, bool], AbstractContextManager[Callable[[], Any]]]
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    causal: bool = True
    sweep: bool = True  # timed at many N

    def why_not(self, dtype: str, causal: bool) -> str | None:
        """Return why it cannot compute a case, as far as that is known in advance."""
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(titles, self.dtypes))}"
        return "no causal mask" if causal and not self.causal else None


@dataclass(frozen=True)
class Roof:
    """The machine's upper limit. ready() gives a launch; work is its FLOP ("tflops") or bytes ("gbps")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    quantity: str
    work: float
    ready: Callable[[], Callable[[], Any]]
    note: str = ""


# ------------------------------------------------------------------------------------------------- PyTorch


TORCH_DEVICE = "cuda" if ON_GPU else "cpu"


def torch_on_gpu() -> Any | None:
    """Import PyTorch, if it is installed and sees the GPU; else return None."""
    if not ON_GPU or importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def _sdpa(backend: str) -> Callable[[Inputs, bool], AbstractContextManager[Callable[[], Any]]]:
    """Make a peer of scaled_dot_product_attention with one backend allowed.

    Its float32 products have float32's precision: math does not use TF32. From sm_80 on, efficient uses CUTLASS's
    OpMultiplyAddFastF32, which computes a float32 product as three TF32 products on the tensor cores.
    """

    @contextlib.contextmanager
    def ready(inputs: Inputs, causal: bool) -> Iterator[Callable[[], Any]]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        torch.backends.cuda.matmul.allow_tf32 = False
        q, k, v = inputs.torch

        # PyTorch gives the reasons why a backend cannot both as warnings and in the error; the error suffices.
        def run() -> Any:
            with sdpa_kernel(getattr(SDPBackend, backend)):  # in each call: others may be timed in turns with it
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield run

    return ready


HALVES = ("float16", "bfloat16")
TORCH = (
    Peer("SDPA efficient", _sdpa("EFFICIENT_ATTENTION")),
    Peer("SDPA flash", _sdpa("FLASH_ATTENTION"), HALVES),
    Peer("SDPA cuDNN", _sdpa("CUDNN_ATTENTION"), HALVES),
    Peer("SDPA math", _sdpa("MATH"), sweep=False),  # its N x N scores of 32 heads take 80 GB
)


# FlashAttention-3 as built by its authors, or the package fa3-fwd, which has only the forward pass.
FLASH_ATTENTION_3 = ("flash_attn_interface", "fa3_fwd_interface")


def flash_attention_3() -> Any | None:
    """Import FlashAttention-3; None if it is not installed."""
    name = next(filter(importlib.util.find_spec, FLASH_ATTENTION_3), None)
    return importlib.import_module(name) if name else None


def _of_models(load: Callable[[], Any]) -> Callable[[Inputs, bool], AbstractContextManager[Callable[[], Any]]]:
    """Make a peer of a function with contiguous (batch, N, heads, d) arrays. load: returns the function."""

    @contextlib.contextmanager
    def ready(inputs: Inputs, causal: bool) -> Iterator[Callable[[], Any]]:
        import torch

        call = load()
        q, k, v = (a.transpose(1, 2).contiguous() for a in inputs.torch)

        def run() -> Any:
            o = call(q, k, v, causal=causal)
            return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

        with torch.no_grad():
            yield run

    return ready


def flash_attention_4() -> Callable[..., Any] | None:
    """Return flash_attn_func of the package flash-attn-4, reduced to its output; None if it is not installed."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return None
    from flash_attn.cute import flash_attn_func

    def call(*given: Any, **options: Any) -> Any:
        outputs = flash_attn_func(*given, **options)
        return outputs[0] if isinstance(outputs, tuple) else outputs  # some versions return lse, too

    return call


def attentions() -> tuple[Peer, ...]:
    """List PyTorch's backends, and FlashAttention-3 and -4 if they are installed and support the GPU."""
    if int(cp.cuda.Device().compute_capability) != 90:
        return TORCH
    flash3 = Peer("FlashAttention-3", _of_models(lambda: flash_attention_3().flash_attn_func), (*HALVES, "uint8"))
    flash4 = Peer("FlashAttention-4", _of_models(flash_attention_4), HALVES)
    installed = any(map(importlib.util.find_spec, FLASH_ATTENTION_3)), flash_attention_4() is not None
    return (*TORCH, *itertools.compress((flash3, flash4), installed))


def _sdpa_backward(backend: str) -> Callable[[Inputs, bool], AbstractContextManager[Callable[[], Any]]]:
    """Make a peer of SDPA's gradients, (dq, dk, dv), after a forward pass that is not timed."""

    @contextlib.contextmanager
    def ready(inputs: Inputs, causal: bool) -> Iterator[Callable[[], Any]]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        leaves = [a.detach().requires_grad_() for a in inputs.torch]
        do = torch.from_numpy(inputs.do.astype(np.float32)).cuda().to(leaves[0].dtype)
        with sdpa_kernel(getattr(SDPBackend, backend)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        yield lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    return ready


TORCH_BACKWARD = (
    Peer("SDPA efficient", _sdpa_backward("EFFICIENT_ATTENTION")),
    Peer("SDPA flash", _sdpa_backward("FLASH_ATTENTION"), HALVES),
    Peer("SDPA cuDNN", _sdpa_backward("CUDNN_ATTENTION"), HALVES),
)


def _matmul(dtype: str) -> Roof:
    n = 8192

    def ready() -> Callable[[], Any]:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = (torch.randn(n, n, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
        return lambda: a @ b

    return Roof(roof_name(dtype), dtype, (n, n, n), "tflops", 2 * n**3, ready)


def _copy() -> Roof:
    words = 1 << 28

    def ready() -> Callable[[], Any]:
        import torch

        source = torch.randn(words, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Roof("copy", "float32", (words,), "gbps", 2 * 4 * words, ready, "read + write")


TORCH_ROOFS = (_matmul("float32"), _copy(), *map(_matmul, HALVES))


# ------------------------------------------------------------------------------------------- NumPy and Numba


@contextlib.contextmanager
def _numpy(inputs: Inputs, causal: bool) -> Iterator[Callable[[], Any]]:
    q, k, v = inputs.host
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    hidden = np.arange(k.shape[-2]) > np.arange(q.shape[-2])[:, None] if causal else None

    def run() -> np.ndarray:
        s = q @ np.swapaxes(k, -1, -2) * scale
        if hidden is not None:
            s[..., hidden] = -np.inf
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True)) @ v

    yield run


NUMPY = Peer("NumPy", _numpy, ("float32",))


def numba_simulator() -> Peer | None:
    """Return Numba's CUDA simulator, which runs kernels written in Python without a GPU; None if it is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    if "numba" not in sys.modules:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read once, when Numba is imported
    from numba.core import config

    return Peer("Numba's simulator", _numba, ("float32",), causal=False) if config.ENABLE_CUDASIM else None


cuda: Any  # Numba's module, after _numba() has imported it


@contextlib.contextmanager
def _numba(inputs: Inputs, causal: bool) -> Iterator[Callable[[], Any]]:
    """Write naive as a Numba kernel: one thread per query row, with online_softmax's running maximum and sum."""
    global cuda  # the simulator passes a kernel its indices by replacing this global name
    from numba import cuda

    @cuda.jit
    def attend(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
        row = cuda.grid(1)
        if row < q.shape[0]:
            largest, total = -math.inf, 0.0
            for key in range(k.shape[0]):
                score = 0.0
                for c in range(q.shape[1]):
                    score += q[row, c] * k[key, c]
                score *= scale
                rescale = math.exp(largest - score) if score > largest else 1.0
                largest = max(largest, score)
                p = math.exp(score - largest)
                total = total * rescale + p
                for c in range(q.shape[1]):
                    o[row, c] = o[row, c] * rescale + p * v[key, c]
            for c in range(q.shape[1]):
                o[row, c] /= total

    n, head_dim = inputs.shape[2:]
    heads = [tuple(a[head] for a in inputs.host) for head in np.ndindex(inputs.shape[:2])]

    def run() -> np.ndarray:
        o = np.zeros(inputs.shape, np.float32)
        for head, (q, k, v) in zip(np.ndindex(o.shape[:2]), heads, strict=True):
            attend[-(-n // 64), 64](q, k, v, o[head], head_dim**-0.5)
        return o

    yield run

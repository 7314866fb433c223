"""Time calls on the host of a GPU: checks, choice of a stage, launch; and PyTorch's SDPA for comparison.

The work is small, one sequence of 64 tokens, so the host limits the speed. Calls follow one another without waiting for
the GPU, as in a model.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from helpers.attention import flash_attention, flash_attention_varlen
from helpers.attention.ladder import FORWARD, default_of
from helpers.bench.cases import Case, Inputs
from helpers.bench.peers import torch_on_gpu
from helpers.bench.timing import Timing
from helpers.device import cp

CASE = Case((1, 4, 64, 64), "float16", causal=True)  # (batch, heads, tokens, head_dim); calls get (1, 64, 4, 64)
BATCHES, CALLS = 20, 100  # fewer calls than fit into a GPU's queue

Ready = Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]


@dataclass(frozen=True)
class HostCall:
    """One implementation of attention to call.

    ready(inputs) is a context: it gives the call, and a function that converts its result to (batch, heads, tokens,
    head_dim).
    """

    name: str
    ready: Callable[[Inputs], AbstractContextManager[tuple[Callable[[], Any], Callable[[Any], Any]]]]
    note: str = ""


def host_time(call: Callable[[], object], *, batches: int = BATCHES, calls: int = CALLS) -> Timing:
    """Time a call on the host that was called before: the median over batches, and their spread.

    It waits for the GPU between batches, which is not timed.
    """
    times = []
    for _ in range(batches + 1):
        cp.cuda.Device().synchronize()
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - began) / calls / 1e6)
    cp.cuda.Device().synchronize()
    times = times[1:]  # the first was a warm-up
    return Timing(statistics.median(times), min(times), max(times), batches * calls)


def calls(with_torch: bool) -> tuple[HostCall, ...]:
    """List the timed calls: ours with CuPy's arrays; with PyTorch also ours with tensors, and SDPA."""
    kinds = {"CuPy arrays": _device_arrays, **({"torch tensors": _tensors} if with_torch else {})}
    kinds_of_call = [HostCall("a prepared launch", _prepared, "everything but the launch was done before")]
    for kind, arrays in kinds.items():
        kinds_of_call += [
            HostCall(f"flash_attention, {kind}", partial(_padded, arrays)),
            HostCall(f"flash_attention_varlen, {kind}", partial(_packed, arrays, False), "reads cu_seqlens: waits"),
            HostCall(f"flash_attention_varlen with max_seqlen, {kind}", partial(_packed, arrays, True)),
        ]
    return (*kinds_of_call, *([HostCall("SDPA, torch tensors", _sdpa)] if with_torch else []))


def _device_arrays(inputs: Inputs) -> tuple[Any, ...]:
    """Make q, k, v as (batch, tokens, heads, head_dim), and cu_seqlens of one sequence."""
    return (*(cp.ascontiguousarray(a.swapaxes(1, 2)) for a in inputs.device), cp.asarray([0, CASE.shape[2]], "int32"))


def _tensors(inputs: Inputs) -> tuple[Any, ...]:
    torch = torch_on_gpu()
    cu_seqlens = torch.tensor([0, CASE.shape[2]], dtype=torch.int32, device="cuda")
    return (*(a.transpose(1, 2).contiguous() for a in inputs.torch), cu_seqlens)


@contextlib.contextmanager
def _padded(arrays: Callable[[Inputs], tuple[Any, ...]], inputs: Inputs) -> Ready:
    q, k, v, _ = arrays(inputs)
    yield lambda: flash_attention(q, k, v, causal=True), lambda o: o.swapaxes(1, 2)


@contextlib.contextmanager
def _packed(arrays: Callable[[Inputs], tuple[Any, ...]], with_most: bool, inputs: Inputs) -> Ready:
    *padded, cu_seqlens = arrays(inputs)
    q, k, v = (a[0] for a in padded)
    most = {"max_seqlen_q": len(q), "max_seqlen_k": len(k)} if with_most else {}
    call = partial(flash_attention_varlen, q, k, v, cu_seqlens, cu_seqlens, causal=True, **most)
    yield call, lambda o: o.swapaxes(0, 1)[None]


@contextlib.contextmanager
def _prepared(inputs: Inputs) -> Ready:
    """Prepare the launch of the stage that flash_attention chooses."""
    dtype, head_dim = CASE.dtype, CASE.shape[3]
    rows = math.prod(CASE.shape[:3])
    stage = default_of(FORWARD, CASE.shape[2], rows, head_dim=head_dim, dtype=dtype, causal=True)
    assert stage is not None
    run, o = stage.prepare(*inputs.device, causal=True)
    yield run, lambda _: o


@contextlib.contextmanager
def _sdpa(inputs: Inputs) -> Ready:
    """Call SDPA with the backend that PyTorch chooses."""
    torch = torch_on_gpu()
    q, k, v = inputs.torch
    with torch.no_grad():
        yield lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), lambda o: o

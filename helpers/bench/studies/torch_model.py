"""Measure our attention inside PyTorch and a transformers model, on a GPU: tests, host cost, speed, memory.

    python3 -m helpers.bench.study torch_model FILE [PART ...]          # of STUDY, below

The models have random weights (Llama's layers: 12 of 16 heads of 64).
Tests (not measured again, because the workflow for GPUs runs them): PyTorch's tests, counted. MiniLM (not measured
again): BertModel with all-MiniLM-L6-v2's weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from helpers import attention
from helpers.bench import records
from helpers.bench.cases import Shape
from helpers.bench.harness import Row, Study, fields_text, figures, speed_text
from helpers.bench.host_cost import host_time
from helpers.bench.peers import TORCH_DEVICE
from helpers.bench.run import device_facts, free_pools
from helpers.bench.timing import Timing, quartiles, speeds

RECORD = records.MEASURED / "nvidia-h200-torch.json"
recorded = records.reader(RECORD.name)
COMMAND = "python3 -m helpers.bench.study torch_model FILE"

# Lengths at which a call is timed on the host: a shape seen before, others; and the longest of these.
HOST = ("forward", "forward, a new length", "one query, the cache one longer", "forward and backward")
BOTH_WAYS = ("forward and backward, one thread", "forward and backward, compiled")
LONGEST = 2560
IN_GRAPH = 12  # calls captured together, as in a model
LENGTHS = (512, 4096, 16384)
IMPLEMENTATIONS = ("course", "sdpa", "eager")
BASE = "sdpa"  # the others' speeds are relative to it
KV_HEADS = (16, 4)
LAYERS, HIDDEN, HEADS, MLP, WORDS = 12, 1024, 16, 2816, 32000
SPREAD = 0.04  # standard deviation of the weights: scaled logits of about 1.6, so attention is far from uniform
ROUNDS = 15
PROMPT, NEW = 100, 64


# ---- models


def llama(kv_heads: int, dtype: str) -> Any:
    """Make a LlamaForCausalLM with random weights on the GPU."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **{"vocab_size": WORDS, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "max_position_embeddings": 2 * max(LENGTHS)},
        **{"initializer_range": SPREAD, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    with torch.device(TORCH_DEVICE):
        model = transformers.LlamaForCausalLM(config)
    return model.to(getattr(torch, dtype)).eval()


def tokens(length: int, batch: int = 1) -> Any:
    """Draw (batch, length) token numbers on the GPU, the same in every run."""
    import torch

    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(length)).to(TORCH_DEVICE)


@contextmanager
def by(model: Any, implementation: str) -> Iterator[None]:
    """Switch the model to this attention. SDPA is restricted to its flash backend in half types."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from helpers import transformers_attention

    transformers_attention.register()
    model.set_attn_implementation(implementation)
    halves = str(next(model.parameters()).dtype) in ("torch.bfloat16", "torch.float16")
    flash: AbstractContextManager[Any] = nullcontext()
    if implementation == "sdpa" and halves:
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with flash:
        yield


# ---- one section of the record each


def host_cost() -> list[dict[str, Any]]:
    """Measure the host's time per call, in µs, for one short sequence.

    Forward, forward at a new length, one query with a longer cache, forward and backward: directly, without autograd's
    thread, with torch.compile.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from helpers import torch_attention

    shape = (1, 64, 4, 64)
    q, k, v = (torch.randn(shape, device=TORCH_DEVICE, dtype=torch.float16) for _ in range(3))
    heads_first = [a.transpose(1, 2) for a in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    forward: dict[str, Callable[[], Any]] = {
        "helpers.attention.flash_attention": partial(attention.flash_attention, q, k, v, causal=True),
        "torch_attention.flash_attention": partial(torch_attention.flash_attention, q, k, v, causal=True),
        "torch_attention.scaled_dot_product_attention": partial(
            torch_attention.scaled_dot_product_attention, *heads_first, is_causal=True
        ),
        "SDPA": partial(sdpa, *heads_first, is_causal=True),
    }
    leaves = [a.detach().requires_grad_() for a in (q, k, v)]
    do = torch.randn(shape, device=TORCH_DEVICE, dtype=torch.float16)

    def trained(call: Callable[..., Any], grad: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(*leaves), leaves, grad)

    class Nothing(torch.autograd.Function):
        """A Function that copies q forward and passes do through backward, to time the cost of any Function in Python.

        Autograd's thread has to take the GIL to call its backward.
        """

        forward = staticmethod(lambda ctx, q, k, v: q.clone())
        backward = staticmethod(lambda ctx, do: (do, do, do))

    def turned(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: call(*(a.transpose(1, 2) for a in given), is_causal=True)

    differentiated: dict[str, tuple[Callable[..., Any], Any]] = {
        "torch_attention.flash_attention": (partial(torch_attention.flash_attention, causal=True), do),
        "torch_attention.scaled_dot_product_attention": (
            turned(torch_attention.scaled_dot_product_attention),
            do.transpose(1, 2),
        ),
        "SDPA": (turned(sdpa), do.transpose(1, 2)),
    }
    both = {"a Function that copies q": trained(Nothing.apply, do)}
    both |= {name: trained(*of) for name, of in differentiated.items()}
    compiled = {
        name: trained(torch.compile(call, fullgraph=True, dynamic=False), grad)
        for name, (call, grad) in differentiated.items()
    }
    longer = [a.repeat(1, LONGEST // 64, 1, 1) for a in (q, k, v)]
    lengths = itertools.cycle(range(65, LONGEST))  # so many that none is cached when it recurs

    def each_length(call: Callable[..., Any], *, one_query: bool) -> Callable[[], Any]:
        def at_the_next_length() -> Any:
            n = next(lengths)
            return call(longer[0][:, : 1 if one_query else n], *(a[:, :n] for a in longer[1:]))

        return at_the_next_length

    in_any_shape: dict[str, Callable[..., Any]] = {
        "helpers.attention.flash_attention": partial(attention.flash_attention, causal=True),
        "torch_attention.flash_attention": partial(torch_attention.flash_attention, causal=True),
        "SDPA": lambda *arrays: sdpa(*(a.transpose(1, 2) for a in arrays), is_causal=arrays[0].shape[1] > 1),
    }
    new_length, longer_cache = (
        {name: each_length(call, one_query=one_query) for name, call in in_any_shape.items()}
        for one_query in (False, True)
    )
    rows = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for what, calls in zip(HOST, (forward, new_length, longer_cache, both), strict=True):
            for name, call in calls.items():
                with torch.set_grad_enabled(what == HOST[-1]):
                    rows.append(_host_row(name, what, shape, host_time(call)))
        with torch.autograd.set_multithreading_enabled(False):
            rows += [_host_row(name, BOTH_WAYS[0], shape, host_time(call)) for name, call in both.items()]
        rows += [_host_row(name, BOTH_WAYS[1], shape, host_time(call, batches=6)) for name, call in compiled.items()]
    # Among PyTorch's backends it takes cuDNN here, which makes a plan for each shape: few calls suffice.
    with torch.no_grad():
        timing = host_time(new_length["SDPA"], batches=3, calls=20)
    rows.append(_host_row("SDPA, the backend of PyTorch's choice", HOST[1], shape, timing))
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(IN_GRAPH):
                forward["torch_attention.flash_attention"]()
    rows.append(_host_row(f"a CUDA graph with {IN_GRAPH} such calls", HOST[0], shape, host_time(graph.replay)))
    return rows


def _host_row(name: str, what: str, shape: Shape, timing: Timing) -> dict[str, Any]:
    us = {"us": 1e3 * timing.ms, "us_min": 1e3 * timing.ms_min, "us_max": 1e3 * timing.ms_max}
    return {"call": name, "what": what, "shape": list(shape), "dtype": "float16", **us}


def speed(kind: str, kv_heads: int, *, lengths: Sequence[int] = LENGTHS, batch: int = 1) -> list[dict[str, Any]]:
    """Time a model's forward ("prefill") or forward and backward pass ("training") with each attention, in turn.

    Milliseconds by device events, the median and the quartiles over rounds in which the implementations follow one
    another, and how many times as fast as with SDPA; memory is PyTorch's peak beyond what was allocated before the call
    (for training, including the weights' gradients).
    """
    import torch

    model = llama(kv_heads, "bfloat16")
    rows = []
    for length in lengths:
        ids = tokens(length, batch)

        def prefill(ids: Any = ids) -> None:
            with torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=1)

        def train(ids: Any = ids) -> None:
            model(ids, labels=ids, use_cache=False).loss.backward()

        call = prefill if kind == "prefill" else train
        peaks, errors = _first_calls(model, call)
        times = _in_turns(model, call, list(peaks))
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        for implementation in IMPLEMENTATIONS:
            row = {"kind": kind, "implementation": implementation, "n": length, "kv_heads": kv_heads}
            if implementation in times:
                row |= figures(times[implementation]) | {"rounds": len(times[implementation])}
                _, row["ms_q1"], row["ms_q3"] = quartiles(times[implementation])
                row |= speeds(times[implementation], times[BASE]) if BASE in times else {}
                row |= {"tokens_per_s": 1e3 * batch * length / row["ms"], "peak_bytes": peaks[implementation]}
            else:
                row["error"] = errors[implementation]
            rows.append(row)
    return rows


def _first_calls(model: Any, call: Callable[[], None]) -> tuple[dict[str, int], dict[str, str]]:
    """Return PyTorch's peak bytes during a call with each implementation that supports it; why others do not."""
    import torch

    peaks: dict[str, int] = {}
    errors: dict[str, str] = {}
    for implementation in IMPLEMENTATIONS:
        try:
            with by(model, implementation):
                call()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                torch.cuda.synchronize()
            peaks[implementation] = torch.cuda.max_memory_allocated() - before
        except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError
            errors[implementation] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        torch.cuda.empty_cache()
    return peaks, errors


def _in_turns(model: Any, call: Callable[[], None], implementations: Sequence[str]) -> dict[str, list[float]]:
    """Time a call with each implementation, in milliseconds, one for each round."""
    import torch

    times: dict[str, list[float]] = {implementation: [] for implementation in implementations}
    for _ in range(ROUNDS):
        for implementation, ms in times.items():
            with by(model, implementation):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                call()  # so that clock and caches are those of its own run
                start.record()
                call()
                end.record()
                end.synchronize()
                ms.append(start.elapsed_time(end))
    return times


def accuracy(kv_heads: int, length: int = 512) -> list[dict[str, Any]]:
    """Compare the logits with eager attention in float64: the largest error, by type and implementation."""
    import torch

    ids, rows = tokens(length), []
    with torch.no_grad():
        model = llama(kv_heads, "float64")
        with by(model, "eager"):
            want = model(ids, use_cache=False).logits
        del model
        for dtype in ("float32", "float16", "bfloat16"):
            model = llama(kv_heads, dtype)
            for implementation in IMPLEMENTATIONS:
                with by(model, implementation):
                    error = float((model(ids, use_cache=False).logits.double() - want).abs().max())
                rows.append({"implementation": implementation, "dtype": dtype, "kv_heads": kv_heads, "n": length})
                rows[-1] |= {"max_error": error, "largest_logit": float(want.abs().max())}
    return rows


def generation(kv_heads: int) -> list[dict[str, Any]]:
    """Generate 64 tokens greedily with the KV cache: whether they equal SDPA's, and tokens per second."""
    import torch

    rows = []
    for dtype in ("float32", "bfloat16"):
        model, ids = llama(kv_heads, dtype), tokens(PROMPT, batch=2)
        generated: dict[str, Any] = {}
        times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
        options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        for turn in range(4):
            for implementation in IMPLEMENTATIONS:
                with by(model, implementation):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    generated[implementation] = model.generate(ids, **options)[:, PROMPT:]
                    torch.cuda.synchronize()
                    if turn:
                        times[implementation].append(time.perf_counter() - began)
        for implementation in IMPLEMENTATIONS:
            rates = sorted(ids.shape[0] * NEW / t for t in times[implementation])
            same = generated[implementation] == generated["sdpa"]
            row = {"implementation": implementation, "dtype": dtype, "kv_heads": kv_heads, "batch": ids.shape[0]}
            row |= {"prompt": PROMPT, "new": NEW, "as_sdpa": int(same.sum()), "of": same.numel()}
            row |= {"different_words": len(set(generated[implementation].flatten().tolist()))}
            row |= {"tokens_per_s": rates[len(rates) // 2], "min": rates[0], "max": rates[-1]}
            rows.append(row)
    return rows


# ---- the record


def _head() -> dict[str, Any]:
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    return {
        "device": {**device_facts(), "torch": torch.__version__, "transformers": transformers.__version__},
        "how": {
            "command": COMMAND,
            "model": {
                **{"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "head_dim": HIDDEN // HEADS, "mlp": MLP},
                **{"words": WORDS, "kv_heads": list(KV_HEADS), "weights": f"random, of standard deviation {SPREAD}"},
            },
            "speed": "bfloat16, one sequence; device events around one call after another of the same; median of as "
            "many rounds as a row says, in which the implementations take turns; sdpa with its flash backend",
            "prefill": "no KV cache, logits of the last token alone",
            "training": "loss of every token and its gradients; no optimizer",
            "memory": "PyTorch's peak beyond what was held before the call",
            "accuracy": "logits of 512 tokens compared with eager attention in float64",
        },
    }


def _rows(section: Callable[[int], list[Row]]) -> Callable[[], Iterator[list[Row]]]:
    """Make a part of the record: a section with each number of KV heads."""

    def part() -> Iterator[list[Row]]:
        for kv_heads in KV_HEADS:
            yield section(kv_heads)
            free_pools()

    return part


STUDY = Study(
    "torch_model",
    {
        "host": host_cost,
        "accuracy": _rows(accuracy),
        "generation": _rows(generation),
        "prefill": _rows(partial(speed, "prefill")),
        "training": _rows(partial(speed, "training")),
        "training_8": _rows(partial(speed, "training", lengths=(512,), batch=8)),  # sequences at a time
    },
    head=_head,
    line=fields_text,
    needs=("torch", "transformers"),
)


take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record, by default the committed one, as text."""
    facts = record["device"]
    lines = [f"{facts['description']}; torch {facts['torch']}, transformers {facts['transformers']}"]
    if tests := record.get("tests"):
        counts = (f"{tests[what]} {what}" for what in ("passed", "failed", "skipped", "errors") if what in tests)
        lines.append(f"tests with PyTorch: {', '.join(counts)}")
    if "host" in record:
        lines += ["", f"{'host, a call':32}{'':46}{'µs':>8}{'spread':>9}"]
        for r in record["host"]:
            low, high = ("us_q1", "us_q3") if "us_q1" in r else ("us_min", "us_max")
            lines.append(f"{r['what']:32}{r['call']:46}{r['us']:8.1f}{(r[high] - r[low]) / r['us']:9.1%}")
    for kind in ("prefill", "training", "training_8"):
        if kind not in record:
            continue
        lines += [
            "",
            f"{kind:10}{'kv heads':>9}{'N':>8}{'':>3}{'attention':10}{'ms':>10}{'spread':>9}{'tokens/s':>11}{'GB':>8}"
            f"{'over SDPA':>22}",
        ]
        for r in record[kind]:
            line = f"{'':10}{r['kv_heads']:9}{r['n']:8}{'':3}{r['implementation']:10}"
            if "error" in r:
                lines.append(line + "  " + r["error"])
                continue
            low, high = ("ms_q1", "ms_q3") if "ms_q1" in r else ("ms_min", "ms_max")
            line += f"{r['ms']:10.2f}{(r[high] - r[low]) / r['ms']:9.1%}{r['tokens_per_s']:11,.0f}"
            line += f"{r['peak_bytes'] / 1e9:8.2f}"
            lines.append(line + (f"{speed_text(r):>22}" if "speed" in r and r["implementation"] != BASE else ""))
    if "accuracy" in record:
        lines += ["", f"{'logits, largest error':24}" + "".join(f"{name:>11}" for name in IMPLEMENTATIONS)]
        cells = {(r["kv_heads"], r["dtype"], r["implementation"]): r["max_error"] for r in record["accuracy"]}
        for kv_heads, dtype in dict.fromkeys(key[:2] for key in cells):
            errors = "".join(f"{cells[kv_heads, dtype, name]:11.1e}" for name in IMPLEMENTATIONS)
            lines.append(f"{kv_heads:3} kv heads {dtype:11}" + errors)
    for r in record.get("generation", []):
        same = f"{r['as_sdpa']} of {r['of']} tokens as SDPA"
        lines.append(
            f"greedy {r['kv_heads']:3} {r['dtype']:9}{r['implementation']:8}{same}, {r['tokens_per_s']:.0f} tokens/s"
        )
    for r in record.get("minilm", []):
        lines.append(f"all-MiniLM-L6-v2 {r['implementation']:8}{r['max_error']:10.1e} of {r['largest']:.2f}")
    lines += [f"[FAIL] {name}: {why}" for name, why in record.get("failed", {}).items()]
    return "\n".join(lines)

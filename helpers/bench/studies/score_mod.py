"""Compare functions of scores with PyTorch's FlexAttention, forward and backward, on a GPU.

    python3 -m helpers.bench.study score_mod FILE

bfloat16, 4 x 16 heads of 4096 rows of 128 columns, and 4 x 32 of 64. Two heads of every result, including gradients,
are compared with float64 first. Then ours, in its forms, and FlexAttention's, which torch.compile has compiled for
these shapes, are timed in turns. Neither's time includes finding the tiles that a mask needs.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helpers.attention import flash_attention, flash_attention_backward, make_block_mask
from helpers.attention.score_mods import relative_bias, soft_cap
from helpers.bench import records
from helpers.bench.harness import Study, compare, words_of_process
from helpers.bench.peers import TORCH_DEVICE
from helpers.bench.run import device_facts
from helpers.bench.timing import speed_range
from helpers.device import describe

SHAPES = ((4, 16, 4096, 128), (4, 32, 4096, 64))
ROUNDS = 9
DTYPE = "bfloat16"
SAMPLED = ((0, 1), (3, 11))  # (batch, head)
DOCUMENT, PREFIX, WINDOW, CAP = 512, 256, 512, 30.0
TOLERANCE = 2.5e-2  # relative to the largest number, for bfloat16 results
CASES = (
    *("no function", "ALiBi", "soft cap 30", "relative bias by a table"),
    *("window 512, causal", "documents of 512", "prefix of 256, causal"),
)


@dataclass(frozen=True)
class Case:
    """One function. ours: options of calls by the name of a form. score, mask: the same in NumPy.

    flex_mod, flex_mask: the same for PyTorch.
    """

    name: str
    ours: Mapping[str, Mapping[str, Any]]
    flex_mod: Callable[..., Any] | None = None
    flex_mask: Callable[..., Any] | None = None
    score: Callable[..., Any] = lambda s, b, h, i, j: s
    slope: Callable[..., Any] = lambda s, y: 1.0
    mask: Callable[..., Any] | None = None


@dataclass
class Arrays:
    """The arrays that the functions read, for some heads."""

    heads: int
    n: int
    slopes: np.ndarray = field(init=False)
    table: np.ndarray = field(init=False)
    documents: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.slopes = (2.0 ** -(8 * np.arange(1, self.heads + 1) / self.heads)).astype(np.float32)
        self.table = rng.standard_normal((self.heads, 2 * self.n - 1)).astype(np.float32)
        self.documents = (np.arange(self.n) // DOCUMENT).astype(np.int32)

    def torch(self, name: str) -> Any:
        """Convert an array to PyTorch's."""
        import torch

        return torch.from_numpy(getattr(self, name)).to(TORCH_DEVICE)


def cases(arrays: Arrays) -> Iterator[Case]:
    """Yield the rows of the table."""
    n = arrays.n

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h] * abs(q - k)

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return CAP * (s / CAP).tanh()

    def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[h, k - q + n - 1]

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= WINDOW)

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) | (k < PREFIX)

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[q] == ids[k]

    slopes, table, ids = (arrays.torch(name) for name in ("slopes", "table", "documents"))
    yield Case("no function", {"as it is": {}})
    int_alibi = {"score_mod": "score - slope[head] * abs(q_idx - kv_idx)", "mod_args": {"slope": slopes}}
    yield Case(
        "ALiBi",
        {"alibi_slopes": {"alibi_slopes": slopes}, "as text": {**int_alibi, "score_mod_grad": "1"}},
        alibi,
        score=lambda s, b, h, i, j: s - arrays.slopes[h] * abs(i - j),
    )
    text = {"score_mod": "cap * tanhf(score / cap)", "score_mod_grad": "1 - (y / cap) * (y / cap)"}
    yield Case(
        "soft cap 30",
        {"soft_cap": soft_cap(CAP), "as text": {**text, "mod_args": {"cap": np.float32(CAP)}}},
        capped,
        score=lambda s, b, h, i, j: CAP * np.tanh(s / CAP),
        slope=lambda s, y: 1 - (y / CAP) ** 2,
    )
    yield Case(
        "relative bias by a table",
        {"relative_bias": relative_bias(table, n)},
        relative,
        score=lambda s, b, h, i, j: s + arrays.table[h, j - i + n - 1],
    )
    yield Case(
        "window 512, causal",
        {"window": {"window": (WINDOW, 0)}},
        flex_mask=window,
        mask=lambda i, j: (i >= j) & (i - j <= WINDOW),
    )
    of_documents = make_block_mask("document[q_idx] == document[kv_idx]", {"document": ids})
    yield Case(
        "documents of 512",
        {"mask_mod": {"mask_mod": of_documents}},
        flex_mask=documents,
        mask=lambda i, j: i // DOCUMENT == j // DOCUMENT,
    )
    of_prefix = make_block_mask("kv_idx < 256 || q_idx >= kv_idx")
    yield Case(
        "prefix of 256, causal",
        {"mask_mod": {"mask_mod": of_prefix}},
        flex_mask=prefix,
        mask=lambda i, j: (i >= j) | (j < PREFIX),
    )


def _inputs(shape: Sequence[int]) -> list[Any]:
    """Make q, k, v and do as PyTorch's tensors, (batch, heads, n, d)."""
    import torch

    torch.manual_seed(3)
    return [torch.randn(*shape, device=TORCH_DEVICE).to(getattr(torch, DTYPE)) for _ in range(4)]


def _exact(case: Case, q: Any, k: Any, v: Any, do: Any, batch: int, head: int) -> dict[str, np.ndarray]:
    """Compute output and gradients of one head, in float64."""
    q, k, v, do = (a[batch, head].double().cpu().numpy() for a in (q, k, v, do))
    i, j = np.ogrid[: len(q), : len(k)]
    s = q @ k.T * q.shape[1] ** -0.5
    y = case.score(s, batch, head, i, j)
    slope = case.slope(s, y)
    if case.mask:
        y = np.where(case.mask(i, j), y, -np.inf)
    p = np.exp(y - y.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    o, dp = p @ v, do @ v.T
    ds = p * (dp - (do * o).sum(1, keepdims=True)) * slope * q.shape[1] ** -0.5
    return {"o": o, "dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ do}


def _flex(case: Case, q: Any, k: Any, v: Any) -> tuple[Callable[[], Any], Any, Sequence[Any]]:
    """Compile FlexAttention: return its forward without gradients, an output with them, and its leaves."""
    import torch
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # its backward pass runs repeatedly
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    options: dict[str, Any] = {"score_mod": case.flex_mod} if case.flex_mod else {}
    if case.flex_mask:
        rows, keys = q.shape[2], k.shape[2]
        options["block_mask"] = flex.create_block_mask(case.flex_mask, None, None, rows, keys, device=TORCH_DEVICE)
    leaves = [a.detach().requires_grad_() for a in (q, k, v)]
    out = compiled(*leaves, **options)

    def forward() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, **options)

    return forward, out, leaves


def _measured(case: Case, shape: Sequence[int], arrays: Arrays) -> Iterator[dict[str, Any]]:
    """Measure each form of ours, and FlexAttention; forward and backward are two sections."""
    import torch

    q, k, v, do = _inputs(shape)
    there = [a.swapaxes(1, 2) for a in (q, k, v, do)]
    exact = {at: _exact(case, q, k, v, do, *at) for at in SAMPLED}
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, options in case.ours.items():
        o, lse = flash_attention(*there[:3], return_lse=True, **options)
        gradients = flash_attention_backward(there[3], *there[:3], o, lse, **options)
        errors[name] = _errors([a.swapaxes(1, 2) for a in (o, *gradients)], exact)
        forward[name] = functools.partial(flash_attention, *there[:3], **options)
        backward[name] = functools.partial(flash_attention_backward, there[3], *there[:3], o, lse, **options)
    try:
        forward["FlexAttention"], out, leaves = _flex(case, q, k, v)
        results = forward["FlexAttention"](), *torch.autograd.grad(out, leaves, do, retain_graph=True)
        errors["FlexAttention"] = _errors(results, exact)
        backward["FlexAttention"] = lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
    except Exception as error:
        print(f"FlexAttention, {case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        forward.pop("FlexAttention", None)
    for direction, ways in (("forward", forward), ("backward", backward)):
        ways = {name: way for name, way in ways.items() if max(errors[name].values()) < TOLERANCE}
        for name, figures in compare(ways, ROUNDS, over="FlexAttention").items():
            row = {"case": case.name, "shape": list(shape), "direction": direction, "name": name}
            yield row | figures | {"error": max(errors[name].values())}
    for name, found in errors.items():
        if max(found.values()) >= TOLERANCE:
            print(f"WRONG: {case.name} {shape} {name}: {found}", flush=True)


def _errors(results: Sequence[Any], exact: Mapping[Any, Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Return the largest error of o, dq, dk and dv in the sampled heads, relative to the largest number."""
    return {
        name: max(
            float(np.abs(a[at].float().cpu().numpy() - of[name]).max() / np.abs(of[name]).max())
            for at, of in exact.items()
        )
        for name, a in zip(("o", "dq", "dk", "dv"), results, strict=True)
    }


def _compile_ahead(names: Collection[str]) -> None:
    """Compile FlexAttention's kernels into PyTorch's cache on disk, each case in a separate process."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = (sys.executable, "-m", "helpers.bench.studies.score_mod")
    jobs = [(str(i), name) for i in range(len(SHAPES)) for name in names]
    running = [subprocess.Popen((*command, *job), env=environment, stdout=subprocess.DEVNULL) for job in jobs]
    for process in running:
        process.wait()


def _case(arrays: Arrays, name: str) -> Case:
    return next(case for case in cases(arrays) if case.name == name)


def _part(name: str) -> Iterator[list[dict[str, Any]]]:
    for shape in SHAPES:
        arrays = Arrays(shape[1], shape[2])
        yield list(_measured(_case(arrays, name), shape, arrays))


STUDY = Study(
    "score_mod",
    {name: functools.partial(_part, name) for name in CASES},
    head=lambda: {"device": device_facts(), "how": __doc__},
    prepare=_compile_ahead,
    line=lambda row: _lines([row]),
    key="case",
    needs=("torch",),
)
take = STUDY.take
recorded = records.reader("nvidia-h200-score_mod.json", "nvidia-h100-80gb-hbm3-score_mod.json")


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        speed = ""
        if "speed" in row:
            low, high = speed_range(row)
            speed = f"{row['speed']:.2f} x FlexAttention ({low:.2f} to {high:.2f})"
        what = f"{row['case']:26}d = {row['shape'][3]:<4}{row['direction']:9}{row['name']:15}"
        lines.append(f"{what}{row['ms']:7.3f} ms  {speed}")
    return "\n".join(lines)


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a row a line."""
    return _lines(record["rows"])


if __name__ == "__main__":
    _number, _name = words_of_process("score_mod", 2)
    _shape = SHAPES[int(_number)]
    *_qkv, _do = _inputs(_shape)
    _forward, _out, _leaves = _flex(_case(Arrays(_shape[1], _shape[2]), _name), *_qkv)
    _forward()
    _out.backward(_do)
    print(describe())

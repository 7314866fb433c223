"""Time the gradients of a bias on a GPU, compared with the gradients of q, k and v, and with PyTorch's SDPA.

    python3 -m helpers.bench.study bias_gradient FILE

bfloat16, 4 x 16 heads. Device time, in turns, with a full queue. SDPA takes a bias as its mask: its memory-efficient
backend computes dQ, dK and dV together with dBias. For slopes and a table, autograd then sums the mask's gradient,
which counts towards SDPA's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from helpers.attention import calls, flash_attention, flash_attention_backward
from helpers.attention.ladder.call import BackwardOptions
from helpers.attention.ladder.extras import extra_inputs
from helpers.attention.ladder.score_mod import parse_score_mod
from helpers.attention.score_mods import relative_bias
from helpers.bench import records
from helpers.bench.harness import Study, compare
from helpers.bench.peers import TORCH_DEVICE
from helpers.bench.run import device_facts

recorded = records.reader("nvidia-h200-bias_gradient.json")
SHAPES = ((4, 16, 4096, 128), (4, 16, 4096, 64), (4, 16, 1024, 128), (4, 16, 1024, 64))
# A gradient: its use, and an array's axes (batch, heads, rows, keys) of full length.
FORMS: Mapping[str, tuple[str, str]] = {
    "(1, heads, N, N)": ("bias", "hnn"),
    "(1, 1, N, N)": ("bias", "nn"),
    "(batch, 1, 1, N)": ("bias", "bk"),
    "ALiBi slopes": ("alibi_slopes", "h"),
    "table of distances": ("table", "t"),
}
BACKENDS = {"SDPA efficient": "EFFICIENT_ATTENTION"}
OURS, WITHOUT, PLAIN = "gradient of the bias", "dQ, dK, dV", "dQ, dK, dV without a bias"
DTYPE = "bfloat16"
ROUNDS = 5
NEAR = 0.03  # relative to the largest number, between ours and SDPA's in bfloat16


def _bias_shape(axes: str, shape: Sequence[int]) -> tuple[int, ...]:
    batch, heads, n, _ = shape
    return {
        "hnn": (1, heads, n, n),
        "nn": (1, 1, n, n),
        "bk": (batch, 1, 1, n),
        "h": (heads,),
        "t": (heads, 2 * n - 1),
    }[axes]


def _extras(wrt: str, leaf: Any) -> dict[str, Any]:
    return relative_bias(leaf) if wrt == "table" else {wrt: leaf}


def _ours(wrt: str, leaf: Any, q: Any, k: Any, v: Any, do: Any) -> dict[str, Callable[[], Any]]:
    """Return our ways: the gradient alone, dq, dk and dv of the same call, and those of a call without a bias."""
    extras = _extras(wrt, leaf)
    forward = {name: value for name, value in extras.items() if name != "score_mod_grad"}
    o, lse = flash_attention(q, k, v, return_lse=True, **forward)
    mod, of_mod = parse_score_mod(
        *(extras.get(name) for name in ("score_mod", "mask_mod", "mod_args", "score_mod_grad")), backward=True
    )
    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, **of_mod}
    if wrt != "table":
        given |= extra_inputs(leaf if wrt == "bias" else None, leaf if wrt == "alibi_slopes" else None)
    alone = calls.gradients_of_extras(calls.Attention(given, BackwardOptions(mod=mod)), [wrt])
    plain_o, plain_lse = flash_attention(q, k, v, return_lse=True)
    return {
        OURS: alone,
        WITHOUT: functools.partial(flash_attention_backward, do, q, k, v, o, lse, **extras),
        PLAIN: functools.partial(flash_attention_backward, do, q, k, v, plain_o, plain_lse),
    }


def _sdpa(wrt: str, leaf: Any, q: Any, k: Any, v: Any, do: Any, backend: str) -> Callable[[], Any]:
    """Return a function that computes dq, dk, dv and the leaf's gradient with PyTorch's autograd, after a forward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    *qkv, do = (a.transpose(1, 2) for a in (q, k, v, do))
    qkv = [a.detach().requires_grad_() for a in qkv]
    leaf = leaf.detach().requires_grad_()
    (batch, heads, n, _), i = qkv[0].shape, torch.arange(q.shape[1], device=q.device)
    distance = i - i[:, None]
    mask = leaf
    if wrt == "alibi_slopes":
        mask = (-leaf[:, None, None] * distance.abs())[None]
    if wrt == "table":
        mask = leaf[:, distance + n - 1][None]
    mask = mask.to(q.dtype).expand(batch, heads, n, n)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        o = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=mask)
    return lambda: torch.autograd.grad(o, (*qkv, leaf), do, retain_graph=True)


def _measured(shape: Sequence[int], form: str, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    import torch

    (batch, heads, n, d), (wrt, axes) = shape, FORMS[form]
    torch.manual_seed(n + d)
    q, k, v, do = (torch.randn(batch, n, heads, d, device=TORCH_DEVICE, dtype=getattr(torch, DTYPE)) for _ in range(4))
    leaf = torch.randn(_bias_shape(axes, shape), device=TORCH_DEVICE)
    leaf = leaf.abs() / n if wrt == "alibi_slopes" else leaf if wrt == "table" else leaf.to(q.dtype)
    ways = _ours(wrt, leaf, q, k, v, do)
    (got,) = ways[OURS]()
    for name, backend in BACKENDS.items():
        try:
            way = _sdpa(wrt, leaf, q, k, v, do, backend)
            want = way()[3]
        except RuntimeError as error:  # out of memory, or not supported
            print(f"{name}, {shape}, {form}: {str(error)[:160]}", flush=True)
            continue
        error, largest = float((got.float() - want.float()).abs().max()), float(want.float().abs().max())
        assert error <= NEAR * largest, f"{shape}, {form}: {name} differs by {error:.2e} of {largest:.2e}"
        ways[name] = way
    what = {"shape": list(shape), "form": form}
    return [{"name": name, **what, **figures} for name, figures in compare(ways, rounds, of=WITHOUT).items()]


def rows(shapes: Sequence[Sequence[int]] = SHAPES) -> Iterator[list[dict[str, Any]]]:
    """Time all ways in turns, case by case. AssertionError if our gradient differs from SDPA's."""
    for shape in shapes:
        for form in FORMS:
            yield _measured(shape, form)


STUDY = Study(
    "bias_gradient",
    {"rows": rows},
    lambda: {"device": device_facts(), "rounds": ROUNDS},
    line=lambda row: f"{row['shape']} {row['form']:20}{row['name']:28}{row['ms']:8.3f} ms",
    needs=("torch",),
)
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a gradient a line: its time relative to dQ, dK and dV's, and SDPA's for all four."""
    lines = [f"{'bfloat16, 4 x 16 heads':38}{'dBias':>9}{'dQ, dK, dV':>13}{'ratio':>8}{'SDPA, all four':>18}"]
    cases: dict[Any, dict[str, Any]] = {}
    for row in record["rows"]:
        cases.setdefault((*row["shape"], row["form"]), {})[row["name"]] = row
    for (_, _, n, d, form), own in cases.items():
        ours, others, sdpa = (own[name]["ms"] if name in own else None for name in (OURS, WITHOUT, *BACKENDS))
        line = f"{f'd = {d}, N = {n}':19}{form:19}{ours:6.2f} ms{others:10.2f} ms{ours / others:7.2f}×"
        lines.append(line + (f"{sdpa:15.2f} ms" if sdpa else ""))
    return "\n".join(lines)

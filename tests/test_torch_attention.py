"""helpers.torch_attention: values and gradients against PyTorch's own in float64, torch's contracts, and wrong use.

Without PyTorch these are skipped. Without a GPU the tensors are on the CPU, and the kernels run on the CPU engine;
tests of what only a GPU has (streams, graphs, its allocator) are skipped with a reason.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from refused import check_refused

from helpers.attention import calls, check, decoding, forget, kernel, make_block_mask
from helpers.attention.ladder import LADDER, kinds, limits
from helpers.attention.ladder.layout import address
from helpers.attention.score_mods import soft_cap
from helpers.device import ON_GPU, cp

torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")

from torch.autograd import forward_ad  # noqa: E402 (after the skip)
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from helpers import torch_attention as ours  # noqa: E402
from helpers import torch_autograd, torch_tensors  # noqa: E402

HAS_CUDA = ON_GPU and torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU that CuPy and PyTorch both see")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = "dq", "dk", "dv"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


def tensors(
    *shapes: tuple[int, ...], dtype: str = "float32", where: str = "cpu", seed: int = 0, grad: bool = False
) -> list[Any]:
    """Draw normal numbers with a non-zero mean, the same on every device."""
    rng = np.random.default_rng([seed, *itertools.chain(*shapes)])
    made = [torch.from_numpy(rng.standard_normal(s, dtype=np.float32) + np.float32(0.25)) for s in shapes]
    return [a.to(where, DTYPES[dtype]).requires_grad_(grad) for a in made]


# ---- what is expected


def visible(
    rows: int, keys: int, causal: bool = False, window: tuple[int, int] | None = None, top: bool = False
) -> Any:
    """Return a mask (rows, keys) of bool, aligned at the bottom right or at the top."""
    left, right = window or (-1, -1)
    right = 0 if causal else right
    i = torch.arange(rows)[:, None] + (0 if top else keys - rows)
    j = torch.arange(keys)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= (j >= i - left) | torch.tensor(left < 0)
    return seen & ((j <= i + right) | torch.tensor(right < 0))


def repeated(k: Any, heads: int) -> Any:
    return k.repeat_interleave(heads // k.shape[-3], -3)


def by_math(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Call PyTorch's math backend, with the options of its scaled_dot_product_attention."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def torchs_own(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None) -> Any:
    """Call PyTorch's math backend, (…, heads, rows, head_dim)."""
    k, v = repeated(k, q.shape[-3]), repeated(v, q.shape[-3])
    return by_math(q, k, v, attn_mask=seen.to(q.device), scale=scale)


def formula(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None) -> Any:
    """Compute the formula step by step in the tensors' own type, like models' eager attention."""
    k, v = repeated(k, q.shape[-3]), repeated(v, q.shape[-3])
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = torch.softmax(s.masked_fill(~seen.to(q.device), -torch.inf), -1, dtype=torch.float32)
    return p.nan_to_num(0).to(q.dtype) @ v


def compare(name: str, got: Any, want: Any, near: Any) -> None:
    """Check float32 to 1e-5 (of the largest gradient); half types to twice the eager formula's error, or one step.

    The step is a unit in the last place of the largest number; dq and dk are differences, which may cancel.
    """
    largest = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
    tolerance = check.TOLERANCE * largest
    if got.dtype in (torch.float16, torch.bfloat16):
        error = float((near.detach().double() - want.detach().double()).abs().max()) if want.numel() else 0.0
        tolerance = max(2 * error, torch.finfo(got.dtype).eps * largest)
    got, want = (a.detach().cpu().double().numpy() for a in (got, want))
    assert got.shape == want.shape
    if want.size:
        check.check(name, got, want, tolerance=tolerance)


def heads_first(call: Callable[..., Any], *arrays: Any) -> Any:
    """Convert the result of a call with heads before rows to heads after rows."""
    return call(*(a.transpose(-3, -2) for a in arrays)).transpose(-3, -2)


def beside(
    name: str, call: Callable[..., Any], given: list[Any], own: Callable[..., Any], near: Any = None, do: Any = None
) -> Any:
    """Compare the output and gradients of a call with a definition in float64; return the output.

    near: the definition in the tensors' own type, if it differs. do: the gradient of the output.
    """
    leaves = [a.detach().requires_grad_() for a in given]
    o = call(*leaves)
    if do is None:
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    results = [(o, *torch.autograd.grad(o, leaves, do))]
    for dtype, by in ((torch.float64, own), (given[0].dtype, near or own)):
        theirs = [a.detach().to(dtype).requires_grad_() for a in given]
        out = by(*theirs)
        results.append((out, *torch.autograd.grad(out, theirs, do.to(dtype))))
    for what, *three in zip(("o", *NAMES), *results, strict=True):
        compare(f"{name}: {what}", *three)
    return o


def check_call(name: str, call: Callable[..., Any], given: list[Any], seen: Any, scale: float | None = None) -> Any:
    """Check the output and gradients of a call whose tensors have heads after rows. Returns the output."""
    by = (functools.partial(of_heads, seen=seen, scale=scale) for of_heads in (torchs_own, formula))
    return beside(name, call, given, *(functools.partial(heads_first, definition) for definition in by))


def of_sequences(lengths: tuple[tuple[int, ...], ...], one: Callable[..., Any]) -> Callable[..., Any]:
    """Return the definition for packed sequences: `one` applied to each sequence's number, q, k and v."""
    of_q, of_k = map(list, lengths)

    def own(*qkv: Any) -> Any:
        parts = (a.split(side) for a, side in zip(qkv, (of_q, of_k, of_k), strict=True))
        return torch.cat([one(i, *cut) for i, cut in enumerate(zip(*parts, strict=True))])

    return own


def ends_of(lengths: tuple[tuple[int, ...], ...], where: str) -> list[Any]:
    """Return cu_seqlens of q and of k."""
    return [torch.tensor([0, *np.cumsum(side)], dtype=torch.int32, device=where) for side in lengths]


MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (9, 4)}, {"window": (-1, 3)})


@pytest.mark.exhaustive(each_value=("where",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", [(65, 70), (70, 33)], ids=str)
def test_values_and_gradients(where: str, dtype: str, mask: dict[str, Any], shape: tuple[int, int]) -> None:
    rows, keys = shape
    given = tensors((2, rows, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64), dtype=dtype, where=where)
    o = check_call(dtype, lambda q, k, v: ours.flash_attention(q, k, v, **mask), given, visible(rows, keys, **mask))
    assert o.dtype == given[0].dtype and o.device == given[0].device and o.is_contiguous()


@pytest.mark.exhaustive(each_value=("where",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
@pytest.mark.parametrize("told", [False, True])
def test_packed(where: str, dtype: str, mask: dict[str, Any], told: bool) -> None:
    lengths = ((3, 40, 1, 0, 21), (5, 55, 0, 7, 3))
    cu = ends_of(lengths, where)
    given = tensors((65, 4, 64), (70, 2, 64), (70, 2, 64), dtype=dtype, where=where)
    most = {"max_seqlen_q": 40, "max_seqlen_k": 55} if told else {}
    seen = torch.zeros(65, 70, dtype=torch.bool)
    for i, (rows, keys) in enumerate(zip(*lengths, strict=True)):
        seen[cu[0][i] : cu[0][i + 1], cu[1][i] : cu[1][i + 1]] = visible(rows, keys, **mask)
    check_call(dtype, lambda *a: ours.flash_attention_varlen(*a, *cu, **mask, **most), given, seen)


@pytest.mark.parametrize("scale", [0.3, 1, -0.1])
def test_scale(where: str, scale: float) -> None:
    given = tensors((1, 33, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), where=where)
    seen = visible(33, 40)
    call = lambda *a: ours.flash_attention(*a, softmax_scale=scale)  # noqa: E731 (one of several calls of a table)
    if abs(scale) == 1:  # logits of 8 sigma: the rounding of one logit in float32 decides
        given = [0.3 * a for a in given]
    check_call("scale", call, given, seen, scale=scale)


# ---- a bias, ALiBi, the rotary embedding, lse


def tables(rotary_dim: int, where: str, positions: int = 64) -> dict[str, Any]:
    angle = torch.outer(torch.arange(positions), 100.0 ** -torch.linspace(0, 1, rotary_dim // 2)).to(where)
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}


def turned(a: Any, at: Any, rotary_cos: Any, rotary_sin: Any, interleaved: bool) -> Any:
    """Rotate by definition, with complex numbers: (..., rows, heads, head_dim), at: (..., rows)."""
    half = rotary_cos.shape[1]
    order = torch.arange(2 * half) if interleaved else torch.arange(2 * half).view(2, half).T.flatten()
    pairs = torch.view_as_complex(a[..., order].double().unflatten(-1, (half, 2)).contiguous())
    by = torch.complex(rotary_cos.double(), rotary_sin.double())[at.long()][..., None, :]
    both = torch.view_as_real(pairs * by).flatten(-2)[..., order.argsort()]
    return torch.cat([both.to(a.dtype), a[..., 2 * half :]], -1)


EXTRAS: dict[str, Callable[[str], dict[str, Any]]] = {
    "bias": lambda where: {"bias": torch.linspace(-1, 1, 33 * 40, device=where).view(33, 40)},
    "ALiBi": lambda where: {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], device=where), "causal": True},
    "rotary": lambda where: {**tables(32, where), "rotary_interleaved": True, "window": (9, 2)},
    "positions": lambda where: {
        **tables(64, where),
        "rotary_positions": tuple(torch.arange(n, device=where, dtype=torch.int32) for n in (33, 40)),
    },
    "lse alone": lambda where: {},
}


@pytest.mark.parametrize("case", EXTRAS)
def test_takes_what_attention_takes(where: str, case: str) -> None:
    """The same bits as helpers.attention's, without gradients."""
    options = EXTRAS[case](where) | {"return_lse": True}
    given = tensors((2, 33, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), where=where)

    def to_array(a: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(map(to_array, a))
        return a.cpu().numpy() if isinstance(a, torch.Tensor) else a

    arrays = {name: to_array(a) for name, a in options.items()}
    want = calls.flash_attention(*(a.cpu().numpy() for a in given), **arrays)
    for a, b in zip(ours.flash_attention(*given, **options), want, strict=True):
        assert a.device == given[0].device and np.array_equal(a.cpu().numpy(), b)
    plain = ours.flash_attention(*given, **{name: a for name, a in options.items() if name != "return_lse"})
    assert np.array_equal(plain.cpu().numpy(), want[0])


def scored(q: Any, k: Any, v: Any, seen: Any, score: Callable[[Any], Any], sinks: Any) -> Any:
    """Compute the definition with a function of the scaled scores, then the mask, then a sink per head; heads first."""
    s = score(q @ repeated(k, q.shape[-3]).transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[:, None, None].expand(*s.shape[:-1], 1)], -1)
    p = torch.softmax(s.float() if s.dtype != torch.float64 else s, -1)[..., : k.shape[-2]].nan_to_num(0)
    return p.to(q.dtype) @ repeated(v, q.shape[-3])


def capped(s: Any) -> Any:
    return torch.tanh(s / 0.5) * 0.5


def same_document(where: str) -> tuple[Any, Any]:
    """Return documents of several lengths, (2, 40) int32, and which pairs of 33 rows and 40 keys are in one of them."""
    at = torch.arange(40, dtype=torch.int32, device=where)
    documents = torch.stack([(at > 9).int() + (at > 26).int(), (at > 35).int()])
    return documents, (documents[:, 7:, None] == documents[:, None])[:, None]


SAME = "document[batch * kv_len + q_idx] == document[batch * kv_len + kv_idx]"


def functions_of(case: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a call's options, and their meaning for `scored`."""
    documents, same = same_document(where)
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0], device=where)
    bias = torch.linspace(-1, 1, 33 * 40, device=where).view(33, 40)
    means = {"seen": torch.ones(33, 40, dtype=torch.bool, device=where), "score": lambda s: s, "sinks": None}
    by_ids = {"mask_mod": SAME, "mod_args": {"document": documents}}
    if case == "soft cap":
        return soft_cap(0.5), means | {"score": capped}
    if case == "documents":
        return by_ids, means | {"seen": same}
    if case == "a block mask":
        return {"mask_mod": make_block_mask(**by_ids), "mod_args": {"document": documents}}, means | {"seen": same}
    if case == "sinks":
        return {"sinks": sinks}, means | {"sinks": sinks}
    if case == "ALiBi":
        distance = (torch.arange(33, device=where)[:, None] + 7 - torch.arange(40, device=where)).abs()
        slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], device=where)
        return {"alibi_slopes": slopes}, means | {"score": lambda s: s - (slopes[:, None, None] * distance).to(s)}
    if case == "a bias":
        return {"bias": bias}, means | {"score": lambda s: s + bias.to(s)}
    if case == "a mask":
        return {"bias": bias > 0.3}, means | {"seen": bias > 0.3}  # most rows see nothing
    cap = soft_cap(0.5)
    options = {**cap, **by_ids, "mod_args": cap["mod_args"] | by_ids["mod_args"], "sinks": sinks, "causal": True}
    seen = same & visible(33, 40, causal=True).to(where)
    return options, {"seen": seen, "score": capped, "sinks": sinks}


CASES = "soft cap", "documents", "a block mask", "sinks", "ALiBi", "a bias", "a mask", "all at once"


@pytest.mark.exhaustive(each_value=("where",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_functions_of_scores(where: str, dtype: str, case: str) -> None:
    """Values and gradients against the definition in float64, which autograd differentiates."""
    options, means = functions_of(case, where)
    given = tensors((2, 33, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), dtype=dtype, where=where)
    call = functools.partial(ours.flash_attention, **options)
    o = beside(case, call, given, functools.partial(heads_first, functools.partial(scored, **means)))
    assert torch.equal(call(*given), o)  # the path of a call without gradients


def test_functions_of_scores_of_packed_sequences(where: str) -> None:
    """They equal those of each sequence alone: indices start at 0 in each, and batch is its number."""
    lengths = ((3, 40, 1), (5, 55, 7))
    given = tensors((44, 4, 64), (67, 2, 64), (67, 2, 64), where=where)
    hidden = torch.tensor([1, 3, 0], dtype=torch.int32, device=where)
    cap, sinks = soft_cap(0.5), torch.tensor([1.0, -2.0, 0.0, 3.0], device=where)
    options = {**cap, "mask_mod": "kv_idx != hidden[batch]", "mod_args": cap["mod_args"] | {"hidden": hidden}}

    def one(i: int, *qkv: Any) -> Any:
        seen = torch.arange(lengths[1][i], device=where) != hidden[i]
        return heads_first(lambda *a: scored(*a, seen[None], capped, sinks), *qkv)

    call = functools.partial(ours.flash_attention_varlen, **options, sinks=sinks)
    beside("packed", lambda *a: call(*a, *ends_of(lengths, where)), given, of_sequences(lengths, one))


def test_what_changed_before_the_backward(where: str) -> None:
    """Another array in the caller's dict has no effect; other numbers in the array are an error from autograd."""
    options, _ = functions_of("documents", where)
    given = tensors((2, 33, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), where=where, grad=True)
    o = ours.flash_attention(*given, **options)
    documents = options["mod_args"].pop("document")
    o.sum().backward(retain_graph=True)
    documents.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.exhaustive(each_value=("where",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 64])
@pytest.mark.parametrize("told", [False, True])
def test_gradients_through_the_rotary_embedding(
    where: str, dtype: str, interleaved: bool, rotary_dim: int, told: bool
) -> None:
    """Against the definition in float64; the output equals that of the kernel that rotates itself."""
    given = tensors((2, 33, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), dtype=dtype, where=where)
    angles = tables(rotary_dim, where)
    at = torch.arange(33) + 7, torch.arange(40)
    options = {**angles, "rotary_interleaved": interleaved, "causal": True}
    if told:
        generator = torch.Generator().manual_seed(3)
        at = tuple(torch.randint(0, 64, (2, n), generator=generator, dtype=torch.int32) for n in (33, 40))
        options["rotary_positions"] = tuple(a.to(where) for a in at)

    def definition(by: Callable[..., Any], *qkv: Any) -> Any:
        q, k = (turned(a, rows.to(where), **angles, interleaved=interleaved) for a, rows in zip(qkv, at, strict=False))
        return heads_first(lambda *a: by(*a, visible(33, 40, causal=True)), q, k, qkv[2])

    own, near = (functools.partial(definition, by) for by in (torchs_own, formula))

    def call(*leaves: Any) -> Any:
        o, lse = ours.flash_attention(*leaves, **options, return_lse=True)
        assert not lse.requires_grad and type(o.grad_fn).__name__ == "AttentionBackward"
        return o

    beside("rotary", call, given, own, near)
    by_kernel = ours.flash_attention(*given, **options)
    compare("by a kernel", by_kernel, own(*(a.double() for a in given)), near(*given))


@pytest.mark.parametrize("told", [False, True])
def test_gradients_through_the_rotary_embedding_of_packed_sequences(where: str, told: bool) -> None:
    """Each sequence alone, and the kernel that rotates, give the same."""
    lengths = ((3, 40, 1, 0, 21), (5, 55, 4, 7, 21))
    given = tensors((65, 4, 64), (92, 2, 64), (92, 2, 64), where=where)
    angles = tables(64, where)
    positions = [torch.arange(len(a), dtype=torch.int32, device=where) % 50 for a in given[:2]]

    def one(i: int, q: Any, k: Any, v: Any) -> Any:
        rows, keys = len(q), len(k)
        at = [torch.arange(rows) + keys - rows, torch.arange(keys)]
        if told:
            at = [a[sum(side[:i]) :][: side[i]] for a, side in zip(positions, lengths, strict=True)]
        q, k = (turned(a, each.to(where), **angles, interleaved=False) for a, each in zip((q, k), at, strict=True))
        return heads_first(lambda *a: torchs_own(*a, visible(rows, keys, causal=True)), q, k, v)

    more = {"rotary_positions": tuple(positions)} if told else {}
    call = functools.partial(ours.flash_attention_varlen, **angles, causal=True, **more)
    o = beside("packed", lambda *a: call(*a, *ends_of(lengths, where)), given, of_sequences(lengths, one))
    compare("by a kernel", call(*given, *ends_of(lengths, where)), o, o)


def test_gradients_of_the_tables(where: str) -> None:
    """Learned cos and sin get gradients too."""
    q, k, v = tensors((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16), where=where)
    angles = {name: a.requires_grad_() for name, a in tables(16, where, positions=9).items()}
    got = torch.autograd.grad(ours.flash_attention(q, k, v, **angles).square().sum(), [*angles.values()])
    at = torch.arange(9, device=where)
    turned_ones = (turned(a.double(), at, *angles.values(), interleaved=False).transpose(1, 2) for a in (q, k))
    want = torchs_own(*turned_ones, v.double().transpose(1, 2), visible(9, 9)).square().sum()
    for name, a, b in zip(angles, got, torch.autograd.grad(want, [*angles.values()]), strict=True):
        compare(name, a, b, b)


# ---- torch.nn.functional.scaled_dot_product_attention

LEADING = {
    "four axes": ((2, 3), (2, 3), {}),
    "three axes": ((3,), (3,), {}),
    "two axes": ((), (), {}),
    "five axes": ((2, 2, 3), (2, 2, 3), {}),
    "a batch of one": ((2, 3), (1, 3), {}),
    "a head of one": ((2, 3), (2, 1), {}),
    "q of one": ((1, 1), (2, 3), {}),
    "fewer axes": ((2, 3), (3,), {}),
    "more axes": ((2, 3), (2, 2, 3), {}),
    "grouped": ((2, 4), (2, 2), {"enable_gqa": True}),
    "grouped, a batch of one": ((2, 4), (1, 2), {"enable_gqa": True}),
    "grouped, three axes": ((4,), (1,), {"enable_gqa": True}),
    "grouped, not needed": ((2, 3), (2, 3), {"enable_gqa": True}),
}


SHAPES = (33, 40), (40, 33), (1, 40), (40, 1), (33, 33)


@pytest.mark.exhaustive(each_value=("where",))
@pytest.mark.parametrize(("lead", "shape"), [*zip(LEADING, itertools.cycle(SHAPES))], ids=str)
def test_sdpa_has_torchs_shapes_and_alignment(where: str, lead: str, shape: tuple[int, int]) -> None:
    """is_causal is top-left: with more keys than rows no row sees the last keys, with fewer the last rows see all."""
    of_q, of_k, options = LEADING[lead]
    rows, keys = shape
    given = tensors((*of_q, rows, 64), (*of_k, keys, 64), (*of_k, keys, 64), where=where)
    for more in ({"is_causal": True}, {"scale": 0.05}):
        calls_ = (functools.partial(by, **options, **more) for by in (ours.scaled_dot_product_attention, by_math))
        beside(str(more), next(calls_), given, next(calls_))


@pytest.mark.exhaustive(each_value=("where",))
@pytest.mark.parametrize(("lead", "kind"), [*zip(LEADING, itertools.cycle(("of query's type", "bool")))], ids=str)
def test_sdpa_takes_a_mask(where: str, lead: str, kind: str) -> None:
    """Each form that broadcasts, with gradients, against PyTorch's in float64; rows that see nothing are 0 in both."""
    of_q, of_k, options = LEADING[lead]
    given = tensors((*of_q, 33, 64), (*of_k, 40, 64), (*of_k, 40, 64), where=where)
    lengths = torch.nn.functional.scaled_dot_product_attention(*given, **options).shape[:-2]
    generator = torch.Generator().manual_seed(2)
    shapes = (33, 40), (1, 40), (33, 1), (40,), (*(1,) * len(lengths), 33, 40)
    turn = list(LEADING).index(lead) % len(shapes)
    for shape in ((*lengths, 33, 40), shapes[turn], shapes[turn - 2]):
        mask = torch.randn(shape, generator=generator)
        mask = (mask < 0.5 if kind == "bool" else mask).to(given[0].device)

        def masked(by: Callable[..., Any], *qkv: Any, mask: Any = mask) -> Any:
            return by(*qkv, attn_mask=mask if kind == "bool" else mask.to(qkv[0]), **options)

        how = (functools.partial(masked, by) for by in (ours.scaled_dot_product_attention, by_math))
        o = beside(str(shape), next(how), given, next(how))
        assert o.dtype == given[0].dtype


def test_a_mask_in_a_half_type(where: str) -> None:
    given = [a.bfloat16() for a in tensors((2, 3, 33, 64), (2, 3, 40, 64), (2, 3, 40, 64), where=where)]
    mask = torch.randn((33, 40), generator=torch.Generator().manual_seed(2)).to(given[0])
    o = ours.scaled_dot_product_attention(*given, attn_mask=mask, scale=0.1)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(a.double() for a in given), attn_mask=mask.double(), scale=0.1
    )
    assert o.dtype == torch.bfloat16 and (o.double() - want).abs().max() < 0.02


FALLBACKS: dict[str, tuple[Callable[..., Any], str]] = {
    "dropout": (lambda call, q, k, v: call(q, k, v, dropout_p=1.0), "these kernels have no dropout"),
    "a wider value": (
        lambda call, q, k, v: call(q, k, torch.cat([v, v], -1), is_causal=True),
        "these kernels take one head_dim for all three",
    ),
    "float64": (lambda call, q, k, v: call(q.double(), k.double(), v.double(), scale=0.3), "q is float64"),
    "a large head_dim": (
        lambda call, q, k, v: call(*(a.repeat(1, 1, 1, 20) for a in (q, k, v))),
        "head_dim = 320; this stage takes 1 to 256",
    ),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_sdpa_falls_back_to_torchs(where: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning that gives the reason, also for shapes that differ; without fallback it is an error."""
    monkeypatch.setattr(ours, "_WARNED", set())
    call, why = FALLBACKS[case]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in (9, 9, 12):
            q, k, v = tensors((2, 3, rows, 16), (2, 3, 9, 16), (2, 3, 9, 16), where=where)
            o = call(functools.partial(ours.scaled_dot_product_attention, fallback=True), q, k, v)
            want = call(torch.nn.functional.scaled_dot_product_attention, q, k, v)
            torch.testing.assert_close(o, want, rtol=0, atol=0, equal_nan=True)  # on a GPU dropout of everything is NaN
            assert o.requires_grad == want.requires_grad
    (told,) = [str(w.message) for w in seen]
    assert "PyTorch computes this attention" in told and why in told and seen[0].filename == __file__
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=re.escape(why)):
        call(ours.scaled_dot_product_attention, q, k, v)


def test_no_fallback_where_the_kernels_can(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("PyTorch's was called")

    given = tensors((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), where=where)
    want = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", never)
    compare("o", ours.scaled_dot_product_attention(*given, is_causal=True, fallback=True), want, want)


def test_the_fallback_is_traced(where: str) -> None:
    q, k, v = tensors((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), where=where)

    def call(q: Any, k: Any, v: Any) -> Any:
        return ours.scaled_dot_product_attention(2 * q, k, torch.cat([v, v], -1), fallback=True)

    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v))


def test_gradients_that_no_stage_has_are_refused_before_the_backward(where: str) -> None:
    """On a Turing GPU half types have an output but no gradients."""

    def call(head_dim: int) -> Any:
        given = tensors(*[(2, 3, 9, head_dim)] * 3, dtype="float16", where=where, grad=True)
        return ours.scaled_dot_product_attention(*given)

    turing = limits.Limits(shared=64 * 1024, multiprocessors=40, compute_capability=75)
    refused = "no stage has these gradients: backward: .*; backward_mma: it needs compute capability 8.0"
    with limits.pretend_gpu(turing), pytest.raises(ValueError, match=refused):
        call(24)  # a length that no other test uses: one known to have gradients is not checked again
    call(16).sum().backward()


EMPTY = (((2, 3, 0, 8), (2, 3, 5, 8)), ((2, 3, 5, 8), (2, 3, 0, 8)), ((0, 3, 5, 8), (0, 3, 4, 8)))


@pytest.mark.parametrize("shapes", EMPTY, ids=str)
def test_sdpa_of_nothing_is_torchs(where: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k, v = tensors(shapes[0], shapes[1], shapes[1], where=where)
    got = ours.scaled_dot_product_attention(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert got.shape == want.shape and torch.equal(got, want)


A = torch.zeros
CU = torch.tensor([0, 3, 9], dtype=torch.int32)
NOT_FOR_TORCH: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one axis": ((A(8), A(8), A(8)), {}),
    "head_dim": ((A(2, 3, 5, 8), A(2, 3, 6, 16), A(2, 3, 6, 16)), {}),
    "keys without values": ((A(2, 3, 5, 8), A(2, 3, 6, 8), A(2, 3, 7, 8)), {}),
    "heads": ((A(2, 4, 5, 8), A(2, 2, 6, 8), A(2, 2, 6, 8)), {}),
    "heads that do not divide": ((A(2, 3, 5, 8), A(2, 2, 6, 8), A(2, 2, 6, 8)), {"enable_gqa": True}),
    "batches": ((A(3, 4, 5, 8), A(2, 4, 6, 8), A(2, 4, 6, 8)), {}),
    "two dtypes": ((A(2, 3, 5, 8), A(2, 3, 6, 8), A(2, 3, 6, 8, dtype=torch.float16)), {}),
}


@pytest.mark.parametrize("case", NOT_FOR_TORCH)
def test_what_torch_refuses_is_torchs_error(case: str) -> None:
    given, options = NOT_FOR_TORCH[case]
    with pytest.raises(RuntimeError) as theirs, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(*(a.to("meta") for a in given), **options)
    with pytest.raises(RuntimeError) as own:
        ours.scaled_dot_product_attention(*given, **options)
    assert type(own.value) is type(theirs.value) and not isinstance(own.value, NotImplementedError)
    assert str(own.value).splitlines()[0] == str(theirs.value).splitlines()[0]


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "gradients of what a function reads": (
        lambda a: ours.flash_attention(
            a, a, a, score_mod="score + t[head]", mod_args={"t": A(5).requires_grad_()}, score_mod_grad="1"
        ),
        TypeError,
        "give mod_args['t'].detach()",
    ),
    "gradients of what a block mask reads": (
        lambda a: ours.flash_attention(
            a, a, a, mask_mod=make_block_mask("t[kv_idx] > 0.0f", {"t": A(3).requires_grad_()})
        ),
        TypeError,
        "give mod_args['t'].detach()",
    ),
    "gradients with a function and no derivative": (
        lambda a: ours.flash_attention(a.requires_grad_(), a, a, score_mod="2.0f * score"),
        ValueError,
        "gradients with a score_mod need score_mod_grad, its derivative by score",
    ),
    "second derivatives with a function": (
        lambda a: torch.autograd.grad(
            ours.flash_attention(a.requires_grad_(), a, a, **soft_cap(2)).sum(), a, create_graph=True
        ),
        NotImplementedError,
        "flash_attention has no second derivatives",
    ),
    "gradients through short tables": (
        lambda a: ours.flash_attention(a.requires_grad_(), a, a, rotary_cos=A(2, 4), rotary_sin=A(2, 4)),
        ValueError,
        "rotary_cos has 2 positions, and k has 3 keys",
    ),
    "gradients at positions in int64": (
        lambda a: ours.flash_attention(
            a.requires_grad_(), a, a, **tables(8, "cpu"), rotary_positions=(torch.arange(3), torch.arange(3))
        ),
        TypeError,
        "rotary_positions[0] is int64; int32 is needed",
    ),
    "gradients with a table of float64": (
        lambda a: ours.flash_attention(a.requires_grad_(), a, a, rotary_cos=A(3, 4).double(), rotary_sin=A(3, 4)),
        TypeError,
        "rotary_cos is float64; float32 is needed",
    ),
    "an option that there is not": (
        lambda a: ours.flash_attention(a, a, a, rotary=A(2, 4)),
        TypeError,
        "unexpected keyword argument 'rotary'",
    ),
    "a mask that is no tensor": (
        lambda a: ours.scaled_dot_product_attention(a, a, a, attn_mask=[[True]]),
        TypeError,
        "attn_mask must be a torch tensor, or None; got list",
    ),
    "dropout": (
        lambda a: ours.scaled_dot_product_attention(a, a, a, dropout_p=0.1),
        NotImplementedError,
        "dropout_p = 0.1: these kernels have no dropout. Set it to 0.0",
    ),
    "a wider value": (
        lambda a: ours.scaled_dot_product_attention(a, a, A(2, 3, 5, 16)),
        NotImplementedError,
        "value (2, 3, 5, 16): these kernels take one head_dim for all three",
    ),
    "float64": (
        lambda a: ours.scaled_dot_product_attention(a.double(), a.double(), a.double()),
        TypeError,
        "q is float64; the stages take bfloat16, float16, float32, e4m3",
    ),
    "a large head_dim": (
        lambda a: ours.flash_attention(A(1, 4, 1, 300), A(1, 4, 1, 300), A(1, 4, 1, 300)),
        ValueError,
        "head_dim = 300; this stage takes 1 to 256",
    ),
    "an array": (
        lambda a: ours.flash_attention(a.numpy(), a, a),
        TypeError,
        "q must be a torch tensor; got ndarray. Arrays: helpers.attention",
    ),
    "a list for sdpa": (
        lambda a: ours.scaled_dot_product_attention(a, [1], a),
        TypeError,
        "key must be a torch tensor; got list",
    ),
    "lengths as a list": (
        lambda a: ours.flash_attention_varlen(a[0], a[0], a[0], [0, 3], [0, 3]),
        TypeError,
        "cu_seqlens_q must be a torch tensor; got list",
    ),
    "lengths in int64": (
        lambda a: ours.flash_attention_varlen(a[0], a[0], a[0], torch.tensor([0, 3]), torch.tensor([0, 3])),
        TypeError,
        "cu_seqlens_q is int64; int32 is needed",
    ),
    "another device": (
        lambda a: ours.flash_attention(a, a.to("meta"), a),
        ValueError,
        "k is on meta and q on cpu: one device for all is needed",
    ),
    "three axes": (lambda a: ours.flash_attention(a[0], a, a), ValueError, "4 axes are needed: (batch, seq, heads"),
    "a window of one": (lambda a: ours.flash_attention(a, a, a, window=(3,)), TypeError, "window must be a pair"),
    "a mask for causal": (lambda a: ours.flash_attention(a, a, a, causal=a), TypeError, "causal must be True or False"),
    "a scale in words": (
        lambda a: ours.flash_attention(a, a, a, softmax_scale="0.1"),
        TypeError,
        "softmax_scale must be a number",
    ),
    "no such stage": (
        lambda a: ours.flash_attention(a, a, a, stage="fast"),
        ValueError,
        "stage='fast' is not in the ladder",
    ),
    "a stage without lse, for gradients": (
        lambda a: ours.flash_attention(a.requires_grad_(), a, a, stage=2),
        ValueError,
        "stage tiled cannot: it has no return_lse=True",
    ),
    "deterministic in words": (
        lambda a: ours.flash_attention(a, a, a, deterministic="yes"),
        TypeError,
        "deterministic must be True or False; got str 'yes'",
    ),
    "one row for run_flash": (lambda a: ours.run_flash(a[0, 0, 0], a, a), ValueError, "Q, K and V must all be (N, d)"),
}


def test_refused() -> None:
    for case, (call, error, message) in REFUSED.items():
        check_refused(case, error, message, functools.partial(call, A(2, 3, 5, 8)))


# ---- gradients: torch's own check, and possible graphs


def test_only_what_requires_grad_gets_one(where: str) -> None:
    q, k, v = tensors((1, 33, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), where=where)
    k.requires_grad_()
    ours.flash_attention(q, k, v, causal=True).sum().backward()  # the gradient of a sum is one number, expanded
    assert q.grad is None and v.grad is None
    wide = [a.detach().double().transpose(1, 2).requires_grad_() for a in (q, k, v)]
    torchs_own(*wide, visible(33, 40, causal=True)).sum().backward()
    compare("dk", k.grad, wide[1].grad.transpose(1, 2), wide[1].grad.transpose(1, 2))


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "heads first": lambda a: a.transpose(1, 2).contiguous().transpose(1, 2),
    "rows with gaps": lambda a: torch.nn.functional.pad(a, (0, 8, 0, 0, 0, 2))[:, : a.shape[1], :, : a.shape[3]],
    "slices of one tensor": lambda a: torch.stack([a, -a, a], 2)[:, :, 2],
    "odd address": lambda a: torch.cat([a.new_zeros(1), a.reshape(-1)])[1:].view(a.shape),
    "every second head": lambda a: a.repeat_interleave(2, 2)[:, :, ::2],
    "every second word": lambda a: a.repeat_interleave(2, 3)[..., ::2],
    "one batch for all": lambda a: a[:1].expand(a.shape),
    "one head for all": lambda a: a[:, :, :1].expand(a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views(where: str, layout: str, dtype: str) -> None:
    """A view is read in place; the gradients of repeated elements are summed."""
    lay = LAYOUTS[layout]
    given = tensors((2, 33, 2, 64), (2, 40, 2, 64), (2, 40, 2, 64), dtype=dtype, where=where)
    do = lay(torch.ones_like(given[0]) * torch.linspace(-1, 1, 64, device=where).to(given[0]))

    def of_views(by: Callable[..., Any], *qkv: Any) -> Any:
        return by(*(lay(a).transpose(1, 2) for a in qkv), visible(33, 40, causal=True)).transpose(1, 2)

    by = (functools.partial(of_views, by) for by in (torchs_own, formula))
    beside(layout, lambda *leaves: ours.flash_attention(*map(lay, leaves), causal=True), given, *by, do=do)


@pytest.mark.skipif(ON_GPU, reason="a CPU tensor is copied to the GPU where there is one")
@pytest.mark.parametrize("layout", ["as it is", *LAYOUTS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_tensors_are_not_copied(layout: str, dtype: str) -> None:
    seen: list[Any] = []
    given = tensors((2, 33, 2, 64), (2, 40, 2, 64), (2, 40, 2, 64), dtype=dtype)
    views = [LAYOUTS.get(layout, lambda a: a)(a) for a in given]
    with kernel.launches_replaced(lambda self, grid, block, args, **_: seen.extend(args[:4])):
        o = ours.flash_attention(*views)
    copied = layout == "every second word" or (dtype == "bfloat16" and layout == "odd address")
    same = [address(a) == b.data_ptr() for a, b in zip(seen, (*views, o), strict=True)]
    assert same == [not copied] * 3 + [True]


def test_checkpointed(where: str) -> None:
    """Results discarded after the forward pass are recomputed for the backward pass."""
    given = tensors((1, 33, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), where=where, grad=True)
    call = lambda *a: ours.flash_attention(*a, causal=True, deterministic=True).square().sum()  # noqa: E731
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, *given, use_reentrant=False), given)
    for a, b in zip(got, torch.autograd.grad(call(*given), given), strict=True):
        assert torch.equal(a, b)


def test_a_layout_with_heads_first_is_read_and_written_as_a_view_of_it_would_be() -> None:
    """Its description, new tensors and copies, for dense memory and for every other column; lse has three axes."""
    kind, plain = kinds.HeadsFirst(torch), kinds.TensorsWithoutGradients(torch)
    dtypes = np.dtype(np.float16), np.dtype(np.float32)
    o, lse = kind.empties([((2, 5, 3, 8), dtypes[0]), ((2, 3, 5), dtypes[1])], torch.zeros(1))
    assert o.shape == (2, 3, 5, 8) and o.transpose(1, 2).is_contiguous() and o.dtype == torch.float16
    assert lse.shape == (2, 3, 5) and lse.is_contiguous()
    channels_last = torch.randn(2, 3, 8, 5).transpose(2, 3)
    others = torch.randn(2, 5, 3, 16)[..., ::2].transpose(1, 2), o.zero_(), lse.zero_(), channels_last
    for a in (torch.randn(2, 3, 5, 8), *others):
        view = a.transpose(1, 2) if a.ndim == 4 else a
        (key,), (of_view,) = kind.cache_keys([a]), plain.cache_keys([view])
        assert kind.spec(key) == plain.spec(of_view)
        for change in ("copy", "negative"):
            got, want = getattr(kind, change)(a), getattr(plain, change)(view)
            assert got.shape == a.shape and kinds.turned(got).stride() == want.stride()
            assert torch.equal(kinds.turned(got), want)
        wide = plain.padded(view, 16)
        assert kinds.turned(kind.padded(a, 16)).stride() == wide.stride() and wide.is_contiguous()
        assert torch.equal(wide, torch.nn.functional.pad(view, (0, 16 - view.shape[-1])))


def test_without_gradients_nothing_is_kept(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    true = torch_autograd.run

    def spy(call: Any, *kind: Any) -> Any:
        asked.append(call.options.return_lse)
        return true(call, *kind)

    monkeypatch.setattr(torch_autograd, "run", spy)
    given = tensors((1, 33, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), where=where, grad=True)
    first = ours.flash_attention(*given)
    with torch.no_grad():
        second = ours.flash_attention(*given)
    with torch.inference_mode():
        third = ours.flash_attention(*given)
    fourth = ours.flash_attention(*(a.detach() for a in given))
    assert asked == [True, False, False, False]
    assert first.grad_fn is not None and not any(o.requires_grad for o in (second, third, fourth))
    for o in (second, third, fourth):
        assert torch.equal(first, o)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plain_calls_are_the_kernels_own(where: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without tracing or casting skip the checks of tensors, with the same results."""
    for rows, keys in ((33, 33), (33, 40), (40, 33)):
        given = tensors((2, rows, 4, 64), (2, keys, 4, 64), (2, keys, 4, 64), dtype=dtype, where=where)
        heads_first = [a.transpose(1, 2) for a in given]
        found = []
        for plain in (False, True):
            monkeypatch.setattr(ours, "is_plain", lambda *_, plain=plain: plain)
            o = ours.flash_attention(*given, window=(5, 3), softmax_scale=0.2)
            twin = ours.scaled_dot_product_attention(*heads_first, is_causal=True)
            found.append((*ours.flash_attention(*given, causal=True, return_lse=True), o, twin))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b) and a.device == b.device == given[0].device and a.stride() == b.stride()


@pytest.mark.skipif(ON_GPU, reason="autograd has a thread of its own there")
def test_a_training_call_passes_few_functions() -> None:
    """Each costs host time at every layer and step. Some convert tensors to arrays, which a GPU does not need."""
    q, k, v = tensors((1, 33, 2, 64), (1, 33, 2, 64), (1, 33, 2, 64), where="cpu", grad=True)
    helpers = ours.__file__.rpartition("/")[0]
    for most, call in (
        (85, lambda: ours.flash_attention(q, k, v, causal=True)),
        (115, lambda: ours.scaled_dot_product_attention(q, k, v, is_causal=True)),
    ):
        do = torch.ones_like(call())
        seen: list[str] = []

        def note(frame: Any, event: str, _: Any, seen: list[str] = seen) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(helpers) and not file.startswith(f"{helpers}/engine"):
                seen.append(frame.f_code.co_name)

        torch.autograd.grad(call(), (q, k, v), do)
        sys.setprofile(note)
        try:
            torch.autograd.grad(call(), (q, k, v), do)
        finally:
            sys.setprofile(None)
        assert "backward" in seen and len(seen) <= most, (len(seen), " ".join(seen))


@on_gpu
def test_what_is_plain() -> None:
    q, k, v = cuda_tensors(grad=False)
    assert torch_autograd.is_plain(q, k, v)
    assert torch_autograd.is_plain(q.detach().requires_grad_(), k, v)
    eight = q.detach().to(torch.float8_e4m3fn)
    assert torch_autograd.is_plain(eight, eight, eight)
    assert not torch_autograd.is_plain(eight.clone().requires_grad_(), eight, eight)
    for other in (torch.nn.Parameter(q), q.double(), q.cpu(), [q]):
        assert not torch_autograd.is_plain(other, k, v) and not torch_autograd.is_plain(q, k, other)
    with torch.autocast("cuda", torch.float16):
        assert not torch_autograd.is_plain(q, k, v)


def test_stages_without_lse(where: str) -> None:
    q, k, v = tensors((1, 33, 2, 64), (1, 40, 2, 64), (1, 40, 2, 64), where=where)
    want = torchs_own(*(a.double().transpose(1, 2) for a in (q, k, v)), visible(33, 40)).transpose(1, 2)
    for stage in (2, "online_softmax"):
        o = ours.flash_attention(q, k, v, stage=stage)
        assert o.is_contiguous()
        compare(str(stage), o, want, want)


WAYS: dict[str, Callable[..., Any]] = {
    "flash_attention": ours.flash_attention,
    "packed": lambda q, k, v: ours.flash_attention_varlen(q[0], k[0], v[0], *of_one_sequence(q, k))[None],
    "scaled_dot_product_attention": lambda *qkv: heads_first(ours.scaled_dot_product_attention, *qkv),
    "falling back": lambda *qkv: heads_first(functools.partial(ours.scaled_dot_product_attention, fallback=True), *qkv),
}
every_way = pytest.mark.parametrize("way", ["flash_attention", "packed", "scaled_dot_product_attention"])
OF_PYTORCH = "torch.nn.functional.scaled_dot_product_attention, within"  # every message refers to it


def of_one_sequence(*arrays: Any) -> list[Any]:
    """Return cu_seqlens of q and k for a batch of one."""
    return [torch.tensor([0, a.shape[1]], dtype=torch.int32, device=a.device) for a in arrays]


def in_torch(q: Any, k: Any, v: Any) -> Any:
    """Call PyTorch's own, which has derivatives of every kind and order."""
    return heads_first(torch.nn.functional.scaled_dot_product_attention, q, k, v)


@pytest.fixture
def in_math() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


def small(where: str, *, grad: bool = False) -> list[Any]:
    return tensors((1, 5, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), where=where, grad=grad)


def test_what_stays_outside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph ends before it and another begins after it; without a graph PyTorch's compiler is not imported."""
    asked: list[Any] = []
    disable = torch.compiler.disable
    monkeypatch.setattr(torch.compiler, "disable", lambda function: asked.append(function) or disable(function))
    apart = torch_tensors.outside_of_graphs(lambda a, *, by: a.sub(3) + by)
    assert apart(torch.ones(2), by=1).tolist() == [-1, -1] and not asked
    graphs: list[list[str]] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append([node.target.__name__ for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    compiled = torch.compile(lambda a: 3 * apart(2 * a, by=1), backend=backend)
    for n in range(3):
        assert compiled(torch.full((2,), n)).tolist() == [6 * n - 6] * 2
    assert graphs == [["mul"], ["mul"]]


@pytest.mark.parametrize(
    ("way", "loss"),
    [("flash_attention", "sum"), ("packed", "mean"), ("scaled_dot_product_attention", "square"), ("packed", "sum")],
)
def test_second_derivatives_are_refused(where: str, way: str, loss: str) -> None:
    """Even if the gradient of the output is constant, because that of the inputs depends on them nevertheless."""
    given = small(where, grad=True)
    o = WAYS[way](*given)
    loss_of = (o.square() if loss == "square" else o).mean() if loss != "sum" else o.sum()
    gradients = torch.autograd.grad(loss_of, given, create_graph=True)
    assert all(a.requires_grad for a in gradients)
    with pytest.raises(NotImplementedError, match="flash_attention has no second derivatives") as error:
        torch.autograd.grad(gradients[0].sum(), given)
    assert OF_PYTORCH in str(error.value)
    want = torch.autograd.grad(in_torch(*given).sum(), given)
    if loss == "sum":
        for name, a, b in zip(NAMES, gradients, want, strict=True):
            compare(name, a, b, b)


def tangent(call: Callable[[Any], Any], a: Any, along: Any) -> Any:
    """Compute the directional derivative by dual numbers."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(a, along))).tangent


OF_FUNC: dict[str, Callable[[Callable[..., Any], Any, Any, Any], Any]] = {
    "dual numbers": lambda call, q, k, v: tangent(lambda x: call(x, k, v), q, torch.ones_like(q)),
    "dual numbers of the values": lambda call, q, k, v: tangent(lambda x: call(q, k, x), v, torch.ones_like(v)),
    "grad": lambda call, q, k, v: torch.func.grad(lambda x: call(x, k, v).square().sum())(q),
    "grad of a parameter": lambda call, q, k, v: torch.func.grad(lambda x: (x * call(q * x, k, v)).sum())(
        q[0, 0, 0, 0]
    ),
    "vjp": lambda call, q, k, v: torch.func.vjp(lambda x: call(q, x, v), k)[1](q)[0],
    "jvp": lambda call, q, k, v: torch.func.jvp(lambda x: call(x, k, v), (q,), (torch.ones_like(q),))[1],
    "vmap": lambda call, q, k, v: torch.func.vmap(lambda x: call(x, k, v))(torch.stack([q, 2 * q])),
    "jacrev": lambda call, q, k, v: torch.func.jacrev(lambda x: call(x, k, v))(q),
    "jacfwd": lambda call, q, k, v: torch.func.jacfwd(lambda x: call(x, k, v))(q),
    "hessian": lambda call, q, k, v: torch.func.hessian(lambda x: call(x, k, v).sum())(q),
}


@every_way
def test_derivatives_that_kernels_lack_are_refused(where: str, way: str) -> None:
    """None of them silently becomes 0, whether or not the inputs require grad."""
    for (kind, call), grad in itertools.product(OF_FUNC.items(), (False, True)):
        for message in ("these kernels have n", OF_PYTORCH):
            given = small(where, grad=grad)
            check_refused(kind, NotImplementedError, message, lambda: call(WAYS[way], *given))  # noqa: B023


@pytest.mark.parametrize("kind", OF_FUNC)
@pytest.mark.usefixtures("in_math")
def test_derivatives_that_kernels_lack_are_torchs(where: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_WARNED", set())
    given = small(where)
    with pytest.warns(UserWarning, match="PyTorch computes this attention"):
        got = OF_FUNC[kind](WAYS["falling back"], *given)
    torch.testing.assert_close(got, OF_FUNC[kind](in_torch, *given))


def test_what_else_carries_a_tangent(where: str) -> None:
    """Kernels also read a bias, slopes, tables and lengths; those without a tangent are accepted, at any level."""
    q, k, v = small(where)
    with forward_ad.dual_level():
        compare("o", ours.flash_attention(q, k, v), in_torch(q, k, v), q)
        for name, a in {
            "bias": torch.zeros(5, 6),
            "alibi_slopes": torch.zeros(2),
            "sinks": torch.zeros(2),
            "rotary_cos": tables(8, where)["rotary_cos"],
        }.items():
            dual = forward_ad.make_dual(a.to(where), torch.ones_like(a, device=where))
            more = tables(8, where) if name == "rotary_cos" else {}
            with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
                ours.flash_attention(q, k, v, **{**more, name: dual})
        a = torch.zeros(6, device=where)
        with pytest.raises(NotImplementedError, match="t has a tangent"):
            dual = forward_ad.make_dual(a, torch.ones_like(a))
            ours.flash_attention(q, k, v, score_mod="score + t[kv_idx]", mod_args={"t": dual})
        dual = forward_ad.make_dual(torch.zeros(5, 6, device=where), torch.ones(5, 6, device=where))
        with pytest.raises(NotImplementedError, match="attn_mask has a tangent"):
            ours.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v)), attn_mask=dual)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.usefixtures("in_math")
def test_a_graph_loses_no_tangent(where: str, fullgraph: bool) -> None:
    q, k, v = small(where)
    for way in ("flash_attention", "falling back"):
        torch._dynamo.reset()
        call = torch.compile(lambda x, way=way: WAYS[way](x, k, v), backend="eager", fullgraph=fullgraph)
        call(q)
        along = torch.ones_like(q)
        if way == "falling back":
            want = tangent(lambda x: in_torch(x, k, v), q, along)
            torch.testing.assert_close(tangent(call, q, along), want)
        else:
            refused = (NotImplementedError, torch._dynamo.exc.Unsupported)
            with pytest.raises(refused, match=r"forward-mode derivatives|forward_ad"):
                tangent(call, q, along)


def test_meta_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no numbers to compute with; PyTorch says which shape the result would have."""
    given = [a.to("meta") for a in small("cpu")]
    for way in WAYS:
        if way == "falling back":
            with pytest.warns(UserWarning, match="device meta"):
                monkeypatch.setattr(ours, "_WARNED", set())
                assert WAYS[way](*given).shape == given[0].shape
        else:
            with pytest.raises(NotImplementedError, match="is on the device meta, which has no numbers"):
                WAYS[way](*given)


@pytest.mark.parametrize("change", ["meta", "a tangent", "vmap"])
def test_a_cache_without_numbers_of_its_own(change: str) -> None:
    q, k, v = tensors((2, 1, 2, 64), (2, 9, 2, 64), (2, 9, 2, 64), dtype="float16")
    lengths = torch.tensor([3, 9], dtype=torch.int32)

    def call(q: Any) -> Any:
        return ours.flash_attention_with_kvcache(q, k.to(q.device), v.to(q.device), cache_seqlens=lengths.to(q.device))

    with pytest.raises(NotImplementedError, match=r"q (is on the device meta|has a tangent|is in a transform)"):
        if change == "meta":
            call(q.to("meta"))
        elif change == "vmap":
            torch.func.vmap(call)(q[None])
        else:
            tangent(call, q, torch.ones_like(q))


@pytest.mark.parametrize("head_dim", [59, 111, 250])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_rows_of_any_length(where: str, head_dim: int, packed: bool) -> None:
    """In half types kernels take multiples of 8: others are padded with zeros, forward and backward."""
    dtype = "float16" if head_dim != 111 else "bfloat16"
    q, k, v = tensors(*((1, rows, 2, head_dim) for rows in (9, 12, 12)), dtype=dtype, where=where)
    call = WAYS["packed" if packed else "flash_attention"]
    o = check_call(f"head_dim {head_dim}", call, [q, k, v], visible(9, 12))
    assert o.shape == q.shape


def test_a_tensor_with_other_signs_in_memory(where: str) -> None:
    """The imaginary part of a conjugate is a view that PyTorch's operations negate as they read it."""
    a, b = tensors((1, 7, 2, 64), (1, 7, 2, 64), where=where)
    turned = torch.complex(a, b).conj().imag
    assert turned.is_neg() and torch.equal(turned, -b)
    want = ours.flash_attention(a, -b, -b)
    for call in (ours.flash_attention, calls.flash_attention, calls.flash_attention):  # and one that is planned
        assert torch.equal(call(a, turned, turned), want)
    half = torch.complex(a.half(), b.half()).conj().imag if where == "cuda" else turned
    lengths = torch.tensor([7], dtype=torch.int32, device=where)
    q = a[:, :1].to(half.dtype)
    for call in (ours.flash_attention_with_kvcache, decoding.flash_attention_with_kvcache):
        o = call(q, half, half, cache_seqlens=lengths)
        assert torch.equal(o, call(q, half.resolve_neg(), half.resolve_neg(), cache_seqlens=lengths))
        new = {"k": q, "v": q, "cache_seqlens": lengths - 1}
        with pytest.raises((TypeError, ValueError), match="k_cache is written"):
            call(q, half, half, **new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_length_have_gradients_on_a_gpu(dtype: str) -> None:
    """Checked before a launch, for the stages of an H200: up to 256 in half types, as many as 08 takes in float32."""
    most = 256 if dtype != "float32" else LADDER["backward"].max_head_dim
    with limits.pretend_gpu(limits.Limits(shared=227 * 1024, multiprocessors=132, compute_capability=90)):
        for head_dim in range(1, most + 1):
            torch_autograd.check_backward.__wrapped__(head_dim, DTYPES[dtype])
        with pytest.raises(ValueError, match="no stage has these gradients"):
            torch_autograd.check_backward.__wrapped__(most + 1, DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic(where: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    true = torch_autograd.run

    def spy(call: Any, *kind: Any) -> Any:
        if "do" in call.arrays:
            asked.append(call.options.deterministic)
        return true(call, *kind)

    monkeypatch.setattr(torch_autograd, "run", spy)
    given = tensors((1, 130, 2, 64), (1, 130, 2, 64), (1, 130, 2, 64), dtype=dtype, where=where, grad=True)

    def gradients(**options: Any) -> Any:
        return torch.autograd.grad(ours.flash_attention(*given, causal=True, **options).sum(), given)

    gradients()
    first, second = gradients(deterministic=True), gradients(deterministic=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        third = gradients()
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [False, True, True, True]
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


# ---- autocast, torch.library, torch.compile


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast(where: str, dtype: str) -> None:
    q, k, v = tensors((1, 2, 33, 64), (1, 2, 40, 64), (1, 2, 40, 64), where=where, grad=True)
    with torch.autocast(where, DTYPES[dtype]):
        o = ours.scaled_dot_product_attention(q, k.to(DTYPES[dtype]), v)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    plain = ours.scaled_dot_product_attention(*(a.to(DTYPES[dtype]) for a in (q, k, v)))
    assert o.dtype == theirs.dtype == DTYPES[dtype] and torch.equal(o, plain)
    o.sum().backward()
    assert all(a.grad.dtype == torch.float32 and a.grad.abs().sum() > 0 for a in (q, v))
    with torch.autocast(where, DTYPES[dtype], enabled=False):
        assert ours.scaled_dot_product_attention(q, k, v).dtype == torch.float32


def op_arguments(where: str, packed: bool, grad: bool, dtype: str = "float32") -> tuple[Any, ...]:
    """Return course::flash_attention's arguments but flags and stage: causal; packed with slopes and sinks; bias."""
    shape = ((9, 2, 8), (9, 1, 8)) if packed else ((2, 9, 2, 8), (2, 9, 1, 8))
    q, k, v = tensors(shape[0], shape[1], shape[1], where=where, grad=grad, dtype=dtype)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=where) if packed else None
    slopes = torch.tensor([0.5, 0.25], device=where) if packed else None
    bias = None if packed else torch.linspace(-1, 1, 81, device=where).view(9, 9)
    sinks = torch.tensor([1.0, -1.0], device=where) if packed else None
    return q, k, v, cu, cu, bias, slopes, sinks, [-1, 0, 5, 5] if packed else [-1, 0, -1, -1], None


@pytest.mark.parametrize(
    ("packed", "dtype"),
    [(False, "float32"), (True, "float32"), pytest.param(True, "bfloat16", marks=pytest.mark.exhaustive)],
)
def test_the_operators_keep_torchs_contracts(where: str, packed: bool, dtype: str) -> None:
    """Schema, fake kernels, autograd's registration and tracing, with torch.library.opcheck."""
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 0.05, "rtol": 0.05}
    kept, not_kept = [True, False, True], [True, False, False]
    forward, backward = torch.ops.course.flash_attention.default, torch.ops.course.flash_attention_backward.default
    torch.library.opcheck(forward, (*op_arguments(where, packed, True, dtype), kept, None), **tolerance)
    given = op_arguments(where, packed, False, dtype)
    torch.library.opcheck(forward, (*given, not_kept, None), **tolerance)
    o, lse = forward(*given, kept, None)
    torch.library.opcheck(backward, (torch.ones_like(o), *given[:3], o, lse, *given[3:], kept), **tolerance)


def test_the_operator_without_lse_has_no_gradients(where: str) -> None:
    given = op_arguments(where, False, True)
    o, lse = torch.ops.course.flash_attention(*given, [True, False, True], None)
    assert o.requires_grad and not lse.requires_grad and lse.shape == (2, 2, 9)
    o, lse = torch.ops.course.flash_attention(*given, [True, False, False], None)
    assert lse.numel() == 0
    with pytest.raises(RuntimeError, match="course::flash_attention kept no lse"):
        o.sum().backward()


CALLS: dict[str, Callable[..., Any]] = {
    "flash_attention": lambda q, k, v: ours.flash_attention(q, k, v, causal=True, softmax_scale=0.2),
    "window": lambda q, k, v: ours.flash_attention(q, k, v, window=(5, 2)),
    "sdpa": lambda q, k, v: ours.scaled_dot_product_attention(q, k, v, is_causal=True),
    "sdpa, shorter": lambda q, k, v: ours.scaled_dot_product_attention(q[:, :1], k, v, is_causal=True),
    "sdpa, longer": lambda q, k, v: ours.scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3], is_causal=True),
    "run_flash": lambda q, k, v: ours.run_flash(q[0], k[0], v[0], causal=True),
    "rotary": lambda q, k, v: ours.flash_attention(q, k, v, **tables(8, q.device.type), causal=True),
    "lse": lambda q, k, v: ours.flash_attention(q, k, v, return_lse=True)[0],
    "sinks": lambda q, k, v: ours.flash_attention(q, k, v, sinks=torch.linspace(-1, 1, 9, device=q.device)),
    "ALiBi": lambda q, k, v: ours.flash_attention(q, k, v, alibi_slopes=torch.linspace(0, 1, 9, device=q.device)),
    "packed": lambda q, k, v: ours.flash_attention_varlen(
        q[0], k[0], v[0], *[CU.to(q.device)] * 2, max_seqlen_q=6, max_seqlen_k=6
    ),
    "sdpa with a mask": lambda q, k, v: ours.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(9, 9, device=q.device, dtype=torch.bool).tril()
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_compiled_whole(where: str, case: str) -> None:
    """One node in one graph, and the same numbers with gradients."""
    given = tensors((2, 9, 9, 8), (2, 9, 9, 8), (2, 9, 9, 8), where=where, grad=True)
    call = lambda *a: CALLS[case](*(2 * x for x in a)).square().sum()  # noqa: E731
    graphs: list[Any] = []

    def aot_eager(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compiled = torch.compile(call, backend=aot_eager, fullgraph=True)
    got, want = (torch.autograd.grad(each(*given), given) for each in (compiled, call))
    (graph,) = graphs
    assert sum(node.op == "call_function" and str(node.target).startswith("course") for node in graph.nodes) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_functions_of_scores_are_left_out_of_a_graph(where: str) -> None:
    """The operators do not support them; the error says how to call them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = tensors((1, 9, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8), where=where, grad=True)
    capped_call = functools.partial(ours.flash_attention, **soft_cap(0.5))
    with pytest.raises(NotImplementedError, match=re.escape("torch.compiler.disable(flash_attention)")):
        make_fx(capped_call)(*given)
    apart = torch.compiler.disable(capped_call)
    compiled = torch.compile(lambda q, k, v: 2 * apart(2 * q, k, v), backend="aot_eager")
    got = torch.autograd.grad(compiled(*given).square().sum(), given)
    want = torch.autograd.grad((2 * capped_call(2 * given[0], *given[1:])).square().sum(), given)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_one_graph_for_many_lengths(where: str) -> None:
    """With dynamic shapes a second and a third length need no compilation; is_causal is top-left in each."""
    graphs = 0

    def count(module: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a: ours.scaled_dot_product_attention(*a, is_causal=True), backend=count, fullgraph=True, dynamic=True
    )
    for length in (9, 12, 17):
        given = tensors((2, 2, length, 8), (2, 2, length, 8), (2, 2, length, 8), where=where)
        want = torchs_own(*(a.double() for a in given), visible(length, length, causal=True))
        compare(str(length), compiled(*given), want, want)
    assert graphs == 1


@pytest.mark.exhaustive
def test_compiled_by_inductor(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info < (3, 12):
        # inductor imports setuptools, which needs its own distutils: after a test has imported pip, that is missing.
        monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")
    given = tensors((1, 2, 33, 8), (1, 2, 33, 8), (1, 2, 33, 8), where=where, grad=True)
    call = lambda q, k, v: ours.scaled_dot_product_attention(q.relu(), k, v, is_causal=True).square().sum()  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True)
    try:
        got = torch.autograd.grad(compiled(*given), given)
    except Exception as error:
        if "InvalidCxxCompiler" in repr(error) or "No working C++ compiler" in repr(error):
            pytest.skip("inductor finds no C++ compiler here")
        raise
    for a, b in zip(got, torch.autograd.grad(call(*given), given), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# ---- the one-liner


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_run_flash(where: str, lead: tuple[int, ...], causal: bool) -> None:
    given = tensors((*lead, 33, 64), (*lead, 40, 64), (*lead, 40, 64), where=where)
    seen = visible(33, 40, causal=causal).to(where)
    call = functools.partial(ours.run_flash, causal=causal)
    want = beside("run_flash", call, given, functools.partial(by_math, attn_mask=seen))
    arrays = [a.cpu().numpy() for a in given]
    for kind in (np.asarray, cp.asarray):
        o = call(*map(kind, arrays))
        assert isinstance(o, type(kind(arrays[0])))
        check.check("arrays", cp.asnumpy(o), want.detach().cpu().numpy())


# ---- what only a GPU has


def cuda_tensors(dtype: str = "bfloat16", grad: bool = True, rows: int = 300) -> list[Any]:
    shape = (2, rows, 4, 64)
    return tensors(shape, shape, shape, dtype=dtype, where="cuda", grad=grad)


def same_gradients(got: Any, want: Any) -> None:
    """Compare gradients: dq is summed in any order, so it is near, not equal."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2 * float(b.abs().max()), rtol=0)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_current_stream(dtype: str) -> None:
    """The inputs are written on a side stream after a kernel that sleeps: another stream would read zeros."""
    values = cuda_tensors(dtype, grad=False)
    leaves = [a.clone().requires_grad_() for a in values]
    want = ours.flash_attention(*leaves, causal=True)
    do = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, do)
    arrays = [torch.zeros_like(a) for a in values]
    late = torch.zeros_like(do)
    for known in (False, True):  # a call that is checked and planned, and a cached one
        if not known:
            forget()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for a, value in zip(arrays, values, strict=True):
                a.copy_(value)
            leaves = [a.detach().requires_grad_() for a in arrays]
            o = ours.flash_attention(*leaves, causal=True)
            torch.cuda._sleep(100_000_000)
            late.copy_(do)
            got = torch.autograd.grad(o, leaves, late)
            assert not (known and stream.query())  # the GPU has not been waited for
        stream.synchronize()
        assert torch.equal(o, want)
        same_gradients(got, wanted)
        for a in (*arrays, late):
            a.zero_()
        torch.cuda.synchronize()


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_cuda_graph(packed: bool, dtype: str) -> None:
    """Forward and backward are captured once, and replayed with other numbers."""
    arrays = cuda_tensors(dtype, grad=False)
    cu = torch.tensor([0, 30, 300], dtype=torch.int32, device="cuda")
    if packed:
        arrays = [a[0].clone() for a in arrays]
    leaves = [a.requires_grad_() for a in arrays]
    do = torch.randn_like(leaves[0])

    def step() -> tuple[Any, ...]:
        if packed:
            o = ours.flash_attention_varlen(*leaves, cu, cu, causal=True, max_seqlen_q=270, max_seqlen_k=270)
        else:
            o = ours.flash_attention(*leaves, causal=True)
        return (o, *torch.autograd.grad(o, leaves, do))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for a in leaves:
            a.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    want = step()
    assert torch.equal(captured[0], want[0])
    same_gradients(captured[1:], want[1:])


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_of_torchs_allocator(dtype: str) -> None:
    """Torch's count rises by the output and lse, at its peak by gradients and scratch; CuPy's pool provides nothing."""
    leaves = cuda_tensors(dtype)
    o = ours.flash_attention(*leaves)
    o.backward(torch.ones_like(o))
    del o
    for a in leaves:
        a.grad = None
    pool = cp.get_default_memory_pool()
    torch.cuda.synchronize()
    ours_before, torchs_before = pool.used_bytes(), torch.cuda.memory_allocated()
    o = ours.flash_attention(*leaves)
    held = torch.cuda.memory_allocated() - torchs_before
    nbytes = leaves[0].numel() * leaves[0].element_size()
    lse = 4 * leaves[0].numel() // 64
    rounded = sum(-(-n // 512) * 512 for n in (nbytes, lse))  # the allocator's unit
    assert held == rounded
    do = torch.ones_like(o)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(o, leaves, do)
    most = torch.cuda.max_memory_allocated() - before
    # Three gradients are new, and lse is freed with the graph.
    assert torch.cuda.memory_allocated() - before == 3 * -(-nbytes // 512) * 512 - -(-lse // 512) * 512
    assert 3 * nbytes < most < 3 * nbytes + 4 * 4 * leaves[0].numel()  # and scratch: dq in float32, sums, counters
    assert pool.used_bytes() == ours_before and len(gradients) == 3


@on_gpu
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_in_a_new_thread(how: str) -> None:
    """A thread that has launched nothing has no CUDA context until it is given one."""
    leaves = cuda_tensors()
    want = ours.flash_attention(*leaves, causal=True)
    do = torch.randn_like(want)
    found: list[Any] = []

    def work() -> None:
        try:
            if how == "forward":
                found.append(ours.flash_attention(*leaves, causal=True))
            else:
                found.append(torch.autograd.grad(want, leaves, do)[2])
        except Exception as error:
            found.append(error)

    calls.flash_attention(*(a.detach() for a in leaves), causal=True)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found[0]
    if how == "forward":
        assert torch.equal(found[0], want)


@on_gpu
def test_cpu_tensors_beside_a_gpu() -> None:
    on_the_gpu = cuda_tensors("bfloat16", grad=False)
    o = ours.flash_attention(*(a.cpu() for a in on_the_gpu))
    assert o.device.type == "cpu" and torch.equal(o, ours.flash_attention(*on_the_gpu).cpu())


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_who_traces_sees_the_operators_and_nobody_else_pays_for_them(mode: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v, do = (torch.randn(1, 5, 2, 8) for _ in range(4))

    def step(q: Any, k: Any, v: Any, do: Any) -> Any:
        q = q.detach().requires_grad_()
        return torch.autograd.grad(ours.flash_attention(q, k, v), q, do)[0]

    graph = make_fx(step, tracing_mode=mode)(q, k, v, do)
    called = [str(node.target) for node in graph.graph.nodes]
    assert [name for name in called if name.startswith("course.")] == [
        "course.flash_attention.default",
        "course.flash_attention_backward.default",
    ]
    torch.testing.assert_close(graph(q, k, v, do), step(q, k, v, do))
    o = ours.flash_attention(q.requires_grad_(), k, v)
    assert type(o.grad_fn).__name__ == "_PlainBackward"

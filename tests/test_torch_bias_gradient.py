"""Gradients of a bias, slopes, sinks and a table of distances with PyTorch's autograd, against its own in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")

from helpers import torch_attention as ours  # noqa: E402 - it needs PyTorch
from helpers.attention.score_mods import relative_bias  # noqa: E402
from helpers.device import ON_GPU  # noqa: E402

HAS_CUDA = ON_GPU and torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU that CuPy and PyTorch both see")
ROWS, KEYS, HEAD_DIM, REACH = 50, 60, 20, 7


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def leaves(where: str, dtype: Any = torch.float32, *, of_bias: tuple[int, ...] = (4, 1, KEYS)) -> dict[str, Any]:
    """Make leaf tensors by name on a device, with the same numbers on each."""
    shapes = {"q": (2, ROWS, 4, HEAD_DIM), "k": (2, KEYS, 2, HEAD_DIM), "v": (2, KEYS, 2, HEAD_DIM)}
    shapes |= {"bias": of_bias, "alibi_slopes": (4,), "sinks": (4,), "table": (4, 2 * REACH + 1)}
    made = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        a = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / (4 if name == "alibi_slopes" else 1)
        kept = torch.float32 if name in ("alibi_slopes", "sinks", "table") else dtype
        made[name] = a.to(where, kept).requires_grad_()
    return made


def exact(
    q: Any, k: Any, v: Any, bias: Any = None, alibi_slopes: Any = None, sinks: Any = None, table: Any = None
) -> Any:
    """Compute causal attention in float64, with PyTorch's operations."""
    q, k, v = (a.double().transpose(1, 2) for a in (q, k, v))
    k, v = (a.repeat_interleave(q.shape[1] // a.shape[1], 1) for a in (k, v))
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)
    s = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    s = s if bias is None else s + bias.double()
    s = s if alibi_slopes is None else s - alibi_slopes.double()[..., None, None] * (i - j).abs()
    s = s if table is None else s + table.double()[:, (j - i).clamp(-REACH, REACH) + REACH]
    s = s.masked_fill(j > i, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)
    return (s.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def call(q: Any, k: Any, v: Any, table: Any = None, **extras: Any) -> Any:
    return ours.flash_attention(q, k, v, causal=True, **extras, **({} if table is None else relative_bias(table)))


def compare(got: Any, want: Any, names: Any, near: float = 2e-5) -> None:
    for name, a, b in zip(names, got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        largest = max(1.0, float(b.double().abs().max()))
        assert float((a.double() - b.double()).abs().max()) <= near * largest, name


def check_gradients(given: dict[str, Any], near: float = 2e-5) -> None:
    """Check against float64, and that a repetition gives the same bits for the added terms."""
    do = torch.randn(given["q"].shape, generator=torch.Generator().manual_seed(9)).to(given["q"])
    got = torch.autograd.grad(call(**given), [*given.values()], do)
    want = torch.autograd.grad(exact(**given), [*given.values()], do.double())
    compare(got, want, given, near)
    again = torch.autograd.grad(call(**given), [*given.values()], do)
    assert all(torch.equal(a, b) for a, b in list(zip(got, again, strict=True))[3:])


@pytest.mark.parametrize("without", [("table",), ("bias",)], ids=["bias, slopes, sinks", "table, slopes, sinks"])
def test_gradients(where: str, without: tuple[str, ...]) -> None:
    check_gradients({name: a for name, a in leaves(where).items() if name not in without})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.exhaustive(each_value=("where",))
def test_gradients_in_half_types(where: str, dtype: str) -> None:
    """A bias in a half type gets a gradient of that type."""
    given = leaves(where, getattr(torch, dtype), of_bias=(ROWS, KEYS))
    check_gradients(given, {"float16": 0.01, "bfloat16": 0.08}[dtype])


def test_the_bias_alone_is_trained(where: str) -> None:
    given = leaves(where)
    q, k, v = (given[name].detach() for name in "qkv")
    o = call(q, k, v, bias=given["bias"])
    (got,) = torch.autograd.grad(o.square().sum(), given["bias"])
    (want,) = torch.autograd.grad(exact(q, k, v, given["bias"]).square().sum(), given["bias"])
    compare([got], [want], ["bias"])


@pytest.mark.filterwarnings("ignore:Input .* is not a double precision")
def test_torchs_own_check_of_gradients(where: str) -> None:
    """gradcheck varies each number, by large steps in float32; nondet_tol=0: a second backward gives the same bits."""
    given = leaves(where)
    q, k, v = (given[name].detach()[:1, :3] for name in "qkv")  # a backward pass for each number of the output
    bias, slopes, sinks = (given[name] for name in ("bias", "alibi_slopes", "sinks"))
    bias = bias[..., :3].detach().clone().requires_grad_()

    def of_extras(bias: Any, slopes: Any, sinks: Any) -> Any:
        return call(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks)

    assert torch.autograd.gradcheck(
        *(of_extras, (bias, slopes, sinks)), eps=2e-2, atol=3e-3, rtol=1e-2, nondet_tol=0.0, fast_mode=False
    )


def test_a_bias_that_is_made_of_few_numbers(where: str) -> None:
    """T5: a table of all distances is gathered from buckets; PyTorch computes their gradient from the table's."""
    given = leaves(where)
    buckets = torch.randn(5, 4, device=where, requires_grad=True)
    bucket_of = torch.arange(2 * REACH + 1, device=where) // 3
    results = []
    for attention in (call, exact):
        table = buckets[bucket_of].T.contiguous()
        o = attention(*(given[name] for name in "qkv"), table=table)
        results.append(torch.autograd.grad(o.square().sum(), [given["q"], buckets]))
    compare(*results, ["q", "buckets"])


@pytest.mark.parametrize("shape", [(ROWS, KEYS), (4, 1, KEYS), (2, 1, ROWS, KEYS), (1, KEYS)], ids=str)
@pytest.mark.exhaustive(each_value=("where",))
def test_a_mask_of_sdpa_is_learned(where: str, shape: tuple[int, ...]) -> None:
    given = leaves(where, of_bias=shape)
    q, k, v, mask = (given[name] if name == "bias" else given[name].transpose(1, 2) for name in ("q", "k", "v", "bias"))
    wrt = [given[name] for name in ("q", "k", "v", "bias")]
    got = torch.autograd.grad(ours.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).square().sum(), wrt)
    wide = (a.double() for a in (q, k, v, mask))
    o = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True)
    compare(got, torch.autograd.grad(o.square().sum(), wrt), ("q", "k", "v", "bias"))


def test_packed_sequences(where: str) -> None:
    given = {name: a for name, a in leaves(where).items() if name != "bias"}
    cu = torch.tensor([0, ROWS, 2 * ROWS], dtype=torch.int32, device=where)
    cu_k = torch.tensor([0, KEYS, 2 * KEYS], dtype=torch.int32, device=where)
    q, k, v = (given[name].flatten(0, 1) for name in "qkv")
    extras = {name: given[name] for name in ("alibi_slopes", "sinks")}
    o = ours.flash_attention_varlen(q, k, v, cu, cu_k, causal=True, **extras, **relative_bias(given["table"]))
    got = torch.autograd.grad(o.square().sum(), [*given.values()])
    compare(got, torch.autograd.grad(exact(**given).square().sum(), [*given.values()]), given)


def test_it_is_traced(where: str) -> None:
    """One operator computes all gradients, and fulfils each contract of torch.library."""
    given = {name: a for name, a in leaves(where).items() if name != "table"}

    def step(*tensors: Any) -> Any:
        return call(**dict(zip(given, tensors, strict=True)))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got, plain = (torch.autograd.grad(f(*given.values()).sum(), [*given.values()]) for f in (compiled, step))
    for a, b in list(zip(got, plain, strict=True))[3:]:
        assert torch.equal(a, b)
    compare(got, plain, given)

    detached = [a.detach() for a in given.values()]
    q, k, v, *extras = detached
    rest = None, None, *extras, [-1, 0, -1, -1], None, [True, False, True]
    o, lse = torch.ops.course.flash_attention(q, k, v, *rest, None)
    operator = torch.ops.course.flash_attention_backward_wrt.default
    wrt = ["bias", "alibi_slopes", "sinks"]
    torch.library.opcheck(operator, (torch.ones_like(o), q, k, v, o, lse, *rest, wrt), atol=1e-4, rtol=1e-4)


def test_second_derivatives_are_refused(where: str) -> None:
    given = leaves(where)
    (dbias,) = torch.autograd.grad(
        call(given["q"], given["k"], given["v"], bias=given["bias"]).sum(), given["bias"], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dbias.sum().backward()

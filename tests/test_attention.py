"""flash_attention and flash_attention_varlen: all pairs of features at awkward sizes, and wrong use."""

from __future__ import annotations

import functools
import importlib
import itertools
import mmap
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pytest
from refused import check_refused

from helpers.attention import flash_attention, flash_attention_backward, flash_attention_varlen, kernel, reference
from helpers.attention.check import check
from helpers.attention.ladder import BACKWARD, FORWARD, Stage
from helpers.attention.ladder.layout import address
from helpers.attention.ladder.stage import CallSize
from helpers.attention.run import forget
from helpers.device import ON_GPU, cp
from helpers.xray import xray

STRIDED = [stage for stage in FORWARD.values() if "float32" in stage.dtypes and "varlen" in stage.features]
Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


def inputs(batch: int, n: int, n_kv: int, heads: int, kv_heads: int, d: int, seed: int = 0) -> Inputs:
    """Make (batch, seq, heads, head_dim) inputs in float32 with a non-zero mean."""
    rng = np.random.default_rng([seed, n, n_kv, heads, d])
    shapes = (batch, n, heads, d), (batch, n_kv, kv_heads, d), (batch, n_kv, kv_heads, d)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.25) for shape in shapes)
    return q, k, v


def check_both(name: str, got: tuple[Any, Any], want: tuple[np.ndarray, np.ndarray]) -> None:
    for what, a, b in zip(("o", "lse"), got, want, strict=True):
        check(f"{name}: {what}", a, b)


# ---- every feature with every other

FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": ((1, 1), (1, 130), (130, 1), (63, 65), (65, 63), (129, 33), (33, 200), (128, 64), (257, 129)),
    "mask": (None, "causal", (0, 0), (5, 3), (40, -1), (-1, 2), (70, 0), "causal and (9, 9)"),
    "heads": ((1, 1), (3, 3), (4, 2), (6, 1)),
    "head_dim": (3, 8, 40, 64, 128),
    "batch": (1, 3),
    "layout": ("dense", "heads first", "rows with gaps", "slices of one array", "odd address", "backwards"),
    "scale": (None, 0.7, -0.5),  # times the root of head_dim, so that the logits stay near unit-normal
    "return_lse": (True, False),
}


def pairwise(factors: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Return cases in which every two values of different factors meet."""
    names = list(factors)
    sizes = [len(factors[name]) for name in names]
    pairs = itertools.combinations(range(len(names)), 2)
    left = {(a, i, b, j) for a, b in pairs for i in range(sizes[a]) for j in range(sizes[b])}
    rng = np.random.default_rng(0)
    while left:
        a, i, b, j = min(left)
        tries = rng.integers(0, sizes, size=(50, len(names)))  # the case that covers most of the remaining pairs
        tries[:, a], tries[:, b] = i, j
        covered = [{p for p in left if t[p[0]] == p[1] and t[p[2]] == p[3]} for t in tries]
        best = max(range(len(tries)), key=lambda t: len(covered[t]))
        left -= covered[best]
        yield {name: factors[name][index] for name, index in zip(names, tries[best], strict=True)}


CASES = list(pairwise(FACTORS))


def test_every_pair_of_values_occurs() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(str(case[a]), str(case[b])) for case in CASES}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b])


def laid_out(a: np.ndarray, layout: str) -> Any:
    """Copy the same numbers to a device array with another layout."""
    if layout == "heads first":
        return cp.asarray(np.ascontiguousarray(a.swapaxes(1, 2))).swapaxes(1, 2)
    if layout == "rows with gaps":
        return cp.asarray(np.pad(a, ((0, 0), (0, 2), (0, 0), (0, 5))))[:, : a.shape[1], :, : a.shape[3]]
    if layout == "slices of one array":
        return cp.asarray(np.stack([a, -a, a], axis=2))[:, :, 2]
    if layout == "odd address":
        flat = cp.asarray(np.concatenate([[np.float32(7)], a.ravel()]))
        return flat[1:].reshape(a.shape)
    if layout == "backwards":
        return cp.asarray(np.ascontiguousarray(a[:, :, :, ::-1]))[:, :, :, ::-1]
    return cp.asarray(a)


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    causal = "causal" in str(case["mask"])
    window = {"causal": None, "causal and (9, 9)": (9, 9)}.get(case["mask"], case["mask"])
    scale = case["scale"] and case["scale"] / case["head_dim"] ** 0.5
    return {"causal": causal, "window": window, "softmax_scale": scale}


# Every pair of values meets the stage with the simplest text, and every second pair each other stage.
OF_STAGES = [(stage, case) for i, case in enumerate(CASES) for j, stage in enumerate(STRIDED) if not j or (i + j) % 2]


@pytest.mark.exhaustive(one_of_each=lambda stage, case: (stage.name, str(case["mask"])))
@pytest.mark.parametrize(
    ("stage", "case"),
    OF_STAGES,
    ids=lambda each: each.name if isinstance(each, Stage) else "-".join(map(str, each.values())).replace(" ", ""),
)
def test_features_together(stage: Stage, case: dict[str, Any]) -> None:
    head_dim = -(-case["head_dim"] // stage.head_dim_step) * stage.head_dim_step
    q, k, v = inputs(case["batch"], *case["shape"], *case["heads"], head_dim)
    options = options_of(case)
    given = (laid_out(a, case["layout"]) for a in (q, k, v))
    got = flash_attention(*given, **options, return_lse=case["return_lse"], stage=stage.name)
    want = oracle.exact(q, k, v, **options)
    check_both(stage.name, got if case["return_lse"] else (got, want[1]), want)


LENGTHS = {
    "several": ((3, 70, 1, 33, 129), (5, 40, 90, 33, 1)),
    "empty ones": ((0, 7, 0, 66, 0, 5), (0, 0, 4, 130, 0, 31)),
    "one": ((65,), (33,)),
    "nothing at all": ((0, 0), (0, 0)),
    "no keys": ((5, 3), (0, 0)),
}


def packed(lengths: str, heads: int, kv_heads: int, d: int) -> tuple[Inputs, tuple[np.ndarray, np.ndarray]]:
    cu = tuple(np.cumsum([0, *side], dtype=np.int32) for side in LENGTHS[lengths])
    q, k, v = inputs(1, int(cu[0][-1]), int(cu[1][-1]), heads, kv_heads, d)
    return (q[0], k[0], v[0]), cu


def each_sequence(cu: tuple[np.ndarray, np.ndarray]) -> Iterator[tuple[slice, slice]]:
    for i in range(len(cu[0]) - 1):
        yield slice(cu[0][i], cu[0][i + 1]), slice(cu[1][i], cu[1][i + 1])


@pytest.mark.exhaustive(each_value=("stage",))
@pytest.mark.parametrize("stage", STRIDED, ids=lambda stage: stage.name)
@pytest.mark.parametrize("mask", ["none", "causal", (5, 3), (40, -1)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 40), ((1, 1), 3), ((3, 3), 64)], ids=str)
def test_packed_sequences(stage: Stage, lengths: str, mask: Any, heads: tuple[int, int], d: int) -> None:
    d = -(-d // stage.head_dim_step) * stage.head_dim_step
    (q, k, v), cu = packed(lengths, *heads, d)
    options = {"causal": mask == "causal", "window": mask if isinstance(mask, tuple) else None}
    o, lse = flash_attention_varlen(q, k, v, *cu, **options, return_lse=True, stage=stage.name)
    assert o.shape == q.shape and lse.shape == (heads[0], len(q))
    want_o, want_lse = np.zeros(o.shape), np.full(lse.shape, -np.inf)
    for rows, keys in each_sequence(cu):
        if len(q[rows]) and len(k[keys]):
            want_o[rows], want_lse[:, rows] = oracle.exact(q[rows], k[keys], v[keys], **options)
    if len(q):
        check_both(stage.name, (o, lse), (want_o, want_lse))


# ---- rows that see no key


def test_a_window_without_limits_is_none() -> None:
    q, k, v = inputs(1, 70, 130, 2, 2, 40)
    plain, causal = flash_attention(q, k, v), flash_attention(q, k, v, causal=True)
    for window in ((-1, -1), (1000, 1000), (2**31, 2**40), [129, 69]):
        np.testing.assert_array_equal(flash_attention(q, k, v, window=window), plain)
        np.testing.assert_array_equal(flash_attention(q, k, v, window=window, causal=True), causal)
    np.testing.assert_array_equal(flash_attention(q, k, v, window=(-1, 0)), causal)


def test_keys_out_of_sight_have_no_influence() -> None:
    q, k, v = inputs(1, 64, 200, 1, 1, 40)
    seen = reference.visible(64, 200, window=(20, 30)).any(axis=0)
    assert 0 < (~seen).sum() < 200
    before = flash_attention(q, k, v, window=(20, 30))
    k[:, ~seen], v[:, ~seen] = np.nan, np.inf
    np.testing.assert_array_equal(flash_attention(q, k, v, window=(20, 30)), before)


# ---- which arrays and which stage are used


def test_the_output_is_of_the_kind_that_came() -> None:
    q, k, v = inputs(2, 5, 6, 2, 2, 8)
    o, lse = flash_attention(q, k, v, return_lse=True)
    assert type(o) is type(lse) is np.ndarray
    device = flash_attention(*(cp.asarray(a) for a in (q, k, v)))
    assert isinstance(device, cp.ndarray) and device.shape == q.shape and device.flags.c_contiguous
    np.testing.assert_array_equal(cp.asnumpy(device), o)
    cu = np.array([0, 5], np.int32), cp.asarray(np.array([0, 6], np.int32))
    assert type(flash_attention_varlen(q[0], k[0], v[0], *cu)) is np.ndarray


class Tensor:
    """An array of another library that only supports DLPack."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def test_an_array_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 33, 40, 4, 2, 8)
    library = types.ModuleType("some_library")
    library.from_dlpack = lambda a: Tensor(np.from_dlpack(a))
    monkeypatch.setitem(sys.modules, "some_library", library)
    monkeypatch.setattr(Tensor, "__module__", "some_library.tensors")
    tensors = [Tensor(a.swapaxes(1, 2).copy().swapaxes(1, 2)) for a in (q, k, v)]
    o, lse = flash_attention(*tensors, causal=True, return_lse=True)
    assert isinstance(o, Tensor) and isinstance(lse, Tensor)
    check_both("tensors", (o.array, lse.array), oracle.exact(q, k, v, causal=True))
    mixed = flash_attention(q, tensors[1], cp.asarray(v), causal=True)
    np.testing.assert_array_equal(mixed, o.array)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_torch_tensors(where: str) -> None:
    torch = pytest.importorskip("torch")
    if where == "cuda" and not (ON_GPU and torch.cuda.is_available()):
        pytest.skip("no GPU that torch can use")
    q, k, v = inputs(2, 65, 70, 4, 2, 40)
    tensors = [torch.from_numpy(a).to(where) for a in (q, k, v)]
    o, lse = flash_attention(*tensors, causal=True, return_lse=True)
    assert isinstance(o, torch.Tensor) and o.device.type == lse.device.type == where
    check_both("torch", (o.cpu().numpy(), lse.cpu().numpy()), oracle.exact(q, k, v, causal=True))


@pytest.mark.parametrize("which", "qkv")
def test_a_tensor_that_requires_grad_is_sent_to_torch_attention(which: str) -> None:
    q, k, v = inputs(1, 5, 6, 2, 2, 8)
    arrays = dict(zip("qkv", map(Tensor, (q, k, v)), strict=True))
    arrays[which].requires_grad = True
    with pytest.raises(TypeError, match=f"{which} requires grad, .* use helpers.torch_attention.flash_attention"):
        flash_attention(**arrays)


def test_torchs_own_tensor_that_requires_grad() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in inputs(1, 5, 6, 2, 2, 8))
    with pytest.raises(TypeError, match=r"q requires grad, .* use helpers.torch_attention.flash_attention"):
        flash_attention(q, k, v)
    flash_attention(q.detach(), k.detach(), v.detach())


@pytest.mark.parametrize("library, module", [("torch", "torch_attention"), ("transformers", "transformers_attention")])
def test_what_needs_a_library_says_so(library: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "transformers":
        pytest.importorskip("torch", reason="transformers_attention needs PyTorch first")
    monkeypatch.setitem(sys.modules, library, None)
    for name in (module, "torch_tensors") if library == "torch" else (module,):
        monkeypatch.delitem(sys.modules, f"helpers.{name}", raising=False)
    with pytest.raises(ImportError, match=f"helpers.{module} needs .*: pip install {library}. helpers."):
        importlib.import_module(f"helpers.{module}")


@pytest.mark.skipif(ON_GPU, reason="a call is launched there by addresses, without Kernel.bind")
@pytest.mark.parametrize("layout", FACTORS["layout"])
def test_views_are_read_where_they_lie(layout: str) -> None:
    seen: list[Any] = []
    arrays = [laid_out(a, layout) for a in inputs(2, 33, 40, 4, 2, 8)]
    with kernel.launches_replaced(lambda self, grid, block, args, **_: seen.extend(args[:4])):
        o = flash_attention(*arrays)
    same = [address(a) == address(b) for a, b in zip(seen, (*arrays, o), strict=True)]
    assert same == [layout != "backwards"] * 3 + [True]


@pytest.mark.parametrize(
    "stage", [stage for stage in FORWARD.values() if "float32" in stage.dtypes], ids=lambda s: s.name
)
def test_every_stage_by_name_and_by_number(stage: Stage) -> None:
    q, k, v = inputs(2, 33, 40, 3, 3, 40)
    for arrays in ((q, k, v), [laid_out(a, "heads first") for a in (q, k, v)]):
        o = flash_attention(*arrays, stage=stage.name)
        assert o.shape == q.shape
        check(stage.name, o, oracle.exact(q, k, v)[0])
        if stage is [other for other in FORWARD.values() if other.number == stage.number][-1]:
            by_number = flash_attention(*arrays, stage=stage.number)
            np.testing.assert_array_equal(cp.asnumpy(by_number), cp.asnumpy(o))


def test_the_last_stage_that_can_is_chosen() -> None:
    names: list[str] = []
    q, k, v = inputs(1, 5, 6, 2, 2, 8)
    with kernel.launches_replaced(lambda self, *_, **__: names.append(self.name)):
        flash_attention(q, k, v)
        flash_attention(q, k, v, causal=True)
    of_default = [s for s in FORWARD.values() if s.tuning.by_default(CallSize(5, 10, 8))]
    able = [[s.name for s in of_default if s.why_not(head_dim=8, causal=c) is None] for c in (False, True)]
    assert names == [able[0][-1], able[1][-1]]
    with pytest.raises(
        ValueError, match=r"^no stage can do this in float32\. The nearest is \w+: head_dim = 300; .* 1 to 256$"
    ):
        flash_attention(*inputs(1, 5, 6, 2, 2, 300))
    with pytest.raises(ValueError, match=r"head_dim = 300; this stage takes 8 to 256, multiples of 8$"):  # not 304
        flash_attention(*(a.astype(np.float16) for a in inputs(1, 5, 6, 2, 2, 300)))


# ---- what it refuses

BAD: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a list": (
        lambda q, k, v: flash_attention(q.tolist(), k, v),
        TypeError,
        "q must be an array of NumPy or the device, or",
    ),
    "nothing": (lambda q, k, v: flash_attention(q, k, None), TypeError, "got NoneType"),
    "float64": (
        lambda q, k, v: flash_attention(*(a.astype(np.float64) for a in (q, k, v))),
        TypeError,
        "q is float64; the stages take bfloat16, float16, float32, e4m3 (in uint8): q.astype('float32')",
    ),
    "two dtypes": (
        lambda q, k, v: flash_attention(q, k, v.astype(np.float16)),
        TypeError,
        "v is float16 and q is float32: one dtype for all is needed",
    ),
    "three axes": (
        lambda q, k, v: flash_attention(q[0], k, v),
        ValueError,
        "q has shape (5, 4, 8); 4 axes are needed: (batch, seq, heads, head_dim)",
    ),
    "four axes, packed": (
        lambda q, k, v: flash_attention_varlen(q, k, v, CU_Q, CU_K),
        ValueError,
        "q has shape (2, 5, 4, 8); 3 axes are needed: (tokens, heads, head_dim)",
    ),
    "batches": (lambda q, k, v: flash_attention(q[:1], k, v), ValueError, "q has 1 batches and k has 2"),
    "a key without a value": (
        lambda q, k, v: flash_attention(q, k, v[:, :5]),
        ValueError,
        "k has shape (2, 6, 2, 8) and v (2, 5, 2, 8): each key needs its value",
    ),
    "head_dim": (
        lambda q, k, v: flash_attention(q[..., :7], k, v),
        ValueError,
        "head_dim differs: q has shape (2, 5, 4, 7) and k (2, 6, 2, 8)",
    ),
    "heads and rows exchanged": (
        lambda q, k, v: flash_attention(*(a.swapaxes(1, 2) for a in (q, k, v))),
        ValueError,
        "5 heads of q cannot share 6 heads of k and v: kv_heads must divide heads ((batch, seq, heads, head_dim)). "
        "Swap axes 1 and 2 of q, k and v?",
    ),
    "heads and keys exchanged": (
        lambda q, k, v: flash_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2)),
        ValueError,
        "(batch, seq, heads, head_dim)). Swap axes 1 and 2 of k and v?",
    ),
    "heads that do not divide": (
        lambda q, k, v: flash_attention(q[:, :, :3], k, v),
        ValueError,
        "3 heads of q cannot share 2 heads of k and v: kv_heads must divide heads",
    ),
    "no kv_heads": (lambda q, k, v: flash_attention(q, k[:, :, :0], v[:, :, :0]), ValueError, "there are no heads"),
    "a window of one": (
        lambda q, k, v: flash_attention(q, k, v, window=(3,)),
        TypeError,
        "window must be a pair (left, right) of ints, -1 for unlimited, or None; got tuple (3,)",
    ),
    "a window of floats": (lambda q, k, v: flash_attention(q, k, v, window=(1.0, 2)), TypeError, "got (1.0, 2)"),
    "a window below -1": (
        lambda q, k, v: flash_attention(q, k, v, window=(3, -2)),
        ValueError,
        "got (3, -2), where -2 is below -1",
    ),
    "a mask for causal": (
        lambda q, k, v: flash_attention(q, k, v, causal=np.ones((5, 6), bool)),
        TypeError,
        "causal must be True or False; got ndarray",
    ),
    "a scale that is a string": (
        lambda q, k, v: flash_attention(q, k, v, softmax_scale="0.1"),
        TypeError,
        "softmax_scale must be a number, or None",
    ),
    "a stage that is not there": (
        lambda q, k, v: flash_attention(q, k, v, stage="fast"),
        ValueError,
        "stage='fast' is not in the ladder, which has: 1 naive, 2 tiled, ",
    ),
    "a stage that cannot": (
        lambda q, k, v: flash_attention(q, k, v, stage="naive", causal=True),
        ValueError,
        "stage naive cannot: it has no k and v with fewer heads than q. Stages that can: heads_and_masks",
    ),
    "a stage that has no mask": (
        lambda q, k, v: flash_attention(k, k, v, stage=4, window=(3, 3)),
        ValueError,
        "stage register_tiles cannot: it has no window=(3, 3). Stages that can: heads_and_masks",
    ),
    "a stage that has no lse": (
        lambda q, k, v: flash_attention(k, k, v, stage=2, return_lse=True),
        ValueError,
        "stage tiled cannot: it has no return_lse=True. Stages that can: heads_and_masks",
    ),
    "a stage that has no lengths": (
        lambda q, k, v: flash_attention_varlen(k[0], k[0], v[0], CU_K, CU_K, stage=3),
        ValueError,
        "stage online_softmax cannot: it has no packed sequences of several lengths. Stages that can: heads_and_masks",
    ),
    "lengths in int64": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], CU_Q.astype(np.int64), CU_K),
        TypeError,
        "cu_seqlens_q is int64; int32 is needed: cu_seqlens_q.astype('int32')",
    ),
    "a list of lengths": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], [0, 5], CU_K),
        TypeError,
        "cu_seqlens_q must be an array of NumPy or the device, or have __dlpack__; got list",
    ),
    "lengths, not sums": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], np.array([2, 3], np.int32), CU_K),
        ValueError,
        "cu_seqlens_q begins with 2; the first sequence begins at 0",
    ),
    "sums that fall": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], CU_Q, np.array([0, 4, 3, 6], np.int32)),
        ValueError,
        "cu_seqlens_k falls from 4 to 3 at 2; a sequence cannot end before it begins",
    ),
    "sums that end early": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], CU_Q, np.array([0, 2, 5], np.int32)),
        ValueError,
        "cu_seqlens_k ends at 5, and k has 6 tokens",
    ),
    "no sequence": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], CU_Q[:1], CU_K[:1]),
        ValueError,
        "cu_seqlens_q has shape (1,); (sequences + 1,) is needed",
    ),
    "two numbers of sequences": (
        lambda q, k, v: flash_attention_varlen(q[0], k[0], v[0], CU_Q, np.array([0, 6], np.int32)),
        ValueError,
        "cu_seqlens_q describes 2 sequences and cu_seqlens_k describes 1",
    ),
    "on some other device": (
        lambda q, k, v: flash_attention(Tensor(q, device=10), k, v),
        TypeError,
        "q is on a device of DLPack's type 10; the CPU (1) or a CUDA GPU (2) is needed",
    ),
}
CU_Q, CU_K = np.array([0, 2, 5], np.int32), np.array([0, 3, 6], np.int32)


def test_refused() -> None:
    for case, (call, error, message) in BAD.items():
        check_refused(case, error, message, functools.partial(call, *inputs(2, 5, 6, 4, 2, 8)))


@pytest.mark.skipif(ON_GPU, reason="where there is a GPU, its arrays are welcome")
def test_an_array_on_a_gpu_that_is_not_there() -> None:
    q, k, v = inputs(1, 5, 6, 2, 2, 8)
    with pytest.raises(TypeError, match="q is on a GPU, and the kernels run on the CPU engine here"):
        flash_attention(Tensor(q, device=2), k, v)


# ---- checked runs of the kernel


@pytest.mark.exhaustive(each_value=())
@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 1), (2, 33, 31, 2, 1, 3), (1, 130, 65, 4, 2, 40)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (7, 3), "return_lse": True}], ids=str)
def test_a_checked_run_is_clean(shape: tuple[int, ...], mask: dict[str, Any], cpu_engine: Any) -> None:
    """No race, nothing out of bounds, nothing left unwritten; and only visible keys are read."""
    reports = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        reports.append(xray(self, grid, block, args, shared_mem))

    for stage in STRIDED:
        reports.clear()
        batch, n, n_kv, heads, kv_heads, d = shape
        d = -(-d // stage.head_dim_step) * stage.head_dim_step
        with kernel.launches_replaced(checked):
            flash_attention(*inputs(batch, n, n_kv, heads, kv_heads, d), **mask, stage=stage.name)
        report = reports[-1]
        assert not any(each.findings for each in reports)
        assert report.traffic["O"].written == 4 * batch * n * heads * d
        if len(reports) > 1:  # it reads what other launches made of K and V
            continue
        options = {name: mask[name] for name in mask if name != "return_lse"}
        seen = reference.visible(n, n_kv, **options)
        rows = stage.defines_for(d, n, batch * heads, uneven="causal" in mask)["BLOCK_M"]
        spans = [np.flatnonzero(seen[first : first + rows].any(axis=0)) for first in range(0, n, rows)]
        keys = sum(int(span[-1] - span[0] + 1) for span in spans if span.size)
        assert report.traffic["K"].read == report.traffic["V"].read == 4 * batch * heads * keys * d


@pytest.mark.parametrize("stage", STRIDED, ids=lambda stage: stage.name)
def test_offsets_beyond_two_to_the_31(stage: Stage, cpu_engine: Any) -> None:
    """The rows are so far apart that 32-bit offsets overflow. Only the pages that contain rows are touched."""
    n, d, step = 40, 8, 2**26 + 4
    assert n * step > 2**31
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = np.frombuffer(mmap.mmap(-1, 4 * n * step, flags=flags), np.float32)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no such address space: {error}")
    views = [
        np.lib.stride_tricks.as_strided(memory[64 * i :], (n, d), (4 * step, 4)).view(cpu_engine.ndarray)
        for i in range(4)
    ]
    arrays = [a[0, :, 0] for a in inputs(1, n, n, 1, 1, d)]
    for view, a in zip(views, arrays, strict=False):
        view[...] = a
    run, o = stage.prepare(*views[:3], causal=True, out=views[3])
    run()
    check("far apart", o, reference.attention(*arrays, causal=True))


def random_halves(*shape: int) -> Any:
    """Make normal numbers (1, rows, heads, head_dim) in float16, some rows at a time: float32 would fill memory."""
    a = cp.empty(shape, dtype=np.float16)
    for first in range(0, shape[1], 512):
        part = a[:, first : first + 512]
        part[...] = cp.random.standard_normal(part.shape, dtype=np.float32)
    return a


def check_last_rows_of_gradients(stage: str, n: int, heads: int, kv_heads: int, d: int = 128, last: int = 64) -> None:
    """Compare the last group of heads with float64: the last rows of dq, and of dk and dv, which no other rows see."""
    q, k, v, do = (random_halves(1, n, count, d) for count in (heads, kv_heads, kv_heads, heads))
    options = {"causal": True, "softmax_scale": 0.3}
    o, lse = flash_attention(q, k, v, **options, return_lse=True)
    got = flash_attention_backward(do, q, k, v, o, lse, **options, stage=stage)
    rows, group = slice(n - last, n), slice(heads - heads // kv_heads, heads)
    of_rows = [cp.asnumpy(a[0, rows, group].swapaxes(0, 1)).astype(np.float64) for a in (do, q, o, got[0])]
    keys = [cp.asnumpy(a[0, :, -1:].swapaxes(0, 1)).astype(np.float64) for a in (k, v)]
    want = reference.attention_backward(*of_rows[:2], *keys, **options)
    of_keys = [cp.asnumpy(a[0, rows, -1:].swapaxes(0, 1)).astype(np.float64) for a in got[1:]]
    exact = reference.attention(of_rows[1], *keys, **options), want[0], *(a[:, rows] for a in want[1:])
    for name, a, b in zip(("o", "dq", "dk", "dv"), (*of_rows[2:], *of_keys), exact, strict=True):
        check(f"{stage}, {q.size:,} elements of q: {name}", a, b, tolerance=0.01 * float(np.abs(b).max()))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("stage", ["backward_mma", "hopper_backward"])
def test_gradients_beyond_two_to_the_31(stage: str) -> None:
    """q, and the float32 sums of dq, have more elements than 31 bits can count: all of the last rows are beyond."""
    if BACKWARD[stage].why_not(head_dim=128, dtype="float16"):
        pytest.skip("needs a GPU of compute capability 9.0")
    n, heads, kv_heads, d = 16_500, 1025, 41, 128
    assert (n - 64) * heads * d > 2**31
    if cp.cuda.runtime.memGetInfo()[0] < 32e9:
        pytest.skip("32 GB of the GPU's memory are needed")
    try:
        check_last_rows_of_gradients(stage, n, heads, kv_heads, d)
    finally:
        forget()  # the scratch
        cp.get_default_memory_pool().free_all_blocks()

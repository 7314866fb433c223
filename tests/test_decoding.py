"""Decoding against float64: lengths, heads, pages, windows, new tokens; refused calls; bugs in the kernel."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import needs_nvrtc
from planted import Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import (
    check,
    compile_report,
    decoders,
    decoding,
    flash_attention_with_kvcache,
    forget,
    fp8,
    kernel,
    reference,
    rotary_and_projection,
    shared_prefix,
)
from helpers.attention.ladder import Stage, limits
from helpers.attention.ladder.kinds import DeviceArrays
from helpers.attention.ladder.score_mod import make_block_mask
from helpers.attention.ladder.stage import C_NAMES
from helpers.bench.studies import decoding as study
from helpers.device import cp
from helpers.lesson import shortcuts
from helpers.xray import xray

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
pytestmark = pytest.mark.skipif(limits.compute_capability() < 80, reason="needs compute capability 8.0")
NOWHERE = 2**30  # a page that does not exist


@dataclass(frozen=True)
class Case:
    """Sequences of these lengths, including the new tokens' keys, and the options of a call.

    page: keys per page, 0 for no pages. new: the call appends the new tokens' keys. freed: keys that no token sees any
    more are NaN, in pages that do not exist. e4m3: the caches are e4m3, with descales. d_v: V's head_dim; 0 for d.
    """

    lengths: tuple[int, ...] = (100, 1, 17, 260)
    dtype: str = "float16"
    d: int = 64
    heads: int = 8
    kv_heads: int = 2
    tokens: int = 1
    page: int = 0
    new: bool = False
    freed: bool = False
    window: tuple[int, int] | None = None
    causal: bool = True
    num_splits: int = 0
    softmax_scale: float | None = None
    room: int = 300
    seed: int = 0
    e4m3: bool = False
    d_v: int = 0

    @property
    def options(self) -> dict[str, Any]:
        names = "causal", "window", "softmax_scale", "num_splits"
        return {name: getattr(self, name) for name in names}

    def arrays(self) -> dict[str, np.ndarray]:
        """Make arrays: caches are NaN where there is no key, pages in random order, and tables end in invalid pages."""
        rng = np.random.default_rng(self.seed)
        batch, kind = len(self.lengths), TYPES[self.dtype]

        def normal(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) + 0.25).astype(kind)

        made = {"q": normal(batch, self.tokens, self.heads, self.d)}
        of_v = self.d_v or self.d
        rows = [normal(batch, self.room, self.kv_heads, d) for d in (self.d, of_v)]
        before = np.array(self.lengths, np.int32) - (self.tokens if self.new else 0)
        if self.new:
            made |= {"k": normal(batch, self.tokens, self.kv_heads, self.d)}
            made |= {"v": normal(batch, self.tokens, self.kv_heads, of_v)}
        for each in rows:
            for i, length in enumerate(before):
                each[i, length:] = np.nan
        made["cache_seqlens"] = before
        hole: float = np.nan
        if self.e4m3:
            hole, kind = 0x7F, np.uint8
            for i, name in enumerate("kv"):
                descale = rng.uniform(0.005, 0.02, (batch, self.kv_heads)).astype(np.float32)
                rows[i] = fp8.quantise(rows[i], descale[:, None, :, None])
                made[f"{name}_descale"] = descale
        if not self.page:
            return made | dict(zip(("k_cache", "v_cache"), rows, strict=True))
        pages = -(-self.room // self.page)
        table = rng.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages).astype(np.int32)
        for name, each in zip(("k_cache", "v_cache"), rows, strict=True):
            cache = np.full((batch * pages + 3, self.page, *each.shape[2:]), hole, kind)
            for i in range(batch):
                for j in range(self.room):
                    cache[table[i, j // self.page], j % self.page] = each[i, j]
            made[name] = cache
        for i, length in enumerate(self.lengths):
            table[i, -(-length // self.page) :] = NOWHERE
            if self.freed:
                first = max(length - self.tokens - self.window[0], 0)
                for name in ("k_cache", "v_cache"):
                    made[name][table[i, first // self.page], : first % self.page] = hole
                table[i, : first // self.page] = NOWHERE
        return made | {"block_table": table}

    def expected(self, arrays: Mapping[str, np.ndarray], **more: Any) -> tuple[np.ndarray, np.ndarray]:
        if self.freed:  # the same keys with all of them present
            return replace(self, freed=False).expected(replace(self, freed=False).arrays(), **more)
        if self.e4m3:
            return self._expected_of_e4m3(arrays, **more)
        options = {name: value for name, value in self.options.items() if name != "num_splits"}
        options["softmax_scale"] = more.pop("softmax_scale_of_reference", options["softmax_scale"])
        return reference.attention_with_kvcache(**arrays, **options, **more)

    def _expected_of_e4m3(self, arrays: Mapping[str, np.ndarray], **more: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the results of the bytes without descales, with the descales on Q and on the output instead."""
        of_k, of_v = (np.repeat(arrays[f"{name}_descale"], self.heads // self.kv_heads, axis=1) for name in "kv")
        plain = {name: a for name, a in arrays.items() if "descale" not in name}
        plain["q"] = arrays["q"].astype(np.float64) * of_k[:, None, :, None]
        for name in ("k_cache", "v_cache"):
            plain[name] = fp8.dequantise(arrays[name], dtype=np.float64)
        for name in "kv" if self.new else "":
            plain[name] = fp8.dequantise(self.new_bytes(name, arrays), dtype=np.float64)
        o, lse = replace(self, e4m3=False).expected(plain, **more)
        return o * of_v[:, None, :, None], lse

    @staticmethod
    def new_bytes(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return k or v as e4m3."""
        return fp8.quantise(arrays[name], arrays[f"{name}_descale"][:, None, :, None])

    def cache_after(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the caches with the new tokens in their places."""
        after = {name: arrays[name].copy() for name in ("k_cache", "v_cache")}
        for i, before in enumerate(arrays["cache_seqlens"]):
            for j in range(self.tokens if self.new else 0):
                at = before + j
                where = (arrays["block_table"][i, at // self.page], at % self.page) if self.page else (i, at)
                for name in "kv":
                    new = self.new_bytes(name, arrays) if self.e4m3 else arrays[name]
                    after[f"{name}_cache"][where] = new[i, j]
        return after


def tolerance_of(case: Case) -> float:
    return {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}[case.dtype]


def compare(case: Case, got: Mapping[str, Any], arrays: Mapping[str, np.ndarray], **more: Any) -> None:
    """Compare o, lse and the caches with the expected ones."""
    o, lse = case.expected(arrays, **more)
    check.check("o", cp.asnumpy(got["o"]).astype(np.float64), o, tolerance=tolerance_of(case))
    check.check(
        "lse", cp.asnumpy(got["lse"]), lse, tolerance=2e-5 * max(1.0, np.abs(lse[np.isfinite(lse)]).max(initial=1))
    )
    for name, want in case.cache_after(arrays).items():
        bits = f"uint{8 * want.itemsize}"
        assert np.array_equal(cp.asnumpy(got[name]).view(bits), want.view(bits)), f"{name} is not as it should be"


def run(case: Case, source: str | None = None, *, stage: str | None = None, launches: int = 2) -> None:
    """Launch twice with the same tickets, and compare."""
    arrays = case.arrays()
    there = on_device(arrays)
    options = decoding.DecodeOptions(**case.options, return_lse=True, stage=stage)
    planned, every = decoding.plan(there, options, source=source)
    for _ in range(launches):
        for name in ("o", "lse"):
            every[name][...] = np.nan
        planned.bind(every)()
        compare(case, every, arrays)
        if "tickets" in every:
            assert not cp.asnumpy(every["tickets"]).any(), "a ticket is not reset"


def on_device(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cp.asarray(a) for name, a in arrays.items()}


def check_call(
    case: Case, means: Mapping[str, Any] | None = None, arrays: Any = None, *, where: Any = cp.asarray, **options: Any
) -> tuple[Any, Any]:
    """Call the entry point, compare, and return o and lse.

    means: the reference's options, if they differ from the call's, which may be arrays. arrays: replace those of
    `Case.arrays`.
    """
    given = {name: where(a) for name, a in (arrays or case.arrays()).items()}
    there = {name: where(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}
    o, lse = flash_attention_with_kvcache(**given, **case.options, **there, return_lse=True)
    assert type(o) is type(given["q"]) and o.dtype == given["q"].dtype
    compare(case, {**given, "o": o, "lse": lse}, arrays or case.arrays(), **(options if means is None else means))
    return o, lse


def x_rayed(case: Case, source: str | None = None, stage: str | None = None, **more: Any) -> Any:
    """Return the report of a checked run of the first launch, and the arrays. Skips on a GPU."""
    if device.ON_GPU:
        pytest.skip("the same on the CPU engine")
    arrays = case.arrays()
    there = {name: engine.asarray(a) for name, a in (arrays | more).items()}
    options = decoding.DecodeOptions(**case.options, return_lse=True, stage=stage)
    planned, every = decoding.plan(there, options, source=source)
    launch, compiled = planned.launches[0], planned.kernels[planned.launches[0].kernel]
    return xray(compiled, launch.grid, launch.block, launch.arguments(every), launch.shared_bytes), every, arrays


def findings(report: Any) -> list[str]:
    """Return the findings without unwritten elements: caches are outputs if there are new keys; `compare` checks O."""
    return [str(each) for each in report.findings if not str(each).startswith("never written")]


PLAIN = Case()
CASES = {
    "plain": PLAIN,
    "no sequence has a key": Case(lengths=(0, 0)),
    "empty among others": Case(lengths=(0, 65, 0, 1)),
    "tile - 1": Case(lengths=(15, 31, 63, 127)),
    "tile": Case(lengths=(16, 32, 64, 128)),
    "tile + 1": Case(lengths=(17, 33, 65, 129)),
    "mixed lengths": Case(lengths=tuple(range(1, 41)), room=40),
    "many sequences": Case(lengths=(*[3] * 70, 250), kv_heads=1, heads=2),
    "more units than blocks": Case(lengths=(20,) * 90, heads=6, kv_heads=3),
    "one head each": Case(heads=3, kv_heads=3),
    "one head for all": Case(heads=16, kv_heads=1),
    "five heads share one": Case(heads=10),
    "more rows than a tile": Case(heads=40, tokens=3),
    "tokens": Case(tokens=4, lengths=(100, 4, 17, 260)),
    "more tokens than keys": Case(tokens=6, lengths=(100, 3, 0, 260)),
    "tokens see later ones": Case(tokens=4, causal=False),
    "new token": Case(new=True),
    "new tokens": Case(new=True, tokens=5, lengths=(100, 5, 17, 300)),
    "new tokens in pages": Case(new=True, tokens=5, lengths=(100, 5, 17, 300), page=16),
    "new tokens, more rows than a tile": Case(new=True, tokens=5, lengths=(100, 5, 17, 300), heads=12),
    "window": Case(window=(20, 0)),
    "window of tokens": Case(window=(20, 0), tokens=5, lengths=(100, 5, 17, 260)),
    "window of new tokens in pages": Case(window=(33, 0), tokens=5, lengths=(100, 5, 17, 300), new=True, page=8),
    "freed pages": Case(window=(20, 0), page=16, freed=True),
    "window to both sides": Case(window=(20, 2), tokens=5, causal=False),
    "window to the right": Case(window=(-1, 1), tokens=5, causal=False),
    "scale": Case(softmax_scale=0.02),
    "scale of 0": Case(softmax_scale=0.0),
    "large scores": Case(softmax_scale=4.0),
    **{f"pages of {page}": Case(page=page) for page in (1, 2, 16, 48, 64, 75, 256)},
    "new tokens in pages of 12": Case(new=True, tokens=5, lengths=(100, 5, 17, 300), page=12),
    **{f"{splits} splits": Case(num_splits=splits) for splits in (1, 2, 3, 7, 40)},
    "3 splits of tokens in pages": Case(num_splits=3, tokens=3, page=16, lengths=(100, 3, 17, 260)),
    **{f"{dtype}, {d}": Case(dtype=dtype, d=d) for dtype in TYPES for d in (64, 128, 256)},
    "float32 in pages": Case(dtype="float32", page=16, tokens=3, new=True, lengths=(100, 3, 17, 260)),
    "e4m3": Case(e4m3=True),
    **{f"e4m3, {d}": Case(e4m3=True, dtype="bfloat16", d=d) for d in (64, 128, 256)},
    "new tokens in pages of e4m3": Case(e4m3=True, new=True, tokens=5, lengths=(100, 5, 17, 300), page=16),
    "freed pages of e4m3": Case(e4m3=True, window=(20, 0), page=16, freed=True),
    "3 splits of e4m3": Case(e4m3=True, num_splits=3, heads=40, tokens=3),
    "192 and 128": Case(d=192, d_v=128, dtype="bfloat16", tokens=3),
    "192 and 128, new tokens in pages": Case(
        d=192, d_v=128, new=True, tokens=5, lengths=(100, 5, 17, 300), page=16, heads=12
    ),
    "192 and 128 of e4m3, new tokens in pages": Case(
        d=192, d_v=128, e4m3=True, new=True, tokens=5, lengths=(100, 5, 17, 300), page=12
    ),
    "3 splits of 96 and 112, float32": Case(d=96, d_v=112, dtype="float32", num_splits=3),
    "80 and 256": Case(d=80, d_v=256, lengths=(40, 17)),
    "bfloat16 in pages": Case(dtype="bfloat16", d=128, page=16, tokens=3, new=True, lengths=(100, 3, 17, 260)),
}


@pytest.mark.parametrize("name", CASES)
def test_float64_agrees(name: str) -> None:
    run(CASES[name])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_float64_agrees_on_lengths_of_any_kind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for i in range(6):
        tokens = int(rng.integers(1, 4))
        lengths = tuple(int(n) for n in rng.integers(tokens, 200, rng.integers(1, 9)))
        of_heads = {"heads": 2 * int(rng.integers(1, 12)), "tokens": tokens, "new": bool(i % 2)}
        of_cut = {"page": int(rng.choice([0, 1, 4, 32])), "num_splits": int(rng.choice([0, 0, 4]))}
        run(Case(lengths, **of_heads, **of_cut, seed=seed + i))


# ---- the entry point


@pytest.mark.parametrize("name", ["plain", "new tokens in pages", "3 splits of tokens in pages", "bfloat16, 128"])
@pytest.mark.parametrize("where", [np.asarray, cp.asarray], ids=["numpy", "device"])
def test_the_entry_point_takes_arrays_of_either_kind(name: str, where: Any) -> None:
    """The second call has a known shape, and uses the first one's tickets."""
    case = CASES[name]
    for _ in range(2):
        o, _ = check_call(case, where=where)
    given = {name: where(a) for name, a in case.arrays().items()}
    alone = flash_attention_with_kvcache(**given, **case.options)
    assert np.array_equal(cp.asnumpy(alone).view(np.uint16), cp.asnumpy(o).view(np.uint16))


@pytest.mark.parametrize("name", ["new tokens in pages", "a prefix and a tree"])
@pytest.mark.parametrize("dtype", TYPES)
def test_tensors(dtype: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    from helpers import torch_attention

    case = replace(CASES.get(name, Case(tokens=5, lengths=(100, 7))), dtype=dtype)
    more = {} if name in CASES else prefix_of(case, 40) | {"tree": tree_of(case)}
    for where in ["cpu", *(["cuda"] if device.ON_GPU else [])]:
        arrays = case.arrays()
        given = {
            n: torch.from_numpy(a if a.dtype.kind == "i" else a.astype(np.float32)) for n, a in (arrays | more).items()
        }
        given = {n: a.to(where, getattr(torch, dtype) if a.is_floating_point() else None) for n, a in given.items()}
        o, lse = torch_attention.flash_attention_with_kvcache(**given, **case.options, return_lse=True)
        assert o.dtype == given["q"].dtype and o.device == given["q"].device == lse.device
        seen = {"o": o, "lse": lse, "k_cache": given["k_cache"], "v_cache": given["v_cache"]}
        host = {n: a.float().cpu().numpy().astype(TYPES[dtype] if n != "lse" else None) for n, a in seen.items()}
        nan = {n: np.where(np.isnan(a), a.dtype.type(np.nan), a) for n, a in host.items()}
        compare(case, nan, arrays, **more)  # (conversions keep no payload)
        for each in {"q", *more} - {"tree"}:
            with pytest.raises(TypeError, match=f"{each} requires grad"):
                torch_attention.flash_attention_with_kvcache(**given | {each: given[each].clone().requires_grad_()})


def test_calls_of_more_and_of_fewer_parts_share_their_scratch() -> None:
    for splits in (2, 40, 0, 3):
        check_call(replace(PLAIN, num_splits=splits))


@pytest.mark.skipif(not device.ON_GPU, reason="the CPU engine has no graphs")
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_graph_replays_with_other_lengths(library: str) -> None:
    """A capture reads no lengths, and its tickets are 0 again after each replay."""
    torch = pytest.importorskip("torch") if library == "torch" else None
    case = replace(CASES["new tokens in pages"], num_splits=0)
    other = replace(case, lengths=(17, 300, 5, 100), seed=1)
    given = on_device(case.arrays())
    arrays = given if torch is None else {name: torch.from_dlpack(a) for name, a in given.items()}
    flash_attention_with_kvcache(**arrays, return_lse=True)
    if torch is None:
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            flash_attention_with_kvcache(**arrays, return_lse=True)
            stream.begin_capture()
            o, lse = flash_attention_with_kvcache(**arrays, return_lse=True)
            graph = stream.end_capture()
            replay = lambda: graph.launch(stream)  # noqa: E731
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = flash_attention_with_kvcache(**arrays, return_lse=True)
        o, lse = map(cp.from_dlpack, outputs)  # outside, as CuPy makes another stream wait
        replay = graph.replay
    for each in (case, other, case):
        for name, a in each.arrays().items():
            given[name][...] = cp.asarray(a)
        cp.cuda.Device().synchronize()
        replay()
        cp.cuda.Device().synchronize()
        compare(each, {**given, "o": o, "lse": lse}, each.arrays())


def test_views_are_read_where_they_are() -> None:
    """Caches (batch, kv_heads, seq, d) with exchanged axes, and rows of q with a gap between them, which is copied."""
    case, arrays = PLAIN, PLAIN.arrays()
    there = on_device(arrays)
    for name in ("k_cache", "v_cache"):
        there[name] = cp.asarray(np.ascontiguousarray(arrays[name].swapaxes(1, 2))).swapaxes(1, 2)
    wide = np.zeros((*arrays["q"].shape[:-1], 2 * case.d), arrays["q"].dtype)
    wide[..., ::2] = arrays["q"]
    there["q"] = cp.asarray(wide)[..., ::2]
    o, lse = flash_attention_with_kvcache(**there, return_lse=True)
    compare(case, {**there, "o": o, "lse": lse}, arrays)


def test_nothing_to_see() -> None:
    made = PLAIN.arrays()
    o, lse = flash_attention_with_kvcache(
        *(made["q"], made["k_cache"][:, :0], made["v_cache"][:, :0]),
        cache_seqlens=np.zeros_like(made["cache_seqlens"]),
        return_lse=True,
    )
    assert not o.any() and (lse == -np.inf).all()
    o = flash_attention_with_kvcache(**{**made, "q": made["q"][:, :0]})
    assert o.shape == (4, 0, 8, 64)


def test_lengths_beyond_the_cache_count_as_the_cache_s() -> None:
    """The host does not read these lengths, so the kernel itself must stay within the cache."""
    case = Case(lengths=(300, 0, 300))
    given = case.arrays() | {"cache_seqlens": np.array([300 + 5, -7, 2**31 - 1], np.int32)}
    o = flash_attention_with_kvcache(**given, checked=False)
    expected, _ = case.expected(case.arrays())
    check.check("o", o.astype(np.float64), expected, tolerance=tolerance_of(case))


# ---- checks when the host reads lengths and tables

IN_PAGES = Case(lengths=(40, 7, 18, 33), page=8, new=True, tokens=2, room=48)


def changed(name: str, *values: tuple[Any, int], case: Case = IN_PAGES) -> dict[str, np.ndarray]:
    """Return the case's arrays, with these elements of one of them changed."""
    arrays = case.arrays()
    for where, value in values:
        arrays[name][where] = value
    return arrays


def of_other(where: tuple[int, int], other: tuple[int, int]) -> dict[str, np.ndarray]:
    """Replace an entry of the block table by another sequence's."""
    return changed("block_table", (where, IN_PAGES.arrays()["block_table"][other]))


BREAKS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "below 0": (changed("cache_seqlens", (2, -1)), r"cache_seqlens\[2\] = -1; a sequence has 0"),
    "a full cache": (changed("cache_seqlens", (0, 47)), r"cache_seqlens\[0\] = 47 and 2 new: more keys than the 48"),
    "full, not in pages": (
        changed("cache_seqlens", (1, 300), case=CASES["new token"]),
        r"cache_seqlens\[1\] = 300 and 1 new: more keys than the 300 .* overwritten",
    ),
    "beyond the cache": (changed("cache_seqlens", (3, 301), case=PLAIN), r"cache_seqlens\[3\] = 301: more keys than"),
    "no such page": (changed("block_table", ((2, 1), 27)), r"block_table\[2, 1\] = 27, .* the cache has 27 pages"),
    "page -1": (changed("block_table", ((0, 4), -1)), r"block_table\[0, 4\] = -1, where keys of sequence 0 from 32 on"),
    "two writers of a row": (
        of_other((1, 0), (0, 4)),
        "block_table: sequence 0 writes its key 38 into row 6 .* key 6: ",
    ),
    "a page that another one reads": (of_other((0, 1), (1, 0)), "sequence 1 writes its key 5 into row 5 .* 0 reads as"),
    "one page twice": (
        of_other((2, 0), (2, 2)),
        "sequence 2 writes its key 16 into row 0 .* sequence 2 reads as its key 0",
    ),
}


@pytest.mark.parametrize("again", [False, True], ids=["first call", "known shapes"])
@pytest.mark.parametrize("name", BREAKS)
def test_lengths_and_tables_are_checked(name: str, again: bool) -> None:
    """The engine checks them in every call, a GPU on request; nothing is written."""
    arrays, message = BREAKS[name]
    given = on_device(arrays)
    if again:
        case = {BREAKS["full, not in pages"][0]["q"].shape: CASES["new token"]}.get(arrays["q"].shape, IN_PAGES)
        case = PLAIN if "k" not in arrays else case
        flash_attention_with_kvcache(**on_device(case.arrays()), checked=True)
    for how in [True, *([] if device.ON_GPU else [None])]:
        with pytest.raises(ValueError, match=message):
            flash_attention_with_kvcache(**given, checked=how)
    for cache in ("k_cache", "v_cache"):
        assert np.array_equal(cp.asnumpy(given[cache]).view(np.uint16), arrays[cache].view(np.uint16))


def test_what_is_shared_and_only_read_is_right() -> None:
    """A prefix in pages of two sequences, entries that no key needs, a window with freed pages behind it."""
    arrays = of_other((2, 0), (0, 0))
    expected = IN_PAGES.expected(arrays)
    o, lse = flash_attention_with_kvcache(**arrays, return_lse=True, checked=True)
    check.check("o", o.astype(np.float64), expected[0], tolerance=tolerance_of(IN_PAGES))
    check.check("lse", lse, expected[1], tolerance=1e-4)
    case = replace(IN_PAGES, window=(9, 0), freed=True)
    flash_attention_with_kvcache(**case.arrays(), window=(9, 0), checked=True)
    first_needed = case.arrays()
    first_needed["block_table"][0, 3] = NOWHERE  # token 0 is at key 38, and sees keys from 29 on
    with pytest.raises(ValueError, match=r"block_table\[0, 3\]"):
        flash_attention_with_kvcache(**first_needed, window=(9, 0), checked=True)
    whole = case.arrays()
    with pytest.raises(ValueError, match=r"block_table\[0, 0\]"):
        flash_attention_with_kvcache(**whole, checked=True)


def test_a_full_cache_unchecked_replaces_its_last_keys() -> None:
    case = Case(lengths=(20, 21), room=21, new=True, dtype="float32")
    arrays = case.arrays()
    arrays["cache_seqlens"][1] = 21
    given = on_device(arrays)
    flash_attention_with_kvcache(**given, checked=False)
    assert np.array_equal(cp.asnumpy(given["k_cache"])[1, 20], arrays["k"][1, 0])


@pytest.mark.skipif(not device.ON_GPU, reason="the CPU engine has no graphs")
def test_a_graph_cannot_be_checked() -> None:
    given, stream = on_device(PLAIN.arrays()), cp.cuda.Stream(non_blocking=True)
    with stream:
        flash_attention_with_kvcache(**given, checked=True)
        stream.begin_capture()
        with pytest.raises(ValueError, match="checked=True reads cache_seqlens on the host"):
            flash_attention_with_kvcache(**given, checked=True)
        stream.end_capture()


def read_only(a: np.ndarray) -> np.ndarray:
    a.flags.writeable = False
    return a


def test_caches_that_cannot_be_written_are_refused() -> None:
    case = CASES["new token"]
    for name in ("k_cache", "v_cache"):
        arrays = case.arrays()
        with pytest.raises(ValueError, match=f"{name} is read-only"):
            flash_attention_with_kvcache(**arrays | {name: read_only(arrays[name])})
        writeable = case.arrays()[name]
        shared = np.lib.stride_tricks.as_strided(writeable, strides=(0, *writeable.strides[1:]))
        with pytest.raises(ValueError, match=f"{name} has shape .* one in memory"):
            flash_attention_with_kvcache(**case.arrays() | {name: shared})
        if not device.ON_GPU:
            there = {each: cp.asarray(a) for each, a in arrays.items()}
            there[name] = engine.ndarray(shared.shape, shared.dtype, there[name].data, (0, *there[name].strides[1:]))
            with pytest.raises(ValueError, match=f"{name} has shape .* one in memory"):
                flash_attention_with_kvcache(**there)
    for where in (np.asarray, cp.asarray):
        given = {name: where(a) for name, a in case.arrays().items()}
        with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
            flash_attention_with_kvcache(**given | {"v_cache": given["k_cache"]}, checked=True)
        same = given | {"v_cache": given["k_cache"], "v": given["k"]}
        flash_attention_with_kvcache(**same, checked=True)  # writing the same value twice is allowed
        both = where(np.zeros((4, 300, 4, 64), np.float16))  # heads of K and V in one row, or alternating
        for k_heads, v_heads in ((slice(2), slice(2, 4)), (slice(0, 4, 2), slice(1, 4, 2))):
            caches = {"k_cache": both[:, :, k_heads], "v_cache": both[:, :, v_heads]}
            flash_attention_with_kvcache(**given | caches, checked=True)
        with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
            flash_attention_with_kvcache(
                **given | {"k_cache": both[:, :, :2], "v_cache": both[:, :, 1:3]}, checked=True
            )
    arrays = PLAIN.arrays()  # nothing is written, so they may be anything
    o = flash_attention_with_kvcache(**{name: read_only(a) for name, a in arrays.items()})
    check.check("o", o.astype(np.float64), PLAIN.expected(arrays)[0], tolerance=tolerance_of(PLAIN))


def test_more_parts_than_keys_are_as_many_as_keys_fill() -> None:
    """num_splits is a maximum: parts without a key would take scratch, 40 GB of it here."""
    outputs = [check_call(replace(PLAIN, num_splits=splits))[0] for splits in (10**7, np.int64(2**40), 19)]
    for o in outputs:
        assert np.array_equal(cp.asnumpy(o), cp.asnumpy(outputs[2]))


class OutOfMemoryError(RuntimeError):
    """PyTorch's exception has this name and base class."""


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
def test_parts_that_memory_cannot_hold_name_num_splits(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = DeviceArrays
    empty = kind.empty

    def full(self: Any, shape: Any, dtype: Any, like: Any) -> Any:
        if len(shape) == 1:  # scratch
            raise error("no 40960000000 bytes")
        return empty(self, shape, dtype, like)

    forget()
    monkeypatch.setattr(kind, "empty", full)
    given = on_device(PLAIN.arrays())
    with pytest.raises(MemoryError, match=r"num_splits = 7: partial_o, .* fewer parts"):
        flash_attention_with_kvcache(**given, num_splits=7)
    with pytest.raises(error, match=r"^no 40960000000 bytes"):  # num_splits is not given
        flash_attention_with_kvcache(**given)


def test_score_functions_and_sinks() -> None:
    case = Case(tokens=3, lengths=(100, 3, 0, 260), heads=8, page=16)
    arrays, rng = case.arrays(), np.random.default_rng(1)
    sinks = rng.standard_normal(8).astype(np.float32)
    cap = "cap * tanhf(score / cap) - 0.01f * (head + 1) * distance"
    for splits in (0, 4):
        given = on_device(arrays)
        how: dict[str, Any] = {"score_mod": cap, "mod_args": {"cap": 5.0}, "num_splits": splits}
        o, lse = flash_attention_with_kvcache(**given, **how, sinks=cp.asarray(sinks), return_lse=True)
        for i, length in enumerate(case.lengths):
            pages = arrays["block_table"][i, : -(-length // 16)]
            k, v = (
                arrays[name][pages].reshape(-1, 2, 64)[:length].astype(np.float64) for name in ("k_cache", "v_cache")
            )
            for head in range(8):
                s = arrays["q"][i, :, head].astype(np.float64) @ k[:, head // 4].T / 8
                distance = np.arange(3)[:, None] + length - 3 - np.arange(length)
                s = 5 * np.tanh(s / 5) - 0.01 * (head + 1) * distance
                s[distance < 0] = -np.inf
                weights = np.exp(s)
                total = weights.sum(1) + np.exp(sinks[head])
                want = weights @ v[:, head // 4] / total[:, None]
                check.check("o", cp.asnumpy(o)[i, :, head].astype(np.float64), want, tolerance=3e-3)
                check.check("lse", cp.asnumpy(lse)[i, head], np.log(total), tolerance=1e-4)


@pytest.mark.parametrize("of_each", [False, True], ids=["all sequences", "each sequence"])
def test_slopes(of_each: bool) -> None:
    case = Case(tokens=3, lengths=(100, 3, 260), new=True, window=(50, 0), num_splits=3)
    arrays, batch = case.arrays(), len(case.lengths)
    slopes = np.random.default_rng(1).random((batch, 8) if of_each else 8, np.float32)
    given = on_device(arrays)
    o, lse = flash_attention_with_kvcache(**given, **case.options, alibi_slopes=cp.asarray(slopes), return_lse=True)
    for i in range(batch):
        alone = {name: a[i : i + 1] for name, a in arrays.items()}
        one = replace(case, lengths=case.lengths[i : i + 1])
        got = {"o": o[i : i + 1], "lse": lse[i : i + 1], **{n: given[n][i : i + 1] for n in ("k_cache", "v_cache")}}
        compare(one, got, alone, alibi_slopes=slopes[i] if of_each else slopes)


@pytest.mark.parametrize(
    "d, room_d, dtype", [(80, 80, "float16"), (80, 128, "float16"), (110, 128, "float32"), (192, 256, "bfloat16")]
)
def test_rows_of_other_lengths(d: int, room_d: int, dtype: str) -> None:
    """The columns of a wider cache are left unchanged, except that rows without whole chunks get zeros.

    A tree, a prefix and a negative scale work too.
    """
    case = Case(tokens=3, lengths=(100, 3, 40), new=True, page=16, d=d, dtype=dtype, heads=4, softmax_scale=-0.2)
    arrays, tree, prefix = case.arrays(), tree_of(case), prefix_of(case, 20)
    given = dict(arrays)
    for name in ("k_cache", "v_cache"):
        wide = np.full((*arrays[name].shape[:3], room_d), np.nan, arrays[name].dtype)
        wide[..., :d] = arrays[name]
        if d == 110:
            wide[..., d:][~np.isnan(arrays[name][..., :1].astype(np.float32))[..., 0]] = 0
        given[name] = cp.asarray(wide)
    there = on_device(given)
    more = {name: cp.asarray(a) for name, a in (prefix | {"tree": tree}).items()}
    o, lse = flash_attention_with_kvcache(**there, **case.options, **more, return_lse=True)
    assert o.shape == arrays["q"].shape
    narrow = {name: np.ascontiguousarray(cp.asnumpy(there[name])[..., :d]) for name in ("k_cache", "v_cache")}
    compare(case, {**narrow, "o": o, "lse": lse}, arrays, **prefix, tree=tree)
    if d != 110:
        assert np.isnan(cp.asnumpy(there["k_cache"])[..., d:].astype(np.float32)).all()
    default = replace(case, softmax_scale=None)
    there = on_device(given)
    o, lse = flash_attention_with_kvcache(**there, **default.options, return_lse=True)
    compare(default, {**narrow, "o": o, "lse": lse}, arrays)
    empty = {name: cp.asarray(a) for name, a in (given | {"block_table": np.zeros((3, 0), np.int32)}).items()}
    empty = {name: a for name, a in empty.items() if name not in "kv"} | {"cache_seqlens": cp.zeros(3, dtype=np.int32)}
    assert flash_attention_with_kvcache(**empty).shape == arrays["q"].shape


def test_int64_lengths_and_tables() -> None:
    """They give the same bits, also as views with gaps, and are checked unchanged."""
    case, tree = Case(tokens=3, lengths=(100, 3, 40), page=16), np.array([-1, 0, 0])
    given = {name: cp.asarray(a) for name, a in (case.arrays() | {"tree": tree.astype(np.int32)}).items()}
    want = flash_attention_with_kvcache(**given)
    indices = {name: given[name].astype(np.int64) for name in ("cache_seqlens", "block_table", "tree")}
    gaps = cp.zeros((3, 2 * indices["block_table"].shape[1]), dtype=np.int64)
    gaps[:, ::2] = indices["block_table"]
    for table in (indices["block_table"], gaps[:, ::2]):
        got = flash_attention_with_kvcache(**{**given, **indices, "block_table": table})
        assert np.array_equal(cp.asnumpy(got).view(np.uint16), cp.asnumpy(want).view(np.uint16))
    indices["cache_seqlens"][1] = 2**32 + 3
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] = 4294967299"):
        flash_attention_with_kvcache(**{**given, **indices}, checked=True)


@pytest.mark.parametrize("with_scores", [False, True])
def test_a_mask_mod(with_scores: bool) -> None:
    case = Case(tokens=3, lengths=(100, 3, 40), page=16)
    arrays, rng = case.arrays(), np.random.default_rng(2)
    document = rng.integers(0, 3, 300).astype(np.int32)
    how = {"score_mod": "score + 0.5f"} if with_scores else {}
    text, args = "document[kv_idx] == document[q_idx]", {"document": cp.asarray(document)}
    for mask in (text, make_block_mask(text, args)):
        given = on_device(arrays)
        more = how | ({"mod_args": args} if mask is text else {})
        o, lse = flash_attention_with_kvcache(**given, **more, mask_mod=mask, return_lse=True)
        for i, n in enumerate(case.lengths):
            alone = {**arrays, **{name: arrays[name][i : i + 1] for name in ("q", "cache_seqlens", "block_table")}}
            one = replace(case, lengths=(n,))
            bias = document[:n] == document[n - 3 : n, None]
            got = {"o": o[i : i + 1], "lse": lse[i : i + 1] - 0.5 * with_scores}
            compare(one, got | {n: given[n] for n in ("k_cache", "v_cache")}, alone, bias=bias)


ROTATED = {
    "all columns": (Case(new=True, tokens=5, lengths=(100, 5, 17, 300)), 64, False),
    "some, interleaved": (Case(new=True, tokens=3, lengths=(100, 3), d=128, dtype="bfloat16", page=16), 32, True),
    "float32, 192 and 128": (Case(new=True, tokens=2, lengths=(40, 9), d=192, d_v=128, dtype="float32"), 64, False),
    "e4m3": (Case(new=True, tokens=2, lengths=(40, 9), e4m3=True, page=12), 32, False),
    "one token, a negative scale": (Case(new=True, lengths=(40, 1), softmax_scale=-0.3), 64, False),
}


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotary_embedding(name: str) -> None:
    """q and the keys that go into the cache are rotated by their positions; twice, because scratch is kept."""
    case, rotary_dim, interleaved = ROTATED[name]
    arrays = case.arrays()
    cos, sin = rotary_and_projection.cos_sin(300, rotary_dim)
    positions = arrays["cache_seqlens"][:, None] + np.arange(case.tokens, dtype=np.int32)
    how: dict[str, Any] = {"interleaved": interleaved, "positions": (positions, positions)}
    q, k = map(cp.asnumpy, rotary_and_projection.rotary(arrays["q"], arrays["k"], cos, sin, **how))
    tables = {"rotary_cos": cp.asarray(cos), "rotary_sin": cp.asarray(sin), "rotary_interleaved": interleaved}
    for _ in range(2):
        given = on_device(arrays)
        o, lse = flash_attention_with_kvcache(**given, **case.options, **tables, return_lse=True)
        compare(case, {**given, "o": o, "lse": lse}, {**arrays, "q": q, "k": k})


def test_rotary_embeddings_share_scratch() -> None:
    """Halves are followed by floats on one stream; other tables get their own kernels."""
    forget()
    for name in ("all columns", "float32, 192 and 128"):
        test_a_rotary_embedding(name)
    case = ROTATED["all columns"][0]
    for rotary_dim in (64, 32):
        cos, sin = map(cp.asarray, rotary_and_projection.cos_sin(300, rotary_dim))
        given = on_device(case.arrays())
        flash_attention_with_kvcache(**given, rotary_cos=cos, rotary_sin=sin)
        there = cp.asnumpy(given["k_cache"])[0, 95, :, rotary_dim:]
        assert np.array_equal(there, case.arrays()["k"][0, 0, :, rotary_dim:])


def test_a_rotary_embedding_has_as_many_threads_as_its_kernel_documents() -> None:
    rows = np.zeros((2, 40, 10, 64), np.float16)
    arrays = {"q": rows[..., :8, :], "k_cache": np.zeros((2, 96, 2, 64), np.float16), "k": rows[..., 8:, :].copy()}
    arrays |= {"v_cache": arrays["k_cache"].copy(), "v": arrays["k"], "cache_seqlens": np.zeros(2, np.int32)}
    arrays |= zip(("rotary_cos", "rotary_sin"), rotary_and_projection.cos_sin(96, 64), strict=True)
    with kernel.built_when_launched():
        planned, _ = decoding.plan(on_device(arrays), decoding.DecodeOptions())
    threads_of_a_row = (64 * 2 // 16 + 1) // 2
    assert planned.launches[0].grid == (-(-40 * 8 * threads_of_a_row // 256), 2, 2)


# ---- a shared prefix, and trees of drafts


def prefix_of(case: Case, keys: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shape = keys, case.kv_heads, case.d
    return {name: (rng.standard_normal(shape) + 0.25).astype(TYPES[case.dtype]) for name in ("prefix_k", "prefix_v")}


def tree_of(case: Case, *shape: int) -> np.ndarray:
    """Make a tree in which each token follows any earlier one, or none."""
    return (
        np.random.default_rng(5).integers(-1, np.maximum(np.arange(case.tokens), 0), shape or case.tokens).astype("i4")
    )


WRONG = (check.CheckFailed, AssertionError, engine.LaunchError)
PREFIXED = {
    "one token": Case(lengths=(100, 0, 17)),
    "tokens": Case(lengths=(100, 4, 17), tokens=3, heads=6, kv_heads=1),
    "new tokens in pages": Case(lengths=(100, 3, 40), tokens=3, new=True, page=16),
    "splits of float32": Case(lengths=(100, 9), dtype="float32", num_splits=3, softmax_scale=0.3),
    "bfloat16, 128": Case(lengths=(60, 1), dtype="bfloat16", d=128, heads=4, kv_heads=4),
}


@pytest.mark.exhaustive(one_of_each=lambda keys: keys == 150)
@pytest.mark.parametrize("rows_of_parts", [0, 1000], ids=["by flash_attention", "by parts"])
@pytest.mark.parametrize("keys", [0, 1, 150])
@pytest.mark.parametrize("name", PREFIXED)
def test_a_prefix_of_all_sequences(name: str, keys: int, rows_of_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "ROWS_OF_PARTS", rows_of_parts)
    monkeypatch.setattr(shared_prefix, "KEYS_OF_A_PART", 50)  # 150 keys are three parts
    case, where = PREFIXED[name], np.asarray if keys == 150 else cp.asarray
    prefix = prefix_of(case, keys)
    o, _ = check_call(case, where=where, **prefix)
    given = {name: where(a) for name, a in (case.arrays() | prefix).items()}
    alone = flash_attention_with_kvcache(**given, **case.options)
    assert np.array_equal(cp.asnumpy(alone).view("u1"), cp.asnumpy(o).view("u1"))


JOIN_BUGS = (
    Bug("a part is left out", "merge(params.parts + 1,", "merge(params.parts,"),
    Bug("parts count alike", "LOG2_E * l, 1.0f", "0.0f, 1.0f"),
    Bug("the first part for all", "O_prefix + (i - 1) * params.o_part", "O_prefix"),
    Bug("its weights for all", "lse_prefix[(i - 1) * params.lse_part]", "lse_prefix[0]"),
    Bug("lse of another token", "* N + row % N", "* N"),
    Bug("an empty part has NaN", "if (l == NEG_INF) return", "if (false) return"),
    Bug("nothing but the lse", "store_columns(o, c, x);", ""),
    Bug("the lse stays", "if (c == 0) *own", "if (c < 0) *own"),
)


@pytest.mark.exhaustive(one_of_each=lambda each: each.name == "a part is left out")
@pytest.mark.parametrize("each", JOIN_BUGS, ids=lambda each: each.name)
def test_planted_bugs_in_the_join_are_found(each: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "ROWS_OF_PARTS", 0)
    monkeypatch.setattr(shared_prefix, "KEYS_OF_A_PART", 50)
    monkeypatch.setattr(shared_prefix, "JOIN", each.plant(kernel.source(shared_prefix.JOIN)))
    case = replace(PREFIXED["tokens"], lengths=(100, 4, 0))
    with pytest.raises(WRONG):
        check_call(case, **prefix_of(case, 150))


def test_a_prefix_with_sinks_and_a_function_of_the_score() -> None:
    case, sinks = Case(lengths=(100, 0, 17)), np.random.default_rng(1).standard_normal(8).astype(np.float32)
    prefix = prefix_of(case, 40)
    check_call(case, **prefix, sinks=sinks)
    means = prefix | {"softmax_scale_of_reference": 0.5 / 8}
    check_call(case, means, **prefix, score_mod="factor * score", mod_args={"factor": 0.5})


TREES = {
    "five drafts": Case(tokens=5, lengths=(100, 5, 260)),
    "in pages": Case(tokens=7, lengths=(100, 7, 40), new=True, page=16, num_splits=3),
    "float32, more rows than a tile": Case(tokens=21, lengths=(100, 30), dtype="float32", heads=6),
    "drafts without keys": Case(tokens=5, lengths=(3, 40)),
}


@pytest.mark.parametrize("of_each", [False, True], ids=["a tree", "trees"])
@pytest.mark.parametrize("name", TREES)
def test_trees_of_drafts(name: str, of_each: bool) -> None:
    case = TREES[name]
    check_call(case, tree=tree_of(case, *([len(case.lengths), case.tokens] if of_each else [])))


def test_a_tree_behind_a_prefix_and_with_a_function() -> None:
    case = TREES["in pages"]
    more = prefix_of(case, 33) | {"tree": tree_of(case)}
    means = more | {"softmax_scale_of_reference": 0.5 / 8}
    check_call(case, means, **more, score_mod="tree * score", mod_args={"tree": 0.5})


def test_a_tree_is_read_where_it_is() -> None:
    """Keys before the drafts are not tokens of the tree: they are not looked up in it."""
    case = replace(CASES["tokens"], lengths=(100, 4))
    report, _, _ = x_rayed(case, tree=tree_of(case))
    assert findings(report) == []


def test_an_unchecked_tree_never_hangs() -> None:
    """A token that follows itself or a later one counts as following the previous one."""
    case = Case(tokens=4, lengths=(100, 17))
    wrong, line = (np.array(tree, np.int32) for tree in ([3, 1, 2**31 - 1, -7], [-1, 0, 1, -1]))
    o, want = (flash_attention_with_kvcache(**case.arrays(), tree=tree, checked=False) for tree in (wrong, line))
    assert np.array_equal(o, want)
    with pytest.raises(ValueError, match=r"tree\[0\] = 3; token 0 follows one of -1 to -1"):
        flash_attention_with_kvcache(**case.arrays(), tree=wrong, checked=True)
    with pytest.raises(ValueError, match=r"tree\[1, 2\] = 2; token 2 follows one of -1 to 1"):
        flash_attention_with_kvcache(
            **case.arrays(), tree=np.array([[-1, 0, 1, 2], [-1, 0, 2, 0]], np.int32), checked=True
        )


def test_a_prefix_is_read_once_for_all_sequences() -> None:
    """The forward's blocks read a prefix once per tile of rows; in the caches it is read once per sequence."""
    batch, keys, kv_heads, d = 6, 64, 2, 64
    case = Case(lengths=(keys,) * batch, heads=8, kv_heads=kv_heads, room=keys)
    report, every, _ = x_rayed(case)
    of_keys = keys * kv_heads * d * 2
    assert report.traffic["K"].read == report.traffic["V"].read == batch * of_keys
    rows = shared_prefix.packed(every["q"], kv_heads)
    assert rows.shape == (1, batch * 4, kv_heads, d)
    k, v = prefix_of(case, keys).values()
    report = shortcuts.xray_stage("flash_mma", rows, k[None], v[None])
    report.assert_clean()
    assert report.traffic["K"].read == report.traffic["V"].read == of_keys


PREFIX = np.zeros((9, 2, 64), np.float16)
BOTH: dict[str, Any] = {"prefix_k": PREFIX, "prefix_v": PREFIX}
TABLE = np.ones((300, 32), np.float32)
ROTARY_AND_NEW: dict[str, Any] = {"rotary_cos": TABLE, "rotary_sin": TABLE}
ROTARY_AND_NEW |= dict.fromkeys("kv", np.zeros((4, 1, 2, 64), np.float16))
EIGHTS = {name: np.zeros((4, 300, 2, 64), np.uint8) for name in ("k_cache", "v_cache")}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float64": ({"q": np.zeros((4, 1, 8, 64))}, TypeError, "q is float64"),
    "head_dim": ({name: np.zeros((4, 9, 2, 84), np.float16) for name in ("q", "k_cache", "v_cache")}, ValueError, "84"),
    "V's head_dim": ({"v_cache": np.zeros((4, 300, 2, 264), np.float16)}, ValueError, "v_cache has head_dim = 264"),
    "a step, V of another head_dim": (
        {"v_cache": np.zeros((4, 300, 2, 128), np.float16), "stage": "last_block"},
        ValueError,
        "it has no head_dim of another length, or of V alone",
    ),
    "rotary_cos alone": ({**ROTARY_AND_NEW, "rotary_sin": None}, ValueError, "rotary_cos is given without rotary_sin"),
    "rotary_cos, no k": ({**ROTARY_AND_NEW, "k": None, "v": None}, ValueError, "rotary_cos needs k and v"),
    "a step, rotary_cos": ({**ROTARY_AND_NEW, "stage": "last_block"}, ValueError, "it has no k"),
    "a short rotary_cos": (
        {**ROTARY_AND_NEW, "rotary_cos": TABLE[:260], "rotary_sin": TABLE[:260], "checked": True},
        ValueError,
        "rotary_cos has 260 positions, and a new token is at 260",
    ),
    "rotary_cos of another width": ({**ROTARY_AND_NEW, "rotary_cos": TABLE[:, :4]}, ValueError, "rotary_dim = 8"),
    "rotary_cos and a tree": ({**ROTARY_AND_NEW, "tree": -np.ones(1, np.int32)}, ValueError, "rotary_cos with a tree"),
    "rotary_cos and a prefix": ({**ROTARY_AND_NEW, **BOTH}, ValueError, "a prefix with rotary_cos"),
    "interleaved": ({"rotary_interleaved": True}, ValueError, "rotary_interleaved is given without"),
    "rotary_interleaved": ({**ROTARY_AND_NEW, "rotary_interleaved": 1}, TypeError, "rotary_interleaved must be True"),
    "three axes": ({"q": np.zeros((4, 8, 64), np.float16)}, ValueError, "4 axes"),
    "a narrow q": ({"q": np.zeros((4, 1, 8, 80), np.float16)}, ValueError, "head_dim differs: q has shape"),
    "a q of 64, a cache of 128": (
        {name: np.zeros((4, 9, 2, 128), np.float16) for name in ("k_cache", "v_cache")},
        ValueError,
        "head_dim differs: q has shape",
    ),
    "k of another width": (
        {"q": np.zeros((4, 1, 8, 80), np.float16), **dict.fromkeys("kv", np.zeros((4, 1, 2, 64), np.float16))}
        | {name: np.zeros((4, 9, 2, 128), np.float16) for name in ("k_cache", "v_cache")},
        ValueError,
        "head_dim differs: q has shape .* and k ",
    ),
    "another dtype": ({"k_cache": np.zeros((4, 300, 2, 64), np.float32)}, TypeError, "k_cache is float32"),
    "no array": ({"k_cache": 3}, TypeError, "k_cache must be an array"),
    "heads": ({"q": np.zeros((4, 1, 7, 64), np.float16)}, ValueError, "7 heads of q cannot share 2"),
    "batch": ({"q": np.zeros((5, 1, 8, 64), np.float16), "cache_seqlens": np.ones(5, np.int32)}, ValueError, "5 seq"),
    "values": ({"v_cache": np.zeros((4, 301, 2, 64), np.float16)}, ValueError, "each key needs its value"),
    "int16 lengths": ({"cache_seqlens": np.ones(4, np.int16)}, TypeError, "int32 or int64 is needed"),
    "lengths": ({"cache_seqlens": np.ones(3, np.int32)}, ValueError, "a number for each sequence"),
    "a table of floats": ({"block_table": np.zeros((4, 2), np.float32)}, TypeError, "block_table is float32"),
    "descales of halves": ({"k_descale": np.ones((4, 2), np.float32)}, ValueError, "k_descale is for a cache in e4m3"),
    "descales": (EIGHTS | {"v_descale": np.ones(2, np.float32)}, ValueError, r"v_descale is .* batch, kv_heads"),
    "q of 32 bits, e4m3": (EIGHTS | {"q": np.zeros((4, 1, 8, 64), np.float32)}, TypeError, "k_cache is e4m3 .*float16"),
    "v of another dtype": ({"k_cache": EIGHTS["k_cache"]}, TypeError, "v_cache is float16 and"),
    "a step, e4m3": (EIGHTS | {"stage": "last_block"}, ValueError, "it has no e4m3"),
    "table": ({"block_table": np.zeros((3, 2), np.int32)}, ValueError, "pages of a sequence"),
    "k alone": ({"k": np.zeros((4, 1, 2, 64), np.float16)}, ValueError, "come together"),
    "k": ({name: np.zeros((4, 2, 2, 64), np.float16) for name in "kv"}, ValueError, "as many tokens as q has"),
    "num_splits": ({"num_splits": -1}, ValueError, "num_splits = -1"),
    "splits of a bool": ({"num_splits": True}, TypeError, "whole number"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False"),
    "checked": ({"checked": 1}, TypeError, "checked must be True or False"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    "window": ({"window": (1,)}, TypeError, "window must be a pair"),
    "softmax_scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a number"),
    "no stage": ({"stage": ["split_kv"]}, ValueError, "stage=.* does not decode"),
    "stage": ({"stage": "naive"}, ValueError, "split_kv"),
    "sinks": ({"sinks": np.zeros(3, np.float32)}, ValueError, "one for each head"),
    "slopes": ({"alibi_slopes": np.zeros(3, np.float32)}, ValueError, "one slope for each head"),
    "prefix_k alone": ({"prefix_k": PREFIX}, ValueError, "come together"),
    "a prefix that is none": ({"prefix_k": PREFIX, "prefix_v": 3}, TypeError, "prefix_v must be an array; got int 3"),
    "heads of a prefix": (BOTH | {"prefix_v": PREFIX[:, :1]}, ValueError, r"prefix_v has shape .* of q: \(2, 64\)"),
    "axes of a prefix": (BOTH | {"prefix_k": PREFIX[None]}, ValueError, r"\(keys, kv_heads, head_dim\) is needed"),
    "dtype of a prefix": (BOTH | {"prefix_k": PREFIX.astype(np.float32)}, TypeError, "prefix_k is float32 and q is fl"),
    "keys of a prefix": (BOTH | {"prefix_k": PREFIX[1:]}, ValueError, "has 8 keys and prefix_v 9"),
    "a prefix with a window": (BOTH | {"window": (3, 0)}, ValueError, "other distances"),
    "a prefix with slopes": (BOTH | {"alibi_slopes": np.zeros(8, np.float32)}, ValueError, "other distances"),
    "a prefix with places": (BOTH | {"score_mod": "score - 0.1f * distance"}, ValueError, "score_mod uses distance"),
    "a mask with places": (BOTH | {"mask_mod": "kv_idx > 3"}, ValueError, "mask_mod uses kv_idx"),
    "int8 tree": ({"tree": np.zeros(1, np.int8)}, TypeError, "tree is int8"),
    "tokens of a tree": ({"tree": np.zeros(3, np.int32)}, ValueError, "q's tokens"),
    "a tree, not causal": ({"tree": -np.ones(1, np.int32), "causal": False}, ValueError, "needs causal=True"),
    "a tree with a window": ({"tree": -np.ones(1, np.int32), "window": (9, 0)}, ValueError, "neither a window"),
    "a tree with slopes": (
        {"tree": -np.ones(1, np.int32), "alibi_slopes": np.zeros(8, np.float32)},
        ValueError,
        "nor alibi_slopes",
    ),
    "rows with gaps": ({"k_cache": np.zeros((4, 300, 2, 128), np.float16)[..., ::2]}, ValueError, "read where it is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_call_refuses(name: str) -> None:
    changed, error, message = REFUSED[name]
    if name == "rows with gaps":
        changed = {name: cp.zeros((4, 300, 2, 128), dtype=np.float16)[..., ::2] for name in ("k_cache", "v_cache")}
        changed |= {name: cp.asarray(a) for name, a in PLAIN.arrays().items() if "_cache" not in name}
    with pytest.raises(error, match=message):
        flash_attention_with_kvcache(**{**PLAIN.arrays(), **changed})


# ---- the kernel


X_RAYED = {
    "cut": PLAIN,
    "in pages, with new tokens": CASES["new tokens in pages"],
    "more rows than a tile": replace(CASES["new tokens, more rows than a tile"], lengths=(100, 5)),
    "splits": replace(PLAIN, num_splits=3),
    "float32": Case(dtype="float32", page=16, lengths=(40, 70)),
    "e4m3": replace(CASES["new tokens in pages of e4m3"], dtype="bfloat16", lengths=(40, 70), d=128),
    "192 and 128, in pages": Case(d=192, d_v=128, new=True, tokens=5, lengths=(40, 70), page=16, heads=4, kv_heads=1),
}


@pytest.mark.exhaustive(one_of_each=lambda name: "pages" in name)  # each is two builds of the largest kernel
@pytest.mark.parametrize("name", X_RAYED)
def test_an_x_ray_finds_nothing(name: str) -> None:
    report, every, arrays = x_rayed(X_RAYED[name])
    assert findings(report) == []
    compare(X_RAYED[name], every, arrays)


@pytest.mark.parametrize("d, d_v", [(64, 64), (96, 80)])
def test_keys_and_values_are_read_once(d: int, d_v: int) -> None:
    """All blocks together read each key and value once, however many heads share it, and no columns past head_dim."""
    case = Case(lengths=(256, 100, 33), heads=16, d=d, d_v=d_v)
    report, _, _ = x_rayed(case)
    for name, columns in (("K", d), ("V", d_v)):
        assert report.traffic[name].read == sum(case.lengths) * 2 * columns * case.kv_heads


# ---- planted bugs


NEW, CUT, TOKENS, SMALL = "new tokens in pages", "cut in many", "window of tokens", "pages of 2"
ODD, UNITS = "pages of 75", "more units than blocks"
CASES_OF_BUGS = {
    **CASES,
    CUT: replace(PLAIN, num_splits=7),
    "in X-ray": replace(PLAIN, lengths=(1100, 40, 70), num_splits=2, room=1100),
    "long": replace(PLAIN, lengths=(2000,), room=2000),
    "one sequence": Case(lengths=(260,)),
}


def bug(name: str, old: str, new: str, case: str = "plain", **more: Any) -> Bug:
    return Bug(name, old, new, inputs=case, **more)


def astray(name: str, old: str, new: str, case: str = "plain", **more: Any) -> Bug:
    """Mark a bug that may access invalid memory, which would lose a GPU's context."""
    return bug(name, old, new, case, cpu_only=True, **more)


def unordered(name: str, old: str, new: str, **more: Any) -> Bug:
    """Mark a bug that only a checked run shows reliably."""
    return Bug(name, old, new, inputs="in X-ray", cpu_only=True, **more)


BUGS = (
    # the tiles of a block
    bug(
        "stretches of one tile too few",
        "(total + blocks - 1) / blocks",
        "total / blocks",
        "one head for all",
        cpu_only=True,
    ),
    astray("tiles of one head counted", "total += tiles * kv_heads;", "total += tiles;"),
    astray("the sequence behind", "__ffs(behind) - 1", "__ffs(behind)", "many sequences"),
    astray("the first 32 sequences alone", "sum += __shfl_sync(0xffffffff, upto, 31);", "", "many sequences"),
    astray("a unit begins where it ends", "upto - own, lane", "upto, lane"),
    bug("a head begins where its sequence does", "unit_begin += kv_head * keys.tiles;", ""),
    astray("the stretch is too long", "left -= end - first;", ""),
    bug("the next unit begins behind its first tile", "first = 0;\n    end", "first = 1;\n    end"),
    bug("the next unit of a stretch is left out", "int step = 1;", "int step = 2;"),
    bug("the heads of a sequence are one", "kv_head = unit % params.attention.kv_heads;", "kv_head = 0;"),
    bug("one unit a block", "left = (units - 1 - block) / step * share;", "left = 0;", UNITS),
    bug("an empty sequence has no unit", "/ BLOCK_N - tile, 1)", "/ BLOCK_N - tile, 0)", "empty among others"),
    bug("the last tile is not counted", "(end + BLOCK_N - 1) / BLOCK_N", "end / BLOCK_N"),
    bug("parts of the same length, one too few", "(keys.tiles + splits - 1)", "keys.tiles", CUT),
    bug("one part too many", "first_block() + 1;", "first_block() + 2;", CUT),
    bug(
        "parts of two units where all are as long",
        "int splits = params.num_splits;\n    if (same",
        "int splits = 0;\n    if (same && false",
        CUT,
    ),
    # the keys that a row sees
    bug("new tokens do not count as keys", "q_pos = before + more - a.N;", "q_pos = before - a.N;", NEW),
    bug("the last keys are not masked", "all_end = min(first_pos + a.window_right + 1, end);", "all_end = 1 << 30;"),
    bug("a token sees the next one", "min(pos + rows.params.window_right + 1", "min(pos + 2", "tokens"),
    bug(
        "a window one key too wide",
        "pos - rows.params.window_left - key",
        "pos - rows.params.window_left - 1 - key",
        TOKENS,
    ),
    bug("no left end", "first_key >= keys.all_begin && ", "", TOKENS),
    bug("a token for a head", "unit * group + (first + r) % group", "unit * group + (first + r) / group % group"),
    bug("the first rows again", "first(blockIdx.y * TILE_ROWS)", "first(0)", "more rows than a tile"),
    # copies
    astray("the next page", "? table[entry] : 0", "? table[entry + 1] : 0", NEW),
    astray("the page's key counts from 0", "key & ((1u << cache.params.page_bits) - 1)", "key", NEW),
    bug(
        "the tile's first page for all", "__shfl_sync(0xffffffff, page, row)", "__shfl_sync(0xffffffff, page, 0)", SMALL
    ),
    bug("tiles in one page that are not", "(!PAGED || cache.params.page_bits >= 4)", "true", SMALL),
    bug("tiles in one page of an odd size", "(!PAGED || cache.params.page_bits >= 4)", "true", ODD),
    bug("a mask for the rest", "PAGED == 2 ? key % cache.params.page_size", "PAGED == 3 ? 0", ODD),
    astray("tables of one page", "(long long)cache.params.table_row", "1", NEW),
    bug("the unit's keys are the last one's", "      find_unit();\n    }", "    }"),
    bug("the same row again", "(unsigned long long)i * k_row", "0ull * k_row"),
    bug("the cut tile is whole", "first_key + BLOCK_N <= min(at.keys.end, at.keys.before) &&", ""),
    bug("what nobody wrote is read", "is_seen && in_v(c) ? 16 : 0", "in_v(c) ? 16 : 0"),
    astray("columns that K lacks, of new keys", "if (in_k(c))", "if (true)", "192 and 128, new tokens in pages"),
    bug("columns that O lacks", "V_COLUMNS == HEAD_DIM || column < V_COLUMNS", "true", "192 and 128", cpu_only=True),
    bug("keys before the window are read", "return key >= begin && key < end;", "return key < end;", "freed pages"),
    bug("a key too few", "key >= begin && key < end;", "key >= begin && key < end - 1;"),
    astray("new tokens from the cache", "is_new = is_seen && key >= at.keys.before", "is_new = false", NEW),
    astray("new tokens from the first on", "token * params.k_new.row", "key * params.k_new.row", NEW),
    bug("new tokens of one head", "at.kv_head * strides.head;", "0;", NEW),
    bug("new tokens are not kept", "if (!keeps) continue;", "continue;", NEW),
    bug("kept by the first tile of rows", "token * at.rows.group / TILE_ROWS == blockIdx.y", "0 == blockIdx.y", NEW),
    bug("K in place of V", "copy(V_smem + to, from_v + from", "copy(V_smem + to, from_k + from"),
    bug("one stage for all", "stage_of_ring + 1 == STAGES ? 0 : stage_of_ring + 1", "0", "long", cpu_only=True),
    bug("a tile too late", "cp_async_wait<STAGES - 1>", "cp_async_wait<STAGES>", cpu_only=True),
    # a cache in e4m3
    bug("Q's scale forgotten", "{row_scale[g] * k_descale", "{k_descale", "e4m3"),
    bug("V's descale forgotten", "even[0] * v_descale", "even[0]", "e4m3"),
    bug("the first head's descale", "kv_heads + kv_head] : 1.0f", "kv_heads] : 1.0f", "e4m3"),
    bug("columns of V in pairs", "v[2 * i], 0, 0x3120", "v[2 * i], 0, 0x3210", "e4m3"),
    bug("Q in the order of a cache in halves", "2 * (c + i / 2) + t / 2", "2 * (c + i / 2) + i % 2", "e4m3"),
    bug("new numbers are not divided", "__fdiv_rn(a.x, descale)", "a.x", "new tokens in pages of e4m3"),
    # merges
    bug("this state is not rescaled", "b = exp2f(s.m - m)", "b = 1.0f"),
    bug("l is not rescaled", "sum.l = sum.l * a + s.l * b", "sum.l = sum.l + s.l"),
    bug("the maximum stays", "sum.m = m;", "sum.m = s.m;"),
    bug("lse without the unit of log2", "LN_2 * (sum.m + log2f(sum.l))", "sum.m + log2f(sum.l)"),
    bug("no key, division by 0", "sum.l == 0.0f ? 0.0f : 1.0f / sum.l", "1.0f / sum.l", "empty among others"),
    bug("states of half the warps", "merge(min(WARPS, stretch", "merge(min(WARPS / 2, stretch", cpu_only=True),
    bug("first parts where the others are", "slot_of(blockIdx.x, begins)", "slot_of(blockIdx.x, false)"),
    bug("the ticket is not reset", "atomicInc(reinterpret_cast<unsigned*>(ticket), parts - 1)", "atomicAdd(ticket, 1)"),
    bug("the second merges", "parts - 1) == parts - 1", "parts - 1) == 1", CUT, cpu_only=True),
    # order
    *(unordered(f"barrier {i + 1} is missing", "__syncthreads();", "", times=4, which=i) for i in range(4)),
    unordered("no fence before the ticket", "__threadfence();", "", times=2, which=0),
    *(unordered(f"__syncwarp {i + 1} is missing", "__syncwarp();", "", times=2, which=i) for i in range(2)),
)


def text() -> str:
    return kernel.source(decoders.SPLIT_KV.file)


def test_bugs_can_be_planted() -> None:
    check_all_can_be_planted((text(), each) for each in BUGS)


@pytest.mark.exhaustive(one_of_each=lambda each: each.inputs)
@pytest.mark.parametrize("each", BUGS, ids=lambda each: each.name)
def test_planted_bugs_are_found(each: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.ON_GPU and each.cpu_only:
        pytest.skip("shows on the CPU engine for certain")
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "2")  # one never ends
    wrong = each.plant(text())
    if each.inputs == "in X-ray":
        report, _, _ = x_rayed(CASES_OF_BUGS[each.inputs], wrong)
        assert findings(report)
        return
    with pytest.raises(WRONG):
        run(CASES_OF_BUGS[each.inputs], wrong)


def test_a_sink_that_counts_in_every_part_is_found() -> None:
    """The function of scores comes before the kernel's text, so this bug is planted in a call."""
    case, sinks = replace(PLAIN, num_splits=4), np.full(8, 2.0, np.float32)

    def lse_of(source: str | None) -> np.ndarray:
        given = on_device(case.arrays()) | {"sinks": cp.asarray(sinks)}
        options = decoding.DecodeOptions(**case.options, return_lse=True)
        planned, every = decoding.plan(given, options, source=source)
        planned.bind(every)()
        return cp.asnumpy(every["lse"])

    _, plain = case.expected(case.arrays())
    want = np.logaddexp(plain, 2.0)
    assert np.abs(lse_of(None) - want).max() < 1e-4
    wrong = Bug("in every part", "begins && warp == 0", "warp == 0").plant(text())
    assert np.abs(lse_of(wrong) - want).max() > 1e-2


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", TYPES)
def test_nvrtc_spills_nothing(dtype: str, arch: str) -> None:
    name = f"split_kv<{C_NAMES[dtype]}>"
    for d in decoding.HEAD_DIMS:
        for paged in (0, 1):
            shared = 99 * 1024 if arch == "sm_120" else 163 * 1024 if arch == "sm_80" else 227 * 1024
            sizes = decoders.pick_sizes(d, np.dtype(TYPES[dtype]).itemsize, 8, shared)
            report = compile_report.compile_report(decoders.SPLIT_KV.file, {**sizes, "PAGED": paged}, arch, name=name)
            assert report.spill_bytes == report.stack_bytes == 0, report


# ---- the steps

STEPS = [decoder for decoder in decoders.DECODERS.values() if decoder is not decoders.SPLIT_KV]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
MOST_NEW_LINES = 75  # of a step; equal stretches put the kernel into a loop over pieces
MOST_LINES = 200  # of the climb's first file
OF_STEPS = {
    **{name: CASES[name] for name in ("plain", "empty among others", "mixed lengths", "one head for all", "tokens")},
    **{name: CASES[name] for name in ("more rows than a tile", "window of tokens", "3 splits", "40 splits")},
    "bfloat16": CASES["bfloat16, 128"],
    "one head in parts": Case(lengths=(300,), heads=1, kv_heads=1),
}


@every_step
@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("name", OF_STEPS)
def test_steps_agree_with_float64(step: Stage, name: str) -> None:
    run(OF_STEPS[name], stage=step.name)


@every_step
def test_x_rays_of_steps_find_nothing(step: Stage) -> None:
    report, _, _ = x_rayed(replace(PLAIN, num_splits=3), stage=step.name)
    assert findings(report) == []


@every_step
def test_steps_refuse_what_comes_later(step: Stage) -> None:
    for case in (CASES["pages of 16"], CASES["new token"]):
        with pytest.raises(ValueError, match="is a step to split_kv"):
            flash_attention_with_kvcache(**case.arrays(), stage=step.name)


def test_each_step_is_one_lesson() -> None:
    texts = [(d.name, (kernel.KERNELS / d.file).read_text().splitlines()) for d in decoders.DECODERS.values()]
    assert len(texts[0][1]) <= MOST_LINES
    for (_, before), (name, after) in pairwise(texts):
        added = sum(line[0] == "+" for line in difflib.ndiff(before, after))
        assert 0 < added <= MOST_NEW_LINES, (name, added)


@pytest.mark.exhaustive
@needs_nvrtc
@every_step
def test_steps_spill_nothing(step: Stage) -> None:
    for name in ["split_kv", *(["merge_parts"] if "merge_parts" in kernel.source(step.file) else [])]:
        report = compile_report.compile_report(step.file, {}, "sm_90", name=f"{name}<__nv_bfloat16>")
        assert report.spill_bytes == report.stack_bytes == 0, report


def test_the_study_tries_sizes_that_fit() -> None:
    given = on_device(PLAIN.arrays())
    kept = decoders.MIN_KEYS
    assert list(study._tuned(given, {"WARPS": 4, "STAGES": 2, "BLOCK_N": 16})) == ["WARPS=4 STAGES=2 BLOCK_N=16"]
    assert study._tuned(given, {"STAGES": 9}) == {}
    for launch in study._tuned(given, {}, MIN_KEYS=32).values():
        launch()
    assert kept == decoders.MIN_KEYS
    row = {"part": "rows", "row": [8, 8192, 32, 8, 128], "name": "cuDNN", "ms": 0.07, "gb_per_s": 3900.0, "speed": 1.02}
    assert "70.0 us" in study.line(row) and study.line(row) in study.table({"rows": [row]})

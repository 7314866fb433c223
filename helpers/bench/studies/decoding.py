"""Compare decoding with cuDNN, FlashAttention and FlashInfer on a GPU: how fast K and V are read.

    python3 -m helpers.bench.study decoding FILE [PART ...]  # of STUDY, below; all but the optional ones

bfloat16, one new token for each sequence. Every result is compared with float64 in two heads first. Then all are timed
in turns, with a full queue, so host time is not included, and after reading another array, so that the L2 cache
contains nothing of K and V, and nothing to write back. GB/s are those of K and V, each read once. The peers are those
that can be imported: PyTorch's SDPA, FlashAttention-3 (flash_attn_interface, or the wheel fa3-fwd) and FlashInfer.
"tune_fp8" tries other sizes, "counters" needs Nsight Compute. GB/s of "prefix" count the bytes that its best way reads:
the prefix once. "graph" and "server" are loops of a small GPT, by the host's clock.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from helpers.attention import decoders, decoding, flash_attention_with_kvcache, reference, shared_prefix
from helpers.attention.check import real_inputs
from helpers.attention.fp8 import descale_of, quantise
from helpers.attention.ladder import limits
from helpers.attention.ladder.kinds import kind_of
from helpers.attention.ladder.layout import Spec
from helpers.bench import counters, decode_loop, ncu, peers, records
from helpers.bench.harness import Row, Study, Way, compare, words_of_process
from helpers.bench.host_cost import host_time
from helpers.bench.peers import TORCH_DEVICE
from helpers.bench.run import device_facts
from helpers.device import cp
from helpers.engine.cuda_source.c_types import dtype_of

# (sequences, keys of each, query heads, KV heads, head_dim)
Sizes = tuple[int, int, int, int, int]
ROWS: tuple[Sizes, ...] = (
    (8, 8192, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (1, 65536, 32, 8, 128),
    (8, 65536, 32, 8, 128),
    (64, 2048, 32, 8, 128),
    (128, 512, 32, 8, 128),
    (8, 8192, 8, 1, 128),
    (8, 8192, 16, 16, 64),
)
STEP_ROWS = ROWS[0], ROWS[1], ROWS[5]
MIXED = 64, 100, 32768  # sequences, and the shortest and longest of them
PAGES = 16, 64
HEADS = 32, 8, 128  # for the parts below: query heads, KV heads, head_dim
# Few sequences, one of them long: their keys.
LONG = (
    (65536, 1024, 1024, 1024),
    (32768, 2048, 2048, 2048),
    (65536, *7 * (2048,)),
    (32768, *7 * (4096,)),
)
LONG_SPLITS = 8, 33
PARTS = ((8, 8192, *HEADS), 4), ((8, 65536, *HEADS), 4), ((1, 65536, *HEADS), 32)  # and the most parts of a unit
DIMS = (80, 80), (96, 96), (112, 112), (192, 192), (192, 128)  # those of K and of V
PREFIXES = (16, 8192, 256), (64, 8192, 256), (64, 2048, 512), (16, 32768, 512)  # sequences, shared keys, own keys
TREES = (8, 8192, 8), (1, 8192, 16), (32, 2048, 8)  # sequences, keys, drafts among these
FP8_ROWS: tuple[Sizes, ...] = *ROWS[:6], ROWS[7]
TUNED_FP8 = tuple(itertools.product((8, 12, 16), (2, 3, 4), (16, 32)))
REAL_HEADS = 12
COUNTED_ROWS = ROWS[0], ROWS[3], ROWS[7]
GRID_ROWS = ROWS[0], *ROWS[2:6], ROWS[7]
ROUNDS = 15
DTYPE = "bfloat16"
TOLERANCE = 2e-2  # relative to a head's largest number
FLASH_INFER = "flashinfer"


class CacheInputs:
    """PyTorch's tensors of a row: q (batch, tokens, heads, d), caches (batch, keys, kv_heads, d), the same in pages.

    mask: (tokens, keys), True for visible keys; None: all keys of the sequence.
    """

    mask: Any = None

    def __init__(
        self, row: Sizes, lengths: Sequence[int] | None = None, *, pages: Sequence[int] = PAGES, d_v: int = 0
    ) -> None:
        import torch

        self.row = row
        batch, keys, self.heads, self.kv_heads, self.d = row
        self.d_v = d_v or self.d
        self.host_lengths = list(lengths) if lengths is not None else [keys] * batch
        self.torch = torch
        torch.manual_seed(5)
        self.lengths = torch.tensor(self.host_lengths, dtype=torch.int32, device=TORCH_DEVICE)
        self.q = torch.randn(batch, 1, self.heads, self.d, device=TORCH_DEVICE).to(getattr(torch, DTYPE))
        shape, how = (batch, keys, self.kv_heads), {"device": TORCH_DEVICE, "dtype": getattr(torch, DTYPE)}
        self.k, self.v = (torch.randn(*shape, d, **how) for d in (self.d, self.d_v))
        self.paged = {page: self.in_pages(page, self.k, self.v) for page in pages}

    def in_pages(self, page: int, *caches: Any) -> tuple[Any, ...]:
        """Make caches (pages, page, kv_heads, d) with pages in random order, and the block table."""
        torch, (batch, keys, *_) = self.torch, caches[0].shape
        order = torch.randperm(batch * keys // page, device=TORCH_DEVICE)
        made = []
        for a in caches:
            cache = torch.empty(batch * keys // page, page, *a.shape[2:], device=TORCH_DEVICE, dtype=a.dtype)
            cache[order] = a.reshape(cache.shape)
            made.append(cache)
        return (*made, order.to(torch.int32).reshape(batch, keys // page))

    @property
    def call(self) -> Callable[..., Any]:
        """Call our function on the contiguous caches."""
        return functools.partial(flash_attention_with_kvcache, *(self.q, self.k, self.v), cache_seqlens=self.lengths)

    @property
    def bytes(self) -> int:
        """Bytes of all K and V."""
        return 2 * sum(self.host_lengths) * self.kv_heads * (self.d + self.d_v)

    def exact(self, sequence: int, head: int) -> np.ndarray:
        """Return the output of one head in float64, (tokens, d)."""
        n, kv_head = self.host_lengths[sequence], head // (self.heads // self.kv_heads)
        q = self.q[sequence, :, head].double()
        k, v = (a[sequence, :n, kv_head].double() for a in (self.k, self.v))
        scores = q @ k.T * self.d**-0.5
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, float("-inf"))
        return (scores.softmax(-1) @ v).cpu().numpy()

    def error(self, o: Any) -> float:
        """Return the largest error in two heads of an output whose tokens and heads are in order."""
        o = o.reshape(len(self.host_lengths), -1, self.heads, self.d_v).float().cpu().numpy()
        exact = {at: self.exact(*at) for at in ((0, 0), (len(o) - 1, self.heads - 1))}
        return max(float(np.abs(o[i, :, head] - a).max() / np.abs(a).max()) for (i, head), a in exact.items())


# ---- our kernel and its peers

Ways = Iterator[tuple[str, Way]]


def ours(inputs: CacheInputs) -> dict[str, Way]:
    """Return the kernel on contiguous caches and on pages."""
    call = functools.partial(flash_attention_with_kvcache, inputs.q, cache_seqlens=inputs.lengths)
    paged = inputs.paged.items()
    return {
        "contiguous": inputs.call,
        **{f"pages of {page}": functools.partial(call, k, v, block_table=table) for page, (k, v, table) in paged},
    }


def sdpa(inputs: CacheInputs) -> Ways:
    """Yield PyTorch's SDPA, which takes no lengths, if all sequences have the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (a.transpose(1, 2) for a in (inputs.q, inputs.k, inputs.v))

    def run(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return inputs.torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    if len(set(inputs.host_lengths)) == 1:
        yield "SDPA flash", functools.partial(run, SDPBackend.FLASH_ATTENTION)
        yield "cuDNN", functools.partial(run, SDPBackend.CUDNN_ATTENTION)


def flash_attention_3(inputs: CacheInputs) -> Ways:
    """Yield FlashAttention-3's flash_attn_with_kvcache."""
    call = functools.partial(
        peers.flash_attention_3().flash_attn_with_kvcache, inputs.q, cache_seqlens=inputs.lengths, causal=True
    )
    yield "FlashAttention-3", functools.partial(call, inputs.k, inputs.v)
    for page, (k, v, table) in inputs.paged.items():
        yield f"FlashAttention-3, pages of {page}", functools.partial(call, k, v, page_table=table)


def _flashinfer(inputs: CacheInputs, wrapper: str, *args: Any, **options: Any) -> tuple[Any, tuple[int, ...]]:
    """Make one of FlashInfer's wrappers with its own 512 MiB; query heads, KV heads, head_dim and page."""
    module = importlib.import_module(FLASH_INFER)
    workspace = inputs.torch.empty(512 << 20, dtype=inputs.torch.uint8, device=TORCH_DEVICE)
    page = next(iter(inputs.paged), 16)
    heads = inputs.heads, inputs.kv_heads, inputs.d, page
    return getattr(module, wrapper)(*args, workspace, "NHD", **options), heads


def _ints(numbers: Iterable[int]) -> Any:
    import torch

    return torch.tensor([*numbers], dtype=torch.int32, device=TORCH_DEVICE)


def _decoded_by_flashinfer(inputs: CacheInputs, k: Any, v: Any, *pages: Any) -> Ways:
    """Yield FlashInfer on pages of 16, planned on the host beforehand, with and without tensor cores."""
    for name, tensor_cores in (("FlashInfer", False), ("FlashInfer, tensor cores", True)):
        wrapper, heads = _flashinfer(inputs, "BatchDecodeWithPagedKVCacheWrapper", use_tensor_cores=tensor_cores)
        wrapper.plan(*pages, *heads, q_data_type=inputs.q.dtype, kv_data_type=k.dtype)
        yield name, functools.partial(wrapper.run, inputs.q[:, 0], (k, v))


def flashinfer(inputs: CacheInputs) -> Ways:
    """Yield FlashInfer with pages of 16, planned on the host beforehand."""
    if 16 in inputs.paged:
        k, v, table = inputs.paged[16]
        counts = [-(-n // 16) for n in inputs.host_lengths]
        indices = inputs.torch.cat([table[i, :count] for i, count in enumerate(counts)])
        last = _ints((n - 1) % 16 + 1 for n in inputs.host_lengths)
        yield from _decoded_by_flashinfer(inputs, k, v, _ints([0, *np.cumsum(counts)]), indices, last)


def flashinfer_of_e4m3(inputs: EightBits) -> Ways:
    """Yield FlashInfer with e4m3 K and V and no scales, which it supports only for whole tensors."""
    batch, keys = inputs.k8.shape[:2]
    k, v = (a.to(inputs.k8.dtype).view(-1, 16, *a.shape[2:]) for a in inputs.of16)
    indptr, indices = _ints(range(0, batch * keys // 16 + 1, keys // 16)), _ints(range(batch * keys // 16))
    yield from _decoded_by_flashinfer(inputs, k, v, indptr, indices, _ints([16] * batch))


def flashinfer_cascade(inputs: CacheInputs, shared: int) -> Ways:
    """Yield FlashInfer's cascade of two levels: pages that all sequences share, and each one's own."""
    ((page, (k, v, table)),) = inputs.paged.items()
    batch, pages = table.shape
    common = shared // page
    own = pages - common
    levels = (
        ([0, batch], [0, common], table[0, :common]),
        (range(batch + 1), range(0, batch * own + 1, own), table[:, common:].flatten()),
    )
    rows, indptr = ([_ints(each[i]) for each in levels] for i in (0, 1))
    last = [_ints([page] * (len(each) - 1)) for each in rows]
    wrapper, heads = _flashinfer(inputs, "MultiLevelCascadeAttentionWrapper", 2)
    for level in wrapper._batch_prefill_wrappers:
        level._backend = "fa2"
    wrapper.plan(rows, indptr, [each[2] for each in levels], last, *heads, q_data_type=inputs.q.dtype)
    yield "FlashInfer, cascade", functools.partial(wrapper.run, inputs.q[:, 0], (k, v))


def flashinfer_tree(inputs: TreeInputs) -> Ways:
    """Yield FlashInfer with a custom mask, whose bits are packed beforehand."""
    ((page, (k, v, table)),) = inputs.paged.items()
    (batch, pages), tokens = table.shape, len(inputs.mask)
    bits = np.packbits(inputs.mask.cpu().numpy(), bitorder="little")
    wrapper, heads = _flashinfer(inputs, "BatchPrefillWithPagedKVCacheWrapper", backend="fa2")
    indptr = _ints(range(0, batch * pages + 1, pages)), table.flatten(), _ints([page] * batch)
    options = {"packed_custom_mask": inputs.torch.tensor(bits, device=TORCH_DEVICE).repeat(batch)}
    rows = _ints(range(0, batch * tokens + 1, tokens))
    wrapper.plan(rows, *indptr, *heads, **options, q_data_type=inputs.q.dtype)
    wrapper._mask_indptr_buf //= 8  # bytes: plan has counted bits
    yield "FlashInfer, a mask", functools.partial(wrapper.run, inputs.q.flatten(0, 1), (k, v))


def reading(inputs: CacheInputs) -> dict[str, Way]:
    """Return a kernel that only reads K and V: their sums, as 64-bit integers."""
    k, v = (a.view(inputs.torch.int64) for a in (inputs.k, inputs.v))
    return {"read (sum)": lambda: (k.sum(), v.sum())}


PEERS = sdpa, flash_attention_3, flashinfer


def peers_of(makers: Sequence[Callable[[Any], Ways]], inputs: CacheInputs) -> Ways:
    """Yield the peers that run here; print why others do not."""
    for maker in makers:
        try:
            for name, way in maker(inputs):
                way()
                yield name, way
        except Exception as error:  # peers fail in many ways
            print(f"{getattr(maker, '__name__', maker)}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def able(inputs: CacheInputs, ours: Mapping[str, Way], makers: Sequence[Callable[[Any], Ways]] = ()) -> dict[str, Way]:
    """Return our ways and those of peers that agree with float64; print which do not."""
    ways: dict[str, Way] = {}
    for name, way in (*ours.items(), *peers_of(makers, inputs)):
        o = way()
        error = inputs.error(o[0] if isinstance(o, tuple) else o)
        if error < TOLERANCE:
            ways[name] = way
        else:
            print(f"WRONG: {name}: {error}", flush=True)
    return ways


def timed(part: str, inputs: CacheInputs, ways: Mapping[str, Way], over: str = "", **more: Any) -> list[Row]:
    """Time ways in turns: a row each, with its speed relative to the named way."""
    what = {"part": part, "row": list(inputs.row), **more}
    timed = compare(ways, ROUNDS, over=over, read=True)
    return [{**what, "name": name, **row, "gb_per_s": inputs.bytes / row["ms"] / 1e6} for name, row in timed.items()]


# ---- the parts of the record


def measure_rows() -> Iterator[list[Row]]:
    """Measure every row of the table: ours, peers, and the time to read K and V."""
    for row in ROWS:
        inputs = CacheInputs(row)
        yield timed("rows", inputs, able(inputs, ours(inputs), PEERS) | reading(inputs), "cuDNN")


def mixed_lengths() -> list[int]:
    """Draw the lengths of MIXED, uniform between the shortest and the longest, including both."""
    count, least, most = MIXED
    return [least, most, *map(int, np.random.default_rng(7).integers(least, most + 1, count - 2))]


def measure_mixed() -> Iterator[list[Row]]:
    """Measure sequences of very different lengths."""
    inputs = CacheInputs((MIXED[0], MIXED[2], *HEADS), mixed_lengths(), pages=(16,))
    ways = able(inputs, ours(inputs), (flash_attention_3, flashinfer))
    yield timed("mixed", inputs, ways, "FlashInfer", lengths=inputs.host_lengths)


def measure_steps() -> Iterator[list[Row]]:
    """Measure the steps to the kernel, each relative to the previous one."""
    for row in STEP_ROWS:
        inputs = CacheInputs(row, pages=())
        steps = {name: functools.partial(inputs.call, stage=name) for name in decoders.DECODERS}
        rows = timed("steps", inputs, able(inputs, steps))
        for before, after in itertools.pairwise(rows):
            after["beside_the_step_before"] = before["ms"] / after["ms"]
        yield rows


def measure_long() -> Iterator[list[Row]]:
    """Measure few sequences, one of them long: merged by the last block, also with more parts, and equal stretches."""
    for lengths in LONG:
        inputs = CacheInputs((len(lengths), max(lengths), *HEADS), lengths, pages=())
        last = functools.partial(inputs.call, stage="last_block")
        ways: dict[str, Way] = {"last_block": last}
        ways |= {f"last_block, {parts} parts": functools.partial(last, num_splits=parts) for parts in LONG_SPLITS}
        ways |= {"equal_stretches": functools.partial(inputs.call, stage="equal_stretches"), "contiguous": inputs.call}
        yield timed("long", inputs, able(inputs, ways, (flash_attention_3,)), "last_block", lengths=list(lengths))


def shared_prefix_inputs(sequences: int, shared: int, own: int) -> CacheInputs:
    """Make caches that all begin with the same keys and values, and the same in pages of 64 that store these once."""
    page = 64
    inputs = CacheInputs((sequences, shared + own, *HEADS), pages=())
    torch, table = inputs.torch, []
    for i in range(sequences):
        owned = shared // page + i * (own // page)
        table.append([*range(shared // page), *range(owned, owned + own // page)])
    caches = []
    for a in (inputs.k, inputs.v):
        a[1:, :shared] = a[:1, :shared]
        rows = torch.cat([a[0, :shared], a[:, shared:].flatten(0, 1)])
        caches.append(rows.reshape(-1, page, *rows.shape[1:]))
    inputs.paged[page] = (*caches, torch.tensor(table, dtype=torch.int32, device=TORCH_DEVICE))
    return inputs


def measure_prefix() -> Iterator[list[Row]]:
    """Measure a prefix that all sequences share: stored per sequence, in shared pages, and read once in one call."""
    for sequences, shared, own in PREFIXES:
        inputs = shared_prefix_inputs(sequences, shared, own)
        once = 4 * (shared + sequences * own) * inputs.kv_heads * inputs.d  # bytes
        prefix = {f"prefix_{name}": a[0, :shared].contiguous() for name, a in (("k", inputs.k), ("v", inputs.v))}
        k, v = (a[:, shared:].contiguous() for a in (inputs.k, inputs.v))
        lengths = inputs.lengths - shared
        call = functools.partial(flash_attention_with_kvcache, inputs.q, k, v, cache_seqlens=lengths, **prefix)
        ways = ours(inputs) | {
            "prefix": functools.partial(_with_constants, call, {"ROWS_OF_PARTS": 0}, shared_prefix),
            "prefix, by 14": functools.partial(_with_constants, call, {"ROWS_OF_PARTS": 1 << 30}, shared_prefix),
        }
        cascade = functools.partial(flashinfer_cascade, shared=shared)
        ways = able(inputs, ways, (sdpa, flash_attention_3, cascade))
        rows = timed("prefix", inputs, ways, "contiguous", shared=shared, bytes=[inputs.bytes, once])
        yield [{**row, "gb_per_s": once / row["ms"] / 1e6} for row in rows]


def _with_constants(call: Way, constants: Mapping[str, int], module: Any) -> Any:
    """Call with other values of a module's constants."""
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(patch.object(module, name, value))
        return call()


def random_tree(tokens: int) -> np.ndarray:
    """Draw the token that each token follows: an earlier one, or -1; int32 (tokens,)."""
    rng = np.random.default_rng(11)
    return np.array([rng.integers(-1, i) if i else -1 for i in range(tokens)], np.int32)


def tree_mask(tree: np.ndarray, keys: int) -> np.ndarray:
    """Return which keys each draft sees, bool (tokens, keys): all before the drafts, itself and its ancestors."""
    tokens = len(tree)
    seen = np.zeros((tokens, keys), bool)
    seen[:, : keys - tokens] = True
    for i, before in enumerate(tree):
        drafts = seen[:, keys - tokens :]
        if before >= 0:
            drafts[i] = drafts[before]
        drafts[i, i] = True
    return seen


class TreeInputs(CacheInputs):
    """A row whose newest tokens are the drafts of a tree: q (batch, drafts, heads, d)."""

    def __init__(self, row: Sizes, drafts: int) -> None:
        super().__init__(row, pages=(16,))
        torch, shape = self.torch, (row[0], drafts, self.heads, self.d)
        self.q = torch.randn(*shape, device=TORCH_DEVICE).to(getattr(torch, DTYPE))
        tree = random_tree(drafts)
        self.tree = torch.tensor(tree, device=TORCH_DEVICE)
        self.mask = torch.tensor(tree_mask(tree, row[1]), device=TORCH_DEVICE)


def sdpa_with_mask(inputs: TreeInputs) -> Ways:
    """Yield PyTorch's SDPA with a mask."""
    q, k, v = (a.transpose(1, 2) for a in (inputs.q, inputs.k, inputs.v))
    masked = functools.partial(inputs.torch.nn.functional.scaled_dot_product_attention, q, k, v)
    run = functools.partial(masked, attn_mask=inputs.mask, enable_gqa=True)
    yield "SDPA, a mask", lambda: run().transpose(1, 2)


def measure_tree() -> Iterator[list[Row]]:
    """Measure drafts that form a tree; a chain of as many, which sees other keys; and SDPA with a mask."""
    for sequences, keys, drafts in TREES:
        inputs = TreeInputs((sequences, keys, *HEADS), drafts)
        tree = {"tree": functools.partial(inputs.call, tree=inputs.tree)}
        ways = able(inputs, tree, (sdpa_with_mask, flashinfer_tree))
        inputs.call()
        yield timed("tree", inputs, ways | {"a chain": inputs.call}, "a chain", drafts=drafts)


class EightBits(CacheInputs):
    """A row with e4m3 caches in addition: k8, v8, with a descale for each sequence and KV head.

    call16: our call on the bfloat16 caches. of8: our call on the e4m3 caches that it is given.
    """

    def __init__(self, row: Sizes) -> None:
        super().__init__(row, pages=())
        self.of16, self.call16 = (self.k, self.v), self.call
        self.k8, self.k_descale, self.k = self._quantised(self.k)
        self.v8, self.v_descale, self.v = self._quantised(self.v)
        self.bytes8 = tuple(a.view(self.torch.uint8) for a in (self.k8, self.v8))
        self.descales = {"k_descale": self.k_descale, "v_descale": self.v_descale}
        self.of8 = functools.partial(flash_attention_with_kvcache, self.q, cache_seqlens=self.lengths, **self.descales)

    def _quantised(self, a: Any) -> tuple[Any, Any, Any]:
        """Quantise to e4m3; return the bytes, the descales (batch, kv_heads), and the quantised numbers in float32."""
        torch = self.torch
        descale = a.abs().amax(dim=(1, 3)).float() / 448
        by_head = descale[:, None, :, None]
        eights = (a.float() / by_head).clamp(-448, 448).to(torch.float8_e4m3fn)
        return eights, descale, eights.float() * by_head


def flash_attention_3_of_e4m3(inputs: EightBits) -> Ways:
    """Yield FlashAttention-3 with all of q, k and v in e4m3: it takes no other q with such a cache."""
    batch, group = len(inputs.host_lengths), inputs.heads // inputs.kv_heads
    descale = inputs.q.abs().amax(dim=(1, 3)).float().reshape(batch, inputs.kv_heads, group).amax(-1) / 448
    q8 = (inputs.q.float() / descale.repeat_interleave(group, 1)[:, None, :, None]).to(inputs.k8.dtype)
    options = {"cache_seqlens": inputs.lengths, "causal": True, "q_descale": descale, **inputs.descales}
    way = functools.partial(peers.flash_attention_3().flash_attn_with_kvcache, q8, inputs.k8, inputs.v8, **options)
    yield "FlashAttention-3, q in e4m3 too", way


def measure_fp8() -> Iterator[list[Row]]:
    """Measure an e4m3 cache and a bfloat16 one. GB/s count each one's own bytes."""
    for row in FP8_ROWS:
        inputs = EightBits(row)
        eights: dict[str, Way] = {"e4m3": functools.partial(inputs.of8, *inputs.bytes8)}
        for page in PAGES:
            k, v, table = inputs.in_pages(page, *inputs.bytes8)
            eights[f"e4m3, pages of {page}"] = functools.partial(inputs.of8, k, v, block_table=table)
        exact, others = inputs.call16(), able(inputs, eights)
        # These round more, or differently: see `error`.
        others |= dict(peers_of((flash_attention_3_of_e4m3, flashinfer_of_e4m3), inputs))
        errors = {name: _rms(way(), exact) for name, way in others.items()}
        rows = timed("fp8", inputs, {"bfloat16": inputs.call16, **others}, "bfloat16")
        for each in rows:
            each["error"] = errors.get(each["name"], 0.0)
            if each["name"] != "bfloat16":
                each["gb_per_s"] /= 2
        yield rows


_BUSY = ".avg.pct_of_peak_sustained_active"
COUNTED = {
    "ms": "gpu__time_duration.sum",
    "dram bytes read": "dram__bytes_read.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "issue slots used %": f"smsp__issue_active{_BUSY}",
    "alu pipe %": f"sm__inst_executed_pipe_alu{_BUSY}",
    "fma pipe %": f"sm__inst_executed_pipe_fma{_BUSY}",
    "xu pipe %": f"sm__inst_executed_pipe_xu{_BUSY}",
    "lsu pipe %": f"sm__inst_executed_pipe_lsu{_BUSY}",
    "tensor pipe %": f"sm__pipe_tensor_op_hmma_cycles_active{_BUSY}",
    "shared memory %": f"l1tex__data_pipe_lsu_wavefronts_mem_shared{_BUSY}",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
STALLS = "long_scoreboard", "short_scoreboard", "wait", "math_pipe_throttle", "mio_throttle", "barrier", "not_selected"


def launch_both(row: Sizes) -> None:
    """Launch the kernel on a bfloat16 and on an e4m3 cache, for a profiler."""
    inputs = EightBits(row)
    inputs.call16()
    inputs.of8(*inputs.bytes8)
    inputs.torch.cuda.synchronize()


def measure_counters() -> Iterator[list[Row]]:
    """Count with Nsight Compute what a bfloat16 and an e4m3 cache keep busy."""
    stalls = {f"stalled: {state}": counters.stall_metric(state) for state in STALLS}
    wanted = COUNTED | stalls
    for at, row in enumerate(COUNTED_ROWS):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "ncu.csv")
            words = ("helpers.bench.studies.decoding", str(at))
            ncu.profile(target, list(wanted.values()), ["split_kv"], words)
            launches = ncu.launches_of(target.read_text())
        rows = []
        for name, (_, columns) in zip(("bfloat16", "e4m3"), launches, strict=True):
            found = {what: columns[metric] for what, metric in wanted.items() if metric in columns}
            numbers = {what: float(value.replace(",", "")) for what, (value, _) in found.items()}
            numbers["ms"] /= 1e6  # Nsight Compute's base unit of time is a nanosecond
            rows.append({"part": "counters", "row": list(row), "name": name, **numbers})
        yield rows


def measure_real() -> Iterator[list[Row]]:
    """Measure errors with real K and V, from 12 heads of all-MiniLM-L6-v2, rounded to bfloat16 and to e4m3."""
    wide = np.stack([np.stack(real_inputs(head)) for head in range(REAL_HEADS)], axis=2)[:, None]
    q = wide[0].astype(dtype_of("bfloat16"))
    exact, _ = reference.attention_with_kvcache(
        q.astype(np.float64), wide[1], wide[2], np.array([q.shape[1]]), causal=False
    )
    caches = np.pad(wide[1:], [(0, 0)] * 4 + [(0, 64 - wide.shape[-1])])  # a width that decoding supports
    by_head = descale_of(caches, axis=(2, 4))
    ways = {
        "bfloat16": (caches.astype(q.dtype), {}),
        "e4m3, no descales": (quantise(caches), {}),
        "e4m3": (quantise(caches, by_head), dict(zip(("k_descale", "v_descale"), by_head[:, :, 0, :, 0], strict=True))),
    }
    rows = []
    for name, ((k, v), descales) in ways.items():
        given = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": np.array([q.shape[1]], np.int32), **descales}
        there = {key: cp.asarray(np.ascontiguousarray(a)) for key, a in given.items()}
        o = cp.asnumpy(flash_attention_with_kvcache(**there, causal=False)).astype(np.float64)
        of_head = np.sqrt(np.square(o - exact).mean(axis=(0, 1, 3)) / np.square(exact).mean(axis=(0, 1, 3)))
        rows.append({"part": "real", "name": name, "rms": float(np.median(of_head)), "rms_of_heads": of_head.tolist()})
    yield rows


def _rms(o: Any, exact: Any) -> float:
    """Return the rms of a difference relative to that of `exact`."""
    o = o[0] if isinstance(o, tuple) else o
    difference = o.float().reshape(exact.shape) - exact.float()
    return float(difference.square().mean().sqrt() / exact.float().square().mean().sqrt())


def measure_parts() -> Iterator[list[Row]]:
    """Measure how many blocks saturate the bandwidth: units in 1, 2, 4, ... parts, a block for each."""
    for row, most in PARTS:
        inputs = CacheInputs(row, pages=())
        units = len(inputs.host_lengths) * inputs.kv_heads
        counts = (2**i for i in range(most.bit_length()))
        ways = {f"{units * parts} blocks": functools.partial(inputs.call, num_splits=parts) for parts in counts}
        yield timed("parts", inputs, able(inputs, ways))


def _device_arrays(inputs: CacheInputs, k: Any, v: Any, **more: Any) -> dict[str, Any]:
    """Return the arrays of a call on the device."""
    arrays = {"q": inputs.q, "k_cache": k, "v_cache": v, "cache_seqlens": inputs.lengths, **more}
    return {name: kind_of(a).device_array(a) for name, a in arrays.items()}


def measure_grids() -> Iterator[list[Row]]:
    """Measure grids whose blocks have equal shares and one with all resident blocks, and the L2 cache's hint."""
    mixed = MIXED[0], MIXED[2], *HEADS
    for row, lengths in (*((row, None) for row in GRID_ROWS), (mixed, mixed_lengths())):
        inputs = CacheInputs(row, lengths, pages=())
        given = _device_arrays(inputs, inputs.k, inputs.v)
        changed: dict[str, tuple[dict[str, int], dict[str, int]]] = {
            "equal shares": ({}, {}),
            "all that are resident": ({}, {"NEARLY_ALL": 2}),
        }
        if row[0] * row[3] >= 2 * limits.multiprocessors():  # otherwise it has none anyway
            changed["equal shares, no hint"] = ({"READ_ONCE": 0}, {})
        ways = {}
        for name, (sizes, constants) in changed.items():
            (ways[name],) = _tuned(given, sizes, **constants).values()
        yield timed("grids", inputs, ways, "all that are resident", **({"lengths": lengths} if lengths else {}))


def measure_dims() -> Iterator[list[Row]]:
    """Measure other head_dims than 64, 128 and 256, and a V with another one than K: GB/s count their bytes."""
    for d, d_v in DIMS:
        inputs = CacheInputs((8, 8192, *HEADS[:2], d), pages=(16,), d_v=d_v)
        yield timed("dims", inputs, able(inputs, ours(inputs), (sdpa, flash_attention_3)), "cuDNN", d_v=d_v)


def measure_tune_fp8() -> Iterator[list[Row]]:
    """Measure other numbers of warps, stages and keys per tile for an e4m3 cache."""
    for row in (ROWS[0], ROWS[7]):
        inputs = EightBits(row)
        given = _device_arrays(inputs, *inputs.bytes8, **inputs.descales)
        ways: dict[str, Way] = {}
        for warps, stages, block_n in TUNED_FP8:
            ways |= _tuned(given, {"WARPS": warps, "STAGES": stages, "BLOCK_N": block_n})
        yield [{**each, "gb_per_s": each["gb_per_s"] / 2} for each in timed("tune_fp8", inputs, ways)]


def _tuned(given: Mapping[str, Any], sizes: Mapping[str, int], **constants: int) -> dict[str, Way]:
    """Prepare the kernel with these sizes, if they fit, and these values of decoders.py's constants."""
    _, call, _ = decoding.check({name: Spec.of(a) for name, a in given.items()}, decoding.DecodeOptions())
    chosen = {**decoders.SPLIT_KV.sizes_for(call), **sizes}
    if decoders.shared_bytes(chosen, 2) + decoders.RESERVED > limits.most_shared():
        return {}

    def prepared() -> Way:
        planned, arrays = decoding.plan(given, decoding.DecodeOptions(), sizes=sizes)
        launch = planned.bind(arrays)
        launch()
        return launch

    try:
        launch = _with_constants(prepared, constants, decoders)
    except Exception as error:
        print(f"{sizes}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return {}
    tried = {name: chosen[name] for name in ("WARPS", "STAGES", "BLOCK_N")} | constants
    return {" ".join(f"{name}={value}" for name, value in tried.items()): launch}


def measure_host() -> Iterator[Row]:
    """Measure a call's host time in microseconds, which does not depend on the lengths."""
    inputs = CacheInputs((8, 512, *HEADS), pages=(16,))
    ways = ours(inputs)
    k, v, table = inputs.paged[16]
    new = inputs.torch.randn(*v[:8, :1].shape, device=TORCH_DEVICE).to(inputs.q.dtype)
    call = functools.partial(flash_attention_with_kvcache, inputs.q, k, v, k=new, v=new.clone())
    lengths = {"cache_seqlens": inputs.lengths - 1, "block_table": table}
    angles = inputs.torch.ones(512, 32, device=TORCH_DEVICE)
    appended = "pages of 16, with k and v"
    ways[appended] = functools.partial(call, **lengths)
    ways[f"{appended}, int64"] = functools.partial(call, **{name: a.long() for name, a in lengths.items()})
    ways[f"{appended}, rotary"] = functools.partial(call, **lengths, rotary_cos=angles, rotary_sin=angles)
    for name, way in ways.items():
        way()
        yield {"part": "host", "name": name, "us": 1e3 * host_time(way).ms}


STUDY = Study(
    "decoding",
    {
        "rows": measure_rows,
        "mixed": measure_mixed,
        "steps": measure_steps,
        "tune_fp8": measure_tune_fp8,
        "host": measure_host,
        "long": measure_long,
        "prefix": measure_prefix,
        "tree": measure_tree,
        "fp8": measure_fp8,
        "dims": measure_dims,
        "parts": measure_parts,
        "grids": measure_grids,
        "real": measure_real,
        "counters": measure_counters,
        "graph": lambda: decode_loop.graph_rows(),
        "server": lambda: decode_loop.server_rows(),
    },
    head=lambda: {"device": device_facts(), "how": __doc__},
    line=lambda row: line(row),
    optional=("tune_fp8", "counters"),
    needs=("torch",),
)
take = STUDY.take


# ---- its text


def line(row: Mapping[str, Any]) -> str:
    """Format one row of a record."""
    if row["part"] == "host":
        return f"{'host':44}{row['name']:34}{row['us']:8.1f} us"
    if row["part"] == "real":
        low, high = min(row["rms_of_heads"]), max(row["rms_of_heads"])
        return f"{'real':44}{row['name']:34}{row['rms']:8.2%} rms error; a head's {low:.2%} to {high:.2%}"
    if row["part"] == "counters":
        numbers = (f"{what} {value:,.4g}" for what, value in row.items() if what not in ("part", "row", "name"))
        return f"counters{row['row']!s:36}{row['name']:12}" + "; ".join(numbers)
    if row["part"] in ("graph", "server"):
        what = f"{row['part']:6}{row['batch']:4} sequences" if "batch" in row else row["part"]
        more = f"{row['us_per_step']:8.1f} us a step" if "us_per_step" in row else f"{row['evicted']:4} evictions"
        return f"{what:44}{row['name']:34}{more} {row['tokens_per_s']:9,.0f} tokens/s"
    batch, keys, heads, kv_heads, d = row["row"]
    of_v = f", V {row['d_v']}" if row.get("d_v", d) != d else ""
    what = f"{row['part']:6}{batch:4} x {keys:6} keys, {heads}/{kv_heads} heads of {d}{of_v}"
    more = f"  {row['speed']:.2f} x" if "speed" in row else ""
    more += f"  {row['beside_the_step_before']:.2f} x the step before" if "beside_the_step_before" in row else ""
    return f"{what:44}{row['name']:34}{1e3 * row['ms']:8.1f} us {row['gb_per_s']:6.0f} GB/s{more}"


recorded = records.reader("nvidia-h200-decoding.json", "nvidia-h100-80gb-hbm3-decoding.json")


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text."""
    return "\n".join(map(line, record["rows"]))


if __name__ == "__main__":  # run by Nsight Compute
    launch_both(COUNTED_ROWS[int(words_of_process("decoding", 1)[0])])

"""Compare decoding with cuDNN, FlashAttention and FlashInfer on a GPU: how fast K and V are read.

    python3 -m helpers.bench.study decoding FILE [PART ...]  # of STUDY, below; all but the optional ones

bfloat16, one new token of each sequence. Every result is compared with float64 in two heads first. Then all are timed
in turns, the queue kept full, so no host time is in them, and after another array has been read: the L2
cache holds nothing of K and V, nor anything to be written back. GB/s are those of K and V, each once. Peers are
there where they can be imported: PyTorch's SDPA, FlashAttention-3 (flash_attn_interface, or the wheel fa3-fwd) and
FlashInfer. "tune" and "tune_fp8" try other sizes, "counters" needs Nsight Compute. GB/s of "prefix" are those of the
bytes that its best way reads: the prefix once. "graph" and "server" are loops of a small GPT, by the host's clock.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.attention import decoders, decoding, flash_attention_with_kvcache, reference, shared_prefix
from helpers.attention.check import real_inputs
from helpers.attention.fp8 import descale_of, quantise
from helpers.attention.ladder import limits
from helpers.attention.ladder.kinds import kind_of
from helpers.attention.ladder.layout import Spec
from helpers.bench import counters, decode_loop, ncu, records
from helpers.bench.harness import Row, Study, Way, compare
from helpers.bench.host_cost import host_time
from helpers.bench.peers import FLASH_ATTENTION_3, TORCH_DEVICE
from helpers.bench.run import device_facts
from helpers.device import cp
from helpers.engine.cuda_source.c_types import dtype_of

# (sequences, keys of each, heads of q, heads of K and V, head_dim)
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
TUNE_ROWS = *STEP_ROWS, ROWS[6]
MIXED = 64, 100, 32768  # sequences, and their shortest and longest
PAGES = 16, 64
HEADS = 32, 8, 128  # of the parts below: heads of q, of K and V, head_dim
# Few sequences, of which one is long: their keys.
LONG = (
    (65536, 1024, 1024, 1024),
    (32768, 2048, 2048, 2048),
    (65536, *7 * (2048,)),
    (32768, *7 * (4096,)),
)
LONG_SPLITS = 8, 33
PARTS = ((8, 8192, *HEADS), 4), ((8, 65536, *HEADS), 4), ((1, 65536, *HEADS), 32)  # and the most parts of a unit
DIMS = (80, 80), (96, 96), (112, 112), (192, 192), (192, 128)  # of K and of V
PREFIXES = (16, 8192, 256), (64, 8192, 256), (64, 2048, 512), (16, 32768, 512)  # sequences, keys shared, keys of each
TREES = (8, 8192, 8), (1, 8192, 16), (32, 2048, 8)  # sequences, keys, drafts among them
FP8_ROWS: tuple[Sizes, ...] = *ROWS[:6], ROWS[7]
TUNED_FP8 = tuple(itertools.product((8, 12, 16), (2, 3, 4), (16, 32)))
REAL_HEADS = 12
COUNTED_ROWS = ROWS[0], ROWS[3], ROWS[7]
GRID_ROWS = ROWS[0], *ROWS[2:6], ROWS[7]
ROUNDS = 15
DTYPE = "bfloat16"
TOLERANCE = 2e-2  # of the largest number of a head


class CacheInputs:
    """PyTorch's tensors of a row: q (batch, 1, heads, d), caches (batch, keys, kv_heads, d), and the same in pages."""

    def __init__(
        self, row: Sizes, lengths: Sequence[int] | None = None, *, pages: Sequence[int] = PAGES, d_v: int = 0
    ) -> None:
        import torch

        batch, keys, self.heads, self.kv_heads, self.d = row
        self.d_v = d_v or self.d
        self.host_lengths = list(lengths) if lengths is not None else [keys] * batch
        self.torch = torch
        torch.manual_seed(5)
        self.lengths = torch.tensor(self.host_lengths, dtype=torch.int32, device=TORCH_DEVICE)
        self.q = torch.randn(batch, 1, self.heads, self.d, device=TORCH_DEVICE).to(getattr(torch, DTYPE))
        shape, how = (batch, keys, self.kv_heads), {"device": TORCH_DEVICE, "dtype": getattr(torch, DTYPE)}
        self.k, self.v = (torch.randn(*shape, d, **how) for d in (self.d, self.d_v))
        self.paged = {page: self._in_pages(page, keys) for page in pages}

    def _in_pages(self, page: int, keys: int) -> tuple[Any, Any, Any]:
        """Make caches (pages, page, kv_heads, d) with their pages in any order, and the block table."""
        torch, batch = self.torch, len(self.host_lengths)
        order = torch.randperm(batch * keys // page, device=TORCH_DEVICE)
        table = order.to(torch.int32).reshape(batch, keys // page)
        caches = []
        for a in (self.k, self.v):
            cache = torch.empty(batch * keys // page, page, *a.shape[2:], device=TORCH_DEVICE, dtype=a.dtype)
            cache[order] = a.reshape(cache.shape)
            caches.append(cache)
        return (*caches, table)

    @property
    def bytes(self) -> int:
        """Bytes of all K and V."""
        return 2 * sum(self.host_lengths) * self.kv_heads * (self.d + self.d_v)

    def exact(self, sequence: int, head: int) -> np.ndarray:
        """Return the output of one head in float64."""
        n, kv_head = self.host_lengths[sequence], head // (self.heads // self.kv_heads)
        q = self.q[sequence, 0, head].double()
        k, v = (a[sequence, :n, kv_head].double() for a in (self.k, self.v))
        return ((q @ k.T * self.d**-0.5).softmax(0) @ v).cpu().numpy()

    def error(self, o: Any) -> float:
        """Return the largest error in two heads, of an output with the heads of a sequence in order."""
        o = o.reshape(len(self.host_lengths), self.heads, self.d_v).float().cpu().numpy()
        exact = {at: self.exact(*at) for at in ((0, 0), (len(o) - 1, self.heads - 1))}
        return max(float(np.abs(o[at] - head).max() / np.abs(head).max()) for at, head in exact.items())


# ---- our kernel and its peers


def ours(inputs: CacheInputs) -> Iterator[tuple[str, Way]]:
    """Yield the kernel on contiguous caches and on pages."""
    call = functools.partial(flash_attention_with_kvcache, inputs.q, cache_seqlens=inputs.lengths)
    yield "contiguous", functools.partial(call, inputs.k, inputs.v)
    for page, (k, v, table) in inputs.paged.items():
        yield f"pages of {page}", functools.partial(call, k, v, block_table=table)


def sdpa(inputs: CacheInputs) -> Iterator[tuple[str, Way]]:
    """Yield PyTorch's SDPA, which takes no lengths, if all sequences have the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (a.transpose(1, 2) for a in (inputs.q, inputs.k, inputs.v))

    def run(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return inputs.torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    if len(set(inputs.host_lengths)) == 1:
        yield "SDPA flash", functools.partial(run, SDPBackend.FLASH_ATTENTION)
        yield "cuDNN", functools.partial(run, SDPBackend.CUDNN_ATTENTION)


def flash_attention_3(inputs: CacheInputs) -> Iterator[tuple[str, Way]]:
    """Yield FlashAttention-3's flash_attn_with_kvcache."""
    found = [name for name in FLASH_ATTENTION_3 if importlib.util.find_spec(name)]
    module = importlib.import_module(found[0] if found else FLASH_ATTENTION_3[0])
    call = functools.partial(module.flash_attn_with_kvcache, inputs.q, cache_seqlens=inputs.lengths, causal=True)
    yield "FlashAttention-3", functools.partial(call, inputs.k, inputs.v)
    for page, (k, v, table) in inputs.paged.items():
        yield f"FlashAttention-3, pages of {page}", functools.partial(call, k, v, page_table=table)


def flashinfer(inputs: CacheInputs) -> Iterator[tuple[str, Way]]:
    """Yield FlashInfer, planned on the host before, with pages of 16."""
    module = importlib.import_module(FLASH_INFER)
    torch, page = inputs.torch, 16
    if page not in inputs.paged:
        return
    k, v, table = inputs.paged[page]
    counts = [-(-n // page) for n in inputs.host_lengths]
    indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=TORCH_DEVICE)
    indices = torch.cat([table[i, :count] for i, count in enumerate(counts)])
    last = torch.tensor([(n - 1) % page + 1 for n in inputs.host_lengths], dtype=torch.int32, device=TORCH_DEVICE)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=TORCH_DEVICE)
    for name, tensor_cores in (("FlashInfer", False), ("FlashInfer, tensor cores", True)):
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        heads = inputs.heads, inputs.kv_heads, inputs.d, page
        wrapper.plan(indptr, indices, last, *heads, q_data_type=inputs.q.dtype, kv_data_type=inputs.q.dtype)
        yield name, functools.partial(wrapper.run, inputs.q[:, 0], (k, v))


def flashinfer_cascade(inputs: CacheInputs, shared: int) -> Iterator[tuple[str, Way]]:
    """Yield FlashInfer's cascade of two levels: pages that all sequences share, and each one's own."""
    module = importlib.import_module(FLASH_INFER)
    torch, (page, (k, v, table)) = inputs.torch, *inputs.paged.items()
    batch, pages = table.shape
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=TORCH_DEVICE)
    common = shared // page
    own = pages - common
    levels = (
        ([0, batch], [0, common], table[0, :common]),
        (range(batch + 1), range(0, batch * own + 1, own), table[:, common:].flatten()),
    )
    rows, indptr = ([ints([*each[i]]) for each in levels] for i in (0, 1))
    last = [ints([page] * (len(each) - 1)) for each in rows]
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=TORCH_DEVICE)
    wrapper = module.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = "fa2"
    heads = inputs.heads, inputs.kv_heads, inputs.d, page
    wrapper.plan(rows, indptr, [each[2] for each in levels], last, *heads, q_data_type=inputs.q.dtype)
    yield "FlashInfer, cascade", functools.partial(wrapper.run, inputs.q[:, 0], (k, v))


def flashinfer_tree(inputs: TreeInputs) -> Iterator[tuple[str, Way]]:
    """Yield FlashInfer with a custom mask, its bits packed before."""
    module = importlib.import_module(FLASH_INFER)
    torch, (page, (k, v, table)) = inputs.torch, *inputs.paged.items()
    (batch, pages), tokens = table.shape, len(inputs.mask)
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=TORCH_DEVICE)
    bits = torch.tensor(np.packbits(inputs.mask.cpu().numpy(), bitorder="little"), device=TORCH_DEVICE)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=TORCH_DEVICE)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    indptr = ints([*range(0, batch * pages + 1, pages)]), table.flatten(), ints([page] * batch)
    heads = inputs.heads, inputs.kv_heads, inputs.d, page
    options = {"packed_custom_mask": bits.repeat(batch), "q_data_type": inputs.q.dtype}
    wrapper.plan(ints([*range(0, batch * tokens + 1, tokens)]), *indptr, *heads, **options)
    wrapper._mask_indptr_buf //= 8  # bytes: plan has counted bits
    run = functools.partial(wrapper.run, inputs.q.flatten(0, 1), (k, v))
    yield "FlashInfer, a mask", lambda: run().unflatten(0, (batch, tokens))


def flashinfer_of_e4m3(inputs: EightBits) -> Iterator[tuple[str, Way]]:
    """Yield FlashInfer with K and V in e4m3 and no scales, which it has for whole tensors alone."""
    module = importlib.import_module(FLASH_INFER)
    torch, page, (batch, keys) = inputs.torch, 16, inputs.k8.shape[:2]
    k, v = (a.to(inputs.k8.dtype).view(-1, page, *a.shape[2:]) for a in inputs.of16)
    ints = functools.partial(torch.arange, dtype=torch.int32, device=TORCH_DEVICE)
    last = torch.full((batch,), page, dtype=torch.int32, device=TORCH_DEVICE)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=TORCH_DEVICE)
    for name, tensor_cores in (("FlashInfer", False), ("FlashInfer, tensor cores", True)):
        try:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
            heads = inputs.heads, inputs.kv_heads, inputs.d, page
            types = {"q_data_type": inputs.q.dtype, "kv_data_type": k.dtype}
            pages = ints(0, batch * keys // page + 1, keys // page), ints(batch * keys // page), last
            wrapper.plan(*pages, *heads, **types)
            way = functools.partial(wrapper.run, inputs.q[:, 0], (k, v))
            way()
        except Exception as error:  # a peer fails in its own ways
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        else:
            yield name, way


def reading(inputs: CacheInputs) -> Iterator[tuple[str, Way]]:
    """Yield what reading K and V takes alone: their sums, as integers of 64 bits."""
    k, v = (a.view(inputs.torch.int64) for a in (inputs.k, inputs.v))
    yield "read (sum)", lambda: (k.sum(), v.sum())


FLASH_INFER = "flashinfer"
PEERS = sdpa, flash_attention_3, flashinfer


def able(inputs: CacheInputs, makers: Sequence[Callable[[CacheInputs], Iterator[tuple[str, Way]]]]) -> dict[str, Way]:
    """Return the ways that run here and agree with float64; print why others do not."""
    ways: dict[str, Way] = {}
    for maker in makers:
        try:
            for name, way in maker(inputs):
                o = way()
                error = inputs.error(o[0] if isinstance(o, tuple) else o)
                if error < TOLERANCE:
                    ways[name] = way
                else:
                    print(f"WRONG: {name}: {error}", flush=True)
        except Exception as error:  # a peer fails in its own ways
            print(f"{getattr(maker, '__name__', maker)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return ways


def timed(what: Mapping[str, Any], inputs: CacheInputs, ways: Mapping[str, Way], over: str) -> list[Row]:
    """Time ways in turns: a row of each, with its speed over the way of that name."""
    timed = compare(ways, ROUNDS, over=over, read=True)
    return [{**what, "name": name, **row, "gb_per_s": inputs.bytes / row["ms"] / 1e6} for name, row in timed.items()]


# ---- the parts of the record


def measure_rows() -> Iterator[list[Row]]:
    """Measure every row of the table: ours, peers, and what reading takes."""
    for row in ROWS:
        inputs = CacheInputs(row)
        ways = able(inputs, (ours, *PEERS)) | dict(reading(inputs))
        yield timed({"part": "rows", "row": list(row)}, inputs, ways, "cuDNN")


def mixed_lengths() -> list[int]:
    """Draw the lengths of MIXED, uniform between the shortest and the longest, and both of these."""
    count, least, most = MIXED
    return [least, most, *map(int, np.random.default_rng(7).integers(least, most + 1, count - 2))]


def measure_mixed() -> Iterator[list[Row]]:
    """Measure sequences of very different lengths."""
    count, _, most = MIXED
    row = count, most, 32, 8, 128
    inputs = CacheInputs(row, mixed_lengths(), pages=(16,))
    what = {"part": "mixed", "row": list(row), "lengths": inputs.host_lengths}
    yield timed(what, inputs, able(inputs, (ours, flash_attention_3, flashinfer)), "FlashInfer")


def measure_steps() -> Iterator[list[Row]]:
    """Measure the steps to the kernel, each compared with the one before it."""
    for row in STEP_ROWS:
        inputs = CacheInputs(row, pages=())

        def steps(inputs: CacheInputs) -> Iterator[tuple[str, Way]]:
            for name in decoders.DECODERS:
                yield (
                    name,
                    functools.partial(
                        flash_attention_with_kvcache,
                        *(inputs.q, inputs.k, inputs.v),
                        cache_seqlens=inputs.lengths,
                        stage=name,
                    ),
                )

        rows = timed({"part": "steps", "row": list(row)}, inputs, able(inputs, (steps,)), "")
        for before, after in itertools.pairwise(rows):
            after["beside_the_step_before"] = before["ms"] / after["ms"]
        yield rows


def measure_long() -> Iterator[list[Row]]:
    """Measure few sequences of which one is long: by the last block, with more parts too, and by equal stretches."""
    for lengths in LONG:
        row = len(lengths), max(lengths), *HEADS
        inputs = CacheInputs(row, lengths, pages=())
        call = functools.partial(
            flash_attention_with_kvcache, *(inputs.q, inputs.k, inputs.v), cache_seqlens=inputs.lengths
        )

        def ways(inputs: CacheInputs, call: Any = call) -> Iterator[tuple[str, Way]]:
            yield "last_block", functools.partial(call, stage="last_block")
            for splits in LONG_SPLITS:
                yield f"last_block, {splits} parts", functools.partial(call, stage="last_block", num_splits=splits)
            yield "equal_stretches", functools.partial(call, stage="equal_stretches")
            yield "contiguous", call

        what = {"part": "long", "row": list(row), "lengths": list(lengths)}
        yield timed(what, inputs, able(inputs, (ways, flash_attention_3)), "last_block")


def shared_prefix_inputs(sequences: int, shared: int, own: int) -> CacheInputs:
    """Make caches that all begin with the same keys and values, and the same in pages of 64, where these are once."""
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
    """Measure a prefix that all sequences share: a cache each, the same pages for all, and one call of both parts."""
    for sequences, shared, own in PREFIXES:
        inputs = shared_prefix_inputs(sequences, shared, own)
        once = 4 * (shared + sequences * own) * inputs.kv_heads * inputs.d  # bytes
        prefix = {f"prefix_{name}": a[0, :shared].contiguous() for name, a in (("k", inputs.k), ("v", inputs.v))}
        k, v = (a[:, shared:].contiguous() for a in (inputs.k, inputs.v))
        lengths = inputs.lengths - shared

        def one_call(
            inputs: CacheInputs, k: Any = k, v: Any = v, lengths: Any = lengths, prefix: Any = prefix
        ) -> Iterator[tuple[str, Way]]:
            call = functools.partial(flash_attention_with_kvcache, inputs.q, k, v, cache_seqlens=lengths, **prefix)
            yield "prefix", functools.partial(_with_rows_of_parts, 0, call)
            yield "prefix, by 14", functools.partial(_with_rows_of_parts, 1 << 30, call)

        what = {"part": "prefix", "row": [sequences, shared + own, *HEADS], "shared": shared}
        cascade = functools.partial(flashinfer_cascade, shared=shared)
        rows = timed(what, inputs, able(inputs, (ours, one_call, sdpa, flash_attention_3, cascade)), "contiguous")
        yield [{**row, "gb_per_s": once / row["ms"] / 1e6, "bytes": [inputs.bytes, once]} for row in rows]


def _with_rows_of_parts(rows: int, call: Way) -> Any:
    """Call with another limit of shared_prefix.ROWS_OF_PARTS."""
    kept, shared_prefix.ROWS_OF_PARTS = shared_prefix.ROWS_OF_PARTS, rows
    try:
        return call()
    finally:
        shared_prefix.ROWS_OF_PARTS = kept


def random_tree(tokens: int, seed: int = 11) -> np.ndarray:
    """Draw the token that each one follows: one of those before it, or -1; int32 (tokens,)."""
    rng = np.random.default_rng(seed)
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
    """A row with the drafts of a tree as its newest tokens: q (batch, drafts, heads, d)."""

    def __init__(self, row: Sizes, drafts: int) -> None:
        super().__init__(row, pages=(16,))
        torch, shape = self.torch, (row[0], drafts, self.heads, self.d)
        self.q = torch.randn(*shape, device=TORCH_DEVICE).to(getattr(torch, DTYPE))
        tree = random_tree(drafts)
        self.tree = torch.tensor(tree, device=TORCH_DEVICE)
        self.mask = torch.tensor(tree_mask(tree, row[1]), device=TORCH_DEVICE)

    def exact(self, sequence: int, head: int) -> np.ndarray:
        """Return the output of one head in float64, (drafts, d)."""
        kv_head = head // (self.heads // self.kv_heads)
        q = self.q[sequence, :, head].double()
        k, v = (a[sequence, :, kv_head].double() for a in (self.k, self.v))
        scores = (q @ k.T * self.d**-0.5).masked_fill(~self.mask, float("-inf"))
        return (scores.softmax(-1) @ v).cpu().numpy()

    def error(self, o: Any) -> float:
        """Return the largest error in two heads of an output (batch, drafts, heads, d)."""
        o = o.float().cpu().numpy()
        errors = []
        for sequence, head in ((0, 0), (len(o) - 1, self.heads - 1)):
            exact = self.exact(sequence, head)
            errors.append(np.abs(o[sequence, :, head] - exact).max() / np.abs(exact).max())
        return float(max(errors))


def measure_tree() -> Iterator[list[Row]]:
    """Measure drafts that form a tree; as many in a chain, which sees other keys; and SDPA with a mask."""
    for sequences, keys, drafts in TREES:
        inputs = TreeInputs((sequences, keys, *HEADS), drafts)
        call = functools.partial(
            flash_attention_with_kvcache, *(inputs.q, inputs.k, inputs.v), cache_seqlens=inputs.lengths
        )

        def ours_and_mask(inputs: TreeInputs, call: Any = call) -> Iterator[tuple[str, Way]]:
            yield "tree", functools.partial(call, tree=inputs.tree)
            q, k, v = (a.transpose(1, 2) for a in (inputs.q, inputs.k, inputs.v))
            masked = functools.partial(inputs.torch.nn.functional.scaled_dot_product_attention, q, k, v)
            run = functools.partial(masked, attn_mask=inputs.mask, enable_gqa=True)
            yield "SDPA, a mask", lambda: run().transpose(1, 2)

        ways = able(inputs, (ours_and_mask, flashinfer_tree))  # type: ignore[arg-type]
        call()
        ways["a chain"] = call
        what = {"part": "tree", "row": [sequences, keys, *HEADS], "drafts": drafts}
        yield timed(what, inputs, ways, "a chain")


class EightBits(CacheInputs):
    """A row whose caches are in e4m3, too: k8, v8, with a descale for each sequence and head of K and V."""

    def __init__(self, row: Sizes) -> None:
        super().__init__(row, pages=())
        self.of16 = self.k, self.v
        self.k8, self.k_descale, self.k = self._quantised(self.k)
        self.v8, self.v_descale, self.v = self._quantised(self.v)

    def _quantised(self, a: Any) -> tuple[Any, Any, Any]:
        """Return e4m3, the descales (batch, kv_heads), and the numbers that these are, in float32."""
        torch = self.torch
        descale = a.abs().amax(dim=(1, 3)).float() / 448
        by_head = descale[:, None, :, None]
        eights = (a.float() / by_head).clamp(-448, 448).to(torch.float8_e4m3fn)
        return eights, descale, eights.float() * by_head

    def in_pages(self, page: int) -> tuple[Any, Any, Any]:
        """Return k8 and v8 as (pages, page, kv_heads, d), their pages in any order, and the block table."""
        torch, (batch, keys) = self.torch, self.k8.shape[:2]
        order = torch.randperm(batch * keys // page, device=TORCH_DEVICE)
        caches = []
        for a in (self.k8, self.v8):
            paged = a.view(torch.uint8).reshape(-1, page, *a.shape[2:])
            cache = torch.empty_like(paged)
            cache[order] = paged
            caches.append(cache)
        return (*caches, order.to(torch.int32).reshape(batch, -1))


def flash_attention_3_of_e4m3(inputs: EightBits) -> Iterator[tuple[str, Way]]:
    """Yield FlashAttention-3 with all of q, k and v in e4m3: it takes no other q with such a cache."""
    module = importlib.import_module(next(filter(importlib.util.find_spec, FLASH_ATTENTION_3)))
    batch, group = len(inputs.host_lengths), inputs.heads // inputs.kv_heads
    descale = inputs.q.abs().amax(dim=(1, 3)).float().reshape(batch, inputs.kv_heads, group).amax(-1) / 448
    q8 = (inputs.q.float() / descale.repeat_interleave(group, 1)[:, None, :, None]).to(inputs.k8.dtype)
    options = {"cache_seqlens": inputs.lengths, "causal": True, "q_descale": descale}
    options |= {"k_descale": inputs.k_descale, "v_descale": inputs.v_descale}
    yield (
        "FlashAttention-3, q in e4m3 too",
        functools.partial(module.flash_attn_with_kvcache, q8, inputs.k8, inputs.v8, **options),
    )


def measure_fp8() -> Iterator[list[Row]]:
    """Measure a cache in e4m3 beside one in bfloat16. GB/s are those of each one's own bytes."""
    for row in FP8_ROWS:
        inputs = EightBits(row)
        lengths = {"cache_seqlens": inputs.lengths}
        descales = {"k_descale": inputs.k_descale, "v_descale": inputs.v_descale}
        wide = functools.partial(flash_attention_with_kvcache, inputs.q, *inputs.of16, **lengths)
        exact = wide()

        def eights(inputs: EightBits, lengths: Any = lengths, descales: Any = descales) -> Iterator[tuple[str, Way]]:
            call = functools.partial(flash_attention_with_kvcache, inputs.q, **lengths, **descales)
            k8, v8 = (a.view(inputs.torch.uint8) for a in (inputs.k8, inputs.v8))
            yield "e4m3", functools.partial(call, k8, v8)
            for page in PAGES:
                k, v, table = inputs.in_pages(page)
                yield f"e4m3, pages of {page}", functools.partial(call, k, v, block_table=table)

        ways = {"bfloat16": wide}
        ways |= able(inputs, (eights,))  # type: ignore[arg-type]
        errors = {name: _rms(way(), exact) for name, way in ways.items() if name != "bfloat16"}
        for maker in (flash_attention_3_of_e4m3, flashinfer_of_e4m3):  # they round more, or differently: see `error`
            try:
                peers = dict(maker(inputs))
                errors |= {name: _rms(way(), exact) for name, way in peers.items()}
                ways |= peers
            except Exception as error:  # a peer fails in its own ways
                print(f"{maker.__name__}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        rows = timed({"part": "fp8", "row": list(row)}, inputs, ways, "bfloat16")
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
    """Launch the kernel on a cache in bfloat16 and on one in e4m3, for a profiler."""
    inputs = EightBits(row)
    lengths = {"cache_seqlens": inputs.lengths}
    flash_attention_with_kvcache(inputs.q, *inputs.of16, **lengths)
    k8, v8 = (a.view(inputs.torch.uint8) for a in (inputs.k8, inputs.v8))
    descales = {"k_descale": inputs.k_descale, "v_descale": inputs.v_descale}
    flash_attention_with_kvcache(inputs.q, k8, v8, **lengths, **descales)
    inputs.torch.cuda.synchronize()


def measure_counters() -> Iterator[list[Row]]:
    """Count, by Nsight Compute, what a cache in bfloat16 and one in e4m3 keep busy."""
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
    """Measure errors with real K and V, of 12 heads of all-MiniLM-L6-v2, rounded to bfloat16 and to e4m3."""
    wide = np.stack([np.stack(real_inputs(head)) for head in range(REAL_HEADS)], axis=2)[:, None]
    q = wide[0].astype(dtype_of("bfloat16"))
    exact, _ = reference.attention_with_kvcache(
        q.astype(np.float64), wide[1], wide[2], np.array([q.shape[1]]), causal=False
    )
    caches = np.pad(wide[1:], [(0, 0)] * 4 + [(0, 64 - wide.shape[-1])])  # a width that decoding takes
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
    """Return the rms of a difference, of the rms of `exact`."""
    o = o[0] if isinstance(o, tuple) else o
    difference = o.float().reshape(exact.shape) - exact.float()
    return float(difference.square().mean().sqrt() / exact.float().square().mean().sqrt())


def measure_parts() -> Iterator[list[Row]]:
    """Measure how many blocks it takes to read as fast as possible: units in 1, 2, 4, ... parts, a block for each."""
    for row, most in PARTS:
        inputs = CacheInputs(row, pages=())
        call = functools.partial(
            flash_attention_with_kvcache, *(inputs.q, inputs.k, inputs.v), cache_seqlens=inputs.lengths
        )

        def ways(inputs: CacheInputs, call: Any = call, most: int = most) -> Iterator[tuple[str, Way]]:
            units, parts = len(inputs.host_lengths) * inputs.kv_heads, 1
            while parts <= most:
                yield f"{units * parts} blocks", functools.partial(call, num_splits=parts)
                parts *= 2

        yield timed({"part": "parts", "row": list(row)}, inputs, able(inputs, (ways,)), "")


def measure_grids() -> Iterator[list[Row]]:
    """Measure grids whose blocks have equal shares beside one of all that are resident, and the L2 cache's hint."""
    mixed = MIXED[0], MIXED[2], *HEADS
    for row, lengths in (*((row, None) for row in GRID_ROWS), (mixed, mixed_lengths())):
        inputs = CacheInputs(row, lengths, pages=())
        arrays = {"q": inputs.q, "k_cache": inputs.k, "v_cache": inputs.v, "cache_seqlens": inputs.lengths}
        given = {name: kind_of(a).device_array(a) for name, a in arrays.items()}
        ways: dict[str, Way] = {}
        for name, sizes, constants in (
            ("equal shares", {}, {}),
            ("all that are resident", {}, {"NEARLY_ALL": 2}),
            ("equal shares, no hint", {"READ_ONCE": 0}, {}),
        ):
            if name.endswith("hint") and row[0] * row[3] < 2 * limits.multiprocessors():
                continue  # it has none anyway
            (ways[name],) = _tuned(given, sizes, **constants).values()
        what: dict[str, Any] = {"part": "grids", "row": list(row)} | ({"lengths": lengths} if lengths else {})
        yield timed(what, inputs, ways, "all that are resident")


def measure_dims() -> Iterator[list[Row]]:
    """Measure other head_dims than 64, 128 and 256, and a V of another one than K: GB/s are those of their bytes."""
    for d, d_v in DIMS:
        row = 8, 8192, *HEADS[:2], d
        inputs = CacheInputs(row, pages=(16,), d_v=d_v)
        ways = able(inputs, (ours, sdpa, flash_attention_3))
        yield timed({"part": "dims", "row": list(row), "d_v": d_v}, inputs, ways, "cuDNN")


def measure_tune() -> Iterator[list[Row]]:
    """Measure other numbers of warps, stages and keys of a tile, and least numbers of keys of a split."""
    for row in TUNE_ROWS:
        inputs = CacheInputs(row, pages=())
        arrays = {"q": inputs.q, "k_cache": inputs.k, "v_cache": inputs.v, "cache_seqlens": inputs.lengths}
        given = {name: kind_of(a).device_array(a) for name, a in arrays.items()}
        ways: dict[str, Way] = {}
        for warps, stages, block_n in itertools.product((4, 6, 8), (2, 3, 4, 6), (16, 32)):
            ways |= _tuned(given, {"WARPS": warps, "STAGES": stages, "BLOCK_N": block_n})
        for min_keys in (64, 128, 256, 512):
            ways |= _tuned(given, {}, MIN_KEYS=min_keys)
        yield timed({"part": "tune", "row": list(row)}, inputs, ways, "")


def measure_tune_fp8() -> Iterator[list[Row]]:
    """Measure other numbers of warps, stages and keys of a tile for a cache in e4m3."""
    for row in (ROWS[0], ROWS[7]):
        inputs = EightBits(row)
        arrays = {"q": inputs.q, "k_cache": inputs.k8, "v_cache": inputs.v8, "cache_seqlens": inputs.lengths}
        arrays |= {"k_descale": inputs.k_descale, "v_descale": inputs.v_descale}
        views = {name: a.view(inputs.torch.uint8) if "_cache" in name else a for name, a in arrays.items()}
        given = {name: kind_of(a).device_array(a) for name, a in views.items()}
        ways: dict[str, Way] = {}
        for warps, stages, block_n in TUNED_FP8:
            ways |= _tuned(given, {"WARPS": warps, "STAGES": stages, "BLOCK_N": block_n})
        rows = timed({"part": "tune_fp8", "row": list(row)}, inputs, ways, "")
        yield [{**each, "gb_per_s": each["gb_per_s"] / 2} for each in rows]


def _tuned(given: Mapping[str, Any], sizes: Mapping[str, int], **constants: int) -> dict[str, Way]:
    """Prepare the kernel with these sizes, if they fit, and these constants of decoders.py."""
    _, call, _ = decoding.check({name: Spec.of(a) for name, a in given.items()}, decoding.DecodeOptions())
    chosen = {**decoders.SPLIT_KV.sizes_for(call), **sizes}
    if decoders.shared_bytes(chosen, 2) + decoders.RESERVED > limits.most_shared():
        return {}
    kept = {name: getattr(decoders, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(decoders, name, value)
        planned, arrays = decoding.plan(given, decoding.DecodeOptions(), sizes=sizes)
        launch = planned.bind(arrays)
        launch()
    except Exception as error:
        print(f"{sizes}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return {}
    finally:
        for name, value in kept.items():
            setattr(decoders, name, value)
    tried = {name: chosen[name] for name in ("WARPS", "STAGES", "BLOCK_N")} | constants
    return {" ".join(f"{name}={value}" for name, value in tried.items()): launch}


def measure_host() -> Iterator[Row]:
    """Measure what a call takes on the host, in microseconds, whatever the lengths are."""
    inputs = CacheInputs((8, 512, 32, 8, 128), pages=(16,))
    ways = dict(ours(inputs))
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
        "tune": measure_tune,
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
    optional=("tune", "tune_fp8", "counters"),
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


if __name__ == "__main__":  # under Nsight Compute
    launch_both(COUNTED_ROWS[int(sys.argv[1])])

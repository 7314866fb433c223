"""NumPy arrays in the other byte order, as in FITS, HDF5 and NetCDF files, at every entry point.

They are converted on their way to the device, as in CuPy. A device array in that order, which CuPy does not make, is
refused with its name, and so is one that is passed directly to a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_with_kvcache,
    reference,
    ring_attention,
)
from helpers.attention.comms import virtual_ranks
from helpers.attention.ladder import LADDER
from helpers.attention.ring_schedules import shard, unshard
from helpers.attention.rotary_and_projection import attention_projection, rotary
from helpers.device import ON_GPU, cp

SWAPPED = "S"  # for np.dtype.newbyteorder


def inputs(dtype: str, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: (rng.standard_normal(shape) + 0.25).astype(dtype) for name, shape in shapes.items()}


def whole(**numbers: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.int32) for name, value in numbers.items()}


def ring(q: Any, k: Any, v: Any) -> Any:
    ranks = virtual_ranks(2)
    parts = ring_attention(*(ranks.put(shard(a, 2)) for a in (q, k, v)), causal=True, comms=ranks)
    return unshard([cp.asnumpy(a) for a in parts])


MODEL = {"q": (1, 8, 2, 16), "k": (1, 12, 2, 16), "v": (1, 12, 2, 16)}
PACKED = {name: shape[1:] for name, shape in MODEL.items()}
LENGTHS = whole(cu_seqlens_q=[0, 3, 8], cu_seqlens_k=[0, 4, 12])
OF_ROWS = {"do": MODEL["q"], **MODEL, "o": MODEL["q"]}
CACHE = {"q": (2, 1, 2, 64), "k_cache": (2, 9, 2, 64), "v_cache": (2, 9, 2, 64), "k": (2, 1, 2, 64), "v": (2, 1, 2, 64)}
# A call, and its arrays by name: those in half types or float32, then the others.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], dict[str, np.ndarray]]] = {
    "flash_attention": (flash_attention, MODEL, {}),
    "bias": (flash_attention, {**MODEL, "bias": (8, 12)}, {}),
    "slopes": (flash_attention, MODEL, inputs("float32", alibi_slopes=(2,), sinks=(2,))),
    "rotary": (flash_attention, {**MODEL, "rotary_cos": (12, 8), "rotary_sin": (12, 8)}, {}),
    "functions of scores": (
        lambda q, k, v, t: flash_attention(q, k, v, score_mod="score + t[kv_idx]", mod_args={"t": t}),
        MODEL,
        inputs("float32", t=(12,)),
    ),
    "packed": (flash_attention_varlen, PACKED, LENGTHS),
    "backward": (flash_attention_backward, OF_ROWS, inputs("float32", lse=(1, 2, 8))),
    "packed backward": (
        flash_attention_varlen_backward,
        {name: shape[1:] for name, shape in OF_ROWS.items()},
        {**inputs("float32", lse=(2, 8)), **LENGTHS},
    ),
    "with a cache": (flash_attention_with_kvcache, CACHE, whole(cache_seqlens=[3, 8])),
    "with pages": (
        lambda **arrays: flash_attention_with_kvcache(**arrays),
        {name: CACHE[name] if name == "q" else (4, 8, 2, 64) for name in ("q", "k_cache", "v_cache")},
        whole(cache_seqlens=[3, 8], block_table=[[3, 1], [0, 2]]),
    ),
    "rotary alone": (rotary, {name: MODEL[name] for name in "qk"}, inputs("float32", cos=(12, 8), sin=(12, 8))),
    "projection": (attention_projection, {**MODEL, "w_o": (32, 8)}, {}),
    "ring": (ring, dict.fromkeys("qkv", MODEL["q"]), {}),
}


CASES = [(name, dtype) for name in CALLS for dtype in ("float32", "float16")]
CASES.remove(("projection", "float32"))  # it only supports half types


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_an_entry_point_converts(name: str, dtype: str) -> None:
    """For all of its arrays together, and one alone; results are in this machine's byte order."""
    call, shapes, more = CALLS[name]
    arrays = {**inputs(dtype, **shapes), **more}
    swapped = {name: a.astype(a.dtype.newbyteorder(SWAPPED)) for name, a in arrays.items()}
    assert not any(a.dtype.isnative for a in swapped.values())
    wanted = results(call(**{name: a.copy() for name, a in arrays.items()}))
    last = [*arrays][-1]
    for given in (swapped, {**arrays, last: swapped[last]}):
        got = results(call(**{name: a.copy() for name, a in given.items()}))
        for a, want in zip(got, wanted, strict=True):
            assert a.dtype == want.dtype and a.dtype.isnative
            np.testing.assert_allclose(a.astype(np.float64), want.astype(np.float64), rtol=0, atol=2e-3)


def results(of_call: Any) -> list[np.ndarray]:
    return [cp.asnumpy(a) for a in (of_call if isinstance(of_call, tuple) else (of_call,))]


def test_a_cache_keeps_its_byte_order() -> None:
    """The new tokens are written into the caller's array in its own byte order."""
    arrays = {**inputs("float32", **CACHE), **whole(cache_seqlens=[3, 8])}
    swapped = {name: a.astype(a.dtype.newbyteorder(SWAPPED)) for name, a in arrays.items()}
    flash_attention_with_kvcache(**arrays)
    flash_attention_with_kvcache(**swapped)
    for name in ("k_cache", "v_cache"):
        assert not swapped[name].dtype.isnative
        np.testing.assert_array_equal(swapped[name], arrays[name])
    np.testing.assert_array_equal(arrays["k_cache"][0, 3], arrays["k"][0, 0])


def test_the_reference_reads_either() -> None:
    arrays = inputs("float32", q=(8, 16), k=(12, 16), v=(12, 16))
    swapped = (a.astype(a.dtype.newbyteorder(SWAPPED)) for a in arrays.values())
    np.testing.assert_array_equal(reference.attention(*swapped), reference.attention(*arrays.values()))


@pytest.mark.skipif(ON_GPU, reason="CuPy makes no such array")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_device_array_is_refused(dtype: str) -> None:
    arrays = {name: cp.asarray(a).byteswap() for name, a in inputs(dtype, **MODEL).items()}
    arrays = {name: a.view(a.dtype.newbyteorder(SWAPPED)) for name, a in arrays.items()}
    hint = rf"q is .f.*, whose bytes are in the other order than this machine's: q.astype\('{dtype}'\)"
    for call in (flash_attention, rotary if dtype == "float32" else flash_attention):
        more = inputs("float32", cos=(12, 8), sin=(12, 8)) if call is rotary else {}
        with pytest.raises(TypeError, match=hint):
            call(**{name: a for name, a in arrays.items() if name != "v" or not more}, **more)
    cache = {name: cp.asarray(a) for name, a in inputs(dtype, **CACHE).items()}
    cache = {name: a.view(a.dtype.newbyteorder(SWAPPED)) for name, a in cache.items()}
    with pytest.raises(TypeError, match=hint):
        flash_attention_with_kvcache(**cache, cache_seqlens=cp.asarray(np.array([3, 8], np.int32)))


@pytest.mark.parametrize("stage", ["naive", "heads_and_masks", "flash_mma"])
def test_a_stage_is_given_arrays_as_it_takes_them(stage: str) -> None:
    dtype = LADDER[stage].dtypes[0]
    q, k, v = (a.astype(a.dtype.newbyteorder(SWAPPED)) for a in inputs(dtype, q=(8, 16), k=(9, 16), v=(9, 16)).values())
    with pytest.raises(TypeError, match=rf"q is .f.; stage {stage} takes"):
        LADDER[stage](q, k, v)

"""The X-ray counts Hopper's instructions, and selects the order in which they take effect."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_files import cuda_text
from hopper_tiles import HEAD, OPTIONS, halves, map_of
from planted_files import out, planted

from helpers import engine
from helpers.engine import observed
from helpers.xray import xray

# A tile of 64 x 64 halves by TMA; each warp reads 16 rows by ldmatrix and writes them back by stmatrix, with the
# 128-byte swizzle or without one.
FIGURES = cuda_text("xray_hopper_figures")


@pytest.mark.parametrize(("swizzle", "wavefronts"), [(1, 4), (0, 32)])
def test_bank_conflicts_of_a_wrong_swizzle(swizzle: int, wavefronts: int) -> None:
    """The swizzle spreads a column of chunks over all banks; without it the rows share four of them."""
    options = (*OPTIONS, f"-DSWIZZLE={swizzle}")
    function = engine.RawModule(code=HEAD + FIGURES, options=options).get_function("figures")
    source, written = halves(64, 64), engine.full((64, 64), np.nan, np.float16)
    span = 128 if swizzle else 0
    report = xray(function, (1,), (128,), (map_of(source, (64, 64), span), map_of(written, (64, 64), span)), 8192)
    report.assert_clean()
    np.testing.assert_array_equal(engine.asnumpy(written), engine.asnumpy(source))
    lines = FIGURES.splitlines()[2:]
    at = {mark: next(i for i, text in enumerate(lines, 1) if f"// {mark}" in text) for mark in ("load", "store")}
    at |= {mark: next(i for i, text in enumerate(lines, 1) if f"// {mark}" in text) for mark in ("read", "write")}
    for mark in ("read", "write"):
        figures = report.by_line["figures.cu", at[mark]]
        assert (figures.requests, figures.wavefronts) == (16, 16 * wavefronts)
        assert figures.conflicts == 16 * (wavefronts - 4)
    # TMA's bytes are counted, but they are not requests of warps.
    assert report.by_access["figures.cu", at["load"]]["in"].read == 8192
    assert report.by_access["figures.cu", at["store"]]["to"].written == 8192
    assert (report.traffic["in"].read, report.traffic["in"].requests) == (8192, 0)
    assert (report.traffic["to"].written, report.traffic["to"].requests) == (8192, 0)
    np.testing.assert_array_equal(report.fetches["in"], np.ones((64, 64)))


# Two blocks that add their tiles to one array.
ADDED = """
#line 1 "added.cu"
extern "C" __global__ void added(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);
    commit();
    wait_read();
  }
  __syncthreads();
  s[t] = 0;
  read[128 * blockIdx.x + t] = t;
}
"""


def test_additions_are_counted_as_atomics_of_their_bytes() -> None:
    code = HEAD + ADDED
    report = xray(
        engine.RawModule(code=code, options=OPTIONS).get_function("added"),
        (2,),
        (128,),
        (engine.zeros(128, np.float32), out(256)),
    )
    report.assert_clean()
    figures = report.traffic["out"]
    assert (figures.read, figures.written, figures.atomics, figures.requests) == (0, 2 * 512, 2 * 32, 0)
    assert report.shared["s"].read == 2 * 512


def test_what_lies_outside_of_the_array_is_not_read() -> None:
    """A box past the end, and unwritten elements: `never written` sees what the stores have left out."""
    code = HEAD + FIGURES.replace("0, 0);  // load", "0, 40);  // load").replace(
        "0, 0);  // store", "0, 40);  // store"
    )
    function = engine.RawModule(code=code, options=(*OPTIONS, "-DSWIZZLE=1")).get_function("figures")
    source, written = halves(64, 64), engine.empty((64, 64), np.float16)
    report = xray(function, (1,), (128,), (map_of(source, (64, 64)), map_of(written, (64, 64))), 8192)
    assert report.traffic["in"].read == report.traffic["to"].written == 24 * 128
    assert [f.kind for f in report.findings] == ["never written"]
    assert "2,560 of 4,096 elements of to" in report.findings[0].message


def test_the_xray_reads_what_nobody_has_written() -> None:
    function = engine.RawModule(code=HEAD + FIGURES, options=(*OPTIONS, "-DSWIZZLE=1")).get_function("figures")
    source, written = engine.empty((64, 64), np.float16), engine.full((64, 64), np.nan, np.float16)
    engine.asnumpy(source)
    report = xray(function, (1,), (128,), (map_of(source, (64, 64)), map_of(written, (64, 64))), 8192)
    assert {f.kind for f in report.findings} == {"uninitialised", "never written"}
    assert {f.array for f in report.findings} == {"in"}


def test_events_are_in_an_order_that_a_gpu_may_have() -> None:
    """The ring with one buffer: a load arrives before its product, which is done before the buffer is released."""
    bug = planted("released_before_its_wait")
    report = bug.look(fixed=True)
    lines = {kind: [i for i, e in enumerate(report.events) if e.kind == kind] for kind in observed.EVENTS}
    for kind in ("load", "landed", "product", "products done"):
        assert len(lines[kind]) == 3, kind
    releases = [i for i in lines["arrive"] if report.events[i].thread == 0]
    assert len(releases) == 3
    in_order = (lines["load"], lines["landed"], lines["product"], lines["products done"], releases)
    told = [i for turn in zip(*in_order, strict=True) for i in turn]
    assert told == sorted(told)
    loads, products = ([report.events[i] for i in lines[kind]] for kind in ("load", "product"))
    assert {(e.thread, e.value) for e in loads} == {(128, 8192)}
    assert [(e.thread, e.number, e.value) for e in products] == [(0, 0, 8), (0, 1, 8), (0, 2, 8)]
    assert {e.place for e in loads} == {("released_before_its_wait.cu", bug.line("here"))}
    # A warp that waits continues later; one that need not wait just continues.
    for thread in range(0, 256, 32):
        mine = [e.kind for e in report.events if e.thread == thread and e.kind in ("wait", "waited")]
        assert mine.count("waited") >= mine.count("wait") and (not mine or mine[-1] == "waited")


SCALARS = cuda_text("xray_hopper_scalars")


@pytest.mark.parametrize(("other", "kinds"), [("", []), ("p->c = 1;", ["not waited for"])])
def test_sums_that_lie_apart(other: str, kinds: list[str]) -> None:
    function = engine.RawModule(code=HEAD + SCALARS.replace("OTHER", other), options=OPTIONS).get_function("scalars")
    source, written = halves(64, 64), out(128)
    report = xray(function, (1,), (128,), (map_of(source, (64, 64)), written), 8192)
    assert [f.kind for f in report.findings] == kinds
    a = engine.asnumpy(source)[:, :16].astype(np.float32)
    product = a @ a[:8].T
    row, column = [16 * (t // 32) + t % 32 // 4 for t in range(128)], [2 * (t % 4) for t in range(128)]
    four = sum(product[np.add(row, down), np.add(column, right)] for down in (0, 8) for right in (0, 1))
    np.testing.assert_array_equal(engine.asnumpy(written), four + np.arange(128))

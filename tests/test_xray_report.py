"""Learners read a checked run as a table, a listing and pictures. The figures are tested elsewhere."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from helpers import engine, xray
from helpers.attention import kernel
from helpers.attention.check import make_inputs
from helpers.device import cp
from helpers.engine import observed, symbols
from helpers.engine.cuda_source.edit import edit
from helpers.engine.xray import run
from helpers.engine.xray.render import Table
from helpers.lesson import show
from helpers.xray import Figures, Finding, Report

CODE = """#line 1 "k.cu"
__shared__ float tile[32];
extern "C" __global__ void k(const float* A, const float* B, float* O) {
  if (threadIdx.x < 32 && A[0] > B[0]) O[threadIdx.x] = A[threadIdx.x * 32] + B[0];
  tile[threadIdx.x * 32] = 1.0f;
}
"""
RACE = Finding(
    "race",
    "write of word 1 of __shared__ tile by block (0,0,0) thread (1,0,0) at k.cu:4 races with read by block (0,0,0) "
    "thread (0,0,0) at k.cu:3",
    "k.cu",
    4,
    (0, 0, 0),
    (1, 0, 0),
    "tile",
    1,
    "k.cu",
    3,
    count=1234567,
)


def synthetic(**changes: object) -> Report:
    far, near = Figures(read=128, loads=1, sectors=32), Figures(read=256, loads=2, sectors=2)
    both = Figures(read=384, loads=3, sectors=34)
    tile = Figures(written=128, stores=1, shared_requests=1, wavefronts=32, conflicts=31)
    given = {
        "name": "k<half>",
        "code": CODE,
        "findings": [],
        "traffic": {"A": far, "B": near},
        "shared": {"tile": tile, "dynamic shared memory": Figures()},
        "by_line": {("k.cu", 3): both, ("k.cu", 4): tile},
        "fetches": {"A": np.full((4, 8), 3, np.uint32), "B": np.arange(5, dtype=np.uint32)},
        "barriers": 1,
        "collectives": 0,
        "worst": {("k.cu", 4): [("tile", 4, {lane: 128 * lane for lane in range(32)})]},
        "by_access": {("k.cu", 3): {"A": far, "B": near}, ("k.cu", 4): {"tile": tile}},
    }
    return Report(**(given | changes))


def parsed(markup: str) -> ElementTree.Element:
    """Parse the HTML. Raises ParseError if a tag is not closed, or a < is not escaped."""
    return ElementTree.fromstring(f"<div>{markup}</div>")


def texts(element: ElementTree.Element) -> list[str]:
    return ["".join(e.itertext()) for e in element]


# ------------------------------------------------------------------------------------------------------- the table


def test_text() -> None:
    lines = str(synthetic(findings=[RACE])).splitlines()
    assert lines[0] == "k<half>: 1 finding"
    assert max(map(len, lines)) <= 100
    assert " ".join(line.strip() for line in lines[1:4]).startswith("race: write of word 1 of __shared__ tile")
    assert "(1,234,567 times)" in "".join(lines)
    table = [line.split() for line in lines]
    assert ["A", "128", "0", "1", "32.00"] in table
    assert ["__shared__", "tile", "0", "128", "1", "31"] in table
    assert ["dynamic", "shared", "memory", "0", "0", "0", "0"] in table
    assert "1 barrier, counted once for each block or warp." in lines
    assert repr(synthetic()) == str(synthetic())


def test_no_barriers_are_no_line() -> None:
    assert "counted once" not in str(synthetic(barriers=0))
    assert "2 barriers, 1 warp-wide operation, counted" in str(synthetic(barriers=2, collectives=1))


def test_html_has_the_same_words_as_the_text() -> None:
    report = synthetic(findings=[RACE])
    tree = parsed(report._repr_html_())
    rows = [texts(row) for row in tree.iter("tr")]
    assert rows[0] == list(Report.HEAD)
    assert rows[1:] == [list(row) for row in report._rows()]
    assert [str(RACE)] == ["".join(item.itertext()) for item in tree.iter("li")]
    assert "k<half>" in "".join(tree.itertext())
    assert not list(parsed(synthetic()._repr_html_()).iter("li"))


def test_html_leaves_the_text_colour_to_the_theme() -> None:
    for markup in (synthetic(findings=[RACE])._repr_html_(), synthetic().source()._repr_html_()):
        for element in parsed(markup).iter():
            for rule in element.get("style", "").split(";"):
                name, _, value = rule.partition(":")
                assert name != "color"
                assert name != "background" or value.startswith("rgba(")


def test_assert_clean() -> None:
    synthetic().assert_clean()
    with pytest.raises(AssertionError, match=r"k<half>: 1 finding\nrace: write of word 1"):
        synthetic(findings=[RACE]).assert_clean()


def site(size: int, *, requests: int = 1, sectors: int = 0, wavefronts: int = 0) -> observed.Site:
    return observed.Site(("k.cu", 1), 0, size, False, False, 32 * requests, requests, sectors, wavefronts, {})


def test_conflicts_are_wavefronts_beyond_what_the_width_needs() -> None:
    line = Figures()
    line.add(site(4, sectors=4), is_shared=False)
    line.add(site(4, wavefronts=2), is_shared=True)  # two lanes at one bank
    line.add(site(16, wavefronts=4), is_shared=True)  # float4: four wavefronts move 512 bytes, and none is lost
    line.add(site(16, wavefronts=2), is_shared=True)  # a broadcast of one: fewer than four
    assert (line.requests, line.sectors_per_request, line.conflicts) == (4, 4, 1)
    nothing = Figures()
    assert (nothing.sectors_per_request, nothing.wavefronts_per_request, nothing.conflicts) == (0, 0, 0)


# ----------------------------------------------------------------------------------------------------- the listing


def test_a_folded_output_shows_a_short_line() -> None:
    for shown in (synthetic(findings=[RACE]), synthetic().source(), Table([("", "a" * 100, "b"), ("x", "1", "2")])):
        first, _, rest = shown._repr_html_().partition("\n")
        assert first.startswith("<!-- ") and first.endswith(" -->") and 12 < len(first) <= 90 and rest


def test_source() -> None:
    listing = synthetic().source()
    lines = listing.splitlines()
    assert lines[0].split() == ["bytes", "share", "requests", "sect/req", "wave/req"]
    assert len(lines) == 1 + 5 + 2  # the head, the source, and the two arrays of line 3
    at = next(i for i, line in enumerate(lines) if "|    3 " in line)
    assert lines[at].split()[:4] == ["384", "75%", "3", "11.3"]
    assert lines[at + 1].split() == ["128", "25%", "1", "32.0", "|", "of", "which", "A"]
    assert lines[at + 2].split() == ["256", "50%", "2", "1.0", "|", "of", "which", "B"]
    assert lines[at + 3].split()[:5] == ["128", "25%", "1", "32.0", "|"]
    assert repr(listing) == str(listing)
    assert "".join(parsed(listing._repr_html_()).itertext()).removeprefix("\n") == listing


def test_source_around() -> None:
    numbers = [line.split("|")[1].split()[0] for line in synthetic().source(around=0).splitlines() if "|  " in line]
    assert [n for n in numbers if n.isdigit()] == ["3", "4"]
    assert synthetic().source(around=0).count("...") == 2
    assert synthetic().source(around=9) == synthetic().source()


def test_source_marks_both_sides_of_a_finding() -> None:
    lines = synthetic(findings=[RACE], by_line={}, by_access={}).source(around=0).splitlines()
    assert [line.split()[:2] for line in lines if "!" in line] == [["!", "3"], ["!", "4"]]


# ---------------------------------------------------------------------------------------------------- the pictures


def test_heatmap() -> None:
    assert repr(synthetic().heatmap("A", "B")).endswith("A: 3 times each; B: 0 to 4 times>")
    with pytest.raises(KeyError, match="no array 'C'; there are: A, B"):
        synthetic().heatmap("A", "C")


def test_banks() -> None:
    picture = synthetic().banks(4)
    assert "tile, line 4: 32 wavefronts" in repr(picture)
    with pytest.raises(KeyError, match="line 3 touches no shared memory; lines that touch shared memory: 4"):
        synthetic().banks(3)
    with pytest.raises(KeyError, match="line 4 does not touch the shared array 'other'"):
        synthetic().banks(4, "other")
    with pytest.raises(KeyError, match="none"):
        synthetic(worst={}).banks(4)


def test_banks_draws_the_costliest_request() -> None:
    samples = [("tile", 4, {lane: word * lane for lane in range(32)}) for word in (4, 128, 8)]
    assert "32 wavefronts" in repr(synthetic(worst={("k.cu", 4): samples}).banks(4))


@pytest.mark.parametrize(
    ("size", "pitch", "wavefronts"),
    [(8, 8, [1, 1]), (8, 128, [16, 16]), (16, 16, [1, 1, 1, 1]), (16, 128, [8, 8, 8, 8]), (16, 144, [1, 1, 1, 1])],
)
def test_banks_draws_every_word_in_its_phase(size: int, pitch: int, wavefronts: list[int]) -> None:
    samples = [("tile", size, {lane: pitch * lane for lane in range(32)})]
    picture = synthetic(worst={("k.cu", 4): samples}).banks(4)
    assert [int(n) for n in re.findall(r": (\d+) wavefront", repr(picture))] == wavefronts
    for ax in picture.figure.axes:  # 32 words in a phase, one row each
        assert ax.get_ylim() == (32, 0)
        assert len(ax.get_yticks()) == 128 // size


def test_lanes_of_a_pair_at_one_address_are_served_together() -> None:
    """One wavefront serves 16 lanes if neighbours read the same 16 bytes."""
    samples = [("tile", 16, {lane: 16 * (lane // 2) for lane in range(32)})]
    assert repr(synthetic(worst={("k.cu", 4): samples}).banks(4)).count(": 1 wavefront") == 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_bank_picture_is_not_cut(count: int) -> None:
    picture = show.bank_picture({f"{i}": range(32) for i in range(count)})
    canvas = FigureCanvasAgg(picture.figure)
    canvas.draw()  # computes the layout
    width, height = picture.figure.get_size_inches() * picture.figure.dpi
    renderer = canvas.get_renderer()
    parts = [*picture.figure.legends, *(ax.title for ax in picture.figure.axes)]
    for box in (part.get_window_extent(renderer) for part in parts):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_compare() -> None:
    other = synthetic(name="other", traffic={"B": Figures(written=1000, stores=1)})
    table = xray.compare(synthetic(), other)
    rows = [line.split() for line in repr(table).splitlines()]
    assert rows[0][-2:] == ["k<half>", "other"]
    assert ["A", "128"] in rows and ["B", "256", "1,000"] in rows and ["together", "384", "1,000"] in rows
    assert [texts(row) for row in parsed(table._repr_html_()).iter("tr")] == [list(row) for row in table.rows]


# -------------------------------------------------------------------------------------------------- of a real launch


def tiled(*changes: tuple[str, str], n: int = 70, n_kv: int = 40, hits: int = 1) -> Report:
    code = edit(kernel.source("02_tiled.cu"), *changes, count=hits)
    options = kernel.options({"HEAD_DIM": 16, "BLOCK_M": 64})
    q, k, v = map(engine.asarray, make_inputs(n, n_kv, 16))
    o = engine.full((n, 16), np.nan, dtype=np.float32)
    function = engine.RawModule(code=code, options=options).get_function("tiled")
    return xray.xray(function, (2,), (64,), (q, k, v, o, np.int32(n), np.int32(n_kv), np.float32(0.25)))


def test_two_runs_say_the_same() -> None:
    first, second = tiled(), tiled()
    first.assert_clean()
    assert repr(first) == repr(second)
    assert first._repr_html_() == second._repr_html_()
    assert first.source() == second.source()
    assert max(map(len, repr(first).splitlines())) <= 100
    parsed(first._repr_html_())
    assert "".join(parsed(first.source()._repr_html_()).itertext()).removeprefix("\n") == first.source()
    assert "K: 4 times each; V: 2 times each" in repr(first.heatmap("K", "V"))


def test_inlined_copies_of_a_line_are_one_finding() -> None:
    report = tiled(("first + j < N_kv ? source", "first + j <= N_kv ? source"))
    assert [(f.kind, f.array, f.index) for f in report.findings] == [
        ("out of bounds", "K", 640),
        ("out of bounds", "V", 640),
    ]
    assert [f.count for f in report.findings] == [2 * 2 * 16, 2 * 16]  # blocks, passes, words


def test_a_race_names_both_lines() -> None:
    report = tiled(("__syncthreads();\n    float s[BLOCK_N];", ";\n    float s[BLOCK_N];"), hits=2)
    lines = kernel.source("02_tiled.cu").splitlines()
    races = [f for f in report.findings if f.kind == "race" and f.array == "K_smem"]
    assert races
    for f in races:
        both = " ".join(lines[line] for line in (f.line, f.other_line))  # line 0 of the text is a directive
        assert "tile[j][c] =" in both and "q_c * K_smem[j][c]" in both
        assert f.thread != f.other_thread
        assert "word " in f.message and "__shared__ K_smem" in f.message
    assert report.source(around=0).count(" ! ") >= 2


def test_lines_of_addresses_are_kept_beside_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes read them there, unless the library is newer."""
    path = engine.RawModule(code=CODE).get_function("k").compiled().library.path
    read = symbols._read_lines(path)
    assert any(span.file == "k.cu" and span.line in (3, 4) for span in read[0])
    for name in ("_lines", "_places_of"):
        getattr(symbols, name).cache_clear()
    path.with_suffix(".lines").unlink(missing_ok=True)
    assert symbols._lines(path) == read
    address = read[0][0].begin
    symbols._lines.cache_clear()
    monkeypatch.setattr(symbols, "_read_lines", lambda path: ([], [], {}))
    assert symbols._lines(path) == read and symbols.places_of(path, address)[0] == read[0][0][2:]
    symbols._lines.cache_clear()
    os.utime(path.with_suffix(".lines"), (0, 0))
    assert symbols._lines(path) == ([], [], {})
    symbols._lines.cache_clear()
    path.with_suffix(".lines").unlink()


def test_the_bank_picture_is_of_the_launch() -> None:
    line = kernel.source("02_tiled.cu").splitlines().index("    const float q_c = q[c];")
    assert "Q_smem, line" in repr(tiled().banks(line)) and ": 1 wavefront>" in repr(tiled().banks(line))
    even = tiled(("Q_STRIDE = HEAD_DIM | 1", "Q_STRIDE = HEAD_DIM"))
    assert "16 wavefronts" in repr(even.banks(line))  # rows of 16 words: two of them fill the banks
    f = even.by_line["02_tiled.cu", line]
    assert even.shared["Q_smem"].conflicts == 15 * f.requests
    even.assert_clean()


def test_a_kernel_of_the_course_on_any_device() -> None:
    loaded = kernel.load("03_online_softmax.cu", "online_softmax", defines={"HEAD_DIM": 16, "BLOCK_M": 32})
    assert "-DHEAD_DIM=16" in loaded.options and loaded.code == kernel.source("03_online_softmax.cu")
    q, k, v = map(cp.asarray, make_inputs(33, 20, 16))
    args = (q, k, v, cp.full((33, 16), cp.nan, dtype=cp.float32), cp.int32(33), cp.int32(20), cp.float32(0.25))
    expected = xray.xray(loaded, (2,), (32,), args)
    expected.assert_clean()
    assert not np.isnan(cp.asnumpy(args[3])).any()

    # As on a GPU machine, where only the kernel's text and options are usable by the engine.
    there = SimpleNamespace(name=loaded.name, code=loaded.code, options=loaded.options, function=object())
    given = [engine.asarray(cp.asnumpy(a)) if isinstance(a, cp.ndarray) else a for a in args]
    engine_kernel = run.engine_kernel(there)
    assert repr(xray.xray(engine_kernel, (2,), (32,), given)) == repr(expected)
    with pytest.raises(TypeError, match="got object"):
        run.engine_kernel(object())

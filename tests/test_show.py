"""Learners are shown parts of kernels, diffs and pictures. A made-up record is plotted only here."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.attention import check, reference
from helpers.attention.kernel import KERNELS, source
from helpers.attention.ladder.stages.hopper import ORDER
from helpers.bench import plots as measured
from helpers.bench.studies import moving
from helpers.engine import banks
from helpers.lesson import show

# 10_order.cu prepares a launch of 10: it has no sizes of its own.
WHOLE = {ORDER, "16_background.cu"}  # with several kernels; with parameters of another file
FILES = sorted(path.name for path in KERNELS.glob("*.cu") if path.name not in WHOLE)


def result(
    name: str, kind: str, shape: tuple[int, ...], ms: float, tflops: float | None, **more: Any
) -> dict[str, Any]:
    return {"name": name, "kind": kind, "shape": list(shape), "dtype": "float32", "ms": ms, "tflops": tflops, **more}


RECORD = {
    "device": {"name": "Some GPU"},
    "how": {},
    "results": [
        result("matmul", "roof", (8, 8, 8), 1.0, 2.0),
        result("matmul float16", "roof", (8, 8, 8), 1.0, 16.0) | {"dtype": "float16"},
        result("copy", "roof", (64,), 1.0, None, gbps=100.0),
        result("first", "stage", (1, 1, 8, 4), 2.0, 0.5, extra_bytes=256),
        result("second", "peer", (1, 1, 8, 4), 1.0, 1.0, extra_bytes=0),
        result("half", "stage", (1, 1, 8, 4), 0.5, 2.0) | {"dtype": "float16"},
        result("first", "stage", (1, 1, 16, 4), 9.0, None, extra_bytes=1024),
        result("second", "peer", (1, 1, 16, 4), 2.0, 4.0, extra_bytes=0),
        result("first", "stage", (1, 1, 8, 4), 7.0, 0.1, causal=True),
        result("first", "variant", (1, 1, 8, 4), 77.0, 0.1),
        *(result("swept", "stage", (16 // n, 512, n, 4), 0.5 * n, 1.0) for n in (16, 4, 8)),
    ],
}
COUNTED = {
    "rows": [
        {
            "stage": "first",
            "dtype": "float32",
            "flop": 1000.0,
            "figures": {"dram bytes read": 60.0, "dram bytes written": 40.0},
        },
        {"stage": "half", "dtype": "float16", "error": "it failed", "figures": {}},
    ]
}


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


# ------------------------------------------------------------------------------------------------------ source text


@pytest.mark.parametrize("file", FILES)
def test_sections_cover_the_kernel(file: str) -> None:
    lines = (KERNELS / file).read_text("utf-8").splitlines()
    pieces = show.sections(file)
    assert {"header", "sizes", "signature"} < set(pieces) and len(pieces) >= 6
    for first, last in pieces.values():
        assert 1 <= first <= last <= len(lines) and lines[first - 1].strip() and lines[last - 1].strip()
    assert "static_assert" in source(file), "what must divide is checked, here or in a header of the sizes"
    assert lines[pieces["sizes"][1] - 1].endswith((";", "#endif"))
    assert "__global__" in lines[pieces["signature"][0] - 1] and lines[pieces["signature"][1] - 1].endswith("{")
    entry = range(pieces["signature"][0], len(lines))
    seen = [i for first, last in pieces.values() for i in range(first, last + 1) if i in entry]
    assert len(seen) == len(set(seen)), "sections of the entry overlap"
    forgotten = [i for i in entry if i not in seen and lines[i - 1].strip() not in ("", "}")]
    assert not forgotten, "a line of the entry is in no section"


def test_code_shows_what_is_there() -> None:
    lines = (KERNELS / "01_naive.cu").read_text("utf-8").splitlines()
    first, last = show.sections("01_naive.cu")["epilogue: divide once"]
    text = show.code("01_naive.cu", "epilogue")._repr_markdown_()
    assert text.startswith(f"[01_naive.cu](../kernels/01_naive.cu), lines {first}–{last}:\n\n```c++\n// ---- epilogue")
    assert [line.strip() for line in text.splitlines()[3:-1]] == [line.strip() for line in lines[first - 1 : last]]
    assert text == show.code("01_naive.cu", (first, last)).markdown == repr(show.code("01_naive.cu", (first, last)))
    both = show.code("01_naive.cu", "output", to="epilogue").markdown
    assert "// ---- output" in both and "// ---- epilogue" in both and f"–{last}:" in both
    assert "load_tile(" in show.code("02_tiled.cu", "load_tile").markdown
    by_words = show.code("01_naive.cu", (lines[first - 1], lines[last - 1])).markdown
    assert by_words == text, "lines by their words"
    with_pragma, without = (
        show.code("08_backward.cu", "scores_gradient", without=words).markdown for words in ((), ("#PRAGMA", "delta;"))
    )
    assert "#pragma unroll" in with_pragma and "#pragma unroll" not in without
    assert ", without `#PRAGMA`, `delta;`:" in without and with_pragma.count("\n") > without.count("\n") > 5


def test_code_refuses_what_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"01_naive\.cu"):
        show.code("99_none.cu", "header")
    with pytest.raises(KeyError, match="0 pieces named 'nothing'"):
        show.code("01_naive.cu", "nothing")
    with pytest.raises(KeyError, match="has no 'nothing like it' from line 1 on"):
        show.code("01_naive.cu", ("nothing like it", "}"))
    with pytest.raises(KeyError, match=r"[2-9] pieces named 's'"):
        show.code("01_naive.cu", "s")
    with pytest.raises(KeyError, match="0 pieces named 'nothing'"):
        show.code("01_naive.cu", "output", to="nothing")
    for lines in ((0, 3), (5, 4), (1, 10_000)):
        with pytest.raises(IndexError, match=r"01_naive\.cu has lines 1 to"):
            show.code("01_naive.cu", lines)


def test_diff_shows_the_change_and_nothing_else() -> None:
    changes = show.diff("02_tiled.cu", "03_online_softmax.cu")
    assert "const float rescale" in changes.markup and "pass 2" in changes.markup
    assert "&lt; N_kv" in changes.markup and "< N_kv" not in changes.markup, "the code is escaped"
    assert "Since 02" not in changes.markup, "header comments are left out"
    assert repr(changes).startswith("02_tiled.cu → 03_online_softmax.cu: ")
    assert changes._repr_html_() == show.diff("02_tiled.cu", "03_online_softmax.cu")._repr_html_()
    same = show.diff("01_naive.cu", "01_naive.cu")
    assert "0 lines new, 0 removed" in repr(same).replace("gone", "removed") and "rgba" not in same.markup


# ----------------------------------------------------------------------------------------------------- measurements


def test_without_a_record_nothing_is_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert show.recorded(tmp_path / "none.json") is None
    monkeypatch.setattr(measured, "recorded", lambda: None)
    assert show.measurements((1, 1, 8, 4)) == []
    pictures = [show.measured_bars((1, 1, 8, 4)), show.measured_ladder([(1, 1, 8, 4)]), show.measured_roofline()]
    for text in pictures:
        assert show.NO_RECORD in text._repr_markdown_()


def test_measurements_come_from_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    record = show.recorded(path)
    assert record == RECORD
    names = lambda *args, **kwargs: [r["name"] for r in show.measurements(*args, record=record, **kwargs)]  # noqa: E731
    assert names((1, 1, 8, 4)) == ["first", "second"]
    assert names((1, 1, 8, 4), ["second", "third", "first"]) == ["second", "first"]
    assert names((1, 1, 8, 4), dtype="float16") == ["half"]
    assert names((2, 1, 8, 4)) == []
    assert [r["ms"] for r in show.measurements((1, 1, 8, 4), ["first"], record=record)] == [2.0]
    assert [r["ms"] for r in show.measurements((1, 1, 8, 4), causal=True, record=record)] == [7.0]


def test_measured_bars() -> None:
    picture = show.measured_bars((1, 1, 8, 4), record=RECORD)
    assert picture.alt == "first: 2 ms; second: 1 ms"
    (ax,) = picture.figure.axes
    assert [bar.get_width() for bar in ax.patches] == [2.0, 1.0]
    assert "Some GPU" in ax.get_xlabel()
    assert show.measured_bars((1, 1, 8, 4), ["second"], quantity="tflops", record=RECORD).alt == "second: 1 tflops"
    nothing = show.measured_bars((1, 1, 16, 4), ["first"], quantity="tflops", record=RECORD)
    assert "no tflops at shape (1, 1, 16, 4)" in repr(nothing)
    assert show.measured_bars((1, 1, 8, 4), causal=True, record=RECORD).alt == "first: 7 ms"


def test_measured_steps_have_their_roofs() -> None:
    labels = {"slow": {"name": "first"}, "fast": {"name": "second"}}
    picture = show.measured_steps((1, 1, 8, 4), labels, roofs={"the best\nthere is": 4.0}, record=RECORD)
    assert picture.alt == "slow: 0.5 TFLOP/s; fast: 1.0 TFLOP/s; dashed, the best there is: 4.0"
    (ax,) = picture.figure.axes
    assert [tuple(line.get_xdata()) for line in ax.lines] == [(4.0, 4.0)] and ax.get_xlim()[1] > 4
    assert "none" in repr(show.measured_steps((1, 1, 8, 4), {"none": {"name": "none"}}, record=RECORD))


def test_measured_ladder_shares_the_roof_of_its_type() -> None:
    picture = show.measured_ladder([(1, 1, 8, 4)], record=RECORD)
    assert picture.alt == "TFLOP/s and share of matmul: N = 8, first: 0.5  (25.0%); N = 8, second: 1  (50.0%)"
    assert [bar.get_width() for bar in picture.figure.axes[0].patches] == [0.5, 1.0]
    half = show.measured_ladder([(1, 1, 8, 4)], ["half", "none"], dtype="float16", record=RECORD)
    assert half.alt.endswith("share of matmul float16: N = 8, half: 2  (12.5%); N = 8, none: not recorded")
    assert "no bfloat16" in repr(show.measured_ladder([(1, 1, 8, 4)], dtype="bfloat16", record=RECORD))


def test_gradients_are_drawn_beside_their_own_peers() -> None:
    ours, peer = (
        result("back", "backward", (1, 1, 8, 4), 4.0, 0.5),
        result("first", "backward peer", (1, 1, 8, 4), 2.0, 1.0),
    )
    record = {**RECORD, "results": [*RECORD["results"], peer, ours]}
    picture = show.measured_gradients([(1, 1, 8, 4), (1, 1, 16, 4)], ["back", "first"], record=record)
    assert picture.alt.endswith("share of matmul: d = 4, back: 0.5  (25.0%); d = 4, first: 1  (50.0%)")
    assert len(picture.figure.axes) == 1
    assert "not yet recorded" in repr(show.measured_gradients([(1, 1, 8, 4)], ["back"], record=RECORD))


def test_overview_has_a_row_for_each_type() -> None:
    shapes = {"float32": [(1, 1, 8, 4), (1, 1, 16, 4)], "float16": [(1, 1, 8, 4)]}
    record = {**RECORD, "results": [r for r in RECORD["results"] if r["tflops"] or r["name"] == "copy"]}
    picture = measured.measured_overview(shapes, record=record)
    assert len(picture.figure.axes) == 3
    assert "float32 (1, 1, 16, 4) second: 4  (200.0%)" in picture.alt and "half: 2  (12.5%)" in picture.alt
    assert size_of(picture.png())[0] > 300


def test_measured_roofline_says_whose_bytes() -> None:
    """A stage is at its counted FLOP per byte; without counts, at that of Q, K, V and O moved once."""
    picture = show.measured_roofline((1, 1, 8, 4), dtypes=("float32", "float16"), record=RECORD, counted=COUNTED)
    marks = [line for line in picture.figure.axes[0].lines if line.get_marker() in ("o", "s")]
    assert [line.get_xydata().tolist() for line in marks] == [[[10.0, 0.5]], [[1024 / 256, 2.0]]]
    assert [line.get_markerfacecolor() == "white" for line in marks] == [False, True]
    assert "first: 10 FLOP per byte (counted), 0.5 TFLOP/s" in picture.alt and "half, float16: 4 FLOP" in picture.alt
    assert "ring: least bytes" in picture.figure.axes[0].get_xlabel()
    roofs = [line.get_ydata().tolist() for line in picture.figure.axes[0].lines if line.get_marker() not in ("o", "s")]
    assert [2.0, 2.0] in roofs and [16.0, 16.0] in roofs
    assert "no stage" in repr(show.measured_roofline((3, 1, 8, 4), record=RECORD, counted=COUNTED))


# --------------------------------------------------------------------------------------------------------- pictures

# Lane 4 g + t has elements 2 t and 2 t + 1 of row g of each matrix, whose address lane 8 i + g passed.
LDMATRIX = np.array(
    [[8 * (8 * i + lane // 4) + 2 * (lane % 4) + e for i in range(4) for e in (0, 1)] for lane in range(32)]
)

PICTURES = {
    "grid": lambda: show.grid_picture(200, 64),
    "one row": lambda: show.grid_picture(1, 64),
    "full": lambda: show.grid_picture(128, 64),
    "memory": lambda: show.memory_against_n(),
    "heat": lambda: show.heatmap({"a": np.eye(5), "b": np.ones((3, 4))}),
    "one heat": lambda: show.heatmap({"a": np.eye(5)}, vmax=2),
    "yes or no": lambda: show.heatmap({"a": np.eye(5)}, colour="on the diagonal", yes_or_no=True),
    "lines": lambda: show.lines({"a": ([1, 2], [3, 4])}, xlabel="x", ylabel="y", levels={"roof": 5}, logx=True),
    "cards": lambda: show.memory_against_n(cards={"a": 2**33, "b": 2**40}),
    "tokens": lambda: show.token_heatmap({"a": np.eye(5), "b": np.ones((5, 5))}, list("vwxyz"), [1, 2], [0, 1, 2]),
    "six tokens": lambda: show.token_heatmap({c: np.eye(3) for c in "abcdef"}, list("xyz"), [1], range(3)),
    "roofline": lambda: show.roofline(tflops=50, gbps=4000, at={"low": 0.5, "high": 4000}),
    "operands": lambda: show.operands({"S": [("dV", {"P": 0, "dO": 8}), ("stored", {"dS": 16})], "T": []}),
    "matrices": lambda: show.matrices({"Q": np.eye(4, dtype=int), "K": np.full((8, 2), 2)}, title="who"),
    "warp": lambda: show.warp_picture({"store": ((32, 40), np.arange(32) * 40)}),
    "banks": lambda: show.bank_picture({"column": np.arange(32) * 64, "row": np.arange(32)}),
    "one bank": lambda: show.bank_picture({"broadcast": [5] * 32}),
    "offsets": lambda: show.offsets({"rows": np.arange(32).reshape(4, 8), "columns": np.arange(32).reshape(8, 4).T}),
    "chunks": lambda: show.offsets({"rows": np.arange(64).reshape(8, 8)}, cell_bytes=16, cell="chunk"),
    "owners": lambda: show.owners({"copy": np.arange(128).reshape(16, 8), "some": np.eye(16, dtype=int) - 1}),
    "warp tiles": lambda: show.warp_tiles(
        {"S": np.arange(8).reshape(2, 4), "dQ": np.zeros((2, 2), int)},
        outlines={"read": ("S", np.eye(2, 4, dtype=bool)), "read too": ("dQ", np.ones((2, 2), dtype=bool))},
        axes={"S": ("rows", "keys")},
    ),
    "factors": lambda: show.factor_fragment(np.arange(256).reshape(32, 8), lane=5),
    "schedules": lambda: show.schedules(
        {"a": [(0, 0, 2, 0, "x"), (1, 0, 3, 1, "y")], "b": [(0, 0, 3, 1, "y"), (0, 3, 5, 0, "x")]},
        ylabel="where",
        xlabel="when",
    ),
    "ldmatrix": lambda: show.ldmatrix_rows(LDMATRIX),
    "bars": lambda: show.measured_bars((1, 1, 8, 4), record=RECORD),
    "ladder": lambda: show.measured_ladder([(1, 1, 8, 4)], record=RECORD),
    "all roofs": lambda: show.measured_roofline((1, 1, 8, 4), record=RECORD, counted=COUNTED),
}


@pytest.mark.exhaustive(one_of_each=lambda name: None)  # notebooks draw all of them
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_a_png_on_white_and_says_what_it_shows(name: str) -> None:
    picture = PICTURES[name]()
    png, size = picture._repr_png_()
    width, height = size_of(png)
    assert width / size["width"] == pytest.approx(picture.DPI / 96, rel=0.02) and height > 100
    assert size["width"] <= 1000, "wider than a notebook"
    assert len(png) < 100_000
    white = (1.0, 1.0, 1.0, 1.0)  # a transparent figure is unreadable in a dark theme
    assert tuple(picture.figure.get_facecolor()) == white
    assert repr(picture) == f"<picture: {picture.alt}>" and len(picture.alt) > 10
    assert repr(PICTURES[name]()) == repr(picture), "nbval compares it"


def test_grid_picture_counts() -> None:
    assert show.grid_picture(200, 64).alt == "200 elements over 4 blocks of 64 threads; 56 threads are idle"
    assert "0 threads are idle" in show.grid_picture(128, 64).alt


def test_ldmatrix_rows_are_named_by_the_lanes_that_give_their_addresses() -> None:
    picture = show.ldmatrix_rows(LDMATRIX)
    assert picture.alt.endswith("; matrix 2: addresses of lanes 16 to 23; matrix 3: addresses of lanes 24 to 31")
    below = picture.figure.axes[2]  # matrix 1, below matrix 0
    assert [label.get_text() for label in below.get_yticklabels()] == [f"lane {lane} →" for lane in range(8, 16)]
    assert [text.get_text() for text in below.texts] == [str(lane) for lane in range(32)]


def test_offsets_and_owners_say_what_they_show() -> None:
    rows = np.arange(32).reshape(4, 8)
    assert show.offsets({"rows": rows}).alt == "offsets; in the first column of rows: 0, 8, 16, 24"
    assert "colours are banks; in the first column of x: 0, 8" in show.offsets({"x": rows}, cell_bytes=16).alt
    assert show.owners({"copy": rows[:2]}).alt.endswith("in the first row of copy: 0, 1, 2, 3, 4, 5, 6, 7")


def test_cells_of_one_colour_are_in_the_same_banks() -> None:
    """Chunks of 16 bytes: eight neighbours differ, and the ninth is in the first one's banks."""
    (axes,) = show.offsets({"rows": np.arange(16).reshape(2, 8)}, cell_bytes=16).figure.axes
    colours = axes.collections[0].get_array().reshape(2, 8)
    assert len(set(colours[0])) == 8 and (colours[0] == colours[1]).all()
    (axes,) = show.offsets({"floats": np.arange(64).reshape(2, 32)}, cell_bytes=4).figure.axes
    assert len(set(axes.collections[0].get_array().ravel())) == 32


def test_warp_picture_counts_sectors() -> None:
    """Unit stride accesses 4 sectors, stride two 8, a column 32, one word 1."""
    lane = np.arange(32)
    for words, sectors in ((lane, 4), (lane * 2, 8), (lane * 100, 32), (lane * 0 + 7, 1), (lane + 1, 5)):
        assert show.sectors(words) == sectors
    alt = show.warp_picture({"store": ((32, 40), lane * 40 + 3), "load": ((1, 40), lane * 0)}).alt
    assert alt == "one instruction of a warp: store: 32 words, 32 sectors; load: 1 word, 1 sector"


def test_bank_picture_counts_wavefronts() -> None:
    """An odd stride uses 32 banks, an even one fewer; one word for all lanes is a broadcast."""
    lane = np.arange(32)
    accesses = ((lane, 1), (lane * 2, 2), (lane * 65, 1), (lane * 64, 32), (lane * 0 + 7, 1), (lane // 16 * 32, 2))
    for words, count in accesses:
        assert banks.wavefronts(words) == count
    picture = show.bank_picture({"q": lane * 64, "k": lane * 0 + 7})
    assert picture.alt == "banks requested by the lanes of a warp: q: 32 wavefronts; k: 1 wavefront"
    cells = [np.asarray(ax.collections[0].get_array()).reshape(32, 32) for ax in picture.figure.axes]
    assert [(np.count_nonzero(c == 1), np.count_nonzero(c == 2)) for c in cells] == [(1, 31), (32, 0)]


def test_matrices_are_drawn_to_one_scale() -> None:
    shapes = {"Q": (4, 8), "S": (4, 16), "K": (16, 8)}
    axes = show.matrices({name: np.ones(shape, int) for name, shape in shapes.items()}).figure.axes
    width, height = axes[0].figure.get_size_inches()
    boxes = [ax.get_position() for ax in axes]
    cells = [(b.width * width / c, b.height * height / r) for b, (r, c) in zip(boxes, shapes.values(), strict=True)]
    np.testing.assert_allclose(cells, cells[0][0])


def test_token_heatmap_shows_the_chosen_tokens() -> None:
    weights = np.arange(25.0).reshape(5, 5)
    picture = show.token_heatmap({"head": weights}, list("vwxyz"), rows=[1, 3], columns=[0, 1, 4])
    ax = picture.figure.axes[0]
    assert np.array_equal(ax.images[0].get_array(), [[5, 6, 9], [15, 16, 19]])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["w", "y"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["v", "w", "z"]


def test_roofline_puts_each_mark_on_the_lower_roof() -> None:
    picture = show.roofline(tflops=50, gbps=4000, at={"left": 2, "right": 100})
    dots = {
        line.get_label(): line.get_xydata().tolist()
        for line in picture.figure.axes[0].lines
        if line.get_marker() == "o"
    }
    assert dots == {"left: 2.0": [[2, 8]], "right: 100.0": [[100, 50]]}
    assert picture.alt.startswith("roofs meet at 12.5 FLOP per byte")


def test_experiment_times_are_those_of_one_stage_at_one_shape() -> None:
    more = [
        result("first: an idea", "experiment", (1, 1, 8, 4), 3.0, 0.3),
        result("first: an idea", "experiment", (1, 1, 16, 4), 30.0, 0.3),
        result("other: an idea", "experiment", (1, 1, 8, 4), 4.0, 0.2),
    ]
    record = RECORD | {"results": RECORD["results"] + more}
    assert show.experiment_times("first", (1, 1, 8, 4), record=record) == {"first": 2.0, "an idea": 3.0}
    assert show.experiment_times("first", (1, 1, 8, 4), causal=True, record=record) == {"first": 7.0}
    assert show.experiment_times("nothing", (1, 1, 8, 4), record=record) == {}


def test_the_moving_picture_is_what_the_kernel_computes() -> None:
    """README's picture has a frame for each tile of keys; after the last one the output is attention's."""
    with Image.open(moving.GIF) as picture:
        frames = picture.n_frames
    outputs = moving.outputs_so_far(moving.HEAD)
    assert frames == len(outputs) > 10
    q, k, v = check.real_inputs(moving.HEAD)
    far = [float(np.abs(o - reference.attention(q, k, v)).max()) for o in outputs]
    assert far[-1] < 1e-5 < 0.1 < min(far[:-1])

"""A listing in a notebook contains no name that its reader has not met.

A reader has met a name if it is declared in the listing, or occurs in an earlier listing, in an exercise, in prose or a
comment of this notebook before or directly below the listing, in a notebook that this one requires, or in the glossary.
KNOWN has the names of CUDA and C++, and those that all their readers know.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.lesson.exercises.holes import number_of

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PATHS = {number_of(path.name): path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
ROAD = ("00", "01", "02", "03", "05")
ASKS_FOR = {  # a notebook -> those that its reader has read
    **{number: ROAD[: ROAD.index(number)] for number in ROAD},
    "04": ROAD[:4],
    "04b": (*ROAD[:4], "04"),
    "06": ROAD,
    "07": (*ROAD, "06"),
    "07b": (*ROAD, "06", "07"),
    "08": ROAD,
    "08b": (*ROAD, "06", "07", "08"),
    "10": (*ROAD, "06", "07"),
    "10b": (*ROAD, "06", "07", "07b", "10"),
    "13": (*ROAD, "06", "07", "08", "08b", "10", "10b"),
    "15b": (*ROAD, "06", "07", "10", "10b", "15"),
    "16": (*ROAD, "06", "07", "10", "10b"),
}
WORKSHOP = (*ROAD, "06", "07")  # the prerequisites of the others from 11 on

EVERYBODY_KNOWS = """
    alignas asm auto bool break case char class const const_cast constexpr continue decltype default do double else enum
    explicit extern false float for friend if inline int long namespace new nullptr operator private public
    reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this true
    typedef typename union unsigned using void volatile while
    define elif endif error ifdef ifndef include pragma undef unroll once defined
    size_t uint4 int2 int4 float2 float4 make_float2 make_float4 make_uint4 make_int2 half __half half2 __half2
    nv_bfloat16 __nv_bfloat16
    __global__ __device__ __host__ __shared__ __forceinline__ __restrict__ __launch_bounds__ __align__ __syncthreads
    __syncwarp __grid_constant__ __cvta_generic_to_shared __shfl_sync __shfl_xor_sync __any_sync
    __uint_as_float __float_as_uint __int_as_float
    threadIdx blockIdx blockDim gridDim x y z w C
    expf exp2f fmaxf fminf fabsf logf log2f sqrtf fmaf min max abs
    """
KNOWN = set(EVERYBODY_KNOWS.split())
CODE = re.compile(r"```c\+\+\n(.*?)```", re.S)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"')
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # a member after a dot belongs to the object before it
WORD = re.compile(r"[A-Za-z_]\w*")
NO_TYPE = {"return", "else", "case", "goto", "new", "operator", "define", "ifndef", "ifdef"}
DECLARED = re.compile(r"(\w+|[>\]*&,(\[])[ \t]*[*&]*[ \t]*\b([A-Za-z_]\w*)[ \t]*(?=[=;,)\[({:]|$)", re.M)


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def listings(cell: dict[str, Any]) -> Iterator[str]:
    for output in cell.get("outputs", []):
        yield from CODE.findall("".join(output.get("data", {}).get("text/markdown", "")))


def declared(code: str) -> set[str]:
    """Return the names that a listing declares: variables, parameters, functions, types, sizes."""
    bare = TEXT.sub('""', COMMENT.sub("", code))
    names = {
        name for before, name in DECLARED.findall(bare) if re.match(r"\w|[>\]*&]", before) and before not in NO_TYPE
    }
    names |= set(re.findall(r"#\s*(?:define|ifndef)\s+(\w+)", bare))
    return names | set(re.findall(r"\b(?:struct|class|typename|using|enum)\s+(\w+)", bare))


def words_of(notebook: dict[str, Any]) -> set[str]:
    """Return all names in a notebook: in prose, code cells and listings."""
    words: set[str] = set()
    for cell in notebook["cells"]:
        words |= set(WORD.findall(source(cell)))
        for code in listings(cell):
            words |= set(WORD.findall(code))
    return words


def read(number: str) -> dict[str, Any]:
    return json.loads(PATHS[number].read_text(encoding="utf-8"))


def unmet(number: str, notebook: dict[str, Any]) -> list[str]:
    """Return "cell: name" for each name in a listing that its reader has not met."""
    met = KNOWN | set(WORD.findall((NOTEBOOKS / "glossary.md").read_text(encoding="utf-8")))
    for earlier in ASKS_FOR.get(number, WORKSHOP):
        met |= words_of(read(earlier))
    found, cells = [], notebook["cells"]
    for at, cell in enumerate(cells):
        met |= set(WORD.findall(source(cell)))
        for code in listings(cell):
            below = next((source(later) for later in cells[at + 1 :] if later["cell_type"] == "markdown"), "")
            met |= set(WORD.findall(below)) | declared(code) | set(WORD.findall(" ".join(COMMENT.findall(code))))
            names = NAME.findall(TEXT.sub('""', COMMENT.sub("", code)))
            found += [f"{cell['id']}: {name}" for name in dict.fromkeys(names) if name not in met]
            met |= set(names)
    return found


@pytest.mark.parametrize("number", PATHS)
def test_listings_hold_no_name_that_the_reader_has_not_met(number: str) -> None:
    assert not unmet(number, read(number))


def test_a_name_from_nowhere_is_found() -> None:
    notebook = copy.deepcopy(read("05"))
    cell = next(cell for cell in notebook["cells"] if any(listings(cell)))
    cell["outputs"].append({"data": {"text/markdown": ["```c++\n", "  a_name_from_nowhere(S);\n", "```\n"]}})
    assert unmet("05", notebook) == [f"{cell['id']}: a_name_from_nowhere"]

"""Every header in kernels/ includes what it needs: it compiles alone, so including files need not know its needs.

Both compilers check it: NVRTC for a GPU, and g++, through the engine, which unlike NVRTC also looks up names in unused
templates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.attention import kernel
from helpers.engine import CompileError, RawModule, nvrtc

HEADERS = sorted(path.name for path in kernel.KERNELS.glob("*.cuh"))
NOTHING = '#include "{}"\nextern "C" __global__ void nothing() {{}}\n'


def compile_alone(code: str) -> None:
    text = kernel.with_headers(code, "alone.cu")
    RawModule(code=text, options=kernel.options()).compile()
    assert nvrtc.refusal(text, kernel.options()) == ""


@pytest.mark.exhaustive(one_of_each=lambda: None)
@pytest.mark.parametrize("header", HEADERS)
def test_every_header_compiles_alone(header: str) -> None:
    compile_alone(NOTHING.format(header))


def test_a_size_that_is_said_elsewhere_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    (tmp_path / "tile.cuh").write_text(
        "#pragma once\ntemplate <class T> __device__ T* next(T* x) { return x + WIDTH; }\n"
    )
    with pytest.raises(CompileError, match=r"tile\.cuh:2: error: .*WIDTH"):
        compile_alone(NOTHING.format("tile.cuh"))
    compile_alone("#define WIDTH 4\n" + NOTHING.format("tile.cuh"))

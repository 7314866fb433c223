"""A source that was built before is loaded without translation, but only if it includes no other files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import engine
from helpers.engine import build, compiler, known
from helpers.engine.build import Recipe

SOURCE = """
#include <cuda_fp16.h>
extern "C" __global__ void scale(float* a) { a[threadIdx.x] *= FACTOR; }
"""


def recipe(factor: int = 2, code: str = SOURCE) -> Recipe:
    return Recipe(code, ("-std=c++17", f"-DFACTOR={factor}"))


def answer(of: Recipe) -> Path:
    """Return the path of the file that names a source's library."""
    return compiler.cache_dir() / f"known-{known._key(of)}.json"


def scaled(of: Recipe) -> list[float]:
    """Load the source, as if this process had not done so, and launch it."""
    build._LOADED.clear()
    a = engine.asarray(np.arange(4, dtype=np.float32))
    engine.RawModule(code=of.code, options=of.options).get_function("scale")((1,), (4,), (a,))
    return a.tolist()


def test_a_known_source_is_not_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other options and texts are other sources; a broken file, or one that names a missing library, is rewritten."""
    every = [recipe(2), recipe(3), recipe(2, SOURCE.replace("*=", "+="))]
    for each in every:
        answer(each).unlink(missing_ok=True)
    translated: list[Recipe] = []
    anew = build.build
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "build", lambda *how: translated.append(how[0]) or anew(*how))
    for _ in range(2):
        assert [scaled(each) for each in every] == [[0, 2, 4, 6], [0, 3, 6, 9], [2, 3, 4, 5]]
        assert translated == every
    for text in ("[", '["kernel-gone.so", false]'):
        answer(every[0]).write_text(text)
        translated.clear()
        assert scaled(every[0]) == scaled(every[0]) == [0, 2, 4, 6] and translated == every[:1]


def test_each_build_of_a_source_is_known_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast one at its level, the checked one, one that fills local variables."""
    every = [recipe(), replace(recipe(), instrumented="checked"), replace(recipe(), filling=("-Wall",))]
    keys = {known._key(each) for each in every}
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", "0")
    assert len(keys | {known._key(recipe())}) == 4


def test_what_reads_other_files_is_translated_each_time() -> None:
    assert known._is_alone(recipe())
    for line in ('#include "mine.h"', "#include <cub/cub.cuh>", "# include MINE", "#include <mine.h>"):
        assert not known._is_alone(recipe(code=f"{line}\n{SOURCE}")), line
    for option in ("-I/tmp", "--include-path=/tmp", "-include=mine.h", "--pre-include=mine.h"):
        assert not known._is_alone(replace(recipe(), options=(option,))), option
    for how in ({"backend": "nvcc"}, {"jitify": True}, {"translate_cucomplex": True}):
        assert not known._is_alone(replace(recipe(), **how)), how


def test_a_refusal_is_kept_with_the_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its message; another source is compiled, and what the machine lacked may be installed later."""
    engine.empty(1)  # the engine itself comes from the usual cache
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    compiled: list[str] = []
    compile_one = compiler._compile

    def refused(line: str) -> tuple[str, int]:
        compiled.clear()
        with pytest.raises(engine.CompileError) as caught:
            engine.RawModule(code=f'{line}\nextern "C" __global__ void k() {{}}\n').compile()
        return str(caught.value), len(compiled)

    def counted(*how: Any) -> tuple[bool, str]:
        compiled.append(how[0])
        return compile_one(*how)

    monkeypatch.setattr(compiler, "_compile", counted)
    message, count = refused("int a = no_such_name;")
    assert "kernel.cu:1: error: 'no_such_name'" in message.replace("‘", "'").replace("’", "'") and count > 0
    assert refused("int a = no_such_name;") == (message, 0)
    assert "other_name" in refused("int a = other_name;")[0]
    in_a_line = "kernel.cu:1:5: error: wrong\n"
    for said in ("ld: undefined", f"{in_a_line}gone.h:1:9: fatal error: no file", f"{in_a_line}No space left"):
        monkeypatch.setattr(compiler, "_compile", lambda *how, said=said: compiled.append(said) or (False, said))
        for _ in range(2):
            assert refused(f"int b; // {said}")[1] > 0, said

"""The hashes that tell whether a change affects a launch or a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.attention import kernel
from helpers.attention.decoders import SPLIT_KV
from helpers.attention.ladder import LADDER, Stage, limits
from helpers.bench import frozen


def hashes(stage: Stage, variant: str = "plain", shape: frozen.Shape = frozen.SHAPES[0]) -> frozen.Hashes:
    with limits.pretend_gpu(frozen.H200), kernel.built_when_launched():
        found = frozen.of_stage(stage, shape, stage.dtypes[0], 64, frozen.VARIANTS[variant])
    assert found
    return found


def test_the_same_call_has_the_same_hashes() -> None:
    assert hashes(LADDER["heads_and_masks"]) == hashes(LADDER["heads_and_masks"])


@pytest.mark.parametrize("variant", ["causal", "window", "packed", "lse"])
def test_another_mask_or_output_is_another_launch_of_the_same_text(variant: str) -> None:
    stage = LADDER["flash_wmma"]
    plain, other = hashes(stage), hashes(stage, variant)
    assert plain[0] != other[0] and plain[1] == other[1]


def test_another_text_is_the_same_launch(tmp_path: Path) -> None:
    stage = LADDER["tiled"]
    file = tmp_path / "another.cu"
    file.write_text(kernel.source(stage.file) + "// another\n")
    before, after = hashes(stage), hashes(stage.changed(file=str(file)))
    assert before[0] == after[0] and before[1] != after[1]


def test_another_tile_is_another_launch_and_another_text() -> None:
    stage = LADDER["tiled"]
    before, after = hashes(stage), hashes(stage.changed(tiles=lambda *_: {"BLOCK_M": 32, "BLOCK_N": 16}))
    assert before[0] != after[0] and before[1] != after[1]


def test_decoders_have_hashes() -> None:
    with limits.pretend_gpu(frozen.H200), kernel.built_when_launched():
        variants = [frozen.of_decoder(SPLIT_KV, frozen.SHAPES[0], "float16", 64, v) for v in ("plain", "pages", "lse")]
    assert all(variants) and len({launches for launches, *_ in filter(None, variants)}) == 3

"""What runs on each GPU from Turing to Blackwell, as the site and `ladder` show; every stage compiled for each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from backends import needs_nvrtc

from helpers import device
from helpers.attention.ladder import LADDER
from helpers.bench import architectures, command
from helpers.bench.architectures import CARDS, STAGES
from helpers.site import architectures_page


def test_what_runs_where() -> None:
    runs = {cc: {name for name, stage in STAGES.items() if architectures.types_of(stage, cc)} for cc in CARDS}
    assert list(CARDS) == [75, 80, 86, 89, 90, 100, 120]
    assert runs[90] == set(STAGES) and "hopper" not in runs[80] | runs[100] | runs[120]
    assert runs[80] == runs[86] == runs[89] == runs[100] == runs[120] > runs[75]
    assert architectures.types_of(LADDER["flash_wmma"], 75) == ["float16"]
    assert "9.0" in architectures.why_not(LADDER["hopper"], 120) and not architectures.why_not(LADDER["naive"], 75)


def test_what_a_call_gets() -> None:
    def names(cc: int) -> dict[tuple[str, str, bool], str | None]:
        every = architectures.defaults(cc)
        return {(d.direction, d.dtype, d.shape == architectures.LARGE): d.stage and d.stage.name for d in every}

    assert names(90)["forward", "bfloat16", True] == "hopper" and names(120)["forward", "bfloat16", True] == "flash_mma"
    assert names(75)["forward", "bfloat16", True] is None and names(75)["forward", "float32", True] == "heads_and_masks"
    assert names(80)["backward", "float16", False] == "backward_mma"
    instead = architectures.instead(LADDER["hopper_backward"], 80)
    assert instead and instead.name == "backward_mma"


def test_the_device_is_as_before() -> None:
    here = device.ON_GPU
    with pytest.raises(KeyError), architectures.planned_for(80):
        raise KeyError
    assert here == device.ON_GPU


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.ladder(["--gpus"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^sm_{cc}  {re.escape(cards)}$", printed, re.M) for cc, cards in CARDS.items())
    assert printed.count("    default   ") == len(CARDS)


def test_the_page_says_what_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures_page, "_compiled", lambda heads: iter(()))
    [row] = (line for line in architectures_page.page().splitlines() if line.startswith("| [10_hopper]"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1 + list(CARDS).index(90)] == "itself" and "07_mma" in cells[1 + list(CARDS).index(120)]


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("cc", CARDS)
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_compiles_for_every_gpu_that_runs_it(name: str, cc: int, record_row: Callable[..., None]) -> None:
    """With its sizes on that GPU at head_dim 64. Spills must match the list."""
    if reason := STAGES[name].unavailable():
        pytest.skip(reason)
    for report in architectures.compiled(STAGES[name], cc):
        record_row(
            "NVRTC at head_dim 64: registers and bytes of spills for each GPU",
            kernel=report.kernel,
            arch=report.arch,
            registers=report.registers,
            spills=report.spill_bytes,
        )
        assert 0 < report.registers <= 255
        assert report.spill_bytes <= SPILLS.get((name, cc), 0), report


# Bytes of spills with NVRTC 12.9, if there are any.
SPILLS = {
    **{("register_tiles", 75): 40, ("heads_and_masks", 75): 16},
    **{("backward_mma", 90): 8, ("backward_mma", 100): 20},
    **{("tf32", cc): 80 for cc in (80, 86, 89)},
    **{("tf32", 90): 232, ("tf32", 100): 340, ("tf32", 120): 464},
}

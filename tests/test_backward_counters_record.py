"""The counters of hopper_backward and of FlashAttention-4's backward pass, as text; the record has all cases."""

from __future__ import annotations

from typing import Any

from helpers.bench.studies import autograd
from helpers.bench.studies import backward_counters as study

FIGURES = {"tensor pipe %": 77.6, "shared memory %": 84.0, "L2 bytes": 41.5e9, "bank conflicts": 25.4e6}


def record(**speeds: float) -> dict[str, Any]:
    """Make two rows of one case: ours waits only for barriers, the other also for products."""
    of_case = {"pass": "backward", "shape": [1, 16, 16384, 128], "causal": False}
    stalls = ({"issued": 1.0, "barrier": 3.0}, {"issued": 1.0, "barrier": 0.25, "products": 3.75, "branch": 0.01})
    names = (study.OURS, study.FLASH4)
    rows = [{"name": name, **of_case, "figures": FIGURES, "stalls": s} for name, s in zip(names, stalls, strict=True)]
    power = [{"name": name, **of_case, "ms": 9.0, "mhz": 1680.0} for name in names]
    power[0]["watts"] = 681.0
    power[1] |= speeds
    return {"rows": rows, "power": power}


def test_both_stand_side_by_side() -> None:
    lines = [" ".join(line.split()) for line in study.beside(record(), n=16384).splitlines()]
    assert lines[:3] == [
        "N = 16384 d = 128, 13 d = 128, FA4",
        "tensor cores busy 78 % 78 %",
        "shared memory busy 84 % 84 %",
    ]
    assert lines[5:] == [
        *("of a warp's cycles:", "issued 25% 20%", "barrier 75% 5%"),
        *("products 0% 75%", "time 9.00 ms 9.00 ms", "clock 1,680 MHz 1,680 MHz", "power 681 W"),
    ]


def test_what_is_left_out_has_its_time_and_conflicts() -> None:
    rows = [{"name": "exp2", "ms": 2.008, "tensor pipe %": 74.1, "bank conflicts": 8_016_185.0}]
    _, line = study.without_table({"without": rows}).splitlines()
    assert line.split() == ["exp2", "2.01", "ms", "74", "%", "8.0", "M"]


def test_speeds_are_of_gradients_of_so_many_rows() -> None:
    assert study.flash4_speeds(record(speed=0.98), 16384) == [0.98]
    assert study.flash4_speeds(record(speed=0.98), 4096) == []


def test_the_record_has_all_cases() -> None:
    found = study.recorded()
    assert found is not None
    for part in ("rows", "power"):
        of_ours = [row for row in found[part] if row["name"] == study.OURS]
        assert [(*row["shape"], row["causal"]) for row in of_ours] == [(*c.shape, c.causal) for c in study.CASES]
        assert sum(row["name"] == study.FLASH4 for row in found[part]) == len(study.CASES)
    speeds = autograd.flash4_speeds(autograd.recorded() or {}, 16384)
    assert len(speeds) == len(study.flash4_speeds(found, 16384)) == 4

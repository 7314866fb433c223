"""Which elements of the gradients differ from run to run: counted and reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import device
from helpers.attention.ladder import BACKWARD, backward
from helpers.bench.studies import bits


@pytest.mark.skipif(device.ON_GPU, reason="counts what differs on the CPU engine, where a fake makes it differ")
def test_what_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, runs = backward.prepare, []

    def prepared(*args: Any, **how: Any) -> Any:
        run, found = prepare(*args, **how)

        def unsteady() -> None:
            run()
            runs.append(None)
            array = np.asarray(found[0])
            array.reshape(-1)[: len(runs) - 1] += 1

        return unsteady, found

    monkeypatch.setattr(backward, "prepare", prepared)
    found = bits.differing_elements("backward", deterministic=True, dtype="float32", shape=(1, 1, 33, 8), runs=3)
    assert found == {"dQ": 2, "dK": 0, "dV": 0}


def test_a_record_as_text() -> None:
    rows = [{"stage": "backward", "dtype": "float32", "different": {"dQ": 17, "dK": 0, "dV": 0}}]
    text = bits.table({"device": "Some GPU", "shape": [1, 2, 64, 8], "runs": 3, "rows": rows})
    assert "3 runs, of 1,024 each; Some GPU" in text and "17" in text


@pytest.mark.exhaustive
def test_all_that_computes_gradients_is_measured() -> None:
    found = list(bits.rows((1, 1, 33, 16), 2))
    both = {(row["stage"], row["dtype"]) for row in found}
    for name, stage in BACKWARD.items():
        assert {(name, dtype) for dtype in stage.dtypes} <= both
        assert not stage.features & {"deterministic"} or (f"{name} deterministic", stage.dtypes[0]) in both
    assert all(set(row["different"]) == {"dQ", "dK", "dV"} for row in found)

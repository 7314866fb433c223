"""PyTorch's part of the record: its table, and how it handles a failed section. The sections need a GPU."""

from __future__ import annotations

from typing import Any

from helpers.bench.records import NO_RECORD
from helpers.bench.studies import torch_model

RECORD: dict[str, Any] = {
    "device": {"description": "a GPU", "torch": "2", "transformers": "5"},
    "how": {"seconds": {"host": 1.0}},
    "tests": {"passed": 300, "skipped": 2, "failures": []},
    "host": [{"call": "SDPA", "what": "forward", "us": 10.0, "us_min": 9.5, "us_max": 10.5}],
    "prefill": [
        {"implementation": "course", "n": 512, "kv_heads": 4, "ms": 2.0, "ms_min": 1.9, "ms_max": 2.1}
        | {"tokens_per_s": 256000.0, "peak_bytes": 1_500_000_000},
        {"implementation": "eager", "n": 512, "kv_heads": 4, "error": "OutOfMemoryError: CUDA out of memory"},
    ],
    "accuracy": [
        {"implementation": name, "dtype": "float32", "kv_heads": 4, "max_error": 1e-6}
        for name in torch_model.IMPLEMENTATIONS
    ],
    "generation": [
        {"implementation": "course", "dtype": "float32", "kv_heads": 4, "as_sdpa": 128, "of": 128, "tokens_per_s": 99.4}
    ],
}


def test_the_table_shows_every_section() -> None:
    lines = [" ".join(line.split()) for line in torch_model.table(RECORD).splitlines()]
    assert lines[:2] == ["a GPU; torch 2, transformers 5", "tests with PyTorch: 300 passed, 2 skipped"]
    for line in (
        "forward SDPA 10.0 10.0%",
        "4 512 course 2.00 10.0% 256,000 1.50",
        "4 512 eager OutOfMemoryError: CUDA out of memory",
        "4 kv heads float32 1.0e-06 1.0e-06 1.0e-06",
        "greedy 4 float32 course 128 of 128 tokens as SDPA, 99 tokens/s",
    ):
        assert line in lines


def test_the_committed_record_has_a_table() -> None:
    text = torch_model.table()
    assert (text == NO_RECORD) == (not torch_model.RECORD.is_file())

"""Runs the studies: each has measured what one claim of the course needs, beside the ladder.

    python3 -m helpers.bench.study                # the studies, a line each
    python3 -m helpers.bench.study fused          # prints what is recorded
    python3 -m helpers.bench.study fused FILE     # on a GPU: measures, writes FILE as JSON and prints it

A study is a module of `studies/`. It has table(record=None), which is the text of a record or of the committed one, and
either measure(), which returns a record, or take(path, words), which also writes it and gets all words after FILE.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from helpers.bench import records

STUDIES = (
    *("fused", "score_mod", "decoding", "hopper", "cute", "promises", "presets", "bits", "train", "torch_model"),
    *("autograd", "tf32", "profile_stages", "xray_vs_ncu", "ring"),
)


def module_of(name: str) -> ModuleType:
    """The module of a study."""
    return importlib.import_module(f"helpers.bench.studies.{name}")


def main(words: Sequence[str]) -> int:
    """NAME and FILE, NAME for what is recorded, or nothing for the names. 1 where a part of the record has failed."""
    if not words or words[0] not in STUDIES:
        lines = (f"    {name:16}{(module_of(name).__doc__ or '').splitlines()[0]}" for name in STUDIES)
        print("\n".join(["python3 -m helpers.bench.study NAME [FILE]", *lines]))
        return 2 if words else 0
    name, *rest = words
    study = module_of(name)
    if not rest:
        print(study.table())
        return 0
    path = Path(rest[0])
    if hasattr(study, "take"):
        record = study.take(path, rest[1:])
    elif rest[1:]:
        sys.exit(f"{name} takes one FILE, not also {' '.join(rest[1:])}")
    else:
        record = study.measure()
        records.save(path, record)
    print(study.table(record))
    return 1 if isinstance(record, dict) and record.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

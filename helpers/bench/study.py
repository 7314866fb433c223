"""Run a study: the measurement of one claim of the course that the ladder's record does not cover.

    python3 -m helpers.bench.study                      # list the studies
    python3 -m helpers.bench.study fused                # print the committed record
    python3 -m helpers.bench.study fused FILE           # on a GPU: measure, write FILE as JSON and print it
    python3 -m helpers.bench.study hopper FILE rings    # measure some parts; FILE keeps the others

A study is a module of `studies/` with two functions: table(record=None) returns a record, by default the committed one,
as text; take(path, words) measures the parts named in words, or all, and writes path. Most of them are built on
`harness.Study`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from helpers.bench import peers, records
from helpers.bench.harness import Study
from helpers.device import ON_GPU

STUDIES = (
    *("fused", "score_mod", "decoding", "hopper", "cute", "promises", "presets", "bits", "train", "torch_model"),
    *("autograd", "tf32", "profile_stages", "xray_vs_ncu", "ring", "backward_timeline", "first_store", "pipes", "fp8"),
    *("bias_gradient", "tall_tiles", "backward_counters"),
)


def module_of(name: str) -> ModuleType:
    """Import a study's module."""
    return importlib.import_module(f"helpers.bench.studies.{name}")


def check_can_measure(study: ModuleType, path: Path, words: Sequence[str]) -> None:
    """Raise `records.Refused`, in a line, without a GPU, or if something else that a measurement needs is missing.

    Args:
        path: of the record. words: the parts to measure.
    """
    of: Study | None = getattr(study, "STUDY", None)
    if of:
        of.check_parts(words)
    if not ON_GPU:
        raise records.Refused("measuring needs a GPU; printing the table does not")
    for module in of.needs if of else ():
        if (peers.torch_on_gpu() if module == "torch" else importlib.util.find_spec(module)) is None:
            raise records.Refused(f"{of.name} needs {module}, which is not installed, or does not see the GPU")
    records.check_file(path)


def main(words: Sequence[str]) -> int:
    """Run the command. Return 1 if a part of the record has failed, 2 if it names no study or cannot measure."""
    if not words or words[0] not in STUDIES:
        lines = (f"    {name:18}{(module_of(name).__doc__ or '').splitlines()[0]}" for name in STUDIES)
        print("\n".join(["python3 -m helpers.bench.study NAME [FILE]", *lines]))
        return 2 if words else 0
    name, *rest = words
    study = module_of(name)
    if not rest:
        print(study.table())
        return 0
    path, *parts = rest
    try:
        check_can_measure(study, Path(path), parts)
        record = study.take(Path(path), parts)
    except records.Refused as error:
        print(error, file=sys.stderr)
        return 2
    print(study.table(record))
    return 1 if isinstance(record, dict) and record.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

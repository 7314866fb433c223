"""Break kernels and helpers, one operator or number at a time, and see which run of the tests notices.

    python3 tests/mutants.py                        30 mutants, seed 0
    python3 tests/mutants.py --count 100 --seed 1   others, and more
    python3 tests/mutants.py --only kernels/05      of files whose path begins so (a regular expression)
    python3 tests/mutants.py --list                 what they are, without running anything
    python3 tests/mutants.py --workers 8            eight at a time, each in a copy of its own

A mutant is one edit of one file: an operator for its opposite, a constant one larger, two arguments exchanged, a
barrier or a wait removed, a condition negated. For each mutant, pytest runs the test files that can notice it
(SEEN_BY), up to the first failure: first as the fast run selects them and, if they pass, in full. It works in a copy of
the repository, with its own cache of builds. A mutant noticed only by the full run shows a test that the fast one
lacks. One noticed by neither has no visible effect, or shows a test that both lack.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# (what to break, the tests that can notice it): the first pattern that matches a file's path.
SEEN_BY = (
    ("kernels/(steps/)?14_|kernels/(decode|stream_k|cache_copies|merge_states|float_fragments)", "test_decoding"),
    ("kernels/steps/", "test_steps"),
    ("kernels/08_backward_mma", "test_backward_mma"),
    ("kernels/15_", "test_stages test_planted_bugs test_fp16x3"),
    ("kernels/08_", "test_backward"),
    ("kernels/13_|kernels/hopper_backward", "test_backward_mma test_steps"),
    ("kernels/10_|kernels/hopper", "test_hopper test_tensor_cores"),
    ("kernels/11_(rotary|projection)", "test_rotary_and_projection"),
    ("kernels/11_bias", "test_bias_gradient"),
    ("kernels/11_|kernels/score_mod", "test_score_mod"),
    ("kernels/12_", "test_cute"),
    ("kernels/0[67]_", "test_tensor_cores"),
    ("kernels/0", "test_stages test_attention test_planted_bugs"),
    ("kernels/packed_tiles", "test_grid"),
    ("kernels/.*cuh", "test_attention test_tensor_cores test_backward_mma test_hopper"),
    ("helpers/engine/cpp/checker", "test_xray_memory test_xray_async test_xray_planted test_xray_no_bug"),
    ("helpers/engine/cpp/(warpgroups|tensor)", "test_engine_tensor test_engine_hopper test_engine_wmma"),
    ("helpers/engine/cuda_source/", "test_edit test_engine_cupy test_engine_arithmetic test_kernel_launch"),
    ("helpers/engine/xray/", "test_xray_report test_xray_memory test_xray_counters"),
    ("helpers/engine/", "test_engine test_engine_cupy test_engine_errors test_engine_arithmetic test_engine_barriers"),
    ("helpers/attention/ladder/", "test_stages test_tiles test_attention test_backward test_grid"),
    ("helpers/attention/export/", "test_export"),
    ("helpers/attention/models/serving", "test_serving"),
    ("helpers/attention/models/", "test_models_gpt test_models_minilm"),
    ("helpers/attention/deco", "test_decoding"),
    ("helpers/attention/reference", "test_reference"),
    ("helpers/attention/check", "test_check"),
    ("helpers/attention/", "test_kernel_launch test_attention test_compile"),
    ("helpers/lesson/exercises/graders/n(\\d\\d)", "test_exercises test_exercises_{}"),
    ("helpers/lesson/exercises/", "test_exercises test_exercise_progress test_exercises_01"),
    ("helpers/lesson/", "test_shortcuts test_show test_predict"),
    ("helpers/bench/", "test_bench test_counters test_gpus test_sass_loop"),
    ("helpers/draw/", "test_show"),
)

# (name, old text, new text), for C++ and Python alike.
OPERATORS = (
    ("less or equal for less", r"(?<=[\w\])] )<(?= [\w(])", "<="),
    ("less for less or equal", r"(?<=[\w\])] )<=(?= [\w(])", "<"),
    ("greater or equal for greater", r"(?<=[\w\])] )>(?= [\w(-])", ">="),
    ("unequal for equal", r"(?<=[\w\])] )==(?= )", "!="),
    ("minus for plus", r"(?<=[\w\])] )\+(?= [\w(])", "-"),
    ("plus for minus", r"(?<=[\w\])] )-(?= [\w(])", "+"),
    ("plus for times", r"(?<=[\w\])] )\*(?= [\w(])", "+"),
    ("a product for a remainder", r"(?<=[\w\])] )%(?= [\w(])", "*"),
    ("minimum for maximum", r"\bmax(?=\()", "min"),
    ("maximum for minimum", r"\bmin(?=\()", "max"),
    ("a constant one larger", r"(?<=[ (\[])\d+(?=[;,) \]])", lambda match: str(int(match[0]) + 1)),
    ("two arguments exchanged", r"(?<=\()(\w+), (\w+)(?=\))", r"\2, \1"),
)
IN_CPP = (
    ("no barrier", r"__syncthreads\(\);", ";"),
    ("no wait", r"(cp_async_wait<\d+>|wait\w*)\([^;{}()]*\);", ";"),
    ("or for and", r"&&", "||"),
    ("and for or", r"\|\|", "&&"),
)
IN_PYTHON = (
    ("a condition negated", r"(?<=\bif )(?!not |__name__)(?=\w)", "not "),
    ("or for and", r" and ", " or "),
    ("the first for the last", r"\[-1\]", "[0]"),
    ("true for false", r"\bFalse\b", "True"),
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit: `old`, which begins at character `begin` of the file at `path`, becomes `new`."""

    path: str
    begin: int
    old: str
    new: str
    name: str

    def __str__(self) -> str:
        text = (ROOT / self.path).read_text(encoding="utf-8")
        line = text.count("\n", 0, self.begin) + 1
        return f"{self.path}:{line}: {self.name}: {text.splitlines()[line - 1].strip()[:90]}"

    def of(self, text: str) -> str:
        assert text[self.begin :].startswith(self.old), f"{self.path} is not the file that this was made from"
        return text[: self.begin] + self.new + text[self.begin + len(self.old) :]


def tests_of(path: str) -> list[str]:
    """Return the test files that can notice a change of a file, [] if none is listed."""
    for pattern, names in SEEN_BY:
        if match := re.match(pattern, path):
            names = names.format(*match.groups()).split()
            return [f"tests/{name}.py" for name in names if (ROOT / "tests" / f"{name}.py").is_file()]
    return []


def code_of(text: str, is_python: bool) -> str:
    """Return the text with blanks in place of comments, strings and preprocessor lines: positions stay."""
    if is_python:
        pattern = r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|^(?:from|import) [^\n]*'
    else:
        pattern = r'/\*[\s\S]*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|^\s*#[^\n]*|^template[^\n]*|static_assert[^;]*;'
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.M)


def mutants_of(path: str) -> Iterator[Mutant]:
    """List all mutants of one file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    is_python = path.endswith(".py")
    code = code_of(text, is_python)
    for name, pattern, new in (*OPERATORS, *(IN_PYTHON if is_python else IN_CPP)):
        for match in re.finditer(pattern, code):
            replaced = new(match) if callable(new) else match.expand(new)
            if replaced != match[0]:
                yield Mutant(path, match.start(), match[0], replaced, name)


def chosen(count: int, seed: int, only: str = "") -> list[Mutant]:
    """Choose `count` mutants: equally many for each entry of SEEN_BY, each of a random file and kind."""
    rng = random.Random(seed)
    paths = (path for room in ("kernels", "helpers") for path in sorted((ROOT / room).rglob("*")))
    rooms: dict[str, list[str]] = {}
    for path in (path.relative_to(ROOT).as_posix() for path in paths):
        if path.endswith((".py", ".cu", ".cuh", ".cpp")) and tests_of(path) and re.match(only, path):
            rooms.setdefault(next(pattern for pattern, _ in SEEN_BY if re.match(pattern, path)), []).append(path)
    rooms = {room: paths for room, paths in rooms.items() if any(any(mutants_of(path)) for path in paths)}
    mutants: list[Mutant] = []
    while rooms and len(mutants) < count:
        for paths in rooms.values():
            by_name: dict[str, list[Mutant]] = {}
            for mutant in mutants_of(rng.choice(paths)):
                by_name.setdefault(mutant.name, []).append(mutant)
            if by_name:
                mutants.append(rng.choice(by_name[rng.choice(sorted(by_name))]))
    return list(dict.fromkeys(mutants))[:count]


def run(copy: Path, files: Sequence[str], fast: bool, limit: float) -> str:
    """Run the tests of a copy of the repository: "survives" if they pass, "killed" if one fails."""
    environment = {**os.environ, "COURSE_CACHE": str(copy.parent / "builds"), "COURSE_CPU_OPTIMISATION": "g"}
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:nbval"]
    argv += ["--fast", "--unchanged-too"] * fast
    try:
        done = subprocess.run([*argv, *files], cwd=copy, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "too long"  # an endless loop, or a slow machine: see --limit
    if done.returncode not in (0, 1, 2, 4):  # 2 and 4: a test file, or a module that it needs, cannot be imported
        raise RuntimeError(f"pytest left with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return "killed" if done.returncode else "survives"


def verdict(copy: Path, mutant: Mutant, fast: bool, limit: float) -> str:
    """Return the result of `run` for the copy with this mutant."""
    file = copy / mutant.path
    text = file.read_text(encoding="utf-8")
    file.write_text(mutant.of(text), encoding="utf-8")
    try:
        return run(copy, tests_of(mutant.path), fast, limit)
    finally:
        file.write_text(text, encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--limit", type=float, default=900, help="seconds that the tests of a mutant may take")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(words)
    mutants = chosen(options.count, options.seed, options.only)
    if options.list:
        print("\n".join(map(str, mutants)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.workers):
            copy = Path(folder) / f"course-{number}"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "work", "book", ".*_cache"))
            copies.put(copy)

        def in_a_copy(do: Callable[[Path], str]) -> str:
            copy = copies.get()
            try:
                return do(copy)
            finally:
                copies.put(copy)

        def tried(mutant: Mutant) -> str:
            fast = in_a_copy(lambda copy: verdict(copy, mutant, True, options.limit))
            whole = fast if fast != "survives" else in_a_copy(lambda copy: verdict(copy, mutant, False, options.limit))
            return fast if fast == whole else f"{fast} in the fast run, {whole} in the whole one"

        with ThreadPoolExecutor(options.workers) as pool:
            sets = {tuple(tests_of(mutant.path)) for mutant in mutants}
            ends = pool.map(lambda files: in_a_copy(lambda copy: run(copy, files, True, options.limit)), sets)
            green = {files for files, end in zip(sets, ends, strict=True) if end == "survives"}
            possible = [mutant for mutant in mutants if tuple(tests_of(mutant.path)) in green]
            for mutant in set(mutants) - set(possible):
                print(f"not tried, because its tests fail without it: {mutant}", flush=True)
            counts = collections.Counter({"not tried": len(mutants) - len(possible)})
            for mutant, result in zip(possible, pool.map(tried, possible), strict=True):
                counts[result] += 1
                print(f"{result}: {mutant}", flush=True)
    print(f"of {len(mutants)} mutants: {', '.join(f'{count} {result}' for result, count in sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

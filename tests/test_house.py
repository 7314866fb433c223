"""The map of the repository, helpers/README.md, is true: what exists, and which way imports point."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

HELPERS = Path(__file__).resolve().parent.parent / "helpers"

# From the bottom up. A module imports its own package and those on lower floors, none on its own floor or above.
FLOORS = (
    "setup",
    "engine",
    "device",
    "attention",
    "torch_tensors",
    "torch_autograd",
    "torch_attention",
    "torch_ring",
    "transformers_attention",
    "examples",
    "draw",
    "xray",
    "bench",
    "lesson",
    "site",
    "cli",
    "course",
)
FLOOR = {name: number for number, name in enumerate(FLOORS)}
# These import only a few other packages: old Pythons read setup, and engine is installed as a package, rawkernel.
ONLY = {
    "setup": {"packaging", "pip"},  # if it is installed
    "engine": {"numpy", "ml_dtypes", "elftools", "cupy", "pytest"},  # cupy: to use its NVRTC; pytest: the plugin
}
# In the engine's folder, but not modules of the course: its build, and an example of a user's project.
NOT_OURS = ("engine/setup.py", "engine/plugin/", "engine/examples/")
STANDARD = set(__import__("sys").stdlib_module_names)


def files() -> list[Path]:
    ours = (path for path in sorted(HELPERS.rglob("*.py")) if "data" not in path.parts)
    ours = (path for path in ours if not path.relative_to(HELPERS).as_posix().startswith(NOT_OURS))
    return [path for path in ours if path != HELPERS / "__init__.py"]


def room(path: Path) -> str:
    """Return the package or the module directly below helpers."""
    return path.relative_to(HELPERS).parts[0].removesuffix(".py")


@functools.cache
def is_module(name: str) -> bool:
    path = HELPERS.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Return the line and full name of each module that a file imports, inside functions too."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    package = ["helpers", *path.relative_to(HELPERS).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            full = [f"{name}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, one if is_module(one) else name) for one in full)


def test_imports_point_down() -> None:
    for path in files():
        own = room(path)
        assert own in FLOOR, f"{own} has no floor: write it into FLOORS and into helpers/README.md"
        for line, name in imported(path):
            top, _, rest = name.partition(".")
            if top == "helpers":
                target = rest.partition(".")[0]
                where = f"{path.relative_to(HELPERS)}:{line} imports {name}"
                assert target == own or FLOOR[target] < FLOOR[own], f"{where}, which is not below {own}"
            elif own in ONLY:
                assert top in STANDARD | ONLY[own], f"{path.name}:{line}: {own} does without {top}"


def test_the_engine_reaches_its_own_modules_by_relative_imports() -> None:
    """So one source works as helpers.engine and, installed, as rawkernel."""
    for path in files():
        if room(path) == "engine":
            absolute = re.findall(
                r"^\s*(?:from|import) (?:helpers|rawkernel).*", path.read_text(encoding="utf-8"), re.M
            )
            assert all("rawkernel import" in line and "  #" in line for line in absolute), (path, absolute)


def test_no_modules_import_each_other() -> None:
    """Neither two nor a cycle of several; an import in a function or under TYPE_CHECKING counts as well."""
    names = {path: ".".join(path.relative_to(HELPERS.parent).with_suffix("").parts) for path in files()}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    graph = {own: {name for _, name in imported(path)} - {own} for path, own in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that lists the cycle


def test_the_gpu_needs_nothing_of_the_engine() -> None:
    """Only the switch between the two, the X-ray, what draws on it and the site import it; all read CUDA C++ as text.

    And all may import the rule of banks, and the classes of an X-ray's steps and a trace's events.
    """
    both = tuple(f"helpers.engine.{name}" for name in ("cuda_source", "nvrtc", "banks", "steps", "tracing"))
    names = ((room(path), name) for path in files() for _, name in imported(path))
    known = {own for own, name in names if name.startswith("helpers.engine") and not name.startswith(both)}
    assert known - {"engine"} <= {"device", "attention", "xray", "lesson", "bench", "site"}


def test_the_map_names_every_room_and_no_other() -> None:
    text = (HELPERS / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)(?:/|\.py)`", text, re.M))
    without_python = {"data"}
    rooms = {room(path) for path in files()} | without_python
    assert named == rooms
    assert rooms - without_python == set(FLOOR)


def names_that_stay() -> set[str]:
    """Return the full names in the map's table of what notebooks import."""
    section = (HELPERS / "README.md").read_text(encoding="utf-8").partition("## What notebooks import")[2]
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+) \|$", section.partition("\n## ")[0], re.M)
    parts = [part.partition(": ") for row in rows for part in row.split("; ")]
    names = {f"helpers.{of.strip('`')}.{name}" for of, _, own in parts for name in re.findall(r"`(\w+)`", own)}
    return names | {"helpers.engine"}  # its names are CuPy's


def imported_by_a_cell(cell: str) -> set[str]:
    code = "\n".join("pass" if line.startswith(("%", "!")) else line for line in cell.splitlines())
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{a.name}" for node in nodes if node.module.split(".")[0] == "helpers" for a in node.names}


def test_notebooks_import_the_names_of_the_map_and_no_others() -> None:
    books = [json.loads(path.read_text(encoding="utf-8")) for path in (HELPERS.parent / "notebooks").glob("*.ipynb")]
    cells = ["".join(cell["source"]) for book in books for cell in book["cells"] if cell["cell_type"] == "code"]
    imports = set[str]().union(*(imported_by_a_cell(cell) for cell in cells if not cell.startswith("%%")))
    assert imports == names_that_stay()


def test_names_that_have_moved_are_still_where_learners_copies_import_them() -> None:
    from helpers.attention import passes, ring, ring_schedules

    assert all(getattr(ring, name) is getattr(ring_schedules, name) for name in ("SCHEDULES", "positions", "unshard"))
    assert ring.rows_of_block is passes.rows_of_block

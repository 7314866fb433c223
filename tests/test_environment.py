"""environment.yml is the only list: it has everything that is imported, and everything in it has a use."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest

from helpers.setup import make_lock, requirements

Requirement = pytest.importorskip("packaging.requirements").Requirement

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "environment.yml").read_text(encoding="utf-8")

# Used if installed, never required: extras, peers to measure against, and what the set-up reads versions with.
OPTIONAL = {"torch", "transformers", "triton", "numba", "flash_attn", "packaging", "pip"}
EXTRAS = {"torch": ["torch", "transformers"], "peers": ["numba"]}
# Extras chosen by the set-up itself: a C++ compiler, and the packages for CUDA 13 instead of those for CUDA 12.
BY_ITSELF = {"compiler", "cuda13"}
PYTHONS = [f"3.{minor}" for minor in range(requirements.OLDEST[1], 15)]
SYSTEMS = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")]
# Builds, tests and documents the engine as a package: its name, its build, its example.
OF_THE_PACKAGE = {
    "helpers/engine/setup.py": {"setuptools"},
    "helpers/engine/plugin/pytest_rawkernel.py": {"rawkernel"},
    "helpers/engine/examples/tests/test_histogram.py": {"histogram"},
}
# Modules for PyTorch only, and those that check for it in their own way. All others do without it, or check first.
FOR_PYTORCH = {
    "helpers/attention/comms.py",  # nccl_of_torch, whose callers have PyTorch
    "helpers/bench/studies/ring.py",
    "helpers/bench/studies/autograd.py",
    "helpers/bench/studies/bias_gradient.py",
    "helpers/bench/studies/backward_counters.py",
    "helpers/bench/studies/fp8.py",  # after peers.torch_on_gpu() has found it
    "helpers/bench/studies/fused.py",
    "helpers/torch_tensors.py",
    "helpers/torch_autograd.py",
    "helpers/torch_attention.py",
    "helpers/torch_ring.py",
    "helpers/examples/ring_gpt.py",
    "helpers/transformers_attention.py",
    "helpers/bench/studies/torch_model.py",
    "helpers/bench/studies/promises.py",  # after peers.torch_on_gpu() has found it
    "helpers/bench/studies/score_mod.py",  # FlexAttention
    "helpers/bench/studies/decoding.py",
    "helpers/bench/decode_loop.py",
    "helpers/bench/studies/tf32.py",
    "helpers/data/make_minilm_embeddings.py",
    "notebooks/09_drop_in.ipynb",
    "tests/test_decoding.py",
    "tests/test_torch_attention.py",
    "tests/test_transformers_attention.py",
    "tests/test_climb_record.py",
}
# Modules whose distribution has another name, for a system without it.
ELSEWHERE = {"cupy": "cupy", "cupy_backends": "cupy"}
# Modules of this repository.
SCRIPTS = [*ROOT.glob("tests/*.py"), *ROOT.glob("helpers/data/*.py")]  # each imports its neighbours by name
OURS = {"helpers", "tests", *(path.stem for path in SCRIPTS)}


@functools.cache
def listed() -> Mapping[str, str]:
    """Return the listed distributions by canonical name, each with the comment on its line."""
    _, items = requirements.read_list(TEXT)
    comments = {}
    for requirement in items:
        name = re.match(r"[\w.-]+", requirement)
        assert name, f"{requirement!r} is no requirement"
        line = next(line for line in TEXT.splitlines() if line.strip().startswith(f"- {name[0]}"))
        comments[of_any_cuda(requirements.canonical(name[0]))] = line.partition(" #")[2].strip()
    return comments


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """Return this Python's distributions by the top-level modules that they install."""
    return metadata.packages_distributions()


def distributions(module: str) -> set[str]:
    """Return the canonical names of the distributions with a top-level module."""
    names = installed().get(module) or [ELSEWHERE.get(module, module)]
    return {of_any_cuda(requirements.canonical(name)) for name in names}


def of_any_cuda(name: str) -> str:
    """Return a distribution's name without CUDA's major version: a machine may have that of another."""
    return re.sub(r"-cu(da)?\d+x?$", "", name)


def called(node: ast.Call) -> str:
    """Return the name of the called function, without what comes before its last dot."""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


class Imports(ast.NodeVisitor):
    """Collect (module, line, allowed without being listed) for each third-party import of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports: list[tuple[str, int, bool]] = []
        self.functions = self.tries = 0
        pip_lines = re.findall(r"pip install (.*)", ast.get_docstring(tree) or "")
        self.named = set(re.findall(r"[A-Za-z][\w.-]*", " ".join(pip_lines)))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.asked = {
            argument.value
            for call in calls
            if called(call) in ("find_spec", "importorskip")
            for argument in call.args
            if isinstance(argument, ast.Constant)
        }
        self.visit(tree)

    def add(self, name: str, line: int) -> None:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in OURS:
            return
        guarded = top in OPTIONAL and (self.tries > 0 or top in self.asked)
        self.imports.append((top, line, self.functions > 0 and (guarded or top in self.named)))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and node.module:
            self.add(node.module, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        by_name = called(node) in ("import_module", "__import__")
        if by_name and node.args and isinstance(node.args[0], ast.Constant):
            self.add(str(node.args[0].value), node.lineno)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Try(self, node: ast.Try) -> None:
        caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        guards = bool(re.search(r"ImportError|ModuleNotFoundError|\bException\b", caught))
        self.tries += guards
        self.generic_visit(node)
        self.tries -= guards


def python_of(cell: str) -> str:
    """Return the Python of a notebook's cell without line magics and shell lines; "" for a cell in another language."""
    if re.match(r"\s*%%(?!time|timeit|capture|prun)", cell):
        return ""
    return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell)


def sources() -> Iterator[tuple[str, str]]:
    """Return (where, Python text) of every module and every code cell of the course."""
    for path in sorted([*ROOT.glob("helpers/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/**/*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                yield f"{path.relative_to(ROOT)} cell {number}", python_of("".join(cell["source"]))


SOURCES = dict(sources())


@functools.cache
def imports_of(name: str) -> list[tuple[str, int, bool]]:
    """Find the imports of one of SOURCES, with `Imports`."""
    return Imports(ast.parse(SOURCES[name], filename=name)).imports


def test_all_that_is_imported_is_listed() -> None:
    required = listed()
    missing = [
        f"{name}, line {line}: {module}"
        for name in SOURCES
        for module, line, allowed in imports_of(name)
        for where in [name.partition(" cell ")[0]]
        if not allowed and not distributions(module) & required.keys()
        if not (where in FOR_PYTORCH and module in OPTIONAL)
        if module not in OF_THE_PACKAGE.get(where, ())
    ]
    assert not missing, f"add to the pip: block of environment.yml, or do without: {'; '.join(missing)}"


def test_all_that_is_listed_is_used_or_says_why() -> None:
    imported: set[str] = set()
    for name in SOURCES:
        for module, _, _ in imports_of(name):
            imported |= distributions(module)
    idle = [name for name, reason in listed().items() if name not in imported and not reason]
    assert not idle, f"nobody imports {idle}: take them out of environment.yml, or write the reason on their line"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import os, helpers.attention.check\nfrom . import x", []),
        ("import scipy.stats as s", [("scipy", False)]),
        ("def f():\n    from scipy import stats", [("scipy", False)]),
        (
            "def f():\n    try:\n        import scipy\n    except ImportError:\n        pass",
            [("scipy", False)],
        ),
        ("import importlib\nimportlib.import_module('scipy.stats')", [("scipy", False)]),
        ("import torch", [("torch", False)]),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", [("torch", False)]),
        ("def f():\n    import torch", [("torch", False)]),
        (
            "def f():\n    try:\n        import torch\n    except ValueError:\n        pass",
            [("torch", False)],
        ),
        (
            "def f():\n    try:\n        import torch\n    except ImportError:\n        pass",
            [("torch", True)],
        ),
        ("def f():\n    if find_spec('torch'):\n        import torch", [("torch", True)]),
        ("def f():\n    if find_spec('triton'):\n        import torch", [("torch", False)]),
        ("'''Run by hand.\n\npip install scipy\n'''\ndef f():\n    import scipy", [("scipy", True)]),
    ],
)
def test_the_look_at_imports_itself(text: str, wanted: list[tuple[str, bool]]) -> None:
    assert [(module, allowed) for module, _, allowed in Imports(ast.parse(text)).imports] == wanted


def test_cells_of_notebooks_are_read_without_their_magics() -> None:
    cell = "%matplotlib inline\nif True:\n    !ls\n    import scipy\nx = 5 % 3"
    assert [module for module, _, _ in Imports(ast.parse(python_of(cell))).imports] == ["scipy"]
    assert python_of("%%cuda naive\n__global__ void f() {}") == ""
    assert "import scipy" in python_of("%%time\nimport scipy")


def test_distributions_of_another_cuda_have_the_same_name() -> None:
    names = ("cupy-cuda12x", "cupy-cuda13x", "cupy", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13", "cudax")
    assert [of_any_cuda(name) for name in names] == [*["cupy"] * 3, *["nvidia-cuda-nvrtc"] * 2, "cudax"]


def test_extras_are_optional_and_ci_has_all_of_them() -> None:
    assert {*EXTRAS, *BY_ITSELF} == set(re.findall(r"# extra (\w+):", TEXT))
    script = (ROOT / ".ci" / "run").read_text()
    for extra, names in EXTRAS.items():
        assert [re.match(r"[\w-]+", item)[0] for item in requirements.read_extra(TEXT, extra)] == names
        assert set(names) <= OPTIONAL and not listed().keys() & set(names)
        assert re.search(rf"--(extra )?{extra}\b", script)


@functools.cache
def locked(part: str) -> list[Requirement]:
    """Return the requirements in a part of the lock, without their hashes."""
    lines = (requirements.LOCKED / f"{part}.txt").read_text().splitlines()
    return [Requirement(line.rstrip(" \\")) for line in lines if re.match(r"[\w-]+==", line)]


def versions(part: str, python: str, system: str, machine: str) -> dict[str, str]:
    """Return a part of the lock's version of each package, for a Python on a system."""
    here = {"python_version": python, "python_full_version": f"{python}.6", "sys_platform": system}
    here |= {"platform_machine": machine, "implementation_name": "cpython", "os_name": "posix"}
    here["platform_python_implementation"] = "CPython"
    chosen = [item for item in locked(part) if item.marker is None or item.marker.evaluate(here)]
    assert len(chosen) == len({item.name for item in chosen}), "two versions of a package"
    return {item.name: next(iter(item.specifier)).version for item in chosen}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("system", "machine"), SYSTEMS)
def test_the_lock_has_what_is_listed(python: str, system: str, machine: str) -> None:
    parts = {part: items for part, items in make_lock.parts().items() if part != "base"}
    parts["base"] = [item for item in requirements.read_list(TEXT)[1] if item not in parts["cuda12"]]
    for part, items in parts.items():
        present = versions(part, python, system, machine)
        if part == "torch":
            present |= versions("torch.unhashed", python, system, machine)
        for item in map(Requirement, items):
            if item.marker is None or item.marker.evaluate({"sys_platform": system}):
                version = present.get(requirements.canonical(item.name))
                assert version and item.specifier.contains(version), (
                    f"{part}.txt has {item.name} {version}, environment.yml asks for {item}: "
                    "python3 -m helpers.setup.make_lock"
                )


def test_each_locked_package_has_hashes_and_no_address() -> None:
    for path in requirements.LOCKED.iterdir():
        text = path.read_text()
        assert "://" not in text
        blocks = re.findall(r"^[\w-]+==.*\n(?:[ \t]+.*\n)*", text, re.M)
        assert blocks and all(("--hash=sha256:" in block) != ("unhashed" in path.name) for block in blocks), path.name


def test_the_lock_needs_nothing_that_is_not_in_it() -> None:
    """This Python's packages depend only on locked ones, as far as their versions are the lock's."""
    base = {item.name for item in locked("base")} - {"nvidia-cutlass"}
    allowed = {
        "base": base,
        "cuda12": base,
        "peers": base,
        "torch": base | {item.name for item in locked("torch.unhashed")},
    }
    for part, others in allowed.items():
        names = {item.name for item in locked(part)} | others
        for name in {item.name for item in locked(part)} - {"nvidia-cutlass"}:
            with contextlib.suppress(metadata.PackageNotFoundError):
                if metadata.version(name) not in {
                    next(iter(i.specifier)).version for i in locked(part) if i.name == name
                }:
                    continue
                for needed in map(Requirement, metadata.requires(name) or []):
                    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                        assert requirements.canonical(needed.name) in names, f"{name} needs {needed}"


def test_the_oldest_python_is_the_same_everywhere() -> None:
    oldest = "{}.{}".format(*requirements.OLDEST)
    assert f"- python>={oldest}\n" in TEXT
    assert f'target-version = "py{oldest.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert re.search(rf'python: \["{re.escape(oldest)}".*"{re.escape(PYTHONS[-1])}"\]', workflow)
    assert f"Python {oldest} to {PYTHONS[-1]}" in requirements.KNOWN


def test_ci_calls_the_same_command() -> None:
    script = ROOT / ".ci" / "run"
    assert "exec python3 helpers/course.py test --torch --extra peers --all" in script.read_text()
    assert "\npython3 helpers/course.py test " in (ROOT / "README.md").read_text(), "the second command"
    assert os.access(script, os.X_OK)
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text()

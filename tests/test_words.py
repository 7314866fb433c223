"""Functions' docstrings say in the imperative what the function does, or are sentences in tests; stages have names.

Ruff's D401 (in pyproject.toml, for helpers) refuses a first word such as "The", "A" or "Returns". It knows
verbs and articles; the words below begin docstrings without a verb that it accepts.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parent.parent / "helpers"

ABOUT_NOTEBOOKS = ("lesson", "site")  # where 04b is a notebook

NO_VERB = re.compile(
    r"(?:Of|As|By|At|In|On|To|From|With|Within|Without|Between|Behind|Beside|For|Through|Whether|Where|Which|What|Who"
    r"|Whose|Whom|Why|How|When|While|Until|If|All|Any|Both|Each|Either|Every|Few|Less|Many|More|Most|Neither|No|None"
    r"|Nobody|Not|Nothing|One|Other|Several|Some|Two|Three|Everything|Something|It|Its|That|There|These|They|This|Those"
    r"|Their|Here|Then|Only|But|And|Or|Also|Else)\b"
)
FRAGMENT = re.compile(r"(?:Of|As|By|Whether|Where|What|Who|How)\b")  # in tests/, where a docstring is a sentence
# A stage by its number: "for all from 05 on but 10", "10's loop". Numbers are the names of notebooks, though.
STAGE = re.compile(
    r"""
    (?<![\w.,:/*-]) (?<![Nn]otebook\ ) (?<!notebooks\ )
    (?: 0\d b?  |  1[0-7] b  |  (?<=from\ )1[0-7](?=\ on\b)  |  1[0-7](?='s\b)
      | (?<=but\ )1[0-7](?!\ \w)  |  (?<=as\ )1[0-7](?=\ (?:has|does)\b)
      | (?<=of\ )1[0-7](?=\ and\ (?:0\d|1[0-7])\b) )
    (?![\w.:/*-]\w)
    """,
    re.VERBOSE,
)

QUOTED = re.compile(r"`[^`]*`|\"[^\"\n]*\"|^ *(?:python3 -m|git) .*$", re.MULTILINE)  # names, examples, commands


def docstrings(path: Path) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield the line, the node and the docstring of each module, class and function of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node.body[0], "lineno", 1), node, text


def is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any("property" in ast.unparse(one) for one in decorators)


def violations(path: Path) -> Iterator[str]:
    """Yield a line for each docstring of a file that breaks a rule."""
    for line, node, text in docstrings(path):
        place = f"helpers/{path.relative_to(HELPERS)}:{line}"
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_property(node)
        if is_function and (first := NO_VERB.match(text)):
            yield f"{place}: begins with {first[0]!r}: say in the imperative what {node.name} does"
        stage = STAGE.search(QUOTED.sub("", text))
        if stage and room(path) not in ABOUT_NOTEBOOKS:
            yield f"{place}: names a stage by its number, {stage[0]}: say its name, such as online_softmax"


def room(path: Path) -> str:
    return path.relative_to(HELPERS).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in sorted(HELPERS.rglob("*.py")) if "data" not in path.parts]


@pytest.mark.parametrize("name", sorted({room(path) for path in files()}))
def test_docstrings_begin_with_a_verb_and_name_stages(name: str) -> None:
    wrong = [line for path in files() if room(path) == name for line in violations(path)]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_tests_are_sentences() -> None:
    found = ((path.name, *each) for path in sorted(Path(__file__).parent.glob("*.py")) for each in docstrings(path))
    wrong = [
        f"tests/{name}:{line}: {text.partition(chr(10))[0]}"
        for name, line, node, text in found
        if isinstance(node, ast.FunctionDef) and FRAGMENT.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rules_catch_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_words.HELPERS", tmp_path)
    examples = {
        'def f():\n    """Of 15: tiles of Q."""': "begins with 'Of'",
        'def f():\n    """Whether it is one."""': "begins with 'Whether'",
        'def f():\n    """Tile sizes, for all from 05 on."""': "number, 05",
        '"""Kernels of 10 and 13."""': "number, 10",
        'class A:\n    """As 04b has it."""': "number, 04b",
        'def f():\n    """Return 10 of 16 bytes from 04_register_tiles.cu, at 05:30."""': "",
        'class A:\n    """Of 16 bytes."""\n    @property\n    def f(self):\n        """Whether it is one."""': "",
    }
    for code, message in examples.items():
        path = tmp_path / "example.py"
        path.write_text(code)
        found = list(violations(path))
        assert (message in "".join(found)) if message else not found, (code, found)


def report() -> str:
    """Return how many docstrings break a rule, by directory: `python3 tests/test_words.py`."""
    counts = Counter(room(path) for path in files() for _ in violations(path))
    return "\n".join(f"{count:5} {name}" for name, count in counts.most_common()) or "none"


if __name__ == "__main__":
    print(report())

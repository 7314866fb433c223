"""Functions' docstrings say in the imperative what the function does, or are sentences in tests; stages have names.

Docstrings, comments and Markdown also do without some old-fashioned words and figures of speech.

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

# Phrases with plainer synonyms, and figures of speech: packages are not houses, and bugs are fixed.
OLD = re.compile(
    r"\b(?:(?:is|are|was|be)_told|says_no|as_(?:\w+_){1,4}(?:has|have)_(?:it|them)|anew|likewise|mend(?:s|ed)?|taken_for_an?"
    r"|th(?:ose|at)_of_(?:it|them)|(?:an?|the|this|each|every|one|another)_(?:house|room)|rooms)\b".replace(
        "_", r"[\s#]+"
    )
)
IN_KEYS = {"helpers/engine/ptx/use.py"}  # its text is part of the builds' key: an edit would compile everything again
TEXTS = re.compile(r'"""[\s\S]*?"""|(?:(?:^|(?<=\s))# .*\n\s*)+', re.MULTILINE)  # docstrings, comments of several lines

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
        if stage and package(path) not in ABOUT_NOTEBOOKS:
            yield f"{place}: names a stage by its number, {stage[0]}: say its name, such as online_softmax"


def package(path: Path) -> str:
    return path.relative_to(HELPERS).parts[0].removesuffix(".py")


def old_words(path: Path) -> Iterator[str]:
    """Yield a line for each old-fashioned word in a Markdown file, or in a module's docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    for words in TEXTS.finditer(text) if path.suffix == ".py" else re.finditer(r"[\s\S]+", text):
        for found in OLD.finditer(words[0]):
            line = text.count("\n", 0, words.start() + found.start()) + 1
            yield f"{path}:{line}: {found[0]!r}: say it in plain words"


def files() -> list[Path]:
    return [path for path in sorted(HELPERS.rglob("*.py")) if "data" not in path.parts]


@pytest.mark.parametrize("name", sorted({package(path) for path in files()}))
def test_docstrings_begin_with_a_verb_and_name_stages(name: str) -> None:
    wrong = [line for path in files() if package(path) == name for line in violations(path)]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_tests_are_sentences() -> None:
    found = ((path.name, *each) for path in sorted(Path(__file__).parent.glob("*.py")) for each in docstrings(path))
    wrong = [
        f"tests/{name}:{line}: {text.partition(chr(10))[0]}"
        for name, line, node, text in found
        if isinstance(node, ast.FunctionDef) and FRAGMENT.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_texts_use_plain_words() -> None:
    top = HELPERS.parent
    texts = [*files(), *sorted((top / "tests").glob("*.py")), top / "README.md", top / "CONTRIBUTING.md"]
    texts += [path for path in sorted(HELPERS.rglob("*.md")) if path.name != "CHANGELOG.md"]
    wrong = [line for path in texts if path.relative_to(top).as_posix() not in IN_KEYS for line in old_words(path)]
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
    path.write_text('mend = "is told"  # as kernels\n# have them\n')
    assert [line.removeprefix(str(path)) for line in old_words(path)] == [
        ":1: 'as kernels\\n# have them': say it in plain words"
    ]


def report() -> str:
    """Return how many docstrings break a rule, by directory: `python3 tests/test_words.py`."""
    counts = Counter(package(path) for path in files() for _ in violations(path))
    return "\n".join(f"{count:5} {name}" for name, count in counts.most_common()) or "none"


if __name__ == "__main__":
    print(report())

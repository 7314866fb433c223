"""Find the library of a source that was built before, without translating the source again.

A library's name is a hash of the text that the compiler read. Producing that text takes 20 to 100 ms of CPU time, so a
small file maps a source and its options to their library. Its name is a hash of these, of all modules that translate
them and of the headers that they may include; sources that include the user's files, or libraries, have none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from . import build, compiler

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[ \t]*(?:<([^>\n]+)>)?", re.M)
_DEFINE_OR_STANDARD = re.compile(r"(?:-D.|--?std=)")


def built(recipe: build.Recipe, log_stream: Any = None) -> build.Built:
    """Do what `build.build` does, but take a library that is known by its source immediately."""
    if log_stream is not None or not _is_alone(recipe):
        return build.build(recipe, log_stream)
    answer = compiler.cache_dir() / f"known-{_key(recipe)}.json"
    found = _found(recipe, answer)
    if found is None:
        found = build.build(recipe)
        if found.text == recipe.code:
            compiler.keep(answer, json.dumps([found.library.path.name, found.uses_tiles]))
    return found


def _is_alone(recipe: build.Recipe) -> bool:
    """Return True if the recipe's text and the engine's own headers are all that the compiler reads."""
    if recipe.backend != "nvrtc" or recipe.jitify or recipe.translate_cucomplex:
        return False
    headers = (name for (name,) in map(re.Match.groups, _INCLUDE.finditer(recipe.code)))
    return all(map(_DEFINE_OR_STANDARD.match, recipe.options)) and all(
        name and (compiler.INCLUDE / name).is_file() for name in headers
    )


def _key(recipe: build.Recipe) -> str:
    command, version = compiler.compiler()
    parts = [repr(recipe), *command, version, *compiler.flags(), _translation_hash()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _translation_hash() -> str:
    """Hash the engine's Python files, and the headers that kernels include."""
    digest = hashlib.sha256()
    folders = (compiler.HERE.glob("*.py"), *((compiler.HERE / name).glob("*.py") for name in ("cuda_source", "ptx")))
    for path in (*sorted(path for folder in folders for path in folder), *sorted(_headers())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _headers() -> list[Path]:
    return [path for path in (*compiler.INCLUDE.rglob("*"), compiler.ENGINE / "engine.h") if path.is_file()]


def _found(recipe: build.Recipe, answer: Path) -> build.Built | None:
    """Load the library that a file names; None if either is missing or broken."""
    try:
        name, uses_tiles = json.loads(answer.read_text())
        library = build.load(compiler.cache_dir() / name, recipe)
    except (OSError, ValueError, AttributeError):
        return None
    return build.Built(library, build.entries(library), uses_tiles, recipe.code)

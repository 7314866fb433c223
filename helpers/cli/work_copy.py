"""Learners' own copies of the notebooks: the folder work/, which git ignores and `course.py lab` opens.

JupyterLab saves the notebooks that a learner runs. In notebooks/ these changes would conflict with the next `git pull`,
so learners work on copies, which follow the originals:

    no copy yet                      the original is copied
    unchanged original               the copy stays, whatever is in it
    newer original, untouched copy   the copy becomes the newer original
    newer original, touched copy     the copy stays; the newer one is added as "07_mma (new).ipynb"

A copy is touched if its cells differ from those of the original that it was made from; outputs do not count.
work/.copies.json records which original that was. Standard library only.
"""

import hashlib
import json
import os
import re
from pathlib import Path

FOLDER = "work"
STAMPS = ".copies.json"
NEW = " (new{})"


def cells(text: str) -> str:
    """Hash a notebook's cells: two notebooks share the result only if their cells are the same.

    If a file is not a notebook, all of its text is hashed: a glossary, or a notebook whose save was interrupted.
    """
    try:
        said = [(cell["cell_type"], "".join(cell["source"]).rstrip()) for cell in json.loads(text)["cells"]]
    except (ValueError, KeyError, TypeError):
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def refresh(root: Path) -> "list[str]":
    """Bring root/work up to date with root/notebooks. Returns sentences for the learner.

    Raises OSError if the folder cannot be written.
    """
    originals = sorted([*root.glob("notebooks/*.ipynb"), *root.glob("notebooks/*.md")])
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    stamps = _read(folder / STAMPS)
    sentences = [] if stamps else [f"{FOLDER}/ has your copies of the notebooks; notebooks/ stays as it is"]
    for original in originals:
        sentences += _follow(original, folder, stamps)
        _write(folder / STAMPS, json.dumps(stamps, indent=1, sort_keys=True) + "\n")
    return sentences


def _follow(original: Path, folder: Path, stamps: "dict[str, str]") -> "list[str]":
    """Update the copies of one original. stamps: `cells` of the original that each copy was made from, by copy name."""
    text = _text(original)
    now = cells(text)
    for name in _names(original.name):
        copy = folder / name
        if not copy.exists():
            _write(copy, text)
            stamps[name] = now
            if name == original.name:
                return []
            return [f"{FOLDER}/{original.name} is as you left it; the course has a newer one: {FOLDER}/{name}"]
        if stamps.get(name) == now:
            return []  # already made from this version of the original
        mine = cells(_text(copy))
        if mine == now or mine == stamps.get(name):
            if mine != now:
                _write(copy, text)
            stamps[name] = now
            return [] if mine == now else [f"{FOLDER}/{name} was brought up to date"]
    return []


def _names(name: str) -> "list[str]":
    """Yield 07_mma.ipynb, 07_mma (new).ipynb, 07_mma (new 2).ipynb, ..."""
    stem, dot, suffix = name.rpartition(".")
    return [name] + [stem + NEW.format(f" {i}" if i > 1 else "") + dot + suffix for i in range(1, 100)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the disk is full."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8", errors="surrogateescape")
        os.replace(str(draft), str(path))
    finally:
        if draft.exists():
            draft.unlink()


def _read(path: Path) -> "dict[str, str]":
    """Read the stamps; {} if the file is missing or broken. Then every copy that differs counts as changed."""
    try:
        stamps = json.loads(_text(path)).items()
    except (OSError, ValueError, AttributeError):
        return {}
    return {name: mark for name, mark in stamps if re.fullmatch("[0-9a-f]{64}", str(mark))}


if __name__ == "__main__":  # for editors that open notebooks without `lab`
    print("\n".join(refresh(Path(__file__).resolve().parents[2])) or f"{FOLDER}/ is up to date")

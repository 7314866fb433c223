"""Structs that a source declares, as NumPy dtypes: for kernels that take one by value.

    layout = structs.dtype_of_struct(source("05_features.cu"), "AttentionParams")
    params = np.zeros((), layout)
    params["heads"] = 8

It reads plain structs: scalars, vector types, arrays of them with literal sizes, pointers (8 bytes, uint64), and
other such structs. A struct with anything else (functions, bit fields, base classes, templates, preprocessor
lines) is unknown as a whole.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from . import c_types
from .source import blank_comments, matching_bracket

_POINTER = np.dtype(np.uint64)
_HEAD = re.compile(
    r"(?<!\w)(?P<before>template\s*<[^;{}]*>\s*|typedef\s+)?struct\b"
    r"(?:\s*(?:alignas|__align__)\s*\(\s*(?P<align>\d+)\s*\))?\s*(?P<name>\w*)\s*\{"
)
_UNKNOWN = re.compile(r"[(){}#&]|(?<!:):(?!:)|\b(static|constexpr|using|typedef|template|friend|union|enum|operator)\b")
_MEMBER = re.compile(r"\s*(?P<stars>\**)\s*(?P<name>\w+)\s*(?P<sizes>(?:\[\s*\d+\s*\]\s*)*)$")


@dataclass(frozen=True)
class _Type:
    dtype: np.dtype
    alignment: int


def dtype_of_struct(code: str, name: str) -> np.dtype | None:
    """Return the layout of a struct of the source, with C's offsets and padding; its itemsize is sizeof.

    None where the source has no struct of that name, has two of them, or one that is not plain.
    """
    struct = _structs(code).get(c_types.key_of(name).split("::")[-1])
    return struct.dtype if struct else None


@functools.lru_cache(maxsize=64)
def _structs(code: str) -> dict[str, _Type | None]:
    """Return the structs by name; None for those that are not understood."""
    if "struct" not in code:
        return {}
    text = blank_comments(code)
    structs: dict[str, _Type | None] = {}
    for head in _HEAD.finditer(text):
        closing = matching_bracket(text, head.end() - 1, "{", "}")
        name, before = head.group("name"), head.group("before") or ""
        if before.startswith("typedef"):
            alias = re.match(r"\s*(\w+)\s*;", text[closing + 1 :])
            name = alias.group(1) if alias else name
        if not name or closing < 0:
            continue
        plain = name not in structs and not before.startswith("template")
        structs[name] = _struct(text[head.end() : closing], int(head.group("align") or 1), structs) if plain else None
    return structs


def _struct(body: str, alignment: int, structs: dict[str, _Type | None]) -> _Type | None:
    names, formats, offsets, end = [], [], [], 0
    for declaration in body.split(";"):
        if not declaration.strip():
            continue
        members = _members(declaration, structs)
        if members is None:
            return None
        for name, member in members:
            offset = -(-end // member.alignment) * member.alignment
            names.append(name)
            formats.append(member.dtype)
            offsets.append(offset)
            end = offset + member.dtype.itemsize
            alignment = max(alignment, member.alignment)
    if not names or len(set(names)) < len(names):
        return None
    size = -(-end // alignment) * alignment
    # align=True only notes that the offsets are C's: they are given.
    dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}, align=True)
    return _Type(dtype, alignment)


def _members(declaration: str, structs: dict[str, _Type | None]) -> list[tuple[str, _Type]] | None:
    """Return the members that one declaration such as `float *a, b[3]` names; None if it is not understood."""
    if _UNKNOWN.search(declaration):
        return None
    words = re.sub(r"\b(const|volatile|__restrict__|__restrict)\b", " ", declaration)
    first, *others = (part.split("=")[0] for part in words.split(","))
    start = re.match(r"\s*((?:[\w:]+\s+)*[\w:]+?)\s*(?=\*|\b\w+\s*(?:\[[^\]]*\]\s*)*$)", first)
    if start is None:
        return None
    base = _type_of(start.group(1), structs)
    members = []
    for part in (first[start.end() :], *others):
        member = _MEMBER.match(part)
        if member is None:
            return None
        kind = _Type(_POINTER, 8) if member.group("stars") else base
        if kind is None:
            return None
        sizes = tuple(map(int, re.findall(r"\d+", member.group("sizes"))))
        members.append((member.group("name"), _Type(np.dtype((kind.dtype, sizes)), kind.alignment) if sizes else kind))
    return members


def _type_of(c_name: str, structs: dict[str, _Type | None]) -> _Type | None:
    key = c_types.key_of(c_name)
    if key in c_types.SCALAR_OF and key != "void":
        dtype = c_types.dtype_of(c_types.SCALAR_OF[key])
        return _Type(dtype, dtype.itemsize)
    vector = c_types.vector_of(c_name)
    if vector is not None:
        element, count, alignment = vector
        return _Type(np.dtype((element, (count,))), alignment)
    return structs.get(key.split("::")[-1])


def difference(expected: np.dtype, given: np.dtype, of: str = "") -> str | None:
    """Describe how a dtype differs from a struct's layout, as the end of a sentence; None if it does not.

    Args:
        expected: the struct's, from `dtype_of_struct`. given: the value's. of: the field with these dtypes.
    """
    if given == expected:
        return None
    if expected.names is None:
        base, shape = expected.subdtype or (expected, ())
        if (
            given.names is not None
            and shape
            and [given[n] for n in given.names] == [base] * shape[0]
            and len(shape) == 1
        ):
            return None  # float4 as "f4,f4,f4,f4"
        return f"field {of!r} is {_text(given)}; the kernel reads {_text(expected)}"
    if expected.subdtype is None and given.names is None:
        return f"{f'field {of!r}' if of else 'it'} is {_text(given)}; the kernel reads a struct of {_fields(expected)}"
    prefix = f"{of}." if of else ""
    for name in expected.names:
        if name not in given.names:
            return f"it has no field {prefix + name!r}"
    for name in given.names:
        if name not in expected.names:
            return f"it has a field {prefix + name!r}, which the kernel's struct does not have"
    for name in expected.names:
        if inner := difference(expected[name], given[name], prefix + name):
            return inner
    for name in expected.names:
        at, ours = given.fields[name][1], expected.fields[name][1]
        if at != ours:
            return f"field {prefix + name!r} begins at byte {at}; the kernel reads it at byte {ours}"
    return f"{f'field {of!r}' if of else 'it'} has {given.itemsize} bytes; the kernel's struct has {expected.itemsize}"


def _text(dtype: np.dtype) -> str:
    base, shape = dtype.subdtype or (dtype, ())
    name = base.name if base.names is None else f"a struct of {_fields(base)}"
    return f"{name}{list(shape)}" if shape else name


def _fields(dtype: np.dtype) -> str:
    return ", ".join(dtype.names)

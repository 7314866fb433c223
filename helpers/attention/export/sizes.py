"""Sizes that remember how they were computed: a stage's plan for them is a plan for all calls.

n, block = Size.named("n", 5003), Size.constant("BLOCK_M", 128)
rows = -(-n // block)
print(int(rows), python(rows.tree), cpp(rows.tree))  # 40 -(-n // BLOCK_M) ceil_div(n, BLOCK_M)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# ("name", a variable), ("constant", its name, its value), ("number", a value), (an operator, tree, tree), ("neg", tree)
Tree = tuple[Any, ...]

_OPERATORS: Mapping[str, tuple[int, Callable[[int, int], int]]] = {  # precedence, and the operation
    "+": (1, lambda a, b: a + b),
    "-": (1, lambda a, b: a - b),
    "*": (2, lambda a, b: a * b),
    "//": (2, lambda a, b: a // b),
}
_UNARY = 3


class Size(int):
    """An int with the tree of its computation; so are its sums, differences, products and quotients.

    tree: a computation of constants only is a number again: 32 * WARPS is 128, and printed as such.
    """

    tree: Tree

    def __new__(cls, value: int, tree: Tree) -> Size:
        size = super().__new__(cls, value)
        size.tree = tree
        return size

    @classmethod
    def named(cls, name: str, value: int) -> Size:
        """Make a size that differs between calls."""
        return cls(value, ("name", name))

    @classmethod
    def constant(cls, name: str, value: int) -> Size:
        """Make a size that is compiled into the kernel."""
        return cls(value, ("constant", name, value))

    def _with(self, operator: str, a: int, b: int) -> Any:
        if not isinstance(a, int) or not isinstance(b, int):
            return NotImplemented
        value = _OPERATORS[operator][1](int(a), int(b))
        trees = tree_of(a), tree_of(b)
        if not any(map(varies, trees)):
            return Size(value, ("number", value))
        one = ("number", 1)
        if operator == "*" and one in trees:
            return Size(value, trees[0] if trees[1] == one else trees[1])
        return Size(value, (operator, *trees))

    def __neg__(self) -> Size:
        return Size(-int(self), ("neg", self.tree)) if varies(self.tree) else Size(-int(self), ("number", -int(self)))

    __hash__ = int.__hash__


for _name, _symbol in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//"}.items():
    setattr(Size, f"__{_name}__", lambda a, b, symbol=_symbol: a._with(symbol, a, b))
    setattr(Size, f"__r{_name}__", lambda a, b, symbol=_symbol: a._with(symbol, b, a))


def tree_of(value: int) -> Tree:
    """Return the tree of a size; that of a plain int is its number."""
    return value.tree if isinstance(value, Size) else ("number", int(value))


def varies(tree: Tree) -> bool:
    """Return True if the tree has a variable, so that its value depends on the call."""
    return tree[0] == "name" or any(varies(part) for part in tree[1:] if isinstance(part, tuple))


def names(tree: Tree) -> set[str]:
    """Return the names of the variables and the constants in a tree."""
    if tree[0] in ("name", "constant"):
        return {tree[1]}
    return set().union(*(names(part) for part in tree[1:] if isinstance(part, tuple)), set())


def value(tree: Tree, variables: Mapping[str, int]) -> int:
    """Evaluate a tree for other values of the variables. Raises KeyError for an unknown name."""
    kind = tree[0]
    if kind == "name":
        return variables[tree[1]]
    if kind in ("constant", "number"):
        return tree[-1]
    if kind == "neg":
        return -value(tree[1], variables)
    return _OPERATORS[kind][1](value(tree[1], variables), value(tree[2], variables))


def python(tree: Tree) -> str:
    """Write a tree in Python."""
    return _text(tree, "//", lambda a, b: f"-(-{a} // {b})")


def cpp(tree: Tree) -> str:
    """Write a tree in C++, where division truncates, and a function ceil_div(a, b) rounds up."""
    return _text(tree, "/", lambda a, b: f"ceil_div({a}, {b})")


def _text(tree: Tree, division: str, ceiling: Callable[[str, str], str], outside: int = 0) -> str:
    kind = tree[0]
    if kind in ("name", "constant", "number"):
        text = str(tree[1])
        return f"({text})" if text.startswith("-") and outside else text
    if kind == "neg":
        inner = tree[1]
        if inner[0] == "//" and inner[1][0] == "neg":  # -(-a // b): rounded up
            return ceiling(*(_text(part, division, ceiling, _UNARY) for part in (inner[1][1], inner[2])))
        return f"-{_text(inner, division, ceiling, _UNARY)}"
    strength = _OPERATORS[kind][0]
    left = _text(tree[1], division, ceiling, strength)
    right = _text(tree[2], division, ceiling, strength + (kind in ("-", "//")))
    text = f"{left} {division if kind == '//' else kind} {right}"
    return f"({text})" if strength < outside else text

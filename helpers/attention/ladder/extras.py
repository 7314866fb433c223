"""Extra inputs of a call: a bias on the scores, ALiBi, sinks, and the rotary embedding of q and k.

This module checks them, and converts them to a kernel's form. The definitions are in
`helpers.attention.reference.attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.attention.fp8 import DESCALE_ROWS
from helpers.attention.ladder.layout import Spec
from helpers.attention.scalars import check_flags, check_pair

ROTARY_TABLES, POSITIONS = ("rotary_cos", "rotary_sin"), ("q_positions", "k_positions")
ROTARY = (*ROTARY_TABLES, *POSITIONS)
DESCALES = ("q_descale", "k_descale", "v_descale")
NAMES = ("bias", "alibi_slopes", "sinks", *ROTARY, *DESCALES)


def extra_inputs(
    bias: Any = None,
    alibi_slopes: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    sinks: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
) -> dict[str, Any]:
    """Collect the given extra inputs, by the names of `NAMES`.

    Raises:
        TypeError: rotary_interleaved is not a bool; rotary_positions is not a pair; an argument is not an array.
        ValueError: rotary_cos without rotary_sin, or another rotary option without both.
    """
    no_array = bias is alibi_slopes is sinks is rotary_cos is rotary_sin is rotary_positions is None
    if no_array and rotary_interleaved is False and q_descale is k_descale is v_descale is None:
        return {}
    check_flags(rotary_interleaved=rotary_interleaved)
    if (rotary_cos is None) != (rotary_sin is None):
        given, other = ("rotary_cos", "rotary_sin") if rotary_sin is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{given} is given without {other}: a rotation needs both")
    positions: tuple[Any, Any] = (None, None)
    if rotary_positions is not None:
        check_pair("rotary_positions", rotary_positions, "(q_positions, k_positions) of int32 arrays")
        positions = tuple(rotary_positions)
    if rotary_cos is None and (rotary_positions is not None or rotary_interleaved):
        what = "rotary_positions" if rotary_positions is not None else "rotary_interleaved"
        raise ValueError(f"{what} is given without rotary_cos and rotary_sin: there is nothing to rotate by")
    given = bias, alibi_slopes, sinks, rotary_cos, rotary_sin, *positions, q_descale, k_descale, v_descale
    extras = {name: a for name, a in zip(NAMES, given, strict=True) if a is not None}
    for name, a in extras.items():
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise TypeError(f"{_argument(name)} must be an array; got {type(a).__name__} {a!r:.40}")
    if rotary_positions is not None and any(a is None for a in positions):
        raise TypeError("rotary_positions has an array and a None; give two arrays, or None for both")
    return extras


def needs(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """List what a stage must support for these arrays, for `Stage.why_not`; empty without extras."""
    rotary_dim = 2 * arrays["rotary_cos"].shape[-1] if "rotary_cos" in arrays else 0
    functions = [name for name in ("bias", "alibi_slopes", "sinks") if name in arrays]
    descales = [name for name in DESCALES if name in arrays]
    blocks = [name for name in descales if len(arrays[name].shape) == 3]
    wanted = {
        "mod": functions and functions[0],
        "rotary_dim": rotary_dim,
        "descale": descales and descales[0],
        "block_descale": blocks and f"{blocks[0]} for each block of rows",
    }
    return {name: value for name, value in wanted.items() if value}


def check_positions(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for a position in a NumPy array that the tables lack. Device arrays are not read."""
    for name in POSITIONS:
        positions = arrays.get(name)
        if type(positions) is np.ndarray and positions.size and positions.dtype.kind in "iu":
            low, high, rows = int(positions.min()), int(positions.max()), arrays["rotary_cos"].shape[0]
            if low < 0 or high >= rows:
                raise ValueError(
                    f"{_argument(name)} has positions from {low} to {high}, and rotary_cos has {rows}: "
                    f"0 to {rows - 1} are allowed"
                )


def as_kernels_read(
    arrays: Mapping[str, Spec], *, sequences: int, packed: bool = False, longest_k: int | None = None
) -> dict[str, Spec]:
    """Give the extra inputs the axes that a kernel expects.

    Args:
        arrays: q and k, (batch, heads, N, d) and (batch, kv_heads, N_kv, d); if sequences are packed, batch is 1 and
            the tokens of all are along N. And any of `NAMES`.
        sequences: batch, or the number of packed ones. longest_k: keys of the longest of them, if known.

    Returns:
        By name: bias with 4 axes, each as long as the call's or 1; alibi_slopes (1 or sequences, heads); sinks
        (heads,); rotary_cos and rotary_sin (positions, rotary_dim / 2); q_positions and k_positions (1 or batch, N or
        N_kv).

    Raises:
        TypeError: an unsupported dtype.
        ValueError: a shape that does not match the call; a position outside of the tables, as far as the host knows
            them.
    """
    q, k = arrays["q"], arrays["k"]
    (batch, heads, n, head_dim), n_kv = q.shape, k.shape[2]
    extras: dict[str, Spec] = {}
    for name in NAMES:
        if (a := arrays.get(name)) is None:
            continue
        if name == "bias":
            _check_bias(a, q.dtype, (sequences, heads, n, n_kv), packed)
            extras[name] = a.with_axes(4)
        elif name == "alibi_slopes":
            check_slopes(a, sequences, heads)
            extras[name] = a.with_axes(2)
        elif name == "sinks":
            check_sinks(a, heads)
            extras[name] = a
        elif name in DESCALES:
            of, rows = (heads, n) if name == "q_descale" else (k.shape[1], n_kv)
            _check_descale(name, a, (sequences, of), None if packed else -(-rows // DESCALE_ROWS))
            extras[name] = a
        elif name in ROTARY_TABLES:
            check_table(name, a, q.dtype, head_dim)
            extras[name] = a
        else:
            _check_positions(name, a, 1 if packed else batch, n if name == "q_positions" else n_kv, packed)
            extras[name] = a.with_axes(2)
    if len({extras[name].ndim for name in DESCALES if name in extras}) > 1:
        raise ValueError("q_descale, k_descale and v_descale: all are for heads, or all for blocks of rows")
    if "rotary_cos" in extras:
        _check_tables(extras, n, n_kv, packed, longest_k)
    return extras


def is_readable(name: str, a: Spec) -> bool:
    """Return True if a kernel can read an array without a head_dim in place: a bias by its strides."""
    if name == "bias":
        return min(a.strides, default=0) >= 0 and not any([step % a.dtype.itemsize for step in a.strides])
    if name in _IN_ROWS:
        return a.in_rows
    return a.contiguous and (name not in _IN_CHUNKS or not a.offset)


_IN_ROWS = frozenset({*POSITIONS, "block_table"})  # of which batches may be the same
_IN_CHUNKS = frozenset({*ROTARY_TABLES, "w_o"})  # read 16 bytes at a time


def _check_bias(bias: Spec, dtype: Any, shape: tuple[int, ...], packed: bool) -> None:
    if packed:
        raise ValueError(
            "bias: sequences that are packed have no common (N, N_kv), so an array of scores does not fit them. "
            "alibi_slopes works with them; for an array, call flash_attention for each sequence"
        )
    if bias.dtype not in (dtype, np.float32, np.bool_):
        names = dict.fromkeys((np.dtype(dtype).name, "float32"))
        raise TypeError(
            f"bias is {bias.dtype}; {' or '.join(names)} (added to the scaled scores) or bool (True: may be seen) is "
            f"needed: bias.astype('{np.dtype(dtype).name}')"
        )
    fits = bias.ndim <= 4 and all(size in (1, most) for size, most in zip(bias.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; (batch, heads, N, N_kv) = {shape} is needed, with each axis of that "
            "length or 1; leading axes may be left out"
        )


def _check_descale(name: str, a: Spec, of_heads: tuple[int, int], blocks: int | None) -> None:
    """Refuse descales unless there is one per head or, unless blocks is None, one per block."""
    allowed = [of_heads] if blocks is None else [of_heads, (*of_heads, blocks)]
    if a.dtype != np.float32 or tuple(a.shape) not in allowed:
        of_blocks = f", or {allowed[-1]}: one for each {DESCALE_ROWS} rows of a head"
        if blocks is None:
            of_blocks = "; packed sequences have none for blocks of rows" if a.ndim == 3 else ""
        raise ValueError(
            f"{name} is {a.dtype} {tuple(a.shape)}; float32 {of_heads} is needed: one for each head of each sequence"
            f"{of_blocks}"
        )


def check_sinks(sinks: Spec, heads: int) -> None:
    """Raise ValueError unless sinks is float32 (heads,)."""
    if sinks.dtype != np.float32 or sinks.shape != (heads,):
        raise ValueError(f"sinks is {sinks.dtype} {sinks.shape}; float32 ({heads},) is needed: one for each head")


def check_slopes(slopes: Spec, sequences: int, heads: int) -> None:
    """Refuse ALiBi slopes unless there is one per head, or per head of each sequence."""
    if slopes.dtype != np.float32:
        raise TypeError(f"alibi_slopes is {slopes.dtype}; float32 is needed: alibi_slopes.astype('float32')")
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; ({heads},) or ({sequences}, {heads}) is needed: one slope "
            "for each head, or for each head of each sequence"
        )


def check_table(name: str, table: Spec, dtype: Any, head_dim: int) -> None:
    if table.dtype not in (dtype, np.float32):
        names = " or ".join(dict.fromkeys((np.dtype(dtype).name, "float32")))
        raise TypeError(f"{name} is {table.dtype}; {names} is needed: {name}.astype('float32')")
    chunk = 16 // np.dtype(dtype).itemsize
    if table.ndim == 2 and (head_dim % chunk or table.shape[1] % chunk):
        raise ValueError(
            f"{name} is for rotary_dim = {2 * table.shape[1]}, and head_dim = {head_dim}; in {np.dtype(dtype).name} "
            f"rotary_dim is a multiple of {2 * chunk}, and head_dim of {chunk}"
        )
    if table.ndim != 2 or not 1 <= table.shape[1] <= head_dim // 2 or not table.shape[0]:
        raise ValueError(
            f"{name} has shape {tuple(table.shape)}; (positions, rotary_dim / 2) is needed, with rotary_dim from 2 to "
            f"head_dim = {head_dim}"
        )


def _check_positions(name: str, positions: Spec, batch: int, rows: int, packed: bool) -> None:
    what = _argument(name)
    if positions.dtype != np.int32:
        raise TypeError(f"{what} is {positions.dtype}; int32 is needed: .astype('int32')")
    forms = ((rows,),) if packed else ((rows,), (batch, rows))
    if tuple(positions.shape) not in forms:
        raise ValueError(f"{what} has shape {tuple(positions.shape)}; {' or '.join(map(str, forms))} is needed")


def check_one_form(cos: Spec, sin: Spec) -> None:
    """Raise ValueError unless the two tables of a rotary embedding have one shape and dtype."""
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"rotary_cos is {cos.dtype} {tuple(cos.shape)} and rotary_sin {sin.dtype} {tuple(sin.shape)}: "
            "one shape and one dtype for both is needed"
        )


def _check_tables(extras: Mapping[str, Spec], n: int, n_kv: int, packed: bool, longest_k: int | None) -> None:
    cos = extras["rotary_cos"]
    check_one_form(cos, extras["rotary_sin"])
    if "q_positions" in extras:
        return
    if not packed and n > n_kv:
        raise ValueError(
            f"rotary embedding of N = {n} rows and N_kv = {n_kv} keys: row i would be at i + N_kv - N, below 0. "
            "Give rotary_positions=(q_positions, k_positions)"
        )
    needed = longest_k if packed else n_kv
    if needed is not None and needed > cos.shape[0]:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} positions, and {'the longest sequence' if packed else 'k'} has {needed} "
            "keys: longer tables are needed, or rotary_positions"
        )


def _argument(name: str) -> str:
    """Return the caller's name for an array."""
    sides = {"q_positions": "rotary_positions[0]", "k_positions": "rotary_positions[1]"}
    return sides.get(name, name)

"""Time 10 with tiles of 192 rows x 64 keys and with its usual ones, at head_dims of 97 to 128, on a GPU.

    python3 -m helpers.bench.study tall_tiles FILE

bfloat16, in turns, with different lengths, masks and numbers of heads. The stage's rule for these tiles
(`ladder/stages/hopper.py`) chooses between the two, so the record shows the cost of its choices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers.attention.export.plan import TARGETS
from helpers.attention.ladder import LADDER, limits
from helpers.attention.ladder.call import Call, Spec, mask_window, softmax_scale_of
from helpers.attention.ladder.stages.hopper import TALL, pick_hopper
from helpers.attention.ladder.tiles import Sizes
from helpers.bench import records
from helpers.bench.cases import Inputs
from helpers.bench.harness import Study, compare, require_same, speed_text
from helpers.device import cp, describe
from helpers.engine.cuda_source.signatures import dtype_of

recorded = records.reader("nvidia-h200-tall_tiles.json")
STAGE = LADDER["hopper"]
DTYPE = "bfloat16"
WAYS = TALL_WAY, USUAL = "192 rows", "usual"
ROUNDS = 15


class Case(NamedTuple):
    """One call: Q (batch, heads, rows, head_dim), K and V (batch, kv_heads, keys, head_dim)."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.rows, self.head_dim

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads, self.keys, self.head_dim

    @property
    def flops(self) -> float:
        """Count the FLOP of the visible scores, and of their products with V."""
        hidden = self.rows * (self.rows - 1) / 2 if self.causal else 0
        return 4 * self.batch * self.heads * (self.rows * self.keys - hidden) * self.head_dim

    @property
    def usual(self) -> dict[str, int]:
        """The sizes that the stage takes if tiles of 192 rows are excluded."""
        return pick_hopper(self.head_dim, self.causal, self.keys)

    def is_tall(self) -> bool:
        """Return whether the stage takes tiles of 192 rows, on an H200."""
        dtype = dtype_of(DTYPE)
        arrays = {"q": Spec.dense(self.q_shape, dtype), "o": Spec.dense(self.q_shape, dtype)}
        arrays |= dict.fromkeys("kv", Spec.dense(self.k_shape, dtype))
        scale, window = softmax_scale_of(None, self.head_dim), mask_window(None, self.causal)
        call = Call(arrays, scale, window, self.rows, self.batch, aligned=True, keys=self.keys)
        with limits.pretend_gpu(TARGETS["sm_90"]):
            return TALL.items() <= STAGE.variant(call).items()


def _cases() -> Iterator[Case]:
    lengths = 768, 1000, 1536, 2112, 2304, 3000, 3456, 4224, 5000, 6144, 8448, 12288, 16896
    few = (1, 16, 1536), (1, 16, 2112), (1, 8, 4224), (3, 16, 2112), (1, 40, 3000), (1, 4, 8448)
    of_104 = 2112, 4224, 8448
    yield from _with_mask(lengths, few, of_104, causal=True)
    lengths += 1300, 1728, 2048, 2700, 4096, 7000, 10000, 16384
    few += (1, 12, 2500), (2, 24, 1800), (1, 64, 2200), (2, 8, 6000), (1, 20, 5376), (5, 12, 3300)
    yield from _with_mask(lengths, few, (*of_104, 1000, 4096), causal=False)


def _with_mask(
    lengths: Sequence[int], few: Sequence[tuple[int, int, int]], of_104: Sequence[int], *, causal: bool
) -> Iterator[Case]:
    """Yield cases of some 16,896 tokens and 16 heads, of a Llama's heads, of few tiles, and of other head_dims."""
    for n in lengths:
        yield Case(max(16896 // n, 1), 16, 16, n, n, 128, causal)
    for n in (1000, 2112, 3072, 4224, 8448):
        yield Case(max(8448 // n, 1), 32, 8, n, n, 128, causal)
    for batch, heads, n in few:
        yield Case(batch, heads, heads, n, n, 128, causal)
    for n in of_104:
        yield Case(max(16896 // n, 1), 16, 16, n, n, 104, causal)
    for rows, keys in ((512, 4096), (192, 8448), (2112, 8448), (2304, 5000)):  # the last rows of a longer sequence
        yield Case(1 + 3 * (rows == 512), 16, 16, rows, keys, 128, causal)


CASES = tuple(_cases())


def rows(cases: Sequence[Case] = CASES, rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Time both in turns, case by case. Raises WrongOutput if their outputs differ by more than rounding."""
    most = max(math.prod(shape) for case in cases for shape in (case.q_shape, case.k_shape))
    pool = [a.reshape(-1) for a in Inputs((1, 1, -(-most // 128), 128), DTYPE).device]
    for case in cases:
        shapes = case.q_shape, case.k_shape, case.k_shape
        given = [a[: math.prod(shape)].reshape(shape) for a, shape in zip(pool, shapes, strict=True)]
        both = zip(WAYS, (TALL, case.usual), strict=True)
        made = {name: STAGE.prepare(*given, causal=case.causal, sizes=sizes) for name, sizes in both}

        def output(run: Callable[[], None], o: Any) -> Any:
            run()
            return cp.asnumpy(o).astype(np.float32)

        require_same(str(case), {name: functools.partial(output, *way) for name, way in made.items()}, 0.01)
        timed = compare({name: run for name, (run, _) in made.items()}, rounds, flops=case.flops, over=USUAL)
        yield [{"name": name, **case._asdict(), **figures} for name, figures in timed.items()]


STUDY = Study(
    "tall_tiles",
    {"rows": rows},
    lambda: {"device": describe(), "dtype": DTYPE, "rounds": ROUNDS},
    line=lambda row: f"{case_of(row)} {row['name']:10}{row['ms']:8.4f} ms {speed_text(row) if 'speed' in row else ''}",
)
take = STUDY.take


def case_of(row: Mapping[str, Any]) -> Case:
    """Read the case of a row."""
    return Case(*(row[field] for field in Case._fields))


def losses(record: Mapping[str, Any]) -> dict[Case, float]:
    """Return by case how much longer the stage's choice takes than the faster tiles, 0.01 for 1 %."""
    lost = {}
    for row in record["rows"]:
        if "speed" in row:
            case = case_of(row)
            lost[case] = max(1 / row["speed"] if case.is_tall() else row["speed"], 1.0) - 1
    return lost


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a case a line: the time with the usual tiles, and the speedup of tall ones."""
    lines = [f"{'bfloat16':50}{'usual':>14}{'192 rows':>24}"]
    pairs = zip(record["rows"][::2], record["rows"][1::2], strict=True)
    for tall, usual in pairs:
        case = case_of(tall)
        heads = f"{case.heads}" + f" ({case.kv_heads})" * (case.heads != case.kv_heads)
        keys = f", {case.keys} keys" * (case.keys != case.rows)
        what = f"{case.batch} x {heads} heads of {case.head_dim}, N = {case.rows}{keys}" + ", causal" * case.causal
        sizes: Sizes = case.usual
        tile = f"{sizes['BLOCK_M']} x {sizes['BLOCK_N']}"
        taken = "  taken" * case.is_tall()
        lines.append(f"{what:50}{usual['ms']:9.4f} ms {tile}{speed_text(tall):>24}{taken}")
    lines.append(f"The tiles taken take at most {max(losses(record).values()):.1%} longer than the others.")
    return "\n".join(lines)

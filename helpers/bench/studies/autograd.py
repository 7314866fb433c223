"""Time a forward and a backward pass by torch.autograd on a GPU: ours against SDPA's flash and cuDNN backends.

    python3 -m helpers.bench.study autograd FILE

bfloat16, 16,384 tokens, heads x head_dim = 2048. Device time, in turns. The queue is kept full, so the host's time is
not included. "flash4": the same at other lengths, against FlashAttention-4 if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from helpers.bench import records
from helpers.bench.cases import Case, shape_of_tokens
from helpers.bench.harness import Row, Study, compare_case, heads_text, require_same, speed_text
from helpers.bench.peers import TORCH_DEVICE, flash_attention_4
from helpers.bench.run import device_facts

recorded = records.reader("nvidia-h200-autograd.json")
OURS = "flash_attention"
PEERS = {"SDPA flash": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION"}
CASES = tuple(
    Case(shape_of_tokens(n, head_dim), "bfloat16", causal)
    for head_dim in (128, 64)
    for n in (1024, 4096, 16384)
    for causal in (False, True)
)
FLASH4 = "FlashAttention-4"
FLASH4_PEERS = (FLASH4, "SDPA cuDNN")
FLASH4_CASES = tuple(
    Case((batch, 2048 // head_dim, n, head_dim), "bfloat16", causal)
    for head_dim in (128, 64)
    for batch, n in ((1, 16384), (4, 4096), (8, 2112), (32, 512))
    for causal in (False, True)
)
ROUNDS = 15
PASSES = 3.5  # FLOP of both passes, in units of the forward pass: seven products instead of two


def inputs(case: Case) -> tuple[list[Any], Any]:
    """Make q, k, v and the output's gradient: PyTorch's tensors (batch, N, heads, d)."""
    import torch

    batch, heads, n, d = case.shape
    torch.manual_seed(0)
    how = {"device": TORCH_DEVICE, "dtype": torch.bfloat16}
    *given, do = (torch.randn(batch, n, heads, d, **how) + 0.25 for _ in range(4))
    return given, do


def forwards(given: Sequence[Any], causal: bool, peers: Iterable[str]) -> dict[str, Callable[[], Any]]:
    """Return the functions that compute the output (batch, N, heads, d), by name, ours first."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from helpers.torch_attention import flash_attention

    def of_models(call: Any) -> Callable[[], Any]:
        return partial(call, *given, causal=causal)

    def sdpa(name: str) -> Any:
        with sdpa_kernel(getattr(SDPBackend, PEERS[name])):
            q, k, v = (a.transpose(1, 2) for a in given)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    ways = {name: of_models(flash_attention_4()) if name == FLASH4 else partial(sdpa, name) for name in peers}
    return {OURS: of_models(flash_attention), **ways}


def rows(
    cases: tuple[Case, ...] = CASES, rounds: int = ROUNDS, peers: Collection[str] | None = None
) -> Iterator[list[Row]]:
    """Time all ways in turns, case by case. Raises WrongOutput if a peer's gradients differ from ours."""
    import torch

    for case in cases:
        given, do = inputs(case)
        for a in given:
            a.requires_grad_()
        ways = {
            name: lambda run=run, given=given, do=do: torch.autograd.grad(run(), given, do)
            for name, run in forwards(given, case.causal, PEERS if peers is None else peers).items()
        }
        require_same(str(case), ways)
        yield compare_case(case, ways, rounds, flops=PASSES * case.flops, of=OURS)


def flash4() -> Iterator[list[Row]]:
    """Time ours, FlashAttention-4 and cuDNN in turns; nothing if FlashAttention-4 is not installed."""
    if flash_attention_4() is not None:
        yield from rows(FLASH4_CASES, peers=FLASH4_PEERS)


STUDY = Study(
    "autograd",
    {"rows": rows, "flash4": flash4},
    lambda: {"device": device_facts(), "rounds": ROUNDS},
    line=lambda row: f"{row['shape']} {row['name']:16}{row['ms']:8.3f} ms",
    needs=("torch",),
)
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a case a line: ours, and its speed relative to each peer's."""
    lines = _lines(record["rows"], tuple(PEERS))
    if "flash4" in record:
        lines += ["", *_lines(record["flash4"], FLASH4_PEERS)]
    return "\n".join(lines)


def _lines(rows: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> list[str]:
    """Format a heading, and a line for each case."""
    heading = f"{'forward and backward, bfloat16':42}{'ours':>12}{'TFLOP/s':>8}"
    lines = [heading + "".join(f"{f'over {name}':>28}" for name in peers)]
    by_case: dict[Any, dict[str, Any]] = {}
    for row in rows:
        by_case.setdefault((*row["shape"], row["causal"]), {})[row["name"]] = row
    for own in by_case.values():
        ours = own[OURS]
        line = f"{heads_text(ours):42}{ours['ms']:9.2f} ms{ours['tflops']:8.0f}"
        for name in peers:
            line += (speed_text(own[name]) if name in own else "").rjust(28)
        lines.append(line.rstrip())
    return lines


def flash4_speeds(record: Mapping[str, Any], n: int | None = None) -> list[float]:
    """List the recorded speeds relative to FlashAttention-4, the lowest first: for calls of n rows, or for all."""
    rows = [row for row in record.get("flash4", ()) if row["name"] == FLASH4]
    return sorted(row["speed"] for row in rows if n in (None, row["shape"][2]))

"""The recorded rows of a climb's steps, found by their ideas.

A record keeps the number and the file that a step had when it was measured. Steps may have been inserted, removed and
renamed since, but each keeps its idea.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from helpers.attention.ladder import steps as ladder_steps

NOT_MEASURED = "not measured yet"
# Ideas renamed since they were measured: (stage, the recorded idea) -> its idea now.
RENAMED = {
    ("register_tiles", "copies by cp.async"): "tiles copied ahead",
    ("hopper", "TMA and wgmma"): "products by wgmma",
    ("hopper", "O by wgmma"): "products by wgmma",
    ("backward_mma", "tensor cores"): "mma.sync for dQ",
    ("flash_mma", "mma.sync for P V"): "mma.sync for both products",
    ("flash_cute", "CuTe's layouts and copies"): "TiledCopy",
    ("flash_cute", "rows of O"): "rows of S and O",
}


def in_order(
    stage: str, rows: Iterable[Mapping[str, Any]], of_stage: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each step of the climb to a stage, with its current "step" number and "idea".

    "follows" is the number of the step that its gain is relative to: the one before it, or 0 for the first.

    Args:
        rows: recorded steps of one shape and type; other climbs' are ignored.
        of_stage: the stage's own recorded row, which becomes the last step's.

    Returns:
        For a step without a recorded row, one with only its number and idea: see `is_measured`. Empty if no step of the
        climb is recorded.
    """
    by_idea = {RENAMED.get((stage, row["idea"]), row["idea"]): row for row in rows if _climb_of(row) == stage}
    if not by_idea or stage not in ladder_steps.CLIMBS:
        return []
    ideas = ladder_steps.ideas(stage)
    chain: list[dict[str, Any]] = []
    before: Mapping[str, Any] = {}
    last = 0
    for number, idea in zip(ladder_steps.by_number(stage), ideas, strict=True):
        row = by_idea.get(idea, {})
        follows = {"follows": last} if row and _is_over(row, before) else {}
        chain.append({**row, **follows, "step": number, "idea": idea})
        before, last = row, number
    if ideas[-1] in by_idea:
        return chain
    return chain[:-1] if of_stage is None else [*chain[:-1], dict(of_stage)]


def _is_over(row: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if a step's gain is over this other one; older records identify it by its number then."""
    if over := row.get("over"):
        return over == before["name"] if before else ": " not in over  # otherwise the climb's base
    return row["step"] - 1 == before.get("step", 0)


def _climb_of(row: Mapping[str, Any]) -> str:
    """Return the stage that a recorded step leads to: the record calls steps "flash_mma: 07_10_swizzle"."""
    return (row.get("name") or row["stage"]).partition(": ")[0]


def is_measured(row: Mapping[str, Any]) -> bool:
    """Return True if a row of `in_order` is recorded."""
    return "kind" in row


def idea_of(stage: str, number: int) -> str:
    """Return the idea of a step of the climb to a stage, by its current number; -1 is the last."""
    ideas = ladder_steps.ideas(stage)
    return ideas[-1] if number < 0 else dict(zip(ladder_steps.by_number(stage), ideas, strict=True))[number]

"""The ladder: what a stage is, and the table of all stages."""

from helpers.ladder.stages import LADDER, Stage

__all__ = ["LADDER", "Stage"]

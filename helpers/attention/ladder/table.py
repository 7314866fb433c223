"""The table of stages, and the choice among those that support a call.

A new stage is one `.cu` file, one entry in a module of stages/, and its place here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from helpers.attention.ladder.call import mask_window
from helpers.attention.ladder.plan import Rung
from helpers.attention.ladder.stage import CallSize, Stage
from helpers.attention.ladder.stages.backward import (
    BACKWARD_FLOAT,
    BACKWARD_MMA,
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_WIDE,
)
from helpers.attention.ladder.stages.cuda_cores import HEADS_AND_MASKS, NAIVE, ONLINE_SOFTMAX, REGISTER_TILES, TILED
from helpers.attention.ladder.stages.fp8 import FP8
from helpers.attention.ladder.stages.hopper import FP16X3, HOPPER
from helpers.attention.ladder.stages.tensor_cores import FLASH_CUTE, FLASH_MMA, FLASH_WMMA, TF32

S = TypeVar("S", bound=Stage)

_STAGES = (  # among those that support a call, the last whose by_default accepts it is used
    *(NAIVE, TILED, ONLINE_SOFTMAX, REGISTER_TILES, HEADS_AND_MASKS),
    *(FLASH_WMMA, FLASH_MMA, BACKWARD_FLOAT, BACKWARD_MMA, HOPPER, FLASH_CUTE),
    *(HOPPER_BACKWARD_WIDE, HOPPER_BACKWARD, FP16X3, TF32, FP8),
)
LADDER: Mapping[str, Rung] = {stage.name: Rung.of(stage) for stage in _STAGES}


def forward_of(stages: Mapping[str, S]) -> dict[str, S]:
    """Return those that compute the output."""
    return {name: stage for name, stage in stages.items() if stage.direction == "forward"}


def backward_of(stages: Mapping[str, S]) -> dict[str, S]:
    """Return those that compute gradients."""
    return {name: stage for name, stage in stages.items() if stage.direction == "backward"}


def able_of(stages: Mapping[str, S], **needs: Any) -> list[S]:
    """Return the stages that support a call's needs on this device, fastest first.

    Args:
        needs: the arguments of `Stage.why_not`.
    """
    return [stage for stage in reversed(stages.values()) if stage.why_not(**needs) is None]


def default_of(stages: Mapping[str, S], rows: int, all_rows: int, **needs: Any) -> S | None:
    """Return the stage for a call that names none: the last, and fastest, that supports it here; None if none does.

    Functions of scores and derivatives, by which a call may get another one, are left out.

    Args:
        rows, all_rows: see `CallSize`. needs: the arguments of `Stage.why_not`.
    """
    masked = mask_window(needs.get("window"), needs.get("causal", False)) != (-1, -1)
    how = masked, needs.get("gqa", False), needs.get("deterministic", False), needs.get("varlen", False)
    return first_by_default(able_of(stages, **needs), CallSize(rows, all_rows, needs["head_dim"], *how))


def first_by_default(able: Iterable[S], size: CallSize) -> S | None:
    """Return the first of the stages that `able_of` lists whose `by_default` accepts a call of this size."""
    return next((stage for stage in able if stage.tuning.by_default(size)), None)


FORWARD: Mapping[str, Rung] = forward_of(LADDER)
BACKWARD: Mapping[str, Rung] = backward_of(LADDER)

"""The ladder: what a stage is (contract), and the table of all stages.

    from helpers.ladder import LADDER
    o = LADDER["online_softmax"](q, k, v)

For models, which hold (batch, seq, heads, head_dim), see `helpers.attention`.
"""

from helpers.ladder.contract import Launch, Stage
from helpers.ladder.table import LADDER

__all__ = ["LADDER", "Launch", "Stage"]

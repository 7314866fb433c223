"""The ladder: what a stage is (contract), and the table of all stages; FORWARD has those that compute the output.

    from helpers.ladder import FORWARD, LADDER
    o = LADDER["online_softmax"](q, k, v)

For models, which hold (batch, seq, heads, head_dim), see `helpers.attention`.
"""

from helpers.ladder.contract import Launch, Stage
from helpers.ladder.table import FORWARD, LADDER

__all__ = ["FORWARD", "LADDER", "Launch", "Stage"]

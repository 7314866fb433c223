"""The ladder: what a stage is (contract), and the table of all stages; FORWARD has those that compute the output.

    from helpers.ladder import FORWARD, LADDER, forward_of
    o = LADDER["online_softmax"](q, k, v)

For models, which hold (batch, seq, heads, head_dim), see `helpers.attention`.
"""

from helpers.ladder.contract import Launch, Stage
from helpers.ladder.table import FORWARD, LADDER, forward_of

__all__ = ["FORWARD", "LADDER", "Launch", "Stage", "forward_of"]

"""The ladder: what a stage is (stage.py), and the table of all stages; FORWARD has those that compute the
output, BACKWARD those that compute gradients.

    from helpers.attention.ladder import FORWARD, LADDER
    o = LADDER["online_softmax"](q, k, v)

For models, whose arrays are (batch, seq, heads, head_dim), see `helpers.attention`.
"""

from helpers.attention.ladder.plan import Rung
from helpers.attention.ladder.stage import Launch, Stage
from helpers.attention.ladder.table import BACKWARD, FORWARD, LADDER, able_of, backward_of, default_of, forward_of

__all__ = ["BACKWARD", "FORWARD", "LADDER", "Launch", "Rung", "Stage"]
__all__ += ["able_of", "backward_of", "default_of", "forward_of"]

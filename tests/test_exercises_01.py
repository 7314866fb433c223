"""Typical answers to the exercises of notebook 01."""

from __future__ import annotations

import pytest
from exercise_table import Answer, Right, Wrong, cases, check

INDEX = "S[(size_t)row * N_kv + j]"
STORE = f"{INDEX} = softmax_scale * dot;"
SUM = "for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * k[c];"
AHEAD = "c + 1 < HEAD_DIM ? k[c + 1] : 0.0f"

TABLE = {
    "01_scores": (
        Wrong("no scale", (("softmax_scale * dot", "dot"),), "first", "S at N = 40", "factor"),
        Wrong(
            "another scale", (("softmax_scale * dot", "dot * rsqrtf((float)HEAD_DIM)"),), "first", "S at N", "factor"
        ),
        Wrong("scaled twice", ((STORE, STORE.replace("= ", "= softmax_scale * ")),), "first", "How often", "factor"),
        Wrong("an index of 32 bits", ((INDEX, "S[row * N_kv + j]"),), "awkward", "more than 2^32 elements", "overflow"),
        Wrong("widened too late", ((INDEX, "S[(size_t)(row * N_kv) + j]"),), "awkward", "in which type", "overflow"),
        Wrong("8 words", (("c < HEAD_DIM", "c < 8"),), "awkward", "Right for HEAD_DIM = 8, wrong for 72", "width"),
        Wrong("BLOCK_M words", (("c < HEAD_DIM", "c < BLOCK_M"),), "first", "illegal read of K", "crash"),
        Wrong(
            "one sum for all keys",
            (("  for (int j = 0;", "  float dot = 0.0f;\n  for (int j = 0;"), ("    float dot = 0.0f;\n", "")),
            "first",
            "Does the sum begin at 0 for every key",
            "columns",
        ),
        Wrong("the first key for all", (("dot += q[c] * k[c]", "dot += q[c] * K[c]"),), "first", "", "flat"),
        Wrong("the last product alone", (("dot += q[c]", "dot = q[c]"),), "first", "", "wrong"),
        Wrong("one row of S", ((INDEX, "S[j]"),), "X-ray", "How long is a row of S?", "race"),
        Wrong(
            "the thread's number for the row", ((INDEX, "S[(size_t)threadIdx.x * N_kv + j]"),), "awkward", "", "empty"
        ),
        Wrong(
            "added to S", ((STORE, f"atomicAdd(&{STORE.replace(' =', ',')[:-1]});"),), "X-ray", "uninitialised", "unset"
        ),
        Wrong("the transpose", ((INDEX, "S[(size_t)j * N + row]"),), "first", "belongs to", "index"),
        Wrong("rows of the wrong length", ((INDEX, "S[(size_t)row * HEAD_DIM + j]"),), "X-ray", "race", "race"),
        Wrong("rows of N", ((INDEX, "S[(size_t)row * N + j]"),), "first", "How long is a row of each?", "crash"),
        Wrong("one word short", (("c < HEAD_DIM", "c < HEAD_DIM - 1"),), "first", "", "wrong"),
        Wrong("the sum begins anywhere", (("float dot = 0.0f;", "float dot;"),), "X-ray", "", "unset"),
        Wrong(
            "the sum in S",
            (("float dot = 0.0f;", f"{INDEX} = 0.0f;"), ("dot +=", f"{INDEX} += softmax_scale *"), (STORE, "")),
            "limit",
            "bytes written to S: 34,560 (the limit: at most 3,840)",
            "stores",
        ),
        Wrong("never stored", ((STORE, ""),), "first", "never written", "empty"),
        Right("another type of 64 bits", ((INDEX, "S[row * (long long)N_kv + j]"),)),
        Right("the whole index by hand", ((SUM, SUM.replace("q[c]", "Q[(size_t)row * HEAD_DIM + c]")),)),
        Right("the scale inside", (("dot += q[c]", "dot += softmax_scale * q[c]"), ("softmax_scale * dot", "dot"))),
        Right("a pointer to the row", ((STORE, "float* s = S + (size_t)row * N_kv; s[j] = dot * softmax_scale;"),)),
    ),
    "01_off_by_one": (
        Wrong("as before", ((AHEAD, "k[c + 1]"),), "X-ray", "out of bounds", "bounds"),
        Wrong("a guard that is always true", ((AHEAD, "c < HEAD_DIM ? k[c + 1] : 0.0f"),), "X-ray", "K[200]", "bounds"),
        Wrong("a guard by rows", ((AHEAD, "row + 1 < N ? k[c + 1] : 0.0f"),), "first", ""),
        Wrong("no word of the last key", ((AHEAD, "j + 1 < N_kv ? k[c + 1] : 0.0f"),), "first", "", "wrong"),
        Wrong("one key too few", (("j < N_kv", "j < N_kv - 1"), (AHEAD, "k[c + 1]")), "first", "MEAN at"),
        Wrong("not ahead", ((AHEAD, "k[c]"),), "first", "MEAN at", "wrong"),
        Wrong("8 words", ((AHEAD, "c + 1 < 8 ? k[c + 1] : 0.0f"),), "awkward", "HEAD_DIM belongs", "width"),
        Right("an if", (("const float next = " + AHEAD, "float next = 0; if (c < HEAD_DIM - 1) next = k[c + 1]"),)),
        Right("the same word twice", ((AHEAD, "k[min(c + 1, HEAD_DIM - 1)]"),)),
        Right("the first word again", ((AHEAD, "k[(c + 1) % HEAD_DIM]"),)),
        Right("only the last key", ((AHEAD, "j + 1 < N_kv || c + 1 < HEAD_DIM ? k[c + 1] : 0.0f"),)),
    ),
    "01_coalesced_scores": (
        Wrong(
            "32 bits",
            (("(size_t)j * N + row", "j * N + row"),),
            "awkward",
            "the index at() at row = 99,998",
            "overflow",
        ),
        Wrong("widened too late", (("(size_t)j * N + row", "(size_t)(j * N + row)"),), "awkward", "", "overflow"),
        Wrong(
            "as before",
            (("(size_t)j * N + row", "(size_t)row * N_kv + j"),),
            "first",
            "S, stored as (N_kv, N)",
            "index",
        ),
        Wrong("the other length", (("(size_t)j * N + row", "(size_t)j * N_kv + row"),), "X-ray", "races with", "race"),
        Wrong(
            "row and key exchanged", (("(size_t)j * N + row", "(size_t)row * N + j"),), "first", "illegal write to S["
        ),
        Wrong("no row", (("(size_t)j * N + row", "(size_t)j * N"),), "X-ray", "race: "),
        Wrong("rows of a block", (("(size_t)j * N + row", "(size_t)j * BLOCK_M + row"),), "first", "illegal", "crash"),
        Wrong(
            "the last key first", (("(size_t)j * N + row", "(size_t)(N_kv - 1 - j) * N + row"),), "first", "", "index"
        ),
        Wrong(
            "tiles of 32 rows", (("(size_t)j * N + row", "((size_t)(row / 32) * N_kv + j) * 32 + row % 32"),), "first"
        ),
        Wrong("from 1 on", (("(size_t)j * N + row", "(size_t)(j + 1) * N + row"),), "first", "", "crash"),
        Wrong(
            "no return",
            (("return (size_t)j * N + row", "(size_t)j * N + row"),),
            "compiles",
            "ends without a return",
            "return",
        ),
        Right("the sum turned round", (("(size_t)j * N + row", "row + N * (size_t)j"),)),
        Right("another type", (("(size_t)j * N + row", "j * (unsigned long long)N + row"),)),
    ),
}


@pytest.mark.parametrize("name, answer", cases(TABLE))
def test_answer(name: str, answer: Answer) -> None:
    check(name, answer)

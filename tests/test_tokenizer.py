"""Tokenizer: llama.cpp's ids and texts on ten vocabularies, round trips, streams, stop strings, hostile metadata.

The whole vocabularies are read where BW24_GOLDENS names the golden files; those of the two real models where BW24_MODELS names a folder
with their GGUF files.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import time
from pathlib import Path

import pytest

from bw24 import tokenizer
from bw24.errors import Bw24Error
from bw24.gguf import open_gguf
from bw24.tokenizer_bpe import SCHEMES

NAMES = ["smollm2", "gemma3", "qwen35", "qwen2", "gemma-4", "llama-bpe", "llama-spm", "deepseek-llm", "deepseek-coder", "gpt-2"]
CLEANED = {"gpt-2", "llama-bpe", "gemma-4"}  # llama.cpp cleans up spaces in whole detokenizations of these
# llama.cpp takes the end-of-turn token by hash order where a vocabulary has several; see docs/decisions/text-oddities.md
EOT_DIFFERS = {"smollm2": "<|im_end|>"}
P = "tokenizer.ggml."
MODEL_FILES = {"smollm2": "smollm2-135m-instruct-q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}


@pytest.fixture(scope="module")
def data(fixtures) -> dict:
    return json.loads(lzma.decompress((fixtures / "text" / "tokenize.json.xz").read_bytes()))


@pytest.fixture(scope="module")
def load(data):
    built: dict[str, tokenizer.Tokenizer] = {}

    def get(name: str) -> tokenizer.Tokenizer:
        if name not in built:
            built[name] = tokenizer.from_metadata(data["vocabularies"][name]["metadata"])
        return built[name]

    return get


def byte_metadata(pre: str = "gpt-2", control: tuple[str, ...] = (), merges: tuple[str, ...] = ()) -> dict[str, object]:
    """A byte-level vocabulary: 256 bytes, control tokens, then what the merges make."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    tokens += [*control, *(m.replace(" ", "") for m in merges)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(control) + [1] * len(merges), "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.add_bos_token": False,
    }


def check_vocab(name: str, tok: tokenizer.Tokenizer, want: dict) -> None:
    found = {
        "n_tokens": tok.n_tokens, "bos": tok.bos_id, "eos": tok.eos_id, "eot": tok.eot_id, "adds_bos": tok.adds_bos,
        "adds_eos": tok.adds_eos, "eog": sorted(tok.eog_ids),
    }
    want = {key: None if want[key] == -1 else want[key] for key in found}
    if name in EOT_DIFFERS:
        want["eot"] = tok.id_of(EOT_DIFFERS[name])
    assert found == want


def check_cases(name: str, tok: tokenizer.Tokenizer, inputs: list[dict], cases: list[dict]) -> None:
    assert len(inputs) == len(cases) == 360
    wrong = []
    for index, (given, want) in enumerate(zip(inputs, cases, strict=True)):
        ids = want["ids"]
        detok = want.get("detok", given["text"])
        stream = tok.stream()
        checks = {
            "ids": (tok.encode(given["text"], add_special=given["add_bos"], parse_special=given["parse_special"]), ids),
            "detok": (tok.decode(ids, clean_spaces=name in CLEANED), detok),
            "pieces": ("".join(map(stream.push, ids)) + stream.flush(), want.get("pieces", detok)),
        }
        if "detok_plain" in want:
            checks["detok_plain"] = (tok.decode(ids, skip_special=True, clean_spaces=name in CLEANED), want["detok_plain"])
        wrong += [(index, what, given["text"], *pair) for what, pair in checks.items() if pair[0] != pair[1]]
    assert wrong == []


# ---- against llama.cpp ----


@pytest.mark.parametrize("name", NAMES)
def test_reduced_vocabulary(name, data, load):
    vocabulary = data["vocabularies"][name]
    check_vocab(name, load(name), vocabulary["vocab"])
    check_cases(name, load(name), data["inputs"], vocabulary["cases"])


@pytest.mark.parametrize("name", NAMES)
def test_whole_vocabulary(name, goldens):
    path = goldens.parent / "vocabs" / f"ggml-vocab-{name}.gguf"
    if name in MODEL_FILES:
        folder = os.environ.get("BW24_MODELS")
        if not folder:
            pytest.skip("BW24_MODELS is not set")
        path = Path(folder) / MODEL_FILES[name]
    golden = json.loads((goldens / "real" / f"tokenize_{name}.json").read_text())
    with open_gguf(path) as file:
        tok = tokenizer.from_metadata(file.metadata)
    check_vocab(name, tok, golden["vocab"])
    check_cases(name, tok, golden["cases"], golden["cases"])


def test_the_cases_reach_every_rule(data):
    """The fixture would fail without special tokens, byte fallback, BOS and missing bytes: each occurs in it."""
    inputs, vocabularies = data["inputs"], data["vocabularies"]
    assert sum(i["parse_special"] for i in inputs) == 40 and sum(i["add_bos"] for i in inputs) == 20
    for name in NAMES:
        kinds = vocabularies[name]["metadata"]["tokenizer.ggml.token_type"]
        used = {kinds[i] for case in vocabularies[name]["cases"] for i in case["ids"]}
        assert used >= {1, 3}, name
        if name in ("gemma3", "gemma-4", "llama-spm"):
            assert 6 in used, name
    smollm2 = zip(inputs, vocabularies["smollm2"]["cases"], strict=True)
    assert any(not i["parse_special"] and c.get("detok", i["text"]) != i["text"] for i, c in smollm2)


def test_gemma4_newlines_and_spaces_by_merges(goldens):
    """A run of up to 31 newlines is one token."""
    with open_gguf(goldens.parent / "vocabs" / "ggml-vocab-gemma-4.gguf") as file:
        tok = tokenizer.from_metadata(file.metadata)
    for count in range(1, 32):
        assert tok.encode("\n" * count, add_special=False) == [106 + count]
    assert tok.encode("<bos>The capital of France is", add_special=False, parse_special=True) == [2, 818, 5279, 529, 7001, 563]
    assert tok.encode("ied 4 ½ months", add_special=False) == [1178, 236743, 236812, 47041, 3794]


@pytest.mark.parametrize(("pre", "text", "words"), [
    ("gpt-2", "I'll go,  now 123 \n x", ["I", "'ll", " go", ",", " ", " now", " 123", " \n", " x"]),
    ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
    ("llama-bpe", "I'LL 12345\r\n\n x", ["I", "'LL", " ", "123", "45", "\r\n\n", " x"]),
    ("qwen2", "a.b 12\u0e19\u0e49\u0e33", ["a", ".b", " ", "1", "2", "\u0e19", "\u0e49\u0e33"]),
    ("qwen35", "a.b 12\u0e19\u0e49\u0e33", ["a", ".b", " ", "1", "2", "\u0e19\u0e49\u0e33"]),
    ("gpt-4o", "HTTPServer's x/\n/", ["HTTPServer's", " x", "/\n/"]),
    ("deepseek-llm", "x 12字 -y\n", ["x", " ", "12", "字", " -", "y", "\n"]),
    ("deepseek-coder", "x 12字 -y\n", ["x", " ", "1", "2", "字", " -", "y", "\n"]),
    ("deepseek-v3", "x 1234字.y = \n", ["x", " ", "123", "4", "字", ".y", " =", " \n"]),
    ("llama-bpe", "\u0325\U00013520\ud4f1", ["\u0325\U00013520", "\ud4f1"]),  # U+13520: assigned by Unicode 16, after the vocabularies
])
def test_words(pre, text, words):
    tok = tokenizer.from_metadata(byte_metadata(pre))
    found = [text[a:b] for _, (a, b) in tok._coder._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words


def test_every_scheme_keeps_every_character():
    text = "".join(chr(c) for c in random.Random(1).sample([*range(1, 0xD800), *range(0xE000, 0x11000)], 3000))
    for pre in SCHEMES:
        if pre != "gemma4":
            tok = tokenizer.from_metadata(byte_metadata(pre))
            assert tok.decode(tok.encode(text)) == text, pre


# ---- round trips and streams ----


def random_texts(count: int) -> list[str]:
    rng = random.Random(24)
    pools = ["abc  ABC,.!?'\n\t09", "äßéñçøЖщ\u0301\u0e33", "字漢かカ한", "😀👩\u200d🚀\U0001f1e9\U0001f1ea", "<|>im_start/s▁ "]
    texts = []
    for _ in range(count):
        pool = "".join(rng.sample(pools, rng.randint(1, len(pools))))
        texts.append("".join(rng.choice(pool) for _ in range(rng.randint(0, 60))))
    return texts


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, load):
    tok = load(name)
    for text in random_texts(300):
        back = tok.decode(tok.encode(text, add_special=False))
        assert back == (text.replace("\u2581", " ") if name in ("gemma3", "gemma-4", "llama-spm") else text)


@pytest.mark.parametrize("name", ["qwen35", "gemma3", "llama-spm"])
def test_stream_at_every_cut(name, load):
    """Whatever has been pushed, the text so far is what is sure of the bytes so far; the end adds the rest."""
    tok = load(name)
    for text in [*random_texts(40), "a😀b", "\U0001f1e9\U0001f1ea字"]:
        ids = tok.encode(text, add_special=False)
        whole = b"".join(map(tok.piece, ids))
        lead = " " if name == "llama-spm" else ""
        assert whole.decode().removeprefix(lead) == (text if name == "qwen35" else text.replace("\u2581", " "))
        for cut in range(len(ids) + 1):
            stream = tok.stream()
            text_so_far = "".join(map(stream.push, ids[:cut]))
            data = b"".join(map(tok.piece, ids[:cut]))
            assert data.startswith(text_so_far.encode()) and len(data) - len(text_so_far.encode()) < 4
            assert "\ufffd" not in text_so_far
            assert text_so_far + stream.flush() == data.decode("utf-8", "replace")


def test_stream_of_random_tokens_equals_decoding_at_once(load):
    """Broken UTF-8 included: U+FFFD comes at the same places."""
    rng = random.Random(5)
    for name in ("gpt-2", "gemma3"):
        tok = load(name)
        for _ in range(300):
            ids = [rng.randrange(tok.n_tokens) for _ in range(20)]
            stream = tok.stream()
            assert "".join(map(stream.push, ids)) + stream.flush() == b"".join(map(tok.piece, ids)).decode("utf-8", "replace")


def test_stream_can_hide_special_tokens(load):
    tok = load("qwen35")
    ids = tok.encode("a<|im_end|>b", add_special=False, parse_special=True)
    shown, hidden = tok.stream(), tok.stream(skip_special=True)
    assert "".join(map(shown.push, ids)) == "a<|im_end|>b" and "".join(map(hidden.push, ids)) == "ab"


# ---- special tokens ----


def test_special_tokens_only_when_asked(load):
    tok = load("qwen35")
    end = tok.id_of("<|im_end|>")
    assert tok.encode("<|im_end|>", parse_special=True) == [end]
    assert end not in tok.encode("<|im_end|>") and tok.decode(tok.encode("<|im_end|>")) == "<|im_end|>"
    assert end in tok.eog_ids and tok.is_special(end)


def test_longest_special_token_first():
    """As in llama.cpp: the longest token is looked for first, even where a shorter one starts further left."""
    tok = tokenizer.from_metadata(byte_metadata(control=("<a", "<a><b", "b><c>", "<a>")))
    a, ab, bc, a_ = (tok.id_of(t) for t in ("<a", "<a><b", "b><c>", "<a>"))
    assert tok.encode("<a><b><c>", parse_special=True) == [ab, *tok.encode("><c>")]  # of two with five characters, the left one
    assert tok.encode("<a><c><a", parse_special=True) == [a_, *tok.encode("<c>"), a]
    assert tok.encode("xb><c>", parse_special=True) == [*tok.encode("x"), bc]


def cut_naively(tok: tokenizer.Tokenizer, special: dict[str, int], text: str) -> list[int]:
    """The rule without any shortcut."""
    parts: list[str | int] = [text]
    for size in sorted(map(len, special), reverse=True):
        after: list[str | int] = []
        for part in parts:
            at = start = 0
            while isinstance(part, str) and at < len(part):
                if part[at : at + size] in special and size == len(part[at : at + size]):
                    after += [part[start:at], special[part[at : at + size]]]
                    start = at = at + size
                else:
                    at += 1
            after.append(part[start:] if isinstance(part, str) else part)
        parts = after
    return [i for part in parts for i in (tok.encode(part) if isinstance(part, str) else [part])]


def test_special_tokens_against_the_plain_rule():
    rng = random.Random(3)
    words = {"".join(rng.choice("<ab>") for _ in range(rng.randint(1, 9))) for _ in range(40)} - set("<ab>")
    tok = tokenizer.from_metadata(byte_metadata(control=tuple(sorted(words))))
    special = {w: tok.id_of(w) for w in words}
    for _ in range(500):
        text = "".join(rng.choice("<ab>") for _ in range(rng.randint(0, 30)))
        assert tok.encode(text, parse_special=True) == cut_naively(tok, special, text)


def test_bos_and_eos():
    meta = byte_metadata(control=("<s>", "</s>"))
    meta |= {P + "bos_token_id": 256, P + "eos_token_id": 257, P + "add_bos_token": True, P + "add_eos_token": True}
    tok = tokenizer.from_metadata(meta)
    assert tok.encode("!") == [256, 0, 257] and tok.encode("!", add_special=False) == [0] and tok.encode("") == [256, 257]
    assert tok.decode([256, 0, 257]) == "<s>!</s>" and tok.decode([256, 0, 257], skip_special=True) == "!"


def test_a_missing_byte_keeps_its_neighbours_apart():
    meta = byte_metadata(merges=("a b",))
    meta["tokenizer.ggml.tokens"][meta["tokenizer.ggml.tokens"].index("c")] = "unused"
    tok = tokenizer.from_metadata(meta)
    a, b, ab = map(tok.id_of, ("a", "b", "ab"))
    assert tok.encode("acb") == [a, b] and tok.encode("ab") == [ab]


def test_ends_of_generation():
    names = (
        "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "</s>", "<|tool_response>", "<|fim_pad|>", "<|file_sep|>", "<|fim_middle|>",
    )
    tok = tokenizer.from_metadata(byte_metadata(control=names))
    ends = {tok.token_text(i) for i in tok.eog_ids}
    assert ends == {"<|return|>", "<|call|>", "<|tool_response>", "<|fim_pad|>", "<|file_sep|>"}  # without <|end|> and </s>: see _find_ends
    assert {n for n in names if not tok.is_special(tok.id_of(n))} == {"<|end|>", "<|channel|>", "</s>"}
    plain = tokenizer.from_metadata(byte_metadata(control=("<|end|>", "</s>", "<|repo_name|>")))
    assert {plain.token_text(i) for i in plain.eog_ids} == {"<|end|>", "</s>", "<|repo_name|>"}


def test_out_of_range_ids_and_bad_text(load):
    tok = load("gpt-2")
    for bad in (-1, tok.n_tokens):
        for call in (tok.piece, tok.token_text, tok.is_special, lambda i: tok.decode([i]), lambda i: tok.stream().push(i)):
            with pytest.raises(Bw24Error, match="token id"):
                call(bad)
    with pytest.raises(Bw24Error, match="U\\+D800 at 1"):
        tok.encode("a\ud800")
    assert tok.id_of("no such token") is None


# ---- stop strings ----


def stop_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ready = [s for s in stops if text[:end].endswith(s)]
        if ready:
            longest = max(ready, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_filter_against_the_definition():
    rng = random.Random(11)
    for _ in range(3000):
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        text = "".join(rng.choice("ab\n") for _ in range(rng.randint(0, 14)))
        want, matched = stop_naively(text, stops)
        stop, out, at, stopped = tokenizer.StopFilter(stops), "", 0, False
        while at < len(text) and not stopped:
            size = rng.randint(1, 4)
            piece, stopped = stop.push(text[at : at + size])
            out, at = out + piece, at + size
            assert want.startswith(out)
            if not stopped:  # nothing is held back that no stop string can take any more
                held = text[len(out) : at]
                assert held == "" or any(s.startswith(held) and s != held for s in stops)
        out += stop.flush()
        assert (out, stop.matched, stopped) == (want, matched, matched is not None)


def test_stop_filter_stays_stopped_and_refuses_empty_strings():
    stop = tokenizer.StopFilter(["END"])
    assert stop.push("abE") == ("ab", False) and stop.push("NDx") == ("", True) and stop.push("more") == ("", True) and stop.flush() == ""
    for bad in ([""], [1]):
        with pytest.raises(Bw24Error, match="stop"):
            tokenizer.StopFilter(bad)


# ---- hostile metadata ----


@pytest.mark.parametrize(("change", "message"), [
    ({"model": None}, "model: the key is missing"),
    ({"model": "bert"}, "model: expected gpt2, gemma4 or llama, found 'bert'"),
    ({"model": 3}, "model: expected str, found int"),
    ({"pre": "no-such"}, "pre: expected one of .*found 'no-such'"),
    ({"pre": None}, "pre: .*the key is missing"),
    ({"tokens": None}, "tokens: the key is missing"),
    ({"tokens": []}, "tokens: the array is empty"),
    ({"tokens": "abc"}, "tokens: expected an array, found str"),
    ({"tokens": [1, 2]}, r"tokens\[0\]: expected a string, found int"),
    ({"tokens": ["a", b"\xff"], "token_type": [1, 1]}, r"tokens\[1\]: b'\\xff' is not valid UTF-8"),
    ({"tokens": ["a", "\ud800"], "token_type": [1, 1]}, r"tokens\[1\]: '\\ud800' is not valid UTF-8"),
    ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' is both token 0 and token 2"),
    ({"token_type": [1, 1]}, "token_type: expected 257 entries, one for each token, found 2"),
    ({"token_type": [1] * 256 + [7]}, r"token_type\[256\]: expected an integer 0 to 6, found '7'"),
    ({"token_type": [1] * 256 + [-1]}, r"token_type\[256\]"),
    ({"token_type": [1] * 256 + ["x"]}, r"token_type\[256\]"),
    ({"token_type": [1] * 256 + [6]}, r"tokens\[256\]: expected a byte token <0xNN>, found 'he'"),
    ({"scores": [0.0]}, "scores: expected 257 entries"),
    ({"scores": [0.0] * 256 + [float("nan")]}, r"scores\[256\]: expected a finite number, found 'nan'"),
    ({"merges": None}, "merges: the key is missing"),
    ({"merges": ["h e", "nospace"]}, r"merges\[1\]: expected two parts .*'nospace'"),
    ({"merges": ["h e x"]}, r"merges\[0\]: expected two parts"),
    ({"merges": ["h e", ""]}, r"merges\[1\]: expected two parts"),
    ({"merges": ["h e", "h e"]}, r"merges\[1\]: 'h e' repeats entry 0"),
    ({"merges": ["h x"]}, r"merges\[0\]: 'h x' needs 'hx', which is not in"),
    ({"merges": [" he"]}, r"merges\[0\]: ' he' needs '', which is not in"),
    ({"eos_token_id": 257}, "eos_token_id: expected an id below 257, found 257"),
    ({"eos_token_id": -1}, "eos_token_id: expected an id below 257, found -1"),
    ({"bos_token_id": True}, "bos_token_id: expected int, found bool"),
    ({"add_bos_token": 1}, "add_bos_token: expected bool, found int"),
    ({"add_bos_token": True}, "bos_token_id: the key is missing, but the vocabulary adds BOS"),
    ({"model": "llama"}, "scores: the key is missing"),
])
def test_broken_metadata(change, message):
    meta = byte_metadata(merges=("h e",)) | {P + key: value for key, value in change.items()}
    for key in [k for k, v in meta.items() if v is None]:
        del meta[key]
    with pytest.raises(Bw24Error, match=message) as caught:
        tokenizer.from_metadata(meta)
    assert "\n" not in str(caught.value) and str(caught.value).isascii()


@pytest.mark.parametrize("text", ["<0x-1>", "<0xG0>", "<0x1>", "<0x100>", "<0x1 >", "0x10"])
def test_byte_tokens_have_two_hex_digits(text, data):
    meta = dict(data["vocabularies"]["llama-spm"]["metadata"])
    at = meta[P + "tokens"].index("<0x41>")
    meta[P + "tokens"] = [*meta[P + "tokens"][:at], text, *meta[P + "tokens"][at + 1 :]]
    with pytest.raises(Bw24Error, match=rf"tokens\[{at}\]: expected a byte token"):
        tokenizer.from_metadata(meta)


def test_text_that_a_small_vocabulary_does_not_cover():
    """Without byte tokens: the unknown token where there is one, else an error."""
    meta = {P + "model": "llama", P + "tokens": ["<unk>", "<s>", "</s>", "a"], P + "scores": [0.0] * 4, P + "token_type": [2, 3, 3, 1]}
    meta[P + "add_space_prefix"] = False
    assert tokenizer.from_metadata(meta).encode("aba") == [1, 3, 0, 3]
    meta |= {P + "token_type": [3, 3, 3, 1], P + "unknown_token_id": 0}
    assert tokenizer.from_metadata(meta).encode("aba") == [1, 3, 0, 3]
    meta = {P + "model": "llama", P + "tokens": ["a"], P + "scores": [0.0], P + "add_bos_token": False, P + "add_space_prefix": False}
    tok = tokenizer.from_metadata(meta)
    assert tok.encode("aa") == [0, 0]
    with pytest.raises(Bw24Error, match="neither a byte nor an unknown token covers 'aba'"):
        tok.encode("aba")


def test_hostile_files(goldens):
    """No file does worse than an error; the control loads, and what must be refused is."""
    for row in json.loads((goldens / "hostile" / "expected.json").read_text()):
        try:
            with open_gguf(goldens / "hostile" / row["file"]) as file:
                tok = tokenizer.from_metadata(file.metadata)
                ids = tok.encode("ab ba", parse_special=True)
                assert row["layer"] != "control" or [tok.token_text(i) for i in ids] == ["ab", "b", "a"]
        except Bw24Error as error:
            assert row["expect"] != "accept" and "\n" not in str(error), row
        else:
            refused = ("missing-tokens", "token-types-short", "eos-out-of-range", "merge-malformed", "tokens-duplicate")
            assert row["file"].removesuffix(".gguf") not in refused, row


def test_long_texts_end_soon():
    """Runs that make a backtracking regex quadratic: 60 kB each, far below a second where linear."""
    runs = [" " * 60000 + end for end in ("5", "x", "字", "")] + ["\n" * 60000 + "x"] + [c * 60000 for c in "aA.'\u0301"]
    for pre in ("gpt-2", "qwen35", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3"):
        tok = tokenizer.from_metadata(byte_metadata(pre))
        started = time.monotonic()
        for text in runs:
            tok.encode(text)
        assert time.monotonic() - started < 20, pre  # quadratic: minutes

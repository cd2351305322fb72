"""Byte-pair encoding: text of one fragment to ids, through the `tokenizers` library.

Owns the table of pre-tokenizer names, the byte alphabet and the checks of the merge list. Refuses to know special tokens, BOS and EOS:
a fragment holds none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from .errors import Bw24Error
from .tokenizer_vocab import BYTE, BYTE_TEXT, CONTROL, NORMAL, PREFIX, SPACE_MARK, UNKNOWN, USER_DEFINED, Vocab, show


@dataclass(frozen=True)
class Scheme:
    """How a named pre-tokenizer cuts text into words: each pattern in turn splits what the one before left, matches and gaps alike.

    whole_words: a word that is a token is that token, whatever its merges. adds_bos: what holds when metadata is silent.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


# Code points that Unicode 16 assigned. The vocabularies are older: to them these are neither letters, digits, marks, symbols nor
# punctuation, while the regex library may know them already.
_UNICODE_16 = (
    "\u0897\u1b4e\u1b4f\u1b7f\u1c89\u1c8a\u2427-\u2429\u31e4\u31e5\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105f3\U00010d40-\U00010d65"
    "\U00010d69-\U00010d85\U00010d8e\U00010d8f\U00010ec2-\U00010ec4\U00010efc\U00011380-\U00011389\U0001138b\U0001138e\U00011390-\U000113b5"
    "\U000113b7-\U000113c0\U000113c2\U000113c5\U000113c7-\U000113ca\U000113cc-\U000113d5\U000113d7\U000113d8\U000113e1\U000113e2"
    "\U000116d0-\U000116e3\U00011bc0-\U00011be1\U00011bf0-\U00011bf9\U00011f5a\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79"
    "\U00018cff\U0001cc00-\U0001ccf9\U0001cd00-\U0001ceb3\U0001e5d0-\U0001e5fa\U0001e5ff\U0001f8b2-\U0001f8bb\U0001f8c0\U0001f8c1\U0001fa89"
    "\U0001fa8f\U0001fabe\U0001fac6\U0001fadc\U0001fadf\U0001fae9\U0001fbcb-\U0001fbef"
)
_CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{DIGITS}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _WORDS.replace("{DIGITS}", "")
_LLAMA3 = _WORDS.replace("{DIGITS}", "{1,3}")
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTIONS})?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTIONS})?",
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
))
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
# `(?<!\s)` in front of `\s+$` changes no match; it keeps a long run of spaces inside a text from being tried at every position.
# CJK blocks of the older DeepSeek vocabularies. The middle range, from U+0800 to U+4E00, takes in most scripts of Asia and nearly all
# punctuation beyond ASCII; it is part of how those vocabularies were trained.
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Punctuation and letters (those with case) of the deepseek-llm pattern.
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386"
    "\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_SCHEMES = {
    "gpt-2": Scheme((_GPT2,)),
    "smollm": Scheme((r"\p{N}", _GPT2)),
    "llama-bpe": Scheme((_LLAMA3,), whole_words=True, adds_bos=True),
    "qwen2": Scheme((_QWEN2,)),
    "qwen35": Scheme((_QWEN35,)),
    "gpt-4o": Scheme((_GPT4O,)),
    "deepseek-llm": Scheme((r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"(?<!\s)\s+$", _DEEPSEEK_CJK, r"\p{N}+")),
    "deepseek-coder": Scheme((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": Scheme(_DEEPSEEK3),
    "gemma4": Scheme((r"\n+",), adds_bos=True),
}
_ALIASES = {
    "gpt-2": ("phi-2", "mellum", "exaone4"),
    "smollm": ("starcoder", "refact", "command-r"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "lfm2"),
    "qwen2": ("deepseek-r1-qwen", "hunyuan", "megrez", "stablelm2"),
    "gpt-4o": ("llama4", "minimax-m2"),
    "deepseek-v3": ("hunyuan-dense", "hy_v4"),
}
SCHEMES = _SCHEMES | {alias: _SCHEMES[name] for name, aliases in _ALIASES.items() for alias in aliases}


def _as_trained(pattern: str) -> Regex:
    """A pattern whose category classes leave out what Unicode 16 added."""
    return Regex(re.sub(r"\\p\{\w+\}", lambda m: f"[{m[0]}&&[^{_UNICODE_16}]]", pattern))


def pre_tokenizer(scheme: Scheme, raw: bool) -> pre_tokenizers.PreTokenizer:
    """The scheme's cuts; unless raw, the words come out in the byte alphabet."""
    steps = [pre_tokenizers.Split(_as_trained(p), "isolated") for p in scheme.patterns]
    if not raw:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where Latin-1 prints it, else the next code point from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


ALPHABET = _byte_alphabet()
_BYTE_OF = {ord(char): byte for byte, char in ALPHABET.items()}


def split_merges(merges: list[str]) -> list[tuple[str, str]]:
    """The merge list as pairs, by falling priority. Refuses malformed and repeated merges."""
    pairs = [tuple(m.split(" ")) for m in merges]
    if set(map(len, pairs)) - {2}:
        at = next(i for i, p in enumerate(pairs) if len(p) != 2)
        raise Bw24Error(f"{PREFIX}merges[{at}]: expected two parts with one space between them, found {show(merges[at])}")
    if len(set(merges)) != len(merges):
        first: dict[str, int] = {}
        at = next(i for i, m in enumerate(merges) if first.setdefault(m, i) != i)
        raise Bw24Error(f"{PREFIX}merges[{at}]: {show(merges[at])} repeats entry {first[merges[at]]}")
    return pairs


def _explain(merges: list[tuple[str, str]], vocab: Vocab, error: Exception) -> Bw24Error:
    for at, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in vocab.ids:
                return Bw24Error(f"{PREFIX}merges[{at}]: {show(left + ' ' + right)} needs {show(part)}, which is not in {PREFIX}tokens")
    return Bw24Error(f"{PREFIX}merges: {error}")


class BytePairs:
    """Encoder of one vocabulary.

    raw: symbols are characters, with `<0xNN>` for what has no token, and spaces are U+2581 (gemma4); otherwise GPT-2's byte alphabet.
    """

    lead_space = False

    def __init__(self, vocab: Vocab, merges: list[str], scheme: Scheme, raw: bool):
        self.vocab, self.raw, self.count = vocab, raw, len(vocab.texts)
        pairs = split_merges(merges)
        ids = vocab.ids
        self.stand_ins = False
        if not raw:
            # A byte without a token keeps its place while its neighbours merge and is dropped afterwards: its id is past the vocabulary.
            missing = [c for c in ALPHABET.values() if c not in ids]
            if missing:
                ids = ids | {c: self.count + i for i, c in enumerate(missing)}
                self.stand_ins = True
        try:
            model = models.BPE(ids, pairs, byte_fallback=raw, ignore_merges=scheme.whole_words)
        except Exception as error:  # the library raises plain Exception
            raise _explain(pairs, vocab, error) from None
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizer(scheme, raw)

    def encode(self, text: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        if self.raw:
            text = text.replace(" ", SPACE_MARK)
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            # a regex search that gives up (runs of some 10^7 spaces) is a panic there, which is no Exception here
            if type(error).__name__ != "PanicException":
                raise
            raise Bw24Error(f"text of {len(text)} characters cannot be split into words: {error}") from None
        return [i for i in ids if i < self.count] if self.stand_ins else ids

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; a special token's are its text; an unused one has none."""
        text, kind = self.vocab.texts[token], self.vocab.kinds[token]
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            return text.encode()
        if kind == BYTE:
            return bytes([int(BYTE_TEXT.fullmatch(text)[1], 16)])
        if kind != NORMAL:
            return b""
        if self.raw:
            return text.replace(SPACE_MARK, " ").encode()
        try:
            return bytes([_BYTE_OF[ord(c)] for c in text])
        except KeyError:  # a token that was added as plain text but typed as a normal one
            return text.encode()

"""A vocabulary as GGUF metadata states it: texts, kinds, scores and the ids with a role.

Owns the reading and checking of every `tokenizer.ggml.*` key but the merges, and the rules that give tokens a role by their text.
Refuses to know how text is cut into tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .errors import Bw24Error

PREFIX = "tokenizer.ggml."
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)  # GGUF token types
SPACE_MARK = "\u2581"  # how SentencePiece-style vocabularies write a space
BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Texts that mark the end of a turn, most specific first: where a vocabulary has several, an end of turn outranks an end of text.
EOT_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end_of_text|>", "<|endoftext|>",
)
EOM_TEXTS = ("<|eom_id|>",)
# Tokens that end generation by their text alone, whatever role the metadata gives them.
EOG_TEXTS = EOT_TEXTS + EOM_TEXTS + (
    "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "</s>", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
)
# Fill-in-the-middle roles: padding, repository name and file separator also end generation.
FIM_TEXTS = {
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # parts of a message's structure that a parser must see
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # earlier spellings of the same keys


@dataclass
class Vocab:
    """texts[id], kinds[id] (a GGUF token type), scores[id] or None; `ids` is the inverse of `texts`; roles maps a role to its id."""

    texts: list[str]
    ids: dict[str, int]
    kinds: bytearray
    scores: np.ndarray | None  # f32
    roles: dict[str, int] = field(default_factory=dict)
    eog: frozenset[int] = frozenset()

    def is_special(self, token: int) -> bool:
        """Whether the token is a control or unknown token: hidden when text is shown to a reader."""
        return self.kinds[token] in (CONTROL, UNKNOWN)


def show(text: str) -> str:
    """Text from a file in one printable ASCII line, cut at 60 characters."""
    return ascii(text if len(text) <= 60 else text[:60] + "...")


def read(meta: Mapping[str, object], key: str, kind: type, default: object = None) -> object:
    """The value under PREFIX + key, of exactly that type; `default` where the key is missing."""
    value = meta.get(PREFIX + key, default)
    if value is not default and type(value) is not kind:
        raise Bw24Error(f"{PREFIX}{key}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def read_array(meta: Mapping[str, object], key: str) -> list | None:
    """The array under PREFIX + key as a list (numpy arrays are converted), None where it is missing."""
    value = meta.get(PREFIX + key)
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, list):
        raise Bw24Error(f"{PREFIX}{key}: expected an array, found {type(value).__name__}")
    return value


def read_strings(meta: Mapping[str, object], key: str) -> list[str] | None:
    """An array of valid Unicode strings, None where it is missing."""
    values = read_array(meta, key)
    if values is None:
        return None
    if set(map(type, values)) - {str}:
        at = next(i for i, v in enumerate(values) if type(v) is not str)
        if not isinstance(values[at], bytes):
            raise Bw24Error(f"{PREFIX}{key}[{at}]: expected a string, found {type(values[at]).__name__}")
        values = [_decoded(v, f"{PREFIX}{key}[{i}]") for i, v in enumerate(values)]
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        at = next(i for i, v in enumerate(values) if not _is_unicode(v))
        raise Bw24Error(f"{PREFIX}{key}[{at}]: {show(values[at])} is not valid UTF-8") from None
    return values


def _decoded(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise Bw24Error(f"{where}: expected a string, found {type(value).__name__}")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Bw24Error(f"{where}: {value[:60]!r} is not valid UTF-8") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_vocab(meta: Mapping[str, object], default_roles: Mapping[str, int]) -> Vocab:
    """Texts, kinds, scores and roles from metadata. default_roles: role ids a vocabulary model has without being told (if in range)."""
    texts = read_strings(meta, "tokens")
    if not texts:
        raise Bw24Error(f"{PREFIX}tokens: {'the key is missing' if texts is None else 'the array is empty'}")
    if "" in texts:
        texts = [t or f"[EMPTY_{i}]" for i, t in enumerate(texts)]
    ids = {t: i for i, t in enumerate(texts)}
    if len(ids) != len(texts):
        second = next(i for i, t in enumerate(texts) if ids[t] != i)
        raise Bw24Error(f"{PREFIX}tokens: {show(texts[second])} is both token {second} and token {ids[texts[second]]}")
    vocab = Vocab(texts, ids, _read_kinds(meta, len(texts)), _read_scores(meta, len(texts)))
    at = vocab.kinds.find(BYTE)
    while at >= 0:
        if not BYTE_TEXT.fullmatch(texts[at]):
            raise Bw24Error(f"{PREFIX}tokens[{at}]: expected a byte token <0xNN>, found {show(texts[at])}")
        at = vocab.kinds.find(BYTE, at + 1)
    _assign_roles(meta, vocab, default_roles)
    _find_ends(vocab, _given_ends(meta, len(texts)))
    return vocab


def _same_length(key: str, values: Sequence, count: int) -> Sequence:
    if len(values) != count:
        raise Bw24Error(f"{PREFIX}{key}: expected {count} entries, one for each token, found {len(values)}")
    return values


def _read_kinds(meta: Mapping[str, object], count: int) -> bytearray:
    values = read_array(meta, "token_type")
    if values is None:
        return bytearray([NORMAL]) * count
    _same_length("token_type", values, count)
    try:
        kinds = bytearray(values)
    except (TypeError, ValueError):
        kinds = None
    if kinds is None or max(kinds) > BYTE:
        at = next(i for i, v in enumerate(values) if type(v) is not int or not 0 <= v <= BYTE)
        raise Bw24Error(f"{PREFIX}token_type[{at}]: expected an integer 0 to {BYTE}, found {show(str(values[at]))}")
    return kinds


def _read_scores(meta: Mapping[str, object], count: int) -> np.ndarray | None:
    values = meta.get(PREFIX + "scores")
    if values is None:
        return None
    if not isinstance(values, np.ndarray):
        values = read_array(meta, "scores")
    _same_length("scores", values, count)
    known = values if isinstance(values, np.ndarray) else [v if type(v) in (float, int) else math.nan for v in values]
    out = np.asarray(known, np.float64)
    if not np.isfinite(out).all():
        at = int(np.flatnonzero(~np.isfinite(out))[0])
        raise Bw24Error(f"{PREFIX}scores[{at}]: expected a finite number, found {show(str(values[at]))}")
    return out.astype(np.float32)


def _role_id(meta: Mapping[str, object], role: str, count: int) -> int | None:
    for name in (role, _OLD_NAMES.get(role)):
        key = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(name, name)  # "seperator" is the format's own spelling
        value = read(meta, f"{key}_token_id", int) if name else None
        if value is None:
            continue
        if not 0 <= value < count:
            raise Bw24Error(f"{PREFIX}{key}_token_id: expected an id below {count}, found {value}")
        return value
    return None


def _assign_roles(meta: Mapping[str, object], vocab: Vocab, defaults: Mapping[str, int]) -> None:
    """Roles as metadata gives them, then by text. A token that has a role by its text is a control token whatever its stated kind."""
    count = len(vocab.texts)
    for role in ("bos", "eos", "eot", "eom", "unk", "sep", "pad", "mask", *FIM_TEXTS):
        given = _role_id(meta, role, count)
        if given is None and defaults.get(role, count) < count:
            given = defaults[role]
        if given is not None:
            vocab.roles[role] = given
    for role, texts in {"eot": EOT_TEXTS, "eom": EOM_TEXTS, **FIM_TEXTS}.items():
        found = next((vocab.ids[t] for t in texts if t in vocab.ids), None)
        if role not in vocab.roles and found is not None:
            vocab.roles[role] = found
            vocab.kinds[found] = CONTROL


def _given_ends(meta: Mapping[str, object], count: int) -> set[int]:
    """Ids of `eog_token_ids`, this project's own key: the ends that a checkpoint's generation settings name beside its eos."""
    values = read_array(meta, "eog_token_ids") or []
    if not all(type(v) is int and 0 <= v < count for v in values):
        raise Bw24Error(f"{PREFIX}eog_token_ids: expected ids below {count}, found {show(str(values))}")
    return set(values)


def _find_ends(vocab: Vocab, given: set[int]) -> None:
    """Set `eog` and the kinds that follow from it; `given`: ids that end generation whatever their text.

    Two vocabularies need an exception: where messages end with `<|return|>` or `<|calls|>`, `<|end|>` only separates their parts; where
    `<|tool_response>` ends a turn, `</s>` is an HTML tag.
    """
    ids, eog = vocab.ids, {vocab.roles[r] for r in FIM_ENDS if r in vocab.roles}
    for text in EOG_TEXTS:
        if text in ids:
            eog.add(ids[text])
            vocab.kinds[ids[text]] = CONTROL
    for text in ALWAYS_SHOWN:
        if text in ids:
            vocab.kinds[ids[text]] = USER_DEFINED
    eog |= {vocab.roles[r] for r in ("eos", "eot", "eom") if r in vocab.roles} | given
    ends = {vocab.texts[i] for i in eog}
    calls = bool(ends & {"<|call|>", "<|calls|>"})
    if "<|end|>" in ends and calls and ends & {"<|return|>", "<|flush|>"}:
        eog.discard(ids["<|end|>"])
        vocab.kinds[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in ends and "<|tool_response>" in ends:
        eog.discard(ids["</s>"])
        vocab.kinds[ids["</s>"]] = NORMAL
    vocab.eog = frozenset(eog)

"""The text side of a checkpoint directory as GGUF metadata: tokenizer.json or tokenizer.model, special tokens, chat template, sampling defaults.

Owns the files' formats and spellings. Refuses to know how text is cut: the tokenizer reads the metadata made here as it reads a GGUF file's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import Bw24Error
from .gguf_types import quote
from .safetensors import read_file, read_json
from .tokenizer_vocab import BYTE, BYTE_TEXT, CONTROL, NORMAL, PREFIX, SPACE_MARK, UNKNOWN, UNUSED, USER_DEFINED

MAX_TOKENS = 1 << 22
ADDED_SCORE = -1000.0  # of pieces that no merge makes
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused\d+>|<(bos|eos|pad|unk|mask)>|\[(PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]")
# Texts whose cuts tell the pre-tokenizers of this package apart: digits, contractions, marks, scripts, runs of space, punctuation, case.
PROBES = (
    "Hello world's I'LL we'Ve 12345678 a1b2 x", "  leading   spaces\t\ttabs \n\n\n lines \r\n end  ",
    "caf\u00e9 e\u0301te\u0301 \u0e01\u0e34\u0e19", "\u4f60\u597d\u4e16\u754c12\u5b57\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf abc\u4e2d\u6587def",
    "\ud55c\uad6d\uc5b4 a!!b ?? (c) [d] {e} <f> \u201cg\u201d \u2026\u3002 $5.00 +1-2*3/4",
    "camelCase HTTPServer XMLHttpRequest iOS9 \u0416\u0443\u043a ABCdef",
    "if(x==1){\n\treturn;\n}//end\n\n\n", " 'tis don't \u2019s /path/to//file\n/x", "3.14159 1,000,000 \u0663\u0664\u0665 \u00bd \u2167",
    "\U0001f600\U0001f680 mixed\u00a0nbsp\u3000wide ",
)


def _read(folder: Path, name: str) -> Any:
    path = folder / name
    return read_json(path) if path.exists() else None


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is not None and type(value) is not dict:
        raise Bw24Error(f"{name}: expected a JSON object")
    return value or {}


def read_text(folder: Path, config: Mapping[str, Any], arch: str, rows: int) -> dict[str, Any]:
    """`tokenizer.*` and `general.sampling.*` keys. `rows`: of the embedding; the vocabulary is filled up to it with unused tokens.

    A directory without a tokenizer gives none of its keys. Raises Bw24Error.
    """
    settings = _object(_read(folder, "tokenizer_config.json"), "tokenizer_config.json")
    generation = _object(_read(folder, "generation_config.json"), "generation_config.json")
    out = _sampling(generation)
    template = chat_template(folder, settings)
    if template is not None:
        out["tokenizer.chat_template"] = template
    data = _object(_read(folder, "tokenizer.json"), "tokenizer.json")
    spm = folder / "tokenizer.model"
    if spm.exists() and arch != "gemma4":
        vocab = _from_sentencepiece(spm, data, settings)
    elif data:
        vocab = _from_json(data, settings, arch)
    else:
        return out
    return out | _finish(vocab, settings, generation, config, rows)


class _Vocab:
    """What is known of a vocabulary while it is put together: texts and kinds by id, scores by id, and other `tokenizer.ggml.*` keys."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.kinds: dict[int, int] = {}
        self.scores: dict[int, float] | None = None
        self.keys: dict[str, Any] = {}

    def put(self, token: Any, text: Any, kind: int, where: str) -> None:
        if type(token) is not int or not 0 <= token < MAX_TOKENS or type(text) is not str:
            raise Bw24Error(f"{where}: expected a token's text and an id below {MAX_TOKENS}, found {quote(str(text))}: {quote(str(token))}")
        self.texts[token], self.kinds[token] = text, kind


def _finish(vocab: _Vocab, settings: Mapping[str, Any], generation: Mapping[str, Any], config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    count = max(max(vocab.texts, default=-1) + 1, rows)
    if not vocab.texts or count > MAX_TOKENS:
        raise Bw24Error(f"tokenizer: expected 1 to {MAX_TOKENS} tokens, found {count if vocab.texts else 0}")
    if (last := max(vocab.texts)) >= rows:
        raise Bw24Error(f"tokenizer: token {last} ({ascii(vocab.texts[last][:40])}) has no row: the embedding has {rows}")
    texts = [vocab.texts.get(i, f"[PAD{i}]") for i in range(count)]
    out = {PREFIX + key: value for key, value in vocab.keys.items()}
    out |= {PREFIX + "tokens": texts, PREFIX + "token_type": [vocab.kinds.get(i, UNUSED) for i in range(count)]}
    if vocab.scores is not None:
        out[PREFIX + "scores"] = [float(vocab.scores.get(i, ADDED_SCORE)) for i in range(count)]
    return out | _roles({t: i for i, t in vocab.texts.items()}, settings, generation, config, count)


def _roles(ids: Mapping[str, int], settings: Mapping[str, Any], generation: Mapping[str, Any], config: Mapping[str, Any],
           count: int) -> dict[str, Any]:
    """Ids with a role. eos: the tokenizer's own, else the first of the generation settings; its other ids end generation too."""
    out: dict[str, Any] = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("sep", "seperator"), ("pad", "padding"), ("mask", "mask")):
        text = settings.get(f"{role}_token")
        text = text.get("content") if type(text) is dict else text
        listed = [i for source in (generation, config) for i in _ids(source.get(f"{role}_token_id"), count, f"{role}_token_id")]
        token = ids.get(text) if type(text) is str else None
        if token is None and listed:
            token = listed[0]
        if token is not None:
            out[f"{PREFIX}{key}_token_id"] = token
        if role == "eos" and (more := sorted(set(listed) - {token})):
            out[PREFIX + "eog_token_ids"] = more
    return out


def _ids(value: Any, count: int, key: str) -> list[int]:
    values = value if type(value) is list else [] if value is None else [value]
    if not all(type(v) is int for v in values) or len(values) > 64:
        raise Bw24Error(f"{key}: expected a token id or a list of them, found {quote(str(value))}")
    return [v for v in values if 0 <= v < count]


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults; a checkpoint that asks for greedy decoding gives temperature 0."""
    out: dict[str, Any] = {}
    for key, name, kind in (("temperature", "temp", float), ("top_k", "top_k", int), ("top_p", "top_p", float), ("min_p", "min_p", float),
                            ("repetition_penalty", "penalty_repeat", float)):
        value = generation.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value <= 1e6 or (kind is int and type(value) is not int):
            raise Bw24Error(f"generation_config.json: {key}: expected a number, found {quote(str(value))}")
        out[f"general.sampling.{name}"] = kind(value)
    if generation.get("do_sample") is False and out:
        out["general.sampling.temp"] = 0.0
    return out


def chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template: chat_template.jinja, else chat_template.json, else tokenizer_config.json's (of several, the one named default)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_file(path, 4 << 20).decode()
        except UnicodeDecodeError:
            raise Bw24Error(f"{quote(str(path), 4096)}: expected UTF-8 text") from None
    found = _object(_read(folder, "chat_template.json"), "chat_template.json").get("chat_template", settings.get("chat_template"))
    if type(found) is list:
        named = {t.get("name"): t.get("template") for t in found if type(t) is dict}
        found = named.get("default")
    if found is not None and type(found) is not str:
        raise Bw24Error("tokenizer_config.json: chat_template: expected a string or a list with one named default")
    return found


# ---- tokenizer.json


def _added(data: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[Any, Any, bool]]:
    """(id, text, special) of the tokens added to a vocabulary; tokenizer_config.json has the last word."""
    tokens = data.get("added_tokens") or []
    if type(tokens) is not list or not all(type(t) is dict for t in tokens):
        raise Bw24Error("tokenizer.json: added_tokens: expected a list of objects")
    for t in tokens:
        yield t.get("id"), t.get("content"), t.get("special") is True
    decoder = _object(settings.get("added_tokens_decoder"), "tokenizer_config.json: added_tokens_decoder")
    for key, t in decoder.items():
        if type(t) is not dict or not key.isascii() or not key.isdigit() or len(key) > 9:
            raise Bw24Error(f"tokenizer_config.json: added_tokens_decoder: {quote(key)}: expected an id and an object")
        yield int(key), t.get("content"), t.get("special") is True


def _add_tokens(vocab: _Vocab, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for token, text, special in _added(data, settings):
        known = vocab.kinds.get(token) if type(token) is int else None
        control = special or (type(text) is str and _LOOKS_SPECIAL.fullmatch(text))
        if known not in (UNKNOWN, BYTE):
            vocab.put(token, text, CONTROL if control else USER_DEFINED, "added tokens")


def _from_json(data: Mapping[str, Any], settings: Mapping[str, Any], arch: str) -> _Vocab:
    model = _object(data.get("model"), "tokenizer.json: model")
    table = _object(model.get("vocab"), "tokenizer.json: model.vocab")
    if model.get("type", "BPE") != "BPE":
        raise Bw24Error(f"tokenizer.json: model.type: expected BPE, found {quote(str(model.get('type')))}")
    vocab = _Vocab()
    fallback = model.get("byte_fallback") is True
    for text, token in table.items():
        vocab.put(token, text, BYTE if fallback and BYTE_TEXT.fullmatch(text) else NORMAL, "tokenizer.json: model.vocab")
    merges = _merges(model.get("merges"))
    unknown = model.get("unk_token")
    if fallback and type(unknown) is str and unknown in table:
        vocab.kinds[table[unknown]] = UNKNOWN
    if fallback and arch != "gemma4":
        _as_sentencepiece(vocab, table, merges, data)
    elif arch == "gemma4":
        vocab.keys |= {"model": "gemma4", "merges": merges, "add_bos_token": True}
    else:
        vocab.keys |= {"model": "gpt2", "pre": find_scheme(data), "merges": merges, "add_bos_token": _adds_bos(data, settings)}
    _add_tokens(vocab, data, settings)
    return vocab


def _merges(value: Any) -> list[str]:
    if type(value) is not list:
        raise Bw24Error("tokenizer.json: model.merges: expected a list")
    merges = [" ".join(m) if type(m) is list and len(m) == 2 and all(type(p) is str for p in m) else m for m in value]
    bad = next((i for i, m in enumerate(merges) if type(m) is not str or m.count(" ") != 1), None)
    if bad is not None:
        raise Bw24Error(f"tokenizer.json: model.merges[{bad}]: expected two parts without spaces, found {ascii(str(value[bad]))[:80]}")
    return merges


def _as_sentencepiece(vocab: _Vocab, table: Mapping[str, int], merges: list[str], data: Mapping[str, Any]) -> None:
    """A SentencePiece vocabulary written as merges: a piece's score is minus the rank of the first merge that makes it, so that the highest
    score is the first merge."""
    vocab.scores = dict.fromkeys(vocab.texts, 0.0)
    for rank, merge in reversed(list(enumerate(merges))):
        token = table.get(merge.replace(" ", ""))
        if token is not None:
            vocab.scores[token] = -float(rank + 1)
    stages = json.dumps(data.get("normalizer")) + json.dumps(data.get("pre_tokenizer"))
    prefix = '"Prepend"' in stages or '"prepend_scheme": "first"' in stages or '"prepend_scheme": "always"' in stages
    vocab.keys |= {"model": "llama", "pre": "default", "add_space_prefix": prefix, "add_bos_token": _adds_bos(data, {})}


def _stages(data: Mapping[str, Any]) -> Any:
    """The tokenizer of the file without its vocabulary: how it cuts text and what it puts round it."""
    from tokenizers import Tokenizer

    parts = {key: data.get(key) for key in ("pre_tokenizer", "post_processor")}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    try:
        return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "decoder": None, **parts, "model": model}))
    except BaseException as error:  # the library raises plain Exception, and panics for some input, which is no Exception here
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise Bw24Error(f"tokenizer.json: cannot be read: {ascii(str(error))[1:-1][:200]}") from None


def _only_nfc(normal: Any) -> bool:
    """Whether a normalizer changes nothing but the form of composed characters."""
    if normal is None or (type(normal) is dict and normal.get("type") == "NFC"):
        return True
    steps = normal.get("normalizers") if type(normal) is dict and normal.get("type") == "Sequence" else None
    return type(steps) is list and all(type(s) is dict and s.get("type") == "NFC" for s in steps)


def find_scheme(data: Mapping[str, Any]) -> str:
    """The pre-tokenizer by behaviour: the scheme of this package that cuts every probe as the file's own does."""
    from .tokenizer_bpe import SCHEMES, pre_tokenizer

    normal = data.get("normalizer")
    if not _only_nfc(normal):
        raise Bw24Error(f"tokenizer.json: normalizer: expected none or NFC, found {quote(str(normal))}")
    theirs = _stages(data).pre_tokenizer
    if theirs is None:
        raise Bw24Error("tokenizer.json: pre_tokenizer: the key is missing")
    expects = [theirs.pre_tokenize_str(p) for p in PROBES]
    whole_words = _object(data.get("model"), "tokenizer.json: model").get("ignore_merges") is True
    for name, scheme in SCHEMES.items():
        if name != "gemma4" and scheme.whole_words == whole_words:
            ours = pre_tokenizer(scheme, raw=False)
            if all(ours.pre_tokenize_str(p) == e for p, e in zip(PROBES, expects, strict=True)):
                return name
    raise Bw24Error("tokenizer.json: pre_tokenizer: cuts text like none of " + ", ".join(sorted(SCHEMES)))


def _adds_bos(data: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether encoding puts a token in front: as tokenizer_config.json says, else as the post-processor does."""
    said = settings.get("add_bos_token")
    if type(said) is bool:
        return said
    stages = _stages({"post_processor": data.get("post_processor")})
    return len(stages.encode("").ids) > 0


# ---- tokenizer.model


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a serialized protobuf message: bytes for nested ones, numbers for varints. Ends at damage."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(raw) and shift < 64:
            byte = raw[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise Bw24Error("tokenizer.model: damaged: a number does not end")

    while at < len(raw):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}.get(key & 7, -1)
        if size < 0 or size > len(raw) - at:
            raise Bw24Error(f"tokenizer.model: damaged: field {key >> 3} of {size} bytes, {len(raw) - at} are left")
        yield key >> 3, raw[at : at + size]
        at += size


def _from_sentencepiece(path: Path, data: Mapping[str, Any], settings: Mapping[str, Any]) -> _Vocab:
    import sentencepiece

    raw = read_file(path)
    parts = [(number, value) for number, value in _fields(raw) if number in (2, 3) and type(value) is bytes]
    trainer = dict(f for number, value in parts if number == 2 for f in _fields(value))
    normal = dict(f for number, value in parts if number == 3 for f in _fields(value))
    if trainer.get(3, 1) != 2:
        raise Bw24Error(f"tokenizer.model: expected a vocabulary of type BPE (2), found type {trainer.get(3, 1)}")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(raw)
    except RuntimeError as error:
        raise Bw24Error(f"tokenizer.model: {' '.join(str(error).split())[:200]}") from None
    vocab = _Vocab()
    vocab.scores = {}
    for i in range(processor.GetPieceSize()):
        kind = (UNKNOWN if processor.IsUnknown(i) else CONTROL if processor.IsControl(i) else UNUSED if processor.IsUnused(i)
                else BYTE if processor.IsByte(i) else NORMAL)
        text = processor.IdToPiece(i)
        vocab.put(i, text, kind, "tokenizer.model")
        vocab.scores[i] = processor.GetScore(i)
    for number, value in _fields(raw):  # user-defined pieces: the processor does not tell them apart
        if number == 1 and type(value) is bytes:
            piece = dict(_fields(value))
            if piece.get(3) == 4 and (i := processor.PieceToId(piece[1].decode("utf-8", "replace"))) in vocab.kinds:
                vocab.kinds[i] = USER_DEFINED
    bos = settings.get("add_bos_token")
    vocab.keys |= {"model": "llama", "pre": "default", "add_space_prefix": normal.get(3, 1) == 1,
                   "add_bos_token": bos if type(bos) is bool else True}
    before = set(vocab.texts)
    _add_tokens(vocab, data, settings)
    for token in vocab.texts:
        if token not in before or vocab.kinds[token] == USER_DEFINED:
            vocab.texts[token] = vocab.texts[token].replace(SPACE_MARK, " ") if vocab.kinds[token] == USER_DEFINED else vocab.texts[token]
            vocab.scores[token] = ADDED_SCORE
    return vocab


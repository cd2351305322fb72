"""SentencePiece vocabularies: a model file for the `sentencepiece` library made from pieces, scores and kinds.

Owns the few protobuf fields such a file needs. Refuses to know special tokens, BOS and EOS: a fragment holds none.
"""

from __future__ import annotations

import struct

import numpy as np
import sentencepiece

from .errors import Bw24Error
from .tokenizer_vocab import BYTE, BYTE_TEXT, CONTROL, NORMAL, PREFIX, SPACE_MARK, UNKNOWN, USER_DEFINED, Vocab

# Fields of sentencepiece_model.proto. A key byte is field number * 8 + wire type (0 varint, 2 length-delimited, 5 four bytes).
_PIECE, _TRAINER, _NORMALIZER = b"\x0a", b"\x12", b"\x1a"  # ModelProto: pieces 1, trainer_spec 2, normalizer_spec 3
_TEXT, _SCORE = b"\x0a", b"\x15"  # SentencePiece: piece 1, score 2
_TYPE = {UNKNOWN: b"\x18\x02", BYTE: b"\x18\x06"}  # SentencePiece: type 3; a piece without one is normal
_BPE_MODEL = b"\x18\x02"  # TrainerSpec: model_type 3 = BPE
_BYTE_FALLBACK = b"\x98\x02\x01"  # TrainerSpec: byte_fallback 35 = true
_IDENTITY = b"\x0a\x08identity\x18\x00\x20\x00\x28\x01"  # NormalizerSpec: no dummy prefix, spaces kept, spaces written as U+2581


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def model_bytes(vocab: Vocab, unknown: int) -> bytes:
    """A serialized ModelProto. `unknown`: index of the piece for what nothing covers, len(texts) for one added at the end.

    Control, user-defined and unused pieces are declared normal: special tokens are cut out of the text before it gets here, and what is
    left may merge into any piece, as in llama.cpp.
    """
    pack, out = struct.Struct("<f").pack, bytearray()  # one buffer: a list of parts would take 80 MB for 262144 pieces
    lengths = [_varint(n) for n in range(256)]
    texts, kinds, scores = vocab.texts, vocab.kinds, vocab.scores
    if unknown == len(texts):
        name = "<no token>"
        while name in vocab.ids:
            name += ">"
        texts, kinds, scores = [*texts, name], kinds + bytes([UNKNOWN]), np.append(scores, np.float32(0))
    for index, (text, score, kind) in enumerate(zip(texts, scores, kinds, strict=True)):
        raw = text.encode()
        tail = _TYPE[UNKNOWN] if index == unknown else _TYPE[BYTE] if kind == BYTE else b""
        size = len(raw)
        body = b"".join((_TEXT, lengths[size] if size < 256 else _varint(size), raw, _SCORE, pack(score), tail))
        size = len(body)
        out += _PIECE + (lengths[size] if size < 256 else _varint(size)) + body
    trainer = _BPE_MODEL + (_BYTE_FALLBACK if _has_all_bytes(vocab) else b"")
    out += b"".join((_TRAINER, _varint(len(trainer)), trainer, _NORMALIZER, _varint(len(_IDENTITY)), _IDENTITY))
    return bytes(out)


def _has_all_bytes(vocab: Vocab) -> bool:
    return len({BYTE_TEXT.fullmatch(vocab.texts[i])[1].upper() for i, k in enumerate(vocab.kinds) if k == BYTE}) == 256


class Pieces:
    """Encoder of one vocabulary. lead_space: text that begins a prompt or follows a special token gets a space in front."""

    def __init__(self, vocab: Vocab, lead_space: bool):
        if vocab.scores is None:
            raise Bw24Error(f"{PREFIX}scores: the key is missing; a vocabulary of model 'llama' merges by score")
        self.vocab, self.lead_space = vocab, lead_space
        unknown = vocab.kinds.find(UNKNOWN)
        if unknown < 0:
            role = vocab.roles.get("unk")
            unknown = len(vocab.texts) if role is None or vocab.kinds[role] in (NORMAL, BYTE) else role
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_bytes(vocab, unknown))
        except (RuntimeError, OverflowError, struct.error) as error:
            raise Bw24Error(f"{PREFIX}tokens: sentencepiece refused the vocabulary: {' '.join(str(error).split())}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of a fragment without special tokens."""
        ids = self._processor.encode(text)
        count = len(self.vocab.texts)
        if ids and max(ids) >= count:
            raise Bw24Error(f"{PREFIX}tokens: neither a byte nor an unknown token covers {ascii(text[:40])}")
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; a special token's are its text; an unused one has none."""
        text, kind = self.vocab.texts[token], self.vocab.kinds[token]
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            return text.encode()
        if kind == BYTE:
            return bytes([int(BYTE_TEXT.fullmatch(text)[1], 16)])
        return text.replace(SPACE_MARK, " ").encode() if kind == NORMAL else b""
